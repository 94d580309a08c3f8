/* quarantine.h -- hiding what is bad or old. It is O(1): a flag at the top; dismantle.h takes down what is hidden.
 *
 *   visible --hide, quarantine--> DEAD --quanta (dismantle.h)--> gone
 */
#ifndef KVD_CORE_QUARANTINE_H
#define KVD_CORE_QUARANTINE_H

#include "core/core.h"

/* Hide a whole tree; it is destroyed in the end. */
void kvd_hide_tree(kvd_core_t *core, uint32_t tree);
/* Hide a block and everything below. If memory lacks, the whole run goes. */
void kvd_quarantine_subtree(kvd_core_t *core, uint32_t block);
/* The same for what nobody may use, whatever it was made with: puts below it are revoked, and core->withdrawn counts
 * its blocks (withdraw.h). */
void kvd_withdraw_subtree(kvd_core_t *core, uint32_t block);
/* Forget a hidden tree that has been taken down, if no put refers to it. */
void kvd_tree_release(kvd_core_t *core, uint32_t tree);

#endif
