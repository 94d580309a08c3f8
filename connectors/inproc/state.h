/* inproc/state.h -- an engine in one process: a scheduler half, a worker half, and its loads and saves.
 *
 * Each load and each save is a request of the scheduler half, which looks up, leases and reserves; the worker half
 * copies. kvx_poll() is a step of an engine that computes nothing (docs/decisions/039).
 */
#ifndef KVX_INPROC_STATE_H
#define KVX_INPROC_STATE_H

#include "kvx.h"
#include "kvx_scheduler.h"
#include "kvx_worker.h"

/* What loads and saves have in common. */
typedef struct kvx_job {
	kvx_t *kvx;
	struct kvx_job *next;  /* of the same kind, oldest first */
	struct kvx_job **link; /* what points at this one */
	uint64_t id;           /* of the request */
	uint64_t start_ns, deadline_ns;
	uint32_t n;       /* blocks of the prefix */
	uint32_t *blocks; /* [n], in the same allocation as the job */
} kvx_job_t;

typedef enum kvx_load_step {
	KVX_LOAD_LEASING, /* the lease was asked for */
	KVX_LOAD_COPYING, /* from its step message until the worker half has named it: blocks may be written */
	KVX_LOAD_COPIED,
	KVX_LOAD_ENDED
} kvx_load_step_t;

struct kvx_load {
	kvx_job_t job;
	kvx_load_step_t step;
	int aborted;
	uint32_t skip;
	int looked_up;   /* once at least */
	int ended;       /* for both halves: the worker half has named it, or never will */
	uint32_t in_cpu; /* tokens beyond skip that the first lookup has found in memory */
	kvx_hit_t hit;
	kvx_load_result_t result;
};

struct kvx_save {
	kvx_job_t job;
	kvx_save_result_t result;
};

struct kvx {
	kvx_scheduler_t *scheduler;
	kvx_worker_t *worker;
	uint32_t roles, load_ms, save_ms;
	uint32_t block_tokens, max_blocks;
	kvx_job_t *loads, *saves;
	uint32_t jobs;    /* all of them */
	uint32_t pending; /* not ended */
	uint32_t copying; /* loads */
	int begun;        /* loads, since the last poll */
	uint64_t last_id;
	uint64_t *failed; /* bit a block: it was to be loaded, and was not */
	kvx_stats_t stats;
};

#endif
