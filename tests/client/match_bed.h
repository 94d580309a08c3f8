/* match_bed.h -- a mirror written by the test, and as much of an attachment as a match looks at. */
#ifndef TESTS_CLIENT_MATCH_BED_H
#define TESTS_CLIENT_MATCH_BED_H

#include "impl.h"

#include "core/block/mirror.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include <sys/mman.h>

#define MAX_KEYS 9000u

typedef struct bed {
	kv_test_env_t t;
	kvc_t kvc;
	kvc_space_t space;
	kvc_map_t map;
	uint64_t fork_guard;
	uint64_t bytes;
	kvd_mirror_t mirror; /* the daemon's, who writes it */
	void *memory;
	kv_key_t *keys;
} bed_t;

/* One full group; kvc_groups_take() gives others. */
static inline void bed_make(bed_t *bed, uint64_t buckets)
{
	memset(bed, 0, sizeof *bed);
	kv_test_env_init(&bed->t);
	bed->fork_guard = KVC_FORK_GUARD;
	bed->kvc.env = bed->t.env;
	bed->kvc.fork_guard = &bed->fork_guard;
	bed->bytes = kvd_mirror_size(buckets * 16 / 9);
	bed->memory = mmap(NULL, bed->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(bed->memory, MAP_FAILED);
	kvd_mirror_init(&bed->mirror, bed->memory, buckets * 16 / 9, 7);
	assert_int_equal(bed->mirror.header->bucket_count, buckets);
	kvd_mirror_set_epoch(&bed->mirror, 3, 1);
	kvd_mirror_set_heartbeat(&bed->mirror, kv_now_ns(&bed->t.env));

	bed->map.stale_ns = KV_MIRROR_STALE_NS;
	bed->map.mirror = bed->mirror.header;
	bed->map.buckets = bed->mirror.buckets;
	bed->map.bucket_mask = buckets - 1;
	bed->map.epochs = bed->mirror.epochs;
	atomic_store(&bed->kvc.map, &bed->map);
	bed->space.kvc = &bed->kvc;
	bed->space.hash_tokens = 16;
	assert_int_equal(kvc_groups_take(&bed->space, &(kv_group_t){.block_tokens = 16}, 1), KV_OK);
	atomic_store(&bed->space.id, 3);
	atomic_store(&bed->space.epoch, 1);
	bed->keys = calloc(MAX_KEYS, sizeof *bed->keys);
	kv_test_fill(&bed->t.rng, bed->keys, MAX_KEYS * sizeof *bed->keys);
}

static inline void bed_free(bed_t *bed)
{
	munmap(bed->memory, bed->bytes);
	free(bed->keys);
}

/* The block with key i is in these tiers; 0: in none. */
static inline void bed_set(bed_t *bed, uint32_t i, uint8_t tiers)
{
	assert_int_equal(kvd_mirror_set(&bed->mirror, &bed->keys[i], 0, tiers), KV_OK);
}

/* The daemon begins, or ends, to write in the bucket of key i. */
static inline void bed_lock(bed_t *bed, uint32_t i, int locked)
{
	_Atomic uint32_t *seq = &bed->mirror.buckets[kv_key_hash(&bed->keys[i]) & bed->mirror.mask].seq;

	assert_int_equal(atomic_fetch_add(seq, 1u) & 1u, locked ? 0 : 1);
}

#endif
