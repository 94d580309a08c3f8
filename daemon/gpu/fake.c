/* Devices without a GPU: memory is a memfd, sealed as the CPU pool seals its own. */
#include "gpu/source.h"

#include "kv/map.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define LAST  '7'

static const char *why_not(void)
{
	return strerror(errno);
}

static kv_status_t alloc_memfd(void *device, uint64_t bytes, int *p_fd)
{
	int fd = kv_memfd_create("kvd-fake-gpu", MFD_ALLOW_SEALING);

	(void)device;
	if (fd < 0) {
		return KV_ERR_LIMIT;
	}
	if (ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, SEALS) != 0) {
		int error = errno;

		close(fd);
		errno = error;
		return error == EFBIG || error == ENOSPC ? KV_ERR_FULL : KV_ERR_IO;
	}
	*p_fd = fd;

	return KV_OK;
}

kv_status_t kvd_gpu_open_fake(const char *uuid, kvd_gpu_source_t *source)
{
	const char *number = uuid + sizeof KVD_GPU_FAKE - 1;

	if (!kvd_gpu_is_fake(uuid) || number[0] < '0' || number[0] > LAST || number[1] != '\0') {
		return KV_ERR_NOT_FOUND;
	}
	*source = (kvd_gpu_source_t){.alloc = alloc_memfd, .why = why_not};

	return KV_OK;
}
