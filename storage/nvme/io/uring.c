/* The ring thread: one io_uring, fed by the owner's queue.
 *
 * A turn of the loop starts what is queued, submits, then checks the digests of what has come in while the device works
 * on the rest. For a load somebody waits; stores are behind, so their ends are taken, and told, several at a time:
 * waking costs more than a store itself. Memory in registered regions moves by two fixed requests (header, payload),
 * any other by one vectored request: docs/decisions/005-nvme-slots.md has the figures.
 */
#include "uring.h"

#include "nvme/threads.h"

#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#define WAKE               UINT64_MAX
#define MAX_STALLS         8u
#define SUBMIT_PATIENCE_NS 5000000000ull /* a refused submission is said after this */
#define VERIFY_BATCH       2u
#define SLOW_BATCH         4u
#define STORE_BATCH        16u     /* ends of stores are waited for, and told, together: at most this many, */
#define STORE_WAIT_NS      1000000 /* and as long as one comes within this */

static struct io_uring_sqe *take_sqe(kvs_ring_t *r)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);

	/* The ring has an entry for each part of each place and one for the wakeup. */
	kv_assert(sqe != NULL);

	return sqe;
}

static void post_wake(kvs_ring_t *r)
{
	struct io_uring_sqe *sqe = take_sqe(r);

	io_uring_prep_poll_add(sqe, r->io->wakeup.fd, POLLIN);
	io_uring_sqe_set_data64(sqe, WAKE);
}

/* ---- transfers ------------------------------------------------------------------------------- */

static void submit_part(kvs_ring_t *r, uint32_t at, uint32_t which)
{
	kvs_ring_entry_t *entry = &r->entry[at];
	const kvs_xfer_t *xfer = entry->xfer;
	kvs_part_t *part = &entry->part[which];
	struct io_uring_sqe *sqe = take_sqe(r);
	int fixed = kvs_ring_register_file(r, xfer);
	int fd = fixed ? (int)kv_slot_slab(xfer->slot) : xfer->fd;
	int store = xfer->kind == KVS_STORE;

	if (part->buffer != KVS_NONE) {
		void *base = part->iov[0].iov_base;
		unsigned len = (unsigned)part->iov[0].iov_len;

		if (store) {
			io_uring_prep_write_fixed(sqe, fd, base, len, part->offset, (int)part->buffer);
		} else {
			io_uring_prep_read_fixed(sqe, fd, base, len, part->offset, (int)part->buffer);
		}
	} else if (store) {
		io_uring_prep_writev(sqe, fd, part->iov, part->count, part->offset);
	} else {
		io_uring_prep_readv(sqe, fd, part->iov, part->count, part->offset);
	}
	if (fixed) {
		io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
	}
	io_uring_sqe_set_data64(sqe, (uint64_t)at * 2u + which);
	entry->open++;
}

/* Header and payload by one request, which asks the page tables for the memory. */
static kvs_part_t vectored(const kvs_ring_entry_t *entry)
{
	const kvs_xfer_t *xfer = entry->xfer;

	return (kvs_part_t){
		.iov = {{entry->header, xfer->cls->header_bytes}, {xfer->mem.data, xfer->cls->payload_bytes}},
		.count = 2,
		.offset = xfer->offset,
		.buffer = KVS_NONE};
}

/* 1: in registered memory. */
static int start_xfer(kvs_ring_t *r, kvs_xfer_t *xfer)
{
	uint32_t at = r->free_entry[--r->free_count];
	kvs_ring_entry_t *entry = &r->entry[at];
	uint32_t header_bytes = xfer->cls->header_bytes;
	uint32_t buffer = kvs_ring_find_buffer(r, xfer);

	entry->xfer = xfer;
	entry->error = 0;
	entry->open = 0;
	entry->header = header_bytes <= KVS_HEADER_SMALL ? r->headers + (size_t)at * KVS_HEADER_SMALL
							 : r->big_headers + (size_t)at * KVS_SLOTHDR_MAX;
	kvs_xfer_prepare(xfer, entry->header);
	r->in_flight++;
	r->loads += xfer->kind == KVS_LOAD;
	entry->part[0] = vectored(entry);
	if (buffer != KVS_NONE) {
		entry->part[0].count = 1;
		entry->part[0].buffer = 0;
		entry->part[1] = (kvs_part_t){.iov = {{xfer->mem.data, xfer->cls->payload_bytes}},
					      .count = 1,
					      .offset = xfer->offset + header_bytes,
					      .buffer = buffer};
		submit_part(r, at, 1);
	}
	submit_part(r, at, 0);

	return buffer != KVS_NONE;
}

/* Back to the owner. Only a store that went well can wait to be told. */
static void return_xfer(kvs_ring_t *r, kvs_xfer_t *xfer)
{
	r->wake |= xfer->kind != KVS_STORE || xfer->status != KV_OK;
	r->unannounced++;
	kvs_xfer_return(r->io, xfer); /* and is the owner's from here on */
}

static void wake_owner(kvs_ring_t *r)
{
	if (r->unannounced > 0 && (r->wake || r->in_flight == 0 || r->unannounced >= STORE_BATCH)) {
		r->unannounced = 0;
		kvs_xfer_wake_owner(r->io);
	}
	r->wake = 0;
}

/* Loads into memory that is not registered are few a turn: it may never have been used, and then the kernel finds pages
 * for it while it takes the request; what has been read meanwhile must not wait for all of them. */
static void start_queued(kvs_ring_t *r)
{
	uint32_t slow = 0;

	while (r->in_flight < r->depth && r->free_count > 0 && slow < SLOW_BATCH) {
		kvs_xfer_t *xfer = kvs_queue_pop(&r->io->in);

		if (!xfer) {
			return;
		}
		if (xfer->kind == KVS_UNREGISTER_FILE) {
			kvs_ring_unregister_file(r, xfer);
			return_xfer(r, xfer);
			continue;
		}
		slow += !start_xfer(r, xfer) && xfer->kind == KVS_LOAD;
	}
}

static void release_entry(kvs_ring_t *r, uint32_t at)
{
	kvs_xfer_t *xfer = r->entry[at].xfer;

	r->entry[at].xfer = NULL;
	r->free_entry[r->free_count++] = at;
	return_xfer(r, xfer);
}

/* The device has let go of all parts. */
static void finish_io(kvs_ring_t *r, uint32_t at)
{
	kvs_ring_entry_t *entry = &r->entry[at];

	r->in_flight--;
	r->loads -= entry->xfer->kind == KVS_LOAD;
	if (entry->error) {
		kvs_xfer_set_error(entry->xfer, entry->error);
	}
	if (entry->error || entry->xfer->kind == KVS_STORE) {
		release_entry(r, at);
		return;
	}
	r->ready[(r->ready_head + r->ready_count++) % r->cap] = at;
}

static void part_done(kvs_ring_t *r, uint32_t at, uint32_t which, int result)
{
	kvs_ring_entry_t *entry = &r->entry[at];
	kvs_part_t *part = &entry->part[which];

	entry->open--;
	if (result == 0) {
		entry->error = entry->xfer->kind == KVS_STORE ? EIO : ENODATA;
	} else if (result < 0 && result != -EINTR && result != -EAGAIN) {
		entry->error = -result;
	} else {
		/* O_DIRECT goes on at a page only; what lies behind it is moved again. */
		size_t whole = result > 0 ? (size_t)result & ~(size_t)(KVS_PAGE - 1u) : 0;

		part->stalls = whole > 0 ? 0 : part->stalls + 1u;
		kvs_iov_advance(part->iov, &part->count, whole);
		part->offset += whole;
		if (part->count > 0 && part->stalls > MAX_STALLS) {
			entry->error = EIO;
		} else if (part->count > 0) {
			submit_part(r, at, which);
		}
	}
	if (entry->open == 0) {
		finish_io(r, at);
	}
}

static void reap_completions(kvs_ring_t *r)
{
	struct io_uring_cqe *cqe;
	unsigned head;
	unsigned seen = 0;

	io_uring_for_each_cqe(&r->uring, head, cqe)
	{
		uint64_t data = cqe->user_data;

		if (data == WAKE) {
			kvs_wakeup_clear(&r->io->wakeup);
			post_wake(r);
		} else {
			part_done(r, (uint32_t)(data / 2u), (uint32_t)(data % 2u), cqe->res);
		}
		seen++;
	}
	io_uring_cq_advance(&r->uring, seen);
}

/* A client may punch a hole into its slab: then the registration holds pages that no process sees, and the bytes went
 * there. Before a block on disk is called bad it is read again, past the registration. */
static int read_again(kvs_ring_t *r, uint32_t at)
{
	kvs_ring_entry_t *entry = &r->entry[at];

	if (entry->xfer->status != KV_ERR_CORRUPT || entry->part[0].buffer == KVS_NONE) {
		return 0;
	}
	entry->part[0] = vectored(entry);
	r->in_flight++;
	r->loads++;
	submit_part(r, at, 0);

	return 1;
}

static void verify_batch(kvs_ring_t *r)
{
	for (uint32_t i = 0; i < VERIFY_BATCH && r->ready_count > 0; i++) {
		uint32_t at = r->ready[r->ready_head];

		r->ready_head = (r->ready_head + 1u) % r->cap;
		r->ready_count--;
		kvs_xfer_verify(r->entry[at].xfer, r->entry[at].header);
		if (!read_again(r, at)) {
			release_entry(r, at);
		}
	}
}

/* The kernel would not take the submission: wait a little, and say so when it lasts. Nothing is lost, the entries are
 * submitted again. */
static void handle_refusal(kvs_ring_t *r, int error)
{
	static const struct timespec pause = {0, 1000000};
	uint64_t now = kv_now_ns(r->nvme->env);

	if (error == EINTR) {
		return;
	}
	if (r->refused_since_ns == 0) {
		r->refused_since_ns = now;
	} else if (!r->refusal_said && now - r->refused_since_ns > SUBMIT_PATIENCE_NS) {
		r->refusal_said = 1;
		kv_metric_add(r->nvme->metrics, KV_M_DISK_ERRORS, 1);
		kv_logf(r->nvme->env, KV_LOG_ERROR, "nvme", "io_uring takes no requests for 5 s: %s", strerror(error));
	}
	nanosleep(&pause, NULL);
}

/* -ETIME is nothing to complain of. */
static int wait_until(kvs_ring_t *r, uint32_t want, uint64_t ns)
{
	struct __kernel_timespec limit = {.tv_sec = (int64_t)(ns / 1000000000u),
					  .tv_nsec = (int64_t)(ns % 1000000000u)};
	struct io_uring_cqe *cqe;

	return io_uring_submit_and_wait_timeout(&r->uring, &cqe, want, &limit, NULL);
}

/* Sleep until something has ended or the wakeup comes; while only stores are under way, until several have ended; while
 * nothing is, until memory may have been touched that waits to be registered. */
static int wait_for_some(kvs_ring_t *r)
{
	uint32_t want = kvs_queue_empty(&r->io->in) ? r->in_flight : r->in_flight / 4u;
	int result;

	want = want < STORE_BATCH ? want : STORE_BATCH;
	if (r->batches && r->in_flight == 0 && r->fixed_buffers && r->open_regions > 0) {
		uint64_t now = kv_now_ns(r->nvme->env);

		result = wait_until(r, 1, r->register_after_ns > now ? r->register_after_ns - now : 1u);
		return result == -ETIME ? 0 : result;
	}
	if (!r->batches || r->loads > 0 || want < 2 || r->store_waited) {
		r->store_waited = 0;
		return io_uring_submit_and_wait(&r->uring, 1);
	}
	result = wait_until(r, want, STORE_WAIT_NS);
	r->store_waited = result == -ETIME;
	r->wake |= r->store_waited;

	return r->store_waited ? 0 : result;
}

static void iterate_ring(kvs_ring_t *r)
{
	int result;
	int more;

	start_queued(r);
	more = kvs_ring_register_next_piece(r);
	if (r->ready_count > 0) {
		result = io_uring_submit_and_get_events(&r->uring);
		verify_batch(r);
	} else {
		kvs_wakeup_arm(&r->io->wakeup);
		more |= (!kvs_queue_empty(&r->io->in) && r->in_flight < r->depth) || kvs_ring_has_region_changes(r);
		if (more || atomic_load(&r->io->stop)) {
			result = io_uring_submit_and_get_events(&r->uring);
		} else {
			result = wait_for_some(r);
		}
		kvs_wakeup_disarm(&r->io->wakeup);
	}
	if (result < 0) {
		handle_refusal(r, -result);
	} else {
		r->refused_since_ns = 0;
	}
	reap_completions(r);
	wake_owner(r);
}

/* ---- open and close -------------------------------------------------------------------------- */

static int ring_init(kvs_ring_t *r, unsigned entries)
{
	static const unsigned modes[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0};
	int result = -EINVAL;

	for (size_t i = 0; i < KV_COUNT_OF(modes) && result == -EINVAL; i++) {
		struct io_uring_params params = {.flags = modes[i] | IORING_SETUP_CLAMP};

		result = io_uring_queue_init_params(entries, &r->uring, &params);
	}
	r->batches = result == 0 && (r->uring.features & IORING_FEAT_EXT_ARG) != 0;

	return result;
}

static uint8_t *map_headers(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static int ring_memory(kvs_ring_t *r)
{
	const kv_env_t *env = r->nvme->env;

	r->entry = kv_alloc(env, r->cap * sizeof *r->entry);
	r->free_entry = kv_alloc(env, r->cap * sizeof *r->free_entry);
	r->ready = kv_alloc(env, r->cap * sizeof *r->ready);
	r->region = kv_alloc(env, KVS_MAX_REGIONS * sizeof *r->region);
	r->touched = kv_alloc(env, (1u << KVS_PIECE_SHIFT) / KVS_PAGE);
	r->headers = map_headers((size_t)r->cap * KVS_HEADER_SMALL);
	r->big_headers = map_headers((size_t)r->cap * KVS_SLOTHDR_MAX);
	if (!r->entry || !r->free_entry || !r->ready || !r->region || !r->touched || !r->headers || !r->big_headers) {
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < r->cap; i++) {
		r->free_entry[r->free_count++] = i;
	}

	return 0;
}

static void ring_free(kvs_ring_t *r)
{
	const kv_env_t *env = r->nvme->env;

	kv_free(env, r->file_fd);
	if (r->headers) {
		munmap(r->headers, (size_t)r->cap * KVS_HEADER_SMALL);
	}
	if (r->big_headers) {
		munmap(r->big_headers, (size_t)r->cap * KVS_SLOTHDR_MAX);
	}
	kv_free(env, r->touched);
	kv_free(env, r->region);
	kv_free(env, r->ready);
	kv_free(env, r->free_entry);
	kv_free(env, r->entry);
}

static void report_start(kvs_io_t *io, int result)
{
	atomic_store(&io->ready, result);
	kvs_wakeup_signal(&io->nvme->owner_wakeup);
}

void *kvs_uring_main(void *arg)
{
	kvs_io_t *io = arg;
	kvs_nvme_t *nvme = io->nvme;
	kvs_ring_t r = {
		.io = io, .nvme = nvme, .depth = nvme->config.queue_depth, .cap = nvme->config.queue_depth * 2u};
	int result = ring_memory(&r);

	(void)prctl(PR_SET_NAME, "kvd-disk", 0, 0, 0);
	if (result == 0) {
		result = ring_init(&r, r.cap * 2u + 2u);
	}
	if (result != 0) {
		ring_free(&r);
		report_start(io, result);
		return NULL;
	}

	kvs_ring_register_tables(&r);
	post_wake(&r);
	report_start(io, 1);
	while (!atomic_load(&io->stop) || r.in_flight > 0 || r.ready_count > 0 || !kvs_queue_empty(&io->in)) {
		iterate_ring(&r);
	}
	/* The kernel takes a ring apart in its own time; files and memory are let go now. */
	if (r.file_fd) {
		io_uring_unregister_files(&r.uring);
	}
	io_uring_unregister_buffers(&r.uring);
	io_uring_queue_exit(&r.uring);
	ring_free(&r);

	return NULL;
}
