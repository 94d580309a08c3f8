/* The daemon is stopped and continued at random moments, up to 40 ms at a time, while prompts it has stored are looked
 * up: a lookup waits for it instead of missing. One that stays stopped costs 50 ms once. */
#include "connectors/scheduler/sched_rig.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#define PROMPTS    4u
#define TOKENS     800u
#define LOOKUPS    300u
#define MOST       (20u * LOOKUPS)
#define STOPPED    200u
#define SILENCE_NS UINT64_C(50000000)
#define STALL_US   38000u /* with what the sleep adds, 40 ms */
#define GAP_US     30000u
#define PAUSE_US   8000u

typedef struct staller {
	kv_test_rng_t rng;
	_Atomic int stop;
	_Atomic uint32_t stalls;
	pthread_t thread;
} staller_t;

static sr_request_t request;

static const sr_options_t brief = {.wait_us = 500, .silence = "50ms"}, patient = {.wait_us = 500};

static void *stall(void *arg)
{
	staller_t *staller = arg;

	while (!atomic_load(&staller->stop)) {
		usleep((useconds_t)kv_test_below(&staller->rng, GAP_US));
		rig_signal(&sr.rig, SIGSTOP);
		usleep((useconds_t)kv_test_below(&staller->rng, STALL_US));
		rig_signal(&sr.rig, SIGCONT);
		atomic_fetch_add(&staller->stalls, 1);
	}

	return NULL;
}

/* What one lookup of a stored prompt finds. */
static uint32_t look_up(uint32_t number, uint32_t prompt)
{
	char id[16];

	(void)snprintf(id, sizeof id, "l%u", number);
	sr_request(&request, id, prompt + 1u, 0, TOKENS + 1u);
	(void)sr_look_up(&request);
	sr_finish(&request);
	(void)sr_step();

	return sr.hit.tokens;
}

/* Computed and saved; more than once, should the daemon be without a processor meanwhile. */
static void store_one(uint32_t prompt)
{
	uint32_t i;

	for (i = 0; i < MOST && look_up(i, prompt) < TOKENS; i++) {
		sr_request(&request, "saved", prompt + 1u, 0, TOKENS);
		sr_place(&request, 0, 0);
		sr_compute(&request, 0, TOKENS / SR_UNIT);
		(void)sr_step_saves(&request, TOKENS);
		sr_settle();
		sr_finish(&request);
	}
	assert_true(i < MOST);
}

static void store(void)
{
	for (uint32_t i = 0; i < PROMPTS; i++) {
		store_one(i);
	}
	sr_settle();
}

static void print_reasons(const kvx_scheduler_stats_t *stats)
{
#define REASON(name, help)                                                                                             \
	if (strncmp(#name, "miss_", 5) == 0 && stats->name) {                                                          \
		printf("# %s %lu\n", #name, (unsigned long)stats->name);                                               \
	}
	KVX_SCHEDULER_STATS(REASON)
#undef REASON
}

/* On a busy machine a stall may be longer than 40 ms. A miss is right when lookups have waited for as long as a daemon
 * may be silent. An answer may come before the heartbeat of its iteration, so the waits of the last hit count, too. */
SR_CASE(p7_stalls_of_40_ms_cost_no_stored_token, brief)
{
	uint64_t hit = 0, stored = 0, before[2]; /* waited before the last hit, and after it */
	kvx_scheduler_stats_t stats;
	staller_t staller = {.rng.state = kv_test_seed()};
	uint32_t longer = 0;

	store();
	assert_int_equal(pthread_create(&staller.thread, NULL, stall, &staller), 0);
	before[0] = before[1] = sr_stats().wait_ns;
	for (uint32_t i = 0; i < LOOKUPS + longer && i < MOST; i++) {
		uint32_t tokens;

		usleep((useconds_t)(i * 2654435761u % PAUSE_US));
		tokens = look_up(i, i % PROMPTS);
		if (tokens < TOKENS && sr_stats().wait_ns - before[0] >= SILENCE_NS) {
			longer++;
			continue;
		}
		if (tokens == TOKENS) {
			before[0] = before[1];
			before[1] = sr_stats().wait_ns;
		}
		hit += tokens;
		stored += TOKENS;
	}
	atomic_store(&staller.stop, 1);
	assert_int_equal(pthread_join(staller.thread, NULL), 0);
	printf("# %u stalls; %lu of %lu stored tokens hit; %u lookups not counted, of a daemon silent for 50 ms\n",
	       atomic_load(&staller.stalls), (unsigned long)hit, (unsigned long)stored, longer);
	stats = sr_stats();
	print_reasons(&stats);
	assert_int_equal(stored, (uint64_t)LOOKUPS * TOKENS);
	assert_true(hit * 100u >= stored * 99u);
}

/* Found, and with an answer that is later than this call. */
static void find_stored(void)
{
	uint32_t i = 0;

	while (i < 1000 && look_up(i, 0) < TOKENS) {
		usleep(10000);
		i++;
	}
	assert_true(i < 1000);
}

/* Lookups of a stopped daemon wait for it 50 ms in all, however many there are; each new stop costs that again. All is
 * found once it goes on. */
SR_CASE(p7_a_stopped_daemon_costs_lookups_50_ms_once, brief)
{
	store();
	rig_wait_written(&sr.rig); /* or it may be stopped in the middle of a bucket */
	for (uint32_t round = 0; round < 3; round++) {
		const uint64_t waited_ns = sr_stats().wait_ns;
		uint64_t stale;
		uint32_t waits = 0;

		find_stored();
		find_stored(); /* nothing before `waited_ns` was waited on this heartbeat */
		rig_signal(&sr.rig, SIGSTOP);
		while (look_up(0, 0) > 0) {
		}
		stale = sr_stats().miss_tokens_daemon_stale;
		for (uint32_t i = 1; i < STOPPED; i++) {
			const uint32_t awaits = sr.awaits;

			assert_int_equal(look_up(i, i % PROMPTS), 0);
			waits += sr.awaits > awaits;
		}
		printf("# %u lookups of a stopped daemon waited %.1f ms, %u after the first\n", STOPPED,
		       (double)(sr_stats().wait_ns - waited_ns) / 1e6, waits);
		assert_true(sr_stats().wait_ns - waited_ns >= SILENCE_NS);
		assert_true(waits < STOPPED / 10u); /* without a processor, one waits more often for the same 50 ms */
		assert_int_equal(sr_stats().miss_tokens_daemon_stale - stale, (STOPPED - 1u) * TOKENS);
		rig_signal(&sr.rig, SIGCONT);
		find_stored();
	}
}

/* A busy machine may not run the daemon for longer than a second: what it leases after that is what the same lookup
 * finds. */
SR_CASE(p7_an_answer_after_more_than_a_second_is_no_miss, patient)
{
	kvx_scheduler_stats_t stats;
	uint32_t i = 0;

	store();
	find_stored();
	stats = sr_stats();
	sr_request(&request, "late", 1, 0, TOKENS + 1u);
	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(sr_look_up(&request), 0);
	usleep(1200000);
	(void)kvx_scheduler_has_pending(sr.scheduler); /* an answer that is late is given up here */
	rig_signal(&sr.rig, SIGCONT);
	while (i < 1000 && sr_look_up(&request) < TOKENS) {
		(void)sr_step();
		usleep(10000);
		i++;
	}
	assert_int_equal(sr.hit.tokens, TOKENS);
	assert_int_equal(sr_stats().lease_lost, stats.lease_lost);
	sr_finish(&request);
}

/* An operator sees why tokens were missed. */
SR_CASE(p7_every_missed_token_is_counted_under_its_reason, patient)
{
	kvx_scheduler_stats_t stats;

	store();
	rig_wait_written(&sr.rig);
	find_stored(); /* the last answer was in time */
	stats = sr_stats();

	sr_request(&request, "new", 77, 0, TOKENS);
	request.ask.local = 2u * SR_UNIT;
	(void)sr_look_up(&request);
	sr_finish(&request);
	assert_int_equal(sr_stats().miss_tokens_absent - stats.miss_tokens_absent, TOKENS - 3u * SR_UNIT);

	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(look_up(0, 0), 0);
	assert_int_equal(sr_stats().miss_tokens_late - stats.miss_tokens_late, TOKENS);
	rig_signal(&sr.rig, SIGCONT);
	rig_kill(&sr.rig);
	(void)sr_step();
	assert_int_equal(look_up(1, 0), 0);
	assert_int_equal(sr_stats().miss_tokens_no_daemon - stats.miss_tokens_no_daemon, TOKENS);
}

/* The daemon grants slots to an engine that is idle by then, and plans no step. Its timer gives them back. */
SR_CASE(p4_slots_granted_to_an_idle_engine_are_given_back, patient)
{
	sr_request(&request, "idle", 1, 0, TOKENS);
	assert_int_equal(sr_look_up(&request), 0);
	sr_place(&request, 0, 0);
	sr_compute(&request, 0, TOKENS / SR_UNIT);
	rig_signal(&sr.rig, SIGSTOP);
	(void)sr_step_saves(&request, TOKENS);
	sr_finish(&request);
	rig_signal(&sr.rig, SIGCONT);
	for (uint32_t i = 0; i < 10000 && rig_counter(&sr.rig, "kvd_puts") != 1; i++) {
		usleep(1000);
	}
	while (sr.scheduler->puts->at == KVX_SPUT_ASKED) {
		(void)kvx_scheduler_has_pending(sr.scheduler);
	}
	sr.ahead_ns += UINT64_C(9000) * KVX_MS; /* a long step, perhaps */
	assert_true(kvx_scheduler_has_pending(sr.scheduler));
	assert_int_equal(sr_stats().puts_open, 1);
	sr.ahead_ns += UINT64_C(2000) * KVX_MS;
	assert_false(kvx_scheduler_has_pending(sr.scheduler));
	assert_int_equal(sr_stats().puts_open, 0);
	for (uint32_t i = 0; i < 10000 && rig_counter(&sr.rig, "kvd_puts") != 0; i++) {
		(void)kvc_poll(sr.kvc, 1);
	}
	assert_int_equal(rig_counter(&sr.rig, "kvd_puts"), 0);
}

SR_MAIN
