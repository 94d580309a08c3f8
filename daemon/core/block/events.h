/* events.h -- BlockStored and BlockRemoved, gathered into runs before they go out.
 *
 *   EMPTY --add--> GATHERING --add of the run's next--> GATHERING
 *       --anything else, full, or the end of the call--> published, EMPTY
 *
 * Subscribers know blocks by the engine's hash, which survives a space reset: nothing of a new epoch is announced
 * before everything of the old one has been taken back. Such blocks are EVENT_PENDING, like those found on disk at
 * start, until a walk in quanta announces them, parents first. An EVENT_PENDING
 * block leaves without an event.
 */
#ifndef KVD_CORE_EVENTS_H
#define KVD_CORE_EVENTS_H

#include "core/core.h"
#include "core/index/index.h"

#define KVD_EVENT_RUN 256u

typedef struct kvd_gather {
	uint32_t count;
	kvd_event_type_t type;
	kvd_set_t t;
	uint32_t tree;
	uint32_t last; /* block id of the last one */
	uint8_t group;
	int has_parent;
	uint64_t parent_hash;
	const uint32_t *tokens; /* of the first block; the others follow */
	uint64_t hashes[KVD_EVENT_RUN];
} kvd_gather_t;

/* `tokens` stay readable until kvd_events_flush(). */
void kvd_event_add_stored(kvd_core_t *core, uint32_t block, kvd_set_t t, const uint32_t *tokens);
void kvd_event_add_removed(kvd_core_t *core, uint32_t block, kvd_set_t t);
/* A block joins its first set: must it stay EVENT_PENDING? */
int kvd_event_is_muted(kvd_core_t *core, uint32_t block);
/* Announce an EVENT_PENDING block, in all sets it is in, unless it is being taken down. */
void kvd_event_announce(kvd_core_t *core, uint32_t block);
void kvd_events_flush(kvd_core_t *core);

#endif
