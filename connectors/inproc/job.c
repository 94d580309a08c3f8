/* Jobs: one allocation each, in a list of their connector. */
#include "inproc/job.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

uint64_t kvx_now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

static int prefix_is_sound(const kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix)
{
	const uint32_t n = prefix->n_tokens / kvx->layout.block_tokens;

	if (n == 0 || prefix->skip > n || !prefix->tokens || !prefix->blocks) {
		return 0;
	}
	for (uint32_t i = 0; i < n; i++) {
		if (prefix->blocks[i] >= paged->blocks) {
			return 0;
		}
	}

	return 1;
}

kvx_job_t *kvx_job_create(kvx_t *kvx, const kvk_paged_t *paged, const kvx_prefix_t *prefix, size_t size,
			  uint32_t **p_tokens)
{
	const uint32_t block_tokens = kvx->layout.block_tokens;
	const uint32_t n = prefix->n_tokens / block_tokens;
	const size_t token_bytes = p_tokens ? (size_t)n * block_tokens * sizeof(uint32_t) : 0;
	uint32_t got = 0;
	kvx_job_t *job;

	if (kvx->jobs >= kvx->max_jobs || !prefix_is_sound(kvx, paged, prefix)) {
		return NULL;
	}
	job = calloc(1, size + n * (sizeof(kvc_key_t) + sizeof(uint32_t)) + token_bytes);
	if (!job) {
		return NULL;
	}

	/* the struct, u32 arrays, then keys, which need no alignment */
	job->blocks = (uint32_t *)(void *)((uint8_t *)job + size);
	memcpy(job->blocks, prefix->blocks, n * sizeof(uint32_t));
	if (p_tokens) {
		*p_tokens = job->blocks + n;
		memcpy(*p_tokens, prefix->tokens, token_bytes);
	}
	job->keys = (kvc_key_t *)(void *)((uint8_t *)(job->blocks + n) + token_bytes);
	if (kvc_keys_of(kvx->space,
			&(kvc_prompt_t){sizeof(kvc_prompt_t), prefix->tokens, n * block_tokens, prefix->salt},
			job->keys, n, &got) != KVC_OK ||
	    got != n) {
		free(job);
		return NULL;
	}

	job->kvx = kvx;
	job->paged = paged;
	job->n = n;
	job->internal = paged == &kvx->self_test.paged;
	job->start_ns = kvx_now_ns();
	job->link = &kvx->first;
	while (*job->link) {
		job->link = &(*job->link)->next;
	}
	*job->link = job;
	kvx->jobs++;

	return job;
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
