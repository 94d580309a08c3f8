/* match_bed.h -- a mirror written by the test, and as much of an attachment as a match looks at. */
#ifndef TESTS_CLIENT_MATCH_BED_H
#define TESTS_CLIENT_MATCH_BED_H

#include "impl.h"

#include "kv_cmocka.h"
#include "kv_test.h"
#include "mirror_writer.h"

#include <sys/mman.h>

#define MAX_KEYS 9000u

typedef struct bed {
	kv_test_env_t t;
	kvc_t kvc;
	kvc_space_t space;
	kvc_map_t map;
	uint64_t fork_guard;
	uint64_t bytes;
	uint8_t *mirror;
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
	bed->bytes = mirror_bytes(buckets);
	bed->mirror = mmap(NULL, bed->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	assert_ptr_not_equal(bed->mirror, MAP_FAILED);
	mirror_init(bed->mirror, buckets, 7);
	mirror_epoch(bed->mirror, 3, 1);
	mirror_beat(bed->mirror, kv_now_ns(&bed->t.env));

	bed->map.stale_ns = KV_MIRROR_STALE_NS;
	bed->map.mirror = (const kv_mirror_header_t *)bed->mirror;
	bed->map.buckets = (const kv_mirror_bucket_t *)(bed->mirror + bed->map.mirror->buckets_offset);
	bed->map.bucket_mask = buckets - 1;
	bed->map.epochs = (const _Atomic uint64_t *)(const void *)(bed->mirror + bed->map.mirror->epochs_offset);
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
	munmap(bed->mirror, bed->bytes);
	free(bed->keys);
}

#endif
