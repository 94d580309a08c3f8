/* Gather and scatter on the CPU: for every (layer, head) held here, one fused copy-and-digest between a page of
 * the canonical block and the rows of the paged cache. Layer by layer, because a layer's pages lie together in the
 * paged cache. */
#include "kvk/move.h"

#include "layout/page.h"

#include "kv/digest.h"

#include <string.h>

typedef enum direction { GATHER, SCATTER } direction_t;

/* What stays the same over all moves of a call. */
typedef struct mover {
	const kvk_layout_t *layout;
	const kvk_paged_t *paged;
	kvk_geometry_t geometry;
	direction_t direction;
} mover_t;

/* A leaf as the fused copy wants it. */
typedef struct leaf {
	kv_copy_run_t runs[2];
	size_t count;
	kv_run_order_t order;
} leaf_t;

static kv_copy_run_t make_run(direction_t direction, uint8_t *page, kvk_row_t page_row, uint8_t *cache,
			      kvk_row_t cache_row)
{
	if (direction == GATHER) {
		return (kv_copy_run_t){.dst = page + page_row.offset,
				       .dst_stride = page_row.stride,
				       .src = cache + cache_row.offset,
				       .src_stride = cache_row.stride};
	}

	return (kv_copy_run_t){.dst = cache + cache_row.offset,
			       .dst_stride = cache_row.stride,
			       .src = page + page_row.offset,
			       .src_stride = page_row.stride};
}

/* Does b begin where a's piece ends, on both sides and for every token? */
static int are_adjacent(const kv_copy_run_t *a, const kv_copy_run_t *b)
{
	return (uint8_t *)b->dst == (uint8_t *)a->dst + a->piece && b->dst_stride == a->dst_stride &&
	       (const uint8_t *)b->src == (const uint8_t *)a->src + a->piece && b->src_stride == a->src_stride;
}

/* Fewer and larger pieces where both sides agree: same bytes, same order, same digest. */
static void join_runs(leaf_t *leaf)
{
	kv_copy_run_t *first = &leaf->runs[0];

	if (leaf->count == 2 && leaf->order == KV_RUNS_INTERLEAVED && are_adjacent(first, &leaf->runs[1])) {
		first->piece += leaf->runs[1].piece;
		leaf->count = 1;
	}
	for (size_t i = 0; i < leaf->count; i++) {
		kv_copy_run_t *run = &leaf->runs[i];

		if (run->dst_stride == run->piece && run->src_stride == run->piece) {
			run->piece *= run->pieces;
			run->pieces = 1;
		}
	}
}

/* K and V of local head `head`: the digest goes over the page in its canonical order, whichever side is read. */
static leaf_t plain_leaf(const mover_t *m, uint8_t *page, uint8_t *cache, uint32_t head)
{
	const kvk_rows_t page_rows = kvk_page_rows(m->layout);
	const kvk_rows_t cache_rows = kvk_paged_rows(m->paged, head);
	leaf_t leaf = {.count = m->layout->v_dim > 0 ? 2 : 1,
		       .order = m->layout->inner == KVK_INNER_PACKED ? KV_RUNS_INTERLEAVED : KV_RUNS_SEQUENTIAL};

	leaf.runs[0] = make_run(m->direction, page, page_rows.k, cache, cache_rows.k);
	leaf.runs[0].piece = kvk_k_bytes(m->layout);
	leaf.runs[0].pieces = m->layout->block_tokens;
	leaf.runs[1] = make_run(m->direction, page, page_rows.v, cache, cache_rows.v);
	leaf.runs[1].piece = kvk_v_bytes(m->layout);
	leaf.runs[1].pieces = m->layout->block_tokens;
	join_runs(&leaf);

	return leaf;
}

/* Piece `piece` of an opaque page. */
static leaf_t opaque_leaf(const mover_t *m, uint8_t *page, uint8_t *cache, uint32_t piece)
{
	const size_t at = (size_t)piece * KVK_OPAQUE_LEAF;
	const size_t left = m->geometry.page_bytes - at;
	const size_t n = left < KVK_OPAQUE_LEAF ? left : KVK_OPAQUE_LEAF;
	const kvk_row_t row = {at, n};
	leaf_t leaf = {.count = 1, .order = KV_RUNS_SEQUENTIAL};

	leaf.runs[0] = make_run(m->direction, page, row, cache, row);
	leaf.runs[0].piece = n;
	leaf.runs[0].pieces = 1;

	return leaf;
}

/* One page of a move: local layer and head. */
typedef struct page_pos {
	uint32_t layer;
	uint32_t head;
} page_pos_t;

/* Pages go in the order of the side that is read: a layer of the paged cache lies together, a head of a canonical
 * block does. */
static page_pos_t page_at(const mover_t *m, uint32_t index)
{
	if (m->direction == GATHER) {
		return (page_pos_t){index / m->paged->heads, index % m->paged->heads};
	}

	return (page_pos_t){index % m->paged->layers, index / m->paged->layers};
}

static uint8_t *canonical_page(const mover_t *m, const kvk_move_t *move, page_pos_t at)
{
	const kvk_paged_t *paged = m->paged;
	const size_t page = (size_t)(paged->first_head + at.head) * m->layout->layers + paged->first_layer + at.layer;

	return (uint8_t *)move->data + page * m->geometry.page_bytes;
}

/* What page `index` of a move reads, or a share as large. A gather by token reads a block's layer of the cache from end
 * to end, though not in order: the share of a head is as good as any. */
static const uint8_t *page_source(const mover_t *m, const kvk_move_t *move, uint32_t index)
{
	const page_pos_t at = page_at(m, index);

	if (m->direction == SCATTER) {
		return canonical_page(m, move, at);
	}

	return kvk_paged_block(m->paged, at.layer, move->block) + (size_t)at.head * m->geometry.page_bytes;
}

static leaf_t leaf_at(const mover_t *m, uint8_t *page, uint8_t *cache, uint32_t head, uint32_t piece)
{
	return m->layout->inner == KVK_INNER_OPAQUE ? opaque_leaf(m, page, cache, piece)
						    : plain_leaf(m, page, cache, head);
}

/* Move one page. Gather stores its digests; scatter compares: 0 when one is wrong. */
static int move_page(const mover_t *m, const kvk_move_t *move, page_pos_t at, const uint8_t *soon)
{
	const uint32_t pieces = m->geometry.pieces;
	uint8_t *page = canonical_page(m, move, at);
	uint8_t *cache = kvk_paged_block(m->paged, at.layer, move->block);
	uint64_t *digests =
		move->leaves ? move->leaves + ((size_t)at.head * m->paged->layers + at.layer) * pieces : NULL;
	int right = 1;

	for (uint32_t i = 0; i < pieces; i++) {
		const leaf_t leaf = leaf_at(m, page, cache, at.head, i);
		const uint8_t *next = soon ? soon + (size_t)i * m->geometry.leaf_bytes : NULL;
		const uint64_t digest = kv_copy_digest_runs(leaf.runs, leaf.count, leaf.order, next);

		if (digests && m->direction == GATHER) {
			digests[i] = digest;
		}
		right = right && (!digests || digests[i] == digest);
	}

	return right;
}

/* All pages of one move, which `more` moves follow in the array. While a page moves, the next one is fetched; a gather
 * by token fetches the next layer, because the pieces of a head are strewn over all of its layer. */
static int move_block(const mover_t *m, const kvk_move_t *move, uint32_t more)
{
	const uint32_t pages = m->paged->layers * m->paged->heads;
	const int strewn = m->paged->kind == KVK_PAGED_KV_TOKEN_HEAD || m->paged->kind == KVK_PAGED_TOKEN_HEAD_KV;
	const int by_token = m->direction == GATHER && strewn;
	const uint32_t ahead = by_token ? m->paged->heads : 1;
	int right = 1;

	for (uint32_t i = 0; i < pages; i++) {
		const uint8_t *soon = NULL;

		if (i + ahead < pages) {
			soon = page_source(m, move, i + ahead);
		} else if (more > 0) {
			soon = page_source(m, move + 1, i + ahead - pages);
		}
		right = move_page(m, move, page_at(m, i), soon) && right;
	}

	return right;
}

/* Zeros where a corrupt block was scattered to. An engine that computes on the CPU multiplies what it masks by zero, so
 * that a NaN left in rows that are not written yet would reach the answer of the request that is given the block next.
 */
static void clear_block(const mover_t *m, const kvk_move_t *move)
{
	for (uint32_t i = 0; i < m->paged->layers * m->paged->heads * m->geometry.pieces; i++) {
		const page_pos_t at = page_at(m, i / m->geometry.pieces);
		const leaf_t leaf =
			leaf_at(m, canonical_page(m, move, at), kvk_paged_block(m->paged, at.layer, move->block),
				at.head, i % m->geometry.pieces);

		for (size_t r = 0; r < leaf.count; r++) {
			const kv_copy_run_t *run = &leaf.runs[r];

			for (size_t p = 0; p < run->pieces; p++) {
				memset((uint8_t *)run->dst + p * run->dst_stride, 0, run->piece);
			}
		}
	}
}

static mover_t make_mover(const kvk_layout_t *layout, const kvk_paged_t *paged, direction_t direction)
{
	mover_t m = {.layout = layout, .paged = paged, .direction = direction};

	kvk_layout_geometry(layout, &m.geometry);

	return m;
}

static int ids_in_range(const kvk_paged_t *paged, const kvk_move_t *moves, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++) {
		if (moves[i].block >= paged->blocks) {
			return 0;
		}
	}

	return 1;
}

kv_status_t kvk_gather(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves, uint32_t count)
{
	const mover_t m = make_mover(layout, paged, GATHER);

	if (!ids_in_range(paged, moves, count)) {
		return KV_ERR_ARG;
	}
	for (uint32_t i = 0; i < count; i++) {
		move_block(&m, &moves[i], count - 1 - i);
	}
	kv_copy_fence();

	return KV_OK;
}

kv_status_t kvk_scatter(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves, uint32_t count,
			uint32_t *p_bad)
{
	const mover_t m = make_mover(layout, paged, SCATTER);
	kv_status_t status = KV_OK;

	if (!ids_in_range(paged, moves, count)) {
		return KV_ERR_ARG;
	}
	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		if (!move_block(&m, &moves[i], count - 1 - i)) {
			status = KV_ERR_CORRUPT;
			kv_copy_fence(); /* the copy may be on its way past the caches */
			clear_block(&m, &moves[i]);
			if (p_bad) {
				*p_bad = i;
			}
		}
	}
	kv_copy_fence();

	return status;
}
