/* The self-test: store one block of a reserved prefix, load it back in the engine's exact layout, compare. It uses the
 * same load and save as the engine, on two blocks of its own. A daemon that goes away meanwhile is tried again later;
 * wrong bytes are final.
 */
#include "inproc/self_test.h"
#include "inproc/load.h"
#include "inproc/save.h"

#include "kv/log.h"

#include <stdlib.h>
#include <string.h>

#define RETRY_NS  UINT64_C(500000000)
#define TEST_SALT "kvx self-test 1"
#define TEST_MS   1000u

/* Bytes of one layer's block that hold values, and from there to the next block's. */
static void measure_cache(kvx_inproc_test_t *self_test, const kvx_t *kvx)
{
	const kvk_paged_t *p = &kvx->paged;

	self_test->payload = kvx->geometry.block_bytes / kvx->layout.layers;
	self_test->stride = p->block_stride && !p->head_stride ? p->block_stride : self_test->payload;
}

kvc_status_t kvx_inproc_test_init(kvx_t *kvx)
{
	kvx_inproc_test_t *self_test = &kvx->self_test;
	const uint32_t layers = kvx->layout.layers;

	measure_cache(self_test, kvx);
	self_test->base = calloc(layers, sizeof *self_test->base);
	self_test->memory = calloc(layers, 2 * self_test->stride);
	self_test->tokens = calloc(kvx->layout.block_tokens, sizeof *self_test->tokens);
	if (!self_test->base || !self_test->memory || !self_test->tokens) {
		kvx_inproc_test_fini(kvx);
		return KVC_ERR_NOMEM;
	}

	for (uint32_t l = 0; l < layers; l++) {
		uint8_t *block = self_test->memory + (size_t)l * 2 * self_test->stride;

		self_test->base[l] = block;
		for (size_t i = 0; i < self_test->payload; i++) {
			block[i] = (uint8_t)((i * 2654435761u) >> 13 ^ l);
		}
	}
	for (uint32_t i = 0; i < kvx->layout.block_tokens; i++) {
		self_test->tokens[i] = 0xfffffffeu - i;
	}
	self_test->paged = kvx->paged;
	self_test->paged.blocks = 2;
	self_test->paged.block_stride = self_test->stride;
	self_test->paged.head_stride = 0;
	self_test->paged.base = self_test->base;

	return KVC_OK;
}

void kvx_inproc_test_fini(kvx_t *kvx)
{
	kvx_inproc_test_t *self_test = &kvx->self_test;

	kvx_save_end(self_test->save);
	kvx_load_end(self_test->load);
	free(self_test->base);
	free(self_test->memory);
	free(self_test->tokens);
	*self_test = (kvx_inproc_test_t){0};
}

static void retry_later(kvx_t *kvx, uint64_t now)
{
	kvx->self_test.step = KVX_INPROC_TEST_IDLE;
	kvx->self_test.next_ns = now + RETRY_NS;
	kvx->stats.self_test_retries++;
}

static kvx_prefix_t reserved_prefix(const kvx_t *kvx, const uint32_t *block)
{
	return (kvx_prefix_t){
		.struct_size = sizeof(kvx_prefix_t),
		.tokens = kvx->self_test.tokens,
		.n_tokens = kvx->layout.block_tokens,
		.blocks = block,
		.salt = TEST_SALT,
		.deadline_ms = TEST_MS,
	};
}

static void start_save(kvx_t *kvx, uint64_t now)
{
	static const uint32_t written = 0;
	const kvx_prefix_t prefix = reserved_prefix(kvx, &written);
	const kvc_status_t status = kvx_save_start(kvx, &kvx->self_test.paged, &prefix, &kvx->self_test.save);

	if (status == KVC_PENDING || status == KVC_ALREADY) {
		kvx->stats.self_tests++;
		kvx->self_test.step = KVX_INPROC_TEST_SAVING;
	} else {
		retry_later(kvx, now);
	}
}

static void start_load(kvx_t *kvx, uint64_t now)
{
	static const uint32_t read_back = 1;
	const kvx_prefix_t prefix = reserved_prefix(kvx, &read_back);
	kvx_inproc_test_t *self_test = &kvx->self_test;
	kvx_load_result_t result;

	kvx_save_end(self_test->save);
	self_test->save = NULL;
	if (kvx_load_start(kvx, &self_test->paged, &prefix, &self_test->load, &result) == KVC_PENDING) {
		self_test->step = KVX_INPROC_TEST_LOADING;
	} else {
		retry_later(kvx, now);
	}
}

static void compare_blocks(kvx_t *kvx, uint64_t now)
{
	kvx_inproc_test_t *self_test = &kvx->self_test;
	kvx_load_result_t result;

	(void)kvx_load_state(self_test->load, &result);
	kvx_load_end(self_test->load);
	self_test->load = NULL;
	if (result.status != KVC_OK) {
		retry_later(kvx, now);
		return;
	}

	self_test->step = KVX_INPROC_TEST_PASSED;
	for (uint32_t l = 0; l < kvx->layout.layers; l++) {
		const uint8_t *block = self_test->base[l];

		if (memcmp(block, block + self_test->stride, self_test->payload) != 0) {
			self_test->step = KVX_INPROC_TEST_FAILED;
		}
	}
	if (self_test->step == KVX_INPROC_TEST_FAILED) {
		kvx->stats.self_test_failures++;
		kv_log(KV_LOG_ERROR, "kvx",
		       "self-test: a block came back with other bytes; loading is off in this process");
	}
}

void kvx_inproc_test_step(kvx_t *kvx, uint64_t now)
{
	kvx_inproc_test_t *self_test = &kvx->self_test;

	switch (self_test->step) {
	case KVX_INPROC_TEST_IDLE:
		if (kvx->space && kvc_incarnation(kvx->kvc) != 0 && now >= self_test->next_ns) {
			start_save(kvx, now);
		}
		break;
	case KVX_INPROC_TEST_SAVING:
		if (!self_test->save || kvx_save_state(self_test->save, NULL) != KVC_PENDING) {
			start_load(kvx, now);
		}
		break;
	case KVX_INPROC_TEST_LOADING:
		if (kvx_load_state(self_test->load, NULL) != KVC_PENDING) {
			compare_blocks(kvx, now);
		}
		break;
	case KVX_INPROC_TEST_PASSED:
	case KVX_INPROC_TEST_FAILED:
		break;
	}
}
