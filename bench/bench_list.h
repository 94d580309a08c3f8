/* Every bench, in the order `kvd-bench all` runs them. Add a line here and a file in CMakeLists.txt. */
#ifndef KVD_BENCH_LIST_H
#define KVD_BENCH_LIST_H

#define BENCH_LIST(X)                                                                                                  \
	X(hash)                                                                                                        \
	X(digest_copy)                                                                                                 \
	X(digest_gather)                                                                                               \
	X(nvme_read)                                                                                                   \
	X(nvme_write)                                                                                                  \
	X(disk_read)                                                                                                   \
	X(disk_write)

#endif
