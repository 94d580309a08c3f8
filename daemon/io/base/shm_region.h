/* daemon/io/base/shm_region.h -- shared memory the daemon makes for clients: a sealed memfd, mapped here.
 *
 * That it is mapped says nothing of its pages: who touches one first pays for it, and may get SIGBUS instead. So the
 * daemon touches what a client may touch (decision 066).
 */
#ifndef KVD_IO_SHM_REGION_H
#define KVD_IO_SHM_REGION_H

#include "kv/status.h"

#include <stddef.h>

typedef enum kvd_shm_region_writer {
	KVD_SHM_REGION_DAEMON, /* sealed so that nobody but this mapping can ever write it */
	KVD_SHM_REGION_CLIENT, /* clients write too; only its size is sealed                */
} kvd_shm_region_writer_t;

typedef struct kvd_shm_region {
	int fd;     /* -1: none */
	void *base; /* zeroed, page-aligned, read-write here */
	size_t bytes;
	int touched; /* all of it */
	int huge;    /* it may be touched on huge pages */
} kvd_shm_region_t;

#define KVD_SHM_REGION_NONE ((kvd_shm_region_t){.fd = -1})

/* bytes is rounded up to whole pages. The errors are those of kv/system.h. */
kv_status_t kvd_shm_region_create(const char *name, size_t bytes, kvd_shm_region_writer_t writer,
				  kvd_shm_region_t *p_area);
/* The same on reserved huge pages (vm.nr_hugepages) when all of them can be had, which are touched here: a reader that
 * hops through a large area then misses the caches once a hop instead of three times. Else ordinary pages, or those
 * that the kernel makes huge when they are touched. */
kv_status_t kvd_shm_region_create_huge(const char *name, size_t bytes, kvd_shm_region_writer_t writer,
				       kvd_shm_region_t *p_area);
/* Touch its first bytes. KV_ERR_NOMEM, logged: the kernel, or a limit of memory, refuses them. Any thread. */
kv_status_t kvd_shm_region_touch(const kvd_shm_region_t *area, size_t bytes);
/* An area of KVD_SHM_REGION_NONE is fine. */
void kvd_shm_region_destroy(kvd_shm_region_t *area);

#endif
