/* kvk/layout.h -- how the bytes of a block lie, and how an engine's paged cache lies.
 *
 * Two descriptions, never mixed up:
 *   kvk_layout_t  the pool block: canonical, head-major [kv_head][layer][inner page]. Part of the space's identity.
 *   kvk_paged_t   an engine's own cache on this rank. Never part of the identity.
 */
#ifndef KVK_LAYOUT_H
#define KVK_LAYOUT_H

#include "kv/status.h"
#include "kv/types.h"

#define KVK_MAX_HEADS        1024u
#define KVK_MAX_LAYERS       1024u
#define KVK_MAX_BLOCK_TOKENS 4096u
#define KVK_MAX_DIM          8192u
#define KVK_MAX_BLOCK_BYTES  (1u << 30)
#define KVK_OPAQUE_LEAF      16384u /* leaf size of opaque pages */
#define KVK_LAYOUT_TEXT_MAX  512u   /* room for any text, with its NUL */
#define KVK_LAYOUTS_TEXT_MAX 1024u  /* the same of the text of several */

/* X(NAME, text, bytes of one element) */
#define KVK_DTYPE_LIST(X)                                                                                              \
	X(F32, "f32", 4)                                                                                               \
	X(F16, "f16", 2)                                                                                               \
	X(BF16, "bf16", 2) X(FP8_E4M3, "fp8_e4m3", 1) X(FP8_E5M2, "fp8_e5m2", 1) X(INT8, "int8", 1) X(BYTE, "byte", 1)
typedef enum kvk_dtype {
#define KVK_DTYPE_ENUM(NAME, text, bytes) KVK_DTYPE_##NAME,
	KVK_DTYPE_LIST(KVK_DTYPE_ENUM)
#undef KVK_DTYPE_ENUM
		KVK_DTYPE_COUNT
} kvk_dtype_t;

/* Bytes of one element of a known dtype. */
uint32_t kvk_dtype_bytes(kvk_dtype_t dtype);

/* Order inside one page = one (head, layer) of a block. */
typedef enum kvk_inner {
	KVK_INNER_SPLIT = 0,  /* K [token][k_dim], then V [token][v_dim]                               "split"  */
	KVK_INNER_PACKED = 1, /* [token][k_dim + v_dim]                                                 "packed" */
	KVK_INNER_OPAQUE = 2, /* page_bytes per layer as the engine has them; heads must be 1           "opaque" */
} kvk_inner_t;

/* Of the whole model, also where tensor parallel ranks write parts of a block. */
typedef struct kvk_layout {
	uint32_t heads; /* KV heads of the whole model, all ranks; MLA and opaque: 1        */
	uint32_t layers;
	uint32_t block_tokens;
	uint32_t k_dim; /* elements of K a token and head; opaque: 0                        */
	uint32_t v_dim; /* elements of V; MLA's latent: 0, and then `inner` is split        */
	kvk_dtype_t dtype;
	kvk_inner_t inner;
	uint32_t page_bytes; /* opaque only: bytes of one layer's page; else 0                   */
} kvk_layout_t;

/* Everything that follows from a valid layout. */
typedef struct kvk_geometry {
	uint32_t block_bytes; /* payload of one block: heads x layers x page_bytes                */
	uint32_t page_bytes;  /* one (head, layer)                                              */
	uint32_t heads;       /* digest roots a block                                           */
	uint32_t leaves;      /* digest leaves a head: layers; opaque: layers x pieces of a page */
	uint32_t leaf_bytes;  /* of every leaf; of opaque pages the last piece may be shorter     */
	uint32_t pieces;      /* leaves a layer: 1; opaque: ceil(page_bytes / KVK_OPAQUE_LEAF)    */
} kvk_geometry_t;

/* KV_ERR_LAYOUT: a field is out of range or the fields contradict each other; *p_why is a sentence (static; may be
 * NULL). */
kv_status_t kvk_layout_check(const kvk_layout_t *layout, const char **p_why);

/* Of a layout that has passed kvk_layout_check(). */
void kvk_layout_geometry(const kvk_layout_t *layout, kvk_geometry_t *geometry);

/* Byte offset and length in the block of leaf `leaf` of head `head`. */
void kvk_layout_leaf(const kvk_layout_t *layout, uint32_t head, uint32_t leaf, size_t *p_offset, size_t *p_len);

/* Canonical text, e.g. "kvk1 heads=8 layers=32 tokens=16 k=128 v=128 dtype=bf16 inner=split page=0". Exactly one
 * text per layout. */
kv_status_t kvk_layout_format(const kvk_layout_t *layout, char *out, size_t cap);
/* Accepts canonical text only, then checks the layout. */
kv_status_t kvk_layout_parse(const char *text, size_t len, kvk_layout_t *layout, const char **p_why);

/* The same of a space, whose groups have a layout each, in their order: one text if all are equal, else runs of equal
 * ones, each with its length, e.g. "2*kvk1 heads=8 ...;1*kvk1 heads=4 ...". TOO_BIG: longer than cap. */
kv_status_t kvk_layouts_format(const kvk_layout_t *layouts, uint32_t count, char *out, size_t cap);
/* Of `count` groups: layouts[count]. KV_ERR_LAYOUT: also of more or fewer groups. */
kv_status_t kvk_layouts_parse(const char *text, size_t len, kvk_layout_t *layouts, uint32_t count, const char **p_why);

/* Can blocks of `a` be permuted to `b`? Equal but for the inner order, neither opaque. */
int kvk_layout_convertible(const kvk_layout_t *a, const kvk_layout_t *b);

/* ---- an engine's paged cache on one rank ----------------------------------------------------- */

/* Order of one layer's block. What lies between blocks (other layers, K and V of them, padding) is base[] and
 * block_stride alone: layer by layer, or blocks outermost in one allocation of all layers, as (blocks, layers, 2,
 * tokens, heads, dim). */
typedef enum kvk_paged_kind {
	KVK_PAGED_KV_TOKEN_HEAD =
		0, /* [K|V][token][head][dim]    FlashAttention NHD of vLLM < 0.26, reference engine */
	KVK_PAGED_HEAD_TOKEN_KV = 1, /* [head][token][K and V]     HND of vLLM >= 0.26                               */
	KVK_PAGED_OPAQUE = 2,        /* [page bytes]               CPU attention, vendor formats                     */
	KVK_PAGED_TOKEN_HEAD_KV = 3, /* [token][head][K and V]     NHD of vLLM >= 0.26                               */
	KVK_PAGED_KV_HEAD_TOKEN = 4, /* [K|V][head][token][dim]    HND of vLLM 0.23 to 0.25                          */
	KVK_PAGED_HEAD_KV_TOKEN = 5, /* [head][K|V][token][dim]    HND of vLLM 0.23 to 0.25, all layers in one tensor */
	KVK_PAGED_KIND_COUNT
} kvk_paged_kind_t;

typedef struct kvk_paged {
	kvk_paged_kind_t kind;
	uint32_t blocks;       /* block ids are below this                                           */
	uint32_t layers;       /* layers held here (pipeline rank)                                    */
	uint32_t first_layer;  /* first of them in the model                                          */
	uint32_t heads;        /* heads held here (tensor rank)                                       */
	uint32_t first_head;   /* first of them in the model                                          */
	uint32_t block_tokens; /* as in the pool block                                                */
	uint32_t k_dim, v_dim;
	kvk_dtype_t dtype;
	uint32_t page_bytes; /* opaque: bytes of one layer's page                                   */
	void *const *base;   /* one pointer a layer; borrowed, alive as long as the description     */
	size_t block_stride; /* bytes from a block to the next in one layer; 0: packed               */
	size_t head_stride;  /* orders that begin with the head only: bytes from a head to the next; 0: packed. Other
				layers may lie between, as in (blocks, heads, layers, 2, tokens, dim), or all blocks,
				as in (layers, heads, blocks, tokens, 2 x dim) */
} kvk_paged_t;

/* Valid alone, and for this pool layout (heads, layers, dims and dtype agree). KV_ERR_LAYOUT with a sentence. */
kv_status_t kvk_paged_check(const kvk_paged_t *paged, const kvk_layout_t *layout, const char **p_why);

#endif
