/* Hand-overs on a full disk and in a full pool: they go on, or both sides know why not. */
#include "e2e/rig/pair.h"

#define LEN  40u
#define LATE 8000u /* ms: how long it takes where there is room does not come near */

static pair_t pair_;

static void begin(pair_t *pair, const rig_t *rig)
{
	*pair = (pair_t){.owner = rig,
			 .asker = rig,
			 .deadline_ms = LATE,
			 .call_ms = RIG_WAIT_MS,
			 .notes = pair_notes_new(),
			 .talk = pair->talk};
}

/* A whole hand-over, both sides at once. */
static void hand_over(pair_t *pair)
{
	pair_next(pair);
	pair_start(pair, PAIR_CONSUMER);
	pair_start(pair, PAIR_PRODUCER);
	pair_await_end(pair, PAIR_PRODUCER);
	pair_await_end(pair, PAIR_CONSUMER);
	assert_int_equal(atomic_load(&pair->notes->status[PAIR_PRODUCER]), KVC_OK);
	assert_int_equal(atomic_load(&pair->notes->status[PAIR_CONSUMER]), KVC_OK);
	assert_true(atomic_load(&pair->notes->whole));
	pair_check_bytes(pair);
	pair_finish(pair);
}

/* ---- a full disk ----------------------------------------------------------------------------- */

/* More than the pool has, so that everything is written behind, and evicted. */
static void flood(user_t *user, uint64_t seed)
{
	kvc_key_t keys[LEN];

	for (uint64_t t = 0; t < 16; t++) {
		user_keys(user, seed * 100 + t, LEN, keys);
		assert_int_equal(user_put(user, keys, 0, LEN, 0, NULL), KVC_OK);
	}
}

KV_TEST(p5_p7_hand_overs_go_on_on_a_full_disk, NULL, rig_tear_down)
{
	uint64_t errors;
	other_t other;
	user_t user;

	rig_init_mount(&rig_, "24m");
	rig_start(&rig_);
	begin(&pair_, &rig_);
	user_attach(&user, &rig_, "flood");
	flood(&user, 1);
	hand_over(&pair_);
	rig_disk_fill(&rig_);
	other_start(&other, rig_.sock);
	errors = rig_metric(&rig_, "kvd_disk_errors_total");
	for (uint32_t round = 0; round < 8; round++) {
		flood(&user, 2 + round);
		hand_over(&pair_);
	}
	assert_true(rig_metric(&rig_, "kvd_disk_errors_total") > errors);
	rig_disk_free(&rig_);
	flood(&user, 20);
	hand_over(&pair_);
	other_end(&other, 0);
	user_leave(&user);
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	rig_check_quiet(&rig_);
	rig_unmount(&rig_);
	rig_fini(&rig_);
}

/* ---- a full pool ----------------------------------------------------------------------------- */

#define ENGINES 4u
#define LEASES  16u

typedef struct crowd {
	user_t users[ENGINES];
	kvc_lease_t *leases[ENGINES * LEASES];
	uint32_t count;
} crowd_t;

/* Engines that lease what they put, until nothing more can be put. */
static void fill_pool(crowd_t *crowd)
{
	kvc_key_t keys[LEN];

	for (uint32_t e = 0; e < ENGINES; e++) {
		user_t *user = &crowd->users[e];

		user_attach(user, &rig_, "crowd");
		for (uint32_t i = 0; i < LEASES; i++) {
			kvc_lease_t **p_lease = &crowd->leases[crowd->count];

			user_keys(user, 1000 + e * LEASES + i, LEN, keys);
			if (user_put(user, keys, 0, LEN, 0, NULL) != KVC_OK ||
			    kvc_acquire(user->space, keys, LEN, 0, 0, p_lease) != KVC_OK) {
				break;
			}
			crowd->count++;
		}
	}
	assert_in_range(crowd->count, 2, ENGINES * LEASES - 1);
}

static void empty_pool(crowd_t *crowd)
{
	kvc_release(crowd->leases, crowd->count);
	for (uint32_t e = 0; e < ENGINES; e++) {
		user_leave(&crowd->users[e]);
	}
}

/* One was complete before, one is half way, one begins. */
KV_TEST(p5_p7_hand_overs_in_a_full_pool_stay_or_end_with_a_reason, NULL, rig_tear_down)
{
	pair_t complete = {.talk = 100}, half = {.talk = 200};
	static crowd_t crowd;
	int whole = 0;

	rig_init(&rig_, 0);
	rig_option(&rig_, "--handover.max_bytes=2MiB");
	rig_start(&rig_);
	begin(&complete, &rig_);
	begin(&half, &rig_);
	begin(&pair_, &rig_);
	pair_next(&complete);
	pair_start(&complete, PAIR_PRODUCER);
	pair_await_end(&complete, PAIR_PRODUCER);
	assert_int_equal(atomic_load(&complete.notes->status[PAIR_PRODUCER]), KVC_OK);
	half.hold[PAIR_PRODUCER] = 6; /* before its second put */
	pair_next(&half);
	pair_start(&half, PAIR_PRODUCER);
	pair_start(&half, PAIR_CONSUMER);
	pair_await_mark(&half, PAIR_PRODUCER, 6);
	fill_pool(&crowd);

	assert_int_equal(pair_consume_again(&complete, LATE, &whole), KVC_OK);
	assert_true(whole);
	pair_finish(&complete);
	atomic_store(&half.notes->go, 1);
	pair_await_end(&half, PAIR_PRODUCER);
	pair_await_end(&half, PAIR_CONSUMER);
	if (atomic_load(&half.notes->status[PAIR_PRODUCER]) != KVC_OK) {
		assert_int_equal(atomic_load(&half.notes->status[PAIR_PRODUCER]), KVC_ERR_BUSY);
		assert_int_equal(atomic_load(&half.notes->status[PAIR_CONSUMER]), KVC_ERR_ABORTED); /* at once */
		assert_in_range(atomic_load(&half.notes->answered_ms), 0, LATE - 1);
	}
	pair_check_bytes(&half);
	assert_int_equal(atomic_load(&half.notes->read) % 16, 0);
	pair_finish(&half);
	empty_pool(&crowd);
	hand_over(&pair_); /* as if nothing had been */
	assert_true(rig_metric_is(&rig_, "kvd_handovers", 0));
	rig_end(&rig_);
}
