/* space.h -- namespaces and spaces.
 *
 * A space has one tree per epoch. Reset hides the tree and starts the next epoch with an empty one in O(1); what the
 * old tree held is given back in quanta (dismantle.h), its leases being revoked before any slot is free.
 *
 *   space:  --open--> OPEN (an epoch) --reset--> OPEN (a later one), answered when the superblock has it
 *           OPEN --its number is needed--> CLOSED --open--> OPEN (numbers.h)
 *           CLOSED --its tree is empty, and another space needs the room--> gone
 *   tree:   (recovered, no space) --open--> LIVE --reset--> HIDDEN --dismantled--> gone
 */
#ifndef KVD_CORE_SPACE_H
#define KVD_CORE_SPACE_H

#include "core/base/core_impl.h"

/* KV_PENDING when the answer waits for the superblock. */
kv_status_t kvd_space_reset(kvd_core_t *core, uint32_t ns, kvd_member_t member, uint64_t frame_id,
			    const kv_msg_space_reset_t *ask, kv_msg_space_reset_reply_t *reply);
/* The disk tier has come: each space goes from its temporary epoch to the one on disk. */
void kvd_spaces_attach(kvd_core_t *core);
/* Before the first space is opened. */
void kvd_epochs_init(kvd_core_t *core);
void kvd_spaces_fini(kvd_core_t *core);

#endif
