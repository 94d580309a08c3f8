/* The lease cache: loads that the engine has not admitted yet. And the making, leasing and freeing of all loads.
 *
 *   match --lease--> cached --admitted--> one of the request's loads (scheduler/load.c)
 *                    cached --computed without it, or gone--> freed
 *                    cached --not looked up for a while--> given back: without leases, out of the list
 *   hand-over --> open, cached --admitted--> an open load
 *
 * A match that finds something leases it before the engine is told, so the blocks are there when the engine counts on
 * them, and reserves the bytes of the LOAD record, so that starting a load needs no memory. The answer is awaited as
 * long as computing would take, within bounds (docs/decisions/021). A later answer is there when the engine asks again.
 *
 * An open load has no lease: its blocks are still computed by another instance. */
#include "scheduler/lease_cache.h"
#include "common/await.h"
#include "scheduler/base/requests.h"
#include "scheduler/keys.h"
#include "scheduler/names/spaces.h"

#define WAIT_MS    100u /* longest wait for an answer while the heartbeat moves */
#define LATE_MS    20u  /* the same after a late answer, until the next one is in time */
#define LATE_PART  8u   /* and at most this part of what computing would take */
#define RETRY_PART 8u   /* a renewal that could not be sent is tried again after this part of the interval */

/* ---- loads as objects ------------------------------------------------------------------------ */

static void append_load(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	KVX_LIST_APPEND(load, next, link, scheduler->loads_end);
	scheduler->load_count++;
}

static void unlink_load(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	if (load->link) { /* else it was given back */
		KVX_LIST_REMOVE(load, next, link, scheduler->loads_end);
		scheduler->load_count--;
	}
}

void kvx_load_admit(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	load->number = ++scheduler->load_number;
	scheduler->admitted++;
	scheduler->admitted_ns += load->sync_ns;
	KVX_LIST_APPEND(load, own_next, own_link, load->request->loads_end);
}

void kvx_load_renew(const kvx_scheduler_t *scheduler, kvx_sload_t *load, uint64_t now)
{
	const uint64_t every = scheduler->load_ms * KVX_MS;
	int sent = 1;

	for (uint32_t p = 0; p < load->parts; p++) {
		if (load->part[p].lease && kvc_lease_renew(load->part[p].lease, scheduler->load_ms * 2u) != KVC_OK) {
			sent = 0;
		}
	}
	/* The next regular renewal would come after the lease has ended. */
	load->renewed_ns = sent ? now : now - every + every / RETRY_PART;
}

static void release_leases(kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		kvc_release(&load->part[p].lease, 1);
		load->part[p].lease = NULL;
	}
}

void kvx_load_free(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	kvx_request_t *request = load->request;

	unlink_load(scheduler, load);
	if (load->number) {
		KVX_LIST_REMOVE(load, own_next, own_link, request->loads_end);
		scheduler->admitted--;
		scheduler->admitted_ns -= load->sync_ns;
	}
	release_leases(load);
	scheduler->reserved_bytes -= load->bytes;
	kv_free(scheduler->env, load);
	kvx_request_release(&scheduler->requests, request);
}

/* ---- leasing --------------------------------------------------------------------------------- */

/* Upper bound of a LOAD record of that number of tokens. A group may come in two parts. */
static size_t record_bytes(const kvx_scheduler_t *scheduler, uint32_t tokens)
{
	size_t bytes = sizeof(kvx_msg_load_t) + KVX_MAX_ID + sizeof(kvx_msg_part_t) + sizeof(uint64_t);

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const size_t blocks = tokens / scheduler->groups[g].block_tokens;

		bytes += sizeof(kvx_msg_part_t) + kvx_padded(blocks * sizeof(uint32_t));
	}

	return bytes;
}

kvx_sload_t *kvx_load_copy(kvx_scheduler_t *scheduler, const kvx_sload_t *as, uint32_t tokens)
{
	const size_t bytes = record_bytes(scheduler, tokens);
	kvx_sload_t *load = scheduler->load_count < KVX_LOADS_MAX && kvx_message_reserve(scheduler, bytes)
				    ? kv_alloc(scheduler->env, sizeof *load + bytes)
				    : NULL;

	if (load) {
		*load = *as;
		load->bytes = bytes;
		scheduler->reserved_bytes += load->bytes;
		append_load(scheduler, load);
	}

	return load;
}

/* Add the part's blocks; their ids follow those of the parts before. */
static void add_part(kvx_sload_t *load, uint32_t **p_ids, kvx_sload_part_t part)
{
	if (part.n > 0) {
		part.ids = *p_ids;
		*p_ids += part.n;
		load->part[load->parts++] = part;
	}
}

/* A load of the blocks that each group has in the span, and of a private block of the first group. */
static kvx_sload_t *create_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				const kvx_span_t *span)
{
	const uint32_t room = span->end + (span->partial ? scheduler->groups[0].block_tokens : 0);
	const kvx_sload_t as = {.request = request,
				.space = request->space,
				.generation = scheduler->generation,
				.local = ask->local,
				.units = span->end / scheduler->unit,
				.gpu_units = span->gpu / scheduler->unit,
				.partial = span->partial};
	const kvc_space_t *space = scheduler->spaces[request->space].space;
	kvx_sload_t *load = kvx_load_copy(scheduler, &as, room);
	uint32_t *ids;

	if (!load) {
		return NULL;
	}
	ids = (uint32_t *)(void *)(load + 1);
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t local = ask->local / scheduler->groups[g].block_tokens;
		uint32_t first = 0, last = 0, middle = span->gpu / scheduler->groups[g].block_tokens;

		kvc_group_range(space, scheduler->groups[g].id, load->units, &first, &last);
		first = first > local ? first : local;
		last += g == 0 && span->partial > 0;
		last = last > first ? last : first;
		middle = middle < first ? first : middle < last ? middle : last;
		add_part(load, &ids,
			 (kvx_sload_part_t){.mem = span->mem, .index = g, .first = first, .n = middle - first});
		add_part(load, &ids,
			 (kvx_sload_part_t){.mem = KVX_HOST_MEM, .index = g, .first = middle, .n = last - middle});
	}

	return load;
}

kvc_status_t kvx_load_start_part(const kvx_scheduler_t *scheduler, const kvx_sload_t *load, kvx_sload_part_t *part,
				 const kvc_key_source_t *source, uint32_t units)
{
	const kvc_want_t want = {
		.struct_size = sizeof want,
		.group = scheduler->groups[part->index].id,
		.n = units,
		.skip = part->first,
		.ttl_ms = scheduler->load_ms * 2u,
		.source = source,
	};
	kvc_space_t *space = kvx_space_in(scheduler, load->space, part->mem);
	const kvc_status_t status = space ? kvc_lease_start(space, &want, &part->lease) : KVC_MISS;

	if (status != KVC_OK) {
		part->lease = NULL;
	}

	return status;
}

/* One lease for each part. */
static kvc_status_t start_leases(const kvx_scheduler_t *scheduler, kvx_key_view_t *view, kvx_sload_t *load)
{
	kvc_status_t status = view->n < load->units ? KVC_ERR_ARG : KVC_OK;

	for (uint32_t p = 0; p < load->parts && status == KVC_OK; p++) {
		kvx_sload_part_t *part = &load->part[p];

		view->space = kvx_space_in(scheduler, load->space, part->mem);
		status = kvx_load_start_part(scheduler, load, part, &view->source,
					     part->mem == KVX_HOST_MEM ? load->units : load->gpu_units);
		if (status == KVC_OK && view->bad) {
			status = KVC_ERR_ARG;
		}
	}

	return status;
}

/* How long the answer is worth waiting for. The length of a stall is unknown: a wait as long as computing costs at most
 * twice the better choice (docs/decisions/021). Before anything was computed, loading counts as worth the wait. */
static uint64_t max_wait_ns(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t tokens)
{
	const uint64_t compute = kvx_cost_model_compute_ns(&scheduler->cost_model, ask->local, tokens);
	const uint64_t least = scheduler->wait_us * UINT64_C(1000);
	const uint64_t most = (scheduler->lease_late ? LATE_MS : WAIT_MS) * KVX_MS;
	const uint64_t worth = !compute ? most : scheduler->lease_late ? compute / LATE_PART : compute;

	return ask->polled || worth < least ? least : worth < most ? worth : most;
}

static kvc_status_t start_lease(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				const kvx_span_t *span)
{
	kvx_sload_t *load = create_load(scheduler, ask, request, span);
	kvx_key_view_t view;
	kvc_status_t status;

	if (!load) {
		return KVC_ERR_NOMEM;
	}
	load->asked_ns = load->renewed_ns = kv_now_ns(scheduler->env);
	load->until_ns = load->asked_ns + max_wait_ns(scheduler, ask, span->end - ask->local);
	kvx_key_view_init(scheduler, ask, request, span->end, &view);
	status = start_leases(scheduler, &view, load);
	if (status != KVC_OK) {
		kvx_load_free(scheduler, load);
		return status;
	}
	request->cached = load;

	return KVC_OK;
}

/* ---- answers --------------------------------------------------------------------------------- */

kvc_status_t kvx_load_lease_state(const kvx_sload_t *load)
{
	kvc_status_t worst = KVC_OK;

	for (uint32_t p = 0; p < load->parts; p++) {
		const kvc_lease_t *lease = load->part[p].lease;
		const kvc_status_t state = lease ? kvc_lease_state(lease) : KVC_OK;

		if (state != KVC_OK && state != KVC_PENDING) {
			return state;
		}
		worst = state == KVC_PENDING ? state : worst;
	}

	return worst;
}

static kvc_status_t await_leases(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	const uint64_t since = kv_now_ns(scheduler->env);
	kvc_status_t state = kvx_load_lease_state(load);
	int more = 1;

	while (state == KVC_PENDING && more) {
		more = kvx_scheduler_await_daemon(scheduler, since, load->until_ns);
		state = kvx_load_lease_state(load);
	}
	scheduler->lease_late = state == KVC_PENDING && kv_now_ns(scheduler->env) >= load->until_ns;

	return state;
}

/* The part in host memory was not leased, and all before it was, from GPU memory: load that alone. */
static void drop_lost_rest(const kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	kvx_sload_part_t *first = &load->part[0], *rest = &load->part[1];

	if (scheduler->group_count == 1 && load->parts == 2 && kvc_lease_state(first->lease) == KVC_OK &&
	    kvc_lease_n(first->lease) == first->first + first->n && kvc_lease_state(rest->lease) != KVC_OK &&
	    kvc_lease_state(rest->lease) != KVC_PENDING) {
		kvc_release(&rest->lease, 1);
		rest->lease = NULL;
		load->parts = 1;
		load->units = load->gpu_units;
	}
}

/* Tokens from the start that are leased. Of several groups all that was asked for, or nothing. */
static uint32_t leased_tokens(const kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	const uint32_t block_tokens = scheduler->groups[0].block_tokens;

	for (uint32_t p = 0; p < load->parts; p++) {
		const uint32_t n = kvc_lease_n(load->part[p].lease);
		const int all = n >= load->part[p].first + load->part[p].n;

		if (scheduler->group_count == 1 && (!all || p + 1u == load->parts)) {
			return n * block_tokens;
		}
		if (!all) {
			return 0;
		}
	}

	return load->units * scheduler->unit;
}

/* The cached leases, granted or requested, cover these units. */
static int covers_blocks(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
			 uint32_t units)
{
	const kvx_sload_t *cached = request->cached;

	if (cached->space != request->space || cached->local > ask->local) {
		return 0;
	}

	return scheduler->group_count == 1 ? cached->units >= units
					   : cached->units == units && cached->local == ask->local;
}

/* They do, and they are of the daemon that is attached now. */
static int is_reusable(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
		       uint32_t units)
{
	return !request->cached->open && request->cached->generation == scheduler->generation &&
	       covers_blocks(scheduler, ask, request, units);
}

/* ---- the cache ------------------------------------------------------------------------------- */

void kvx_lease_cache_drop(kvx_scheduler_t *scheduler, kvx_request_t *request)
{
	if (request->cached) {
		kvx_load_free(scheduler, request->cached);
		request->cached = NULL;
	}
}

/* The load stays with its request: one that the engine starts after all is reported as failed, which needs memory. */
void kvx_lease_cache_give_back(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	unlink_load(scheduler, load);
	release_leases(load);
	load->generation = 0;
}

uint32_t kvx_lease_cache_acquire(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				 const kvx_span_t *span, kvc_status_t *p_status)
{
	const uint32_t end = span->end;
	uint32_t tokens;

	*p_status = KVC_OK;
	if (request->cached && !is_reusable(scheduler, ask, request, end / scheduler->unit)) {
		kvx_lease_cache_drop(scheduler, request);
	}
	if (!request->cached) {
		*p_status = start_lease(scheduler, ask, request, span);
	}
	if (!request->cached) {
		return ask->local;
	}
	request->cached->used_ns = kv_now_ns(scheduler->env);
	*p_status = await_leases(scheduler, request->cached);
	if (*p_status != KVC_OK && *p_status != KVC_PENDING) {
		drop_lost_rest(scheduler, request->cached);
		*p_status = kvx_load_lease_state(request->cached);
	}
	if (*p_status == KVC_PENDING) {
		scheduler->stats.late_answers++;
		return ask->local;
	}
	tokens = *p_status == KVC_OK ? leased_tokens(scheduler, request->cached) : 0;
	if (tokens <= ask->local) {
		scheduler->stats.lease_lost++;
		kvx_lease_cache_drop(scheduler, request);
		return ask->local;
	}

	return tokens < end ? tokens : end;
}

uint32_t kvx_lease_cache_gpu_tokens(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
				    const kvx_request_t *request, uint32_t end)
{
	const kvx_sload_t *load = request->cached;
	const uint32_t gpu = load ? load->gpu_units * scheduler->unit : 0;

	return gpu <= ask->local ? 0 : (gpu < end ? gpu : end) - ask->local;
}

/* ---- taking what is leased ------------------------------------------------------------------- */

/* Drop the blocks that the engine has computed since, and those it does not want. */
static void trim_load(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t units, kvx_sload_t *load)
{
	const uint32_t block_tokens = scheduler->groups[0].block_tokens;
	const uint32_t local = ask->local / block_tokens;
	const uint32_t end = units * scheduler->unit / block_tokens + (load->partial > 0);
	const uint32_t parts = load->parts;

	if (scheduler->group_count > 1) {
		return; /* leased for exactly these units */
	}
	load->parts = 0;
	for (uint32_t p = 0; p < parts; p++) {
		kvx_sload_part_t part = load->part[p];
		const uint32_t last = part.first + part.n < end ? part.first + part.n : end;

		part.first = part.first > local ? part.first : local;
		if (part.first < last) {
			part.n = last - part.first;
			load->part[load->parts++] = part;
		} else {
			kvc_release(&part.lease, 1);
		}
	}
}

kvx_sload_t *kvx_lease_cache_take(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				  uint32_t tokens)
{
	const uint32_t units = tokens / scheduler->unit;
	kvx_sload_t *load = request->cached;

	if (!load || !covers_blocks(scheduler, ask, request, units)) {
		kvx_lease_cache_drop(scheduler, request);
		return NULL;
	}
	request->cached = NULL;
	unlink_load(scheduler, load);
	append_load(scheduler, load);
	if (tokens < load->units * scheduler->unit + load->partial) {
		load->partial = 0;
	}
	trim_load(scheduler, ask, units, load);
	if (load->generation != scheduler->generation || kvx_load_lease_state(load) != KVC_OK) {
		release_leases(load);
	}

	return load;
}

int kvx_lease_cache_reserve(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end,
			    uint32_t partial)
{
	if (request->cached && (!request->cached->open || request->cached->partial != partial ||
				!covers_blocks(scheduler, ask, request, end / scheduler->unit))) {
		kvx_lease_cache_drop(scheduler, request);
	}
	if (!request->cached) {
		request->cached = create_load(scheduler, ask, request, &(kvx_span_t){.end = end, .partial = partial});
	}
	if (!request->cached) {
		return 0;
	}
	request->cached->open = 1;
	request->cached->used_ns = kv_now_ns(scheduler->env);

	return 1;
}
