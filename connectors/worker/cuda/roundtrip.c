/* Self-tests over a device: a roundtrip in the engine's own cache, and memory and copies of the self-test against the
 * daemon. */
#include "worker/cuda/roundtrip.h"
#include "worker/cuda/device.h"

#include <stdlib.h>
#include <string.h>

#define PAGE       ((size_t)4096)
#define ECHO_US    UINT64_C(10000000) /* at the engine's start its stream may hold a warm-up */
#define GIVE_UP_US UINT64_C(3000000)

/* ---- memory that both see -------------------------------------------------------------------- */

kvc_status_t kvx_gpu_test_alloc(kvx_worker_t *worker, size_t bytes, uint8_t **p_memory, uintptr_t *p_device)
{
	kvk_gpu_t *gpu = worker->gpu->gpu;
	const size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
	uint8_t *memory = aligned_alloc(PAGE, size);
	kvk_cu_ptr_t device = 0;
	kv_status_t status;

	if (!memory) {
		return KVC_ERR_NOMEM;
	}
	memset(memory, 0, size);
	status = kvk_gpu_register(gpu, memory, size);
	if (status != KV_OK) {
		free(memory);
		return (kvc_status_t)status;
	}
	status = kvk_gpu_address(gpu, memory, size, &device);
	if (status != KV_OK) {
		kvx_gpu_test_free(worker, memory);
		return (kvc_status_t)status;
	}
	*p_memory = memory;
	*p_device = (uintptr_t)device;

	return KVC_OK;
}

void kvx_gpu_test_free(const kvx_worker_t *worker, uint8_t *memory)
{
	if (memory && !atomic_load(&worker->gpu->device_lost)) {
		kvk_gpu_unregister(worker->gpu->gpu, memory);
		free(memory);
	}
}

/* ---- against the daemon (transfer thread) ---------------------------------------------------- */

kvc_status_t kvx_gpu_test_copy(kvx_worker_t *worker, const kvk_gpu_copy_t *copy)
{
	kvx_self_test_t *test = &worker->test;
	kvc_status_t status;

	if (!test->job) {
		status = (kvc_status_t)kvk_gpu_submit(worker->gpu->gpu, copy, &test->job);
		if (status == (kvc_status_t)KV_ERR_UNSUPPORTED || status == KVC_ERR_ARG) {
			(void)kvx_gpu_decline(worker, (kvc_status_t)KV_ERR_UNSUPPORTED);
		}
		if (status != KVC_OK) {
			return status;
		}
	}
	status = (kvc_status_t)kvk_gpu_poll(test->job);
	if (status != KVC_PENDING) {
		kvk_gpu_release_job(test->job);
		test->job = NULL;
	} else {
		worker->polls_soon = 1;
	}

	return status;
}

void kvx_gpu_test_stop(kvx_worker_t *worker)
{
	kvx_self_test_t *test = &worker->test;

	if (!test->job) {
		return;
	}
	if (kvk_gpu_wait(test->job, GIVE_UP_US) == KV_PENDING) {
		atomic_store(&worker->gpu->device_lost, 1u);
	}
	kvk_gpu_release_job(test->job);
	test->job = NULL;
}

/* ---- in the engine's cache (engine's thread) ------------------------------------------------- */

static kvc_status_t copy_and_wait(kvx_worker_t *worker, const kvx_wgroup_t *group, kvk_gpu_dir_t dir,
				  const kvk_move_t *move)
{
	const kvk_gpu_copy_t copy = {.dir = dir,
				     .layout = &worker->layout,
				     .paged = &group->paged,
				     .moves = move,
				     .count = 1,
				     .stream = worker->gpu->load_sync_stream};
	kvk_gpu_job_t *job = NULL;
	kvc_status_t status = (kvc_status_t)kvk_gpu_submit(worker->gpu->gpu, &copy, &job);

	if (status != KVC_OK) {
		return status;
	}
	status = (kvc_status_t)kvk_gpu_wait(job, ECHO_US);
	if (status == KVC_PENDING) {
		atomic_store(&worker->gpu->device_lost, 1u);
		status = KVC_ERR_TIMEOUT;
	}
	kvk_gpu_release_job(job);

	return status;
}

/* Leaves of the group's layers and heads, of a block in canonical order. */
static void group_leaves(const kvx_worker_t *worker, const kvx_wgroup_t *group, const uint8_t *block, uint64_t *all,
			 uint64_t *leaves)
{
	const kvk_geometry_t *g = &worker->geometry;
	const kvk_paged_t *paged = &group->paged;
	const size_t count = (size_t)paged->layers * g->pieces;

	kvk_digest_block(&worker->layout, block, all, NULL);
	for (uint32_t h = 0; h < paged->heads; h++) {
		memcpy(leaves + h * count,
		       all + (size_t)(paged->first_head + h) * g->leaves + (size_t)paged->first_layer * g->pieces,
		       count * sizeof *leaves);
	}
}

/* The device computes the host's digests, and a scattered block gathers as the same bytes. */
static kvc_status_t run_roundtrip(kvx_worker_t *worker, const kvx_wgroup_t *group, const uint32_t *ids, uint8_t *memory,
				  uint64_t *leaves)
{
	const size_t block = worker->geometry.block_bytes;
	uint64_t *expected = leaves + worker->words, *all = leaves + 2 * (size_t)worker->words;
	const size_t bytes =
		(size_t)group->paged.heads * group->paged.layers * worker->geometry.pieces * sizeof *leaves;
	kvc_status_t status = copy_and_wait(worker, group, KVK_GPU_GATHER,
					    &(kvk_move_t){.block = ids[0], .data = memory, .leaves = leaves});

	if (status != KVC_OK) {
		return status;
	}
	group_leaves(worker, group, memory, all, expected);
	if (memcmp(leaves, expected, bytes) != 0) {
		return KVC_ERR_CORRUPT;
	}
	status = copy_and_wait(worker, group, KVK_GPU_SCATTER,
			       &(kvk_move_t){.block = ids[1], .data = memory, .leaves = expected});
	if (status == KVC_OK) {
		status = copy_and_wait(worker, group, KVK_GPU_GATHER,
				       &(kvk_move_t){.block = ids[1], .data = memory + block, .leaves = leaves});
	}
	if (status == KVC_OK && (memcmp(memory, memory + block, block) != 0 || memcmp(leaves, expected, bytes) != 0)) {
		status = KVC_ERR_CORRUPT;
	}

	return status;
}

kvc_status_t kvx_gpu_roundtrip_test(kvx_worker_t *worker, const kvx_wgroup_t *group, uint32_t from, uint32_t to)
{
	const uint32_t ids[2] = {from, to};
	const size_t words = 2 * (size_t)worker->words + (size_t)worker->geometry.heads * worker->geometry.leaves;
	uint64_t *leaves = calloc(words, sizeof *leaves);
	uint8_t *memory = NULL;
	uintptr_t unused;
	kvc_status_t status = leaves ? KVC_OK : KVC_ERR_NOMEM;

	if (status == KVC_OK) {
		status = kvx_gpu_test_alloc(worker, 2 * (size_t)worker->geometry.block_bytes, &memory, &unused);
	}
	if (status == KVC_OK && !kvx_gpu_order_streams(worker, worker->gpu->compute, worker->gpu->load_sync_stream)) {
		status = (kvc_status_t)KV_ERR_IO;
	}
	if (status == KVC_OK) {
		status = run_roundtrip(worker, group, ids, memory, leaves);
	}
	if (!kvx_gpu_order_streams(worker, worker->gpu->load_sync_stream, worker->gpu->compute) && status == KVC_OK) {
		status = (kvc_status_t)KV_ERR_IO;
	}
	kvx_gpu_test_free(worker, memory);
	free(leaves);

	return status;
}
