/* What must not be saved: blocks that a failed load has left, what was computed after them, blocks of weights from
 * before a reset, and blocks that are another request's by now. */
#include "connectors/scheduler/sched_rig.h"
#include "scheduler/lease_cache.h"

#include <signal.h>
#include <unistd.h>

static sr_request_t a, b, c, d, e, f;

static const sr_options_t plain, sync_loads = {.mode = KVX_LOAD_SYNC}, async_loads = {.mode = KVX_LOAD_ASYNC},
				 late = {.wait_us = 1}, deferring = {.mode = KVX_LOAD_SYNC, .defer_shared = 1},
				 deferring_own = {.mode = KVX_LOAD_SYNC, .defer_shared = 1, .own_keys = 1},
				 deferring_async = {.mode = KVX_LOAD_ASYNC, .defer_shared = 1};

/* The first `found` blocks of `from`, found in the engine's own cache, and its own after them. */
static void place_behind(sr_request_t *request, const sr_request_t *from, uint32_t found, uint32_t base)
{
	const uint32_t n = request->n / SR_UNIT;
	const kvx_block_table_t table = {.struct_size = sizeof table, .n = n, .fresh = found, .ids = request->ids[0]};

	for (uint32_t i = 0; i < n; i++) {
		request->ids[0][i] = i < found ? from->ids[0][i] : base + i;
	}
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &request->ask, &table), KVC_OK);
}

static void place_after(sr_request_t *request, const sr_request_t *from, uint32_t base)
{
	place_behind(request, from, 10, base);
}

/* ---- loads that fail ------------------------------------------------------------------------- */

/* What is leased for the load is of another daemon than the one that is asked now, or it was given back, as nobody had
 * asked for it in a while. */
typedef enum leased { LEASED, OTHER_DAEMON, GIVEN_BACK } leased_t;

/* A request of twenty blocks loads ten of them synchronously, and computes five more in each of the steps that are
 * planned before the ranks report. */
typedef struct failing_load {
	const char *name;
	leased_t leased;
	uint32_t steps;
	int gone;            /* the request has ended before the report */
	uint32_t taken;      /* its last blocks, which another request has got and computed by then */
	uint32_t loaded;     /* blocks, as reported */
	uint32_t named;      /* what the engine must forget */
	uint32_t puts, lost; /* saves that stay open; blocks whose saves are given up */
} failing_load_t;

static const failing_load_t failing_loads[] = {
	{"p1_saves_after_a_failed_load_of_a_gone_request_are_revoked", LEASED, 2, 1, 0, 9, 20, 0, 10},
	/* A load that has become impossible when its step begins fails like any other. */
	{"p1_saves_after_a_lost_load_are_given_up", OTHER_DAEMON, 2, 0, 0, 0, 0, 0, 10},
	{"p1_saves_after_a_lost_load_are_given_up", GIVEN_BACK, 2, 0, 0, 0, 0, 0, 10},
	{"p1_dependents_of_a_lost_load_of_a_gone_request_are_named", OTHER_DAEMON, 0, 1, 0, 0, 20, 0, 0},
	{"p1_dependents_of_a_lost_load_of_a_gone_request_are_named", GIVEN_BACK, 0, 1, 0, 0, 20, 0, 0},
	/* The engine may have cached what it computed after the load; what is another request's is not named. */
	{"p1_dependents_of_a_failed_load_of_a_gone_request_are_named", LEASED, 0, 1, 5, 9, 15, 1, 0},
	{"a load that succeeds names nothing", LEASED, 2, 1, 5, 10, 0, 3, 0},
	{"p7_a_failed_load_of_a_gone_request_costs_others_no_saves", LEASED, 0, 1, 20, 9, 0, 1, 0},
};

static void begin_load(leased_t leased)
{
	kvx_request_t *found;

	sr_find(&b, 160);
	found = kvx_requests_find(&sr.scheduler->requests, b.ask.id, b.ask.id_len);
	if (leased == GIVEN_BACK) {
		kvx_lease_cache_give_back(sr.scheduler, found->cached);
	} else if (leased == OTHER_DAEMON) {
		found->cached->generation--;
	}
	sr_start_load(&b);
}

/* In two calls. */
static void check_invalidated(uint32_t named)
{
	const uint32_t first = named < 4 ? named : 4;
	uint32_t ids[SR_BLOCKS];

	assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids, 4), first);
	assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids + first, SR_BLOCKS - first), named - first);
	for (uint32_t i = 0; i < named; i++) {
		assert_int_equal(ids[i], 100 + i);
	}
	assert_int_equal(kvx_scheduler_take_invalidated(sr.scheduler, ids, SR_BLOCKS), 0);
}

static void check_failing_load(const failing_load_t *row)
{
	begin_load(row->leased);
	for (uint32_t step = 0; step < row->steps || step == 0; step++) {
		if (row->steps) {
			sr_advance(&b, 120 + 40 * step, 40);
		}
		sr_plan();
	}
	assert_int_equal(sr_stats().puts_open, row->steps);
	if (row->gone) {
		sr_finish(&b);
	}
	if (row->taken) {
		sr_request(&c, "other", 2, 0, row->taken * SR_UNIT);
		sr_place(&c, 120 - row->taken, 0);
		sr_advance(&c, row->taken * SR_UNIT, row->taken * SR_UNIT);
		sr_plan();
	}
	sr_report_loaded(sr.load, row->loaded);
	check_invalidated(row->named);
	assert_int_equal(sr_stats().puts_open, row->puts);
	assert_int_equal(sr_stats().save_lost, row->lost);
	assert_int_equal(sr_stats().lease_lost, row->leased != LEASED);
	assert_int_equal(sr_stats().loads_failed, !row->gone);
	kvx_scheduler_revoke_saves(sr.scheduler); /* the ranks do not write */
}

SR_CASE(what_follows_a_failed_load_is_not_saved_and_is_named, sync_loads)
{
	for (uint32_t i = 0; i < KV_COUNT_OF(failing_loads); i++) {
		print_message("# %s\n", failing_loads[i].name);
		check_failing_load(&failing_loads[i]);
		sr_stop();
		sr_start(&sync_loads);
	}
}

/* The engine's cache names the blocks of a synchronous load at once. It fails, or what was leased was given back before
 * the ranks are told; and until the request has computed them, piece by piece, what others compute after them is
 * garbage. */
SR_CASE(p1_blocks_computed_after_a_failed_load_are_not_saved, sync_loads)
{
	uint64_t before;

	sr_store(&a, "a", 1, 80, 80);
	sr_finish(&a);
	sr_request(&b, "b", 2, 80, 88);
	sr_request(&c, "c", 3, 80, 120);
	sr_request(&d, "d", 4, 80, 120);
	sr_request(&e, "e", 5, 80, 120);
	assert_int_equal(sr_match(&b), 80);
	SR_UNTIL(sr_stats().leases_open == !sr.row)
	sr_place(&b, 100, 0);
	sr_start_load(&b);
	place_after(&c, &b, 200);
	sr_advance(&c, 120, 40);
	sr.fail_loads = 1;
	(void)sr_step();
	assert_int_equal(sr.plan.failed_blocks, 10);
	sr.fail_loads = 0;

	/* Half of them are there again. One that came with the load, and one that comes now. */
	sr_advance(&b, 40, 40);
	place_after(&d, &b, 250);
	for (int i = 0; i < 20; i++) {
		usleep(5000);
		sr_advance(&c, 120, 1);
		assert_int_equal(sr_step_saves(&d, 120), 0);
	}
	/* And all of them. */
	before = sr_stats().save_blocks;
	sr_advance(&b, 88, 48);
	sr_compute(&b, 0, 11);
	place_after(&e, &b, 300);
	sr_compute(&e, 10, 15);
	(void)sr_step_saves(&e, 120);
	assert_int_equal(sr_stats().save_blocks - before, 6);
	/* What was computed in between stays garbage, and so does what is computed after that. */
	for (int i = 0; i < 2; i++) {
		sr_request(&f, i ? "after d" : "after c", i ? 4 : 3, 80, 128);
		place_behind(&f, i ? &d : &c, 15, 350);
		assert_int_equal(sr_step_saves(&f, 128), 0);
		sr_finish(&f);
	}
}
SR_ALSO(p1_blocks_computed_after_a_failed_load_are_not_saved, sync_loads, 1)

/* Each is computed again, and the garbage of one is none of the other's. Nor is that of a request that another one
 * has found blocks of, behind garbage. */
SR_CASE(p7_loads_that_fail_in_one_step_cost_no_saves, sync_loads)
{
	sr_request_t *loading[] = {&b, &d};
	uint64_t before;

	for (uint32_t i = 0; i < 2; i++) {
		sr_store(&a, i ? "second" : "first", 1 + i, 0, 80);
		sr_finish(&a);
		sr_request(loading[i], i ? "d" : "b", 1 + i, 0, 160);
	}
	for (uint32_t i = 0; i < 2; i++) {
		assert_int_equal(sr_match(loading[i]), 80);
		sr_place(loading[i], 100 + 100 * i, 0);
		sr_start_load(loading[i]);
		sr_advance(loading[i], 88, 8);
	}
	sr_request(&e, "e", 3, 0, 40);
	sr_place(&e, 300, 0);
	sr_request(&c, "c", 4, 0, 128);
	memcpy(c.ids[0], b.ids[0], 10 * sizeof c.ids[0][0]);
	memcpy(c.ids[0] + 10, e.ids[0], 5 * sizeof c.ids[0][0]);
	place_behind(&c, &c, 15, 400);
	sr.fail_loads = 1;
	(void)sr_step();
	assert_int_equal(sr.plan.failed_blocks, 20);
	sr.fail_loads = 0;
	before = sr_stats().save_blocks;
	for (uint32_t i = 0; i < 2; i++) {
		sr_compute(loading[i], 0, 20);
		(void)sr_step_saves(loading[i], 160);
		assert_int_equal(sr_stats().save_blocks - before, 10 + 10 * i);
	}
	assert_int_equal(sr_step_saves(&e, 40), 5);
}

/* The engine has that many tokens of the request in its cache: is it deferred to the next step? */
static int is_deferred(sr_request_t *request, uint32_t local)
{
	const uint64_t before = sr_stats().match_deferred;

	request->ask.local = local;
	(void)sr_look_up(request);
	assert_int_equal(sr_stats().match_deferred - before, sr.hit.deferred);
	assert_true(!sr.hit.deferred || sr.hit.tokens == 0);

	return sr.hit.deferred;
}

/* The engine's cache names the blocks of a synchronous load at once: a request of the same step that finds them there
 * would be computed on what a failed load has left. */
SR_CASE(p1_what_a_synchronous_load_of_the_step_will_fill_is_deferred, deferring)
{
	const int defers = sr.options.defer_shared && sr.options.mode == KVX_LOAD_SYNC;

	sr_store(&a, "a", 1, 80, 80);
	sr_finish(&a);
	sr_settle();
	sr_request(&b, "b", 2, 80, 88);
	sr_request(&c, "c", 3, 80, 120); /* the same ten blocks */
	sr_request(&d, "d", 4, 0, 120);  /* others */
	sr_request(&e, "e", 5, 24, 120); /* the first three */
	b.ask.local = 32;
	assert_int_equal(sr_match(&b), 48);
	assert_false(is_deferred(&b, 32)); /* it asks again itself */
	sr_place(&b, 100, 0);
	sr_start_load(&b);
	assert_false(is_deferred(&c, 32)); /* they were there before */
	assert_int_equal(is_deferred(&c, 40), defers);
	assert_int_equal(is_deferred(&c, 80), defers);
	assert_int_equal(is_deferred(&c, 112), defers);
	assert_false(is_deferred(&d, 112));
	assert_false(is_deferred(&e, 24));
	assert_false(is_deferred(&e, 112));
	assert_false(is_deferred(&c, 0));
	SR_UNTIL(sr.plan.loads > 0)
	assert_false(is_deferred(&c, 80));
}

SR_NAMED("with keys of kvd's own", p1_what_a_synchronous_load_of_the_step_will_fill_is_deferred, deferring_own, 1)
SR_NAMED("nothing waits for a load on its own", p1_what_a_synchronous_load_of_the_step_will_fill_is_deferred,
	 deferring_async, 2)
SR_NAMED("nothing waits where the engine computes it again",
	 p1_what_a_synchronous_load_of_the_step_will_fill_is_deferred, sync_loads, 3)

/* More than are told apart: nothing that the engine has may be relied on in that step. */
SR_CASE(p1_any_number_of_synchronous_loads_of_the_step_is_deferred_to, deferring)
{
	static sr_request_t many[KVX_SYNC_HITS + 1u];
	char id[16];

	sr_store(&a, "a", 1, 80, 80);
	sr_finish(&a);
	sr_settle();
	sr_request(&d, "d", 4, 0, 120);
	for (uint32_t i = 0; i < KV_COUNT_OF(many); i++) {
		assert_false(is_deferred(&d, 112));
		(void)snprintf(id, sizeof id, "m%u", i);
		sr_request(&many[i], id, 10 + i, 80, 88);
		assert_int_equal(sr_match(&many[i]), 80);
	}
	assert_true(is_deferred(&d, 112));
	assert_false(is_deferred(&d, 0));
	(void)sr_step();
	assert_false(is_deferred(&d, 112));
}

/* Blocks from before a reset that are used after it, by a load that was under way or as a hit of the engine's own
 * cache: they are not saved. Those that the request is given afterwards are, whether the engine first says that it was
 * preempted or has given them in the same step (row 1). */
SR_CASE(p1_what_lay_in_the_engine_before_a_reset_is_not_saved, async_loads)
{
	sr_store(&a, "a", 1, 0, 80);
	sr_request(&b, "b", 1, 0, 81);
	assert_int_equal(sr_match(&b), 80);
	sr_place(&b, 100, 0);
	sr_start_load(&b);
	SR_UNTIL(sr.plan.loads > 0)
	assert_int_equal(sr.plan.loaded_blocks, 10);
	sr_name_weights("w2");
	assert_int_equal(sr_step_saves(&b, 81), 0);

	sr_request(&c, "c", 1, 0, 120);
	sr_place(&c, 0, 10);
	assert_int_equal(sr_step_saves(&c, 120), 0);
	if (!sr.row) {
		kvx_scheduler_preempt(sr.scheduler, &c.ask);
	}
	sr_place(&c, 200, 0);
	sr_compute(&c, 0, 15);
	assert_int_equal(sr_step_saves(&c, 120), 15);
}
SR_NAMED("p1_preempted_and_resumed_in_one_step_it_is_saved_again",
	 p1_what_lay_in_the_engine_before_a_reset_is_not_saved, async_loads, 1)

/* The caller no longer knows whose the blocks are: what is reserved is given up, and the request is saved again only
 * with blocks that it is given after a preemption. */
SR_CASE(p1_after_saves_are_revoked_only_a_new_table_is_saved, plain)
{
	sr_request(&a, "a", 1, 0, 160);
	sr_place(&a, 0, 0);
	sr_advance(&a, 80, 80);
	assert_int_equal(sr_stats().puts_open, 1);
	kvx_scheduler_revoke_saves(sr.scheduler);
	assert_int_equal(sr_stats().puts_open, 0);
	assert_int_equal(sr_step_saves(&a, 160), 0);
	kvx_scheduler_preempt(sr.scheduler, &a.ask);
	(void)sr_run(&a, 100);
	assert_int_equal(sr.plan.save_blocks, 20);
}

/* A load that was under way fails after the reset, and its request computes its blocks again, after others of before:
 * neither it nor one that shares them is saved. */
SR_CASE(p1_computing_again_after_a_reset_makes_no_block_valid, sync_loads)
{
	sr_find(&b, 88);
	sr_start_load(&b);
	sr_plan();
	sr_name_weights("w2");
	sr_report_loaded(sr.load, 9);
	assert_int_equal(sr_step_saves(&b, 88), 0);
	sr_request(&c, "c", 1, 0, 120);
	place_after(&c, &b, 200);
	assert_int_equal(sr_step_saves(&c, 120), 0);
}

/* ---- blocks that are another request's by now ------------------------------------------------ */

/* A request is computed and its blocks are asked for; it ends, and the answer will be late. */
static void ask_of_a_stopped_daemon(void)
{
	sr_request(&a, "a", 1, 0, 80);
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, 10);
	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(sr_step_saves(&a, 80), 0);
	assert_true(sr_stats().puts_open > 0);
	sr_finish(&a);
}

/* The late answer comes, and goes out with the next message. */
static void continue_daemon(void)
{
	rig_signal(&sr.rig, SIGCONT);
	for (int i = 0; i < 10000 && sr_stats().late_answers == 0; i++) {
		usleep(1000);
		(void)kvx_scheduler_has_pending(sr.scheduler);
	}
	assert_true(sr_stats().late_answers > 0);
	(void)sr_step();
}

/* In the very plan of the answer, they still hold what they did; in one before it (row 1), they do not. */
SR_CASE(p1_blocks_reallocated_before_the_answer_are_not_saved, late)
{
	ask_of_a_stopped_daemon();
	sr_request(&b, "b", 2, 0, 40);
	sr_place(&b, 5, 0);
	if (sr.row) {
		(void)sr_step();
		sr_compute(&b, 0, 5);
	}
	continue_daemon();
	assert_int_equal(sr.plan.early, !sr.row);
	assert_int_equal(sr_stats().save_lost, sr.row ? 10 : 0);
}
SR_ALSO(p1_blocks_reallocated_before_the_answer_are_not_saved, late, 1)

/* A request whose id is too long for us is not saved, but what it was given is fenced: old bytes of its blocks must not
 * be saved. */
SR_CASE(p1_blocks_of_a_request_that_is_not_served_are_not_saved, late)
{
	const uint32_t ids[5] = {5, 6, 7, 8, 9};
	const kvx_block_table_t table = {.struct_size = sizeof table, .n = 5, .ids = ids};
	char id[KVX_MAX_ID + 2] = {0};
	const kvx_ask_t ask = {.struct_size = sizeof ask, .id = id, .id_len = sizeof id, .tokens = 40};

	ask_of_a_stopped_daemon();
	assert_int_equal(kvx_scheduler_append_blocks(sr.scheduler, &ask, &table), KVC_ERR_ARG);
	(void)sr_step();
	assert_int_equal(sr.plan.fences, 5);
	memset(sr.cache + 5u * sr.block_bytes, 0, 5u * sr.block_bytes);
	continue_daemon();
	assert_int_equal(sr.plan.saves, 0);
	assert_int_equal(sr_stats().save_lost, 10);
}

SR_MAIN
