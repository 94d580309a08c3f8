/* Pool memory the device sees. libkvc says when a slab is mapped and when it is about to go; the transfer thread makes it known to the device piece by
 * piece, in idle times or when a block in it is wanted. All calls but the last, of detaching, are the transfer thread's.
 *
 * Pinning is bounded by the process's limit on locked memory. Where the limit is reached the worker declines: a pool of which only a part can be used is
 * a cache whose hits fail.
 */
#include "worker_gpu.h"

#include <stdlib.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PIECE                                                                                                          \
	((size_t)256 << 20) /* bytes made known at once: 10 ms where pages are huge, 150 ms where they are small */

static size_t piece_bytes(const kvx_wslab_t *slab, uint32_t i)
{
	const size_t left = slab->bytes - (size_t)i * slab->piece;

	return left < slab->piece ? left : slab->piece;
}

/* No block lies in two pieces. */
static void add(kvx_wgpu_t *gpu, const kvc_memory_t *memory)
{
	const size_t slots = PIECE / memory->slot_bytes;
	const size_t piece = (slots ? slots : 1) * memory->slot_bytes;
	const uint32_t pieces = (uint32_t)((memory->bytes + piece - 1) / piece);
	kvx_wslab_t *slab = calloc(1, sizeof *slab + pieces);

	if (!slab) {
		return; /* blocks in it cannot be made known: see kvx_slabs_ensure() */
	}
	slab->base = memory->base;
	slab->bytes = memory->bytes;
	slab->piece = piece;
	slab->pieces = pieces;
	slab->next = gpu->slabs;
	gpu->slabs = slab;
}

static void drop(kvx_wgpu_t *gpu, const kvc_memory_t *memory)
{
	kvx_wslab_t **link = &gpu->slabs;
	kvx_wslab_t *slab;

	while (*link && (*link)->base != memory->base) {
		link = &(*link)->next;
	}
	slab = *link;
	if (!slab) {
		return;
	}
	*link = slab->next;
	for (uint32_t i = 0; i < slab->pieces; i++) {
		if (slab->known[i]) {
			kvk_gpu_unregister(gpu->gpu, slab->base + (size_t)i * slab->piece);
		}
	}
	free(slab);
}

void kvx_slabs_told(void *ctx, const kvc_memory_t *memory, int mapped)
{
	kvx_worker_t *worker = ctx;

	if (mapped) {
		add(worker->gpu, memory);
	} else {
		drop(worker->gpu, memory);
	}
}

static kvc_status_t make_known(kvx_worker_t *worker, kvx_wslab_t *slab, uint32_t i)
{
	uint8_t *base = slab->base + (size_t)i * slab->piece;
	const size_t bytes = piece_bytes(slab, i);
	kvc_status_t status;

	if (slab->known[i]) {
		return KVC_OK;
	}
	/* libkvc has asked for huge pages; many pages at once are cheaper than a fault for each. */
	(void)madvise(base, bytes, MADV_POPULATE_WRITE);
	status = (kvc_status_t)kvk_gpu_register(worker->gpu->gpu, base, bytes);
	if (status != KVC_OK) {
		atomic_fetch_add(&worker->gpu->refused, 1u);
		return kvx_gpu_decline(worker, status);
	}
	slab->known[i] = 1;

	return KVC_OK;
}

kvc_status_t kvx_slabs_ensure(kvx_worker_t *worker, const void *at, size_t bytes)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint8_t *first = at;

	if (kvk_gpu_sees(gpu->gpu, at, bytes)) {
		return KVC_OK;
	}
	for (kvx_wslab_t *slab = gpu->slabs; slab; slab = slab->next) {
		if (first >= slab->base && first < slab->base + slab->bytes) {
			return make_known(worker, slab, (uint32_t)((size_t)(first - slab->base) / slab->piece));
		}
	}

	return KVC_ERR_NOMEM;
}

int kvx_slabs_step(kvx_worker_t *worker)
{
	const kvc_status_t proved = (kvc_status_t)atomic_load_explicit(&worker->proved, memory_order_relaxed);

	for (kvx_wslab_t *slab = worker->gpu->slabs; slab && proved >= 0; slab = slab->next) {
		if (slab->at < slab->pieces) {
			return make_known(worker, slab, slab->at++) == KVC_OK;
		}
	}

	return 0;
}
