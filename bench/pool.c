/* pool -- verified put and get through the daemon, process to process: what one process puts, another gets. Sources and
 * destinations are cold and already touched; the pool was filled once before, so puts evict.
 *   batch-8m, batch-1m       GB/s, against one core's non-temporal copy of as many bytes, and against libc's memcpy
 *   single-64k, single-256k  ns a block, against two raw socket round trips plus a non-temporal copy */
#include "bench.h"
#include "rig.h"

#include "kv/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define COLD_BYTES  ((size_t)256 << 20)
#define POOL_BYTES  ((size_t)1 << 30)
#define MAX_BATCH   64u
#define SPIN_US     200u
#define ASK_BYTES   160u
#define REPLY_BYTES 72u

typedef struct work {
	rig_t rig;
	kvc_t *kvc;
	kvc_space_t *space;
	rig_echo_t echo;
	uint32_t block_bytes;
	uint32_t batch;    /* blocks */
	uint32_t batches;  /* that fit into the pool, twice over */
	uint32_t ops;      /* a sample */
	uint64_t put_next; /* seed of the next new batch */
	uint32_t got;      /* batches of the other process read so far */
	uint32_t others;   /* batches of the other process */
	uint8_t *source, *target;
	size_t at; /* in source and target */
	int trips; /* the reference makes round trips too */
} work_t;

static size_t batch_bytes(const work_t *work)
{
	return (size_t)work->batch * work->block_bytes;
}

/* The next cold piece of source and target. */
static size_t advance(work_t *work)
{
	size_t at = work->at;

	work->at += batch_bytes(work);
	if (work->at + batch_bytes(work) > COLD_BYTES) {
		work->at = 0;
	}

	return at;
}

static kvc_status_t put_batch(work_t *work, uint64_t seed, const uint8_t *source)
{
	kvc_key_t keys[MAX_BATCH];
	const void *blocks[MAX_BATCH];
	kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks};
	uint32_t visible = 0;
	kvc_status_t status;

	rig_keys(work->space, 0, 0, seed, work->batch, keys);
	for (uint32_t i = 0; i < work->batch; i++) {
		blocks[i] = source + (size_t)i * work->block_bytes;
	}
	status = kvc_put(work->space, keys, 0, work->batch, &options, &visible);

	return status == KVC_OK && visible != work->batch ? KVC_ERR_FULL : status;
}

static kvc_status_t get_batch(work_t *work, uint64_t seed, uint8_t *target)
{
	kvc_key_t keys[MAX_BATCH];
	void *blocks[MAX_BATCH];
	kvc_lease_t *lease = NULL;
	kvc_status_t status;

	rig_keys(work->space, 0, 0, seed, work->batch, keys);
	for (uint32_t i = 0; i < work->batch; i++) {
		blocks[i] = target + (size_t)i * work->block_bytes;
	}
	status = kvc_acquire(work->space, keys, work->batch, 0, 0, &lease);
	if (status == KVC_OK) {
		status = kvc_lease_read(lease, 0, work->batch, blocks, NULL);
	}
	kvc_release(&lease, 1);

	return status;
}

/* A batch counts by its speed, a single block by its time. */
static bench_outcome_t sampled(const work_t *work, uint64_t start, bench_sample_t *p_sample)
{
	double ns = (double)(bench_now_ns() - start) / work->ops;

	p_sample->ops = work->ops;
	p_sample->value = work->trips ? ns : (double)batch_bytes(work) / ns;

	return BENCH_DONE;
}

static bench_outcome_t put_sample(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t start = bench_now_ns();

	for (uint32_t i = 0; i < work->ops; i++) {
		if (put_batch(work, work->put_next++, work->source + advance(work)) != KVC_OK) {
			return bench_fail(run, "put: %s", kvc_last_error());
		}
	}
	return sampled(work, start, p_sample);
}

static bench_outcome_t get_sample(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t start = bench_now_ns();

	for (uint32_t i = 0; i < work->ops; i++) {
		if (get_batch(work, 1000000u + work->got++ % work->others, work->target + advance(work)) != KVC_OK) {
			return bench_fail(run, "get: %s", kvc_last_error());
		}
	}
	return sampled(work, start, p_sample);
}

static bench_outcome_t stream_sample(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t start = bench_now_ns();

	(void)run;
	for (uint32_t i = 0; i < work->ops; i++) {
		size_t at = advance(work);

		if (work->trips) {
			rig_echo_trip(&work->echo);
			rig_echo_trip(&work->echo);
		}
		kv_copy_stream(work->target + at, work->source + at, batch_bytes(work));
	}
	return sampled(work, start, p_sample);
}

static bench_outcome_t memcpy_sample(bench_run_t *run, void *arg, bench_sample_t *p_sample)
{
	work_t *work = arg;
	uint64_t start = bench_now_ns();

	(void)run;
	for (uint32_t i = 0; i < work->ops; i++) {
		size_t at = advance(work);

		memcpy(work->target + at, work->source + at, batch_bytes(work));
		bench_use(work->target[at]);
	}
	return sampled(work, start, p_sample);
}

/* The other process: puts the batches this one gets. */
static int put_from_another_process(const work_t *parent)
{
	pid_t pid;
	int code = -1;

	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		work_t work = *parent;
		int failed = rig_attach(&work.rig, "pool", work.block_bytes, &work.kvc, &work.space);

		for (uint32_t i = 0; !failed && i < work.others; i++) {
			failed = put_batch(&work, 1000000u + i, work.source + advance(&work)) != KVC_OK;
		}
		_exit(failed);
	}
	if (pid > 0) {
		waitpid(pid, &code, 0);
	}

	return pid > 0 && WIFEXITED(code) && WEXITSTATUS(code) == 0 ? 0 : -1;
}

typedef struct plan {
	const char *name;
	uint32_t block_bytes, batch, ops;
	int trips;
	double goal; /* share of the reference's speed; 0: none */
} plan_t;

static bench_outcome_t compare(bench_run_t *run, work_t *work, const plan_t *plan, const char *what,
			       bench_sample_fn value)
{
	char name[64];
	bench_measurement_t m = {.name = name,
				 .unit = plan->trips ? "ns" : "GB/s",
				 .reference = plan->trips ? "two raw round trips plus a non-temporal copy"
							  : "non-temporal copy of one core",
				 .value_fn = value,
				 .reference_fn = stream_sample,
				 .arg = work,
				 .rounds = 15,
				 .goal = plan->goal > 0 ? BENCH_RATIO_AT_LEAST : BENCH_NO_GOAL,
				 .goal_value = plan->goal};
	bench_outcome_t outcome;

	snprintf(name, sizeof name, "%s/%s", plan->name, what);
	outcome = bench_measure(run, &m);
	if (outcome != BENCH_DONE || plan->trips) {
		return outcome;
	}
	snprintf(name, sizeof name, "%s/%s-libc", plan->name, what);
	m.reference = "libc memcpy of one core";
	m.reference_fn = memcpy_sample;
	m.goal = BENCH_RATIO_AT_LEAST;
	m.goal_value = 1.0;

	return bench_measure(run, &m);
}

static bench_outcome_t measure(bench_run_t *run, work_t *work, const plan_t *plan)
{
	bench_outcome_t outcome;

	/* Once through the whole pool: every page is touched and the pool is full. */
	for (uint32_t i = 0; i < work->batches; i++) {
		if (put_batch(work, work->put_next++, work->source + advance(work)) != KVC_OK) {
			return bench_fail(run, "the pool could not be filled: %s", kvc_last_error());
		}
	}
	outcome = compare(run, work, plan, "put", put_sample);
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	if (put_from_another_process(work) != 0) {
		return bench_fail(run, "the other process could not put");
	}

	return compare(run, work, plan, "get", get_sample);
}

static bench_outcome_t run_pool(bench_run_t *run, const plan_t *plan)
{
	work_t *work = calloc(1, sizeof *work);
	bench_outcome_t outcome;
	int other;

	if (!work) {
		return bench_fail(run, "no memory");
	}
	work->echo = (rig_echo_t){.spin_us = SPIN_US, .ask_bytes = ASK_BYTES, .reply_bytes = REPLY_BYTES};
	other = bench_pin(1);
	bench_pin(0);
	work->rig = (rig_t){
		.cpu = other,
		.options = {"--cpu.size=1GiB", "--cpu.slab_size=512MiB", "--nvme.path=", "--events.enabled=off"}};
	work->block_bytes = plan->block_bytes;
	work->batch = plan->batch;
	work->ops = plan->ops;
	work->trips = plan->trips;
	work->batches = (uint32_t)(POOL_BYTES / batch_bytes(work));
	work->others = (uint32_t)(POOL_BYTES / 2 / batch_bytes(work));
	/* Memory comes after the forks, else its pages would be copied on the first write. */
	if (rig_echo_start(&work->echo, other) != 0 || rig_start(&work->rig, 20000) != 0 ||
	    rig_attach(&work->rig, "pool", plan->block_bytes, &work->kvc, &work->space) != 0) {
		outcome = bench_fail(run, "the daemon could not be started");
	} else if (!(work->source = bench_memory(COLD_BYTES)) || !(work->target = bench_memory(COLD_BYTES))) {
		outcome = bench_fail(run, "no memory");
	} else {
		bench_fill(work->source, COLD_BYTES, 1);
		madvise(work->target, COLD_BYTES, MADV_DONTFORK);
		outcome = measure(run, work, plan);
	}
	kvc_detach(work->kvc);
	rig_remove(&work->rig);
	rig_echo_stop(&work->echo);
	bench_memory_free(work->source, COLD_BYTES);
	bench_memory_free(work->target, COLD_BYTES);
	free(work);

	return outcome;
}

static bench_outcome_t run_batch_8m(bench_run_t *run)
{
	return run_pool(run, &(plan_t){"pool/batch-8m", 256u << 10, 32, 8, 0, 0.85});
}

static bench_outcome_t run_batch_1m(bench_run_t *run)
{
	return run_pool(run, &(plan_t){"pool/batch-1m", 64u << 10, 16, 64, 0, 0.6});
}

static bench_outcome_t run_single_64k(bench_run_t *run)
{
	return run_pool(run, &(plan_t){"pool/single-64k", 64u << 10, 1, 256, 1, 0});
}

static bench_outcome_t run_single_256k(bench_run_t *run)
{
	return run_pool(run, &(plan_t){"pool/single-256k", 256u << 10, 1, 128, 1, 0});
}

const bench_t bench_pool_batch_8m = {
	.name = "pool/batch-8m",
	.measures = "verified put and get of 32 blocks of 256 KiB, process to process",
	.reference = "one core's non-temporal copy of 8 MiB, and libc's memcpy",
	.goal = "share of its speed >= 0.85, and of libc's >= 1",
	.run = run_batch_8m,
};

const bench_t bench_pool_batch_1m = {
	.name = "pool/batch-1m",
	.measures = "verified put and get of 16 blocks of 64 KiB, process to process",
	.reference = "one core's non-temporal copy of 1 MiB, and libc's memcpy",
	.goal = "share of its speed >= 0.6",
	.run = run_batch_1m,
};

const bench_t bench_pool_single_64k = {
	.name = "pool/single-64k",
	.measures = "verified put and get of one block of 64 KiB",
	.reference = "two raw round trips plus a non-temporal copy",
	.goal = "",
	.run = run_single_64k,
};

const bench_t bench_pool_single_256k = {
	.name = "pool/single-256k",
	.measures = "verified put and get of one block of 256 KiB",
	.reference = "two raw round trips plus a non-temporal copy",
	.goal = "",
	.run = run_single_256k,
};
