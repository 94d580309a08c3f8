/* Pins of an entry: is there room for one more? */
#include "core/block/block.h"
#include "core/handover/handover_impl.h"
#include "core/base/share.h"

kv_status_t kvd_handover_refuse(kvd_core_t *core, kvd_handover_call_t *call, uint64_t bytes)
{
	kvd_count(core, KV_M_HANDOVERS_REFUSED, 1);
	kvd_count_ns(core, call->space->ns, KV_NM_HANDOVERS_REFUSED, 1);
	call->refused = bytes;

	return kvd_busy(core, "hand-overs keep as much as they may (handover.max_bytes, a quarter of the namespace's "
			      "share), or the share is pinned as a whole; take or end some, or raise it");
}

/* Is there room for a pin on the block? What other entries, or other pins, keep already is not counted again.
 * *p_bytes: what the entries would keep more. */
static int may_pin(const kvd_core_t *core, const kvd_space_t *space, uint32_t block, uint64_t tail_bytes,
		   uint64_t *p_bytes)
{
	const uint32_t slot_class = kvd_class_of(&core->ix, kvd_block_at(&core->ix, block));
	uint64_t slot_bytes = core->classes[slot_class].slot_bytes;
	uint32_t depth = kvd_depth_of(&core->ix, kvd_block_at(&core->ix, block));
	uint64_t unshared = depth - kvd_index_depth_pinned(&core->ix, block, KVD_PINS_HANDOVER);
	uint64_t unpinned = depth - kvd_index_depth_pinned(&core->ix, block, KVD_PINS_ALL);
	uint64_t in_host;

	if (space->memory != KVD_HOST_MEM) {
		slot_bytes = 0; /* the share of that memory is the only limit: what is refused is in host memory too */
	}
	*p_bytes = unshared * slot_bytes + tail_bytes;
	in_host = unpinned * slot_bytes + tail_bytes;

	return *p_bytes <= kvd_handover_room_left(core, space->ns) &&
	       unpinned <= kvd_share_pin_room(core, space->ns, slot_class) &&
	       kvd_handover_is_within_share(core, space->ns, in_host);
}

kv_status_t kvd_handover_pin_block(kvd_core_t *core, kvd_handover_call_t *call, uint32_t block, uint64_t tail_bytes,
				   kvd_handover_pins_t *pins)
{
	const uint32_t memory = call->space->memory;
	uint64_t bytes;
	uint32_t pin;
	kv_status_t status;

	while (!may_pin(core, call->space, block, tail_bytes, &bytes)) {
		if (!kvd_handover_make_room(core, call->space->ns, memory, bytes, call->entry)) {
			return kvd_handover_refuse(core, call, bytes);
		}
	}
	status = kvd_pin_create(core, block, KVD_PIN_HANDOVER, call->entry->number, &pin);
	if (status == KV_OK) {
		kvd_pin_t *created = kvd_obj_at(&core->pins, pin);

		created->next = pins->head;
		pins->head = pin;
		pins->count++;
		kvd_index_mark_hit(&core->ix, block);
	}

	return status;
}

kv_status_t kvd_handover_pin_private(kvd_core_t *core, kvd_handover_call_t *call, const kv_key_t *key,
				     uint64_t tail_bytes, kvd_handover_pins_t *pins)
{
	const kvd_space_t *space = call->space;
	kv_status_t status = KV_OK;

	for (uint32_t g = 0; g < space->group_count && status == KV_OK; g++) {
		uint32_t block = kvd_index_find(&core->ix, space->tree, key, space->groups[g].id);

		if (block == KVD_NONE) {
			return KV_MISS;
		}
		status = kvd_is_private(&core->ix, kvd_block_at(&core->ix, block))
				 ? kvd_handover_pin_block(core, call, block, tail_bytes, pins)
				 : KV_ERR_ARG;
	}

	return status;
}

void kvd_handover_set_private(kvd_core_t *core, kvd_handover_t *entry, uint32_t partial,
			      const kvd_handover_pins_t *pins)
{
	const kvd_pin_t *pin;

	entry->partial = partial;
	entry->private_pins = *pins; /* of the last chunk: it had none */
	for (uint32_t id = pins->head; id != KVD_NONE; id = pin->next) {
		pin = kvd_obj_at(&core->pins, id);
		kvd_private_block_hold(core, pin->block);
	}
}
