/* Any bytes as an identity text: refused, or exactly the text of this identity; its groups are read or refused. */
#include "kv/identity.h"

#include "kv/env.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static char storage[KV_IDENTITY_MAX_TEXT + 64];
	static char again[KV_IDENTITY_MAX_TEXT + 1];
	kv_identity_t identity;
	kv_group_t groups[4];
	const char *field = NULL;
	uint8_t root[32];
	uint32_t hash_tokens;
	uint32_t count;

	if (kv_identity_parse((const char *)data, size, &identity, storage, sizeof storage, &field) != KV_OK) {
		kv_assert(field != NULL);
		return 0;
	}
	kv_assert(kv_identity_text(&identity, again, sizeof again, NULL) == KV_OK);
	kv_assert(strlen(again) == size && memcmp(again, data, size) == 0);
	kv_assert(kv_identity_root("default", again, size, root) == KV_OK);

	if (kv_identity_groups(&identity, &hash_tokens, groups, KV_COUNT_OF(groups), &count) == KV_OK) {
		kv_assert(hash_tokens > 0 && count > 0 && count <= KV_COUNT_OF(groups));
		for (uint32_t i = 0; i < count; i++) {
			kv_assert(groups[i].block_tokens > 0 && groups[i].block_tokens % hash_tokens == 0);
		}
	}

	return 0;
}
