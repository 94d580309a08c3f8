/* kve/dbo.h -- whether a step is split into microbatches, and how.
 *
 * The decision is a pure function of what all ranks have. Each rank evaluates it alone, and all get the same: both
 * microbatches on every rank, or one batch on every rank.
 */
#ifndef KVE_DBO_H
#define KVE_DBO_H

#include "kve/overlap.h"
#include "kve/span.h"

#define KVE_DBO_DECODE_THRESHOLD  32u  /* --dbo-decode-token-threshold  */
#define KVE_DBO_PREFILL_THRESHOLD 512u /* --dbo-prefill-token-threshold */

typedef struct kve_dbo_config {
	int enabled;                /* --enable-dbo             */
	uint32_t data_parallel;     /* --data-parallel-size     */
	int expert_parallel;        /* --enable-expert-parallel */
	uint32_t decode_threshold;  /* least tokens of each rank, where all of a rank's requests decode */
	uint32_t prefill_threshold; /* where one of them does not                                       */
} kve_dbo_config_t;

/* NULL: it can be served. Otherwise one sentence that says what is wrong (static). */
const char *kve_dbo_check(const kve_dbo_config_t *config);

/* What one rank has in a step. */
typedef struct kve_dbo_count {
	uint32_t tokens;
	int prefill; /* the prompt of a request is among them */
} kve_dbo_count_t;

typedef struct kve_dbo_step {
	kve_overlap_mode_t mode;
	uint32_t most;  /* tokens of a rank, at most; with padding at the end all have as many; 0: it is not known */
	uint32_t split; /* DBO: the leading microbatch has the tokens [0, split), the other one the rest        */
} kve_dbo_step_t;

/* DBO if each rank has as many tokens as its threshold, and none has padding alone in its second microbatch. */
kve_dbo_step_t kve_dbo_decide(const kve_dbo_config_t *config, const kve_dbo_count_t *counts, uint32_t ranks);

/* A microbatch's part of a rank's tokens, without padding: [*p_first, *p_first + *p_n). In a step of KVE_OVERLAP_DBO
 * neither part is empty, and the leading microbatch has the earlier tokens; otherwise microbatch 0 has all. */
void kve_dbo_part(const kve_dbo_step_t *step, uint32_t tokens, uint32_t microbatch, uint32_t *p_first, uint32_t *p_n);

/* The tokens [first, first + n) of a batch of spans, through a span where need be; out: at most n_spans. Logits go with
 * a span's last token. Returns the number of spans. */
uint32_t kve_dbo_slice(const kve_span_t *spans, uint32_t n_spans, uint32_t first, uint32_t n, kve_span_t *out);

#endif
