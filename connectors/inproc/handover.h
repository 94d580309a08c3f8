/* inproc/handover.h -- sends and receives by id, and by the tokens of a lookup buffer. */
#ifndef KVX_INPROC_HANDOVER_H
#define KVX_INPROC_HANDOVER_H

#include "inproc/job.h"
#include "kvx_handover.h"

/* By what an inserted prompt is found: its tokens that count, of those with the same salt. */
typedef struct kvx_lookup {
	uint32_t *tokens; /* allocated, the salt behind them */
	uint32_t n;
	const char *salt; /* NULL: none */
	int wait;         /* of an insert: for room */
} kvx_lookup_t;

/* kvx_send() of a new hand-over; with `lookup` (NULL: without) one that is found by it and has no id. Of a send that is
 * begun, its tokens are the send's. KVC_PENDING, or why there is none. */
kvc_status_t kvx_send_begin(kvx_t *kvx, const kvx_chunk_t *chunk, const kvx_lookup_t *lookup, kvx_send_t **p_send);
/* kvx_recv() of what agrees with `lookup` (n 0: of anything), into as many blocks as room->n_tokens needs. The lookup's
 * tokens are the receive's from now on, in any case. */
kvc_status_t kvx_recv_lookup(kvx_t *kvx, const kvx_prefix_t *room, const kvx_lookup_t *lookup, kvx_recv_t **p_recv,
			     kvx_recv_result_t *result);

#endif
