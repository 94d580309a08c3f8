/* member.h -- finding members, and telling them something. */
#ifndef KVD_CORE_MEMBER_H
#define KVD_CORE_MEMBER_H

#include "core/core_impl.h"

kvd_member_rec_t *kvd_member_find(kvd_core_t *core, kvd_member_t id);
/* The open member's record, if it may speak in namespace ns. KV_ERR_NOT_JOINED. */
kv_status_t kvd_member_check(kvd_core_t *core, uint32_t ns, kvd_member_t id, kvd_member_rec_t **p_member,
			     kvd_instance_rec_t **p_instance);
/* Queue a notice to a member, if it is still there to read it. */
void kvd_member_notify(kvd_core_t *core, kvd_member_t member, uint16_t code, const kv_msg_t *msg);

#endif
