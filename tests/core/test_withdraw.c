/* Blocks that an engine takes back (decision 070): gone from every tier with all below them, for everybody, and for
 * good. */
#include "handover_stage.h"

#include "core/block/quarantine.h"

static u_lease_t lease_, below_, above_;
static u_put_t put_, other_;
static kv_msg_acquire_reply_t got_lease_;
static kv_msg_put_start_reply_t started_;

/* Until the answer is there. */
static kv_status_t withdraw(const kv_key_t *keys, uint32_t n)
{
	const uint64_t answers = u_.answers;
	kv_status_t status = u_withdraw(&u_, m_, &space_, keys, n);

	if (status != KV_PENDING) {
		return status;
	}
	u_settle(&u_);
	assert_int_equal(u_.answers, answers + 1);

	return u_.answer_status;
}

static kv_status_t put_status(uint64_t put)
{
	const u_notice_t *done = u_find_notice(&u_, KV_CODE_PUT_DONE, put);

	return done ? done->msg.put_done.status : KV_PENDING;
}

static uint8_t tier_of(uint32_t i)
{
	uint8_t tier;

	u_explain(&u_, 0, &space_, &keys_[i], 1, &tier);

	return tier;
}

STAGE_TEST(p1_a_withdrawn_block_leaves_every_tier_with_all_below_it, stage(64, 64))
{
	uint64_t removed;

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 20), 20);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 8, 12), 4);
	u_settle(&u_);
	assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK); /* one is on disk only */
	removed = u_.removed;
	assert_int_equal(withdraw(&keys_[10], 1), KV_OK);
	assert_int_equal(u_.withdrawn, 10);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_BLOCKS_WITHDRAWN), 10);
	assert_int_equal(u_.removed - removed, 19); /* of two tiers, but for the one */
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 10);
	assert_int_equal(u_visible(&u_, 0, &space_, fork_, 12), 12);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[9]), KV_TIER_CPU | KV_TIER_DISK);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[10]) | u_mirror_tiers(&u_, 0, &keys_[19]), 0);
	assert_int_equal(u_.disk.free_count, 64 - 14);
	assert_int_equal(u_.disk.withdrawals, 1);

	/* The same key may be put again, by an engine with other weights, and stays. */
	put_settled(10, 12);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 12);
}

STAGE_TEST(p1_keys_without_a_block_and_a_subtree_named_twice_are_no_error, stage(64, 64))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 20), 20);
	assert_int_equal(withdraw(&fork_[8], 16), KV_OK);
	assert_int_equal(u_.withdrawn, 0);
	assert_int_equal(withdraw(keys_, 40), KV_OK); /* each of the blocks, and 20 more keys: several quanta */
	assert_int_equal(u_.withdrawn, 20);
	assert_int_equal(withdraw(keys_, 40), KV_OK);
	assert_int_equal(u_.withdrawn, 0);
	assert_int_equal(u_.disk.withdrawals, 3); /* what an earlier daemon has freed may lie in a header yet */
	assert_int_equal(stage_free_slots(), 64);
}

/* Of another instance, at the block, below it, and above it: as with a bad block. */
STAGE_TEST(p1_leases_on_withdrawn_blocks_are_revoked, stage_two(64, 64))
{
	put_settled(0, 20);
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 12, 0, &lease_, &got_lease_), KV_OK);
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 20, 0, &below_, &got_lease_), KV_OK);
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 8, 0, &above_, &got_lease_), KV_OK);
	assert_int_equal(u_withdraw(&u_, m_, &space_, &keys_[11], 1), KV_PENDING);
	u_settle(&u_);
	assert_int_equal(u_.answer_status, KV_OK);
	assert_false(u_lease_alive(&lease_));
	assert_false(u_lease_alive(&below_));
	assert_true(u_lease_alive(&above_));
	u_lease_verify(&u_, &above_);
	assert_int_equal(u_release(&u_, d_, above_.id), KV_OK);
}

/* The answer comes after the last lease on it is REVOKED, and nobody gets one meanwhile. */
STAGE_TEST(p1_nothing_withdrawn_is_leased_before_the_answer, stage_two(64, 64))
{
	put_settled(0, 20);
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 20, 0, &lease_, &got_lease_), KV_OK);
	u_.disk.hold = 1;
	assert_int_equal(u_withdraw(&u_, m_, &space_, &keys_[4], 1), KV_PENDING);
	u_tick(&u_, 2);
	assert_int_equal(u_.answers, 0); /* the disk has not recorded it */
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 20, 0, &below_, &got_lease_), KV_OK);
	assert_int_equal(got_lease_.n, 4);
	u_.disk.hold = 0;
	u_settle(&u_);
	assert_int_equal(u_.answers, 1);
	assert_int_equal(u_release(&u_, d_, below_.id), KV_OK);
}

STAGE_TEST(p3_unfinished_puts_of_withdrawn_keys_are_revoked, stage_two(64, 0))
{
	static u_put_t child, grandchild, beside;

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	/* Two instances write block 5; one writes what follows, and more below that; one a fork above it. */
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 4, 8, 0, &put_, &started_), KV_OK);
	assert_int_equal(u_put_start(&u_, d_, &space_, keys_, 4, 8, 0, &other_, &started_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 8, 12, 0, &child, &started_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 12, 14, 0, &grandchild, &started_), KV_OK);
	assert_int_equal(u_put_start(&u_, d_, &space_, keys_, 0, 4, 0, &beside, &started_), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &child, 0, 4), KV_OK);
	assert_int_equal(u_withdraw(&u_, m_, &space_, &keys_[5], 1), KV_PENDING);
	u_tick(&u_, 1);
	assert_int_equal(put_status(put_.id), KV_ERR_REVOKED);
	assert_int_equal(put_status(other_.id), KV_ERR_REVOKED);
	/* Block 6 is put again at once, and good: what was made below the old one does not become its child. */
	assert_int_equal(u_put(&u_, d_, &space_, keys_, 4, 12), 8);
	u_settle(&u_);
	assert_int_equal(put_status(child.id), KV_ERR_REVOKED);
	assert_int_equal(put_status(grandchild.id), KV_ERR_REVOKED);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 14), 12);
}

/* Its first blocks are visible and withdrawn, and the same keys are back before it goes on. */
KV_TEST(p3_a_put_below_a_withdrawn_block_is_revoked_though_the_key_is_back)
{
	for (uint32_t durable = 0; durable < 2; durable++) {
		stage_two(64, durable ? 64 : 0);
		assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
		assert_int_equal(u_put_start(&u_, d_, &space_, keys_, 4, 8, durable, &put_, &started_), KV_OK);
		u_put_write(&u_, &put_);
		assert_int_equal(u_put_end(&u_, d_, &put_, 0, 2), KV_OK);
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 6);
		kvd_withdraw_subtree(u_.core, kvd_index_find(&u_.core->ix, u_.core->ns[0]->numbers[space_.space]->tree,
							     &keys_[2], 0)); /* before any quantum */
		assert_int_equal(u_put(&u_, m_, &space_, keys_, 2, 6), 4);
		assert_int_equal(u_put_end(&u_, d_, &put_, 2, 2), KV_OK);
		u_settle(&u_);
		assert_int_equal(put_status(put_.id), KV_ERR_REVOKED);
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 6);
		stage_end();
	}
}

STAGE_TEST(p3_blocks_of_unchained_groups_are_withdrawn_alone, stage_two(64, 64))
{
	u_.group = 1;
	put_settled(0, 12);
	assert_int_equal(withdraw(&keys_[3], 2), KV_OK);
	assert_int_equal(u_.withdrawn, 2);
	assert_int_equal(tier_of(2) & tier_of(5), KV_TIER_CPU | KV_TIER_DISK);
	assert_int_equal(tier_of(3) | tier_of(4), 0);
	u_.group = 0;
}

/* Hidden as unreadable: it would come back with the next good read. */
STAGE_TEST(p1_a_block_that_is_set_aside_is_withdrawn, stage(64, 64))
{
	put_on_disk(8);
	fake_set_readable(
		&u_.disk,
		kvd_block_at(&u_.core->ix, kvd_index_find(&u_.core->ix, u_.core->ns[0]->numbers[1]->tree, &keys_[4], 0))
			->disk.slot,
		0);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 4);
	assert_int_equal(withdraw(&keys_[6], 1), KV_OK);
	assert_int_equal(u_.withdrawn, 2);
	fake_read_all(&u_.disk);
	u_settle(&u_);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 6);
}

/* Gone in memory, and said to be not for good: asking again is what the caller does. */
STAGE_TEST(p2_a_disk_that_cannot_record_a_withdrawal_is_said, stage(64, 64))
{
	put_settled(0, 8);
	u_.disk.withdraw_refuse = KV_ERR_TIER_OFF;
	assert_int_equal(withdraw(&keys_[4], 1), KV_ERR_TIER_OFF);
	u_.disk.withdraw_refuse = KV_OK;
	u_.disk.withdraw_status = KV_ERR_IO;
	assert_int_equal(withdraw(&keys_[4], 1), KV_ERR_IO);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 4);
	u_.disk.withdraw_status = KV_OK;
	assert_int_equal(withdraw(&keys_[4], 1), KV_OK);
	assert_int_equal(u_.core->pending_withdrawals, 0);
}

STAGE_TEST(p8_another_namespaces_keys_are_not_touched, stage(64, 0))
{
	kvd_space_info_t there;
	u_member_t *stranger;

	stranger = u_join(&u_, 1, "engine", 2, 0);
	there = u_space(&u_, 1, "model");
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 8), 8);
	assert_int_equal(u_put(&u_, stranger, &there, keys_, 0, 8), 8);
	assert_int_equal(u_withdraw(&u_, stranger, &there, keys_, 8), KV_PENDING);
	u_settle(&u_);
	assert_int_equal(u_.withdrawn, 8);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 8);
	assert_int_equal(u_visible(&u_, 1, &there, keys_, 8), 0);
	there.space = 9;
	assert_int_equal(u_withdraw(&u_, stranger, &there, keys_, 8), KV_ERR_NOT_FOUND);
}

KV_TEST(p10_withdrawals_that_cannot_be_are_refused)
{
	kvd_space_info_t old = space_;

	stage(64, 0);
	old = space_;
	old.epoch++;
	assert_int_equal(u_withdraw(&u_, m_, &old, keys_, 1), KV_ERR_STALE_EPOCH);
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 0), KV_ERR_ARG);
	assert_int_equal(u_withdraw(&u_, NULL, &space_, keys_, 1), KV_ERR_NOT_JOINED);
	u_.group = 77;
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_ERR_UNSUPPORTED);
	u_.group = 0;
	for (uint32_t i = 0; i < 64; i++) {
		assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_PENDING);
	}
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_ERR_BUSY);
	u_settle(&u_);
	assert_int_equal(u_.answers, 64);
	/* The daemon ends with one that waits, and with one that the disk records. */
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_PENDING);
	stage_end();
	stage(64, 64);
	u_.disk.hold = 1;
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_PENDING);
	u_tick(&u_, 2);
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_PENDING);
	universe_fini(&u_);
}

/* The space is reset while its keys wait: nothing of the new epoch goes. */
STAGE_TEST(p1_a_reset_meanwhile_ends_a_withdrawal, stage(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 8), 8);
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 8), KV_PENDING);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	space_.epoch++;
	put_settled(0, 8);
	assert_int_equal(u_.answers, 1);
	assert_int_equal(u_.answer_status, KV_ERR_STALE_EPOCH);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 8);
}

static kv_slot_t disk_slot(const kv_key_t *key)
{
	const uint32_t tree = u_.core->ns[0]->numbers[space_.space]->tree;

	return kvd_block_at(&u_.core->ix, kvd_index_find(&u_.core->ix, tree, key, 0))->disk.slot;
}

/* Their keys are back, and only in memory, when a walk over the tree meets what is left of the old copies. */
STAGE_TEST(p9_a_walk_does_not_announce_blocks_that_are_being_taken_down, stage(512, 512))
{
	kv_key_t other[4];
	uint64_t stored, removed;

	u_chain(NULL, 3, other, 4);
	assert_int_equal(u_put(&u_, m_, &space_, other, 0, 4), 4);
	u_settle(&u_);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK);
	}
	put_settled(0, 200);
	u_.disk.hold = 1;
	kvd_withdraw_subtree(u_.core, kvd_index_find(&u_.core->ix, u_.core->ns[0]->numbers[space_.space]->tree,
						     &keys_[10], 0)); /* more than a quantum takes down */
	stored = u_.stored;
	removed = u_.removed;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 10, 20), 10);
	assert_int_equal(u_.stored - stored, 10);
	assert_int_equal(u_.removed - removed, 20); /* of two tiers */
	fake_set_readable(&u_.disk, disk_slot(&other[3]), 0);
	fake_set_readable(&u_.disk, disk_slot(&other[1]), 0); /* two walks at a time are one over all of the tree */
	u_tick(&u_, 1);
	assert_int_equal(u_.stored - stored, 10);
	universe_check(&u_);
	u_.disk.hold = 0;
	fake_read_all(&u_.disk);
	u_settle(&u_);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 200), 20);
}

STAGE_TEST(p5_a_long_withdrawal_is_cut_into_quanta, stage(512, 0))
{
	static kv_key_t named[4096];

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 400), 400);
	for (uint32_t i = 0; i < 4096; i++) {
		u_chain(NULL, i + 100, &named[i], 1);
	}
	named[4095] = keys_[0];
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 400), 400);
	assert_int_equal(u_withdraw(&u_, m_, &space_, named, 4096), KV_PENDING);
	u_tick(&u_, 1);
	assert_int_equal(u_.answers, 0);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 400), 400);
	u_settle(&u_);
	assert_int_equal(u_.withdrawn, 400);
}
