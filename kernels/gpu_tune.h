/* gpu_tune.h -- choices inside kernels/ that only a device can decide between. The defaults are what is believed to be best; bench/gpu compares the others
 * with them, and nobody else uses this. */
#ifndef KVK_GPU_TUNE_H
#define KVK_GPU_TUNE_H

#include <stdint.h>

typedef struct kvk_gpu kvk_gpu_t;

/* Who reads moves, bases and expected digests from a copy of them in the device's memory, made in one piece before, and not from the host's. */
enum {
	KVK_GPU_UPLOAD_STAGED = 1,
	KVK_GPU_UPLOAD_NEAR = 2, /* the pool is in a device's memory */
	KVK_GPU_UPLOAD_LINK = 4,
};

#define KVK_GPU_SLOTS_MOST 8u
#define KVK_GPU_LINES_MOST 8u

typedef struct kvk_gpu_tune {
	/* Way STAGED */
	uint32_t slots; /* of a ring: 2 .. KVK_GPU_SLOTS_MOST */
	uint32_t
		copy_streams; /* that copies go to in turn; 0: each slot has a stream of its own, for its copies and its kernel */
	uint32_t
		kernel_streams; /* that kernels go to in turn, sharing the budget of SMs; with copy_streams at most KVK_GPU_LINES_MOST */
	int batch;  /* all copies of a step in one call, where the driver can */
	int sorted; /* blocks in the order in which they lie in the pool, so that neighbours are one copy */
	int taper;  /* small steps where nothing runs beside them: the last of a scatter, the first of a gather */
	/* Kernels */
	uint32_t uploads; /* KVK_GPU_UPLOAD_* */
	uint32_t
		cluster; /* blocks put on SMs beside each other, so that other kernels' clusters find whole neighbourhoods: 1 .. 8 */
	int wide; /* twice the warps an SM, with half the stages each, where nothing goes over a link */
} kvk_gpu_tune_t;

#ifdef __cplusplus
extern "C" {
#endif
void kvk_gpu_get_tune(const kvk_gpu_t *gpu, kvk_gpu_tune_t *tune);
/* While no copy is under way and no other thread uses the device. Values out of range are taken to the nearest within. */
void kvk_gpu_set_tune(kvk_gpu_t *gpu, const kvk_gpu_tune_t *tune);
#ifdef __cplusplus
}
#endif

#endif
