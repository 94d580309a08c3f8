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
/* A stream that has waited for the caller's: its copies happen as late as they may, when the caller's waits for them. */
typedef struct side {
	kvk_cu_stream_t stream;
	uint64_t after; /* kernels that were launched before the copies may begin */
	uint32_t run, count;
	struct {
		kvk_cu_ptr_t dst, src;
		size_t bytes;
	} copies[64];
} side_t;

/* The last record of an event. */
typedef struct mark {
	kvk_cu_event_t event;
	side_t *side;   /* NULL: the caller's stream */
	int compute;    /* of the stream of compute */
	uint64_t after; /* kernels that were launched before, and copies of the side */
} mark_t;

static side_t sides[16];
static mark_t marks[16];
static kvk_cu_stream_t compute; /* its kernels run at once, as those of the caller's stream do */
static uint64_t last_wait;      /* the number of the last kernel that waits */
static ep_run_t run_kernel;
static uint64_t launches, copied;
static char trace[256];

int ep_driver_has_kernels;
void (*ep_driver_before_copy)(void);

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

void ep_driver_compute(kvk_cu_stream_t stream)
{
	compute = stream;
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
	if (strcmp(kernel->name, KVK_EP_WAIT) == 0) {
		last_wait = launches;
	}
	trace_call(kernel->name + strlen("kvk_ep_"));
	if (run_kernel) {
		run_kernel(kernel->name, gx, bx, shared_bytes, params[0]);
	}

	return 0;
}

static side_t *side_of(kvk_cu_stream_t stream)
{
	for (size_t i = 0; i < KV_COUNT_OF(sides) && stream; i++) {
		if (sides[i].stream == stream) {
			return &sides[i];
		}
	}

	return NULL;
}

static mark_t *mark_of(kvk_cu_event_t event)
{
	size_t i = 0;

	while (marks[i].event && marks[i].event != event) {
		i++;
		assert_true(i < KV_COUNT_OF(marks));
	}
	marks[i].event = event;

	return &marks[i];
}

static int record(kvk_cu_event_t event, kvk_cu_stream_t stream)
{
	side_t *side = side_of(stream);
	mark_t *mark;

	if (stream && !side && stream != compute) {
		return fake_cuda_ops()->event_record(event, stream);
	}
	BEGIN(event_record, NEEDS_CONTEXT)
	mark = mark_of(event);
	mark->side = side;
	mark->compute = stream && stream == compute;
	mark->after = side ? side->count : launches;

	return 0;
}

static int wait_for(kvk_cu_stream_t stream, kvk_cu_event_t event, unsigned flags)
{
	const mark_t *mark = mark_of(event);
	side_t *side = side_of(stream);

	BEGIN(stream_wait, NEEDS_CONTEXT)
	if (flags == 0 && (mark->compute || (compute && stream == compute))) {
		trace_call(mark->compute ? "behind compute" : "compute behind");
		return 0;
	}
	if (flags != 0 || !stream == !mark->side) {
		fake_fault("a wait of a stream for itself, or of an unknown kind");
		return CU_INVALID;
	}
	for (size_t i = 0; i < KV_COUNT_OF(sides) && stream && !side; i++) {
		side = sides[i].stream ? NULL : &sides[i];
	}
	trace_call(stream ? "fork" : "join");
	if (stream) {
		assert_non_null(side);
		side->stream = stream;
		side->after = mark->after;
		return 0;
	}
	for (side = mark->side; side->run < mark->after; side->run++) {
		memcpy((void *)(uintptr_t)side->copies[side->run].dst,
		       (const void *)(uintptr_t)side->copies[side->run].src, side->copies[side->run].bytes);
	}
	if (side->run == side->count) {
		side->run = side->count = 0;
	}

	return 0;
}

static int destroy(kvk_cu_stream_t stream)
{
	side_t *side = side_of(stream);

	if (side) {
		assert_int_equal(side->run, side->count); /* all that it copies is waited for */
		side->stream = NULL;
	}

	return fake_cuda_ops()->stream_destroy(stream);
}

static void copy_late(side_t *side, kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes)
{
	if (side->after < last_wait) {
		fake_fault("a copy of what need not have come");
	}
	assert_true(side->count < KV_COUNT_OF(side->copies));
	side->copies[side->count].dst = dst;
	side->copies[side->count].src = src;
	side->copies[side->count++].bytes = bytes;
}

/* Kernels run when they are launched, so copies between memory that they use do, too. Pinned memory of one address space
 * has one address; the fake driver's kernels want that of the device. */
static int copy(kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream)
{
	side_t *side = side_of(stream);

	if (fake_range_of(dst, FAKE_DEVICE) && fake_range_of(src, FAKE_DEVICE)) {
		if (fake_range_of(dst, FAKE_DEVICE) != fake_range_of(dst + bytes - 1, FAKE_DEVICE) ||
		    fake_range_of(src, FAKE_DEVICE) != fake_range_of(src + bytes - 1, FAKE_DEVICE)) {
			fake_fault("a copy that leaves its memory");
			return CU_INVALID;
		}
		BEGIN(copy_async, NEEDS_CONTEXT)
		if (ep_driver_before_copy) {
			ep_driver_before_copy();
		}
		if (side) {
			copy_late(side, dst, src, bytes);
		} else {
			memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
		}
		copied += bytes;
		trace_call(side ? "+copy" : "copy");
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
	ops.event_record = record;
	ops.stream_wait = wait_for;
	ops.stream_destroy = destroy;
	memset(sides, 0, sizeof sides);
	compute = NULL;
	memset(marks, 0, sizeof marks);
	last_wait = 0;
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
