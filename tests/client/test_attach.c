/* Attaching, and what becomes of an attachment when the daemon refuses, lies, stops or dies. */
#include "client_test.h"

#include "core/block/mirror.h"

#include <poll.h>
#include <sys/wait.h>

static kvc_status_t try_attach(const bed_t *bed, uint32_t timeout_ms)
{
	const kvc_config_t config = bed_config(bed, (kvc_config_t){.timeout_ms = timeout_ms});
	kvc_t *kvc = NULL;
	kvc_status_t status;

	status = kvc_attach(&config, &kvc);
	assert_true((status == KVC_OK) == (kvc != NULL));
	kvc_detach(kvc);

	return status;
}

KV_TEST(p7_nobody_listening_is_an_answer_at_once)
{
	bed_t bed = {.path = "/nowhere/at/all.sock"};
	uint64_t begin = test_now_ms();
	kvc_space_t *space;
	kvc_identity_t identity = bed_identity();

	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), KVC_ERR_UNREACHABLE);
	assert_non_null(strstr(kvc_last_error(), "/nowhere/at/all.sock"));
	assert_non_null(strstr(kvc_last_error(), "is it running?"));
	bed_attach(&bed, (kvc_config_t){.lazy = 1});
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), KVC_ERR_UNREACHABLE);
	assert_int_equal(kvc_poll(bed.kvc, 0), KVC_ERR_UNREACHABLE);
	assert_int_equal(kvc_fd(bed.kvc), -1);
	assert_int_equal(kvc_incarnation(bed.kvc), 0);
	kvc_detach(bed.kvc);
	assert_in_range(test_now_ms() - begin, 0, BED_TIMEOUT_MS - 1);
	kvc_detach(NULL);
}

KV_TEST(p10_wrong_arguments_are_refused)
{
	static const uint8_t secret[16] = {1};
	kvc_config_t good, wrong[5];
	kvc_identity_t identity = bed_identity();
	kvc_space_t *space = NULL;
	kvc_t *kvc = NULL;
	char path[200];

	bed_listen(&bed, &fake_split);
	good = bed_config(&bed, (kvc_config_t){0});
	for (size_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		wrong[i] = good;
	}
	wrong[0].struct_size = 0;
	wrong[1].role = 7;
	wrong[2].instance = "i";
	wrong[2].secret = secret;
	wrong[2].secret_len = 15;
	memset(path, 'p', sizeof path);
	path[sizeof path - 1] = '\0';
	wrong[3].socket = path;
	for (size_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		assert_int_equal(kvc_attach(i < 4 ? &wrong[i] : NULL, &kvc), KVC_ERR_ARG);
		assert_null(kvc);
	}
	assert_int_equal(kvc_attach(&good, NULL), KVC_ERR_ARG);

	bed_attach(&bed, (kvc_config_t){0});
	identity.weights = NULL;
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), (kvc_status_t)KV_ERR_IDENTITY);
	assert_non_null(strstr(kvc_last_error(), "weights"));
	assert_null(space);
}

KV_TEST(p10_every_lie_at_join_is_refused)
{
	const fake_lie_t lies[] = {
		{.of = FAKE_OF_JOIN, .one_less = 1},
		{.of = FAKE_OF_JOIN, .unsealed = 1},
		FAKE_LIE(FAKE_OF_JOIN, kv_msg_join_reply_t, lease_bytes,
			 UINT64_C(1) << 40), /* more than the memfd has */
		FAKE_LIE(FAKE_OF_MIRROR, kv_mirror_header_t, magic, KV_MIRROR_MAGIC + 1),
		FAKE_LIE(FAKE_OF_MIRROR, kv_mirror_header_t, bucket_count, FAKE_SLOTS - 1), /* no power of two */
		FAKE_LIE(FAKE_OF_MIRROR, kv_mirror_header_t, bucket_count, UINT64_C(1) << 58),
		FAKE_LIE(FAKE_OF_MIRROR, kv_mirror_header_t, epochs_offset, /* they end behind the area */
			 kvd_mirror_size(FAKE_SLOTS) - 8u),
		FAKE_LIE(FAKE_OF_MIRROR, kv_mirror_header_t, stale_ns, UINT64_MAX), /* never */
		FAKE_LIE(FAKE_OF_MIRROR, kv_mirror_header_t, incarnation, 42),      /* HELLO has said 41 */
		FAKE_LIE(FAKE_OF_LEASES, kv_lease_area_header_t, version, KV_SHM_VERSION + 1u),
		FAKE_LIE(FAKE_OF_MEMBER, kv_member_area_header_t, ring_records, 1u << 30),
		FAKE_LIE(FAKE_OF_MEMBER, kv_member_area_header_t, staging_offset, UINT64_MAX - 7u),
	};

	bed_listen(&bed, &fake_split);
	for (size_t i = 0; i < KV_COUNT_OF(lies); i++) {
		kvc_status_t status;

		KNOB(lie) = &lies[i];
		status = try_attach(&bed, BED_TIMEOUT_MS);
		assert_true(status == (kvc_status_t)KV_ERR_PROTO || status == (kvc_status_t)KV_ERR_VERSION);
	}
	bed_free(&bed);
	bed_listen(&bed, &fake_split);
	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), KVC_OK);
}

KV_TEST(p10_every_lie_about_a_slab_ends_the_session)
{
	const uint32_t stride = fake_split.slot_bytes, block = fake_split.block_bytes;
	const fake_lie_t lies[] = {
		FAKE_LIE(FAKE_OF_SLAB, kv_msg_slab_add_t, bytes, (uint64_t)FAKE_SLOTS * stride + 4096u),
		FAKE_LIE(FAKE_OF_SLAB, kv_msg_slab_add_t, slot_bytes, stride - 512u), /* no multiple of 4096 */
		/* heads x leaves overflows */
		{FAKE_OF_SLAB, offsetof(kv_msg_slab_add_t, heads), 8, UINT64_MAX, 0, 0, 0, 0, 0},
		{.of = FAKE_OF_SLAB, .one_less = 1},
		{.of = FAKE_OF_SLAB, .twice = 1},
		{.of = FAKE_OF_SLAB, .unsealed = 1},
		/* a slab of other spaces: nothing of this space can be in it */
		FAKE_LIE(FAKE_OF_SLAB, kv_msg_slab_add_t, block_bytes, block - 64u),
	};

	_Static_assert(offsetof(kv_msg_slab_add_t, leaves) == offsetof(kv_msg_slab_add_t, heads) + 4, "");
	for (size_t i = 0; i < KV_COUNT_OF(lies); i++) {
		bed_listen(&bed, &fake_split);
		KNOB(lie) = &lies[i];
		bed_attach(&bed, (kvc_config_t){.lazy = 1});
		if (i == KV_COUNT_OF(lies) - 1u) {
			bed_open(&bed);
			assert_int_equal(bed_put(&bed, 0, 2), (kvc_status_t)KV_ERR_LAYOUT);
		} else {
			BED_UNTIL(&bed, ASKED(HELLO) >= 3);
		}
		bed_free(&bed);
	}
}

/* What was asked for with `code` is answered so. */
static void answer_broken(uint32_t code, const fake_lie_t *lie)
{
	char *json = NULL;

	bed_listen(&bed, &fake_split);
	KNOB(lie) = lie;
	KNOB(corrupt_code) = code == KV_CODE_HELLO ? code : 0;
	bed_attach(&bed, (kvc_config_t){.lazy = 1, .timeout_ms = 200});
	KNOB(corrupt_code) = 0;
	BED_UNTIL(&bed, kvc_poll(bed.kvc, 1) == KVC_OK);
	bed_open(&bed);
	KNOB(corrupt_code) = code;
	if (code == KV_CODE_SPACE_OPEN) {
		fake_drop_sessions(bed.fake); /* the space is opened again */
		(void)kvc_poll(bed.kvc, 30);
	}
	(void)bed_try_acquire();
	(void)bed_put(&bed, 0, 2);
	if (kvc_document(bed.kvc, KVC_DOC_STATUS, 0, &json, NULL) == KVC_OK) {
		kvc_free(json);
	}
	KNOB(corrupt_code) = 0;
	BED_UNTIL(&bed, kvc_poll(bed.kvc, 1) == KVC_OK);
	BED_UNTIL(&bed, bed_put(&bed, 0, 2) == KVC_OK);
	bed_free(&bed);
}

KV_TEST(p10_every_broken_answer_ends_the_session_only)
{
	static const uint32_t codes[] = {KV_CODE_HELLO, KV_CODE_SPACE_OPEN, KV_CODE_ACQUIRE, KV_CODE_PUT_START,
					 KV_CODE_STATUS};
	static const fake_lie_t lies[] = {
		FAKE_LIE(FAKE_OF_ANSWER, kv_frame_header_t, magic, KV_WIRE_MAGIC ^ 0x5555u),
		FAKE_LIE(FAKE_OF_ANSWER, kv_frame_header_t, id, 1000000),
		FAKE_LIE(FAKE_OF_ANSWER, kv_frame_header_t, code, KV_CODE_STATS),
		FAKE_LIE(FAKE_OF_ANSWER, kv_frame_header_t, body, UINT32_MAX), /* more than any frame has */
		FAKE_LIE(FAKE_OF_ANSWER, kv_frame_header_t, fds, 2),           /* which are not there */
		{.of = FAKE_OF_ANSWER, .garbled = 1},
		{.of = FAKE_OF_ANSWER, .cut = 1},
	};

	for (size_t i = 0; i < KV_COUNT_OF(lies) * KV_COUNT_OF(codes); i++) {
		answer_broken(codes[i % KV_COUNT_OF(codes)], &lies[i / KV_COUNT_OF(codes)]);
	}
}

KV_TEST(p10_another_version_is_refused)
{
	bed_listen(&bed, &fake_split);
	KNOB(hello_version) = 2;
	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), (kvc_status_t)KV_ERR_VERSION);
	KNOB(hello_version) = 0;
	KNOB(fail_code) = KV_CODE_JOIN;
	KNOB(fail_status) = KV_ERR_SECRET;
	assert_int_equal(try_attach(&bed, BED_TIMEOUT_MS), (kvc_status_t)KV_ERR_SECRET);
	assert_non_null(strstr(kvc_last_error(), "the fake says no"));
}

KV_TEST(p5_a_hung_daemon_costs_the_attach_deadline)
{
	uint64_t begin = test_now_ms();

	bed_listen(&bed, &fake_split);
	KNOB(mute) = KV_CODE_HELLO;
	assert_int_equal(try_attach(&bed, 60), KVC_ERR_TIMEOUT);
	KNOB(mute) = KV_CODE_JOIN;
	assert_int_equal(try_attach(&bed, 60), KVC_ERR_TIMEOUT);
	assert_in_range(test_now_ms() - begin, 115, BED_TIMEOUT_MS);
}

KV_TEST(p10_a_space_that_does_not_add_up_is_refused)
{
	kvc_identity_t identity = bed_identity();
	kvc_space_t *space = NULL;

	bed_listen(&bed, &fake_split);
	bed_attach(&bed, (kvc_config_t){0});
	KNOB(space_geometry) = 1;
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), (kvc_status_t)KV_ERR_PROTO);
	assert_null(space);
}

/* ---- the daemon goes ------------------------------------------------------------------------- */

/* Waiting adds up while the heartbeat stands still, then there is none, and it begins anew with the next beat. */
BED_CASE(p5_a_daemon_that_stands_still_is_waited_for_once)
{
	for (uint32_t round = 0; round < 2; round++) {
		uint32_t waits = 0;
		uint64_t begin;

		KNOB(no_heartbeat) = 1;
		usleep(50000); /* a beat may be under way */
		begin = test_now_ms();
		assert_int_equal(kvc_await_us(bed.kvc, 0), KVC_OK);
		while (waits < 1000 && kvc_await_us(bed.kvc, 100000) == KVC_OK) {
			waits++;
		}
		assert_true(waits > 0 && waits <= FAKE_STALE_NS / 100000000u);
		assert_true(test_now_ms() - begin >=
			    FAKE_STALE_NS / 1100000u); /* the round before may have waited on this beat */
		for (uint32_t i = 0; i < 1000; i++) {  /* a thousand waits of 100 s would not end in time */
			assert_int_equal(kvc_await_us(bed.kvc, 100000000u), KVC_ERR_DAEMON_STALE);
		}
		KNOB(no_heartbeat) = 0;
		BED_UNTIL(&bed, kvc_await_us(bed.kvc, 1000) == KVC_OK);
	}
}

/* For good: misses, no session, and the bytes of a lease stay where they are. */
BED_CASE(p7_an_attachment_that_was_abandoned_is_a_miss_for_good)
{
	const void *data = NULL;
	kvc_lease_t *lease;

	bed_store(0, 4);
	lease = bed_acquire(4, 0);
	assert_int_equal(kvc_lease_block(lease, 0, &data, NULL), KVC_OK);
	kvc_abandon(NULL);
	kvc_abandon(bed.kvc);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(bed_match(4).n, 0);
		assert_int_equal(kvc_lease_state(lease), KVC_ERR_INTERNAL);
		assert_int_equal(bed_try_acquire(), KVC_ERR_INTERNAL);
		assert_int_equal(bed_put(&bed, 4, 6), KVC_ERR_INTERNAL);
		assert_int_equal(kvc_poll(bed.kvc, 10), KVC_ERR_INTERNAL);
		assert_int_equal(kvc_fd(bed.kvc), -1);
	}
	assert_int_equal(*(const volatile char *)data, *(const volatile char *)data); /* no fault */
	kvc_release(&lease, 1);
}

/* Of every struct that the library fills or reads. An older caller's, which is smaller, is not overrun. */
BED_CASE(p10_a_struct_without_its_size_is_an_error)
{
	kvc_match_t match = {0};
	kvc_put_result_t result = {0};
	kvc_space_info_t info = {0};
	kvc_stats_t stats = {0};
	const kvc_report_t report = {0};
	kvc_put_t *put;

	bed_store(0, 4);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 4, 6, NULL, &put), KVC_OK);
	assert_int_equal(kvc_match(bed.space, bed.keys, 4, &match), KVC_ERR_ARG);
	assert_int_equal(match.n, 0);
	assert_non_null(strstr(kvc_last_error(), "kvc_match: struct_size is not set"));
	match.struct_size = offsetof(kvc_match_t, why);
	match.why = 0xaaaaaaaau;
	assert_int_equal(kvc_match(bed.space, bed.keys, 4, &match), KVC_OK);
	assert_int_equal(match.n, 4);
	assert_int_equal(match.why, 0xaaaaaaaau);
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
	uint64_t begin;

	bed_store(0, 4);
	KNOB(no_heartbeat) = 1;
	KNOB(mute) = UINT32_MAX;
	usleep(FAKE_STALE_NS / 1000u + 50000u);
	begin = test_now_ms();
	assert_int_equal(bed_try_acquire(), KVC_ERR_DAEMON_STALE);
	assert_int_equal(bed_put(&bed, 4, 6), KVC_ERR_DAEMON_STALE);
	assert_in_range(test_now_ms() - begin, 0, BED_TIMEOUT_MS - 1);
	KNOB(mute) = 0;
	KNOB(no_heartbeat) = 0;
	BED_UNTIL(&bed, bed_put(&bed, 4, 6) == KVC_OK);
}

BED_CASE(p7_leases_and_puts_end_with_the_daemon_and_it_is_rejoined)
{
	kvc_lease_t *lease, *pending;
	const void *data;
	kvc_put_t *put;

	assert_int_equal(kvc_incarnation(bed.kvc), 41);
	bed_store(0, 4);
	lease = bed_acquire(4, 0);
	assert_int_equal(kvc_lease_block(lease, 0, &data, NULL), KVC_OK);
	put = bed_reserve(bed.space, 4, 6, NULL);
	KNOB(mute) = KV_CODE_ACQUIRE;
	assert_int_equal(kvc_acquire_start(bed.space, bed.keys, 4, 0, 0, &pending), KVC_OK);

	fake_stop(bed.fake); /* kill -9 */
	bed.fake = NULL;
	assert_int_not_equal(kvc_poll(bed.kvc, 100), KVC_OK);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	assert_int_equal(kvc_lease_state(pending), KVC_ERR_CLOSED);
	assert_int_equal(bed_try_read(lease), KVC_ERR_REVOKED);
	assert_memory_equal(data, bed.src[0], bed.info.block_bytes); /* a copy under way may go on reading */
	assert_int_equal(bed_result(put).status, KVC_ERR_CLOSED);    /* not REVOKED, which a member says */
	assert_int_equal(kvc_put_write(put, 0, bed.src[4]), KVC_ERR_REVOKED);
	assert_int_equal(bed_match(4).n, 0);
	assert_int_equal(bed_match(4).why, KV_WHY_NO_DAEMON);
	assert_int_equal(bed_put(&bed, 4, 6), KVC_ERR_UNREACHABLE);

	bed.fake = fake_start(bed.path, &fake_split, 42);
	BED_UNTIL(&bed, kvc_poll(bed.kvc, 5) == KVC_OK);
	assert_int_equal(kvc_incarnation(bed.kvc), 42);
	/* Handles of before are alive, so a copy of ours may be, too: nothing is said of the old memory yet. */
	assert_int_equal(SEEN(old_incarnation), 0);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	bed_store(0, 4);
	kvc_release((kvc_lease_t *const[]){lease, pending}, 2);
	kvc_put_free(put);
	BED_UNTIL(&bed, ASKED(DRAINED) == 1);
	assert_int_equal(SEEN(drained_what), 2);
	assert_int_equal(SEEN(released_ids), 0);

	bed_rejoin(); /* the same daemon: it is told that our copies have ended */
	assert_int_equal(SEEN(old_incarnation), 42);
	assert_int_equal(bed_match(4).n, 4);
	assert_int_equal(bed_stats().reattaches, 2);
	assert_int_equal(bed_stats().leases_open + bed_stats().puts_open, 0);
}

/* Its put ends under the next session, while a copy may still be under way: the slots are not given up before the
 * handle is. */
BED_CASE(p1_a_put_of_an_older_session_is_drained_when_it_is_freed)
{
	kvc_put_t *put = bed_reserve(bed.space, 0, 4, NULL);

	bed_rejoin();
	fake_finish_puts(bed.fake, KV_ERR_REVOKED);
	for (uint32_t i = 0; i < 20; i++) {
		(void)kvc_poll(bed.kvc, 5);
	}
	assert_int_equal(ASKED(DRAINED), 0);
	kvc_put_free(put);
	BED_UNTIL(&bed, ASKED(DRAINED) == 2); /* of the put, and of all of the old session's */
}

/* Else blocks would be written, and digested, in a size or an order that nobody reads them in. */
KV_TEST(p1_a_space_that_changed_its_shape_is_not_used_again)
{
	for (uint32_t geometry = 2; geometry <= 3; geometry++) {
		(void)bed_setup(NULL);
		KNOB(space_geometry) = geometry;
		bed_rejoin();
		assert_int_equal(bed_try_acquire(), (kvc_status_t)KV_ERR_LAYOUT);
		bed_free(&bed);
	}
}

/* A daemon that has just come up is busy, or slow. */
KV_TEST(p7_a_space_that_could_not_be_reopened_is_opened_later)
{
	for (int mute = 0; mute < 2; mute++) {
		_Atomic uint32_t *knob;

		bed_make(&bed, &fake_split, (kvc_config_t){.timeout_ms = mute ? 1500 : 0});
		bed_store(0, 4);
		knob = mute ? &KNOB(mute) : &KNOB(fail_code);
		KNOB(fail_status) = KV_ERR_BUSY;
		*knob = KV_CODE_SPACE_OPEN;
		bed_rejoin();
		assert_int_not_equal(kvc_space_state(bed.space), KVC_OK);
		*knob = 0;
		BED_UNTIL(&bed, bed_match(4).n == 4);
		assert_int_equal(kvc_space_state(bed.space), KVC_OK);
		bed_free(&bed);
	}
}

static uint64_t epoch(void)
{
	kvc_space_info_t info = {.struct_size = sizeof info};

	kvc_space_get_info(bed.space, &info);

	return info.epoch;
}

BED_CASE(p1_a_reset_by_another_member_is_noticed)
{
	bed_store(0, 4);
	fake_reset_space(bed.fake);
	assert_int_equal(bed_match(4).why, KV_WHY_STALE_EPOCH);
	BED_UNTIL(&bed, epoch() == 2);

	fake_reset_space(bed.fake);
	assert_int_equal(bed_try_acquire(), KVC_ERR_STALE_EPOCH);
	BED_UNTIL(&bed, epoch() == 3);
	assert_int_equal(kvc_space_reset(bed.space), KVC_OK);
	assert_int_equal(epoch(), 4);
}

/* What a child of the process is told by everything. */
static int is_told_so(kvc_lease_t *lease)
{
	kvc_handle_t handle;
	kvc_put_t *put;

	return bed_match(4).n == 0 && bed_match(4).why == KV_WHY_NO_DAEMON && kvc_poll(bed.kvc, 0) == KVC_ERR_CLOSED &&
	       bed_try_read(lease) == KVC_ERR_CLOSED && kvc_lease_wait(lease, 1, 10) == KVC_ERR_CLOSED &&
	       kvc_lease_state(lease) == KVC_ERR_CLOSED && kvc_lease_ready(lease) == 0 &&
	       kvc_lease_export(lease, &handle) == KVC_ERR_CLOSED &&
	       kvc_put_start(bed.space, bed.keys, 4, 5, NULL, &put) == KVC_ERR_CLOSED &&
	       strstr(kvc_last_error(), "forked") != NULL;
}

BED_CASE(p6_a_forked_child_is_told_so)
{
	kvc_lease_t *leases[2] = {NULL, NULL};
	bed_t other;
	kvc_handle_t handle;
	int status = -1;
	pid_t pid;

	bed_make(&other, &fake_split, (kvc_config_t){0});
	bed_store(0, 4);
	assert_int_equal(bed_put(&other, 0, 4), KVC_OK);
	leases[0] = bed_acquire(4, 0);
	assert_int_equal(kvc_acquire(other.space, other.keys, 4, 0, 0, &leases[1]), KVC_OK);
	pid = fork();
	if (pid == 0) {
		const int good = is_told_so(leases[0]);

		kvc_release(leases, 2);
		kvc_detach(bed.kvc);
		kvc_detach(other.kvc);
		_exit(!good);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(kvc_lease_export(leases[0], &handle), KVC_OK);
	for (int i = 0; i < 20; i++) { /* nothing of the child's reaches a daemon */
		assert_int_equal(kvc_poll(bed.kvc, 1), KVC_OK);
	}
	assert_int_equal(ASKED(RELEASE), 0);
	assert_int_equal(atomic_load(&fake_seen(other.fake)->asked[KV_CODE_RELEASE]), 0);
	bed_read(leases[0], 0, 4);
	kvc_release(leases, 2);
	bed_free(&other);
}

BED_CASE(p7_a_space_can_be_opened_without_waiting)
{
	kvc_identity_t identity = bed_identity();
	kvc_space_t *space = NULL;
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};

	bed_store(0, 4);
	identity.model = NULL;
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &space), (kvc_status_t)KV_ERR_IDENTITY);
	assert_null(space);

	KNOB(mute) = KV_CODE_SPACE_OPEN;
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

	KNOB(mute) = 0;
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &space), KVC_OK);
	BED_UNTIL(&bed, kvc_space_state(space) == KVC_OK);
	kvc_match(space, bed.keys, 4, &match);
	assert_int_equal(match.n, 4);
	fake_drop_sessions(bed.fake);
	BED_UNTIL(&bed, kvc_space_state(space) == KVC_ERR_CLOSED);
	BED_UNTIL(&bed, kvc_space_state(space) == KVC_OK);
}

/* All that was sent before has been seen when this open is answered. */
static uint32_t count_closes(kvc_space_t **p_space)
{
	const kvc_identity_t identity = bed_identity();

	assert_int_equal(kvc_space_open(bed.kvc, &identity, p_space), KVC_OK);

	return ASKED(SPACE_CLOSE);
}

BED_CASE(p5_the_daemon_is_told_when_no_handle_has_a_space)
{
	const kvc_identity_t identity = bed_identity();
	kvc_space_t *again, *late;

	assert_int_equal(count_closes(&again), 0);
	kvc_space_close(again); /* bed.space has it */
	assert_int_equal(count_closes(&again), 0);
	kvc_space_close(again);
	kvc_space_close(bed.space);
	assert_int_equal(count_closes(&again), 1);
	kvc_space_close(again);
	assert_int_equal(kvc_space_open_start(bed.kvc, &identity, &late), KVC_OK);
	kvc_space_close(late); /* its answer comes later, and opens the space for nobody */
	BED_UNTIL(&bed, ASKED(SPACE_CLOSE) == 3);
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
	char *json = NULL;
	uint32_t failed = 0, why = 0;
	uint8_t tiers[8];

	bed_listen(&bed, &fake_split);
	bed_attach(&bed, (kvc_config_t){.observe = 1});
	assert_int_equal(ASKED(JOIN), 0);
	assert_int_equal(kvc_document(bed.kvc, KVC_DOC_CHECK, 0, &json, &failed), KVC_OK);
	assert_non_null(strstr(json, "\"checks\":["));
	assert_int_equal(failed, 1);
	kvc_free(json);
	assert_int_equal(kvc_document(bed.kvc, 3, 0, &json, NULL), KVC_ERR_ARG);
	bed_open(&bed);
	assert_int_equal(kvc_explain(bed.space, bed.keys, 8, tiers, &why), KVC_OK);
	assert_int_equal(tiers[0], 0);
	assert_int_equal(why, KV_WHY_ABSENT);
	assert_int_equal(bed_match(4).n, 0);
	assert_int_equal(bed_try_acquire(), (kvc_status_t)KV_ERR_NOT_JOINED);
}

KV_TEST_MAIN_EACH(NULL, bed_teardown)
