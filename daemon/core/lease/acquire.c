/* ACQUIRE of a path, and of the blocks of an unchained group; RELEASE and RENEW. */
#include "core/block/block.h"
#include "core/block/quarantine.h"
#include "core/base/core_impl.h"
#include "core/lease/lease.h"
#include "core/lease/lease_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"

/* ---- a path: of a full group ----------------------------------------------------------------- */

/* Depth of rung i of a ladder for n blocks: n, n-1, n-2, n-4, ... and block 1 at the end. */
static uint32_t rung_depth(uint32_t n, uint32_t i)
{
	uint32_t back = i == 0 ? 0 : 1u << (i - 1);

	return back < n ? n - back : 1;
}

static uint32_t count_rungs(uint32_t n)
{
	uint32_t count = 1;

	while (rung_depth(n, count - 1) > 1) {
		count++;
	}

	return count;
}

/* Key i of the ladder, or of the blocks without parents. */
static kv_key_t key_at(const kv_msg_acquire_t *ask, uint32_t i)
{
	kv_key_t key;

	memcpy(&key, ask->ladder.data + (size_t)i * KV_KEY_BYTES, sizeof key);

	return key;
}

/* What a ladder names. */
typedef struct path {
	uint32_t deepest;       /* known rung; KVD_NONE: none */
	uint32_t private_block; /* after it; KVD_NONE: none */
	uint32_t depth, n;      /* of the deepest one; what is leased of it */
	kv_key_t missing;       /* the shallowest unknown rung above it; zero: none */
} path_t;

static path_t resolve_ladder(kvd_core_t *core, const kvd_space_t *space, const kv_msg_acquire_t *ask)
{
	path_t path = {.deepest = KVD_NONE, .private_block = KVD_NONE};

	for (uint32_t i = 0; i < ask->ladder.len / KV_KEY_BYTES; i++) {
		kv_key_t key = key_at(ask, i);
		uint32_t id = kvd_index_find(&core->ix, space->tree, &key, (uint8_t)ask->group);
		const kvd_block_t *block = id == KVD_NONE ? NULL : kvd_block_at(&core->ix, id);

		/* Deepest rung first: the first hit is the answer. A key at another depth is of a client that
		 * contradicts itself. */
		if (block && kvd_depth_of(&core->ix, block) == rung_depth(ask->n, i)) {
			path.deepest = id;
			break;
		}
		if (block && i == 0 && kvd_is_private(&core->ix, block)) {
			path.private_block = id;
		} else {
			path.missing = key;
			path.private_block = KVD_NONE; /* its place is behind block n - 1 */
		}
	}

	return path;
}

#define LEASES_ARE_FULL                                                                                                \
	"the instance's leases keep as much as they may (instance.max_pinned; without it half of its namespace's "     \
	"share, with its unfinished puts); release some, or raise it"

/* As much of the path as the limits and the room allow: blocks (skip, n], and then perhaps the private one. */
static void fit_path(kvd_core_t *core, const kvd_space_t *space, const kvd_instance_rec_t *instance, uint32_t skip,
		     path_t *path)
{
	const uint32_t slot_class = kvd_class_of(&core->ix, kvd_block_at(&core->ix, path->deepest));
	const kvd_class_t *class = &core->classes[slot_class];
	uint64_t room = kvd_lease_room(core, instance, class->memory) / class->slot_bytes;
	/* A block under many leases is charged to the namespace once (decision 025): a prefix that others have pinned
	 * costs nothing more. The instance is charged for each lease, without the skipped blocks. */
	uint64_t most = kvd_index_depth_pinned(&core->ix, path->deepest, KVD_PINS_ALL) +
			kvd_share_pin_room(core, space->ns, slot_class); /* skipped blocks are pinned too */
	uint32_t n = path->depth - skip > room ? skip + (uint32_t)room : path->depth;

	kvd_count(core, KV_M_SHARE_FULL, n > most ? 1 : 0);
	kvd_count_ns(core, space->ns, KV_NM_SHARE_FULL, n > most ? 1 : 0);
	if (n > most) {
		(void)kvd_busy(core, KVD_SHARE_IS_FULL);
	} else if (n < path->depth) {
		(void)kvd_busy(core, LEASES_ARE_FULL);
	}
	path->n = n > most ? (uint32_t)most : n;
	if (path->private_block != KVD_NONE) {
		most += kvd_block_at(&core->ix, path->private_block)->pins.head != KVD_NONE ? 1 : 0;
		if (path->n == path->depth && (path->n - skip >= room || path->n >= most)) {
			(void)kvd_busy(core, path->n >= most ? KVD_SHARE_IS_FULL : LEASES_ARE_FULL);
			path->private_block = KVD_NONE;
		} else if (path->n < path->depth) {
			path->private_block = KVD_NONE;
		}
	}
}

static kv_status_t pin_path(kvd_core_t *core, const path_t *path, kvd_lease_t *lease)
{
	kv_status_t status = kvd_pin_create(core, kvd_index_ancestor(&core->ix, path->deepest, path->n), KVD_PIN_LEASE,
					    lease->id, &lease->pin);

	if (status != KV_OK) {
		lease->pin = KVD_NONE;
		return status;
	}
	if (path->private_block != KVD_NONE) {
		status = kvd_pin_create(core, path->private_block, KVD_PIN_LEASE, lease->id, &lease->private_pin);
		lease->private_pin = status == KV_OK ? lease->private_pin : KVD_NONE;
	}

	return status;
}

/* Lease the path, or as much of it as the limits and the room allow. */
static kv_status_t open_lease(kvd_core_t *core, const kvd_space_t *space, const kvd_member_rec_t *member,
			      const kv_msg_acquire_t *ask, path_t *path, kv_msg_acquire_reply_t *reply)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, member->instance);
	const kvd_class_t *class = &core->classes[kvd_class_of(&core->ix, kvd_block_at(&core->ix, path->deepest))];
	uint32_t cpu_depth, before, n;
	kvd_lease_t draft = {
		.instance = member->instance, .member = member->id, .skip = ask->skip, .stamp = core->stamp};
	kvd_lease_t *lease;
	kv_status_t status;

	fit_path(core, space, instance, ask->skip, path);
	n = path->n + (path->private_block != KVD_NONE ? 1 : 0);
	/* Until the fills are known the lease counts as whole: its pin must be there before the first fill evicts. */
	draft.n = draft.ready = draft.ref_from = n;
	if (n <= ask->skip) {
		return instance->lease_count >= core->config.max_leases ? KV_ERR_LIMIT : KV_ERR_BUSY;
	}
	draft.bytes = (n - ask->skip) * class->slot_bytes;
	draft.memory = class->memory;
	draft.expiry_ns = kvd_lease_expiry(core, ask->ttl_ms);
	status = kvd_lease_create(core, instance, &draft, &lease);
	if (status != KV_OK) {
		return status;
	}
	status = pin_path(core, path, lease);
	if (status != KV_OK) {
		kvd_lease_free(core, lease);
		return status;
	}

	cpu_depth = kvd_index_depth_in(&core->ix, kvd_lease_deepest(core, lease), KVD_CPU);
	if (cpu_depth < path->n) {
		/* It may shorten the lease: what the tier has no room for is not promised. */
		kvd_lease_start_fills(core, lease, cpu_depth);
		instance->pinned_bytes[lease->memory] -= lease->bytes;
		lease->bytes = lease->n > lease->skip ? (lease->n - lease->skip) * class->slot_bytes : 0;
		instance->pinned_bytes[lease->memory] += lease->bytes;
		before = cpu_depth > lease->skip ? cpu_depth : lease->skip;
		lease->ready = before < lease->n ? before : lease->n;
		reply->n_disk = lease->n - lease->ready - (lease->private_pin != KVD_NONE ? 1 : 0);
		kvd_lease_count_ready(core, lease);
	}
	if (lease->n < path->depth) {
		kvd_count(core, KV_M_ACQUIRE_SHORTENED, 1);
	}
	reply->n = lease->n;
	if (lease->n <= lease->skip) { /* no room to bring in even one block */
		kvd_lease_free(core, lease);
		return KV_OK;
	}
	status = kvd_lease_publish(core, space, lease, (uint8_t)ask->group, reply);
	if (status != KV_OK) {
		kvd_lease_free(core, lease);
	}

	return status;
}

/* Of a full group: the deepest known rung, and all blocks above it. */
static kv_status_t acquire_path(kvd_core_t *core, const kvd_space_t *space, const kvd_member_rec_t *member,
				const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	path_t path;

	if (ask->ladder.len / KV_KEY_BYTES != count_rungs(ask->n)) {
		return KV_ERR_ARG;
	}
	path = resolve_ladder(core, space, ask);
	if (!kv_key_is_zero(&path.missing)) {
		reply->why = kvd_explain_miss(core, space->tree, &path.missing, (uint8_t)ask->group);
	}
	if (path.deepest == KVD_NONE) {
		return KV_OK;
	}
	kvd_block_touch_path(core, path.deepest);
	kvd_index_mark_hit(&core->ix, path.deepest);
	path.depth = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, path.deepest));
	reply->n = path.depth + (path.private_block != KVD_NONE ? 1 : 0);

	return reply->n > ask->skip ? open_lease(core, space, member, ask, &path, reply) : KV_OK;
}

/* ---- an unchained group: each block pinned, all or none -------------------------------------- */

static const kvd_class_t *class_of_group(const kvd_core_t *core, const kvd_space_t *space, uint32_t group)
{
	return &core->classes[kvd_tree_class(kvd_tree_at(&core->ix, space->tree), (uint8_t)group)];
}

/* A pin on each of the blocks. KV_MISS: reply->why says why the first missing one is missing. */
static kv_status_t pin_blocks(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease,
			      const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	for (uint32_t i = 0; i < ask->n - ask->skip; i++) {
		kv_key_t key = key_at(ask, i);
		uint32_t id = kvd_index_find(&core->ix, space->tree, &key, (uint8_t)ask->group);
		kv_status_t status;

		if (id == KVD_NONE) {
			reply->why = kvd_explain_miss(core, space->tree, &key, (uint8_t)ask->group);
			return KV_MISS;
		}
		if (kvd_index_depth_pinned(&core->ix, id, KVD_PINS_ALL) == 0 &&
		    kvd_share_pin_room(core, space->ns, kvd_class_of(&core->ix, kvd_block_at(&core->ix, id))) == 0) {
			kvd_count(core, KV_M_SHARE_FULL, 1);
			kvd_count_ns(core, space->ns, KV_NM_SHARE_FULL, 1);
			return kvd_busy(core, KVD_SHARE_IS_FULL);
		}
		status = kvd_pin_create(core, id, KVD_PIN_LEASE, lease->id, &lease->pins[i]);
		if (status != KV_OK) {
			return status;
		}
		lease->pin_count++;
	}

	return KV_OK;
}

static kv_status_t open_blocks(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease,
			       const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	uint32_t on_disk = 0;
	kv_status_t status;

	/* One block, the usual case, needs no array. */
	lease->pins = lease->n - lease->skip == 1
			      ? &lease->pin
			      : kv_alloc(core->env, (size_t)(lease->n - lease->skip) * sizeof *lease->pins);
	if (!lease->pins) {
		return KV_ERR_NOMEM;
	}
	status = pin_blocks(core, space, lease, ask, reply);
	if (status != KV_OK) {
		return status;
	}
	for (uint32_t depth = lease->skip + 1; depth <= lease->n; depth++) {
		uint32_t id = kvd_lease_block(core, lease, depth);

		kvd_block_touch_path(core, id);
		kvd_index_mark_hit(&core->ix, id);
		on_disk += kvd_in_set(&core->ix, kvd_block_at(&core->ix, id), KVD_CPU) ? 0 : 1;
	}
	if (on_disk > 0) {
		status = kvd_lease_start_all_fills(core, lease, &reply->n_disk);
	}

	return status == KV_OK ? kvd_lease_publish(core, space, lease, (uint8_t)ask->group, reply) : status;
}

static kv_status_t acquire_unchained(kvd_core_t *core, const kvd_space_t *space, const kvd_member_rec_t *member,
				     const kv_msg_acquire_t *ask, kv_msg_acquire_reply_t *reply)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, member->instance);
	kvd_lease_t draft = {.instance = member->instance,
			     .member = member->id,
			     .unchained = 1,
			     .n = ask->n,
			     .skip = ask->skip,
			     .ready = ask->n,
			     .ref_from = ask->n,
			     .stamp = core->stamp,
			     .expiry_ns = kvd_lease_expiry(core, ask->ttl_ms)};
	kvd_lease_t *lease;
	kv_status_t status;

	if (ask->skip >= ask->n || ask->ladder.len / KV_KEY_BYTES != ask->n - ask->skip) {
		return KV_ERR_ARG;
	}
	draft.bytes = (ask->n - ask->skip) * class_of_group(core, space, ask->group)->slot_bytes;
	draft.memory = space->memory;
	if (draft.bytes > kvd_lease_room(core, instance, draft.memory)) {
		return kvd_busy(core, LEASES_ARE_FULL);
	}
	status = kvd_lease_create(core, instance, &draft, &lease);
	if (status != KV_OK) {
		return status;
	}
	status = open_blocks(core, space, lease, ask, reply);
	if (status != KV_OK) {
		kvd_lease_free(core, lease);
		reply->n_disk = 0;
		return status == KV_MISS ? KV_OK : status;
	}
	reply->n = ask->n;

	return KV_OK;
}

/* ---- requests -------------------------------------------------------------------------------- */

kv_status_t kvd_lease_acquire(kvd_core_t *core, uint32_t ns, kvd_member_t member_id, const kv_msg_acquire_t *ask,
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

	core->stamp++; /* the clock of recency: all blocks of one request are used at the same time */
	*reply = (kv_msg_acquire_reply_t){.why = KV_WHY_NONE};
	status = kvd_group_unchained(group) ? acquire_unchained(core, space, member, ask, reply)
					    : acquire_path(core, space, member, ask, reply);
	if (status == KV_OK) {
		kvd_count(core, reply->lease != 0 ? KV_M_ACQUIRE_HITS : KV_M_ACQUIRE_MISSES, 1);
	}

	return status;
}

kv_status_t kvd_lease_release(kvd_core_t *core, kvd_member_t member_id, const kv_msg_release_t *ask,
			      kv_msg_release_reply_t *reply)
{
	kvd_member_rec_t *member = kvd_member_find(core, member_id);

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
		lease = kvd_lease_find_own(core, member, id);
		if (lease) {
			kvd_lease_end(core, lease, KV_OK);
			reply->released++;
		}
	}

	return KV_OK;
}

kv_status_t kvd_lease_renew(kvd_core_t *core, kvd_member_t member_id, const kv_msg_renew_t *ask,
			    kv_msg_renew_reply_t *reply)
{
	kvd_member_rec_t *member = kvd_member_find(core, member_id);
	kvd_lease_t *lease = member ? kvd_lease_find_own(core, member, ask->lease) : NULL;

	if (!lease) {
		return member ? KV_ERR_NOT_FOUND : KV_ERR_NOT_JOINED;
	}
	kvd_lease_extend(core, lease, ask->ttl_ms);
	reply->ttl_ms = (uint32_t)((lease->expiry_ns - core->now_ns) / 1000000u);

	return KV_OK;
}
