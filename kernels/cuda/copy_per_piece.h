/* kernels/cuda/copy_per_piece.h -- one copy of the driver a piece; the host makes the digests. */
#ifndef KVK_CUDA_COPY_PER_PIECE_H
#define KVK_CUDA_COPY_PER_PIECE_H

#include "args.h"

kv_status_t kvk_gpu_copy_per_piece(kvk_gpu_t *gpu, const kvk_gpu_copy_desc_t *desc, const kvk_gpu_job_t *job);
/* All copies have ended: make the digests of a gather, compare those of a scatter, in job->leaves and job->bad. */
void kvk_gpu_digest_pieces(kvk_gpu_job_t *job);

#endif
