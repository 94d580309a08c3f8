/* The weights and what follows from the shape alone. */
#include "kve/model.h"

#include <stdlib.h>

kv_status_t kve_model_init(kve_model_t *model, const kve_config_t *config)
{
	kve_model_t m = {.config = *config};
	const kv_status_t status = kve_weights_init(&m.weights, config);

	if (status != KV_OK) {
		return status;
	}
	m.rope = calloc((size_t)config->max_tokens * config->head_dim, sizeof(float));
	if (!m.rope) {
		kve_model_fini(&m);
		return KV_ERR_NOMEM;
	}
	kve_rope_table(config, m.rope);
	*model = m;

	return KV_OK;
}

void kve_model_fini(kve_model_t *model)
{
	kve_weights_fini(&model->weights);
	free(model->rope);
	*model = (kve_model_t){0};
}
