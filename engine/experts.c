/* Experts: router, rows to their ranks, what those make of them, and back. */
#include "rank.h"

void kve_choose_experts(kve_rank_t *rank, const kve_layer_t *layer, kve_microbatch_t *m)
{
	const kve_config_t *c = &rank->model->config;

	kve_matmul(m->normed, m->rows, &layer->router, rank->router);
	kve_route(c, rank->router, m->rows, m->ids, m->weights);
	for (size_t i = 0; i < (size_t)m->rows * c->hidden; i++) {
		m->sent[i] = kvk_bf16_round(m->normed[i]);
	}
}

static uint64_t deadline_of(const kve_rank_t *rank)
{
	return kv_now_ns(&rank->group->env) + rank->group->deadline_ns;
}

/* The halves are called in order, with experts of the router: all that may happen is a rank that does not come. */
static kv_status_t check_half(kv_status_t status)
{
	kv_assert(status == KV_OK || status == KV_ERR_TIMEOUT);

	return status;
}

kv_status_t kve_send_dispatch(kve_rank_t *rank, kve_microbatch_t *m)
{
	const kvk_ep_tokens_t tokens = {.n = m->rows, .rows = m->sent, .experts = m->ids, .weights = m->weights};

	return check_half(kvk_ep_dispatch_send(rank->ep, &tokens, &m->number));
}

kv_status_t kve_recv_dispatch(kve_rank_t *rank, kve_microbatch_t *m)
{
	return check_half(kvk_ep_dispatch_recv(rank->ep, m->number, deadline_of(rank), &m->arrived));
}

/* n of the rows that have arrived for an expert. */
static void run_expert(kve_rank_t *rank, kve_microbatch_t *m, uint32_t first, uint32_t n, const kve_expert_t *expert)
{
	const kve_config_t *c = &rank->model->config;

	for (uint32_t i = 0; i < n; i++) {
		const kvk_bf16_t *row = kvk_ep_row(&rank->group->plan, &m->arrived, first + i);

		for (uint32_t h = 0; h < c->hidden; h++) {
			rank->in[(size_t)i * c->hidden + h] = kvk_bf16_to_float(row[h]);
		}
	}
	kve_matmul(rank->in, n, &expert->gate, rank->gate);
	kve_matmul(rank->in, n, &expert->up, rank->up);
	kve_swiglu(rank->gate, rank->up, (size_t)n * c->expert_inner);
	kve_matmul(rank->gate, n, &expert->down, rank->added);
	for (size_t i = 0; i < (size_t)n * c->hidden; i++) {
		m->outputs[(size_t)first * c->hidden + i] = kvk_bf16_round(rank->added[i]);
	}
}

void kve_run_experts(kve_rank_t *rank, const kve_layer_t *layer, kve_microbatch_t *m)
{
	const uint32_t experts = rank->group->plan.rank_experts;

	for (uint32_t e = 0; e < experts; e++) {
		uint32_t at = m->arrived.first[e];

		while (at < m->arrived.first[e + 1]) {
			const uint32_t left = m->arrived.first[e + 1] - at,
				       n = left < KVE_MAX_ROWS ? left : KVE_MAX_ROWS;

			run_expert(rank, m, at, n, &layer->experts[rank->number * experts + e]);
			at += n;
		}
	}
}

kv_status_t kve_send_combine(kve_rank_t *rank, kve_microbatch_t *m)
{
	return check_half(kvk_ep_combine_send(rank->ep, m->number, m->outputs));
}

kv_status_t kve_recv_combine(kve_rank_t *rank, kve_microbatch_t *m)
{
	const size_t n = (size_t)m->rows * rank->model->config.hidden;
	const kv_status_t status =
		check_half(kvk_ep_combine_recv(rank->ep, m->number, deadline_of(rank), rank->combined));

	for (size_t i = 0; i < n && status == KV_OK; i++) {
		m->x[i] += kvk_bf16_to_float(rank->combined[i]);
	}

	return status;
}
