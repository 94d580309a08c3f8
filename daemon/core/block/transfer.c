#include "core/block/transfer.h"
#include "core/base/core_impl.h"

kv_status_t kvd_io_create(kvd_core_t *core, uint32_t block, kvd_io_done_fn done, kvd_io_t **p_io)
{
	uint32_t id;
	kv_status_t status = kvd_obj_pool_get(&core->ios, &id);

	if (status != KV_OK) {
		return status;
	}
	*p_io = kvd_io_at(core, id);
	**p_io = (kvd_io_t){
		.core = core,
		.self = id,
		.done = done,
		.block = block,
		.parent = KVD_NONE,
		.waiters = KVD_LIST_EMPTY,
		.cpu.slot = KV_SLOT_NONE,
		.disk.slot = KV_SLOT_NONE,
	};

	return KV_OK;
}

void kvd_io_destroy(kvd_core_t *core, kvd_io_t *io)
{
	kvd_obj_pool_put(&core->ios, io->self);
}

/* Its block went away while it was in flight. The device wrote into the slots until now, so only now are they free
 * (decision 034). */
static void complete_detached_io(kvd_core_t *core, const kvd_io_t *io)
{
	kvs_free(core->tier[KVD_CPU], io->cpu);
	kvs_free(core->tier[KVD_DISK], io->disk);
}

static void complete_io(kvd_io_t *io, kv_status_t status, uint32_t *p_in_flight)
{
	kvd_core_t *core = io->core;

	if (kvd_callback_enter(core)) {
		return;
	}
	*p_in_flight -= 1;
	if (io->done) {
		io->done(core, io, status);
	} else {
		complete_detached_io(core, io);
	}
	kvd_io_destroy(core, io);
}

/* ---- reads ----------------------------------------------------------------------------------- */

void kvd_io_queue_read(kvd_core_t *core, kvd_io_t *io)
{
	io->queued = 1;
	kvd_list_push(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);
}

static void unqueue_read(kvd_core_t *core, kvd_io_t *io)
{
	io->queued = 0;
	kvd_list_remove(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);
}

void kvd_io_cancel_read(kvd_core_t *core, kvd_io_t *io)
{
	unqueue_read(core, io);
	kvd_io_destroy(core, io);
}

static void read_done(void *arg, kv_status_t status)
{
	kvd_io_t *io = arg;

	complete_io(io, status, &io->core->reads);
}

/* Give the oldest queued read to the device. KV_ERR_BUSY: the device's queue is full, or the slot's memory is still on
 * its way: the read stays at the head of ours. */
static kv_status_t submit_read(kvd_core_t *core)
{
	kvd_io_t *io = kvd_io_at(core, core->fills.head);
	kvs_mem_t mem;
	kv_status_t status;

	unqueue_read(core, io);
	core->reads++;
	core->outstanding++;
	status = kvs_mem(core->tier[KVD_CPU], io->cpu, &mem);
	core->memory_waits = status == KV_ERR_BUSY;
	if (status == KV_OK) {
		status = kvs_load(core->tier[KVD_DISK], io->disk, &mem, read_done, io);
	}
	/* Another read in flight will end, and the next tick tries again. Without one nothing would come: this read
	 * fails. */
	if (status == KV_ERR_BUSY && (core->reads > 1 || core->memory_waits)) {
		core->reads--;
		core->outstanding--;
		io->queued = 1;
		kvd_list_push_front(&core->fills, &core->ios, offsetof(kvd_io_t, queue), io->self);
		return status;
	}
	if (status != KV_OK) {
		read_done(io, status);
	}

	return KV_OK;
}

void kvd_io_submit_reads(kvd_core_t *core)
{
	core->memory_waits = 0;
	while (core->fills.head != KVD_NONE && core->reads < core->config.read_depth) {
		if (submit_read(core) != KV_OK) {
			break;
		}
	}
}

/* ---- writes ---------------------------------------------------------------------------------- */

static void write_done(void *arg, kv_status_t status)
{
	kvd_io_t *io = arg;

	complete_io(io, status, &io->core->writes);
}

kv_status_t kvd_io_submit_write(kvd_core_t *core, kvd_io_t *io)
{
	kvs_mem_t mem;
	kv_status_t status;

	core->writes++;
	core->outstanding++;
	status = kvs_mem(core->tier[KVD_CPU], io->cpu, &mem);
	if (status == KV_OK) {
		status = kvs_store(core->tier[KVD_DISK], io->disk, &mem, write_done, io);
	}
	if (status != KV_OK) {
		core->writes--;
		core->outstanding--;
		kvs_free(core->tier[KVD_DISK], io->disk);
	}

	return status;
}
