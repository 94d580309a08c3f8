/* pd_sim.h -- prefill and decode engines that serve a request trace, in virtual time, with the decisions of
 * proxy/decide.c.
 *
 * An engine computes step after step: one token of each request that decodes, and up to a chunk of tokens of prompts. A
 * step takes
 *   step_ns + max(weights_ns, token_ns x tokens) + kv_ns x tokens of context + pair_ns x (b^2 - a^2) of each chunk [a,
 * b) so that a local prefill slows what decodes beside it. All engines share a pool of blocks, which loses the least
 * recently used ones; what is there is loaded in transfer_ns a token, outside of steps. So is what is handed over.
 * Times are nanoseconds.
 */
#ifndef BENCH_PD_SIM_H
#define BENCH_PD_SIM_H

#include "decide.h"
#include "kvctl/trace.h"

typedef struct pd_model {
	double request_ns; /* from arrival to an engine's scheduler */
	double step_ns, weights_ns, token_ns, pair_ns, kv_ns;
	double handover_ns, transfer_ns;
	uint32_t chunk, prefill_chunk,
		decode_chunk; /* tokens of prompts a step: of engines that do both, and of others */
	uint32_t pool_blocks; /* of the trace's blocks */
	double rate;          /* the trace's arrivals are this much faster */
} pd_model_t;

typedef struct pd_setup {
	uint32_t prefill_n, decode_n; /* decode engines compute prompts too, where decided so */
	kvp_thresholds_t thresholds;
} pd_setup_t;

typedef enum pd_figure { PD_TTFT_MEAN, PD_TTFT_P99, PD_TPOT_MEAN, PD_TPOT_P99, PD_FIGURES } pd_figure_t;

typedef struct pd_result {
	double ns[PD_FIGURES];
	uint32_t requests, handed_over; /* of those that count */
} pd_result_t;

/* Serve requests [0, end) of the trace; those from `from` on count. 0: out of memory. */
int pd_simulate(const trace_t *trace, const pd_model_t *model, const pd_setup_t *setup, uint32_t from, uint32_t end,
		pd_result_t *result);

/* What the proxy is told of such engines. */
kvp_costs_t pd_costs(const pd_model_t *model);

#endif
