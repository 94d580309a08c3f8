/* rebalance.h -- slabs of the CPU tier, and files of the disk tier, on their way from one block size to another. One of
 * each tier at a time.
 *
 *   none --a class is short of slots, and another has to give--> EMPTYING --no slot is taken--> RETIRED
 *       --its room has come back--> none
 *   EMPTYING --no progress for a second--> none (the slab stays with its class)
 *
 * Whose: that of a class that can spare it, since it has free slots enough without the slab (and, unless it was not
 * used for ten seconds, another slab's worth of them left). Else that of the namespace furthest over its share
 * (share.h), of its class with the coldest block. Else that of the class of the same namespace whose coldest block is
 * the coldest of all. That block must have been unused more than twice as long as the coldest one of the class that is
 * short, unless that one has nothing it could evict: so two busy classes do not take slabs from each other back and
 * forth. A class that was used in the last ten seconds then keeps half a slab at the least.
 *
 * A namespace whose maximum on disk is lower than what it has gives files back, one after the other: an empty one,
 * else that of its coldest block.
 *
 * Emptying a slab: the class that gives evicts its coldest blocks, as it would for itself, and the blocks of the slab
 * move to the slots that come free. No lease names a slot of the slab meanwhile (`named`); one that is opened while it
 * is emptied is waited for, and ended where the namespace has to give. Emptying a file, that of the coldest block: its
 * blocks leave the disk set with what is below them.
 */
#ifndef KVD_CORE_REBALANCE_H
#define KVD_CORE_REBALANCE_H

#include "core/core.h"

/* Slots of the slab in change that leases name, counted. */
uint64_t kvd_rebalance_count_named(kvd_core_t *core);
/* One quantum; 1 while there is more at once. */
int kvd_rebalance_run(kvd_core_t *core);

#endif
