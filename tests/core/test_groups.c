/* Unchained groups (`window` and `state`): puts and leases in memory. */
#include "groups.h"

static u_put_t put_, other_;
static u_lease_t lease_, lease2_;
static kv_msg_put_start_reply_t started_;
static kv_msg_acquire_reply_t reply_;

/* ---- puts ------------------------------------------------------------------------------------ */

STAGE_TEST(p5_already_may_be_anywhere_in_a_put, stage_window(64, 0))
{
	const uint32_t *slots;

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
}

STAGE_TEST(p10_a_key_twice_in_a_put_is_refused, stage_window(64, 0))
{
	kv_key_t twice[4] = {0};

	memcpy(twice, keys_, sizeof twice);
	twice[3] = twice[1];
	assert_int_equal(u_put_start(&u_, m_, &space_, twice, 0, 4, 0, &put_, &started_), KV_ERR_ARG);
	assert_int_equal(stage_free_slots(), 64);
	assert_int_equal(put(0, 4), 4);
	assert_int_equal(u_put_start(&u_, m_, &space_, twice, 0, 4, 0, &put_, &started_), KV_ERR_ARG);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &started_), KV_OK);
	memset(&twice[0], 0, sizeof twice[0]);
	assert_int_equal(u_put_start(&u_, m_, &space_, twice, 0, 1, 0, &put_, &started_), KV_ERR_ARG);
}

STAGE_TEST(p3_of_two_copies_of_an_unchained_block_one_is_kept, stage_window(64, 0))
{
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
}

STAGE_TEST(p4_a_revoked_put_keeps_what_is_visible, stage_window(64, 0))
{
	kv_msg_t ask, reply;
	uint32_t freed;

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
}

KV_TEST(p9_tokens_of_a_group_are_counted_in_its_own_blocks)
{
	static const uint32_t tokens[64];
	kv_msg_t ask = {0}, reply;

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

/* ---- leases ---------------------------------------------------------------------------------- */

STAGE_TEST(p3_a_window_is_leased_whole_or_not_at_all, stage_window(16, 0))
{
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
	assert_int_equal(u_.core->pins.used, 4);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	assert_int_equal(u_.core->pins.used, 0);
	evict_all(KV_TIER_CPU);
	assert_int_equal(stage_free_slots(), 16);
}

STAGE_TEST(p10_a_window_names_each_of_its_blocks, stage_window(64, 0))
{
	kv_msg_t ask = {0}, reply;

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
}

STAGE_TEST(p5_every_block_of_a_window_counts_against_the_cap, stage_window(64, 0))
{
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
}

STAGE_TEST(p5_a_window_that_was_leased_last_goes_last, stage_window(16, 0))
{
	assert_int_equal(put(0, 16), 16);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	u_evict(&u_, KV_TIER_CPU, 12);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 4);
	assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK);
	assert_int_equal(tiers_of(&keys_[0]), 0); /* the window moves: its first block is the oldest */
	assert_int_equal(tiers_of(&keys_[3]), KV_TIER_CPU);
}

STAGE_TEST(p1_an_expired_window_is_revoked_and_unpinned, stage_window(16, 0))
{
	assert_int_equal(put(0, 16), 16);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 12, &lease2_, &reply_), KV_OK);
	kv_test_advance(&u_.env, UINT64_C(8000000000));
	u_tick(&u_, 1);
	assert_int_equal(u_renew(&u_, m_, lease2_.id), KV_OK);
	kv_test_advance(&u_.env, UINT64_C(2100000000));
	u_tick(&u_, 1);
	assert_false(u_lease_alive(&lease_));
	assert_true(u_lease_alive(&lease2_));
	evict_all(KV_TIER_CPU);
	assert_int_equal(stage_free_slots(), 12);
}
