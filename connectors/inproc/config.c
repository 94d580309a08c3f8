/* What kvx_attach() is given: checked, and copied. */
#include "inproc/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local const char *why_text = "no call has failed";

const char *kvx_last_error(void)
{
	return why_text;
}

static kvc_status_t refuse(const char *why)
{
	why_text = why;

	return KVC_ERR_ARG;
}

/* The cache must hold every head and layer of the pool block: a rank that holds a part cannot complete a block alone.
 */
static int covers_all(const kvk_paged_t *paged, const kvk_layout_t *layout)
{
	const int heads = paged->kind == KVK_PAGED_OPAQUE || (paged->first_head == 0 && paged->heads == layout->heads);

	return heads && paged->first_layer == 0 && paged->layers == layout->layers;
}

kvc_status_t kvx_config_check(const kvx_config_t *config)
{
	const char *why = "paged does not fit layout";

	if (!config || config->struct_size < sizeof *config) {
		return refuse("struct_size is not that of kvx_config_t");
	}
	if (config->roles == 0 || config->roles > KVX_BOTH) {
		return refuse("roles is neither KVX_PRODUCER nor KVX_CONSUMER nor both");
	}
	if (!config->identity || !config->layout || !config->paged) {
		return refuse("identity, layout and paged are required");
	}
	if (config->identity->struct_size < sizeof *config->identity) {
		return refuse("struct_size is not that of kvc_identity_t");
	}
	if (kvk_layout_check(config->layout, &why) != KV_OK ||
	    kvk_paged_check(config->paged, config->layout, &why) != KV_OK) {
		return refuse(why);
	}
	if (!covers_all(config->paged, config->layout)) {
		return refuse("paged does not hold all heads and layers of the layout");
	}

	return KVC_OK;
}

static size_t text_size(const char *text)
{
	return text ? strlen(text) + 1 : 0;
}

/* Move *p_text to `at`; returns the first byte after it. */
static char *copy_text(char *at, const char **p_text)
{
	const size_t size = text_size(*p_text);

	if (size == 0) {
		return at;
	}
	memcpy(at, *p_text, size);
	*p_text = at;

	return at + size;
}

kvc_status_t kvx_config_keep_identity(kvx_t *kvx, const kvx_config_t *config)
{
	kvc_identity_t *id = &kvx->identity;
	const char **const texts[] = {&id->model, &id->weights, &id->dtype,       &id->quantization, &id->rope,
				      &id->lora,  &id->hash,    &id->page_format, &id->extra};
	size_t size = 1;
	char *at;

	if (kvk_layout_format(config->layout, kvx->layout_text, sizeof kvx->layout_text) != KV_OK) {
		return refuse("the layout has no canonical text");
	}
	(void)snprintf(kvx->groups_text, sizeof kvx->groups_text, "0:full:%u", config->layout->block_tokens);

	*id = *config->identity;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		size += text_size(*texts[i]);
	}
	kvx->identity_text = malloc(size);
	if (!kvx->identity_text) {
		return KVC_ERR_NOMEM;
	}
	at = kvx->identity_text;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		at = copy_text(at, texts[i]);
	}

	id->struct_size = sizeof *id;
	id->hash_tokens = config->layout->block_tokens;
	id->groups = kvx->groups_text;
	id->layout = kvx->layout_text;

	return KVC_OK;
}

kvc_status_t kvx_config_identity_refused(void)
{
	return refuse(kvc_last_error());
}
