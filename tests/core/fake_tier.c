#include "fake_tier.h"

#include "kv/digest.h"

static fake_tier_t *fake_of(kvs_tier_t *tier)
{
	return (fake_tier_t *)tier;
}

/* A slot's number outside: with files, the file and the index in it. */
static kv_slot_t name_of(const fake_tier_t *fake, uint32_t i)
{
	return fake->file_slots ? kv_slot_make(i / fake->file_slots, i % fake->file_slots) : i;
}

static uint32_t index_of(const fake_tier_t *fake, kv_slot_t slot)
{
	return fake->file_slots ? kv_slot_slab(slot) * fake->file_slots + kv_slot_index(slot) : slot;
}

static fake_slot_t *slot_of(fake_tier_t *fake, kvs_loc_t loc)
{
	uint32_t i = index_of(fake, loc.slot);
	fake_slot_t *slot = i < fake->cap ? &fake->slots[i] : NULL;

	return slot && slot->gen == loc.gen && slot->state != KVS_FREE ? slot : NULL;
}

static kv_status_t fake_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class)
{
	fake_tier_t *fake = fake_of(tier);

	for (uint32_t i = 0; i < fake->class_count; i++) {
		if (strcmp(fake->classes[i].ns, ns) == 0 &&
		    memcmp(&fake->classes[i].geometry, geometry, sizeof *geometry) == 0) {
			*p_class = i;
			return KV_OK;
		}
	}
	if (fake->class_count == FAKE_CLASSES) {
		return KV_ERR_LIMIT;
	}
	strcpy(fake->classes[fake->class_count].ns, ns);
	fake->classes[fake->class_count].geometry = *geometry;
	*p_class = fake->class_count++;

	return KV_OK;
}

static void fake_class_close(kvs_tier_t *tier, uint32_t slot_class)
{
	(void)tier;
	(void)slot_class;
}

static const char *fake_class_ns(kvs_tier_t *tier, uint32_t slot_class)
{
	return fake_of(tier)->classes[slot_class].ns;
}

static uint64_t fake_class_bytes(kvs_tier_t *tier, uint32_t slot_class)
{
	const fake_tier_t *fake = fake_of(tier);
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < fake->cap; i++) {
		int has = fake->file_slots
				  ? fake->files[i / fake->file_slots].owner == slot_class + 1
				  : fake->slots[i].state != KVS_FREE && fake->slots[i].slot_class == slot_class;

		bytes += has ? 4096 : 0;
	}

	return bytes;
}

static kv_status_t fake_cap(kvs_tier_t *tier, const char *ns, uint64_t bytes)
{
	fake_tier_t *fake = fake_of(tier);
	uint32_t i = 0;

	while (i < fake->cap_count && strcmp(fake->caps[i].ns, ns) != 0) {
		i++;
	}
	kv_assert(i < KV_COUNT_OF(fake->caps));
	strcpy(fake->caps[i].ns, ns);
	fake->caps[i].bytes = bytes;
	fake->cap_count += i == fake->cap_count;

	return KV_OK;
}

/* May the class have `slots` more slots? */
static int is_allowed(fake_tier_t *fake, uint32_t slot_class, uint64_t slots)
{
	const char *ns = fake->classes[slot_class].ns;
	uint64_t cap = UINT64_MAX, used = slots * 4096;

	for (uint32_t i = 0; i < fake->cap_count; i++) {
		cap = strcmp(fake->caps[i].ns, ns) == 0 ? fake->caps[i].bytes : cap;
	}
	for (uint32_t c = 0; c < fake->class_count && cap != UINT64_MAX; c++) {
		used += strcmp(fake->classes[c].ns, ns) == 0 ? fake_class_bytes(&fake->tier, c) : 0;
	}

	return used <= cap;
}

/* A free slot of the class's files, or the first one of a file without an owner; cap: there is none. */
static uint32_t pick_in_files(fake_tier_t *fake, uint32_t slot_class)
{
	for (uint32_t pass = 0; pass < 2 && (pass == 0 || is_allowed(fake, slot_class, fake->file_slots)); pass++) {
		for (uint32_t i = 0; i < fake->cap; i++) {
			uint32_t file = i / fake->file_slots;

			if (fake->slots[i].state == KVS_FREE && !fake->files[file].retiring &&
			    fake->files[file].owner == (pass ? 0 : slot_class + 1)) {
				fake->files[file].owner = slot_class + 1;
				return i;
			}
		}
	}

	return fake->cap;
}

static kv_status_t fake_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			      const kvs_meta_t *meta, kvs_loc_t *p_loc)
{
	fake_tier_t *fake = fake_of(tier);
	fake_slot_t *slot;
	uint32_t i = fake->cap;

	kv_assert(slot_class < fake->class_count && (state == KVS_PUT || state == KVS_FILLING));
	if (fake->untouched) {
		return KV_ERR_BUSY;
	}
	if (fake->file_slots) {
		i = pick_in_files(fake, slot_class);
	} else if (fake->free_count > 0 && is_allowed(fake, slot_class, 1)) {
		i = fake->free_list[fake->free_count - 1];
	}
	if (i == fake->cap) {
		return KV_ERR_FULL;
	}
	fake->free_count--;
	p_loc->slot = name_of(fake, i);
	slot = &fake->slots[i];
	kv_assert(slot->state == KVS_FREE && slot->busy == 0);
	slot->state = state;
	slot->gen++;
	slot->meta = *meta;
	slot->slot_class = slot_class;
	slot->owner = owner;
	slot->bytes = 0xdead;
	p_loc->gen = slot->gen;
	fake->used++;

	return KV_OK;
}

static kv_status_t fake_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state)
{
	static const uint8_t allowed[6] = {
		[KVS_PUT] = 1u << KVS_READY | 1u << KVS_TRANSIT | 1u << KVS_QUARANTINED,
		[KVS_FILLING] = 1u << KVS_READY | 1u << KVS_TRANSIT | 1u << KVS_QUARANTINED,
		[KVS_READY] = 1u << KVS_QUARANTINED,
		[KVS_TRANSIT] = 1u << KVS_READY | 1u << KVS_QUARANTINED,
	};
	fake_slot_t *slot = slot_of(fake_of(tier), loc);

	kv_assert(slot && !slot->freed);
	kv_assert(allowed[slot->state] >> state & 1);
	slot->state = state;

	return KV_OK;
}

static void really_free(fake_tier_t *fake, fake_slot_t *slot)
{
	slot->state = KVS_FREE;
	slot->freed = 0;
	slot->aside = 0;
	slot->bytes = 0xf4ee;
	fake->free_list[fake->free_count++] = (uint32_t)(slot - fake->slots); /* with files: the count only */
	fake->used--;
}

static void fake_free(kvs_tier_t *tier, kvs_loc_t loc)
{
	fake_tier_t *fake = fake_of(tier);
	fake_slot_t *slot = slot_of(fake, loc);

	kv_assert(slot && !slot->freed);          /* the core frees what it owns, once */
	kv_assert(fake->disk || slot->busy == 0); /* and no memory under a transfer */
	if (slot->busy > 0) {
		slot->freed = 1;
	} else {
		really_free(fake, slot);
	}
}

static kv_status_t fake_mem(kvs_tier_t *tier, kvs_loc_t loc, kvs_mem_t *p_mem)
{
	fake_slot_t *slot = slot_of(fake_of(tier), loc);

	if (!slot || fake_of(tier)->device) {
		return slot ? KV_ERR_UNSUPPORTED : KV_MISS;
	}
	*p_mem = (kvs_mem_t){.data = &slot->bytes, .leaves = slot->leaves, .roots = slot->roots, .region = UINT32_MAX};

	return KV_OK;
}

static kv_status_t enqueue(fake_tier_t *fake, fake_op_t op)
{
	fake->tries += op.kind == 1;
	if (fake->off && op.kind == 1) {
		return KV_ERR_TIER_OFF;
	}
	if (fake->queue_limit && fake->op_count >= fake->queue_limit) {
		return KV_ERR_BUSY;
	}
	if (fake->op_count == fake->op_cap) {
		fake->op_cap = fake->op_cap ? fake->op_cap * 2 : 64;
		fake->ops = realloc(fake->ops, fake->op_cap * sizeof *fake->ops);
	}
	if (op.kind <= 1 && fake->fail_percent && kv_test_below(&fake->rng, 100) < fake->fail_percent) {
		op.status = fake->fail_with;
	}
	fake->ops[fake->op_count++] = op;

	return KV_OK;
}

static kv_status_t fake_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg)
{
	fake_tier_t *fake = fake_of(tier);
	fake_slot_t *slot = slot_of(fake, loc);
	kv_status_t status;

	kv_assert(slot && slot->state == KVS_FILLING && !fake->device);
	status = enqueue(
		fake,
		(fake_op_t){.done = done, .arg = arg, .to = src->data, .slot = index_of(fake, loc.slot), .kind = 1});
	if (status == KV_OK) {
		slot->busy++;
		fake->stores++;
	}

	return status;
}

static kv_status_t fake_readable(kvs_tier_t *tier, kvs_loc_t loc)
{
	const fake_slot_t *slot = slot_of(fake_of(tier), loc);

	return fake_of(tier)->dark ? KV_ERR_TIER_OFF : slot && slot->aside ? KV_ERR_IO : KV_OK;
}

static kv_status_t fake_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg)
{
	fake_tier_t *fake = fake_of(tier);
	fake_slot_t *slot = slot_of(fake, loc);
	kv_status_t status;

	if (!slot || slot->state != KVS_READY) {
		return KV_MISS;
	}
	status = fake_readable(tier, loc);
	if (status != KV_OK) {
		return status;
	}
	status = enqueue(fake, (fake_op_t){.done = done,
					   .arg = arg,
					   .to = dst->data,
					   .mem = *dst,
					   .slot = index_of(fake, loc.slot),
					   .kind = 0});
	if (status == KV_OK) {
		slot->busy++;
		fake->loads++;
	}

	return status;
}

static kv_status_t fake_flush(kvs_tier_t *tier, kvs_done_fn done, void *arg)
{
	fake_of(tier)->flushes++;

	return enqueue(fake_of(tier), (fake_op_t){.done = done,
						  .arg = arg,
						  .status = fake_of(tier)->flush_status,
						  .value = fake_of(tier)->seq,
						  .kind = 2});
}

static kv_status_t fake_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg)
{
	fake_tier_t *fake = fake_of(tier);
	uint32_t i = 0;

	if (fake->queue_limit && fake->op_count >= fake->queue_limit) {
		return KV_ERR_BUSY;
	}
	while (i < fake->root_count && memcmp(fake->roots[i].root, epoch->root, 32) != 0) {
		i++;
	}
	if (fake->root_limit && i == fake->root_count && i >= fake->root_limit) {
		return KV_ERR_LIMIT;
	}
	kv_assert(i < KV_COUNT_OF(fake->roots));
	fake->root_count = i == fake->root_count ? i + 1 : fake->root_count;
	memcpy(fake->roots[i].root, epoch->root, 32);
	fake->roots[i].epoch = epoch->epoch;

	return enqueue(fake, (fake_op_t){.done = done, .arg = arg, .kind = 3});
}

static uint64_t fake_epoch_last(kvs_tier_t *tier)
{
	const fake_tier_t *fake = fake_of(tier);
	uint64_t last = 0;

	for (uint32_t i = 0; i < fake->root_count; i++) {
		last = fake->roots[i].epoch > last ? fake->roots[i].epoch : last;
	}

	return last;
}

static uint32_t fake_epochs_drop(kvs_tier_t *tier, uint32_t memory, kvs_root_used_fn used, void *ctx)
{
	const uint64_t last = fake_epoch_last(tier);
	fake_tier_t *fake = fake_of(tier);
	uint32_t kept = 0, count = fake->root_count;

	(void)memory;
	for (uint32_t i = 0; i < count; i++) {
		if (fake->roots[i].epoch == last || used(ctx, fake->roots[i].root)) {
			fake->roots[kept++] = fake->roots[i];
		}
	}
	fake->root_count = kept;

	return count - kept;
}

static uint64_t fake_epoch_get(kvs_tier_t *tier, const uint8_t root[32])
{
	fake_tier_t *fake = fake_of(tier);

	for (uint32_t i = 0; i < fake->root_count; i++) {
		if (memcmp(fake->roots[i].root, root, 32) == 0) {
			return fake->roots[i].epoch;
		}
	}

	return 0;
}

static kv_status_t fake_withdraw(kvs_tier_t *tier, const uint8_t root[32], kvs_done_fn done, void *arg)
{
	fake_tier_t *fake = fake_of(tier);

	if (fake->withdraw_refuse != KV_OK || fake_epoch_get(tier, root) == 0) {
		return fake->withdraw_refuse != KV_OK ? fake->withdraw_refuse : KV_MISS;
	}
	fake->withdrawals++;

	return enqueue(fake, (fake_op_t){.done = done, .arg = arg, .status = fake->withdraw_status, .kind = 3});
}

static kv_status_t fake_recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max)
{
	fake_tier_t *fake = fake_of(tier);

	if (fake->found_depth == 0) {
		fake->deepest = 0;
		for (uint32_t i = 0; i < fake->cap; i++) {
			if (fake->slots[i].state == KVS_READY && fake->slots[i].meta.depth > fake->deepest) {
				fake->deepest = fake->slots[i].meta.depth;
			}
		}
		fake->found_depth = fake->ordered ? fake->deepest : 1;
	}
	for (; fake->found_depth <= fake->deepest; fake->found_depth++, fake->found_slot = 0) {
		for (; fake->found_slot < fake->cap; fake->found_slot++) {
			uint32_t i = fake->found_slot;
			fake_slot_t *slot = &fake->slots[i];
			kv_status_t status;

			if (slot->state != KVS_READY || slot->put_off < fake->again ||
			    (!fake->ordered && slot->meta.depth != fake->found_depth)) {
				continue;
			}
			if (max-- == 0) {
				return KV_PENDING;
			}
			status = fake_epoch_get(tier, slot->meta.root) == slot->meta.epoch && !slot->meta.transient
					 ? found(arg, slot->slot_class, (kvs_loc_t){name_of(fake, i), slot->gen},
						 &slot->meta)
					 : KV_ERR_STALE_EPOCH;
			kv_assert(status != KV_PENDING || !fake->again);
			slot->put_off = status == KV_PENDING;
			fake->put_off += slot->put_off;
			if (status != KV_OK && status != KV_PENDING) {
				really_free(fake, slot);
			}
		}
	}
	fake->found_depth = fake->found_slot = 0;
	fake->again = fake->put_off > 0;
	fake->put_off = 0;

	return fake->again ? KV_MISS : KV_OK;
}

static void fake_touch(kvs_tier_t *tier, kvs_loc_t loc, uint64_t stamp)
{
	fake_tier_t *fake = fake_of(tier);
	fake_slot_t *slot = slot_of(fake, loc);

	if (slot) {
		slot->use =
			(fake->use_base + stamp) << 16 | slot->meta.depth; /* of those used alike the shallow first */
	}
}

static int compare_use(const void *a, const void *b)
{
	const fake_slot_t *x = *(fake_slot_t *const *)a, *y = *(fake_slot_t *const *)b;

	return x->use != y->use ? (x->use > y->use) - (x->use < y->use) : (x > y) - (x < y);
}

static kv_status_t fake_recover_use(kvs_tier_t *tier, uint32_t memory, kvs_used_fn used, void *arg, uint32_t max)
{
	fake_tier_t *fake = fake_of(tier);

	(void)memory;
	if (!fake->by_use) {
		fake->by_use = calloc(fake->cap, sizeof(fake_slot_t *));
		for (uint32_t i = 0; i < fake->cap; i++) {
			fake->by_use[i] = &fake->slots[i];
		}
		qsort(fake->by_use, fake->cap, sizeof(fake_slot_t *), compare_use);
		fake->use_base = fake->by_use[fake->cap - 1]->use >> 16;
	}
	for (; fake->used_next < fake->cap; fake->used_next++) {
		const fake_slot_t *slot = fake->by_use[fake->used_next];

		if (slot->state == KVS_READY) {
			if (max-- == 0) {
				return KV_PENDING;
			}
			used(arg, (kvs_loc_t){name_of(fake, (uint32_t)(slot - fake->slots)), slot->gen},
			     &slot->meta.key, slot->meta.group);
		}
	}
	free(fake->by_use);
	fake->by_use = NULL;
	fake->used_next = 0;

	return KV_OK;
}

static void fake_usage(kvs_tier_t *tier, kvs_usage_t *p_usage)
{
	fake_tier_t *fake = fake_of(tier);

	*p_usage = (kvs_usage_t){.limit_bytes = (uint64_t)fake->cap * 4096,
				 .charged_bytes = (uint64_t)fake->used * 4096,
				 .slots = fake->cap,
				 .free_slots = fake->free_count};
	for (uint32_t i = 0; i < fake->cap; i++) {
		if (fake->slots[i].state == KVS_QUARANTINED) {
			p_usage->quarantined_slots++;
		} else if (fake->slots[i].state != KVS_FREE) {
			p_usage->used_slots += fake->slots[i].freed ? 0 : 1;
		}
	}
}

static int fake_event_fd(kvs_tier_t *tier)
{
	(void)tier;

	return -1;
}

/* A block is one word in here; the rest of it is what lies there. */
static void digest_whole(const kvs_geometry_t *g, const kvs_mem_t *mem)
{
	for (uint32_t h = 0; h < g->heads; h++) {
		for (uint32_t l = 0; l < g->leaves; l++) {
			size_t offset, len;

			kvs_leaf_range(g, h, l, &offset, &len);
			mem->leaves[h * g->leaves + l] = kv_digest((const uint8_t *)mem->data + offset, len);
		}
		mem->roots[h] = kv_digest_root(mem->leaves + (size_t)h * g->leaves, g->leaves);
	}
}

static void complete(fake_tier_t *fake, uint32_t which, int closing)
{
	fake_op_t op = fake->ops[which];
	fake_slot_t *slot = &fake->slots[op.slot];

	fake->op_count--;
	memmove(&fake->ops[which], &fake->ops[which + 1], (fake->op_count - which) * sizeof *fake->ops);
	op.status = closing ? KV_ERR_CLOSED : op.kind == 0 && slot->aside ? KV_ERR_IO : op.status;
	if (op.kind <= 1) {
		slot->busy--;
		if (op.status == KV_OK && op.kind == 0) {
			*op.to = slot->bytes;
			if (fake->whole) {
				digest_whole(&fake->classes[slot->slot_class].geometry, &op.mem);
			}
		} else if (op.status == KV_OK) {
			slot->bytes = *op.to;
			slot->seq = ++fake->seq;
			slot->state = slot->freed ? slot->state : KVS_READY;
		}
		if (slot->freed && slot->busy == 0) {
			really_free(fake, slot);
		}
	}
	if (op.kind == 2 && op.status == KV_OK && op.value > fake->synced) {
		fake->synced = op.value;
	}
	op.done(op.arg, op.status);
}

void fake_lose(fake_tier_t *fake, kv_slot_t slot)
{
	fake_slot_t *s = &fake->slots[slot];

	kv_assert(s->state == KVS_READY);
	s->state = KVS_QUARANTINED;
	s->aside = 0;
	fake->watch.lost(fake->watch.arg, (kvs_loc_t){name_of(fake, slot), s->gen}, &s->meta.key, s->meta.group);
}

void fake_set_readable(fake_tier_t *fake, kv_slot_t slot, int readable)
{
	fake_slot_t *s = &fake->slots[slot];

	kv_assert(s->state == KVS_READY && s->aside == readable);
	s->aside = !readable;
	fake->watch.readable(fake->watch.arg, (kvs_loc_t){name_of(fake, slot), s->gen}, &s->meta.key, s->meta.group,
			     readable);
}

void fake_read_all(fake_tier_t *fake)
{
	for (uint32_t i = 0; i < fake->cap; i++) {
		if (fake->slots[i].aside && !fake->slots[i].freed) {
			fake_set_readable(fake, i, 1);
		}
	}
}

int fake_is_synced(const fake_tier_t *fake, kvs_loc_t loc)
{
	const fake_slot_t *s = index_of(fake, loc.slot) < fake->cap ? &fake->slots[index_of(fake, loc.slot)] : NULL;

	return s && s->gen == loc.gen && s->state == KVS_READY && s->seq <= fake->synced;
}

static void lose_some(fake_tier_t *fake)
{
	kv_slot_t slot = (kv_slot_t)kv_test_below(&fake->rng, fake->cap);

	if (kv_test_below(&fake->rng, 100) < fake->lose_percent && fake->slots[slot].state == KVS_READY &&
	    !fake->slots[slot].freed) {
		fake_lose(fake, slot);
	}
}

static uint32_t fake_poll(kvs_tier_t *tier, uint32_t max)
{
	fake_tier_t *fake = fake_of(tier);
	uint32_t ran = 0;
	kv_slot_t slot;

	while (!fake->hold && fake->op_count > 0 && ran < max) {
		if (fake->shuffle && kv_test_below(&fake->rng, 4) == 0) {
			break;
		}
		complete(fake, fake->shuffle ? (uint32_t)kv_test_below(&fake->rng, fake->op_count) : 0, 0);
		ran++;
	}
	if (fake->lose_percent > 0 && fake->watch.lost) {
		lose_some(fake);
	}
	if (fake->aside_percent > 0 && fake->watch.readable && kv_test_below(&fake->rng, 100) < fake->aside_percent) {
		const fake_slot_t *s = &fake->slots[slot = (kv_slot_t)kv_test_below(&fake->rng, fake->cap)];

		if (s->state == KVS_READY && !s->freed) {
			fake_set_readable(fake, slot, s->aside);
		}
	}

	return ran;
}

static uint32_t fake_in_flight(kvs_tier_t *tier)
{
	return fake_of(tier)->op_count;
}

static kv_status_t fake_check(kvs_tier_t *tier, char *detail, size_t cap)
{
	fake_tier_t *fake = fake_of(tier);

	snprintf(detail, cap, "free %u used %u of %u", fake->free_count, fake->used, fake->cap);

	return fake->free_count + fake->used == fake->cap ? KV_OK : KV_ERR_INTERNAL;
}

static void fake_close(kvs_tier_t *tier)
{
	while (fake_of(tier)->op_count > 0) {
		complete(fake_of(tier), 0, 1);
	}
}

static void fake_watch(kvs_tier_t *tier, const kvs_watch_t *watch)
{
	fake_of(tier)->watch = *watch;
}

/* ---- files that change their class ----------------------------------------------------------- */

static uint32_t files_count(kvs_tier_t *tier)
{
	const fake_tier_t *fake = fake_of(tier);

	return fake->file_slots ? fake->cap / fake->file_slots : 0;
}

static kv_status_t files_look(kvs_tier_t *tier, uint32_t file, kvs_slab_desc_t *p_look)
{
	const fake_tier_t *fake = fake_of(tier);

	if (file >= files_count(tier) || fake->files[file].owner == 0) {
		return KV_MISS;
	}
	*p_look = (kvs_slab_desc_t){.slot_class = fake->files[file].owner - 1,
				    .slots = fake->file_slots,
				    .retiring = fake->files[file].retiring};
	for (uint32_t i = 0; i < fake->file_slots; i++) {
		p_look->taken += fake->slots[file * fake->file_slots + i].state != KVS_FREE;
	}

	return KV_OK;
}

static uint32_t files_gain(kvs_tier_t *tier, uint32_t file, uint32_t for_class)
{
	fake_tier_t *fake = fake_of(tier);
	uint32_t owner = fake->files[file].owner - 1;
	int same = strcmp(fake->classes[owner].ns, fake->classes[for_class].ns) == 0;

	return same || is_allowed(fake, for_class, fake->file_slots) ? fake->file_slots : 0;
}

static uint64_t files_unit(kvs_tier_t *tier, uint32_t slot_class)
{
	(void)slot_class;

	return (uint64_t)fake_of(tier)->file_slots * 4096;
}

static kv_status_t files_slot(kvs_tier_t *tier, kv_slot_t slot, kvs_loc_t *p_loc, kvs_meta_t *p_meta)
{
	fake_tier_t *fake = fake_of(tier);
	const fake_slot_t *s = &fake->slots[index_of(fake, slot)];

	if (s->state != KVS_READY || s->freed) {
		return KV_MISS;
	}
	*p_loc = (kvs_loc_t){slot, s->gen};
	*p_meta = (kvs_meta_t){.key = s->meta.key, .group = s->meta.group};

	return KV_OK;
}

static uint64_t files_free(kvs_tier_t *tier, uint32_t slot_class)
{
	const fake_tier_t *fake = fake_of(tier);
	uint64_t count = 0;

	for (uint32_t i = 0; i < fake->cap; i++) {
		uint32_t file = i / fake->file_slots;

		count += fake->slots[i].state == KVS_FREE && fake->files[file].owner == slot_class + 1 &&
			 !fake->files[file].retiring;
	}

	return count;
}

static int files_is_short(kvs_tier_t *tier, uint32_t slot_class)
{
	fake_tier_t *fake = fake_of(tier);
	int may = files_count(tier) > 0 && is_allowed(fake, slot_class, fake->file_slots);

	for (uint32_t i = 0; i < files_count(tier); i++) {
		if (fake->files[i].owner == 0 && may) {
			return 0;
		}
	}

	return files_count(tier) > 0 && files_free(tier, slot_class) <= fake->file_slots / 4;
}

static int files_is_coming(kvs_tier_t *tier, uint32_t slot_class)
{
	(void)tier;
	(void)slot_class;

	return 0;
}

static void files_leave(kvs_tier_t *tier, uint32_t file)
{
	kv_assert(!fake_of(tier)->files[file].retiring);
	fake_of(tier)->files[file].retiring = 1;
}

static void files_stay(kvs_tier_t *tier, uint32_t file)
{
	kv_assert(fake_of(tier)->files[file].retiring);
	fake_of(tier)->files[file].retiring = 0;
}

static kv_status_t files_retire(kvs_tier_t *tier, uint32_t file, uint32_t for_class)
{
	fake_tier_t *fake = fake_of(tier);
	kvs_slab_desc_t look;

	kv_assert(files_look(tier, file, &look) == KV_OK && look.retiring && look.taken == 0);
	fake->files[file].owner = for_class + 1;
	fake->files[file].retiring = 0;
	fake->retired++;

	return KV_OK;
}

static const kvs_rebalance_ops_t change_ops = {files_count,     files_look,  files_gain, files_unit,
					       files_slot,      files_free,  NULL,       files_is_short,
					       files_is_coming, files_leave, files_stay, files_retire};

#define OPS                                                                                                            \
	.class_open = fake_class_open, .class_close = fake_class_close, .class_ns = fake_class_ns,                     \
	.class_bytes = fake_class_bytes, .cap = fake_cap, .alloc = fake_alloc, .set_state = fake_set_state,            \
	.free = fake_free, .mem = fake_mem, .store = fake_store, .load = fake_load, .flush = fake_flush,               \
	.epoch_set = fake_epoch_set, .epoch_get = fake_epoch_get, .epoch_last = fake_epoch_last,                       \
	.epochs_drop = fake_epochs_drop, .recover = fake_recover, .usage = fake_usage, .event_fd = fake_event_fd,      \
	.poll = fake_poll, .in_flight = fake_in_flight, .check = fake_check, .close = fake_close, .touch = fake_touch, \
	.recover_use = fake_recover_use

static const kvs_tier_ops_t ops_cpu = {.medium = "CPU", OPS};
static const kvs_tier_ops_t ops_disk = {.medium = "DISK",
					.rebalance = &change_ops,
					.watch = fake_watch,
					.readable = fake_readable,
					.withdraw = fake_withdraw,
					OPS};

void fake_tier_init(fake_tier_t *fake, int disk, uint32_t cap, uint64_t seed)
{
	*fake = (fake_tier_t){.tier.ops = disk ? &ops_disk : &ops_cpu,
			      .disk = disk,
			      .cap = cap,
			      .rng.state = seed,
			      .fail_with = KV_ERR_IO};
	fake->slots = calloc(cap, sizeof *fake->slots);
	fake->free_list = calloc(cap, sizeof *fake->free_list);
	for (uint32_t i = 0; i < cap; i++) {
		fake->free_list[i] = cap - 1 - i;
	}
	fake->free_count = cap;
}

void fake_tier_fini(fake_tier_t *fake)
{
	free(fake->slots);
	free(fake->free_list);
	free(fake->ops);
	free(fake->by_use);
}

uint64_t *fake_bytes(fake_tier_t *fake, kv_slot_t slot)
{
	kv_assert(slot < fake->cap);

	return &fake->slots[slot].bytes;
}

void fake_disk_restart(fake_tier_t *fake)
{
	kv_assert(fake->op_count == 0);
	fake->synced = fake->seq; /* slots found again are on the device */
	for (uint32_t i = 0; i < FAKE_FILES; i++) {
		fake->files[i].retiring = 0;
	}
	for (uint32_t i = 0; i < fake->cap; i++) {
		fake->slots[i].aside = 0;
		if (fake->slots[i].state != KVS_FREE && fake->slots[i].state != KVS_READY) {
			really_free(fake, &fake->slots[i]);
		}
	}
}
