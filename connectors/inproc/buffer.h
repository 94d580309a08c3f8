/* inproc/buffer.h -- what was inserted, until a consumer has taken it or its time is over: the bytes count. */
#ifndef KVX_INPROC_BUFFER_H
#define KVX_INPROC_BUFFER_H

#include "inproc/job.h"

/* 1: so much more may be kept. An empty buffer takes anything. */
int kvx_buffer_has_room(const kvx_t *kvx, uint64_t bytes);
/* A complete hand-over is in the buffer from now on. Without memory for it, it does not count. */
void kvx_buffer_keep(kvx_t *kvx, kvc_handover_t *handover, uint64_t bytes);
/* Drop what has ended. */
void kvx_buffer_poll(kvx_t *kvx);
/* The hand-overs go on. */
void kvx_buffer_free(kvx_t *kvx);

#endif
