/* The disk tier's slots: who has which, and sums that always agree. Owner's thread only. */
#include "impl.h"

#include "geometry.h"

#include <stdio.h>

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

kvs_dslot_t *kvs_slot_at(kvs_nvme_t *nvme, kvs_loc_t loc)
{
	kvs_dslot_t *s = kvs_slot_get(nvme, loc.slot);

	return s && s->gen == loc.gen && s->state != KVS_FREE && !(s->flags & KVS_SLOT_FREEING) ? s : NULL;
}

kvs_dclass_t *kvs_slot_class(kvs_nvme_t *nvme, kv_slot_t slot)
{
	return &nvme->classes[nvme->files[kv_slot_slab(slot)].slot_class];
}

void kvs_slot_dirty(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_DIRTY) {
		return;
	}

	if (nvme->dirty_in == nvme->dirty_out) {
		nvme->dirty_since_ns = kv_now_ns(nvme->env);
		kvs_commit_expect(nvme);
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
static void count_state(kvs_nvme_t *nvme, kv_slot_t slot, uint8_t state, int sign)
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

void kvs_slot_move(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s, kvs_state_t state)
{
	count_state(nvme, slot, s->state, -1);
	s->state = (uint8_t)state;
	count_state(nvme, slot, s->state, 1);
	if (state == KVS_FREE || state == KVS_QUARANTINED) {
		kvs_slot_verified(nvme, s);
	}
	if (s->flags & (KVS_SLOT_ROW | KVS_SLOT_STORED)) {
		kvs_slot_dirty(nvme, slot, s);
	}
}

void kvs_rec_drop(kvs_nvme_t *nvme, kvs_dslot_t *s)
{
	if (s->rec != KVS_NONE) {
		nvme->recs[s->rec].next_free = nvme->rec_free;
		nvme->rec_free = s->rec;
		s->rec = KVS_NONE;
	}
}

static uint32_t rec_take(kvs_nvme_t *nvme)
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
static kv_slot_t free_list_take(kvs_nvme_t *nvme, kvs_dclass_t *cls)
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

void kvs_slot_lose(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	kvs_aside_drop(nvme, slot, s);
	kvs_slot_move(nvme, slot, s, KVS_QUARANTINED);
	s->flags |= KVS_SLOT_LOST;
	nvme->files[kv_slot_slab(slot)].lost++;
	nvme->lost++;
	kv_metric_add(nvme->metrics, KV_M_DISK_LOST, 1);
}

static void lost_told(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_LOST) {
		s->flags &= (uint8_t)~KVS_SLOT_LOST;
		nvme->files[kv_slot_slab(slot)].lost--;
		nvme->lost--;
	}
}

/* The watch frees slots meanwhile, lost ones too. */
void kvs_lost_report(kvs_nvme_t *nvme)
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

				lost_told(nvme, slot, s);
				nvme->watch.lost(nvme->watch.arg, (kvs_loc_t){slot, s->gen}, &key, s->group);
				told++;
			}
		}
	}
	if (told > 0) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "blocks on disk are in doubt and are dropped: %llu",
			(unsigned long long)told);
	}
}

/* No location is good for it any more and no transfer touches it. */
void kvs_slot_release(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	int usable = !nvme->files[kv_slot_slab(slot)].gone && !(s->flags & KVS_SLOT_RETIRED);

	kvs_rec_drop(nvme, s);
	kvs_aside_drop(nvme, slot, s);
	s->flags &= (uint8_t) ~(KVS_SLOT_FREEING | KVS_SLOT_STORED);
	kvs_slot_move(nvme, slot, s, usable ? KVS_FREE : KVS_QUARANTINED);
	if (!usable || !nvme->recovered) { /* the end of the recovery lists what is free */
		return;
	}
	free_list_append(nvme, kvs_slot_class(nvme, slot), slot, s);
}

void kvs_file_admit(kvs_nvme_t *nvme, uint32_t number)
{
	kvs_dfile_t *file = &nvme->files[number];
	kvs_dclass_t *cls = &nvme->classes[file->slot_class];

	for (uint32_t i = 0; i < file->slots; i++) {
		if (file->slot[i].state == KVS_FREE) {
			free_list_append(nvme, cls, kv_slot_make(number, i), &file->slot[i]);
		}
	}
}

uint64_t kvs_charged(const kvs_nvme_t *nvme)
{
	uint64_t meta = nvme->meta_fixed + nvme->slots * KVS_ROW_BYTES;

	return nvme->file_bytes + (nvme->meta_bytes > meta ? nvme->meta_bytes : meta);
}

void kvs_nvme_gauges(kvs_nvme_t *nvme)
{
	kv_metric_set(nvme->metrics, KV_M_DISK_BYTES, kvs_charged(nvme));
	kv_metric_set(nvme->metrics, KV_M_DISK_USED_BYTES, nvme->used_bytes);
	kv_metric_set(nvme->metrics, KV_M_DISK_QUARANTINED_BYTES, nvme->quarantined_bytes);
	kv_metric_set(nvme->metrics, KV_M_DISK_UNREADABLE, nvme->aside_count);
	kv_metric_set(nvme->metrics, KV_M_DISK_UNVERIFIED, nvme->unverified);
}

/* Constants of a class from its record in the superblock. */
void kvs_class_setup(kvs_nvme_t *nvme, uint32_t id)
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

/* A file holds whole slots, and small limits are shared by at least four files. */
static uint32_t choose_slots(const kvs_nvme_t *nvme, uint64_t stride)
{
	uint64_t room = nvme->config.limit_bytes - nvme->meta_fixed;
	uint64_t bytes = nvme->config.file_bytes < room / 4u ? nvme->config.file_bytes : room / 4u;
	uint64_t slots = bytes / stride;

	if (slots == 0) {
		slots = 1;
	}

	return slots > KV_SLOT_MAX_INDEX + 1u ? KV_SLOT_MAX_INDEX + 1u : (uint32_t)slots;
}

kv_status_t kvs_nvme_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_super_class_t record = {.geometry = *geometry};
	uint32_t header_bytes = kvs_slothdr_bytes(geometry);
	size_t ns_len = strlen(ns);
	kv_status_t status;

	if (kvs_geometry_check(geometry) != KV_OK || header_bytes == 0 || ns_len > KVS_SUPER_MAX_NS) {
		return KV_ERR_LAYOUT;
	}
	for (uint32_t i = 0; i < nvme->super.class_count; i++) {
		const kvs_super_class_t *c = &nvme->super.classes[i];

		if (strcmp(c->ns, ns) == 0 && memcmp(&c->geometry, geometry, sizeof *geometry) == 0) {
			*p_class = i;
			return KV_OK;
		}
	}

	/* Also while the tier is off: the blocks have their place in memory, and on disk as soon as it is back. */
	memcpy(record.ns, ns, ns_len);
	record.slots_per_file = choose_slots(nvme, header_bytes + kvs_page_up(geometry->block_bytes));
	status = kvs_super_class_add(&nvme->super, &record, p_class);
	if (status != KV_OK) {
		return status;
	}
	kvs_class_setup(nvme, *p_class);
	nvme->super_dirty = 1; /* written before any row of this class */

	return KV_OK;
}

const char *kvs_nvme_class_ns(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_nvme(tier)->super.classes[slot_class].ns;
}

uint64_t kvs_nvme_class_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	const kvs_dclass_t *cls = &kvs_nvme(tier)->classes[slot_class];

	return cls->files * cls->slots_per_file * cls->stride;
}

/* What the superblock does not name would be dropped by the next start, acknowledged or not. */
static int is_recorded(const kvs_nvme_t *nvme, const kvs_meta_t *meta)
{
	const kvs_super_space_t *space = kvs_super_space_find(&nvme->super, meta->root);

	return space && space->epoch == meta->epoch;
}

kv_status_t kvs_nvme_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dclass_t *cls;
	kvs_dslot_t *s;
	kv_slot_t slot;
	kv_status_t status;
	uint32_t rec;

	(void)owner;
	kv_assert(nvme->recovered);
	if (slot_class >= nvme->super.class_count || !meta || (state != KVS_PUT && state != KVS_FILLING)) {
		return KV_ERR_ARG;
	}
	if (nvme->health >= KVS_HEALTH_READ_ONLY) {
		return KV_ERR_TIER_OFF;
	}
	if (!is_recorded(nvme, meta)) {
		return KV_ERR_STALE_EPOCH;
	}
	cls = &nvme->classes[slot_class];
	if (cls->free_count == 0) {
		status = kvs_file_carve(nvme, cls);
		if (status != KV_OK) {
			return status;
		}
	}
	rec = rec_take(nvme);
	if (rec == KVS_NONE) {
		return KV_ERR_NOMEM;
	}

	slot = free_list_take(nvme, cls);
	s = kvs_slot_get(nvme, slot);
	s->key = meta->key;
	s->group = meta->group;
	s->rec = rec;
	nvme->recs[rec].meta = *meta;
	kvs_slot_move(nvme, slot, s, state);
	*p_loc = (kvs_loc_t){.slot = slot, .gen = s->gen};

	return KV_OK;
}

/* Edges a caller may take. Into READY from PUT or FILLING leads only a store. */
static int may_move(const kvs_dslot_t *s, kvs_state_t to)
{
	if (s->state == to || to == KVS_QUARANTINED) {
		return 1;
	}
	if (!(s->flags & KVS_SLOT_STORED)) {
		return 0;
	}

	return s->state == KVS_TRANSIT && to == KVS_READY;
}

kv_status_t kvs_nvme_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dslot_t *s = kvs_slot_at(nvme, loc);

	if (!s) {
		return KV_MISS;
	}
	if (state == KVS_FREE || !may_move(s, state)) {
		return KV_ERR_ARG;
	}
	if (s->state != state) {
		kvs_slot_move(nvme, loc.slot, s, state);
	}

	return KV_OK;
}

void kvs_nvme_free(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dslot_t *s = kvs_slot_at(nvme, loc);

	if (!s) {
		return;
	}

	s->gen = s->gen == UINT32_MAX ? 1u : s->gen + 1u;
	lost_told(nvme, loc.slot, s);
	if (s->io > 0) {
		s->flags |= KVS_SLOT_FREEING;
	} else {
		kvs_slot_release(nvme, loc.slot, s);
	}
}

void kvs_nvme_usage(kvs_tier_t *tier, kvs_usage_t *p_usage)
{
	const kvs_nvme_t *nvme = kvs_nvme(tier);

	*p_usage = (kvs_usage_t){
		.limit_bytes = nvme->config.limit_bytes,
		.charged_bytes = kvs_charged(nvme),
		.slots = nvme->slots,
		.free_slots = nvme->free_slots,
		.used_slots = nvme->slots - nvme->free_slots - nvme->quarantined_slots,
		.quarantined_slots = nvme->quarantined_slots,
		.used_bytes = nvme->used_bytes,
		.quarantined_bytes = nvme->quarantined_bytes,
	};
}

typedef struct sums {
	uint64_t slots;
	uint64_t free_slots;
	uint64_t quarantined;
	uint64_t listed;
	uint64_t dirty;
	uint64_t used_bytes;
	uint64_t quarantined_bytes;
	uint64_t file_bytes;
} sums_t;

static void sum_file(const kvs_nvme_t *nvme, const kvs_dfile_t *file, sums_t *sum)
{
	uint64_t stride = nvme->classes[file->slot_class].stride;

	for (uint32_t i = 0; i < file->slots; i++) {
		const kvs_dslot_t *s = &file->slot[i];

		if (s->state == KVS_FREE) {
			sum->free_slots++;
		} else if (s->state == KVS_QUARANTINED) {
			sum->quarantined++;
			sum->quarantined_bytes += stride;
		} else {
			sum->used_bytes += stride;
		}
		sum->dirty += (s->flags & KVS_SLOT_DIRTY) != 0;
	}
	sum->slots += file->slots;
	sum->file_bytes += file->slots * stride;
}

kv_status_t kvs_nvme_check(kvs_tier_t *tier, char *detail, size_t cap)
{
	const kvs_nvme_t *nvme = kvs_nvme(tier);
	uint64_t dirty = nvme->dirty_in - nvme->dirty_out;
	sums_t sum = {0};
	int good;

	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		if (nvme->files[i].slot) {
			sum_file(nvme, &nvme->files[i], &sum);
			sum.listed += nvme->files[i].state == KVS_FILE_USED ? 0 : nvme->files[i].free_slots;
		}
	}
	for (uint32_t i = 0; i < nvme->super.class_count; i++) {
		sum.listed += nvme->classes[i].free_count;
	}

	good = sum.slots == nvme->slots && sum.free_slots == nvme->free_slots &&
	       sum.quarantined == nvme->quarantined_slots && sum.listed == sum.free_slots &&
	       sum.used_bytes == nvme->used_bytes && sum.file_bytes == nvme->file_bytes &&
	       sum.quarantined_bytes == nvme->quarantined_bytes && sum.dirty == dirty &&
	       kvs_charged(nvme) <= nvme->config.limit_bytes;
	snprintf(detail, cap,
		 "disk: %llu slots, %llu free (%llu listed), %llu quarantined, %llu rows to commit (%llu counted), "
		 "%llu of %llu bytes",
		 (unsigned long long)sum.slots, (unsigned long long)sum.free_slots, (unsigned long long)sum.listed,
		 (unsigned long long)sum.quarantined, (unsigned long long)sum.dirty, (unsigned long long)dirty,
		 (unsigned long long)kvs_charged(nvme), (unsigned long long)nvme->config.limit_bytes);

	return good ? KV_OK : KV_ERR_INTERNAL;
}
