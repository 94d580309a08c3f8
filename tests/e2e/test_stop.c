/* The daemon stops, or dies, under its clients: a miss at once, an error at the deadline, and everything again
 * afterwards. */
#include "e2e/rig/rig.h"

#include <signal.h>

#define LEN        8u
#define TIMEOUT_MS 2000u
#define SLACK_MS   20000u /* for a loaded machine; a hang is longer */
#define SILENCE    "--limits.silence=50ms"

typedef struct bed {
	rig_t rig;
	other_t other;
	user_t user;
	kvc_key_t keys[LEN], fresh[LEN];
} bed_t;

static void bed_make(bed_t *bed, int keeper)
{
	const kvc_identity_t identity = user_identity("stop");

	*bed = (bed_t){0};
	rig_init(&bed->rig, 1);
	rig_option(&bed->rig, SILENCE);
	if (keeper) {
		rig_option(&bed->rig, "--keeper=on");
	}
	rig_start(&bed->rig);
	other_start(&bed->other, bed->rig.sock);

	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = bed->rig.sock,
				     .program = "e2e",
				     .staging_blocks = RIG_BLOCKS,
				     .timeout_ms = TIMEOUT_MS};
	assert_int_equal(kvc_attach(&config, &bed->user.kvc), KVC_OK);
	assert_int_equal(kvc_space_open(bed->user.kvc, &identity, &bed->user.space), KVC_OK);
	user_keys(&bed->user, 1, LEN, bed->keys);
	user_keys(&bed->user, 2, LEN, bed->fresh);
	assert_int_equal(user_put(&bed->user, bed->keys, 0, LEN, 1, NULL), KVC_OK);
	assert_true(user_match_is(&bed->user, bed->keys, LEN, LEN));
}

static void bed_free(bed_t *bed)
{
	other_recovers(&bed->other);
	other_end(&bed->other, 1);
	user_leave(&bed->user);
	rig_end(&bed->rig);
}

static kvc_lease_t *lease_all(bed_t *bed)
{
	kvc_lease_t *lease = NULL;

	for (int i = 0; i < 50 && kvc_acquire(bed->user.space, bed->keys, LEN, 0, 0, &lease) != KVC_OK; i++) {
		(void)kvc_poll(bed->user.kvc, 100);
	}
	assert_non_null(lease);

	return lease;
}

static kvc_put_t *half_a_put(bed_t *bed)
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_put_t *put = NULL;

	assert_int_equal(kvc_put_start(bed->user.space, bed->fresh, 0, LEN, &options, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 10000), KVC_OK);

	return put;
}

static void ends_in_time(uint64_t since)
{
	const uint64_t took = rig_now_ms() - since;

	if (took > TIMEOUT_MS + SLACK_MS) {
		fail_msg("it took %lu ms", (unsigned long)took);
	}
}

KV_TEST(p7_a_stopped_daemon_is_a_miss_and_calls_meet_their_deadline)
{
	kvc_lease_t *lease = NULL, *late = NULL;
	kvc_space_t *space = NULL;
	kvc_put_t *put;
	kvc_match_t match = {.struct_size = sizeof match};
	uint8_t block[RIG_BLOCK_BYTES];
	char *json = NULL;
	uint64_t since;
	bed_t bed;

	bed_make(&bed, 0);
	lease = lease_all(&bed);
	put = half_a_put(&bed);
	kill(bed.rig.pid, SIGSTOP);
	since = rig_now_ms();
	do {
		kvc_match(bed.user.space, bed.keys, LEN, &match);
		assert_true(match.n == 0 || rig_now_ms() - since < 60 + SLACK_MS);
	} while (match.n > 0);
	assert_int_equal(match.why, KV_WHY_DAEMON_STALE);
	printf("# a miss after %lu ms\n", (unsigned long)(rig_now_ms() - since));

	since = rig_now_ms();
	assert_true(kvc_acquire(bed.user.space, bed.keys, LEN, 0, 0, &late) < 0);
	ends_in_time(since);
	since = rig_now_ms();
	assert_true(user_put(&bed.user, bed.fresh, 0, LEN, 0, NULL) < 0);
	ends_in_time(since);
	since = rig_now_ms();
	assert_true(kvc_document(bed.user.kvc, KVC_DOC_STATUS, 0, &json, NULL) < 0);
	ends_in_time(since);
	const kvc_identity_t identity = user_identity("new");
	since = rig_now_ms();
	assert_true(kvc_space_open(bed.user.kvc, &identity, &space) < 0);
	ends_in_time(since);

	kill(bed.rig.pid, SIGCONT);
	assert_true(user_match_is(&bed.user, bed.keys, LEN, LEN));
	/* What was held before is held still, unless the client has given the session up; then it says so. */
	void *const dst[1] = {block};
	const kvc_status_t held = kvc_lease_read(lease, 0, 1, dst, NULL);
	assert_true(held == KVC_OK || held == KVC_ERR_REVOKED || held == KVC_ERR_CLOSED);
	kvc_release(&lease, 1);
	kvc_put_free(put);
	lease = lease_all(&bed);
	kvc_release(&lease, 1);
	bed_free(&bed);
}

KV_TEST(p7_a_killed_daemon_is_a_miss_and_revokes_leases_and_puts)
{
	kvc_lease_t *lease;
	kvc_put_t *put;
	kvc_match_t match = {.struct_size = sizeof match};
	kvc_stats_t stats = {.struct_size = sizeof stats};
	uint8_t block[RIG_BLOCK_BYTES];
	void *const dst[1] = {block};
	uint64_t since, before;
	bed_t bed;

	bed_make(&bed, 1);
	for (int round = 0; round < 3; round++) {
		lease = lease_all(&bed);
		put = half_a_put(&bed);
		before = kvc_incarnation(bed.user.kvc);
		kill(rig_daemon(&bed.rig), SIGKILL);
		since = rig_now_ms();
		do {
			kvc_match(bed.user.space, bed.keys, LEN, &match);
			assert_true(match.n == 0 || rig_now_ms() - since < 60 + SLACK_MS);
		} while (match.n > 0);
		assert_true(match.why == KV_WHY_DAEMON_STALE || match.why == KV_WHY_NO_DAEMON);
		printf("# a miss after %lu ms\n", (unsigned long)(rig_now_ms() - since));
		while (kvc_incarnation(bed.user.kvc) == before) {
			(void)kvc_poll(bed.user.kvc, 5);
			assert_true(rig_now_ms() - since < RIG_WAIT_MS);
		}
		assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
		assert_int_equal(kvc_lease_read(lease, 0, 1, dst, NULL), KVC_ERR_REVOKED);
		assert_int_equal(kvc_put_write(put, 0, block), KVC_ERR_REVOKED);
		kvc_release(&lease, 1);
		kvc_put_free(put);
		rig_serving(&bed.rig);
		assert_true(user_match_is(&bed.user, bed.keys, LEN, LEN)); /* attached again, from disk */
	}
	kvc_get_stats(bed.user.kvc, &stats);
	assert_true(stats.reattaches >= 3);
	assert_true(rig_metric_is(&bed.rig, "kvd_restarts_total", 3));
	bed_free(&bed);
}

RIG_TEST(p7_stops_of_any_length_cost_misses_and_time_only, rig_init(&rig_, 1))
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	other_t other;

	rig_option(&rig_, SILENCE);
	rig_start(&rig_);
	other_start(&other, rig_.sock);
	for (int i = 0; i < 30; i++) {
		kill(rig_.pid, SIGSTOP);
		usleep((useconds_t)kv_test_below(&rng, 120000));
		kill(rig_.pid, SIGCONT);
		other_goes_on(&other, 2);
	}
	other_end(&other, 0); /* no error, no wrong byte */
}

/* ---- what is left after it --------------------------------------------------------------------- */

#define TALKS  12u
#define BLOCKS 64u /* of a talk */

static uint32_t match_talk(const user_t *user, uint64_t talk)
{
	kvc_key_t keys[BLOCKS];

	user_keys(user, talk, BLOCKS, keys);

	return user_match(user, keys, BLOCKS);
}

static void put_talks(user_t *user, uint64_t first, uint64_t count)
{
	kvc_key_t keys[BLOCKS];

	for (uint64_t talk = first; talk < first + count; talk++) {
		user_keys(user, talk, BLOCKS, keys);
		assert_int_equal(user_put(user, keys, 0, BLOCKS, 1, NULL), KVC_OK);
	}
}

/* A disk tier with room for 16 talks: the older half of 12 is used, and then six come that were not there. */
RIG_TEST(p2_prefixes_used_before_a_restart_outlive_the_others, rig_init(&rig_, 1))
{
	kvc_key_t keys[BLOCKS];
	uint32_t unused = 0, n;

	rig_option(&rig_, "--nvme.size=24MiB");
	rig_start(&rig_);
	user_attach(&user_, &rig_, "recency");
	put_talks(&user_, 0, TALKS);
	for (uint64_t talk = 0; talk < TALKS / 2; talk++) {
		user_keys(&user_, talk, BLOCKS, keys);
		user_expect(&user_, keys, BLOCKS);
	}
	user_leave(&user_);
	rig_written(&rig_);
	rig_stop(&rig_);

	rig_start(&rig_);
	user_attach(&user_, &rig_, "recency");
	for (uint64_t talk = 0; talk < TALKS; talk++) {
		assert_int_equal(match_talk(&user_, talk), BLOCKS);
	}
	put_talks(&user_, 100, TALKS / 2);
	assert_true(rig_metric(&rig_, "kvd_evicted_total{tier=disk}") > BLOCKS);
	for (uint64_t talk = 0; talk < TALKS; talk++) {
		n = match_talk(&user_, talk);
		assert_true(talk >= TALKS / 2 || n == BLOCKS);
		unused += talk >= TALKS / 2 ? n : 0;
	}
	assert_true(unused < (TALKS / 2 - 1) * BLOCKS);
}
