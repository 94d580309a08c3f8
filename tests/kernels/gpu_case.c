/* Random caches and pools for the tests of the GPU copies. */
#include "gpu_rig.h"

#include "draw.h"

#include "kvk/device.h"

#include <unistd.h>

kvk_paged_kind_t gpu_case_kind(int round)
{
	static const kvk_paged_kind_t kinds[] = {KVK_PAGED_KV_TOKEN_HEAD, KVK_PAGED_HEAD_TOKEN_KV,
						 KVK_PAGED_OPAQUE,        KVK_PAGED_TOKEN_HEAD_KV,
						 KVK_PAGED_KV_HEAD_TOKEN, KVK_PAGED_HEAD_KV_TOKEN};

	return kinds[(size_t)round % KV_COUNT_OF(kinds)];
}

static size_t part(kv_test_rng_t *rng, uint32_t all, uint32_t *p_first)
{
	const uint32_t count = kv_test_below(rng, 2) ? all : (uint32_t)kv_test_below(rng, all) + 1;

	*p_first = (uint32_t)kv_test_below(rng, all - count + 1);

	return count;
}

/* Layer by layer, or blocks outermost; with room between blocks or without. */
static void make_paged(gpu_case_t *c, kvk_paged_kind_t kind)
{
	kvk_paged_t *p = &c->paged;
	const kvk_layout_t *l = &c->layout;
	const int beside = kv_test_below(c->rng, 3) == 0;
	size_t stride, step;

	*p = (kvk_paged_t){.kind = kind,
			   .blocks = c->count + (uint32_t)kv_test_below(c->rng, 4) + 1,
			   .block_tokens = l->block_tokens,
			   .k_dim = l->k_dim,
			   .v_dim = l->v_dim,
			   .dtype = l->dtype,
			   .page_bytes = l->page_bytes,
			   .base = c->base};
	p->heads = (uint32_t)part(c->rng, l->heads, &p->first_head);
	p->layers = (uint32_t)part(c->rng, l->layers, &p->first_layer);
	stride = (size_t)p->heads * c->g.page_bytes + kv_test_below(c->rng, 3) * 64;
	p->block_stride = beside ? stride * p->layers : stride;
	step = beside ? stride : stride * p->blocks;
	c->cache_bytes = stride * p->blocks * p->layers;
	if ((kind == KVK_PAGED_HEAD_KV_TOKEN || kind == KVK_PAGED_HEAD_TOKEN_KV) && kv_test_below(c->rng, 2)) {
		const size_t page = c->g.page_bytes + kv_test_below(c->rng, 3) * 64;

		c->cache_bytes = page * p->heads * p->layers * p->blocks;
		step = draw_heads_apart(c->rng, p, page);
	}
	c->cache = gpu_rig_alloc(c->cache_bytes);
	for (uint32_t i = 0; i < p->layers; i++) {
		c->base[i] = (uint8_t *)(uintptr_t)c->cache + i * step;
	}
	assert_int_equal(kvk_paged_check(p, l, NULL), KV_OK);
	c->layers = (uint32_t)part(c->rng, p->layers, &c->layer);
	c->ready = kv_test_below(c->rng, 2) != 0;
	if (c->layers == p->layers && kv_test_below(c->rng, 2)) {
		c->layers = 0;
	}
}

int gpu_case_is_near(const gpu_case_t *c)
{
	return c->kind == CASE_ON_DEVICE || c->kind == CASE_MAPPED;
}

int gpu_case_has_small_leaf(const gpu_case_t *c)
{
	return c->g.page_bytes - (c->g.pieces - 1) * c->g.leaf_bytes <= 240;
}

int gpu_case_is_whole(const gpu_case_t *c)
{
	return c->paged.heads == c->layout.heads && c->paged.layers == c->layout.layers &&
	       (c->layers == 0 || c->layers == c->layout.layers);
}

void *gpu_case_map(kvk_gpu_t *gpu, size_t *p_bytes, int *p_fd)
{
	kvk_device_t *device;
	void *base = NULL;

	assert_int_equal(kvk_device_open(fake_cuda_ops(), kvk_gpu_uuid(gpu), &device), KV_OK);
	*p_bytes = (*p_bytes + kvk_device_grain(device) - 1) / kvk_device_grain(device) * kvk_device_grain(device);
	assert_int_equal(kvk_device_alloc(device, *p_bytes, p_fd), KV_OK);
	kvk_device_close(device);
	assert_int_equal(kvk_gpu_map(gpu, *p_fd, *p_bytes, &base), KV_OK);

	return base;
}

/* Blocks that follow each other, some with room between. */
static void make_pool(gpu_case_t *c)
{
	const size_t gap = kv_test_below(c->rng, 2) ? 0 : (kv_test_below(c->rng, 2) ? 64 : 13);
	void *base;

	c->kind = (case_pool_t)kv_test_below(c->rng, 4);
	c->pool_bytes = c->count * (c->g.block_bytes + gap) + 16;
	if (c->kind == CASE_MAPPED) {
		c->pool = gpu_case_map(c->gpu, &c->pool_bytes, &c->pool_fd);
	} else if (c->kind == CASE_ON_DEVICE) {
		c->pool = (uint8_t *)(uintptr_t)gpu_rig_alloc(c->pool_bytes);
	} else if (c->kind == CASE_PINNED && gpu_rig_alloc_pinned(c->pool_bytes, &base)) {
		c->pool = base;
	} else {
		c->kind = CASE_REGISTERED;
		c->pool = aligned_alloc(4096, (c->pool_bytes + 4095) / 4096 * 4096);
		assert_int_equal(kvk_gpu_register(c->gpu, c->pool, c->pool_bytes), KV_OK);
	}
	for (uint32_t i = 0; i < c->count; i++) {
		/* In order, so that neighbours can be joined, but for a pair now and then. */
		c->moves[i].data = c->pool + i * (c->g.block_bytes + gap);
		if (i > 0 && kv_test_below(c->rng, 6) == 0) {
			void *data = c->moves[i].data;

			c->moves[i].data = c->moves[i - 1].data;
			c->moves[i - 1].data = data;
		}
	}
}

void gpu_case_init(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind)
{
	uint32_t ids[CASE_MOVES + 8];

	memset(c, 0, sizeof *c);
	c->rng = rng;
	c->gpu = gpu;
	c->layout = draw_layout(rng, kind);
	kvk_layout_geometry(&c->layout, &c->g);
	c->count = (uint32_t)kv_test_below(rng, kv_test_below(rng, 2) ? 3 : CASE_MOVES);
	make_paged(c, kind);
	make_pool(c);
	c->per_move = (size_t)c->paged.heads * c->paged.layers * c->g.pieces;
	c->leaves = malloc((c->count * c->per_move + 1) * sizeof *c->leaves);
	c->twin_leaves = malloc((c->count * c->per_move + 1) * sizeof *c->leaves);
	c->twin_cache = malloc(c->cache_bytes);
	c->twin_pool = malloc(c->pool_bytes);
	for (uint32_t i = 0; i < c->paged.blocks; i++) {
		ids[i] = i;
	}
	for (uint32_t i = 0; i < c->count; i++) {
		const uint32_t k = i + (uint32_t)kv_test_below(rng, c->paged.blocks - i);
		const uint32_t id = ids[k];

		ids[k] = ids[i];
		c->moves[i].block = id;
		c->moves[i].leaves = kv_test_below(rng, 8) ? c->leaves + i * c->per_move : NULL;
	}
	gpu_case_refill(c);
}

void gpu_case_fini(gpu_case_t *c)
{
	if (c->kind == CASE_MAPPED) {
		kvk_gpu_unmap(c->gpu, c->pool);
		close(c->pool_fd);
	} else if (c->kind == CASE_ON_DEVICE) {
		gpu_rig_free((uintptr_t)c->pool);
	} else if (c->kind == CASE_PINNED) {
		gpu_rig_free_pinned(c->pool);
	} else {
		kvk_gpu_unregister(c->gpu, c->pool);
		free(c->pool);
	}
	gpu_rig_free(c->cache);
	free(c->leaves);
	free(c->twin_leaves);
	free(c->twin_cache);
	free(c->twin_pool);
}

void gpu_case_until(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind,
		    int (*is_wanted)(const gpu_case_t *c))
{
	gpu_case_init(c, rng, gpu, kind);
	while (!is_wanted(c)) {
		gpu_case_fini(c);
		gpu_case_init(c, rng, gpu, kind);
	}
}

int gpu_case_is_usual(const gpu_case_t *c)
{
	return c->kind == CASE_REGISTERED && c->count >= 2 && c->g.page_bytes > 240;
}

void gpu_case_usual(gpu_case_t *c, kv_test_rng_t *rng, kvk_gpu_t *gpu, kvk_paged_kind_t kind)
{
	gpu_case_until(c, rng, gpu, kind, gpu_case_is_usual);
}

void gpu_case_ask_no_digests(gpu_case_t *c)
{
	for (uint32_t i = 0; i < c->count; i++) {
		c->moves[i].leaves = NULL;
	}
}

kvk_gpu_copy_t gpu_case_copy(const gpu_case_t *c, kvk_gpu_dir_t dir, kvk_gpu_way_t way, kvk_cu_stream_t stream)
{
	return (kvk_gpu_copy_t){.dir = dir,
				.way = way,
				.layout = &c->layout,
				.paged = &c->paged,
				.layer = c->layer,
				.layers = c->layers,
				.moves = c->moves,
				.count = c->count,
				.ready = c->ready,
				.stream = stream};
}

/* The twin moves all layers of a cache: here of one that holds the range only. */
static void twin_move(gpu_case_t *c, kvk_gpu_dir_t dir, const kvk_paged_t *paged, uint32_t i)
{
	const size_t row = (size_t)paged->layers * c->g.pieces;
	const size_t all = (size_t)c->paged.layers * c->g.pieces;
	uint64_t *leaves = malloc((paged->heads * row + 1) * sizeof *leaves);
	const kvk_move_t move = {.block = c->moves[i].block,
				 .data = c->twin_pool + ((uint8_t *)c->moves[i].data - c->pool),
				 .leaves = dir == KVK_GPU_GATHER ? leaves : NULL};
	uint64_t *out = c->twin_leaves + i * c->per_move + (size_t)c->layer * c->g.pieces;

	if (dir == KVK_GPU_SCATTER) {
		assert_int_equal(kvk_scatter(&c->layout, paged, &move, 1, NULL), KV_OK);
	} else {
		assert_int_equal(kvk_gather(&c->layout, paged, &move, 1), KV_OK);
		for (uint32_t head = 0; c->moves[i].leaves && head < paged->heads; head++) {
			memcpy(out + head * all, leaves + head * row, row * sizeof *leaves);
		}
	}
	free(leaves);
}

void gpu_case_twin(gpu_case_t *c, kvk_gpu_dir_t dir)
{
	kvk_paged_t paged = c->paged;
	void *base[CASE_LAYERS];

	paged.first_layer += c->layer;
	paged.layers = c->layers ? c->layers : c->paged.layers;
	paged.base = base;
	for (uint32_t i = 0; i < paged.layers; i++) {
		base[i] = c->twin_cache + ((uint8_t *)c->base[c->layer + i] - (uint8_t *)(uintptr_t)c->cache);
	}
	for (uint32_t i = 0; i < c->count; i++) {
		twin_move(c, dir, &paged, i);
	}
}

void gpu_case_equal(const gpu_case_t *c)
{
	assert_memory_equal((uint8_t *)(uintptr_t)c->cache, c->twin_cache, c->cache_bytes);
	assert_memory_equal(c->pool, c->twin_pool, c->pool_bytes);
	assert_memory_equal(c->leaves, c->twin_leaves, c->count * c->per_move * sizeof *c->leaves);
}

void gpu_case_check(gpu_case_t *c, kvk_gpu_dir_t dir, kvk_gpu_way_t way, kvk_cu_stream_t stream)
{
	const kvk_gpu_copy_t copy = gpu_case_copy(c, dir, way, stream);

	gpu_rig_copy(c->gpu, &copy);
	gpu_case_twin(c, dir);
	gpu_case_equal(c);
}

void gpu_case_refill(gpu_case_t *c)
{
	const size_t all = (size_t)c->paged.layers * c->g.pieces;

	kv_test_fill(c->rng, c->twin_cache, c->cache_bytes);
	kv_test_fill(c->rng, c->twin_pool, c->pool_bytes);
	for (uint32_t i = 0; i < c->count; i++) {
		const uint8_t *data = c->twin_pool + ((uint8_t *)c->moves[i].data - c->pool);
		uint64_t *block = malloc((size_t)c->g.heads * c->g.leaves * sizeof *block);

		kvk_digest_block(&c->layout, data, block, NULL);
		for (uint32_t head = 0; head < c->paged.heads; head++) {
			memcpy(c->leaves + i * c->per_move + head * all,
			       block + (size_t)(c->paged.first_head + head) * c->g.leaves +
				       (size_t)c->paged.first_layer * c->g.pieces,
			       all * sizeof *block);
		}
		free(block);
	}
	memcpy((uint8_t *)(uintptr_t)c->cache, c->twin_cache, c->cache_bytes);
	memcpy(c->pool, c->twin_pool, c->pool_bytes);
	memcpy(c->twin_leaves, c->leaves, c->count * c->per_move * sizeof *c->leaves);
}

size_t gpu_case_some_byte(const gpu_case_t *c, uint32_t i)
{
	const uint32_t layers = c->layers ? c->layers : c->paged.layers;
	const uint32_t head = c->paged.first_head + (uint32_t)kv_test_below(c->rng, c->paged.heads);
	const uint32_t layer = c->paged.first_layer + c->layer + (uint32_t)kv_test_below(c->rng, layers);
	const size_t page = (size_t)head * c->layout.layers + layer;

	return (size_t)((uint8_t *)c->moves[i].data - c->pool) + page * c->g.page_bytes +
	       kv_test_below(c->rng, c->g.page_bytes);
}
