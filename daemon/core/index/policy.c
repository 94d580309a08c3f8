#include "core/index/policy.h"

/* A mark that belongs further back than this is linked here instead: the order is near enough, and the walk is O(1). */
#define ORDER_WALK 64u

void kvd_order_init(kvd_order_t *order)
{
	*order = (kvd_order_t){.marks = KVD_LIST_EMPTY};
}

int kvd_block_is_evictable(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t)
{
	/* A reference or a transfer needs this very copy, in either tier. */
	if (block->refs > 0 || block->io != KVD_NONE) {
		return 0;
	}
	if (block->pins.head == KVD_NONE) {
		return 1;
	}

	return t == KVD_DISK && kvd_in_set(ix, block, KVD_CPU); /* a lease reads the CPU copy */
}

/* ---- the order ------------------------------------------------------------------------------- */

static kvd_mark_t *mark_at(const kvd_index_t *ix, uint32_t id)
{
	return kvd_obj_at(&ix->marks, id);
}

static uint8_t off_lru_flag(kvd_set_t t)
{
	return t == KVD_CPU ? KVD_OFF_LRU_CPU : KVD_OFF_LRU_DISK;
}

static kvd_block_t *marked_block(const kvd_index_t *ix, const kvd_mark_t *mark)
{
	return kvd_block_at(ix, kvd_node_at(ix, mark->node)->ids[mark->pos]);
}

/* In front of `before`; KVD_NONE: as the newest. */
static void link_mark(kvd_index_t *ix, kvd_order_t *order, uint32_t id, uint32_t before)
{
	kvd_list_insert(&order->marks, &ix->marks, offsetof(kvd_mark_t, order), id, before);
	order->count++;
}

static void unlink_mark(kvd_index_t *ix, kvd_order_t *order, uint32_t id)
{
	kvd_list_remove(&order->marks, &ix->marks, offsetof(kvd_mark_t, order), id);
	order->count--;
}

static void link_as_newest(kvd_index_t *ix, kvd_order_t *order, uint32_t id)
{
	uint64_t stamp = mark_at(ix, id)->stamp;
	uint32_t before = KVD_NONE, last = order->marks.tail;

	/* Stamps come nearly in order: only fills and write-behind join with the stamp of an older request. */
	for (uint32_t i = 0; i < ORDER_WALK && last != KVD_NONE && mark_at(ix, last)->stamp > stamp; i++) {
		before = last;
		last = mark_at(ix, last)->order.prev;
	}
	link_mark(ix, order, id, before);
}

static void link_as_oldest(kvd_index_t *ix, kvd_order_t *order, uint32_t id)
{
	uint64_t stamp = mark_at(ix, id)->stamp;
	uint32_t before = order->marks.head;

	/* A mark that comes back is old, so it has few marks to pass from the head. */
	for (uint32_t i = 0; i < ORDER_WALK && before != KVD_NONE && mark_at(ix, before)->stamp < stamp; i++) {
		before = mark_at(ix, before)->order.next;
	}
	link_mark(ix, order, id, before);
}

/* Off the list, or no longer marked as off it. */
static void detach_mark(kvd_index_t *ix, kvd_order_t *order, uint32_t id, kvd_set_t t)
{
	kvd_mark_t *mark = mark_at(ix, id);

	if (mark->off_lru) {
		mark->off_lru = 0;
		marked_block(ix, mark)->flags &= (uint8_t)~off_lru_flag(t);
	} else {
		unlink_mark(ix, order, id);
	}
}

/* ---- marks of a run -------------------------------------------------------------------------- */

/* Take the mark behind `link` off its run. */
static void unlink_from_run(kvd_index_t *ix, kvd_node_t *node, uint32_t *link, kvd_set_t t)
{
	*link = mark_at(ix, *link)->shallower;
	ix->extra_marks -= node->marks[t] != KVD_NONE ? 1 : 0;
}

/* Hang mark `id` behind `link`, where it belongs by depth. */
static void link_to_run(kvd_index_t *ix, kvd_node_t *node, uint32_t *link, uint32_t id, kvd_set_t t)
{
	/* The first mark of a run has reserved memory; extra_marks counts the others. */
	ix->extra_marks += node->marks[t] != KVD_NONE ? 1 : 0;
	mark_at(ix, id)->shallower = *link;
	*link = id;
}

static void drop_mark(kvd_index_t *ix, kvd_order_t *order, kvd_node_t *node, uint32_t *link, kvd_set_t t)
{
	uint32_t id = *link;

	detach_mark(ix, order, id, t);
	unlink_from_run(ix, node, link, t);
	kvd_obj_pool_put(&ix->marks, id);
}

static uint32_t *find_link(kvd_index_t *ix, kvd_node_t *node, kvd_set_t t, uint32_t id)
{
	uint32_t *link = &node->marks[t];

	while (*link != id) {
		link = &mark_at(ix, *link)->shallower;
	}

	return link;
}

/* The first mark of a run always has memory (create_node reserves it), another one only while memory is not short: so a
 * set never changes without a mark on its leaf. */
static uint32_t create_mark(kvd_index_t *ix, const kvd_node_t *node, kvd_set_t t)
{
	uint32_t id;

	if (node->marks[t] != KVD_NONE && KVD_TIERS * (uint64_t)ix->nodes.used + ix->extra_marks >= ix->marks.made) {
		return KVD_NONE;
	}

	return kvd_obj_pool_get(&ix->marks, &id) == KV_OK ? id : KVD_NONE;
}

/* The path down to `block` was touched at `stamp`: marks above it in this run that are not younger go, since the new
 * one speaks for them; one stays on the block. A younger mark below covers the block already. */
static void set_mark(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block_id, uint64_t stamp)
{
	const kvd_block_t *block = kvd_block_at(ix, block_id);
	kvd_node_t *node = kvd_node_of(ix, block);
	uint32_t *link = &node->marks[t], *at, id;

	/* A deeper mark that is not older covers this block too. */
	while (*link != KVD_NONE && mark_at(ix, *link)->pos > block->pos) {
		if (mark_at(ix, *link)->stamp >= stamp) {
			return;
		}
		link = &mark_at(ix, *link)->shallower;
	}
	at = link;
	while (*link != KVD_NONE && mark_at(ix, *link)->stamp <= stamp) {
		drop_mark(ix, order, node, link, t); /* marks get younger as they get shallower */
	}
	if (*link != KVD_NONE && mark_at(ix, *link)->pos == block->pos) {
		return;
	}

	id = create_mark(ix, node, t);
	if (id == KVD_NONE && *at == KVD_NONE) {
		return; /* a touch in mid-run is forgotten; the run's own mark is still there */
	}
	if (id == KVD_NONE) {
		/* Without memory the younger mark above moves down and speaks for this block too. The block then seems
		 * hotter than it is, which is better than a leaf without a mark: no eviction would find it. */
		if (mark_at(ix, *at)
			    ->off_lru) { /* It was off the list for the block that it leaves, which may stay pinned. */
			detach_mark(ix, order, *at, t);
			link_as_oldest(ix, order, *at);
		}
		mark_at(ix, *at)->pos = block->pos;
		return;
	}
	*mark_at(ix, id) = (kvd_mark_t){.stamp = stamp, .node = block->node, .pos = block->pos};
	link_to_run(ix, node, at, id, t);
	link_as_newest(ix, order, id);
}

/* The block under mark `id` leaves: its parent inherits the mark and its position in the order. So a cold path goes
 * leaf by leaf, without a search (decision 006). */
static void slide_mark(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t id)
{
	kvd_mark_t *mark = mark_at(ix, id);
	kvd_node_t *node = kvd_node_at(ix, mark->node), *to = node;
	uint32_t to_id = mark->node, pos = mark->pos - 1, *link;

	if (mark->off_lru) { /* A pinned block leaves too when its space is reset: the mark goes back into the order. */
		detach_mark(ix, order, id, t);
		link_as_oldest(ix, order, id);
	}
	/* From the first block of a run the mark goes to the last block of the run above. A dead top passes nothing on:
	 * quarantine.c has given its parent a mark. */
	if (mark->pos == 0) {
		to_id = node->flags & KVD_NODE_DEAD ? KVD_NONE : node->parent;
		if (to_id == KVD_NONE) {
			drop_mark(ix, order, node, &node->marks[t], t);
			return;
		}
		to = kvd_node_at(ix, to_id);
		pos = to->len - 1;
	}

	link = to == node ? &mark->shallower : &to->marks[t];
	/* The parent has a mark of its own: the younger of the two stays. */
	if (*link != KVD_NONE && mark_at(ix, *link)->pos == pos) {
		if (mark_at(ix, *link)->stamp >= mark->stamp) {
			drop_mark(ix, order, node, find_link(ix, node, t, id), t);
			return;
		}
		drop_mark(ix, order, to, link, t);
	}
	if (to != node) {
		unlink_from_run(ix, node, find_link(ix, node, t, id), t);
		link_to_run(ix, to, &to->marks[t], id, t);
	}
	mark->node = to_id;
	mark->pos = pos;
}

/* ---- the policies ---------------------------------------------------------------------------- */

static void leave_order(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block_id)
{
	const kvd_block_t *block = kvd_block_at(ix, block_id);
	uint32_t id = kvd_node_of(ix, block)->marks[t];

	/* The block is the last of the set in its run, so only the run's deepest mark can lie on it. */
	if (id != KVD_NONE && mark_at(ix, id)->pos == block->pos) {
		slide_mark(ix, order, t, id);
	}
}

static uint32_t find_victim(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t)
{
	while (order->marks.head != KVD_NONE) {
		uint32_t id = order->marks.head;
		kvd_mark_t *mark = mark_at(ix, id);
		kvd_node_t *node = kvd_node_at(ix, mark->node);
		uint32_t block_id = node->ids[mark->pos];
		kvd_block_t *block = kvd_block_at(ix, block_id);

		if (!kvd_index_is_leaf(ix, block, t)) {
			/* A child joined after the touch: its mark is younger and speaks for the path. */
			drop_mark(ix, order, node, find_link(ix, node, t, id), t);
		} else if (!kvd_block_is_evictable(ix, block, t)) {
			/* Off the list, or each search would pass all pinned blocks. restore_mark() links it again. */
			unlink_mark(ix, order, id);
			mark->off_lru = 1;
			block->flags |= off_lru_flag(t);
		} else {
			return block_id;
		}
	}

	return KVD_NONE;
}

static void restore_mark(kvd_index_t *ix, kvd_order_t *order, kvd_set_t t, uint32_t block_id)
{
	kvd_block_t *block = kvd_block_at(ix, block_id);
	uint32_t id = kvd_node_of(ix, block)->marks[t];

	/* Another pin, reference or transfer may keep the block still. */
	if (!(block->flags & off_lru_flag(t)) || !kvd_block_is_evictable(ix, block, t)) {
		return;
	}
	while (mark_at(ix, id)->pos != block->pos) {
		id = mark_at(ix, id)->shallower;
	}
	detach_mark(ix, order, id, t);
	link_as_oldest(ix, order, id);
}

const kvd_policy_ops_t kvd_policy_lru = {"lru", set_mark, set_mark, leave_order, find_victim, restore_mark};
const kvd_policy_ops_t kvd_policy_fifo = {"fifo", NULL, set_mark, leave_order, find_victim, restore_mark};
