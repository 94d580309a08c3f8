/* Which memory the device sees, and at what address; the pinned memory that arguments of jobs lie in. */
#include "memory.h"

#include "context.h"

#define POINTER_MEMORY_TYPE 2
#define POINTER_DEVICE      3 /* the address a kernel of this context uses */
#define POINTER_ORDINAL     9
#define POINTER_START       11 /* of the piece of memory it is in */
#define MEMORY_TYPE_HOST    1

#define OF(member) offsetof(kvk_cuda_ops_t, member)

/* ---- memory apart from its addresses --------------------------------------------------------- */

kv_status_t kvk_cuda_check_vmm(const kvk_cuda_ops_t *cuda)
{
	static const size_t members[] = {OF(mem_reserve), OF(mem_unreserve), OF(mem_map),    OF(mem_unmap),
					 OF(mem_access),  OF(mem_import),    OF(mem_release)};

	return kvk_cuda_require(cuda, members, KV_COUNT_OF(members));
}

kv_status_t kvk_cuda_map(const kvk_cuda_ops_t *cuda, kvk_cu_memory_t memory, size_t bytes, int ordinal,
			 kvk_cu_ptr_t *p_at)
{
	/* The device that uses the memory, which need not be the one that it lies in. */
	const kvk_cu_access_t access = {.location = {.type = KVK_CU_LOCATION_DEVICE, .id = ordinal},
					.flags = KVK_CU_ACCESS_READ_WRITE};
	kvk_cu_ptr_t at = 0;
	kv_status_t status = KVK_CUDA_CALL(cuda, mem_reserve, &at, bytes, 0, 0, 0);

	if (status != KV_OK) {
		return status;
	}
	status = KVK_CUDA_CALL(cuda, mem_map, at, bytes, 0, memory, 0);
	if (status != KV_OK) {
		goto err_address;
	}
	status = KVK_CUDA_CALL(cuda, mem_access, at, bytes, &access, 1);
	if (status != KV_OK) {
		goto err_mapping;
	}
	*p_at = at;

	return KV_OK;

err_mapping:
	cuda->mem_unmap(at, bytes);
err_address:
	cuda->mem_unreserve(at, bytes);

	return status;
}

kv_status_t kvk_cuda_unmap(const kvk_cuda_ops_t *cuda, kvk_cu_ptr_t at, size_t bytes)
{
	const kv_status_t status = KVK_CUDA_CALL(cuda, mem_unmap, at, bytes);

	/* An address whose memory is still mapped is refused here, too, and stays reserved. */
	return KVK_CUDA_CALL(cuda, mem_unreserve, at, bytes) == KV_OK ? status : KV_ERR_IO;
}

/* ---- the table of ranges --------------------------------------------------------------------- */

/* Copy of one range; the fields belong together only if the table's version says so afterwards. */
typedef struct range {
	uint64_t base, end, device;
	uint64_t kind; /* kvk_gpu_mem_kind_t: HOST: registered; NEAR: mapped */
} range_t;

static range_t range_at(const kvk_gpu_table_t *table, uint32_t i)
{
	const kvk_gpu_range_t *r = &table->ranges[i];

	/* Acquire, so that the version is looked at again after them. */
	return (range_t){.base = atomic_load_explicit(&r->base, memory_order_acquire),
			 .end = atomic_load_explicit(&r->end, memory_order_acquire),
			 .device = atomic_load_explicit(&r->device, memory_order_acquire),
			 .kind = atomic_load_explicit(&r->kind, memory_order_acquire)};
}

/* The first range whose end is above `at`. */
static uint32_t first_above(const kvk_gpu_table_t *table, uint32_t count, uint64_t at)
{
	uint32_t low = 0;
	uint32_t high = count;

	while (low < high) {
		const uint32_t middle = low + (high - low) / 2;

		if (range_at(table, middle).end > at) {
			high = middle;
		} else {
			low = middle + 1;
		}
	}

	return low;
}

/* 1: the whole of [at, end) is in one range, *p_found; 0: not; -1: the table was being written. */
static int search_table(const kvk_gpu_table_t *table, uint64_t at, uint64_t end, range_t *p_found)
{
	const uint32_t version = atomic_load_explicit(&table->version, memory_order_acquire);
	const uint32_t count = atomic_load_explicit(&table->count, memory_order_acquire);
	const uint32_t i = first_above(table, count, at);
	range_t found = {0};

	if (i < count) {
		found = range_at(table, i);
	}
	if (version % 2 != 0 || atomic_load_explicit(&table->version, memory_order_relaxed) != version) {
		return -1;
	}
	*p_found = found;

	return i < count && found.base <= at && end <= found.end;
}

/* A writer fills the table that is not current, so a reader looks again only when two writers came by while it
 * looked. */
static int find_range(const kvk_gpu_t *gpu, const void *at, size_t bytes, range_t *p_found)
{
	const uint64_t first = (uint64_t)(uintptr_t)at;
	uint64_t end;
	int seen = -1;

	if (__builtin_add_overflow(first, (uint64_t)bytes, &end)) {
		return 0;
	}
	while (seen < 0) {
		const unsigned current = atomic_load_explicit(&gpu->current, memory_order_acquire);

		seen = search_table(&gpu->tables[current], first, end, p_found);
	}

	return seen;
}

static void store_range(kvk_gpu_table_t *table, uint32_t i, range_t r)
{
	/* Release, so that they come after the odd version. */
	atomic_store_explicit(&table->ranges[i].base, r.base, memory_order_release);
	atomic_store_explicit(&table->ranges[i].end, r.end, memory_order_release);
	atomic_store_explicit(&table->ranges[i].device, r.device, memory_order_release);
	atomic_store_explicit(&table->ranges[i].kind, r.kind, memory_order_release);
}

/* Make a table without range `without` (UINT32_MAX: with all) and with `added` (NULL: none) current. Under
 * ranges_lock. */
static void rewrite_table(kvk_gpu_t *gpu, uint32_t without, const range_t *added)
{
	const unsigned current = atomic_load_explicit(&gpu->current, memory_order_relaxed);
	const kvk_gpu_table_t *from = &gpu->tables[current];
	kvk_gpu_table_t *to = &gpu->tables[1 - current];
	const uint32_t count = atomic_load_explicit(&from->count, memory_order_relaxed);
	const uint32_t version = atomic_load_explicit(&to->version, memory_order_relaxed);
	uint32_t n = 0;

	atomic_store_explicit(&to->version, version + 1, memory_order_relaxed);
	for (uint32_t i = 0; i < count; i++) {
		const range_t r = range_at(from, i);

		if (added && added->base < r.base) {
			store_range(to, n++, *added);
			added = NULL;
		}
		if (i != without) {
			store_range(to, n++, r);
		}
	}
	if (added) {
		store_range(to, n++, *added);
	}
	atomic_store_explicit(&to->count, n, memory_order_release);
	atomic_store_explicit(&to->version, version + 2, memory_order_release);
	atomic_store_explicit(&gpu->current, 1 - current, memory_order_release);
}

/* ---- registering and mapping ----------------------------------------------------------------- */

/* Is there room for this range? Under ranges_lock. */
static kv_status_t check_range(const kvk_gpu_t *gpu, const range_t *r)
{
	const kvk_gpu_table_t *table = &gpu->tables[atomic_load(&gpu->current)];
	const uint32_t count = atomic_load(&table->count);
	const uint32_t after = first_above(table, count, r->base);

	if (after < count && range_at(table, after).base < r->end) {
		return kvk_gpu_set_error(KV_ERR_ARG, "the memory overlaps some that is registered");
	}
	if (count == KVK_GPU_MAX_RANGES) {
		return kvk_gpu_set_error(KV_ERR_LIMIT, "%u ranges are registered: no more are", KVK_GPU_MAX_RANGES);
	}

	return KV_OK;
}

/* What has to be undone for a range that is no longer in the table. In the context. */
static void undo_range(kvk_gpu_t *gpu, const range_t *r)
{
	if (r->kind == KVK_GPU_MEM_HOST) {
		KVK_GPU_CALL(gpu, host_unregister, (void *)(uintptr_t)r->base);
	} else {
		if (kvk_cuda_unmap(gpu->cuda, r->device, r->end - r->base) != KV_OK) {
			kvk_gpu_add_count(&gpu->counters.failures, 1);
		}
	}
}

static _Atomic uint64_t *range_counter(kvk_gpu_t *gpu, const range_t *r)
{
	return r->kind == KVK_GPU_MEM_HOST ? &gpu->counters.registered_bytes : &gpu->counters.mapped_bytes;
}

/* Take the range of this kind that begins here out of the table, and undo it. */
static void drop_range(kvk_gpu_t *gpu, const void *base, kvk_gpu_mem_kind_t kind)
{
	const uint64_t at = (uint64_t)(uintptr_t)base;
	const int entered = kvk_gpu_enter(gpu) == KV_OK;
	range_t r = {0};

	pthread_mutex_lock(&gpu->ranges_lock);

	const kvk_gpu_table_t *table = &gpu->tables[atomic_load(&gpu->current)];
	const uint32_t i = first_above(table, atomic_load(&table->count), at);

	if (i < atomic_load(&table->count)) {
		r = range_at(table, i);
	}
	if (base && r.base == at && r.kind == (uint64_t)kind) {
		/* First out of sight, then away. */
		rewrite_table(gpu, i, NULL);
		undo_range(gpu, &r);
		atomic_fetch_sub_explicit(range_counter(gpu, &r), r.end - r.base, memory_order_relaxed);
	}
	pthread_mutex_unlock(&gpu->ranges_lock);
	if (entered) {
		kvk_gpu_leave(gpu);
	}
}

/* In the context, under ranges_lock. */
static kv_status_t register_range(kvk_gpu_t *gpu, void *base, size_t bytes)
{
	range_t r = {
		.base = (uint64_t)(uintptr_t)base, .end = (uint64_t)(uintptr_t)base + bytes, .kind = KVK_GPU_MEM_HOST};
	kv_status_t status = check_range(gpu, &r);
	int error;

	if (status != KV_OK) {
		return status;
	}
	error = gpu->cuda->host_register(base, bytes, KVK_CU_HOST_MAPPED);
	status = kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, host_register), error);
	if (error == KVK_CU_OUT_OF_MEMORY || error == KVK_CU_OS_ERROR || error == KVK_CU_NOT_PERMITTED) {
		return KV_ERR_LIMIT;
	}
	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(gpu, host_pointer, &r.device, base, 0);
	if (status != KV_OK) {
		gpu->cuda->host_unregister(base);
		return status;
	}
	rewrite_table(gpu, UINT32_MAX, &r);
	kvk_gpu_add_count(range_counter(gpu, &r), bytes);

	return KV_OK;
}

kv_status_t kvk_gpu_register(kvk_gpu_t *gpu, void *base, size_t bytes)
{
	uint64_t end;
	kv_status_t status;

	if (!base || bytes == 0 || __builtin_add_overflow((uint64_t)(uintptr_t)base, (uint64_t)bytes, &end)) {
		return kvk_gpu_set_error(KV_ERR_ARG, "there is no memory to register");
	}
	status = kvk_gpu_enter(gpu);
	if (status != KV_OK) {
		return status;
	}
	pthread_mutex_lock(&gpu->ranges_lock);
	status = register_range(gpu, base, bytes);
	pthread_mutex_unlock(&gpu->ranges_lock);
	kvk_gpu_leave(gpu);

	return status;
}

void kvk_gpu_unregister(kvk_gpu_t *gpu, void *base)
{
	drop_range(gpu, base, KVK_GPU_MEM_HOST);
}

/* In the context. The mapping alone keeps the memory: a handle that stays would keep it after the mapping, too. */
static kv_status_t import_memory(const kvk_gpu_t *gpu, int fd, size_t bytes, kvk_cu_ptr_t *p_at)
{
	kvk_cu_memory_t memory = 0;
	kvk_cu_ptr_t at = 0;
	kv_status_t status =
		KVK_CUDA_CALL(gpu->cuda, mem_import, &memory, (void *)(uintptr_t)(unsigned)fd, KVK_CU_HANDLE_FD);

	if (status != KV_OK) {
		return status;
	}
	status = kvk_cuda_map(gpu->cuda, memory, bytes, gpu->ordinal, &at);
	if (KVK_CUDA_CALL(gpu->cuda, mem_release, memory) != KV_OK && status == KV_OK) {
		(void)kvk_cuda_unmap(gpu->cuda, at, bytes);
		status = KV_ERR_IO;
	}
	if (status == KV_OK) {
		*p_at = at;
	}

	return status;
}

/* In the context. */
static kv_status_t map_range(kvk_gpu_t *gpu, int fd, size_t bytes, void **p_base)
{
	kvk_cu_ptr_t at = 0;
	kv_status_t status = import_memory(gpu, fd, bytes, &at);

	if (status != KV_OK) {
		kvk_gpu_add_count(&gpu->counters.failures, 1);
		return status;
	}

	const range_t r = {.base = at, .end = at + bytes, .device = at, .kind = KVK_GPU_MEM_NEAR};

	pthread_mutex_lock(&gpu->ranges_lock);
	status = check_range(gpu, &r);
	if (status == KV_OK) {
		rewrite_table(gpu, UINT32_MAX, &r);
		kvk_gpu_add_count(range_counter(gpu, &r), bytes);
	}
	pthread_mutex_unlock(&gpu->ranges_lock);
	if (status != KV_OK) {
		undo_range(gpu, &r);
		return status;
	}
	*p_base = (void *)(uintptr_t)at;

	return KV_OK;
}

kv_status_t kvk_gpu_map(kvk_gpu_t *gpu, int fd, size_t bytes, void **p_base)
{
	kv_status_t status;

	if (fd < 0 || bytes == 0) {
		return kvk_gpu_set_error(KV_ERR_ARG, "there is no memory to map");
	}
	status = kvk_cuda_check_vmm(gpu->cuda);
	if (status == KV_OK) {
		status = kvk_gpu_enter(gpu);
	}
	if (status != KV_OK) {
		return status;
	}
	status = map_range(gpu, fd, bytes, p_base);
	kvk_gpu_leave(gpu);

	return status;
}

void kvk_gpu_unmap(kvk_gpu_t *gpu, void *base)
{
	drop_range(gpu, base, KVK_GPU_MEM_NEAR);
}

int kvk_gpu_is_registered(const kvk_gpu_t *gpu, const void *at, size_t bytes)
{
	range_t r;

	return find_range(gpu, at, bytes, &r);
}

kv_status_t kvk_gpu_address(kvk_gpu_t *gpu, const void *at, size_t bytes, kvk_cu_ptr_t *p_address)
{
	range_t r;

	if (!find_range(gpu, at, bytes, &r)) {
		return kvk_gpu_set_error(KV_ERR_ARG, "the memory at %p is not registered", at);
	}
	*p_address = r.device + ((uint64_t)(uintptr_t)at - r.base);

	return KV_OK;
}

/* ---- memory the driver knows ----------------------------------------------------------------- */

static int enable_peer(kvk_gpu_t *gpu, int ordinal)
{
	kvk_cu_context_t context;
	int device, can, error;

	if (KVK_GPU_CALL(gpu, device_get, &device, ordinal) != KV_OK ||
	    KVK_GPU_CALL(gpu, peer_can, &can, gpu->device, device) != KV_OK) {
		return 0;
	}
	if (!can) {
		kvk_gpu_set_error(KV_ERR_UNSUPPORTED, "the devices are not linked");
		return 0;
	}
	if (KVK_GPU_CALL(gpu, context_retain, &context, device) != KV_OK) {
		return 0;
	}
	error = gpu->cuda->peer_enable(context, 0);
	if (error != 0 && error != KVK_CU_PEER_ON) {
		kvk_gpu_check_result(gpu, offsetof(kvk_cuda_ops_t, peer_enable), error);
		KVK_GPU_CALL(gpu, context_release, device);
		return 0;
	}

	return 1;
}

/* May kernels of this device use memory of that one? Asked and said once. Under the lock. */
static int reach_peer(kvk_gpu_t *gpu, int ordinal)
{
	if (ordinal == gpu->ordinal) {
		return 1;
	}
	if (ordinal < 0 || ordinal >= 64) {
		return 0;
	}
	if ((gpu->peers | gpu->far) >> ordinal & 1) {
		return gpu->peers >> ordinal & 1;
	}
	if (enable_peer(gpu, ordinal)) {
		gpu->peers |= UINT64_C(1) << ordinal;
		return 1;
	}
	gpu->far |= UINT64_C(1) << ordinal;
	kv_logf(gpu->env, KV_LOG_WARN, "gpu",
		"no access to a peer's memory: the driver copies it to a ring and from there device %d peer %d why %s",
		gpu->ordinal, ordinal, kvk_gpu_last_error());

	return 0;
}

static kv_status_t refuse_unseen(const void *at)
{
	return kvk_gpu_set_error(KV_ERR_ARG, "the device does not see the memory at %p", at);
}

/* Pointers that the driver does not know are no failure of it: nothing is counted. */
static kv_status_t ask_driver(kvk_gpu_t *gpu, const void *at, size_t bytes, uint64_t *p_address,
			      kvk_gpu_mem_kind_t *p_kind)
{
	const kvk_cu_ptr_t first = (kvk_cu_ptr_t)(uintptr_t)at;
	kvk_cu_ptr_t from, to;
	unsigned type = 0;
	int ordinal = -1;
	int reached = 1;

	if (gpu->cuda->pointer_attribute(&type, POINTER_MEMORY_TYPE, first) != 0) {
		return refuse_unseen(at);
	}
	if (type != MEMORY_TYPE_HOST) {
		if (gpu->cuda->pointer_attribute(&ordinal, POINTER_ORDINAL, first) != 0) {
			return refuse_unseen(at);
		}
		pthread_mutex_lock(&gpu->lock);
		reached = reach_peer(gpu, ordinal);
		pthread_mutex_unlock(&gpu->lock);
	}
	if (!reached) { /* the driver's copies take the address everybody knows it by */
		*p_address = first;
		*p_kind = KVK_GPU_MEM_FAR;
		return gpu->cuda->pointer_attribute(&ordinal, POINTER_ORDINAL, first + bytes - 1) == 0
			       ? KV_OK
			       : refuse_unseen(at);
	}
	if (gpu->cuda->pointer_attribute(&from, POINTER_DEVICE, first) != 0 ||
	    gpu->cuda->pointer_attribute(&to, POINTER_DEVICE, first + bytes - 1) != 0 || to - from != bytes - 1) {
		return refuse_unseen(at);
	}
	*p_address = from;
	*p_kind = type == MEMORY_TYPE_HOST ? KVK_GPU_MEM_HOST : KVK_GPU_MEM_NEAR;

	return KV_OK;
}

kv_status_t kvk_gpu_translate(kvk_gpu_t *gpu, const void *at, size_t bytes, uint64_t *p_address,
			      kvk_gpu_mem_kind_t *p_kind)
{
	range_t r;

	if (!at || bytes == 0) {
		return refuse_unseen(at);
	}
	if (find_range(gpu, at, bytes, &r)) {
		*p_address = r.device + ((uint64_t)(uintptr_t)at - r.base);
		*p_kind = (kvk_gpu_mem_kind_t)r.kind;
		return KV_OK;
	}

	return ask_driver(gpu, at, bytes, p_address, p_kind);
}

kvk_gpu_mem_kind_t kvk_gpu_guess_kind(const kvk_gpu_t *gpu, const void *at)
{
	range_t r;

	return find_range(gpu, at, 1, &r) ? (kvk_gpu_mem_kind_t)r.kind : KVK_GPU_MEM_HOST;
}

int kvk_gpu_is_contiguous(kvk_gpu_t *gpu, const void *at, size_t bytes)
{
	const kvk_cu_ptr_t first = (kvk_cu_ptr_t)(uintptr_t)at;
	kvk_cu_ptr_t start = 0, other = 0;

	if (kvk_gpu_is_registered(gpu, at, bytes)) {
		return 1;
	}

	return gpu->cuda->pointer_attribute(&start, POINTER_START, first) == 0 &&
	       gpu->cuda->pointer_attribute(&other, POINTER_START, first + bytes - 1) == 0 && start == other;
}

int kvk_gpu_is_own(kvk_gpu_t *gpu, const void *at, size_t bytes)
{
	const kvk_cu_ptr_t first = (kvk_cu_ptr_t)(uintptr_t)at;
	int begin = -1, end = -1;
	kvk_cu_ptr_t last;

	/* Pointers that the driver does not know are no failure of it: nothing is counted. */
	return !__builtin_add_overflow(first, bytes - 1, &last) &&
	       gpu->cuda->pointer_attribute(&begin, POINTER_ORDINAL, first) == 0 &&
	       gpu->cuda->pointer_attribute(&end, POINTER_ORDINAL, last) == 0 && begin == gpu->ordinal &&
	       end == gpu->ordinal;
}

/* ---- init and fini --------------------------------------------------------------------------- */

/* As much of the wanted buffer as the driver gives. */
static kv_status_t alloc_arg_buffer(kvk_gpu_t *gpu)
{
	void *base = NULL;
	uint64_t bytes;
	kv_status_t status = KV_ERR_NOMEM;

	for (bytes = KVK_GPU_ARG_BUFFER_BYTES; bytes >= KVK_GPU_ARG_BUFFER_LEAST; bytes /= 2) {
		status = KVK_GPU_CALL(gpu, host_alloc, &base, bytes, KVK_CU_HOST_MAPPED);
		if (status == KV_OK) {
			break;
		}
	}
	if (status != KV_OK) {
		return status;
	}
	status = KVK_GPU_CALL(gpu, host_pointer, &gpu->arg_buffer_at, base, 0);
	if (status != KV_OK) {
		KVK_GPU_CALL(gpu, host_free, base);
		return status;
	}
	gpu->arg_buffer = base;
	gpu->arg_buffer_bytes = bytes;

	return KV_OK;
}

kv_status_t kvk_gpu_memory_init(kvk_gpu_t *gpu)
{
	kv_status_t status;

	gpu->tables = kv_alloc(gpu->env, 2 * sizeof *gpu->tables);
	if (!gpu->tables) {
		return kvk_gpu_set_error(KV_ERR_NOMEM, "out of memory");
	}
	status = alloc_arg_buffer(gpu);
	if (status != KV_OK) {
		kv_free(gpu->env, gpu->tables);
		return status;
	}
	pthread_mutex_init(&gpu->ranges_lock, NULL);

	return KV_OK;
}

void kvk_gpu_memory_fini(kvk_gpu_t *gpu)
{
	const kvk_gpu_table_t *table = &gpu->tables[atomic_load(&gpu->current)];
	const uint32_t count = atomic_load(&table->count);

	for (uint32_t i = 0; i < count; i++) {
		const range_t r = range_at(table, i);

		undo_range(gpu, &r);
	}
	KVK_GPU_CALL(gpu, host_free, gpu->arg_buffer);
	pthread_mutex_destroy(&gpu->ranges_lock);
	kv_free(gpu->env, gpu->tables);
}
