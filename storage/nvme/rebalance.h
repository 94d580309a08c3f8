/* storage/nvme/rebalance.h -- slot files that go to another class (decision 013). Owner's thread only. */
#ifndef KVS_NVME_REBALANCE_H
#define KVS_NVME_REBALANCE_H

#include "nvme.h"

extern const kvs_rebalance_ops_t kvs_nvme_rebalance_ops;
/* Give the room of files that have been retired to whom it was taken for. */
void kvs_rebalance_step(kvs_nvme_t *nvme);

#endif
