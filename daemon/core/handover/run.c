/* Entries whose time has come, sides and epochs that have ended, producers that wait: a quantum of each. */
#include "core/handover/handover_impl.h"

#define SWEEP_QUANTUM 256u

/* Its consumer computes what has not come, and loads what is stored. What the producer goes on to save is cached. */
static void fail_without_room(kvd_core_t *core, kvd_handover_t *entry)
{
	entry->lacks_room = 0;
	kvd_handover_set_deadline(core, entry, entry->deadline_ns);
	kvd_handover_fail(core, entry, KV_ERR_FULL);
	kvd_handover_notify(core, entry, &entry->producer);
	kvd_handover_leave_side(core, &entry->producer);
}

/* Its consumer has let its deadline pass, or no consumer has come. */
static uint32_t expire_entry(void *ctx, uint32_t id)
{
	kvd_core_t *core = ctx;
	kvd_handover_t *entry = kvd_handover_at(core, id);
	kvd_handover_t seen = *entry;
	uint32_t pins = entry->private_pins.count;

	for (uint32_t g = 0; g < KV_MAX_GROUPS; g++) {
		pins += entry->parts[g].pins.count;
	}
	if (entry->consumer.member == 0) {
		kvd_handover_forget(core, entry, KV_ERR_EXPIRED);
	} else if (entry->lacks_room && entry->state != KV_HANDOVER_FAILED && core->now_ns < entry->deadline_ns) {
		fail_without_room(core, entry);
	} else if (entry->state == KV_HANDOVER_AWAITED) {
		kvd_handover_end(core, entry, KV_ERR_TIMEOUT, NULL);
	} else {
		/* The notice is of a copy: for this consumer it has ended, for the next one it is as before. */
		seen.state = KV_HANDOVER_ENDED;
		seen.status = KV_ERR_TIMEOUT;
		kvd_handover_notify(core, &seen, &seen.consumer);
		kvd_handover_give_back(core, entry);
	}

	return 1 + pins / 16; /* they are dropped one by one */
}

int kvd_handovers_run(kvd_core_t *core)
{
	const kvd_wheel_items_t items = {.pool = &core->handovers,
					 .link = offsetof(kvd_handover_t, of_bucket),
					 .expiry = offsetof(kvd_handover_t, expiry_ns),
					 .expire = expire_entry,
					 .ctx = core};
	int more = kvd_wheel_run(&core->handover_wheel, &items, core->now_ns);

	for (uint32_t left = SWEEP_QUANTUM; left > 0 && core->handover_sweep > 0; left--) {
		kvd_handover_t *entry = kvd_handover_at(core, --core->handover_sweep);

		if (entry->number != 0) {
			(void)kvd_handover_settle(core, entry);
		}
	}

	more |= kvd_handovers_announced_run(core);
	kvd_handover_room_run(core);

	return more || core->handover_sweep > 0;
}
