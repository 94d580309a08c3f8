/* daemon/io/shm_region.h -- shared memory the daemon makes for clients: a sealed memfd, mapped here. */
#ifndef KVD_IO_SHM_REGION_H
#define KVD_IO_SHM_REGION_H

#include "kv/status.h"

#include <stddef.h>

typedef enum kvd_area_writer {
	KVD_AREA_DAEMON, /* sealed so that nobody but this mapping can ever write it */
	KVD_AREA_CLIENT, /* clients write too; only its size is sealed                */
} kvd_area_writer_t;

typedef struct kvd_area {
	int fd;     /* -1: none */
	void *base; /* zeroed, page-aligned, read-write here */
	size_t bytes;
} kvd_area_t;

#define KVD_AREA_NONE ((kvd_area_t){.fd = -1})

/* bytes is rounded up to whole pages. KV_ERR_LIMIT: no descriptor is left; KV_ERR_NOMEM. */
kv_status_t kvd_area_create(const char *name, size_t bytes, kvd_area_writer_t writer, kvd_area_t *p_area);
/* The same on reserved huge pages (vm.nr_hugepages) when there are enough: a reader that hops through a large area then
 * misses the caches once a hop instead of three times. Else ordinary pages. */
kv_status_t kvd_area_create_huge(const char *name, size_t bytes, kvd_area_writer_t writer, kvd_area_t *p_area);
/* An area of KVD_AREA_NONE is fine. */
void kvd_area_destroy(kvd_area_t *area);

#endif
