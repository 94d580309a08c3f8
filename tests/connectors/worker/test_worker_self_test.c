/* A worker whose blocks come back with other bytes than went in finds out, and from then on neither loads nor
 * saves. And one whose transfer thread is held up. */
#include "connectors/worker/wr.h"

#include "kv/shm.h"
#include "kvk/gpu.h"
#include "kvk/move.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static atomic_int wrong; /* scatters flip a bit behind the digests' back */

kv_status_t __real_kvk_scatter(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves,
			       uint32_t count, uint32_t *p_bad);
kv_status_t __wrap_kvk_scatter(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves,
			       uint32_t count, uint32_t *p_bad);

kv_status_t __wrap_kvk_scatter(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves,
			       uint32_t count, uint32_t *p_bad)
{
	const kv_status_t status = __real_kvk_scatter(layout, paged, moves, count, p_bad);
	const size_t stride = paged->block_stride ? paged->block_stride : paged->page_bytes;

	if (atomic_load(&wrong)) {
		((uint8_t *)paged->base[paged->layers - 1])[moves[0].block * stride + 5] ^= 1;
	}

	return status;
}

kv_status_t __real_kvk_gpu_submit(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_job_t **p_job);
kv_status_t __wrap_kvk_gpu_submit(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_job_t **p_job);

/* Of a device: two layers change places, which no digest of the pool's bytes can tell. */
kv_status_t __wrap_kvk_gpu_submit(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_job_t **p_job)
{
	kvk_gpu_copy_t other = *copy;
	kvk_paged_t paged = *copy->paged;
	void *base[WR_LAYERS];

	if (!atomic_load(&wrong) || copy->dir != KVK_GPU_SCATTER) {
		return __real_kvk_gpu_submit(gpu, copy, p_job);
	}
	memcpy(base, paged.base, paged.layers * sizeof *base);
	base[0] = paged.base[1];
	base[1] = paged.base[0];
	paged.base = base;
	other.paged = &paged;

	return __real_kvk_gpu_submit(gpu, &other, p_job);
}

static atomic_int held, waits; /* the transfer thread is, and is there */

kvc_status_t __real_kvc_poll(kvc_t *kvc, uint32_t timeout_ms);
kvc_status_t __wrap_kvc_poll(kvc_t *kvc, uint32_t timeout_ms);

kvc_status_t __wrap_kvc_poll(kvc_t *kvc, uint32_t timeout_ms)
{
	char name[16] = "";

	(void)pthread_getname_np(pthread_self(), name, sizeof name);
	while (atomic_load(&held) && strcmp(name, "kvx-transfer") == 0) {
		atomic_store(&waits, 1);
		usleep(1000);
	}

	return __real_kvc_poll(kvc, timeout_ms);
}

WR_CASE(p1_a_layout_that_fails_its_self_test_is_not_used, wr_one)
{
	kvx_worker_stats_t stats;
	kvc_lease_t *lease;
	kvc_put_t *put;
	wr_end_t end;

	kvx_worker_close(wr->rank[0].worker);

	atomic_store(&wrong, 1);
	wr_open_rank(wr, 0, 0);
	assert_int_equal(wr_await_self_test(wr), KVC_ERR_CORRUPT);
	atomic_store(&wrong, 0);
	lease = wr_lease(wr, 0, 8);
	put = wr_put(wr, 8, 16);
	wr_load(wr, lease, 0, &end);
	assert_int_equal(end.error_count, 8);
	wr_message(wr);
	wr_add_save(wr, put, KVX_MSG_COMPLETE, wr_eight, 8);
	wr_begin(wr);
	(void)wr_wait_dropped(wr);
	stats = wr_stats(wr, 0);
	assert_int_equal(stats.self_test_failures, 1);
	assert_int_equal(stats.self_tests + stats.load_bytes + stats.save_bytes, 0);
	kvc_put_free(put);
	kvc_release(&lease, 1);
}

/* It is told once only. */
WR_CASE(p7_an_adapter_behind_a_thousand_others_is_known, wr_one)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	kvc_match_t match = {.struct_size = sizeof match};
	wr_end_t end;
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	rig_signal(&wr->rig, SIGSTOP); /* a space that is known stays unopened, and is waited for */
	do {
		usleep(1000);
		kvc_match(wr->space, wr->keys, 8, &match);
	} while (match.why != KV_WHY_DAEMON_STALE && wr_now_ms() < until);
	atomic_store(&held, 1);
	do {
		wr_message(wr);
		wr_add_space(wr, 2, "other");
		wr_begin(wr);
		usleep(1000);
	} while (!atomic_load(&waits) && wr_now_ms() < until);
	wr_message(wr);
	for (uint32_t i = 0; i < 1024; i++) {
		wr_add_space(wr, 2, "other");
	}
	wr_add_space(wr, 1, "adapter");
	wr_begin(wr);

	atomic_store(&held, 0);
	wr->number = 1;
	wr->timeout_ms = 300;
	do {
		wr_load(wr, lease, 0, &end);
	} while ((end.loaded.status == KVC_ERR_BUSY || end.loaded.status == KVC_ERR_ARG) && wr_now_ms() < until);
	assert_true(end.loaded.status == KVC_ERR_DAEMON_STALE || end.loaded.status == KVC_ERR_TIMEOUT);
	rig_signal(&wr->rig, SIGCONT);
	kvc_release(&lease, 1);
}

WR_MAIN
