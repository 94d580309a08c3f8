/* worker/transfer/spaces.h -- the spaces of the base model and of adapters; the transfer thread. */
#ifndef KVX_WORKER_SPACES_H
#define KVX_WORKER_SPACES_H

#include "worker/base/state.h"

/* A space: the number of its names, and where its blocks are. */
typedef struct kvx_wspace_ref {
	uint32_t number, mem;
} kvx_wspace_ref_t;

/* What a number stands for, or the GPU of a mem. */
struct kvx_wname {
	kvx_wjob_t job;
	kvx_wspace_ref_t ref;
	uint32_t adapter; /* offset of its text; the weights' is first. Of a mem not KVX_HOST_MEM: the GPU's UUID */
	char text[];
};

/* Takes it over. */
void kvx_wspace_add_name(kvx_worker_t *worker, kvx_wname_t *name);
void kvx_wspaces_poll(kvx_worker_t *worker, uint64_t now);
void kvx_wspaces_close(kvx_worker_t *worker);
/* OK: *p_space; PENDING while it is being opened; else why there is none. */
kvc_status_t kvx_wspace_get(kvx_worker_t *worker, kvx_wspace_ref_t ref, uint64_t now, const kvx_wspace_t **p_space);
/* No daemon, or its heartbeat has not moved for 50 ms. */
int kvx_daemon_is_silent(const kvx_worker_t *worker);

#endif
