/* What a worker says that steps and loads took: the time of who computes, not of who enqueues. */
#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MS UINT64_C(1000000)

static void take_ms(void *args)
{
	wr_device_take(*(const uint64_t *)args * MS);
}

/* The engine computes for so long. */
static void compute(uint64_t ms)
{
	uint64_t *args = malloc(sizeof *args);

	*args = ms;
	wr_device_call(take_ms, args);
}

static void begin_step(wr_t *wr, int timed)
{
	wr_message(wr);
	if (timed) {
		wr_add_time(wr);
	}
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	kvx_worker_run_sync_loads(wr->rank[0].worker);
}

/* Milliseconds of a device, which no other program holds up; a host may take any time. */
static uint64_t at_most(uint64_t ms)
{
	return wr_device_runs_behind() ? ms * MS : UINT64_MAX;
}

WR_CASE(p7_a_step_is_timed_by_who_computes_it, wr_one)
{
	kvx_report_step_t steps[4];

	compute(20); /* of an earlier step */
	begin_step(wr, 1);
	compute(5);
	wr_end(wr);
	compute(20); /* sampling */
	wr_device_sync();
	assert_int_equal(wr_take_steps(wr, steps, 4), 1);
	assert_int_equal(steps[0].step, wr->step);
	assert_in_range(steps[0].ns, 4990000, at_most(19));

	/* Nobody asks; a step that does not end. */
	begin_step(wr, 0);
	compute(5);
	wr_end(wr);
	begin_step(wr, 1);
	begin_step(wr, 0);
	wr_end(wr);
	wr_device_sync();
	assert_int_equal(wr_take_steps(wr, steps, 4), 0);

	/* Two are enqueued before the first has ended. */
	begin_step(wr, 1);
	compute(3);
	wr_end(wr);
	begin_step(wr, 1);
	compute(9);
	wr_end(wr);
	wr_device_sync();
	assert_int_equal(wr_take_steps(wr, steps, 4), 2);
	assert_int_equal(steps[0].step + 1, steps[1].step);
	assert_in_range(steps[0].ns, 2990000, at_most(9));
	assert_in_range(steps[1].ns, 8990000, at_most(20));
}

/* The device copies for 50 ms, the engine computes for 5 after that. By layers it computes while it loads: what took
 * how long cannot be told; nor can it where the engine forgets the loads. */
WR_CASE(p7_a_step_that_loads_is_timed_after_its_loads, wr_layered)
{
	static const struct {
		int prefetched, layers, run, timed;
	} rows[] = {{0, 0, 1, 1}, {0, 0, 1, 1}, {0, 0, 0, 0}, {0, 1, 0, 0}, {1, 0, 1, 1}, {1, 1, 0, 0}};
	kvx_worker_t *worker = wr->rank[0].worker;
	kvx_report_step_t steps[4];

	wr_device_cost(50u * MS / (UINT64_C(8) * WR_LAYERS * WR_PAGE));
	for (size_t i = 0; i < KV_COUNT_OF(rows) && (wr_device_runs_behind() || i < 3); i++) {
		kvc_lease_t *lease = wr_lease(wr, 0, 8);

		compute(20); /* of an earlier step */
		wr_message_load(wr, lease, 0);
		wr_add_time(wr);
		assert_int_equal(rows[i].prefetched && wr_prefetch(wr, WR_PREFETCH), rows[i].prefetched);
		wr_begin(wr);
		kvx_worker_start_async_loads(worker);
		if (rows[i].layers) {
			assert_int_equal(kvx_worker_run_layered_loads(worker), 1);
			wr_await_layers(&wr->rank[0]);
		} else if (rows[i].run) {
			kvx_worker_run_sync_loads(worker);
		}
		compute(5);
		wr_end(wr);
		wr_device_sync();
		if (!rows[i].layers && !rows[i].run) {
			begin_step(wr, 0);
			wr_end(wr);
		}
		assert_int_equal(wr_take_steps(wr, steps, 4), rows[i].timed);
		if (rows[i].timed) {
			assert_int_equal(steps[0].step, wr->step);
			assert_in_range(steps[0].ns, 4990000, at_most(19));
		}
		kvc_release(&lease, 1);
	}
	wr_device_cost(0);
}

/* What the engine has enqueued before a load is no part of it. */
static void load_behind(wr_t *wr, uint32_t flags)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);
	const uint64_t begin = wr_now_ms();
	uint64_t wall;
	wr_end_t end;

	wr_device_hold(1);
	compute(200);
	wr_message_load(wr, lease, flags);
	wr_step(wr);
	usleep(20000);
	wr_device_hold(0);
	wr_wait_load(wr, flags, &end);
	wall = (wr_now_ms() - begin + 1) * MS;
	assert_int_equal(end.loaded.status, KVC_OK);
	assert_int_equal(end.loaded.blocks, 8);
	assert_true(end.loaded.ns <= wall);
	if (wr_device_runs_behind()) {
		assert_in_range(end.loaded.ns, end.loaded.bytes - end.loaded.bytes / 100,
				10 * end.loaded.bytes); /* a byte takes it 1 ns or more */
	}
	kvc_release(&lease, 1);
}

WR_CASE(p7_a_load_is_timed_without_what_it_waits_behind, wr_one)
{
	wr_device_cost(1);
	load_behind(wr, 0);
	load_behind(wr, KVX_MSG_ASYNC);
	wr_device_cost(0);
}

#define BURST 7u

/* What the loads of a burst took; all are of the same blocks, and were there. */
static void hear_burst(wr_t *wr, uint64_t *took)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	kvx_report_loaded_t loaded[BURST];
	uint32_t heard = 0;
	char id[16];

	while (heard < BURST) {
		while (kvx_worker_take_finished(wr->rank[0].worker, id, sizeof id, NULL) > 0) {
		}
		assert_int_equal(wr_count_failed(wr), 0);
		heard +=
			wr_take_records(&wr->rank[0], KVX_RECORD_LOADED, loaded + heard, sizeof *loaded, BURST - heard);
		assert_true(wr_now_ms() < until);
		usleep(200);
	}
	for (uint32_t i = 0; i < BURST; i++) {
		assert_int_equal(loaded[i].status, KVC_OK);
		assert_in_range(loaded[i].load, 1, BURST);
		took[loaded[i].load - 1] = loaded[i].ns;
	}
}

static void burst(wr_t *wr, uint32_t flags, int layers, uint64_t *took)
{
	kvc_lease_t *lease = wr_lease(wr, 0, 8);

	wr_device_hold(1);
	wr_message(wr);
	for (uint32_t i = 0; i < BURST; i++) {
		uint32_t ids[8];

		for (uint32_t b = 0; b < 8; b++) {
			ids[b] = 8 + 8 * i + b;
		}
		wr_add_load(wr, lease, flags, i + 1, ids, 8);
	}
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);
	if (layers && kvx_worker_run_layered_loads(wr->rank[0].worker)) {
		wr_await_layers(&wr->rank[0]);
	} else if (!layers) {
		kvx_worker_run_sync_loads(wr->rank[0].worker);
	}
	wr_end(wr);
	usleep(20000); /* longer than all of it takes the device */
	wr_device_hold(0);
	hear_burst(wr, took);
	kvc_release(&lease, 1);
}

/* Else a burst of hits would make memory look slower than computing. */
WR_CASE(p7_overlapping_loads_are_each_timed_by_their_own_part, wr_layered)
{
	static const struct {
		uint32_t flags;
		int layers;
	} ways[] = {{0, 0}, {0, 1}, {KVX_MSG_ASYNC, 0}};
	const uint64_t each = UINT64_C(8) * WR_LAYERS * WR_PAGE;

	wr_device_cost(1);
	for (size_t way = 0; way < KV_COUNT_OF(ways); way++) {
		const uint64_t begin = wr_now_ms();
		uint64_t took[BURST] = {0}, sum = 0;

		burst(wr, ways[way].flags, ways[way].layers, took);
		for (uint32_t i = 0; i < BURST; i++) {
			sum += took[i];
			if (wr_device_runs_behind()) { /* the host may take any time */
				assert_in_range(took[i], each * 3 / 4, each * 2);
			}
		}
		assert_true(wr_device_runs_behind() || sum <= (wr_now_ms() - begin + 1) * MS);
	}
	wr_device_cost(0);
}

WR_MAIN
