/* kvk/move.h -- gather and scatter between a paged cache and canonical blocks, with leaf digests made on the way.
 *
 * This C code is the specification of the GPU kernels (kvk/gpu.h): same arguments, same bytes, same digests.
 */
#ifndef KVK_MOVE_H
#define KVK_MOVE_H

#include "kvk/layout.h"

/* One block to move. Heads and layers moved are those the paged cache holds; other ranks' ranges of the block are
 * not touched. */
typedef struct kvk_move {
	uint32_t block; /* id in the paged cache                                                         */
	uint32_t reserved;
	void *data;       /* canonical block: block_bytes                                                  */
	uint64_t *leaves; /* gather: leaf digests out; scatter: expected digests in (NULL: do not verify).
			   * [head][leaf] of the ranges this rank holds, heads x (layers x pieces) values     */
} kvk_move_t;

/* Paged cache -> canonical blocks. Digests of what was read. KV_ERR_ARG: a block id is out of range (nothing was
 * moved). */
kv_status_t kvk_gather(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves, uint32_t count);

/* Canonical blocks -> paged cache. Digests of what was read are compared with the expected ones: KV_ERR_CORRUPT
 * and *p_bad (may be NULL) names the first bad move, whose block then holds zeros; later moves may not have been
 * made. */
kv_status_t kvk_scatter(const kvk_layout_t *layout, const kvk_paged_t *paged, const kvk_move_t *moves, uint32_t count,
			uint32_t *p_bad);

/* Leaf digests of a canonical block: out[heads][leaves]; roots[heads] (either may be NULL). */
void kvk_digest_block(const kvk_layout_t *layout, const void *data, uint64_t *leaves, uint64_t *roots);

#endif
