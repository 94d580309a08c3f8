#include "connectors/step/fake_engine.h"
#include "engine/check.h"
#include "scheduler/base/state.h"

#include <signal.h>
#include <stdlib.h>

#define WAIT_NS UINT64_C(60000000000) /* longest wait for the daemon: three times what a half waits for it */

static const uint8_t secret[16] = "sixteen bytes!!!";

#define FE_EACH_REQUEST(fe, r) for (fe_request_t *r = (fe)->request; r < (fe)->request + FE_REQUESTS; r++)
#define FE_EACH_RANK(fe, worker)                                                                                       \
	for (kvx_worker_t **worker = (fe)->worker; worker < (fe)->worker + (fe)->options.ranks; worker++)

static uint64_t now_ns(void)
{
	return kv_now_ns(&kv_env_posix);
}

/* ---- open and close -------------------------------------------------------------------------- */

static void describe(fe_t *fe)
{
	fe->layouts[0] = (kvk_layout_t){.heads = 1,
					.layers = FE_LAYERS,
					.block_tokens = FE_UNIT,
					.dtype = KVK_DTYPE_BYTE,
					.inner = KVK_INNER_OPAQUE,
					.page_bytes = fe->options.page_bytes};
	fe->layouts[1] = fe->layouts[0];
	assert_int_equal(kvk_layout_format(&fe->layouts[0], fe->layout_text, sizeof fe->layout_text), KV_OK);
	fe->identity = (kvc_identity_t){.struct_size = sizeof fe->identity,
					.model = "fake engine",
					.weights = "w1",
					.dtype = "byte",
					.rope = "r",
					.hash = fe->options.own_keys ? NULL : "test:fnv",
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
					       .layouts = fe->layouts,
					       .writers = fe->writers,
					       .writer_count = fe->options.ranks,
					       .max_blocks = FE_BLOCKS,
					       .foreign = !fe->options.own_keys,
					       .cost_model = fe->options.cost_model,
					       .mode = fe->options.mode,
					       .keeps_blocks = 1,
					       .wait_us = fe->options.wait_us,
					       .load_ms = FE_LOAD_MS};

	assert_int_equal(kvx_scheduler_open(&config, &fe->scheduler), KVC_OK);
}

static void open_worker(fe_t *fe, uint32_t r)
{
	const kvx_worker_group_t groups[2] = {{.layout = &fe->layouts[0], .paged = &fe->paged[r]},
					      {.group = 1, .layout = &fe->layouts[1], .paged = &fe->paged[r]}};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = fe->rig->socket,
					    .instance = "fake-engine",
					    .secret = secret,
					    .secret_len = sizeof secret,
					    .rank = r,
					    .identity = &fe->identity,
					    .groups = groups,
					    .group_count = fe->options.groups,
					    .threads = 1 + r};

	assert_int_equal(kvx_worker_open(&config, &fe->worker[r]), KVC_OK);
}

static void run_iteration(void *ctx)
{
	(void)kvx_scheduler_has_pending(((fe_t *)ctx)->scheduler);
}

static int is_ready(const fe_t *fe)
{
	int ready = kvx_scheduler_is_ready(fe->scheduler);

	for (uint32_t r = 0; r < fe->options.ranks; r++) {
		ready &= kvx_worker_is_ready(fe->worker[r]);
	}

	return ready;
}

/* On a busy machine an engine without a model would end most of its requests before it is attached. */
static void await_ready(fe_t *fe)
{
	const uint64_t until = now_ns() + WAIT_NS;

	while (!is_ready(fe) && now_ns() < until) {
		run_iteration(fe);
		usleep(1000);
	}
	assert_true(is_ready(fe));
}

static void set_default(uint32_t *option, uint32_t value)
{
	*option = *option ? *option : value;
}

static void set_defaults(fe_options_t *options)
{
	set_default(&options->ranks, 1);
	set_default(&options->groups, 1);
	set_default(&options->page_bytes, 1024);
	set_default(&options->conversations, 20);
	set_default(&options->wait_us, FE_WAIT_US);
}

void fe_open(fe_t *fe, rig_t *rig, const fe_options_t *options)
{
	uint32_t layers;

	memset(fe, 0, sizeof *fe);
	fe->options = *options;
	set_defaults(&fe->options);
	layers = FE_LAYERS / fe->options.ranks;
	fe->rig = rig;
	rig->run_iteration = run_iteration;
	rig->iteration_ctx = fe;
	fe->rng.state = kv_test_seed();
	describe(fe);
	fe->cache = calloc((size_t)FE_LAYERS * FE_BLOCKS, fe->options.page_bytes);
	assert_non_null(fe->cache);
	for (uint32_t l = 0; l < FE_LAYERS; l++) {
		fe->base[l] = fe->cache + (size_t)l * FE_BLOCKS * fe->options.page_bytes;
	}
	for (uint32_t i = 0; i < FE_BLOCKS; i++) {
		fe->free_ids[fe->free_count++] = FE_BLOCKS - 1u - i;
	}
	for (uint32_t r = 0; r < fe->options.ranks; r++) {
		fe->paged[r] = (kvk_paged_t){.kind = KVK_PAGED_OPAQUE,
					     .blocks = FE_BLOCKS,
					     .layers = layers,
					     .first_layer = r * layers,
					     .heads = 1,
					     .block_tokens = FE_UNIT,
					     .dtype = KVK_DTYPE_BYTE,
					     .page_bytes = fe->options.page_bytes,
					     .base = fe->base + r * layers};
		fe->writers[r] = fe->writers[fe->options.ranks + r] =
			(kvc_writer_t){.rank = r, .head_count = 1, .layer_first = r * layers, .layer_count = layers};
	}
	open_scheduler(fe);
	for (uint32_t r = 0; r < fe->options.ranks; r++) {
		open_worker(fe, r);
	}
	await_ready(fe);
}

void fe_close(fe_t *fe)
{
	for (uint32_t r = 0; r < fe->options.ranks; r++) {
		kvx_worker_close(fe->worker[r]);
		free(fe->message[r]);
	}
	kvx_scheduler_close(fe->scheduler);
	free(fe->cache);
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
static void compute(fe_t *fe, const fe_request_t *r, uint32_t from, uint32_t to, int garbage)
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

static void check_tokens(fe_t *fe, const fe_request_t *r, uint32_t from, uint32_t to)
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

static uint32_t take_block(fe_t *fe)
{
	const uint32_t id = fe->free_ids[--fe->free_count];

	fe->refs[id] = 1;
	fe->holds[id] = 0;
	fe->bad[id] = 0;

	return id;
}

static void give_block(fe_t *fe, uint32_t id)
{
	if (id != KVX_NO_BLOCK && --fe->refs[id] == 0) {
		fe->holds[id] = 0;
		fe->free_ids[fe->free_count++] = id;
	}
}

static void give_blocks(fe_t *fe, fe_request_t *r)
{
	for (uint32_t i = 0; i < r->n; i++) {
		for (uint32_t g = 0; g < fe->options.groups; g++) {
			give_block(fe, r->ids[g][i]);
		}
	}
	r->n = 0;
	r->told = 0;
}

/* First place of the window's group that a sequence at `tokens` still needs. */
static uint32_t window_first(uint32_t tokens)
{
	return tokens > FE_WINDOW ? (tokens - FE_WINDOW) / FE_UNIT : 0;
}

/* Places for `tokens` tokens, none of the window's before `from`. 0: too few blocks are free; nothing is taken then. */
static int take_blocks(fe_t *fe, fe_request_t *r, uint32_t tokens, uint32_t from)
{
	const uint32_t n = (tokens + FE_UNIT - 1u) / FE_UNIT;

	if (n <= r->n) {
		return 1;
	}
	if ((n - r->n) * fe->options.groups > fe->free_count) {
		return 0;
	}
	for (; r->n < n; r->n++) {
		r->ids[0][r->n] = take_block(fe);
		r->ids[1][r->n] = fe->options.groups > 1 && r->n >= from ? take_block(fe) : KVX_NO_BLOCK;
	}

	return 1;
}

/* Blocks the window has left behind are freed; nobody tells kvx. */
static void slide_window(fe_t *fe, fe_request_t *r)
{
	for (uint32_t i = 0; fe->options.groups > 1 && i < window_first(r->computed) && i < r->n; i++) {
		give_block(fe, r->ids[1][i]);
		r->ids[1][i] = KVX_NO_BLOCK;
	}
}

/* Whole blocks of the same prefix that the living hold: shared. Returns tokens. */
static uint32_t share_blocks(fe_t *fe, fe_request_t *r)
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
static void tell_table(fe_t *fe, fe_request_t *r, uint32_t first, uint32_t fresh)
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

static void refresh_ask(fe_request_t *r)
{
	r->hashes = (kvx_hashes_t){.at = hash_at, .ctx = r, .n = r->known / FE_UNIT};
	r->ask.hashes = &r->hashes;
	r->ask.tokens = r->known;
}

/* Conversations: turns of one have longer and longer prefixes in common, and all begin with one of two system prompts.
 */
static void begin_request(fe_t *fe, fe_request_t *r, uint64_t talk, uint32_t prompt)
{
	uint64_t system = 1000u + talk % 2u, own = talk, hash = HASH_START;

	memset(r, 0, sizeof *r);
	(void)snprintf(r->id, sizeof r->id, "fe-%" PRIu64, fe->serial++);
	r->prompt = prompt;
	r->total = prompt + (uint32_t)kv_test_below(&fe->rng, FE_GENERATED);
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
	refresh_ask(r);
}

static void feed_tokens(fe_t *fe, fe_request_t *r)
{
	const kvx_units_t units = {.struct_size = sizeof units, .n = r->known, .tokens = r->tokens};

	if (fe->options.own_keys) { /* from the start each time: simple, and a chain may begin again */
		(void)kvx_scheduler_add_tokens(fe->scheduler, &r->ask, &units);
	}
}

/* Ended or aborted. While it is being loaded its blocks stay, until the worker says that it has let go. */
static void end_request(fe_t *fe, fe_request_t *r, int aborted)
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
	give_blocks(fe, r);
	r->state = FE_FREE;
}

static fe_request_t *find_oldest(fe_t *fe, fe_state_t state, uint64_t after)
{
	fe_request_t *best = NULL;

	FE_EACH_REQUEST(fe, r) {
		if (r->state == state && r->order >= after && (!best || r->order < best->order)) {
			best = r;
		}
	}

	return best;
}

/* That has at least this number of blocks. */
static fe_request_t *find_youngest(fe_t *fe, fe_state_t state, uint32_t blocks)
{
	fe_request_t *best = NULL;

	FE_EACH_REQUEST(fe, r) {
		if (r->state == state && r->n >= blocks && (!best || r->order > best->order)) {
			best = r;
		}
	}

	return best;
}

/* ---- scheduling ------------------------------------------------------------------------------ */

static void preempt(fe_t *fe, fe_request_t *r)
{
	give_blocks(fe, r);
	r->state = FE_WAITING;
	r->computed = 0;
	r->step_tokens = 0;
	fe->preempted++;
	kvx_scheduler_preempt(fe->scheduler, &r->ask);
}

/* The running first, oldest first; who finds no block takes those of the youngest. Returns what is left of the budget;
 * 0 also after preemptions. */
static uint32_t schedule_running(fe_t *fe, uint32_t budget)
{
	int preempted = 0;

	for (fe_request_t *r = find_oldest(fe, FE_RUNNING, 0); r && budget;
	     r = find_oldest(fe, FE_RUNNING, r->order + 1u)) {
		const uint32_t left = r->known - r->computed, take = left < budget ? left : budget;

		while (r->state == FE_RUNNING && !take_blocks(fe, r, r->computed + take, 0)) {
			preempt(fe, find_youngest(fe, FE_RUNNING, 0));
			preempted = 1;
		}
		if (r->state == FE_RUNNING) {
			r->step_tokens = take;
			budget -= take;
		}
	}

	return preempted ? 0 : budget;
}

/* Nobody runs, so nobody will free a block, and waiting requests hold what loads have brought them: the youngest gives
 * its own up. */
static void make_room(fe_t *fe)
{
	fe_request_t *youngest = find_youngest(fe, FE_WAITING, 1);

	if (youngest && !find_youngest(fe, FE_RUNNING, 0)) {
		preempt(fe, youngest);
	}
}

/* One that waits: match, admit when there is room. 0: nobody else is admitted in this step. */
static int admit(fe_t *fe, fe_request_t *r, uint32_t *p_budget)
{
	uint32_t from, to, take;
	kvx_hit_t hit = {.struct_size = sizeof hit};

	refresh_ask(r);
	if (r->computed == 0) {
		feed_tokens(fe, r);
		r->ask.local = share_blocks(fe, r);
		r->ask.whole = 1;
		r->ask.busy = find_youngest(fe, FE_RUNNING, 0) != NULL;
		kvx_scheduler_match(fe->scheduler, &r->ask, &hit);
		r->computed = r->ask.local;
	}
	from = r->computed;
	to = from + hit.tokens;
	assert_true(to <= r->known && (hit.async || to < r->known || !hit.tokens));
	take = hit.async ? 0 : r->known - to < *p_budget ? r->known - to : *p_budget;
	if (!take_blocks(fe, r, to + take, hit.tokens ? window_first(to) : 0)) {
		if (r->told == 0) {
			give_blocks(fe, r);
			r->computed = 0;
		}
		make_room(fe);
		return 0;
	}
	tell_table(fe, r, r->told, r->told ? r->told : from / FE_UNIT);
	r->load_from = from;
	r->load_to = to;
	r->sync_load = hit.tokens && !hit.async;
	r->computed = to;
	fe->hit_tokens += hit.tokens;
	if (hit.tokens) {
		kvx_scheduler_start_load(fe->scheduler, &r->ask, &hit);
		fe->sync_loads += !hit.async;
		fe->async_loads += hit.async != 0;
	}
	r->state = hit.async ? FE_LOADING : FE_RUNNING;
	r->step_tokens = take;
	*p_budget -= take;

	return 1;
}

static void schedule(fe_t *fe)
{
	uint32_t budget = schedule_running(fe, FE_BUDGET);
	uint64_t after = 0;

	while (budget) {
		fe_request_t *r = find_oldest(fe, FE_WAITING, after);

		if (!r) {
			break;
		}
		after = r->order + 1u;
		if (!admit(fe, r, &budget)) {
			break;
		}
	}
	FE_EACH_REQUEST(fe, r) {
		if (r->state != FE_RUNNING || r->step_tokens == 0) {
			continue;
		}
		refresh_ask(r);
		feed_tokens(fe, r);
		if (r->told < r->n) {
			tell_table(fe, r, r->told, r->told);
		}
		if (r->computed + r->step_tokens >= kvx_scheduler_next_save_at(fe->scheduler, r->id, r->ask.id_len) ||
		    r->step_tokens > 1) {
			kvx_scheduler_advance(fe->scheduler, &r->ask, r->computed + r->step_tokens, r->step_tokens);
		}
	}
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Negative control: the first two blocks of the load change places. */
static void swap_ids(const kvx_msg_load_t *load)
{
	const kvx_msg_part_t *part = kvx_msg_part_first(load);
	uint32_t *ids = (uint32_t *)(uintptr_t)kvx_msg_part_ids(part);

	if (part->n > 1) {
		const uint32_t id = ids[0];

		ids[0] = ids[1];
		ids[1] = id;
	}
}

/* What goes wrong on one rank: it has no lease, or its part of a save is not to be had. */
static void spoil_message(fe_t *fe, uint8_t *bytes, size_t len)
{
	const kvx_record_header_t *record;
	kvx_msg_reader_t cursor;

	assert_true(kvx_msg_open(&cursor, KVX_MSG_MAGIC, bytes, len));
	for (record = kvx_msg_next(&cursor); record; record = kvx_msg_next(&cursor)) {
		void *at = (void *)(uintptr_t)record;
		const int fails = fe->options.fail && kv_test_below(&fe->rng, fe->options.fail) == 0;

		if (record->type == KVX_RECORD_LOAD && fe->options.swap) {
			swap_ids(at);
		} else if (record->type == KVX_RECORD_LOAD && fails) {
			((kvx_msg_load_t *)at)->flags |= KVX_MSG_NO_LEASE;
			fe->spoilt_loads++;
		} else if (record->type == KVX_RECORD_SAVE && fails) {
			((kvx_msg_save_t *)at)->put.incarnation ^= 1u;
			fe->spoilt_saves++;
		}
	}
}

/* Each rank gets bytes that came over a wire. */
static void begin_step(fe_t *fe)
{
	const void *bytes = NULL;
	size_t len = 0;

	kvx_scheduler_build_message(fe->scheduler, &bytes, &len);
	for (uint32_t rank = 0; rank < fe->options.ranks; rank++) {
		fe->message[rank] = realloc(fe->message[rank], len + 1u);
		assert_non_null(fe->message[rank]);
		if (len) {
			memcpy(fe->message[rank], bytes, len);
			spoil_message(fe, fe->message[rank], len);
		}
		kvx_worker_begin_step(fe->worker[rank], fe->message[rank], len);
		kvx_worker_start_async_loads(fe->worker[rank]);
	}
}

static void take_errors(fe_t *fe)
{
	uint32_t ids[16], n;

	FE_EACH_RANK(fe, worker) {
		while ((n = kvx_worker_take_failed_blocks(*worker, ids, 16)) > 0) {
			for (uint32_t i = 0; i < n; i++) {
				assert_true(ids[i] < FE_BLOCKS);
				fe->bad[ids[i]] = 1;
			}
		}
	}
}

/* Tokens from the start that are there; with several groups a load that failed is of no use at all. */
static uint32_t good_tokens(const fe_t *fe, const fe_request_t *r)
{
	for (uint32_t i = r->load_from / FE_UNIT; i < r->load_to / FE_UNIT; i++) {
		for (uint32_t g = 0; g < fe->options.groups; g++) {
			if (r->ids[g][i] != KVX_NO_BLOCK && fe->bad[r->ids[g][i]]) {
				return fe->options.groups > 1 ? r->load_from : i * FE_UNIT;
			}
		}
	}

	return r->load_to;
}

/* Blocks that are full and right may be shared. */
static void publish(fe_t *fe, const fe_request_t *r)
{
	for (uint32_t i = 0; fe->options.sharing && i < r->computed / FE_UNIT; i++) {
		fe->holds[r->ids[0][i]] = r->prefix[(i + 1u) * FE_UNIT - 1u];
	}
}

static void run_one(fe_t *fe, fe_request_t *r)
{
	const uint32_t good = r->sync_load ? good_tokens(fe, r) : r->load_to;
	const uint32_t tokens = r->step_tokens;

	r->step_tokens = 0;
	if (r->sync_load && good < r->load_to) {
		/* The step runs on what was not loaded; then all from there on is computed again. */
		compute(fe, r, r->computed, r->computed + tokens, 1);
		check_tokens(fe, r, r->load_from, good);
		r->computed = good;
		r->sync_load = 0;
		fe->failed_loads++;
		publish(fe, r);
		return;
	}
	if (r->sync_load) {
		check_tokens(fe, r, r->load_from, r->load_to);
		r->sync_load = 0;
	}
	compute(fe, r, r->computed, r->computed + tokens, 0);
	r->computed += tokens;
	publish(fe, r);
	slide_window(fe, r);
	if (r->computed == r->known && r->known < r->total) {
		r->known++; /* a token is generated */
	} else if (r->computed == r->total) {
		check_tokens(fe, r, 0, r->total);
		end_request(fe, r, 0);
	}
}

static void end_load(fe_t *fe, fe_request_t *r)
{
	if (r->state == FE_ABORTED) {
		give_blocks(fe, r);
		r->state = FE_FREE;
		return;
	}
	r->state = FE_WAITING;
	r->computed = good_tokens(fe, r);
	assert_true(r->load_failed || r->computed == r->load_to);
	if (r->load_failed && fe->options.groups > 1) {
		r->computed = r->load_from;
	}
	check_tokens(fe, r, r->load_from, r->computed);
	publish(fe, r);
	fe->failed_loads += r->computed < r->load_to;
	if (r->computed == r->known) {
		r->computed--; /* one token must be computed */
	}
	if (r->computed == 0) {
		give_blocks(fe, r);
	}
}

static fe_request_t *find_loading(fe_t *fe, const char *id, uint32_t len)
{
	FE_EACH_REQUEST(fe, r) {
		if ((r->state == FE_LOADING || r->state == FE_ABORTED) && strlen(r->id) == len &&
		    memcmp(r->id, id, len) == 0) {
			return r;
		}
	}
	fail_msg("%.*s is over, but was not being loaded", (int)len, id);

	return NULL;
}

/* Over on a rank is over for the engine only when it is over on all. */
static void take_finished(fe_t *fe)
{
	char id[32];
	uint32_t len;

	FE_EACH_RANK(fe, worker) {
		int failed;

		while ((len = kvx_worker_take_finished(*worker, id, sizeof id, &failed)) > 0) {
			fe_request_t *r = find_loading(fe, id, len);

			r->load_failed |= failed;
			if (++r->ranks_done == fe->options.ranks) {
				take_errors(fe); /* it may have ended since */
				end_load(fe, r);
				r->ranks_done = 0;
				r->load_failed = 0;
			}
		}
	}
}

static void take_reports(fe_t *fe)
{
	FE_EACH_RANK(fe, worker) {
		const void *bytes = NULL;
		size_t len = 0;

		kvx_worker_take_report(*worker, &bytes, &len);
		if (len) {
			kvx_scheduler_take_report(fe->scheduler, bytes, len);
		}
	}
}

static int is_loading(fe_t *fe)
{
	return find_oldest(fe, FE_LOADING, 0) || find_oldest(fe, FE_ABORTED, 0);
}

static int is_put_unanswered(const kvx_sput_t *put)
{
	return put && (put->at == KVX_SPUT_ASKED || is_put_unanswered(put->next));
}

/* A step of a model takes far longer than an answer. One of this engine takes as long as the answer, so that blocks
 * are saved before it reuses them. */
static void await_answers(const fe_t *fe)
{
	for (uint32_t i = 0; i < 50000 && !fe->options.faults && is_put_unanswered(fe->scheduler->puts); i++) {
		(void)kvx_scheduler_has_pending(fe->scheduler);
		usleep(100);
	}
}

static void step(fe_t *fe)
{
	const uint64_t before = fe->computed_tokens;

	schedule(fe);
	begin_step(fe);
	FE_EACH_RANK(fe, worker) {
		kvx_worker_run_sync_loads(*worker);
	}
	take_errors(fe);
	FE_EACH_REQUEST(fe, r) {
		if (r->state == FE_RUNNING && r->step_tokens) {
			run_one(fe, r);
		}
	}
	FE_EACH_RANK(fe, worker) {
		kvx_worker_end_step(*worker);
	}
	take_errors(fe);
	take_finished(fe);
	take_reports(fe);
	await_answers(fe);
	fe->steps++;
	if (fe->computed_tokens == before && is_loading(fe)) {
		usleep(100);
	} else {
		usleep(fe->options.step_us); /* as if it were a model */
	}
}

/* ---- faults ---------------------------------------------------------------------------------- */

static void fault(fe_t *fe)
{
	if (fe->stopped && --fe->stopped == 0) {
		rig_signal(fe->rig, SIGCONT);
	}
	if (!fe->options.faults || fe->stopped || kv_test_below(&fe->rng, fe->options.faults) != 0) {
		return;
	}
	if (kv_test_below(&fe->rng, 2)) {
		rig_signal(fe->rig, SIGSTOP);
		fe->stopped = 1u + (uint32_t)kv_test_below(&fe->rng, 30);
	} else {
		rig_kill(fe->rig);
		for (uint32_t i = 0; i < 3; i++) {
			step(fe);
		}
		rig_start(fe->rig);
	}
}

static int is_quiet(fe_t *fe)
{
	kvx_scheduler_stats_t stats = {.struct_size = sizeof stats};

	kvx_scheduler_get_stats(fe->scheduler, &stats);
	assert_int_equal(stats.requests, 0);

	return stats.puts_open + stats.leases_open == 0 && !kvx_scheduler_has_pending(fe->scheduler);
}

/* Whatever was stored wrongly is loaded and seen: all of each conversation is asked for. */
static void load_all(fe_t *fe)
{
	uint64_t until;

	fe->options.fail = fe->options.faults = 0;
	for (uint64_t talk = 1; talk <= fe->options.conversations; talk++) {
		fe_request_t *r = &fe->request[0];

		begin_request(fe, r, talk, FE_TOKENS - FE_GENERATED);
		until = now_ns() + WAIT_NS;
		while (r->state != FE_FREE && now_ns() < until) {
			step(fe);
		}
		assert_int_equal(r->state, FE_FREE);
	}
}

static void end_all(fe_t *fe)
{
	const uint64_t until = now_ns() + WAIT_NS;

	FE_EACH_REQUEST(fe, r) {
		if (r->state != FE_FREE && r->state != FE_ABORTED) {
			end_request(fe, r, 1);
		}
	}
	while ((is_loading(fe) || !is_quiet(fe)) && now_ns() < until) {
		step(fe);
		usleep(1000);
	}
	assert_false(is_loading(fe));
	assert_true(is_quiet(fe));
	assert_int_equal(fe->free_count, FE_BLOCKS);
}

void fe_run(fe_t *fe, uint64_t requests)
{
	while (fe->finished < requests) {
		fe_request_t *r = &fe->request[kv_test_below(&fe->rng, FE_REQUESTS)];

		if (r->state == FE_FREE) {
			begin_request(fe, r, 1u + kv_test_below(&fe->rng, fe->options.conversations),
				      20u + (uint32_t)kv_test_below(&fe->rng, FE_TOKENS - FE_GENERATED - 40u));
		} else if (r->state != FE_ABORTED && kv_test_below(&fe->rng, 300) == 0) {
			end_request(fe, r, 1);
		}
		fault(fe);
		step(fe);
	}
	if (fe->stopped) {
		rig_signal(fe->rig, SIGCONT);
	}
	end_all(fe);
	load_all(fe);
	end_all(fe);
}
