/* The identity of the reference engine in kvd. */
#include "impl.h"

#include "kv/log.h"

#include <stdio.h>

kv_status_t kve_store_attach(kve_engine_t *engine)
{
	const kve_config_t *model = &engine->config.model;
	char weights[KVE_FINGERPRINT_MAX];
	char rope[64];
	const int is_bf16 = engine->cache.paged[0].dtype == KVK_DTYPE_BF16; /* alone, or of a group with devices */
	kvk_layout_t layout;
	kve_place_t place = {.ordinal = 0};
	const int is_gpu = kve_rank_place(engine->rank, &place) == KV_OK;
	const kvx_device_t device = {.ordinal = place.ordinal, .stream = place.stream};
	kvc_status_t status;

	kve_weights_fingerprint(model, weights);
	(void)snprintf(rope, sizeof rope, "theta %u", model->rope_theta);
	kve_config_layout(model, &layout);
	layout.dtype = engine->cache.paged[0].dtype;

	const kvc_identity_t identity = {
		.struct_size = sizeof identity,
		.model = is_bf16 ? "kve-bf16" : "kve-reference",
		.weights = weights,
		.dtype = is_bf16 ? "bf16" : "f32",
		.rope = rope,
	};
	const kvx_config_t config = {
		.struct_size = sizeof config,
		.roles = KVX_BOTH,
		.socket = engine->config.socket,
		.program = engine->config.program,
		.identity = &identity,
		.layout = &layout,
		.paged = engine->cache.paged,
		.parts = engine->cache.ranks,
		.load_ms = engine->config.load_ms,
		.attach_ms = engine->config.attach_ms,
		.devices = is_gpu ? &device : NULL,
	};

	status = kvx_attach(&config, &engine->kvx);
	if (status == KVC_ERR_ARG) {
		kv_log(KV_LOG_ERROR, "engine", "the connector refuses its configuration: %s", kvx_last_error());
	}

	return (kv_status_t)status;
}
