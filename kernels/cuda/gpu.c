/* The device: opened and closed, its kernels and its streams. */
#include "gpu.h"

#include "cuda/driver/context.h"
#include "cuda/driver/image.h"
#include "jobs.h"
#include "cuda/driver/launch.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/stage.h"
#include "cuda/driver/upload.h"

#include <stdio.h>

#define ATTRIBUTE_SMS         16
#define ATTRIBUTE_MAPS_HOST   19
#define ATTRIBUTE_ADDRESSING  41 /* host and devices share one address space */
#define ATTRIBUTE_MAJOR       75
#define ATTRIBUTE_SHARED_MOST 97
#define FUNCTION_SHARED       8
#define BULK_MAJOR            9 /* compute capability that has bulk copies */

/* ---- open ------------------------------------------------------------------------------------ */

static kv_status_t find_device(kvk_gpu_t *gpu, int ordinal)
{
	const int started = gpu->cuda->init(0);
	int count = 0;

	if (started != 0) {
		kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, init), started);
		return KV_ERR_UNSUPPORTED;
	}
	if (KVK_GPU_CALL(gpu, device_count, &count) != KV_OK) {
		return KV_ERR_IO;
	}
	if (ordinal < 0 || ordinal >= count) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "there is no device %d: the driver counts %d", ordinal,
					 count);
	}
	gpu->ordinal = ordinal;
	if (KVK_GPU_CALL(gpu, device_get, &gpu->device, ordinal) != KV_OK ||
	    KVK_GPU_CALL(gpu, device_name, gpu->name, (int)sizeof gpu->name, gpu->device) != KV_OK) {
		return KV_ERR_IO;
	}
	gpu->name[sizeof gpu->name - 1] = '\0';
	kvk_cuda_format_uuid(gpu->cuda, gpu->device, gpu->uuid);

	return KV_OK;
}

/* *p_bulk: can it run the bulk kernels? */
static kv_status_t ask_device(kvk_gpu_t *gpu, int *p_bulk)
{
	static const int attributes[] = {ATTRIBUTE_SMS, ATTRIBUTE_MAPS_HOST, ATTRIBUTE_ADDRESSING, ATTRIBUTE_MAJOR,
					 ATTRIBUTE_SHARED_MOST};
	int values[KV_COUNT_OF(attributes)] = {0};

	for (size_t i = 0; i < KV_COUNT_OF(attributes); i++) {
		if (KVK_GPU_CALL(gpu, device_attribute, &values[i], attributes[i], gpu->device) != KV_OK) {
			return KV_ERR_IO;
		}
	}
	if (values[1] == 0 || values[2] == 0) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "%s cannot use host memory where it lies", gpu->name);
	}
	gpu->sms_all = values[0] > 0 ? (uint32_t)values[0] : 1;
	*p_bulk = values[3] >= BULK_MAJOR && values[4] >= KVK_GPU_SHARED;

	return KV_OK;
}

/* Both or none. */
static void load_bulk(kvk_gpu_t *gpu, const char *const *names)
{
	kvk_cu_function_t *bulk = gpu->bulk;

	for (int i = 0; i < 2; i++) {
		if (KVK_GPU_CALL(gpu, module_function, &bulk[i], gpu->module, names[i]) != KV_OK ||
		    KVK_GPU_CALL(gpu, function_attribute, bulk[i], FUNCTION_SHARED, KVK_GPU_SHARED) != KV_OK) {
			bulk[0] = bulk[1] = NULL;
			return;
		}
	}
}

/* Why there are no kernels; NULL: there are. Not a failure: copies then go piece by piece. */
static const char *load_kernels(kvk_gpu_t *gpu, const void *image, int bulk)
{
	static const char *const plain[2] = {KVK_GPU_GATHER_PLAIN, KVK_GPU_SCATTER_PLAIN};
	static const char *const bulks[2] = {KVK_GPU_GATHER_BULK, KVK_GPU_SCATTER_BULK};

	if (!image) {
		return "this build has no GPU kernels";
	}
	if (KVK_GPU_CALL(gpu, module_load, &gpu->module, image) != KV_OK) {
		gpu->module = NULL;
		return kvk_gpu_last_error();
	}
	for (int i = 0; i < 2; i++) {
		if (KVK_GPU_CALL(gpu, module_function, &gpu->plain[i], gpu->module, plain[i]) != KV_OK) {
			gpu->plain[0] = gpu->plain[1] = NULL;
			return kvk_gpu_last_error();
		}
	}
	if (bulk) {
		load_bulk(gpu, bulks);
	}
	if (KVK_GPU_CALL(gpu, module_function, &gpu->digest_pieces, gpu->module, KVK_GPU_DIGEST_PIECES) != KV_OK) {
		gpu->digest_pieces = NULL; /* kvk_gpu_digest() says so */
	}

	return NULL;
}

static void describe_device(kvk_gpu_t *gpu, const char *lacking)
{
	int version = 0;

	if (gpu->cuda->driver_version(&version) != 0) {
		version = 0;
	}
	if (lacking) {
		snprintf(gpu->description, sizeof gpu->description, "%s, driver %d, piece by piece: %s", gpu->name,
			 version, lacking);
	} else {
		snprintf(gpu->description, sizeof gpu->description, "%s, driver %d, zero copy and staged%s", gpu->name,
			 version, gpu->bulk[0] ? "" : ", without bulk copies");
	}
	kv_logf(gpu->env, lacking ? KV_LOG_WARN : KV_LOG_INFO, "gpu", "device open device %d is %s", gpu->ordinal,
		gpu->description);
}

/* In the context. */
static kv_status_t open_parts(kvk_gpu_t *gpu, const kvk_gpu_config_t *config, int bulk)
{
	const uint32_t jobs = config->jobs ? config->jobs : KVK_GPU_JOBS;
	const char *lacking = load_kernels(gpu, config->image ? config->image : kvk_gpu_image(), bulk);
	kv_status_t status;

	describe_device(gpu, lacking);
	status = kvk_gpu_memory_init(gpu);
	if (status != KV_OK) {
		goto err_module;
	}
	status = kvk_gpu_jobs_init(gpu, jobs < KVK_GPU_MAX_JOBS ? jobs : KVK_GPU_MAX_JOBS);
	if (status != KV_OK) {
		goto err_memory;
	}
	status = KVK_GPU_CALL(gpu, event_create, &gpu->order, KVK_CU_EVENT_NO_TIME);
	if (status != KV_OK) {
		goto err_jobs;
	}
	kvk_gpu_launch_init(gpu);
	kvk_gpu_rings_init(gpu);
	kvk_gpu_device_args_init(gpu);
	pthread_mutex_init(&gpu->lock, NULL);

	return KV_OK;

err_jobs:
	kvk_gpu_jobs_fini(gpu);
err_memory:
	kvk_gpu_memory_fini(gpu);
err_module:
	if (gpu->module) {
		KVK_GPU_CALL(gpu, module_unload, gpu->module);
	}

	return status;
}

kv_status_t kvk_gpu_open(const kvk_gpu_config_t *config, kvk_gpu_t **p_gpu)
{
	const kv_env_t *env = config->env ? config->env : &kv_env_posix;
	kvk_gpu_t *gpu;
	kv_status_t status;
	int bulk = 0;

	if (!config->cuda) {
		return kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "there is no CUDA driver on this machine");
	}
	gpu = kv_alloc(env, sizeof *gpu);
	if (!gpu) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	gpu->cuda = config->cuda;
	gpu->env = env;
	gpu->ring_bytes = config->staging_bytes ? config->staging_bytes : KVK_GPU_RING_BYTES;
	status = find_device(gpu, config->device);
	if (status == KV_OK) {
		status = ask_device(gpu, &bulk);
	}
	if (status != KV_OK) {
		goto err_gpu;
	}
	gpu->sms = config->sms;
	status = KVK_GPU_CALL(gpu, context_retain, &gpu->context, gpu->device);
	if (status != KV_OK) {
		goto err_gpu;
	}
	status = kvk_gpu_enter(gpu);
	if (status != KV_OK) {
		goto err_context;
	}
	status = open_parts(gpu, config, bulk);
	kvk_gpu_leave(gpu);
	if (status != KV_OK) {
		goto err_context;
	}
	*p_gpu = gpu;

	return KV_OK;

err_context:
	KVK_GPU_CALL(gpu, context_release, gpu->device);
err_gpu:
	kv_free(env, gpu);

	return status;
}

static void release_peers(kvk_gpu_t *gpu)
{
	for (int i = 0; i < 64; i++) {
		int device;

		if (gpu->peers >> i & 1 && KVK_GPU_CALL(gpu, device_get, &device, i) == KV_OK) {
			KVK_GPU_CALL(gpu, context_release, device);
		}
	}
}

void kvk_gpu_close(kvk_gpu_t *gpu)
{
	int entered;

	if (!gpu) {
		return;
	}
	/* A driver that refuses this refuses the rest, too: what it holds then goes with the process. */
	entered = kvk_gpu_enter(gpu) == KV_OK;
	kvk_gpu_jobs_fini(gpu);
	kvk_gpu_rings_fini(gpu);
	kvk_gpu_device_args_fini(gpu);
	kvk_gpu_launch_fini(gpu);
	for (uint32_t i = 0; i < gpu->stream_count; i++) {
		KVK_GPU_CALL(gpu, stream_destroy, gpu->streams[i]);
	}
	KVK_GPU_CALL(gpu, event_destroy, gpu->order);
	kvk_gpu_memory_fini(gpu);
	if (gpu->module) {
		KVK_GPU_CALL(gpu, module_unload, gpu->module);
	}
	if (entered) {
		kvk_gpu_leave(gpu);
	}
	release_peers(gpu);
	KVK_GPU_CALL(gpu, context_release, gpu->device);
	pthread_mutex_destroy(&gpu->lock);
	kv_free(gpu->env, gpu);
}

const char *kvk_gpu_describe(const kvk_gpu_t *gpu)
{
	return gpu->description;
}

const char *kvk_gpu_uuid(const kvk_gpu_t *gpu)
{
	return gpu->uuid;
}

/* ---- streams --------------------------------------------------------------------------------- */

kv_status_t kvk_gpu_create_stream(kvk_gpu_t *gpu, int high_priority, kvk_cu_stream_t *p_stream)
{
	kvk_cu_stream_t stream = NULL;
	kv_status_t status = kvk_gpu_enter(gpu);

	if (status != KV_OK) {
		return status;
	}
	pthread_mutex_lock(&gpu->lock);
	if (gpu->stream_count == KVK_GPU_MAX_STREAM) {
		status = kvk_gpu_set_error(KV_ERR_LIMIT, "the device has %u streams for copies: no more are made",
					   KVK_GPU_MAX_STREAM);
	} else {
		status = KVK_GPU_CALL(gpu, stream_create, &stream, KVK_CU_STREAM_OWN,
				      high_priority ? KVK_CU_PRIORITY_HIGH : KVK_CU_PRIORITY_LOW);
	}
	if (status == KV_OK) {
		gpu->streams[gpu->stream_count++] = stream;
		*p_stream = stream;
	}
	pthread_mutex_unlock(&gpu->lock);
	kvk_gpu_leave(gpu);

	return status;
}

kv_status_t kvk_gpu_order_streams(kvk_gpu_t *gpu, kvk_cu_stream_t earlier, kvk_cu_stream_t later)
{
	kv_status_t status = kvk_gpu_enter(gpu);

	if (status != KV_OK) {
		return status;
	}
	/* A wait is for what was recorded last when it was enqueued, so one event serves all. */
	pthread_mutex_lock(&gpu->lock);
	status = KVK_GPU_CALL(gpu, event_record, gpu->order, earlier);
	if (status == KV_OK) {
		status = KVK_GPU_CALL(gpu, stream_wait, later, gpu->order, 0);
	}
	pthread_mutex_unlock(&gpu->lock);
	kvk_gpu_leave(gpu);

	return status;
}

void kvk_gpu_get_stats(const kvk_gpu_t *gpu, kvk_gpu_stats_t *stats)
{
#define KVK_GPU_STAT(name, help) stats->name = atomic_load_explicit(&gpu->counters.name, memory_order_relaxed);
	KVK_GPU_STATS(KVK_GPU_STAT)
#undef KVK_GPU_STAT
}
