/* mirror_writer.h -- the writer's side of the mirror, for tests: what kv/shm.h promises to readers, in the plainest
 * way. */
#ifndef TESTS_MIRROR_WRITER_H
#define TESTS_MIRROR_WRITER_H

#include "kv/shm.h"

/* Lay an empty mirror of `buckets` (a power of two) out in zeroed memory of mirror_bytes(buckets). */
uint64_t mirror_bytes(uint64_t buckets);
void mirror_init(void *base, uint64_t buckets, uint64_t incarnation);
void mirror_beat(void *base, uint64_t now_ns);
void mirror_epoch(void *base, uint32_t space, uint64_t epoch);

/* Set the tiers of (key, group); 0 removes it. Returns 0, or -1 when it found no free entry within KV_MIRROR_MAX_PROBE
 * buckets. */
int mirror_set(void *base, const kv_key_t *key, uint8_t group, uint8_t tiers);

/* Leave the home bucket of a key locked (odd), or unlock it. */
void mirror_lock(void *base, const kv_key_t *key, int locked);

#endif
