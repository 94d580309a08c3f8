/* SHA-256 compression with x86's SHA instructions. The state stays in registers from block to block and from unit
 * to unit.
 *
 * The instructions want the eight state words as ABEF and CDGH; four rounds take four message words, and the
 * message schedule of the rounds to come is made beside them. */
#include "key_sha.h"

#include "kv/key.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

#define SHA_TARGET __attribute__((target("sha,sse4.1,ssse3")))
#define SHA_INLINE static inline __attribute__((always_inline)) SHA_TARGET

typedef struct sha_regs {
	__m128i abef;
	__m128i cdgh;
} sha_regs_t;

static const uint32_t round_constants[64] __attribute__((aligned(16))) = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

SHA_INLINE __m128i swap_words(__m128i x)
{
	return _mm_shuffle_epi8(x, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

SHA_INLINE sha_regs_t load_state(const uint32_t state[8])
{
	__m128i dcba = _mm_loadu_si128((const __m128i *)(const void *)state);
	__m128i hgfe = _mm_loadu_si128((const __m128i *)(const void *)(state + 4));
	__m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
	__m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);

	return (sha_regs_t){_mm_alignr_epi8(cdab, efgh, 8), _mm_blend_epi16(efgh, cdab, 0xf0)};
}

SHA_INLINE void store_state(uint32_t state[8], sha_regs_t r)
{
	__m128i feba = _mm_shuffle_epi32(r.abef, 0x1b);
	__m128i dchg = _mm_shuffle_epi32(r.cdgh, 0xb1);

	_mm_storeu_si128((__m128i *)(void *)state, _mm_blend_epi16(feba, dchg, 0xf0));
	_mm_storeu_si128((__m128i *)(void *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* Words A..D, big-endian, straight from the registers: ABEF and CDGH hold A, B and C, D in their upper halves,
 * last word first. */
SHA_INLINE void store_key(kv_key_t *key, sha_regs_t r)
{
	__m128i abcd = _mm_unpackhi_epi64(r.cdgh, r.abef);

	abcd = _mm_shuffle_epi8(abcd, _mm_set_epi64x(0x0001020304050607, 0x08090a0b0c0d0e0f));
	_mm_storeu_si128((__m128i *)(void *)key->b, abcd);
}

/* Four rounds with the message words w, which are also the newest group of the schedule. */
SHA_INLINE sha_regs_t four_rounds(sha_regs_t r, __m128i w, unsigned group)
{
	__m128i wk =
		_mm_add_epi32(w, _mm_load_si128((const __m128i *)(const void *)(round_constants + (size_t)4 * group)));

	r.cdgh = _mm_sha256rnds2_epu32(r.cdgh, r.abef, wk);
	r.abef = _mm_sha256rnds2_epu32(r.abef, r.cdgh, _mm_shuffle_epi32(wk, 0x0e));

	return r;
}

/* The next four schedule words from the last sixteen (a oldest). */
SHA_INLINE __m128i schedule(__m128i a, __m128i b, __m128i c, __m128i d)
{
	__m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(a, b), _mm_alignr_epi8(d, c, 4));

	return _mm_sha256msg2_epu32(sum, d);
}

SHA_INLINE sha_regs_t compress(sha_regs_t r, __m128i a, __m128i b, __m128i c, __m128i d)
{
	sha_regs_t in = r;

	r = four_rounds(r, a, 0);
	r = four_rounds(r, b, 1);
	r = four_rounds(r, c, 2);
	r = four_rounds(r, d, 3);
#define SIXTEEN_ROUNDS(group)                                                                                          \
	a = schedule(a, b, c, d);                                                                                      \
	r = four_rounds(r, a, group);                                                                                  \
	b = schedule(b, c, d, a);                                                                                      \
	r = four_rounds(r, b, (group) + 1);                                                                            \
	c = schedule(c, d, a, b);                                                                                      \
	r = four_rounds(r, c, (group) + 2);                                                                            \
	d = schedule(d, a, b, c);                                                                                      \
	r = four_rounds(r, d, (group) + 3)
	SIXTEEN_ROUNDS(4);
	SIXTEEN_ROUNDS(8);
	SIXTEEN_ROUNDS(12);
#undef SIXTEEN_ROUNDS

	return (sha_regs_t){_mm_add_epi32(r.abef, in.abef), _mm_add_epi32(r.cdgh, in.cdgh)};
}

SHA_INLINE sha_regs_t compress_at(sha_regs_t r, const void *data)
{
	const __m128i *p = data;

	return compress(r, swap_words(_mm_loadu_si128(p)), swap_words(_mm_loadu_si128(p + 1)),
			swap_words(_mm_loadu_si128(p + 2)), swap_words(_mm_loadu_si128(p + 3)));
}

static SHA_TARGET void shani_blocks(uint32_t state[8], const uint8_t *data, size_t blocks)
{
	sha_regs_t r = load_state(state);

	for (size_t i = 0; i < blocks; i++) {
		r = compress_at(r, data + 64 * i);
	}
	store_state(state, r);
}

/* Is KV_TOKEN_REFUSED among these sixteen? */
SHA_INLINE int refused(const uint32_t *tokens)
{
	const __m128i *p = (const __m128i *)(const void *)tokens;
	const __m128i ones = _mm_set1_epi32(-1);
	__m128i hit = _mm_cmpeq_epi32(_mm_loadu_si128(p), ones);

	for (int i = 1; i < 4; i++) {
		hit = _mm_or_si128(hit, _mm_cmpeq_epi32(_mm_loadu_si128(p + i), ones));
	}

	return !_mm_testz_si128(hit, hit);
}

static SHA_TARGET uint32_t shani_chain(uint32_t state[8], const uint32_t *tokens, uint32_t unit_blocks, uint32_t units,
				       kv_key_t *keys)
{
	sha_regs_t r = load_state(state);
	uint32_t done;

	for (done = 0; done < units; done++) {
		sha_regs_t next = r;
		int bad = 0;

		for (uint32_t i = 0; i < unit_blocks; i++) {
			bad |= refused(tokens);
			next = compress_at(next, tokens);
			tokens += 16;
		}
		if (bad) {
			break;
		}
		r = next;
		store_key(&keys[done], r);
	}
	store_state(state, r);

	return done;
}

const kv_sha_ops_t *kv_sha_native(void)
{
	static const kv_sha_ops_t ops = {"sha-ni", shani_blocks, shani_chain};
	const unsigned sha_bit = 1u << 29;
	unsigned a = 0;
	unsigned b = 0;
	unsigned c = 0;
	unsigned d = 0;

	if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & sha_bit) || !__builtin_cpu_supports("sse4.1")) {
		return NULL;
	}

	return &ops;
}

#else

const kv_sha_ops_t *kv_sha_native(void)
{
	return NULL;
}

#endif
