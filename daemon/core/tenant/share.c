#include "core/core_impl.h"
#include "core/tenant/share.h"

/* ---- what is used and what is due ------------------------------------------------------------ */

static kvd_set_t tier_of(kvd_resource_t what)
{
	return what == KVD_SHARE_DISK ? KVD_DISK : KVD_CPU;
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

		bytes += class->ns == ns && class->tier_class[t] != KVD_NONE
				 ? kvs_class_bytes(core->tier[t], class->tier_class[t])
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
static uint64_t without_overhead(const kvd_core_t *core, kvd_set_t t, uint64_t share)
{
	uint64_t overhead;
	kvs_usage_t usage;

	kvs_usage(core->tier[t], &usage);
	if (share >= usage.limit_bytes) {
		return share;
	}
	overhead = usage.charged_bytes;
	for (uint32_t c = 0; c < core->class_count; c++) {
		uint32_t tier_class = core->classes[c].tier_class[t];

		overhead -= tier_class == KVD_NONE ? 0 : kvs_class_bytes(core->tier[t], tier_class);
	}

	return (uint64_t)((double)share * ((double)(usage.limit_bytes - overhead) / (double)usage.limit_bytes));
}

uint64_t kvd_share_over(const kvd_core_t *core, uint32_t ns, kvd_resource_t what, uint64_t more)
{
	uint64_t used = kvd_share_used(core, ns, what) + more, share = kvd_share_of(core, ns, what);

	if (what != KVD_SHARE_INDEX && core->tier[tier_of(what)]) {
		share = without_overhead(core, tier_of(what), share);
	}

	return used > share ? used - share : 0;
}

static uint64_t total_of(const kvd_core_t *core, kvd_resource_t what)
{
	kvs_tier_t *tier = core->tier[tier_of(what)];
	kvs_usage_t usage = {0};

	if (what == KVD_SHARE_INDEX) {
		return core->config.max_index_blocks;
	}
	if (tier) {
		kvs_usage(tier, &usage);
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

			ns->share[what] = share < most ? share : most;
			if (what != KVD_SHARE_INDEX && core->tier[tier_of(what)]) {
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

uint64_t kvd_share_irreclaimable(const kvd_core_t *core, uint32_t ns)
{
	return core->ns[ns]->pinned_bytes + core->ns[ns]->unfinished_bytes + core->ns[ns]->tail_bytes +
	       core->ns[ns]->wait_bytes;
}

uint64_t kvd_share_handover_max(const kvd_core_t *core, uint32_t ns)
{
	uint64_t most = core->config.max_handover_bytes;

	return most ? most : core->ns[ns]->share[KVD_SHARE_CPU] / 4u;
}

uint64_t kvd_share_pin_room(const kvd_core_t *core, uint32_t ns, uint32_t slot_class)
{
	const kvd_ns_t *name_space = core->ns[ns];
	uint64_t charged = kvd_share_irreclaimable(core, ns), share = name_space->share[KVD_SHARE_CPU];
	uint64_t blocks = share > charged ? (share - charged) / core->classes[slot_class].slot_bytes : 0;
	uint64_t named = name_space->pinned_blocks + name_space->unfinished_blocks;
	uint64_t index = name_space->share[KVD_SHARE_INDEX] > named ? name_space->share[KVD_SHARE_INDEX] - named : 0;

	return blocks < index ? blocks : index;
}

static uint64_t slab_bytes(const kvd_core_t *core, uint32_t ns, const kvs_slab_desc_t *desc)
{
	for (uint32_t c = 0; c < core->class_count; c++) {
		if (core->classes[c].tier_class[KVD_CPU] == desc->slot_class) {
			return core->classes[c].ns == ns ? desc->slots * core->classes[c].slot_bytes : 0;
		}
	}

	return 0;
}

int kvd_share_may_open(const kvd_core_t *core, uint32_t ns, kvs_loc_t loc)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	const kvs_rebalance_ops_t *ops = tier->ops->rebalance;
	kvs_slab_desc_t desc;
	uint64_t open = 0;

	if (!ops || ops->describe_slab(tier, kv_slot_slab(loc.slot), &desc) != KV_OK || desc.open > 1 ||
	    kvd_share_over(core, ns, KVD_SHARE_CPU, 0) == 0) {
		return 1;
	}
	for (uint32_t slab = 0; slab < ops->slab_count(tier); slab++) {
		if (ops->describe_slab(tier, slab, &desc) == KV_OK && desc.open > 0) {
			open += slab_bytes(core, ns, &desc);
		}
	}

	return open <= core->ns[ns]->share[KVD_SHARE_CPU];
}

uint64_t kvd_share_instance_room(const kvd_core_t *core, const kvd_instance_rec_t *instance, uint64_t cap, uint64_t own)
{
	uint64_t most = cap ? cap : core->ns[instance->ns]->share[KVD_SHARE_CPU] / 2u;
	uint64_t charged = cap ? own : instance->pinned_bytes + instance->unfinished_bytes;

	return most > charged ? most - charged : 0;
}

void kvd_share_count_unfinished(kvd_core_t *core, kvd_instance_rec_t *instance, uint64_t bytes, int taken)
{
	kvd_ns_t *ns = core->ns[instance->ns];

	bytes = taken ? bytes : 0 - bytes;
	instance->unfinished_bytes += bytes;
	ns->unfinished_bytes += bytes;
	ns->unfinished_blocks += taken ? 1 : UINT64_MAX;
}
