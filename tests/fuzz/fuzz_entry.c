/* An entry of the lookup buffer, as another engine of the namespace has packed it. What is refused changes nothing that
 * counts; what is accepted lies within the bytes and packs to the same ones. */
#include "kv_test.h"

#include "inproc/lookup_entry.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint8_t *bytes = malloc(size + 1), *again = malloc(size + 1);
	kvx_lookup_entry_t entry;

	kv_assert(bytes && again);
	memcpy(bytes, data, size);
	if (kvx_lookup_entry_unpack(bytes, size, &entry)) {
		kv_assert(entry.n > 0 && kvx_lookup_entry_bytes(&entry) == size);
		kvx_lookup_entry_pack(&entry, again);
		kv_assert(memcmp(bytes, again, size) == 0);
	}
	free(bytes);
	free(again);

	return 0;
}
