/* adopt_stage.h -- a pool of memory from elsewhere, a keeper that holds its descriptors, and the pool of the next
 * daemon. A block's digests follow from its number. */
#ifndef ADOPT_STAGE_H
#define ADOPT_STAGE_H

#include "pool_test.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SLAB_BYTES (256u << 10) /* 21 slots */
#define SLOTS      21u
#define STAGE_MAX  32u

typedef struct stage_held {
	char name[40];
	int fd;
} stage_held_t;

/* The keeper. `pid`: the descriptors are that process's. `from`: what is claimed comes from this one. */
typedef struct stage {
	struct stage *from;
	stage_held_t held[STAGE_MAX];
	uint32_t count, taken;
	pid_t pid;
	uint64_t slab_bytes;
	kv_metrics_t metrics;
	kv_test_env_t env;
} stage_t;

static inline stage_held_t *stage_find(stage_t *s, const char *name)
{
	for (uint32_t i = 0; i < s->count; i++) {
		if (strncmp(s->held[i].name, name, strlen(name)) == 0) {
			return &s->held[i];
		}
	}

	return NULL;
}

static inline void stage_hold(void *ctx, const char *name, int fd)
{
	stage_t *s = ctx;
	stage_held_t *held = stage_find(s, name);

	if (held && s->pid == 0) {
		close(held->fd);
	}
	if (!held) {
		assert_true(s->count < STAGE_MAX);
		held = &s->held[s->count];
		snprintf(held->name, sizeof held->name, "%s", name);
	}
	held->fd = s->pid ? fd : fcntl(fd, F_DUPFD_CLOEXEC, 0);
	/* A message comes whole or not at all. */
	atomic_thread_fence(memory_order_seq_cst);
	s->count += held == &s->held[s->count];
}

static inline void stage_drop(void *ctx, const char *name)
{
	stage_t *s = ctx;
	stage_held_t *held = stage_find(s, name);

	if (held) {
		if (s->pid == 0) {
			close(held->fd);
		}
		*held = s->held[--s->count];
	}
}

static inline int stage_claim(void *ctx, const char *name)
{
	stage_t *s = ((stage_t *)ctx)->from ? ((stage_t *)ctx)->from : ctx;
	const stage_held_t *held = stage_find(s, name);
	char path[64];

	if (!held) {
		return -1;
	}
	snprintf(path, sizeof path, "/proc/%d/fd/%d", s->pid ? (int)s->pid : (int)getpid(), held->fd);

	return open(path, O_RDONLY | O_CLOEXEC);
}

static inline int stage_memory(uint64_t bytes)
{
	int fd = memfd_create("stage", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);

	return fd;
}

static inline int stage_take(void *ctx)
{
	stage_t *s = ctx;

	s->taken++;

	return stage_memory(s->slab_bytes);
}

static inline void stage_init(stage_t *s)
{
	memset(s, 0, sizeof *s);
	s->slab_bytes = SLAB_BYTES;
	kv_test_env_init(&s->env);
}

static inline void stage_fini(stage_t *s)
{
	while (s->count > 0) {
		stage_drop(s, s->held[0].name);
	}
	assert_int_equal(kv_test_env_live(&s->env), 0);
}

/* The pool of a daemon, which adopts what is held. */
static inline kv_status_t stage_try_open(stage_t *s, uint32_t slabs, uint64_t incarnation, kvs_tier_t **p_pool)
{
	kvs_pool_config_t config = pool_config(&s->metrics, slabs * s->slab_bytes, s->slab_bytes);

	config.incarnation = incarnation;
	config.take = stage_take;
	config.take_ctx = s;
	config.memory = KV_SLAB_MEMFD;
	config.max_slabs = 127;
	config.hold = stage_hold;
	config.drop = stage_drop;
	config.claim = stage_claim;
	config.hold_ctx = s;

	return kvs_pool_open(&config, &s->env.env, p_pool);
}

static inline kvs_tier_t *stage_open(stage_t *s, uint32_t slabs, uint64_t incarnation)
{
	kvs_tier_t *pool = NULL;

	assert_int_equal(stage_try_open(s, slabs, incarnation, &pool), KV_OK);

	return pool;
}

static inline uint64_t stage_metric(stage_t *s, kv_metric_t id)
{
	return kv_metric_get(&s->metrics, id);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Block n of a space is at depth n + 1 below the one before. */
static inline kvs_meta_t stage_meta(uint8_t space, uint64_t epoch, uint32_t n)
{
	kvs_meta_t meta = {.epoch = epoch, .event_hash = n * 5u, .depth = n + 1};
	const uint64_t mine = n + 1u, above = n;

	memcpy(meta.key.b, &mine, sizeof mine);
	meta.key.b[15] = space;
	if (n > 0) {
		memcpy(meta.parent.b, &above, sizeof above);
		meta.parent.b[15] = space;
	}
	memset(meta.root, space, sizeof meta.root);

	return meta;
}

static inline uint32_t stage_number(const kvs_meta_t *meta)
{
	uint64_t mine;

	memcpy(&mine, meta->key.b, sizeof mine);

	return (uint32_t)(mine - 1u);
}

/* Its leaf digests. */
static inline void stage_leaves(const kvs_meta_t *meta, uint64_t leaves[6])
{
	for (uint64_t i = 0; i < 6; i++) {
		leaves[i] = kv_digest(meta, offsetof(kvs_meta_t, depth)) + i;
	}
}

static inline void stage_set_epoch(kvs_tier_t *pool, uint8_t space, uint64_t epoch)
{
	uint8_t root[32];
	const kvs_epoch_t e = {.root = root, .ns = "ns", .identity = "", .epoch = epoch};
	outcome_t o = {0, KV_OK};

	memset(root, space, sizeof root);
	assert_int_equal(kvs_epoch_set(pool, &e, record_outcome, &o), KV_OK);
}

/* A block on its way to `state`, as a put does it. */
static inline kv_status_t stage_put(kvs_tier_t *pool, uint32_t class, const kvs_meta_t *meta, kvs_state_t state,
				    kvs_loc_t *p_loc)
{
	static const kvs_leaf_span_t all = {0, 2, 0, 3};
	uint64_t leaves[6];
	kv_status_t status = kvs_alloc(pool, class, KVS_PUT, 40, meta, p_loc);

	if (status != KV_OK) {
		return status;
	}
	stage_leaves(meta, leaves);
	kvs_pool_set_leaves(pool, *p_loc, &all, leaves);
	kvs_pool_compute_roots(pool, *p_loc);
	if (state == KVS_FREE) {
		kvs_free(pool, *p_loc);
	} else if (state != KVS_PUT) {
		kvs_set_state(pool, *p_loc, state);
	}

	return KV_OK;
}

/* ---- what is found --------------------------------------------------------------------------- */

typedef struct stage_found {
	kvs_meta_t meta[STAGE_MAX * SLOTS];
	kvs_loc_t loc[STAGE_MAX * SLOTS];
	uint32_t count, depth;
	uint32_t refuse; /* blocks of this depth; 0: none */
	uint32_t wrong;  /* with digests of another block */
	kvs_tier_t *pool;
} stage_found_t;

static inline int stage_has_digests(kvs_tier_t *pool, kvs_loc_t loc, const kvs_meta_t *meta)
{
	kvs_slab_info_t info;
	uint64_t want[6];
	const uint64_t *table;
	int same;

	assert_int_equal(kvs_pool_slab(pool, kv_slot_slab(loc.slot), &info), KV_OK);
	table = mmap(NULL, info.digest_bytes, PROT_READ, MAP_SHARED, info.digest_fd, 0);
	assert_true(table != MAP_FAILED);
	stage_leaves(meta, want);
	same = memcmp(table + (size_t)kv_slot_index(loc.slot) * 6u, want, sizeof want) == 0;
	munmap((void *)(uintptr_t)table, info.digest_bytes);

	return same;
}

static inline kv_status_t stage_on_found(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	stage_found_t *found = arg;

	assert_int_equal(slot_class, 0);
	assert_true(meta->depth >= found->depth); /* parents first */
	found->depth = meta->depth;
	found->wrong += !stage_has_digests(found->pool, loc, meta);
	if (meta->depth == found->refuse) {
		return KV_ERR_NO_PARENT;
	}
	found->meta[found->count] = *meta;
	found->loc[found->count++] = loc;

	return KV_OK;
}

static inline void stage_recover(kvs_tier_t *pool, stage_found_t *found)
{
	const uint32_t refuse = found->refuse;

	memset(found, 0, sizeof *found);
	found->refuse = refuse;
	found->pool = pool;
	assert_int_equal(kvs_recover(pool, stage_on_found, found), KV_OK);
	check(pool);
}

#endif
