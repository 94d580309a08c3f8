#include "core/block/block.h"
#include "core/block/transfer.h"
#include "core/base/core_impl.h"
#include "core/lease/lease.h"
#include "core/lease/lease_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"

kvd_lease_t *kvd_lease_find(kvd_core_t *core, uint64_t id)
{
	uint32_t index = kvd_id_index(id);
	kvd_lease_t *lease;

	if (id == 0 || index >= core->leases.made) {
		return NULL;
	}
	lease = kvd_obj_at(&core->leases, index);

	return lease->id == id ? lease : NULL;
}

kvd_lease_t *kvd_lease_find_own(kvd_core_t *core, const kvd_member_rec_t *member, uint64_t id)
{
	kvd_lease_t *lease = kvd_lease_find(core, id);

	return lease && lease->instance == member->instance ? lease : NULL;
}

uint32_t kvd_lease_block(kvd_core_t *core, const kvd_lease_t *lease, uint32_t depth)
{
	const kvd_pin_t *pin =
		kvd_obj_at(&core->pins, lease->unchained ? lease->pins[depth - lease->skip - 1] : lease->pin);

	if (lease->private_pin != KVD_NONE && depth == lease->n) {
		return ((const kvd_pin_t *)kvd_obj_at(&core->pins, lease->private_pin))->block;
	}
	if (lease->path && depth > lease->ref_from) {
		return lease->path[depth - lease->ref_from - 1];
	}

	return lease->unchained ? pin->block : kvd_index_ancestor(&core->ix, pin->block, depth);
}

uint32_t kvd_lease_deepest(const kvd_core_t *core, const kvd_lease_t *lease)
{
	return ((const kvd_pin_t *)kvd_obj_at(&core->pins, lease->pin))->block;
}

/* ---- expiry ---------------------------------------------------------------------------------- */

static void link_expiry(kvd_core_t *core, const kvd_lease_t *lease)
{
	kvd_list_push_front(kvd_wheel_bucket(&core->lease_wheel, lease->expiry_ns), &core->leases,
			    offsetof(kvd_lease_t, of_bucket), lease->self);
}

static void unlink_expiry(kvd_core_t *core, const kvd_lease_t *lease)
{
	kvd_list_remove(kvd_wheel_bucket(&core->lease_wheel, lease->expiry_ns), &core->leases,
			offsetof(kvd_lease_t, of_bucket), lease->self);
}

uint64_t kvd_lease_expiry(const kvd_core_t *core, uint32_t ttl_ms)
{
	uint64_t ttl = (uint64_t)ttl_ms * 1000000u;

	return core->now_ns + (ttl == 0 || ttl > core->config.lease_ttl_ns ? core->config.lease_ttl_ns : ttl);
}

/* ---- a lease begins -------------------------------------------------------------------------- */

uint64_t kvd_lease_room(const kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t memory)
{
	return kvd_share_instance_room(core, instance, memory, core->config.max_pinned_bytes, instance->pinned_bytes);
}

kv_status_t kvd_lease_create(kvd_core_t *core, kvd_instance_rec_t *instance, const kvd_lease_t *ask,
			     kvd_lease_t **p_lease)
{
	uint32_t index;
	uint64_t offset;
	kvd_lease_t *lease;
	kv_status_t status;

	if (instance->lease_count >= core->config.max_leases) {
		return KV_ERR_LIMIT;
	}
	status = kvd_obj_pool_get(&core->leases, &index);
	if (status != KV_OK) {
		return status;
	}
	lease = kvd_obj_at(&core->leases, index);
	*lease = *ask;
	lease->id = kvd_id_make(core, index);
	lease->self = index;
	lease->pin = lease->private_pin = lease->extent = lease->wait_io = KVD_NONE;
	instance->pinned_bytes[lease->memory] += lease->bytes;

	status = kvd_extent_take(&instance->extent_alloc,
				 sizeof(kv_lease_header_t) + (uint64_t)(lease->n - lease->skip) * sizeof(uint32_t),
				 &lease->extent, &offset);
	if (status != KV_OK) {
		(void)kvd_busy(core, KVD_LEASE_AREA_IS_FULL);
		lease->extent = KVD_NONE;
		kvd_lease_free(core, lease);
		return status;
	}
	lease->header = (void *)(instance->memory + offset);
	*p_lease = lease;

	return KV_OK;
}

static void write_slots(kvd_core_t *core, const kvd_lease_t *lease, uint32_t *out)
{
	uint32_t from = 0;

	if (!lease->unchained) {
		kvd_index_copy_path(&core->ix, kvd_lease_deepest(core, lease), lease->skip, NULL, out);
		from = lease->n - lease->skip - (lease->private_pin != KVD_NONE ? 1 : 0);
	}
	for (uint32_t i = from; i < lease->n - lease->skip; i++) {
		out[i] = *kvd_slot_of(&core->ix,
				      kvd_block_at(&core->ix, kvd_lease_block(core, lease, lease->skip + i + 1)));
	}
}

/* Those of a window may be anywhere in it; of a full group only the last one may be private. */
static void hold_private_blocks(kvd_core_t *core, const kvd_lease_t *lease)
{
	for (uint32_t depth = lease->unchained ? lease->skip + 1 : lease->n; depth <= lease->n; depth++) {
		kvd_private_block_hold(core, kvd_lease_block(core, lease, depth));
	}
}

/* Record in the ledger whose slots these are: after a crash the keeper's next daemon must not reuse them. */
static kv_status_t record_lease(kvd_core_t *core, const kvd_lease_t *lease)
{
	const kvd_block_t *block = kvd_block_at(&core->ix, kvd_lease_block(core, lease, lease->n));
	kvd_grant_t grant = {.id = lease->id,
			     .instance = kvd_instance_at(core, lease->instance)->id,
			     .header = lease->header,
			     .deepest = kvd_cpu_loc(&core->ix, block),
			     .deepest_key = &block->key,
			     .expiry_ns = lease->expiry_ns};

	return core->world.ledger_add(core->world.ctx, &grant);
}

/* The lease names its slots from now on (`more`), or has ended: slots of the slab that is being emptied are counted
 * (decision 013). */
static void count_named(kvd_core_t *core, const kvd_lease_t *lease, int more)
{
	kvd_rebalance_t *rebalance = &core->rebalance[KVD_CPU];
	const uint32_t *slots = kv_lease_slots(lease->header);
	uint64_t count = 0;

	for (uint32_t i = 0; rebalance->slab != KVD_NONE && i < lease->named; i++) {
		count += kv_slot_slab(slots[i]) == rebalance->slab;
	}
	rebalance->named += more ? count : 0 - count;
}

kv_status_t kvd_lease_publish(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease, uint8_t group,
			      kv_msg_acquire_reply_t *reply)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);
	kv_lease_header_t *header = lease->header;
	kv_status_t status;

	/* The room may have been another lease's. NONE and the new id come first, so that its reader sees that the
	 * header is no longer its own. ACTIVE comes last, with a release store: who reads it sees all fields and slots.
	 */
	atomic_store_explicit(&header->state, KV_LEASE_NONE, memory_order_relaxed);
	atomic_store_explicit(&header->id, lease->id, memory_order_release);
	header->incarnation = core->config.incarnation;
	header->kind = KV_LEASE_READ;
	header->group = group;
	header->skip = lease->skip;
	header->space = space->id;
	atomic_store_explicit(&header->n, lease->n - lease->skip, memory_order_relaxed);
	atomic_store_explicit(&header->ready, lease->ready, memory_order_relaxed);
	write_slots(core, lease, (uint32_t *)(void *)(header + 1));
	lease->named = lease->n - lease->skip;
	count_named(core, lease, 1);
	core->classes[kvd_tree_class(kvd_tree_at(&core->ix, space->tree), group)].used_ns = core->now_ns;
	status = record_lease(core, lease);
	if (status != KV_OK) {
		return status;
	}
	hold_private_blocks(core, lease);
	atomic_store_explicit(&header->state, KV_LEASE_ACTIVE, memory_order_release);

	link_expiry(core, lease);
	kvd_list_push_front(&instance->leases, &core->leases, offsetof(kvd_lease_t, of_instance), lease->self);
	instance->lease_count++;
	kvd_count(core, KV_M_LEASES_TAKEN, 1);
	reply->lease = lease->id;
	reply->ready = lease->ready;
	reply->offset = (uint64_t)((uint8_t *)lease->header - instance->memory);
	reply->ttl_ms = (uint32_t)((lease->expiry_ns - core->now_ns) / 1000000u);

	return KV_OK;
}

void kvd_lease_extend(kvd_core_t *core, kvd_lease_t *lease, uint32_t ttl_ms)
{
	/* The wheel finds a lease by its expiry, so it leaves its bucket before that changes. */
	unlink_expiry(core, lease);
	lease->expiry_ns = kvd_lease_expiry(core, ttl_ms);
	link_expiry(core, lease);
	core->world.ledger_remove(core->world.ctx, lease->id);
	(void)record_lease(core, lease); /* its entry has just become free */
}

/* ---- what is ready --------------------------------------------------------------------------- */

static void stop_waiting(kvd_core_t *core, kvd_lease_t *lease)
{
	if (lease->wait_io != KVD_NONE) {
		kvd_list_remove(&kvd_io_at(core, lease->wait_io)->waiters, &core->leases, offsetof(kvd_lease_t, of_io),
				lease->self);
		lease->wait_io = KVD_NONE;
	}
}

static void wait_for_fill(kvd_core_t *core, kvd_lease_t *lease, uint32_t io_id)
{
	lease->wait_io = io_id;
	kvd_list_push_front(&kvd_io_at(core, io_id)->waiters, &core->leases, offsetof(kvd_lease_t, of_io), lease->self);
}

/* Is the next block in the slot that the header names? Not when its fill failed and a later one took another slot. */
static int has_same_slot(const kvd_core_t *core, const kvd_lease_t *lease, const kvd_block_t *block)
{
	return kv_lease_slots(lease->header)[lease->ready - lease->skip] == *kvd_slot_of(&core->ix, block);
}

static void count_ready(kvd_core_t *core, kvd_lease_t *lease, int published)
{
	stop_waiting(core, lease);
	while (lease->ready < lease->n) {
		const kvd_block_t *block = kvd_block_at(&core->ix, kvd_lease_block(core, lease, lease->ready + 1));

		if (published && !has_same_slot(core, lease, block)) {
			break;
		}
		/* A TRANSIT block serves this lease, which references it. */
		if (!kvd_in_set(&core->ix, block, KVD_CPU) && !(block->flags & KVD_TRANSIT)) {
			if (block->flags & KVD_FILLING) {
				wait_for_fill(core, lease, block->io);
			}
			break;
		}
		lease->ready++;
	}
}

void kvd_lease_count_ready(kvd_core_t *core, kvd_lease_t *lease)
{
	count_ready(core, lease, 0);
}

static void notify_done(kvd_core_t *core, const kvd_lease_t *lease, kv_status_t status)
{
	kv_msg_t msg = {.lease_done = {.lease = lease->id, .ready = lease->ready, .status = status}};

	kvd_member_notify(core, lease->member, KV_CODE_LEASE_DONE, &msg);
}

void kvd_lease_advance(kvd_core_t *core, kvd_lease_t *lease)
{
	count_ready(core, lease, 1);
	/* Release: a member that sees this count sees the bytes that the device has written. */
	atomic_store_explicit(&lease->header->ready, lease->ready, memory_order_release);
	if (lease->ready == lease->n) {
		notify_done(core, lease, lease->why);
	} else if (lease->wait_io == KVD_NONE) {
		kvd_lease_cut_before(core, lease, lease->ready + 1,
				     KV_ERR_IO); /* its fill failed while we waited for an earlier one */
	}
}

/* ---- a lease ends ---------------------------------------------------------------------------- */

/* Drop the references on blocks (from, n], deepest first. */
static void unref_blocks(kvd_core_t *core, kvd_lease_t *lease, uint32_t from)
{
	if (from < lease->ref_from) {
		from = lease->ref_from;
	}
	for (uint32_t depth = lease->n; depth > from; depth--) {
		kvd_block_unref(core, kvd_lease_block(core, lease, depth));
	}
	if (from == lease->ref_from) {
		kv_free(core->env, lease->path);
		lease->path = NULL;
		lease->ref_from = lease->n;
	}
}

static void drop_private_pin(kvd_core_t *core, kvd_lease_t *lease)
{
	if (lease->private_pin != KVD_NONE) {
		kvd_pin_drop(core, lease->private_pin);
		lease->private_pin = KVD_NONE;
	}
}

void kvd_lease_shorten(kvd_core_t *core, kvd_lease_t *lease, uint32_t n)
{
	/* References first: their blocks are found through the pin, which moves up last. */
	unref_blocks(core, lease, n);
	drop_private_pin(core, lease); /* it was the last block */
	if (n > 0) {
		kvd_pin_move(core, lease->pin, kvd_lease_block(core, lease, n));
	}
	lease->n = n;
	if (lease->ref_from > n) {
		lease->ref_from = n;
	}
}

static void drop_pins(kvd_core_t *core, kvd_lease_t *lease)
{
	unref_blocks(core, lease, lease->skip);
	while (lease->pin_count > 0) {
		kvd_pin_drop(core, lease->pins[--lease->pin_count]);
	}
	if (lease->pins != &lease->pin) {
		kv_free(core->env, lease->pins);
	}
	lease->pins = NULL;
}

void kvd_lease_free(kvd_core_t *core, kvd_lease_t *lease)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);

	stop_waiting(core, lease);
	if (lease->unchained) {
		drop_pins(core, lease);
	} else if (lease->pin != KVD_NONE) {
		unref_blocks(core, lease, 0);
		drop_private_pin(core, lease);
		kvd_pin_drop(core, lease->pin);
	}
	if (lease->named > 0) {
		count_named(core, lease, 0);
	}
	if (lease->extent != KVD_NONE) {
		kvd_extent_give(&instance->extent_alloc, lease->extent);
	}
	instance->pinned_bytes[lease->memory] -= lease->bytes;
	lease->id = 0;
	kvd_obj_pool_put(&core->leases, lease->self);
}

void kvd_leases_free(kvd_core_t *core)
{
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases.head; l != KVD_NONE;) {
			kvd_lease_t *lease = kvd_obj_at(&core->leases, l);

			kv_free(core->env, lease->path);
			if (lease->pins != &lease->pin) {
				kv_free(core->env, lease->pins);
			}
			l = lease->of_instance.next;
		}
	}
}

void kvd_lease_end(kvd_core_t *core, kvd_lease_t *lease, kv_status_t why)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);
	kv_msg_t msg = {.lease_done = {.lease = lease->id, .ready = lease->ready, .status = why}};

	/* REVOKED before any pin goes: a reader looks at the state after its copy, and a slot is reused only later. */
	kvd_grant_revoke(lease->header);
	if (why != KV_OK && lease->ready < lease->n) {
		kvd_member_notify(core, lease->member, KV_CODE_LEASE_DONE, &msg);
	}
	kvd_count(core,
		  why == KV_OK            ? KV_M_LEASES_RELEASED
		  : why == KV_ERR_EXPIRED ? KV_M_LEASES_EXPIRED
					  : KV_M_LEASES_REVOKED,
		  1);
	core->world.ledger_remove(core->world.ctx, lease->id);

	unlink_expiry(core, lease);
	kvd_list_remove(&instance->leases, &core->leases, offsetof(kvd_lease_t, of_instance), lease->self);
	instance->lease_count--;
	kvd_lease_free(core, lease);
}

void kvd_lease_cut_before(kvd_core_t *core, kvd_lease_t *lease, uint32_t depth, kv_status_t why)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);
	uint64_t bytes;

	if (depth > lease->n && !lease->unchained) {
		return;
	}
	/* A member may have copied ready blocks, or be copying: a smaller n does not reach it, only REVOKED does. Groups
	 * without parents are all or nothing. */
	if (lease->unchained || depth - 1 <= lease->skip || depth <= lease->ready) {
		kvd_lease_end(core, lease, why);
		return;
	}
	if (lease->ready + 1 == depth) {
		stop_waiting(core, lease);
	}
	/* The blocks that are cut off are no longer charged. */
	bytes = lease->bytes / (lease->n - lease->skip) * (lease->n - depth + 1);
	lease->bytes -= bytes;
	instance->pinned_bytes[lease->memory] -= bytes;
	kvd_lease_shorten(core, lease, depth - 1);
	lease->why = why;
	atomic_store_explicit(&lease->header->n, lease->n - lease->skip, memory_order_release);
	if (lease->ready == lease->n) {
		notify_done(core, lease, why);
	}
}

static uint32_t expire_lease(void *ctx, uint32_t id)
{
	kvd_core_t *core = ctx;
	kvd_lease_t *lease = kvd_obj_at(&core->leases, id);
	uint32_t work = 1 + lease->pin_count / 16; /* a window's pins are dropped one by one */

	kvd_lease_end(core, lease, KV_ERR_EXPIRED);

	return work;
}

int kvd_leases_expire(kvd_core_t *core, uint64_t now_ns)
{
	const kvd_wheel_items_t items = {.pool = &core->leases,
					 .link = offsetof(kvd_lease_t, of_bucket),
					 .expiry = offsetof(kvd_lease_t, expiry_ns),
					 .expire = expire_lease,
					 .ctx = core};

	return kvd_wheel_run(&core->lease_wheel, &items, now_ns);
}
