/* storage/nvme/io/region.h -- memory that transfers use, registered with the ring piece by piece. */
#ifndef KVS_NVME_IO_REGION_H
#define KVS_NVME_IO_REGION_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define KVS_MAX_REGIONS 1024u
#define KVS_PIECE_SHIFT                                                                                                \
	25u /* regions are registered in pieces of 32 MiB, one an iteration: pinning fresh memory takes time */

struct kvs_nvme;

/* Memory that transfers will use; constant once region_count has passed it, but for `state`:
 *   LIVE --the owner--> REMOVING --the ring thread--> GONE --the owner, who has seen it--> FREE
 *       --the owner, with other memory--> FRESH --the ring thread--> LIVE */
typedef enum kvs_region_state {
	KVS_REGION_LIVE,
	KVS_REGION_REMOVING,
	KVS_REGION_GONE,
	KVS_REGION_FREE,
	KVS_REGION_FRESH
} kvs_region_state_t;
typedef struct kvs_region {
	uint8_t *base;
	size_t bytes;
	_Atomic uint32_t state;
	size_t most_bytes; /* what its part of the table of the ring holds */
} kvs_region_t;

/* The ring thread's side of it. */
typedef struct kvs_ring_region {
	uint32_t first;  /* index of its first piece in the table */
	uint32_t pieces; /* registered so far */
	uint32_t wanted;
} kvs_ring_region_t;

/* Has all of the memory been touched? Registration touches every page, and the pre-fault thread does that better than
 * the ring thread. `page` has a byte for each page. */
int kvs_region_is_touched(void *base, size_t bytes, unsigned char *page);
/* The ring thread: take out what is REMOVING, with `unregister` for each piece, and take in what is FRESH. Returns by
 * how many there are more (modulo 2^32) with pieces to register. `count`: of the regions that it knows; it would take
 * in another one whose memory has gone. */
uint32_t kvs_apply_region_changes(struct kvs_nvme *nvme, kvs_ring_region_t *regions, uint32_t count,
				  void (*unregister)(void *ring, uint32_t index), void *ring);

#endif
