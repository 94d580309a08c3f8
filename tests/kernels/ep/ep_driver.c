#include "ep_driver.h"

#include "../fake_cuda_internal.h"

#include "cuda/driver/image.h"
#include "ep/device/args.h"

typedef struct ep_kernel {
	const char *name;
	unsigned shared; /* that it may have */
} ep_kernel_t;

static ep_kernel_t kernels[] = {{KVK_EP_ROUTE, 0}, {KVK_EP_PUSH, 0},   {KVK_EP_WAIT, 0},   {KVK_EP_COUNT, 0},
				{KVK_EP_PLACE, 0}, {KVK_EP_REDUCE, 0}, {KVK_EP_RETURN, 0}, {KVK_EP_SUM, 0},
				{KVK_EP_PULL, 0},  {KVK_EP_FLAG, 0}};
static ep_run_t run_kernel;
static uint64_t launches, copied;
static char trace[256];

int ep_driver_has_kernels;

/* In place of cuda/driver/image.c. */
const void *kvk_gpu_image(void)
{
	return NULL;
}

const void *kvk_ep_image(void)
{
	return ep_driver_has_kernels ? fake_cuda_image() : NULL;
}

static void trace_call(const char *name)
{
	const size_t len = strlen(trace);

	(void)snprintf(trace + len, sizeof trace - len, "%s%s", len ? " " : "", name);
}

const char *ep_driver_trace(void)
{
	static char last[sizeof trace];

	memcpy(last, trace, sizeof trace);
	trace[0] = '\0';

	return last;
}

static ep_kernel_t *kernel_of(kvk_cu_function_t function)
{
	const size_t at = (size_t)((uintptr_t)function - (uintptr_t)kernels) / sizeof *kernels;

	return at < KV_COUNT_OF(kernels) ? &kernels[at] : NULL;
}

static int find_kernel(kvk_cu_function_t *p_function, kvk_cu_module_t module, const char *name)
{
	for (size_t i = 0; i < KV_COUNT_OF(kernels); i++) {
		if (strcmp(kernels[i].name, name) == 0) {
			BEGIN(module_function, NEEDS_CONTEXT)
			*p_function = (kvk_cu_function_t)(void *)&kernels[i];
			return 0;
		}
	}

	return fake_cuda_ops()->module_function(p_function, module, name);
}

static int set_attribute(kvk_cu_function_t function, int attribute, int value)
{
	ep_kernel_t *kernel = kernel_of(function);

	if (!kernel) {
		return fake_cuda_ops()->function_attribute(function, attribute, value);
	}
	BEGIN(function_attribute, NEEDS_CONTEXT)
	kernel->shared = attribute == 8 ? (unsigned)value : kernel->shared;

	return 0;
}

static int launch(kvk_cu_function_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
		  unsigned bz, unsigned shared_bytes, kvk_cu_stream_t stream, void **params, void **extra)
{
	const ep_kernel_t *kernel = kernel_of(function);

	if (!kernel) {
		return fake_cuda_ops()->launch(function, gx, gy, gz, bx, by, bz, shared_bytes, stream, params, extra);
	}
	BEGIN(launch, NEEDS_CONTEXT)
	if (gx == 0 || gy != 1 || gz != 1 || bx == 0 || by != 1 || bz != 1 || extra || shared_bytes > kernel->shared) {
		fake_fault("a kernel of a wrong shape");
		return CU_INVALID;
	}
	launches++;
	trace_call(kernel->name + strlen("kvk_ep_"));
	if (run_kernel) {
		run_kernel(kernel->name, gx, bx, shared_bytes, params[0]);
	}

	return 0;
}

/* Kernels run when they are launched, so copies between memory that they use do, too. Pinned memory of one address space
 * has one address; the fake driver's kernels want that of the device. */
static int copy(kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream)
{
	if (fake_range_of(dst, FAKE_DEVICE) && fake_range_of(src, FAKE_DEVICE)) {
		if (fake_range_of(dst, FAKE_DEVICE) != fake_range_of(dst + bytes - 1, FAKE_DEVICE) ||
		    fake_range_of(src, FAKE_DEVICE) != fake_range_of(src + bytes - 1, FAKE_DEVICE)) {
			fake_fault("a copy that leaves its memory");
			return CU_INVALID;
		}
		BEGIN(copy_async, NEEDS_CONTEXT)
		memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
		copied += bytes;
		trace_call("copy");
		return 0;
	}

	return fake_cuda_ops()->copy_async(fake_range_of(dst, FAKE_PINNED) ? dst | FAKE_TAG : dst, src, bytes, stream);
}

kvk_gpu_t *ep_driver_open(gpu_rig_t *rig, int major, ep_run_t run)
{
	static kvk_cuda_ops_t ops;
	const fake_cuda_config_t config = {.seed = 1, .major = major};

	gpu_rig_init(rig, &config);
	ops = *fake_cuda_ops();
	ops.module_function = find_kernel;
	ops.function_attribute = set_attribute;
	ops.launch = launch;
	ops.copy_async = copy;
	rig->config.cuda = &ops;
	run_kernel = run;
	launches = copied = 0;
	trace[0] = '\0';
	ep_driver_has_kernels = 1;

	return gpu_rig_open(rig);
}

uint64_t ep_driver_launches(void)
{
	return launches;
}

uint64_t ep_driver_copied(void)
{
	return copied;
}
