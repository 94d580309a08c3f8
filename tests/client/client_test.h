/* client_test.h -- what tests of libkvc against the fake daemon share. */
#ifndef TESTS_CLIENT_TEST_H
#define TESTS_CLIENT_TEST_H

#include "kvc.h"

#include "fake_daemon.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/shm.h"
#include "kv/status.h"

#include <unistd.h>

#define BED_KEYS 64u

typedef struct bed {
	char dir[64];
	char path[96];
	fake_t *fake;
	kvc_t *kvc;
	kvc_space_t *space;
	kvc_space_info_t info;
	kvc_key_t keys[BED_KEYS];
	uint32_t tokens[BED_KEYS * 16];
	uint8_t *src[BED_KEYS];
	uint8_t *dst[BED_KEYS];
} bed_t;

/* The bed of the case that runs. */
static bed_t bed;

#define BED_TIMEOUT_MS 20000u /* of calls: who runs into it has waited for nothing */

/* A knob of its fake daemon, to be set; what that has seen; how many requests with this code it has answered. */
#define KNOB(name)  (fake_knobs(bed.fake)->name)
#define SEEN(name)  (atomic_load(&fake_seen(bed.fake)->name))
#define ASKED(name) SEEN(asked[KV_CODE_##name])

/* ---- beds ------------------------------------------------------------------------------------ */

static inline uint64_t test_now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

/* The usual configuration, with what is set in this one. */
static inline kvc_config_t bed_config(const bed_t *bed, kvc_config_t config)
{
	config.struct_size = sizeof config;
	config.socket = bed->path;
	config.timeout_ms = config.timeout_ms ? config.timeout_ms : BED_TIMEOUT_MS;
	config.spin_us = 20;
	config.staging_blocks = 16;

	return config;
}

static inline kvc_identity_t bed_identity(void)
{
	return (kvc_identity_t){
		.struct_size = sizeof(kvc_identity_t),
		.model = "test",
		.weights = "r1",
		.dtype = "bf16",
		.rope = "none",
		.hash_tokens = 16,
		.layout = "kvk1 heads=2 layers=4 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0",
	};
}

static inline void bed_listen(bed_t *bed, const fake_geometry_t *geometry)
{
	memset(bed, 0, sizeof *bed);
	kv_test_dir_make(bed->dir, sizeof bed->dir);
	snprintf(bed->path, sizeof bed->path, "%s/s", bed->dir);
	bed->fake = fake_start(bed->path, geometry, 41);
}

static inline void bed_attach(bed_t *bed, kvc_config_t with)
{
	const kvc_config_t config = bed_config(bed, with);

	assert_int_equal(kvc_attach(&config, &bed->kvc), KVC_OK);
}

/* Space, keys of a prompt, and a source and a destination a block. */
static inline void bed_open(bed_t *bed)
{
	kvc_identity_t identity = bed_identity();
	kv_test_rng_t rng = {.state = kv_test_seed()};
	uint32_t n = 0;

	assert_int_equal(kvc_space_open(bed->kvc, &identity, &bed->space), KVC_OK);
	bed->info.struct_size = sizeof bed->info;
	kvc_space_get_info(bed->space, &bed->info);
	for (uint32_t i = 0; i < BED_KEYS * 16; i++) {
		bed->tokens[i] = (uint32_t)kv_test_below(&rng, 50000);
	}
	assert_int_equal(kvc_keys_of(bed->space,
				     &(kvc_prompt_t){sizeof(kvc_prompt_t), bed->tokens, BED_KEYS * 16, NULL}, bed->keys,
				     BED_KEYS, &n),
			 KVC_OK);
	assert_int_equal(n, BED_KEYS);
	for (uint32_t i = 0; i < BED_KEYS; i++) {
		bed->src[i] = malloc(bed->info.block_bytes);
		bed->dst[i] = calloc(1, bed->info.block_bytes);
		kv_test_fill(&rng, bed->src[i], bed->info.block_bytes);
	}
}

/* The three. */
static inline void bed_make(bed_t *bed, const fake_geometry_t *geometry, kvc_config_t with)
{
	bed_listen(bed, geometry);
	bed_attach(bed, with);
	bed_open(bed);
}

static inline void bed_free(bed_t *bed)
{
	kvc_detach(bed->kvc);
	if (bed->fake) {
		fake_stop(bed->fake);
	}
	for (uint32_t i = 0; i < BED_KEYS; i++) {
		free(bed->src[i]);
		free(bed->dst[i]);
	}
	if (bed->dir[0]) {
		kv_test_dir_remove(bed->dir);
	}
	memset(bed, 0, sizeof *bed);
}

static inline int bed_setup(void **state)
{
	(void)state;
	bed_make(&bed, &fake_split, (kvc_config_t){0});

	return 0;
}

static inline int bed_teardown(void **state)
{
	(void)state;
	bed_free(&bed);

	return 0;
}

/* A case whose bed is made. One that makes its bed itself is a KV_TEST. Both end with bed_free(). */
#define BED_CASE(function) KV_TEST(function, bed_setup)

/* ---- what tests do with one ------------------------------------------------------------------ */

/* Poll until the condition holds, a minute at most. */
#define BED_UNTIL(bed, condition)                                                                                      \
	do {                                                                                                           \
		uint64_t until_ = test_now_ms() + 60000;                                                               \
		while (!(condition) && test_now_ms() < until_) {                                                       \
			(void)kvc_poll((bed)->kvc, 5);                                                                 \
		}                                                                                                      \
		assert_true(condition);                                                                                \
	} while (0)

/* It has lost its session, and has a new one. */
static inline void bed_rejoin(void)
{
	const uint32_t joins = ASKED(JOIN);

	fake_drop_sessions(bed.fake);
	BED_UNTIL(&bed, ASKED(JOIN) == joins + 1 && kvc_poll(bed.kvc, 1) == KVC_OK);
}

static inline kvc_status_t bed_put(bed_t *bed, uint32_t from, uint32_t n)
{
	uint32_t visible = 0;
	kvc_put_options_t options = {.struct_size = sizeof options, .blocks = (const void *const *)(bed->src + from)};
	kvc_status_t status = kvc_put(bed->space, bed->keys, from, n, &options, &visible);

	if (status == KVC_OK) {
		assert_int_equal(visible, n - from);
	}

	return status;
}

/* They are stored. */
static inline void bed_store(uint32_t from, uint32_t n)
{
	assert_int_equal(bed_put(&bed, from, n), KVC_OK);
}

/* Reserved when it returns. */
static inline kvc_put_t *bed_reserve(kvc_space_t *space, uint32_t from, uint32_t n, const kvc_put_options_t *options)
{
	kvc_put_t *put = NULL;

	assert_int_equal(kvc_put_start(space, bed.keys, from, n, options, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 0), KVC_OK);

	return put;
}

static inline kvc_put_result_t bed_result(const kvc_put_t *put)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	kvc_put_get_result(put, &result);

	return result;
}

static inline kvc_match_t bed_match(uint32_t n)
{
	kvc_match_t match = {.struct_size = sizeof match};

	kvc_match(bed.space, bed.keys, n, &match);

	return match;
}

static inline kvc_lease_t *bed_acquire(uint32_t n, uint32_t skip)
{
	kvc_lease_t *lease = NULL;

	assert_int_equal(kvc_acquire(bed.space, bed.keys, n, skip, 0, &lease), KVC_OK);
	assert_non_null(lease);

	return lease;
}

/* What asking for the first four blocks says, which are not leased. */
static inline kvc_status_t bed_try_acquire(void)
{
	kvc_lease_t *lease = NULL;
	const kvc_status_t status = kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease);

	assert_int_equal(status == KVC_OK, lease != NULL);
	kvc_release(&lease, 1);

	return status;
}

/* What reading its first block says. */
static inline kvc_status_t bed_try_read(kvc_lease_t *lease)
{
	return kvc_lease_read(lease, kvc_lease_skip(lease), 1, (void *const *)bed.dst, NULL);
}

/* Blocks [from, n) of a lease are those that were put. */
static inline void bed_read(kvc_lease_t *lease, uint32_t from, uint32_t n)
{
	assert_int_equal(kvc_lease_read(lease, from, n - from, (void *const *)(bed.dst + from), NULL), KVC_OK);
	for (uint32_t i = from; i < n; i++) {
		assert_memory_equal(bed.dst[i], bed.src[i], bed.info.block_bytes);
	}
}

static inline kvc_stats_t bed_stats(void)
{
	kvc_stats_t stats = {.struct_size = sizeof stats};

	kvc_get_stats(bed.kvc, &stats);

	return stats;
}

/* For kvc_key_source_t; ctx: the bed's keys. */
static inline void bed_key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((const kvc_key_t *)ctx)[i % BED_KEYS];
}

#endif
