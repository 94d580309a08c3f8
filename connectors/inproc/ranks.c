/* The worker halves of this process. A cache in several parts is that of a model computed by tensor parallel ranks:
 * each part has its own heads of all layers, or a copy of those of others. */
#include "inproc/ranks.h"
#include "inproc/error.h"

/* ---- dividing -------------------------------------------------------------------------------- */

static int are_copies(const kvk_paged_t *a, const kvk_paged_t *b)
{
	return a->first_head == b->first_head && a->heads == b->heads;
}

static int have_common_heads(const kvk_paged_t *a, const kvk_paged_t *b)
{
	return a->first_head < b->first_head + b->heads && b->first_head < a->first_head + a->heads;
}

/* Copies share out the layers: each byte is saved once. */
static kvc_status_t divide_part(kvx_ranks_t *ranks, const kvx_config_t *config, uint32_t r)
{
	const kvk_paged_t *part = &config->paged[r];
	const uint32_t layers = config->layout->layers;
	uint32_t copies = 0, index = 0, first;

	if (part->first_layer != 0 || part->layers != layers) {
		return kvx_refuse("paged does not hold all layers of the layout");
	}
	if (part->blocks != config->paged->blocks) {
		return kvx_refuse("the parts of the cache have different numbers of blocks");
	}
	for (uint32_t i = 0; i < ranks->count; i++) {
		const kvk_paged_t *other = &config->paged[i];

		if (have_common_heads(part, other) && !are_copies(part, other)) {
			return kvx_refuse("two parts of the cache have some heads in common");
		}
		index += (uint32_t)(i < r && are_copies(part, other));
		copies += (uint32_t)are_copies(part, other);
	}
	if (copies > layers) {
		return kvx_refuse("a part of the cache has more copies than layers");
	}
	first = index * layers / copies;
	ranks->saved[r] = (kvc_writer_t){.rank = r,
					 .head_first = part->first_head,
					 .head_count = part->heads,
					 .layer_first = first,
					 .layer_count = (index + 1) * layers / copies - first};

	return KVC_OK;
}

kvc_status_t kvx_ranks_divide(kvx_ranks_t *ranks, const kvx_config_t *config)
{
	uint64_t pages = 0;
	kvc_status_t status = KVC_OK;

	ranks->count = config->parts ? config->parts : 1;
	if (ranks->count > KVX_MAX_PARTS) {
		return kvx_refuse("the cache has more than %u parts", KVX_MAX_PARTS);
	}
	for (uint32_t r = 0; r < ranks->count && status == KVC_OK; r++) {
		status = divide_part(ranks, config, r);
		pages += (uint64_t)ranks->saved[r].head_count * ranks->saved[r].layer_count;
	}
	if (status == KVC_OK && pages != (uint64_t)config->layout->heads * config->layout->layers) {
		return kvx_refuse("the parts of the cache do not have all heads of the layout");
	}

	return status;
}

/* ---- open and close -------------------------------------------------------------------------- */

static void set_device(kvx_worker_config_t *worker, const kvx_device_t *device)
{
	if (device) {
		worker->memory = KVX_MEMORY_CUDA;
		worker->device = device->ordinal;
		worker->cuda = device->cuda;
		worker->image = device->image;
	}
}

kvc_status_t kvx_ranks_open(kvx_ranks_t *ranks, const kvx_config_t *config, const kvx_worker_config_t *common)
{
	kvx_worker_config_t worker = *common;
	kvx_worker_group_t group = {.group = 0, .layout = config->layout};
	kvc_status_t status = KVC_OK;

	ranks->on_devices = config->devices != NULL;
	worker.groups = &group;
	worker.group_count = 1;
	for (uint32_t r = 0; r < ranks->count && status == KVC_OK; r++) {
		const kvc_writer_t *saved = &ranks->saved[r];

		group.paged = &config->paged[r];
		set_device(&worker, config->devices ? &config->devices[r] : NULL);
		worker.rank = r;
		group.save_layer_first = saved->layer_first;
		group.save_layers = saved->layer_count;
		status = kvx_worker_open(&worker, &ranks->worker[r]);
		if (status == KVC_OK && config->devices) {
			kvx_worker_set_stream(ranks->worker[r], config->devices[r].stream);
		}
	}

	return status == KVC_ERR_ARG ? kvx_refuse("%s", kvx_worker_last_error()) : status;
}

void kvx_ranks_close(kvx_ranks_t *ranks)
{
	for (uint32_t r = 0; r < ranks->count && r < KVX_MAX_PARTS; r++) {
		kvx_worker_close(ranks->worker[r]);
		ranks->worker[r] = NULL;
	}
}

/* ---- all of them ----------------------------------------------------------------------------- */

int kvx_ranks_are_ready(const kvx_ranks_t *ranks)
{
	uint32_t ready = 0;

	while (ready < ranks->count && kvx_worker_is_ready(ranks->worker[ready])) {
		ready++;
	}

	return ready == ranks->count;
}

void kvx_ranks_run_step(const kvx_ranks_t *ranks, const void *message, size_t len)
{
	for (uint32_t r = 0; r < ranks->count; r++) {
		kvx_worker_begin_step(ranks->worker[r], message, len);
		kvx_worker_start_async_loads(ranks->worker[r]);
		kvx_worker_end_step(ranks->worker[r]);
	}
}

/* A step without a message: its beginning orders the streams. */
void kvx_ranks_order_loads(const kvx_ranks_t *ranks)
{
	if (ranks->on_devices) {
		kvx_ranks_run_step(ranks, NULL, 0);
	}
}

/* The one that has loads: the others have nothing to say. */
void kvx_ranks_wait(const kvx_ranks_t *ranks, uint32_t us)
{
	kvx_worker_stats_t stats = {.struct_size = sizeof stats};
	uint32_t r = 0;

	for (; r + 1 < ranks->count; r++) {
		kvx_worker_get_stats(ranks->worker[r], &stats);
		if (stats.loads_open > 0) {
			break;
		}
	}
	kvx_worker_wait(ranks->worker[r], us);
}

int kvx_ranks_have_unsaved(const kvx_ranks_t *ranks, const uint32_t *blocks, uint32_t n)
{
	uint32_t r = 0;

	while (r < ranks->count && !kvx_worker_has_unsaved(ranks->worker[r], blocks, n)) {
		r++;
	}

	return r < ranks->count;
}

void kvx_ranks_get_stats(const kvx_ranks_t *ranks, kvx_worker_stats_t *stats)
{
	*stats = (kvx_worker_stats_t){.struct_size = sizeof *stats};
	for (uint32_t r = 0; r < ranks->count; r++) {
		kvx_worker_stats_t one = {.struct_size = sizeof one};

		kvx_worker_get_stats(ranks->worker[r], &one);
		stats->loads_open += one.loads_open;
		stats->load_bytes += one.load_bytes;
		stats->save_bytes += one.save_bytes;
		stats->self_tests += one.self_tests;
		stats->self_test_failures += one.self_test_failures;
	}
}
