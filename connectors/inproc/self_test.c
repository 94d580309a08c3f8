/* The self-test: store one block of a reserved prefix, load it back in the engine's exact layout, compare. It uses the
 * same load and save as the engine, on two blocks of its own. A daemon that goes away meanwhile is tried again later;
 * wrong bytes are final.
 */
#include "inproc/impl.h"

#include "kv/log.h"

#include <stdlib.h>
#include <string.h>

#define RETRY_NS   UINT64_C(500000000)
#define PROBE_SALT "kvx self-test 1"
#define PROBE_MS   1000u

/* Bytes of one layer's block that hold values, and from there to the next block's. */
static void measure(kvx_probe_t *probe, const kvx_t *kvx)
{
	const kvk_paged_t *p = &kvx->paged;

	probe->payload = kvx->geometry.block_bytes / kvx->layout.layers;
	probe->stride = p->block_stride && !p->head_stride ? p->block_stride : probe->payload;
}

kvc_status_t kvx_probe_init(kvx_t *kvx)
{
	kvx_probe_t *probe = &kvx->probe;
	const uint32_t layers = kvx->layout.layers;

	measure(probe, kvx);
	probe->base = calloc(layers, sizeof *probe->base);
	probe->memory = calloc(layers, 2 * probe->stride);
	probe->tokens = calloc(kvx->layout.block_tokens, sizeof *probe->tokens);
	if (!probe->base || !probe->memory || !probe->tokens) {
		kvx_probe_fini(kvx);
		return KVC_ERR_NOMEM;
	}

	for (uint32_t l = 0; l < layers; l++) {
		uint8_t *block = probe->memory + (size_t)l * 2 * probe->stride;

		probe->base[l] = block;
		for (size_t i = 0; i < probe->payload; i++) {
			block[i] = (uint8_t)((i * 2654435761u) >> 13 ^ l);
		}
	}
	for (uint32_t i = 0; i < kvx->layout.block_tokens; i++) {
		probe->tokens[i] = 0xfffffffeu - i;
	}
	probe->paged = kvx->paged;
	probe->paged.blocks = 2;
	probe->paged.block_stride = probe->stride;
	probe->paged.head_stride = 0;
	probe->paged.base = probe->base;

	return KVC_OK;
}

void kvx_probe_fini(kvx_t *kvx)
{
	kvx_probe_t *probe = &kvx->probe;

	kvx_save_end(probe->save);
	kvx_load_end(probe->load);
	free(probe->base);
	free(probe->memory);
	free(probe->tokens);
	*probe = (kvx_probe_t){0};
}

static void retry(kvx_t *kvx, uint64_t now)
{
	kvx->probe.step = KVX_PROBE_IDLE;
	kvx->probe.next_ns = now + RETRY_NS;
	kvx->stats.self_test_retries++;
}

static kvx_prefix_t reserved_prefix(const kvx_t *kvx, const uint32_t *block)
{
	return (kvx_prefix_t){
		.struct_size = sizeof(kvx_prefix_t),
		.tokens = kvx->probe.tokens,
		.n_tokens = kvx->layout.block_tokens,
		.blocks = block,
		.salt = PROBE_SALT,
		.deadline_ms = PROBE_MS,
	};
}

static void start(kvx_t *kvx, uint64_t now)
{
	static const uint32_t written = 0;
	const kvx_prefix_t prefix = reserved_prefix(kvx, &written);
	const kvc_status_t status = kvx_save_start(kvx, &kvx->probe.paged, &prefix, &kvx->probe.save);

	if (status == KVC_PENDING || status == KVC_ALREADY) {
		kvx->stats.self_tests++;
		kvx->probe.step = KVX_PROBE_SAVING;
	} else {
		retry(kvx, now);
	}
}

static void saved(kvx_t *kvx, uint64_t now)
{
	static const uint32_t read_back = 1;
	const kvx_prefix_t prefix = reserved_prefix(kvx, &read_back);
	kvx_probe_t *probe = &kvx->probe;
	kvx_load_result_t result;

	kvx_save_end(probe->save);
	probe->save = NULL;
	if (kvx_load_start(kvx, &probe->paged, &prefix, &probe->load, &result) == KVC_PENDING) {
		probe->step = KVX_PROBE_LOADING;
	} else {
		retry(kvx, now);
	}
}

static void compare(kvx_t *kvx, uint64_t now)
{
	kvx_probe_t *probe = &kvx->probe;
	kvx_load_result_t result;

	(void)kvx_load_state(probe->load, &result);
	kvx_load_end(probe->load);
	probe->load = NULL;
	if (result.status != KVC_OK) {
		retry(kvx, now);
		return;
	}

	probe->step = KVX_PROBE_PASSED;
	for (uint32_t l = 0; l < kvx->layout.layers; l++) {
		const uint8_t *block = probe->base[l];

		if (memcmp(block, block + probe->stride, probe->payload) != 0) {
			probe->step = KVX_PROBE_FAILED;
		}
	}
	if (probe->step == KVX_PROBE_FAILED) {
		kvx->stats.self_test_failures++;
		kv_log(KV_LOG_ERROR, "kvx",
		       "self-test: a block came back with other bytes; loading is off in this process");
	}
}

void kvx_probe_step(kvx_t *kvx, uint64_t now)
{
	kvx_probe_t *probe = &kvx->probe;

	switch (probe->step) {
	case KVX_PROBE_IDLE:
		if (kvx->space && kvc_incarnation(kvx->kvc) != 0 && now >= probe->next_ns) {
			start(kvx, now);
		}
		break;
	case KVX_PROBE_SAVING:
		if (!probe->save || kvx_save_state(probe->save, NULL) != KVC_PENDING) {
			saved(kvx, now);
		}
		break;
	case KVX_PROBE_LOADING:
		if (kvx_load_state(probe->load, NULL) != KVC_PENDING) {
			compare(kvx, now);
		}
		break;
	case KVX_PROBE_PASSED:
	case KVX_PROBE_FAILED:
		break;
	}
}
