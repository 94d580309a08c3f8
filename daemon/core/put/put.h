/* put.h -- puts: blocks on their way in.
 *
 *   entry:  ALREADY (visible at start; no slot)
 *           OPEN --all writers' ranges ended--> FULL --parent in the CPU set--> VISIBLE
 *           FULL --parent on disk only--> WRITE_THROUGH --written--> VISIBLE (on disk)
 *           FULL --another copy was first--> DUPLICATE (its slot is freed)
 *           OPEN, FULL --the put ends early--> LOST; the slot of an OPEN one is QUARANTINED until its writers are
 *               drained or gone
 *   put:    RUNNING --every entry VISIBLE, ALREADY or DUPLICATE--> PUT_DONE OK
 *           RUNNING --revoked, parent lost, refused, or expired where room lacks--> PUT_DONE with the reason
 *           then LINGERING while slots are quarantined or DURABLE is owed, then gone
 *
 * Entries of an unchained put (of a `window` or `state` group) do not wait for each other: ALREADY may be anywhere, and
 * each entry becomes visible as soon as it is FULL. While the put must become durable, it pins each visible entry's
 * block (decision 010). A put of private blocks is unchained in every group (decision 044).
 */
#ifndef KVD_CORE_PUT_H
#define KVD_CORE_PUT_H

#include "core/base/core_impl.h"

typedef enum kvd_entry_state {
	KVD_ENTRY_ALREADY,
	KVD_ENTRY_OPEN,
	KVD_ENTRY_FULL,
	KVD_ENTRY_WRITE_THROUGH,
	KVD_ENTRY_VISIBLE,
	KVD_ENTRY_DUPLICATE,
	KVD_ENTRY_LOST,
	KVD_ENTRY_QUARANTINED,
} kvd_entry_state_t;

/* One entry of one put. */
typedef struct kvd_copy {
	uint32_t put; /* record; KVD_NONE: end of list */
	uint32_t index;
} kvd_copy_t;

typedef struct kvd_entry {
	kv_key_t key;
	uint64_t event_hash;
	kvs_loc_t loc;
	uint32_t pending;   /* KVD_NONE: counted nowhere */
	kvd_copy_t next;    /* the next unfinished copy of this key */
	uint32_t left;      /* writers whose range has not ended */
	uint32_t transit;   /* its slot is TRANSIT already */
	uint32_t next_full; /* unchained: the next entry that is FULL */
	uint32_t pin;       /* unchained and durable: on its block; KVD_NONE */
	kvs_loc_t disk;     /* unchained and durable: where it was seen on disk */
	kvd_entry_state_t state;
} kvd_entry_t;

typedef struct kvd_writer {
	uint32_t rank, head, heads, layer, layers;
	uint32_t left; /* blocks whose range has not ended */
} kvd_writer_t;

typedef struct kvd_put {
	uint64_t id;
	uint32_t self;
	uint32_t instance;
	kvd_member_t member; /* who started it and gets its notices */
	uint32_t ns, tree;
	uint32_t pieces; /* digest leaves a layer */
	uint32_t slot_class;
	uint32_t block_tokens;
	uint32_t group;
	uint32_t unchained; /* 1: of an unchained group, or private */
	uint32_t private_blocks;
	uint32_t yields;   /* promotions: kvd_share_may_promote() */
	uint32_t durable;  /* wanted, and not answered yet */
	uint32_t expected; /* durable: the pinned block will be written, unless something is dropped */
	uint32_t running;
	uint32_t n, depth0;
	uint32_t already;              /* entries that were visible at the start */
	uint32_t full_head, full_tail; /* unchained: entries that are FULL */
	uint32_t pinned_entries;       /* unchained: entries with a pin */
	uint32_t stored;               /* unchained, durable: entries from the first that have been seen on disk */
	kv_key_t parent;
	uint32_t next; /* first entry that is not visible; of an unchained put, later ones may be */
	uint32_t full; /* entries all of whose ranges have ended */
	uint64_t slot_bytes;
	uint32_t withdrawn;   /* 1: a block above it was taken back, so it ends */
	kv_status_t status;   /* how it ended */
	uint32_t quarantined; /* entries whose slot waits for drained writers */
	uint32_t writer_count;
	kvd_writer_t *writers;
	kvd_entry_t *entries;
	uint8_t *ended;   /* bits [entry][writer] */
	uint32_t *tokens; /* [n][block_tokens] or NULL */
	uint32_t pin;     /* on the deepest visible block; KVD_NONE: none */
	uint32_t extent;
	uint32_t in_ledger;
	kv_lease_header_t *header;
	uint64_t stamp;
	uint64_t undrained[KVD_MEMBER_WORDS];       /* members that may still touch quarantined slots */
	uint64_t undrained_older[KVD_MEMBER_WORDS]; /* members whose older connections may */
	uint64_t store_seq;                         /* DURABLE: synced when flushed + 1 >= this; 0: not written yet */
	kvs_loc_t disk;     /* of its deepest block when store_seq was taken: a new copy needs a new flush */
	uint32_t asked;     /* write-behind was asked for it once; unchained: for entry asked - 1 */
	uint64_t expiry_ns; /* running: from then on it may be revoked where room lacks */
	kvd_link_t of_ns;   /* running: those that expire first at the head */
	kvd_link_t of_instance;
	uint32_t wait_pending; /* parent key it waits for */
	kvd_link_t of_pending; /* puts that wait for that key */
	kvd_link_t queue;      /* of puts to look at again */
	uint32_t run_queued;
} kvd_put_t;

/* ---- requests -------------------------------------------------------------------------------- */

kv_status_t kvd_put_start(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_put_start_t *ask,
			  kv_msg_put_start_reply_t *reply);
kv_status_t kvd_put_end(kvd_core_t *core, kvd_member_t member, const kv_msg_put_end_t *ask,
			kv_msg_put_end_reply_t *reply);
kv_status_t kvd_put_revoke(kvd_core_t *core, kvd_member_t member, const kv_msg_put_revoke_t *ask,
			   kv_msg_put_revoke_reply_t *reply);
kv_status_t kvd_put_keep(kvd_core_t *core, kvd_member_t member, const kv_msg_keep_t *ask, kv_msg_keep_reply_t *reply);

/* ---- for instances and blocks ---------------------------------------------------------------- */

kvd_put_t *kvd_put_find(kvd_core_t *core, uint64_t id);
/* Revoke unfinished puts of the instance: those that `member` started or may still write into; NULL: all. */
void kvd_puts_revoke(kvd_core_t *core, const kvd_instance_rec_t *instance, const kvd_member_rec_t *member);
/* The member no longer touches the slots of this put of its instance. Returns slots freed. */
uint32_t kvd_put_drain_member(kvd_core_t *core, uint64_t id, const kvd_member_rec_t *member);
/* A member (by its index in the instance) no longer touches slots of ended puts; `before`: its older connections do
 * not, this one may. Returns slots freed. */
uint32_t kvd_puts_drain_member(kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t local, int before);
/* What waits for member `from` to be drained or gone waits for an older connection of `to` instead. */
void kvd_puts_move_undrained(kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t from, uint32_t to);
/* Does a slot wait for a member of the instance to be drained or gone? */
int kvd_puts_have_quarantined_slots(const kvd_core_t *core, const kvd_instance_rec_t *instance);
/* The instance has ended: all its puts go, without a DURABLE. */
void kvd_puts_destroy(kvd_core_t *core, const kvd_instance_rec_t *instance);
/* The put goes on without this pin of its own. */
void kvd_put_drop_pin(kvd_core_t *core, uint32_t pin);
/* The pin's block is withdrawn: what the put has below it is revoked. Without the pin, or to be called again. */
void kvd_put_withdraw_pin(kvd_core_t *core, uint32_t pin);
/* The key is withdrawn: unfinished puts of it are revoked, and those that wait for it end too. */
void kvd_puts_withdraw_key(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group);

/* ---- for the core ---------------------------------------------------------------------------- */

/* Publish what can be published of the queued puts, for the request that has just run. */
void kvd_puts_run(kvd_core_t *core);
/* The same once a tick: also what was left over. */
void kvd_puts_run_tick(kvd_core_t *core);
/* The arrays of all puts: the core ends. */
void kvd_puts_free(kvd_core_t *core);

#endif
