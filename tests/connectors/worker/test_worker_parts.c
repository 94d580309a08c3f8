/* Groups whose blocks differ in size, beside each other in one load. */
#include "connectors/worker/wr.h"

#include "worker/base/state.h"
#include "worker/jobs/load.h"

#include <stdlib.h>

#define PARTS 3u

KV_TEST(large_blocks_are_copied_before_small_ones)
{
	static const uint32_t expected[] = {1, 2, 0};
	const kvx_wgroup_t groups[PARTS] = {{.block_bytes = 64}, {.block_bytes = 1u << 20}, {.block_bytes = 4096}};
	kvx_wload_t *load = calloc(1, sizeof *load + PARTS * sizeof *load->part);
	uint32_t first;

	assert_non_null(load);
	load->parts = PARTS;
	for (uint32_t p = 0; p < PARTS; p++) {
		load->part[p].group = &groups[p];
	}
	assert_null(kvx_wload_find_part(load)); /* none is ready */
	atomic_store(&load->part[0].limit, 2);
	assert_ptr_equal(kvx_wload_find_part(load), &load->part[0]);
	atomic_store(&load->part[1].limit, 1);
	atomic_store(&load->part[2].limit, 1);
	for (uint32_t i = 0; i < PARTS; i++) {
		kvx_wpart_t *part = kvx_wload_find_part(load);

		assert_ptr_equal(part, &load->part[expected[i]]);
		assert_in_range(kvx_wpart_take(part, atomic_load(&part->limit), 2, &first), 1, 2);
	}
	assert_null(kvx_wload_find_part(load));
	free(load);
}

/* Else blocks of 40 KB beside a state of 2 MB are taken one by one. */
KV_TEST(small_blocks_are_copied_in_batches_beside_large_ones)
{
	static uint8_t bytes[40000];
	void *base[2] = {bytes, bytes};
	const kvk_layout_t layouts[2] = {{.heads = 1,
					  .layers = 2,
					  .block_tokens = 16,
					  .dtype = KVK_DTYPE_BF16,
					  .inner = KVK_INNER_OPAQUE,
					  .page_bytes = 20000},
					 {.heads = 1,
					  .layers = 1,
					  .block_tokens = 16,
					  .dtype = KVK_DTYPE_BF16,
					  .inner = KVK_INNER_OPAQUE,
					  .page_bytes = 2u << 20}};
	kvk_paged_t paged[2];
	kvx_worker_group_t groups[2];
	const kvc_identity_t identity = {.struct_size = sizeof identity,
					 .model = "parts",
					 .weights = "none",
					 .dtype = "bf16",
					 .rope = "none",
					 .hash_tokens = 16,
					 .groups = "0:full:16,1:state:16",
					 .page_format = "test"};
	const kvx_worker_config_t config = {.struct_size = sizeof config,
					    .socket = "/nonexistent/kvd.sock",
					    .instance = "parts",
					    .secret = (const uint8_t *)"a secret of test",
					    .secret_len = 16,
					    .program = "parts",
					    .identity = &identity,
					    .groups = groups,
					    .group_count = 2};
	kvx_worker_t *worker = NULL;

	for (uint32_t g = 0; g < 2; g++) {
		paged[g] = (kvk_paged_t){.kind = KVK_PAGED_OPAQUE,
					 .page_bytes = layouts[g].page_bytes,
					 .blocks = 1,
					 .layers = layouts[g].layers,
					 .heads = 1,
					 .block_tokens = 16,
					 .dtype = KVK_DTYPE_BF16,
					 .base = base};
		groups[g] = (kvx_worker_group_t){.group = g, .layout = &layouts[g], .paged = &paged[g]};
	}
	assert_int_equal(kvx_worker_open(&config, &worker), KVC_OK);
	assert_int_equal(worker->groups[0].batch, KVX_WORKER_BATCH / 40000u);
	assert_int_equal(worker->groups[1].batch, 1);
	assert_int_equal(worker->batch, KVX_WORKER_BATCH / 40000u);
	kvx_worker_close(worker);
}
