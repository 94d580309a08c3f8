/* kernels/nn/device/product.h -- the shape of the products' kernels, for the host that launches them. */
#ifndef KVK_NN_DEVICE_PRODUCT_H
#define KVK_NN_DEVICE_PRODUCT_H

#define KVK_NN_PRODUCT_THREADS 384u /* three warp groups: one loads, two multiply */

/* A stage of the ring, in bytes, holds 64 inputs of the rows and of the panels of a tile. Beside it: two barriers and
 * the tile's name. The stages lie at a multiple of 1,024 bytes. */
#define KVK_NN_PRODUCT_STAGE(rows, panels) (128u * (rows) + 16384u * (panels))
#define KVK_NN_PRODUCT_STAGE_STATE         36u
#define KVK_NN_PRODUCT_RING(rows, panels, stages)                                                                      \
	(1024u + (stages) * (KVK_NN_PRODUCT_STAGE(rows, panels) + KVK_NN_PRODUCT_STAGE_STATE))
/* Behind the ring: two tables of the groups. */
#define KVK_NN_PRODUCT_TABLES(groups) (2u * 4u * ((groups) + 1u))
#define KVK_NN_PRODUCT_MAX_GROUPS     1280u

/* A tile of y has 128 rows, and one panel of weights or two: 128 outputs or 256. The ring is 192 KiB of either. */
#define KVK_NN_PRODUCT_ROWS            128u
#define KVK_NN_PRODUCT_OUTPUTS(panels) (128u * (panels))
#define KVK_NN_PRODUCT_STAGES(panels)  (12u / (1u + (panels)))
#define KVK_NN_PRODUCT_SHARED(panels, groups)                                                                          \
	(KVK_NN_PRODUCT_RING(KVK_NN_PRODUCT_ROWS, panels, KVK_NN_PRODUCT_STAGES(panels)) +                             \
	 KVK_NN_PRODUCT_TABLES(groups))

/* Of groups: a tile has any number of rows up to 160, and two panels, but for the last of an odd number. */
#define KVK_NN_GROUP_ROWS   160u
#define KVK_NN_GROUP_PANELS 2u
#define KVK_NN_GROUP_STAGES 4u
#define KVK_NN_GROUP_SHARED(groups)                                                                                    \
	(KVK_NN_PRODUCT_RING(KVK_NN_GROUP_ROWS, KVK_NN_GROUP_PANELS, KVK_NN_GROUP_STAGES) +                            \
	 KVK_NN_PRODUCT_TABLES(groups))

#endif
