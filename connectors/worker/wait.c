/* Gates that threads sleep at. */
#include "worker/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPINS 4000u

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
