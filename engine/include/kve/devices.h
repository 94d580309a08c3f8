/* kve/devices.h -- what the ranks of a BF16 engine compute on.
 *
 * The reference engine computes in fp32 on the CPU (kve/ops.h). With devices it computes in BF16, by the operations of
 * kvk/nn.h: on GPUs, or on the CPU by their twins, which is how a machine without a GPU runs the same engine.
 * A token's logits are the same bits alone and in company, in chunks, on one rank and several, in one batch and in two
 * microbatches; a GPU's are close to the twins' and to the reference's, and not equal.
 */
#ifndef KVE_DEVICES_H
#define KVE_DEVICES_H

#include "kve/config.h"
#include "kvk/ep.h"

typedef struct kve_device kve_device_t; /* of one rank */
typedef struct kve_devices kve_devices_t;

typedef struct kve_devices_config {
	uint32_t ranks;          /* 1 to 8 */
	uint32_t gpus;           /* rank r computes on GPU r % gpus; 0: one */
	kvk_ep_link_kind_t link; /* between ranks */
	uint64_t pace;           /* of KVK_EP_HOST_KERNELS, kvk/ep_gpu.h */
	uint32_t transport_sms;  /* of each rank, that compute leaves free in two microbatches; 0: 8, 2 with copies */
	uint32_t timeout_ms;     /* longest wait for another rank; 0: 10,000 */
} kve_devices_config_t;

/* Why devices cannot compute this shape, as a sentence; NULL: they can. */
const char *kve_devices_fault_of_shape(const kve_config_t *config);

/* GPUs of this process. KV_ERR_UNSUPPORTED: no driver, no kernels in this build, or fewer GPUs: kvk_gpu_last_error().
 * KV_ERR_NOMEM, KV_ERR_IO. */
kv_status_t kve_devices_open_gpus(const kve_devices_config_t *config, kve_devices_t **p_devices);
/* The CPU. KV_ERR_NOMEM. */
kv_status_t kve_devices_open_twins(const kve_devices_config_t *config, kve_devices_t **p_devices);
/* After all groups and ranks that use them. NULL is nothing. */
void kve_devices_close(kve_devices_t *devices);

#endif
