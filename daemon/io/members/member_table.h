/* daemon/io/members/member_table.h -- who has joined: found, counted, shown. */
#ifndef KVD_IO_MEMBERS_MEMBER_TABLE_H
#define KVD_IO_MEMBERS_MEMBER_TABLE_H

#include "io/host.h"

/* NULL when it is unknown. The other two take NULL. */
kvd_member_entry_t *kvd_member_entry_find(kvd_host_t *host, kvd_member_t id);
kvd_member_t kvd_member_entry_id(const kvd_member_entry_t *member);
kvd_session_t *kvd_member_entry_session(const kvd_member_entry_t *member);
/* Members of a namespace, with and without a session; at most cap of them. Returns how many there are. */
typedef struct kvd_mapper {
	kvd_member_t id;
	uint32_t role;
} kvd_mapper_t;
uint32_t kvd_members_list(const kvd_host_t *host, const char *ns, kvd_mapper_t *out, uint32_t cap);
/* Members with a session, and descriptors held for members and instances. */
uint32_t kvd_members_count_attached(const kvd_host_t *host);
uint32_t kvd_members_count_fds(const kvd_host_t *host);
/* A member has opened a space: STATUS names it, and the log. */
void kvd_member_entry_set_space(kvd_host_t *host, kvd_member_entry_t *member, uint32_t space, const char *model);
/* Program, process id and space of a member into its object in STATUS (kvd_world_t.describe). */
void kvd_member_entry_describe(void *ctx, kvd_member_t id, struct kv_json *json);
/* A line in the log: `what` has happened to a member that has a session. */
void kvd_member_log(kvd_host_t *host, const kvd_member_entry_t *member, const char *what);
/* NULL: unknown. */
kvd_instance_entry_t *kvd_instance_entry_find(kvd_host_t *host, kvd_instance_t id);

#endif
