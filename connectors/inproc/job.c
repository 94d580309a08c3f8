/* What loads and saves have in common: a request with the keys and blocks of a prefix, and the step message. */
#include "inproc/job.h"

#include "kv/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

uint64_t kvx_now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

int kvx_is_ready(const kvx_t *kvx)
{
	return kvx_ranks_are_ready(&kvx->ranks) && kvx_scheduler_is_ready(kvx->scheduler);
}

static int prefix_is_sound(const kvx_prefix_t *prefix, uint32_t n)
{
	return n > 0 && prefix->skip <= n;
}

uint32_t kvx_job_tokens(const kvx_job_t *job, uint32_t n)
{
	return n < job->cap ? n * job->kvx->block_tokens : job->n_tokens;
}

static int blocks_are_sound(const kvx_t *kvx, const uint32_t *blocks, uint32_t n)
{
	uint32_t i = 0;

	while (blocks && i < n && blocks[i] < kvx->max_blocks) {
		i++;
	}

	return i == n;
}

/* The salt is an extra key of the first block, as in kvc_keys_of(). */
static kvc_status_t add_tokens(const kvx_job_t *job, const kvx_prefix_t *prefix)
{
	char salt[sizeof KVC_SALT_PREFIX + KVC_MAX_SALT];
	const void *extra = salt;
	uint32_t extra_len = 0;
	kvx_units_t units = {.struct_size = sizeof units,
			     .n = job->ask.tokens,
			     .tokens = prefix->tokens,
			     .extra = &extra,
			     .extra_len = &extra_len};

	if (prefix->salt && *prefix->salt) {
		const int len = snprintf(salt, sizeof salt, KVC_SALT_PREFIX "%s", prefix->salt);

		if (len < 0 || (size_t)len >= sizeof salt) {
			return KVC_ERR_ARG;
		}
		extra_len = (uint32_t)len;
		units.extra_count = 1;
	}

	return kvx_scheduler_add_tokens(job->kvx->scheduler, &job->ask, &units);
}

kvc_status_t kvx_job_grow(kvx_job_t *job, const uint32_t *blocks, uint32_t n)
{
	const kvx_block_table_t table = {.struct_size = sizeof table,
					 .first = job->n,
					 .n = n - job->n,
					 .fresh = UINT32_MAX,
					 .ids = job->blocks + job->n};
	kvc_status_t status;

	if (n > job->cap || n < job->n || !blocks_are_sound(job->kvx, blocks, n)) {
		return KVC_ERR_ARG;
	}
	memmove(job->blocks + job->n, blocks + job->n, table.n * sizeof *blocks);
	status = kvx_scheduler_append_blocks(job->kvx->scheduler, &job->ask, &table);
	if (status == KVC_OK) {
		job->n = n;
	}

	return status;
}

static kvc_status_t begin_request(kvx_job_t *job, const kvx_prefix_t *prefix, int grows)
{
	kvc_status_t status = add_tokens(job, prefix);

	if (status == KVC_OK && !grows) {
		status = kvx_job_grow(job, prefix->blocks, job->cap);
	}
	if (status != KVC_OK) {
		kvx_scheduler_finish(job->kvx->scheduler, &job->ask);
	}

	return status;
}

uint64_t kvx_deadline_ns(uint32_t ms, uint32_t or_ms)
{
	return kvx_now_ns() + (ms ? ms : or_ms) * UINT64_C(1000000);
}

kvc_status_t kvx_job_create(kvx_t *kvx, const kvx_prefix_t *prefix, const kvx_job_kind_t *kind, kvx_job_t **p_job)
{
	const uint32_t whole = prefix->n_tokens / kvx->block_tokens, rest = prefix->n_tokens % kvx->block_tokens;
	const uint32_t n = whole + (kind->partial && rest > 0);
	kvc_status_t status;
	kvx_job_t *job;

	if (prefix->struct_size < sizeof *prefix || !(kvx->roles & kind->role) || !prefix_is_sound(prefix, n)) {
		return KVC_ERR_ARG;
	}
	if (!prefix->tokens) {
		return KVC_ERR_ARG;
	}
	if (kvx->jobs >= KVX_JOBS) {
		return KVC_ERR_LIMIT;
	}
	job = calloc(1, kind->size + n * sizeof *job->blocks);
	if (!job) {
		return KVC_ERR_NOMEM;
	}

	job->kvx = kvx;
	job->id = ++kvx->last_id;
	job->ask = (kvx_ask_t){
		.struct_size = sizeof job->ask,
		.id = (const char *)&job->id,
		.id_len = sizeof job->id,
		.tokens = whole * kvx->block_tokens,
		.whole = 1,
		.polled = 1,
	};
	job->cap = n;
	job->n_tokens = kind->partial ? prefix->n_tokens : whole * kvx->block_tokens;
	job->blocks = (uint32_t *)(void *)((uint8_t *)job + kind->size);
	job->start_ns = kvx_now_ns();
	job->deadline_ns = kvx_deadline_ns(prefix->deadline_ms, kind->deadline_ms);
	status = begin_request(job, prefix, kind->grows);
	if (status != KVC_OK) {
		free(job);
		return status;
	}
	job->link = kind->first;
	while (*job->link) {
		job->link = &(*job->link)->next;
	}
	*job->link = job;
	kvx->jobs++;
	kvx->pending++;
	*p_job = job;

	return KVC_OK;
}

void kvx_job_destroy(kvx_job_t *job)
{
	*job->link = job->next;
	if (job->next) {
		job->next->link = job->link;
	}
	job->kvx->jobs--;
	free(job);
}

/* The engine computes in no step: all that a message names is begun at once. */
void kvx_run_message(kvx_t *kvx)
{
	const void *message;
	size_t len;

	kvx_scheduler_build_message(kvx->scheduler, &message, &len);
	kvx_ranks_run_step(&kvx->ranks, message, len);
}
