/* Every bench, in the order of `kvd-bench all`. */
#include "bench.h"

extern const bench_t bench_hash, bench_digest_copy, bench_match_unbranched, bench_match_branched, bench_acquire,
	bench_tenant, bench_connector_load, bench_connector_first, bench_connector_save, bench_pool_batch_8m,
	bench_pool_batch_1m, bench_nvme_read, bench_nvme_write, bench_restart, bench_weights_cached, bench_weights_cold;

const bench_t *const bench_list[] = {&bench_hash,
				     &bench_digest_copy,
				     &bench_match_unbranched,
				     &bench_match_branched,
				     &bench_acquire,
				     &bench_tenant,
				     &bench_connector_load,
				     &bench_connector_first,
				     &bench_connector_save,
				     &bench_pool_batch_8m,
				     &bench_pool_batch_1m,
				     &bench_nvme_read,
				     &bench_nvme_write,
				     &bench_restart,
				     &bench_weights_cached,
				     &bench_weights_cold,
				     NULL};
