/* kvx_factory.h -- connectors by name and role, from one struct or its JSON form.
 *
 * The JSON form is vLLM's KVTransferConfig: what `--kv-transfer-config` takes there makes a connector here. A field or
 * option that is not known, or has a value it cannot have, is refused; kvx_last_error() names it, and the nearest right
 * one. */
#ifndef KVX_FACTORY_H
#define KVX_FACTORY_H

#include "kvx.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVX_CONNECTOR       "KvdConnector" /* the one that is always there: libkvx with a daemon of this node */
#define KVX_CONNECTORS_MAX  16u            /* registered ones */
#define KVX_CONNECTOR_DEPTH 8              /* of nested JSON values */

/* Texts are NUL-terminated. Fields are named as in JSON, without "kv_". */
typedef struct kvx_connector_config {
	size_t struct_size;
	char connector[64];     /* kv_connector: the name it was registered with */
	uint32_t roles;         /* kv_role: kv_producer, kv_consumer, kv_both as KVX_* */
	uint32_t rank;          /* kv_rank: of this engine among kv_parallel_size ones, 0 to 65535 */
	uint32_t parallel_size; /* kv_parallel_size: 1 to 65536 */
	uint64_t buffer_size;   /* kv_buffer_size: at least 1: kvx_config_t.buffer_bytes */
	char buffer_device[8]; /* kv_buffer_device: "cpu" or "cuda". For connectors that have a choice; kvd's pool is in
				  CPU memory */
	char ip[64];         /* kv_ip, kv_port: where the sides of other connectors meet; kvd's meet at their daemon */
	uint32_t port;       /* 1 to 65535 */
	char engine_id[128]; /* shown by kvctl as the program, if it is not empty */
	/* kv_connector_extra_config: options of the same name. */
	char socket[108];   /* of the daemon; empty: $KVD_SOCKET, else /run/kvd/default.sock */
	uint32_t load_ms;   /* as in kvx_config_t, 0 to 3600000 */
	uint32_t save_ms;   /* likewise */
	uint32_t attach_ms; /* likewise */
} kvx_connector_config_t;

/* vLLM's defaults, and KVX_CONNECTOR in both roles. Sets struct_size. */
KVX_API void kvx_connector_config_init(kvx_connector_config_t *config);
/* The JSON object in text[len] on top of the defaults. null stands for a default. Of vLLM's fields those that mean
 * nothing here are read and not used: kv_connector_module_path, enable_permute_local_kv, kv_load_failure_policy.
 * KVC_ERR_ARG: not a JSON object, or a wrong field; kvx_last_error(); *config is unchanged. KVC_ERR_NOMEM. */
KVX_API kvc_status_t kvx_connector_config_read(const char *text, size_t len, kvx_connector_config_t *config);

/* Makes a connector: `engine` has the engine's identity, layout and paged cache with its parts; its other fields are
 * ignored. */
typedef kvc_status_t (*kvx_connector_fn)(const kvx_connector_config_t *config, const kvx_config_t *engine,
					 kvx_t **p_kvx);
/* Add one by name, before other threads create any. KVC_ERR_ARG: no name, or too long. KVC_ERR_EXISTS: the name is
 * taken. KVC_ERR_LIMIT: KVX_CONNECTORS_MAX. */
KVX_API kvc_status_t kvx_connector_register(const char *name, kvx_connector_fn create);
/* kvx_attach() by name and role. KVC_ERR_ARG: the name is not known, a field has a value it cannot have, or as
 * kvx_attach(). */
KVX_API kvc_status_t kvx_connector_create(const kvx_connector_config_t *config, const kvx_config_t *engine,
					  kvx_t **p_kvx);

#ifdef __cplusplus
}
#endif
#endif
