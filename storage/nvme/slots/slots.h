/* storage/nvme/slots/slots.h -- the slot tables: states, flags, free lists and sums. Owner's thread only. */
#ifndef KVS_NVME_SLOTS_H
#define KVS_NVME_SLOTS_H

#include "nvme/nvme.h"

kvs_dslot_t *kvs_slot_get(kvs_nvme_t *nvme, kv_slot_t slot);
/* The slot if `loc` is still its location, else NULL. */
kvs_dslot_t *kvs_slot_find(kvs_nvme_t *nvme, kvs_loc_t loc);
kvs_dclass_t *kvs_slot_class(kvs_nvme_t *nvme, kv_slot_t slot);
/* Put the slot on the list of rows to commit. */
void kvs_slot_mark_dirty(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
void kvs_slot_set_state(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s, kvs_state_t state);
void kvs_slot_release(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* Quarantine a stored slot whose bytes may be wrong; kvs_report_lost_slots() tells the watch at the end of the poll. */
void kvs_slot_mark_lost(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
void kvs_report_lost_slots(kvs_nvme_t *nvme);
/* The slot was freed: the watch does not hear of it. */
void kvs_slot_clear_lost(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);

/* A rebuild has found the header. / The bytes were read and are right, or no block has the slot any longer. */
void kvs_slot_mark_unverified(kvs_nvme_t *nvme, kvs_dslot_t *s);
void kvs_slot_clear_unverified(kvs_nvme_t *nvme, kvs_dslot_t *s);

/* The entry of a slot that is set aside; NULL: it is not. / Forget it: the slot is freed, or lost. */
kvs_aside_t *kvs_aside_find(kvs_nvme_t *nvme, kv_slot_t slot);
void kvs_aside_remove(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);

/* A record for a slot that a put or fill has taken; KVS_NONE: no memory. */
uint32_t kvs_rec_alloc(kvs_nvme_t *nvme);
void kvs_rec_free(kvs_nvme_t *nvme, kvs_dslot_t *s);

/* Put the slots of a file that are FREE into the free list of its class. */
void kvs_file_list_free_slots(kvs_nvme_t *nvme, uint32_t number);
/* The slot that was freed least recently; there is one. */
kv_slot_t kvs_free_list_pop(kvs_nvme_t *nvme, kvs_dclass_t *cls);

/* Constants of a class from its record in the superblock. */
void kvs_class_init(kvs_nvme_t *nvme, uint32_t id);
uint64_t kvs_nvme_charged_bytes(const kvs_nvme_t *nvme);
void kvs_nvme_update_gauges(kvs_nvme_t *nvme);

#endif
