/* withdraw.h -- blocks that engines take back: saved under a name that turned out not to be true (decision 070).
 *
 *   WITHDRAW --keys hidden, their puts revoked, in quanta--> TAKEN DOWN (dismantle.h)
 *       --the disk has recorded it--> answer
 *
 * One after the other; only the last step of several may overlap.
 */
#ifndef KVD_CORE_WITHDRAW_H
#define KVD_CORE_WITHDRAW_H

#include "core/base/records.h"

/* KV_PENDING: the answer comes later. KV_ERR_BUSY: too many wait. Other values: nothing has happened. */
kv_status_t kvd_withdraw(kvd_core_t *core, const kvd_ask_t *ask);
/* One quantum; 1 while there is more. */
int kvd_withdrawals_run(kvd_core_t *core);
/* Does one of those that still hide blocks name the space? */
int kvd_withdrawals_name(const kvd_core_t *core, const kvd_space_t *space);
/* The core ends. */
void kvd_withdrawals_free(kvd_core_t *core);

#endif
