/* Rebalancing of slabs between block sizes: the core over a real pool, with the host's part played here. */
#include "universe.h"

#define SIZES  3u
#define SLAB   (128u << 10)
#define DEPTH  32u
#define CHAINS 24u
#define LEASES 12u
#define PUTS   6u

static universe_t u_;
static u_member_t *m_;
static kvd_space_info_t space_[SIZES];
static const uint32_t size_[SIZES] = {4096, 8192, 16384};
static kv_key_t keys_[SIZES][CHAINS][DEPTH];

/* A limit for this many slabs and their overhead, without room for one more. */
static void stage(uint32_t slabs, uint32_t disk_slots)
{
	u_config_t config = {.disk_slots = disk_slots};

	config.pool = (kvs_pool_config_t){
		.limit_bytes = 24576u + slabs * (SLAB + 12288u), .slab_bytes = SLAB, .huge = KVS_HUGE_OFF};
	universe_init(&u_, &config, NULL);
	m_ = u_join(&u_, 0, "engine", 2, 0);
	for (uint32_t s = 0; s < SIZES; s++) {
		for (uint32_t c = 0; c < CHAINS; c++) {
			u_chain(NULL, 100 * s + c + 1, keys_[s][c], DEPTH);
		}
	}
}

static void open_space(uint32_t s)
{
	static const char *const names[SIZES] = {"small", "middle", "large"};

	u_.block_bytes = size_[s];
	space_[s] = u_space(&u_, 0, names[s]);
}

static uint32_t slabs_of(uint32_t s)
{
	kvs_class_info_t look;

	for (uint32_t i = 0; kvs_pool_class(u_.pool, i, &look) == KV_OK; i++) {
		if (look.block_bytes == size_[s]) {
			return look.slabs;
		}
	}

	return 0;
}

/* The host: no member maps a retired slab. Returns how many slabs have gone. */
static uint32_t release_all(int unmapped)
{
	uint32_t gone = 0;

	for (uint32_t i = 0; i < kvs_pool_slab_count(u_.pool); i++) {
		kvs_slab_info_t info;

		if (kvs_pool_slab(u_.pool, i, &info) == KV_OK && info.retired) {
			assert_int_equal(kvs_pool_release(u_.pool, i, unmapped), KV_OK);
			gone++;
		}
	}

	return gone;
}

static void tick_times(uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		u_tick(&u_, 10);
		(void)release_all(1);
	}
	universe_check(&u_);
}

/* Chain c of size s is put; returns the blocks that are visible then. */
static uint32_t put_chain(uint32_t s, uint32_t c)
{
	(void)u_put(&u_, m_, &space_[s], keys_[s][c], 0, DEPTH);
	universe_check(&u_);

	return u_visible(&u_, 0, &space_[s], keys_[s][c], DEPTH);
}

/* All chains, twice, with time between: what is there in the end. */
static uint32_t fill(uint32_t s)
{
	uint32_t there = 0;

	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t c = 0; c < CHAINS; c++) {
			(void)put_chain(s, c);
			tick_times(12);
		}
	}
	for (uint32_t c = 0; c < CHAINS; c++) {
		there += u_visible(&u_, 0, &space_[s], keys_[s][c], DEPTH);
	}

	return there;
}

static void read_back(uint32_t s)
{
	kv_msg_acquire_reply_t reply;
	static u_lease_t lease;

	for (uint32_t c = 0; c < CHAINS; c++) {
		uint32_t n = u_visible(&u_, 0, &space_[s], keys_[s][c], DEPTH);

		if (n > 0) {
			assert_int_equal(u_acquire(&u_, m_, &space_[s], keys_[s][c], n, 0, &lease, &reply), KV_OK);
			u_lease_verify(&u_, &lease);
			assert_int_equal(u_release(&u_, m_, lease.id), KV_OK);
		}
	}
}

static void stage_end(void)
{
	u_.disk.hold = 0;
	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		if (u_.members[i].id) {
			u_dead(&u_, &u_.members[i]);
		}
	}
	u_settle(&u_);
	(void)release_all(1);
	tick_times(3);
	assert_int_equal(u_.core->pins.used + u_.core->leases.used + u_.core->puts.used + u_.core->ios.used, 0);
	universe_fini(&u_);
}

/* The promise: a pool full of one model's blocks admits the next model, and the first one again when it returns. */
STAGE_TEST(p5_a_second_block_size_gets_memory_from_the_first_and_back, stage(8, 0))
{
	uint32_t whole;

	open_space(0);
	whole = fill(0);
	print_message("# %u slabs, %u blocks\n", slabs_of(0), whole);
	assert_true(slabs_of(0) == 8 && whole >= 8 * 30);
	read_back(0);

	open_space(1);
	assert_int_equal(slabs_of(1), 0);
	tick_times(20);
	assert_true(slabs_of(1) >= 1); /* before its first put */
	assert_int_equal(put_chain(1, 0), slabs_of(1) * (SLAB / size_[1]) >= DEPTH ? DEPTH : 16);
	assert_true(fill(1) >= 4 * 15);
	assert_true(slabs_of(1) >= 5);
	read_back(1);
	read_back(0);

	(void)fill(0);
	assert_true(slabs_of(0) >= 5);
	read_back(0);
	read_back(1);
	assert_true(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED) >= 8);
}

/* The control: the same without rebalancing: the second model gets no slot. */
STAGE_TEST(p5_without_rebalancing_the_second_block_size_has_nothing, stage(8, 0))
{
	open_space(0);
	(void)fill(0);
	u_.core->rebalance[KVD_CPU].next_ns = UINT64_MAX;
	open_space(1);
	assert_int_equal(fill(1), 0);
	assert_int_equal(slabs_of(1), 0);
	u_.core->rebalance[KVD_CPU].next_ns = 0;
	assert_true(fill(1) > 0);
}

/* A chain of the first size is asked for many times. */
static void heat(uint32_t c)
{
	kv_msg_acquire_reply_t reply;
	static u_lease_t lease;

	for (uint32_t i = 0; i < 50; i++) {
		assert_int_equal(u_acquire(&u_, m_, &space_[0], keys_[0][c], DEPTH, 0, &lease, &reply), KV_OK);
		assert_int_equal(u_release(&u_, m_, lease.id), KV_OK);
	}
}

/* The class that gives loses its coldest blocks, and no more than the slab holds. */
STAGE_TEST(p1_blocks_that_are_not_coldest_stay_with_their_bytes, stage(8, 0))
{
	uint32_t before = 0, after = 0, hot = 0;

	open_space(0);
	for (uint32_t c = 0; c < 8; c++) {
		assert_int_equal(put_chain(0, c), DEPTH);
	}
	tick_times(1);
	for (uint32_t c = 0; c < 8; c++) {
		before += u_visible(&u_, 0, &space_[0], keys_[0][c], DEPTH);
	}
	heat(0); /* put first, asked for last */
	heat(1);
	open_space(2);
	tick_times(30);
	assert_true(slabs_of(2) >= 1);
	for (uint32_t c = 0; c < 8; c++) {
		uint32_t there = u_visible(&u_, 0, &space_[0], keys_[0][c], DEPTH);

		after += there;
		hot += c < 2 ? there : 0;
	}
	assert_int_equal(hot, 2 * DEPTH);
	assert_true(before - after <= 33 * (kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED)));
	assert_true(after < before);
	assert_true(kv_metric_get(&u_.metrics, KV_M_BLOCKS_MOVED) > 0);
	read_back(0);
}

/* A slab with leased slots is not picked; when all slabs have some, no slab moves until the leases end. */
STAGE_TEST(p1_no_leased_slot_is_rebalanced, stage(8, 0))
{
	static u_lease_t lease[8];
	kv_msg_acquire_reply_t reply;

	open_space(0);
	for (uint32_t c = 0; c < 8; c++) {
		assert_int_equal(put_chain(0, c), DEPTH);
	}
	tick_times(1);
	for (uint32_t c = 0; c < 8; c++) {
		uint32_t n = u_visible(&u_, 0, &space_[0], keys_[0][c], DEPTH);

		assert_int_equal(u_acquire(&u_, m_, &space_[0], keys_[0][c], n, 0, &lease[c], &reply), KV_OK);
	}
	open_space(1);
	for (uint32_t i = 0; i < 40; i++) {
		(void)put_chain(1, 0);
		tick_times(3);
		for (uint32_t c = 0; c < 8; c++) {
			assert_true(u_lease_alive(&lease[c]));
			u_lease_verify(&u_, &lease[c]);
		}
	}
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED), 0);
	for (uint32_t c = 0; c < 8; c++) {
		assert_int_equal(u_release(&u_, m_, lease[c].id), KV_OK);
	}
	(void)put_chain(1, 0);
	tick_times(40);
	assert_true(put_chain(1, 0) >= 16);
}

/* Nor is one moved that was leased while its slab is emptied: blocks being written to disk hold the slab up. */
STAGE_TEST(p1_no_slot_that_is_leased_meanwhile_moves, stage(2, 128))
{
	static u_lease_t other, lease;
	kv_msg_acquire_reply_t reply;
	uint32_t n;

	open_space(0);
	assert_int_equal(put_chain(0, 0), DEPTH);
	u_settle(&u_);
	assert_int_equal(u_acquire(&u_, m_, &space_[0], keys_[0][0], DEPTH, 0, &other, &reply), KV_OK);
	assert_int_equal(put_chain(0, 1), DEPTH);
	u_.disk.hold = 1;
	tick_times(1);
	open_space(1);
	tick_times(5);
	assert_int_not_equal(u_.core->rebalance[KVD_CPU].slab, KVD_NONE);
	n = u_visible(&u_, 0, &space_[0], keys_[0][1], DEPTH);
	assert_in_range(n, 1, DEPTH - 1);
	assert_int_equal(u_acquire(&u_, m_, &space_[0], keys_[0][1], n, 0, &lease, &reply), KV_OK);
	assert_int_equal(reply.n, n);
	u_.disk.hold = 0;
	assert_int_equal(u_release(&u_, m_, other.id), KV_OK); /* now there is room to move to */
	tick_times(20);
	assert_true(u_lease_alive(&lease));
	u_lease_verify(&u_, &lease);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_BLOCKS_MOVED), 0);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED), 0);
	assert_int_equal(u_release(&u_, m_, lease.id), KV_OK);
	(void)put_chain(1, 0);
	tick_times(40);
	assert_true(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED) > 0);
}

/* Two models in use at the same time: each keeps its slabs, or slabs would go back and forth for ever. */
STAGE_TEST(p5_two_busy_block_sizes_do_not_take_slabs_in_turn, stage(8, 0))
{
	uint64_t settled = 0;

	open_space(0);
	(void)fill(0);
	open_space(1);
	for (uint32_t round = 0; round < 40; round++) {
		if (round == 20) {
			settled = kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED);
		}
		for (uint32_t c = 0; c < CHAINS; c++) {
			(void)put_chain(0, c);
			(void)put_chain(1, (c + round) % CHAINS);
			tick_times(4);
		}
	}
	print_message("# %u and %u slabs, %llu changes, %llu of them late\n", slabs_of(0), slabs_of(1),
		      (unsigned long long)kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED),
		      (unsigned long long)(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED) - settled));
	assert_true(slabs_of(0) >= 2 && slabs_of(1) >= 2);
	assert_true(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED) - settled <= 2);
}

/* A member does not unmap a slab: that one waits, no second one is begun, and all members go on. */
STAGE_TEST(p5_a_member_that_does_not_unmap_delays_one_slab_only, stage(8, 0))
{
	kvs_slab_info_t info;
	uint32_t waiting = 0;

	open_space(0);
	(void)fill(0);
	open_space(1);
	for (uint32_t i = 0; i < 100; i++) {
		(void)put_chain(1, 0);
		(void)put_chain(0, i % CHAINS);
		u_tick(&u_, 10);
		universe_check(&u_);
		waiting = 0;
		for (uint32_t s = 0; s < kvs_pool_slab_count(u_.pool); s++) {
			waiting += kvs_pool_slab(u_.pool, s, &info) == KV_OK && info.retired;
		}
		assert_true(waiting <= 1);
	}
	assert_int_equal(waiting, 1);
	assert_int_equal(u_visible(&u_, 0, &space_[1], keys_[1][0], DEPTH), 0);

	/* Its pages are taken away: the memory is there, the number not yet. */
	assert_int_equal(release_all(0), 1);
	u_tick(&u_, 10);
	universe_check(&u_);
	assert_true(put_chain(1, 0) > 0);
	assert_true(release_all(1) >= 1);
	universe_check(&u_);
	read_back(1);
}

/* A block that a client has overwritten is not moved, and not offered. */
STAGE_TEST(p1_an_overwritten_block_is_not_moved, stage(8, 0))
{
	kvs_slab_info_t info;
	uint32_t there = 0;

	open_space(0);
	for (uint32_t c = 0; c < 8; c++) {
		(void)put_chain(0, c);
	}
	for (uint32_t s = 0; s < kvs_pool_slab_count(u_.pool); s++) {
		assert_int_equal(kvs_pool_slab(u_.pool, s, &info), KV_OK);
		for (uint32_t i = 0; i < info.slots; i += 3) {
			((uint8_t *)info.base)[(uint64_t)i * info.slot_bytes + 2000] ^= 1;
		}
	}
	heat(0);
	open_space(1);
	tick_times(60);
	assert_true(slabs_of(1) >= 1);
	assert_true(kv_metric_get(&u_.metrics, KV_M_BAD_BLOCKS) > 0);
	for (uint32_t c = 0; c < 8; c++) {
		there += u_visible(&u_, 0, &space_[0], keys_[0][c], DEPTH);
	}
	assert_true(there < 8 * DEPTH);
}

/* ---- anything at any moment ------------------------------------------------------------------ */

typedef struct life {
	u_member_t *members[4];
	u_lease_t leases[LEASES];
	u_put_t puts[PUTS];
	uint32_t put_size[PUTS];
} life_t;

static life_t life_;

static uint32_t below(uint32_t n)
{
	return (uint32_t)kv_test_below(&u_.rng, n);
}

/* Leases and puts of a member that has gone. */
static void forget(const u_member_t *m)
{
	for (uint32_t i = 0; i < LEASES; i++) {
		life_.leases[i].id = life_.leases[i].member == m ? 0 : life_.leases[i].id;
	}
	for (uint32_t i = 0; i < PUTS; i++) {
		life_.puts[i].id = life_.puts[i].member == m ? 0 : life_.puts[i].id;
	}
}

static void do_member(uint32_t i)
{
	char name[8] = "one";

	if (life_.members[i] && life_.members[i]->id) {
		forget(life_.members[i]);
		u_dead(&u_, life_.members[i]);
		life_.members[i] = NULL;
	}
	name[0] = (char)('a' + i);
	life_.members[i] = u_join(&u_, 0, name, 2, 0);
}

static void do_put(void)
{
	uint32_t s = below(SIZES), c = below(CHAINS), i = below(PUTS), n = 1 + below(DEPTH);
	u_member_t *m = life_.members[below(4)];
	kv_msg_put_start_reply_t reply;

	if (life_.puts[i].id) {
		u_put_t *put = &life_.puts[i];
		const kv_lease_header_t *header = u_header(put->member, put->offset);

		/* A rank looks before it writes; nothing ends the put meanwhile. */
		if (atomic_load(&header->id) == put->id && atomic_load(&header->state) == KV_LEASE_ACTIVE) {
			u_put_write(&u_, put);
		}
		if (below(4) == 0) {
			(void)u_put_revoke(&u_, put->member, put->id);
		} else {
			(void)u_put_end(&u_, put->member, put, 0, put->n);
		}
		put->id = 0;
		return;
	}
	if (u_put_start(&u_, m, &space_[s], keys_[s][c], 0, n, below(4) == 0, &life_.puts[i], &reply) != KV_OK) {
		life_.puts[i].id = 0;
	}
}

static void do_lease(void)
{
	uint32_t s = below(SIZES), c = below(CHAINS), i = below(LEASES), n = 1 + below(DEPTH);
	kv_msg_acquire_reply_t reply;

	if (life_.leases[i].id) {
		u_lease_verify(&u_, &life_.leases[i]);
		(void)u_release(&u_, life_.leases[i].member, life_.leases[i].id);
		life_.leases[i].id = 0;
		return;
	}
	if (u_acquire(&u_, life_.members[below(4)], &space_[s], keys_[s][c], n, below(n), &life_.leases[i], &reply) !=
	    KV_OK) {
		life_.leases[i].id = 0;
	}
}

static void do_host(void)
{
	for (uint32_t i = 0; i < kvs_pool_slab_count(u_.pool); i++) {
		kvs_slab_info_t info;

		if (below(3) == 0 && kvs_pool_slab(u_.pool, i, &info) == KV_OK && info.retired) {
			assert_int_equal(kvs_pool_release(u_.pool, i, (int)below(2)), KV_OK);
		}
	}
}

static void do_reset(void)
{
	uint32_t s = below(SIZES);
	kv_status_t status = u_reset(&u_, life_.members[0], &space_[s]);

	if (status == KV_OK || status == KV_PENDING) {
		space_[s].epoch = u_.reply.space_reset_reply.epoch;
	}
}

static void do_something_rare(void)
{
	if (below(40) == 0) {
		do_member(below(4));
	} else if (below(60) == 0) {
		do_reset();
	}
}

static void do_tick(void)
{
	u_tick(&u_, 1 + below(40));
}

static void step(void)
{
	static void (*const steps[])(void) = {KV_ROWS(do_host, do_tick, do_tick, do_tick, do_put, do_put, do_put,
						      do_put, do_put, do_put, do_something_rare, do_lease, do_lease,
						      do_lease, do_lease, do_lease)};

	steps[below(KV_COUNT_OF(steps))]();
}

static void run_life(uint32_t disk_slots, uint32_t steps)
{
	stage(6, disk_slots);
	memset(&life_, 0, sizeof life_);
	u_.disk.shuffle = 1;
	for (uint32_t s = 0; s < SIZES; s++) {
		open_space(s);
	}
	for (uint32_t i = 0; i < 4; i++) {
		do_member(i);
	}
	for (uint32_t i = 0; i < steps; i++) {
		u_.disk.fail_percent = disk_slots && i % 1000 > 800 ? 20 : 0;
		step();
		if (i % 3 == 0) {
			universe_check(&u_);
		}
		for (uint32_t l = 0; l < LEASES && i % 8 == 0; l++) {
			u_lease_verify(&u_, &life_.leases[l]);
		}
		u_.notice_count = 0;
	}
	print_message("# %llu changes\n", (unsigned long long)kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED));
	assert_true(kv_metric_get(&u_.metrics, KV_M_SLABS_RETIRED) > 0);
	stage_end();
}

KV_TEST(p4_rebalancing_at_any_moment_loses_and_mixes_nothing)
{
	run_life(0, 5000);
}

KV_TEST(p4_rebalancing_with_a_disk_tier_loses_and_mixes_nothing)
{
	run_life(300, 5000);
}

/* Every allocation fails once during rebalancing. */
KV_TEST(p4_any_allocation_may_fail_during_rebalancing)
{
	for (uint64_t n = 1;; n++) {
		int failed;

		stage(4, 0);
		open_space(0);
		for (uint32_t c = 0; c < 4; c++) {
			(void)put_chain(0, c);
		}
		open_space(1);
		kv_test_fail_nth(&u_.env, n);
		for (uint32_t c = 0; c < 8; c++) {
			(void)put_chain(1, c);
			tick_times(12);
			(void)put_chain(0, c);
		}
		failed = kv_test_failed(&u_.env);
		kv_test_fail_nth(&u_.env, 0);
		kv_test_advance(&u_.env, UINT64_C(2000000000));
		(void)put_chain(1, 9);
		tick_times(30);
		assert_true(put_chain(1, 10) > 0);
		read_back(0);
		read_back(1);
		stage_end();
		if (!failed) {
			assert_true(n > 10);
			break;
		}
	}
}
