/* The fused loops on SSE2, which every x86-64 CPU has. */
#include "digest_ops.h"

#include <emmintrin.h>

#define KV_DIGEST_OPS  kv_digest_sse2
#define KV_DIGEST_NAME "sse2"

typedef __m128i vec_t;

static inline vec_t vec_load(const uint8_t *p)
{
	return _mm_loadu_si128((const __m128i *)(const void *)p);
}

static inline void vec_store(uint8_t *p, vec_t v)
{
	_mm_storeu_si128((__m128i *)(void *)p, v);
}

static inline void vec_stream(uint8_t *p, vec_t v)
{
	_mm_stream_si128((__m128i *)(void *)p, v);
}

static inline void vec_fence(void)
{
	_mm_sfence();
}

static inline void vec_leave(void)
{
}

static inline vec_t vec_mix(vec_t acc, vec_t data, vec_t key)
{
	const vec_t keyed = _mm_xor_si128(data, key);
	const vec_t product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
	const vec_t swapped = _mm_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));

	return _mm_add_epi64(acc, _mm_add_epi64(product, swapped));
}

static inline vec_t vec_scramble(vec_t acc, vec_t key)
{
	const vec_t prime = _mm_set1_epi64x(0x9e3779b1);
	const vec_t keyed = _mm_xor_si128(_mm_xor_si128(acc, _mm_srli_epi64(acc, 47)), key);
	const vec_t high = _mm_mul_epu32(_mm_srli_epi64(keyed, 32), prime);

	return _mm_add_epi64(_mm_mul_epu32(keyed, prime), _mm_slli_epi64(high, 32));
}

#include "digest_loop.h"
