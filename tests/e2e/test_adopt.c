/* The daemon is killed and its keeper starts the next one: blocks in GPU memory outlive it. */
#include "e2e/rig/talks.h"

#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#define LEN      TALKS_LEN
#define ADOPTING 2u /* kills in a row before the keeper starts with empty memory */

static void kill_daemon(void)
{
	talks_kill_daemon(&rig_);
}

RIG_TEST(p6_crashes_in_a_row_end_in_empty_memory, talks_begin(&rig_, &user_))
{
	user_leave(&user_);
	for (uint32_t i = 0; i <= ADOPTING; i++) {
		kill_daemon();
	}
	talks_attach(&rig_, &user_);
	talks_expect(&user_, 0);
	assert_int_equal(rig_metric(&rig_, "kvd_adopted_blocks_total"), 0);
	talks_put_all(&user_);
	talks_expect(&user_, LEN);
}

RIG_TEST(p1_a_reset_stays_one_through_a_crash, talks_begin(&rig_, &user_))
{
	assert_int_equal(kvc_space_reset(user_.space), KVC_OK);
	kill_daemon(); /* most likely before all blocks of the old epoch have gone */
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	talks_expect(&user_, 0);
	talks_put_all(&user_);
	kill_daemon();
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	talks_expect(&user_, LEN);
}

RIG_TEST(p1_bytes_changed_between_two_daemons_are_a_miss, talks_begin(&rig_, &user_))
{
	kvc_key_t keys[LEN];
	kvc_lease_t *lease = NULL;
	uint8_t *data;

	user_keys(&user_, 1, LEN, keys);
	assert_int_equal(kvc_acquire(user_.space, keys, LEN, 0, 0, &lease), KVC_OK);
	data = user_memory(lease, 5);
	data[1000] ^= 4;
	kvc_release(&lease, 1);
	kill_daemon();
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	(void)talks_get(&user_, 1); /* the lease fails at the sixth block */
	/* Until what lies below is out of the mirror a match says 32, and a lease on 32 has the next rung of its ladder: 1. */
	assert_true(user_match_is(&user_, keys, LEN, 5));
	for (uint64_t c = 0; c < TALKS; c++) {
		assert_int_equal(talks_get(&user_, c), c == 1 ? 5 : LEN);
	}
	assert_int_equal(rig_metric(&rig_, "kvd_bad_blocks_total"), 1);
}

/* A put that the crash has met: its slots wait until its engine has no copy under way. */
KV_TEST(p4_slots_of_an_unfinished_put_wait_for_its_engine, NULL, rig_tear_down)
{
	talks_check_unfinished_put(&rig_, kill_daemon);
}

static void hold_put(void *arg, int ready)
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_key_t keys[LEN];
	kvc_put_t *put = NULL;
	user_t user;

	(void)arg;
	talks_attach(&rig_, &user);
	user_keys(&user, 100, LEN, keys);
	if (kvc_put_start(user.space, keys, 0, LEN, &options, &put) == KVC_OK && kvc_put_ready(put, 10000) == KVC_OK) {
		child_say(ready);
	}
	pause(); /* it does not see that the daemon has gone */
}

RIG_TEST(p4_slots_of_an_unfinished_put_are_free_when_its_engine_dies, talks_stage(&rig_, 0))
{
	user_t user;
	pid_t pid;

	rig_start(&rig_);
	pid = child_start(hold_put, NULL);
	for (uint32_t i = 0; i < ADOPTING; i++) { /* the second daemon waits for it, and so does the third */
		talks_attach(&rig_, &user);
		talks_put_all(&user);
		user_leave(&user);
		assert_true(rig_metric_is(&rig_, "kvd_members", i == 0));
		kill_daemon();
		assert_int_equal(rig_metric(&rig_, "kvd_adopt_writers"), 1);
		assert_int_equal(rig_metric(&rig_, "kvd_tier_quarantined_bytes{tier=gpu}"), LEN * RIG_BLOCK_BYTES);
	}
	child_kill(pid);
	assert_true(rig_metric_is(&rig_, "kvd_tier_quarantined_bytes{tier=gpu}", 0));
	assert_int_equal(rig_metric(&rig_, "kvd_adopt_writers"), 0);
}

/* Messages wait, however often the daemon's loop has gone round since. */
static int is_socket_full(void)
{
	for (uint32_t looks = 0; looks < 3; looks++) {
		const uint64_t waiting = rig_metric(&rig_, "kvd_keeper_waiting_messages");

		if (waiting == 0 || waiting == UINT64_MAX) {
			return 0;
		}
	}

	return 1;
}

/* Attach until the socket to the keeper is full. */
static void fill_socket(void *arg, int ready)
{
	static user_t users[1000];

	(void)arg;
	for (uint32_t i = 0; i < 1000 && !is_socket_full(); i++) {
		talks_attach(&rig_, &users[i]);
	}
	child_say(ready);
	pause();
}

/* It has all talks, and the keeper no writer of them any longer. */
static pid_t daemon_with_blocks(user_t *user)
{
	talks_attach(&rig_, user);
	talks_put_all(user);
	user_leave(user);
	KV_AWAIT(kv_test_count_fds(rig_.pid, "pidfd") == 0);

	return rig_daemon(&rig_);
}

/* The keeper is stopped when an engine comes, and goes on when the daemon has died: the next one does not know whose
 * slots these are, so it gives them to nobody. */
RIG_TEST(p1_slots_of_a_writer_that_the_keeper_has_not_heard_of_are_not_given_away, talks_stage(&rig_, 0))
{
	user_t user;
	pid_t daemon, filler, writer;

	rig_option(&rig_, "--limits.instances=1001");
	rig_start(&rig_);
	daemon = daemon_with_blocks(&user);
	kill(rig_.pid, SIGSTOP);
	filler = child_start(fill_socket, NULL);
	writer = child_start(hold_put, NULL);
	kill(daemon, SIGKILL);
	kill(rig_.pid, SIGCONT);
	talks_wait_next(&rig_, daemon);
	child_kill(filler);
	for (uint32_t i = 0; i < ADOPTING; i++) {
		assert_true(rig_metric_is(&rig_, "kvd_adopt_writers", 0)); /* that it knows of */
		talks_attach(&rig_, &user);
		talks_expect(&user, LEN);
		user_leave(&user);
		assert_int_equal(rig_metric(&rig_, "kvd_tier_quarantined_bytes{tier=gpu}"), LEN * RIG_BLOCK_BYTES);
		if (i == 0) {
			kill_daemon();
		}
	}
	assert_true(rig_log_has(&rig_, "that the keeper knew"));
	child_kill(writer);
	rig_stop(&rig_); /* not quiet: it keeps these slots */
}

/* The keeper has no descriptor for an engine's: nothing is taken over that this engine may write to. */
RIG_TEST(p1_a_pidfd_that_the_keeper_cannot_take_costs_what_is_kept, talks_stage(&rig_, 0))
{
	struct rlimit none = {3, 0}, before;
	user_t user;
	pid_t daemon, writer;

	rig_start(&rig_);
	daemon = daemon_with_blocks(&user);
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, NULL, &before), 0);
	none.rlim_max = before.rlim_max;
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, &none, NULL), 0);
	writer = child_start(hold_put, NULL);
	kill(daemon, SIGKILL);
	KV_AWAIT(rig_log_has(&rig_, "cannot start the daemon"));
	assert_int_equal(prlimit(rig_.pid, RLIMIT_NOFILE, &before, NULL), 0);
	talks_wait_next(&rig_, daemon);
	talks_attach(&rig_, &user);
	talks_expect(&user, 0);
	talks_put_all(&user);
	talks_expect(&user, LEN);
	assert_int_equal(rig_metric(&rig_, "kvd_adopted_blocks_total"), 0);
	user_leave(&user);
	child_kill(writer);
}

/* Private blocks are hits for nobody but who was given them, so they end with the daemon. */
RIG_TEST(p8_private_blocks_end_with_the_daemon, talks_begin(&rig_, &user_))
{
	static uint8_t bytes[RIG_BLOCK_BYTES];
	const void *const src[1] = {bytes};
	const kvc_put_options_t options = {.struct_size = sizeof options, .private_blocks = 1, .blocks = src};
	kvc_key_t keys[1];
	uint32_t visible = 0;

	user_keys(&user_, 100, 1, keys);
	assert_int_equal(kvc_put(user_.space, keys, 0, 1, &options, &visible), KVC_OK);
	kill_daemon();
	assert_int_equal(rig_metric(&rig_, "kvd_adopted_blocks_total"), TALKS * LEN);
	assert_int_equal(rig_metric(&rig_, "kvd_adopt_dropped_total"), 1);
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	assert_int_equal(user_match(&user_, keys, 1), 0);
}

/* ---- another configuration ------------------------------------------------------------------- */

/* What a SIGHUP has announced holds from the next daemon on. */
static void change_config(const char *path, const char *text)
{
	kv_test_write(path, text);
	kill(rig_.pid, SIGHUP);
	assert_true(rig_metric_is(&rig_, "kvd_config_differs", 1));
	kill_daemon();
}

/* The keeper reads what a daemon hands in some time after the daemon goes on. */
static void await_kept_slabs(int some)
{
	KV_AWAIT((kv_test_count_fds(rig_.pid, "kvd-fake-gpu") > 0) == some);
}

/* The option changes between two daemons: what the first one has left goes, and so does the keeper's hold on it. */
RIG_TEST(p10_restart_adopt_off_starts_with_empty_memory, talks_stage(&rig_, 0))
{
	char path[96];

	snprintf(path, sizeof path, "%.70s/kvd.conf", rig_.dir);
	rig_option(&rig_, "--config=%s", path);
	kv_test_write(path, "restart.adopt: on\n");
	rig_start(&rig_);
	talks_attach(&rig_, &user_);
	talks_put_all(&user_);
	user_leave(&user_);
	await_kept_slabs(1);
	change_config(path, "restart.adopt: off\n");
	await_kept_slabs(0);
	talks_attach(&rig_, &user_);
	talks_expect(&user_, 0);
	assert_int_equal(rig_metric(&rig_, "kvd_adopted_blocks_total"), 0);
	talks_put_all(&user_);
	kill_daemon();
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	talks_expect(&user_, 0);
}

/* With less memory, and without the namespace that had half of it: what is left goes on, and takes what is free. */
KV_TEST(p5_what_no_longer_fits_is_left_out, NULL, rig_tear_down)
{
	char path[96], sock[96];
	kvc_identity_t identity = user_identity("model");
	user_t user, rival;
	uint32_t there = 0;

	identity.device = "fake-0";
	talks_stage(&rig_, 0);
	snprintf(path, sizeof path, "%.70s/kvd.conf", rig_.dir);
	snprintf(sock, sizeof sock, "%.79s/rival.sock", rig_.run_dir);
	rig_.option_count -= 3;
	rig_option(&rig_, "--gpu.slab_size=2MiB");
	rig_option(&rig_, "--gpu.devices=fake-0");
	rig_option(&rig_, "--config=%s", path);
	kv_test_write(path, "namespaces: default,rival\ngpu.size: 8MiB\n");
	rig_start(&rig_);
	talks_attach(&rig_, &user);
	assert_int_equal(user_try(&rival, sock, &identity), KVC_OK);
	for (uint64_t c = 0; c < 2; c++) {
		assert_int_equal(talks_put(&user, c), LEN);
		assert_int_equal(talks_put(&rival, c), LEN);
	}
	user_leave(&user);
	user_leave(&rival);
	change_config(path, "namespaces: default\ngpu.size: 4MiB\n");
	talks_attach(&rig_, &user);
	for (uint64_t c = 0; c < 2; c++) {
		assert_int_equal(talks_get(&user, c), LEN);
	}
	assert_int_equal(rig_metric(&rig_, "kvd_adopted_blocks_total"), 2 * LEN);
	assert_int_equal(rig_metric(&rig_, "kvd_adopt_dropped_total"), 2 * LEN); /* the other namespace's */
	assert_int_equal(rig_metric(&rig_, "kvd_tier_limit_bytes{tier=gpu}"), 4u << 20);
	for (const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS; there < 200 && rig_now_ms() < deadline;) {
		there = 0;
		for (uint64_t c = 10; c < 17; c++) { /* more than one slab: the other one changes hands */
			(void)talks_put(&user, c);
		}
		for (uint64_t c = 10; c < 17; c++) {
			there += talks_get(&user, c);
		}
	}
	assert_true(there >= 200);
	user_leave(&user);
	change_config(path, "namespaces: default\ngpu.size: 2MiB\n");
	talks_attach(&rig_, &user);
	assert_int_equal(rig_metric(&rig_, "kvd_adopt_refused_total"), 1);
	assert_true(rig_metric(&rig_, "kvd_adopted_blocks_total") <= 128);
	user_leave(&user);
	rig_end(&rig_);
}

/* ---- at any time ----------------------------------------------------------------------------- */

#define ROUNDS 8u

KV_TEST(p1_kills_at_any_time_never_give_wrong_bytes, NULL, rig_tear_down)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	talks_notes_t *notes = talks_notes_make(&rig_, 2 * TALKS);
	uint64_t adopted = 0;

	for (uint32_t round = 0; round < ROUNDS; round++) {
		pid_t pid[2];

		talks_stage(&rig_, 0);
		rig_start(&rig_);
		talks_engines_start(notes, pid, 2);
		for (uint32_t i = 0; i < ADOPTING; i++) {
			talks_engines_wait(notes, 3);
			usleep((useconds_t)kv_test_below(&rng, 30000));
			kill_daemon();
			adopted += rig_metric(&rig_, "kvd_adopted_blocks_total");
			assert_int_equal(rig_metric(&rig_, "kvd_adopt_refused_total"), 0);
		}
		assert_true(rig_metric_is(&rig_, "kvd_adopt_writers", 0)); /* the engines have joined again */
		talks_engines_end(notes, pid, 2);
		rig_end(&rig_); /* free, used and quarantined are all there is */
	}
	printf("# adopted %lu, put %u, hits %u, attached %u times\n", (unsigned long)adopted, atomic_load(&notes->put),
	       atomic_load(&notes->hits), atomic_load(&notes->attached));
	assert_true(adopted > 0 && atomic_load(&notes->hits) > 0);
	assert_true(atomic_load(&notes->attached) > 2 * ROUNDS);
	talks_notes_free(notes);
}
