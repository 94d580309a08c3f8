/* storage/nvme/slots/recency.h -- when each slot's block was used last, kept over a restart (decision 069).
 *
 * A slot has one word: a count of uses, and the low bits of the generation it belongs to. The commit thread writes the
 * words of a slot file to recency/NUMBER at close, and every RECENCY_NS while its blocks are used. They are a hint and
 * are not synced. A block whose word is missing, damaged or of another generation counts as used last: most often it
 * was stored after the words were written.
 */
#ifndef KVS_NVME_FORMAT_RECENCY_H
#define KVS_NVME_FORMAT_RECENCY_H

#include "nvme/nvme.h"

/* Owner. The block at `loc` was used at `stamp`, which counts from the open of the tier. */
void kvs_nvme_touch(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp);
/* At the open: read what is there for all slots that hold a block. */
void kvs_recency_read(kvs_nvme_t *nvme);
/* Higher: used later. */
uint64_t kvs_recency_of(const kvs_nvme_t *nvme, kv_slot_t slot);
/* Blocks for kvs_nvme_recover_use(), at most `max`. Without memory for them their order is not known. */
void kvs_recency_begin(kvs_nvme_t *nvme, uint32_t max);
void kvs_recency_add(kvs_nvme_t *nvme, kv_slot_t slot, uint32_t depth);
void kvs_recency_sort(kvs_nvme_t *nvme);
kv_status_t kvs_nvme_recover_use(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max);

/* Owner, as a round is built: take the words of a file that was touched. Commit thread: write them. Owner: count a
 * failure. */
void kvs_recency_collect(kvs_nvme_t *nvme, kvs_commit_t *c, uint64_t now);
int kvs_recency_is_due(const kvs_nvme_t *nvme, uint64_t now);
void kvs_recency_write(const kvs_nvme_t *nvme, kvs_commit_t *c);
void kvs_recency_apply(kvs_nvme_t *nvme, kvs_commit_t *c);

#endif
