/* Memory that transfers will use, told to the ring thread. */
#include "nvme_impl.h"

#include <stdio.h>
#include <stdlib.h>

#define PAGE_LINE "KernelPageSize:"

/* Size of the pages under an address, as /proc/self/smaps has it: 4 KiB when it does not say. */
static size_t page_size_at(const void *address)
{
	FILE *maps = fopen("/proc/self/smaps", "re");
	char line[512];
	size_t kib = 4;
	int inside = 0;

	if (!maps) {
		return kib << 10;
	}
	while (fgets(line, sizeof line, maps)) {
		char *end;
		unsigned long start = strtoul(line, &end, 16);

		if (end != line && *end == '-') {
			unsigned long stop = strtoul(end + 1, NULL, 16);

			if (inside) {
				break;
			}
			inside = (uintptr_t)address >= start && (uintptr_t)address < stop;
		} else if (inside && strncmp(line, PAGE_LINE, sizeof PAGE_LINE - 1u) == 0) {
			kib = strtoul(line + sizeof PAGE_LINE - 1u, NULL, 10);
			break;
		}
	}
	fclose(maps);

	return kib << 10;
}

void kvs_nvme_register(kvs_tier_t *tier, void *base, size_t bytes, uint32_t *p_region)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	uint32_t count = atomic_load_explicit(&nvme->region_count, memory_order_relaxed);

	*p_region = UINT32_MAX;
	/* On huge pages one vectored request costs less than two fixed ones (docs/decisions/005-nvme-slots.md). */
	if (!nvme->uring || bytes == 0 || count == KVS_MAX_REGIONS || page_size_at(base) > KVS_PAGE) {
		return;
	}

	nvme->regions[count] = (kvs_region_t){.base = base, .bytes = bytes};
	atomic_store_explicit(&nvme->region_count, count + 1u, memory_order_release);
	kvs_bell_ring(&nvme->io[0].bell);
	*p_region = count;
}
