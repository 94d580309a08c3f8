/* Two self-tests. In the engine's own cache, a block is copied out and back into another one. Against the daemon, a
 * block of each group's exact layout is stored in a space of its own, loaded into another block and compared. Host and
 * device do the same; both wait for a copy, because nothing is loaded or saved before the self-test has passed.
 *
 * Against the daemon, the memory is the self-test's own (for a device: host memory it sees); blocks lie in it as in the
 * engine's cache. The space has its own `extra`, and its layout is this rank's share. A daemon that goes away meanwhile
 * is tried again later; other bytes are final. */
#include "worker/self_test.h"
#include "worker/cuda/device.h"
#include "worker/cuda/pool_memory.h"
#include "worker/host/move.h"

#include "kv/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RETRY_NS UINT64_C(200000000)
#define LIMIT_NS UINT64_C(2000000000) /* for the whole self-test */

/* ---- copies and their memory ----------------------------------------------------------------- */

/* Zeroed; *p_at: its address for the copying side. */
static kvc_status_t alloc_memory(kvx_worker_t *worker, size_t bytes, uint8_t **p_memory, uintptr_t *p_at)
{
	if (worker->gpu) {
		return kvx_gpu_alloc_shared(worker, bytes, p_memory, p_at);
	}
	*p_memory = calloc(1, bytes);
	*p_at = (uintptr_t)*p_memory;

	return *p_memory ? KVC_OK : KVC_ERR_NOMEM;
}

static void free_memory(const kvx_worker_t *worker, uint8_t *memory)
{
	if (worker->gpu) {
		kvx_gpu_free_shared(worker, memory);
	} else {
		free(memory);
	}
}

/* Copy one block. */
static kvc_status_t copy_block(kvx_worker_t *worker, const kvk_gpu_copy_t *copy)
{
	if (worker->gpu) {
		return kvx_gpu_copy_and_wait(worker, copy);
	}

	return (kvc_status_t)(copy->dir == KVK_GPU_GATHER
				      ? kvk_gather(copy->layout, copy->paged, copy->moves, 1)
				      : kvk_scatter(copy->layout, copy->paged, copy->moves, 1, NULL));
}

/* ---- in the engine's cache (engine's thread) ------------------------------------------------- */

/* The digests made by what copies are those of the host, for a block gathered into zeroed memory. */
static kvc_status_t check_leaves(const kvx_worker_t *worker, const kvx_wgroup_t *group, const uint8_t *block,
				 const uint64_t *leaves, uint64_t *scratch)
{
	uint64_t *expected = scratch, *all = scratch + worker->words;
	const size_t words = (size_t)group->paged.heads * group->paged.layers * worker->geometry.pieces;
	kvk_move_t move;

	kvk_digest_block(&worker->layout, block, all, NULL);
	kvx_move_prepare(worker, group, &(kvx_source_t){block, all}, &move, expected);

	return memcmp(leaves, move.leaves, words * sizeof *leaves) == 0 ? KVC_OK : KVC_ERR_CORRUPT;
}

static kvc_status_t run_roundtrip(kvx_worker_t *worker, const kvx_wgroup_t *group, kvk_move_t *move, uint32_t to)
{
	kvk_gpu_copy_t copy = {
		.dir = KVK_GPU_GATHER, .layout = &worker->layout, .paged = &group->paged, .moves = move, .count = 1};
	kvc_status_t status = copy_block(worker, &copy);

	if (status == KVC_OK) {
		status = check_leaves(worker, group, move->data, move->leaves, move->leaves + worker->words);
	}
	if (status == KVC_OK) {
		copy.dir = KVK_GPU_SCATTER;
		move->block = to;
		status = copy_block(worker, &copy);
	}

	return status;
}

kvc_status_t kvx_worker_roundtrip_test(kvx_worker_t *worker, uint32_t group, uint32_t from, uint32_t to)
{
	const kvx_wgroup_t *of = kvx_worker_find_group(worker, group);
	const size_t words = 2 * (size_t)worker->words + (size_t)worker->geometry.heads * worker->geometry.leaves;
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_move_t move = {.block = from};
	uint8_t *memory = NULL;
	kvc_status_t status;
	uintptr_t unused;

	if (!of || from >= of->paged.blocks || to >= of->paged.blocks) {
		return KVC_ERR_ARG;
	}
	move.leaves = calloc(words, sizeof *move.leaves);
	status = move.leaves ? alloc_memory(worker, worker->geometry.block_bytes, &memory, &unused) : KVC_ERR_NOMEM;
	move.data = memory;
	if (status == KVC_OK && gpu && !kvx_gpu_order_streams(worker, gpu->compute, gpu->load_sync_stream)) {
		status = (kvc_status_t)KV_ERR_IO;
	}
	if (status == KVC_OK) {
		status = run_roundtrip(worker, of, &move, to);
	}
	if (gpu && !kvx_gpu_order_streams(worker, gpu->load_sync_stream, gpu->compute) && status == KVC_OK) {
		status = (kvc_status_t)KV_ERR_IO;
	}
	free_memory(worker, memory);
	free(move.leaves);

	return status;
}

/* ---- against the daemon: its state (transfer thread) ------------------------------------------ */

static void free_handles(kvx_self_test_t *test)
{
	kvc_put_free(test->put);
	kvc_release(&test->lease, 1);
	test->put = NULL;
	test->lease = NULL;
}

void kvx_self_test_fini(kvx_worker_t *worker)
{
	kvx_self_test_t *test = &worker->test;

	free_handles(test);
	kvc_space_close(test->space);
	free_memory(worker, test->memory);
	free(test->base);
	free(test->leaves);
	test->space = NULL;
	test->memory = NULL;
	test->base = NULL;
	test->leaves = NULL;
}

static void retry_later(kvx_worker_t *worker, uint64_t now)
{
	kvx_self_test_fini(worker);
	worker->test.step = KVX_SELF_TEST_IDLE;
	worker->test.next_ns = now + RETRY_NS;
}

/* ---- the two blocks -------------------------------------------------------------------------- */

/* Bytes of one layer's block. */
static size_t layer_bytes(const kvx_self_test_t *test)
{
	return test->geometry.block_bytes / test->layout.layers;
}

/* The layers of a block lie together if the engine's do; else layer after layer. */
static kvc_status_t make_memory(kvx_worker_t *worker, const kvk_paged_t *engine)
{
	kvx_self_test_t *test = &worker->test;
	const size_t bytes = layer_bytes(test);
	const size_t block = bytes * engine->layers;
	const int together = engine->block_stride >= block;
	uintptr_t at = 0;
	kvc_status_t status;

	test->paged = *engine;
	test->paged.blocks = 2;
	test->paged.first_layer = 0;
	test->paged.first_head = 0;
	test->paged.block_stride = together ? block : 0;
	test->paged.head_stride = 0;
	test->base = calloc(engine->layers, sizeof *test->base);
	test->leaves = calloc((size_t)test->geometry.heads * test->geometry.leaves, sizeof *test->leaves);
	if (!test->base || !test->leaves) {
		return KVC_ERR_NOMEM;
	}
	status = alloc_memory(worker, 2 * block, &test->memory, &at);
	if (status != KVC_OK) {
		return status == KVC_ERR_LIMIT ? kvx_gpu_decline(worker, status) : status;
	}
	test->paged.base = test->base;
	for (uint32_t l = 0; l < engine->layers; l++) {
		test->base[l] =
			(void *)(at + (size_t)l * (together ? bytes : 2 * bytes)); /* of a device: its address */
	}

	return KVC_OK;
}

static uint8_t *block_at(const kvx_self_test_t *test, uint32_t layer, uint32_t block)
{
	const size_t stride = test->paged.block_stride ? test->paged.block_stride : layer_bytes(test);
	const size_t at = (size_t)((uintptr_t)test->base[layer] - (uintptr_t)test->base[0]);

	return test->memory + at + block * stride;
}

static void fill_block(const kvx_self_test_t *test, uint32_t salt)
{
	for (uint32_t l = 0; l < test->paged.layers; l++) {
		uint8_t *at = block_at(test, l, 0);

		for (size_t i = 0; i < layer_bytes(test); i++) {
			at[i] = (uint8_t)(((uint32_t)i + salt) * 2654435761u >> 13 ^ l);
		}
	}
}

static int blocks_equal(const kvx_self_test_t *test)
{
	for (uint32_t l = 0; l < test->paged.layers; l++) {
		if (memcmp(block_at(test, l, 0), block_at(test, l, 1), layer_bytes(test)) != 0) {
			return 0;
		}
	}

	return 1;
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* A space for this group's share of a block. */
static kvc_status_t open_space(kvx_worker_t *worker)
{
	const kvx_wgroup_t *group = &worker->groups[worker->test.group];
	kvx_self_test_t *test = &worker->test;
	kvc_identity_t identity = worker->identity;
	kvc_status_t status;

	test->layout = worker->layout;
	test->layout.heads = group->paged.heads;
	test->layout.layers = group->paged.layers;
	kvk_layout_geometry(&test->layout, &test->geometry);
	status = make_memory(worker, &group->paged);
	if (status != KVC_OK) {
		return status;
	}
	(void)kvk_layout_format(&test->layout, test->layout_text, sizeof test->layout_text);
	identity.weights = "self-test"; /* those of the model may not be known yet */
	identity.layout = test->layout_text;
	identity.hash = NULL;
	identity.hash_tokens = test->layout.block_tokens;
	identity.groups = NULL;
	identity.extra = "self-test";

	return kvc_space_open_start(worker->kvc, &identity, &test->space);
}

/* A block nobody has stored before. */
static kvc_status_t start_put(kvx_worker_t *worker, uint64_t now)
{
	kvx_self_test_t *test = &worker->test;
	const uint64_t name[4] = {now, worker->range.rank, test->group, ++test->serial};
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_status_t status = kvc_key_bind(test->space, name, sizeof name, &test->key);

	if (status == KVC_OK) {
		fill_block(test, (uint32_t)now);
		test->handed_in = 0;
		status = kvc_put_start(test->space, &test->key, 0, 1, &options, &test->put);
	}

	return status;
}

static kvc_status_t move_block(kvx_worker_t *worker, kvk_gpu_dir_t dir, const kvk_move_t *move)
{
	kvx_self_test_t *test = &worker->test;
	const char *text = kvc_space_layout(test->space);
	kvk_layout_t layout;
	const kvk_gpu_copy_t copy = {.dir = dir, .layout = &layout, .paged = &test->paged, .moves = move, .count = 1};
	kvc_status_t status = (kvc_status_t)kvk_layout_parse(text, strlen(text), &layout, NULL);

	if (status == KVC_OK && worker->gpu) {
		status = kvx_pool_memory_register(worker, move->data, test->geometry.block_bytes);
	}
	if (status != KVC_OK) {
		return status;
	}
	status = copy_block(worker, &copy);
	if (worker->gpu && (status == (kvc_status_t)KV_ERR_UNSUPPORTED || status == KVC_ERR_ARG)) {
		(void)kvx_gpu_decline(worker, (kvc_status_t)KV_ERR_UNSUPPORTED);
	}

	return status;
}

static kvc_status_t store_block(kvx_worker_t *worker)
{
	kvx_self_test_t *test = &worker->test;
	kvk_move_t move = {.block = 0, .leaves = test->leaves};
	kvc_status_t status = kvc_put_block(test->put, 0, &move.data);

	status = status == KVC_OK ? move_block(worker, KVK_GPU_GATHER, &move) : status;
	status = status == KVC_OK ? kvc_put_digests(test->put, 0, test->leaves) : status;

	return status == KVC_OK ? kvc_put_end(test->put, 0, 1) : status;
}

/* PENDING: not visible yet. */
static kvc_status_t poll_put(kvx_worker_t *worker)
{
	kvx_self_test_t *test = &worker->test;
	kvc_put_result_t result = {.struct_size = sizeof result};
	kvc_status_t status;

	kvc_put_get_result(test->put, &result);
	if (result.status != KVC_PENDING) {
		return result.status;
	}
	if (!test->handed_in && kvc_put_n(test->put) > 0) {
		status = store_block(worker);
		if (status != KVC_OK && status != KVX_ERR_FAULT) {
			return status;
		}
		test->handed_in = status == KVC_OK;
	}

	return KVC_PENDING;
}

static kvc_status_t fetch_block(kvx_worker_t *worker)
{
	kvx_self_test_t *test = &worker->test;
	const uint64_t *leaves = NULL;
	const void *data = NULL;
	kvk_move_t move = {.block = 1};
	kvc_status_t status = kvc_lease_state(test->lease);
	kvc_status_t after;

	if (status == KVC_OK) {
		status = kvc_lease_block(test->lease, 0, &data, &leaves);
	}
	if (status == KVX_ERR_FAULT) {
		return KVC_PENDING;
	}
	if (status == KVC_OK) {
		move.data = (void *)(uintptr_t)data; /* scatter only reads both */
		move.leaves = (uint64_t *)(uintptr_t)leaves;
		status = move_block(worker, KVK_GPU_SCATTER, &move);
		/* The lease was lost meanwhile, after a long pause of this process for example: other bytes prove
		 * nothing. */
		after = kvc_lease_state(test->lease);
		status = after == KVC_OK ? status : after;
	}

	return status;
}

/* The block of the group was read back, right or wrong. */
static void finish_group(kvx_worker_t *worker, kvc_status_t status)
{
	kvx_self_test_t *test = &worker->test;
	const int right = status == KVC_OK && blocks_equal(test);

	kvx_self_test_fini(worker);
	test->step = KVX_SELF_TEST_IDLE;
	if (!right) {
		kvx_stat_add(&worker->stats.self_test_failures, 1);
		kv_log(KV_LOG_ERROR, "kvx",
		       "self-test: a block of group %u came back with other bytes; nothing is loaded or saved",
		       worker->groups[test->group].group);
		test->step = KVX_SELF_TEST_DONE;
		atomic_store(&worker->self_test_status, KVC_ERR_CORRUPT);
	} else if (++test->group == worker->group_count) {
		kvx_stat_add(&worker->stats.self_tests, 1);
		test->step = KVX_SELF_TEST_DONE;
		atomic_store(&worker->self_test_status, KVC_OK);
	}
}

/* Advance the current step. */
static kvc_status_t advance_test(kvx_worker_t *worker, uint64_t now)
{
	kvx_self_test_t *test = &worker->test;
	kvc_status_t status = KVC_PENDING;

	switch (test->step) {
	case KVX_SELF_TEST_IDLE:
		test->deadline_ns = now + LIMIT_NS;
		status = open_space(worker);
		test->step = KVX_SELF_TEST_OPENING;
		return status == KVC_OK ? KVC_PENDING : status;
	case KVX_SELF_TEST_OPENING:
		status = kvc_space_state(test->space);
		return status == KVC_OK ? start_put(worker, now) : status;
	case KVX_SELF_TEST_PUTTING:
		status = poll_put(worker);
		return status == KVC_OK ? kvc_acquire_start(test->space, &test->key, 1, 0, 0, &test->lease) : status;
	case KVX_SELF_TEST_LEASING:
		return fetch_block(worker);
	case KVX_SELF_TEST_DONE:
		break;
	}

	return status;
}

void kvx_self_test_step(kvx_worker_t *worker, uint64_t now)
{
	kvx_self_test_t *test = &worker->test;
	kvc_status_t status;

	if (test->step == KVX_SELF_TEST_DONE) {
		if (test->space) { /* declined meanwhile: the driver refused memory in idle time, or for a load */
			kvx_self_test_fini(worker);
		}
		return;
	}
	if (now < test->next_ns || kvc_incarnation(worker->kvc) == 0) {
		return;
	}
	status = advance_test(worker, now);
	if (test->step == KVX_SELF_TEST_DONE) {
		kvx_self_test_fini(worker); /* declined on the way */
	} else if (status == KVC_ERR_CORRUPT || (status == KVC_OK && test->step == KVX_SELF_TEST_LEASING)) {
		finish_group(worker, status);
	} else if (status == KVC_OK) {
		test->step++;
	} else if (status != KVC_PENDING || now > test->deadline_ns) {
		retry_later(worker, now);
	}
}
