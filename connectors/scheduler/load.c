/* Loads: a cached lease (scheduler/lease_cache.h) is bound to the engine's blocks, goes to the ranks in the step
 * message, and ends when every rank has reported it.
 *
 * Once emitted, a load keeps its leases until every rank has reported, also when the request is gone: a rank may still
 * read them. If a rank never reports, the leases are released after GIVE_UP times the ranks' own deadline. */
#include "scheduler/load.h"
#include "scheduler/config.h"
#include "scheduler/lease_cache.h"
#include "scheduler/message_buffer.h"
#include "scheduler/requests.h"
#include "scheduler/save.h"

#define GIVE_UP 4u /* times load_ms */

/* ---- taking what is leased ------------------------------------------------------------------- */

/* Fill in the engine's blocks; KVX_NO_BLOCK where the table has no block yet. */
static void bind_blocks(const kvx_scheduler_t *scheduler, const kvx_request_t *request, kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_sload_part_t *part = &load->part[p];
		const kvx_request_group_t *group = &request->groups[kvx_scheduler_find_group(scheduler, part->group)];

		for (uint32_t i = 0; i < part->n; i++) {
			const uint32_t at = part->first + i;

			part->ids[i] = at < group->n ? group->entries[at].id : KVX_NO_BLOCK;
			load->blocks += part->ids[i] != KVX_NO_BLOCK;
		}
	}
	load->ranks_left = scheduler->writer_count;
}

static void emit_load(kvx_scheduler_t *scheduler, const kvx_sload_t *load, const kvc_handle_t *handles)
{
	kvx_msg_load_t *record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_LOAD, sizeof *record);

	if (!record) {
		return;
	}
	record->load = load->number;
	record->space = load->space;
	record->flags = load->flags;
	record->timeout_ms = load->timeout_ms;
	record->parts = load->parts;
	record->id_len = load->id_len;
	(void)kvx_msg_append(&scheduler->message, load->id, load->id_len);
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_sload_part_t *part = &load->part[p];
		const kvx_msg_part_t head = {
			.group = part->group, .n = part->n, .first = part->first, .lease = handles[p]};

		(void)kvx_msg_append(&scheduler->message, &head, sizeof head);
		(void)kvx_msg_append(&scheduler->message, part->ids, part->n * sizeof(uint32_t));
	}
}

/* What match() has reserved for the record is the load's now. */
static void append_load(kvx_scheduler_t *scheduler, kvx_request_t *request, kvx_sload_t *load)
{
	load->next = NULL;
	*scheduler->loads_end = load;
	scheduler->loads_end = &load->next;
	scheduler->load_count++;
	load->bytes = request->tentative_bytes;
	kvx_buffer_reserve_tentative(scheduler, request, 0);
	scheduler->reserved_bytes += load->bytes;
}

/* ---- blocks that were not filled ------------------------------------------------------------- */

typedef struct kvx_invalidation {
	kvx_scheduler_t *scheduler;
	const kvx_request_t *by;
	uint32_t step; /* of the load */
} kvx_invalidation_t;

/* A request with garbage in its table computes garbage: none of it is saved. */
static void invalidate_request(void *ctx, kvx_request_t *request)
{
	const kvx_invalidation_t *invalidation = ctx;
	const kvx_request_group_t *group = &request->groups[0]; /* several groups have no synchronous loads */
	uint32_t i = 0;

	if (request == invalidation->by) {
		return;
	}
	while (i < group->n && !kvx_entry_is_garbage(invalidation->scheduler, &group->entries[i])) {
		i++;
	}
	if (i < group->n) {
		request->unsavable = 1;
		kvx_puts_revoke(invalidation->scheduler, request->serial, invalidation->step);
	}
}

void kvx_loads_mark_unverified(kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	for (kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		const kvx_sload_part_t *part = &load->part[0];
		const kvx_request_group_t *group = &request->groups[0];

		if (load->serial != request->serial || (load->flags & KVX_MSG_ASYNC) || load->blocks_lost) {
			continue;
		}
		load->blocks_lost = 1;
		for (uint32_t i = part->first; i < group->n; i++) {
			const kvx_table_entry_t *entry = &group->entries[i];

			if (kvx_entry_is_current(scheduler, entry) &&
			    scheduler->blocks[entry->id].unverified_by != KVX_UNNAMED) {
				scheduler->blocks[entry->id].unverified_by = load->number;
			}
		}
	}
}

static void invalidate_unverified(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	for (uint32_t i = 0; load->blocks_lost && i < scheduler->max_blocks; i++) {
		kvx_block_t *block = &scheduler->blocks[i];

		if (block->unverified_by == load->number) {
			block->gen |= 1u;
			block->unverified_by = KVX_UNNAMED;
			scheduler->unnamed++;
		}
	}
}

uint32_t kvx_scheduler_take_invalidated(kvx_scheduler_t *scheduler, uint32_t *ids, uint32_t cap)
{
	uint32_t n = 0;

	for (uint32_t i = 0; scheduler->unnamed > 0 && n < cap && i < scheduler->max_blocks; i++) {
		if (scheduler->blocks[i].unverified_by == KVX_UNNAMED) {
			scheduler->blocks[i].unverified_by = 0;
			scheduler->unnamed--;
			ids[n++] = i;
		}
	}

	return n;
}

/* The load's own blocks, and those computed after them. */
static void invalidate_table(kvx_scheduler_t *scheduler, const kvx_sload_t *load, kvx_request_t *request)
{
	const kvx_request_group_t *group = &request->groups[0];

	for (uint32_t i = load->part[0].first; i < group->n; i++) {
		if (kvx_entry_is_current(scheduler, &group->entries[i])) {
			scheduler->blocks[group->entries[i].id].gen |= 1u;
		}
	}
	if (!request->unsavable) { /* else what it computes again comes after other garbage */
		request->garbage_until = group->n * scheduler->groups[0].block_tokens;
	}
}

/* An engine may have entered the blocks of a synchronous load in its prefix cache when it allocated them, and keep them
 * there when the load fails (docs/decisions/019). Until the request has computed them again, every request that finds
 * them computes garbage. So its blocks are marked invalid, and puts that depend on them are revoked. */
static void invalidate_dependents(kvx_scheduler_t *scheduler, const kvx_sload_t *load, kvx_request_t *request)
{
	request = load->blocks_lost ? NULL : request; /* the table names other blocks by now */
	if (request) {
		invalidate_table(scheduler, load, request);
	}
	invalidate_unverified(scheduler, load);
	kvx_requests_for_each(&scheduler->requests, invalidate_request,
			      &(kvx_invalidation_t){scheduler, request, load->step});
}

void kvx_scheduler_start_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_hit_t *hit)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	kvx_sload_t *load;

	if (!request || !hit || hit->tokens == 0 || request->tentative_bytes == 0) {
		return; /* nothing was promised */
	}
	load = kvx_lease_cache_take(scheduler, ask, request, (ask->local + hit->tokens) / scheduler->unit);
	if (!load) {
		return;
	}
	scheduler->stats.loads++;
	scheduler->stats.loads_async += hit->async != 0;
	scheduler->stats.load_tokens += hit->tokens;
	scheduler->stats.disk_tokens += hit->disk_tokens;
	request->load_status = KVC_PENDING;
	load->number = ++scheduler->load_number;
	load->step = scheduler->step;
	load->flags = hit->async ? KVX_MSG_ASYNC : 0;
	load->timeout_ms = ask->load_ms ? ask->load_ms : scheduler->load_ms;
	load->disk_tokens = hit->disk_tokens;
	load->cpu_tokens = hit->tokens - hit->disk_tokens;
	if (!hit->async) {
		scheduler->sync_loads++;
		load->sync_ns = kvx_cost_model_load_ns(&scheduler->cost_model, load->cpu_tokens, load->disk_tokens);
	}
	bind_blocks(scheduler, request, load);
	append_load(scheduler, request, load);
}

/* ---- telling the ranks ----------------------------------------------------------------------- */

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

/* After the loads, since a request may be gone in the very step that begins to load for it. */
static void emit_drops(kvx_scheduler_t *scheduler)
{
	for (kvx_sload_t *load = scheduler->loads; load && scheduler->drop_count; load = load->next) {
		kvx_msg_drop_t *record;

		if (!load->must_emit_drop || !load->sent || !kvx_buffer_reserve(scheduler, sizeof *record)) {
			continue;
		}
		record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_DROP, sizeof *record);
		record->load = load->number;
		load->must_emit_drop = 0;
		scheduler->drop_count--;
	}
}

void kvx_loads_emit(kvx_scheduler_t *scheduler, uint64_t now)
{
	for (kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		kvc_handle_t handles[KVX_MAX_GROUPS];

		if (load->sent) {
			continue;
		}
		if (export_leases(scheduler, load, handles) == 0) {
			load->flags |= KVX_MSG_NO_LEASE;
		}
		emit_load(scheduler, load, handles);
		load->sent = 1;
		scheduler->reserved_bytes -= load->bytes;
		load->asked_ns = load->renewed_ns = now;
	}

	emit_drops(scheduler);
}

void kvx_loads_cancel(kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	for (kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		if (load->serial != request->serial || load->cancelled) {
			continue;
		}
		load->cancelled = 1;
		load->must_emit_drop = (load->flags & KVX_MSG_ASYNC) != 0;
		scheduler->drop_count += (uint32_t)load->must_emit_drop;
	}
}

/* ---- the end --------------------------------------------------------------------------------- */

static void remove_load(kvx_scheduler_t *scheduler, kvx_sload_t **link)
{
	kvx_sload_t *load = *link;

	scheduler->drop_count -= (uint32_t)load->must_emit_drop;
	*link = load->next;
	if (scheduler->loads_end == &load->next) {
		scheduler->loads_end = link;
	}
	scheduler->load_count--;
	kvx_load_free(scheduler, load);
}

static uint32_t miss_reason(kvc_status_t failure)
{
	switch (failure) {
	case KVC_MISS:
		return KV_WHY_EVICTED;
	case KVC_ERR_TIMEOUT:
		return KV_WHY_TIMEOUT;
	case KVC_ERR_CORRUPT:
		return KV_WHY_CORRUPT;
	case (kvc_status_t)KV_ERR_IO:
		return KV_WHY_UNREADABLE;
	case KVC_ERR_DAEMON_STALE:
		return KV_WHY_DAEMON_STALE;
	case KVC_ERR_CLOSED:
	case KVC_ERR_REVOKED:
	case KVC_ERR_UNREACHABLE:
		return KV_WHY_NO_DAEMON;
	default:
		return KV_WHY_NONE;
	}
}

/* A rank has loaded less than was leased. */
static void fail_load(kvx_scheduler_t *scheduler, kvx_sload_t *load, kvc_status_t why)
{
	kvx_request_t *request = kvx_requests_find_serial(&scheduler->requests, load->hash, load->serial);

	if (load->failed) {
		return;
	}
	load->failed = 1;
	scheduler->stats.loads_failed += !load->cancelled;
	if (!(load->flags & KVX_MSG_ASYNC)) {
		invalidate_dependents(scheduler, load, request);
	}
	if (request) {
		request->failed = 1;
		request->load_status = why;
		request->why = miss_reason(why);
		kvx_request_restart_saving(request); /* the daemon has dropped a damaged block since */
	}
	kvx_puts_revoke(scheduler, load->serial, load->step);
}

static void add_load_sample(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	kvx_request_t *request = kvx_requests_find_serial(&scheduler->requests, load->hash, load->serial);

	if (load->failed && !load->timed_out) {
		return; /* the time of a failure says nothing about loading */
	}
	kvx_cost_model_add_load(&scheduler->cost_model, load->cpu_tokens, load->disk_tokens, load->ns,
				kv_now_ns(scheduler->env));
	if (request && !load->failed) {
		request->load_status = KVC_OK;
		request->cpu_tokens += load->cpu_tokens;
		request->disk_tokens += load->disk_tokens;
		request->load_ns += load->ns;
	}
}

void kvx_loads_take_report(kvx_scheduler_t *scheduler, const kvx_report_loaded_t *report)
{
	kvx_sload_t **link = &scheduler->loads;
	kvx_sload_t *load;

	while (*link && (*link)->number != report->load) {
		link = &(*link)->next;
	}
	load = *link;
	if (!load || !load->sent) {
		return; /* given up already */
	}
	load->ns = report->ns > load->ns ? report->ns : load->ns;
	if (report->status != KVC_OK || report->blocks < load->blocks) {
		load->timed_out |= report->status == KVC_ERR_TIMEOUT;
		fail_load(scheduler, load, report->status != KVC_OK ? report->status : KVC_MISS);
	}
	load->ranks_left--;
	if (load->ranks_left == 0) {
		scheduler->stats.loads_done += !load->failed;
		add_load_sample(scheduler, load);
		remove_load(scheduler, link);
	}
}

/* Renew leases while ranks still read, up to the limit. */
void kvx_loads_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	const uint64_t load_ns = scheduler->load_ms * KVX_MS;
	kvx_sload_t **link = &scheduler->loads;

	while (*link) {
		kvx_sload_t *load = *link;

		if (load->sent && now - load->asked_ns > (uint64_t)GIVE_UP * load->timeout_ms * KVX_MS) {
			fail_load(scheduler, load, KVC_ERR_TIMEOUT);
			remove_load(scheduler, link);
			continue;
		}
		if (load->sent && now - load->renewed_ns > load_ns) {
			kvx_load_renew_leases(scheduler, load, now);
		}
		link = &load->next;
	}
}

void kvx_loads_close(kvx_scheduler_t *scheduler)
{
	while (scheduler->loads) {
		remove_load(scheduler, &scheduler->loads);
	}
}
