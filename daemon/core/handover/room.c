/* Bytes that entries may keep, and members that wait for some of them. */
#include "core/handover/handover_impl.h"
#include "core/base/find.h"
#include "core/base/share.h"

#define ROOM_QUANTUM 64u  /* members of a namespace looked at */
#define LOOK         256u /* entries that have waited longest: one of them may give way */
#define ANY_MEMORY   UINT32_MAX

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

/* ---- what nobody has claimed ----------------------------------------------------------------- */

/* No consumer has come in time since its last chunk, or since it was given back. */
static int has_had_its_time(const kvd_core_t *core, const kvd_handover_t *entry)
{
	return core->now_ns >= entry->expiry_ns - entry->ttl_ns + core->config.handover_min_ttl_ns;
}

/* What the entry's producer has; those whose producer has gone are together. */
static kvd_unclaimed_t *unclaimed_of(kvd_core_t *core, const kvd_handover_t *entry, kvd_unclaimed_t *orphans)
{
	kvd_instance_rec_t *instance = kvd_instance_at(core, kvd_id_index(entry->producer.instance));

	return entry->producer.member != 0 && instance->id == entry->producer.instance ? &instance->unclaimed : orphans;
}

/* What it keeps of what another lacks: bytes in that memory, or one entry. */
static uint64_t weigh(const kvd_core_t *core, const kvd_handover_t *entry, uint32_t memory)
{
	const kvd_space_t *space = core->ns[entry->ns]->numbers[entry->space];

	return memory == ANY_MEMORY ? 1 : space->memory == memory ? kvd_handover_bytes(core, entry) : 0;
}

/* The oldest of the producer that has most; NULL: all of them have less than is wanted. */
static kvd_handover_t *find_unclaimed(kvd_core_t *core, uint32_t ns, uint32_t memory, uint64_t wanted,
				      const kvd_handover_t *except)
{
	kvd_unclaimed_t orphans = {.oldest = KVD_NONE}, *most = &orphans, *of;
	uint32_t id = core->ns[ns]->unclaimed.head;
	uint64_t all = 0;

	for (uint32_t i = core->instance_list.head; i != KVD_NONE; i = kvd_instance_at(core, i)->of_core.next) {
		kvd_instance_at(core, i)->unclaimed = orphans;
	}
	for (uint32_t left = LOOK; left > 0 && id != KVD_NONE; left--) {
		const kvd_handover_t *entry = kvd_handover_at(core, id);
		const uint64_t has = weigh(core, entry, memory);

		if (!has_had_its_time(core, entry)) {
			break; /* those after it are younger */
		}
		if (entry != except && has > 0) {
			of = unclaimed_of(core, entry, &orphans);
			of->oldest = of->oldest == KVD_NONE ? id : of->oldest;
			of->has += has;
			all += has;
			most = of->has > most->has ? of : most;
		}
		id = entry->of_unclaimed.next;
	}

	return most->oldest == KVD_NONE || all < wanted ? NULL : kvd_handover_at(core, most->oldest);
}

/* Its late consumer is told. */
static int give_way(kvd_core_t *core, kvd_handover_t *entry)
{
	if (entry) {
		kvd_count(core, KV_M_HANDOVERS_GAVE_WAY, 1);
		kvd_handover_fail(core, entry, KV_ERR_EXPIRED);
		kvd_handover_notify(core, entry, &entry->producer);
		kvd_handover_leave_side(core, &entry->producer);
	}

	return entry != NULL;
}

kv_status_t kvd_handover_may_join(kvd_core_t *core, const kvd_handover_call_t *call)
{
	const uint32_t ns = call->space->ns;
	uint32_t id = core->ns[ns]->unclaimed.head;

	if (call->instance->handovers < core->config.max_leases) {
		return KV_OK;
	}
	for (uint32_t left = LOOK; left > 0 && id != KVD_NONE; left--) {
		kvd_handover_t *entry = kvd_handover_at(core, id);

		if (!has_had_its_time(core, entry)) {
			break;
		}
		if (entry != call->entry && entry->producer.instance == call->instance->id) {
			(void)give_way(core, entry);
			return KV_OK;
		}
		id = entry->of_unclaimed.next;
	}

	return KV_ERR_LIMIT;
}

int kvd_handover_make_room(kvd_core_t *core, uint32_t ns, uint32_t memory, uint64_t bytes, const kvd_handover_t *except)
{
	const uint64_t left = kvd_handover_room_left(core, ns);
	kvd_handover_t *entry = find_unclaimed(core, ns, memory, bytes > left ? bytes - left : 0, except);

	return give_way(core, entry);
}

kv_status_t kvd_handover_make_entry(kvd_core_t *core, uint32_t ns)
{
	const kvd_list_t *failed = &core->ns[ns]->failed;

	if (core->ns[ns]->handovers < core->config.max_handovers) {
		return KV_OK;
	}
	if (failed->head == KVD_NONE) {
		(void)give_way(core, find_unclaimed(core, ns, ANY_MEMORY, 1, NULL));
	}
	if (failed->head == KVD_NONE) {
		return KV_ERR_LIMIT;
	}
	kvd_handover_forget(core, kvd_handover_at(core, failed->head), KV_ERR_EXPIRED);

	return KV_OK;
}

/* ---- who waits ------------------------------------------------------------------------------- */

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

static int is_free(const kvd_core_t *core, uint32_t ns, uint64_t bytes)
{
	return bytes <= kvd_handover_room_left(core, ns) && kvd_handover_is_within_share(core, ns, bytes);
}

/* Would the request that was refused be answered otherwise now? Only when something has been given back since: so a
 * member that asks again and is refused again does not hear of the same room twice. */
static int has_room(const kvd_core_t *core, uint32_t ns, const kvd_member_rec_t *member)
{
	return (kept_bytes(core, ns) < member->room_kept ||
		kvd_share_irreclaimable(core, ns, KVD_HOST_MEM) < member->room_irreclaimable) &&
	       is_free(core, ns, member->room_wanted);
}

/* In rotation: those that go on waiting are the last to be looked at again. */
static void notify_some(kvd_core_t *core, uint32_t ns)
{
	const size_t link = offsetof(kvd_member_rec_t, of_room);
	kvd_list_t *list = &core->ns[ns]->room_waiters;
	const uint32_t last = list->tail;
	uint32_t id = KVD_NONE;

	for (uint32_t left = ROOM_QUANTUM; left > 0 && id != last; left--) {
		kvd_member_rec_t *member = kvd_obj_at(&core->members, id = list->head);

		if (!is_free(core, ns, member->room_wanted)) {
			(void)kvd_handover_make_room(core, ns, 0, member->room_wanted, NULL);
		}
		kvd_list_remove(list, &core->members, link, id);
		if (has_room(core, ns, member)) {
			const kv_msg_t msg = {.handover_room = {.bytes = kvd_handover_room_left(core, ns)}};

			member->room_wanted = 0;
			kvd_member_notify(core, member->id, KV_CODE_HANDOVER_ROOM, &msg);
		} else {
			kvd_list_push(list, &core->members, link, id);
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
