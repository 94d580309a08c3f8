/* The lease cache: a match that finds something leases it before the engine is told, so the blocks are there when the
 * engine counts on them.
 *
 *   match --lease--> cached --admitted--> load (scheduler/load.c)
 *                    cached --computed without it, gone, or not looked up for a while--> released
 *
 * The answer is awaited as long as computing would take, within bounds (docs/decisions/021). A later answer is there
 * when the engine asks again. */
#include "scheduler/lease_cache.h"
#include "scheduler/keys.h"
#include "scheduler/requests.h"
#include "scheduler/spaces.h"

#define WAIT_MS    100u  /* longest wait for an answer while the heartbeat moves */
#define LATE_MS    20u   /* the same after a late answer, until the next one is in time */
#define LATE_PART  8u    /* and at most this part of what computing would take */
#define IDLE_MS    1000u /* released when no lookup has asked for it for so long */
#define RETRY_PART 8u    /* a renewal that could not be sent is tried again after this part of the interval */

void kvx_load_renew_leases(const kvx_scheduler_t *scheduler, kvx_sload_t *load, uint64_t now)
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

uint64_t kvx_load_count_leases(const kvx_sload_t *load)
{
	uint64_t leases = 0;

	for (; load; load = load->next) {
		for (uint32_t p = 0; p < load->parts; p++) {
			leases += load->part[p].lease != NULL;
		}
	}

	return leases;
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
	release_leases(load);
	kv_free(scheduler->env, load);
}

/* ---- asking ---------------------------------------------------------------------------------- */

/* One lease for each part. */
static kvc_status_t start_leases(const kvx_scheduler_t *scheduler, kvc_space_t *space, kvx_key_view_t *view,
				 kvx_sload_t *load)
{
	kvc_status_t status = view->n < load->units ? KVC_ERR_ARG : KVC_OK;

	for (uint32_t p = 0; p < load->parts && status == KVC_OK; p++) {
		const kvc_want_t want = {
			.struct_size = sizeof want,
			.group = load->part[p].group,
			.n = load->units,
			.skip = load->part[p].first,
			.ttl_ms = scheduler->load_ms * 2u,
			.source = &view->source,
		};

		status = kvc_lease_start(space, &want, &load->part[p].lease);
		if (status != KVC_OK) {
			load->part[p].lease = NULL;
		} else if (view->bad) {
			status = KVC_ERR_ARG;
		}
	}

	return status;
}

/* Which blocks of each group the load covers. Returns how many. */
static uint32_t fill_parts(const kvx_scheduler_t *scheduler, const kvc_space_t *space, kvx_sload_t *load)
{
	uint32_t blocks = 0;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t local = load->local / scheduler->groups[g].block_tokens;
		uint32_t first = 0, end = 0;

		kvc_group_range(space, scheduler->groups[g].id, load->units, &first, &end);
		first = first > local ? first : local;
		if (first < end) {
			load->part[load->parts++] =
				(kvx_sload_part_t){.group = scheduler->groups[g].id, .first = first, .n = end - first};
			blocks += end - first;
		}
	}

	return blocks;
}

/* One allocation: the load, the ids, the request's id. `shape` has the parts. */
static kvx_sload_t *create_load(const kvx_scheduler_t *scheduler, const kvx_request_t *request,
				const kvx_sload_t *shape, uint32_t blocks)
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
		ids += load->part[p].n;
	}
	load->id = (char *)ids;
	load->id_len = request->id_len;
	memcpy(load->id, request->id, request->id_len);

	return load;
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

static kvc_status_t start_load(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end)
{
	kvc_space_t *space = scheduler->spaces[request->space].space;
	const uint64_t now = kv_now_ns(scheduler->env);
	kvx_sload_t shape = {
		.hash = request->hash,
		.serial = request->serial,
		.space = request->space,
		.generation = scheduler->generation,
		.local = ask->local,
		.units = end / scheduler->unit,
		.asked_ns = now,
		.renewed_ns = now,
		.until_ns = now + max_wait_ns(scheduler, ask, end - ask->local),
	};
	const uint32_t blocks = fill_parts(scheduler, space, &shape);
	kvx_sload_t *load = create_load(scheduler, request, &shape, blocks);
	kvx_key_view_t view;
	kvc_status_t status;

	if (!load) {
		return KVC_ERR_NOMEM;
	}
	kvx_key_view_init(scheduler, ask, request, request->space, end, &view);
	status = start_leases(scheduler, space, &view, load);
	if (status != KVC_OK) {
		kvx_load_free(scheduler, load);
		return status;
	}
	load->next = scheduler->cached;
	scheduler->cached = load;
	scheduler->cached_count++;
	request->cached = load;

	return KVC_OK;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* The worst of its leases: PENDING before OK, anything else before both. */
static kvc_status_t worst_lease_state(const kvx_sload_t *load)
{
	kvc_status_t worst = KVC_OK;

	for (uint32_t p = 0; p < load->parts; p++) {
		const kvc_status_t state = kvc_lease_state(load->part[p].lease);

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
	kvc_status_t state = worst_lease_state(load);
	int more = 1;

	while (state == KVC_PENDING && more) {
		more = kvx_scheduler_await_daemon(scheduler, since, load->until_ns);
		state = worst_lease_state(load);
	}
	scheduler->lease_late = state == KVC_PENDING && kv_now_ns(scheduler->env) >= load->until_ns;

	return state;
}

/* Tokens from the start that are leased. Of several groups all that was asked for, or nothing. */
static uint32_t leased_tokens(const kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	const uint32_t block_tokens = scheduler->groups[0].block_tokens;

	for (uint32_t p = 0; p < load->parts; p++) {
		const uint32_t n = kvc_lease_n(load->part[p].lease);

		if (scheduler->group_count == 1) {
			return n * block_tokens;
		}
		if (n < load->part[p].first + load->part[p].n) {
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
	return request->cached->generation == scheduler->generation && covers_blocks(scheduler, ask, request, units);
}

/* ---- used by match, load, finish ------------------------------------------------------------- */

static void unlink_cached(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	kvx_sload_t **link = &scheduler->cached;

	while (*link && *link != load) {
		link = &(*link)->next;
	}
	if (*link) { /* else its leases were given back */
		*link = load->next;
		scheduler->cached_count--;
	}
}

void kvx_lease_cache_drop(kvx_scheduler_t *scheduler, kvx_request_t *request)
{
	kvx_sload_t *cached = request->cached;

	if (cached) {
		request->cached = NULL;
		unlink_cached(scheduler, cached);
		kvx_load_free(scheduler, cached);
	}
}

/* The load stays with its request: one that the engine starts after all is reported as failed, which needs memory. */
void kvx_lease_cache_give_back(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	unlink_cached(scheduler, load);
	release_leases(load);
	load->generation = 0;
}

uint32_t kvx_lease_cache_acquire(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end,
				 kvc_status_t *p_status)
{
	uint32_t tokens;

	*p_status = KVC_OK;

	if (request->cached && !is_reusable(scheduler, ask, request, end / scheduler->unit)) {
		kvx_lease_cache_drop(scheduler, request);
	}
	if (!request->cached) {
		*p_status = start_load(scheduler, ask, request, end);
	}
	if (!request->cached) {
		return ask->local;
	}
	request->cached->used_ns = kv_now_ns(scheduler->env);
	*p_status = await_leases(scheduler, request->cached);
	if (*p_status == KVC_PENDING) {
		scheduler->stats.late_answers++;
		return ask->local;
	}
	tokens = *p_status == KVC_OK ? leased_tokens(scheduler, request->cached) : 0;
	tokens = tokens < end ? tokens : end;
	if (tokens <= ask->local) {
		scheduler->stats.lease_lost++;
		kvx_lease_cache_drop(scheduler, request);
		return ask->local;
	}

	return tokens;
}

/* Drop the blocks that the engine has computed since, and those it does not want. */
static void trim_load(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t units, kvx_sload_t *load)
{
	const uint32_t block_tokens = scheduler->groups[0].block_tokens;
	kvx_sload_part_t *part = &load->part[0];
	const uint32_t local = ask->local / block_tokens, end = units * scheduler->unit / block_tokens;

	if (scheduler->group_count > 1) {
		return; /* leased for exactly these units */
	}
	part->first = part->first > local ? part->first : local;
	part->n = end - part->first;
}

kvx_sload_t *kvx_lease_cache_take(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				  uint32_t units)
{
	kvx_sload_t *load = request->cached;

	if (!load || !covers_blocks(scheduler, ask, request, units)) {
		kvx_lease_cache_drop(scheduler, request);
		return NULL;
	}
	request->cached = NULL;
	unlink_cached(scheduler, load);
	trim_load(scheduler, ask, units, load);
	if (load->generation != scheduler->generation || worst_lease_state(load) != KVC_OK) {
		release_leases(load);
	}

	return load;
}

void kvx_lease_cache_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	kvx_sload_t *next;

	for (kvx_sload_t *load = scheduler->cached; load; load = next) {
		next = load->next;
		if (now - load->used_ns > IDLE_MS * KVX_MS) {
			kvx_lease_cache_give_back(scheduler, load);
		} else if (now - load->renewed_ns > scheduler->load_ms * KVX_MS) {
			kvx_load_renew_leases(scheduler, load, now);
		}
	}
}

static void drop_cached(void *ctx, kvx_request_t *request)
{
	kvx_lease_cache_drop(ctx, request);
}

void kvx_lease_cache_close(kvx_scheduler_t *scheduler)
{
	kvx_requests_for_each(&scheduler->requests, drop_cached, scheduler);
}
