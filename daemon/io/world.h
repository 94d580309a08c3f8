/* daemon/io/world.h -- the world of the core: tiers, ledger, notices, events. */
#ifndef KVD_IO_WORLD_H
#define KVD_IO_WORLD_H

#include "io/host.h"

/* Open the tiers; fill host->world and host->core_config. */
kv_status_t kvd_world_open(kvd_host_t *host, char *detail, size_t cap);
void kvd_world_close(kvd_host_t *host);
/* Create and destroy the core on top of them. */
kv_status_t kvd_world_create_core(kvd_host_t *host, char *detail, size_t cap);
void kvd_world_destroy_core(kvd_host_t *host);

#endif
