/* scheduler/message_buffer.h -- bytes of step messages, reserved before a load is promised. */
#ifndef KVX_SCHEDULER_MESSAGE_BUFFER_H
#define KVX_SCHEDULER_MESSAGE_BUFFER_H

#include "scheduler/state.h"

/* Start the message of this step, once. */
void kvx_buffer_begin(kvx_scheduler_t *scheduler);
/* Reserve `more` bytes in addition to those of loads. 0: there is no memory. */
int kvx_buffer_reserve(kvx_scheduler_t *scheduler, size_t more);
/* Reserve `bytes` for the request's load, whichever message it comes in; 0: none. */
void kvx_buffer_reserve_tentative(kvx_scheduler_t *scheduler, kvx_request_t *request, size_t bytes);
/* Bytes of a FENCE of all blocks; at most of a LOAD record of `units` units. */
size_t kvx_fence_record_bytes(uint32_t max_blocks);
size_t kvx_load_record_bytes(const kvx_scheduler_t *scheduler, uint32_t units);

#endif
