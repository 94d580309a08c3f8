/* What the disk tier has kept, and what the memory of a GPU has kept through a crash. Blocks come parents first, of
 * many chains at once, and wait under their root digest. Then their use is told, least recent first (decision 069). */
#include "core/ends/damage.h"
#include "core/block/events.h"
#include "core/base/core_impl.h"
#include "core/base/share.h"
#include "core/block/slot_class.h"
#include "core/ends/space.h"

#define TAKE_IN_BLOCKS 256u

/* The namespace of a class of a tier; KVD_NONE: it is no longer configured. */
static uint32_t ns_of_class(const kvd_core_t *core, kvd_set_t t, uint32_t tier_class)
{
	const char *name = kvs_class_ns(t == KVD_DISK ? kvd_disk(core) : core->tier[KVD_CPU], tier_class);

	for (uint32_t n = 0; n < core->ns_count; n++) {
		if (strcmp(core->ns[n]->name, name) == 0) {
			return n;
		}
	}

	return KVD_NONE;
}

/* The first block of a group says the group's class. KV_ERR_ARG: more groups than a space has. */
static kv_status_t add_tree_group(kvd_core_t *core, kvd_tree_t *tree, kvd_set_t t, uint32_t tier_class, uint8_t group)
{
	uint32_t tier_classes[KVD_TIERS] = {KVD_NONE, KVD_NONE}, slot_class;
	kv_status_t status = KV_ERR_ARG;

	tier_classes[t] = tier_class;
	if (tree->group_count < KV_MAX_GROUPS) {
		status = kvd_class_find(core, tier_classes, ns_of_class(core, t, tier_class), &slot_class);
	}
	if (status == KV_OK) {
		tree->groups[tree->group_count++] = (kvd_tree_group_t){.slot_class = slot_class, .group = group};
	}

	return status;
}

static kv_status_t find_or_create_tree(kvd_core_t *core, kvd_set_t t, uint32_t tier_class, const kvs_meta_t *meta)
{
	kvd_recovery_t *recovery = &core->recovery;
	uint32_t slot_class;
	kvd_tree_t *tree;
	kv_status_t status;

	for (uint32_t id = recovery->tree, i = 0; i <= core->ix.trees.made; id = i++) {
		tree = id < core->ix.trees.made ? kvd_tree_at(&core->ix, id) : NULL;
		if (tree && tree->live && tree->epoch == meta->epoch &&
		    memcmp(tree->root, meta->root, sizeof tree->root) == 0) {
			recovery->tree = id;
			slot_class = kvd_tree_class(tree, meta->group);
			return slot_class == KVD_NONE ? add_tree_group(core, tree, t, tier_class, meta->group)
			       : core->classes[slot_class].tier_class[t] == tier_class ? KV_OK
										       : KV_ERR_ARG;
		}
	}
	status = kvd_tree_create(&core->ix, &recovery->tree);
	if (status != KV_OK) {
		return status;
	}
	tree = kvd_tree_at(&core->ix, recovery->tree);
	status = add_tree_group(core, tree, t, tier_class, meta->group);
	if (status != KV_OK) {
		kvd_tree_destroy(&core->ix, recovery->tree);
		recovery->tree = KVD_NONE;
		return status;
	}
	slot_class = tree->groups[0].slot_class;
	tree->tally = core->classes[slot_class].ns == KVD_NONE ? &core->unowned_blocks
							       : &core->ns[core->classes[slot_class].ns]->blocks;
	tree->epoch = meta->epoch;
	memcpy(tree->root, meta->root, sizeof tree->root);

	return KV_OK;
}

/* May the namespace have one more block in the index? PENDING: later, when each namespace has had its share (decision
 * 025). */
static kv_status_t check_index_share(const kvd_core_t *core, uint32_t ns)
{
	if (!core->recovery.lending) {
		return kvd_share_over(core, ns, KVD_SHARE_INDEX, 1) > 0 ? KV_PENDING : KV_OK;
	}

	return ns == KVD_NONE || core->ns[ns]->blocks < kvd_share_max(core, ns, KVD_SHARE_INDEX) ? KV_OK : KV_ERR_LIMIT;
}

/* Put a block at `loc` of a tier's class into the index, and into the set. */
static kv_status_t take_in_block(kvd_core_t *core, kvd_set_t t, uint32_t tier_class, kvs_loc_t loc,
				 const kvs_meta_t *meta)
{
	kvd_recovery_t *recovery = &core->recovery;
	uint32_t parent = KVD_NONE, id;
	kvd_order_t *order;
	kv_status_t status = find_or_create_tree(core, t, tier_class, meta);

	if (status != KV_OK) {
		return status;
	}
	if (!kv_key_is_zero(&meta->parent)) {
		parent = kvd_index_find(&core->ix, recovery->tree, &meta->parent, meta->group);
	}
	if ((parent == KVD_NONE) != (meta->depth == 1) ||
	    kvd_index_find(&core->ix, recovery->tree, &meta->key, meta->group) != KVD_NONE ||
	    (parent != KVD_NONE && kvd_depth_of(&core->ix, kvd_block_at(&core->ix, parent)) + 1 != meta->depth)) {
		return KV_ERR_NO_PARENT;
	}
	status = kvd_index_insert(&core->ix, recovery->tree, parent, meta, &id);
	if (status != KV_OK) {
		return status;
	}
	if (t == KVD_DISK) {
		kvd_block_at(&core->ix, id)->disk = loc;
	} else {
		*kvd_slot_of(&core->ix, kvd_block_at(&core->ix, id)) = loc.slot;
		kvd_block_at(&core->ix, id)->cpu_gen = loc.gen;
	}
	kvd_block_at(&core->ix, id)->flags = KVD_EVENT_PENDING;
	kvd_index_join(&core->ix, id, t);
	order = &core->classes[kvd_class_of(&core->ix, kvd_block_at(&core->ix, id))].order[t];
	core->policy->join(&core->ix, order, t, id, ++core->stamp);
	order->blocks++;

	return KV_OK;
}

/* The block was used later than those before it. */
static void renew_mark(kvd_core_t *core, kvd_set_t t, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	const uint32_t id = kvd_index_find_in_slot(&core->ix, key, group, t, loc);

	if (id != KVD_NONE) {
		const uint32_t slot_class = kvd_class_of(&core->ix, kvd_block_at(&core->ix, id));

		core->policy->join(&core->ix, &core->classes[slot_class].order[t], t, id, ++core->stamp);
	}
}

static void on_disk_used(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	renew_mark(arg, KVD_DISK, loc, key, group);
}

static void on_memory_used(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	renew_mark(arg, KVD_CPU, loc, key, group);
}

static kv_status_t on_block_found(void *arg, uint32_t tier_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	kvd_core_t *core = arg;
	kv_status_t status = check_index_share(core, ns_of_class(core, KVD_DISK, tier_class));

	if (status == KV_PENDING) {
		return status;
	}
	if (status == KV_OK) {
		status = take_in_block(core, KVD_DISK, tier_class, loc, meta);
	}
	core->recovery.blocks += status == KV_OK;
	core->recovery.refused += status != KV_OK;

	return status;
}

static kv_status_t recover_blocks(kvd_core_t *core, uint32_t max)
{
	kv_status_t status =
		core->recovery.all_found ? KV_OK : kvs_recover_some(kvd_disk(core), on_block_found, core, max);

	if (status == KV_MISS) {
		core->recovery.lending = 1;
		return max == UINT32_MAX ? recover_blocks(core, max) : KV_PENDING;
	}
	core->recovery.all_found = status == KV_OK;
	if (status == KV_OK) {
		status = kvs_recover_use(kvd_disk(core), 0, on_disk_used, core, max);
	}
	/* No flush of this run has covered the blocks found: one must, before they are acknowledged again. */
	if (status == KV_OK && core->recovery.blocks > 0) {
		core->stores++;
		core->flush_due_ns = 1;
	}
	if (status != KV_PENDING) {
		kv_logf(core->env, status == KV_OK ? KV_LOG_INFO : KV_LOG_ERROR, "core",
			"blocks taken in from disk, blocks %llu refused %llu status %s",
			(unsigned long long)core->recovery.blocks, (unsigned long long)core->recovery.refused,
			kv_status_name(status));
	}

	return status;
}

kv_status_t kvd_core_recover(kvd_core_t *core)
{
	core->recovery = (kvd_recovery_t){.tree = KVD_NONE};

	return core->tier[KVD_DISK] ? recover_blocks(core, UINT32_MAX) : KV_OK;
}

/* ---- the memory of a GPU --------------------------------------------------------------------- */

/* A namespace that is no longer configured has no share: its blocks would hold memory that nobody can ask for. */
static kv_status_t on_block_adopted(void *arg, uint32_t tier_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	kvd_core_t *core = arg;

	return kvd_share_over(core, ns_of_class(core, KVD_CPU, tier_class), KVD_SHARE_INDEX, 1) > 0
		       ? KV_ERR_LIMIT
		       : take_in_block(core, KVD_CPU, tier_class, loc, meta);
}

/* A slab without a block that was taken in has a class too, or it could never be another one's. Returns how many slabs
 * have none: they wait for an engine that opens it. */
static uint64_t find_classes(kvd_core_t *core)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	const kvs_rebalance_ops_t *ops = kvd_slab_ops(core, KVD_CPU);
	uint64_t without = 0;
	kvs_slab_desc_t desc;
	uint32_t slot_class;

	for (uint32_t slab = 0; ops && slab < ops->slab_count(tier); slab++) {
		if (ops->describe_slab(tier, slab, &desc) == KV_OK) {
			const uint32_t tier_classes[KVD_TIERS] = {desc.slot_class, KVD_NONE};

			without += kvd_class_find(core, tier_classes, ns_of_class(core, KVD_CPU, desc.slot_class),
						  &slot_class) != KV_OK;
		}
	}

	return without;
}

void kvd_core_adopt(kvd_core_t *core, uint32_t memory)
{
	const kvd_recovery_t before = core->recovery;
	const uint32_t count = core->class_count;
	uint64_t without;

	core->recovery = (kvd_recovery_t){.tree = KVD_NONE};
	/* A block that is not taken in, for whatever reason, is free, and is counted by the tier. */
	(void)kvs_recover_in(core->tier[KVD_CPU], memory, on_block_adopted, core);
	core->recovery = before;
	(void)kvs_recover_use(core->tier[KVD_CPU], memory, on_memory_used, core, UINT32_MAX);
	without = find_classes(core);
	if (without > 0) {
		kvd_count(core, KV_M_ADOPT_REFUSED, without);
		kv_logf(core->env, KV_LOG_WARN, "core",
			"no memory to adopt slabs whole: they serve no other block size, memory %u slabs %llu", memory,
			(unsigned long long)without);
	}
	for (uint32_t i = count; i < core->class_count; i++) {
		kvd_class_adopt(core, i, memory);
	}
	kvd_shares_compute(core);
}

/* ---- a disk tier that comes late ------------------------------------------------------------- */

/* Open the class of each space on the tier first, so that blocks taken in find it. */
static kv_status_t begin_take_in(kvd_core_t *core, kvs_tier_t *disk)
{
	kv_status_t status = KV_OK;

	for (uint32_t n = 0; n < core->ns_count && status == KV_OK; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made && status == KV_OK; i++) {
			const kvd_space_t *space = core->ns[n]->spaces[i];

			for (uint32_t g = 0; space && g < space->group_count && status == KV_OK; g++) {
				const kvd_group_blocks_t *blocks = &space->blocks[g];

				status = kvs_class_open(disk, core->ns[n]->name, &blocks->geometry,
							&core->classes[blocks->slot_class].tier_class[KVD_DISK]);
			}
		}
	}
	for (uint32_t i = 0; i < core->class_count && status != KV_OK; i++) {
		core->classes[i].tier_class[KVD_DISK] = KVD_NONE;
	}
	core->coming = status == KV_OK ? disk : NULL;
	core->recovery = (kvd_recovery_t){.tree = KVD_NONE};

	return status;
}

kv_status_t kvd_core_take_in(kvd_core_t *core, kvs_tier_t *disk)
{
	kv_status_t status = core->coming ? KV_OK : begin_take_in(core, disk);

	return status == KV_OK ? recover_blocks(core, TAKE_IN_BLOCKS) : status;
}

void kvd_core_attach(kvd_core_t *core)
{
	core->world.disk = core->tier[KVD_DISK] = core->coming;
	core->world.note_reset = NULL;
	core->coming = NULL;
	kvd_watch_disk(core);
	kvd_spaces_attach(core);
	kvd_shares_compute(core);
	kvd_events_flush(core);
}
