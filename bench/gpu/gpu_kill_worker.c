/* A worker of the kill loop: it saves prompts whose blocks hold what their numbers say and loads what is there, over
 * and over, through the same kvx_worker_t that vLLM's worker uses; every block that came is compared. It may be killed,
 * and the daemon under it, at any line. */
#include "bench.h"
#include "gpu_engine.h"
#include "gpu_kill.h"

#include <stdio.h>
#include <unistd.h>

#define LEASE_MS   60000u
#define SAVE_FIRST 3u /* of 5 rounds save */

typedef struct killed {
	engine_t engine;
	const kill_options_t *options;
	kill_count_t *count;
	uint32_t number;
	uint64_t rng;
	uint32_t ids[KILL_LENGTH], n; /* of the round */
} killed_t;

/* What a block of a prompt holds; KILL_CHAINS and more: no prompt's bytes. */
static uint64_t seed_of(uint64_t chain, uint32_t block)
{
	return chain * KILL_LENGTH + block + 1;
}

/* The round's blocks get the bytes of a prompt. */
static void write_blocks(killed_t *e, uint64_t chain)
{
	for (uint32_t i = 0; i < e->n; i++) {
		engine_write(&e->engine, e->ids[i], seed_of(chain, i));
	}
}

/* Every block that is not in failed[] holds what it should. Returns those that do not. */
static uint32_t count_wrong(killed_t *e, uint64_t chain, uint32_t n, const uint8_t *failed)
{
	uint32_t wrong = 0;

	for (uint32_t i = 0; i < n; i++) {
		wrong += !failed[i] && !engine_holds(&e->engine, e->ids[i], seed_of(chain, i));
		atomic_fetch_add(&e->count->blocks, !failed[i]);
	}

	return wrong;
}

/* ---- rounds ---------------------------------------------------------------------------------- */

/* n different blocks of the cache. */
static void draw_blocks(killed_t *e)
{
	uint32_t all[KILL_BLOCKS];

	e->n = 1 + (uint32_t)(bench_random(&e->rng) % KILL_LENGTH);
	for (uint32_t i = 0; i < KILL_BLOCKS; i++) {
		all[i] = i;
	}
	for (uint32_t i = 0; i < e->n; i++) {
		const uint32_t j = i + (uint32_t)(bench_random(&e->rng) % (KILL_BLOCKS - i));

		e->ids[i] = all[j];
		all[j] = all[i];
	}
}

static void save_round(killed_t *e, uint64_t chain)
{
	const kvc_put_options_t options = {
		.struct_size = sizeof options, .writers = &e->engine.writer, .writer_count = 1};
	const uint64_t lie = e->options->control && e->number == 0 ? 1 : 0;
	kvc_key_t keys[KILL_LENGTH];
	kvc_put_t *put = NULL;
	kvc_status_t status;
	uint32_t n;

	engine_fence(&e->engine, e->ids, e->n);
	write_blocks(e, chain + lie);
	engine_end(&e->engine);
	if (engine_keys(&e->engine, chain, keys) != KVC_OK ||
	    kvc_put_start(e->engine.space, keys, 0, e->n, &options, &put) != KVC_OK) {
		atomic_fetch_add(&e->count->failed, 1);
		return;
	}
	status = kvc_put_ready(put, ENGINE_ASK_MS);
	n = status == KVC_OK ? kvc_put_n(put) : 0;
	atomic_store(&e->count->busy, n > 0);
	if (n > 0 && engine_save(&e->engine, put, e->ids, n)) {
		status = kvc_put_wait(put, 0, ENGINE_ASK_MS);
		atomic_fetch_add(&e->count->saves, status == KVC_OK);
		atomic_fetch_add(&e->count->saved_bytes, status == KVC_OK ? n * e->engine.block_bytes : 0);
	}
	atomic_store(&e->count->busy, 0);
	atomic_fetch_add(&e->count->failed, status != KVC_OK && status != KVC_ALREADY);
	kvc_put_free(put);
}

/* The leased blocks into the round's, and a look at them. */
static void load_blocks(killed_t *e, uint64_t chain, const kvc_lease_t *lease, uint32_t n)
{
	uint8_t failed[KILL_LENGTH] = {0};
	uint32_t bad[KILL_BLOCKS], bads, wrong;

	atomic_store(&e->count->busy, 1);
	if (!engine_load(&e->engine, lease, e->ids, n)) {
		atomic_store(&e->count->busy, 0);
		atomic_fetch_add(&e->count->failed, 1);
		return;
	}
	bads = kvx_worker_take_failed_blocks(e->engine.worker, bad, KILL_BLOCKS);
	atomic_store(&e->count->busy, 0);
	for (uint32_t i = 0; i < bads; i++) {
		for (uint32_t k = 0; k < n; k++) {
			failed[k] |= bad[i] == e->ids[k];
		}
	}
	wrong = count_wrong(e, chain, n, failed);
	if (wrong > 0) {
		printf("gpu_kill: worker %u: %u of %u blocks of prompt %u hold other bytes\n", e->number, wrong, n,
		       (unsigned)chain);
		atomic_fetch_add(&e->count->wrong, wrong);
	}
	atomic_fetch_add(&e->count->failed, bads > 0);
	atomic_fetch_add(&e->count->loads, bads == 0);
	atomic_fetch_add(&e->count->loaded_bytes, (n - (bads < n ? bads : n)) * e->engine.block_bytes);
}

static void load_round(killed_t *e, uint64_t chain)
{
	kvc_key_t keys[KILL_LENGTH];
	kvc_lease_t *lease = NULL;
	kvc_status_t status = engine_keys(&e->engine, chain, keys);

	/* Bytes of nobody, so that a load that leaves a block as it was is seen. */
	engine_fence(&e->engine, e->ids, e->n);
	write_blocks(e, KILL_CHAINS + chain);
	engine_end(&e->engine);
	if (status == KVC_OK) {
		status = kvc_acquire(e->engine.space, keys, e->n, 0, LEASE_MS, &lease);
	}
	if (status == KVC_OK && kvc_lease_n(lease) > 0) {
		load_blocks(e, chain, lease, kvc_lease_n(lease));
	} else {
		atomic_fetch_add(status == KVC_MISS ? &e->count->misses : &e->count->failed, 1);
	}
	kvc_release(&lease, 1);
}

int kill_worker(const kill_options_t *options, uint32_t number, kill_state_t *state, const char *dir)
{
	char socket[192];
	killed_t k = {.options = options,
		      .count = &state->worker[number],
		      .number = number,
		      .engine = {.program = "kill loop",
				 .socket = socket,
				 .layout = ENGINE_SHAPE(kill_is_small(options)),
				 .blocks = KILL_BLOCKS,
				 .length = KILL_LENGTH}};
	int status = memory_open(options->host);

	if (status != 0) {
		return status;
	}
	snprintf(socket, sizeof socket, "%s/run/default.sock", dir);
	bench_limit(0);
	k.rng = options->seed ^ (uint64_t)getpid() << 20;
	atomic_store(&k.count->busy, 0);
	if (!engine_open(&k.engine)) {
		return 4;
	}
	while (!bench_late() && getppid() != 1) {
		const uint64_t chain = bench_random(&k.rng) % KILL_CHAINS, failed = atomic_load(&k.count->failed);

		(void)kvc_poll(k.engine.kvc, 0);
		draw_blocks(&k);
		if (bench_random(&k.rng) % 5 < SAVE_FIRST) {
			save_round(&k, chain);
		} else {
			load_round(&k, chain);
		}
		atomic_fetch_add(&k.count->rounds, 1);
		if (atomic_load(&k.count->failed) > failed) { /* perhaps there is no daemon */
			usleep(1000);
		}
	}
	engine_close(&k.engine);
	memory_close();

	return atomic_load(&k.count->wrong) > 0 ? 3 : 0;
}
