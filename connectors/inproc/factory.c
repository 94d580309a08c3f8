/* Connectors by name and role. */
#include "inproc/factory.h"
#include "inproc/error.h"

#include "kv/types.h"
#include "kv/units.h"

#include <string.h>

/* ---- fields ---------------------------------------------------------------------------------- */

#define AT(member)   offsetof(kvx_connector_config_t, member)
#define TEXT(member) AT(member), 0, sizeof((kvx_connector_config_t *)0)->member
#define MS_MAX       3600000u

const kvx_field_t kvx_connector_fields[] = {
	{"kv_connector", KVX_FIELD_TEXT, TEXT(connector)},
	{"kv_role", KVX_FIELD_ROLE, AT(roles), KVX_PRODUCER, KVX_BOTH},
	{"kv_rank", KVX_FIELD_U32, AT(rank), 0, 65535},
	{"kv_parallel_size", KVX_FIELD_U32, AT(parallel_size), 1, 65536},
	{"kv_buffer_size", KVX_FIELD_U64, AT(buffer_size), 1, INT64_MAX},
	{"kv_buffer_device", KVX_FIELD_DEVICE, TEXT(buffer_device)},
	{"kv_ip", KVX_FIELD_TEXT, TEXT(ip)},
	{"kv_port", KVX_FIELD_U32, AT(port), 1, 65535},
	{"engine_id", KVX_FIELD_TEXT, TEXT(engine_id)},
	{"kv_connector_extra_config", KVX_FIELD_GROUP, 0, 0, 0},
	{"kv_connector_module_path", KVX_FIELD_UNUSED, 0, 0, 0},
	{"enable_permute_local_kv", KVX_FIELD_UNUSED, 0, 0, 0},
	{"kv_load_failure_policy", KVX_FIELD_UNUSED, 0, 0, 0},
};
const size_t kvx_connector_field_count = KV_COUNT_OF(kvx_connector_fields);

const kvx_field_t kvx_extra_fields[] = {
	{"socket", KVX_FIELD_TEXT, TEXT(socket)},
	{"load_ms", KVX_FIELD_U32, AT(load_ms), 0, MS_MAX},
	{"save_ms", KVX_FIELD_U32, AT(save_ms), 0, MS_MAX},
	{"attach_ms", KVX_FIELD_U32, AT(attach_ms), 0, MS_MAX},
};
const size_t kvx_extra_field_count = KV_COUNT_OF(kvx_extra_fields);

static const char *const roles[] = {"kv_producer", "kv_consumer", "kv_both"}; /* KVX_PRODUCER and so on, less one */
static const char *const devices[] = {"cpu", "cuda"};

/* Its index; count: refused. */
static size_t find_choice(const kvx_field_t *field, const char *text, const char *const *choices, size_t count)
{
	const char *near = kv_nearest(text, choices, count);
	size_t i = 0;

	while (i < count && strcmp(choices[i], text) != 0) {
		i++;
	}
	if (i == count) {
		(void)kvx_refuse("%s: there is no \"%.64s\"; %s%s", field->name, text,
				 near ? "did you mean " : "the first one is ", near ? near : choices[0]);
	}

	return i;
}

kvc_status_t kvx_field_set_text(const kvx_field_t *field, const char *text, kvx_connector_config_t *config)
{
	char *at = (char *)config + field->offset;
	size_t i;

	switch (field->type) {
	case KVX_FIELD_ROLE:
		i = find_choice(field, text, roles, KV_COUNT_OF(roles));
		return i < KV_COUNT_OF(roles) ? kvx_field_set_number(field, i + 1u, config) : KVC_ERR_ARG;
	case KVX_FIELD_DEVICE:
		if (find_choice(field, text, devices, KV_COUNT_OF(devices)) == KV_COUNT_OF(devices)) {
			return KVC_ERR_ARG;
		}
		break;
	case KVX_FIELD_TEXT:
		break;
	default:
		return kvx_refuse("%s: must be a number from %llu to %llu", field->name, (unsigned long long)field->min,
				  (unsigned long long)field->max);
	}
	if (strlen(text) >= field->max) {
		return kvx_refuse("%s: at most %llu bytes", field->name, (unsigned long long)field->max - 1u);
	}
	memcpy(at, text, strlen(text) + 1u);

	return KVC_OK;
}

kvc_status_t kvx_field_set_number(const kvx_field_t *field, uint64_t number, kvx_connector_config_t *config)
{
	const uint32_t half = (uint32_t)number;
	char *at = (char *)config + field->offset;

	if (field->type == KVX_FIELD_TEXT || field->type == KVX_FIELD_DEVICE) {
		return kvx_refuse("%s: must be a text", field->name);
	}
	if (number < field->min || number > field->max) {
		return kvx_refuse("%s: must be a number from %llu to %llu", field->name, (unsigned long long)field->min,
				  (unsigned long long)field->max);
	}
	if (field->type == KVX_FIELD_U64) {
		memcpy(at, &number, sizeof number);
	} else {
		memcpy(at, &half, sizeof half);
	}

	return KVC_OK;
}

void kvx_connector_config_init(kvx_connector_config_t *config)
{
	*config = (kvx_connector_config_t){
		.struct_size = sizeof *config,
		.connector = KVX_CONNECTOR,
		.roles = KVX_BOTH,
		.parallel_size = 1,
		.buffer_size = KVX_BUFFER_BYTES,
		.buffer_device = "cpu",
		.ip = "127.0.0.1",
		.port = 14579,
	};
}

/* ---- connectors ------------------------------------------------------------------------------ */

static kvc_status_t create_kvd(const kvx_connector_config_t *config, const kvx_config_t *engine, kvx_t **p_kvx)
{
	const kvx_config_t made = {
		.struct_size = sizeof made,
		.roles = config->roles,
		.socket = config->socket[0] ? config->socket : NULL,
		.program = config->engine_id[0] ? config->engine_id : NULL,
		.identity = engine->identity,
		.layout = engine->layout,
		.paged = engine->paged,
		.parts = engine->parts,
		.load_ms = config->load_ms,
		.save_ms = config->save_ms,
		.attach_ms = config->attach_ms,
		.buffer_bytes = config->buffer_size,
	};

	return kvx_attach(&made, p_kvx);
}

static struct {
	char name[sizeof((kvx_connector_config_t *)0)->connector];
	kvx_connector_fn create;
} registered[KVX_CONNECTORS_MAX + 1u] = {{KVX_CONNECTOR, create_kvd}};
static size_t registered_count = 1;

/* Its index; registered_count: there is none. */
static size_t find_connector(const char *name)
{
	size_t i = 0;

	while (i < registered_count && strcmp(registered[i].name, name) != 0) {
		i++;
	}

	return i;
}

kvc_status_t kvx_connector_register(const char *name, kvx_connector_fn create)
{
	const size_t len = name ? strnlen(name, sizeof registered[0].name) : 0;

	if (!create || len == 0 || len == sizeof registered[0].name) {
		return kvx_refuse("a connector needs a function, and a name of 1 to %zu bytes",
				  sizeof registered[0].name - 1u);
	}
	if (find_connector(name) < registered_count) {
		return KVC_ERR_EXISTS;
	}
	if (registered_count == KV_COUNT_OF(registered)) {
		return KVC_ERR_LIMIT;
	}
	memcpy(registered[registered_count].name, name, len + 1u);
	registered[registered_count++].create = create;

	return KVC_OK;
}

/* What is not terminated is no text; what a program has filled in was not checked as what was read. */
static kvc_status_t check_fields(const kvx_connector_config_t *config, const kvx_field_t *fields, size_t count)
{
	kvx_connector_config_t copy = *config;
	kvc_status_t status = KVC_OK;

	for (size_t i = 0; i < count && status == KVC_OK; i++) {
		const kvx_field_t *field = &fields[i];
		const char *at = (const char *)config + field->offset;
		uint64_t number = 0;

		if (field->type == KVX_FIELD_TEXT || field->type == KVX_FIELD_DEVICE) {
			status = strnlen(at, field->max) < field->max
					 ? kvx_field_set_text(field, at, &copy)
					 : kvx_refuse("%s: is not terminated", field->name);
		} else if (field->type != KVX_FIELD_GROUP && field->type != KVX_FIELD_UNUSED) {
			memcpy(&number, at, field->type == KVX_FIELD_U64 ? sizeof number : sizeof config->rank);
			status = kvx_field_set_number(field, number, &copy);
		}
	}

	return status;
}

kvc_status_t kvx_connector_create(const kvx_connector_config_t *config, const kvx_config_t *engine, kvx_t **p_kvx)
{
	const char *names[KV_COUNT_OF(registered)], *near;
	kvc_status_t status;
	size_t at;

	if (!config || config->struct_size < sizeof *config || !engine || !p_kvx) {
		return kvx_refuse("struct_size is not that of kvx_connector_config_t, or an argument is NULL");
	}
	status = check_fields(config, kvx_connector_fields, kvx_connector_field_count);
	if (status == KVC_OK) {
		status = check_fields(config, kvx_extra_fields, kvx_extra_field_count);
	}
	if (status != KVC_OK) {
		return status;
	}
	if (config->rank >= config->parallel_size) {
		return kvx_refuse("kv_rank: %u is not below kv_parallel_size, %u", config->rank, config->parallel_size);
	}
	at = find_connector(config->connector);
	if (at == registered_count) {
		for (size_t i = 0; i < registered_count; i++) {
			names[i] = registered[i].name;
		}
		near = kv_nearest(config->connector, names, registered_count);
		return kvx_refuse("kv_connector: there is no \"%s\"; %s%s", config->connector,
				  near ? "did you mean " : "there is ", near ? near : KVX_CONNECTOR);
	}

	return registered[at].create(config, engine, p_kvx);
}
