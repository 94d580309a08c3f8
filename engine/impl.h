/* impl.h -- the engine's inside: its own view of a request, and the list of them. */
#ifndef KVE_IMPL_H
#define KVE_IMPL_H

#include "kve/engine.h"

typedef struct kve_job kve_job_t;

struct kve_job {
	kve_request_t request; /* first: what the caller holds */
	kve_job_t *next;       /* in order of arrival */
	uint32_t *blocks;
	uint32_t n_blocks; /* 0: none taken, or given back */
	kvx_load_t *load;
	kvx_save_t *save; /* of the prompt, later of everything */
	kve_handover_t handover;
	uint32_t handover_ms;
	char transfer[KVC_MAX_TRANSFER + 1]; /* empty: made from the prompt */
	kvx_send_t *send;
	kvx_recv_t *recv;
	int last_save;   /* the save of everything has been started */
	int closed;      /* DONE, saved, and without blocks */
	int released;    /* the caller is through with it */
	uint32_t chosen; /* the next token */
	float *logits;   /* NULL: no log-probabilities are wanted */
};

struct kve_engine {
	kve_engine_config_t config; /* its model is that of the group */
	kve_group_t *own_group;     /* NULL: it has a group in common with others */
	kve_rank_t *rank;
	kve_cache_t cache;
	kvx_t *kvx; /* NULL: no store */
	kve_job_t *jobs;
	uint64_t next_id;
	uint32_t max_rows; /* of a step */
	uint32_t running;  /* jobs between WAITING and DONE */
	int is_computing;  /* a rank had tokens in the last step */
};

/* Attach a connector for this engine's cache. */
kv_status_t kve_store_attach(kve_engine_t *engine);

/* Allocate a job with everything it will need. NULL: out of memory. */
kve_job_t *kve_job_create(kve_engine_t *engine, const kve_ask_t *ask);
void kve_job_destroy(kve_job_t *job);
/* WAITING: take blocks and start to load, if there is room. */
void kve_job_admit(kve_engine_t *engine, kve_job_t *job);
/* LOADING: has the load, or the receive, ended? */
void kve_job_loaded(kve_engine_t *engine, kve_job_t *job);
/* `n` more tokens are in the cache; the next one has been chosen when all tokens are. */
void kve_job_computed(kve_engine_t *engine, kve_job_t *job, uint32_t n);
/* Move saves on; after DONE, give blocks back as soon as no copy reads them. */
void kve_job_tend(kve_engine_t *engine, kve_job_t *job);
/* End it now, wherever it is. */
void kve_job_abort(kve_engine_t *engine, kve_job_t *job);

#endif
