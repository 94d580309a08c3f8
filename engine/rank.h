/* rank.h -- the inside of ranks: what each has, what they share, and the phases of a layer. */
#ifndef KVE_RANK_IMPL_H
#define KVE_RANK_IMPL_H

#include "kve/devices.h"
#include "kve/overlap.h"
#include "kve/rank.h"

#include <stdatomic.h>

/* Where a rank says how far it has come. Counts alternate: nobody writes those of step n + 2 before all have read those
 * of step n, because all have come to step n + 1. */
typedef struct kve_seat {
	_Alignas(64) _Atomic uint64_t step; /* counts[step % 2] are there */
	kve_step_count_t counts[2];
} kve_seat_t;

/* What computes: the reference in fp32 on the CPU, or BF16 on devices. */
typedef struct kve_backend {
	/* Why it cannot compute this shape, as a sentence; NULL: it can. */
	const char *(*fault_of_shape)(const kve_config_t *config);
	/* Of a rank of this group. */
	kve_group_memory_t (*get_memory)(const kve_group_t *group);
	/* Activations, weights, and the rank's end of the transport. After a failure close() is called. */
	kv_status_t (*open)(kve_rank_t *rank);
	void (*close)(kve_rank_t *rank);
	/* The microbatches 0 to `last`, whose spans are sound. KV_ERR_TIMEOUT: a rank is lost; KV_ERR_IO: a device. */
	kv_status_t (*forward)(kve_rank_t *rank, kve_overlap_mode_t mode, uint32_t last);
	uint32_t (*find_lost)(const kve_rank_t *rank); /* with experts */
	kvk_ep_stats_t (*get_stats)(const kve_rank_t *rank);
	/* Zeroed memory for a cache. */
	kv_status_t (*open_cache)(kve_rank_t *rank, size_t bytes, void **p_at);
	void (*close_cache)(kve_rank_t *rank, void *at);
	/* Where the cache lies, for copies that the device orders: KV_ERR_UNSUPPORTED: in host memory. NULL: there. */
	kv_status_t (*get_place)(const kve_rank_t *rank, kve_place_t *place);
	/* NULL: it has no clock for its streams. */
	kv_status_t (*set_trace)(kve_rank_t *rank, kve_trace_t trace);
	kv_status_t (*read_trace)(kve_rank_t *rank, kve_clock_interval_t *intervals);
} kve_backend_t;

extern const kve_backend_t kve_backend_fp32;

/* First in what each kind of devices has. */
struct kve_devices {
	uint32_t ranks;
	const kve_backend_t *backend;       /* that computes on them */
	kve_device_t *of[KVK_EP_MAX_RANKS]; /* a rank's; NULL before it is open */
	/* Memory that the ranks reach, of a plan, zeroed; before any rank opens its end of the transport. */
	kv_status_t (*open_heaps)(kve_devices_t *devices, const kvk_ep_plan_t *plan);
	void (*close)(kve_devices_t *devices);
};

struct kve_group {
	kve_model_t model;      /* with devices its weights are empty: each rank has its own */
	kve_devices_t *devices; /* NULL: the CPU, in fp32 */
	const kve_backend_t *backend;
	uint32_t max_rows;
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
	kve_span_t spans[KVE_MAX_SPANS];
	uint32_t n_spans;
	uint32_t rows, most; /* of this rank; of any rank, if all have agreed on it, else 0 */
	float *x;            /* [rows][hidden] the residual stream */
	float *normed;       /* [rows][hidden] */
	float *q;            /* [tensor parallel rank][rows][its heads][head_dim] */
	uint32_t *ids;       /* [rows][top_k] */
	float *weights;      /* [rows][top_k] */
	kvk_bf16_t *sent;    /* [rows][hidden]: normed, in BF16 */
	uint64_t number;     /* of its dispatch */
	kvk_ep_rows_t arrived;
	kvk_bf16_t *outputs; /* [rows that may arrive][hidden]: what this rank's experts make of them */
} kve_microbatch_t;

struct kve_rank {
	kve_group_t *group;
	const kve_model_t *model;
	uint32_t number;
	struct kve_bf16_rank *
		bf16; /* of the backend of devices; what follows, but for spans, rows and lists, is kve_backend_fp32's */
	kvk_ep_rank_t *ep; /* NULL: no experts */
	kve_microbatch_t microbatches[KVE_MAX_MICROBATCHES];
	/* Room within one phase. */
	float *k, *v;         /* [rows][kv_heads][head_dim] */
	float *attended;      /* [rows][heads][head_dim] */
	float *logits;        /* [vocab]: of a span that wants none */
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

/* Its last token's logits are computed. */
static inline int kve_span_is_picked(const kve_span_t *span)
{
	return span->logits || span->chosen;
}

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
