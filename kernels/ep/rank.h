/* rank.h -- one rank's end in host memory: what its files share. */
#ifndef KVK_EP_RANK_H
#define KVK_EP_RANK_H

#include "ep/heap.h"

/* A dispatch of this rank, until its combine has been read. */
typedef struct kvk_ep_result {
	kvk_ep_tokens_t tokens; /* `most` is never 0 here */
	uint32_t *first;        /* [rank_experts + 1]                                                          */
	uint32_t *record;       /* [max_rows]                                                                  */
	uint32_t *row;          /* [ranks * max_tokens][top_k]: the row of a record's k-th expert, if it is here */
} kvk_ep_result_t;

struct kvk_ep_rank {
	kv_env_t env;
	kvk_ep_plan_t plan;
	uint32_t rank;
	uint32_t failed; /* this rank has given up, or has heard of one that has */
	uint8_t *heap;   /* where others put, and the flags */
	uint8_t *near;   /* what it reads of it: the heap, or what was fetched of it */
	uint8_t *outbox; /* of a padded link: what goes to one rank */
	kvk_ep_link_t link;
	uint64_t done[4]; /* the last number of each half: dispatch sent, received, combine sent, received */
	kvk_ep_stats_t stats;
	float *sum;       /* [hidden]: of the part, or the token, that is being reduced */
	kvk_bf16_t *part; /* [hidden] */
	kvk_ep_result_t results[KVK_EP_MAX_IN_FLIGHT];
	uint32_t index[]; /* index_bytes */
};

static inline kvk_ep_result_t *kvk_ep_result(kvk_ep_rank_t *ep, uint64_t number)
{
	return &ep->results[kvk_ep_slot(number, ep->plan.shape.in_flight)];
}

/* Wait until all ranks have released that number. KV_ERR_TIMEOUT: one has not, and the others are told; or another rank
 * has given up. */
kv_status_t kvk_ep_await(kvk_ep_rank_t *ep, uint32_t kind, uint64_t number, uint64_t deadline_ns);
/* Release the flag at all ranks. */
void kvk_ep_release(kvk_ep_rank_t *ep, uint32_t kind, uint64_t number);

#endif
