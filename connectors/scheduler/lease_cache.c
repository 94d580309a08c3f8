/* Holds: a match that finds something leases it before the engine is told, so that what was promised is there when the
 * engine counts on it.
 *
 *   match --lease--> held --admitted--> load (scheduler/load.c)
 *                    held --runs without, gone, or not asked for in a while--> given back
 *
 * The answer is waited for as long as computing would take, within bounds:
 * docs/decisions/021-waiting-for-a-stalled-daemon.md. One that comes later is there when the engine asks again.
 */
#include "scheduler/impl.h"

#define WAIT_MS    100u  /* longest wait for an answer while the daemon's heart beats; */
#define LATE_MS    20u   /* and after one that did not come in time, until one does, */
#define LATE_PART  8u    /* at most one in so many of what computing would take */
#define IDLE_MS    1000u /* held for a request that nobody asks about */
#define RETRY_PART 8u    /* of the time between renewals passes until one that could not be sent is tried again */

uint32_t kvx_load_ranges(const kvx_scheduler_t *scheduler, const kvc_space_t *space, const kvx_ask_t *ask,
			 uint32_t units, kvx_sload_t *load)
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

void kvx_load_renew(const kvx_scheduler_t *scheduler, kvx_sload_t *load, uint64_t now)
{
	const uint64_t every = scheduler->load_ms * KVX_MS;
	int sent = 1;

	for (uint32_t p = 0; p < load->parts; p++) {
		if (load->part[p].lease && kvc_lease_renew(load->part[p].lease, scheduler->load_ms * 2u) != KVC_OK) {
			sent = 0;
		}
	}
	/* The next in its turn would be the end of the lease. */
	load->renewed_ns = sent ? now : now - every + every / RETRY_PART;
}

uint64_t kvx_leases_of(const kvx_sload_t *load)
{
	uint64_t leases = 0;

	for (; load; load = load->next) {
		for (uint32_t p = 0; p < load->parts; p++) {
			leases += load->part[p].lease != NULL;
		}
	}

	return leases;
}

void kvx_load_free(kvx_scheduler_t *scheduler, kvx_sload_t *load)
{
	for (uint32_t p = 0; p < load->parts; p++) {
		kvc_release(&load->part[p].lease, 1);
	}
	kv_free(scheduler->env, load);
}

/* ---- asking
 * ------------------------------------------------------------------------------------------------------------------ */

/* One lease a part. */
static kvc_status_t lease(const kvx_scheduler_t *scheduler, kvc_space_t *space, kvx_key_view_t *view, kvx_sload_t *load)
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

/* In one piece of memory: itself, the ids, the request's id. `shape` has the parts. */
static kvx_sload_t *create(const kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_sload_t *shape,
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
		ids += load->part[p].n;
	}
	load->id = (char *)ids;
	load->id_len = request->id_len;
	memcpy(load->id, request->id, request->id_len);
	load->serial = request->serial;

	return load;
}

/* How long the answer is worth waiting for. Nobody knows how long a stall lasts: who waits as long as computing would
 * take, pays at most twice the better choice. Where nothing has been computed yet, loading is taken to be worth it. */
static uint64_t patience(kvx_scheduler_t *scheduler, uint32_t local, uint32_t tokens)
{
	const uint64_t compute = kvx_guard_compute_ns(&scheduler->guard, local, tokens);
	const uint64_t least = scheduler->wait_us * UINT64_C(1000);
	const uint64_t most = (scheduler->lease_late ? LATE_MS : WAIT_MS) * KVX_MS;
	const uint64_t worth = !compute ? most : scheduler->lease_late ? compute / LATE_PART : compute;

	return worth < least ? least : worth < most ? worth : most;
}

static kvc_status_t start(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end)
{
	kvc_space_t *space = scheduler->spaces[request->space].space;
	const uint64_t now = kv_now_ns(scheduler->env);
	kvx_sload_t shape = {
		.space = request->space,
		.era = scheduler->era,
		.local = ask->local,
		.units = end / scheduler->unit,
		.asked_ns = now,
		.renewed_ns = now,
		.until_ns = now + patience(scheduler, ask->local, end - ask->local),
	};
	const uint32_t blocks = kvx_load_ranges(scheduler, space, ask, shape.units, &shape);
	kvx_sload_t *load = create(scheduler, request, &shape, blocks);
	kvx_key_view_t view;
	kvc_status_t status;

	if (!load) {
		return KVC_ERR_NOMEM;
	}
	kvx_keys_view(scheduler, ask, request, request->space, end, &view);
	status = lease(scheduler, space, &view, load);
	if (status != KVC_OK) {
		kvx_load_free(scheduler, load);
		return status;
	}
	load->next = scheduler->holds;
	scheduler->holds = load;
	scheduler->hold_count++;
	request->held = load;

	return KVC_OK;
}

/* ---- answers
 * ----------------------------------------------------------------------------------------------------------------- */

/* The worst of its leases: PENDING before OK, anything else before both. */
static kvc_status_t state_of(const kvx_sload_t *load)
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

static kvc_status_t wait_for(kvx_scheduler_t *scheduler, const kvx_sload_t *load)
{
	const uint64_t since = kv_now_ns(scheduler->env);
	kvc_status_t state = state_of(load);
	int more = 1;

	while (state == KVC_PENDING && more) {
		more = kvx_await(scheduler, since, load->until_ns);
		state = state_of(load);
	}
	scheduler->lease_late = state == KVC_PENDING && kv_now_ns(scheduler->env) >= load->until_ns;

	return state;
}

/* Tokens from the start that are leased. Of several groups all that was asked for, or nothing. */
static uint32_t leased(const kvx_scheduler_t *scheduler, const kvx_sload_t *load)
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

/* Are the blocks held, or asked for, those, or more? */
static int fits(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request, uint32_t units)
{
	const kvx_sload_t *held = request->held;

	if (held->space != request->space || held->local > ask->local) {
		return 0;
	}

	return scheduler->group_count == 1 ? held->units >= units : held->units == units && held->local == ask->local;
}

/* And of the daemon that is there now? */
static int covers(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request, uint32_t units)
{
	return request->held->era == scheduler->era && fits(scheduler, ask, request, units);
}

/* ---- used by match, load, finish
 * --------------------------------------------------------------------------------------------- */

static void unlink_hold(kvx_scheduler_t *scheduler, kvx_request_t *request)
{
	kvx_sload_t **link = &scheduler->holds;

	while (*link != request->held) {
		link = &(*link)->next;
	}
	*link = request->held->next;
	scheduler->hold_count--;
	request->held = NULL;
}

void kvx_hold_drop(kvx_scheduler_t *scheduler, kvx_request_t *request)
{
	kvx_sload_t *held = request->held;

	if (held) {
		unlink_hold(scheduler, request);
		kvx_load_free(scheduler, held);
	}
}

uint32_t kvx_hold(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t end,
		  kvc_status_t *p_status)
{
	uint32_t tokens;

	*p_status = KVC_OK;

	if (request->held && !covers(scheduler, ask, request, end / scheduler->unit)) {
		kvx_hold_drop(scheduler, request);
	}
	if (!request->held) {
		*p_status = start(scheduler, ask, request, end);
	}
	if (!request->held) {
		return ask->local;
	}
	request->held->used_ns = kv_now_ns(scheduler->env);
	*p_status = wait_for(scheduler, request->held);
	if (*p_status == KVC_PENDING) {
		scheduler->stats.late_answers++;
		return ask->local;
	}
	tokens = *p_status == KVC_OK ? leased(scheduler, request->held) : 0;
	tokens = tokens < end ? tokens : end;
	if (tokens <= ask->local) {
		scheduler->stats.lease_lost++;
		kvx_hold_drop(scheduler, request);
		return ask->local;
	}

	return tokens;
}

/* Leave out what the engine has got meanwhile, and what it does not want. */
static void cut(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t units, kvx_sload_t *load)
{
	const uint32_t block_tokens = scheduler->groups[0].block_tokens;
	kvx_sload_part_t *part = &load->part[0];
	const uint32_t local = ask->local / block_tokens, end = units * scheduler->unit / block_tokens;

	if (scheduler->group_count > 1) {
		return; /* held for exactly this */
	}
	part->first = part->first > local ? part->first : local;
	part->n = end - part->first;
}

kvx_sload_t *kvx_hold_take(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t units)
{
	kvx_sload_t *load = request->held;
	int lost;

	if (!load || !fits(scheduler, ask, request, units)) {
		kvx_hold_drop(scheduler, request);
		return NULL;
	}
	lost = load->era != scheduler->era || state_of(load) != KVC_OK;
	unlink_hold(scheduler, request);
	cut(scheduler, ask, units, load);
	for (uint32_t p = 0; lost && p < load->parts; p++) {
		kvc_release(&load->part[p].lease, 1);
		load->part[p].lease = NULL;
	}

	return load;
}

kvx_sload_t *kvx_hold_lost(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
			   uint32_t units)
{
	kvx_sload_t shape = {.space = request->space, .era = scheduler->era, .local = ask->local, .units = units};
	const uint32_t blocks = kvx_load_ranges(scheduler, scheduler->spaces[request->space].space, ask, units, &shape);

	return create(scheduler, request, &shape, blocks);
}

void kvx_holds_keep(kvx_scheduler_t *scheduler, uint64_t now)
{
	kvx_sload_t *next;

	for (kvx_sload_t *load = scheduler->holds; load; load = next) {
		kvx_request_t *request = kvx_requests_same(&scheduler->requests, load->id, load->id_len, load->serial);

		next = load->next;
		if (!kv_holds(request)) { /* finish() gives back what its request holds */
			kvx_scheduler_check(scheduler);
			return;
		}
		if (now - load->used_ns > IDLE_MS * KVX_MS) {
			kvx_hold_drop(scheduler, request);
		} else if (now - load->renewed_ns > scheduler->load_ms * KVX_MS) {
			kvx_load_renew(scheduler, load, now);
		}
	}
}

void kvx_holds_close(kvx_scheduler_t *scheduler)
{
	while (scheduler->holds) {
		kvx_sload_t *load = scheduler->holds;
		kvx_request_t *request = kvx_requests_same(&scheduler->requests, load->id, load->id_len, load->serial);

		if (!kv_holds(request)) {
			return;
		}
		kvx_hold_drop(scheduler, request);
	}
}
