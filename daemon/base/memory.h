/* daemon/base/memory.h -- is there memory for what the configuration asks for? */
#ifndef KVD_MEMORY_H
#define KVD_MEMORY_H

#include "kv/status.h"
#include "options/options.h"

/* Compare cpu.size with the machine, its reserved huge pages, the control groups of this process (version 1 and 2) and
 * its resource limits. What cannot be read limits nothing. `detail` gets a sentence with the numbers. KV_ERR_CONFIG: it
 * can never fit here. KV_ERR_NOMEM: it would fit, but others use the memory now. */
kv_status_t kvd_memory_check(const kvd_options_t *options, char *detail, size_t cap);

/* Bytes of ordinary memory that the machine and the control groups of this process have for it now. kvs_room_fn: any
 * thread, no context. */
uint64_t kvd_memory_room(void *unused);

/* How many processes of this process's control group, and of those below it, the kernel has killed for want of memory;
 * without groups, of the machine. Where that is goes to `where`
 * (NULL, 0: not asked). UINT64_MAX: the kernel does not say. */
uint64_t kvd_memory_oom_kills(char *where, size_t cap);

#endif
