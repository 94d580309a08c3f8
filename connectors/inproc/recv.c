/* Receives: a load whose end is where the producer is. Each notice of the daemon begins a piece of it; what was handed
 * over during a piece is the next one. */
#include "inproc/error.h"
#include "inproc/handover.h"
#include "inproc/transfer.h"
#include "scheduler/handover_calls.h"

#include "kv/shm.h"
#include "kv/struct.h"

#include <stdlib.h>
#include <string.h>

struct kvx_recv {
	kvx_load_t load;
	kvc_handover_t *handover; /* NULL: over */
	void *tail;
	uint32_t tail_len;
};

/* ---- the end --------------------------------------------------------------------------------- */

static kvc_status_t keep_tail(kvx_recv_t *recv, const kvc_handover_info_t *info)
{
	recv->tail = info->tail_len ? malloc(info->tail_len) : NULL;
	if (info->tail_len && !recv->tail) {
		return KVC_ERR_NOMEM;
	}
	if (recv->tail) {
		memcpy(recv->tail, info->tail, info->tail_len);
		recv->tail_len = info->tail_len;
	}

	return KVC_OK;
}

/* Every receive that is not aborted ends here. One that ran out of time gives the hand-over back. */
static void end_recv(kvx_recv_t *recv, kvc_status_t cause)
{
	kvx_load_t *load = &recv->load;
	kvx_stats_t *stats = &load->job.kvx->stats;

	kvc_handover_done(recv->handover, cause == KVC_ERR_TIMEOUT);
	recv->handover = NULL;
	kvx_load_finish(load, cause);
	if (load->result.cause == KVC_OK) {
		load->result.status = KVC_OK;
		stats->recvs_done++;
	} else {
		stats->recvs_failed++;
	}
}

/* ---- pieces ---------------------------------------------------------------------------------- */

static void end_as_handed_over(kvx_recv_t *recv, const kvc_handover_info_t *info)
{
	kvx_load_t *load = &recv->load;

	if (info->status != KVC_OK) {
		load->result.why = info->status == KVC_ERR_TIMEOUT ? KV_WHY_TIMEOUT : load->result.why;
		end_recv(recv, info->status);
	} else if (load->from < load->job.cap) {
		load->result.why = KV_WHY_ABSENT;
		end_recv(recv, KVC_MISS);
	} else {
		end_recv(recv, keep_tail(recv, info));
	}
}

/* The partial block counts if both sides end with it: then it has the key that the job knows. */
static uint32_t blocks_there(const kvx_job_t *job, const kvc_handover_info_t *info)
{
	const uint32_t whole = job->n_tokens / job->kvx->block_tokens, rest = job->n_tokens % job->kvx->block_tokens;

	if (info->n >= whole && (rest == 0 || (info->n == whole && info->partial == rest))) {
		return job->cap;
	}

	return info->n < whole ? info->n : whole;
}

/* Why a piece brought less. Of a daemon that has gone, and of blocks that it has lost, the hand-over tells more. */
static kvc_status_t cause_of_piece(const kvx_load_t *load, const kvc_handover_info_t *info)
{
	const int is_known = load->cause == KVC_ERR_CORRUPT || load->cause == KVC_ERR_TIMEOUT;

	return is_known || info->status == KVC_PENDING || info->status == KVC_OK ? load->cause : info->status;
}

static int is_late(const kvx_recv_t *recv, uint64_t now)
{
	return now >= recv->load.job.deadline_ns;
}

static void advance_recv(kvx_recv_t *recv, uint64_t now)
{
	kvx_load_t *load = &recv->load;
	kvc_handover_info_t info = {.struct_size = sizeof info};
	uint32_t there;

	kvc_handover_get_info(recv->handover, &info);
	there = blocks_there(&load->job, &info);
	if (load->cause != KVC_OK) {
		end_recv(recv, cause_of_piece(load, &info));
	} else if (there > load->from && info.state != KVC_HANDOVER_ENDED) {
		kvx_load_begin_piece(load, there, now);
	} else if (info.status != KVC_PENDING) {
		end_as_handed_over(recv, &info);
	} else if (is_late(recv, now)) {
		load->result.why = KV_WHY_TIMEOUT;
		end_recv(recv, KVC_ERR_TIMEOUT);
	}
}

void kvx_recvs_advance(kvx_t *kvx, uint64_t now)
{
	for (kvx_job_t *job = kvx->loads; job; job = job->next) {
		kvx_load_t *load = (kvx_load_t *)job;

		if (load->received && load->step == KVX_LOAD_IDLE) {
			advance_recv((kvx_recv_t *)load, now);
		}
	}
}

void kvx_recvs_free(kvx_t *kvx)
{
	for (kvx_job_t *job = kvx->loads; job; job = job->next) {
		if (((kvx_load_t *)job)->received) {
			free(((kvx_recv_t *)job)->tail);
		}
	}
}

/* ---- called by the engine -------------------------------------------------------------------- */

/* A job without a hand-over yet. */
static kvc_status_t create_recv(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_recv_t **p_recv)
{
	const kvx_job_kind_t kind = {.role = KVX_CONSUMER,
				     .deadline_ms = kvx->load_ms,
				     .size = sizeof(kvx_recv_t),
				     .first = &kvx->loads,
				     .partial = 1};
	kvc_status_t status = kvx_is_ready(kvx) ? KVC_OK : KVC_ERR_UNREACHABLE;
	kvx_job_t *job = NULL;

	if (status == KVC_OK) {
		status = kvx_job_create(kvx, prefix, &kind, &job);
	}
	if (status != KVC_OK) {
		return status;
	}
	*p_recv = (kvx_recv_t *)job;
	(*p_recv)->load.received = 1;
	kvx->handovers++;
	kvx->stats.loads++;
	kvx_load_init(&(*p_recv)->load, prefix->skip);

	return KVC_OK;
}

static uint32_t timeout_ms(const kvx_job_t *job)
{
	return (uint32_t)((job->deadline_ns - job->start_ns) / 1000000u);
}

/* Its status, and with `result` why there is none. */
static kvc_status_t finish_begin(kvx_t *kvx, kvc_status_t status, kvx_recv_t **p_recv, kvx_recv_result_t *result)
{
	const kvx_recv_result_t refused = {.status = KVC_MISS,
					   .cause = status,
					   .why = status == KVC_ERR_UNREACHABLE ? KV_WHY_NO_DAEMON : KV_WHY_NONE};

	kvx->stats.recvs++;
	if (status == KVC_OK) {
		return kvx_recv_state(*p_recv, result);
	}
	kvx->stats.recvs_refused++;
	kvx_recv_end(*p_recv);
	*p_recv = NULL;
	if (result) {
		(void)kv_struct_fill(result, &refused, sizeof refused);
	}

	return KVC_MISS;
}

/* Ask the daemon for it, or its peer. */
static kvc_status_t ask_for(kvx_recv_t *recv, const kvx_prefix_t *prefix, const char *name)
{
	const kvx_job_t *job = &recv->load.job;
	const kvc_prompt_t prompt = {
		.struct_size = sizeof prompt,
		.tokens = prefix->tokens,
		.n_tokens = prefix->n_tokens,
		.salt = prefix->salt,
	};
	const kvc_fetch_t from = {
		.struct_size = sizeof from,
		.peer = prefix->peer,
		.transfer = name,
		.prompt = &prompt,
		.timeout_ms = timeout_ms(job),
	};

	return kvx_scheduler_recv(job->kvx->scheduler, &job->ask, &from, &recv->handover);
}

kvc_status_t kvx_recv(kvx_t *kvx, const char *transfer, const kvx_prefix_t *prefix, kvx_recv_t **p_recv,
		      kvx_recv_result_t *result)
{
	char name[KVC_MAX_TRANSFER + 1u];
	kvc_status_t status;

	*p_recv = NULL;
	if (result && !kv_struct_is_set(result)) {
		(void)kvx_refuse("kvx_recv: struct_size is not set");
		return finish_begin(kvx, KVC_ERR_ARG, p_recv, result);
	}
	status = create_recv(kvx, prefix, p_recv);
	if (status == KVC_OK) {
		status = kvx_transfer_begin(&(*p_recv)->load.job, prefix, transfer, name);
	}
	if (status == KVC_OK) {
		status = ask_for(*p_recv, prefix, name);
	}

	return finish_begin(kvx, status, p_recv, result);
}

kvc_status_t kvx_recv_state(const kvx_recv_t *recv, kvx_recv_result_t *result)
{
	const kvx_load_result_t *load = &recv->load.result;
	const kvx_recv_result_t now = {
		.status = load->status,
		.cause = load->cause,
		.blocks = load->blocks,
		.tokens = load->tokens,
		.cpu_tokens = load->cpu_tokens,
		.disk_tokens = load->disk_tokens,
		.why = load->why,
		.tail = recv->tail,
		.tail_len = recv->tail_len,
		.recv_ns = load->load_ns,
	};

	return kvx_fill_result("kvx_recv_state", result, &now, sizeof now) ? load->status : KVC_ERR_ARG;
}

void kvx_recv_end(kvx_recv_t *recv)
{
	if (!recv) {
		return;
	}
	if (recv->load.step != KVX_LOAD_ENDED) {
		kvx_load_abort(&recv->load);
	}
	kvc_handover_done(recv->handover, 1);
	free(recv->tail);
	recv->load.job.kvx->handovers--;
	kvx_job_destroy(&recv->load.job);
}
