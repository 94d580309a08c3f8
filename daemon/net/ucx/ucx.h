/* daemon/net/ucx/ucx.h -- bytes over UCX: active messages with rendezvous. For networks where everybody is
 * trusted: nothing here is authenticated or encrypted (docs/decisions/078).
 *
 * UCX is found with dlopen when it is there; headers are needed to build this file only. One worker, one thread. What
 * is remotely written are buffers that `land` hands out for a message whose ticket the caller knows.
 */
#ifndef KVD_NET_UCX_H
#define KVD_NET_UCX_H

#include "base/address.h"
#include "net/bytes.h"

typedef struct kvd_ucx kvd_ucx_t;
typedef struct kvd_ucx_ep kvd_ucx_ep_t;

typedef struct kvd_ucx_config {
	const char *transports; /* UCX_TLS */
	const char *address;    /* numeric: UCX uses the network device that has it */
	const kvd_bytes_ops_t *ops;
	void *ctx;
} kvd_ucx_config_t;

/* KV_ERR_UNSUPPORTED: no UCX here, or this program was built without it; KV_ERR_CONFIG: no such device; KV_ERR_IO:
 * UCX does not start. `why` gets a sentence. */
kv_status_t kvd_ucx_open(const kvd_ucx_config_t *config, kvd_ucx_t **p_ucx, char *why, size_t cap);
/* Who may connect to it: connections from these addresses only, from now on; before the first call, from none.
 * KV_ERR_LIMIT: over 64 addresses; KV_ERR_UNSUPPORTED: the kernel has no filters of sockets, and all may. */
kv_status_t kvd_ucx_admit(kvd_ucx_t *ucx, const kvd_address_t *addresses, uint32_t count);
/* "1.13.1", or "" when there is none. */
const char *kvd_ucx_version(const kvd_ucx_t *ucx);
/* Of the worker, for the peers that push to it. Borrowed. */
kv_slice_t kvd_ucx_address(const kvd_ucx_t *ucx);
/* Readable when there is something to do, once kvd_ucx_arm() has answered 1. */
int kvd_ucx_fd(const kvd_ucx_t *ucx);
int kvd_ucx_arm(kvd_ucx_t *ucx);
/* 1: something was done, and there may be more. */
int kvd_ucx_progress(kvd_ucx_t *ucx);

/* An endpoint to the worker with this address, which came over an authenticated link. KV_ERR_PROTO: it is no address;
 * KV_ERR_UNREACHABLE: no transport leads there; KV_ERR_NOMEM. */
kv_status_t kvd_ucx_connect(kvd_ucx_t *ucx, kv_slice_t address, kvd_ucx_ep_t **p_ep);
/* Close it by force; `pushed` comes for all that is under way, at the latest in later calls of kvd_ucx_progress(). */
void kvd_ucx_disconnect(kvd_ucx_ep_t *ep);
int kvd_ucx_is_broken(const kvd_ucx_ep_t *ep);

/* Push runs of memory as one message. The envelope and the runs are copied. Another status than KV_OK: nothing was
 * begun, and `pushed` does not come. Else it comes once, perhaps within this call. */
kv_status_t kvd_ucx_push(kvd_ucx_ep_t *ep, const kvd_envelope_t *envelope, const struct iovec *runs, uint32_t count,
			 void *object);

#endif
