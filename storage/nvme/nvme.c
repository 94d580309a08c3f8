/* The disk tier's composition: open in order, close in reverse. */
#include "nvme.h"

#include "alloc.h"
#include "commit.h"
#include "faults.h"
#include "files.h"
#include "fs_status.h"
#include "nvme/threads.h"
#include "own_reads.h"
#include "rebalance.h"
#include "rebuild.h"
#include "nvme/slots/recency.h"
#include "recover.h"
#include "nvme/slots/slots.h"
#include "transfer.h"
#include "nvme/slots/unreadable.h"

#include "kvs/pool.h"
#include "kvs/sigbus.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MIN_LIMIT        (8u << 20)
#define META_MIN         (4ull << 20)
#define META_MAX         (128ull << 20)
#define FLUSH_DEFAULT_NS 50000000ull
#define LOCK_TRIES       50u
#define LOCK_TRIES_GONE  1000u
#define LOCK_PAUSE_US    10000u /* between tries */
#define CLOSE_WAIT_NS    10000000000ull
#define CLOSE_STALL_NS   2000000000ull /* without any end of a transfer or round */

typedef struct detail {
	char *text;
	size_t cap;
} detail_t;

static kv_status_t set_detail(const detail_t *detail, kv_status_t status, const char *format, ...)
	__attribute__((format(printf, 3, 4)));

static kv_status_t set_detail(const detail_t *detail, kv_status_t status, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	if (detail->cap > 0) {
		vsnprintf(detail->text, detail->cap, format, args);
	}
	va_end(args);

	return status;
}

/* ---- the directory --------------------------------------------------------------------------- */

/* Anything in it that a new directory of ours does not have? lost+found comes with a fresh file system. */
static int holds_something(int dir_fd)
{
	int copy = openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
	const struct dirent *entry;
	int something = 0;

	if (!dir) {
		if (copy >= 0) {
			close(copy);
		}
		return 1;
	}
	while ((entry = readdir(dir)) != NULL) {
		const char *name = entry->d_name;

		something |= strcmp(name, ".") != 0 && strcmp(name, "..") != 0 && strcmp(name, "LOCK") != 0 &&
			     strcmp(name, "lost+found") != 0 && strcmp(name, "superblock.0.new") != 0;
	}
	closedir(dir);

	return something;
}

/* A new directory is there after a power loss when its parent has been synced. Not everybody may read the parent. */
static int sync_parent(int fd)
{
	int parent = openat(fd, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int result = parent >= 0 ? fsync(parent) : syncfs(fd);

	if (parent >= 0) {
		close(parent);
	}

	return result;
}

static kv_status_t enter_directory(kvs_nvme_t *nvme, const detail_t *detail)
{
	const char *path = nvme->path;
	struct stat st;

	if (path[0] == '\0' || strlen(path) > PATH_MAX - 64u) {
		return set_detail(detail, KV_ERR_PATH, "nvme.path is empty or too long");
	}
	if (mkdir(path, 0700) != 0 && errno != EEXIST) {
		return set_detail(detail, kvs_fs_status(errno), "cannot create nvme.path %s: %s", path,
				  strerror(errno));
	}
	nvme->dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (nvme->dir_fd < 0) {
		return set_detail(detail, kvs_fs_status(errno), "cannot open nvme.path %s: %s", path, strerror(errno));
	}
	/* A sticky bit does not help: a file that somebody has made before us stays his. */
	if (fstat(nvme->dir_fd, &st) != 0 || (st.st_mode & S_IWOTH)) {
		return set_detail(detail, KV_ERR_PATH,
				  "everybody may write to nvme.path %s; take that away (chmod o-w) and look who has",
				  path);
	}

	return KV_OK;
}

/* The limit is what the tier evicts at. Where the file system is smaller, it fills first and what else lies there
 * suffers. */
static void compare_size(const kvs_nvme_t *nvme)
{
	struct statvfs fs;
	uint64_t bytes = fstatvfs(nvme->dir_fd, &fs) == 0 ? (uint64_t)fs.f_blocks * fs.f_frsize : UINT64_MAX;

	if (nvme->config.limit_bytes > bytes) {
		kv_logf(nvme->env, KV_LOG_WARN, "nvme",
			"nvme.size is larger than its file system: limit_bytes %llu file_system_bytes %llu",
			(unsigned long long)nvme->config.limit_bytes, (unsigned long long)bytes);
	}
}

/* Look only: a foreign directory is not touched, not even by a lock. */
static kv_status_t inspect_superblock(kvs_nvme_t *nvme, int *p_new, int *p_stale, const detail_t *detail)
{
	uint32_t found;
	kv_status_t status = kvs_super_load(&nvme->super, nvme->dir_fd, &found, p_stale);

	*p_new = found == 0;
	if (found == 0) {
		if (holds_something(nvme->dir_fd)) {
			return set_detail(detail, KV_ERR_FOREIGN,
					  "%s is not empty and has no superblock of kvd; it was left as it is",
					  nvme->path);
		}
		return KV_OK;
	}
	if (status == KV_ERR_VERSION) {
		return set_detail(detail, KV_ERR_FOREIGN, "%s was made by another version of kvd; it was left as it is",
				  nvme->path);
	}
	if (status != KV_OK) {
		return set_detail(detail, status, "%s has no readable superblock (%s); it was left as it is",
				  nvme->path, kv_status_text(status));
	}

	return KV_OK;
}

kv_status_t kvs_nvme_check_format(const char *path, const kv_env_t *env, char *detail, size_t cap)
{
	const int dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	kv_status_t status = KV_OK;
	kvs_super_t super;
	uint32_t found = 0;
	int stale;

	if (dir_fd < 0) {
		return KV_OK;
	}
	if (kvs_super_init(&super, env) == KV_OK) {
		status = kvs_super_load(&super, dir_fd, &found, &stale);
		kvs_super_fini(&super);
	}
	close(dir_fd);
	if (found == 0 || (status != KV_ERR_VERSION && status != KV_ERR_FOREIGN)) {
		return KV_OK;
	}
	snprintf(detail, cap, "%s has no superblock that this version reads (%s)", path, kv_status_text(status));

	return KV_ERR_FOREIGN;
}

/* Is the process whose number is in the lock file gone? Then the kernel holds the lock until it has finished its
 * transfers. */
static int holder_is_gone(int fd)
{
	char text[16] = {0};
	long pid = pread(fd, text, sizeof text - 1u, 0) > 0 ? strtol(text, NULL, 10) : 0;

	return pid > 0 && kill((pid_t)pid, 0) != 0 && errno == ESRCH;
}

/* 0, or an errno. */
static int take_lock(const kvs_nvme_t *nvme)
{
	uint32_t tries = 0;
	char text[16];
	int n;

	while (flock(nvme->lock_fd, LOCK_EX | LOCK_NB) != 0) {
		int error = errno;
		uint32_t patience = holder_is_gone(nvme->lock_fd) ? LOCK_TRIES_GONE : LOCK_TRIES;

		if (error != EWOULDBLOCK && error != EINTR) {
			return error;
		}
		if (++tries > patience) {
			return EWOULDBLOCK;
		}
		usleep(LOCK_PAUSE_US);
	}
	/* In place, and the file never grows: a full file system has no block to give. */
	n = snprintf(text, sizeof text, "%-14d\n", (int)getpid());
	if (pwrite(nvme->lock_fd, text, (size_t)n, 0) != n) {
		return errno;
	}

	return 0;
}

static kv_status_t lock_directory(kvs_nvme_t *nvme, const detail_t *detail)
{
	int error;

	nvme->lock_fd = openat(nvme->dir_fd, "LOCK", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (nvme->lock_fd < 0) {
		return set_detail(detail, kvs_fs_status(errno), "cannot open nvme.path %s/LOCK: %s", nvme->path,
				  strerror(errno));
	}
	error = take_lock(nvme);
	if (error == EWOULDBLOCK) {
		return set_detail(detail, KV_ERR_LOCKED, "another daemon uses %s", nvme->path);
	}
	if (error != 0) {
		return set_detail(detail, kvs_fs_status(error), "cannot lock %s: %s", nvme->path, strerror(error));
	}

	return KV_OK;
}

static kv_status_t write_super(kvs_nvme_t *nvme)
{
	uint8_t *image;
	size_t len;
	kv_status_t status = kvs_super_encode(&nvme->super, &image, &len);
	int sync_failed = 0;

	if (status == KV_OK) {
		status = kvs_super_write(nvme->dir_fd, image, len, nvme->config.sync, &sync_failed);
		kv_free(nvme->env, image);
	}

	return status;
}

/* The lock is ours: read what is there now, or make it. When one of its two copies is old or damaged, both are written
 * anew; two good ones are left alone, so that a start needs nothing of a device that is full or read-only. */
static kv_status_t open_superblock(kvs_nvme_t *nvme, const detail_t *detail)
{
	kv_status_t status;
	int is_new;
	int stale;

	status = inspect_superblock(nvme, &is_new, &stale, detail);
	if (status != KV_OK) {
		return status;
	}
	if (is_new && nvme->config.sync && sync_parent(nvme->dir_fd) != 0) {
		return set_detail(detail, kvs_fs_status(errno), "cannot sync the directory above %s: %s", nvme->path,
				  strerror(errno));
	}
	if (is_new) {
		kv_random(nvme->env, &nvme->super.uuid, sizeof nvme->super.uuid);
	}
	status = is_new || stale ? write_super(nvme) : KV_OK;
	if (status != KV_OK) {
		return set_detail(detail, status, "cannot write the superblock of %s: %s", nvme->path,
				  kv_status_text(status));
	}
	for (uint32_t i = 0; i < nvme->super.class_count; i++) {
		kvs_class_init(nvme, i);
		if (nvme->classes[i].header_bytes == 0) {
			return set_detail(detail, KV_ERR_FOREIGN,
					  "the superblock of %s names a block layout this version cannot store",
					  nvme->path);
		}
	}

	return KV_OK;
}

/* What could not be had at this start may be had at a later one, and the tier is tried again: the detail says what it
 * was. */
static kv_status_t put_off(kv_status_t status)
{
	return status == KV_ERR_NOMEM || status == KV_ERR_NOSPC || status == KV_ERR_CORRUPT ? status : KV_ERR_IO;
}

static kv_status_t open_slots(kvs_nvme_t *nvme, const detail_t *detail)
{
	int made = mkdirat(nvme->dir_fd, "slots", 0700) == 0;
	kv_status_t status;

	if (!made && errno != EEXIST) {
		return set_detail(detail, kvs_fs_status(errno), "cannot create %s/slots: %s", nvme->path,
				  strerror(errno));
	}
	if (made && nvme->config.sync && fsync(nvme->dir_fd) != 0) {
		return set_detail(detail, kvs_fs_status(errno), "cannot sync %s: %s", nvme->path, strerror(errno));
	}
	nvme->slots_fd = openat(nvme->dir_fd, "slots", O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
	if (nvme->slots_fd < 0) {
		return set_detail(detail, kvs_fs_status(errno), "cannot open %s/slots: %s", nvme->path,
				  strerror(errno));
	}
	kvs_file_reserve_fd(nvme);
	status = kvs_file_scan(nvme);
	nvme->slots_dirty = 1; /* a daemon that was killed may have made a file and not synced its name */

	return status == KV_OK ? KV_OK
			       : set_detail(detail, put_off(status), "cannot read %s/slots: %s", nvme->path,
					    kv_status_text(status));
}

/* Where the rows are lost, headers say what there is. Rows that cannot be had now may be had later: the tier opens
 * then. */
static kv_status_t open_meta(kvs_nvme_t *nvme, const detail_t *detail)
{
	const kvs_metadb_config_t config = {.path = nvme->meta_path,
					    .dir_fd = nvme->dir_fd,
					    .allowance = nvme->meta_fixed,
					    .uuid = nvme->super.uuid,
					    .sync = nvme->config.sync,
					    .metrics = nvme->metrics};
	kv_status_t status = kvs_metadb_create(&config, nvme->env, &nvme->db);
	const int has_slots = nvme->slots > 0 || nvme->reserved_files > 0;
	int marked = 0;

	if (status != KV_OK) {
		return set_detail(detail, status,
				  status == KV_ERR_NOMEM
					  ? "out of memory"
					  : "the program kvd-meta is not beside this one; install it again");
	}
	status = kvs_metadb_open(nvme->db, has_slots, nvme->config.drop_unreadable, &marked);
	if (status != KV_OK) {
		kvs_rebuild_count_unread(nvme, status != KV_ERR_NOSPC);
		return set_detail(detail, status == KV_ERR_NOSPC ? status : KV_ERR_IO,
				  "cannot open the metadata of %s: %s", nvme->path,
				  status == KV_ERR_IO ? "the log says why" : kv_status_text(status));
	}
	if (!marked && has_slots) {
		kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
		nvme->rebuild = 1;
	} else if (!marked) {
		(void)kvs_metadb_mark(nvme->db);
	}
	nvme->meta_bytes = kvs_metadb_bytes(nvme->meta_path);

	return KV_OK;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static char *copy_text(const kv_env_t *env, const char *a, const char *b)
{
	size_t len = strlen(a) + strlen(b) + 1u;
	char *text = kv_alloc(env, len);

	if (text) {
		snprintf(text, len, "%s%s", a, b);
	}

	return text;
}

static kv_status_t alloc_tables(kvs_nvme_t *nvme)
{
	const kv_env_t *env = nvme->env;
	uint32_t cap = 256;

	while (cap < nvme->config.queue_depth * 4u) {
		cap *= 2u;
	}
	nvme->xfer_cap = cap;
	nvme->path = copy_text(env, nvme->config.path, "");
	nvme->meta_path = copy_text(env, nvme->config.path, "/meta");
	nvme->classes = kv_alloc(env, KVS_SUPER_MAX_CLASSES * sizeof *nvme->classes);
	nvme->files = kv_alloc(env, KVS_MAX_FILES * sizeof *nvme->files);
	nvme->xfers = kv_alloc(env, cap * sizeof *nvme->xfers);
	nvme->waiters = kv_alloc(env, KVS_MAX_WAITERS * sizeof *nvme->waiters);
	nvme->answering = kv_alloc(env, KVS_MAX_WAITERS * sizeof *nvme->answering);
	nvme->regions = kv_alloc(env, KVS_MAX_REGIONS * sizeof *nvme->regions);
	nvme->commit = kv_alloc(env, sizeof *nvme->commit);
	if (nvme->commit) {
		nvme->commit->change = kv_alloc(env, KVS_COMMIT_ROWS * sizeof *nvme->commit->change);
	}
	if (!nvme->path || !nvme->meta_path || !nvme->classes || !nvme->files || !nvme->xfers || !nvme->waiters ||
	    !nvme->answering || !nvme->regions || !nvme->commit || !nvme->commit->change) {
		return KV_ERR_NOMEM;
	}

	for (uint32_t i = 0; i < cap; i++) {
		nvme->xfers[i].next = i + 1u < cap ? i + 1u : KVS_NONE;
	}
	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		nvme->files[i].fd = -1;
	}

	return kvs_super_init(&nvme->super, env);
}

static void close_fd(int fd)
{
	if (fd >= 0) {
		close(fd);
	}
}

/* Takes apart whatever is there; threads have nothing in flight. */
static void destroy_tier(kvs_nvme_t *nvme)
{
	const kv_env_t *env = nvme->env;

	kvs_threads_stop(nvme);
	kvs_metadb_close(nvme->db);
	kvs_recovery_free(nvme);
	kv_free(env, nvme->recency.order);
	kv_free(env, nvme->own_reads);
	for (uint32_t i = 0; nvme->files && i < KVS_MAX_FILES; i++) {
		close_fd(nvme->files[i].fd);
		kv_free(env, nvme->files[i].slot);
	}
	close_fd(nvme->commit_wakeup.fd);
	close_fd(nvme->owner_wakeup.fd);
	close_fd(nvme->reserve_fd);
	close_fd(nvme->slots_fd);
	close_fd(nvme->lock_fd);
	close_fd(nvme->dir_fd);
	if (nvme->commit) {
		kv_free(env, nvme->commit->image);
		kv_free(env, nvme->commit->recency);
		kv_free(env, nvme->commit->change);
	}
	kv_free(env, nvme->commit);
	kvs_super_fini(&nvme->super);
	kv_free(env, nvme->regions);
	kv_free(env, nvme->answering);
	kv_free(env, nvme->waiters);
	kv_free(env, nvme->xfers);
	kv_free(env, nvme->recs);
	kv_free(env, nvme->files);
	kv_free(env, nvme->classes);
	kv_free(env, nvme->meta_path);
	kv_free(env, nvme->path);
	kv_free(env, nvme);
}

/* ---- the tier's own calls -------------------------------------------------------------------- */

static kv_status_t no_memory(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem)
{
	(void)tier;
	(void)loc;
	(void)p_mem;

	return KV_ERR_UNSUPPORTED;
}

static int get_event_fd(kvs_tier_t *tier)
{
	return kvs_nvme(tier)->owner_wakeup.fd;
}

static uint32_t count_in_flight(kvs_tier_t *tier)
{
	return kvs_nvme(tier)->in_flight + kvs_nvme(tier)->waiter_count;
}

static uint32_t poll_tier(kvs_tier_t *tier, uint32_t max)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	uint32_t ran;
	int more = 0;

	if (!atomic_exchange(&nvme->owner_wakeup.armed, 0)) {
		kvs_wakeup_clear(&nvme->owner_wakeup);
	}
	ran = kvs_transfers_finish(nvme, max);
	/* Finished transfers first: their slots may be in the round that begins here. Lost slots are reported after
	 * everything that can lose one. */
	ran += kvs_commit_step(nvme);
	kvs_retry_aside_slot(nvme);
	kvs_verify_some_blocks(nvme);
	kvs_report_lost_slots(nvme);
	kvs_rebalance_step(nvme);
	kvs_flush_submissions(nvme);
	kvs_nvme_update_gauges(nvme);

	/* Armed whenever the owner is elsewhere; what came in meanwhile is seen here. */
	kvs_wakeup_arm(&nvme->owner_wakeup);
	for (uint32_t i = 0; i < nvme->workers; i++) {
		more |= !kvs_queue_empty(&nvme->io[i].out);
	}
	if (more || atomic_load(&nvme->commit->state) == 2) {
		kvs_wakeup_signal(&nvme->owner_wakeup);
	}

	return ran;
}

/* The device holds transfers back past the deadline: it may still write into memory that threads and kernel know of, so
 * nothing is freed. */
static void abandon_transfers(kvs_nvme_t *nvme)
{
	kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "closed with %u transfers the device has not finished",
		nvme->in_flight);
	for (uint32_t i = 0; i < nvme->xfer_cap; i++) {
		if (nvme->xfers[i].busy && nvme->xfers[i].kind != KVS_UNREGISTER_FILE) {
			nvme->xfers[i].done(nvme->xfers[i].arg, KV_ERR_CLOSED);
		}
	}
}

/* Flushes and epochs that found no end: there was never memory for the superblock's image, or the device has not
 * answered. */
static void fail_waiters(const kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; i < nvme->waiter_count; i++) {
		nvme->waiters[i].done(nvme->waiters[i].arg, KV_ERR_CLOSED);
	}
}

static int is_quiet(const kvs_nvme_t *nvme)
{
	return nvme->in_flight == 0 && nvme->waiter_count == 0 && atomic_load(&nvme->commit->state) == 0 &&
	       (nvme->health >= KVS_HEALTH_READ_ONLY || nvme->commit_after_ns ||
		(nvme->dirty_in == nvme->dirty_out && !nvme->super_dirty && !kvs_mark_is_due(nvme) &&
		 nvme->recency.files == 0));
}

static void close_tier(kvs_tier_t *tier)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	uint64_t now = kv_now_ns(nvme->env), deadline = now + CLOSE_WAIT_NS, patience = now + CLOSE_STALL_NS;

	nvme->closing = 1;
	nvme->commit_after_ns = 0;
	/* What has been acknowledged as durable is on the device, and waits for nothing. So a device that no longer
	 * ends anything is not waited for to the deadline. */
	do {
		struct pollfd wait = {.fd = nvme->owner_wakeup.fd, .events = POLLIN};
		const uint64_t rounds = nvme->rounds;
		const uint32_t ran = poll_tier(tier, UINT32_MAX);

		if (is_quiet(nvme)) {
			break;
		}
		poll(&wait, 1, 10);
		now = kv_now_ns(nvme->env);
		patience = ran > 0 || nvme->rounds != rounds ? now + CLOSE_STALL_NS : patience;
	} while (now < deadline && now < patience);

	fail_waiters(nvme);
	if (nvme->in_flight > 0 || atomic_load(&nvme->commit->state) != 0) {
		abandon_transfers(nvme);
		return;
	}
	kv_metric_set(nvme->metrics, KV_M_DISK_BYTES, 0);
	destroy_tier(nvme);
}

static void set_watch(kvs_tier_t *tier, const kvs_watch_t *watch)
{
	kvs_nvme(tier)->watch = *watch;
}

static kv_status_t set_cap(kvs_tier_t *tier, const char *ns, uint64_t bytes)
{
	return kvs_caps_set(&kvs_nvme(tier)->caps, ns, bytes);
}

static const kvs_tier_ops_t nvme_ops = {
	.medium = "DISK",
	.rebalance = &kvs_nvme_rebalance_ops,
	.class_open = kvs_nvme_class_open,
	.class_close = kvs_nvme_class_close,
	.class_ns = kvs_nvme_class_ns,
	.class_bytes = kvs_nvme_class_bytes,
	.cap = set_cap,
	.alloc = kvs_nvme_alloc,
	.set_state = kvs_nvme_set_state,
	.free = kvs_nvme_free,
	.mem = no_memory,
	.store = kvs_nvme_store,
	.load = kvs_nvme_load,
	.flush = kvs_nvme_flush,
	.epoch_set = kvs_nvme_epoch_set,
	.epoch_get = kvs_nvme_epoch_get,
	.epoch_last = kvs_nvme_epoch_last,
	.epochs_drop = kvs_nvme_epochs_drop,
	.recover = kvs_nvme_recover,
	.usage = kvs_nvme_usage,
	.event_fd = get_event_fd,
	.poll = poll_tier,
	.in_flight = count_in_flight,
	.check = kvs_nvme_check,
	.close = close_tier,
	.state = kvs_nvme_state,
	.watch = set_watch,
	.readable = kvs_nvme_readable,
	.withdraw = kvs_nvme_withdraw,
	.touch = kvs_nvme_touch,
	.recover_use = kvs_nvme_recover_use,
};

static kv_status_t open_all(kvs_nvme_t *nvme, const detail_t *detail)
{
	kv_status_t status = enter_directory(nvme, detail);
	int is_new;
	int stale;

	if (status == KV_OK) {
		status = inspect_superblock(nvme, &is_new, &stale, detail);
	}
	if (status == KV_OK) {
		compare_size(nvme);
		status = lock_directory(nvme, detail);
	}
	if (status == KV_OK) {
		status = open_superblock(nvme, detail);
	}
	if (status == KV_OK) {
		status = open_slots(nvme, detail);
	}
	if (status == KV_OK) {
		status = open_meta(nvme, detail);
	}
	if (status == KV_OK) {
		status = kvs_threads_start(nvme);
		if (status != KV_OK) {
			set_detail(detail, status, "cannot start the disk tier's threads: %s", kv_status_text(status));
		}
	}
	if (status == KV_OK) {
		status = kvs_recovery_read(nvme);
		if (status != KV_OK) {
			const char *cause = kv_status_text(status);

			status = set_detail(detail, put_off(status), "cannot take in what %s holds: %s", nvme->path,
					    cause);
		}
	}

	return status;
}

static void set_defaults(kvs_nvme_t *nvme)
{
	kvs_nvme_config_t *c = &nvme->config;
	uint64_t meta = c->limit_bytes / 8u;

	c->queue_depth = c->queue_depth == 0 ? 32u : c->queue_depth > KVS_MAX_DEPTH ? KVS_MAX_DEPTH : c->queue_depth;
	c->flush_interval_ns = c->flush_interval_ns ? c->flush_interval_ns : FLUSH_DEFAULT_NS;
	nvme->direct = c->direct;
	nvme->meta_fixed = meta < META_MIN ? META_MIN : meta > META_MAX ? META_MAX : meta;
	nvme->dir_fd = nvme->lock_fd = nvme->slots_fd = nvme->reserve_fd = -1;
	nvme->owner_wakeup.fd = nvme->commit_wakeup.fd = -1;
	for (uint32_t i = 0; i < KVS_MAX_WORKERS; i++) {
		nvme->io[i].wakeup.fd = -1;
	}
	nvme->rec_free = KVS_NONE;
	nvme->dirty_head = nvme->dirty_tail = KV_SLOT_NONE;
	nvme->gen_base = 1;
}

kv_status_t kvs_nvme_open(const kvs_nvme_config_t *config, const kv_env_t *env, kvs_tier_t **p_tier, char *detail,
			  size_t cap)
{
	detail_t text = {detail, detail ? cap : 0};
	kvs_nvme_t *nvme;
	kv_status_t status;

	if (!config->path || !config->metrics || config->limit_bytes < MIN_LIMIT) {
		return set_detail(&text, KV_ERR_ARG, "the disk tier needs a path and a limit of at least %u MiB",
				  MIN_LIMIT >> 20);
	}
	nvme = kv_alloc(env, sizeof *nvme);
	if (!nvme) {
		return set_detail(&text, KV_ERR_NOMEM, "out of memory");
	}

	*nvme = (kvs_nvme_t){.base.ops = &nvme_ops, .env = env, .metrics = config->metrics, .config = *config};
	set_defaults(nvme);
	nvme->super.env = env;
	status = kvs_sigbus_install();
	if (status == KV_OK) {
		status = alloc_tables(nvme);
	}
	if (status != KV_OK) {
		set_detail(&text, status, "out of memory");
	} else {
		status = open_all(nvme, &text);
	}
	if (status != KV_OK) {
		destroy_tier(nvme);
		return status;
	}

	kv_metric_set(nvme->metrics, KV_M_DISK_LIMIT_BYTES, nvme->config.limit_bytes);
	kvs_nvme_update_gauges(nvme);
	*p_tier = &nvme->base;

	return KV_OK;
}
