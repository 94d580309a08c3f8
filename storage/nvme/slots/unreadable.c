/* Slots that the device does not read (decision 032). */
#include "unreadable.h"

#include "slots.h"

#define ASIDE_MIN_NS 100000000ull
#define ASIDE_MAX_NS 60000000000ull
#define RETIRE_NS    600000000000ull /* a slot is given up when it was unreadable for this long, */
#define RETIRE_TRIES 8u              /* at each of as many tries */

static void notify_readable(const kvs_nvme_t *nvme, kv_slot_t slot, const kvs_dslot_t *s, int readable)
{
	kv_key_t key = s->key;

	if (nvme->watch.readable && !(s->flags & KVS_SLOT_FREEING)) {
		nvme->watch.readable(nvme->watch.arg, (kvs_loc_t){slot, s->gen}, &key, s->group, readable);
	}
}

/* An entry for the slot; when all are taken, that of the slot which has waited longest, whose next load is its next
 * try. */
static kvs_aside_t *aside_make(kvs_nvme_t *nvme, kv_slot_t slot, uint64_t now)
{
	kvs_aside_t *entry = &nvme->aside[0];

	for (uint32_t i = 0; i < KVS_MAX_ASIDE; i++) {
		kvs_aside_t *other = &nvme->aside[i];

		if (other->tries == 0) {
			entry = other;
			break;
		}
		entry = other->since_ns < entry->since_ns ? other : entry;
	}
	if (entry->tries > 0) {
		kvs_aside_resolve(nvme, entry->slot, kvs_slot_get(nvme, entry->slot));
	}
	*entry = (kvs_aside_t){.slot = slot, .since_ns = now};
	nvme->aside_count++;

	return entry;
}

void kvs_aside_add(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	uint64_t now = kv_now_ns(nvme->env);
	kvs_aside_t *entry = s->flags & KVS_SLOT_ASIDE ? kvs_aside_find(nvme, slot) : NULL;
	int is_new = !entry;

	if (s->flags & KVS_SLOT_FREEING || s->state == KVS_QUARANTINED) {
		kvs_aside_remove(nvme, slot, s);
		return;
	}
	if (entry && now < entry->until_ns) {
		return; /* a read that was under way when the pause began */
	}
	entry = entry ? entry : aside_make(nvme, slot, now);
	s->flags |= KVS_SLOT_ASIDE;
	entry->tries++;
	entry->wait_ns = entry->wait_ns * 2u < ASIDE_MIN_NS ? ASIDE_MIN_NS : entry->wait_ns * 2u;
	entry->wait_ns = entry->wait_ns > ASIDE_MAX_NS ? ASIDE_MAX_NS : entry->wait_ns;
	entry->until_ns = now + entry->wait_ns;
	if (entry->tries >= RETIRE_TRIES && now - entry->since_ns >= RETIRE_NS) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme",
			"slot cannot be read for too long and is given up file %u index %u", kv_slot_slab(slot),
			kv_slot_index(slot));
		s->flags |= KVS_SLOT_RETIRED;
		kvs_slot_mark_lost(nvme, slot, s);
	} else if (is_new) {
		notify_readable(nvme, slot, s, 0);
	}
}

void kvs_aside_resolve(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s)
{
	if (s->flags & KVS_SLOT_ASIDE) {
		kvs_aside_remove(nvme, slot, s);
		notify_readable(nvme, slot, s, 1);
	}
}

kv_status_t kvs_nvme_readable(kvs_tier_t *tier, kvs_loc_t loc)
{
	kvs_nvme_t *nvme = kvs_nvme(tier);
	const kvs_dslot_t *s = kvs_slot_find(nvme, loc);

	if (nvme->health == KVS_HEALTH_OFF) {
		return KV_ERR_TIER_OFF;
	}

	return s && (s->flags & KVS_SLOT_ASIDE) ? KV_ERR_IO : KV_OK;
}

kv_slot_t kvs_aside_next(const kvs_nvme_t *nvme, uint64_t now)
{
	const kvs_aside_t *first = NULL;

	for (uint32_t i = 0; i < KVS_MAX_ASIDE; i++) {
		const kvs_aside_t *entry = &nvme->aside[i];

		if (entry->tries > 0 && entry->until_ns <= now && (!first || entry->until_ns < first->until_ns)) {
			first = entry;
		}
	}

	return first ? first->slot : KV_SLOT_NONE;
}
