#include "connectors/step/fake_engine.h"
#include "engine/check.h"

#include <signal.h>
#include <stdlib.h>

static const uint8_t secret[16] = "sixteen bytes!!!";

/* ---- open and close -------------------------------------------------------------------------- */

static void describe(fe_t *fe)
{
	fe->layout = (kvk_layout_t){.heads = 1,
				    .layers = FE_LAYERS,
				    .block_tokens = FE_UNIT,
				    .dtype = KVK_DTYPE_BYTE,
				    .inner = KVK_INNER_OPAQUE,
				    .page_bytes = fe->options.page_bytes};
	assert_int_equal(kvk_layout_format(&fe->layout, fe->layout_text, sizeof fe->layout_text), KV_OK);
	fe->identity = (kvc_identity_t){.struct_size = sizeof fe->identity,
					.model = "fake engine",
					.weights = "w1",
					.dtype = "byte",
					.rope = "r",
					.hash = fe->options.foreign ? "test:fnv" : NULL,
					.hash_tokens = FE_UNIT,
					.groups = fe->options.groups > 1 ? "0:full:16,1:window:16:40" : "0:full:16",
					.layout = fe->layout_text,
					.page_format = "fake"};
}

static void open_scheduler(fe_t *fe)
{
	const kvx_scheduler_config_t config = {.struct_size = sizeof config,
					       .socket = fe->rig->socket,
					       .instance = "fake-engine",
					       .secret = secret,
					       .secret_len = sizeof secret,
					       .identity = &fe->identity,
					       .layout = &fe->layout,
					       .writers = fe->writers,
					       .writer_count = fe->options.ranks,
					       .max_blocks = FE_BLOCKS,
					       .foreign = fe->options.foreign,
					       .cost_model = fe->options.cost_model,
					       .mode = fe->options.mode,
					       .wait_us = FE_WAIT_US,
					       .load_ms = FE_LOAD_MS};

	assert_int_equal(kvx_scheduler_open(&config, &fe->scheduler), KVC_OK);
}

static void open_worker(fe_t *fe, uint32_t r)
{
	const kvx_worker_group_t groups[2] = {{0, &fe->paged[r]}, {1, &fe->paged[r]}};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = fe->rig->socket,
					    .instance = "fake-engine",
					    .secret = secret,
					    .secret_len = sizeof secret,
					    .rank = r,
					    .identity = &fe->identity,
					    .layout = &fe->layout,
					    .range = fe->writers[r],
					    .groups = groups,
					    .group_count = fe->options.groups,
					    .threads = 1 + r};

	assert_int_equal(kvx_worker_open(&config, &fe->worker[r]), KVC_OK);
}

static void run_iteration(void *ctx)
{
	(void)kvx_scheduler_has_pending(((fe_t *)ctx)->scheduler);
}

void fe_open(fe_t *fe, rig_t *rig, const fe_options_t *options)
{
	const uint32_t layers = FE_LAYERS / options->ranks;

	memset(fe, 0, sizeof *fe);
	fe->options = *options;
	fe->rig = rig;
	rig->run_iteration = run_iteration;
	rig->iteration_ctx = fe;
	fe->rng.state = kv_test_seed();
	describe(fe);
	fe->cache = calloc((size_t)FE_LAYERS * FE_BLOCKS, options->page_bytes);
	assert_non_null(fe->cache);
	for (uint32_t l = 0; l < FE_LAYERS; l++) {
		fe->base[l] = fe->cache + (size_t)l * FE_BLOCKS * options->page_bytes;
	}
	for (uint32_t i = 0; i < FE_BLOCKS; i++) {
		fe->free_ids[fe->free_count++] = FE_BLOCKS - 1u - i;
	}
	for (uint32_t r = 0; r < options->ranks; r++) {
		fe->paged[r] = (kvk_paged_t){.kind = KVK_PAGED_OPAQUE,
					     .blocks = FE_BLOCKS,
					     .layers = layers,
					     .first_layer = r * layers,
					     .heads = 1,
					     .block_tokens = FE_UNIT,
					     .dtype = KVK_DTYPE_BYTE,
					     .page_bytes = options->page_bytes,
					     .base = fe->base + r * layers};
		fe->writers[r] =
			(kvc_writer_t){.rank = r, .head_count = 1, .layer_first = r * layers, .layer_count = layers};
	}
	open_scheduler(fe);
	for (uint32_t r = 0; r < options->ranks; r++) {
		open_worker(fe, r);
	}
}

void fe_close(fe_t *fe)
{
	for (uint32_t r = 0; r < fe->options.ranks; r++) {
		kvx_worker_close(fe->worker[r]);
	}
	kvx_scheduler_close(fe->scheduler);
	free(fe->cache);
	free(fe->plan);
}

/* ---- what a token leaves in the cache -------------------------------------------------------- */

static uint32_t slot_bytes(const fe_t *fe)
{
	return fe->options.page_bytes / FE_UNIT;
}

static uint8_t *slot(const fe_t *fe, uint32_t layer, uint32_t block, uint32_t token)
{
	return (uint8_t *)fe->base[layer] + (size_t)block * fe->options.page_bytes + token % FE_UNIT * slot_bytes(fe);
}

static void fill(const fe_t *fe, uint64_t prefix, uint32_t group, uint32_t layer, uint8_t *out)
{
	uint64_t state = prefix ^ group * UINT64_C(0x5555555555) ^ layer * UINT64_C(0x123456789);

	for (uint32_t i = 0; i < slot_bytes(fe); i += 8) {
		const uint64_t word = next_random(&state);

		memcpy(out + i, &word, 8);
	}
}

/* With `garbage`, what a model leaves when something before was wrong. */
void fe_compute(fe_t *fe, const fe_request_t *r, uint32_t from, uint32_t to, int garbage)
{
	for (uint32_t t = from; t < to; t++) {
		for (uint32_t g = 0; g < fe->options.groups; g++) {
			for (uint32_t l = 0; l < FE_LAYERS && r->ids[g][t / FE_UNIT] != KVX_NO_BLOCK; l++) {
				fill(fe, r->prefix[t] ^ (garbage ? kv_test_rand(&fe->rng) : 0), g, l,
				     slot(fe, l, r->ids[g][t / FE_UNIT], t));
			}
		}
	}
	fe->computed_tokens += to - from;
}

void fe_check_tokens(fe_t *fe, const fe_request_t *r, uint32_t from, uint32_t to)
{
	uint8_t expected[4096];

	for (uint32_t t = from; t < to; t++) {
		for (uint32_t g = 0; g < fe->options.groups; g++) {
			for (uint32_t l = 0; l < FE_LAYERS && r->ids[g][t / FE_UNIT] != KVX_NO_BLOCK; l++) {
				fill(fe, r->prefix[t], g, l, expected);
				fe->wrong_bytes +=
					memcmp(expected, slot(fe, l, r->ids[g][t / FE_UNIT], t), slot_bytes(fe)) != 0;
			}
		}
	}
	fe->checked_tokens += to - from;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

static uint32_t block_take(fe_t *fe)
{
	const uint32_t id = fe->free_ids[--fe->free_count];

	fe->refs[id] = 1;
	fe->holds[id] = 0;
	fe->bad[id] = 0;

	return id;
}

static void block_give(fe_t *fe, uint32_t id)
{
	if (id != KVX_NO_BLOCK && --fe->refs[id] == 0) {
		fe->holds[id] = 0;
		fe->free_ids[fe->free_count++] = id;
	}
}

void fe_blocks_give(fe_t *fe, fe_request_t *r)
{
	for (uint32_t i = 0; i < r->n; i++) {
		for (uint32_t g = 0; g < fe->options.groups; g++) {
			block_give(fe, r->ids[g][i]);
		}
	}
	r->n = 0;
	r->told = 0;
}

/* First place of the window's group that a sequence at `tokens` still needs. */
uint32_t fe_window_first(uint32_t tokens)
{
	return tokens > FE_WINDOW ? (tokens - FE_WINDOW) / FE_UNIT : 0;
}

/* Places for `tokens` tokens, none of the window's before `from`. 0: too few blocks are free; nothing is taken then. */
int fe_blocks_for(fe_t *fe, fe_request_t *r, uint32_t tokens, uint32_t from)
{
	const uint32_t n = (tokens + FE_UNIT - 1u) / FE_UNIT;

	if (n <= r->n) {
		return 1;
	}
	if ((n - r->n) * fe->options.groups > fe->free_count) {
		return 0;
	}
	for (; r->n < n; r->n++) {
		r->ids[0][r->n] = block_take(fe);
		r->ids[1][r->n] = fe->options.groups > 1 && r->n >= from ? block_take(fe) : KVX_NO_BLOCK;
	}

	return 1;
}

/* Blocks the window has left behind are freed; nobody tells kvx. */
void fe_slide(fe_t *fe, fe_request_t *r)
{
	for (uint32_t i = 0; fe->options.groups > 1 && i < fe_window_first(r->computed) && i < r->n; i++) {
		block_give(fe, r->ids[1][i]);
		r->ids[1][i] = KVX_NO_BLOCK;
	}
}

/* Whole blocks of the same prefix that the living hold: shared. Returns tokens. */
uint32_t fe_share(fe_t *fe, fe_request_t *r)
{
	const uint32_t most = (r->known - 1u) / FE_UNIT;

	while (fe->options.sharing && r->n < most) {
		const uint64_t prefix = r->prefix[(r->n + 1u) * FE_UNIT - 1u];
		uint32_t id = 0;

		while (id < FE_BLOCKS && fe->holds[id] != prefix) {
			id++;
		}
		if (id == FE_BLOCKS) {
			break;
		}
		fe->refs[id]++;
		r->ids[0][r->n] = id;
		r->ids[1][r->n++] = KVX_NO_BLOCK;
	}

	return r->n * FE_UNIT;
}

/* Tell kvx the table from what it knows on; blocks from `fresh` on are new. */
void fe_place(fe_t *fe, fe_request_t *r, uint32_t first, uint32_t fresh)
{
	for (uint32_t g = 0; g < fe->options.groups; g++) {
		const kvx_block_table_t table = {.struct_size = sizeof table,
						 .group = g,
						 .first = first,
						 .n = r->n - first,
						 .fresh = fresh,
						 .ids = r->ids[g] + first};

		assert_int_equal(kvx_scheduler_append_blocks(fe->scheduler, &r->ask, &table), KVC_OK);
	}
	r->told = r->n;
}

/* ---- requests -------------------------------------------------------------------------------- */

static const void *hash_at(void *ctx, uint32_t i, uint32_t *p_len)
{
	*p_len = 32;

	return ((const fe_request_t *)ctx)->hash[i];
}

void fe_ask_refresh(fe_request_t *r)
{
	r->hashes = (kvx_hashes_t){.at = hash_at, .ctx = r, .n = r->known / FE_UNIT};
	r->ask.hashes = &r->hashes;
	r->ask.tokens = r->known;
}

/* Conversations: turns of one have longer and longer prefixes in common, and all begin with one of two system prompts.
 */
void fe_request_begin(fe_t *fe, fe_request_t *r)
{
	const uint64_t talk = 1u + kv_test_below(&fe->rng, fe->options.conversations);
	uint64_t system = 1000u + talk % 2u, own = talk, hash = HASH_START;

	memset(r, 0, sizeof *r);
	(void)snprintf(r->id, sizeof r->id, "fe-%" PRIu64, fe->serial++);
	r->prompt = 20u + (uint32_t)kv_test_below(&fe->rng, FE_TOKENS - 120u);
	r->total = r->prompt + (uint32_t)kv_test_below(&fe->rng, 80);
	for (uint32_t t = 0; t < r->total; t++) {
		r->tokens[t] = below(t < 64 ? &system : &own, 100000);
		hash = hash_bytes(hash, &r->tokens[t], sizeof r->tokens[t]);
		r->prefix[t] = hash;
		if (t % FE_UNIT == FE_UNIT - 1u) {
			uint64_t state = hash;

			for (uint32_t b = 0; b < 32; b += 8) {
				const uint64_t word = next_random(&state);

				memcpy(r->hash[t / FE_UNIT] + b, &word, 8);
			}
		}
	}
	r->state = FE_WAITING;
	r->known = r->prompt;
	r->order = fe->order++;
	r->ask = (kvx_ask_t){.struct_size = sizeof r->ask, .id = r->id, .id_len = (uint32_t)strlen(r->id)};
	fe_ask_refresh(r);
}

void fe_feed_tokens(fe_t *fe, fe_request_t *r)
{
	const kvx_units_t units = {.struct_size = sizeof units, .n = r->known, .tokens = r->tokens};

	if (!fe->options.foreign) { /* from the start each time: simple, and a chain may begin again */
		(void)kvx_scheduler_add_tokens(fe->scheduler, &r->ask, &units);
	}
}

/* Ended or aborted. While it is being loaded its blocks stay, until the worker says that it has let go. */
void fe_request_end(fe_t *fe, fe_request_t *r, int aborted)
{
	const kvx_ended_t ended = {.struct_size = sizeof ended, .prompt_tokens = r->prompt};

	fe->aborted += aborted != 0;
	fe->finished++;
	kvx_scheduler_record_ended(fe->scheduler, &r->ask, &ended);
	kvx_scheduler_finish(fe->scheduler, &r->ask);
	if (r->state == FE_LOADING) {
		r->state = FE_ABORTED;
		return;
	}
	fe_blocks_give(fe, r);
	r->state = FE_FREE;
}

fe_request_t *fe_oldest(fe_t *fe, fe_state_t state, uint64_t after)
{
	fe_request_t *best = NULL;

	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		fe_request_t *r = &fe->request[i];

		if (r->state == state && r->order >= after && (!best || r->order < best->order)) {
			best = r;
		}
	}

	return best;
}

fe_request_t *fe_youngest_running(fe_t *fe)
{
	fe_request_t *best = NULL;

	for (uint32_t i = 0; i < FE_REQUESTS; i++) {
		fe_request_t *r = &fe->request[i];

		if (r->state == FE_RUNNING && (!best || r->order > best->order)) {
			best = r;
		}
	}

	return best;
}
