/* Seeded universes of the worker half: an engine that allocates, computes, saves, loads, reuses, drops and fails at
 * random, next to a model. The model says what each engine block must contain, which blocks must be named as failed,
 * and which puts must become visible. Each universe has more of what its promise is about. KVD_TEST_SEED: another seed;
 * KVD_TEST_UNIVERSES: more of them. */
#include "connectors/worker/fail_alloc.h"
#include "connectors/universes.h"
#include "connectors/worker/universe.h"
#include "connectors/worker/wr_device.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define ARRIVED_US 5000u /* all that was prefetched may have come by then */
#define STEPS      90u
#define FRESH      6u /* steps */

static const u_profile_t profiles[] = {
	/* ranks, groups, layers; prefetched, held, refused, killed, closed */
	{"p1_whatever_is_loaded_is_what_was_computed", 1, 1, 0, 2, 3, 12, 0, 40},
	/* and one that was not named costs the step's loads and saves */
	{"p1_a_layer_that_was_named_is_there", 2, 0, 1, 0, 3, 20, 0, 20},
	/* also on another stream; if another message comes, the blocks are the engine's again */
	{"p1_a_prefetched_load_is_complete_and_right", 1, 0, 1, 1, 3, 20, 0, 20},
	{"p1_a_refused_driver_call_costs_a_copy_and_no_wrong_byte", 1, 0, 1, 2, 4, 2, 0, 20},
	/* nor writes a block afterwards */
	{"p4_a_worker_closed_amid_loads_and_saves_leaves_nothing", 1, 0, 1, 2, 3, 0, 0, 5},
	/* nor for its layers, nor for the blocks that it saves and the next step overwrites */
	{"p5_a_step_does_not_wait_for_the_bytes_it_loads", 1, 0, 1, 2, 1, 0, 0, 20},
	{"p7_a_daemon_killed_under_jobs_costs_these_jobs_only", 2, 1, 0, 0, 3, 0, 12, 40},
};

/* ---- a step ---------------------------------------------------------------------------------- */

static void choose_event(world_t *w)
{
	const u_profile_t *p = w->profile;
	const int due = p->killed > 0 && w->seen.killed == 0 && w->wr.step > STEPS / 2; /* whatever chance has done */
	u_step_t *now = &w->now;

	if (!w->wr.rig.pid) {
		return;
	}
	now->moment = (u_moment_t)u_roll(w, MOMENTS);
	if (u_one_in(w, p->killed) || due) {
		now->event = DAEMON_KILLED;
	} else if (u_one_in(w, w->layer_skipped ? 3 : p->closed)) {
		now->event = WORKER_CLOSED;
	} else if (u_one_in(w, p->refused)) {
		now->event = u_one_in(w, 3) ? ORDERS_REFUSED : CALL_REFUSED;
		now->moment = u_one_in(w, 2) ? SENT : now->moment; /* layers are ordered from then on */
	}
}

static int is_refused(const u_step_t *now)
{
	return now->event == CALL_REFUSED || now->event == ORDERS_REFUSED;
}

/* While the device is held, a refused call makes the host wait for ever, but for calls of the transfer thread. */
static void choose_step(world_t *w, int idle)
{
	u_step_t *now = &w->now;

	*now = (u_step_t){0};
	if (idle) {
		return;
	}
	choose_event(w);
	now->held = u_one_in(w, w->profile->held) &&
		    (!is_refused(now) || (now->event == CALL_REFUSED && now->moment == SENT));
	now->alloc = u_one_in(w, 14);
	now->late = u_one_in(w, 25);
	now->drop = !now->late && u_one_in(w, 12);
	now->no_end = u_one_in(w, 12);
	now->no_run = now->no_end && !now->late && u_one_in(w, 2);
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
		U_EACH_PUT(w, put) {
			put->excused = 1;
		}
		n = 0;
	} else if (n == 0) {
		return;
	}
	wr_add_fence(&w->wr, ids, n);
}

/* The engine computes on another stream, after all that it has enqueued. */
static void set_stream(world_t *w, int second)
{
	w->second_stream = second;
	wr_device_sync();
	wr_device_set_stream(w->wr.rank[0].worker, second);
}

static void write_message(world_t *w, int idle)
{
	memset(w->given, 0, sizeof w->given);
	memset(w->compute, 0, sizeof w->compute);
	if (w->second_stream) {
		set_stream(w, 0);
	}
	if (u_one_in(w, 3)) {
		wr_be_late();
	}
	wr_message(&w->wr);
	w->tainted[w->wr.step % HISTORY] = 0;
	choose_step(w, idle);
	u_add_complete_saves(w);
	U_EACH_LOAD(w, load) {
		if (load->drop) {
			wr_add_drop(&w->wr, load->number);
			load->drop = 0;
		}
	}
	for (uint32_t n = idle ? 0 : u_roll(w, w->now.held ? 3 : 4); n > 0; n--) { /* as many as need not wait */
		u_add_load(w);
	}
	for (uint32_t n = idle ? 0 : u_roll(w, 4); n > 0; n--) {
		u_add_save(w);
	}
	add_fences(w);
	wr_add_work(&w->wr, u_roll(w, 40), u_one_in(w, 2) ? 1u << u_roll(w, 15) : 0);
	if (u_one_in(w, 4)) {
		wr_add_time(&w->wr);
	}
}

/* Asynchronous loads of the step: none is started before its deadline, or before it is dropped. */
static void set_fate_of_async(world_t *w, u_load_t *load)
{
	if (w->now.late) {
		u_doom(load, KVC_ERR_TIMEOUT);
		w->seen.late++;
	} else if (w->now.drop && load->n > 0 && (!load->doomed || load->want == KVC_MISS) && !load->excused) {
		load->drop = !load->doomed && u_one_in(w, 2);
		load->silent = 1;
		load->want = KVC_MISS;
		if (!load->drop) { /* by its own message */
			wr_add_drop(&w->wr, load->number);
		}
	}
}

/* What the model says of this step's loads, and of all when a call fails. */
static void set_fates(world_t *w)
{
	const int refused = is_refused(&w->now);
	/* the host waits instead */
	const int sync_refused = refused && !(w->now.event == ORDERS_REFUSED && w->now.moment >= SENT);

	U_EACH_LOAD(w, load) {
		const int new = load->step == w->wr.step;

		load->excused |= (u_is_sync(load, w->wr.step) ? sync_refused : refused) ||
				 (new && (w->now.alloc || w->wr.step < w->fresh_until));
		if (!new) {
			continue;
		}
		if (load->lease[0] && !load->doomed && u_one_in(w, 25)) {
			u_revoke(w, load);
		}
		if (load->flags & KVX_MSG_ASYNC) {
			set_fate_of_async(w, load);
		} else if (w->now.no_run) {
			u_doom(load, KVC_PENDING);
		}
	}
	U_EACH_PUT(w, put) {
		put->excused |= refused;
	}
	w->holes += w->now.alloc ? SPACES : 0u; /* which may be a SPACE record there was no memory for */
	if (refused || w->now.alloc || w->now.no_run) {
		w->tainted[w->wr.step % HISTORY] = 2;
	}
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

/* The scheduler ends with the engine. */
static void give_up_puts(world_t *w)
{
	U_EACH_PUT(w, put) {
		for (uint32_t b = 0; b < put->n; b++) {
			w->space[put->space].state[put->keys[b]] = 0;
			w->busy[put->ids[b]] = 0;
		}
		kvc_put_free(put->put);
		put->put = NULL;
	}
}

static void close_workers(world_t *w)
{
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		w->seen.fences += wr_stats(&w->wr, r).fences;
		kvx_worker_close(w->wr.rank[r].worker);
	}
}

/* The engine ends amid all that and begins again: its blocks are its own at once, and nothing of it is heard later. */
static void reopen(world_t *w)
{
	wr_device_hold(0);
	wr_device_trace("closed in step, moment", w->wr.step, w->now.moment);
	close_workers(w);
	U_EACH_LOAD(w, load) {
		u_fill_load(w, load);
	}
	wr_device_sync(); /* and all comparisons are over */
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		wr_open_rank(&w->wr, r, 1);
	}
	U_EACH_LOAD(w, load) {
		for (uint32_t b = 0; b < load->n; b++) {
			w->busy[load->block[b].id] = 0;
		}
		kvc_release(load->lease, 2);
		load->number = 0;
	}
	give_up_puts(w);
	u_excuse_all(w);
	for (uint32_t i = 0; i < SPACES; i++) {
		w->space[i].told = 0;
	}
	w->unsound = 0;
	w->holes = 0;
	w->heard = 0;
	w->second_stream = 0;
	w->layer_skipped = 0;
	w->fresh_until = w->wr.step + FRESH;
	w->seen.closed++;
}

/* 1: the worker has been closed, and the step is over. */
static int cause_event(world_t *w, u_moment_t moment)
{
	if (w->now.moment != moment) {
		return 0;
	}
	if (w->now.event == CALL_REFUSED) {
		wr_device_fail(1 + u_roll(w, 30));
		if (w->now.held) {
			usleep(10000); /* of those that the transfer thread asks with */
			w->seen.refused += wr_device_fail(0) ? 1u : 0u;
		}
	} else if (w->now.event == ORDERS_REFUSED) {
		wr_device_refuse_orders(1);
	} else if (w->now.event == DAEMON_KILLED) {
		wr_kill(&w->wr);
		u_excuse_all(w);
	} else if (w->now.event == WORKER_CLOSED) {
		reopen(w);
	}

	return w->now.event == WORKER_CLOSED;
}

/* ---- its hooks ------------------------------------------------------------------------------- */

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
	U_EACH_PUT(w, put) {
		put->excused |= kind != 0;
		put->doomed |= put->step == step && !put->later;
	}
	U_EACH_LOAD(w, load) {
		if (u_is_sync(load, step)) {
			u_doom(load, KVC_PENDING);
			load->lost = 1;
			u_fill_load(w, load);
		}
	}
	w->seen.abandoned++;
}

/* Hooks of the step before, after all: they end, fail and name nothing of what was begun, and are no calls of its step.
 */
static void call_late_hooks(world_t *w)
{
	kvx_worker_await_layer(w->wr.rank[0].worker, 0);
	wr_end(&w->wr);
	assert_int_equal(wr_count_failed(&w->wr), 0);
	u_take_report(w, 0);
	assert_false(wr_prefetch(&w->wr, KVX_PREFETCH_LAYERS));
}

static void prefetch(world_t *w)
{
	const int computed = u_one_in(w, 2), layers = !u_one_in(w, 4);
	const uint32_t flags = (computed ? KVX_PREFETCH_COMPUTED : 0) | (layers ? KVX_PREFETCH_LAYERS : 0);
	const int may = wr_device_runs_behind() && w->now.leased && w->heard && (w->ended || !computed);

	if (w->wr.rank_count > 1 || w->now.late || w->now.drop || !u_one_in(w, w->profile->prefetched)) {
		return;
	}
	kvx_msg_finish(&w->wr.message, w->wr.step);
	assert_false(kvx_worker_prefetch_step(w->wr.rank[0].worker, w->wr.message.data, w->wr.message.len - 8, flags));
	assert_false(!w->ended && wr_prefetch(&w->wr, KVX_PREFETCH_COMPUTED));
	w->now.prefetched = wr_prefetch(&w->wr, flags);
	assert_true(w->now.prefetched == may || (may && (w->now.alloc || w->not_run)));
	w->seen.prefetched += w->now.prefetched ? 1u : 0u;
}

static int begin_step(world_t *w)
{
	const uint32_t fails = w->now.alloc ? 1 + u_roll(w, 8) : 0;
	const int swap = u_one_in(w, 4);

	if (swap && is_refused(&w->now)) {
		wr_device_sync(); /* the engine's own order, should the worker's be refused */
	}
	wr_device_hold(w->now.held);
	if (cause_event(w, BEFORE)) {
		return 1;
	}
	fail_at = fails;
	prefetch(w);
	fail_at = 0;
	w->heard = 0;
	if (cause_event(w, PREFETCHED)) {
		return 1;
	}
	if (w->now.prefetched && !w->now.held && u_one_in(w, 4)) {
		call_late_hooks(w);
	}
	if (w->now.prefetched && swap) {
		w->second_stream = 1;
		wr_device_set_stream(w->wr.rank[0].worker, 1);
	}
	if (w->now.prefetched && u_one_in(w, 4)) {
		w->now.held = 0;
		wr_device_hold(0);
		if (u_one_in(w, 2)) {
			usleep(ARRIVED_US);
		}
		wr_device_trace("given up: step, second stream", w->wr.step, (uint32_t)w->second_stream);
		abandon(w);
	} else {
		fail_at = w->now.prefetched ? 0 : fails;
		wr_begin(&w->wr);
		fail_at = 0;
	}

	return 0;
}

/* The engine awaits each layer, in some order, then reads it; `skip`: all but the last. */
static void compute_layers(world_t *w, uint32_t r, uint32_t first, int skip)
{
	const uint32_t layers = w->wr.rank[r].layers;

	for (uint32_t i = 0; i < layers - (skip ? 1u : 0u); i++) {
		kvx_worker_await_layer(w->wr.rank[r].worker, (first + i) % layers);
		u_compare_sync_loads(w, r, (first + i) % layers, 1);
	}
}

/* Loads whose layers the engine has not all awaited: they fail, or may fail. */
static void skip_layers(world_t *w, int may_be_fine)
{
	w->layer_skipped = 1;
	U_EACH_LOAD(w, load) {
		if (u_is_sync(load, w->wr.step) && may_be_fine) {
			load->excused = 1;
		} else if (u_is_sync(load, w->wr.step) && !load->doomed) {
			u_doom(load, KVC_PENDING);
		}
	}
}

/* 1: of this rank, they come layer by layer. */
static int send_loads(world_t *w, uint32_t r, int layers)
{
	kvx_worker_t *worker = w->wr.rank[r].worker;

	if (!w->now.late && !w->now.drop) {
		kvx_worker_start_async_loads(worker);
	}
	if (!w->now.no_run && layers) {
		return kvx_worker_run_layered_loads(worker);
	}
	if (!w->now.no_run) {
		kvx_worker_run_sync_loads(worker);
	}

	return 0;
}

static int run_loads(world_t *w)
{
	const int layers = w->wr.layer_bytes && !u_one_in(w, 4), skip = u_one_in(w, 10);
	const uint32_t first = u_roll(w, WR_LAYERS);
	uint32_t layered[WR_MAX_RANKS], all = 0;

	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		layered[r] = send_loads(w, r, layers) ? 1u : 0u;
		all += layered[r];
	}
	w->seen.layered += all;
	if (cause_event(w, SENT)) {
		return 1;
	}
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		if (layered[r]) {
			compute_layers(w, r, first, skip);
		} else if (!w->now.no_run) {
			u_compare_sync_loads(w, r, 0, WR_LAYERS);
		}
	}
	if (all > 0 && w->now.event == ORDERS_REFUSED && w->now.moment == SENT) {
		skip_layers(w, 1); /* the host waits instead: for layers that were not named, too late or not */
	} else if (all > 0 && skip) {
		skip_layers(w, all < w->wr.rank_count); /* on a rank where they came whole */
	}

	return 0;
}

/* The lease of a load goes while the device has not copied yet. */
static void revoke_under_copy(world_t *w)
{
	const int may = w->now.held && wr_device_runs_behind() && w->now.event != DAEMON_KILLED;

	U_EACH_LOAD(w, load) {
		if (may && load->step == w->wr.step && load->lease[0] && !load->doomed && !load->silent &&
		    u_one_in(w, 6)) {
			u_revoke(w, load);
		}
	}
}

static int late_loads_open(world_t *w)
{
	U_EACH_LOAD(w, load) {
		if (w->now.late && load->step == w->wr.step && load->flags & KVX_MSG_ASYNC) {
			return 1;
		}
	}

	return 0;
}

/* The next step begins while the device has done nothing of this one, and writes blocks that it saves. */
static void reuse_while_held(world_t *w)
{
	const u_put_t *put = &w->puts[u_roll(w, PUTS)];
	const int refused = u_one_in(w, 3);
	int sync = 0;

	U_EACH_LOAD(w, load) {
		sync |= u_is_sync(load, w->wr.step);
	}
	if (!w->now.held || sync || !put->put || put->later || w->now.late || w->now.event == DAEMON_KILLED) {
		return;
	}
	usleep(u_one_in(w, 2) ? 5000 : 0); /* submitted before the fence, or by it */
	wr_message(&w->wr);
	w->tainted[w->wr.step % HISTORY] = 0;
	wr_add_fence(&w->wr, put->ids, put->n);
	if (refused) {
		u_excuse_all(w);
	}
	wr_device_refuse_orders(refused);
	wr_begin(&w->wr);
	wr_device_refuse_orders(0);
	for (uint32_t i = 0; i < put->n; i++) {
		if (!w->busy[put->ids[i]]) {
			(void)u_excuse_saves_of(w, put->ids[i]);
			u_fill(w, put->ids[i], ++w->serial);
		}
	}
	wr_end(&w->wr);
	w->ended = 1;
}

static void end_step(world_t *w)
{
	w->not_run = w->now.no_run;
	w->ended = !w->now.no_end || (w->now.prefetched && w->now.no_run && u_one_in(w, 2));
	if (w->ended) {
		wr_end(&w->wr);
	}
	reuse_while_held(w);
	wr_device_hold(0);
	u_collect(w);
	KV_AWAIT(!late_loads_open(w) || (u_collect(w), 0));
	for (uint32_t i = 1; i < SPACES && w->now.alloc; i++) {
		w->space[i].told = 0; /* perhaps it was not heard */
	}
}

/* No call of a step waits for a device that is held, nor for a deadline. */
static void run_step(world_t *w, int idle)
{
	uint64_t begun;

	write_message(w, idle);
	set_fates(w);
	begun = wr_now_ms();
	wr_device_trace("step, event", w->wr.step, w->now.event);
	if (begin_step(w) || run_loads(w)) {
		return;
	}
	revoke_under_copy(w);
	for (uint32_t b = 0; b < WR_BLOCKS; b++) {
		if (w->compute[b]) {
			u_fill(w, b, w->compute[b]);
		}
	}
	if (cause_event(w, COMPUTED)) {
		return;
	}
	end_step(w);
	assert_true(wr_now_ms() - begun < WR_QUICK_MS);
	u_check_puts(w);
}

/* ---- a universe ------------------------------------------------------------------------------ */

/* How much is open after another step. */
static uint64_t idle_step(world_t *w)
{
	uint64_t open = 0;

	run_step(w, 1);
	U_EACH_LOAD(w, load) {
		open++;
	}
	U_EACH_PUT(w, put) {
		open++;
	}
	for (uint32_t r = 0; r < w->wr.rank_count; r++) {
		open += wr_stats(&w->wr, r).saves_open;
	}

	return open;
}

static void drain(world_t *w)
{
	KV_AWAIT(idle_step(w) == 0);
}

/* Another daemon comes. */
static void replace_daemon(world_t *w)
{
	for (uint32_t i = 0; i < 2; i++) {
		run_step(w, 0);
	}
	drain(w);
	wr_restart(&w->wr);
	w->spaces = 1;
	w->corrupt = 0;
	u_reset_space(w, 0);
	w->seen.killed++;
}

static void open_universe(world_t *w)
{
	const u_profile_t *p = w->profile;

	w->wr.rank_count = p->ranks;
	w->wr.empty = 1;
	w->wr.layer_bytes = (uint64_t)p->layers;
	w->wr.layer_wait_us = 2000;
	w->wr.layers = p->ranks == 2 ? 2 : 4;
	w->wr.groups = p->groups ? "0:full:32,1:window:32:511" : NULL;
	wr_device_start(w->seed);
	wr_open(&w->wr);
	wr_device_cost(1);
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

/* Whatever chance has fenced: a save that a stopped daemon lets wait is fenced by the step after it. */
static void force_fence(world_t *w)
{
	static const uint32_t ids[2] = {1, 2};

	rig_signal(&w->wr.rig, SIGSTOP);
	wr_message(&w->wr);
	w->wr.number = SPACES;
	w->wr.group = 0;                           /* whatever part was added last, which may be of none */
	wr_add_space(&w->wr, SPACES, "adapter-c"); /* which it does not open */
	wr_add_save(&w->wr, NULL, 0, ids, 2);
	wr_begin(&w->wr);
	wr_end(&w->wr);
	wr_message(&w->wr);
	wr_add_fence(&w->wr, ids, 2);
	wr_begin(&w->wr);
	wr_end(&w->wr);
	rig_signal(&w->wr.rig, SIGCONT);
}

static void close_universe(world_t *w)
{
	drain(w);
	force_fence(w);
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

/* It has had what it is for. */
static void check_seen(const world_t *w)
{
	const u_profile_t *p = w->profile;

	print_message("  %u loads, %u failed, %u layered, %u prefetched, %u of them abandoned, %u revoked, "
		      "%u late, %u bytes changed; %u puts stored, %u dropped, %u fences; %u calls refused, %u times "
		      "killed, %u closed\n",
		      w->seen.loads, w->seen.failed, w->seen.layered, w->seen.prefetched, w->seen.abandoned,
		      w->seen.revoked, w->seen.late, w->seen.damaged, w->seen.stored, w->seen.dropped,
		      (unsigned)w->seen.fences, w->seen.refused, w->seen.killed, w->seen.closed);
	assert_true(w->seen.loads > STEPS / 5 && w->seen.stored > STEPS / 20);
	assert_true(w->seen.fences >= 2 * p->ranks);
	assert_true(p->closed > 5 || w->seen.closed > 0);
	assert_true(p->killed == 0 || w->seen.killed > 0);
	if (wr_device_runs_behind()) {
		assert_true(!p->layers || w->seen.layered > 0);
		assert_true(p->prefetched == 0 || w->seen.prefetched > 0);
		assert_true(p->refused != 2 || w->seen.refused > 0);
	}
}

static void run_universe(uint64_t seed, const void *profile)
{
	world_t *w = calloc(1, sizeof *w);

	assert_non_null(w);
	w->profile = profile;
	w->seed = seed;
	open_universe(w);
	for (uint32_t i = 0; i < STEPS; i++) {
		run_step(w, 0);
		if (w->now.event == DAEMON_KILLED) {
			replace_daemon(w);
		}
		for (uint32_t n = 0; n < w->spaces; n++) {
			if (w->space[n].damaged || u_one_in(w, 40)) {
				u_reset_space(w, n);
			}
		}
		if (u_one_in(w, 20)) {
			u_check_blocks(w);
		}
	}
	close_universe(w);
	check_seen(w);
	free(w);
}

int main(int argc, char **argv)
{
	static universes_t universes[KV_COUNT_OF(profiles)];

	for (size_t i = 0; i < KV_COUNT_OF(profiles); i++) {
		universes[i] = (universes_t){run_universe, &profiles[i], WR_SEED};
		universes_add(profiles[i].name, &universes[i]);
	}
	wr_program = argc > 1 ? argv[1] : NULL;

	return kv_test_run(NULL, NULL);
}
