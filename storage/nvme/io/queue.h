/* storage/nvme/io/queue.h -- a bounded ring of pointers between two threads, and an eventfd that wakes the reader.
 *
 * One thread pushes, one pops. The eventfd is written only when the reader has said that it goes to
 * sleep.
 */
#ifndef KVS_NVME_IO_QUEUE_H
#define KVS_NVME_IO_QUEUE_H

#include "kv/env.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <unistd.h>

typedef struct kvs_queue {
	void **item;
	uint32_t mask;
	char apart[64];
	_Atomic uint32_t head; /* next to pop; the reader's */
	char apart_too[64];
	_Atomic uint32_t tail; /* next to push; the writer's */
} kvs_queue_t;

/* `cap` is a power of two. */
static inline int kvs_queue_init(kvs_queue_t *q, const kv_env_t *env, uint32_t cap)
{
	q->item = kv_alloc(env, cap * sizeof *q->item);
	q->mask = cap - 1u;
	atomic_init(&q->head, 0);
	atomic_init(&q->tail, 0);

	return q->item != NULL;
}

/* 0: full. */
static inline int kvs_queue_push(kvs_queue_t *q, void *item)
{
	uint32_t tail = atomic_load_explicit(&q->tail, memory_order_relaxed);

	if (tail - atomic_load_explicit(&q->head, memory_order_acquire) > q->mask) {
		return 0;
	}

	q->item[tail & q->mask] = item;
	/* Sequentially consistent, as are the reader's load of tail and both accesses to `armed`: either the reader
	 * sees this item before it sleeps, or the writer sees `armed` and signals. With release and acquire alone both
	 * could miss. */
	atomic_store_explicit(&q->tail, tail + 1u, memory_order_seq_cst);

	return 1;
}

/* NULL: empty. */
static inline void *kvs_queue_pop(kvs_queue_t *q)
{
	uint32_t head = atomic_load_explicit(&q->head, memory_order_relaxed);
	void *item;

	if (head == atomic_load_explicit(&q->tail, memory_order_seq_cst)) {
		return NULL;
	}

	item = q->item[head & q->mask];
	atomic_store_explicit(&q->head, head + 1u, memory_order_release);

	return item;
}

static inline int kvs_queue_empty(kvs_queue_t *q)
{
	return atomic_load_explicit(&q->head, memory_order_relaxed) ==
	       atomic_load_explicit(&q->tail, memory_order_seq_cst);
}

typedef struct kvs_wakeup {
	int fd;
	_Atomic int armed; /* 1: the reader sleeps, or is about to */
} kvs_wakeup_t;

/* Reader: about to sleep on fd. Look at the queue once more after this. */
static inline void kvs_wakeup_arm(kvs_wakeup_t *wakeup)
{
	atomic_store_explicit(&wakeup->armed, 1, memory_order_seq_cst);
}

/* Reader: awake, and has read the eventfd if it was readable. */
static inline void kvs_wakeup_disarm(kvs_wakeup_t *wakeup)
{
	atomic_store_explicit(&wakeup->armed, 0, memory_order_seq_cst);
}

/* Writer: something was pushed. */
static inline void kvs_wakeup_signal(kvs_wakeup_t *wakeup)
{
	static const uint64_t one = 1;

	if (atomic_exchange_explicit(&wakeup->armed, 0, memory_order_seq_cst)) {
		while (write(wakeup->fd, &one, sizeof one) < 0 && errno == EINTR) {
		}
	}
}

static inline void kvs_wakeup_clear(kvs_wakeup_t *wakeup)
{
	uint64_t count;

	while (read(wakeup->fd, &count, sizeof count) < 0 && errno == EINTR) {
	}
}

#endif
