/* pass.h -- a rank that computes in BF16 on a device: its activations, and what a step tells the device. */
#ifndef KVE_BF16_PASS_H
#define KVE_BF16_PASS_H

#include "bf16/weights.h"
#include "rank.h"

/* Of one microbatch, on the device. */
typedef struct kve_bf16_microbatch {
	float *x;             /* [rows][hidden] the residual stream */
	kvk_bf16_t *sent;     /* [rows][hidden] normed: what experts get */
	kvk_bf16_t *combined; /* [rows][hidden] what came back, and is added to x before the next norm */
	uint32_t *ids;        /* [rows][top_k] */
	float *weights;       /* [rows][top_k] */
	uint64_t number;      /* of its dispatch */
	kvk_ep_rows_t arrived;
	/* What the step says, of rows and of sequences. */
	void *said;
	const uint32_t *tokens, *blocks, *pick;
	const kvk_nn_row_t *places;
	const kvk_nn_tile_t *tile;
	uint32_t tiles, max_blocks;
	uint32_t picks, wants_logits; /* rows whose logits are computed; whether the host wants them */
	uint32_t most_rows;           /* of a tile */
} kve_bf16_microbatch_t;

typedef struct kve_bf16_rank {
	kve_device_t *device;
	kvk_nn_t *nn; /* the device's, of this pass's mode */
	kve_trace_t trace;
	uint32_t item; /* number of the item that is enqueued next */
	kve_bf16_weights_t weights;
	kve_bf16_microbatch_t microbatches[KVE_MAX_MICROBATCHES];
	/* Within one phase, on the device. */
	kvk_bf16_t *normed;       /* [rows][hidden] */
	kvk_bf16_t *qkv;          /* [rows][heads + 2 kv_heads][head_dim] */
	kvk_bf16_t *q;            /* [rows][heads][head_dim] */
	kvk_bf16_t *attended;     /* [rows][heads][head_dim] */
	kvk_bf16_t *inner;        /* [rows][inner] */
	float *router;            /* [rows][experts] */
	kvk_bf16_t *expert_inner; /* [rows that may arrive][expert_inner] */
	kvk_bf16_t *outputs;      /* [rows that may arrive][hidden] */
	float *logits;            /* [KVE_MAX_SPANS][vocab] */
	uint32_t *chosen;         /* [KVE_MAX_SPANS] */
	void *memory;
	/* In host memory, pinned. */
	void *said[KVE_MAX_MICROBATCHES];
	float *host_logits;
	uint32_t *host_chosen;
} kve_bf16_rank_t;

extern const kve_backend_t kve_backend_bf16;

/* One phase of a layer, enqueued. */
kv_status_t kve_bf16_run_phase(kve_rank_t *rank, kve_phase_t phase, uint32_t layer, uint32_t microbatch);

#endif
