/* instance.h -- instances and their members.
 *
 *   member:    ADDED (open) --end of file--> CLOSED --pidfd fired--> DEAD, gone
 *                                            CLOSED --its process has joined again--> absorbed by its newer self, gone
 *   instance:  first member --> LIVE --last open member closed--> leases revoked
 *       --no slot in quarantine--> everything freed, REAPED
 *
 * Closed is not dead: the process may still write into slots it was given. Its unfinished puts are revoked, their slots
 * wait in quarantine.
 */
#ifndef KVD_CORE_INSTANCE_H
#define KVD_CORE_INSTANCE_H

#include "core/core.h"

kv_status_t kvd_member_drained(kvd_core_t *core, kvd_member_t member, const kv_msg_drained_t *ask,
			       kv_msg_drained_reply_t *reply);

#endif
