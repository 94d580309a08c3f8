/* STATUS as JSON; only what namespace `ns` may see. */
#include "core/core_impl.h"
#include "core/json.h"
#include "core/put/put.h"
#include "core/tenant/share.h"

static void tier_json(kvd_core_t *core, kvd_json_t *json, kvd_set_t t, uint32_t memory)
{
	kvs_usage_t usage;

	kvs_usage_of(core->tier[t], memory, &usage);
	kvd_json_open(json, NULL, '{');
	kvd_json_text(json, "medium", memory > 0 ? "GPU" : core->tier[t]->ops->medium);
	kvd_json_u64(json, "limit_bytes", usage.limit_bytes);
	kvd_json_u64(json, "charged_bytes", usage.charged_bytes);
	kvd_json_u64(json, "used_bytes", usage.used_bytes);
	kvd_json_u64(json, "quarantined_bytes", usage.quarantined_bytes);
	kvd_json_u64(json, "slots", usage.slots);
	kvd_json_u64(json, "free_slots", usage.free_slots);
	kvd_json_u64(json, "used_slots", usage.used_slots);
	kvd_json_u64(json, "quarantined_slots", usage.quarantined_slots);
	kvd_json_close(json, '}');
}

static void group_json(kvd_json_t *json, const kv_group_t *group)
{
	static const char *const rules[] = {"full", "window", "state"};

	kvd_json_open(json, NULL, '{');
	kvd_json_u64(json, "group", group->id);
	kvd_json_text(json, "rule", rules[group->rule]);
	kvd_json_u64(json, "block_tokens", group->block_tokens);
	if (group->rule == KV_RULE_WINDOW) {
		kvd_json_u64(json, "window", group->window);
	}
	kvd_json_close(json, '}');
}

static void space_json(kvd_core_t *core, kvd_json_t *json, const kvd_space_t *space)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, space->tree);

	kvd_json_open(json, NULL, '{');
	kvd_json_u64(json, "space", space->id);
	kvd_json_u64(json, "epoch", space->epoch);
	kvd_json_text(json, "identity", space->identity);
	kvd_json_text(json, "layout", space->layout);
	kvd_json_u64(json, "block_bytes", space->geometry.block_bytes);
	kvd_json_u64(json, "hash_tokens", space->hash_tokens);
	kvd_json_open(json, "groups", '[');
	for (uint32_t i = 0; i < space->group_count; i++) {
		group_json(json, &space->groups[i]);
	}
	kvd_json_close(json, ']');
	kvd_json_u64(json, "blocks", tree->blocks - tree->private_blocks);
	kvd_json_u64(json, core->classes[space->slot_class].memory > 0 ? "blocks_gpu" : "blocks_cpu",
		     tree->in[KVD_CPU] - tree->private_blocks);
	kvd_json_u64(json, "blocks_disk", tree->in[KVD_DISK]);
	kvd_json_close(json, '}');
}

static void shares_json(const kvd_core_t *core, kvd_json_t *json, uint32_t ns)
{
	static const char *const names[KVD_SHARES] = {"cpu", "disk", "index", "gpu"};

	kvd_json_open(json, "shares", '[');
	for (kvd_resource_t what = 0; what < KVD_SHARES; what++) {
		if (what == KVD_SHARE_GPU && core->gpu_memories == 0) {
			continue;
		}
		kvd_json_open(json, NULL, '{');
		kvd_json_text(json, "resource", names[what]);
		kvd_json_u64(json, "share", kvd_share_of(core, ns, what));
		kvd_json_u64(json, "used", kvd_share_used(core, ns, what));
		kvd_json_u64(json, "borrowed", kvd_share_over(core, ns, what, 0));
		if (core->ns[ns]->parts.max[what]) {
			kvd_json_u64(json, "max", core->ns[ns]->parts.max[what]);
		}
		if (what == KVD_SHARE_CPU || what == KVD_SHARE_GPU) {
			kvd_json_u64(
				json, "irreclaimable",
				kvd_share_irreclaimable(core, ns, what == KVD_SHARE_GPU ? KVD_GPU_MEM : KVD_HOST_MEM));
		}
		kvd_json_close(json, '}');
	}
	kvd_json_close(json, ']');
}

static uint32_t put_count(kvd_core_t *core, const kvd_instance_rec_t *instance)
{
	uint32_t count = 0;

	for (uint32_t p = instance->puts.head; p != KVD_NONE;
	     p = ((kvd_put_t *)kvd_obj_at(&core->puts, p))->of_instance.next) {
		count++;
	}

	return count;
}

static void instance_json(kvd_core_t *core, kvd_json_t *json, const kvd_instance_rec_t *instance)
{
	kvd_json_open(json, NULL, '{');
	kvd_json_text(json, "instance", instance->name);
	kvd_json_u64(json, "leases", instance->lease_count);
	kvd_json_u64(json, "puts", put_count(core, instance));
	kvd_json_u64(json, "pinned_bytes", instance->pinned_bytes[KVD_HOST_MEM]);
	kvd_json_u64(json, "unfinished_bytes", instance->unfinished_bytes[KVD_HOST_MEM]);
	kvd_json_u64(json, "gpu_pinned_bytes", instance->pinned_bytes[KVD_GPU_MEM]);
	kvd_json_u64(json, "gpu_unfinished_bytes", instance->unfinished_bytes[KVD_GPU_MEM]);
	kvd_json_open(json, "members", '[');
	for (uint32_t local = 0; local < KVD_INSTANCE_MEMBERS; local++) {
		const kvd_member_rec_t *member = instance->members[local] == KVD_NONE
							 ? NULL
							 : kvd_obj_at(&core->members, instance->members[local]);

		if (member) {
			kvd_json_open(json, NULL, '{');
			kvd_json_u64(json, "member", member->id);
			kvd_json_text(json, "role",
				      member->role == 0   ? "scheduler"
				      : member->role == 1 ? "worker"
							  : "both");
			kvd_json_u64(json, "rank", member->rank);
			kvd_json_bool(json, "open", (int)member->open);
			if (core->world.describe) {
				core->world.describe(core->world.ctx, member->id, json);
			}
			kvd_json_close(json, '}');
		}
	}
	kvd_json_close(json, ']');
	kvd_json_close(json, '}');
}

size_t kvd_core_status_json(kvd_core_t *core, uint32_t ns, uint32_t detail, char *out, size_t cap)
{
	kvd_json_t json = {.out = out, .cap = cap};
	const kvd_ns_t *name_space = ns < core->ns_count ? core->ns[ns] : NULL;

	kvd_json_open(&json, NULL, '{');
	kvd_json_text(&json, "namespace", name_space ? name_space->name : "");
	kvd_json_u64(&json, "incarnation", core->config.incarnation);
	kvd_json_text(&json, "policy", core->policy->name);
	kvd_json_u64(&json, "max_index_blocks", core->config.max_index_blocks);
	kvd_json_u64(&json, "write_behind_queue", core->ix.queued);
	kvd_json_u64(&json, "reads_in_flight", core->reads);
	kvd_json_u64(&json, "writes_in_flight", core->writes);
	kvd_json_open(&json, "tiers", '[');
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		for (uint32_t m = 0; core->tier[t] && m <= (t == KVD_CPU ? core->gpu_memories : 0); m++) {
			tier_json(core, &json, t, m);
		}
	}
	kvd_json_close(&json, ']');

	if (name_space) {
		shares_json(core, &json, ns);
	}
	kvd_json_open(&json, "spaces", '[');
	for (uint32_t id = 1; detail >= 1 && name_space && id <= name_space->space_count; id++) {
		space_json(core, &json, name_space->spaces[id]);
	}
	kvd_json_close(&json, ']');
	kvd_json_open(&json, "instances", '[');
	for (uint32_t i = core->instance_list.head; detail >= 1 && i != KVD_NONE;
	     i = kvd_instance_at(core, i)->of_core.next) {
		if (kvd_instance_at(core, i)->ns == ns) {
			instance_json(core, &json, kvd_instance_at(core, i));
		}
	}
	kvd_json_close(&json, ']');
	kvd_json_close(&json, '}');

	return json.len;
}
