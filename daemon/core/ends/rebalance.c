#include "core/block/block.h"
#include "core/ends/damage.h"
#include "core/block/room.h"
#include "core/base/core_impl.h"
#include "core/lease/lease.h"
#include "core/ends/rebalance.h"
#include "core/base/share.h"
#include "core/block/slot_class.h"

#define SLOTS_A_QUANTUM 256u
#define GIVE_UP_NS      UINT64_C(1000000000)
#define AGAIN_NS        UINT64_C(100000000)
#define IDLE_NS         UINT64_C(10000000000)
#define COLDER_FACTOR   2u
#define COLDER_BY       4u                      /* requests */
#define MAX_SLABS       (KV_SLOT_MAX_SLAB + 2u) /* and one for "no slot" */

static kvd_resource_t resource_of(const kvd_core_t *core, kvd_set_t t, uint32_t slot_class)
{
	return t == KVD_DISK ? KVD_SHARE_DISK : kvd_share_resource(core->classes[slot_class].memory);
}

/* ---- what leases name ------------------------------------------------------------------------ */

static uint32_t count_named_in(const kvd_lease_t *lease, uint32_t slab)
{
	const uint32_t *slots = kv_lease_slots(lease->header);
	uint32_t count = 0;

	for (uint32_t s = 0; s < lease->named; s++) {
		count += kv_slot_slab(slots[s]) == slab;
	}

	return count;
}

/* Slots that open leases name, of all slabs in one walk: a walk for each slab would cost slabs times leases. */
static void count_named(kvd_core_t *core, uint32_t named[MAX_SLABS])
{
	memset(named, 0, MAX_SLABS * sizeof *named);
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases.head; l != KVD_NONE;) {
			const kvd_lease_t *lease = kvd_obj_at(&core->leases, l);
			const uint32_t *slots = kv_lease_slots(lease->header);

			for (uint32_t s = 0; s < lease->named; s++) {
				named[kv_slot_slab(slots[s])]++;
			}
			l = lease->of_instance.next;
		}
	}
}

uint64_t kvd_rebalance_count_named(kvd_core_t *core)
{
	uint32_t named[MAX_SLABS];

	if (core->rebalance[KVD_CPU].slab == KVD_NONE) {
		return 0;
	}
	count_named(core, named);

	return named[core->rebalance[KVD_CPU].slab];
}

/* End the leases that name slots of the slab. A reader looks at its lease again before it uses what it copied, so this
 * costs a load and no wrong byte. */
static void revoke_named(kvd_core_t *core, uint32_t slab)
{
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases.head; l != KVD_NONE;) {
			kvd_lease_t *lease = kvd_obj_at(&core->leases, l);

			l = lease->of_instance.next;
			if (count_named_in(lease, slab) > 0) {
				kvd_lease_end(core, lease, KV_ERR_REVOKED);
			}
		}
	}
}

/* ---- which slab ------------------------------------------------------------------------------ */

/* A slab to take, as good as the best so far or better. */
typedef struct choice {
	kvd_set_t t;
	uint32_t slab; /* KVD_NONE: none */
	uint32_t from, to;
	uint32_t taken, slots, named;
	int force;
} choice_t;

static uint32_t class_of(const kvd_core_t *core, kvd_set_t t, uint32_t tier_class)
{
	for (uint32_t i = 0; i < core->class_count; i++) {
		if (core->classes[i].tier_class[t] == tier_class) {
			return i;
		}
	}

	return KVD_NONE;
}

/* How long the class's coldest block that can be evicted was not asked for, in requests. 0: it has none. */
static int age_of_coldest(kvd_core_t *core, kvd_set_t t, uint32_t slot_class, uint64_t *p_age)
{
	uint64_t stamp;

	if (kvd_class_coldest(core, slot_class, t, &stamp) == KVD_NONE) {
		return 0;
	}
	*p_age = core->stamp - stamp;

	return 1;
}

static int is_idle(const kvd_core_t *core, uint32_t slot_class)
{
	return core->now_ns - core->classes[slot_class].used_ns >= IDLE_NS;
}

/* May a slab with `slots` slots, whose blocks have to be evicted, be taken from this class at all? */
static int may_give_slab(const kvd_core_t *core, kvd_set_t t, uint32_t from, uint32_t slots)
{
	return core->classes[from].slots[t] - slots >= slots / 2u || is_idle(core, from);
}

/* The namespace that has to give to another one: that furthest over its share, if `to` is within its own with a slab
 * more, or by two slabs less over it. *p_owner KVD_NONE: those whose namespace is not configured. */
static int find_giving_owner(const kvd_core_t *core, kvd_set_t t, uint32_t to, uint32_t *p_owner)
{
	kvd_resource_t what = resource_of(core, t, to);
	uint64_t unit = core->classes[to].unit[t];
	uint64_t own = kvd_share_over(core, core->classes[to].ns, what, unit);
	uint64_t most = kvd_share_used(core, KVD_NONE, what);
	uint32_t from = KVD_NONE;

	for (uint32_t n = 0; n < core->ns_count; n++) {
		uint64_t over = n == core->classes[to].ns ? 0 : kvd_share_over(core, n, what, 0);

		if (over > most) {
			most = over;
			from = n;
		}
	}
	*p_owner = from;

	/* Where both are over, the giver must still be at least as far over as the receiver when the slab has moved.
	 * Else it would be the next to take, and the slab would come back. A tier refuses a slab above the maximum. */
	return most > 0 && (own == 0 || most >= own + unit) &&
	       kvd_share_used(core, core->classes[to].ns, what) + unit <=
		       kvd_share_max(core, core->classes[to].ns, what);
}

/* The class that has to give, if one does: of the namespace that has to, its coldest one (*p_force 1); else of the same
 * namespace that with the coldest block, when it is colder enough than the coldest of `to`. */
static uint32_t find_giving_class(kvd_core_t *core, kvd_set_t t, uint32_t to, int *p_force)
{
	uint64_t own = 0, most = 0, age = 0;
	uint32_t from = KVD_NONE, owner = KVD_NONE;
	/* Twice as cold: after the slab has moved the ages are closer, so it would have to be twice as cold the other
	 * way to move back (decision 013). */
	uint64_t least = age_of_coldest(core, t, to, &own) ? COLDER_FACTOR * own + COLDER_BY : 0;
	int force = find_giving_owner(core, t, to, &owner);

	for (uint32_t i = 0; i < core->class_count; i++) {
		const kvd_class_t *class = &core->classes[i];
		int may = force ? class->ns == owner
				: class->ns == core->classes[to].ns && may_give_slab(core, t, i, class->largest[t]);

		/* A slab is an allocation in one memory, and cannot serve a class of another. */
		if (i == to || class->slots[t] == 0 || !may || class->memory != core->classes[to].memory) {
			continue;
		}
		if (!age_of_coldest(core, t, i, &age)) { /* nothing can be evicted before leases end */
			age = 0;
			from = force && from == KVD_NONE ? i : from;
			continue;
		}
		if ((force || age >= least) && age >= most) {
			most = age;
			from = i;
		}
	}
	*p_force = force;

	return from;
}

/* Has the class slots enough without this slab: for what is in it, and, while it is in use, for as much again? `from`
 * KVD_NONE: a class of the disk tier that has no block. */
static int can_spare(const kvd_core_t *core, const choice_t *choice, const kvs_slab_desc_t *desc, uint32_t from)
{
	uint64_t free_slots = kvd_slab_ops(core, choice->t)->free_slots(core->tier[choice->t], desc->slot_class);

	if (desc->open > 0 || (choice->t == KVD_DISK && desc->taken > 0)) { /* on disk nothing is moved */
		return 0;
	}

	/* A busy class keeps a slab's worth of free slots, or it would soon ask for the slab back (decision 013). */
	return from == KVD_NONE || free_slots >= (is_idle(core, from) ? desc->slots : 2u * (uint64_t)desc->slots);
}

/* The one that fewer leases name, then the smaller part of it taken, else the larger one; and there must be something
 * to be had from it. */
static void keep_better(const kvd_core_t *core, choice_t *choice, uint32_t slab, const kvs_slab_desc_t *desc,
			uint32_t named)
{
	uint64_t old = (uint64_t)choice->taken * desc->slots, new = (uint64_t)desc->taken * choice->slots;
	uint32_t to = core->classes[choice->to].tier_class[choice->t];
	int better = choice->slab == KVD_NONE || named < choice->named ||
		     (named == choice->named && (new < old || (new == old && desc->slots > choice->slots)));

	/* Its memory may be too small for a slot of the class that is short, or a maximum may stand against it. */
	if (better && kvd_slab_ops(core, choice->t)->slots_gained(core->tier[choice->t], slab, to) > 0) {
		choice->slab = slab;
		choice->from = class_of(core, choice->t, desc->slot_class);
		choice->taken = desc->taken;
		choice->slots = desc->slots;
		choice->named = named;
	}
}

static void count_slots(kvd_core_t *core, kvd_set_t t)
{
	kvs_slab_desc_t desc;

	for (uint32_t i = 0; i < core->class_count; i++) {
		core->classes[i].slots[t] = 0;
		core->classes[i].largest[t] = 0;
	}
	for (uint32_t slab = 0; slab < kvd_slab_ops(core, t)->slab_count(core->tier[t]); slab++) {
		uint32_t class =
			kvd_slab_ops(core, t)->describe_slab(core->tier[t], slab, &desc) == KV_OK && !desc.retired
				? class_of(core, t, desc.slot_class)
				: KVD_NONE;

		if (class != KVD_NONE) {
			kvd_class_t *c = &core->classes[class];

			c->slots[t] += desc.slots;
			c->largest[t] = desc.slots > c->largest[t] ? desc.slots : c->largest[t];
		}
	}
}

/* Of a disk class: the file in which its coldest block lies, since nothing is moved there. KVD_NONE: none of its blocks
 * can go. */
static uint32_t find_coldest_file(const kvd_core_t *core, uint32_t slot_class)
{
	uint64_t stamp;
	uint32_t id = slot_class == KVD_NONE ? KVD_NONE : kvd_class_coldest(core, slot_class, KVD_DISK, &stamp);

	return id == KVD_NONE ? KVD_NONE : kv_slot_slab(kvd_block_at(&core->ix, id)->disk.slot);
}

/* The slab that is cheapest to empty: of those a class can spare, else of those of the class that has to give. */
static choice_t choose_slab(kvd_core_t *core, kvd_set_t t, uint32_t to)
{
	kvs_tier_t *tier = core->tier[t];
	uint32_t named[MAX_SLABS], cold, file;
	choice_t easy = {.t = t, .slab = KVD_NONE, .to = to}, other = easy;
	kvs_slab_desc_t desc;

	count_slots(core, t);
	count_named(core, named);
	cold = find_giving_class(core, t, to, &other.force);
	file = t == KVD_DISK ? find_coldest_file(core, cold) : KVD_NONE;
	for (uint32_t slab = 0; slab < kvd_slab_ops(core, t)->slab_count(tier); slab++) {
		uint32_t from, names = t == KVD_CPU ? named[slab] : 0;

		if (kvd_slab_ops(core, t)->describe_slab(tier, slab, &desc) != KV_OK || desc.retired || desc.retiring) {
			continue;
		}
		from = class_of(core, t, desc.slot_class);
		if (from == to || (from == KVD_NONE && desc.taken > 0)) {
			continue;
		}
		/* A slab that a class can spare costs copies, and no block: it goes first, whatever the ages. One of the
		 * class that has to give costs evictions, and by force the leases on it. */
		if (names == 0 && can_spare(core, &easy, &desc, from)) {
			keep_better(core, &easy, slab, &desc, 0);
		} else if (from != KVD_NONE && from == cold && desc.open == 0 && (file == KVD_NONE || slab == file) &&
			   (other.force || (names == 0 && may_give_slab(core, t, from, desc.slots)))) {
			keep_better(core, &other, slab, &desc, names);
		}
	}

	return easy.slab != KVD_NONE ? easy : other;
}

/* The next class that is short of slots, round robin. */
static uint32_t pick_class(kvd_core_t *core, kvd_set_t t)
{
	kvd_rebalance_t *rebalance = &core->rebalance[t];

	for (;;) {
		uint32_t class = rebalance->next_class++ % core->class_count;

		if (core->classes[class].wants[t]) {
			core->classes[class].wants[t] = 0;
			rebalance->wanting--;
			return class;
		}
	}
}

static void begin_rebalance(kvd_core_t *core, kvd_set_t t, uint32_t slab, uint32_t from, uint32_t to)
{
	kvd_rebalance_t *rebalance = &core->rebalance[t];

	kvd_slab_ops(core, t)->begin_retire(core->tier[t], slab);
	rebalance->slab = slab;
	rebalance->from = from;
	rebalance->to = to;
	rebalance->force = 0;
	rebalance->index = rebalance->moved = 0;
	/* From here on leases count themselves as they begin and end (lease.c). */
	rebalance->named = t == KVD_CPU ? kvd_rebalance_count_named(core) : 0;
	rebalance->give_up_ns = core->now_ns + GIVE_UP_NS;
}

static int pick_slab(kvd_core_t *core, kvd_set_t t)
{
	kvd_rebalance_t *rebalance = &core->rebalance[t];
	uint32_t to = pick_class(core, t);
	choice_t choice;

	/* It asked a while ago, and blocks may have been evicted or dropped since. */
	if (!kvd_slab_ops(core, t)->is_short(core->tier[t], core->classes[to].tier_class[t])) {
		return 1;
	}
	choice = choose_slab(core, t, to);
	if (choice.slab == KVD_NONE) {
		core->classes[to].ask_after_ns[t] = core->now_ns + AGAIN_NS;
		return 1;
	}
	begin_rebalance(core, t, choice.slab, choice.from, to);
	rebalance->force =
		choice.force && choice.from != KVD_NONE && core->classes[choice.from].ns != core->classes[to].ns;
	kvd_count(core, KV_M_SLABS_RECLAIMED, rebalance->force ? 1 : 0);

	return 1;
}

/* An empty file of the namespace, else the one in which the coldest block of all its classes lies. KVD_NONE: none of
 * its blocks can go. */
static uint32_t find_file_to_give(kvd_core_t *core, uint32_t ns)
{
	uint32_t cold = KVD_NONE, empty = KVD_NONE;
	uint64_t age, most = 0;
	kvs_slab_desc_t desc;

	for (uint32_t i = 0; i < core->class_count; i++) {
		if (core->classes[i].ns == ns && age_of_coldest(core, KVD_DISK, i, &age) && age >= most) {
			most = age;
			cold = i;
		}
	}
	for (uint32_t file = 0; file < kvd_slab_ops(core, KVD_DISK)->slab_count(core->tier[KVD_DISK]); file++) {
		uint32_t class =
			kvd_slab_ops(core, KVD_DISK)->describe_slab(core->tier[KVD_DISK], file, &desc) == KV_OK &&
					!desc.retired && !desc.retiring && desc.taken == 0
				? class_of(core, KVD_DISK, desc.slot_class)
				: KVD_NONE;

		empty = class != KVD_NONE && core->classes[class].ns == ns ? file : empty;
	}

	return empty != KVD_NONE ? empty : find_coldest_file(core, cold);
}

/* A namespace has more files than its maximum, which was higher once: one of them goes, and no class gets it. */
static int pick_over_maximum(kvd_core_t *core)
{
	kvd_rebalance_t *rebalance = &core->rebalance[KVD_DISK];
	kvs_slab_desc_t desc;

	rebalance->look_ns = core->now_ns + AGAIN_NS;
	for (uint32_t n = 0; n < core->ns_count; n++) {
		uint32_t file = kvd_share_used(core, n, KVD_SHARE_DISK) > kvd_share_max(core, n, KVD_SHARE_DISK)
					? find_file_to_give(core, n)
					: KVD_NONE;

		if (file != KVD_NONE &&
		    kvd_slab_ops(core, KVD_DISK)->describe_slab(core->tier[KVD_DISK], file, &desc) == KV_OK &&
		    !desc.retired) {
			begin_rebalance(core, KVD_DISK, file, class_of(core, KVD_DISK, desc.slot_class), KVD_NONE);
			return 1;
		}
	}

	return 0;
}

/* An empty one of a class that nobody has open: no class gets it. */
static int pick_orphan(kvd_core_t *core, kvd_set_t t)
{
	kvs_slab_desc_t desc;

	for (uint32_t slab = 0; slab < kvd_slab_ops(core, t)->slab_count(core->tier[t]); slab++) {
		if (kvd_slab_ops(core, t)->describe_slab(core->tier[t], slab, &desc) == KV_OK && !desc.retired &&
		    !desc.retiring && desc.taken == 0 && class_of(core, t, desc.slot_class) == KVD_NONE) {
			begin_rebalance(core, t, slab, KVD_NONE, KVD_NONE);
			return 1;
		}
	}
	core->rebalance[t].orphans = 0;

	return 0;
}

/* ---- emptying it ----------------------------------------------------------------------------- */

static void store_status(void *arg, kv_status_t status)
{
	*(kv_status_t *)arg = status;
}

/* Its bytes to another slot. Digests are verified on the way: a block that was overwritten by a client is not carried
 * over (decision 013). 0: there is no memory for it yet. */
static int move_block(kvd_core_t *core, uint32_t id, kvs_loc_t from, kvs_loc_t to)
{
	kvs_tier_t *tier = core->tier[KVD_CPU];
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	kv_status_t end = KV_ERR_INTERNAL;
	kvs_mem_t mem;
	kv_status_t status = kvs_mem(tier, from, &mem);

	if (status == KV_OK) {
		status = kvs_store(tier, to, &mem, store_status, &end); /* of the CPU tier: it ends inside the call */
	}
	status = status == KV_OK ? end : status;
	if (status == KV_ERR_BUSY) { /* the memory is not there yet */
		kvs_free(tier, to);
		return 0;
	}
	if (status == KV_OK) {
		/* Mirror and events know tiers, not slots: clients are told nothing. */
		(void)kvs_set_state(tier, to, KVS_READY);
		*kvd_slot_of(&core->ix, block) = to.slot;
		block->cpu_gen = to.gen;
		kvs_free(tier, from);
		kvd_count(core, KV_M_BLOCKS_MOVED, 1);
		return 1;
	}
	kvs_free(tier, to);
	kv_logf(core->env, KV_LOG_WARN, "core", "a block in memory is damaged and was removed, status %s",
		kv_status_name(status));
	kvd_count(core, KV_M_BAD_BLOCKS, 1);
	kvd_quarantine_cpu_copy(core, id);

	return 1;
}

/* 1: the slot is empty now, or another one has come free for its block. */
static int empty_slot(kvd_core_t *core, kvd_set_t t, kv_slot_t slot)
{
	kvs_tier_t *tier = core->tier[t];
	uint32_t from = core->rebalance[t].from, id;
	const kvd_block_t *block;
	kvs_loc_t here, there;
	kvs_meta_t meta;
	kv_status_t status;

	if (kvd_slab_ops(core, t)->describe_slot(tier, slot, &here, &meta) != KV_OK) {
		return 0;
	}
	id = kvd_index_find_in_slot(&core->ix, &meta.key, meta.group, t, here);
	/* No process of ours copies in the memory of a GPU. */
	if (t == KVD_DISK || core->classes[from].memory > 0) {
		return id != KVD_NONE && kvd_block_evict_below(core, id, t, core->rebalance[t].force) == KV_OK;
	}
	block = id == KVD_NONE ? NULL : kvd_block_at(&core->ix, id);
	if (!block || block->refs > 0 || block->io != KVD_NONE) {
		return 0; /* being read, written or taken down: not for long */
	}
	status = kvs_alloc(tier, core->classes[from].tier_class[t], KVS_FILLING, 0, &meta, &there);
	/* The coldest block of the class makes room, not the one that lies here: a slab has blocks of all ages. */
	if (status == KV_ERR_FULL) {
		return kvd_make_room(core, from, t) == KV_OK;
	}

	return status == KV_OK && move_block(core, id, here, there);
}

static void end_rebalance(kvd_core_t *core, kvd_set_t t)
{
	core->rebalance[t].slab = KVD_NONE;
	core->rebalance[t].named = 0;
}

/* Empty one slot, or pass over some that cannot be emptied now. */
static int empty_some(kvd_core_t *core, kvd_set_t t, const kvs_slab_desc_t *desc)
{
	kvd_rebalance_t *rebalance = &core->rebalance[t];

	/* A reader trusts its copy while its lease holds, so no slot that a lease names may move. An owner does not wait
	 * for the leases of a borrower. */
	if (rebalance->named > 0 && rebalance->force) {
		revoke_named(core, rebalance->slab);
	}
	if (rebalance->named > 0) {
		return 0;
	}
	for (uint32_t i = 0; i < SLOTS_A_QUANTUM; i++) {
		if (rebalance->index == desc->slots) {
			/* Blocks that were busy may not be now: another pass, if this one has moved something. */
			int again = rebalance->moved > 0;

			rebalance->index = rebalance->moved = 0;
			return again;
		}
		if (empty_slot(core, t, kv_slot_make(rebalance->slab, rebalance->index))) {
			rebalance->moved++;
			rebalance->give_up_ns = core->now_ns + GIVE_UP_NS;
			return 1; /* the same slot again: what came free may have been another */
		}
		rebalance->index++;
	}

	return 1;
}

static int run_tier(kvd_core_t *core, kvd_set_t t)
{
	kvs_tier_t *tier = core->tier[t];
	kvd_rebalance_t *rebalance = &core->rebalance[t];
	kvs_slab_desc_t desc;

	if (rebalance->slab == KVD_NONE && core->now_ns >= rebalance->next_ns) {
		if (t == KVD_DISK && core->now_ns >= rebalance->look_ns && pick_over_maximum(core)) {
			return 1;
		}
		if (rebalance->orphans && pick_orphan(core, t)) {
			return 1;
		}
		return rebalance->wanting > 0 ? pick_slab(core, t) : 0;
	}
	if (rebalance->slab == KVD_NONE) {
		return 0;
	}
	if (kvd_slab_ops(core, t)->describe_slab(tier, rebalance->slab, &desc) != KV_OK ||
	    (!desc.retired && !desc.retiring)) {
		end_rebalance(core, t); /* its memory has come back */
		return 0;
	}
	/* Members still map it, or rows still name the file: the tier waits for them. */
	if (desc.retired) {
		return 0;
	}
	if (desc.taken == 0) {
		/* No class gets it: the namespace may not keep it, or its own class is closed. */
		uint32_t to = rebalance->to != KVD_NONE ? core->classes[rebalance->to].tier_class[t] : desc.slot_class;

		(void)kvd_slab_ops(core, t)->retire(tier, rebalance->slab, to);
		return 0;
	}
	/* A transfer or an open put may keep a slot for long: the slab stays with its class. */
	if (core->now_ns > rebalance->give_up_ns) {
		kvd_slab_ops(core, t)->cancel_retire(tier, rebalance->slab);
		rebalance->next_ns = core->now_ns + GIVE_UP_NS;
		end_rebalance(core, t);
		return 0;
	}

	return empty_some(core, t, &desc);
}

int kvd_rebalance_run(kvd_core_t *core)
{
	int more = run_tier(core, KVD_CPU);

	return kvd_slab_ops(core, KVD_DISK) ? more | run_tier(core, KVD_DISK) : more;
}
