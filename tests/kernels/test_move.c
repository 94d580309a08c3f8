/* Gather, scatter and block digests, compared with a reference that moves one element at a time from the
 * words of the headers alone. */
#include "draw.h"
#include "kv_cmocka.h"

#include "kvk/move.h"

#include <xxhash.h>

#define MAX_RANKS 4u
#define BLOCKS    5u
#define CANARY    0xa7

/* ---- reference ------------------------------------------------------------------------------- */

/* Offset in a canonical block of element `d` of K (half 0) or V (half 1). Head and layer count in the model. */
static size_t canonical_at(const kvk_layout_t *l, uint32_t head, uint32_t layer, uint32_t token, uint32_t half,
			   uint32_t d)
{
	const size_t page_elements = (size_t)l->block_tokens * (l->k_dim + l->v_dim);
	const size_t page = ((size_t)head * l->layers + layer) * page_elements;
	size_t in_page;

	if (l->inner == KVK_INNER_PACKED) {
		in_page = (size_t)token * (l->k_dim + l->v_dim) + (half ? l->k_dim : 0) + d;
	} else if (half == 0) {
		in_page = (size_t)token * l->k_dim + d;
	} else {
		in_page = (size_t)l->block_tokens * l->k_dim + (size_t)token * l->v_dim + d;
	}

	return (page + in_page) * kvk_dtype_bytes(l->dtype);
}

/* Offset in one layer's block of the paged cache. Head counts on this rank. */
static size_t paged_at(const kvk_paged_t *p, uint32_t head, uint32_t token, uint32_t half, uint32_t d)
{
	const size_t dim = half ? p->v_dim : p->k_dim;
	const size_t both = p->k_dim + p->v_dim;
	const size_t in_both = half ? p->k_dim : 0;
	const size_t skipped = half ? (size_t)p->block_tokens * p->heads * p->k_dim : 0;
	size_t at = 0;

	switch (p->kind) {
	case KVK_PAGED_KV_TOKEN_HEAD:
		at = skipped + ((size_t)token * p->heads + head) * dim + d;
		break;
	case KVK_PAGED_KV_HEAD_TOKEN:
		at = skipped + ((size_t)head * p->block_tokens + token) * dim + d;
		break;
	case KVK_PAGED_TOKEN_HEAD_KV:
		at = ((size_t)token * p->heads + head) * both + in_both + d;
		break;
	case KVK_PAGED_HEAD_TOKEN_KV:
		at = ((size_t)head * p->block_tokens + token) * both + in_both + d;
		break;
	case KVK_PAGED_HEAD_KV_TOKEN:
		at = (size_t)head * p->block_tokens * both + (half ? (size_t)p->block_tokens * p->k_dim : 0) +
		     token * dim + d;
		break;
	case KVK_PAGED_OPAQUE:
	case KVK_PAGED_KIND_COUNT:
		fail_msg("opaque pages have no elements");
	}
	if (p->head_stride) {
		const size_t packed = p->block_tokens * both * kvk_dtype_bytes(p->dtype);

		return at * kvk_dtype_bytes(p->dtype) + head * (p->head_stride - packed);
	}

	return at * kvk_dtype_bytes(p->dtype);
}

static size_t paged_bytes(const kvk_paged_t *p)
{
	return p->kind == KVK_PAGED_OPAQUE
		       ? p->page_bytes
		       : (size_t)p->heads * p->block_tokens * (p->k_dim + p->v_dim) * kvk_dtype_bytes(p->dtype);
}

static uint8_t *paged_block(const kvk_paged_t *p, uint32_t layer, uint32_t block)
{
	return (uint8_t *)p->base[layer] + block * (p->block_stride ? p->block_stride : paged_bytes(p));
}

static void reference_gather(const kvk_layout_t *l, const kvk_paged_t *p, uint32_t block, uint8_t *data)
{
	const size_t e = kvk_dtype_bytes(l->dtype);

	for (uint32_t layer = 0; layer < p->layers; layer++) {
		const uint8_t *from = paged_block(p, layer, block);

		if (p->kind == KVK_PAGED_OPAQUE) {
			memcpy(data + (size_t)(p->first_layer + layer) * p->page_bytes, from, p->page_bytes);
			continue;
		}
		for (uint32_t head = 0; head < p->heads; head++) {
			for (uint32_t i = 0; i < l->block_tokens * (l->k_dim + l->v_dim); i++) {
				const uint32_t token = i / (l->k_dim + l->v_dim);
				const uint32_t in_token = i % (l->k_dim + l->v_dim);
				const uint32_t half = in_token >= l->k_dim;
				const uint32_t d = half ? in_token - l->k_dim : in_token;

				memcpy(data + canonical_at(l, p->first_head + head, p->first_layer + layer, token, half,
							   d),
				       from + paged_at(p, head, token, half, d), e);
			}
		}
	}
}

/* ---- a model split over ranks ---------------------------------------------------------------- */

typedef struct rank {
	kvk_paged_t paged;
	void *base[8];
	uint8_t *memory;
	size_t bytes;
} rank_t;

typedef struct model {
	kvk_layout_t layout;
	kvk_geometry_t g;
	rank_t ranks[MAX_RANKS];
	uint32_t rank_count;
} model_t;

static void make_rank(kv_test_rng_t *rng, const kvk_layout_t *l, kvk_paged_kind_t kind, rank_t *r)
{
	kvk_paged_t *p = &r->paged;
	const int beside = kv_test_below(rng, 3) == 0; /* blocks outermost: all layers of a block lie together */
	size_t stride, layer_step;

	p->kind = kind;
	p->blocks = BLOCKS;
	p->block_tokens = l->block_tokens;
	p->k_dim = l->k_dim;
	p->v_dim = l->v_dim;
	p->dtype = l->dtype;
	p->page_bytes = l->page_bytes;
	p->base = r->base;
	stride = paged_bytes(p) + kv_test_below(rng, 3) * 64;
	p->block_stride = stride == paged_bytes(p) && kv_test_below(rng, 2) ? 0 : stride;
	r->bytes = stride * BLOCKS * p->layers;
	layer_step = stride * BLOCKS;
	if (beside) {
		layer_step = stride;
		p->block_stride = stride * p->layers;
	}
	if ((kind == KVK_PAGED_HEAD_TOKEN_KV || kind == KVK_PAGED_HEAD_KV_TOKEN) && kv_test_below(rng, 2)) {
		layer_step = draw_heads_apart(rng, p, paged_bytes(p) / p->heads + kv_test_below(rng, 3) * 32);
		r->bytes += (size_t)BLOCKS * p->layers * p->heads * 64;
	}
	r->memory = malloc(r->bytes);
	assert_non_null(r->memory);
	kv_test_fill(rng, r->memory, r->bytes);
	for (uint32_t layer = 0; layer < p->layers; layer++) {
		r->base[layer] = r->memory + layer * layer_step;
	}
	assert_int_equal(kvk_paged_check(p, l, NULL), KV_OK);
}

/* Cut heads in two and layers in two, where there is more than one of them; each rank may have an order of its own. */
static void make_model(kv_test_rng_t *rng, kvk_paged_kind_t kind, model_t *m)
{
	static const kvk_paged_kind_t plain[] = {KVK_PAGED_KV_TOKEN_HEAD, KVK_PAGED_HEAD_TOKEN_KV,
						 KVK_PAGED_TOKEN_HEAD_KV, KVK_PAGED_KV_HEAD_TOKEN,
						 KVK_PAGED_HEAD_KV_TOKEN};

	memset(m, 0, sizeof *m);
	m->layout = draw_layout(rng, kind);
	kvk_layout_geometry(&m->layout, &m->g);
	assert_int_equal(kvk_layout_check(&m->layout, NULL), KV_OK);

	const uint32_t head_cut = m->layout.heads > 1 ? (uint32_t)kv_test_below(rng, m->layout.heads - 1) + 1 : 0;
	const uint32_t layer_cut = m->layout.layers > 1 ? (uint32_t)kv_test_below(rng, m->layout.layers - 1) + 1 : 0;

	for (uint32_t i = 0; i < 4; i++) {
		rank_t *r = &m->ranks[m->rank_count];

		r->paged.first_head = i & 1 ? head_cut : 0;
		r->paged.heads = i & 1 || head_cut == 0 ? m->layout.heads - r->paged.first_head : head_cut;
		r->paged.first_layer = i & 2 ? layer_cut : 0;
		r->paged.layers = i & 2 || layer_cut == 0 ? m->layout.layers - r->paged.first_layer : layer_cut;
		if ((i & 1 && head_cut == 0) || (i & 2 && layer_cut == 0)) {
			continue;
		}
		make_rank(rng, &m->layout,
			  kind == KVK_PAGED_OPAQUE ? kind : plain[kv_test_below(rng, KV_COUNT_OF(plain))], r);
		m->rank_count++;
	}
}

static void free_model(model_t *m)
{
	for (uint32_t i = 0; i < m->rank_count; i++) {
		free(m->ranks[i].memory);
	}
}

static size_t rank_leaves(const model_t *m, const rank_t *r)
{
	return (size_t)r->paged.heads * r->paged.layers * m->g.pieces;
}

/* Digest of local (head, leaf) as block digests have it. */
static uint64_t block_leaf(const model_t *m, const rank_t *r, const uint64_t *leaves, size_t local)
{
	const size_t per_head = (size_t)r->paged.layers * m->g.pieces;
	const size_t head = r->paged.first_head + local / per_head;

	return leaves[head * m->g.leaves + (size_t)r->paged.first_layer * m->g.pieces + local % per_head];
}

static void *alloc_with_canary(size_t n)
{
	void *p = aligned_alloc(64, (n + 63) / 64 * 64 + 64);

	assert_non_null(p);
	memset(p, CANARY, n + 1);

	return p;
}

/* ---- tests ----------------------------------------------------------------------------------- */

static void forget(const kvk_paged_t *p, uint32_t layer, uint32_t block)
{
	const uint32_t heads = p->head_stride ? p->heads : 1;

	for (uint32_t head = 0; head < heads; head++) {
		memset(paged_block(p, layer, block) + head * p->head_stride, 0, paged_bytes(p) / heads);
	}
}

static void check_model(kv_test_rng_t *rng, kvk_paged_kind_t kind)
{
	model_t m;

	make_model(rng, kind, &m);

	uint8_t *block = alloc_with_canary(m.g.block_bytes);
	uint8_t *expected = alloc_with_canary(m.g.block_bytes);
	uint64_t *leaves = alloc_with_canary((size_t)m.g.heads * m.g.leaves * sizeof *leaves);
	uint64_t *roots = alloc_with_canary(m.g.heads * sizeof *roots);
	uint64_t *all = alloc_with_canary((size_t)m.g.heads * m.g.leaves * sizeof *all);
	const uint32_t id = (uint32_t)kv_test_below(rng, BLOCKS);

	/* Each rank gathers its own ranges and touches no other's. */
	for (uint32_t i = 0; i < m.rank_count; i++) {
		const rank_t *r = &m.ranks[i];
		const kvk_move_t move = {.block = id, .data = block, .leaves = leaves};

		reference_gather(&m.layout, &r->paged, id, expected);
		assert_int_equal(kvk_gather(&m.layout, &r->paged, &move, 1), KV_OK);
		assert_memory_equal(block, expected, m.g.block_bytes + 1);
	}

	/* Their digests are those of the whole block. */
	kvk_digest_block(&m.layout, block, all, roots);
	for (uint32_t i = 0; i < m.rank_count; i++) {
		rank_t *r = &m.ranks[i];
		kvk_move_t move = {.block = id, .data = block, .leaves = leaves};
		uint8_t *before = alloc_with_canary(r->bytes);
		uint32_t bad = 99;

		assert_int_equal(kvk_gather(&m.layout, &r->paged, &move, 1), KV_OK);
		for (size_t k = 0; k < rank_leaves(&m, r); k++) {
			assert_int_equal(leaves[k], block_leaf(&m, r, all, k));
		}

		/* Scatter after gather puts every byte back where it was, in a cache that has lost them. */
		memcpy(before, r->memory, r->bytes);
		for (uint32_t layer = 0; layer < r->paged.layers; layer++) {
			forget(&r->paged, layer, id);
		}
		assert_int_equal(kvk_scatter(&m.layout, &r->paged, &move, 1, &bad), KV_OK);
		assert_memory_equal(r->memory, before, r->bytes);
		assert_int_equal(bad, 99);
		free(before);
	}

	free(block);
	free(expected);
	free(leaves);
	free(roots);
	free(all);
	free_model(&m);
}

KV_TEST(p1_gather_and_scatter_do_what_the_words_say)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 300; round++) {
		check_model(&rng, KVK_PAGED_KV_TOKEN_HEAD);
	}
	for (int round = 0; round < 30; round++) {
		check_model(&rng, KVK_PAGED_OPAQUE);
	}
}

/* What the rank has of this block is zeros. */
static void expect_cleared(const model_t *m, const rank_t *r, uint32_t block)
{
	uint8_t *data = alloc_with_canary(m->g.block_bytes);
	const kvk_move_t move = {.block = block, .data = data};

	memset(data, 0, m->g.block_bytes);
	for (uint32_t h = 0; h < r->paged.heads; h++) {
		memset(data + ((size_t)(r->paged.first_head + h) * m->layout.layers + r->paged.first_layer) *
				       m->g.page_bytes,
		       0xff, (size_t)r->paged.layers * m->g.page_bytes);
	}
	assert_int_equal(kvk_gather(&m->layout, &r->paged, &move, 1), KV_OK);
	for (size_t i = 0; i < m->g.block_bytes; i++) {
		assert_int_equal(data[i], 0);
	}
	free(data);
}

KV_TEST(p1_a_flipped_bit_is_refused_and_leaves_zeros)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 60; round++) {
		model_t m;

		make_model(&rng, round % 4 ? KVK_PAGED_KV_TOKEN_HEAD : KVK_PAGED_OPAQUE, &m);

		rank_t *r = &m.ranks[0];
		uint8_t *blocks = alloc_with_canary((size_t)3 * m.g.block_bytes);
		uint64_t *leaves = alloc_with_canary(3 * rank_leaves(&m, r) * sizeof *leaves);
		const uint32_t broken = (uint32_t)kv_test_below(&rng, 3);
		const size_t page =
			(size_t)(r->paged.first_head * m.layout.layers + r->paged.first_layer) * m.g.page_bytes;
		const size_t at = broken * (size_t)m.g.block_bytes + page + kv_test_below(&rng, m.g.page_bytes);
		kvk_move_t moves[3];
		uint32_t bad = 99;

		for (uint32_t i = 0; i < 3; i++) {
			moves[i] = (kvk_move_t){.block = i,
						.data = blocks + (size_t)i * m.g.block_bytes,
						.leaves = leaves + i * rank_leaves(&m, r)};
		}
		assert_int_equal(kvk_gather(&m.layout, &r->paged, moves, 3), KV_OK);
		assert_int_equal(kvk_scatter(&m.layout, &r->paged, moves, 3, NULL), KV_OK);
		blocks[at] ^= (uint8_t)(1u << kv_test_below(&rng, 8));
		assert_int_equal(kvk_scatter(&m.layout, &r->paged, moves, 3, &bad), KV_ERR_CORRUPT);
		assert_int_equal(bad, broken);
		expect_cleared(&m, r, broken);

		/* Without expected digests nothing is verified; with a wrong expectation everything is refused. */
		moves[broken].leaves = NULL;
		assert_int_equal(kvk_scatter(&m.layout, &r->paged, moves, 3, &bad), KV_OK);
		leaves[rank_leaves(&m, r) - 1] ^= 1;
		moves[0].leaves = leaves;
		assert_int_equal(kvk_scatter(&m.layout, &r->paged, moves, 1, NULL), KV_ERR_CORRUPT);

		free(blocks);
		free(leaves);
		free_model(&m);
	}
}

KV_TEST(p10_a_block_id_out_of_range_moves_nothing)
{
	kv_test_rng_t rng = {kv_test_seed()};
	model_t m;

	make_model(&rng, KVK_PAGED_KV_TOKEN_HEAD, &m);

	rank_t *r = &m.ranks[0];
	uint8_t *block = alloc_with_canary(m.g.block_bytes);
	uint8_t *untouched = alloc_with_canary(m.g.block_bytes);
	uint8_t *before = alloc_with_canary(r->bytes);
	const kvk_move_t moves[] = {{.block = 0, .data = block}, {.block = BLOCKS, .data = block}};
	uint32_t bad = 99;

	memcpy(before, r->memory, r->bytes);
	assert_int_equal(kvk_gather(&m.layout, &r->paged, moves, 2), KV_ERR_ARG);
	assert_memory_equal(block, untouched, m.g.block_bytes);
	assert_int_equal(kvk_scatter(&m.layout, &r->paged, moves, 2, &bad), KV_ERR_ARG);
	assert_memory_equal(before, r->memory, r->bytes);
	assert_int_equal(kvk_gather(&m.layout, &r->paged, moves, 0), KV_OK);
	free(block);
	free(untouched);
	free(before);
	free_model(&m);
}

KV_TEST(p1_block_digests_are_the_librarys)
{
	kv_test_rng_t rng = {kv_test_seed()};

	for (int round = 0; round < 60; round++) {
		const kvk_layout_t l = draw_layout(&rng, round % 3 ? KVK_PAGED_KV_TOKEN_HEAD : KVK_PAGED_OPAQUE);
		kvk_geometry_t g;

		kvk_layout_geometry(&l, &g);

		uint8_t *data = alloc_with_canary(g.block_bytes);
		uint64_t *leaves = alloc_with_canary((size_t)g.heads * g.leaves * sizeof *leaves);
		uint64_t *roots = alloc_with_canary(g.heads * sizeof *roots);
		uint64_t *roots_alone = alloc_with_canary(g.heads * sizeof *roots);

		kv_test_fill(&rng, data, g.block_bytes);
		kvk_digest_block(&l, data, leaves, roots);
		kvk_digest_block(&l, data, NULL, roots_alone);
		assert_memory_equal(roots, roots_alone, g.heads * sizeof *roots);
		for (uint32_t head = 0; head < g.heads; head++) {
			for (uint32_t leaf = 0; leaf < g.leaves; leaf++) {
				size_t offset;
				size_t len;

				kvk_layout_leaf(&l, head, leaf, &offset, &len);
				assert_int_equal(leaves[head * g.leaves + leaf], XXH3_64bits(data + offset, len));
			}
			assert_int_equal(roots[head], XXH3_64bits(leaves + head * g.leaves, g.leaves * sizeof *leaves));
		}
		kvk_digest_block(&l, data, leaves, NULL);
		free(data);
		free(leaves);
		free(roots);
		free(roots_alone);
	}
}
