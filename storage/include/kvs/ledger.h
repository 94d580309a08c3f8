/* kvs/ledger.h -- the ledger: what every slot of a pool holds, and which leases and puts are open. One memfd, sealed
 * like a digest table: the daemon that made it writes it, the keeper holds it, a later daemon reads it. Little-endian,
 * naturally aligned.
 *
 *   offset 0        kvs_ledger_header_t                       one page
 *   records_offset  kvs_ledger_record_t record[records_cap]   open-addressed by id, rounded up to a page
 *   epochs_offset   kvs_ledger_epoch_t epoch[epochs_cap]      of spaces, rounded up to a page
 *   slabs_offset    chunk of slab 0, chunk of slab 1, ...     chunk_stride bytes each: kvs_ledger_slab_t, then
 *                                                             kvs_ledger_slot_t slot[slots]
 *
 * The file is sized at start for all slabs the limit allows; pages that have never been touched cost nothing. A chunk's
 * slab may go and another one come: `slots` is 0 in between, and the slots' generations go on counting.
 *
 * Crash rules: slab_count and a slab's `slots` are stored after the chunk they admit is complete. A slot's change
 * stores state QUARANTINED first, then the other fields, then the new state: the fields of a QUARANTINED slot, its
 * generation excepted, may be half of each. A record's id is stored last and cleared first; while records move, one may
 * be there twice, never not at all. An epoch is stored after its root, and changes by one store.
 *
 * A READY slot has a checksum of its record, because the bytes' digests do not cover the key (decision 059).
 */
#ifndef KVS_LEDGER_H
#define KVS_LEDGER_H

#include "kvs/tier.h"

#include <stdatomic.h>

#define KVS_LEDGER_MAGIC   UINT64_C(0x3152454744454c4b) /* "KLEDGER1" */
#define KVS_LEDGER_VERSION 3u
#define KVS_LEDGER_PAGE    4096u

typedef struct kvs_ledger_header {
	uint64_t magic;
	uint32_t version;
	uint32_t slot_record_bytes; /* sizeof(kvs_ledger_slot_t) */
	uint64_t incarnation;       /* of the daemon that writes it; never 0 */
	uint64_t total_bytes;       /* of the memfd */
	uint64_t limit_bytes;       /* of the pool */
	uint64_t records_offset;
	uint64_t slabs_offset;
	uint32_t records_cap;        /* a power of two */
	_Atomic uint32_t slab_count; /* chunks that have had a slab */
	uint64_t chunk_stride;       /* from chunk to chunk, a multiple of a page */
	uint64_t epochs_offset;
	uint32_t epochs_cap;              /* 0: blocks are not for a later daemon */
	_Atomic uint32_t unknown_writers; /* members that may write and that the keeper has not heard of */
} kvs_ledger_header_t;

/* The epoch of a space; 0: no space yet, nor any in the entries behind. */
typedef struct kvs_ledger_epoch {
	_Atomic uint64_t epoch;
	uint8_t root[32];
} kvs_ledger_epoch_t;

/* One open lease or put. id 0: empty. Home of an id: kvs_ledger_home(); a taken entry sends the id to the next one,
 * wrapping. */
typedef struct kvs_ledger_add_record {
	_Atomic uint64_t id;
	uint64_t instance;
	uint64_t expiry_ns; /* CLOCK_MONOTONIC; 0: never */
	kv_key_t key;       /* of the deepest block */
	uint32_t slot;      /* of the deepest block; KV_SLOT_NONE: not in this tier */
	uint32_t gen;
	uint32_t space;
	uint32_t n;
	uint32_t skip;
	uint32_t kind; /* kv_lease_kind_t */
	uint8_t group;
	uint8_t reserved[15];
} kvs_ledger_record_t;

/* Head of a slab's chunk. Changes only while `slots` is 0. */
typedef struct kvs_ledger_slab {
	uint32_t number;
	_Atomic uint32_t slots; /* 0: no slab has this number now */
	uint32_t stride;        /* bytes from slot to slot */
	uint32_t slot_class;
	kvs_geometry_t geometry;
	uint32_t huge; /* 1: the data memfd is of 2 MiB pages */
	uint64_t data_bytes;
	uint64_t digest_bytes;
	uint64_t chunk_bytes; /* of this chunk, a multiple of a page */
	uint64_t id;          /* the slab's, in this daemon and in later ones: its descriptors are held under it */
	char ns[120];         /* NUL-terminated */
} kvs_ledger_slab_t;

typedef struct kvs_ledger_slot {
	_Atomic uint32_t state; /* kvs_state_t */
	uint32_t gen;           /* 0: never used */
	uint64_t owner;         /* put or lease id it was given to; once READY, how late it was used; 0: unknown */
	kv_key_t key;
	kv_key_t parent;
	uint8_t root[32]; /* root digest of the space */
	uint64_t epoch;
	uint64_t event_hash;
	uint64_t digest; /* of the block: kv_digest_root() of its head roots; 0 before READY or TRANSIT */
	uint32_t length; /* payload bytes */
	uint32_t depth;
	uint8_t group;
	uint8_t transient; /* 1: not for a later daemon */
	uint8_t reserved[6];
	uint64_t check; /* of a READY slot: kvs_ledger_slot_check() */
} kvs_ledger_slot_t;

_Static_assert(sizeof(kvs_ledger_header_t) == 88, "ledger header");
_Static_assert(sizeof(kvs_ledger_record_t) == 80, "ledger record");
_Static_assert(sizeof(kvs_ledger_epoch_t) == 40, "ledger epoch");
_Static_assert(sizeof(kvs_ledger_slab_t) == 192, "ledger slab");
_Static_assert(sizeof(kvs_ledger_slot_t) == 128, "ledger slot is two cache lines");

/* Ids are counters: spread them. */
static inline uint32_t kvs_ledger_home(uint64_t id, uint32_t cap)
{
	return (uint32_t)(id * UINT64_C(0x9e3779b97f4a7c15) >> 32) & (cap - 1u);
}

static inline uint64_t kvs_ledger_chunk_bytes(uint64_t slots)
{
	uint64_t bytes = sizeof(kvs_ledger_slab_t) + slots * sizeof(kvs_ledger_slot_t);

	return (bytes + KVS_LEDGER_PAGE - 1u) / KVS_LEDGER_PAGE * KVS_LEDGER_PAGE;
}

/* What a ledger says, summed up. */
typedef struct kvs_ledger_summary {
	uint64_t incarnation;
	uint32_t slabs; /* that are there now */
	uint64_t slots;
	uint64_t by_state[6]; /* kvs_state_t */
	uint64_t used_bytes;  /* slot bytes of PUT, FILLING, READY, TRANSIT */
	uint64_t records;
} kvs_ledger_summary_t;

/* Validate a ledger of unknown provenance: every offset, count, state and field that a reader would rely on, in one
 * bounded pass over the chunks that slab_count names and the records. `base` is 8-byte aligned, [base, base + bytes)
 * readable, and does not change meanwhile. KV_ERR_FOREIGN: not a ledger, or of another version. KV_ERR_CORRUPT:
 * contradicts itself. `detail` (may be NULL) gets a sentence. */
kv_status_t kvs_ledger_check(const void *base, uint64_t bytes, kvs_ledger_summary_t *p_summary, char *detail,
			     size_t cap);

/* The part of it that a header alone shows, also while a daemon writes the ledger: KV_ERR_FOREIGN. */
kv_status_t kvs_ledger_check_format(const kvs_ledger_header_t *header, char *detail, size_t cap);

/* The checksum of a slot's record: of everything between its state and the checksum. */
uint64_t kvs_ledger_slot_check(const kvs_ledger_slot_t *slot);

/* The epoch of a space in a ledger that has passed kvs_ledger_check(); 0: none is known. */
uint64_t kvs_ledger_find_epoch(const void *base, const uint8_t root[32]);

/* A slab's chunk in a ledger that has passed kvs_ledger_check(); NULL when no slab has this number. */
const kvs_ledger_slab_t *kvs_ledger_slab(const void *base, uint32_t slab);
static inline const kvs_ledger_slot_t *kvs_ledger_slots(const kvs_ledger_slab_t *slab)
{
	return (const kvs_ledger_slot_t *)(slab + 1);
}

#endif
