/* kernels/cuda/driver/image.h -- the kernels of this build, as nvcc made them; private to kernels/. */
#ifndef KVK_CUDA_IMAGE_H
#define KVK_CUDA_IMAGE_H

/* For kvk_cuda_ops_t.module_load. NULL: the build had no nvcc. */
const void *kvk_gpu_image(void);
const void *kvk_ep_image(void); /* of kernels/ep */
const void *kvk_nn_image(void); /* of kernels/nn */

#endif
