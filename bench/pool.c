/* pool/batch-8m, pool/batch-1m -- verified put and get through the daemon, process to process: what one process puts,
 * another gets. Sources and destinations are cold and already touched; the pool was filled once before, so puts evict.
 * GB/s, against one core's non-temporal copy of as many bytes, and against libc's memcpy. */
#include "bench.h"
#include "rig.h"

#include "kv/digest.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define COLD_BYTES ((size_t)256 << 20)
#define POOL_BYTES ((size_t)1 << 30)
#define MAX_BATCH  32u
#define OTHERS     1000000u /* seed of the first batch of the other process */

static struct {
	rig_t rig;
	uint32_t block_bytes, batch; /* blocks */
	size_t batch_bytes;
	uint32_t ops;      /* batches of a sample */
	uint64_t put_next; /* seed of the next new batch */
	uint32_t got;      /* batches of the other process read so far */
	uint32_t others;   /* batches of the other process */
	uint8_t *source, *target;
	size_t at; /* in source and target */
} work;

/* The next cold piece of source and target. */
static size_t advance(void)
{
	const size_t at = work.at;

	work.at = at + 2 * work.batch_bytes > COLD_BYTES ? 0 : at + work.batch_bytes;

	return at;
}

static kvc_status_t put_batch(uint64_t seed)
{
	const uint8_t *source = work.source + advance();
	const void *blocks[MAX_BATCH];
	const kvc_put_options_t options = {.struct_size = sizeof options, .blocks = blocks};
	kvc_key_t keys[MAX_BATCH];
	uint32_t visible = 0;
	kvc_status_t status;

	rig_keys(work.rig.space, seed, work.batch, keys);
	for (uint32_t i = 0; i < work.batch; i++) {
		blocks[i] = source + (size_t)i * work.block_bytes;
	}
	status = kvc_put(work.rig.space, keys, 0, work.batch, &options, &visible);

	return status == KVC_OK && visible != work.batch ? KVC_ERR_FULL : status;
}

static kvc_status_t get_batch(uint64_t seed)
{
	uint8_t *target = work.target + advance();
	kvc_key_t keys[MAX_BATCH];
	void *blocks[MAX_BATCH];
	kvc_lease_t *lease = NULL;
	kvc_status_t status;

	rig_keys(work.rig.space, seed, work.batch, keys);
	for (uint32_t i = 0; i < work.batch; i++) {
		blocks[i] = target + (size_t)i * work.block_bytes;
	}
	status = kvc_acquire(work.rig.space, keys, work.batch, 0, 0, &lease);
	if (status == KVC_OK) {
		status = kvc_lease_read(lease, 0, work.batch, blocks, NULL);
	}
	kvc_release(&lease, 1);

	return status;
}

static kvc_status_t put_new(void)
{
	return put_batch(work.put_next++);
}

static kvc_status_t get_other(void)
{
	return get_batch(OTHERS + work.got++ % work.others);
}

static kvc_status_t copy_stream(void)
{
	const size_t at = advance();

	kv_copy_stream(work.target + at, work.source + at, work.batch_bytes);

	return KVC_OK;
}

static kvc_status_t copy_libc(void)
{
	const size_t at = advance();

	memcpy(work.target + at, work.source + at, work.batch_bytes);
	bench_use(work.target[at]);

	return KVC_OK;
}

typedef kvc_status_t (*step_fn)(void);

/* What is compared: ours, and a copy. */
typedef struct sides {
	step_fn value, reference;
} sides_t;

static bench_outcome_t sample(void *arg, bench_sample_t *p_sample)
{
	const sides_t *sides = arg;
	const step_fn step = p_sample->is_reference ? sides->reference : sides->value;
	const uint64_t start = bench_now_ns();

	for (uint32_t i = 0; i < work.ops; i++) {
		if (step() != KVC_OK) {
			return bench_fail("%s", kvc_last_error());
		}
	}
	p_sample->ops = work.ops;
	p_sample->value = (double)work.batch_bytes * work.ops / (double)(bench_now_ns() - start);

	return BENCH_DONE;
}

/* The other process: puts the batches this one gets. */
static int put_from_another_process(void)
{
	pid_t pid;
	int code = -1;

	fflush(NULL);
	pid = fork();
	if (pid == 0) {
		int failed = rig_attach(&work.rig, "pool", work.block_bytes);

		for (uint32_t i = 0; !failed && i < work.others; i++) {
			failed = put_batch(OTHERS + i) != KVC_OK;
		}
		_exit(failed);
	}
	if (pid > 0) {
		waitpid(pid, &code, 0);
	}

	return code;
}

static bench_outcome_t compare(const char *name, const char *what, step_fn step, double goal)
{
	sides_t sides = {step, copy_stream};
	char row[64];
	bench_measurement_t m = {row, "GB/s", "non-temporal copy of one core", sample, sample, 15, BENCH_RATIO_AT_LEAST,
				 goal};
	bench_outcome_t outcome;

	snprintf(row, sizeof row, "%s/%s", name, what);
	outcome = bench_measure(&sides, &m);
	if (outcome != BENCH_DONE) {
		return outcome;
	}
	sides.reference = copy_libc;
	snprintf(row, sizeof row, "%s/%s-libc", name, what);
	m.reference = "libc memcpy of one core";
	m.goal_value = 1.0;

	return bench_measure(&sides, &m);
}

/* The daemon touches memory before it lends it: a put that is too early is made again. */
static kvc_status_t put_soon(void)
{
	kvc_status_t status = put_new();

	for (int i = 0; (status == KVC_ERR_BUSY || status == KVC_ERR_FULL) && i < 10000; i++) {
		usleep(1000);
		work.put_next--; /* the rest of the same batch */
		status = put_new();
	}

	return status;
}

static bench_outcome_t measure(const char *name, double goal)
{
	bench_outcome_t outcome;

	work.rig.cpu = bench_pin(1) + 1;
	bench_pin(0);
	/* Memory comes after the fork, else its pages would be copied on the first write. */
	if (rig_start(&work.rig, " --limits.silence=10s --cpu.size=1GiB --cpu.slab_size=512MiB --nvme.path="
				 " --events.enabled=off") != 0 ||
	    rig_attach(&work.rig, "pool", work.block_bytes) != 0) {
		return bench_fail("the daemon could not be started");
	}
	if (!(work.source = bench_memory(COLD_BYTES)) || !(work.target = bench_memory(COLD_BYTES))) {
		return bench_fail("no memory");
	}
	bench_fill(work.source, COLD_BYTES, 1);
	madvise(work.target, COLD_BYTES, MADV_DONTFORK);
	/* Once through the whole pool: every page is touched and the pool is full. */
	for (size_t at = 0; at < POOL_BYTES; at += work.batch_bytes) {
		if (put_soon() != KVC_OK) {
			return bench_fail("the pool could not be filled: %s", kvc_last_error());
		}
	}
	outcome = compare(name, "put", put_new, goal);
	if (outcome == BENCH_DONE && put_from_another_process() != 0) {
		return bench_fail("the other process could not put");
	}

	return outcome == BENCH_DONE ? compare(name, "get", get_other, goal) : outcome;
}

bench_outcome_t run_pool(int small)
{
	bench_outcome_t outcome;

	memset(&work, 0, sizeof work);
	work.block_bytes = small ? 64u << 10 : 256u << 10;
	work.batch = small ? 16 : 32;
	work.batch_bytes = (size_t)work.batch * work.block_bytes;
	work.ops = small ? 64 : 8;
	work.others = (uint32_t)(POOL_BYTES / 2 / work.batch_bytes);
	outcome = small ? measure("pool/batch-1m", 0.6) : measure("pool/batch-8m", 0.85);
	rig_remove(&work.rig);
	free(work.source);
	free(work.target);

	return outcome;
}
