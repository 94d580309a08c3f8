/* daemon/io/members/reports.h -- reports and digests that members leave in their shared memory. */
#ifndef KVD_IO_MEMBERS_REPORTS_H
#define KVD_IO_MEMBERS_REPORTS_H

#include "io/host.h"

/* Copy reports out of the rings, a bounded number each and a bounded number in all: the next call goes on. 1: it has
 * to. */
int kvd_reports_drain(kvd_host_t *host);
/* Copy all reports of one member. */
void kvd_reports_drain_member(kvd_host_t *host, kvd_member_entry_t *member);
/* Leaf digests of a put, from the member's staging (kvd_core_set_staging). KV_ERR_ARG: not within it. */
kv_status_t kvd_member_entry_read_staging(void *ctx, kvd_member_t id, uint64_t first, uint32_t words, uint64_t *out);

#endif
