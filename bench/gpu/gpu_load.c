/* kvd-gpu-load: acquire and load of a long prefix through kvx_worker_t, from kvd's CPU pool or its disk tier into GPU
 * memory; a program of the harness (bench.h).
 *
 * Starts a kvd and saves prompts of 640 blocks of 2 MiB (10,240 tokens of an 8B shape). Bytes are compared before times
 * are taken.
 *   memory  lease + load + verdict of all digests, against one plain copy of as many pinned bytes, on the host's clock;
 *           and the time until the first layer of a layer-by-layer load may be read, against that layer's bytes at the
 *           rate of the plain copy
 *   disk    lease + load + verdict of a prompt that lies in the disk tier alone, against reading as many bytes with
 *           io_uring and O_DIRECT from a file of the same file system. The pool has room for one and a quarter of the
 *           three prompts on disk: loaded in turn, each has left memory before its next load, which the bench checks.
 *           The pool's memory stays the same: registered with the device and touched, as after some time of use.
 *
 * Parameters: host=1 (a cache in host memory, blocks of 32 KiB), blocks=N, dir=DIR of the disk tier (else TMPDIR, or
 * /tmp). Exit status 77: no device, or no disk to measure there, after a message. */
#include "bench.h"
#include "gpu_engine.h"
#include "rig.h"

#include "kv/types.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define PROMPTS     3u  /* of the disk tier */
#define TRIES       4u  /* to have the first load come layer by layer */
#define DEPTH       64u /* requests of the raw reader in flight: as many as the tier has */
#define BOUNCE      (64u << 20)
#define WAIT_MS     60000u
#define AGAIN_MS    10u /* between two tries to save what found no room */
#define SAVE_BLOCKS 64u /* of one put: an instance may leave half of the pool unfinished, not all of it */
#define SEED_OTHER  UINT64_C(1)
#define ID_STEP     7919u /* a prime: ids of the cache in another order than the pool's */
#define MIB         1048576.0

/* ---- the raw reader: a file with io_uring and O_DIRECT, requests in order, a fixed number in flight ------- */

typedef struct raw_reader {
	struct io_uring ring;
	int fd, has_ring, registered;
	uint8_t *buffer; /* [DEPTH] of `request` bytes */
	size_t request;
	uint64_t bytes, next; /* of the file; the first byte that no request has asked for */
} raw_reader_t;

/* A file of `bytes`, a multiple of `request`, in a directory. NULL, or why there is no raw reading there; close_raw()
 * follows in any case. */
static const char *open_raw(raw_reader_t *raw, const char *dir, uint64_t bytes, size_t request)
{
	struct statfs fs;
	struct iovec whole;

	/* Newer kernels open files of tmpfs with O_DIRECT, and copy. */
	if (statfs(dir, &fs) != 0 || fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC) {
		return "memory, not a disk: it has no O_DIRECT (tmpfs)";
	}
	raw->request = request;
	raw->bytes = bytes;
	raw->buffer = bench_memory(DEPTH * request);
	raw->fd = bench_file(dir, bytes, O_DIRECT);
	if (!raw->buffer || raw->fd < 0 || fsync(raw->fd) != 0) {
		return strerror(errno);
	}
	raw->has_ring = io_uring_queue_init(DEPTH, &raw->ring, 0) == 0;
	if (!raw->has_ring) {
		return "io_uring is refused";
	}
	whole = (struct iovec){raw->buffer, DEPTH * request};
	raw->registered = io_uring_register_buffers(&raw->ring, &whole, 1) == 0; /* else: too little may be locked */

	return NULL;
}

static void close_raw(raw_reader_t *raw)
{
	if (raw->has_ring) {
		io_uring_queue_exit(&raw->ring);
	}
	if (raw->fd > 0) {
		close(raw->fd);
	}
	free(raw->buffer);
}

/* Queue the next read into a slot of the buffer. Returns 0: all has been asked for. */
static uint32_t queue_read(raw_reader_t *raw, uint32_t slot)
{
	uint8_t *to = raw->buffer + slot * raw->request;
	struct io_uring_sqe *sqe;

	if (raw->next == raw->bytes) {
		return 0;
	}
	sqe = io_uring_get_sqe(&raw->ring); /* there are as many as slots */
	if (raw->registered) {
		io_uring_prep_read_fixed(sqe, raw->fd, to, (unsigned)raw->request, raw->next, 0);
	} else {
		io_uring_prep_read(sqe, raw->fd, to, (unsigned)raw->request, raw->next);
	}
	io_uring_sqe_set_data64(sqe, slot);
	raw->next += raw->request;

	return 1;
}

/* Seconds that reading all of it took; 0, after a message: it failed. */
static double read_raw(raw_reader_t *raw)
{
	const uint64_t start = bench_now_ns();
	struct io_uring_cqe *cqe;
	uint32_t in_flight = 0;
	int error = 0;

	raw->next = 0;
	for (uint32_t slot = 0; slot < DEPTH; slot++) {
		in_flight += queue_read(raw, slot);
	}
	while (in_flight > 0) {
		const int result = io_uring_submit_and_wait(&raw->ring, 1);

		if (result < 0 && result != -EINTR) {
			error = result;
			break;
		}
		while (io_uring_peek_cqe(&raw->ring, &cqe) == 0) {
			const uint32_t slot = (uint32_t)io_uring_cqe_get_data64(cqe);

			if (cqe->res != (int)raw->request) {
				error = cqe->res < 0 ? cqe->res : -EIO;
			}
			io_uring_cqe_seen(&raw->ring, cqe);
			in_flight -= error != 0 || !queue_read(raw, slot);
		}
	}
	if (error != 0) {
		printf("gpu_load: the raw reader: %s\n", strerror(-error));
		return 0;
	}

	return (double)(bench_now_ns() - start) / 1e9;
}

static struct {
	rig_t rig;
	engine_t engine;
	uint32_t blocks;
	size_t bytes; /* of a prompt */
	kvc_key_t *keys[PROMPTS];
	uint32_t *ids, *bad;
	char disk[256]; /* directory of the disk tier; "": none */
	raw_reader_t raw;
	uint32_t prompt;             /* of the disk tier, next */
	double lease, sent, verdict; /* seconds of the last load: until it is granted, until all copies are enqueued, */
	uint32_t layered;            /* loads that came layer by layer */
} work;

/* ---- saving, loading and comparing ----------------------------------------------------------- */

static uint64_t seed_of(uint32_t prompt, uint32_t block)
{
	return UINT64_C(1000) + (uint64_t)prompt * 1000000u + block;
}

/* The cache gets a prompt's bytes, or others. */
static void write_cache(uint32_t prompt, int other)
{
	for (uint32_t i = 0; i < work.blocks; i++) {
		engine_write(&work.engine, work.ids[i], other ? SEED_OTHER : seed_of(prompt, i));
	}
}

/* Blocks of the cache that do not hold a prompt's bytes. */
static uint32_t count_wrong(uint32_t prompt)
{
	uint32_t wrong = 0;

	for (uint32_t i = 0; i < work.blocks; i++) {
		wrong += !engine_holds(&work.engine, work.ids[i], seed_of(prompt, i));
	}

	return wrong;
}

/* Again while the pool has less than it will have in a moment: the daemon touches its memory before it lends it. */
static kvc_status_t save_part(uint32_t prompt, uint32_t from, uint32_t n, int durable)
{
	engine_t *e = &work.engine;
	const kvc_put_options_t options = {
		.struct_size = sizeof options, .durable = durable, .writers = &e->writer, .writer_count = 1};
	kvc_status_t status = KVC_ERR_BUSY;

	for (uint32_t ms = 0; (status == KVC_ERR_FULL || status == KVC_ERR_BUSY) && ms < WAIT_MS; ms += AGAIN_MS) {
		kvc_put_t *put = NULL;

		usleep(ms > 0 ? AGAIN_MS * 1000u : 0);
		status = kvc_put_start(e->space, work.keys[prompt], from, from + n, &options, &put);
		status = status == KVC_OK ? kvc_put_ready(put, WAIT_MS) : status;
		if (status == KVC_OK) {
			status = kvc_put_n(put) == n && engine_save(e, put, work.ids + from, n)
					 ? kvc_put_wait(put, durable, WAIT_MS)
					 : KVC_ERR_FULL;
		}
		kvc_put_free(put);
	}

	return status;
}

/* Save a prompt's bytes; durable: until they are on disk. 0, after a sentence: it could not. */
static int save(uint32_t prompt, int durable)
{
	kvc_status_t status = KVC_OK;

	write_cache(prompt, 0);
	for (uint32_t from = 0; from < work.blocks && status == KVC_OK && !bench_late(); from += SAVE_BLOCKS) {
		const uint32_t left = work.blocks - from;

		status = save_part(prompt, from, left < SAVE_BLOCKS ? left : SAVE_BLOCKS, durable);
	}
	if (status != KVC_OK) {
		printf("gpu_load: %u blocks cannot be saved: %s\n", work.blocks, kvc_status_name(status));
	}

	return status == KVC_OK;
}

/* Seconds from the request for the lease until the verdict on the last block; by_layers: from the step message until
 * layer 0 is there (engine_load_first()). 0, after a message: it failed. */
static double load(uint32_t prompt, int by_layers)
{
	engine_t *e = &work.engine;
	const uint64_t start = bench_now_ns();
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire(e->space, work.keys[prompt], work.blocks, 0, WAIT_MS, &lease);
	const uint64_t leased = bench_now_ns();
	uint64_t sent, end, first_ns = 0;
	int layered = 0, good = status == KVC_OK && kvc_lease_n(lease) == work.blocks;

	if (good && by_layers) {
		good = engine_load_first(e, lease, work.ids, &first_ns, &layered);
		work.layered += (uint32_t)layered;
	} else if (good) {
		good = engine_load(e, lease, work.ids, work.blocks);
	}
	sent = bench_now_ns();
	good = kvx_worker_take_failed_blocks(e->worker, work.bad, work.blocks) == 0 && good;
	end = bench_now_ns();
	kvc_release(&lease, 1);
	if (!good) {
		printf("gpu_load: a %s load failed: %s\n", by_layers ? "layered" : "whole", kvc_status_name(status));
		return 0;
	}
	if (!by_layers) {
		work.lease = (double)(leased - start) / 1e9;
		work.sent = (double)(sent - leased) / 1e9;
		work.verdict = (double)(end - sent) / 1e9;
	}

	return (double)(by_layers ? first_ns : end - start) / 1e9;
}

/* Seconds of plain copies of as many bytes, from pinned memory. */
static double copy_plain(void)
{
	engine_t *e = &work.engine;
	const uint64_t start = bench_now_ns();

	for (size_t at = 0; at < work.bytes; at += e->bounce_bytes) {
		const size_t left = work.bytes - at;

		memory_write(e->cache + at, e->bounce, left < e->bounce_bytes ? left : e->bounce_bytes);
	}
	memory_settle();

	return (double)(bench_now_ns() - start) / 1e9;
}

/* ---- samples --------------------------------------------------------------------------------- */

static bench_outcome_t sample_rate(double seconds, bench_sample_t *p_sample)
{
	p_sample->value = seconds > 0 ? (double)work.bytes / seconds / 1e9 : 0;
	p_sample->ops = work.blocks;

	return seconds > 0 ? BENCH_DONE : BENCH_FAILED;
}

static bench_outcome_t sample_plain(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return sample_rate(copy_plain(), p_sample);
}

static bench_outcome_t sample_load(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return sample_rate(load(0, 0), p_sample);
}

static bench_outcome_t sample_layer(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	p_sample->value = copy_plain() / work.engine.layout.layers * 1e3;

	return BENCH_DONE;
}

static bench_outcome_t sample_first(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	p_sample->value = load(0, 1) * 1e3;

	return p_sample->value > 0 ? BENCH_DONE : BENCH_FAILED;
}

static bench_outcome_t sample_raw(void *arg, bench_sample_t *p_sample)
{
	(void)arg;
	return sample_rate(read_raw(&work.raw), p_sample);
}

/* Every block is on disk, and none in memory. */
static int is_on_disk_only(uint32_t prompt)
{
	uint8_t *tiers = calloc(work.blocks, 1);
	uint32_t why, good = 0;

	if (tiers && kvc_explain(work.engine.space, work.keys[prompt], work.blocks, tiers, &why) == KVC_OK) {
		for (uint32_t i = 0; i < work.blocks; i++) {
			good += tiers[i] == KV_TIER_DISK;
		}
	}
	free(tiers);
	if (good < work.blocks) {
		printf("gpu_load: %u of %u blocks are not in the disk tier alone\n", work.blocks - good, work.blocks);
	}

	return good == work.blocks;
}

static bench_outcome_t sample_disk(void *arg, bench_sample_t *p_sample)
{
	const uint32_t prompt = work.prompt++ % PROMPTS;

	(void)arg;
	return is_on_disk_only(prompt) ? sample_rate(load(prompt, 0), p_sample) : BENCH_FAILED;
}

/* ---- rows ------------------------------------------------------------------------------------ */

/* Saved, loaded whole and layer by layer, and compared. */
static int check_memory(int layers)
{
	uint32_t wrong;

	if (!save(0, 0)) {
		return 0;
	}
	write_cache(0, 1);
	wrong = load(0, 0) > 0 ? count_wrong(0) : work.blocks;
	printf("gpu_load: %u blocks saved and loaded, %u wrong\n", work.blocks, wrong);
	for (uint32_t tries = 0; layers && wrong == 0 && tries < TRIES && work.layered == 0; tries++) {
		write_cache(0, 1);
		wrong = load(0, 1) > 0 ? count_wrong(0) : work.blocks;
	}
	if (layers) {
		printf("gpu_load: %u blocks loaded %s, %u wrong\n", work.blocks,
		       work.layered > 0 ? "layer by layer" : "whole where layers were asked for", wrong);
	}

	return wrong == 0;
}

static bench_outcome_t measure_memory(void)
{
	const int layers = memory_cuda() != NULL;
	char name[64];
	const bench_measurement_t whole = {
		name, "GB/s", "cudaMemcpyAsync of as many bytes", sample_load, sample_plain, 7, BENCH_RATIO_AT_LEAST,
		0.9};
	const bench_measurement_t first = {
		name, "ms", "its bytes at the rate of a plain copy", sample_first, sample_layer, 7, BENCH_RATIO_AT_MOST,
		1.5};
	bench_outcome_t outcome;

	if (!check_memory(layers)) {
		return bench_fail("bytes are wrong, or cannot be had");
	}
	(void)copy_plain(); /* memory is made known to the device */
	snprintf(name, sizeof name, "memory/load-%u (%.2f GiB)", work.blocks, (double)work.bytes / (double)(1u << 30));
	outcome = bench_measure(NULL, &whole);
	printf("    of the last one: lease %.3f ms, until all was enqueued %.3f, until its verdict %.3f\n",
	       work.lease * 1e3, work.sent * 1e3, work.verdict * 1e3);
	if (outcome != BENCH_DONE || !layers) {
		printf("%s",
		       layers ? "" : "gpu_load: the first layer: skipped: loads come by layers in GPU memory only\n");
		return outcome;
	}
	work.layered = 0;
	snprintf(name, sizeof name, "memory/first-of-%u-layers (%.1f MiB)", work.engine.layout.layers,
		 (double)work.bytes / work.engine.layout.layers / MIB);
	outcome = bench_measure(NULL, &first);
	printf("    %u loads of it came layer by layer, the others whole\n", work.layered);

	return outcome;
}

static bench_outcome_t measure_disk(void)
{
	char name[64], reference[96];

	for (uint32_t p = 0; p < PROMPTS; p++) {
		if (!save(p, 1)) {
			return bench_fail("no prompts on disk");
		}
	}
	for (uint32_t p = 0; p < PROMPTS; p++) { /* each prompt once, and its bytes compared */
		uint32_t wrong;

		write_cache(p, 1);
		if (!is_on_disk_only(p) || load(p, 0) <= 0) {
			return bench_fail("a prompt cannot be loaded");
		}
		wrong = count_wrong(p);
		printf("gpu_load: prompt %u: %u blocks loaded from the disk tier, %u wrong\n", p, work.blocks, wrong);
		if (wrong > 0) {
			return bench_fail("wrong bytes");
		}
	}
	snprintf(name, sizeof name, "disk/load-%u (%.2f GiB)", work.blocks, (double)work.bytes / (double)(1u << 30));
	snprintf(reference, sizeof reference, "io_uring, O_DIRECT, as many bytes, %u reads of %.3g MiB in flight",
		 DEPTH, (double)work.engine.block_bytes / MIB);

	return bench_measure(NULL, &(bench_measurement_t){name, "GB/s", reference, sample_disk, sample_raw, 7,
							  BENCH_RATIO_AT_LEAST, 0.9});
}

/* ---- opening --------------------------------------------------------------------------------- */

/* The directory of the disk tier, and the raw reader's file. NULL, or why the row cannot be measured there. */
static const char *open_disk(const char *base, size_t block_bytes)
{
	const uint64_t wanted = work.bytes * (PROMPTS + 1) * 5 / 4 + (UINT64_C(512) << 20);
	struct statvfs fs;

	if (statvfs(base, &fs) == 0 && fs.f_bavail * fs.f_frsize < wanted) {
		return "the file system has no room for three prompts and a file";
	}
	snprintf(work.disk, sizeof work.disk, "%s/kvd-gpu-load.XXXXXX", base);
	if (!mkdtemp(work.disk)) {
		work.disk[0] = '\0';
		return "no directory can be made";
	}

	return open_raw(&work.raw, work.disk, work.bytes, block_bytes);
}

/* With a disk tier the pool holds a prompt and a quarter of one: what was loaded before the last prompt is on disk
 * only. */
static int start_daemon(int small)
{
	const size_t mib = work.bytes >> 20;
	char tier[400] = "";

	if (work.disk[0]) {
		snprintf(tier, sizeof tier, " --cpu.max_blocks=%u --nvme.path='%s/tier' --nvme.size=%zuMiB",
			 work.blocks + work.blocks / 4 + 16, work.disk, mib * PROMPTS * 5 / 4 + 512);
	}

	/* A small one is a test, which may have to wait for a CPU. */
	return rig_start(
		       &work.rig,
		       "%s --cpu.ahead=all --instance.max_pinned=1TiB --instance.max_unfinished=1TiB --cpu.size=%zuMiB"
		       " --cpu.slab_size=%s%s",
		       small ? " --limits.silence=10s" : "", mib * 5 / 4 + (small ? 8 : 256), small ? "2MiB" : "128MiB",
		       tier) == 0;
}

static int open_all(int small)
{
	const size_t blocks = work.blocks;

	if (blocks == 0) { /* --with blocks= */
		return 0;
	}
	work.ids = calloc(blocks, sizeof *work.ids);
	work.bad = calloc(blocks, sizeof *work.bad);
	if (!work.ids || !work.bad || !start_daemon(small) || !engine_open(&work.engine)) {
		return 0;
	}
	for (uint32_t i = 0; i < work.blocks; i++) {
		work.ids[i] = (uint32_t)((uint64_t)i * ID_STEP % work.blocks);
	}
	for (uint32_t p = 0; p < PROMPTS; p++) {
		work.keys[p] = calloc(blocks, sizeof *work.keys[p]);
		if (!work.keys[p] || engine_keys(&work.engine, p + 1, work.keys[p]) != KVC_OK) {
			printf("gpu_load: no memory for %u blocks, or no keys\n", work.blocks);
			return 0;
		}
	}
	bench_fill(work.engine.bounce, work.engine.bounce_bytes, SEED_OTHER);

	return 1;
}

static void close_all(void)
{
	char command[320];

	close_raw(&work.raw);
	engine_close(&work.engine);
	rig_remove(&work.rig);
	snprintf(command, sizeof command, "rm -rf -- '%s'", work.disk);
	if (work.disk[0] && system(command) != 0) {
		printf("gpu_load: %s is left behind\n", work.disk);
	}
	for (uint32_t p = 0; p < PROMPTS; p++) {
		free(work.keys[p]);
	}
	free(work.ids);
	free(work.bad);
	memory_close();
}

static bench_outcome_t run_load(int disk)
{
	const char *temporary = getenv("TMPDIR"), *base, *why = NULL;
	const int host = bench_param_size("host", 0) != 0;
	const int small = ENGINE_IS_SMALL(host);
	const size_t block_bytes = small ? (size_t)32 << 10 : (size_t)2 << 20;
	const int status = memory_open(host);
	bench_outcome_t outcome;

	if (status != 0) {
		return status == 77 ? bench_skip("there is no device") : bench_fail("the device cannot be used");
	}
	memset(&work, 0, sizeof work);
	work.blocks = (uint32_t)bench_param_size("blocks", small ? 97 : 640);
	work.blocks = work.blocks % ID_STEP == 0 ? 1 : work.blocks;
	work.bytes = work.blocks * block_bytes;
	work.engine = (engine_t){.program = "gpu_load",
				 .socket = work.rig.socket,
				 .layout = ENGINE_SHAPE(small),
				 .blocks = work.blocks,
				 .length = work.blocks,
				 .bounce_bytes = BOUNCE,
				 .load_ms = disk ? 20000 : 0,
				 .layer_bytes = 1,
				 .layer_wait_us = ENGINE_LAYER_WAIT_US};
	base = bench_param("dir", temporary && temporary[0] ? temporary : "/tmp");
	why = disk ? open_disk(base, block_bytes) : NULL;
	outcome = why                ? bench_skip("%s: %s", base, why)
		  : !open_all(small) ? bench_fail("no daemon and engine")
		  : disk             ? measure_disk()
				     : measure_memory();
	close_all();

	return outcome;
}

const bench_t bench_list[] = {
	{"memory", run_load, 0,
	 "a prompt of 10,240 tokens leased and loaded from the CPU pool; until its first layer is ready",
	 "one plain copy of as many pinned bytes", "ratio >= 0.9; first layer <= 1.5 times its own transfer"},
	{"disk", run_load, 1, "the same from the disk tier alone (--with dir=)", "io_uring and O_DIRECT, as many bytes",
	 "ratio >= 0.9"},
	{.name = NULL},
};
