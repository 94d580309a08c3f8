/* daemon/io/members/slabs.h -- slabs that come and go: which members know each one, and which still map a retired one.
 */
#ifndef KVD_IO_MEMBERS_SLABS_H
#define KVD_IO_MEMBERS_SLABS_H

#include "io/host.h"

kv_status_t kvd_slabs_open(kvd_host_t *host);
void kvd_slabs_close(kvd_host_t *host);
/* Tell members of slabs that were carved or retired since the last call, and of devices whose memory has a pool since;
 * call it before anything that can name slots of these is sent. */
void kvd_slabs_announce(kvd_host_t *host);
/* Tell one new member of all devices, and of all slabs of its namespace. */
void kvd_slabs_announce_to(kvd_host_t *host, kvd_session_t *session);
/* A member has unmapped a retired slab; it has gone, and with it all it has mapped. */
void kvd_slabs_note_unmapped(kvd_host_t *host, kvd_member_t member, uint64_t slab);
void kvd_slabs_forget_member(kvd_host_t *host, kvd_member_t member);
/* Slabs whose descriptors are open, of all pools. */
uint32_t kvd_slabs_count_held(const kvd_host_t *host);
/* Slot files of the disk tier, which are open. */
uint32_t kvd_slabs_count_files(const kvd_host_t *host);
/* Once a turn: give back the memory of retired slabs that nobody maps, or has mapped for too long. */
void kvd_slabs_release_retired(kvd_host_t *host);

#endif
