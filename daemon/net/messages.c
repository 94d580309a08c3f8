/* The tables of the control channel's messages. */
#include "net/messages.h"

#define FIELD(kind, name, limit, help) {KV_FIELD_##kind, #name, limit, help},
#define TABLE(code, NAME, name)        static const kv_field_t name##_fields[] = {KVD_NET_FIELDS_##name(FIELD)};
KVD_NET_MESSAGES(TABLE)

const kv_body_t *kvd_net_body(uint32_t code)
{
	static const kv_body_t bodies[] = {
#define BODY(code, NAME, name) [code] = {name##_fields, KV_COUNT_OF(name##_fields)},
		KVD_NET_MESSAGES(BODY)};

	return code < KV_COUNT_OF(bodies) && bodies[code].count > 0 ? &bodies[code] : NULL;
}
