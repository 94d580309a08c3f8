#include "connectors/worker/worker_rig.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"

#include "kv/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const uint32_t wr_eight[8] = {1, 2, 3, 4, 5, 6, 7, 8};
const uint32_t wr_other[8] = {21, 30, 23, 40, 25, 50, 27, 63};

static const uint8_t secret[16] = "sixteen bytes!!!";

uint64_t wr_now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

/* ---- members --------------------------------------------------------------------------------- */

static void describe(wr_t *wr)
{
	wr->layout = (kvk_layout_t){.heads = 1,
				    .layers = WR_LAYERS,
				    .block_tokens = 32,
				    .dtype = KVK_DTYPE_F32,
				    .inner = KVK_INNER_OPAQUE,
				    .page_bytes = WR_PAGE};
	assert_int_equal(kvk_layout_format(&wr->layout, wr->layout_text, sizeof wr->layout_text), KV_OK);
	wr->identity = (kvc_identity_t){.struct_size = sizeof wr->identity,
					.model = "worker test",
					.weights = "w1",
					.dtype = "f32",
					.rope = "r",
					.hash_tokens = 32,
					.layout = wr->layout_text,
					.groups = wr->groups,
					.page_format = "test"};
}

static void make_cache(wr_t *wr, uint32_t r)
{
	wr_rank_t *rank = &wr->rank[r];

	rank->layers = WR_LAYERS / wr->rank_count;
	rank->cache = wr_device_alloc((size_t)rank->layers * WR_BLOCKS * WR_PAGE);
	assert_non_null(rank->cache);
	for (uint32_t l = 0; l < rank->layers; l++) {
		rank->base[l] = rank->cache + (size_t)l * WR_BLOCKS * WR_PAGE;
	}
	rank->paged = (kvk_paged_t){.kind = KVK_PAGED_OPAQUE,
				    .blocks = WR_BLOCKS,
				    .layers = rank->layers,
				    .first_layer = r * (WR_LAYERS / wr->rank_count),
				    .heads = 1,
				    .block_tokens = 32,
				    .dtype = KVK_DTYPE_F32,
				    .page_bytes = WR_PAGE,
				    .base = rank->base};
	rank->padded = rank->paged;
	rank->padded.layers = wr->layers;
	wr->writers[r] = (kvc_writer_t){.rank = r,
					.head_count = 1,
					.layer_first = rank->paged.first_layer,
					.layer_count = WR_LAYERS / wr->rank_count};
}

void wr_open_rank(wr_t *wr, uint32_t r, int prove)
{
	const kvx_worker_group_t groups[2] = {{0, &wr->rank[r].paged}, {1, &wr->rank[r].padded}};
	kvx_worker_config_t config = {.struct_size = sizeof config,
				      .socket = wr->rig->socket,
				      .instance = "worker-test",
				      .secret = secret,
				      .secret_len = sizeof secret,
				      .rank = r,
				      .identity = &wr->identity,
				      .layout = &wr->layout,
				      .range = wr->writers[r],
				      .groups = groups,
				      .group_count = wr->groups ? 2 : 1,
				      .threads = r == 0 ? 3 : 1,
				      .layer_bytes = wr->layer_bytes,
				      .layer_wait_us = wr->layer_wait_us};
	const uint64_t until = wr_now_ms() + WR_PATIENCE;

	wr_device_config(&config);
	assert_int_equal(kvx_worker_open(&config, &wr->rank[r].worker), KVC_OK);
	wr_device_stream(wr->rank[r].worker);
	while (prove && kvx_worker_self_test_status(wr->rank[r].worker) == KVC_PENDING && wr_now_ms() < until) {
		usleep(1000);
	}
	if (prove) {
		assert_int_equal(kvx_worker_self_test_status(wr->rank[r].worker), KVC_OK);
	}
}

static void attach_scheduler(wr_t *wr)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = wr->rig->socket,
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

void wr_init_with(wr_t *wr, rig_t *rig, uint32_t ranks, int daemon)
{
	wr->rig = rig;
	wr->rank_count = ranks;
	wr->timeout_ms = WR_LOAD_MS;
	wr_device_start(WR_SEED);
	describe(wr);
	if (daemon) {
		attach_scheduler(wr);
		rig->run_iteration = run_iteration;
		rig->iteration_ctx = wr;
	}
	for (uint32_t r = 0; r < ranks; r++) {
		make_cache(wr, r);
		wr_open_rank(wr, r, daemon);
	}
}

void wr_init(wr_t *wr, rig_t *rig, uint32_t ranks)
{
	*wr = (wr_t){0};
	wr_init_with(wr, rig, ranks, 1);
}

void wr_fini(wr_t *wr)
{
	wr->rig->run_iteration = NULL;
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_close(wr->rank[r].worker);
		wr_device_free(wr->rank[r].cache);
	}
	wr_device_stop();
	kvc_space_close(wr->space);
	kvc_detach(wr->kvc);
	kvx_msg_free(&wr->plan);
}

void wr_start(wr_t *wr, rig_t *rig, const char *program, uint32_t ranks)
{
	rig_init(rig, program);
	rig_start(rig);
	wr_init(wr, rig, ranks);
	wr_fill(wr, 1);
	wr_store(wr, wr_eight, 8);
}

void wr_finish(wr_t *wr, rig_t *rig)
{
	rig_check_quiet(rig);
	wr_fini(wr);
	rig_fini(rig);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static uint8_t byte_of(uint32_t seed, uint32_t block, uint32_t layer, uint32_t i)
{
	return (uint8_t)((i * 7u + block * 31u + layer * 101u + seed * 57u) * 2654435761u >> 11);
}

/* A block of a rank, and what its bytes are or should be. */
typedef struct content {
	const wr_rank_t *rank;
	uint32_t block, seed, as, layer;
	uint32_t *wrong; /* counted */
} content_t;

static void write_block(void *args)
{
	const content_t *c = args;
	const wr_rank_t *rank = c->rank;

	for (uint32_t l = 0; l < rank->layers; l++) {
		uint8_t *at = (uint8_t *)rank->base[l] + (size_t)c->block * WR_PAGE;

		for (uint32_t i = 0; i < WR_PAGE; i++) {
			at[i] = byte_of(c->seed, c->as, rank->paged.first_layer + l, i);
		}
	}
}

static content_t *content(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as)
{
	content_t *c = malloc(sizeof *c);

	assert_non_null(c);
	*c = (content_t){.rank = rank, .block = block, .seed = seed, .as = as};

	return c;
}

void wr_fill_block(wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as)
{
	wr_device_call(write_block, content(rank, block, seed, as));
}

static int layer_is(const wr_rank_t *rank, uint32_t block, uint32_t l, uint32_t seed, uint32_t as)
{
	const uint8_t *at = (const uint8_t *)rank->base[l] + (size_t)block * WR_PAGE;

	for (uint32_t i = 0; i < WR_PAGE; i++) {
		if (at[i] != byte_of(seed, as, rank->paged.first_layer + l, i)) {
			return 0;
		}
	}

	return 1;
}

static int block_is(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as)
{
	for (uint32_t l = 0; l < rank->layers; l++) {
		if (!layer_is(rank, block, l, seed, as)) {
			return 0;
		}
	}

	return 1;
}

int wr_block_is(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as)
{
	wr_device_sync();

	return block_is(rank, block, seed, as);
}

static void read_block(void *args)
{
	const content_t *c = args;

	*c->wrong += !block_is(c->rank, c->block, c->seed, c->as);
}

void wr_look_block(const wr_rank_t *rank, uint32_t block, uint32_t seed, uint32_t as, uint32_t *p_wrong)
{
	content_t *c = content(rank, block, seed, as);

	c->wrong = p_wrong;
	wr_device_call(read_block, c);
}

static void read_layer(void *args)
{
	const content_t *c = args;

	*c->wrong += !layer_is(c->rank, c->block, c->layer, c->seed, c->as);
}

void wr_look_layer(const wr_rank_t *rank, uint32_t block, uint32_t layer, uint32_t as, uint32_t *p_wrong)
{
	content_t *c = content(rank, block, 1, as);

	c->wrong = p_wrong;
	c->layer = layer;
	wr_device_call(read_layer, c);
}

void wr_fill(wr_t *wr, uint32_t seed)
{
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		for (uint32_t b = 0; b < WR_BLOCKS; b++) {
			wr_fill_block(&wr->rank[r], b, seed, b);
		}
	}
}

/* ---- plans ----------------------------------------------------------------------------------- */

void wr_plan(wr_t *wr)
{
	wr->step++;
	kvx_msg_reset(&wr->plan, KVX_MSG_MAGIC);
}

void wr_plan_fence(wr_t *wr, const uint32_t *ids, uint32_t n)
{
	kvx_msg_fence_t *fence = kvx_msg_add_record(&wr->plan, KVX_RECORD_FENCE, sizeof *fence);

	assert_non_null(fence);
	fence->n = n;
	kvx_msg_append(&wr->plan, ids, n * sizeof *ids);
}

void wr_plan_save(wr_t *wr, const kvc_put_t *put, uint32_t flags, const uint32_t *ids, uint32_t n)
{
	kvx_msg_save_t *save = kvx_msg_add_record(&wr->plan, KVX_RECORD_SAVE, sizeof *save);

	assert_non_null(save);
	save->flags = flags;
	save->group = wr->group;
	save->n = n;
	save->step = flags & KVX_MSG_COMPLETE ? wr->step - 2 : wr->step;
	assert_int_equal(kvc_put_export(put, &save->put), KVC_OK);
	kvx_msg_append(&wr->plan, ids, n * sizeof *ids);
}

void wr_plan_load(wr_t *wr, const kvc_lease_t *lease, uint32_t flags, uint64_t load, const uint32_t *ids, uint32_t n)
{
	kvx_msg_load_t *record = kvx_msg_add_record(&wr->plan, KVX_RECORD_LOAD, sizeof *record);
	kvx_msg_part_t part = {.n = n, .group = wr->group};
	char id[16];

	assert_non_null(record);
	(void)snprintf(id, sizeof id, "request-%u", (unsigned)load);
	record->load = load;
	record->flags = lease ? flags : flags | KVX_MSG_NO_LEASE;
	record->timeout_ms = wr->timeout_ms;
	record->parts = 1;
	record->space = wr->number;
	record->id_len = (uint32_t)strlen(id);
	if (lease) {
		assert_int_equal(kvc_lease_export(lease, &part.lease), KVC_OK);
		part.first = kvc_lease_skip(lease);
		part.lease.n = wr->forge_n ? wr->forge_n : part.lease.n;
	}
	kvx_msg_append(&wr->plan, id, record->id_len);
	kvx_msg_append(&wr->plan, &part, sizeof part);
	kvx_msg_append(&wr->plan, ids, n * sizeof *ids);
}

void wr_plan_drop(wr_t *wr, uint64_t load)
{
	kvx_msg_drop_t *drop = kvx_msg_add_record(&wr->plan, KVX_RECORD_DROP, sizeof *drop);

	assert_non_null(drop);
	drop->load = load;
}

void wr_plan_space(wr_t *wr, uint32_t number, const char *text)
{
	kvx_msg_space_t *space = kvx_msg_add_record(&wr->plan, KVX_RECORD_SPACE, sizeof *space);

	assert_non_null(space);
	space->number = number;
	space->text_len = (uint32_t)strlen(text);
	kvx_msg_append(&wr->plan, text, space->text_len);
}

void wr_begin(wr_t *wr)
{
	kvx_msg_finish(&wr->plan, wr->step);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_begin_step(wr->rank[r].worker, wr->plan.data, wr->plan.len);
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

static void key_at(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((const kvc_key_t *)ctx)[i];
}

kvc_lease_t *wr_lease_keys(wr_t *wr, const kvc_key_t *keys, uint32_t n)
{
	const kvc_key_source_t source = {key_at, (void *)(uintptr_t)keys};
	const kvc_want_t want = {.struct_size = sizeof want, .group = 1, .n = n, .ttl_ms = 60000, .source = &source};
	kvc_lease_t *lease = NULL;

	if (kvc_lease_start(wr->space, &want, &lease) != KVC_OK) {
		return NULL;
	}
	while (kvc_lease_state(lease) == KVC_PENDING) {
		(void)kvc_poll(wr->kvc, 1);
	}
	if (kvc_lease_state(lease) != KVC_OK) {
		kvc_release(&lease, 1);
		return NULL;
	}

	return lease;
}

kvc_put_t *wr_put_keys(wr_t *wr, const kvc_key_t *keys, uint32_t n)
{
	const kvc_put_options_t options = {
		.struct_size = sizeof options, .writers = wr->writers, .writer_count = wr->rank_count, .group = 1};
	kvc_put_t *put = NULL;

	return kvc_put_start(wr->space, keys, 0, n, &options, &put) == KVC_OK ? put : NULL;
}

kvc_status_t wr_put_wait(wr_t *wr, kvc_put_t *put)
{
	const kvc_status_t status = kvc_put_wait(put, 0, WR_PATIENCE);

	(void)wr;
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

void wr_store(wr_t *wr, const uint32_t *ids, uint32_t n)
{
	kvc_put_t *put = wr_put(wr, 0, n);

	wr_plan(wr);
	wr_plan_save(wr, put, 0, ids, n);
	wr_begin(wr);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		kvx_worker_end_step(wr->rank[r].worker);
	}
	assert_int_equal(wr_put_wait(wr, put), KVC_OK);
	for (uint32_t r = 0; r < wr->rank_count; r++) {
		assert_int_equal(kvx_worker_flush(wr->rank[r].worker, WR_PATIENCE), KVC_OK);
		wr_check_silent(&wr->rank[r]);
	}
}

/* ---- reports --------------------------------------------------------------------------------- */

/* The only record of the report at hand, of that type; 0: there is no report. */
static int one_record(wr_rank_t *rank, uint32_t type, void *out, size_t size)
{
	const kvx_record_header_t *record;
	const void *bytes;
	kvx_msg_reader_t cursor;
	size_t len;

	kvx_worker_take_report(rank->worker, &bytes, &len);
	if (len == 0) {
		return 0;
	}
	assert_true(kvx_msg_open(&cursor, KVX_REPORT_MAGIC, bytes, len));
	record = kvx_msg_next(&cursor);
	assert_non_null(record);
	assert_int_equal(record->type, type);
	memcpy(out, record, size);
	assert_null(kvx_msg_next(&cursor));
	assert_int_equal(cursor.bad, 0);

	return 1;
}

/* Of one report. */
static uint32_t steps_of(wr_rank_t *rank, kvx_report_step_t *steps, uint32_t cap)
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
		if (record->type == KVX_RECORD_LOADED) {
			continue;
		}
		assert_int_equal(record->type, KVX_RECORD_STEP);
		assert_true(n < cap);
		memcpy(&steps[n++], record, sizeof steps[0]);
	}
	assert_false(cursor.bad);

	return n;
}

uint32_t wr_hear_steps(wr_t *wr, kvx_report_step_t *steps, uint32_t cap)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};
	kvx_worker_t *worker = wr->rank[0].worker;
	uint32_t ids[WR_BLOCKS], n = 0;

	do {
		assert_true(wr_now_ms() < until);
		(void)kvx_worker_take_failed_blocks(worker, ids, WR_BLOCKS);
		kvx_worker_get_stats(worker, &stats);
		n += steps_of(&wr->rank[0], steps + n, cap - n);
		usleep(stats.loads_open ? 500 : 0);
	} while (stats.loads_open);

	return n;
}

void wr_wait_load(wr_rank_t *rank, uint64_t load, int async, wr_end_t *end)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	char expected[16];
	uint32_t len = 0;

	*end = (wr_end_t){0};
	while (async && len == 0 && wr_now_ms() < until) {
		len = kvx_worker_take_finished(rank->worker, end->id, sizeof end->id, &end->failed);
		if (len == 0) {
			usleep(200);
		}
	}
	if (async) {
		(void)snprintf(expected, sizeof expected, "request-%u", (unsigned)load);
		assert_string_equal(end->id, expected);
		assert_int_equal(kvx_worker_take_finished(rank->worker, end->id, sizeof end->id, NULL), 0);
	}
	end->error_count = kvx_worker_take_failed_blocks(rank->worker, end->errors, WR_BLOCKS);
	while (!one_record(rank, KVX_RECORD_LOADED, &end->loaded, sizeof end->loaded)) {
		assert_true(wr_now_ms() < until);
		usleep(200);
	}
	assert_true(end->loaded.load == load);
}

uint64_t wr_wait_dropped(wr_rank_t *rank)
{
	const uint64_t until = wr_now_ms() + WR_PATIENCE;
	kvx_report_dropped_t dropped;

	while (!one_record(rank, KVX_RECORD_DROPPED, &dropped, sizeof dropped)) {
		assert_true(wr_now_ms() < until);
		usleep(200);
	}

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
