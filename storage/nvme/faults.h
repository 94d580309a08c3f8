/* storage/nvme/faults.h -- what stops the tier, and when it is tried again (decision 022). Owner's thread only. */
#ifndef KVS_NVME_FAULTS_H
#define KVS_NVME_FAULTS_H

#include "nvme.h"

/* `fault` is there, or is still there after a try: the next try comes after a pause twice as long, 0.1 s to 60 s.
 * `doing`: "syncing slot files". */
void kvs_fault_raise(kvs_nvme_t *nvme, kvs_fault_t fault, const char *doing, const char *why);
/* It has ended. clear: the pause goes on growing if it comes back; reset: the pause begins anew. */
void kvs_fault_clear(kvs_nvme_t *nvme, kvs_fault_t fault);
void kvs_fault_reset(kvs_nvme_t *nvme, kvs_fault_t fault);
/* 1: it is active and its next try is due. */
int kvs_fault_is_due(const kvs_nvme_t *nvme, kvs_fault_t fault, uint64_t now);
void kvs_nvme_state(kvs_tier_t *tier, kvs_tier_state_t *p_state);

#endif
