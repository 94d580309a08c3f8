/* caps.h -- the most that a namespace may have of a tier, whatever is idle. */
#ifndef KVS_CAPS_H
#define KVS_CAPS_H

#include "kvs/tier.h"

#define KVS_CAPS 256u

typedef struct kvs_caps {
	uint32_t count;
	struct {
		char ns[72];
		uint64_t bytes;
	} of[KVS_CAPS];
} kvs_caps_t;

/* KV_ERR_LIMIT: too many namespaces, or a name that is too long. */
kv_status_t kvs_caps_set(kvs_caps_t *caps, const char *ns, uint64_t bytes);
/* Bytes that the namespace of the class may have beyond what its classes have now; UINT64_MAX: it has no cap. */
uint64_t kvs_caps_left(const kvs_caps_t *caps, kvs_tier_t *tier, uint32_t slot_class, uint32_t class_count);

#endif
