/* kvk/ep.h -- expert-parallel dispatch and combine: tokens go to the ranks of their experts, and results come back.
 *
 * Rank r of R has the experts [r * E / R, (r + 1) * E / R). Each rank routes its own tokens. A token's row goes once to
 * each rank that has one of its experts; the receiver finds the rows of an expert by an index. The rank of the experts
 * reduces what they make of a token, and sends one row for each *reduction group*. Group g of G has the experts
 * [g * E / G, (g + 1) * E / G).
 *
 * The plan fixes the arithmetic. Token t has the experts e[k] and the weights w[k]. All is fp32 unless it says BF16;
 * each product and each sum is rounded, none is fused:
 *   part(g) = BF16(sum of w[k] * y[k] over the k with e[k] in group g, in order of k, from 0)
 *   out     = BF16(sum of part(g) over the groups that have one of its experts, in order of g, from 0)
 * where y[k] is the BF16 row that expert e[k] makes. So two groups on one rank give the bits that two ranks give.
 *
 * This file and ep/twin.c are the specification of the GPU's kernels: the twin does the same in host memory.
 */
#ifndef KVK_EP_H
#define KVK_EP_H

#include "kv/env.h"
#include "kv/status.h"
#include "kvk/bf16.h"

#include <stddef.h>

#define KVK_EP_MAX_RANKS     8u
#define KVK_EP_MAX_TOP_K     16u
#define KVK_EP_MAX_EXPERTS   4096u
#define KVK_EP_MAX_HIDDEN    65536u
#define KVK_EP_MAX_TOKENS    65536u
#define KVK_EP_MAX_IN_FLIGHT 4u
#define KVK_EP_NO_EXPERT     UINT32_MAX /* in a token's list: nothing is selected there */

typedef struct kvk_ep_shape {
	uint32_t ranks;      /* R: 1 to 8                                                          */
	uint32_t experts;    /* E: a multiple of groups                                            */
	uint32_t top_k;      /* experts a token: 1 to 16, at most E                                */
	uint32_t hidden;     /* elements of a row: a multiple of 8                                 */
	uint32_t max_tokens; /* that one rank sends in one dispatch                                */
	uint32_t groups;     /* G: a multiple of ranks                                             */
	uint32_t in_flight;  /* dispatches whose combine has not been read: 1 to 4; DBO needs two  */
} kvk_ep_shape_t;

/* Everything that follows from a valid shape; offsets are those of a rank's heap, the memory that its peers write:
 *   flags     [2: dispatch, combine][source] and reports [source]: 8 bytes each, on a line of 64 bytes
 *   counts    [slot][source]: records, 4 bytes
 *   rows      [slot][source][max_tokens]: BF16 [hidden]; records of a source lie behind each other. A rank's own tokens
 *             stay where they are
 *   notes     [slot][source][max_tokens]: experts [top_k] (4 bytes), weights [top_k] (fp32), token (4): of each row
 *   parts     [slot][group][max_tokens]: BF16 row [hidden], of the owner's token with that number */
typedef struct kvk_ep_plan {
	kvk_ep_shape_t shape;
	uint32_t rank_experts;  /* experts of a rank                                                  */
	uint32_t group_experts; /* experts of a group                                                 */
	uint32_t max_rows;      /* rows that the experts of one rank get from one dispatch, at most   */
	size_t row_bytes;       /* BF16 row                                                           */
	size_t note_bytes;
	size_t record_bytes; /* a row and its note: what travels                                  */
	size_t flags, reports, counts, rows, notes, parts;
	size_t heap_bytes;  /* of each rank                                                       */
	size_t index_bytes; /* memory of a rank beside its heap: the index of what has come       */
} kvk_ep_plan_t;

/* KV_ERR_ARG: a field is out of range; *p_why (may be NULL) says which, and what is allowed (static). */
kv_status_t kvk_ep_plan(const kvk_ep_shape_t *shape, kvk_ep_plan_t *plan, const char **p_why);

/* What a rank sends. Borrowed until the combine of the dispatch has been read. */
typedef struct kvk_ep_tokens {
	uint32_t n;    /* 0 to `most`: a rank without tokens takes part, too */
	uint32_t most; /* no rank sends more in this dispatch, the same on all ranks: what a padded link moves of it and
			  of its combine; 0: max_tokens */
	const kvk_bf16_t *rows;  /* [n][hidden]                                         */
	const uint32_t *experts; /* [n][top_k], each once a token; KVK_EP_NO_EXPERT: none */
	const float *weights;    /* [n][top_k]                                          */
} kvk_ep_tokens_t;

/* What has come for a rank's experts, by expert; in one expert by source, then by token. Valid until the combine of the
 * dispatch is sent. */
typedef struct kvk_ep_rows {
	uint32_t n;             /* rows of all local experts                              */
	const uint32_t *first;  /* [local experts + 1]: the first row of each, and n      */
	const uint32_t *record; /* [n]: number of the record: source * max_tokens + i; the rank's own: + the token */
	const kvk_bf16_t *rows; /* row of record r at rows + r * hidden, but the rank's own */
	const kvk_bf16_t *own;  /* the rank's own rows, as they were sent                 */
	uint32_t own_first;     /* record of the first of them                            */
} kvk_ep_rows_t;

/* Row i: [hidden]. */
static inline const kvk_bf16_t *kvk_ep_row(const kvk_ep_plan_t *plan, const kvk_ep_rows_t *rows, uint32_t i)
{
	const uint32_t record = rows->record[i], own = record - rows->own_first;

	return own < plan->shape.max_tokens ? rows->own + (size_t)own * plan->shape.hidden
					    : rows->rows + (size_t)record * plan->shape.hidden;
}

/* How bytes reach the heaps of other ranks. One thread of the sender's. */
typedef struct kvk_ep_link {
	void *ctx;
	/* Store bytes. Stores may arrive in any order until a release. */
	void (*put)(void *ctx, uint32_t rank, size_t offset, const void *bytes, size_t n);
	/* Store 8 bytes at a multiple of 8, after everything that was put to that rank before. */
	void (*release)(void *ctx, uint32_t rank, size_t offset, uint64_t value);
	/* Called amid waits: let others run. */
	void (*pause)(void *ctx);
	/* NULL: a rank reads its heap where others put. Else that is memory which all share and nobody computes in, and
	 * this brings n bytes of the rank's to `to`, after the flag that they belong to. */
	void (*fetch)(void *ctx, uint32_t rank, size_t offset, void *to, size_t n);
	/* 1: it moves copies of a size that is known before, `most` tokens of a dispatch; 0: what there is. */
	uint32_t padded;
	uint32_t reserved;
} kvk_ep_link_t;

/* What a link is made of. Ranks of a group have the same. */
typedef enum kvk_ep_link_kind {
	KVK_EP_PEER,         /* stores to the memory in which the other rank computes                              */
	KVK_EP_HOST_COPIES,  /* copies into and out of host memory that all share, of `most` tokens of a dispatch  */
	KVK_EP_HOST_KERNELS, /* stores to it and loads of it, of what there is                                     */
} kvk_ep_link_kind_t;

/* Bytes of rows and notes sent so far, those to the rank itself not counted; and what padded copies moved beside. */
typedef struct kvk_ep_stats {
	uint64_t dispatch_bytes, combine_bytes;
	uint64_t dispatch_padding, combine_padding;
} kvk_ep_stats_t;

/* One rank's end. One thread at a time. */
typedef struct kvk_ep_rank kvk_ep_rank_t;

/* `heap`: heap_bytes of this rank, which others reach, zeroed before any rank is opened; it and the link are borrowed
 * until kvk_ep_close(). A link that fetches takes as much again.
 * KV_ERR_NOMEM; KV_ERR_ARG: no such rank. */
kv_status_t kvk_ep_open(const kv_env_t *env, const kvk_ep_plan_t *plan, uint32_t rank, void *heap,
			const kvk_ep_link_t *link, kvk_ep_rank_t **p_ep);
/* NULL is nothing. */
void kvk_ep_close(kvk_ep_rank_t *ep);

/* A link by stores to memory of this process. `heaps` (of all ranks) is borrowed; pause yields the processor. */
kvk_ep_link_t kvk_ep_memory_link(void *const *heaps);
/* The link of that kind in host memory: what the GPU's makes of the same heaps. */
kvk_ep_link_t kvk_ep_link_of(kvk_ep_link_kind_t kind, void *const *heaps);

/* The four halves of a layer's all-to-all, each in order of numbers. All ranks call them equally often and in one
 * order.
 *
 * KV_ERR_ARG: not the next number of that half, or the half before it has not been called. Of kvk_ep_dispatch_send()
 * alone: more tokens than `most`, or `most` above max_tokens; an expert that there is not, or that a token has twice.
 * Nothing has been sent.
 * KV_ERR_BUSY: in_flight dispatches wait for their combine.
 * KV_ERR_TIMEOUT: a rank has not come by the deadline (CLOCK_MONOTONIC of the environment), here or at another rank:
 * kvk_ep_lost_ranks(). The group is of no further use; all later calls end so. */
kv_status_t kvk_ep_dispatch_send(kvk_ep_rank_t *ep, const kvk_ep_tokens_t *tokens, uint64_t *p_number);
kv_status_t kvk_ep_dispatch_recv(kvk_ep_rank_t *ep, uint64_t number, uint64_t deadline_ns, kvk_ep_rows_t *p_rows);
/* outputs: [rows.n][hidden], what the experts made of each row. */
kv_status_t kvk_ep_combine_send(kvk_ep_rank_t *ep, uint64_t number, const kvk_bf16_t *outputs);
/* out: [tokens.n][hidden]; zeros for a token without experts. */
kv_status_t kvk_ep_combine_recv(kvk_ep_rank_t *ep, uint64_t number, uint64_t deadline_ns, kvk_bf16_t *out);

/* The ranks that have not come, a bit each; 0: none is missing. It may get more exact as reports of others come. */
uint32_t kvk_ep_lost_ranks(const kvk_ep_rank_t *ep);
kvk_ep_stats_t kvk_ep_get_stats(const kvk_ep_rank_t *ep);

#endif
