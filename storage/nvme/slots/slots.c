/* The disk tier's slots: who has which, and sums that always agree. Owner's thread only. */
#include "slots.h"

kvs_dslot_t *kvs_slot_get(kvs_nvme_t *nvme, kv_slot_t slot)
{
	uint32_t number = kv_slot_slab(slot);
	const kvs_dfile_t *file;

	if (number >= KVS_MAX_FILES) {
		return NULL;
	}
	file = &nvme->files[number];

	return file->slot && kv_slot_index(slot) < file->slots ? &file->slot[kv_slot_index(slot)] : NULL;
}

kvs_dslot_t *kvs_slot_find(kvs_nvme_t *nvme, kvs_loc_t loc)
{
	kvs_dslot_t *s = kvs_slot_get(nvme, loc.slot);

	return s && s->gen == loc.gen && s->state != KVS_FREE && !(s->flags & KVS_SLOT_FREEING) ? s : NULL;
}

kvs_dclass_t *kvs_slot_class(kvs_nvme_t *nvme, kv_slot_t slot)
{
	return &nvme->classes[nvme->files[kv_slot_slab(slot)].slot_class];
}

void kvs_slot_mark_dirty(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_DIRTY) {
		return;
	}

	if (nvme->dirty_in == nvme->dirty_out) {
		nvme->dirty_since_ns = kv_now_ns(nvme->env);
		kvs_commit_request(nvme);
	}
	s->flags |= KVS_SLOT_DIRTY;
	s->next_dirty = KV_SLOT_NONE;
	if (nvme->dirty_tail == KV_SLOT_NONE) {
		nvme->dirty_head = slot;
	} else {
		kvs_slot_get(nvme, nvme->dirty_tail)->next_dirty = slot;
	}
	nvme->dirty_tail = slot;
	nvme->dirty_in++;
}

/* Take a state out of the sums, or put it in. */
static void count_slot(kvs_nvme_t *nvme, kv_slot_t slot, uint8_t state, int sign)
{
	uint64_t one = sign > 0 ? 1u : UINT64_MAX;
	uint64_t bytes = kvs_slot_class(nvme, slot)->stride;

	bytes = sign > 0 ? bytes : (uint64_t)0 - bytes;
	if (state == KVS_FREE) {
		nvme->free_slots += one;
	} else if (state == KVS_QUARANTINED) {
		nvme->quarantined_slots += one;
		nvme->quarantined_bytes += bytes;
	} else {
		nvme->used_bytes += bytes;
	}
}

void kvs_slot_mark_unverified(kvs_nvme_t *nvme, kvs_dslot_t *s)
{
	s->flags |= KVS_SLOT_UNVERIFIED;
	nvme->unverified++;
}

void kvs_slot_clear_unverified(kvs_nvme_t *nvme, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_UNVERIFIED) {
		s->flags &= (uint8_t)~KVS_SLOT_UNVERIFIED;
		nvme->unverified--;
	}
}

void kvs_slot_set_state(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s, kvs_state_t state)
{
	count_slot(nvme, slot, s->state, -1);
	s->state = (uint8_t)state;
	count_slot(nvme, slot, s->state, 1);
	if (state == KVS_FREE || state == KVS_QUARANTINED) {
		kvs_slot_clear_unverified(nvme, s);
	}
	if (s->flags & (KVS_SLOT_ROW | KVS_SLOT_STORED)) {
		kvs_slot_mark_dirty(nvme, slot, s);
	}
}

void kvs_rec_free(kvs_nvme_t *nvme, kvs_dslot_t *s)
{
	if (s->rec != KVS_NONE) {
		nvme->recs[s->rec].next_free = nvme->rec_free;
		nvme->rec_free = s->rec;
		s->rec = KVS_NONE;
	}
}

uint32_t kvs_rec_alloc(kvs_nvme_t *nvme)
{
	uint32_t cap = nvme->rec_cap ? nvme->rec_cap * 2u : 1024u;
	kvs_rec_t *grown;
	uint32_t rec;

	if (nvme->rec_free == KVS_NONE) {
		grown = kv_resize(nvme->env, nvme->recs, nvme->rec_cap * sizeof *grown, cap * sizeof *grown);
		if (!grown) {
			return KVS_NONE;
		}
		nvme->recs = grown;
		for (uint32_t i = nvme->rec_cap; i < cap; i++) {
			grown[i].next_free = i + 1u < cap ? i + 1u : KVS_NONE;
		}
		nvme->rec_free = nvme->rec_cap;
		nvme->rec_cap = cap;
	}

	rec = nvme->rec_free;
	nvme->rec_free = nvme->recs[rec].next_free;

	return rec;
}

static void free_list_append(kvs_nvme_t *nvme, kvs_dclass_t *cls, kv_slot_t slot, kvs_dslot_t *s)
{
	kvs_dfile_t *file = &nvme->files[kv_slot_slab(slot)];

	file->free_slots++;
	s->next = KV_SLOT_NONE;
	if (file->state != KVS_FILE_USED) {
		return;
	}
	if (cls->free_tail == KV_SLOT_NONE) {
		cls->free_head = slot;
	} else {
		kvs_slot_get(nvme, cls->free_tail)->next = slot;
	}
	cls->free_tail = slot;
	cls->free_count++;
}

/* The least recently freed slot goes out first: most rows of freed slots are deleted before their slot is written
 * again. */
kv_slot_t kvs_free_list_pop(kvs_nvme_t *nvme, kvs_dclass_t *cls)
{
	kv_slot_t slot = cls->free_head;
	kvs_dslot_t *s = kvs_slot_get(nvme, slot);

	cls->free_head = s->next;
	if (cls->free_head == KV_SLOT_NONE) {
		cls->free_tail = KV_SLOT_NONE;
	}
	cls->free_count--;
	nvme->files[kv_slot_slab(slot)].free_slots--;

	return slot;
}

kvs_aside_t *kvs_aside_find(kvs_nvme_t *nvme, kv_slot_t slot)
{
	for (uint32_t i = 0; i < KVS_MAX_ASIDE; i++) {
		if (nvme->aside[i].tries > 0 && nvme->aside[i].slot == slot) {
			return &nvme->aside[i];
		}
	}

	return NULL;
}

void kvs_aside_remove(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_ASIDE) {
		kvs_aside_find(nvme, slot)->tries = 0;
		nvme->aside_count--;
		s->flags &= (uint8_t)~KVS_SLOT_ASIDE;
	}
}

void kvs_slot_mark_lost(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	kvs_aside_remove(nvme, slot, s);
	kvs_slot_set_state(nvme, slot, s, KVS_QUARANTINED);
	s->flags |= KVS_SLOT_LOST;
	nvme->files[kv_slot_slab(slot)].lost++;
	nvme->lost++;
	kv_metric_add(nvme->metrics, KV_M_DISK_LOST, 1);
}

void kvs_slot_clear_lost(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_LOST) {
		s->flags &= (uint8_t)~KVS_SLOT_LOST;
		nvme->files[kv_slot_slab(slot)].lost--;
		nvme->lost--;
	}
}

/* The watch frees slots meanwhile, lost ones too. */
void kvs_report_lost_slots(kvs_nvme_t *nvme)
{
	uint64_t told = 0;

	if (!nvme->watch.lost) {
		return;
	}
	for (uint32_t number = 0; number < KVS_MAX_FILES && nvme->lost > 0; number++) {
		kvs_dfile_t *file = &nvme->files[number];

		for (uint32_t i = 0; file->lost > 0 && i < file->slots; i++) {
			kvs_dslot_t *s = &file->slot[i];
			kv_slot_t slot = kv_slot_make(number, i);

			if (s->flags & KVS_SLOT_LOST) {
				kv_key_t key = s->key;

				kvs_slot_clear_lost(nvme, slot, s);
				nvme->watch.lost(nvme->watch.arg, (kvs_loc_t){slot, s->gen}, &key, s->group);
				told++;
			}
		}
	}
	if (told > 0) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "blocks on disk cannot be verified and are dropped: %llu",
			(unsigned long long)told);
	}
}

/* No location names it and no transfer touches it. */
void kvs_slot_release(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	int usable = !nvme->files[kv_slot_slab(slot)].gone && !(s->flags & KVS_SLOT_RETIRED);

	kvs_rec_free(nvme, s);
	kvs_aside_remove(nvme, slot, s);
	s->flags &= (uint8_t) ~(KVS_SLOT_FREEING | KVS_SLOT_STORED);
	kvs_slot_set_state(nvme, slot, s, usable ? KVS_FREE : KVS_QUARANTINED);
	if (!usable || !nvme->recovered) { /* the end of the recovery lists what is free */
		return;
	}
	free_list_append(nvme, kvs_slot_class(nvme, slot), slot, s);
}

void kvs_file_list_free_slots(kvs_nvme_t *nvme, uint32_t number)
{
	kvs_dfile_t *file = &nvme->files[number];
	kvs_dclass_t *cls = &nvme->classes[file->slot_class];

	for (uint32_t i = 0; i < file->slots; i++) {
		if (file->slot[i].state == KVS_FREE) {
			free_list_append(nvme, cls, kv_slot_make(number, i), &file->slot[i]);
		}
	}
}

uint64_t kvs_nvme_charged_bytes(const kvs_nvme_t *nvme)
{
	uint64_t meta = nvme->meta_fixed + nvme->slots * KVS_ROW_BYTES;

	return nvme->file_bytes + (nvme->meta_bytes > meta ? nvme->meta_bytes : meta);
}

void kvs_nvme_update_gauges(kvs_nvme_t *nvme)
{
	kv_metric_set(nvme->metrics, KV_M_DISK_BYTES, kvs_nvme_charged_bytes(nvme));
	kv_metric_set(nvme->metrics, KV_M_DISK_USED_BYTES, nvme->used_bytes);
	kv_metric_set(nvme->metrics, KV_M_DISK_QUARANTINED_BYTES, nvme->quarantined_bytes);
	kv_metric_set(nvme->metrics, KV_M_DISK_UNREADABLE, nvme->aside_count);
	kv_metric_set(nvme->metrics, KV_M_DISK_UNVERIFIED, nvme->unverified);
}

/* Constants of a class from its record in the superblock. */
void kvs_class_init(kvs_nvme_t *nvme, uint32_t id)
{
	const kvs_super_class_t *record = &nvme->super.classes[id];
	kvs_dclass_t *cls = &nvme->classes[id];

	*cls = (kvs_dclass_t){
		.geometry = record->geometry,
		.id = id,
		.header_bytes = kvs_slothdr_bytes(&record->geometry),
		.payload_bytes = (uint32_t)kvs_page_up(record->geometry.block_bytes),
		.slots_per_file = record->slots_per_file,
		.free_head = KV_SLOT_NONE,
		.free_tail = KV_SLOT_NONE,
	};
	cls->stride = (uint64_t)cls->header_bytes + cls->payload_bytes;
}
