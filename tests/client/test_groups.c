/* Match over several block groups, and with keys made on demand. The model looks at every length. */
#include "match_bed.h"

#define GROUPS 3u
#define TOKENS 16u /* a unit */

typedef struct world {
	bed_t bed;
	kv_group_t groups[GROUPS];
	uint32_t count;
	uint8_t tiers[GROUPS][MAX_KEYS]; /* of each block */
	uint32_t made[MAX_KEYS];         /* how often the key of a unit was asked for */
	uint32_t asked;
} world_t;

static void key_make(void *ctx, uint32_t i, kvc_key_t *key)
{
	world_t *world = ctx;

	world->made[i]++;
	world->asked++;
	memcpy(key, &world->bed.keys[i], sizeof *key);
}

static kvc_match_t match_lazy(world_t *world, uint32_t n)
{
	kvc_key_source_t source = {.key = key_make, .ctx = world};
	kvc_match_t m = {.struct_size = sizeof m};

	memset(world->made, 0, sizeof world->made);
	world->asked = 0;
	kvc_match_lazy(&world->bed.space, &source, n, &m);

	return m;
}

static world_t *world_make(const kv_group_t *groups, uint32_t count)
{
	world_t *world = calloc(1, sizeof *world);

	assert_non_null(world);
	bed_make(&world->bed, 65536);
	memcpy(world->groups, groups, count * sizeof *groups);
	world->count = count;
	assert_int_equal(kvc_groups_take(&world->bed.space, groups, count), KV_OK);

	return world;
}

static void world_free(world_t *world)
{
	bed_free(&world->bed);
	free(world);
}

static void set(world_t *world, uint32_t g, uint32_t block, uint8_t tiers)
{
	uint32_t units = world->groups[g].block_tokens / TOKENS;

	assert_int_equal(kvd_mirror_set(&world->bed.mirror, &world->bed.keys[(block + 1) * units - 1],
					world->groups[g].id, tiers),
			 KV_OK);
	world->tiers[g][block] = tiers;
}

/* Straight from the words of the rules: does the block hold tokens that are needed after n units, or end there? */
static int needs(const kv_group_t *group, uint32_t block, uint32_t n)
{
	uint64_t begin = (uint64_t)block * group->block_tokens, end = begin + group->block_tokens;
	uint64_t at = (uint64_t)n * TOKENS;

	if (group->rule == KV_RULE_STATE) {
		return end == at;
	}
	if (end > at) {
		return 0;
	}

	return group->rule == KV_RULE_FULL || at <= group->window || end > at - group->window;
}

static int served(const world_t *world, uint32_t n, uint8_t mask)
{
	for (uint32_t g = 0; g < world->count; g++) {
		uint32_t units = world->groups[g].block_tokens / TOKENS;

		if (n % units != 0) {
			return 0;
		}
		for (uint32_t block = 0; block < n / units; block++) {
			if (needs(&world->groups[g], block, n) && !(world->tiers[g][block] & mask)) {
				return 0;
			}
		}
	}

	return 1;
}

static uint32_t longest(const world_t *world, uint32_t n, uint8_t mask)
{
	while (n > 0 && !served(world, n, mask)) {
		n--;
	}

	return n;
}

static uint32_t pick(world_t *world, uint32_t below)
{
	return (uint32_t)kv_test_below(&world->bed.t.rng, below);
}

static uint8_t any_tier(world_t *world)
{
	const uint8_t tiers[] = {KV_TIER_CPU, KV_TIER_CPU | KV_TIER_DISK, KV_TIER_DISK, 0};

	return tiers[pick(world, 100) < 90 ? pick(world, 2) : pick(world, 4)];
}

/* Prefix-closed where the rule says so; with runs of what is there and holes elsewhere. */
static void fill(world_t *world, uint32_t n)
{
	for (uint32_t g = 0; g < world->count; g++) {
		uint32_t blocks = n / (world->groups[g].block_tokens / TOKENS);
		uint32_t any = blocks - pick(world, blocks / 2 + 1), cpu = any - pick(world, any / 2 + 1);

		for (uint32_t block = 0; block < blocks; block++) {
			uint8_t full = block < cpu ? KV_TIER_CPU : block < any ? KV_TIER_DISK : 0;

			set(world, g, block, world->groups[g].rule == KV_RULE_FULL ? full : any_tier(world));
		}
	}
}

static void clear(world_t *world, uint32_t n)
{
	for (uint32_t g = 0; g < world->count; g++) {
		for (uint32_t block = 0; block < n / (world->groups[g].block_tokens / TOKENS); block++) {
			set(world, g, block, 0);
		}
	}
}

static kv_group_t group_any(bed_t *bed, uint8_t id)
{
	const uint32_t units[] = {1, 2, 3, 4};
	kv_group_t group = {.id = id,
			    .rule = (kv_group_rule_t)kv_test_below(&bed->t.rng, 3),
			    .block_tokens = units[kv_test_below(&bed->t.rng, 4)] * TOKENS};

	group.window = group.rule == KV_RULE_WINDOW ? 1u + (uint32_t)kv_test_below(&bed->t.rng, 300) : 0;

	return group;
}

KV_TEST(p3_a_match_is_the_longest_prefix_every_group_can_serve)
{
	const kv_group_t one = {.block_tokens = TOKENS};
	world_t *world = world_make(&one, 1);
	uint32_t hits = 0;

	for (uint32_t round = 0; round < 400; round++) {
		uint32_t n = 1 + pick(world, 120);
		kvc_match_t eager = {.struct_size = sizeof eager}, lazy;

		world->count = 1 + pick(world, GROUPS);
		for (uint32_t g = 0; g < world->count; g++) {
			world->groups[g] = group_any(&world->bed, (uint8_t)(2 * g + 1));
		}
		assert_int_equal(kvc_groups_take(&world->bed.space, world->groups, world->count), KV_OK);
		fill(world, n);
		lazy = match_lazy(world, n);
		kvc_match(&world->bed.space, (const kvc_key_t *)(const void *)world->bed.keys, n, &eager);
		assert_int_equal(lazy.n, longest(world, n, 0xff));
		assert_int_equal(lazy.n_cpu, longest(world, n, KV_TIER_CPU));
		assert_memory_equal(&eager, &lazy, sizeof lazy);
		assert_int_equal(lazy.why, n - lazy.n < world->bed.space.granule ? KV_WHY_NONE : KV_WHY_ABSENT);
		hits += lazy.n > 0;
		clear(world, n);
	}
	assert_in_range(hits, 100, 400);
	world_free(world);
}

KV_TEST(the_blocks_a_length_needs_are_those_the_rules_name)
{
	const kv_group_t groups[GROUPS] = {{.id = 0, .block_tokens = 32},
					   {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = 48, .window = 511},
					   {.id = 7, .rule = KV_RULE_STATE, .block_tokens = 64}};
	world_t *world = world_make(groups, GROUPS);
	kvc_group_info_t info[GROUPS];
	uint32_t first, end;

	assert_int_equal(kvc_space_groups(&world->bed.space, NULL, 0), GROUPS);
	assert_int_equal(kvc_space_groups(&world->bed.space, info, GROUPS), GROUPS);
	assert_int_equal(info[1].group, 1);
	assert_int_equal(info[1].rule, KVC_RULE_WINDOW);
	assert_int_equal(info[1].window, 511);
	assert_int_equal(info[2].group, 7);
	assert_int_equal(info[2].block_tokens, 64);
	for (uint32_t g = 0; g < GROUPS; g++) {
		for (uint32_t n = 0; n < 300; n++) {
			uint32_t count = 0, least = UINT32_MAX;

			for (uint32_t block = 0; block < 300; block++) {
				if (needs(&groups[g], block, n)) {
					least = block < least ? block : least;
					count++;
				}
			}
			kvc_group_range(&world->bed.space, groups[g].id, n, &first, &end);
			assert_int_equal(end - first, count);
			assert_true(count == 0 || first == least);
		}
	}
	kvc_group_range(&world->bed.space, 3, 100, &first, &end);
	assert_int_equal(end - first, 0);
	world_free(world);
}

KV_TEST(keys_are_made_for_few_units_and_each_once)
{
	const kv_group_t one = {.block_tokens = TOKENS};
	world_t *world = world_make(&one, 1);

	for (uint32_t i = 0; i < 7373; i++) {
		set(world, 0, i, i < 5000 ? KV_TIER_CPU : KV_TIER_DISK);
	}
	for (uint32_t n = 1; n <= 8192; n += n < 20 ? 1 : 511) {
		kvc_match_t m = match_lazy(world, n);

		assert_int_equal(m.n, n < 7373 ? n : 7373);
		assert_int_equal(m.n_cpu, n < 5000 ? n : 5000);
		assert_in_range(world->asked, 1, 50);
		for (uint32_t i = 0; i < 8192; i++) {
			assert_in_range(world->made[i], 0, 1);
		}
	}
	assert_int_equal(match_lazy(world, 0).n, 0);
	assert_int_equal(world->asked, 0);
	world_free(world);
}

KV_TEST(p5_where_nothing_helps_a_bounded_number_of_places_is_tried)
{
	const kv_group_t groups[2] = {{.id = 0, .block_tokens = TOKENS},
				      {.id = 1, .rule = KV_RULE_STATE, .block_tokens = TOKENS}};
	world_t *world = world_make(groups, 2);
	kvc_match_t m = {.struct_size = sizeof m};

	for (uint32_t i = 0; i < 8000; i++) {
		set(world, 0, i, KV_TIER_CPU);
	}
	m = match_lazy(world, 8000);
	assert_int_equal(m.n, 0);
	assert_int_equal(m.why, KV_WHY_ABSENT);
	assert_in_range(world->asked, 64, 300);
	set(world, 1, 7900, KV_TIER_DISK);
	m = match_lazy(world, 8000);
	assert_int_equal(m.n, 7901);
	assert_int_equal(m.n_cpu, 0);
	world_free(world);
}

/* A window of 4,096 tokens that is all there costs a look at each of its blocks, for both tiers together. */
KV_TEST(a_long_window_is_looked_at_once)
{
	const kv_group_t groups[2] = {{.id = 0, .block_tokens = TOKENS},
				      {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 4095}};
	world_t *world = world_make(groups, 2);
	kvc_match_t m = {.struct_size = sizeof m};

	for (uint32_t i = 0; i < 8000; i++) {
		set(world, 0, i, KV_TIER_CPU);
		if (i >= 8000 - 300) {
			set(world, 1, i, KV_TIER_CPU);
		}
	}
	m = match_lazy(world, 8000);
	assert_int_equal(m.n, 8000);
	assert_int_equal(m.n_cpu, 8000);
	assert_in_range(m.probes, 256, 300);
	set(world, 1, 7990, KV_TIER_DISK);
	m = match_lazy(world, 8000);
	assert_int_equal(m.n, 8000);
	assert_int_equal(m.n_cpu, 7990 - 7990 % world->bed.space.granule);
	set(world, 1, 7700, 0);
	m = match_lazy(world, 7950);
	assert_int_equal(m.n, 0); /* its window starts at block 7694 */
	world_free(world);
}

/* A stored prompt that a request shares the beginning with: its window lies beyond, that of an earlier one before. */
KV_TEST(a_missing_block_rules_out_as_many_lengths_as_its_window_has_blocks)
{
	const kv_group_t groups[2] = {{.id = 0, .block_tokens = TOKENS},
				      {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 64 * TOKENS}};
	world_t *world = world_make(groups, 2);
	kvc_match_t m;

	for (uint32_t i = 0; i < 8000; i++) {
		set(world, 0, i, KV_TIER_CPU);
		if (i >= 2000 - 64 && i < 2000) {
			set(world, 1, i, KV_TIER_CPU);
		}
	}
	m = match_lazy(world, 8000);
	assert_int_equal(m.n, 2000);
	assert_int_equal(m.n_cpu, 2000);
	assert_in_range(m.probes, 64 + (8000 - 2000) / 64, 64 + (8000 - 2000) / 64 + 40);
	world_free(world);
}

/* A state costs one look, and tells where a window has to be. */
KV_TEST(windows_are_looked_at_where_there_is_a_state)
{
	const kv_group_t groups[GROUPS] = {{.id = 0, .block_tokens = TOKENS},
					   {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 1024},
					   {.id = 2, .rule = KV_RULE_STATE, .block_tokens = TOKENS}};
	world_t *world = world_make(groups, GROUPS);
	kvc_match_t m;

	for (uint32_t i = 0; i < 1000; i++) {
		set(world, 0, i, KV_TIER_CPU);
		set(world, 1, i, i < 850 ? KV_TIER_CPU : KV_TIER_DISK);
	}
	set(world, 2, 899, KV_TIER_CPU);
	set(world, 2, 849, KV_TIER_CPU);
	m = match_lazy(world, 1000);
	assert_int_equal(m.n, 900);
	assert_int_equal(m.n_cpu, 850);
	/* The last block; 101 states and a window; a block on disk, the next state, the window's others. */
	assert_in_range(m.probes, 1 + 101 + 64 + 2 + 50, 1 + 101 + 64 + 2 + 50 + 10);
	world_free(world);
}

#define ALIKE 12u

/* Keys that begin alike lie in one bucket and the next ones, in any way of them. */
KV_TEST(p1_blocks_of_a_window_whose_keys_begin_alike_are_told_apart)
{
	const kv_group_t groups[2] = {{.id = 0, .block_tokens = TOKENS},
				      {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 4 * TOKENS}};
	world_t *world = world_make(groups, 2);
	uint32_t hits = 0;

	for (uint32_t i = 0; i < ALIKE; i++) {
		memcpy(world->bed.keys[i].b, world->bed.keys[i / 3 * 3].b, i % 2 ? 12 : 8);
		set(world, 1, i, KV_TIER_CPU); /* three in their bucket; those of the full group in the next */
	}
	for (uint32_t i = 0; i < ALIKE; i++) {
		set(world, 0, i, KV_TIER_CPU);
	}
	for (uint32_t step = 0; step < 2000; step++) {
		const uint32_t n = 1 + pick(world, ALIKE);
		kvc_match_t m;

		set(world, 1, pick(world, ALIKE), pick(world, 8) ? KV_TIER_CPU : 0);
		m = match_lazy(world, n);
		assert_int_equal(m.n, longest(world, n, 0xff));
		hits += m.n > 0;
	}
	assert_in_range(hits, 200, 2000);
	world_free(world);
}

/* Two windows: what was seen of the first counts when the second has shortened the match. */
KV_TEST(a_block_on_disk_that_was_seen_before_is_not_in_memory)
{
	const kv_group_t groups[GROUPS] = {
		{.id = 0, .block_tokens = TOKENS},
		{.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 4 * TOKENS},
		{.id = 2, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 4 * TOKENS}};
	world_t *world = world_make(groups, GROUPS);
	kvc_match_t m;

	for (uint32_t i = 0; i < 8; i++) {
		set(world, 0, i, KV_TIER_CPU);
		set(world, 1, i, i == 5 ? KV_TIER_DISK : KV_TIER_CPU);
		set(world, 2, i, i == 7 ? 0 : KV_TIER_CPU);
	}
	m = match_lazy(world, 8);
	assert_int_equal(m.n, 7);
	assert_int_equal(m.n_cpu, 5);
	world_free(world);
}

/* Eight blocks in memory, in a full group and in a window of four. */
static world_t *make_full_window(void)
{
	const kv_group_t groups[2] = {{.id = 0, .block_tokens = TOKENS},
				      {.id = 1, .rule = KV_RULE_WINDOW, .block_tokens = TOKENS, .window = 4 * TOKENS}};
	world_t *world = world_make(groups, 2);

	for (uint32_t i = 0; i < 8; i++) {
		set(world, 0, i, KV_TIER_CPU);
		set(world, 1, i, KV_TIER_CPU);
	}

	return world;
}

KV_TEST(p5_a_bucket_locked_for_ever_costs_the_lengths_whose_window_has_its_block)
{
	world_t *world = make_full_window();
	kvc_match_t m;

	assert_int_equal(match_lazy(world, 8).n, 8);
	for (uint32_t i = 4; i < 7; i++) {
		bed_lock(&world->bed, i, 1);
		m = match_lazy(world, 8);
		assert_int_equal(m.n, i);
		assert_int_equal(m.n_cpu, i);
		assert_int_equal(m.why, KV_WHY_CONTENDED);
		bed_lock(&world->bed, i, 0);
	}
	world_free(world);
}

KV_TEST(p3_a_window_in_a_tier_that_cannot_be_read_is_no_hit)
{
	world_t *world = make_full_window();
	kvc_match_t m;

	set(world, 1, 6, KV_TIER_DISK);
	kvd_mirror_set_unreadable(&world->bed.mirror, KV_TIER_DISK);
	m = match_lazy(world, 8);
	assert_int_equal(m.n, 6);
	assert_int_equal(m.why, KV_WHY_UNREADABLE);
	kvd_mirror_set_unreadable(&world->bed.mirror, 0);
	m = match_lazy(world, 8);
	assert_int_equal(m.n, 8);
	assert_int_equal(m.n_cpu, 6);
	world_free(world);
}

KV_TEST(p5_a_bucket_locked_for_ever_is_a_miss_of_its_group)
{
	const kv_group_t groups[2] = {{.id = 0, .block_tokens = TOKENS},
				      {.id = 1, .rule = KV_RULE_STATE, .block_tokens = 2 * TOKENS}};
	world_t *world = world_make(groups, 2);
	kvc_match_t m = {.struct_size = sizeof m};

	for (uint32_t i = 0; i < 8; i++) {
		set(world, 0, i, KV_TIER_CPU);
	}
	set(world, 1, 3, KV_TIER_CPU);
	set(world, 1, 2, KV_TIER_CPU);
	assert_int_equal(match_lazy(world, 8).n, 8);
	assert_int_equal(match_lazy(world, 9).n, 8);
	assert_int_equal(match_lazy(world, 9).why, KV_WHY_NONE); /* nothing more could be had */
	bed_lock(&world->bed, 7, 1);
	m = match_lazy(world, 8);
	assert_int_equal(m.n, 6);
	assert_int_equal(m.why, KV_WHY_CONTENDED);
	world_free(world);
}

KV_TEST(p10_groups_whose_blocks_never_end_together_are_refused)
{
	const kv_group_t groups[GROUPS] = {{.block_tokens = 4093}, {.id = 1, .block_tokens = 4091}};
	bed_t bed;

	bed_make(&bed, 64);
	bed.space.hash_tokens = 1;
	assert_int_equal(kvc_groups_take(&bed.space, groups, 2), KV_ERR_IDENTITY);
	bed_free(&bed);
}
