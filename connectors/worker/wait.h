/* worker/wait.h -- gates that threads sleep at. */
#ifndef KVX_WAIT_H
#define KVX_WAIT_H

#include <stdatomic.h>
#include <stdint.h>

/* Threads sleep at it until it is opened. */
typedef struct kvx_gate {
	_Atomic uint32_t seq;
	_Atomic uint32_t waiters;
} kvx_gate_t;
uint32_t kvx_gate_read(kvx_gate_t *gate);
/* Sleep until the gate has been opened since `seen`, or for timeout_ns. */
void kvx_gate_wait(kvx_gate_t *gate, uint32_t seen, uint64_t timeout_ns);
void kvx_gate_open(kvx_gate_t *gate);
/* One round of waiting: spin for a moment, then sleep at the gate. *p_spins is 0 at first, and after each success. */
void kvx_gate_pause(kvx_gate_t *gate, uint32_t seen, uint32_t *p_spins, uint64_t nap_ns);
void kvx_cpu_relax(void);

#endif
