/* kv/shm.h -- the shared-memory formats between daemon and clients (docs/shm.md is made from this file).
 *
 * Three areas, each a memfd of its own. All integers little-endian, all fields naturally aligned.
 *   mirror        one per namespace, written by the daemon only, sealed, mapped read-only by clients
 *   lease area    one per instance, written by the daemon only, sealed, mapped read-only by the members of the instance
 *   member area   one per member, written by that member; the daemon trusts nothing in it and copies each value out
 *                 once
 */
#ifndef KV_SHM_H
#define KV_SHM_H

#include "kv/types.h"

#include <stdatomic.h>

#define KV_SHM_VERSION 1u

/* ---- mirror ---------------------------------------------------------------------------------- */

#define KV_MIRROR_MAGIC        UINT64_C(0x31524f5252494d4b) /* "KMIRROR1" */
#define KV_MIRROR_MAX_SPACES   4096u
#define KV_MIRROR_HEADER_BYTES 4096u
#define KV_MIRROR_STALE_NS     UINT64_C(50000000) /* stale_ns of a daemon that does not say it; least value */
#define KV_MIRROR_STALE_MAX_NS UINT64_C(10000000000)
#define KV_MIRROR_HEARTBEAT_NS UINT64_C(20000000) /* the core loop stores it at the latest after this */

typedef struct kv_mirror_header {
	uint64_t magic;
	uint32_t version;
	uint32_t features;             /* 0 in this version */
	uint64_t incarnation;          /* of the daemon that wrote it; never 0, never reused */
	_Atomic uint64_t heartbeat_ns; /* CLOCK_MONOTONIC of the core loop; 0: the daemon has shut down */
	uint64_t bucket_count;         /* a power of two */
	uint64_t buckets_offset;       /* bytes from the start of the memfd, a multiple of 4096 */
	uint64_t epochs_offset;        /* _Atomic uint64_t epoch[KV_MIRROR_MAX_SPACES]; 0: no space has this id now */
	uint64_t total_bytes;
	uint64_t stale_ns;           /* an older heartbeat is a miss with reason DAEMON_STALE; 0: KV_MIRROR_STALE_NS */
	_Atomic uint64_t unreadable; /* kv_tier_t bits: tiers that cannot be read now; being there is no hit */
} kv_mirror_header_t;

/* One resident block of one group. tiers == 0 marks an empty entry. */
typedef struct kv_mirror_entry {
	kv_key_t key;
	uint8_t group;
	uint8_t tiers;     /* kv_tier_t bits: in which tiers' sets the block is */
	uint16_t overflow; /* of a bucket's first entry only: how many entries whose home is this or an earlier bucket
			    * had to go past this one (sticky at 65535). A search ends at the first bucket where it is
			    * 0. */
} kv_mirror_entry_t;

#define KV_MIRROR_WAYS 3u

/* A sequence lock: odd while the daemon writes. Home bucket of a key: kv_key_hash(key) & (bucket_count - 1); the next
 * bucket is the next one, wrapping. The search key is (key, group). */
typedef struct kv_mirror_bucket {
	_Atomic uint32_t seq;
	kv_mirror_entry_t entry[KV_MIRROR_WAYS];
} kv_mirror_bucket_t;

_Static_assert(sizeof(kv_mirror_entry_t) == 20, "mirror entry is 20 bytes");
_Static_assert(sizeof(kv_mirror_bucket_t) == 64, "mirror bucket is one cache line");

/* Longest probe, in buckets, on both sides: the daemon leaves a block that would lie further out of the mirror (and
 * counts). */
#define KV_MIRROR_MAX_PROBE 32u

/* ---- lease area ------------------------------------------------------------------------------ */

#define KV_LEASES_MAGIC UINT64_C(0x3153455341454c4b) /* "KLEASES1" */

typedef struct kv_lease_area_header {
	uint64_t magic;
	uint32_t version;
	uint32_t reserved;
	uint64_t incarnation;
	uint64_t total_bytes;
} kv_lease_area_header_t;

typedef enum kv_lease_state {
	KV_LEASE_NONE = 0,
	KV_LEASE_ACTIVE = 1,
	KV_LEASE_REVOKED =
		2, /* stored before any of its slots is reused: by release, TTL, revoke, or the end of the instance */
} kv_lease_state_t;

typedef enum kv_lease_kind { KV_LEASE_READ = 1, KV_LEASE_PUT = 2 } kv_lease_kind_t;

/* 64 bytes, at the offset the reply names; the u32 slots follow it at once. Members look at state and id, in this
 * order, before a copy and again after it: a change is a failed load. */
typedef struct kv_lease_header {
	_Atomic uint64_t id; /* never reused within an incarnation */
	uint64_t incarnation;
	_Atomic uint32_t state; /* kv_lease_state_t */
	_Atomic uint32_t n;     /* entries in slots */
	_Atomic uint32_t ready; /* blocks [0, ready) hold their bytes (READ); of a PUT: visible blocks */
	uint32_t kind;          /* kv_lease_kind_t */
	uint32_t group;
	uint32_t skip; /* READ: blocks the engine holds already; slots[i] belongs to block skip + i */
	uint32_t space;
	uint32_t reserved[3];
	uint64_t reserved2;
} kv_lease_header_t;

_Static_assert(sizeof(kv_lease_header_t) == 64, "lease header is one cache line");

static inline const uint32_t *kv_lease_slots(const kv_lease_header_t *lease)
{
	return (const uint32_t *)(lease + 1);
}

/* ---- slab digests: what is known of the slab's memory ------------------------------------------ */

#define KV_SLAB_TAIL_MAGIC UINT64_C(0x314c494154424c53) /* "SLBTAIL1" */

/* The last bytes of a slab's digest memfd. A daemon without it, which has other bytes there, has touched nothing for
 * its clients. */
typedef struct kv_slab_tail {
	uint64_t magic;
	_Atomic uint64_t
		ready_bytes; /* the daemon has touched [0, ready_bytes) of the data: populate and pin no more */
} kv_slab_tail_t;

_Static_assert(sizeof(kv_slab_tail_t) == 16, "slab tail is 16 bytes");

/* ---- member area: report ring and digest staging --------------------------------------------- */

#define KV_MEMBER_MAGIC UINT64_C(0x315245424d454d4b) /* "KMEMBER1" */

typedef struct kv_member_area_header {
	uint64_t magic;
	uint32_t version;
	uint32_t ring_records;   /* a power of two */
	uint64_t ring_offset;    /* kv_report_t ring[ring_records] */
	uint64_t staging_offset; /* uint64_t staging[staging_words]: leaf digests of puts */
	uint64_t staging_words;
	uint64_t total_bytes;
	_Alignas(64) _Atomic uint64_t head;    /* records ever written, stored by the member after the record      */
	_Alignas(64) _Atomic uint64_t tail;    /* records ever read, stored by the daemon; it keeps its own copy   */
	_Alignas(64) _Atomic uint64_t dropped; /* records the member could not write because the ring was full */
} kv_member_area_header_t;

typedef enum kv_miss_reason {
	KV_WHY_NONE = 0,   /* everything asked for was there */
	KV_WHY_ABSENT = 1, /* never seen, or evicted so long ago that it is forgotten */
	KV_WHY_EVICTED = 2,
	KV_WHY_DAEMON_STALE = 3,
	KV_WHY_NO_DAEMON = 4,
	KV_WHY_STALE_EPOCH = 5,
	KV_WHY_CONTENDED = 6, /* the sequence lock stayed odd */
	KV_WHY_CORRUPT = 7,
	KV_WHY_TIMEOUT = 8,
	KV_WHY_UNREADABLE = 9,    /* stored, and the disk cannot read it now: it may be a hit again later */
	KV_WHY_NOT_ADMITTED = 10, /* the pool thrashed when it was offered: it is taken by second use */
} kv_miss_reason_t;

typedef enum kv_report_type {
	KV_REPORT_MATCH = 1,   /* a prompt was looked up */
	KV_REPORT_REQUEST = 2, /* a request has ended: all fields */
} kv_report_type_t;

typedef struct kv_report {
	uint32_t type; /* kv_report_type_t */
	uint32_t space;
	uint64_t time_ns; /* CLOCK_MONOTONIC */
	uint64_t request; /* the engine's request id, hashed to 64 bits by the client; 0: unknown */
	uint64_t session; /* conversation hint, 0: unknown */
	uint32_t query_tokens;
	uint32_t hit_cpu_tokens;
	uint32_t hit_disk_tokens;
	uint32_t hit_engine_tokens; /* held by the engine already (skip) */
	uint32_t output_tokens;
	uint32_t why; /* kv_miss_reason_t of the first missing block */
	uint32_t group;
	uint32_t turn;           /* turn in the conversation, 0: unknown */
	kv_key_t first_missing;  /* zero when nothing was missing */
	uint64_t match_ns;       /* time the match took; 0: not measured */
	uint64_t load_ns;        /* time the load took; 0: none */
	uint32_t hit_gpu_tokens; /* in memory of a GPU, in addition to those of the other tiers */
	uint8_t reserved[28];
} kv_report_t;

_Static_assert(sizeof(kv_report_t) == 128, "report is two cache lines");

#endif
