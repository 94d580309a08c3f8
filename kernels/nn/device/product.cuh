/* product.cuh -- y = x w in BF16 (kvk_nn_product_t) by the matrix instructions of sm_90a.
 *
 * A block an SM stays and computes tiles of 128 rows x PANELS panels of weights: two, 256 outputs, or one, where tiles
 * of two are too few for the SMs (the host chooses). One warp group loads: rows of x vector by vector, since each lies
 * elsewhere, and tiles of weights, which lie in memory as they lie in shared memory, in one bulk copy each. Two warp
 * groups multiply 64 rows each, from a ring of stages of 64 inputs:
 *
 *   full[s]   5 arrivals a fill: one of each loading warp, when its rows have come; one that announces the bytes of
 *             the weights. It completes when those bytes are there, too
 *   empty[s]  8 arrivals a fill: one of each multiplying warp, when its instructions have read the stage
 *
 * Step i of a block, counted over all its tiles, is fill i / STAGES of stage i % STAGES. Fill f of full is waited for
 * with parity f % 2. Before fill f, f > 0, fill f - 1 of empty is waited for: parity (f - 1) % 2; that of fill 0, 1,
 * counts as completed on a barrier that is new. Every warp waits for every fill, also one without rows.
 *
 * Sums of an element are made in the order of k, 16 inputs an instruction, whatever the tile's other rows are and
 * however many outputs an instruction has: a row has the same bits in tiles of either width.
 */
#ifndef KVK_NN_PRODUCT_CUH
#define KVK_NN_PRODUCT_CUH

#include "nn/device/product.h"
#include "nn/device/wgmma.cuh"

namespace nn_product {

enum : uint32_t {
	ALL_LANES = 0xffffffffu,
	GROUP = 128,     /* threads of a warp group */
	HALF = 64,       /* rows of one that multiplies */
	BAND = 16,       /* row tiles that take turns with one tile of weights, before the next */
	ROW_BYTES = 128, /* of a stage: 64 inputs */
	TILE_BYTES = KVK_NN_PANEL * ROW_BYTES,
	FULL_ARRIVALS = 5,
	EMPTY_ARRIVALS = 8,
	LOADS = 8, /* vectors of a stage that a thread loads */
};

static_assert(KVK_NN_PRODUCT_STAGE(2) == 3 * TILE_BYTES && KVK_NN_PRODUCT_STAGE(1) == 2 * TILE_BYTES, "rows and panels");
static_assert(TILE_BYTES % 1024 == 0, "the swizzle's period");

/* Of the sums, in a thread. */
static constexpr __device__ uint32_t count_values(uint32_t panels)
{
	return panels * KVK_NN_PANEL * HALF / GROUP;
}

struct tile {
	uint32_t row, rows; /* of y; 1 to 128 */
	uint32_t output;    /* tile of PANELS panels */
	uint32_t group;
};

/* What a block has to do, and its shared memory. */
struct block {
	uint32_t stages; /* shared address, a multiple of 1,024: [STAGES][rows, panels] */
	uint64_t *full, *empty;
	tile *tiles;      /* [STAGES]: of a stage that begins a tile */
	uint32_t *first;  /* [groups + 1] */
	uint32_t *wide;   /* [groups + 1]: row tiles of more than 64 rows in the groups before */
	uint32_t *narrow; /* [groups + 1]: the other ones; a group has one at most, its last */
	uint32_t groups;
	uint32_t outputs; /* tiles of PANELS panels */
	uint32_t panels, steps;
	uint32_t count; /* tiles of this block */
};

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

/* ---- tiles ----------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t count_wide(uint32_t rows)
{
	return (rows + HALF - 1u) / KVK_NN_PRODUCT_ROWS;
}

static __device__ __forceinline__ uint32_t count_narrow(uint32_t rows)
{
	return (rows + KVK_NN_PRODUCT_ROWS - 1u) / KVK_NN_PRODUCT_ROWS - count_wide(rows);
}

/* Of the lanes before this one. */
static __device__ __forceinline__ uint32_t sum_before(uint32_t own)
{
	uint32_t up = own;

	for (uint32_t d = 1; d < 32u; d *= 2u) {
		const uint32_t other = __shfl_up_sync(ALL_LANES, up, d);

		up += threadIdx.x % 32u >= d ? other : 0;
	}

	return up - own;
}

/* Row tiles of the groups before each, by one warp. Ends with all threads met. */
static __device__ __forceinline__ void count_tiles(const kvk_nn_product_t &p, const block &b)
{
	for (uint32_t g = threadIdx.x; g <= b.groups; g += blockDim.x) {
		b.first[g] = p.first ? p.first[g] : g == 0 ? 0 : p.max_rows;
	}
	__syncthreads();
	if (threadIdx.x < 32u) {
		const uint32_t each = (b.groups + 31u) / 32u;
		const uint32_t from = min(threadIdx.x * each, b.groups), to = min(from + each, b.groups);
		uint32_t wide = 0, narrow = 0;

		for (uint32_t g = from; g < to; g++) {
			wide += count_wide(b.first[g + 1] - b.first[g]);
			narrow += count_narrow(b.first[g + 1] - b.first[g]);
		}
		wide = sum_before(wide);
		narrow = sum_before(narrow);
		for (uint32_t g = from; g < to; g++) {
			b.wide[g] = wide;
			b.narrow[g] = narrow;
			wide += count_wide(b.first[g + 1] - b.first[g]);
			narrow += count_narrow(b.first[g + 1] - b.first[g]);
		}
		if (threadIdx.x == 31u) {
			b.wide[b.groups] = wide;
			b.narrow[b.groups] = narrow;
		}
	}
	__syncthreads();
}

/* The tiles of this block, which come next. Wide ones are dealt to the blocks in turn, then narrow ones from the next
 * block on: these are half of the work, and so each block has its share of both. */
struct order {
	uint32_t wide, narrow; /* numbers of tiles: row tile * outputs + output */
};

static __device__ __forceinline__ order open_order(const block &b)
{
	const uint32_t dealt = b.wide[b.groups] * b.outputs % gridDim.x;

	return {blockIdx.x, blockIdx.x >= dealt ? blockIdx.x - dealt : blockIdx.x + gridDim.x - dealt};
}

/* Of `all` tiles, those from `first` on, one of gridDim.x; first < gridDim.x. */
static __device__ __forceinline__ uint32_t count_dealt(uint32_t all, uint32_t first)
{
	return all > first ? (all - first - 1u) / gridDim.x + 1u : 0;
}

static __device__ __forceinline__ uint32_t count_own(const block &b)
{
	const order o = open_order(b);

	return count_dealt(b.wide[b.groups] * b.outputs, o.wide) + count_dealt(b.narrow[b.groups] * b.outputs, o.narrow);
}

/* Of a row tile, by the tiles of the groups before each; b.groups: there is none such. */
static __device__ __forceinline__ uint32_t find_group(const block &b, const uint32_t *before, uint32_t row_tile)
{
	uint32_t g = 0, end = b.groups;

	if (row_tile >= before[b.groups]) {
		return b.groups;
	}
	while (end - g > 1u) {
		const uint32_t middle = (g + end) / 2u;

		if (before[middle] <= row_tile) {
			g = middle;
		} else {
			end = middle;
		}
	}

	return g;
}

/* Of a group, rows come first, in bands: blocks read the same weights at the same time, and the same rows soon
 * after. */
static __device__ __forceinline__ tile find_wide(const block &b, uint32_t g, uint32_t number)
{
	const uint32_t local = number - b.wide[g] * b.outputs, band_tiles = BAND * b.outputs, band = local / band_tiles;
	const uint32_t rest = local - band * band_tiles, all = b.wide[g + 1] - b.wide[g];
	const uint32_t high = min((uint32_t)BAND, all - band * BAND);
	const uint32_t row = (band * BAND + rest % high) * KVK_NN_PRODUCT_ROWS;

	return {b.first[g] + row, min(KVK_NN_PRODUCT_ROWS, b.first[g + 1] - b.first[g] - row), rest / high, g};
}

static __device__ __forceinline__ tile find_narrow(const block &b, uint32_t g, uint32_t number)
{
	const uint32_t row = (b.wide[g + 1] - b.wide[g]) * KVK_NN_PRODUCT_ROWS;

	return {b.first[g] + row, b.first[g + 1] - b.first[g] - row, number - b.narrow[g] * b.outputs, g};
}

/* The next tile of this block, count_own() times: of the earlier group, since all blocks go through the groups in step,
 * and wide and narrow tiles read the same weights. */
static __device__ __forceinline__ tile take_tile(const block &b, order *o)
{
	const uint32_t wide = find_group(b, b.wide, o->wide / b.outputs);
	const uint32_t narrow = find_group(b, b.narrow, o->narrow / b.outputs);
	const bool is_wide = wide < narrow;
	const tile t = is_wide ? find_wide(b, wide, o->wide) : find_narrow(b, narrow, o->narrow);

	o->wide += is_wide ? gridDim.x : 0;
	o->narrow += is_wide ? 0 : gridDim.x;

	return t;
}

/* ---- loading --------------------------------------------------------------------------------- */

static __device__ __forceinline__ const kvk_bf16_t *row_of(const kvk_nn_product_t &p, uint32_t row)
{
	if (p.x) {
		return p.x + (size_t)row * p.k;
	}
	const uint32_t record = __ldg(p.record + row), own = record - p.own_first;

	return own < p.own_count ? p.own + (size_t)own * p.k : p.rows + (size_t)record * p.k;
}

static __device__ __forceinline__ void load_panel(uint32_t to, uint64_t from, uint64_t *barrier)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
		     "l"(from), "r"((uint32_t)TILE_BYTES), "r"(shared_address(barrier))
		     : "memory");
}

/* By one thread: the tile's name, and the weights of a step. A last panel without a neighbour comes alone; what lies in
 * the other one's place makes outputs beyond n. */
template <uint32_t PANELS>
static __device__ __forceinline__ void load_weights(const kvk_nn_product_t &p, const block &b, const tile &t, uint32_t step,
						    uint32_t stage)
{
	const uint32_t panel = PANELS * t.output, panels = min(PANELS, b.panels - panel);
	const uint64_t from = (uint64_t)p.w + (((uint64_t)t.group * b.panels + panel) * b.steps + step) * TILE_BYTES;
	const uint32_t to = b.stages + stage * KVK_NN_PRODUCT_STAGE(PANELS) + TILE_BYTES;

	if (step == 0) {
		b.tiles[stage] = t;
	}
	barrier_expect(&b.full[stage], panels * TILE_BYTES);
	load_panel(to, from, &b.full[stage]);
	if (PANELS == 2u && panels == 2u) {
		load_panel(to + TILE_BYTES, from + (uint64_t)b.steps * TILE_BYTES, &b.full[stage]);
	}
}

/* The warp's rows of that step have come: they were written as threads write, and matrix instructions read as the copy
 * engine does, so each lane has a fence between. */
template <uint32_t PANELS> static __device__ __forceinline__ void announce(const block &b, uint32_t step)
{
	bulk_fence();
	wgmma::arrive(&b.full[step % KVK_NN_PRODUCT_STAGES(PANELS)]);
}

/* The last LEFT of `done` steps. */
template <uint32_t PANELS, uint32_t LEFT> static __device__ __forceinline__ void announce_last(const block &b, uint32_t done)
{
	if (done >= LEFT) {
		vector_wait<LEFT - 1u>();
		announce<PANELS>(b, done - LEFT);
	}
	if constexpr (LEFT > 1u) {
		announce_last<PANELS, LEFT - 1u>(b, done);
	}
}

/* Eight lanes load a row's 128 bytes, a warp four rows at once, 32 in all: lane l row i * 4 + l / 8, piece l % 8, which
 * lies at piece ^ (row % 8). Rows beyond the tile's are not loaded: what lies there makes sums that nobody stores. */
static __device__ __forceinline__ void load_rows(const uint64_t *from, uint32_t count, uint32_t step, uint32_t to)
{
#pragma unroll
	for (uint32_t i = 0; i < LOADS; i++) {
		if (i < count) {
			asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((to + i * 4u * ROW_BYTES) ^ (i % 2u * 64u)),
				     "l"(from[i] + (uint64_t)step * ROW_BYTES)
				     : "memory");
		}
	}
}

/* Rows of step i - AHEAD are announced before the wait for the stage of step i, so those of AHEAD steps may be on their
 * way: two, or four of half the products. That wait ends: the stage was step i - STAGES's, which is given back when
 * step i - STAGES + 1 = i - 1 - AHEAD has been enqueued, and that one was announced in the iteration before. */
template <uint32_t PANELS>
static __device__ __forceinline__ void load(const kvk_nn_product_t &p, const block &b)
{
	constexpr uint32_t STAGES = KVK_NN_PRODUCT_STAGES(PANELS), AHEAD = STAGES - 2u;
	const uint32_t warp = threadIdx.x / 32u % 4u, lane = threadIdx.x % 32u, low = warp * 32u + lane / 8u;
	/* Of an even i; an odd i's row % 8 has 4 more, the place 64 bytes flipped. */
	const uint32_t place = low * ROW_BYTES + (lane % 8u ^ lane / 8u) * 16u;
	order o = open_order(b);
	uint32_t done = 0; /* steps */

	for (uint32_t wave = 0; wave < b.count; wave++) {
		const tile t = take_tile(b, &o);
		/* How many i have low + 4 i < rows: it may be more than there are. */
		const uint32_t count = low < t.rows ? (t.rows - low + 3u) / 4u : 0;
		uint64_t from[LOADS];

#pragma unroll
		for (uint32_t i = 0; i < LOADS; i++) {
			from[i] = (uint64_t)row_of(p, t.row + min(low + 4u * i, t.rows - 1u)) + lane % 8u * 16u;
		}
		for (uint32_t step = 0; step < b.steps; step++, done++) {
			const uint32_t stage = done % STAGES;

			if (done >= AHEAD) {
				vector_wait<AHEAD - 1u>();
				announce<PANELS>(b, done - AHEAD);
			}
			wait_for(&b.empty[stage], (done / STAGES & 1u) ^ 1u);
			if (threadIdx.x == 0) {
				load_weights<PANELS>(p, b, t, step, stage);
			}
			load_rows(from, count, step, b.stages + stage * KVK_NN_PRODUCT_STAGE(PANELS) + place);
			vector_commit();
		}
	}
	announce_last<PANELS, AHEAD>(b, done);
}

/* ---- multiplying ----------------------------------------------------------------------------- */

#define D4(i)  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define D16(i) D4(i), D4(i + 4), D4(i + 8), D4(i + 12)
#define D64(i) D16(i), D16(i + 16), D16(i + 32), D16(i + 48)

/* d [+]= 64 rows x 16 inputs, times 128 outputs. */
static __device__ __forceinline__ void multiply_panel(float *d, uint64_t rows, uint64_t weights, uint32_t add)
{
	asm volatile("{\n"
		     ".reg .pred add;\n"
		     "setp.ne.b32 add, %66, 0;\n"
		     "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
		     "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
		     "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
		     "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63},"
		     "%64, %65, add, 1, 1, 0, 0;\n"
		     "}\n"
		     : D64(0)
		     : "l"(rows), "l"(weights), "r"(add)
		     : "memory");
}

/* Times 256. */
static __device__ __forceinline__ void multiply_panels(float *d, uint64_t rows, uint64_t weights, uint32_t add)
{
	asm volatile("{\n"
		     ".reg .pred add;\n"
		     "setp.ne.b32 add, %130, 0;\n"
		     "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
		     "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
		     "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
		     "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
		     "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
		     "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
		     "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
		     "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,"
		     "%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127},"
		     "%128, %129, add, 1, 1, 0, 0;\n"
		     "}\n"
		     : D64(0), D64(64)
		     : "l"(rows), "l"(weights), "r"(add)
		     : "memory");
}

#undef D4
#undef D16
#undef D64

template <uint32_t PANELS>
static __device__ __forceinline__ void multiply(float *d, uint64_t rows, uint64_t weights, uint32_t add)
{
	if constexpr (PANELS == 2u) {
		multiply_panels(d, rows, weights, add);
	} else {
		multiply_panel(d, rows, weights, add);
	}
}

/* The products of one tile, from step `done` of the block on. One step's are on their way while the next one's are
 * enqueued; then the step before has been read. */
template <uint32_t PANELS>
static __device__ __forceinline__ void sum_tile(const block &b, uint32_t half, uint32_t done, float *d)
{
	constexpr uint32_t STAGES = KVK_NN_PRODUCT_STAGES(PANELS);

	for (uint32_t step = 0; step < b.steps; step++) {
		const uint32_t now = done + step, stage = now % STAGES;
		const uint32_t at = b.stages + stage * KVK_NN_PRODUCT_STAGE(PANELS);
		const uint64_t rows = wgmma::describe(at + half * HALF * ROW_BYTES), weights = wgmma::describe(at + TILE_BYTES);

		wait_for(&b.full[stage], now / STAGES & 1u);
		wgmma::hold<count_values(PANELS)>(d);
		wgmma::open();
#pragma unroll
		for (uint32_t i = 0; i < KVK_NN_DEPTH / 16u; i++) {
			multiply<PANELS>(d, rows + 2u * i, weights + 2u * i, step | i);
		}
		wgmma::close();
		wgmma::hold<count_values(PANELS)>(d);
		wgmma::wait<1>();
		if (step > 0) {
			wgmma::arrive(&b.empty[(now - 1u) % STAGES]);
		}
	}
	wgmma::wait<0>();
	wgmma::hold<count_values(PANELS)>(d);
	wgmma::arrive(&b.empty[(done + b.steps - 1u) % STAGES]);
}

/* ---- storing --------------------------------------------------------------------------------- */

/* A thread's sums: d[4 i + 2 h + j] is row 16 * warp + lane / 4 + 8 h, output 8 i + 2 (lane % 4) + j of the tile. */

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

/* Two neighbouring outputs 8 i + 2 (lane % 4) of y: rounded products, or gates times ups. */
template <kvk_nn_out_t OUT> static __device__ __forceinline__ uint32_t round_pair(const float *d, uint32_t i, uint32_t h)
{
	if (OUT == KVK_NN_BF16) {
		return pack(d[4u * i + 2u * h], d[4u * i + 2u * h + 1u]);
	}
	/* 64 gates, 64 ups, 64 gates, 64 ups: y's eight outputs i are eight gates, and the ups 64 behind them. */
	const uint32_t at = 4u * (i + i / 8u * 8u) + 2u * h;

	return pack(open_gate(d[at]) * d[at + 32u], open_gate(d[at + 1u]) * d[at + 33u]);
}

/* BF16: of 32 outputs a lane gets eight that follow each other. Eight rows that are not there are left out. */
template <kvk_nn_out_t OUT, uint32_t PANELS>
static __device__ __forceinline__ void store_rounded(const kvk_nn_product_t &p, const tile &t, uint32_t row, const float *d)
{
	constexpr uint32_t OUTPUTS = KVK_NN_PRODUCT_OUTPUTS(PANELS) / (OUT == KVK_NN_SWIGLU ? 2u : 1u);
	const uint32_t width = OUT == KVK_NN_SWIGLU ? p.n / 2u : p.n;
	const uint32_t first = t.output * OUTPUTS + threadIdx.x % 4u * 8u;

#pragma unroll
	for (uint32_t h = 0; h < 2u; h++) {
		kvk_bf16_t *y = (kvk_bf16_t *)p.y + (size_t)(t.row + row + 8u * h) * width + first;

		if (!__any_sync(ALL_LANES, row + 8u * h < t.rows)) {
			continue;
		}
#pragma unroll
		for (uint32_t m = 0; m < OUTPUTS / 32u; m++) {
			const uint4 out = transpose({round_pair<OUT>(d, 4u * m, h), round_pair<OUT>(d, 4u * m + 1u, h),
						     round_pair<OUT>(d, 4u * m + 2u, h), round_pair<OUT>(d, 4u * m + 3u, h)});

			if (row + 8u * h < t.rows && first + 32u * m < width) {
				*(uint4 *)(y + 32u * m) = out;
			}
		}
	}
}

/* If it is there. In the order of the source: the compiler would load a pair, add and store it before the next. */
static __device__ __forceinline__ float2 load_pair(const float *from, bool is_there)
{
	float2 out;

	asm volatile("{\n"
		     ".reg .pred there;\n"
		     "setp.ne.u32 there, %3, 0;\n"
		     "mov.f32 %0, 0f00000000;\n"
		     "mov.f32 %1, 0f00000000;\n"
		     "@there ld.volatile.global.v2.f32 {%0, %1}, [%2];\n"
		     "}\n"
		     : "=f"(out.x), "=f"(out.y)
		     : "l"(from), "r"((uint32_t)is_there)
		     : "memory");

	return out;
}

/* fp32: four lanes' pairs are a sector of memory. What is added to is loaded for a whole row, then stored. */
template <kvk_nn_out_t OUT, uint32_t PANELS>
static __device__ __forceinline__ void store_floats(const kvk_nn_product_t &p, const tile &t, uint32_t row, const float *d)
{
	constexpr uint32_t PAIRS = count_values(PANELS) / 4u; /* of a row */
	const uint32_t first = t.output * KVK_NN_PRODUCT_OUTPUTS(PANELS) + threadIdx.x % 4u * 2u;

#pragma unroll
	for (uint32_t h = 0; h < 2u; h++) {
		float *y = (float *)p.y + (size_t)(t.row + row + 8u * h) * p.n + first;
		float2 old[PAIRS];

		if (row + 8u * h >= t.rows) {
			continue;
		}
		if (OUT == KVK_NN_ADD) {
#pragma unroll
			for (uint32_t i = 0; i < PAIRS; i++) {
				old[i] = load_pair(y + 8u * i, first + 8u * i < p.n);
			}
		}
#pragma unroll
		for (uint32_t i = 0; i < PAIRS; i++) {
			float2 out = {d[4u * i + 2u * h], d[4u * i + 2u * h + 1u]};

			if (OUT == KVK_NN_ADD) {
				out = {old[i].x + out.x, old[i].y + out.y};
			}
			if (first + 8u * i < p.n) {
				*(float2 *)(y + 8u * i) = out;
			}
		}
	}
}

/* By one warp group: 64 rows of each tile, those from 64 * half on. Without any it still gives each stage back, after
 * it has waited for it: else it would give it back twice in one fill. */
template <kvk_nn_out_t OUT, uint32_t PANELS>
static __device__ __forceinline__ void compute(const kvk_nn_product_t &p, const block &b, uint32_t half)
{
	constexpr uint32_t STAGES = KVK_NN_PRODUCT_STAGES(PANELS);
	const uint32_t row = half * HALF + threadIdx.x / 32u % 4u * 16u + threadIdx.x % 32u / 4u;
	float d[count_values(PANELS)] = {};

	for (uint32_t i = 0, done = 0; i < b.count; i++, done += b.steps) {
		const uint32_t stage = done % STAGES;

		wait_for(&b.full[stage], done / STAGES & 1u);
		const tile t = b.tiles[stage];

		if (half * HALF >= t.rows) {
			for (uint32_t now = done; now < done + b.steps; now++) {
				wait_for(&b.full[now % STAGES], now / STAGES & 1u);
				wgmma::arrive(&b.empty[now % STAGES]);
			}
			continue;
		}
		sum_tile<PANELS>(b, half, done, d);
		if (OUT == KVK_NN_BF16 || OUT == KVK_NN_SWIGLU) {
			store_rounded<OUT, PANELS>(p, t, row, d);
		} else {
			store_floats<OUT, PANELS>(p, t, row, d);
		}
	}
}

/* ---- the kernels ----------------------------------------------------------------------------- */

extern __shared__ __align__(1024) uint8_t memory[];

template <uint32_t PANELS> static __device__ __forceinline__ block open_block(const kvk_nn_product_t &p)
{
	constexpr uint32_t STAGES = KVK_NN_PRODUCT_STAGES(PANELS);
	const uint32_t stages = (shared_address(memory) + 1023u) & ~1023u;
	uint8_t *rest = memory + (stages - shared_address(memory)) + STAGES * KVK_NN_PRODUCT_STAGE(PANELS);
	block b;

	b.stages = stages;
	b.tiles = (tile *)rest;
	b.full = (uint64_t *)(b.tiles + STAGES);
	b.empty = b.full + STAGES;
	b.groups = p.first ? p.groups : 1u;
	b.first = (uint32_t *)(b.empty + STAGES);
	b.wide = b.first + b.groups + 1u;
	b.narrow = b.wide + b.groups + 1u;
	b.outputs = (p.n + KVK_NN_PRODUCT_OUTPUTS(PANELS) - 1u) / KVK_NN_PRODUCT_OUTPUTS(PANELS);
	b.panels = (p.n + KVK_NN_PANEL - 1u) / KVK_NN_PANEL;
	b.steps = p.k / KVK_NN_DEPTH;
	if (threadIdx.x == 0) {
		for (uint32_t i = 0; i < STAGES; i++) {
			barrier_init(&b.full[i], FULL_ARRIVALS);
			barrier_init(&b.empty[i], EMPTY_ARRIVALS);
		}
		barrier_init_done();
	}
	count_tiles(p, b);
	b.count = count_own(b);

	return b;
}

template <kvk_nn_out_t OUT, uint32_t PANELS> static __device__ __forceinline__ void run(const kvk_nn_product_t &p)
{
	const block b = open_block<PANELS>(p);
	const uint32_t role = __shfl_sync(ALL_LANES, threadIdx.x / GROUP, 0);

	/* Registers go from those that load to those that keep sums: 56 * 128 + 224 * 256 of 64 Ki. */
	if (role == 0) {
		asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
		load<PANELS>(p, b);
	} else {
		asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
		compute<OUT, PANELS>(p, b, role - 1u);
	}
}

} // namespace nn_product

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_bf16(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_BF16, 2u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_f32(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_F32, 2u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_add(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_ADD, 2u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_swiglu(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_SWIGLU, 2u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_bf16_panel(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_BF16, 1u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_f32_panel(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_F32, 1u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_add_panel(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_ADD, 1u>(p);
}

extern "C" __global__ void __launch_bounds__(KVK_NN_PRODUCT_THREADS, 1)
kvk_nn_product_swiglu_panel(const __grid_constant__ kvk_nn_product_t p)
{
	nn_product::run<KVK_NN_SWIGLU, 1u>(p);
}

#endif
