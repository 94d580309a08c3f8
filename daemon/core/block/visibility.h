/* visibility.h -- what engines see of a tree: its blocks in the mirror and in events.
 *
 * A change of one block is shown at once. A change of many (a tree that was recovered, a subtree that is set aside) is
 * shown by a walk in quanta, parents first; a tree has one walk at a time.
 *
 *   shown --set aside--> hidden with everything below --take back--> shown          (decision 032)
 */
#ifndef KVD_CORE_VISIBILITY_H
#define KVD_CORE_VISIBILITY_H

#include "core/core.h"
#include "core/index/index.h"

void kvd_block_sync_mirror(kvd_core_t *core, uint32_t block);
/* Bring the mirror up to date with the whole tree, or with a run and all below it, in quanta. */
void kvd_show_tree(kvd_core_t *core, kvd_tree_t *tree);
void kvd_show_below(kvd_core_t *core, uint32_t node);
/* One quantum of these walks; 1 while there is more. */
int kvd_visibility_run(kvd_core_t *core);
/* A tree of an old epoch has gone. When it was the last, what the new one holds is announced. */
void kvd_space_end_old_tree(kvd_core_t *core, uint32_t ns, uint32_t id);

/* The device cannot read the block's disk copy now, and there is no other: hide it and everything below. Nothing leaves
 * a set; what the tier reads again is taken back as it is. */
void kvd_block_set_aside(kvd_core_t *core, uint32_t block);
void kvd_block_take_back(kvd_core_t *core, uint32_t block);

#endif
