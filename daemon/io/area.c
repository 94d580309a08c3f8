/* Sealed shared memory. */
#include "io/area.h"

#include "kv/log.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096u

static kv_status_t area_failed(const char *name, const char *call, int error)
{
	kv_log(KV_LOG_WARN, "io", "no shared memory for a client: area %s call %s error \"%s\"", name, call,
	       strerror(error));

	return error == EMFILE || error == ENFILE ? KV_ERR_LIMIT : KV_ERR_NOMEM;
}

kv_status_t kvd_area_create(const char *name, size_t bytes, kvd_area_writer_t writer, kvd_area_t *p_area)
{
	const int seals =
		F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (writer == KVD_AREA_DAEMON ? F_SEAL_FUTURE_WRITE : 0);
	size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
	kv_status_t status;
	void *base;
	int fd;

	fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0) {
		return area_failed(name, "memfd_create", errno);
	}
	if (ftruncate(fd, (off_t)size) != 0) {
		status = area_failed(name, "ftruncate", errno);
		goto err_close;
	}
	base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (base == MAP_FAILED) {
		status = area_failed(name, "mmap", errno);
		goto err_close;
	}
	if (fcntl(fd, F_ADD_SEALS, seals) != 0) {
		status = area_failed(name, "seal", errno);
		goto err_unmap;
	}
	/* Advice only: a core dump without clients' memory. */
	(void)madvise(base, size, MADV_DONTDUMP);
	(void)madvise(base, size, MADV_DONTFORK);
	*p_area = (kvd_area_t){fd, base, size};

	return KV_OK;

err_unmap:
	munmap(base, size);
err_close:
	close(fd);
	return status;
}

void kvd_area_destroy(kvd_area_t *area)
{
	if (area->fd >= 0) {
		munmap(area->base, area->bytes);
		close(area->fd);
	}
	*area = KVD_AREA_NONE;
}
