/* wheel.h -- a timing wheel: the objects of a pool by the time at which they expire. Adding and removing one is O(1),
 * and so is each turn of the clock.
 *
 *   unlinked --add--> waits in the bucket of its time --remove, or its time has come: expire()--> unlinked
 *
 * An object expires at most one bucket's width late. One whose time is rounds of the wheel away is passed once a round.
 */
#ifndef KVD_CORE_WHEEL_H
#define KVD_CORE_WHEEL_H

#include "core/base/list.h"

#define KVD_WHEEL_BUCKETS 256u
#define KVD_WHEEL_SHIFT   26u /* 67 ms a bucket */

typedef struct kvd_wheel {
	kvd_list_t buckets[KVD_WHEEL_BUCKETS];
	uint64_t at; /* next bucket to look at */
} kvd_wheel_t;

/* What hangs in a wheel, and how it ends. */
typedef struct kvd_wheel_items {
	const kvd_obj_pool_t *pool;
	size_t link;   /* offset of its kvd_link_t */
	size_t expiry; /* offset of its uint64_t nanoseconds */
	/* Remove the object from its bucket, and no other object from any. Returns the work done: 1, or more where one
	 * object is much. */
	uint32_t (*expire)(void *ctx, uint32_t id);
	void *ctx;
} kvd_wheel_items_t;

void kvd_wheel_init(kvd_wheel_t *wheel, uint64_t now_ns);
/* Expire what is due, a quantum of it; 1 while there is more. */
int kvd_wheel_run(kvd_wheel_t *wheel, const kvd_wheel_items_t *items, uint64_t now_ns);

/* The bucket of an object that expires then: for kvd_list_push_front() and kvd_list_remove(). */
static inline kvd_list_t *kvd_wheel_bucket(kvd_wheel_t *wheel, uint64_t expiry_ns)
{
	return &wheel->buckets[(expiry_ns >> KVD_WHEEL_SHIFT) % KVD_WHEEL_BUCKETS];
}

#endif
