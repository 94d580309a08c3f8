/* Sealed shared memory. */
#include "io/base/shm_region.h"

#include "kv/system.h"
#include "kv/log.h"
#include "kv/map.h"
#include "kvs/sigbus.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE      4096u
#define HUGE_PAGE ((size_t)2 << 20)
#define HUGE_FLAG (21u << 26) /* MFD_HUGE_2MB: log2 of the page size, above MFD_HUGE_SHIFT */

static kv_status_t area_failed(const char *name, const char *call, int error)
{
	char why[KV_REFUSED_TEXT];

	kv_log(KV_LOG_WARN, "io", "no shared memory for a client: area %s error \"%s\"", name,
	       kv_refused_text(call, error, why, sizeof why));

	return kv_refused_status(error);
}

/* A mapping of `size` bytes on huge pages, or MAP_FAILED and no descriptor. */
static void *map_huge(const char *name, size_t size, int *p_fd)
{
	int fd = kv_memfd_create(name, MFD_ALLOW_SEALING | MFD_HUGETLB | HUGE_FLAG);
	void *base = MAP_FAILED;

	if (fd >= 0 && ftruncate(fd, (off_t)size) == 0) {
		base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	}
	/* A control group, or the memory nodes this process is bound to, may have fewer than the machine. */
	if (base != MAP_FAILED && kvs_populate(base, size, 0) != 0) {
		munmap(base, size);
		base = MAP_FAILED;
	}
	if (base == MAP_FAILED && fd >= 0) {
		close(fd);
		fd = -1;
	}
	*p_fd = fd;

	return base;
}

/* Seal what has been mapped, and give the advice that all areas get. */
static kv_status_t area_finish(const char *name, kvd_shm_region_writer_t writer, const kvd_shm_region_t *area)
{
	const int seals =
		F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (writer == KVD_SHM_REGION_DAEMON ? F_SEAL_FUTURE_WRITE : 0);

	if (fcntl(area->fd, F_ADD_SEALS, seals) != 0) {
		return area_failed(name, "seal", errno);
	}
	/* Advice only: a core dump without clients' memory. */
	(void)madvise(area->base, area->bytes, MADV_DONTDUMP);
	(void)madvise(area->base, area->bytes, MADV_DONTFORK);

	return KV_OK;
}

static kv_status_t create_small(const char *name, size_t bytes, kvd_shm_region_writer_t writer,
				kvd_shm_region_t *p_area)
{
	kv_status_t status = kvd_shm_region_create(name, bytes, writer, p_area);

	p_area->huge = status == KV_OK;

	return status;
}

kv_status_t kvd_shm_region_create_huge(const char *name, size_t bytes, kvd_shm_region_writer_t writer,
				       kvd_shm_region_t *p_area)
{
	kvd_shm_region_t area = {.bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE, .touched = 1};

	area.base = map_huge(name, area.bytes, &area.fd);
	if (area.base == MAP_FAILED) {
		return create_small(name, bytes, writer, p_area);
	}
	if (area_finish(name, writer, &area) != KV_OK) {
		kvd_shm_region_destroy(&area);
		return create_small(name, bytes, writer, p_area);
	}
	*p_area = area;

	return KV_OK;
}

kv_status_t kvd_shm_region_create(const char *name, size_t bytes, kvd_shm_region_writer_t writer,
				  kvd_shm_region_t *p_area)
{
	size_t size = (bytes + PAGE - 1) / PAGE * PAGE;
	kv_status_t status;
	void *base;
	int fd;

	fd = kv_memfd_create(name, MFD_ALLOW_SEALING);
	if (fd < 0) {
		return area_failed(name, "memfd_create", errno);
	}
	if (ftruncate(fd, (off_t)size) != 0) {
		status = area_failed(name, "ftruncate", errno);
		goto err_close;
	}
	base = kv_map_shared(fd, size, PROT_READ | PROT_WRITE);
	if (base == MAP_FAILED) {
		status = area_failed(name, "mmap", errno);
		goto err_close;
	}
	status = area_finish(name, writer, &(kvd_shm_region_t){.fd = fd, .base = base, .bytes = size});
	if (status != KV_OK) {
		goto err_unmap;
	}
	*p_area = (kvd_shm_region_t){.fd = fd, .base = base, .bytes = size};

	return KV_OK;

err_unmap:
	munmap(base, size);
err_close:
	close(fd);
	return status;
}

kv_status_t kvd_shm_region_touch(const kvd_shm_region_t *area, size_t bytes)
{
	int error = kvs_populate(area->base, bytes, area->huge);

	return error ? area_failed("pages", "populate", -error) : KV_OK;
}

void kvd_shm_region_destroy(kvd_shm_region_t *area)
{
	if (area->fd >= 0) {
		munmap(area->base, area->bytes);
		close(area->fd);
	}
	*area = KVD_SHM_REGION_NONE;
}
