/* connector/load -- 100 MB of an engine's cache (256 blocks of 384 KiB, 6 layers of opaque pages) loaded by a worker
 * synchronously, verified, against memcpy of the same pages on one thread. ns. Goal: ratio <= 1.
 * connector/first -- the first such load of a process, after half a second without work: with and without touching the
 * pages in the background.
 * connector/save -- the same blocks from end() of a step until the daemon has them all, against the same memcpy. No
 * request waits for a save: for information.
 * connector/save-groups, connector/load-groups -- as many bytes of a hybrid's three groups: 240 blocks of 256 KiB (two
 * heads), a window of 128 blocks of 128 KiB (one head), all in pages of 64 KiB, and a state of 20 MiB. Each against the
 * blocks of one group, saved and loaded in the same way: loads of several groups are asynchronous, so both are, for an
 * engine that has nothing else to do. Goal: ratio <= 1.1. */
#include "bench.h"
#include "gpu_engine.h"
#include "rig.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS 256u
#define LAYERS 6u
#define PAGE   65536u
#define BYTES  ((size_t)BLOCKS * LAYERS * PAGE)
#define WAIT   20000u /* ms */
#define IDLE   500u   /* ms before a first load */

/* The hybrid's. */
#define GROUPS       3u
#define UNITS        240u /* blocks of its first group */
#define WINDOW       128u
#define WINDOW_BYTES ((size_t)128 << 10)
#define STATE_LAYERS 10u
#define STATE_PAGE   (2u << 20)
#define FIRST_BYTES  ((size_t)256 << 10)
_Static_assert(UNITS *FIRST_BYTES + WINDOW * WINDOW_BYTES + (size_t)STATE_LAYERS * STATE_PAGE == BYTES,
	       "as many bytes");

static struct {
	rig_t rig;
	engine_t engine;
	uint8_t *other; /* as large as the engine's cache: what the reference reads */
	kvc_key_t keys[BLOCKS];
	uint32_t ids[BLOCKS];
	uint64_t seed;
	kvc_lease_t *lease;
	engine_t hybrid_engine;
	kvx_worker_group_t more[GROUPS - 1u];
	kvk_layout_t layouts[GROUPS];
	kvk_paged_t paged[GROUPS];
	uint8_t *memory[GROUPS];
	void *base[GROUPS][STATE_LAYERS];
	kvc_key_t hybrid_keys[UNITS];
	uint32_t hybrid_ids[UNITS], window_ids[WINDOW], state_id;
	engine_part_t parts[GROUPS];
	kvc_lease_t *leases[GROUPS];
} work;

static bench_outcome_t sample(uint64_t ns, uint64_t cpu_before, bench_sample_t *p_sample)
{
	p_sample->value = (double)ns;
	p_sample->ops = BLOCKS;
	p_sample->cpu_ns = (double)(bench_process_cpu_ns() - cpu_before);

	return ns > 0 ? BENCH_DONE : bench_fail("blocks were not moved: %s", kvc_last_error());
}

static bench_outcome_t copy(void *arg, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns(), start = bench_now_ns();

	(void)arg;
	for (uint32_t i = 0; i < BLOCKS; i++) {
		for (uint32_t l = 0; l < LAYERS; l++) {
			memcpy(work.engine.cache + ((size_t)l * BLOCKS + work.ids[i]) * PAGE,
			       work.other + ((size_t)i * LAYERS + l) * PAGE, PAGE);
		}
	}

	return sample(bench_now_ns() - start, cpu, p_sample);
}

/* Store the cache's blocks under new keys: from end() until the daemon has them, in ns; 0: failed. */
static uint64_t save_all(void)
{
	engine_t *e = &work.engine;
	const kvc_put_options_t options = {.struct_size = sizeof options, .writers = &e->writer, .writer_count = 1};
	kvc_put_t *put = NULL;
	kvc_status_t status = engine_keys(e, ++work.seed, work.keys);
	uint64_t ns = 0;

	status = status == KVC_OK ? kvc_put_start(e->space, work.keys, 0, BLOCKS, &options, &put) : status;
	status = status == KVC_OK ? kvc_put_ready(put, WAIT) : status;
	if (status == KVC_OK && kvc_put_n(put) == BLOCKS && engine_save(e, put, work.ids, BLOCKS) &&
	    kvx_worker_flush(e->worker, WAIT) == KVC_OK) {
		ns = bench_now_ns() - e->end_ns;
		ns = kvc_put_wait(put, 0, WAIT) == KVC_OK ? ns : 0;
	}
	kvc_put_free(put);

	return ns;
}

/* So often, tried again while there is no memory yet: ns of the last. 0: it took too long. */
static uint64_t save_times(uint64_t (*save_once)(void), uint32_t times)
{
	const uint64_t end = bench_now_ns() + WAIT * UINT64_C(1000000);
	uint64_t ns = 0;

	while (times > 0) {
		ns = save_once();
		times -= ns ? 1u : 0u;
		if (ns == 0 && (bench_now_ns() >= end || bench_late())) {
			return 0;
		}
		usleep(ns ? 0 : 20000);
	}

	return ns;
}

static bench_outcome_t save(void *arg, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns();

	(void)arg;
	return sample(save_times(save_all, 1), cpu, p_sample);
}

/* begin() to load(): what the step waits. */
static bench_outcome_t load(void *arg, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns(), start = bench_now_ns();
	const int sent = engine_load(&work.engine, work.lease, work.ids, BLOCKS);
	const uint64_t ns = bench_now_ns() - start;
	uint32_t bad;

	(void)arg;
	return sample(sent && kvx_worker_take_failed_blocks(work.engine.worker, &bad, 1) == 0 ? ns : 0, cpu, p_sample);
}

/* Ours: with the pages touched in idle time. */
static bench_outcome_t load_first(void *arg, bench_sample_t *p_sample)
{
	engine_t *e = &work.engine;
	uint8_t *cache = calloc(1, BYTES); /* as an engine's: nobody has touched it yet */
	bench_outcome_t outcome;

	kvx_worker_close(e->worker);
	e->worker = NULL;
	e->prefault = !p_sample->is_reference;
	if (cache) {
		engine_place(e, cache);
	}
	if (!cache || !engine_open_worker(e)) {
		free(cache);
		return bench_fail("no worker");
	}
	usleep(IDLE * 1000u);
	outcome = load(arg, p_sample);
	kvx_worker_close(e->worker);
	e->worker = NULL;
	free(cache);

	return outcome;
}

/* ---- the hybrid ------------------------------------------------------------------------------ */

/* As save_all(). */
static uint64_t save_all_groups(void)
{
	engine_t *e = &work.hybrid_engine;
	kvc_put_t *puts[GROUPS] = {NULL};
	kvc_status_t status = engine_keys(e, ++work.seed, work.hybrid_keys);
	uint64_t ns = 0;

	for (uint32_t g = 0; g < GROUPS && status == KVC_OK; g++) {
		engine_part_t *part = &work.parts[g];
		const kvc_writer_t writer = {.head_count = work.layouts[g].heads,
					     .layer_count = work.layouts[g].layers};
		const kvc_put_options_t options = {
			.struct_size = sizeof options, .writers = &writer, .writer_count = 1, .group = g};

		status = kvc_put_start(e->space, work.hybrid_keys + part->first, 0, part->n, &options, &puts[g]);
		part->put = puts[g];
	}
	for (uint32_t g = 0; g < GROUPS && status == KVC_OK; g++) {
		status = kvc_put_ready(puts[g], WAIT);
		status = status == KVC_OK && kvc_put_n(puts[g]) < work.parts[g].n ? KVC_ERR_BUSY : status;
	}
	if (status == KVC_OK && engine_save_parts(e, work.parts, GROUPS) &&
	    kvx_worker_flush(e->worker, WAIT) == KVC_OK) {
		ns = bench_now_ns() - e->end_ns;
	}
	for (uint32_t g = 0; g < GROUPS; g++) {
		ns = ns > 0 && kvc_put_wait(puts[g], 0, WAIT) == KVC_OK ? ns : 0;
		kvc_put_free(puts[g]);
	}

	return ns;
}

static bench_outcome_t save_groups(void *arg, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns();

	(void)arg;
	return sample(save_times(save_all_groups, 1), cpu, p_sample);
}

static bench_outcome_t load_parts(engine_t *e, const engine_part_t *parts, uint32_t count, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns(), start = bench_now_ns();
	const int loaded = engine_load_async(e, parts, count);
	const uint64_t ns = bench_now_ns() - start;

	return sample(loaded ? ns : 0, cpu, p_sample);
}

static bench_outcome_t load_groups(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return load_parts(&work.hybrid_engine, work.parts, GROUPS, p_sample);
}

static bench_outcome_t load_async(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return load_parts(&work.engine, &(engine_part_t){.lease = work.lease, .ids = work.ids, .n = BLOCKS}, 1,
			  p_sample);
}

static void hybrid_key(void *ctx, uint32_t i, kvc_key_t *key)
{
	(void)ctx;
	*key = work.hybrid_keys[i];
}

static int lease_groups(void)
{
	const kvc_key_source_t source = {.key = hybrid_key};
	const uint64_t end = bench_now_ns() + WAIT * UINT64_C(1000000);
	engine_t *e = &work.hybrid_engine;

	for (uint32_t g = 0; g < GROUPS; g++) {
		const kvc_want_t want = {.struct_size = sizeof want,
					 .group = g,
					 .n = UNITS,
					 .skip = work.parts[g].first,
					 .ttl_ms = 600000,
					 .source = &source};

		if (kvc_lease_start(e->space, &want, &work.leases[g]) != KVC_OK) {
			return 0;
		}
		while (kvc_lease_state(work.leases[g]) == KVC_PENDING && bench_now_ns() < end) {
			(void)kvc_poll(e->kvc, 5);
		}
		if (kvc_lease_state(work.leases[g]) != KVC_OK || kvc_lease_n(work.leases[g]) != UNITS) {
			return 0;
		}
		work.parts[g].lease = work.leases[g];
	}

	return 1;
}

/* The groups after the first: their memory, and where it has which page. */
static int describe_groups(void)
{
	work.layouts[0] = work.hybrid_engine.layout;
	work.layouts[1] = work.layouts[0];
	work.layouts[1].heads = 1;
	work.layouts[2] = (kvk_layout_t){.heads = 1,
					 .layers = STATE_LAYERS,
					 .block_tokens = work.layouts[0].block_tokens,
					 .dtype = KVK_DTYPE_BF16,
					 .inner = KVK_INNER_OPAQUE,
					 .page_bytes = STATE_PAGE};
	for (uint32_t g = 1; g < GROUPS; g++) {
		const kvk_layout_t *layout = &work.layouts[g];
		kvk_geometry_t geometry;

		kvk_layout_geometry(layout, &geometry);
		work.memory[g] = bench_memory((size_t)work.parts[g].n * geometry.block_bytes);
		if (!work.memory[g]) {
			return 0;
		}
		bench_fill(work.memory[g], (size_t)work.parts[g].n * geometry.block_bytes, g);
		for (uint32_t l = 0; l < layout->layers; l++) {
			work.base[g][l] = work.memory[g] + (size_t)l * work.parts[g].n * geometry.page_bytes;
		}
		work.paged[g] = (kvk_paged_t){.kind = g == 1 ? KVK_PAGED_HEAD_TOKEN_KV : KVK_PAGED_OPAQUE,
					      .page_bytes = layout->page_bytes,
					      .blocks = work.parts[g].n,
					      .layers = layout->layers,
					      .heads = layout->heads,
					      .block_tokens = layout->block_tokens,
					      .k_dim = layout->k_dim,
					      .v_dim = layout->v_dim,
					      .dtype = layout->dtype,
					      .base = work.base[g]};
		work.more[g - 1u] = (kvx_worker_group_t){.group = g, .layout = layout, .paged = &work.paged[g]};
	}

	return 1;
}

static int prepare_groups(void)
{
	engine_t *e = &work.hybrid_engine;

	*e = (engine_t){.program = "hybrid",
			.socket = work.rig.socket,
			.layout = {.heads = 2,
				   .layers = 2,
				   .block_tokens = 64,
				   .k_dim = 256,
				   .v_dim = 256,
				   .dtype = KVK_DTYPE_BF16,
				   .inner = KVK_INNER_PACKED},
			.blocks = UNITS,
			.length = UNITS,
			.groups = "0:full:64,1:window:64:8192,2:state:64",
			.more = work.more,
			.more_count = GROUPS - 1u};
	for (uint32_t i = 0; i < UNITS; i++) {
		work.hybrid_ids[i] = i * 77u % UNITS;
		work.window_ids[i % WINDOW] = i * 77u % WINDOW;
	}
	work.parts[0] = (engine_part_t){.group = 0, .n = UNITS, .ids = work.hybrid_ids};
	work.parts[1] = (engine_part_t){.group = 1, .first = UNITS - WINDOW, .n = WINDOW, .ids = work.window_ids};
	work.parts[2] = (engine_part_t){.group = 2, .first = UNITS - 1u, .n = 1, .ids = &work.state_id};
	if (!describe_groups() || !engine_open(e)) {
		return 0;
	}
	bench_fill(e->cache, UNITS * FIRST_BYTES, 3);
	kvc_release(&work.lease, 1);
	work.lease = NULL;
	for (uint32_t i = 0; i < 6; i++) {
		if (!save_times(save_all, 1) || !save_times(save_all_groups, 1)) {
			return 0;
		}
	}

	return lease_groups() && kvc_acquire(work.engine.space, work.keys, BLOCKS, 0, 600000, &work.lease) == KVC_OK;
}

static void close_groups(void)
{
	engine_close(&work.hybrid_engine);
	for (uint32_t g = 1; g < GROUPS; g++) {
		free(work.memory[g]);
	}
}

static int prepare(int hybrid)
{
	memset(&work, 0, sizeof work);
	work.engine = (engine_t){.program = "connector",
				 .socket = work.rig.socket,
				 .layout = {.heads = 1,
					    .layers = LAYERS,
					    .block_tokens = 32,
					    .dtype = KVK_DTYPE_BF16,
					    .inner = KVK_INNER_OPAQUE,
					    .page_bytes = PAGE},
				 .blocks = BLOCKS,
				 .length = BLOCKS};
	for (uint32_t i = 0; i < BLOCKS; i++) {
		work.ids[i] = i * 85u % BLOCKS; /* an engine's table is not in order */
	}
	work.other = bench_memory(BYTES);
	if (!work.other || memory_open(1) != 0 ||
	    rig_start(&work.rig,
		      " --limits.silence=10s --cpu.size=%s --cpu.ahead=all --nvme.path= --events.enabled=off",
		      hybrid ? "1GiB" : "512MiB") != 0 ||
	    !engine_open(&work.engine)) {
		return 0;
	}
	bench_fill(work.engine.cache, BYTES, 1);
	bench_fill(work.other, BYTES, 2);

	/* Once through the whole pool: a daemon touches memory before it lends it. */
	return save_times(save_all, hybrid ? 12 : 7) > 0 &&
	       kvc_acquire(work.engine.space, work.keys, BLOCKS, 0, 600000, &work.lease) == KVC_OK;
}

static const bench_measurement_t rows[] = {
	{"connector/load", "ns", "memcpy, one thread", load, copy, 0, BENCH_RATIO_AT_MOST, 1.0},
	{"connector/first", "ns", "without touching pages before", load_first, load_first, 5, BENCH_NO_GOAL, 0},
	{"connector/save", "ns", "memcpy, one thread", save, copy, 0, BENCH_NO_GOAL, 0},
	{"connector/save-groups", "ns", "one group", save_groups, save, 0, BENCH_RATIO_AT_MOST, 1.1},
	{"connector/load-groups", "ns", "one group", load_groups, load_async, 0, BENCH_RATIO_AT_MOST, 1.1},
};

bench_outcome_t run_connector(int variant)
{
	const int hybrid = rows[variant].value_fn == save_groups || rows[variant].value_fn == load_groups;
	const bench_outcome_t outcome = prepare(hybrid) && (!hybrid || prepare_groups())
						? bench_measure(NULL, &rows[variant])
						: bench_fail("no daemon and worker: %s", kvc_last_error());

	close_groups();
	engine_close(&work.engine);
	memory_close();
	rig_remove(&work.rig);
	free(work.other);

	return outcome;
}
