/* dismantle.h -- taking down what is invisible already: trees of old epochs and subtrees below a bad block; and bad
 * copies in memory of good blocks.
 *
 * Hiding is O(1) (a flag at the top); the work follows in quanta from kvd_core_tick(), leaf first: leases are revoked,
 * transfers orphaned, sets left, slots freed, blocks forgotten.
 *
 *   visible --hide--> DEAD --quanta--> gone
 */
#ifndef KVD_CORE_DISMANTLE_H
#define KVD_CORE_DISMANTLE_H

#include "core/core.h"

/* Hide a whole tree; it is destroyed in the end. */
void kvd_hide_tree(kvd_core_t *core, uint32_t tree);
/* Hide a block and everything below. If memory lacks, the whole run goes. */
void kvd_quarantine(kvd_core_t *core, uint32_t block);
/* Only the block's CPU copy is bad. When it is on disk it stays there, and what lies below it leaves the CPU set with
 * it, leases on all of that being revoked; with too much below it for one turn, or without a disk copy, it is
 * quarantined. */
void kvd_quarantine_cpu(kvd_core_t *core, uint32_t block);
/* The block's disk copy is in doubt: it and all below it leave the disk set at once. What is in memory stays there and
 * is written again; what was only on disk is quarantined. */
void kvd_lose_disk(kvd_core_t *core, uint32_t block);
/* The device cannot read the block's disk copy now, and there is no other: hide it and everything below. Nothing leaves
 * a set; what the tier reads again is taken back as it is (decision 032). */
void kvd_set_aside(kvd_core_t *core, uint32_t block);
void kvd_take_back(kvd_core_t *core, uint32_t block);
/* Hear of both from the disk tier, which is there now. */
void kvd_disk_watch(kvd_core_t *core);
/* Forget a hidden tree that has been taken down, if nothing refers to it. */
void kvd_tree_release(kvd_core_t *core, uint32_t tree);
/* One quantum; 1 while there is more. */
int kvd_dismantle_run(kvd_core_t *core);

/* Evict a leaf of tier t's set at or below a block of it. `force`: leases that pin it end, and puts go on without it.
 * KV_MISS: it cannot go now. */
kv_status_t kvd_evict_below(kvd_core_t *core, uint32_t block, kvd_set_t t, int force);

#endif
