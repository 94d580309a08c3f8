#include "core/core_impl.h"

kvd_io_t *kvd_io_at(kvd_core_t *core, uint32_t id)
{
	return kvd_pool_at(&core->ios, id);
}

static kv_status_t io_create(kvd_core_t *core, kvd_io_kind_t kind, uint32_t block, kvd_io_t **p_io)
{
	uint32_t id;
	kv_status_t status = kvd_pool_get(&core->ios, &id);

	if (status != KV_OK) {
		return status;
	}
	*p_io = kvd_io_at(core, id);
	**p_io = (kvd_io_t){
		.core = core,
		.self = id,
		.kind = kind,
		.state = KVD_IO_QUEUED,
		.block = block,
		.held = KVD_NONE,
		.waiters = KVD_LIST_EMPTY,
		.cpu.slot = KV_SLOT_NONE,
		.disk.slot = KV_SLOT_NONE,
	};

	return KV_OK;
}

static void io_destroy(kvd_core_t *core, kvd_io_t *io)
{
	kvd_pool_put(&core->ios, io->self);
}

/* Its block went away while it was in flight: both slots are its own to give back. */
static void orphan_end(kvd_core_t *core, kvd_io_t *io)
{
	kvs_free(core->tier[KVD_CPU], io->cpu);
	kvs_free(core->tier[KVD_DISK], io->disk);
	io_destroy(core, io);
}

/* ---- fills ----------------------------------------------------------------------------------- */

kv_status_t kvd_fill_start(kvd_core_t *core, uint32_t id, uint64_t lease, uint64_t stamp)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t slot_class = kvd_tree_of(&core->ix, block)->slot_class;
	kvs_meta_t meta;
	kvd_io_t *io;
	kv_status_t status = kvs_readable(core->tier[KVD_DISK], block->disk);

	if (status == KV_OK) {
		status = io_create(core, KVD_IO_FILL, id, &io);
	}
	if (status != KV_OK) {
		return status;
	}
	kvd_block_meta(core, id, &meta);
	status = kvd_slot_alloc(core, slot_class, KVD_CPU, &(kvd_use_t){KVS_FILLING, lease, &meta}, &io->cpu);
	if (status != KV_OK) {
		io_destroy(core, io);
		return status;
	}

	io->disk = block->disk;
	io->stamp = stamp;
	*kvd_slot_of(&core->ix, block) = io->cpu.slot;
	block->cpu_gen = io->cpu.gen;
	block->flags |= KVD_FILLING;
	block->io = io->self;
	kvd_list_push(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);

	return KV_OK;
}

/* Tell the leases that wait for this very block, one after the other; each takes itself off the list. */
static void fill_tell(kvd_core_t *core, kvd_io_t *io, uint32_t depth, kv_status_t status)
{
	while (io->waiters.head != KVD_NONE) {
		kvd_lease_t *lease = kvd_pool_at(&core->leases, io->waiters.head);

		if (status == KV_OK) {
			kvd_lease_advance(core, lease);
		} else {
			kvd_lease_cut(core, lease, depth, status);
		}
	}
}

static void fill_failed(kvd_core_t *core, kvd_io_t *io, uint32_t id, kv_status_t status)
{
	uint32_t depth = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id));

	kvd_block_drop_slot(core, id);
	fill_tell(core, io, depth, status);
	if (status == KV_ERR_CORRUPT || status == KV_MISS) { /* what the device cannot read just now is not gone */
		kv_logf(core->env, KV_LOG_WARN, "core",
			"a block on disk is damaged and is taken out, status %s depth %u", kv_status_name(status),
			depth);
		kvd_count(core, KV_M_BAD_BLOCKS, 1);
		kvd_quarantine(core, id);
	}
}

static void fill_ok(kvd_core_t *core, kvd_io_t *io, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	kvd_count(core, KV_M_PROMOTED, 1);
	if (kvd_index_can_join(&core->ix, block, KVD_CPU)) {
		kvd_block_join(core, id, KVD_CPU, io->stamp, NULL);
	} else if (block->holds == 0) {
		kvd_block_drop_slot(core, id);
	} else {
		block->flags |= KVD_TRANSIT;
		core->transit++;
		(void)kvs_set_state(core->tier[KVD_CPU], io->cpu, KVS_TRANSIT);
	}
	fill_tell(core, io, 0, KV_OK);
}

static void fill_done(void *arg, kv_status_t status)
{
	kvd_io_t *io = arg;
	kvd_core_t *core = io->core;
	uint32_t id = io->block;
	kvd_block_t *block;

	if (kvd_transfer_ended(core)) {
		return;
	}
	core->reads--;
	if (id == KVD_NONE) {
		orphan_end(core, io);
		return;
	}
	block = kvd_block_at(&core->ix, id);
	block->io = KVD_NONE;
	block->flags &= (uint8_t)~KVD_FILLING;
	if (status == KV_OK) {
		fill_ok(core, io, id);
	} else {
		fill_failed(core, io, id, status);
	}
	io_destroy(core, io);
	kvd_block_unpinned(core, id);
}

/* Give the oldest queued fill to the device. KV_ERR_BUSY: its queue is full, the fill stays where it is. */
static kv_status_t fill_submit(kvd_core_t *core)
{
	kvd_io_t *io = kvd_io_at(core, core->fills.head);
	kvs_mem_t mem;
	kv_status_t status;

	kvd_list_remove(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);
	io->state = KVD_IO_FLIGHT;
	core->reads++;
	core->outstanding++;
	status = kvs_mem(core->tier[KVD_CPU], io->cpu, &mem);
	if (status == KV_OK) {
		status = kvs_load(core->tier[KVD_DISK], io->disk, &mem, fill_done, io);
	}
	if (status == KV_ERR_BUSY && core->reads > 1) {
		core->reads--;
		core->outstanding--;
		io->state = KVD_IO_QUEUED;
		kvd_list_push_front(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);
		return status;
	}
	if (status != KV_OK) {
		fill_done(io, status);
	}

	return KV_OK;
}

int kvd_fills_run(kvd_core_t *core)
{
	int started = 0;

	while (core->fills.head != KVD_NONE && core->reads < core->config.read_depth) {
		if (fill_submit(core) != KV_OK) {
			break;
		}
		started = 1;
	}

	return started;
}

/* A queued one, which the device has not seen. */
static void fill_cancel(kvd_core_t *core, kvd_io_t *io)
{
	kvd_block_t *block = kvd_block_at(&core->ix, io->block);

	block->io = KVD_NONE;
	block->flags &= (uint8_t)~KVD_FILLING;
	kvd_block_drop_slot(core, io->block);
	kvd_list_remove(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);
	io_destroy(core, io);
}

void kvd_fill_unwanted(kvd_core_t *core, uint32_t id)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, id);

	if (block->flags & KVD_FILLING) {
		kvd_io_t *io = kvd_io_at(core, block->io);

		if (io->state == KVD_IO_QUEUED && io->waiters.head == KVD_NONE) {
			fill_cancel(core, io);
			kvd_block_unpinned(core, id);
		}
	}
}

void kvd_io_orphan(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	kvd_io_t *io;

	if (block->io == KVD_NONE) {
		return;
	}
	io = kvd_io_at(core, block->io);
	if (io->state == KVD_IO_QUEUED) {
		fill_cancel(core, io);
		return;
	}
	if (io->held != KVD_NONE) {
		kvd_unhold(core, io->held);
		io->held = KVD_NONE;
	}
	io->block = KVD_NONE;
	block->io = KVD_NONE;
	block->flags &= (uint8_t)~KVD_FILLING;
	block->disk.slot = KV_SLOT_NONE;
	*kvd_slot_of(&core->ix, block) = KV_SLOT_NONE;
}

/* ---- writes ---------------------------------------------------------------------------------- */

static void stored(kvd_core_t *core)
{
	core->stores++;
	core->durable_look |= KVD_LOOK_STORED;
	if (core->flush_due_ns == 0) {
		core->flush_due_ns = core->now_ns;
	}
}

/* Is the block above on its way to disk, so that this one can wait for it there? */
static int parent_on_its_way(kvd_core_t *core, uint32_t id)
{
	uint32_t parent = kvd_index_parent(&core->ix, id);
	const kvd_block_t *above = parent == KVD_NONE ? NULL : kvd_block_at(&core->ix, parent);

	return above && (above->io != KVD_NONE || (above->flags & KVD_WRITTEN));
}

static void write_ok(kvd_core_t *core, kvd_io_t *io, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	block->disk = io->disk;
	kvd_count(core, KV_M_WRITE_BEHIND, 1);
	stored(core);
	core->write_wait_ns = 0;
	if (kvd_index_can_join(&core->ix, block, KVD_DISK)) {
		kvd_block_join(core, id, KVD_DISK, io->stamp, NULL);
	} else if (parent_on_its_way(core, id)) {
		block->flags |= KVD_WRITTEN;
		core->written++;
	} else {
		kvs_free(core->tier[KVD_DISK], block->disk);
		block->disk.slot = KV_SLOT_NONE;
		kvd_block_unwrite_below(core, id);
		kvd_write_behind(core, id);
		kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
	}
}

static void write_failed(kvd_core_t *core, kvd_io_t *io, uint32_t id, kv_status_t status)
{
	kvs_free(core->tier[KVD_DISK], io->disk);
	kvd_count(core, KV_M_WRITE_BEHIND_DROPPED, 1);
	kvd_block_unwrite_below(core, id);
	core->durable_look |= KVD_LOOK_DROPPED;
	if (status == KV_ERR_FAULT ||
	    status == KV_ERR_CORRUPT) { /* somebody scribbled on, or took away, the memory under the block */
		kv_logf(core->env, KV_LOG_WARN, "core", "a block in memory is damaged and is taken out, status %s",
			kv_status_name(status));
		kvd_count(core, KV_M_BAD_BLOCKS, 1);
		kvd_quarantine(core, id);
		return;
	}
	kvd_write_behind(core, id);
	kvd_writes_pause(core);
}

static void write_done(void *arg, kv_status_t status)
{
	kvd_io_t *io = arg;
	kvd_core_t *core = io->core;
	uint32_t id = io->block;

	if (kvd_transfer_ended(core)) {
		return;
	}
	core->writes--;
	if (id == KVD_NONE) {
		orphan_end(core, io);
		return;
	}
	kvd_block_at(&core->ix, id)->io = KVD_NONE;
	if (status == KV_OK) {
		write_ok(core, io, id);
	} else {
		write_failed(core, io, id, status);
	}
	if (io->held != KVD_NONE) {
		kvd_unhold(core, io->held);
	}
	kvd_block_unpinned(core, id);
	io_destroy(core, io);
}

/* Memory, disk slot and submission of one write; the caller undoes `io` when it fails. */
static kv_status_t write_submit(kvd_core_t *core, kvd_io_t *io, uint32_t slot_class, const kvs_meta_t *meta,
				kvs_done_fn done)
{
	kvs_mem_t mem;
	kv_status_t status =
		kvd_slot_alloc(core, slot_class, KVD_DISK, &(kvd_use_t){KVS_FILLING, io->put, meta}, &io->disk);

	if (status != KV_OK) {
		return status;
	}
	io->state = KVD_IO_FLIGHT;
	core->writes++;
	core->outstanding++;
	status = kvs_mem(core->tier[KVD_CPU], io->cpu, &mem);
	if (status == KV_OK) {
		status = kvs_store(core->tier[KVD_DISK], io->disk, &mem, done, io);
	}
	if (status != KV_OK) {
		core->writes--;
		core->outstanding--;
		kvs_free(core->tier[KVD_DISK], io->disk);
	}

	return status;
}

kv_status_t kvd_write_start(kvd_core_t *core, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t slot_class = kvd_tree_of(&core->ix, block)->slot_class, parent = kvd_index_parent(&core->ix, id);
	kvs_meta_t meta;
	kvd_io_t *io;
	kv_status_t status = io_create(core, KVD_IO_WRITE, id, &io);

	if (status != KV_OK) {
		return status;
	}
	kvd_block_meta(core, id, &meta);
	io->cpu = kvd_cpu_loc(&core->ix, block);
	io->stamp = core->stamp;
	io->held = parent;
	block->io = io->self;
	if (parent != KVD_NONE) { /* room for the child is not made by dropping its parent */
		kvd_hold(core, parent);
	}
	status = write_submit(core, io, slot_class, &meta, write_done);
	if (status != KV_OK) {
		block->io = KVD_NONE;
		if (parent != KVD_NONE) {
			kvd_unhold(core, parent);
		}
		kvd_block_unpinned(core, id);
		io_destroy(core, io);
	}

	return status;
}

static void through_done(void *arg, kv_status_t status)
{
	kvd_io_t *io = arg;
	kvd_core_t *core = io->core;
	kvd_io_t end = *io;

	if (kvd_transfer_ended(core)) {
		return;
	}
	core->writes--;
	io_destroy(core, io);
	if (status == KV_OK) {
		stored(core);
	} else {
		kvs_free(core->tier[KVD_DISK], end.disk);
	}
	kvd_put_written(core, end.put, end.index, status, end.cpu, end.disk);
}

kv_status_t kvd_through_start(kvd_core_t *core, uint32_t slot_class, const kvs_meta_t *meta, kvs_loc_t cpu,
			      uint64_t put, uint32_t index)
{
	kvd_io_t *io;
	kv_status_t status = io_create(core, KVD_IO_THROUGH, KVD_NONE, &io);

	if (status != KV_OK) {
		return status;
	}
	io->cpu = cpu;
	io->put = put;
	io->index = index;
	status = write_submit(core, io, slot_class, meta, through_done);
	if (status != KV_OK) {
		io_destroy(core, io);
	}

	return status;
}
