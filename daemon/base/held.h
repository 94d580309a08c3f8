/* daemon/base/held.h -- descriptors that the keeper has kept from an earlier daemon, by name: for the next daemon, or
 * for a keeper of another version (decision 061).
 *
 * The keeper's list is a memfd of lines "<descriptor> <name>"; the descriptors were inherited. What nobody claims is
 * closed, and the keeper lets go of it (decision 059).
 */
#ifndef KVD_HELD_H
#define KVD_HELD_H

#include "base/keeper_socket.h"

#include <stdint.h>

typedef struct kvd_held kvd_held_t;

/* Reads the list and closes it. list_fd -1: there is nothing, and *p_held is NULL. A line without a descriptor is a
 * name that was claimed. KV_ERR_NOMEM: all is closed here, and the keeper has it still. */
kv_status_t kvd_held_open(int list_fd, kvd_keeper_queue_t *keeper, kvd_held_t **p_held);
/* The i-th name; NULL: there are no more. Claimed ones are there too. */
const char *kvd_held_name(const kvd_held_t *held, uint32_t i);
/* The descriptor, the caller's from now on; -1: nothing of the name is left. `held` may be NULL. */
int kvd_held_claim(kvd_held_t *held, const char *name);
/* Close what was not claimed; `drop`: and have the keeper drop it. NULL is fine. */
void kvd_held_close(kvd_held_t *held, int drop);

#endif
