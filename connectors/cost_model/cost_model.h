/* cost_model/cost_model.h -- never slower: of what is stored, how much is loaded, from what loading and computing were
 * measured to take.
 *
 * Three curves (cost_model/latency_fit.h): computing a step of n tokens, loading n tokens from memory, and what tokens
 * on disk add to that. Of a hit, loading saves what computing these tokens would add to the steps that compute the
 * rest: b n + c n (2 position + n). Computing grows with the square and loading does not, so that one of three is best:
 * all of it, the part in memory that comes first, nothing. A part is left out when it takes more than nine tenths of
 * what it saves, and taken again below eight tenths.
 *
 * What is not known: memory is trusted until it was measured three times. Disk is taken at its guess (a byte a
 * nanosecond) until it was measured: where that does not pay, and every 32nd time or once in 30 s where measurements
 * say so, a piece is loaded all the same, to see: as long as it takes a 64th of the computing that is to be done
 * anyway. Before a step was measured that computed half as many tokens, or 512, at most a quarter of a second of disk
 * is bet (at the guess, or as measured), and so many tokens of the hit are left to be computed, which tells: an engine
 * all of whose prompts are stored would never learn.
 *
 * Loads are remembered for five minutes beyond the last one, steps for ever.
 *
 * Pure: no clock, no memory, no log of its own; the same calls give the same answers.
 */
#ifndef KVX_COST_MODEL_H
#define KVX_COST_MODEL_H

#include "cost_model/latency_fit.h"

#define KVX_COST_BUCKETS      20u
#define KVX_COST_MIN_SAMPLES  3u /* measurements of a tier before it is known */
#define KVX_COST_SAMPLE_EVERY 32u
#define KVX_COST_SAMPLE_NS    UINT64_C(30000000000)
#define KVX_COST_SAMPLE_SHARE 64u /* of the computing there is, a probe takes one in so many */
#define KVX_COST_EXPLORE_NS   UINT64_C(250000000)
#define KVX_COST_AGE_NS       UINT64_C(300000000000)
#define KVX_COST_MEMO_NS      UINT64_C(1000000000) /* a request that asks again within this gets the same answer */
#define KVX_COST_MEMOS        64u

/* Loads of one length, in powers of two of blocks, that do not pay. */
typedef struct kvx_cost_hysteresis {
	int stopped;
	uint32_t asked; /* since the last probe */
	uint64_t probe_ns;
} kvx_cost_hysteresis_t;

typedef enum kvx_cost_choice { KVX_LOAD = 0, KVX_LOAD_SAMPLE = 1, KVX_RECOMPUTE = 2 } kvx_cost_choice_t;

/* Does loading pay? `who` names the request, so that asking again is not asking more often. */
typedef struct kvx_cost_query {
	uint64_t request, now_ns;
	uint32_t local;     /* tokens the engine has */
	uint32_t cpu, disk; /* tokens beyond, in memory, and from the first that is not on */
	uint32_t total;     /* tokens of the request */
	uint32_t grain;     /* a hit may be cut to multiples of so many; 0: it may not */
} kvx_cost_query_t;

typedef struct kvx_cost_decision {
	kvx_cost_choice_t choice;
	uint32_t cpu, disk;           /* of these, what is to be loaded */
	int state_changed;            /* 1: this length has just been stopped; -1: it has just resumed; 0: neither */
	int repeated;                 /* 1: the same question as before, and the same answer */
	uint32_t from;                /* `turned`: tokens from which the length counts, */
	int on_disk;                  /* is it the part on disk alone, */
	uint64_t load_ns, compute_ns; /* and what was compared */
} kvx_cost_decision_t;

typedef struct kvx_cost_memo {
	uint64_t request, ns;
	uint32_t local, cpu, disk;
	kvx_cost_decision_t answer;
} kvx_cost_memo_t;

typedef struct kvx_cost_model {
	uint32_t block_tokens;
	uint64_t token_bytes; /* about */
	kvx_fit_t prefill, cpu, disk;
	uint32_t explored;                            /* on hits that may not be cut */
	kvx_cost_hysteresis_t head[KVX_COST_BUCKETS]; /* the part in memory, or all of a hit that has none there */
	kvx_cost_hysteresis_t tail[KVX_COST_BUCKETS]; /* the part on disk */
	kvx_cost_memo_t memos[KVX_COST_MEMOS];
} kvx_cost_model_t;

void kvx_cost_model_init(kvx_cost_model_t *model, uint32_t block_tokens, uint64_t token_bytes);
/* A load of that many tokens from memory and from disk took so long. */
typedef struct kvx_load_sample {
	uint32_t cpu, disk;
	uint64_t ns, now_ns;
} kvx_load_sample_t;
void kvx_cost_model_add_load(kvx_cost_model_t *model, const kvx_load_sample_t *load);

/* What a step computes: tokens, and the sum over its requests of n (2 p + n), for n tokens after p others. */
typedef struct kvx_step_work {
	uint32_t tokens;
	double square;
} kvx_step_work_t;
void kvx_step_work_add(kvx_step_work_t *work, uint32_t before, uint32_t tokens);
void kvx_cost_model_add_step(kvx_cost_model_t *model, const kvx_step_work_t *work, uint64_t ns);

/* Time of such a load, measured or guessed. */
uint64_t kvx_cost_model_load_ns(kvx_cost_model_t *model, uint32_t cpu, uint32_t disk);
/* What these tokens after `before` others add to computing; a step of such work. 0: nothing is known. */
uint64_t kvx_cost_model_compute_ns(kvx_cost_model_t *model, uint32_t before, uint32_t tokens);
uint64_t kvx_cost_model_step_ns(kvx_cost_model_t *model, const kvx_step_work_t *work);

void kvx_cost_model_decide(kvx_cost_model_t *model, const kvx_cost_query_t *question, kvx_cost_decision_t *answer);

#endif
