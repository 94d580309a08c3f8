/* Block groups of a space: which blocks of each a sequence needs. */
#include "impl.h"

/* Of numbers above 0. */
static uint32_t gcd(uint32_t a, uint32_t b)
{
	while (b) {
		uint32_t rest = a % b;

		a = b;
		b = rest;
	}

	return a;
}

kv_status_t kvc_groups_take(kvc_space_t *space, const kv_group_t *groups, uint32_t count)
{
	uint32_t granule = 1;

	if (!kv_holds(count <= KV_MAX_GROUPS)) {
		return KV_ERR_INTERNAL;
	}
	for (uint32_t i = 0; i < count; i++) {
		uint32_t units = groups[i].block_tokens / space->hash_tokens;
		uint64_t both;

		if (units == 0) {
			return KV_ERR_IDENTITY;
		}
		both = (uint64_t)granule / gcd(units, granule) * units;
		if (both > KV_MAX_BLOCKS) {
			return KV_ERR_IDENTITY;
		}
		granule = (uint32_t)both;
		space->groups[i] = (kvc_group_t){
			.number = groups[i].id,
			.rule = groups[i].rule,
			.block_tokens = groups[i].block_tokens,
			.window = groups[i].window,
			.units = units,
		};
	}
	space->group_count = count;
	space->granule = granule;

	return KV_OK;
}

const kvc_group_t *kvc_group_find(const kvc_space_t *space, uint32_t number)
{
	for (uint32_t i = 0; i < space->group_count; i++) {
		if (space->groups[i].number == number) {
			return &space->groups[i];
		}
	}

	return NULL;
}

kvc_blocks_t kvc_group_blocks(const kvc_space_t *space, const kvc_group_t *group, uint32_t n)
{
	kvc_blocks_t blocks = {.end = n / group->units};
	uint64_t tokens = (uint64_t)n * space->hash_tokens;

	if (group->rule == KV_RULE_WINDOW && tokens > group->window) {
		blocks.first = (uint32_t)((tokens - group->window) / group->block_tokens);
	}
	if (group->rule == KV_RULE_STATE) {
		/* A state in the middle of a block is in none. */
		blocks.first = n % group->units || n == 0 ? blocks.end : blocks.end - 1u;
	}
	blocks.first = blocks.first < blocks.end ? blocks.first : blocks.end;

	return blocks;
}

uint32_t kvc_space_groups(const kvc_space_t *space, kvc_group_info_t *groups, uint32_t cap)
{
	for (uint32_t i = 0; groups && i < space->group_count && i < cap; i++) {
		const kvc_group_t *group = &space->groups[i];

		groups[i] = (kvc_group_info_t){
			.group = group->number,
			.rule = (uint32_t)group->rule,
			.block_tokens = group->block_tokens,
			.window = group->rule == KV_RULE_WINDOW ? group->window : 0,
			.block_bytes = group->geometry.block_bytes,
			.heads = group->geometry.heads,
			.leaves = group->geometry.leaves,
		};
	}

	return space->group_count;
}

void kvc_group_range(const kvc_space_t *space, uint32_t number, uint32_t n, uint32_t *p_first, uint32_t *p_end)
{
	const kvc_group_t *group = kvc_group_find(space, number);
	kvc_blocks_t blocks = {0};

	if (group) {
		blocks = kvc_group_blocks(space, group, n);
	}
	*p_first = blocks.first;
	*p_end = blocks.end;
}

void kvc_key_of_array(void *ctx, uint32_t i, kvc_key_t *key)
{
	const kvc_key_array_t *array = ctx;

	*key = array->keys[i - array->first];
}
