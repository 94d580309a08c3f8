/* Announced blocks: handed over when they become visible, without a request of the producer (decision 052). */
#include "core/block/block.h"
#include "core/handover/handover_impl.h"

#define LOOKUPS 256u /* of a quantum */

/* ---- what is announced ----------------------------------------------------------------------- */

uint32_t kvd_handover_reach(const kvd_handover_t *entry)
{
	return entry->is_announced ? entry->ahead.n : entry->parts[0].n;
}

uint64_t kvd_handover_ahead_growth(const kvd_handover_t *entry, uint32_t n)
{
	const uint64_t now = (uint64_t)(n - entry->parts[0].n) * sizeof(kv_key_t),
		       had = kvd_handover_ahead_bytes(entry);

	return now > had ? now - had : 0;
}

kv_status_t kvd_handover_draft_ahead(const kvd_core_t *core, const kvd_handover_t *entry,
				     const kvd_handover_keys_t *more, const kv_msg_handover_send_t *ask,
				     kvd_ahead_t *ahead)
{
	const uint32_t first = entry->parts[0].n, known = kvd_handover_reach(entry);

	*ahead = (kvd_ahead_t){.first = first,
			       .n = more->n,
			       .last = (ask->flags & KV_HANDOVER_LAST) != 0,
			       .partial = ask->partial,
			       .private_key = ask->private_key};
	if (more->n == first) {
		return KV_OK;
	}
	ahead->keys = kv_alloc(core->env, (more->n - first) * sizeof *ahead->keys);
	if (!ahead->keys) {
		return KV_ERR_NOMEM;
	}
	if (known > first) {
		memcpy(ahead->keys, &entry->ahead.keys[first - entry->ahead.first],
		       (known - first) * sizeof *ahead->keys);
	}
	if (more->n > known) { /* the request may name some again: those before stay */
		memcpy(&ahead->keys[known - first],
		       more->keys + (size_t)(more->count - (more->n - known)) * KV_KEY_BYTES,
		       (more->n - known) * sizeof *ahead->keys);
	}

	return KV_OK;
}

void kvd_handover_announce(kvd_core_t *core, kvd_handover_t *entry, const kvd_ahead_t *ahead)
{
	kvd_ns_t *ns = core->ns[entry->ns];

	kvd_handover_drop_ahead(core, entry);
	entry->ahead = *ahead;
	entry->is_announced = entry->was_announced = 1;
	ns->tail_bytes += kvd_handover_ahead_bytes(entry);
	ns->announced_count++;
	core->announced_count++;
	kvd_list_push(&ns->announced, &core->handovers, offsetof(kvd_handover_t, of_announced), entry->self);
}

/* ---- what is visible of it ------------------------------------------------------------------- */

/* The deepest of the announced blocks that is visible with all before it; KVD_NONE: not even the next one. KV_ERR_ARG:
 * one does not follow that before it. */
static kv_status_t find_deepest(const kvd_core_t *core, const kvd_handover_call_t *call, const kvd_ahead_t *ahead,
				uint32_t *p_left, uint32_t *p_n, uint32_t *p_block)
{
	const kvd_handover_part_t *part = &call->entry->parts[0];
	const kvd_pin_t *pin = part->pins.count > 0 ? kvd_obj_at(&core->pins, part->pins.head) : NULL;
	uint32_t above = pin ? pin->block : KVD_NONE;

	*p_block = KVD_NONE;
	for (*p_n = part->n; *p_n<ahead->n && * p_left> 0; (*p_n)++) {
		uint32_t block = kvd_index_find(&core->ix, call->space->tree, &ahead->keys[*p_n - ahead->first],
						call->space->groups[0].id);

		(*p_left)--;
		if (block == KVD_NONE) {
			break;
		}
		/* Announced keys are the producer's word alone. Each must lie below the one before, or blocks of another
		 * prompt would be handed over as this one's. */
		if (kvd_is_private(&core->ix, kvd_block_at(&core->ix, block)) ||
		    kvd_index_parent(&core->ix, block) != above) {
			return KV_ERR_ARG;
		}
		*p_block = above = block;
	}

	return KV_OK;
}

kv_status_t kvd_handover_pin_ahead(kvd_core_t *core, kvd_handover_call_t *call, const kvd_ahead_t *ahead,
				   uint64_t tail_bytes, uint32_t *p_left, kvd_handover_advance_t *advance)
{
	uint32_t block;
	kv_status_t status = find_deepest(core, call, ahead, p_left, &advance->n, &block);

	if (status == KV_OK && block != KVD_NONE) {
		status = kvd_handover_pin_block(core, call, block, tail_bytes, &advance->pins);
	}
	if (status != KV_OK || !ahead->last || advance->n < ahead->n || *p_left == 0) {
		return status;
	}
	if (ahead->partial > 0) {
		(*p_left)--;
		status = kvd_handover_pin_private(core, call, &ahead->private_key, tail_bytes, &advance->private_pins);
	}
	advance->is_complete = status == KV_OK;

	return status == KV_MISS ? KV_OK : status;
}

void kvd_handover_advance(kvd_core_t *core, kvd_handover_t *entry, const kvd_handover_advance_t *advance)
{
	if (advance->pins.count > 0) {
		/* The new pin is there: what both keep is not let go of in between. */
		kvd_handover_drop_pins(core, &entry->parts[0].pins);
		entry->parts[0] = (kvd_handover_part_t){.n = advance->n, .pins = advance->pins};
		entry->n = kvd_handover_units(core, entry);
	}
	if (advance->is_complete) {
		entry->state = KV_HANDOVER_COMPLETE;
		kvd_handover_set_private(core, entry, entry->ahead.partial, &advance->private_pins);
	}
	if (advance->is_complete || (advance->n == entry->ahead.n && !entry->ahead.last)) {
		kvd_handover_drop_ahead(core, entry);
	}
}

/* ---- a quantum ------------------------------------------------------------------------------- */

/* 1: the quantum has ended before a block that is not visible. */
static int advance_entry(kvd_core_t *core, kvd_handover_t *entry, uint32_t *p_left)
{
	int is_cut = 0;
	kvd_handover_call_t call = {.space = core->ns[entry->ns]->numbers[entry->space], .entry = entry};
	kvd_handover_advance_t advance = {.pins = {.head = KVD_NONE}, .private_pins = {.head = KVD_NONE}};
	kv_status_t status = kvd_handover_pin_ahead(core, &call, &entry->ahead, 0, p_left, &advance);

	if (status == KV_OK) {
		if (advance.pins.count == 0 && !advance.is_complete) {
			return 0;
		}
		kvd_handover_advance(core, entry, &advance);
		kvd_handover_note_progress(core, entry);
		is_cut = *p_left == 0 && entry->is_announced;
	} else {
		kvd_handover_drop_pins(core, &advance.pins);
		kvd_handover_drop_pins(core, &advance.private_pins);
		if (status == KV_ERR_ARG) {
			kvd_handover_fail(core, entry, status);
		} else { /* the producer sends again, when it likes, and may then wait for room */
			kvd_handover_drop_ahead(core, entry);
		}
	}
	kvd_handover_notify(core, entry, &entry->producer);

	return is_cut;
}

static int is_due(const kvd_ns_t *ns)
{
	return ns->announced_due > 0 && ns->announced_count > 0;
}

/* The next namespace that has an entry to look at, in rotation (decision 052); NULL: none has. */
static kvd_ns_t *find_due(kvd_core_t *core)
{
	for (uint32_t i = 0; i < core->ns_count; i++) {
		kvd_ns_t *ns = core->ns[core->announced_ns++ % core->ns_count];

		if (is_due(ns)) {
			return ns;
		}
	}

	return NULL;
}

int kvd_handovers_are_due(const kvd_core_t *core)
{
	uint32_t n = 0;

	if (core->announced_count == 0 || core->announced_seen != core->ix.inserted) {
		return core->announced_count > 0;
	}
	while (n < core->ns_count && !is_due(core->ns[n])) {
		n++;
	}

	return n < core->ns_count;
}

int kvd_handovers_announced_run(kvd_core_t *core)
{
	kvd_ns_t *ns;

	if (!kvd_handovers_are_due(core)) {
		return 0;
	}
	/* The index does not know whose block was inserted: all entries are due, once, however many insertions since. */
	if (core->announced_seen != core->ix.inserted) {
		core->announced_seen = core->ix.inserted;
		for (uint32_t n = 0; n < core->ns_count; n++) {
			core->ns[n]->announced_due = core->ns[n]->announced_count;
		}
	}
	for (uint32_t left = LOOKUPS; left > 0 && (ns = find_due(core)) != NULL;) {
		const uint32_t id = ns->announced.head;
		kvd_handover_t *entry;

		/* To the tail before it is looked at: looking may take it off the list. */
		ns->announced_due--;
		kvd_list_remove(&ns->announced, &core->handovers, offsetof(kvd_handover_t, of_announced), id);
		kvd_list_push(&ns->announced, &core->handovers, offsetof(kvd_handover_t, of_announced), id);
		entry = kvd_handover_settle(core, kvd_handover_at(core, id));
		/* It has left the list. It counts as a lookup, or a quantum could end any number of entries. */
		if (!entry || !entry->is_announced) {
			left--;
		} else if (advance_entry(core, entry, &left)) { /* again, after all others of the namespace */
			ns->announced_due = ns->announced_count;
		}
	}

	return kvd_handovers_are_due(core);
}
