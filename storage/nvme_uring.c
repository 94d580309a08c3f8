/* The ring thread: one io_uring, fed by the owner's queue.
 *
 * A turn of the loop starts what is queued, submits, then checks the digests of what has come in while the device works on the rest. Memory in
 * registered regions moves by two fixed requests (header, payload), any other by one vectored request: docs/decisions/005-nvme-slots.md has the figures.
 */
#include "nvme_impl.h"

#include <liburing.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define WAKE               UINT64_MAX
#define MAX_STALLS         8u
#define HEADER_SMALL       8192u /* registered header buffers; bigger headers go vectored */
#define CHUNK_SHIFT        KVS_PIECE_SHIFT
#define MAX_CHUNKS         16384u /* the kernel's limit for a table */
#define REGISTER_AGAIN_NS  50000000ull
#define SUBMIT_PATIENCE_NS 5000000000ull /* a refused submission is said after this */
#define VERIFY_BATCH       2u

typedef struct part {
	struct iovec iov[2];
	uint32_t count;
	uint32_t stalls;
	uint64_t offset;
	uint32_t buffer; /* in the ring's table; KVS_NONE: vectored */
} part_t;

/* A place for a transfer in the ring's hands. */
typedef struct place {
	kvs_xfer_t *xfer;
	uint8_t *header;
	part_t part[2];
	uint32_t open; /* parts in flight */
	int error;
} place_t;

typedef struct ring {
	struct io_uring uring;
	kvs_io_t *io;
	kvs_nvme_t *nvme;
	place_t *place;
	uint32_t *free_place;
	uint32_t *ready; /* ring of places with loads to check */
	uint32_t cap;    /* places: twice the depth, so that checking does not idle the device */
	uint32_t depth;
	uint32_t free_count;
	uint32_t ready_head;
	uint32_t ready_count;
	uint32_t in_flight;
	uint8_t *headers;
	uint8_t *big_headers;
	int *file_fd; /* registered by file number; -1: not. NULL: no registered files */
	int fixed_buffers;
	uint32_t next_buffer;
	uint32_t region_count;
	uint32_t open_regions; /* with pieces not registered yet */
	uint32_t region_cursor;
	uint64_t register_after_ns;
	kvs_ring_region_t *region;
	uint32_t region_changes; /* seen */
	unsigned char *touched;  /* for mincore(): a byte a page of a piece */
	uint64_t refused_since_ns;
	int refusal_said;
} ring_t;

static struct io_uring_sqe *take_sqe(ring_t *r)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);

	/* The ring has an entry for each part of each place and one for the bell. */
	kv_assert(sqe != NULL);

	return sqe;
}

static void post_wake(ring_t *r)
{
	struct io_uring_sqe *sqe = take_sqe(r);

	io_uring_prep_poll_add(sqe, r->io->bell.fd, POLLIN);
	io_uring_sqe_set_data64(sqe, WAKE);
}

/* ---- registration -------------------------------------------------------------------------------------------------------- */

static void say_unregistered(ring_t *r, int error)
{
	r->fixed_buffers = 0;
	kv_logf(r->nvme->env, KV_LOG_WARN, "nvme",
		"memory is not registered with io_uring (%s; RLIMIT_MEMLOCK?), transfers go on without: more CPU time",
		strerror(error));
}

static int register_piece(ring_t *r, uint32_t index, void *base, size_t bytes)
{
	struct iovec iov = {base, bytes};
	__u64 tag = 0;

	return io_uring_register_buffers_update_tag(&r->uring, index, &iov, &tag, 1);
}

static void forget_piece(void *ring, uint32_t index)
{
	(void)register_piece(ring, index, NULL, 0);
}

/* 1: a region has got a piece more. */
static int register_next(ring_t *r, uint32_t at)
{
	const kvs_region_t *memory = &r->nvme->regions[at];
	kvs_ring_region_t *region = &r->region[at];
	size_t start = (size_t)region->pieces << CHUNK_SHIFT;
	size_t len = memory->bytes - start < (1u << CHUNK_SHIFT) ? memory->bytes - start : 1u << CHUNK_SHIFT;
	int result;

	if (!kvs_region_is_touched(memory->base + start, len, r->touched)) {
		return 0;
	}

	result = register_piece(r, region->first + region->pieces, memory->base + start, len);
	if (result < 0) {
		say_unregistered(r, -result);
		return 0;
	}
	region->pieces++;
	r->open_regions -= region->pieces == region->wanted;

	return 1;
}

/* Regions that have come since: places in the table. */
static void take_regions(ring_t *r)
{
	uint32_t count = atomic_load_explicit(&r->nvme->region_count, memory_order_acquire);

	while (r->fixed_buffers && r->region_count < count) {
		uint64_t pieces = (r->nvme->regions[r->region_count].bytes + (1u << CHUNK_SHIFT) - 1u) >> CHUNK_SHIFT;

		if (pieces > MAX_CHUNKS - r->next_buffer) {
			say_unregistered(r, ENOSPC);
			return;
		}
		r->region[r->region_count++] = (kvs_ring_region_t){.first = r->next_buffer, .wanted = (uint32_t)pieces};
		r->next_buffer += (uint32_t)pieces;
		r->open_regions++;
	}
	r->open_regions += kvs_regions_changed(r->nvme, r->region, &r->region_changes, forget_piece, r);
}

/* One more piece of memory, if one is waiting and has been touched; else look again in a while. Returns 1 when there may be more at once. */
static int register_some(ring_t *r)
{
	uint64_t now;

	take_regions(r);
	if (!r->fixed_buffers || r->open_regions == 0) {
		return 0;
	}
	now = kv_now_ns(r->nvme->env);
	if (now < r->register_after_ns) {
		return 0;
	}
	for (uint32_t i = 0; i < r->region_count && r->fixed_buffers; i++) {
		uint32_t at = (r->region_cursor + i) % r->region_count;

		if (r->region[at].pieces < r->region[at].wanted && register_next(r, at)) {
			r->region_cursor = at;
			return 1;
		}
	}
	r->register_after_ns = now + REGISTER_AGAIN_NS;

	return 0;
}

/* Table index of the piece that holds all of the payload; KVS_NONE: none does. */
static uint32_t find_buffer(const ring_t *r, const kvs_xfer_t *xfer)
{
	const uint8_t *data = xfer->mem.data;
	const kvs_region_t *memory;
	size_t start;
	size_t last;

	if (!r->fixed_buffers || xfer->mem.region >= r->region_count || xfer->cls->header_bytes > HEADER_SMALL) {
		return KVS_NONE;
	}
	memory = &r->nvme->regions[xfer->mem.region];
	if (data < memory->base || (size_t)(data - memory->base) + xfer->cls->payload_bytes > memory->bytes) {
		return KVS_NONE;
	}
	start = (size_t)(data - memory->base);
	last = start + xfer->cls->payload_bytes - 1u;
	if (start >> CHUNK_SHIFT != last >> CHUNK_SHIFT || start >> CHUNK_SHIFT >= r->region[xfer->mem.region].pieces) {
		return KVS_NONE;
	}

	return r->region[xfer->mem.region].first + (uint32_t)(start >> CHUNK_SHIFT);
}

/* 1: requests may name the file by its number. */
static int use_file(ring_t *r, const kvs_xfer_t *xfer)
{
	uint32_t number = kv_slot_slab(xfer->slot);
	int fd = xfer->fd;

	if (!r->file_fd) {
		return 0;
	}
	if (r->file_fd[number] != fd) {
		if (io_uring_register_files_update(&r->uring, number, &fd, 1) != 1) {
			return 0;
		}
		r->file_fd[number] = fd;
	}

	return 1;
}

static void forget_file(ring_t *r, const kvs_xfer_t *xfer)
{
	uint32_t number = kv_slot_slab(xfer->slot);
	int none = -1;

	if (r->file_fd && r->file_fd[number] == xfer->fd) {
		io_uring_register_files_update(&r->uring, number, &none, 1);
		r->file_fd[number] = -1;
	}
}

/* ---- transfers ----------------------------------------------------------------------------------------------------------- */

static void submit_part(ring_t *r, uint32_t at, uint32_t which)
{
	place_t *place = &r->place[at];
	const kvs_xfer_t *xfer = place->xfer;
	part_t *part = &place->part[which];
	struct io_uring_sqe *sqe = take_sqe(r);
	int fixed = use_file(r, xfer);
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
	place->open++;
}

/* Header and payload by one request, which asks the page tables for the memory. */
static part_t vectored(const place_t *place)
{
	const kvs_xfer_t *xfer = place->xfer;

	return (part_t){.iov = {{place->header, xfer->cls->header_bytes}, {xfer->mem.data, xfer->cls->payload_bytes}},
			.count = 2,
			.offset = xfer->offset,
			.buffer = KVS_NONE};
}

static void start(ring_t *r, kvs_xfer_t *xfer)
{
	uint32_t at = r->free_place[--r->free_count];
	place_t *place = &r->place[at];
	uint32_t header_bytes = xfer->cls->header_bytes;
	uint32_t buffer = find_buffer(r, xfer);

	place->xfer = xfer;
	place->error = 0;
	place->open = 0;
	place->header = header_bytes <= HEADER_SMALL ? r->headers + (size_t)at * HEADER_SMALL
						     : r->big_headers + (size_t)at * KVS_SLOTHDR_MAX;
	kvs_xfer_begin(xfer, place->header);
	r->in_flight++;
	place->part[0] = vectored(place);
	if (buffer != KVS_NONE) {
		place->part[0].count = 1;
		place->part[0].buffer = 0;
		place->part[1] = (part_t){.iov = {{xfer->mem.data, xfer->cls->payload_bytes}},
					  .count = 1,
					  .offset = xfer->offset + header_bytes,
					  .buffer = buffer};
		submit_part(r, at, 1);
	}
	submit_part(r, at, 0);
}

static void start_queued(ring_t *r)
{
	while (r->in_flight < r->depth && r->free_count > 0) {
		kvs_xfer_t *xfer = kvs_queue_pop(&r->io->in);

		if (!xfer) {
			return;
		}
		if (xfer->kind == KVS_FORGET) {
			forget_file(r, xfer);
			kvs_xfer_return(r->io, xfer);
			continue;
		}
		start(r, xfer);
	}
}

static void leave(ring_t *r, uint32_t at)
{
	kvs_xfer_t *xfer = r->place[at].xfer;

	r->place[at].xfer = NULL;
	r->free_place[r->free_count++] = at;
	kvs_xfer_return(r->io, xfer);
}

/* The device has let go of all parts. */
static void landed(ring_t *r, uint32_t at)
{
	place_t *place = &r->place[at];

	r->in_flight--;
	if (place->error) {
		kvs_xfer_fail(place->xfer, place->error);
	}
	if (place->error || place->xfer->kind == KVS_STORE) {
		leave(r, at);
		return;
	}
	r->ready[(r->ready_head + r->ready_count++) % r->cap] = at;
}

static void part_done(ring_t *r, uint32_t at, uint32_t which, int result)
{
	place_t *place = &r->place[at];
	part_t *part = &place->part[which];

	place->open--;
	if (result == 0) {
		place->error = place->xfer->kind == KVS_STORE ? EIO : ENODATA;
	} else if (result < 0 && result != -EINTR && result != -EAGAIN) {
		place->error = -result;
	} else {
		/* O_DIRECT goes on at a page only; what lies behind it is moved again. */
		size_t whole = result > 0 ? (size_t)result & ~(size_t)(KVS_PAGE - 1u) : 0;

		part->stalls = whole > 0 ? 0 : part->stalls + 1u;
		kvs_iov_advance(part->iov, &part->count, whole);
		part->offset += whole;
		if (part->count > 0 && part->stalls > MAX_STALLS) {
			place->error = EIO;
		} else if (part->count > 0) {
			submit_part(r, at, which);
		}
	}
	if (place->open == 0) {
		landed(r, at);
	}
}

static void reap(ring_t *r)
{
	struct io_uring_cqe *cqe;
	unsigned head;
	unsigned seen = 0;

	io_uring_for_each_cqe(&r->uring, head, cqe)
	{
		uint64_t data = cqe->user_data;

		if (data == WAKE) {
			kvs_bell_clear(&r->io->bell);
			post_wake(r);
		} else {
			part_done(r, (uint32_t)(data / 2u), (uint32_t)(data % 2u), cqe->res);
		}
		seen++;
	}
	io_uring_cq_advance(&r->uring, seen);
}

/* A client may punch a hole into its slab: then the registration holds pages that nobody sees any more, and the bytes went there. Before a
 * block on disk is called bad it is read again, past the registration. */
static int read_again(ring_t *r, uint32_t at)
{
	place_t *place = &r->place[at];

	if (place->xfer->status != KV_ERR_CORRUPT || place->part[0].buffer == KVS_NONE) {
		return 0;
	}
	place->part[0] = vectored(place);
	r->in_flight++;
	submit_part(r, at, 0);

	return 1;
}

static void verify_some(ring_t *r)
{
	for (uint32_t i = 0; i < VERIFY_BATCH && r->ready_count > 0; i++) {
		uint32_t at = r->ready[r->ready_head];

		r->ready_head = (r->ready_head + 1u) % r->cap;
		r->ready_count--;
		kvs_xfer_verify(r->place[at].xfer, r->place[at].header);
		if (!read_again(r, at)) {
			leave(r, at);
		}
	}
}

/* The kernel would not take the submission: wait a little, and say so when it lasts. Nothing is lost, the entries are submitted again. */
static void refused(ring_t *r, int error)
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

static void turn(ring_t *r)
{
	int result;
	int more;

	start_queued(r);
	more = register_some(r);
	if (r->ready_count > 0) {
		result = io_uring_submit_and_get_events(&r->uring);
		verify_some(r);
	} else {
		kvs_bell_arm(&r->io->bell);
		more |= !kvs_queue_empty(&r->io->in) && r->in_flight < r->depth;
		if (more || atomic_load(&r->io->stop)) {
			result = io_uring_submit_and_get_events(&r->uring);
		} else {
			result = io_uring_submit_and_wait(&r->uring, 1);
		}
		kvs_bell_disarm(&r->io->bell);
	}
	if (result < 0) {
		refused(r, -result);
	} else {
		r->refused_since_ns = 0;
	}
	reap(r);
}

/* ---- open and close ------------------------------------------------------------------------------------------------------ */

static int ring_init(ring_t *r, unsigned entries)
{
	static const unsigned modes[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0};
	int result = -EINVAL;

	for (size_t i = 0; i < KV_COUNT_OF(modes) && result == -EINVAL; i++) {
		struct io_uring_params params = {.flags = modes[i] | IORING_SETUP_CLAMP};

		result = io_uring_queue_init_params(entries, &r->uring, &params);
	}

	return result;
}

static uint8_t *map_headers(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static int ring_memory(ring_t *r)
{
	const kv_env_t *env = r->nvme->env;

	r->place = kv_alloc(env, r->cap * sizeof *r->place);
	r->free_place = kv_alloc(env, r->cap * sizeof *r->free_place);
	r->ready = kv_alloc(env, r->cap * sizeof *r->ready);
	r->region = kv_alloc(env, KVS_MAX_REGIONS * sizeof *r->region);
	r->touched = kv_alloc(env, (1u << CHUNK_SHIFT) / KVS_PAGE);
	r->headers = map_headers((size_t)r->cap * HEADER_SMALL);
	r->big_headers = map_headers((size_t)r->cap * KVS_SLOTHDR_MAX);
	if (!r->place || !r->free_place || !r->ready || !r->region || !r->touched || !r->headers || !r->big_headers) {
		return -ENOMEM;
	}
	for (uint32_t i = 0; i < r->cap; i++) {
		r->free_place[r->free_count++] = i;
	}

	return 0;
}

static void ring_register(ring_t *r)
{
	int result = io_uring_register_buffers_sparse(&r->uring, MAX_CHUNKS);

	r->fixed_buffers = result == 0;
	if (result == 0) {
		result = register_piece(r, 0, r->headers, (size_t)r->cap * HEADER_SMALL);
		r->next_buffer = 1;
	}
	if (result < 0) {
		say_unregistered(r, -result);
	}
	if (io_uring_register_files_sparse(&r->uring, KVS_MAX_FILES + 1u) == 0) {
		/* The kernel finishes a dead process's writes. With the lock among the ring's files it is held until that has happened, so
		 * that the next daemon cannot write a slot before an old write to it has landed. */
		io_uring_register_files_update(&r->uring, KVS_MAX_FILES, &r->nvme->lock_fd, 1);
		r->file_fd = kv_alloc(r->nvme->env, KVS_MAX_FILES * sizeof *r->file_fd);
	}
	for (uint32_t i = 0; r->file_fd && i < KVS_MAX_FILES; i++) {
		r->file_fd[i] = -1;
	}
}

static void ring_free(ring_t *r)
{
	const kv_env_t *env = r->nvme->env;

	kv_free(env, r->file_fd);
	if (r->headers) {
		munmap(r->headers, (size_t)r->cap * HEADER_SMALL);
	}
	if (r->big_headers) {
		munmap(r->big_headers, (size_t)r->cap * KVS_SLOTHDR_MAX);
	}
	kv_free(env, r->touched);
	kv_free(env, r->region);
	kv_free(env, r->ready);
	kv_free(env, r->free_place);
	kv_free(env, r->place);
}

static void announce(kvs_io_t *io, int result)
{
	atomic_store(&io->ready, result);
	kvs_bell_ring(&io->nvme->owner);
}

void *kvs_uring_main(void *arg)
{
	kvs_io_t *io = arg;
	kvs_nvme_t *nvme = io->nvme;
	ring_t r = {.io = io, .nvme = nvme, .depth = nvme->config.queue_depth, .cap = nvme->config.queue_depth * 2u};
	int result = ring_memory(&r);

	if (result == 0) {
		result = ring_init(&r, r.cap * 2u + 2u);
	}
	if (result != 0) {
		ring_free(&r);
		announce(io, result);
		return NULL;
	}

	ring_register(&r);
	post_wake(&r);
	announce(io, 1);
	while (!atomic_load(&io->stop) || r.in_flight > 0 || r.ready_count > 0 || !kvs_queue_empty(&io->in)) {
		turn(&r);
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
