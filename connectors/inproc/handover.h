/* inproc/handover.h -- sends: chunk by chunk, or an insert of the lookup buffer. */
#ifndef KVX_INPROC_HANDOVER_H
#define KVX_INPROC_HANDOVER_H

#include "inproc/job.h"
#include "kvx_handover.h"

typedef enum kvx_send_kind {
	KVX_SEND_CHUNKS,
	KVX_SEND_INSERT,      /* in one chunk, so that it is found whole; BUSY where the buffer is full */
	KVX_SEND_INSERT_WAITS /* the same, but it waits for room */
} kvx_send_kind_t;

/* kvx_send() of a new hand-over. KVC_PENDING, or why there is none. */
kvc_status_t kvx_send_begin(kvx_t *kvx, const kvx_chunk_t *chunk, kvx_send_kind_t kind, kvx_send_t **p_send);

#endif
