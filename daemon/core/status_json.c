/* STATUS as JSON; only what namespace `ns` may see. */
#include "core/base/core_impl.h"
#include "core/block/admission.h"
#include "core/put/put.h"
#include "core/base/share.h"

#include "kv/json.h"

static void tier_json(kvd_core_t *core, kv_json_t *json, kvd_set_t t, uint32_t memory)
{
	kvs_usage_t usage;

	kvs_usage_of(core->tier[t], memory, &usage);
	kv_json_open(json, NULL, '{');
	kv_json_text(json, "medium", memory > 0 ? "GPU" : core->tier[t]->ops->medium);
	kv_json_numbers(json, {"limit_bytes", usage.limit_bytes}, {"charged_bytes", usage.charged_bytes},
			{"used_bytes", usage.used_bytes}, {"quarantined_bytes", usage.quarantined_bytes},
			{"slots", usage.slots}, {"free_slots", usage.free_slots}, {"used_slots", usage.used_slots},
			{"quarantined_slots", usage.quarantined_slots});
	kv_json_close(json, '}');
}

static void group_json(kv_json_t *json, const kv_group_t *group, uint32_t block_bytes)
{
	static const char *const rules[] = {"full", "window", "state"};

	kv_json_open(json, NULL, '{');
	kv_json_u64(json, "group", group->id);
	kv_json_text(json, "rule", rules[group->rule]);
	kv_json_u64(json, "block_tokens", group->block_tokens);
	kv_json_u64(json, "block_bytes", block_bytes);
	if (group->rule == KV_RULE_WINDOW) {
		kv_json_u64(json, "window", group->window);
	}
	kv_json_close(json, '}');
}

static void space_json(kvd_core_t *core, kv_json_t *json, const kvd_space_t *space)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, space->tree);

	kv_json_open(json, NULL, '{');
	kv_json_u64(json, "space", space->id);
	kv_json_u64(json, "epoch", space->epoch);
	kv_json_text(json, "identity", space->identity);
	kv_json_text(json, "layout", space->layout);
	kv_json_u64(json, "hash_tokens", space->hash_tokens);
	kv_json_open(json, "groups", '[');
	for (uint32_t i = 0; i < space->group_count; i++) {
		group_json(json, &space->groups[i], space->blocks[i].geometry.block_bytes);
	}
	kv_json_close(json, ']');
	kv_json_u64(json, "blocks", tree->blocks - tree->private_blocks);
	kv_json_u64(json, space->memory > 0 ? "blocks_gpu" : "blocks_cpu", tree->in[KVD_CPU] - tree->private_blocks);
	kv_json_u64(json, "blocks_disk", tree->in[KVD_DISK]);
	kv_json_close(json, '}');
}

static void shares_json(const kvd_core_t *core, kv_json_t *json, uint32_t ns)
{
	static const char *const names[] = {"cpu", "disk", "index", "gpu"};

	kv_json_open(json, "shares", '[');
	for (kvd_resource_t what = 0; what < KVD_SHARE_GPU + core->gpu_memories; what++) {
		kv_json_open(json, NULL, '{');
		kv_json_text(json, "resource", names[what < KVD_SHARE_GPU ? what : KVD_SHARE_GPU]);
		if (what >= KVD_SHARE_GPU) {
			kv_json_u64(json, "gpu", what - KVD_SHARE_GPU); /* in the order of the tiers */
		}
		kv_json_numbers(json, {"share", kvd_share_of(core, ns, what)}, {"used", kvd_share_used(core, ns, what)},
				{"borrowed", kvd_share_over(core, ns, what, 0)});
		if (core->ns[ns]->parts.max[what]) {
			kv_json_u64(json, "max", core->ns[ns]->parts.max[what]);
		}
		if (what == KVD_SHARE_CPU || what >= KVD_SHARE_GPU) {
			kv_json_u64(json, "irreclaimable", kvd_share_irreclaimable(core, ns, kvd_share_memory(what)));
		}
		kv_json_close(json, '}');
	}
	kv_json_close(json, ']');
}

static void admission_json(const kvd_core_t *core, kv_json_t *json, uint32_t ns)
{
	const kv_metrics_t *m = core->world.metrics;

	kv_json_open(json, "admission", '{');
	kv_json_text(json, "mode", core->config.admission ? "second_use" : "all");
	kv_json_bool(json, "thrashes", kvd_admission_thrashes(core, ns));
	kv_json_numbers(json, {"not_admitted", kv_ns_metric_get(m, ns, KV_NM_NOT_ADMITTED)},
			{"evicted_unhit", kv_ns_metric_get(m, ns, KV_NM_EVICTED_UNHIT)});
	kv_json_close(json, '}');
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

static void instance_json(kvd_core_t *core, kv_json_t *json, const kvd_instance_rec_t *instance)
{
	kv_json_open(json, NULL, '{');
	kv_json_text(json, "instance", instance->name);
	kv_json_numbers(json, {"leases", instance->lease_count}, {"puts", put_count(core, instance)},
			{"pinned_bytes", instance->pinned_bytes[KVD_HOST_MEM]},
			{"unfinished_bytes", instance->unfinished_bytes[KVD_HOST_MEM]},
			{"gpu_pinned_bytes", kvd_sum_of_memories(instance->pinned_bytes, 1)},
			{"gpu_unfinished_bytes", kvd_sum_of_memories(instance->unfinished_bytes, 1)});
	kv_json_open(json, "members", '[');
	for (uint32_t local = 0; local < KVD_INSTANCE_MEMBERS; local++) {
		const kvd_member_rec_t *member = instance->members[local] == KVD_NONE
							 ? NULL
							 : kvd_obj_at(&core->members, instance->members[local]);

		if (member) {
			kv_json_open(json, NULL, '{');
			kv_json_u64(json, "member", member->id);
			kv_json_text(json, "role",
				     member->role == 0   ? "scheduler"
				     : member->role == 1 ? "worker"
							 : "both");
			kv_json_u64(json, "rank", member->rank);
			kv_json_bool(json, "open", (int)member->open);
			if (core->world.describe) {
				core->world.describe(core->world.ctx, member->id, json);
			}
			kv_json_close(json, '}');
		}
	}
	kv_json_close(json, ']');
	kv_json_close(json, '}');
}

size_t kvd_core_status_json(kvd_core_t *core, uint32_t ns, uint32_t detail, char *out, size_t cap)
{
	kv_json_t json = kv_json(out, cap);
	const kvd_ns_t *name_space = ns < core->ns_count ? core->ns[ns] : NULL;

	kv_json_open(&json, NULL, '{');
	kv_json_text(&json, "namespace", name_space ? name_space->name : "");
	kv_json_u64(&json, "incarnation", core->config.incarnation);
	kv_json_text(&json, "policy", core->policy->name);
	kv_json_numbers(&json, {"max_index_blocks", core->config.max_index_blocks},
			{"write_behind_queue", core->ix.queued}, {"reads_in_flight", core->reads},
			{"writes_in_flight", core->writes});
	kv_json_open(&json, "tiers", '[');
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		for (uint32_t m = 0; core->tier[t] && m <= (t == KVD_CPU ? core->gpu_memories : 0); m++) {
			tier_json(core, &json, t, m);
		}
	}
	kv_json_close(&json, ']');

	if (name_space) {
		admission_json(core, &json, ns);
		shares_json(core, &json, ns);
	}
	kv_json_open(&json, "spaces", '[');
	for (uint32_t id = 1; detail >= 1 && name_space && id <= name_space->number_made; id++) {
		if (name_space->numbers[id]) {
			space_json(core, &json, name_space->numbers[id]);
		}
	}
	kv_json_close(&json, ']');
	kv_json_open(&json, "instances", '[');
	for (uint32_t i = core->instance_list.head; detail >= 1 && i != KVD_NONE;
	     i = kvd_instance_at(core, i)->of_core.next) {
		if (kvd_instance_at(core, i)->ns == ns) {
			instance_json(core, &json, kvd_instance_at(core, i));
		}
	}
	kv_json_close(&json, ']');
	kv_json_close(&json, '}');

	return json.text.len;
}
