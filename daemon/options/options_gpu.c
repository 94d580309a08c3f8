/* The options gpu.*: do they fit together? */
#include "gpu/wire.h"
#include "options.h"

#include <stdio.h>
#include <string.h>

#define DEVICES 8u

static kv_status_t check_word(const kvd_options_t *options, uint32_t i, const char *word, size_t len, char *why,
			      size_t cap)
{
	const char *other;
	const int is_all = len == 3 && memcmp(word, "all", 3) == 0;
	const int is_fake = len == sizeof KVD_GPU_FAKE && kvd_gpu_is_fake(word) && word[len - 1] >= '0' &&
			    word[len - 1] < '0' + (int)DEVICES;
	const int is_uuid = len > 4 && strncmp(word, "GPU-", 4) == 0 && kvd_gpu_uuid_ok(word, len);

	if (!is_all && !is_fake && !is_uuid) {
		snprintf(why, cap, "gpu.devices: \"%.*s\" is neither all nor a UUID (GPU-...) nor fake-0 to fake-7",
			 (int)len, word);
		return KV_ERR_CONFIG;
	}
	if (is_all && strcmp(options->gpu_devices, "all") != 0) {
		snprintf(why, cap, "gpu.devices: all stands alone");
		return KV_ERR_CONFIG;
	}
	for (uint32_t j = 0; j < i; j++) {
		if (kvd_list_word(options->gpu_devices, j, &other) == len && memcmp(word, other, len) == 0) {
			snprintf(why, cap, "gpu.devices: \"%.*s\" is there twice", (int)len, word);
			return KV_ERR_CONFIG;
		}
	}

	return KV_OK;
}

kv_status_t kvd_gpu_options_check(const kvd_options_t *options, char *why, size_t cap)
{
	const char *word;
	kv_status_t status = KV_OK;
	uint32_t count = 0;
	size_t len;

	if (options->gpu_size == 0) {
		return KV_OK;
	}
	if (options->gpu_slab_size % KVD_GPU_GRAIN != 0) {
		snprintf(why, cap, "gpu.slab_size: %llu bytes are not a multiple of 2MiB",
			 (unsigned long long)options->gpu_slab_size);
		return KV_ERR_CONFIG;
	}
	if (options->gpu_slab_size > options->gpu_size) {
		snprintf(why, cap, "gpu.slab_size is larger than gpu.size (%llu and %llu bytes); make it smaller",
			 (unsigned long long)options->gpu_slab_size, (unsigned long long)options->gpu_size);
		return KV_ERR_CONFIG;
	}
	for (; status == KV_OK && (len = kvd_list_word(options->gpu_devices, count, &word)) > 0; count++) {
		status = check_word(options, count, word, len, why, cap);
	}
	if (status == KV_OK && (count == 0 || count > DEVICES)) {
		snprintf(why, cap, "gpu.devices: 1 to %u devices, or all", DEVICES);
		status = KV_ERR_CONFIG;
	}

	return status;
}
