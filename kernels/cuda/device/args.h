/* kernels/cuda/device/args.h -- what a kernel gets: the one description shared by the host and the device code. Plain
 * numbers; addresses are the device's. */
#ifndef KVK_CUDA_DEVICE_ARGS_H
#define KVK_CUDA_DEVICE_ARGS_H

#include <stdint.h>

/* One move. */
typedef struct kvk_gpu_move {
	uint64_t pool;  /* the canonical block, or its staged copy */
	uint64_t block; /* in the paged cache */
} kvk_gpu_move_t;

/* K or V of one page: `tokens` pieces of `bytes`, where they lie on both sides. bytes 0: there is no such row. */
typedef struct kvk_gpu_row {
	uint64_t pool_offset, pool_stride;   /* from the page's start */
	uint64_t cache_offset, cache_stride; /* from the block's start in its layer, of local head 0 */
	uint64_t cache_head;                 /* from a head to the next */
	uint64_t bytes;
} kvk_gpu_row_t;

/* A leaf is a page (K then V, or interleaved when the page is packed), or a piece of an opaque page. All moves x heads
 * x layers x pieces are independent:
 * unit u = ((move x heads + head) x layers + layer) x pieces + piece. */
typedef struct kvk_gpu_args {
	uint64_t moves;  /* const kvk_gpu_move_t[count] */
	uint64_t bases;  /* const uint64_t[]: address of each layer the cache holds */
	uint64_t leaves; /* uint64_t[count][heads][cache_layers][pieces]: gather: written; scatter: expected; 0: none */
	uint64_t bad;    /* uint32_t[count]: a scatter stores 1 for a move with a wrong leaf; 0: none */
	uint64_t cache_stride; /* from a block to the next in one layer */
	uint64_t page_bytes;
	uint64_t pool_head;  /* bytes from a head to the next in the pool block: page_bytes x layers of the model */
	uint64_t pool_first; /* of local head 0, layer 0 of the cache, from the pool block's start */
	uint32_t count, heads, layers, pieces;
	uint32_t layer;        /* first of the range, within the cache's */
	uint32_t cache_layers; /* of the cache: row length of leaves */
	uint32_t tokens;       /* pieces of a row; opaque: 1 */
	uint32_t leaf_bytes;   /* of every leaf, but an opaque page's last */
	uint32_t interleaved;  /* digest order: 0 all of K, then all of V; 1 K and V of a token, then the next */
	uint32_t opaque;
	uint32_t ahead; /* bulk scatter: chunks of a warp on their way at a time; 0: one a stage */
	kvk_gpu_row_t k, v;
} kvk_gpu_args_t;

/* Memory to digest: a piece of a range (kvk/digest_range.h). */
typedef struct kvk_gpu_piece {
	uint64_t at;
	uint64_t bytes; /* 1 to KVK_GPU_PIECE */
} kvk_gpu_piece_t;

typedef struct kvk_gpu_digest_args {
	uint64_t pieces;  /* const kvk_gpu_piece_t[count] */
	uint64_t digests; /* uint64_t[count]: written */
	uint32_t count;
} kvk_gpu_digest_args_t;
#define KVK_GPU_PIECE     16384u
#define KVK_GPU_PIECE_PAD 256u

/* Names of the kernels in the image. The copies' get (kvk_gpu_args_t by value), any grid, block of KVK_GPU_THREADS. The
 * bulk ones need sm_90, every address, stride and length on the way a multiple of 16, and KVK_GPU_SHARED bytes of
 * dynamic shared memory; the plain ones need neither. */
#ifndef KVK_GPU_THREADS
#define KVK_GPU_THREADS 256
#endif
#define KVK_GPU_SHARED        (200 << 10)
#define KVK_GPU_GATHER_BULK   "kvk_gather_bulk"
#define KVK_GPU_SCATTER_BULK  "kvk_scatter_bulk"
#define KVK_GPU_GATHER_PLAIN  "kvk_gather_plain"
#define KVK_GPU_SCATTER_PLAIN "kvk_scatter_plain"
/* (kvk_gpu_digest_args_t by value); grid and block as the plain ones. */
#define KVK_GPU_DIGEST_PIECES "kvk_digest_pieces"

#endif
