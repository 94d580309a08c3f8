/* ring.cuh -- what products of either shape (product.cuh, groups.cuh) share: the ring through which rows and weights
 * come to the matrix instructions, its barriers, and how sums are rounded.
 *
 * A block an SM stays and computes tiles of y. One warp group loads: rows of x vector by vector, since each lies
 * elsewhere, and tiles of weights, which lie in memory as they lie in shared memory, in one bulk copy each. Two warp
 * groups multiply, from a ring of stages of 64 inputs:
 *
 *   full[s]   5 arrivals a fill: one of each loading warp, when its rows have come; one that announces the bytes of
 *             the weights. It completes when those bytes are there, too
 *   empty[s]  8 arrivals a fill: one of each multiplying warp, when its instructions have read the stage
 *
 * Step i of a block, counted over all its tiles, is fill i / STAGES of stage i % STAGES. Fill f of full is waited for
 * with parity f % 2. Before fill f, f > 0, fill f - 1 of empty is waited for: parity (f - 1) % 2; that of fill 0, 1,
 * counts as completed on a barrier that is new. Every warp waits for every fill, also one that has nothing to multiply
 * in a tile. A block without tiles waits for nothing.
 *
 * Sums of an element are made in the order of k, 16 inputs an instruction, whatever the tile's other rows are and
 * however wide the instruction is: a row has the same bits in tiles of any shape.
 */
#ifndef KVK_NN_RING_CUH
#define KVK_NN_RING_CUH

#include "nn/device/product.h"
#include "nn/device/wgmma.cuh"

namespace nn_product {

enum : uint32_t {
	ALL_LANES = 0xffffffffu,
	GROUP = 128,     /* threads of a warp group */
	HALF = 64,       /* rows of an instruction's first operand */
	ROW_BYTES = 128, /* of a stage: 64 inputs */
	TILE_BYTES = KVK_NN_PANEL * ROW_BYTES,
	FULL_ARRIVALS = 5,
	EMPTY_ARRIVALS = 8,
	SWEEP = 16, /* rows that the loading warp group's threads load at once, one vector each */
};

static_assert(TILE_BYTES % 1024 == 0, "the swizzle's period");

/* The shape of a ring: a stage has the rows, then the panels. Rows of AHEAD steps may be on their way. */
template <uint32_t ROWS_, uint32_t PANELS_, uint32_t STAGES_, uint32_t AHEAD_> struct ring {
	static constexpr uint32_t ROWS = ROWS_, PANELS = PANELS_, STAGES = STAGES_, AHEAD = AHEAD_;
	static constexpr uint32_t WEIGHTS = ROWS * ROW_BYTES; /* where they begin */
	static constexpr uint32_t STAGE = KVK_NN_PRODUCT_STAGE(ROWS, PANELS);
	static constexpr uint32_t LOADS = ROWS / SWEEP; /* vectors of a stage that a thread loads */
	static_assert(STAGE == WEIGHTS + PANELS * TILE_BYTES && WEIGHTS % 1024u == 0 && ROWS % SWEEP == 0, "stage");
	static_assert(AHEAD >= 1u && AHEAD < STAGES, "load() would wait for itself");
};

struct tile {
	uint32_t row, rows;     /* of y; 1 to ROWS */
	uint32_t panel, panels; /* of weights; 1 to PANELS */
	uint32_t group;
};
static_assert(sizeof(tile) + 2 * sizeof(uint64_t) == KVK_NN_PRODUCT_STAGE_STATE, "product.h");

/* A block's ring, and what is the same in all of its tiles. */
struct block {
	uint32_t stages; /* shared address, a multiple of 1,024: [STAGES][rows, panels] */
	uint64_t *full, *empty;
	tile *tiles;            /* [STAGES]: of a stage that begins a tile */
	uint32_t *rest;         /* shared memory behind them */
	uint32_t panels, steps; /* of a matrix */
};

/* ---- opening --------------------------------------------------------------------------------- */

extern __shared__ __align__(1024) uint8_t memory[];

/* The threads must meet before they use it. */
template <class RING> static __device__ __forceinline__ block open_block(const kvk_nn_product_t &p)
{
	const uint32_t stages = (shared_address(memory) + 1023u) & ~1023u;
	block b;

	b.stages = stages;
	b.full = (uint64_t *)(memory + (stages - shared_address(memory)) + RING::STAGES * RING::STAGE);
	b.empty = b.full + RING::STAGES;
	b.tiles = (tile *)(b.empty + RING::STAGES);
	b.rest = (uint32_t *)(b.tiles + RING::STAGES);
	b.panels = (p.n + KVK_NN_PANEL - 1u) / KVK_NN_PANEL;
	b.steps = p.k / KVK_NN_DEPTH;
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < RING::STAGES; i++) {
			barrier_init(&b.full[i], FULL_ARRIVALS);
			barrier_init(&b.empty[i], EMPTY_ARRIVALS);
		}
		barrier_init_done();
	}

	return b;
}

/* ---- waiting --------------------------------------------------------------------------------- */

static __device__ __forceinline__ void wait_for(uint64_t *barrier, uint32_t parity)
{
#ifdef NN_TRAP_ON_HANG
	/* Four seconds, not a number of spins: how long one spin sleeps is the device's. */
	uint64_t begin, now;
	uint32_t done;

	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
	do {
		asm volatile("{\n"
			     ".reg .pred done;\n"
			     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
			     "selp.u32 %0, 1, 0, done;\n"
			     "}\n"
			     : "=r"(done)
			     : "r"(shared_address(barrier)), "r"(parity)
			     : "memory");
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
		if (now - begin > 4000000000u) {
			__trap();
		}
	} while (!done);
#else
	barrier_wait(barrier, parity);
#endif
}

/* ---- loading --------------------------------------------------------------------------------- */

/* Where the rows lie that a thread loads: low + SWEEP i of a tile. All records are on their way before one is used:
 * each takes as long as several steps. */
template <uint32_t LOADS>
static __device__ __forceinline__ void find_rows(const kvk_nn_product_t &p, const tile &t, uint32_t low, uint64_t (&from)[LOADS])
{
	uint32_t row[LOADS];

#pragma unroll
	for (uint32_t i = 0; i < LOADS; i++) {
		row[i] = t.row + min(low + SWEEP * i, t.rows - 1u);
	}
	if (p.x) {
#pragma unroll
		for (uint32_t i = 0; i < LOADS; i++) {
			from[i] = (uint64_t)(p.x + (size_t)row[i] * p.k);
		}
		return;
	}
#pragma unroll
	for (uint32_t i = 0; i < LOADS; i++) {
		row[i] = __ldg(p.record + row[i]);
	}
#pragma unroll
	for (uint32_t i = 0; i < LOADS; i++) {
		const uint32_t own = row[i] - p.own_first;

		from[i] = (uint64_t)(own < p.own_count ? p.own + (size_t)own * p.k : p.rows + (size_t)row[i] * p.k);
	}
}

static __device__ __forceinline__ void load_panel(uint32_t to, uint64_t from, uint64_t *barrier)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
		     "l"(from), "r"((uint32_t)TILE_BYTES), "r"(shared_address(barrier))
		     : "memory");
}

/* By one thread: the tile's name, and the weights of a step. Where the tile has fewer panels than a stage has room for,
 * what lies in the others' places is not multiplied, or makes outputs beyond n. */
template <class RING>
static __device__ __forceinline__ void load_weights(const kvk_nn_product_t &p, const block &b, const tile &t, uint32_t step,
						    uint32_t stage)
{
	const uint64_t from = (uint64_t)p.w + (((uint64_t)t.group * b.panels + t.panel) * b.steps + step) * TILE_BYTES;
	const uint32_t to = b.stages + stage * RING::STAGE + RING::WEIGHTS;

	if (step == 0) {
		b.tiles[stage] = t;
	}
	barrier_expect(&b.full[stage], t.panels * TILE_BYTES);
#pragma unroll
	for (uint32_t i = 0; i < RING::PANELS; i++) {
		if (i == 0 || i < t.panels) {
			load_panel(to + i * TILE_BYTES, from + (uint64_t)i * b.steps * TILE_BYTES, &b.full[stage]);
		}
	}
}

/* The warp's rows of that step have come: they were written as threads write, and matrix instructions read as the copy
 * engine does, so each lane has a fence between. */
template <class RING> static __device__ __forceinline__ void announce(const block &b, uint32_t step)
{
	bulk_fence();
	wgmma::arrive(&b.full[step % RING::STAGES]);
}

/* The last LEFT of `done` steps. */
template <class RING, uint32_t LEFT> static __device__ __forceinline__ void announce_last(const block &b, uint32_t done)
{
	if (done >= LEFT) {
		vector_wait<LEFT - 1u>();
		announce<RING>(b, done - LEFT);
	}
	if constexpr (LEFT > 1u) {
		announce_last<RING, LEFT - 1u>(b, done);
	}
}

/* Eight lanes load a row's 128 bytes, a warp four rows at once, the warp group SWEEP: row i * SWEEP + thread / 8, piece
 * l % 8 of lane l, which lies at piece ^ (row % 8). Rows beyond the tile's are not loaded: what lies there makes sums
 * that nobody stores. */
template <uint32_t LOADS>
static __device__ __forceinline__ void load_rows(const uint64_t (&from)[LOADS], uint32_t count, uint64_t offset, uint32_t to)
{
#pragma unroll
	for (uint32_t i = 0; i < LOADS; i++) {
		if (i < count) {
			asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + i * SWEEP * ROW_BYTES),
				     "l"(from[i] + offset)
				     : "memory");
		}
	}
}

/* Rows of step i - AHEAD are announced before the wait for the stage of step i. That wait ends: the stage was step
 * i - STAGES's, which is given back when step i - STAGES + 1 has been enqueued, at the latest, and AHEAD < STAGES: that
 * one was announced in this iteration, or before. */
template <class RING, class TILES>
static __device__ __forceinline__ void load(const kvk_nn_product_t &p, const block &b, TILES tiles)
{
	const uint32_t low = threadIdx.x % GROUP / 8u, piece = threadIdx.x % 8u;
	const uint32_t place = low * ROW_BYTES + (piece ^ low % 8u) * 16u;
	uint32_t done = 0; /* steps */

	for (uint32_t wave = 0; wave < tiles.count; wave++) {
		const tile t = next_tile(b, &tiles);
		/* How many i have low + SWEEP i < rows. */
		const uint32_t count = low < t.rows ? (t.rows - low + SWEEP - 1u) / SWEEP : 0;
		uint64_t from[RING::LOADS];

		find_rows(p, t, low, from);
		for (uint32_t step = 0; step < b.steps; step++, done++) {
			const uint32_t stage = done % RING::STAGES;

			if (done >= RING::AHEAD) {
				vector_wait<RING::AHEAD - 1u>();
				announce<RING>(b, done - RING::AHEAD);
			}
			wait_for(&b.empty[stage], (done / RING::STAGES & 1u) ^ 1u);
			if (threadIdx.x == 0) {
				load_weights<RING>(p, b, t, step, stage);
			}
			load_rows(from, count, piece * 16u + (uint64_t)step * ROW_BYTES, b.stages + stage * RING::STAGE + place);
			vector_commit();
		}
	}
	announce_last<RING, RING::AHEAD>(b, done);
}

/* ---- multiplying ----------------------------------------------------------------------------- */

/* The tile that begins with step `done` of the block. */
template <class RING> static __device__ __forceinline__ tile read_tile(const block &b, uint32_t done)
{
	const uint32_t stage = done % RING::STAGES;

	wait_for(&b.full[stage], done / RING::STAGES & 1u);

	return b.tiles[stage];
}

/* The products of one tile, from step `done` of the block on. One step's are on their way while the next one's are
 * enqueued; then the step before has been read. sums: hold(), and enqueue() of one step's. */
template <class RING, class SUMS> static __device__ __forceinline__ void sum_tile(const block &b, uint32_t done, const SUMS &sums)
{
#pragma unroll 1
	for (uint32_t step = 0; step < b.steps; step++) {
		const uint32_t now = done + step, stage = now % RING::STAGES;

		wait_for(&b.full[stage], now / RING::STAGES & 1u);
		sums.hold();
		wgmma::open();
		sums.enqueue(b.stages + stage * RING::STAGE, step);
		wgmma::close();
		sums.hold();
		wgmma::wait<1>();
		if (step > 0) {
			wgmma::arrive(&b.empty[(now - 1u) % RING::STAGES]);
		}
	}
	wgmma::wait<0>();
	sums.hold();
	wgmma::arrive(&b.empty[(done + b.steps - 1u) % RING::STAGES]);
}

/* By a warp group that has nothing to multiply in a tile. It gives each stage back after it has waited for it: else it
 * would give it back twice in one fill. */
template <class RING> static __device__ __forceinline__ void pass_tile(const block &b, uint32_t done)
{
#pragma unroll 1
	for (uint32_t now = done; now < done + b.steps; now++) {
		wait_for(&b.full[now % RING::STAGES], now / RING::STAGES & 1u);
		wgmma::arrive(&b.empty[now % RING::STAGES]);
	}
}

/* ---- rounding -------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t pack(float low, float high)
{
	uint32_t out;

	asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));

	return out;
}

/* Among four lanes, word i of lane l becomes word l of lane i. */
static __device__ __forceinline__ uint4 transpose(uint4 w)
{
	const bool odd = threadIdx.x & 1u, upper = threadIdx.x & 2u;
	uint32_t a = __shfl_xor_sync(ALL_LANES, odd ? w.x : w.y, 1), b = __shfl_xor_sync(ALL_LANES, odd ? w.z : w.w, 1);

	w = {odd ? a : w.x, odd ? w.y : a, odd ? b : w.z, odd ? w.w : b};
	a = __shfl_xor_sync(ALL_LANES, upper ? w.x : w.z, 2);
	b = __shfl_xor_sync(ALL_LANES, upper ? w.y : w.w, 2);

	return {upper ? a : w.x, upper ? b : w.y, upper ? w.z : a, upper ? w.w : b};
}

/* g / (1 + e^-g). No division: one of zeros, of infinities or of less than 2^-126 is a call, of hundreds of cycles for
 * each value; rows beyond the tile's have zeros, or worse. */
static __device__ __forceinline__ float open_gate(float g)
{
	float share;

	asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1.0f + __expf(-g)));

	return g * share;
}

/* ---- roles ----------------------------------------------------------------------------------- */

/* compute(which): what the multiplying warp groups do, 0 and 1. Registers go from those that load to those that keep
 * sums: 64 * 128 + 216 * 256, at most what the block began with: 168 * 384. */
template <class RING, class TILES, class COMPUTE>
static __device__ __forceinline__ void run_roles(const kvk_nn_product_t &p, const block &b, const TILES &tiles,
						 const COMPUTE &compute)
{
	const uint32_t role = __shfl_sync(ALL_LANES, threadIdx.x / GROUP, 0);

	if (role == 0) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 64;");
		load<RING>(p, b, tiles);
	} else {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
		compute(role - 1u);
	}
}

} // namespace nn_product

#endif
