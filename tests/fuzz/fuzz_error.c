/* Error bodies: any bytes as one, and any text as a detail. */
#include "kv_test.h"

#include "kv/wire.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1);
	uint8_t body[300];
	kv_slice_t detail;
	uint32_t len;

	if (!text) {
		return 0;
	}
	if (kv_error_decode(data, (uint32_t)size, &detail) == KV_OK) {
		kv_assert(detail.len <= 255);
	}
	memcpy(text, data, size);
	text[size] = '\0';
	kv_assert(kv_error_encode(text, body, sizeof body, &len) == KV_OK);
	kv_assert(kv_error_decode(body, len, &detail) == KV_OK);
	kv_assert(detail.len <= 255);
	free(text);

	return 0;
}
