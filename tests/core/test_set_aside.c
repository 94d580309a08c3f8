/* Blocks that the disk cannot read for a while (decision 032): hidden with all below them, kept, and back as they
 * were. */
#include "stage.h"

static u_lease_t lease_;
static u_put_t put_;
static kv_msg_acquire_reply_t got_;
static kv_msg_put_start_reply_t reply_;

static uint32_t block_of(uint32_t i)
{
	uint32_t tree = u_.core->ns[0]->numbers[space_.space]->tree;
	uint32_t id = kvd_index_find(&u_.core->ix, tree, &keys_[i], 0);

	return id != KVD_NONE ? id : kvd_index_find_aside(&u_.core->ix, tree, &keys_[i], 0);
}

static kv_slot_t disk_slot(uint32_t i)
{
	return kvd_block_at(&u_.core->ix, block_of(i))->disk.slot;
}

/* n blocks that are on disk only. */
static void stage_on_disk(uint32_t n)
{
	stage(64, 64);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, n), n);
	u_settle(&u_);
	u_evict(&u_, KV_TIER_CPU, n);
}

/* How many of the first 8 blocks requests find, and the mirror says, from the first on; all that are stored behind them
 * are said to be unreadable. */
static uint32_t shown(void)
{
	uint8_t tiers[8];
	uint32_t n, why;

	u_settle(&u_);
	n = u_visible(&u_, 0, &space_, keys_, 8);
	why = u_explain(&u_, 0, &space_, keys_, 8, tiers);
	for (uint32_t i = 0; i < 8; i++) {
		int hidden = i >= n && tiers[i] != 0;

		assert_int_equal(tiers[i] & KV_TIER_UNREADABLE, hidden ? KV_TIER_UNREADABLE : 0);
		assert_int_equal(tiers[i] & KV_TIER_DISK, hidden ? KV_TIER_DISK : tiers[i] & KV_TIER_DISK);
		assert_int_equal(u_mirror_tiers(&u_, 0, &keys_[i]), hidden ? KV_TIER_UNREADABLE : tiers[i]);
	}
	assert_true(n == 8 ? why == KV_WHY_NONE : why != KV_WHY_NONE && (why == KV_WHY_UNREADABLE) == (tiers[n] != 0));
	universe_check(&u_);

	return n;
}

/* A block in memory is served from there. It is hidden when it has left memory. */
STAGE_TEST(p3_a_block_in_memory_does_not_need_its_disk_copy, stage(64, 64))
{
	put_settled(0, 8);
	fake_set_readable(&u_.disk, disk_slot(3), 0);
	assert_int_equal(shown(), 8);
	for (uint32_t i = 0; i < 8; i++) {
		assert_int_equal(shown(), i <= 4 ? 8 : 3);
		assert_int_equal(kvd_core_evict_one(u_.core, KV_TIER_CPU), KV_OK);
	}
	fake_set_readable(&u_.disk, disk_slot(3), 1);
	assert_int_equal(shown(), 8);
}

/* An engine that computes the block again heals it: the blocks below it are visible again at once. */
KV_TEST(p3_a_new_put_heals_a_block_that_cannot_be_read)
{
	for (uint32_t through = 0; through < 2; through++) {
		stage_on_disk(8);
		if (!through) {
			assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 3, 0, &lease_, &got_), KV_OK);
			u_settle(&u_);
			assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
		}
		fake_set_readable(&u_.disk, disk_slot(3), 0);
		assert_int_equal(shown(), 3);
		assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 3, 6, 0, &put_, &reply_), KV_OK);
		assert_int_equal(reply_.already, 0);
		u_put_write(&u_, &put_);
		assert_int_equal(u_put_end(&u_, m_, &put_, 0, 3), KV_OK);
		u_settle(&u_);
		assert_int_equal(shown(), 8);
		assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.n, 3);
		assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 0, &lease_, &got_), KV_OK);
		u_settle(&u_);
		assert_int_equal(got_.n, 8);
		u_lease_verify(&u_, &lease_);
		assert_int_equal(u_.disk.used, 8);
		stage_end();
	}
}

/* A put below a block that has been set aside ends, and is refused, with this reason: its engine has the blocks above,
 * and puts them again. */
STAGE_TEST(p3_a_put_below_a_hidden_block_ends_as_parent_unreadable, stage_on_disk(4))
{
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 4, 6, 0, &put_, &reply_), KV_OK);
	u_put_write(&u_, &put_);
	fake_set_readable(&u_.disk, disk_slot(1), 0);
	assert_int_equal(u_put_end(&u_, m_, &put_, 0, 2), KV_OK);
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_PUT_DONE, put_.id)->msg.put_done.status, KV_ERR_PARENT_UNREADABLE);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 4, 6, 0, &put_, &reply_), KV_ERR_PARENT_UNREADABLE);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_PARENT_UNREADABLE), 2);
	fake_set_readable(&u_.disk, disk_slot(1), 1);
	(void)u_put(&u_, m_, &space_, keys_, 4, 6);
	assert_int_equal(shown(), 6);
}

/* The lease whose read failed ends above it; one that reads blocks below it only goes on. */
STAGE_TEST(p3_leases_keep_what_they_can_read, stage_on_disk(8))
{
	u_lease_t below;
	kv_msg_acquire_reply_t reply;

	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 4, &below, &reply), KV_OK);
	u_.disk.hold = 1;
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 0, &lease_, &got_), KV_OK);
	u_tick(&u_, 2);
	fake_set_readable(&u_.disk, disk_slot(2), 0); /* while it is being read */
	u_.disk.hold = 0;
	u_settle(&u_);
	assert_int_equal(u_find_notice(&u_, KV_CODE_LEASE_DONE, lease_.id)->msg.lease_done.status, KV_ERR_IO);
	assert_int_equal(u_header(m_, lease_.offset)->n, 2);
	assert_int_equal(u_header(m_, below.offset)->ready, 8);
	u_lease_verify(&u_, &lease_);
	u_lease_verify(&u_, &below);
	assert_int_equal(shown(), 2);
}

/* One word of the mirror says that a device reads nothing. */
STAGE_TEST(p3_nothing_on_disk_is_matched_while_the_tier_is_off, stage_on_disk(8))
{
	const kv_mirror_header_t *header;
	uint8_t tiers[8];

	header = u_.mirror[0];
	assert_int_equal(header->unreadable, 0);
	u_.disk.dark = 1;
	u_tick(&u_, 1);
	assert_int_equal(header->unreadable, KV_TIER_DISK);
	assert_int_equal(u_explain(&u_, 0, &space_, keys_, 8, tiers), KV_WHY_UNREADABLE);
	assert_int_equal(tiers[0], KV_TIER_DISK | KV_TIER_UNREADABLE);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 8, 0, &lease_, &got_), KV_OK);
	assert_int_equal(got_.n, 0);
	u_.disk.dark = 0;
	u_tick(&u_, 1);
	assert_int_equal(header->unreadable, 0);
}
