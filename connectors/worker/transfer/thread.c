/* The transfer thread: it owns the attachment and runs the jobs, loads first. With nothing to do it spins for a moment,
 * then sleeps. */
#include "worker/transfer/thread.h"
#include "worker/cuda/batch.h"
#include "worker/cuda/device.h"
#include "worker/cuda/load.h"
#include "worker/host/copy_threads.h"
#include "worker/jobs/load.h"
#include "worker/prefault.h"
#include "worker/self_test.h"
#include "worker/submit.h"
#include "worker/transfer/load.h"
#include "worker/transfer/save.h"
#include "worker/transfer/spaces.h"

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS    UINT64_C(50000)
#define POLL_NS    UINT64_C(100000)   /* the socket is read this often while there is work */
#define NAP_NS     UINT64_C(50000)    /* for an event without a message: poll soon at first, */
#define NAP_MAX_NS UINT64_C(1000000)  /* then less often */
#define COPY_NS    UINT64_C(100000)   /* the device copies: its queue must not run empty */
#define OPEN_NS    UINT64_C(5000000)  /* jobs wait for the daemon */
#define AWAY_NS    UINT64_C(20000000) /* no daemon: look for one */
#define IDLE_NS    UINT64_C(100000000)

/* ---- one round ------------------------------------------------------------------------------- */

static void take_jobs(kvx_worker_t *worker)
{
	kvx_wjob_t *next;

	for (kvx_wjob_t *job = kvx_wjobs_take(worker); job; job = next) {
		next = job->next_run;
		if (job->kind == KVX_WJOB_ADAPTER) {
			kvx_wspace_add_adapter(worker, (kvx_wadapter_t *)job);
			free(job);
			continue;
		}
		job->next_run = NULL;
		*worker->run_end = job;
		worker->run_end = &job->next_run;
	}
}

/* Advance the jobs of a kind; completed ones belong to the engine's thread again. All saves are imported; the oldest
 * that can is copied, none unless `copy`: while loads are copied. Returns how many blocks of saves were copied. */
static uint32_t step_jobs(kvx_worker_t *worker, kvx_wjob_kind_t kind, uint64_t now, int copy)
{
	kvx_wjob_t **link = &worker->run;
	uint32_t moved = 0;

	while (*link) {
		kvx_wjob_t *job = *link;
		kvx_wjob_t *next = job->next_run;
		uint32_t *p_moved = copy && moved == 0 ? &moved : NULL;
		int completed = 0;

		if (job->kind == kind) {
			completed = kind == KVX_WJOB_LOAD
					    ? kvx_load_transfer_step(worker, (kvx_wload_t *)job, now)
					    : kvx_save_transfer_step(worker, (kvx_wsave_t *)job, now, p_moved);
		}
		if (completed) {
			*link = next;
		} else {
			link = &job->next_run;
		}
	}
	worker->run_end = link;

	return moved;
}

/* Copy one batch of the oldest load of that kind that has one. */
static uint32_t copy_oldest(kvx_worker_t *worker, uint32_t async)
{
	for (kvx_wjob_t *job = worker->run; job; job = job->next_run) {
		kvx_wload_t *load = (kvx_wload_t *)job;
		uint32_t copied;

		if (job->kind != KVX_WJOB_LOAD || (load->flags & KVX_MSG_ASYNC) != async) {
			continue;
		}
		copied = kvx_wload_copy(worker, load, &worker->transfer_scratch);
		if (copied > 0) {
			return copied;
		}
	}

	return 0;
}

/* Synchronous loads come before asynchronous ones. */
static uint32_t copy_loads(kvx_worker_t *worker)
{
	const uint32_t copied = worker->threads > 1 ? copy_oldest(worker, 0) : 0;

	return copied > 0 ? copied : copy_oldest(worker, KVX_MSG_ASYNC);
}

static void keep_attached(kvx_worker_t *worker, uint64_t now, int moving)
{
	uint64_t incarnation;

	if (moving && now - worker->polled_ns < POLL_NS) {
		return;
	}
	worker->polled_ns = now;
	if (kv_broken_count() > 0) {
		kvc_abandon(worker->kvc);
	}
	(void)kvc_poll(worker->kvc, 0);
	incarnation = kvc_incarnation(worker->kvc);
	if (incarnation != atomic_load_explicit(&worker->incarnation, memory_order_relaxed)) {
		kvx_stat_add(&worker->stats.attaches, incarnation != 0);
		atomic_store(&worker->incarnation, incarnation);
	}
	if (atomic_load_explicit(&worker->unacked, memory_order_relaxed)) {
		kvx_transfer_count_unacked(worker);
	}
	kvx_wspaces_poll(worker, now);
	kvx_self_test_step(worker, now);
}

static int run_iteration(kvx_worker_t *worker, int moving)
{
	const uint64_t now = kvx_worker_now_ns();
	uint32_t moved;

	worker->polls_soon = 0;
	keep_attached(worker, now, moving);
	take_jobs(worker);
	(void)step_jobs(worker, KVX_WJOB_LOAD, now, 0);
	moved = worker->gpu ? kvx_gpu_complete_batches(worker) + kvx_gpu_send_async_loads(worker, now)
			    : copy_loads(worker);
	if (worker->gpu) {
		(void)step_jobs(worker, KVX_WJOB_SAVE, now, 0); /* so that their blocks share batches */
	}
	moved += step_jobs(worker, KVX_WJOB_SAVE, now, worker->gpu || moved == 0);

	return moved > 0;
}

/* ---- sleeping -------------------------------------------------------------------------------- */

static int is_copying(const kvx_worker_t *worker)
{
	return worker->gpu && atomic_load(&worker->gpu->in_flight) > 0;
}

/* For an event that comes without a message. */
static int is_waiting(const kvx_worker_t *worker)
{
	return worker->polls_soon || is_copying(worker);
}

static uint64_t max_sleep_ns(const kvx_worker_t *worker, uint64_t nap)
{
	if (worker->gpu && atomic_load(&worker->gpu->loads_in_flight) > 0) {
		return NAP_NS;
	}
	if (is_waiting(worker)) {
		return nap;
	}
	if (worker->run || atomic_load_explicit(&worker->unacked, memory_order_relaxed)) {
		return OPEN_NS;
	}
	if (atomic_load_explicit(&worker->incarnation, memory_order_relaxed) == 0) {
		return AWAY_NS;
	}

	return atomic_load_explicit(&worker->self_test_status, memory_order_relaxed) == KVC_PENDING ? OPEN_NS : IDLE_NS;
}

/* Not at all if the thread was poked since `seen`. */
static void sleep_until_woken(kvx_worker_t *worker, uint32_t seen, uint64_t ns)
{
	struct pollfd fds[2] = {{.fd = worker->event_fd, .events = POLLIN},
				{.fd = kvc_fd(worker->kvc), .events = POLLIN}};
	const struct timespec time = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
	uint64_t count;

	atomic_store(&worker->asleep, 1u);
	if (atomic_load(&worker->pokes) == seen && (!atomic_load(&worker->stop) || is_copying(worker))) {
		(void)ppoll(fds, fds[1].fd >= 0 ? 2 : 1, &time, NULL);
	}
	atomic_store(&worker->asleep, 0u);
	if (fds[0].revents) {
		(void)!read(worker->event_fd, &count, sizeof count);
	}
}

static uint64_t next_nap(const kvx_worker_t *worker, uint64_t nap)
{
	const uint64_t most = is_copying(worker) ? COPY_NS : NAP_MAX_NS;

	return nap * 2 < most ? nap * 2 : most;
}

/* 1: do not sleep yet. */
static int spin_briefly(kvx_worker_t *worker, uint32_t seen, uint64_t idle_since)
{
	for (int i = 0; i < 64; i++) {
		if (atomic_load(&worker->pokes) != seen) {
			return 1;
		}
		kvx_cpu_relax();
	}

	return kvx_worker_now_ns() - idle_since < SPIN_NS;
}

/* ---- the thread ------------------------------------------------------------------------------ */

/* Before it stops, it completes the jobs in progress, unless the device hangs. */
static int must_go_on(kvx_worker_t *worker)
{
	if (!atomic_load(&worker->stop)) {
		return 1;
	}

	return (worker->run || atomic_load(&worker->submitted)) && !(worker->gpu && kvx_gpu_shutdown_timed_out(worker));
}

static void *run_transfer(void *arg)
{
	kvx_worker_t *worker = arg;
	uint64_t idle_since = 0, nap = NAP_NS;
	int moving = 0;

	(void)prctl(PR_SET_NAME, "kvx-transfer", 0, 0, 0);
	kvx_cpus_bind_thread(&worker->cpus);
	while (must_go_on(worker)) {
		const uint32_t seen = atomic_load(&worker->pokes);

		moving = run_iteration(worker, moving);
		if (moving) {
			idle_since = 0;
			nap = NAP_NS;
			continue;
		}
		idle_since = idle_since ? idle_since : kvx_worker_now_ns();
		if (spin_briefly(worker, seen, idle_since)) {
			continue;
		}
		if (!worker->run && kvx_prefault_step(worker)) {
			continue;
		}
		sleep_until_woken(worker, seen, max_sleep_ns(worker, nap));
		nap = is_waiting(worker) ? next_nap(worker, nap) : NAP_NS;
	}
	if (!worker->run) {
		kvx_self_test_fini(worker);
		kvx_wspaces_close(worker);
	}

	return NULL;
}

static void *run_copy_thread(void *arg)
{
	kvx_copy_thread_t *helper = arg;

	(void)prctl(PR_SET_NAME, "kvx-helper", 0, 0, 0);
	kvx_cpus_bind_thread(&helper->worker->cpus);
	kvx_copy_thread_run(helper);

	return NULL;
}

kvc_status_t kvx_transfer_start(kvx_worker_t *worker)
{
	sigset_t all, before;
	int failed;

	worker->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (worker->event_fd < 0) {
		return KVC_ERR_NOMEM;
	}
	(void)sigfillset(&all);
	(void)pthread_sigmask(SIG_SETMASK, &all, &before);
	failed = pthread_create(&worker->thread, NULL, run_transfer, worker);
	worker->started = !failed;
	for (uint32_t i = 0; i + 2 < worker->threads && !failed; i++) {
		failed = pthread_create(&worker->copy_thread[i], NULL, run_copy_thread, &worker->copy_threads[i]);
		worker->copy_thread_count += !failed;
	}
	(void)pthread_sigmask(SIG_SETMASK, &before, NULL);

	return failed ? KVC_ERR_NOMEM : KVC_OK;
}

void kvx_transfer_stop(kvx_worker_t *worker)
{
	atomic_store(&worker->stop, 1u);
	if (worker->gpu) {
		kvx_gpu_begin_shutdown(worker);
	}
	kvx_gate_open(&worker->work);
	if (worker->started) {
		atomic_store(&worker->asleep, 1u);
		kvx_transfer_wake(worker);
		(void)pthread_join(worker->thread, NULL);
	}
	for (uint32_t i = 0; i < worker->copy_thread_count; i++) {
		(void)pthread_join(worker->copy_thread[i], NULL);
	}
	if (worker->event_fd >= 0) {
		(void)close(worker->event_fd);
	}
}
