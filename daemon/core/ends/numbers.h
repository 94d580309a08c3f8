/* numbers.h -- the numbers of open spaces, which members, messages and the mirror know them by.
 *
 *   number:  FREE --a space is opened--> GIVEN --no other number is free, and nothing names the space--> FREE
 *   space:   OPEN (has a number) ----------------------------------------------------------------------> CLOSED
 *            CLOSED --open--> OPEN          CLOSED --no blocks left--> gone (space.h)
 *
 * What names a space: a member that has it open, a lease, a put, a hand-over, a withdrawal, and a tree of an old epoch
 * that is being taken down. A closed space keeps its blocks, their entries in the mirror and its epoch, so opening it
 * again finds them; it needs no number, since nobody asks for it.
 *
 * Readers of the mirror are not counted: one that only matches is no member, and says no word when it goes. They are
 * safe since a number and an epoch together never mean two spaces (decision 074). No epoch is given twice, whatever the
 * space, so the epoch word of a number that was taken back is 0, then one that no older handle has. A reader that saw
 * the old word an instant ago looks keys up that are made of the old space's root and epoch: it finds that space's
 * blocks or none, and its ACQUIRE is answered STALE_EPOCH.
 */
#ifndef KVD_CORE_NUMBERS_H
#define KVD_CORE_NUMBERS_H

#include "core/base/core_impl.h"

#define KVD_FIRST_EPOCH (UINT64_C(1) << 32) /* an older daemon gave smaller ones, and each to many spaces */

/* A number that is free now. KV_ERR_LIMIT: none is, and all spaces that have one are named. */
kv_status_t kvd_number_find(kvd_core_t *core, uint32_t ns, uint32_t *p_number);
/* Does anything name the space? Then it keeps its number. */
int kvd_number_is_named(const kvd_core_t *core, const kvd_space_t *space);
/* Take the number of a space that nothing names. 0: something does. */
int kvd_number_close(kvd_core_t *core, kvd_space_t *space);
void kvd_number_give(kvd_core_t *core, kvd_space_t *space, uint32_t number);
/* The member has the space open from now on. 0 and one that has gone: nobody. */
void kvd_member_open_space(kvd_core_t *core, kvd_member_t member, kvd_space_t *space);
/* It needs it no longer. KV_ERR_NOT_FOUND: it did not have it open. */
kv_status_t kvd_member_close_space(kvd_core_t *core, kvd_member_t member, uint32_t number);
/* Its connection has ended. */
void kvd_member_close_spaces(kvd_core_t *core, kvd_member_rec_t *member);

#endif
