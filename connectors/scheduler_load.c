/* Loads: leased when the engine has given the blocks, told to the ranks in the step's plan, over when all ranks have said so.
 *
 * Once told, a load's leases live until every rank has reported, also when the request is gone: a rank reads them until then. Should a rank never
 * report, they are given back after a few times the ranks' own deadline. A load within a step is told in that step's plan whatever the daemon has
 * said by then; one beside the steps when its lease is there.
 */
#include "scheduler_impl.h"

#define GIVE_UP  4u   /* times load_ms */
#define LEASE_MS 100u /* a load beside the steps waits so long for its lease, plan after plan */

static size_t padded(size_t len)
{
	return (len + 7u) & ~(size_t)7u;
}

size_t kvx_load_bytes(const kvx_scheduler_t *scheduler, uint32_t units)
{
	size_t bytes = sizeof(kvx_plan_load_t) + KVX_MAX_ID;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const size_t blocks = (size_t)units * scheduler->unit / scheduler->groups[g].block_tokens;

		bytes += sizeof(kvx_plan_part_t) + padded(blocks * sizeof(uint32_t));
	}

	return bytes;
}

/* ---- asking ------------------------------------------------------------------------------------------------------------------ */

/* Which blocks of each group are to come; returns how many. */
static uint32_t ranges(const kvx_scheduler_t *scheduler, const kvc_space_t *space, const kvx_ask_t *ask, uint32_t units,
		       kvx_sload_t *load)
{
	uint32_t blocks = 0;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t local = ask->local / scheduler->groups[g].block_tokens;
		uint32_t first = 0, end = 0;

		kvc_group_range(space, scheduler->groups[g].id, units, &first, &end);
		first = first > local ? first : local;
		if (first < end) {
			load->part[load->parts++] =
				(kvx_sload_part_t){.group = scheduler->groups[g].id, .first = first, .n = end - first};
			blocks += end - first;
		}
	}

	return blocks;
}

/* The ids of the blocks to be written; of places nobody has given a block for: none. */
static void name_blocks(const kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_sload_part_t *part,
			uint32_t *ids)
{
	const kvx_request_group_t *group = &request->groups[kvx_scheduler_group(scheduler, part->group)];

	for (uint32_t i = 0; i < part->n; i++) {
		ids[i] = part->first + i < group->n ? group->places[part->first + i].id : KVX_NO_BLOCK;
	}
}

static void lease(kvx_scheduler_t *scheduler, kvc_space_t *space, kvx_key_view_t *view, uint32_t units,
		  kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvc_want_t want = {
			.struct_size = sizeof want,
			.group = load->part[p].group,
			.n = units,
			.skip = load->part[p].first,
			.ttl_ms = scheduler->load_ms * 2u,
			.source = &view->source,
		};

		if (view->n < units || kvc_lease_start(space, &want, &load->part[p].lease) != KVC_OK) {
			load->part[p].lease = NULL;
		} else if (view->bad) {
			kvc_release(&load->part[p].lease, 1);
			load->part[p].lease = NULL;
		}
	}
}

/* A load in one piece of memory: itself, the ids, the request's id. `shape` has the parts. */
static kvx_sload_t *create(kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_sload_t *shape,
			   uint32_t blocks)
{
	kvx_sload_t *load = kv_alloc(scheduler->env, sizeof *load + blocks * sizeof(uint32_t) + request->id_len);
	uint32_t *ids;

	if (!load) {
		return NULL;
	}
	*load = *shape;
	ids = (uint32_t *)(void *)(load + 1);
	for (uint32_t p = 0; p < load->parts; p++) {
		load->part[p].ids = ids;
		name_blocks(scheduler, request, &load->part[p], ids);
		for (uint32_t i = 0; i < load->part[p].n; i++) {
			load->blocks += ids[i] != KVX_NO_BLOCK;
		}
		ids += load->part[p].n;
	}
	load->id = (char *)ids;
	load->id_len = request->id_len;
	memcpy(load->id, request->id, request->id_len);
	load->serial = request->serial;
	load->left = scheduler->writer_count;

	return load;
}

/* The LOAD record; its parts' ids are the load's own, or those of the request where there was no memory for a load. */
static void tell(kvx_scheduler_t *scheduler, const kvx_sload_t *load, const kvx_request_t *request,
		 const kvc_handle_t *handles)
{
	kvx_plan_load_t *record = kvx_bytes_record(&scheduler->plan, KVX_RECORD_LOAD, sizeof *record);

	if (!record) {
		return;
	}
	record->load = load->number;
	record->space = load->space;
	record->flags = load->flags;
	record->timeout_ms = scheduler->load_ms;
	record->parts = load->parts;
	record->id_len = request ? request->id_len : load->id_len;
	(void)kvx_bytes_append(&scheduler->plan, request ? request->id : load->id, record->id_len);
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_sload_part_t *part = &load->part[p];
		const kvx_plan_part_t head = {
			.group = part->group, .n = part->n, .first = part->first, .lease = handles[p]};
		uint32_t *ids;

		(void)kvx_bytes_append(&scheduler->plan, &head, sizeof head);
		ids = kvx_bytes_append(&scheduler->plan, part->ids, part->n * sizeof(uint32_t));
		if (ids && request) {
			name_blocks(scheduler, request, part, ids);
		}
	}
}

static void add(kvx_scheduler_t *scheduler, kvx_sload_t *load, uint32_t units)
{
	load->next = NULL;
	*scheduler->loads_end = load;
	scheduler->loads_end = &load->next;
	scheduler->load_count++;
	load->bytes = kvx_load_bytes(scheduler, units);
	scheduler->promised += load->bytes;
}

void kvx_scheduler_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_hit_t *hit)
{
	static const kvc_handle_t none[KVX_MAX_GROUPS];
	kvx_request_t *request =
		kvx_ask_is_sound(ask) ? kvx_requests_get(&scheduler->requests, ask->id, ask->id_len) : NULL;
	kvx_sload_t shape = {.asked_ns = kv_now_ns(scheduler->env), .step = scheduler->step};
	kvx_key_view_t view;
	kvx_sload_t *load;
	uint32_t units, blocks;

	if (!request || !hit || hit->tokens == 0 || request->space >= scheduler->space_count ||
	    !scheduler->spaces[request->space].space) {
		return;
	}
	units = (ask->local + hit->tokens) / scheduler->unit;
	shape.number = ++scheduler->load_number;
	shape.space = request->space;
	shape.flags = hit->async ? KVX_PLAN_ASYNC : 0;
	shape.disk_tokens = hit->disk_tokens;
	shape.cpu_tokens = hit->tokens - hit->disk_tokens;
	shape.renewed_ns = shape.asked_ns;
	blocks = ranges(scheduler, scheduler->spaces[shape.space].space, ask, units, &shape);
	scheduler->stats.loads++;
	scheduler->stats.loads_async += hit->async != 0;
	scheduler->stats.load_tokens += hit->tokens;
	scheduler->stats.disk_tokens += hit->disk_tokens;
	scheduler->sync_loads += !hit->async;

	load = create(scheduler, request, &shape, blocks);
	if (!load) {
		kvx_plan_begin(scheduler);
		shape.flags |= KVX_PLAN_DEAD;
		tell(scheduler, &shape, request, none);
		request->failed = 1;
		scheduler->stats.lease_lost++;
		scheduler->stats.loads_failed++;
		return;
	}
	kvx_keys_view(scheduler, ask, request, shape.space, ask->local + hit->tokens, &view);
	lease(scheduler, scheduler->spaces[shape.space].space, &view, units, load);
	add(scheduler, load, units);
}

/* ---- telling the ranks ------------------------------------------------------------------------------------------------------- */

static int is_pending(const kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		if (load->part[p].lease && kvc_lease_state(load->part[p].lease) == KVC_PENDING) {
			return 1;
		}
	}

	return 0;
}

int kvx_loads_unanswered(const kvx_scheduler_t *scheduler)
{
	for (const kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		if (!load->sent && !(load->flags & KVX_PLAN_ASYNC) && is_pending(load)) {
			return 1;
		}
	}

	return 0;
}

int kvx_loads_wait(const kvx_scheduler_t *scheduler)
{
	for (const kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		if (!load->sent) {
			return 1;
		}
	}

	return 0;
}

/* What the answers were: handles of what was leased, nothing for the rest. A lease that comes later is given back by libkvc. */
static uint32_t settle(kvx_scheduler_t *scheduler, kvx_sload_t *load, kvc_handle_t *handles)
{
	uint32_t leased = 0;

	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_sload_part_t *part = &load->part[p];
		const kvc_status_t state = part->lease ? kvc_lease_state(part->lease) : KVC_MISS;

		if (state == KVC_OK && kvc_lease_export(part->lease, &handles[p]) == KVC_OK) {
			leased++;
			continue;
		}
		handles[p] = (kvc_handle_t){0};
		scheduler->stats.late_answers += state == KVC_PENDING;
		kvc_release(&part->lease, 1);
		part->lease = NULL;
	}
	scheduler->stats.lease_lost += leased < load->parts;

	return leased;
}

/* After the loads: the request may be gone in the very step that began to load for it. */
static void tell_drops(kvx_scheduler_t *scheduler)
{
	for (kvx_sload_t *load = scheduler->loads; load && scheduler->drop_count; load = load->next) {
		kvx_plan_drop_t *record;

		if (!load->drop || !load->sent || !kvx_plan_room(scheduler, sizeof *record)) {
			continue;
		}
		record = kvx_bytes_record(&scheduler->plan, KVX_RECORD_DROP, sizeof *record);
		record->load = load->number;
		load->drop = 0;
		scheduler->drop_count--;
	}
}

/* Nobody waits for it in this step, and the answer may come yet. */
static int may_wait(const kvx_sload_t *load, uint64_t now)
{
	return (load->flags & KVX_PLAN_ASYNC) && now - load->asked_ns < LEASE_MS * KVX_MS && is_pending(load);
}

void kvx_loads_tell(kvx_scheduler_t *scheduler, uint64_t now)
{
	for (kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		kvc_handle_t handles[KVX_MAX_GROUPS];

		if (load->sent || (may_wait(load, now) && kvx_is_alive(scheduler))) {
			continue;
		}
		if (settle(scheduler, load, handles) == 0) {
			load->flags |= KVX_PLAN_DEAD;
		}
		tell(scheduler, load, NULL, handles);
		load->sent = 1;
		scheduler->promised -= load->bytes;
		load->asked_ns = load->renewed_ns = now;
	}

	tell_drops(scheduler);
}

void kvx_loads_drop(kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	for (kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		if (load->serial != request->serial || load->gone) {
			continue;
		}
		load->gone = 1;
		load->drop = (load->flags & KVX_PLAN_ASYNC) != 0;
		scheduler->drop_count += (uint32_t)load->drop;
	}
}

/* ---- the end ----------------------------------------------------------------------------------------------------------------- */

static void release(kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		kvc_release(&load->part[p].lease, 1);
		load->part[p].lease = NULL;
	}
}

static void destroy(kvx_scheduler_t *scheduler, kvx_sload_t **link)
{
	kvx_sload_t *load = *link;

	release(load);
	scheduler->drop_count -= (uint32_t)load->drop;
	*link = load->next;
	if (scheduler->loads_end == &load->next) {
		scheduler->loads_end = link;
	}
	scheduler->load_count--;
	kv_free(scheduler->env, load);
}

typedef struct kvx_spoil {
	kvx_scheduler_t *scheduler;
	const kvx_request_t *by;
	uint32_t step; /* of the load */
} kvx_spoil_t;

/* One that has bad blocks in its table: all it computes is garbage. */
static void spoil_one(void *ctx, kvx_request_t *request)
{
	const kvx_spoil_t *spoil = ctx;
	kvx_scheduler_t *scheduler = spoil->scheduler;

	for (uint32_t g = 0; g < scheduler->group_count && request != spoil->by && !request->outdated; g++) {
		const kvx_request_group_t *group = &request->groups[g];

		for (uint32_t i = 0; i < group->n && !request->outdated; i++) {
			const kvx_place_t *place = &group->places[i];

			request->outdated = place->id != KVX_NO_BLOCK && scheduler->blocks[place->id].bad &&
					    scheduler->blocks[place->id].gen == place->gen;
		}
		if (request->outdated) {
			kvx_puts_revoke(scheduler, request, spoil->step);
		}
	}
}

/* An engine may name the blocks of a load within a step in its own cache at once, and not take them out when the load fails: until the request has
 * computed them again, others find garbage there. */
static void spoil(kvx_scheduler_t *scheduler, const kvx_sload_t *load, kvx_request_t *request)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		const kvx_sload_part_t *part = &load->part[p];
		const kvx_request_group_t *group =
			request ? &request->groups[kvx_scheduler_group(scheduler, part->group)] : NULL;

		for (uint32_t i = 0; i < part->n; i++) {
			if (part->ids[i] != KVX_NO_BLOCK) {
				scheduler->blocks[part->ids[i]].bad = 1;
			}
		}
		for (uint32_t i = part->first; group && i < group->n; i++) {
			if (group->places[i].id != KVX_NO_BLOCK) {
				scheduler->blocks[group->places[i].id].bad = 1;
			}
		}
	}
	if (request) {
		request->spoilt = request->groups[0].n * scheduler->groups[0].block_tokens;
	}
	kvx_requests_each(&scheduler->requests, spoil_one, &(kvx_spoil_t){scheduler, request, load->step});
}

/* Every load of which the ranks have brought less than was promised. */
static void fail(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	kvx_request_t *request = kvx_requests_same(&scheduler->requests, load->id, load->id_len, load->serial);

	if (load->failed) {
		return;
	}
	load->failed = 1;
	scheduler->stats.loads_failed += !load->gone;
	if (!(load->flags & KVX_PLAN_ASYNC)) {
		spoil(scheduler, load, request);
	}
	if (request) {
		request->failed = 1;
		kvx_request_restart(request); /* a damaged block has been dropped meanwhile */
		kvx_puts_revoke(scheduler, request, load->step);
	}
}

static void learn(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	kvx_request_t *request = kvx_requests_same(&scheduler->requests, load->id, load->id_len, load->serial);

	if (load->failed && !load->timed_out) {
		return; /* how fast it failed says nothing */
	}
	kvx_guard_loaded(&scheduler->guard, load->cpu_tokens, load->disk_tokens, load->ns);
	if (request && !load->failed) {
		request->cpu_tokens += load->cpu_tokens;
		request->disk_tokens += load->disk_tokens;
		request->load_ns += load->ns;
	}
}

void kvx_load_reported(kvx_scheduler_t *scheduler, const kvx_report_loaded_t *report)
{
	kvx_sload_t **link = &scheduler->loads;
	kvx_sload_t *load;

	while (*link && (*link)->number != report->load) {
		link = &(*link)->next;
	}
	load = *link;
	if (!load || !load->sent) {
		return; /* given up already, or dead from the start */
	}
	load->ns = report->ns > load->ns ? report->ns : load->ns;
	if (report->status != KVC_OK || report->blocks < load->blocks) {
		load->timed_out |= report->status == KVC_ERR_TIMEOUT;
		fail(scheduler, load);
	}
	load->left--;
	if (load->left == 0) {
		scheduler->stats.loads_done += !load->failed;
		learn(scheduler, load);
		destroy(scheduler, link);
	}
}

/* While ranks are still reading: keep the leases alive, but not for ever. */
void kvx_loads_keep(kvx_scheduler_t *scheduler, uint64_t now)
{
	const uint64_t load_ns = scheduler->load_ms * KVX_MS;
	kvx_sload_t **link = &scheduler->loads;

	while (*link) {
		kvx_sload_t *load = *link;

		if (load->sent && now - load->asked_ns > GIVE_UP * load_ns) {
			fail(scheduler, load);
			destroy(scheduler, link);
			continue;
		}
		if (load->sent && now - load->renewed_ns > load_ns) {
			for (uint32_t p = 0; p < load->parts; p++) {
				if (load->part[p].lease) {
					(void)kvc_lease_renew(load->part[p].lease, scheduler->load_ms * 2u);
				}
			}
			load->renewed_ns = now;
		}
		link = &load->next;
	}
}

void kvx_loads_close(kvx_scheduler_t *scheduler)
{
	while (scheduler->loads) {
		destroy(scheduler, &scheduler->loads);
	}
}
