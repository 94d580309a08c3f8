/* kvk/bf16.h -- BF16: the upper half of an fp32, rounded to nearest, ties to even. Every NaN becomes 0x7fff, as in
 * CUDA. */
#ifndef KVK_BF16_H
#define KVK_BF16_H

#include <stdint.h>
#include <string.h>

typedef uint16_t kvk_bf16_t;

static inline float kvk_bf16_to_float(kvk_bf16_t value)
{
	const uint32_t bits = (uint32_t)value << 16;
	float out;

	memcpy(&out, &bits, sizeof out);

	return out;
}

static inline kvk_bf16_t kvk_bf16_round(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof bits);
	if ((bits & 0x7fffffffu) > 0x7f800000u) {
		return 0x7fff;
	}

	return (kvk_bf16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

#endif
