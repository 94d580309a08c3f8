/* Two self-tests. In the engine's own cache, a block is copied out and back into another one. Against the daemon, a
 * block of each group's exact layout is stored in a space of its own, loaded into another block and compared. Host and
 * device do the same; both wait for a copy, because nothing is loaded or saved before the self-test has passed.
 *
 * Against the daemon, the memory is the self-test's own (for a device: host memory it sees); blocks lie in it as in the
 * engine's cache. The space has its own `extra`, and its layout is this rank's share. The transfer thread waits for
 * each answer, since it has no other work yet. A daemon that goes away meanwhile is tried again later; other bytes are
 * final. */
#include "worker/transfer/self_test.h"
#include "worker/cuda/device.h"
#include "worker/cuda/pool_memory.h"
#include "worker/jobs/load.h"

#include "kv/log.h"

#include <stdlib.h>
#include <string.h>

#define RETRY_NS UINT64_C(200000000)
#define LIMIT_NS UINT64_C(2000000000) /* for a group */
#define POLL_MS  1u
#define COPY_NS  UINT64_C(10000000000) /* at the engine's start its stream may hold a warm-up */
#define SLICE_US UINT64_C(50000)
#define PAGE     ((size_t)4096)

/* ---- copies and their memory ----------------------------------------------------------------- */

static void free_memory(const kvx_worker_t *worker, uint8_t *memory)
{
	if (!worker->gpu) {
		free(memory);
	} else if (memory && !atomic_load(&worker->gpu->device_lost)) {
		kvk_gpu_unregister(worker->gpu->gpu, memory);
		free(memory);
	}
}

/* Zeroed; *p_at: its address for the copying side. */
static kvc_status_t alloc_memory(kvx_worker_t *worker, size_t bytes, uint8_t **p_memory, kvk_cu_ptr_t *p_at)
{
	const size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
	kv_status_t status = KV_OK;
	uint8_t *memory = aligned_alloc(PAGE, size);

	if (!memory) {
		return KVC_ERR_NOMEM;
	}
	memset(memory, 0, size);
	*p_at = (uintptr_t)memory;
	if (worker->gpu) {
		status = kvk_gpu_register(worker->gpu->gpu, memory, size);
		status = status == KV_OK ? kvk_gpu_address(worker->gpu->gpu, memory, size, p_at) : status;
	}
	if (status != KV_OK) {
		free_memory(worker, memory);
		return (kvc_status_t)status;
	}
	*p_memory = memory;

	return KVC_OK;
}

/* On load_sync_stream. KVC_ERR_TIMEOUT: the device hangs. */
static kvc_status_t copy_on_device(kvx_wgpu_t *gpu, kvk_gpu_copy_t copy)
{
	const uint64_t start = kvx_worker_now_ns();
	kvk_gpu_job_t *job = NULL;
	kvc_status_t status;
	uint64_t now, quit;

	copy.stream = gpu->load_sync_stream;
	status = (kvc_status_t)kvk_gpu_submit(gpu->gpu, &copy, &job);
	if (status != KVC_OK) {
		return status;
	}
	do {
		status = (kvc_status_t)kvk_gpu_wait(job, SLICE_US);
		now = kvx_worker_now_ns();
		quit = atomic_load(&gpu->shutdown_ns);
	} while (status == KVC_PENDING && now - start < COPY_NS && (quit == 0 || now < quit));
	if (status == KVC_PENDING) {
		atomic_store(&gpu->device_lost, 1u);
		status = KVC_ERR_TIMEOUT;
	}
	kvk_gpu_release_job(job);

	return status;
}

/* Copy one block, and wait for it. */
static kvc_status_t copy_block(kvx_worker_t *worker, const kvk_gpu_copy_t *copy)
{
	if (worker->gpu) {
		return copy_on_device(worker->gpu, *copy);
	}

	return (kvc_status_t)(copy->dir == KVK_GPU_GATHER
				      ? kvk_gather(copy->layout, copy->paged, copy->moves, 1)
				      : kvk_scatter(copy->layout, copy->paged, copy->moves, 1, NULL));
}

/* ---- in the engine's cache (engine's thread) ------------------------------------------------- */

/* The digests made by what copies are those of the host, for a block gathered into zeroed memory. */
static kvc_status_t check_leaves(const kvx_wgroup_t *group, const uint8_t *block, const uint64_t *leaves,
				 uint64_t *scratch)
{
	uint64_t *expected = scratch, *all = scratch + group->words;
	kvk_move_t move;

	kvk_digest_block(&group->layout, block, all, NULL);
	kvx_move_prepare(group, &(kvx_source_t){block, all}, &move, expected);

	return memcmp(leaves, move.leaves, group->words * sizeof *leaves) == 0 ? KVC_OK : KVC_ERR_CORRUPT;
}

static kvc_status_t run_roundtrip(kvx_worker_t *worker, const kvx_wgroup_t *group, kvk_move_t *move, uint32_t to)
{
	kvk_gpu_copy_t copy = {
		.dir = KVK_GPU_GATHER, .layout = &group->layout, .paged = &group->paged, .moves = move, .count = 1};
	kvc_status_t status = copy_block(worker, &copy);

	if (status == KVC_OK) {
		status = check_leaves(group, move->data, move->leaves, move->leaves + group->words);
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
	kvx_wgpu_t *gpu = worker->gpu;
	kvk_move_t move = {.block = from};
	uint8_t *memory = NULL;
	kvc_status_t status;
	kvk_cu_ptr_t unused;

	if (!of || from >= of->paged.blocks || to >= of->paged.blocks) {
		return KVC_ERR_ARG;
	}
	move.leaves =
		calloc(2 * (size_t)of->words + (size_t)of->geometry.heads * of->geometry.leaves, sizeof *move.leaves);
	status = move.leaves ? alloc_memory(worker, of->geometry.block_bytes, &memory, &unused) : KVC_ERR_NOMEM;
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

/* ---- against the daemon (transfer thread) ------------------------------------------------------ */

/* One group's block, stored and read back. */
typedef struct self_test {
	kvx_worker_t *worker;
	uint64_t start_ns;
	kvk_layout_t layout; /* of the group's share of a block */
	kvk_geometry_t geometry;
	kvk_paged_t paged; /* two blocks in the group's layout: 0 is stored, 1 is read back */
	void **base;
	uint8_t *memory;
	size_t layer_bytes, layer_stride; /* of one block; from a layer to the next */
	uint64_t *leaves;
	kvc_key_t key;
	kvc_space_t *space;
	kvc_put_t *put;
	kvc_lease_t *lease;
} self_test_t;

/* The layers of a block lie together if the engine's do; else layer after layer. All bytes differ from attempt to
 * attempt. */
static kvc_status_t make_blocks(self_test_t *test, const kvk_paged_t *engine)
{
	kvx_worker_t *worker = test->worker;
	const size_t layer = test->geometry.block_bytes / engine->layers, block = test->geometry.block_bytes;
	const int together = engine->block_stride >= block;
	kvk_cu_ptr_t at = 0;
	kvc_status_t status;

	test->base = calloc(engine->layers, sizeof *test->base);
	test->leaves = calloc(worker->words, sizeof *test->leaves);
	if (!test->base || !test->leaves) {
		return KVC_ERR_NOMEM;
	}
	status = alloc_memory(worker, 2 * block, &test->memory, &at);
	if (status != KVC_OK) {
		return status == KVC_ERR_LIMIT ? kvx_gpu_decline(worker, status) : status;
	}
	for (size_t i = 0; i < 2 * block; i++) {
		test->memory[i] = (uint8_t)((i + test->start_ns) * UINT64_C(0x9e3779b97f4a7c15) >> 56);
	}

	test->layer_bytes = layer;
	test->layer_stride = together ? layer : 2 * layer;
	for (uint32_t l = 0; l < engine->layers; l++) {
		test->base[l] = (void *)(uintptr_t)(at + l * test->layer_stride); /* of a device: its address */
	}
	test->paged = *engine;
	test->paged.blocks = 2;
	test->paged.first_layer = 0;
	test->paged.first_head = 0;
	test->paged.block_stride = together ? block : layer;
	test->paged.head_stride = 0;
	test->paged.base = test->base;

	return KVC_OK;
}

static int blocks_equal(const self_test_t *test)
{
	for (uint32_t l = 0; l < test->paged.layers; l++) {
		const uint8_t *stored = test->memory + l * test->layer_stride;

		if (memcmp(stored, stored + test->paged.block_stride, test->layer_bytes) != 0) {
			return 0;
		}
	}

	return 1;
}

/* Copy between the pool, whose blocks may have another inner order, and one of the two blocks. */
static kvc_status_t move_block(self_test_t *test, kvk_gpu_dir_t dir, const kvk_move_t *move)
{
	kvx_worker_t *worker = test->worker;
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

/* ---- its steps: PENDING, or KVX_ERR_FAULT, until the daemon has answered ----------------------- */

static kvc_status_t await_space(self_test_t *test)
{
	return kvc_space_state(test->space);
}

/* A block nobody has stored before. */
static kvc_status_t start_put(self_test_t *test)
{
	const kvx_worker_t *worker = test->worker;
	const uint64_t name[] = {kvx_worker_now_ns(), worker->rank, (uintptr_t)worker};
	const kvc_put_options_t options = {.struct_size = sizeof options};
	const kvc_status_t status = kvc_key_bind(test->space, name, sizeof name, &test->key);

	return status == KVC_OK ? kvc_put_start(test->space, &test->key, 0, 1, &options, &test->put) : status;
}

static kvc_status_t await_put(self_test_t *test)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	kvc_put_get_result(test->put, &result);

	return result.status;
}

static kvc_status_t store_block(self_test_t *test)
{
	kvk_move_t move = {.block = 0, .leaves = test->leaves};
	kvc_status_t status = await_put(test);

	if (status != KVC_PENDING || kvc_put_n(test->put) == 0) {
		return status;
	}
	status = kvc_put_block(test->put, 0, &move.data);
	status = status == KVC_OK ? move_block(test, KVK_GPU_GATHER, &move) : status;
	status = status == KVC_OK ? kvc_put_digests(test->put, 0, test->leaves) : status;

	return status == KVC_OK ? kvc_put_end(test->put, 0, 1) : status;
}

static kvc_status_t start_lease(self_test_t *test)
{
	return kvc_acquire_start(test->space, &test->key, 1, 0, 0, &test->lease);
}

static kvc_status_t fetch_block(self_test_t *test)
{
	const uint64_t *leaves = NULL;
	const void *data = NULL;
	kvk_move_t move = {.block = 1};
	kvc_status_t status = kvc_lease_state(test->lease);
	kvc_status_t after;

	status = status == KVC_OK ? kvc_lease_block(test->lease, 0, &data, &leaves) : status;
	if (status != KVC_OK) {
		return status;
	}
	move.data = (void *)(uintptr_t)data; /* scatter only reads both */
	move.leaves = (uint64_t *)(uintptr_t)leaves;
	status = move_block(test, KVK_GPU_SCATTER, &move);
	/* The lease was lost meanwhile, after a long pause of this process for example: other bytes prove nothing. */
	after = kvc_lease_state(test->lease);

	return after == KVC_OK ? status : after;
}

/* A space for this group's share of a block, and the two blocks. */
static kvc_status_t open_space(self_test_t *test, const kvx_wgroup_t *group)
{
	kvx_worker_t *worker = test->worker;
	kvc_identity_t identity = worker->identity;
	char text[KVK_LAYOUT_TEXT_MAX];
	kvc_status_t status;

	test->layout = group->layout;
	test->layout.heads = group->paged.heads;
	test->layout.layers = group->paged.layers;
	kvk_layout_geometry(&test->layout, &test->geometry);
	status = make_blocks(test, &group->paged);
	if (status != KVC_OK) {
		return status;
	}
	(void)kvk_layout_format(&test->layout, text, sizeof text);
	identity.weights = "self-test"; /* those of the model may not be known yet */
	identity.layout = text;
	identity.hash = NULL;
	identity.hash_tokens = test->layout.block_tokens;
	identity.groups = NULL;
	identity.extra = "self-test";

	return kvc_space_open_start(worker->kvc, &identity, &test->space);
}

/* ---- all of it ---------------------------------------------------------------------------------- */

/* Wait a little for the daemon. 0: it is away or slow, the worker is closed, or it has declined meanwhile. */
static int await_daemon(const self_test_t *test)
{
	kvx_worker_t *worker = test->worker;

	(void)kvc_poll(worker->kvc, POLL_MS);

	return kvc_incarnation(worker->kvc) != 0 && kvx_worker_now_ns() < test->start_ns + LIMIT_NS &&
	       !atomic_load(&worker->stop) && atomic_load(&worker->self_test_status) == KVC_PENDING;
}

static kvc_status_t test_group(kvx_worker_t *worker, const kvx_wgroup_t *group)
{
	static kvc_status_t (*const steps[])(self_test_t *) = {await_space, start_put,   store_block,
							       await_put,   start_lease, fetch_block};
	self_test_t test = {.worker = worker, .start_ns = kvx_worker_now_ns()};
	kvc_status_t status = open_space(&test, group);

	for (size_t i = 0; i < KV_COUNT_OF(steps) && status == KVC_OK; i++) {
		do {
			status = steps[i](&test);
		} while ((status == KVC_PENDING || status == KVX_ERR_FAULT) && await_daemon(&test));
	}
	if (status == KVC_OK && !blocks_equal(&test)) {
		status = KVC_ERR_CORRUPT;
	}
	kvc_put_free(test.put);
	kvc_release(&test.lease, 1);
	kvc_space_close(test.space);
	free_memory(worker, test.memory);
	free(test.base);
	free(test.leaves);

	return status;
}

void kvx_self_test_run(kvx_worker_t *worker, uint64_t now)
{
	kvc_status_t status = KVC_OK;
	uint32_t i = 0;

	if (atomic_load(&worker->self_test_status) != KVC_PENDING || now < worker->self_test_ns ||
	    kvc_incarnation(worker->kvc) == 0) {
		return;
	}
	while (i < worker->group_count && status == KVC_OK) {
		status = test_group(worker, &worker->groups[i++]);
	}
	if (atomic_load(&worker->self_test_status) != KVC_PENDING) {
		return; /* declined on the way */
	}
	if (status == KVC_OK) {
		kvx_stat_add(&worker->stats.self_tests, 1);
		atomic_store(&worker->self_test_status, KVC_OK);
	} else if (status == KVC_ERR_CORRUPT) {
		kvx_stat_add(&worker->stats.self_test_failures, 1);
		kv_log(KV_LOG_ERROR, "kvx",
		       "self-test: a block of group %u came back with other bytes; nothing is loaded or saved",
		       worker->groups[i - 1].group);
		atomic_store(&worker->self_test_status, KVC_ERR_CORRUPT);
	} else {
		worker->self_test_ns = kvx_worker_now_ns() + RETRY_NS;
	}
}
