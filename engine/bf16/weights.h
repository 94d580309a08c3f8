/* weights.h -- the weights of one rank on its device: all of attention, its share of the experts. */
#ifndef KVE_BF16_WEIGHTS_H
#define KVE_BF16_WEIGHTS_H

#include "bf16/device.h"
#include "kve/weights.h"

/* Matrices are tiles of kvk/nn.h. */
typedef struct kve_bf16_layer {
	const float *attention_norm, *mlp_norm;
	const float *q_norm, *k_norm; /* NULL without */
	const kvk_bf16_t *qkv;        /* hidden -> (heads + 2 kv_heads) x head_dim */
	const kvk_bf16_t *o;
	const kvk_bf16_t *gate_up, *down; /* hidden -> 2 x inner, in panels of SwiGLU; inner -> hidden; NULL without */
	const kvk_bf16_t *router;         /* NULL without experts */
	const kvk_bf16_t *expert_gate_up; /* of this rank's experts, one after another */
	const kvk_bf16_t *expert_down;
} kve_bf16_layer_t;

typedef struct kve_bf16_weights {
	const kvk_bf16_t *embedding; /* [vocab][hidden] */
	const float *final_norm;
	const kvk_bf16_t *head;
	const float *rotation; /* [max_tokens][head_dim / 2][cos, sin] */
	kve_bf16_layer_t *layers;
	void *memory;
	size_t bytes;
} kve_bf16_weights_t;

/* Which experts a rank has: all of them, divided among `ranks`. */
typedef struct kve_bf16_share {
	uint32_t rank, ranks;
} kve_bf16_share_t;

/* Bytes of a rank's weights. */
size_t kve_bf16_weights_bytes(const kve_config_t *config, const kve_bf16_share_t *share);
/* Draw them. KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kve_bf16_weights_init(kve_bf16_weights_t *weights, kve_device_t *device, const kve_config_t *config,
				  const kve_bf16_share_t *share);
/* Zeros are nothing. */
void kve_bf16_weights_fini(kve_bf16_weights_t *weights, kve_device_t *device);

#endif
