/* pending.h -- which keys are being written, and which puts wait for one of them.
 *
 * A child waits for its parent's key, not for its slot: a record counts, per key, the unfinished copies and the puts
 * that wait for it.
 *
 *   (none) --first copy--> PENDING --copies, waiters--> PENDING
 *       --last copy visible or lost: waiters look again--> (none)
 */
#ifndef KVD_CORE_PENDING_H
#define KVD_CORE_PENDING_H

#include "core/put/put.h"

/* Unfinished copies of one key, and who waits for it. */
typedef struct kvd_pending {
	uint32_t tree;
	kv_key_t key;
	uint32_t group;
	kvd_copy_t copies;
	kvd_list_t waiters; /* puts */
	uint32_t next;      /* in its hash chain */
} kvd_pending_t;

/* Count entry `index` as an unfinished copy of its key. KV_ERR_NOMEM, KV_ERR_LIMIT. */
kv_status_t kvd_pending_add(kvd_core_t *core, kvd_put_t *put, uint32_t index);
/* It is no longer one. When it was the last, puts that wait for the key look again; of a withdrawn put, to end. */
void kvd_pending_remove(kvd_core_t *core, kvd_put_t *put, uint32_t index);
/* Wait for the put's parent key. 0: no put is writing it. */
int kvd_pending_wait(kvd_core_t *core, kvd_put_t *put);
void kvd_pending_unwait(kvd_core_t *core, kvd_put_t *put);
/* Is the latest unfinished copy of this key one of this put? */
int kvd_pending_is_own(kvd_core_t *core, const kvd_put_t *put, const kv_key_t *key);
/* Is `instance` writing this key? */
int kvd_pending_has_instance(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group, uint32_t instance);
/* Is a copy of this key being written? */
int kvd_pending_has_key(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group);
/* A put with an unfinished copy of this key; KVD_NONE: there is none. */
uint32_t kvd_pending_first(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group);
/* A block has become visible: puts that wait for its key go on. */
void kvd_pending_wake(kvd_core_t *core, uint32_t tree, const kv_key_t *key, uint32_t group);

#endif
