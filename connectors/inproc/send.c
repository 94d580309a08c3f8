/* Sends: a save that grows chunk by chunk, and a hand-over that follows what of it is visible.
 *
 * One request to the daemon is in progress at a time: a chunk covers all that became visible during the one before. The
 * first names no block, so that the daemon knows the producer, and tells the consumer if it dies before it has stored
 * anything. */
#include "inproc/error.h"
#include "inproc/buffer.h"
#include "inproc/handover.h"
#include "inproc/transfer.h"
#include "scheduler/handover_calls.h"

#include <stdlib.h>
#include <string.h>

#define REST_NS UINT64_C(10000000) /* pause before what was lost is stored again */

struct kvx_send {
	kvx_save_t save;
	kvc_handover_t *handover; /* NULL: not begun, or over */
	char transfer[KVC_MAX_TRANSFER + 1u];
	uint32_t asked, sent; /* blocks: of the last chunk, and answered */
	int last_asked;       /* the last chunk was the last one */
	int pending;          /* it is not answered */
	int taken;
	uint32_t ttl_ms;
	uint64_t retry_ns; /* not before */
	void *tail;
	uint32_t tail_len;
	kvx_send_kind_t kind;
};

/* ---- the end --------------------------------------------------------------------------------- */

static uint64_t buffer_bytes(const kvx_send_t *send)
{
	const kvx_job_t *job = &send->save.job;

	return (uint64_t)job->cap * job->kvx->block_bytes + send->tail_len;
}

/* Every send that is not aborted ends here. An unfinished hand-over is aborted: its consumer is told. */
static void end_send(kvx_send_t *send, kvc_status_t status)
{
	kvx_t *kvx = send->save.job.kvx;
	kvx_stats_t *stats = &kvx->stats;

	if (status == KVC_OK && send->kind != KVX_SEND_CHUNKS) {
		kvx_buffer_keep(kvx, send->handover, buffer_bytes(send));
	} else {
		kvc_handover_done(send->handover, status != KVC_OK);
	}
	send->handover = NULL;
	if (send->save.result.status == KVC_PENDING) {
		kvx_save_finish(&send->save, status);
	}
	stats->sends_done += status == KVC_OK;
	stats->sends_failed += status != KVC_OK;
}

/* ---- chunks ---------------------------------------------------------------------------------- */

/* The daemon took no more, and has room now; or it has lost what was stored, which is stored again while the blocks can
 * still be read. */
static void retry_chunk(kvx_send_t *send, kvc_status_t why, uint64_t now)
{
	kvx_save_t *save = &send->save;

	if (why == KVC_ERR_BUSY ? send->kind == KVX_SEND_INSERT : save->result.copied) {
		end_send(send, why);
	} else if (why == KVC_MISS) {
		send->retry_ns = now + REST_NS;
		kvx_scheduler_restart_saving(save->job.kvx->scheduler, &save->job.ask);
	}
}

static void take_answer(kvx_send_t *send, uint64_t now)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};

	kvc_handover_get_info(send->handover, &info);
	send->taken = info.taken;
	if (info.status == KVC_PENDING) {
		return;
	}
	send->pending = 0;
	if (info.status == KVC_OK) {
		send->sent = send->asked;
		if (send->last_asked) {
			end_send(send, KVC_OK);
		}
	} else if ((info.status == KVC_MISS || info.status == KVC_ERR_BUSY) && info.state != KVC_HANDOVER_FAILED) {
		retry_chunk(send, info.status, now);
	} else {
		end_send(send, info.status);
	}
}

/* Hand over what is visible and was not yet, and with the last block the tail. */
static void send_chunk(kvx_send_t *send, uint64_t now)
{
	kvx_save_t *save = &send->save;
	const uint32_t blocks = save->result.blocks, whole = save->job.n_tokens / save->job.kvx->block_tokens;
	const int last = !save->more && blocks == save->job.n;
	const kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk,
		.transfer = send->transfer,
		.n = blocks < whole ? blocks : whole,
		.partial = last && blocks > whole ? save->job.n_tokens % save->job.kvx->block_tokens : 0,
		.last = last,
		.ttl_ms = send->ttl_ms,
		.tail = last ? send->tail : NULL,
		.tail_len = last ? send->tail_len : 0,
		.await_room = send->kind != KVX_SEND_INSERT,
	};
	kvc_status_t status;

	if (now < send->retry_ns || (send->handover && blocks <= send->sent && !last)) {
		return;
	}
	/* What is inserted is found whole, or not at all. */
	if (send->kind != KVX_SEND_CHUNKS && (!last || !kvx_buffer_has_room(save->job.kvx, buffer_bytes(send)))) {
		return;
	}
	status = kvx_scheduler_send_chunk(save->job.kvx->scheduler, &save->job.ask, &chunk, &send->handover);
	if (status != KVC_OK) {
		end_send(send, status);
		return;
	}
	send->asked = blocks;
	send->last_asked = last;
	send->pending = 1;
}

/* Something is left to do, so the deadline counts. */
static int is_busy(const kvx_send_t *send)
{
	return send->pending || !send->save.more || send->sent < send->save.job.n;
}

static void advance_send(kvx_send_t *send, uint64_t now)
{
	kvx_save_t *save = &send->save;

	kvx_save_advance(save, now);
	if (save->result.status != KVC_PENDING) {
		end_send(send, save->result.status);
		return;
	}
	if (send->pending) {
		take_answer(send, now);
	}
	if (save->result.status == KVC_PENDING && !send->pending) {
		send_chunk(send, now);
	}
	if (save->result.status == KVC_PENDING && is_busy(send) && now >= save->job.deadline_ns) {
		end_send(send, KVC_ERR_TIMEOUT);
	}
}

void kvx_sends_advance(kvx_t *kvx, uint64_t now)
{
	for (kvx_job_t *job = kvx->sends; job; job = job->next) {
		kvx_send_t *send = (kvx_send_t *)job;

		if (send->save.result.status == KVC_PENDING) {
			advance_send(send, now);
		}
	}
}

void kvx_sends_free(kvx_t *kvx)
{
	for (kvx_job_t *job = kvx->sends; job; job = job->next) {
		free(((kvx_send_t *)job)->tail);
	}
}

/* ---- called by the engine -------------------------------------------------------------------- */

static void destroy_send(kvx_send_t *send)
{
	free(send->tail);
	send->save.job.kvx->handovers--;
	kvx_job_destroy(&send->save.job);
}

static kvc_status_t create_send(kvx_t *kvx, const kvx_chunk_t *chunk, kvx_send_t **p_send)
{
	const kvx_job_kind_t kind = {.role = KVX_PRODUCER,
				     .deadline_ms = kvx->save_ms,
				     .size = sizeof(kvx_send_t),
				     .first = &kvx->sends,
				     .grows = 1,
				     .partial = 1};
	const kvx_prefix_t prefix = {.struct_size = sizeof prefix,
				     .tokens = chunk->tokens,
				     .n_tokens = chunk->n_tokens,
				     .salt = chunk->salt,
				     .deadline_ms = chunk->deadline_ms};
	kvc_status_t status = kvx_is_ready(kvx) ? KVC_OK : KVC_ERR_UNREACHABLE;
	kvx_job_t *job = NULL;
	kvx_send_t *send;

	if (status == KVC_OK) {
		status = kvx_job_create(kvx, &prefix, &kind, &job);
	}
	if (status != KVC_OK) {
		return status;
	}
	send = (kvx_send_t *)job;
	send->save.result.status = KVC_PENDING;
	send->save.sent = send->save.more = 1;
	kvx->handovers++;
	kvx->stats.saves++;
	status = kvx_transfer_begin(job, &prefix, chunk->transfer, send->transfer);
	if (status != KVC_OK) {
		kvx_send_end(send);
		return status;
	}
	*p_send = send;

	return KVC_OK;
}

/* What of the chunk can be checked without its hand-over. */
static kvc_status_t check_chunk(const kvx_chunk_t *chunk)
{
	return chunk && chunk->struct_size >= sizeof *chunk && chunk->tail_len <= KVC_MAX_TAIL &&
			       (chunk->tail || !chunk->tail_len)
		       ? KVC_OK
		       : KVC_ERR_ARG;
}

/* Only the last chunk's tail counts. */
static kvc_status_t add_chunk(kvx_send_t *send, const kvx_chunk_t *chunk)
{
	kvx_save_t *save = &send->save;
	kvx_job_t *job = &save->job;
	const uint32_t n = chunk->computed == job->n_tokens ? job->cap : chunk->computed / job->kvx->block_tokens;
	const uint32_t tail_len = chunk->last ? chunk->tail_len : 0;
	void *tail = tail_len ? malloc(tail_len) : NULL;
	kvc_status_t status = !save->more ? KVC_ERR_ARG : tail_len && !tail ? KVC_ERR_NOMEM : KVC_OK;

	if (status == KVC_OK) {
		status = kvx_job_grow(job, chunk->blocks, n);
	}
	if (status != KVC_OK) {
		free(tail);
		return status;
	}
	if (tail) {
		memcpy(tail, chunk->tail, tail_len);
	}
	send->tail = tail;
	send->tail_len = tail_len;
	send->ttl_ms = chunk->ttl_ms;
	save->more = !chunk->last;
	job->deadline_ns = kvx_deadline_ns(chunk->deadline_ms, job->kvx->save_ms);

	return KVC_OK;
}

kvc_status_t kvx_send_begin(kvx_t *kvx, const kvx_chunk_t *chunk, kvx_send_kind_t kind, kvx_send_t **p_send)
{
	kvc_status_t status = check_chunk(chunk);
	kvx_send_t *send = NULL;

	kvx->stats.sends++;
	if (status == KVC_OK) {
		status = create_send(kvx, chunk, &send);
	}
	if (status == KVC_OK) {
		status = add_chunk(send, chunk);
	}
	if (status != KVC_OK) {
		kvx_send_end(send);
		kvx->stats.sends_refused++;
		return status;
	}
	send->kind = kind;
	*p_send = send;
	advance_send(send, kvx_now_ns());

	return KVC_PENDING;
}

kvc_status_t kvx_send(kvx_t *kvx, const kvx_chunk_t *chunk, kvx_send_t **p_send)
{
	kvx_send_t *send = *p_send;
	kvc_status_t status;

	if (!send) {
		(void)kvx_send_begin(kvx, chunk, KVX_SEND_CHUNKS, &send);
		*p_send = send;
		return send && send->save.result.status == KVC_PENDING ? KVC_PENDING : KVC_MISS;
	}
	if (send->save.result.status != KVC_PENDING) {
		return KVC_MISS;
	}
	status = check_chunk(chunk);
	if (status == KVC_OK) {
		status = add_chunk(send, chunk);
	}
	if (status != KVC_OK) {
		return status;
	}
	advance_send(send, kvx_now_ns());

	return send->save.result.status == KVC_PENDING ? KVC_PENDING : KVC_MISS;
}

kvc_status_t kvx_send_state(const kvx_send_t *send, kvx_send_result_t *result)
{
	const kvx_send_result_t now = {.status = send->save.result.status,
				       .copied = send->save.result.copied,
				       .blocks = send->save.result.blocks,
				       .sent = send->sent,
				       .taken = send->taken};

	return kvx_fill_result("kvx_send_state", result, &now, sizeof now) ? now.status : KVC_ERR_ARG;
}

void kvx_send_end(kvx_send_t *send)
{
	if (!send) {
		return;
	}
	kvc_handover_done(send->handover, 1);
	kvx_save_abort(&send->save);
	destroy_send(send);
}
