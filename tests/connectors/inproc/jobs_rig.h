/* jobs_rig.h -- a connector over the fake libkvc, its paged cache, and prompts whose blocks hold a function of
 * conversation and place. */
#ifndef TESTS_CONNECTORS_JOBS_RIG_H
#define TESTS_CONNECTORS_JOBS_RIG_H

#include "kvx.h"

#define BLOCKS  64u
#define TOKENS  16u
#define LAYERS  2u
#define FLOATS  (2u * TOKENS * 2u * 16u) /* K and V of one layer's block: [token][2 heads][16] */
#define MAX_JOB 20u
#define JOBS_MS 5000u /* what attaching, loads and saves may take where a prompt does not say less */

extern const kvk_layout_t layout;

typedef struct bench {
	float *cache[LAYERS];
	void *base[LAYERS];
	kvk_paged_t paged;
	kvx_t *kvx;
} bench_t;

typedef struct prompt {
	uint32_t tokens[MAX_JOB * TOKENS];
	uint32_t blocks[MAX_JOB];
	kvx_prefix_t prefix;
} prompt_t;

/* One poll moves up to poll_blocks. */
void bench_open(bench_t *b, uint32_t poll_blocks);
/* Fails the test when a lease or put is still open. */
void bench_close(bench_t *b);
/* Write, or look for, block i of conversation c. */
void fill(bench_t *b, uint32_t block, uint32_t c, uint32_t i);
int holds(const bench_t *b, uint32_t block, uint32_t c, uint32_t i);
/* n blocks of conversation c, lying from block `first` on. */
void prompt_init(prompt_t *p, uint32_t c, uint32_t n, uint32_t first);
/* Start, poll to the end, free. */
kvc_status_t save_now(bench_t *b, const prompt_t *p, kvx_save_result_t *result);
kvc_status_t load_now(bench_t *b, const prompt_t *p, kvx_load_result_t *result);
kvx_stats_t stats_of(const bench_t *b);
/* Ten blocks of conversation 1 are stored, and prompt `to` reads them back to blocks 30 on. */
void store_ten(bench_t *b, uint32_t poll_blocks, prompt_t *from, prompt_t *to);

#endif
