/* common/await.h -- the rule for a daemon that does not answer (docs/decisions/021): a miss costs more than the rest of
 * a stall, so its next sign of life is awaited, `limits.silence` in all while the heartbeat does not move. A dead
 * daemon is a miss at once. */
#ifndef KVX_AWAIT_H
#define KVX_AWAIT_H

#include "kv/env.h"
#include "kvc.h"

#define KVX_STALE_NS UINT64_C(100000000) /* longest wait for a heartbeat */

/* Why nothing can be found in the space now; KV_WHY_NONE: it can. */
uint32_t kvx_miss_reason(const kvc_space_t *space);
/* Why a lease or load in that state has brought less than it was asked for; KV_WHY_NONE: it was refused. */
uint32_t kvx_miss_reason_of(kvc_status_t status);
/* 1: the daemon has been `silent` (as this call sees it) for longer than a daemon short of processor time is. *p_since
 * is the load's, 0 at first: what such a daemon has begun to read is worth the wait. */
int kvx_silent_too_long(uint64_t *p_since, int silent, uint64_t now);

#endif
