/* The GPU tier and its program: see gpu.h. */
#include "io/base/gpu.h"

#include "gpu/wire.h"
#include "base/held.h"
#include "base/helper.h"
#include "io/base/poller.h"
#include "io/base/silence.h"
#include "base/keeper_socket.h"

#include "kvs/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define DEVICES      KV_MAX_DEVICES
#define LOOK_NS      UINT64_C(10000000)
#define SILENCE_NS   UINT64_C(30000000000) /* a driver takes seconds to start, and may hang for ever */
#define PAUSE_MIN_NS UINT64_C(1000000000)
#define PAUSE_MAX_NS UINT64_C(60000000000)
#define BATCH        16u /* messages in one iteration */
#define FDS_LEFT     64u /* descriptors that slabs leave to sessions */
#define SEALS        (F_SEAL_SHRINK | F_SEAL_GROW)

_Static_assert(KVS_MEMORIES == DEVICES + 1u, "a memory for each device, and the host's");

/* What the program is started for, again and again. */
typedef struct gpu_task {
	uint64_t due_ns;   /* not before */
	uint32_t failures; /* in a row */
	uint32_t asked;    /* slabs, when it was started last; 0: the list of devices */
	uint32_t given;    /* of them */
	char why[KVD_GPU_TEXT_MAX];
} gpu_task_t;

typedef struct gpu_device {
	kvd_host_t *host;
	gpu_task_t task;
	char uuid[KVD_GPU_UUID_MAX];
	kvs_tier_t *pool; /* NULL: no slab has come yet */
	uint32_t memory;  /* the core's number of it */
	uint64_t adopted; /* blocks */
	int stock[KVS_MEMORY_SLABS];
	uint32_t stock_count;
} gpu_device_t;

typedef struct kvd_gpu_host {
	kvd_source_t source;  /* our end of the pair; fd -1: no program */
	int program_fd;       /* -1: could not be opened */
	pid_t pid;            /* 0: none; else not yet reaped */
	gpu_device_t *device; /* that it runs for; NULL: the list */
	uint64_t look_ns;
	kvd_silence_t silence; /* of the program */
	uint64_t slab_bytes;
	uint32_t slabs; /* of a device */
	int must_list;  /* the devices are not known yet */
	gpu_task_t list;
	uint32_t count;
	gpu_device_t devices[DEVICES];
} kvd_gpu_host_t;

/* ---- devices and their memory ---------------------------------------------------------------- */

static gpu_device_t *find_device(kvd_gpu_host_t *gpu, const char *uuid)
{
	for (uint32_t i = 0; i < gpu->count; i++) {
		if (strcmp(gpu->devices[i].uuid, uuid) == 0) {
			return &gpu->devices[i];
		}
	}

	return NULL;
}

static void add_device(kvd_host_t *host, const char *uuid, size_t len)
{
	kvd_gpu_host_t *gpu = host->gpu;
	gpu_device_t *device;

	if (gpu->count == DEVICES) {
		kv_log(KV_LOG_WARN, "gpu", "more than %u devices: the others are not used; gpu.devices says which",
		       DEVICES);
		return;
	}
	device = &gpu->devices[gpu->count++];
	device->host = host;
	snprintf(device->uuid, sizeof device->uuid, "%.*s", (int)len, uuid);
}

static uint32_t count_slabs(const gpu_device_t *device)
{
	return device->stock_count + (device->pool ? kvs_pool_slabs_held(device->pool) : 0);
}

static uint32_t count_missing(const gpu_device_t *device)
{
	uint32_t have = count_slabs(device), wanted = device->host->gpu->slabs;

	return have < wanted ? wanted - have : 0;
}

static void update_gauges(kvd_host_t *host)
{
	uint64_t pools = 0, stock = 0;

	for (uint32_t i = 0; i < host->gpu->count; i++) {
		pools += host->gpu->devices[i].pool != NULL;
		stock += host->gpu->devices[i].stock_count;
	}
	kv_metric_set(&host->metrics, KV_M_GPU_DEVICES, pools);
	kv_metric_set(&host->metrics, KV_M_GPU_STOCK_SLABS, stock);
}

/* kvs_take_fn */
static int take_slab(void *ctx)
{
	gpu_device_t *device = ctx;
	int fd = device->stock_count > 0 ? device->stock[--device->stock_count] : -1;

	update_gauges(device->host);

	return fd;
}

/* ---- descriptors for the next daemon --------------------------------------------------------- */

static void name_for_keeper(char out[KVD_KEEPER_NAME], const gpu_device_t *device, const char *name)
{
	snprintf(out, KVD_KEEPER_NAME, "%s.%s", device->uuid, name);
}

/* kvs_hold_fn */
static void hold_for_pool(void *ctx, const char *name, int fd)
{
	const gpu_device_t *device = ctx;
	char full[KVD_KEEPER_NAME];

	name_for_keeper(full, device, name);
	if (device->host->options->adopt) {
		kvd_keeper_keep(&device->host->to_keeper, full, fd);
	}
}

/* kvs_drop_fn */
static void drop_for_pool(void *ctx, const char *name)
{
	const gpu_device_t *device = ctx;
	char full[KVD_KEEPER_NAME];

	name_for_keeper(full, device, name);
	kvd_keeper_drop(&device->host->to_keeper, full);
}

/* kvs_claim_fn */
static int claim_for_pool(void *ctx, const char *name)
{
	const gpu_device_t *device = ctx;
	char full[KVD_KEEPER_NAME];

	name_for_keeper(full, device, name);

	return kvd_held_claim(device->host->held, full);
}

static kv_status_t open_pool(gpu_device_t *device)
{
	kvd_host_t *host = device->host;
	const kvd_gpu_host_t *gpu = host->gpu;
	const kvs_pool_config_t config = {.limit_bytes = gpu->slabs * gpu->slab_bytes,
					  .slab_bytes = gpu->slab_bytes,
					  .max_slabs = KVS_MEMORY_SLABS,
					  .take = take_slab,
					  .take_ctx = device,
					  .memory = kvd_gpu_is_fake(device->uuid) ? KV_SLAB_MEMFD : KV_SLAB_CUDA,
					  .huge = KVS_HUGE_OFF,
					  .incarnation = host->incarnation,
					  .hold = hold_for_pool,
					  .drop = drop_for_pool,
					  .claim = claim_for_pool,
					  .hold_ctx = device,
					  .metrics = &host->metrics};
	kvs_tier_t *pool = NULL;
	uint32_t memory = 0;
	/* The keeper gets its slabs and then its ledger, or the pool is not opened. */
	kv_status_t status = kvd_keeper_reserve(&host->to_keeper, 2 * KVS_MEMORY_SLABS + 1u);

	status = status == KV_OK ? kvs_pool_open(&config, host->env, &pool) : status;
	if (status != KV_OK) {
		return status;
	}
	if (device->stock_count == 0 && kvs_pool_slabs_held(pool) == 0) {
		drop_for_pool(device, "ledger"); /* nothing could be taken over, and no memory has come */
		kvs_close(pool);
		return KV_OK;
	}
	status = kvd_core_add_memory(host->core, pool, &memory);
	kv_assert(status == KV_OK && memory == host->pool_count &&
		  memory < KVS_MEMORIES); /* a number for each device */
	device->adopted = kv_metric_get(&host->metrics, KV_M_ADOPTED_BLOCKS);
	kvd_core_adopt(host->core, memory);
	device->adopted = kv_metric_get(&host->metrics, KV_M_ADOPTED_BLOCKS) - device->adopted;
	host->pool[host->pool_count++] = pool;
	kvs_pool_set_unknown_writers(pool, host->to_keeper.writers);
	device->pool = pool;
	device->memory = memory;
	update_gauges(host);
	kv_log(KV_LOG_INFO, "gpu", "the GPU tier has a pool: device %s memory %u slabs %u slab_bytes %llu",
	       device->uuid, memory, gpu->slabs, (unsigned long long)gpu->slab_bytes);

	return KV_OK;
}

/* ---- the program ----------------------------------------------------------------------------- */

/* A try has ended. */
static void note_result(kvd_host_t *host, gpu_device_t *device, kv_status_t status, const char *why)
{
	gpu_task_t *task = device ? &device->task : &host->gpu->list;
	const char *name = device ? device->uuid : "gpu.devices=all";
	uint64_t pause = PAUSE_MIN_NS;

	if (status == KV_OK) {
		task->failures = 0;
		task->why[0] = '\0';
		return;
	}
	task->failures = task->given > 0 ? 1 : task->failures + 1;
	for (uint32_t i = 1; i < task->failures && pause < PAUSE_MAX_NS; i++) {
		pause *= 2;
	}
	pause = pause < PAUSE_MAX_NS ? pause : PAUSE_MAX_NS;
	task->due_ns = kv_now_ns(host->env) + pause;
	kv_metric_add(&host->metrics, KV_M_GPU_FAILURES, 1);
	if (strcmp(task->why, why) != 0) {
		snprintf(task->why, sizeof task->why, "%s", why);
		kv_log(KV_LOG_WARN, "gpu",
		       "no memory for the GPU tier, it is tried again: %s; device %s status %s given %u of %u", why,
		       name, kv_status_name(status), task->given, task->asked);
	}
}

/* It has ended, or is made to end: reaped in a later step. What came from it stays. */
static void end_program(kvd_host_t *host, kv_status_t status, const char *why)
{
	kvd_gpu_host_t *gpu = host->gpu;
	gpu_device_t *device = gpu->device;

	kvd_poller_remove(host, &gpu->source);
	close(gpu->source.fd);
	gpu->source.fd = -1;
	kill(gpu->pid, SIGKILL);
	if (status == KV_OK && device && device->task.given < device->task.asked) {
		status = KV_ERR_PROTO;
		why = "the GPU program gave less than it was asked for";
	} else if (status == KV_OK && !device && gpu->count == 0) {
		status = KV_ERR_NOT_FOUND;
		why = "there is no GPU that can be used";
	}
	gpu->must_list = device || status == KV_OK ? 0 : 1;
	note_result(host, device, status, why);
}

static void refuse(kvd_host_t *host, const char *why)
{
	kv_metric_add(&host->metrics, KV_M_GPU_REFUSED, 1);
	end_program(host, KV_ERR_PROTO, why);
}

/* A memfd that could be cut would end its readers. Memory of a GPU cannot be looked at from here. */
static int slab_ok(const gpu_device_t *device, const kvd_gpu_message_t *m, int fd)
{
	struct stat st;

	if (m->bytes != device->host->gpu->slab_bytes || device->task.given >= device->task.asked) {
		return 0;
	}

	return !kvd_gpu_is_fake(device->uuid) ||
	       (fstat(fd, &st) == 0 && (uint64_t)st.st_size == m->bytes && (fcntl(fd, F_GET_SEALS) & SEALS) == SEALS);
}

/* Sessions need descriptors more: the kernel gives the lowest number that is free. */
static int leaves_descriptors(int fd)
{
	struct rlimit limit;

	return getrlimit(RLIMIT_NOFILE, &limit) != 0 || (rlim_t)fd + FDS_LEFT < limit.rlim_cur;
}

static void take_in_slab(kvd_host_t *host, const kvd_gpu_message_t *m, int fd)
{
	gpu_device_t *device = host->gpu->device;
	kv_status_t status = KV_OK;

	if (!device || !slab_ok(device, m, fd)) {
		close(fd);
		refuse(host, "the GPU program gave memory that was not asked for");
		return;
	}
	if (!leaves_descriptors(fd)) {
		close(fd);
		end_program(host, KV_ERR_LIMIT, "no descriptors are left for more slabs (LimitNOFILE)");
		return;
	}
	device->stock[device->stock_count++] = fd;
	device->task.given++;
	if (!device->pool) {
		status = open_pool(device);
	}
	if (status != KV_OK) {
		end_program(host, status, kv_status_text(status));
	}
	update_gauges(host);
}

static void take_in_device(kvd_host_t *host, const kvd_gpu_message_t *m)
{
	if (host->gpu->device || kvd_gpu_is_fake(m->uuid)) {
		refuse(host, "the GPU program names a device that was not asked for");
	} else if (!find_device(host->gpu, m->uuid)) {
		add_device(host, m->uuid, strlen(m->uuid));
		kv_log(KV_LOG_INFO, "gpu", "device %s \"%s\" bytes %llu free %llu", m->uuid, m->text,
		       (unsigned long long)m->bytes, (unsigned long long)m->free_bytes);
	}
}

/* 1: there may be another one. */
static int take_message(kvd_host_t *host, uint32_t events)
{
	union {
		kvd_gpu_message_t message;
		uint8_t bytes[sizeof(kvd_gpu_message_t) + 1u];
	} fresh;
	int fds[KV_WIRE_MAX_FDS];
	uint32_t fd_count = 0;
	size_t n = 0;
	kv_status_t status = kv_sock_recv(host->gpu->source.fd, fresh.bytes, sizeof fresh, &n, fds, &fd_count);

	if (status == KV_PENDING && !(events & (EPOLLHUP | EPOLLERR))) {
		return 0;
	}
	if (status != KV_OK) {
		end_program(host, KV_ERR_IO, "the GPU program has ended and has not said why");
		return 0;
	}
	kvd_silence_end(&host->gpu->silence, kv_now_ns(host->env));
	if (fd_count == UINT32_MAX) {
		end_program(host, KV_ERR_LIMIT,
			    "a descriptor of memory could not be received: no descriptors are left");
		return 0;
	}
	if (kvd_gpu_check(&fresh.message, n, fd_count) != KV_OK) {
		for (uint32_t i = 0; i < fd_count; i++) {
			close(fds[i]);
		}
		refuse(host, "the GPU program said something that makes no sense");
	} else if (fresh.message.verb == KVD_GPU_SLAB) {
		take_in_slab(host, &fresh.message, fds[0]);
	} else if (fresh.message.verb == KVD_GPU_DEVICE) {
		take_in_device(host, &fresh.message);
	} else {
		end_program(host, (kv_status_t)fresh.message.status, fresh.message.text);
	}

	return host->gpu->source.fd >= 0;
}

static int program_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	(void)source;
	for (uint32_t i = 0; i < BATCH && take_message(host, events); i++) {
	}

	return 0;
}

static kv_status_t start_program(kvd_host_t *host, char *why, size_t cap)
{
	kvd_gpu_host_t *gpu = host->gpu;
	const gpu_device_t *device = gpu->device;
	char bytes[24], count[24];
	char *argv[] = {(char *)(uintptr_t) "kvd-gpu", (char *)(uintptr_t) "list", NULL, NULL, NULL};
	int fd = -1;

	if (gpu->program_fd < 0 && kvd_helper_open("kvd-gpu", &gpu->program_fd, why, cap) != KV_OK) {
		return KV_ERR_PATH;
	}
	if (device) {
		snprintf(bytes, sizeof bytes, "%llu", (unsigned long long)gpu->slab_bytes);
		snprintf(count, sizeof count, "%u", device->task.asked);
		argv[1] = (char *)(uintptr_t)device->uuid;
		argv[2] = bytes;
		argv[3] = count;
	}
	kv_metric_add(&host->metrics, KV_M_GPU_STARTS, 1);
	if (kvd_helper_start(gpu->program_fd, argv, &gpu->pid, &fd) != KV_OK) {
		snprintf(why, cap, "cannot start the GPU program: %s", strerror(errno));
		return KV_ERR_LIMIT;
	}
	gpu->source = (kvd_source_t){.ready = program_ready, .fd = fd};
	if (kvd_poller_add(host, &gpu->source, EPOLLIN) != KV_OK) {
		snprintf(why, cap, "cannot watch the GPU program");
		close(fd);
		gpu->source.fd = -1;
		kill(gpu->pid, SIGKILL);
		return KV_ERR_LIMIT;
	}
	kvd_silence_end(&gpu->silence, kv_now_ns(host->env));

	return KV_OK;
}

/* For the list, or for a device; NULL is the list. */
static void run_task(kvd_host_t *host, gpu_device_t *device)
{
	gpu_task_t *task = device ? &device->task : &host->gpu->list;
	char why[KVD_GPU_TEXT_MAX];
	kv_status_t status;

	host->gpu->device = device;
	task->asked = device ? count_missing(device) : 0;
	task->given = 0;
	if (device && task->asked == 0) { /* all is here, and the pool could not be opened */
		status = open_pool(device);
		snprintf(why, sizeof why, "%s", kv_status_text(status));
		note_result(host, device, status, why);
		return;
	}
	status = start_program(host, why, sizeof why);
	if (status != KV_OK) {
		note_result(host, device, status, why);
	}
}

static void run_due_task(kvd_host_t *host, uint64_t now)
{
	kvd_gpu_host_t *gpu = host->gpu;

	if (gpu->must_list) {
		if (now >= gpu->list.due_ns) {
			run_task(host, NULL);
		}
		return;
	}
	for (uint32_t i = 0; i < gpu->count; i++) {
		gpu_device_t *device = &gpu->devices[i];

		if (now >= device->task.due_ns && (!device->pool || count_missing(device) > 0)) {
			run_task(host, device);
			return;
		}
	}
}

void kvd_gpu_step(kvd_host_t *host, uint64_t now)
{
	kvd_gpu_host_t *gpu = host->gpu;
	int wstatus;

	if (!gpu || now < gpu->look_ns) {
		return;
	}
	gpu->look_ns = now + LOOK_NS;
	if (gpu->source.fd >= 0) {
		if (kvd_silence_look(&gpu->silence, now) > SILENCE_NS) {
			end_program(host, KV_ERR_TIMEOUT, "the GPU program was silent and is killed: the driver hangs");
		}
		return;
	}
	/* One that the kernel holds back keeps the next one from the driver. */
	if (gpu->pid > 0 && waitpid(gpu->pid, &wstatus, WNOHANG) == gpu->pid) {
		gpu->pid = 0;
	}
	if (gpu->pid == 0) {
		run_due_task(host, now);
	}
}

/* ---- open and close -------------------------------------------------------------------------- */

/* A device has numbers for KVS_MEMORY_SLABS slabs: a larger tier has larger slabs. */
static void choose_slab_size(kvd_gpu_host_t *gpu, const kvd_options_t *options)
{
	gpu->slab_bytes = options->gpu_slab_size;
	if (options->gpu_size / gpu->slab_bytes > KVS_MEMORY_SLABS) {
		gpu->slab_bytes =
			(options->gpu_size / KVS_MEMORY_SLABS + KVD_GPU_GRAIN - 1u) / KVD_GPU_GRAIN * KVD_GPU_GRAIN;
		kv_log(KV_LOG_WARN, "gpu",
		       "gpu.slab_size is too small for gpu.size, larger slabs are used: slab_bytes %llu",
		       (unsigned long long)gpu->slab_bytes);
	}
	gpu->slabs = (uint32_t)(options->gpu_size / gpu->slab_bytes);
}

/* Devices are known by what an earlier daemon had of them. With gpu.devices=all the list comes later. */
static void adopt_memory(kvd_host_t *host)
{
	kvd_gpu_host_t *gpu = host->gpu;
	static const char end[] = ".ledger";
	const char *name;

	for (uint32_t i = 0; (name = kvd_held_name(host->held, i)) != NULL; i++) {
		const size_t len = strlen(name) > sizeof end - 1 ? strlen(name) - (sizeof end - 1) : 0;
		char uuid[KVD_GPU_UUID_MAX];
		gpu_device_t *device;

		if (len == 0 || strcmp(name + len, end) != 0 || !kvd_gpu_uuid_ok(name, len)) {
			continue;
		}
		snprintf(uuid, sizeof uuid, "%.*s", (int)len, name);
		if (gpu->must_list && !kvd_gpu_is_fake(uuid) && !find_device(gpu, uuid)) {
			add_device(host, uuid, len);
		}
		device = find_device(gpu, uuid);
		if (device && !device->pool && open_pool(device) != KV_OK) {
			kv_log(KV_LOG_WARN, "gpu", "memory of the daemon before is not taken over: device %s", uuid);
		}
	}
}

kv_status_t kvd_gpu_open(kvd_host_t *host)
{
	const kvd_options_t *options = host->options;
	kvd_gpu_host_t *gpu;
	const char *word;
	char why[KVD_GPU_TEXT_MAX];
	size_t len;

	if (options->gpu_size == 0) {
		return KV_OK;
	}
	gpu = calloc(1, sizeof *gpu);
	if (!gpu) {
		return KV_ERR_NOMEM;
	}
	host->gpu = gpu;
	gpu->source.fd = gpu->program_fd = -1;
	choose_slab_size(gpu, options);
	gpu->must_list = kvd_list_has(options->gpu_devices, "all");
	for (uint32_t i = 0; !gpu->must_list && (len = kvd_list_word(options->gpu_devices, i, &word)) > 0; i++) {
		add_device(host, word, len);
	}
	(void)kvd_helper_open("kvd-gpu", &gpu->program_fd, why, sizeof why); /* tried again when it is needed */
	adopt_memory(host);

	return KV_OK;
}

void kvd_gpu_close(kvd_host_t *host)
{
	kvd_gpu_host_t *gpu = host->gpu;

	if (!gpu) {
		return;
	}
	if (gpu->source.fd >= 0) {
		close(gpu->source.fd);
	}
	if (gpu->pid > 0) { /* it dies with us if the kernel holds it back now */
		kill(gpu->pid, SIGKILL);
		(void)waitpid(gpu->pid, NULL, WNOHANG);
	}
	for (uint32_t i = 0; i < gpu->count; i++) {
		while (gpu->devices[i].stock_count > 0) {
			close(gpu->devices[i].stock[--gpu->devices[i].stock_count]);
		}
	}
	if (gpu->program_fd >= 0) {
		close(gpu->program_fd);
	}
	free(gpu);
	host->gpu = NULL;
}

/* ---- questions ------------------------------------------------------------------------------- */

int kvd_gpu_find(const kvd_host_t *host, const char *uuid, uint32_t *p_memory)
{
	const gpu_device_t *device = host->gpu ? find_device(host->gpu, uuid) : NULL;

	if (!device || !device->pool) {
		return 0;
	}
	*p_memory = device->memory;

	return 1;
}

int kvd_gpu_describe(const kvd_host_t *host, uint32_t i, kvd_gpu_info_t *p_info)
{
	const gpu_device_t *device = host->gpu && i < host->gpu->count ? &host->gpu->devices[i] : NULL;

	if (!device) {
		return 0;
	}
	*p_info = (kvd_gpu_info_t){.uuid = device->uuid,
				   .pool = device->pool,
				   .memory = device->memory,
				   .state = !device->pool                ? KVD_GPU_OFF
					    : count_missing(device) == 0 ? KVD_GPU_OK
									 : KVD_GPU_FILLING,
				   .slabs = count_slabs(device),
				   .wanted = host->gpu->slabs,
				   .adopted = device->adopted,
				   .why = device->task.why};

	return 1;
}

int kvd_gpu_is_degraded(const kvd_host_t *host, char *out, size_t cap)
{
	kvd_gpu_info_t info;

	out[0] = '\0';
	if (host->gpu && host->gpu->must_list && host->gpu->list.why[0]) {
		snprintf(out, cap, "the GPU tier is off: %s; it is tried again", host->gpu->list.why);
	}
	for (uint32_t i = 0; !out[0] && kvd_gpu_describe(host, i, &info); i++) {
		if (info.state != KVD_GPU_OK && info.why[0]) {
			snprintf(out, cap, "the GPU tier of %s has %u of %u slabs: %s; it is tried again", info.uuid,
				 info.slabs, info.wanted, info.why);
		}
	}

	return out[0] != '\0';
}

uint32_t kvd_gpu_count_fds(const kvd_host_t *host)
{
	uint32_t count = host->gpu && host->gpu->source.fd >= 0;

	for (uint32_t i = 0; host->gpu && i < host->gpu->count; i++) {
		count += host->gpu->devices[i].stock_count + (host->gpu->devices[i].pool != NULL); /* its ledger */
	}

	return count;
}
