/* Clients that die, or stop, holding things. */
#include "e2e/rig/rig.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define LEN 12u

/* ---- dying ----------------------------------------------------------------------------------- */

typedef struct victim {
	const rig_t *rig;
	uint64_t seed;
} victim_t;

/* A lease on half of a conversation, half a put of the rest, and one put that is only reserved. */
static void hold_things(void *arg, int ready)
{
	const victim_t *v = arg;
	const kvc_identity_t identity = user_identity("victim");
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_key_t keys[2 * LEN], more[LEN];
	uint8_t block[RIG_BLOCK_BYTES];
	kvc_lease_t *lease;
	kvc_put_t *put, *reserved;
	user_t user;

	if (user_try(&user, v->rig->sock, &identity) != KVC_OK) {
		_exit(1);
	}
	user_keys(&user, v->seed, 2 * LEN, keys);
	user_keys(&user, v->seed + 1000, LEN, more);
	if (user_put(&user, keys, 0, LEN, 0, NULL) != KVC_OK ||
	    kvc_acquire(user.space, keys, LEN, 0, 0, &lease) != KVC_OK ||
	    kvc_put_start(user.space, keys, LEN, 2 * LEN, &options, &put) != KVC_OK ||
	    kvc_put_ready(put, 0) != KVC_OK || kvc_put_start(user.space, more, 0, LEN, &options, &reserved) != KVC_OK ||
	    kvc_put_ready(reserved, 0) != KVC_OK) {
		_exit(2);
	}
	for (uint32_t i = 0; i < LEN / 2; i++) {
		user_fill(&keys[LEN + i], block);
		if (kvc_put_write(put, i, block) != KVC_OK) {
			_exit(3);
		}
	}
	if (kvc_put_end(put, 0, LEN / 2) != KVC_OK) {
		_exit(4);
	}
	child_say(ready);
	pause();
}

RIG_TEST(p4_a_client_killed_with_leases_and_half_a_put_leaks_nothing, rig_begin(&rig_, 1))
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	kvc_key_t keys[2 * LEN];
	other_t other;
	user_t user;
	uint32_t n;

	other_start(&other, rig_.sock);
	user_attach(&user, &rig_, "victim");
	for (uint32_t round = 0; round < 20; round++) {
		victim_t victim = {&rig_, round};
		pid_t pid = child_start(hold_things, &victim);

		usleep((useconds_t)kv_test_below(&rng, 5000));
		child_kill(pid);
		assert_true(rig_metric_is(&rig_, "kvd_members", 2));
		/* What was whole stays, what was half is not visible. */
		user_keys(&user, round, 2 * LEN, keys);
		assert_int_equal(user_get(&user, keys, 2 * LEN, &n), KVC_OK);
		assert_in_range(n, LEN, LEN + LEN / 2);
	}
	assert_int_equal(rig_metric(&rig_, "kvd_members_died_total"), 20);
	other_end(&other, 0);
	user_leave(&user);
	rig_check_quiet(&rig_);
	assert_int_equal(rig_metric(&rig_, "kvd_leases_taken_total"),
			 rig_metric(&rig_, "kvd_leases_ended_total{reason=released}") +
				 rig_metric(&rig_, "kvd_leases_ended_total{reason=expired}") +
				 rig_metric(&rig_, "kvd_leases_ended_total{reason=revoked}"));
}

/* ---- stopping -------------------------------------------------------------------------------- */

typedef struct sleeper {
	const rig_t *rig;
	uint64_t seed;
	_Atomic uint64_t reads, wrong;
	_Atomic int32_t last; /* status of the last read */
	_Atomic int32_t other_status;
} sleeper_t;

/* Lease once, then read over and over until it is refused. */
static void read_for_ever(void *arg, int ready)
{
	static uint8_t have[RIG_BLOCK_BYTES], want[LEN][RIG_BLOCK_BYTES];
	sleeper_t *s = arg;
	const kvc_identity_t identity = user_identity("sleeper");
	kvc_key_t keys[LEN];
	void *const dst[1] = {have};
	kvc_lease_t *lease;
	kvc_status_t status = KVC_OK;
	user_t user;

	if (user_try(&user, s->rig->sock, &identity) != KVC_OK) {
		_exit(1);
	}
	user_keys(&user, s->seed, LEN, keys);
	for (uint32_t i = 0; i < LEN; i++) {
		user_fill(&keys[i], want[i]);
	}
	if (user_put(&user, keys, 0, LEN, 0, NULL) != KVC_OK ||
	    kvc_acquire(user.space, keys, LEN, 0, 0, &lease) != KVC_OK || kvc_lease_wait(lease, LEN, 0) != KVC_OK) {
		_exit(2);
	}
	child_say(ready);
	for (uint32_t i = 0; status == KVC_OK; i = (i + 1) % LEN) {
		status = kvc_lease_read(lease, i, 1, dst, NULL);
		if (status == KVC_OK) {
			atomic_fetch_add(&s->wrong, memcmp(have, want[i], sizeof have) != 0);
			atomic_fetch_add(&s->reads, 1);
		}
	}
	atomic_store(&s->last, status);
	kvc_release(&lease, 1);
	/* It may go on like everybody else. */
	uint32_t n = 0;
	status = user_put(&user, keys, 0, LEN, 0, NULL);
	if (status == KVC_OK) {
		status = user_get(&user, keys, LEN, &n);
	}
	atomic_fetch_add(&s->wrong, user.wrong);
	atomic_store(&s->other_status, status);
	kvc_detach(user.kvc);
}

/* Put so much that every slot of the pool has been used again. */
static void flood(user_t *user, uint64_t seed)
{
	kvc_key_t keys[60];

	for (uint32_t t = 0; t < 12; t++) {
		user_keys(user, seed * 100 + t, 60, keys);
		if (user_put(user, keys, 0, 60, 0, NULL) != KVC_OK) {
			fail_msg("%s", kvc_last_error());
		}
	}
}

KV_TEST(p4_a_client_stopped_past_its_lease_reads_no_reused_slot)
{
	kv_test_rng_t rng = {.state = kv_test_seed() + 9};
	sleeper_t *s = mmap(NULL, sizeof *s, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	user_t user;
	rig_t rig;

	rig_init(&rig, 0);
	rig_option(&rig, "--lease.ttl=400ms");
	rig_start(&rig);
	user_attach(&user, &rig, "flood");
	for (uint32_t round = 0; round < 8; round++) {
		*s = (sleeper_t){.rig = &rig, .seed = round};
		pid_t pid = child_start(read_for_ever, s);
		int wstatus;

		usleep((useconds_t)kv_test_below(&rng, 20000));
		kill(pid, SIGSTOP);
		assert_true(rig_metric_is(&rig, "kvd_leases", 0)); /* nobody waits for it */
		assert_true(rig_metric_is(&rig, "kvd_leases_ended_total{reason=expired}", round + 1));
		flood(&user, round);
		kill(pid, SIGCONT);
		assert_int_equal(waitpid(pid, &wstatus, 0), pid);
		assert_int_equal(wstatus, 0);
		assert_int_equal(s->wrong, 0);
		assert_true(s->last == KVC_ERR_EXPIRED || s->last == KVC_ERR_REVOKED);
		assert_int_equal(s->other_status, KVC_OK);
	}
	user_leave(&user);
	rig_end(&rig);
	munmap(s, sizeof *s);
}

/* Nanoseconds that all answers together took; detaching is a request too. */
static uint64_t answer_ns(const rig_t *rig)
{
	char out[4096];
	const char *at;

	assert_int_equal(rig_kvctl(rig, "stats --json kvd_answer_seconds", out, sizeof out), 0);
	at = strstr(out, "\"sum_ns\":");
	assert_non_null(at);

	return strtoull(at + strlen("\"sum_ns\":"), NULL, 10);
}

RIG_TEST(p5_answers_are_timed_from_their_requests, rig_init(&rig_, 0))
{
	const uint64_t start = rig_now_ms();
	user_t user;

	rig_start(&rig_);
	user_attach(&user, &rig_, "timed");
	user_leave(&user);
	assert_true(rig_metric_is(&rig_, "kvd_members", 0));
	assert_true(answer_ns(&rig_) < (rig_now_ms() - start) * 1000000u);
}
