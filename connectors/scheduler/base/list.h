/* scheduler/base/list.h -- lists of loads, puts and hand-overs, the oldest first.
 *
 * A list is a pointer to its first item and one to where the last points on, its `end`. Items have the next one, and a
 * link: what points at them; NULL: they are in no list. */
#ifndef KVX_SCHEDULER_LIST_H
#define KVX_SCHEDULER_LIST_H

#define KVX_LIST_APPEND(item, next, link, end)                                                                         \
	do {                                                                                                           \
		(item)->next = NULL;                                                                                   \
		(item)->link = (end);                                                                                  \
		*(end) = (item);                                                                                       \
		(end) = &(item)->next;                                                                                 \
	} while (0)

#define KVX_LIST_REMOVE(item, next, link, end)                                                                         \
	do {                                                                                                           \
		*(item)->link = (item)->next;                                                                          \
		*((item)->next ? &(item)->next->link : &(end)) = (item)->link;                                         \
		(item)->next = NULL;                                                                                   \
		(item)->link = NULL;                                                                                   \
	} while (0)

#endif
