/* kernels/cuda/args.h -- a copy, described for the kernels, and the way it goes. */
#ifndef KVK_CUDA_ARGS_H
#define KVK_CUDA_ARGS_H

#include "gpu.h"

/* What a copy is made of, decided before anything is taken. */
typedef struct kvk_gpu_describe_copy {
	const kvk_gpu_copy_t *copy;
	kvk_gpu_args_t args; /* but for the addresses */
	kvk_geometry_t geometry;
	kvk_gpu_way_t way;
	uint32_t sms;
	uint32_t max_in_flight;  /* of a scatter over the link; 0: any number of bytes */
	int digests;             /* some move has leaves */
	kvk_gpu_mem_kind_t kind; /* the hardest to reach of all blocks' */
	uint32_t staged_layers;  /* layers a chunk of STAGED takes */
	uint32_t staged_ranges;  /* ceil(layers / staged_layers); other ways: 0 */
	uint64_t pool_bytes;     /* of a block */
} kvk_gpu_copy_desc_t;

/* Check a copy and choose its way; `kind` as in the desc. KV_ERR_ARG, KV_ERR_UNSUPPORTED. */
kv_status_t kvk_gpu_describe_copy(kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, kvk_gpu_mem_kind_t kind,
				  kvk_gpu_copy_desc_t *desc);
/* KV_ERR_UNSUPPORTED: the stream is being captured. KV_ERR_IO. */
kv_status_t kvk_gpu_check_capture(kvk_gpu_t *gpu, kvk_cu_stream_t stream);
/* What was measured for this cache and a copy of this size; KVK_GPU_AUTO: nothing. */
kvk_gpu_way_t kvk_gpu_find_way(const kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy, uint64_t bytes);
/* Did the link gain from many SMs and from all the bytes that they can have in flight? */
int kvk_gpu_link_is_wide(const kvk_gpu_t *gpu, const kvk_gpu_copy_t *copy);
/* What was measured for this layout and cache; NULL: nothing. / Keep it for this layout and cache. */
const kvk_gpu_choice_t *kvk_gpu_find_choice(const kvk_gpu_t *gpu, const kvk_layout_t *layout, const kvk_paged_t *paged);
void kvk_gpu_keep_choice(kvk_gpu_t *gpu, const kvk_gpu_choice_t *choice);

#endif
