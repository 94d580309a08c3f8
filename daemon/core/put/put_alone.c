/* Puts of a group without parents: entries that do not wait for each other. */
#include "core/core_impl.h"

/* ---- pins ------------------------------------------------------------------------------------ */

static kvd_claim_t *claim_at(const kvd_core_t *core, uint32_t id)
{
	return kvd_pool_at(&core->claims, id);
}

void kvd_entry_pin(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t block)
{
	kvd_entry_t *entry = &put->entries[index];

	if (kvd_claim_take(core, block, KVD_CLAIM_PUT, put->id, &entry->claim) != KV_OK) {
		entry->claim = KVD_NONE;
		return;
	}
	claim_at(core, entry->claim)->entry = index;
	put->pins++;
}

static void entry_unpin(kvd_core_t *core, kvd_put_t *put, uint32_t index)
{
	kvd_claim_drop(core, put->entries[index].claim);
	put->entries[index].claim = KVD_NONE;
	put->pins--;
}

void kvd_put_lose(kvd_core_t *core, uint32_t claim)
{
	kvd_put_t *put = kvd_put_find(core, claim_at(core, claim)->owner);

	if (put->alone) {
		entry_unpin(core, put, claim_at(core, claim)->entry);
	} else {
		kvd_claim_drop(core, put->claim);
		put->claim = KVD_NONE;
	}
	core->durable_look |= KVD_LOOK_DROPPED;
}

void kvd_put_unpin(kvd_core_t *core, kvd_put_t *put)
{
	if (put->claim != KVD_NONE) {
		kvd_claim_drop(core, put->claim);
		put->claim = KVD_NONE;
	}
	for (uint32_t i = 0; put->pins > 0; i++) {
		if (put->entries[i].claim != KVD_NONE) {
			entry_unpin(core, put, i);
		}
	}
}

/* ---- entries --------------------------------------------------------------------------------- */

void kvd_entry_full(kvd_put_t *put, uint32_t index)
{
	put->entries[index].turn = KVD_NONE;
	if (put->turn_head == KVD_NONE) {
		put->turn_head = index;
	} else {
		put->entries[put->turn_tail].turn = index;
	}
	put->turn_tail = index;
}

uint32_t kvd_entry_next(kvd_put_t *put)
{
	uint32_t index = put->turn_head;

	if (index != KVD_NONE) {
		put->turn_head = put->entries[index].turn;
	}

	return index;
}

static int is_visible(const kvd_entry_t *entry)
{
	return entry->state == KVD_ENTRY_ALREADY || entry->state == KVD_ENTRY_VISIBLE ||
	       entry->state == KVD_ENTRY_DUPLICATE;
}

void kvd_put_advance(kvd_put_t *put)
{
	while (put->next < put->n && is_visible(&put->entries[put->next])) {
		put->next++;
	}
}

uint32_t kvd_put_unfinished(const kvd_put_t *put)
{
	uint32_t count = 0;

	for (uint32_t i = put->next; i < put->n; i++) {
		count += is_visible(&put->entries[i]) ? 0 : 1;
	}

	return count;
}

/* ---- durable --------------------------------------------------------------------------------- */

/* The entry's block while it is pinned, else KVD_NONE. */
static uint32_t pinned_block(const kvd_core_t *core, const kvd_put_t *put, uint32_t index)
{
	return put->entries[index].claim == KVD_NONE ? KVD_NONE : claim_at(core, put->entries[index].claim)->block;
}

uint32_t kvd_put_on_disk(kvd_core_t *core, const kvd_put_t *put, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		uint32_t id = pinned_block(core, put, i);

		if (id == KVD_NONE || !kvd_durable_at(core, id, put->entries[i].disk)) {
			return i;
		}
	}

	return n;
}

int kvd_put_stored(kvd_core_t *core, kvd_put_t *put)
{
	for (; put->stored < put->next; put->stored++) {
		uint32_t id = pinned_block(core, put, put->stored);

		if (id != KVD_NONE && kvd_in_set(&core->ix, kvd_block_at(&core->ix, id), KVD_DISK)) {
			put->entries[put->stored].disk = kvd_block_at(&core->ix, id)->disk;
			continue;
		}
		if (id != KVD_NONE && kvd_write_expected(core, id)) {
			return 0;
		}
		if (id == KVD_NONE || put->asked == put->stored + 1 || kvd_writes_paused(core)) {
			break; /* it will not come there */
		}
		put->asked = put->stored + 1;
		kvd_queue_push(&core->ix, kvd_block_at(&core->ix, id)->node);
		return 0;
	}

	return 1;
}
