/* The index and the order of eviction against plain models: a list of blocks that know their parents, and a list in
 * order of touch. */
#include "kv_cmocka.h"

#include "core/index/index.h"
#include "kv_test.h"
#include "core/index/policy.h"

#define MODEL 600u

typedef struct model {
	kv_key_t key;
	uint32_t parent; /* index in the model; KVD_NONE: root */
	uint32_t depth;
	uint32_t id; /* block */
	int known;
	int in[KVD_TIERS];
	uint64_t touched;
} model_t;

static kv_test_env_t env_;
static kv_metrics_t metrics_;
static kvd_index_t ix_;
static kvd_order_t order_[KVD_TIERS];
static uint32_t tree_;
static model_t model_[MODEL];
static uint64_t clock_;

static void start_index(void)
{
	kv_test_env_init(&env_);
	assert_int_equal(kvd_index_init(&ix_, &env_.env, &metrics_, MODEL), KV_OK);
	assert_int_equal(kvd_tree_create(&ix_, &tree_), KV_OK);
	kvd_order_init(&order_[KVD_CPU]);
	kvd_order_init(&order_[KVD_DISK]);
	memset(model_, 0, sizeof model_);
	clock_ = 1;
}

static void finish_index(void)
{
	kvd_index_fini(&ix_);
	assert_int_equal(kv_test_env_live(&env_), 0);
}

static int has_child(uint32_t m, int t)
{
	for (uint32_t i = 0; i < MODEL; i++) {
		if (model_[i].known && model_[i].parent == m && (t < 0 || model_[i].in[t])) {
			return 1;
		}
	}

	return 0;
}

static kv_status_t model_insert(uint32_t m, uint32_t parent)
{
	kvs_meta_t meta = {0};
	kv_status_t status;

	kv_test_fill(&env_.rng, meta.key.b, sizeof meta.key.b);
	status = kvd_index_insert(&ix_, tree_, parent == KVD_NONE ? KVD_NONE : model_[parent].id, &meta, &model_[m].id);
	if (status == KV_OK) {
		model_[m] = (model_t){.key = meta.key,
				      .parent = parent,
				      .depth = parent == KVD_NONE ? 1 : model_[parent].depth + 1,
				      .id = model_[m].id,
				      .known = 1};
	}

	return status;
}

static void model_join(uint32_t m, kvd_set_t t)
{
	kvd_block_t *block = kvd_block_at(&ix_, model_[m].id);

	kvd_index_join(&ix_, model_[m].id, t);
	kvd_policy_lru.join(&ix_, &order_[t], t, model_[m].id, ++clock_);
	if (t == KVD_CPU) {
		*kvd_slot_of(&ix_, block) = m;
	} else {
		block->disk.slot = m;
	}
	model_[m].in[t] = 1;
}

static void model_leave(uint32_t m, kvd_set_t t)
{
	kvd_block_t *block = kvd_block_at(&ix_, model_[m].id);

	kvd_policy_lru.leave(&ix_, &order_[t], t, model_[m].id);
	kvd_index_leave(&ix_, model_[m].id, t);
	if (t == KVD_CPU) {
		*kvd_slot_of(&ix_, block) = KV_SLOT_NONE;
	} else {
		block->disk.slot = KV_SLOT_NONE;
	}
	model_[m].in[t] = 0;
}

static void random_step(void)
{
	uint32_t m = (uint32_t)kv_test_below(&env_.rng, MODEL), parent = (uint32_t)kv_test_below(&env_.rng, MODEL);
	kvd_set_t t = kv_test_below(&env_.rng, 2) ? KVD_CPU : KVD_DISK;
	model_t *block = &model_[m];

	if (!block->known) {
		while (kv_test_below(&env_.rng, 8) && model_[parent].known && has_child(parent, -1) &&
		       kv_test_below(&env_.rng, 4)) {
			parent = (parent + 1) % MODEL; /* long runs, now and then a branch */
		}
		parent = model_[parent].known ? parent : KVD_NONE;
		if (parent != KVD_NONE || kv_test_below(&env_.rng, 20) == 0) {
			assert_int_equal(model_insert(m, parent), KV_OK);
		}
	} else if (!block->in[t] && (block->parent == KVD_NONE || model_[block->parent].in[t])) {
		assert_true(kvd_index_can_join(&ix_, kvd_block_at(&ix_, block->id), t));
		model_join(m, t);
	} else if (block->in[t] && !has_child(m, (int)t) && kv_test_below(&env_.rng, 3) == 0) {
		assert_true(kvd_index_is_leaf(&ix_, kvd_block_at(&ix_, block->id), t));
		model_leave(m, t);
	} else if (!block->in[KVD_CPU] && !block->in[KVD_DISK] && !has_child(m, -1) && kv_test_below(&env_.rng, 2)) {
		kvd_index_remove(&ix_, block->id);
		block->known = 0;
	}
}

static void compare(void)
{
	char why[128];

	if (!kvd_index_check(&ix_, why, sizeof why)) {
		fail_msg("%s", why);
	}
	for (uint32_t m = 0; m < MODEL; m++) {
		const model_t *block = &model_[m];
		uint32_t depth = block->depth, at = m;

		if (!block->known) {
			continue;
		}
		assert_int_equal(kvd_index_find(&ix_, tree_, &block->key, 0), block->id);
		assert_int_equal(kvd_depth_of(&ix_, kvd_block_at(&ix_, block->id)), depth);
		for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
			assert_int_equal(kvd_in_set(&ix_, kvd_block_at(&ix_, block->id), t), block->in[t]);
			while (at != KVD_NONE && !model_[at].in[t]) {
				at = model_[at].parent;
			}
			assert_int_equal(kvd_index_depth_in(&ix_, block->id, t), at == KVD_NONE ? 0 : model_[at].depth);
			at = m;
		}
		for (; at != KVD_NONE; at = model_[at].parent) {
			assert_int_equal(kvd_index_ancestor(&ix_, block->id, model_[at].depth), model_[at].id);
		}
	}
}

KV_TEST(p3_the_index_equals_a_list_of_blocks_that_know_their_parents)
{
	start_index();
	for (uint32_t i = 0; i < 60000; i++) {
		random_step();
		if (i % 500 == 0) {
			compare();
		}
	}
	compare();
	finish_index();
}

KV_TEST(p3_a_run_splits_and_merges_again)
{
	uint32_t nodes;

	start_index();
	for (uint32_t i = 0; i < 100; i++) {
		assert_int_equal(model_insert(i, i ? i - 1 : KVD_NONE), KV_OK);
		model_join(i, KVD_CPU);
	}
	nodes = ix_.nodes.used;
	assert_int_equal(nodes, 1);
	assert_int_equal(model_insert(100, 40), KV_OK);
	model_join(100, KVD_CPU);
	compare();
	assert_int_equal(ix_.nodes.used, 3);
	model_leave(100, KVD_CPU);
	kvd_index_remove(&ix_, model_[100].id);
	model_[100].known = 0;
	compare();
	assert_int_equal(ix_.nodes.used, 1);
	finish_index();
}

/* The oldest of a plain LRU list, in which a touch moves the whole path, deepest first. */
static uint32_t plain_victim(void)
{
	uint32_t victim = KVD_NONE;

	for (uint32_t m = 0; m < MODEL; m++) {
		const model_t *block = &model_[m];

		if (block->known && (victim == KVD_NONE || block->touched < model_[victim].touched)) {
			victim = m;
		}
	}

	return victim;
}

static void plain_touch(uint32_t m)
{
	uint32_t at = m, depth = model_[m].depth;

	clock_ += MODEL;
	for (; at != KVD_NONE; at = model_[at].parent) {
		model_[at].touched = clock_ + (depth - model_[at].depth);
	}
	clock_ += MODEL;
}

KV_TEST(p5_victims_are_those_of_a_plain_lru_list)
{
	uint32_t known = 0;

	start_index();
	for (uint32_t i = 0; i < 40000; i++) {
		uint32_t m = (uint32_t)kv_test_below(&env_.rng, MODEL);

		if (model_[m].known) {
			kvd_policy_lru.touch(&ix_, &order_[KVD_CPU], KVD_CPU, model_[m].id, ++clock_);
			plain_touch(m);
		} else if (known < MODEL / 2) {
			uint32_t parent = (uint32_t)kv_test_below(&env_.rng, MODEL);

			assert_int_equal(model_insert(m, model_[parent].known ? parent : KVD_NONE), KV_OK);
			model_join(m, KVD_CPU);
			plain_touch(m);
			known++;
		} else {
			uint32_t victim = kvd_policy_lru.victim(&ix_, &order_[KVD_CPU], KVD_CPU),
				 plain = plain_victim();

			assert_int_equal(victim, model_[plain].id);
			model_leave(plain, KVD_CPU);
			kvd_index_remove(&ix_, victim);
			model_[plain].known = 0;
			known--;
		}
	}
	finish_index();
}

KV_TEST(p4_a_failing_allocation_leaves_the_index_as_it_was)
{
	start_index();
	for (uint32_t i = 0; i < 64; i++) {
		assert_int_equal(model_insert(i, i ? i - 1 : KVD_NONE), KV_OK);
		model_join(i, KVD_CPU);
	}
	for (uint32_t round = 0; round < 40; round++) {
		kv_status_t status;
		uint64_t n = 1;

		do { /* each insert into the middle of a run needs several allocations: fail each once */
			kv_test_fail_nth(&env_, n++);
			status = model_insert(100 + round, round);
			kv_test_fail_nth(&env_, 0);
			compare();
		} while (status == KV_ERR_NOMEM);
		assert_int_equal(status, KV_OK);
		model_join(100 + round, KVD_CPU);
	}
	compare();
	finish_index();
}

/* Block `pos` of a path, in memory. */
static uint32_t path_grow(uint32_t parent, uint64_t stamp)
{
	kvs_meta_t meta = {0};
	uint32_t id;

	kv_test_fill(&env_.rng, meta.key.b, sizeof meta.key.b);
	assert_int_equal(kvd_index_insert(&ix_, tree_, parent, &meta, &id), KV_OK);
	kvd_index_join(&ix_, id, KVD_CPU);
	kvd_policy_lru.join(&ix_, &order_[KVD_CPU], KVD_CPU, id, stamp);

	return id;
}

static void path_cut(uint32_t id)
{
	kvd_policy_lru.leave(&ix_, &order_[KVD_CPU], KVD_CPU, id);
	kvd_index_leave(&ix_, id, KVD_CPU);
	kvd_index_remove(&ix_, id);
}

/* A put goes on below a block that a younger request has touched, that the put has pinned and that was therefore passed
 * over; and touches in mid-run elsewhere have used up the marks, so that none is left for the new block. */
KV_TEST(p6_without_memory_for_a_mark_an_off_lru_one_moves_down)
{
	kvd_order_t *order = &order_[KVD_CPU];
	uint32_t path[KVD_RUN_MAX], pinned, below;
	uint64_t stamp = 10;

	kv_test_env_init(&env_);
	assert_int_equal(kvd_index_init(&ix_, &env_.env, &metrics_, UINT64_C(2) * KVD_RUN_MAX), KV_OK);
	assert_int_equal(kvd_tree_create(&ix_, &tree_), KV_OK);
	kvd_order_init(order);
	for (uint32_t i = 0; i < KVD_RUN_MAX; i++) {
		path[i] = path_grow(i > 0 ? path[i - 1] : KVD_NONE, 1);
	}
	pinned = path_grow(KVD_NONE, 5);
	kvd_policy_lru.touch(&ix_, order, KVD_CPU, pinned, stamp);
	kvd_block_at(&ix_, pinned)->refs = kvd_block_at(&ix_, path[KVD_RUN_MAX - 1])->refs = 1;
	assert_int_equal(kvd_policy_lru.victim(&ix_, order, KVD_CPU), KVD_NONE);
	for (uint32_t i = KVD_RUN_MAX - 1; i-- > 0;) {
		kvd_policy_lru.touch(&ix_, order, KVD_CPU, path[i], ++stamp);
	}
	assert_true(KVD_TIERS * (uint64_t)ix_.nodes.used + ix_.extra_marks >= ix_.marks.made);

	below = path_grow(pinned, 5);
	kvd_block_at(&ix_, pinned)->refs = 0;
	kvd_policy_lru.unpin(&ix_, order, KVD_CPU, pinned);
	assert_int_equal(kvd_policy_lru.victim(&ix_, order, KVD_CPU), below);
	path_cut(below);
	assert_int_equal(kvd_policy_lru.victim(&ix_, order, KVD_CPU), pinned);
	path_cut(pinned);
	kvd_block_at(&ix_, path[KVD_RUN_MAX - 1])->refs = 0;
	kvd_policy_lru.unpin(&ix_, order, KVD_CPU, path[KVD_RUN_MAX - 1]);
	for (uint32_t i = KVD_RUN_MAX; i-- > 0;) {
		assert_int_equal(kvd_policy_lru.victim(&ix_, order, KVD_CPU), path[i]);
		path_cut(path[i]);
	}
	assert_int_equal(order->count, 0);
	finish_index();
}
