/* A disk tier that attaches while requests are served (decision 029): in quanta, and visible as a whole. */
#include "stage.h"

#define CHAINS 8u
#define LONG   400u

static u_lease_t lease_;
static kv_msg_acquire_reply_t got_;
static fake_tier_t disk_;
static kv_key_t old_[CHAINS][LONG];
static uint64_t true_; /* epoch of the disk's blocks */
static const u_config_t config_ = {.cpu_slots = 4096, .disk_slots = CHAINS * LONG, .max_blocks = 16384, .disk_off = 1};

static void keys_at(uint64_t epoch)
{
	u_chain(NULL, epoch * 1000, keys_, 512);
}

/* A disk with CHAINS chains of LONG blocks of the space "model" at epoch `true_`, and a core whose tier is off. */
static void stage_off(void)
{
	u_config_t config = config_;

	config.disk_off = 0;
	universe_init(&u_, &config, NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	true_ = space_.epoch;
	for (uint32_t c = 0; c < CHAINS; c++) {
		u_chain(NULL, 100 + c, old_[c], LONG);
		assert_int_equal(u_put(&u_, m_, &space_, old_[c], 0, LONG), LONG);
		u_settle(&u_);
	}
	universe_kill(&u_, &disk_);
	config.disk_off = 1;
	universe_init(&u_, &config, &disk_);
	m_ = u_join(&u_, 0, "engine", 2, 0);
}

/* Requests of an engine while the tier attaches, in the temporary epoch. */
static void at_work(uint32_t turn)
{
	keys_at(space_.epoch + turn);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 4, 0, &lease_, &got_), KV_OK);
	assert_int_equal(got_.n, 4);
	u_lease_verify(&u_, &lease_);
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
	for (uint32_t c = 0; c < CHAINS; c++) {
		assert_int_equal(u_mirror_tiers(&u_, 0, &old_[c][0]), 0);
		assert_int_equal(u_visible(&u_, 0, &space_, old_[c], 1), 0);
	}
	tick_and_check(1);
}

/* Returns the number of calls that it took. */
static uint32_t take_in(void)
{
	uint32_t turns = 1;
	uint64_t before = u_.core->ix.blocks.used;

	while (kvd_core_take_in(u_.core, &u_.disk.tier) == KV_PENDING) {
		assert_true(u_.core->ix.blocks.used <= before + 256); /* of one call */
		at_work(turns++);
		before = u_.core->ix.blocks.used;
	}

	return turns;
}

static void attach_and_follow(uint64_t epoch)
{
	kvd_core_attach(u_.core);
	assert_int_equal(u_acquire(&u_, m_, &space_, old_[0], 1, 0, &lease_, &got_), KV_ERR_STALE_EPOCH);
	u_settle(&u_);
	space_ = u_space(&u_, 0, "model");
	assert_int_equal(space_.epoch, epoch);
	universe_check(&u_);
}

STAGE_TEST(p5_a_late_tier_is_taken_in_between_requests, stage_off())
{
	space_ = u_space(&u_, 0, "model");
	assert_true(space_.epoch >= UINT64_C(1) << 48);
	assert_int_equal(take_in(), 2 * ((CHAINS * LONG + 255) / 256) - 1); /* first the blocks, then their use */
	attach_and_follow(true_);
	for (uint32_t c = 0; c < CHAINS; c++) {
		assert_int_equal(u_visible(&u_, 0, &space_, old_[c], LONG), LONG);
		assert_int_equal(u_mirror_tiers(&u_, 0, &old_[c][LONG - 1]), KV_TIER_DISK);
	}
	assert_int_equal(u_acquire(&u_, m_, &space_, old_[3], LONG, 0, &lease_, &got_), KV_OK);
	u_settle(&u_);
	assert_int_equal(got_.n, LONG);
	u_lease_verify(&u_, &lease_);
}

/* A space that is opened while its blocks are taken in, and one that was never opened before. */
STAGE_TEST(p3_a_space_opened_while_the_tier_attaches_finds_its_blocks, stage_off())
{
	assert_int_equal(kvd_core_take_in(u_.core, &u_.disk.tier), KV_PENDING);
	space_ = u_space(&u_, 0, "model");
	assert_true(space_.epoch >= UINT64_C(1) << 48);
	assert_true(take_in() > 1);
	attach_and_follow(true_);
	assert_true(u_space(&u_, 0, "new").epoch > true_); /* no epoch of the disk is given again */
	for (uint32_t c = 0; c < CHAINS; c++) {
		assert_int_equal(u_visible(&u_, 0, &space_, old_[c], LONG), LONG);
	}
}

/* The host makes the reset an epoch on disk before it attaches: blocks taken in of the old epoch are never visible. */
STAGE_TEST(p1_a_reset_while_the_tier_attaches_hides_its_blocks, stage_off())
{
	space_ = u_space(&u_, 0, "model");
	assert_int_equal(kvd_core_take_in(u_.core, &u_.disk.tier), KV_PENDING);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	assert_int_equal(u_.resets_noted, 1);
	space_.epoch = u_.reply.space_reset_reply.epoch;
	(void)take_in();
	for (uint32_t i = 0; i < u_.disk.root_count; i++) {
		u_.disk.roots[i].epoch++;
	}
	attach_and_follow(true_ + 1);
	for (uint32_t c = 0; c < CHAINS; c++) {
		assert_int_equal(u_visible(&u_, 0, &space_, old_[c], LONG), 0);
	}
	assert_int_equal(u_.disk.used, 0);
}

/* An index that is too small makes room for what is put meanwhile: blocks taken in leave the disk that is not attached
 * yet. */
STAGE_TEST(p5_index_room_is_made_while_the_tier_attaches, stage_off())
{
	u_config_t config = config_;

	universe_kill(&u_, &disk_);
	config.max_blocks = CHAINS * LONG;
	universe_init(&u_, &config, &disk_);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	space_ = u_space(&u_, 0, "model");
	(void)take_in();
	assert_true(u_.disk.used < CHAINS * LONG);
	attach_and_follow(true_);
}
