/* Unchained groups: on disk, with bad blocks, durable, after a restart, and with 50,000 blocks. */
#include "groups.h"

static u_put_t put_;
static u_lease_t lease_, lease2_;
static kv_msg_put_start_reply_t started_;
static kv_msg_acquire_reply_t reply_;

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

/* ---- disk ------------------------------------------------------------------------------------ */

STAGE_TEST(p5_without_room_for_all_of_a_window_nothing_is_read, stage_disk(4, 20))
{
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 8, &lease_, &reply_), KV_ERR_BUSY);
	u_settle(&u_);
	assert_int_equal(u_.core->pins.used + u_.core->refs, 0);
	assert_int_equal(stage_free_slots(), 4);
	assert_int_equal(u_.disk.loads, 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 16, 12, &lease_, &reply_), KV_OK);
	wait_done(lease_.id);
}

STAGE_TEST(p6_a_window_ends_when_one_of_its_blocks_cannot_be_read, stage_disk(32, 8))
{
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
	assert_int_equal(u_.core->pins.used + u_.core->refs, 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 4, &lease_, &reply_), KV_OK);
	wait_done(lease_.id);
	u_lease_verify(&u_, &lease_);
}

STAGE_TEST(p1_a_lease_never_counts_a_block_refilled_elsewhere, stage_disk(32, 4))
{
	static u_lease_t third;

	u_.core->config.read_depth = 1;
	u_.disk.fail_with = KV_ERR_FAULT;
	u_.disk.fail_percent = 100;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 2, 1, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 2, 0, &lease2_, &reply_), KV_OK);
	kvd_io_submit_reads(u_.core);
	u_.disk.fail_percent = 0;
	u_.disk.hold = 1;
	u_tick(&u_, 1);
	u_.disk.hold = 0;
	(void)kvs_poll(&u_.disk.tier, 1); /* block 1 could not be read; block 0 is next */
	assert_false(u_lease_alive(&lease_));
	assert_int_equal(put(50, 51), 1); /* takes the slot that block 1 was given */
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 2, 1, &third, &reply_), KV_OK);
	assert_int_equal(reply_.ready, 1);
	u_settle(&u_);
	u_lease_verify(&u_, &third);
	assert_int_equal(u_header(m_, third.offset)->ready, 2);
	assert_false(u_lease_alive(&lease2_));
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease2_.id)->msg.lease_done.status, KV_ERR_IO);
}

/* A member finds a bad block in its lease: that block leaves, and the leases that have it end. */
static void bad_block(uint32_t disk, uint8_t left)
{
	stage_window(32, disk);
	assert_int_equal(put(0, 8), 8);
	u_settle(&u_);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 6, 2, &lease_, &reply_), KV_OK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 4, &lease2_, &reply_), KV_OK);
	assert_int_equal(u_bad_block(&u_, m_, lease_.id, 1), KV_OK);
	assert_int_equal(u_.reply.bad_block_reply.quarantined, 1);
	u_settle(&u_);
	assert_int_equal(tiers_of(&keys_[3]), left);
	assert_false(u_lease_alive(&lease_));
	assert_true(u_lease_alive(&lease2_));
	for (uint32_t i = 0; i < 8; i++) {
		assert_true(i == 3 || (tiers_of(&keys_[i]) & KV_TIER_CPU));
	}
	assert_int_equal(u_bad_block(&u_, m_, lease2_.id, 4), KV_ERR_ARG);
	assert_int_equal(put(0, 8), 8);
	assert_true(tiers_of(&keys_[3]) & (disk ? KV_TIER_DISK : KV_TIER_CPU));
	stage_end();
}

KV_TEST(p1_a_bad_unchained_block_leaves_without_others)
{
	bad_block(0, 0);
	bad_block(64, KV_TIER_DISK);
}

KV_TEST(p6_a_bad_block_may_be_evicted_before_it_is_taken_down)
{
	for (uint32_t group = 0; group < 2; group++) {
		stage(32, 0);
		u_.group = group;
		assert_int_equal(put(0, 8), 8);
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 0, &lease_, &reply_), KV_OK);
		assert_int_equal(u_bad_block(&u_, m_, lease_.id, 7), KV_OK);
		assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
		evict_all(KV_TIER_CPU);
		universe_check(&u_);
		u_settle(&u_);
		evict_all(KV_TIER_CPU);
		assert_int_equal(u_.core->ix.blocks.used, 0);
		stage_end();
	}
}

KV_TEST(p2_durable_reports_how_many_blocks_are_on_disk)
{
	const u_notice_t *notice;

	stage_window(64, 4);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 8, 1, &put_, &started_), KV_OK);
	put_end(&put_);
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

/* ---- many ------------------------------------------------------------------------------------ */

/* A step that walked the root's children would make this take minutes. */
KV_TEST(p10_fifty_thousand_blocks_at_the_root_cost_no_more_each)
{
	enum { MANY = 50000 };
	static kv_key_t many[MANY];

	stage_in(&(u_config_t){.cpu_slots = MANY, .disk_slots = MANY, .max_blocks = 2 * MANY});
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
	while (u_.core->ix.queue.head != KVD_NONE || u_.core->writes > 0) {
		u_tick(&u_, 1);
	}
	u_evict(&u_, KV_TIER_CPU, MANY / 2);
	universe_check(&u_);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_PENDING);
	while (u_.core->dead_trees != KVD_NONE) {
		u_tick(&u_, 1);
	}
	assert_int_equal(u_.core->ix.blocks.used, 0);
	universe_check(&u_);
	universe_fini(&u_);
}

/* ---- sizes of their own ------------------------------------------------------------------------ */

static void stage_uneven(void)
{
	universe_init(&u_, &(u_config_t){.cpu_slots = 32, .disk_slots = 32}, NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	u_.uneven = 1;
	space_ = u_space(&u_, 0, "model");
	stage_keys();
}

/* Four blocks in a group, and what a lease on them is charged. */
static uint64_t charge(uint32_t group)
{
	const kvd_instance_rec_t *instance;

	u_.group = group;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &reply_), KV_OK);
	assert_int_equal(reply_.n, 4);
	instance = kvd_instance_at(u_.core, kvd_member_find(u_.core, m_->id)->instance);
	const uint64_t bytes = instance->pinned_bytes[KVD_HOST_MEM];
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);

	return bytes;
}

KV_TEST(p6_blocks_of_a_group_are_charged_their_own_size)
{
	stage_uneven();
	for (uint32_t group = 0; group < 2; group++) {
		u_.group = group;
		put_settled(0, 4);
	}
	assert_int_equal(charge(0), 4 * 4096);
	assert_int_equal(charge(1), 4 * 8192);
	universe_check(&u_);
	stage_end();
}

/* Four blocks in each of two groups, on disk, and another daemon. */
static void restart_uneven(int uneven)
{
	fake_tier_t disk;

	stage_uneven();
	for (uint32_t group = 0; group < 2; group++) {
		u_.group = group;
		put_settled(0, 4);
	}
	universe_kill(&u_, &disk);
	universe_init(&u_, &(u_config_t){.cpu_slots = 32, .disk_slots = 32}, &disk);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	u_.uneven = uneven;
	space_ = u_space(&u_, 0, "model");
}

KV_TEST(p2_groups_with_blocks_of_other_sizes_are_found_after_a_restart)
{
	restart_uneven(1);
	for (uint32_t group = 0; group < 2; group++) {
		u_.group = group;
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &reply_), KV_OK);
		assert_int_equal(reply_.n, 4);
		assert_int_equal(reply_.n_disk, 4);
		u_settle(&u_);
		assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	}
	assert_int_equal(charge(0), 4 * 4096);
	assert_int_equal(charge(1), 4 * 8192);
	universe_check(&u_);
	stage_end();
}

/* One group's blocks have another size than those of that name on disk. */
KV_TEST(p1_blocks_of_another_size_are_not_found)
{
	restart_uneven(0);
	for (uint32_t group = 0; group < 2; group++) {
		u_.group = group;
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 4), 0);
	}
	universe_check(&u_);
	stage_end();
}

KV_TEST(p4_status_names_the_groups_of_a_space)
{
	static char json[65536];

	stage_uneven();
	kvd_core_status_json(u_.core, 0, 1, json, sizeof json);
	assert_non_null(strstr(json, "{\"group\":1,\"rule\":\"window\",\"block_tokens\":16,\"block_bytes\":8192,"
				     "\"window\":63}"));
	assert_non_null(strstr(json, "{\"group\":2,\"rule\":\"state\",\"block_tokens\":32,\"block_bytes\":4096}"));
	assert_non_null(strstr(json, "{\"group\":5,\"rule\":\"full\",\"block_tokens\":16,\"block_bytes\":8192}"));
	stage_end();
}
