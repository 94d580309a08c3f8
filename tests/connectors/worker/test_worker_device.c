/* The worker half with a second space, in GPU memory: loads of two parts, saves there, and memory that cannot be
 * mapped. A second space in host memory stands in for it; for a cache in GPU memory, mapped memory of the fake device
 * too. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"
#include "worker/base/state.h"

#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#define HALF  4u                 /* blocks of a load of eight that are in GPU memory */
#define OTHER (KVX_OWN_MEM + 1u) /* that of a GPU of another engine */

static const wr_t stored = {0}, layered = {.layer_bytes = 1, .layer_wait_us = WR_PATIENCE * 1000u};
#ifdef WR_MAPPED
static const wr_t slow = {.promote_rate = 1};
#endif

/* Of the worker: its views of what is leased and reserved in GPU memory, and what their memory is. */
static _Atomic(const kvc_lease_t *) view;
static _Atomic(const kvc_put_t *) written;
static _Atomic(uint8_t *) mapped; /* NULL: as libkvc says */
static atomic_int unmapped;       /* it cannot be mapped */

#define WRAP(type, name, ...)                                                                                          \
	type __real_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__);                                                                               \
	type __wrap_##name(__VA_ARGS__)

static _Atomic(const kvc_t *) held; /* the worker's, kept from going on after it has polled */
static atomic_int holding;

static int is_second(const kvc_space_t *space);

WRAP(kvc_status_t, kvc_space_open_start, kvc_t *kvc, const kvc_identity_t *identity, kvc_space_t **p_space)
{
	kvc_identity_t second = *identity;

	if (identity->device && strcmp(identity->device, "refused") == 0) {
		return KVC_ERR_TIER_OFF;
	}
	if (identity->device) {
		second.extra = identity->device;
		second.device = NULL;
	}

	return __real_kvc_space_open_start(kvc, &second, p_space);
}

WRAP(kvc_status_t, kvc_lease_import, kvc_space_t *space, const kvc_handle_t *handle, kvc_lease_t **p_lease)
{
	const kvc_status_t status = __real_kvc_lease_import(space, handle, p_lease);

	if (status == KVC_OK && is_second(space)) {
		atomic_store(&view, *p_lease);
	}

	return status;
}

WRAP(kvc_status_t, kvc_put_import, kvc_space_t *space, const kvc_handle_t *handle, const kvc_writer_t *range,
     kvc_put_t **p_put)
{
	const kvc_status_t status = __real_kvc_put_import(space, handle, range, p_put);

	if (status == KVC_OK && is_second(space)) {
		atomic_store(&written, *p_put);
	}

	return status;
}

/* Where block i of the second space is. */
static kvc_status_t place_block(uint32_t i, kvc_status_t status, void **p_data)
{
	if (status == KVC_OK && p_data && atomic_load(&unmapped)) {
		return KVC_ERR_TIER_OFF;
	}
	if (status == KVC_OK && p_data && atomic_load(&mapped)) {
		*p_data = atomic_load(&mapped) + (size_t)i * WR_LAYERS * WR_PAGE;
	}

	return status;
}

WRAP(kvc_status_t, kvc_lease_block, const kvc_lease_t *lease, uint32_t i, const void **p_data,
     const uint64_t **p_leaves)
{
	const kvc_status_t status = __real_kvc_lease_block(lease, i, p_data, p_leaves);

	return lease == atomic_load(&view) ? place_block(i, status, (void **)(uintptr_t)p_data) : status;
}

WRAP(kvc_status_t, kvc_put_block, const kvc_put_t *put, uint32_t i, void **p_data)
{
	const kvc_status_t status = __real_kvc_put_block(put, i, p_data);

	return put == atomic_load(&written) ? place_block(i, status, p_data) : status;
}

/* What the daemon has of "fake-0": slabs that the worker could map, and could not; -1: it has no such GPU. */
static atomic_int slabs_mapped = -1, slabs_unmapped;

WRAP(kvc_status_t, kvc_device, const kvc_t *kvc, uint32_t i, kvc_device_t *device)
{
	const int there = atomic_load(&slabs_mapped) >= 0;

	(void)kvc;
	device->name = i == 0 ? "fake-7" : "fake-0";
	device->mapped = i == 0 ? 1 : (uint32_t)atomic_load(&slabs_mapped);
	device->unmapped = i == 0 ? 0 : (uint32_t)atomic_load(&slabs_unmapped);

	return i < 1u + (uint32_t)there ? KVC_OK : KVC_MISS;
}

WRAP(kvc_status_t, kvc_poll, kvc_t *kvc, uint32_t timeout_ms)
{
	const kvc_status_t status = __real_kvc_poll(kvc, timeout_ms);

	while (kvc == atomic_load(&held)) {
		atomic_store(&holding, 1);
		usleep(100);
	}

	return status;
}

/* ---- the second space ------------------------------------------------------------------------ */

static struct {
	kvc_space_t *space;
	kvc_key_t keys[WR_KEYS];
} second;
static uint8_t second_root[32];

static int is_second(const kvc_space_t *space)
{
	kvc_space_info_t info = {.struct_size = sizeof info};

	kvc_space_get_info(space, &info);

	return memcmp(info.root, second_root, sizeof info.root) == 0;
}

/* What wr.h does from now on is of the other space. */
static void swap_spaces(wr_t *wr)
{
	kvc_space_t *space = wr->space;
	kvc_key_t keys[WR_KEYS];

	memcpy(keys, wr->keys, sizeof keys);
	wr->space = second.space;
	memcpy(wr->keys, second.keys, sizeof keys);
	second.space = space;
	memcpy(second.keys, keys, sizeof keys);
}

static int setup(void **state)
{
	static uint32_t tokens[WR_KEYS * 32];
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_identity_t identity;
	uint32_t n = 0;
	wr_t *wr;

	atomic_store(&view, NULL);
	atomic_store(&written, NULL);
	atomic_store(&mapped, NULL);
	atomic_store(&unmapped, 0);
	atomic_store(&slabs_mapped, -1);
	atomic_store(&slabs_unmapped, 0);
	(void)wr_setup(state);
	wr = *state;
	identity = wr->identity;
	identity.extra = "fake-0";
	assert_int_equal(kvc_space_open(wr->kvc, &identity, &second.space), KVC_OK);
	kvc_space_get_info(second.space, &info);
	memcpy(second_root, info.root, sizeof second_root);
	for (uint32_t i = 0; i < WR_KEYS * 32; i++) {
		tokens[i] = i;
	}
	assert_int_equal(kvc_keys_of(second.space, &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, WR_KEYS * 32, NULL},
				     second.keys, WR_KEYS, &n),
			 KVC_OK);

	return 0;
}

static int teardown(void **state)
{
	kvc_space_close(second.space);

	return wr_teardown(state);
}

#define DEVICE_CASE(function, with) WR_CASE_IN(function, with, setup, teardown)
#define DEVICE_ALSO(function, with) WR_ADD(KV_TEST_ID, function, with, setup, teardown)

/* A step that saves these blocks of the engine as HALF blocks of the second space, from block `from` on. */
static kvc_put_t *submit_half(wr_t *wr, uint32_t from, const uint32_t *ids, uint32_t flags)
{
	kvc_put_t *put;

	swap_spaces(wr);
	put = wr_put(wr, from, from + HALF);
	swap_spaces(wr);
	wr_message(wr);
	wr_add_device(wr, KVX_OWN_MEM, "fake-0");
	wr_add_save(wr, put, KVX_MSG_GPU_MEM | flags, ids, HALF);
	wr_begin(wr);
	wr_end(wr);

	return put;
}

/* The first blocks of wr_eight. */
static kvc_put_t *submit_first_half(wr_t *wr)
{
	return submit_half(wr, 0, wr_eight, 0);
}

static kvc_status_t save_first_half(wr_t *wr)
{
	return wr_put_wait(submit_first_half(wr));
}

static kvc_lease_t *lease_first_half(wr_t *wr)
{
	kvc_lease_t *lease;

	swap_spaces(wr);
	lease = wr_lease(wr, 0, HALF);
	swap_spaces(wr);

	return lease;
}

/* A step that loads wr_other: the first half from the second space, the rest from host memory. */
static void load_two_parts(wr_t *wr, const kvc_lease_t *first, const kvc_lease_t *rest, uint32_t flags, wr_end_t *end)
{
	wr_message(wr);
	wr_add_fence(wr, wr_other, 8);
	wr->mem = KVX_OWN_MEM;
	wr_add_load(wr, first, flags, 7, wr_other, HALF);
	wr->mem = KVX_HOST_MEM;
	wr_add_part(wr, rest, wr_other + HALF, 8 - HALF);
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	if (kvx_worker_run_layered_loads(wr->rank[0].worker)) {
		wr_await_layers(&wr->rank[0]);
	}
	wr_end(wr);
	wr_wait_load(wr, flags, end);
}

static void check_two_parts(wr_t *wr, uint32_t flags)
{
	kvc_lease_t *first = lease_first_half(wr), *rest = wr_lease(wr, HALF, 8);
	wr_end_t end;

	wr_fill(wr, 9);
	load_two_parts(wr, first, rest, flags, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	assert_int_equal(end.loaded.blocks, 8);
	assert_int_equal(end.error_count, 0);
	wr_check_other(wr, 1);
	kvc_release((kvc_lease_t *const[]){first, rest}, 2);
}

/* HALF blocks, asynchronously, from the GPU of another engine that is named so. */
static void load_from_other(wr_t *wr, const char *name, wr_end_t *end)
{
	kvc_lease_t *first;

	assert_int_equal(save_first_half(wr), KVC_OK);
	first = lease_first_half(wr);
	wr_message(wr);
	wr_add_device(wr, OTHER, name);
	wr->mem = OTHER;
	wr_add_load(wr, first, KVX_MSG_ASYNC, 7, wr_other, HALF);
	wr->mem = KVX_HOST_MEM;
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	wr_end(wr);
	wr_wait_load(wr, KVX_MSG_ASYNC, end);
	kvc_release(&first, 1);
}

/* Its space is opened for the load. */
DEVICE_CASE(p1_another_gpu_is_a_place_like_the_own_one, stored)
{
	wr_end_t end;

	load_from_other(wr, "fake-0", &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	assert_int_equal(end.loaded.blocks, HALF);
}

/* Reports that say so within `ms` milliseconds; one ends the wait if `until_one`. */
static uint32_t count_reached(wr_t *wr, uint32_t ms, int until_one)
{
	const uint64_t until = wr_now_ms() + ms;
	kvx_report_reached_t reached;
	uint32_t n = 0;

	while (wr_now_ms() < until && !(until_one && n > 0)) {
		usleep(1000);
		if (wr_take_records(&wr->rank[0], KVX_RECORD_REACHED, &reached, sizeof reached, 1)) {
			assert_int_equal(reached.mem, OTHER);
			n++;
		}
	}

	return n;
}

/* All of its memory that there is can be mapped, and there is some. */
DEVICE_CASE(p7_a_rank_says_once_that_it_reaches_another_gpu, stored)
{
	static const int without[][2] = {{-1, 0}, {0, 0}, {0, 1}, {3, 1}};

	wr_message(wr);
	wr_add_device(wr, OTHER, "fake-0");
	wr_begin(wr);
	wr_end(wr);
	for (uint32_t i = 0; i < KV_COUNT_OF(without); i++) {
		atomic_store(&slabs_unmapped, without[i][1]);
		atomic_store(&slabs_mapped, without[i][0]);
		assert_int_equal(count_reached(wr, 50, 0), 0);
	}
	atomic_store(&slabs_unmapped, 0);
	assert_int_equal(count_reached(wr, WR_PATIENCE, 1), 1);
	atomic_store(&slabs_unmapped, 1);
	assert_int_equal(count_reached(wr, 50, 0), 0);
	atomic_store(&slabs_unmapped, 0);
	assert_int_equal(count_reached(wr, 50, 0), 0);
	assert_true(wr->rank[0].worker->spaces[OTHER][0].known); /* no load waits for it to be opened */
}

/* A GPU that cannot be used says nothing about another one. */
DEVICE_CASE(p7_each_gpu_is_refused_by_itself, stored)
{
	wr_end_t end;

	load_from_other(wr, "refused", &end);
	assert_int_equal(end.loaded.status, KVC_ERR_TIER_OFF);
	assert_int_equal(end.error_count, HALF);
	check_two_parts(wr, KVX_MSG_ASYNC);
}

DEVICE_CASE(p1_a_load_of_two_parts_is_right, stored)
{
	assert_int_equal(save_first_half(wr), KVC_OK);
	check_two_parts(wr, 0);
	check_two_parts(wr, KVX_MSG_ASYNC);
}
DEVICE_ALSO(p1_a_load_of_two_parts_is_right, layered)

/* One that begins while the transfer thread is in the middle of its iteration, and whose space is not open yet. */
DEVICE_CASE(p7_a_save_may_begin_at_any_time, stored)
{
	kvc_put_t *put;

	atomic_store(&holding, 0);
	atomic_store(&held, wr->rank[0].worker->kvc);
	KV_AWAIT(atomic_load(&holding));
	put = submit_first_half(wr);
	usleep(1000); /* the clock has moved */
	atomic_store(&held, NULL);
	assert_int_equal(wr_put_wait(put), KVC_OK);
}

/* ---- without it ------------------------------------------------------------------------------ */

/* Nobody has told the rank of a device: the load has failed, and says that it is the space's fault. */
DEVICE_CASE(p7_a_part_in_an_unknown_space_fails_by_name, stored)
{
	kvc_lease_t *first, *rest = wr_lease(wr, HALF, 8);
	wr_end_t end;

	assert_int_equal(save_first_half(wr), KVC_OK);
	kvx_worker_close(wr->rank[0].worker);
	wr_open_rank(wr, 0, 1);
	first = lease_first_half(wr);
	load_two_parts(wr, first, rest, 0, &end);
	assert_int_equal(end.loaded.status, KVC_ERR_TIER_OFF);
	assert_int_equal(end.error_count, 8);
	kvc_release((kvc_lease_t *const[]){first, rest}, 2);
}

/* A slab there could not be mapped: what lies in it fails at once, and its saves are given up. */
DEVICE_CASE(p5_unmapped_memory_costs_no_deadline, stored)
{
	kvc_lease_t *first, *rest = wr_lease(wr, HALF, 8);
	const uint64_t start = wr_now_ms();
	kvc_put_t *put;
	wr_end_t end;

	assert_int_equal(save_first_half(wr), KVC_OK);
	first = lease_first_half(wr);
	atomic_store(&unmapped, 1);
	load_two_parts(wr, first, rest, 0, &end);
	assert_int_equal(end.loaded.status, KVC_ERR_TIER_OFF);
	assert_true(end.error_count >= HALF);
	put = submit_half(wr, HALF, wr_eight + HALF, 0);
	wr_message(wr);
	wr_add_fence(wr, wr_eight, 8);
	wr_begin(wr); /* nor does a fence wait */
	wr_end(wr);
	assert_int_equal(wr_put_wait(put), KVC_ERR_REVOKED);
	assert_true(wr_now_ms() - start < WR_QUICK_MS);
	kvc_release((kvc_lease_t *const[]){first, rest}, 2);
}

/* ---- memory of the device -------------------------------------------------------------------- */

#ifdef WR_MAPPED
#include "kernels/fake_cuda.h"
#include "kvk/device.h"
#include "worker/cuda/pool_memory.h"

#define MAPPED_BYTES ((size_t)4 << 20)

static int export_memory(void)
{
	kvk_device_info_t info;
	kvk_device_t *device = NULL;
	uint32_t n = 0;
	int fd = -1;

	assert_int_equal(kvk_device_list(fake_cuda_ops(), &info, 1, &n), KV_OK);
	assert_int_equal(kvk_device_open(fake_cuda_ops(), info.uuid, &device), KV_OK);
	assert_int_equal(MAPPED_BYTES % kvk_device_grain(device), 0);
	assert_int_equal(kvk_device_alloc(device, MAPPED_BYTES, &fd), KV_OK);
	kvk_device_close(device);

	return fd;
}

/* Of the second space, from now on. */
static void *map_memory(const wr_t *wr)
{
	const int fd = export_memory();
	void *base = NULL;

	assert_int_equal(kvx_pool_memory_map(wr->rank[0].worker, fd, MAPPED_BYTES, &base), KVC_OK);
	assert_int_equal(close(fd), 0);
	atomic_store(&mapped, base);

	return base;
}

static void unmap_memory(wr_t *wr, void *base)
{
	atomic_store(&mapped, NULL);
	kvx_pool_memory_unmap(wr->rank[0].worker, base);
}

/* Saved into memory of the device, loaded from there, and unmapped when nothing names it. */
DEVICE_CASE(p1_blocks_in_mapped_memory_are_right, stored)
{
	void *base = map_memory(wr);

	assert_int_equal(save_first_half(wr), KVC_OK);
	assert_memory_not_equal(base, (const uint8_t[64]){0}, 64); /* the fake device's bytes lie in host memory */
	check_two_parts(wr, 0);
	check_two_parts(wr, KVX_MSG_ASYNC);
	wr_drain(wr);
	unmap_memory(wr, base);
}
DEVICE_ALSO(p1_blocks_in_mapped_memory_are_right, layered)

/* A promotion has time, here for years, while the engine computes: not what another engine waits for, nor blocks that
 * are about to be written. When the engine idles, it has none. */
DEVICE_CASE(p5_promotions_leave_a_busy_engine_its_memory, slow)
{
	static const uint32_t ids[] = {40, 41, 42, 43}, more[] = {44, 45, 46, 47};
	void *base = map_memory(wr);
	const void *bytes;
	kvc_put_t *put;
	size_t len;

	assert_int_equal(save_first_half(wr), KVC_OK); /* the first batch has waited for nothing */
	assert_int_equal(wr_put_wait(submit_half(wr, HALF, wr_eight + HALF, KVX_MSG_URGENT)), KVC_OK);
	put = submit_half(wr, 8, ids, 0);
	assert_int_equal(kvc_put_wait(put, 0, 20), KVC_ERR_TIMEOUT);
	wr_message(wr);
	wr_add_fence(wr, ids, HALF);
	wr_begin(wr);
	wr_end(wr);
	assert_int_equal(wr_put_wait(put), KVC_OK);
	put = submit_half(wr, 8 + HALF, more, 0);
	assert_int_equal(kvc_put_wait(put, 0, 20), KVC_ERR_TIMEOUT);
	kvx_worker_take_report(wr->rank[0].worker, &bytes, &len); /* the end of a step */
	assert_int_equal(wr_put_wait(put), KVC_OK);
	unmap_memory(wr, base);
}

/* One for a hand-over is sent before an older one to host memory, where enough is on its way: that one does not wait
 * for the step that computes the other's blocks. */
DEVICE_CASE(p5_a_save_waits_for_its_own_step_only, stored)
{
	kvx_worker_t *worker = wr->rank[0].worker;
	_Atomic uint64_t *in_flight = &worker->gpu->saves[0].bytes_in_flight;
	const uint64_t most = KVX_GPU_SAVE_AHEAD_BYTES;
	void *base = map_memory(wr);
	kvc_put_t *older, *urgent;

	atomic_fetch_add(in_flight, most);
	older = wr_put(wr, 8, 8 + HALF);
	wr_save(wr, older, wr_other, HALF);
	wr_device_sync(); /* its step has ended */
	wr_device_stall(0, 1);
	urgent = submit_half(wr, 0, wr_eight, KVX_MSG_URGENT);
	KV_AWAIT(atomic_load(&worker->gpu->in_flight) > 0);
	atomic_fetch_sub(in_flight, most);
	assert_int_equal(wr_put_wait(older), KVC_OK);
	assert_int_equal(kvc_put_wait(urgent, 0, 0), KVC_ERR_TIMEOUT);
	wr_device_stall(0, 0);
	assert_int_equal(wr_put_wait(urgent), KVC_OK);
	unmap_memory(wr, base);
}

DEVICE_CASE(p10_memory_that_is_no_device_s_is_refused, stored)
{
	void *base = NULL;
	int fds[2];

	assert_int_equal(pipe(fds), 0);
	assert_int_not_equal(kvx_pool_memory_map(wr->rank[0].worker, fds[0], MAPPED_BYTES, &base), KVC_OK);
	assert_null(base);
	assert_int_equal(close(fds[0]) + close(fds[1]), 0);
}
#endif

WR_MAIN
