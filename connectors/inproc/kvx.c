/* libkvx in one process: attach, poll, and the checks in front of loads and saves. */
#include "common/await.h"
#include "inproc/config.h"
#include "inproc/job.h"
#include "inproc/load.h"
#include "inproc/save.h"
#include "inproc/self_test.h"

#include "kv/env.h"
#include "kv/log.h"

#include <stdlib.h>
#include <string.h>

#define OPEN_RETRY_NS UINT64_C(500000000)
#define CALL_MS       1000u /* longest wait for an answer of the daemon, over many polls: no call blocks */
#define SLICE_MS      20u   /* longest single wait: heartbeats are checked this often */

static uint32_t or_default(uint32_t value, uint32_t instead)
{
	return value ? value : instead;
}

static kvc_status_t attach_kvc(kvx_t *kvx, const kvx_config_t *config)
{
	const kvc_config_t kvc = {
		.struct_size = sizeof kvc,
		.socket = config->socket,
		.instance = config->instance,
		.secret = config->secret,
		.secret_len = config->secret_len,
		.role = KVC_ROLE_BOTH,
		.rank = config->rank,
		.program = config->program,
		.timeout_ms = CALL_MS,
		.lazy = 2,
	};
	const kvc_status_t status = kvc_attach(&kvc, &kvx->kvc);

	return status == KVC_OK || status == KVC_ERR_NOMEM ? status : kvx_config_identity_refused();
}

static kvc_status_t init_kvx(kvx_t *kvx, const kvx_config_t *config)
{
	const uint32_t poll_bytes = or_default(config->poll_bytes, KVX_POLL_BYTES);
	kvc_status_t status;

	kvx->roles = config->roles;
	kvx->load_ms = or_default(config->load_ms, KVX_LOAD_MS);
	kvx->save_ms = or_default(config->save_ms, KVX_SAVE_MS);
	kvx->max_jobs = or_default(config->jobs, KVX_JOBS);
	kvx->layout = *config->layout;
	kvx->paged = *config->paged;
	kvk_layout_geometry(&kvx->layout, &kvx->geometry);
	if (!kv_holds(kvx->geometry.block_bytes > 0)) {
		return KVC_ERR_INTERNAL;
	}
	kvx->batch = poll_bytes / kvx->geometry.block_bytes;
	kvx->batch = kvx->batch ? kvx->batch : 1;

	kvx->moves = calloc(kvx->batch, sizeof *kvx->moves);
	kvx->leaves = calloc((size_t)kvx->batch * kvx_leaf_count(kvx), sizeof *kvx->leaves);
	if (!kvx->moves || !kvx->leaves) {
		return KVC_ERR_NOMEM;
	}
	status = kvx_config_keep_identity(kvx, config);
	if (status == KVC_OK) {
		status = kvx_inproc_test_init(kvx);
	}

	return status;
}

kvc_status_t kvx_attach(const kvx_config_t *config, kvx_t **p_kvx)
{
	const uint64_t start = kvx_now_ns();
	kvc_status_t status = kvx_config_check(config);
	uint32_t attach_ms;
	kvx_t *kvx;

	if (status != KVC_OK) {
		return status;
	}
	attach_ms = config->attach_ms == UINT32_MAX ? 0 : or_default(config->attach_ms, KVX_ATTACH_MS);
	kvx = calloc(1, sizeof *kvx);
	if (!kvx) {
		return KVC_ERR_NOMEM;
	}
	status = init_kvx(kvx, config);
	if (status == KVC_OK) {
		status = attach_kvc(kvx, config);
	}
	if (status != KVC_OK) {
		goto err_kvx;
	}

	do {
		(void)kvx_poll(kvx, 1);
	} while (!kvx_is_ready(kvx) && kvc_fd(kvx->kvc) >= 0 && kvx_now_ns() - start < (uint64_t)attach_ms * 1000000u);
	*p_kvx = kvx;

	return KVC_OK;

err_kvx:
	kvx_detach(kvx);
	return status;
}

void kvx_detach(kvx_t *kvx)
{
	if (!kvx) {
		return;
	}

	kvx_inproc_test_fini(kvx);
	while (kvx->first) {
		if (kvx->first->is_save) {
			kvx_save_end((kvx_save_t *)kvx->first);
		} else {
			kvx_load_end((kvx_load_t *)kvx->first);
		}
	}
	kvc_space_close(kvx->opening);
	kvc_space_close(kvx->space);
	kvc_detach(kvx->kvc);
	free(kvx->identity_text);
	free(kvx->leaves);
	free(kvx->moves);
	free(kvx);
}

static int is_attached(const kvx_t *kvx)
{
	return kvx->self_test.step == KVX_INPROC_TEST_PASSED && kvc_incarnation(kvx->kvc) != 0;
}

/* After a re-attach libkvc opens the space again: until then a match says that there is no daemon. */
static int is_alive(uint32_t why)
{
	return why != KV_WHY_NO_DAEMON && why != KV_WHY_DAEMON_STALE;
}

int kvx_is_ready(const kvx_t *kvx)
{
	return is_attached(kvx) && is_alive(kvx_miss_reason(kvx->space));
}

/* ---- poll ------------------------------------------------------------------------------------ */

static int job_is_movable(const kvx_job_t *job)
{
	return job->is_save ? kvx_save_movable((const kvx_save_t *)job) : kvx_load_movable((const kvx_load_t *)job);
}

static int any_job_movable(const kvx_t *kvx)
{
	for (const kvx_job_t *job = kvx->first; job; job = job->next) {
		if (job_is_movable(job)) {
			return 1;
		}
	}

	return 0;
}

/* Open the space without waiting: a daemon that stops meanwhile does not stop the engine. */
static void open_space(kvx_t *kvx, uint64_t now)
{
	kvc_status_t status;

	if (!kvx->opening) {
		status = kvc_space_open_start(kvx->kvc, &kvx->identity, &kvx->opening);
	} else {
		status = kvc_space_state(kvx->opening);
		if (status == KVC_PENDING) {
			return;
		}
		if (status == KVC_OK) {
			kvx->space = kvx->opening;
			kvx->opening = NULL;
		}
	}
	if (status != KVC_OK) {
		kv_log(KV_LOG_WARN, "kvx", "the space cannot be opened, all is a miss: %s", kvc_last_error());
		kvc_space_close(kvx->opening);
		kvx->opening = NULL;
		kvx->next_open_ns = now + OPEN_RETRY_NS;
	}
}

static void keep_attached(kvx_t *kvx, uint64_t now)
{
	const uint64_t incarnation = kvc_incarnation(kvx->kvc);

	if (incarnation != kvx->incarnation) {
		kvx->stats.attaches += incarnation != 0;
		kvx->incarnation = incarnation;
	}
	if (!kvx->space && incarnation != 0 && now >= kvx->next_open_ns) {
		open_space(kvx, now);
	}
}

/* Loads first: requests wait for them. Returns the rest of the budget. */
static uint32_t step_jobs(kvx_t *kvx, int saves, uint64_t now, uint32_t budget)
{
	for (kvx_job_t *job = kvx->first; job; job = job->next) {
		if (job->is_save != saves) {
			continue;
		}
		if (saves && ((kvx_save_t *)job)->result.status == KVC_PENDING) {
			budget -= kvx_save_step((kvx_save_t *)job, now, budget);
		} else if (!saves && ((kvx_load_t *)job)->result.status == KVC_PENDING) {
			budget -= kvx_load_step((kvx_load_t *)job, now, budget);
		}
	}

	return budget;
}

static uint32_t count_pending(const kvx_t *kvx)
{
	uint32_t n = 0;

	for (const kvx_job_t *job = kvx->first; job; job = job->next) {
		const kvc_status_t status = job->is_save ? ((const kvx_save_t *)job)->result.status
							 : ((const kvx_load_t *)job)->result.status;

		n += status == KVC_PENDING && !job->internal;
	}

	return n;
}

uint32_t kvx_poll(kvx_t *kvx, uint32_t timeout_ms)
{
	const uint32_t slice = timeout_ms < SLICE_MS ? timeout_ms : SLICE_MS;
	uint64_t now;
	uint32_t left;

	if (kv_broken_count() > 0) {
		kvc_abandon(kvx->kvc);
	}
	(void)kvc_poll(kvx->kvc, any_job_movable(kvx) ? 0 : slice);
	now = kvx_now_ns();
	keep_attached(kvx, now);
	kvx_inproc_test_step(kvx, now);
	left = step_jobs(kvx, 0, now, kvx->batch);
	(void)step_jobs(kvx, 1, now, left);

	return count_pending(kvx);
}

/* ---- the gate -------------------------------------------------------------------------------- */

kvc_status_t kvx_load_prefix(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_load_t **p_load, kvx_load_result_t *result)
{
	kvx_load_result_t unused;
	kvx_load_result_t *to = result ? result : &unused;
	const uint32_t why =
		is_attached(kvx) ? kvx_miss_reason_awaited(kvx->kvc, &kv_env_posix, kvx->space) : KV_WHY_NO_DAEMON;

	*p_load = NULL;
	kvx->stats.loads++;
	if (prefix->struct_size < sizeof *prefix || !(kvx->roles & KVX_CONSUMER) || !is_alive(why)) {
		kvx->stats.load_refused++;
		*to = (kvx_load_result_t){
			.status = KVC_MISS, .cause = KVC_ERR_UNREACHABLE, .why = is_alive(why) ? KV_WHY_NONE : why};
		return KVC_MISS;
	}

	return kvx_load_start(kvx, &kvx->paged, prefix, p_load, to);
}

kvc_status_t kvx_save_prefix(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_save_t **p_save)
{
	*p_save = NULL;
	kvx->stats.saves++;
	if (prefix->struct_size < sizeof *prefix || !(kvx->roles & KVX_PRODUCER) || !kvx_is_ready(kvx)) {
		kvx->stats.save_refused++;
		return KVC_MISS;
	}

	return kvx_save_start(kvx, &kvx->paged, prefix, p_save);
}

void kvx_record_request(kvx_t *kvx, const kvx_request_t *request)
{
	const kvx_load_result_t none = {.why = KV_WHY_NO_DAEMON};
	const kvx_load_result_t *load = request->load ? request->load : &none;
	const kvc_report_t report = {
		.struct_size = sizeof report,
		.request = request->request,
		.session = request->session,
		.query_tokens = request->prompt_tokens,
		.hit_cpu_tokens = load->cpu_tokens,
		.hit_disk_tokens = load->disk_tokens,
		.hit_engine_tokens = request->engine_tokens,
		.output_tokens = request->output_tokens,
		.why = load->why,
		.turn = request->turn,
		.first_missing = load->first_missing,
		.match_ns = load->match_ns,
		.load_ns = load->load_ns,
	};

	if (kvx->space && request->struct_size >= sizeof *request) {
		kvc_report(kvx->space, &report);
	}
}

void kvx_get_stats(const kvx_t *kvx, kvx_stats_t *stats)
{
	const size_t size = stats->struct_size < sizeof *stats ? stats->struct_size : sizeof *stats;

	memcpy(stats, &kvx->stats, size);
	if (size >= sizeof size) {
		stats->struct_size = size;
	}
}
