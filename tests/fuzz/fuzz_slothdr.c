/* Slot headers as a disk may hand them back: any bytes, once as they are and once with a check that fits, so that the
 * fields behind it are reached too. */
#include "nvme/format/slothdr.h"

#include "kv/digest.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const kvs_geometry_t geometry = {
	.block_bytes = 12288, .heads = 2, .leaves = 3, .leaf_bytes = 2048, .page_bytes = 2048};

static void decode(uint8_t *page, size_t n)
{
	const uint64_t *leaves;
	kvs_slothdr_t header;
	uint8_t again[KVS_PAGE];

	if (kvs_slothdr_decode(page, n, &geometry, &header, &leaves) != KV_OK) {
		return;
	}

	/* What is taken is what would have been written, as far as the fixed part and the leaves go. */
	kvs_slothdr_encode(again, &geometry, &header, leaves);
	if (memcmp(again + 16, page + 16, 136 + 48) != 0) {
		abort();
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static _Alignas(4096) uint8_t page[KVS_PAGE];
	size_t n = size < sizeof page ? size : sizeof page;
	uint64_t check;

	memset(page, 0, sizeof page);
	memcpy(page, data, n);
	decode(page, n);
	decode(page, sizeof page);

	memset(page + 8, 0, 8);
	check = kv_digest(page, sizeof page);
	memcpy(page + 8, &check, sizeof check);
	decode(page, sizeof page);

	return 0;
}
