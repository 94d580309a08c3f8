/* What kvx_scheduler_open() is given: checked, and copied. */
#include "scheduler/config.h"
#include "scheduler/base/requests.h"

#include <stdio.h>

static _Thread_local const char *why_text = "no call has failed";

const char *kvx_scheduler_last_error(void)
{
	return why_text;
}

kvc_status_t kvx_scheduler_reject_config(const char *why)
{
	why_text = why;

	return KVC_ERR_ARG;
}

/* The fields that can be checked one by one. */
static kvc_status_t check_fields(const kvx_scheduler_config_t *config)
{
	if (!config || config->struct_size < sizeof *config) {
		return kvx_scheduler_reject_config("struct_size is not that of kvx_scheduler_config_t");
	}
	if (!config->identity || config->identity->struct_size < sizeof *config->identity || !config->layouts) {
		return kvx_scheduler_reject_config(
			"identity and layouts are required, struct_size in the identity set");
	}
	if (!config->instance || !config->secret || config->secret_len < 16 || config->secret_len > 32) {
		return kvx_scheduler_reject_config("the instance and its secret of 16 to 32 bytes are required");
	}
	if (!config->writers || config->writer_count == 0 || config->writer_count > 65535) {
		return kvx_scheduler_reject_config("at least one writer is required");
	}
	if (config->max_blocks == 0 || config->max_blocks > KVX_MSG_BYTES_MAX / 8u) {
		return kvx_scheduler_reject_config("max_blocks is zero or too many for a step message");
	}
	if (config->mode < KVX_LOAD_AUTO || config->mode > KVX_LOAD_ASYNC) {
		return kvx_scheduler_reject_config("mode is none of kvx_load_mode_t");
	}

	return KVC_OK;
}

/* Writers stay inside the layout of their group, and none of them is the scheduler. */
static kvc_status_t check_writers(const kvc_writer_t *writers, uint32_t count, const kvk_layout_t *layout)
{
	const char *why = "the layout is not valid";

	if (kvk_layout_check(layout, &why) != KV_OK) {
		return kvx_scheduler_reject_config(why);
	}
	for (uint32_t i = 0; i < count; i++) {
		const kvc_writer_t *w = &writers[i];

		if (w->rank >= KVX_SCHEDULER_RANK || w->head_first > layout->heads ||
		    w->head_count > layout->heads - w->head_first || w->layer_first > layout->layers ||
		    w->layer_count > layout->layers - w->layer_first) {
			return kvx_scheduler_reject_config(
				"a writer's heads or layers are not in the layout, or its rank is the scheduler's");
		}
	}

	return KVC_OK;
}

static char *copy_text(char *at, const char **p_text)
{
	const size_t size = *p_text ? strlen(*p_text) + 1u : 0;

	if (size) {
		memcpy(at, *p_text, size);
		*p_text = at;
	}

	return at + size;
}

/* The weights' name may come later (kvx_scheduler_set_weights()), the adapter's with a request. */
static int has_missing_field(const kvc_identity_t *id, const char *units)
{
	const kv_identity_t given = {
		.model = id->model,
		.weights = id->weights ? id->weights : "later",
		.dtype = id->dtype,
		.quantization = id->quantization ? id->quantization : "none",
		.rope = id->rope,
		.lora = id->lora ? id->lora : "none",
		.hash = id->hash ? id->hash : "kv1",
		.hash_tokens = units,
		.groups = id->groups,
		.layout = id->layout,
		.page_format = id->page_format ? id->page_format : "plain",
		.extra = id->extra,
	};
	static _Thread_local char why[96];
	char text[KV_IDENTITY_MAX_TEXT];
	const char *field = NULL;

	if (kv_identity_text(&given, text, sizeof text, &field) == KV_OK) {
		return 0;
	}
	(void)snprintf(why, sizeof why, "the identity's %s is missing or too long", field ? field : "text");
	(void)kvx_scheduler_reject_config(why);

	return 1;
}

static kvc_status_t take_identity(kvx_scheduler_t *scheduler, const kvx_scheduler_config_t *config)
{
	kvc_identity_t *id = &scheduler->identity;
	const char **const texts[] = {&id->model,  &id->weights, &id->dtype,      &id->quantization,
				      &id->rope,   &id->lora,    &id->hash,       &id->groups,
				      &id->layout, &id->extra,   &id->page_format};
	kv_identity_t parsed;
	char units[16], groups[32];
	size_t size = 1;
	char *at;

	*id = *config->identity;
	(void)snprintf(units, sizeof units, "%u", id->hash_tokens);
	(void)snprintf(groups, sizeof groups, "0:full:%u", id->hash_tokens);
	id->groups = id->groups ? id->groups : groups;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		size += *texts[i] ? strlen(*texts[i]) + 1u : 0;
	}
	scheduler->text = kv_alloc(scheduler->env, size);
	if (!scheduler->text) {
		return KVC_ERR_NOMEM;
	}
	at = scheduler->text;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		at = copy_text(at, texts[i]);
	}

	if (has_missing_field(id, units)) {
		return KVC_ERR_ARG;
	}
	parsed = (kv_identity_t){.hash_tokens = units, .groups = id->groups};
	if (kv_identity_groups(&parsed, &scheduler->unit, scheduler->groups, KVX_MAX_GROUPS, &scheduler->group_count) !=
	    KV_OK) {
		return kvx_scheduler_reject_config("the identity's hash_tokens or groups are wrong");
	}

	return KVC_OK;
}

static kvc_status_t take_arrays(kvx_scheduler_t *scheduler, const kvx_scheduler_config_t *config)
{
	const kv_env_t *env = scheduler->env;
	const size_t writer_bytes = (size_t)scheduler->group_count * config->writer_count * sizeof *scheduler->writers;

	scheduler->writers = kv_alloc(env, writer_bytes);
	scheduler->spaces = kv_alloc(env, KVX_SPACES_MAX * sizeof *scheduler->spaces);
	scheduler->keys = kv_alloc(env, KVX_RUN_BLOCKS * sizeof *scheduler->keys);
	scheduler->blocks = kv_alloc(env, config->max_blocks * sizeof *scheduler->blocks);
	scheduler->fence = kv_alloc(env, config->max_blocks * sizeof *scheduler->fence);
	if (!scheduler->writers || !scheduler->spaces || !scheduler->keys || !scheduler->blocks || !scheduler->fence) {
		return KVC_ERR_NOMEM;
	}
	memcpy(scheduler->writers, config->writers, writer_bytes);

	/* Reserved at open, so that a message can always name the blocks allocated in its step. */
	scheduler->reserved_bytes = sizeof(kvx_msg_fence_t) + kvx_padded(config->max_blocks * sizeof(uint32_t));
	kvx_msg_reset(&scheduler->message, KVX_MSG_MAGIC);
	if (!kvx_message_reserve(scheduler, 0)) {
		return KVC_ERR_NOMEM;
	}

	return kvx_requests_init(&scheduler->requests, env, scheduler->group_count);
}

kvc_status_t kvx_scheduler_apply_config(kvx_scheduler_t *scheduler, const kvx_scheduler_config_t *config)
{
	kvk_geometry_t geometry;
	kvc_status_t status = check_fields(config);

	status = status == KVC_OK ? take_identity(scheduler, config) : status;
	for (uint32_t g = 0; g < scheduler->group_count && status == KVC_OK; g++) {
		status = check_writers(&config->writers[(size_t)g * config->writer_count], config->writer_count,
				       &config->layouts[g]);
	}
	if (status != KVC_OK) {
		return status;
	}

	for (uint32_t g = 0; g < scheduler->group_count; g++) {
		kvk_layout_geometry(&config->layouts[g], &geometry);
		scheduler->token_bytes += geometry.block_bytes / scheduler->groups[g].block_tokens;
	}
	scheduler->writer_count = config->writer_count;
	scheduler->max_blocks = config->max_blocks;
	scheduler->foreign = config->foreign != 0;
	scheduler->use_cost_model = config->cost_model != 0;
	scheduler->mode = (kvx_load_mode_t)config->mode;
	scheduler->defer_shared = config->defer_shared != 0;
	scheduler->wait_us = config->wait_us ? config->wait_us : KVX_WAIT_US;
	scheduler->wait_asked = config->wait_us != 0;
	scheduler->saves_all = config->saves_all;
	scheduler->keeps_blocks = config->keeps_blocks;
	scheduler->load_ms = config->load_ms ? config->load_ms : KVX_STEP_LOAD_MS;
	scheduler->min_tokens = config->min_tokens ? config->min_tokens : scheduler->unit;
	kvx_cost_model_init(&scheduler->cost_model, scheduler->groups[0].block_tokens, scheduler->token_bytes);

	return take_arrays(scheduler, config);
}
