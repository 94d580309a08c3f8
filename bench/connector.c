/* connector/load -- 100 MB of an engine's cache (256 blocks of 384 KiB, 6 layers of opaque pages) loaded by a worker
 * synchronously, verified, against memcpy of the same pages on one thread. ns. Goal: ratio <= 1.
 * connector/first -- the first such load of a process, after half a second without work: with and without touching the
 * pages in the background.
 * connector/save -- the same blocks from end() of a step until the daemon has them all, against the same memcpy. No
 * request waits for a save: for information. */
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

static struct {
	rig_t rig;
	engine_t engine;
	uint8_t *other; /* as large as the engine's cache: what the reference reads */
	kvc_key_t keys[BLOCKS];
	uint32_t ids[BLOCKS];
	uint64_t seed;
	kvc_lease_t *lease;
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

static bench_outcome_t save(void *arg, bench_sample_t *p_sample)
{
	const uint64_t cpu = bench_process_cpu_ns();

	(void)arg;
	return sample(save_all(), cpu, p_sample);
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

static int prepare(void)
{
	const uint64_t end = bench_now_ns() + WAIT * UINT64_C(1000000);

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
		      " --limits.silence=10s --cpu.size=512MiB --cpu.ahead=all --nvme.path= --events.enabled=off") !=
		    0 ||
	    !engine_open(&work.engine)) {
		return 0;
	}
	bench_fill(work.engine.cache, BYTES, 1);
	bench_fill(work.other, BYTES, 2);

	/* Once through the whole pool: a daemon touches memory before it lends it. */
	for (uint32_t saved = 0; saved < 6 && bench_now_ns() < end && !bench_late();) {
		const int done = save_all() > 0;

		saved += (uint32_t)done;
		usleep(done ? 0 : 20000);
	}

	return save_all() > 0 && kvc_acquire(work.engine.space, work.keys, BLOCKS, 0, 600000, &work.lease) == KVC_OK;
}

static const bench_measurement_t rows[] = {
	{"connector/load", "ns", "memcpy, one thread", load, copy, 0, BENCH_RATIO_AT_MOST, 1.0},
	{"connector/first", "ns", "without touching pages before", load_first, load_first, 5, BENCH_NO_GOAL, 0},
	{"connector/save", "ns", "memcpy, one thread", save, copy, 0, BENCH_NO_GOAL, 0},
};

bench_outcome_t run_connector(int variant)
{
	const bench_outcome_t outcome = prepare() ? bench_measure(NULL, &rows[variant])
						  : bench_fail("no daemon and worker: %s", kvc_last_error());

	engine_close(&work.engine);
	memory_close();
	rig_remove(&work.rig);
	free(work.other);

	return outcome;
}
