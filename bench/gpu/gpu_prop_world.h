/* gpu_prop_world.h -- the memories of gpu_prop, each twice, and the device. */
#ifndef GPU_PROP_WORLD_H
#define GPU_PROP_WORLD_H

#include "kvk/gpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define MAX_LAYERS 8u
#define MAX_MOVES  96u
#define MAX_BLOCK  (8u << 20)
#ifndef GPU_PROP_IMAGE
#define GPU_PROP_IMAGE NULL /* the build's own */
#endif
#define PATIENCE UINT64_C(60000000) /* us */

typedef enum place { HOST, OWN, PEER, PLACES } place_t;

/* One memory, twice: as the twin and as the device see it. */
typedef struct area {
	uint8_t *twin;
	uint8_t *real;     /* address for the device */
	kvk_cu_ptr_t ptr;  /* 0: host memory, `real` is read as it is */
	uint8_t *readback; /* of device memory */
} area_t;

typedef struct world {
	const kvk_cuda_ops_t *cuda;
	kvk_gpu_t *gpu;
	kvk_cu_context_t context;
	kvk_cu_stream_t stream;
	kvk_cu_event_t event;
	size_t bytes; /* of each area */
	area_t cache, pools[PLACES];
	int has_peer, peer_only;
	uint64_t rng;
	uint64_t copies, compared, flips, caught;
} world_t;

static inline uint64_t below(world_t *w, uint64_t n)
{
	uint64_t z = w->rng += UINT64_C(0x9e3779b97f4a7c15);

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);

	return (z ^ (z >> 31)) % n;
}

static inline void must(int error, const char *what)
{
	if (error != 0) {
		printf("gpu_prop: %s: error %d, %s\n", what, error, kvk_gpu_last_error());
		exit(1);
	}
}

/* ---- memory ---------------------------------------------------------------------------------- */

static inline uint8_t *host_memory(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED) {
		printf("gpu_prop: out of memory\n");
		exit(1);
	}
	madvise(p, bytes, MADV_HUGEPAGE);

	return p;
}

static inline void wait_for_stream(world_t *w)
{
	must(w->cuda->event_record(w->event, w->stream), "event_record");
	must(w->cuda->event_wait(w->event), "event_wait");
}

/* Twin -> real. */
static inline void upload(world_t *w, area_t *a, size_t bytes)
{
	if (!a->ptr) {
		memcpy(a->real, a->twin, bytes);
		return;
	}
	memcpy(a->readback, a->twin, bytes);
	must(w->cuda->copy_async(a->ptr, (kvk_cu_ptr_t)(uintptr_t)a->readback, bytes, w->stream), "upload");
	wait_for_stream(w);
}

static inline const uint8_t *download(world_t *w, area_t *a, size_t bytes)
{
	if (!a->ptr) {
		return a->real;
	}
	must(w->cuda->copy_async((kvk_cu_ptr_t)(uintptr_t)a->readback, a->ptr, bytes, w->stream), "download");
	wait_for_stream(w);

	return a->readback;
}

static inline void randomise(world_t *w, area_t *a, size_t bytes)
{
	uint64_t x = below(w, UINT64_MAX) | 1;

	for (size_t i = 0; i < bytes / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(a->twin + 8 * i, &x, 8);
	}
	upload(w, a, bytes);
}

static inline void make_area(world_t *w, area_t *a, place_t place)
{
	kvk_cu_context_t other, popped;
	int device;

	a->twin = host_memory(w->bytes);
	if (place == HOST) {
		a->real = host_memory(w->bytes);
		must((int)kvk_gpu_register(w->gpu, a->real, w->bytes), "register");
		return;
	}
	if (place == PEER) {
		must(w->cuda->device_get(&device, 1), "device 1");
		must(w->cuda->context_retain(&other, device), "context of device 1");
		must(w->cuda->context_push(other), "context_push");
	}
	must(w->cuda->mem_alloc(&a->ptr, w->bytes), "mem_alloc");
	if (place == PEER) {
		must(w->cuda->context_pop(&popped), "context_pop");
	}
	a->real = (uint8_t *)(uintptr_t)a->ptr;
	a->readback = host_memory(w->bytes);
	must((int)kvk_gpu_register(w->gpu, a->readback, w->bytes), "register");
}

static inline int make_world(world_t *w)
{
	const char *why;
	int count = 0, device = 0;

	w->cuda = kvk_cuda_load(&why);
	if (!w->cuda) {
		printf("gpu_prop: skipped: %s\n", why);
		return 77;
	}
	if (kvk_gpu_open(&(kvk_gpu_config_t){.cuda = w->cuda, .staging_bytes = 32u << 20, .image = GPU_PROP_IMAGE},
			 &w->gpu) != KV_OK) {
		printf("gpu_prop: skipped: %s\n", kvk_gpu_last_error());
		return 77;
	}
	must(w->cuda->device_count(&count), "device_count");
	must(w->cuda->device_get(&device, 0), "device_get");
	must(w->cuda->context_retain(&w->context, device), "context");
	must(w->cuda->context_push(w->context), "context_push");
	must((int)kvk_gpu_create_stream(w->gpu, 0, &w->stream), "stream");
	must(w->cuda->event_create(&w->event, 2), "event");
	w->has_peer = count > 1;
	if (w->peer_only && !w->has_peer) {
		printf("gpu_prop: skipped: there is no second device\n");
		return 77;
	}
	make_area(w, &w->cache, OWN);
	make_area(w, &w->pools[HOST], HOST);
	make_area(w, &w->pools[OWN], OWN);
	if (w->has_peer) {
		make_area(w, &w->pools[PEER], PEER);
	}
	printf("gpu_prop: %s, %s, seed 0x%llx\n", kvk_gpu_describe(w->gpu), w->has_peer ? "a peer" : "no peer",
	       (unsigned long long)w->rng);

	return 0;
}

#endif
