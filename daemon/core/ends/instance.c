#include "core/block/events.h"
#include "core/base/core_impl.h"
#include "core/lease/extent_alloc.h"
#include "core/lease/lease.h"
#include "core/put/put.h"
#include "core/ends/instance.h"
#include "core/ends/numbers.h"
#include "core/base/find.h"

static kvd_instance_rec_t *find_instance(kvd_core_t *core, kvd_instance_t id)
{
	kvd_instance_rec_t *instance;

	if (id == 0 || kvd_id_index(id) >= core->instances.made) {
		return NULL;
	}
	instance = kvd_instance_at(core, kvd_id_index(id));

	return instance->id == id ? instance : NULL;
}

/* ---- join ------------------------------------------------------------------------------------ */

static int is_secret_equal(const kvd_instance_rec_t *instance, const kvd_join_t *join)
{
	uint8_t differ = instance->secret_len == join->secret_len ? 0 : 1;

	for (uint32_t i = 0; i < instance->secret_len && i < join->secret_len; i++) {
		differ |=
			(uint8_t)(instance->secret[i] ^
				  join->secret[i]); /* all bytes are compared: the time says nothing about the secret */
	}

	return differ == 0;
}

kv_status_t kvd_instance_find(kvd_core_t *core, const kvd_join_t *join, kvd_instance_t *p_instance)
{
	*p_instance = 0;
	for (uint32_t id = core->instance_list.head; id != KVD_NONE;) {
		const kvd_instance_rec_t *instance = kvd_instance_at(core, id);

		if (instance->ns == join->ns && strcmp(instance->name, join->instance) == 0) {
			if (!is_secret_equal(instance, join)) {
				return KV_ERR_SECRET;
			}
			*p_instance = instance->id;
			return KV_OK;
		}
		id = instance->of_core.next;
	}

	return KV_OK;
}

kv_status_t kvd_instance_create(kvd_core_t *core, const kvd_join_t *join, void *lease_area, uint64_t lease_bytes,
				kvd_instance_t *p_instance)
{
	kv_lease_area_header_t *header = lease_area;
	kvd_instance_rec_t *instance;
	uint32_t index;
	kv_status_t status;

	if (join->ns >= core->ns_count || join->secret_len < 16 || join->secret_len > 32 || join->instance[0] == '\0' ||
	    strlen(join->instance) > 128 || lease_bytes < sizeof *header + UINT64_C(2) * KVD_EXTENT_UNIT) {
		return KV_ERR_ARG;
	}
	if (core->reaped_count + core->instances.used >= 2 * (uint64_t)core->config.max_instances) {
		return KV_ERR_LIMIT; /* the host has not fetched those that ended */
	}
	status = kvd_obj_pool_get(&core->instances, &index);
	if (status != KV_OK) {
		return status;
	}
	instance = kvd_instance_at(core, index);
	status =
		kvd_extent_alloc_init(&instance->extent_alloc, &core->extents, lease_area, lease_bytes, sizeof *header);
	if (status != KV_OK) {
		kvd_obj_pool_put(&core->instances, index);
		return status;
	}

	instance->id = kvd_id_make(core, index);
	instance->self = index;
	instance->ns = join->ns;
	memcpy(instance->name, join->instance, strlen(join->instance) + 1);
	memcpy(instance->secret, join->secret, join->secret_len);
	instance->secret_len = join->secret_len;
	instance->memory = lease_area;
	instance->leases = instance->puts = KVD_LIST_EMPTY;
	memset(instance->members, 0xff, sizeof instance->members);
	header->version = KV_SHM_VERSION;
	header->incarnation = core->config.incarnation;
	header->total_bytes = lease_bytes;
	header->magic = KV_LEASES_MAGIC;

	kvd_list_push_front(&core->instance_list, &core->instances, offsetof(kvd_instance_rec_t, of_core), index);
	*p_instance = instance->id;

	return KV_OK;
}

kv_status_t kvd_member_add(kvd_core_t *core, kvd_instance_t id, const kvd_join_t *join, kvd_member_t *p_member)
{
	kvd_instance_rec_t *instance = find_instance(core, id);
	kvd_member_rec_t *member;
	uint32_t index, local = 0;
	kv_status_t status;

	if (!instance || join->role > 2) {
		return instance ? KV_ERR_ARG : KV_ERR_NOT_FOUND;
	}
	while (local < KVD_INSTANCE_MEMBERS && instance->members[local] != KVD_NONE) {
		local++;
	}
	if (local == KVD_INSTANCE_MEMBERS) {
		return KV_ERR_LIMIT;
	}
	status = kvd_obj_pool_get(&core->members, &index);
	if (status != KV_OK) {
		return status;
	}
	member = kvd_obj_at(&core->members, index);
	*member = (kvd_member_rec_t){.id = kvd_id_make(core, index),
				     .instance = instance->self,
				     .local = local,
				     .role = join->role,
				     .rank = join->rank,
				     .open = 1};
	instance->members[local] = index;
	instance->member_count++;
	instance->open_count++;
	*p_member = member->id;

	return KV_OK;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void end_leases(kvd_core_t *core, kvd_instance_rec_t *instance)
{
	while (instance->leases.head != KVD_NONE) {
		kvd_lease_end(core, kvd_obj_at(&core->leases, instance->leases.head), KV_ERR_REVOKED);
	}
}

static void free_member(kvd_core_t *core, kvd_instance_rec_t *instance, kvd_member_rec_t *member)
{
	uint32_t index = kvd_id_index(member->id);

	instance->members[member->local] = KVD_NONE;
	instance->member_count--;
	member->id = 0;
	kvd_obj_pool_put(&core->members, index);
}

static void end_instance(kvd_core_t *core, kvd_instance_rec_t *instance)
{
	end_leases(core, instance);
	kvd_puts_destroy(core, instance);
	for (uint32_t memory = 0; memory < KVD_MEMORIES; memory++) {
		kv_assert(instance->pinned_bytes[memory] == 0 && instance->unfinished_bytes[memory] == 0);
	}
	for (uint32_t local = 0; local < KVD_INSTANCE_MEMBERS; local++) {
		if (instance->members[local] != KVD_NONE) {
			free_member(core, instance, kvd_obj_at(&core->members, instance->members[local]));
		}
	}
	kvd_extent_alloc_fini(&instance->extent_alloc);
	kvd_list_remove(&core->instance_list, &core->instances, offsetof(kvd_instance_rec_t, of_core), instance->self);
	core->reaped[core->reaped_count++] = instance->id;
	instance->id = 0;
	kvd_obj_pool_put(&core->instances, instance->self);
}

/* End an instance without open members and without slots in quarantine: its closed members need not be waited for
 * either. */
static void end_instance_if_unused(kvd_core_t *core, kvd_instance_rec_t *instance)
{
	if (instance->open_count == 0 && !kvd_puts_have_quarantined_slots(core, instance)) {
		end_instance(core, instance);
	}
	/* Puts of others may have waited for keys that this one was writing. */
	kvd_puts_run(core);
	kvd_events_flush(core);
}

static void close_member(kvd_core_t *core, kvd_instance_rec_t *instance, kvd_member_rec_t *member)
{
	if (!member->open) {
		return;
	}
	member->open = 0;
	instance->open_count--;
	kvd_member_close_spaces(core, member);
	if (member->room_wanted > 0) {
		member->room_wanted = 0;
		kvd_list_remove(&core->ns[instance->ns]->room_waiters, &core->members,
				offsetof(kvd_member_rec_t, of_room), kvd_id_index(member->id));
	}
	if (instance->handovers > 0) {
		kvd_handovers_sweep(core);
	}
	kvd_puts_revoke(core, instance, instance->open_count == 0 ? NULL : member);
	if (instance->open_count == 0) {
		end_leases(core, instance);
	}
}

void kvd_member_closed(kvd_core_t *core, kvd_member_t id)
{
	kvd_member_rec_t *member = kvd_member_find(core, id);
	kvd_instance_rec_t *instance;

	if (!member || !member->open) {
		return;
	}
	instance = kvd_instance_at(core, member->instance);
	core->now_ns = kv_now_ns(core->env);
	close_member(core, instance, member);
	end_instance_if_unused(core, instance);
}

void kvd_member_absorb(kvd_core_t *core, kvd_member_t closed, kvd_member_t by_id, int drained)
{
	kvd_member_rec_t *member = kvd_member_find(core, closed);
	const kvd_member_rec_t *by = kvd_member_find(core, by_id);
	kvd_instance_rec_t *instance;

	if (!member || !by || member->open || !by->open || member->instance != by->instance ||
	    member->rank != by->rank || member->role != by->role) {
		return;
	}
	instance = kvd_instance_at(core, member->instance);
	core->now_ns = kv_now_ns(core->env);
	if (drained) {
		(void)kvd_puts_drain_member(core, instance, member->local, 0);
	}
	kvd_puts_move_undrained(core, instance, member->local, by->local);
	free_member(core, instance, member);
	kvd_puts_run(core);
	kvd_events_flush(core);
}

void kvd_member_gone(kvd_core_t *core, kvd_member_t id, int died)
{
	kvd_member_rec_t *member = kvd_member_find(core, id);
	kvd_instance_rec_t *instance;

	if (!member) {
		return;
	}
	instance = kvd_instance_at(core, member->instance);
	core->now_ns = kv_now_ns(core->env);
	close_member(core, instance, member);
	if (died) {
		kvd_count(core, KV_M_MEMBERS_DIED,
			  instance->puts.head != KVD_NONE || instance->leases.head != KVD_NONE ? 1 : 0);
		kvd_puts_revoke(core, instance, NULL);
	}
	(void)kvd_puts_drain_member(core, instance, member->local, 0);
	free_member(core, instance, member);
	end_instance_if_unused(core, instance);
}

void kvd_instance_drop(kvd_core_t *core, kvd_instance_t id)
{
	kvd_instance_rec_t *instance = find_instance(core, id);

	if (instance && instance->member_count == 0) {
		end_instance(core, instance);
	}
}

uint32_t kvd_instances_reap(kvd_core_t *core, kvd_instance_t *out, uint32_t cap)
{
	uint32_t n = core->reaped_count < cap ? core->reaped_count : cap;

	memcpy(out, core->reaped, n * sizeof *out);
	core->reaped_count -= n;
	memmove(core->reaped, core->reaped + n, core->reaped_count * sizeof *out);

	return n;
}

kv_status_t kvd_member_drained(kvd_core_t *core, kvd_member_t id, const kv_msg_drained_t *ask,
			       kv_msg_drained_reply_t *reply)
{
	const kvd_member_rec_t *member = kvd_member_find(core, id);

	if (!member) {
		return KV_ERR_NOT_JOINED;
	}
	reply->freed = 0;
	if (ask->what == 0) {
		reply->freed = kvd_put_drain_member(core, ask->id, member);
	} else if (ask->what == 2) {
		reply->freed = kvd_puts_drain_member(core, kvd_instance_at(core, member->instance), member->local, 1);
	} /* else: the host's. Reads keep no slot; slabs and leaving members are daemon/io's */

	return KV_OK;
}
