/* daemon/net/ucx/worker_address.h -- is this the address of a UCX worker? UCX believes that it is, reads as far as it
 * says, and ends the process where it says something else. */
#ifndef KVD_NET_WORKER_ADDRESS_H
#define KVD_NET_WORKER_ADDRESS_H

#include "net/messages.h"

/* KV_ERR_PROTO: not an address of format 1 (UCX_ADDRESS_VERSION, without UCX_UNIFIED_MODE), or that of `ours` itself;
 * KV_ERR_UNREACHABLE: it has no transport of ours with addresses that are long enough. An empty `ours` has none. */
kv_status_t kvd_ucx_address_check(kv_slice_t ours, kv_slice_t address);

#endif
