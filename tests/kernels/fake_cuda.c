/* The driver's calls; what streams do is in fake_stream.c, what kernels do and which memory there is in
 * fake_kernel.c. */
#include "fake_cuda_internal.h"

fake_t fake;
static _Thread_local int depth; /* of contexts */
static _Thread_local int mode;  /* of captures: 0, what threads begin with, is in everybody's way */

/* ---- faults and failures --------------------------------------------------------------------- */

void fake_fault(const char *what)
{
	atomic_fetch_add(&fake.faults, 1);
	printf("# fake device: %s\n", what);
}

int fake_begin(size_t member, int flags)
{
	const uint64_t call = atomic_fetch_add(&fake.call, 1) + 1;
	int error = 0;

	atomic_fetch_add(&fake.calls[member / sizeof(void *)], 1);
	if (flags & NEEDS_CONTEXT && depth == 0) {
		fake_fault("a call out of context");
	}
	if (call - atomic_load(&fake.fail_at) < atomic_load(&fake.fail_count)) {
		atomic_store(&fake.failed, 1);
		fake_cuda_trace("call %zu of the table is refused", member / sizeof(void *));
		error = CU_UNKNOWN;
	}
	if (fake.always_error && fake.always_member == member) {
		error = fake.always_error;
	}
	if (flags & WAITS && fake_check_capture(mode)) {
		error = CU_UNSUPPORTED;
	}

	return error;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int fake_mem_alloc(kvk_cu_ptr_t *p_ptr, size_t bytes)
{
	void *base;

	BEGIN(mem_alloc, NEEDS_CONTEXT | WAITS)
	base = aligned_alloc(256, (bytes + 255) / 256 * 256);
	memset(base, 0xd5, bytes);
	pthread_mutex_lock(&fake.lock);
	fake_range_add(FAKE_DEVICE, base, bytes);
	fake.live.memory++;
	pthread_mutex_unlock(&fake.lock);
	*p_ptr = (kvk_cu_ptr_t)(uintptr_t)base;

	return 0;
}

static int fake_mem_free(kvk_cu_ptr_t ptr)
{
	BEGIN(mem_free, NEEDS_CONTEXT | GIVES_BACK | WAITS)
	pthread_mutex_lock(&fake.lock);
	fake_run_all();
	if (fake_range_drop(FAKE_DEVICE, ptr) == 0) {
		free((void *)(uintptr_t)ptr);
		fake.live.memory--;
	}
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

static int fake_host_alloc(void **p_base, size_t bytes, unsigned flags)
{
	BEGIN(host_alloc, NEEDS_CONTEXT | WAITS)
	if (flags != 3 || (fake.pinned_limit && bytes > fake.pinned_limit)) {
		return CU_NO_MEMORY;
	}
	*p_base = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
	pthread_mutex_lock(&fake.lock);
	fake_range_add(FAKE_PINNED, *p_base, bytes);
	fake.live.pinned++;
	pthread_mutex_unlock(&fake.lock);

	return 0;
}

static int fake_host_free(void *base)
{
	BEGIN(host_free, NEEDS_CONTEXT | GIVES_BACK | WAITS)
	pthread_mutex_lock(&fake.lock);
	fake_run_all();
	if (fake_range_drop(FAKE_PINNED, (uint64_t)(uintptr_t)base) == 0) {
		free(base);
		fake.live.pinned--;
	}
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

static int fake_host_register(void *base, size_t bytes, unsigned flags)
{
	int error;

	BEGIN(host_register, NEEDS_CONTEXT | WAITS)
	if (flags != 3) {
		return CU_INVALID;
	}
	pthread_mutex_lock(&fake.lock);
	error = fake_range_add(FAKE_REGISTERED, base, bytes);
	fake.live.registered++;
	pthread_mutex_unlock(&fake.lock);

	return error;
}

static int fake_host_unregister(void *base)
{
	BEGIN(host_unregister, NEEDS_CONTEXT | GIVES_BACK | WAITS)
	pthread_mutex_lock(&fake.lock);
	if (fake_range_drop(FAKE_REGISTERED, (uint64_t)(uintptr_t)base) == 0) {
		fake.live.registered--;
	}
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

static int fake_host_pointer(kvk_cu_ptr_t *p_ptr, void *base, unsigned flags)
{
	BEGIN(host_pointer, NEEDS_CONTEXT)
	(void)flags;
	*p_ptr = (uint64_t)(uintptr_t)base | FAKE_TAG;

	return 0;
}

static int fake_pointer_attribute(void *p_value, int attribute, kvk_cu_ptr_t ptr)
{
	int error = 0;

	BEGIN(pointer_attribute, NEEDS_CONTEXT)
	pthread_mutex_lock(&fake.lock);

	const fake_range_t *own = fake_range_of(ptr, FAKE_DEVICE);
	const fake_range_t *device = own ? own : fake_range_of(ptr, FAKE_MAPPED);
	const fake_range_t *host = fake_range_of(ptr, FAKE_PINNED);

	if (!device && !host) {
		error = CU_INVALID;
	} else if (attribute == 2) {
		*(unsigned *)p_value = device ? 2 : 1;
	} else if (attribute == 9) {
		*(int *)p_value = fake.foreign ? 1 : 0;
	} else if (attribute == 11) {
		*(kvk_cu_ptr_t *)p_value = host ? host->base : device->base;
	} else {
		*(kvk_cu_ptr_t *)p_value = host ? ptr | FAKE_TAG : ptr;
	}
	pthread_mutex_unlock(&fake.lock);

	return error;
}

/* ---- devices, contexts, kernels -------------------------------------------------------------- */

static int fake_init(unsigned flags)
{
	BEGIN(init, 0)
	return flags == 0 ? 0 : CU_INVALID;
}

static int fake_driver_version(int *p_version)
{
	BEGIN(driver_version, 0)
	*p_version = 13000;
	return 0;
}

static int fake_device_count(int *p_count)
{
	BEGIN(device_count, 0)
	*p_count = fake.config.devices;
	return 0;
}

static int fake_device_get(int *p_device, int ordinal)
{
	BEGIN(device_get, 0)
	*p_device = FAKE_DEVICE_HANDLE + ordinal;
	return 0;
}

static int fake_device_name(char *name, int cap, int device)
{
	BEGIN(device_name, 0)
	snprintf(name, (size_t)cap, "Fake %d", device - FAKE_DEVICE_HANDLE);
	return 0;
}

static int fake_device_uuid(kvk_cu_uuid_t *p_uuid, int device)
{
	BEGIN(device_uuid, 0)
	for (size_t i = 0; i < sizeof p_uuid->bytes; i++) {
		p_uuid->bytes[i] = (unsigned char)(i * 17 + (size_t)(device - FAKE_DEVICE_HANDLE));
	}

	return 0;
}

static int fake_mem_info(size_t *p_free, size_t *p_bytes)
{
	BEGIN(mem_info, NEEDS_CONTEXT)
	*p_free = (size_t)70 << 30;
	*p_bytes = (size_t)80 << 30;

	return 0;
}

static int fake_device_attribute(int *p_value, int attribute, int device)
{
	BEGIN(device_attribute, 0)
	(void)device;
	switch (attribute) {
	case 16:
		*p_value = FAKE_SMS;
		break;
	case 75:
		*p_value = fake.config.major;
		break;
	case 97:
		*p_value = fake.config.major >= 9 ? 227 << 10 : 163 << 10;
		break;
	default:
		*p_value = 1;
	}

	return 0;
}

static int fake_context_retain(kvk_cu_context_t *p_context, int device)
{
	BEGIN(context_retain, 0)
	*p_context = (kvk_cu_context_t)(uintptr_t)(unsigned)(0x1000 + device);
	pthread_mutex_lock(&fake.lock);
	fake.live.contexts++;
	pthread_mutex_unlock(&fake.lock);

	return 0;
}

static int fake_context_release(int device)
{
	BEGIN(context_release, GIVES_BACK)
	(void)device;
	pthread_mutex_lock(&fake.lock);
	fake.live.contexts--;
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

static int fake_context_push(kvk_cu_context_t context)
{
	BEGIN(context_push, 0)
	if ((uintptr_t)context - 0x1000 - FAKE_DEVICE_HANDLE >= (uintptr_t)fake.config.devices) {
		fake_fault("not a context");
	}
	depth++;

	return 0;
}

static int fake_context_pop(kvk_cu_context_t *p_context)
{
	BEGIN(context_pop, NEEDS_CONTEXT | GIVES_BACK)
	*p_context = (kvk_cu_context_t)(uintptr_t)(0x1000 + FAKE_DEVICE_HANDLE);
	depth--;

	return failing;
}

/* Taken (2) or given back. Not counted: it comes with every call, and says no to all or none. */
static int fake_capture_mode(int *p_mode)
{
	const size_t member = offsetof(kvk_cuda_ops_t, capture_mode);
	const int before = mode;

	if (depth == 0 || *p_mode < 0 || *p_mode > 2) {
		fake_fault("a capture mode that is none, or out of context");
	}
	if (*p_mode == 2 && fake.always_error && fake.always_member == member) {
		return fake.always_error;
	}
	mode = *p_mode;
	*p_mode = before;

	return 0;
}

static int fake_peer_can(int *p_can, int device, int peer)
{
	BEGIN(peer_can, 0)
	*p_can = device != peer && !fake.unlinked;
	return 0;
}

static int fake_peer_enable(kvk_cu_context_t peer, unsigned flags)
{
	BEGIN(peer_enable, NEEDS_CONTEXT)
	(void)peer;
	return flags == 0 ? 0 : CU_INVALID;
}

static int fake_module_load(kvk_cu_module_t *p_module, const void *image)
{
	BEGIN(module_load, NEEDS_CONTEXT)
	if (image != fake_cuda_image()) {
		return CU_NO_IMAGE;
	}
	*p_module = (kvk_cu_module_t)(uintptr_t)0x2000;
	fake.live.modules++;

	return 0;
}

static int fake_module_unload(kvk_cu_module_t module)
{
	BEGIN(module_unload, NEEDS_CONTEXT | GIVES_BACK)
	(void)module;
	fake.live.modules--;

	return failing;
}

static int fake_module_function(kvk_cu_function_t *p_function, kvk_cu_module_t module, const char *name)
{
	BEGIN(module_function, NEEDS_CONTEXT)
	(void)module;
	for (size_t i = 0; i < KV_COUNT_OF(fake_kernels); i++) {
		if (strcmp(fake_kernels[i], name) == 0) {
			*p_function = (kvk_cu_function_t)(void *)&fake.functions[i];
			return 0;
		}
	}

	return CU_NOT_FOUND;
}

static int fake_function_attribute(kvk_cu_function_t function, int attribute, int value)
{
	BEGIN(function_attribute, NEEDS_CONTEXT)
	if (attribute == 8) {
		((fake_function_t *)(void *)function)->shared = value;
	}

	return 0;
}

/* ---- streams and events ---------------------------------------------------------------------- */

static int fake_copy_async(kvk_cu_ptr_t dst, kvk_cu_ptr_t src, size_t bytes, kvk_cu_stream_t stream)
{
	fake_work_t *work;

	BEGIN(copy_async, NEEDS_CONTEXT)
	work = fake_work(FAKE_COPY);
	work->piece = (fake_piece_t){dst, src, bytes};
	fake_enqueue(stream, work);

	return 0;
}

/* Copies of a batch have no order among themselves: a draw. */
static int fake_copy_batch(kvk_cu_ptr_t *dst, kvk_cu_ptr_t *src, size_t *bytes, size_t count, kvk_cu_copy_kind_t *kinds,
			   size_t *first, size_t kind_count, kvk_cu_stream_t stream)
{
	fake_work_t *work;

	BEGIN(copy_batch, NEEDS_CONTEXT)
	if (!stream || count == 0 || kind_count != 1 || first[0] != 0 || kinds[0].order != KVK_CU_COPY_IN_ORDER) {
		fake_fault("a batch that is none");
		return CU_INVALID;
	}
	work = fake_work(FAKE_BATCH);
	work->count = count;
	work->pieces = calloc(count, sizeof *work->pieces);
	for (size_t i = 0; i < count; i++) {
		work->pieces[i] = (fake_piece_t){dst[i], src[i], bytes[i]};
	}
	fake_enqueue(stream, work);

	return 0;
}

/* Rows are pieces of a batch. */
static int fake_copy_rows(const kvk_cu_rows_t *rows, kvk_cu_stream_t stream)
{
	fake_work_t *work;

	BEGIN(copy_rows, NEEDS_CONTEXT)
	if (!stream || rows->width == 0 || rows->height == 0 || rows->from.type != KVK_CU_SIDE_ANY ||
	    rows->to.type != KVK_CU_SIDE_ANY || rows->from.pitch < rows->width || rows->to.pitch < rows->width) {
		fake_fault("rows that are none");
		return CU_INVALID;
	}
	work = fake_work(FAKE_BATCH);
	work->count = rows->height;
	work->pieces = calloc(rows->height, sizeof *work->pieces);
	for (size_t i = 0; i < rows->height; i++) {
		work->pieces[i] = (fake_piece_t){rows->to.at + i * rows->to.pitch, rows->from.at + i * rows->from.pitch,
						 rows->width};
	}
	fake_enqueue(stream, work);

	return 0;
}

static int fake_stream_create(kvk_cu_stream_t *p_stream, unsigned flags, int priority)
{
	BEGIN(stream_create, NEEDS_CONTEXT)
	(void)priority;
	if (flags != 1) {
		fake_fault("a stream that waits for the default stream");
	}
	*p_stream = fake_stream_new();

	return *p_stream ? 0 : CU_NO_MEMORY;
}

static int fake_stream_destroy(kvk_cu_stream_t stream)
{
	BEGIN(stream_destroy, NEEDS_CONTEXT | GIVES_BACK)
	fake_stream_drop(stream);

	return failing;
}

static int fake_event_create(kvk_cu_event_t *p_event, unsigned flags)
{
	BEGIN(event_create, NEEDS_CONTEXT)
	if (flags != 2 && flags != 0) {
		fake_fault("an event of an unknown kind");
	}
	pthread_mutex_lock(&fake.lock);
	*p_event = calloc(1, sizeof(fake_event_t));
	((fake_event_t *)(void *)*p_event)->timed = flags == 0;
	fake.live.events++;
	pthread_mutex_unlock(&fake.lock);

	return 0;
}

static int fake_event_destroy(kvk_cu_event_t event)
{
	BEGIN(event_destroy, NEEDS_CONTEXT | GIVES_BACK)
	pthread_mutex_lock(&fake.lock);
	fake_forget((fake_event_t *)(void *)event);
	fake.live.events--;
	pthread_mutex_unlock(&fake.lock);

	return failing;
}

static int fake_stream_capturing(kvk_cu_stream_t stream, int *p_status)
{
	BEGIN(stream_capturing, NEEDS_CONTEXT)
	*p_status = fake_is_capturing(stream);

	return 0;
}

static int fake_stream_wait(kvk_cu_stream_t stream, kvk_cu_event_t event, unsigned flags)
{
	BEGIN(stream_wait, NEEDS_CONTEXT)
	if (flags != 0) {
		fake_fault("a wait of an unknown kind");
	}

	return fake_wait(stream, (fake_event_t *)(void *)event);
}

static int fake_event_record(kvk_cu_event_t event, kvk_cu_stream_t stream)
{
	BEGIN(event_record, NEEDS_CONTEXT)
	return fake_record(stream, (fake_event_t *)(void *)event);
}

/* One recorded in a capture has not happened: only the graph's launches do. */
static int in_capture(kvk_cu_event_t event)
{
	int captured;

	pthread_mutex_lock(&fake.lock); /* another thread may be recording it again */
	captured = ((fake_event_t *)(void *)event)->capture != 0;
	pthread_mutex_unlock(&fake.lock);
	if (captured) {
		fake_invalidate("an event of a capture is asked about");
		return CU_CAPTURED_EVENT;
	}

	return 0;
}

static int fake_event_query(kvk_cu_event_t event)
{
	BEGIN(event_query, NEEDS_CONTEXT | WAITS)
	if (in_capture(event)) {
		return CU_CAPTURED_EVENT;
	}

	return fake_look((fake_event_t *)(void *)event, 0) ? 0 : KVK_CU_NOT_READY;
}

static int fake_event_wait(kvk_cu_event_t event)
{
	BEGIN(event_wait, NEEDS_CONTEXT | GIVES_BACK | WAITS)
	if (in_capture(event)) {
		return CU_CAPTURED_EVENT;
	}
	if (!fake_look((fake_event_t *)(void *)event, 1)) {
		fake_fault("a wait that does not end");
	}

	return failing;
}

static int fake_event_elapsed(float *p_ms, kvk_cu_event_t start, kvk_cu_event_t end)
{
	const fake_event_t *from = (const fake_event_t *)(const void *)start;
	const fake_event_t *to = (const fake_event_t *)(const void *)end;
	int error = 0;

	BEGIN(event_elapsed, NEEDS_CONTEXT)
	(void)fake_look((fake_event_t *)(void *)end, 0);
	pthread_mutex_lock(&fake.lock);
	if (!from->timed || !to->timed || !from->latest || !to->latest) {
		fake_fault("the time between events that do not have it");
		error = CU_INVALID;
	} else if (!from->latest->done || !to->latest->done) {
		error = KVK_CU_NOT_READY;
	} else {
		*p_ms = (float)(((double)to->latest->at - (double)from->latest->at) / 1e6);
	}
	pthread_mutex_unlock(&fake.lock);

	return error;
}

static int fake_error_name(int error, const char **p_name)
{
	*p_name = error == CU_NO_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_UNKNOWN";

	return 0;
}

const kvk_cuda_ops_t *fake_cuda_ops(void)
{
	static const kvk_cuda_ops_t ops = {
#define FAKE_OP(member, symbol, arguments) .member = fake_##member,
		KVK_CUDA_OPS(FAKE_OP) KVK_CUDA_OPTIONAL_OPS(FAKE_OP)
#undef FAKE_OP
	};

	return &ops;
}
