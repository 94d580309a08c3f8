/* storage/cpu/slab/idle.h -- time that nobody else wants.
 *
 * A thread that runs only when the machine is otherwise idle (SCHED_IDLE) must hold nothing that others wait for: on a
 * busy machine they would wait for seconds, and making pages holds the lock of the whole address space. So it does
 * nothing but tell an ordinary thread that there is such time.
 */
#ifndef KVS_CPU_IDLE_H
#define KVS_CPU_IDLE_H

#include "kv/env.h"
#include "kv/status.h"

typedef struct kvs_idle kvs_idle_t;

/* KV_ERR_NOMEM: no thread, or no memory. Signals are blocked in the thread as in the caller. */
kv_status_t kvs_idle_start(const kv_env_t *env, kvs_idle_t **p_idle);
/* Until there is such time, or kvs_idle_wake() or _stop(). One thread waits. */
void kvs_idle_wait(kvs_idle_t *idle);
/* The wait under way, or the next, is over. Any thread. */
void kvs_idle_wake(kvs_idle_t *idle);
/* Waits are over, now and from now on. Any thread. */
void kvs_idle_stop(kvs_idle_t *idle);
/* No wait follows. Does not wait for the thread, which may not get any time for long; what it needs goes with it.
 * NULL is fine. */
void kvs_idle_free(kvs_idle_t *idle);

#endif
