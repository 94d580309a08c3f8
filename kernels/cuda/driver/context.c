/* Calls of the driver: the context and capture mode of the calling thread, and the text of the last failure. */
#include "context.h"

#include <stdarg.h>
#include <stdio.h>

static _Thread_local char why[KVK_GPU_ERROR_BYTES];
static _Thread_local int inside;       /* how often this thread has entered */
static _Thread_local int capture_mode; /* its own, while it is inside */

static const char *const symbols[] = {
#define KVK_CUDA_SYMBOL(member, symbol, arguments) #symbol,
	KVK_CUDA_OPS(KVK_CUDA_SYMBOL) KVK_CUDA_OPTIONAL_OPS(KVK_CUDA_SYMBOL)
#undef KVK_CUDA_SYMBOL
};

const char *kvk_gpu_last_error(void)
{
	return why[0] ? why : "nothing has failed on this thread";
}

kv_status_t kvk_gpu_set_error(kv_status_t status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(why, sizeof why, format, args);
	va_end(args);

	return status;
}

void kvk_gpu_add_count(_Atomic uint64_t *counter, uint64_t n)
{
	atomic_fetch_add_explicit(counter, n, memory_order_relaxed);
}

static void name_failure(const kvk_cuda_ops_t *cuda, size_t member, int error)
{
	const char *name = NULL;

	if (cuda->error_name(error, &name) != 0 || !name) {
		name = "an error it has no name for";
	}
	kvk_gpu_set_error(KV_ERR_IO, "%s answered %s (%d)", symbols[member / sizeof(int (*)(void))], name, error);
}

kv_status_t kvk_cuda_check_result(const kvk_cuda_ops_t *cuda, size_t member, int error)
{
	if (error == 0) {
		return KV_OK;
	}
	name_failure(cuda, member, error);

	return error == KVK_CU_OUT_OF_MEMORY ? KV_ERR_NOMEM : KV_ERR_IO;
}

kv_status_t kvk_cuda_require(const kvk_cuda_ops_t *cuda, const size_t *members, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		void *function;

		memcpy(&function, (const uint8_t *)cuda + members[i], sizeof function);
		if (!function) {
			return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "the CUDA driver is too old: it has no %s",
						 symbols[members[i] / sizeof function]);
		}
	}

	return KV_OK;
}

void kvk_cuda_format_uuid(const kvk_cuda_ops_t *cuda, int device, char text[KVK_GPU_UUID_BYTES])
{
	static const size_t dash[] = {4, 6, 8, 10};
	kvk_cu_uuid_t uuid;
	size_t at, group = 0;

	text[0] = '\0';
	if (!cuda->device_uuid || cuda->device_uuid(&uuid, device) != 0) {
		return;
	}
	at = (size_t)snprintf(text, KVK_GPU_UUID_BYTES, "GPU-");
	for (size_t i = 0; i < sizeof uuid.bytes; i++) {
		if (group < KV_COUNT_OF(dash) && i == dash[group]) {
			text[at++] = '-';
			group++;
		}
		at += (size_t)snprintf(text + at, KVK_GPU_UUID_BYTES - at, "%02x", uuid.bytes[i]);
	}
}

kv_status_t kvk_gpu_check_result(kvk_gpu_t *gpu, size_t member, int error)
{
	if (error != 0) {
		kvk_gpu_add_count(&gpu->counters.failures, 1);
	}

	return kvk_cuda_check_result(gpu->cuda, member, error);
}

/* An engine may be capturing a graph on another thread. A query of an event, or pinning memory, would invalidate the
 * capture unless this thread declares its calls independent of it (decision 035). */
kv_status_t kvk_gpu_enter(kvk_gpu_t *gpu)
{
	kv_status_t status = KVK_GPU_CALL(gpu, context_push, gpu->context);
	kvk_cu_context_t popped;
	int mode = KVK_CU_CAPTURE_OWN;

	if (status != KV_OK || inside++ > 0) {
		return status;
	}
	status = KVK_GPU_CALL(gpu, capture_mode, &mode);
	if (status != KV_OK) {
		inside = 0;
		KVK_GPU_CALL(gpu, context_pop, &popped);
		return status;
	}
	capture_mode = mode;

	return KV_OK;
}

void kvk_gpu_leave(kvk_gpu_t *gpu)
{
	kvk_cu_context_t popped;

	/* These fail only where every other call fails, too: there is nothing to undo. */
	if (--inside == 0) {
		KVK_GPU_CALL(gpu, capture_mode, &capture_mode);
	}
	KVK_GPU_CALL(gpu, context_pop, &popped);
}
