#include "core/index/index_impl.h"

#define RUN_MIN 8u

/* ---- trees ----------------------------------------------------------------------------------- */

kv_status_t kvd_index_init(kvd_index_t *ix, const kv_env_t *env, kv_metrics_t *metrics, uint64_t max_blocks)
{
	uint64_t heads = 1024;
	kv_status_t status;

	*ix = (kvd_index_t){.env = env, .metrics = metrics, .queue = KVD_LIST_EMPTY, .unheld = KVD_LIST_EMPTY};
	if (max_blocks == 0 || max_blocks > INT32_MAX / 4) {
		return KV_ERR_ARG;
	}
	/* A power of two, so that a mask finds the bucket; a load of 0.5 to 1. */
	while (heads < max_blocks) {
		heads *= 2;
	}
	ix->head_mask = heads - 1;
	kv_random(env, ix->seed, sizeof ix->seed);

	status = kvd_obj_pool_init(&ix->blocks, env, sizeof(kvd_block_t), (uint32_t)max_blocks);
	if (status == KV_OK) {
		status = kvd_obj_pool_init(&ix->nodes, env, sizeof(kvd_node_t), (uint32_t)max_blocks + 1);
	}
	if (status == KV_OK) {
		status = kvd_obj_pool_init(&ix->marks, env, sizeof(kvd_mark_t),
					   (uint32_t)max_blocks * 4 + 4 * KVD_OBJ_POOL_CHUNK);
	}
	if (status == KV_OK) {
		status = kvd_obj_pool_init(&ix->trees, env, sizeof(kvd_tree_t), 1u << 20);
	}
	if (status == KV_OK) {
		ix->heads = kv_alloc(env, heads * sizeof *ix->heads);
		status = ix->heads ? KV_OK : KV_ERR_NOMEM;
	}
	if (status != KV_OK) {
		kvd_index_fini(ix);
	}

	return status;
}

void kvd_index_fini(kvd_index_t *ix)
{
	/* Runs own their arrays, and a free run in the pool has stale pointers: so follow the trees. */
	for (uint32_t t = 0; ix->trees.chunks && t < ix->trees.made; t++) {
		const kvd_tree_t *tree = kvd_tree_at(ix, t);

		if (!tree->live) {
			continue;
		}
		for (uint32_t id = tree->children.head; id != KVD_NONE; id = kvd_index_next_run(ix, id)) {
			kv_free(ix->env, kvd_node_at(ix, id)->slots);
		}
	}
	kv_free(ix->env, ix->heads);
	ix->heads = NULL;
	kvd_obj_pool_fini(&ix->blocks);
	kvd_obj_pool_fini(&ix->nodes);
	kvd_obj_pool_fini(&ix->marks);
	kvd_obj_pool_fini(&ix->trees);
}

kv_status_t kvd_tree_create(kvd_index_t *ix, uint32_t *p_tree)
{
	kv_status_t status = kvd_obj_pool_get(&ix->trees, p_tree);

	if (status == KV_OK) {
		*kvd_tree_at(ix, *p_tree) = (kvd_tree_t){
			.live = 1, .space = KVD_NONE, .ns = KVD_NONE, .children = KVD_LIST_EMPTY, .cursor = KVD_NONE};
	}

	return status;
}

void kvd_tree_destroy(kvd_index_t *ix, uint32_t id)
{
	kvd_tree_t *tree = kvd_tree_at(ix, id);

	kv_assert(tree->children.head == KVD_NONE && tree->blocks == 0);
	tree->live = 0;
	kvd_obj_pool_put(&ix->trees, id);
}

uint32_t kvd_index_next_run(const kvd_index_t *ix, uint32_t id)
{
	const kvd_node_t *node = kvd_node_at(ix, id);

	if (node->children.head != KVD_NONE) {
		return node->children.head;
	}
	while (node->siblings.next == KVD_NONE) {
		if (node->parent == KVD_NONE) {
			return KVD_NONE;
		}
		node = kvd_node_at(ix, node->parent);
	}

	return node->siblings.next;
}

/* ---- write-behind's queue of runs ------------------------------------------------------------ */

static kvd_list_t *queue_of(kvd_index_t *ix, const kvd_node_t *node)
{
	return node->flags & KVD_NODE_PRIVATE ? &ix->unheld : &ix->queue;
}

void kvd_queue_push(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);

	if (node->flags & (KVD_NODE_QUEUED | KVD_NODE_DEAD)) {
		return;
	}
	/* A dead run uses the same link for the list of what is taken down: it never gets here. */
	node->flags |= KVD_NODE_QUEUED;
	kvd_list_push(queue_of(ix, node), &ix->nodes, offsetof(kvd_node_t, queue), id);
	ix->queued++;
}

void kvd_queue_remove(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);

	if (!(node->flags & KVD_NODE_QUEUED)) {
		return;
	}
	node->flags &= ~KVD_NODE_QUEUED;
	kvd_list_remove(queue_of(ix, node), &ix->nodes, offsetof(kvd_node_t, queue), id);
	ix->queued--;
}

/* ---- runs ------------------------------------------------------------------------------------ */

/* Slots and ids of a run share one allocation. */
static kv_status_t resize_run(kvd_index_t *ix, kvd_node_t *node, uint32_t cap)
{
	uint32_t *memory = kv_alloc(ix->env, 2u * sizeof(uint32_t) * cap);

	if (!memory) {
		return KV_ERR_NOMEM;
	}
	if (node->len > 0) {
		memcpy(memory, node->slots, node->len * sizeof(uint32_t));
		memcpy(memory + cap, node->ids, node->len * sizeof(uint32_t));
	}
	kv_free(ix->env, node->slots);
	node->slots = memory;
	node->ids = memory + cap;
	node->cap = cap;

	return KV_OK;
}

static kvd_list_t *children_of(kvd_index_t *ix, uint32_t tree, uint32_t parent)
{
	return parent == KVD_NONE ? &kvd_tree_at(ix, tree)->children : &kvd_node_at(ix, parent)->children;
}

static void link_child(kvd_index_t *ix, uint32_t parent, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);

	node->parent = parent;
	kvd_list_push_front(children_of(ix, node->tree, parent), &ix->nodes, offsetof(kvd_node_t, siblings), id);
	if (parent != KVD_NONE) {
		kvd_node_at(ix, parent)->child_count++;
	}
}

static void unlink_child(kvd_index_t *ix, uint32_t id)
{
	const kvd_node_t *node = kvd_node_at(ix, id);

	kvd_list_remove(children_of(ix, node->tree, node->parent), &ix->nodes, offsetof(kvd_node_t, siblings), id);
	if (node->parent != KVD_NONE) {
		kvd_node_at(ix, node->parent)->child_count--;
	}
}

/* An unlinked empty run. One mark a tier is reserved with it, so that joining a set never fails. */
static kv_status_t create_node(kvd_index_t *ix, uint32_t tree, uint32_t cap, uint32_t *p_id)
{
	/* A mark a tier for each run, the extra ones, and some to spare for touches in mid-run. */
	kv_status_t status =
		kvd_obj_pool_reserve(&ix->marks, KVD_TIERS * ((uint64_t)ix->nodes.used + 1) + ix->extra_marks + 64);
	kvd_node_t *node;

	if (status != KV_OK) {
		return status;
	}
	status = kvd_obj_pool_get(&ix->nodes, p_id);
	if (status != KV_OK) {
		return status;
	}
	node = kvd_node_at(ix, *p_id);
	status = resize_run(ix, node, cap);
	if (status != KV_OK) {
		kvd_obj_pool_put(&ix->nodes, *p_id);
		return status;
	}
	node->tree = tree;
	node->parent = KVD_NONE;
	node->children = KVD_LIST_EMPTY;
	node->marks[KVD_CPU] = node->marks[KVD_DISK] = KVD_NONE;

	return KV_OK;
}

static void destroy_node(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id);

	kvd_queue_remove(ix, id);
	if (node->flags & KVD_NODE_DEAD) {
		ix->dead_nodes--;
		kvd_tree_at(ix, node->tree)->dead_nodes--;
	}
	kvd_tree_at(ix, node->tree)->aside_nodes -= (node->flags & KVD_NODE_ASIDE) != 0;
	kv_free(ix->env, node->slots);
	kvd_obj_pool_put(&ix->nodes, id);
}

/* A walk that stands on run `from` goes on with run `to`. */
static void move_cursor(kvd_index_t *ix, uint32_t from, uint32_t to)
{
	kvd_tree_t *tree = kvd_tree_at(ix, kvd_node_at(ix, from)->tree);

	if (tree->cursor == from) {
		tree->cursor = to;
	}
}

/* Move marks of `from` shallower than `pos` to the empty list of `head`, and count the others from `pos`. */
static void split_marks(kvd_index_t *ix, kvd_node_t *from, uint32_t head, uint32_t pos, kvd_set_t t)
{
	uint32_t *link = &from->marks[t], kept = 0;

	/* Deepest first: marks of the rest come first, and count from its new start. */
	for (; *link != KVD_NONE; kept++) {
		kvd_mark_t *mark = kvd_obj_at(&ix->marks, *link);

		if (mark->pos < pos) {
			break;
		}
		mark->pos -= pos;
		link = &mark->shallower;
	}
	kvd_node_at(ix, head)->marks[t] = *link;
	for (uint32_t id = *link; id != KVD_NONE;) {
		kvd_mark_t *mark = kvd_obj_at(&ix->marks, id);

		mark->node = head;
		id = mark->shallower;
	}
	/* Two lists now have a first mark, where one had. */
	ix->extra_marks -= kept > 0 && *link != KVD_NONE ? 1 : 0;
	*link = KVD_NONE;
}

/* Pins of the blocks that `head` has taken over from `node`, whose length is that of the rest already. */
static void split_pins(kvd_index_t *ix, kvd_node_t *node, kvd_node_t *head, kvd_pin_class_t pins)
{
	kvd_pinned_t *rest = &node->pinned[pins], *upper = &head->pinned[pins];

	for (uint32_t i = 0; rest->ends > 0 && i < head->len; i++) {
		if (kvd_index_has_pin(kvd_block_at(ix, head->ids[i]), pins)) {
			upper->ends++;
			rest->ends--;
		}
	}
	/* Pinned blocks are a prefix: if the rest has any, all of the head is pinned. */
	upper->blocks = rest->blocks < head->len ? rest->blocks : head->len;
	rest->blocks -= upper->blocks;
	upper->children = rest->blocks > 0 ? 1 : 0;
}

/* Pins of a run of `len` blocks whose only child takes it over. */
static void merge_pins(const kvd_node_t *node, kvd_node_t *child, uint32_t len, kvd_pin_class_t pins)
{
	const kvd_pinned_t *upper = &node->pinned[pins];
	kvd_pinned_t *all = &child->pinned[pins];

	all->ends += upper->ends;
	/* A pinned block below pins all of the upper run. */
	all->blocks = all->blocks > 0 ? len + all->blocks : upper->blocks;
}

/* The first `pos` blocks of a run become a run of their own, its parent. The rest keeps its id and its children, so no
 * child has to be touched, whatever their number (decision 006). A dead run is never split: dismantling knows its top
 * by id. */
static kv_status_t split_node(kvd_index_t *ix, uint32_t id, uint32_t pos)
{
	kvd_node_t *node = kvd_node_at(ix, id), *head;
	uint32_t head_id;
	kv_status_t status;

	kv_assert(!(node->flags & KVD_NODE_DEAD) && pos > 0 && pos < node->len);
	status = create_node(ix, node->tree, pos > RUN_MIN ? pos : RUN_MIN, &head_id);

	if (status != KV_OK) {
		return status;
	}
	head = kvd_node_at(ix, head_id);
	head->slot_class = node->slot_class;
	head->depth0 = node->depth0;
	head->len = pos;
	memcpy(head->slots, node->slots, pos * sizeof(uint32_t));
	memcpy(head->ids, node->ids, pos * sizeof(uint32_t));
	for (uint32_t i = 0; i < pos; i++) {
		kvd_block_at(ix, head->ids[i])->node = head_id;
	}

	/* Ids of blocks do not change: pins, leases and transfers that name one need no visit. */
	node->len -= pos;
	node->depth0 += pos;
	memmove(node->slots, node->slots + pos, node->len * sizeof(uint32_t));
	memmove(node->ids, node->ids + pos, node->len * sizeof(uint32_t));
	for (uint32_t i = 0; i < node->len; i++) {
		kvd_block_at(ix, node->ids[i])->pos = (uint16_t)i;
	}

	/* A set is a prefix of the run, so the head takes the first `pos` of it. What is left makes the rest a child in
	 * the set. */
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		head->n[t] = node->n[t] < pos ? node->n[t] : pos;
		node->n[t] -= head->n[t];
		head->children_in[t] = node->n[t] > 0 ? 1 : 0;
		split_marks(ix, node, head_id, pos, t);
	}
	head->hit = node->hit < pos ? node->hit : pos;
	node->hit -= head->hit;
	for (kvd_pin_class_t pins = KVD_PINS_ALL; pins < KVD_PIN_CLASSES; pins++) {
		split_pins(ix, node, head, pins);
	}
	/* ASIDE is about the first block, which the head has now (decision 032). */
	head->flags |= node->flags & KVD_NODE_ASIDE;
	node->flags &= ~KVD_NODE_ASIDE;
	move_cursor(ix, id, head_id);
	unlink_child(ix, id);
	link_child(ix, node->parent, head_id);
	link_child(ix, head_id, id);
	/* Blocks of either part may wait to be written. */
	if (node->flags & KVD_NODE_QUEUED) {
		kvd_queue_push(ix, head_id);
	}

	return KV_OK;
}

/* Marks of a run that is about to become the first `pos` blocks of `to`. */
static void merge_marks(kvd_index_t *ix, kvd_node_t *from, uint32_t to_id, uint32_t pos, kvd_set_t t)
{
	uint32_t *link = &kvd_node_at(ix, to_id)->marks[t];

	ix->extra_marks += *link != KVD_NONE && from->marks[t] != KVD_NONE ? 1 : 0;
	while (*link != KVD_NONE) {
		kvd_mark_t *mark = kvd_obj_at(&ix->marks, *link);

		mark->pos += pos;
		link = &mark->shallower;
	}
	*link = from->marks[t];
	for (uint32_t id = from->marks[t]; id != KVD_NONE;) {
		kvd_mark_t *mark = kvd_obj_at(&ix->marks, id);

		mark->node = to_id;
		id = mark->shallower;
	}
	from->marks[t] = KVD_NONE;
}

/* A run with one child only merges into the child, which keeps its id and its own children. Without memory the path
 * stays one run longer. Runs at a boundary (DEAD, ASIDE) stay apart: their flag is about their first block. */
static void merge_node(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_at(ix, id), *child;
	uint32_t child_id = node->children.head, len = node->len, parent = node->parent;

	child = kvd_node_at(ix, child_id);
	if (len + child->len > KVD_RUN_MAX || ((node->flags | child->flags) & (KVD_NODE_DEAD | KVD_NODE_ASIDE))) {
		return;
	}
	if (len + child->len > child->cap && resize_run(ix, child, len + child->len) != KV_OK) {
		return;
	}
	memmove(child->slots + len, child->slots, child->len * sizeof(uint32_t));
	memmove(child->ids + len, child->ids, child->len * sizeof(uint32_t));
	memcpy(child->slots, node->slots, len * sizeof(uint32_t));
	memcpy(child->ids, node->ids, len * sizeof(uint32_t));
	child->len += len;
	child->depth0 = node->depth0;
	for (uint32_t i = 0; i < child->len; i++) {
		kvd_block_t *block = kvd_block_at(ix, child->ids[i]);

		block->pos = (uint16_t)i;
		block->node = child_id;
	}
	for (kvd_set_t t = KVD_CPU; t < KVD_TIERS; t++) {
		child->n[t] += node->n[t];
		merge_marks(ix, node, child_id, len, t);
	}
	child->hit += node->hit;
	for (kvd_pin_class_t pins = KVD_PINS_ALL; pins < KVD_PIN_CLASSES; pins++) {
		merge_pins(node, child, len, pins);
	}
	if (node->flags & KVD_NODE_QUEUED) {
		kvd_queue_push(ix, child_id);
	}
	move_cursor(ix, id, child_id);
	unlink_child(ix, child_id);
	unlink_child(ix, id);
	link_child(ix, parent, child_id);
	destroy_node(ix, id);
}

void kvd_index_set_aside(kvd_index_t *ix, uint32_t id, int aside)
{
	kvd_node_t *node = kvd_node_at(ix, id);
	kvd_tree_t *tree = kvd_tree_at(ix, node->tree);

	node->flags = aside ? node->flags | KVD_NODE_ASIDE : node->flags & ~KVD_NODE_ASIDE;
	tree->aside_nodes += aside ? 1u : UINT32_MAX;
	/* A new question makes all kept answers stale at once, without a visit (decision 026). */
	tree->shown = kvd_index_new_question(ix);
	ix->inserted += aside ? 0 : 1;
	if (!aside && node->parent != KVD_NONE && kvd_node_at(ix, node->parent)->child_count == 1) {
		merge_node(ix, node->parent);
	}
}

kv_status_t kvd_index_split_before(kvd_index_t *ix, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(ix, id);

	return block->pos == 0 ? KV_OK : split_node(ix, block->node, block->pos);
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* The run that takes a new block under `parent`: the parent's own if the block extends it, else a new one. */
static kv_status_t find_run_for(kvd_index_t *ix, uint32_t tree, uint32_t parent, uint32_t *p_node)
{
	kvd_node_t *node;
	kvd_block_t *above;
	kv_status_t status;
	uint32_t id;

	if (parent != KVD_NONE) {
		above = kvd_block_at(ix, parent);
		node = kvd_node_of(ix, above);
		/* The parent's run can grow at its end, unless branches hang there: children hang under a run's end
		 * only. */
		if (above->pos + 1u == node->len && node->child_count == 0 && node->len < KVD_RUN_MAX) {
			*p_node = above->node;
			return node->len < node->cap
				       ? KV_OK
				       : resize_run(ix, node, node->cap < RUN_MIN ? RUN_MIN : node->cap * 2);
		}
		/* The parent is in mid-run: a branch begins, and the run ends here from now on. */
		if (above->pos + 1u < node->len) {
			status = split_node(ix, above->node, above->pos + 1u);
			if (status != KV_OK) {
				return status;
			}
		}
	}

	status = create_node(ix, tree, parent == KVD_NONE ? 1 : RUN_MIN,
			     &id); /* most blocks at the root are unchained and stay runs of one */
	if (status != KV_OK) {
		return status;
	}
	node = kvd_node_at(ix, id);
	node->depth0 = parent == KVD_NONE ? 0 : kvd_depth_of(ix, kvd_block_at(ix, parent));
	link_child(ix, parent == KVD_NONE ? KVD_NONE : kvd_block_at(ix, parent)->node, id);
	*p_node = id;

	return KV_OK;
}

static void add_to_tally(kvd_tree_t *tree, uint64_t add)
{
	if (tree->tally) {
		*tree->tally += add;
	}
}

kv_status_t kvd_index_insert(kvd_index_t *ix, uint32_t tree, uint32_t parent, const kvs_meta_t *meta, uint32_t *p_block)
{
	uint32_t id, node_id;
	kvd_block_t *block;
	kvd_node_t *node;
	kv_status_t status = kvd_obj_pool_get(&ix->blocks, &id);

	if (status != KV_OK) {
		return status;
	}
	status = find_run_for(ix, tree, parent, &node_id);
	if (status != KV_OK) {
		kvd_obj_pool_put(&ix->blocks, id);
		return status;
	}

	node = kvd_node_at(ix, node_id);
	if (node->len == 0) {
		node->slot_class = kvd_tree_class(kvd_tree_at(ix, tree), meta->group);
	}
	block = kvd_block_at(ix, id);
	*block = (kvd_block_t){
		.key = meta->key,
		.event_hash = meta->event_hash,
		.group = meta->group,
		.disk.slot = KV_SLOT_NONE,
		.node = node_id,
		.pos = (uint16_t)node->len,
		.pins = KVD_LIST_EMPTY,
		.io = KVD_NONE,
	};
	node->slots[node->len] = KV_SLOT_NONE;
	node->ids[node->len] = id;
	node->len++;
	kvd_tree_at(ix, tree)->blocks++;
	add_to_tally(kvd_tree_at(ix, tree), 1);
	kvd_table_add(ix, id);
	ix->inserted++;
	*p_block = id;

	return KV_OK;
}

void kvd_index_make_private(kvd_index_t *ix, uint32_t id)
{
	kvd_node_t *node = kvd_node_of(ix, kvd_block_at(ix, id));

	kv_assert(node->parent == KVD_NONE && node->len == 1 && node->child_count == 0);
	node->flags |= KVD_NODE_PRIVATE;
	kvd_tree_at(ix, node->tree)->private_blocks++;
}

int kvd_index_is_removable(const kvd_index_t *ix, const kvd_block_t *block)
{
	const kvd_node_t *node = kvd_node_of(ix, block);

	return block->pos + 1u == node->len && node->child_count == 0 && block->pos >= node->n[KVD_CPU] &&
	       block->pos >= node->n[KVD_DISK] && node->slots[block->pos] == KV_SLOT_NONE &&
	       block->disk.slot == KV_SLOT_NONE && block->pins.head == KVD_NONE && block->refs == 0 &&
	       block->io == KVD_NONE;
}

void kvd_index_remove(kvd_index_t *ix, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(ix, id);
	kvd_node_t *node = kvd_node_of(ix, block);
	uint32_t node_id = block->node, parent = node->parent;
	kvd_tree_t *tree = kvd_tree_at(ix, node->tree);

	kv_assert(kvd_index_is_removable(ix, block));
	kvd_table_remove(ix, id);
	kvd_obj_pool_put(&ix->blocks, id);
	tree->blocks--;
	tree->private_blocks -= node->flags & KVD_NODE_PRIVATE ? 1 : 0;
	add_to_tally(tree, UINT64_MAX);
	node->len--;
	node->hit = node->hit < node->len ? node->hit : node->len;

	if (node->len == 0) {
		kv_assert(node->marks[KVD_CPU] == KVD_NONE && node->marks[KVD_DISK] == KVD_NONE);
		move_cursor(ix, node_id, kvd_index_next_run(ix, node_id));
		unlink_child(ix, node_id);
		destroy_node(ix, node_id);
		/* One branch is left: the run above takes it back. In a hidden tree and below a dead run all runs go
		 * anyway. */
		if (parent != KVD_NONE && kvd_node_at(ix, parent)->child_count == 1 && !tree->hidden &&
		    !kvd_node_is_dead(ix, parent)) {
			merge_node(ix, parent);
		}
	} else if (node->cap > 4 * RUN_MIN && node->len < node->cap / 4) {
		(void)resize_run(ix, node, node->cap / 2); /* without memory the run keeps its larger arrays */
	}
}

uint32_t kvd_index_parent(const kvd_index_t *ix, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	const kvd_node_t *node = kvd_node_of(ix, block);

	if (block->pos > 0) {
		return node->ids[block->pos - 1];
	}
	if (node->parent == KVD_NONE) {
		return KVD_NONE;
	}
	node = kvd_node_at(ix, node->parent);

	return node->ids[node->len - 1];
}

uint32_t kvd_index_ancestor(const kvd_index_t *ix, uint32_t id, uint32_t depth)
{
	const kvd_node_t *node = kvd_node_of(ix, kvd_block_at(ix, id));

	while (depth <= node->depth0) {
		node = kvd_node_at(ix, node->parent);
		kv_metric_add(ix->metrics, KV_M_INDEX_STEPS, 1);
	}

	return node->ids[depth - node->depth0 - 1];
}

void kvd_index_copy_path(const kvd_index_t *ix, uint32_t id, uint32_t skip, uint32_t *ids, uint32_t *slots)
{
	const kvd_node_t *node = kvd_node_of(ix, kvd_block_at(ix, id));
	uint32_t n = kvd_depth_of(ix, kvd_block_at(ix, id));

	for (;;) { /* one copy a run */
		uint32_t first = node->depth0 > skip ? node->depth0 : skip;

		if (ids) {
			memcpy(ids + (first - skip), node->ids + (first - node->depth0), (n - first) * sizeof *ids);
		}
		if (slots) {
			memcpy(slots + (first - skip), node->slots + (first - node->depth0),
			       (n - first) * sizeof *slots);
		}
		if (node->depth0 <= skip) {
			return;
		}
		n = node->depth0;
		node = kvd_node_at(ix, node->parent);
		kv_metric_add(ix->metrics, KV_M_INDEX_STEPS, 1);
	}
}

uint32_t kvd_index_depth_in(const kvd_index_t *ix, uint32_t id, kvd_set_t t)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	const kvd_node_t *node = kvd_node_of(ix, block);
	uint32_t upto = block->pos + 1u;

	/* A run without a block in the set: the deepest one is further up, if there is any. */
	while (node->n[t] == 0) {
		if (node->parent == KVD_NONE || kvd_tree_at(ix, node->tree)->in[t] == 0) {
			return 0;
		}
		node = kvd_node_at(ix, node->parent);
		upto = node->len;
		kv_metric_add(ix->metrics, KV_M_INDEX_STEPS, 1);
	}

	return node->depth0 + (node->n[t] < upto ? node->n[t] : upto);
}

void kvd_index_mark_hit(kvd_index_t *ix, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	kvd_node_t *node = kvd_node_of(ix, block);
	uint32_t upto = block->pos + 1u;

	/* What is marked has marked the path above it already: the walk ends there. */
	while (node->hit < upto) {
		node->hit = upto;
		if (node->parent == KVD_NONE) {
			return;
		}
		node = kvd_node_at(ix, node->parent);
		upto = node->len;
	}
}

/* ---- pins ------------------------------------------------------------------------------------ */

uint32_t kvd_index_depth_pinned(const kvd_index_t *ix, uint32_t id, kvd_pin_class_t pins)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	const kvd_node_t *node = kvd_node_of(ix, block);
	uint32_t upto = block->pos + 1u;

	while (node->pinned[pins].blocks == 0) {
		if (node->parent == KVD_NONE) {
			return 0;
		}
		node = kvd_node_at(ix, node->parent);
		upto = node->len;
	}

	return node->depth0 + (node->pinned[pins].blocks < upto ? node->pinned[pins].blocks : upto);
}

uint32_t kvd_index_pin_path(kvd_index_t *ix, uint32_t id, kvd_pin_class_t pins)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	kvd_node_t *node = kvd_node_of(ix, block);
	uint32_t upto = block->pos + 1u, fresh = 0;

	node->pinned[pins].ends++;
	for (;;) {
		uint32_t before = node->pinned[pins].blocks;

		if (before < upto) {
			node->pinned[pins].blocks = upto;
			fresh += upto - before;
		}
		/* A run with pinned blocks has pinned the path above it already: the walk ends at the first such run.
		 */
		if (before > 0 || node->parent == KVD_NONE) {
			return fresh;
		}
		node = kvd_node_at(ix, node->parent);
		node->pinned[pins].children++;
		upto = node->len;
	}
}

/* How much of the run its own pins and its children keep pinned. Each block that is released is visited once. */
static uint32_t count_still_pinned(const kvd_index_t *ix, const kvd_node_t *node, kvd_pin_class_t pins)
{
	uint32_t pinned = node->pinned[pins].ends > 0 ? node->pinned[pins].blocks : 0;

	/* A pin below keeps the whole run. */
	if (node->pinned[pins].children > 0) {
		return node->len;
	}
	while (pinned > 0 && !kvd_index_has_pin(kvd_block_at(ix, node->ids[pinned - 1]), pins)) {
		pinned--;
	}

	return pinned;
}

uint32_t kvd_index_unpin_path(kvd_index_t *ix, uint32_t id, kvd_pin_class_t pins)
{
	kvd_node_t *node = kvd_node_of(ix, kvd_block_at(ix, id));
	uint32_t freed = 0;

	node->pinned[pins].ends--;
	for (;;) {
		uint32_t pinned = count_still_pinned(ix, node, pins);

		freed += node->pinned[pins].blocks - pinned;
		node->pinned[pins].blocks = pinned;
		/* What is still pinned here keeps the runs above pinned. */
		if (pinned > 0 || node->parent == KVD_NONE) {
			return freed;
		}
		node = kvd_node_at(ix, node->parent);
		node->pinned[pins].children--;
	}
}

/* ---- sets ------------------------------------------------------------------------------------ */

int kvd_index_can_join(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t)
{
	const kvd_node_t *node = kvd_node_of(ix, block);
	const kvd_node_t *above;

	/* The set is a prefix of the run, so only the next block may join; the first one needs all of the run above. */
	if (block->pos != node->n[t] || kvd_tree_at(ix, node->tree)->hidden || kvd_index_is_dead(ix, block)) {
		return 0;
	}
	if (block->pos > 0 || node->parent == KVD_NONE) {
		return 1;
	}
	above = kvd_node_at(ix, node->parent);

	return above->n[t] == above->len;
}

void kvd_index_join(kvd_index_t *ix, uint32_t id, kvd_set_t t)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	kvd_node_t *node = kvd_node_of(ix, block);

	kv_assert(kvd_index_can_join(ix, block, t));
	node->n[t]++;
	kvd_tree_at(ix, node->tree)->in[t]++;
	if (block->pos == 0 && node->parent != KVD_NONE) {
		kvd_node_at(ix, node->parent)->children_in[t]++;
	}
}

int kvd_index_is_leaf(const kvd_index_t *ix, const kvd_block_t *block, kvd_set_t t)
{
	const kvd_node_t *node = kvd_node_of(ix, block);

	return block->pos + 1u == node->n[t] && (node->n[t] < node->len || node->children_in[t] == 0);
}

void kvd_index_leave(kvd_index_t *ix, uint32_t id, kvd_set_t t)
{
	const kvd_block_t *block = kvd_block_at(ix, id);
	kvd_node_t *node = kvd_node_of(ix, block);

	kv_assert(kvd_index_is_leaf(ix, block, t));
	node->n[t]--;
	kvd_tree_at(ix, node->tree)->in[t]--;
	/* quarantine.c has taken a dead top off this count already. */
	if (block->pos == 0 && node->parent != KVD_NONE && !(node->flags & KVD_NODE_DEAD)) {
		kvd_node_at(ix, node->parent)->children_in[t]--;
	}
}
