/* Groups of rule `window` and `state`: blocks without parents, each of them by itself. Group 1 is a window, 2 a state, 0 and 5 are full. */
#include "stage.h"

#include <stdio.h>

static u_put_t put_, other_;
static u_lease_t lease_, lease2_;
static kv_msg_put_start_reply_t started_;
static kv_msg_acquire_reply_t reply_;

static void stage_window(uint32_t cpu, uint32_t disk)
{
	stage(cpu, disk);
	u_.group = 1;
}

static uint32_t put(uint32_t first, uint32_t n)
{
	return u_put(&u_, m_, &space_, keys_, first, n);
}

static uint8_t tiers_of(const kv_key_t *key)
{
	uint8_t tiers;

	u_explain(&u_, 0, &space_, key, 1, &tiers);

	return tiers;
}

static void evict_all(kv_tier_t tier)
{
	while (kvd_core_evict_one(u_.core, tier) == KV_OK) {
	}
}

/* Blocks [0, n) in the window group, on disk only. */
static void stage_disk(uint32_t cpu, uint32_t n)
{
	stage_window(cpu, 256);
	for (uint32_t at = 0; at < n; at += 4) {
		assert_int_equal(put(at, at + 4), 4);
		u_settle(&u_);
	}
	evict_all(KV_TIER_CPU);
	assert_int_equal(stage_free_slots(), cpu);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, n), n);
}

static void wait_done(uint64_t lease)
{
	for (uint32_t i = 0; i < 200 && u_count_notices(&u_, KV_CODE_LEASE_DONE, lease) == 0; i++) {
		u_tick(&u_, 1);
	}
	assert_int_equal(u_count_notices(&u_, KV_CODE_LEASE_DONE, lease), 1);
}

/* ---- puts ------------------------------------------------------------------------------------------------------------------------- */

static void p3_a_block_without_parent_is_visible_by_itself(void **state)
{
	(void)state;
	stage_window(64, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 10, 14, 0, &put_, &started_), KV_OK);
	assert_int_equal(started_.n, 4);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 2, 1), KV_OK);
	assert_int_equal(tiers_of(&keys_[12]), KV_TIER_CPU);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[12]), KV_TIER_CPU);
	assert_int_equal(tiers_of(&keys_[10]), 0x80);
	assert_int_equal(u_header(m_, put_.offset)->ready, 0);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 2), KV_OK);
	assert_int_equal(u_header(m_, put_.offset)->ready, 3);
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, put_.id), 0);
	assert_int_equal(u_put_end(&u_, m_, &put_, 3, 1), KV_OK);
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, put_.id), 1);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.n, 4);
	assert_int_equal(u_.stored, 4);
	assert_int_equal(u_.last_has_parent, 0);
	stage_end();
}

static void p3_parent_and_depth_of_a_block_without_parent_are_ignored(void **state)
{
	kv_msg_t ask = {0}, reply;

	(void)state;
	stage_window(64, 0);
	ask.put_start = (kv_msg_put_start_t){.space = space_.space,
					     .epoch = space_.epoch,
					     .group = 1,
					     .parent = keys_[400],
					     .depth = 400,
					     .keys = {(const uint8_t *)keys_, KV_KEY_BYTES}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_OK);
	put_ = (u_put_t){.id = reply.put_start_reply.put, .member = m_, .offset = reply.put_start_reply.offset, .n = 1};
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_OK);
	assert_int_equal(tiers_of(&keys_[0]), KV_TIER_CPU);
	ask.put_start.group = 0;
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_ERR_NO_PARENT);
	stage_end();
}

static void p5_already_may_be_anywhere_in_a_put(void **state)
{
	const uint32_t *slots;

	(void)state;
	stage_window(64, 0);
	assert_int_equal(put(2, 4), 2);
	assert_int_equal(put(6, 7), 1);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 0, &put_, &started_), KV_OK);
	assert_int_equal(started_.n, 8);
	assert_int_equal(started_.already, 3);
	slots = kv_lease_slots(u_header(m_, put_.offset));
	for (uint32_t i = 0; i < 8; i++) {
		assert_int_equal(slots[i] == KV_SLOT_NONE, i == 2 || i == 3 || i == 6);
	}
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 8), KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.n, 8);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 0, &put_, &started_), KV_OK);
	assert_int_equal(started_.put, 0);
	assert_int_equal(started_.already, 8);
	assert_int_equal(stage_free_slots(), 56);
	stage_end();
}

static void p10_a_key_twice_in_a_put_is_refused(void **state)
{
	kv_key_t twice[4] = {0};

	(void)state;
	stage_window(64, 0);
	memcpy(twice, keys_, sizeof twice);
	twice[3] = twice[1];
	assert_int_equal(u_put_start(&u_, m_, &space_, twice, 0, 4, 0, &put_, &started_), KV_ERR_ARG);
	assert_int_equal(stage_free_slots(), 64);
	assert_int_equal(put(0, 4), 4);
	assert_int_equal(u_put_start(&u_, m_, &space_, twice, 0, 4, 0, &put_, &started_), KV_ERR_ARG);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &started_), KV_OK);
	memset(&twice[0], 0, sizeof twice[0]);
	assert_int_equal(u_put_start(&u_, m_, &space_, twice, 0, 1, 0, &put_, &started_), KV_ERR_ARG);
	stage_end();
}

static void p5_a_put_that_finds_no_room_takes_what_there_is(void **state)
{
	(void)state;
	stage_window(8, 0);
	assert_int_equal(put(1, 2), 1);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 20, 0, &put_, &started_), KV_OK);
	assert_int_equal(started_.n, 8);
	assert_int_equal(started_.already, 1);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 8), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 8);
	stage_end();
}

static void p3_of_two_copies_of_a_block_without_parent_one_is_kept(void **state)
{
	(void)state;
	stage_window(64, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &started_), KV_OK);
	assert_int_equal(u_put_start(&u_, u_join(&u_, 0, "second", 2, 0), &space_, keys_, 2, 6, 0, &other_, &started_),
			 KV_OK);
	u_put_write(&u_, &put_);
	u_put_write(&u_, &other_);
	assert_int_equal(u_put_end(&u_, other_.member, &other_, 0, 4), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 4), KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.n, 4);
	assert_int_equal(stage_free_slots(), 58);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 6, 0, &lease_, &reply_), KV_OK);
	u_lease_verify(&u_, &lease_);
	stage_end();
}

static void p4_a_revoked_put_keeps_what_is_visible(void **state)
{
	kv_msg_t ask, reply;
	uint32_t freed;

	(void)state;
	stage_window(64, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 6, 0, &put_, &started_), KV_OK);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &put_, 4, 2), KV_OK);
	ask = (kv_msg_t){.put_revoke = {.put = put_.id}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_REVOKE, &ask, &reply), KV_OK);
	assert_int_equal(reply.put_revoke_reply.revoked, 3);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.n, 1);
	assert_int_equal(stage_quarantined(), 3);
	assert_int_equal(tiers_of(&keys_[5]), KV_TIER_CPU);
	assert_int_equal(u_quiet(&u_, m_, 0, put_.id, &freed), KV_OK);
	assert_int_equal(freed, 3);
	assert_int_equal(stage_free_slots(), 61);
	stage_end();
}

static void p1_the_same_key_in_two_groups_is_two_blocks(void **state)
{
	(void)state;
	stage(64, 0);
	assert_int_equal(put(0, 4), 4);
	u_.group = 5;
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 0);
	assert_int_equal(put(0, 8), 8);
	u_.group = 1;
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[3]), 0);
	assert_int_equal(put(3, 4), 1);
	for (uint32_t group = 0; group < 6; group++) {
		u_.group = group == 3 || group == 4 || group == 2 ? 5 : group;
		assert_int_equal(tiers_of(&keys_[3]), KV_TIER_CPU);
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, u_.group == 1 ? 3 : 0, &lease_, &reply_), KV_OK);
		assert_int_equal(reply_.n, 4);
		u_lease_verify(&u_, &lease_);
	}
	stage_end();
}

static void p9_tokens_of_a_group_are_counted_in_its_own_blocks(void **state)
{
	static const uint32_t tokens[64];
	kv_msg_t ask = {0}, reply;

	(void)state;
	stage(64, 0); /* the state group has two units a block */
	ask.put_start = (kv_msg_put_start_t){.space = space_.space,
					     .epoch = space_.epoch,
					     .group = 2,
					     .keys = {(const uint8_t *)keys_, 2 * KV_KEY_BYTES},
					     .tokens = {(const uint8_t *)tokens, 2 * 16 * sizeof *tokens}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_ERR_ARG);
	ask.put_start.tokens.len = 2 * 32 * sizeof *tokens;
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_OK);
	put_ = (u_put_t){.id = reply.put_start_reply.put, .member = m_, .offset = reply.put_start_reply.offset, .n = 2};
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 2), KV_OK);
	assert_int_equal(u_.stored_tokens, 64);
	stage_end();
}

/* ---- leases ----------------------------------------------------------------------------------------------------------------------- */

static void p3_a_window_is_leased_whole_or_not_at_all(void **state)
{
	(void)state;
	stage_window(16, 0);
	assert_int_equal(put(0, 16), 16);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 4, &lease_, &reply_), KV_OK);
	assert_true(reply_.lease != 0 && reply_.n == 8 && reply_.ready == 8 && reply_.why == KV_WHY_NONE);
	assert_int_equal(u_header(m_, lease_.offset)->n, 4);
	assert_int_equal(u_header(m_, lease_.offset)->skip, 4);
	assert_int_equal(u_header(m_, lease_.offset)->group, 1);
	u_lease_verify(&u_, &lease_);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 14, &lease2_, &reply_), KV_OK);
	assert_true(reply_.lease == 0 && reply_.n == 0 && reply_.why == KV_WHY_ABSENT);
	evict_all(KV_TIER_CPU);
	for (uint32_t i = 0; i < 16; i++) {
		assert_int_equal(tiers_of(&keys_[i]) != 0, i >= 4 && i < 8);
	}
	u_lease_verify(&u_, &lease_);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 9, 6, &lease2_, &reply_), KV_OK);
	assert_true(reply_.lease == 0 && reply_.why == KV_WHY_EVICTED);
	assert_int_equal(u_.core->claims.used, 4);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	assert_int_equal(u_.core->claims.used, 0);
	evict_all(KV_TIER_CPU);
	assert_int_equal(stage_free_slots(), 16);
	stage_end();
}

static void p10_a_window_names_each_of_its_blocks(void **state)
{
	kv_msg_t ask = {0}, reply;

	(void)state;
	stage_window(64, 0);
	assert_int_equal(put(0, 16), 16);
	ask.acquire = (kv_msg_acquire_t){.space = space_.space,
					 .epoch = space_.epoch,
					 .group = 1,
					 .skip = 4,
					 .n = 8,
					 .ladder = {(const uint8_t *)keys_, 3 * KV_KEY_BYTES}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_ARG);
	ask.acquire.ladder.len = 5 * KV_KEY_BYTES;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_ARG);
	ask.acquire.skip = 8;
	ask.acquire.ladder.len = 0;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_ARG);
	ask.acquire.skip = 9;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_ARG);
	ask.acquire.group = 3;
	assert_int_equal(u_request(&u_, m_, KV_CODE_ACQUIRE, &ask, &reply), KV_ERR_UNSUPPORTED);
	assert_non_null(u_.detail);
	ask.put_start = (kv_msg_put_start_t){.space = space_.space,
					     .epoch = space_.epoch,
					     .group = 3,
					     .keys = {(const uint8_t *)keys_, KV_KEY_BYTES}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_ERR_UNSUPPORTED);
	stage_end();
}

static void p5_every_block_of_a_window_counts_against_the_cap(void **state)
{
	(void)state;
	stage_window(64, 0);
	assert_int_equal(put(0, 32), 32);
	u_.core->config.max_pinned_bytes = 10 * 4096;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 11, 0, &lease_, &reply_), KV_ERR_BUSY);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 14, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 15, &lease2_, &reply_), KV_ERR_BUSY);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 16, &lease2_, &reply_), KV_OK);
	universe_check(&u_);
	u_.core->config.max_leases = 2;
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 3, 2, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 3, 2, &lease_, &reply_), KV_ERR_LIMIT);
	stage_end();
}

static void p5_a_window_that_was_leased_last_goes_last(void **state)
{
	(void)state;
	stage_window(16, 0);
	assert_int_equal(put(0, 16), 16);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	for (uint32_t i = 0; i < 12; i++) {
		assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK);
	}
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 4);
	assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK);
	assert_int_equal(tiers_of(&keys_[0]), 0); /* the window moves on: its first block is the oldest */
	assert_int_equal(tiers_of(&keys_[3]), KV_TIER_CPU);
	stage_end();
}

static void p1_an_expired_window_is_revoked_and_unpinned(void **state)
{
	kv_msg_t ask, reply;

	(void)state;
	stage_window(16, 0);
	assert_int_equal(put(0, 16), 16);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 12, &lease2_, &reply_), KV_OK);
	kv_test_advance(&u_.env, UINT64_C(8000000000));
	u_tick(&u_, 1);
	ask = (kv_msg_t){.renew = {.lease = lease2_.id}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_RENEW, &ask, &reply), KV_OK);
	kv_test_advance(&u_.env, UINT64_C(2100000000));
	u_tick(&u_, 1);
	assert_false(u_lease_alive(&lease_));
	assert_true(u_lease_alive(&lease2_));
	evict_all(KV_TIER_CPU);
	assert_int_equal(stage_free_slots(), 12);
	stage_end();
}

static void p4_a_member_that_dies_leaves_no_pin_behind(void **state)
{
	u_member_t *dying;

	(void)state;
	stage_window(64, 64);
	assert_int_equal(put(0, 16), 16);
	dying = u_join(&u_, 0, "dying", 2, 0);
	assert_int_equal(u_acquire(&u_, dying, &space_, keys_, 16, 8, &lease_, &reply_), KV_OK);
	assert_int_equal(u_put_start(&u_, dying, &space_, keys_, 10, 30, 1, &put_, &started_), KV_OK);
	assert_int_equal(u_put_end(&u_, dying, &put_, 6, 4), KV_OK);
	u_dead(&u_, dying);
	universe_check(&u_);
	assert_int_equal(u_.core->claims.used, 0);
	assert_int_equal(stage_quarantined(), 0);
	stage_end();
}

/* ---- disk -------------------------------------------------------------------------------------------------------------------------- */

static void p1_blocks_of_a_window_come_from_disk(void **state)
{
	(void)state;
	stage_disk(32, 20);
	u_.disk.shuffle = 1;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 12, 10, &lease_, &reply_), KV_OK);
	wait_done(lease_.id);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 8, &lease2_, &reply_), KV_OK);
	assert_true(reply_.n == 16 && reply_.n_disk == 6 && reply_.ready == 8);
	wait_done(lease2_.id);
	assert_int_equal(u_header(m_, lease2_.offset)->ready, 16);
	u_lease_verify(&u_, &lease2_);
	for (uint32_t i = 8; i < 16; i++) {
		assert_int_equal(tiers_of(&keys_[i]), KV_TIER_CPU | KV_TIER_DISK);
	}
	u_settle(&u_);
	assert_int_equal(u_.core->holds, 10); /* until they are released */
	assert_int_equal(u_release(&u_, m_, lease2_.id), KV_OK);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	assert_int_equal(u_.core->holds, 0);
	stage_end();
}

static void p5_without_room_for_all_of_a_window_nothing_is_read(void **state)
{
	(void)state;
	stage_disk(4, 20);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 8, &lease_, &reply_), KV_ERR_BUSY);
	u_settle(&u_);
	assert_int_equal(u_.core->claims.used + u_.core->holds, 0);
	assert_int_equal(stage_free_slots(), 4);
	assert_int_equal(u_.disk.loads, 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 12, &lease_, &reply_), KV_OK);
	wait_done(lease_.id);
	stage_end();
}

static void p6_a_window_ends_when_one_of_its_blocks_cannot_be_read(void **state)
{
	(void)state;
	stage_disk(32, 8);
	u_.disk.fail_percent = 100;
	u_.disk.fail_with = KV_ERR_CORRUPT;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &reply_), KV_OK);
	wait_done(lease_.id);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease_.id)->msg.lease_done.status, KV_ERR_CORRUPT);
	assert_false(u_lease_alive(&lease_));
	u_.disk.fail_percent = 0;
	u_settle(&u_);
	assert_int_equal(tiers_of(&keys_[0]), 0);
	assert_int_equal(tiers_of(&keys_[4]), KV_TIER_DISK);
	assert_int_equal(u_.core->claims.used + u_.core->holds, 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 4, &lease_, &reply_), KV_OK);
	wait_done(lease_.id);
	u_lease_verify(&u_, &lease_);
	stage_end();
}

/* A block is bad in a lease: it alone goes, and the leases that have it. */
static void bad_block(uint32_t disk, uint8_t left)
{
	kv_msg_t ask, reply;

	stage_window(32, disk);
	assert_int_equal(put(0, 8), 8);
	u_settle(&u_);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 6, 2, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 4, &lease2_, &reply_), KV_OK);
	ask = (kv_msg_t){.bad_block = {.lease = lease_.id, .index = 1}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_BAD_BLOCK, &ask, &reply), KV_OK);
	assert_int_equal(reply.bad_block_reply.quarantined, 1);
	u_settle(&u_);
	assert_int_equal(tiers_of(&keys_[3]), left);
	assert_false(u_lease_alive(&lease_));
	assert_true(u_lease_alive(&lease2_));
	for (uint32_t i = 0; i < 8; i++) {
		assert_true(i == 3 || (tiers_of(&keys_[i]) & KV_TIER_CPU));
	}
	ask = (kv_msg_t){.bad_block = {.lease = lease2_.id, .index = 4}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_BAD_BLOCK, &ask, &reply), KV_ERR_ARG);
	assert_int_equal(put(0, 8), 8);
	assert_true(tiers_of(&keys_[3]) & (disk ? KV_TIER_DISK : KV_TIER_CPU));
	stage_end();
}

static void p1_a_bad_block_without_parent_goes_alone(void **state)
{
	(void)state;
	bad_block(0, 0);
	bad_block(64, KV_TIER_DISK);
}

static void p2_durable_is_said_of_each_block_without_parent(void **state)
{
	(void)state;
	stage_window(64, 64);
	assert_int_equal(put(2, 4), 2);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 6, 1, &put_, &started_), KV_OK);
	assert_int_equal(started_.already, 2);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 6), KV_OK);
	assert_int_equal(u_count_notices(&u_, KV_CODE_DURABLE, put_.id), 0);
	assert_int_equal(u_.core->claims.used, 6);
	u_settle(&u_);
	assert_int_equal(u_count_notices(&u_, KV_CODE_DURABLE, put_.id), 1);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.n, 6);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.status, KV_OK);
	assert_true(u_.disk.flushes > 0);
	assert_int_equal(u_.core->claims.used, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 6, 1, &put_, &started_), KV_OK);
	assert_int_equal(started_.already, 6);
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.n, 6);
	stage_end();
}

static void p2_durable_says_how_far_the_disk_goes(void **state)
{
	const u_notice_t *notice;

	(void)state;
	stage_window(64, 4);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 1, &put_, &started_), KV_OK);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 8), KV_OK);
	u_settle(&u_);
	notice = u_find_notice(&u_, KV_CODE_DURABLE, put_.id);
	assert_non_null(notice);
	assert_int_equal(notice->msg.durable.status, KV_ERR_NOT_ADMITTED);
	assert_true(notice->msg.durable.n <= 4);
	for (uint32_t i = 0; i < notice->msg.durable.n; i++) {
		assert_true(tiers_of(&keys_[i]) & KV_TIER_DISK);
	}
	stage_end();
	stage_window(64, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 1, &put_, &started_), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 8), KV_OK);
	u_settle(&u_);
	notice = u_find_notice(&u_, KV_CODE_DURABLE, put_.id);
	assert_true(notice && notice->msg.durable.n == 0 && notice->msg.durable.status == KV_ERR_NOT_ADMITTED);
	stage_end();
}

static void p2_blocks_of_all_groups_come_back(void **state)
{
	fake_tier_t disk;

	(void)state;
	stage(64, 256);
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		u_.group = u_groups[g].id;
		assert_int_equal(put(0, 8 + g), 8 + g);
	}
	u_settle(&u_);
	universe_kill(&u_, &disk);
	universe_init(&u_, &(u_config_t){.cpu_slots = 64, .max_blocks = 4096, .seed = kv_test_seed()}, &disk);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	u_settle(&u_);
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		u_.group = u_groups[g].id;
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 8 + g);
		assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[5]), KV_TIER_DISK);
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 2, &lease_, &reply_), KV_OK);
		wait_done(lease_.id);
		u_lease_verify(&u_, &lease_);
		assert_int_equal(u_header(m_, lease_.offset)->ready, 8);
	}
	universe_check(&u_);
	stage_end();
}

static void p1_a_reset_takes_all_groups(void **state)
{
	kv_msg_t ask, reply;

	(void)state;
	stage(128, 256);
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		u_.group = u_groups[g].id;
		assert_int_equal(put(0, 20), 20);
	}
	u_.group = 1;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 20, 10, &lease_, &reply_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 15, 30, 1, &put_, &started_), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &put_, 5, 3), KV_OK);
	ask = (kv_msg_t){.space_reset = {.space = space_.space, .epoch = space_.epoch}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_SPACE_RESET, &ask, &reply), KV_PENDING);
	space_.epoch = reply.space_reset_reply.epoch;
	assert_int_equal(put(0, 4), 4);
	u_tick(&u_, 20);
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(u_put_end(&u_, m_, &put_, 8, 7), KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.status, KV_ERR_STALE_EPOCH);
	u_settle(&u_);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 4);
	stage_end();
}

/* ---- many ----------------------------------------------------------------------------------------------------------------------------- */

/* A step that walks the root's children would make this take minutes. */
static void p10_fifty_thousand_blocks_at_the_root_cost_no_more_each(void **state)
{
	enum { MANY = 50000 };
	static kv_key_t many[MANY];
	kv_msg_t ask, reply;

	(void)state;
	universe_init(
		&u_,
		&(u_config_t){.cpu_slots = MANY, .disk_slots = MANY, .max_blocks = 2 * MANY, .seed = kv_test_seed()},
		NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	u_.group = 1;
	u_chain(NULL, 3, many, MANY);
	for (uint32_t at = 0; at < MANY; at += 500) {
		assert_int_equal(u_put(&u_, m_, &space_, many + at, 0, 500), 500);
		u_tick(&u_, 8);
		u_.notice_count = 0;
	}
	for (uint32_t at = 0; at < MANY; at += 50) {
		assert_int_equal(u_acquire(&u_, m_, &space_, many + at, 50, 10, &lease_, &reply_), KV_OK);
		assert_int_equal(reply_.n, 50);
		assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	}
	while (u_.core->ix.queue_head != KVD_NONE || u_.core->writes > 0) {
		u_tick(&u_, 1);
	}
	for (uint32_t i = 0; i < MANY / 2; i++) {
		assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK);
	}
	universe_check(&u_);
	ask = (kv_msg_t){.space_reset = {.space = space_.space, .epoch = space_.epoch}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_SPACE_RESET, &ask, &reply), KV_PENDING);
	while (u_.core->dead_trees != KVD_NONE) {
		u_tick(&u_, 1);
	}
	assert_int_equal(u_.core->ix.blocks.used, 0);
	universe_check(&u_);
	universe_fini(&u_);
}

static void p5_a_full_index_makes_room_for_blocks_without_parents(void **state)
{
	(void)state;
	universe_init(&u_, &(u_config_t){.cpu_slots = 64, .max_blocks = 10, .seed = kv_test_seed()}, NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	stage_keys();
	u_.group = 1;
	assert_int_equal(put(0, 10), 10);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 9, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(put(20, 21), 1);
	assert_int_equal(tiers_of(&keys_[20]), KV_TIER_CPU);
	assert_int_equal(tiers_of(&keys_[9]), 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, &keys_[20], 1, 0, &lease2_, &reply_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 30, 32, 0, &put_, &started_), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 2), KV_OK);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.status, KV_ERR_NOT_ADMITTED);
	stage_end();
}

static void p4_status_names_the_groups_of_a_space(void **state)
{
	static char json[65536];

	(void)state;
	stage(16, 16);
	kvd_core_status_json(u_.core, 0, 1, json, sizeof json);
	assert_non_null(strstr(json, "{\"group\":1,\"rule\":\"window\",\"block_tokens\":16,\"window\":63}"));
	assert_non_null(strstr(json, "{\"group\":2,\"rule\":\"state\",\"block_tokens\":32}"));
	assert_non_null(strstr(json, "{\"group\":5,\"rule\":\"full\",\"block_tokens\":16}"));
	stage_end();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p3_a_block_without_parent_is_visible_by_itself),
		cmocka_unit_test(p3_parent_and_depth_of_a_block_without_parent_are_ignored),
		cmocka_unit_test(p5_already_may_be_anywhere_in_a_put),
		cmocka_unit_test(p10_a_key_twice_in_a_put_is_refused),
		cmocka_unit_test(p5_a_put_that_finds_no_room_takes_what_there_is),
		cmocka_unit_test(p3_of_two_copies_of_a_block_without_parent_one_is_kept),
		cmocka_unit_test(p4_a_revoked_put_keeps_what_is_visible),
		cmocka_unit_test(p1_the_same_key_in_two_groups_is_two_blocks),
		cmocka_unit_test(p9_tokens_of_a_group_are_counted_in_its_own_blocks),
		cmocka_unit_test(p3_a_window_is_leased_whole_or_not_at_all),
		cmocka_unit_test(p10_a_window_names_each_of_its_blocks),
		cmocka_unit_test(p5_every_block_of_a_window_counts_against_the_cap),
		cmocka_unit_test(p5_a_window_that_was_leased_last_goes_last),
		cmocka_unit_test(p1_an_expired_window_is_revoked_and_unpinned),
		cmocka_unit_test(p4_a_member_that_dies_leaves_no_pin_behind),
		cmocka_unit_test(p1_blocks_of_a_window_come_from_disk),
		cmocka_unit_test(p5_without_room_for_all_of_a_window_nothing_is_read),
		cmocka_unit_test(p6_a_window_ends_when_one_of_its_blocks_cannot_be_read),
		cmocka_unit_test(p1_a_bad_block_without_parent_goes_alone),
		cmocka_unit_test(p2_durable_is_said_of_each_block_without_parent),
		cmocka_unit_test(p2_durable_says_how_far_the_disk_goes),
		cmocka_unit_test(p2_blocks_of_all_groups_come_back),
		cmocka_unit_test(p1_a_reset_takes_all_groups),
		cmocka_unit_test(p10_fifty_thousand_blocks_at_the_root_cost_no_more_each),
		cmocka_unit_test(p5_a_full_index_makes_room_for_blocks_without_parents),
		cmocka_unit_test(p4_status_names_the_groups_of_a_space),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
