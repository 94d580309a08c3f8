/* kv/ring.h -- bounded rings of fixed-size records between threads of one process, without locks.
 *
 *   kv_spsc_t   one producer thread, one consumer thread; wait-free on both sides
 *   kv_mpsc_t   any number of producers, one consumer; producers never wait for each other. A producer that is stopped between
 *               claiming a place and filling it hides the records behind its own until it goes on: nothing is lost or reordered.
 *
 * A record is copied in and out; what it was made from may go as soon as push returns. Order: what the producer wrote before a push
 * happens before what the consumer does after the pop of that record (release store of the record's place, acquire load at the pop).
 * Records of one producer come out in the order in which it pushed them. A full ring refuses; nobody sleeps here: waking the other
 * side (eventfd, futex) is the caller's, and the caller decides and counts what happens to a refused record.
 *
 * What each side writes lies at least 128 bytes apart (two cache lines: adjacent lines are fetched together).
 */
#ifndef KV_RING_H
#define KV_RING_H

#include "kv/env.h"
#include "kv/status.h"

#include <stdatomic.h>

#define KV_RING_GAP         128u
#define KV_RING_MAX_RECORD  4096u
#define KV_RING_MAX_RECORDS (1u << 20)

typedef struct kv_spsc {
	const kv_env_t *env;
	uint8_t *records;
	uint32_t record_bytes;
	uint32_t mask;
	uint8_t gap0[KV_RING_GAP];
	_Atomic uint64_t head; /* records ever pushed; stored by the producer     */
	uint64_t tail_seen;    /* the producer's last look at tail                */
	uint8_t gap1[KV_RING_GAP];
	_Atomic uint64_t tail; /* records ever popped; stored by the consumer     */
	uint64_t head_seen;    /* the consumer's last look at head                */
	uint8_t gap2[KV_RING_GAP];
} kv_spsc_t;

/* `count` records (a power of two, 2 to KV_RING_MAX_RECORDS) of record_bytes (1 to KV_RING_MAX_RECORD). KV_ERR_ARG, KV_ERR_NOMEM. Init and
 * fini while no other thread uses the ring. */
kv_status_t kv_spsc_init(kv_spsc_t *ring, const kv_env_t *env, uint32_t record_bytes, uint32_t count);
void kv_spsc_fini(kv_spsc_t *ring);

/* 1: done; 0: the ring is full. Producer thread only. */
int kv_spsc_push(kv_spsc_t *ring, const void *record);

/* 1: *record is filled; 0: the ring is empty. Consumer thread only. */
int kv_spsc_pop(kv_spsc_t *ring, void *record);

/* How many records lie in the ring; from any thread, old as soon as it is read. */
uint32_t kv_spsc_count(const kv_spsc_t *ring);

typedef struct kv_mpsc {
	const kv_env_t *env;
	void *memory;
	uint8_t *cells; /* each a sequence number and a record, whole cache lines */
	uint32_t cell_bytes;
	uint32_t record_bytes;
	uint32_t mask;
	uint8_t gap0[KV_RING_GAP];
	_Atomic uint64_t head; /* places ever claimed; moved by the producers     */
	uint8_t gap1[KV_RING_GAP];
	_Atomic uint64_t tail; /* records ever popped; stored by the consumer     */
	uint8_t gap2[KV_RING_GAP];
} kv_mpsc_t;

/* As kv_spsc_init(). */
kv_status_t kv_mpsc_init(kv_mpsc_t *ring, const kv_env_t *env, uint32_t record_bytes, uint32_t count);
void kv_mpsc_fini(kv_mpsc_t *ring);

/* 1: done; 0: the ring is full. Any thread. */
int kv_mpsc_push(kv_mpsc_t *ring, const void *record);

/* 1: *record is filled; 0: nothing to take. Consumer thread only. */
int kv_mpsc_pop(kv_mpsc_t *ring, void *record);

/* How many places are claimed; from any thread, old as soon as it is read. */
uint32_t kv_mpsc_count(const kv_mpsc_t *ring);

#endif
