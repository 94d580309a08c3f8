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

#define BED_TIMEOUT_MS 20000u /* of calls: who runs into it has waited for nothing */

static inline uint64_t test_now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

static inline kvc_config_t bed_config(const bed_t *bed)
{
	return (kvc_config_t){.struct_size = sizeof(kvc_config_t),
			      .socket = bed->path,
			      .timeout_ms = BED_TIMEOUT_MS,
			      .spin_us = 20,
			      .staging_blocks = 16};
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

static inline void bed_attach(bed_t *bed, const kvc_config_t *config)
{
	assert_int_equal(kvc_attach(config, &bed->kvc), KVC_OK);
	bed_open(bed);
}

static inline void bed_make(bed_t *bed, const fake_geometry_t *geometry)
{
	kvc_config_t config;

	bed_listen(bed, geometry);
	config = bed_config(bed);
	bed_attach(bed, &config);
}

/* Calls take so long at most. */
static inline void bed_make_hasty(bed_t *bed, uint32_t timeout_ms)
{
	kvc_config_t config;

	bed_listen(bed, &fake_split);
	config = bed_config(bed);
	config.timeout_ms = timeout_ms;
	bed_attach(bed, &config);
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

static inline void bed_check_read(bed_t *bed, uint32_t from, uint32_t n)
{
	for (uint32_t i = from; i < n; i++) {
		assert_memory_equal(bed->dst[i], bed->src[i], bed->info.block_bytes);
	}
}

/* Poll until the condition holds, a minute at most. */
#define BED_UNTIL(bed, condition)                                                                                      \
	do {                                                                                                           \
		uint64_t until_ = test_now_ms() + 60000;                                                               \
		while (!(condition) && test_now_ms() < until_) {                                                       \
			(void)kvc_poll((bed)->kvc, 5);                                                                 \
		}                                                                                                      \
		assert_true(condition);                                                                                \
	} while (0)

/* The bed of the case that runs. */
static bed_t bed;

static inline int bed_setup(void **state)
{
	(void)state;
	bed_make(&bed, &fake_split);

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

#endif
