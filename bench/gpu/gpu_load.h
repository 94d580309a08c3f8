/* gpu_load.h -- what the rows of kvd-gpu-load share: a daemon and an engine, prompts that are saved and loaded, a row's
 * printing, and the raw reader. */
#ifndef GPU_LOAD_H
#define GPU_LOAD_H

#include "gpu_engine.h"

#include <stdio.h>
#include <sys/types.h>

#define LOAD_ROUNDS_MAX 64u
#define LOAD_PROMPTS    3u /* of those rows that need more than one */

typedef struct load_bench {
	/* Set before load_open(). */
	engine_t engine;
	uint32_t blocks, rounds;
	uint64_t until_ns; /* nothing is waited for beyond it */
	const char *base;  /* where the disk tier's directory is made; NULL: there is no disk tier */
	FILE *json;        /* NULL: none */
	/* Made by it. */
	char dir[64], socket[96], disk[256];
	pid_t daemon;
	uint8_t *bounce;
	size_t bounce_bytes;
	kvc_key_t *keys[LOAD_PROMPTS];
	uint32_t *ids, *bad;
} load_bench_t;

typedef struct load_row {
	const char *name, *unit, *reference;
	int least; /* the goal is a lower bound of the ratio, else an upper one */
	double goal;
	double value[LOAD_ROUNDS_MAX], of_reference[LOAD_ROUNDS_MAX], ratio[LOAD_ROUNDS_MAX];
	uint32_t rounds;
} load_row_t;

/* ---- gpu_load_rig.c -------------------------------------------------------------------------- */

/* 0, after a sentence: it could not. load_close() follows in any case. */
int load_open(load_bench_t *b);
void load_close(load_bench_t *b);
/* From SIGTERM and SIGINT on, everything that is left is given up as soon as it can be. */
void load_catch(void);
/* Milliseconds that may be waited still, 1 at least; 0 s left: load_late(). */
uint32_t load_left_ms(const load_bench_t *b);
int load_late(const load_bench_t *b);

/* Bytes from a seed, never zeros. */
void load_fill(uint8_t *out, size_t bytes, uint64_t seed);
/* The cache gets the bytes of a prompt, or others. */
void load_write(load_bench_t *b, uint32_t prompt);
void load_spoil(load_bench_t *b);
/* Blocks of the cache that do not hold a prompt's bytes. */
uint32_t load_wrong(load_bench_t *b, uint32_t prompt);

/* Save what is in the cache as a prompt; durable: until it is on disk. 0, after a sentence: it could not. */
int load_save(load_bench_t *b, uint32_t prompt, int durable);
/* Of a load's seconds. */
typedef struct load_parts {
	double lease, sent, verdict; /* until it is granted, from there until all copies are enqueued, from there until
					the last block has come well */
} load_parts_t;

/* Seconds from asking for the lease until the verdict on the last block; 0, after a sentence: it failed. p_parts may be
 * NULL. */
double load_whole(load_bench_t *b, uint32_t prompt, load_parts_t *p_parts);
/* Seconds from asking for the lease until the same has been loaded this many times during a step, one after another; 0,
 * after a sentence: it failed. */
double load_beside(load_bench_t *b, uint32_t prompt, uint32_t count);
/* Seconds until layer 0 of a load layer by layer is there (engine_load_first()); all blocks came well. 0, after a
 * sentence: it failed. p_wrong not NULL: blocks whose layer 0 does not hold the prompt's bytes at that time. */
double load_first(load_bench_t *b, uint32_t prompt, int *p_layered, uint32_t *p_wrong);
/* Seconds of plain copies of as many bytes, from pinned memory. */
double load_plain(load_bench_t *b);

void load_row_add(load_row_t *row, double value, double reference, double ratio);
/* Medians, on a line of the table and in the JSON file. */
void load_row_print(const load_bench_t *b, load_row_t *row);

/* ---- gpu_load_disk.c ------------------------------------------------------------------------- */

/* The row of the disk tier: exit status. load_open() has been called with a base. */
int load_disk_row(load_bench_t *b);
/* NULL, or why the row cannot be measured with a tier in this directory. `blocks` and `block_bytes` of a prompt. */
const char *load_disk_why(const char *base, uint64_t bytes);

/* ---- gpu_load_raw.c: reading a file as fast as it goes --------------------------------------- */

typedef struct load_raw load_raw_t;

/* A file of `bytes`, a multiple of `request`, in a directory; its name is removed. NULL, after a sentence: it could
 * not. */
load_raw_t *load_raw_open(const load_bench_t *b, uint64_t bytes, size_t request, uint32_t depth);
/* Seconds that reading all of it took; 0, after a sentence: it failed. */
double load_raw_read(load_raw_t *raw);
void load_raw_close(load_raw_t *raw);
/* NULL, or why there is no raw reading there. */
const char *load_raw_why(const char *dir);

#endif
