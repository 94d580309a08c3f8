/* kv/map.h -- making shared memory that is not executable, and mapping it so that huge pages fit under it. */
#ifndef KV_MAP_H
#define KV_MAP_H

#include <stddef.h>

#define KV_HUGE_PAGE ((size_t)2 << 20)

/* Map [0, bytes) of fd, shared; at an address that is a multiple of 2 MiB when there is that much of it: else the
 * kernel maps a huge page as 512 small ones. MAP_FAILED with errno; ends with munmap(base, bytes). Any thread. */
void *kv_map_shared(int fd, size_t bytes, int prot);

/* memfd_create(), close-on-exec, of memory that no owner of a descriptor can execute. MFD_ALLOW_SEALING in `flags` for
 * seals. Before Linux 6.3 it is executable. -1 with errno. Any thread. */
int kv_memfd_create(const char *name, unsigned flags);

#endif
