/* daemon/net/bytes.h -- what the ways of bytes have in common: UCX (ucx/ucx.h), and connections of our own (stream.h).
 * The owner of blocks pushes messages; each lands in a buffer that the other side hands out for it.
 */
#ifndef KVD_NET_BYTES_H
#define KVD_NET_BYTES_H

#include "net/messages.h"

#include <sys/uio.h>

#define KVD_BYTES_RUNS_MAX 256u /* pieces of memory in one message */

/* In front of the bytes. */
typedef struct kvd_envelope {
	uint64_t batch;
	uint8_t ticket[KVD_NET_TICKET];
} kvd_envelope_t;

typedef struct kvd_bytes_ops {
	/* A message has come: where they go, and in *p_object what `landed` gets. NULL: not wanted, it is dropped. */
	void *(*land)(void *ctx, const kvd_envelope_t *envelope, size_t bytes, void **p_object);
	/* They are there, or never will be: the memory is not touched again. */
	void (*landed)(void *ctx, void *object, kv_status_t status);
	/* A push has ended: its memory is not read again. */
	void (*pushed)(void *ctx, void *object, kv_status_t status);
} kvd_bytes_ops_t;

#endif
