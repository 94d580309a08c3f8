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
#ifndef KVX_GUARD_H
#define KVX_GUARD_H

#include "cost_model/latency_fit.h"

#define KVX_GUARD_BUCKETS  20u
#define KVX_GUARD_LEAST    3u /* measurements of a tier before it is known */
#define KVX_GUARD_EVERY    32u
#define KVX_GUARD_PROBE_NS UINT64_C(30000000000)
#define KVX_GUARD_SHARE    64u /* of the computing there is, a probe takes one in so many */
#define KVX_GUARD_BET_NS   UINT64_C(250000000)
#define KVX_GUARD_AGE_NS   UINT64_C(300000000000)
#define KVX_GUARD_SAME_NS  UINT64_C(1000000000) /* a request that asks again within this gets the same answer */
#define KVX_GUARD_MEMORY   64u

/* Loads of one length, in powers of two of blocks, that do not pay. */
typedef struct kvx_guard_stop {
	int stopped;
	uint32_t asked; /* since the last probe */
	uint64_t probe_ns;
} kvx_guard_stop_t;

typedef enum kvx_guard_verdict { KVX_GUARD_PAYS = 0, KVX_GUARD_PROBE = 1, KVX_GUARD_NO = 2 } kvx_guard_verdict_t;

/* Does loading pay? `who` names the request, so that asking again is not asking more often. */
typedef struct kvx_guard_question {
	uint64_t who, now_ns;
	uint32_t local;     /* tokens the engine has */
	uint32_t cpu, disk; /* tokens beyond, in memory, and from the first that is not on */
	uint32_t total;     /* tokens of the request */
	uint32_t grain;     /* a hit may be cut to multiples of so many; 0: it may not */
} kvx_guard_question_t;

typedef struct kvx_guard_answer {
	kvx_guard_verdict_t verdict;
	uint32_t cpu, disk;           /* of these, what is to be loaded */
	int turned;                   /* 1: this length has just been stopped; -1: it has just resumed; 0: neither */
	int again;                    /* 1: the same question as before, and the same answer */
	uint32_t from;                /* `turned`: tokens from which the length counts, */
	int of_disk;                  /* is it the part on disk alone, */
	uint64_t load_ns, compute_ns; /* and what was compared */
} kvx_guard_answer_t;

typedef struct kvx_guard_said {
	uint64_t who, ns;
	uint32_t local, cpu, disk;
	kvx_guard_answer_t answer;
} kvx_guard_said_t;

typedef struct kvx_guard {
	uint32_t block_tokens;
	uint64_t token_bytes; /* about */
	kvx_curve_t prefill, cpu, disk;
	uint32_t bets;                             /* on hits that may not be cut */
	kvx_guard_stop_t whole[KVX_GUARD_BUCKETS]; /* the part in memory, or all of a hit that has none there */
	kvx_guard_stop_t tail[KVX_GUARD_BUCKETS];  /* the part on disk */
	kvx_guard_said_t said[KVX_GUARD_MEMORY];
} kvx_guard_t;

void kvx_guard_init(kvx_guard_t *guard, uint32_t block_tokens, uint64_t token_bytes);
/* A load of that many tokens from memory and from disk took so long. */
typedef struct kvx_guard_load {
	uint32_t cpu, disk;
	uint64_t ns, now_ns;
} kvx_guard_load_t;
void kvx_guard_loaded(kvx_guard_t *guard, const kvx_guard_load_t *load);

/* What a step computes: tokens, and the sum over its requests of n (2 p + n), for n tokens after p others. */
typedef struct kvx_guard_work {
	uint32_t tokens;
	double square;
} kvx_guard_work_t;
void kvx_guard_work_add(kvx_guard_work_t *work, uint32_t before, uint32_t tokens);
void kvx_guard_computed(kvx_guard_t *guard, const kvx_guard_work_t *work, uint64_t ns);

/* Time of such a load, measured or guessed. */
uint64_t kvx_guard_load_ns(kvx_guard_t *guard, uint32_t cpu, uint32_t disk);
/* What these tokens after `before` others add to computing; a step of such work. 0: nothing is known. */
uint64_t kvx_guard_compute_ns(kvx_guard_t *guard, uint32_t before, uint32_t tokens);
uint64_t kvx_guard_step_ns(kvx_guard_t *guard, const kvx_guard_work_t *work);

void kvx_guard_ask(kvx_guard_t *guard, const kvx_guard_question_t *question, kvx_guard_answer_t *answer);

#endif
