/* worker/base/submit.h -- jobs change hands between the engine's thread and the transfer thread; gates that threads
 * sleep at. */
#ifndef KVX_SUBMIT_H
#define KVX_SUBMIT_H

#include "worker/base/state.h"

uint32_t kvx_gate_read(kvx_gate_t *gate);
/* Sleep until the gate has been opened since `seen`, or for timeout_ns. */
void kvx_gate_wait(kvx_gate_t *gate, uint32_t seen, uint64_t timeout_ns);
void kvx_gate_open(kvx_gate_t *gate);
/* One round of waiting: spin for a moment, then sleep at the gate. *p_spins is 0 at first, and after each success. */
void kvx_gate_pause(kvx_gate_t *gate, uint32_t seen, uint32_t *p_spins, uint64_t nap_ns);
void kvx_cpu_relax(void);

/* Wake the transfer thread if it sleeps. */
void kvx_transfer_wake(kvx_worker_t *worker);
/* To the end of a list of the engine's thread. */
void kvx_wjob_append(kvx_wjob_t ***p_end, kvx_wjob_t *job);
/* To the transfer thread. */
void kvx_wjob_submit(kvx_worker_t *worker, kvx_wjob_t *job);
/* The job belongs to the engine's thread again. Called by the transfer thread, or by the engine's for a job that was
 * never submitted. */
void kvx_wjob_complete(kvx_worker_t *worker, kvx_wjob_t *job);

#endif
