/* daemon/io/members/mirror.h -- pages of the mirrors, touched before the first client maps them. */
#ifndef KVD_IO_MEMBERS_MIRROR_H
#define KVD_IO_MEMBERS_MIRROR_H

#include "io/host.h"

/* May the namespace's mirror be handed out? KV_PENDING: a thread touches it, ask again; the first call starts it.
 * KV_ERR_NOMEM: there is no memory for it now. */
kv_status_t kvd_mirror_touch(kvd_namespace_t *ns);
/* Waits for the thread. */
void kvd_mirror_close(kvd_namespace_t *ns);

#endif
