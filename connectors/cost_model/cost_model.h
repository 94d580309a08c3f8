/* cost_model/cost_model.h -- how much of a hit to load, from the measured times of loading and computing: LOAD,
 * LOAD_SAMPLE or RECOMPUTE (docs/decisions/015).
 *
 * Three latency fits (cost_model/latency_fit.h): computing a step of n tokens, loading n tokens from memory, and the
 * extra time of tokens on disk. Loading a hit saves what computing its tokens would add to the steps that compute the
 * rest: b n + c n (2 position + n). Computing grows with the square and loading does not, so the best choice is one of
 * three: the whole hit, its first part, which lies in memory, or nothing. A part is left out when loading it takes more
 * than nine tenths of what it saves, and loaded again below eight tenths: one bit of hysteresis for each length.
 *
 * Memory is trusted until it was measured three times. Disk counts at its guess, one byte a nanosecond, until it was
 * measured. A tier from which hits are not loaded is sampled every 32nd such hit, or after 30 s without a measurement:
 * the sample takes at most a 64th of the computing that is done anyway.
 *
 * The cost of computing a hit is known once a step has computed half as many tokens, or 512. Before that an exploration
 * budget of a quarter of a second of disk is spent, and enough tokens of the hit are left to be computed: an engine all
 * of whose prompts are stored would never learn.
 *
 * Loads older than five minutes are dropped when newer ones come, steps are kept.
 *
 * Pure: no clock, no allocation, no log. The same calls give the same answers. */
#ifndef KVX_COST_MODEL_H
#define KVX_COST_MODEL_H

#include "cost_model/latency_fit.h"

#define KVX_COST_SAMPLE_EVERY 32u
#define KVX_COST_SAMPLE_NS    UINT64_C(30000000000)
#define KVX_COST_SAMPLE_SHARE 64u /* a sample takes this part of the computing */
#define KVX_COST_EXPLORE_NS   UINT64_C(250000000)

typedef enum kvx_cost_choice { KVX_LOAD = 0, KVX_LOAD_SAMPLE = 1, KVX_RECOMPUTE = 2 } kvx_cost_choice_t;

typedef struct kvx_cost_query {
	uint64_t now_ns;
	uint32_t local;     /* tokens the engine has */
	uint32_t cpu, disk; /* tokens beyond these, in memory, and from the first that is not */
	uint32_t total;     /* tokens of the request */
	uint32_t grain;     /* a hit may be cut to multiples of this; 0: it may not be cut */
} kvx_cost_query_t;

typedef struct kvx_cost_decision {
	kvx_cost_choice_t choice;
	uint32_t cpu, disk;           /* tokens to load */
	int state_changed;            /* 1: this length was stopped just now; -1: it was resumed; 0: neither */
	uint32_t from;                /* `state_changed`: tokens from which the length counts, */
	int on_disk;                  /* only the part on disk, */
	uint64_t load_ns, compute_ns; /* and the times that were compared */
} kvx_cost_decision_t;

typedef struct kvx_cost_tier {
	kvx_fit_t fit;
	double guess;     /* bytes a nanosecond */
	uint32_t stopped; /* bit i: hits of 2^i blocks and more are not loaded */
	uint32_t asked;   /* for such a hit, since the last sample */
	uint64_t sampled_ns;
} kvx_cost_tier_t;

typedef struct kvx_cost_model {
	uint32_t block_tokens;
	uint64_t token_bytes; /* about */
	kvx_fit_t prefill;
	kvx_cost_tier_t cpu, disk; /* disk: or all of a hit that memory alone does not pay for */
	uint32_t explored;         /* hits that may not be cut, seen during exploration */
} kvx_cost_model_t;

void kvx_cost_model_init(kvx_cost_model_t *model, uint32_t block_tokens, uint64_t token_bytes);
/* A load of these tokens has taken ns; 0: it was not timed. */
void kvx_cost_model_add_load(kvx_cost_model_t *model, uint32_t cpu, uint32_t disk, uint64_t ns, uint64_t now_ns);

/* What a step computes: tokens, and the sum over its requests of n (2 p + n), for n tokens after p others. */
typedef struct kvx_step_work {
	uint32_t tokens;
	double square;
} kvx_step_work_t;
void kvx_step_work_add(kvx_step_work_t *work, uint32_t before, uint32_t tokens);
void kvx_cost_model_add_step(kvx_cost_model_t *model, const kvx_step_work_t *work, uint64_t ns);

/* Time of such a load, measured or guessed. */
uint64_t kvx_cost_model_load_ns(const kvx_cost_model_t *model, uint32_t cpu, uint32_t disk);
/* Time that these tokens after `before` others add to computing; time of a step of such work. 0: not known. */
uint64_t kvx_cost_model_compute_ns(const kvx_cost_model_t *model, uint32_t before, uint32_t tokens);
uint64_t kvx_cost_model_step_ns(const kvx_cost_model_t *model, const kvx_step_work_t *work);

/* A request that asks again keeps its answer: the caller remembers it. */
void kvx_cost_model_decide(kvx_cost_model_t *model, const kvx_cost_query_t *question, kvx_cost_decision_t *answer);

#endif
