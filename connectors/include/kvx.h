/* kvx.h -- libkvx: what an engine needs of kvd, in two verbs: load the cached prefix of a prompt into its paged cache,
 * save what it has computed.
 *
 * The promise to the engine. Nothing here fails in a way the engine must handle: whatever goes wrong (no daemon, a dead
 * or stopped daemon, an evicted or damaged block, a deadline) is a miss and a counter, and the engine computes what it
 * did not get. A load says how many tokens are in the cache, verified; tokens beyond them are the engine's to compute.
 * No call waits longer than its deadline. The engine may start before the daemon and outlives it: re-attaching happens
 * in kvx_poll().
 *
 *   kvx_load_prefix  .. kvx_poll .. kvx_load_state   until not PENDING   kvx_load_end
 *   kvx_save_prefix  .. kvx_poll .. kvx_save_state   until not PENDING   kvx_save_end
 *
 * Engine blocks. A thread of the library copies while the engine computes. A load writes the blocks it was given until
 * its state is no longer PENDING or kvx_load_end() has returned. A save reads its blocks until its result says `copied`
 * or kvx_save_end() has returned. Then they are the engine's again. Ending a load early waits for the few blocks that
 * are being copied; ending a save early may read what it has not read yet.
 *
 * A cache in GPU memory (kvx_config_t.devices). All that the engine enqueues on a device and that touches its cache is
 * on the stream that kvx_device_t names, or events order it before or after what is there. The rules above then hold in
 * the stream's order, and the engine need not wait for the device before a call:
 *
 *   A load writes its blocks after what the stream has when kvx_load_prefix() is called. When its state is no longer
 *   PENDING, the bytes are there: what is enqueued from then on may read and write the blocks.
 *   A save reads its blocks after what the stream has when kvx_save_prefix() is called. When its result says `copied`
 *   or kvx_save_end() has returned, what is enqueued from then on may write the blocks; what the library still reads of
 *   a save that is ended early comes before it.
 *
 * Of all calls only the states may be made while the stream is being captured. A device that fails is a miss and a
 * counter, as a daemon is. Ending a load waits for a device that hangs.
 *
 * Before the first load the connector tests itself: it stores a block in a space of its own, loads it back in this
 * cache's exact layout and compares; a device copies as it will for the engine. Until that has passed every load is a
 * miss; when the bytes differ it stays so for good.
 *
 * kvx_handover.h hands a prompt to another engine that waits for it.
 *
 * It is a front of the two halves of a connector, kvx_scheduler.h and kvx_worker.h, for an engine without ranks.
 *
 * Of kvk/layout.h the types and limits are for callers; its functions are the library's own and not exported.
 *
 * Threads. A kvx_t and all made from it belong to one thread at a time. Not fork-safe: a child must not call any
 * function. Tokens are ids below 0xFFFFFFFF; a block is block_tokens of the layout.
 *
 * ABI. As in kvc.h: the caller sets struct_size to its sizeof before every call, also in results; where it is
 * not set the call answers KVC_ERR_ARG, kvx_load_prefix() and kvx_recv() a miss with it as the cause.
 */
#ifndef KVX_H
#define KVX_H

#include "kvc.h"
#include "kvk/layout.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_API KVC_API

/* The number in libkvx's soname (libkvx.so.1); it changes as KVC_ABI_VERSION does. */
#define KVX_ABI_VERSION 1

typedef struct kvx kvx_t;
typedef struct kvx_load kvx_load_t;
typedef struct kvx_save kvx_save_t;

/* What this process does: saves, loads, or both. The other verb then answers KVC_MISS at once. */
enum { KVX_PRODUCER = 1, KVX_CONSUMER = 2, KVX_BOTH = 3 };

#define KVX_LOAD_MS      2000u                /* default of load_ms */
#define KVX_SAVE_MS      10000u               /* default of save_ms */
#define KVX_ATTACH_MS    2000u                /* default of attach_ms */
#define KVX_BUFFER_BYTES UINT64_C(1000000000) /* default of buffer_bytes */
#define KVX_JOBS         256u                 /* most loads, saves, sends and receives at one time */
#define KVX_MAX_PARTS    16u                  /* most parts of a cache */

struct kvk_cuda_ops;

/* A CUDA device, as this process sees it, in its primary context. */
typedef struct kvx_device {
	int ordinal;
	void *stream; /* CUstream of all work on the cache (above); it outlives the kvx_t. NULL: the legacy default
			 stream */
	const struct kvk_cuda_ops *cuda; /* driver; NULL: the machine's */
	const void *image;               /* kernels for copies; NULL: those of this build */
} kvx_device_t;

typedef struct kvx_config {
	size_t struct_size;
	uint32_t roles;                 /* KVX_PRODUCER | KVX_CONSUMER */
	const char *socket;             /* NULL: $KVD_SOCKET, else /run/kvd/default.sock */
	const char *program;            /* shown by kvctl; NULL: the process name */
	const kvc_identity_t *identity; /* who may share these blocks; `layout`, `hash_tokens` and `groups` in it are
					   ignored: kvx fills them in */
	const kvk_layout_t *layout;     /* of the pool block */
	const kvk_paged_t *paged;       /* the engine's cache: all heads and layers of the layout, or its parts (below);
					   its memory stays the engine's and outlives the kvx_t */
	uint32_t load_ms;               /* deadline of a load that names none; 0: KVX_LOAD_MS */
	uint32_t save_ms;               /* deadline of a save that names none; 0: KVX_SAVE_MS */
	uint32_t attach_ms; /* kvx_attach() waits this long for daemon and self-test; 0: KVX_ATTACH_MS, UINT32_MAX: not
			       at all */
	uint64_t buffer_bytes; /* that kvx_insert() keeps for consumers; 0: KVX_BUFFER_BYTES */
	/* paged[parts] (0: one) of a cache in parts, as tensor parallel ranks in one process have it: each has all
	 * layers and as many blocks as the others, with the heads that it says. Together they have all heads of the
	 * layout; parts with the same heads are copies. A block id names that block of every part. */
	uint32_t parts;
	/* devices[parts] (0 parts: one): the device whose memory paged[i].base[] are addresses of; two parts may have
	 * the same. NULL: the cache is in host memory. */
	const kvx_device_t *devices;
} kvx_config_t;

/* Attach. A daemon that is absent, or comes to nothing within attach_ms, is no error: all is a miss until kvx_poll()
 * finds it. KVC_ERR_ARG: the configuration contradicts itself, a device cannot be used, or a cache
 * is not in its memory (kvx_last_error() names the field, or says why). KVC_ERR_NOMEM. */
KVX_API kvc_status_t kvx_attach(const kvx_config_t *config, kvx_t **p_kvx);
/* Abort what is in progress, detach, free everything made from it. NULL is fine. */
KVX_API void kvx_detach(kvx_t *kvx);
/* Why the last kvx_attach() on this thread was refused; never NULL. */
KVX_API const char *kvx_last_error(void);

/* Move loads and saves on, re-attach when due. Wait up to timeout_ms (0: not at all) until a load or save has ended.
 * Returns the number of loads, saves, sends and receives still PENDING; a send is until its last
 * chunk was handed over. */
KVX_API uint32_t kvx_poll(kvx_t *kvx, uint32_t timeout_ms);
/* 1: attached and the self-test has passed. */
KVX_API int kvx_is_ready(const kvx_t *kvx);

/* A prefix of a sequence and where it lies in the paged cache. Nothing of it is borrowed after the call. */
typedef struct kvx_prefix {
	size_t struct_size;
	const uint32_t *tokens;
	uint32_t n_tokens;      /* whole blocks of them are used: n_tokens / block_tokens */
	const uint32_t *blocks; /* paged block ids; at least n_tokens / block_tokens */
	uint32_t skip; /* load: the first `skip` blocks are in the cache already and are not touched; save: ignored */
	const char *salt;     /* isolates callers who must not share; NULL: none */
	uint32_t deadline_ms; /* 0: the configuration's */
	const char *peer;     /* kvx_recv() only: the producer is on the node of this peer of the daemon (its option
				 peers.addresses), and whole blocks come from there; NULL: on this node */
} kvx_prefix_t;

/* ---- load ------------------------------------------------------------------------------------ */

typedef struct kvx_load_result {
	size_t struct_size;
	kvc_status_t status; /* PENDING; OK: at least one block beyond skip; MISS: none */
	kvc_status_t cause;  /* why it ended before the whole prefix was there: MISS, TIMEOUT, CORRUPT, REVOKED, CLOSED,
				...; OK: it was */
	uint32_t blocks;     /* verified blocks, skip included */
	uint32_t tokens;     /* the same in tokens: compute from here */
	uint32_t cpu_tokens; /* loaded from CPU memory, skip not included */
	uint32_t disk_tokens;    /* loaded from disk */
	uint32_t why;            /* KVC_WHY_* of the first block that was not there */
	kvc_key_t first_missing; /* its key; zero when none */
	uint64_t match_ns, load_ns;
} kvx_load_result_t;

/* Look the prefix up and start to load it. KVC_PENDING: *p_load is the job. KVC_MISS: nothing is there (*p_load is
 * NULL): compute. There is no other answer. *result (may be NULL) is set in both cases: of a miss it says why. */
KVX_API kvc_status_t kvx_load_prefix(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_load_t **p_load,
				     kvx_load_result_t *result);
/* How far it is; result may be NULL. Returns result->status. */
KVX_API kvc_status_t kvx_load_state(const kvx_load_t *load, kvx_load_result_t *result);
/* Abort (if PENDING) and free. NULL is fine. */
KVX_API void kvx_load_end(kvx_load_t *load);

/* ---- save ------------------------------------------------------------------------------------ */

typedef struct kvx_save_result {
	size_t struct_size;
	kvc_status_t status; /* PENDING; OK: all blocks are visible; else why some are not */
	int copied;          /* 1: the engine's blocks are no longer read */
	uint32_t blocks;     /* of the prefix that are visible, as far as known */
} kvx_save_result_t;

/* Store the whole blocks of the prefix that kvd does not have yet. KVC_PENDING: *p_save is the job. KVC_ALREADY:
 * nothing to do. KVC_MISS: not stored (no daemon, too many jobs). *p_save is NULL in both cases. */
KVX_API kvc_status_t kvx_save_prefix(kvx_t *kvx, const kvx_prefix_t *prefix, kvx_save_t **p_save);
KVX_API kvc_status_t kvx_save_state(const kvx_save_t *save, kvx_save_result_t *result);
KVX_API void kvx_save_end(kvx_save_t *save);

/* ---- looking in ------------------------------------------------------------------------------ */

/* A request has ended: tell the daemon's metrics and prefix-hit records. */
typedef struct kvx_request {
	size_t struct_size;
	uint64_t request, session;
	uint32_t turn, prompt_tokens, engine_tokens, output_tokens; /* engine_tokens: hit in the engine's own cache */
	const kvx_load_result_t *load;                              /* NULL: no load was tried */
} kvx_request_t;
KVX_API void kvx_record_request(kvx_t *kvx, const kvx_request_t *request);

/* Every failure is one of these. */
typedef struct kvx_stats {
	size_t struct_size;
	uint64_t loads;        /* kvx_load_prefix() calls, and receives that were begun */
	uint64_t load_hits;    /* ended with at least one block */
	uint64_t load_misses;  /* nothing matched */
	uint64_t load_refused; /* not ready, wrong role, too many jobs, bad arguments, out of memory */
	uint64_t load_aborted;
	uint64_t load_timeouts;
	uint64_t load_corrupt; /* a block did not match its digest */
	uint64_t load_lost;    /* lease revoked or expired, daemon gone or stale, any other error */
	uint64_t cpu_tokens, disk_tokens, bytes_loaded;
	uint64_t saves;     /* kvx_save_prefix() calls, and sends that were begun */
	uint64_t save_done; /* all blocks visible, ALREADY included */
	uint64_t save_refused;
	uint64_t save_aborted;
	uint64_t save_timeouts;
	uint64_t save_busy; /* the daemon took only a part and the rest was given up */
	uint64_t save_lost;
	uint64_t blocks_saved, bytes_saved;
	uint64_t self_tests, self_test_failures;
	uint64_t attaches; /* attachments seen: first and repeated */
	/* Of kvx_handover.h. The blocks of a send are a save, those of a receive a load: how these end is counted
	 * above, too. */
	uint64_t sends, sends_refused; /* begun; of these, not ready, wrong role, too many jobs, ... */
	uint64_t sends_done, sends_failed;
	uint64_t recvs, recvs_refused;
	uint64_t recvs_done, recvs_failed; /* all of it came; less did */
} kvx_stats_t;
KVX_API kvc_status_t kvx_get_stats(const kvx_t *kvx, kvx_stats_t *stats);

#ifdef __cplusplus
}
#endif
#endif
