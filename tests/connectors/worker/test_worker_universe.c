/* Seeded universes of the worker half: an engine that allocates, computes, saves, loads, reuses, drops and fails at
 * random, next to a model. The model says what each engine block must contain, which blocks must be named as failed,
 * and which puts must become visible. KVD_TEST_SEED: another seed; KVD_TEST_UNIVERSES: more of them. */
#include "connectors/worker/fail_alloc.h"
#include "connectors/worker/universe.h"
#include "connectors/worker/wr_device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define UNIVERSES 6u
#define STEPS     100u
#define FRESH     6u /* steps */

/* ---- a step ---------------------------------------------------------------------------------- */

static void choose_step(world_t *w, int idle)
{
	u_step_t *now = &w->now;

	*now = (u_step_t){0};
	if (idle) {
		return;
	}
	now->driver = u_one_in(w, 12);
	now->held = !now->driver && u_one_in(w, 3);
	now->alloc = u_one_in(w, 14);
	now->late = u_one_in(w, 25);
	now->drop = !now->late && u_one_in(w, 12);
	now->no_end = u_one_in(w, 12);
	now->no_run = now->no_end && !now->late && u_one_in(w, 2);
	now->abandoned = u_one_in(w, 4);
}

static void add_fences(world_t *w)
{
	uint32_t ids[WR_BLOCKS], n = 0;

	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		if (w->given[b]) {
			ids[n++] = b;
		}
	}
	if (u_one_in(w, 10)) { /* of all blocks */
		for (uint32_t i = 0; i < PUTS; i++) {
			w->puts[i].excused = 1;
		}
		n = 0;
	} else if (n == 0) {
		return;
	}
	wr_add_fence(&w->wr, ids, n);
}

static void write_message(world_t *w, int idle)
{
	memset(w->given, 0, sizeof w->given);
	memset(w->compute, 0, sizeof w->compute);
	wr_message(&w->wr);
	w->tainted[w->wr.step % HISTORY] = 0;
	choose_step(w, idle);
	u_add_complete_saves(w);
	for (uint32_t i = 0; i < LOADS; i++) {
		if (w->loads[i].number && w->loads[i].drop) {
			wr_add_drop(&w->wr, w->loads[i].number);
			w->loads[i].drop = 0;
		}
	}
	for (uint32_t n = idle ? 0 : u_roll(w, w->now.held ? 2 : 4); n > 0; n--) { /* as many as need not wait */
		u_add_load(w);
	}
	for (uint32_t n = idle ? 0 : u_roll(w, 4); n > 0; n--) {
		u_add_save(w);
	}
	add_fences(w);
	wr_add_work(&w->wr, u_roll(w, 40), u_one_in(w, 2) ? u_roll(w, 20000) : 0);
	if (u_one_in(w, 4)) {
		wr_add_time(&w->wr);
	}
}

/* What the model says of this step's loads, and of all when a call fails. */
static void set_fates(world_t *w)
{
	for (uint32_t i = 0; i < LOADS; i++) {
		u_load_t *load = &w->loads[i];
		const int new = load->number && load->step == w->wr.step;

		load->excused |= w->now.driver || (new && (w->now.alloc || w->wr.step < w->fresh_until));
		if (!new) {
			continue;
		}
		if (load->lease[0] && !load->doomed && u_one_in(w, 25)) {
			u_revoke(w, load);
		}
		if (load->flags & KVX_MSG_ASYNC && w->now.late) {
			u_doom(load, KVC_ERR_TIMEOUT);
			w->seen.late++;
		} else if (load->flags & KVX_MSG_ASYNC && w->now.drop && load->n > 0 && !load->doomed &&
			   !load->excused) {
			load->drop = 1;
			load->silent = 1;
			load->want = KVC_MISS;
		} else if (!(load->flags & KVX_MSG_ASYNC) && w->now.no_run) {
			u_doom(load, KVC_PENDING);
		}
	}
	for (uint32_t i = 0; i < PUTS; i++) {
		w->puts[i].excused |= w->now.driver;
	}
	w->holes += w->now.alloc ? SPACES : 0u; /* which may be a SPACE record there was no memory for */
	if (w->now.driver || w->now.alloc || w->now.no_run) {
		w->tainted[w->wr.step % HISTORY] = 2;
	}
}

/* Something else comes than what was prefetched: the blocks of its loads are the engine's again, at once. */
static void abandon(world_t *w)
{
	const uint32_t step = w->wr.step, kind = u_roll(w, 3);
	kvx_worker_t *worker = w->wr.rank[0].worker;

	if (kind == 0) {
		kvx_worker_begin_step(worker, NULL, 0);
	} else if (kind == 1) {
		kvx_worker_begin_step(worker, "", 1);
		w->unsound++;
	} else {
		wr_message(&w->wr);
		w->tainted[w->wr.step % HISTORY] = 0;
		wr_add_fence(&w->wr, wr_other, 8);
		wr_begin(&w->wr);
	}
	for (uint32_t i = 0; i < PUTS; i++) {
		w->puts[i].excused |= kind != 0;
		w->puts[i].doomed |= w->puts[i].put && w->puts[i].step == step && !w->puts[i].later;
	}
	for (uint32_t i = 0; i < LOADS; i++) {
		u_load_t *load = &w->loads[i];

		if (u_is_sync(load, step)) {
			u_doom(load, KVC_PENDING);
			load->lost = 1;
			for (uint32_t b = 0; b < load->n; b++) {
				u_fill(w, load->block[b].id, ++w->serial);
			}
		}
	}
	w->seen.abandoned++;
}

static void begin(world_t *w)
{
	const uint32_t flags = KVX_PREFETCH_COMPUTED | (w->wr.layer_bytes ? KVX_PREFETCH_LAYERS : 0u);

	wr_device_hold(w->now.held);
	wr_device_fail(w->now.driver ? 1 + u_roll(w, 80) : 0);
	fail_at = w->now.alloc ? 1 + u_roll(w, 8) : 0;
	if (w->wr.rank_count == 1 && !w->now.late && !w->now.drop && u_one_in(w, 2)) {
		w->now.prefetched = wr_prefetch(&w->wr, flags);
	}
	if (w->now.prefetched && w->now.abandoned) {
		fail_at = 0;
		wr_device_hold(0);
		abandon(w);
	} else {
		wr_begin(&w->wr);
	}
	fail_at = 0;
	w->seen.prefetched += w->now.prefetched ? 1u : 0u;
}

/* The engine awaits each layer, in some order, then reads it; now and then not all. */
static void compute_layers(world_t *w, uint32_t r, uint32_t first, int skip)
{
	const uint32_t layers = w->wr.rank[r].layers;

	for (uint32_t i = 0; i < layers - (skip ? 1u : 0u); i++) {
		kvx_worker_await_layer(w->wr.rank[r].worker, (first + i) % layers);
		for (uint32_t n = 0; n < LOADS; n++) {
			if (u_is_sync(&w->loads[n], w->wr.step)) {
				u_compare_load(w, &w->loads[n], r, (first + i) % layers, 1);
			}
		}
	}
	for (uint32_t n = 0; n < LOADS && skip; n++) {
		u_load_t *load = &w->loads[n];

		if (!u_is_sync(load, w->wr.step)) {
			continue;
		}
		if (w->wr.rank_count > 1) { /* on another rank it may come whole, and be fine */
			load->excused = 1;
		} else if (!load->doomed) {
			u_doom(load, KVC_PENDING);
		}
	}
}

static void run_loads(world_t *w)
{
	const int layers = w->wr.layer_bytes && u_one_in(w, 2), skip = u_one_in(w, 30);
	const uint32_t first = u_roll(w, WR_LAYERS);

	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		kvx_worker_t *worker = w->wr.rank[r].worker;
		int layered = 0;

		if (!w->now.late && !w->now.drop) {
			kvx_worker_start_async_loads(worker);
		}
		if (w->now.no_run) {
			continue;
		}
		if (layers) {
			layered = kvx_worker_run_layered_loads(worker);
		} else {
			kvx_worker_run_sync_loads(worker);
		}
		w->seen.layered += layered ? 1u : 0u;
		if (layered) {
			compute_layers(w, r, first, skip);
			continue;
		}
		for (uint32_t i = 0; i < LOADS; i++) {
			if (u_is_sync(&w->loads[i], w->wr.step)) {
				u_compare_load(w, &w->loads[i], r, 0, WR_LAYERS);
			}
		}
	}
}

/* The lease of a load goes while the device has not copied yet. */
static void revoke_under_copy(world_t *w)
{
	for (uint32_t i = 0; i < LOADS && w->now.held && wr_device_runs_behind(); i++) {
		u_load_t *load = &w->loads[i];

		if (load->number && load->step == w->wr.step && load->lease[0] && !load->doomed && !load->silent &&
		    u_one_in(w, 6)) {
			u_revoke(w, load);
		}
	}
}

static int late_loads_open(const world_t *w)
{
	for (uint32_t i = 0; i < LOADS && w->now.late; i++) {
		if (w->loads[i].number && w->loads[i].step == w->wr.step && w->loads[i].flags & KVX_MSG_ASYNC) {
			return 1;
		}
	}

	return 0;
}

static void run_step(world_t *w, int idle)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;

	write_message(w, idle);
	set_fates(w);
	begin(w);
	run_loads(w);
	revoke_under_copy(w);
	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		if (w->compute[b]) {
			u_fill(w, b, w->compute[b]);
		}
	}
	if (!w->now.no_end) {
		wr_end(&w->wr);
	}
	wr_device_hold(0);
	u_collect(w);
	while (late_loads_open(w)) {
		assert_true(wr_now_ms() < until);
		usleep(1000);
		u_collect(w);
	}
	for (uint32_t i = 1; i < SPACES && w->now.alloc; i++) {
		w->space[i].told = 0; /* perhaps it was not heard */
	}
	u_check_puts(w);
}

/* ---- a universe ------------------------------------------------------------------------------ */

static void drain(world_t *w)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	uint32_t open;

	do {
		run_step(w, 1);
		open = 0;
		for (uint32_t i = 0; i < LOADS; i++) {
			open += w->loads[i].number != 0;
		}
		for (uint32_t i = 0; i < PUTS; i++) {
			open += w->puts[i].put != NULL;
		}
		for (uint32_t r = 0; r < w->wr.rank_count; r++) {
			open += wr_stats(&w->wr, r).saves_open ? 1u : 0u;
		}
		usleep(open ? 1000 : 0);
		assert_true(wr_now_ms() < until);
	} while (open > 0);
}

/* The engine ends amid all that and begins again. Nothing of it is heard later. */
static void reopen(world_t *w)
{
	wr_device_sync();
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		w->seen.fences += wr_stats(&w->wr, r).fences;
		kvx_worker_close(w->wr.rank[r].worker);
		wr_open_rank(&w->wr, r, 1);
	}
	for (uint32_t i = 0; i < LOADS; i++) {
		u_load_t *load = &w->loads[i];

		for (uint32_t b = 0; load->number && b < load->n; b++) {
			w->busy[load->block[b].id] = 0;
			u_fill(w, load->block[b].id, ++w->serial);
		}
		if (load->number) {
			kvc_release(load->lease, 2);
			load->number = 0;
		}
	}
	for (uint32_t i = 0; i < PUTS; i++) {
		w->puts[i].excused = 1;
	}
	for (uint32_t i = 0; i < SPACES; i++) {
		w->space[i].told = 0;
	}
	w->unsound = 0;
	w->holes = 0;
	w->fresh_until = w->wr.step + FRESH;
}

/* The daemon dies under all that, and another one comes. */
static void replace_daemon(world_t *w)
{
	const uint64_t before = kvc_incarnation(w->wr.kvc);

	rig_kill(&w->wr.rig);
	for (uint32_t i = 0; i < LOADS; i++) {
		w->loads[i].excused = 1;
	}
	for (uint32_t i = 0; i < PUTS; i++) {
		w->puts[i].excused = 1;
	}
	for (uint32_t i = 0; i < 3; i++) {
		run_step(w, 0);
	}
	drain(w);
	rig_start(&w->wr.rig);
	wr_await_restart(&w->wr, before);
	w->spaces = 1;
	u_reset_space(w, 0);
}

static void open_universe(world_t *w, uint32_t index)
{
	w->wr.rank_count = index % 3 == 2 ? 2 : 1;
	w->wr.empty = 1;
	w->wr.layer_bytes = index % 4 < 2;
	w->wr.layer_wait_us = 2000;
	w->wr.layers = w->wr.rank_count == 2 ? 2 : 4;
	w->wr.groups = index % 2 ? "0:full:32,1:window:32:511" : NULL;
	wr_device_start(w->seed);
	wr_open(&w->wr);
	w->split = w->wr.groups ? w->wr.layers : w->wr.rank[0].layers;
	w->spaces = SPACES;
	w->fresh_until = w->wr.step + FRESH;
	for (uint32_t i = 0; i < SPACES; i++) {
		kvc_identity_t identity = w->wr.identity;

		identity.lora = i == 0 ? NULL : i == 1 ? "adapter-a" : "adapter-b";
		assert_int_equal(kvc_space_open(w->wr.kvc, &identity, &w->space[i].space), KVC_OK);
		u_make_keys(w, i);
	}
	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		u_fill(w, b, ++w->serial);
	}
}

static void close_universe(world_t *w)
{
	drain(w);
	u_check_blocks(w);
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		const kvx_worker_stats_t stats = wr_stats(&w->wr, r);

		assert_int_equal(stats.loads_open + stats.saves_open + stats.marked + stats.broken_invariants, 0);
		assert_in_range(stats.bad_messages, w->unsound, w->unsound + w->holes);
		w->seen.fences += stats.fences;
		u_take_report(w, r); /* how long the last step took */
		wr_check_silent(&w->wr.rank[r]);
	}
	for (uint32_t i = 0; i < SPACES; i++) {
		kvc_space_close(w->space[i].space);
	}
	wr_close(&w->wr);
}

static void live(uint64_t seed, uint32_t index)
{
	world_t *w = calloc(1, sizeof *w);

	assert_non_null(w);
	w->seed = seed;
	open_universe(w, index);
	for (uint32_t i = 0; i < STEPS; i++) {
		run_step(w, 0);
		for (uint32_t n = 0; n < w->spaces; n++) {
			if (w->space[n].damaged || u_one_in(w, 40)) {
				u_reset_space(w, n);
			}
		}
		if (u_one_in(w, 20)) {
			u_check_blocks(w);
		}
		if (u_one_in(w, 40)) {
			reopen(w);
		}
		if (i == STEPS / 2 && index % 3 == 1) {
			replace_daemon(w);
		}
	}
	close_universe(w);
	print_message("seed %lu: %u loads, %u failed, %u layered, %u prefetched, %u of them abandoned, %u revoked, "
		      "%u late, %u bytes changed; %u puts stored, %u dropped, %u fences\n",
		      (unsigned long)seed, w->seen.loads, w->seen.failed, w->seen.layered, w->seen.prefetched,
		      w->seen.abandoned, w->seen.revoked, w->seen.late, w->seen.damaged, w->seen.stored,
		      w->seen.dropped, (unsigned)w->seen.fences);
	assert_true(w->seen.loads > STEPS / 4 && w->seen.stored > STEPS / 8);
	free(w);
}

static void p1_whatever_is_loaded_is_what_was_computed(void **state)
{
	const char *seed = getenv("KVD_TEST_SEED"), *universes = getenv("KVD_TEST_UNIVERSES");
	const uint64_t first = seed ? strtoull(seed, NULL, 0) : WR_SEED;
	const uint32_t n = universes ? (uint32_t)strtoul(universes, NULL, 0) : UNIVERSES;

	(void)state;
	for (uint32_t i = 0; i < n; i++) {
		live(first + i, i);
	}
}

int main(int argc, char **argv)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_whatever_is_loaded_is_what_was_computed),
	};

	return wr_run_tests(argc, argv, tests, KV_COUNT_OF(tests));
}
