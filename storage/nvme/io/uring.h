/* storage/nvme/io/uring.h -- inside the ring thread: its state, and what it makes known to the kernel (memory, files).
 */
#ifndef KVS_NVME_IO_URING_H
#define KVS_NVME_IO_URING_H

#include "nvme/nvme.h"

#include <liburing.h>

#define KVS_HEADER_SMALL 8192u /* registered header buffers; bigger headers go vectored */

typedef struct kvs_part {
	struct iovec iov[2];
	uint32_t count;
	uint32_t stalls;
	uint64_t offset;
	uint32_t buffer; /* in the ring's table; KVS_NONE: vectored */
} kvs_part_t;

/* A transfer in the ring's hands. */
typedef struct kvs_ring_entry {
	kvs_xfer_t *xfer;
	uint8_t *header;
	kvs_part_t part[2];
	uint32_t open; /* parts in flight */
	int error;
} kvs_ring_entry_t;

typedef struct kvs_ring {
	struct io_uring uring;
	kvs_io_t *io;
	kvs_nvme_t *nvme;
	kvs_ring_entry_t *entry;
	uint32_t *free_entry;
	uint32_t *ready; /* ring of entries with loads to check */
	uint32_t cap;    /* entries: twice the depth, so that checking does not idle the device */
	uint32_t depth;
	uint32_t free_count;
	uint32_t ready_head;
	uint32_t ready_count;
	uint32_t in_flight;
	uint32_t loads;       /* of those in flight */
	uint32_t unannounced; /* handed back since the owner was woken */
	int wake;             /* wake it now */
	int batches;          /* the kernel can wait for several with a limit of time */
	int store_waited;     /* that limit was reached: now for the next one, however long */
	uint8_t *headers;
	uint8_t *big_headers;
	int *file_fd; /* registered by file number; -1: not. NULL: no registered files */
	int fixed_buffers;
	uint32_t next_buffer;
	uint32_t region_count;
	uint32_t open_regions; /* with pieces not registered yet */
	uint32_t region_cursor;
	uint64_t register_after_ns;
	uint64_t register_wait_ns;
	kvs_ring_region_t *region;
	uint32_t region_changes; /* seen */
	unsigned char *touched;  /* for mincore(): a byte a page of a piece */
	uint64_t refused_since_ns;
	int refusal_said;
} kvs_ring_t;

/* ---- uring_register.c ------------------------------------------------------------------------ */
/* Tables for memory and files; without them transfers go on, at more cost. */
void kvs_ring_register_tables(kvs_ring_t *r);
/* One more piece of memory, if one is waiting and has been touched; else look again in a while. Not while somebody
 * waits for loads: pinning takes milliseconds. Returns 1 when there may be more at once. */
int kvs_ring_register_next_piece(kvs_ring_t *r);
/* 1: the owner has told of memory that has come or goes since kvs_ring_register_next_piece() looked. */
int kvs_ring_has_region_changes(const kvs_ring_t *r);
/* Table index of the piece that holds all of the payload; KVS_NONE: none does. */
uint32_t kvs_ring_find_buffer(const kvs_ring_t *r, const kvs_xfer_t *xfer);
/* 1: requests may name the file by its number. */
int kvs_ring_register_file(kvs_ring_t *r, const kvs_xfer_t *xfer);
void kvs_ring_unregister_file(kvs_ring_t *r, const kvs_xfer_t *xfer);

#endif
