/* handover.h -- hand-over entries: named prefixes that a producer hands to exactly one consumer, who may wait for them.
 *
 *   (none) --RECV--> AWAITED --SEND--> SENDING --SEND, last--> COMPLETE --DONE--> gone
 *   (none) --SEND--> SENDING
 *   SENDING, COMPLETE --producer aborts, a block is lost--> FAILED      SENDING --producer has gone--> FAILED
 *   SENDING, COMPLETE, FAILED --consumer is done--> gone
 *   AWAITED, SENDING --their producer finds no room for a while, and a consumer waits--> FAILED
 *   AWAITED --consumer aborts, has gone, or its deadline--> gone
 *   SENDING, COMPLETE --the same--> given back: as before, without a consumer
 *   any, without a consumer --time to live--> gone, expired              any --space reset--> gone
 *
 * The blocks are ordinary ones: the producer puts them, the consumer leases them. The entry keeps them from eviction
 * between the two, one pin on the deepest block of a full group and one on each block of another, and tells the
 * consumer with a HANDOVER notice how far they go. Match and lookups never see an entry. What is left of the prompt
 * after the last whole block may be in a private block of each group, with one key for all (decision 044).
 *
 * In a space of one full group the producer may also announce blocks that are not visible yet, and the private block.
 * The entry keeps their keys, and is handed them in order as they become visible, without a word of the producer; both
 * sides are told (decision 052). Their namespace has a list of these entries.
 *
 * Each side is a member. That it has gone is noticed when the entry is next looked at, at the latest by a sweep over
 * all entries, which follows the end of a member or an epoch and is cut into quanta (decision 042).
 */
#ifndef KVD_CORE_HANDOVER_H
#define KVD_CORE_HANDOVER_H

#include "core/base/core_impl.h"

#define KVD_TRANSFER_MAX     128u
#define KVD_HANDOVER_LACK_NS UINT64_C(500000000) /* a consumer waits so long for a producer without room */

/* Pins of one owner, linked by kvd_pin_t.next. */
typedef struct kvd_handover_pins {
	uint32_t head; /* KVD_NONE: none */
	uint32_t count;
} kvd_handover_pins_t;

typedef struct kvd_handover_part {
	uint32_t n; /* blocks of the group, from the prompt's first, that are handed over */
	kvd_handover_pins_t pins;
} kvd_handover_part_t;

/* What is handed over when it becomes visible, of the space's only group. */
typedef struct kvd_ahead {
	kv_key_t *keys;    /* of blocks [first, n); NULL: none */
	uint32_t first, n; /* n is at least what is handed over */
	int last;          /* then nothing follows, */
	uint32_t partial;  /* and of these tokens there is a private block; 0: none */
	kv_key_t private_key;
} kvd_ahead_t;

typedef struct kvd_handover_side {
	kvd_member_t member; /* gets the notices; 0: nobody */
	kvd_instance_t instance;
} kvd_handover_side_t;

typedef struct kvd_handover {
	uint64_t number; /* 0: free */
	uint32_t self;
	uint32_t ns, space;
	uint64_t epoch;
	kv_handover_state_t state;
	kv_status_t status; /* FAILED: why */
	kvd_handover_side_t producer, consumer;
	kvd_handover_part_t parts[KV_MAX_GROUPS]; /* in the order of the space's groups */
	uint32_t n;                               /* units that every group has */
	uint32_t partial;                         /* tokens after them; 0: none */
	kvd_handover_pins_t private_pins;         /* on a private block of each group, which have these tokens */
	kvd_ahead_t ahead;
	int is_announced;  /* of `ahead` something is not visible */
	int was_announced; /* once: requests of the producer may cross the notice of it */
	kvd_link_t of_announced;
	uint8_t *tail;
	uint32_t tail_len;
	uint64_t began_ns;
	uint64_t asked_ns;    /* the consumer waits since then; 0: it does not wait */
	uint64_t ttl_ns;      /* without a consumer, since the last SEND */
	uint64_t deadline_ns; /* of the consumer's wait */
	int lacks_room;       /* its producer, since the entry has moved on last */
	uint64_t expiry_ns;   /* of the consumer's wait, or of that life */
	kvd_link_t of_bucket;
	kvd_link_t of_unclaimed; /* without a consumer: */
	kvd_list_t *unclaimed;   /* of its namespace those that are FAILED, or the others; NULL: it has one */
	uint32_t hash_next;
	uint32_t transfer_len;
	uint8_t transfer[KVD_TRANSFER_MAX];
} kvd_handover_t;

/* ---- requests -------------------------------------------------------------------------------- */

kv_status_t kvd_handover_send(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_send_t *ask,
			      kv_msg_handover_send_reply_t *reply);
kv_status_t kvd_handover_recv(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_recv_t *ask,
			      kv_msg_handover_recv_reply_t *reply);
kv_status_t kvd_handover_tail(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_tail_t *ask,
			      kv_msg_handover_tail_reply_t *reply);
kv_status_t kvd_handover_done(kvd_core_t *core, uint32_t ns, kvd_member_t member, const kv_msg_handover_done_t *ask);

/* ---- for blocks and the core ----------------------------------------------------------------- */

/* A block that this pin of an entry keeps is lost: the entry fails, without any pin. */
void kvd_handover_lose_block(kvd_core_t *core, uint32_t pin, kv_status_t why);
/* Have blocks become visible since the announced ones were looked up? */
int kvd_handovers_are_due(const kvd_core_t *core);
/* One quantum of these; 1 while there is more. */
int kvd_handovers_announced_run(kvd_core_t *core);
/* One quantum: expire, sweep, and hand over what is announced and visible; 1 while there is more. */
int kvd_handovers_run(kvd_core_t *core);
/* The memory of all entries, with the core. */
void kvd_handovers_free(kvd_core_t *core);
/* Pins of all entries, and what their namespaces, instances and tails must add up to: 1, or 0 and a sentence. */
int kvd_handovers_check(kvd_core_t *core, uint64_t *p_pins, char *why, size_t cap);

#endif
