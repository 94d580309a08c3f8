/* daemon/net/stream.h -- bytes of blocks on a TLS connection of their own, apart from the control channel: they never
 * delay it. The side that asks has dialled it, and named its link by the ticket of READY; the owner of blocks answers
 * with an empty message, and pushes.
 *
 *   receiver: WAITING --that answer--> OPEN        owner: OPEN
 *   any --malformed, changed, too slow, not read, gone--> DEAD: `landed` and `pushed` come for all that is under way
 *
 * A message: envelope, u64 bytes, and the bytes, which are encrypted from the memory of the blocks and decrypted into
 * that where they land. Each call does a bounded part, so that streams and links share the one thread.
 */
#ifndef KVD_NET_STREAM_H
#define KVD_NET_STREAM_H

#include "net/bytes.h"
#include "net/tls.h"

#define KVD_STREAM_ANSWER_NS UINT64_C(2000000000)

typedef struct kvd_stream kvd_stream_t;

typedef enum kvd_stream_state { KVD_STREAM_WAITING, KVD_STREAM_OPEN, KVD_STREAM_DEAD } kvd_stream_state_t;

/* Over the connection of a link (kvd_link_take()): the stream's from now on. A peer that takes none of the bytes that
 * wait for it for `silence_ns` ends it. NULL: out of memory, it is gone. */
kvd_stream_t *kvd_stream_open(const kvd_bytes_ops_t *ops, void *ctx, kvd_tls_t *tls, int fd, int is_owner,
			      uint64_t silence_ns);
/* NULL is fine. */
void kvd_stream_free(kvd_stream_t *stream);

int kvd_stream_fd(const kvd_stream_t *stream);
short kvd_stream_events(const kvd_stream_t *stream); /* for poll() */
/* On the caller's clock, on which it is born in the first call. 1: it did its part, and there is more, perhaps where
 * poll() does not look. */
int kvd_stream_progress(kvd_stream_t *stream, uint64_t now_ns);

/* Push runs of memory as one message, behind those before it. The envelope and the runs are copied. Another status than
 * KV_OK: nothing was begun, and `pushed` does not come. Else it comes once, in a later call. */
kv_status_t kvd_stream_push(kvd_stream_t *stream, const kvd_envelope_t *envelope, const struct iovec *runs,
			    uint32_t count, void *object);

kvd_stream_state_t kvd_stream_state(const kvd_stream_t *stream);
kv_status_t kvd_stream_status(const kvd_stream_t *stream); /* DEAD: why */
const char *kvd_stream_why(const kvd_stream_t *stream);

#endif
