/* Seeded universes of the scheduler half: an engine that admits, computes, preempts, shares and aborts requests at
 * random, over a daemon that is silent or dies, with ranks that are late and fail, next to a model. The model says what
 * a lookup may answer, which blocks a load and a save may name and what they hold, and what is found again.
 * KVD_TEST_SEED: another seed; KVD_TEST_UNIVERSES: more of them. */
#include "connectors/scheduler/universe.h"
#include "connectors/universes.h"
#include "scheduler/names/spaces.h"

#include <signal.h>
#include <stdio.h>

#define STEPS   150u
#define CALM    15u /* steps between two calms */
#define PROMPTS 9u
#define WAIT_MS 60000u
#define SECOND  UINT64_C(1000000000)

static const sr_options_t plain, sync_loads = {.mode = KVX_LOAD_SYNC}, async_loads = {.mode = KVX_LOAD_ASYNC},
				 deferring = {.mode = KVX_LOAD_SYNC, .defer_shared = 1}, windows = {.groups = 2},
				 own_keys = {.own_keys = 1}, gpu = {.device = SR_DEVICE_THERE},
				 brief = {.silence = "50ms", .wait_us = 500}, later = {.named_later = 1};

static const u_profile_t profiles[] = {
	/* bad, preempted, ended, handed; silent, killed, reset, renamed; adapters; busy */
	{"p1_what_is_saved_and_loaded_is_what_was_computed", &plain, 8, 12, 10, 0, 0, 0, 60, 0, 1, 4},
	{"p1_garbage_of_synchronous_loads_is_never_saved", &sync_loads, 2, 8, 10, 0, 0, 0, 0, 0, 0, 0},
	{"p1_blocks_that_a_load_of_the_step_fills_are_deferred_to", &deferring, 3, 8, 10, 0, 0, 0, 0, 0, 1, 0},
	{"p1_windows_are_loaded_whole_or_not", &windows, 8, 12, 10, 4, 0, 0, 0, 0, 1, 6},
	{"p1_own_keys_find_what_they_saved", &own_keys, 8, 12, 10, 3, 0, 0, 60, 0, 0, 6},
	{"p4_prompts_that_are_handed_over_leave_nothing", &async_loads, 10, 20, 12, 1, 0, 0, 0, 0, 0, 0},
	{"p1_what_a_gpu_has_is_what_was_computed", &gpu, 8, 12, 12, 2, 0, 0, 0, 0, 0, 6},
	{"p7_a_silent_or_killed_daemon_costs_hits_only", &brief, 8, 12, 10, 3, 12, 40, 0, 0, 0, 0},
	{"p1_blocks_of_other_weights_are_never_found", &later, 8, 12, 10, 4, 0, 0, 0, 12, 1, 0},
};

/* ---- a step of the engine -------------------------------------------------------------------- */

static kvx_transfer_t transfer_of(const u_slot_t *slot)
{
	const uint32_t whole = slot->r.n / SR_UNIT * SR_UNIT, rest = sr.groups == 1 ? slot->r.n - whole : 0;

	return (kvx_transfer_t){.struct_size = sizeof(kvx_transfer_t),
				.id = slot->transfer,
				.timeout_ms = WAIT_MS,
				.tokens = slot->r.tokens + whole,
				.n_tokens = rest,
				.on_device = sr.options.device != SR_DEVICE_NONE,
				.device = sr.options.device == SR_DEVICE_NONE ? NULL
					  : u_one_in(2)                       ? "fake-0"
									      : "fake-1"};
}

static void add_request(u_slot_t *slot, uint32_t prompt, uint32_t n, const u_slot_t *other)
{
	char id[16];

	*slot = (u_slot_t){.serial = ++w.serial, .state = WAITING};
	(void)snprintf(id, sizeof id, "r%u", w.serial);
	u_make_prompt(slot, id, prompt, n);
	slot->adapter = other ? other->adapter : w.profile->adapters ? u_roll(3) : 0;
	slot->r.ask.lora = u_adapter_name(slot->adapter);
	slot->r.ask.whole = u_one_in(2);
	(void)snprintf(slot->transfer, sizeof slot->transfer, "x%u", other ? other->serial : slot->serial);
	w.seen.requests++;
}

static u_slot_t *find_free(void)
{
	uint32_t i = 0;

	while (i < U_SLOTS && w.slot[i].state != FREE) {
		i++;
	}

	return i < U_SLOTS ? &w.slot[i] : NULL;
}

/* A request, or two of one prompt, which is handed over from one to the other. */
static void add_requests(void)
{
	const uint32_t n = SR_UNIT + u_roll(U_MOST - 2 * SR_UNIT), prompt = u_roll(PROMPTS);
	const int handed = u_one_in(w.profile->handed), consumer_first = u_one_in(2);
	u_slot_t *slot[2] = {find_free(), NULL};

	if (!slot[0]) {
		return;
	}
	add_request(slot[0], prompt, n, NULL);
	slot[1] = handed ? find_free() : NULL;
	if (!slot[1]) {
		return;
	}
	add_request(slot[1], prompt, n, slot[0]);
	for (int i = 0; i < 2; i++) {
		u_slot_t *side = slot[i];
		const kvx_transfer_t transfer = transfer_of(side);
		const int receives = (i == 0) == consumer_first;

		side->r.ask.whole |= receives;
		if (receives ? kvx_scheduler_receive(sr.scheduler, &side->r.ask, &transfer) == KVC_OK
			     : kvx_scheduler_send(sr.scheduler, &side->r.ask, &transfer) == KVC_OK) {
			side->sends = !receives;
			side->receives = receives;
		}
	}
	w.seen.handed++;
}

/* Blocks that the engine has of it. *p_loading: a synchronous load of this step fills some of them. */
static uint32_t count_local(const u_slot_t *slot, int *p_loading)
{
	const uint32_t most = sr.groups > 1 || (slot->receives && !u_one_in(4)) ? 0 : (slot->r.n - 1u) / SR_UNIT;
	uint32_t i = 0, id;

	*p_loading = 0;
	for (; i < most && (id = u_find_cached(slot, i)) < U_BLOCKS; i++) {
		*p_loading |= w.block[id].sync_step == sr.scheduler->step;
	}

	return i;
}

/* How a hit is loaded. What is stored, and stays so, is not awaited from a producer. */
static int is_asynchronous(const u_slot_t *slot, uint32_t before)
{
	const int is_stored = before >= slot->r.n / SR_UNIT * SR_UNIT;

	if (sr.groups > 1 || sr.options.mode == KVX_LOAD_ASYNC) {
		return 1;
	}

	return slot->receives && (!is_stored || w.shaken || sr.options.device) ? sr.hit.async : 0;
}

/* What the lookup may answer, `before` and `after` tokens being stored then. */
static void check_hit(const u_slot_t *slot, uint32_t before, uint32_t after)
{
	const uint32_t local = slot->r.ask.local, n = slot->r.n, reach = local + sr.hit.tokens;
	const uint32_t most =
		(slot->r.ask.whole && (sr.hit.async || sr.hit.tokens == 0) ? n : n - 1u) / SR_UNIT * SR_UNIT;
	const uint32_t least = (n - 1u) / SR_UNIT * SR_UNIT;

	assert_true(reach <= n && (sr.hit.leasing || sr.hit.gpu_tokens + sr.hit.disk_tokens <= sr.hit.tokens));
	if (sr.hit.tokens == 0 || !slot->receives || !sr.hit.async) {
		assert_int_equal(reach % SR_UNIT, 0);
		/* Leases that it had before a reset end a little after the reset was answered. */
		assert_true(sr.hit.tokens == 0 || reach <= most);
		assert_true(sr.hit.tokens == 0 || reach <= after || (w.shaken && w.profile->reset));
		assert_true(sr.groups > 1 || slot->failed || sr.hit.why > KV_WHY_EVICTED || w.shaken || w.silent ||
			    sr.hit.deferred || reach >= (before < least ? before : least));
	}
	assert_true(!slot->failed || sr.hit.tokens == 0);
	assert_true(sr.hit.tokens == 0 || sr.hit.async == is_asynchronous(slot, before));
}

static void feed_tokens(const u_slot_t *slot)
{
	kvx_units_t units = {
		.struct_size = sizeof units, .at = slot->r.n / SR_UNIT * SR_UNIT, .tokens = slot->r.tokens};

	if (sr.options.own_keys && kvx_scheduler_add_tokens(sr.scheduler, &slot->r.ask, &units) != KVC_OK) {
		units.at = 0;
		units.n = slot->r.n;
		(void)kvx_scheduler_add_tokens(sr.scheduler, &slot->r.ask, &units);
	}
}

static void plan_tokens(u_slot_t *slot, uint32_t from, uint32_t to)
{
	u_grow(slot, 0, to);
	w.planned[w.planned_n++] = slot;
	slot->from = from;
	slot->to = slot->computed = to;
	feed_tokens(slot);
	kvx_scheduler_advance(sr.scheduler, &slot->r.ask, to, to - from);
	u_cache_blocks(slot, to);
}

static uint32_t choose_end(const u_slot_t *slot, uint32_t from)
{
	const uint32_t to = from + 1u + u_roll(u_one_in(3) ? 4 : 80);

	return to < slot->r.n ? to : slot->r.n;
}

/* Nothing else makes room for it once all is calm. One that this step computes goes on. */
static void end_any(void)
{
	uint32_t s = 0;

	while (s < U_SLOTS && (w.slot[s].state != RUNNING || w.slot[s].computed < w.slot[s].r.n || w.slot[s].to > 0)) {
		s++;
	}
	if (s < U_SLOTS && w.calm) {
		u_end_request(&w.slot[s]);
	}
}

static void admit(u_slot_t *slot)
{
	const uint32_t blocks = (slot->r.n + SR_UNIT - 1u) / SR_UNIT * sr.groups;
	uint32_t before, after, local;
	int loading;

	if (u_free_blocks() < blocks) {
		end_any();
		return;
	}
	feed_tokens(slot);
	local = slot->r.ask.local = count_local(slot, &loading) * SR_UNIT;
	slot->missed |= sr.miss_device_leases;
	before = slot->missed ? 0 : u_count_stored(slot);
	(void)sr_look_up(&slot->r);
	for (uint32_t i = 0; i < U_TRIES && sr.hit.leasing && !w.silent && sr.rig.pid; i++) {
		usleep(500);
		(void)kvx_scheduler_has_pending(sr.scheduler);
		(void)sr_look_up(&slot->r);
	}
	after = u_count_stored(slot);
	check_hit(slot, before, after > before || !w.shaken ? after : before); /* it may be gone by now */
	if (!sr.hit.async || slot->receives == 0) {
		assert_int_equal(sr.hit.deferred, loading && sr.options.defer_shared);
	}
	w.seen.deferred += (uint32_t)sr.hit.deferred;
	if (sr.hit.deferred || (sr.hit.leasing && u_one_in(2)) || (!sr.options.defer_shared && u_one_in(6))) {
		return; /* it asks again */
	}
	w.seen.local += local > 0;
	slot->missed = 0;
	slot->clean =
		local == 0 && !slot->failed && !(w.shaken && w.profile->reset) && sr.scheduler->stored.withdrawn == 0;
	slot->weights = w.weights;
	slot->async = sr.hit.async;
	slot->load_at = slot->cached = local / SR_UNIT;
	slot->load_end = (local + sr.hit.tokens + SR_UNIT - 1u) / SR_UNIT;
	slot->good = slot->lost = UINT32_MAX;
	slot->told = 0;
	slot->loads = slot->named = 0;
	memset(slot->is_named, 0, sizeof slot->is_named);
	u_grow(slot, local, local + sr.hit.tokens);
	slot->computed = local + sr.hit.tokens;
	slot->state = RUNNING;
	if (sr.hit.tokens > 0) {
		w.seen.hits++;
		w.seen.async += (uint32_t)sr.hit.async;
		sr_start_load(&slot->r);
	}
	if (sr.hit.tokens > 0 && sr.hit.async) {
		slot->state = LOADING;
		return;
	}
	for (uint32_t i = slot->load_at; i < slot->load_end; i++) {
		w.block[slot->r.ids[0][i]].sync_step = sr.scheduler->step;
	}
	plan_tokens(slot, slot->computed, choose_end(slot, slot->computed));
}

static void plan_slot(u_slot_t *slot)
{
	const uint32_t ended = w.profile->ended * (slot->computed < slot->r.n ? 3u : 1u);

	if ((slot->state == WAITING || slot->state == LOADING || slot->state == RUNNING) && !w.calm &&
	    u_one_in(ended)) {
		if (slot->sends && u_one_in(2)) {
			kvx_scheduler_abort_send(sr.scheduler, &slot->r.ask);
		}
		u_end_request(slot);
	} else if (slot->state == WAITING) {
		admit(slot);
	} else if (slot->state == RUNNING && !w.calm && u_one_in(w.profile->preempted)) {
		u_preempt(slot);
	} else if (w.calm && slot->sends && slot->computed == slot->r.n) {
		u_end_request(slot);
	} else if (slot->state == RUNNING && (slot->computed < slot->r.n || w.calm || u_one_in(2))) {
		const uint32_t to = choose_end(slot, slot->computed);

		if (u_free_blocks() < (to / SR_UNIT + 1u - slot->have[0]) * sr.groups) {
			end_any(); /* else two may preempt themselves by turns for ever */
			if (slot->state == RUNNING) {
				u_preempt(slot);
			}
		} else {
			plan_tokens(slot, slot->computed, to);
		}
	}
}

/* ---- what else happens ----------------------------------------------------------------------- */

/* The engine may keep what it has in its cache. */
static void rename_weights(void)
{
	const int keeps = u_one_in(2);

	kvx_scheduler_suspend(sr.scheduler);
	if (u_one_in(2)) {
		w.weights ^= 1u;
	}
	assert_int_equal(kvx_scheduler_set_weights(sr.scheduler, w.weights ? "w2" : "w1"), KVC_OK);
	for (uint32_t i = 0; i < U_BLOCKS; i++) {
		u_spoil(i);
		w.block[i].cached &= keeps;
	}
	for (uint32_t s = 0; s < U_SLOTS; s++) {
		w.slot[s].tainted |= w.slot[s].have[0] > 0;
		w.slot[s].clean = 0;
	}
	w.shaken = 1;
	w.seen.renamed++;
}

static void forget_all(void)
{
	const uint32_t number = kvx_space_of_name(sr.scheduler, NULL);

	(void)kvc_space_reset(sr_await_space(number, KVX_HOST_MEM));
	for (uint32_t s = 0; s < U_SLOTS; s++) {
		w.slot[s].clean = 0; /* what it has saved is saved again when it has more to save */
	}
	w.shaken = 1;
}

static void kill_daemon(void)
{
	rig_kill(&sr.rig);
	w.shaken = 1;
	w.seen.killed++;
	for (uint32_t i = 0; i < u_roll(4); i++) {
		(void)sr_step();
	}
	sr_restart_daemon();
}

/* Each that the profile has comes at least three times. */
static void cause_event(uint32_t step)
{
	const u_profile_t *p = w.profile;
	const int due = step % (STEPS / 3u) == CALM / 2u, due_silence = step % (STEPS / 3u) == CALM / 2u + CALM;

	if (w.silent > 0) {
		w.silent = due ? 0 : w.silent - 1u;
		if (w.silent > 0) {
			return;
		}
		rig_signal(&sr.rig, SIGCONT);
	}
	if (!due && (u_one_in(p->silent) || (p->silent && due_silence))) {
		rig_signal(&sr.rig, SIGSTOP);
		w.silent = 1 + u_roll(4);
		w.shaken = 1;
	} else if (u_one_in(p->killed) || (p->killed && due)) {
		kill_daemon();
	} else if (u_one_in(p->reset) || (p->reset && due)) {
		forget_all();
	} else if (u_one_in(p->renamed) || (p->renamed && due)) {
		rename_weights();
	}
}

/* How much is found and saved depends on how fast the daemon answers. */
static int has_seen_enough(void)
{
	const kvx_scheduler_stats_t stats = sr_stats();

	return w.seen.hits > 1 && w.seen.saves > 5 && (!w.profile->busy || sr.busy_puts > 5) &&
	       (!sr.options.device || (stats.gpu_blocks > 0 && stats.gpu_tokens > 0));
}

static void run_step(void)
{
	w.ahead = !sr.options.defer_shared && u_one_in(2);
	sr.is_busy = !w.calm && u_one_in(w.profile->busy);
	sr.miss_device_leases = sr.options.device && !w.calm && u_one_in(8); /* evicted since the match */
	for (uint32_t n = u_roll(3); n > 0 && !w.calm; n--) {
		add_requests();
	}
	for (uint32_t s = 0; s < U_SLOTS; s++) {
		plan_slot(&w.slot[(s + w.step) % U_SLOTS]);
	}
	(void)sr_step();
}

/* ---- calm ------------------------------------------------------------------------------------ */

static int is_busy(void)
{
	int busy = sr.scheduler->withdrawal != NULL || sr.scheduler->stored.withdrawn > 0 ||
		   !kvx_scheduler_is_ready(sr.scheduler);

	for (uint32_t s = 0; s < U_SLOTS; s++) {
		busy |= w.slot[s].state != FREE && (w.slot[s].state != RUNNING || w.slot[s].computed < w.slot[s].r.n);
	}

	return busy;
}

/* What was computed is stored in the end. */
static void await_saved(u_slot_t *slot)
{
	const uint32_t all = slot->computed / SR_UNIT * SR_UNIT;

	for (uint32_t i = 0; slot->state == RUNNING && slot->clean && u_count_in(slot, KVX_HOST_MEM) < all; i++) {
		assert_true(i < U_TRIES);
		sr.ahead_ns += SECOND / 50u;
		feed_tokens(slot);
		kvx_scheduler_advance(sr.scheduler, &slot->r.ask, slot->computed, 0);
		(void)sr_step();
		usleep(500);
	}
}

/* Nothing fails from now on: every request comes to its end, and waits for nothing that cannot come. */
static void be_calm(void)
{
	sr.is_busy = 0;
	if (w.silent > 0) {
		w.silent = 0;
		rig_signal(&sr.rig, SIGCONT);
	}
	w.calm = 1;
	sr_wait_ready();
	for (uint32_t i = 0; is_busy(); i++) {
		assert_true(i < U_TRIES);
		run_step();
		usleep(i < 20 ? 0 : 1000);
	}
	for (uint32_t s = 0; s < U_SLOTS; s++) {
		await_saved(&w.slot[s]);
	}
	for (uint32_t s = 0; s < U_SLOTS; s++) {
		if (w.slot[s].state == RUNNING) {
			u_end_request(&w.slot[s]);
		}
	}
	sr_settle();
	for (uint32_t i = 0; sr.scheduler->handovers; i++) {
		assert_true(i < U_TRIES);
		sr.ahead_ns += SECOND / 50u;
		(void)sr_step();
		usleep(500);
	}
	w.calm = 0;
	w.shaken = 0;
}

static void check_empty(void)
{
	const kvx_scheduler_t *s = sr.scheduler;
	const kvx_scheduler_stats_t stats = sr_stats();

	assert_true(!s->loads && !s->puts && !s->handovers);
	assert_int_equal(stats.requests + stats.leases_open + stats.puts_open, 0);
	assert_int_equal(s->load_count + s->put_count + s->admitted + s->unnamed, 0);
	assert_true(s->admitted_ns == 0 && s->reserved_bytes == w.reserved);
	assert_int_equal(stats.bad_reports + stats.broken_invariants, 0);
}

static void check_end(void)
{
	for (uint32_t i = 0; i < PROMPTS; i++) {
		for (uint32_t adapter = 0; adapter < (w.profile->adapters ? 3 : 1); adapter++) {
			u_check_prompt(i, adapter);
		}
	}
	sr_settle();
	check_empty();
}

static void run_universe(uint64_t seed, const void *ctx)
{
	const u_profile_t *profile = ctx;

	memset(&w, 0, sizeof w);
	w.profile = profile;
	w.rng = seed;
	sr_start(profile->options);
	w.reserved = sr.scheduler->reserved_bytes;
	w.step = sr.scheduler->step - 1u;
	sr.ranks = u_run_ranks;
	/* The last step is followed by a calm. */
	for (uint32_t i = 1; i % CALM != 1 || i <= STEPS || !has_seen_enough(); i++) {
		assert_true(i < U_TRIES);
		cause_event(i);
		run_step();
		if (i % CALM == 0) {
			be_calm();
		}
	}
	check_end();
	print_message("  %u requests: %u hits, %u async, %u local, %u deferred; %u loads failed, %u saves, %u dropped; "
		      "%u preempted, %u handed over; %u times killed, %u renamed\n",
		      w.seen.requests, w.seen.hits, w.seen.async, w.seen.local, w.seen.deferred, w.seen.failed,
		      w.seen.saves, w.seen.dropped, w.seen.preempted, w.seen.handed, w.seen.killed, w.seen.renamed);
	sr_stop();
}

int main(int argc, char **argv)
{
	static universes_t universes[KV_COUNT_OF(profiles)];

	for (size_t i = 0; i < KV_COUNT_OF(profiles); i++) {
		universes[i] = (universes_t){run_universe, &profiles[i], 0};
		universes_add(profiles[i].name, &universes[i]);
	}
	sr_program = argc > 1 ? argv[1] : NULL;

	return kv_test_run(NULL, NULL);
}
