/* Gates threads sleep at, and the queue from the engine's thread to the transfer thread. */
#include "worker/wait.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

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

void kvx_gate_open(kvx_gate_t *gate)
{
	atomic_fetch_add(&gate->seq, 1u);
	if (atomic_load(&gate->waiters) > 0) {
		(void)syscall(SYS_futex, &gate->seq, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
	}
}

int kvx_queue_put(kvx_queue_t *queue, kvx_wjob_t *job)
{
	const uint32_t head = atomic_load_explicit(&queue->head, memory_order_relaxed);

	if (head - atomic_load_explicit(&queue->tail, memory_order_acquire) == KVX_WORKER_QUEUE) {
		return 0;
	}
	queue->ring[head % KVX_WORKER_QUEUE] = job;
	atomic_store(&queue->head, head + 1);

	return 1;
}

kvx_wjob_t *kvx_queue_take(kvx_queue_t *queue)
{
	const uint32_t tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);
	kvx_wjob_t *job;

	if (atomic_load(&queue->head) == tail) {
		return NULL;
	}
	job = queue->ring[tail % KVX_WORKER_QUEUE];
	atomic_store_explicit(&queue->tail, tail + 1, memory_order_release);

	return job;
}

int kvx_queue_empty(kvx_queue_t *queue)
{
	return atomic_load(&queue->head) == atomic_load(&queue->tail);
}
