/* daemon/io/sessions/receive.h -- sessions opened, read and ended. */
#ifndef KVD_IO_SESSIONS_RECEIVE_H
#define KVD_IO_SESSIONS_RECEIVE_H

#include "io/base/session.h"

/* Take a connected socket over. On failure it is closed. */
void kvd_session_open(kvd_host_t *host, kvd_namespace_t *ns, int fd);
/* One receive, and at most a quantum's frames. 1: there may be more. */
int kvd_session_read(kvd_host_t *host, kvd_session_t *session);
/* Look again at those whose next frame waits for memory that is being touched. */
void kvd_sessions_unpark(kvd_host_t *host);
/* Close those that keep us waiting, looking at a bounded number: the next call goes on. 1: it has to. */
int kvd_sessions_expire(kvd_host_t *host, uint64_t now_ns);
void kvd_sessions_fini(kvd_host_t *host);

#endif
