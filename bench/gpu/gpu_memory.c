/* The cache's memory: of the device, of the fake driver's device (ENGINE_FAKE), or the host's. */
#include "gpu_engine.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef ENGINE_FAKE
#include "fake_cuda.h"
#endif

#define PINNED    3u /* portable, mapped */
#define HUGE_PAGE ((size_t)2 << 20)

static const kvk_cuda_ops_t *cuda;
static kvk_cu_context_t context;
static kvk_cu_stream_t stream;
static kvk_cu_event_t event;
static uint8_t *bounce;
static kvk_cu_ptr_t bounce_at;
static int device;

static const kvk_cuda_ops_t *find_driver(void)
{
#ifdef ENGINE_FAKE
	fake_cuda_start(&(fake_cuda_config_t){.seed = 1, .lazy = 1, .major = 9});

	return fake_cuda_ops();
#else
	const char *why;
	const kvk_cuda_ops_t *found = kvk_cuda_load(&why);

	if (!found) {
		printf("gpu: %s\n", why);
	}

	return found;
#endif
}

const void *memory_image(void)
{
#ifdef ENGINE_FAKE
	return fake_cuda_image();
#else
	return NULL;
#endif
}

int memory_open(int host)
{
	int count = 0;

	if (host) {
		return 0;
	}
	cuda = find_driver();
	if (!cuda || cuda->init(0) != 0 || cuda->device_count(&count) != 0 || count == 0) {
		printf("gpu: skipped: there is no device\n");
		return 77;
	}
	if (cuda->device_get(&device, 0) != 0 || cuda->context_retain(&context, device) != 0 ||
	    cuda->context_push(context) != 0 || cuda->stream_create(&stream, 1, 0) != 0 ||
	    cuda->event_create(&event, 2) != 0) {
		printf("gpu: the device cannot be used\n");
		return 4;
	}

	return 0;
}

void memory_close(void)
{
	kvk_cu_context_t popped;

	if (!cuda) {
		free(bounce);
		bounce = NULL;
		return;
	}
	if (bounce) {
		cuda->host_free(bounce);
	}
	cuda->event_destroy(event);
	cuda->stream_destroy(stream);
	cuda->context_pop(&popped);
	cuda->context_release(device);
}

uint8_t *memory_take(size_t bytes)
{
	kvk_cu_ptr_t at = 0;

	if (!cuda) {
		void *memory = aligned_alloc(HUGE_PAGE, (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);

		if (memory) {
			(void)madvise(memory, bytes, MADV_HUGEPAGE);
		}
		return memory;
	}

	return cuda->mem_alloc(&at, bytes) == 0 ? (uint8_t *)(uintptr_t)at : NULL;
}

void memory_give(uint8_t *memory)
{
	if (cuda) {
		cuda->mem_free((kvk_cu_ptr_t)(uintptr_t)memory);
	} else {
		free(memory);
	}
}

uint8_t *memory_bounce(size_t bytes)
{
	void *base = NULL;

	if (!cuda) {
		bounce = malloc(bytes);
	} else if (cuda->host_alloc(&base, bytes, PINNED) == 0 && cuda->host_pointer(&bounce_at, base, 0) == 0) {
		bounce = base;
	}

	return bounce;
}

void memory_write(uint8_t *to, const uint8_t *from, size_t bytes)
{
	if (cuda) {
		cuda->copy_async((kvk_cu_ptr_t)(uintptr_t)to, bounce_at + (kvk_cu_ptr_t)(from - bounce), bytes, stream);
	} else {
		memcpy(to, from, bytes);
	}
}

void memory_read(uint8_t *to, const uint8_t *from, size_t bytes)
{
	if (cuda) {
		cuda->copy_async(bounce_at + (kvk_cu_ptr_t)(to - bounce), (kvk_cu_ptr_t)(uintptr_t)from, bytes, stream);
	} else {
		memcpy(to, from, bytes);
	}
}

void memory_settle(void)
{
	if (cuda) {
		cuda->event_record(event, stream);
		cuda->event_wait(event);
	}
}

const kvk_cuda_ops_t *memory_cuda(void)
{
	return cuda;
}

void *memory_stream(void)
{
	return stream;
}

uint64_t memory_free_bytes(int host)
{
	uint64_t bytes = 0;
#ifdef ENGINE_FAKE
	(void)host;
#else
	int (*get_info)(size_t * p_free, size_t * p_total) = NULL;
	size_t free_bytes = 0, total = 0;
	void *library, *found;

	if (host || memory_open(0) != 0) {
		return 0;
	}
	library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
	found = library ? dlsym(library, "cuMemGetInfo_v2") : NULL;
	memcpy(&get_info, &found, sizeof found);
	if (get_info && get_info(&free_bytes, &total) == 0) {
		bytes = free_bytes;
	}
	memory_close();
#endif

	return bytes;
}
