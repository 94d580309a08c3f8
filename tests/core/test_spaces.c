/* Numbers of spaces: given again when nothing names the space, and never with an epoch that the number has had
 * (decision 074). */
#include "handover_stage.h"

#include "core/ends/numbers.h"

#define SPACES    3u /* numbers, of the stages that have few */
#define KEPT      (KVD_SPACES_KEPT * (SPACES + 1u))
#define MANY      200u
#define OLD_EPOCH UINT64_C(7) /* of a store that an older daemon has written */

static fake_tier_t disk_;

static void stage_few_in(uint32_t disk, uint32_t gpu)
{
	u_config_t config = {.cpu_slots = 128, .gpu_slots = gpu, .disk_slots = disk, .max_spaces = SPACES + 1};

	universe_init(&u_, &config, NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	d_ = u_join(&u_, 0, "decode", 2, 0);
	sent_ = (kv_msg_handover_send_reply_t){0};
	stage_keys();
}

static void stage_few(uint32_t disk)
{
	stage_few_in(disk, 0);
}

static kv_status_t open_one(const u_member_t *m, uint32_t i, kvd_space_info_t *p_space)
{
	char name[16];

	snprintf(name, sizeof name, "adapter %u", i);

	return u_open(&u_, 0, m, name, 0, p_space);
}

/* Is a request with this number and epoch refused as one of before? */
static int is_stale(const kvd_space_info_t *space)
{
	kv_msg_t reply, ask = {.explain = {.space = space->space,
					   .epoch = space->epoch,
					   .keys = {(const uint8_t *)keys_, KV_KEY_BYTES}}};
	kv_status_t status = u_request(&u_, m_, KV_CODE_EXPLAIN, &ask, &reply);

	assert_true(status == KV_OK || status == KV_ERR_STALE_EPOCH);
	assert_int_equal(status == KV_OK,
			 u_.core->ns[0]->mirror.epochs[space->space] == space->epoch); /* as readers see it */

	return status == KV_ERR_STALE_EPOCH;
}

/* Nothing but `named` can give its number: with it all are in use, without it the next space gets it. */
static void only_this_is_named(const kvd_space_info_t *named, void (*end)(const kvd_space_info_t *named))
{
	kvd_space_info_t other;

	for (uint32_t i = 1; i < SPACES; i++) {
		assert_int_equal(open_one(d_, 100 + i, &other), KV_OK);
	}
	assert_int_equal(open_one(NULL, 200, &other), KV_ERR_LIMIT);
	assert_false(is_stale(named));
	universe_check(&u_);
	end(named);
	assert_int_equal(open_one(NULL, 200, &other), KV_OK);
	assert_int_equal(other.space, named->space);
	assert_true(is_stale(named));
	universe_check(&u_);
}

STAGE_TEST(p5_more_spaces_are_opened_in_a_life_than_there_are_numbers, stage(256, 256))
{
	kvd_space_info_t spaces[MANY];

	for (uint32_t i = 0; i < MANY; i++) {
		assert_int_equal(open_one(m_, i, &spaces[i]), KV_OK);
		assert_int_equal(u_put(&u_, m_, &spaces[i], keys_, 0, 1), 1);
		assert_int_equal(u_close(&u_, m_, &spaces[i]), KV_OK);
		assert_int_equal(u_close(&u_, m_, &spaces[i]), KV_ERR_NOT_FOUND);
		u_settle(&u_);
	}
	universe_check(&u_);
	for (uint32_t i = 0; i < MANY; i++) { /* each block is where it was, in the epoch of before */
		kvd_space_info_t again;

		assert_int_equal(open_one(NULL, i, &again), KV_OK);
		assert_int_equal(again.epoch, spaces[i].epoch);
		assert_int_equal(u_visible(&u_, 0, &again, keys_, 2), 1);
	}
	assert_true(kv_metric_get(&u_.metrics, KV_M_SPACES_CLOSED) > 2 * (MANY - 64));
}

/* Each is recorded, although there is room for the epochs of eight. Returns the greatest. */
static uint64_t open_many(fake_tier_t *tier)
{
	kvd_space_info_t space;
	uint64_t last = 0;

	tier->root_limit = 8;
	for (uint32_t i = 1; i < MANY; i++) {
		u_settle(&u_);
		kv_test_advance(&u_.env, UINT64_C(10000000000));
		assert_int_equal(open_one(NULL, i, &space), KV_OK);
		assert_int_equal(kvs_epoch_get(&tier->tier, u_.core->ns[0]->numbers[space.space]->root), space.epoch);
		last = space.epoch > last ? space.epoch : last;
	}
	universe_check(&u_);
	assert_true(tier->root_count <= 8);

	return last;
}

/* Of a disk, or of the memory of a GPU. One space has a block. */
static void forget_what_is_empty(fake_tier_t *tier, uint8_t root[32])
{
	kvd_space_info_t kept, other;
	uint64_t last;

	assert_int_equal(open_one(m_, 0, &kept), KV_OK);
	memcpy(root, u_.core->ns[0]->numbers[kept.space]->root, 32);
	assert_int_equal(u_put(&u_, m_, &kept, keys_, 0, 1), 1);
	assert_int_equal(u_close(&u_, m_, &kept), KV_OK);
	last = open_many(tier);
	assert_int_equal(kvs_epoch_get(&tier->tier, root), kept.epoch);
	assert_int_equal(kvs_epoch_last(&tier->tier), last);

	/* When nothing can be forgotten, a space is not recorded. */
	tier->root_limit = 1;
	for (uint32_t i = 0; i < 2; i++) {
		assert_int_equal(open_one(NULL, MANY + i, &other), KV_OK);
	}
	assert_int_equal(kvs_epoch_get(&tier->tier, u_.core->ns[0]->numbers[other.space]->root), 0);
}

STAGE_TEST(p5_a_disk_forgets_spaces_of_which_nothing_remains, stage_few(64))
{
	uint8_t root[32];

	forget_what_is_empty(&u_.disk, root);

	/* Nor is it forgotten before it is opened again. */
	universe_kill(&u_, &disk_);
	universe_init(&u_, &(u_config_t){.cpu_slots = 8, .disk_slots = 64, .max_blocks = 99, .max_spaces = SPACES + 1},
		      &disk_);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	(void)open_many(&u_.disk);
	assert_true(kvs_epoch_get(&u_.disk.tier, root) > 0);
}

STAGE_TEST(p5_the_memory_of_a_gpu_forgets_spaces_of_which_nothing_remains, stage_few_in(0, 64))
{
	uint8_t root[32];

	u_.memory = 1;
	forget_what_is_empty(&u_.gpu, root);
	u_.memory = 0;
}

STAGE_TEST(p1_a_number_never_has_an_epoch_again, stage_few(64))
{
	kvd_space_info_t spaces[3 * SPACES], again;

	for (uint32_t i = 0; i < 3 * SPACES; i++) {
		assert_int_equal(open_one(NULL, i, &spaces[i]), KV_OK);
		for (uint32_t old = 0; old < i; old++) {
			assert_int_not_equal(spaces[old].epoch, spaces[i].epoch);
			assert_int_equal(is_stale(&spaces[old]),
					 spaces[old].space == spaces[i].space || old + SPACES < i);
		}
	}
	assert_int_equal(u_reset(&u_, m_, &spaces[3 * SPACES - 1]), KV_PENDING);
	u_settle(&u_);
	universe_kill(&u_, &disk_);
	universe_init(&u_, &(u_config_t){.cpu_slots = 8, .disk_slots = 64, .max_blocks = 99, .max_spaces = SPACES + 1},
		      &disk_);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	for (uint32_t i = 100; i < 100 + SPACES; i++) {
		assert_int_equal(open_one(NULL, i, &again), KV_OK);
		for (uint32_t old = 0; old < 3 * SPACES; old++) {
			assert_true(again.epoch > spaces[old].epoch + 1);
		}
	}
	assert_int_equal(open_one(NULL, 0, &again), KV_OK);
	assert_int_equal(again.epoch, spaces[0].epoch);
}

static void end_user(const kvd_space_info_t *named)
{
	(void)named;
	u_closed(&u_, m_);
	m_ = d_;
}

STAGE_TEST(p1_a_space_that_a_member_has_open_keeps_its_number, stage_few(0))
{
	assert_int_equal(open_one(m_, 0, &space_), KV_OK);
	assert_int_equal(open_one(m_, 0, &space_), KV_OK); /* twice is once */
	only_this_is_named(&space_, end_user);
}

static u_lease_t lease_;
static u_put_t put_;

static void end_lease(const kvd_space_info_t *named)
{
	(void)named;
	assert_int_equal(u_release(&u_, m_, lease_.id), KV_OK);
}

STAGE_TEST(p1_a_space_with_a_lease_keeps_its_number, stage_few(0))
{
	kv_msg_acquire_reply_t got;

	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 2), 2);
	assert_int_equal(u_acquire(&u_, m_, &space_, keys_, 2, 0, &lease_, &got), KV_OK);
	only_this_is_named(&space_, end_lease);
}

static void end_put(const kvd_space_info_t *named)
{
	uint32_t freed;

	(void)named;
	assert_int_equal(u_put_revoke(&u_, m_, put_.id), KV_OK);
	assert_int_equal(u_quiet(&u_, m_, 0, put_.id, &freed), KV_OK);
}

STAGE_TEST(p1_a_space_with_a_put_keeps_its_number, stage_few(0))
{
	kv_msg_put_start_reply_t reply;

	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	assert_int_equal(u_put_start(&u_, m_, &space_, keys_, 0, 2, 0, &put_, &reply), KV_OK);
	only_this_is_named(&space_, end_put);
}

static void end_handover(const kvd_space_info_t *named)
{
	(void)named;
	assert_int_equal(u_done(&u_, d_, got_.number, KV_HANDOVER_ABORT), KV_OK);
	u_expire_handovers(&u_);
}

STAGE_TEST(p1_a_space_with_a_hand_over_keeps_its_number, stage_few(0))
{
	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	assert_int_equal(u_recv(&u_, d_, &space_, "t", 0, &got_), KV_OK);
	only_this_is_named(&space_, end_handover);
}

static void settle_all(const kvd_space_info_t *named)
{
	(void)named;
	u_settle(&u_);
}

STAGE_TEST(p1_a_space_with_a_withdrawal_keeps_its_number, stage_few(64))
{
	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	put_settled(0, 2);
	assert_int_equal(u_withdraw(&u_, m_, &space_, keys_, 1), KV_PENDING);
	only_this_is_named(&space_, settle_all);
	assert_int_equal(u_.answer_status, KV_OK);
}

STAGE_TEST(p1_a_space_whose_old_epoch_is_taken_down_keeps_its_number, stage_few(0))
{
	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 2), 2);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	space_.epoch = u_.reply.space_reset_reply.epoch;
	only_this_is_named(&space_, settle_all);
}

/* An older daemon gave small epochs, and the same to many spaces. */
STAGE_TEST(p1_a_space_of_an_older_store_keeps_its_number, stage_few(64))
{
	kvd_space_info_t other;

	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	universe_kill(&u_, &disk_);
	disk_.roots[0].epoch = OLD_EPOCH;
	universe_init(&u_, &(u_config_t){.cpu_slots = 8, .disk_slots = 64, .max_blocks = 99, .max_spaces = SPACES + 1},
		      &disk_);
	m_ = d_ = u_join(&u_, 0, "engine", 2, 0);
	assert_int_equal(open_one(NULL, 0, &space_), KV_OK);
	assert_int_equal(space_.epoch, OLD_EPOCH);
	for (uint32_t i = 1; i < 2 * SPACES; i++) {
		assert_int_equal(open_one(NULL, i, &other), KV_OK);
		assert_int_not_equal(other.space, space_.space);
	}
	assert_int_equal(u_reset(&u_, m_, &space_), KV_PENDING);
	space_.epoch = u_.reply.space_reset_reply.epoch;
	only_this_is_named(&space_, settle_all);
}

STAGE_TEST(p5_a_space_without_a_number_is_refused_with_its_reason, stage_few(0))
{
	kvd_space_info_t spaces[SPACES], other;

	for (uint32_t i = 0; i < SPACES; i++) {
		assert_int_equal(open_one(m_, i, &spaces[i]), KV_OK);
	}
	assert_false(kvd_core_lacks_spaces(u_.core, 0));
	assert_int_equal(open_one(d_, 9, &other), KV_ERR_LIMIT);
	assert_int_equal(open_one(d_, 1, &other), KV_OK); /* one that is open needs none */
	assert_true(kvd_core_lacks_spaces(u_.core, 0) && !kvd_core_lacks_spaces(u_.core, 1));
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_SPACES_REFUSED), 1);
	assert_int_equal(u_open(&u_, 1, NULL, "model", 0, &other), KV_OK); /* another tenant's */
	assert_int_equal(u_close(&u_, m_, &spaces[0]), KV_OK);
	assert_int_equal(open_one(d_, 9, &other), KV_OK);
	assert_false(kvd_core_lacks_spaces(u_.core, 0));
}

/* Closed spaces end too: the one that was closed first loses its blocks when there are too many. */
STAGE_TEST(p5_closed_spaces_with_blocks_make_room_for_new_ones, stage_few(0))
{
	kvd_space_info_t spaces[2 * KEPT];

	for (uint32_t i = 0; i < 2 * KEPT; i++) {
		assert_int_equal(open_one(m_, i, &spaces[i]), KV_OK);
		assert_int_equal(u_put(&u_, m_, &spaces[i], keys_, 0, 1), 1);
		assert_int_equal(u_close(&u_, m_, &spaces[i]), KV_OK);
		settle_and_check();
	}
	assert_int_equal(u_.core->ix.blocks.used, KEPT - 1);
	assert_int_equal(open_one(m_, 1000, &space_), KV_OK);
	assert_int_equal(open_one(m_, 1001, &space_), KV_ERR_BUSY); /* without a tick between them */
	u_settle(&u_);
	assert_int_equal(open_one(m_, 1001, &space_), KV_OK);
	assert_int_equal(open_one(NULL, 2 * KEPT - 5, &space_), KV_OK);
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 1), 1);
}

STAGE_TEST(p5_a_space_that_nobody_has_opened_is_not_made_for_a_peer, stage_few(64))
{
	assert_int_equal(u_open(&u_, 0, d_, "adapter 0", 1, &space_), KV_ERR_NOT_FOUND);
	assert_int_equal(open_one(m_, 0, &space_), KV_OK);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 1), 1);
	assert_int_equal(u_open(&u_, 0, d_, "adapter 0", 1, &space_), KV_OK);
	assert_int_equal(u_open(&u_, 1, NULL, "adapter 0", 1, &space_), KV_ERR_NOT_FOUND);
	u_settle(&u_);
	universe_kill(&u_, &disk_);
	universe_init(&u_, &(u_config_t){.cpu_slots = 8, .disk_slots = 64, .max_blocks = 99}, &disk_);
	assert_int_equal(u_open(&u_, 0, NULL, "adapter 0", 1, &space_), KV_OK); /* the disk has it */
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 2), 1);
}
