/* gpu_kill.h -- what the parent and the workers of the kill loop share. */
#ifndef GPU_KILL_H
#define GPU_KILL_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define KILL_WORKERS 8u
#define KILL_CHAINS  64u /* prompts there are: any worker knows what their blocks hold */
#define KILL_LENGTH  12u /* blocks of each */
#define KILL_BLOCKS  64u /* of an engine's cache */

/* What a worker has done since it was started first; seen by the parent. */
typedef struct kill_count {
	_Atomic uint32_t busy;   /* bytes are on their way */
	_Atomic uint64_t rounds; /* since the last start: loads and saves, well or not */
	_Atomic uint64_t saves, loads, blocks, misses, failed, wrong;
	_Atomic uint64_t saved_bytes, loaded_bytes;
} kill_count_t;

typedef struct kill_state {
	kill_count_t worker[KILL_WORKERS];
	_Atomic uint64_t device_free; /* bytes of the device, at the last look */
} kill_state_t;

typedef struct kill_options {
	uint64_t seed;
	uint32_t kills, workers, seconds;
	int host;    /* caches in host memory, small blocks: the harness itself */
	int control; /* worker 0 saves other bytes than it should: somebody has to notice */
} kill_options_t;

/* Blocks of 32 KiB, not of 2 MiB: where the CPU moves them. */
static inline int kill_is_small(const kill_options_t *options)
{
#ifdef ENGINE_FAKE
	(void)options;

	return 1;
#else
	return options->host;
#endif
}

/* ---- gpu_kill_worker.c ----------------------------------------------------------------------- */

/* Save and load until SIGTERM, by the daemon in `dir`. Exit status: 0; 3: wrong bytes were loaded; 4: it could not
 * begin; 77: there is no device. */
int kill_worker(const kill_options_t *options, uint32_t number, kill_state_t *state, const char *dir);

#endif
