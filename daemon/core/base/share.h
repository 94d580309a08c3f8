/* share.h -- what is whose: each namespace has a share of the CPU tier, of the memory of each GPU, of the disk tier and
 * of the index (docs/decisions/025).
 *
 *   used = irreclaimable (pinned by leases, puts and hand-overs, unfinished, quarantined) + evictable
 *
 * Irreclaimable never exceeds the share. Evictable may: what is idle is lent, and it goes before any block within its
 * owner's share. So the namespace that gives is the one furthest over its share; those within theirs give
 * to no other.
 */
#ifndef KVD_CORE_SHARE_H
#define KVD_CORE_SHARE_H

#include "core/base/core_impl.h"

/* For kvd_busy(). */
#define KVD_SHARE_IS_FULL                                                                                              \
	"the namespace's share (share.cpu, of a GPU's memory likewise) is pinned or unfinished as a whole; release "   \
	"leases and hand-overs, or raise it"

static inline kvd_resource_t kvd_share_resource(uint32_t memory)
{
	return memory == KVD_HOST_MEM ? KVD_SHARE_CPU : (kvd_resource_t)(KVD_SHARE_GPU + memory - 1u);
}

static inline uint32_t kvd_share_memory(kvd_resource_t what)
{
	return what >= KVD_SHARE_GPU ? what - KVD_SHARE_GPU + 1u : KVD_HOST_MEM;
}

/* What the namespace uses: bytes of slabs, bytes of slot files, blocks. `ns` KVD_NONE: blocks found on disk whose
 * namespace is not configured. */
uint64_t kvd_share_used(const kvd_core_t *core, uint32_t ns, kvd_resource_t what);
uint64_t kvd_share_of(const kvd_core_t *core, uint32_t ns, kvd_resource_t what);
/* By how much the namespace would be over its share with `more` more. What the tier needs for itself is taken off the
 * share. 0: it would be within. */
uint64_t kvd_share_over(const kvd_core_t *core, uint32_t ns, kvd_resource_t what, uint64_t more);
/* What the namespace never exceeds; UINT64_MAX: no maximum. The tiers enforce it (kvs_tier_cap). */
uint64_t kvd_share_max(const kvd_core_t *core, uint32_t ns, kvd_resource_t what);
/* Shares that are not given are equal parts of what is left. */
void kvd_shares_compute(kvd_core_t *core);

/* Pinned, unfinished and quarantined bytes of a memory, and of the host's the tails and announced keys of
 * hand-overs. */
uint64_t kvd_share_irreclaimable(const kvd_core_t *core, uint32_t ns, uint32_t memory);
/* How many bytes of host memory its hand-over entries may pin, and have as tails and announced keys. */
uint64_t kvd_share_handover_max(const kvd_core_t *core, uint32_t ns);
/* How many blocks more of the class may be pinned, or put. */
uint64_t kvd_share_pin_room(const kvd_core_t *core, uint32_t ns, uint32_t slot_class);
/* May a put have the slot that it has just been given? A slab with an open slot cannot change hands, so where the
 * namespace is over its share such slabs count whole, and no more of them than the share. */
int kvd_share_may_open(const kvd_core_t *core, uint32_t slot_class, kvs_loc_t loc);
/* Bytes of this memory that the instance may still add to `own`, its pinned or its unfinished bytes. `cap` 0: both
 * together may be half of the namespace's share. */
uint64_t kvd_share_instance_room(const kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t memory,
				 uint64_t cap, const uint64_t own[KVD_MEMORIES]);
/* May a put take a slot for a copy of what another tier has? What cannot be reclaimed is less than half of the share
 * then: the other half is for what is nowhere else, hand-overs first (decision 063). */
int kvd_share_may_promote(const kvd_core_t *core, uint32_t ns, uint32_t slot_class);
/* A slot of an unfinished put of the instance is taken (`taken` 1) or is finished. */
void kvd_share_count_unfinished(kvd_core_t *core, kvd_instance_rec_t *instance, uint32_t slot_class, int taken);

#endif
