/* dismantle.h -- taking down what is invisible already: trees of old epochs, and subtrees below a bad block
 * (quarantine.h).
 *
 * The work is cut into quanta, leaf first: leases are revoked, transfers detached, sets left, slots freed, blocks
 * forgotten.
 */
#ifndef KVD_CORE_DISMANTLE_H
#define KVD_CORE_DISMANTLE_H

#include "core/core.h"

/* One quantum; 1 while there is more. */
int kvd_dismantle_run(kvd_core_t *core);

#endif
