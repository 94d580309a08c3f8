/* Telling the ranks of loads: the LOAD and DROP records of a step message. The bytes of a LOAD were reserved when it
 * was made (scheduler/load.c). */
#include "scheduler/lease_cache.h"
#include "scheduler/load.h"

/* Handles of the leases that are still valid, zeros for the rest. */
static uint32_t export_leases(kvx_scheduler_t *scheduler, kvx_sload_t *load, kvc_handle_t *handles)
{
	uint32_t leased = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_sload_part_t *part = &load->part[p];

		if (part->lease && kvc_lease_state(part->lease) == KVC_OK &&
		    kvc_lease_export(part->lease, &handles[p]) == KVC_OK) {
			leased++;
			continue;
		}
		handles[p] = (kvc_handle_t){0};
		kvc_release(&part->lease, 1);
		part->lease = NULL;
	}
	scheduler->stats.lease_lost += leased < load->parts;

	return leased;
}

static void emit_load(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	kvc_handle_t handles[KVX_MAX_GROUPS];
	kvx_msg_load_t *record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_LOAD, sizeof *record);

	if (export_leases(scheduler, load, handles) == 0) {
		load->flags |= KVX_MSG_NO_LEASE;
	}
	if (!record) {
		return;
	}
	record->load = load->number;
	record->space = load->space;
	record->flags = load->flags;
	record->timeout_ms = load->timeout_ms;
	record->parts = load->parts;
	record->id_len = load->request->id_len;
	(void)kvx_msg_append(&scheduler->message, load->request->id, load->request->id_len);
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_sload_part_t *part = &load->part[p];
		const kvx_msg_part_t head = {.group = scheduler->groups[part->index].id,
					     .mem = part->mem,
					     .n = part->n,
					     .first = part->first,
					     .lease = handles[p]};

		(void)kvx_msg_append(&scheduler->message, &head, sizeof head);
		(void)kvx_msg_append(&scheduler->message, part->ids, part->n * sizeof(uint32_t));
	}
}

/* The asynchronous loads of a request that has ended end early. */
static int must_emit_drop(const kvx_sload_t *load)
{
	return load->request->ended && (load->flags & KVX_MSG_ASYNC) && load->sent && !load->dropped;
}

static void emit_drop(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	kvx_msg_drop_t *record;

	if (kvx_message_reserve(scheduler, sizeof *record)) {
		record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_DROP, sizeof *record);
		record->load = load->number;
		load->dropped = 1;
	}
}

/* The leases of a piece are awaited between steps. */
static int may_emit(const kvx_sload_t *load, uint64_t now)
{
	const int awaited = kvx_load_lease_state(load) == KVC_PENDING || kvx_load_is_short(load);

	return load->number && !load->sent && !load->open &&
	       (!awaited || now - load->asked_ns >= load->timeout_ms * KVX_MS);
}

/* A rank names a request as finished after its last load, when the pieces before it have ended: that load does not go
 * before a piece that is held back. */
static int is_in_order(const kvx_sload_t *load, uint64_t now)
{
	const kvx_sload_t *piece = (load->flags & KVX_MSG_MORE) ? NULL : load->request->loads;

	while (piece && !((piece->flags & KVX_MSG_MORE) && !piece->sent && !may_emit(piece, now))) {
		piece = piece->own_next;
	}

	return !piece;
}

void kvx_loads_emit(kvx_scheduler_t *scheduler, uint64_t now)
{
	for (kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		if (may_emit(load, now) && is_in_order(load, now)) {
			emit_load(scheduler, load);
			load->sent = 1;
			load->asked_ns = load->renewed_ns = now;
			scheduler->reserved_bytes -= load->bytes;
			load->bytes = 0;
		}
		if (must_emit_drop(load)) {
			emit_drop(scheduler, load);
		}
	}
}

int kvx_loads_have_drops(const kvx_scheduler_t *scheduler)
{
	const kvx_sload_t *load = scheduler->loads;

	while (load && !must_emit_drop(load)) {
		load = load->next;
	}

	return load != NULL;
}

int kvx_loads_are_sent(const kvx_scheduler_t *scheduler)
{
	const kvx_sload_t *load = scheduler->loads;

	while (load && !load->sent) {
		load = load->next;
	}

	return load != NULL;
}
