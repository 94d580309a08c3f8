/* Saves: a request that has computed all of its prefix. The scheduler half reserves what is not stored, and again what
 * was refused; the worker half copies. Once every block has been read the engine may write them, so from then on
 * nothing is reserved again. */
#include "inproc/error.h"
#include "inproc/job.h"

#define TRIES 4u /* refusals in a row, then the rest is given up */

/* Blocks that may still be read, or be reserved for reading, are another request's from here on, as a fence has it:
 * what the worker half has to read of them is read before this returns, the rest is given up. */
static void take_back_blocks(const kvx_save_t *save)
{
	const kvx_job_t *job = &save->job;
	const kvx_block_table_t table = {.struct_size = sizeof table, .n = job->n, .ids = job->blocks};

	(void)kvx_scheduler_append_blocks(job->kvx->scheduler, &job->ask, &table);
	kvx_scheduler_finish(job->kvx->scheduler, &job->ask);
	kvx_run_message(job->kvx);
}

static void end_request(kvx_save_t *save)
{
	save->job.kvx->pending--;
	if (save->result.copied) {
		kvx_scheduler_finish(save->job.kvx->scheduler, &save->job.ask);
	} else {
		take_back_blocks(save);
	}
	save->result.copied = 1;
}

/* Every save that is not aborted ends here. */
void kvx_save_finish(kvx_save_t *save, kvc_status_t status)
{
	kvx_stats_t *stats = &save->job.kvx->stats;
	const int busy = status == KVC_ERR_BUSY || status == KVC_ERR_FULL;

	save->result.status = status;
	end_request(save);
	stats->save_done += status == KVC_OK;
	stats->save_timeouts += status == KVC_ERR_TIMEOUT;
	stats->save_busy += (uint64_t)busy;
	stats->save_lost += status != KVC_OK && status != KVC_ERR_TIMEOUT && !busy;
}

/* The rest will not come: it was refused too often, what was read cannot be read again, or the blocks are no longer
 * what was reserved. */
static int is_given_up(const kvx_save_t *save, const kvx_outcome_t *outcome)
{
	return outcome->refused == KVC_ERR_REVOKED ||
	       (outcome->refused != KVC_OK && (save->result.copied || outcome->refusals >= TRIES));
}

void kvx_save_advance(kvx_save_t *save, uint64_t now)
{
	const kvx_job_t *job = &save->job;
	kvx_scheduler_t *scheduler = job->kvx->scheduler;
	const kvx_ranks_t *ranks = &job->kvx->ranks;
	kvx_ask_t ask = job->ask;
	kvx_outcome_t outcome = {.struct_size = sizeof outcome};
	uint32_t stored;

	ask.tokens = job->n * job->kvx->block_tokens;
	if (!save->result.copied && kvx_scheduler_next_save_at(scheduler, ask.id, ask.id_len) <= ask.tokens) {
		kvx_scheduler_advance(scheduler, &ask, ask.tokens, 0);
	}
	kvx_scheduler_get_outcome(scheduler, &ask, &outcome);
	stored = outcome.stored / job->kvx->block_tokens;
	save->result.blocks = stored > save->result.blocks ? stored : save->result.blocks;
	save->result.copied |=
		!save->more && outcome.sent >= ask.tokens && !kvx_ranks_have_unsaved(ranks, job->blocks, job->n);
	if (stored >= job->n) {
		if (!save->sent) {
			kvx_save_finish(save, KVC_OK);
		}
	} else if (now >= job->deadline_ns) {
		kvx_save_finish(save, KVC_ERR_TIMEOUT);
	} else if (is_given_up(save, &outcome)) {
		kvx_save_finish(save, outcome.refused);
	} else if (!save->result.copied && !kvx_ranks_are_ready(ranks)) {
		kvx_save_finish(save, KVC_ERR_CLOSED);
	}
}

void kvx_saves_advance(kvx_t *kvx, uint64_t now)
{
	for (kvx_job_t *job = kvx->saves; job; job = job->next) {
		if (((kvx_save_t *)job)->result.status == KVC_PENDING) {
			kvx_save_advance((kvx_save_t *)job, now);
		}
	}
}

kvc_status_t kvx_save_prefix(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_save_t **p_save)
{
	const kvx_job_kind_t kind = {
		.role = KVX_PRODUCER, .deadline_ms = kvx->save_ms, .size = sizeof(kvx_save_t), .first = &kvx->saves};
	kvc_status_t status;
	kvx_job_t *job;
	kvx_save_t *save;

	*p_save = NULL;
	kvx->stats.saves++;
	if (!kvx_is_ready(kvx) || kvx_job_create(kvx, prefix, &kind, &job) != KVC_OK) {
		kvx->stats.save_refused++;
		return KVC_MISS;
	}

	save = (kvx_save_t *)job;
	save->result.status = KVC_PENDING;
	kvx_save_advance(save, job->start_ns);
	status = save->result.status;
	if (status != KVC_PENDING) {
		kvx_job_destroy(job);
		return status == KVC_OK ? KVC_ALREADY : KVC_MISS;
	}
	*p_save = save;

	return KVC_PENDING;
}

kvc_status_t kvx_save_state(const kvx_save_t *save, kvx_save_result_t *result)
{
	return kvx_fill_result("kvx_save_state", result, &save->result, sizeof *result) ? save->result.status
											: KVC_ERR_ARG;
}

void kvx_save_abort(kvx_save_t *save)
{
	if (save->result.status == KVC_PENDING) {
		save->job.kvx->stats.save_aborted++;
		end_request(save);
	}
}

void kvx_save_end(kvx_save_t *save)
{
	if (save) {
		kvx_save_abort(save);
		kvx_job_destroy(&save->job);
	}
}
