/* inproc/lookup_entry.h -- the tail of a hand-over that kvx_insert() has made: the tokens, which of them count, and the
 * hidden states, as one string of bytes.
 *
 *   u32 magic, u32 n tokens, u32 flags (bit 0: a roi follows), u32 bytes of hidden; tokens; roi, a byte each; hidden */
#ifndef KVX_INPROC_LOOKUP_ENTRY_H
#define KVX_INPROC_LOOKUP_ENTRY_H

#include <stddef.h>
#include <stdint.h>

#define KVX_ENTRY_MAGIC UINT32_C(0x31455658) /* "XVE1" */

typedef struct kvx_lookup_entry {
	const uint32_t *tokens;
	const uint8_t *roi; /* [n]; NULL: all count */
	const void *hidden;
	uint32_t n, hidden_len;
} kvx_lookup_entry_t;

size_t kvx_lookup_entry_bytes(const kvx_lookup_entry_t *entry);
/* out: of that size, aligned to 4. */
void kvx_lookup_entry_pack(const kvx_lookup_entry_t *entry, void *out);
/* What is in bytes[len], aligned to 4, into which *entry then points. 0: it is not sound. */
int kvx_lookup_entry_unpack(const void *bytes, size_t len, kvx_lookup_entry_t *entry);

#endif
