/* storage/nvme/io/xfer.h -- one transfer, and what both kinds of I/O thread do with it. */
#ifndef KVS_NVME_IO_XFER_H
#define KVS_NVME_IO_XFER_H

#include "nvme/format/slothdr.h"
#include "nvme/io/queue.h"

#include <pthread.h>
#include <sys/uio.h>

#define KVS_NONE UINT32_MAX

/* What the superblock says of a class that has another one's number. */
typedef enum kvs_record_state { KVS_RECORD_WRITTEN, KVS_RECORD_CHANGED, KVS_RECORD_IN_ROUND } kvs_record_state_t;

typedef struct kvs_dclass {
	/* constant while the class has files; I/O threads read these */
	kvs_geometry_t geometry;
	uint32_t id;
	uint32_t header_bytes;
	uint32_t payload_bytes; /* rounded up to pages */
	uint32_t slots_per_file;
	uint64_t stride;
	/* the owner's */
	kv_slot_t free_head;
	kv_slot_t free_tail;
	uint64_t free_count;
	uint64_t files;
	uint8_t is_used;  /* the tier's user has it open, or blocks of it */
	uint8_t is_named; /* by a file that is there and not one of `files` */
	uint8_t record;   /* kvs_record_state_t */
} kvs_dclass_t;

/* FORGET: the file is going away, the ring lets go of its registration. */
typedef enum kvs_xfer_kind { KVS_LOAD, KVS_STORE, KVS_UNREGISTER_FILE } kvs_xfer_kind_t;

typedef struct kvs_xfer {
	kvs_done_fn done;
	void *arg;
	const kvs_dclass_t *cls;
	kvs_mem_t mem;
	kvs_meta_t meta; /* store: for the header; load: key and group expected */
	uint64_t incarnation;
	uint64_t offset;
	uint64_t digest; /* out, store: of the block */
	uint64_t start_ns;
	kv_slot_t slot;
	uint32_t gen;
	uint32_t flush_round;  /* store: which flush waits for it */
	uint32_t failed_syncs; /* store: before it began */
	uint32_t next;         /* free list */
	int fd;
	kvs_xfer_kind_t kind;
	int busy;           /* taken, not given back */
	int error;          /* out: errno of the device, 0 */
	kv_status_t status; /* out */
} kvs_xfer_t;

/* One I/O thread. */
typedef struct kvs_io {
	struct kvs_nvme *nvme;
	pthread_t thread;
	int started;
	kvs_queue_t in;
	kvs_queue_t out;
	kvs_wakeup_t wakeup;
	_Atomic int stop;
	_Atomic int ready;  /* io_uring: 1 running, negative: errno of the refusal */
	uint32_t unflushed; /* the owner's: pushed since the last wakeup */
	void *ring;         /* kvs_ring_t of nvme/io/uring.c */
} kvs_io_t;

/* Store: write the header into `header`. */
void kvs_xfer_prepare(kvs_xfer_t *xfer, void *header);
/* The bytes are in: check them. Sets xfer->status. */
void kvs_xfer_verify(kvs_xfer_t *xfer, void *header);
/* Turn an errno into xfer->status and xfer->error. */
void kvs_xfer_set_error(kvs_xfer_t *xfer, int error);
/* Hand it back to the owner. kvs_xfer_wake_owner() then wakes the owner if it sleeps; one wakeup may do for several. */
void kvs_xfer_return(kvs_io_t *io, kvs_xfer_t *xfer);
void kvs_xfer_wake_owner(kvs_io_t *io);
/* Drop `done` bytes from the front of iov[*p_count]. */
void kvs_iov_advance(struct iovec *iov, uint32_t *p_count, size_t done);

#endif
