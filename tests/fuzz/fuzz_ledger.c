/* A ledger of unknown provenance: what passes the check can be walked, and says the same to every reader. */
#include "kvs/ledger.h"

#include "kv/env.h"

#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void walk(const void *base, const kvs_ledger_summary_t *sum)
{
	uint64_t by_state[6] = {0};
	uint64_t slots = 0;
	uint32_t slabs = 0;

	for (uint32_t number = 0; number < ((const kvs_ledger_header_t *)base)->slab_count; number++) {
		const kvs_ledger_slab_t *slab = kvs_ledger_slab(base, number);

		if (!slab) {
			continue; /* it has gone, and later ones stay */
		}
		slabs++;
		for (uint32_t i = 0; i < slab->slots; i++) {
			by_state[kvs_ledger_slots(slab)[i].state]++;
		}
		slots += slab->slots;
		kv_assert(strlen(slab->ns) > 0);
	}
	kv_assert(slabs == sum->slabs && slots == sum->slots);
	kv_assert(memcmp(by_state, sum->by_state, sizeof by_state) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	kvs_ledger_header_t *header = malloc(size ? size : 1);
	kvs_ledger_summary_t sum;
	char detail[128];

	if (!header) {
		return 0;
	}
	memcpy(header, data, size);
	if (size >= sizeof *header && size % 2 == 0) {
		header->total_bytes = size; /* inputs change their size all the time; odd ones keep what they say */
	}

	kv_status_t status = kvs_ledger_check(header, size, &sum, detail, sizeof detail);

	if (status == KV_OK) {
		walk(header, &sum);
	} else {
		kv_assert(status == KV_ERR_FOREIGN || status == KV_ERR_CORRUPT);
	}
	free(header);

	return 0;
}
