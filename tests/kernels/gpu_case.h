/* gpu_case.h -- a random cache in the fake device's memory, pool blocks beside it, and what the CPU twin makes of the
 * same. */
#ifndef GPU_CASE_H
#define GPU_CASE_H

#include "kv_cmocka.h"
#include "kv_test.h"

#include "fake_cuda.h"

#include "kvk/gpu.h"

#define CASE_LAYERS 8u
#define CASE_MOVES  24u

/* Where the pool's blocks lie. */
typedef enum case_pool { CASE_REGISTERED, CASE_PINNED, CASE_ON_DEVICE, CASE_MAPPED } case_pool_t;

typedef struct gpu_case {
	kv_test_rng_t *rng;
	kvk_gpu_t *gpu;
	kvk_layout_t layout;
	kvk_geometry_t g;
	kvk_paged_t paged;
	void *base[CASE_LAYERS];
	kvk_cu_ptr_t cache; /* also the host's address: the fake device is the host */
	size_t cache_bytes;
	case_pool_t kind;
	uint8_t *pool;
	size_t pool_bytes;
	int pool_fd;      /* CASE_MAPPED: of its memory */
	uint64_t *leaves; /* [count][per_move] */
	size_t per_move;
	kvk_move_t moves[CASE_MOVES];
	uint32_t count;
	uint32_t layer, layers;
	int ready; /* see kvk_gpu_copy_t */
	/* the twin's */
	uint8_t *twin_cache, *twin_pool;
	uint64_t *twin_leaves;
} gpu_case_t;

/* Every kind in turn. */
kvk_paged_kind_t gpu_case_kind(int round);

void gpu_case_init(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind);
/* Drawn until it is as it is wanted. */
void gpu_case_until(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind,
		    int (*is_wanted)(const gpu_case_t *c));
/* Some case that gpu_case_is_usual(): with two moves or more, whose pool is registered host memory and whose pages the
 * kernels can digest. */
void gpu_case_usual(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind);
int gpu_case_is_usual(const gpu_case_t *c);
void gpu_case_fini(gpu_case_t *c);

/* Does its pool lie in a GPU's memory? */
int gpu_case_is_near(const gpu_case_t *c);
/* Does it have a leaf that no kernel digests? */
int gpu_case_has_small_leaf(const gpu_case_t *c);
/* Is all of a block moved? */
int gpu_case_is_whole(const gpu_case_t *c);

/* Memory of the fake device, and mapped: `bytes` becomes a multiple of what it comes in. */
void *gpu_case_map(kvk_gpu_t *gpu, size_t *p_bytes, int *p_fd);

/* Its moves from now on are without. */
void gpu_case_ask_no_digests(gpu_case_t *c);

/* The copy that is asked for. */
kvk_gpu_copy_t gpu_case_copy(const gpu_case_t *c, kvk_gpu_dir_t dir, kvk_gpu_way_t way, kvk_cu_stream_t stream);

/* The same by the twin, in its own memory. Digests expected of a scatter are those of the pool's blocks. */
void gpu_case_twin(gpu_case_t *c, kvk_gpu_dir_t dir);
/* Cache, pool and leaves are the twin's, bit for bit. */
void gpu_case_equal(const gpu_case_t *c);
/* The copy, which must be taken and end well, and the twin's: they are equal. */
void gpu_case_check(gpu_case_t *c, kvk_gpu_dir_t dir, kvk_gpu_way_t way, kvk_cu_stream_t stream);

/* New bytes on both sides, the same for the twin; leaves that a scatter finds right. */
void gpu_case_refill(gpu_case_t *c);

/* A byte of block i that the copy reads on a scatter. */
size_t gpu_case_some_byte(const gpu_case_t *c, uint32_t i);

#endif
