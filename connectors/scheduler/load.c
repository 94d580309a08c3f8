/* Loads that the engine has admitted, to the reports of all ranks.
 *
 *   cached --admitted--> started --step message--> sent --reported by every rank--> freed
 *   open, cached --admitted--> open, started --nothing follows--> started
 *                                            --a chunk has come--> a piece, started, and what is left
 *
 * Of an open load each chunk that is handed over becomes a piece, a load of its own with its own lease; when nothing
 * follows, the rest becomes the last piece (docs/decisions/047).
 *
 * Once sent, a load keeps its leases until every rank has reported, also when the request is gone: a rank may still
 * read them. If a rank never reports, the leases are released after GIVE_UP times the ranks' own deadline. */
#include "scheduler/load.h"
#include "common/await.h"
#include "scheduler/base/requests.h"
#include "scheduler/garbage.h"
#include "scheduler/lease_cache.h"
#include "scheduler/names/spaces.h"
#include "scheduler/save.h"

#include "kv/struct.h"

#define IDLE_MS 1000u /* released when no lookup has asked for it for so long */
#define GIVE_UP 4u    /* times load_ms */

/* Fill in the engine's blocks; KVX_NO_BLOCK where the table has no block yet. */
static void bind_blocks(const kvx_scheduler_t *scheduler, const kvx_request_t *request, kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_sload_part_t *part = &load->part[p];
		const kvx_request_group_t *group = &request->groups[part->index];

		for (uint32_t i = 0; i < part->n; i++) {
			const uint32_t at = part->first + i;

			part->ids[i] = at < group->n ? group->entries[at].id : KVX_NO_BLOCK;
			load->blocks += part->ids[i] != KVX_NO_BLOCK;
		}
	}
	load->ranks_left = scheduler->writer_count;
}

/* The first tokens of the load come from that mem. */
static void count_gpu_tokens(kvx_scheduler_t *scheduler, kvx_sload_t *load, uint32_t mem, uint32_t tokens)
{
	load->gpu_tokens = tokens;
	scheduler->stats.gpu_tokens += tokens;
	scheduler->stats.other_gpu_tokens += mem > KVX_OWN_MEM ? tokens : 0;
}

static void start_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_hit_t *hit)
{
	kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	uint32_t gpu, left;
	kvx_sload_t *load;

	if (!request || hit->tokens == 0) {
		return;
	}
	gpu = kvx_lease_cache_gpu_tokens(scheduler, ask, request, ask->local + hit->tokens);
	load = kvx_lease_cache_take(scheduler, ask, request, ask->local + hit->tokens);
	if (!load) {
		return;
	}
	count_gpu_tokens(scheduler, load, load->parts > 0 ? load->part[0].mem : KVX_HOST_MEM, gpu);
	scheduler->stats.loads++;
	scheduler->stats.loads_async += hit->async != 0;
	scheduler->stats.load_tokens += hit->tokens;
	request->load_status = KVC_PENDING;
	load->step = scheduler->step;
	load->flags = hit->async ? KVX_MSG_ASYNC : 0;
	load->timeout_ms = ask->load_ms ? ask->load_ms : scheduler->load_ms;
	left = hit->tokens - load->gpu_tokens;
	load->disk_tokens = hit->disk_tokens < left ? hit->disk_tokens : left;
	load->cpu_tokens = left - load->disk_tokens;
	scheduler->stats.disk_tokens += load->disk_tokens;
	if (!hit->async) {
		scheduler->sync_loads++;
		load->sync_ns =
			left ? kvx_cost_model_load_ns(&scheduler->cost_model, load->cpu_tokens, load->disk_tokens) : 0;
	}
	bind_blocks(scheduler, request, load);
	kvx_load_admit(scheduler, load);
}

void kvx_scheduler_start_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_hit_t *hit)
{
	kvx_hit_t full;

	if (hit && kv_struct_is_set(hit)) {
		kv_struct_read(&full, hit, sizeof full);
		start_load(scheduler, ask, &full);
	}
}

/* ---- loads of a hand-over, in pieces --------------------------------------------------------- */

kvx_sload_t *kvx_open_load_find(const kvx_request_t *request)
{
	kvx_sload_t *load = request->loads;

	while (load && !load->open) {
		load = load->own_next;
	}

	return load;
}

static uint32_t count_wanted(const kvx_sload_part_t *part)
{
	uint32_t wanted = 0;

	for (uint32_t i = 0; i < part->n; i++) {
		wanted += part->ids[i] != KVX_NO_BLOCK;
	}

	return wanted;
}

/* All that it loads is in that mem. */
static void set_mem(kvx_scheduler_t *scheduler, kvx_sload_t *load, uint32_t mem)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		load->part[p].mem = mem;
	}
	if (mem != KVX_HOST_MEM) {
		count_gpu_tokens(scheduler, load, mem, load->cpu_tokens);
		load->cpu_tokens = 0;
	}
}

/* Move the first n blocks of the open load to a load of their own. NULL: there is no memory. */
static kvx_sload_t *split_blocks(kvx_scheduler_t *scheduler, kvx_sload_t *load, uint32_t n)
{
	const uint32_t tokens = n * scheduler->groups[0].block_tokens;
	kvx_sload_part_t *from = &load->part[0];
	kvx_sload_t *piece = kvx_load_copy(scheduler, load, tokens);

	if (!piece) {
		return NULL;
	}
	piece->open = 0;
	piece->partial = 0;
	piece->flags |= KVX_MSG_MORE;
	piece->cpu_tokens = tokens;
	piece->part[0] = (kvx_sload_part_t){
		.index = from->index, .first = from->first, .n = n, .ids = (uint32_t *)(void *)(piece + 1)};
	memcpy(piece->part[0].ids, from->ids, n * sizeof *from->ids);
	piece->blocks = count_wanted(&piece->part[0]);
	kvx_load_admit(scheduler, piece);
	load->blocks -= piece->blocks;
	load->cpu_tokens -= tokens;
	from->first += n;
	from->ids += n;
	from->n -= n;

	return piece;
}

int kvx_open_load_split(kvx_scheduler_t *scheduler, kvx_sload_t *load, const kvx_stored_t *from, uint32_t units)
{
	const kvx_sload_part_t *part = &load->part[0];
	const uint32_t end = units * scheduler->unit / scheduler->groups[0].block_tokens;
	kvx_sload_t *piece;

	if (scheduler->group_count > 1 || load->parts == 0 || end <= part->first || part->n <= end - part->first) {
		return 0; /* of several groups, and of the end, there is no piece but the last */
	}
	piece = split_blocks(scheduler, load, end - part->first);
	if (!piece) {
		return 0;
	}
	piece->asked_ns = piece->renewed_ns = kv_now_ns(scheduler->env);
	set_mem(scheduler, piece, from->mem);
	piece->awaits_rest = from->mem != KVX_HOST_MEM;
	(void)kvx_load_start_part(scheduler, piece, &piece->part[0], &from->source, units);

	return 1;
}

void kvx_open_load_close(kvx_scheduler_t *scheduler, kvx_sload_t *load, const kvx_stored_t *from, uint32_t units)
{
	load->open = 0;
	set_mem(scheduler, load, from->mem);
	load->awaits_rest = from->mem != KVX_HOST_MEM;
	load->asked_ns = load->renewed_ns = kv_now_ns(scheduler->env);
	for (uint32_t p = 0; p < load->parts; p++) {
		kvx_sload_part_t *part = &load->part[p];

		if (part->n > 0 &&
		    units * scheduler->unit / scheduler->groups[part->index].block_tokens > part->first) {
			(void)kvx_load_start_part(scheduler, load, part, &from->source, units);
		}
	}
}

/* Of the first part, the blocks that are leased. */
static uint32_t leased_blocks(const kvx_sload_part_t *part)
{
	const uint32_t end = part->lease && kvc_lease_state(part->lease) == KVC_OK ? kvc_lease_n(part->lease) : 0;
	const uint32_t n = end > part->first ? end - part->first : 0;

	return n < part->n ? n : part->n;
}

int kvx_load_is_short(const kvx_sload_t *load)
{
	return load->awaits_rest && load->parts > 0 && leased_blocks(&load->part[0]) < load->part[0].n;
}

/* What the lease in memory of a GPU lacks becomes a part in host memory. */
static void add_rest(kvx_scheduler_t *scheduler, kvx_sload_t *load, const kvx_stored_t *host, uint32_t units)
{
	kvx_sload_part_t *first = &load->part[0], *rest = &load->part[1];
	const uint32_t n = leased_blocks(first), tokens = n * scheduler->groups[0].block_tokens;
	const uint32_t moved = load->gpu_tokens > tokens ? load->gpu_tokens - tokens : 0;

	load->gpu_tokens -= moved;
	load->cpu_tokens += moved;
	scheduler->stats.gpu_tokens -= moved;
	scheduler->stats.other_gpu_tokens -= first->mem > KVX_OWN_MEM ? moved : 0;
	*rest = (kvx_sload_part_t){.mem = KVX_HOST_MEM,
				   .index = first->index,
				   .first = first->first + n,
				   .n = first->n - n,
				   .ids = first->ids + n};
	first->n = n;
	load->parts = 2;
	if (n == 0) {
		kvc_release(&first->lease, 1);
		*first = *rest;
		rest = first;
		load->parts = 1;
	}
	load->asked_ns = load->renewed_ns = kv_now_ns(scheduler->env);
	(void)kvx_load_start_part(scheduler, load, rest, &host->source, units);
}

int kvx_loads_add_rest(kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_stored_t *host,
		       uint32_t units, int more)
{
	const uint32_t stored = units * scheduler->unit / scheduler->groups[0].block_tokens;
	int awaited = 0;

	for (kvx_sload_t *load = request->loads; load; load = load->own_next) {
		if (!load->awaits_rest || load->sent) {
			continue;
		}
		if (kvx_load_lease_state(load) == KVC_PENDING ||
		    (more && kvx_load_is_short(load) && stored < load->part[0].first + load->part[0].n)) {
			awaited = 1;
			continue;
		}
		if (kvx_load_is_short(load) && stored > load->part[0].first + leased_blocks(&load->part[0])) {
			add_rest(scheduler, load, host, units);
		}
		load->awaits_rest = 0;
	}

	return !awaited;
}

/* ---- the end --------------------------------------------------------------------------------- */

/* A rank has loaded less than was leased. */
static void fail_load(kvx_scheduler_t *scheduler, kvx_sload_t *load, kvc_status_t why)
{
	kvx_request_t *request = load->request;

	if (load->failed) {
		return;
	}
	load->failed = 1;
	scheduler->stats.loads_failed += !request->ended;
	if (!(load->flags & KVX_MSG_ASYNC)) {
		kvx_loads_invalidate(scheduler, load);
	}
	request->failed = 1;
	request->load_status = why;
	request->why = kvx_miss_reason_of(why);
	request->generation = 0; /* the daemon has dropped a damaged block since */
	kvx_puts_revoke(scheduler, request, load->step);
}

static void add_load_sample(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	kvx_request_t *request = load->request;

	if (load->failed && !load->timed_out) {
		return; /* the time of a failure says nothing about loading */
	}
	/* GPU memory is no tier of the cost model. */
	if (load->gpu_tokens <= load->cpu_tokens + load->disk_tokens) {
		kvx_cost_model_add_load(&scheduler->cost_model, load->cpu_tokens, load->disk_tokens, load->ns,
					kv_now_ns(scheduler->env));
	}
	if (load->gpu_tokens > 0 && !load->failed) {
		scheduler->mems[load->part[0].mem].pause_ns = 0;
	}
	if (!load->failed) {
		request->gpu_tokens += load->gpu_tokens;
		request->cpu_tokens += load->cpu_tokens;
		request->disk_tokens += load->disk_tokens;
		request->load_ns += load->ns;
	}
}

void kvx_loads_count_unreported(const kvx_request_t *request, kvc_report_t *report)
{
	for (const kvx_sload_t *load = request->loads; load; load = load->own_next) {
		if (load->sent && !load->failed && !(load->flags & KVX_MSG_ASYNC)) {
			report->hit_gpu_tokens += load->gpu_tokens;
			report->hit_cpu_tokens += load->cpu_tokens;
			report->hit_disk_tokens += load->disk_tokens;
		}
	}
}

/* The rank has no such space, or cannot map its memory. */
static int is_gpu_mem_lost(const kvx_sload_t *load, int32_t status)
{
	return load->gpu_tokens > 0 && (status == KVC_ERR_FAULT || status == KVC_ERR_TIER_OFF);
}

/* The request has no other load. Pieces may be reported in any order, and one that fails is what became of all. */
static int is_alone(const kvx_sload_t *load)
{
	return load->request->loads == load && !load->own_next;
}

void kvx_loads_take_report(kvx_scheduler_t *scheduler, const kvx_report_loaded_t *report)
{
	kvx_sload_t *load = scheduler->loads;

	while (load && load->number != report->load) {
		load = load->next;
	}
	if (!load || !load->sent) {
		return; /* given up already */
	}
	load->ns = report->ns > load->ns ? report->ns : load->ns;
	if (report->status != KVC_OK || report->blocks < load->blocks) {
		load->timed_out |= report->status == KVC_ERR_TIMEOUT;
		if (is_gpu_mem_lost(load, report->status)) {
			kvx_mem_pause(scheduler, load->part[0].mem);
		}
		fail_load(scheduler, load, report->status != KVC_OK ? report->status : KVC_MISS);
	}
	load->ranks_left--;
	if (load->ranks_left == 0) {
		if (load->request->load_status == KVC_PENDING && is_alone(load)) {
			load->request->load_status = KVC_OK;
		}
		scheduler->stats.loads_done += !load->failed && !(load->flags & KVX_MSG_MORE);
		add_load_sample(scheduler, load);
		kvx_load_free(scheduler, load);
	}
}

/* Renew leases while they may be needed, up to the limits. */
void kvx_loads_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	const uint64_t load_ns = scheduler->load_ms * KVX_MS;
	kvx_sload_t *next;

	for (kvx_sload_t *load = scheduler->loads; load; load = next) {
		next = load->next;
		if (load->sent && now - load->asked_ns > (uint64_t)GIVE_UP * load->timeout_ms * KVX_MS) {
			fail_load(scheduler, load, KVC_ERR_TIMEOUT);
			kvx_load_free(scheduler, load);
		} else if (!load->number && now - load->used_ns > IDLE_MS * KVX_MS) {
			kvx_lease_cache_give_back(scheduler, load);
		} else if (now - load->renewed_ns > load_ns) {
			kvx_load_renew(scheduler, load, now);
		}
	}
}

void kvx_loads_close(kvx_scheduler_t *scheduler)
{
	for (kvx_request_t *request = NULL; (request = kvx_requests_next(&scheduler->requests, request));) {
		kvx_lease_cache_drop(scheduler, request);
	}
	while (scheduler->loads) {
		kvx_load_free(scheduler, scheduler->loads);
	}
}

uint64_t kvx_loads_count_leases(const kvx_scheduler_t *scheduler)
{
	uint64_t leases = 0;

	for (const kvx_sload_t *load = scheduler->loads; load; load = load->next) {
		for (uint32_t p = 0; p < load->parts; p++) {
			leases += load->part[p].lease != NULL;
		}
	}

	return leases;
}
