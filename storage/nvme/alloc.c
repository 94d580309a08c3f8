/* Classes and slots, as the user of the tier sees them, and the sums counted again. Owner's thread only. */
#include "alloc.h"

#include "files.h"
#include "geometry.h"
#include "nvme/slots/slots.h"

#include <stdio.h>

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

/* For a new class: one more, or that of a class that nobody uses and that has no file: no row names it then. Nor may a
 * crash bring back a file of it, so removals are synced first (decision 088). */
static kv_status_t find_number(kvs_nvme_t *nvme, const kvs_super_class_t *record, uint32_t *p_class)
{
	const int is_synced = !nvme->slots_dirty && (atomic_load(&nvme->commit->state) == 0 || !nvme->commit->sync_dir);
	kv_status_t status = kvs_super_class_add(&nvme->super, record, p_class);

	for (uint32_t i = 0; i < nvme->super.class_count && status != KV_OK; i++) {
		const kvs_dclass_t *cls = &nvme->classes[i];

		if (cls->is_used || cls->is_named) {
			continue;
		}
		status = KV_ERR_BUSY;
		if (cls->files == 0 && is_synced) {
			nvme->super.classes[i] = *record;
			*p_class = i;
			return KV_MISS;
		}
	}
	nvme->super_dirty |= status == KV_ERR_BUSY && nvme->slots_dirty; /* a round, which syncs */

	return status;
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
			nvme->classes[i].is_used = 1;
			*p_class = i;
			return KV_OK;
		}
	}

	/* Also while the tier is off: the blocks have their place in memory, and on disk as soon as it is back. */
	memcpy(record.ns, ns, ns_len);
	record.slots_per_file = choose_slots(nvme, header_bytes + kvs_page_up(geometry->block_bytes));
	status = find_number(nvme, &record, p_class);
	if (status < 0) {
		return status;
	}
	kvs_class_init(nvme, *p_class);
	nvme->classes[*p_class].is_used = 1;
	nvme->classes[*p_class].record = status == KV_MISS ? KVS_RECORD_CHANGED : KVS_RECORD_WRITTEN;
	nvme->super_dirty = 1; /* written before any row of this class */

	return KV_OK;
}

void kvs_nvme_class_close(kvs_tier_t *tier, uint32_t slot_class)
{
	kvs_nvme(tier)->classes[slot_class].is_used = 0;
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

kv_status_t kvs_nvme_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_super_space_t *space;
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
	/* What the superblock does not name would be dropped by the next start, acknowledged or not. */
	space = kvs_super_space_find(&nvme->super, meta->root);
	if (!space || space->epoch != meta->epoch) {
		return KV_ERR_STALE_EPOCH;
	}
	cls = &nvme->classes[slot_class];
	if (cls->free_count == 0) {
		status = kvs_file_carve(nvme, cls);
		if (status != KV_OK) {
			return status;
		}
	}
	rec = kvs_rec_alloc(nvme);
	if (rec == KVS_NONE) {
		return KV_ERR_NOMEM;
	}

	slot = kvs_free_list_pop(nvme, cls);
	s = kvs_slot_get(nvme, slot);
	s->key = meta->key;
	s->group = meta->group;
	s->rec = rec;
	nvme->recs[rec].meta = *meta;
	nvme->recs[rec].meta.withdrawals = space->withdrawals;
	kvs_slot_set_state(nvme, slot, s, state);
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
	kvs_dslot_t *s = kvs_slot_find(nvme, loc);

	if (!s) {
		return KV_MISS;
	}
	if (state == KVS_FREE || !may_move(s, state)) {
		return KV_ERR_ARG;
	}
	if (s->state != state) {
		kvs_slot_set_state(nvme, loc.slot, s, state);
	}

	return KV_OK;
}

void kvs_nvme_free(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dslot_t *s = kvs_slot_find(nvme, loc);

	if (!s) {
		return;
	}

	/* The generation passes now, so every location of the slot misses at once. Its bytes may still be under a
	 * transfer: the slot is given out again only when the last one has ended, or the device could write an old
	 * block over a new one (decision 005). */
	s->gen = s->gen == UINT32_MAX ? 1u : s->gen + 1u;
	kvs_slot_clear_lost(nvme, loc.slot, s);
	if (s->io > 0) {
		s->flags |= KVS_SLOT_FREEING;
		/* Its row goes now, and not when the transfer has ended: the block is gone for who asks next. */
		if (s->flags & KVS_SLOT_ROW) {
			kvs_slot_mark_dirty(nvme, loc.slot, s);
		}
	} else {
		kvs_slot_release(nvme, loc.slot, s);
	}
}

void kvs_nvme_usage(kvs_tier_t *tier, kvs_usage_t *p_usage)
{
	const kvs_nvme_t *nvme = kvs_nvme(tier);

	*p_usage = (kvs_usage_t){
		.limit_bytes = nvme->config.limit_bytes,
		.charged_bytes = kvs_nvme_charged_bytes(nvme),
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
	       kvs_nvme_charged_bytes(nvme) <= nvme->config.limit_bytes;
	snprintf(detail, cap,
		 "disk: %llu slots, %llu free (%llu listed), %llu quarantined, %llu rows to commit (%llu counted), "
		 "%llu of %llu bytes",
		 (unsigned long long)sum.slots, (unsigned long long)sum.free_slots, (unsigned long long)sum.listed,
		 (unsigned long long)sum.quarantined, (unsigned long long)sum.dirty, (unsigned long long)dirty,
		 (unsigned long long)kvs_nvme_charged_bytes(nvme), (unsigned long long)nvme->config.limit_bytes);

	return good ? KV_OK : KV_ERR_INTERNAL;
}
