/* The four halves of dispatch and combine on a GPU, over stores to memory of other ranks: the bytes, the index and the
 * sums of ep/twin.c.
 *
 * Two kernels move bytes to other ranks, a block an SM: kvk_ep_push and kvk_ep_return. Where ranks share host memory,
 * kvk_ep_pull gets them from there, or the copy engine does both: then kvk_ep_push packs what it copies, and
 * kvk_ep_flag gives the flags when it has. The others stay in the rank's memory and take what SMs there are. A
 * receive waits in a kernel of one warp, so that nobody else holds an SM until
 * the others' bytes are there. Each half has one kernel whose last block to end moves the half's number on: until
 * then all blocks, and the kernels before it, read the old one.
 */
#define _Noreturn __attribute__((noreturn)) /* C's word */
extern "C" {
#include "ep/device/args.h"
}
#include "cuda/device/bulk.cuh"
#include "system.cuh"

#define LANES 32u
#define ALL   0xffffffffu
#define NONE  0xffffffffu
#define TOGETHER 4u /* vectors that a lane has on their way */
#define NOTES 6u /* words of notes */

/* 128: a stage that begins elsewhere takes the copy engine twice as long. */
#if defined(LANES_H) /* a CPU runs it: tests/kernels/lanes.h */
static __align__(128) uint4 shared[KVK_EP_SHARED / sizeof(uint4)];
#else
extern __shared__ __align__(128) uint4 shared[];
#endif

static __device__ __forceinline__ kvk_ep_state_t *state_of(const kvk_ep_args_t &a)
{
	return (kvk_ep_state_t *)a.state;
}

static __device__ __forceinline__ uint64_t next_number(const kvk_ep_args_t &a, uint32_t half)
{
	return a.number ? a.number : state_of(a)->done[half] + 1;
}

/* All that a token names, at once: one latency. */
static __device__ __forceinline__ void load_experts(const uint32_t *from, uint32_t top_k, uint32_t *experts)
{
#pragma unroll
	for (uint32_t k = 0; k < KVK_EP_MAX_TOP_K; k++) {
		experts[k] = k < top_k ? __ldg(from + k) : KVK_EP_NO_EXPERT;
	}
}

/* Which rank, or group, has an expert that there is. */
static __device__ __forceinline__ uint32_t owner_of(uint32_t expert, uint64_t reciprocal)
{
	return (uint32_t)(expert * reciprocal >> 24);
}

/* ---- between ranks --------------------------------------------------------------------------- */

/* Is this the last block of the half's kernel to end? What all others have stored is then visible to its threads. */
static __device__ bool is_last_block(const kvk_ep_args_t &a, uint32_t half)
{
	__shared__ uint32_t last;

	__threadfence_system();
	__syncthreads();
	if (threadIdx.x == 0) {
		last = atomicAdd(&state_of(a)->arrived[half], 1u) == gridDim.x - 1;
		if (last) {
			state_of(a)->arrived[half] = 0;
		}
		__threadfence_system();
	}
	__syncthreads();

	return last != 0;
}

/* By the last block: all ranks get the flag, and the half is over. */
static __device__ void end_send(const kvk_ep_args_t &a, uint32_t kind, uint32_t half, uint64_t number)
{
	if (threadIdx.x < a.plan.shape.ranks) {
		__threadfence_system();
		store_release(a.heaps[threadIdx.x] + kvk_ep_flag_at(&a.plan, kind, a.rank), number);
	}
	if (threadIdx.x == 0) {
		state_of(a)->done[half] = number;
	}
}

/* Behind copies of a half. */
extern "C" __global__ void kvk_ep_flag(const __grid_constant__ kvk_ep_args_t a)
{
	const uint64_t each = kvk_ep_padded_bytes(&a.plan, a.kind, a.most);

	if (state_of(a)->failed) {
		return;
	}
	if (threadIdx.x == 0) {
		state_of(a)->moved[a.kind] += (a.plan.shape.ranks - 1) * each;
	}
	end_send(a, a.kind, a.half, next_number(a, a.half));
}

/* The counts of a dispatch come with its flags. */
static __device__ __forceinline__ void fetch_count(const kvk_ep_args_t &a, uint64_t number, uint32_t source)
{
	if (a.near != a.heaps[a.rank] && a.kind == KVK_EP_DISPATCH && source < a.plan.shape.ranks) {
		const size_t at = kvk_ep_count_at(&a.plan, number, source);

		*(uint32_t *)(a.near + at) = *(volatile uint32_t *)(a.heaps[a.rank] + at);
	}
}

/* One warp. Ranks whose flag is behind are named to all ranks when the time is up, or when another one has named
 * some. */
extern "C" __global__ void kvk_ep_wait(const __grid_constant__ kvk_ep_args_t a)
{
	const uint32_t lane = threadIdx.x, ranks = a.plan.shape.ranks;
	const uint64_t number = next_number(a, a.half), start = now_ns();
	kvk_ep_state_t *state = state_of(a);

	while (!state->failed) {
		/* Before the flags are read, as in rank.c: a rank that stood still in between would name those that have
		 * come since. */
		const bool told = lane < ranks && load_acquire(a.heaps[a.rank] + kvk_ep_report_at(&a.plan, lane)) != 0;
		const bool is_over = __any_sync(ALL, told || now_ns() - start > a.timeout_ns);
		const bool here = lane >= ranks || kvk_ep_has_arrived(load_acquire(a.heaps[a.rank] + kvk_ep_flag_at(&a.plan, a.kind, lane)), number);
		const uint32_t missing = __ballot_sync(ALL, !here);

		if (missing == 0) {
			fetch_count(a, number, lane);
			break;
		}
		if (is_over) {
			const uint64_t calls = state->done[0] + state->done[1] + state->done[2] + state->done[3] + 1;

			if (lane < ranks) {
				store_release(a.heaps[lane] + kvk_ep_report_at(&a.plan, a.rank), kvk_ep_report(calls, missing));
			}
			if (lane == 0) {
				state->failed = 1;
			}
			break;
		}
		__nanosleep(64);
	}
}

#include "ring.cuh"

/* ---- dispatch, send -------------------------------------------------------------------------- */

/* The other ranks that a token goes to, a bit each. */
static __device__ __forceinline__ uint32_t destinations(const kvk_ep_args_t &a, uint32_t token)
{
	uint32_t experts[KVK_EP_MAX_TOP_K], mask = 0, refused = 0;

	load_experts((const uint32_t *)a.tokens.experts + (size_t)token * a.plan.shape.top_k, a.plan.shape.top_k, experts);
#pragma unroll
	for (uint32_t k = 0; k < KVK_EP_MAX_TOP_K; k++) {
		const bool is_there = experts[k] < a.plan.shape.experts;

		mask |= is_there ? 1u << owner_of(experts[k], a.per_rank) : 0;
		refused += !is_there && experts[k] != KVK_EP_NO_EXPERT;
	}
	if (refused) {
		atomicAdd(&state_of(a)->refused, refused);
	}

	return mask & ~(1u << a.rank);
}

extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS) kvk_ep_route(const __grid_constant__ kvk_ep_args_t a)
{
	const uint32_t token = blockIdx.x * KVK_EP_THREADS + threadIdx.x;

	if (token < a.tokens.n) {
		((uint8_t *)a.masks)[token] = (uint8_t)destinations(a, token);
	}
}

/* before[r]: tokens below `first` that go to rank r. */
static __device__ void count_before(const kvk_ep_args_t &a, uint32_t first, uint32_t *before)
{
	const uint8_t *masks = (const uint8_t *)a.masks;
	uint32_t counts[KVK_EP_MAX_RANKS] = {0};

	if (threadIdx.x < KVK_EP_MAX_RANKS) {
		before[threadIdx.x] = 0;
	}
	__syncthreads();
#pragma unroll 8
	for (uint32_t t = threadIdx.x; t < first; t += blockDim.x) {
		const uint32_t mask = masks[t];

#pragma unroll
		for (uint32_t r = 0; r < KVK_EP_MAX_RANKS; r++) {
			counts[r] += mask >> r & 1;
		}
	}
#pragma unroll
	for (uint32_t r = 0; r < KVK_EP_MAX_RANKS; r++) {
		const uint32_t sum = __reduce_add_sync(ALL, counts[r]);

		if (threadIdx.x % LANES == 0 && sum) {
			atomicAdd(&before[r], sum);
		}
	}
	__syncthreads();
}

/* What a block of the push knows of its tokens [first, first + n), in shared memory. */
struct share {
	uint32_t first, n;
	uint32_t (*base)[KVK_EP_MAX_RANKS]; /* [n / 32]: records of each rank before these 32 tokens */
	uint8_t *masks;                     /* [n]: destinations                                     */
	uint8_t *places;                    /* [n][ranks]: of the token's record, from that base on  */
};

static __device__ share place_share(const kvk_ep_args_t &a)
{
	const uint32_t range = (a.tokens.n + gridDim.x - 1) / gridDim.x, first = min(blockIdx.x * range, a.tokens.n);
	const uint32_t groups = (range + LANES - 1) / LANES;
	uint8_t *rest = (uint8_t *)shared + (size_t)a.ring_warps * a.stages * a.stage_bytes;
	share s = {first, min(range, a.tokens.n - first), (uint32_t(*)[KVK_EP_MAX_RANKS])rest, nullptr, nullptr};

	s.masks = rest + groups * sizeof *s.base;
	s.places = s.masks + groups * LANES;

	return s;
}

/* Which record of rank r the block's token i is. */
static __device__ __forceinline__ uint32_t record_for(const kvk_ep_args_t &a, const share &s, uint32_t i, uint32_t r)
{
	return a.rank * a.plan.shape.max_tokens + s.base[i / LANES][r] + s.places[i * a.plan.shape.ranks + r];
}

static __device__ void open_share(const kvk_ep_args_t &a, const share &s, const uint32_t *before)
{
	const uint32_t lane = threadIdx.x % LANES, ranks = a.plan.shape.ranks;

	for (uint32_t from = threadIdx.x / LANES * LANES; from < s.n; from += blockDim.x) {
		const uint32_t i = from + lane, mask = i < s.n ? ((const uint8_t *)a.masks)[s.first + i] : 0;

		for (uint32_t r = 0; r < ranks; r++) {
			const uint32_t those = __ballot_sync(ALL, mask >> r & 1);

			if (i < s.n) {
				s.places[i * ranks + r] = (uint8_t)__popc(those & ((1u << lane) - 1));
			}
			if (lane == r) {
				s.base[from / LANES][r] = __popc(those);
			}
		}
		if (i < s.n) {
			s.masks[i] = (uint8_t)mask;
		}
	}
	__syncthreads();
	if (threadIdx.x < ranks) {
		uint32_t sum = before[threadIdx.x];

		for (uint32_t from = 0; from < s.n; from += LANES) {
			const uint32_t n = s.base[from / LANES][threadIdx.x];

			s.base[from / LANES][threadIdx.x] = sum;
			sum += n;
		}
		if (blockIdx.x == gridDim.x - 1) {
			state_of(a)->totals[threadIdx.x] = sum;
		}
	}
	__syncthreads();
}

/* Where the push puts row and note of that record. */
static __device__ __forceinline__ uint64_t sent_row(const kvk_ep_args_t &a, uint64_t number, uint32_t rank, uint32_t record)
{
	const uint64_t i = (uint64_t)rank * a.plan.shape.max_tokens + record - a.rank * a.plan.shape.max_tokens;

	return a.outbox ? a.outbox + i * a.plan.row_bytes : a.heaps[rank] + kvk_ep_row_at(&a.plan, number, record);
}

static __device__ __forceinline__ uint64_t sent_note(const kvk_ep_args_t &a, uint64_t number, uint32_t rank, uint32_t record)
{
	const uint64_t i = (uint64_t)rank * a.plan.shape.max_tokens + record - a.rank * a.plan.shape.max_tokens;

	return a.outbox ? a.outbox + a.plan.shape.ranks * a.plan.shape.max_tokens * a.plan.row_bytes + i * a.plan.note_bytes
			: a.heaps[rank] + kvk_ep_note_at(&a.plan, number, record);
}

/* Word `word` of a token's note. Its load depends on nothing, so that several are on their way. */
static __device__ __forceinline__ uint32_t note_word(const kvk_ep_args_t &a, uint32_t token, uint32_t word)
{
	const uint32_t top_k = a.plan.shape.top_k, k = min(word, 2 * top_k - 1);
	const uint64_t list = k < top_k ? a.tokens.experts : a.tokens.weights;
	const uint32_t value = ((const uint32_t *)list)[(size_t)token * top_k + (k < top_k ? k : k - top_k)];

	return word < 2 * top_k ? value : token;
}

/* Those of 32 tokens, of `from` on, that `those` names: one behind the other at `to`. */
static __device__ void send_notes_of(const kvk_ep_args_t &a, const share &s, uint32_t from, uint32_t those, uint32_t *to)
{
	const uint32_t words = (uint32_t)(a.plan.note_bytes / 4), used = 2 * a.plan.shape.top_k + 1, all = LANES * used;

	for (uint32_t at = threadIdx.x % LANES; at < all; at += NOTES * LANES) {
		uint32_t value[NOTES];

#pragma unroll
		for (uint32_t j = 0; j < NOTES; j++) {
			const uint32_t i = min(at + j * LANES, all - 1);

			value[j] = note_word(a, s.first + min(from + i / used, s.n - 1), i % used);
		}
#pragma unroll
		for (uint32_t j = 0; j < NOTES; j++) {
			const uint32_t i = at + j * LANES, t = i / used;

			if (i < all && those >> t & 1) {
				to[__popc(those & ((1u << t) - 1)) * words + i % used] = value[j];
			}
		}
	}
}

/* By the warps that move no rows: the notes of 32 tokens to each rank, word by word. Those of one rank lie behind each
 * other there. */
static __device__ void send_notes(const kvk_ep_args_t &a, uint64_t number, const share &s)
{
	const uint32_t lane = threadIdx.x % LANES;

	for (uint32_t from = (threadIdx.x / LANES - KVK_EP_WARPS) * LANES; from < s.n; from += KVK_EP_NOTE_WARPS * LANES) {
		const uint32_t mask = from + lane < s.n ? s.masks[from + lane] : 0;

		for (uint32_t r = 0; r < a.plan.shape.ranks; r++) {
			const uint32_t those = __ballot_sync(ALL, mask >> r & 1);
			const uint32_t first = a.rank * a.plan.shape.max_tokens + s.base[from / LANES][r];
			uint32_t *to = (uint32_t *)sent_note(a, number, r, first);

			if (those != 0) {
				send_notes_of(a, s, from, those, to);
			}
		}
	}
}

/* The warps that move rows take the block's tokens in turn. One lane of each: all that it needs is in shared memory. */
static __device__ void send_rows(const kvk_ep_args_t &a, uint64_t number, const share &s, ring r)
{
	const uint32_t row_bytes = (uint32_t)a.plan.row_bytes;
	uint32_t ahead = threadIdx.x / LANES;

	for (uint32_t i = ahead; i < s.n; i += a.ring_warps) {
		for (; may_load(r) && ahead < s.n; ahead += a.ring_warps) {
			if (s.masks[ahead]) {
				load_row(r, a.tokens.rows + (uint64_t)(s.first + ahead) * row_bytes, row_bytes);
			}
		}
		if (s.masks[i] == 0) {
			continue;
		}
		const uint8_t *stage = next_row(r);

		for (uint32_t left = s.masks[i]; left; left &= left - 1) {
			const uint32_t to = __ffs((int)left) - 1;

			keep_pace(a, r);
			bulk_store_in_group(sent_row(a, number, to, record_for(a, s, i, to)), stage, row_bytes);
		}
		bulk_end_group();
	}
	close_ring();
}

/* A block has a range of the tokens. In shared memory: the stages, then what it knows of each token. */
extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS + KVK_EP_NOTE_WARPS * LANES)
kvk_ep_push(const __grid_constant__ kvk_ep_args_t a)
{
	__shared__ uint64_t barriers[KVK_EP_WARPS + KVK_EP_NOTE_WARPS][KVK_EP_MAX_STAGES];
	__shared__ uint32_t before[KVK_EP_MAX_RANKS];
	const uint64_t number = next_number(a, KVK_EP_DISPATCH_SENT);
	kvk_ep_state_t *state = state_of(a);
	const share s = place_share(a);

	if (state->failed) {
		return;
	}
	count_before(a, s.first, before);
	const ring r = open_ring(a, barriers);
	open_share(a, s, before);
	if (threadIdx.x >= KVK_EP_THREADS) {
		send_notes(a, number, s);
	} else if (threadIdx.x % LANES == 0 && threadIdx.x / LANES < a.ring_warps) {
		send_rows(a, number, s, r);
	}
	if (!is_last_block(a, KVK_EP_DISPATCH_SENT)) {
		return;
	}
	if (threadIdx.x < a.plan.shape.ranks && threadIdx.x != a.rank) {
		const uint32_t total = *(volatile uint32_t *)&state->totals[threadIdx.x];

		*(volatile uint32_t *)(a.heaps[threadIdx.x] + kvk_ep_count_at(&a.plan, number, a.rank)) = total;
		atomicAdd((unsigned long long *)&state->bytes[KVK_EP_DISPATCH], (unsigned long long)total * a.plan.record_bytes);
	}
	if (threadIdx.x == 0) {
		state->tokens[kvk_ep_slot(number, a.plan.shape.in_flight)] = a.tokens;
	}
	__syncthreads();
	if (a.outbox == 0) {
		end_send(a, KVK_EP_DISPATCH, KVK_EP_DISPATCH_SENT, number);
	}
}

/* ---- the records of a dispatch --------------------------------------------------------------- */

/* Those of one number, one source behind the other: item i of [0, end[KVK_EP_MAX_RANKS - 1]). */
struct records {
	uint32_t end[KVK_EP_MAX_RANKS];
	kvk_ep_device_tokens_t own;
	uint64_t number;
};

static __device__ records open_records(const kvk_ep_args_t &a, uint64_t number, bool with_own)
{
	records s;
	uint32_t n = 0;

	s.number = number;
	s.own = state_of(a)->tokens[kvk_ep_slot(number, a.plan.shape.in_flight)];
#pragma unroll
	for (uint32_t r = 0; r < KVK_EP_MAX_RANKS; r++) {
		if (r < a.plan.shape.ranks) {
			const uint32_t sent = r == a.rank ? (with_own ? s.own.n : 0) : *(const uint32_t *)(a.near + kvk_ep_count_at(&a.plan, number, r));

			n += min(sent, a.plan.shape.max_tokens);
		}
		s.end[r] = n;
	}

	return s;
}

/* The number of an item's record. */
static __device__ __forceinline__ uint32_t record_of(const kvk_ep_args_t &a, const records &s, uint32_t item)
{
	uint32_t source = 0, begin = 0;

#pragma unroll
	for (uint32_t r = 0; r + 1 < KVK_EP_MAX_RANKS; r++) {
		if (item >= s.end[r]) {
			source = r + 1;
			begin = s.end[r];
		}
	}

	return source * a.plan.shape.max_tokens + item - begin;
}

/* What a record says of its token. */
struct told {
	uint32_t token;
	const uint32_t *experts;
	const float *weights;
};

static __device__ __forceinline__ told read_record(const kvk_ep_args_t &a, const records &s, uint32_t record)
{
	const uint32_t own = kvk_ep_own_token(&a.plan, a.rank, record), top_k = a.plan.shape.top_k;
	const uint32_t *words = (const uint32_t *)(a.near + kvk_ep_note_at(&a.plan, s.number, record));

	if (own < a.plan.shape.max_tokens) {
		return {own, (const uint32_t *)s.own.experts + (size_t)own * top_k, (const float *)s.own.weights + (size_t)own * top_k};
	}

	return {words[2u * top_k], words, (const float *)(words + top_k)};
}

/* Parts of the index of a number. */
static __device__ __forceinline__ uint32_t *index_of(const kvk_ep_args_t &a, uint64_t number)
{
	return (uint32_t *)a.index + kvk_ep_slot(number, a.plan.shape.in_flight) * kvk_ep_slot_words(&a.plan);
}

static __device__ __forceinline__ uint32_t *rows_of(const kvk_ep_args_t &a, uint64_t number)
{
	return index_of(a, number) + a.plan.rank_experts + 1 + a.plan.max_rows;
}

/* ---- dispatch, receive: the index ------------------------------------------------------------ */

/* A warp of the index has a range of the items. */
static __device__ __forceinline__ void range_of(const records &s, uint32_t *p_first, uint32_t *p_end)
{
	const uint64_t all = s.end[KVK_EP_MAX_RANKS - 1], warps = (uint64_t)gridDim.x * KVK_EP_WARPS;
	const uint64_t warp = blockIdx.x * KVK_EP_WARPS + threadIdx.x / LANES;

	*p_first = (uint32_t)(all * warp / warps);
	*p_end = (uint32_t)(all * (warp + 1) / warps);
}

extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS) kvk_ep_count(const __grid_constant__ kvk_ep_args_t a)
{
	const uint32_t experts = a.plan.rank_experts, top_k = a.plan.shape.top_k;
	uint32_t *all = (uint32_t *)shared, *rows = all + threadIdx.x / LANES * experts, first, end;

	if (state_of(a)->failed) {
		return;
	}
	const records s = open_records(a, next_number(a, KVK_EP_DISPATCH_RECEIVED), true);

	for (uint32_t i = threadIdx.x; i < KVK_EP_WARPS * experts; i += KVK_EP_THREADS) {
		all[i] = 0;
	}
	__syncthreads();
	range_of(s, &first, &end);
#pragma unroll 4
	for (uint32_t i = threadIdx.x % LANES; i < (end - first) * top_k; i += LANES) {
		const told t = read_record(a, s, record_of(a, s, first + i / top_k));
		const uint32_t e = kvk_ep_local_expert(&a.plan, a.rank, t.experts[i % top_k]);

		if (e < experts) {
			atomicAdd(&rows[e], 1u);
		}
	}
	__syncthreads();
	for (uint32_t e = threadIdx.x; e < experts; e += KVK_EP_THREADS) {
		uint32_t sum = 0;

		for (uint32_t w = 0; w < KVK_EP_WARPS; w++) {
			((uint32_t *)a.before)[((size_t)blockIdx.x * KVK_EP_WARPS + w) * experts + e] = sum;
			sum += all[w * experts + e];
		}
		((uint32_t *)a.totals)[(size_t)blockIdx.x * experts + e] = sum;
	}
}

/* sums[e]: of all sums before, by the first warp. */
static __device__ void scan(uint32_t *sums, uint32_t n)
{
	uint32_t carry = 0;

	for (uint32_t at = 0; at < n; at += LANES) {
		const uint32_t i = at + threadIdx.x, own = i < n ? sums[i] : 0;
		uint32_t sum = own;

		for (uint32_t step = 1; step < LANES; step *= 2) {
			const uint32_t before = __shfl_up_sync(ALL, sum, step);

			sum += threadIdx.x >= step ? before : 0;
		}
		if (i < n) {
			sums[i] = carry + sum - own;
		}
		carry += __shfl_sync(ALL, sum, LANES - 1);
	}
	if (threadIdx.x == 0) {
		sums[n] = carry;
	}
}

/* next[w][e]: the first row of expert e for warp w of this block; first[e], in shared memory: of all. */
static __device__ void find_rows(const kvk_ep_args_t &a, uint32_t *first, uint32_t *next)
{
	const uint32_t experts = a.plan.rank_experts, *totals = (const uint32_t *)a.totals;
	const uint32_t *before = (const uint32_t *)a.before + (size_t)blockIdx.x * KVK_EP_WARPS * experts;

	for (uint32_t e = threadIdx.x; e < experts; e += KVK_EP_THREADS) {
		uint32_t sum = 0, earlier = 0;

#pragma unroll
		for (uint32_t block = 0; block < KVK_EP_INDEX_GRID; block++) {
			earlier = block == blockIdx.x ? sum : earlier;
			sum += totals[block * experts + e];
		}
		first[e] = sum;
		for (uint32_t w = 0; w < KVK_EP_WARPS; w++) {
			next[w * experts + e] = earlier + before[w * experts + e];
		}
	}
	__syncthreads();
	if (threadIdx.x < LANES) {
		scan(first, experts);
	}
	__syncthreads();
	for (uint32_t i = threadIdx.x; i < KVK_EP_WARPS * experts; i += KVK_EP_THREADS) {
		next[i] += first[i % experts];
	}
	__syncthreads();
}

/* The lane's expert here, and its record, of as many records from `at` on as lanes have experts for. rank_experts:
 * none. */
static __device__ __forceinline__ uint32_t read_expert(const kvk_ep_args_t &a, const records &s, uint32_t at, uint32_t end, uint32_t *p_record)
{
	const uint32_t lane = threadIdx.x % LANES, top_k = a.plan.shape.top_k, item = at + lane / top_k;

	if (lane / top_k >= LANES / top_k || item >= end) {
		return a.plan.rank_experts;
	}
	*p_record = record_of(a, s, item);

	return kvk_ep_local_expert(&a.plan, a.rank, read_record(a, s, *p_record).experts[lane % top_k]);
}

/* One record of a warp after the other: lane k has its k-th expert, and no expert is there twice. */
static __device__ void place_range(const kvk_ep_args_t &a, const records &s, uint32_t *next)
{
	const uint32_t lane = threadIdx.x % LANES, top_k = a.plan.shape.top_k, experts = a.plan.rank_experts;
	uint32_t *records_of_rows = index_of(a, s.number) + experts + 1, *rows = rows_of(a, s.number), first, end;
	const uint32_t together = LANES / top_k; /* records whose experts the lanes read at once */

	range_of(s, &first, &end);
	uint32_t record, e = read_expert(a, s, first, end, &record);
	for (uint32_t at = first; at < end; at += together) {
		uint32_t next_record;
		const uint32_t next_e = read_expert(a, s, at + together, end, &next_record);

		for (uint32_t i = 0; i < together; i++) {
			if (lane / top_k == i && e < experts) {
				const uint32_t row = next[e]++;

				if (row < a.plan.max_rows) { /* a peer may name an expert twice */
					records_of_rows[row] = record;
					rows[(size_t)record * top_k + lane % top_k] = row;
				}
			}
			__syncwarp();
		}
		e = next_e;
		record = next_record;
	}
}

extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS) kvk_ep_place(const __grid_constant__ kvk_ep_args_t a)
{
	const uint32_t experts = a.plan.rank_experts;
	const uint64_t number = next_number(a, KVK_EP_DISPATCH_RECEIVED);
	uint32_t *first = (uint32_t *)shared, *next = first + experts + 1;

	if (state_of(a)->failed) {
		return;
	}
	find_rows(a, first, next);
	if (blockIdx.x == 0) {
		for (uint32_t e = threadIdx.x; e <= experts; e += blockDim.x) {
			index_of(a, number)[e] = first[e];
		}
	}
	place_range(a, open_records(a, number, true), next + threadIdx.x / LANES * experts);
	if (is_last_block(a, KVK_EP_DISPATCH_RECEIVED) && threadIdx.x == 0) {
		state_of(a)->done[KVK_EP_DISPATCH_RECEIVED] = number;
	}
}

/* ---- combine, send --------------------------------------------------------------------------- */

static __device__ __forceinline__ void add_row(float *sum, uint4 row, float weight)
{
	const uint32_t words[4] = {row.x, row.y, row.z, row.w};

#pragma unroll
	for (uint32_t i = 0; i < 4; i++) {
		sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(weight, __uint_as_float(words[i] << 16)));
		sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(weight, __uint_as_float(words[i] & 0xffff0000u)));
	}
}

static __device__ __forceinline__ uint4 round_row(const float *sum)
{
	uint4 out;

#pragma unroll
	for (uint32_t i = 0; i < 4; i++) {
		const uint32_t low = __bfloat16_as_ushort(__float2bfloat16_rn(sum[2 * i]));
		const uint32_t high = __bfloat16_as_ushort(__float2bfloat16_rn(sum[2 * i + 1]));

		(i == 0 ? out.x : i == 1 ? out.y : i == 2 ? out.z : out.w) = high << 16 | low;
	}

	return out;
}

/* Where a record's part of a group is reduced to: the owner's place, if that is here, else one for the return, or for a
 * copy to the owner's. */
static __device__ __forceinline__ uint64_t part_of(const kvk_ep_args_t &a, uint64_t number, uint32_t record, uint32_t group, uint32_t token)
{
	const uint32_t own = kvk_ep_own_token(&a.plan, a.rank, record), rank_groups = a.plan.shape.groups / a.plan.shape.ranks;
	const uint32_t most = a.plan.shape.max_tokens;

	if (own < most) {
		return a.near + kvk_ep_part_at(&a.plan, number, group, own);
	}
	const uint64_t staged = a.staged + kvk_ep_slot(number, a.plan.shape.in_flight) * kvk_ep_staged_bytes(&a.plan);

	if (a.outbox) {
		return staged + ((uint64_t)(record / most * rank_groups + group % rank_groups) * most + token) * a.plan.row_bytes;
	}

	return staged + ((uint64_t)record * rank_groups + group % rank_groups) * a.plan.row_bytes;
}

/* Rows to other ranks, by a warp. */
static __device__ __forceinline__ void count_sent(const kvk_ep_args_t &a, uint32_t rows)
{
	if (threadIdx.x % LANES == 0) {
		atomicAdd((unsigned long long *)&state_of(a)->bytes[KVK_EP_COMBINE], (unsigned long long)rows * a.plan.row_bytes);
	}
}

/* A warp a record and group: lanes hold the experts, then their sums. */
static __device__ void reduce_part(const kvk_ep_args_t &a, const records &s, uint32_t record, uint32_t group, const uint32_t *rows)
{
	const uint32_t lane = threadIdx.x % LANES, top_k = a.plan.shape.top_k, vectors = (uint32_t)(a.plan.row_bytes / 16);
	const told t = read_record(a, s, record);
	const bool is_here = lane < top_k && t.experts[lane] / a.plan.group_experts == group;
	const uint32_t row = is_here ? min(rows[(size_t)record * top_k + lane], a.plan.max_rows - 1) : 0;
	const float weight = is_here ? t.weights[lane] : 0.0f;
	const uint32_t those = __ballot_sync(ALL, is_here);
	const uint64_t to = part_of(a, s.number, record, group, t.token);

	if (those == 0 || t.token >= a.plan.shape.max_tokens) { /* a peer may name any token */
		return;
	}
	if (a.outbox && kvk_ep_own_token(&a.plan, a.rank, record) == a.plan.shape.max_tokens) {
		count_sent(a, 1); /* no return counts what is copied */
	}
	for (uint32_t v = lane; v - lane < vectors; v += LANES) {
		float sum[8] = {0};

		for (uint32_t left = those; left;) {
			const uint32_t n = __popc(left);
			uint4 loaded[TOGETHER];
			float weights[TOGETHER];

#pragma unroll
			for (uint32_t i = 0; i < TOGETHER; i++) {
				const int k = left ? __ffs((int)left) - 1 : 0;
				const uint64_t from = a.outputs + (uint64_t)__shfl_sync(ALL, row, k) * a.plan.row_bytes;

				weights[i] = __shfl_sync(ALL, weight, k);
				loaded[i] = left && v < vectors ? __ldg((const uint4 *)from + v) : uint4();
				left &= left - 1;
			}
#pragma unroll
			for (uint32_t i = 0; i < TOGETHER; i++) {
				if (i < n) {
					add_row(sum, loaded[i], weights[i]);
				}
			}
		}
		if (v < vectors) {
			((uint4 *)to)[v] = round_row(sum);
		}
	}
}

extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS) kvk_ep_reduce(const __grid_constant__ kvk_ep_args_t a)
{
	const uint32_t rank_groups = a.plan.shape.groups / a.plan.shape.ranks, warps = gridDim.x * KVK_EP_WARPS;

	if (state_of(a)->failed) {
		return;
	}
	const records s = open_records(a, next_number(a, KVK_EP_REDUCED), true);
	const uint32_t *rows = rows_of(a, s.number), items = s.end[KVK_EP_MAX_RANKS - 1];

	for (uint32_t i = blockIdx.x * KVK_EP_WARPS + threadIdx.x / LANES; i < items * rank_groups; i += warps) {
		reduce_part(a, s, record_of(a, s, i / rank_groups), a.rank * rank_groups + i % rank_groups, rows);
	}
	if (is_last_block(a, KVK_EP_REDUCED) && threadIdx.x == 0) {
		state_of(a)->done[KVK_EP_REDUCED] = s.number;
	}
}

/* A row that goes back: where from and where to; NONE: there is none. */
struct back {
	uint32_t record, token, group;
};

static __device__ back find_back(const kvk_ep_args_t &a, const records &s, uint32_t i)
{
	const uint32_t rank_groups = a.plan.shape.groups / a.plan.shape.ranks, group = a.rank * rank_groups + i % rank_groups;
	uint32_t experts[KVK_EP_MAX_TOP_K];
	bool is_there = false;

	if (i / rank_groups >= s.end[KVK_EP_MAX_RANKS - 1]) {
		return {NONE, 0, group};
	}
	const uint32_t record = record_of(a, s, i / rank_groups);
	const told t = read_record(a, s, record);

	load_experts(t.experts, a.plan.shape.top_k, experts);
#pragma unroll
	for (uint32_t k = 0; k < KVK_EP_MAX_TOP_K; k++) {
		is_there |= experts[k] < a.plan.shape.experts && owner_of(experts[k], a.per_group) == group;
	}

	return {is_there && t.token < a.plan.shape.max_tokens ? record : NONE, t.token, group};
}

/* The rows of 32 items, which the lanes have looked up: from where to where; 0: there is none. How many there are. */
static __device__ uint32_t move_rows(const kvk_ep_args_t &a, uint64_t from, uint64_t to, ring &r)
{
	const uint32_t row_bytes = (uint32_t)a.plan.row_bytes;
	const uint32_t those = __ballot_sync(ALL, to != 0);
	uint32_t loads = those;

	for (uint32_t left = those; left; left &= left - 1) {
		for (; may_load(r) && loads; loads &= loads - 1) {
			load_row(r, __shfl_sync(ALL, from, __ffs((int)loads) - 1), row_bytes);
		}
		const uint64_t there = __shfl_sync(ALL, to, __ffs((int)left) - 1);
		const uint8_t *stage = next_row(r);

		if (threadIdx.x % LANES == 0) {
			keep_pace(a, r);
			bulk_store(there, stage, row_bytes);
		}
	}

	return __popc(those);
}

static __device__ uint32_t return_rows(const kvk_ep_args_t &a, uint64_t number, const back &b, ring &r)
{
	const uint64_t from = b.record == NONE ? 0 : part_of(a, number, b.record, b.group, b.token);
	const uint64_t to = b.record == NONE ? 0 : a.heaps[b.record / a.plan.shape.max_tokens] + kvk_ep_part_at(&a.plan, number, b.group, b.token);

	return move_rows(a, from, to, r);
}

extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS) kvk_ep_return(const __grid_constant__ kvk_ep_args_t a)
{
	__shared__ uint64_t barriers[KVK_EP_WARPS][KVK_EP_MAX_STAGES];
	const uint32_t warps = gridDim.x * a.ring_warps, own = threadIdx.x / LANES, warp = blockIdx.x * a.ring_warps + own;
	const uint64_t number = next_number(a, KVK_EP_COMBINE_SENT);
	uint32_t sent = 0;

	if (state_of(a)->failed) {
		return;
	}
	const records s = open_records(a, number, false);
	const uint32_t items = s.end[KVK_EP_MAX_RANKS - 1] * (a.plan.shape.groups / a.plan.shape.ranks);
	ring r = open_ring(a, barriers);

	for (uint32_t i = own < a.ring_warps ? warp * LANES : items; i < items; i += warps * LANES) {
		sent += return_rows(a, number, find_back(a, s, i + threadIdx.x % LANES), r);
	}
	close_ring();
	count_sent(a, sent);
	if (is_last_block(a, KVK_EP_COMBINE_SENT)) {
		end_send(a, KVK_EP_COMBINE, KVK_EP_COMBINE_SENT, number);
	}
}

/* ---- a receive from host memory -------------------------------------------------------------- */

/* Where row `item` of what others have put lies in the rank's heap. 0: there is none. */
static __device__ size_t find_record(const kvk_ep_args_t &a, const records &s, uint32_t item)
{
	return item < s.end[KVK_EP_MAX_RANKS - 1] ? kvk_ep_row_at(&a.plan, s.number, record_of(a, s, item)) : 0;
}

/* The same of parts: of token item / groups the one of that group, if another rank has one of its experts. */
static __device__ size_t find_part(const kvk_ep_args_t &a, const records &s, uint32_t item)
{
	const uint32_t groups = a.plan.shape.groups, token = item / groups, group = item % groups;
	uint32_t experts[KVK_EP_MAX_TOP_K];
	bool is_there = false;

	if (token >= s.own.n || group / (groups / a.plan.shape.ranks) == a.rank) {
		return 0;
	}
	load_experts((const uint32_t *)s.own.experts + (size_t)token * a.plan.shape.top_k, a.plan.shape.top_k, experts);
#pragma unroll
	for (uint32_t k = 0; k < KVK_EP_MAX_TOP_K; k++) {
		is_there |= experts[k] < a.plan.shape.experts && owner_of(experts[k], a.per_group) == group;
	}

	return is_there ? kvk_ep_part_at(&a.plan, s.number, group, token) : 0;
}

/* By the warps that move no rows: notes of a source lie behind each other. */
static __device__ void pull_notes(const kvk_ep_args_t &a, const records &s)
{
	const uint32_t threads = KVK_EP_NOTE_WARPS * LANES, own = threadIdx.x - KVK_EP_THREADS;

	for (uint32_t r = 0; r < a.plan.shape.ranks; r++) {
		const size_t at = kvk_ep_note_at(&a.plan, s.number, r * a.plan.shape.max_tokens);
		const uint32_t n = s.end[r] - (r > 0 ? s.end[r - 1] : 0), vectors = n * (uint32_t)(a.plan.note_bytes / 16);

#pragma unroll 8
		for (uint32_t v = blockIdx.x * threads + own; v < vectors; v += gridDim.x * threads) {
			((uint4 *)(a.near + at))[v] = __ldg((const uint4 *)(a.heaps[a.rank] + at) + v);
		}
	}
}

/* What other ranks have put into host memory, to the same places of the rank's own. */
extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS + KVK_EP_NOTE_WARPS * LANES)
kvk_ep_pull(const __grid_constant__ kvk_ep_args_t a)
{
	__shared__ uint64_t barriers[KVK_EP_WARPS + KVK_EP_NOTE_WARPS][KVK_EP_MAX_STAGES];
	const uint32_t warps = gridDim.x * a.ring_warps, own = threadIdx.x / LANES, warp = blockIdx.x * a.ring_warps + own;
	const bool of_records = a.kind == KVK_EP_DISPATCH;

	if (state_of(a)->failed) {
		return;
	}
	const records s = open_records(a, next_number(a, a.half), false);
	const uint32_t items = of_records ? s.end[KVK_EP_MAX_RANKS - 1] : s.own.n * a.plan.shape.groups;
	ring r = open_ring(a, barriers);

	if (own >= KVK_EP_WARPS && of_records) {
		pull_notes(a, s);
	}
	for (uint32_t i = own < a.ring_warps ? warp * LANES : items; i < items; i += warps * LANES) {
		const uint32_t item = i + threadIdx.x % LANES;
		const size_t at = of_records ? find_record(a, s, item) : find_part(a, s, item);

		move_rows(a, at ? a.heaps[a.rank] + at : 0, at ? a.near + at : 0, r);
	}
	close_ring();
}

/* ---- combine, receive ------------------------------------------------------------------------ */

/* A warp a token: the parts of its groups in their order. */
static __device__ void sum_parts(const kvk_ep_args_t &a, uint64_t number, const uint32_t *experts, uint32_t token)
{
	const uint32_t lane = threadIdx.x % LANES, vectors = (uint32_t)(a.plan.row_bytes / 16);
	const uint32_t group = lane < a.plan.shape.top_k ? experts[lane] / a.plan.group_experts : NONE;
	const bool is_real = group < a.plan.shape.groups;

	for (uint32_t v = lane; v - lane < vectors; v += LANES) {
		uint32_t g = __reduce_min_sync(ALL, is_real ? group : NONE);
		float sum[8] = {0};

		while (g != NONE) {
			if (v < vectors) {
				add_row(sum, ((const uint4 *)(a.near + kvk_ep_part_at(&a.plan, number, g, token)))[v], 1.0f);
			}
			g = __reduce_min_sync(ALL, is_real && group > g ? group : NONE);
		}
		if (v < vectors) {
			((uint4 *)(a.out + (uint64_t)token * a.plan.row_bytes))[v] = round_row(sum);
		}
	}
}

/* Tokens whose parts have come. The launch for the last of them ends the half. */
extern "C" __global__ void __launch_bounds__(KVK_EP_THREADS) kvk_ep_sum(const __grid_constant__ kvk_ep_args_t a)
{
	const uint64_t number = next_number(a, KVK_EP_COMBINE_RECEIVED);
	kvk_ep_state_t *state = state_of(a);

	if (state->failed) {
		return;
	}
	const kvk_ep_device_tokens_t tokens = state->tokens[kvk_ep_slot(number, a.plan.shape.in_flight)];
	const uint32_t first = a.sum_first + blockIdx.x * KVK_EP_WARPS + threadIdx.x / LANES, end = min(tokens.n, a.sum_end);

	for (uint32_t t = first; t < end; t += gridDim.x * KVK_EP_WARPS) {
		sum_parts(a, number, (const uint32_t *)tokens.experts + (size_t)t * a.plan.shape.top_k, t);
	}
	if (a.sum_end >= a.plan.shape.max_tokens && is_last_block(a, KVK_EP_COMBINE_RECEIVED) && threadIdx.x == 0) {
		state->done[KVK_EP_COMBINE_RECEIVED] = number;
	}
}
