/* Match: how much of a request is stored, and whether loading it pays. */
#include "common/await.h"
#include "scheduler/handover.h"
#include "scheduler/keys.h"
#include "scheduler/lease_cache.h"
#include "scheduler/base/requests.h"
#include "scheduler/names/spaces.h"
#include "scheduler/names/weights.h"

#include "kv/log.h"
#include "kv/struct.h"

#define ATTACH_US   1000u            /* longest search for a daemon in a match */
#define AGAIN_MS    20u              /* pause between two searches */
#define ANSWER_NS   (1000u * KVX_MS) /* a waiting request that asks again gets the same answer for so long */
#define INSIDE_NS   (25u * KVX_MS)   /* most that synchronous loads of one step may take together: docs/decisions/015 */
#define LEASE_TRIES 2u               /* after the first; the last is of host memory alone */
#define OWN_PART    4u /* another GPU must have this part more than the engine's own: docs/decisions/062 */

/* 1: load asynchronously. A synchronous load holds up every request of its step, and on an engine that plans ahead also
 * the answers of the step before (docs/decisions/015). */
static int is_async(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, uint32_t cpu, uint32_t disk)
{
	const uint64_t sync_ns = kvx_cost_model_load_ns(&scheduler->cost_model, cpu, disk) + scheduler->admitted_ns;

	if (scheduler->group_count > 1 || scheduler->mode == KVX_LOAD_ASYNC) {
		return 1;
	}
	if (scheduler->mode == KVX_LOAD_SYNC || cpu + disk == 0) {
		return 0; /* memory of the GPU is as fast as computing takes notice */
	}
	if (ask->busy == 0) {
		return scheduler->admitted > 0 && sync_ns >= INSIDE_NS;
	}
	if (disk > 0 && disk >= cpu / 3u) {
		return 1;
	}

	return scheduler->step_ns == 0 || sync_ns >= scheduler->step_ns;
}

static void log_state_change(const kvx_cost_decision_t *answer)
{
	const int stopped = answer->state_changed > 0;

	if (answer->state_changed) {
		kv_log(KV_LOG_INFO, "kvx",
		       "loading %u tokens and more from %s is %s than computing them (%.1f ms, %.1f ms): %s",
		       answer->from, answer->on_disk ? "disk" : "memory", stopped ? "slower" : "faster",
		       (double)answer->load_ns / 1e6, (double)answer->compute_ns / 1e6,
		       stopped ? "stopped, a piece is tried now and then" : "resumed");
	}
}

/* Leave out the parts of the hit that cost more to load than to compute, after `base` tokens. 0: nothing is left. The
 * cost model is asked once for a request that waits: each answer counts, and may be a sample. */
static int apply_cost_model(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t base,
			    uint32_t *p_cpu, uint32_t *p_disk)
{
	const kvx_cost_query_t query = {
		.now_ns = kv_now_ns(scheduler->env),
		.local = base,
		.cpu = *p_cpu,
		.disk = *p_disk,
		.total = ask->tokens,
		/* several groups cannot serve a shorter prefix: a window may lack blocks */
		.grain = scheduler->group_count == 1 ? scheduler->groups[0].block_tokens : 0,
	};
	const kvx_cost_query_t *last = &request->cost_query;
	kvx_cost_decision_t *answer = &request->cost_answer;
	kvx_scheduler_stats_t *stats = &scheduler->stats;

	if (!scheduler->use_cost_model) {
		return 1;
	}
	if (!last->now_ns || query.now_ns - last->now_ns >= ANSWER_NS || last->local != query.local ||
	    last->cpu != query.cpu || last->disk != query.disk) {
		kvx_cost_model_decide(&scheduler->cost_model, &query, answer);
		request->cost_query = query;
		log_state_change(answer);
		stats->cost_model_stops += answer->state_changed > 0;
		stats->cost_model_resumes += answer->state_changed < 0;
		stats->cost_model_samples += answer->choice == KVX_LOAD_SAMPLE;
		stats->cost_model_cuts +=
			answer->choice == KVX_LOAD && answer->cpu + answer->disk < query.cpu + query.disk;
	}
	*p_cpu = answer->cpu;
	*p_disk = answer->disk;

	return answer->choice != KVX_RECOMPUTE;
}

/* Reserve the block tables that the load will need now: a load that was promised must not fail for lack of memory. */
static int reserve_tables(kvx_scheduler_t *scheduler, kvx_request_t *request, uint32_t tokens)
{
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t blocks = tokens / scheduler->groups[g].block_tokens + 1u;

		if (kvx_request_reserve(&scheduler->requests, request, g, blocks) != KVC_OK) {
			return 0;
		}
	}

	return 1;
}

/* ---- what is missed, and why ----------------------------------------------------------------- */

static void count_missed(kvx_scheduler_t *scheduler, uint32_t why, uint32_t tokens)
{
	kvx_scheduler_stats_t *stats = &scheduler->stats;
	uint64_t *const counters[] = {
		[KV_WHY_ABSENT] = &stats->miss_tokens_absent,
		[KV_WHY_EVICTED] = &stats->miss_tokens_evicted,
		[KV_WHY_DAEMON_STALE] = &stats->miss_tokens_daemon_stale,
		[KV_WHY_NO_DAEMON] = &stats->miss_tokens_no_daemon,
		[KV_WHY_STALE_EPOCH] = &stats->miss_tokens_stale_epoch,
		[KV_WHY_CONTENDED] = &stats->miss_tokens_contended,
		[KV_WHY_TIMEOUT] = &stats->miss_tokens_late,
		[KV_WHY_UNREADABLE] = &stats->miss_tokens_unreadable,
	};

	if (why < KV_COUNT_OF(counters) && counters[why]) {
		*counters[why] += tokens;
	} else {
		stats->miss_tokens_refused += tokens;
	}
}

/* What a lease did not bring of the tokens found. */
static void count_unleased(kvx_scheduler_t *scheduler, const kvx_request_t *request, uint32_t tokens,
			   kvc_status_t status, kvx_hit_t *hit)
{
	uint32_t why = kvx_miss_reason_of(status);

	if (why == KV_WHY_TIMEOUT && kvx_space_miss_reason(scheduler, request->space) == KV_WHY_DAEMON_STALE) {
		why = KV_WHY_DAEMON_STALE;
	}
	count_missed(scheduler, why, tokens);
	hit->why = why == KV_WHY_NONE ? KV_WHY_TIMEOUT : why;
	hit->leasing = status == KVC_PENDING;
}

/* What is found beyond the tokens that the engine has: in memory of a GPU, then in host memory, then on disk. */
typedef struct kvx_found {
	uint32_t mem;            /* the GPU's */
	uint32_t gpu, cpu, disk; /* tokens */
	uint32_t host_end;       /* tokens from the start that are in host memory or on disk */
	uint32_t host_cpu;       /* and in host memory alone */
	uint32_t most;           /* that a load may bring */
} kvx_found_t;

static uint32_t count_found(const kvx_found_t *found)
{
	return found->gpu + found->cpu + found->disk;
}

/* What is in memory of a GPU: tokens from the start. */
typedef struct kvx_in_mem {
	uint32_t mem, tokens;
} kvx_in_mem_t;

/* Several groups are loaded from one mem: a window that ends at another length has other blocks. */
static kvx_found_t split_found(const kvx_scheduler_t *scheduler, uint32_t local, const kvc_match_t *match,
			       const kvx_in_mem_t *there)
{
	kvx_found_t found = {
		.mem = there->mem, .host_end = match->n * scheduler->unit, .host_cpu = match->n_cpu * scheduler->unit};
	uint32_t base, in_cpu, all, gpu = there->tokens;

	if (gpu <= local || (scheduler->group_count > 1 && gpu < found.host_end)) {
		gpu = local;
	}
	base = gpu;
	in_cpu = found.host_cpu > base ? found.host_cpu : base;
	all = found.host_end > in_cpu ? found.host_end : in_cpu;
	found.gpu = base - local;
	found.cpu = in_cpu - base;
	found.disk = all - in_cpu;

	return found;
}

/* Cut it to that number of tokens, from its end. */
static void cut_found(kvx_found_t *found, uint32_t most)
{
	found->gpu = found->gpu < most ? found->gpu : most;
	most -= found->gpu;
	found->cpu = found->cpu < most ? found->cpu : most;
	most -= found->cpu;
	found->disk = found->disk < most ? found->disk : most;
}

/* Lease it: how many tokens. What the GPU's memory has lost since may still be in host memory, or be there by now: the
 * first part ends where the GPU's does, then, or is left out. */
static uint32_t lease_found(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
			    const kvx_found_t *found, kvc_status_t *p_status)
{
	const uint32_t local = ask->local, end = local + count_found(found);
	kvx_span_t span = {.mem = found->mem, .gpu = local + found->gpu, .end = end};
	uint32_t leased = kvx_lease_cache_acquire(scheduler, ask, request, &span, p_status);

	for (uint32_t tries = 0; tries < LEASE_TRIES && *p_status != KVC_PENDING && leased < span.gpu; tries++) {
		kvx_lease_cache_drop(scheduler, request);
		span.gpu = tries + 1u < LEASE_TRIES ? leased : local;
		leased = kvx_lease_cache_acquire(scheduler, ask, request, &span, p_status);
	}

	return leased - local;
}

static kvx_coverage_t classify_found(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_found_t *found,
				     uint32_t end)
{
	if (ask->local + count_found(found) < end) {
		return KVX_COVERED_IN_PART;
	}
	if (is_async(scheduler, ask, found->cpu, found->disk)) {
		return KVX_COVERED;
	}

	return found->cpu + found->disk > 0 ? KVX_COVERED_FOR_STEP : KVX_COVERED_IN_GPU_MEM;
}

/* What is not stored yet is promised, if another instance computes it. 0: none does. */
static int promise(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, const kvx_found_t *found,
		   uint32_t end, kvx_hit_t *hit)
{
	const kvx_coverage_t stored = classify_found(scheduler, ask, found, end);
	const uint32_t promised = reserve_tables(scheduler, request, ask->tokens)
					  ? kvx_handover_promise(scheduler, ask, request, stored, end)
					  : ask->local;

	hit->tokens = promised - ask->local;
	hit->async = promised > ask->local;
	scheduler->stats.match_hits += promised > ask->local;

	return promised > ask->local;
}

/* The lease has brought less than was found. Another instance may still be saving it. 0: none is. */
static int promise_rest(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t most,
			kvx_hit_t *hit)
{
	const kvx_found_t nothing = {0};

	return scheduler->handovers && promise(scheduler, ask, request, &nothing, most, hit);
}

/* Decide what of the found tokens the engine may count on, and lease it. */
static void decide_hit(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, kvx_found_t *found,
		       kvx_hit_t *hit)
{
	const uint32_t local = ask->local, block_tokens = scheduler->groups[0].block_tokens, all = count_found(found);
	uint32_t most, end, leased, in_cpu;
	kvx_scheduler_stats_t *stats = &scheduler->stats;
	kvc_status_t status;
	int async;

	if (found->cpu + found->disk > 0 &&
	    !apply_cost_model(scheduler, ask, request, local + found->gpu, &found->cpu, &found->disk)) {
		found->cpu = found->disk = 0;
		hit->declined = found->gpu == 0;
	}
	stats->match_declined += (uint64_t)hit->declined;
	stats->miss_tokens_declined += all - count_found(found);
	if (hit->declined) {
		return;
	}
	async = is_async(scheduler, ask, found->cpu, found->disk);
	if (!async && local + count_found(found) >= ask->tokens) {
		/* a synchronous step must compute at least one token */
		most = (ask->tokens - 1u) / block_tokens * block_tokens;
		cut_found(found, most > local ? most - local : 0);
	}
	end = local + count_found(found);
	if (end - local < scheduler->min_tokens ||
	    !reserve_tables(scheduler, request, ask->tokens > end ? ask->tokens : end)) {
		stats->miss_tokens_refused += end - local;
		return;
	}
	leased = lease_found(scheduler, ask, request, found, &status);
	if (leased < end - local && status != KVC_PENDING && promise_rest(scheduler, ask, request, found->most, hit)) {
		return;
	}
	leased = request->cached ? leased : 0; /* there was no memory for the promise */
	if (leased < end - local) {
		count_unleased(scheduler, request, end - local - leased, status, hit);
		hit->disk_tokens = hit->leasing ? found->disk : 0;
	}
	if (leased > 0) {
		hit->tokens = leased;
		hit->async = async;
		hit->gpu_tokens = kvx_lease_cache_gpu_tokens(scheduler, ask, request, local + leased);
		in_cpu = found->host_cpu > local + hit->gpu_tokens ? found->host_cpu - local : hit->gpu_tokens;
		hit->disk_tokens = leased > in_cpu ? leased - in_cpu : 0;
		stats->match_hits++;
	}
}

/* When all tokens are loaded, the engine computes the last one again, in the blocks it was given for all. A window of
 * whole blocks then begins a block earlier than what was loaded, and a state has that token already. */
static int can_load_all(const kvx_scheduler_t *scheduler)
{
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const kv_group_t *group = &scheduler->groups[g];

		if (group->rule == KV_RULE_STATE ||
		    (group->rule == KV_RULE_WINDOW && group->window % group->block_tokens == 0)) {
			return 0;
		}
	}

	return 1;
}

/* An idle engine makes no calls, so it has not attached to a daemon that came back. A request is worth a short search
 * for it, but not every request. Returns why not, as kvx_space_miss_reason(). */
static uint32_t poll_for_daemon(kvx_scheduler_t *scheduler, uint32_t number)
{
	uint64_t now = kv_now_ns(scheduler->env);
	const uint64_t until = now + ATTACH_US * UINT64_C(1000);
	uint32_t why = KV_WHY_NO_DAEMON;

	if (now < scheduler->next_attach_ns) {
		return why;
	}
	do {
		(void)kvc_poll_us(scheduler->kvc, KVX_SLICE_US);
		kvx_spaces_poll(scheduler, now);
		why = kvx_space_miss_reason(scheduler, number);
		now = kv_now_ns(scheduler->env);
	} while (why == KV_WHY_NO_DAEMON && kvc_fd(scheduler->kvc) >= 0 && now < until);
	scheduler->next_attach_ns = now + AGAIN_MS * KVX_MS;

	return why;
}

/* Why nothing can be found. A stale heartbeat is waited for: a miss costs more than the rest of a stall
 * (docs/decisions/021). */
static uint32_t lookup_miss_reason(kvx_scheduler_t *scheduler, uint32_t number)
{
	const uint64_t since = kv_now_ns(scheduler->env);
	uint32_t why = kvx_space_miss_reason(scheduler, number);

	while (why == KV_WHY_DAEMON_STALE && kvx_scheduler_await_daemon(scheduler, since, since + KVX_STALE_NS)) {
		why = kvx_space_miss_reason(scheduler, number);
	}
	if (why == KV_WHY_NO_DAEMON && number != UINT32_MAX) {
		why = poll_for_daemon(scheduler, number);
	}

	return why;
}

/* The daemon may have been stopped in the middle of a bucket: then the lookup is repeated. */
static void match_keys(kvx_scheduler_t *scheduler, const kvx_key_view_t *view, kvc_match_t *match)
{
	const uint64_t since = kv_now_ns(scheduler->env), until = since + KVX_STALE_NS;

	do {
		kvc_match_lazy(view->space, &view->source, view->n, match);
	} while (match->why == KV_WHY_CONTENDED && kvx_scheduler_await_daemon(scheduler, since, until));
}

static uint32_t match_gpu_mem(kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_key_view_t *view,
			      uint32_t mem)
{
	kvc_match_t match = {.struct_size = sizeof match};
	kvx_key_view_t there = *view;

	there.source.ctx = &there;
	there.space = kvx_space_in(scheduler, request->space, mem);
	kvc_match_lazy(there.space, &there.source, there.n, &match);

	return match.n * scheduler->unit;
}

/* The GPU with the longest prefix. The engine's own is the fastest, unless the host has to add too much to it. */
static kvx_in_mem_t match_gpu_mems(kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_key_view_t *view)
{
	kvx_in_mem_t best = {.mem = KVX_OWN_MEM};
	uint32_t least = 0; /* another one must have more than that */

	for (uint32_t mem = KVX_OWN_MEM; mem < KVX_MEMS && least < view->n * scheduler->unit; mem++) {
		const uint32_t tokens = kvx_mem_is_reached(scheduler, request->space, mem)
						? match_gpu_mem(scheduler, request, view, mem)
						: 0;

		if (tokens > least) {
			best = (kvx_in_mem_t){mem, tokens};
			least = mem == KVX_OWN_MEM ? tokens + tokens / OWN_PART : tokens;
		}
	}

	return best;
}

/* Search the store, and lease what is worth loading. Sets hit->why. */
static void look_up(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t tokens,
		    kvx_hit_t *hit)
{
	kvc_match_t match = {.struct_size = sizeof match};
	kvx_key_view_t view;
	uint32_t reach, end;
	kvx_in_mem_t there;
	kvx_found_t found;

	kvx_key_view_init(scheduler, ask, request, tokens, &view);
	there = match_gpu_mems(scheduler, request, &view);
	if (view.n > 0) {
		match_keys(scheduler, &view, &match);
	}
	if (request->own.partial && match.n + 1u == view.n && view.n == request->own.n) {
		match.n_cpu += match.n_cpu == match.n;
		match.n++; /* a private block, which no match sees: the lease tells */
	}
	/* Several groups: at a shorter length other blocks are needed. */
	if (ask->memory_only && match.n_cpu < match.n) {
		match.n = match.n_cpu = scheduler->group_count > 1 ? 0 : match.n_cpu;
	}
	hit->stored = match.n * scheduler->unit;
	hit->why = match.why;
	end = view.n * scheduler->unit;
	found = split_found(scheduler, ask->local, &match, &there);
	found.most = end;
	if ((scheduler->handovers && promise(scheduler, ask, request, &found, end, hit)) || view.n == 0) {
		return;
	}
	hit->stored = there.tokens > hit->stored ? there.tokens : hit->stored;
	reach = ask->local + count_found(&found);
	count_missed(scheduler, match.why, end > reach ? end - reach : 0);
	if (end > reach) { /* the daemon knows whether it was evicted */
		view.source.key(view.source.ctx, reach / scheduler->unit, &request->first_missing);
	}
	if (reach - ask->local < scheduler->min_tokens || request->failed) {
		scheduler->stats.miss_tokens_refused += reach - ask->local;
	} else {
		decide_hit(scheduler, ask, request, &found, hit);
	}
}

/* ---- what other requests of the step load ---------------------------------------------------- */

/* The key of unit `unit` of the request. 0: it is not known. */
static int key_of_unit(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request, uint32_t unit,
		       kvc_key_t *key)
{
	kvx_key_view_t view;

	kvx_key_view_init(scheduler, ask, request, (unit + 1u) * scheduler->unit, &view);
	if (unit < view.n) {
		view.source.key(view.source.ctx, unit, key);
	}

	return unit < view.n && !view.bad;
}

static void note_sync_hit(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request)
{
	kvx_sync_hits_t *hits = &scheduler->sync_hits;
	const uint32_t unit = ask->local / scheduler->unit;
	kvc_key_t key;

	if (hits->step != scheduler->step) {
		hits->step = scheduler->step;
		hits->n = 0;
	}
	if (hits->n >= KVX_SYNC_HITS || !key_of_unit(scheduler, ask, request, unit, &key)) {
		hits->n = KVX_SYNC_HITS + 1u;
		return;
	}
	hits->hit[hits->n].key = key;
	hits->hit[hits->n].space = request->space;
	hits->hit[hits->n].unit = unit;
	hits->n++;
}

/* Has the engine cached some of the request's `local` tokens for a synchronous load of this step? The load may fail.
 * Then the engine computes the loading request again, piece by piece, but this one at once, on what the load has left.
 * Equal keys are equal prefixes, so the first block that is loaded tells (docs/decisions/019). */
static int shares_sync_hit(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request)
{
	const kvx_sync_hits_t *hits = &scheduler->sync_hits;
	const uint32_t local = ask->local / scheduler->unit;
	const uint32_t n = hits->step == scheduler->step && scheduler->defer_shared && local > 0 ? hits->n : 0;
	kvc_key_t key;

	for (uint32_t i = 0; i < n && i < KVX_SYNC_HITS; i++) {
		if (hits->hit[i].space == request->space && hits->hit[i].unit < local &&
		    (!key_of_unit(scheduler, ask, request, hits->hit[i].unit, &key) ||
		     memcmp(&key, &hits->hit[i].key, sizeof key) == 0)) {
			return 1;
		}
	}

	return n > KVX_SYNC_HITS;
}

static void match_request(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_hit_t *hit)
{
	const uint64_t start = kv_now_ns(scheduler->env);
	kvx_scheduler_stats_t *stats = &scheduler->stats;
	kvx_request_t *request;
	uint32_t tokens, end, missed;

	stats->matches++;
	if (!kvx_ask_is_sound(ask) || ask->tokens == 0) {
		return;
	}
	tokens = ask->whole && can_load_all(scheduler) ? ask->tokens : ask->tokens - 1u;
	end = tokens - tokens % scheduler->unit;
	missed = end > ask->local ? end - ask->local : 0;
	request = kvx_requests_find_or_add(&scheduler->requests, ask->id, ask->id_len);
	if (!request) {
		stats->miss_tokens_refused += missed;
		return;
	}
	kvx_weights_poll(scheduler);
	request->space = scheduler->adopted ? kvx_space_find_or_add(scheduler, ask) : UINT32_MAX;
	/* The name may be one of before, and what must be taken back from it still there. */
	if (!scheduler->adopted ||
	    (request->space < scheduler->space_count && scheduler->spaces[request->space].suspects)) {
		stats->miss_tokens_weights_pending += missed;
		hit->why = KV_WHY_NO_DAEMON;
		return;
	}
	if (shares_sync_hit(scheduler, ask, request)) {
		hit->deferred = 1;
		stats->match_deferred++;
		return;
	}
	request->first_missing = (kvc_key_t){0};
	hit->why = lookup_miss_reason(scheduler, request->space);
	if (hit->why == KV_WHY_NONE) {
		look_up(scheduler, ask, request, tokens, hit);
	} else {
		stats->match_no_daemon += hit->why == KV_WHY_NO_DAEMON || hit->why == KV_WHY_DAEMON_STALE;
		count_missed(scheduler, hit->why, missed);
	}
	if (hit->tokens > 0 && !hit->async) {
		note_sync_hit(scheduler, ask, request);
	}
	/* for the report at the request's end */
	request->why = hit->why;
	request->match_ns = kv_now_ns(scheduler->env) - start;
}

kvc_status_t kvx_scheduler_match(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_hit_t *hit)
{
	kvx_hit_t full = {0};

	if (!kv_struct_is_set(hit)) {
		return KVC_ERR_ARG;
	}
	match_request(scheduler, ask, &full);
	(void)kv_struct_fill(hit, &full, sizeof full);

	return KVC_OK;
}
