/* Eager, parent first: which block goes to disk next, and when the device syncs. It syncs when an acknowledgement waits
 * for that; the tier commits everything else in its own time. */
#include "core/block/block.h"
#include "core/block/quarantine.h"
#include "core/block/room.h"
#include "core/block/transfer.h"
#include "core/block/write_behind.h"
#include "core/base/core_impl.h"
#include "core/block/slot_class.h"

#define FLUSH_RETRY_NS    UINT64_C(1000000000)
#define WRITE_WAIT_MIN_NS UINT64_C(100000000)
#define WRITE_WAIT_MAX_NS UINT64_C(60000000000)

/* ---- a write --------------------------------------------------------------------------------- */

int kvd_write_behind_paused(const kvd_core_t *core)
{
	return core->now_ns < core->write_after_ns;
}

/* A write has failed: what is queued stays queued, and is tried again after a while that grows from failure to failure.
 */
static void pause_writes(kvd_core_t *core)
{
	uint32_t head = core->ix.queue.head;
	uint64_t wait = 2 * core->write_wait_ns;

	if (head != KVD_NONE) { /* other runs go first next time */
		kvd_queue_remove(&core->ix, head);
		kvd_queue_push(&core->ix, head);
	}
	core->durable_changed |= KVD_DURABLE_DROPPED;
	if (!kvd_write_behind_paused(core)) {
		wait = wait < WRITE_WAIT_MIN_NS ? WRITE_WAIT_MIN_NS : wait;
		core->write_wait_ns = wait > WRITE_WAIT_MAX_NS ? WRITE_WAIT_MAX_NS : wait;
		core->write_after_ns = core->now_ns + core->write_wait_ns;
	}
}

void kvd_note_store(kvd_core_t *core)
{
	core->stores++;
	core->durable_changed |= KVD_DURABLE_STORED;
	if (core->flush_due_ns == 0) {
		core->flush_due_ns = core->now_ns;
	}
}

/* Is the block above being written, so that this one can wait for it on disk? */
static int is_parent_being_written(kvd_core_t *core, uint32_t id)
{
	uint32_t parent = kvd_index_parent(&core->ix, id);
	const kvd_block_t *above = parent == KVD_NONE ? NULL : kvd_block_at(&core->ix, parent);

	return above && (above->io != KVD_NONE || (above->flags & KVD_DISK_UNLINKED));
}

static void accept_write(kvd_core_t *core, kvd_io_t *io, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	block->disk = io->disk;
	kvd_count(core, KV_M_WRITE_BEHIND, 1);
	kvd_note_store(core);
	core->write_wait_ns = 0;
	/* Writes end in any order, and the disk set is prefix-closed. A copy whose parent is still being written waits
	 * for it (DISK_UNLINKED). A copy whose parent is not coming is of no use: it is dropped, and the run queued. */
	if (kvd_index_can_join(&core->ix, block, KVD_DISK)) {
		kvd_block_join(core, id, KVD_DISK, io->stamp, NULL);
	} else if (is_parent_being_written(core, id)) {
		block->flags |= KVD_DISK_UNLINKED;
		core->disk_unlinked++;
	} else {
		kvs_free(core->tier[KVD_DISK], block->disk);
		block->disk.slot = KV_SLOT_NONE;
		kvd_block_requeue_below(core, id);
		kvd_block_queue_write(core, id);
		kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
	}
}

static void handle_failed_write(kvd_core_t *core, kvd_io_t *io, uint32_t id, kv_status_t status)
{
	kvs_free(core->tier[KVD_DISK], io->disk);
	kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
	kvd_block_requeue_below(core, id);
	core->durable_changed |= KVD_DURABLE_DROPPED;
	/* A client overwrote the block's memory, or punched a hole into it. */
	if (status == KV_ERR_FAULT || status == KV_ERR_CORRUPT) {
		kv_logf(core->env, KV_LOG_WARN, "core", "a block in memory is damaged and was removed, status %s",
			kv_status_name(status));
		kvd_count(core, KV_M_BAD_BLOCKS, 1);
		kvd_quarantine_subtree(core, id);
		return;
	}
	kvd_block_queue_write(core, id);
	pause_writes(core);
}

static void finish_write(kvd_core_t *core, kvd_io_t *io, kv_status_t status)
{
	uint32_t id = io->block;

	kvd_block_at(&core->ix, id)->io = KVD_NONE;
	if (status == KV_OK) {
		accept_write(core, io, id);
	} else {
		handle_failed_write(core, io, id, status);
	}
	if (io->parent != KVD_NONE) {
		kvd_block_unref(core, io->parent);
	}
	kvd_block_restore_marks(core, id);
}

/* Begin to write a CPU block to disk. KV_ERR_BUSY: no room there. */
static kv_status_t start_write(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t slot_class = kvd_class_of(&core->ix, block), parent = kvd_index_parent(&core->ix, id);
	kvs_meta_t meta;
	kvd_io_t *io;
	kv_status_t status = kvd_io_create(core, id, finish_write, &io);

	if (status != KV_OK) {
		return status;
	}
	kvd_block_get_meta(core, id, &meta);
	io->cpu = kvd_cpu_loc(&core->ix, block);
	io->stamp = core->stamp;
	io->parent = parent;
	block->io = io->self;
	if (parent != KVD_NONE) { /* room for the child is not made by dropping its parent */
		kvd_block_ref(core, parent);
	}
	status = kvd_slot_alloc(core, slot_class, KVD_DISK, &(kvd_use_t){KVS_FILLING, 0, &meta}, &io->disk);
	if (status == KV_OK) {
		status = kvd_io_submit_write(core, io);
	}
	if (status != KV_OK) {
		block->io = KVD_NONE;
		if (parent != KVD_NONE) {
			kvd_block_unref(core, parent);
		}
		kvd_block_restore_marks(core, id);
		kvd_io_destroy(core, io);
	}

	return status;
}

/* ---- the queue ------------------------------------------------------------------------------- */

/* The run's first block that is in the CPU set, not on disk and not on its way there; KVD_NONE: none. Blocks in flight
 * or DISK_UNLINKED lie right behind the disk set, so this visits few. */
static uint32_t first_unwritten(const kvd_core_t *core, const kvd_node_t *node)
{
	for (uint32_t pos = node->n[KVD_DISK]; pos < node->n[KVD_CPU]; pos++) {
		const kvd_block_t *block = kvd_block_at(&core->ix, node->ids[pos]);

		if (block->disk.slot == KV_SLOT_NONE && block->io == KVD_NONE) {
			return node->ids[pos];
		}
	}

	return KVD_NONE;
}

static int is_written(const kvd_core_t *core, uint32_t node_id)
{
	const kvd_node_t *node = kvd_node_at(&core->ix, node_id);

	return node->n[KVD_DISK] == node->len;
}

/* The topmost block on the way to the queue's first run that has to be written; KVD_NONE: nothing on this path. */
static uint32_t pick_block(const kvd_core_t *core, uint32_t node_id)
{
	uint32_t best = KVD_NONE;

	/* Parents first: a block joins the disk set below its parent only. Above a run that is written all are. */
	while (node_id != KVD_NONE) {
		const kvd_node_t *node = kvd_node_at(&core->ix, node_id);
		uint32_t found = first_unwritten(core, node);

		if (is_written(core, node_id)) {
			break;
		}
		best = found != KVD_NONE ? found : best;
		node_id = node->parent;
	}

	return best;
}

/* Is the run queued, or one of its blocks being written? */
static int is_being_written(const kvd_core_t *core, const kvd_node_t *node)
{
	if ((node->flags & KVD_NODE_QUEUED) && !kvd_write_behind_paused(core)) {
		return 1;
	}
	for (uint32_t pos = node->n[KVD_DISK]; pos < node->n[KVD_CPU]; pos++) {
		const kvd_block_t *on_way = kvd_block_at(&core->ix, node->ids[pos]);

		if (on_way->io != KVD_NONE) {
			return 1;
		}
		if (!(on_way->flags & KVD_DISK_UNLINKED)) {
			break;
		}
	}

	return 0;
}

void kvd_write_behind_run(kvd_core_t *core)
{
	if (kvd_write_behind_paused(core)) {
		return;
	}
	for (uint32_t tries = 0;
	     core->ix.queue.head != KVD_NONE && core->writes < core->config.write_behind_depth && tries < 256;
	     tries++) {
		uint32_t head = core->ix.queue.head, block = pick_block(core, head);
		kv_status_t status;

		if (block == KVD_NONE || kvd_tree_at(&core->ix, kvd_node_at(&core->ix, head)->tree)->hidden) {
			kvd_queue_remove(&core->ix, head);
			core->durable_changed |=
				is_written(core, head) || is_being_written(core, kvd_node_at(&core->ix, head))
					? KVD_DURABLE_STORED
					: KVD_DURABLE_DROPPED;
			continue;
		}
		status = start_write(core, block);
		if (status == KV_OK) {
			continue;
		}
		if (status != KV_ERR_BUSY) {
			pause_writes(core);
			break;
		}
		if (core->writes > 0) {
			break; /* wait for what is in flight */
		}
		kvd_queue_remove(&core->ix, head);
		if (kvd_class_expects_slots(core, kvd_class_of(&core->ix, kvd_block_at(&core->ix, block)), KVD_DISK)) {
			kvd_queue_push(&core->ix, head); /* a file is being emptied for it: others first */
			break;
		}
		/* Not admitted: the next block put here asks again. */
		kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
		core->durable_changed |= KVD_DURABLE_DROPPED;
	}
}

/* Runs keep the answer until the next look at the acknowledgements, so each is visited once, whatever the number of
 * acknowledgements owed below it (decision 026). */
int kvd_write_is_expected(kvd_core_t *core, uint32_t id)
{
	const uint64_t yes = core->durable_question, no = yes - 1;
	uint32_t first = kvd_block_at(&core->ix, id)->node, n = first;
	int expected = 0;

	while (n != KVD_NONE && !is_written(core, n) && kvd_node_at(&core->ix, n)->answer != no && !expected) {
		kvd_node_t *node = kvd_node_at(&core->ix, n);

		expected = node->answer == yes || is_being_written(core, node);
		n = node->parent;
		kvd_count(core, KV_M_INDEX_STEPS, 1);
	}
	for (; first != n; first = kvd_node_at(&core->ix, first)->parent) {
		kvd_node_at(&core->ix, first)->answer = expected ? yes : no;
	}

	return expected;
}

/* ---- sync ------------------------------------------------------------------------------------ */

static void finish_flush(void *arg, kv_status_t status)
{
	kvd_core_t *core = arg;

	if (kvd_callback_enter(core)) {
		return;
	}
	core->flush_busy = 0;
	core->flush_status = status;
	core->durable_changed |= KVD_DURABLE_STORED;
	if (status == KV_OK) {
		core->flushed = core->flushing;
	} else {
		kv_logf(core->env, KV_LOG_ERROR, "core", "the disk tier could not be flushed, status %s",
			kv_status_name(status));
		core->flush_due_ns = core->now_ns + FLUSH_RETRY_NS;
	}
}

void kvd_flush_run(kvd_core_t *core)
{
	kv_status_t status;

	/* Only when a put waits for it: a sync costs the device more than a write. */
	if (core->flush_busy || core->flush_due_ns == 0 || core->flush_due_ns > core->now_ns ||
	    core->durable_owed == 0) {
		return;
	}
	core->flush_busy = 1;
	core->outstanding++;
	/* Blocks stored while the flush runs need the next one. */
	core->flushing = core->stores;
	core->flush_due_ns = 0;
	status = kvs_flush(core->tier[KVD_DISK], finish_flush, core);
	if (status == KV_ERR_BUSY) { /* the next tick tries again */
		core->outstanding--;
		core->flush_busy = 0;
		core->flush_due_ns = core->now_ns;
	} else if (status != KV_OK) {
		finish_flush(core, status);
	}
}
