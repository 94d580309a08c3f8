/* A driver for gpu_prop over lanes.cc: fake_cuda.h, whose kernels run thread by thread at their launch, so that all
 * that streams do happens at once and memory has one address. */
#include "fake_cuda_internal.h"

void lanes_launch(const char *name, unsigned grid, unsigned threads, const void *args);

static int launch(kvk_cu_function_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		  unsigned bz, unsigned shared, kvk_cu_stream_t stream, void **params, void **extra)
{
	(void)gy, (void)gz, (void)by, (void)bz, (void)shared, (void)stream, (void)extra;
	BEGIN(launch, NEEDS_CONTEXT)
	lanes_launch(fake_kernels[(fake_function_t *)(void *)function - fake.functions], gx, bx, params[0]);

	return 0;
}

static int host_pointer(kvk_cu_ptr_t *p_ptr, void *base, unsigned flags)
{
	BEGIN(host_pointer, NEEDS_CONTEXT)
	(void)flags;
	*p_ptr = (kvk_cu_ptr_t)(uintptr_t)base;

	return 0;
}

static int copy(kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream)
{
	BEGIN(copy_async, NEEDS_CONTEXT)
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

static void check_faults(void)
{
	if (fake_cuda_faults() > 0) {
		_exit(1);
	}
}

const kvk_cuda_ops_t *kvk_cuda_load(const char **p_why)
{
	static kvk_cuda_ops_t ops;

	(void)p_why;
	if (!ops.launch) {
		fake_cuda_start(&(fake_cuda_config_t){.seed = 1, .major = 9});
		(void)atexit(check_faults);
		ops = *fake_cuda_ops();
		ops.launch = launch;
		ops.host_pointer = host_pointer;
		ops.copy_async = copy;
		ops.copy_rows = copy_rows;
		ops.copy_batch = NULL;
		ops.graph_create = NULL;
	}

	return &ops;
}
