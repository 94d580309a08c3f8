/* digest_loop.h -- the fused loops, written once over a vector type; included by one file per instruction set,
 * which defines
 *
 *   vec_t                            8 accumulators of 64 bits are sizeof(vec_t) at a time
 *   vec_load, vec_store, vec_stream  unaligned load, unaligned store, aligned store around the caches
 *   vec_mix(acc, data, key)          XXH3's accumulation of one vector
 *   vec_scramble(acc, key)           XXH3's scramble
 *   vec_fence()                      order streamed stores before later ones
 *   vec_leave()                      leave the vector unit as others expect it; see digest_avx512.c
 *   KV_DIGEST_OPS, KV_DIGEST_NAME    the table to define
 *
 * XXH3 over more than 240 bytes: the input is a row of 64-byte stripes; stripe i is accumulated with the secret at
 * 8 * (i % 16), and after each sixteenth the accumulators are scrambled. The last 1..64 bytes are not a stripe of
 * the row: the final 64 bytes of the input (overlapping, if need be) are accumulated with a secret of their own.
 * Then the accumulators are folded. A run of whole stripes can thus be cut into pieces anywhere.
 *
 * Every byte is read from the source once: what is hashed is what was written, even while another process scribbles
 * over the source. (The final overlap is read again, for the digest alone; its bytes have then been hashed by
 * their stripe too.)
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#define STRIPE        ((size_t)64)
#define BLOCK_STRIPES ((size_t)16)
#define SHORT_MAX     ((size_t)240) /* XXH3 has other formulas up to here */
#define VECS          (STRIPE / sizeof(vec_t))
#define AHEAD         ((size_t)1536) /* prefetch distance in bytes; measured, see docs/decisions/003-digest-loop.md */
#define LOOP_INLINE   static inline __attribute__((always_inline))

#ifdef __clang__
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

/* XXH3's default secret. */
static const uint8_t secret[192] __attribute__((aligned(64))) = {
	0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
	0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
	0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
	0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
	0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
	0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
	0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
	0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
	0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
	0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
	0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

#define SECRET_SCRAMBLE (sizeof secret - STRIPE)
#define SECRET_FINAL    (sizeof secret - STRIPE - 7)
#define SECRET_FOLD     11u

static const uint64_t start_values[8] __attribute__((aligned(64))) = {
	0x00000000c2b2ae3d, 0x9e3779b185ebca87, 0xc2b2ae3d27d4eb4f, 0x165667b19e3779f9,
	0x85ebca77c2b2ae63, 0x0000000085ebca77, 0x27d4eb2f165667c5, 0x000000009e3779b1,
};

typedef struct lanes {
	vec_t v[VECS];
	size_t stripe; /* of the current block of sixteen */
} lanes_t;

LOOP_INLINE void lanes_start(lanes_t *acc)
{
	for (size_t i = 0; i < VECS; i++) {
		acc->v[i] = vec_load((const uint8_t *)start_values + i * sizeof(vec_t));
	}
	acc->stripe = 0;
}

LOOP_INLINE void take_stripe(lanes_t *acc, uint8_t *dst, const uint8_t *src, const uint8_t *key, kv_store_t store)
{
	for (size_t i = 0; i < VECS; i++) {
		const size_t at = i * sizeof(vec_t);
		const vec_t data = vec_load(src + at);

		if (store == KV_STORE_STREAM) {
			vec_stream(dst + at, data);
		} else {
			vec_store(dst + at, data);
		}
		acc->v[i] = vec_mix(acc->v[i], data, vec_load(key + at));
	}
}

LOOP_INLINE void take_final(lanes_t *acc, const uint8_t *last)
{
	for (size_t i = 0; i < VECS; i++) {
		const size_t at = i * sizeof(vec_t);

		acc->v[i] = vec_mix(acc->v[i], vec_load(last + at), vec_load(secret + SECRET_FINAL + at));
	}
}

LOOP_INLINE void scramble(lanes_t *acc)
{
	for (size_t i = 0; i < VECS; i++) {
		acc->v[i] = vec_scramble(acc->v[i], vec_load(secret + SECRET_SCRAMBLE + i * sizeof(vec_t)));
	}
}

/* Memory that is read next goes to the first cache; what is read a hundred kilobytes later would be pushed out of
 * it again. */
typedef enum reach { NEAR, FAR } reach_t;

LOOP_INLINE void fetch(const uint8_t *p, reach_t reach)
{
	if (reach == NEAR) {
		__builtin_prefetch(p, 0, 3);
	} else {
		__builtin_prefetch(p, 0, 2);
	}
}

/* What take_row() does beside hashing: constants wherever it is inlined. */
typedef struct manner {
	kv_store_t store;
	reach_t reach;
} manner_t;

/* `stripes` stripes of the row. For every stripe taken a line at `soon` is prefetched, which moves along with src. */
LOOP_INLINE void take_row(lanes_t *acc, uint8_t *dst, const uint8_t *src, const uint8_t *soon, size_t stripes,
			  manner_t how)
{
	size_t at = 0;

	while (stripes > 0) {
		if (acc->stripe == 0 && stripes >= BLOCK_STRIPES) {
			UNROLLED
			for (size_t i = 0; i < BLOCK_STRIPES; i++, at += STRIPE) {
				fetch(soon + at, how.reach);
				take_stripe(acc, dst + at, src + at, secret + 8 * i, how.store);
			}
			scramble(acc);
			stripes -= BLOCK_STRIPES;
			continue;
		}
		fetch(soon + at, how.reach);
		take_stripe(acc, dst + at, src + at, secret + 8 * acc->stripe, how.store);
		at += STRIPE;
		stripes--;
		if (++acc->stripe == BLOCK_STRIPES) {
			scramble(acc);
			acc->stripe = 0;
		}
	}
}

__extension__ typedef unsigned __int128 wide_t;

static uint64_t fold_pair(const uint64_t *acc, const uint8_t *key)
{
	uint64_t k[2];
	wide_t product;

	memcpy(k, key, sizeof k);
	product = (wide_t)(acc[0] ^ k[0]) * (acc[1] ^ k[1]);

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

LOOP_INLINE uint64_t lanes_fold(const lanes_t *lanes, size_t n)
{
	uint64_t acc[8] __attribute__((aligned(64)));
	uint64_t h = n * 0x9e3779b185ebca87;

	for (size_t i = 0; i < VECS; i++) {
		vec_store((uint8_t *)acc + i * sizeof(vec_t), lanes->v[i]);
	}
	for (size_t i = 0; i < 4; i++) {
		h += fold_pair(acc + 2 * i, secret + SECRET_FOLD + 16 * i);
	}
	h ^= h >> 37;
	h *= 0x165667919e3779f9;

	return h ^ h >> 32;
}

static uint64_t plain_digest(const void *data, size_t n)
{
	const uint64_t digest = XXH3_64bits(data, n);

	vec_leave();

	return digest;
}

/* Up to SHORT_MAX bytes, over a copy of our own. */
static uint64_t copy_short(void *dst, const void *src, size_t n)
{
	uint8_t once[SHORT_MAX];

	if (n == 0) {
		return XXH3_64bits(NULL, 0);
	}
	memcpy(once, src, n);
	memcpy(dst, once, n);

	return XXH3_64bits(once, n);
}

LOOP_INLINE uint64_t copy_long(uint8_t *dst, const uint8_t *src, size_t n, const uint8_t *next, kv_store_t store)
{
	const size_t row = (n - 1) / STRIPE;
	const size_t rest = n - row * STRIPE;
	uint8_t last[STRIPE] __attribute__((aligned(64)));
	lanes_t acc;

	lanes_start(&acc);
	take_row(&acc, dst, src, next ? next : src + AHEAD, row, (manner_t){store, NEAR});
	memcpy(last, src + n - STRIPE, STRIPE);
	take_final(&acc, last);
	if (rest == STRIPE && store == KV_STORE_STREAM) {
		for (size_t i = 0; i < VECS; i++) {
			vec_stream(dst + row * STRIPE + i * sizeof(vec_t), vec_load(last + i * sizeof(vec_t)));
		}
	} else {
		memcpy(dst + row * STRIPE, last + STRIPE - rest, rest);
	}

	return lanes_fold(&acc, n);
}

static uint64_t copy_leaf(void *dst, const void *src, size_t n, const uint8_t *next, kv_store_t store)
{
	uint64_t digest;

	if (n <= SHORT_MAX) {
		digest = copy_short(dst, src, n);
	} else if (store == KV_STORE_STREAM) {
		digest = copy_long(dst, src, n, next, KV_STORE_STREAM);
	} else {
		digest = copy_long(dst, src, n, next, KV_STORE_PLAIN);
	}
	vec_leave();

	return digest;
}

/* ---- leaves of several pieces ---------------------------------------------------------------- */

/* Walks the pieces of a leaf in order. */
typedef struct cursor {
	const kv_copy_run_t *runs;
	size_t count;
	kv_run_order_t order;
	size_t run;
	size_t piece;
} cursor_t;

/* Steps to the next piece; 0 after the last. */
LOOP_INLINE int cursor_next(cursor_t *c)
{
	if (c->order == KV_RUNS_SEQUENTIAL) {
		if (++c->piece < c->runs[c->run].pieces) {
			return 1;
		}
		c->piece = 0;
		return ++c->run < c->count;
	}
	if (++c->run < c->count) {
		return 1;
	}
	c->run = 0;

	return ++c->piece < c->runs[0].pieces;
}

LOOP_INLINE uint8_t *cursor_dst(const cursor_t *c)
{
	return (uint8_t *)c->runs[c->run].dst + c->piece * c->runs[c->run].dst_stride;
}

LOOP_INLINE const uint8_t *cursor_src(const cursor_t *c)
{
	return (const uint8_t *)c->runs[c->run].src + c->piece * c->runs[c->run].src_stride;
}

/* How far ahead of a byte lies the one read about AHEAD bytes later: in the same piece, or at the same place of a
 * later one. */
LOOP_INLINE size_t run_ahead(const kv_copy_run_t *run)
{
	if (run->piece >= AHEAD) {
		return AHEAD;
	}

	return (AHEAD / run->piece) * run->src_stride;
}

static size_t desc_total(const kv_copy_desc_t *desc, int *p_whole)
{
	size_t total = 0;

	*p_whole = 1;
	for (size_t i = 0; i < desc->count; i++) {
		total += desc->runs[i].piece * desc->runs[i].pieces;
		*p_whole = *p_whole && desc->runs[i].piece % STRIPE == 0;
	}

	return total;
}

/* Pieces that are not whole stripes go through a small buffer and XXH3's streaming interface. */
static uint64_t copy_runs_odd(const kv_copy_desc_t *desc)
{
	cursor_t c = {desc->runs, desc->count, desc->order, 0, 0};
	uint8_t once[1024];
	XXH3_state_t state;

	XXH3_64bits_reset(&state);
	do {
		const size_t piece = c.runs[c.run].piece;

		for (size_t at = 0; at < piece; at += sizeof once) {
			const size_t n = piece - at < sizeof once ? piece - at : sizeof once;

			memcpy(once, cursor_src(&c) + at, n);
			memcpy(cursor_dst(&c) + at, once, n);
			XXH3_64bits_update(&state, once, n);
		}
	} while (cursor_next(&c));

	return XXH3_64bits_digest(&state);
}

LOOP_INLINE uint64_t copy_runs_whole(const kv_copy_desc_t *desc, size_t total, manner_t how)
{
	cursor_t c = {desc->runs, desc->count, desc->order, 0, 0};
	size_t done = 0;
	lanes_t acc;
	int more;

	lanes_start(&acc);
	do {
		const kv_copy_run_t *run = &c.runs[c.run];
		uint8_t *dst = cursor_dst(&c);
		const uint8_t *src = cursor_src(&c);
		const uint8_t *soon = desc->next ? desc->next + done : src + run_ahead(run);
		size_t row = run->piece / STRIPE;

		more = cursor_next(&c);
		row -= more ? 0 : 1;
		take_row(&acc, dst, src, soon, row, how);
		if (!more) {
			take_stripe(&acc, dst + row * STRIPE, src + row * STRIPE, secret + SECRET_FINAL, how.store);
		}
		done += run->piece;
	} while (more);

	return lanes_fold(&acc, total);
}

static uint64_t copy_runs(const kv_copy_desc_t *desc, kv_store_t store)
{
	int whole;
	const size_t total = desc_total(desc, &whole);
	uint64_t digest;

	if (!whole || total <= SHORT_MAX) {
		digest = copy_runs_odd(desc);
	} else if (store == KV_STORE_PLAIN) {
		digest = copy_runs_whole(desc, total, (manner_t){KV_STORE_PLAIN, NEAR});
	} else if (desc->next && desc->runs->src_stride != desc->runs->piece) {
		digest = copy_runs_whole(desc, total, (manner_t){KV_STORE_STREAM, FAR});
	} else {
		digest = copy_runs_whole(desc, total, (manner_t){KV_STORE_STREAM, NEAR});
	}
	vec_leave();

	return digest;
}

/* ---- plain copy ------------------------------------------------------------------------------ */

static void stream_only(void *dst, const void *src, size_t n)
{
	uint8_t *to = dst;
	const uint8_t *from = src;

	for (size_t at = 0; at < n; at += STRIPE) {
		__builtin_prefetch(from + at + AHEAD);
		for (size_t i = 0; i < VECS; i++) {
			vec_stream(to + at + i * sizeof(vec_t), vec_load(from + at + i * sizeof(vec_t)));
		}
	}
	vec_leave();
}

static void fence(void)
{
	vec_fence();
}

const kv_digest_ops_t KV_DIGEST_OPS = {KV_DIGEST_NAME, plain_digest, copy_leaf, copy_runs, stream_only, fence};
