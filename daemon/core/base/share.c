#include "core/base/core_impl.h"
#include "core/base/share.h"

/* ---- what is used and what is due ------------------------------------------------------------ */

static kvd_set_t tier_of(kvd_resource_t what)
{
	return what == KVD_SHARE_DISK ? KVD_DISK : KVD_CPU;
}

/* DISK asks for classes in host memory: those in the memory of a GPU have no files (decision 057). */
static int counts(const kvd_class_t *class, kvd_resource_t what)
{
	return class->memory == kvd_share_memory(what) && class->tier_class[tier_of(what)] != KVD_NONE;
}

uint64_t kvd_share_used(const kvd_core_t *core, uint32_t ns, kvd_resource_t what)
{
	kvd_set_t t = tier_of(what);
	uint64_t bytes = 0;

	if (what == KVD_SHARE_INDEX) {
		return ns == KVD_NONE ? core->unowned_blocks : core->ns[ns]->blocks;
	}
	for (uint32_t c = 0; core->tier[t] && c < core->class_count; c++) {
		const kvd_class_t *class = &core->classes[c];

		/* Whole slabs and files, free slots included: no other namespace can use those. */
		bytes += class->ns == ns && counts(class, what) ? kvs_class_bytes(core->tier[t], class->tier_class[t])
								: 0;
	}

	return bytes;
}

uint64_t kvd_share_of(const kvd_core_t *core, uint32_t ns, kvd_resource_t what)
{
	return ns == KVD_NONE ? 0 : core->ns[ns]->share[what];
}

uint64_t kvd_share_max(const kvd_core_t *core, uint32_t ns, kvd_resource_t what)
{
	uint64_t most = core->ns[ns]->parts.max[what];

	return most ? most : UINT64_MAX;
}

/* What a tier needs for ledger, digests and metadata is taken off all shares alike. Otherwise each namespace could be
 * within its share and the tier full. */
static uint64_t without_overhead(const kvd_core_t *core, kvd_resource_t what, uint64_t share)
{
	kvd_set_t t = tier_of(what);
	uint64_t overhead;
	kvs_usage_t usage;

	kvs_usage_of(core->tier[t], kvd_share_memory(what), &usage);
	if (share >= usage.limit_bytes) {
		return share;
	}
	overhead = usage.charged_bytes;
	for (uint32_t c = 0; c < core->class_count; c++) {
		const kvd_class_t *class = &core->classes[c];

		overhead -= counts(class, what) ? kvs_class_bytes(core->tier[t], class->tier_class[t]) : 0;
	}

	return (uint64_t)((double)share * ((double)(usage.limit_bytes - overhead) / (double)usage.limit_bytes));
}

uint64_t kvd_share_over(const kvd_core_t *core, uint32_t ns, kvd_resource_t what, uint64_t more)
{
	uint64_t used = kvd_share_used(core, ns, what) + more, share = kvd_share_of(core, ns, what);

	/* The index counts blocks, and has no overhead. */
	if (what != KVD_SHARE_INDEX && core->tier[tier_of(what)]) {
		share = without_overhead(core, what, share);
	}

	return used > share ? used - share : 0;
}

static uint64_t total_of(const kvd_core_t *core, kvd_resource_t what)
{
	kvs_usage_t usage = {0};

	if (what == KVD_SHARE_INDEX) {
		return core->config.max_index_blocks;
	}
	if (core->tier[tier_of(what)] && kvd_share_memory(what) <= core->gpu_memories) {
		kvs_usage_of(core->tier[tier_of(what)], kvd_share_memory(what), &usage);
	}

	return usage.limit_bytes;
}

void kvd_shares_compute(kvd_core_t *core)
{
	for (kvd_resource_t what = 0; what < KVD_SHARES; what++) {
		uint64_t total = total_of(core, what), given = 0;
		uint32_t others = 0;

		for (uint32_t n = 0; n < core->ns_count; n++) {
			given += core->ns[n]->parts.given[what];
			others += core->ns[n]->parts.given[what] == 0;
		}
		for (uint32_t n = 0; n < core->ns_count; n++) {
			kvd_ns_t *ns = core->ns[n];
			uint64_t share = ns->parts.given[what] ? ns->parts.given[what]
					 : total > given       ? (total - given) / others
							       : 0;
			uint64_t most = kvd_share_max(core, n, what);

			/* What a maximum cuts off a share goes to no other namespace's: it is lent. */
			ns->share[what] = share < most ? share : most;
			/* A tier enforces its maximum where it makes a slab or a file, the index where a block is
			 * inserted. Memory of GPUs has none. */
			if (what != KVD_SHARE_INDEX && what < KVD_SHARE_GPU && core->tier[tier_of(what)]) {
				kv_status_t status = kvs_tier_cap(core->tier[tier_of(what)], ns->name, most);

				kv_assert(status ==
					  KV_OK); /* a tier keeps caps for as many namespaces as there may be */
			}
		}
	}
}

kv_status_t kvd_namespace_share(kvd_core_t *core, uint32_t ns, const kvd_parts_t *parts)
{
	if (ns >= core->ns_count) {
		return KV_ERR_ARG;
	}
	core->ns[ns]->parts = *parts;
	kvd_shares_compute(core);

	return KV_OK;
}

/* ---- what cannot be reclaimed ---------------------------------------------------------------- */

uint64_t kvd_share_irreclaimable(const kvd_core_t *core, uint32_t ns, uint32_t memory)
{
	const kvd_ns_t *name_space = core->ns[ns];
	uint64_t slots = name_space->pinned_bytes[memory] + name_space->unfinished_bytes[memory];

	return memory == KVD_HOST_MEM ? slots + name_space->tail_bytes : slots;
}

uint64_t kvd_share_handover_max(const kvd_core_t *core, uint32_t ns)
{
	uint64_t most = core->config.max_handover_bytes;

	/* Entries that no consumer takes keep their pins until they expire: the rest of the share is for leases and
	 * puts meanwhile. */
	return most ? most : core->ns[ns]->share[KVD_SHARE_CPU] / 4u;
}

uint64_t kvd_share_pin_room(const kvd_core_t *core, uint32_t ns, uint32_t slot_class)
{
	const kvd_ns_t *name_space = core->ns[ns];
	uint32_t memory = core->classes[slot_class].memory;
	uint64_t charged = kvd_share_irreclaimable(core, ns, memory),
		 share = name_space->share[kvd_share_resource(memory)];
	uint64_t blocks = share > charged ? (share - charged) / core->classes[slot_class].slot_bytes : 0;
	/* A pinned block keeps its entry in the index too, and an unfinished one will need one. Both limits hold, or
	 * small blocks would fill the index for others. */
	uint64_t named = name_space->pinned_blocks + name_space->unfinished_blocks;
	uint64_t index = name_space->share[KVD_SHARE_INDEX] > named ? name_space->share[KVD_SHARE_INDEX] - named : 0;

	return blocks < index ? blocks : index;
}

int kvd_share_may_open(const kvd_core_t *core, uint32_t slot_class, kvs_loc_t loc)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	const kvs_rebalance_ops_t *ops = tier->ops->rebalance;
	const uint32_t ns = core->classes[slot_class].ns;
	const kvd_resource_t what = kvd_share_resource(core->classes[slot_class].memory);
	kvs_slab_desc_t desc;
	uint64_t open = 0;

	/* Another slot of the slab is open already: this one keeps no further slab from changing hands. */
	if (!ops || ops->describe_slab(tier, kv_slot_slab(loc.slot), &desc) != KV_OK || desc.open > 1 ||
	    kvd_share_over(core, ns, what, 0) == 0) {
		return 1;
	}
	for (uint32_t c = 0; c < core->class_count; c++) {
		const kvd_class_t *class = &core->classes[c];

		open += class->ns == ns && counts(class, what)
				? ops->open_slots(tier, class->tier_class[KVD_CPU]) * class->slot_bytes
				: 0;
	}

	/* Its slabs with open slots stay within the share, so what it has borrowed can go back. */
	return open <= core->ns[ns]->share[what];
}

uint64_t kvd_share_instance_room(const kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t memory,
				 uint64_t cap, const uint64_t own[KVD_MEMORIES])
{
	uint64_t most = cap ? cap : core->ns[instance->ns]->share[kvd_share_resource(memory)] / 2u;
	/* Without caps of their own pins and unfinished puts end together at half of the share, so that one instance
	 * that gives nothing back leaves room for others. */
	uint64_t charged = cap ? own[memory] : instance->pinned_bytes[memory] + instance->unfinished_bytes[memory];

	return most > charged ? most - charged : 0;
}

int kvd_share_may_promote(const kvd_core_t *core, uint32_t ns, uint32_t slot_class)
{
	const kvd_class_t *class = &core->classes[slot_class];
	const uint32_t memory = class->memory;

	return kvd_share_irreclaimable(core, ns, memory) + class->slot_bytes <=
	       core->ns[ns]->share[kvd_share_resource(memory)] / 2u;
}

void kvd_share_count_unfinished(kvd_core_t *core, kvd_instance_rec_t *instance, uint32_t slot_class, int taken)
{
	const kvd_class_t *class = &core->classes[slot_class];
	uint32_t memory = class->memory;
	kvd_ns_t *ns = core->ns[instance->ns];
	uint64_t bytes = taken ? class->slot_bytes : 0 - class->slot_bytes;

	instance->unfinished_bytes[memory] += bytes;
	ns->unfinished_bytes[memory] += bytes;
	ns->unfinished_blocks += taken ? 1 : UINT64_MAX;
}

kv_status_t kvd_core_add_memory(kvd_core_t *core, kvs_tier_t *pool, uint32_t *p_memory)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	kv_status_t status = tier->ops->add_memory ? tier->ops->add_memory(tier, pool, p_memory) : KV_ERR_UNSUPPORTED;

	if (status == KV_OK) {
		core->gpu_memories = *p_memory;
		kvd_shares_compute(core);
	}

	return status;
}
