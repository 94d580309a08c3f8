/* attention_wide.cuh -- attention of tiles of more than 64 virtual rows, for sm_90a: the matrix instructions of a warp
 * group, 64 rows each, of two groups that share the keys and values.
 *
 * Virtual rows, halves and their order are as in attention.cuh, and so is each row's arithmetic: products of these
 * instructions have the bits of those of a warp (bench/gpu/gpu_nn attention-right compares the kernels). A third warp
 * group loads. Half h (K of tile 0, V of tile 0, K of tile 1, ...) is fill h / SLOTS of slot h % SLOTS:
 *
 *   full[s]   4 arrivals a fill: of each loading warp, when its pieces have come; parity fill % 2
 *   empty[s]  8 arrivals a fill: of each multiplying warp, when its instructions have read the slot; before fill f,
 *             fill f - 1 is waited for; that of fill 0 counts as completed
 *
 * While a group makes weights of scores, its products of the tile before with values run, and so do those of the other
 * group. To give back V of tile j - 1 a group waits for K of tile j, the next half: so SLOTS - 1 halves at most may be
 * on their way to shared memory before the first of them is announced.
 *
 * In a slot the 64 inputs of a column lie behind each other, a row of 128 bytes a token: keys as rows of a factor with
 * its inputs side by side, values as one with its outputs side by side ("MN-major"), in the swizzle of 128 bytes.
 */
#ifndef KVK_NN_ATTENTION_WIDE_CUH
#define KVK_NN_ATTENTION_WIDE_CUH

#include "attention.cuh"
#include "nn/device/attention.h"
#include "nn/device/wgmma.cuh"

enum : uint32_t {
	ATTENTION_WIDE_AHEAD = 5, /* halves that are on their way */
	ATTENTION_WIDE_PITCH = 128,
	ATTENTION_COLUMN = ATTENTION_KEYS * ATTENTION_WIDE_PITCH, /* bytes */
};

static_assert(ATTENTION_WIDE_AHEAD < KVK_NN_ATTENTION_WIDE_SLOTS, "the ring stands still");

struct attention_ring {
	uint32_t slots; /* shared address, a multiple of 1,024 */
	uint64_t *full, *empty;
};

template <uint32_t D> static __device__ __forceinline__ uint32_t attention_slot_at(const attention_ring &ring, uint32_t half)
{
	return ring.slots + half % KVK_NN_ATTENTION_WIDE_SLOTS * KVK_NN_ATTENTION_SLOT(D);
}

static __device__ __forceinline__ void attention_await_half(const attention_ring &ring, uint32_t half)
{
	barrier_wait(&ring.full[half % KVK_NN_ATTENTION_WIDE_SLOTS], half / KVK_NN_ATTENTION_WIDE_SLOTS & 1u);
}

static __device__ __forceinline__ void attention_give_back(const attention_ring &ring, uint32_t half)
{
	wgmma::arrive(&ring.empty[half % KVK_NN_ATTENTION_WIDE_SLOTS]);
}

/* ---- loading --------------------------------------------------------------------------------- */

/* This warp's pieces of that half have come; they were written as threads write, and matrix instructions read as the
 * copy engine does. */
static __device__ __forceinline__ void attention_announce(const attention_ring &ring, uint32_t half)
{
	bulk_fence();
	wgmma::arrive(&ring.full[half % KVK_NN_ATTENTION_WIDE_SLOTS]);
}

template <uint32_t D>
static __device__ __forceinline__ void attention_feed_wide(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, const attention_ring &ring)
{
	typedef attention_feed<D, 128u, KVK_NN_ATTENTION_WIDE_SLOTS, ATTENTION_WIDE_PITCH> feed;
	constexpr uint32_t SLOTS = feed::SLOTS, AHEAD = ATTENTION_WIDE_AHEAD;
	feed f = attention_open<feed>(a, tile, ring.slots);
	const uint32_t halves = (f.last / ATTENTION_KEYS + 1u) * 2u;

	for (uint32_t half = 0; half < halves; half++) {
		const uint32_t position = half / 2u * ATTENTION_KEYS;

		if (half >= AHEAD) {
			attention_wait<AHEAD - 1u>();
			attention_announce(ring, half - AHEAD);
		}
		barrier_wait(&ring.empty[half % SLOTS], (half / SLOTS & 1u) ^ 1u);
		if (half % 2u == 0) {
			attention_copy_next<0>(a, f, position);
		} else {
			attention_copy_next<1>(a, f, position);
		}
	}
	attention_wait<0>();
	for (uint32_t half = halves > AHEAD ? halves - AHEAD : 0; half < halves; half++) {
		attention_announce(ring, half);
	}
}

/* ---- multiplying ----------------------------------------------------------------------------- */

#define S4(n)	"+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define S32(n)	S4(n), S4(n + 1), S4(n + 2), S4(n + 3), S4(n + 4), S4(n + 5), S4(n + 6), S4(n + 7)

/* d [+]= 64 rows x 16 inputs, which are in registers, times 64 outputs; OUTPUTS: these lie side by side. */
template <int OUTPUTS>
static __device__ __forceinline__ void attention_multiply_64(float (&d)[8][4], const uint32_t (&x)[4], uint64_t w, uint32_t add)
{
	asm volatile("{\n"
		     ".reg .pred add;\n"
		     "setp.ne.b32 add, %37, 0;\n"
		     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
		     "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31},"
		     "{%32,%33,%34,%35}, %36, add, 1, 1, %38;\n"
		     "}\n"
		     : S32(0)
		     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w), "r"(add), "n"(OUTPUTS)
		     : "memory");
}

/* d += 64 rows x 16 inputs times 128 outputs that lie side by side. */
static __device__ __forceinline__ void attention_multiply_128(float (&d)[16][4], const uint32_t (&x)[4], uint64_t w)
{
	asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
		     "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
		     "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
		     "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
		     "{%64,%65,%66,%67}, %68, 1, 1, 1, 1;\n"
		     : S32(0), S32(8)
		     : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "l"(w)
		     : "memory");
}

#undef S4
#undef S32

/* Scores of a tile of keys are enqueued. */
template <uint32_t D>
static __device__ __forceinline__ void attention_enqueue_scores(const uint32_t (&q)[D / 16u][4], uint32_t keys, float (&s)[8][4])
{
	wgmma::hold<32>(s[0]);
	wgmma::open();
#pragma unroll
	for (uint32_t k = 0; k < D / 16u; k++) {
		attention_multiply_64<0>(s, q[k], wgmma::describe(keys + k / 4u * ATTENTION_COLUMN) + k % 4u * 2u, k);
	}
	wgmma::close();
}

/* Weights of 64 keys times their values. */
template <uint32_t D>
static __device__ __forceinline__ void attention_enqueue_outputs(const uint32_t (&p)[4][4], uint32_t values, float (&o)[D / 8u][4])
{
	wgmma::hold<D / 2u>(o[0]);
	wgmma::open();
#pragma unroll
	for (uint32_t k = 0; k < 4u; k++) {
		const uint64_t w = wgmma::describe(values + k * 16u * ATTENTION_WIDE_PITCH, ATTENTION_COLUMN);

		if constexpr (D == 128u) {
			attention_multiply_128(o, p[k], w);
		} else {
			attention_multiply_64<1>(o, p[k], w, 1);
		}
	}
	wgmma::close();
}

template <uint32_t D>
static __device__ __forceinline__ void attention_weigh_scores(attention_rows<D> &r, uint32_t base, float (&s)[8][4], float (&rescale)[2])
{
	if (base + ATTENTION_KEYS - 1u > r.first) {
		attention_mask(r, base, s);
	}
	attention_soften(r, s, rescale);
}

/* Tiles of keys that some row of this warp group looks at. */
static __device__ __forceinline__ uint32_t attention_count_tiles(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, uint32_t v)
{
	const uint32_t group = a.shape.heads / a.shape.kv_heads;

	return v / group < tile.rows ? (tile.position + min((v + 63u) / group, tile.rows - 1u)) / ATTENTION_KEYS + 1u : 0;
}

/* Each loading warp announces halves in their order: where the keys of a tile have come, the values before them have,
 * too. */
template <uint32_t D>
static __device__ __forceinline__ void attention_sum_rows(const attention_ring &ring, const uint32_t (&q)[D / 16u][4], uint32_t tiles,
							  attention_rows<D> &r)
{
	float s[8][4] = {}, rescale[2];
	uint32_t p[4][4];

	attention_await_half(ring, 0);
	attention_enqueue_scores<D>(q, attention_slot_at<D>(ring, 0), s);
	wgmma::wait<0>();
	wgmma::hold<32>(s[0]);
	attention_give_back(ring, 0);
	attention_weigh_scores(r, 0, s, rescale);
	attention_round(s, p);
	for (uint32_t tile = 1; tile < tiles; tile++) {
		const uint32_t keys = tile * 2u, values = keys - 1u;

		attention_await_half(ring, keys);
		attention_enqueue_scores<D>(q, attention_slot_at<D>(ring, keys), s);
		attention_enqueue_outputs<D>(p, attention_slot_at<D>(ring, values), r.o);
		wgmma::wait<1>();
		wgmma::hold<32>(s[0]);
		attention_give_back(ring, keys);
		attention_weigh_scores(r, tile * ATTENTION_KEYS, s, rescale);
		wgmma::wait<0>();
		wgmma::hold<D / 2u>(r.o[0]);
		attention_give_back(ring, values);
		attention_rescale(r, rescale);
		attention_round(s, p);
	}
	attention_await_half(ring, tiles * 2u - 1u);
	attention_enqueue_outputs<D>(p, attention_slot_at<D>(ring, tiles * 2u - 1u), r.o);
	wgmma::wait<0>();
	wgmma::hold<D / 2u>(r.o[0]);
	attention_give_back(ring, tiles * 2u - 1u);
}

/* By one warp group of two. Halves that it does not look at are given back, too. */
template <uint32_t D>
static __device__ __forceinline__ void attention_compute_wide(const kvk_nn_attention_t &a, const kvk_nn_tile_t &tile, const attention_ring &ring)
{
	const uint32_t warp = threadIdx.x / 32u - 4u, tiles = attention_count_tiles(a, tile, warp / 4u * 64u);
	const uint32_t halves = ((tile.position + tile.rows - 1u) / ATTENTION_KEYS + 1u) * 2u;
	attention_rows<D> r;
	uint32_t q[D / 16u][4];

	attention_open_rows(a, tile, warp * 16u, r);
	attention_load_queries<D>(a, tile, warp * 16u, q);
	if (tiles > 0) {
		attention_sum_rows(ring, q, tiles, r);
	}
	for (uint32_t half = tiles * 2u; half < halves; half++) {
		attention_await_half(ring, half);
		attention_give_back(ring, half);
	}
	attention_store(a, r);
}

/* ---- the kernels ----------------------------------------------------------------------------- */

template <uint32_t D> static __device__ __forceinline__ void attention_run_wide(const kvk_nn_attention_t &a)
{
	constexpr uint32_t SLOTS = KVK_NN_ATTENTION_WIDE_SLOTS;
	const kvk_nn_tile_t tile = a.tile[blockIdx.y];
	const uint32_t shared = shared_address(attention_shared), slots = (shared + 1023u) & ~1023u;
	uint64_t *barriers = (uint64_t *)(attention_shared + (slots - shared) + SLOTS * KVK_NN_ATTENTION_SLOT(D));
	const attention_ring ring = {slots, barriers, barriers + SLOTS};

	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < SLOTS; i++) {
			barrier_init(&ring.full[i], 4u);
			barrier_init(&ring.empty[i], 8u);
		}
		barrier_init_done();
	}
	__syncthreads();
	/* Registers go from those that load to those that keep sums: 56 * 128 + 224 * 256 of 64 Ki. */
	if (__shfl_sync(ATTENTION_ALL, threadIdx.x / 128u, 0) == 0) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
		attention_feed_wide<D>(a, tile, ring);
	} else {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
		attention_compute_wide<D>(a, tile, ring);
	}
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ATTENTION_WIDE_THREADS, 1)
kvk_nn_attention_64_wide(const __grid_constant__ kvk_nn_attention_t a)
{
	attention_run_wide<64>(a);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_ATTENTION_WIDE_THREADS, 1)
kvk_nn_attention_128_wide(const __grid_constant__ kvk_nn_attention_t a)
{
	attention_run_wide<128>(a);
}

#endif
