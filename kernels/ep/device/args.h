/* args.h -- what the kernels of the transport get, and the state of a rank that they keep in its memory. */
#ifndef KVK_EP_DEVICE_ARGS_H
#define KVK_EP_DEVICE_ARGS_H

#include "ep/heap.h"

#define KVK_EP_THREADS    256u
#define KVK_EP_WARPS      (KVK_EP_THREADS / 32u)
#define KVK_EP_NOTE_WARPS 2u              /* more, of the push: they send notes while the others send rows */
#define KVK_EP_INDEX_GRID 32u             /* blocks that build the index */
#define KVK_EP_SHARED     (200u << 10)    /* bytes of shared memory that a transport block may use */
#define KVK_EP_MAX_STAGES 8u              /* of a warp */
#define KVK_EP_ROUTE      "kvk_ep_route"  /* dispatch, send: the ranks that each token goes to */
#define KVK_EP_PUSH       "kvk_ep_push"   /* and the tokens there */
#define KVK_EP_WAIT       "kvk_ep_wait"   /* receive: until all ranks have released the number */
#define KVK_EP_COUNT      "kvk_ep_count"  /* dispatch, receive: rows of each expert in a warp's records */
#define KVK_EP_PLACE      "kvk_ep_place"  /* and where each row goes */
#define KVK_EP_REDUCE     "kvk_ep_reduce" /* combine, send: what the experts made of each record, a row a group */
#define KVK_EP_RETURN     "kvk_ep_return" /* and to the owners */
#define KVK_EP_SUM        "kvk_ep_sum"    /* combine, receive */
/* Of links through host memory: */
#define KVK_EP_PULL "kvk_ep_pull" /* a receive, by loads: what others have put there */
#define KVK_EP_FLAG "kvk_ep_flag" /* a send, by copies: what has been copied is there */

/* What a rank sends (kvk_ep_tokens_t), on the device. */
typedef struct kvk_ep_device_tokens {
	uint64_t rows, experts, weights;
	uint32_t n, reserved;
} kvk_ep_device_tokens_t;

/* Behind the halves: reductions. One may run while the number before is still being sent. */
#define KVK_EP_REDUCED (KVK_EP_COMBINE_RECEIVED + 1)

/* In the rank's device memory, zero at first. Kernels read the number of a half from it, so that one that is launched
 * again by a graph does the next. */
typedef struct kvk_ep_state {
	uint64_t done[KVK_EP_REDUCED + 1]; /* the last number of each half, and of the reductions */
	uint64_t bytes[2];                 /* sent to other ranks: dispatches, combines */
	uint64_t moved[2];                 /* by padded copies, to the same end */
	kvk_ep_device_tokens_t tokens[KVK_EP_MAX_IN_FLIGHT];
	uint32_t totals[KVK_EP_MAX_RANKS];    /* records of the dispatch that is being sent, of each rank */
	uint32_t arrived[KVK_EP_REDUCED + 1]; /* blocks of the half's kernel that have ended */
	uint32_t failed;                      /* a rank is lost */
	uint32_t refused;                     /* experts that there are not, named by tokens so far */
} kvk_ep_state_t;

typedef struct kvk_ep_args {
	kvk_ep_plan_t plan;
	uint64_t heaps[KVK_EP_MAX_RANKS]; /* as this device reaches them */
	uint64_t near;                    /* what the rank reads of its own: the heap, or what was fetched of it */
	uint64_t outbox;  /* of copies: [ranks][max_tokens] rows, then notes; 0: the push puts them into the heaps */
	uint64_t pace_ns; /* least time from one store of a warp to other ranks to the next; 0: none */
	uint64_t state;
	uint64_t index;  /* of slot s at index + s * kvk_ep_slot_words(): as the twin's */
	uint64_t masks;  /* [max_tokens] bytes: the other ranks that a token goes to, a bit each */
	uint64_t before; /* [KVK_EP_INDEX_GRID][KVK_EP_WARPS][rank_experts]: rows of the block's warps before */
	uint64_t totals; /* [KVK_EP_INDEX_GRID][rank_experts]: of the block */
	uint64_t staged; /* rows for other ranks: of slot s at staged + s * kvk_ep_staged_bytes(), [ranks * max_tokens]
				[groups of the rank], of copies [ranks][groups of the rank][max_tokens] */
	uint64_t number; /* of copies: they lie where their number says, and kernels of two may overlap; 0: the state's
				next */
	uint64_t timeout_ns; /* of a wait, from its kernel's start */
	uint32_t rank;
	uint64_t per_rank, per_group; /* kvk_ep_reciprocal() of the experts of a rank, of a group */
	/* Of kernels that move rows: warps of a block that do, stages of each, bytes of a stage: a row's, rounded up. */
	uint32_t ring_warps, stages, stage_bytes;
	uint32_t kind, half;           /* of a wait: which flags, and whose number */
	uint32_t most;                 /* flag: tokens that the copies before it were of */
	uint32_t sum_first, sum_end;   /* sum: of these tokens; from max_tokens on the end is that of the half */
	kvk_ep_device_tokens_t tokens; /* push */
	uint64_t outputs;              /* reduce: [rows][hidden] */
	uint64_t out;                  /* sum: [tokens][hidden] */
} kvk_ep_args_t;

/* a / b is a * reciprocal(b) >> 24, for a and b up to 4,096 (KVK_EP_MAX_EXPERTS): a divide is 30 instructions. */
KVK_EP_RULE uint64_t kvk_ep_reciprocal(uint32_t b)
{
	return ((1u << 24) + b - 1u) / b;
}

KVK_EP_RULE size_t kvk_ep_staged_bytes(const kvk_ep_plan_t *plan)
{
	return plan->shape.ranks * kvk_ep_rank_parts(plan);
}

/* Words of a slot of the index: first [rank_experts + 1], record [max_rows], row [ranks * max_tokens][top_k]. */
KVK_EP_RULE size_t kvk_ep_slot_words(const kvk_ep_plan_t *plan)
{
	return plan->index_bytes / sizeof(uint32_t) / plan->shape.in_flight;
}

#endif
