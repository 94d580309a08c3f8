/* The model and the devices of a command. */
#include "setup.h"

#include "kvk/gpu.h"

#include <stdio.h>

static int read_model(const setup_options_t *options, kve_config_t *model)
{
	char why[KVE_CONFIG_WHY_MAX];
	const char *fault;

	*model = kve_config_moe;
	if (options->config[0] && kve_config_read(options->config, model, why) != KV_OK) {
		return fail("--config: %s", why);
	}
	if (options->layers) {
		model->layers = (uint32_t)options->layers;
	}
	if (options->ranks > 1 && (!model->experts || model->groups % options->ranks != 0)) {
		return fail("--data-parallel-size: the ranks do not divide the model's %s",
			    model->experts ? "groups of experts (reduction_groups)" : "experts: it has none");
	}
	fault = kve_devices_fault_of_shape(model);

	return fault ? fail("this model is not computed in BF16: %s", fault) : 0;
}

int setup_open(setup_t *setup, const setup_options_t *options)
{
	const kve_devices_config_t config = {
		.ranks = (uint32_t)options->ranks,
		.gpus = (uint32_t)options->gpus,
		.link = (kvk_ep_link_kind_t)options->link,
		.pace = options->pace * 1000000u,
		.transport_sms = (uint32_t)options->transport_sms,
	};
	const int rc = read_model(options, &setup->model);
	kv_status_t status;

	setup->ranks = config.ranks;
	setup->devices = NULL;
	if (rc) {
		return rc;
	}
	status = options->device ? kve_devices_open_gpus(&config, &setup->devices)
				 : kve_devices_open_twins(&config, &setup->devices);

	return status == KV_OK ? 0 : setup_fail("--device", options, status);
}

int setup_fail(const char *command, const setup_options_t *options, kv_status_t status)
{
	const char *why = options->device && status != KV_ERR_TIMEOUT ? kvk_gpu_last_error() : kv_status_text(status);

	fprintf(stderr, "kve: %s: %s\n", command, why);

	return EXIT_DEVICE;
}

void setup_close(setup_t *setup)
{
	kve_devices_close(setup->devices);
}

void setup_print_memory(const kve_group_t *group, uint32_t cache_blocks)
{
	const kve_group_memory_t memory = kve_group_memory(group);
	const double gib = 1.0 / (double)((size_t)1 << 30), cache = (double)memory.cache_block * cache_blocks;
	const kve_config_t *model = kve_group_model(group);

	printf("a rank: %.2f GiB of weights, %.2f of cache (%zu KiB a token, %u tokens), %.2f of activations, %.2f that "
	       "others write\n",
	       gib * (double)memory.weights, gib * cache, memory.cache_block / model->block_tokens / 1024,
	       cache_blocks * model->block_tokens, gib * (double)memory.workspace, gib * (double)memory.heap);
}
