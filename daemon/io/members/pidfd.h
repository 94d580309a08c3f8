/* daemon/io/members/pidfd.h -- whose pidfd a member hands in. */
#ifndef KVD_IO_MEMBERS_PIDFD_H
#define KVD_IO_MEMBERS_PIDFD_H

#include "io/base/session.h"

typedef enum kvd_pidfd {
	KVD_PIDFD_BAD,      /* no pidfd, or of a process that has ended */
	KVD_PIDFD_UNPROVED, /* of a live process that may be another one than the sender */
	KVD_PIDFD_OWN,      /* of the very process that sent it */
} kvd_pidfd_t;

/* Whose pidfd is fds[0] of the session? *p_process, unless it is bad: a number that no other live process has; 0: it
 * cannot be told. */
kvd_pidfd_t kvd_pidfd_check(const kvd_session_t *session, uint64_t *p_process);

#endif
