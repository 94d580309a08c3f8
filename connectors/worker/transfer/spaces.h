/* worker/transfer/spaces.h -- the spaces of the base model and of adapters; the transfer thread. */
#ifndef KVX_WORKER_SPACES_H
#define KVX_WORKER_SPACES_H

#include "worker/state.h"

/* The number of an adapter, what names the weights, or the GPU of a place. */
typedef struct kvx_wadapter {
	kvx_wjob_t job;
	uint32_t number;
	uint32_t place; /* not KVX_IN_HOST: the text is the UUID of its GPU */
	char text[];
} kvx_wadapter_t;

void kvx_wspace_add_adapter(kvx_worker_t *worker, const kvx_wadapter_t *adapter);
void kvx_wspaces_poll(kvx_worker_t *worker, uint64_t now);
void kvx_wspaces_close(kvx_worker_t *worker);
/* A space: the adapter's number, and where its blocks are. */
typedef struct kvx_wspace_ref {
	uint32_t number, place;
} kvx_wspace_ref_t;
/* OK: *p_space; PENDING while it is being opened; else why there is none. */
kvc_status_t kvx_wspace_get(kvx_worker_t *worker, kvx_wspace_ref_t ref, uint64_t now, const kvx_wspace_t **p_space);
/* No daemon, or its heartbeat has not moved for 50 ms. */
int kvx_daemon_is_silent(const kvx_worker_t *worker);

#endif
