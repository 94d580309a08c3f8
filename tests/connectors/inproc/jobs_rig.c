#include "connectors/inproc/jobs_rig.h"
#include "connectors/inproc/fake_kvc.h"
#include "engine/check.h"

#include <stdlib.h>
#include <string.h>

const kvk_layout_t layout = {
	.heads = 2, .layers = LAYERS, .block_tokens = TOKENS, .k_dim = 16, .v_dim = 16, .dtype = KVK_DTYPE_F32};

void bench_open(bench_t *b, uint32_t poll_blocks)
{
	const kvc_identity_t identity = {
		.struct_size = sizeof identity, .model = "m", .weights = "w", .dtype = "f32", .rope = "r"};

	for (uint32_t l = 0; l < LAYERS; l++) {
		b->cache[l] = calloc(BLOCKS * FLOATS, sizeof(float));
		b->base[l] = b->cache[l];
	}
	b->paged = (kvk_paged_t){.kind = KVK_PAGED_KV_TOKEN_HEAD,
				 .blocks = BLOCKS,
				 .layers = LAYERS,
				 .heads = 2,
				 .block_tokens = TOKENS,
				 .k_dim = 16,
				 .v_dim = 16,
				 .dtype = KVK_DTYPE_F32,
				 .base = b->base};

	const kvx_config_t config = {
		.struct_size = sizeof config,
		.roles = KVX_BOTH,
		.identity = &identity,
		.layout = &layout,
		.paged = &b->paged,
		.poll_bytes = poll_blocks * LAYERS * FLOATS * 4u,
		.load_ms = JOBS_MS,
		.save_ms = JOBS_MS,
		.attach_ms = JOBS_MS,
	};
	assert_int_equal(kvx_attach(&config, &b->kvx), KVC_OK);
}

void bench_close(bench_t *b)
{
	kvx_detach(b->kvx);
	for (uint32_t l = 0; l < LAYERS; l++) {
		free(b->cache[l]);
	}
	assert_int_equal(fake.leases, 0);
	assert_int_equal(fake.puts, 0);
}

/* What block i of conversation c holds in layer l: a function of both. */
static float content(uint32_t c, uint32_t i, uint32_t l, uint32_t at)
{
	return (float)(c * 1000003u + i * 7919u + l * 131u + at);
}

void fill(bench_t *b, uint32_t block, uint32_t c, uint32_t i)
{
	for (uint32_t l = 0; l < LAYERS; l++) {
		for (uint32_t at = 0; at < FLOATS; at++) {
			b->cache[l][block * FLOATS + at] = content(c, i, l, at);
		}
	}
}

int holds(const bench_t *b, uint32_t block, uint32_t c, uint32_t i)
{
	for (uint32_t l = 0; l < LAYERS; l++) {
		for (uint32_t at = 0; at < FLOATS; at += 37) {
			if (b->cache[l][block * FLOATS + at] != content(c, i, l, at)) {
				return 0;
			}
		}
	}

	return 1;
}

/* n blocks of conversation c, lying from block `first` on. */
void prompt_init(prompt_t *p, uint32_t c, uint32_t n, uint32_t first)
{
	for (uint32_t i = 0; i < n * TOKENS; i++) {
		p->tokens[i] = c * 100000 + i;
	}
	for (uint32_t i = 0; i < n; i++) {
		p->blocks[i] = (first + i) % BLOCKS;
	}
	p->prefix = (kvx_prefix_t){
		.struct_size = sizeof p->prefix, .tokens = p->tokens, .n_tokens = n * TOKENS, .blocks = p->blocks};
}

kvc_status_t save_now(bench_t *b, const prompt_t *p, kvx_save_result_t *result)
{
	kvx_save_t *save;
	const kvc_status_t status = kvx_save_prefix(b->kvx, &p->prefix, &save);

	if (status != KVC_PENDING) {
		return status;
	}
	while (kvx_save_state(save, result) == KVC_PENDING) {
		(void)kvx_poll(b->kvx, 0);
	}
	kvx_save_end(save);

	return result->status;
}

kvc_status_t load_now(bench_t *b, const prompt_t *p, kvx_load_result_t *result)
{
	kvx_load_t *load;

	if (kvx_load_prefix(b->kvx, &p->prefix, &load, result) == KVC_MISS) {
		return KVC_MISS;
	}
	while (kvx_load_state(load, result) == KVC_PENDING) {
		(void)kvx_poll(b->kvx, 0);
	}
	kvx_load_end(load);

	return result->status;
}

kvx_stats_t stats_of(const bench_t *b)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	kvx_get_stats(b->kvx, &stats);

	return stats;
}

/* Ten blocks of conversation 1 are stored, and prompt `to` reads them back to blocks 30 on. */
void store_ten(bench_t *b, uint32_t poll_blocks, prompt_t *from, prompt_t *to)
{
	kvx_save_result_t saved;

	fake_reset(&layout);
	bench_open(b, poll_blocks);
	assert_true(kvx_is_ready(b->kvx));
	prompt_init(from, 1, 10, 0);
	prompt_init(to, 1, 10, 30);
	for (uint32_t i = 0; i < 10; i++) {
		fill(b, i, 1, i);
	}
	assert_int_equal(save_now(b, from, &saved), KVC_OK);
	assert_int_equal(saved.blocks, 10);
}
