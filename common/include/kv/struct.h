/* kv/struct.h -- structs of a public API that begin with struct_size and may grow at their end. An older caller's
 * struct is shorter than the library's, a newer one's longer. */
#ifndef KV_STRUCT_H
#define KV_STRUCT_H

#include <stdint.h>
#include <string.h>

/* Fill the caller's struct: as much of full[size] as it has, and its struct_size stays. */
static inline void kv_struct_fill(void *out, const void *full, size_t size)
{
	size_t known;

	memcpy(&known, out, sizeof known);
	known = known < size ? known : size;
	if (known > sizeof known) {
		memcpy((uint8_t *)out + sizeof known, (const uint8_t *)full + sizeof known, known - sizeof known);
	}
}

/* Read the caller's struct into out[size]: what it does not have is 0. */
static inline void kv_struct_read(void *out, const void *given, size_t size)
{
	size_t known;

	memcpy(&known, given, sizeof known);
	memset(out, 0, size);
	memcpy(out, given, known < size ? known : size);
}

#endif
