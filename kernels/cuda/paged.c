/* Does a paged cache lie in the memory of the device? A kernel that reads or writes an address that the device does not
 * have ends the context, and the engine with it: what an engine says of its cache is looked up before the first copy.
 */
#include "cuda/driver/context.h"
#include "cuda/driver/memory.h"

#include "layout/page.h"

/* From the first byte of a layer to the end of its last block, whichever of blocks and heads is outermost. */
static size_t layer_span(const kvk_paged_t *paged)
{
	const size_t block = kvk_paged_block_bytes(paged), page = block / paged->heads;
	const size_t stride = paged->block_stride ? paged->block_stride : block;

	return (paged->blocks - 1u) * stride + (paged->heads - 1u) * kvk_paged_head_stride(paged) + page;
}

kv_status_t kvk_gpu_check_paged(kvk_gpu_t *gpu, const kvk_paged_t *paged)
{
	kv_status_t status = kvk_gpu_enter(gpu);

	if (status != KV_OK) {
		return status;
	}
	for (uint32_t l = 0; l < paged->layers && status == KV_OK; l++) {
		if (!kvk_gpu_is_own(gpu, paged->base[l], layer_span(paged))) {
			status = kvk_gpu_set_error(
				KV_ERR_ARG, "layer %u of the cache, %zu bytes at %p, is not in memory of device %d", l,
				layer_span(paged), paged->base[l], gpu->ordinal);
		}
	}
	kvk_gpu_leave(gpu);

	return status;
}
