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
#define STARVE_NS  UINT64_C(45000000) /* the daemon did not run for longer than promised: not counted */

typedef struct staller {
	kv_test_rng_t rng;
	_Atomic int stop;
	_Atomic uint32_t stalls;
	_Atomic uint64_t since_ns;   /* of the stall that is on; 0: none is */
	_Atomic uint64_t longest_ns; /* of those that are over, since the last hit */
	pthread_t thread;
} staller_t;

static sr_request_t request;

static const sr_options_t brief = {.wait_us = 500, .silence = "50ms"}, patient = {.wait_us = 500};

/* A number of a file of the daemon's thread in /proc, after this text; 0: it is not there. */
static uint64_t thread_number(const char *file, const char *format)
{
	unsigned long long number = 0;
	char line[256];
	FILE *in;

	(void)snprintf(line, sizeof line, "/proc/%d/task/%d/%s", (int)sr.rig.pid, (int)sr.rig.pid, file);
	in = fopen(line, "r");
	while (in && fgets(line, sizeof line, in) && sscanf(line, format, &number) != 1) {
	}
	if (in) {
		(void)fclose(in);
	}

	return number;
}

/* How often the daemon's loop has gone to sleep, stops included: after a turn. */
static uint64_t sleeps(void)
{
	return thread_number("status", "voluntary_ctxt_switches: %llu");
}

/* How long it has been ready to run without a processor, since its start. */
static uint64_t starved_ns(void)
{
	return thread_number("schedstat", "%*u %llu");
}

static void *stall(void *arg)
{
	staller_t *staller = arg;

	while (!atomic_load(&staller->stop)) {
		uint64_t start, ns, slept;

		usleep((useconds_t)kv_test_below(&staller->rng, GAP_US));
		start = sr_now_ns();
		atomic_store(&staller->since_ns, start);
		rig_signal(&sr.rig, SIGSTOP);
		usleep((useconds_t)kv_test_below(&staller->rng, STALL_US));
		slept = sleeps();
		rig_signal(&sr.rig, SIGCONT);
		for (uint32_t i = 0; i < 10000 && sleeps() == slept; i++) { /* over when a turn is */
			usleep(100);
		}
		ns = sr_now_ns() - start;
		atomic_store(&staller->since_ns, 0);
		if (ns > atomic_load(&staller->longest_ns)) {
			atomic_store(&staller->longest_ns, ns);
		}
		atomic_fetch_add(&staller->stalls, 1);
	}

	return NULL;
}

/* The longest stall since the last sr.hit. */
static uint64_t longest(staller_t *staller)
{
	const uint64_t since = atomic_load(&staller->since_ns), now = since ? sr_now_ns() - since : 0;

	return now > atomic_load(&staller->longest_ns) ? now : atomic_load(&staller->longest_ns);
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

static void p7_stalls_of_40_ms_cost_no_stored_token(void)
{
	uint64_t hit = 0, stored = 0, before;
	kvx_scheduler_stats_t stats;
	staller_t staller = {.rng.state = kv_test_seed()};
	uint32_t starved = 0;

	store();
	assert_int_equal(pthread_create(&staller.thread, NULL, stall, &staller), 0);
	before = starved_ns();
	for (uint32_t i = 0; i < LOOKUPS + starved && i < MOST; i++) {
		uint32_t tokens;

		usleep((useconds_t)(i * 2654435761u % PAUSE_US));
		tokens = look_up(i, i % PROMPTS);
		if (tokens < TOKENS && longest(&staller) + starved_ns() - before > STARVE_NS) {
			starved++;
			continue;
		}
		if (tokens == TOKENS) {
			before = starved_ns();
			atomic_store(&staller.longest_ns, 0);
		}
		hit += tokens;
		stored += TOKENS;
	}
	atomic_store(&staller.stop, 1);
	assert_int_equal(pthread_join(staller.thread, NULL), 0);
	printf("# %u stalls; %lu of %lu stored tokens hit; %u lookups not counted, of a daemon without a processor\n",
	       atomic_load(&staller.stalls), (unsigned long)hit, (unsigned long)stored, starved);
	stats = sr_stats();
	print_reasons(&stats);
	assert_int_equal(stored, (uint64_t)LOOKUPS * TOKENS);
	assert_true(hit * 100u >= stored * 99u);
}

/* Lookups of a stopped daemon wait for it 50 ms in all, however many there are; each new stop costs that again. All is
 * found once it goes on. */
static void p7_a_stopped_daemon_costs_lookups_50_ms_once(void)
{
	store();
	for (uint32_t round = 0; round < 3; round++) {
		const kvx_scheduler_stats_t before = sr_stats();
		kvx_scheduler_stats_t after;
		uint32_t i;

		rig_signal(&sr.rig, SIGSTOP);
		while (look_up(0, 0) > 0) {
		}
		for (i = 1; i < STOPPED; i++) {
			assert_int_equal(look_up(i, i % PROMPTS), 0);
		}
		after = sr_stats();
		printf("# %u lookups of a stopped daemon waited %.1f ms\n", STOPPED,
		       (double)(after.wait_ns - before.wait_ns) / 1e6);
		assert_true(after.wait_ns - before.wait_ns >=
			    SILENCE_NS / 2u); /* lookups before have waited on this beat */
		assert_true(after.wait_ns - before.wait_ns <
			    STOPPED * SILENCE_NS / 10u); /* each of them: ten times as much */
		assert_int_equal(after.miss_tokens_daemon_stale - before.miss_tokens_daemon_stale, STOPPED * TOKENS);
		rig_signal(&sr.rig, SIGCONT);
		for (i = 0; i < 1000 && look_up(i, 0) < TOKENS; i++) {
			usleep(10000);
		}
		assert_true(i < 1000);
	}
}

/* An operator sees why tokens were missed. */
static void p7_every_missed_token_is_counted_under_its_reason(void)
{
	kvx_scheduler_stats_t stats;

	store();
	stats = sr_stats();

	sr_request(&request, "new", 77, 0, TOKENS);
	request.ask.local = 2u * SR_UNIT;
	(void)sr_look_up(&request);
	sr_finish(&request);
	assert_int_equal(sr_stats().miss_tokens_absent - stats.miss_tokens_absent, TOKENS - 3u * SR_UNIT);

	rig_signal(&sr.rig, SIGSTOP);
	assert_int_equal(look_up(0, 0), 0);
	assert_int_equal(sr_stats().miss_tokens_late, TOKENS);
	rig_signal(&sr.rig, SIGCONT);
	rig_kill(&sr.rig);
	(void)sr_step();
	assert_int_equal(look_up(1, 0), 0);
	assert_int_equal(sr_stats().miss_tokens_no_daemon, TOKENS);
}

SR_MAIN(SR_TEST(p7_stalls_of_40_ms_cost_no_stored_token, brief),
	SR_TEST(p7_a_stopped_daemon_costs_lookups_50_ms_once, brief),
	SR_TEST(p7_every_missed_token_is_counted_under_its_reason, patient))
