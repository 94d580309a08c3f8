/* Records between two threads. Each is a word with its length, then its bytes. Behind the ring's end is as much memory
 * again for the one that crosses it. */
#include "io/events/ring.h"

#include <stdlib.h>
#include <string.h>

#define WORD UINT64_C(8)

kv_status_t kvd_ring_init(kvd_ring_t *ring, uint64_t size)
{
	uint64_t power = 4096;

	while (power <= size / 2) {
		power *= 2;
	}
	memset(ring, 0, sizeof *ring);
	ring->base = malloc(2 * power);
	if (!ring->base) {
		return KV_ERR_NOMEM;
	}
	ring->size = power;

	return KV_OK;
}

void kvd_ring_fini(kvd_ring_t *ring)
{
	free(ring->base);
	ring->base = NULL;
}

static uint8_t *at(const kvd_ring_t *ring, uint64_t position)
{
	return ring->base + (position & (ring->size - 1));
}

void *kvd_ring_extend(kvd_ring_t *ring, size_t n)
{
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
	uint64_t fill = ring->fill ? ring->fill : WORD;
	uint64_t want = fill + (n + WORD - 1) / WORD * WORD;

	if (want > ring->size || want < n || ring->open + want - tail > ring->size) {
		return NULL;
	}
	ring->fill = want;

	return at(ring, ring->open) + fill;
}

void *kvd_ring_record(kvd_ring_t *ring)
{
	return at(ring, ring->open) + WORD;
}

void kvd_ring_commit(kvd_ring_t *ring)
{
	uint64_t len = ring->fill - WORD;

	memcpy(at(ring, ring->open), &len, sizeof len);
	ring->open += ring->fill;
	ring->fill = 0;
	atomic_store_explicit(&ring->head, ring->open, memory_order_release);
}

void kvd_ring_abort(kvd_ring_t *ring)
{
	ring->fill = 0;
}

uint64_t kvd_ring_used(const kvd_ring_t *ring)
{
	return ring->open + ring->fill - atomic_load_explicit(&ring->tail, memory_order_relaxed);
}

const void *kvd_ring_peek(kvd_ring_t *ring, size_t *p_len)
{
	uint64_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
	uint64_t len;

	if (tail == head) {
		return NULL;
	}
	memcpy(&len, at(ring, tail), sizeof len);
	*p_len = len;

	return at(ring, tail) + WORD;
}

void kvd_ring_pop(kvd_ring_t *ring)
{
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
	uint64_t len;

	memcpy(&len, at(ring, tail), sizeof len);
	atomic_store_explicit(&ring->tail, tail + WORD + len, memory_order_release);
}
