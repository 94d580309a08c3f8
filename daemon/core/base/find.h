/* find.h -- the space and the member that a request names, and notices to members. */
#ifndef KVD_CORE_FIND_H
#define KVD_CORE_FIND_H

#include "core/base/core_impl.h"

/* The space of a request with keys. KV_ERR_NOT_FOUND, KV_ERR_STALE_EPOCH. */
kv_status_t kvd_space_find(kvd_core_t *core, uint32_t ns, uint32_t id, uint64_t epoch, kvd_space_t **p_space);
/* Blocks of a `window` or `state` group have no parent: each is a run at the root, pinned and evicted without regard to
 * others. */
static inline int kvd_group_unchained(const kv_group_t *group)
{
	return group->rule != KV_RULE_FULL;
}

kvd_member_rec_t *kvd_member_find(kvd_core_t *core, kvd_member_t id);
/* The open member's record, if it may speak in namespace ns. KV_ERR_NOT_JOINED. */
kv_status_t kvd_member_check(kvd_core_t *core, uint32_t ns, kvd_member_t id, kvd_member_rec_t **p_member,
			     kvd_instance_rec_t **p_instance);
/* Queue a notice to a member, if it is still there to read it. */
void kvd_member_notify(kvd_core_t *core, kvd_member_t member, uint16_t code, const kv_msg_t *msg);

#endif
