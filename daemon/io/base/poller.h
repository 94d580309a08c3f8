/* daemon/io/base/poller.h -- what the loop watches: sources in its epoll set. */
#ifndef KVD_IO_POLLER_H
#define KVD_IO_POLLER_H

#include "io/host.h"

/* Watch source->fd for `events` (EPOLLIN, ...). The errors are those of kv/system.h. */
kv_status_t kvd_poller_add(kvd_host_t *host, kvd_source_t *source, uint32_t events);
void kvd_poller_change(kvd_host_t *host, kvd_source_t *source, uint32_t events);
void kvd_poller_remove(kvd_host_t *host, kvd_source_t *source);
/* Watch the event fd of a tier, if it has one; `tier` may be NULL. */
kv_status_t kvd_poller_watch_tier(kvd_host_t *host, kvd_source_t *source, kvs_tier_t *tier);

#endif
