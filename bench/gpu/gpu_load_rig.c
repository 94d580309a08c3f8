/* What the rows of kvd-gpu-load share. */
#include "gpu_load.h"

#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define BOUNCE      (64u << 20)
#define WAIT_MS     60000u
#define SAVE_BLOCKS 64u /* of one put: an instance may leave half of the pool unfinished, not all of it */
#define SEED        UINT64_C(1000)
#define SEED_OTHER  UINT64_C(1)

static volatile sig_atomic_t stopped;

static void stop(int number)
{
	(void)number;
	stopped = 1;
}

void load_catch(void)
{
	(void)signal(SIGTERM, stop);
	(void)signal(SIGINT, stop);
}

int load_late(const load_bench_t *b)
{
	return stopped || engine_now_ns() >= b->until_ns;
}

uint32_t load_left_ms(const load_bench_t *b)
{
	const uint64_t now = engine_now_ns();
	const uint64_t left = load_late(b) || now >= b->until_ns ? 0 : (b->until_ns - now) / 1000000u;

	return left < 1 ? 1 : left < WAIT_MS ? (uint32_t)left : WAIT_MS;
}

/* ---- the daemon ------------------------------------------------------------------------------ */

/* With a disk tier the pool holds a prompt and a quarter of one: what was loaded before the last prompt is on disk
 * only. */
_Noreturn static void become_daemon(const load_bench_t *b)
{
	const size_t mib = b->blocks * b->engine.block_bytes >> 20;
	char self[PATH_MAX] = "", program[PATH_MAX + 8], text[6][PATH_MAX], log[96];
	char *args[16] = {program,
			  "--keeper=off",
			  "--http.listen=off",
			  "--cpu.ahead=all",
			  "--instance.max_pinned=1TiB",
			  "--instance.max_unfinished=1TiB"};
	const ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
	const char *slash = len > 0 ? strrchr(self, '/') : NULL;
	int n = 6, fd;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	snprintf(program, sizeof program, "%.*s/kvd", slash ? (int)(slash - self) : 0, self);
	snprintf(log, sizeof log, "%s/log", b->dir);
	snprintf(text[0], sizeof text[0], "--run_dir=%s/run", b->dir);
	snprintf(text[1], sizeof text[1], "--cpu.size=%zuMiB", mib * 5 / 4 + (b->engine.small ? 8 : 256));
	snprintf(text[2], sizeof text[2], "--cpu.slab_size=%s", b->engine.small ? "2MiB" : "128MiB");
	snprintf(text[3], sizeof text[3], "--cpu.max_blocks=%u", b->blocks + b->blocks / 4 + 16);
	snprintf(text[4], sizeof text[4], "--nvme.path=%s/tier", b->disk);
	snprintf(text[5], sizeof text[5], "--nvme.size=%zuMiB", mib * LOAD_PROMPTS * 5 / 4 + 512);
	if (b->engine.small) { /* a test: it may have to wait for a CPU */
		args[n++] = "--limits.silence=10s";
	}
	for (int i = 0; i < (b->base ? 6 : 3); i++) {
		args[n++] = text[i];
	}
	fd = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
	if (fd >= 0) {
		(void)dup2(fd, STDOUT_FILENO);
		(void)dup2(fd, STDERR_FILENO);
	}
	execv(program, args);
	_exit(127);
}

/* What the daemon has said last: its log goes with its directory. */
static void show_log(const load_bench_t *b)
{
	char path[96], line[512];
	FILE *log;

	snprintf(path, sizeof path, "%s/log", b->dir);
	log = fopen(path, "r");
	while (log && fgets(line, sizeof line, log)) {
		printf("  %s", line);
	}
	if (log) {
		fclose(log);
	}
}

static int start_daemon(load_bench_t *b)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = b->socket, .observe = 1};

	b->daemon = fork();
	if (b->daemon == 0) {
		become_daemon(b);
	}
	for (int i = 0; i < 2000 && b->daemon > 0 && !load_late(b); i++) {
		kvc_t *kvc = NULL;

		if (kvc_attach(&config, &kvc) == KVC_OK) {
			kvc_detach(kvc);
			return 1;
		}
		if (waitpid(b->daemon, NULL, WNOHANG) == b->daemon) {
			b->daemon = 0;
			break;
		}
		usleep(5000);
	}
	printf("gpu_load: the daemon does not start\n");
	show_log(b);

	return 0;
}

static int make_dirs(load_bench_t *b)
{
	snprintf(b->dir, sizeof b->dir, "/tmp/kvd-gpu-load.XXXXXX");
	if (!mkdtemp(b->dir)) {
		perror("gpu_load: mkdtemp");
		b->dir[0] = '\0';
		return 0;
	}
	snprintf(b->socket, sizeof b->socket, "%s/run/default.sock", b->dir);
	if (b->base) {
		snprintf(b->disk, sizeof b->disk, "%s/kvd-gpu-load.XXXXXX", b->base);
		if (!mkdtemp(b->disk)) {
			perror("gpu_load: mkdtemp");
			b->disk[0] = '\0';
			return 0;
		}
	}

	return 1;
}

static int make_memory(load_bench_t *b)
{
	b->bounce_bytes = BOUNCE > b->engine.block_bytes ? BOUNCE : b->engine.block_bytes;
	b->bounce = memory_bounce(b->bounce_bytes);
	b->ids = calloc(b->blocks, sizeof *b->ids);
	b->bad = calloc(b->blocks, sizeof *b->bad);
	if (!b->bounce || !b->ids || !b->bad) {
		return 0;
	}
	for (uint32_t i = 0; i < b->blocks; i++) { /* in no order of the pool's */
		b->ids[i] = (uint32_t)((uint64_t)i * 7919u % b->blocks);
	}
	for (uint32_t p = 0; p < LOAD_PROMPTS; p++) {
		b->keys[p] = calloc(b->blocks, sizeof *b->keys[p]);
		if (!b->keys[p] || engine_keys(&b->engine, p + 1, b->keys[p]) != KVC_OK) {
			return 0;
		}
	}

	return 1;
}

int load_open(load_bench_t *b)
{
	if (!make_dirs(b)) {
		return 0;
	}
	b->engine.socket = b->socket;
	if (!start_daemon(b) || !engine_open(&b->engine)) {
		return 0;
	}
	if (!make_memory(b)) {
		printf("gpu_load: no memory for %u blocks, or no keys\n", b->blocks);
		return 0;
	}
	load_fill(b->bounce, b->bounce_bytes, SEED_OTHER);

	return 1;
}

static void remove_dir(const char *dir)
{
	char command[320];

	snprintf(command, sizeof command, "rm -rf -- '%s'", dir);
	if (dir[0] && system(command) != 0) {
		printf("gpu_load: %s is left behind\n", dir);
	}
}

void load_close(load_bench_t *b)
{
	engine_close(&b->engine);
	if (b->daemon > 0) {
		kill(b->daemon, SIGTERM);
		waitpid(b->daemon, NULL, 0);
	}
	remove_dir(b->dir);
	remove_dir(b->disk);
	for (uint32_t p = 0; p < LOAD_PROMPTS; p++) {
		free(b->keys[p]);
	}
	free(b->ids);
	free(b->bad);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

void load_fill(uint8_t *out, size_t bytes, uint64_t seed)
{
	uint64_t x = seed * UINT64_C(0x9e3779b97f4a7c15) | 1;

	for (size_t i = 0; i < bytes / 8; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		memcpy(out + 8 * i, &x, 8);
	}
}

static uint8_t *piece_of(const load_bench_t *b, uint32_t block, uint32_t layer)
{
	return (uint8_t *)b->engine.base[layer] + (size_t)b->ids[block] * b->engine.piece;
}

static uint64_t seed_of(uint32_t prompt, uint32_t block)
{
	return SEED + (uint64_t)prompt * 1000000u + block;
}

static void write_block(load_bench_t *b, uint32_t block, uint64_t seed)
{
	const engine_t *e = &b->engine;

	load_fill(b->bounce, e->block_bytes, seed);
	for (uint32_t l = 0; l < e->layout.layers; l++) {
		memory_write(piece_of(b, block, l), b->bounce + l * e->piece, e->piece);
	}
	memory_settle();
}

void load_write(load_bench_t *b, uint32_t prompt)
{
	for (uint32_t i = 0; i < b->blocks; i++) {
		write_block(b, i, seed_of(prompt, i));
	}
}

void load_spoil(load_bench_t *b)
{
	for (uint32_t i = 0; i < b->blocks; i++) {
		write_block(b, i, SEED_OTHER);
	}
}

uint32_t load_wrong(load_bench_t *b, uint32_t prompt)
{
	const engine_t *e = &b->engine;
	uint8_t *expected = malloc(e->block_bytes);
	uint32_t wrong = expected ? 0 : b->blocks;

	for (uint32_t i = 0; i < b->blocks && expected; i++) {
		for (uint32_t l = 0; l < e->layout.layers; l++) {
			memory_read(b->bounce + l * e->piece, piece_of(b, i, l), e->piece);
		}
		memory_settle();
		load_fill(expected, e->block_bytes, seed_of(prompt, i));
		wrong += memcmp(expected, b->bounce, e->block_bytes) != 0;
	}
	free(expected);

	return wrong;
}

/* Pieces of layer 0, side by side in the bounce memory, read as they are now: the engine's stream would wait for them.
 * 0: it cannot. */
static int read_layer(load_bench_t *b, uint32_t count)
{
	const kvk_cuda_ops_t *cuda = memory_cuda();
	kvk_cu_stream_t stream = NULL;
	kvk_cu_event_t event = NULL;
	kvk_cu_ptr_t to = 0;
	int good = cuda && cuda->stream_create(&stream, 1, 0) == 0 && cuda->event_create(&event, 2) == 0 &&
		   cuda->host_pointer(&to, b->bounce, 0) == 0;

	for (uint32_t i = 0; i < count && good; i++) {
		good = cuda->copy_async(to + i * b->engine.piece, (kvk_cu_ptr_t)(uintptr_t)piece_of(b, i, 0),
					b->engine.piece, stream) == 0;
	}
	good = good && cuda->event_record(event, stream) == 0 && cuda->event_wait(event) == 0;
	if (event) {
		cuda->event_destroy(event);
	}
	if (stream) {
		cuda->stream_destroy(stream);
	}

	return good;
}

/* The same of layer 0 alone, at this moment. */
static uint32_t wrong_pieces(load_bench_t *b, uint32_t prompt)
{
	const size_t piece = b->engine.piece;
	const uint32_t most = (uint32_t)(b->bounce_bytes / piece), count = b->blocks < most ? b->blocks : most;
	uint8_t *expected = malloc(piece);
	uint32_t wrong = expected && read_layer(b, count) ? 0 : b->blocks;

	for (uint32_t i = 0; i < count && wrong < b->blocks; i++) {
		load_fill(expected, piece, seed_of(prompt, i));
		wrong += memcmp(expected, b->bounce + i * piece, piece) != 0;
	}
	free(expected);

	return wrong;
}

/* ---- steps ----------------------------------------------------------------------------------- */

static kvc_status_t save_part(load_bench_t *b, uint32_t prompt, uint32_t from, uint32_t n, int durable)
{
	engine_t *e = &b->engine;
	const kvc_put_options_t options = {
		.struct_size = sizeof options, .durable = durable, .writers = &e->writer, .writer_count = 1};
	kvc_put_t *put = NULL;
	kvc_status_t status = kvc_put_start(e->space, b->keys[prompt], from, from + n, &options, &put);

	status = status == KVC_OK ? kvc_put_ready(put, load_left_ms(b)) : status;
	if (status == KVC_OK && kvc_put_n(put) == n && engine_save(e, put, b->ids + from, n)) {
		status = kvc_put_wait(put, durable, load_left_ms(b));
	} else {
		status = status == KVC_OK ? KVC_ERR_FULL : status;
	}
	if (put) {
		kvc_put_free(put);
	}

	return status;
}

int load_save(load_bench_t *b, uint32_t prompt, int durable)
{
	kvc_status_t status = KVC_OK;

	for (uint32_t from = 0; from < b->blocks && status == KVC_OK; from += SAVE_BLOCKS) {
		const uint32_t left = b->blocks - from;

		status = save_part(b, prompt, from, left < SAVE_BLOCKS ? left : SAVE_BLOCKS, durable);
	}
	if (status != KVC_OK) {
		printf("gpu_load: %u blocks cannot be saved: %s\n", b->blocks, kvc_status_name(status));
	}

	return status == KVC_OK;
}

double load_whole(load_bench_t *b, uint32_t prompt, load_parts_t *p_parts)
{
	engine_t *e = &b->engine;
	const uint64_t start = engine_now_ns();
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire(e->space, b->keys[prompt], b->blocks, 0, WAIT_MS, &lease);
	const uint64_t leased = engine_now_ns();
	uint32_t bad = b->blocks;
	uint64_t sent = leased, end;

	if (status == KVC_OK && kvc_lease_n(lease) == b->blocks && engine_load(e, lease, b->ids, b->blocks)) {
		sent = engine_now_ns();
		bad = kvx_worker_take_failed_blocks(e->worker, b->bad, b->blocks);
	}
	end = engine_now_ns();
	kvc_release(&lease, 1);
	if (bad > 0) {
		printf("gpu_load: a load failed: %s, %u blocks\n", kvc_status_name(status), bad);
		return 0;
	}

	if (p_parts) {
		*p_parts = (load_parts_t){.lease = (double)(leased - start) / 1e9,
					  .sent = (double)(sent - leased) / 1e9,
					  .verdict = (double)(end - sent) / 1e9};
	}

	return (double)(end - start) / 1e9;
}

double load_beside(load_bench_t *b, uint32_t prompt, uint32_t count)
{
	engine_t *e = &b->engine;
	const uint64_t start = engine_now_ns();
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire(e->space, b->keys[prompt], b->blocks, 0, WAIT_MS, &lease);
	int good = status == KVC_OK && kvc_lease_n(lease) == b->blocks &&
		   engine_load_beside(e, lease, b->ids, b->blocks, count);
	const uint64_t end = engine_now_ns();

	good = kvx_worker_take_failed_blocks(e->worker, b->bad, b->blocks) == 0 && good;
	kvc_release(&lease, 1);
	if (!good) {
		printf("gpu_load: an asynchronous load failed: %s\n", kvc_status_name(status));
	}

	return good ? (double)(end - start) / 1e9 : 0;
}

double load_first(load_bench_t *b, uint32_t prompt, int *p_layered, uint32_t *p_wrong)
{
	engine_t *e = &b->engine;
	kvc_lease_t *lease = NULL;
	kvc_status_t status = kvc_acquire(e->space, b->keys[prompt], b->blocks, 0, WAIT_MS, &lease);
	uint32_t bad = b->blocks;
	uint64_t ns = 0;

	if (status == KVC_OK && kvc_lease_n(lease) == b->blocks &&
	    engine_load_first(e, lease, b->ids, &ns, p_layered)) {
		if (p_wrong) {
			*p_wrong = wrong_pieces(b, prompt);
		}
		engine_load_rest(e);
		bad = kvx_worker_take_failed_blocks(e->worker, b->bad, b->blocks);
	}
	kvc_release(&lease, 1);
	if (bad > 0) {
		printf("gpu_load: a load by layers failed: %s, %u blocks\n", kvc_status_name(status), bad);
		return 0;
	}

	return (double)ns / 1e9;
}

double load_plain(load_bench_t *b)
{
	const size_t bytes = b->blocks * b->engine.block_bytes;
	const uint64_t start = engine_now_ns();

	for (size_t at = 0; at < bytes; at += b->bounce_bytes) {
		const size_t n = bytes - at < b->bounce_bytes ? bytes - at : b->bounce_bytes;

		memory_write(b->engine.cache + at, b->bounce, n);
	}
	memory_settle();

	return (double)(engine_now_ns() - start) / 1e9;
}

/* ---- a row ----------------------------------------------------------------------------------- */

void load_row_add(load_row_t *row, double value, double reference, double ratio)
{
	row->value[row->rounds] = value;
	row->of_reference[row->rounds] = reference;
	row->ratio[row->rounds++] = ratio;
}

static int by_size(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static double median(double *values, uint32_t n)
{
	qsort(values, n, sizeof *values, by_size);

	return values[n / 2];
}

void load_row_print(const load_bench_t *b, load_row_t *row)
{
	const double value = median(row->value, row->rounds), reference = median(row->of_reference, row->rounds);
	const double ratio = median(row->ratio, row->rounds);
	const int met = row->least ? ratio >= row->goal : ratio <= row->goal;
	const char *sign = row->least ? ">=" : "<=";

	printf("%-58s %8.3f %-4s %8.3f %6.3f  %s  goal %s %.3f: %s\n", row->name, value, row->unit, reference, ratio,
	       row->reference, sign, row->goal, met ? "met" : "MISSED");
	fflush(stdout);
	if (b->json) {
		fprintf(b->json,
			"{\"name\":\"%s\",\"value\":%.4g,\"unit\":\"%s\",\"reference\":\"%s\","
			"\"reference_value\":%.4g,\"ratio\":%.4f,\"rounds\":%u,\"goal\":\"ratio %s "
			"%g\",\"goal_met\":%s}\n",
			row->name, value, row->unit, row->reference, reference, ratio, row->rounds, sign, row->goal,
			met ? "true" : "false");
		fflush(b->json);
	}
}
