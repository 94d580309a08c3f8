/* daemon/io/members/member.h -- members and instances as io keeps them; for the files of this folder. */
#ifndef KVD_IO_MEMBERS_MEMBER_H
#define KVD_IO_MEMBERS_MEMBER_H

#include "io/host.h"

#define KVD_REPORT_RECORDS 1024u
#define KVD_REPORT_OFFSET  4096u

struct kvd_instance_entry {
	kvd_instance_entry_t *next;
	kvd_instance_t id;
	kvd_namespace_t *ns;
	kvd_shm_region_t leases;
	char name[129];
};

struct kvd_member_entry {
	kvd_source_t source;      /* its pidfd */
	kvd_member_entry_t *next; /* in its bucket, or among those that have gone */
	kvd_member_t id;
	kvd_instance_t instance;
	kvd_namespace_t *ns;
	kvd_session_t *session; /* NULL: its connection has ended */
	kvd_shm_region_t area;
	uint64_t staging_offset, staging_words;
	uint64_t tail;      /* reports read; the copy in the area is for the member only */
	uint64_t dropped;   /* reports it could not write, as far as they are counted */
	uint64_t looked_ns; /* when that was */
	uint64_t process; /* equal to another's whose pidfd has not fired either: the same process; 0: cannot be told */
	uint64_t attachment; /* equal to another's of that process: connections of one kvc_t; 0: of none */
	uint32_t role, rank;
	uint32_t space; /* opened last; 0: none */
	int drained;    /* it has said that copies of its older connections have ended */
	int left;       /* its last word was that it has unmapped everything */
	int fired;      /* the pidfd has: it touches nothing */
};

static inline kvd_member_entry_t **kvd_member_bucket(kvd_host_t *host, kvd_member_t id)
{
	return &host->members[(id * UINT64_C(0x9e3779b97f4a7c15)) >> 54];
}

#endif
