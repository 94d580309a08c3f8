/* The disk of one of two daemons is filled by others in the middle of hand-overs between them: they come whole, or end
 * with a reason, and the disk is used again when there is room. */
#include "e2e/rig/pair.h"
#include "e2e/rig/peers.h"

#include <signal.h>
#include <unistd.h>

#define LEN    40u
#define PAIRS  3u
#define ROUNDS 6u
#define MIDDLE 6u     /* step of a producer: its first chunk was handed over */
#define LATE   15000u /* ms: the deadline of a hand-over */

static peers_t net_;
static pair_t pairs_[PAIRS];
static user_t users_[2];
static uint64_t talks_;

KV_FIXTURE(setup)
{
	if (geteuid() != 0) {
		kv_test_skip("mounting a tmpfs needs root");
	}
	peers_init(&net_);
	for (uint32_t i = 0; i < 2; i++) {
		rig_mount(&net_.rig[i], "24m");
		rig_option(&net_.rig[i], "--cpu.size=16MiB");
		rig_option(&net_.rig[i], "--handover.max_bytes=8MiB");
	}
	peers_start(&net_);
	for (uint32_t i = 0; i < 2; i++) {
		user_attach(&users_[i], &net_.rig[i], "local");
	}
	peers_connected(&net_);
	for (uint32_t p = 0; p < PAIRS; p++) {
		pairs_[p] = (pair_t){.owner = &net_.rig[0],
				     .asker = &net_.rig[1],
				     .peer = "node0",
				     .talk = 1000 * p,
				     .deadline_ms = LATE,
				     .call_ms = RIG_WAIT_MS,
				     .notes = pair_notes_new()};
	}
}

KV_FIXTURE(clean_up)
{
	rig_clean_up(&net_.rig[0]);
	rig_clean_up(&net_.rig[1]);
}

/* Engines of each node put more than its pool has, and have at once what they have put: by memory alone. */
static void flood(void)
{
	kvc_key_t keys[LEN];

	for (uint32_t t = 0; t < 60; t++) {
		user_t *user = &users_[t % 2];

		user_keys(user, ++talks_, LEN, keys);
		assert_int_equal(user_put(user, keys, 0, LEN, 0, NULL), KVC_OK);
		assert_true(user_match_is(user, keys, LEN, LEN));
		user_expect(user, keys, LEN);
	}
}

static void begin_hand_overs(uint32_t hold)
{
	for (uint32_t p = 0; p < PAIRS; p++) {
		pairs_[p].hold[PAIR_PRODUCER] = hold;
		pair_next(&pairs_[p]);
		pair_start(&pairs_[p], PAIR_CONSUMER);
		pair_start(&pairs_[p], PAIR_PRODUCER);
	}
}

static void check_refused(const pair_notes_t *notes)
{
	const kvc_status_t status = atomic_load(&notes->status[PAIR_CONSUMER]);
	const uint64_t ms = atomic_load(&notes->answered_ms);

	if (status >= 0 || status == KVC_ERR_TIMEOUT || ms >= LATE) {
		fail_msg("a consumer ended with %s %" PRIu64
			 " ms after its question, its producer with %s; their longest calls "
			 "took %" PRIu64 " and %" PRIu64 " ms",
			 kvc_status_name(status), ms, kvc_status_name(atomic_load(&notes->status[PAIR_PRODUCER])),
			 atomic_load(&notes->longest[PAIR_CONSUMER]), atomic_load(&notes->longest[PAIR_PRODUCER]));
	}
}

/* How many have come whole. The others know why not, and in time. */
static uint32_t end_hand_overs(void)
{
	uint32_t whole = 0;

	for (uint32_t p = 0; p < PAIRS; p++) {
		pair_notes_t *notes = pairs_[p].notes;

		atomic_store(&notes->go, 1);
		pair_await_end(&pairs_[p], PAIR_PRODUCER);
		pair_await_end(&pairs_[p], PAIR_CONSUMER);
		if (atomic_load(&notes->whole)) {
			whole++;
		} else {
			check_refused(notes);
		}
		pair_check_bytes(&pairs_[p]);
		pair_finish(&pairs_[p]);
	}

	return whole;
}

/* What it writes is on disk again. */
static void await_disk(uint32_t i)
{
	kvc_key_t keys[4];

	user_keys(&users_[i], ++talks_, 4, keys);
	KV_AWAIT(user_put(&users_[i], keys, 0, 4, 1, NULL) == KVC_OK);
	assert_true(rig_metric_is(&net_.rig[i], "kvd_disk_off", 0));
}

static void check_quiet(void)
{
	for (uint32_t i = 0; i < 2; i++) {
		assert_true(rig_metric_is(&net_.rig[i], "kvd_handovers", 0));
		rig_check_quiet(&net_.rig[i]);
	}
}

/* The node has it after a restart: by its disk alone. */
static void check_kept(uint32_t i)
{
	rig_t *rig = &net_.rig[i];

	rig_written(rig);
	user_leave(&users_[i]);
	rig_stop(rig);
	rig_start(rig);
	for (uint32_t p = 0; p < PAIRS; p++) {
		assert_true(pair_is_kept(&pairs_[p], rig));
	}
	user_attach(&users_[i], rig, "local");
}

static void fill_amid_hand_overs(uint32_t full)
{
	rig_t *rig = &net_.rig[full];
	uint32_t whole = 0;

	flood();
	begin_hand_overs(0);
	assert_int_equal(end_hand_overs(), PAIRS);
	begin_hand_overs(MIDDLE);
	for (uint32_t p = 0; p < PAIRS; p++) {
		pair_await_mark(&pairs_[p], PAIR_PRODUCER, MIDDLE);
	}
	rig_disk_fill(rig);
	flood();
	whole += end_hand_overs();
	for (uint32_t round = 1; round < ROUNDS; round++) {
		begin_hand_overs(0);
		flood();
		whole += end_hand_overs();
	}
	printf("# %u of %u hand-overs came whole beside a full disk\n", whole, ROUNDS * PAIRS);
	assert_true(whole > 0);
	/* It may have met the end of its file system before: then it has not grown since, and meets it no more. */
	assert_true(rig_metric_reaches(rig, "kvd_disk_errors_total", 1));
	check_quiet();

	rig_disk_free(rig);
	await_disk(full);
	begin_hand_overs(0);
	assert_int_equal(end_hand_overs(), PAIRS);
	check_quiet();
	check_kept(full);
	check_quiet();
	for (uint32_t i = 0; i < 2; i++) {
		user_leave(&users_[i]);
		rig_unmount(&net_.rig[i]);
	}
	peers_fini(&net_);
}

KV_TEST(p5_p7_hand_overs_bear_a_full_disk_where_they_go, setup, clean_up)
{
	fill_amid_hand_overs(1);
}

KV_TEST(p5_p7_hand_overs_bear_a_full_disk_where_they_come_from, setup, clean_up)
{
	fill_amid_hand_overs(0);
}
