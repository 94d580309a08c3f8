#include "core/base/core_impl.h"

void kvd_events_flush(kvd_core_t *core)
{
	kvd_gather_t *g = &core->gather;
	const kvd_tree_t *tree;
	const kvd_space_t *space;
	const kv_group_t *group = NULL;
	kvd_event_t event;

	if (g->count == 0) {
		return;
	}
	tree = kvd_tree_at(&core->ix, g->tree);
	space = core->ns[tree->ns]->spaces[tree->space];
	if (kvd_space_group(space, g->group, &group) != KV_OK) {
		g->count = 0; /* recovered, of a group the identity does not have: it was never announced */
		return;
	}
	event = (kvd_event_t){
		.type = g->type,
		.ns = core->ns[tree->ns]->name,
		.space = tree->space,
		.group = g->group,
		.rule = group->rule,
		.medium = g->t == KVD_DISK    ? KV_TIER_DISK
			  : space->memory > 0 ? KV_TIER_GPU
					      : KV_TIER_CPU,
		.count = g->count,
		.hashes = g->hashes,
		.has_parent = g->has_parent,
		.parent_hash = g->parent_hash,
		.block_tokens = group->block_tokens,
		.tokens = g->tokens,
		.lora = space->lora,
	};
	g->count = 0;
	core->world.publish(core->world.ctx, &event);
}

/* Does the block continue the run that is being gathered? */
static int continues_run(kvd_core_t *core, uint32_t block_id, kvd_event_type_t type, kvd_set_t t,
			 const uint32_t *tokens)
{
	const kvd_gather_t *g = &core->gather;
	const kvd_block_t *block = kvd_block_at(&core->ix, block_id);
	const kvd_tree_t *tree = kvd_tree_of(&core->ix, block);
	const kv_group_t *group;
	uint32_t parent;

	if (g->count == 0 || g->count == KVD_EVENT_RUN || g->type != type || g->t != t || g->group != block->group ||
	    g->tree != kvd_node_of(&core->ix, block)->tree) {
		return 0;
	}
	if (type == KVD_EVENT_REMOVED) {
		return 1;
	}
	parent = kvd_index_parent(&core->ix, block_id);
	if (parent == KVD_NONE || parent != g->last) {
		return 0;
	}
	/* One event has one array of tokens: those of the next block must follow directly. */
	if (g->tokens == NULL || tokens == NULL) {
		return g->tokens == tokens;
	}

	return kvd_space_group(core->ns[tree->ns]->spaces[tree->space], block->group, &group) == KV_OK &&
	       tokens == g->tokens + (size_t)g->count * group->block_tokens;
}

static void gather_event(kvd_core_t *core, uint32_t block_id, kvd_event_type_t type, kvd_set_t t,
			 const uint32_t *tokens)
{
	kvd_gather_t *g = &core->gather;
	const kvd_block_t *block = kvd_block_at(&core->ix, block_id);

	if (kvd_tree_of(&core->ix, block)->ns == KVD_NONE || kvd_is_private(&core->ix, block)) {
		return; /* private, or recovered and not opened: it was never announced */
	}
	if (!continues_run(core, block_id, type, t, tokens)) {
		uint32_t parent = kvd_index_parent(&core->ix, block_id);

		kvd_events_flush(core);
		g->type = type;
		g->t = t;
		g->tree = kvd_node_of(&core->ix, block)->tree;
		g->group = block->group;
		g->has_parent = type == KVD_EVENT_STORED && parent != KVD_NONE;
		g->parent_hash = g->has_parent ? kvd_block_at(&core->ix, parent)->event_hash : 0;
		g->tokens = tokens;
	}
	g->last = block_id;
	g->hashes[g->count++] = block->event_hash;
}

int kvd_event_is_muted(kvd_core_t *core, uint32_t id)
{
	uint32_t parent = kvd_index_parent(&core->ix, id);

	return kvd_tree_of(&core->ix, kvd_block_at(&core->ix, id))->mute ||
	       (parent != KVD_NONE && (kvd_block_at(&core->ix, parent)->flags & KVD_EVENT_PENDING));
}

void kvd_event_add_stored(kvd_core_t *core, uint32_t id, kvd_set_t t, const uint32_t *tokens)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t leaving;

	if (block->flags & KVD_EVENT_PENDING) {
		return;
	}
	/* Subscribers know keys, not copies: the bad copy of this key that is being taken down is removed first. */
	leaving = kvd_index_find_dying(&core->ix, kvd_node_of(&core->ix, block)->tree, &block->key, block->group);
	if (leaving != KVD_NONE) {
		for (kvd_set_t old = KVD_CPU; old < KVD_TIERS; old++) {
			if (kvd_in_set(&core->ix, kvd_block_at(&core->ix, leaving), old)) {
				kvd_event_add_removed(core, leaving, old);
			}
		}
		kvd_block_at(&core->ix, leaving)->flags |= KVD_EVENT_PENDING;
	}
	gather_event(core, id, KVD_EVENT_STORED, t, tokens);
}

void kvd_event_announce(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	/* One that is being taken down leaves without an event. Its key may be that of a newer copy, which was
	 * announced: subscribers would see the key removed and stored in tiers where the newer copy is not. */
	if (!(block->flags & KVD_EVENT_PENDING) || kvd_index_is_dead(&core->ix, block)) {
		return;
	}
	block->flags &= (uint8_t)~KVD_EVENT_PENDING;
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		if (kvd_in_set(&core->ix, block, t)) {
			kvd_event_add_stored(core, id, t, NULL);
		}
	}
}

void kvd_event_add_removed(kvd_core_t *core, uint32_t id, kvd_set_t t)
{
	if (!(kvd_block_at(&core->ix, id)->flags & KVD_EVENT_PENDING)) {
		gather_event(core, id, KVD_EVENT_REMOVED, t, NULL);
	}
}
