/* nvme/read, nvme/write: the disk tier, digests checked and headers written, against fio on the same device. */
#include "bench.h"

#include "kv/log.h"
#include "kvs/nvme.h"
#include "kvs/pool.h"
#include "kvs/sigbus.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BLOCK   (256u << 10)
#define BUFFERS 64u
#define QUEUE   32u
#define MIB     1048576.0

/* The place: a directory of a throttled loop device over memory, which repeats to 0.1 %, or of a real disk. The shell
 * says "ok", or why there is none; $1 is the directory, $PPID this process, which is moved into the group of the limits
 * with its children. Version 1 of the block controller, else version 2. */
static const char make_loop[] =
	"[ $(id -u) = 0 ] || { echo a throttled loop device needs root; exit; }\n"
	"image=/dev/shm/${1##*/}.img; group=/sys/fs/cgroup; dev=\n"
	"dd if=/dev/zero of=$image bs=1M count=1100 status=none && mkfs.ext4 -q -O ^has_journal $image ||"
	" { echo no memory for the image, or no mkfs.ext4; exit; }\n"
	"dev=$(losetup -f --show $image) && mount $dev $1 || { echo the loop device cannot be mounted; exit; }\n"
	"id=$(lsblk -dno MAJ:MIN $dev | tr -d ' '); v1=$group/blkio\n"
	"if [ -w $v1/cgroup.procs ]; then group=$v1; mkdir $group/${1##*/} &&"
	" echo $id 2500000000 >$group/${1##*/}/blkio.throttle.read_bps_device &&"
	" echo $id 3000000000 >$group/${1##*/}/blkio.throttle.write_bps_device\n"
	"else echo +io >$group/cgroup.subtree_control; mkdir $group/${1##*/} &&"
	" echo $id rbps=2500000000 wbps=3000000000 >$group/${1##*/}/io.max; fi &&"
	" echo $PPID >$group/${1##*/}/cgroup.procs && echo ok ||"
	" echo the block controller takes no limit for the loop device\n";
static const char remove_loop[] =
	"for group in /sys/fs/cgroup/blkio /sys/fs/cgroup; do [ ! -d $group/${1##*/} ] ||"
	" { echo $PPID >$group/cgroup.procs; echo $$ >$group/cgroup.procs; rmdir $group/${1##*/}; }; done\n"
	"dev=$(losetup -nO NAME -j /dev/shm/${1##*/}.img); umount -l $1; losetup -d $dev; rm "
	"-rf -- $1 /dev/shm/${1##*/}.img\n";

typedef struct buffer {
	kvs_mem_t mem;
	kvs_loc_t loc;
	struct work *work;
} buffer_t;

typedef struct work {
	char dir[256]; /* where to work */
	kv_metrics_t metrics;
	kvs_tier_t *tier;
	uint32_t slot_class;
	uint32_t blocks; /* stored, for reads */
	kvs_loc_t *loc;
	uint8_t *slab;
	uint64_t *digests;
	buffer_t buffer[BUFFERS];
	uint32_t idle[BUFFERS];
	uint32_t idle_count;
	uint64_t done;
	uint64_t failed;
	uint64_t next;
	double seconds;
	uint64_t fio_bytes;
	int write;
} work_t;

static const kvs_geometry_t geometry = {
	.block_bytes = BLOCK, .heads = 8, .leaves = 8, .leaf_bytes = 4096, .page_bytes = 4096};

static const uint8_t no_root[32];

static kvs_meta_t meta_of(uint64_t n)
{
	kvs_meta_t meta = {.epoch = 1, .depth = 1};

	memcpy(meta.key.b, &n, sizeof n);
	meta.key.b[15] = 1;

	return meta;
}

static void on_read(void *arg, kv_status_t status)
{
	buffer_t *b = arg;
	work_t *w = b->work;

	w->done++;
	w->failed += status != KV_OK;
	w->idle[w->idle_count++] = (uint32_t)(b - w->buffer);
}

static void on_written(void *arg, kv_status_t status)
{
	buffer_t *b = arg;

	kvs_free(b->work->tier, b->loc);
	on_read(arg, status);
}

static void on_kept(void *arg, kv_status_t status)
{
	buffer_t *b = arg;

	b->work->loc[b->work->blocks++] = b->loc;
	on_read(arg, status);
}

static kv_status_t start_write(work_t *w, buffer_t *b, kvs_done_fn done)
{
	kvs_meta_t meta = meta_of(w->next++);
	kv_status_t status = kvs_alloc(w->tier, w->slot_class, KVS_FILLING, 1, &meta, &b->loc);

	return status == KV_OK ? kvs_store(w->tier, b->loc, &b->mem, done, b) : status;
}

static void wait_some(work_t *w)
{
	struct pollfd wait = {.fd = kvs_event_fd(w->tier), .events = POLLIN};

	if (kvs_poll(w->tier, 64) == 0) {
		poll(&wait, 1, 100);
	}
}

static void drain(work_t *w)
{
	while (w->idle_count < BUFFERS) {
		wait_some(w);
	}
}

/* Store blocks until the tier is full, so that later writes go to space that has been written before. */
static kv_status_t fill(work_t *w)
{
	kv_status_t status = KV_OK;

	while (status == KV_OK) {
		while (w->idle_count == 0) {
			wait_some(w);
		}
		status = start_write(w, &w->buffer[w->idle[--w->idle_count]], on_kept);
	}
	w->idle_count++;
	drain(w);

	return status == KV_ERR_FULL && w->failed == 0 ? KV_OK : status;
}

static bench_outcome_t ours(void *arg, bench_sample_t *p_sample)
{
	work_t *w = arg;
	const bench_clock_t start = bench_start();
	const uint64_t end = start.ns + (uint64_t)(w->seconds * 1e9);

	w->done = 0;
	while (bench_now_ns() < end) {
		while (w->idle_count > 0) {
			buffer_t *b = &w->buffer[w->idle[--w->idle_count]];
			kv_status_t status;

			if (w->write) {
				status = start_write(w, b, on_written);
			} else {
				w->next = w->next * 6364136223846793005ull + 1442695040888963407ull;
				status = kvs_load(w->tier, w->loc[(w->next >> 33) % w->blocks], &b->mem, on_read, b);
			}
			if (status != KV_OK) {
				return bench_fail("the tier refuses: %s", kv_status_text(status));
			}
		}
		wait_some(w);
	}
	drain(w);
	if (w->failed) {
		return bench_fail("%llu transfers failed", (unsigned long long)w->failed);
	}

	return bench_rate(start, (double)w->done * BLOCK, (double)w->done * BLOCK / MIB, p_sample);
}

/* Runs a script with the directory as $1. Returns the first line of its output; "": none. */
static const char *run_shell(const char *script, const char *dir)
{
	static char line[4096];
	char command[8192];
	FILE *pipe;

	snprintf(command, sizeof command, "set -- '%s'\n{\n%s} 2>/dev/null", dir, script);
	pipe = popen(command, "re");
	line[0] = '\0';
	if (pipe) {
		line[fgets(line, sizeof line, pipe) ? strcspn(line, "\n") : 0] = '\0';
		pclose(pipe);
	}

	return line;
}

/* fio's terse output, version 3: one line of fields separated by semicolons. */
static double field(const char *line, unsigned index)
{
	while (index-- > 0 && line) {
		line = strchr(line, ';');
		line = line ? line + 1 : NULL;
	}

	return line ? strtod(line, NULL) : 0;
}

/* On a file in the directory: 256 KiB requests, queue 32, io_uring, O_DIRECT, random places. */
static bench_outcome_t fio(void *arg, bench_sample_t *p_sample)
{
	const work_t *w = arg;
	char script[512];
	const char *line;

	snprintf(script, sizeof script,
		 "fio --name=reference --filename=$1/fio.dat --size=%llu --rw=%s --bs=256k --iodepth=32"
		 " --ioengine=io_uring --direct=1 --time_based --runtime=%.1f --randrepeat=1 --norandommap"
		 " --output-format=terse --terse-version=3\n",
		 (unsigned long long)w->fio_bytes, w->write ? "randwrite" : "randread", w->seconds);
	line = run_shell(script, w->dir);
	p_sample->value = field(line, w->write ? 47 : 6) * 1024.0 / 1e9; /* of KiB a second */
	p_sample->ops = p_sample->value * 1e9 * w->seconds / MIB;
	/* user and system CPU, in percent of the run time */
	p_sample->cpu_ns = (field(line, 87) + field(line, 88)) / 100.0 * field(line, w->write ? 49 : 8) * 1e6;

	return p_sample->value > 0 ? BENCH_DONE : bench_skip("fio is not installed, or has no io_uring");
}

static void on_epoch(void *arg, kv_status_t status)
{
	(void)arg;
	(void)status;
}

static bench_outcome_t open_tier(work_t *w, uint64_t bytes)
{
	static char path[300];
	char detail[256];
	kvs_nvme_config_t config = {.path = path,
				    .limit_bytes = bytes,
				    .file_bytes = bytes / 4u,
				    .queue_depth = QUEUE,
				    .direct = 1,
				    .sync = 1,
				    .flush_interval_ns = 200000000,
				    .metrics = &w->metrics};
	uint32_t region;

	snprintf(path, sizeof path, "%s/tier", w->dir);
	if (kvs_nvme_open(&config, &kv_env_posix, &w->tier, detail, sizeof detail) != KV_OK) {
		return bench_fail("%s", detail);
	}
	if (kvs_recover(w->tier, NULL, NULL) != KV_OK ||
	    kvs_class_open(w->tier, "bench", &geometry, &w->slot_class) != KV_OK ||
	    kvs_epoch_set(w->tier, &(kvs_epoch_t){no_root, "bench", "bench\n", 1}, on_epoch, NULL) != KV_OK) {
		return bench_fail("the tier cannot be set up");
	}
	kvs_nvme_register(w->tier, w->slab, (size_t)BUFFERS * BLOCK, &region);
	for (uint32_t i = 0; i < BUFFERS; i++) {
		kvs_mem_t *mem = &w->buffer[i].mem;

		*mem = (kvs_mem_t){w->slab + (size_t)i * BLOCK, w->digests + (size_t)i * 128u,
				   w->digests + (size_t)i * 128u + 64u, region};
		w->buffer[i].work = w;
		w->idle[w->idle_count++] = i;
		kvs_sigbus_verify_block(&geometry, mem->data, NULL, mem->leaves, mem->roots);
	}
	if (fill(w) != KV_OK) {
		return bench_fail("the tier cannot be filled");
	}
	if (w->write) {
		for (uint32_t i = 0; i < w->blocks; i++) {
			kvs_free(w->tier, w->loc[i]);
		}
	}

	return BENCH_DONE;
}

static bench_outcome_t measure(work_t *w)
{
	const uint64_t bytes = bench_param_size("bytes", 512u << 20);
	bench_outcome_t outcome;

	w->seconds = strtod(bench_param("seconds", bench_quick() ? "0.5" : "1.5"), NULL);
	kv_log_set_level(KV_LOG_WARN);
	w->fio_bytes = bytes / 2u;
	w->loc = bench_memory((bytes / BLOCK + 1u) * sizeof *w->loc);
	w->slab = bench_memory((size_t)BUFFERS * BLOCK);
	w->digests = bench_memory((size_t)BUFFERS * 128u * sizeof(uint64_t));
	if (!w->loc || !w->slab || !w->digests) {
		return bench_fail("no memory");
	}
	bench_fill(w->slab, (size_t)BUFFERS * BLOCK, 1);
	outcome = open_tier(w, bytes);
	if (outcome == BENCH_DONE) {
		outcome = bench_measure(w, &(bench_measurement_t){w->write ? "nvme/write" : "nvme/read", "GB/s",
								  "fio, 256 KiB, queue 32, io_uring, O_DIRECT", ours,
								  fio, 3, BENCH_RATIO_AT_LEAST, 0.95});
	}
	kvs_close(w->tier);
	free(w->digests);
	free(w->slab);
	free(w->loc);

	return outcome;
}

/* --with dir=PATH: on the disk there, for information; else on a throttled loop device. */
bench_outcome_t run_nvme(int write)
{
	static work_t w;
	const char *disk = bench_param("dir", NULL), *why = "ok";
	bench_outcome_t outcome;

	memset(&w, 0, sizeof w);
	w.write = write;
	snprintf(w.dir, sizeof w.dir, "%s/kvd-bench-XXXXXX", disk ? disk : "/tmp");
	if (!mkdtemp(w.dir)) {
		return bench_skip("no directory can be made");
	}
	why = disk ? "ok" : run_shell(make_loop, w.dir);
	outcome = strcmp(why, "ok") == 0 ? measure(&w) : bench_skip("%s", why);
	(void)run_shell(disk ? "rm -rf -- $1\n" : remove_loop, w.dir);

	return outcome;
}
