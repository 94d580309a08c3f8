/* Every bench, in the order of `kvd-bench all`. */
#include "bench.h"

extern bench_run_t run_acquire, run_connector, run_copy, run_hash, run_match, run_nvme, run_partition, run_pool,
	run_restart, run_tenant, run_transfer;

#define LINES     "13 dependent cache-line loads from a table as large as the mirror"
#define LINE_GOAL "p50 <= 2,000 ns, no system call"
#define PAGES     "memcpy of the same pages on one thread"
#define FIO       "fio with the same size, queue and engine, on the same file system"

const bench_t bench_list[] = {
	{"hash", run_hash, 0, "one key of a 16-token unit in a chain of 8,192, tokens checked and keys written",
	 "a bare chain of libcrypto's SHA-256 compressions over the same bytes", "ratio <= 1.2"},
	{"digest/copy", run_copy, 0, "fused copy and XXH3-64 of leaves over cold memory, one core (--with memory=SIZE)",
	 "one core's non-temporal copy", "ratio >= 0.85"},
	{"match/unbranched", run_match, 0,
	 "longest match of 8,192 keys, 90 % resident, 1 M blocks in the index, prompts side by side", LINES, LINE_GOAL},
	{"match/branched", run_match, 1, "the same with a branch at every block of every prompt", LINES, LINE_GOAL},
	{"acquire", run_acquire, 0, "acquire and release of a resident 8,192-block prefix, median",
	 "two raw UNIX-socket round trips, same message sizes, pinning and spinning", "ratio <= 1.5"},
	{"tenant", run_tenant, 0, "p99 of acquire and release while another namespace attacks", "the same in quiet",
	 "ratio <= 2"},
	{"partition/both", run_partition, 0,
	 "p99 of a local match, acquire and release while the link to a peer is down and prefixes are asked for (root)",
	 "the same while prefixes come", "ratio <= 1.2"},
	{"partition/one-way", run_partition, 1, "the same while no packet of the peer arrives",
	 "the same while prefixes come", "ratio <= 1.2"},
	{"partition/loss", run_partition, 2, "the same while 30 % of its packets are lost",
	 "the same while prefixes come", "ratio <= 1.2"},
	{"connector/load", run_connector, 0,
	 "100 MB in blocks of 384 KiB, 6 layers, into an engine's cache synchronously, verified", PAGES, "ratio <= 1"},
	{"connector/first", run_connector, 1, "the first such load of a process, its pages touched in idle time",
	 "the same without", ""},
	{"connector/save", run_connector, 2, "the same blocks from the end of a step until the daemon has them", PAGES,
	 ""},
	{"pool/batch-8m", run_pool, 0, "verified put and get of 32 blocks of 256 KiB, process to process",
	 "one core's non-temporal copy of 8 MiB, and libc's memcpy", "share of its speed >= 0.85, and of libc's >= 1"},
	{"pool/batch-1m", run_pool, 1, "verified put and get of 16 blocks of 64 KiB, process to process",
	 "one core's non-temporal copy of 1 MiB, and libc's memcpy", "share of its speed >= 0.6, and of libc's >= 1"},
	{"nvme/read", run_nvme, 0,
	 "blocks of 256 KiB read and every digest checked, throttled loop device over memory, or a disk (--with dir=)",
	 FIO, "ratio >= 0.95"},
	{"nvme/write", run_nvme, 1, "blocks of 256 KiB written with header, metadata committed beside, same device",
	 FIO, "ratio >= 0.95"},
	{"restart", run_restart, 0,
	 "from start to serving with 1 M disk blocks in the index, after a clean stop (and after kill -9)", NULL,
	 "<= 1.5e9 ns"},
	{"transfer/tls-256k", run_transfer, 0,
	 "a prefix of 256 MiB from another daemon over TLS on loopback, blocks of 256 KiB, every digest checked",
	 "1 / (1 / tcp + 1 / cipher): the same bytes over plain TCP, and through AES-128-GCM", "ratio >= 0.9"},
	{"transfer/tls-2m", run_transfer, 1, "the same in blocks of 2 MiB", "the same", "ratio >= 0.9"},
	{"transfer/tls-64k-in-order", run_transfer, 2,
	 "a prefix of 8,192 blocks of 64 KiB, neighbours in the owner's pool, likewise",
	 "the same bytes in blocks of 4 MiB", "ratio >= 0.9"},
	{"transfer/tls-64k-scattered", run_transfer, 3, "the same, no two of them neighbours",
	 "the same bytes in blocks of 4 MiB", ""},
	{"transfer/ucx-256k", run_transfer, 4,
	 "a prefix of 256 MiB from another daemon over UCX and TCP on loopback, blocks of 256 KiB, every digest "
	 "checked",
	 "the best of ucx_perftest's tag_bw, ucp_am_bw and ucp_put_bw, 4 MiB", "ratio >= 0.9"},
	{"transfer/ucx-2m", run_transfer, 5, "the same in blocks of 2 MiB", "the same", "ratio >= 0.9"},
	{"transfer/ucx-host", run_transfer, 6, "the same", "the same with messages of 256 MiB: cold buffers",
	 "ratio >= 0.85"},
	{.name = NULL},
};
