#include "core/block/events.h"
#include "core/block/quarantine.h"
#include "core/block/visibility.h"
#include "core/base/core_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"
#include "core/block/slot_class.h"
#include "core/ends/numbers.h"
#include "core/ends/space.h"

#define MAX_PENDING_RESETS 256u
#define OPEN_QUANTA        16u
#define TEMPORARY_EPOCH    (UINT64_C(1) << 48)
#define EPOCHS_DROP_NS     UINT64_C(10000000000)
#define CLASS_DOWN_NS      UINT64_C(1000000000)

/* ---- namespaces ------------------------------------------------------------------------------ */

uint64_t kvd_mirror_bytes(const kvd_core_config_t *config)
{
	return kvd_mirror_size(config->max_index_blocks);
}

kv_status_t kvd_namespace_add(kvd_core_t *core, const char *name, void *mirror, uint32_t *p_ns)
{
	kvd_ns_t *ns;

	if (core->ns_count == KVD_MAX_NAMESPACES) {
		return KV_ERR_LIMIT;
	}
	if (name[0] == '\0' || strlen(name) > KVD_NS_NAME_MAX) {
		return KV_ERR_ARG;
	}
	ns = kv_alloc(core->env, sizeof *ns);
	if (!ns) {
		return KV_ERR_NOMEM;
	}
	ns->spaces = kv_alloc(core->env, (size_t)core->config.max_spaces * KVD_SPACES_KEPT * sizeof(kvd_space_t *));
	ns->numbers = kv_alloc(core->env, (size_t)core->config.max_spaces * sizeof(kvd_space_t *));
	if (!ns->spaces || !ns->numbers) {
		kv_free(core->env, ns->spaces);
		kv_free(core->env, ns->numbers);
		kv_free(core->env, ns);
		return KV_ERR_NOMEM;
	}
	memcpy(ns->name, name, strlen(name) + 1);
	ns->puts = ns->room_waiters = ns->announced = ns->unclaimed = ns->failed = KVD_LIST_EMPTY;
	kvd_mirror_init(&ns->mirror, mirror, core->config.max_index_blocks, core->config.incarnation);
	ns->mirror.header->stale_ns = core->config.stale_ns;
	kvd_mirror_set_heartbeat(&ns->mirror, kv_now_ns(core->env));
	*p_ns = core->ns_count;
	core->ns[core->ns_count++] = ns;
	kv_ns_metrics_open(core->world.metrics, name);
	kvd_shares_compute(core);

	return KV_OK;
}

/* ---- spaces ---------------------------------------------------------------------------------- */

static char *copy_text(kvd_core_t *core, const char *text, size_t len)
{
	char *copy = kv_alloc(core->env, len + 1);

	if (copy) {
		memcpy(copy, text, len);
	}

	return copy;
}

static void free_space(kvd_core_t *core, kvd_space_t *space)
{
	kv_free(core->env, space->identity);
	kv_free(core->env, space->layout);
	kv_free(core->env, space->lora);
	kv_free(core->env, space);
}

static void finish_epoch_record(void *arg, kv_status_t status)
{
	kvd_core_t *core = arg;

	if (!kvd_callback_enter(core) && status != KV_OK) {
		kv_logf(core->env, KV_LOG_WARN, "core", "a new space could not be recorded on disk, status %s",
			kv_status_name(status));
	}
}

/* Which group of the space has blocks in slots of this class? space->group_count: none. */
static uint32_t find_group_of_class(const kvd_space_t *space, uint32_t slot_class)
{
	uint32_t g = 0;

	while (g < space->group_count && space->blocks[g].slot_class != slot_class) {
		g++;
	}

	return g;
}

/* Has the space all groups of a recovered tree, with blocks of the same kind? */
static int has_its_groups(const kvd_space_t *space, const kvd_tree_t *tree)
{
	int all = 1;

	for (uint32_t i = 0; i < tree->group_count; i++) {
		const kv_group_t *group;

		all = all && kvd_space_group(space, tree->groups[i].group, &group) == KV_OK &&
		      kvd_blocks_of(space, group)->slot_class == tree->groups[i].slot_class;
	}

	return all;
}

/* The tree that was recovered under this root, or a new one. */
static kv_status_t find_or_create_tree(kvd_core_t *core, const kvd_space_t *space, uint32_t *p_tree)
{
	uint32_t found = KVD_NONE;
	kv_status_t status;

	for (uint32_t id = 0; id < core->ix.trees.made && found == KVD_NONE; id++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

		if (tree->live && !tree->hidden && tree->ns == KVD_NONE &&
		    memcmp(tree->root, space->root, sizeof tree->root) == 0) {
			found = id;
		}
	}
	if (found != KVD_NONE && kvd_tree_at(&core->ix, found)->epoch == space->epoch &&
	    has_its_groups(space, kvd_tree_at(&core->ix, found))) {
		*p_tree = found;
		return KV_OK;
	}
	status = kvd_tree_create(&core->ix, p_tree);
	if (status == KV_OK && found != KVD_NONE && !core->coming) {
		kvd_hide_tree(core, found);
	}

	return status;
}

/* `self`: the space's index in its namespace. */
static void adopt_tree(kvd_core_t *core, const kvd_space_t *space, uint32_t self)
{
	kvd_tree_t *tree = kvd_tree_at(&core->ix, space->tree);

	tree->ns = space->ns;
	tree->tally = &core->ns[space->ns]->blocks;
	tree->space = self;
	tree->group_count = space->group_count;
	for (uint32_t g = 0; g < space->group_count; g++) {
		tree->groups[g] =
			(kvd_tree_group_t){.slot_class = space->blocks[g].slot_class, .group = space->groups[g].id};
	}
	tree->epoch = space->epoch;
	memcpy(tree->root, space->root, sizeof tree->root);
	kvd_show_tree(core, tree); /* what was recovered has to be in the mirror */
}

/* No key made in it is one that a disk has: true epochs are smaller. */
static uint64_t temporary_epoch(kvd_core_t *core)
{
	uint64_t random;

	kv_random(core->env, &random, sizeof random);

	return TEMPORARY_EPOCH | random >> 16;
}

/* One that no space has had, nor will have: a number and an epoch together name one space for ever (decision 074). */
static uint64_t first_epoch(kvd_core_t *core, uint32_t memory)
{
	const int is_temporary = memory > 0 || (!core->tier[KVD_DISK] && core->world.note_reset);

	return is_temporary ? temporary_epoch(core) : ++core->last_epoch;
}

static uint64_t next_epoch(kvd_core_t *core, const kvd_space_t *space)
{
	return space->epoch >= TEMPORARY_EPOCH ? space->epoch + 1 : ++core->last_epoch;
}

/* What the disk has recorded is taken. What it could not record may be taken too: a random step leads past it. */
void kvd_epochs_init(kvd_core_t *core)
{
	uint64_t recorded = core->tier[KVD_DISK] ? kvs_epoch_last(core->tier[KVD_DISK]) : 0, random;

	kv_random(core->env, &random, sizeof random);
	core->last_epoch = (recorded > KVD_FIRST_EPOCH ? recorded : KVD_FIRST_EPOCH) + (random >> 34);
}

/* ---- epochs of spaces that have nothing -------------------------------------------------------- */

static int is_gone(const kvd_core_t *core, const kvd_space_t *space)
{
	return space->id == 0 && space->leaving == 0 && kvd_tree_at(&core->ix, space->tree)->blocks == 0;
}

/* Let a closed space go that has lost its blocks; 1: its place is free. */
static int free_if_gone(kvd_core_t *core, kvd_space_t **p_space)
{
	if (*p_space && is_gone(core, *p_space)) {
		kvd_events_flush(core);
		kvd_tree_destroy(&core->ix, (*p_space)->tree);
		free_space(core, *p_space);
		*p_space = NULL;
	}

	return !*p_space;
}

/* Roots that are in use: a hash table, never more than half full. */
typedef struct roots {
	const uint8_t **at; /* NULL: none */
	uint32_t mask;
	uint64_t seed;
} roots_t;

/* Where the root is, or would be. */
static const uint8_t **root_place(const roots_t *roots, const uint8_t root[32])
{
	uint64_t word;
	uint32_t i;

	memcpy(&word, root, sizeof word);
	i = (uint32_t)((word ^ roots->seed) * UINT64_C(0x9e3779b97f4a7c15) >> 32);
	while (roots->at[i & roots->mask] && memcmp(roots->at[i & roots->mask], root, 32) != 0) {
		i++;
	}

	return &roots->at[i & roots->mask];
}

static int is_root_used(void *ctx, const uint8_t root[32])
{
	return *root_place(ctx, root) != NULL;
}

/* Of all spaces, and of trees with blocks, whose space may not have been opened since the start. KV_ERR_NOMEM. */
static kv_status_t list_roots(kvd_core_t *core, roots_t *roots)
{
	uint32_t most = core->ix.trees.made, size = 16;

	for (uint32_t n = 0; n < core->ns_count; n++) {
		most += core->ns[n]->space_made;
	}
	while (size < 2 * most) {
		size *= 2;
	}
	*roots = (roots_t){
		.at = kv_alloc(core->env, size * sizeof *roots->at), .mask = size - 1, .seed = core->ix.seed[0]};
	if (!roots->at) {
		return KV_ERR_NOMEM;
	}
	for (uint32_t n = 0; n < core->ns_count; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made; i++) {
			if (!free_if_gone(core, &core->ns[n]->spaces[i])) {
				const uint8_t *root = core->ns[n]->spaces[i]->root;

				*root_place(roots, root) = root;
			}
		}
	}
	for (uint32_t id = 0; id < core->ix.trees.made; id++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

		if (tree->live && tree->blocks > 0) {
			*root_place(roots, tree->root) = tree->root;
		}
	}

	return KV_OK;
}

/* The tier has no room for the epoch of one more space. 1: now it has: those of spaces that have nothing are
 * forgotten (decision 084). */
static int drop_epochs(kvd_core_t *core, kvs_tier_t *tier, uint32_t memory)
{
	roots_t roots = {0};
	uint32_t n = 0;

	if (core->now_ns < core->epochs_drop_ns[memory]) {
		return 0;
	}
	core->epochs_drop_ns[memory] = core->now_ns + EPOCHS_DROP_NS;
	if (list_roots(core, &roots) == KV_OK) {
		n = kvs_epochs_drop(tier, memory, is_root_used, &roots);
		kv_free(core->env, roots.at);
	}
	kv_logf(core->env, n > 0 ? KV_LOG_INFO : KV_LOG_WARN, "core",
		"no room for the epoch of one more space, memory %u: those of empty spaces are forgotten, epochs %u",
		memory, n);

	return n > 0;
}

static void ignore_result(void *arg, kv_status_t status)
{
	(void)arg;
	(void)status;
}

/* The pool of a GPU keeps the epochs of its spaces for the next daemon, and no other place does. Without room there, a
 * space has an epoch that no later daemon gives, and its blocks end with this one. */
static kv_status_t keep_epoch_in_memory(kvd_core_t *core, const kvd_space_t *space, uint64_t epoch)
{
	const kvs_epoch_t e = {
		.root = space->root, .ns = core->ns[space->ns]->name, .identity = space->identity, .epoch = epoch};

	kv_status_t status = kvs_epoch_set_in(core->tier[KVD_CPU], space->memory, &e, ignore_result, NULL);

	if (status == KV_ERR_LIMIT && drop_epochs(core, core->tier[KVD_CPU], space->memory)) {
		status = kvs_epoch_set_in(core->tier[KVD_CPU], space->memory, &e, ignore_result, NULL);
	}

	return status;
}

static uint64_t open_epoch_in_memory(kvd_core_t *core, const kvd_space_t *space)
{
	uint64_t epoch = kvs_epoch_get(core->tier[KVD_CPU], space->root);

	if (epoch == 0) {
		epoch = first_epoch(core, space->memory);
		(void)keep_epoch_in_memory(core, space, epoch);
	}

	return epoch;
}

static uint64_t open_epoch(kvd_core_t *core, const kvd_space_t *space)
{
	uint64_t known;

	if (space->memory != KVD_HOST_MEM) {
		return open_epoch_in_memory(core, space);
	}
	known = core->tier[KVD_DISK] ? kvs_epoch_get(core->tier[KVD_DISK], space->root) : 0;

	return known ? known : first_epoch(core, 0);
}

/* To another epoch, or an empty tree of the same one. The old tree leaves in quanta, and the new one is announced after
 * that: event hashes survive a reset (decision 006). */
static void move_to_epoch(kvd_core_t *core, kvd_space_t *space, uint32_t tree, uint64_t epoch)
{
	const uint32_t self = kvd_tree_at(&core->ix, space->tree)->space;

	kvd_events_flush(core);
	kvd_hide_tree(core, space->tree);
	space->leaving++;
	space->tree = tree;
	space->epoch = epoch;
	kvd_handovers_sweep(core);
	adopt_tree(core, space, self);
	kvd_tree_at(&core->ix, tree)->mute = 1;
	if (space->id != 0) {
		kvd_mirror_set_epoch(&core->ns[space->ns]->mirror, space->id, epoch);
	}
}

/* ---- classes that nobody uses (decision 088) -------------------------------------------------- */

/* Who names a class. */
typedef struct class_use {
	uint64_t used;  /* stamp of its last use */
	int is_named;   /* by a space, or by a tree */
	int is_kept;    /* it cannot be closed */
	int is_leaving; /* trees of it are being taken down */
} class_use_t;

static void note_space(kvd_core_t *core, kvd_space_t **p_space, class_use_t *uses)
{
	const kvd_space_t *space;

	if (free_if_gone(core, p_space)) {
		return;
	}
	space = *p_space;
	for (uint32_t g = 0; g < space->group_count; g++) {
		class_use_t *use = &uses[space->blocks[g].slot_class];

		use->is_named = 1;
		use->is_kept |= space->id != 0 && kvd_number_is_named(core, space);
		use->used = space->used > use->used ? space->used : use->used;
	}
}

/* One that was recovered, and that no space has opened, goes when it has lost its blocks. */
static void note_tree(kvd_core_t *core, uint32_t id, class_use_t *uses)
{
	const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);
	uint64_t stamp;

	if (!tree->live) {
		return;
	}
	if (tree->ns == KVD_NONE && !tree->hidden && tree->blocks == 0) {
		kvd_tree_destroy(&core->ix, id);
		return;
	}
	for (uint32_t i = 0; i < tree->group_count; i++) {
		const uint32_t slot_class = tree->groups[i].slot_class;
		class_use_t *use = &uses[slot_class];

		use->is_named = 1;
		use->is_leaving |= (int)tree->hidden;
		for (kvd_set_t t = KVD_CPU; t < KVD_TIERS && tree->ns == KVD_NONE; t++) {
			if (kvd_class_coldest(core, slot_class, t, &stamp) != KVD_NONE) {
				use->used = stamp > use->used ? stamp : use->used;
			}
		}
	}
}

static void note_uses(kvd_core_t *core, class_use_t *uses)
{
	memset(uses, 0, core->class_count * sizeof *uses);
	kvd_events_flush(core);
	for (uint32_t n = 0; n < core->ns_count; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made; i++) {
			note_space(core, &core->ns[n]->spaces[i], uses);
		}
	}
	for (uint32_t id = 0; id < core->ix.trees.made; id++) {
		note_tree(core, id, uses);
	}
}

static int names_class(const kvd_tree_t *tree, uint32_t slot_class)
{
	uint32_t i = 0;

	while (i < tree->group_count && tree->groups[i].slot_class != slot_class) {
		i++;
	}

	return i < tree->group_count;
}

/* All blocks of the class go. */
static void take_down_class(kvd_core_t *core, uint32_t slot_class)
{
	uint32_t tree;

	for (uint32_t n = 0; n < core->ns_count; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made; i++) {
			kvd_space_t *space = core->ns[n]->spaces[i];

			if (space && find_group_of_class(space, slot_class) < space->group_count &&
			    kvd_number_close(core, space) && !free_if_gone(core, &core->ns[n]->spaces[i]) &&
			    kvd_tree_create(&core->ix, &tree) == KV_OK) {
				move_to_epoch(core, space, tree, space->epoch);
			}
		}
	}
	for (uint32_t id = 0; id < core->ix.trees.made; id++) {
		const kvd_tree_t *t = kvd_tree_at(&core->ix, id);

		if (t->live && t->ns == KVD_NONE && !t->hidden && names_class(t, slot_class)) {
			kvd_hide_tree(core, id);
		}
	}
}

/* The class of this memory that can be closed, and whose last use was the longest ago. */
static uint32_t find_class_to_close(const kvd_core_t *core, const class_use_t *uses, uint32_t memory)
{
	uint32_t oldest = KVD_NONE;

	for (uint32_t i = 0; i < core->class_count; i++) {
		if (core->classes[i].memory == memory && uses[i].is_named && !uses[i].is_kept &&
		    (oldest == KVD_NONE || uses[i].used < uses[oldest].used)) {
			oldest = i;
		}
	}

	return oldest;
}

/* A tier has no number for one more class, and `space`, which is being made, has those of its first groups. Those that
 * nothing names are closed, or else one that nobody has open loses its blocks; one a second, where numbers are only
 * late. KV_ERR_BUSY: ask again soon. */
static kv_status_t make_class_room(kvd_core_t *core, const kvd_space_t *space, kv_status_t lacks)
{
	const uint32_t memory = space->memory;
	class_use_t *uses = kv_alloc(core->env, core->class_count * sizeof *uses);
	const int may_take_down = lacks == KV_ERR_LIMIT || core->now_ns >= core->class_down_ns;
	int closed = 0, leaving = 0;
	uint32_t oldest = KVD_NONE;

	if (!uses) {
		return KV_ERR_NOMEM;
	}
	for (int look = 0; look < 2 && !closed && !leaving; look++) {
		note_uses(core, uses);
		for (uint32_t g = 0; g < space->group_count; g++) {
			uses[space->blocks[g].slot_class].is_named = uses[space->blocks[g].slot_class].is_kept = 1;
		}
		for (uint32_t i = 0; i < core->class_count; i++) {
			leaving |= core->classes[i].memory == memory && uses[i].is_leaving;
			closed |= !uses[i].is_named && kvd_class_close(core, i);
		}
		oldest = find_class_to_close(core, uses, memory);
		if (!closed && !leaving && look == 0 && may_take_down && oldest != KVD_NONE) {
			core->class_down_ns = core->now_ns + CLASS_DOWN_NS;
			take_down_class(core, oldest);
		}
	}
	core->rebalance[KVD_CPU].orphans = core->rebalance[KVD_DISK].orphans = 1;
	kv_free(core->env, uses);

	return closed ? KV_OK : leaving || oldest != KVD_NONE || lacks == KV_ERR_BUSY ? KV_ERR_BUSY : KV_ERR_LIMIT;
}

/* Of the space's next group. */
static kv_status_t open_class(kvd_core_t *core, const kvd_space_open_t *ask, kvd_space_t *space)
{
	kvd_group_blocks_t *blocks = &space->blocks[space->group_count];
	kv_status_t status, room = KV_ERR_BUSY;

	blocks->geometry = ask->geometries[space->group_count];
	blocks->pieces = (blocks->geometry.page_bytes - 1) / blocks->geometry.leaf_bytes + 1;
	blocks->layers = blocks->geometry.leaves / blocks->pieces;
	status = kvd_class_open(core, ask, &blocks->geometry, &blocks->slot_class);
	if ((status == KV_ERR_LIMIT || status == KV_ERR_BUSY) && !core->coming) {
		room = make_class_room(core, space, status);
		status = room == KV_OK ? kvd_class_open(core, ask, &blocks->geometry, &blocks->slot_class) : room;
		status = room == KV_OK && status == KV_ERR_LIMIT ? KV_ERR_BUSY : status;
	}
	space->group_count += status == KV_OK ? 1 : 0;

	return status;
}

static kv_status_t create_space(kvd_core_t *core, const kvd_space_open_t *ask, kvd_space_t **p_space)
{
	kvd_space_t *space = kv_alloc(core->env, sizeof *space);
	kv_status_t status = KV_ERR_NOMEM;

	if (!space) {
		return KV_ERR_NOMEM;
	}
	*space = (kvd_space_t){
		.ns = ask->ns,
		.hash_tokens = ask->hash_tokens,
		.memory = ask->memory,
	};
	memcpy(space->groups, ask->groups, ask->group_count * sizeof *ask->groups);
	memcpy(space->root, ask->root, sizeof space->root);
	space->identity = copy_text(core, ask->identity, ask->identity_len);
	space->layout = copy_text(core, ask->layout, strlen(ask->layout));
	space->lora = ask->lora ? copy_text(core, ask->lora, strlen(ask->lora)) : NULL;
	if (!space->identity || !space->layout || (ask->lora && !space->lora)) {
		goto err_space;
	}
	for (status = KV_OK; status == KV_OK && space->group_count < ask->group_count;) {
		status = open_class(core, ask, space);
	}
	if (status != KV_OK) {
		goto err_space;
	}
	space->epoch = open_epoch(core, space);
	status = find_or_create_tree(core, space, &space->tree);
	if (status != KV_OK) {
		goto err_space;
	}
	*p_space = space;

	return KV_OK;
err_space:
	free_space(core, space);
	return status;
}

static int is_geometry_valid(const kvs_geometry_t *g)
{
	return g->block_bytes > 0 && g->heads > 0 && g->leaves > 0 && g->leaf_bytes > 0 && g->page_bytes > 0 &&
	       g->leaves % ((g->page_bytes - 1) / g->leaf_bytes + 1) == 0;
}

/* The figures of a space come from a client and must agree before anything is sized by them. */
static int are_groups_valid(const kvd_space_open_t *ask)
{
	int valid = ask->hash_tokens > 0 && ask->group_count > 0 && ask->group_count <= KV_MAX_GROUPS;

	for (uint32_t i = 0; valid && i < ask->group_count; i++) {
		valid = ask->groups[i].block_tokens > 0 && ask->groups[i].block_tokens % ask->hash_tokens == 0 &&
			is_geometry_valid(&ask->geometries[i]);
	}

	return valid;
}

/* Tell the disk tier's superblock the space's epoch. */
static kv_status_t record_epoch(kvd_core_t *core, const kvd_space_t *space, uint64_t epoch, kvs_done_fn done, void *arg)
{
	kvs_epoch_t e = {
		.root = space->root, .ns = core->ns[space->ns]->name, .identity = space->identity, .epoch = epoch};

	kv_status_t status = kvs_epoch_set(core->tier[KVD_DISK], &e, done, arg);

	if (status == KV_ERR_LIMIT && drop_epochs(core, core->tier[KVD_DISK], 0)) {
		status = kvs_epoch_set(core->tier[KVD_DISK], &e, done, arg);
	}

	return status;
}

static kvd_space_t *find_space(const kvd_ns_t *ns, const uint8_t root[32])
{
	for (uint32_t i = 0; i < ns->space_made; i++) {
		if (ns->spaces[i] && memcmp(ns->spaces[i]->root, root, sizeof ns->spaces[i]->root) == 0) {
			return ns->spaces[i];
		}
	}

	return NULL;
}

/* Was the space ever opened, as far as this daemon, its disk and the memory of GPUs know? */
static int is_known(const kvd_core_t *core, const uint8_t root[32])
{
	int known = kvs_epoch_get(core->tier[KVD_CPU], root) != 0 ||
		    (core->tier[KVD_DISK] && kvs_epoch_get(core->tier[KVD_DISK], root) != 0);

	for (uint32_t id = 0; id < core->ix.trees.made && !known; id++) {
		const kvd_tree_t *tree = kvd_tree_at(&core->ix, id);

		known = tree->live && memcmp(tree->root, root, sizeof tree->root) == 0;
	}

	return known;
}

/* Where a new space goes. Closed ones that have lost their blocks go; when there is no room for one more, the blocks of
 * the one that was closed first are taken down, so that the next space seldom has to wait. KV_ERR_BUSY: it has to. */
static kv_status_t find_room(kvd_core_t *core, kvd_ns_t *ns, uint32_t *p_self)
{
	kvd_space_t *oldest = NULL;
	uint32_t tree, leaving = 0, rooms = 0;

	for (uint32_t i = 0; i < core->config.max_spaces * KVD_SPACES_KEPT && rooms < 2; i++) {
		kvd_space_t *space = ns->spaces[i];

		if (free_if_gone(core, &ns->spaces[i])) {
			*p_self = rooms > 0 ? *p_self : i;
			rooms++;
		} else if (space->id == 0) {
			oldest = !oldest || space->used < oldest->used ? space : oldest;
			leaving += space->leaving;
		}
	}
	if (rooms < 2 && oldest && leaving == 0 && kvd_tree_create(&core->ix, &tree) == KV_OK) {
		move_to_epoch(core, oldest, tree, oldest->epoch);
	}

	return rooms > 0 ? KV_OK : KV_ERR_BUSY;
}

/* The space of this root, new or closed before, with a number. */
static kv_status_t open_space(kvd_core_t *core, const kvd_space_open_t *ask, kvd_space_t **p_space)
{
	kvd_ns_t *ns = core->ns[ask->ns];
	kvd_space_t *space = find_space(ns, ask->root);
	uint32_t number = 0, self = 0;
	kv_status_t status = KV_OK;

	if (!space && ask->known && !is_known(core, ask->root)) {
		return KV_ERR_NOT_FOUND;
	}
	if (!space || space->id == 0) {
		status = kvd_number_find(core, ask->ns, &number);
	}
	if (status == KV_OK && !space) {
		status = find_room(core, ns, &self);
		status = status == KV_OK ? create_space(core, ask, &space) : status;
		if (status == KV_OK) {
			ns->spaces[self] = space;
			ns->space_made = self < ns->space_made ? ns->space_made : self + 1;
			adopt_tree(core, space, self);
		}
	}
	if (status == KV_OK && space->id == 0) {
		kvd_number_give(core, space, number);
	}
	*p_space = space;

	return status;
}

kv_status_t kvd_space_open(kvd_core_t *core, const kvd_space_open_t *ask, kvd_space_info_t *p_info)
{
	kvd_space_t *space;
	kv_status_t status;

	if (ask->ns >= core->ns_count || !are_groups_valid(ask)) {
		return ask->ns < core->ns_count ? KV_ERR_LAYOUT : KV_ERR_ARG;
	}
	status = open_space(core, ask, &space);
	if (status != KV_OK) {
		return status;
	}
	kvd_member_open_space(core, ask->member, space);
	/* The tier takes no block of a space that it has not recorded. It may have been off before, so each open
	 * records again. */
	if (core->tier[KVD_DISK] && space->memory == KVD_HOST_MEM &&
	    kvs_epoch_get(core->tier[KVD_DISK], space->root) == 0) {
		core->outstanding++;
		status = record_epoch(core, space, space->epoch, finish_epoch_record, core);
		if (status != KV_OK) {
			finish_epoch_record(core, status);
		}
	}
	/* A client that opens a space looks into the mirror next: let it find all blocks of a small tree, or the first
	 * of a large one. */
	for (uint32_t i = 0; i < OPEN_QUANTA && kvd_visibility_run(core); i++) {
	}
	kvd_events_flush(core);
	*p_info = (kvd_space_info_t){
		.space = space->id, .epoch = space->epoch, .hash_tokens = space->hash_tokens, .layout = space->layout};

	return KV_OK;
}

/* ---- reset ----------------------------------------------------------------------------------- */

typedef struct kvd_reset {
	kvd_core_t *core;
	kvd_member_t member;
	uint64_t frame_id;
	uint64_t epoch;
	int asking; /* still inside kvs_epoch_set() */
	int done;
	kv_status_t status;
} kvd_reset_t;

static void finish_reset(void *arg, kv_status_t status)
{
	kvd_reset_t *reset = arg, end = *reset;
	kv_msg_t reply = {.space_reset_reply = {.epoch = end.epoch}};

	reset->done = 1;
	reset->status = status;
	/* Inside kvs_epoch_set(): record_reset() reads the status and frees the record. */
	if (end.asking) {
		return;
	}
	kv_free(end.core->env, reset);
	if (kvd_callback_enter(end.core)) {
		return;
	}
	end.core->pending_resets--;
	if (end.core->answer) {
		end.core->answer(end.core->answer_ctx, end.member, KV_CODE_SPACE_RESET, end.frame_id, status, &reply);
	}
}

/* Have the next epoch recorded. KV_PENDING: finish_reset() answers later. KV_OK: it is on disk, or there is none. Else
 * nothing has happened. */
static kv_status_t record_reset(kvd_core_t *core, const kvd_space_t *space, uint64_t epoch, kvd_member_t member,
				uint64_t frame_id)
{
	kvd_reset_t *reset;
	kv_status_t status;

	if (space->memory != KVD_HOST_MEM) {
		/* An epoch that is kept must change before the answer: the next daemon would bring back what is reset.
		 */
		return kvs_epoch_get(core->tier[KVD_CPU], space->root) == 0 ? KV_OK
									    : keep_epoch_in_memory(core, space, epoch);
	}
	if (!core->tier[KVD_DISK]) {
		kvs_epoch_t e = {.root = space->root, .epoch = epoch};

		return core->world.note_reset ? core->world.note_reset(core->world.ctx, &e) : KV_OK;
	}
	if (core->pending_resets >= MAX_PENDING_RESETS) {
		return kvd_busy(core, KVD_DISK_IS_BUSY);
	}
	reset = kv_alloc(core->env, sizeof *reset);
	if (!reset) {
		return KV_ERR_NOMEM;
	}
	*reset = (kvd_reset_t){.core = core, .member = member, .frame_id = frame_id, .epoch = epoch, .asking = 1};
	status = record_epoch(core, space, epoch, finish_reset, reset);
	reset->asking = 0;
	if (status == KV_OK && !reset->done) {
		core->pending_resets++;
		core->outstanding++;
		return KV_PENDING;
	}
	status = status == KV_OK ? reset->status : status;
	kv_free(core->env, reset);

	return status == KV_ERR_BUSY ? kvd_busy(core, KVD_DISK_IS_BUSY) : status;
}

kv_status_t kvd_space_reset(kvd_core_t *core, uint32_t ns, kvd_member_t member, uint64_t frame_id,
			    const kv_msg_space_reset_t *ask, kv_msg_space_reset_reply_t *reply)
{
	kvd_space_t *space;
	uint64_t epoch;
	uint32_t tree;
	kv_status_t status = kvd_space_find(core, ns, ask->space, ask->epoch, &space);

	if (status == KV_OK) {
		status = kvd_tree_create(&core->ix, &tree);
	}
	if (status != KV_OK) {
		return status;
	}
	/* The new tree exists first: when this fails, nothing has happened. */
	epoch = next_epoch(core, space);
	status = record_reset(core, space, epoch, member, frame_id);
	if (status != KV_OK && status != KV_PENDING) {
		kvd_tree_destroy(&core->ix, tree);
		return status;
	}

	move_to_epoch(core, space, tree, epoch);
	kvd_count(core, KV_M_SPACE_RESETS, 1);
	reply->epoch = space->epoch;

	return status;
}

/* ---- a disk tier that comes late ------------------------------------------------------------- */

/* From its temporary epoch to the one on disk. Without memory for a tree it stays as it is; the tier takes no block of
 * an epoch it has not recorded. */
static void attach_space(kvd_core_t *core, kvd_space_t *space)
{
	kvd_space_t there = *space;
	uint32_t tree;

	there.epoch = open_epoch(core, space);
	if (find_or_create_tree(core, &there, &tree) == KV_OK) {
		move_to_epoch(core, space, tree, there.epoch);
	}
}

void kvd_spaces_attach(kvd_core_t *core)
{
	const uint64_t recorded = kvs_epoch_last(core->tier[KVD_DISK]);

	core->last_epoch = recorded > core->last_epoch ? recorded : core->last_epoch;
	for (uint32_t n = 0; n < core->ns_count; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made; i++) {
			kvd_space_t *space = core->ns[n]->spaces[i];

			if (space && space->memory == KVD_HOST_MEM) {
				for (uint32_t g = 0; g < space->group_count; g++) {
					kvd_class_update(core, space->blocks[g].slot_class, KVD_DISK);
				}
				attach_space(core, space);
			}
		}
	}
}

void kvd_spaces_fini(kvd_core_t *core)
{
	for (uint32_t n = 0; n < core->ns_count; n++) {
		for (uint32_t i = 0; i < core->ns[n]->space_made; i++) {
			if (core->ns[n]->spaces[i]) {
				free_space(core, core->ns[n]->spaces[i]);
			}
		}
		kv_free(core->env, core->ns[n]->spaces);
		kv_free(core->env, core->ns[n]->numbers);
		kv_free(core->env, core->ns[n]);
	}
	kv_free(core->env, core->classes);
}
