/* Receives: a load whose end is where the producer is. Each notice of the daemon begins a piece of it; what was handed
 * over during a piece is the next one. */
#include "inproc/transfer.h"
#include "kvx_handover.h"
#include "scheduler/handover.h"

#include "kv/shm.h"

#include <stdlib.h>
#include <string.h>

struct kvx_recv {
	kvx_load_t load;
	kvc_handover_t *handover; /* NULL: over */
	int complete;             /* all of it is here, its tail too */
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
	recv->complete = load->result.cause == KVC_OK;
	if (recv->complete) {
		load->result.status = KVC_OK;
	}
	stats->recvs_done += (uint64_t)recv->complete;
	stats->recvs_failed += (uint64_t)!recv->complete;
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

static void advance_recv(kvx_recv_t *recv, uint64_t now)
{
	kvx_load_t *load = &recv->load;
	kvc_handover_info_t info = {.struct_size = sizeof info};
	uint32_t there;

	kvc_handover_get_info(recv->handover, &info);
	there = blocks_there(&load->job, &info);
	if (load->cause != KVC_OK) {
		end_recv(recv, load->cause);
	} else if (there > load->from && info.state != KVC_HANDOVER_ENDED) {
		kvx_load_begin_piece(load, there, now);
	} else if (info.status != KVC_PENDING) {
		end_as_handed_over(recv, &info);
	} else if (now >= load->job.deadline_ns) {
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

/* ---- called by the engine -------------------------------------------------------------------- */

static kvc_status_t create_recv(kvx_t *kvx, const char *transfer, const kvx_prefix_t *prefix, kvx_recv_t **p_recv)
{
	const kvx_job_kind_t kind = {.role = KVX_CONSUMER,
				     .deadline_ms = kvx->load_ms,
				     .size = sizeof(kvx_recv_t),
				     .first = &kvx->loads,
				     .partial = 1};
	kvc_status_t status = kvx_is_ready(kvx) ? KVC_OK : KVC_ERR_UNREACHABLE;
	char name[KVC_MAX_TRANSFER + 1u];
	kvx_job_t *job = NULL;
	uint64_t left;

	if (status == KVC_OK) {
		status = kvx_job_create(kvx, prefix, &kind, &job);
	}
	if (status != KVC_OK) {
		return status;
	}
	left = job->deadline_ns - job->start_ns;
	*p_recv = (kvx_recv_t *)job;
	(*p_recv)->load.received = 1;
	kvx->handovers++;
	kvx_load_init(&(*p_recv)->load, prefix->skip);
	status = kvx_transfer_begin(job, transfer, prefix->tokens, name);
	if (status == KVC_OK) {
		status = kvx_scheduler_recv(kvx->scheduler, &job->ask, name, (uint32_t)(left / 1000000u),
					    &(*p_recv)->handover);
	}
	if (status != KVC_OK) {
		kvx_recv_end(*p_recv);
		*p_recv = NULL;
	}

	return status;
}

kvc_status_t kvx_recv(kvx_t *kvx, const char *transfer, const kvx_prefix_t *prefix, kvx_recv_t **p_recv,
		      kvx_recv_result_t *result)
{
	kvx_recv_t *recv = NULL;
	const kvc_status_t status = create_recv(kvx, transfer, prefix, &recv);

	kvx->stats.recvs++;
	*p_recv = recv;
	if (status != KVC_OK) {
		kvx->stats.recvs_refused++;
		if (result) {
			*result = (kvx_recv_result_t){.status = KVC_MISS,
						      .cause = status,
						      .why = status == KVC_ERR_UNREACHABLE ? KV_WHY_NO_DAEMON
											   : KV_WHY_NONE};
		}
		return KVC_MISS;
	}

	return kvx_recv_state(recv, result);
}

kvc_status_t kvx_recv_state(const kvx_recv_t *recv, kvx_recv_result_t *result)
{
	const kvx_load_result_t *load = &recv->load.result;

	if (result) {
		*result = (kvx_recv_result_t){
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
	}

	return load->status;
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
