/* block.h -- a block's life across tiers: joining and leaving sets with all that follows from it.
 *
 *   join:   index counter, mark, mirror, event BlockStored, then children that were waiting for it
 *   leave:  mark, index counter, mirror, event BlockRemoved, slot; with its last tier the block leaves the index
 *
 * A pin has an owner, a lease, a put or a hand-over entry, and keeps its block and the path above it. Each block of an
 * unchained group is pinned on its own. A reference keeps one block, for a read, a write or a subtree that is being
 * taken down. Sum of pins on blocks == pins of leases, puts and hand-over entries; sum of references on blocks ==
 * references of leases and transfers (check.h counts both).
 */
#ifndef KVD_CORE_BLOCK_H
#define KVD_CORE_BLOCK_H

#include "core/core.h"
#include "core/index/index.h"

typedef enum kvd_pin_kind { KVD_PIN_LEASE = 1, KVD_PIN_PUT = 2, KVD_PIN_HANDOVER = 3 } kvd_pin_kind_t;

typedef struct kvd_pin {
	uint32_t block;
	kvd_link_t of_block;
	uint32_t kind;
	uint64_t owner; /* id of the lease, put or hand-over entry */
	uint32_t entry; /* of an unchained put: its entry */
	uint32_t next;  /* of a hand-over entry: the next of its pins */
} kvd_pin_t;

kv_status_t kvd_pin_create(kvd_core_t *core, uint32_t block, kvd_pin_kind_t kind, uint64_t owner, uint32_t *p_pin);
void kvd_pin_move(kvd_core_t *core, uint32_t pin, uint32_t block);
void kvd_pin_drop(kvd_core_t *core, uint32_t pin);

void kvd_block_ref(kvd_core_t *core, uint32_t block);
void kvd_block_unref(kvd_core_t *core, uint32_t block);

/* The block's bytes are in tier t and its parent is in the set: it becomes visible there, and so do children that were
 * waiting. `tokens`: of the block, for its event, or NULL. */
void kvd_block_join(kvd_core_t *core, uint32_t block, kvd_set_t t, uint64_t stamp, const uint32_t *tokens);
/* A leaf of the set leaves it; its slot is freed. It may leave the index. `why`: KV_NM_EVICTED,
 * KV_NM_EVICTED_FOR_OTHERS. */
void kvd_block_evict(kvd_core_t *core, uint32_t block, kvd_set_t t, kv_ns_metric_t why);
/* The same without the slot, which has another owner now. */
void kvd_block_leave(kvd_core_t *core, uint32_t block, kvd_set_t t);
/* The block will not be written: children that were written and waited for it give their disk slots back and are
 * queued again. */
void kvd_block_requeue_below(kvd_core_t *core, uint32_t block);
/* Forget a block that is in no set and has neither pin nor reference; then its parent, if that holds for it too. */
void kvd_block_forget_unused(kvd_core_t *core, uint32_t block);
/* The block has lost a pin or a reference: put its marks back into the order if it can be evicted now. */
void kvd_block_restore_marks(kvd_core_t *core, uint32_t block);
/* Free the CPU slot of a block that is not in the CPU set. */
void kvd_block_free_cpu_slot(kvd_core_t *core, uint32_t block);

/* If the block is private: a lease or hand-over has it from now on, and with the last one it goes. One that is refused
 * has only pinned it for a moment. */
void kvd_private_block_hold(kvd_core_t *core, uint32_t block);
/* A put of this private block found it: it is not dropped until something has held it again. */
void kvd_private_block_renew(kvd_core_t *core, uint32_t block);
/* One quantum: drop private blocks that nothing holds any longer; 1 while there is more. */
int kvd_private_blocks_run(kvd_core_t *core);

/* The block has joined the CPU set and is not on disk: its run waits for write-behind. */
void kvd_block_queue_write(kvd_core_t *core, uint32_t block);
/* The block goes away: its transfer, if any, owns both slots from now on. */
void kvd_block_detach_io(kvd_core_t *core, uint32_t block);

/* An ACQUIRE or a put asked for the path down to `block`. */
void kvd_block_touch_path(kvd_core_t *core, uint32_t block);

void kvd_block_get_meta(const kvd_core_t *core, uint32_t block, kvs_meta_t *meta);
static inline kvs_loc_t kvd_cpu_loc(const kvd_index_t *ix, const kvd_block_t *block)
{
	return (kvs_loc_t){.slot = *kvd_slot_of(ix, block), .gen = block->cpu_gen};
}

/* Of a key that lookups do not find. */
kv_miss_reason_t kvd_explain_miss(const kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint8_t group);

#endif
