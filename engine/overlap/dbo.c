/* The decision for a step, and its slices. */
#include "kve/dbo.h"

#include <stddef.h>

const char *kve_dbo_check(const kve_dbo_config_t *config)
{
	if (config->decode_threshold == 0) {
		return "--dbo-decode-token-threshold is 0: a microbatch would have no tokens; at least 1";
	}
	if (config->prefill_threshold == 0) {
		return "--dbo-prefill-token-threshold is 0: a microbatch would have no tokens; at least 1";
	}
	if (config->enabled && config->data_parallel < 2) {
		return "--enable-dbo hides the transport between ranks: it needs --data-parallel-size 2 or more";
	}
	if (config->enabled && !config->expert_parallel) {
		return "--enable-dbo hides the transport of experts: it needs --enable-expert-parallel";
	}

	return NULL;
}

kve_dbo_step_t kve_dbo_decide(const kve_dbo_config_t *config, const kve_dbo_count_t *counts, uint32_t ranks)
{
	uint32_t most = 0, least = UINT32_MAX;
	int all_may = config->enabled && ranks > 1;

	for (uint32_t r = 0; r < ranks; r++) {
		const uint32_t tokens = counts[r].tokens;

		all_may &= tokens >= (counts[r].prefill ? config->prefill_threshold : config->decode_threshold);
		most = tokens > most ? tokens : most;
		least = tokens < least ? tokens : least;
	}

	/* All ranks split at one place, so that their microbatches are alike. */
	const uint32_t split = most / KVE_MAX_MICROBATCHES;

	if (!all_may || split == 0 || split >= least) {
		return (kve_dbo_step_t){.mode = KVE_OVERLAP_SEQ, .most = most};
	}

	return (kve_dbo_step_t){.mode = KVE_OVERLAP_DBO, .most = most, .split = split};
}

void kve_dbo_part(const kve_dbo_step_t *step, uint32_t tokens, uint32_t microbatch, uint32_t *p_first, uint32_t *p_n)
{
	const uint32_t split = step->mode == KVE_OVERLAP_DBO ? step->split : 0;

	/* The prompt of a request may be cut: the rest of it reads keys of the same layer that the leading microbatch
	 * has written. */
	*p_first = microbatch == KVE_LEADING ? 0 : split;
	*p_n = microbatch == KVE_LEADING ? split : tokens - split;
}

uint32_t kve_dbo_slice(const kve_span_t *spans, uint32_t n_spans, uint32_t first, uint32_t n, kve_span_t *out)
{
	uint32_t at = 0, count = 0; /* at: number of the span's first token in the batch */

	for (uint32_t s = 0; s < n_spans; s++) {
		const uint32_t end = at + spans[s].n;
		const uint32_t from = first > at ? first : at;
		const uint32_t to = first + n < end ? first + n : end;

		if (from < to) {
			out[count] = spans[s];
			out[count].tokens += from - at;
			out[count].start += from - at;
			out[count].n = to - from;
			out[count].logits = to == end ? spans[s].logits : NULL;
			out[count].chosen = to == end ? spans[s].chosen : NULL;
			count++;
		}
		at = end;
	}

	return count;
}
