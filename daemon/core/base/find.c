#include "core/base/core_impl.h"
#include "core/base/find.h"

kv_status_t kvd_space_find(kvd_core_t *core, uint32_t ns, uint32_t id, uint64_t epoch, kvd_space_t **p_space)
{
	kvd_space_t *space;

	if (ns >= core->ns_count || id == 0 || id > core->ns[ns]->number_made) {
		return KV_ERR_NOT_FOUND;
	}
	space = core->ns[ns]->numbers[id];
	if (!space || space->epoch != epoch) { /* closed, reset, or the number is another space's */
		kvd_count(core, KV_M_STALE_EPOCH, 1);
		return KV_ERR_STALE_EPOCH;
	}
	*p_space = space;

	return KV_OK;
}

kvd_member_rec_t *kvd_member_find(kvd_core_t *core, kvd_member_t id)
{
	kvd_member_rec_t *member;

	if (id == 0 || kvd_id_index(id) >= core->members.made) {
		return NULL;
	}
	member = kvd_obj_at(&core->members, kvd_id_index(id));

	return member->id == id ? member : NULL;
}

kv_status_t kvd_member_check(kvd_core_t *core, uint32_t ns, kvd_member_t id, kvd_member_rec_t **p_member,
			     kvd_instance_rec_t **p_instance)
{
	kvd_member_rec_t *member = kvd_member_find(core, id);

	if (!member || !member->open || kvd_instance_at(core, member->instance)->ns != ns) {
		return KV_ERR_NOT_JOINED;
	}
	*p_member = member;
	*p_instance = kvd_instance_at(core, member->instance);

	return KV_OK;
}

void kvd_member_notify(kvd_core_t *core, kvd_member_t id, uint16_t code, const kv_msg_t *msg)
{
	const kvd_member_rec_t *member = kvd_member_find(core, id);

	if (member && member->open) {
		core->world.notify(core->world.ctx, id, code, msg);
	}
}
