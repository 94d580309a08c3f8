/* The engine in BF16 is close to the reference; that it has one answer, kve check shows. */
#include "engine/bf16/shape.h"
#include "engine/check.h"

#include "bf16/pass.h"
#include "kve/parallel.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SEED   3u
#define LENGTH 48u

static kve_devices_t *open_twin(void)
{
	const kve_devices_config_t config = {.ranks = 1};
	kve_devices_t *devices;

	assert_int_equal(kve_devices_open_twins(&config, &devices), KV_OK);

	return devices;
}

/* ---- the reference --------------------------------------------------------------------------------- */

typedef struct model {
	kve_group_t *group;
	kve_rank_t *rank;
	kve_cache_t cache;
	uint32_t blocks[16];
	kve_devices_t *devices;
} model_t;

static void open_model(model_t *model, const kve_config_t *config, int bf16)
{
	kve_group_config_t group = {.model = config, .max_rows = bf16 ? 96 : 0};

	*model = (model_t){.devices = bf16 ? open_twin() : NULL};
	group.devices = model->devices;
	assert_int_equal(kve_group_create(&group, &model->group), KV_OK);
	assert_int_equal(kve_rank_create(model->group, 0, &model->rank), KV_OK);
	assert_int_equal(kve_rank_open_cache(model->rank, 16, 1, &model->cache), KV_OK);
	assert_int_equal(kve_cache_take(&model->cache, 16, model->blocks), KV_OK);
}

static void close_model(model_t *model)
{
	kve_rank_close_cache(model->rank, &model->cache);
	kve_rank_destroy(model->rank);
	kve_group_destroy(model->group);
	kve_devices_close(model->devices);
}

/* Relative L2 distance of the logits of the last of n tokens. */
static double distance(model_t *a, model_t *b, const uint32_t *tokens, uint32_t n)
{
	float *x = calloc(shape.vocab, sizeof *x), *y = calloc(shape.vocab, sizeof *y);
	double difference = 0, norm = 0;

	for (model_t *m = a; m; m = m == a ? b : NULL) {
		const kve_span_t span = {tokens, n, 0, m->blocks, m == a ? x : y, NULL};

		assert_int_equal(kve_rank_forward(m->rank, &m->cache, &span, 1, NULL), KV_OK);
	}
	for (uint32_t i = 0; i < shape.vocab; i++) {
		difference += (double)(x[i] - y[i]) * (double)(x[i] - y[i]);
		norm += (double)y[i] * (double)y[i];
	}
	free(x);
	free(y);

	return sqrt(difference / norm);
}

/* All but most_far prompts. */
static void is_close_of(const kve_config_t *config, double most, uint32_t most_far)
{
	uint64_t seed = SEED;
	uint32_t tokens[LENGTH], far = 0;
	model_t bf16, fp32;
	double worst = 0;

	open_model(&bf16, config, 1);
	open_model(&fp32, config, 0);
	for (uint32_t i = 0; i < 40; i++) {
		const uint32_t n = 1 + below(&seed, LENGTH);
		double d;

		for (uint32_t t = 0; t < n; t++) {
			tokens[t] = below(&seed, config->vocab);
		}
		d = distance(&bf16, &fp32, tokens, n);
		far += d > most;
		worst = d > worst ? d : worst;
	}
	printf("# worst relative distance %.4f, %u of 40 above %.3f\n", worst, far, most);
	close_model(&bf16);
	close_model(&fp32);
	assert_in_range(far, 0, most_far);
}

/* Of one layer: what layers add to a difference is the model's doing. */
static void is_close(const kve_config_t *config, double most)
{
	is_close_of(config, most,
		    config->experts ? 2 : 0); /* two experts of nearly the same weight may change places */
}

KV_TEST(a_layer_is_close_to_the_reference)
{
	kve_config_t one = shape;

	one.layers = 1;
	is_close(&one, 0.02);
	one.experts = one.top_k = one.expert_inner = one.groups = 0;
	is_close(&one, 0.02);
}

/* Half of the prompts: experts of nearly the same weight change places, and what follows is another answer. */
KV_TEST(layers_are_as_close_as_the_roundings_of_each)
{
	kve_config_t dense = shape;

	is_close_of(&shape, 0.08, 20);
	dense.experts = dense.top_k = dense.expert_inner = dense.groups = 0;
	is_close_of(&dense, 0.08, 0);
}

KV_TEST(shapes_that_devices_cannot_compute_are_refused_with_a_sentence)
{
	kve_devices_t *devices = open_twin();
	kve_group_config_t config = {.model = &kve_config_tiny, .devices = devices};
	kve_config_t good = shape;
	kve_group_t *group;

	assert_non_null(kve_devices_fault_of_shape(&kve_config_tiny));
	assert_int_equal(kve_group_create(&config, &group), KV_ERR_ARG);
	config.model = &good;
	assert_null(kve_devices_fault_of_shape(&good));
	config.max_rows = KVE_MOST_ROWS + 1;
	assert_int_equal(kve_group_create(&config, &group), KV_ERR_ARG);
	config.max_rows = 0;
	config.ranks = 2; /* there is one device */
	assert_int_equal(kve_group_create(&config, &group), KV_ERR_ARG);
	kve_devices_close(devices);
}

/* ---- what a step says to the device -------------------------------------------------------------- */

KV_TEST(tiles_with_most_keys_go_first)
{
	static const uint32_t starts[] = {0, 100, 3, 33}, counts[] = {82, 1, 72, 2};
	const kvk_nn_heads_t heads = {shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens};
	kve_span_t spans[KV_COUNT_OF(starts)];
	uint32_t tokens[82] = {0}, rows = 0;
	const kve_bf16_microbatch_t *m;
	model_t model;

	open_model(&model, &shape, 1);
	for (uint32_t s = 0; s < KV_COUNT_OF(starts); s++) {
		spans[s] = (kve_span_t){tokens, counts[s], starts[s], model.blocks, NULL, NULL};
	}
	assert_int_equal(kve_rank_forward(model.rank, &model.cache, spans, 2, NULL), KV_OK);
	assert_int_equal(model.rank->bf16->microbatches[0].most_rows, kvk_nn_tile_rows(&heads));
	assert_int_equal(kve_rank_forward(model.rank, &model.cache, spans + 1, 3, NULL), KV_OK);
	m = &model.rank->bf16->microbatches[0];
	assert_int_equal(m->tiles, 4);
	assert_int_equal(m->most_rows, kvk_nn_tile_rows(&heads));
	for (uint32_t i = 0; i < m->tiles; i++) {
		const kvk_nn_tile_t *tile = &m->tile[i];

		rows += tile->rows;
		assert_true(i == 0 || tile[-1].position + tile[-1].rows >= tile->position + tile->rows);
	}
	assert_int_equal(rows, 75);
	close_model(&model);
}

/* ---- answers ----------------------------------------------------------------------------------------- */

typedef struct answer {
	float logits[512];
	uint32_t chosen;
} answer_t;

#define SPANS 4u

/* Of spans in one pass: what each wants, and nothing else. */
static void answers_what_is_asked(int bf16)
{
	static const uint32_t lengths[SPANS] = {5, 7, 3, 9};
	static answer_t alone[SPANS], together[SPANS];
	uint32_t tokens[SPANS][9];
	uint64_t seed = SEED;
	kve_span_t spans[SPANS];
	model_t model;

	assert_true(shape.vocab <= KV_COUNT_OF(alone[0].logits));
	open_model(&model, &shape, bf16);
	memset(together, 0x5a, sizeof together);
	for (uint32_t i = 0; i < SPANS; i++) {
		for (uint32_t t = 0; t < lengths[i]; t++) {
			tokens[i][t] = below(&seed, shape.vocab);
		}
		spans[i] = (kve_span_t){tokens[i], lengths[i], 0, &model.blocks[i], alone[i].logits, &alone[i].chosen};
		assert_int_equal(kve_rank_forward(model.rank, &model.cache, &spans[i], 1, NULL), KV_OK);
		assert_int_equal(alone[i].chosen, kve_argmax(alone[i].logits, shape.vocab));
		spans[i].logits = i % 2 ? together[i].logits : NULL;
		spans[i].chosen = i / 2 ? &together[i].chosen : NULL;
	}
	assert_int_equal(kve_rank_forward(model.rank, &model.cache, spans, SPANS, NULL), KV_OK);
	for (uint32_t i = 0; i < SPANS; i++) {
		static answer_t nothing;

		memset(&nothing, 0x5a, sizeof nothing);
		assert_memory_equal(together[i].logits, i % 2 ? alone[i].logits : nothing.logits,
				    shape.vocab * sizeof(float));
		assert_int_equal(together[i].chosen, i / 2 ? alone[i].chosen : nothing.chosen);
	}
	close_model(&model);
}

KV_TEST(a_span_is_answered_what_it_asks)
{
	answers_what_is_asked(0);
	answers_what_is_asked(1);
}

KV_TEST(a_request_without_log_probabilities_has_the_same_tokens)
{
	const kve_devices_config_t one = {.ranks = 1};
	kve_engine_config_t config = {.model = shape, .cache_blocks = 16, .max_running = 4, .max_rows = 64};
	const uint32_t tokens[] = {1, 2, 3, 5, 8, 13, 21};
	kve_request_t *requests[2];
	kve_engine_t *engine;
	uint32_t left;

	for (int bf16 = 0; bf16 < 2; bf16++) {
		config.devices = NULL;
		if (bf16) {
			assert_int_equal(kve_devices_open_twins(&one, &config.devices), KV_OK);
		}
		assert_int_equal(kve_engine_create(&config, &engine), KV_OK);
		for (int i = 0; i < 2; i++) {
			const kve_ask_t ask = {.tokens = tokens,
					       .n_tokens = KV_COUNT_OF(tokens),
					       .max_new = 6,
					       .log_probabilities = i};

			assert_int_equal(kve_engine_submit(engine, &ask, &requests[i]), KV_OK);
		}
		do {
			assert_int_equal(kve_engine_step(engine, &left), KV_OK);
		} while (left > 0);
		assert_memory_equal(requests[0]->tokens, requests[1]->tokens,
				    (KV_COUNT_OF(tokens) + 6) * sizeof *tokens);
		for (uint32_t i = 0; i < 6; i++) {
			assert_true(requests[0]->log_probabilities[i] == 0 && requests[1]->log_probabilities[i] < 0);
		}
		kve_engine_destroy(engine);
		kve_devices_close(config.devices);
	}
}

/* ---- what travels -------------------------------------------------------------------------------- */

#define PROMPT 41u

/* Of one step of two ranks, a prompt each. */
static kve_rank_stats_t run_step(kvk_ep_link_kind_t link, int dbo)
{
	const kve_devices_config_t devices = {.ranks = 2, .link = link, .timeout_ms = 600000};
	kve_parallel_config_t config = {
		.engine = {.model = shape, .cache_blocks = 16, .max_running = 4, .max_rows = 64},
		.ranks = 2,
		.dbo = {.enabled = dbo, .decode_threshold = 2, .prefill_threshold = 2}};
	kve_rank_stats_t stats[2];
	kve_request_t *requests[2];
	kve_parallel_t *ranks;

	assert_int_equal(kve_devices_open_twins(&devices, &config.engine.devices), KV_OK);
	assert_int_equal(kve_parallel_create(&config, &ranks), KV_OK);
	for (uint32_t r = 0; r < 2; r++) {
		uint32_t tokens[PROMPT];
		const kve_ask_t ask = {.tokens = tokens, .n_tokens = PROMPT, .max_new = 1};

		for (uint32_t t = 0; t < PROMPT; t++) {
			tokens[t] = (7 * t + r) % shape.vocab;
		}
		assert_int_equal(kve_parallel_submit(ranks, &ask, &requests[r]), KV_OK);
	}
	assert_int_equal(kve_parallel_run(ranks), KV_OK);
	for (uint32_t r = 0; r < 2; r++) {
		stats[r] = kve_engine_rank_stats(kve_parallel_engine(ranks, r));
		assert_int_equal(stats[r].steps[dbo ? KVE_OVERLAP_DBO : KVE_OVERLAP_SEQ], 1);
		assert_int_equal(stats[r].steps[dbo ? KVE_OVERLAP_SEQ : KVE_OVERLAP_DBO], 0);
	}
	stats[0].sent.dispatch_bytes += stats[1].sent.dispatch_bytes;
	stats[0].sent.combine_bytes += stats[1].sent.combine_bytes;
	stats[0].sent.dispatch_padding += stats[1].sent.dispatch_padding;
	kve_parallel_destroy(ranks);
	kve_devices_close(config.engine.devices);

	return stats[0];
}

/* Copies are of as many rows as the rank with most tokens has, of each microbatch. */
KV_TEST(bytes_are_those_of_the_rows_whatever_the_link_and_the_microbatches)
{
	const kvk_ep_shape_t ep = {2, shape.experts, shape.top_k, shape.hidden, 64, shape.groups, KVE_MAX_MICROBATCHES};
	const kve_rank_stats_t one = run_step(KVK_EP_PEER, 0);
	kvk_ep_plan_t plan;

	assert_int_equal(kvk_ep_plan(&ep, &plan, NULL), KV_OK);
	assert_true(one.sent.dispatch_bytes > 0 &&
		    one.sent.dispatch_bytes <= 2 * shape.layers * PROMPT * plan.record_bytes);
	assert_true(one.sent.combine_bytes > 0);
	assert_int_equal(one.sent.dispatch_padding, 0);
	for (int link = KVK_EP_PEER; link <= KVK_EP_HOST_KERNELS; link++) {
		for (int dbo = 0; dbo < 2; dbo++) {
			const kvk_ep_stats_t sent = run_step((kvk_ep_link_kind_t)link, dbo).sent;

			assert_int_equal(sent.dispatch_bytes, one.sent.dispatch_bytes);
			assert_int_equal(sent.combine_bytes, one.sent.combine_bytes);
			assert_int_equal(sent.dispatch_padding,
					 link == KVK_EP_HOST_COPIES
						 ? 2 * shape.layers * PROMPT * plan.record_bytes - sent.dispatch_bytes
						 : 0);
		}
	}
}

KV_TEST_MAIN(NULL, NULL)
