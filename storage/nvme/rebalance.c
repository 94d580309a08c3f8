/* Slot files that go: emptied by the core, removed when the metadata has no row of them, their room another class's. */
#include "rebalance.h"

#include "files.h"
#include "nvme/slots/slots.h"

static kvs_dfile_t *file_at(kvs_nvme_t *nvme, uint32_t number)
{
	return number < KVS_MAX_FILES && nvme->files[number].slot && !nvme->files[number].gone ? &nvme->files[number]
											       : NULL;
}

static uint32_t count_slabs(kvs_tier_t *tier)
{
	(void)tier;

	return KVS_MAX_FILES;
}

static kv_status_t describe_slab(kvs_tier_t *tier, uint32_t number, kvs_slab_desc_t *p_desc)
{
	const kvs_dfile_t *file = file_at(kvs_nvme(tier), number);

	if (!file) {
		return KV_MISS;
	}
	*p_desc = (kvs_slab_desc_t){
		.slot_class = file->slot_class,
		.slots = file->slots,
		.taken = file->slots - file->free_slots,
		.retiring = file->state == KVS_FILE_RETIRING,
		.retired = file->state == KVS_FILE_RETIRED,
	};

	return KV_OK;
}

static uint64_t slab_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	const kvs_dclass_t *cls = &kvs_nvme(tier)->classes[slot_class];

	return cls->slots_per_file * cls->stride;
}

static kv_status_t describe_slot(kvs_tier_t *tier, kv_slot_t slot, kvs_loc_t *p_loc, kvs_meta_t *p_meta)
{
	const kvs_dslot_t *s = kvs_slot_get(kvs_nvme(tier), slot);

	if (!s || s->state != KVS_READY || (s->flags & KVS_SLOT_FREEING)) {
		return KV_MISS;
	}
	*p_loc = (kvs_loc_t){slot, s->gen};
	*p_meta = (kvs_meta_t){.key = s->key, .group = s->group};

	return KV_OK;
}

static uint64_t count_free_slots(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_nvme(tier)->classes[slot_class].free_count;
}

static void add_going(const kvs_nvme_t *nvme, const kvs_dfile_t *file, uint32_t for_class, kvs_retired_sum_t *going)
{
	uint64_t bytes = file->slots * nvme->classes[file->slot_class].stride;

	going->bytes += bytes;
	going->slots += file->slots;
	if (strcmp(nvme->super.classes[file->slot_class].ns, nvme->super.classes[for_class].ns) == 0) {
		going->own += bytes;
	}
}

/* Files that have been emptied for the class, and wait for their rows to go. */
static kvs_retired_sum_t retired_for(const kvs_nvme_t *nvme, uint32_t slot_class)
{
	kvs_retired_sum_t going = {0};

	for (uint32_t i = 0; nvme->retired_files > 0 && i < KVS_MAX_FILES; i++) {
		const kvs_dfile_t *file = &nvme->files[i];

		if (file->slot && file->state == KVS_FILE_RETIRED && file->for_class == slot_class) {
			add_going(nvme, file, slot_class, &going);
		}
	}

	return going;
}

static uint32_t slots_gained(kvs_tier_t *tier, uint32_t number, uint32_t for_class)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_dfile_t *file = file_at(nvme, number);
	kvs_retired_sum_t going;

	if (!file || for_class >= nvme->super.class_count) {
		return 0;
	}
	going = retired_for(nvme, for_class);
	add_going(nvme, file, for_class, &going);

	return kvs_file_fits_cap(nvme, &nvme->classes[for_class], &going) ? nvme->classes[for_class].slots_per_file : 0;
}

static int is_short(kvs_tier_t *tier, uint32_t slot_class)
{
	const kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_dclass_t *cls = &nvme->classes[slot_class];
	kvs_retired_sum_t going;

	if (nvme->health >= KVS_HEALTH_READ_ONLY || cls->free_count > cls->slots_per_file / 4u) {
		return 0;
	}
	going = retired_for(nvme, slot_class);

	return !kvs_file_fits_limit(nvme, cls, &going);
}

static int is_coming(kvs_tier_t *tier, uint32_t slot_class)
{
	return kvs_nvme(tier)->classes[slot_class].record != KVS_RECORD_WRITTEN ||
	       retired_for(kvs_nvme(tier), slot_class).slots > 0;
}

static void begin_retire(kvs_tier_t *tier, uint32_t number)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dfile_t *file = file_at(nvme, number);

	if (file && file->state == KVS_FILE_USED) {
		kvs_file_unlist_free_slots(nvme, number);
		file->state = KVS_FILE_RETIRING;
	}
}

static void cancel_retire(kvs_tier_t *tier, uint32_t number)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dfile_t *file = file_at(nvme, number);

	if (file && file->state == KVS_FILE_RETIRING) {
		file->state = KVS_FILE_USED;
		file->free_slots = 0;
		kvs_file_list_free_slots(nvme, number);
	}
}

static kv_status_t retire_slab(kvs_tier_t *tier, uint32_t number, uint32_t for_class)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	kvs_dfile_t *file = file_at(nvme, number);

	if (!file || file->state != KVS_FILE_RETIRING || for_class >= nvme->super.class_count) {
		return KV_MISS;
	}
	if (file->free_slots != file->slots) {
		return KV_ERR_BUSY;
	}
	file->state = KVS_FILE_RETIRED;
	file->for_class = for_class;
	nvme->retired_files++;
	kv_metric_add(nvme->metrics, KV_M_FILES_RETIRED, 1);

	return KV_OK;
}

void kvs_rebalance_step(kvs_nvme_t *nvme)
{
	for (uint32_t i = 0; nvme->retired_files > 0 && i < KVS_MAX_FILES; i++) {
		const kvs_dfile_t *file = &nvme->files[i];

		if (file->slot && file->state == KVS_FILE_RETIRED && nvme->health < KVS_HEALTH_READ_ONLY) {
			kvs_dclass_t *cls = &nvme->classes[file->for_class];
			const kvs_retired_sum_t going = retired_for(nvme, cls->id);

			/* One may be too small: then another one is emptied, and both wait for each other. A file that
			 * the cap of the class forbids stays idle. */
			if (!cls->is_used || !kvs_file_fits_cap(nvme, cls, &going)) {
				(void)kvs_file_remove(nvme, i);
			} else if (kvs_file_fits_limit(nvme, cls, &going)) {
				(void)kvs_file_carve(nvme, cls);
			}
			return;
		}
	}
}

const kvs_rebalance_ops_t kvs_nvme_rebalance_ops = {
	.slab_count = count_slabs,
	.describe_slab = describe_slab,
	.slots_gained = slots_gained,
	.slab_bytes = slab_bytes,
	.describe_slot = describe_slot,
	.free_slots = count_free_slots,
	.is_short = is_short,
	.is_coming = is_coming,
	.begin_retire = begin_retire,
	.cancel_retire = cancel_retire,
	.retire = retire_slab,
};
