/* Memory that transfers will use, told to the ring thread. */
#include "nvme/nvme.h"

#include <sys/mman.h>

int kvs_region_is_touched(void *base, size_t bytes, unsigned char *page)
{
	size_t pages = bytes / KVS_PAGE;

	/* It is touched from the front: the last page mostly says it all, for a thousandth of the price. */
	if (pages > 0 && mincore((uint8_t *)base + (pages - 1) * KVS_PAGE, KVS_PAGE, page) == 0 && !(page[0] & 1u)) {
		return 0;
	}
	if (mincore(base, pages * KVS_PAGE, page) != 0) {
		return 1;
	}
	for (size_t i = 0; i < pages; i++) {
		if (!(page[i] & 1u)) {
			return 0;
		}
	}

	return 1;
}

/* Places of memory that has gone are used again once the owner knows that it has: it would ask again, and so have the
 * next memory there removed. */
static uint32_t find_free_region(kvs_nvme_t *nvme, uint32_t count, size_t bytes)
{
	for (uint32_t i = 0; i < count; i++) {
		if (atomic_load_explicit(&nvme->regions[i].state, memory_order_relaxed) == KVS_REGION_FREE &&
		    nvme->regions[i].most_bytes >= bytes) {
			return i;
		}
	}

	return count;
}

static void set_state(kvs_nvme_t *nvme, kvs_region_t *region, kvs_region_state_t state)
{
	atomic_store_explicit(&region->state, state, memory_order_release);
	/* One order with the wakeup: it is written, or the reader sees this. */
	atomic_fetch_add(&nvme->region_changes, 1u);
	kvs_wakeup_signal(&nvme->io[0].wakeup);
}

void kvs_nvme_register(kvs_tier_t *tier, void *base, size_t bytes, uint32_t *p_region)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	uint32_t count = atomic_load_explicit(&nvme->region_count, memory_order_relaxed);
	uint32_t at = find_free_region(nvme, count, bytes);

	*p_region = UINT32_MAX;
	if (!nvme->uring || bytes == 0 || at == KVS_MAX_REGIONS) {
		return;
	}

	nvme->regions[at].base = base;
	nvme->regions[at].bytes = bytes;
	*p_region = at;
	if (at < count) {
		set_state(nvme, &nvme->regions[at], KVS_REGION_FRESH);
		return;
	}
	nvme->regions[at].most_bytes = bytes;
	atomic_store(&nvme->region_count, count + 1u);
	kvs_wakeup_signal(&nvme->io[0].wakeup);
}

int kvs_nvme_unregister(kvs_tier_t *tier, uint32_t region)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_region_state_t state;

	if (region >= atomic_load_explicit(&nvme->region_count, memory_order_relaxed)) {
		return 1;
	}
	state = (kvs_region_state_t)atomic_load_explicit(&nvme->regions[region].state, memory_order_acquire);
	if (state == KVS_REGION_LIVE || state == KVS_REGION_FRESH) {
		set_state(nvme, &nvme->regions[region], KVS_REGION_REMOVING);
		return 0;
	}
	if (state == KVS_REGION_GONE) {
		atomic_store_explicit(&nvme->regions[region].state, KVS_REGION_FREE, memory_order_relaxed);
	}

	return state != KVS_REGION_REMOVING;
}

uint32_t kvs_apply_region_changes(kvs_nvme_t *nvme, kvs_ring_region_t *regions, uint32_t count,
				  void (*unregister)(void *ring, uint32_t index), void *ring)
{
	uint32_t more = 0;

	for (uint32_t i = 0; i < count; i++) {
		kvs_region_t *memory = &nvme->regions[i];
		uint32_t state = atomic_load_explicit(&memory->state, memory_order_acquire);

		if (state == KVS_REGION_REMOVING) {
			for (uint32_t piece = 0; piece < regions[i].pieces; piece++) {
				unregister(ring, regions[i].first + piece);
			}
			more -= regions[i].pieces < regions[i].wanted ? 1u : 0u;
			regions[i].pieces = regions[i].wanted = 0;
			atomic_store_explicit(&memory->state, KVS_REGION_GONE, memory_order_release);
		} else if (state == KVS_REGION_FRESH) {
			regions[i].wanted =
				(uint32_t)((memory->bytes + (1u << KVS_PIECE_SHIFT) - 1u) >> KVS_PIECE_SHIFT);
			more++;
			/* When it is leaving again already, the next turn sees it. */
			(void)atomic_compare_exchange_strong(&memory->state, &state, KVS_REGION_LIVE);
		}
	}

	return more;
}
