/* Copies that are a part of a graph: they end once a launch, and a word that the device counts up tells when. */
#include "internal.h"

/* An event of a capture can be asked about by nobody, so a kernel comes behind the copies. */
kv_status_t kvk_gpu_graph_tick(kvk_gpu_t *gpu, const kvk_gpu_job_t *job, kvk_cu_stream_t stream)
{
	kvk_gpu_args_t args = {.bad = job->word_at};
	void *params[] = {&args};
	const kvk_cu_kernel_t kernel = {
		.function = gpu->tick, .grid = {1, 1, 1}, .block = {KVK_GPU_THREADS_TICK, 1, 1}, .params = params};

	return kvk_gpu_start_plain(gpu, &kernel, stream);
}

kv_status_t kvk_gpu_graph_poll(kvk_gpu_job_t *job)
{
	const uint32_t word = atomic_load_explicit(job->word, memory_order_acquire);

	if (word == job->seen) {
		return KV_PENDING;
	}
	if (word != job->answered) {
		job->answered = word;
		job->status = kvk_gpu_conclude(job);
	}

	return job->status;
}

kv_status_t kvk_gpu_again(kvk_gpu_job_t *job)
{
	if (!job->captured) {
		return kvk_gpu_refuse(KV_ERR_ARG, "the copy is not of a graph: it comes once");
	}
	job->seen = atomic_load_explicit(job->word, memory_order_acquire);
	job->answered = job->seen;
	job->status = KV_PENDING;
	job->corrupt = 0;
	for (uint32_t i = 0; i < job->count; i++) {
		job->bad[i] = 0;
	}

	return KV_OK;
}

const volatile uint32_t *kvk_gpu_word(const kvk_gpu_job_t *job)
{
	return job->captured ? (const volatile uint32_t *)job->word : NULL;
}
