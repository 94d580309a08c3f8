/* daemon/io/events/ring.h -- a bounded ring of records of bytes between two threads: one writes, one reads, no lock.
 *
 * A record is built piece by piece and lies in one piece: there is room behind the ring's end for the one that crosses
 * it. A record that fits an empty ring is taken wherever it begins. Only a committed record is seen.
 */
#ifndef KVD_IO_EVENTS_RING_H
#define KVD_IO_EVENTS_RING_H

#include "kv/status.h"

#include <stdatomic.h>
#include <stddef.h>

typedef struct kvd_ring {
	uint8_t *base;
	uint64_t size;                      /* a power of two */
	uint64_t open;                      /* writer: where the record being built begins */
	uint64_t fill;                      /* writer: its bytes so far; 0: none */
	_Alignas(64) _Atomic uint64_t head; /* stored by the writer */
	_Alignas(64) _Atomic uint64_t tail; /* stored by the reader */
} kvd_ring_t;

/* size is rounded down to a power of two, at least 4096. As much again lies behind it, touched as far as a record has
 * gone there. KV_ERR_NOMEM. */
kv_status_t kvd_ring_init(kvd_ring_t *ring, uint64_t size);
void kvd_ring_fini(kvd_ring_t *ring);

/* Writer. n more bytes (rounded up to 8, 8-aligned) of the record being built. NULL: no room, the record is still
 * there. */
void *kvd_ring_extend(kvd_ring_t *ring, size_t n);
/* Beginning of the record being built. */
void *kvd_ring_record(kvd_ring_t *ring);
void kvd_ring_commit(kvd_ring_t *ring);
void kvd_ring_abort(kvd_ring_t *ring);
/* Bytes in use, roughly. */
uint64_t kvd_ring_used(const kvd_ring_t *ring);

/* Reader. The oldest record, or NULL; *p_len is its length. It stays until kvd_ring_pop(). */
const void *kvd_ring_peek(kvd_ring_t *ring, size_t *p_len);
void kvd_ring_pop(kvd_ring_t *ring);

#endif
