/* inproc/factory.h -- the fields of a connector's configuration, as a table. */
#ifndef KVX_INPROC_FACTORY_H
#define KVX_INPROC_FACTORY_H

#include "kvx_factory.h"

typedef enum kvx_field_type {
	KVX_FIELD_TEXT,
	KVX_FIELD_U32,
	KVX_FIELD_U64,
	KVX_FIELD_ROLE,   /* u32 */
	KVX_FIELD_DEVICE, /* text */
	KVX_FIELD_GROUP,  /* an object with the fields of kvx_extra_fields */
	KVX_FIELD_UNUSED
} kvx_field_type_t;

typedef struct kvx_field {
	const char *name;
	kvx_field_type_t type;
	size_t offset;     /* in kvx_connector_config_t */
	uint64_t min, max; /* of numbers; max of a text: bytes with its NUL */
} kvx_field_t;

extern const kvx_field_t kvx_connector_fields[], kvx_extra_fields[];
extern const size_t kvx_connector_field_count, kvx_extra_field_count;

/* Set a field from what JSON, or anything else, has for it. KVC_ERR_ARG: the value is not one of its values; the
 * configuration is unchanged. */
kvc_status_t kvx_field_set_text(const kvx_field_t *field, const char *text, kvx_connector_config_t *config);
kvc_status_t kvx_field_set_number(const kvx_field_t *field, uint64_t number, kvx_connector_config_t *config);

#endif
