/* kv/struct.h -- structs of a public API that begin with struct_size and may grow at their end. An older caller's
 * struct is shorter than the library's, a newer one's longer. */
#ifndef KV_STRUCT_H
#define KV_STRUCT_H

#include <stdint.h>
#include <string.h>

/* 0: the caller has not set struct_size, or to less than any field needs. */
static inline int kv_struct_is_set(const void *given)
{
	size_t known;

	memcpy(&known, given, sizeof known);

	return known > sizeof known;
}

/* Fill the caller's struct: as much of full[size] as it has, and its struct_size stays. 0: that is not set, and nothing
 * is filled. */
static inline int kv_struct_fill(void *out, const void *full, size_t size)
{
	size_t known;

	memcpy(&known, out, sizeof known);
	known = known < size ? known : size;
	if (!kv_struct_is_set(out)) {
		return 0;
	}
	memcpy((uint8_t *)out + sizeof known, (const uint8_t *)full + sizeof known, known - sizeof known);

	return 1;
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
