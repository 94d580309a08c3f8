#include "inproc/lookup_entry.h"

#include <string.h>

enum { WORDS = 4, WITH_ROI = 1 }; /* of the head; its flags */

size_t kvx_lookup_entry_bytes(const kvx_lookup_entry_t *entry)
{
	return (WORDS + (size_t)entry->n) * sizeof(uint32_t) + (entry->roi ? entry->n : 0u) + entry->hidden_len;
}

void kvx_lookup_entry_pack(const kvx_lookup_entry_t *entry, void *out)
{
	const uint32_t head[WORDS] = {KVX_ENTRY_MAGIC, entry->n, entry->roi ? WITH_ROI : 0, entry->hidden_len};
	uint8_t *at = out;

	memcpy(at, head, sizeof head);
	at += sizeof head;
	memcpy(at, entry->tokens, entry->n * sizeof *entry->tokens);
	at += entry->n * sizeof *entry->tokens;
	for (uint32_t i = 0; entry->roi && i < entry->n; i++) {
		*at++ = entry->roi[i] != 0;
	}
	if (entry->hidden_len > 0) {
		memcpy(at, entry->hidden, entry->hidden_len);
	}
}

int kvx_lookup_entry_unpack(const void *bytes, size_t len, kvx_lookup_entry_t *entry)
{
	const uint32_t *head = bytes;
	const uint8_t *at;

	if (len < WORDS * sizeof *head || head[0] != KVX_ENTRY_MAGIC || head[1] == 0 || head[2] > WITH_ROI) {
		return 0;
	}
	*entry = (kvx_lookup_entry_t){.tokens = head + WORDS, .n = head[1], .hidden_len = head[3]};
	entry->roi = head[2] == WITH_ROI ? bytes : NULL;
	if (kvx_lookup_entry_bytes(entry) != len) {
		return 0;
	}
	at = (const uint8_t *)(entry->tokens + entry->n);
	entry->roi = entry->roi ? at : NULL;
	for (uint32_t i = 0; entry->roi && i < entry->n; i++) {
		if (at[i] > 1) {
			return 0;
		}
	}
	entry->hidden = entry->hidden_len ? (const uint8_t *)bytes + len - entry->hidden_len : NULL;

	return 1;
}
