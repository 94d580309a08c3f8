/* rows.h -- how the kernels of rows.cuh are launched. What a block is made of fixes the order of a row's sums. */
#ifndef KVK_NN_ROWS_H
#define KVK_NN_ROWS_H

#define KVK_NN_ROWS_THREADS   256u /* of draw, qkv, embed and norm; the last two: a block a row */
#define KVK_NN_ROUTE_ROWS     4u   /* rows of a block, a warp each */
#define KVK_NN_CHOOSE_THREADS 512u
#define KVK_NN_CHOOSE_BLOCKS  8u /* a row: one cluster */

#endif
