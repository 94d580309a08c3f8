/* Host memory that ranks in processes share. */
#include "kvk/ep_group.h"

#include "kv/map.h"
#include "kv/system.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEALS     (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
#define HUGE_2MIB (21u << 26) /* log2 of the page size, above MFD_HUGE_SHIFT */

static kv_status_t map_all(int fd, size_t bytes, kvk_ep_memory_t *memory)
{
	void *base = kv_map_shared(fd, bytes, PROT_READ | PROT_WRITE);

	if (base == MAP_FAILED) {
		return kv_refused_status(errno);
	}
	*memory = (kvk_ep_memory_t){base, bytes};

	return KV_OK;
}

/* Mapping reserves the pages of a file of huge ones: others that map it later find them. */
static kv_status_t create(size_t bytes, unsigned flags, kvk_ep_memory_t *memory, int *p_fd)
{
	int fd = kv_memfd_create("kvk-ep", MFD_ALLOW_SEALING | flags);
	kv_status_t status;

	if (fd < 0) {
		return kv_refused_status(errno);
	}
	status = ftruncate(fd, (off_t)bytes) == 0 && fcntl(fd, F_ADD_SEALS, SEALS) == 0 ? KV_OK
											: kv_refused_status(errno);
	if (status == KV_OK) {
		status = map_all(fd, bytes, memory);
	}
	if (status != KV_OK) {
		close(fd);
		return status;
	}
	*p_fd = fd;

	return KV_OK;
}

kv_status_t kvk_ep_memory_create(size_t bytes, kvk_ep_memory_t *memory, int *p_fd)
{
	const size_t whole = (bytes + KV_HUGE_PAGE - 1) / KV_HUGE_PAGE * KV_HUGE_PAGE;

	if (create(whole, MFD_HUGETLB | HUGE_2MIB, memory, p_fd) == KV_OK) {
		return KV_OK;
	}

	return create(bytes, 0, memory, p_fd);
}

kv_status_t kvk_ep_memory_map(int fd, size_t bytes, kvk_ep_memory_t *memory)
{
	const int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	if (seals < 0 || !(seals & F_SEAL_SHRINK) || fstat(fd, &st) != 0 || (uint64_t)st.st_size < bytes) {
		return KV_ERR_ARG;
	}

	return map_all(fd, (size_t)st.st_size, memory);
}

void kvk_ep_memory_unmap(kvk_ep_memory_t *memory)
{
	if (memory->base) {
		munmap(memory->base, memory->bytes);
		*memory = (kvk_ep_memory_t){0};
	}
}
