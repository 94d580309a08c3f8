/* The fused loops on AVX2. Compiled with its own -m flags: nothing here runs before digest.c has asked the CPU. */
#include "digest_ops.h"

#include <immintrin.h>

#define KV_DIGEST_OPS  kv_digest_avx2
#define KV_DIGEST_NAME "avx2"

typedef __m256i vec_t;

static inline vec_t vec_load(const uint8_t *p)
{
	return _mm256_loadu_si256((const __m256i *)(const void *)p);
}

static inline void vec_store(uint8_t *p, vec_t v)
{
	_mm256_storeu_si256((__m256i *)(void *)p, v);
}

static inline void vec_stream(uint8_t *p, vec_t v)
{
	_mm256_stream_si256((__m256i *)(void *)p, v);
}

static inline void vec_fence(void)
{
	_mm_sfence();
}

/* As on AVX-512. */
static inline void vec_leave(void)
{
	_mm256_zeroupper();
}

static inline vec_t vec_mix(vec_t acc, vec_t data, vec_t key)
{
	const vec_t keyed = _mm256_xor_si256(data, key);
	const vec_t product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
	const vec_t swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));

	return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}

static inline vec_t vec_scramble(vec_t acc, vec_t key)
{
	const vec_t prime = _mm256_set1_epi64x(0x9e3779b1);
	const vec_t keyed = _mm256_xor_si256(_mm256_xor_si256(acc, _mm256_srli_epi64(acc, 47)), key);
	const vec_t high = _mm256_mul_epu32(_mm256_srli_epi64(keyed, 32), prime);

	return _mm256_add_epi64(_mm256_mul_epu32(keyed, prime), _mm256_slli_epi64(high, 32));
}

#include "digest_loop.h"
