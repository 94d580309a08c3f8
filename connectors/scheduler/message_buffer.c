/* Room in plans: what is certain to be told, what was offered and may be, and what somebody is about to add. A load
 * that was promised finds it. */
#include "scheduler/impl.h"

void kvx_plan_begin(kvx_scheduler_t *scheduler)
{
	if (!scheduler->building) {
		kvx_bytes_reset(&scheduler->plan, KVX_PLAN_MAGIC);
		scheduler->building = 1;
	}
}

int kvx_plan_room(kvx_scheduler_t *scheduler, size_t more)
{
	kvx_plan_begin(scheduler);

	return kvx_bytes_reserve(&scheduler->plan, scheduler->promised + scheduler->offered + more);
}

void kvx_plan_offer(kvx_scheduler_t *scheduler, kvx_request_t *request, size_t bytes)
{
	scheduler->offered -= request->offered;
	scheduler->offered += bytes;
	request->offered = bytes;
}

size_t kvx_fence_bytes(uint32_t max_blocks)
{
	return kvx_padded(sizeof(kvx_plan_fence_t)) + kvx_padded((size_t)max_blocks * sizeof(uint32_t));
}

size_t kvx_load_bytes(const kvx_scheduler_t *scheduler, uint32_t units)
{
	size_t bytes = sizeof(kvx_plan_load_t) + KVX_MAX_ID;

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		const size_t blocks = (size_t)units * scheduler->unit / scheduler->groups[g].block_tokens;

		bytes += sizeof(kvx_plan_part_t) + kvx_padded(blocks * sizeof(uint32_t));
	}

	return bytes;
}
