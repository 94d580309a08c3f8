/* CHECK: the invariants, each named after the promise it keeps. Walks everything: for operators and tests. */
#include "core/check.h"
#include "core/block/block.h"
#include "core/base/core_impl.h"
#include "core/handover/handover.h"
#include "core/lease/lease.h"
#include "core/put/put.h"
#include "core/ends/rebalance.h"
#include "core/base/share.h"

#include "kv/json.h"

#include <stdio.h>

typedef struct kvd_sums {
	uint64_t pins, refs;
	uint64_t tree_pins; /* as the trees count them */
	uint64_t flags;     /* blocks whose flag is not what their pins are: of a hand-over first */
} kvd_sums_t;

static void sum_pins(const kvd_core_t *core, const kvd_block_t *block, kvd_sums_t *sums)
{
	const kvd_pin_t *pin;
	int handed_over = 0;

	for (uint32_t c = block->pins.head; c != KVD_NONE; c = pin->of_block.next) {
		pin = kvd_obj_at(&core->pins, c);
		handed_over |= pin->kind == KVD_PIN_HANDOVER;
		sums->pins++;
	}
	sums->flags += handed_over != kvd_index_has_pin(block, KVD_PINS_HANDOVER);
}

/* Pins and references as the blocks have them. */
static void sum_blocks(const kvd_core_t *core, kvd_sums_t *sums)
{
	*sums = (kvd_sums_t){0};
	for (uint32_t t = 0; t < core->ix.trees.made; t++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, t);

		sums->tree_pins += tree->live ? tree->pins : 0;
		for (uint32_t n = tree->live ? tree->children.head : KVD_NONE; n != KVD_NONE;
		     n = kvd_index_next_run(&core->ix, n)) {
			const kvd_node_t *node = kvd_node_at(&core->ix, n);

			for (uint32_t i = 0; i < node->len; i++) {
				const kvd_block_t *block = kvd_block_at(&core->ix, node->ids[i]);

				sums->refs += block->refs;
				sum_pins(core, block, sums);
			}
		}
	}
}

static int check_pins(kvd_core_t *core, char *why, size_t cap)
{
	uint64_t pins, refs = 0, leases = 0;
	kvd_sums_t blocks;

	if (!kvd_handovers_check(core, &pins, why, cap)) {
		return 0;
	}

	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		const kvd_instance_rec_t *instance = kvd_instance_at(core, i);

		for (uint32_t l = instance->leases.head; l != KVD_NONE; leases++) {
			const kvd_lease_t *lease = kvd_obj_at(&core->leases, l);

			pins += lease->unchained ? lease->pin_count : 1 + (lease->private_pin != KVD_NONE ? 1 : 0);
			refs += lease->n - lease->ref_from;
			l = lease->of_instance.next;
		}
		for (uint32_t p = instance->puts.head; p != KVD_NONE;) {
			const kvd_put_t *put = kvd_obj_at(&core->puts, p);

			pins += put->pinned_entries + (put->pin != KVD_NONE ? 1 : 0);
			p = put->of_instance.next;
		}
	}
	sum_blocks(core, &blocks);
	/* A write in flight and a subtree being taken down reference the block above them. */
	snprintf(why, cap, "pins %llu on blocks %llu; references %llu on blocks %llu counted %llu; leases %llu of %u",
		 (unsigned long long)pins, (unsigned long long)blocks.pins, (unsigned long long)refs,
		 (unsigned long long)blocks.refs, (unsigned long long)core->refs, (unsigned long long)leases,
		 core->leases.used);

	return pins == blocks.pins && pins == blocks.tree_pins && pins == core->pins.used &&
	       leases == core->leases.used && blocks.flags == 0 && blocks.refs == core->refs && blocks.refs >= refs &&
	       blocks.refs <= refs + core->writes + core->ix.dead_nodes;
}

static int check_caps(kvd_core_t *core, char *why, size_t cap)
{
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		const kvd_instance_rec_t *instance = kvd_instance_at(core, i);
		uint64_t pinned = 0, counted = kvd_sum_of_memories(instance->pinned_bytes, 0);

		for (uint32_t l = instance->leases.head; l != KVD_NONE;
		     l = ((kvd_lease_t *)kvd_obj_at(&core->leases, l))->of_instance.next) {
			pinned += ((kvd_lease_t *)kvd_obj_at(&core->leases, l))->bytes;
		}
		if (pinned != counted || !kvd_extent_alloc_check(&instance->extent_alloc)) {
			snprintf(why, cap, "instance %s: pinned %llu of %llu", instance->name,
				 (unsigned long long)pinned, (unsigned long long)counted);
			return 0;
		}
	}
	snprintf(why, cap, "pinned and unfinished bytes are within their limits");

	return 1;
}

/* Blocks and pins of a namespace, counted again. */
static void sum_namespace(kvd_core_t *core, uint32_t ns, kvd_ns_t *sum)
{
	for (uint32_t t = 0; t < core->ix.trees.made; t++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, t);

		if (!tree->live || tree->group_count == 0 || core->classes[tree->groups[0].slot_class].ns != ns) {
			continue;
		}
		sum->blocks += tree->blocks;
		for (uint32_t n = tree->children.head; n != KVD_NONE; n = kvd_index_next_run(&core->ix, n)) {
			const kvd_node_t *node = kvd_node_at(&core->ix, n);
			const kvd_pinned_t *pinned = node->pinned;
			const kvd_class_t *class = &core->classes[node->slot_class];
			uint64_t slot_bytes = class->slot_bytes;

			sum->pinned_blocks += pinned[KVD_PINS_ALL].blocks;
			sum->pinned_bytes[class->memory] += pinned[KVD_PINS_ALL].blocks * slot_bytes;
			sum->handover_bytes[class->memory] += pinned[KVD_PINS_HANDOVER].blocks * slot_bytes;
		}
	}
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		const kvd_instance_rec_t *instance = kvd_instance_at(core, i);

		for (uint32_t memory = 0; memory < KVD_MEMORIES; memory++) {
			sum->unfinished_bytes[memory] += instance->ns == ns ? instance->unfinished_bytes[memory] : 0;
		}
	}
}

static int are_shares_kept(const kvd_core_t *core, uint32_t n, const kvd_ns_t *sum)
{
	const kvd_ns_t *ns = core->ns[n];
	int within = 1;

	for (uint32_t memory = 0; memory < KVD_MEMORIES; memory++) {
		within = within &&
			 kvd_share_irreclaimable(core, n, memory) <= kvd_share_of(core, n, kvd_share_resource(memory));
	}

	return within && sum->blocks == ns->blocks && sum->pinned_blocks == ns->pinned_blocks &&
	       memcmp(sum->pinned_bytes, ns->pinned_bytes, sizeof ns->pinned_bytes) == 0 &&
	       memcmp(sum->unfinished_bytes, ns->unfinished_bytes, sizeof ns->unfinished_bytes) == 0 &&
	       memcmp(sum->handover_bytes, ns->handover_bytes, sizeof ns->handover_bytes) == 0 &&
	       ns->handover_bytes[KVD_HOST_MEM] + ns->tail_bytes <= kvd_share_handover_max(core, n);
}

static int check_shares(kvd_core_t *core, char *why, size_t cap)
{
	for (uint32_t n = 0; n < core->ns_count; n++) {
		const kvd_ns_t *ns = core->ns[n];
		kvd_ns_t sum = {0};

		sum_namespace(core, n, &sum);
		if (!are_shares_kept(core, n, &sum)) {
			snprintf(why, cap,
				 "namespace %u: blocks %llu of %llu, of all memories pinned %llu of %llu, unfinished "
				 "%llu of %llu, handed over %llu of %llu, share of the host's %llu",
				 n, (unsigned long long)sum.blocks, (unsigned long long)ns->blocks,
				 (unsigned long long)kvd_sum_of_memories(sum.pinned_bytes, 0),
				 (unsigned long long)kvd_sum_of_memories(ns->pinned_bytes, 0),
				 (unsigned long long)kvd_sum_of_memories(sum.unfinished_bytes, 0),
				 (unsigned long long)kvd_sum_of_memories(ns->unfinished_bytes, 0),
				 (unsigned long long)kvd_sum_of_memories(sum.handover_bytes, 0),
				 (unsigned long long)kvd_sum_of_memories(ns->handover_bytes, 0),
				 (unsigned long long)ns->share[KVD_SHARE_CPU]);
			return 0;
		}
	}
	snprintf(why, cap, "what is pinned and unfinished is within each namespace's share");

	return 1;
}

/* Slots in use: those of the sets, of puts, and of transfers; nothing else. */
static int check_slots(kvd_core_t *core, kvd_set_t t, char *why, size_t cap)
{
	uint64_t known = 0;
	kvs_usage_t usage;

	for (uint32_t tr = 0; tr < core->ix.trees.made; tr++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, tr);

		for (uint32_t n = tree->live ? tree->children.head : KVD_NONE; n != KVD_NONE;
		     n = kvd_index_next_run(&core->ix, n)) {
			const kvd_node_t *node = kvd_node_at(&core->ix, n);

			for (uint32_t i = 0; i < node->len; i++) {
				known += (t == KVD_CPU
						  ? node->slots[i]
						  : kvd_block_at(&core->ix, node->ids[i])->disk.slot) != KV_SLOT_NONE
						 ? 1
						 : 0;
			}
		}
	}
	for (uint32_t i = t == KVD_CPU ? core->instance_list.head : KVD_NONE; i != KVD_NONE;
	     i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t p = kvd_instance_at(core, i)->puts.head; p != KVD_NONE;) {
			const kvd_put_t *put = kvd_obj_at(&core->puts, p);

			for (uint32_t e = put->next; e < put->n; e++) {
				kvd_entry_state_t state = put->entries[e].state;

				known += state == KVD_ENTRY_OPEN || state == KVD_ENTRY_FULL ||
					 state == KVD_ENTRY_WRITE_THROUGH || state == KVD_ENTRY_QUARANTINED;
			}
			p = put->of_instance.next;
		}
	}
	kvs_usage(core->tier[t], &usage);
	snprintf(why, cap, "slots used %llu quarantined %llu known %llu in flight %u",
		 (unsigned long long)usage.used_slots, (unsigned long long)usage.quarantined_slots,
		 (unsigned long long)known, core->reads + core->writes);

	/* Transfers own slots that hang on no block: the target of a write, both ends of an orphan. */
	return usage.used_slots + usage.quarantined_slots >= known &&
	       usage.used_slots + usage.quarantined_slots <= known + core->reads + core->writes;
}

static int check_mirror(kvd_core_t *core, char *why, size_t cap)
{
	uint64_t visible = 0, entries = 0;

	for (uint32_t t = 0; t < core->ix.trees.made; t++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, t);

		visible += tree->live && tree->ns != KVD_NONE ? tree->blocks : 0;
	}
	for (uint32_t n = 0; n < core->ns_count; n++) {
		entries += core->ns[n]->mirror.entries;
	}
	snprintf(why, cap, "mirror entries %llu blocks %llu", (unsigned long long)entries, (unsigned long long)visible);

	return entries <= visible;
}

static int check_index(kvd_core_t *core, char *why, size_t cap)
{
	snprintf(why, cap, "blocks %u runs %u marks %u", core->ix.blocks.used, core->ix.nodes.used,
		 core->ix.marks.used);

	return kvd_index_check(&core->ix, why, cap);
}

static int check_tier(kvd_core_t *core, kvd_set_t t, char *why, size_t cap)
{
	snprintf(why, cap, "free, used and quarantined slots add up");

	return core->tier[t] == NULL || (kvs_check(core->tier[t], why, cap) == KV_OK && check_slots(core, t, why, cap));
}

static int check_cpu_slots(kvd_core_t *core, char *why, size_t cap)
{
	return check_tier(core, KVD_CPU, why, cap);
}

static int check_disk_slots(kvd_core_t *core, char *why, size_t cap)
{
	return check_tier(core, KVD_DISK, why, cap);
}

static int check_rebalance(kvd_core_t *core, char *why, size_t cap)
{
	uint64_t named = kvd_rebalance_count_named(core);

	if (core->rebalance[KVD_CPU].slab == KVD_NONE && named == 0 && core->rebalance[KVD_CPU].named == 0) {
		snprintf(why, cap, "no slab is being rebalanced");
		return 1;
	}
	snprintf(why, cap, "slab %u is being rebalanced, leases name %llu of its slots, counted %llu",
		 core->rebalance[KVD_CPU].slab, (unsigned long long)named,
		 (unsigned long long)core->rebalance[KVD_CPU].named);

	return named == core->rebalance[KVD_CPU].named;
}

/* Members that have the space open. */
static uint32_t sum_users(const kvd_core_t *core, const kvd_space_t *space)
{
	uint32_t users = 0;

	for (uint32_t i = 0; i < core->members.made; i++) {
		const kvd_member_rec_t *member = kvd_obj_at(&core->members, i);

		users += member->id != 0 && kvd_instance_at(core, member->instance)->ns == space->ns &&
			 (member->spaces[space->id / 64u] >> space->id % 64u & 1u);
	}

	return users;
}

/* A space that is named has a number, and the mirror has its epoch there. */
static int check_spaces(kvd_core_t *core, char *why, size_t cap)
{
	for (uint32_t n = 0; n < core->ns_count; n++) {
		const kvd_ns_t *ns = core->ns[n];
		uint32_t open = 0;

		for (uint32_t i = 0; i < ns->space_made; i++) {
			const kvd_space_t *space = ns->spaces[i];
			const kvd_tree_t *tree = space ? kvd_tree_at(&core->ix, space->tree) : NULL;

			open += space && space->id != 0;
			if (space && (tree->space != i || space->users != (space->id ? sum_users(core, space) : 0) ||
				      (space->id ? ns->numbers[space->id] != space ||
							   ns->mirror.epochs[space->id] != space->epoch
						 : space->handovers + tree->pins + tree->puts != 0))) {
				snprintf(why, cap, "namespace %u: space %u of tree %u, used by %u members", n,
					 space->id, space->tree, space->users);
				return 0;
			}
		}
		if (open != ns->number_count) {
			snprintf(why, cap, "namespace %u: %u spaces have a number of %u given", n, open,
				 ns->number_count);
			return 0;
		}
	}
	snprintf(why, cap, "spaces that are named have a number of their own");

	return 1;
}

const kvd_check_t kvd_checks[] = {
	{"index", "P3", check_index},
	{"pins", "P4", check_pins},
	{"caps", "P5", check_caps},
	{"cpu_slots", "P4", check_cpu_slots},
	{"disk_slots", "P4", check_disk_slots},
	{"mirror", "P3", check_mirror},
	{"rebalance", "P4", check_rebalance},
	{"shares", "P5", check_shares},
	{"spaces", "P1", check_spaces},
};
const uint32_t kvd_check_count = KV_COUNT_OF(kvd_checks);

size_t kvd_core_check_json(kvd_core_t *core, char *out, size_t cap, uint32_t *p_failed)
{
	kv_json_t json = kv_json(out, cap);
	uint32_t failed = 0;

	kv_json_open(&json, NULL, '{');
	kv_json_open(&json, "checks", '[');
	for (uint32_t i = 0; i < kvd_check_count; i++) {
		char detail[256] = "";
		int ok = kvd_checks[i].run(core, detail, sizeof detail);

		failed += ok ? 0 : 1;
		kv_json_open(&json, NULL, '{');
		kv_json_text(&json, "name", kvd_checks[i].name);
		kv_json_text(&json, "promise", kvd_checks[i].promise);
		kv_json_bool(&json, "ok", ok);
		kv_json_text(&json, "detail", detail);
		kv_json_close(&json, '}');
	}
	kv_json_close(&json, ']');
	kv_json_close(&json, '}');
	*p_failed = failed;

	return json.text.len;
}
