/* io/members/writers.h -- members of earlier daemons, whose copies into adopted memory may still go on.
 *
 * The keeper keeps a pidfd of each member. Slots that an earlier daemon left unfinished stay QUARANTINED until every
 * such member is quiet: its process has ended, or the same attachment has joined again and says that its copies have
 * ended (decision 059).
 */
#ifndef KVD_IO_MEMBERS_WRITERS_H
#define KVD_IO_MEMBERS_WRITERS_H

#include "io/host.h"

/* Take them from what the keeper has kept. One whose descriptor is lost is waited for until it joins again.
 * KV_ERR_NOMEM, or one of kv/system.h: one cannot be watched, and the daemon must not serve; the next start has all
 * again. */
kv_status_t kvd_writers_open(kvd_host_t *host);
void kvd_writers_close(kvd_host_t *host);
/* Have the keeper keep a member's pidfd: the next daemon, after a crash of this one, learns from it which writers still
 * live. The caller has room for it (kvd_keeper_reserve()). Have it drop that one. */
void kvd_writers_keep(kvd_host_t *host, const kvd_member_entry_t *member);
void kvd_writers_drop(kvd_host_t *host, const kvd_member_entry_t *member);
/* No copy of the member's attachment into the memory of an earlier daemon goes on. */
void kvd_writers_note_quiet(kvd_host_t *host, const kvd_member_entry_t *member);
/* Forget those that are quiet. With the last one the slots are free. Between two iterations. */
void kvd_writers_step(kvd_host_t *host);
uint32_t kvd_writers_count_fds(const kvd_host_t *host);

#endif
