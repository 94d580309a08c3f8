/* inproc/job.h -- an engine in one process: a scheduler half, a worker half, and its loads and saves.
 *
 * Each load and each save is a request of the scheduler half, which looks up, leases and reserves; the worker halves,
 * one for each part of the cache, copy. kvx_poll() is a step of an engine that computes nothing (docs/decisions/039).
 */
#ifndef KVX_INPROC_JOB_H
#define KVX_INPROC_JOB_H

#include "inproc/ranks.h"
#include "kvx.h"
#include "kvx_scheduler.h"

/* What loads and saves have in common. */
typedef struct kvx_job {
	kvx_t *kvx;
	struct kvx_job *next;  /* of the same kind, oldest first */
	struct kvx_job **link; /* what points at this one */
	uint64_t id;           /* of the request */
	kvx_ask_t ask;         /* the request, with that id */
	uint64_t start_ns, deadline_ns;
	uint32_t n, cap;   /* blocks that it has; of the prefix */
	uint32_t n_tokens; /* of the prefix: of a send or receive the last block may have fewer than a whole one */
	uint32_t *blocks;  /* [cap], in the same allocation as the job */
} kvx_job_t;

typedef enum kvx_load_step {
	KVX_LOAD_LEASING, /* the lease was asked for */
	KVX_LOAD_COPYING, /* from its step message until the worker half has named it: blocks may be written */
	KVX_LOAD_COPIED,
	KVX_LOAD_IDLE, /* of a receive: a piece has ended, with `cause` */
	KVX_LOAD_ENDED
} kvx_load_step_t;

/* A load has one piece, the whole prefix. A receive is a load of many: what was handed over since the last one. */
struct kvx_load {
	kvx_job_t job;
	kvx_load_step_t step;
	int aborted;
	int received;        /* it is a kvx_recv_t, which begins the pieces and ends the load */
	uint32_t skip;       /* blocks that were there before */
	uint32_t from, to;   /* blocks of the piece; [0, from) are in the cache */
	uint32_t ranks_left; /* while it is copied: worker halves that have not named it */
	int looked_up;       /* once at least, in this piece */
	uint32_t in_cpu;     /* tokens of the piece that the first lookup has found in memory */
	kvc_status_t cause;
	kvx_hit_t hit;
	kvx_load_result_t result;
};

struct kvx_save {
	kvx_job_t job;
	int sent; /* it is a kvx_send_t, which ends it */
	int more; /* of a send: blocks may follow, so those that were read may be read again */
	kvx_save_result_t result;
};

typedef struct kvx_buffered kvx_buffered_t;

struct kvx {
	kvx_scheduler_t *scheduler;
	kvx_ranks_t ranks;
	uint32_t roles, load_ms, save_ms;
	uint32_t block_tokens, max_blocks;
	kvx_job_t *loads; /* receives, too */
	kvx_job_t *saves, *sends;
	kvx_buffered_t *buffered; /* what was inserted, as long as no consumer has taken it */
	uint64_t buffered_bytes, max_buffered_bytes;
	uint32_t block_bytes; /* in the pool */
	uint32_t jobs;        /* all of them */
	uint32_t pending;     /* not ended */
	uint32_t copying;     /* loads */
	uint32_t handovers;   /* sends and receives */
	int begun;            /* loads, since the last poll */
	uint64_t last_id;
	uint64_t *failed; /* bit a block: it was to be loaded, and was not */
	kvx_stats_t stats;
};

uint64_t kvx_now_ns(void);
/* Build the step message, and execute it. */
void kvx_run_message(kvx_t *kvx);

/* What a new job needs to know of its kind. */
typedef struct kvx_job_kind {
	uint32_t role;        /* that this process needs */
	uint32_t deadline_ms; /* of a prefix that names none */
	size_t size;
	kvx_job_t **first; /* the list it goes to */
	int grows;         /* it begins without blocks */
	int partial;       /* tokens after the last whole block count */
} kvx_job_kind_t;
/* Copy the prefix and begin its request. KVC_ERR_ARG: the prefix is not sound, or the role is another one;
 * KVC_ERR_LIMIT: too many jobs; KVC_ERR_NOMEM; KVC_ERR_UNREACHABLE: no daemon was ever there. */
kvc_status_t kvx_job_create(kvx_t *kvx, const kvx_prefix_t *prefix, const kvx_job_kind_t *kind, kvx_job_t **p_job);
/* The first n blocks of its prefix are blocks[n]; those it has already stay as they are. KVC_ERR_ARG: one of them is no
 * block, or n is more than the prefix has or fewer than there are. KVC_ERR_NOMEM. */
kvc_status_t kvx_job_grow(kvx_job_t *job, const uint32_t *blocks, uint32_t n);
void kvx_job_destroy(kvx_job_t *job);
/* Tokens of the prefix's first n blocks. */
uint32_t kvx_job_tokens(const kvx_job_t *job, uint32_t n);
/* The end of a wait that begins now. */
uint64_t kvx_deadline_ns(uint32_t ms, uint32_t or_ms);

/* Match again where the lease was not granted yet. */
void kvx_loads_advance(kvx_t *kvx, uint64_t now);
/* End the loads that the worker half has completed. */
void kvx_loads_collect(kvx_t *kvx);
/* See how far they are; reserve again what was refused. */
void kvx_saves_advance(kvx_t *kvx, uint64_t now);

/* ---- for sends and receives ------------------------------------------------------------------ */

/* As kvx_saves_advance(), of one. Of a send it ends the save only when that has failed. */
void kvx_save_advance(kvx_save_t *save, uint64_t now);
/* Its end, and why; the engine's blocks are read no longer. */
void kvx_save_finish(kvx_save_t *save, kvc_status_t status);
/* The same of one that is PENDING and not wanted any longer. */
void kvx_save_abort(kvx_save_t *save);
/* The first `skip` blocks of the prefix are in the cache; no piece has begun. */
void kvx_load_init(kvx_load_t *load, uint32_t skip);
/* Begin a piece: up to the prefix's block `to`. */
void kvx_load_begin_piece(kvx_load_t *load, uint32_t to, uint64_t now);
/* The end of the whole load, between two pieces. */
void kvx_load_finish(kvx_load_t *load, kvc_status_t cause);
/* End it in the middle, and have the blocks back. */
void kvx_load_abort(kvx_load_t *load);

void kvx_sends_advance(kvx_t *kvx, uint64_t now);
void kvx_recvs_advance(kvx_t *kvx, uint64_t now);
/* What they have beside their jobs, at the end of the connector. */
void kvx_sends_free(kvx_t *kvx);
void kvx_recvs_free(kvx_t *kvx);

#endif
