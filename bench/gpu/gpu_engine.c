#include "gpu_engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PROVE_MS 20000u
#define LOAD_MS  5000u

static const uint8_t secret[16] = "a bench's secret";

uint64_t engine_now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static uint64_t now_ms(void)
{
	return engine_now_ns() / 1000000u;
}

static int is_over(const engine_t *e)
{
	return e->p_over && *e->p_over;
}

/* ---- opening --------------------------------------------------------------------------------- */

static void describe(engine_t *e)
{
	kvk_geometry_t g;

	e->layout = (kvk_layout_t){.heads = e->small ? 2 : 8,
				   .layers = e->small ? 4 : ENGINE_LAYERS,
				   .block_tokens = ENGINE_TOKENS,
				   .k_dim = e->small ? 64 : 128,
				   .v_dim = e->small ? 64 : 128,
				   .dtype = KVK_DTYPE_BF16,
				   .inner = KVK_INNER_SPLIT};
	kvk_layout_geometry(&e->layout, &g);
	kvk_layout_format(&e->layout, e->layout_text, sizeof e->layout_text);
	e->piece = (size_t)g.page_bytes * e->layout.heads;
	e->block_bytes = e->piece * e->layout.layers;
	e->paged = (kvk_paged_t){.kind = KVK_PAGED_KV_TOKEN_HEAD,
				 .blocks = e->blocks,
				 .layers = e->layout.layers,
				 .heads = e->layout.heads,
				 .block_tokens = ENGINE_TOKENS,
				 .k_dim = e->layout.k_dim,
				 .v_dim = e->layout.v_dim,
				 .dtype = e->layout.dtype,
				 .base = e->base};
	e->identity = (kvc_identity_t){.struct_size = sizeof e->identity,
				       .model = e->program,
				       .weights = "none",
				       .dtype = "bf16",
				       .rope = "none",
				       .hash_tokens = ENGINE_TOKENS,
				       .layout = e->layout_text,
				       .page_format = "bench"};
	e->writer = (kvc_writer_t){.head_count = e->layout.heads, .layer_count = e->layout.layers};
	snprintf(e->instance, sizeof e->instance, "bench-%d", (int)getpid());
}

static int open_worker(engine_t *e)
{
	const kvx_worker_group_t group = {0, &e->paged};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = e->socket,
					    .instance = e->instance,
					    .secret = secret,
					    .secret_len = sizeof secret,
					    .program = e->program,
					    .identity = &e->identity,
					    .layout = &e->layout,
					    .range = e->writer,
					    .groups = &group,
					    .group_count = 1,
					    .memory = memory_cuda() ? KVX_MEMORY_CUDA : KVX_MEMORY_HOST,
					    .sms = e->sms,
					    .layer_bytes = e->layer_bytes,
					    .layer_wait_us = e->layer_wait_us,
					    .cuda = memory_cuda(),
					    .image = memory_image()};
	const uint64_t until = now_ms() + PROVE_MS;
	kvc_status_t status = kvx_worker_open(&config, &e->worker);

	if (status != KVC_OK) {
		printf("%s: %s\n", e->program, kvx_worker_last_error());
		return 0;
	}
	kvx_worker_set_stream(e->worker, memory_stream());
	do {
		usleep(1000);
		status = kvx_worker_self_test_status(e->worker);
	} while (status == KVC_PENDING && now_ms() < until && !is_over(e));
	if (status != KVC_OK && !is_over(e)) {
		printf("%s: the self-test says %s\n", e->program, kvc_status_name(status));
	}

	return status == KVC_OK || is_over(e);
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
	const uint64_t until = now_ms() + PROVE_MS;
	size_t layer_bytes;
	kvc_status_t status;

	describe(e);
	layer_bytes = e->blocks * e->piece;
	e->cache = memory_take(layer_bytes * e->layout.layers);
	if (!e->cache) {
		printf("%s: no memory for a cache of %zu MiB\n", e->program, layer_bytes * e->layout.layers >> 20);
		return 0;
	}
	for (uint32_t l = 0; l < e->layout.layers; l++) {
		e->base[l] = e->cache + l * layer_bytes;
	}
	status = kvc_attach(&config, &e->kvc);
	while (status == KVC_OK && !e->space && !is_over(e) && now_ms() < until) {
		(void)kvc_poll(e->kvc, 5); /* there may be no daemon just now */
		if (kvc_space_open_start(e->kvc, &e->identity, &e->space) != KVC_OK) {
			e->space = NULL;
		}
	}
	if (!e->space && !is_over(e)) {
		printf("%s: %s\n", e->program, kvc_last_error());
		return 0;
	}

	return open_worker(e);
}

void engine_close(engine_t *e)
{
	kvx_worker_close(e->worker);
	kvc_space_close(e->space);
	kvc_detach(e->kvc);
	kvx_msg_free(&e->plan);
	memory_give(e->cache);
}

kvc_status_t engine_keys(const engine_t *e, uint64_t chain, kvc_key_t *keys)
{
	uint32_t *tokens = malloc((size_t)e->length * ENGINE_TOKENS * sizeof *tokens), n = 0;
	kvc_status_t status = KVC_ERR_NOMEM;

	if (tokens) {
		for (uint32_t i = 0; i < e->length * ENGINE_TOKENS; i++) {
			tokens[i] = (uint32_t)chain * 100000u + i;
		}
		status = kvc_keys_of(e->space,
				     &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, e->length * ENGINE_TOKENS, NULL},
				     keys, e->length, &n);
	}
	free(tokens);

	return status;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void new_plan(engine_t *e)
{
	kvx_msg_reset(&e->plan, KVX_MSG_MAGIC);
	e->step++;
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

int engine_save(engine_t *e, const kvc_put_t *put, const uint32_t *ids, uint32_t n)
{
	kvx_msg_save_t *save;
	kvc_handle_t handle;
	uint32_t *places;

	if (kvc_put_export(put, &handle) != KVC_OK) {
		return 0;
	}
	new_plan(e);
	save = kvx_msg_add_record(&e->plan, KVX_RECORD_SAVE, sizeof *save);
	if (!save) {
		return 0;
	}
	save->n = n;
	save->step = e->step;
	save->put = handle;
	places = kvx_msg_append(&e->plan, ids, n * sizeof *ids);
	for (uint32_t i = 0; places && i < n; i++) {
		places[i] = kvc_put_block(put, i, NULL) == KVC_ALREADY ? KVX_NO_BLOCK : ids[i];
	}
	begin(e);
	engine_end(e);

	return places != NULL;
}

/* One more record of the plan, of a load of n leased blocks: 0: it cannot be written. */
static int add_load(engine_t *e, const kvc_lease_t *lease, uint32_t flags, const uint32_t *ids, uint32_t n)
{
	kvx_msg_part_t part = {.n = n};
	kvx_msg_load_t *load;

	if (kvc_lease_export(lease, &part.lease) != KVC_OK) {
		return 0;
	}
	load = kvx_msg_add_record(&e->plan, KVX_RECORD_LOAD, sizeof *load);
	if (!load) {
		return 0;
	}
	load->load = ++e->load;
	load->flags = flags;
	load->timeout_ms = e->load_ms ? e->load_ms : LOAD_MS;
	load->parts = 1;
	load->id_len = 4;

	return kvx_msg_append(&e->plan, "load", 4) && kvx_msg_append(&e->plan, &part, sizeof part) &&
	       kvx_msg_append(&e->plan, ids, n * sizeof *ids);
}

/* The plan of a step that loads n leased blocks: 0: it cannot be written. */
static int plan_load(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n)
{
	new_plan(e);

	return add_load(e, lease, 0, ids, n);
}

int engine_load(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n)
{
	if (!plan_load(e, lease, ids, n)) {
		return 0;
	}
	begin(e);
	kvx_worker_start_async_loads(e->worker);
	kvx_worker_run_sync_loads(e->worker);
	engine_end(e);

	return 1;
}

int engine_load_beside(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n, uint32_t count)
{
	const uint64_t until = engine_now_ns() + (e->load_ms ? e->load_ms : LOAD_MS) * UINT64_C(2000000);
	uint32_t good = 0, over = 0;

	new_plan(e);
	for (uint32_t i = 0; i < count; i++) {
		if (!add_load(e, lease, KVX_MSG_ASYNC, ids, n)) {
			return 0;
		}
	}
	begin(e);
	kvx_worker_start_async_loads(e->worker);
	engine_end(e);
	while (over < count && engine_now_ns() < until) {
		int failed = 0;
		char id[8];

		if (kvx_worker_take_finished(e->worker, id, sizeof id, &failed) > 0) {
			good += !failed;
			over++;
		}
	}

	return good == count;
}

int engine_load_first(engine_t *e, const kvc_lease_t *lease, const uint32_t *ids, uint64_t *p_ns, int *p_layered)
{
	uint64_t start;

	if (!plan_load(e, lease, ids, kvc_lease_n(lease))) {
		return 0;
	}
	start = engine_now_ns();
	begin(e);
	kvx_worker_start_async_loads(e->worker);
	*p_layered = kvx_worker_run_layered_loads(e->worker);
	kvx_worker_await_layer(e->worker, 0);
	memory_settle();
	*p_ns = engine_now_ns() - start;

	return 1;
}

void engine_load_rest(engine_t *e)
{
	for (uint32_t l = 1; l < e->layout.layers; l++) {
		kvx_worker_await_layer(e->worker, l);
	}
	engine_end(e);
}
