/* dismantle.h -- taking down what is invisible already: trees of old epochs and subtrees below a bad block.
 *
 * Hiding is O(1) (a flag at the top); the work follows in quanta from kvd_core_tick(), leaf first: leases are revoked, transfers orphaned, sets
 * left, slots freed, blocks forgotten.
 *
 *   visible --hide--> DEAD --quanta--> gone
 */
#ifndef KVD_CORE_DISMANTLE_H
#define KVD_CORE_DISMANTLE_H

#include "core.h"

/* Hide a whole tree; it is destroyed in the end. */
void kvd_hide_tree(kvd_core_t *core, uint32_t tree);
/* Hide a block and everything below. If memory lacks, the whole run goes. */
void kvd_quarantine(kvd_core_t *core, uint32_t block);
/* Forget a hidden tree that has been taken down, if nothing refers to it. */
void kvd_tree_release(kvd_core_t *core, uint32_t tree);
/* One quantum; 1 while there is more. */
int kvd_dismantle_run(kvd_core_t *core);

#endif
