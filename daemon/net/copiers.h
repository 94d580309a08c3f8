/* daemon/net/copiers.h -- threads that copy blocks from the landing window into puts and compare them with their
 * digests, so that the thread of UCX only receives.
 *
 * A copy and all that it points to is the copiers' from kvd_copiers_submit() until kvd_copiers_take() has handed it
 * back: the put is not freed meanwhile, so its memory stays mapped and is nobody else's. There is one for each piece of
 * a landing window at most, which bounds the queue. All calls are made by one thread.
 */
#ifndef KVD_NET_COPIERS_H
#define KVD_NET_COPIERS_H

#include "kv/status.h"
#include "kvk/layout.h"

typedef struct kvd_copiers kvd_copiers_t;

typedef struct kvd_copy {
	struct kvd_copy *next;
	void *owner; /* of its submitter */
	const kvk_layout_t *layout;
	kvk_geometry_t geometry;
	const uint8_t *from;    /* blocks, one after another */
	const uint64_t *leaves; /* digests that they have, [count][heads][leaves] */
	uint32_t count;
	uint32_t bad; /* afterwards: leaves with other bytes */
	void *to[];   /* [count]; NULL: this block is not copied */
} kvd_copy_t;

/* KV_ERR_LIMIT: no thread or descriptor; KV_ERR_NOMEM. */
kv_status_t kvd_copiers_open(kvd_copiers_t **p_copiers);
/* Ends when what was submitted is copied; it is not handed back. NULL is fine. */
void kvd_copiers_close(kvd_copiers_t *copiers);
void kvd_copiers_submit(kvd_copiers_t *copiers, kvd_copy_t *copy);
/* One that is done; NULL: none. */
kvd_copy_t *kvd_copiers_take(kvd_copiers_t *copiers);
/* Readable when one is done. */
int kvd_copiers_fd(const kvd_copiers_t *copiers);

#endif
