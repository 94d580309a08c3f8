/* Copying threads: see copiers.h. Two lists under one lock, which nobody holds while it copies. */
#include "net/copiers.h"

#include "kv/system.h"
#include "kv/digest.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#define COPIERS 2u /* one copies faster than TCP brings bytes, but not where memory is touched for the first time */

typedef struct queue {
	kvd_copy_t *head, **tail;
} queue_t;

struct kvd_copiers {
	pthread_t threads[COPIERS];
	uint32_t count;
	int fd; /* eventfd: counts those that are done */
	pthread_mutex_t lock;
	pthread_cond_t wake;
	queue_t waiting, done;
	int stop;
};

static void push(queue_t *queue, kvd_copy_t *copy)
{
	copy->next = NULL;
	*queue->tail = copy;
	queue->tail = &copy->next;
}

static kvd_copy_t *pop(queue_t *queue)
{
	kvd_copy_t *copy = queue->head;

	if (copy) {
		queue->head = copy->next;
		queue->tail = queue->head ? queue->tail : &queue->head;
	}

	return copy;
}

/* ---- a thread -------------------------------------------------------------------------------- */

static void copy_block(kvd_copy_t *copy, uint32_t i)
{
	const kvk_geometry_t *geometry = &copy->geometry;
	const uint8_t *from = copy->from + (size_t)i * geometry->block_bytes;
	const uint64_t *want = copy->leaves + (size_t)i * geometry->heads * geometry->leaves;
	uint8_t *to = copy->to[i];

	for (uint32_t head = 0; head < geometry->heads; head++) {
		for (uint32_t leaf = 0; leaf < geometry->leaves; leaf++) {
			size_t offset, len;

			kvk_layout_leaf(copy->layout, head, leaf, &offset, &len);
			copy->bad += kv_copy_digest_part(to + offset, from + offset, len) != *want++;
		}
	}
}

/* The next one, which is waited for; NULL: stop. */
static kvd_copy_t *next_copy(kvd_copiers_t *copiers)
{
	kvd_copy_t *copy;

	pthread_mutex_lock(&copiers->lock);
	while (!(copy = pop(&copiers->waiting)) && !copiers->stop) {
		pthread_cond_wait(&copiers->wake, &copiers->lock);
	}
	pthread_mutex_unlock(&copiers->lock);

	return copy;
}

static void *work(void *arg)
{
	const uint64_t one = 1;
	kvd_copiers_t *copiers = arg;
	kvd_copy_t *copy;

	prctl(PR_SET_NAME, "kvd-net-copy");
	while ((copy = next_copy(copiers))) {
		for (uint32_t i = 0; i < copy->count; i++) {
			if (copy->to[i]) {
				copy_block(copy, i);
			}
		}
		kv_copy_fence();
		pthread_mutex_lock(&copiers->lock);
		push(&copiers->done, copy);
		pthread_mutex_unlock(&copiers->lock);
		if (write(copiers->fd, &one, sizeof one) < 0) {
			continue; /* it cannot be full; and the other side looks at the list anyway */
		}
	}

	return NULL;
}

/* ---- calls ----------------------------------------------------------------------------------- */

kv_status_t kvd_copiers_open(kvd_copiers_t **p_copiers)
{
	kvd_copiers_t *copiers = calloc(1, sizeof *copiers);
	kv_status_t status = KV_OK;
	int error = 0;

	if (!copiers) {
		return KV_ERR_NOMEM;
	}
	copiers->waiting.tail = &copiers->waiting.head;
	copiers->done.tail = &copiers->done.head;
	pthread_mutex_init(&copiers->lock, NULL);
	pthread_cond_init(&copiers->wake, NULL);
	copiers->fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (copiers->fd < 0) {
		status = kv_refused(&kv_env_posix, "net", "eventfd", errno);
	}
	while (copiers->fd >= 0 && copiers->count < COPIERS && error == 0) {
		error = pthread_create(&copiers->threads[copiers->count], NULL, work, copiers);
		copiers->count += error == 0;
	}
	if (error) {
		status = kv_refused(&kv_env_posix, "net", "pthread_create", error);
	}
	if (copiers->count == 0) {
		kvd_copiers_close(copiers);
		return status;
	}
	*p_copiers = copiers;

	return KV_OK;
}

void kvd_copiers_close(kvd_copiers_t *copiers)
{
	if (!copiers) {
		return;
	}
	pthread_mutex_lock(&copiers->lock);
	copiers->stop = 1;
	pthread_cond_broadcast(&copiers->wake);
	pthread_mutex_unlock(&copiers->lock);
	for (uint32_t i = 0; i < copiers->count; i++) {
		pthread_join(copiers->threads[i], NULL);
	}
	if (copiers->fd >= 0) {
		close(copiers->fd);
	}
	pthread_cond_destroy(&copiers->wake);
	pthread_mutex_destroy(&copiers->lock);
	free(copiers);
}

void kvd_copiers_submit(kvd_copiers_t *copiers, kvd_copy_t *copy)
{
	copy->bad = 0;
	pthread_mutex_lock(&copiers->lock);
	push(&copiers->waiting, copy);
	pthread_cond_signal(&copiers->wake);
	pthread_mutex_unlock(&copiers->lock);
}

kvd_copy_t *kvd_copiers_take(kvd_copiers_t *copiers)
{
	uint64_t done;
	kvd_copy_t *copy;

	pthread_mutex_lock(&copiers->lock);
	copy = pop(&copiers->done);
	pthread_mutex_unlock(&copiers->lock);
	if (!copy && read(copiers->fd, &done, sizeof done) > 0) {
		pthread_mutex_lock(&copiers->lock); /* one may have come before its count was taken away */
		copy = pop(&copiers->done);
		pthread_mutex_unlock(&copiers->lock);
	}

	return copy;
}

int kvd_copiers_fd(const kvd_copiers_t *copiers)
{
	return copiers->fd;
}
