/* connector/load -- 100 MB of an engine's cache (256 blocks of 384 KiB, 6 layers of opaque pages) loaded by a worker
 * synchronously, verified, against memcpy of the same pages on one thread. ns. Goal: ratio <= 1, and far below 15 ms on
 * two cores.
 *
 * connector/first -- the same, the first load of a process, after half a second of idling: with and without touching
 * the pages in the background.
 *
 * connector/save -- the same blocks from end() of a step until the daemon has them all, against the same memcpy. Nobody
 * waits for it; for information.
 *
 * Parameters: threads=N that copy in a load (default: chosen by the worker).
 */
#include "bench.h"
#include "rig.h"

#include "kvx_worker.h"
#include "step/message.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCKS 256u
#define LAYERS 6u
#define PAGE   65536u
#define BYTES  ((size_t)BLOCKS * LAYERS * PAGE)
#define TOKENS 32u
#define WAIT   20000u /* ms */
#define IDLE   500u   /* ms before a first load */

typedef struct work {
	rig_t rig;
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity;
	kvc_writer_t writer;
	kvk_paged_t paged;
	void *base[LAYERS];
	uint8_t *cache; /* the engine's */
	uint8_t *other; /* as large: what the reference reads */
	kvx_worker_t *worker;
	uint32_t threads;
	kvc_t *kvc; /* the scheduler's */
	kvc_space_t *space;
	kvc_key_t keys[BLOCKS];
	uint64_t seed;
	kvc_lease_t *lease;
	uint32_t ids[BLOCKS];
	kvx_msg_buf_t plan;
	uint64_t loads;
} work_t;

static const uint8_t secret[16] = "bench's secret!!";

/* ---- members --------------------------------------------------------------------------------- */

static void describe(work_t *w)
{
	w->layout = (kvk_layout_t){.heads = 1,
				   .layers = LAYERS,
				   .block_tokens = TOKENS,
				   .dtype = KVK_DTYPE_F32,
				   .inner = KVK_INNER_OPAQUE,
				   .page_bytes = PAGE};
	(void)kvk_layout_format(&w->layout, w->layout_text, sizeof w->layout_text);
	w->identity = (kvc_identity_t){.struct_size = sizeof w->identity,
				       .model = "connector",
				       .weights = "bench",
				       .dtype = "f32",
				       .rope = "none",
				       .hash_tokens = TOKENS,
				       .layout = w->layout_text,
				       .page_format = "bench"};
	w->writer = (kvc_writer_t){.head_count = 1, .layer_count = LAYERS};
	w->paged = (kvk_paged_t){.kind = KVK_PAGED_OPAQUE,
				 .blocks = BLOCKS,
				 .layers = LAYERS,
				 .heads = 1,
				 .block_tokens = TOKENS,
				 .dtype = KVK_DTYPE_F32,
				 .page_bytes = PAGE,
				 .base = w->base};
	/* An engine's table is not in order. */
	for (uint32_t i = 0; i < BLOCKS; i++) {
		w->ids[i] = i * 85u % BLOCKS;
	}
}

/* A worker over `cache`, proved. */
static int open_worker(work_t *w, uint8_t *cache, int prefault)
{
	const kvx_worker_group_t group = {0, &w->paged};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = w->rig.socket,
					    .instance = "bench",
					    .secret = secret,
					    .secret_len = sizeof secret,
					    .identity = &w->identity,
					    .layout = &w->layout,
					    .range = w->writer,
					    .groups = &group,
					    .group_count = 1,
					    .threads = w->threads,
					    .prefault = prefault};

	for (uint32_t l = 0; l < LAYERS; l++) {
		w->base[l] = cache + (size_t)l * BLOCKS * PAGE;
	}
	if (kvx_worker_open(&config, &w->worker) != KVC_OK) {
		return 0;
	}
	for (uint32_t ms = 0; ms < WAIT && kvx_worker_self_test_status(w->worker) == KVC_PENDING; ms++) {
		usleep(1000);
	}

	return kvx_worker_self_test_status(w->worker) == KVC_OK;
}

static int attach_scheduler(work_t *w)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = w->rig.socket,
				     .instance = "bench",
				     .secret = secret,
				     .secret_len = sizeof secret,
				     .role = KVC_ROLE_SCHEDULER,
				     .rank = KVX_SCHEDULER_RANK,
				     .timeout_ms = WAIT};

	return kvc_attach(&config, &w->kvc) == KVC_OK && kvc_space_open(w->kvc, &w->identity, &w->space) == KVC_OK;
}

/* ---- plans ----------------------------------------------------------------------------------- */

/* Store the cache's blocks under new keys: from end() until the daemon has them, in ns; 0: failed. */
static uint64_t save_all(work_t *w)
{
	const kvc_put_options_t options = {.struct_size = sizeof options, .writers = &w->writer, .writer_count = 1};
	kvx_msg_save_t *save;
	kvc_put_t *put = NULL;
	kvc_status_t status;
	uint64_t start;

	rig_keys(w->space, 0, 0, ++w->seed, BLOCKS, w->keys);
	status = kvc_put_start(w->space, w->keys, 0, BLOCKS, &options, &put);
	if (status != KVC_OK || kvc_put_ready(put, WAIT) != KVC_OK || kvc_put_n(put) != BLOCKS) {
		kvc_put_free(put);
		return 0;
	}
	kvx_msg_reset(&w->plan, KVX_MSG_MAGIC);
	save = kvx_msg_add_record(&w->plan, KVX_RECORD_SAVE, sizeof *save);
	save->n = BLOCKS;
	(void)kvc_put_export(put, &save->put);
	kvx_msg_append(&w->plan, w->ids, sizeof w->ids);
	kvx_msg_finish(&w->plan, 0);

	kvx_worker_begin_step(w->worker, w->plan.data, w->plan.len);
	start = bench_now_ns();
	kvx_worker_end_step(w->worker);
	status = kvx_worker_flush(w->worker, WAIT);
	start = bench_now_ns() - start;
	status = status == KVC_OK ? kvc_put_wait(put, 0, WAIT) : status;
	kvc_put_free(put);

	return status == KVC_OK ? start : 0;
}

/* begin() to load(): what the step waits, in ns; 0: failed. */
static uint64_t load_all(work_t *w)
{
	const kvx_msg_part_t part = {.n = BLOCKS};
	kvx_msg_load_t *load;
	kvx_msg_part_t named = part;
	const void *report;
	uint64_t start;
	uint32_t bad;
	size_t len;

	kvx_msg_reset(&w->plan, KVX_MSG_MAGIC);
	load = kvx_msg_add_record(&w->plan, KVX_RECORD_LOAD, sizeof *load);
	load->load = ++w->loads;
	load->timeout_ms = WAIT;
	load->parts = 1;
	load->id_len = 1;
	kvx_msg_append(&w->plan, "r", 1);
	(void)kvc_lease_export(w->lease, &named.lease);
	kvx_msg_append(&w->plan, &named, sizeof named);
	kvx_msg_append(&w->plan, w->ids, sizeof w->ids);
	kvx_msg_finish(&w->plan, 0);

	start = bench_now_ns();
	kvx_worker_begin_step(w->worker, w->plan.data, w->plan.len);
	kvx_worker_start_async_loads(w->worker);
	kvx_worker_run_sync_loads(w->worker);
	start = bench_now_ns() - start;
	kvx_worker_take_report(w->worker, &report, &len);

	return kvx_worker_take_failed_blocks(w->worker, &bad, 1) == 0 ? start : 0;
}

/* ---- samples --------------------------------------------------------------------------------- */

static bench_outcome_t sample(bench_run_t *run, uint64_t ns, bench_sample_t *p_sample)
{
	if (ns == 0) {
		return bench_fail(run, "blocks were not moved: %s", kvc_last_error());
	}
	p_sample->value = (double)ns;
	p_sample->ops = BLOCKS;

	return BENCH_DONE;
}

static bench_outcome_t copy(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *w = arg;
	const uint64_t start = bench_now_ns();

	for (uint32_t i = 0; i < BLOCKS; i++) {
		for (uint32_t l = 0; l < LAYERS; l++) {
			memcpy(w->cache + ((size_t)l * BLOCKS + w->ids[i]) * PAGE,
			       w->other + ((size_t)i * LAYERS + l) * PAGE, PAGE);
		}
	}

	return sample(run, bench_now_ns() - start, p_sample);
}

static bench_outcome_t load(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	const uint64_t before = bench_process_cpu_ns();
	const bench_outcome_t outcome = sample(run, load_all(arg), p_sample);

	p_sample->cpu_ns = (double)(bench_process_cpu_ns() - before);

	return outcome;
}

static bench_outcome_t save(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	const uint64_t before = bench_process_cpu_ns();
	const bench_outcome_t outcome = sample(run, save_all(arg), p_sample);

	p_sample->cpu_ns = (double)(bench_process_cpu_ns() - before);

	return outcome;
}

static bench_outcome_t first(bench_run_t *run, work_t *w, int prefault, bench_sample_t *p_sample)
{
	bench_outcome_t outcome;
	uint8_t *cache = calloc(1, BYTES); /* as an engine's: nobody has touched it yet */

	kvx_worker_close(w->worker);
	w->worker = NULL;
	if (!cache || !open_worker(w, cache, prefault)) {
		free(cache);
		return bench_fail(run, "no worker");
	}
	usleep(IDLE * 1000u);
	outcome = sample(run, load_all(w), p_sample);
	kvx_worker_close(w->worker);
	w->worker = NULL;
	free(cache);

	return outcome;
}

static bench_outcome_t first_touched(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	return first(run, arg, 1, p_sample);
}

static bench_outcome_t first_untouched(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	return first(run, arg, 0, p_sample);
}

/* ---- runs ------------------------------------------------------------------------------------ */

static int prepare(bench_run_t *run, work_t *w)
{
	describe(w);
	w->threads = (uint32_t)strtoul(bench_param(run, "threads", "0"), NULL, 10);
	w->rig = (rig_t){.cpu = -1, .options = {"--cpu.size=512MiB", "--nvme.path=", "--events.enabled=off"}};
	w->cache = bench_memory(BYTES);
	w->other = bench_memory(BYTES);
	if (!w->cache || !w->other) {
		return 0;
	}
	bench_fill(w->cache, BYTES, 1);
	bench_fill(w->other, BYTES, 2);

	return rig_start(&w->rig, WAIT) == 0 && attach_scheduler(w) && open_worker(w, w->cache, 0) && save_all(w) > 0 &&
	       kvc_acquire(w->space, w->keys, BLOCKS, 0, 600000, &w->lease) == KVC_OK;
}

static bench_outcome_t run_with(bench_run_t *run, const bench_measurement_t *m)
{
	work_t *w = calloc(1, sizeof *w);
	bench_measurement_t of = *m;
	bench_outcome_t outcome;

	if (!w) {
		return bench_fail(run, "no memory");
	}
	of.arg = w;
	outcome = prepare(run, w) ? bench_measure(run, &of)
				  : bench_fail(run, "no daemon and worker: %s", kvc_last_error());
	kvx_worker_close(w->worker);
	kvc_detach(w->kvc);
	rig_remove(&w->rig);
	kvx_msg_free(&w->plan);
	bench_memory_free(w->cache, BYTES);
	bench_memory_free(w->other, BYTES);
	free(w);

	return outcome;
}

static bench_outcome_t run_load(bench_run_t *run)
{
	return run_with(run, &(bench_measurement_t){.name = "connector/load",
						    .unit = "ns",
						    .reference = "memcpy, one thread",
						    .value_fn = load,
						    .reference_fn = copy,
						    .goal = BENCH_RATIO_AT_MOST,
						    .goal_value = 1.0});
}

static bench_outcome_t run_first(bench_run_t *run)
{
	return run_with(run, &(bench_measurement_t){.name = "connector/first",
						    .unit = "ns",
						    .reference = "without touching pages before",
						    .value_fn = first_touched,
						    .reference_fn = first_untouched,
						    .rounds = 5});
}

static bench_outcome_t run_save(bench_run_t *run)
{
	return run_with(run, &(bench_measurement_t){.name = "connector/save",
						    .unit = "ns",
						    .reference = "memcpy, one thread",
						    .value_fn = save,
						    .reference_fn = copy});
}

const bench_t bench_connector_load = {
	.name = "connector/load",
	.measures = "100 MB in blocks of 384 KiB, 6 layers, into an engine's cache synchronously, verified",
	.reference = "memcpy of the same pages on one thread",
	.goal = "ratio <= 1",
	.run = run_load,
};

const bench_t bench_connector_first = {
	.name = "connector/first",
	.measures = "the first such load of a process, its pages touched in idle time",
	.reference = "the same without",
	.goal = "",
	.run = run_first,
};

const bench_t bench_connector_save = {
	.name = "connector/save",
	.measures = "the same blocks from the end of a step until the daemon has them",
	.reference = "memcpy of the same pages on one thread",
	.goal = "",
	.run = run_save,
};
