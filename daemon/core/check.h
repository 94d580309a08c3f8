/* check.h -- invariants that can be verified at any time between two calls.
 *
 *   index       sets prefix-closed, counters, keys, marks
 *   pins        pins and references of leases, puts, hand-overs and transfers == those on blocks
 *   caps        pinned and unfinished bytes of each instance, lease areas
 *   cpu_slots, disk_slots   what the tier counts as used == what the core knows of
 *   mirror      nothing in it that is not in the index
 */
#ifndef KVD_CORE_CHECK_H
#define KVD_CORE_CHECK_H

#include "core/core.h"

typedef struct kvd_check {
	const char *name;
	const char *promise;
	int (*run)(kvd_core_t *core, char *why, size_t cap); /* 1: holds; `why` gets the figures */
} kvd_check_t;

extern const kvd_check_t kvd_checks[];
extern const uint32_t kvd_check_count;

#endif
