/* A driver that refuses memory of the pool: for a moment, in one place, for good. */
#include "connectors/worker/wr.h"

#include "kvk/gpu.h"

#include <stdatomic.h>
#include <stdio.h>
#include <unistd.h>

#define LARGE  ((size_t)1 << 20) /* of the pool, not the worker's own */
#define STORED 48u               /* more than one slab holds */
#define BEHIND 8u                /* the last of them, in another slab than the first */
#define TRIES  8u

static atomic_uint refusals;        /* calls that are refused from now on, */
static _Atomic(kv_status_t) answer; /* with this one, */
static atomic_int sparing;          /* but not for the memory */
static atomic_uintptr_t wanted;     /* that was asked for last to write there */
static atomic_int stuck;            /* nobody gets any; when somebody has asked, it is the limit */

kv_status_t __real_kvk_gpu_register(kvk_gpu_t *gpu, void *base, size_t bytes);
kv_status_t __wrap_kvk_gpu_register(kvk_gpu_t *gpu, void *base, size_t bytes);
kvc_status_t __real_kvc_put_block(const kvc_put_t *put, uint32_t i, void **p_data);
kvc_status_t __wrap_kvc_put_block(const kvc_put_t *put, uint32_t i, void **p_data);

kv_status_t __wrap_kvk_gpu_register(kvk_gpu_t *gpu, void *base, size_t bytes)
{
	const uintptr_t at = atomic_load(&wanted) - (uintptr_t)base;

	if (bytes < LARGE || atomic_load(&refusals) == 0 || (atomic_load(&sparing) && at < bytes)) {
		return __real_kvk_gpu_register(gpu, base, bytes);
	}
	atomic_fetch_sub(&refusals, 1u);

	return atomic_load(&stuck) && atomic_load(&wanted) ? KV_ERR_LIMIT : atomic_load(&answer);
}

kvc_status_t __wrap_kvc_put_block(const kvc_put_t *put, uint32_t i, void **p_data)
{
	const kvc_status_t status = __real_kvc_put_block(put, i, p_data);

	if (status == KVC_OK && p_data) {
		atomic_store(&wanted, (uintptr_t)*p_data);
	}

	return atomic_load(&stuck) ? (kvc_status_t)KV_ERR_FAULT : status;
}

static void refuse(uint32_t calls, kv_status_t status, int spare)
{
	atomic_store(&wanted, 0);
	atomic_store(&sparing, spare);
	atomic_store(&answer, status);
	atomic_store(&refusals, calls);
}

static kvc_status_t proved_at_last(wr_t *wr)
{
	wr_open_rank(wr, 0, 0);

	return wr_await_self_test(wr);
}

/* Closed, and what is opened next is refused all memory of the pool, with this answer. */
static void close_and_refuse(wr_t *wr, kv_status_t status)
{
	kvx_worker_close(wr->rank[0].worker);
	refuse(UINT32_MAX, status, 0);
}

/* A step that loads eight blocks: what it has come to. */
static void load_eight(wr_t *wr, uint32_t from, wr_end_t *end)
{
	kvc_lease_t *lease = wr_lease(wr, from, from + 8);

	wr_load(wr, lease, 0, end);
	kvc_release(&lease, 1);
}

static kvc_status_t save_behind(wr_t *wr)
{
	kvc_put_t *put = wr_put(wr, 8, STORED);
	uint32_t ids[STORED];

	for (uint32_t i = 8; i < STORED; i++) {
		ids[i - 8] = i;
	}
	wr_save(wr, put, ids, STORED - 8);

	return wr_put_wait(put);
}

WR_CASE(p10_memory_the_driver_refuses_for_a_moment_is_tried_again, wr_one)
{
	static const kv_status_t passing[] = {KV_ERR_IO, KV_ERR_NOMEM};
	wr_end_t end;

	for (uint32_t i = 0; i < 2; i++) {
		kvx_worker_close(wr->rank[0].worker);
		refuse(3, passing[i], 0);
		assert_int_equal(proved_at_last(wr), KVC_OK);
		assert_int_equal(wr_stats(wr, 0).gpu_refused, 3);
		load_eight(wr, 0, &end);
		assert_int_equal(end.loaded.status, KVC_OK);
		assert_int_equal(end.error_count, 0);
	}
}

WR_CASE(p10_saves_wait_for_memory_the_driver_refuses_for_a_moment, wr_one)
{
	wr_end_t end;

	assert_true(wr_stats(wr, 0).registered_bytes < (5u << 20)); /* one slab */
	refuse(2, KV_ERR_IO, 0);
	assert_int_equal(save_behind(wr), KVC_OK);
	assert_int_equal(kvx_worker_self_test_status(wr->rank[0].worker), KVC_OK);
	assert_int_equal(wr_stats(wr, 0).gpu_refused, 2);
	assert_int_equal(wr_stats(wr, 0).save_dropped, 0);
	load_eight(wr, STORED - BEHIND, &end);
	assert_int_equal(end.loaded.status, KVC_OK);
	for (uint32_t i = 0; i < 8; i++) {
		assert_true(wr_block_is(&wr->rank[0], wr_other[i], 1, STORED - BEHIND + i));
	}
}

/* They have waited for the rest for a second; what the device did see is stored by then. */
WR_CASE(p6_blocks_of_a_save_before_memory_that_is_refused_are_stored, wr_one)
{
	kvc_match_t match = {.struct_size = sizeof match};

	refuse(UINT32_MAX, KV_ERR_IO, 0);
	assert_int_not_equal(save_behind(wr), KVC_OK);
	refuse(0, KV_OK, 0);
	kvc_match(wr->space, wr->keys, STORED, &match);
	print_message("%u of %u blocks\n", match.n, STORED);
	assert_in_range(match.n, 9, STORED - 1);
	assert_int_equal(kvx_worker_self_test_status(wr->rank[0].worker), KVC_OK);
	assert_int_equal(save_behind(wr), KVC_OK);
}

/* Two slabs, and that without room for the self-test is refused: a load from there fails at once, the other one comes;
 * and when the driver gives way, both do. */
WR_CASE(p10_only_blocks_in_refused_memory_are_not_there, wr_one)
{
	const uint32_t from[2] = {0, STORED - BEHIND};
	uint32_t failed = 0;
	wr_end_t end;

	assert_int_equal(save_behind(wr), KVC_OK);
	kvx_worker_close(wr->rank[0].worker);
	refuse(UINT32_MAX, KV_ERR_IO, 1);
	assert_int_equal(proved_at_last(wr), KVC_OK);
	for (uint32_t i = 0; i < 2; i++) {
		const uint64_t begin = wr_now_ms();

		load_eight(wr, from[i], &end);
		assert_true(wr_now_ms() - begin < WR_LOAD_MS / 2);
		assert_int_equal(end.error_count, end.loaded.status == KVC_OK ? 0 : 8);
		assert_true(end.loaded.status == KVC_OK || end.loaded.status == KVC_ERR_BUSY);
		failed += end.loaded.status != KVC_OK;
	}
	assert_int_equal(failed, 1);
	assert_int_equal(kvx_worker_self_test_status(wr->rank[0].worker), KVC_OK);

	refuse(0, KV_OK, 0);
	KV_AWAIT(wr_stats(wr, 0).registered_bytes >= 7u << 20); /* both; nobody asks for it, the worker has time */
	for (uint32_t i = 0; i < 2; i++) {
		load_eight(wr, from[i], &end);
		assert_int_equal(end.loaded.status, KVC_OK);
	}
}

WR_CASE(p10_memory_that_is_refused_again_and_again_is_declined, wr_one)
{
	close_and_refuse(wr, KV_ERR_IO);
	assert_int_equal(proved_at_last(wr), KV_ERR_IO);
	assert_int_equal(wr_stats(wr, 0).gpu_refused, TRIES);
	kvx_worker_close(wr->rank[0].worker);
	refuse(UINT32_MAX, KV_ERR_LIMIT, 0); /* which is no different the next time */
	assert_int_equal(proved_at_last(wr), KVC_ERR_LIMIT);
	assert_int_equal(wr_stats(wr, 0).gpu_refused, 1);
	refuse(0, KV_OK, 0);
}

/* Memory is refused while the self-test has a block to write. */
WR_CASE(p4_a_worker_that_declines_gives_back_what_its_self_test_has, wr_one)
{
	close_and_refuse(wr, KV_ERR_IO);
	atomic_store(&stuck, 1);
	assert_int_equal(proved_at_last(wr), KVC_ERR_LIMIT);
	atomic_store(&stuck, 0);
	refuse(0, KV_OK, 0);
	rig_check_quiet(&wr->rig); /* the daemon has nothing of it */
}

WR_MAIN
