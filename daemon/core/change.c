#include "internal.h"

#define SLOTS_A_QUANTUM 256u
#define GIVE_UP_NS      UINT64_C(1000000000)
#define AGAIN_NS        UINT64_C(100000000)
#define IDLE_NS         UINT64_C(10000000000)
#define COLDER_FACTOR   2u
#define COLDER_BY       4u                      /* requests */
#define MAX_SLABS       (KV_SLOT_MAX_SLAB + 2u) /* and one for "no slot" */

static const kvs_change_ops_t *ops_of(const kvd_core_t *core)
{
	return core->tier[KVD_CPU]->ops->change;
}

/* ---- who is short ----------------------------------------------------------------------------------------------------- */

void kvd_change_ask(kvd_core_t *core, uint32_t slot_class)
{
	kvd_class_t *class = &core->classes[slot_class];

	class->used_ns = core->now_ns;
	if (core->class_count > 1 && !class->wants && core->now_ns >= class->ask_after_ns && ops_of(core) &&
	    ops_of(core)->is_short(core->tier[KVD_CPU], class->tier_class[KVD_CPU])) {
		class->wants = 1;
		core->change.wanting++;
	}
}

/* ---- what leases name ---------------------------------------------------------------------------------------------------- */

void kvd_change_name(kvd_core_t *core, const uint32_t *slots, uint32_t n, int more)
{
	uint64_t count = 0;

	for (uint32_t i = 0; core->change.slab != KVD_NONE && i < n; i++) {
		count += kv_slot_slab(slots[i]) == core->change.slab;
	}
	core->change.named += more ? count : 0 - count;
}

/* Slots that open leases name, a slab at a time. */
static void count_named(kvd_core_t *core, uint32_t named[MAX_SLABS])
{
	memset(named, 0, MAX_SLABS * sizeof *named);
	for (uint32_t i = core->instance_list; i != KVD_NONE; i = kvd_instance_at(core, i)->next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases; l != KVD_NONE;) {
			const kvd_lease_t *lease = kvd_pool_at(&core->leases, l);
			const uint32_t *slots = kv_lease_slots(lease->header);

			for (uint32_t s = 0; s < lease->named; s++) {
				named[kv_slot_slab(slots[s])]++;
			}
			l = lease->inst_next;
		}
	}
}

uint64_t kvd_change_count(kvd_core_t *core)
{
	uint32_t named[MAX_SLABS];

	if (core->change.slab == KVD_NONE) {
		return 0;
	}
	count_named(core, named);

	return named[core->change.slab];
}

/* ---- which slab ----------------------------------------------------------------------------------------------------------- */

/* A slab to take, as good as the best so far or better. */
typedef struct choice {
	uint32_t slab; /* KVD_NONE: none */
	uint32_t from, to;
	uint32_t taken, slots;
} choice_t;

static uint32_t class_of(const kvd_core_t *core, uint32_t tier_class)
{
	for (uint32_t i = 0; i < core->class_count; i++) {
		if (core->classes[i].tier_class[KVD_CPU] == tier_class) {
			return i;
		}
	}

	return KVD_NONE;
}

/* How long the class's coldest block that can be evicted was not asked for, in requests. 0: it has none. */
static int coldest(kvd_core_t *core, uint32_t slot_class, uint64_t *p_age)
{
	uint32_t id = core->policy->victim(&core->ix, &core->classes[slot_class].order[KVD_CPU], KVD_CPU);
	uint32_t mark = id == KVD_NONE ? KVD_NONE : kvd_node_of(&core->ix, kvd_block_at(&core->ix, id))->marks[KVD_CPU];

	if (mark == KVD_NONE) {
		return 0;
	}
	*p_age = core->stamp - ((const kvd_mark_t *)kvd_pool_at(&core->ix.marks, mark))->stamp;

	return 1;
}

static int is_idle(const kvd_core_t *core, uint32_t slot_class)
{
	return core->now_ns - core->classes[slot_class].used_ns >= IDLE_NS;
}

/* May a slab of so many slots, whose blocks have to be evicted, be taken from this class at all? */
static int may_give(const kvd_core_t *core, uint32_t from, uint32_t slots)
{
	return core->classes[from].slots - slots >= slots / 2u || is_idle(core, from);
}

/* The class that has to give, if one does: that with the coldest block, when it is colder enough than the coldest of `to`. */
static uint32_t coldest_class(kvd_core_t *core, uint32_t to)
{
	uint64_t own = 0, most = 0, age = 0;
	uint32_t from = KVD_NONE;
	uint64_t least = coldest(core, to, &own) ? COLDER_FACTOR * own + COLDER_BY : 0;

	for (uint32_t i = 0; i < core->class_count; i++) {
		if (i != to && core->classes[i].slots > 0 && may_give(core, i, core->classes[i].largest) &&
		    coldest(core, i, &age) && age >= least && age >= most) {
			most = age;
			from = i;
		}
	}

	return from;
}

/* Has the class slots enough without this slab: for what is in it, and, while it is in use, for as much again? */
static int can_spare(kvd_core_t *core, const kvs_slab_look_t *look, uint32_t from)
{
	uint64_t free_slots = ops_of(core)->free_slots(core->tier[KVD_CPU], look->slot_class);

	return free_slots >= (is_idle(core, from) ? look->slots : 2u * (uint64_t)look->slots);
}

/* The smaller part of it taken, else the larger one; and there must be something to be had from it. */
static void prefer(kvd_core_t *core, choice_t *choice, uint32_t slab, const kvs_slab_look_t *look)
{
	uint64_t old = (uint64_t)choice->taken * look->slots, new = (uint64_t)look->taken * choice->slots;
	uint32_t to = core->classes[choice->to].tier_class[KVD_CPU];

	if ((choice->slab == KVD_NONE || new < old || (new == old && look->slots > choice->slots)) &&
	    ops_of(core)->gain(core->tier[KVD_CPU], slab, to) > 0) {
		choice->slab = slab;
		choice->from = class_of(core, look->slot_class);
		choice->taken = look->taken;
		choice->slots = look->slots;
	}
}

static void count_slots(kvd_core_t *core)
{
	kvs_slab_look_t look;

	for (uint32_t i = 0; i < core->class_count; i++) {
		core->classes[i].slots = 0;
		core->classes[i].largest = 0;
	}
	for (uint32_t slab = 0; slab < ops_of(core)->slabs(core->tier[KVD_CPU]); slab++) {
		uint32_t class = ops_of(core)->look(core->tier[KVD_CPU], slab, &look) == KV_OK && !look.retired
					 ? class_of(core, look.slot_class)
					 : KVD_NONE;

		if (class != KVD_NONE) {
			kvd_class_t *c = &core->classes[class];

			c->slots += look.slots;
			c->largest = look.slots > c->largest ? look.slots : c->largest;
		}
	}
}

/* The slab that is cheapest to empty: of those a class can spare, else of those of the class whose blocks are the coldest. */
static choice_t choose(kvd_core_t *core, uint32_t to)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	uint32_t named[MAX_SLABS], cold;
	choice_t easy = {.slab = KVD_NONE, .to = to}, other = easy;
	kvs_slab_look_t look;

	count_slots(core);
	count_named(core, named);
	cold = coldest_class(core, to);
	for (uint32_t slab = 0; slab < ops_of(core)->slabs(tier); slab++) {
		uint32_t from;

		if (named[slab] > 0 || ops_of(core)->look(tier, slab, &look) != KV_OK || look.retired ||
		    look.open > 0) {
			continue;
		}
		from = class_of(core, look.slot_class);
		if (from == KVD_NONE || from == to) {
			continue;
		}
		if (can_spare(core, &look, from)) {
			prefer(core, &easy, slab, &look);
		} else if (from == cold && may_give(core, from, look.slots)) {
			prefer(core, &other, slab, &look);
		}
	}

	return easy.slab != KVD_NONE ? easy : other;
}

/* The next class in turn that wants something. */
static uint32_t next_class(kvd_core_t *core)
{
	kvd_change_t *change = &core->change;

	for (;;) {
		uint32_t class = change->turn++ % core->class_count;

		if (core->classes[class].wants) {
			core->classes[class].wants = 0;
			change->wanting--;
			return class;
		}
	}
}

static int pick(kvd_core_t *core)
{
	kvd_change_t *change = &core->change;
	uint32_t to = next_class(core);
	choice_t choice;

	if (!ops_of(core)->is_short(core->tier[KVD_CPU], core->classes[to].tier_class[KVD_CPU])) {
		return 1;
	}
	choice = choose(core, to);
	if (choice.slab == KVD_NONE) {
		core->classes[to].ask_after_ns = core->now_ns + AGAIN_NS;
		return 1;
	}
	ops_of(core)->leave(core->tier[KVD_CPU], choice.slab);
	change->slab = choice.slab;
	change->from = choice.from;
	change->to = to;
	change->index = change->moved = 0;
	change->named = kvd_change_count(core);
	change->give_up_ns = core->now_ns + GIVE_UP_NS;

	return 1;
}

/* ---- emptying it ------------------------------------------------------------------------------------------------------------ */

/* The visible block that a slot says it holds, if the index says so too. */
static uint32_t block_in(const kvd_core_t *core, kvs_loc_t loc, const kvs_meta_t *meta)
{
	const kvd_block_t *block;
	uint32_t id = KVD_NONE;

	for (uint32_t t = 0; t < core->ix.trees.made && id == KVD_NONE; t++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, t);

		if (tree->live && !tree->hidden && tree->epoch == meta->epoch &&
		    memcmp(tree->root, meta->root, sizeof tree->root) == 0) {
			id = kvd_index_find(&core->ix, t, &meta->key, meta->group);
		}
	}
	if (id == KVD_NONE) {
		return KVD_NONE;
	}
	block = kvd_block_at(&core->ix, id);

	return kvd_in_set(&core->ix, block, KVD_CPU) && *kvd_slot_of(&core->ix, block) == loc.slot &&
			       block->cpu_gen == loc.gen
		       ? id
		       : KVD_NONE;
}

static void note(void *arg, kv_status_t status)
{
	*(kv_status_t *)arg = status;
}

/* Its bytes to another slot; they are verified on the way. */
static void move_block(kvd_core_t *core, uint32_t id, kvs_loc_t from, kvs_loc_t to)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	kv_status_t end = KV_ERR_INTERNAL;
	kvs_mem_t mem;
	kv_status_t status = kvs_mem(tier, from, &mem);

	if (status == KV_OK) {
		status = kvs_store(tier, to, &mem, note, &end); /* of the CPU tier: it ends inside the call */
	}
	status = status == KV_OK ? end : status;
	if (status == KV_OK) {
		(void)kvs_set_state(tier, to, KVS_READY);
		*kvd_slot_of(&core->ix, block) = to.slot;
		block->cpu_gen = to.gen;
		kvs_free(tier, from);
		kvd_count(core, KV_M_BLOCKS_MOVED, 1);
		return;
	}
	kvs_free(tier, to);
	kv_logf(core->env, KV_LOG_WARN, "core", "a block in memory is damaged and is taken out, status %s",
		kv_status_name(status));
	kvd_count(core, KV_M_BAD_BLOCKS, 1);
	kvd_quarantine_cpu(core, id);
}

/* 1: the slot is empty now, or some other one has come free for what it holds. */
static int empty_slot(kvd_core_t *core, kv_slot_t slot)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	uint32_t from = core->change.from, id;
	const kvd_block_t *block;
	kvs_loc_t here, there;
	kvs_meta_t meta;
	kv_status_t status;

	if (ops_of(core)->slot(tier, slot, &here, &meta) != KV_OK) {
		return 0;
	}
	id = block_in(core, here, &meta);
	block = id == KVD_NONE ? NULL : kvd_block_at(&core->ix, id);
	if (!block || block->holds > 0 || block->io != KVD_NONE) {
		return 0; /* being read, written or taken down: not for long */
	}
	status = kvs_alloc(tier, core->classes[from].tier_class[KVD_CPU], KVS_FILLING, 0, &meta, &there);
	if (status == KV_ERR_FULL) {
		return kvd_make_room(core, from, KVD_CPU) == KV_OK;
	}
	if (status == KV_OK) {
		move_block(core, id, here, there);
	}

	return status == KV_OK;
}

static void end(kvd_core_t *core)
{
	core->change.slab = KVD_NONE;
	core->change.named = 0;
}

/* One block, or a look at some slots. */
static int empty_some(kvd_core_t *core, const kvs_slab_look_t *look)
{
	kvd_change_t *change = &core->change;

	if (change->named > 0) {
		return 0;
	}
	for (uint32_t i = 0; i < SLOTS_A_QUANTUM; i++) {
		if (change->index == look->slots) {
			int again = change->moved > 0;

			change->index = change->moved = 0;
			return again;
		}
		if (empty_slot(core, kv_slot_make(change->slab, change->index))) {
			change->moved++;
			change->give_up_ns = core->now_ns + GIVE_UP_NS;
			return 1; /* the same slot again: what came free may have been another */
		}
		change->index++;
	}

	return 1;
}

int kvd_change_run(kvd_core_t *core)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	kvd_change_t *change = &core->change;
	kvs_slab_look_t look;

	if (change->slab == KVD_NONE) {
		return change->wanting > 0 && core->now_ns >= change->next_ns ? pick(core) : 0;
	}
	if (ops_of(core)->look(tier, change->slab, &look) != KV_OK || (!look.retired && !look.leaving)) {
		end(core); /* its memory has come back */
		return 0;
	}
	if (look.retired) {
		return 0;
	}
	if (look.taken == 0) {
		(void)ops_of(core)->retire(tier, change->slab, core->classes[change->to].tier_class[KVD_CPU]);
		return 0;
	}
	if (core->now_ns > change->give_up_ns) {
		ops_of(core)->stay(tier, change->slab);
		change->next_ns = core->now_ns + GIVE_UP_NS;
		end(core);
		return 0;
	}

	return empty_some(core, &look);
}
