/* Attaching, and what becomes of an attachment when the daemon refuses, lies, stops or dies. */
#include "client_test.h"

#include <poll.h>
#include <sys/wait.h>

static kvc_status_t try_attach(const bed_t *bed, uint32_t timeout_ms)
{
	kvc_config_t config = bed_config(bed);
	kvc_t *kvc = NULL;
	kvc_status_t status;

	config.timeout_ms = timeout_ms;
	status = kvc_attach(&config, &kvc);
	assert_true((status == KVC_OK) == (kvc != NULL));
	kvc_detach(kvc);

	return status;
}

KV_TEST(p7_nobody_listening_is_an_answer_at_once)
{
	bed_t bed = {.path = "/nowhere/at/all.sock"};
	kvc_config_t config = bed_config(&bed);
	uint64_t begin = test_now_ms();
	kvc_t *kvc = NULL;
	kvc_space_t *space;
	kvc_identity_t identity = bed_identity();

	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), KVC_ERR_UNREACHABLE);
	assert_non_null(strstr(kvc_last_error(), "/nowhere/at/all.sock"));
	assert_non_null(strstr(kvc_last_error(), "is it running?"));
	config.lazy = 1;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_OK);
	assert_int_equal(kvc_space_open(kvc, &identity, &space), KVC_ERR_UNREACHABLE);
	assert_int_equal(kvc_poll(kvc, 0), KVC_ERR_UNREACHABLE);
	assert_int_equal(kvc_fd(kvc), -1);
	assert_int_equal(kvc_incarnation(kvc), 0);
	kvc_detach(kvc);
	assert_in_range(test_now_ms() - begin, 0, BED_TIMEOUT_MS - 1);
	kvc_detach(NULL);
}

KV_TEST(p10_wrong_arguments_are_refused)
{
	kvc_config_t config;
	kvc_t *kvc = NULL;
	kvc_identity_t identity = bed_identity();
	kvc_space_t *space = NULL;
	char path[200];
	const uint8_t secret[16] = {1};

	bed_listen(&bed, &fake_split);
	config = bed_config(&bed);
	config.struct_size = 0;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_ERR_ARG);
	assert_int_equal(kvc_attach(NULL, &kvc), KVC_ERR_ARG);
	config = bed_config(&bed);
	assert_int_equal(kvc_attach(&config, NULL), KVC_ERR_ARG);
	config.role = 7;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_ERR_ARG);
	config = bed_config(&bed);
	config.instance = "i";
	config.secret = secret;
	config.secret_len = 15;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_ERR_ARG);
	config = bed_config(&bed);
	memset(path, 'p', sizeof path);
	path[sizeof path - 1] = '\0';
	config.socket = path;
	assert_int_equal(kvc_attach(&config, &kvc), KVC_ERR_ARG);
	assert_null(kvc);

	config = bed_config(&bed);
	assert_int_equal(kvc_attach(&config, &bed.kvc), KVC_OK);
	identity.weights = NULL;
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), (kvc_status_t)KV_ERR_IDENTITY);
	assert_non_null(strstr(kvc_last_error(), "weights"));
	assert_null(space);
}

KV_TEST(p10_every_lie_at_join_is_refused)
{
	bed_listen(&bed, &fake_split);
	for (uint32_t fault = FAKE_JOIN_RIGHT + 1; fault < FAKE_JOIN_LAST; fault++) {
		kvc_status_t status;

		atomic_store(&fake_knobs(bed.fake)->join, fault);
		status = try_attach(&bed, BED_TIMEOUT_MS);
		assert_true(status == (kvc_status_t)KV_ERR_PROTO || status == (kvc_status_t)KV_ERR_VERSION);
	}
	bed_free(&bed);
	bed_listen(&bed, &fake_split);
	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), KVC_OK);
	bed_free(&bed);
}

KV_TEST(p10_every_lie_about_a_slab_ends_the_session)
{
	for (uint32_t fault = FAKE_SLAB_RIGHT + 1; fault < FAKE_SLAB_LAST; fault++) {
		kvc_config_t config;

		bed_listen(&bed, &fake_split);
		atomic_store(&fake_knobs(bed.fake)->slab, fault);
		config = bed_config(&bed);
		config.lazy = 1;
		assert_int_equal(kvc_attach(&config, &bed.kvc), KVC_OK);
		if (fault == FAKE_SLAB_OTHER_GEOMETRY) {
			bed_open(&bed);
			/* A slab of other spaces: nothing of this space can be in it. */
			assert_int_equal(bed_put(&bed, 0, 2), (kvc_status_t)KV_ERR_LAYOUT);
		} else {
			BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->hellos) >= 3);
		}
		bed_free(&bed);
	}
}

KV_TEST(p10_every_broken_answer_ends_the_session_only)
{
	static const uint32_t codes[] = {KV_CODE_HELLO, KV_CODE_SPACE_OPEN, KV_CODE_ACQUIRE, KV_CODE_PUT_START,
					 KV_CODE_STATUS};

	for (uint32_t fault = FAKE_REPLY_RIGHT + 1; fault < FAKE_REPLY_LAST; fault++) {
		for (uint32_t c = 0; c < KV_COUNT_OF(codes); c++) {
			kvc_config_t config;
			kvc_lease_t *lease = NULL;
			char *json = NULL;

			bed_listen(&bed, &fake_split);
			config = bed_config(&bed);
			config.lazy = 1;
			config.timeout_ms = 200;
			atomic_store(&fake_knobs(bed.fake)->reply, fault);
			atomic_store(&fake_knobs(bed.fake)->corrupt_code, codes[c] == KV_CODE_HELLO ? codes[c] : 0);
			assert_int_equal(kvc_attach(&config, &bed.kvc), KVC_OK);
			atomic_store(&fake_knobs(bed.fake)->corrupt_code, 0);
			BED_UNTIL(&bed, kvc_poll(bed.kvc, 1) == KVC_OK);
			bed_open(&bed);
			atomic_store(&fake_knobs(bed.fake)->corrupt_code, codes[c]);
			if (codes[c] == KV_CODE_SPACE_OPEN) {
				fake_drop_sessions(bed.fake); /* the space is opened again */
				(void)kvc_poll(bed.kvc, 30);
			}
			(void)kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease);
			(void)bed_put(&bed, 0, 2);
			if (kvc_document(bed.kvc, KVC_DOC_STATUS, 0, &json, NULL) == KVC_OK) {
				kvc_free(json);
			}
			kvc_release(&lease, 1);
			atomic_store(&fake_knobs(bed.fake)->corrupt_code, 0);
			BED_UNTIL(&bed, kvc_poll(bed.kvc, 1) == KVC_OK);
			BED_UNTIL(&bed, bed_put(&bed, 0, 2) == KVC_OK);
			bed_free(&bed);
		}
	}
}

KV_TEST(p10_another_version_is_refused)
{
	bed_listen(&bed, &fake_split);
	atomic_store(&fake_knobs(bed.fake)->hello_version, 2);
	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), (kvc_status_t)KV_ERR_VERSION);
	atomic_store(&fake_knobs(bed.fake)->hello_version, 0);
	atomic_store(&fake_knobs(bed.fake)->fail_code, KV_CODE_JOIN);
	atomic_store(&fake_knobs(bed.fake)->fail_status, KV_ERR_SECRET);
	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), (kvc_status_t)KV_ERR_SECRET);
	assert_non_null(strstr(kvc_last_error(), "the fake says no"));
}

KV_TEST(p5_a_hung_daemon_costs_the_attach_deadline)
{
	uint64_t begin = test_now_ms();

	bed_listen(&bed, &fake_split);
	atomic_store(&fake_knobs(bed.fake)->mute, KV_CODE_HELLO);
	assert_int_equal(try_attach(&bed, 60), KVC_ERR_TIMEOUT);
	atomic_store(&fake_knobs(bed.fake)->mute, KV_CODE_JOIN);
	assert_int_equal(try_attach(&bed, 60), KVC_ERR_TIMEOUT);
	assert_in_range(test_now_ms() - begin, 115, BED_TIMEOUT_MS);
}

KV_TEST(p10_a_space_that_does_not_add_up_is_refused)
{
	kvc_config_t config;
	kvc_identity_t identity = bed_identity();
	kvc_space_t *space = NULL;

	bed_listen(&bed, &fake_split);
	config = bed_config(&bed);
	assert_int_equal(kvc_attach(&config, &bed.kvc), KVC_OK);
	atomic_store(&fake_knobs(bed.fake)->space_geometry, 1);
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), (kvc_status_t)KV_ERR_PROTO);
	assert_null(space);
}

/* ---- the daemon goes ------------------------------------------------------------------------- */

/* Waiting adds up while the heartbeat stands still, then there is none, and it begins anew with the next beat. */
BED_CASE(p5_a_daemon_that_stands_still_is_waited_for_once)
{
	uint64_t begin;
	uint32_t waits = 0;

	for (uint32_t round = 0; round < 2; round++) {
		atomic_store(&fake_knobs(bed.fake)->no_heartbeat, 1);
		usleep(50000); /* a beat may be under way */
		begin = test_now_ms();
		assert_int_equal(kvc_await_us(bed.kvc, 0), KVC_OK);
		for (waits = 0; waits < 1000 && kvc_await_us(bed.kvc, 100000) == KVC_OK; waits++) {
		}
		assert_true(waits > 0 && waits <= FAKE_STALE_NS / 100000000u);
		assert_true(test_now_ms() - begin >=
			    FAKE_STALE_NS / 1100000u); /* the round before may have waited on this beat */
		for (uint32_t i = 0; i < 1000; i++) {  /* a thousand waits of 100 s would not end in time */
			assert_int_equal(kvc_await_us(bed.kvc, 100000000u), KVC_ERR_DAEMON_STALE);
		}
		atomic_store(&fake_knobs(bed.fake)->no_heartbeat, 0);
		BED_UNTIL(&bed, kvc_await_us(bed.kvc, 1000) == KVC_OK);
	}
}

/* For good: misses, no session, and the bytes of a lease stay where they are. */
BED_CASE(p7_an_attachment_that_was_abandoned_is_a_miss_for_good)
{
	kvc_lease_t *lease = NULL, *other = NULL;
	const void *data = NULL;
	const uint64_t *leaves;
	kvc_match_t match = {.struct_size = sizeof match};

	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_block(lease, 0, &data, &leaves), KVC_OK);
	kvc_abandon(NULL);
	kvc_abandon(bed.kvc);
	for (int i = 0; i < 3; i++) {
		kvc_match(bed.space, bed.keys, 4, &match);
		assert_int_equal(match.n, 0);
		assert_int_equal(kvc_lease_state(lease), KVC_ERR_INTERNAL);
		assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &other), KVC_ERR_INTERNAL);
		assert_int_equal(bed_put(&bed, 4, 6), KVC_ERR_INTERNAL);
		assert_int_equal(kvc_poll(bed.kvc, 10), KVC_ERR_INTERNAL);
		assert_int_equal(kvc_fd(bed.kvc), -1);
	}
	assert_int_equal(*(const volatile char *)data, *(const volatile char *)data); /* no fault */
	kvc_release(&lease, 1);
}

/* Of every struct that the library fills or reads. */
BED_CASE(p10_a_struct_without_its_size_is_an_error)
{
	kvc_match_t match = {0};
	kvc_put_result_t result = {0};
	kvc_space_info_t info = {0};
	kvc_stats_t stats = {0};
	const kvc_report_t report = {0};
	kvc_put_t *put;

	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 4, 6, NULL, &put), KVC_OK);
	assert_int_equal(kvc_match(bed.space, bed.keys, 4, &match), KVC_ERR_ARG);
	assert_int_equal(match.n, 0);
	assert_non_null(strstr(kvc_last_error(), "kvc_match: struct_size is not set"));
	assert_int_equal(kvc_put_get_result(put, &result), KVC_ERR_ARG);
	assert_int_equal(kvc_space_get_info(bed.space, &info), KVC_ERR_ARG);
	assert_int_equal(info.block_bytes, 0);
	assert_int_equal(kvc_get_stats(bed.kvc, &stats), KVC_ERR_ARG);
	stats.struct_size = sizeof(size_t);
	assert_int_equal(kvc_get_stats(bed.kvc, &stats), KVC_ERR_ARG);
	kvc_report(bed.space, &report); /* nothing is recorded */
	kvc_put_free(put);
}

BED_CASE(p5_a_daemon_silent_for_seconds_is_asked_nothing)
{
	kvc_lease_t *lease = NULL;
	uint64_t begin;

	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	atomic_store(&fake_knobs(bed.fake)->no_heartbeat, 1);
	atomic_store(&fake_knobs(bed.fake)->mute, UINT32_MAX);
	usleep(FAKE_STALE_NS / 1000u + 50000u);
	begin = test_now_ms();
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), KVC_ERR_DAEMON_STALE);
	assert_int_equal(bed_put(&bed, 4, 6), KVC_ERR_DAEMON_STALE);
	assert_in_range(test_now_ms() - begin, 0, BED_TIMEOUT_MS - 1);
	atomic_store(&fake_knobs(bed.fake)->mute, 0);
	atomic_store(&fake_knobs(bed.fake)->no_heartbeat, 0);
	BED_UNTIL(&bed, bed_put(&bed, 4, 6) == KVC_OK);
}

BED_CASE(p7_leases_and_puts_end_with_the_daemon_and_it_is_rejoined)
{
	kvc_lease_t *lease = NULL, *pending;
	kvc_put_t *put;
	kvc_put_result_t result = {.struct_size = sizeof result};
	kvc_match_t match = {.struct_size = sizeof match};
	const void *data;
	kvc_stats_t stats = {.struct_size = sizeof stats};

	assert_int_equal(kvc_incarnation(bed.kvc), 41);
	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_block(lease, 0, &data, NULL), KVC_OK);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 4, 6, NULL, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 0), KVC_OK);
	atomic_store(&fake_knobs(bed.fake)->mute, KV_CODE_ACQUIRE);
	assert_int_equal(kvc_acquire_start(bed.space, bed.keys, 4, 0, 0, &pending), KVC_OK);

	fake_stop(bed.fake); /* kill -9 */
	bed.fake = NULL;
	assert_int_not_equal(kvc_poll(bed.kvc, 100), KVC_OK);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	assert_int_equal(kvc_lease_state(pending), KVC_ERR_CLOSED);
	assert_int_equal(kvc_lease_read(lease, 0, 1, (void *const *)bed.dst, NULL), KVC_ERR_REVOKED);
	assert_memory_equal(data, bed.src[0], bed.info.block_bytes); /* a copy under way may go on reading */
	kvc_put_get_result(put, &result);
	assert_int_equal(result.status, KVC_ERR_CLOSED); /* not REVOKED, which a member says */
	assert_int_equal(kvc_put_write(put, 0, bed.src[4]), KVC_ERR_REVOKED);
	kvc_match(bed.space, bed.keys, 4, &match);
	assert_int_equal(match.n, 0);
	assert_int_equal(match.why, KV_WHY_NO_DAEMON);
	assert_int_equal(bed_put(&bed, 4, 6), KVC_ERR_UNREACHABLE);

	bed.fake = fake_start(bed.path, &fake_split, 42);
	BED_UNTIL(&bed, kvc_poll(bed.kvc, 5) == KVC_OK);
	assert_int_equal(kvc_incarnation(bed.kvc), 42);
	/* Handles of before are alive, so a copy of ours may be, too: nothing is said of the old memory yet. */
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->old_incarnation), 0);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	kvc_release((kvc_lease_t *const[]){lease, pending}, 2);
	kvc_put_free(put);
	BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->drains) == 1);
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->drained_what), 2);
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->released_ids), 0);

	fake_drop_sessions(bed.fake); /* the same daemon: it is told that our copies have ended */
	BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->joins) == 2 && kvc_poll(bed.kvc, 1) == KVC_OK);
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->old_incarnation), 42);
	kvc_match(bed.space, bed.keys, 4, &match);
	assert_int_equal(match.n, 4);
	kvc_get_stats(bed.kvc, &stats);
	assert_int_equal(stats.reattaches, 2);
	assert_int_equal(stats.leases_open + stats.puts_open, 0);
}

/* Its put ends under the next session, while a copy may still be under way: the slots are not given up before the
 * handle is. */
BED_CASE(p1_a_put_of_an_older_session_is_drained_when_it_is_freed)
{
	kvc_put_t *put = NULL;

	assert_int_equal(kvc_put_start(bed.space, bed.keys, 0, 4, NULL, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 0), KVC_OK);
	fake_drop_sessions(bed.fake);
	BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->joins) == 2 && kvc_poll(bed.kvc, 1) == KVC_OK);
	fake_finish_puts(bed.fake, KV_ERR_REVOKED);
	for (uint32_t i = 0; i < 20; i++) {
		(void)kvc_poll(bed.kvc, 5);
	}
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->drains), 0);
	kvc_put_free(put);
	BED_UNTIL(&bed,
		  atomic_load(&fake_seen(bed.fake)->drains) == 2); /* of the put, and of all of the old session's */
}

static void changes_shape(uint32_t geometry)
{
	kvc_lease_t *lease = NULL;

	bed_make(&bed, &fake_split);
	atomic_store(&fake_knobs(bed.fake)->space_geometry, geometry);
	fake_drop_sessions(bed.fake);
	BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->joins) == 2 && kvc_poll(bed.kvc, 1) == KVC_OK);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), (kvc_status_t)KV_ERR_LAYOUT);
}

KV_TEST(p7_a_space_that_changed_its_shape_is_not_used_again)
{
	changes_shape(2);
}

/* Blocks would be written, and digested, in an order that nobody reads them in. */
KV_TEST(p1_a_space_whose_byte_order_changed_is_not_used_again)
{
	changes_shape(3);
}

/* A daemon that has just come up is busy, or slow. */
KV_TEST(p7_a_space_that_could_not_be_reopened_is_opened_later)
{
	kvc_match_t match = {.struct_size = sizeof match};

	for (int mute = 0; mute < 2; mute++) {
		kvc_config_t config;
		bed_t bed;

		bed_listen(&bed, &fake_split);
		config = bed_config(&bed);
		config.timeout_ms = mute ? 1500 : BED_TIMEOUT_MS;
		assert_int_equal(kvc_attach(&config, &bed.kvc), KVC_OK);
		bed_open(&bed);
		assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
		atomic_store(&fake_knobs(bed.fake)->fail_status, KV_ERR_BUSY);
		atomic_store(mute ? &fake_knobs(bed.fake)->mute : &fake_knobs(bed.fake)->fail_code, KV_CODE_SPACE_OPEN);
		fake_drop_sessions(bed.fake);
		BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->joins) == 2 && kvc_poll(bed.kvc, 1) == KVC_OK);
		assert_int_not_equal(kvc_space_state(bed.space), KVC_OK);
		atomic_store(mute ? &fake_knobs(bed.fake)->mute : &fake_knobs(bed.fake)->fail_code, 0);
		BED_UNTIL(&bed, (kvc_match(bed.space, bed.keys, 4, &match), match.n == 4));
		assert_int_equal(kvc_space_state(bed.space), KVC_OK);
		bed_free(&bed);
	}
}

BED_CASE(p1_a_reset_by_another_member_is_noticed)
{
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_space_info_t info = {.struct_size = sizeof info};
	kvc_lease_t *lease = NULL;

	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	fake_reset_space(bed.fake);
	kvc_match(bed.space, bed.keys, 4, &match);
	assert_int_equal(match.why, KV_WHY_STALE_EPOCH);
	BED_UNTIL(&bed, (kvc_space_get_info(bed.space, &info), info.epoch == 2));

	fake_reset_space(bed.fake);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), KVC_ERR_STALE_EPOCH);
	BED_UNTIL(&bed, (kvc_space_get_info(bed.space, &info), info.epoch == 3));
	assert_int_equal(kvc_space_reset(bed.space), KVC_OK);
	kvc_space_get_info(bed.space, &info);
	assert_int_equal(info.epoch, 4);
}

BED_CASE(p6_a_forked_child_is_told_so)
{
	bed_t other;
	kvc_lease_t *lease = NULL, *lease_of_other = NULL;
	kvc_handle_t handle;
	int status = -1;
	pid_t pid;

	bed_make(&other, &fake_split);
	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	assert_int_equal(bed_put(&other, 0, 4), KVC_OK);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_acquire(other.space, other.keys, 4, 0, 0, &lease_of_other), KVC_OK);
	pid = fork();
	if (pid == 0) {
		kvc_match_t match = {.struct_size = sizeof match};
		kvc_put_t *put;
		int bad = 0;

		kvc_match(bed.space, bed.keys, 4, &match);
		bad |= match.n != 0 || match.why != KV_WHY_NO_DAEMON;
		bad |= kvc_poll(bed.kvc, 0) != KVC_ERR_CLOSED;
		bad |= kvc_lease_read(lease, 0, 1, (void *const *)bed.dst, NULL) != KVC_ERR_CLOSED;
		bad |= kvc_lease_wait(lease, 1, 10) != KVC_ERR_CLOSED;
		bad |= kvc_lease_state(lease) != KVC_ERR_CLOSED;
		bad |= kvc_lease_ready(lease) != 0;
		bad |= kvc_lease_export(lease, &handle) != KVC_ERR_CLOSED;
		bad |= kvc_put_start(bed.space, bed.keys, 4, 5, NULL, &put) != KVC_ERR_CLOSED;
		bad |= strstr(kvc_last_error(), "forked") == NULL;
		kvc_release((kvc_lease_t *[]){lease, lease_of_other}, 2);
		kvc_detach(bed.kvc);
		kvc_detach(other.kvc);
		_exit(bad);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	for (int i = 0; i < 20; i++) { /* nothing of the child's reaches a daemon */
		assert_int_equal(kvc_poll(bed.kvc, 1), KVC_OK);
	}
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->releases), 0);
	assert_int_equal(atomic_load(&fake_seen(other.fake)->releases), 0);
	assert_int_equal(kvc_lease_read(lease, 0, 4, (void *const *)bed.dst, NULL), KVC_OK);
	bed_check_read(&bed, 0, 4);
	kvc_release((kvc_lease_t *[]){lease, lease_of_other}, 2);
	bed_free(&other);
}

BED_CASE(p7_a_space_can_be_opened_without_waiting)
{
	kvc_identity_t identity = bed_identity();
	kvc_space_t *space = NULL;
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};

	assert_int_equal(bed_put(&bed, 0, 4), KVC_OK);
	identity.model = NULL;
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &space), (kvc_status_t)KV_ERR_IDENTITY);
	assert_null(space);

	atomic_store(&fake_knobs(bed.fake)->mute, KV_CODE_SPACE_OPEN);
	identity = bed_identity();
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &space), KVC_OK);
	assert_int_equal(kvc_space_state(space), KVC_PENDING);
	assert_int_equal(kvc_poll(bed.kvc, 20), KVC_OK);
	assert_int_equal(kvc_space_state(space), KVC_PENDING);
	kvc_match(space, bed.keys, 4, &match);
	assert_int_equal(match.n, 0);
	assert_int_equal(kvc_acquire(space, bed.keys, 4, 0, 0, &lease), KVC_ERR_BUSY);
	assert_null(lease);
	kvc_space_close(space); /* before its answer */

	atomic_store(&fake_knobs(bed.fake)->mute, 0);
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &space), KVC_OK);
	BED_UNTIL(&bed, kvc_space_state(space) == KVC_OK);
	kvc_match(space, bed.keys, 4, &match);
	assert_int_equal(match.n, 4);
	fake_drop_sessions(bed.fake);
	BED_UNTIL(&bed, kvc_space_state(space) == KVC_ERR_CLOSED);
	BED_UNTIL(&bed, kvc_space_state(space) == KVC_OK);
}

/* All that was sent before has been seen when this open is answered. */
static uint32_t count_closes(const bed_t *bed, kvc_space_t **p_space)
{
	const kvc_identity_t identity = bed_identity();

	assert_int_equal(kvc_space_open(bed->kvc, &identity, p_space), KVC_OK);

	return atomic_load(&fake_seen(bed->fake)->space_closes);
}

BED_CASE(p5_the_daemon_is_told_when_no_handle_has_a_space)
{
	const kvc_identity_t identity = bed_identity();
	kvc_space_t *again, *late;

	assert_int_equal(count_closes(&bed, &again), 0);
	kvc_space_close(again); /* bed.space has it */
	assert_int_equal(count_closes(&bed, &again), 0);
	kvc_space_close(again);
	kvc_space_close(bed.space);
	assert_int_equal(count_closes(&bed, &again), 1);
	kvc_space_close(again);
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &late), KVC_OK);
	kvc_space_close(late); /* its answer comes later, and opens the space for nobody */
	BED_UNTIL(&bed, atomic_load(&fake_seen(bed.fake)->space_closes) == 3);
}

/* The answer is in the socket when the wait begins: it is taken, and nothing else is waited for. */
BED_CASE(p5_a_wait_ends_with_what_had_arrived_before_it)
{
	kvc_status_t (*const waits[])(kvc_t *, uint32_t) = {kvc_poll, kvc_poll_us, kvc_await_us};
	const uint32_t timeouts[] = {BED_TIMEOUT_MS, BED_TIMEOUT_MS * 1000u, BED_TIMEOUT_MS * 1000u};

	for (uint32_t i = 0; i < KV_COUNT_OF(waits); i++) {
		const kvc_identity_t identity = bed_identity();
		struct pollfd fd = {.fd = kvc_fd(bed.kvc), .events = POLLIN};
		kvc_space_t *space;
		uint64_t start;

		assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &space), KVC_OK);
		assert_int_equal(poll(&fd, 1, BED_TIMEOUT_MS), 1);
		start = test_now_ms();
		assert_int_equal(waits[i](bed.kvc, timeouts[i]), KVC_OK);
		assert_true(test_now_ms() - start < FAKE_STALE_NS / 1000000u);
		assert_int_equal(kvc_space_state(space), KVC_OK);
		kvc_space_close(space);
	}
}

KV_TEST(observers_ask_and_hold_nothing)
{
	kvc_config_t config;
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};
	char *json = NULL;
	uint32_t failed = 0, why = 0;
	uint8_t tiers[8];

	bed_listen(&bed, &fake_split);
	config = bed_config(&bed);
	config.observe = 1;
	assert_int_equal(kvc_attach(&config, &bed.kvc), KVC_OK);
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->joins), 0);
	assert_int_equal(kvc_document(bed.kvc, KVC_DOC_CHECK, 0, &json, &failed), KVC_OK);
	assert_non_null(strstr(json, "\"checks\":["));
	assert_int_equal(failed, 1);
	kvc_free(json);
	assert_int_equal(kvc_document(bed.kvc, 3, 0, &json, NULL), KVC_ERR_ARG);
	bed_open(&bed);
	assert_int_equal(kvc_explain(bed.space, bed.keys, 8, tiers, &why), KVC_OK);
	assert_int_equal(tiers[0], 0);
	assert_int_equal(why, KV_WHY_ABSENT);
	kvc_match(bed.space, bed.keys, 4, &match);
	assert_int_equal(match.n, 0);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 0, &lease), (kvc_status_t)KV_ERR_NOT_JOINED);
}

KV_TEST_MAIN_EACH(NULL, bed_teardown)
