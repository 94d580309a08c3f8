/* What the ring thread makes known to the kernel: memory in pieces, when somebody has touched them, and files by their
 * number. */
#include "uring.h"

#include <string.h>

#define MAX_CHUNKS        16384u        /* the kernel's limit for a table */
#define REGISTER_AGAIN_NS 50000000ull   /* when nothing more had been touched: looked at again after this, */
#define REGISTER_MOST_NS  1600000000ull /* then less and less often */

static void log_unregistered(kvs_ring_t *r, int error)
{
	r->fixed_buffers = 0;
	kv_logf(r->nvme->env, KV_LOG_WARN, "nvme",
		"memory is not registered with io_uring (%s; RLIMIT_MEMLOCK?), transfers go on without: more CPU time",
		strerror(error));
}

static int register_piece(kvs_ring_t *r, uint32_t index, void *base, size_t bytes)
{
	struct iovec iov = {base, bytes};
	__u64 tag = 0;

	return io_uring_register_buffers_update_tag(&r->uring, index, &iov, &tag, 1);
}

static void unregister_piece(void *ring, uint32_t index)
{
	(void)register_piece(ring, index, NULL, 0);
}

/* 1: a region has got a piece more. */
static int register_next_piece(kvs_ring_t *r, uint32_t at)
{
	const kvs_region_t *memory = &r->nvme->regions[at];
	kvs_ring_region_t *region = &r->region[at];
	size_t start = (size_t)region->pieces << KVS_PIECE_SHIFT;
	size_t len = memory->bytes - start < (1u << KVS_PIECE_SHIFT) ? memory->bytes - start : 1u << KVS_PIECE_SHIFT;
	int result;

	if (!kvs_region_is_touched(memory->base + start, len, r->touched)) {
		return 0;
	}

	result = register_piece(r, region->first + region->pieces, memory->base + start, len);
	if (result < 0) {
		log_unregistered(r, -result);
		return 0;
	}
	region->pieces++;
	r->open_regions -= region->pieces == region->wanted;

	return 1;
}

/* Regions that have come since: places in the table. */
static void apply_new_regions(kvs_ring_t *r)
{
	/* In this order: every change among these is of a region below `count`. */
	uint32_t changes = atomic_load_explicit(&r->nvme->region_changes, memory_order_acquire);
	uint32_t count = atomic_load_explicit(&r->nvme->region_count, memory_order_acquire);
	uint32_t open = r->open_regions;

	while (r->fixed_buffers && r->region_count < count) {
		uint64_t pieces =
			(r->nvme->regions[r->region_count].bytes + (1u << KVS_PIECE_SHIFT) - 1u) >> KVS_PIECE_SHIFT;

		if (pieces > MAX_CHUNKS - r->next_buffer) {
			log_unregistered(r, ENOSPC);
			return;
		}
		r->region[r->region_count++] = (kvs_ring_region_t){.first = r->next_buffer, .wanted = (uint32_t)pieces};
		r->next_buffer += (uint32_t)pieces;
		r->open_regions++;
	}
	if (changes != r->region_changes) {
		r->open_regions += kvs_apply_region_changes(r->nvme, r->region, count, unregister_piece, r);
		r->region_changes = changes;
	}
	if (r->open_regions > open) {
		r->register_after_ns = r->register_wait_ns = 0;
	}
}

int kvs_ring_has_region_changes(const kvs_ring_t *r)
{
	return atomic_load(&r->nvme->region_changes) != r->region_changes ||
	       (r->fixed_buffers && atomic_load(&r->nvme->region_count) > r->region_count);
}

int kvs_ring_register_next_piece(kvs_ring_t *r)
{
	uint64_t now;

	apply_new_regions(r);
	if (!r->fixed_buffers || r->open_regions == 0 || r->loads + r->ready_count > 0) {
		return 0;
	}
	now = kv_now_ns(r->nvme->env);
	if (now < r->register_after_ns) {
		return 0;
	}
	for (uint32_t i = 0; i < r->region_count && r->fixed_buffers; i++) {
		uint32_t at = (r->region_cursor + i) % r->region_count;

		if (r->region[at].pieces < r->region[at].wanted && register_next_piece(r, at)) {
			r->region_cursor = at;
			r->register_wait_ns = 0;
			return 1;
		}
	}
	r->register_wait_ns = r->register_wait_ns ? 2 * r->register_wait_ns : REGISTER_AGAIN_NS;
	r->register_wait_ns = r->register_wait_ns < REGISTER_MOST_NS ? r->register_wait_ns : REGISTER_MOST_NS;
	r->register_after_ns = now + r->register_wait_ns;

	return 0;
}

uint32_t kvs_ring_find_buffer(const kvs_ring_t *r, const kvs_xfer_t *xfer)
{
	const uint8_t *data = xfer->mem.data;
	const kvs_region_t *memory;
	size_t start;
	size_t last;

	if (!r->fixed_buffers || xfer->mem.region >= r->region_count || xfer->cls->header_bytes > KVS_HEADER_SMALL) {
		return KVS_NONE;
	}
	memory = &r->nvme->regions[xfer->mem.region];
	if (data < memory->base || (size_t)(data - memory->base) + xfer->cls->payload_bytes > memory->bytes) {
		return KVS_NONE;
	}
	start = (size_t)(data - memory->base);
	last = start + xfer->cls->payload_bytes - 1u;
	if (start >> KVS_PIECE_SHIFT != last >> KVS_PIECE_SHIFT ||
	    start >> KVS_PIECE_SHIFT >= r->region[xfer->mem.region].pieces) {
		return KVS_NONE;
	}

	return r->region[xfer->mem.region].first + (uint32_t)(start >> KVS_PIECE_SHIFT);
}

int kvs_ring_register_file(kvs_ring_t *r, const kvs_xfer_t *xfer)
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

void kvs_ring_unregister_file(kvs_ring_t *r, const kvs_xfer_t *xfer)
{
	uint32_t number = kv_slot_slab(xfer->slot);
	int none = -1;

	if (r->file_fd && r->file_fd[number] == xfer->fd) {
		io_uring_register_files_update(&r->uring, number, &none, 1);
		r->file_fd[number] = -1;
	}
}

void kvs_ring_register_tables(kvs_ring_t *r)
{
	int result = io_uring_register_buffers_sparse(&r->uring, MAX_CHUNKS);

	r->fixed_buffers = result == 0;
	if (result == 0) {
		result = register_piece(r, 0, r->headers, (size_t)r->cap * KVS_HEADER_SMALL);
		r->next_buffer = 1;
	}
	if (result < 0) {
		log_unregistered(r, -result);
	}
	if (io_uring_register_files_sparse(&r->uring, KVS_MAX_FILES + 1u) == 0) {
		/* The kernel finishes a dead process's writes. With the lock among the ring's files it is held until
		 * that has happened, so that the next daemon cannot write a slot before an old write to it has
		 * landed. */
		io_uring_register_files_update(&r->uring, KVS_MAX_FILES, &r->nvme->lock_fd, 1);
		r->file_fd = kv_alloc(r->nvme->env, KVS_MAX_FILES * sizeof *r->file_fd);
	}
	for (uint32_t i = 0; r->file_fd && i < KVS_MAX_FILES; i++) {
		r->file_fd[i] = -1;
	}
}
