/* COPY_PER_PIECE: one copy of the driver a piece, digests by the host. */
#include "copy_per_piece.h"

#include "cuda/driver/context.h"

#include "kv/digest.h"

/* One page: where it lies on both sides. */
typedef struct page {
	uint64_t pool, cache;
} page_t;

static kv_status_t copy_piece(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, page_t at, uint64_t bytes)
{
	if (copy->dir == KVK_GPU_SCATTER) {
		return KVK_GPU_CALL(gpu, copy_async, at.cache, at.pool, bytes, copy->stream);
	}

	return KVK_GPU_CALL(gpu, copy_async, at.pool, at.cache, bytes, copy->stream);
}

static kv_status_t copy_row(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, const kvk_gpu_row_t *row, page_t page)
{
	kv_status_t status = KV_OK;

	for (uint32_t token = 0; token < desc->args.tokens && row->bytes > 0 && status == KV_OK; token++) {
		const page_t at = {page.pool + row->pool_offset + token * row->pool_stride,
				   page.cache + row->cache_offset + token * row->cache_stride};

		status = copy_piece(gpu, desc->copy, at, row->bytes);
	}

	return status;
}

/* All heads of one layer of one move. */
static kv_status_t copy_layer(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, const kvk_gpu_move_t *move, page_t first)
{
	const kvk_gpu_args_t *args = &desc->args;
	kv_status_t status = KV_OK;

	first.pool += move->pool + args->pool_first;
	first.cache += move->block * args->cache_stride;
	for (uint32_t head = 0; head < args->heads && status == KV_OK; head++) {
		const uint64_t pool = first.pool + head * args->pool_head;

		status = copy_row(gpu, desc, &args->k, (page_t){pool, first.cache + head * args->k.cache_head});
		if (status == KV_OK) {
			status = copy_row(gpu, desc, &args->v, (page_t){pool, first.cache + head * args->v.cache_head});
		}
	}

	return status;
}

kv_status_t kvk_gpu_copy_per_piece(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, const kvk_gpu_job_t *job)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < job->count && status == KV_OK; i++) {
		for (uint32_t layer = 0; layer < job->layers && status == KV_OK; layer++) {
			const page_t first = {layer * desc->args.page_bytes, job->bases[layer]};

			status = copy_layer(gpu, desc, &job->moves[i], first);
		}
	}

	return status;
}

/* The leaves of move i: made (gather), or compared: 0 when one is wrong. */
static int digest_move(kvk_gpu_job_t *job, const kvk_geometry_t *g, uint32_t i)
{
	const uint32_t leaves = job->layers * job->pieces;
	uint64_t *digest = job->leaves + (size_t)i * job->heads * leaves;
	int right = 1;

	for (uint32_t head = 0; head < job->heads; head++) {
		const uint8_t *pages = (const uint8_t *)job->asked[i].data + job->pool_first + head * job->pool_head;

		for (uint32_t leaf = 0; leaf < leaves; leaf++, digest++) {
			const size_t in_page = (size_t)(leaf % g->pieces) * g->leaf_bytes;
			const size_t left = g->page_bytes - in_page;
			const uint8_t *at = pages + (size_t)(leaf / g->pieces) * g->page_bytes + in_page;
			const uint64_t found = kv_digest(at, left < g->leaf_bytes ? left : g->leaf_bytes);

			if (job->dir == KVK_GPU_GATHER) {
				*digest = found;
			}
			right = right && *digest == found;
		}
	}

	return right;
}

void kvk_gpu_digest_pieces(kvk_gpu_job_t *job)
{
	kvk_geometry_t g;

	kvk_layout_geometry(&job->layout, &g);
	for (uint32_t i = 0; i < job->count; i++) {
		if (job->asked[i].leaves) {
			job->bad[i] = (uint32_t)!digest_move(job, &g, i);
		}
	}
}
