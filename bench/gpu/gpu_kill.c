/* gpu_kill: kill -9 of daemon and engines while their copies are under way, again and again.
 *
 * Starts a kvd and workers that save and load blocks of known content through kvx_worker_t, between GPU memory and
 * kvd's: half of the prompts lie in the daemon's GPU tier. Kills one of these processes at a random moment while bytes
 * are in flight, one in three stopped before, waits until all others have made progress, starts it again. At the end no
 * worker has loaded a wrong byte, the daemon's invariants hold with neither lease nor put left, and the device's free
 * memory, pinned pages and shared memory are what they were before.
 *
 *     gpu_kill [--kills N] [--seconds N] [--workers N] [--seed N] [--host 1] [--tier 0] [--control 1]
 *
 * --host 1: caches in host memory, small blocks, no device, and a GPU tier that is host memory. --tier 0: without one.
 * --control 1: one worker saves wrong bytes; exit status 0 means that another one noticed. Exit status: 0: as above; 1:
 * not; 77: there is no device. */
#include "bench.h"
#include "gpu_engine.h"
#include "rig.h"

#include <inttypes.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define KILL_WORKERS 8u
#define KILL_CHAINS  64u /* prompts there are: any worker knows what their blocks hold */
#define KILL_LENGTH  12u /* blocks of each */
#define KILL_BLOCKS  64u /* of an engine's cache */

/* What a worker has done since it was started first; seen by the parent. */
typedef struct kill_count {
	_Atomic uint32_t busy;   /* bytes are on their way */
	_Atomic uint64_t rounds; /* since the last start: loads and saves, well or not */
	_Atomic uint64_t saves, loads, blocks, misses, failed, wrong;
	_Atomic uint64_t tier_saves, tier_loads; /* of them in the GPU tier */
	_Atomic uint64_t saved_bytes, loaded_bytes;
} kill_count_t;

typedef struct kill_state {
	kill_count_t worker[KILL_WORKERS];
	_Atomic uint64_t device_free; /* bytes of the device, at the last look */
} kill_state_t;

typedef struct kill_options {
	uint64_t seed;
	uint32_t kills, workers, seconds;
	int host;    /* caches in host memory, small blocks: the harness itself */
	int tier;    /* the daemon has memory of the GPU */
	int control; /* worker 0 saves wrong bytes: another worker must notice */
} kill_options_t;

#ifdef ENGINE_FAKE
#define TIER 0 /* memory of the fake driver's device belongs to one process */
#else
#define TIER 1
#endif

/* ---- a worker -------------------------------------------------------------------------------- */

/* Saves prompts whose bytes follow from their numbers and loads what is stored, through the same kvx_worker_t that
 * vLLM's worker uses; compares every loaded block. It may be killed, and so may its daemon, at any line. */
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
	    kvc_put_start(engine_space(&e->engine), keys, 0, e->n, &options, &put) != KVC_OK) {
		atomic_fetch_add(&e->count->failed, 1);
		return;
	}
	status = kvc_put_ready(put, ENGINE_ASK_MS);
	n = status == KVC_OK ? kvc_put_n(put) : 0;
	atomic_store(&e->count->busy, n > 0);
	if (n > 0 && engine_save(&e->engine, put, e->ids, n)) {
		status = kvc_put_wait(put, 0, ENGINE_ASK_MS);
		atomic_fetch_add(&e->count->saves, status == KVC_OK);
		atomic_fetch_add(&e->count->tier_saves, status == KVC_OK && e->engine.mem == KVX_OWN_MEM);
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
	atomic_fetch_add(&e->count->tier_loads, bads == 0 && e->engine.mem == KVX_OWN_MEM);
	atomic_fetch_add(&e->count->loaded_bytes, (n - (bads < n ? bads : n)) * e->engine.block_bytes);
}

static void load_round(killed_t *e, uint64_t chain)
{
	kvc_key_t keys[KILL_LENGTH];
	kvc_lease_t *lease = NULL;
	kvc_status_t status = engine_keys(&e->engine, chain, keys);

	/* Bytes of no prompt: they show a load that leaves a block as it was. */
	engine_fence(&e->engine, e->ids, e->n);
	write_blocks(e, KILL_CHAINS + chain);
	engine_end(&e->engine);
	if (status == KVC_OK) {
		status = kvc_acquire(engine_space(&e->engine), keys, e->n, 0, LEASE_MS, &lease);
	}
	if (status == KVC_OK && kvc_lease_n(lease) > 0) {
		load_blocks(e, chain, lease, kvc_lease_n(lease));
	} else {
		atomic_fetch_add(status == KVC_MISS ? &e->count->misses : &e->count->failed, 1);
	}
	kvc_release(&lease, 1);
}

/* Save and load until SIGTERM, by the daemon in `dir`. Exit status: 0; 3: wrong bytes were loaded; 4: it could not
 * begin; 77: there is no device. */
static int kill_worker(const kill_options_t *options, uint32_t number, kill_state_t *state, const char *dir)
{
	char socket[192];
	killed_t k = {.options = options,
		      .count = &state->worker[number],
		      .number = number,
		      .engine = {.program = "kill loop",
				 .socket = socket,
				 .layout = ENGINE_SHAPE(ENGINE_IS_SMALL(options->host)),
				 .blocks = KILL_BLOCKS,
				 .length = KILL_LENGTH}};
	int status = memory_open(options->host);

	if (status != 0) {
		return status;
	}
	snprintf(socket, sizeof socket, "%s/run/default.sock", dir);
	k.engine.device = options->tier ? memory_device() : NULL;
	bench_limit(0);
	k.rng = options->seed ^ (uint64_t)getpid() << 20;
	atomic_store(&k.count->busy, 0);
	if (!engine_open(&k.engine)) {
		return 4;
	}
	while (!bench_late() && getppid() != 1) {
		const uint64_t chain = bench_random(&k.rng) % KILL_CHAINS, failed = atomic_load(&k.count->failed);

		(void)kvc_poll(k.engine.kvc, 0);
		k.engine.mem = k.engine.device && chain % 2 ? KVX_OWN_MEM : KVX_HOST_MEM;
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

/* ---- the parent ------------------------------------------------------------------------------- */

#define STUCK_MS    120000u /* a survivor that has done nothing for so long is stuck */
#define MOMENT_MS   2000u   /* to wait for bytes on their way */
#define SLACK_BYTES (UINT64_C(64) << 20)
#define STOPPED_US  300000u
#define DAEMON      UINT32_MAX

typedef struct killer {
	kill_options_t options;
	kill_state_t *state;
	rig_t rig;
	pid_t worker[KILL_WORKERS];
	uint64_t started[KILL_WORKERS]; /* rounds when it was started last */
	uint64_t daemon_rounds;         /* of all, when the daemon was */
	uint64_t rng;
	uint32_t daemon_kills, worker_kills, busy_kills, stopped_kills, stuck, died, no_device;
} killer_t;

/* What is compared before and after. */
typedef struct footprint {
	uint64_t device_free, pinned_pages, shared_kib;
} footprint_t;

static uint64_t now_ms(void)
{
	return bench_now_ns() / 1000000u;
}

static uint64_t sum_of(const killer_t *k, size_t offset)
{
	uint64_t sum = 0;

	for (uint32_t i = 0; i < k->options.workers; i++) {
		sum += atomic_load(
			(const _Atomic uint64_t *)(const void *)((const uint8_t *)&k->state->worker[i] + offset));
	}

	return sum;
}
#define SUM(k, field) sum_of(k, offsetof(kill_count_t, field))

/* ---- processes ------------------------------------------------------------------------------- */

/* 0: it does not come up. */
static int start_daemon(killer_t *k)
{
	k->daemon_rounds = SUM(k, saves);
	if (k->rig.socket[0]) {
		return rig_run(&k->rig) == 0;
	}

	return rig_start(&k->rig, "--nvme.path=%s/disk --nvme.sync=off %s %s", k->rig.dir,
			 ENGINE_IS_SMALL(k->options.host)
				 ? "--cpu.size=12MiB --cpu.slab_size=2MiB --nvme.size=16MiB --nvme.file_size=4MiB"
				 : "--cpu.size=512MiB --cpu.slab_size=64MiB --nvme.size=512MiB --nvme.file_size=64MiB",
			 !k->options.tier  ? ""
			 : k->options.host ? "--gpu.devices=fake-0 --gpu.size=8MiB --gpu.slab_size=2MiB"
					   : "--gpu.size=512MiB --gpu.slab_size=64MiB") == 0;
}

static void start_worker(killer_t *k, uint32_t i)
{
	atomic_store(&k->state->worker[i].busy, 0);
	k->started[i] = atomic_load(&k->state->worker[i].rounds);
	fflush(NULL);
	k->worker[i] = fork();
	if (k->worker[i] == 0) {
		(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
		exit(kill_worker(&k->options, i, k->state, k->rig.dir));
	}
}

/* Why a process ended on its own. */
static int ended_badly(killer_t *k, uint32_t i)
{
	int status = 0;

	if (waitpid(k->worker[i], &status, WNOHANG) != k->worker[i]) {
		return 0;
	}
	printf("gpu_kill: worker %u ended on its own: %s %d\n", i, WIFEXITED(status) ? "status" : "signal",
	       WIFEXITED(status) ? WEXITSTATUS(status) : WTERMSIG(status));
	k->worker[i] = 0;
	k->died++;
	k->no_device += WIFEXITED(status) && WEXITSTATUS(status) == 77;

	return 1;
}

/* ---- killing --------------------------------------------------------------------------------- */

static int is_busy(const killer_t *k, uint32_t victim)
{
	int busy = 0;

	for (uint32_t i = 0; i < k->options.workers; i++) {
		busy |= (victim == DAEMON || victim == i) && atomic_load(&k->state->worker[i].busy) != 0;
	}

	return busy;
}

/* It has done something since its start: there is something to interrupt. */
static int is_ripe(const killer_t *k, uint32_t victim)
{
	return victim == DAEMON ? SUM(k, saves) > k->daemon_rounds
				: atomic_load(&k->state->worker[victim].rounds) > k->started[victim] + 1;
}

/* Draw a ripe victim: the daemon in a quarter of the draws. Returns 0 when a worker ended on its own or no process
 * ripens. */
static int choose(killer_t *k, uint32_t *p_victim)
{
	const uint64_t until = now_ms() + STUCK_MS;

	while (now_ms() < until) {
		const uint32_t drawn = (uint32_t)bench_random(&k->rng);
		const uint32_t victim = drawn % 4 == 0 ? DAEMON : drawn / 4 % k->options.workers;

		for (uint32_t i = 0; i < k->options.workers; i++) {
			if (ended_badly(k, i)) {
				return 0;
			}
		}
		if (is_ripe(k, victim)) {
			*p_victim = victim;
			return 1;
		}
		usleep(500);
	}
	printf("gpu_kill: no process makes progress\n");
	k->stuck++;

	return 0;
}

static void kill_process(killer_t *k, uint32_t victim)
{
	const uint64_t until = now_ms() + MOMENT_MS;

	while (!is_busy(k, victim) && now_ms() < until) {
	}
	usleep((useconds_t)(bench_random(&k->rng) % 600));
	k->busy_kills += (uint32_t)is_busy(k, victim);
	if (bench_random(&k->rng) % 3 == 0) {
		kill(victim == DAEMON ? k->rig.pid : k->worker[victim], SIGSTOP);
		usleep((useconds_t)(bench_random(&k->rng) % STOPPED_US));
		k->stopped_kills++;
	}
	if (victim == DAEMON) {
		rig_stop(&k->rig, 1);
		k->daemon_kills++;
	} else {
		kill(k->worker[victim], SIGKILL);
		waitpid(k->worker[victim], NULL, 0);
		k->worker_kills++;
	}
}

/* Every worker but the victim completes a round. */
static int survivors_go_on(killer_t *k, uint32_t victim, const uint64_t *rounds)
{
	const uint64_t until = now_ms() + STUCK_MS;

	for (uint32_t i = 0; i < k->options.workers; i++) {
		while (i != victim && atomic_load(&k->state->worker[i].rounds) <= rounds[i]) {
			if (ended_badly(k, i)) {
				return 0;
			}
			if (now_ms() > until) {
				printf("gpu_kill: worker %u is stuck\n", i);
				k->stuck++;
				return 0;
			}
			usleep(500);
		}
	}

	return 1;
}

static int kill_one(killer_t *k)
{
	uint64_t rounds[KILL_WORKERS] = {0};
	uint32_t victim;

	if (!choose(k, &victim)) {
		return 0;
	}
	kill_process(k, victim);
	for (uint32_t i = 0; i < k->options.workers; i++) {
		rounds[i] = atomic_load(&k->state->worker[i].rounds);
	}
	if (victim != DAEMON) {
		start_worker(k, victim);
	} else if (!start_daemon(k)) {
		return 0;
	}

	return survivors_go_on(k, victim, rounds);
}

/* ---- before and after ------------------------------------------------------------------------ */

/* A number behind a name in a file of lines "name[:] number". */
static uint64_t read_number(const char *path, const char *name)
{
	FILE *file = fopen(path, "r");
	char line[256];
	uint64_t n = 0;

	while (file && fgets(line, sizeof line, file)) {
		if (strncmp(line, name, strlen(name)) == 0) {
			n = strtoull(line + strlen(name), NULL, 10);
		}
	}
	if (file) {
		fclose(file);
	}

	return n;
}

/* A child reads the device's free memory and ends: its own context is gone before the next reading. */
static footprint_t read_footprint(killer_t *k)
{
	const pid_t pid = fork();
	footprint_t f;

	if (pid == 0) {
		atomic_store(&k->state->device_free, memory_free_bytes(k->options.host));
		_exit(0);
	}
	waitpid(pid, NULL, 0);
	f.device_free = atomic_load(&k->state->device_free);
	f.pinned_pages = read_number("/proc/vmstat", "nr_foll_pin_acquired ") -
			 read_number("/proc/vmstat", "nr_foll_pin_released ");
	f.shared_kib = read_number("/proc/meminfo", "Shmem:");

	return f;
}

/* Is all of it back? Other programs of a machine with a device may use up to SLACK_BYTES more; on a machine without one
 * there is no such limit. */
static int is_back(const footprint_t *before, const footprint_t *after)
{
	return before->device_free == 0 || (after->device_free + SLACK_BYTES >= before->device_free &&
					    after->pinned_pages * 4096 <= before->pinned_pages * 4096 + SLACK_BYTES &&
					    after->shared_kib * 1024 <= before->shared_kib * 1024 + SLACK_BYTES);
}

/* No lease, no put, no broken invariant, once the workers have gone. */
static int daemon_is_sound(const killer_t *k)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = k->rig.socket, .observe = 1};
	const uint64_t until = now_ms() + 60000;
	uint32_t failed = 1;
	char *json = NULL;
	kvc_t *kvc;
	int quiet = 0;

	while (!quiet && now_ms() < until) {
		quiet = rig_metric(&k->rig, "kvd_leases") == 0 && rig_metric(&k->rig, "kvd_puts") == 0;
		usleep(quiet ? 0 : 20000);
	}
	if (kvc_attach(&config, &kvc) != KVC_OK) {
		printf("gpu_kill: the daemon does not answer\n");
		return 0;
	}
	if (kvc_document(kvc, KVC_DOC_CHECK, 0, &json, &failed) == KVC_OK) {
		kvc_free(json);
	}
	kvc_detach(kvc);
	if (!quiet || failed > 0) {
		printf("gpu_kill: the daemon has %s, and %u checks fail\n", quiet ? "no lease" : "leases or puts left",
		       failed);
	}

	return quiet && failed == 0;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static void stop_workers(killer_t *k)
{
	for (uint32_t i = 0; i < k->options.workers; i++) {
		const uint64_t until = now_ms() + STUCK_MS;

		if (k->worker[i] <= 0) {
			continue;
		}
		kill(k->worker[i], SIGTERM);
		while (waitpid(k->worker[i], NULL, WNOHANG) == 0) {
			if (now_ms() > until) {
				printf("gpu_kill: worker %u does not end\n", i);
				k->stuck++;
				kill(k->worker[i], SIGKILL);
			}
			usleep(1000);
		}
	}
}

static int report(const killer_t *k, const footprint_t *before, const footprint_t *after, int sound, uint64_t ms)
{
	const uint32_t kills = k->daemon_kills + k->worker_kills;
	const uint64_t saves = SUM(k, saves), loads = SUM(k, loads), blocks = SUM(k, blocks), wrong = SUM(k, wrong);
	const uint64_t failed = SUM(k, failed), misses = SUM(k, misses), tier_loads = SUM(k, tier_loads);
	const uint64_t bytes = SUM(k, saved_bytes) + SUM(k, loaded_bytes);
	int good = sound && k->stuck == 0 && is_back(before, after) && saves > 0;
	good = good && (k->options.control ? wrong > 0 /* a load of wrong bytes counts as none */
					   : loads > 0 && wrong == 0 && k->died == 0 && kills >= k->options.kills &&
						     (tier_loads > 0 || !k->options.tier));
	printf("gpu_kill: seed 0x%" PRIx64
	       ", %u of %u kills in %.0f s: %u of the daemon, %u of workers, %u with bytes on"
	       " their way, %u stopped before; %" PRIu64 " saves, %" PRIu64 " loads, %" PRIu64 " and %" PRIu64
	       " of them in the GPU tier, %.1f GB, %" PRIu64 " blocks compared, %" PRIu64 " wrong; %" PRIu64
	       " interrupted, %" PRIu64 " misses; %u stuck, %u died; free on the device %" PRIu64 " then %" PRIu64
	       " MiB, pinned %" PRIu64 " then %" PRIu64 " pages, shared %" PRIu64 " then %" PRIu64 " MiB%s: %s\n",
	       k->options.seed, kills, k->options.kills, (double)ms / 1e3, k->daemon_kills, k->worker_kills,
	       k->busy_kills, k->stopped_kills, saves, loads, SUM(k, tier_saves), tier_loads, (double)bytes / 1e9,
	       blocks, wrong, failed, misses, k->stuck, k->died, before->device_free >> 20, after->device_free >> 20,
	       before->pinned_pages, after->pinned_pages, before->shared_kib >> 10, after->shared_kib >> 10,
	       k->options.control ? "; a control: wrong bytes are wanted" : "", good ? "good" : "BAD");

	return good ? 0 : 1;
}

static int wants_more(const killer_t *k)
{
	return k->daemon_kills + k->worker_kills < k->options.kills || (k->options.control && SUM(k, wrong) == 0);
}

static int run(killer_t *k)
{
	const uint64_t start = now_ms();
	const uint64_t until = start + (uint64_t)k->options.seconds * 1000u;
	const footprint_t before = read_footprint(k);
	footprint_t after;
	int sound, going;

	going = start_daemon(k);
	for (uint32_t i = 0; i < k->options.workers && going; i++) {
		start_worker(k, i);
	}
	while (going && wants_more(k) && now_ms() < until) {
		going = kill_one(k);
	}
	while (going && !k->options.control && now_ms() < until &&
	       (k->options.tier ? SUM(k, tier_loads) : SUM(k, loads)) == 0) {
		usleep(10000); /* on a slow machine no worker has loaded yet */
	}
	stop_workers(k);
	sound = going && daemon_is_sound(k);
	rig_stop(&k->rig, 0);
	if (k->no_device > 0) {
		return 77;
	}
	after = read_footprint(k);

	return report(k, &before, &after, sound || k->options.control, now_ms() - start);
}

static uint64_t option(int argc, char **argv, const char *name, uint64_t otherwise)
{
	for (int i = 1; i + 1 < argc; i++) {
		if (strcmp(argv[i], name) == 0) {
			return strtoull(argv[i + 1], NULL, 0);
		}
	}

	return otherwise;
}

int main(int argc, char **argv)
{
	killer_t k = {.options = {.seed = option(argc, argv, "--seed", (uint64_t)time(NULL)),
				  .kills = (uint32_t)option(argc, argv, "--kills", 200),
				  .seconds = (uint32_t)option(argc, argv, "--seconds", 165),
				  .workers = (uint32_t)option(argc, argv, "--workers", 4),
				  .host = option(argc, argv, "--host", 0) != 0,
				  .tier = option(argc, argv, "--tier", TIER) != 0,
				  .control = option(argc, argv, "--control", 0) != 0}};
	int status;

	k.options.workers = k.options.workers < 1              ? 1
			    : k.options.workers < KILL_WORKERS ? k.options.workers
							       : KILL_WORKERS;
	setvbuf(stdout, NULL, _IOLBF, 0);
	k.state = mmap(NULL, sizeof *k.state, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (k.state == MAP_FAILED) {
		return 1;
	}
	k.rng = k.options.seed;
	printf("gpu_kill: seed 0x%llx, %u kills, %u workers, %s memory\n", (unsigned long long)k.options.seed,
	       k.options.kills, k.options.workers, k.options.host ? "host" : "device");
	status = run(&k);
	rig_remove(&k.rig);

	return status;
}
