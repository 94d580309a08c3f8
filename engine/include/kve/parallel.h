/* kve/parallel.h -- data parallel ranks: several engines with the experts between them, each with requests, a cache and
 * a connector of its own. What one has saved, another loads. */
#ifndef KVE_PARALLEL_H
#define KVE_PARALLEL_H

#include "kve/engine.h"

typedef struct kve_parallel kve_parallel_t;

typedef struct kve_parallel_config {
	kve_engine_config_t engine; /* of each rank; group and rank are set here; devices: one a rank */
	uint32_t ranks;             /* 1 to 8 */
	uint32_t deadline_ms;       /* longest wait of a rank for another; 0: 60,000 */
	kve_dbo_config_t dbo;       /* enabled, and the thresholds */
} kve_parallel_config_t;

/* KV_ERR_ARG, KV_ERR_NOMEM: as kve_group_create() and kve_engine_create(). */
kv_status_t kve_parallel_create(const kve_parallel_config_t *config, kve_parallel_t **p_parallel);
/* NULL is fine. */
void kve_parallel_destroy(kve_parallel_t *parallel);

/* Queue a request at the next rank in turn. As kve_engine_submit(). */
kv_status_t kve_parallel_submit(kve_parallel_t *parallel, const kve_ask_t *ask, kve_request_t **p_request);
/* Run all ranks, a thread each, until all requests are DONE. KV_ERR_TIMEOUT: a rank has not come, see
 * kve_engine_lost(); KV_ERR_IO: a device has failed; requests stay as they are. KV_ERR_NOMEM: a thread could not
 * be started. None can be run again. It returns when all threads have ended, that of a lost rank included. */
kv_status_t kve_parallel_run(kve_parallel_t *parallel);
/* The caller is through with a request. */
void kve_parallel_release(kve_parallel_t *parallel, kve_request_t *request);

uint32_t kve_parallel_ranks(const kve_parallel_t *parallel);
kve_engine_t *kve_parallel_engine(kve_parallel_t *parallel, uint32_t rank);

#endif
