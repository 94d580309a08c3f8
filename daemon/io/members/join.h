/* daemon/io/members/join.h -- members and instances: JOIN, and their end. */
#ifndef KVD_IO_MEMBERS_JOIN_H
#define KVD_IO_MEMBERS_JOIN_H

#include "io/sessions/request.h"

kv_status_t kvd_join_request(kvd_host_t *host, kvd_call_t *call);
/* It has said that it touches some memory no more. */
void kvd_entry_drained(kvd_host_t *host, kvd_member_entry_t *member, const kv_msg_drained_t *ask);
/* The session of a member is at end of file. */
void kvd_entry_session_ended(kvd_host_t *host, kvd_member_entry_t *member);
/* Free some members that have gone and the areas of an instance the core has done with. 1: there may be more. */
int kvd_entries_reap(kvd_host_t *host);
void kvd_entries_fini(kvd_host_t *host);

#endif
