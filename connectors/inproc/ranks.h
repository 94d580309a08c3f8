/* inproc/ranks.h -- the worker halves of this process: one for each part of the engine's cache. */
#ifndef KVX_INPROC_RANKS_H
#define KVX_INPROC_RANKS_H

#include "kvx.h"
#include "kvx_worker.h"

typedef struct kvx_ranks {
	uint32_t count;
	int on_devices; /* the cache lies in memory of CUDA devices */
	kvx_worker_t *worker[KVX_MAX_PARTS];
	kvc_writer_t saved[KVX_MAX_PARTS]; /* what each saves: the scheduler half's writers */
} kvx_ranks_t;

/* Who saves what. KVC_ERR_ARG: the parts of the cache are not the layout's heads, each once or in copies
 * (kvx_last_error()). */
kvc_status_t kvx_ranks_divide(kvx_ranks_t *ranks, const kvx_config_t *config);
/* Open one for each part; `common` has what they have in common. kvx_ranks_close() follows in any case. */
kvc_status_t kvx_ranks_open(kvx_ranks_t *ranks, const kvx_config_t *config, const kvx_worker_config_t *common);
void kvx_ranks_close(kvx_ranks_t *ranks);

/* 1: all are attached, and their self-tests have passed. */
int kvx_ranks_are_ready(const kvx_ranks_t *ranks);
/* Execute a step message whose step computes nothing. */
void kvx_ranks_run_step(const kvx_ranks_t *ranks, const void *message, size_t len);
/* What the engine enqueues from now on comes after copies of loads that have ended, also of those that the device has
 * failed to tell the end of. */
void kvx_ranks_order_loads(const kvx_ranks_t *ranks);
/* Wait until a load that one of them copies has ended. The caller copies as well. */
void kvx_ranks_wait(const kvx_ranks_t *ranks, uint32_t us);
/* 1: one of them still has to read one of these blocks. */
int kvx_ranks_have_unsaved(const kvx_ranks_t *ranks, const uint32_t *blocks, uint32_t n);
/* Counters of all together that this process looks at. */
void kvx_ranks_get_stats(const kvx_ranks_t *ranks, kvx_worker_stats_t *stats);

#endif
