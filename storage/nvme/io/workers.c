/* I/O threads without io_uring: plain preadv and pwritev, one transfer at a time each. */
#include "nvme/threads.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/prctl.h>

#define MAX_STALLS 8u

/* Move the whole slot. Returns 0 or an errno; ENODATA: end of file. */
static int move_slot(kvs_xfer_t *xfer, void *header)
{
	struct iovec iov[2] = {{header, xfer->cls->header_bytes}, {xfer->mem.data, xfer->cls->payload_bytes}};
	uint64_t offset = xfer->offset;
	uint32_t count = 2;
	uint32_t stalls = 0;

	while (count > 0) {
		ssize_t n = xfer->kind == KVS_STORE ? pwritev(xfer->fd, iov, (int)count, (off_t)offset)
						    : preadv(xfer->fd, iov, (int)count, (off_t)offset);
		size_t whole;

		if (n < 0 && errno != EINTR && errno != EAGAIN) {
			return errno;
		}
		if (n == 0) {
			return xfer->kind == KVS_STORE ? EIO : ENODATA;
		}
		/* O_DIRECT goes on at a page only; what lies behind it is moved again. */
		whole = n > 0 ? (size_t)n & ~(size_t)(KVS_PAGE - 1u) : 0;
		stalls = whole > 0 ? 0 : stalls + 1u;
		if (stalls > MAX_STALLS) {
			return EIO;
		}
		kvs_iov_advance(iov, &count, whole);
		offset += whole;
	}

	return 0;
}

static void run_xfer(kvs_io_t *io, kvs_xfer_t *xfer, void *header)
{
	if (xfer->kind != KVS_UNREGISTER_FILE) {
		int error;

		kvs_xfer_prepare(xfer, header);
		error = move_slot(xfer, header);
		if (error) {
			kvs_xfer_set_error(xfer, error);
		} else if (xfer->kind == KVS_LOAD) {
			kvs_xfer_verify(xfer, header);
		}
	}
	kvs_xfer_return(io, xfer);
	kvs_xfer_wake_owner(io);
}

void *kvs_worker_main(void *arg)
{
	kvs_io_t *io = arg;
	void *header = io->ring; /* KVS_SLOTHDR_MAX bytes, page-aligned, the opener's */

	(void)prctl(PR_SET_NAME, "kvd-disk", 0, 0, 0);
	while (1) {
		kvs_xfer_t *xfer = kvs_queue_pop(&io->in);

		if (xfer) {
			run_xfer(io, xfer, header);
			continue;
		}
		if (atomic_load(&io->stop)) {
			break;
		}
		kvs_wakeup_arm(&io->wakeup);
		if (kvs_queue_empty(&io->in) && !atomic_load(&io->stop)) {
			struct pollfd wait = {.fd = io->wakeup.fd, .events = POLLIN};

			if (poll(&wait, 1, -1) > 0) {
				kvs_wakeup_clear(&io->wakeup);
			}
		}
		kvs_wakeup_disarm(&io->wakeup);
	}

	return NULL;
}
