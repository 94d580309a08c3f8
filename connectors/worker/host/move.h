/* worker/host/move.h -- blocks between the engine's cache and the pool, as this rank sees both. A group with fewer
 * layers than the rank's range is padded with zero pages. */
#ifndef KVX_MOVE_H
#define KVX_MOVE_H

#include "worker/state.h"

/* A block in the pool. */
typedef struct kvx_source {
	const void *data;
	const uint64_t *leaves; /* of the whole block */
} kvx_source_t;

/* Fill a move but for its block: the expected leaves of this group's layers are in place, or copied to leaves[words].
 */
void kvx_move_prepare(const kvx_worker_t *worker, const kvx_wgroup_t *group, const kvx_source_t *source,
		      kvk_move_t *move, uint64_t *leaves);
/* Of a padded group: zero the pages of the rank's range that it has no layer for. */
void kvx_move_zero_padding(const kvx_worker_t *worker, const kvx_wgroup_t *group, uint8_t *data);
/* Of a padded group: the leaves of the range, made of the gathered ones and of those of zero pages. */
void kvx_move_pad_leaves(const kvx_worker_t *worker, const kvx_wgroup_t *group, const uint64_t *gathered,
			 uint64_t *leaves);

#endif
