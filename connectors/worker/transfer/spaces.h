/* worker/transfer/spaces.h -- the spaces of the base model and of adapters; the transfer thread. */
#ifndef KVX_WORKER_SPACES_H
#define KVX_WORKER_SPACES_H

#include "worker/state.h"

/* The number of an adapter, or what names the weights. */
typedef struct kvx_wadapter {
	kvx_wjob_t job;
	uint32_t number;
	char text[];
} kvx_wadapter_t;

void kvx_wspace_add_adapter(kvx_worker_t *worker, const kvx_wadapter_t *adapter);
void kvx_wspaces_poll(kvx_worker_t *worker, uint64_t now);
void kvx_wspaces_close(kvx_worker_t *worker);
/* OK: *p_space; PENDING while it is being opened; else why there is none. */
kvc_status_t kvx_wspace_get(kvx_worker_t *worker, uint32_t number, uint64_t now, const kvx_wspace_t **p_space);
/* No daemon, or its heartbeat has not moved for 50 ms. */
int kvx_daemon_is_silent(const kvx_worker_t *worker);

#endif
