/* Reading a file with io_uring and O_DIRECT, requests in order, a fixed number in flight. */
#include "gpu_load.h"

#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

struct load_raw {
	struct io_uring ring;
	int fd;
	uint8_t *buffer; /* [depth] of `request` bytes */
	uint32_t *idle;  /* [depth]: indices of free pieces */
	uint32_t depth;
	size_t request;
	uint64_t bytes;
	int has_ring, registered;
};

/* A file without a name. -1: errno says why. */
static int open_direct(const char *dir)
{
	char path[512];
	int fd;

	snprintf(path, sizeof path, "%s/kvd-gpu-load-raw.%d", dir, (int)getpid());
	fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
	(void)unlink(path);

	return fd;
}

static void *map_buffer(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p != MAP_FAILED) {
		(void)madvise(p, bytes, MADV_HUGEPAGE);
	}

	return p == MAP_FAILED ? NULL : p;
}

/* Random bytes on the disk itself: space that was never written is not read from it. */
static int write_file(load_raw_t *raw)
{
	(void)posix_fallocate(raw->fd, 0, (off_t)raw->bytes);
	for (uint64_t at = 0; at < raw->bytes; at += raw->request) {
		if (bench_late()) {
			errno = ETIME;
			return 0;
		}
		bench_fill(raw->buffer, raw->request, at + 1);
		if (pwrite(raw->fd, raw->buffer, raw->request, (off_t)at) != (ssize_t)raw->request) {
			return 0;
		}
	}

	return fsync(raw->fd) == 0;
}

const char *load_raw_open(const char *dir, uint64_t bytes, size_t request, uint32_t depth, load_raw_t **p_raw)
{
	load_raw_t *raw = *p_raw = calloc(1, sizeof *raw);
	struct statfs fs;
	struct iovec whole;

	/* Newer kernels open files of tmpfs with O_DIRECT, and copy. */
	if (statfs(dir, &fs) != 0 || fs.f_type == TMPFS_MAGIC || fs.f_type == RAMFS_MAGIC) {
		return "memory, not a disk: it has no O_DIRECT (tmpfs)";
	}
	if (!raw) {
		return "no memory";
	}
	raw->depth = depth;
	raw->request = request;
	raw->bytes = bytes;
	raw->fd = open_direct(dir);
	raw->buffer = map_buffer(depth * request);
	raw->idle = calloc(depth, sizeof *raw->idle);
	if (raw->fd < 0 || !raw->buffer || !raw->idle || !write_file(raw)) {
		return strerror(errno);
	}
	raw->has_ring = io_uring_queue_init(depth, &raw->ring, 0) == 0;
	if (!raw->has_ring) {
		return "io_uring is refused";
	}
	whole = (struct iovec){raw->buffer, depth * request};
	raw->registered = io_uring_register_buffers(&raw->ring, &whole, 1) == 0; /* else: too little may be locked */

	return NULL;
}

void load_raw_close(load_raw_t *raw)
{
	if (!raw) {
		return;
	}
	if (raw->has_ring) {
		io_uring_queue_exit(&raw->ring);
	}
	if (raw->fd > 0) {
		close(raw->fd);
	}
	if (raw->buffer) {
		munmap(raw->buffer, raw->depth * raw->request);
	}
	free(raw->idle);
	free(raw);
}

static void submit_read(load_raw_t *raw, uint32_t index, uint64_t at)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&raw->ring); /* as many as requests in flight */
	uint8_t *to = raw->buffer + index * raw->request;

	if (raw->registered) {
		io_uring_prep_read_fixed(sqe, raw->fd, to, (unsigned)raw->request, at, 0);
	} else {
		io_uring_prep_read(sqe, raw->fd, to, (unsigned)raw->request, at);
	}
	io_uring_sqe_set_data64(sqe, index);
}

/* Requests that have ended: how many; an answer that is not all of its bytes is kept in *p_bad. */
static uint32_t reap(load_raw_t *raw, uint32_t idle, int *p_bad)
{
	struct io_uring_cqe *cqe;
	uint32_t n = 0;

	while (io_uring_peek_cqe(&raw->ring, &cqe) == 0) {
		if (cqe->res != (int)raw->request) {
			*p_bad = cqe->res < 0 ? cqe->res : -EIO;
		}
		raw->idle[idle + n++] = (uint32_t)io_uring_cqe_get_data64(cqe);
		io_uring_cqe_seen(&raw->ring, cqe);
	}

	return n;
}

double load_raw_read(load_raw_t *raw)
{
	const uint64_t start = bench_now_ns();
	uint64_t next = 0;
	uint32_t idle = 0;
	int bad = 0, result = 0;

	while (idle < raw->depth) {
		raw->idle[idle] = idle;
		idle++;
	}
	while (next < raw->bytes || idle < raw->depth) {
		while (idle > 0 && next < raw->bytes && bad == 0) {
			submit_read(raw, raw->idle[--idle], next);
			next += raw->request;
		}
		if (bad != 0) {
			next = raw->bytes;
		}
		if (idle < raw->depth) {
			result = io_uring_submit_and_wait(&raw->ring, 1);
		}
		if (result < 0 && result != -EINTR) {
			bad = result;
			break;
		}
		idle += reap(raw, idle, &bad);
	}
	if (bad != 0) {
		printf("gpu_load: the raw reader: %s\n", strerror(-bad));
		return 0;
	}

	return (double)(bench_now_ns() - start) / 1e9;
}
