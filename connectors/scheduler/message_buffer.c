/* Bytes of step messages: those of loads already started, those of hits that may still be loaded, and those of the
 * record that is added next. A load that was promised finds its bytes. */
#include "scheduler/message_buffer.h"

void kvx_buffer_begin(kvx_scheduler_t *scheduler)
{
	if (!scheduler->building) {
		kvx_msg_reset(&scheduler->message, KVX_MSG_MAGIC);
		scheduler->building = 1;
	}
}

int kvx_buffer_reserve(kvx_scheduler_t *scheduler, size_t more)
{
	kvx_buffer_begin(scheduler);

	return kvx_msg_reserve(&scheduler->message, scheduler->reserved_bytes + scheduler->tentative_bytes + more);
}

void kvx_buffer_reserve_tentative(kvx_scheduler_t *scheduler, kvx_request_t *request, size_t bytes)
{
	scheduler->tentative_bytes -= request->tentative_bytes;
	scheduler->tentative_bytes += bytes;
	request->tentative_bytes = bytes;
}

size_t kvx_fence_record_bytes(uint32_t max_blocks)
{
	return kvx_padded(sizeof(kvx_msg_fence_t)) + kvx_padded((size_t)max_blocks * sizeof(uint32_t));
}

size_t kvx_load_record_bytes(const kvx_scheduler_t *scheduler, uint32_t units)
{
	size_t bytes = sizeof(kvx_msg_load_t) + KVX_MAX_ID;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const size_t blocks = (size_t)units * scheduler->unit / scheduler->groups[g].block_tokens;

		bytes += sizeof(kvx_msg_part_t) + kvx_padded(blocks * sizeof(uint32_t));
	}

	return bytes;
}
