/* What was used last, before a restart and after it: two worlds with the same requests evict in the same order, and one
 * of them was restarted in between (decision 069). */
#include "universe.h"

#define CHAINS 12u
#define DEPTH  8u
#define SLOTS  (CHAINS * DEPTH)
#define ROUNDS 40u

typedef struct story {
	universe_t u;
	fake_tier_t disk, gpu;
	u_config_t config;
	kv_tier_t tier, bit; /* that the order is of, and as EXPLAIN names it */
	u_member_t *member;
	kvd_space_info_t space;
	kv_key_t keys[CHAINS][DEPTH];
	kv_test_rng_t rng;
	uint32_t evicted[SLOTS]; /* chain of each block, in the order of eviction */
	uint32_t count;
} story_t;

static void enter(story_t *s)
{
	universe_init(&s->u, &s->config, s->disk.cap > 0 ? &s->disk : NULL);
	s->u.memory = s->tier == KV_TIER_CPU ? 1 : 0;
	s->member = u_join(&s->u, 0, "engine", 2, 0);
	s->space = u_space(&s->u, 0, "model");
}

static void restart(story_t *s)
{
	u_settle(&s->u);
	universe_kill(&s->u, &s->disk);
	enter(s);
	u_settle(&s->u);
	universe_check(&s->u);
}

/* Chains share the first blocks of the chain with half their number. */
static void put_chains(story_t *s)
{
	for (uint32_t c = 0; c < CHAINS; c++) {
		const uint32_t shared = c == 0 ? 0 : 3;

		memcpy(s->keys[c], s->keys[c / 2], sizeof s->keys[c]);
		u_chain(shared ? &s->keys[c][shared - 1] : NULL, 100 + c, &s->keys[c][shared], DEPTH - shared);
		assert_int_equal(u_put(&s->u, s->member, &s->space, s->keys[c], 0, DEPTH), DEPTH);
		u_settle(&s->u);
	}
}

static void use_some(story_t *s, uint32_t rounds)
{
	for (uint32_t i = 0; i < rounds; i++) {
		const uint32_t c = (uint32_t)kv_test_below(&s->rng, CHAINS);
		const uint32_t n = 1 + (uint32_t)kv_test_below(&s->rng, DEPTH);
		kv_msg_acquire_reply_t reply;
		u_lease_t lease;

		assert_int_equal(u_acquire(&s->u, s->member, &s->space, s->keys[c], n, 0, &lease, &reply), KV_OK);
		u_settle(&s->u);
		assert_int_equal(u_release(&s->u, s->member, lease.id), KV_OK);
	}
	u_settle(&s->u);
}

static uint32_t depth_in_tier(story_t *s, uint32_t c)
{
	uint8_t tiers[DEPTH];
	uint32_t n = 0;

	u_explain(&s->u, 0, &s->space, s->keys[c], DEPTH, tiers);
	while (n < DEPTH && (tiers[n] & s->bit)) {
		n++;
	}

	return n;
}

/* Block by block: the first chain that is shorter then. A set stays prefix-closed, so its length says which block. */
static void evict_all(story_t *s)
{
	uint32_t depth[CHAINS], sum;

	s->count = 0;
	do {
		sum = 0;
		for (uint32_t c = 0; c < CHAINS; c++) {
			depth[c] = depth_in_tier(s, c);
			sum += depth[c];
		}
		if (sum == 0) {
			break;
		}
		assert_int_equal(kvd_core_evict_one(s->u.core, s->tier), KV_OK);
		universe_check(&s->u);
		for (uint32_t c = 0; c < CHAINS; c++) {
			if (depth_in_tier(s, c) != depth[c]) {
				assert_int_equal(depth_in_tier(s, c), depth[c] - 1);
				s->evicted[s->count++] = c;
				break;
			}
		}
	} while (1);
}

static void play(story_t *s, kv_tier_t tier, kvd_policy_kind_t policy, uint32_t restarts)
{
	memset(s, 0, sizeof *s);
	s->tier = tier;
	s->bit = tier == KV_TIER_CPU ? KV_TIER_GPU : tier;
	s->rng.state = kv_test_seed();
	s->config = (u_config_t){.cpu_slots = SLOTS,
				 .gpu_slots = SLOTS,
				 .gpu = &s->gpu,
				 .disk_slots = SLOTS,
				 .max_blocks = 512,
				 .policy = policy};
	enter(s);
	put_chains(s);
	for (uint32_t i = 0; i < restarts; i++) {
		use_some(s, ROUNDS);
		restart(s);
	}
	use_some(s, (restarts ? 0 : 3) * ROUNDS);
	evict_all(s);
	universe_leave(&s->u);
	universe_fini(&s->u);
	fake_tier_fini(&s->gpu);
}

static void order_survives(kv_tier_t tier, kvd_policy_kind_t policy)
{
	static story_t plain, restarted;

	play(&plain, tier, policy, 0);
	play(&restarted, tier, policy, 3);
	assert_int_equal(restarted.count, plain.count);
	assert_true(plain.count > CHAINS);
	assert_memory_equal(restarted.evicted, plain.evicted, plain.count * sizeof *plain.evicted);
}

KV_TEST(p2_the_disk_evicts_in_the_same_order_after_a_restart)
{
	order_survives(KV_TIER_DISK, KVD_POLICY_LRU);
	order_survives(KV_TIER_DISK, KVD_POLICY_FIFO);
}

KV_TEST(p2_adopted_memory_is_evicted_in_the_same_order_after_a_restart)
{
	order_survives(KV_TIER_CPU, KVD_POLICY_LRU);
	order_survives(KV_TIER_CPU, KVD_POLICY_FIFO);
}
