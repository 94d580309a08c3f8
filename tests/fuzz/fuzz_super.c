/* Superblocks as a disk may hand them back: as they are, and with a check that fits. */
#include "nvme/format/super.h"

#include "kv/digest.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void decode(const uint8_t *data, size_t size)
{
	kvs_super_t super;
	uint8_t *image;
	size_t len;

	if (kvs_super_init(&super, &kv_env_posix) != KV_OK) {
		return;
	}
	if (kvs_super_decode(&super, data, size) == KV_OK) {
		/* What is taken can be written again, as long as it was. */
		if (kvs_super_encode(&super, &image, &len) != KV_OK || len != size) {
			abort();
		}
		kv_free(&kv_env_posix, image);
	}
	kvs_super_fini(&super);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	uint64_t check;
	uint8_t *copy;

	decode(data, size);
	if (size < 16) {
		return 0;
	}
	copy = malloc(size);
	if (!copy) {
		return 0;
	}
	memcpy(copy, data, size);
	memset(copy + 8, 0, 8);
	check = kv_digest(copy, size);
	memcpy(copy + 8, &check, sizeof check);
	decode(copy, size);
	free(copy);

	return 0;
}
