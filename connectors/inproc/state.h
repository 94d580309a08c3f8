/* inproc/state.h -- the state of a kvx_t: loads, saves and the self-test of an engine in one process. */
#ifndef KVX_INPROC_STATE_H
#define KVX_INPROC_STATE_H

#include "kvx.h"

#include "kv/shm.h"
#include "kvk/move.h"

/* What loads and saves have in common. */
typedef struct kvx_job {
	kvx_t *kvx;
	struct kvx_job *next;     /* all jobs of the kvx_t, oldest first */
	struct kvx_job **link;    /* what points at this one */
	const kvk_paged_t *paged; /* the engine's cache, or the self-test's */
	uint64_t start_ns;
	uint64_t deadline_ns;
	uint32_t n;       /* blocks of the prefix */
	kvc_key_t *keys;  /* [n], in the same allocation as the job */
	uint32_t *blocks; /* [n] */
	int is_save;
	int internal; /* of the self-test: in no counter */
} kvx_job_t;

struct kvx_load {
	kvx_job_t job;
	kvc_lease_t *lease; /* NULL once ended */
	uint32_t skip;
	uint32_t done;      /* blocks copied, verified and confirmed, skip included */
	uint64_t silent_ns; /* kvx_silent_too_long() */
	kvx_load_result_t result;
};

typedef enum kvx_save_step { KVX_SAVE_ASKED, KVX_SAVE_COPYING, KVX_SAVE_WAITING, KVX_SAVE_RESTING } kvx_save_step_t;

struct kvx_save {
	kvx_job_t job;
	uint32_t *tokens; /* [n][block_tokens]: events name them */
	kvc_put_t *put;   /* NULL once ended, or while RESTING */
	kvx_save_step_t step;
	uint32_t from;    /* the put is of blocks [from, n) */
	uint32_t granted; /* blocks of it the daemon took */
	uint32_t done;    /* of these: copied and handed in */
	uint32_t tries;
	uint64_t rest_until_ns;
	kvx_save_result_t result;
};

typedef enum kvx_inproc_test_step {
	KVX_INPROC_TEST_IDLE,
	KVX_INPROC_TEST_SAVING,
	KVX_INPROC_TEST_LOADING,
	KVX_INPROC_TEST_PASSED,
	KVX_INPROC_TEST_FAILED
} kvx_inproc_test_step_t;

typedef struct kvx_inproc_test {
	kvx_inproc_test_step_t step;
	kvk_paged_t paged; /* two blocks in the engine's layout: 0 is written, 1 is read back */
	void **base;
	uint8_t *memory;
	size_t stride;    /* bytes of a block of one layer, padding included */
	size_t payload;   /* bytes of it that are moved */
	uint32_t *tokens; /* the reserved prefix: one block */
	kvx_save_t *save;
	kvx_load_t *load;
	uint64_t next_ns; /* not before */
} kvx_inproc_test_t;

struct kvx {
	kvc_t *kvc;
	kvc_space_t *space;   /* NULL until opened once */
	kvc_space_t *opening; /* asked for; NULL: not now */
	uint64_t next_open_ns;
	uint64_t incarnation; /* last seen */
	uint32_t roles;
	uint32_t load_ms, save_ms;
	uint32_t jobs, max_jobs;
	kvx_job_t *first;
	kvk_layout_t layout;
	kvk_geometry_t geometry;
	kvk_paged_t paged;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	char groups_text[32];
	char *identity_text; /* storage of the strings of `identity` */
	kvc_identity_t identity;
	uint32_t batch;    /* blocks a kvx_poll() may move */
	kvk_move_t *moves; /* [batch] */
	uint64_t *leaves;  /* [batch][heads][leaves] */
	kvx_inproc_test_t self_test;
	kvx_stats_t stats;
};

/* Heads times leaves of a block. */
static inline uint32_t kvx_leaf_count(const kvx_t *kvx)
{
	return kvx->geometry.heads * kvx->geometry.leaves;
}

#endif
