/* The disk tier's threads: started with all signals blocked, stopped when nothing is in flight. */
#include "threads.h"

#include "kv/system.h"
#include "nvme/commit.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define START_WAIT_MS 5000

/* 0 or an errno. Signals are handled by the owner; kvs_sigbus_copy() and its like unblock SIGBUS in the thread that
 * needs it. */
static int start_thread(pthread_t *p_thread, void *(*main)(void *), void *arg)
{
	sigset_t all;
	sigset_t before;
	int result;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	result = pthread_create(p_thread, NULL, main, arg);
	pthread_sigmask(SIG_SETMASK, &before, NULL);

	return result;
}

static void stop_io(kvs_io_t *io)
{
	if (io->started) {
		atomic_store(&io->stop, 1);
		kvs_wakeup_signal(&io->wakeup);
		pthread_join(io->thread, NULL);
		io->started = 0;
	}
}

static kv_status_t io_init(kvs_nvme_t *nvme, kvs_io_t *io)
{
	io->nvme = nvme;
	if (!kvs_queue_init(&io->in, nvme->env, nvme->xfer_cap) ||
	    !kvs_queue_init(&io->out, nvme->env, nvme->xfer_cap)) {
		return KV_ERR_NOMEM;
	}
	io->wakeup.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);

	return io->wakeup.fd >= 0 ? KV_OK : kv_refused(nvme->env, "nvme", "eventfd", errno);
}

static void io_fini(kvs_nvme_t *nvme, kvs_io_t *io)
{
	stop_io(io);
	kv_free(nvme->env, io->in.item);
	kv_free(nvme->env, io->out.item);
	free(io->ring);
	if (io->wakeup.fd >= 0) {
		close(io->wakeup.fd);
	}
}

/* 1: the ring thread runs. Otherwise *p_why says why there is none. */
static int start_uring(kvs_nvme_t *nvme, const char **p_why, char *text, size_t cap)
{
	kvs_io_t *io = &nvme->io[0];
	struct pollfd wait = {.fd = nvme->owner_wakeup.fd, .events = POLLIN};
	int ready, error;

	*p_why = "the configuration asks for threads";
	if (nvme->config.engine == KVS_IO_THREADS) {
		return 0;
	}
	kvs_wakeup_arm(&nvme->owner_wakeup);
	error = start_thread(&io->thread, kvs_uring_main, io);
	if (error) {
		*p_why = kv_refused_text("pthread_create", error, text, cap);
		return 0;
	}
	io->started = 1;
	poll(&wait, 1, START_WAIT_MS);
	kvs_wakeup_clear(&nvme->owner_wakeup);
	ready = atomic_load(&io->ready);
	if (ready == 1) {
		nvme->workers = 1;
		nvme->uring = 1;
		return 1;
	}
	*p_why = ready < 0 ? kv_refused_text("io_uring_setup", -ready, text, cap) : "it did not start in time";
	stop_io(io);
	atomic_store(&io->stop, 0);

	return 0;
}

static kv_status_t start_workers(kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; i < KVS_MAX_WORKERS; i++) {
		kvs_io_t *io = &nvme->io[i];
		kv_status_t status = i > 0 ? io_init(nvme, io) : KV_OK;
		int error;

		if (status != KV_OK) {
			return status;
		}
		if (posix_memalign(&io->ring, KVS_PAGE, KVS_SLOTHDR_MAX) != 0) {
			return KV_ERR_NOMEM;
		}
		error = start_thread(&io->thread, kvs_worker_main, io);
		if (error) {
			return kv_refused(nvme->env, "nvme", "pthread_create", error);
		}
		io->started = 1;
		nvme->workers = i + 1u;
	}

	return KV_OK;
}

kv_status_t kvs_threads_start(kvs_nvme_t *nvme)
{
	kv_status_t status = io_init(nvme, &nvme->io[0]);
	char text[KV_REFUSED_TEXT];
	const char *why;
	int error;

	nvme->owner_wakeup.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	nvme->commit_wakeup.fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (status == KV_OK && (nvme->owner_wakeup.fd < 0 || nvme->commit_wakeup.fd < 0)) {
		status = kv_refused(nvme->env, "nvme", "eventfd", errno);
	}
	if (status != KV_OK) {
		return status;
	}
	if (!start_uring(nvme, &why, text, sizeof text)) {
		kv_metric_set(nvme->metrics, KV_M_DISK_FALLBACK, 1);
		kv_logf(nvme->env, KV_LOG_WARN, "nvme",
			"io_uring is not used (%s); plain reads and writes in %u threads instead", why,
			KVS_MAX_WORKERS);
		status = start_workers(nvme);
	}
	if (status != KV_OK) {
		return status;
	}
	error = start_thread(&nvme->commit_thread, kvs_commit_main, nvme);
	if (error) {
		return kv_refused(nvme->env, "nvme", "pthread_create", error);
	}
	nvme->commit_started = 1;
	kvs_wakeup_arm(&nvme->owner_wakeup);

	return KV_OK;
}

void kvs_threads_stop(kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; i < KVS_MAX_WORKERS; i++) {
		io_fini(nvme, &nvme->io[i]);
	}
	if (nvme->commit_started) {
		atomic_store(&nvme->commit_stop, 1);
		kvs_wakeup_signal(&nvme->commit_wakeup);
		pthread_join(nvme->commit_thread, NULL);
		nvme->commit_started = 0;
	}
}
