/* Pool memory the device sees. libkvc announces when a slab is mapped and when it is about to be unmapped; the transfer
 * thread registers it with the device piece by piece, in idle time or when a block in it is needed. All calls but the
 * last, of detaching, are the transfer thread's.
 *
 * The process's limit on locked memory bounds what can be pinned. At the limit the worker declines: hits fail in a pool
 * that can be used only in part. Any other refusal of the driver may be temporary: the piece is tried again with
 * growing pauses, and its blocks count as missing meanwhile. The worker declines only if the refusals go on. */
#include "worker/cuda/pool_memory.h"
#include "worker/cuda/device.h"

#include "kv/log.h"

#include <stdlib.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

/* Bytes registered at once, about: 10 ms on huge pages, 150 ms on small ones. */
#define PIECE       ((size_t)256 << 20)
#define TRIES       8u
#define PATIENCE_NS (2000 * KVX_NS_A_MS) /* with memory that the daemon has not touched */
#define PAUSE_NS    (20 * KVX_NS_A_MS) /* after the first refusal, twice as long after each further one: 2.5 s in all */

static size_t piece_bytes(const kvx_pool_slab_t *slab, uint32_t i)
{
	const size_t left = slab->bytes - (size_t)i * slab->each;

	return left < slab->each ? left : slab->each;
}

/* Has the daemon touched all of the piece? */
static int is_there(const kvx_pool_slab_t *slab, uint32_t i)
{
	return kvc_memory_ready(&slab->memory) >= (size_t)i * slab->each + piece_bytes(slab, i);
}

/* No block lies in two pieces, and no piece is a small rest: a large pool has thousands of slabs, and the device a
 * limited number of registrations. 0: no memory to list the slab. */
static int add_slab(kvx_wgpu_t *gpu, const kvc_memory_t *memory)
{
	const size_t slots = (memory->bytes + memory->slot_bytes - 1) / memory->slot_bytes;
	const size_t about = (memory->bytes + PIECE / 2) / PIECE, parts = about ? about : 1;
	const size_t each = (slots + parts - 1) / parts * memory->slot_bytes;
	const uint32_t pieces = (uint32_t)((memory->bytes + each - 1) / each);
	kvx_pool_slab_t *slab = calloc(1, sizeof *slab + pieces * sizeof *slab->piece);

	if (!slab) {
		return 0;
	}
	slab->memory = *memory;
	slab->base = memory->base;
	slab->bytes = memory->bytes;
	slab->each = each;
	slab->pieces = pieces;
	slab->next = gpu->slabs;
	gpu->slabs = slab;

	return 1;
}

/* It was refused, and will be tried again. */
static int is_waiting(const kvx_pool_piece_t *piece)
{
	return piece->tries > 0 && !piece->known;
}

static void drop_slab(kvx_wgpu_t *gpu, const kvc_memory_t *memory)
{
	kvx_pool_slab_t **link = &gpu->slabs;
	kvx_pool_slab_t *slab;

	while (*link && (*link)->base != memory->base) {
		link = &(*link)->next;
	}
	slab = *link;
	if (!slab) {
		return;
	}
	*link = slab->next;
	for (uint32_t i = 0; i < slab->pieces; i++) {
		if (slab->piece[i].known) {
			kvk_gpu_unregister(gpu->gpu, slab->base + (size_t)i * slab->each);
		}
		gpu->refused_pieces -= is_waiting(&slab->piece[i]) ? 1u : 0u;
	}
	free(slab);
}

void kvx_pool_memory_changed(void *ctx, const kvc_memory_t *memory, int mapped)
{
	kvx_worker_t *worker = ctx;

	if (!mapped) {
		drop_slab(worker->gpu, memory);
	} else if (!add_slab(worker->gpu, memory)) {
		kv_log(KV_LOG_ERROR, "kvx", "no memory to list a slab of the pool: nothing is loaded or saved");
		atomic_store(&worker->self_test_status, KVC_ERR_NOMEM);
	}
}

/* BUSY: the piece will be tried again. */
static kvc_status_t retry_or_decline(kvx_worker_t *worker, kvx_pool_piece_t *piece, size_t bytes, kvc_status_t status)
{
	kvx_wgpu_t *gpu = worker->gpu;

	kvx_stat_add(&worker->stats.gpu_refused, 1);
	if (status == KVC_ERR_LIMIT || piece->tries + 1 >= TRIES) {
		return kvx_gpu_decline(worker, status);
	}
	if (gpu->refused_pieces == 0) {
		kv_log(KV_LOG_WARN, "kvx",
		       "the GPU cannot be given %zu bytes of the pool now, loads from there fail; trying again: %s",
		       bytes, kvk_gpu_last_error());
	}
	gpu->refused_pieces += piece->tries == 0 ? 1u : 0u;
	piece->again_ns = kvx_worker_now_ns() + (PAUSE_NS << piece->tries);
	piece->tries++;

	return KVC_ERR_BUSY;
}

/* To pin a page that nobody has touched makes it, and makes it ours. The daemon is at it; where it has no memory the
 * blocks of this piece count as missing. */
static kvc_status_t await_memory(kvx_pool_piece_t *piece)
{
	const uint64_t now = kvx_worker_now_ns();

	piece->awaited_ns = piece->awaited_ns ? piece->awaited_ns : now;

	return now - piece->awaited_ns < PATIENCE_NS ? KVX_ERR_FAULT : KVC_ERR_BUSY;
}

static kvc_status_t register_piece(kvx_worker_t *worker, kvx_pool_slab_t *slab, uint32_t i)
{
	const kvc_status_t proved = (kvc_status_t)atomic_load_explicit(&worker->self_test_status, memory_order_relaxed);
	kvx_pool_piece_t *piece = &slab->piece[i];
	uint8_t *base = slab->base + (size_t)i * slab->each;
	const size_t bytes = piece_bytes(slab, i);
	kvc_status_t status;

	if (piece->known || proved < 0) {
		return piece->known ? KVC_OK : proved;
	}
	if (is_waiting(piece) && kvx_worker_now_ns() < piece->again_ns) {
		return KVC_ERR_BUSY;
	}
	if (!is_there(slab, i)) {
		return await_memory(piece);
	}
	/* libkvc has requested huge pages; touching many pages at once is cheaper than a fault for each */
	(void)madvise(base, bytes, MADV_POPULATE_WRITE);
	status = (kvc_status_t)kvk_gpu_register(worker->gpu->gpu, base, bytes);
	if (status != KVC_OK) {
		return retry_or_decline(worker, piece, bytes, status);
	}
	worker->gpu->refused_pieces -= is_waiting(piece) ? 1u : 0u;
	piece->known = 1;

	return KVC_OK;
}

kvc_status_t kvx_pool_memory_register(kvx_worker_t *worker, const void *at, size_t bytes)
{
	kvx_wgpu_t *gpu = worker->gpu;
	const uint8_t *first = at;

	if (kvk_gpu_is_registered(gpu->gpu, at, bytes)) {
		return KVC_OK;
	}
	for (kvx_pool_slab_t *slab = gpu->slabs; slab; slab = slab->next) {
		if (first >= slab->base && first < slab->base + slab->bytes) {
			return register_piece(worker, slab, (uint32_t)((size_t)(first - slab->base) / slab->each));
		}
	}

	return KVC_ERR_NOMEM;
}

int kvx_pool_memory_register_some(kvx_worker_t *worker)
{
	const uint64_t now = kvx_worker_now_ns();

	for (kvx_pool_slab_t *slab = worker->gpu->slabs; slab; slab = slab->next) {
		for (uint32_t i = 0; i < slab->pieces; i++) {
			if (!slab->piece[i].known && now >= slab->piece[i].again_ns && is_there(slab, i)) {
				return register_piece(worker, slab, i) == KVC_OK;
			}
		}
	}

	return 0;
}

kvc_status_t kvx_pool_memory_map(kvx_worker_t *worker, int fd, size_t bytes, void **p_base)
{
	return (kvc_status_t)kvk_gpu_map(worker->gpu->gpu, fd, bytes, p_base);
}

void kvx_pool_memory_unmap(kvx_worker_t *worker, void *base)
{
	kvk_gpu_unmap(worker->gpu->gpu, base);
}
