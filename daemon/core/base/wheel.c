#include "core/base/wheel.h"

#include <string.h>

#define EXPIRE_QUANTUM 64u

void kvd_wheel_init(kvd_wheel_t *wheel, uint64_t now_ns)
{
	for (uint32_t i = 0; i < KVD_WHEEL_BUCKETS; i++) {
		wheel->buckets[i] = KVD_LIST_EMPTY;
	}
	wheel->at = now_ns >> KVD_WHEEL_SHIFT;
}

static uint64_t expiry_of(const kvd_wheel_items_t *items, uint32_t id)
{
	uint64_t expiry;

	memcpy(&expiry, (const uint8_t *)kvd_obj_at(items->pool, id) + items->expiry, sizeof expiry);

	return expiry;
}

int kvd_wheel_run(kvd_wheel_t *wheel, const kvd_wheel_items_t *items, uint64_t now_ns)
{
	uint64_t bucket_now = now_ns >> KVD_WHEEL_SHIFT;
	uint32_t work = 0;

	/* After a long pause each bucket is visited once, not once a round. */
	if (bucket_now > wheel->at + KVD_WHEEL_BUCKETS) {
		wheel->at = bucket_now - KVD_WHEEL_BUCKETS;
	}
	for (; wheel->at < bucket_now; wheel->at++) {
		uint32_t id = wheel->buckets[wheel->at % KVD_WHEEL_BUCKETS].head;

		while (id != KVD_NONE) {
			uint32_t due = id;

			id = kvd_link_at(items->pool, items->link, id)->next;
			/* Of a later round of the wheel. */
			if (expiry_of(items, due) > now_ns) {
				continue;
			}
			if (work >= EXPIRE_QUANTUM) {
				return 1;
			}
			work += items->expire(items->ctx, due);
		}
	}

	return 0;
}
