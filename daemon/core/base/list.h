/* list.h -- doubly linked lists of pool objects, by 32-bit ids.
 *
 * A list is the ids of its ends; an object has one link for each list it can be in. The caller names pool and offset of
 * the link, which are constants to the compiler: a call is the code that one would write by hand.
 *
 *   unlinked --push, push_front, insert--> linked --remove, pop--> unlinked
 */
#ifndef KVD_CORE_LIST_H
#define KVD_CORE_LIST_H

#include "core/base/obj_pool.h"

#include <stddef.h>

typedef struct kvd_list {
	uint32_t head, tail; /* KVD_NONE: empty */
} kvd_list_t;

typedef struct kvd_link {
	uint32_t prev, next;
} kvd_link_t;

#define KVD_LIST_EMPTY ((kvd_list_t){KVD_NONE, KVD_NONE})

static inline kvd_link_t *kvd_link_at(const kvd_obj_pool_t *pool, size_t offset, uint32_t id)
{
	return (kvd_link_t *)(void *)((uint8_t *)kvd_obj_at(pool, id) + offset);
}

/* In front of `before`; KVD_NONE: at the tail. */
static inline void kvd_list_insert(kvd_list_t *list, const kvd_obj_pool_t *pool, size_t offset, uint32_t id,
				   uint32_t before)
{
	kvd_link_t *link = kvd_link_at(pool, offset, id);

	link->next = before;
	link->prev = before == KVD_NONE ? list->tail : kvd_link_at(pool, offset, before)->prev;
	*(link->prev == KVD_NONE ? &list->head : &kvd_link_at(pool, offset, link->prev)->next) = id;
	*(before == KVD_NONE ? &list->tail : &kvd_link_at(pool, offset, before)->prev) = id;
}

static inline void kvd_list_push(kvd_list_t *list, const kvd_obj_pool_t *pool, size_t offset, uint32_t id)
{
	kvd_list_insert(list, pool, offset, id, KVD_NONE);
}

static inline void kvd_list_push_front(kvd_list_t *list, const kvd_obj_pool_t *pool, size_t offset, uint32_t id)
{
	kvd_list_insert(list, pool, offset, id, list->head);
}

static inline void kvd_list_remove(kvd_list_t *list, const kvd_obj_pool_t *pool, size_t offset, uint32_t id)
{
	const kvd_link_t *link = kvd_link_at(pool, offset, id);

	*(link->prev == KVD_NONE ? &list->head : &kvd_link_at(pool, offset, link->prev)->next) = link->next;
	*(link->next == KVD_NONE ? &list->tail : &kvd_link_at(pool, offset, link->next)->prev) = link->prev;
}

#endif
