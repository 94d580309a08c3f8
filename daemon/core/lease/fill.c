/* The part of a lease that is only on disk: slots, references and reads. */
#include "core/block/block.h"
#include "core/block/quarantine.h"
#include "core/block/room.h"
#include "core/block/transfer.h"
#include "core/base/core_impl.h"
#include "core/lease/lease.h"
#include "core/lease/lease_impl.h"

/* Notify the leases that wait for this block, one after the other; each takes itself off the list. */
static void notify_waiters(kvd_core_t *core, kvd_io_t *io, uint32_t depth, kv_status_t status)
{
	while (io->waiters.head != KVD_NONE) {
		kvd_lease_t *lease = kvd_obj_at(&core->leases, io->waiters.head);

		if (status == KV_OK) {
			kvd_lease_advance(core, lease);
		} else {
			kvd_lease_cut_before(core, lease, depth, status);
		}
	}
}

static void handle_failed_fill(kvd_core_t *core, kvd_io_t *io, uint32_t id, kv_status_t status)
{
	uint32_t depth = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id));

	kvd_block_free_cpu_slot(core, id);
	notify_waiters(core, io, depth, status);
	/* A block that the device cannot read now (KV_ERR_IO) is not gone. */
	if (status == KV_ERR_CORRUPT || status == KV_MISS) {
		kv_logf(core->env, KV_LOG_WARN, "core",
			"a block on disk is damaged and was removed, status %s depth %u", kv_status_name(status),
			depth);
		kvd_count(core, KV_M_BAD_BLOCKS, 1);
		kvd_quarantine_subtree(core, id);
	}
}

static void accept_fill(kvd_core_t *core, kvd_io_t *io, uint32_t id)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	kvd_count(core, KV_M_PROMOTED, 1);
	/* Reads end in any order. A block whose parent is not in the CPU set serves the leases that reference it
	 * (TRANSIT) and joins when its parent does. */
	if (kvd_index_can_join(&core->ix, block, KVD_CPU)) {
		kvd_block_join(core, id, KVD_CPU, io->stamp, NULL);
	} else if (block->refs == 0) {
		kvd_block_free_cpu_slot(core, id);
	} else {
		block->flags |= KVD_TRANSIT;
		core->transit++;
		(void)kvs_set_state(core->tier[KVD_CPU], io->cpu, KVS_TRANSIT);
	}
	notify_waiters(core, io, 0, KV_OK);
}

static void finish_fill(kvd_core_t *core, kvd_io_t *io, kv_status_t status)
{
	uint32_t id = io->block;
	kvd_block_t *block = kvd_block_at(&core->ix, id);

	block->io = KVD_NONE;
	block->flags &= (uint8_t)~KVD_FILLING;
	if (status == KV_OK) {
		accept_fill(core, io, id);
	} else {
		handle_failed_fill(core, io, id, status);
	}
	kvd_block_restore_marks(core, id);
}

/* Begin to read a disk block into a CPU slot: takes the slot now (KV_ERR_BUSY when there is none), reads as read_depth
 * allows. */
static kv_status_t start_fill(kvd_core_t *core, uint32_t id, const kvd_lease_t *lease)
{
	kvd_block_t *block = kvd_block_at(&core->ix, id);
	uint32_t slot_class = kvd_class_of(&core->ix, block);
	kvs_meta_t meta;
	kvd_io_t *io;
	kv_status_t status = kvs_readable(core->tier[KVD_DISK], block->disk);

	if (status == KV_OK) {
		status = kvd_io_create(core, id, finish_fill, &io);
	}
	if (status != KV_OK) {
		return status;
	}
	kvd_block_get_meta(core, id, &meta);
	status = kvd_slot_alloc(core, slot_class, KVD_CPU, &(kvd_use_t){KVS_FILLING, lease->id, &meta}, &io->cpu);
	if (status != KV_OK) {
		kvd_io_destroy(core, io);
		return status;
	}

	io->disk = block->disk;
	io->stamp = lease->stamp;
	*kvd_slot_of(&core->ix, block) = io->cpu.slot;
	block->cpu_gen = io->cpu.gen;
	block->flags |= KVD_FILLING;
	block->io = io->self;
	kvd_io_queue_read(core, io);

	return KV_OK;
}

void kvd_lease_start_fills(kvd_core_t *core, kvd_lease_t *lease, uint32_t cpu_depth)
{
	uint32_t from = cpu_depth > lease->skip ? cpu_depth : lease->skip;
	uint32_t deepest = kvd_lease_deepest(core, lease);
	uint32_t ref_from = cpu_depth > lease->skip ? cpu_depth - 1 : lease->skip;
	uint32_t depth, *path = kv_alloc(core->env, (lease->n - ref_from) * sizeof *path);

	if (!path) {
		kvd_lease_shorten(core, lease, from);
		return;
	}
	/* Referenced blocks keep their ids: the path is collected once, and no later step walks it again (decision
	 * 026). */
	kvd_index_copy_path(&core->ix, deepest, ref_from, path, NULL);
	lease->path = path;
	/* References first: room must not be made by evicting blocks of this lease. The block above the first fill is
	 * referenced too. */
	lease->ref_from = ref_from;
	for (depth = lease->ref_from + 1; depth <= lease->n; depth++) {
		kvd_block_ref(core, kvd_lease_block(core, lease, depth));
	}
	for (depth = from + 1; depth <= lease->n; depth++) {
		uint32_t id = kvd_lease_block(core, lease, depth);
		const kvd_block_t *block = kvd_block_at(&core->ix, id);

		if (*kvd_slot_of(&core->ix, block) == KV_SLOT_NONE && start_fill(core, id, lease) != KV_OK) {
			kvd_lease_shorten(core, lease, depth - 1);
		}
	}
}

kv_status_t kvd_lease_start_all_fills(kvd_core_t *core, kvd_lease_t *lease, uint32_t *p_on_disk)
{
	lease->ref_from = lease->skip;
	lease->ready = lease->skip;
	for (uint32_t depth = lease->skip + 1; depth <= lease->n; depth++) {
		kvd_block_ref(core, kvd_lease_block(core, lease, depth));
	}
	for (uint32_t depth = lease->skip + 1; depth <= lease->n; depth++) {
		uint32_t id = kvd_lease_block(core, lease, depth);
		const kvd_block_t *block = kvd_block_at(&core->ix, id);

		*p_on_disk += kvd_in_set(&core->ix, block, KVD_CPU) ? 0 : 1;
		if (*kvd_slot_of(&core->ix, block) == KV_SLOT_NONE) {
			kv_status_t status = start_fill(core, id, lease);

			if (status != KV_OK) {
				return status;
			}
		}
	}
	kvd_lease_count_ready(core, lease);

	return KV_OK;
}
