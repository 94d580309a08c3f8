/* rank.h -- the inside of ranks: what each has, what they share, and the phases of a layer. */
#ifndef KVE_RANK_IMPL_H
#define KVE_RANK_IMPL_H

#include "kve/overlap.h"
#include "kve/rank.h"

#include <stdatomic.h>

/* Where a rank says how far it has come. Counts alternate: nobody writes those of step n + 2 before all have read those
 * of step n, because all have come to step n + 1. */
typedef struct kve_seat {
	_Alignas(64) _Atomic uint64_t step; /* counts[step % 2] are there */
	kve_step_count_t counts[2];
} kve_seat_t;

struct kve_group {
	kve_model_t model;
	kv_env_t env;
	uint64_t deadline_ns; /* of one wait */
	kve_dbo_config_t dbo;
	uint32_t ranks;
	kvk_ep_plan_t plan; /* with experts */
	void *heaps[KVK_EP_MAX_RANKS];
	kvk_ep_link_t link;
	kve_seat_t seats[KVK_EP_MAX_RANKS];
	_Atomic uint64_t report; /* 0: no rank is lost; kve_report_lost() */
};

/* Activations that outlive a phase: two microbatches stand in different phases. */
typedef struct kve_microbatch {
	kve_span_t spans[KVE_MAX_ROWS];
	uint32_t n_spans;
	uint32_t rows;
	float *x;         /* [rows][hidden] the residual stream */
	float *normed;    /* [rows][hidden] */
	float *q;         /* [tensor parallel rank][rows][its heads][head_dim] */
	uint32_t *ids;    /* [rows][top_k] */
	float *weights;   /* [rows][top_k] */
	kvk_bf16_t *sent; /* [rows][hidden]: normed, in BF16 */
	uint64_t number;  /* of its dispatch */
	kvk_ep_rows_t arrived;
	kvk_bf16_t *outputs; /* [rows that may arrive][hidden]: what this rank's experts make of them */
} kve_microbatch_t;

struct kve_rank {
	kve_group_t *group;
	const kve_model_t *model;
	uint32_t number;
	kvk_ep_rank_t *ep; /* NULL: no experts */
	kve_microbatch_t microbatches[KVE_MAX_MICROBATCHES];
	/* Room within one phase. */
	float *k, *v;         /* [rows][kv_heads][head_dim] */
	float *attended;      /* [rows][heads][head_dim] */
	float *added;         /* [rows][hidden]: what a branch adds */
	float *gate, *up;     /* [rows][inner or expert_inner] */
	float *in;            /* [rows][hidden]: of one expert */
	float *scores;        /* kve_attention_scratch() */
	float *share;         /* [rows][outputs of a tensor parallel rank] before they are put together */
	float *router;        /* [rows][experts] */
	kvk_bf16_t *combined; /* [rows][hidden] */
	kve_overlap_item_t *items[KVE_OVERLAP_DBO + 1]; /* of each mode */
	uint32_t n_items[KVE_OVERLAP_DBO + 1];
	/* Of this pass. */
	kve_cache_t *cache;
	kve_config_t tp_share; /* what one tensor parallel rank has */
	void *memory;
	uint64_t steps[KVE_OVERLAP_DBO + 1]; /* passes in each mode */
};

/* This rank waits for ranks that do not come: within its step, or to agree on it. */
void kve_report_lost(kve_rank_t *rank, int in_step, uint32_t lost);

/* y = x w, each tensor parallel rank its share of the outputs. */
void kve_rank_matmul(kve_rank_t *rank, const float *x, uint32_t rows, const kve_matrix_t *w, float *y);

/* One phase of a layer for one microbatch; nothing, if the layer does not have it. Only those of the transport fail,
 * with KV_ERR_TIMEOUT. */
kv_status_t kve_run_phase(kve_rank_t *rank, kve_phase_t phase, uint32_t layer, uint32_t microbatch);

/* Phases of experts.c. */
void kve_choose_experts(kve_rank_t *rank, const kve_layer_t *layer, kve_microbatch_t *m);
kv_status_t kve_send_dispatch(kve_rank_t *rank, kve_microbatch_t *m);
kv_status_t kve_recv_dispatch(kve_rank_t *rank, kve_microbatch_t *m);
void kve_run_experts(kve_rank_t *rank, const kve_layer_t *layer, kve_microbatch_t *m);
kv_status_t kve_send_combine(kve_rank_t *rank, kve_microbatch_t *m);
kv_status_t kve_recv_combine(kve_rank_t *rank, kve_microbatch_t *m);

#endif
