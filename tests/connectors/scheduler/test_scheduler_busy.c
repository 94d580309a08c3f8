/* The daemon has no room for a time, or is slow, when a request ends: what was not saved by then is saved while the
 * engine is idle, if its blocks are still there. */
#include "connectors/scheduler/sched_rig.h"

#include <signal.h>

#define PROMPT  (SR_MAX_TOKENS / SR_UNIT) /* blocks */
#define LEASES  100u
#define LAST_NS (UINT64_C(1000) * KVX_MS) /* of save.c */

static sr_request_t a, b, c;
static kvc_lease_t *leases[LEASES];
static uint32_t lease_count;

static const sr_options_t plain, own_keys = {.own_keys = 1}, window = {.groups = 2},
				 patient = {.wait_us = 500, .silence = "5s"};

static uint32_t seed;

/* A prompt that nobody had is computed in the blocks from base on. */
static void use_up(sr_request_t *request, const char *id, uint32_t base)
{
	sr_request(request, id, ++seed, 0, SR_MAX_TOKENS);
	(void)sr_run(request, base);
	sr_finish(request);
}

static uint64_t now_ns(void)
{
	return kv_now_ns(&sr_env.env);
}

/* Its prompt is looked up under another name. */
static uint32_t count_found(uint32_t of)
{
	uint32_t found;

	sr_request(&c, "again", of, 0, SR_MAX_TOKENS);
	c.ask.whole = 1;
	found = sr_match(&c);
	sr_end(&c);

	return found;
}

/* Refused while the engine runs, at the end, and after it. Again, should the process have been without a processor for
 * so long that nothing is asked for any longer. */
SR_CASE(p5_what_a_request_could_not_save_is_saved_after_its_end, plain)
{
	for (uint64_t ended = 0; now_ns() - ended >= LAST_NS;) {
		sr.is_busy = 1;
		sr.busy_puts = 0;
		use_up(&a, "busy", 0);
		ended = now_ns();
		while (kvx_scheduler_has_pending(sr.scheduler)) { /* else an idle engine makes no step */
			sr.is_busy = sr.busy_puts < 4u * sr.groups;
			(void)sr_step();
			usleep(100);
		}
		sr_settle();
		if (count_found(seed) >= SR_MAX_TOKENS - SR_UNIT) { /* the last block may be computed in any case */
			return;
		}
	}
	fail_msg("it is lost");
}
SR_ALSO(p5_what_a_request_could_not_save_is_saved_after_its_end, own_keys, 0)
SR_ALSO(p5_what_a_request_could_not_save_is_saved_after_its_end, window, 0)

static void lease(uint32_t n)
{
	kvc_key_t keys[PROMPT];

	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(kvc_key_bind(sr.space[0], a.hash[i], 32, &keys[i]), KVC_OK);
	}
	assert_true(lease_count < LEASES);
	assert_int_equal(kvc_acquire(sr.space[0], keys, n, 0, 600000, &leases[lease_count++]), KVC_OK);
}

static void make_room(void)
{
	kvc_release(&leases[--lease_count], 1);
	(void)kvc_poll(sr.kvc, 1);
}

/* Until nothing can make room, but for half of the last prompt. */
static void fill(void)
{
	for (uint32_t stored = PROMPT; stored == PROMPT; lease(stored)) {
		use_up(&a, "many", 0);
		sr.ahead_ns += 2u * LAST_NS;
		sr_settle();
		stored = sr_count_stored(KVX_HOST_MEM, &a);
		if (stored == 0) {
			sr_request(&a, "many", seed - 1u, 0, SR_MAX_TOKENS);
			make_room();
			stored = PROMPT / 2u;
		}
	}
}

/* A put is granted as far as there is room, after the end; again, as above. */
SR_CASE(p5_the_rest_of_what_was_granted_is_saved_after_its_end, patient)
{
	uint64_t ended;

	lease_count = 0;
	do {
		fill();
		rig_signal(&sr.rig, SIGSTOP);
		use_up(&b, "part", PROMPT);
		ended = now_ns();
		rig_signal(&sr.rig, SIGCONT);
		while (sr_count_stored(KVX_HOST_MEM, &b) == 0 && now_ns() - ended < LAST_NS) {
			(void)sr_step();
		}
		assert_int_not_equal(sr_count_stored(KVX_HOST_MEM, &b), PROMPT);
		make_room();
		make_room();
	} while (now_ns() - ended >= LAST_NS / 2u);
	sr_settle();
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &b), PROMPT);
	while (lease_count > 0) {
		make_room();
	}
}

SR_CASE(p2_blocks_of_another_request_are_not_saved_after_the_end_of_the_first, plain)
{
	sr.is_busy = 1;
	use_up(&a, "busy", 0);
	SR_UNTIL(sr.busy_puts > 1);
	sr_request(&b, "other", seed + 1u, 0, SR_MAX_TOKENS);
	sr_place(&b, 0, 0);
	sr.is_busy = 0;
	sr_settle();
	assert_int_equal(count_found(seed), 0);
}

SR_CASE(p5_a_daemon_without_room_is_not_asked_for_ever, plain)
{
	uint32_t asked;

	sr.is_busy = 1;
	use_up(&a, "busy", 0);
	SR_UNTIL(sr.busy_puts > 1);
	sr.ahead_ns += LAST_NS;
	SR_UNTIL(sr_stats().puts_open == 0);
	asked = sr.busy_puts;
	sr_settle();
	assert_int_equal(sr.busy_puts, asked);
	assert_false(kvx_scheduler_has_pending(sr.scheduler));
}

/* The answer comes when the engine has been idle for a while: it makes a step for it. */
SR_CASE(p5_an_idle_engine_waits_for_the_answer_to_its_last_save, patient)
{
	sr_request(&a, "slow", 1, 0, SR_MAX_TOKENS);
	assert_int_equal(sr_match(&a), 0);
	sr_place(&a, 0, 0);
	sr_compute(&a, 0, PROMPT);
	rig_signal(&sr.rig, SIGSTOP);
	(void)sr_step_saves(&a, SR_MAX_TOKENS);
	sr_finish(&a);
	(void)sr_step();
	sr.ahead_ns += LAST_NS / 4u;
	assert_true(kvx_scheduler_has_pending(sr.scheduler) || now_ns() - sr.scheduler->puts->asked_ns >= LAST_NS);
	rig_signal(&sr.rig, SIGCONT);
	sr_settle();
	assert_int_equal(sr_count_stored(KVX_HOST_MEM, &a), PROMPT);
}

SR_MAIN
