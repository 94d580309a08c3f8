/* A driver for gpu_prop over lanes.cc: one device of a few SMs whose memory is the host's, and whose streams do
 * everything at once. */
#include "kvk/cuda.h"

#include "cuda/device/args.h"

#include <stdio.h>
#include <stdlib.h>

#define SMS 3

void lanes_launch(const char *name, unsigned grid, unsigned threads, const void *args);

static char handle; /* of everything */
static const char *const kernels[] = {KVK_GPU_GATHER_BULK, KVK_GPU_SCATTER_BULK, KVK_GPU_GATHER_PLAIN,
				      KVK_GPU_SCATTER_PLAIN, KVK_GPU_DIGEST_PIECES};

static int nothing(void)
{
	return 0;
}

static int give_handle(void **p_handle)
{
	*p_handle = &handle;

	return 0;
}

static int zero(int *p_value)
{
	*p_value = 0;

	return 0;
}

static int one(int *p_value)
{
	*p_value = 1;

	return 0;
}

static int name_it(char *name, int cap, int device)
{
	(void)device;
	snprintf(name, (size_t)cap, "lanes on a CPU");

	return 0;
}

static int not_capturing(kvk_cu_stream_t stream, int *p_status)
{
	(void)stream;

	return zero(p_status);
}

/* Of an H200, but for the SMs. */
static int attribute(int *p_value, int which, int device)
{
	(void)device;
	*p_value = which == 16 ? SMS : which == 75 ? 9 : which == 97 ? 232448 : 1;

	return 0;
}

static int find_kernel(kvk_cu_function_t *p_function, kvk_cu_module_t module, const char *name)
{
	(void)module;
	for (size_t i = 0; i < KV_COUNT_OF(kernels); i++) {
		if (strcmp(kernels[i], name) == 0) {
			*p_function = (kvk_cu_function_t)(uintptr_t)&kernels[i];
			return 0;
		}
	}

	return 500;
}

static int launch(kvk_cu_function_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		  unsigned bz, unsigned shared, kvk_cu_stream_t stream, void **params, void **extra)
{
	(void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
	lanes_launch(*(const char *const *)(uintptr_t)function, gx, bx, params[0]);

	return 0;
}

static int mem_alloc(kvk_cu_ptr_t *p_ptr, size_t bytes)
{
	*p_ptr = (kvk_cu_ptr_t)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);

	return *p_ptr ? 0 : 2;
}

static int mem_free(kvk_cu_ptr_t ptr)
{
	free((void *)(uintptr_t)ptr);

	return 0;
}

static int host_alloc(void **p_base, size_t bytes, unsigned flags)
{
	(void)flags;
	*p_base = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);

	return *p_base ? 0 : 2;
}

static int host_free(void *base)
{
	free(base);

	return 0;
}

static int host_pointer(kvk_cu_ptr_t *p_ptr, void *base, unsigned flags)
{
	(void)flags;
	*p_ptr = (kvk_cu_ptr_t)(uintptr_t)base;

	return 0;
}

static int copy(kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream)
{
	(void)stream;
	memmove((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);

	return 0;
}

static int copy_rows(const kvk_cu_rows_t *rows, kvk_cu_stream_t stream)
{
	for (size_t i = 0; i < rows->height; i++) {
		(void)copy(rows->to.at + i * rows->to.pitch, rows->from.at + i * rows->from.pitch, rows->width, stream);
	}

	return 0;
}

/* All memory is this device's, and lies where it lies. */
static int pointer_attribute(void *p_value, int which, kvk_cu_ptr_t ptr)
{
	const unsigned device_memory = 2;
	const int ordinal = 0;

	if (which == 3) {
		memcpy(p_value, &ptr, sizeof ptr);
	} else {
		memcpy(p_value, which == 2 ? (const void *)&device_memory : (const void *)&ordinal, sizeof ordinal);
	}

	return 0;
}

static int error_name(int error, const char **p_name)
{
	(void)error;
	*p_name = "an error";

	return 0;
}

/* Calls whose other arguments do not matter here. */
#define AS(member, function) .member = (__typeof__(((kvk_cuda_ops_t *)0)->member))(void (*)(void))(function)

const kvk_cuda_ops_t *kvk_cuda_load(const char **p_why)
{
	static const kvk_cuda_ops_t ops = {
		AS(init, nothing),
		AS(driver_version, zero),
		AS(device_count, one),
		AS(device_get, zero),
		.device_name = name_it,
		.device_attribute = attribute,
		AS(context_retain, give_handle),
		AS(context_release, nothing),
		AS(context_push, nothing),
		AS(context_pop, give_handle),
		AS(module_load, give_handle),
		AS(module_unload, nothing),
		.module_function = find_kernel,
		AS(function_attribute, nothing),
		.launch = launch,
		.mem_alloc = mem_alloc,
		.mem_free = mem_free,
		.host_alloc = host_alloc,
		.host_free = host_free,
		AS(host_register, nothing),
		AS(host_unregister, nothing),
		.host_pointer = host_pointer,
		.copy_async = copy,
		.copy_rows = copy_rows,
		AS(stream_create, give_handle),
		AS(stream_destroy, nothing),
		.stream_capturing = not_capturing,
		AS(stream_wait, nothing),
		AS(event_create, give_handle),
		AS(event_destroy, nothing),
		AS(event_record, nothing),
		AS(event_query, nothing),
		AS(event_wait, nothing),
		AS(event_elapsed, nothing),
		AS(capture_mode, nothing),
		.pointer_attribute = pointer_attribute,
		AS(peer_can, zero),
		AS(peer_enable, nothing),
		.error_name = error_name,
	};

	(void)p_why;

	return &ops;
}
