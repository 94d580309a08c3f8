/* Shares: two namespaces, and one takes all that it can get. */
#include "universe.h"

#define DEPTH 32u
#define BLOCK UINT64_C(4096)

static universe_t u_;
static u_member_t *m_[2];
static kvd_space_info_t space_[2];

static void stage(const u_config_t *config)
{
	universe_init(&u_, config, NULL);
	for (uint32_t i = 0; i < 2; i++) {
		m_[i] = u_join(&u_, i, "engine", 2, 0);
		space_[i] = u_space(&u_, i, "model");
	}
}

static void stage_end(void)
{
	universe_leave(&u_);
	universe_fini(&u_);
}

/* Slots of PUT_STARTs in this memory, of a member who asks for more than there is. */
static uint32_t slots_granted(uint32_t ns, uint32_t memory)
{
	static u_put_t put;
	kv_msg_put_start_reply_t reply = {0};
	kvd_space_info_t space;
	kv_key_t keys[DEPTH];
	char name[16];

	snprintf(name, sizeof name, "gpu %u", memory);
	u_.memory = memory;
	space = u_space(&u_, ns, name);
	u_.memory = 0;
	u_chain(NULL, ns + 1, keys, DEPTH);
	(void)u_put_start(&u_, m_[ns], &space, keys, 0, DEPTH, 0, &put, &reply);

	return reply.n;
}

/* What is kept of one GPU ends at the share of that one, whatever the others have. */
KV_TEST(p5_what_is_kept_of_each_gpu_ends_at_the_share_of_it)
{
	fake_tier_t other;
	uint32_t memory;

	stage(&(u_config_t){.cpu_slots = 8, .gpu_slots = 16, .max_blocks = 999});
	fake_tier_init(&other, 0, 24, kv_test_seed());
	other.device = 1;
	assert_int_equal(kvd_core_add_memory(u_.core, &other.tier, &memory), KV_OK);
	assert_int_equal(memory, 2);
	for (uint32_t ns = 0; ns < 2; ns++) {
		assert_int_equal(kvd_namespace_share(u_.core, u_.ns[ns], &(kvd_parts_t){0}), KV_OK);
	}
	for (uint32_t ns = 0; ns < 2; ns++) {
		assert_int_equal(slots_granted(ns, 1), 8);
		assert_int_equal(slots_granted(ns, 2), 12);
		universe_check(&u_);
	}
	universe_leave(&u_);
	universe_fini(&u_);
	fake_tier_fini(&other);
}

static void chain_of(uint32_t ns, uint32_t c, kv_key_t keys[DEPTH])
{
	u_chain(NULL, 1000 * (ns + 1) + c, keys, DEPTH);
}

/* Chain c of the namespace is put and written to disk. */
static void put_chain(uint32_t ns, uint32_t c)
{
	kv_key_t keys[DEPTH];

	chain_of(ns, c, keys);
	(void)u_put(&u_, m_[ns], &space_[ns], keys, 0, DEPTH);
	u_settle(&u_);
	universe_check(&u_);
}

static uint32_t visible(uint32_t ns, uint32_t c)
{
	kv_key_t keys[DEPTH];

	chain_of(ns, c, keys);

	return u_visible(&u_, ns, &space_[ns], keys, DEPTH);
}

static uint32_t visible_of(uint32_t ns, uint32_t chains)
{
	uint32_t blocks = 0;

	for (uint32_t c = 0; c < chains; c++) {
		blocks += visible(ns, c);
	}

	return blocks;
}

static kv_status_t acquire(uint32_t ns, uint32_t c, uint32_t n, uint32_t skip, u_lease_t *lease,
			   kv_msg_acquire_reply_t *reply)
{
	kv_key_t keys[DEPTH];

	chain_of(ns, c, keys);

	return u_acquire(&u_, m_[ns], &space_[ns], keys, n, skip, lease, reply);
}

/* ---- the index ------------------------------------------------------------------------------- */

/* The promise: an index filled by one namespace admits another, whatever class and tier its blocks are in. */
STAGE_TEST(p5_an_index_full_of_one_namespace_admits_another,
	   stage(&(u_config_t){.cpu_slots = 900,
			       .disk_slots = 900,
			       .max_blocks = 512,
			       .share = {[0] = {0, 0, 256}, [1] = {0, 0, 256}}}))
{
	for (uint32_t c = 0; c < 20; c++) {
		put_chain(0, c);
		for (uint32_t i = 0; i < DEPTH && c % 2; i++) { /* half of them are on disk only */
			(void)kvd_core_evict_one(u_.core, KV_TIER_CPU);
		}
	}
	assert_true(u_.core->ix.blocks.used > 512 - DEPTH); /* what is idle is lent */
	for (uint32_t c = 0; c < 8; c++) {
		put_chain(1, c);
		assert_int_equal(visible(1, c), DEPTH);
	}
	assert_int_equal(visible_of(1, 8), 256);
	/* A namespace within its share keeps it. */
	for (uint32_t c = 20; c < 40; c++) {
		put_chain(0, c);
	}
	assert_int_equal(visible_of(1, 8), 256);
}

/* Of two namespaces over their shares the one that is further over gives its coldest blocks. */
STAGE_TEST(p5_the_namespace_furthest_over_its_share_gives,
	   stage(&(u_config_t){.cpu_slots = 400, .max_blocks = 320, .share = {[0] = {0, 0, 64}, [1] = {0, 0, 128}}}))
{
	for (uint32_t c = 0; c < 5; c++) {
		put_chain(1, c); /* 160, 32 over */
	}
	for (uint32_t c = 0; c < 5; c++) {
		put_chain(0, c); /* 160, 96 over */
	}
	put_chain(1, 5);
	assert_int_equal(visible_of(1, 6), 6 * DEPTH);
	assert_int_equal(visible(0, 0), 0);
	assert_int_equal(visible_of(0, 5), 4 * DEPTH);
	put_chain(1, 6); /* equally far over now: each gives for itself */
	assert_int_equal(visible_of(1, 7), 6 * DEPTH);
	put_chain(0, 5);
	assert_int_equal(visible_of(1, 7), 6 * DEPTH);
	assert_int_equal(visible_of(0, 6), 4 * DEPTH);
}

/* ---- what cannot be reclaimed ---------------------------------------------------------------- */

/* Skipped blocks are pinned like the others, and a block that many leases pin is counted once. */
STAGE_TEST(p5_pins_end_at_the_share_and_count_once,
	   stage(&(u_config_t){
		   .cpu_slots = 300, .max_blocks = 512, .share = {[0] = {100 * BLOCK}, [1] = {100 * BLOCK}}}))
{
	static u_lease_t leases[8];
	kv_msg_acquire_reply_t reply;
	uint32_t pinned = 0;

	for (uint32_t c = 0; c < 8; c++) {
		put_chain(0, c); /* 256 blocks, far over its share */
	}
	for (uint32_t i = 0; i < 8; i++) { /* the same chain: 32 blocks of the share of 100 */
		assert_int_equal(acquire(0, 0, DEPTH, 0, &leases[i], &reply), KV_OK);
		assert_int_equal(reply.n, DEPTH);
	}
	assert_int_equal(kvd_share_irreclaimable(u_.core, u_.ns[0], KVD_HOST_MEM), DEPTH * BLOCK);
	for (uint32_t i = 1; i < 8; i++) {
		assert_int_equal(u_release(&u_, m_[0], leases[i].id), KV_OK);
	}
	for (uint32_t c = 1; c < 8; c++) { /* one block leased of each, all of it pinned */
		kv_status_t status = acquire(0, c, DEPTH, DEPTH - 1, &leases[c], &reply);

		assert_true(status == KV_OK || status == KV_ERR_BUSY);
		pinned += status == KV_OK ? DEPTH : 0;
		universe_check(&u_);
	}
	assert_int_equal(pinned, 2 * DEPTH);
	assert_int_equal(acquire(0, 7, DEPTH, 0, &leases[7], &reply), KV_OK);
	assert_int_equal(reply.n, 100 - 3 * DEPTH);
	assert_int_equal(acquire(0, 0, DEPTH, DEPTH - 1, &leases[6], &reply), KV_OK); /* that is pinned already */
	assert_int_equal(reply.n, DEPTH);
	universe_check(&u_);
	/* The other one has its share. */
	for (uint32_t c = 0; c < 3; c++) {
		put_chain(1, c);
		assert_int_equal(visible(1, c), DEPTH);
	}
}

/* Slots of unfinished puts, those in quarantine too, end at the share, with the parents the puts pin. */
STAGE_TEST(p5_unfinished_and_quarantined_slots_end_at_the_share,
	   stage(&(u_config_t){
		   .cpu_slots = 300, .max_blocks = 512, .share = {[0] = {100 * BLOCK}, [1] = {100 * BLOCK}}}))
{
	kv_msg_put_start_reply_t reply;
	static u_put_t puts[8];
	kv_key_t keys[DEPTH];
	uint32_t slots = 0;

	for (uint32_t c = 0; c < 8; c++) {
		chain_of(0, c, keys);
		if (u_put_start(&u_, m_[0], &space_[0], keys, 0, DEPTH, 0, &puts[c], &reply) == KV_OK) {
			slots += puts[c].n;
			(void)u_put_revoke(&u_, m_[0], puts[c].id); /* and never drained */
		}
		universe_check(&u_);
	}
	assert_int_equal(slots, 100);
	assert_int_equal(kvd_share_irreclaimable(u_.core, u_.ns[0], KVD_HOST_MEM), 100 * BLOCK);
	put_chain(1, 0);
	assert_int_equal(visible(1, 0), DEPTH);
}

/* Half of the share is an instance's. */
STAGE_TEST(p5_an_instance_has_half_of_its_namespaces_share,
	   stage(&(u_config_t){.cpu_slots = 300, .max_blocks = 512, .share = {[0] = {40 * BLOCK}}}))
{
	kv_msg_put_start_reply_t reply;
	kv_msg_acquire_reply_t leased;
	static u_lease_t lease;
	static u_put_t put;
	kv_key_t keys[DEPTH];

	u_.core->config.max_pinned_bytes = u_.core->config.max_unfinished_bytes = 0;
	chain_of(0, 0, keys);
	assert_int_equal(u_put(&u_, m_[0], &space_[0], keys, 0, DEPTH), 20);
	assert_int_equal(acquire(0, 0, 20, 4, &lease, &leased), KV_OK);
	assert_int_equal(leased.n, 20);
	chain_of(0, 1, keys);
	assert_int_equal(u_put_start(&u_, m_[0], &space_[0], keys, 0, DEPTH, 0, &put, &reply), KV_OK);
	assert_int_equal(put.n, 4);
	m_[0] = u_join(&u_, 0, "another", 2, 0);
	chain_of(0, 2, keys);
	assert_int_equal(u_put_start(&u_, m_[0], &space_[0], keys, 0, DEPTH, 0, &put, &reply), KV_OK);
	assert_int_equal(put.n, 16); /* 20 pinned and 4 unfinished of 40 */
}

/* Without a configured share each has an equal part of what is left. */
STAGE_TEST(p5_shares_that_are_not_configured_are_equal,
	   stage(&(u_config_t){.cpu_slots = 300, .disk_slots = 200, .max_blocks = 512}))
{
	const kvd_parts_t none = {0}, some = {.given = {[KVD_SHARE_INDEX] = 100}};

	for (uint32_t n = 0; n < 2; n++) {
		assert_int_equal(kvd_namespace_share(u_.core, u_.ns[n], &none), KV_OK);
	}
	for (uint32_t n = 0; n < 2; n++) {
		assert_int_equal(kvd_share_of(u_.core, u_.ns[n], KVD_SHARE_CPU), 150 * BLOCK);
		assert_int_equal(kvd_share_of(u_.core, u_.ns[n], KVD_SHARE_DISK), 100 * BLOCK);
		assert_int_equal(kvd_share_of(u_.core, u_.ns[n], KVD_SHARE_INDEX), 256);
	}
	assert_int_equal(kvd_namespace_share(u_.core, u_.ns[1], &some), KV_OK);
	assert_int_equal(kvd_share_of(u_.core, u_.ns[0], KVD_SHARE_INDEX), 412);
	assert_int_equal(kvd_share_of(u_.core, u_.ns[1], KVD_SHARE_INDEX), 100);
	assert_int_equal(kvd_share_of(u_.core, u_.ns[1], KVD_SHARE_CPU), 150 * BLOCK);
	assert_int_equal(kvd_namespace_share(u_.core, 7, &some), KV_ERR_ARG);
}

/* A disk that has more blocks than the index has room for: each namespace has its share back, and what one leaves idle
 * is the other's. */
static void recovery(uint32_t chains, uint32_t own, uint32_t others)
{
	u_config_t config = {.cpu_slots = 900,
			     .disk_slots = 900,
			     .max_blocks = 1024,
			     .share = {[0] = {0, 0, 512}, [1] = {0, 0, 512}}};
	fake_tier_t disk;

	stage(&config);
	for (uint32_t c = 0; c < 12; c++) {
		put_chain(0, c);
	}
	for (uint32_t c = 0; c < chains; c++) {
		put_chain(1, c);
	}
	universe_kill(&u_, &disk);
	config.max_blocks = 256;
	config.share[0][KVD_SHARE_INDEX] = config.share[1][KVD_SHARE_INDEX] = 128;
	universe_init(&u_, &config, &disk);
	for (uint32_t i = 0; i < 2; i++) {
		m_[i] = u_join(&u_, i, "engine", 2, 0);
		space_[i] = u_space(&u_, i, "model");
	}
	u_settle(&u_);
	assert_int_equal(kvd_share_used(u_.core, u_.ns[0], KVD_SHARE_INDEX), others);
	assert_int_equal(visible_of(0, 12), others);
	assert_int_equal(visible_of(1, chains), own);
	stage_end();
}

KV_TEST(p2_recovery_gives_each_namespace_its_share_of_a_small_index)
{
	recovery(4, 128, 128);
	recovery(2, 64, 192);
	recovery(8, 128, 128);
}

/* A maximum ends what is borrowed, in the index and on both tiers, while others leave all of it idle; and a share is
 * never more. */
KV_TEST(p5_a_maximum_ends_what_a_namespace_borrows)
{
	const u_config_t config = {.cpu_slots = 400,
				   .disk_slots = 200,
				   .disk_file_slots = 10,
				   .max_blocks = 512,
				   .share = {[1] = {[KVD_SHARE_INDEX] = 64}},
				   .max = {[0] = {120 * BLOCK, 55 * BLOCK, 100}}};

	stage(&config);
	for (uint32_t c = 0; c < 8; c++) {
		put_chain(0, c);
		assert_true(visible(0, c) > 0); /* its own oldest blocks go */
	}
	assert_int_equal(kvd_share_used(u_.core, u_.ns[0], KVD_SHARE_DISK), 50 * BLOCK); /* whole files */
	assert_int_equal(kvd_share_used(u_.core, u_.ns[0], KVD_SHARE_INDEX), 100);
	assert_int_equal(visible_of(0, 8), 100);
	for (uint32_t c = 0; c < 8; c++) {
		put_chain(1, c);
	}
	assert_int_equal(visible_of(1, 8), 8 * DEPTH);
	put_chain(0, 8); /* also while the other one is further over its share */
	assert_int_equal(visible_of(1, 8), 8 * DEPTH);
	for (kvd_resource_t what = 0; what <= KVD_SHARE_INDEX; what++) {
		assert_int_equal(kvd_share_of(u_.core, u_.ns[0], what), config.max[0][what]);
	}
	stage_end();
}

/* ---- memory that is lent --------------------------------------------------------------------- */

#define SLAB  (128u << 10)
#define SLABS 8u

/* A real pool: SLABS slabs of one chain of DEPTH blocks each, half of them each namespace's share. */
static void stage_pool(void)
{
	u_config_t config = {0};

	config.pool = (kvs_pool_config_t){
		.limit_bytes = 24576u + SLABS * (SLAB + 12288u), .slab_bytes = SLAB, .huge = KVS_HUGE_OFF};
	config.share[0][KVD_SHARE_CPU] = config.share[1][KVD_SHARE_CPU] = config.pool.limit_bytes / 2;
	universe_init(&u_, &config, NULL);
	m_[0] = u_join(&u_, 0, "engine", 2, 0);
	space_[0] = u_space(&u_, 0, "model");
}

/* The host: no member maps a retired slab. */
static void tick_times(uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		u_tick(&u_, 10);
		for (uint32_t s = 0; s < kvs_pool_slab_count(u_.pool); s++) {
			kvs_slab_info_t info;

			if (kvs_pool_slab(u_.pool, s, &info) == KV_OK && info.retired) {
				assert_int_equal(kvs_pool_release(u_.pool, s, 1), KV_OK);
			}
		}
	}
}

static void other_comes(void)
{
	m_[1] = u_join(&u_, 1, "engine", 2, 0);
	space_[1] = u_space(&u_, 1, "model");
	tick_times(40);
}

/* Everything of the namespace is asked for all the time: no age would make it give. */
static void heat(uint32_t ns, uint32_t chains)
{
	kv_msg_acquire_reply_t reply;
	static u_lease_t lease;

	for (uint32_t i = 0; i < 20 * chains; i++) {
		uint32_t n = visible(ns, i % chains);

		if (n > 0) {
			assert_int_equal(acquire(ns, i % chains, n, 0, &lease, &reply), KV_OK);
			u_lease_verify(&u_, &lease);
			assert_int_equal(u_release(&u_, m_[ns], lease.id), KV_OK);
		}
	}
}

static uint64_t used(uint32_t ns)
{
	return kvd_share_used(u_.core, u_.ns[ns], KVD_SHARE_CPU);
}

static void fill(uint32_t ns, uint32_t chains)
{
	for (uint32_t round = 0; round < 3; round++) {
		for (uint32_t c = 0; c < chains; c++) {
			put_chain(ns, c);
			tick_times(12);
		}
	}
}

static void pool_end(void)
{
	tick_times(5);
	stage_end();
}

KV_TEST(p5_borrowed_memory_returns_to_its_owner)
{
	const kvd_parts_t smaller = {.given = {[KVD_SHARE_CPU] = 2 * SLAB}};
	uint64_t moved;

	stage_pool();
	fill(0, SLABS);
	assert_int_equal(used(0), SLABS * SLAB); /* what is idle is lent */
	heat(0, SLABS);
	other_comes();
	assert_true(used(1) >= SLAB); /* before its first put */
	fill(1, 4);
	assert_int_equal(used(1), 4 * SLAB);
	assert_in_range(visible_of(1, 4), 4 * DEPTH - 4, 4 * DEPTH);

	/* And it stays: the other one gives for itself from now on. */
	heat(0, SLABS);
	fill(0, 3 * SLABS);
	assert_int_equal(used(0), 4 * SLAB);
	assert_in_range(visible_of(1, 4), 4 * DEPTH - 4, 4 * DEPTH);
	heat(1, 4);
	fill(1, SLABS);
	assert_int_equal(used(1), 4 * SLAB);

	/* Equally far over smaller shares: a slab that one took would be the other's next. */
	moved = kv_metric_get(&u_.metrics, KV_M_SLABS_RECLAIMED);
	for (uint32_t n = 0; n < 2; n++) {
		assert_int_equal(kvd_namespace_share(u_.core, u_.ns[n], &smaller), KV_OK);
	}
	fill(0, SLABS);
	fill(1, SLABS);
	assert_int_equal(kv_metric_get(&u_.metrics, KV_M_SLABS_RECLAIMED), moved);
	pool_end();
}

/* Leases do not delay the return of borrowed memory: they end, and a reader sees that before it uses a byte. */
KV_TEST(p5_leases_do_not_delay_the_return_of_borrowed_memory)
{
	static u_lease_t leases[SLABS];
	kv_msg_acquire_reply_t reply;
	uint32_t alive = 0;

	stage_pool();
	fill(0, SLABS);
	for (uint32_t c = 0; c < SLABS; c++) {
		assert_int_equal(acquire(0, c, 16, 0, &leases[c], &reply), KV_OK);
		assert_int_equal(reply.n, 16);
	}
	other_comes();
	fill(1, 4);
	assert_int_equal(used(1), 4 * SLAB);
	for (uint32_t c = 0; c < SLABS; c++) {
		alive += u_lease_alive(&leases[c]) ? 1 : 0;
		u_lease_verify(&u_, &leases[c]);
	}
	assert_in_range(alive, 1, SLABS - 4);
	pool_end();
}

/* Nor do open puts: a slab with one open slot counts whole, so their slabs end at the share. */
KV_TEST(p5_open_puts_do_not_delay_the_return_of_borrowed_memory)
{
	kv_msg_put_start_reply_t reply;
	static u_put_t puts[4 * SLABS];
	kv_key_t keys[DEPTH];
	uint32_t slots = 0;

	stage_pool();
	fill(0, SLABS);
	for (uint32_t c = 0; c < 4 * SLABS; c++) { /* a slot here, a slot there: each is that of the coldest block */
		chain_of(0, 100 + c, keys);
		if (u_put_start(&u_, m_[0], &space_[0], keys, 0, 1, 0, &puts[c], &reply) == KV_OK) {
			slots += puts[c].n;
		}
		heat(0, 1 + c % SLABS);
	}
	assert_true(slots > 0);
	other_comes();
	fill(1, 4);
	assert_int_equal(used(1), 4 * SLAB);
	pool_end();
}

/* ---- the disk -------------------------------------------------------------------------------- */

static uint32_t on_disk(uint32_t ns, const kvd_space_info_t *space, uint32_t c)
{
	uint8_t tiers[DEPTH];
	kv_key_t keys[DEPTH];
	uint32_t n = 0;

	chain_of(ns, c, keys);
	u_explain(&u_, ns, space, keys, DEPTH, tiers);
	while (n < DEPTH && (tiers[n] & KV_TIER_DISK)) {
		n++;
	}

	return n;
}

/* Blocks of a model that was not opened since the start age like others: the next model gets files, and the old one
 * keeps the rest, its hottest. */
KV_TEST(p5_a_disk_full_of_an_unopened_model_takes_the_next_one)
{
	u_config_t config = {.cpu_slots = 600, .disk_slots = 512, .disk_file_slots = 32, .max_blocks = 2048};
	kvd_space_info_t next;
	fake_tier_t disk;
	uint32_t old = 0;

	stage(&config);
	for (uint32_t c = 0; c < 16; c++) {
		put_chain(0, c);
	}
	assert_int_equal(on_disk(0, &space_[0], 15), DEPTH);
	assert_int_equal(u_.disk.free_count, 0);
	universe_kill(&u_, &disk);

	universe_init(&u_, &config, &disk);
	m_[0] = u_join(&u_, 0, "engine", 2, 0);
	u_.block_bytes = 8192;
	next = u_space(&u_, 0, "next model");
	for (uint32_t c = 20; c < 24; c++) {
		kv_key_t keys[DEPTH];

		chain_of(0, c, keys);
		assert_int_equal(u_put(&u_, m_[0], &next, keys, 0, DEPTH), DEPTH);
		u_settle(&u_);
		universe_check(&u_);
		assert_int_equal(on_disk(0, &next, c), DEPTH);
	}
	assert_int_equal(on_disk(0, &next, 20), DEPTH);
	u_.block_bytes = 4096;
	space_[0] = u_space(&u_, 0, "model");
	u_settle(&u_);
	for (uint32_t c = 0; c < 16; c++) {
		old += on_disk(0, &space_[0], c);
	}
	assert_in_range(old, 10 * DEPTH, 12 * DEPTH);
	stage_end();
}

/* A namespace that is no longer configured has a share of 0. */
KV_TEST(p5_blocks_of_a_removed_namespace_are_evicted_first)
{
	u_config_t config = {.cpu_slots = 600, .disk_slots = 256, .disk_file_slots = 32, .max_blocks = 280};
	fake_tier_t disk;

	stage(&config);
	for (uint32_t c = 0; c < 8; c++) {
		put_chain(0, c);
	}
	universe_kill(&u_, &disk);
	strcpy(disk.classes[0].ns, "gone");
	universe_init(&u_, &config, &disk);
	assert_int_equal(u_.core->unowned_blocks, 8 * DEPTH);
	m_[1] = u_join(&u_, 1, "engine", 2, 0);
	space_[1] = u_space(&u_, 1, "model");
	for (uint32_t c = 0; c < 6; c++) {
		put_chain(1, c);
		assert_int_equal(on_disk(1, &space_[1], c), DEPTH);
	}
	assert_int_equal(visible_of(1, 6), 6 * DEPTH);
	assert_true(u_.core->unowned_blocks <= 2 * DEPTH + 24);
	stage_end();
}
