/* daemon/io/sessions/listener.h -- one listening socket a namespace. */
#ifndef KVD_IO_SESSIONS_LISTENER_H
#define KVD_IO_SESSIONS_LISTENER_H

#include "io/host.h"

/* Mirrors, namespaces in the core, recovery of the disk tier, then the sockets. `detail` gets a sentence. */
kv_status_t kvd_listeners_open(kvd_host_t *host, char *detail, size_t cap);
/* About once a second: what was removed under us (by a cleaner of temporary files) comes back: run_dir, its lock, the
 * sockets. The publisher does so with its own. */
void kvd_listeners_restore(kvd_host_t *host);
/* Close and unlink the sockets; the mirrors stay. */
void kvd_listeners_close(kvd_host_t *host);
/* After the core has gone. */
void kvd_namespaces_free(kvd_host_t *host);

#endif
