/* jobs_rig.h -- a connector over a real daemon, its paged cache, and prompts whose blocks hold a function of
 * conversation and place. The calls it makes of libkvc and of the copies can be made to fail. */
#ifndef TESTS_CONNECTORS_JOBS_RIG_H
#define TESTS_CONNECTORS_JOBS_RIG_H

#include "connectors/rig.h"
#include "kvx.h"

#include <stdatomic.h>

#define BLOCKS  64u
#define TOKENS  16u
#define LAYERS  2u
#define FLOATS  (2u * TOKENS * 2u * 16u) /* K and V of one layer's block: [token][2 heads][16] */
#define MAX_JOB 20u
#define JOBS_MS 20000u /* what attaching, loads and saves may take where a prompt does not say less */
#define NONE    UINT32_MAX

/* What goes wrong, and what was seen. The transfer thread reads and writes it too. */
typedef struct knobs {
	atomic_uint ready;     /* blocks of a lease that are ready, at most                         */
	atomic_int rest;       /* why no more become ready; 0: the daemon's own answer              */
	atomic_int lease;      /* what asking for a lease returns; 0: the daemon's own answer       */
	atomic_int late;       /* no answer to that comes                                           */
	atomic_uint revoke_on; /* leases are over once this block of the cache was written          */
	atomic_int revoked;    /* they are                                                          */
	atomic_uint grant;     /* most blocks of one put                                            */
	atomic_int put;        /* answer to the next puts ...                                       */
	atomic_int put_times;  /* ... this many; from the first of them on nothing counts as stored */
	atomic_int put_done;   /* how puts end; 0: as the daemon says                               */
	atomic_int put_end;    /* what handing in returns; 0: what libkvc does                      */
	atomic_int wrong;      /* loads flip a bit behind the digests' back                         */
	atomic_int no_space;   /* a space cannot be opened                                          */
	atomic_int stall;      /* waits for a heartbeat until a stopped daemon goes on; 0: for ever */
	pid_t stalled;
	atomic_uint put_starts, put_from, reports, bad; /* seen */
	atomic_ullong report_why;
} knobs_t;
extern knobs_t knobs;
/* Nothing goes wrong, and nothing was seen. */
void knobs_reset(void);

extern const kvk_layout_t layout;

typedef struct bench {
	rig_t rig;
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

/* A daemon of its own (silence: rig_t), and a connector that is attached to it. */
void bench_open(bench_t *b, const char *program, const char *silence);
/* Fails the test when a lease or put is still open. */
void bench_close(bench_t *b);
/* Poll until it is ready, for JOBS_MS at most. */
void bench_await_ready(bench_t *b);
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
void store_ten(bench_t *b, prompt_t *from, prompt_t *to);
/* The keys of a prompt, and a flipped bit in the stored block `block` of it, as a client with a wild pointer could. */
void keys_of(const bench_t *b, const prompt_t *p, kvc_key_t *keys);
void damage(const bench_t *b, const prompt_t *p, uint32_t block);

#endif
