/* A worker of the kill loop: an engine without a model. It saves prompts whose blocks hold what their numbers say and loads what is there, over and over,
 * through the same kvx_worker_t that vLLM's worker uses; every block that came is compared. It may be killed, and the daemon under it, at any line. */
#include "gpu_kill.h"

#include "kvx_worker.h"
#include "plan.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define TOKENS     16u
#define ASK_MS     2000u
#define PROVE_MS   20000u
#define LOAD_MS    2000u
#define LEASE_MS   60000u
#define SAVE_FIRST 3u /* of 5 rounds save */

typedef struct engine {
	const kill_options_t *options;
	kill_count_t *count;
	uint32_t number;
	uint64_t rng;
	char instance[48];
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvk_paged_t paged;
	void *base[KILL_LAYERS];
	uint8_t *cache, *bounce;
	size_t piece; /* bytes of a block in a layer */
	kvc_identity_t identity;
	kvc_writer_t writer;
	kvx_worker_t *worker;
	kvc_t *kvc;
	kvc_space_t *space;
	kvx_bytes_t plan;
	uint32_t step;
	uint64_t load;
	uint32_t ids[KILL_LENGTH], n; /* of the round */
} engine_t;

static const uint8_t secret[16] = "kill loop secret";
static volatile sig_atomic_t over;

static void on_term(int signal)
{
	(void)signal;
	over = 1;
}

static uint64_t now_ms(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000u + (uint64_t)ts.tv_nsec / 1000000u;
}

/* ---- what blocks hold -------------------------------------------------------------------------------------------------- */

static void fill_piece(uint64_t *out, size_t bytes, uint64_t chain, uint32_t block, uint32_t layer)
{
	uint64_t x = (chain * KILL_LENGTH + block) * KILL_LAYERS + layer + 1;

	x = kill_random(&x) | 1;
	for (size_t i = 0; i < bytes / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		out[i] = x;
	}
}

static uint64_t *bounce_of(const engine_t *e, uint32_t i, uint32_t layer)
{
	return (uint64_t *)(void *)(e->bounce + ((size_t)i * e->layout.layers + layer) * e->piece);
}

static uint8_t *cache_of(const engine_t *e, uint32_t i, uint32_t layer)
{
	return (uint8_t *)e->base[layer] + (size_t)e->ids[i] * e->piece;
}

/* The round's blocks get the bytes of a chain; KILL_CHAINS and more: of none. */
static void write_blocks(engine_t *e, uint64_t chain)
{
	for (uint32_t i = 0; i < e->n; i++) {
		for (uint32_t l = 0; l < e->layout.layers; l++) {
			fill_piece(bounce_of(e, i, l), e->piece, chain, i, l);
			kill_memory_write(cache_of(e, i, l), (const uint8_t *)bounce_of(e, i, l), e->piece);
		}
	}
	kill_memory_settle();
}

/* Every block that is not in failed[] holds what it should. Returns those that do not. */
static uint32_t wrong_blocks(engine_t *e, uint64_t chain, uint32_t n, const uint8_t *failed)
{
	uint64_t *expected = malloc(e->piece);
	uint32_t wrong = 0;

	for (uint32_t i = 0; i < n; i++) {
		for (uint32_t l = 0; l < e->layout.layers; l++) {
			kill_memory_read((uint8_t *)bounce_of(e, i, l), cache_of(e, i, l), e->piece);
		}
	}
	kill_memory_settle();
	for (uint32_t i = 0; i < n && expected; i++) {
		int same = 1;

		for (uint32_t l = 0; l < e->layout.layers && !failed[i]; l++) {
			fill_piece(expected, e->piece, chain, i, l);
			same = same && memcmp(expected, bounce_of(e, i, l), e->piece) == 0;
		}
		wrong += !same;
		atomic_fetch_add(&e->count->blocks, !failed[i]);
	}
	free(expected);

	return wrong;
}

/* ---- opening ----------------------------------------------------------------------------------------------------------- */

static void describe(engine_t *e)
{
	const int small = kill_is_small(e->options);
	kvk_geometry_t g;

	e->layout = (kvk_layout_t){.heads = small ? 2 : 8,
				   .layers = small ? 4 : KILL_LAYERS,
				   .block_tokens = TOKENS,
				   .k_dim = small ? 64 : 128,
				   .v_dim = small ? 64 : 128,
				   .dtype = KVK_DTYPE_BF16,
				   .inner = KVK_INNER_SPLIT};
	kvk_layout_geometry(&e->layout, &g);
	kvk_layout_format(&e->layout, e->layout_text, sizeof e->layout_text);
	e->piece = (size_t)g.page_bytes * e->layout.heads;
	e->paged = (kvk_paged_t){.kind = KVK_PAGED_KV_TOKEN_HEAD,
				 .blocks = KILL_BLOCKS,
				 .layers = e->layout.layers,
				 .heads = e->layout.heads,
				 .block_tokens = TOKENS,
				 .k_dim = e->layout.k_dim,
				 .v_dim = e->layout.v_dim,
				 .dtype = e->layout.dtype,
				 .base = e->base};
	e->identity = (kvc_identity_t){.struct_size = sizeof e->identity,
				       .model = "kill loop",
				       .weights = "none",
				       .dtype = "bf16",
				       .rope = "none",
				       .hash_tokens = TOKENS,
				       .layout = e->layout_text,
				       .page_format = "kill"};
	e->writer = (kvc_writer_t){.head_count = e->layout.heads, .layer_count = e->layout.layers};
	snprintf(e->instance, sizeof e->instance, "kill-%u-%d", e->number, (int)getpid());
}

static int open_worker(engine_t *e)
{
	const kvx_worker_group_t group = {0, &e->paged};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = e->options->socket,
					    .instance = e->instance,
					    .secret = secret,
					    .secret_len = sizeof secret,
					    .program = "gpu_kill",
					    .identity = &e->identity,
					    .layout = &e->layout,
					    .range = e->writer,
					    .groups = &group,
					    .group_count = 1,
					    .memory = kill_memory_cuda() ? KVX_MEMORY_CUDA : KVX_MEMORY_HOST,
					    .cuda = kill_memory_cuda(),
					    .image = kill_memory_image()};
	const uint64_t until = now_ms() + PROVE_MS;
	kvc_status_t status = kvx_worker_open(&config, &e->worker);

	if (status != KVC_OK) {
		printf("gpu_kill: worker %u: %s\n", e->number, kvx_worker_why());
		return 0;
	}
	kvx_worker_stream(e->worker, kill_memory_stream());
	do {
		usleep(1000);
		status = kvx_worker_proved(e->worker);
	} while (status == KVC_PENDING && now_ms() < until && !over);
	if (status != KVC_OK && !over) {
		printf("gpu_kill: worker %u: the self-test says %s\n", e->number, kvc_status_name(status));
	}

	return status == KVC_OK || over;
}

static int open_engine(engine_t *e)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = e->options->socket,
				     .instance = e->instance,
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .role = KVC_ROLE_SCHEDULER,
				     .rank = KVX_SCHEDULER_RANK,
				     .program = "gpu_kill",
				     .timeout_ms = ASK_MS,
				     .lazy = 2};
	const uint64_t until = now_ms() + PROVE_MS;
	const size_t layer_bytes = KILL_BLOCKS * e->piece;
	kvc_status_t status;

	e->cache = kill_memory_take(layer_bytes * e->layout.layers);
	e->bounce = kill_memory_bounce((size_t)KILL_LENGTH * e->layout.layers * e->piece);
	if (!e->cache || !e->bounce) {
		printf("gpu_kill: worker %u has no memory\n", e->number);
		return 0;
	}
	for (uint32_t l = 0; l < e->layout.layers; l++) {
		e->base[l] = e->cache + l * layer_bytes;
	}
	status = kvc_attach(&config, &e->kvc);
	while (status == KVC_OK && !e->space && !over && now_ms() < until) {
		(void)kvc_poll(e->kvc, 5); /* there may be no daemon just now */
		if (kvc_space_open_start(e->kvc, &e->identity, &e->space) != KVC_OK) {
			e->space = NULL;
		}
	}
	if (!e->space && !over) {
		printf("gpu_kill: worker %u: %s\n", e->number, kvc_last_error());
		return 0;
	}

	return open_worker(e);
}

static void close_engine(engine_t *e)
{
	kvx_worker_close(e->worker);
	kvc_space_close(e->space);
	kvc_detach(e->kvc);
	kvx_bytes_free(&e->plan);
	kill_memory_give(e->cache);
	kill_memory_close();
}

/* ---- rounds ------------------------------------------------------------------------------------------------------------ */

/* n different blocks of the cache. */
static void draw_blocks(engine_t *e)
{
	uint32_t all[KILL_BLOCKS];

	e->n = 1 + (uint32_t)(kill_random(&e->rng) % KILL_LENGTH);
	for (uint32_t i = 0; i < KILL_BLOCKS; i++) {
		all[i] = i;
	}
	for (uint32_t i = 0; i < e->n; i++) {
		const uint32_t j = i + (uint32_t)(kill_random(&e->rng) % (KILL_BLOCKS - i));

		e->ids[i] = all[j];
		all[j] = all[i];
	}
}

static kvc_status_t keys_of(const engine_t *e, uint64_t chain, kvc_key_t *keys)
{
	uint32_t tokens[KILL_LENGTH * TOKENS], n = 0;

	for (uint32_t i = 0; i < KILL_LENGTH * TOKENS; i++) {
		tokens[i] = (uint32_t)chain * 100000u + i;
	}

	return kvc_keys_of(e->space, &(kvc_prompt_t){tokens, KILL_LENGTH * TOKENS, NULL}, keys, KILL_LENGTH, &n);
}

/* A step that says which blocks are new owners': what is still to be read of them is read first. */
static void begin_step(engine_t *e, int fence)
{
	kvx_plan_fence_t *record;

	if (fence) {
		kvx_bytes_reset(&e->plan, KVX_PLAN_MAGIC);
		e->step++;
		record = kvx_bytes_record(&e->plan, KVX_RECORD_FENCE, sizeof *record);
		if (record) {
			record->n = e->n;
			kvx_bytes_append(&e->plan, e->ids, e->n * sizeof *e->ids);
		}
	}
	kvx_bytes_finish(&e->plan, e->step);
	kvx_worker_begin(e->worker, e->plan.data, e->plan.len);
}

/* Nobody asked for a report: it is taken, so that there is room for the next one. */
static void drain_reports(engine_t *e)
{
	const void *bytes;
	size_t len;

	do {
		kvx_worker_report(e->worker, &bytes, &len);
	} while (len > 0);
}

static int add_save(engine_t *e, const kvc_put_t *put, uint32_t n)
{
	kvx_plan_save_t *save;
	uint32_t ids[KILL_LENGTH];
	kvc_handle_t handle;

	if (kvc_put_export(put, &handle) != KVC_OK) {
		return 0;
	}
	for (uint32_t i = 0; i < n; i++) {
		ids[i] = kvc_put_block(put, i, NULL) == KVC_ALREADY ? KVX_NO_BLOCK : e->ids[i];
	}
	kvx_bytes_reset(&e->plan, KVX_PLAN_MAGIC);
	e->step++;
	save = kvx_bytes_record(&e->plan, KVX_RECORD_SAVE, sizeof *save);
	if (!save) {
		return 0;
	}
	save->n = n;
	save->step = e->step;
	save->put = handle;

	return kvx_bytes_append(&e->plan, ids, n * sizeof *ids) != NULL;
}

static void save_round(engine_t *e, uint64_t chain)
{
	const kvc_put_options_t options = {.struct_size = sizeof options, .writers = &e->writer, .writer_count = 1};
	const uint64_t lie = e->options->control && e->number == 0 ? 1 : 0;
	kvc_key_t keys[KILL_LENGTH];
	kvc_put_t *put = NULL;
	kvc_status_t status;
	uint32_t n;

	begin_step(e, 1);
	write_blocks(e, chain + lie);
	kvx_worker_end(e->worker);
	if (keys_of(e, chain, keys) != KVC_OK || kvc_put_start(e->space, keys, 0, e->n, &options, &put) != KVC_OK) {
		atomic_fetch_add(&e->count->failed, 1);
		return;
	}
	status = kvc_put_ready(put, ASK_MS);
	n = status == KVC_OK ? kvc_put_n(put) : 0;
	if (n > 0 && add_save(e, put, n)) {
		atomic_store(&e->count->busy, 1);
		begin_step(e, 0);
		kvx_worker_end(e->worker);
		status = kvc_put_wait(put, 0, ASK_MS);
		atomic_store(&e->count->busy, 0);
		atomic_fetch_add(&e->count->saves, status == KVC_OK);
		atomic_fetch_add(&e->count->saved_bytes, status == KVC_OK ? n * e->piece * e->layout.layers : 0);
	}
	atomic_fetch_add(&e->count->failed, status != KVC_OK && status != KVC_ALREADY);
	kvc_put_free(put);
}

static int add_load(engine_t *e, const kvc_lease_t *lease, uint32_t n)
{
	kvx_plan_load_t *load;
	kvx_plan_part_t part = {.n = n};

	if (kvc_lease_export(lease, &part.lease) != KVC_OK) {
		return 0;
	}
	kvx_bytes_reset(&e->plan, KVX_PLAN_MAGIC);
	e->step++;
	load = kvx_bytes_record(&e->plan, KVX_RECORD_LOAD, sizeof *load);
	if (!load) {
		return 0;
	}
	load->load = ++e->load;
	load->timeout_ms = LOAD_MS;
	load->parts = 1;
	load->id_len = 4;

	return kvx_bytes_append(&e->plan, "load", 4) && kvx_bytes_append(&e->plan, &part, sizeof part) &&
	       kvx_bytes_append(&e->plan, e->ids, n * sizeof *e->ids);
}

/* The leased blocks into the round's, and a look at them. */
static void load_blocks(engine_t *e, uint64_t chain, const kvc_lease_t *lease, uint32_t n)
{
	uint8_t failed[KILL_LENGTH] = {0};
	uint32_t bad[KILL_BLOCKS], bads, wrong;

	if (!add_load(e, lease, n)) {
		atomic_fetch_add(&e->count->failed, 1);
		return;
	}
	atomic_store(&e->count->busy, 1);
	begin_step(e, 0);
	kvx_worker_start(e->worker);
	kvx_worker_load(e->worker);
	kvx_worker_end(e->worker);
	bads = kvx_worker_errors(e->worker, bad, KILL_BLOCKS);
	atomic_store(&e->count->busy, 0);
	for (uint32_t i = 0; i < bads; i++) {
		for (uint32_t k = 0; k < n; k++) {
			failed[k] |= bad[i] == e->ids[k];
		}
	}
	wrong = wrong_blocks(e, chain, n, failed);
	if (wrong > 0) {
		printf("gpu_kill: worker %u: %u of %u blocks of prompt %u hold other bytes\n", e->number, wrong, n,
		       (unsigned)chain);
		atomic_fetch_add(&e->count->wrong, wrong);
	}
	atomic_fetch_add(&e->count->failed, bads > 0);
	atomic_fetch_add(&e->count->loads, bads == 0);
	atomic_fetch_add(&e->count->loaded_bytes, (n - (bads < n ? bads : n)) * e->piece * e->layout.layers);
}

static void load_round(engine_t *e, uint64_t chain)
{
	kvc_key_t keys[KILL_LENGTH];
	kvc_lease_t *lease = NULL;
	kvc_status_t status = keys_of(e, chain, keys);

	/* Bytes of nobody, so that a load that leaves a block as it was is seen. */
	begin_step(e, 1);
	write_blocks(e, KILL_CHAINS + chain);
	kvx_worker_end(e->worker);
	if (status == KVC_OK) {
		status = kvc_acquire(e->space, keys, e->n, 0, LEASE_MS, &lease);
	}
	if (status == KVC_OK && kvc_lease_n(lease) > 0) {
		load_blocks(e, chain, lease, kvc_lease_n(lease));
	} else {
		atomic_fetch_add(status == KVC_MISS ? &e->count->misses : &e->count->failed, 1);
	}
	if (lease) {
		kvc_release(&lease, 1);
	}
}

int kill_worker(const kill_options_t *options, uint32_t number, kill_state_t *state)
{
	engine_t e = {.options = options, .count = &state->worker[number], .number = number};
	int status = kill_memory_open(options->host);

	if (status != 0) {
		return status;
	}
	signal(SIGTERM, on_term);
	e.rng = options->seed ^ (uint64_t)getpid() << 20;
	atomic_store(&e.count->busy, 0);
	describe(&e);
	if (!open_engine(&e)) {
		return 4;
	}
	while (!over && getppid() != 1) {
		const uint64_t chain = kill_random(&e.rng) % KILL_CHAINS, failed = atomic_load(&e.count->failed);

		(void)kvc_poll(e.kvc, 0);
		draw_blocks(&e);
		if (kill_random(&e.rng) % 5 < SAVE_FIRST) {
			save_round(&e, chain);
		} else {
			load_round(&e, chain);
		}
		drain_reports(&e);
		atomic_fetch_add(&e.count->rounds, 1);
		if (atomic_load(&e.count->failed) > failed) { /* perhaps there is no daemon */
			usleep(1000);
		}
	}
	close_engine(&e);

	return atomic_load(&e.count->wrong) > 0 ? 3 : 0;
}
