/* change.h -- memory on its way from one block size to another. One slab at a time.
 *
 *   none --a class is short of slots, and another has memory that is colder--> EMPTYING --no slot is taken--> RETIRED --its memory has come back--> none
 *                                                       EMPTYING --no progress for a second--> none (the slab stays with its class)
 *
 * Whose memory: that of a class that can spare it, since it has free slots enough without the slab (and, unless it was not used for ten seconds, another
 * slab's worth of them left); else that of the class whose coldest block is the coldest of all. That block must have been unused more than twice as long as
 * the coldest one of the class that is short, unless that one has nothing it could evict: so two busy classes do not take slabs from each other in turn.
 * A class that was used in the last ten seconds keeps half a slab at the least.
 *
 * Emptying: the class that gives evicts its coldest blocks, as it would for itself, and the blocks of the slab move to the slots that come free. No lease
 * names a slot of the slab meanwhile (`named`); one that is opened while it is emptied is waited for.
 */
#ifndef KVD_CORE_CHANGE_H
#define KVD_CORE_CHANGE_H

#include "core.h"

typedef struct kvd_change {
	uint32_t wanting; /* classes that are short of slots */
	uint32_t turn;    /* the class that is looked at next */
	uint32_t slab;    /* KVD_NONE: none is in change */
	uint32_t from;    /* classes */
	uint32_t to;
	uint32_t index; /* slot to look at next */
	uint32_t moved; /* slots emptied since the last time round */
	uint64_t named; /* slots of it that open leases name */
	uint64_t give_up_ns;
	uint64_t next_ns; /* none is picked before */
} kvd_change_t;

/* A slot of the class has been asked for, or its space was opened. */
void kvd_change_ask(kvd_core_t *core, uint32_t slot_class);
/* A lease names these slots (`more`), or has ended. */
void kvd_change_name(kvd_core_t *core, const uint32_t *slots, uint32_t n, int more);
/* Slots of the slab in change that leases name, counted. */
uint64_t kvd_change_count(kvd_core_t *core);
/* One quantum; 1 while there is more at once. */
int kvd_change_run(kvd_core_t *core);

#endif
