#include "caps.h"

static uint32_t find_cap(const kvs_caps_t *caps, const char *ns)
{
	uint32_t i = 0;

	while (i < caps->count && strcmp(caps->of[i].ns, ns) != 0) {
		i++;
	}

	return i;
}

kv_status_t kvs_caps_set(kvs_caps_t *caps, const char *ns, uint64_t bytes)
{
	uint32_t i = find_cap(caps, ns);
	size_t len = strlen(ns);

	if (i == KVS_CAPS || len >= sizeof caps->of[i].ns) {
		return KV_ERR_LIMIT;
	}
	memcpy(caps->of[i].ns, ns, len + 1);
	caps->of[i].bytes = bytes;
	caps->count += i == caps->count;

	return KV_OK;
}

uint64_t kvs_caps_left(const kvs_caps_t *caps, kvs_tier_t *tier, uint32_t slot_class, uint32_t class_count)
{
	const char *ns = caps->count ? kvs_class_ns(tier, slot_class) : NULL;
	uint32_t i = ns ? find_cap(caps, ns) : caps->count;
	uint64_t used = 0;

	if (i == caps->count || caps->of[i].bytes == UINT64_MAX) {
		return UINT64_MAX;
	}
	for (uint32_t c = 0; c < class_count; c++) {
		used += strcmp(kvs_class_ns(tier, c), ns) == 0 ? kvs_class_bytes(tier, c) : 0;
	}

	return caps->of[i].bytes > used ? caps->of[i].bytes - used : 0;
}
