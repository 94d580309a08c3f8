/* lease.h -- read leases.
 *
 *   ACQUIRE --> ACTIVE (ready < n: FILLING) --all fills done--> ACTIVE (ready == n)
 *   ACTIVE --RELEASE, TTL, revoke (space reset, bad block, end of the instance)--> REVOKED in the shared header,
 *       then gone
 *   a fill fails: n shrinks to what is ready, LEASE_DONE says why
 *
 * A lease of a full group pins its deepest block, which keeps the path above it. Blocks [ref_from, n) of its path,
 * those being read for it and the one above them, are referenced each: being an ancestor does not protect a block
 * before it has joined the CPU set. A resident prefix has no such blocks.
 *
 * It may have one private block after that path (decision 044), with a pin of its own: block n.
 *
 * A lease of an unchained group (`window`, `state`) is all or nothing: it pins each of its blocks, references them all
 * while one of them is read from disk, and ends when one of them is lost (decision 010).
 */
#ifndef KVD_CORE_LEASE_H
#define KVD_CORE_LEASE_H

#include "core/base/core_impl.h"

typedef struct kvd_lease {
	uint64_t id;
	uint32_t self;
	uint32_t instance;
	kvd_member_t member;
	uint32_t unchained;   /* 1: of an unchained group, a pin a block */
	uint32_t pin;         /* on the deepest block of a full group */
	uint32_t private_pin; /* on the private block after it; KVD_NONE: there is none */
	uint32_t *pins;       /* unchained: [n - skip] */
	uint32_t pin_count;
	uint32_t n, skip, ready;
	uint32_t ref_from; /* blocks [ref_from, n), counted from 0, are referenced; n: none */
	uint32_t *path;    /* of a full group: their ids; NULL: none is referenced */
	uint32_t extent;
	uint32_t named; /* slots in the header once it is published */
	kv_lease_header_t *header;
	kv_status_t why; /* why n is less than it was */
	uint64_t bytes;  /* counted against the instance's cap */
	uint32_t memory;
	uint64_t expiry_ns;
	uint64_t stamp;
	kvd_link_t of_bucket; /* of the timing wheel */
	kvd_link_t of_instance;
	uint32_t wait_io; /* the fill of block `ready`; KVD_NONE */
	kvd_link_t of_io; /* leases that wait for that fill */
} kvd_lease_t;

kv_status_t kvd_lease_acquire(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_acquire_t *ask,
			      kv_msg_acquire_reply_t *reply);
kv_status_t kvd_lease_release(kvd_core_t *core, kvd_member_t member, const kv_msg_release_t *ask,
			      kv_msg_release_reply_t *reply);
kv_status_t kvd_lease_renew(kvd_core_t *core, kvd_member_t member, const kv_msg_renew_t *ask,
			    kv_msg_renew_reply_t *reply);

/* The lease of this id, or NULL. */
kvd_lease_t *kvd_lease_find(kvd_core_t *core, uint64_t id);
/* The same, if it is of the member's instance. */
kvd_lease_t *kvd_lease_find_own(kvd_core_t *core, const kvd_member_rec_t *member, uint64_t id);
/* The block of this depth on the lease's path, or the private one after it. */
uint32_t kvd_lease_block(kvd_core_t *core, const kvd_lease_t *lease, uint32_t depth);
/* Of a lease of a full group: the deepest block of its path. */
uint32_t kvd_lease_deepest(const kvd_core_t *core, const kvd_lease_t *lease);
/* Stores REVOKED, then gives everything back. With KV_OK (a release) no notice goes out; else a waiting member gets
 * LEASE_DONE. */
void kvd_lease_end(kvd_core_t *core, kvd_lease_t *lease, kv_status_t why);
/* Block `depth` (from 1) will never come: the lease ends before it. An unchained lease ends altogether. */
void kvd_lease_cut_before(kvd_core_t *core, kvd_lease_t *lease, uint32_t depth, kv_status_t why);

/* The memory of all leases, with the core. */
void kvd_leases_free(kvd_core_t *core);
/* End what has expired; 1 while there is more to do. */
int kvd_leases_expire(kvd_core_t *core, uint64_t now_ns);

#endif
