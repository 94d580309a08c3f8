/* daemon/net/ucx/admission.h -- who may connect to a port that UCX listens on. Its TCP transport has no authentication,
 * and 13 bytes end the process: so the kernel drops what comes from other addresses than the given ones, by a filter on
 * the listening sockets, which the accepted ones inherit. A program at such an address is still heard (decision 077).
 */
#ifndef KVD_NET_ADMISSION_H
#define KVD_NET_ADMISSION_H

#include "base/address.h"

#include "kv/status.h"

#define KVD_ADMISSION_SOCKETS   8u
#define KVD_ADMISSION_ADDRESSES 64u

/* Descriptors of this process that listen: before UCX has opened its own (NULL), and then those that have come. */
typedef struct kvd_admission {
	int fds[KVD_ADMISSION_SOCKETS];
	uint32_t count;
} kvd_admission_t;

void kvd_admission_find(const kvd_admission_t *before, kvd_admission_t *found);
/* From now on connections from these addresses only; none: from nowhere. KV_ERR_LIMIT: too many of them;
 * KV_ERR_UNSUPPORTED: the kernel has no such filter, and all may connect. */
kv_status_t kvd_admission_set(const kvd_admission_t *admission, const kvd_address_t *addresses, uint32_t count);

#endif
