/* instance.h -- instances and their members.
 *
 *   member:    ADDED (open) --end of file--> CLOSED --pidfd fired--> DEAD, gone
 *                                            CLOSED --its process has joined again--> absorbed by its newer self, gone
 *   instance:  first member --> LIVE --last open member closed--> leases revoked
 *       --no slot waits for quiet--> everything freed, REAPED
 *
 * Closed is not dead: the process may still write into slots it was given. Its unfinished puts are revoked, their slots
 * wait in quarantine.
 */
#ifndef KVD_CORE_INSTANCE_H
#define KVD_CORE_INSTANCE_H

#include "core/lease/extent_alloc.h"
#include "core/core.h"
#include "core/put/put.h"

typedef struct kvd_instance_rec {
	kvd_instance_t id;
	uint32_t self;
	uint32_t ns;
	char name[129];
	uint8_t secret[32];
	uint32_t secret_len;
	kvd_area_t area;
	uint8_t *memory;
	uint32_t members[KVD_INSTANCE_MEMBERS]; /* member records; KVD_NONE: free place */
	uint32_t member_count;
	uint32_t open_count;
	kvd_list_t leases, puts;
	uint32_t lease_count;
	uint64_t pinned_bytes;
	uint64_t unfinished_bytes;
	kvd_link_t of_core; /* all instances */
} kvd_instance_rec_t;

typedef struct kvd_member_rec {
	kvd_member_t id;
	uint32_t instance;
	uint32_t local; /* place in the instance */
	uint32_t role, rank;
	uint32_t open;
} kvd_member_rec_t;

kvd_member_rec_t *kvd_member_rec(kvd_core_t *core, kvd_member_t id);
kvd_instance_rec_t *kvd_instance_at(kvd_core_t *core, uint32_t self);
/* The open member's record, if it may speak in namespace ns. KV_ERR_NOT_JOINED. */
kv_status_t kvd_member_check(kvd_core_t *core, uint32_t ns, kvd_member_t id, kvd_member_rec_t **p_member,
			     kvd_instance_rec_t **p_instance);
/* Queue a notice to a member, if it is still there to read it. */
void kvd_notify(kvd_core_t *core, kvd_member_t member, uint16_t code, const kv_msg_t *msg);
kv_status_t kvd_quiet(kvd_core_t *core, kvd_member_t member, const kv_msg_drained_t *ask,
		      kv_msg_drained_reply_t *reply);

#endif
