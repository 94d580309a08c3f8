/* nvme_disk.h -- a place for the disk benches: a throttled loop device over memory, which repeats to 0.1 %, or a
 * directory of a real disk. */
#ifndef KVD_BENCH_NVME_DISK_H
#define KVD_BENCH_NVME_DISK_H

#include <stdint.h>

typedef struct bench_disk {
	char dir[256];   /* where to work */
	char image[256]; /* file behind the loop device; "": none */
	char loop[64];
	char cgroup[256]; /* that this process was moved to; "": none */
	int mounted;
} bench_disk_t;

/* An ext4 of `bytes` on a loop device over /dev/shm, limited to these bytes a second for this process and its children.
 * Needs root. NULL, or the reason why there is none; call bench_disk_fini() in any case. */
const char *bench_disk_loop(bench_disk_t *disk, uint64_t bytes, uint64_t read_bps, uint64_t write_bps);

/* A fresh directory below `base`. NULL or the reason. */
const char *bench_disk_real(bench_disk_t *disk, const char *base);

/* Take everything back. */
void bench_disk_fini(bench_disk_t *disk);

/* fio on a file of `bytes` in the directory: 256 KiB requests, queue 32, io_uring, O_DIRECT, random places. Bytes a
 * second; 0: it failed. *p_cpu_ns: its CPU time. */
double bench_disk_fio(const bench_disk_t *disk, int write, uint64_t bytes, double seconds, double *p_cpu_ns);

#endif
