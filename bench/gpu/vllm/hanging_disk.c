/* LD_PRELOAD: a read of a disk does not come back while the file that HANGING_DISK names exists. For kvd with
 * nvme.io_engine=threads. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

typedef ssize_t (*preadv_t)(int fd, const struct iovec *iov, int count, off64_t offset);

/* A program calls one or the other, as it was compiled; here they are the same function. */
ssize_t preadv64(int fd, const struct iovec *iov, int count, off64_t offset);
ssize_t preadv(int fd, const struct iovec *iov, int count, off_t offset) __attribute__((alias("preadv64")));

ssize_t preadv64(int fd, const struct iovec *iov, int count, off64_t offset)
{
	const char *file = getenv("HANGING_DISK");
	preadv_t next;

	while (file && access(file, F_OK) == 0) {
		(void)usleep(1000);
	}

	*(void **)&next = dlsym(RTLD_NEXT, "preadv64");

	return next(fd, iov, count, offset);
}
