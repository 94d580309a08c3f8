#include "core/block/block.h"
#include "core/block/admission.h"
#include "core/block/transfer.h"
#include "core/block/visibility.h"
#include "core/base/core_impl.h"

#define PRIVATE_QUANTUM 64u

static kvd_order_t *order_of(kvd_core_t *core, const kvd_block_t *block, kvd_set_t t)
{
	return &core->classes[kvd_class_of(&core->ix, block)].order[t];
}

/* ---- pins and references --------------------------------------------------------------------- */

static kvd_pin_t *pin_at(kvd_core_t *core, uint32_t id)
{
	return kvd_obj_at(&core->pins, id);
}

/* The block has its first pin of the class (`pinned`), or has lost its last one: charge the namespace with the blocks
 * that this pins, or credit it with those it releases. */
static void count_pinned(kvd_core_t *core, uint32_t block, kvd_pin_class_t pins, int pinned)
{
	const kvd_class_t *class = &core->classes[kvd_class_of(&core->ix, kvd_block_at(&core->ix, block))];
	kvd_ns_t *ns = core->ns[class->ns];
	uint64_t blocks = pinned ? kvd_index_pin_path(&core->ix, block, pins)
				 : (uint64_t)0 - kvd_index_unpin_path(&core->ix, block, pins);

	if (pins == KVD_PINS_HANDOVER) {
		ns->handover_bytes[class->memory] += blocks * class->slot_bytes;
		return;
	}
	ns->pinned_blocks += blocks;
	ns->pinned_bytes[class->memory] += blocks * class->slot_bytes;
}

/* Pins of hand-over entries are a block's first ones, so that its first pin says whether it has any. */
static void link_pin(kvd_core_t *core, uint32_t id, uint32_t block_id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, block_id);
	int first = block->pins.head == KVD_NONE;
	int is_handover = pin_at(core, id)->kind == KVD_PIN_HANDOVER;

	pin_at(core, id)->block = block_id;
	kvd_tree_of(&core->ix, block)->pins++;
	if (is_handover) {
		kvd_list_push_front(&block->pins, &core->pins, offsetof(kvd_pin_t, of_block), id);
	} else {
		kvd_list_push(&block->pins, &core->pins, offsetof(kvd_pin_t, of_block), id);
	}
	if (first) {
		count_pinned(core, block_id, KVD_PINS_ALL, 1);
	}
	if (is_handover && !(block->flags & KVD_HANDED_OVER)) {
		block->flags |= KVD_HANDED_OVER;
		count_pinned(core, block_id, KVD_PINS_HANDOVER, 1);
	}
}

static void unlink_pin(kvd_core_t *core, uint32_t id)
{
	uint32_t block_id = pin_at(core, id)->block;
	kvd_block_t *block = kvd_block_at(&core->ix, block_id);

	kvd_list_remove(&block->pins, &core->pins, offsetof(kvd_pin_t, of_block), id);
	kvd_tree_of(&core->ix, block)->pins--;
	if (block->pins.head == KVD_NONE) {
		count_pinned(core, block_id, KVD_PINS_ALL, 0);
	}
	if ((block->flags & KVD_HANDED_OVER) &&
	    (block->pins.head == KVD_NONE || pin_at(core, block->pins.head)->kind != KVD_PIN_HANDOVER)) {
		block->flags &= (uint8_t)~KVD_HANDED_OVER;
		count_pinned(core, block_id, KVD_PINS_HANDOVER, 0);
	}
}

void kvd_block_restore_marks(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if ((kvd_node_of(&core->ix, block)->flags & KVD_NODE_HELD) && block->pins.head == KVD_NONE) {
		kvd_queue_push(&core->ix, block->node);
	}
	if (block->flags & (KVD_OFF_LRU_CPU | KVD_OFF_LRU_DISK)) {
		core->policy->unpin(&core->ix, order_of(core, block, KVD_CPU), KVD_CPU, id);
		core->policy->unpin(&core->ix, order_of(core, block, KVD_DISK), KVD_DISK, id);
	}
}

kv_status_t kvd_pin_create(kvd_core_t *core, uint32_t block, kvd_pin_kind_t kind, uint64_t owner, uint32_t *p_pin)
{
	kv_status_t status = kvd_obj_pool_get(&core->pins, p_pin);

	if (status == KV_OK) {
		*pin_at(core, *p_pin) = (kvd_pin_t){.kind = kind, .owner = owner};
		link_pin(core, *p_pin, block);
	}

	return status;
}

void kvd_pin_move(kvd_core_t *core, uint32_t id, uint32_t block)
{
	uint32_t before = pin_at(core, id)->block;

	if (before != block) {
		unlink_pin(core, id);
		link_pin(core, id, block);
		kvd_block_restore_marks(core, before);
	}
}

void kvd_pin_drop(kvd_core_t *core, uint32_t id)
{
	uint32_t block = pin_at(core, id)->block;

	unlink_pin(core, id);
	kvd_obj_pool_put(&core->pins, id);
	kvd_block_restore_marks(core, block);
}

void kvd_block_ref(kvd_core_t *core, uint32_t id)
{
	kvd_block_at(&core->ix, id)->refs++;
	core->refs++;
}

/* A queued one, which the device has not seen. */
static void cancel_fill(kvd_core_t *core, kvd_io_t *io)
{
	kvd_block_t *block = kvd_block_at(&core->ix, io->block);

	block->io = KVD_NONE;
	block->flags &= (uint8_t)~KVD_FILLING;
	kvd_block_free_cpu_slot(core, io->block);
	kvd_io_cancel_read(core, io);
}

/* No lease needs this fill now. A queued one is cancelled; one in flight completes, since the device writes into its
 * slot. */
static void cancel_unwanted_fill(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (block->flags & KVD_FILLING) {
		kvd_io_t *io = kvd_io_at(core, block->io);

		if (io->queued && io->waiters.head == KVD_NONE) {
			cancel_fill(core, io);
			kvd_block_restore_marks(core, id);
		}
	}
}

void kvd_block_unref(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	kv_assert(block->refs > 0);
	block->refs--;
	core->refs--;
	if (block->refs > 0) {
		return;
	}
	if (block->flags & KVD_TRANSIT) { /* it has served the leases that referenced it */
		kvd_block_free_cpu_slot(core, id);
	} else if (block->flags & KVD_FILLING) {
		cancel_unwanted_fill(core, id);
	}
	kvd_block_restore_marks(core, id);
}

void kvd_block_detach_io(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	kvd_io_t *io;

	if (block->io == KVD_NONE) {
		return;
	}
	io = kvd_io_at(core, block->io);
	if (io->queued) {
		cancel_fill(core, io);
		return;
	}
	if (io->parent != KVD_NONE) {
		kvd_block_unref(core, io->parent);
	}
	/* The device may still use both slots: they belong to the transfer until it ends, so no other block gets them.
	 */
	io->done = NULL;
	block->io = KVD_NONE;
	block->flags &= (uint8_t)~KVD_FILLING;
	block->disk.slot = KV_SLOT_NONE;
	*kvd_slot_of(&core->ix, block) = KV_SLOT_NONE;
}

/* ---- sets ------------------------------------------------------------------------------------ */

kv_miss_reason_t kvd_explain_miss(const kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint8_t group)
{
	static const kv_miss_reason_t why[] = {[KVD_GHOST_NONE] = KV_WHY_ABSENT,
					       [KVD_GHOST_OFFERED] = KV_WHY_ABSENT,
					       [KVD_GHOST_EVICTED] = KV_WHY_EVICTED,
					       [KVD_GHOST_REFUSED] = KV_WHY_NOT_ADMITTED};

	return kvd_index_find_aside(&core->ix, tree, key, group) != KVD_NONE ? KV_WHY_UNREADABLE
	       : kvd_index_is_quarantined(&core->ix, tree, key, group)       ? KV_WHY_CORRUPT
									     : why[kvd_ghost_find(core, key)];
}

static void free_slot(kvd_core_t *core, uint32_t id, kvd_set_t t)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (t == KVD_CPU) {
		kvs_free(core->tier[KVD_CPU], kvd_cpu_loc(&core->ix, block));
		*kvd_slot_of(&core->ix, block) = KV_SLOT_NONE;
	} else {
		kvs_free(kvd_disk(core), block->disk);
		block->disk.slot = KV_SLOT_NONE;
	}
}

static const kvd_class_t *class_of(const kvd_core_t *core, const kvd_block_t *block)
{
	return &core->classes[kvd_class_of(&core->ix, block)];
}

static int goes_to_disk(const kvd_core_t *core, const kvd_block_t *block)
{
	return kvd_class_has_disk(core, kvd_class_of(&core->ix, block)) && !kvd_is_private(&core->ix, block);
}

void kvd_block_queue_write(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (goes_to_disk(core, block) && core->config.write_behind && block->disk.slot == KV_SLOT_NONE) {
		kvd_queue_push(&core->ix, block->node);
	}
}

/* For the order in which the tier reports its blocks after a restart (decision 069). */
static void keep_use(kvd_core_t *core, const kvd_block_t *block, kvd_set_t t, uint64_t stamp)
{
	kvs_touch(core->tier[t], t == KVD_CPU ? kvd_cpu_loc(&core->ix, block) : block->disk, stamp);
}

static void join_block(kvd_core_t *core, uint32_t id, kvd_set_t t, uint64_t stamp, const uint32_t *tokens)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint8_t waiting = t == KVD_CPU ? KVD_TRANSIT : KVD_DISK_UNLINKED;

	if (block->flags & waiting) {
		block->flags &= (uint8_t)~waiting;
		*(t == KVD_CPU ? &core->transit : &core->disk_unlinked) -= 1;
	}
	/* A block of a new epoch is announced by a walk, after the old epoch is removed (events.h). */
	if (kvd_tiers_of(&core->ix, block) == 0 && kvd_event_is_muted(core, id)) {
		block->flags |= KVD_EVENT_PENDING;
	}
	/* Index before mirror: a client that matches the block in the mirror finds it in the index. The event is last:
	 * a router may send a request at once. */
	kvd_index_join(&core->ix, id, t);
	core->policy->join(&core->ix, order_of(core, block, t), t, id, stamp);
	order_of(core, block, t)->blocks++;
	if (t == KVD_CPU) {
		(void)kvs_set_state(core->tier[KVD_CPU], kvd_cpu_loc(&core->ix, block), KVS_READY);
		kvd_block_queue_write(core, id);
	}
	keep_use(core, block, t, stamp);
	kvd_block_sync_mirror(core, id);
	kvd_event_add_stored(core, id, t, tokens);
}

/* A child of the block that was waiting for it, or KVD_NONE. */
static uint32_t find_waiting_child(kvd_core_t *core, const kvd_block_t *block, kvd_set_t t)
{
	const kvd_node_t *node = kvd_node_of(&core->ix, block);
	uint8_t waiting = t == KVD_CPU ? KVD_TRANSIT : KVD_DISK_UNLINKED;
	uint32_t child;

	/* In mid-run a block has one child, at the end of the run one for each run below. */
	if (block->pos + 1u < node->len) {
		child = node->ids[block->pos + 1];
		return kvd_block_at(&core->ix, child)->flags & waiting ? child : KVD_NONE;
	}
	for (uint32_t c = node->children.head; c != KVD_NONE; c = kvd_node_at(&core->ix, c)->siblings.next) {
		const kvd_node_t *below = kvd_node_at(&core->ix, c);

		child = below->ids[0];
		if ((kvd_block_at(&core->ix, child)->flags & waiting) && !(below->flags & KVD_NODE_DEAD)) {
			return child;
		}
	}

	return KVD_NONE;
}

void kvd_block_join(kvd_core_t *core, uint32_t id, kvd_set_t t, uint64_t stamp, const uint32_t *tokens)
{
	const uint32_t *some = t == KVD_CPU ? &core->transit : &core->disk_unlinked;
	uint32_t top = id;

	join_block(core, id, t, stamp, tokens);
	/* Down the waiting children, and back up for their siblings, until none is left below `top`. Usually none waits
	 * anywhere, and a join costs one comparison more. */
	while (*some > 0) {
		uint32_t child = find_waiting_child(core, kvd_block_at(&core->ix, id), t);

		if (child != KVD_NONE) {
			join_block(core, child, t, stamp, NULL);
			id = child;
		} else if (id == top) {
			break;
		} else {
			id = kvd_index_parent(&core->ix, id);
		}
	}
}

void kvd_block_requeue_below(kvd_core_t *core, uint32_t id)
{
	uint32_t top = id;

	while (core->disk_unlinked > 0) {
		uint32_t child = find_waiting_child(core, kvd_block_at(&core->ix, id), KVD_DISK);

		if (child != KVD_NONE) {
			kvd_block_at(&core->ix, child)->flags &= (uint8_t)~KVD_DISK_UNLINKED;
			core->disk_unlinked--;
			free_slot(core, child, KVD_DISK);
			kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
			kvd_block_queue_write(core, child);
			id = child;
		} else if (id == top) {
			break;
		} else {
			id = kvd_index_parent(&core->ix, id);
		}
	}
}

void kvd_block_leave(kvd_core_t *core, uint32_t id, kvd_set_t t)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	core->policy->leave(&core->ix, order_of(core, block, t), t, id);
	order_of(core, block, t)->blocks--;
	kvd_index_leave(&core->ix, id, t);
	kvd_block_sync_mirror(core, id);
	kvd_event_add_removed(core, id, t);
}

void kvd_block_free_cpu_slot(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	kv_assert(!kvd_in_set(&core->ix, block, KVD_CPU));
	if (block->flags & KVD_TRANSIT) {
		block->flags &= (uint8_t)~KVD_TRANSIT;
		core->transit--;
	}
	free_slot(core, id, KVD_CPU);
}

/* When the leaf of a set was asked for last. */
static uint64_t stamp_of(const kvd_core_t *core, const kvd_block_t *block, kvd_set_t t)
{
	uint32_t mark = kvd_node_of(&core->ix, block)->marks[t];

	return mark == KVD_NONE ? 0 : ((const kvd_mark_t *)kvd_obj_at(&core->ix.marks, mark))->stamp;
}

void kvd_block_evict(kvd_core_t *core, uint32_t id, kvd_set_t t, kv_ns_metric_t why)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	const kvd_class_t *class = class_of(core, block);
	uint32_t ns = class->ns;
	int hit = kvd_index_was_hit(&core->ix, block);
	uint64_t stamp = stamp_of(core, block, t);

	kvd_count(core, t == KVD_DISK ? KV_M_EVICTED_DISK : class->memory > 0 ? KV_M_EVICTED_GPU : KV_M_EVICTED_CPU, 1);
	if (ns != KVD_NONE) {
		kvd_count_ns(core, ns, why, 1);
	}
	/* Mirror and event before the slot: when the slot can get other bytes, the block is no longer found. */
	kvd_block_leave(core, id, t);
	free_slot(core, id, t);
	if (block->flags & KVD_DISK_UNLINKED) { /* on disk, but of no use there without its parent */
		block->flags &= (uint8_t)~KVD_DISK_UNLINKED;
		core->disk_unlinked--;
		free_slot(core, id, KVD_DISK);
	}
	if (kvd_tiers_of(&core->ix, block) == 0) {
		if (!kvd_is_private(&core->ix, block)) {
			kvd_admission_add_lost(core, (uint32_t)(class - core->classes), block, hit, stamp);
		}
		if (t == KVD_CPU && goes_to_disk(core, block)) {
			kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
		}
	}
	/* Its only copy left cannot be read now: lookups must not find it (decision 032). */
	if (t == KVD_CPU && core->tier[KVD_DISK] && kvd_in_set(&core->ix, block, KVD_DISK) &&
	    kvs_readable(core->tier[KVD_DISK], block->disk) == KV_ERR_IO) {
		kvd_block_set_aside(core, id);
		return;
	}
	kvd_block_forget_unused(core, id);
}

void kvd_block_forget_unused(kvd_core_t *core, uint32_t id)
{
	/* A dead block is forgotten by dismantle.c, which has its top on a list. */
	while (id != KVD_NONE && kvd_index_is_removable(&core->ix, kvd_block_at(&core->ix, id)) &&
	       !kvd_index_is_dead(&core->ix, kvd_block_at(&core->ix, id))) {
		uint32_t parent = kvd_index_parent(&core->ix, id);

		if (core->gather.count > 0 && core->gather.last == id) {
			kvd_events_flush(core); /* another block may have its id soon */
		}
		kvd_index_remove(&core->ix, id);
		id = parent;
	}
}

void kvd_private_block_hold(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (kvd_is_private(&core->ix, block)) {
		kvd_node_of(&core->ix, block)->flags |= KVD_NODE_HELD;
	}
}

void kvd_private_block_renew(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (kvd_is_private(&core->ix, block)) {
		kvd_node_of(&core->ix, block)->flags &= ~KVD_NODE_HELD;
		kvd_queue_remove(&core->ix, block->node);
	}
}

int kvd_private_blocks_run(kvd_core_t *core)
{
	for (uint32_t left = PRIVATE_QUANTUM; left > 0 && core->ix.unheld.head != KVD_NONE; left--) {
		uint32_t node = core->ix.unheld.head, id = kvd_node_at(&core->ix, node)->ids[0];
		const kvd_block_t *block = kvd_block_at(&core->ix, id);

		kvd_queue_remove(&core->ix, node);
		/* A tree that is taken down takes it along. What needs the block now queues it again when it ends. */
		if (kvd_block_is_evictable(&core->ix, block, KVD_CPU) && kvd_in_set(&core->ix, block, KVD_CPU) &&
		    !kvd_tree_of(&core->ix, block)->hidden) {
			kvd_block_leave(core, id, KVD_CPU);
			free_slot(core, id, KVD_CPU);
			kvd_block_forget_unused(core, id);
		}
	}

	return core->ix.unheld.head != KVD_NONE;
}

void kvd_block_touch_path(kvd_core_t *core, uint32_t id)
{
	/* Each tier's set ends at a depth of its own on this path, so each gets a mark. */
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS && core->policy->touch; t++) {
		uint32_t depth = kvd_index_depth_in(&core->ix, id, t);
		const kvd_block_t *block;
		uint32_t deepest;

		if (depth == 0) {
			continue;
		}
		deepest = kvd_index_ancestor(&core->ix, id, depth);
		block = kvd_block_at(&core->ix, deepest);
		core->policy->touch(&core->ix, order_of(core, block, t), t, deepest, core->stamp);
		keep_use(core, block, t, core->stamp);
	}
}

void kvd_block_get_meta(const kvd_core_t *core, uint32_t id, kvs_meta_t *meta)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	const kvd_tree_t *tree = kvd_tree_of(&core->ix, block);
	uint32_t parent = kvd_index_parent(&core->ix, id);

	*meta = (kvs_meta_t){.key = block->key,
			     .epoch = tree->epoch,
			     .event_hash = block->event_hash,
			     .depth = kvd_depth_of(&core->ix, block),
			     .group = block->group};
	if (parent != KVD_NONE) {
		meta->parent = kvd_block_at(&core->ix, parent)->key;
	}
	memcpy(meta->root, tree->root, sizeof meta->root);
}
