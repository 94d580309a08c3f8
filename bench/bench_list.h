/* Every bench, in the order `kvd-bench all` runs them. Add a line here and a file in CMakeLists.txt. */
#ifndef KVD_BENCH_LIST_H
#define KVD_BENCH_LIST_H

#define BENCH_LIST(X)                                                                                                  \
	X(hash)                                                                                                        \
	X(digest_copy)                                                                                                 \
	X(digest_gather)                                                                                               \
	X(match_unbranched)                                                                                            \
	X(match_branched)                                                                                              \
	X(acquire)                                                                                                     \
	X(lookup_stalls)                                                                                               \
	X(tenant)                                                                                                      \
	X(connector_load)                                                                                              \
	X(connector_first)                                                                                             \
	X(connector_save)                                                                                              \
	X(pool_batch_8m)                                                                                               \
	X(pool_batch_1m)                                                                                               \
	X(pool_single_64k)                                                                                             \
	X(pool_single_256k)                                                                                            \
	X(nvme_read)                                                                                                   \
	X(nvme_write)                                                                                                  \
	X(disk_read)                                                                                                   \
	X(disk_write)                                                                                                  \
	X(restart)                                                                                                     \
	X(weights_cached)                                                                                              \
	X(weights_cold)

#endif
