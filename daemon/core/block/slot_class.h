/* slot_class.h -- classes of slots: which tiers' classes belong together, and whether one is short of slots. */
#ifndef KVD_CORE_SLOT_CLASS_H
#define KVD_CORE_SLOT_CLASS_H

#include "core/base/core_impl.h"

/* NULL: slabs of the tier do not change their class. */
static inline const kvs_rebalance_ops_t *kvd_slab_ops(const kvd_core_t *core, kvd_set_t t)
{
	return core->tier[t] ? core->tier[t]->ops->rebalance : NULL;
}

/* The class made of these tiers' classes; a new one, of namespace ns, when there is none. */
kv_status_t kvd_class_find(kvd_core_t *core, const uint32_t tier_class[KVD_TIERS], uint32_t ns, uint32_t *p_class);
/* No space or tree names the class: its place, and its numbers in the tiers, may be another's. 0: it was
 * closed before, or slabs of it are on their way. */
int kvd_class_close(kvd_core_t *core, uint32_t slot_class);
/* The class of a geometry and the space's memory, opened on each tier. As kvs_class_open(). */
kv_status_t kvd_class_open(kvd_core_t *core, const kvd_space_open_t *ask, const kvs_geometry_t *geometry,
			   uint32_t *p_class);
/* The class was found in a memory of the CPU tier, and no space of it is open. */
void kvd_class_adopt(kvd_core_t *core, uint32_t slot_class, uint32_t memory);
/* Ask tier t what the class has there. */
void kvd_class_update(kvd_core_t *core, uint32_t slot_class, kvd_set_t t);
/* A slot of the class in tier t has been asked for, or its space was opened. */
void kvd_class_request_slots(kvd_core_t *core, uint32_t slot_class, kvd_set_t t);
/* Will the class have more slots soon? */
int kvd_class_expects_slots(const kvd_core_t *core, uint32_t slot_class, kvd_set_t t);
/* The class's coldest block of tier t that can go, and when it was asked for last; KVD_NONE: there is none. */
uint32_t kvd_class_coldest(const kvd_core_t *core, uint32_t slot_class, kvd_set_t t, uint64_t *p_stamp);

#endif
