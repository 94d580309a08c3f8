/* A block's way through the core, step by step. */
#include "universe.h"

static universe_t u_;
static kvd_space_info_t space_;
static u_member_t *m_;
static kv_key_t keys_[512];

static void begin_life(uint32_t cpu, uint32_t disk)
{
	universe_init(&u_,
		      &(u_config_t){.cpu_slots = cpu, .disk_slots = disk, .max_blocks = 4096, .seed = kv_test_seed()},
		      NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	u_chain(NULL, 1, keys_, 512);
}

static void end_life(void)
{
	universe_check(&u_);
	universe_fini(&u_);
}

KV_TEST(p1_what_was_put_is_leased_with_its_bytes)
{
	kv_msg_acquire_reply_t reply;
	static u_lease_t lease;

	begin_life(64, 0);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 40), 40);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 50), 40);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[39]), KV_TIER_CPU);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[40]), 0);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 40, 3, &lease, &reply), KV_OK);
	assert_int_equal(reply.n, 40);
	assert_int_equal(reply.ready, 40);
	assert_true(u_lease_alive(&lease));
	u_lease_verify(&u_, &lease);
	universe_check(&u_);
	assert_int_equal(u_release(&u_, m_, lease.id), KV_OK);
	assert_false(u_lease_alive(&lease));
	assert_int_equal(u_release(&u_, m_, lease.id), KV_ERR_NOT_FOUND);
	end_life();
}

KV_TEST(p5_a_full_tier_evicts_the_least_recently_used_leaf_first)
{
	kv_key_t other[64];

	begin_life(64, 0);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 40), 40);
	u_chain(NULL, 2, other, 64);
	assert_int_equal(u_put(&u_, m_, &space_, other, 0, 40), 40);
	universe_check(&u_);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 40), 24);
	assert_int_equal(u_visible(&u_, 0, &space_, other, 40), 40);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 24, 30), 6);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 40), 30);
	assert_int_equal(u_visible(&u_, 0, &space_, other, 40), 34);
	end_life();
}

KV_TEST(p2_blocks_come_back_from_disk_after_the_daemon_died)
{
	kv_msg_acquire_reply_t reply;
	kv_msg_put_start_reply_t start;
	static u_lease_t lease;
	static u_put_t put;
	fake_tier_t disk;

	begin_life(64, 256);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 40, 1, &put, &start), KV_OK);
	u_put_write(&u_, &put);
	assert_int_equal(u_put_end(&u_, m_, &put, 0, 40), KV_OK);
	u_settle(&u_);
	assert_int_equal(u_count_notices(&u_, KV_CODE_PUT_DONE, put.id), 1);
	assert_int_equal(u_count_notices(&u_, KV_CODE_DURABLE, put.id), 1);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put.id)->msg.durable.n, 40);
	assert_int_equal(u_find_notice(&u_, KV_CODE_DURABLE, put.id)->msg.durable.status, KV_OK);
	universe_check(&u_);
	universe_kill(&u_, &disk);

	universe_init(&u_, &(u_config_t){.cpu_slots = 64, .max_blocks = 4096, .seed = 3}, &disk);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	u_settle(&u_);
	universe_check(&u_);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[39]), KV_TIER_DISK);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 40, 0, &lease, &reply), KV_OK);
	assert_int_equal(reply.n, 40);
	assert_int_equal(reply.n_disk, 40);
	assert_int_equal(reply.ready, 0);
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease.id)->msg.lease_done.ready, 40);
	assert_int_equal(u_header(m_, lease.offset)->ready, 40);
	u_lease_verify(&u_, &lease);
	assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[39]), KV_TIER_DISK | KV_TIER_CPU);
	end_life();
}
