/* The disk tier that comes late: see attach.h. */
#include "io/attach.h"

#include "kvs/nvme.h"
#include "kvs/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <unistd.h>

#define WAIT_MIN_MS    500
#define WAIT_MAX_MS    60000
#define EPOCH_LIMIT_NS UINT64_C(30000000000)
#define ROOT_BYTES     32
#define NOTES_AGAIN_NS UINT64_C(100000000)
#define GIVE_UP_NS     UINT64_C(600000000000) /* headers that stay unreadable for so long are gone */

typedef struct kvd_attach {
	kvd_source_t opened; /* readable: `tier` is there */
	kvd_host_t *host;
	pthread_t thread;
	int running;
	int stop_fd;
	int wait_ms;     /* the thread's */
	atomic_int open; /* the thread has done with `tier` */
	uint64_t
		unreadable_ns; /* the thread's: since then every try has failed for headers that cannot be read; 0: the last one has not */
	int taking;        /* 1: blocks are taken in; 2: all are, and resets made meanwhile are owed */
	uint64_t again_ns; /* these have failed */
	kvs_tier_t *tier;  /* the thread's until `opened` is readable, then the loop's */
	char reason[192];
} kvd_attach_t;

/* ---- resets noted while the tier was off ------------------------------------------------------------------------------------ */

static int open_notes(const kvd_host_t *host, int flags, char path[KV_OPTION_STRING_MAX + 16])
{
	snprintf(path, KV_OPTION_STRING_MAX + 16, "%s/resets", host->options->run_dir);

	return open(path, flags | O_CLOEXEC | O_NOFOLLOW, 0600);
}

/* The place of a root in the notes, or the end of the last whole one. */
static off_t find_note(int fd, const uint8_t root[ROOT_BYTES], int *p_found)
{
	uint8_t noted[ROOT_BYTES];
	off_t at = 0;

	*p_found = 0;
	while (pread(fd, noted, sizeof noted, at) == (ssize_t)sizeof noted) {
		if (memcmp(noted, root, sizeof noted) == 0) {
			*p_found = 1;
			break;
		}
		at += ROOT_BYTES;
	}

	return at;
}

kv_status_t kvd_attach_note_reset(void *ctx, const kvs_epoch_t *epoch)
{
	char path[KV_OPTION_STRING_MAX + 16];
	int fd = open_notes(ctx, O_RDWR | O_CREAT, path);
	int found = 0, ok;
	off_t at;

	if (fd < 0) {
		kv_log(KV_LOG_ERROR, "io", "a reset is refused, it cannot be noted: error \"%s\" path %s",
		       strerror(errno), path);
		return KV_ERR_TIER_OFF;
	}
	at = find_note(fd, epoch->root, &found);
	ok = found || (pwrite(fd, epoch->root, ROOT_BYTES, at) == ROOT_BYTES && fdatasync(fd) == 0);
	if (!ok) {
		kv_log(KV_LOG_ERROR, "io", "a reset is refused, it cannot be noted: error \"%s\" path %s",
		       strerror(errno), path);
	}
	close(fd);

	return ok ? KV_OK : KV_ERR_TIER_OFF;
}

typedef struct kvd_recorded {
	int is_done;
	kv_status_t status;
} kvd_recorded_t;

static void recorded(void *arg, kv_status_t status)
{
	*(kvd_recorded_t *)arg = (kvd_recorded_t){1, status};
}

/* The next epoch of a space, on disk when this returns. */
static kv_status_t next_epoch(const kvd_host_t *host, kvs_tier_t *tier, const uint8_t root[ROOT_BYTES])
{
	const uint64_t until = kv_now_ns(host->env) + EPOCH_LIMIT_NS;
	uint64_t known = kvs_epoch_get(tier, root);
	/* Static: an answer that comes after the limit finds it. */
	static kvd_recorded_t answer;
	kv_status_t status;

	if (known == 0) {
		return KV_OK; /* the tier has nothing of it */
	}
	answer.is_done = 0;
	status = kvs_epoch_set(tier, &(kvs_epoch_t){root, "", "", known + 1}, recorded, &answer);
	while (status == KV_OK && !answer.is_done) {
		struct pollfd wait = {.fd = kvs_event_fd(tier), .events = POLLIN};

		(void)kvs_poll(tier, 64);
		if (!answer.is_done) {
			(void)poll(&wait, 1, 100);
			status = kv_now_ns(host->env) < until ? KV_OK : KV_ERR_TIMEOUT;
		}
	}

	return status == KV_OK ? answer.status : status;
}

static kv_status_t replay_resets(const kvd_host_t *host, kvs_tier_t *tier)
{
	char path[KV_OPTION_STRING_MAX + 16];
	int fd = open_notes(host, O_RDONLY, path);
	uint8_t root[ROOT_BYTES];
	kv_status_t status = KV_OK;
	uint32_t count = 0;

	if (fd < 0) {
		return errno == ENOENT ? KV_OK : KV_ERR_IO;
	}
	while (status == KV_OK && pread(fd, root, sizeof root, (off_t)count * ROOT_BYTES) == (ssize_t)sizeof root) {
		status = next_epoch(host, tier, root);
		count++;
	}
	close(fd);
	if (status == KV_OK) {
		kv_log(KV_LOG_INFO, "io", "resets made while the disk tier was off are on disk now: spaces %u", count);
	}

	return status;
}

/* The tier has them. A file that stays costs blocks of these spaces at the next start, and nothing else. */
static void forget_resets(const kvd_host_t *host)
{
	char path[KV_OPTION_STRING_MAX + 16];

	snprintf(path, sizeof path, "%s/resets", host->options->run_dir);
	(void)unlink(path);
}

/* ---- opening ---------------------------------------------------------------------------------------------------------------- */

int kvd_attach_may_pass(kv_status_t status)
{
	return status == KV_ERR_IO || status == KV_ERR_NOSPC || status == KV_ERR_TIER_OFF || status == KV_ERR_TIMEOUT;
}

static kv_status_t open_tier(kvd_host_t *host, uint64_t *p_since, kvs_tier_t **p_tier, char *detail, size_t cap)
{
	uint64_t unreadable = 0, now = kv_now_ns(host->env);
	kv_status_t status;
	const kvd_options_t *options = host->options;
	const kvs_nvme_config_t config = {.path = options->nvme_path,
					  .limit_bytes = options->nvme_size,
					  .file_bytes = options->nvme_file_size,
					  .queue_depth = (uint32_t)options->nvme_queue_depth,
					  .engine = (kvs_io_engine_t)options->nvme_io_engine,
					  .direct = options->nvme_direct,
					  .sync = options->nvme_sync,
					  .flush_interval_ns = options->nvme_flush_interval,
					  .incarnation = host->incarnation,
					  .drop_unreadable = *p_since && now - *p_since >= GIVE_UP_NS,
					  .unreadable = &unreadable,
					  .metrics = &host->metrics};

	status = kvs_nvme_open(&config, host->env, p_tier, detail, cap);
	*p_since = unreadable == 0 ? 0 : *p_since ? *p_since : now;

	return status;
}

kv_status_t kvd_attach_open(kvd_host_t *host, char *detail, size_t cap)
{
	uint64_t since = 0;
	kv_status_t status = open_tier(host, &since, &host->disk, detail, cap);

	if (status == KV_OK) {
		status = replay_resets(host, host->disk);
		if (status != KV_OK) {
			snprintf(detail, cap, "resets cannot be recorded in %s: %s", host->options->nvme_path,
				 kv_status_text(status));
			kvs_close(host->disk);
			host->disk = NULL;
		}
	}

	return status;
}

/* Tries until the tier opens, then stays: the tier's metadata process lives no longer than the thread that has started it. */
static void *try_main(void *arg)
{
	kvd_attach_t *attach = arg;
	struct pollfd stop = {.fd = attach->stop_fd, .events = POLLIN};
	char detail[256];
	const uint64_t one = 1;

	(void)prctl(PR_SET_NAME, "kvd-attach", 0, 0, 0);
	while (poll(&stop, 1, attach->wait_ms) <= 0) {
		kv_status_t status =
			open_tier(attach->host, &attach->unreadable_ns, &attach->tier, detail, sizeof detail);

		if (status == KV_OK) {
			atomic_store(&attach->open, 1);
			(void)!write(attach->opened.fd, &one, sizeof one);
			while (poll(&stop, 1, -1) <= 0) {
			}
			break;
		}
		attach->wait_ms = attach->wait_ms * 2 > WAIT_MAX_MS ? WAIT_MAX_MS : attach->wait_ms * 2;
		kv_log(KV_LOG_WARN, "io", "the disk tier is still off: %s; next try in %d ms", detail, attach->wait_ms);
	}

	return NULL;
}

static kv_status_t start_thread(kvd_attach_t *attach)
{
	sigset_t all, before;
	int result;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	result = pthread_create(&attach->thread, NULL, try_main, attach);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	attach->running = result == 0;

	return result == 0 ? KV_OK : KV_ERR_LIMIT;
}

static void stop_thread(kvd_attach_t *attach)
{
	uint64_t one = 1;

	if (attach->running) {
		(void)!write(attach->stop_fd, &one, sizeof one);
		pthread_join(attach->thread, NULL);
		(void)!read(attach->stop_fd, &one, sizeof one);
		attach->running = 0;
	}
}

/* ---- the core loop ------------------------------------------------------------------------------------------------------------- */

static void show_state(kvd_host_t *host, kvs_health_t health)
{
	kv_metric_set(&host->metrics, KV_M_DISK_STATE, health);
	kv_metric_set(&host->metrics, KV_M_DISK_OFF, health == KVS_HEALTH_OFF);
}

/* Resets noted before are on disk now, and new ones are noted anew. */
static kv_status_t flush_notes(kvd_host_t *host, kvs_tier_t *tier)
{
	kv_status_t status = replay_resets(host, tier);

	if (status == KV_OK) {
		forget_resets(host);
	}

	return status;
}

static void attached(kvd_host_t *host, kvd_attach_t *attach)
{
	uint32_t slabs = kvs_pool_slabs_held(host->cpu) - host->own_slabs;

	show_state(host, KVS_HEALTH_OK); /* from here on the tier says it */
	kvd_core_attach(host->core);
	host->disk = attach->tier;
	host->world.disk = attach->tier;
	host->own_fds = kvd_count_fds() - host->session_count - kvd_entries_fds(host) - 2 * slabs;
	if (kvd_loop_disk(host) != KV_OK) {
		kv_log(KV_LOG_WARN, "io", "the loop is not woken by the disk tier: it is looked at in every turn only");
	}
	attach->reason[0] = '\0';
	kv_log(KV_LOG_INFO, "io", "the disk tier is attached");
}

/* A piece a turn; KV_PENDING: there is more to do. In the last turn no request comes between the epochs of resets made meanwhile and the blocks. */
static kv_status_t take_in(kvd_host_t *host, kvd_attach_t *attach)
{
	kv_status_t status = KV_OK;

	if (attach->taking == 0) {
		status = flush_notes(host, attach->tier);
		attach->taking = status == KV_OK;
	}
	if (attach->taking == 1) {
		status = kvd_core_take_in(host->core, attach->tier);
		attach->taking = status == KV_OK ? 2 : status == KV_PENDING ? 1 : 0;
	}
	if (attach->taking == 2 && kv_now_ns(host->env) >= attach->again_ns) {
		status = flush_notes(host, attach->tier);
		attach->again_ns = kv_now_ns(host->env) + NOTES_AGAIN_NS;
		if (status == KV_OK) {
			attached(host, attach);
		}
	}

	return attach->taking == 2 && attach->reason[0] ? KV_PENDING : status;
}

static void tier_opened(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	kvd_attach_t *attach = (kvd_attach_t *)source;
	uint64_t count;
	kv_status_t status;

	(void)events;
	status = host->disk || !atomic_load(&attach->open) ? KV_OK : take_in(host, attach);
	kvd_world_commit(host);
	if (status == KV_PENDING || read(source->fd, &count, sizeof count) != (ssize_t)sizeof count ||
	    status == KV_OK) {
		return; /* while it is readable the next turn comes here again */
	}
	kv_log(KV_LOG_ERROR, "io", "the disk tier was opened and could not be attached: %s", kv_status_text(status));
	kvs_close(attach->tier);
	attach->tier = NULL;
	stop_thread(attach);
	atomic_store(&attach->open, 0);
	if (start_thread(attach) != KV_OK) {
		kv_log(KV_LOG_ERROR, "io", "the disk tier is not tried again: no thread");
	}
}

kv_status_t kvd_attach_begin(kvd_host_t *host, const char *reason)
{
	kvd_attach_t *attach = calloc(1, sizeof *attach);

	if (!attach) {
		return KV_ERR_NOMEM;
	}
	host->attach = attach;
	attach->host = host;
	attach->wait_ms = WAIT_MIN_MS;
	attach->opened = (kvd_source_t){tier_opened, eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
	attach->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	snprintf(attach->reason, sizeof attach->reason, "%s", reason);
	show_state(host, KVS_HEALTH_OFF);
	kv_log(KV_LOG_ERROR, "io", "the disk tier is off and is tried again: %s", reason);

	return attach->opened.fd >= 0 && attach->stop_fd >= 0 ? KV_OK : KV_ERR_LIMIT;
}

kv_status_t kvd_attach_watch(kvd_host_t *host)
{
	kv_status_t status;

	if (!host->attach) {
		if (host->disk) {
			forget_resets(host);
		}
		return KV_OK;
	}
	status = kvd_loop_add(host, &host->attach->opened, EPOLLIN);

	return status == KV_OK ? start_thread(host->attach) : status;
}

void kvd_attach_end(kvd_host_t *host)
{
	kvd_attach_t *attach = host->attach;

	if (!attach) {
		return;
	}
	stop_thread(attach);
	if (attach->tier && attach->reason[0]) {
		kvs_close(attach->tier); /* opened, and not taken in any more */
	}
	if (attach->opened.fd >= 0) {
		close(attach->opened.fd);
	}
	if (attach->stop_fd >= 0) {
		close(attach->stop_fd);
	}
	free(attach);
	host->attach = NULL;
}

const char *kvd_attach_reason(const kvd_host_t *host)
{
	return host->attach && host->attach->reason[0] ? host->attach->reason : NULL;
}
