/* Hand-overs (docs/decisions/042, 047): the producer names what it has saved of a prompt, the consumer loads it.
 *
 *   producer   known --space open--> begun, an empty chunk --blocks visible--> chunks
 *                  --all, or nothing follows--> freed
 *   consumer   known --match--> begun --admitted--> its open load shrinks by each chunk --nothing follows--> freed
 *
 * Both sides make progress when messages of the daemon are read: in kvx_scheduler_build_message(), and while an idle
 * engine asks kvx_scheduler_has_pending(). The keys of a prompt are copied, because the producer goes on after its
 * request has ended, and the consumer leases between the calls for its request.
 *
 * The tokens after the last whole block travel in a private block, saved and leased under a key of this hand-over alone
 * (docs/decisions/044). Without it the hand-over goes on, and the consumer computes them.
 *
 * A consumer names its producer's node. Of another node its daemon fetches the blocks, and then they are handed over
 * here (docs/decisions/046): nothing else differs.
 *
 * A producer announces what it saves when it plans the step that computes it, and the daemon hands the blocks over as
 * they become visible (docs/decisions/052): no chunk waits for the producer's next step. The first message goes out
 * with the first step, so that the daemon can tell the consumer of the producer's death. What was announced and not
 * saved is withdrawn when the request has ended; then, and with several groups, chunks are what is visible, looked up
 * in the mirror like a match.
 *
 * A producer that gives up before its daemon knows of it begins, empty, and fails: its consumer waits for nothing
 * (docs/decisions/075).
 *
 * A prompt may be handed over in memory of the producer's GPU as well (docs/decisions/058): a second hand-over of the
 * same request and name, in the space there, with keys of its own. Nothing depends on it. The producer gives it up at
 * the first failure, and the consumer loads each piece from the one that has come further. */
#include "scheduler/handover.h"
#include "scheduler/handover_calls.h"
#include "scheduler/keys.h"
#include "scheduler/lease_cache.h"
#include "scheduler/load.h"
#include "scheduler/base/requests.h"
#include "scheduler/save.h"
#include "scheduler/names/spaces.h"

#include "kv/log.h"

#define RETRY_MS           20u    /* before a chunk is sent again that found no room, or whose block was not visible */
#define OTHER_SPACE_LOG_MS 10000u /* between two lines about it */
#define PRIVATE_TRIES      3u     /* a private block that is not there by then was not saved */
#define TRIES              50u /* of a request that has ended: its consumer waits, and may lease what is still there */
#define WAIT_MS            30000u /* the longest of a consumer that names no time */
#define SPARE_MS           1000u  /* of one that computes soon: longer than twice that */
#define TAKE_MS            1000u  /* a consumer that wants nothing more waits so long for its producer to begin */
#define LATE_MS            10000u /* a request that ended so long ago has saved all that it will */
#define TELL_MS            30000u /* so long after the end of its request a producer tries to reach its daemon */

/* ---- as objects ------------------------------------------------------------------------------ */

/* Units that a hand-over can name: whole blocks of all groups. */
static uint32_t whole_units(const kvx_scheduler_t *scheduler, uint32_t tokens)
{
	uint32_t step = scheduler->unit;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const uint32_t block_tokens = scheduler->groups[g].block_tokens, one = step;

		while (step % block_tokens != 0) {
			step += one;
		}
	}

	return tokens / step * (step / scheduler->unit);
}

/* The daemon's side of it; NULL: not begun, or ended with its space. */
static kvc_handover_t *live_handover(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	/* One in memory of a GPU has begun in a handle that stays. */
	return h->mem != KVX_HOST_MEM || h->closes == scheduler->spaces[h->space].closes ? h->handover : NULL;
}

static void free_handover(kvx_scheduler_t *scheduler, kvx_shandover_t *h, int abort)
{
	kvx_request_t *request = h->request;

	KVX_LIST_REMOVE(h, next, link, scheduler->handovers_end);
	request->handover[h->mem != KVX_HOST_MEM] = NULL;
	kvc_handover_done(live_handover(scheduler, h), abort);
	kv_free(scheduler->env, h);
	kvx_request_release(&scheduler->requests, request);
}

/* Of several groups, and of less than a block, nothing is announced or handed over in memory of a GPU. */
static int is_plain(const kvx_scheduler_t *scheduler, uint32_t units)
{
	return units == 0 || scheduler->group_count != 1 || scheduler->groups[0].rule != KV_RULE_FULL;
}

/* As that one, of the tokens that the transfer names, under its names. */
static kvc_status_t create_handover(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_transfer_t *transfer,
				    const kvx_shandover_t *as)
{
	kvx_shandover_t *h = kv_alloc(scheduler->env, sizeof *h + (as->units + UINT64_C(1)) * sizeof *h->keys +
							      transfer->n_tokens * sizeof *h->tokens);

	if (!h) {
		return KVC_ERR_NOMEM;
	}
	*h = *as;
	h->tokens = (uint32_t *)(void *)(h->keys + h->units + 1);
	if (transfer->tokens && scheduler->group_count == 1 &&
	    transfer->n_tokens == ask->tokens - h->units * scheduler->unit) {
		h->partial = transfer->n_tokens;
		memcpy(h->tokens, transfer->tokens, h->partial * sizeof *h->tokens);
	}
	memcpy(h->transfer, transfer->id, strlen(transfer->id));
	if (transfer->peer) {
		memcpy(h->peer, transfer->peer, strlen(transfer->peer));
	}
	h->request->handover[h->mem != KVX_HOST_MEM] = h;
	KVX_LIST_APPEND(h, next, link, scheduler->handovers_end);

	return KVC_OK;
}

static int is_this_node(const kvx_scheduler_t *scheduler, const char *peer)
{
	return !peer || !peer[0] || strcmp(peer, kvc_peer_name(scheduler->kvc)) == 0;
}

/* The GPU in whose memory it may be handed over as well. Of a producer that is decided here, once. */
static uint32_t choose_mem(kvx_scheduler_t *scheduler, const kvx_request_t *request, const kvx_transfer_t *transfer,
			   int sends)
{
	if (sends) {
		return transfer->on_device && kvx_mem_is_usable(scheduler, request->space, KVX_OWN_MEM) ? KVX_OWN_MEM
													: KVX_HOST_MEM;
	}

	return transfer->device && is_this_node(scheduler, transfer->peer)
		       ? kvx_mem_find_or_add(scheduler, transfer->device)
		       : KVX_HOST_MEM;
}

static kvc_status_t add_handover(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_transfer_t *transfer,
				 int sends)
{
	const size_t len =
		transfer && transfer->struct_size >= sizeof *transfer && transfer->id ? strlen(transfer->id) : 0;
	kvx_request_t *request;
	kvx_shandover_t as;
	kvc_status_t status;

	if (!kvx_ask_is_sound(ask) || len == 0 || len > KVC_MAX_TRANSFER ||
	    (transfer->peer && strlen(transfer->peer) > KVC_MAX_PEER) || transfer->n_tokens > ask->tokens) {
		return KVC_ERR_ARG;
	}
	request = kvx_requests_find_or_add(&scheduler->requests, ask->id, ask->id_len);
	if (!request) {
		return KVC_ERR_NOMEM;
	}
	if (request->handover[0] || request->handover[1]) {
		return KVC_ERR_EXISTS;
	}
	request->space = kvx_space_find_or_add(scheduler, ask);
	as = (kvx_shandover_t){.request = request,
			       .space = request->space,
			       .sends = sends,
			       .units = whole_units(scheduler, ask->tokens),
			       .timeout_ms = transfer->timeout_ms};
	if (as.space == UINT32_MAX && sends) { /* nothing of it is saved: its consumer is told */
		as.space = kvx_space_nameless(scheduler);
		as.aborted = 1;
	}
	if (as.space == UINT32_MAX) {
		return KVC_ERR_ARG;
	}
	as.plain = is_plain(scheduler, as.units);
	as.mem = as.plain || as.aborted ? KVX_HOST_MEM : choose_mem(scheduler, request, transfer, sends);
	/* That in host memory comes after it, and ends both. */
	if (as.mem != KVX_HOST_MEM && create_handover(scheduler, ask, transfer, &as) == KVC_OK) {
		if (sends) {
			request->to_device = as.units * scheduler->unit;
		} else {
			kvx_mem_want(scheduler, request->space, as.mem);
		}
	}
	as.mem = KVX_HOST_MEM;
	status = create_handover(scheduler, ask, transfer, &as);
	if (status != KVC_OK && request->handover[1]) {
		request->to_device = 0;
		free_handover(scheduler, request->handover[1], 1);
	}

	return status;
}

kvc_status_t kvx_scheduler_send(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_transfer_t *transfer)
{
	return add_handover(scheduler, ask, transfer, 1);
}

kvc_status_t kvx_scheduler_receive(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_transfer_t *transfer)
{
	return add_handover(scheduler, ask, transfer, 0);
}

/* ---- keys ------------------------------------------------------------------------------------ */

static void key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	const kvx_shandover_t *h = ctx;

	*key = (kvc_key_t){{0}}; /* the key of no block */
	if (i < h->keys_known) {
		*key = h->keys[i];
	} else if (i >= h->units && h->key_known) {
		*key = h->keys[h->units];
	}
}

static kvc_key_source_t key_source(kvx_shandover_t *h)
{
	return (kvc_key_source_t){.key = key_at, .ctx = h};
}

static kvc_space_t *space_of(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	return kvx_space_in(scheduler, h->space, h->mem);
}

static void copy_keys(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
		      kvx_shandover_t *h)
{
	kvx_key_view_t view;

	if (request->space != h->space || (h->mem != KVX_HOST_MEM && !kvx_mem_is_open(scheduler, h->space, h->mem))) {
		return;
	}
	kvx_key_view_init(scheduler, ask, request, h->units * scheduler->unit, &view);
	view.space = view.space ? space_of(scheduler, h) : NULL;
	for (uint32_t i = h->keys_known; i < view.n && !view.bad; i++) {
		view.source.key(&view, i, &h->keys[i]);
		h->keys_known += !view.bad;
	}
	if (h->partial > 0 && !h->key_known && h->keys_known == h->units && view.space) {
		h->key_known = kvc_private_key(view.space, h->units ? &h->keys[h->units - 1] : NULL, h->transfer,
					       h->tokens, h->partial, &h->keys[h->units]) == KVC_OK;
	}
}

/* Units of the prompt that others can load now. */
static uint32_t visible_units(const kvx_scheduler_t *scheduler, kvx_shandover_t *h)
{
	const kvc_key_source_t source = key_source(h);
	kvc_match_t match = {.struct_size = sizeof match};

	if (h->keys_known > h->passed) {
		kvc_match_lazy(space_of(scheduler, h), &source, h->keys_known, &match);
	}

	return match.n > h->passed ? match.n : h->passed;
}

/* ---- the producer ---------------------------------------------------------------------------- */

static kvc_status_t send_chunk(kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint32_t n, int last, int ahead)
{
	const kvc_key_source_t source = key_source(h);
	const kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk,
		.transfer = h->transfer,
		.n = n,
		.source = &source,
		.last = last,
		.ttl_ms = h->timeout_ms,
		.partial = last && n == h->units && h->partial_put ? h->partial : 0,
		.ahead = ahead,
	};
	const kvc_status_t status = kvc_handover_send(space_of(scheduler, h), &chunk, &h->handover);

	h->closes = scheduler->spaces[h->space].closes;
	h->begun |= status == KVC_OK;
	h->asking = status == KVC_OK;
	h->announced = ahead ? n : 0;
	h->last_announced = ahead && last;

	return status;
}

/* Nothing of the prompt becomes visible any longer. */
static int is_saved(const kvx_shandover_t *h, uint64_t now)
{
	return h->request->ended &&
	       (!kvx_puts_are_open(h->request, h->mem) || now >= h->request->ended_ns + LATE_MS * KVX_MS);
}

/* What is announced and not handed over is named again when it is visible. */
static void stop_announcing(kvx_shandover_t *h)
{
	h->plain = 1;
	h->announced = 0;
	h->last_announced = 0;
}

/* The chunk was not taken, or not sent. 1: it is sent again. */
static int may_retry(kvx_shandover_t *h, kvc_status_t status, uint64_t now)
{
	if (h->announced > 0) {
		stop_announcing(h);
		return 1;
	}
	h->retry_ns = now + RETRY_MS * KVX_MS;
	h->tries++;
	if (status == KVC_MISS && h->tries >= PRIVATE_TRIES) {
		h->partial = 0;
	}

	return h->mem == KVX_HOST_MEM && (status == KVC_ERR_BUSY || status == KVC_MISS) &&
	       !(h->request->ended && h->tries > TRIES);
}

/* The chunk before has its answer. 0: the hand-over has failed. */
static int take_answer(kvx_shandover_t *h, const kvc_handover_info_t *info, uint64_t now)
{
	const int asked = h->asking;

	h->asking = 0;
	if (asked && info->status == KVC_ERR_OTHER_SPACE) {
		return 0; /* its consumer computes, and asks no more */
	}
	if (asked && info->status != KVC_OK) {
		return may_retry(h, info->status, now);
	}
	h->tries = asked ? 0 : h->tries;
	h->passed = info->n;
	if (h->passed < h->announced && info->announced == 0) { /* there was no room when they became visible */
		stop_announcing(h);
	}

	return 1;
}

/* As far as it will come. */
static int has_private_block(const kvx_shandover_t *h)
{
	return h->partial == 0 || (h->partial_put && !kvx_puts_are_open(h->request, h->mem));
}

/* Announce what is being saved. 1: the daemon hands it over. */
static int announce_next(kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint64_t now)
{
	const int last = h->reserved == h->units && (h->partial == 0 || h->partial_put);

	if (h->plain) {
		return 0;
	}
	if (h->reserved > h->announced || (last && h->announced > 0 && !h->last_announced)) {
		if (send_chunk(scheduler, h, h->reserved, last, 1) != KVC_OK) {
			stop_announcing(h);
		}
		return !h->plain;
	}
	if (h->announced > 0 && is_saved(h, now)) { /* the daemon has what there is, or has it soon */
		stop_announcing(h);
		h->retry_ns = now + RETRY_MS * KVX_MS;
		return 1;
	}

	return h->announced > 0;
}

/* The next chunk, if there is one. 0: the hand-over has failed. */
static int send_next(kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint64_t now)
{
	kvc_status_t status;
	uint32_t n;
	int last;

	if (now < h->retry_ns || announce_next(scheduler, h, now)) {
		return 1;
	}
	n = visible_units(scheduler, h);
	last = (n == h->units && has_private_block(h)) || is_saved(h, now);
	if (h->begun && n == h->passed && !last) {
		return 1;
	}
	status = send_chunk(scheduler, h, n, last, 0);

	return status == KVC_OK || may_retry(h, status, now);
}

/* All that there is was handed over, or the consumer wants no more. */
static void end_sending(kvx_scheduler_t *scheduler, kvx_shandover_t *h, const kvc_handover_info_t *info)
{
	kvx_shandover_t *in_host = h->request->handover[0];
	const int all = info->n == h->units || h->sent_in_gpu_mem;

	if (h->mem != KVX_HOST_MEM) {
		scheduler->stats.handovers_sent_gpu += (uint64_t)all;
		if (in_host) {
			in_host->sent_in_gpu_mem = all; /* its consumer may end it early */
		}
	} else {
		scheduler->stats.handovers_sent += (uint64_t)all;
		scheduler->stats.handovers_send_failed += !all;
		h->request->was_sent = 1;
	}
	free_handover(scheduler, h, 0);
}

/* The sides are of two spaces: nothing of it is awaited, and the consumer computes. */
static void count_other_space(kvx_scheduler_t *scheduler, const kvx_shandover_t *h, kvc_status_t why, uint64_t *p_stat)
{
	const uint64_t now = kv_now_ns(scheduler->env);
	const char *weights = scheduler->spaces[h->space].weights;

	if (why != KVC_ERR_OTHER_SPACE) {
		return;
	}
	*p_stat += 1;
	if (now >= scheduler->other_space_log_ns) {
		scheduler->other_space_log_ns = now + OTHER_SPACE_LOG_MS * KVX_MS;
		kv_log(KV_LOG_WARN, "kvx", "hand-over %s%s%s: %s, `kvctl transfers` names both; here: %.200s",
		       h->transfer, h->peer[0] ? " of peer " : "", h->peer, kvc_status_text(why),
		       weights ? weights : "not known");
	}
}

/* The daemon has not heard of it, or has been restarted since, and its consumer may wait for it. */
static int must_be_told(const kvx_shandover_t *h, kvc_status_t why, uint64_t now)
{
	return h->mem == KVX_HOST_MEM && (!h->heard || why == KVC_ERR_REVOKED) && why != KVC_ERR_EXISTS &&
	       why != KVC_ERR_OTHER_SPACE && !(h->request->ended && now >= h->request->ended_ns + TELL_MS * KVX_MS);
}

/* Its request has ended, and its space has no name yet, or is refused. */
static int has_no_space(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	return h->mem == KVX_HOST_MEM && h->request->ended && scheduler->incarnation != 0 &&
	       !scheduler->spaces[h->space].space;
}

/* It begins again, empty, and is aborted when that is answered. */
static void restart_to_abort(const kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint64_t now)
{
	kvc_handover_done(live_handover(scheduler, h), 1);
	h->handover = NULL;
	h->begun = h->heard = h->asking = 0;
	h->aborted = 1;
	h->retry_ns = now + RETRY_MS * KVX_MS;
}

static void give_up_sending(kvx_scheduler_t *scheduler, kvx_shandover_t *h, kvc_status_t why, uint64_t now)
{
	if (must_be_told(h, why, now)) {
		restart_to_abort(scheduler, h, now);
		return;
	}
	if (h->mem == KVX_HOST_MEM) {
		scheduler->stats.handovers_sent += h->sent_in_gpu_mem != 0;
		scheduler->stats.handovers_send_failed += !h->sent_in_gpu_mem;
		count_other_space(scheduler, h, why, &scheduler->stats.handovers_send_other);
	} else {
		h->request->to_device = 0;
	}
	free_handover(scheduler, h, 1);
}

/* Its mem can take the first chunk. */
static int may_begin(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	return h->mem == KVX_HOST_MEM ? kvx_space_miss_reason(scheduler, h->space) == KV_WHY_NONE
				      : kvx_mem_is_usable(scheduler, h->space, h->mem);
}

/* What the request saves in memory of its GPU has a gap. */
static int has_gap(const kvx_shandover_t *h)
{
	return h->mem != KVX_HOST_MEM && !h->request->ended && h->request->to_device == 0;
}

/* 0: it has failed, or was aborted. */
static int advance_begun(kvx_scheduler_t *scheduler, kvx_shandover_t *h, const kvc_handover_info_t *info, uint64_t now)
{
	const int is_over = info->state == KVC_HANDOVER_FAILED || info->state == KVC_HANDOVER_ENDED;

	return !h->aborted && !has_gap(h) && !is_over && take_answer(h, info, now) && send_next(scheduler, h, now);
}

static void poll_producer(kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint64_t now)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};
	const kvc_handover_t *handover = live_handover(scheduler, h);
	int lives = !h->begun || handover;

	if (!h->begun && !may_begin(scheduler, h)) {
		if (has_no_space(scheduler, h)) {
			const uint32_t number = kvx_space_nameless(scheduler);

			h->space = number == UINT32_MAX ? h->space : number;
			h->aborted = 1;
		}
		lives = !h->request->ended || must_be_told(h, KVC_OK, now);
	} else if (!h->begun && h->aborted && h->mem == KVX_HOST_MEM) {
		lives = now < h->retry_ns || send_chunk(scheduler, h, 0, 0, 0) == KVC_OK;
	} else if (lives) {
		if (handover) {
			kvc_handover_get_info(handover, &info);
			h->heard |= info.number != 0 || info.state == KVC_HANDOVER_ENDED;
		}
		if (info.state == KVC_HANDOVER_COMPLETE ||
		    (info.state == KVC_HANDOVER_ENDED && info.status == KVC_OK)) {
			end_sending(scheduler, h, &info);
			return;
		}
		if (handover && info.status == KVC_PENDING) {
			return; /* also of one that was aborted: the daemon is told after its answer, which must be read
				 */
		}
		lives = advance_begun(scheduler, h, &info, now);
	}
	if (!lives) {
		give_up_sending(scheduler, h, info.status, now);
	}
}

/* Units of the prompt that are stored, or being saved: they become visible without another call. */
static uint32_t reserved_units(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h, const kvx_request_t *request)
{
	const uint32_t blocks = request->groups[0].asked[h->mem];
	const uint32_t units = blocks * (scheduler->groups[0].block_tokens / scheduler->unit);
	const uint32_t most = h->keys_known < h->units ? h->keys_known : h->units;

	return units < most ? units : most;
}

static void advance_sending(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
			    kvx_shandover_t *h)
{
	const uint32_t whole = h->units * scheduler->unit;

	copy_keys(scheduler, ask, request, h);
	if (h->key_known && !h->partial_put && request->computed >= whole + h->partial && !has_gap(h)) {
		h->partial_put = 1;
		kvx_put_start_private(scheduler, request, h->mem, whole / scheduler->groups[0].block_tokens,
				      &h->keys[h->units]);
	}
	h->reserved = reserved_units(scheduler, h, request);
}

void kvx_handover_advance(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request)
{
	for (int on_device = 1; on_device >= 0; on_device--) {
		kvx_shandover_t *h = request->handover[on_device];

		if (h && h->sends) {
			advance_sending(scheduler, ask, request, h);
		}
	}
}

void kvx_scheduler_abort_send(kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	for (int on_device = 1; request && on_device >= 0; on_device--) {
		kvx_shandover_t *h = request->handover[on_device];

		if (h && h->sends) {
			h->aborted = 1;
			poll_producer(scheduler, h, kv_now_ns(scheduler->env));
		}
	}
}

void kvx_handovers_abort(kvx_scheduler_t *scheduler)
{
	for (kvx_shandover_t *h = scheduler->handovers; h; h = h->next) {
		h->aborted |= h->sends;
		h->request->failed |= !h->sends; /* it computes what has not come */
	}
}

const char *kvx_scheduler_send_device(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);

	return request && request->to_device ? atomic_load(&scheduler->mems[KVX_OWN_MEM].device) : "";
}

int kvx_scheduler_has_sent(const kvx_scheduler_t *scheduler, const kvx_ask_t *ask)
{
	const kvx_request_t *request = kvx_requests_find_asked(&scheduler->requests, ask);
	const kvx_shandover_t *h = request ? request->handover[0] : NULL;

	return request && (h ? h->sends && h->begun && !h->aborted : request->was_sent);
}

const char *kvx_scheduler_peer_name(const kvx_scheduler_t *scheduler)
{
	return kvc_peer_name(scheduler->kvc);
}

/* It goes on between the steps of its request: the producer's has ended, the consumer's has what it wants. Without a
 * daemon no step helps: the engine's timer attaches (kvx_scheduler_has_pending()). */
static int is_due(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	return h->sends ? h->request->ended && kvc_incarnation(scheduler->kvc) != 0 : h->satisfied;
}

int kvx_handovers_are_due(const kvx_scheduler_t *scheduler)
{
	const kvx_shandover_t *h = scheduler->handovers;

	while (h && !is_due(scheduler, h)) {
		h = h->next;
	}

	return h != NULL;
}

/* ---- the consumer ---------------------------------------------------------------------------- */

/* What is known of it; without the daemon it has ended. */
static void get_info(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h, kvc_handover_info_t *info)
{
	const kvc_handover_t *handover = live_handover(scheduler, h);

	*info = (kvc_handover_info_t){
		.struct_size = sizeof *info, .state = KVC_HANDOVER_ENDED, .status = KVC_ERR_UNREACHABLE};
	if (handover) {
		kvc_handover_get_info(handover, info);
	}
}

/* Nothing more comes of it. */
static int is_over(const kvc_handover_info_t *info)
{
	return info->status != KVC_PENDING || info->state >= KVC_HANDOVER_COMPLETE;
}

/* For a consumer that names none: one that waits longer than computing takes had better computed. */
static uint32_t choose_timeout_ms(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	const uint32_t tokens = h->units * scheduler->unit + h->partial;
	const uint64_t compute_ns = kvx_cost_model_compute_ns(&scheduler->cost_model, 0, tokens);
	const uint64_t ms = SPARE_MS + 2u * compute_ns / KVX_MS;

	return compute_ns == 0 || ms > WAIT_MS ? WAIT_MS : (uint32_t)ms;
}

/* The time of the wait begins now. `names`: of a prompt on another node. */
static void begin_receiving(kvx_scheduler_t *scheduler, kvx_shandover_t *h, const kvx_prompt_names_t *names)
{
	kvc_prompt_t prompt = {.struct_size = sizeof prompt};
	kvc_fetch_t from = {
		.struct_size = sizeof from,
		.transfer = h->transfer,
	};

	h->timeout_ms = h->timeout_ms ? h->timeout_ms : choose_timeout_ms(scheduler, h);
	from.timeout_ms = h->timeout_ms;
	if (names) {
		from.peer = h->peer;
		prompt.tokens = names->tokens;
		prompt.n_tokens = names->n_tokens;
		from.prompt = names->n_tokens ? &prompt : NULL;
		from.hashes = names->hashes;
		from.hash_bytes = names->hash_bytes;
		from.n_hashes = names->n_hashes;
	}
	h->begun = 1;
	h->closes = scheduler->spaces[h->space].closes;
	h->until_ns = kv_now_ns(scheduler->env) + h->timeout_ms * KVX_MS;
	if (kvx_handover_receive(space_of(scheduler, h), &from, &h->handover) != KVC_OK) {
		h->handover = NULL;
	}
}

/* The request's hand-over in memory of a GPU, once its space is open; NULL: there is none. */
static kvx_shandover_t *receive_in_gpu_mem(kvx_scheduler_t *scheduler, const kvx_request_t *request)
{
	kvx_shandover_t *h = request->handover[1];

	if (!h || !kvx_mem_is_open(scheduler, h->space, h->mem)) {
		return NULL;
	}
	if (!h->begun) {
		begin_receiving(scheduler, h, NULL);
	}

	return h;
}

/* At the first match that knows what names the prompt, if it comes from another node. 0: it does not begin. */
static int receive_once(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
			kvx_shandover_t *h)
{
	kvx_prompt_names_t names;

	if (h->begun) {
		return 1;
	}
	if (!h->peer[0]) {
		begin_receiving(scheduler, h, NULL);
		return 1;
	}
	if (kvx_prompt_names_copy(scheduler, ask, request, h, &names) != KVC_OK) {
		return 0;
	}
	begin_receiving(scheduler, h, &names);
	kv_free(scheduler->env, names.tokens);

	return 1;
}

/* The daemon's answer tells what is there. */
static void await_answer(kvx_scheduler_t *scheduler, const kvx_shandover_t *h, kvc_handover_info_t *info)
{
	const uint64_t since = kv_now_ns(scheduler->env), until = since + scheduler->wait_us * UINT64_C(1000);
	int more = 1;

	get_info(scheduler, h, info);
	while (more && info->state == KVC_HANDOVER_ASKED) {
		more = kvx_scheduler_await_daemon(scheduler, since, until);
		get_info(scheduler, h, info);
	}
}

static int has_all(const kvx_shandover_t *h, const kvc_handover_info_t *info)
{
	return info->state == KVC_HANDOVER_COMPLETE && info->n >= h->units;
}

/* Its blocks can be loaded from there. */
static int may_load(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h)
{
	return h->begun && h->keys_known == h->units && kvx_mem_is_usable(scheduler, h->space, h->mem);
}

/* The prompt can be promised. What is stored is not awaited, but for its private block where the load is asynchronous
 * anyway, or where memory of a GPU has all of it: that is nearer. A synchronous load begins with its step, and costs an
 * idle engine less than the tokens after the last whole block do (decision 047). */
static int may_promise(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvx_request_t *request,
		       const kvx_shandover_t *h, kvx_coverage_t stored)
{
	kvx_shandover_t *there = receive_in_gpu_mem(scheduler, request);
	kvc_handover_info_t info;

	if (stored == KVX_COVERED_IN_GPU_MEM) {
		return 0;
	}
	if (there) {
		copy_keys(scheduler, ask, request, there);
	}
	if (there && may_load(scheduler, there)) {
		if (stored != KVX_COVERED_IN_PART) {
			await_answer(scheduler, there, &info);
		}
		get_info(scheduler, there, &info);
		if (has_all(there, &info)) {
			return 1;
		}
	}
	get_info(scheduler, h, &info);
	if (stored == KVX_COVERED_IN_PART) {
		return !is_over(&info);
	}
	if (stored == KVX_COVERED_FOR_STEP) {
		return 0;
	}
	if (h->partial > 0) {
		await_answer(scheduler, h, &info);
	}

	return h->partial > 0 && info.state == KVC_HANDOVER_COMPLETE && info.partial == h->partial;
}

/* Tokens of the prompt, `most` at the most, that a hand-over can bring. */
static uint32_t promised_tokens(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h, uint32_t most)
{
	const uint32_t whole = h->units * scheduler->unit;

	return most >= whole ? whole + (h->key_known ? h->partial : 0) : whole_units(scheduler, most) * scheduler->unit;
}

uint32_t kvx_handover_promise(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, kvx_request_t *request,
			      kvx_coverage_t stored, uint32_t most)
{
	kvx_shandover_t *h = request->handover[0];
	uint32_t end, partial;

	if (!h || h->sends || request->failed || !receive_once(scheduler, ask, request, h)) {
		return ask->local;
	}
	copy_keys(scheduler, ask, request, h);
	end = promised_tokens(scheduler, h, most);
	if (end <= ask->local || h->keys_known * scheduler->unit < end - end % scheduler->unit ||
	    !may_promise(scheduler, ask, request, h, stored)) {
		return ask->local;
	}
	partial = end > h->units * scheduler->unit ? h->partial : 0;

	return kvx_lease_cache_reserve(scheduler, ask, request, end - partial, partial) ? end : ask->local;
}

static void end_receiving(kvx_scheduler_t *scheduler, const kvx_shandover_t *h, const kvc_handover_info_t *info,
			  int unwanted)
{
	const uint64_t complete =
		info->state == KVC_HANDOVER_COMPLETE && info->n >= h->units && info->partial == h->partial;

	scheduler->stats.handovers_received += complete;
	scheduler->stats.handovers_received_gpu += complete && h->mem != KVX_HOST_MEM;
	scheduler->stats.handovers_receive_failed += !complete;
	count_other_space(scheduler, h, info->status, &scheduler->stats.handovers_receive_other);
	if (!complete && !unwanted && info->status != KVC_ERR_OTHER_SPACE) {
		kv_log(KV_LOG_INFO, "kvx", "hand-over %s%s%s: %u of %u units came: %s", h->transfer,
		       h->peer[0] ? " of peer " : "", h->peer, info->n, h->units,
		       kvc_status_text(info->status == KVC_PENDING ? KVC_ERR_TIMEOUT : info->status));
	}
}

/* Of what has come; the private block counts as a whole one. */
static uint32_t units_to_lease(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h,
			       const kvc_handover_info_t *info)
{
	const int has_private = info->n == h->units && h->partial > 0 && info->partial == h->partial;

	return (info->n < h->units ? info->n : h->units) +
	       (has_private ? scheduler->groups[0].block_tokens / scheduler->unit : 0);
}

/* The producer has not begun. If the consumer ends the entry now, the producer begins another one, which nobody takes.
 * Of one on another node the first units tell that it has begun. */
static int awaits_producer(const kvx_scheduler_t *scheduler, const kvx_shandover_t *h, uint64_t now)
{
	kvc_handover_info_t info;

	get_info(scheduler, h, &info);

	return now < h->until_ns && info.status == KVC_PENDING &&
	       (info.state <= KVC_HANDOVER_AWAITED || (h->peer[0] && info.n == 0));
}

/* The hand-over that has come further, the GPU's if both have, and what is known of it. *p_over: nothing follows. */
static kvx_shandover_t *choose_source(kvx_scheduler_t *scheduler, kvx_shandover_t *h, kvc_handover_info_t *info,
				      int *p_over)
{
	kvx_shandover_t *there = receive_in_gpu_mem(scheduler, h->request);
	kvc_handover_info_t other;
	int is_absent;

	get_info(scheduler, h, info);
	*p_over = is_over(info);
	if (!there || !may_load(scheduler, there)) {
		return h;
	}
	get_info(scheduler, there, &other);
	/* A producer begins in both before it ends in host memory: one that has not by then never does. */
	is_absent = other.state == KVC_HANDOVER_AWAITED;
	*p_over = has_all(there, &other) || (*p_over && (has_all(h, info) || is_over(&other) || is_absent));
	if (other.n == 0 || other.n < info->n) {
		return h;
	}
	*info = other;

	return there;
}

/* Load what has come of it. 1: nothing more is loaded. */
static int poll_open_load(kvx_scheduler_t *scheduler, kvx_shandover_t *h, kvx_sload_t *load, int unwanted, uint64_t now)
{
	kvc_handover_info_t info;
	int over;
	kvx_shandover_t *chosen = choose_source(scheduler, h, &info, &over), *source = unwanted ? h : chosen;
	const kvx_stored_t from = {.mem = source->mem, .source = key_source(source)};
	uint32_t n;

	if (unwanted || over || now >= h->until_ns) {
		end_receiving(scheduler, source, &info, unwanted);
		n = visible_units(scheduler, source); /* what is stored is loaded, whatever became of the hand-over */
		info.n = info.n < n ? n : info.n;
		kvx_open_load_close(scheduler, load, &from, unwanted ? 0 : units_to_lease(scheduler, source, &info));
		return 1;
	}
	n = info.n < h->units ? info.n : h->units;
	if (n > h->passed && kvx_open_load_split(scheduler, load, &from, n)) {
		h->passed = n;
		scheduler->stats.handover_pieces++;
	}

	return 0;
}

/* What is leased of it in memory of a GPU may fall short: the rest comes from host memory. 1: nothing waits for it. */
static int add_rest(kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint64_t now)
{
	const kvx_stored_t host = {.mem = KVX_HOST_MEM, .source = key_source(h)};
	kvc_handover_info_t info;

	if (!h->request->handover[1]) {
		return 1;
	}
	get_info(scheduler, h, &info);

	return kvx_loads_add_rest(scheduler, h->request, &host, units_to_lease(scheduler, h, &info),
				  !is_over(&info) && now < h->until_ns);
}

static void poll_consumer(kvx_scheduler_t *scheduler, kvx_shandover_t *h, uint64_t now)
{
	const kvx_request_t *request = h->request;
	kvx_sload_t *load = kvx_open_load_find(request);
	const int unwanted = request->ended || request->failed;

	if (load ? !poll_open_load(scheduler, h, load, unwanted, now) : !request->ended && request->groups[0].n == 0) {
		(void)add_rest(scheduler, h, now);
		return; /* more is to come, or it is not admitted yet */
	}
	if (!h->begun && !h->peer[0] && kvx_space_miss_reason(scheduler, h->space) == KV_WHY_NONE) {
		begin_receiving(scheduler, h, NULL); /* it is taken, although there was nothing to load */
	}
	if (!h->satisfied) {
		h->satisfied = 1;
		h->until_ns = h->until_ns < now + TAKE_MS * KVX_MS ? h->until_ns : now + TAKE_MS * KVX_MS;
	}
	if (add_rest(scheduler, h, now) && !awaits_producer(scheduler, h, now)) {
		/* Leases asked for come before this in the queue to the daemon. What was not used is taken as well, so
		 * that the producer's GPU keeps none of it. */
		(void)receive_in_gpu_mem(scheduler, request);
		if (request->handover[1]) {
			free_handover(scheduler, request->handover[1], 0);
		}
		free_handover(scheduler, h, 0);
	}
}

/* ---- all ------------------------------------------------------------------------------------- */

void kvx_handovers_poll(kvx_scheduler_t *scheduler, uint64_t now)
{
	kvx_shandover_t *next;

	if (!scheduler->handovers) {
		return;
	}
	for (kvx_shandover_t *h = scheduler->handovers; h; h = next) {
		next = h->next;
		if (h->sends) {
			poll_producer(scheduler, h, now);
		} else if (h->mem == KVX_HOST_MEM) {
			poll_consumer(scheduler, h, now);
		}
	}
	/* What was asked goes out now: the next call may come after a long step. */
	(void)kvc_poll_us(scheduler->kvc, 0);
}

int kvx_scheduler_awaits_peer(const kvx_scheduler_t *scheduler)
{
	for (const kvx_shandover_t *h = scheduler->handovers; h; h = h->next) {
		if (is_due(scheduler, h) || (!h->sends && kvx_open_load_find(h->request))) {
			return !kvx_loads_are_sent(scheduler);
		}
	}

	return 0;
}

void kvx_handovers_close(kvx_scheduler_t *scheduler)
{
	while (scheduler->handovers) {
		free_handover(scheduler, scheduler->handovers, 1);
	}
}
