/* Every bench, in the order of `kvd-bench all`. */
#include "bench.h"

#define BENCHES(X)                                                                                                     \
	X(hash)                                                                                                        \
	X(digest_copy)                                                                                                 \
	X(match_unbranched)                                                                                            \
	X(match_branched)                                                                                              \
	X(acquire)                                                                                                     \
	X(tenant)                                                                                                      \
	X(connector_load)                                                                                              \
	X(connector_first)                                                                                             \
	X(connector_save)                                                                                              \
	X(pool_batch_8m)                                                                                               \
	X(pool_batch_1m)                                                                                               \
	X(nvme_read)                                                                                                   \
	X(nvme_write)                                                                                                  \
	X(restart)                                                                                                     \
	X(weights_cached)                                                                                              \
	X(weights_cold)

#define DECLARE(id) extern const bench_t bench_##id;
BENCHES(DECLARE)

#define ENTRY(id) &bench_##id,
const bench_t *const bench_list[] = {BENCHES(ENTRY) NULL};
