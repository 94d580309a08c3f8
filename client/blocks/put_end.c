/* Puts: hand blocks in, hear what became of them, let go. */
#include "impl.h"

/* ---- handing in ------------------------------------------------------------------------------ */

/* Everything this member has to write is the daemon's. */
static int all_blocks_handed_in(const kvc_put_t *put)
{
	return put->words_a_block == 0 || !put->grant.map ||
	       (put->handed == put->order[put->n] && put->end_status == KV_OK);
}

/* The staging is free for the next blocks when all of the window's have been taken. */
static void window_advance(kvc_put_t *put)
{
	uint32_t end = atomic_load_explicit(&put->window, memory_order_relaxed) + put->window_blocks;

	if (put->end_status == KV_OK && put->handed == end && end < put->order[put->n]) {
		atomic_store_explicit(&put->window, end, memory_order_release);
	}
}

static void drain_or_revoke(kvc_put_t *put);

static void on_end_answered(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	kvc_put_t *put = object;

	(void)kvc;
	if (answer->status != KV_OK && put->end_status == KV_OK) {
		put->end_status = answer->status;
		kvc_fail_request(answer->status, answer->detail, "handing blocks in");
	}
	if (answer->expired) {
		return; /* the daemon may still read the staging */
	}
	put->ends--;
	if (put->ends == 0 && put->freed && !put->staging_lost) {
		if (put->imported) {
			drain_or_revoke(put); /* nothing, unless what was handed in has been refused */
		}
		kvc_put_forget(put);
	} else if (put->ends == 0) {
		window_advance(put);
	}
}

static kvc_status_t check_end_range(const kvc_put_t *put, uint32_t first, uint32_t count)
{
	uint32_t window = atomic_load_explicit(&put->window, memory_order_relaxed);
	kvc_status_t status = atomic_load(&put->status);

	if (status != KVC_OK) {
		return kvc_fail((kv_status_t)status, "the put was not granted: %s", kvc_status_text(status));
	}
	if (count == 0 || first >= put->n || count > put->n - first) {
		return kvc_fail(KV_ERR_ARG, "blocks [%u, %u + %u) are not among the %u granted", first, first, count,
				put->n);
	}
	if (!put->grant.map || put->order[first + count] == put->order[first] || put->words_a_block == 0) {
		/* All of it is visible already, or others write it; a durable put of nothing else is over for the
		 * daemon, too. */
		return KVC_ALREADY;
	}
	if (kvc_grant_check(&put->grant) != KV_OK) {
		return kvc_fail(KV_ERR_REVOKED, "put %llu was revoked", (unsigned long long)put->grant.id);
	}
	if (put->order[first] < window || put->order[first + count] - window > put->window_blocks) {
		return kvc_fail(KV_ERR_ARG, "blocks [%u, %u + %u) have been handed in, or not been written yet", first,
				first, count);
	}

	return KVC_OK;
}

kvc_status_t kvc_put_end(kvc_put_t *put, uint32_t first, uint32_t count)
{
	kvc_t *kvc = put->space->kvc;
	kv_msg_put_end_t msg = {.put = put->grant.id, .rank = put->range.rank, .first = first, .count = count};
	kvc_ask_t ask = {.code = KV_CODE_PUT_END, .msg = &msg, .done = on_end_answered, .object = put, .fd = -1};
	kvc_status_t status = kvc_enter(kvc);
	uint32_t blocks, at;
	kv_status_t sent;

	status = status == KVC_OK ? check_end_range(put, first, count) : status;
	if (status != KVC_OK) {
		return status == KVC_ALREADY ? KVC_OK : status;
	}
	blocks = put->order[first + count] - put->order[first];
	at = put->order[first] - atomic_load_explicit(&put->window, memory_order_relaxed);
	msg.staging = put->staging.first + (uint64_t)at * put->words_a_block;
	msg.words = blocks * put->words_a_block;

#if defined(__x86_64__)
	/* The streaming stores of the copies come before whatever says that they are there. */
	__builtin_ia32_sfence();
#endif
	sent = kvc_send(kvc, &ask);
	if (sent != KV_OK) {
		return kvc_fail(sent, "PUT_END could not be sent: %s", kv_status_text(sent));
	}
	put->ends++;
	put->handed += blocks;
	put->kept_ns = kv_now_ns(&kvc->env);

	return KVC_OK;
}

#define KEEP_FIRST_NS UINT64_C(50000000) /* half of the shortest put.ttl there is */

static void on_keep_answered(kvc_t *kvc, void *object, const kvc_answer_t *answer)
{
	(void)object;
	if (answer->status == KV_OK) {
		kvc->put_ttl_ns = answer->reply->keep_reply.ttl_ms * KVC_NS_A_MS;
	}
}

/* Called wherever the put moves on, so all but one call in half a time to live is a look at the clock. */
kvc_status_t kvc_put_keep(kvc_put_t *put)
{
	kvc_t *kvc = put->space->kvc;
	kv_msg_keep_t msg = {.put = put->grant.id};
	kvc_ask_t ask = {.code = KV_CODE_KEEP, .msg = &msg, .done = on_keep_answered, .object = kvc, .fd = -1};
	uint64_t now = kv_now_ns(&kvc->env);
	kvc_status_t status = kvc_check_process(kvc);

	if (status != KVC_OK || !put->grant.map || put->result.status == KVC_OK) {
		return status;
	}
	if (kvc_grant_check(&put->grant) != KV_OK) {
		return kvc_fail(KV_ERR_REVOKED, "put %llu was revoked", (unsigned long long)put->grant.id);
	}
	if (now - put->kept_ns < (kvc->put_ttl_ns ? kvc->put_ttl_ns / 2 : KEEP_FIRST_NS)) {
		return KVC_OK;
	}
	status = kvc_enter(kvc);
	if (status == KVC_OK && kvc_send(kvc, &ask) == KV_OK) { /* else the next call tries again */
		put->kept_ns = now;
	}

	return status;
}

static kvc_put_t *find_put(kvc_t *kvc, uint64_t id)
{
	kvc_put_t *put = kvc->put_ids[id % KVC_ID_BUCKETS];

	while (put && (put->grant.id != id || put->imported || atomic_load(&put->grant.map->dead))) {
		put = put->chain;
	}

	return put;
}

void kvc_put_notice_done(kvc_t *kvc, const kv_msg_put_done_t *msg)
{
	kv_msg_drained_t drained = {.what = 0, .id = msg->put};
	kvc_put_t *put = kvc->put_ids[msg->put % KVC_ID_BUCKETS];
	int known = 0;

	for (; put; put = put->chain) {
		if (put->grant.id != msg->put || put->grant.map->incarnation != kvc->incarnation) {
			continue;
		}
		if (!atomic_load(&put->grant.map->dead)) {
			put->result.status = msg->status;
			put->result.visible = msg->n < put->n ? msg->n : put->n;
		}
		known = 1;
	}
	/* This member had to write into it and has no view of it, not even one of an older session that a thread may
	 * be writing through: none of its writes can come. */
	if (!known && msg->status != KV_OK) {
		kvc_send_oneway(kvc, KV_CODE_DRAINED, &drained);
	}
}

void kvc_put_notice_durable(kvc_t *kvc, const kv_msg_durable_t *msg)
{
	kvc_put_t *put = find_put(kvc, msg->put);

	if (put && put->durable) {
		put->result.durable_status = msg->status;
		put->result.durable = msg->n;
	}
}

kvc_status_t kvc_put_get_result(const kvc_put_t *put, kvc_put_result_t *result)
{
	kvc_put_result_t now = put->result;

	if (put->end_status != KV_OK && now.status == KVC_PENDING) {
		now.status = (kvc_status_t)put->end_status;
	}

	return kvc_fill("kvc_put_get_result", result, &now, sizeof now);
}

static int is_visible_known(const void *object)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	(void)kvc_put_get_result(object, &result);

	return result.status != KVC_PENDING;
}

static int is_durable_known(const void *object)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	(void)kvc_put_get_result(object, &result);

	return result.status != KVC_PENDING && (result.durable_status != KVC_PENDING || result.status < 0);
}

kvc_status_t kvc_put_wait(kvc_put_t *put, int durable, uint32_t timeout_ms)
{
	kvc_t *kvc = put->space->kvc;
	kvc_put_result_t result = {.struct_size = sizeof result};
	kvc_status_t status = kvc_enter(kvc);

	if (status != KVC_OK) {
		return status;
	}
	if (kvc_wait(kvc, durable ? is_durable_known : is_visible_known, put, kvc_deadline(kvc, timeout_ms)) != KV_OK) {
		return kvc_fail(KV_ERR_TIMEOUT,
				"the put has not ended in time; has every block and every rank been handed in?");
	}
	(void)kvc_put_get_result(put, &result);
	if (result.status == KVC_OK && durable && put->durable && result.durable_status != KVC_MISS) {
		result.status = result.durable_status;
	}
	if (result.status != KVC_OK) {
		kvc_fail((kv_status_t)result.status, "put ended with %u of %u blocks visible: %s", result.visible,
			 put->n, kvc_status_text(result.status));
	}

	return result.status;
}

/* ---- letting go ------------------------------------------------------------------------------ */

/* Tell the daemon that this member no longer touches the put's memory; if that leaves it unfinished, the put ends for
 * all members. */
static void drain_or_revoke(kvc_put_t *put)
{
	kvc_t *kvc = put->space->kvc;
	kv_msg_put_revoke_t revoke = {.put = put->grant.id};
	kv_msg_drained_t drained = {.what = 0, .id = put->grant.id};
	int over = put->result.status != KVC_PENDING;

	if (!put->grant.map || put->result.status == KVC_OK) {
		return;
	}
	if (atomic_load(&put->grant.map->dead)) {
		/* The daemon may wait for this member under a later session of the same incarnation (decision 030). */
		if (put->grant.map->incarnation == kvc->incarnation && kvc->state >= KVC_OPEN) {
			kvc_send_oneway(kvc, KV_CODE_DRAINED, &drained);
		}
		return;
	}
	if (put->imported && all_blocks_handed_in(put)) {
		return; /* the daemon waits for nothing of this member's; how it ends is the starter's business */
	}
	if (!over && (!put->imported || kvc_grant_check(&put->grant) == KV_OK)) {
		kvc_send_oneway(kvc, KV_CODE_PUT_REVOKE, &revoke);
	}
	/* In this order: the daemon quarantines the slots with the first and frees them with the second (decision 027).
	 */
	kvc_send_oneway(kvc, KV_CODE_DRAINED, &drained);
}

void kvc_put_free(kvc_put_t *put)
{
	kvc_t *kvc;

	if (!put) {
		return;
	}
	kvc = put->space->kvc;
	if (atomic_load(&put->status) == KV_PENDING) {
		kvc_forget_requests(kvc, put);
	} else if (kvc_check_process(kvc) == KVC_OK) {
		drain_or_revoke(put);
	}
	put->freed = 1;
	if (put->ends == 0 || put->staging_lost) {
		kvc_put_forget(put);
	}
	kvc_map_reap(kvc);
}

void kvc_puts_of_space_end(kvc_space_t *space)
{
	kvc_t *kvc = space->kvc;
	kvc_put_t *next;

	for (kvc_put_t *put = kvc->puts; put; put = next) {
		next = put->next;
		if (put->space == space && !put->freed) {
			kvc_put_free(put);
		}
	}
	/* The daemon may still read the staging of those with a PUT_END in flight: they stay, and the space's memory
	 * with them. */
	for (kvc_put_t *put = kvc->puts; put; put = put->next) {
		space->puts_left += put->space == space;
	}
}

/* Handed in in two parts, so that the daemon works on the first while the rest is being copied. */
static kvc_status_t write_and_end(kvc_put_t *put, const void *const *blocks)
{
	uint32_t early = put->n - put->n / 4;
	kvc_status_t status = KVC_OK;

	for (uint32_t i = 0; i < put->n && status == KVC_OK; i++) {
		status = kvc_put_write(put, i, blocks[i]);
		if (status == KVC_OK && i + 1 == early) {
			status = kvc_put_end(put, 0, early);
		}
	}
	if (status == KVC_OK && early < put->n) {
		status = kvc_put_end(put, early, put->n - early);
	}

	return status;
}

kvc_status_t kvc_put(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n,
		     const kvc_put_options_t *options, uint32_t *p_visible)
{
	kvc_put_t *put = NULL;
	kvc_status_t status;

	if (!options || !options->blocks) {
		return kvc_fail(KV_ERR_ARG, "kvc_put: no source blocks given");
	}
	status = kvc_put_start(space, keys, from, n, options, &put);
	if (status != KVC_OK) {
		return status;
	}
	status = kvc_put_ready(put, 0);
	if (status == KVC_OK) {
		status = write_and_end(put, options->blocks);
	}
	if (status == KVC_OK) {
		status = kvc_put_wait(put, put->durable, 0);
	}
	if (p_visible) {
		*p_visible = put->result.visible;
	}
	kvc_put_free(put);

	return status;
}
