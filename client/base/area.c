/* Shared memory that came as a descriptor. */
#include "impl.h"

#include "kv/map.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

kv_status_t kvc_map_fd(int fd, uint64_t bytes, int prot, void **p_base)
{
	struct stat st;
	int seals = fcntl(fd, F_GET_SEALS);
	void *base;

	/* Memory that another process can truncate ends in SIGBUS: only memory sealed against shrinking is used. */
	if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) != 0 || bytes == 0 || bytes > SIZE_MAX / 2 ||
	    (uint64_t)st.st_size < bytes) {
		return KV_ERR_PROTO;
	}
	base = kv_map_shared(fd, bytes, prot);
	if (base == MAP_FAILED) {
		return KV_ERR_NOMEM;
	}
	if (madvise(base, bytes, MADV_DONTFORK) != 0) {
		munmap(base, bytes);
		return KV_ERR_UNSUPPORTED;
	}
	/* Fewer TLB misses where the kernel gives huge pages; nothing is lost where it does not. */
	(void)madvise(base, bytes, MADV_HUGEPAGE);
	*p_base = base;

	return KV_OK;
}
