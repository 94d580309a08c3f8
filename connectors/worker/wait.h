/* worker/wait.h -- gates threads sleep at, and the queue from the engine's thread to the transfer thread. */
#ifndef KVX_WAIT_H
#define KVX_WAIT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define KVX_WORKER_QUEUE 1024u /* jobs submitted and not taken yet */

/* Threads sleep at it until it is opened. */
typedef struct kvx_gate {
	_Atomic uint32_t seq;
	_Atomic uint32_t waiters;
} kvx_gate_t;
uint32_t kvx_gate_read(kvx_gate_t *gate);
/* Sleep until the gate has been opened since `seen`, or for timeout_ns. */
void kvx_gate_wait(kvx_gate_t *gate, uint32_t seen, uint64_t timeout_ns);
void kvx_gate_open(kvx_gate_t *gate);
void kvx_cpu_relax(void);

typedef enum kvx_wjob_kind { KVX_WJOB_LOAD, KVX_WJOB_SAVE, KVX_WJOB_SPACE } kvx_wjob_kind_t;

/* First member of everything that goes through the queue. */
typedef struct kvx_wjob {
	kvx_wjob_kind_t kind;
	struct kvx_wjob *next;      /* in the engine's list */
	struct kvx_wjob *next_run;  /* in the transfer thread's list */
	_Atomic uint32_t completed; /* the transfer thread does not use it any longer */
} kvx_wjob_t;

/* To the end of a list of the engine's thread. */
static inline void kvx_wjob_append(kvx_wjob_t ***p_end, kvx_wjob_t *job)
{
	job->next = NULL;
	**p_end = job;
	*p_end = &job->next;
}

/* One producer, one consumer. */
typedef struct kvx_queue {
	_Atomic uint32_t head, tail; /* put, taken */
	kvx_wjob_t *ring[KVX_WORKER_QUEUE];
} kvx_queue_t;
int kvx_queue_put(kvx_queue_t *queue, kvx_wjob_t *job);
kvx_wjob_t *kvx_queue_take(kvx_queue_t *queue);
int kvx_queue_empty(kvx_queue_t *queue);

#endif
