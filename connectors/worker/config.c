/* What kvx_worker_open() is given: checked, and copied. */
#include "worker/config.h"

#include "kv/digest.h"

#include <stdlib.h>
#include <string.h>

static _Thread_local const char *why_text = "no call has failed";

const char *kvx_worker_last_error(void)
{
	return why_text;
}

kvc_status_t kvx_worker_reject_config(const char *why)
{
	why_text = why;

	return KVC_ERR_ARG;
}

/* ---- checking -------------------------------------------------------------------------------- */

static int range_fits(uint32_t first, uint32_t count, uint32_t total)
{
	return count > 0 && first < total && count <= total - first;
}

static kvc_status_t check_group(const kvx_worker_config_t *config, const kvk_paged_t *paged)
{
	const kvc_writer_t *range = &config->range;
	const char *why = "paged does not fit layout";

	if (!paged || kvk_paged_check(paged, config->layout, &why) != KV_OK) {
		return kvx_worker_reject_config(why);
	}
	if (paged->first_head != range->head_first || paged->heads != range->head_count) {
		return kvx_worker_reject_config("a group's heads are not those of the rank's range");
	}
	if (paged->first_layer < range->layer_first ||
	    paged->first_layer + paged->layers > range->layer_first + range->layer_count) {
		return kvx_worker_reject_config("a group's layers are not within the rank's range");
	}

	return KVC_OK;
}

static kvc_status_t check_groups(const kvx_worker_config_t *config)
{
	if (!config->groups || config->group_count == 0 || config->group_count > KVX_MAX_GROUPS) {
		return kvx_worker_reject_config("there are no groups, or too many");
	}
	for (uint32_t i = 0; i < config->group_count; i++) {
		const kvc_status_t status = check_group(config, config->groups[i].paged);

		for (uint32_t j = 0; j < i; j++) {
			if (config->groups[j].group == config->groups[i].group) {
				return kvx_worker_reject_config("two groups have the same number");
			}
		}
		if (status != KVC_OK) {
			return status;
		}
	}

	return KVC_OK;
}

kvc_status_t kvx_worker_check_config(const kvx_worker_config_t *config)
{
	const char *why = "the layout is not valid";

	if (!config || config->struct_size < sizeof *config) {
		return kvx_worker_reject_config("struct_size is not that of kvx_worker_config_t");
	}
	if (!config->identity || !config->layout) {
		return kvx_worker_reject_config("identity and layout are required");
	}
	if (config->identity->struct_size < sizeof *config->identity) {
		return kvx_worker_reject_config("struct_size is not that of kvc_identity_t");
	}
	if (kvk_layout_check(config->layout, &why) != KV_OK) {
		return kvx_worker_reject_config(why);
	}
	if (!range_fits(config->range.head_first, config->range.head_count, config->layout->heads) ||
	    !range_fits(config->range.layer_first, config->range.layer_count, config->layout->layers)) {
		return kvx_worker_reject_config("the rank's range is not within the layout");
	}
	if (config->range.rank != config->rank) {
		return kvx_worker_reject_config("range is another rank's");
	}
	if (config->memory != KVX_MEMORY_HOST && config->memory != KVX_MEMORY_CUDA) {
		return kvx_worker_reject_config("the kind of memory is not known");
	}
	if (config->threads > KVX_WORKER_THREADS) {
		return kvx_worker_reject_config("more threads than are of use");
	}

	return check_groups(config);
}

/* ---- keeping --------------------------------------------------------------------------------- */

static size_t text_size(const char *text)
{
	return text ? strlen(text) + 1 : 0;
}

/* Move *p_text to `at`; returns the first byte after it. */
static char *move_text(char *at, const char **p_text)
{
	const size_t size = text_size(*p_text);

	if (size == 0) {
		return at;
	}
	memcpy(at, *p_text, size);
	*p_text = at;

	return at + size;
}

static kvc_status_t copy_identity(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	kvc_identity_t *id = &worker->identity;
	const char **const texts[] = {&id->model, &id->weights, &id->dtype,  &id->quantization, &id->rope,
				      &id->lora,  &id->hash,    &id->groups, &id->page_format,  &id->extra};
	size_t size = 1;
	char *at;

	if (kvk_layout_format(config->layout, worker->layout_text, sizeof worker->layout_text) != KV_OK) {
		return kvx_worker_reject_config("the layout has no canonical text");
	}
	*id = *config->identity;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		size += text_size(*texts[i]);
	}
	worker->identity_text = malloc(size);
	if (!worker->identity_text) {
		return KVC_ERR_NOMEM;
	}
	at = worker->identity_text;
	for (size_t i = 0; i < KV_COUNT_OF(texts); i++) {
		at = move_text(at, texts[i]);
	}
	id->struct_size = sizeof *id;
	id->layout = worker->layout_text;

	return KVC_OK;
}

static kvc_status_t copy_group(kvx_worker_t *worker, const kvx_worker_group_t *given, kvx_wgroup_t *group)
{
	const size_t bytes = given->paged->layers * sizeof *group->base;

	group->group = given->group;
	group->paged = *given->paged;
	group->block_bytes = (uint64_t)given->paged->heads * given->paged->layers * worker->geometry.page_bytes;
	group->padded = given->paged->layers < worker->range.layer_count;
	group->base = malloc(bytes);
	if (!group->base) {
		return KVC_ERR_NOMEM;
	}
	memcpy(group->base, given->paged->base, bytes);
	group->paged.base = group->base;
	if (worker->max_blocks < group->paged.blocks) {
		worker->max_blocks = group->paged.blocks;
	}

	return KVC_OK;
}

/* The leaves of a page of zeros. */
static kvc_status_t make_zero_leaves(kvx_worker_t *worker)
{
	const kvk_geometry_t *g = &worker->geometry;
	uint8_t *zeros = calloc(1, g->leaf_bytes);

	worker->zero_leaves = calloc(g->pieces, sizeof *worker->zero_leaves);
	if (!zeros || !worker->zero_leaves) {
		free(zeros);
		return KVC_ERR_NOMEM;
	}
	for (uint32_t i = 0; i < g->pieces; i++) {
		const size_t left = g->page_bytes - (size_t)i * g->leaf_bytes;

		worker->zero_leaves[i] = kv_digest(zeros, left < g->leaf_bytes ? left : g->leaf_bytes);
	}
	free(zeros);

	return KVC_OK;
}

static int init_scratch(kvx_scratch_t *scratch, const kvx_worker_t *worker)
{
	scratch->leaves = calloc((size_t)worker->batch * worker->words, sizeof *scratch->leaves);
	scratch->gathered = calloc(worker->words, sizeof *scratch->gathered);

	return scratch->leaves && scratch->gathered;
}

static kvc_status_t make_scratches(kvx_worker_t *worker)
{
	int made = init_scratch(&worker->scratch, worker) && init_scratch(&worker->transfer_scratch, worker);

	for (uint32_t i = 0; i + 2 < worker->threads && made; i++) {
		worker->copy_threads[i].worker = worker;
		made = init_scratch(&worker->copy_threads[i].scratch, worker);
	}

	return made ? KVC_OK : KVC_ERR_NOMEM;
}

static kvc_status_t make_tables(kvx_worker_t *worker)
{
	const size_t words = (worker->max_blocks + 63u) / 64u;

	worker->save_marks = calloc(worker->max_blocks, sizeof *worker->save_marks);
	worker->failed = calloc(words, sizeof *worker->failed);
	worker->fence = calloc(words, sizeof *worker->fence);
	worker->finished = calloc(KVX_WORKER_NAMES, sizeof *worker->finished);

	return worker->save_marks && worker->failed && worker->fence && worker->finished ? KVC_OK : KVC_ERR_NOMEM;
}

kvc_status_t kvx_worker_apply_config(kvx_worker_t *worker, const kvx_worker_config_t *config)
{
	kvc_status_t status;

	worker->layout = *config->layout;
	worker->range = config->range;
	kvk_layout_geometry(&worker->layout, &worker->geometry);
	worker->words = config->range.head_count * config->range.layer_count * worker->geometry.pieces;
	worker->batch = KVX_WORKER_BATCH / worker->geometry.block_bytes;
	worker->batch = worker->batch < 1 ? 1 : worker->batch;
	worker->batch = worker->batch > KVX_WORKER_MOVES ? KVX_WORKER_MOVES : worker->batch;

	worker->groups = calloc(config->group_count, sizeof *worker->groups);
	if (!worker->groups) {
		return KVC_ERR_NOMEM;
	}
	worker->group_count = config->group_count;
	for (uint32_t i = 0; i < config->group_count; i++) {
		status = copy_group(worker, &config->groups[i], &worker->groups[i]);
		if (status != KVC_OK) {
			return status;
		}
	}
	status = copy_identity(worker, config);
	status = status == KVC_OK ? make_zero_leaves(worker) : status;
	status = status == KVC_OK ? make_tables(worker) : status;

	return status == KVC_OK ? make_scratches(worker) : status;
}

const kvx_wgroup_t *kvx_worker_find_group(const kvx_worker_t *worker, uint32_t group)
{
	for (uint32_t i = 0; i < worker->group_count; i++) {
		if (worker->groups[i].group == group) {
			return &worker->groups[i];
		}
	}

	return NULL;
}

void kvx_scratch_fini(kvx_scratch_t *scratch)
{
	free(scratch->leaves);
	free(scratch->gathered);
}
