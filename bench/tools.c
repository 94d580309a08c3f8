/* Memory, bytes and CPUs for benches. */
#include "bench.h"

#include <sched.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

/* The processors this program was started on: pinning narrows the thread's own set, and later pins must still see
 * all. */
static const cpu_set_t *start_set(void)
{
	static cpu_set_t set;
	static int known;

	if (!known) {
		known = sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0;
	}

	return known ? &set : NULL;
}

int bench_pin(unsigned n)
{
	const cpu_set_t *allowed = start_set();
	cpu_set_t one;
	unsigned skip;

	if (!allowed) {
		return -1;
	}
	skip = n % (unsigned)CPU_COUNT(allowed);
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
		if (!CPU_ISSET((size_t)cpu, allowed)) {
			continue;
		}
		if (skip-- == 0) {
			CPU_ZERO(&one);
			CPU_SET((size_t)cpu, &one);
			return sched_setaffinity(0, sizeof one, &one) == 0 ? cpu : -1;
		}
	}

	return -1;
}

void bench_unpin(void)
{
	const cpu_set_t *allowed = start_set();

	if (allowed) {
		sched_setaffinity(0, sizeof *allowed, allowed);
	}
}

static size_t whole_pages(size_t bytes)
{
	return (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
}

void *bench_memory(size_t bytes)
{
	const size_t size = whole_pages(bytes);
	uint8_t *raw = mmap(NULL, size + HUGE_PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *memory;
	size_t before;

	if (raw == MAP_FAILED) {
		return NULL;
	}
	before = (HUGE_PAGE - (uintptr_t)raw % HUGE_PAGE) % HUGE_PAGE;
	memory = raw + before;
	if (before > 0) {
		munmap(raw, before);
	}
	if (before < HUGE_PAGE) {
		munmap(memory + size, HUGE_PAGE - before);
	}
	madvise(memory, size, MADV_HUGEPAGE);
	memset(memory, 1, size);

	return memory;
}

void bench_memory_free(void *memory, size_t bytes)
{
	if (memory) {
		munmap(memory, whole_pages(bytes));
	}
}

void bench_fill(void *memory, size_t bytes, uint64_t seed)
{
	uint8_t *out = memory;
	uint64_t x = seed | 1;

	while (bytes > 0) {
		const size_t n = bytes < sizeof x ? bytes : sizeof x;

		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(out, &x, n);
		out += n;
		bytes -= n;
	}
}
