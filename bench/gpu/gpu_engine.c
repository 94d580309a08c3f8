#include "gpu_engine.h"

#include "bench.h"

#include "kvk/device.h"

#ifdef ENGINE_FAKE
#include "fake_cuda.h"
#define KERNELS fake_cuda_image()
#else
#define KERNELS NULL /* the build's */
#endif

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PROVE_NS UINT64_C(120000000000) /* of a busy machine */
#define LOAD_MS  5000u

static const uint8_t secret[16] = "a bench's secret";

/* The device, the engine's stream and the host memory that copies go through; cuda NULL: all is in host memory. */
static const kvk_cuda_ops_t *cuda;
static kvk_cu_context_t context;
static kvk_cu_stream_t stream;
static kvk_cu_event_t event;
static uint8_t *bounce;
static kvk_cu_ptr_t bounce_at;
static int device;

/* ---- memory: of the device, of the fake driver's device (ENGINE_FAKE), or the host's ---------- */

#define PINNED 3u /* portable, mapped */

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

int memory_open(int host)
{
	int count = 0;

	if (host) {
		return 0;
	}
	cuda = find_driver();
	if (!cuda || cuda->init(0) != 0 || cuda->device_count(&count) != 0 || count == 0) {
		printf("# SKIP: there is no device\n");
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

/* NULL: refused. */
static uint8_t *memory_take(size_t bytes)
{
	kvk_cu_ptr_t at = 0;

	if (!cuda) {
		return bench_memory(bytes);
	}

	return cuda->mem_alloc(&at, bytes) == 0 ? (uint8_t *)(uintptr_t)at : NULL;
}

static void memory_give(uint8_t *memory)
{
	if (cuda) {
		cuda->mem_free((kvk_cu_ptr_t)(uintptr_t)memory);
	} else {
		free(memory);
	}
}

/* The engine's own host memory that copies go through: one of them for a device. */
static uint8_t *memory_bounce(size_t bytes)
{
	void *base = NULL;

	if (!cuda) {
		return malloc(bytes);
	}
	if (cuda->host_alloc(&base, bytes, PINNED) == 0 && cuda->host_pointer(&bounce_at, base, 0) == 0) {
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

static void memory_read(uint8_t *to, const uint8_t *from, size_t bytes)
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

const char *memory_device(void)
{
	static kvk_device_info_t info;
	uint32_t n = 0;

	if (!cuda) {
		return "fake-0";
	}

	return kvk_device_list(cuda, &info, 1, &n) == KV_OK && n > 0 && info.uuid[0] ? info.uuid : NULL;
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

/* ---- opening --------------------------------------------------------------------------------- */

static void describe(engine_t *e)
{
	static const kvk_paged_kind_t kinds[] = {[KVK_INNER_SPLIT] = KVK_PAGED_KV_TOKEN_HEAD,
						 [KVK_INNER_PACKED] = KVK_PAGED_HEAD_TOKEN_KV,
						 [KVK_INNER_OPAQUE] = KVK_PAGED_OPAQUE};
	kvk_layout_t layouts[ENGINE_GROUPS];
	kvk_geometry_t g;

	kvk_layout_geometry(&e->layout, &g);
	layouts[0] = e->layout;
	for (uint32_t i = 0; i < e->more_count; i++) {
		layouts[i + 1u] = *e->more[i].layout;
	}
	kvk_layouts_format(layouts, 1u + e->more_count, e->layout_text, sizeof e->layout_text);
	e->piece = (size_t)g.page_bytes * e->layout.heads;
	e->block_bytes = e->piece * e->layout.layers;
	e->paged = (kvk_paged_t){.kind = kinds[e->layout.inner],
				 .page_bytes = e->layout.page_bytes,
				 .blocks = e->blocks,
				 .layers = e->layout.layers,
				 .heads = e->layout.heads,
				 .block_tokens = e->layout.block_tokens,
				 .k_dim = e->layout.k_dim,
				 .v_dim = e->layout.v_dim,
				 .dtype = e->layout.dtype,
				 .base = e->base};
	e->identity = (kvc_identity_t){.struct_size = sizeof e->identity,
				       .model = e->program,
				       .weights = "none",
				       .dtype = "bf16",
				       .rope = "none",
				       .hash_tokens = e->layout.block_tokens,
				       .groups = e->groups,
				       .layout = e->layout_text,
				       .page_format = "bench"};
	e->writer = (kvc_writer_t){.head_count = e->layout.heads, .layer_count = e->layout.layers};
	snprintf(e->instance, sizeof e->instance, "%.24s-%d", e->program, (int)getpid());
}

void engine_place(engine_t *e, uint8_t *cache)
{
	for (uint32_t l = 0; l < e->layout.layers; l++) {
		e->base[l] = cache + (size_t)l * e->blocks * e->piece;
	}
}

int engine_open_worker(engine_t *e)
{
	kvx_worker_group_t groups[ENGINE_GROUPS] = {{.layout = &e->layout, .paged = &e->paged}};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = e->socket,
					    .instance = e->instance,
					    .secret = secret,
					    .secret_len = sizeof secret,
					    .program = e->program,
					    .identity = &e->identity,
					    .groups = groups,
					    .group_count = 1u + e->more_count,
					    .memory = cuda ? KVX_MEMORY_CUDA : KVX_MEMORY_HOST,
					    .prefault = e->prefault,
					    .layer_bytes = e->layer_bytes,
					    .layer_wait_us = e->layer_wait_us,
					    .cuda = cuda,
					    .image = KERNELS};
	const uint64_t until = bench_now_ns() + PROVE_NS;
	kvc_status_t status;

	for (uint32_t i = 0; i < e->more_count; i++) {
		groups[i + 1u] = e->more[i];
	}
	status = kvx_worker_open(&config, &e->worker);
	if (status != KVC_OK) {
		printf("%s: %s\n", e->program, kvx_worker_last_error());
		return 0;
	}
	kvx_worker_set_stream(e->worker, stream);
	do {
		usleep(1000);
		status = kvx_worker_self_test_status(e->worker);
	} while (status == KVC_PENDING && bench_now_ns() < until && !bench_late());
	if (status != KVC_OK && !bench_late()) {
		printf("%s: the self-test says %s\n", e->program, kvc_status_name(status));
	}

	return status == KVC_OK || bench_late();
}

int engine_open(engine_t *e)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = e->socket,
				     .instance = e->instance,
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .role = KVC_ROLE_SCHEDULER,
				     .rank = KVX_SCHEDULER_RANK,
				     .program = e->program,
				     .timeout_ms = ENGINE_ASK_MS,
				     .lazy = 2};
	const uint64_t until = bench_now_ns() + PROVE_NS;
	kvc_status_t status;

	describe(e);
	e->bounce_bytes = e->bounce_bytes > e->block_bytes ? e->bounce_bytes : e->block_bytes;
	e->cache = memory_take(e->blocks * e->block_bytes);
	e->bounce = memory_bounce(e->bounce_bytes);
	e->expected = malloc(e->block_bytes);
	if (!e->cache || !e->bounce || !e->expected) {
		printf("%s: no memory for a cache of %zu MiB and for copies of %zu MiB\n", e->program,
		       e->blocks * e->block_bytes >> 20, e->bounce_bytes >> 20);
		return 0;
	}
	engine_place(e, e->cache);
	status = kvc_attach(&config, &e->kvc);
	while (status == KVC_OK && !e->space && !bench_late() && bench_now_ns() < until) {
		(void)kvc_poll(e->kvc, 5); /* there may be no daemon just now */
		if (kvc_space_open_start(e->kvc, &e->identity, &e->space) != KVC_OK) {
			e->space = NULL;
		}
	}
	if (!e->space && !bench_late()) {
		printf("%s: %s\n", e->program, kvc_last_error());
		return 0;
	}

	return engine_open_worker(e);
}

void engine_close(engine_t *e)
{
	kvx_worker_close(e->worker);
	kvc_space_close(e->device_space);
	kvc_space_close(e->space);
	kvc_detach(e->kvc);
	kvx_msg_free(&e->plan);
	memory_give(e->cache);
	if (!cuda) {
		free(e->bounce);
	}
	free(e->expected);
}

kvc_space_t *engine_space(engine_t *e)
{
	kvc_identity_t identity = e->identity;
	kvc_status_t status;

	if (e->mem == KVX_HOST_MEM) {
		return e->space;
	}
	identity.device = e->device;
	if (!e->device_space && kvc_space_open_start(e->kvc, &identity, &e->device_space) != KVC_OK) {
		e->device_space = NULL;
		return NULL;
	}
	status = kvc_space_state(e->device_space);
	if (status < 0) { /* perhaps the next daemon has it */
		kvc_space_close(e->device_space);
		e->device_space = NULL;
	}

	return status == KVC_OK ? e->device_space : NULL;
}

kvc_status_t engine_keys(engine_t *e, uint64_t chain, kvc_key_t *keys)
{
	kvc_space_t *space = engine_space(e);
	const uint32_t count = e->length * e->layout.block_tokens;
	uint32_t *tokens = malloc(count * sizeof *tokens), n = 0;
	kvc_status_t status = space ? KVC_ERR_NOMEM : KVC_ERR_UNREACHABLE;

	if (tokens && space) {
		for (uint32_t i = 0; i < count; i++) {
			tokens[i] = (uint32_t)chain * 100000u + i;
		}
		status = kvc_keys_of(space, &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, count, NULL}, keys, e->length,
				     &n);
	}
	free(tokens);

	return status;
}

/* Where a block's part of a layer lies. */
static uint8_t *engine_piece(const engine_t *e, uint32_t id, uint32_t layer)
{
	return (uint8_t *)e->base[layer] + (size_t)id * e->piece;
}

void engine_write(engine_t *e, uint32_t id, uint64_t seed)
{
	bench_fill(e->bounce, e->block_bytes, seed);
	for (uint32_t l = 0; l < e->layout.layers; l++) {
		memory_write(engine_piece(e, id, l), e->bounce + l * e->piece, e->piece);
	}
	memory_settle();
}

int engine_holds(engine_t *e, uint32_t id, uint64_t seed)
{
	for (uint32_t l = 0; l < e->layout.layers; l++) {
		memory_read(e->bounce + l * e->piece, engine_piece(e, id, l), e->piece);
	}
	memory_settle();
	bench_fill(e->expected, e->block_bytes, seed);

	return memcmp(e->expected, e->bounce, e->block_bytes) == 0;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void new_plan(engine_t *e)
{
	kvx_msg_gpu_mem_t *record;

	kvx_msg_reset(&e->plan, KVX_MSG_MAGIC);
	e->step++;
	if (e->device) {
		record = kvx_msg_add_record(&e->plan, KVX_RECORD_GPU_MEM, sizeof *record);
		if (record) {
			record->mem = KVX_OWN_MEM;
			record->text_len = (uint32_t)strlen(e->device);
			kvx_msg_append(&e->plan, e->device, record->text_len);
		}
	}
}

static void begin(engine_t *e)
{
	kvx_msg_finish(&e->plan, e->step);
	kvx_worker_begin_step(e->worker, e->plan.data, e->plan.len);
}

void engine_fence(engine_t *e, const uint32_t *ids, uint32_t n)
{
	kvx_msg_fence_t *record;

	new_plan(e);
	record = kvx_msg_add_record(&e->plan, KVX_RECORD_FENCE, sizeof *record);
	if (record) {
		record->n = n;
		kvx_msg_append(&e->plan, ids, n * sizeof *ids);
	}
	begin(e);
}

/* Nobody asks for the reports: they are taken, so that there is room for the next ones. */
void engine_end(engine_t *e)
{
	const void *bytes;
	size_t len;

	kvx_worker_end_step(e->worker);
	do {
		kvx_worker_take_report(e->worker, &bytes, &len);
	} while (len > 0);
}

/* 0: there is nothing to write, or it cannot. */
static int add_save(engine_t *e, const engine_part_t *part)
{
	kvx_msg_save_t *save;
	kvc_handle_t handle;
	uint32_t *places;

	if (kvc_put_export(part->put, &handle) != KVC_OK) {
		return 0;
	}
	save = kvx_msg_add_record(&e->plan, KVX_RECORD_SAVE, sizeof *save);
	if (!save) {
		return 0;
	}
	save->n = part->n;
	save->group = part->group;
	save->step = e->step;
	save->put = handle;
	save->flags = e->mem == KVX_OWN_MEM ? KVX_MSG_GPU_MEM : 0;
	places = kvx_msg_append(&e->plan, part->ids, part->n * sizeof *part->ids);
	for (uint32_t i = 0; places && i < part->n; i++) {
		places[i] = kvc_put_block(part->put, i, NULL) == KVC_ALREADY ? KVX_NO_BLOCK : part->ids[i];
	}

	return places != NULL;
}

int engine_save_parts(engine_t *e, const engine_part_t *parts, uint32_t count)
{
	new_plan(e);
	for (uint32_t i = 0; i < count; i++) {
		if (!add_save(e, &parts[i])) {
			return 0;
		}
	}
	begin(e);
	e->end_ns = bench_now_ns();
	engine_end(e);

	return 1;
}

int engine_save(engine_t *e, const kvc_put_t *put, const uint32_t *ids, uint32_t n)
{
	return engine_save_parts(e, &(engine_part_t){.put = put, .ids = ids, .n = n}, 1);
}

/* A step with one load of these leased blocks, whose asynchronous half has begun. 0: it cannot be written. */
static int begin_load(engine_t *e, const engine_part_t *parts, uint32_t count, uint32_t flags)
{
	kvx_msg_load_t *load;

	new_plan(e);
	load = kvx_msg_add_record(&e->plan, KVX_RECORD_LOAD, sizeof *load);
	if (!load) {
		return 0;
	}
	load->load = ++e->load;
	load->flags = flags;
	load->timeout_ms = e->load_ms ? e->load_ms : LOAD_MS;
	load->parts = count;
	load->id_len = 4;
	if (!kvx_msg_append(&e->plan, "load", 4)) {
		return 0;
	}
	for (uint32_t i = 0; i < count; i++) {
		kvx_msg_part_t part = {
			.group = parts[i].group, .n = parts[i].n, .first = parts[i].first, .mem = e->mem};

		if (kvc_lease_export(parts[i].lease, &part.lease) != KVC_OK ||
		    !kvx_msg_append(&e->plan, &part, sizeof part) ||
		    !kvx_msg_append(&e->plan, parts[i].ids, part.n * sizeof *parts[i].ids)) {
			return 0;
		}
	}
	begin(e);
	kvx_worker_start_async_loads(e->worker);

	return 1;
}

int engine_load_async(engine_t *e, const engine_part_t *parts, uint32_t count)
{
	const uint64_t until = bench_now_ns() + LOAD_MS * UINT64_C(2000000);
	uint32_t finished = 0;
	int failed = 1;
	char id[8];

	if (!begin_load(e, parts, count, KVX_MSG_ASYNC)) {
		return 0;
	}
	engine_end(e);
	while (!finished && bench_now_ns() < until) {
		kvx_worker_wait(e->worker, 1000);
		finished = kvx_worker_take_finished(e->worker, id, sizeof id, &failed);
	}

	return finished && !failed;
}

int engine_load(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n)
{
	const int begun = begin_load(e, &(engine_part_t){.lease = lease, .ids = ids, .n = n}, 1, 0);

	if (begun) {
		kvx_worker_run_sync_loads(e->worker);
		engine_end(e);
	}

	return begun;
}

int engine_load_first(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint64_t *p_ns, int *p_layered)
{
	const engine_part_t part = {.lease = lease, .ids = ids, .n = kvc_lease_n(lease)};
	const uint64_t start = bench_now_ns();

	if (!begin_load(e, &part, 1, 0)) {
		return 0;
	}
	*p_layered = kvx_worker_run_layered_loads(e->worker);
	kvx_worker_await_layer(e->worker, 0);
	memory_settle();
	*p_ns = bench_now_ns() - start;
	for (uint32_t l = 1; l < e->layout.layers; l++) {
		kvx_worker_await_layer(e->worker, l);
	}
	engine_end(e);

	return 1;
}
