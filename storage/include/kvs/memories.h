/* kvs/memories.h -- the memory tier of a node with GPUs: the CPU pool and a pool for each GPU, behind one kvs_tier_t.
 *
 * Each pool has slab numbers of its own: those of memory m are [kvs_memories_base(m), kvs_memories_base(m + 1)). A
 * slot names its pool, and a class does in its upper bits. A pool itself counts from 0, in its ledger and for its own
 * functions (kvs/pool.h). Slabs never go from one pool to another.
 */
#ifndef KVS_MEMORIES_H
#define KVS_MEMORIES_H

#include "kv/env.h"
#include "kvs/tier.h"

#define KVS_MEMORIES     9u    /* the host's, and 8 GPUs */
#define KVS_HOST_SLABS   3072u /* numbers of the CPU pool, which must be opened with this limit */
#define KVS_MEMORY_SLABS 127u  /* of each other pool */

/* `host` becomes memory 0. All pools stay the caller's, and are closed after kvs_close() of the tier, which closes
 * none. KV_ERR_NOMEM. */
kv_status_t kvs_memories_open(kvs_tier_t *host, const kv_env_t *env, kvs_tier_t **p_tier);
/* The first slab number of memory m. */
static inline uint32_t kvs_memories_base(uint32_t memory)
{
	return memory == 0 ? 0 : KVS_HOST_SLABS + KVS_MEMORY_SLABS * (memory - 1u);
}
/* The memory that a slab number belongs to. */
static inline uint32_t kvs_memory_of_slab(uint32_t slab)
{
	return slab < KVS_HOST_SLABS ? 0 : (slab - KVS_HOST_SLABS) / KVS_MEMORY_SLABS + 1u;
}
/* The location as the pool itself has it. */
static inline kvs_loc_t kvs_loc_in_pool(kvs_loc_t loc)
{
	const uint32_t slab = kv_slot_slab(loc.slot);

	return loc.slot == KV_SLOT_NONE ? loc
					: (kvs_loc_t){kv_slot_make(slab - kvs_memories_base(kvs_memory_of_slab(slab)),
								   kv_slot_index(loc.slot)),
						      loc.gen};
}

#endif
