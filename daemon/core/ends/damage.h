/* damage.h -- copies that are bad, lost or in the way: leases and puts on them end, then the copies leave their set. */
#ifndef KVD_CORE_DAMAGE_H
#define KVD_CORE_DAMAGE_H

#include "core/core.h"
#include "core/index/index.h"

/* Only the block's CPU copy is bad. When it is on disk it stays there, and what lies below it leaves the CPU set with
 * it, leases on all of that being revoked; with too much below it for one call, or without a disk copy, it is
 * quarantined. */
void kvd_quarantine_cpu_copy(kvd_core_t *core, uint32_t block);
kv_status_t kvd_report_bad_block(kvd_core_t *core, kvd_member_t member, const kv_msg_bad_block_t *ask,
				 kv_msg_bad_block_reply_t *reply);
/* Let the disk tier report which slots it has lost, cannot read now, or reads again. */
void kvd_watch_disk(kvd_core_t *core);
/* Evict a leaf of tier t's set at or below a block of it. `force`: leases that pin it end, hand-overs fail, and puts go
 * on without it.
 * KV_MISS: it cannot go now. */
kv_status_t kvd_block_evict_below(kvd_core_t *core, uint32_t block, kvd_set_t t, int force);

#endif
