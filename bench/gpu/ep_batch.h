// ep_batch.h -- what programs that check dispatch and combine share: batches of all kinds of routing from a seed, the
// experts' arithmetic, and the twin's answer.
#ifndef EP_BATCH_H
#define EP_BATCH_H

#include "gpu_copy.h"

extern "C" {
#include "kvk/ep_gpu.h"
#include "kvk/ep_group.h"
}

#include <memory>

typedef std::vector<uint32_t> words_t;
typedef std::vector<kvk_bf16_t> rows_t;

static std::mt19937_64 rng;

static uint32_t below(uint32_t n)
{
	return (uint32_t)(rng() % n);
}

enum routing { RANDOM, SKEWED, ONE_HOT, LOCAL, SPARSE, ROUTINGS };

struct batch_t {
	uint32_t n, most; // most: 0 or of no rank more
	rows_t rows;
	words_t experts;
	std::vector<float> weights;
};

static uint32_t draw_most(const kvk_ep_shape_t &s)
{
	return below(3) == 0 ? 0 : 1 + below(s.max_tokens);
}

static batch_t make_batch(const kvk_ep_shape_t &s, uint32_t rank, routing how, uint32_t most)
{
	const uint32_t room = most ? most : s.max_tokens;
	batch_t b;

	b.most = most;
	b.n = below(5) == 0 ? 0 : below(8) == 0 ? room : below(room) + 1;
	b.rows.resize((size_t)b.n * s.hidden);
	b.experts.resize((size_t)b.n * s.top_k);
	b.weights.resize((size_t)b.n * s.top_k);
	for (kvk_bf16_t &x : b.rows) {
		x = kvk_bf16_round((float)(int32_t)below(4001) / 1000.0f - 2.0f);
	}
	for (size_t i = 0; i < b.experts.size(); i++) {
		const uint32_t *before = &b.experts[i - i % s.top_k], own = s.experts / s.ranks;
		uint32_t e = below(s.experts);

		e = how == SKEWED                    ? std::min(e, below(s.experts))
		    : how == LOCAL && s.top_k <= own ? rank * own + below(own)
						     : e;
		e = how == ONE_HOT ? (uint32_t)(i % s.top_k) : e;
		while (std::find(before, (const uint32_t *)&b.experts[i], e) != &b.experts[i]) {
			e = how == LOCAL && s.top_k <= own ? rank * own + (e + 1) % own : (e + 1) % s.experts;
		}
		b.experts[i] = how == SPARSE && below(2) ? KVK_EP_NO_EXPERT : e;
		b.weights[i] = (float)below(1000) / 1000.0f;
	}

	return b;
}

static __host__ __device__ float factor(uint32_t expert)
{
	return 0.5f + (float)(expert % 13) * 0.125f;
}

// What the experts make: x * factor, from the rows that the index names.
static __global__ void run_experts(kvk_ep_plan_t plan, uint32_t rank, kvk_ep_gpu_rows_t rows, kvk_bf16_t *outputs)
{
	const uint32_t *first = (const uint32_t *)rows.first, *record = (const uint32_t *)rows.record;
	const uint32_t n = first[plan.rank_experts], hidden = plan.shape.hidden;

	for (uint32_t row = blockIdx.x; row < n; row += gridDim.x) {
		const uint32_t own = record[row] - rows.own_first;
		const kvk_bf16_t *x = own < plan.shape.max_tokens
					      ? (const kvk_bf16_t *)rows.own + (size_t)own * hidden
					      : (const kvk_bf16_t *)rows.rows + (size_t)record[row] * hidden;
		uint32_t e = 0;

		while (first[e + 1] <= row) {
			e++;
		}
		for (uint32_t h = threadIdx.x; h < hidden; h += blockDim.x) {
			const float y =
				__fmul_rn(__uint_as_float((uint32_t)x[h] << 16), factor(rank * plan.rank_experts + e));
			const uint32_t bits = __float_as_uint(y);

			outputs[(size_t)row * hidden + h] = (kvk_bf16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
		}
	}
}

// The twin does the same in turns.
struct twins_t {
	kvk_ep_plan_t plan;
	std::vector<std::unique_ptr<uint64_t[]>> memory;
	std::vector<void *> heaps;
	std::vector<kvk_ep_rank_t *> ranks;
	std::vector<kvk_ep_rows_t> rows;
	std::vector<rows_t> out;

	twins_t(const kvk_ep_plan_t &p, kvk_ep_link_kind_t kind)
	    : plan(p), ranks(p.shape.ranks), rows(p.shape.ranks), out(p.shape.ranks)
	{
		for (uint32_t r = 0; r < plan.shape.ranks; r++) {
			memory.emplace_back(new uint64_t[plan.heap_bytes / 8 + 1]());
			heaps.push_back(memory.back().get());
		}
		const kvk_ep_link_t link = kvk_ep_link_of(kind, heaps.data());
		for (uint32_t r = 0; r < plan.shape.ranks; r++) {
			must_kv(kvk_ep_open(&kv_env_posix, &plan, r, heaps[r], &link, &ranks[r]));
		}
	}
	~twins_t()
	{
		for (kvk_ep_rank_t *rank : ranks) {
			kvk_ep_close(rank);
		}
	}
	void dispatch(const std::vector<batch_t> &batches, uint64_t *p_number)
	{
		for (uint32_t r = 0; r < plan.shape.ranks; r++) {
			const batch_t &b = batches[r];
			const kvk_ep_tokens_t tokens = {b.n, b.most, b.rows.data(), b.experts.data(), b.weights.data()};

			must_kv(kvk_ep_dispatch_send(ranks[r], &tokens, p_number));
		}
		for (uint32_t r = 0; r < plan.shape.ranks; r++) {
			must_kv(kvk_ep_dispatch_recv(ranks[r], *p_number, 0, &rows[r]));
		}
	}
	void combine(const std::vector<batch_t> &batches, uint64_t number)
	{
		for (uint32_t r = 0; r < plan.shape.ranks; r++) {
			rows_t outputs((size_t)rows[r].n * plan.shape.hidden + 1);

			for (uint32_t e = 0; e < plan.rank_experts; e++) {
				for (uint32_t i = rows[r].first[e]; i < rows[r].first[e + 1]; i++) {
					const kvk_bf16_t *x = kvk_ep_row(&plan, &rows[r], i);

					for (uint32_t h = 0; h < plan.shape.hidden; h++) {
						outputs[(size_t)i * plan.shape.hidden + h] = kvk_bf16_round(
							kvk_bf16_to_float(x[h]) * factor(r * plan.rank_experts + e));
					}
				}
			}
			must_kv(kvk_ep_combine_send(ranks[r], number, outputs.data()));
		}
		for (uint32_t r = 0; r < plan.shape.ranks; r++) {
			out[r].assign((size_t)batches[r].n * plan.shape.hidden + 1, 0);
			must_kv(kvk_ep_combine_recv(ranks[r], number, 0, out[r].data()));
		}
	}
};

#endif
