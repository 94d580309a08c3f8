/* Saves: reserve slots, gather straight into them a bounded number of blocks in each poll, hand them in, wait until
 * they are visible. A save is started again a few times: if the parent was evicted meanwhile (the engine still has it,
 * so the whole prefix is offered), and if the daemon granted only a part. */
#include "inproc/save.h"
#include "inproc/job.h"

#include "kv/status.h"

#define TRIES   4u
#define REST_NS UINT64_C(20000000) /* before asking a busy daemon again; doubled each time */

/* Every save ends here. */
static void finish_save(kvx_save_t *save, kvc_status_t status)
{
	kvx_stats_t *stats = &save->job.kvx->stats;

	kvc_put_free(save->put);
	save->put = NULL;
	save->result.status = status;
	save->result.copied = 1;
	if (save->job.internal) {
		return;
	}

	stats->save_done += status == KVC_OK;
	stats->save_timeouts += status == KVC_ERR_TIMEOUT;
	stats->save_busy += status == KVC_ERR_BUSY || status == KVC_ERR_FULL;
	stats->save_lost += status < 0 && status != KVC_ERR_TIMEOUT && status != KVC_ERR_BUSY && status != KVC_ERR_FULL;
}

/* Reserve slots for [from, n). */
static kvc_status_t start_put(kvx_save_t *save, uint32_t from)
{
	const kvx_t *kvx = save->job.kvx;
	const kvc_put_options_t options = {
		.struct_size = sizeof options,
		.tokens = save->tokens,
	};
	kvc_status_t status;

	save->from = from;
	save->granted = 0;
	save->done = 0;
	save->tries++;
	status = kvc_put_start(kvx->space, save->job.keys, from, save->job.n, &options, &save->put);
	if (status == KVC_OK || status == KVC_PENDING) {
		save->step = KVX_SAVE_ASKED;
		return KVC_OK;
	}
	save->put = NULL;

	return status;
}

/* Reserve [from, n) again after a rest, or give up with `status`. */
static void rest_save(kvx_save_t *save, uint32_t from, kvc_status_t status, uint64_t now)
{
	kvc_put_free(save->put);
	save->put = NULL;
	if (save->tries >= TRIES) {
		finish_save(save, status);
		return;
	}

	save->job.kvx->stats.save_retries += !save->job.internal;
	save->from = from;
	save->step = KVX_SAVE_RESTING;
	save->rest_until_ns = now + (REST_NS << save->tries);
}

kvc_status_t kvx_save_start(kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix, kvx_save_t **p_save)
{
	const uint32_t deadline_ms = prefix->deadline_ms ? prefix->deadline_ms : kvx->save_ms;
	uint32_t *tokens = NULL;
	kvx_save_t *save = (kvx_save_t *)kvx_job_create(kvx, paged, prefix, sizeof *save, &tokens);
	kvc_status_t status = KVC_MISS;
	kvc_match_t match = {.struct_size = sizeof match};

	if (!save) {
		kvx->stats.save_refused++;
		return KVC_MISS;
	}

	save->job.is_save = 1;
	save->job.deadline_ns = save->job.start_ns + (uint64_t)deadline_ms * 1000000u;
	save->tokens = tokens;
	kvc_match(kvx->space, save->job.keys, save->job.n, &match);
	if (match.n == save->job.n) {
		kvx->stats.save_done += !save->job.internal;
		status = KVC_ALREADY;
		goto none;
	}
	save->result = (kvx_save_result_t){.status = KVC_PENDING, .blocks = match.n};
	if (start_put(save, match.n) != KVC_OK) {
		kvx->stats.save_lost += !save->job.internal;
		goto none;
	}
	*p_save = save;

	return KVC_PENDING;

none:
	kvx_job_destroy(&save->job);
	return status;
}

int kvx_save_movable(const kvx_save_t *save)
{
	return save->put && save->step == KVX_SAVE_COPYING;
}

static void step_asked(kvx_save_t *save, uint64_t now)
{
	kvc_put_result_t put = {.struct_size = sizeof put};

	kvc_put_get_result(save->put, &put);
	save->granted = kvc_put_n(save->put);
	switch (put.status) {
	case KVC_PENDING:
		if (save->granted > 0) {
			save->step = KVX_SAVE_COPYING;
		}
		break;
	case KVC_OK:
		/* all that was granted is visible already */
		save->done = save->granted;
		save->step = KVX_SAVE_WAITING;
		break;
	case KVC_ERR_NO_PARENT:
	case (kvc_status_t)KV_ERR_PARENT_LOST:
	case (kvc_status_t)KV_ERR_PARENT_UNREADABLE:
		rest_save(save, 0, put.status, now);
		break;
	case KVC_ERR_BUSY:
	case KVC_ERR_STALE_EPOCH:
		rest_save(save, save->from, put.status, now);
		break;
	default:
		finish_save(save, put.status);
		break;
	}
}

/* One block into its slot. */
static kvc_status_t copy_block(kvx_save_t *save, uint32_t i)
{
	kvx_t *kvx = save->job.kvx;
	kvk_move_t move = {.block = save->job.blocks[save->from + i], .leaves = kvx->leaves};
	kvc_status_t status = kvc_put_block(save->put, i, &move.data);

	if (status == KVC_ALREADY) {
		return KVC_OK;
	}
	if (status != KVC_OK) {
		return status;
	}

	status = (kvc_status_t)kvk_gather(&kvx->layout, save->job.paged, &move, 1);
	if (status != KVC_OK) {
		return status;
	}
	kvx->stats.blocks_saved += !save->job.internal;
	kvx->stats.bytes_saved += save->job.internal ? 0 : kvx->geometry.block_bytes;

	return kvc_put_digests(save->put, i, kvx->leaves);
}

static uint32_t step_copying(kvx_save_t *save, uint32_t budget)
{
	const uint32_t left = save->granted - save->done;
	const uint32_t count = left < budget ? left : budget;
	kvc_status_t status = KVC_OK;

	if (count == 0) {
		return 0; /* other jobs have used this poll's budget up */
	}
	for (uint32_t i = 0; i < count && status == KVC_OK; i++) {
		status = copy_block(save, save->done + i);
	}
	if (status == KVC_OK) {
		status = kvc_put_end(save->put, save->done, count);
	}
	if (status != KVC_OK) {
		finish_save(save, status);
		return count;
	}

	save->done += count;
	if (save->done == save->granted) {
		save->step = KVX_SAVE_WAITING;
		save->result.copied = save->from + save->granted == save->job.n;
	}

	return count;
}

static void step_waiting(kvx_save_t *save, uint64_t now)
{
	kvc_put_result_t put = {.struct_size = sizeof put};
	uint32_t visible;

	kvc_put_get_result(save->put, &put);
	if (put.status == KVC_PENDING) {
		return;
	}

	visible = save->from + put.visible;
	if (visible > save->result.blocks) {
		save->result.blocks = visible;
	}
	if (put.status == KVC_OK && visible >= save->job.n) {
		finish_save(save, KVC_OK);
	} else if (put.status == KVC_OK || put.status == KVC_ERR_BUSY) {
		if (save->result.copied) {
			finish_save(save, KVC_ERR_BUSY);
		} else {
			rest_save(save, visible, KVC_ERR_BUSY, now);
		}
	} else {
		finish_save(save, put.status);
	}
}

uint32_t kvx_save_step(kvx_save_t *save, uint64_t now, uint32_t budget)
{
	uint32_t moved = 0;
	kvc_status_t status;

	if (now >= save->job.deadline_ns) {
		finish_save(save, KVC_ERR_TIMEOUT);
		return 0;
	}

	switch (save->step) {
	case KVX_SAVE_ASKED:
		step_asked(save, now);
		break;
	case KVX_SAVE_COPYING:
		(void)kvc_put_keep(save->put); /* other jobs may use the budget up for long */
		moved = step_copying(save, budget);
		break;
	case KVX_SAVE_WAITING:
		step_waiting(save, now);
		break;
	case KVX_SAVE_RESTING:
		if (now >= save->rest_until_ns) {
			status = start_put(save, save->from);
			if (status != KVC_OK) {
				finish_save(save, status);
			}
		}
		break;
	}

	return moved;
}

kvc_status_t kvx_save_state(const kvx_save_t *save, kvx_save_result_t *result)
{
	if (result) {
		*result = save->result;
	}

	return save->result.status;
}

void kvx_save_end(kvx_save_t *save)
{
	if (!save) {
		return;
	}
	if (save->result.status == KVC_PENDING) {
		save->job.kvx->stats.save_aborted += !save->job.internal;
		kvc_put_free(save->put);
	}
	kvx_job_destroy(&save->job);
}
