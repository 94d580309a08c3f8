#include "core/core_impl.h"
#include "core/tenant/member.h"

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
