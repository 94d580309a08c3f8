/* The JSON form of a connector's configuration. */
#include "inproc/error.h"
#include "inproc/factory.h"

#include "kv/types.h"
#include "kv/units.h"

#include <json-c/json.h>
#include <stdio.h>
#include <string.h>

#define TEXT_MAX (1u << 20) /* bytes of JSON */

typedef struct kvx_field_set {
	const kvx_field_t *fields;
	size_t count;
	const char *what;
} kvx_field_set_t;

static kvc_status_t set_number(const kvx_field_t *field, struct json_object *value, kvx_connector_config_t *config)
{
	const double real = json_object_get_double(value);

	if (field->type == KVX_FIELD_ROLE) { /* a number only in the struct */
		return kvx_refuse("%s: must be a text", field->name);
	}
	/* vLLM writes some integers as 1e9 */
	if (json_object_is_type(value, json_type_double)) {
		const uint64_t whole = real >= 0 && real < 9e18 ? (uint64_t)real : UINT64_MAX;

		return kvx_field_set_number(field, (double)whole == real ? whole : UINT64_MAX, config);
	}

	return kvx_field_set_number(
		field, json_object_get_int64(value) < 0 ? UINT64_MAX : json_object_get_uint64(value), config);
}

static kvc_status_t set_field(const kvx_field_t *field, struct json_object *value, kvx_connector_config_t *config)
{
	switch (json_object_get_type(value)) {
	case json_type_null:
		return KVC_OK;
	case json_type_int:
	case json_type_double:
		return set_number(field, value, config);
	case json_type_string:
		return strlen(json_object_get_string(value)) == (size_t)json_object_get_string_len(value)
			       ? kvx_field_set_text(field, json_object_get_string(value), config)
			       : kvx_refuse("%s: a NUL in a text", field->name);
	default:
		return kvx_refuse("%s: must be a number or a text", field->name);
	}
}

static const kvx_field_t *find_field(const kvx_field_set_t *set, const char *name)
{
	const char *names[16], *near;
	char prefixed[80];
	size_t count = 0;

	for (size_t i = 0; i < set->count; i++) {
		if (strcmp(set->fields[i].name, name) == 0) {
			return &set->fields[i];
		}
	}
	while (count < set->count && count < KV_COUNT_OF(names)) {
		names[count] = set->fields[count].name;
		count++;
	}
	near = kv_nearest(name, names, count);
	if (!near) { /* "role" for "kv_role" */
		(void)snprintf(prefixed, sizeof prefixed, "kv_%.64s", name);
		near = kv_nearest(prefixed, names, count);
	}
	(void)kvx_refuse("%.64s: there is no such %s%s%s", name, set->what, near ? "; did you mean " : "",
			 near ? near : "");

	return NULL;
}

/* p_group: the object that stands for a group; NULL: none did. */
static kvc_status_t set_fields(const kvx_field_set_t *set, struct json_object *object, kvx_connector_config_t *config,
			       struct json_object **p_group)
{
	const struct json_object_iterator end = json_object_iter_end(object);

	for (struct json_object_iterator at = json_object_iter_begin(object); !json_object_iter_equal(&at, &end);
	     json_object_iter_next(&at)) {
		const char *name = json_object_iter_peek_name(&at);
		struct json_object *value = json_object_iter_peek_value(&at);
		const kvx_field_t *field = find_field(set, name);
		kvc_status_t status = KVC_OK;

		if (!field) {
			return KVC_ERR_ARG;
		}
		if (field->type == KVX_FIELD_GROUP) {
			*p_group = value;
			if (value && !json_object_is_type(value, json_type_object)) {
				return kvx_refuse("%s: must be an object", name);
			}
		} else if (field->type != KVX_FIELD_UNUSED) {
			status = set_field(field, value, config);
		}
		if (status != KVC_OK) {
			return status;
		}
	}

	return KVC_OK;
}

static kvc_status_t take_object(struct json_object *object, kvx_connector_config_t *config)
{
	const kvx_field_set_t all = {kvx_connector_fields, kvx_connector_field_count, "field"};
	const kvx_field_set_t extra = {kvx_extra_fields, kvx_extra_field_count, "option in kv_connector_extra_config"};
	kvx_connector_config_t made;
	struct json_object *group = NULL;
	kvc_status_t status;

	kvx_connector_config_init(&made);
	status = set_fields(&all, object, &made, &group);
	if (status == KVC_OK && group) {
		status = set_fields(&extra, group, &made, &group);
	}
	if (status == KVC_OK) {
		*config = made;
	}

	return status;
}

kvc_status_t kvx_connector_config_read(const char *text, size_t len, kvx_connector_config_t *config)
{
	struct json_tokener *tokener;
	struct json_object *object;
	enum json_tokener_error error;
	kvc_status_t status;

	if (!text || !config || len > TEXT_MAX) {
		return kvx_refuse("an argument is NULL, or the text has more than %u bytes", TEXT_MAX);
	}
	tokener = json_tokener_new_ex(KVX_CONNECTOR_DEPTH);
	if (!tokener) {
		return KVC_ERR_NOMEM;
	}
	json_tokener_set_flags(tokener, JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8);
	object = json_tokener_parse_ex(tokener, text, (int)len);
	error = json_tokener_get_error(tokener);
	if (error != json_tokener_success) {
		status = kvx_refuse("not JSON: %s, at byte %zu",
				    error == json_tokener_continue ? "it ends too early"
								   : json_tokener_error_desc(error),
				    json_tokener_get_parse_end(tokener));
	} else if (!json_object_is_type(object, json_type_object)) {
		status = kvx_refuse("not a JSON object");
	} else {
		status = take_object(object, config);
	}
	(void)json_object_put(object);
	json_tokener_free(tokener);

	return status;
}
