/* The disk tier that comes late: see disk_attach.h. */
#include "io/sessions/disk_attach.h"

#include "io/base/gpu.h"
#include "io/members/member_table.h"
#include "io/members/slabs.h"
#include "io/members/writers.h"
#include "io/base/poller.h"
#include "base/process.h"

#include "kv/system.h"
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
#include <sys/timerfd.h>
#include <unistd.h>

#define WAIT_MIN_MS     500
#define WAIT_MAX_MS     60000
#define RECORD_LIMIT_NS UINT64_C(30000000000)
#define ROOT_BYTES      32
#define RECORD_LOOK_NS  UINT64_C(1000000)      /* epochs are being written */
#define RECORD_AGAIN_NS UINT64_C(100000000)    /* they could not be */
#define GIVE_UP_NS      UINT64_C(600000000000) /* headers that stay unreadable for so long are gone */

/* Noted resets on their way into the tier's superblock. */
typedef struct kvd_recording {
	uint32_t next;    /* number of the next note */
	uint32_t pending; /* epochs the tier has not answered for */
	kv_status_t failed;
} kvd_recording_t;

typedef enum kvd_disk_attach_state {
	ATTACH_RECORD_FIRST, /* resets noted while the tier was off become epochs */
	ATTACH_RECOVER,      /* blocks are taken in */
	ATTACH_RECORD_LAST   /* so do the resets made meanwhile */
} kvd_disk_attach_state_t;

typedef struct kvd_disk_attach {
	kvd_source_t timer; /* the loop looks at the attachment when it has run out */
	kvd_host_t *host;
	pthread_t thread;
	int running;
	int stop_fd;
	int wait_ms;            /* the thread's */
	atomic_int open;        /* the thread has done with `tier` */
	uint64_t unreadable_ns; /* the thread's: since then every try met unreadable headers; 0: the last one did not */
	kvd_disk_attach_state_t stage;
	kvd_recording_t recording;
	kvs_tier_t *tier; /* the thread's until `open`, then the loop's */
	char reason[192];
} kvd_disk_attach_t;

/* ---- resets noted while the tier was off ----------------------------------------------------- */

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

kv_status_t kvd_disk_attach_note_reset(void *ctx, const kvs_epoch_t *epoch)
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

static void count_recorded(void *arg, kv_status_t status)
{
	kvd_recording_t *recording = arg;

	recording->pending--;
	recording->failed = recording->failed == KV_OK ? status : recording->failed;
}

/* Begin the next epoch of a space. One the tier does not know has nothing there. */
static kv_status_t next_epoch(kvs_tier_t *tier, const uint8_t root[ROOT_BYTES], kvd_recording_t *recording)
{
	const kvs_epoch_t epoch = {root, "", "", kvs_epoch_last(tier) + 1};
	kv_status_t status;

	if (kvs_epoch_get(tier, root) == 0) {
		return KV_OK;
	}
	status = kvs_epoch_set(tier, &epoch, count_recorded, recording);
	recording->pending += status == KV_OK;

	return status;
}

/* Begin as many as the tier takes. KV_PENDING: it takes no more now. */
static kv_status_t begin_epochs(const kvd_host_t *host, kvs_tier_t *tier, kvd_recording_t *recording)
{
	char path[KV_OPTION_STRING_MAX + 16];
	int fd = open_notes(host, O_RDONLY, path);
	uint8_t root[ROOT_BYTES];
	kv_status_t status = KV_OK;

	if (fd < 0) {
		return errno == ENOENT ? KV_OK : KV_ERR_IO;
	}
	while (status == KV_OK) {
		ssize_t n = pread(fd, root, sizeof root, (off_t)recording->next * ROOT_BYTES);

		if (n != (ssize_t)sizeof root) { /* the end, or a note that was cut off and never answered */
			status = n < 0 ? KV_ERR_IO : KV_OK;
			break;
		}
		status = next_epoch(tier, root, recording);
		recording->next += status == KV_OK;
	}
	close(fd);

	return status == KV_ERR_BUSY ? KV_PENDING : status;
}

/* Noted resets become epochs on disk. KV_PENDING: call it again. KV_OK: they are, and no note has come since; the next
 * call begins anew, as after a failure. */
static kv_status_t record_resets(const kvd_host_t *host, kvs_tier_t *tier, kvd_recording_t *recording)
{
	kvd_recording_t end;
	kv_status_t status;

	(void)kvs_poll(tier, 64);
	status = recording->failed == KV_OK ? begin_epochs(host, tier, recording) : recording->failed;
	if (status != KV_PENDING) {
		recording->failed = status;
	}
	if (status == KV_PENDING || recording->pending > 0) {
		return KV_PENDING;
	}
	end = *recording;
	*recording = (kvd_recording_t){0};
	if (end.failed == KV_OK && end.next > 0) {
		kv_log(KV_LOG_INFO, "io", "resets made while the disk tier was off are on disk now: spaces %u",
		       end.next);
	}

	return end.failed;
}

/* The tier has them. A file that stays costs blocks of these spaces at the next start, and nothing else. */
static void forget_resets(const kvd_host_t *host)
{
	char path[KV_OPTION_STRING_MAX + 16];

	snprintf(path, sizeof path, "%s/resets", host->options->run_dir);
	(void)unlink(path);
}

/* ---- opening --------------------------------------------------------------------------------- */

int kvd_disk_attach_may_retry(kv_status_t status)
{
	return status == KV_ERR_IO || status == KV_ERR_NOSPC || status == KV_ERR_BUSY || status == KV_ERR_TIER_OFF ||
	       status == KV_ERR_TIMEOUT;
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
					  .unsynced = &host->disk_unsynced,
					  .metrics = &host->metrics};

	status = kvs_nvme_open(&config, host->env, p_tier, detail, cap);
	*p_since = unreadable == 0 ? 0 : *p_since ? *p_since : now;

	return status;
}

kv_status_t kvd_disk_attach_open(kvd_host_t *host, char *detail, size_t cap)
{
	uint64_t since = 0, until;
	kvd_recording_t recording = {0};
	kv_status_t status = open_tier(host, &since, &host->disk, detail, cap);

	if (status == KV_OK) {
		until = kv_now_ns(host->env) + RECORD_LIMIT_NS;
		while ((status = record_resets(host, host->disk, &recording)) == KV_PENDING) {
			struct pollfd wait = {.fd = kvs_event_fd(host->disk), .events = POLLIN};

			(void)poll(&wait, 1, 100);
			if (kv_now_ns(host->env) >= until) {
				status = KV_ERR_TIMEOUT;
				break;
			}
		}
		if (status != KV_OK) {
			snprintf(detail, cap, "resets cannot be recorded in %s: %s", host->options->nvme_path,
				 kv_status_text(status));
			kvs_close(host->disk);
			host->disk = NULL;
		}
	}

	return status;
}

/* The loop looks at the attachment then, and in every iteration from then on. 0: no more. */
static void set_timer(const kvd_disk_attach_t *attach, uint64_t in_ns)
{
	const struct itimerspec when = {
		.it_value = {.tv_sec = (time_t)(in_ns / 1000000000u), .tv_nsec = (long)(in_ns % 1000000000u)}};

	(void)timerfd_settime(attach->timer.fd, 0, &when, NULL);
}

/* Tries until the tier opens, then stays: the tier's metadata process lives no longer than the thread that has started
 * it. */
static void *attach_main(void *arg)
{
	kvd_disk_attach_t *attach = arg;
	struct pollfd stop = {.fd = attach->stop_fd, .events = POLLIN};
	char detail[256];

	(void)prctl(PR_SET_NAME, "kvd-attach", 0, 0, 0);
	while (poll(&stop, 1, attach->wait_ms) <= 0) {
		kv_status_t status =
			open_tier(attach->host, &attach->unreadable_ns, &attach->tier, detail, sizeof detail);

		if (status == KV_OK) {
			atomic_store(&attach->open, 1);
			set_timer(attach, 1);
			while (poll(&stop, 1, -1) <= 0) {
			}
			break;
		}
		attach->wait_ms = attach->wait_ms * 2 > WAIT_MAX_MS ? WAIT_MAX_MS : attach->wait_ms * 2;
		kv_log(KV_LOG_WARN, "io", "the disk tier is still off: %s; next try in %d ms", detail, attach->wait_ms);
	}

	return NULL;
}

static kv_status_t start_thread(kvd_disk_attach_t *attach)
{
	sigset_t all, before;
	int result;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	result = pthread_create(&attach->thread, NULL, attach_main, attach);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	attach->running = result == 0;

	return result == 0 ? KV_OK : kv_refused(attach->host->env, "io", "pthread_create", result);
}

static void stop_thread(kvd_disk_attach_t *attach)
{
	uint64_t one = 1;

	if (attach->running) {
		(void)!write(attach->stop_fd, &one, sizeof one);
		pthread_join(attach->thread, NULL);
		(void)!read(attach->stop_fd, &one, sizeof one);
		attach->running = 0;
	}
}

/* ---- the core loop --------------------------------------------------------------------------- */

static void show_state(kvd_host_t *host, kvs_health_t health)
{
	kv_metric_set(&host->metrics, KV_M_DISK_STATE, health);
	kv_metric_set(&host->metrics, KV_M_DISK_OFF, health == KVS_HEALTH_OFF);
}

static void finish_attach(kvd_host_t *host, kvd_disk_attach_t *attach)
{
	uint32_t slabs = kvd_slabs_count_held(host) - host->own_slabs;

	show_state(host, KVS_HEALTH_OK); /* from here on the tier says it */
	kvd_core_attach(host->core);
	host->disk = attach->tier;
	host->world.disk = attach->tier;
	host->own_fds = kvd_process_count_fds() - host->session_count - kvd_members_count_fds(host) - 2 * slabs -
			kvd_gpu_count_fds(host) - kvd_writers_count_fds(host) - kvd_slabs_count_files(host);
	if (kvd_poller_watch_tier(host, &host->disk_ready, host->disk) != KV_OK) {
		kv_log(KV_LOG_WARN, "io", "the loop is not woken by the disk tier: it is looked at in every turn only");
	}
	attach->reason[0] = '\0';
	kv_log(KV_LOG_INFO, "io", "the disk tier is attached");
}

/* KV_PENDING: look again after *p_wait_ns. In the last iteration no request comes between the epochs of resets made
 * meanwhile and the blocks. */
static kv_status_t recover_step(kvd_host_t *host, kvd_disk_attach_t *attach, uint64_t *p_wait_ns)
{
	kv_status_t status;

	*p_wait_ns = RECORD_LOOK_NS;
	if (attach->stage == ATTACH_RECOVER) {
		status = kvd_core_take_in(host->core, attach->tier);
		attach->stage = status == KV_OK ? ATTACH_RECORD_LAST : attach->stage;
		*p_wait_ns = 1;
		return status == KV_OK ? KV_PENDING : status;
	}
	status = record_resets(host, attach->tier, &attach->recording);
	if (status == KV_OK) {
		forget_resets(host);
		if (attach->stage == ATTACH_RECORD_FIRST) {
			attach->stage = ATTACH_RECOVER;
			*p_wait_ns = 1;
			return KV_PENDING;
		}
		finish_attach(host, attach);
	} else if (status != KV_PENDING && attach->stage == ATTACH_RECORD_LAST) {
		snprintf(attach->reason, sizeof attach->reason, "resets made while it was off cannot be recorded: %s",
			 kv_status_text(status));
		*p_wait_ns = RECORD_AGAIN_NS;
		return KV_PENDING;
	}

	return status;
}

static int timer_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	kvd_disk_attach_t *attach = (kvd_disk_attach_t *)source;
	kv_status_t status = KV_PENDING;
	uint64_t wait_ns = 1;

	(void)events;
	if (atomic_load(&attach->open)) {
		status = recover_step(host, attach, &wait_ns);
		kvd_commit_events(host);
		if (!host->disk) {
			show_state(host, KVS_HEALTH_OFF); /* whatever the tier says of itself */
		}
	}
	if (status == KV_PENDING || status == KV_OK) {
		set_timer(attach, status == KV_OK ? 0 : wait_ns);
		return 0;
	}
	set_timer(attach, 0);
	kv_log(KV_LOG_ERROR, "io", "the disk tier was opened and could not be attached: %s", kv_status_text(status));
	kvs_close(attach->tier);
	attach->tier = NULL;
	attach->stage = ATTACH_RECORD_FIRST;
	stop_thread(attach);
	atomic_store(&attach->open, 0);
	if (start_thread(attach) != KV_OK) {
		kv_log(KV_LOG_ERROR, "io", "the disk tier is not tried again: no thread");
	}

	return 0;
}

kv_status_t kvd_disk_attach_begin(kvd_host_t *host, const char *reason)
{
	kvd_disk_attach_t *attach = calloc(1, sizeof *attach);

	if (!attach) {
		return KV_ERR_NOMEM;
	}
	host->attach = attach;
	attach->host = host;
	attach->wait_ms = WAIT_MIN_MS;
	attach->timer =
		(kvd_source_t){.ready = timer_ready, .fd = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)};
	attach->stop_fd = -1;
	if (attach->timer.fd < 0) {
		return kv_refused(host->env, "io", "timerfd_create", errno);
	}
	attach->stop_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (attach->stop_fd < 0) {
		return kv_refused(host->env, "io", "eventfd", errno);
	}
	snprintf(attach->reason, sizeof attach->reason, "%s", reason);
	show_state(host, KVS_HEALTH_OFF);
	kv_log(KV_LOG_ERROR, "io", "the disk tier is off and is tried again: %s", reason);

	return KV_OK;
}

kv_status_t kvd_disk_attach_watch(kvd_host_t *host)
{
	kv_status_t status;

	if (!host->attach) {
		if (host->disk) {
			forget_resets(host);
		}
		return KV_OK;
	}
	status = kvd_poller_add(host, &host->attach->timer, EPOLLIN);

	return status == KV_OK ? start_thread(host->attach) : status;
}

void kvd_disk_attach_end(kvd_host_t *host)
{
	kvd_disk_attach_t *attach = host->attach;

	if (!attach) {
		return;
	}
	stop_thread(attach);
	if (attach->tier && attach->reason[0]) {
		kvs_close(attach->tier); /* opened, and its blocks not taken in */
	}
	if (attach->timer.fd >= 0) {
		close(attach->timer.fd);
	}
	if (attach->stop_fd >= 0) {
		close(attach->stop_fd);
	}
	free(attach);
	host->attach = NULL;
}

const char *kvd_disk_attach_reason(const kvd_host_t *host)
{
	return host->attach && host->attach->reason[0] ? host->attach->reason : NULL;
}
