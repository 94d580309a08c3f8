/* ep_case.h -- what ranks route to each other's experts, and what these make of it, as the tests of dispatch and combine
 * have it. */
#ifndef EP_CASE_H
#define EP_CASE_H

#include "kv_cmocka.h"
#include "kv_test.h"

#include "kvk/ep.h"

/* To any expert, mostly to the first ones, to the same ones, to the rank's own, to some or none, and to nobody. */
typedef enum ep_routing { EP_RANDOM, EP_SKEWED, EP_ONE_HOT, EP_LOCAL, EP_SPARSE, EP_NOBODY, EP_ROUTINGS } ep_routing_t;

/* What one rank routes in one dispatch, with room for what comes back. Arrays are of the most tokens of the shape. */
typedef struct ep_batch {
	kvk_ep_tokens_t tokens;
	kvk_bf16_t *rows, *out;
	uint32_t *experts;
	float *weights;
} ep_batch_t;

void ep_batch_open(ep_batch_t *batch, const kvk_ep_plan_t *plan);
void ep_batch_close(const ep_batch_t *batch);
/* Rows, experts and weights of all tokens that there may be, and how many there are: as many as the plan allows. */
void ep_batch_draw(ep_batch_t *batch, const kvk_ep_plan_t *plan, kv_test_rng_t *rng, uint32_t rank,
		   ep_routing_t routing);
/* What no rank exceeds in a dispatch: 0, the plan's, or less. */
uint32_t ep_draw_most(const kvk_ep_plan_t *plan, kv_test_rng_t *rng);
/* The batch is of no more tokens than that. */
void ep_batch_bound(ep_batch_t *batch, uint32_t most);

/* Memory at a multiple of 64 bytes, zeroed: for free(). */
void *ep_alloc(size_t bytes);

/* What an expert makes of an element. Large terms cancel each other: the order of a sum shows in BF16. */
kvk_bf16_t ep_apply(uint32_t expert, kvk_bf16_t x);
/* The outputs of a rank's experts. */
void ep_run_experts(const kvk_ep_plan_t *plan, uint32_t rank, const kvk_ep_rows_t *rows, kvk_bf16_t *outputs);

#endif
