/* put_impl.h -- the parts of a put's life, for put/ only. start.c and publish.c call the others; durable.c calls put.c;
 * put.c calls pending.c. */
#ifndef KVD_CORE_PUT_IMPL_H
#define KVD_CORE_PUT_IMPL_H

#include "core/put/put.h"

/* Look at this put again soon. */
static inline void kvd_put_queue(kvd_core_t *core, kvd_put_t *put)
{
	if (!put->run_queued) {
		put->run_queued = 1;
		kvd_list_push(&core->run_puts, &core->puts, offsetof(kvd_put_t, queue), put->self);
		core->run_count++;
	}
}
static inline void kvd_put_unqueue(kvd_core_t *core, kvd_put_t *put)
{
	if (put->run_queued) {
		put->run_queued = 0;
		kvd_list_remove(&core->run_puts, &core->puts, offsetof(kvd_put_t, queue), put->self);
		core->run_count--;
	}
}
/* Depth of an entry's block. */
static inline uint32_t kvd_put_depth(const kvd_put_t *put, uint32_t index)
{
	return put->unchained ? 1 : put->depth0 + index + 1;
}
/* What goes into a slot's header. */
void kvd_put_get_meta(kvd_core_t *core, const kvd_put_t *put, uint32_t index, kvs_meta_t *meta);

/* The put is alive: its time to live begins (again). */
void kvd_put_extend(kvd_core_t *core, kvd_put_t *put);
/* The namespace lacks room: its oldest put is revoked if it has expired. Its slots come back when its writers are
 * drained or gone. */
void kvd_put_revoke_oldest(kvd_core_t *core, uint32_t ns);
/* Revoke the put and all that waits for it: a block above is withdrawn. */
void kvd_put_withdraw(kvd_core_t *core, kvd_put_t *put);
/* RUNNING -> ended: PUT_DONE, pins and room given back, open slots quarantined. */
void kvd_put_finish(kvd_core_t *core, kvd_put_t *put, kv_status_t why);
/* Forget an ended put that owes no DURABLE and has no slot in quarantine. */
void kvd_put_remove_if_done(kvd_core_t *core, kvd_put_t *put);

/* May the put pin the path down to `block`: is there room for it within the namespace's share? */
int kvd_put_may_pin(const kvd_core_t *core, const kvd_put_t *put, uint32_t block);
/* The put's pin now hangs on `block`. */
kv_status_t kvd_put_pin_block(kvd_core_t *core, kvd_put_t *put, uint32_t block);
/* Of an unchained put: pin entry `index`'s block, if there is memory for the pin. */
void kvd_entry_pin_block(kvd_core_t *core, kvd_put_t *put, uint32_t index, uint32_t block);
/* All pins of the put go. */
void kvd_put_unpin(kvd_core_t *core, kvd_put_t *put);

/* The slot of an unfinished entry goes back to the pool. */
void kvd_entry_free(kvd_core_t *core, kvd_put_t *put, kvd_entry_t *entry);
/* Of an unchained put: an entry has become FULL; the next such one, KVD_NONE: none. */
void kvd_entry_push_full(kvd_put_t *put, uint32_t index);
uint32_t kvd_entry_pop_full(kvd_put_t *put);
/* Count the visible entries from the first. */
void kvd_put_count_visible(kvd_put_t *put);
/* Entries that are not visible. */
uint32_t kvd_put_count_unfinished(const kvd_put_t *put);

#endif
