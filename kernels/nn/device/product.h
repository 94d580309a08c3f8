/* kernels/nn/device/product.h -- the shape of the product's kernels, for the host that launches them. */
#ifndef KVK_NN_DEVICE_PRODUCT_H
#define KVK_NN_DEVICE_PRODUCT_H

#define KVK_NN_PRODUCT_THREADS    384u /* three warp groups: one loads, two multiply */
#define KVK_NN_PRODUCT_ROWS       128u /* of a tile of y */
#define KVK_NN_PRODUCT_MAX_GROUPS 2048u

/* A tile has one panel of weights or two: 128 outputs or 256. A stage, in bytes, holds 64 inputs of its rows and of its
 * outputs; the ring is 192 KiB of either. */
#define KVK_NN_PRODUCT_OUTPUTS(panels) (128u * (panels))
#define KVK_NN_PRODUCT_STAGE(panels)   (16384u * (1u + (panels)))
#define KVK_NN_PRODUCT_STAGES(panels)  (12u / (1u + (panels)))

/* Dynamic shared memory: the stages at a multiple of 1,024 bytes, a tile's name and two barriers for each, and three
 * tables of the groups. */
#define KVK_NN_PRODUCT_SHARED(panels, groups)                                                                          \
	(1024u + KVK_NN_PRODUCT_STAGES(panels) * (KVK_NN_PRODUCT_STAGE(panels) + 16u + 2u * 8u) +                      \
	 3u * 4u * ((groups) + 1u))

#endif
