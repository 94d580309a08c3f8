/* While the engine is idle, pages of its cache and of the pool enter this process's page table, so that the first load
 * does not wait for them. Never while it computes: threads that compute in lockstep all wait for the one whose core
 * this takes.
 *
 * What the engine has written stays as it is. Memory that cannot be touched like that (a device's, or on an old kernel)
 * is left alone. */
#include "worker/transfer/prefault.h"
#include "worker/cuda/pool_memory.h"

#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#define PAGE ((uintptr_t)4096)
#define STEP ((uintptr_t)2 << 20) /* a job that arrives waits for one step at most */

/* Bytes of one layer's blocks, from the first to the last. */
static size_t layer_span(const kvx_wgroup_t *group)
{
	const kvk_paged_t *paged = &group->paged;
	const size_t bytes = group->geometry.page_bytes * (size_t)paged->heads;
	const size_t stride = paged->block_stride ? paged->block_stride : bytes;

	return stride * (paged->blocks - 1) + bytes;
}

/* The layer lies between the blocks of the group's first layer, which has been touched from end to end. */
static int lies_within_first(const kvk_paged_t *paged, uint32_t layer, size_t span)
{
	const uintptr_t first = (uintptr_t)paged->base[0], at = (uintptr_t)paged->base[layer];

	return layer > 0 && at >= first && at - first < span;
}

/* Touch a little more of the group; 0: there is no more. */
static int touch_group(kvx_worker_t *worker, const kvx_wgroup_t *group)
{
	const kvk_paged_t *paged = &group->paged;
	kvx_wprefault_t *p = &worker->prefaulted;
	const size_t span = layer_span(group);
	uintptr_t begin, end, stop;

	while (p->layer < paged->layers && lies_within_first(paged, p->layer, span)) {
		p->layer++;
	}
	if (p->layer == paged->layers) {
		return 0;
	}

	begin = ((uintptr_t)paged->base[p->layer] + p->at) & ~(PAGE - 1);
	stop = ((uintptr_t)paged->base[p->layer] + span + PAGE - 1) & ~(PAGE - 1);
	end = (begin + STEP) & ~(STEP - 1);
	end = end < stop ? end : stop;
	if (p->at == 0) {
		(void)madvise((void *)begin, stop - begin, MADV_HUGEPAGE);
	}
	(void)madvise((void *)begin, end - begin, MADV_POPULATE_WRITE);
	p->at = end - (uintptr_t)paged->base[p->layer];
	if (end == stop) {
		p->layer++;
		p->at = 0;
	}

	return 1;
}

void kvx_prefault_defer(kvx_worker_t *worker, uint64_t ns)
{
	atomic_store_explicit(&worker->idle_from, kvx_worker_now_ns() + ns, memory_order_relaxed);
}

int kvx_prefault_step(kvx_worker_t *worker)
{
	kvx_wprefault_t *p = &worker->prefaulted;

	if (worker->gpu) {
		return kvx_pool_memory_register_some(worker); /* that touches it too; the cache is the device's */
	}
	if (!worker->prefault || kvx_worker_now_ns() < atomic_load_explicit(&worker->idle_from, memory_order_relaxed)) {
		return 0;
	}
	while (p->group < worker->group_count) {
		if (touch_group(worker, &worker->groups[p->group])) {
			return 1;
		}
		*p = (kvx_wprefault_t){.group = p->group + 1};
	}

	return kvc_prefault(worker->kvc, STEP) > 0;
}
