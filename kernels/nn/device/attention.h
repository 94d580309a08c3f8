/* kernels/nn/device/attention.h -- the shape of attention's kernels, for the host that launches them. */
#ifndef KVK_NN_DEVICE_ATTENTION_H
#define KVK_NN_DEVICE_ATTENTION_H

#define KVK_NN_ATTENTION_KEYS           64u /* of a tile; a slot has the keys of one, or the values, BF16 */
#define KVK_NN_ATTENTION_SLOT(head_dim) (KVK_NN_ATTENTION_KEYS * (head_dim)*2u)

/* Tiles of up to 64 virtual rows: four warps, 16 rows each, that load as well. */
#define KVK_NN_ATTENTION_THREADS 128u
#define KVK_NN_ATTENTION_SLOTS   4u

/* Of up to 32. */
#define KVK_NN_ATTENTION_FEW_THREADS 64u
#define KVK_NN_ATTENTION_FEW_SLOTS   3u

/* Of up to 128: one warp group loads, two multiply 64 rows each. */
#define KVK_NN_ATTENTION_WIDE_THREADS 384u
#define KVK_NN_ATTENTION_WIDE_SLOTS   8u
/* Slots begin at a multiple of 1,024 bytes; two barriers for each. */
#define KVK_NN_ATTENTION_WIDE_REST (1024u + KVK_NN_ATTENTION_WIDE_SLOTS * 2u * 8u)

#endif
