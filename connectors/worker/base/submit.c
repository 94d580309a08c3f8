/* Jobs between the engine's thread and the transfer thread, and the gates that threads sleep at. */
#include "worker/base/submit.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS 4000u

/* ---- gates ------------------------------------------------------------------------------------ */

void kvx_cpu_relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

uint32_t kvx_gate_read(kvx_gate_t *gate)
{
	return atomic_load(&gate->seq);
}

void kvx_gate_wait(kvx_gate_t *gate, uint32_t seen, uint64_t timeout_ns)
{
	const struct timespec time = {.tv_sec = (time_t)(timeout_ns / 1000000000u),
				      .tv_nsec = (long)(timeout_ns % 1000000000u)};

	atomic_fetch_add(&gate->waiters, 1u);
	if (atomic_load(&gate->seq) == seen) {
		(void)syscall(SYS_futex, &gate->seq, FUTEX_WAIT_PRIVATE, seen, &time, NULL, 0);
	}
	atomic_fetch_sub(&gate->waiters, 1u);
}

void kvx_gate_pause(kvx_gate_t *gate, uint32_t seen, uint32_t *p_spins, uint64_t nap_ns)
{
	if ((*p_spins)++ < SPINS) {
		kvx_cpu_relax();
	} else {
		kvx_gate_wait(gate, seen, nap_ns);
	}
}

void kvx_gate_open(kvx_gate_t *gate)
{
	atomic_fetch_add(&gate->seq, 1u);
	if (atomic_load(&gate->waiters) > 0) {
		(void)syscall(SYS_futex, &gate->seq, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
	}
}

/* ---- jobs ------------------------------------------------------------------------------------- */

void kvx_transfer_wake(kvx_worker_t *worker)
{
	const uint64_t one = 1;

	atomic_fetch_add(&worker->pokes, 1u);
	if (atomic_exchange(&worker->asleep, 0u)) {
		(void)!write(worker->event_fd, &one, sizeof one);
	}
}

void kvx_wjob_submit(kvx_worker_t *worker, kvx_wjob_t *job)
{
	job->next_run = atomic_load(&worker->submitted);
	while (!atomic_compare_exchange_weak(&worker->submitted, &job->next_run, job)) {
	}
	kvx_transfer_wake(worker);
}

void kvx_wjob_append(kvx_wjob_t ***p_end, kvx_wjob_t *job)
{
	job->next = NULL;
	**p_end = job;
	*p_end = &job->next;
}

void kvx_wjob_complete(kvx_worker_t *worker, kvx_wjob_t *job)
{
	atomic_store(&job->completed, 1u);
	atomic_fetch_add(&worker->completions, 1u);
	kvx_gate_open(&worker->progress);
}
