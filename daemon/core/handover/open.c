/* Layers of an unfinished put: the consumer's lease on them, and what it is told. */
#include "core/handover/handover_impl.h"
#include "core/lease/lease.h"

kv_status_t kvd_handover_lease(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_lease_t *ask,
			       kv_msg_handover_lease_reply_t *reply)
{
	kvd_handover_call_t call = {0};
	kvd_put_t *put;
	kvd_lease_t *lease;
	kv_status_t status = kvd_handover_find_number(core, ns, member, ask->number, &call);

	if (status != KV_OK) {
		return status;
	}
	if (!kvd_handover_is_side(&call.entry->consumer, &call)) {
		return KV_ERR_NOT_FOUND;
	}
	put = kvd_handover_open_put(core, call.entry);
	/* What becomes visible is leased by its keys; the slot of what goes through the disk first is free then. */
	if (!put || put->next > put->already || put->entries[put->next].transit) {
		return KV_MISS;
	}
	lease = kvd_lease_find(core, put->open_lease);
	if (lease && lease->put == put->id) {
		return KV_ERR_EXISTS;
	}
	status = kvd_lease_open(core, call.member, put, ask->ttl_ms, &lease);
	if (status != KV_OK) {
		return status;
	}
	put->open_lease = lease->id;
	*reply = (kv_msg_handover_lease_reply_t){
		.lease = lease->id,
		.n = lease->n,
		.skip = lease->skip,
		.group = put->group,
		.offset = (uint64_t)((uint8_t *)lease->header - call.instance->memory),
		.ttl_ms = (uint32_t)((lease->expiry_ns - core->now_ns) / 1000000u),
	};

	return KV_OK;
}

void kvd_handovers_moved_run(kvd_core_t *core)
{
	while (core->moved_handovers.head != KVD_NONE) {
		kvd_handover_t *entry = kvd_handover_at(core, core->moved_handovers.head);

		entry->is_moved = 0;
		kvd_list_remove(&core->moved_handovers, &core->handovers, offsetof(kvd_handover_t, of_moved),
				entry->self);
		entry = kvd_handover_settle(core, entry);
		if (entry) {
			kvd_handover_notify(core, entry, &entry->consumer);
		}
	}
}
