/* Saves: slots are reserved as soon as blocks are certain to be full, handed to the ranks when the daemon has granted
 * them, and done when the daemon says so.
 *
 * A block is handed out only while it still is what was reserved: every engine block counts its allocations. A block
 * that is allocated to another request in the very step of the message still has its old bytes when the ranks read the
 * message, and is saved before they are overwritten. */
#include "scheduler/save.h"
#include "scheduler/keys.h"
#include "scheduler/base/requests.h"
#include "scheduler/names/spaces.h"
#include "scheduler/step_time.h"
#include "scheduler/names/weights.h"

#include "kv/struct.h"

#define LATE_MS  10000u /* a put not handed in so long after its step is not renewed any longer */
#define LAST_MS  1000u /* of a request that ended so long ago nothing is asked for; no step waits for an older answer */
#define REST_MS  20u   /* pause before a busy daemon is asked again; doubled each time */
#define REST_MAX 6u    /* doublings */
#define RUNS     64u   /* puts that one advance() starts for a group */

#define DEVICE_PUTS (KVX_PUTS_MAX / 2u) /* from this number of puts on none is started for GPU memory */

/* Saving has begun, with the daemon that is attached now: another one may not have what was saved. */
static int has_begun(const kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	return request->generation == scheduler->generation;
}

/* ---- puts as objects ------------------------------------------------------------------------- */

static void remove_put(kvx_scheduler_t *scheduler, kvx_sput_t *put)
{
	kvx_request_t *request = put->request;

	KVX_LIST_REMOVE(put, next, link, scheduler->puts_end);
	KVX_LIST_REMOVE(put, own_next, own_link, request->puts_end);
	scheduler->put_count--;
	kvc_put_free(put->put);
	kv_free(scheduler->env, put);
	kvx_request_release(&scheduler->requests, request);
}

static void postpone_saving(kvx_request_t *request, kvc_status_t why, uint64_t now)
{
	request->refused = why;
	request->refusals++;
	request->retry_ns = now + ((uint64_t)REST_MS << request->tries) * KVX_MS;
	request->tries += request->tries < REST_MAX;
}

/* Blocks from `block` on were not saved, and why: ask again after `now` and a pause. */
static void schedule_retry(const kvx_sput_t *put, uint32_t block, kvc_status_t why, uint64_t now)
{
	kvx_request_t *request = put->request;
	uint32_t *p_asked = &request->groups[put->index].asked[KVX_HOST_MEM];

	if (put->mem != KVX_HOST_MEM) {
		request->to_device = 0; /* what follows there has no parent */
	}
	if (!put->once) {
		*p_asked = *p_asked < block ? *p_asked : block;
		postpone_saving(request, why, now);
	}
}

/* The rest of a put that was not, or not wholly, saved. */
static void retry_lost(kvx_scheduler_t *scheduler, const kvx_sput_t *put, uint32_t saved, kvc_status_t why,
		       uint64_t now)
{
	scheduler->stats.save_lost += put->mem == KVX_HOST_MEM ? put->granted - saved : 0;
	schedule_retry(put, put->from + saved, why, now);
}

/* Nothing of it is saved. */
static void give_up_put(kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	retry_lost(scheduler, put, 0, KVC_ERR_REVOKED, now);
	remove_put(scheduler, put);
}

/* ---- asking ---------------------------------------------------------------------------------- */

/* A consumer waits for its blocks: the daemon may not refuse them. */
static int is_handed_over(const kvx_request_t *request)
{
	for (uint32_t mem = 0; mem < KV_COUNT_OF(request->handover); mem++) {
		if (request->handover[mem] && request->handover[mem]->sends) {
			return 1;
		}
	}

	return request->to_device > 0;
}

/* The daemon's pool thrashes, and it has refused the request's blocks. Asking again would count as their second use. */
static int is_unwanted(const kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	return request->unwanted && request->unwanted == scheduler->generation && !is_handed_over(request);
}

static int entry_is_current(const kvx_scheduler_t *scheduler, const kvx_request_group_t *group, uint32_t entry)
{
	return entry < group->n && kvx_entry_is_current(scheduler, &group->entries[entry]);
}

/* vLLM's events name a block by the last eight bytes of its hash, as a number. */
static uint64_t event_hash(const kvx_key_view_t *view, uint32_t unit)
{
	uint32_t len = 0;
	const uint8_t *hash = view->hashes->at(view->hashes->ctx, unit, &len);
	uint64_t event = 0;

	for (uint32_t i = len >= 8u ? len - 8u : 0; hash && i < len; i++) {
		event = event << 8 | hash[i];
	}

	return event;
}

typedef struct kvx_run {
	kvx_request_t *request;
	kvx_key_view_t *view;
	uint32_t index;               /* of the group, among ours */
	uint32_t mem;                 /* KVX_HOST_MEM or KVX_OWN_MEM */
	uint32_t from, to;            /* blocks */
	uint32_t step;                /* that computes them */
	const kvc_key_t *private_key; /* NULL: whole blocks */
	int once;                     /* not tried again */
} kvx_run_t;

/* The block of the request's private unit; UINT32_MAX: it has none. */
static uint32_t private_block(const kvx_request_t *request)
{
	return request->own.partial ? request->own.n - 1u : UINT32_MAX;
}

/* Keys of its blocks and of their parent, and what events call them. 0: not all are known. */
static int collect_keys(const kvx_scheduler_t *scheduler, const kvx_run_t *run, kvx_sput_t *put)
{
	const uint32_t units = scheduler->groups[run->index].block_tokens / scheduler->unit;

	if (run->private_key) {
		put->keys[0] = *run->private_key;
		return 1;
	}
	run->view->bad = 0;
	for (uint32_t i = 0; i < put->parents + put->n; i++) {
		const uint32_t unit = (run->from - put->parents + i + 1u) * units - 1u;

		run->view->source.key(run->view, unit, put->keys - put->parents + i);
		if (scheduler->foreign && !run->view->bad) {
			(put->events - put->parents)[i] = event_hash(run->view, unit);
		}
	}

	return !run->view->bad;
}

/* A daemon that is silent answers when it goes on. What is handed over is worth that wait: its consumer waits too, and
 * an engine keeps the bytes of a request that has ended until it needs the blocks. */
static int may_ask(const kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	const uint32_t why = kvx_space_miss_reason(scheduler, request->space);
	const kvx_shandover_t *h = request->handover[0];

	return !request->unsavable && (why == KV_WHY_NONE || (why == KV_WHY_DAEMON_STALE && h && h->sends));
}

/* 0: not now. */
static int start_put(kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	const kvx_request_t *request = put->request;
	const kv_group_t *group = &scheduler->groups[put->index];
	const uint32_t base = put->from - put->parents, from = put->is_private ? 0 : put->from;
	kvc_put_options_t options = {.struct_size = sizeof options,
				     .writers = &scheduler->writers[(size_t)put->index * scheduler->writer_count],
				     .writer_count = scheduler->writer_count,
				     .group = group->id};

	if (put->is_private) {
		options.private_blocks = 1;
	} else {
		options.event_hashes = scheduler->foreign ? put->events - put->parents : NULL;
		options.tokens = scheduler->foreign ? NULL : request->own.tokens + (size_t)base * group->block_tokens;
		options.base = base;
		options.yields = put->mem == KVX_OWN_MEM && request->to_device == 0;
		options.optional = put->mem == KVX_HOST_MEM && !scheduler->saves_all && !is_handed_over(request);
	}
	put->at = KVX_SPUT_ASKED;
	put->asked_ns = now;

	return kvc_put_start(kvx_space_in(scheduler, put->space, put->mem), put->keys - put->parents, from,
			     from + put->n, &options, &put->put) == KVC_OK;
}

/* Another one like it, for `like->n` blocks, without their entries and keys. NULL: not now. */
static kvx_sput_t *add_put(kvx_scheduler_t *scheduler, const kvx_sput_t *like)
{
	const size_t a_block = sizeof(kvx_table_entry_t) + sizeof(kvc_key_t) + sizeof(uint64_t);
	const size_t bytes = sizeof(kvx_sput_t) + (like->n + 1u) * a_block;
	kvx_sput_t *put = scheduler->put_count < KVX_PUTS_MAX ? kv_alloc(scheduler->env, bytes) : NULL;

	if (!put) {
		return NULL;
	}
	*put = *like;
	put->keys = (kvc_key_t *)(void *)(put->entries + put->n) + 1;
	put->events = (uint64_t *)(void *)(put->keys + put->n) + 1;
	KVX_LIST_APPEND(put, next, link, scheduler->puts_end);
	KVX_LIST_APPEND(put, own_next, own_link, put->request->puts_end);
	scheduler->put_count++;

	return put;
}

/* Reserve one put for blocks [from, to). 0: not now. */
static int reserve_run(kvx_scheduler_t *scheduler, const kvx_run_t *run, uint64_t now)
{
	const kvx_sput_t like = {
		.once = run->once,
		.urgent = run->mem == KVX_OWN_MEM && run->request->to_device > 0,
		.is_private = run->private_key != NULL,
		.parents = !run->private_key && run->from && scheduler->groups[run->index].rule == KV_RULE_FULL,
		.request = run->request,
		.space = run->request->space,
		.mem = run->mem,
		.index = run->index,
		.from = run->from,
		.n = run->to - run->from,
		.step = run->step,
	};
	kvx_sput_t *put = add_put(scheduler, &like);

	if (put) {
		memcpy(put->entries, run->request->groups[run->index].entries + run->from,
		       put->n * sizeof *put->entries);
	}
	if (!put || !collect_keys(scheduler, run, put) || !start_put(scheduler, put, now)) {
		if (put) {
			remove_put(scheduler, put);
		}
		scheduler->stats.save_busy += run->mem == KVX_HOST_MEM ? like.n : 0;
		return 0;
	}
	scheduler->stats.saves++;

	return 1;
}

/* Not the private unit of an own chain (request->own.partial), although both end in the same put. libkvx counts that
 * unit as a whole block, so save_group() reserves it in its order and again when it is lost. Here the engine counts
 * tokens: a block that is reserved, and not full, is a rewind to is_rewound(), which revokes the request's puts. Its
 * keys may be hashes of the engine, which are no chain that could be appended to, and the prompt may go on (decision
 * 047). */
void kvx_put_start_private(kvx_scheduler_t *scheduler, kvx_request_t *request, uint32_t mem, uint32_t block,
			   const kvc_key_t *key)
{
	const kvx_run_t run = {.request = request,
			       .mem = mem,
			       .from = block,
			       .to = block + 1u,
			       .step = scheduler->step,
			       .private_key = key,
			       .once = 1};

	if (may_ask(scheduler, request) && entry_is_current(scheduler, &request->groups[0], block)) {
		(void)reserve_run(scheduler, &run, kv_now_ns(scheduler->env));
	}
}

/* All runs of blocks of one group that the view has keys of, and that were not asked for. 0: the daemon takes no more
 * now. */
static int save_group(kvx_scheduler_t *scheduler, kvx_run_t *run, uint64_t now)
{
	const kv_group_t *rules = &scheduler->groups[run->index];
	const int chained = rules->rule == KV_RULE_FULL;
	const uint32_t full = run->view->n * scheduler->unit / rules->block_tokens;
	const uint32_t private_at = private_block(run->request);
	kvx_request_group_t *group = &run->request->groups[run->index];
	uint32_t *p_asked = &group->asked[run->mem];

	for (uint32_t runs = 0; *p_asked < full && runs < RUNS; runs++) {
		run->from = *p_asked;
		while (run->from < full && !entry_is_current(scheduler, group, run->from)) {
			if (chained) {
				/* nothing after a hole has a parent */
				run->request->unsavable |= run->mem == KVX_HOST_MEM;
				return 1;
			}
			run->from++;
		}
		run->to = run->from;
		run->private_key = run->from == private_at ? &run->request->own.keys[private_at] : NULL;
		while (run->to < full && run->to - run->from < KVX_RUN_BLOCKS &&
		       (run->to != private_at || run->to == run->from) && entry_is_current(scheduler, group, run->to)) {
			run->to++;
		}
		if (run->from < run->to && !reserve_run(scheduler, run, now)) {
			return 0;
		}
		*p_asked = run->to;
	}

	return 1;
}

/* Saving begins where the store ends, not where the engine's own hit ended: blocks the store has lost are stored again.
 * In memory of the GPU nothing is asked for twice. */
static void skip_stored(const kvx_scheduler_t *scheduler, const kvx_run_t *run)
{
	kvc_match_t match = {.struct_size = sizeof match};

	kvc_match_lazy(run->view->space, &run->view->source, run->view->n, &match);
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t stored = match.n * scheduler->unit / scheduler->groups[g].block_tokens;
		uint32_t *p_asked = &run->request->groups[g].asked[run->mem];

		*p_asked = run->mem == KVX_HOST_MEM || *p_asked < stored ? stored : *p_asked;
	}
}

/* Of `computed` tokens those that may be saved. */
static uint32_t savable(const kvx_ask_t *ask, uint32_t computed)
{
	return ask->save_tokens > 0 && ask->save_tokens < computed ? ask->save_tokens : computed;
}

/* What that step, or an earlier one, has computed. */
static void save_request(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t step)
{
	const uint64_t now = kv_now_ns(scheduler->env);
	kvx_key_view_t view;
	kvx_run_t run = {.request = request, .view = &view, .step = step};
	int went = 1;

	if (now < request->retry_ns || !may_ask(scheduler, request)) {
		return;
	}
	kvx_key_view_init(scheduler, ask, request, savable(ask, request->computed), &view);
	if (view.n == 0) {
		return;
	}
	if (!has_begun(scheduler, request)) {
		skip_stored(scheduler, &run);
		request->generation = scheduler->generation;
	}
	for (; run.index < scheduler->group_count && went; run.index++) {
		went = save_group(scheduler, &run, now);
	}
	if (!went) {
		postpone_saving(request, KVC_ERR_BUSY, now);
	}
}

void kvx_request_save_to_device(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
				uint32_t tokens)
{
	const uint64_t now = kv_now_ns(scheduler->env);
	kvx_key_view_t view;
	kvx_run_t run = {.request = request, .view = &view, .mem = KVX_OWN_MEM, .step = scheduler->step, .once = 1};

	if (request->unsavable || !kvx_mem_is_usable(scheduler, request->space, KVX_OWN_MEM)) {
		return;
	}
	kvx_key_view_init(scheduler, ask, request, savable(ask, tokens), &view);
	if (view.n == 0) {
		return;
	}
	view.space = kvx_space_in(scheduler, request->space, KVX_OWN_MEM);
	skip_stored(scheduler, &run);
	for (; run.index < scheduler->group_count && scheduler->put_count < DEVICE_PUTS; run.index++) {
		(void)save_group(scheduler, &run, now);
	}
}

/* ---- how far a request is saved -------------------------------------------------------------- */

/* Tokens at which there is something to save. */
static uint32_t next_save_at(const kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	uint64_t next = has_begun(scheduler, request) ? UINT32_MAX : 0;

	if (is_unwanted(scheduler, request)) {
		return UINT32_MAX;
	}
	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint64_t full =
			(request->groups[g].asked[KVX_HOST_MEM] + UINT64_C(1)) * scheduler->groups[g].block_tokens;

		next = full < next ? full : next;
	}

	return (uint32_t)next;
}

/* Fewer tokens are computed than are reserved or saved: blocks were lost and are computed again. */
static int is_rewound(const kvx_scheduler_t *scheduler, const kvx_request_t *request, uint32_t computed)
{
	uint32_t g = 0;

	while (g < scheduler->group_count &&
	       (uint64_t)request->groups[g].asked[KVX_HOST_MEM] * scheduler->groups[g].block_tokens <= computed) {
		g++;
	}

	return g < scheduler->group_count && has_begun(scheduler, request);
}

/* The blocks it has computed since its load failed are valid again, for it and for requests that enter them now. */
static void clear_recomputed(kvx_scheduler_t *scheduler, kvx_request_t *request)
{
	kvx_request_group_t *group = &request->groups[0]; /* several groups have no synchronous loads */
	const uint32_t full = request->computed / scheduler->groups[0].block_tokens;

	for (uint32_t i = 0; i < full && i < group->n; i++) {
		kvx_table_entry_t *entry = &group->entries[i];

		if (kvx_entry_is_garbage(scheduler, entry)) {
			entry->gen = ++scheduler->blocks[entry->id].gen;
		}
	}
	if (request->computed >= request->garbage_until) {
		request->garbage_until = 0;
	}
}

void kvx_request_advance(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request, uint32_t computed)
{
	if (is_rewound(scheduler, request, computed)) {
		kvx_puts_revoke(scheduler, request, scheduler->step - 1u);
		request->generation = 0;
	}
	request->computed = computed;
	if (request->garbage_until) {
		clear_recomputed(scheduler, request);
	}
	if (request->to_device) { /* first: a consumer waits for it */
		kvx_request_save_to_device(scheduler, ask, request,
					   computed < request->to_device ? computed : request->to_device);
	}
	if (computed >= next_save_at(scheduler, request)) {
		save_request(scheduler, ask, request, scheduler->step);
	}
}

void kvx_request_save_rest(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request)
{
	if (scheduler->keeps_blocks && request->refused == KVC_ERR_BUSY &&
	    request->computed >= next_save_at(scheduler, request)) {
		request->retry_ns = 0;
		save_request(scheduler, ask, request, scheduler->step - 1u);
	}
}

uint32_t kvx_scheduler_next_save_at(const kvx_scheduler_t *scheduler, const char *id, uint32_t id_len)
{
	const kvx_request_t *request = kvx_requests_find(&scheduler->requests, id, id_len);

	return request ? next_save_at(scheduler, request) : UINT32_MAX;
}

/* Tokens before which no block waits for the daemon; with `unsent`: for a message to the ranks. */
static uint32_t saved_to(const kvx_scheduler_t *scheduler, const kvx_request_t *request, int unsent)
{
	uint32_t tokens = has_begun(scheduler, request) ? UINT32_MAX : 0;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t asked = request->groups[g].asked[KVX_HOST_MEM] * scheduler->groups[g].block_tokens;

		tokens = asked < tokens ? asked : tokens;
	}
	for (const kvx_sput_t *put = request->puts; put; put = put->own_next) {
		const uint32_t from = put->from * scheduler->groups[put->index].block_tokens;

		if (put->mem == KVX_HOST_MEM && from < tokens && !(unsent && put->at == KVX_SPUT_SENT)) {
			tokens = from;
		}
	}

	return tokens;
}

kvc_status_t kvx_scheduler_get_outcome(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_outcome_t *outcome)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	kvx_outcome_t full = {.load = KVC_MISS};

	if (request) {
		full = (kvx_outcome_t){.load = request->load_status,
				       .why = request->why,
				       .refused = request->refused,
				       .refusals = request->refusals,
				       .stored = saved_to(scheduler, request, 0),
				       .sent = saved_to(scheduler, request, 1)};
	}

	return kv_struct_fill(outcome, &full, sizeof full) ? KVC_OK : KVC_ERR_ARG;
}

/* ---- answers --------------------------------------------------------------------------------- */

/* A put that was never granted. */
static void retry_refused(kvx_scheduler_t *scheduler, const kvx_sput_t *put, kvc_status_t status, uint64_t now)
{
	kvx_request_t *request = put->request;

	schedule_retry(put, put->from, status, now);
	if (status == KVC_ERR_NOT_ADMITTED) {
		scheduler->stats.save_not_admitted += put->n;
		request->unwanted = scheduler->generation;
		request->retry_ns = 0; /* should it be handed over, its blocks are saved at once */
		request->tries = 0;
		return;
	}
	scheduler->stats.save_busy += put->mem == KVX_HOST_MEM ? put->n : 0;
	if (!put->once && status != KVC_ERR_BUSY && status != KVC_ERR_FULL) {
		request->generation = 0; /* the parent or the daemon is gone: match again what is stored */
	}
}

/* Its request has ended, and the engine has not needed its blocks since. */
static int may_rest(const kvx_scheduler_t *scheduler, const kvx_sput_t *put, uint64_t now)
{
	const kvx_request_t *request = put->request;
	uint32_t i = 0;

	if (!scheduler->keeps_blocks || !request->ended || put->once || put->mem != KVX_HOST_MEM ||
	    now - request->ended_ns >= LAST_MS * KVX_MS || !has_begun(scheduler, request) ||
	    !may_ask(scheduler, request)) {
		return 0;
	}
	while (i < put->n && kvx_entry_is_current(scheduler, &put->entries[i])) {
		i++;
	}

	return i == put->n;
}

static void rest_put(kvx_sput_t *put)
{
	kvc_put_free(put->put);
	put->put = NULL;
	put->granted = 0;
	put->at = KVX_SPUT_RESTING;
	put->rests++;
}

/* Of a put that is granted, its blocks that are not. */
static void rest_refused(kvx_scheduler_t *scheduler, const kvx_sput_t *put)
{
	const uint32_t from = put->granted, parents = scheduler->groups[put->index].rule == KV_RULE_FULL;
	kvx_sput_t like = *put, *rest_of;

	like.put = NULL;
	like.at = KVX_SPUT_RESTING;
	like.from += from;
	like.n -= from;
	like.granted = 0;
	like.parents = parents;
	like.rests = 1;
	rest_of = add_put(scheduler, &like);
	if (rest_of) {
		memcpy(rest_of->entries, put->entries + from, like.n * sizeof *put->entries);
		memcpy(rest_of->keys - parents, put->keys + from - parents, (like.n + parents) * sizeof *put->keys);
		memcpy(rest_of->events - parents, put->events + from - parents,
		       (like.n + parents) * sizeof *put->events);
	}
}

/* 1: the put is done. */
static int poll_resting(kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	if (!may_rest(scheduler, put, now)) {
		return 1;
	}
	if (now - put->asked_ns >= ((uint64_t)REST_MS << (put->rests - 1u)) * KVX_MS &&
	    !start_put(scheduler, put, now)) {
		rest_put(put);
	}

	return 0;
}

/* 1: the put is done. */
static int poll_asked(kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	kvc_handle_t handle;
	kvc_put_result_t result = {.struct_size = sizeof result};

	kvc_put_get_result(put->put, &result);
	put->granted = kvc_put_n(put->put);
	if (result.status == KVC_PENDING && put->granted == 0) {
		return 0;
	}
	scheduler->slow = 0;
	scheduler->stats.late_answers += put->awaited && put->step != scheduler->step;
	if (result.status != KVC_PENDING && result.status != KVC_OK) {
		retry_refused(scheduler, put, result.status, now);
		if (result.status != KVC_ERR_BUSY || !may_rest(scheduler, put, now)) {
			return 1;
		}
		rest_put(put);
		return 0;
	}

	if (put->granted < put->n) {
		scheduler->stats.save_busy += put->mem == KVX_HOST_MEM ? put->n - put->granted : 0;
		schedule_retry(put, put->from + put->granted, KVC_ERR_BUSY, now);
		if (may_rest(scheduler, put, now)) {
			rest_refused(scheduler, put);
		}
	} else if (put->mem == KVX_HOST_MEM) {
		put->request->refused = KVC_OK;
		put->request->tries = 0;
	}
	if (result.status == KVC_OK || kvc_put_export(put->put, &handle) != KVC_OK) {
		return 1; /* all of it was stored already */
	}
	put->handle = handle.id;
	put->at = KVX_SPUT_GRANTED;

	return 0;
}

/* A step may take minutes, and its ranks hand in its blocks when it ends. The next message may be built during the
 * step, the one after that is not; scheduler->step is the next one. What was granted, and in no message since, is an
 * idle engine's. */
static int is_late(const kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	if (put->at == KVX_SPUT_GRANTED) {
		return now - put->asked_ns >= LATE_MS * KVX_MS;
	}
	if (put->step_done_ns == 0 && put->at == KVX_SPUT_SENT && scheduler->step - put->emitted > 2u) {
		put->step_done_ns = now;
	}

	return put->step_done_ns != 0 && now - put->step_done_ns >= LATE_MS * KVX_MS;
}

/* 1: the put is done. The daemon decides how long it lives (docs/decisions/027). A late put that ranks know is given up
 * only when the table is full. */
static int poll_granted(kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	kvc_put_result_t result = {.struct_size = sizeof result};
	const int late = is_late(scheduler, put, now);

	kvc_put_get_result(put->put, &result);
	if (result.status == KVC_PENDING &&
	    !(late && (put->at == KVX_SPUT_GRANTED || scheduler->put_count == KVX_PUTS_MAX))) {
		if (!late) {
			(void)kvc_put_keep(put->put);
		}
		return 0;
	}
	*(put->mem == KVX_HOST_MEM ? &scheduler->stats.save_done : &scheduler->stats.gpu_blocks) +=
		result.visible < put->granted ? result.visible : put->granted;
	if (put->mem == KVX_HOST_MEM && result.visible > 0) {
		put->request->refusals = 0;
	}
	if (result.visible < put->granted) {
		retry_lost(scheduler, put, result.visible, result.status == KVC_OK ? KVC_ERR_BUSY : result.status, now);
	}

	return 1;
}

/* 1: the put is done. */
static int poll_put(kvx_scheduler_t *scheduler, kvx_sput_t *put, uint64_t now)
{
	switch (put->at) {
	case KVX_SPUT_RESTING:
		return poll_resting(scheduler, put, now);
	case KVX_SPUT_ASKED:
		return poll_asked(scheduler, put, now);
	default:
		return poll_granted(scheduler, put, now);
	}
}

int kvx_puts_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	kvx_sput_t *next;
	int open = 0;

	for (kvx_sput_t *put = scheduler->puts; put; put = next) {
		const int done = poll_put(scheduler, put, now);

		next = put->next; /* what rests of it may have been added */
		if (done) {
			remove_put(scheduler, put);
		} else {
			open |= put->at == KVX_SPUT_ASKED && put->step == scheduler->step;
		}
	}

	return open;
}

void kvx_puts_await(kvx_scheduler_t *scheduler, uint64_t now)
{
	const uint64_t wait = kvx_step_time_max_wait_ns(scheduler), until = now + wait;

	for (kvx_sput_t *put = scheduler->puts; put && wait && !scheduler->slow; put = put->next) {
		put->awaited |= put->step == scheduler->step;
	}
	while (kvx_puts_poll(scheduler, now) && wait && !scheduler->slow && kvx_daemon_is_alive(scheduler)) {
		uint64_t left;

		now = kv_now_ns(scheduler->env);
		if (now >= until) {
			scheduler->slow = 1;
			return;
		}
		left = (until - now) / 1000u;
		(void)kvc_poll_us(scheduler->kvc, left < KVX_SLICE_US ? (uint32_t)left : KVX_SLICE_US);
	}
}

int kvx_puts_are_due(const kvx_scheduler_t *scheduler, uint64_t now)
{
	for (const kvx_sput_t *put = scheduler->puts; put; put = put->next) {
		if (put->at == KVX_SPUT_RESTING || put->at == KVX_SPUT_GRANTED ||
		    (put->at == KVX_SPUT_ASKED && now - put->asked_ns < LAST_MS * KVX_MS)) {
			return 1;
		}
	}

	return 0;
}

int kvx_puts_are_open(const kvx_request_t *request, uint32_t mem)
{
	const kvx_sput_t *put = request->puts;

	while (put && put->mem != mem) {
		put = put->own_next;
	}

	return put != NULL;
}

/* ---- telling the ranks ----------------------------------------------------------------------- */

/* The daemon has this block of the put already. */
static int is_stored(const kvx_sput_t *put, uint32_t i)
{
	return kvc_put_block(put->put, i, NULL) == KVC_ALREADY;
}

/* All blocks still have the bytes they were reserved for when the ranks read this message. A block that was reallocated
 * in this very step counts: the ranks save it before the step writes it (FENCE). */
static int is_intact(const kvx_scheduler_t *scheduler, const kvx_sput_t *put)
{
	for (uint32_t i = 0; i < put->granted; i++) {
		const kvx_table_entry_t *entry = &put->entries[i];
		const kvx_block_t *block = &scheduler->blocks[entry->id];
		const int moved = (block->gen & ~1u) == entry->gen + 2u && block->step == scheduler->step;

		if (block->gen != entry->gen && !(moved && put->step != scheduler->step) && !is_stored(put, i)) {
			return 0;
		}
	}

	return 1;
}

/* A block of a full group stands for those after it. */
static void note_stored(kvx_scheduler_t *scheduler, const kvx_sput_t *put)
{
	const kv_group_t *group = &scheduler->groups[put->index];

	for (uint32_t i = 0; i < put->granted; i++) {
		const kvx_stored_at_t at = {.key = put->keys[i],
					    .space = (uint16_t)put->space,
					    .mem = (uint8_t)put->mem,
					    .group = (uint8_t)group->id};

		if (!is_stored(put, i)) {
			kvx_weights_add_stored(scheduler, &at);
			if (group->rule == KV_RULE_FULL) {
				return;
			}
		}
	}
}

static void emit_save(kvx_scheduler_t *scheduler, kvx_sput_t *put, const kvc_handle_t *handle)
{
	kvx_msg_save_t *record = kvx_msg_add_record(&scheduler->message, KVX_RECORD_SAVE, sizeof *record);
	uint32_t *ids;

	record->space = put->space;
	record->group = scheduler->groups[put->index].id;
	record->flags = put->step == scheduler->step ? 0 : KVX_MSG_COMPLETE;
	record->flags |= put->mem == KVX_OWN_MEM ? KVX_MSG_GPU_MEM : 0;
	record->flags |= put->urgent ? KVX_MSG_URGENT : 0;
	record->n = put->granted;
	record->step = put->step;
	record->put = *handle;
	ids = kvx_msg_append(&scheduler->message, NULL, put->granted * sizeof *ids);
	for (uint32_t i = 0; i < put->granted; i++) {
		const int there = is_stored(put, i);

		ids[i] = there ? KVX_NO_BLOCK : put->entries[i].id;
		scheduler->stats.save_blocks += !there && put->mem == KVX_HOST_MEM;
	}
	put->at = KVX_SPUT_SENT;
	put->emitted = scheduler->step;
	note_stored(scheduler, put);
}

void kvx_puts_emit(kvx_scheduler_t *scheduler)
{
	const uint64_t now = kv_now_ns(scheduler->env);
	kvx_sput_t *next;

	for (kvx_sput_t *put = scheduler->puts; put; put = next) {
		const size_t size = sizeof(kvx_msg_save_t) + put->granted * sizeof(uint32_t) + 8u;
		kvc_handle_t handle;

		next = put->next;
		if (put->at != KVX_SPUT_GRANTED) {
			continue;
		}
		if (is_intact(scheduler, put) && kvx_message_reserve(scheduler, size) &&
		    kvx_weights_reserve_stored(scheduler, put->granted) &&
		    kvc_put_export(put->put, &handle) == KVC_OK) {
			emit_save(scheduler, put, &handle);
		} else {
			give_up_put(scheduler, put, now);
		}
	}
}

/* ---- giving up ------------------------------------------------------------------------------- */

void kvx_puts_take_dropped(kvx_scheduler_t *scheduler, uint64_t handle)
{
	kvx_sput_t *put = scheduler->puts;

	while (put && (put->at != KVX_SPUT_SENT || put->handle != handle)) {
		put = put->next;
	}
	if (put) {
		give_up_put(scheduler, put, kv_now_ns(scheduler->env));
	}
}

void kvx_puts_revoke(kvx_scheduler_t *scheduler, const kvx_request_t *request, uint32_t since)
{
	kvx_sput_t *next;

	for (kvx_sput_t *put = request->puts; put; put = next) {
		next = put->own_next;
		if ((int32_t)(put->step - since) >= 0) {
			give_up_put(scheduler, put, 0);
		}
	}
}

void kvx_puts_revoke_all(kvx_scheduler_t *scheduler)
{
	while (scheduler->puts) {
		scheduler->stats.save_lost += scheduler->puts->mem == KVX_HOST_MEM ? scheduler->puts->granted : 0;
		remove_put(scheduler, scheduler->puts);
	}
}
