/* daemon/io/loop.h -- the core loop: its sources, and its iterations. */
#ifndef KVD_IO_LOOP_H
#define KVD_IO_LOOP_H

#include "io/host.h"

kv_status_t kvd_loop_init(kvd_host_t *host);
void kvd_loop_fini(kvd_host_t *host);
/* One iteration: wait at most wait_ns, handle a quantum of each namespace, tick. Returns how long the next one may
 * wait. */
uint64_t kvd_loop_iterate(kvd_host_t *host, uint64_t wait_ns);
/* Until SIGTERM, SIGINT or the end of the keeper. */
void kvd_loop_run(kvd_host_t *host);

#endif
