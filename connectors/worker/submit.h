/* worker/submit.h -- jobs change hands between the engine's thread and the transfer thread. */
#ifndef KVX_SUBMIT_H
#define KVX_SUBMIT_H

#include "worker/state.h"

/* Wake the transfer thread if it sleeps. */
void kvx_transfer_wake(kvx_worker_t *worker);
/* To the end of a list of the engine's thread. */
void kvx_wjob_append(kvx_wjob_t ***p_end, kvx_wjob_t *job);
/* To the transfer thread. */
void kvx_wjob_submit(kvx_worker_t *worker, kvx_wjob_t *job);
/* All that were submitted, oldest first. Transfer thread. */
kvx_wjob_t *kvx_wjobs_take(kvx_worker_t *worker);
/* The job belongs to the engine's thread again. Called by the transfer thread, or by the engine's for a job that was
 * never submitted. */
void kvx_wjob_complete(kvx_worker_t *worker, kvx_wjob_t *job);
/* Publish how many puts still wait for an answer. */
void kvx_transfer_count_unacked(kvx_worker_t *worker);

#endif
