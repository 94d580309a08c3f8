/* Data parallel ranks and the threads that run them. */
#include "kve/parallel.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct worker {
	kve_engine_t *engine;
	pthread_t thread;
	kv_status_t status;
} worker_t;

struct kve_parallel {
	kve_group_t *group;
	uint32_t ranks;
	uint32_t next; /* rank that gets the next request */
	worker_t workers[KVK_EP_MAX_RANKS];
};

kv_status_t kve_parallel_create(const kve_parallel_config_t *config, kve_parallel_t **p_parallel)
{
	const kve_group_config_t shared = {.model = &config->engine.model,
					   .ranks = config->ranks,
					   .deadline_ms = config->deadline_ms,
					   .dbo = config->dbo,
					   .devices = config->engine.devices,
					   .max_rows = config->engine.max_rows};
	kve_engine_config_t engine = config->engine;
	kve_parallel_t *p = calloc(1, sizeof *p);
	kv_status_t status;

	if (!p) {
		return KV_ERR_NOMEM;
	}
	status = kve_group_create(&shared, &p->group);
	for (uint32_t r = 0; status == KV_OK && r < kve_group_ranks(p->group); r++) {
		engine.group = p->group;
		engine.rank = r;
		status = kve_engine_create(&engine, &p->workers[r].engine);
		p->ranks = r + 1;
	}
	if (status != KV_OK) {
		kve_parallel_destroy(p);
		return status;
	}
	*p_parallel = p;

	return KV_OK;
}

void kve_parallel_destroy(kve_parallel_t *parallel)
{
	if (!parallel) {
		return;
	}
	for (uint32_t r = 0; r < parallel->ranks; r++) {
		kve_engine_destroy(parallel->workers[r].engine);
	}
	kve_group_destroy(parallel->group);
	free(parallel);
}

kv_status_t kve_parallel_submit(kve_parallel_t *parallel, const kve_ask_t *ask, kve_request_t **p_request)
{
	const uint32_t rank = parallel->next;
	const kv_status_t status = kve_engine_submit(parallel->workers[rank].engine, ask, p_request);

	parallel->next = status == KV_OK ? (rank + 1) % parallel->ranks : rank;

	return status;
}

void kve_parallel_release(kve_parallel_t *parallel, kve_request_t *request)
{
	kve_engine_release(parallel->workers[request->rank].engine, request);
}

static void *run_rank(void *arg)
{
	worker_t *worker = arg;
	uint32_t unfinished = 1;

	worker->status = KV_OK;
	while (worker->status == KV_OK && unfinished > 0) {
		worker->status = kve_engine_step(worker->engine, &unfinished);
	}

	return NULL;
}

kv_status_t kve_parallel_run(kve_parallel_t *parallel)
{
	worker_t *workers = parallel->workers;
	kv_status_t status = KV_OK;
	uint32_t started = 1;

	while (started < parallel->ranks &&
	       pthread_create(&workers[started].thread, NULL, run_rank, &workers[started]) == 0) {
		started++;
	}
	if (started < parallel->ranks) {
		/* Those that run wait for this rank, and end. */
		kve_engine_abandon(workers[started].engine);
		status = KV_ERR_NOMEM;
	}
	(void)run_rank(&workers[0]);
	for (uint32_t r = 0; r < started; r++) {
		if (r > 0) {
			(void)pthread_join(workers[r].thread, NULL);
		}
		status = status == KV_OK ? workers[r].status : status;
	}

	return status;
}

uint32_t kve_parallel_ranks(const kve_parallel_t *parallel)
{
	return parallel->ranks;
}

kve_engine_t *kve_parallel_engine(kve_parallel_t *parallel, uint32_t rank)
{
	return parallel->workers[rank].engine;
}
