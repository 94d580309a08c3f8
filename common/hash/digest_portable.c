/* The fused loops in plain C: every other machine, and the one the others are compared with. */
#include "digest_ops.h"

#include <stdatomic.h>

#define KV_DIGEST_OPS  kv_digest_portable
#define KV_DIGEST_NAME "portable"

#if defined(__x86_64__)
#define XXH_VECTOR XXH_SCALAR /* here it is a reference, elsewhere the library knows best */
#endif

/* XXH3 adds each lane's data to its neighbour: two lanes are the least that closes over that. */
typedef struct vec {
	uint64_t a;
	uint64_t b;
} vec_t;

static inline vec_t vec_load(const uint8_t *p)
{
	vec_t v;

	memcpy(&v, p, sizeof v);

	return v;
}

static inline void vec_store(uint8_t *p, vec_t v)
{
	memcpy(p, &v, sizeof v);
}

static inline void vec_stream(uint8_t *p, vec_t v)
{
	memcpy(p, &v, sizeof v);
}

static inline void vec_fence(void)
{
	atomic_thread_fence(memory_order_release);
}

static inline void vec_leave(void)
{
}

static inline uint64_t lane_product(uint64_t keyed)
{
	return (keyed & UINT32_MAX) * (keyed >> 32);
}

static inline vec_t vec_mix(vec_t acc, vec_t data, vec_t key)
{
	acc.a += lane_product(data.a ^ key.a) + data.b;
	acc.b += lane_product(data.b ^ key.b) + data.a;

	return acc;
}

static inline vec_t vec_scramble(vec_t acc, vec_t key)
{
	const uint64_t prime = 0x9e3779b1;

	acc.a = (acc.a ^ acc.a >> 47 ^ key.a) * prime;
	acc.b = (acc.b ^ acc.b >> 47 ^ key.b) * prime;

	return acc;
}

#include "digest_loop.h"
