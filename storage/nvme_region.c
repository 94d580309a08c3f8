/* Memory that transfers will use, told to the ring thread. */
#include "nvme_impl.h"

#include <sys/mman.h>

int kvs_region_is_touched(void *base, size_t bytes, unsigned char *page)
{
	size_t pages = bytes / KVS_PAGE;

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

void kvs_nvme_register(kvs_tier_t *tier, void *base, size_t bytes, uint32_t *p_region)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	uint32_t count = atomic_load_explicit(&nvme->region_count, memory_order_relaxed);

	*p_region = UINT32_MAX;
	if (!nvme->uring || bytes == 0 || count == KVS_MAX_REGIONS) {
		return;
	}

	nvme->regions[count] = (kvs_region_t){.base = base, .bytes = bytes};
	atomic_store_explicit(&nvme->region_count, count + 1u, memory_order_release);
	kvs_bell_ring(&nvme->io[0].bell);
	*p_region = count;
}
