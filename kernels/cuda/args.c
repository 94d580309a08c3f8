/* A copy in the words of the kernels, and the way it goes. */
#include "args.h"

#include "cuda/driver/context.h"
#include "cuda/driver/launch.h"
#include "cuda/driver/stage.h"

#include "cuda/device/xxh3.h"
#include "layout/page.h"

#define CAPTURE_NONE    0
#define CAPTURE_INVALID 2

/* ---- rows ------------------------------------------------------------------------------------ */

static kvk_gpu_row_t make_row(kvk_row_t page, kvk_row_t first, kvk_row_t second, size_t bytes)
{
	return (kvk_gpu_row_t){.pool_offset = page.offset,
			       .pool_stride = page.stride,
			       .cache_offset = first.offset,
			       .cache_stride = first.stride,
			       .cache_head = second.offset - first.offset,
			       .bytes = bytes};
}

/* Does V begin where a piece of K ends, on both sides and for every token and head? */
static int are_adjacent(const kvk_gpu_row_t *k, const kvk_gpu_row_t *v)
{
	return v->bytes > 0 && v->pool_offset == k->pool_offset + k->bytes && v->pool_stride == k->pool_stride &&
	       v->cache_offset == k->cache_offset + k->bytes && v->cache_stride == k->cache_stride &&
	       v->cache_head == k->cache_head;
}

static int is_contiguous(const kvk_gpu_row_t *row)
{
	return row->bytes == 0 || (row->pool_stride == row->bytes && row->cache_stride == row->bytes);
}

/* A row of one piece. */
static void make_whole(kvk_gpu_row_t *row, uint32_t tokens)
{
	row->bytes *= tokens;
	row->pool_stride = row->bytes;
	row->cache_stride = row->bytes;
}

/* Fewer and larger pieces where both sides agree: same bytes, same order, same digest. */
static void join_rows(kvk_gpu_args_t *args)
{
	if (args->interleaved && are_adjacent(&args->k, &args->v)) {
		args->k.bytes += args->v.bytes;
		args->v = (kvk_gpu_row_t){0};
	}
	/* Interleaved and apart: K and V of a token follow each other, so neither is one piece. */
	if (!is_contiguous(&args->k) || !is_contiguous(&args->v) || (args->interleaved && args->v.bytes > 0)) {
		return;
	}
	make_whole(&args->k, args->tokens);
	make_whole(&args->v, args->tokens);
	args->tokens = 1;
	if (are_adjacent(&args->k, &args->v)) {
		make_whole(&args->k, 2);
		args->v = (kvk_gpu_row_t){0};
	}
}

static void make_rows(const kvk_layout_t *layout, const kvk_paged_t *paged, kvk_gpu_args_t *args)
{
	if (layout->inner == KVK_INNER_OPAQUE) {
		const kvk_row_t whole = {0, layout->page_bytes};

		args->opaque = 1;
		args->tokens = 1;
		args->k = make_row(whole, whole, whole, layout->page_bytes);
		return;
	}

	const kvk_rows_t page = kvk_page_rows(layout);
	const kvk_rows_t first = kvk_paged_rows(paged, 0);
	const kvk_rows_t second = kvk_paged_rows(paged, 1);

	args->tokens = layout->block_tokens;
	args->interleaved = layout->inner == KVK_INNER_PACKED;
	args->k = make_row(page.k, first.k, second.k, kvk_k_bytes(layout));
	if (layout->v_dim > 0) {
		args->v = make_row(page.v, first.v, second.v, kvk_v_bytes(layout));
	}
	join_rows(args);
}

static void make_args(const kvk_gpu_copy_t *copy, const kvk_geometry_t *g, kvk_gpu_args_t *args)
{
	const kvk_layout_t *layout = copy->layout;
	const kvk_paged_t *paged = copy->paged;
	const uint64_t first = (uint64_t)paged->first_head * layout->layers + paged->first_layer + copy->layer;

	*args = (kvk_gpu_args_t){
		.cache_stride = paged->block_stride ? paged->block_stride : kvk_paged_block_bytes(paged),
		.page_bytes = g->page_bytes,
		.pool_head = (uint64_t)g->page_bytes * layout->layers,
		.pool_first = first * g->page_bytes,
		.count = copy->count,
		.heads = paged->heads,
		.layers = copy->layers ? copy->layers : paged->layers,
		.pieces = g->pieces,
		.leaf_bytes = g->leaf_bytes,
	};
	/* Addresses and leaves are given of the range alone, so that it begins at 0. */
	args->cache_layers = args->layers;
	make_rows(layout, paged, args);
}

/* ---- what was measured ----------------------------------------------------------------------- */

static int same_layout(const kvk_layout_t *a, const kvk_layout_t *b)
{
	return a->heads == b->heads && a->layers == b->layers && a->block_tokens == b->block_tokens &&
	       a->k_dim == b->k_dim && a->v_dim == b->v_dim && a->dtype == b->dtype && a->inner == b->inner &&
	       a->page_bytes == b->page_bytes;
}

const kvk_gpu_choice_t *kvk_gpu_find_choice(const kvk_gpu_t *gpu, const kvk_layout_t *layout, const kvk_paged_t *paged)
{
	/* They are only ever added. */
	const uint32_t count = atomic_load_explicit(&gpu->choice_count, memory_order_acquire);

	for (uint32_t i = 0; i < count; i++) {
		const kvk_gpu_choice_t *c = &gpu->choices[i];

		if (c->kind == paged->kind && c->heads == paged->heads && c->layers == paged->layers &&
		    same_layout(&c->layout, layout)) {
			return c;
		}
	}

	return NULL;
}

kvk_gpu_way_t kvk_gpu_find_way(const kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, uint64_t bytes)
{
	const kvk_gpu_choice_t *c = kvk_gpu_find_choice(gpu, copy->layout, copy->paged);

	return c ? c->way[copy->dir][bytes >= KVK_GPU_LARGE_JOB] : KVK_GPU_AUTO;
}

int kvk_gpu_link_is_wide(const kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy)
{
	const kvk_gpu_choice_t *c = kvk_gpu_find_choice(gpu, copy->layout, copy->paged);

	return c && c->wide;
}

void kvk_gpu_keep_choice(kvk_gpu_t *gpu, const kvk_gpu_choice_t *choice)
{
	pthread_mutex_lock(&gpu->lock);

	const uint32_t count = atomic_load(&gpu->choice_count);

	if (count < KVK_GPU_MAX_CHOICE) {
		gpu->choices[count] = *choice;
		atomic_store_explicit(&gpu->choice_count, count + 1, memory_order_release);
	}
	pthread_mutex_unlock(&gpu->lock);
}

/* ---- which way ------------------------------------------------------------------------------- */

/* Contiguous bytes of a move in the pool, when `layers` of the cache's are moved. */
static uint64_t run_bytes(const kvk_layout_t *layout, const kvk_paged_t *paged, uint32_t layers, uint32_t page_bytes)
{
	const uint64_t run = (uint64_t)layers * page_bytes;

	/* All layers of a head, and the next head follows. */
	return layers == layout->layers ? run * paged->heads : run;
}

/* Bytes of the smallest leaf: an opaque page's last may be shorter than the others. */
static uint32_t least_leaf(const kvk_geometry_t *g)
{
	return g->page_bytes - (g->pieces - 1) * g->leaf_bytes;
}

/* How STAGED would cut it: as many layers at a time as a stage of the ring holds of one block. 0: not one. */
static int cut_for_stages(const kvk_gpu_t *gpu, kvk_gpu_copy_desc_t *desc)
{
	const uint64_t slice = (uint64_t)desc->args.heads * desc->args.page_bytes;
	const uint64_t fit = kvk_gpu_ring_stage_bytes(gpu) / slice;

	if (fit == 0) {
		return 0;
	}
	desc->staged_layers = fit < desc->args.layers ? (uint32_t)fit : desc->args.layers;
	desc->staged_ranges = (desc->args.layers + desc->staged_layers - 1) / desc->staged_layers;

	return 1;
}

/* Some of the layers: the copy engine takes them by rows. These must be long, and many in a call: where blocks lie
 * beside each other. */
static int rows_are_worth_it(const kvk_gpu_copy_desc_t *desc)
{
	const kvk_gpu_args_t *args = &desc->args;
	const uint64_t row = args->layers * args->page_bytes;
	const uint64_t bytes = row * args->count * args->heads;
	const ptrdiff_t block = (ptrdiff_t)desc->pool_bytes;
	uint64_t calls = args->count;

	if (row < KVK_GPU_STAGED_ROW || bytes < KVK_GPU_LARGE_JOB) {
		return 0;
	}
	for (uint32_t i = 1; i < args->count && args->heads * args->pool_head == desc->pool_bytes; i++) {
		const ptrdiff_t apart =
			(const uint8_t *)desc->copy->moves[i].data - (const uint8_t *)desc->copy->moves[i - 1].data;

		calls -= apart == block || apart == -block;
	}

	return bytes >= calls * KVK_GPU_STAGED_CALL;
}

static kvk_gpu_way_t way_by_rule(const kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc)
{
	const kvk_gpu_copy_t *copy = desc->copy;
	const kvk_gpu_args_t *args = &desc->args;
	const uint64_t run = run_bytes(copy->layout, copy->paged, args->layers, desc->geometry.page_bytes);
	const uint64_t moves = copy->of > args->count ? copy->of : args->count;
	const uint64_t bytes = args->layers * args->page_bytes * args->heads * moves;
	const int some = args->layers < copy->layout->layers;
	const kvk_gpu_way_t measured = kvk_gpu_find_way(gpu, copy, bytes);

	if (args->layers == copy->paged->layers && measured != KVK_GPU_AUTO) {
		return measured;
	}

	return (some ? rows_are_worth_it(desc) : run >= KVK_GPU_STAGED_RUN) ? KVK_GPU_STAGED : KVK_GPU_ZERO_COPY;
}

static void choose_way(kvk_gpu_t *gpu, kvk_gpu_copy_desc_t *desc)
{
	const int far = desc->kind == KVK_GPU_MEM_FAR;

	desc->way = desc->copy->way;
	if (!gpu->plain[0] || (desc->digests && least_leaf(&desc->geometry) < KVK_GPU_LEAF_LEAST)) {
		desc->way = KVK_GPU_COPY_PER_PIECE;
	}
	/* Inside a device's memory a ring would be a second copy of every byte. */
	if (desc->way == KVK_GPU_AUTO) {
		desc->way = desc->kind == KVK_GPU_MEM_NEAR ? KVK_GPU_ZERO_COPY : way_by_rule(gpu, desc);
	}
	if (far && desc->way == KVK_GPU_ZERO_COPY) {
		desc->way = KVK_GPU_STAGED;
	}
	/* Without a ring, or with one too small for a layer of a block, there is the link. A ring belongs to all
	 * streams, so none can capture its work. */
	if (desc->way == KVK_GPU_STAGED &&
	    (desc->args.count == 0 || !cut_for_stages(gpu, desc) || !kvk_gpu_ring_is_ready(gpu, desc->copy->dir))) {
		desc->way = far ? KVK_GPU_COPY_PER_PIECE : KVK_GPU_ZERO_COPY;
		desc->staged_ranges = 0;
	}
}

/* Work enqueued on a captured stream would become a part of a graph, and its event could not be asked about. */
kv_status_t kvk_gpu_check_capture(kvk_gpu_t *gpu, kvk_cu_stream_t stream)
{
	int capture = CAPTURE_NONE;
	const kv_status_t status = KVK_GPU_CALL(gpu, stream_capturing, stream, &capture);

	if (status != KV_OK) {
		return KV_ERR_IO;
	}
	if (capture == CAPTURE_INVALID) {
		return kvk_gpu_set_error(KV_ERR_IO, "the stream's capture is invalid");
	}
	if (capture != CAPTURE_NONE) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED,
					 "the stream is being captured: a graph takes no work of kvd");
	}

	return KV_OK;
}

static kv_status_t check_copy(const kvk_gpu_copy_t *copy)
{
	const uint32_t held = copy->paged->layers;

	if (copy->dir != KVK_GPU_GATHER && copy->dir != KVK_GPU_SCATTER) {
		return kvk_gpu_set_error(KV_ERR_ARG, "a copy is a gather or a scatter");
	}
	if ((unsigned)copy->way > KVK_GPU_COPY_PER_PIECE) {
		return kvk_gpu_set_error(KV_ERR_ARG, "there is no such way to copy");
	}
	if (copy->layer >= held || copy->layers > held - copy->layer || (copy->layers == 0 && copy->layer != 0)) {
		return kvk_gpu_set_error(KV_ERR_ARG, "layers %u to %u are not in the cache, which has %u", copy->layer,
					 copy->layer + copy->layers, held);
	}
	for (uint32_t i = 0; i < copy->count; i++) {
		if (copy->moves[i].block >= copy->paged->blocks) {
			return kvk_gpu_set_error(KV_ERR_ARG, "block %u is not in the cache, which has %u",
						 copy->moves[i].block, copy->paged->blocks);
		}
	}

	return KV_OK;
}

/* As much as fills the link: what is left to the rest is worth more than what a copy no longer gains. Inside a device's
 * memory there is no link, and each SM brings more. */
static void set_budget(const kvk_gpu_t *gpu, kvk_gpu_copy_desc_t *desc)
{
	const kvk_gpu_copy_t *copy = desc->copy;
	const uint32_t few = desc->args.leaf_bytes < KVK_CHUNK ? KVK_GPU_SMS_SMALL : KVK_GPU_SMS;
	const int wide = kvk_gpu_link_is_wide(gpu, copy);
	const uint32_t bytes = copy->max_in_flight ? copy->max_in_flight : wide ? UINT32_MAX : KVK_GPU_MAX_IN_FLIGHT;
	const uint32_t fill = desc->kind == KVK_GPU_MEM_NEAR ? gpu->sms_all : wide ? KVK_GPU_SMS_WIDE : few;
	const uint32_t stage = desc->way == KVK_GPU_STAGED ? copy->stage_sms : 0;
	const uint32_t sms = stage ? stage : copy->sms ? copy->sms : gpu->sms ? gpu->sms : fill;

	desc->sms = sms < gpu->sms_all ? sms : gpu->sms_all;
	desc->max_in_flight = bytes < UINT32_MAX ? bytes : 0;
}

kv_status_t kvk_gpu_describe_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_mem_kind_t kind,
				  kvk_gpu_copy_desc_t *desc)
{
	kv_status_t status = check_copy(copy);

	if (status != KV_OK) {
		return status;
	}
	*desc = (kvk_gpu_copy_desc_t){.copy = copy, .kind = kind};
	status = kvk_gpu_check_capture(gpu, copy->stream);
	if (status != KV_OK) {
		return status;
	}
	kvk_layout_geometry(copy->layout, &desc->geometry);
	make_args(copy, &desc->geometry, &desc->args);
	desc->pool_bytes = desc->geometry.block_bytes;
	for (uint32_t i = 0; i < copy->count; i++) {
		desc->digests |= copy->moves[i].leaves != NULL;
	}
	if (kvk_gpu_count_units(&desc->args) > KVK_GPU_MAX_UNITS) {
		return kvk_gpu_set_error(KV_ERR_LIMIT, "the copy has too many pages: it takes less in parts");
	}
	choose_way(gpu, desc);
	set_budget(gpu, desc);

	return KV_OK;
}
