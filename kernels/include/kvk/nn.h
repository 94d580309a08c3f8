/* kvk/nn.h -- the operations of a transformer's layer that a GPU computes in BF16: what each takes, and what it makes.
 *
 * A kvk_nn_t runs them: kvk_nn_gpu_open() by kernels on a stream, kvk_nn_twin_open() in host memory, at once. The twin
 * is the specification: same arguments, same places at which values are rounded to BF16. Sums are fp32, in the order of
 * their index in the twin, in the order of the device's matrix instructions on a GPU: so the two agree closely and not
 * bit for bit. **A row's bits depend on that row's inputs alone**, on either: not on the rows beside it, nor on how
 * many there are.
 *
 * Pointers are the device's on a GPU. Rows of matrices begin at multiples of 16 bytes. All is borrowed until what was
 * enqueued has ended.
 */
#ifndef KVK_NN_H
#define KVK_NN_H

#include "kv/status.h"
#include "kvk/bf16.h"
#include "kvk/ep.h"
#include "kvk/gpu.h"

#define KVK_NN_PANEL 128u /* rows of a panel of weights */
#define KVK_NN_DEPTH 64u  /* inputs of a tile of weights */

typedef struct kvk_nn kvk_nn_t;

/* ---- weights --------------------------------------------------------------------------------- */

/* Weights of a product lie in tiles, in the order in which a kernel copies them: matrix [n outputs][k inputs] is
 * [panel: n / 128, rounded up][tile: k / 64][128 outputs][64 inputs], BF16; outputs beyond n are zero. In a tile the
 * eight pieces of 16 bytes of output r are permuted: piece c lies at place c ^ (r % 8). Matrices of groups follow each
 * other. With KVK_NN_SWIGLU a panel has 64 gates, then the 64 rows of `up` that belong to them. */
static inline size_t kvk_nn_weight_at(uint32_t k, uint32_t output, uint32_t input)
{
	const size_t tile = (size_t)(output / KVK_NN_PANEL) * (k / KVK_NN_DEPTH) + input / KVK_NN_DEPTH;
	const uint32_t r = output % KVK_NN_PANEL, c = input % KVK_NN_DEPTH;

	return (tile * KVK_NN_PANEL + r) * KVK_NN_DEPTH + (size_t)((c / 8u) ^ (r % 8u)) * 8u + c % 8u;
}

/* Elements of one matrix. */
static inline size_t kvk_nn_weight_count(uint32_t k, uint32_t n)
{
	return (size_t)((n + KVK_NN_PANEL - 1u) / KVK_NN_PANEL) * KVK_NN_PANEL * k;
}

/* Values drawn by a counter: the value number i is middle + width * u(seed + (i + 1) * 0x9e3779b97f4a7c15), u as in
 * engine/weights.c, rounded to BF16 or left in fp32. */
typedef enum kvk_nn_order {
	KVK_NN_ROW_F32, /* [n] fp32, value first + i                                                               */
	KVK_NN_ROWS,    /* [n][k] BF16, value first + output * k + input: an embedding                               */
	KVK_NN_TILES,   /* tiles; output o, input i is value first + (o / 16 * k + i) * 16 + o % 16                  */
	KVK_NN_GATES,   /* tiles; the 64 gates of each panel of a SwiGLU's weights: n gates                          */
	KVK_NN_UPS,     /* tiles; the other halves of its panels: n of them                                          */
} kvk_nn_order_t;

typedef struct kvk_nn_draw {
	uint64_t seed, first;
	float middle, width;
	uint32_t k, n; /* k: a multiple of 64 in tiles; n: of 16, with gates and ups of 64 */
	kvk_nn_order_t order;
	void *to; /* the matrix; of tiles all panels are written but what gates leave to ups, and ups to gates */
} kvk_nn_draw_t;

/* ---- products -------------------------------------------------------------------------------- */

typedef enum kvk_nn_out {
	KVK_NN_BF16,   /* y = BF16(x w)                                                                         */
	KVK_NN_F32,    /* y = x w, fp32                                                                         */
	KVK_NN_ADD,    /* y += x w, fp32                                                                        */
	KVK_NN_SWIGLU, /* y = BF16(g / (1 + e^-g) * u) [rows][n / 2], g and u fp32: products of gates and of ups */
} kvk_nn_out_t;

/* y[row][n] = x[row][k] w: of one matrix, or each row by the matrix of its group. */
typedef struct kvk_nn_product {
	uint32_t k; /* a multiple of 64 */
	uint32_t n; /* outputs, a multiple of 16; of SWIGLU gates and ups together, a multiple of 128 */
	uint32_t groups;
	uint32_t max_rows; /* rows of all groups, at most */
	const uint32_t
		*first;      /* [groups + 1]: rows first[g] to first[g + 1] are group g's; NULL: group 0 has max_rows */
	const kvk_bf16_t *x; /* [rows][k]; NULL: row i is row record[i] of what has come */
	const kvk_bf16_t *w; /* tiles of all groups */
	void *y;
	/* What has come from other ranks: kvk_ep_rows_t, kvk_ep_gpu_rows_t. */
	const uint32_t *record;
	const kvk_bf16_t *rows, *own;
	uint32_t own_first, own_count; /* records own_first to own_first + own_count are own rows */
	kvk_nn_out_t out;
} kvk_nn_product_t;

/* ---- attention ------------------------------------------------------------------------------- */

/* Shape of what follows: query heads, KV heads and the cache [block][K|V][token][kv_head][head_dim], BF16. */
typedef struct kvk_nn_heads {
	uint32_t heads, kv_heads; /* heads: 1, 2, 4, 8 or 16 times kv_heads */
	uint32_t head_dim;        /* 64 or 128 */
	uint32_t block_tokens;    /* a multiple of 16 */
} kvk_nn_heads_t;

/* Where a row stands. */
typedef struct kvk_nn_row {
	uint32_t sequence; /* of the batch: which row of the table of blocks */
	uint32_t position;
} kvk_nn_row_t;

/* Norm of the heads, rotation, and keys and values to the cache. All sums and products fp32:
 *   q, k: each head normed (x / sqrt(mean of x^2 + eps) * gain) if there is a gain; then rotated by the row's position,
 *   pairs i and i + head_dim / 2, as kve_rope() does; then BF16
 *   q to q_out; k and v to the cache */
typedef struct kvk_nn_qkv {
	kvk_nn_heads_t shape;
	uint32_t rows;
	const kvk_bf16_t *qkv;        /* [rows][heads + 2 kv_heads][head_dim]: queries, keys, values */
	const float *q_gain, *k_gain; /* [head_dim]; NULL: not normed */
	const float *rotation;        /* [positions][head_dim / 2][cos, sin] */
	const kvk_nn_row_t *places;   /* [rows] */
	const uint32_t *blocks;       /* [sequences][max_blocks] */
	uint32_t max_blocks;
	float eps;
	kvk_bf16_t *q_out; /* [rows][heads][head_dim] */
	kvk_bf16_t *cache; /* of this layer */
} kvk_nn_qkv_t;

/* Rows that follow each other in one sequence. */
typedef struct kvk_nn_tile {
	uint32_t row, rows;          /* rows: 1 to kvk_nn_tile_rows() */
	uint32_t sequence, position; /* of its first row */
} kvk_nn_tile_t;

/* Rows of a tile of attention at most; virtual ones, of query heads that share a KV head, are KVK_NN_TILE_ROWS. */
#define KVK_NN_TILE_ROWS 128u

static inline uint32_t kvk_nn_tile_rows(const kvk_nn_heads_t *shape)
{
	return KVK_NN_TILE_ROWS * shape->kv_heads / shape->heads;
}

/* out = softmax(q K / sqrt(head_dim)) V over the positions up to the row's own, which are in the cache. 64 keys at a
 * time from position 0 on, one after another: scores fp32, a running maximum, e^(s - maximum) rounded to BF16 before it
 * weighs values, sums fp32; divided once, then BF16. */
typedef struct kvk_nn_attention {
	kvk_nn_heads_t shape;
	uint32_t tiles;
	const kvk_nn_tile_t *tile; /* [tiles]; those with most keys first */
	const uint32_t *blocks;    /* [sequences][max_blocks] */
	uint32_t max_blocks;
	uint32_t most_rows;      /* of a tile, at most: few have a faster kernel; 0: as many as may be */
	const kvk_bf16_t *q;     /* [rows][heads][head_dim] */
	const kvk_bf16_t *cache; /* of this layer */
	kvk_bf16_t *out;         /* [rows][heads][head_dim] */
} kvk_nn_attention_t;

/* ---- what is left ---------------------------------------------------------------------------- */

/* x = embedding of each token, fp32. */
typedef struct kvk_nn_embed {
	uint32_t rows, hidden; /* hidden: a multiple of 8, also below */
	const uint32_t *tokens;
	const kvk_bf16_t *table; /* [vocab][hidden] */
	float *x;                /* [rows][hidden] */
} kvk_nn_embed_t;

/* x += added, if there is any; y = BF16(x / sqrt(mean of x^2 + eps) * gain), unless y is NULL. */
typedef struct kvk_nn_norm {
	uint32_t rows, hidden;
	float *x;                /* [rows][hidden] */
	const kvk_bf16_t *added; /* [rows][hidden] or NULL */
	const float *gain;
	const uint32_t *pick; /* NULL; else y's row i is of x's row pick[i], and nothing may be added */
	float eps;
	kvk_bf16_t *y;
} kvk_nn_norm_t;

/* Experts of each row: as kve_route() chooses them; e^x need not be its bits. */
typedef struct kvk_nn_route {
	uint32_t rows, experts, top_k; /* experts: a multiple of 16, at most 1,024; top_k: at most 16 */
	uint32_t norm_top_k;
	const float *logits; /* [rows][experts] */
	uint32_t *ids;       /* [rows][top_k] */
	float *weights;      /* [rows][top_k] */
} kvk_nn_route_t;

/* The largest logit of each row, the lowest index of equals. */
typedef struct kvk_nn_choose {
	uint32_t rows, vocab;
	const float *logits; /* [rows][vocab] */
	uint32_t *ids;       /* [rows] */
} kvk_nn_choose_t;

/* ---- running --------------------------------------------------------------------------------- */

/* Kernels on `gpu`, which is borrowed. sms: SMs that kernels may take for what is theirs alone (persistent grids); 0:
 * all. KV_ERR_UNSUPPORTED: no kernels in this build, or a device before sm_90 (kvk_gpu_last_error()); KV_ERR_NOMEM. */
kv_status_t kvk_nn_gpu_open(kvk_gpu_t *gpu, uint32_t sms, kvk_nn_t **p_nn);
/* The same in host memory; streams are ignored. KV_ERR_NOMEM. */
kv_status_t kvk_nn_twin_open(kvk_nn_t **p_nn);
/* All that was enqueued must have ended. NULL is nothing. */
void kvk_nn_close(kvk_nn_t *nn);

/* Enqueue one. rows, tiles or max_rows of 0: nothing. KV_ERR_ARG: a shape that is not as above; KV_ERR_IO: the driver
 * refuses. */
kv_status_t kvk_nn_draw(kvk_nn_t *nn, const kvk_nn_draw_t *draw, kvk_cu_stream_t stream);
kv_status_t kvk_nn_product(kvk_nn_t *nn, const kvk_nn_product_t *product, kvk_cu_stream_t stream);
kv_status_t kvk_nn_qkv(kvk_nn_t *nn, const kvk_nn_qkv_t *qkv, kvk_cu_stream_t stream);
kv_status_t kvk_nn_attention(kvk_nn_t *nn, const kvk_nn_attention_t *attention, kvk_cu_stream_t stream);
kv_status_t kvk_nn_embed(kvk_nn_t *nn, const kvk_nn_embed_t *embed, kvk_cu_stream_t stream);
kv_status_t kvk_nn_norm(kvk_nn_t *nn, const kvk_nn_norm_t *norm, kvk_cu_stream_t stream);
kv_status_t kvk_nn_route(kvk_nn_t *nn, const kvk_nn_route_t *route, kvk_cu_stream_t stream);
kv_status_t kvk_nn_choose(kvk_nn_t *nn, const kvk_nn_choose_t *choose, kvk_cu_stream_t stream);

#endif
