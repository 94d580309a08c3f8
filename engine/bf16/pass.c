/* A rank on a device: memory, what a step says to it, and the pass through all layers. */
#include "bf16/pass.h"

#include <stdlib.h>
#include <string.h>

#define LINE 256u

/* ---- memory ---------------------------------------------------------------------------------- */

typedef struct arena {
	uint8_t *base; /* NULL: it is only measured */
	size_t used;
} arena_t;

static void *carve(arena_t *arena, size_t n, size_t bytes)
{
	void *at = arena->base ? arena->base + arena->used : NULL;

	arena->used += (n * bytes + LINE - 1) / LINE * LINE;

	return at;
}

static kvk_bf16_t *carve_rows(arena_t *arena, size_t rows, size_t width)
{
	return carve(arena, rows * width, sizeof(kvk_bf16_t));
}

static size_t round_up(size_t n)
{
	return (n + LINE - 1) / LINE * LINE;
}

/* What a step says of a microbatch, at most. */
static size_t said_bytes(const kve_group_t *group)
{
	const kve_config_t *c = &group->model.config;
	const size_t blocks = (size_t)KVE_MAX_SPANS * (c->max_tokens / c->block_tokens);

	return round_up(group->max_rows * sizeof(uint32_t)) + round_up(group->max_rows * sizeof(kvk_nn_row_t)) +
	       round_up(group->max_rows * sizeof(kvk_nn_tile_t)) + round_up(KVE_MAX_SPANS * sizeof(uint32_t)) +
	       round_up(blocks * sizeof(uint32_t));
}

static void place_microbatch(kve_bf16_microbatch_t *m, const kve_group_t *group, arena_t *arena)
{
	const kve_config_t *c = &group->model.config;
	const size_t rows = group->max_rows;

	m->x = carve(arena, rows * c->hidden, sizeof(float));
	m->sent = carve_rows(arena, rows, c->hidden);
	m->said = carve(arena, 1, said_bytes(group));
	if (c->experts) {
		m->combined = carve_rows(arena, rows, c->hidden);
		m->ids = carve(arena, rows * c->top_k, sizeof(uint32_t));
		m->weights = carve(arena, rows * c->top_k, sizeof(float));
	}
}

static void place_activations(kve_bf16_rank_t *own, const kve_group_t *group, arena_t *arena)
{
	const kve_config_t *c = &group->model.config;
	const size_t rows = group->max_rows, q = (size_t)c->heads * c->head_dim;

	for (uint32_t i = 0; i < KVE_MAX_MICROBATCHES; i++) {
		place_microbatch(&own->microbatches[i], group, arena);
	}
	own->normed = carve_rows(arena, rows, c->hidden);
	own->qkv = carve_rows(arena, rows, q + (size_t)2 * c->kv_heads * c->head_dim);
	own->q = carve_rows(arena, rows, q);
	own->attended = carve_rows(arena, rows, q);
	own->inner = carve_rows(arena, rows, c->inner);
	own->logits = carve(arena, (size_t)KVE_MAX_SPANS * c->vocab, sizeof(float));
	own->chosen = carve(arena, KVE_MAX_SPANS, sizeof(uint32_t));
	if (c->experts) {
		own->router = carve(arena, rows * c->experts, sizeof(float));
		own->expert_inner = carve_rows(arena, group->plan.max_rows, c->expert_inner);
		own->outputs = carve_rows(arena, group->plan.max_rows, c->hidden);
	}
}

static size_t workspace_bytes(const kve_group_t *group)
{
	kve_bf16_rank_t none = {.device = NULL};
	arena_t arena = {.base = NULL};

	place_activations(&none, group, &arena);

	return arena.used;
}

static kv_status_t open_memory(kve_rank_t *rank, kve_bf16_rank_t *own)
{
	const kve_group_t *group = rank->group;
	const kve_config_t *c = &rank->model->config;
	kve_device_t *device = own->device;
	const kve_bf16_share_t share = {rank->number, group->ranks};
	arena_t arena = {.base = NULL};
	kv_status_t status = device->ops->alloc(device, workspace_bytes(group), &own->memory);
	void *logits, *chosen;

	if (status != KV_OK) {
		return status;
	}
	arena.base = own->memory;
	place_activations(own, group, &arena);
	for (uint32_t i = 0; i < KVE_MAX_MICROBATCHES && status == KV_OK; i++) {
		status = device->ops->alloc_host(device, said_bytes(group), &own->said[i]);
	}
	if (status == KV_OK) {
		status = device->ops->alloc_host(device, (size_t)KVE_MAX_SPANS * c->vocab * sizeof(float), &logits);
		own->host_logits = status == KV_OK ? logits : NULL;
	}
	if (status == KV_OK) {
		status = device->ops->alloc_host(device, KVE_MAX_SPANS * sizeof(uint32_t), &chosen);
		own->host_chosen = status == KV_OK ? chosen : NULL;
	}

	return status == KV_OK ? kve_bf16_weights_init(&own->weights, device, c, &share) : status;
}

static void close_rank(kve_rank_t *rank)
{
	kve_bf16_rank_t *own = rank->bf16;
	kve_device_t *device = own ? own->device : NULL;

	if (!own) {
		return;
	}
	device->ops->ep_close(device);
	kve_bf16_weights_fini(&own->weights, device);
	for (uint32_t i = 0; i < KVE_MAX_MICROBATCHES; i++) {
		device->ops->free_host(device, own->said[i]);
	}
	device->ops->free_host(device, own->host_logits);
	device->ops->free_host(device, own->host_chosen);
	device->ops->free(device, own->memory);
	free(own);
	rank->bf16 = NULL;
}

static kv_status_t open_rank(kve_rank_t *rank)
{
	kve_bf16_rank_t *own = calloc(1, sizeof *own);
	kv_status_t status;

	if (!own) {
		return KV_ERR_NOMEM;
	}
	rank->bf16 = own;
	own->device = rank->group->devices->of[rank->number];
	status = open_memory(rank, own);
	if (status == KV_OK && rank->model->config.experts) {
		status = own->device->ops->ep_open(own->device, &rank->group->plan, rank->number);
	}

	return status;
}

/* ---- what a step says ------------------------------------------------------------------------ */

/* Host memory that is copied to the device at once: each part is written at `host` and read at `device`. */
typedef struct saying {
	uint8_t *host;
	const uint8_t *device;
	size_t used;
} saying_t;

static void *say_part(saying_t *saying, size_t bytes, const void *p_device)
{
	void *host = saying->host + saying->used;
	const void *device = saying->device + saying->used;

	memcpy((void *)(uintptr_t)p_device, &device, sizeof device);
	saying->used += round_up(bytes);

	return host;
}

static uint32_t blocks_of(const kve_config_t *c, const kve_span_t *span)
{
	return (span->start + span->n + c->block_tokens - 1) / c->block_tokens;
}

/* Longest first: what is left at the end is short. */
static int by_keys(const void *a, const void *b)
{
	const kvk_nn_tile_t *x = a, *y = b;
	const uint32_t of_x = x->position + x->rows, of_y = y->position + y->rows;

	return of_x != of_y ? (of_x < of_y ? 1 : -1) : (x->row > y->row) - (x->row < y->row);
}

static uint32_t cut_tiles(const kve_config_t *c, const kve_microbatch_t *m, kvk_nn_tile_t *tiles, uint32_t *p_most_rows)
{
	const kvk_nn_heads_t shape = {c->heads, c->kv_heads, c->head_dim, c->block_tokens};
	const uint32_t most = kvk_nn_tile_rows(&shape);
	uint32_t n = 0, row = 0;

	*p_most_rows = 0;
	for (uint32_t s = 0; s < m->n_spans; s++) {
		for (uint32_t i = 0; i < m->spans[s].n; i += most) {
			const uint32_t left = m->spans[s].n - i, rows = left < most ? left : most;

			tiles[n++] = (kvk_nn_tile_t){row + i, rows, s, m->spans[s].start + i};
			*p_most_rows = rows > *p_most_rows ? rows : *p_most_rows;
		}
		row += m->spans[s].n;
	}
	qsort(tiles, n, sizeof *tiles, by_keys);

	return n;
}

static kv_status_t say_microbatch(kve_rank_t *rank, uint32_t number)
{
	const kve_config_t *c = &rank->model->config;
	const kve_microbatch_t *m = &rank->microbatches[number];
	kve_bf16_rank_t *own = rank->bf16;
	kve_bf16_microbatch_t *out = &own->microbatches[number];
	saying_t saying = {own->said[number], out->said, 0};
	uint32_t *tokens = say_part(&saying, m->rows * sizeof *tokens, &out->tokens);
	kvk_nn_row_t *places = say_part(&saying, m->rows * sizeof *places, &out->places);
	kvk_nn_tile_t *tiles = say_part(&saying, m->rows * sizeof *tiles, &out->tile);
	uint32_t *pick = say_part(&saying, m->n_spans * sizeof *pick, &out->pick), *blocks, row = 0;

	out->picks = out->wants_logits = out->max_blocks = 0;
	for (uint32_t s = 0; s < m->n_spans; s++) {
		const uint32_t n = blocks_of(c, &m->spans[s]);

		out->max_blocks = n > out->max_blocks ? n : out->max_blocks;
	}
	blocks = say_part(&saying, (size_t)m->n_spans * out->max_blocks * sizeof *blocks, &out->blocks);
	for (uint32_t s = 0; s < m->n_spans; s++) {
		const kve_span_t *span = &m->spans[s];

		memcpy(tokens + row, span->tokens, span->n * sizeof *tokens);
		memcpy(blocks + (size_t)s * out->max_blocks, span->blocks, blocks_of(c, span) * sizeof *blocks);
		for (uint32_t i = 0; i < span->n; i++) {
			places[row + i] = (kvk_nn_row_t){s, span->start + i};
		}
		row += span->n;
		if (kve_span_is_picked(span)) {
			pick[out->picks++] = row - 1;
			out->wants_logits |= span->logits != NULL;
		}
	}
	out->tiles = cut_tiles(c, m, tiles, &out->most_rows);

	return own->device->ops->copy(own->device, out->said, saying.host, saying.used);
}

static kv_status_t begin(kve_rank_t *rank, uint32_t number)
{
	kve_bf16_rank_t *own = rank->bf16;
	kve_bf16_microbatch_t *m = &own->microbatches[number];
	kv_status_t status = say_microbatch(rank, number);
	const kvk_nn_embed_t embed = {.rows = rank->microbatches[number].rows,
				      .hidden = rank->model->config.hidden,
				      .tokens = m->tokens,
				      .table = own->weights.embedding,
				      .x = m->x};

	return status == KV_OK ? kvk_nn_embed(own->nn, &embed, own->device->streams[KVE_STREAM_COMPUTE]) : status;
}

/* ---- what it answers ------------------------------------------------------------------------- */

/* Logits of the microbatch's picked rows. */
static kv_status_t enqueue_logits(kve_rank_t *rank, uint32_t number, float *logits)
{
	const kve_config_t *c = &rank->model->config;
	kve_bf16_rank_t *own = rank->bf16;
	kve_bf16_microbatch_t *m = &own->microbatches[number];
	kvk_cu_stream_t stream = own->device->streams[KVE_STREAM_COMPUTE];
	kvk_nn_norm_t norm = {.rows = rank->microbatches[number].rows,
			      .hidden = c->hidden,
			      .x = m->x,
			      .added = c->experts ? m->combined : NULL,
			      .gain = own->weights.final_norm,
			      .eps = c->norm_eps};
	const kvk_nn_product_t product = {.k = c->hidden,
					  .n = c->vocab,
					  .groups = 1,
					  .max_rows = m->picks,
					  .x = own->normed,
					  .w = own->weights.head,
					  .y = logits,
					  .out = KVK_NN_F32};
	kv_status_t status = norm.added && m->picks ? kvk_nn_norm(own->nn, &norm, stream) : KV_OK;

	norm.added = NULL;
	norm.rows = m->picks;
	norm.pick = m->pick;
	norm.y = own->normed;
	if (status == KV_OK) {
		status = kvk_nn_norm(own->nn, &norm, stream);
	}

	return status == KV_OK ? kvk_nn_product(own->nn, &product, stream) : status;
}

/* What the picked rows choose, and their logits where one of them is wanted, to host memory from number `first` on. */
static kv_status_t enqueue_answers(kve_rank_t *rank, uint32_t number, uint32_t first)
{
	const size_t vocab = rank->model->config.vocab;
	kve_bf16_rank_t *own = rank->bf16;
	const kve_bf16_microbatch_t *m = &own->microbatches[number];
	kve_device_t *device = own->device;
	float *logits = own->logits + first * vocab;
	const kvk_nn_choose_t choose = {
		.rows = m->picks, .vocab = (uint32_t)vocab, .logits = logits, .ids = own->chosen + first};
	kv_status_t status = enqueue_logits(rank, number, logits);

	if (status == KV_OK) {
		status = kvk_nn_choose(own->nn, &choose, device->streams[KVE_STREAM_COMPUTE]);
	}
	if (status == KV_OK) {
		status = device->ops->copy(device, own->host_chosen + first, choose.ids, m->picks * sizeof *choose.ids);
	}

	return status == KV_OK && m->wants_logits ? device->ops->copy(device, own->host_logits + first * vocab, logits,
								      m->picks * vocab * sizeof *logits)
						  : status;
}

static void take_answers(kve_rank_t *rank, uint32_t last)
{
	const size_t vocab = rank->model->config.vocab;
	const float *logits = rank->bf16->host_logits;
	const uint32_t *chosen = rank->bf16->host_chosen;

	for (uint32_t i = 0; i <= last; i++) {
		const kve_microbatch_t *m = &rank->microbatches[i];

		for (uint32_t s = 0; s < m->n_spans; s++) {
			const kve_span_t *span = &m->spans[s];

			if (!kve_span_is_picked(span)) {
				continue;
			}
			if (span->logits) {
				memcpy(span->logits, logits, vocab * sizeof *logits);
			}
			if (span->chosen) {
				*span->chosen = *chosen;
			}
			logits += vocab;
			chosen++;
		}
	}
}

/* ---- the pass -------------------------------------------------------------------------------- */

/* Marks 2 i and 2 i + 1 are before and after item i. */
static kv_status_t begin_item(kve_bf16_rank_t *own, kve_stream_t stream)
{
	kve_device_t *device = own->device;
	kv_status_t status = KV_OK;

	if (own->trace == KVE_TRACE_APART && own->item > 0) {
		status = device->ops->wait(device, KVE_EVENT_APART, stream);
	}

	return status == KV_OK && own->trace ? device->ops->mark(device, 2 * own->item, stream) : status;
}

static kv_status_t end_item(kve_bf16_rank_t *own, kve_stream_t stream)
{
	kve_device_t *device = own->device;
	kv_status_t status = own->trace ? device->ops->mark(device, 2 * own->item + 1, stream) : KV_OK;

	own->item++;

	return status == KV_OK && own->trace == KVE_TRACE_APART ? device->ops->record(device, KVE_EVENT_APART, stream)
								: status;
}

static kv_status_t run_item(void *ctx, kve_phase_t phase, uint32_t layer, uint32_t microbatch, kve_stream_t stream)
{
	kve_rank_t *rank = ctx;
	kv_status_t status = begin_item(rank->bf16, stream);

	if (status == KV_OK) {
		status = kve_bf16_run_phase(rank, phase, layer, microbatch);
	}

	return status == KV_OK ? end_item(rank->bf16, stream) : status;
}

static kv_status_t record_event(void *ctx, uint32_t event, kve_stream_t stream)
{
	kve_device_t *device = ((kve_rank_t *)ctx)->bf16->device;

	return device->ops->record(device, event, stream);
}

static kv_status_t await_event(void *ctx, uint32_t event, kve_stream_t stream)
{
	kve_device_t *device = ((kve_rank_t *)ctx)->bf16->device;

	return device->ops->wait(device, event, stream);
}

static kv_status_t forward(kve_rank_t *rank, kve_overlap_mode_t mode, uint32_t last)
{
	static const kve_overlap_ops_t ops = {run_item, record_event, await_event};
	kve_device_t *device = rank->bf16->device;
	kv_status_t status = KV_OK, ended;
	uint32_t first = 0;

	rank->bf16->nn = device->nn[mode];
	rank->bf16->item = 0;
	for (uint32_t i = 0; i <= last && status == KV_OK; i++) {
		status = begin(rank, i);
	}
	if (status == KV_OK) {
		status = kve_overlap_run(rank->items[mode], rank->n_items[mode], &ops, rank);
	}
	for (uint32_t i = 0; i <= last && status == KV_OK; i++) {
		status = enqueue_answers(rank, i, first);
		first += rank->bf16->microbatches[i].picks;
	}
	ended = device->ops->sync(device);
	if (rank->model->config.experts) {
		const kv_status_t transport = device->ops->ep_check(device, NULL, NULL);

		status = transport == KV_ERR_TIMEOUT || status == KV_OK ? transport : status;
	}
	status = status == KV_OK ? ended : status;
	if (status == KV_OK) {
		take_answers(rank, last);
	}

	return status;
}

static uint32_t find_lost(const kve_rank_t *rank)
{
	kve_device_t *device = rank->bf16->device;
	uint32_t lost = 0;

	(void)device->ops->ep_check(device, &lost, NULL);

	return lost;
}

static kvk_ep_stats_t get_stats(const kve_rank_t *rank)
{
	kve_device_t *device = rank->bf16->device;
	kvk_ep_stats_t stats = {.dispatch_bytes = 0};

	(void)device->ops->ep_check(device, NULL, &stats);

	return stats;
}

/* ---- traces ---------------------------------------------------------------------------------- */

static kv_status_t set_trace(kve_rank_t *rank, kve_trace_t trace)
{
	kve_bf16_rank_t *own = rank->bf16;
	const uint32_t items = rank->n_items[KVE_OVERLAP_SEQ] > rank->n_items[KVE_OVERLAP_DBO]
				       ? rank->n_items[KVE_OVERLAP_SEQ]
				       : rank->n_items[KVE_OVERLAP_DBO];

	own->trace = trace;

	return trace ? own->device->ops->reserve_marks(own->device, 2 * items) : KV_OK;
}

static kv_status_t read_trace(kve_rank_t *rank, kve_clock_interval_t *intervals)
{
	kve_bf16_rank_t *own = rank->bf16;
	kve_device_t *device = own->device;
	kv_status_t status = own->trace ? KV_OK : KV_ERR_ARG;

	for (uint32_t i = 0; i < own->item && status == KV_OK; i++) {
		status = device->ops->elapsed(device, 0, 2 * i, &intervals[i].start);
		if (status == KV_OK) {
			status = device->ops->elapsed(device, 0, 2 * i + 1, &intervals[i].end);
		}
	}

	return status;
}

/* ---- the cache ------------------------------------------------------------------------------- */

static kv_status_t open_cache(kve_rank_t *rank, size_t bytes, void **p_at)
{
	return rank->bf16->device->ops->alloc(rank->bf16->device, bytes, p_at);
}

static kv_status_t get_place(const kve_rank_t *rank, kve_place_t *place)
{
	const kve_device_t *device = rank->bf16->device;

	*place = (kve_place_t){device->ops->get_ordinal(device), device->streams[KVE_STREAM_COMPUTE]};

	return place->ordinal < 0 ? KV_ERR_UNSUPPORTED : KV_OK;
}

static void close_cache(kve_rank_t *rank, void *at)
{
	rank->bf16->device->ops->free(rank->bf16->device, at);
}

static kve_group_memory_t get_memory(const kve_group_t *group)
{
	const kve_config_t *c = &group->model.config;
	const kve_bf16_share_t share = {0, group->ranks};
	const kve_cache_shape_t block = {c, 1, 1, KVK_DTYPE_BF16};

	return (kve_group_memory_t){.weights = kve_bf16_weights_bytes(c, &share),
				    .workspace = workspace_bytes(group),
				    .heap = c->experts ? group->plan.heap_bytes : 0,
				    .cache_block = kve_cache_bytes(&block)};
}

const kve_backend_t kve_backend_bf16 = {
	.fault_of_shape = kve_devices_fault_of_shape,
	.get_memory = get_memory,
	.open = open_rank,
	.close = close_rank,
	.forward = forward,
	.find_lost = find_lost,
	.get_stats = get_stats,
	.open_cache = open_cache,
	.close_cache = close_cache,
	.get_place = get_place,
	.set_trace = set_trace,
	.read_trace = read_trace,
};
