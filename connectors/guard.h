/* guard.h -- never slower: measured times of loads held against measured times of prefill, per length.
 *
 * Lengths are in powers of two of blocks. Each length has the median of the last few measurements; a length without any borrows from the nearest. A
 * length at which loading has been measured to be slower than computing (by a tenth, at least three times) is stopped; of its hits every 32nd, and one
 * every 30 s, is loaded all the same, to see. It resumes when loading is faster by a tenth.
 *
 * Pure: no clock, no memory, no log of its own; the same calls give the same answers.
 */
#ifndef KVX_GUARD_H
#define KVX_GUARD_H

#include <stdint.h>

#define KVX_GUARD_BUCKETS  20u
#define KVX_GUARD_SAMPLES  7u
#define KVX_GUARD_LEAST    3u /* measurements before anything is stopped */
#define KVX_GUARD_EVERY    32u
#define KVX_GUARD_PROBE_NS UINT64_C(30000000000)
#define KVX_GUARD_SAME_NS  UINT64_C(1000000000) /* a request that asks again within this gets the same answer */
#define KVX_GUARD_MEMORY   64u

/* The last measurements of one length: nanoseconds of 1,024 tokens. */
typedef struct kvx_guard_cell {
	uint64_t sample[KVX_GUARD_SAMPLES];
	uint32_t count, at;
	uint64_t median;
} kvx_guard_cell_t;

typedef struct kvx_guard_line {
	kvx_guard_cell_t cell[KVX_GUARD_BUCKETS];
} kvx_guard_line_t;

/* Loads of one length that do not pay. */
typedef struct kvx_guard_stop {
	int stopped;
	uint32_t asked; /* since the last probe */
	uint64_t probe_ns;
} kvx_guard_stop_t;

typedef enum kvx_guard_verdict { KVX_GUARD_PAYS = 0, KVX_GUARD_PROBE = 1, KVX_GUARD_NO = 2 } kvx_guard_verdict_t;

typedef struct kvx_guard_answer {
	kvx_guard_verdict_t verdict;
	int cut;       /* 1: leave the part on disk out */
	int turned;    /* 1: this length has just been stopped; -1: it has just resumed; 0: neither */
	int again;     /* 1: the same question as before, and the same answer */
	uint32_t from; /* `turned`: tokens from which the length counts */
} kvx_guard_answer_t;

typedef struct kvx_guard_said {
	uint64_t who, ns;
	uint32_t cpu, disk;
	kvx_guard_answer_t answer;
} kvx_guard_said_t;

typedef struct kvx_guard {
	uint32_t block_tokens;
	kvx_guard_line_t cpu, disk, prefill;
	kvx_guard_stop_t whole[KVX_GUARD_BUCKETS]; /* the hit as it is */
	kvx_guard_stop_t tail[KVX_GUARD_BUCKETS];  /* its part on disk, by the length of that */
	kvx_guard_said_t said[KVX_GUARD_MEMORY];
} kvx_guard_t;

void kvx_guard_init(kvx_guard_t *guard, uint32_t block_tokens);
/* A load of that many tokens from memory and from disk took so long. */
void kvx_guard_loaded(kvx_guard_t *guard, uint32_t cpu, uint32_t disk, uint64_t ns);
/* So many tokens were computed in that time. */
void kvx_guard_computed(kvx_guard_t *guard, uint32_t tokens, uint64_t ns);

/* Time of such a load; 0: nothing is known yet. */
uint64_t kvx_guard_load_ns(const kvx_guard_t *guard, uint32_t cpu, uint32_t disk);
uint64_t kvx_guard_compute_ns(const kvx_guard_t *guard, uint32_t tokens);

/* Does loading pay? `who` names the request, so that asking again is not asking more often. */
typedef struct kvx_guard_question {
	uint64_t who, now_ns;
	uint32_t cpu, disk; /* tokens */
} kvx_guard_question_t;
void kvx_guard_ask(kvx_guard_t *guard, const kvx_guard_question_t *question, kvx_guard_answer_t *answer);

#endif
