/* scheduler/handover_calls.h -- libkvc's calls for hand-overs, with a request's keys and in its space. */
#ifndef KVX_SCHEDULER_HANDOVER_CALLS_H
#define KVX_SCHEDULER_HANDOVER_CALLS_H

#include "kvx_scheduler.h"

/* The n tokens after the request's last whole unit, which lie in a block of their own: its last unit from now on, with
 * the private key of that hand-over. It is saved and loaded like the others, but no lookup without that key finds it.
 * KVC_ERR_ARG: n is no part of a unit, or the request has no keys, or one already. KVC_ERR_NOMEM. */
kvc_status_t kvx_scheduler_add_private(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const char *transfer,
				       const uint32_t *tokens, uint32_t n);
/* kvc_handover_send() of a chunk, whose n is in units and whose source is the request's own keys. KVC_ERR_STALE_EPOCH:
 * the request has fewer of them: its space was reset. */
kvc_status_t kvx_scheduler_send_chunk(kvx_scheduler_t *scheduler, const kvx_ask_t *ask,
				      const kvc_handover_chunk_t *chunk, kvc_handover_t **p_handover);
/* Where a hand-over comes from, the one place that chooses: with from->peer kvc_handover_fetch(), else
 * kvc_handover_recv() of from->transfer. */
kvc_status_t kvx_handover_receive(kvc_space_t *space, const kvc_fetch_t *from, kvc_handover_t **p_handover);
/* The same in the request's space. */
kvc_status_t kvx_scheduler_recv(kvx_scheduler_t *scheduler, const kvx_ask_t *ask, const kvc_fetch_t *from,
				kvc_handover_t **p_handover);
/* The root digest of the base model's space. KVC_ERR_UNREACHABLE: it is not open yet. */
kvc_status_t kvx_scheduler_get_root(const kvx_scheduler_t *scheduler, uint8_t root[32]);
/* What was stored may be gone: the next advance() matches again, and saves what is missing. */
void kvx_scheduler_restart_saving(kvx_scheduler_t *scheduler, const kvx_ask_t *ask);

#endif
