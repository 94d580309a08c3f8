/* Bytes that entries may keep, and members that wait for some of them. */
#include "core/handover/handover_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"

#define ROOM_QUANTUM 64u /* members of a namespace looked at */

static uint64_t kept_bytes(const kvd_core_t *core, uint32_t ns)
{
	return core->ns[ns]->handover_bytes[KVD_HOST_MEM] + core->ns[ns]->tail_bytes;
}

uint64_t kvd_handover_room_left(const kvd_core_t *core, uint32_t ns)
{
	uint64_t most = kvd_share_handover_max(core, ns), kept = kept_bytes(core, ns);

	return most > kept ? most - kept : 0;
}

int kvd_handover_is_within_share(const kvd_core_t *core, uint32_t ns, uint64_t bytes)
{
	return kvd_share_irreclaimable(core, ns, KVD_HOST_MEM) + bytes <= core->ns[ns]->share[KVD_SHARE_CPU];
}

void kvd_handover_await_room(kvd_core_t *core, uint32_t ns, kvd_member_rec_t *member, uint64_t bytes)
{
	if (member->room_wanted == 0) {
		kvd_list_push(&core->ns[ns]->room_waiters, &core->members, offsetof(kvd_member_rec_t, of_room),
			      kvd_id_index(member->id));
	}
	/* Of several refusals the smallest is the first to fit; the others ask again then. */
	if (member->room_wanted == 0 || bytes < member->room_wanted) {
		member->room_wanted = bytes > 0 ? bytes : 1;
	}
	member->room_kept = kept_bytes(core, ns);
	member->room_irreclaimable = kvd_share_irreclaimable(core, ns, KVD_HOST_MEM);
}

/* Would the request that was refused be answered otherwise now? Only when something has been given back since: so a
 * member that asks again and is refused again does not hear of the same room twice. */
static int has_room(const kvd_core_t *core, uint32_t ns, const kvd_member_rec_t *member)
{
	return (kept_bytes(core, ns) < member->room_kept ||
		kvd_share_irreclaimable(core, ns, KVD_HOST_MEM) < member->room_irreclaimable) &&
	       member->room_wanted <= kvd_handover_room_left(core, ns) &&
	       kvd_handover_is_within_share(core, ns, member->room_wanted);
}

static void notify_some(kvd_core_t *core, uint32_t ns)
{
	kvd_list_t *list = &core->ns[ns]->room_waiters;
	const kv_msg_t msg = {.handover_room = {.bytes = kvd_handover_room_left(core, ns)}};
	uint32_t next, id = list->head;

	for (uint32_t left = ROOM_QUANTUM; left > 0 && id != KVD_NONE; left--, id = next) {
		kvd_member_rec_t *member = kvd_obj_at(&core->members, id);

		next = member->of_room.next;
		if (has_room(core, ns, member)) {
			member->room_wanted = 0;
			kvd_list_remove(list, &core->members, offsetof(kvd_member_rec_t, of_room), id);
			kvd_member_notify(core, member->id, KV_CODE_HANDOVER_ROOM, &msg);
		}
	}
}

void kvd_handover_room_run(kvd_core_t *core)
{
	for (uint32_t n = 0; n < core->ns_count; n++) {
		if (core->ns[n]->room_waiters.head != KVD_NONE) {
			notify_some(core, n);
		}
	}
}
