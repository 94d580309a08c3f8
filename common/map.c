#include "kv/map.h"

#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u /* Linux 6.3 */
#endif

int kv_memfd_create(const char *name, unsigned flags)
{
	int fd = memfd_create(name, flags | MFD_CLOEXEC | MFD_NOEXEC_SEAL);

	return fd < 0 && errno == EINVAL ? memfd_create(name, flags | MFD_CLOEXEC) : fd;
}

/* Address space with an aligned piece of `bytes` in it, all of it kept; NULL: none. */
static uint8_t *reserve(size_t bytes)
{
	void *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return base == MAP_FAILED ? NULL : base;
}

void *kv_map_shared(int fd, size_t bytes, int prot)
{
	const size_t page = 4096, room = bytes + KV_HUGE_PAGE;
	const size_t held = (bytes + page - 1) & ~(page - 1);
	uint8_t *around = bytes >= KV_HUGE_PAGE && room > bytes ? reserve(room) : NULL;
	uint8_t *at, *base;
	size_t before;

	if (!around) {
		return mmap(NULL, bytes, prot, MAP_SHARED, fd, 0);
	}
	before = (size_t)(-(uintptr_t)around & (KV_HUGE_PAGE - 1));
	at = around + before;
	base = mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, 0);
	if (base == MAP_FAILED) {
		(void)munmap(around, room);
		return MAP_FAILED;
	}
	if (before > 0) {
		(void)munmap(around, before);
	}
	if (before + held < room) {
		(void)munmap(at + held, room - before - held);
	}

	return base;
}
