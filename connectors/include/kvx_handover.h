/* kvx_handover.h -- libkvx: hand the KV of a prompt from the engine that computes it to the engine that waits for it.
 *
 *   producer   kvx_send(chunk) .. kvx_send(chunk) .. kvx_send(last chunk)   kvx_poll()   kvx_send_end()
 *   consumer   kvx_recv()                                                   kvx_poll()   kvx_recv_end()
 *
 * Both name the prompt and a transfer id; either may come first. A send is a save whose blocks are handed over as they
 * become visible: what kvd has already is not copied, and what was sent is cached as after a save. A receive waits, and
 * loads each chunk, verified, while the producer computes the next one. The daemon tells it of every chunk; nothing
 * asks the daemon again. Exactly one consumer gets a hand-over.
 *
 * Nothing here fails in a way the engine must handle, as in kvx.h: whatever goes wrong on either side is a receive that
 * ends with fewer tokens and says why, and the engine computes the rest. Every wait has a deadline.
 *
 * Engine blocks. A send reads its blocks until its result says `copied`, which comes after its last chunk, or until
 * kvx_send_end() has returned. A receive writes its blocks until its state is no longer PENDING or kvx_recv_end() has
 * returned.
 *
 * A lookup buffer is another view of the same: kvx_insert() hands a prompt over under an id that is made of its tokens,
 * and kvx_drop_select() of the same tokens takes it.
 *
 * Both sides must have the same space: identity and layout of kvx_config_t. With another one, as with another transfer
 * id, they do not find each other, and the consumer's deadline passes. */
#ifndef KVX_HANDOVER_H
#define KVX_HANDOVER_H

#include "kvx.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kvx_send kvx_send_t;
typedef struct kvx_recv kvx_recv_t;

/* ---- the producer ---------------------------------------------------------------------------- */

/* How much of a prompt is in the paged cache now. Nothing of it is borrowed after the call. */
typedef struct kvx_chunk {
	size_t struct_size;
	/* Of the first call of a hand-over; later calls ignore them. */
	const char *transfer; /* the id: UTF-8, 1 to KVC_MAX_TRANSFER bytes. NULL: made from the prompt, so that
				 producer and consumer of one prompt find each other: "prefix-", the key of the last
				 whole block, and "+" and a hash of the tokens after it */
	const uint32_t *tokens;
	uint32_t n_tokens; /* of the whole prompt */
	const char *salt;  /* as in kvx_prefix_t */
	/* Of each call. */
	uint32_t computed;      /* tokens, from the prompt's first, whose KV is in the cache; at most n_tokens */
	const uint32_t *blocks; /* their paged block ids. Earlier ones stay as they were */
	int last;             /* no call follows. Whole blocks of `computed` are handed over, and if that is all of the
				 prompt, also its last, partial block */
	const void *tail;     /* of the last call: for the consumer, opaque: a first token, last hidden states */
	uint32_t tail_len;    /* bytes; at most KVC_MAX_TAIL */
	uint32_t deadline_ms; /* for handing this chunk over; 0: the configuration's save_ms */
	uint32_t ttl_ms;      /* what was handed over stays so long without a consumer; 0: the daemon's handover.ttl,
				 which is the most */
} kvx_chunk_t;

typedef struct kvx_send_result {
	size_t struct_size;
	kvc_status_t status; /* PENDING; OK: all is handed over; else why not, and the consumer was told */
	int copied;          /* 1: the engine's blocks are no longer read */
	uint32_t blocks;     /* of the prompt that are visible, as far as known */
	uint32_t sent;       /* of these, handed over */
	int taken;           /* it had a consumer when the last chunk was answered */
} kvx_send_result_t;

/* Hand over what is computed. *p_send NULL: the first call of a hand-over. KVC_PENDING: *p_send is the job; call again
 * with it as more is computed. KVC_MISS: nothing is handed over, or the hand-over has ended (kvx_send_state() says
 * why): no daemon, another role, too many jobs, bad arguments, out of memory; a *p_send that was NULL stays so.
 * KVC_ERR_ARG: a later chunk is not sound: `computed` goes back or beyond the prompt, a block is none, it follows the
 * last one, or its tail is too long; nothing has changed. */
KVX_API kvc_status_t kvx_send(kvx_t *kvx, const kvx_chunk_t *chunk, kvx_send_t **p_send);
/* How far it is; result may be NULL. Returns result->status. */
KVX_API kvc_status_t kvx_send_state(const kvx_send_t *send, kvx_send_result_t *result);
/* Abort (if PENDING; the consumer is told KVC_ERR_ABORTED) and free. What was handed over whole stays for the consumer.
 * NULL is fine. */
KVX_API void kvx_send_end(kvx_send_t *send);

/* ---- the consumer ---------------------------------------------------------------------------- */

typedef struct kvx_recv_result {
	size_t struct_size;
	kvc_status_t status; /* PENDING; OK: all was received, or at least one block beyond skip; MISS: neither */
	kvc_status_t cause;  /* OK: all was received; else why not: TIMEOUT, PRODUCER_LOST, ABORTED, TAKEN, CORRUPT,
				OTHER_SPACE (the sides differ), REVOKED (the daemon died), MISS (less was sent), NOMEM
				(for the tail), ... */
	uint32_t blocks;     /* verified blocks in the cache, skip and a partial one included; grows while PENDING */
	uint32_t tokens;     /* the same in tokens: compute from here. All of it: prefix->n_tokens, to the token */
	uint32_t cpu_tokens, disk_tokens; /* loaded from CPU memory and from disk, skip not included */
	uint32_t why;                     /* KVC_WHY_* of the first block that was not there */
	const void *tail;                 /* valid until kvx_recv_end(); NULL: none, or not all was received */
	uint32_t tail_len;
	uint64_t recv_ns; /* from the call to the end */
} kvx_recv_result_t;

/* Receive the prefix into its blocks; all its tokens count, so the last block may be partial, which then comes if the
 * producer's prompt ends there, too. transfer NULL: as in kvx_chunk_t. prefix->deadline_ms 0: the configuration's
 * load_ms; it covers the wait for the producer. KVC_PENDING: *p_recv is the job. KVC_MISS: it cannot be received
 * (*p_recv is NULL): compute. *result (may be NULL) is set in both cases. */
KVX_API kvc_status_t kvx_recv(kvx_t *kvx, const char *transfer, const kvx_prefix_t *prefix, kvx_recv_t **p_recv,
			      kvx_recv_result_t *result);
/* How far it is; result may be NULL. Returns result->status. */
KVX_API kvc_status_t kvx_recv_state(const kvx_recv_t *recv, kvx_recv_result_t *result);
/* Abort (if PENDING: another consumer may have it) and free. NULL is fine. */
KVX_API void kvx_recv_end(kvx_recv_t *recv);

/* ---- the lookup buffer ----------------------------------------------------------------------- */

/* A prompt whose KV is in the cache, for a consumer that asks by tokens. Nothing of it is borrowed after the call. */
typedef struct kvx_insert {
	size_t struct_size;
	const uint32_t *tokens;
	uint32_t n_tokens;      /* at least 1 */
	const uint32_t *blocks; /* their paged block ids, the last block may be partial */
	const char *salt;       /* as in kvx_prefix_t: a consumer with another one does not find it */
	const void *hidden;     /* opaque, for the consumer */
	uint32_t hidden_len;    /* bytes; at most KVC_MAX_TAIL */
	uint32_t deadline_ms;   /* to be handed over, the wait for room included; 0: the configuration's save_ms */
	uint32_t ttl_ms;        /* as in kvx_chunk_t */
	int wait;               /* where the buffer is full: 1: wait for room; 0: KVC_ERR_BUSY */
} kvx_insert_t;
/* Returns at once, and moves on in kvx_poll() like a send; kvx_send_state(), kvx_send_end() as there. A consumer finds
 * it whole or not at all. Once the send is OK it is in the buffer, until a consumer has taken it or its time is over;
 * the send may end. The buffer is full at buffer_bytes of kvx_config_t, or when the daemon keeps no more.
 * It has the same tokens once: the status of a second send of them is KVC_ERR_EXISTS, until the first is taken or gone.
 * KVC_PENDING; KVC_ERR_BUSY: the buffer is full (or, as the status of the send: the daemon's); KVC_MISS: as kvx_send().
 */
KVX_API kvc_status_t kvx_insert(kvx_t *kvx, const kvx_insert_t *insert, kvx_send_t **p_send);

typedef struct kvx_select {
	size_t struct_size;
	const uint32_t *tokens; /* those that were inserted, all of them */
	uint32_t n_tokens;
	const char *salt;
	const uint32_t *blocks; /* where the KV goes */
	uint32_t n_blocks;      /* at least 1; of a longer prompt what they can hold is loaded */
	uint32_t deadline_ms;   /* 0: the configuration's load_ms */
} kvx_select_t;
/* Take the entry of these tokens and this salt out of the buffer, whichever engine of the namespace has inserted it,
 * now or later: kvx_recv_state(), kvx_recv_end() as of a receive; the tail is its hidden. One engine gets it; another
 * one that asks meanwhile gets KVC_ERR_TAKEN. Aborted, or too late, it goes back. */
KVX_API kvc_status_t kvx_drop_select(kvx_t *kvx, const kvx_select_t *select, kvx_recv_t **p_recv,
				     kvx_recv_result_t *result);

#ifdef __cplusplus
}
#endif
#endif
