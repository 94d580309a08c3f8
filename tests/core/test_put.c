/* Puts: every rule of how a block comes in. */
#include "stage.h"

static u_put_t put_, other_;
static kv_msg_put_start_reply_t reply_;

static const u_notice_t *done(uint64_t put)
{
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, put), 1);

	return u_find_notice(&u_, KV_CODE_PUT_DONE, put);
}

STAGE_TEST(p3_a_block_is_visible_when_all_of_it_is_there, stage(64, 0))
{
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 4);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 0);
	assert_int_equal(u_put_end(&u_, m_, &put_, 1, 1), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 0);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 2);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_ERR_COVERAGE);
	assert_int_equal(u_put_end(&u_, m_, &put_, 2, 2), KV_OK);
	assert_int_equal(done(put_.id)->msg.put_done.n, 4);
	assert_int_equal(u_.seals, 4);
	assert_int_equal(u_.digest_words, 16);
}

STAGE_TEST(p3_every_rank_must_have_ended_its_range, stage(64, 0))
{
	const uint32_t writers[2][5] = {{0, 0, 1, 0, 2}, {1, 1, 1, 0, 2}};
	kv_msg_t ask = {.put_start = {.space = space_.space}}, reply;

	ask.put_start = (kv_msg_put_start_t){.space = space_.space,
					     .epoch = space_.epoch,
					     .keys = {(const uint8_t *)keys_, 2 * KV_KEY_BYTES},
					     .writers = {(const uint8_t *)writers, sizeof writers}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_OK);
	for (uint32_t rank = 0; rank < 2; rank++) {
		kv_msg_t end = {.put_end = {.put = reply.put_start_reply.put, .rank = rank, .count = 2, .words = 4}},
			 answer;

		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 2), 0);
		assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_END, &end, &answer), KV_OK);
	}
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 2), 2);
}

STAGE_TEST(p10_ranges_that_overlap_or_leave_gaps_are_refused, stage(64, 0))
{
	static const uint32_t bad[][10] = {
		{0, 0, 2, 0, 2, 1, 1, 1, 1, 1}, /* overlap */
		{0, 0, 1, 0, 2, 1, 1, 1, 0, 1}, /* gap */
		{0, 0, 1, 0, 2, 0, 1, 1, 0, 2}, /* one rank twice */
		{0, 0, 3, 0, 2, 1, 1, 1, 0, 2}, /* out of range */
		{0, UINT32_MAX, 2, 0, 2, 1, 1, 1, 0, 2},
	};

	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		kv_msg_t ask = {.put_start = {.space = space_.space,
					      .epoch = space_.epoch,
					      .keys = {(const uint8_t *)keys_, KV_KEY_BYTES}}},
			 reply;

		ask.put_start.writers = (kv_slice_t){(const uint8_t *)bad[i], sizeof bad[i]};
		assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_ERR_COVERAGE);
	}
	assert_int_equal(stage_free_slots(), 64);
}

STAGE_TEST(p3_a_child_without_a_parent_is_refused, stage(64, 0))
{
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 3, 5, 0, &put_, &reply_), KV_ERR_NO_PARENT);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_NO_PARENT), 1);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 2), 2);
	assert_int_equal(u_put_start(&u_, m_, &space_, &keys_[1], 0, 1, 0, &put_, &reply_), KV_ERR_ARG);
	assert_int_equal(stage_free_slots(), 62);
}

/* It would wait for itself when the parent's only other copy is lost. */
STAGE_TEST(p10_a_block_below_itself_is_refused, stage(64, 0))
{
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 2, 0, &put_, &reply_), KV_OK);
	keys_[2] = keys_[1];
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 2, 3, 0, &other_, &reply_), KV_ERR_ARG);
}

STAGE_TEST(p3_a_child_is_lost_with_the_last_copy_of_its_parent, stage(64, 0))
{
	u_member_t *second;
	static u_put_t copy;

	second = u_join(&u_, 0, "second", 2, 0);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 2, 0, &put_, &reply_), KV_OK);
	assert_int_equal(u_put_start(&u_, second, &space_, keys_, 0, 2, 0, &copy, &reply_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 2, 4, 0, &other_, &reply_), KV_OK);
	assert_int_equal(u_put_revoke(&u_, m_, put_.id), KV_OK);
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, other_.id), 0);
	assert_int_equal(u_put_revoke(&u_, second, copy.id), KV_OK);
	assert_int_equal(done(other_.id)->msg.put_done.status, KV_ERR_PARENT_LOST);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_PARENT_LOST), 2);
}

/* The parent came with another put, so nothing else pins it when the index is full and the child needs room there. */
STAGE_TEST(p6_room_for_a_child_is_not_made_by_evicting_its_parent,
	   stage_in(&(u_config_t){.cpu_slots = 1024, .max_blocks = 256}))
{
	static u_put_t copy;
	kv_key_t chain[2];

	u_chain(NULL, 9, chain, 2);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 0, 255), 255);
	assert_int_equal(u_put_start(&u_, m_, &space_, fork_, 255, 400, 0, &copy, &reply_), KV_OK); /* pins them all */
	assert_int_equal(u_put_start(&u_, m_, &space_, chain, 0, 1, 0, &put_, &reply_), KV_OK);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_start(&u_, m_, &space_, chain, 1, 2, 0, &other_, &reply_), KV_OK);
	put_end(&other_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 1), KV_OK);
	assert_int_equal(done(other_.id)->msg.put_done.status, KV_ERR_NOT_ADMITTED);
	assert_int_equal(u_visible(&u_, 0, &space_, chain, 1), 1);
}

STAGE_TEST(p3_a_put_half_visible_at_a_reset_ends_with_its_last_range, stage(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 2), 2);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 6, 0, &put_, &reply_), KV_OK);
	u_put_write(&u_, &put_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 2, 2), KV_OK);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	u_settle(&u_);
	assert_int_equal(u_put_end(&u_, m_, &put_, 4, 1), KV_OK);
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, put_.id), 0); /* the ranks still write */
	assert_int_equal(u_put_end(&u_, m_, &put_, 5, 1), KV_OK);
	assert_int_equal(done(put_.id)->msg.put_done.status, KV_ERR_STALE_EPOCH);
	u_settle(&u_);
	assert_int_equal(stage_free_slots(), 64);
	assert_int_equal(stage_quarantined(), 0);
}

KV_TEST(p3_a_waiting_child_accepts_another_instances_parent)
{
	u_member_t *second;
	static u_put_t copy;

	for (int lost = 0; lost < 2; lost++) { /* the instance's own copy, or unfinished still */
		stage(64, 0);
		second = u_join(&u_, 0, "second", 2, 0);
		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 2, 0, &put_, &reply_), KV_OK);
		assert_int_equal(u_put_start(&u_, second, &space_, keys_, 0, 2, 0, &copy, &reply_), KV_OK);
		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 2, 4, 0, &other_, &reply_), KV_OK);
		assert_int_equal(u_put_end(&u_, m_, &other_, 0, 2), KV_OK);
		assert_int_equal(lost ? u_put_revoke(&u_, m_, put_.id) : KV_OK, KV_OK);
		assert_int_equal(u_put_end(&u_, second, &copy, 0, 2), KV_OK);
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 4);
		assert_int_equal(done(other_.id)->msg.put_done.status, KV_OK);
		stage_end();
	}
}

STAGE_TEST(p5_unfinished_bytes_are_capped, stage(64, 0))
{
	u_.core->config.max_unfinished_bytes = 5 * 4096;
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 10, 0, &put_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 5);
	assert_int_equal(u_put_start(&u_, m_, &space_, fork_, 0, 1, 0, &other_, &reply_), KV_ERR_BUSY);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 5), KV_OK);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 5, 10), 5);
}

/* Of a put that is refused. */
static void expect_why(const char *why)
{
	assert_int_equal(u_put_start(&u_, m_, &space_, fork_, 0, 1, 0, &other_, &reply_), KV_ERR_BUSY);
	assert_non_null(strstr(u_.detail, why));
}

/* Each time what is really awaited, and no limit that is not reached. */
STAGE_TEST(p5_a_refused_put_says_what_it_waits_for, stage(64, 0))
{
	u_.cpu.untouched = 1;
	expect_why("memory of the pool is not ready yet");
	assert_null(strstr(u_.detail, "limit"));
	u_.cpu.untouched = 0;
	u_.core->config.max_unfinished_bytes = 5 * 4096;
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 10, 0, &put_, &reply_), KV_OK);
	expect_why("instance.max_unfinished");
	u_.core->config.max_unfinished_bytes = UINT64_C(1) << 30;
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 64, 0, &put_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 59);
	expect_why("nothing in it can be evicted");
}

static kv_status_t keep_put(uint64_t put)
{
	kv_msg_t ask = {.keep = {.put = put}}, reply;
	kv_status_t status = u_request(&u_, m_, KV_CODE_KEEP, &ask, &reply);

	assert_true(status != KV_OK || reply.keep_reply.ttl_ms == 10000);

	return status;
}

/* An expired put is revoked when its namespace lacks room, the oldest first. Its slots come back when its writers are
 * drained, not before. */
STAGE_TEST(p5_an_expired_put_is_revoked_for_room_and_drained_later, stage(16, 0))
{
	static u_put_t puts[4];
	kv_key_t keys[8];
	uint32_t freed;

	for (uint32_t i = 0; i < 4; i++) {
		u_chain(NULL, 50 + i, keys, 4);
		assert_int_equal(u_put_start(&u_, m_, &space_, keys, 0, 4, 0, &puts[i], &reply_), KV_OK);
		kv_test_advance(&u_.env, 1000000);
	}
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply_), KV_ERR_BUSY);
	kv_test_advance(&u_.env, UINT64_C(9000000000));
	assert_int_equal(keep_put(puts[0].id), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &puts[1], 0, 1), KV_OK); /* PUT_END extends a put, too */
	kv_test_advance(&u_.env, UINT64_C(2000000000));
	u_tick(&u_, 3); /* time does not end a put without need of room */
	assert_int_equal(u_.notice_count, 0);

	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply_), KV_ERR_BUSY);
	assert_int_equal(done(puts[2].id)->msg.put_done.status, KV_ERR_REVOKED);
	assert_null(u_find_notice(&u_, KV_CODE_PUT_DONE, puts[3].id));
	assert_int_equal(stage_quarantined(), 4);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply_), KV_ERR_BUSY);
	assert_int_equal(done(puts[3].id)->msg.put_done.status, KV_ERR_REVOKED);
	assert_int_equal(stage_quarantined(), 8);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply_), KV_ERR_BUSY);
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, puts[0].id), 0); /* kept */
	assert_int_equal(u_put_end(&u_, m_, &puts[2], 0, 4), KV_ERR_REVOKED);
	assert_int_equal(keep_put(puts[2].id), KV_ERR_REVOKED);

	assert_int_equal(u_quiet(&u_, m_, 0, puts[2].id, &freed), KV_OK);
	assert_int_equal(freed, 4);
	assert_int_equal(u_put_end(&u_, m_, &puts[2], 0, 4), KV_ERR_NOT_FOUND);
	assert_int_equal(keep_put(puts[2].id), KV_ERR_NOT_FOUND);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_PUTS_EXPIRED), 2);
}

/* While the block is written its parent comes into memory too; the room it needs in the index is then not made by
 * dropping the parent's disk copy. */
STAGE_TEST(p3_index_room_is_not_made_by_evicting_the_parents_disk_copy, stage(16, 64))
{
	kv_msg_acquire_reply_t acquired;
	kv_key_t apart[2];
	u_lease_t lease;
	uint8_t tiers[8];

	u_chain(NULL, 3, apart, 2);
	put_on_disk(4);
	u_.core->config.write_behind = 0;
	assert_int_equal(u_put(&u_, m_, &space_, apart, 0, 2), 2);
	u_.disk.hold = 1;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease, &acquired), KV_OK);
	u_tick(&u_, 1); /* its reads are under way, and go on without it */
	assert_int_equal(u_release(&u_, m_, lease.id), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 4, 5, 0, &put_, &reply_), KV_OK);
	put_end(&put_);
	assert_int_equal(u_.core->writes, 1);
	u_.core->ix.blocks.limit = u_.core->ix.blocks.used;
	u_.disk.hold = 0;
	u_settle(&u_);
	u_explain(&u_, 0, &space_, keys_, 5, tiers);
	assert_int_equal(tiers[3], KV_TIER_CPU | KV_TIER_DISK);
	assert_int_equal(tiers[4] & KV_TIER_DISK, KV_TIER_DISK);
}

STAGE_TEST(p2_a_write_through_that_fails_ends_its_put, stage(8, 64))
{
	put_on_disk(4);
	u_.disk.fail_percent = 100;
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 4, 6, 0, &put_, &reply_), KV_OK);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 2), KV_OK);
	u_settle(&u_);
	assert_int_equal(done(put_.id)->msg.put_done.status, KV_ERR_NOT_ADMITTED);
	assert_int_equal(stage_free_slots(), 8);
}

static kv_slot_t disk_slot(uint32_t i)
{
	uint32_t id = kvd_index_find(&u_.core->ix, u_.core->ns[0]->numbers[space_.space]->tree, &keys_[i], 0);

	assert_true(id != KVD_NONE);

	return kvd_block_at(&u_.core->ix, id)->disk.slot;
}

/* All eight are stored, and a flush is in flight. The tier then no longer vouches for one, which is written again
 * before that flush ends. */
STAGE_TEST(p2_durable_fails_for_an_unverified_block, stage(64, 64))
{
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 1, &put_, &reply_), KV_OK);
	put_end(&put_);
	for (int i = 0; i < 100 && u_.disk.flushes == 0; i++) {
		u_tick(&u_, 1);
	}
	u_.disk.hold = 1;
	assert_int_equal(u_.disk.flushes, 1);
	fake_lose(&u_.disk, disk_slot(3));
	u_.disk.hold = 0;
	u_settle(&u_);
	assert_int_equal(u_count_notices(&u_, KV_CODE_DURABLE, put_.id), 1);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.n, 0);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.status, KV_ERR_IO);

	/* In memory it was good all the time, and on disk it is again. */
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 1, &put_, &reply_), KV_OK);
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.n, 8);
}

STAGE_TEST(p2_an_unverified_disk_block_takes_its_subtree_along, stage(64, 64))
{
	uint8_t tiers[8];

	put_settled(0, 8);
	u_evict(&u_, KV_TIER_CPU, 4);
	fake_lose(&u_.disk, disk_slot(2)); /* four are in memory too, four only on disk */
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 4);
	u_settle(&u_);
	u_explain(&u_, 0, &space_, keys_, 8, tiers);
	assert_int_equal(tiers[1], KV_TIER_CPU | KV_TIER_DISK);
	assert_int_equal(tiers[3], KV_TIER_CPU | KV_TIER_DISK); /* written anew */
	assert_int_equal(u_.disk.used, 4);
}

/* A chain that branches at every block is of runs of one block each. The acknowledgements owed along it must not each
 * walk up to its top. */
STAGE_TEST(p5_acknowledgements_owed_on_a_hostile_chain_walk_it_once, stage(2048, 2048))
{
	enum { CHAIN = 256 };
	const uint64_t ours = (CHAIN * CHAIN * CHAIN - CHAIN) / 6; /* the universe checks each promise block by block */
	uint64_t steps;

	u_.disk.off = 1;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, CHAIN), CHAIN);
	for (uint32_t i = 1; i < CHAIN; i++) {
		kv_key_t branch[CHAIN + 1];

		memcpy(branch, keys_, i * sizeof *branch);
		u_chain(&keys_[i - 1], 1000 + i, &branch[i], 1);
		assert_int_equal(u_put(&u_, m_, &space_, branch, i, i + 1), 1);
	}
	for (uint32_t n = 1; n <= CHAIN; n++) {
		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, n, 1, &put_, &reply_), KV_OK);
	}
	u_.disk.off = 0;
	kv_test_advance(&u_.env, UINT64_C(61000000000)); /* whatever pause the refused writes have caused is over */
	steps = kv_metric_get(&u_.metrics, KV_M_INDEX_STEPS);
	u_settle(&u_);
	steps = kv_metric_get(&u_.metrics, KV_M_INDEX_STEPS) - steps - ours;
	print_message("# runs visited %llu\n", (unsigned long long)steps);
	assert_true(steps < 4 * CHAIN);
	assert_int_equal(u_.core->durable_owed, 0);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.n, CHAIN);
}

/* A disk that takes no metadata: as long as another put waits for its writes each flush would fail like the one
 * before. */
STAGE_TEST(p5_a_flush_that_failed_is_not_asked_for_again_at_once, stage(64, 64))
{
	uint32_t depth;

	u_.disk.flush_status = KV_ERR_NOSPC;
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 1, &put_, &reply_), KV_OK);
	put_end(&put_);
	for (uint32_t i = 0; i < 100 && u_.disk.flushes == 0; i++) {
		u_tick(&u_, 1);
	}
	depth = u_.core->config.write_behind_depth;
	u_.core->config.write_behind_depth = 0; /* no write begins */
	assert_int_equal(u_put_start(&u_, m_, &space_, fork_, 8, 12, 1, &other_, &reply_), KV_OK);
	put_end(&other_);
	u_tick(&u_, 50);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.status, KV_ERR_NOSPC);
	assert_int_equal(u_.disk.flushes, 1);
	kv_test_advance(&u_.env, 1000000000);
	u_tick(&u_, 50);
	assert_int_equal(u_.disk.flushes, 2);

	/* What no flush has failed for waits for the next one. */
	u_.disk.flush_status = KV_OK;
	u_.core->config.write_behind_depth = depth;
	u_tick(&u_, 50);
	assert_int_equal(u_.disk.stores, 12);
	assert_int_equal(u_count_notices(&u_, KV_CODE_DURABLE, other_.id), 0);
	kv_test_advance(&u_.env, 1000000000);
	u_tick(&u_, 50);
	assert_int_equal(u_.disk.flushes, 3);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, other_.id)->msg.durable.n, 12);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, other_.id)->msg.durable.status, KV_OK);
}

/* The heartbeat of all namespaces goes on while a long prompt becomes visible, and no request of another tenant waits
 * for it. */
STAGE_TEST(p5_a_long_put_is_published_in_several_ticks, stage_in(&(u_config_t){.cpu_slots = 4096, .max_blocks = 8192}))
{
	enum { LONG = 3000 };
	static kv_key_t keys[LONG];
	kv_msg_t ask = {0}, reply;
	u_member_t *other;
	uint64_t put;

	other = u_join(&u_, 1, "other", 2, 0);
	u_chain(NULL, 5, keys, LONG);
	ask.put_start = (kv_msg_put_start_t){
		.space = space_.space, .epoch = space_.epoch, .keys = {(const uint8_t *)keys, sizeof keys}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_OK);
	put = reply.put_start_reply.put;
	assert_int_equal(reply.put_start_reply.n, LONG);
	ask.put_end = (kv_msg_put_end_t){.put = put, .count = LONG, .words = 4 * LONG};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_END, &ask, &reply), KV_OK);
	assert_int_equal(reply.put_end_reply.complete, LONG);
	assert_int_equal(u_.core->ix.blocks.used, 1024);
	/* Another tenant's request does not wait for the rest. */
	ask.put_revoke = (kv_msg_put_revoke_t){.put = put};
	assert_int_not_equal(u_request(&u_, other, KV_CODE_PUT_REVOKE, &ask, &reply), KV_OK);
	assert_int_equal(u_.core->ix.blocks.used, 1024);
	assert_int_equal(kvd_core_tick(u_.core), 0); /* wants to go on at once */
	assert_int_equal(u_.core->ix.blocks.used, 1024 + 64);
	u_settle(&u_);
	assert_int_equal(done(put)->msg.put_done.n, LONG);
}

/* Writes fail for a while, at once or later: nothing is promised, the device gets few tries, and all is written when it
 * is well again. */
KV_TEST(p2_a_write_that_failed_is_tried_again)
{
	uint8_t tiers[24];

	for (int off = 0; off < 2; off++) {
		stage(64, 64);
		u_.disk.off = off;
		u_.disk.fail_percent = 100;
		u_.disk.fail_with = KV_ERR_IO;
		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 16, 1, &put_, &reply_), KV_OK);
		put_end(&put_);
		u_tick(&u_, 50);
		assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put_.id)->msg.durable.status, KV_ERR_NOT_ADMITTED);
		assert_int_equal(u_put(&u_, m_, &space_, fork_, 8, 16), 8);
		for (uint32_t second = 0; second < 600; second++) {
			kv_test_advance(&u_.env, 1000000000);
			u_tick(&u_, 1);
		}
		assert_in_range(u_.disk.tries, 2, 600); /* about 20 tries of what may be in flight at once */
		u_.disk.off = 0;
		u_.disk.fail_percent = 0;
		u_settle(&u_);
		u_explain(&u_, 0, &space_, keys_, 16, tiers);
		u_explain(&u_, 0, &space_, fork_, 16, tiers + 8);
		for (uint32_t i = 0; i < 24; i++) {
			assert_int_equal(tiers[i], KV_TIER_CPU | KV_TIER_DISK);
		}
		stage_end();
	}
}

STAGE_TEST(p10_unreadable_digests_do_not_end_a_range, stage(64, 0))
{
	kv_msg_t ask, reply;

	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 4, 0, &put_, &reply_), KV_OK);
	u_.staging_status = KV_ERR_FAULT;
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 4), KV_ERR_FAULT);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_BAD_STAGING), 1);
	u_.staging_status = KV_OK;
	ask = (kv_msg_t){.put_end = {.put = put_.id, .count = 4, .words = 15}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_END, &ask, &reply), KV_ERR_ARG);
	ask = (kv_msg_t){.put_end = {.put = put_.id, .rank = 7, .count = 4, .words = 16}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_END, &ask, &reply), KV_ERR_COVERAGE);
	ask = (kv_msg_t){.put_end = {.put = put_.id, .first = 3, .count = 2, .words = 8}};
	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_END, &ask, &reply), KV_ERR_ARG);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 4), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 4);
}

STAGE_TEST(p9_a_put_is_announced_in_one_run_with_its_tokens, stage(64, 0))
{
	static uint32_t tokens[4 * 16];
	static u_put_t put;
	kv_msg_t ask = {.put_start = {.space = space_.space,
				      .epoch = space_.epoch,
				      .keys = {(const uint8_t *)keys_, 4 * KV_KEY_BYTES},
				      .tokens = {(const uint8_t *)tokens, sizeof tokens}}},
		 reply;

	assert_int_equal(u_request(&u_, m_, KV_CODE_PUT_START, &ask, &reply), KV_OK);
	put = (u_put_t){.id = reply.put_start_reply.put, .member = m_, .offset = reply.put_start_reply.offset, .n = 4};
	assert_int_equal(u_put_end(&u_, m_, &put, 0, 4), KV_OK);
	assert_int_equal(u_.stored, 4);
	assert_int_equal(u_.stored_tokens, 64);
	assert_int_equal(u_.last_has_parent, 0);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 4, 6), 2);
	assert_int_equal(u_.last_has_parent, 1);
	assert_int_equal(u_.last_parent, kv_key_hash(&keys_[3]));
}
