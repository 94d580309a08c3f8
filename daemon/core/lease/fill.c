/* The part of a lease that is only on disk: holds, fills, and what is ready. */
#include "core/core_impl.h"

uint32_t kvd_lease_block(kvd_core_t *core, const kvd_lease_t *lease, uint32_t depth)
{
	const kvd_claim_t *claim =
		kvd_pool_at(&core->claims, lease->alone ? lease->claims[depth - lease->skip - 1] : lease->claim);

	if (lease->path && depth > lease->hold_from) {
		return lease->path[depth - lease->hold_from - 1];
	}

	return lease->alone ? claim->block : kvd_index_ancestor(&core->ix, claim->block, depth);
}

void kvd_lease_unhold(kvd_core_t *core, kvd_lease_t *lease, uint32_t from)
{
	if (from < lease->hold_from) {
		from = lease->hold_from;
	}
	for (uint32_t depth = lease->n; depth > from; depth--) {
		kvd_unhold(core, kvd_lease_block(core, lease, depth));
	}
	if (from == lease->hold_from) {
		kv_free(core->env, lease->path);
		lease->path = NULL;
		lease->hold_from = lease->n;
	}
}

/* The lease ends at block n from now on. */
static void shorten(kvd_core_t *core, kvd_lease_t *lease, uint32_t n)
{
	kvd_lease_unhold(core, lease, n);
	if (n > 0) {
		kvd_claim_move(core, lease->claim, kvd_lease_block(core, lease, n));
	}
	lease->n = n;
	if (lease->hold_from > n) {
		lease->hold_from = n;
	}
}

void kvd_lease_reserve(kvd_core_t *core, kvd_lease_t *lease, uint32_t cpu_depth)
{
	uint32_t from = cpu_depth > lease->skip ? cpu_depth : lease->skip;
	uint32_t deepest = kvd_lease_block(core, lease, lease->n);
	uint32_t hold_from = cpu_depth > lease->skip ? cpu_depth - 1 : lease->skip;
	uint32_t depth, *path = kv_alloc(core->env, (lease->n - hold_from) * sizeof *path);

	if (!path) {
		shorten(core, lease, from);
		return;
	}
	/* Held blocks keep their ids: the path is collected once, and no later step walks it again (decision 026). */
	kvd_index_path(&core->ix, deepest, hold_from, path, NULL);
	lease->path = path;
	/* Hold first: making room must not take what this very lease needs. The block above the first fill is held with
	 * them. */
	lease->hold_from = hold_from;
	for (depth = lease->hold_from + 1; depth <= lease->n; depth++) {
		kvd_hold(core, kvd_lease_block(core, lease, depth));
	}
	for (depth = from + 1; depth <= lease->n; depth++) {
		uint32_t id = kvd_lease_block(core, lease, depth);
		const kvd_block_t *block = kvd_block_at(&core->ix, id);

		if (*kvd_slot_of(&core->ix, block) == KV_SLOT_NONE &&
		    kvd_fill_start(core, id, lease->id, lease->stamp) != KV_OK) {
			shorten(core, lease, depth - 1);
		}
	}
}

void kvd_lease_unwait(kvd_core_t *core, kvd_lease_t *lease)
{
	if (lease->wait_io != KVD_NONE) {
		kvd_list_remove(&kvd_io_at(core, lease->wait_io)->waiters, &core->leases, offsetof(kvd_lease_t, of_io),
				lease->self);
		lease->wait_io = KVD_NONE;
	}
}

static void wait_for(kvd_core_t *core, kvd_lease_t *lease, uint32_t io_id)
{
	lease->wait_io = io_id;
	kvd_list_push_front(&kvd_io_at(core, io_id)->waiters, &core->leases, offsetof(kvd_lease_t, of_io), lease->self);
}

/* Is the next block still where the lease has said it will be? Not when its fill failed and a later one took another
 * slot. */
static int in_place(const kvd_core_t *core, const kvd_lease_t *lease, const kvd_block_t *block)
{
	return kv_lease_slots(lease->header)[lease->ready - lease->skip] == *kvd_slot_of(&core->ix, block);
}

static void settle(kvd_core_t *core, kvd_lease_t *lease, int published)
{
	kvd_lease_unwait(core, lease);
	while (lease->ready < lease->n) {
		const kvd_block_t *block = kvd_block_at(&core->ix, kvd_lease_block(core, lease, lease->ready + 1));

		if (published && !in_place(core, lease, block)) {
			break;
		}
		if (!kvd_in_set(&core->ix, block, KVD_CPU) && !(block->flags & KVD_TRANSIT)) {
			if (block->flags & KVD_FILLING) {
				wait_for(core, lease, block->io);
			}
			break;
		}
		lease->ready++;
	}
}

void kvd_lease_settle(kvd_core_t *core, kvd_lease_t *lease)
{
	settle(core, lease, 0);
}

static void tell_done(kvd_core_t *core, const kvd_lease_t *lease, kv_status_t status)
{
	kv_msg_t msg = {.lease_done = {.lease = lease->id, .ready = lease->ready, .status = status}};

	kvd_notify(core, lease->member, KV_CODE_LEASE_DONE, &msg);
}

void kvd_lease_advance(kvd_core_t *core, kvd_lease_t *lease)
{
	settle(core, lease, 1);
	atomic_store_explicit(&lease->header->ready, lease->ready, memory_order_release);
	if (lease->ready == lease->n) {
		tell_done(core, lease, lease->why);
	} else if (lease->wait_io == KVD_NONE) {
		kvd_lease_cut(core, lease, lease->ready + 1,
			      KV_ERR_IO); /* its fill failed while we waited for an earlier one */
	}
}

void kvd_lease_cut(kvd_core_t *core, kvd_lease_t *lease, uint32_t depth, kv_status_t why)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);
	uint64_t bytes;

	if (depth > lease->n && !lease->alone) {
		return;
	}
	if (lease->alone || depth - 1 <= lease->skip || depth <= lease->ready) {
		kvd_lease_end(core, lease, why);
		return;
	}
	if (lease->ready + 1 == depth) {
		kvd_lease_unwait(core, lease);
	}
	bytes = lease->bytes / (lease->n - lease->skip) * (lease->n - depth + 1);
	lease->bytes -= bytes;
	instance->pinned_bytes -= bytes;
	shorten(core, lease, depth - 1);
	lease->why = why;
	atomic_store_explicit(&lease->header->n, lease->n - lease->skip, memory_order_release);
	if (lease->ready == lease->n) {
		tell_done(core, lease, why);
	}
}
