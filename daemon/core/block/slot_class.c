#include "core/base/core_impl.h"
#include "core/block/slot_class.h"

static uint32_t find_known(const kvd_core_t *core, kvd_set_t t, uint32_t tier_class)
{
	uint32_t i = 0;

	while (i < core->class_count && core->classes[i].tier_class[t] != tier_class) {
		i++;
	}

	return i;
}

/* One that was closed. */
static uint32_t find_closed(const kvd_core_t *core)
{
	uint32_t i = 0;

	while (i < core->class_count && (core->classes[i].tier_class[KVD_CPU] != KVD_NONE ||
					 core->classes[i].tier_class[KVD_DISK] != KVD_NONE)) {
		i++;
	}

	return i;
}

kv_status_t kvd_class_find(kvd_core_t *core, const uint32_t tier_class[KVD_TIERS], uint32_t ns, uint32_t *p_class)
{
	kvd_set_t by = tier_class[KVD_DISK] != KVD_NONE ? KVD_DISK : KVD_CPU;
	kvd_class_t *made;

	*p_class = find_known(core, by, tier_class[by]);
	if (*p_class < core->class_count) {
		return KV_OK;
	}
	*p_class = find_closed(core);
	if (*p_class == core->class_cap) {
		uint32_t cap = core->class_cap ? core->class_cap * 2 : 16;
		kvd_class_t *more =
			kv_resize(core->env, core->classes, core->class_cap * sizeof *more, cap * sizeof *more);

		if (!more) {
			return KV_ERR_NOMEM;
		}
		core->classes = more;
		core->class_cap = cap;
	}
	made = &core->classes[*p_class];
	*made = (kvd_class_t){.ns = ns, .tier_class = {tier_class[KVD_CPU], tier_class[KVD_DISK]}};
	kvd_order_init(&made->order[KVD_CPU]);
	kvd_order_init(&made->order[KVD_DISK]);
	core->class_count += *p_class == core->class_count;

	return KV_OK;
}

int kvd_class_close(kvd_core_t *core, uint32_t slot_class)
{
	kvd_class_t *class = &core->classes[slot_class];

	if (class->tier_class[KVD_CPU] == KVD_NONE && class->tier_class[KVD_DISK] == KVD_NONE) {
		return 0;
	}
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		const kvd_rebalance_t *rebalance = &core->rebalance[t];

		if (class->order[t].count > 0 ||
		    (rebalance->slab != KVD_NONE && (rebalance->from == slot_class || rebalance->to == slot_class))) {
			return 0;
		}
	}
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		if (class->tier_class[t] != KVD_NONE) {
			kvs_class_close(core->tier[t], class->tier_class[t]);
		}
		core->rebalance[t].wanting -= class->wants[t];
	}
	*class = (kvd_class_t){.ns = KVD_NONE, .tier_class = {KVD_NONE, KVD_NONE}};
	kvd_order_init(&class->order[KVD_CPU]);
	kvd_order_init(&class->order[KVD_DISK]);

	return 1;
}

void kvd_class_request_slots(kvd_core_t *core, uint32_t slot_class, kvd_set_t t)
{
	kvd_class_t *class = &core->classes[slot_class];

	class->used_ns = core->now_ns;
	/* A single class has no other to take a slab from. */
	if (core->class_count > 1 && class->tier_class[t] != KVD_NONE && !class->wants[t] &&
	    core->now_ns >= class->ask_after_ns[t] && kvd_slab_ops(core, t) &&
	    kvd_slab_ops(core, t)->is_short(core->tier[t], class->tier_class[t])) {
		class->wants[t] = 1;
		core->rebalance[t].wanting++;
	}
}

int kvd_class_expects_slots(const kvd_core_t *core, uint32_t slot_class, kvd_set_t t)
{
	const kvd_rebalance_t *rebalance = &core->rebalance[t];

	return core->classes[slot_class].wants[t] || (rebalance->slab != KVD_NONE && rebalance->to == slot_class) ||
	       (kvd_slab_ops(core, t) &&
		kvd_slab_ops(core, t)->is_coming(core->tier[t], core->classes[slot_class].tier_class[t]));
}

void kvd_class_update(kvd_core_t *core, uint32_t slot_class, kvd_set_t t)
{
	const kvs_rebalance_ops_t *ops = kvd_slab_ops(core, t);
	kvd_class_t *class = &core->classes[slot_class];

	if (ops && class->tier_class[t] != KVD_NONE) {
		class->unit[t] = ops->slab_bytes(core->tier[t], class->tier_class[t]);
	}
	kvd_class_request_slots(core, slot_class, t);
}

void kvd_class_adopt(kvd_core_t *core, uint32_t slot_class, uint32_t memory)
{
	const kvs_rebalance_ops_t *ops = kvd_slab_ops(core, KVD_CPU);
	kvd_class_t *class = &core->classes[slot_class];

	class->memory = memory;
	class->slot_bytes = kvs_slot_bytes(core->tier[KVD_CPU], class->tier_class[KVD_CPU]);
	class->unit[KVD_CPU] = ops ? ops->slab_bytes(core->tier[KVD_CPU], class->tier_class[KVD_CPU]) : 0;
}

static uint64_t slot_stride(const kvs_geometry_t *geometry)
{
	return ((uint64_t)geometry->block_bytes + 4095u) / 4096u * 4096u;
}

kv_status_t kvd_class_open(kvd_core_t *core, const kvd_space_open_t *ask, const kvs_geometry_t *geometry,
			   uint32_t *p_class)
{
	uint32_t tier_class[KVD_TIERS] = {KVD_NONE, KVD_NONE};
	const char *name = core->ns[ask->ns]->name;
	kv_status_t status = kvs_class_open_in(core->tier[KVD_CPU], ask->memory, name, geometry, &tier_class[KVD_CPU]);

	if (status == KV_OK && kvd_disk(core) && ask->memory == 0) {
		status = kvs_class_open(kvd_disk(core), name, geometry, &tier_class[KVD_DISK]);
	}
	if (status == KV_OK) {
		status = kvd_class_find(core, tier_class, ask->ns, p_class);
	}
	if (status == KV_OK) {
		core->classes[*p_class].memory = ask->memory;
		core->classes[*p_class].tier_class[KVD_CPU] = tier_class[KVD_CPU];
		core->classes[*p_class].slot_bytes = slot_stride(geometry);
		kvd_class_update(core, *p_class, KVD_CPU);
		kvd_class_update(core, *p_class, KVD_DISK);
	}
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS && status != KV_OK; t++) {
		if (tier_class[t] != KVD_NONE && find_known(core, t, tier_class[t]) == core->class_count) {
			kvs_class_close(t == KVD_DISK ? kvd_disk(core) : core->tier[t], tier_class[t]);
		}
	}

	return status;
}

uint32_t kvd_class_coldest(const kvd_core_t *core, uint32_t slot_class, kvd_set_t t, uint64_t *p_stamp)
{
	/* The search takes marks off the order that speak for no victim. It changes no block, so callers that only ask
	 * may have a const core. */
	kvd_index_t *ix = (kvd_index_t *)&core->ix;
	uint32_t id = core->policy->victim(ix, &core->classes[slot_class].order[t], t);

	if (id != KVD_NONE) {
		uint32_t mark = kvd_node_of(ix, kvd_block_at(ix, id))->marks[t];

		*p_stamp = ((const kvd_mark_t *)kvd_obj_at(&ix->marks, mark))->stamp;
	}

	return id;
}
