/* What the proxy knows of engines' own caches: exactly what their events tell, and nothing after a gap or a bad byte.
 */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "events/cache.h"

#include "kv/mp.h"
#include "kv/types.h"

#include <stdio.h>
#include <stdlib.h>

#define UNIT  4u /* tokens of a block */
#define DEPTH 6u

static uint8_t bytes_[1 << 20];
static kv_mp_writer_t writer_;
static msgpack_packer packer_;
static uint64_t seq_;

/* ---- messages -------------------------------------------------------------------------------- */

static void pack_text(const char *value)
{
	msgpack_pack_str_with_body(&packer_, value, strlen(value));
}

static void begin_batch(uint32_t events)
{
	writer_ = (kv_mp_writer_t){bytes_, sizeof bytes_, 0};
	packer_ = kv_mp_packer(&writer_);
	msgpack_pack_array(&packer_, 3);
	msgpack_pack_double(&packer_, 1.5);
	msgpack_pack_array(&packer_, events);
}

typedef struct block {
	uint64_t hash, parent; /* parent 0: none */
	uint32_t tokens[UNIT];
	const char *extra; /* NULL: none */
	const char *adapter, *medium, *kind;
	uint32_t group;
} block_t;

static void pack_stored(const block_t *block)
{
	msgpack_pack_map(&packer_, 9);
	pack_text("type");
	pack_text("BlockStored");
	pack_text("block_hashes");
	msgpack_pack_array(&packer_, 1);
	msgpack_pack_uint64(&packer_, block->hash);
	pack_text("parent_block_hash");
	block->parent ? msgpack_pack_uint64(&packer_, block->parent) : msgpack_pack_nil(&packer_);
	pack_text("token_ids");
	msgpack_pack_array(&packer_, UNIT);
	for (uint32_t i = 0; i < UNIT; i++) {
		msgpack_pack_uint32(&packer_, block->tokens[i]);
	}
	pack_text("block_size");
	msgpack_pack_uint32(&packer_, UNIT);
	pack_text("medium");
	pack_text(block->medium ? block->medium : "GPU");
	pack_text("group_idx");
	msgpack_pack_uint32(&packer_, block->group);
	pack_text("kv_cache_spec_kind");
	pack_text(block->kind ? block->kind : "full_attention");
	pack_text(block->adapter ? "lora_name" : "extra_keys");
	if (block->adapter) {
		pack_text(block->adapter);
	} else {
		msgpack_pack_array(&packer_, 1);
		if (block->extra) {
			msgpack_pack_array(&packer_, 1);
			pack_text(block->extra);
		} else {
			msgpack_pack_nil(&packer_);
		}
	}
}

static void pack_removed(uint64_t hash, uint32_t group)
{
	msgpack_pack_map(&packer_, 4);
	pack_text("type");
	pack_text("BlockRemoved");
	pack_text("block_hashes");
	msgpack_pack_array(&packer_, 1);
	msgpack_pack_uint64(&packer_, hash);
	pack_text("medium");
	pack_text("GPU");
	pack_text("group_idx");
	msgpack_pack_uint32(&packer_, group);
}

static void deliver(kvp_cache_t *cache)
{
	msgpack_pack_int(&packer_, 0);
	assert_true(writer_.len <= writer_.cap);
	kvp_cache_take(cache, seq_++, bytes_, writer_.len);
}

static void stored(kvp_cache_t *cache, const block_t *block)
{
	begin_batch(1);
	pack_stored(block);
	deliver(cache);
}

static uint32_t hit(const kvp_cache_t *cache, const char *model, const char *salt, const uint32_t *tokens, uint32_t n)
{
	return kvp_cache_hit(cache, &(kvp_prefix_question_t){model, salt, tokens, n});
}

static kvp_cache_stats_t stats(const kvp_cache_t *cache)
{
	kvp_cache_stats_t out;

	kvp_cache_stats(cache, &out);

	return out;
}

/* ---- a model --------------------------------------------------------------------------------- */

/* Prompts are paths of a binary tree: node n has the children 2n and 2n + 1, the root is 1 and no block. */
static block_t node_block(uint32_t node)
{
	block_t block = {.hash = node * UINT64_C(0x123456789abcdef), .parent = node / 2 * UINT64_C(0x123456789abcdef)};

	block.parent = node / 2 == 1 ? 0 : block.parent;
	for (uint32_t i = 0; i < UNIT; i++) {
		block.tokens[i] = 100 + node % 2;
	}

	return block;
}

static uint32_t path_of(uint32_t node, uint32_t *tokens)
{
	uint32_t depth = 31 - (uint32_t)__builtin_clz(node);

	for (uint32_t i = depth; i-- > 0; node /= 2) {
		memcpy(tokens + i * UNIT, node_block(node).tokens, sizeof node_block(node).tokens);
	}

	return depth;
}

static void check_model(const kvp_cache_t *cache, const uint8_t *present)
{
	uint32_t tokens[DEPTH * UNIT];

	for (uint32_t leaf = 1u << DEPTH; leaf < 2u << DEPTH; leaf++) {
		uint32_t depth = path_of(leaf, tokens), expected = 0;

		while (expected < depth && present[leaf >> (depth - expected - 1)]) {
			expected++;
		}
		assert_int_equal(hit(cache, "m", "", tokens, depth * UNIT), expected * UNIT);
	}
}

static void p9_what_is_known_is_what_the_events_tell(void **state)
{
	uint8_t present[2u << DEPTH] = {0};
	kv_test_rng_t rng = {kv_test_seed()};
	kvp_cache_t *cache = kvp_cache_create(1u << DEPTH);
	uint32_t n = 0;

	(void)state;
	for (unsigned round = 0; round < 3000; round++) {
		const uint32_t node = 2 + (uint32_t)kv_test_below(&rng, (2u << DEPTH) - 2);
		const block_t block = node_block(node);

		if (kv_test_below(&rng, 3) > 0) {
			stored(cache, &block);
			if ((node < 4 || present[node / 2]) && (n < 1u << DEPTH || present[node])) {
				n += !present[node];
				present[node] = 1;
			}
		} else {
			begin_batch(1);
			pack_removed(block.hash, 0);
			deliver(cache);
			n -= present[node];
			present[node] = 0;
		}
		if (round == 2000) {
			begin_batch(1);
			msgpack_pack_map(&packer_, 1);
			pack_text("type");
			pack_text("AllBlocksCleared");
			deliver(cache);
			memset(present, 0, sizeof present);
			n = 0;
		}
		check_model(cache, present);
		assert_int_equal(stats(cache).blocks, n);
	}
	assert_int_equal(stats(cache).malformed + stats(cache).gaps, 0);
	kvp_cache_destroy(cache);
}

static void p5_blocks_beyond_the_limit_count_as_not_there(void **state)
{
	kvp_cache_t *cache = kvp_cache_create(5000);
	block_t block = {0};

	(void)state;
	for (uint32_t i = 1; i <= 8000; i++) {
		block = (block_t){.hash = i, .tokens = {i, i, i, i}};
		stored(cache, &block);
	}
	assert_int_equal(stats(cache).blocks, 5000);
	assert_int_equal(stats(cache).left_out, 3000);
	assert_int_equal(hit(cache, "", "", (uint32_t[]){5000, 5000, 5000, 5000}, UNIT), UNIT);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), 0);
	kvp_cache_destroy(cache);
}

static void p8_salts_adapters_media_and_groups_are_kept_apart(void **state)
{
	kvp_cache_t *cache = kvp_cache_create(100);
	const block_t plain = {.hash = 1, .tokens = {1, 2, 3, 4}},
		      salted = {.hash = 2, .tokens = {5, 6, 7, 8}, .extra = "s"},
		      window = {.hash = 3, .tokens = {9, 9, 9, 9}, .group = 1, .kind = "sliding_window"},
		      spilled = {.hash = 4, .tokens = {8, 8, 8, 8}, .medium = "CPU_PINNED"};

	(void)state;
	stored(cache, &window); /* decides nothing */
	stored(cache, &plain);
	stored(cache, &salted);
	stored(cache, &window);
	stored(cache, &spilled);
	assert_int_equal(hit(cache, "m", "", plain.tokens, UNIT), UNIT);
	assert_int_equal(hit(cache, "m", "s", plain.tokens, UNIT), 0);
	assert_int_equal(hit(cache, "m", "s", salted.tokens, UNIT), UNIT);
	assert_int_equal(hit(cache, "m", "", salted.tokens, UNIT), 0);
	assert_int_equal(hit(cache, "m", "", window.tokens, UNIT), 0);
	assert_int_equal(hit(cache, "m", "", spilled.tokens, UNIT), 0);
	begin_batch(2);
	pack_removed(plain.hash, 1); /* of the other group */
	pack_stored(&(block_t){.hash = 5, .tokens = {7, 7, 7, 7}, .adapter = "tuned"});
	deliver(cache);
	assert_int_equal(hit(cache, "m", "", plain.tokens, UNIT), UNIT);
	assert_int_equal(hit(cache, "tuned", "", plain.tokens, UNIT),
			 0); /* "tuned" is an adapter: its blocks have keys */
	stored(cache, &(block_t){.hash = 6, .tokens = {7, 7, 7, 7}, .extra = "tuned"});
	assert_int_equal(hit(cache, "tuned", "", (uint32_t[]){7, 7, 7, 7}, UNIT), UNIT);
	kvp_cache_destroy(cache);
}

static void p9_after_a_gap_nothing_is_known(void **state)
{
	kvp_cache_t *cache = kvp_cache_create(100);
	const block_t block = {.hash = 1, .tokens = {1, 2, 3, 4}};

	(void)state;
	stored(cache, &block);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), UNIT);
	seq_++;
	begin_batch(0);
	deliver(cache);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), 0);
	assert_int_equal(stats(cache).gaps, 1);
	stored(cache, &block);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), UNIT);
	kvp_cache_forget(cache);
	assert_int_equal(stats(cache).blocks, 0);
	seq_ += 7; /* a new connection begins where it begins */
	stored(cache, &block);
	assert_int_equal(stats(cache).gaps, 1);
	assert_int_equal(stats(cache).blocks, 1);
	kvp_cache_destroy(cache);
}

/* ---- bytes of a real vLLM -------------------------------------------------------------------- */

static size_t golden(uint8_t *out, size_t cap)
{
	static char line[1 << 16];
	FILE *file = fopen(PROXY_GOLDEN, "re");
	size_t n = 0;
	unsigned byte;
	int at = 0;

	assert_non_null(file);
	while (fgets(line, sizeof line, file) && line[0] == '#') {
	}
	fclose(file);
	(void)sscanf(line, "store_3_blocks %*u %n", &at);
	assert_true(at > 0);
	for (; n < cap && sscanf(line + at + 2 * n, "%2x", &byte) == 1; n++) {
		out[n] = (uint8_t)byte;
	}

	return n;
}

static void p10_every_cut_of_a_real_message_is_refused(void **state)
{
	static uint8_t payload[1 << 15];
	const size_t len = golden(payload, sizeof payload);
	uint32_t tokens[96];
	kvp_cache_t *cache = kvp_cache_create(100);

	(void)state;
	for (uint32_t i = 0; i < 96; i++) {
		tokens[i] = 100 + i;
	}
	kvp_cache_take(cache, 0, payload, len);
	assert_int_equal(hit(cache, "tiny", "", tokens, 96), 96);
	assert_int_equal(hit(cache, "tiny", "", tokens, 95), 64);
	assert_int_equal(hit(cache, "tiny", "", tokens + 32, 32), 0);
	for (size_t cut = 0; cut < len - 1; cut++) { /* without the last byte, the rank, it is whole */
		kvp_cache_take(cache, cut + 1, payload, cut);
		assert_int_equal(stats(cache).malformed, cut + 1);
		assert_int_equal(stats(cache).blocks, 0);
	}
	kvp_cache_take(cache, len, payload, len);
	assert_int_equal(hit(cache, "tiny", "", tokens, 96), 96);
	kvp_cache_destroy(cache);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p9_what_is_known_is_what_the_events_tell),
		cmocka_unit_test(p5_blocks_beyond_the_limit_count_as_not_there),
		cmocka_unit_test(p8_salts_adapters_media_and_groups_are_kept_apart),
		cmocka_unit_test(p9_after_a_gap_nothing_is_known),
		cmocka_unit_test(p10_every_cut_of_a_real_message_is_refused),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
