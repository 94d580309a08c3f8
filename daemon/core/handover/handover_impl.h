/* handover_impl.h -- the parts of an entry's life, for handover/ only. run.c and send.c call room.c and ahead.c,
 * ahead.c calls pin.c, and all call handover.c.
 */
#ifndef KVD_CORE_HANDOVER_IMPL_H
#define KVD_CORE_HANDOVER_IMPL_H

#include "core/handover/handover.h"

/* What a request says of the entry that it means. */
typedef struct kvd_handover_name {
	uint32_t ns, space;
	uint64_t epoch;
	kvd_member_t member; /* who asks */
	kv_slice_t transfer;
} kvd_handover_name_t;

/* What that is: the sender, and an entry. */
typedef struct kvd_handover_call {
	kvd_member_rec_t *member;
	kvd_instance_rec_t *instance;
	kvd_space_t *space;
	kvd_handover_t *entry; /* NULL: there is none */
	uint64_t refused;      /* bytes that there was no room for */
} kvd_handover_call_t;

static inline kvd_handover_t *kvd_handover_at(const kvd_core_t *core, uint32_t self)
{
	return kvd_obj_at(&core->handovers, self);
}

/* The entry of a transfer id in the space, or NULL. KV_ERR_NOT_JOINED, KV_ERR_NOT_FOUND and KV_ERR_STALE_EPOCH (of the
 * space); KV_ERR_ARG: the id is empty or too long. */
kv_status_t kvd_handover_find_transfer(kvd_core_t *core, const kvd_handover_name_t *name, kvd_handover_call_t *call);
/* The entry of this number, also when it is another's: the caller looks which side asks, and answers KV_ERR_NOT_FOUND
 * to the others (P8). KV_ERR_NOT_JOINED, KV_ERR_NOT_FOUND. */
kv_status_t kvd_handover_find_number(kvd_core_t *core, uint32_t ns, kvd_member_t member, uint64_t number,
				     kvd_handover_call_t *call);
static inline int kvd_handover_is_side(const kvd_handover_side_t *side, const kvd_handover_call_t *call)
{
	return side->member != 0 && side->instance == call->instance->id;
}

/* The asker has no entry in its space. KV_ERR_OTHER_SPACE: the other side waits in another one, and is told so: its
 * entry has ended. */
kv_status_t kvd_handover_meet(kvd_core_t *core, const kvd_handover_call_t *call, const kv_slice_t *transfer,
			      int is_producer);
/* The entry as it is after the ends of its sides and of its epoch; NULL: it has ended just now. */
kvd_handover_t *kvd_handover_settle(kvd_core_t *core, kvd_handover_t *entry);

/* A new entry without sides, for which kvd_handover_make_entry() has made room. KV_ERR_NOMEM. */
kv_status_t kvd_handover_create(kvd_core_t *core, kvd_handover_call_t *call, const kv_slice_t *transfer);
/* It ends, and its sides are told why. If no consumer has come its name is kept: one that comes late waits for nothing.
 */
void kvd_handover_forget(kvd_core_t *core, kvd_handover_t *entry, kv_status_t why);
/* Has an entry of this name ended before its consumer came? Then it is told once. */
int kvd_handover_recall(const kvd_core_t *core, const kvd_space_t *space, const kv_slice_t *transfer);
/* The member is this side from now on. */
void kvd_handover_join_side(kvd_core_t *core, kvd_handover_side_t *side, const kvd_handover_call_t *call);
/* Nobody is it from now on; it may have been nobody. */
void kvd_handover_leave_side(kvd_core_t *core, kvd_handover_side_t *side);
/* The entry expires then. */
void kvd_handover_set_expiry(kvd_core_t *core, kvd_handover_t *entry, uint64_t expiry_ns);
/* The consumer has until then; less while its producer lacks room (decision 083). */
void kvd_handover_set_deadline(kvd_core_t *core, kvd_handover_t *entry, uint64_t deadline_ns);
/* There is no room for what the entry's producer has sent. */
void kvd_handover_note_refusal(kvd_core_t *core, kvd_handover_t *entry);
/* What was asked for, at most what the option allows; 0: that. */
uint64_t kvd_handover_ttl(const kvd_core_t *core, uint32_t ttl_ms);
/* Bytes that the entry keeps: slots, tail and announced keys. */
uint64_t kvd_handover_bytes(const kvd_core_t *core, const kvd_handover_t *entry);
/* Tell a side what the entry is now. */
void kvd_handover_notify(kvd_core_t *core, const kvd_handover_t *entry, const kvd_handover_side_t *side);
/* What the consumer waited for is there, or will never be. */
void kvd_handover_end_wait(kvd_core_t *core, kvd_handover_t *entry);

/* Units that every group of the space has: what a consumer can use. */
uint32_t kvd_handover_units(const kvd_core_t *core, const kvd_handover_t *entry);
/* Keys of announced blocks. */
static inline uint64_t kvd_handover_ahead_bytes(const kvd_handover_t *entry)
{
	return (uint64_t)(entry->ahead.n - entry->ahead.first) * sizeof *entry->ahead.keys;
}
/* What is announced is forgotten. */
void kvd_handover_drop_ahead(kvd_core_t *core, kvd_handover_t *entry);
/* There is more of the entry, or nothing follows: it lives on, and its consumer is told. */
void kvd_handover_note_progress(kvd_core_t *core, kvd_handover_t *entry);
/* What a notice says of the entry to its consumer. */
kv_msg_handover_t kvd_handover_describe(kvd_core_t *core, const kvd_handover_t *entry);
void kvd_handover_drop_pins(kvd_core_t *core, kvd_handover_pins_t *pins);
/* FAILED. Without a consumer nothing of it is kept but the reason. */
void kvd_handover_fail(kvd_core_t *core, kvd_handover_t *entry, kv_status_t why);
/* The consumer is none: another one may take the entry. It may end. */
void kvd_handover_give_back(kvd_core_t *core, kvd_handover_t *entry);
/* It is gone. */
void kvd_handover_discard(kvd_core_t *core, kvd_handover_t *entry);
/* Both sides are told, but for `by`, which has asked for it; then the entry is gone. */
void kvd_handover_end(kvd_core_t *core, kvd_handover_t *entry, kv_status_t why, const kvd_handover_side_t *by);

/* ---- pin.c ----------------------------------------------------------------------------------- */

/* Counts a request that there is no room for: KV_ERR_BUSY. */
kv_status_t kvd_handover_refuse(kvd_core_t *core, kvd_handover_call_t *call, uint64_t bytes);
/* One more pin, if there is room for it and for `tail_bytes`. KV_ERR_BUSY, KV_ERR_NOMEM, KV_ERR_LIMIT. */
kv_status_t kvd_handover_pin_block(kvd_core_t *core, kvd_handover_call_t *call, uint32_t block, uint64_t tail_bytes,
				   kvd_handover_pins_t *pins);
/* The same for the private block of each group. KV_MISS; KV_ERR_ARG: a block of this key is not private. The caller
 * drops the pins when it fails. */
kv_status_t kvd_handover_pin_private(kvd_core_t *core, kvd_handover_call_t *call, const kv_key_t *key,
				     uint64_t tail_bytes, kvd_handover_pins_t *pins);
/* These are the entry's private blocks from now on. */
void kvd_handover_set_private(kvd_core_t *core, kvd_handover_t *entry, uint32_t partial,
			      const kvd_handover_pins_t *pins);

/* ---- ahead.c --------------------------------------------------------------------------------- */

/* Keys of blocks [n - count, n) of a request, not aligned. */
typedef struct kvd_handover_keys {
	uint32_t n, count;
	const uint8_t *keys;
} kvd_handover_keys_t;

/* What has become visible of announced blocks. */
typedef struct kvd_handover_advance {
	uint32_t n;                       /* blocks that are handed over with them */
	kvd_handover_pins_t pins;         /* on the deepest one; empty: n is as before */
	kvd_handover_pins_t private_pins; /* of a last chunk */
	int is_complete;
} kvd_handover_advance_t;

/* Blocks that are handed over or announced. */
uint32_t kvd_handover_reach(const kvd_handover_t *entry);
/* Bytes that keys up to block n need more than those that the entry has. */
uint64_t kvd_handover_ahead_growth(const kvd_handover_t *entry, uint32_t n);
/* What the entry announces when it has these too, which leave no gap; the keys are the caller's. KV_ERR_NOMEM. */
kv_status_t kvd_handover_draft_ahead(const kvd_core_t *core, const kvd_handover_t *entry,
				     const kvd_handover_keys_t *more, const kv_msg_handover_send_t *ask,
				     kvd_ahead_t *ahead);
/* The entry announces this instead of what it has announced before; the keys are its own from now on. */
void kvd_handover_announce(kvd_core_t *core, kvd_handover_t *entry, const kvd_ahead_t *ahead);
/* Pin what is visible of it, with at most *p_left lookups. KV_ERR_BUSY, KV_ERR_NOMEM, KV_ERR_LIMIT; KV_ERR_ARG: a block
 * does not follow that before it. The caller drops the pins when it fails. */
kv_status_t kvd_handover_pin_ahead(kvd_core_t *core, kvd_handover_call_t *call, const kvd_ahead_t *ahead,
				   uint64_t tail_bytes, uint32_t *p_left, kvd_handover_advance_t *advance);
/* This much of entry->ahead is handed over; what is announced is forgotten when that is all. */
void kvd_handover_advance(kvd_core_t *core, kvd_handover_t *entry, const kvd_handover_advance_t *advance);

/* ---- room.c ---------------------------------------------------------------------------------- */

/* Bytes that the namespace's entries may still keep. */
uint64_t kvd_handover_room_left(const kvd_core_t *core, uint32_t ns);
/* May the instance be a side of one more entry? One of its own that no consumer has claimed gives way. KV_ERR_LIMIT. */
kv_status_t kvd_handover_may_join(kvd_core_t *core, const kvd_handover_call_t *call);
/* There is no room for these bytes: an entry of that memory that no consumer has claimed gives way, but for `except`,
 * which may be NULL (decision 075). 0: none does. */
int kvd_handover_make_room(kvd_core_t *core, uint32_t ns, uint32_t memory, uint64_t bytes,
			   const kvd_handover_t *except);
/* One more entry in the namespace: where it has as many as it may have, one that nobody has claimed goes. KV_ERR_LIMIT.
 */
kv_status_t kvd_handover_make_entry(kvd_core_t *core, uint32_t ns);
/* Is there room for these bytes, on top of what cannot be reclaimed? */
int kvd_handover_is_within_share(const kvd_core_t *core, uint32_t ns, uint64_t bytes);
/* The member was refused these bytes: HANDOVER_ROOM follows. */
void kvd_handover_await_room(kvd_core_t *core, uint32_t ns, kvd_member_rec_t *member, uint64_t bytes);
/* Notify members that wait: a quantum. */
void kvd_handover_room_run(kvd_core_t *core);

#endif
