/* Loads: an asynchronous load of the two halves. A match leases what it finds, the worker half copies and verifies it,
 * and the first block that it names as failed ends the prefix. */
#include "inproc/error.h"
#include "inproc/job.h"

#include "kv/shm.h"

#define ABORT_US 1000u /* pause between two looks at a load that was cancelled */

/* ---- the end --------------------------------------------------------------------------------- */

static void count_load(kvx_t *kvx, const kvx_load_result_t *result)
{
	kvx_stats_t *stats = &kvx->stats;
	const int timeout = result->cause == KVC_ERR_TIMEOUT, corrupt = result->cause == KVC_ERR_CORRUPT;

	stats->load_hits += result->status == KVC_OK;
	stats->load_misses += result->status == KVC_MISS && result->cause == KVC_MISS;
	stats->load_timeouts += (uint64_t)timeout;
	stats->load_corrupt += (uint64_t)corrupt;
	stats->load_lost += result->cause < 0 && !timeout && !corrupt;
	stats->cpu_tokens += result->cpu_tokens;
	stats->disk_tokens += result->disk_tokens;
}

void kvx_load_finish(kvx_load_t *load, kvc_status_t cause)
{
	kvx_t *kvx = load->job.kvx;
	kvx_load_result_t *result = &load->result;

	load->step = KVX_LOAD_ENDED;
	kvx->pending--;
	result->status = load->from > load->skip ? KVC_OK : KVC_MISS;
	result->cause = cause == KVC_OK && load->from < load->job.cap ? KVC_MISS : cause;
	(void)kvx_scheduler_get_key(kvx->scheduler, &load->job.ask, load->from, &result->first_missing);
	result->load_ns = kvx_now_ns() - load->job.start_ns;
	kvx_scheduler_finish(kvx->scheduler, &load->job.ask);
	count_load(kvx, result);
}

/* Every piece of a load ends here. The first `done` blocks of the prefix are in the cache; why no more are. */
static void end_piece(kvx_load_t *load, uint32_t done, uint32_t why, kvc_status_t cause)
{
	const uint32_t loaded = kvx_job_tokens(&load->job, done) - kvx_job_tokens(&load->job, load->from);
	const uint32_t in_cpu = loaded < load->in_cpu ? loaded : load->in_cpu;
	kvx_load_result_t *result = &load->result;

	load->step = KVX_LOAD_IDLE;
	load->from = done;
	load->cause = cause == KVC_OK && done < load->to ? KVC_MISS : cause;
	result->blocks = done;
	result->tokens = kvx_job_tokens(&load->job, done);
	result->cpu_tokens += in_cpu;
	result->disk_tokens += loaded - in_cpu;
	result->why = why;
	if (!load->received) {
		kvx_load_finish(load, load->cause);
	}
}

static void mark_copied(kvx_load_t *load)
{
	load->step = KVX_LOAD_COPIED;
	load->ranks_left = 0;
	load->job.kvx->copying--;
}

/* One worker half has ended the load with that id. */
static void note_finished(kvx_t *kvx, uint64_t id)
{
	for (kvx_job_t *job = kvx->loads; job; job = job->next) {
		kvx_load_t *load = (kvx_load_t *)job;

		if (job->id == id && load->ranks_left > 0) {
			load->ranks_left--;
			if (load->ranks_left == 0) {
				mark_copied(load);
			}
		}
	}
}

/* The name is the request's id. */
static void take_finished(kvx_t *kvx, kvx_worker_t *worker)
{
	uint64_t id;

	while (kvx_worker_take_finished(worker, (char *)&id, sizeof id, NULL) > 0) {
		note_finished(kvx, id);
	}
}

static void take_failed_blocks(kvx_t *kvx, kvx_worker_t *worker)
{
	uint32_t ids[64], n;

	do {
		n = kvx_worker_take_failed_blocks(worker, ids, KV_COUNT_OF(ids));
		for (uint32_t i = 0; i < n; i++) {
			kvx->failed[ids[i] / 64u] |= UINT64_C(1) << ids[i] % 64u;
		}
	} while (n == KV_COUNT_OF(ids));
}

static void take_reports(kvx_t *kvx, kvx_worker_t *worker)
{
	const void *report;
	size_t len;

	do {
		kvx_worker_take_report(worker, &report, &len);
		if (len > 0) {
			kvx_scheduler_take_report(kvx->scheduler, report, len);
		}
	} while (len > 0);
}

static void end_copied(kvx_load_t *load)
{
	kvx_t *kvx = load->job.kvx;
	uint32_t done = load->from + load->hit.tokens / kvx->block_tokens;
	kvx_outcome_t outcome = {.struct_size = sizeof outcome};

	for (uint32_t i = done; i-- > load->from;) {
		const uint32_t id = load->job.blocks[i];
		const uint64_t bit = UINT64_C(1) << id % 64u;

		done = kvx->failed[id / 64u] & bit ? i : done;
		kvx->failed[id / 64u] &= ~bit;
	}
	if (load->aborted) {
		load->step = KVX_LOAD_ENDED;
		return;
	}
	kvx_scheduler_get_outcome(kvx->scheduler, &load->job.ask, &outcome);
	end_piece(load, done, outcome.why, outcome.load);
}

/* Loads that the worker half never had, since their message was broken or no memory was left: they have ended for the
 * scheduler half. */
static void give_up_unknown(kvx_t *kvx)
{
	for (kvx_job_t *job = kvx->loads; job; job = job->next) {
		kvx_load_t *load = (kvx_load_t *)job;
		kvx_outcome_t outcome = {.struct_size = sizeof outcome};

		kvx_scheduler_get_outcome(kvx->scheduler, &job->ask, &outcome);
		if (load->step == KVX_LOAD_COPYING && outcome.load != KVC_PENDING) {
			load->hit.tokens = 0;
			mark_copied(load);
		}
	}
}

void kvx_loads_collect(kvx_t *kvx)
{
	const uint32_t copying = kvx->copying;
	kvx_worker_stats_t stats;

	/* Looked at before names are taken: what ends meanwhile is reported now, and named the next time. */
	kvx_ranks_get_stats(&kvx->ranks, &stats);
	/* In this order: once a load was named, its failed blocks and its report are there. */
	for (uint32_t r = 0; r < kvx->ranks.count; r++) {
		take_finished(kvx, kvx->ranks.worker[r]);
	}
	for (uint32_t r = 0; r < kvx->ranks.count; r++) {
		take_failed_blocks(kvx, kvx->ranks.worker[r]);
	}
	if (stats.loads_open == 0) {
		give_up_unknown(kvx);
	}
	if (kvx->copying < copying) {
		kvx_ranks_order_loads(&kvx->ranks); /* before the engine hears of it and writes their blocks */
	}
	for (uint32_t r = 0; r < kvx->ranks.count; r++) {
		take_reports(kvx, kvx->ranks.worker[r]);
	}
	for (kvx_job_t *job = kvx->loads; job; job = job->next) {
		if (((kvx_load_t *)job)->step == KVX_LOAD_COPIED) {
			end_copied((kvx_load_t *)job);
		}
	}
}

/* ---- the beginning --------------------------------------------------------------------------- */

/* The daemon has not answered yet, or it did not run for a moment: what was handed over is there all the same. */
static int may_look_up_again(const kvx_load_t *load, uint32_t wanted)
{
	const uint32_t why = load->hit.why;

	return load->hit.leasing || (load->received && load->hit.tokens < wanted &&
				     (why == KV_WHY_DAEMON_STALE || why == KV_WHY_CONTENDED || why == KV_WHY_TIMEOUT));
}

/* What is leased goes into the next message. */
static void look_up(kvx_load_t *load, uint64_t now)
{
	kvx_t *kvx = load->job.kvx;
	const uint64_t left = load->job.deadline_ns > now ? load->job.deadline_ns - now : 0;
	kvx_ask_t ask = load->job.ask;
	int again;

	ask.tokens = load->to * kvx->block_tokens;
	ask.local = load->from * kvx->block_tokens;
	ask.load_ms = (uint32_t)(left / 1000000u) + 1u;
	kvx_scheduler_match(kvx->scheduler, &ask, &load->hit);
	again = may_look_up_again(load, ask.tokens - ask.local);
	if (!load->looked_up && load->hit.stored > 0) {
		/* What is on disk now is in memory when the lease is granted: a later lookup finds it there. */
		load->looked_up = 1;
		load->in_cpu =
			(load->hit.leasing ? load->hit.stored - ask.local : load->hit.tokens) - load->hit.disk_tokens;
	}
	load->result.match_ns = load->from == load->skip ? kvx_now_ns() - load->job.start_ns : load->result.match_ns;
	load->result.why = load->hit.why;
	if (load->hit.tokens > 0 && (!again || left == 0)) {
		kvx_scheduler_start_load(kvx->scheduler, &ask, &load->hit);
		load->step = KVX_LOAD_COPYING;
		load->ranks_left = kvx->ranks.count;
		kvx->copying++;
		kvx->begun = 1;
	} else if (!again) {
		end_piece(load, load->from, load->hit.why, KVC_MISS);
	} else if (left == 0) {
		end_piece(load, load->from, KV_WHY_TIMEOUT, KVC_ERR_TIMEOUT);
	}
}

void kvx_load_begin_piece(kvx_load_t *load, uint32_t to, uint64_t now)
{
	load->step = KVX_LOAD_LEASING;
	load->to = to;
	load->looked_up = 0;
	look_up(load, now);
}

void kvx_loads_advance(kvx_t *kvx, uint64_t now)
{
	for (kvx_job_t *job = kvx->loads; job; job = job->next) {
		if (((kvx_load_t *)job)->step == KVX_LOAD_LEASING) {
			look_up((kvx_load_t *)job, now);
		}
	}
}

/* ---- called by the engine -------------------------------------------------------------------- */

void kvx_load_init(kvx_load_t *load, uint32_t skip)
{
	load->skip = load->from = skip;
	load->step = KVX_LOAD_IDLE;
	load->hit.struct_size = sizeof load->hit;
	load->result.status = KVC_PENDING;
	load->result.blocks = skip;
	load->result.tokens = kvx_job_tokens(&load->job, skip);
}

kvc_status_t kvx_load_prefix(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_load_t **p_load, kvx_load_result_t *result)
{
	const kvx_job_kind_t kind = {
		.role = KVX_CONSUMER, .deadline_ms = kvx->load_ms, .size = sizeof(kvx_load_t), .first = &kvx->loads};
	kvc_status_t status = KVC_ERR_UNREACHABLE;
	kvx_load_result_t refused = {.status = KVC_MISS};
	kvx_job_t *job;
	kvx_load_t *load;

	*p_load = NULL;
	kvx->stats.loads++;
	if (!kvx_fill_result("kvx_load_prefix", result, &refused, sizeof refused)) {
		status = KVC_ERR_ARG;
	} else if (kvx_ranks_are_ready(&kvx->ranks)) {
		status = kvx_job_create(kvx, prefix, &kind, &job);
	}
	if (status != KVC_OK) {
		kvx->stats.load_refused++;
		refused.cause = status;
		refused.why = status == KVC_ERR_UNREACHABLE ? KV_WHY_NO_DAEMON : KV_WHY_NONE;
		(void)kvx_fill_result("kvx_load_prefix", result, &refused, sizeof refused);
		return KVC_MISS;
	}

	load = (kvx_load_t *)job;
	kvx_load_init(load, prefix->skip);
	kvx_load_begin_piece(load, job->n, job->start_ns);
	(void)kvx_fill_result("kvx_load_prefix", result, &load->result, sizeof *result);
	if (load->step == KVX_LOAD_ENDED) {
		kvx_job_destroy(job);
		return KVC_MISS;
	}
	*p_load = load;

	return KVC_PENDING;
}

kvc_status_t kvx_load_state(const kvx_load_t *load, kvx_load_result_t *result)
{
	return kvx_fill_result("kvx_load_state", result, &load->result, sizeof *result) ? load->result.status
											: KVC_ERR_ARG;
}

/* The transfer thread finishes the batch it copies, then it lets go of the blocks. */
void kvx_load_abort(kvx_load_t *load)
{
	kvx_t *kvx = load->job.kvx;

	load->aborted = 1;
	kvx->stats.load_aborted++;
	kvx->pending--;
	kvx_scheduler_finish(kvx->scheduler, &load->job.ask);
	if (load->step == KVX_LOAD_COPYING) {
		kvx_run_message(kvx);
		kvx_loads_collect(kvx);
	}
	while (load->step == KVX_LOAD_COPYING) {
		kvx_ranks_wait(&kvx->ranks, ABORT_US);
		kvx_loads_collect(kvx);
	}
}

void kvx_load_end(kvx_load_t *load)
{
	if (!load) {
		return;
	}
	if (load->step != KVX_LOAD_ENDED) {
		kvx_load_abort(load);
	}
	kvx_job_destroy(&load->job);
}
