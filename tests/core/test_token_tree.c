/* The tree of token sequences against a list of them. */
#include "kv_cmocka.h"

#include "core/handover/token_tree.h"
#include "kv_test.h"

#define ITEMS 96u
#define WORDS 200u

typedef struct record {
	uint32_t used;
	kvd_token_item_t item;
	uint32_t words[WORDS];
} record_t;

static kv_test_env_t env_;
static kvd_obj_pool_t records_, nodes_;
static kvd_token_tree_t tree_;

static record_t *record_at(uint32_t id)
{
	return kvd_obj_at(&records_, id);
}

static void make_tree(void)
{
	kv_test_env_init(&env_);
	assert_int_equal(kvd_obj_pool_init(&records_, &env_.env, sizeof(record_t), ITEMS), KV_OK);
	assert_int_equal(kvd_obj_pool_init(&nodes_, &env_.env, sizeof(kvd_token_node_t), 2 * ITEMS), KV_OK);
	assert_int_equal(kvd_obj_pool_reserve(&nodes_, kvd_token_tree_nodes(ITEMS)), KV_OK);
	tree_ = (kvd_token_tree_t){
		.nodes = &nodes_, .items = &records_, .offset = offsetof(record_t, item), .root = KVD_NONE};
	for (uint32_t i = 0, id; i < ITEMS; i++) {
		assert_int_equal(kvd_obj_pool_get(&records_, &id), KV_OK);
		record_at(id)->item = (kvd_token_item_t){.words = record_at(id)->words, .leaf = KVD_NONE};
	}
}

static void free_tree(void)
{
	kvd_obj_pool_fini(&nodes_);
	kvd_obj_pool_fini(&records_);
	assert_int_equal(kv_test_env_live(&env_), 0);
}

/* Sequences that share beginnings at every length: few symbols, and those that differ in one bit of any rank. */
static uint32_t make_words(kv_test_rng_t *rng, uint32_t *words)
{
	uint32_t len = (uint32_t)(kv_test_below(rng, 3) ? kv_test_below(rng, 6) : kv_test_below(rng, WORDS));

	for (uint32_t i = 0; i < len; i++) {
		words[i] = kv_test_below(rng, 40) ? 7 : 7 ^ UINT32_C(1) << kv_test_below(rng, 32);
	}

	return len;
}

static uint32_t agreement(const kvd_token_item_t *item, const uint32_t *words, uint32_t len)
{
	uint32_t shorter = item->len < len ? item->len : len;

	return memcmp(item->words, words, shorter * sizeof *words) == 0 ? shorter : KVD_NONE;
}

/* What the tree should answer, by looking at all. */
static uint32_t find_by_hand(const uint32_t *words, uint32_t len)
{
	uint32_t best = KVD_NONE, longest = 0;

	for (uint32_t i = 0; i < ITEMS; i++) {
		const kvd_token_item_t *item = &record_at(i)->item;
		uint32_t agreed = item->leaf != KVD_NONE ? agreement(item, words, len) : KVD_NONE;

		if (agreed != KVD_NONE && (best == KVD_NONE || agreed > longest ||
					   (agreed == longest && item->age < record_at(best)->item.age))) {
			best = i;
			longest = agreed;
		}
	}

	return best;
}

static void p1_the_longest_agreement_and_then_the_oldest_is_found(void **state)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	uint32_t words[WORDS], in = 0;
	uint64_t age = 0, found = 0;

	(void)state;
	make_tree();
	for (uint32_t step = 0; step < 60000; step++) {
		uint32_t id = (uint32_t)kv_test_below(&rng, ITEMS);
		kvd_token_item_t *item = &record_at(id)->item;
		uint32_t len = make_words(&rng, words), answer;

		if (item->leaf != KVD_NONE) {
			kvd_token_tree_remove(&tree_, id);
			in--;
			if (kv_test_below(&rng, 3) == 0) { /* it comes back, as old as it was */
				kvd_token_tree_add(&tree_, id);
				in++;
			}
		} else if (kv_test_below(&rng, 4)) {
			item->len = make_words(&rng, record_at(id)->words);
			item->age = ++age;
			kvd_token_tree_add(&tree_, id);
			in++;
		}
		answer = kvd_token_tree_find(&tree_, words, len);
		assert_int_equal(answer, find_by_hand(words, len));
		found += answer != KVD_NONE;
		if (step % 16 == 0) {
			assert_int_equal(kvd_token_tree_check(&tree_), in);
			assert_true(nodes_.used <= kvd_token_tree_nodes(in));
		}
	}
	assert_true(found > 1000);
	for (uint32_t i = 0; i < ITEMS; i++) {
		if (record_at(i)->item.leaf != KVD_NONE) {
			kvd_token_tree_remove(&tree_, i);
		}
	}
	assert_int_equal(tree_.root, KVD_NONE);
	assert_int_equal(nodes_.used, 0);
	free_tree();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_the_longest_agreement_and_then_the_oldest_is_found),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
