#include "connectors/worker/layers_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"

#include <unistd.h>

#define LATE 400u /* kernels */

const char *layers_program;

kvx_worker_stats_t layers_stats(const wr_t *wr)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};

	kvx_worker_get_stats(wr->rank[0].worker, &stats);

	return stats;
}

void layers_start(rig_t *rig, wr_t *wr, uint32_t ranks)
{
	rig_init(rig, layers_program);
	rig_start(rig);
	*wr = (wr_t){.layer_bytes = 1, .layer_wait_us = WR_PATIENCE * 1000u};
	wr_init_with(wr, rig, ranks, 1);
	wr_fill(wr, 1);
	wr_store(wr, wr_eight, 8);
}

void layers_finish(rig_t *rig, wr_t *wr)
{
	const kvx_worker_stats_t stats = layers_stats(wr);

	assert_int_equal(stats.loads_open + stats.saves_open + stats.marked, 0);
	wr_fini(wr);
	rig_fini(rig);
}

void layers_hear_all(wr_t *wr)
{
	const uint64_t until = wr_now_ms() + UINT64_C(2) * WR_PATIENCE;
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};
	uint32_t ids[WR_BLOCKS], open;
	const void *bytes;
	size_t len;

	do {
		open = 0;
		for (uint32_t r = 0; r < wr->rank_count; r++) {
			(void)kvx_worker_take_failed_blocks(wr->rank[r].worker, ids, WR_BLOCKS);
			kvx_worker_take_report(wr->rank[r].worker, &bytes, &len);
			kvx_worker_get_stats(wr->rank[r].worker, &stats);
			open += (uint32_t)(stats.loads_open + stats.saves_open + stats.marked);
		}
		usleep(500);
		assert_true(wr_now_ms() < until);
	} while (open > 0);
}

int layers_begin(wr_t *wr, const kvc_lease_t *lease)
{
	int layered = 0;

	for (uint32_t i = 0; i < 8; i++) { /* a kernel of before */
		for (uint32_t r = 0; r < wr->rank_count; r++) {
			wr_fill_block(&wr->rank[r], wr_other[i], 5, i);
		}
	}
	wr_plan(wr);
	wr_plan_fence(wr, wr_other, 8);
	wr_plan_load(wr, lease, 0, 7, wr_other, 8);
	wr_begin(wr);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_start_async_loads(wr->rank[r].worker);
		layered += kvx_worker_run_layered_loads(wr->rank[r].worker);
	}

	return layered;
}

void layers_look(const wr_rank_t *rank, uint32_t layer, uint32_t *p_wrong)
{
	for (uint32_t i = 0; i < 8; i++) {
		wr_look_layer(rank, wr_other[i], layer, wr_eight[i], p_wrong);
	}
}

void layers_compute(const wr_rank_t *rank, uint32_t *p_wrong)
{
	for (uint32_t l = 0; l < rank->layers; l++) {
		kvx_worker_await_layer(rank->worker, l);
		layers_look(rank, l, p_wrong);
	}
}

int layers_early(wr_t *wr, uint32_t flags)
{
	kvx_msg_finish(&wr->plan, wr->step);

	return kvx_worker_prefetch_step(wr->rank[0].worker, wr->plan.data, wr->plan.len, flags);
}

void layers_go_on(wr_t *wr)
{
	kvx_worker_begin_step(wr->rank[0].worker, wr->plan.data, wr->plan.len);
	kvx_worker_start_async_loads(wr->rank[0].worker);
}

static void nothing(void *args)
{
	(void)args;
}

void layers_be_late(void)
{
	for (uint32_t i = 0; i < LATE; i++) {
		wr_device_call(nothing, NULL);
	}
}

void layers_plan(wr_t *wr, const kvc_lease_t *lease)
{
	layers_be_late();
	for (uint32_t i = 0; i < 8; i++) {
		wr_fill_block(&wr->rank[0], wr_other[i], 5, i);
	}
	wr_plan(wr);
	wr_plan_fence(wr, wr_other, 8);
	wr_plan_load(wr, lease, 0, 7, wr_other, 8);
}

void layers_look_all(wr_t *wr, uint32_t seed, uint32_t *p_wrong)
{
	for (uint32_t i = 0; i < 8; i++) {
		wr_look_block(&wr->rank[0], wr_other[i], seed, wr_eight[i], p_wrong);
	}
}

void layers_write(wr_t *wr, uint32_t seed)
{
	for (uint32_t i = 0; i < 8; i++) {
		wr_fill_block(&wr->rank[0], wr_other[i], seed, wr_eight[i]);
	}
}

void layers_idle_step(wr_t *wr)
{
	uint32_t ids[WR_BLOCKS];
	const void *bytes;
	size_t len;

	wr_plan(wr);
	wr_begin(wr);
	kvx_worker_end_step(wr->rank[0].worker);
	assert_int_equal(kvx_worker_take_failed_blocks(wr->rank[0].worker, ids, WR_BLOCKS), 0);
	kvx_worker_take_report(wr->rank[0].worker, &bytes, &len);
}
