/* lease_impl.h -- the parts of a lease's life, for lease/ only. acquire.c calls fill.c and lease.c, fill.c calls
 * lease.c. */
#ifndef KVD_CORE_LEASE_IMPL_H
#define KVD_CORE_LEASE_IMPL_H

#include "core/base/core_impl.h"
#include "core/lease/lease.h"

/* ---- lease.c --------------------------------------------------------------------------------- */

/* A record with a header, whose pins are not taken yet: `ask` says the rest. KV_ERR_LIMIT, KV_ERR_NOMEM, KV_ERR_BUSY.
 */
kv_status_t kvd_lease_create(kvd_core_t *core, kvd_instance_rec_t *instance, const kvd_lease_t *ask,
			     kvd_lease_t **p_lease);
/* Write header and slots, enter the lease into ledger, wheel and lists, fill the reply. */
kv_status_t kvd_lease_publish(kvd_core_t *core, const kvd_space_t *space, kvd_lease_t *lease, uint8_t group,
			      kv_msg_acquire_reply_t *reply);
/* Give back all that the lease has, however much was done of it so far. */
void kvd_lease_free(kvd_core_t *core, kvd_lease_t *lease);
/* Bytes of more slots the instance's leases may pin. */
uint64_t kvd_lease_room(const kvd_core_t *core, const kvd_instance_rec_t *instance, uint32_t memory);
uint64_t kvd_lease_expiry(const kvd_core_t *core, uint32_t ttl_ms);
/* Its time to live begins again. */
void kvd_lease_extend(kvd_core_t *core, kvd_lease_t *lease, uint32_t ttl_ms);
/* Of a lease that is not published yet: count what is ready and wait for the first block that is not. */
void kvd_lease_count_ready(kvd_core_t *core, kvd_lease_t *lease);
/* The fill it waited for has ended well: count what is ready now. */
void kvd_lease_advance(kvd_core_t *core, kvd_lease_t *lease);
/* The lease ends at block n from now on. */
void kvd_lease_shorten(kvd_core_t *core, kvd_lease_t *lease, uint32_t n);

/* ---- fill.c ---------------------------------------------------------------------------------- */

/* Take slots for the blocks that are only on disk, reference them, start the fills. Shortens lease->n where room or
 * memory lacks. */
void kvd_lease_start_fills(kvd_core_t *core, kvd_lease_t *lease, uint32_t cpu_depth);
/* The same of an unchained lease, all or nothing. KV_ERR_BUSY: no room for one of its blocks. */
kv_status_t kvd_lease_start_all_fills(kvd_core_t *core, kvd_lease_t *lease, uint32_t *p_on_disk);

#endif
