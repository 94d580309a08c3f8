/* Blocks between the engine's cache and the pool, as this rank sees both. A group with fewer layers than the rank's
 * range is padded with zero pages. */
#include "worker/host/move.h"

#include <string.h>

void kvx_move_zero_padding(const kvx_worker_t *worker, const kvx_wgroup_t *group, uint8_t *data)
{
	const kvk_paged_t *paged = &group->paged;
	const kvc_writer_t *range = &worker->range;
	const size_t page = worker->geometry.page_bytes;
	const uint32_t before = paged->first_layer - range->layer_first;
	const uint32_t after = range->layer_count - before - paged->layers;

	for (uint32_t h = 0; h < range->head_count; h++) {
		uint8_t *head = data + (size_t)(range->head_first + h) * worker->layout.layers * page;

		memset(head + range->layer_first * page, 0, before * page);
		memset(head + (paged->first_layer + paged->layers) * page, 0, after * page);
	}
}

void kvx_move_pad_leaves(const kvx_worker_t *worker, const kvx_wgroup_t *group, const uint64_t *gathered,
			 uint64_t *leaves)
{
	const uint32_t pieces = worker->geometry.pieces;
	const uint32_t first = group->paged.first_layer - worker->range.layer_first;

	for (uint32_t h = 0; h < worker->range.head_count; h++) {
		for (uint32_t l = 0; l < worker->range.layer_count; l++) {
			const int held = l >= first && l - first < group->paged.layers;

			memcpy(leaves, held ? gathered : worker->zero_leaves, pieces * sizeof *leaves);
			leaves += pieces;
			gathered += held ? pieces : 0;
		}
	}
}

void kvx_move_prepare(const kvx_worker_t *worker, const kvx_wgroup_t *group, const kvx_source_t *source,
		      kvk_move_t *move, uint64_t *leaves)
{
	const kvk_geometry_t *g = &worker->geometry;
	const kvk_paged_t *paged = &group->paged;
	const uint64_t *first = source->leaves + (size_t)paged->first_head * g->leaves;
	const uint32_t count = paged->layers * g->pieces;

	move->data = (void *)(uintptr_t)source->data; /* scatter only reads both */
	move->leaves = (uint64_t *)(uintptr_t)first;
	if (paged->layers == worker->layout.layers) {
		return; /* the group has all layers, so its leaves lie together */
	}
	for (uint32_t h = 0; h < paged->heads; h++) {
		memcpy(leaves + (size_t)h * count,
		       first + (size_t)h * g->leaves + (size_t)paged->first_layer * g->pieces, count * sizeof *leaves);
	}
	move->leaves = leaves;
}
