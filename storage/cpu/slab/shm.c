/* Sealed shared memory. */
#include "shm.h"

#include "kv/map.h"
#include "kvs/sigbus.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

#define MFD_HUGE_2MIB (21u << 26) /* log2 of the page size, as <linux/memfd.h> has it */

static int posix_memfd(const char *name, int huge, int *p_fd)
{
	int fd = kv_memfd_create(name, MFD_ALLOW_SEALING | (huge ? MFD_HUGETLB | MFD_HUGE_2MIB : 0u));

	if (fd < 0) {
		return -errno;
	}
	*p_fd = fd;

	return 0;
}

static int posix_resize(int fd, uint64_t bytes)
{
	return ftruncate(fd, (off_t)bytes) == 0 ? 0 : -errno;
}

static int posix_map(int fd, uint64_t bytes, void **p_base)
{
	void *base = kv_map_shared(fd, bytes, PROT_READ | PROT_WRITE);

	if (base == MAP_FAILED) {
		return -errno;
	}

	if (madvise(base, bytes, MADV_DONTFORK) != 0 || madvise(base, bytes, MADV_DONTDUMP) != 0) {
		int error = -errno;

		munmap(base, bytes);
		return error;
	}
	*p_base = base;

	return 0;
}

static int posix_seal(int fd, int seals)
{
	return fcntl(fd, F_ADD_SEALS, seals) == 0 ? 0 : -errno;
}

static int posix_populate(void *base, uint64_t bytes)
{
	return madvise(base, bytes, MADV_POPULATE_WRITE) == 0 ? 0 : -errno;
}

/* What is there already stays as it is: to move it would cost more than it brings, and somebody is at work there. */
static int posix_collapse(void *base)
{
	unsigned char there[KV_HUGE_PAGE / 4096u];

	if (mincore(base, KV_HUGE_PAGE, there) != 0) {
		return -errno;
	}
	for (size_t i = 0; i < sizeof there; i++) {
		if (there[i] & 1u) {
			return -EEXIST;
		}
	}
	/* It wants one page to begin with. */
	if (madvise(base, 4096, MADV_POPULATE_WRITE) != 0) {
		return -errno;
	}

	return madvise(base, KV_HUGE_PAGE, MADV_COLLAPSE) == 0 ? 0 : -errno;
}

const kvs_sys_t kvs_sys_posix = {
	.memfd = posix_memfd,
	.resize = posix_resize,
	.map = posix_map,
	.seal = posix_seal,
	.populate = posix_populate,
	.collapse = posix_collapse,
};

static _Thread_local const char *failed_call = "";

const char *kvs_shm_failed_call(void)
{
	return failed_call;
}

int kvs_shm_create(const kvs_sys_t *sys, const char *name, uint64_t bytes, int huge, int seals, kvs_shm_t *p_area)
{
	void *base;
	int fd;
	int error = sys->memfd(name, huge, &fd);

	failed_call = "memfd_create";
	if (error) {
		return error;
	}

	failed_call = "ftruncate";
	error = sys->resize(fd, bytes);
	if (error) {
		goto err_close;
	}
	failed_call = "mmap or madvise";
	error = sys->map(fd, bytes, &base);
	if (error) {
		goto err_close;
	}
	failed_call = "fcntl";
	error = sys->seal(fd, seals);
	if (error) {
		goto err_unmap;
	}
	*p_area = (kvs_shm_t){base, bytes, fd};

	return 0;

err_unmap:
	munmap(base, bytes);
err_close:
	close(fd);
	return error;
}

int kvs_shm_populate(const kvs_sys_t *sys, void *base, uint64_t bytes)
{
	int error;

	do {
		error = sys->populate(base, bytes);
	} while (error == -EINTR || error == -EAGAIN);
	if (error == -EINVAL) {
		error = kvs_sigbus_touch_pages(base, bytes) == KV_OK ? 0 : -EFAULT;
	}
	failed_call = "madvise";

	return error;
}

int kvs_populate(void *base, size_t bytes, int huge)
{
	int error = 0;

	for (size_t at = 0, n; at < bytes && !error; at += n) {
		uint8_t *piece = (uint8_t *)base + at;
		const int fits = huge && bytes - at >= KV_HUGE_PAGE && (uintptr_t)piece % KV_HUGE_PAGE == 0;

		n = bytes - at < KV_HUGE_PAGE ? bytes - at : KV_HUGE_PAGE;
		if (!fits || posix_collapse(piece) != 0) {
			error = kvs_shm_populate(&kvs_sys_posix, piece, n);
		}
	}

	return error;
}

void kvs_shm_destroy(kvs_shm_t *area)
{
	if (area->base) {
		munmap(area->base, area->bytes);
		close(area->fd);
		*area = (kvs_shm_t){0};
	}
}
