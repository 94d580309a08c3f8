/* The fused loops on AVX-512 (F and BW). Compiled with its own -m flags: nothing here runs before digest.c has
 * asked the CPU. */
#include "digest_ops.h"

#include <immintrin.h>

#define KV_DIGEST_OPS  kv_digest_avx512
#define KV_DIGEST_NAME "avx512"

typedef __m512i vec_t;

static inline vec_t vec_load(const uint8_t *p)
{
	return _mm512_loadu_si512(p);
}

static inline void vec_store(uint8_t *p, vec_t v)
{
	_mm512_storeu_si512(p, v);
}

static inline void vec_stream(uint8_t *p, vec_t v)
{
	_mm512_stream_si512((__m512i *)(void *)p, v);
}

static inline void vec_fence(void)
{
	_mm_sfence();
}

/* Compilers do this at the end of most functions that need it. gcc 12 forgets some of those inlined from xxhash.h, and
 * then all SSE code of the thread runs at a quarter of its speed until other code does it. */
static inline void vec_leave(void)
{
	_mm256_zeroupper();
}

static inline vec_t vec_mix(vec_t acc, vec_t data, vec_t key)
{
	const vec_t keyed = _mm512_xor_si512(data, key);
	const vec_t product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
	const vec_t swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);

	return _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
}

static inline vec_t vec_scramble(vec_t acc, vec_t key)
{
	const vec_t prime = _mm512_set1_epi64(0x9e3779b1);
	const vec_t keyed = _mm512_xor_si512(_mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47)), key);
	const vec_t high = _mm512_mul_epu32(_mm512_srli_epi64(keyed, 32), prime);

	return _mm512_add_epi64(_mm512_mul_epu32(keyed, prime), _mm512_slli_epi64(high, 32));
}

#include "digest_loop.h"
