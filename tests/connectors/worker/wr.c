#include "connectors/worker/wr.h"
#include "connectors/worker/wr_device.h"

#include "kv/env.h"
#include "worker/cuda/state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define LATE_KERNELS 400u
#define STORED_SEED  1u
#define TOKENS       32u
#define DIM          16u
#define HEAD_PAGE    (TOKENS * 2u * DIM * (uint32_t)sizeof(float))

const uint32_t wr_eight[8] = {1, 2, 3, 4, 5, 6, 7, 8};
const uint32_t wr_other[8] = {21, 30, 23, 40, 25, 50, 27, 63};
const wr_t wr_one = {0};
const wr_t wr_layered = {.layer_bytes = 1, .layer_wait_us = WR_PATIENCE * 1000u};
const wr_t wr_alone = {.no_daemon = 1};

static const uint8_t secret[16] = "sixteen bytes!!!";
const char *wr_program;

uint64_t wr_now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

kvx_worker_stats_t wr_stats(const wr_t *wr, uint32_t r)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};

	kvx_worker_get_stats(wr->rank[r].worker, &stats);

	return stats;
}

/* ---- members --------------------------------------------------------------------------------- */

static void describe(wr_t *wr)
{
	kvk_layout_t layouts[2];

	wr->layout = (kvk_layout_t){.heads = 1,
				    .layers = WR_LAYERS,
				    .block_tokens = TOKENS,
				    .dtype = KVK_DTYPE_F32,
				    .inner = KVK_INNER_OPAQUE,
				    .page_bytes = WR_PAGE};
	if (wr->heads > 0) {
		wr->layout.heads = wr->heads;
		wr->layout.inner = wr->latent ? KVK_INNER_SPLIT : KVK_INNER_PACKED;
		wr->layout.k_dim = wr->latent ? 2 * DIM : DIM;
		wr->layout.v_dim = wr->latent ? 0 : DIM;
		wr->layout.page_bytes = 0;
	}
	wr->layout2 = wr->layout;
	if (wr->groups) {
		wr->layout2.layers = wr->layers * (wr->rank_count ? wr->rank_count : 1u);
	}
	layouts[0] = wr->layout;
	layouts[1] = wr->layout2;
	assert_int_equal(kvk_layouts_format(layouts, wr->groups ? 2 : 1, wr->layout_text, sizeof wr->layout_text),
			 KV_OK);
	wr->identity = (kvc_identity_t){.struct_size = sizeof wr->identity,
					.model = "worker test",
					.weights = WR_WEIGHTS,
					.dtype = "f32",
					.rope = "r",
					.hash_tokens = 32,
					.layout = wr->layout_text,
					.groups = wr->groups,
					.page_format = "test"};
}

static uint32_t stages_of(const wr_t *wr)
{
	return wr->stages ? wr->stages : 1u;
}

static uint32_t first_layer(const wr_t *wr, uint32_t r)
{
	return wr->heads > 0 ? r / (wr->rank_count / stages_of(wr)) * WR_LAYERS / stages_of(wr)
			     : r * (WR_LAYERS / wr->rank_count);
}

static uint32_t layers_of(const wr_t *wr, uint32_t r)
{
	return wr->heads > 0 ? first_layer(wr, r + wr->rank_count / stages_of(wr)) - first_layer(wr, r)
			     : WR_LAYERS / wr->rank_count;
}

/* Each rank has its heads of all layers of its stage. Where a stage has more ranks than heads, each head is copied, and
 * the ranks that hold a copy share out its layers for saving. */
static void place_heads(wr_t *wr, uint32_t r)
{
	wr_rank_t *rank = &wr->rank[r];
	const uint32_t ranks = wr->rank_count / stages_of(wr);
	const uint32_t heads = wr->heads > ranks ? wr->heads / ranks : 1u;
	const uint32_t copies = ranks * heads / wr->heads, copy = r % copies;

	rank->paged.kind = KVK_PAGED_HEAD_TOKEN_KV;
	rank->paged.heads = heads;
	rank->paged.first_head = r % ranks / copies * heads;
	rank->paged.k_dim = wr->layout.k_dim;
	rank->paged.v_dim = wr->layout.v_dim;
	rank->paged.page_bytes = 0;
	rank->paged.block_stride = WR_PAGE;
	rank->page = heads * HEAD_PAGE;
	rank->at = rank->paged.first_head * HEAD_PAGE;
	rank->saved_first = rank->paged.first_layer + copy * rank->layers / copies;
	rank->saved = rank->paged.first_layer + (copy + 1) * rank->layers / copies - rank->saved_first;
}

static void make_cache(wr_t *wr, uint32_t r)
{
	wr_rank_t *rank = &wr->rank[r];

	rank->layers = layers_of(wr, r);
	rank->page = WR_PAGE;
	rank->cache = wr_device_alloc((size_t)rank->layers * WR_BLOCKS * WR_PAGE);
	assert_non_null(rank->cache);
	for (uint32_t l = 0; l < rank->layers; l++) {
		rank->base[l] = rank->cache + (size_t)l * WR_BLOCKS * WR_PAGE;
	}
	rank->paged = (kvk_paged_t){.kind = KVK_PAGED_OPAQUE,
				    .blocks = WR_BLOCKS,
				    .layers = rank->layers,
				    .first_layer = first_layer(wr, r),
				    .heads = 1,
				    .block_tokens = 32,
				    .dtype = KVK_DTYPE_F32,
				    .page_bytes = WR_PAGE,
				    .base = rank->base};
	rank->second = rank->paged;
	rank->second.first_layer = r * wr->layers;
	rank->second.layers = wr->layers;
	if (wr->heads > 0) {
		place_heads(wr, r);
	}
	wr->writers[r] = (kvc_writer_t){.rank = r,
					.head_first = rank->paged.first_head,
					.head_count = rank->paged.heads,
					.layer_first = rank->saved ? rank->saved_first : rank->paged.first_layer,
					.layer_count = rank->saved ? rank->saved : rank->layers};
	wr->writers2[r] = (kvc_writer_t){
		.rank = r, .head_count = 1, .layer_first = rank->second.first_layer, .layer_count = wr->layers};
}

kvx_worker_config_t wr_config(const wr_t *wr, uint32_t r, kvx_worker_group_t *groups)
{
	kvx_worker_config_t config = {.struct_size = sizeof config,
				      .socket = wr->rig.socket,
				      .instance = "worker-test",
				      .secret = secret,
				      .secret_len = sizeof secret,
				      .rank = r,
				      .identity = &wr->identity,
				      .groups = groups,
				      .group_count = wr->groups ? 2 : 1,
				      .threads = r == 0 ? 3 : 1,
				      .layer_bytes = wr->layer_bytes,
				      .layer_wait_us = wr->layer_wait_us,
				      .promote_rate = wr->promote_rate};

	groups[0] = (kvx_worker_group_t){.group = 0,
					 .layout = &wr->layout,
					 .paged = &wr->rank[r].paged,
					 .save_layer_first = wr->rank[r].saved_first,
					 .save_layers = wr->rank[r].saved};
	groups[1] = (kvx_worker_group_t){.group = 1, .layout = &wr->layout2, .paged = &wr->rank[r].second};
	wr_device_config(&config);

	return config;
}

kvc_status_t wr_await_self_test(const wr_t *wr)
{
	KV_AWAIT(kvx_worker_self_test_status(wr->rank[0].worker) != KVC_PENDING);

	return kvx_worker_self_test_status(wr->rank[0].worker);
}

void wr_open_rank(wr_t *wr, uint32_t r, int prove)
{
	kvx_worker_group_t groups[2];
	const kvx_worker_config_t config = wr_config(wr, r, groups);

	assert_int_equal(kvx_worker_open(&config, &wr->rank[r].worker), KVC_OK);
	wr_device_set_stream(wr->rank[r].worker, 0);
	if (prove) {
		KV_AWAIT(kvx_worker_self_test_status(wr->rank[r].worker) != KVC_PENDING);
		assert_int_equal(kvx_worker_self_test_status(wr->rank[r].worker), KVC_OK);
	}
}

void wr_reopen(wr_t *wr)
{
	kvx_worker_close(wr->rank[0].worker);
	wr_open_rank(wr, 0, 1);
}

void wr_set_ranks(wr_t *wr, uint32_t count)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_close(wr->rank[r].worker);
		wr_device_free(wr->rank[r].cache);
		wr->rank[r] = (wr_rank_t){0};
	}
	wr->rank_count = count;
	for (uint32_t r = 0; r < count; r++) {
		make_cache(wr, r);
		wr_open_rank(wr, r, 1);
	}
}

static void attach_scheduler(wr_t *wr)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = wr->rig.socket,
				     .instance = "worker-test",
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .role = KVC_ROLE_SCHEDULER,
				     .rank = KVX_SCHEDULER_RANK};
	uint32_t tokens[WR_KEYS * 32], n = 0;

	assert_int_equal(kvc_attach(&config, &wr->kvc), KVC_OK);
	assert_int_equal(kvc_space_open(wr->kvc, &wr->identity, &wr->space), KVC_OK);
	for (uint32_t i = 0; i < WR_KEYS * 32; i++) {
		tokens[i] = i;
	}
	assert_int_equal(kvc_keys_of(wr->space, &(kvc_prompt_t){sizeof(kvc_prompt_t), tokens, WR_KEYS * 32, NULL},
				     wr->keys, WR_KEYS, &n),
			 KVC_OK);
	assert_int_equal(n, WR_KEYS);
}

static void run_iteration(void *ctx)
{
	(void)kvc_poll(((wr_t *)ctx)->kvc, 0);
}

void wr_kill(wr_t *wr)
{
	wr->killed = kvc_incarnation(wr->kvc);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		wr->attaches[r] = wr_stats(wr, r).attaches;
	}
	rig_kill(&wr->rig);
}

void wr_restart(wr_t *wr)
{
	uint64_t now;

	rig_start(&wr->rig);
	KV_AWAIT((run_iteration(wr), now = kvc_incarnation(wr->kvc)) != wr->killed && now != 0 &&
		 kvc_space_state(wr->space) == KVC_OK);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		KV_AWAIT((run_iteration(wr), wr_stats(wr, r).attaches != wr->attaches[r]));
		assert_int_equal(wr_stats(wr, r).attaches, wr->attaches[r] + 1);
	}
	usleep(100000); /* the workers' spaces are opened again with their sessions */
}

static void store(wr_t *wr, const uint32_t *ids, uint32_t n)
{
	kvc_put_t *put = wr_put(wr, 0, n);

	wr_save(wr, put, ids, n);
	assert_int_equal(wr_put_wait(put), KVC_OK);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		assert_int_equal(kvx_worker_flush(wr->rank[r].worker, WR_PATIENCE), KVC_OK);
		wr_check_silent(&wr->rank[r]);
	}
}

/* ---- fixtures -------------------------------------------------------------------------------- */

void wr_open(wr_t *wr)
{
	wr->rank_count = wr->rank_count ? wr->rank_count : 1;
	wr->timeout_ms = WR_LOAD_MS;
	wr_device_start(WR_SEED);
	describe(wr);
	rig_init(&wr->rig, wr_program);
	if (!wr->no_daemon) {
		assert_non_null(wr_program);
		wr->rig.silence = wr->silence ? wr->silence : RIG_SILENCE;
		rig_start(&wr->rig);
		attach_scheduler(wr);
		wr->rig.run_iteration = run_iteration;
		wr->rig.iteration_ctx = wr;
	}
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		make_cache(wr, r);
		wr_open_rank(wr, r, !wr->no_daemon);
	}
	wr_fill(wr, STORED_SEED);
	if (!wr->no_daemon && !wr->empty) {
		store(wr, wr_eight, 8);
	}
}

void wr_close(wr_t *wr)
{
	if (wr->rig.pid) {
		rig_check_quiet(&wr->rig);
	}
	wr->rig.run_iteration = NULL;
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_close(wr->rank[r].worker);
		wr_device_free(wr->rank[r].cache);
	}
	wr_device_stop();
	kvc_space_close(wr->space);
	kvc_detach(wr->kvc);
	kvx_msg_free(&wr->message);
	rig_fini(&wr->rig);
}

int wr_setup(void **state)
{
	wr_t *wr = malloc(sizeof *wr);

	assert_non_null(wr);
	memcpy(wr, *state, sizeof *wr);
	*state = wr;
	wr_open(wr);

	return 0;
}

int wr_teardown(void **state)
{
	wr_t *wr = *state;

	for (uint32_t r = 0; r < wr->rank_count && wr->rank[r].worker; r++) {
		if (!wr->strict) {
			wr_drain(wr);
		}
		assert_int_equal(wr_count_open(wr, r), 0);
		wr_check_silent(&wr->rank[r]);
	}
	wr_close(wr);
	free(wr);

	return 0;
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint8_t byte_of(uint32_t seed, uint32_t block, uint32_t layer, uint32_t i)
{
	return (uint8_t)((i * 7u + block * 31u + layer * 101u + seed * 57u) * 2654435761u >> 11);
}

typedef struct call_args {
	const wr_rank_t *rank;
	wr_content_t content;
	uint32_t *wrong; /* incremented if they are not */
} call_args_t;

static void write_block(void *args)
{
	const wr_rank_t *rank = ((const call_args_t *)args)->rank;
	const wr_content_t *c = &((const call_args_t *)args)->content;

	wr_device_trace("engine writes block, seed", c->block, c->seed);
	for (uint32_t l = c->first_layer; l < c->end_layer; l++) {
		uint8_t *at = (uint8_t *)rank->base[l] + (size_t)c->block * WR_PAGE;

		for (uint32_t i = 0; i < rank->page; i++) {
			at[i] = byte_of(c->seed, c->as, rank->paged.first_layer + l, rank->at + i);
		}
	}
}

static int content_is(const wr_rank_t *rank, const wr_content_t *c)
{
	for (uint32_t l = c->first_layer; l < c->end_layer; l++) {
		const uint8_t *at = (const uint8_t *)rank->base[l] + (size_t)c->block * WR_PAGE;

		for (uint32_t i = 0; i < rank->page; i++) {
			if (at[i] != byte_of(c->seed, c->as, rank->paged.first_layer + l, rank->at + i)) {
				return 0;
			}
		}
	}

	return 1;
}

static void compare(void *args)
{
	const call_args_t *a = args;

	*a->wrong += !content_is(a->rank, &a->content);
}

static void call(void (*kernel)(void *args), const call_args_t *args)
{
	call_args_t *copy = malloc(sizeof *copy);

	assert_non_null(copy);
	*copy = *args;
	wr_device_call(kernel, copy);
}

void wr_fill_block(wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as)
{
	call(write_block, &(call_args_t){rank, {block, seed, as, 0, rank->layers}, NULL});
}

int wr_block_is(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as)
{
	wr_device_sync();

	return content_is(rank, &(wr_content_t){block, seed, as, 0, rank->layers});
}

void wr_compare(const wr_rank_t *rank, wr_content_t content, uint32_t *p_wrong)
{
	call(compare, &(call_args_t){rank, content, p_wrong});
}

static void fill_other(wr_t *wr, uint32_t seed)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		for (uint32_t i = 0; i < 8; i++) {
			wr_fill_block(&wr->rank[r], wr_other[i], seed, wr_eight[i]);
		}
	}
}

void wr_fill(wr_t *wr, uint32_t seed)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		for (uint32_t b = 0; b < WR_BLOCKS; b++) {
			wr_fill_block(&wr->rank[r], b, seed, b);
		}
	}
}

static void do_nothing(void *args)
{
	(void)args;
}

void wr_be_late(void)
{
	for (uint32_t i = 0; i < LATE_KERNELS; i++) {
		wr_device_call(do_nothing, NULL);
	}
}

/* ---- step messages --------------------------------------------------------------------------- */

void wr_message(wr_t *wr)
{
	wr->step++;
	kvx_msg_reset(&wr->message, KVX_MSG_MAGIC);
}

static void *add(wr_t *wr, uint32_t type, size_t size)
{
	void *record = kvx_msg_add_record(&wr->message, type, size);

	assert_non_null(record);

	return record;
}

void wr_add_fence(wr_t *wr, const uint32_t *ids, uint32_t n)
{
	((kvx_msg_fence_t *)add(wr, KVX_RECORD_FENCE, sizeof(kvx_msg_fence_t)))->n = n;
	kvx_msg_append(&wr->message, ids, n * sizeof *ids);
}

void wr_add_save(wr_t *wr, const kvc_put_t *put, uint32_t flags, const uint32_t *ids, uint32_t n)
{
	kvx_msg_save_t *save = add(wr, KVX_RECORD_SAVE, sizeof *save);

	save->space = wr->number;
	save->flags = flags;
	save->group = wr->group;
	save->n = n;
	save->step = flags & KVX_MSG_COMPLETE ? wr->step - 2 : wr->step;
	if (put) {
		assert_int_equal(kvc_put_export(put, &save->put), KVC_OK);
	} else { /* of a daemon that nobody knows */
		save->put = (kvc_handle_t){.incarnation = 5, .id = 9, .offset = 4096, .kind = 2, .n = 8};
	}
	kvx_msg_append(&wr->message, ids, n * sizeof *ids);
}

void wr_add_part(wr_t *wr, const kvc_lease_t *lease, const uint32_t *ids, uint32_t n)
{
	kvx_msg_part_t part = {.n = n, .group = wr->group, .mem = wr->mem};

	if (lease) {
		if (wr->handle) {
			part.lease = *wr->handle;
		} else {
			assert_int_equal(kvc_lease_export(lease, &part.lease), KVC_OK);
		}
		part.first = kvc_lease_skip(lease);
		part.lease.n = wr->forge_n ? wr->forge_n : part.lease.n;
	}
	((kvx_msg_load_t *)(void *)(wr->message.data + wr->message.record))->parts++;
	kvx_msg_append(&wr->message, &part, sizeof part);
	kvx_msg_append(&wr->message, ids, n * sizeof *ids);
}

void wr_add_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, uint64_t load, const uint32_t *ids, uint32_t n)
{
	kvx_msg_load_t *record = add(wr, KVX_RECORD_LOAD, sizeof *record);
	char id[16];

	if (wr->request) {
		(void)snprintf(id, sizeof id, "%s", wr->request);
	} else {
		(void)snprintf(id, sizeof id, "request-%u", (unsigned)load);
	}
	record->load = load;
	record->flags = lease ? flags : flags | KVX_MSG_NO_LEASE;
	record->timeout_ms = wr->timeout_ms;
	record->space = wr->number;
	record->id_len = (uint32_t)strlen(id);
	kvx_msg_append(&wr->message, id, strlen(id));
	wr_add_part(wr, lease, ids, n);
}

void wr_add_drop(wr_t *wr, uint64_t load)
{
	((kvx_msg_drop_t *)add(wr, KVX_RECORD_DROP, sizeof(kvx_msg_drop_t)))->load = load;
}

void wr_add_space(wr_t *wr, uint32_t number, const char *adapter)
{
	kvx_msg_space_t *space = add(wr, KVX_RECORD_SPACE, sizeof *space);

	space->number = number;
	space->weights_len = (uint32_t)strlen(WR_WEIGHTS);
	space->adapter_len = (uint32_t)strlen(adapter);
	kvx_msg_append(&wr->message, WR_WEIGHTS, space->weights_len);
	kvx_msg_append(&wr->message, adapter, space->adapter_len);
}

void wr_add_device(wr_t *wr, uint32_t mem, const char *uuid)
{
	kvx_msg_gpu_mem_t *device = add(wr, KVX_RECORD_GPU_MEM, sizeof *device);

	device->mem = mem;
	device->text_len = (uint32_t)strlen(uuid);
	kvx_msg_append(&wr->message, uuid, device->text_len);
}

void wr_add_work(wr_t *wr, uint32_t longest, uint32_t us)
{
	kvx_msg_work_t *work = add(wr, KVX_RECORD_WORK, sizeof *work);

	work->longest = longest;
	work->us = us;
}

void wr_add_time(wr_t *wr)
{
	(void)add(wr, KVX_RECORD_TIME, sizeof(kvx_msg_time_t));
}

void wr_message_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags)
{
	wr_message(wr);
	wr_add_fence(wr, wr_other, 8);
	wr_add_load(wr, lease, flags, 7, wr_other, 8);
}

/* ---- hooks of a step ------------------------------------------------------------------------- */

void wr_begin(wr_t *wr)
{
	kvx_msg_finish(&wr->message, wr->step);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_begin_step(wr->rank[r].worker, wr->message.data, wr->message.len);
	}
}

void wr_run_loads(wr_t *wr)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_start_async_loads(wr->rank[r].worker);
		kvx_worker_run_sync_loads(wr->rank[r].worker);
	}
}

void wr_end(wr_t *wr)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_end_step(wr->rank[r].worker);
	}
}

void wr_step(wr_t *wr)
{
	wr_begin(wr);
	wr_run_loads(wr);
	wr_end(wr);
}

void wr_await_layers(const wr_rank_t *rank)
{
	for (uint32_t l = 0; l < rank->layers; l++) {
		kvx_worker_await_layer(rank->worker, l);
	}
}

int wr_begin_layered(wr_t *wr, const kvc_lease_t *lease)
{
	fill_other(wr, 5);
	wr_message_load(wr, lease, 0);
	wr_begin(wr);
	kvx_worker_start_async_loads(wr->rank[0].worker);

	return kvx_worker_run_layered_loads(wr->rank[0].worker);
}

int wr_prefetch(wr_t *wr, uint32_t flags)
{
	kvx_msg_finish(&wr->message, wr->step);

	return kvx_worker_prefetch_step(wr->rank[0].worker, wr->message.data, wr->message.len, flags);
}

void wr_wait_prefetched(const wr_t *wr)
{
	const _Atomic uint32_t *state = &wr->rank[0].worker->gpu->presend;

	KV_AWAIT(atomic_load(state) != KVX_PRESEND_ASKED && atomic_load(state) != KVX_PRESEND_BUSY);
}

uint32_t wr_count_failed(wr_t *wr)
{
	uint32_t ids[WR_BLOCKS];

	return kvx_worker_take_failed_blocks(wr->rank[0].worker, ids, WR_BLOCKS);
}

uint64_t wr_count_open(const wr_t *wr, uint32_t r)
{
	const kvx_worker_stats_t stats = wr_stats(wr, r);

	return stats.loads_open + stats.saves_open + stats.marked;
}

/* All that the rank has to say; how much is open. */
static uint64_t hear(wr_t *wr, uint32_t r)
{
	kvx_worker_t *worker = wr->rank[r].worker;
	uint32_t ids[WR_BLOCKS];
	const void *bytes;
	char id[16];
	size_t len;

	while (kvx_worker_take_finished(worker, id, sizeof id, NULL) > 0) {
	}
	(void)kvx_worker_take_failed_blocks(worker, ids, WR_BLOCKS);
	kvx_worker_take_report(worker, &bytes, &len);

	return wr_count_open(wr, r);
}

void wr_drain(wr_t *wr)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		KV_AWAIT(hear(wr, r) == 0);
	}
}

/* ---- the store ------------------------------------------------------------------------------- */

kvc_put_t *wr_put(wr_t *wr, uint32_t from, uint32_t n)
{
	const kvc_put_options_t options = {
		.struct_size = sizeof options, .writers = wr->writers, .writer_count = wr->rank_count};
	kvc_put_t *put = NULL;

	assert_int_equal(kvc_put_start(wr->space, wr->keys, from, n, &options, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, WR_PATIENCE), KVC_OK);
	assert_int_equal(kvc_put_n(put), n - from);

	return put;
}

kvc_status_t wr_put_wait(kvc_put_t *put)
{
	const kvc_status_t status = kvc_put_wait(put, 0, WR_PATIENCE);

	kvc_put_free(put);

	return status;
}

kvc_lease_t *wr_lease(wr_t *wr, uint32_t skip, uint32_t n)
{
	kvc_lease_t *lease = NULL;

	assert_int_equal(kvc_acquire(wr->space, wr->keys, n, skip, 60000, &lease), KVC_OK);
	assert_int_equal(kvc_lease_n(lease), n);

	return lease;
}

/* The daemon answers what one connection sends in its order. */
void wr_revoke(wr_t *wr, kvc_lease_t *lease)
{
	char *json = NULL;

	kvc_release(&lease, 1);
	assert_int_equal(kvc_document(wr->kvc, KVC_DOC_STATUS, 0, &json, NULL), KVC_OK);
	kvc_free(json);
}

void wr_save(wr_t *wr, const kvc_put_t *put, const uint32_t *ids, uint32_t n)
{
	wr_message(wr);
	wr_add_save(wr, put, 0, ids, n);
	wr_begin(wr);
	wr_end(wr);
}

/* ---- reports --------------------------------------------------------------------------------- */

uint32_t wr_take_records(wr_rank_t *rank, uint32_t type, void *out, size_t size, uint32_t cap)
{
	const kvx_record_header_t *record;
	const void *bytes;
	kvx_msg_reader_t cursor;
	uint32_t n = 0;
	size_t len;

	kvx_worker_take_report(rank->worker, &bytes, &len);
	if (len == 0) {
		return 0;
	}
	assert_true(kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len));
	while ((record = kvx_msg_next(&cursor)) != NULL) {
		if (record->type == type) {
			assert_true(n < cap);
			memcpy((uint8_t *)out + n++ * size, record, size);
		} else {
			assert_true(type == KVX_RECORD_STEP && record->type == KVX_RECORD_LOADED);
		}
	}
	assert_false(cursor.bad);

	return n;
}

uint32_t wr_take_steps(wr_t *wr, kvx_report_step_t *steps, uint32_t cap)
{
	uint64_t open;
	uint32_t n = 0;

	KV_AWAIT(
		((void)wr_count_failed(wr), open = wr_stats(wr, 0).loads_open,
		 n += wr_take_records(&wr->rank[0], KVX_RECORD_STEP, n > 0 ? steps + n : steps, sizeof *steps, cap - n),
		 open == 0));

	return n;
}

void wr_wait_load(wr_t *wr, uint32_t flags, wr_end_t *end)
{
	wr_rank_t *rank = &wr->rank[0];

	*end = (wr_end_t){0};
	if (flags & KVX_MSG_ASYNC) {
		KV_AWAIT(kvx_worker_take_finished(rank->worker, end->id, sizeof end->id, &end->failed) > 0);
		assert_string_equal(end->id, "request-7");
		assert_int_equal(kvx_worker_take_finished(rank->worker, end->id, sizeof end->id, NULL), 0);
	}
	end->error_count = kvx_worker_take_failed_blocks(rank->worker, end->errors, WR_BLOCKS);
	KV_AWAIT(wr_take_records(rank, KVX_RECORD_LOADED, &end->loaded, sizeof end->loaded, 1) > 0);
	assert_int_equal(end->loaded.load, 7);
}

void wr_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, wr_end_t *end)
{
	wr_message_load(wr, lease, flags);
	wr_step(wr);
	wr_wait_load(wr, flags, end);
}

void wr_check_other(wr_t *wr, uint32_t seed)
{
	for (uint32_t i = 0; i < 8; i++) {
		assert_true(wr_block_is(&wr->rank[0], wr_other[i], seed, wr_eight[i]));
	}
}

uint64_t wr_wait_dropped(wr_t *wr)
{
	kvx_report_dropped_t dropped;

	KV_AWAIT(wr_take_records(&wr->rank[0], KVX_RECORD_DROPPED, &dropped, sizeof dropped, 1) > 0);

	return dropped.put;
}

void wr_check_silent(wr_rank_t *rank)
{
	const void *bytes;
	uint32_t id;
	size_t len;
	char name[4];

	assert_int_equal(kvx_worker_take_finished(rank->worker, name, sizeof name, NULL), 0);
	assert_int_equal(kvx_worker_take_failed_blocks(rank->worker, &id, 1), 0);
	kvx_worker_take_report(rank->worker, &bytes, &len);
	assert_int_equal(len, 0);
}
