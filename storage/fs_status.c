/* Errors of the file system: see fs_status.h. */
#include "fs_status.h"

#include <errno.h>
#include <fcntl.h>

kv_status_t kvs_fs_status(int error)
{
	switch (error) {
	case ENOSPC:
		return KV_ERR_NOSPC;
	case EMFILE:
	case ENFILE:
	case ENOMEM:
	case EAGAIN:
	case EDQUOT: /* no block need go for it: the tier may be far below its own size */
	case EFBIG:
		return KV_ERR_BUSY;
	case EACCES:
	case EPERM:
	case ENOENT:
	case ENOTDIR:
	case EISDIR:
	case EEXIST:
	case ELOOP:
	case ENAMETOOLONG:
		return KV_ERR_PATH;
	case ENODATA:
		return KV_ERR_CORRUPT;
	default:
		return KV_ERR_IO;
	}
}

int kvs_preallocate(int fd, uint64_t bytes)
{
	int result;

	do {
		result = fallocate(fd, 0, 0, (off_t)bytes);
	} while (result != 0 && errno == EINTR);

	return result == 0 ? 0 : errno == ENOSYS || errno == EPERM ? EOPNOTSUPP : errno;
}
