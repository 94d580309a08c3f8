#include "core/core_impl.h"

#define EXPIRE_QUANTUM 64u

kvd_lease_t *kvd_lease_find(kvd_core_t *core, uint64_t id)
{
	uint32_t place = kvd_id_place(id);
	kvd_lease_t *lease;

	if (id == 0 || place >= core->leases.made) {
		return NULL;
	}
	lease = kvd_pool_at(&core->leases, place);

	return lease->id == id ? lease : NULL;
}

/* ---- time ------------------------------------------------------------------------------------ */

static kvd_list_t *wheel_of(kvd_core_t *core, const kvd_lease_t *lease)
{
	return &core->wheel[(lease->expiry_ns >> KVD_WHEEL_SHIFT) % KVD_WHEEL_SLOTS];
}

static void wheel_link(kvd_core_t *core, const kvd_lease_t *lease)
{
	kvd_list_push_front(wheel_of(core, lease), &core->leases, offsetof(kvd_lease_t, of_bucket), lease->self);
}

static void wheel_unlink(kvd_core_t *core, const kvd_lease_t *lease)
{
	kvd_list_remove(wheel_of(core, lease), &core->leases, offsetof(kvd_lease_t, of_bucket), lease->self);
}

int kvd_leases_expire(kvd_core_t *core, uint64_t now_ns)
{
	uint64_t slot_now = now_ns >> KVD_WHEEL_SHIFT;
	uint32_t work = 0;

	if (slot_now > core->wheel_at + KVD_WHEEL_SLOTS) {
		core->wheel_at = slot_now - KVD_WHEEL_SLOTS;
	}
	for (; core->wheel_at < slot_now; core->wheel_at++) {
		uint32_t id = core->wheel[core->wheel_at % KVD_WHEEL_SLOTS].head;

		while (id != KVD_NONE) {
			kvd_lease_t *lease = kvd_pool_at(&core->leases, id);

			id = lease->of_bucket.next;
			if (lease->expiry_ns > now_ns) {
				continue;
			}
			if (work >= EXPIRE_QUANTUM) {
				return 1;
			}
			work += 1 + lease->claim_count / 16; /* a window's blocks are let go one by one */
			kvd_lease_end(core, lease, KV_ERR_EXPIRED);
		}
	}

	return 0;
}

/* ---- acquire --------------------------------------------------------------------------------- */

/* Depth of rung i of a ladder for n blocks: n, n-1, n-2, n-4, ... and block 1 at the end. */
static uint32_t rung(uint32_t n, uint32_t i)
{
	uint32_t back = i == 0 ? 0 : 1u << (i - 1);

	return back < n ? n - back : 1;
}

static uint32_t rungs(uint32_t n)
{
	uint32_t count = 1;

	while (rung(n, count - 1) > 1) {
		count++;
	}

	return count;
}

/* The deepest known rung; *p_missing gets the shallowest unknown one above it. */
static uint32_t climb(kvd_core_t *core, const kvd_space_t *space, const kv_msg_acquire_t *ask, kv_key_t *p_missing)
{
	memset(p_missing, 0, sizeof *p_missing);
	for (uint32_t i = 0; i < ask->ladder.len / KV_KEY_BYTES; i++) {
		kv_key_t key;
		uint32_t id;

		memcpy(&key, ask->ladder.data + (size_t)i * KV_KEY_BYTES, sizeof key);
		id = kvd_index_find(&core->ix, space->tree, &key, (uint8_t)ask->group);
		if (id != KVD_NONE && kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id)) == rung(ask->n, i)) {
			return id;
		}
		*p_missing = key;
	}

	return KVD_NONE;
}

static void write_slots(kvd_core_t *core, const kvd_lease_t *lease, uint32_t last, uint32_t *out)
{
	if (!lease->alone) {
		kvd_index_path(&core->ix, last, lease->skip, NULL, out);
		return;
	}
	for (uint32_t i = 0; i < lease->claim_count; i++) {
		out[i] = *kvd_slot_of(&core->ix,
				      kvd_block_at(&core->ix, kvd_lease_block(core, lease, lease->skip + i + 1)));
	}
}

/* Everything the lease has, whatever was done of it so far. */
void kvd_lease_close(kvd_core_t *core, kvd_lease_t *lease)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);

	kvd_lease_unwait(core, lease);
	if (lease->alone) {
		kvd_lease_unclaim(core, lease);
	} else if (lease->claim != KVD_NONE) {
		kvd_lease_unhold(core, lease, 0);
		kvd_claim_drop(core, lease->claim);
	}
	if (lease->named > 0) {
		kvd_change_name(core, kv_lease_slots(lease->header), lease->named, 0);
	}
	if (lease->extent != KVD_NONE) {
		kvd_area_give(&instance->area, lease->extent);
	}
	instance->pinned_bytes -= lease->bytes;
	lease->id = 0;
	kvd_pool_put(&core->leases, lease->self);
}

void kvd_leases_free(kvd_core_t *core)
{
	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		for (uint32_t l = kvd_instance_at(core, i)->leases.head; l != KVD_NONE;) {
			kvd_lease_t *lease = kvd_pool_at(&core->leases, l);

			kv_free(core->env, lease->path);
			if (lease->claims != &lease->claim) {
				kv_free(core->env, lease->claims);
			}
			l = lease->of_instance.next;
		}
	}
}

kv_status_t kvd_lease_create(kvd_core_t *core, kvd_instance_rec_t *instance, const kvd_lease_t *ask,
			     kvd_lease_t **p_lease)
{
	uint32_t place;
	uint64_t offset;
	kvd_lease_t *lease;
	kv_status_t status;

	if (instance->lease_count >= core->config.max_leases) {
		return KV_ERR_LIMIT;
	}
	status = kvd_pool_get(&core->leases, &place);
	if (status != KV_OK) {
		return status;
	}
	lease = kvd_pool_at(&core->leases, place);
	*lease = *ask;
	lease->id = kvd_id_make(core, place);
	lease->self = place;
	lease->claim = lease->extent = lease->wait_io = KVD_NONE;
	instance->pinned_bytes += lease->bytes;

	status = kvd_area_take(&instance->area,
			       sizeof(kv_lease_header_t) + (uint64_t)(lease->n - lease->skip) * sizeof(uint32_t),
			       &lease->extent, &offset);
	if (status != KV_OK) {
		lease->extent = KVD_NONE;
		kvd_lease_close(core, lease);
		return status;
	}
	lease->header = (void *)(instance->memory + offset);
	*p_lease = lease;

	return KV_OK;
}

/* Say in the ledger whose slots these are. */
static kv_status_t claim(kvd_core_t *core, const kvd_lease_t *lease, const kvd_block_t *block)
{
	kvd_grant_t grant = {.id = lease->id,
			     .instance = kvd_instance_at(core, lease->instance)->id,
			     .header = lease->header,
			     .deepest = kvd_cpu_loc(&core->ix, block),
			     .deepest_key = &block->key,
			     .expiry_ns = lease->expiry_ns};

	return core->world.claim(core->world.ctx, &grant);
}

/* Write header and slots, enter it into the ledger and the lists. */
kv_status_t kvd_lease_publish(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease, uint8_t group,
			      kv_msg_acquire_reply_t *reply)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);
	uint32_t id = kvd_lease_block(core, lease, lease->n);
	const kvd_block_t *block = kvd_block_at(&core->ix, id);
	kv_lease_header_t *header = lease->header;
	kv_status_t status;

	atomic_store_explicit(&header->state, KV_LEASE_NONE, memory_order_relaxed);
	atomic_store_explicit(&header->id, lease->id, memory_order_release);
	header->incarnation = core->config.incarnation;
	header->kind = KV_LEASE_READ;
	header->group = group;
	header->skip = lease->skip;
	header->space = space->id;
	atomic_store_explicit(&header->n, lease->n - lease->skip, memory_order_relaxed);
	atomic_store_explicit(&header->ready, lease->ready, memory_order_relaxed);
	write_slots(core, lease, id, (uint32_t *)(void *)(header + 1));
	lease->named = lease->n - lease->skip;
	kvd_change_name(core, kv_lease_slots(header), lease->named, 1);
	core->classes[space->slot_class].used_ns = core->now_ns;
	status = claim(core, lease, block);
	if (status != KV_OK) {
		return status;
	}
	atomic_store_explicit(&header->state, KV_LEASE_ACTIVE, memory_order_release);

	wheel_link(core, lease);
	kvd_list_push_front(&instance->leases, &core->leases, offsetof(kvd_lease_t, of_instance), lease->self);
	instance->lease_count++;
	kvd_count(core, KV_M_LEASES_TAKEN, 1);
	reply->lease = lease->id;
	reply->ready = lease->ready;
	reply->offset = (uint64_t)((uint8_t *)lease->header - instance->memory);
	reply->ttl_ms = (uint32_t)((lease->expiry_ns - core->now_ns) / 1000000u);

	return KV_OK;
}

uint64_t kvd_lease_expiry(const kvd_core_t *core, uint32_t ttl_ms)
{
	uint64_t ttl = (uint64_t)ttl_ms * 1000000u;

	return core->now_ns + (ttl == 0 || ttl > core->config.lease_ttl_ns ? core->config.lease_ttl_ns : ttl);
}

uint64_t kvd_lease_room(const kvd_core_t *core, const kvd_instance_rec_t *instance)
{
	return kvd_instance_room(core, instance, core->config.max_pinned_bytes, instance->pinned_bytes);
}

/* Lease blocks (skip, depth] of the path to `id`, or as many as the limits and the room allow. */
static kv_status_t lease_open(kvd_core_t *core, const kvd_space_t *space, const kvd_member_rec_t *member,
			      const kv_msg_acquire_t *ask, uint32_t id, kv_msg_acquire_reply_t *reply)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, member->instance);
	uint64_t slot_bytes = core->classes[space->slot_class].slot_bytes;
	uint64_t room = kvd_lease_room(core, instance) / slot_bytes;
	uint32_t depth = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id));
	uint32_t n = depth - ask->skip > room ? ask->skip + (uint32_t)room : depth;
	uint64_t most = kvd_index_depth_pinned(&core->ix, id) + kvd_pin_room(core, space->ns, space->slot_class);
	uint32_t cpu_depth, before;
	kvd_lease_t draft = {
		.instance = member->instance, .member = member->id, .skip = ask->skip, .stamp = core->stamp};
	kvd_lease_t *lease;
	kv_status_t status;

	kvd_count(core, KV_M_SHARE_FULL, n > most ? 1 : 0);
	kvd_count_ns(core, space->ns, KV_NM_SHARE_FULL, n > most ? 1 : 0);
	n = n > most ? (uint32_t)most : n; /* skipped blocks are pinned too */
	draft.n = draft.ready = draft.hold_from = n;
	if (n <= ask->skip) {
		return instance->lease_count >= core->config.max_leases ? KV_ERR_LIMIT : KV_ERR_BUSY;
	}
	draft.bytes = (n - ask->skip) * slot_bytes;
	draft.expiry_ns = kvd_lease_expiry(core, ask->ttl_ms);
	status = kvd_lease_create(core, instance, &draft, &lease);
	if (status != KV_OK) {
		return status;
	}
	status = kvd_claim_take(core, kvd_index_ancestor(&core->ix, id, n), KVD_CLAIM_LEASE, lease->id, &lease->claim);
	if (status != KV_OK) {
		lease->claim = KVD_NONE;
		kvd_lease_close(core, lease);
		return status;
	}

	cpu_depth = kvd_index_depth_in(&core->ix, kvd_lease_block(core, lease, n), KVD_CPU);
	if (cpu_depth < n) {
		kvd_lease_reserve(core, lease, cpu_depth);
		instance->pinned_bytes -= lease->bytes;
		lease->bytes = lease->n > lease->skip ? (lease->n - lease->skip) * slot_bytes : 0;
		instance->pinned_bytes += lease->bytes;
		before = cpu_depth > lease->skip ? cpu_depth : lease->skip;
		lease->ready = before < lease->n ? before : lease->n;
		reply->n_disk = lease->n - lease->ready;
		kvd_lease_settle(core, lease);
	}
	if (lease->n < depth) {
		kvd_count(core, KV_M_ACQUIRE_SHORTENED, 1);
	}
	reply->n = lease->n;
	if (lease->n <= lease->skip) { /* no room to bring in even one block */
		kvd_lease_close(core, lease);
		return KV_OK;
	}
	status = kvd_lease_publish(core, space, lease, (uint8_t)ask->group, reply);
	if (status != KV_OK) {
		kvd_lease_close(core, lease);
	}

	return status;
}

/* Of a full group: the deepest known rung, and all before it. */
static kv_status_t acquire_path(kvd_core_t *core, const kvd_space_t *space, const kvd_member_rec_t *member,
				const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	kv_key_t missing;
	uint32_t id;

	if (ask->ladder.len / KV_KEY_BYTES != rungs(ask->n)) {
		return KV_ERR_ARG;
	}
	id = climb(core, space, ask, &missing);
	if (!kv_key_is_zero(&missing)) {
		reply->why = kvd_why_missing(core, space->tree, &missing, (uint8_t)ask->group);
	}
	if (id == KVD_NONE) {
		return KV_OK;
	}
	kvd_touch(core, id);
	reply->n = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, id));

	return reply->n > ask->skip ? lease_open(core, space, member, ask, id, reply) : KV_OK;
}

kv_status_t kvd_acquire(kvd_core_t *core, uint32_t ns, kvd_member_t member_id, const kv_msg_acquire_t *ask,
			kv_msg_acquire_reply_t *reply)
{
	kvd_member_rec_t *member;
	kvd_instance_rec_t *instance;
	kvd_space_t *space;
	const kv_group_t *group;
	kv_status_t status = kvd_member_check(core, ns, member_id, &member, &instance);

	if (status == KV_OK) {
		status = kvd_space_find(core, ns, ask->space, ask->epoch, &space);
	}
	if (status == KV_OK) {
		status = kvd_space_group(space, ask->group, &group);
	}
	if (status != KV_OK) {
		return status;
	}
	if (ask->n == 0 || ask->n > KV_MAX_BLOCKS || ask->ladder.len % KV_KEY_BYTES != 0) {
		return KV_ERR_ARG;
	}

	core->stamp++;
	*reply = (kv_msg_acquire_reply_t){.why = KV_WHY_NONE};
	status = kvd_group_alone(group) ? kvd_acquire_alone(core, space, member, ask, reply)
					: acquire_path(core, space, member, ask, reply);
	if (status == KV_OK) {
		kvd_count(core, reply->lease != 0 ? KV_M_ACQUIRE_HITS : KV_M_ACQUIRE_MISSES, 1);
	}

	return status;
}

/* ---- the end --------------------------------------------------------------------------------- */

void kvd_lease_end(kvd_core_t *core, kvd_lease_t *lease, kv_status_t why)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, lease->instance);
	kv_msg_t msg = {.lease_done = {.lease = lease->id, .ready = lease->ready, .status = why}};

	kvd_grant_revoke(lease->header);
	if (why != KV_OK && lease->ready < lease->n) {
		kvd_notify(core, lease->member, KV_CODE_LEASE_DONE, &msg);
	}
	kvd_count(core,
		  why == KV_OK            ? KV_M_LEASES_RELEASED
		  : why == KV_ERR_EXPIRED ? KV_M_LEASES_EXPIRED
					  : KV_M_LEASES_REVOKED,
		  1);
	core->world.unclaim(core->world.ctx, lease->id);

	wheel_unlink(core, lease);
	kvd_list_remove(&instance->leases, &core->leases, offsetof(kvd_lease_t, of_instance), lease->self);
	instance->lease_count--;
	kvd_lease_close(core, lease);
}

/* The lease of this id if it is the member's instance's. */
static kvd_lease_t *own_lease(kvd_core_t *core, const kvd_member_rec_t *member, uint64_t id)
{
	kvd_lease_t *lease = kvd_lease_find(core, id);

	return lease && lease->instance == member->instance ? lease : NULL;
}

kv_status_t kvd_release(kvd_core_t *core, kvd_member_t member_id, const kv_msg_release_t *ask,
			kv_msg_release_reply_t *reply)
{
	kvd_member_rec_t *member = kvd_member_rec(core, member_id);

	if (!member) {
		return KV_ERR_NOT_JOINED;
	}
	if (ask->leases.len % sizeof(uint64_t) != 0) {
		return KV_ERR_ARG;
	}
	reply->released = 0;
	for (uint32_t at = 0; at < ask->leases.len; at += sizeof(uint64_t)) {
		uint64_t id;
		kvd_lease_t *lease;

		memcpy(&id, ask->leases.data + at, sizeof id);
		lease = own_lease(core, member, id);
		if (lease) {
			kvd_lease_end(core, lease, KV_OK);
			reply->released++;
		}
	}

	return KV_OK;
}

kv_status_t kvd_renew(kvd_core_t *core, kvd_member_t member_id, const kv_msg_renew_t *ask, kv_msg_renew_reply_t *reply)
{
	kvd_member_rec_t *member = kvd_member_rec(core, member_id);
	kvd_lease_t *lease = member ? own_lease(core, member, ask->lease) : NULL;
	const kvd_block_t *block;

	if (!lease) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	block = kvd_block_at(&core->ix, kvd_lease_block(core, lease, lease->n));
	wheel_unlink(core, lease);
	lease->expiry_ns = kvd_lease_expiry(core, ask->ttl_ms);
	wheel_link(core, lease);
	core->world.unclaim(core->world.ctx, lease->id);
	(void)claim(core, lease, block); /* its place has just been given up */
	reply->ttl_ms = (uint32_t)((lease->expiry_ns - core->now_ns) / 1000000u);

	return KV_OK;
}

kv_status_t kvd_bad_block(kvd_core_t *core, kvd_member_t member_id, const kv_msg_bad_block_t *ask,
			  kv_msg_bad_block_reply_t *reply)
{
	kvd_member_rec_t *member = kvd_member_rec(core, member_id);
	kvd_lease_t *lease = member ? own_lease(core, member, ask->lease) : NULL;
	uint32_t id, depth;

	if (!lease) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	if (ask->index >= lease->n - lease->skip || lease->skip + ask->index >= lease->ready) {
		return KV_ERR_ARG;
	}
	depth = lease->skip + ask->index + 1;
	id = kvd_lease_block(core, lease, depth);
	reply->quarantined = lease->alone ? 1 : lease->n - depth + 1; /* at the least: those of this lease */
	kv_logf(core->env, KV_LOG_WARN, "core", "a member found wrong bytes in a leased block, instance %s depth %u",
		kvd_instance_at(core, lease->instance)->name, depth);
	kvd_count(core, KV_M_BAD_BLOCKS, 1);
	kvd_quarantine_cpu(core, id);

	return KV_OK;
}
