/* step/message.h -- what the scheduler half tells the ranks in a step, and what they report back.
 *
 * Both halves are built from one source and run on one machine; the bytes are still checked on arrival, and a message
 * that is not sound is counted and ignored. Integers are in native order. A message is a header and records, each
 * aligned to 8 bytes; a report likewise.
 *
 *   SPACE   number, weights, adapter    numbers the space of an adapter, or with an empty one of the base model, under
 *                                       a name of the weights; a number may come again with other texts
 *   GPU_MEM mem, text                   UUID of the GPU whose memory has another space for each of these; a rank that
 *                                       can load from another engine's GPU says so (REACHED)
 *   FENCE   block ids                   allocated in this step: what saves still have to read of them is read first
 *   LOAD    load id, request id, parts  lease handle, first block in the lease, ids to write to; a part for each group,
 *                                       or two: its first blocks from a space in GPU memory, then the others
 *   SAVE    put handle, block ids       id i is block i of the put; KVX_NO_BLOCK: it is stored already
 *   DROP    load id                     the request is gone: end the load early. It is still finished and reported
 *   TIME                                report what this step takes the rank (STEP)
 *   WORK    tokens, microseconds        what the step computes; without it, single tokens or nothing
 *
 * A part of a LOAD names all blocks the engine counts on: n of them from index `first` on. The lease may cover fewer:
 * blocks at or beyond kvc_lease_n() have no bytes. It may cover none (lease.incarnation 0), and the whole load may have
 * no lease (KVX_MSG_NO_LEASE). A rank reports every wanted id without bytes as failed. Every rank reports a load once.
 *
 * A load whose blocks another instance still computes comes in pieces: each is a LOAD of its own, of the same request,
 * and has its own id, lease and report. All but the last have KVX_MSG_MORE: a rank names the request as finished after
 * the last piece, when the pieces before it have ended too. Only a space of one group has pieces.
 *
 * A SAVE with KVX_MSG_COMPLETE is of blocks complete before this step: it is submitted before the fences of the same
 * message; others at the end of the step. `step` of a SAVE is the step that computes its blocks: a rank drops the SAVE
 * (DROPPED) if a synchronous load of that step, or of the one before it, has failed there. */
#ifndef KVX_MESSAGE_H
#define KVX_MESSAGE_H

#include "kvx_scheduler.h"

#define KVX_MSG_MAGIC     0x314e4c50u /* "PLN1" */
#define KVX_REPORT_MAGIC  0x31545052u /* "RPT1" */
#define KVX_MAX_ID        256u        /* bytes of a request id */
#define KVX_MSG_BYTES_MAX (64u << 20)

typedef struct kvx_msg_header {
	uint32_t magic;
	uint32_t bytes; /* of the whole, header included */
	uint32_t records;
	uint32_t step; /* number of the step, wraps */
} kvx_msg_header_t;

typedef enum kvx_record {
	KVX_RECORD_SPACE = 1,
	KVX_RECORD_FENCE = 2,
	KVX_RECORD_LOAD = 3,
	KVX_RECORD_SAVE = 4,
	KVX_RECORD_DROP = 5,
	KVX_RECORD_TIME = 6,
	KVX_RECORD_WORK = 7,
	KVX_RECORD_GPU_MEM = 8,
	KVX_RECORD_LOADED = 16,  /* report */
	KVX_RECORD_DROPPED = 17, /* report */
	KVX_RECORD_STEP = 18,    /* report */
	KVX_RECORD_REACHED = 19  /* report */
} kvx_record_t;

/* In front of every record; `bytes` counts from here to the next record and is a multiple of 8. */
typedef struct kvx_record_header {
	uint32_t type; /* kvx_record_t */
	uint32_t bytes;
} kvx_record_header_t;

#define KVX_MSG_ASYNC    1u  /* LOAD: asynchronous */
#define KVX_MSG_NO_LEASE 2u  /* LOAD: no lease */
#define KVX_MSG_COMPLETE 4u  /* SAVE: complete before this step */
#define KVX_MSG_MORE     8u  /* LOAD: asynchronous, and another piece of the request's load follows */
#define KVX_MSG_GPU_MEM  16u /* SAVE: into the space in memory of the engine's own GPU */
#define KVX_MSG_URGENT   32u /* SAVE with KVX_MSG_GPU_MEM: another engine waits for it */

/* Where the blocks of a part or a put are: host memory or disk; memory of the engine's own GPU; from KVX_OWN_MEM + 1
 * on, memory of GPUs of other engines, numbered as DEVICE records name them. */
enum { KVX_HOST_MEM = 0, KVX_OWN_MEM = 1, KVX_MEMS = 9 };

typedef struct kvx_msg_space {
	kvx_record_header_t h;
	uint32_t number;
	uint32_t weights_len, adapter_len; /* both texts follow, no NUL */
	uint32_t reserved;
} kvx_msg_space_t;

typedef struct kvx_msg_gpu_mem {
	kvx_record_header_t h;
	uint32_t text_len; /* text follows, no NUL */
	uint32_t mem;      /* not KVX_HOST_MEM */
} kvx_msg_gpu_mem_t;

typedef struct kvx_msg_fence {
	kvx_record_header_t h;
	uint32_t n; /* u32 ids follow; 0: of all blocks */
	uint32_t reserved;
} kvx_msg_fence_t;

typedef struct kvx_msg_load {
	kvx_record_header_t h;
	uint64_t load;  /* id, never 0 */
	uint32_t space; /* number */
	uint32_t flags;
	uint32_t timeout_ms;
	uint32_t parts;
	uint32_t id_len; /* request id follows, padded to 8; then the parts */
	uint32_t reserved;
} kvx_msg_load_t;

typedef struct kvx_msg_part {
	uint32_t group;
	uint32_t n;     /* blocks; u32 ids follow the part, padded to 8; KVX_NO_BLOCK: not wanted */
	uint32_t first; /* index in the prefix of the first of them, as in kvc_lease_block() */
	uint32_t mem;   /* whose lease it is */
	kvc_handle_t lease;
} kvx_msg_part_t;

typedef struct kvx_msg_save {
	kvx_record_header_t h;
	uint32_t space, group, flags;
	uint32_t n;    /* u32 ids follow, padded to 8 */
	uint32_t step; /* header.step of the step that computes the last of these blocks */
	uint32_t reserved;
	kvc_handle_t put;
} kvx_msg_save_t;

typedef struct kvx_msg_drop {
	kvx_record_header_t h;
	uint64_t load;
} kvx_msg_drop_t;

typedef struct kvx_msg_time {
	kvx_record_header_t h;
} kvx_msg_time_t;

typedef struct kvx_msg_work {
	kvx_record_header_t h;
	uint32_t longest; /* most tokens that one of its requests computes */
	uint32_t us;      /* about; 0: not known */
} kvx_msg_work_t;

/* A load has ended on this rank. */
typedef struct kvx_report_loaded {
	kvx_record_header_t h;
	uint64_t load;
	int32_t status;  /* kvc_status_t: OK, or why not all came */
	uint32_t blocks; /* loaded, over all parts */
	uint64_t bytes;
	uint64_t ns; /* from begin to end; for a cache in GPU memory the device's time, without the work before the load
		      */
} kvx_report_loaded_t;

/* A save was given up on this rank. */
typedef struct kvx_report_dropped {
	kvx_record_header_t h;
	uint64_t put; /* id */
} kvx_report_dropped_t;

/* This rank has mapped that mem, which is another engine's GPU, and can load from there. Once. */
typedef struct kvx_report_reached {
	kvx_record_header_t h;
	uint32_t mem;
	uint32_t reserved;
} kvx_report_reached_t;

/* The time of a step, if TIME asked for it: from the end of begin_step(), or of run_sync_loads() if it loads, to
 * end_step(), by the clock of what computes. Not sent for a step that computes while it loads. */
typedef struct kvx_report_step {
	kvx_record_header_t h;
	uint32_t step; /* header.step of its message */
	uint32_t reserved;
	uint64_t ns;
} kvx_report_step_t;

/* Records and their arrays begin at multiples of eight bytes. */
static inline size_t kvx_padded(size_t len)
{
	return (len + 7u) & ~(size_t)7u;
}

/* Writing. Grows as needed; after a failed allocation the message comes out empty. */
typedef struct kvx_msg_buf {
	uint8_t *data;
	size_t len, cap;
	size_t record; /* offset of the record just started */
	uint32_t magic, records;
	int failed;
} kvx_msg_buf_t;
/* Reserve memory for that many bytes more, so that adding them cannot fail. 0: there is none. */
int kvx_msg_reserve(kvx_msg_buf_t *bytes, size_t more);
/* Start the next message. The bytes of the last one stay as they are until a record is added or memory reserved. */
void kvx_msg_reset(kvx_msg_buf_t *bytes, uint32_t magic);
/* Start a record of `size` zeroed bytes; its address until the next call, or NULL. */
void *kvx_msg_add_record(kvx_msg_buf_t *bytes, uint32_t type, size_t size);
/* Append one array or struct to the record just started, padded to 8; data NULL: zeros. Its address until the next
 * call, or NULL. */
void *kvx_msg_append(kvx_msg_buf_t *bytes, const void *data, size_t len);
/* Fill in the lengths. Afterwards len is 0 if an allocation has failed or there are no records. */
void kvx_msg_finish(kvx_msg_buf_t *bytes, uint32_t step);
void kvx_msg_free(kvx_msg_buf_t *bytes);

/* Reading: the next record, or NULL at the end or at the first that does not fit (then bad is 1). A record has its
 * fixed size, and the arrays it announces lie inside `bytes`: at most KVX_MAX_GROUPS parts, a known mem, an id of 1
 * to KVX_MAX_ID bytes, first + n below 2^32. The reader checks groups and block ids against its own tables. */
typedef struct kvx_msg_reader {
	const uint8_t *at, *end;
	uint32_t magic, left;
	int bad;
} kvx_msg_reader_t;
/* 0: not such a message, or not aligned to 8 bytes. */
int kvx_msg_open(kvx_msg_reader_t *cursor, uint32_t magic, const void *bytes, size_t len);
const kvx_record_header_t *kvx_msg_next(kvx_msg_reader_t *cursor);
/* The arrays behind a record that kvx_msg_next() has returned. */
const char *kvx_msg_space_weights(const kvx_msg_space_t *space);
const char *kvx_msg_space_adapter(const kvx_msg_space_t *space);
const char *kvx_msg_gpu_mem_text(const kvx_msg_gpu_mem_t *device);
const uint32_t *kvx_msg_fence_ids(const kvx_msg_fence_t *fence);
const char *kvx_msg_load_id(const kvx_msg_load_t *load);
const kvx_msg_part_t *kvx_msg_part_first(const kvx_msg_load_t *load);
const kvx_msg_part_t *kvx_msg_part_next(const kvx_msg_part_t *part);
const uint32_t *kvx_msg_part_ids(const kvx_msg_part_t *part);
const uint32_t *kvx_msg_save_ids(const kvx_msg_save_t *save);

#endif
