/* Bounded rings without locks. */
#include "kv/ring.h"

#include <string.h>

#define LINE_BYTES 64u

static int shape_is_valid(uint32_t record_bytes, uint32_t count)
{
	return record_bytes >= 1 && record_bytes <= KV_RING_MAX_RECORD && count >= 2 && count <= KV_RING_MAX_RECORDS &&
	       (count & (count - 1)) == 0;
}

/* ---- one producer ---- */

kv_status_t kv_spsc_init(kv_spsc_t *ring, const kv_env_t *env, uint32_t record_bytes, uint32_t count)
{
	uint8_t *records;

	if (!shape_is_valid(record_bytes, count)) {
		return KV_ERR_ARG;
	}
	records = kv_alloc(env, (size_t)record_bytes * count);
	if (!records) {
		return KV_ERR_NOMEM;
	}
	memset(ring, 0, sizeof *ring);
	ring->env = env;
	ring->records = records;
	ring->record_bytes = record_bytes;
	ring->mask = count - 1;

	return KV_OK;
}

void kv_spsc_fini(kv_spsc_t *ring)
{
	kv_free(ring->env, ring->records);
	ring->records = NULL;
}

static uint8_t *spsc_at(const kv_spsc_t *ring, uint64_t position)
{
	return ring->records + (size_t)(position & ring->mask) * ring->record_bytes;
}

int kv_spsc_push(kv_spsc_t *ring, const void *record)
{
	uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);

	if (head - ring->tail_seen > ring->mask) {
		/* Acquire: the consumer has copied the record out before we write over it. */
		ring->tail_seen = atomic_load_explicit(&ring->tail, memory_order_acquire);
		if (head - ring->tail_seen > ring->mask) {
			return 0;
		}
	}
	memcpy(spsc_at(ring, head), record, ring->record_bytes);
	atomic_store_explicit(&ring->head, head + 1, memory_order_release);

	return 1;
}

int kv_spsc_pop(kv_spsc_t *ring, void *record)
{
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

	if (tail == ring->head_seen) {
		ring->head_seen = atomic_load_explicit(&ring->head, memory_order_acquire);
		if (tail == ring->head_seen) {
			return 0;
		}
	}
	memcpy(record, spsc_at(ring, tail), ring->record_bytes);
	atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);

	return 1;
}

/* The tail is read first: it can only have grown since, so the difference is never negative, and at worst too large. */
static uint32_t count_between(const _Atomic uint64_t *p_tail, const _Atomic uint64_t *p_head, uint32_t mask)
{
	uint64_t tail = atomic_load_explicit(p_tail, memory_order_acquire);
	uint64_t head = atomic_load_explicit(p_head, memory_order_acquire);

	return head - tail > mask ? mask + 1 : (uint32_t)(head - tail);
}

uint32_t kv_spsc_count(const kv_spsc_t *ring)
{
	return count_between(&ring->tail, &ring->head, ring->mask);
}

/* ---- many producers ----
 *
 * Each cell has a sequence number. For the turn that uses it at position p (p & mask is its index):
 *     seq == p             free for the producer that claims p
 *     seq == p + 1         filled; the consumer at p may take it
 *     seq == p + count     taken; free for position p + count, that is the next turn
 */
typedef struct cell {
	_Atomic uint64_t seq;
	uint8_t record[];
} cell_t;

kv_status_t kv_mpsc_init(kv_mpsc_t *ring, const kv_env_t *env, uint32_t record_bytes, uint32_t count)
{
	size_t cell_bytes = (sizeof(cell_t) + record_bytes + LINE_BYTES - 1) & ~(size_t)(LINE_BYTES - 1);
	void *memory;

	if (!shape_is_valid(record_bytes, count)) {
		return KV_ERR_ARG;
	}
	memory = kv_alloc(env, cell_bytes * count + LINE_BYTES);
	if (!memory) {
		return KV_ERR_NOMEM;
	}
	memset(ring, 0, sizeof *ring);
	ring->env = env;
	ring->memory = memory;
	ring->cells = (uint8_t *)memory + (LINE_BYTES - (uintptr_t)memory % LINE_BYTES) % LINE_BYTES;
	ring->cell_bytes = (uint32_t)cell_bytes;
	ring->record_bytes = record_bytes;
	ring->mask = count - 1;
	for (uint32_t i = 0; i < count; i++) {
		atomic_init(&((cell_t *)(void *)(ring->cells + i * cell_bytes))->seq, i);
	}

	return KV_OK;
}

void kv_mpsc_fini(kv_mpsc_t *ring)
{
	kv_free(ring->env, ring->memory);
	ring->memory = NULL;
}

static cell_t *mpsc_at(const kv_mpsc_t *ring, uint64_t position)
{
	return (cell_t *)(void *)(ring->cells + (size_t)(position & ring->mask) * ring->cell_bytes);
}

int kv_mpsc_push(kv_mpsc_t *ring, const void *record)
{
	uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
	cell_t *cell;

	for (;;) {
		uint64_t seq;

		cell = mpsc_at(ring, head);
		/* Acquire pairs with the consumer's release: its copy of the last turn's record has ended. */
		seq = atomic_load_explicit(&cell->seq, memory_order_acquire);
		if (seq == head) {
			if (atomic_compare_exchange_weak_explicit(&ring->head, &head, head + 1, memory_order_relaxed,
								  memory_order_relaxed)) {
				break;
			}
		} else if (seq < head) {
			return 0;
		} else {
			head = atomic_load_explicit(&ring->head, memory_order_relaxed);
		}
	}
	memcpy(cell->record, record, ring->record_bytes);
	atomic_store_explicit(&cell->seq, head + 1, memory_order_release);

	return 1;
}

int kv_mpsc_pop(kv_mpsc_t *ring, void *record)
{
	uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
	cell_t *cell = mpsc_at(ring, tail);

	if (atomic_load_explicit(&cell->seq, memory_order_acquire) != tail + 1) {
		return 0;
	}
	memcpy(record, cell->record, ring->record_bytes);
	atomic_store_explicit(&cell->seq, tail + ring->mask + 1, memory_order_release);
	atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);

	return 1;
}

uint32_t kv_mpsc_count(const kv_mpsc_t *ring)
{
	return count_between(&ring->tail, &ring->head, ring->mask);
}
