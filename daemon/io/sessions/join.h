/* daemon/io/sessions/join.h -- members and instances: JOIN, and their end. */
#ifndef KVD_IO_MEMBERS_JOIN_H
#define KVD_IO_MEMBERS_JOIN_H

#include "io/sessions/request.h"

kv_status_t kvd_request_join(kvd_host_t *host, kvd_call_t *call);
/* It has said that it touches some memory no more. */
void kvd_member_entry_set_drained(kvd_host_t *host, kvd_member_entry_t *member, const kv_msg_drained_t *ask);
/* The session of a member is at end of file. */
void kvd_member_entry_close(kvd_host_t *host, kvd_member_entry_t *member);
/* Free some members that have gone and the areas of an instance the core has done with. 1: there may be more. */
int kvd_members_reap(kvd_host_t *host);
void kvd_members_fini(kvd_host_t *host);

#endif
