#include "connectors/inproc/pair.h"
#include "engine/check.h"
#include "kv_test.h"

#include <stdlib.h>
#include <string.h>

#define DIM   16u
#define HEADS 2u
#define TOKEN (HEADS * DIM * sizeof(float)) /* bytes of K, or V, of a token in a layer */

/* ---- a side ---------------------------------------------------------------------------------- */

static void init_shape(side_t *side)
{
	for (uint32_t l = 0; l < PAIR_LAYERS; l++) {
		side->base[l] = calloc(PAIR_BLOCKS, PAIR_PAYLOAD);
		assert_non_null(side->base[l]);
	}
	side->layout = (kvk_layout_t){.heads = HEADS,
				      .layers = PAIR_LAYERS,
				      .block_tokens = PAIR_TOKENS,
				      .k_dim = DIM,
				      .v_dim = DIM,
				      .dtype = KVK_DTYPE_F32,
				      .inner = KVK_INNER_SPLIT};
	side->paged = (kvk_paged_t){.kind = KVK_PAGED_KV_TOKEN_HEAD,
				    .blocks = PAIR_BLOCKS,
				    .layers = PAIR_LAYERS,
				    .heads = HEADS,
				    .block_tokens = PAIR_TOKENS,
				    .k_dim = DIM,
				    .v_dim = DIM,
				    .dtype = KVK_DTYPE_F32,
				    .block_stride = PAIR_PAYLOAD,
				    .base = side->base};
}

static kvc_identity_t identity_of(const char *model)
{
	return (kvc_identity_t){
		.struct_size = sizeof(kvc_identity_t), .model = model, .weights = "w", .dtype = "f32", .rope = "none"};
}

static void attach(side_t *side, const char *socket, uint32_t roles, uint64_t buffer_bytes)
{
	const kvx_config_t config = {.struct_size = sizeof config,
				     .roles = roles,
				     .socket = socket,
				     .identity = &side->identity,
				     .layout = &side->layout,
				     .paged = &side->paged,
				     .load_ms = PAIR_MS,
				     .save_ms = PAIR_MS,
				     .attach_ms = PAIR_MS,
				     .buffer_bytes = buffer_bytes};

	init_shape(side);
	assert_int_equal(kvx_attach(&config, &side->kvx), KVC_OK);
	side_await_ready(side);
}

void side_open_model(side_t *side, const char *socket, uint32_t roles, const char *model)
{
	*side = (side_t){.identity = identity_of(model)};
	attach(side, socket, roles, 0);
}

void side_open_buffer(side_t *side, const char *socket, uint32_t roles, uint64_t buffer_bytes)
{
	*side = (side_t){.identity = identity_of("pair")};
	attach(side, socket, roles, buffer_bytes);
}

void side_open(side_t *side, const char *socket, uint32_t roles)
{
	side_open_model(side, socket, roles, "pair");
}

void side_close(side_t *side)
{
	kvx_detach(side->kvx);
	for (uint32_t l = 0; l < PAIR_LAYERS; l++) {
		free(side->base[l]);
	}
	*side = (side_t){0};
}

void side_await_ready(side_t *side)
{
	for (uint32_t i = 0; i < PAIR_MS / 10u && !kvx_is_ready(side->kvx); i++) {
		(void)kvx_poll(side->kvx, 10);
	}
	assert_true(kvx_is_ready(side->kvx));
}

kvx_stats_t side_stats(const side_t *side)
{
	kvx_stats_t stats = {.struct_size = sizeof stats};

	kvx_get_stats(side->kvx, &stats);

	return stats;
}

/* ---- prompts --------------------------------------------------------------------------------- */

void pair_prompt_init(pair_prompt_t *prompt, uint32_t conversation, uint32_t n_tokens, uint32_t first)
{
	prompt->conversation = conversation;
	prompt->n_tokens = n_tokens;
	for (uint32_t i = 0; i < KV_COUNT_OF(prompt->tokens); i++) {
		prompt->tokens[i] = conversation * 100000u + i;
	}
	for (uint32_t i = 0; i < PAIR_PROMPT; i++) {
		prompt->blocks[i] = (first + i) % PAIR_BLOCKS;
	}
}

/* K (kv 0) or V (kv 1) of a token in a layer: TOKEN bytes, a function of all of them. */
static void content(uint32_t conversation, uint32_t token, uint32_t layer, uint32_t kv, uint8_t *out)
{
	uint64_t seed = (uint64_t)conversation << 32 | token << 8 | layer << 1 | kv;

	for (size_t at = 0; at < TOKEN; at += 8) {
		const uint64_t word = next_random(&seed) | 1u;

		memcpy(out + at, &word, 8);
	}
}

static uint8_t *token_at(const side_t *side, const pair_prompt_t *prompt, uint32_t token, uint32_t layer, uint32_t kv)
{
	const uint32_t block = prompt->blocks[token / PAIR_TOKENS];

	return (uint8_t *)side->base[layer] + block * PAIR_PAYLOAD + (kv * PAIR_TOKENS + token % PAIR_TOKENS) * TOKEN;
}

void side_compute(side_t *side, const pair_prompt_t *prompt, uint32_t from, uint32_t to)
{
	for (uint32_t t = from; t < to; t++) {
		for (uint32_t l = 0; l < 2u * PAIR_LAYERS; l++) {
			content(prompt->conversation, t, l / 2u, l % 2u, token_at(side, prompt, t, l / 2u, l % 2u));
		}
	}
}

int side_holds(const side_t *side, const pair_prompt_t *prompt, uint32_t n)
{
	uint8_t expected[TOKEN];

	for (uint32_t t = 0; t < n; t++) {
		for (uint32_t l = 0; l < 2u * PAIR_LAYERS; l++) {
			content(prompt->conversation, t, l / 2u, l % 2u, expected);
			if (memcmp(expected, token_at(side, prompt, t, l / 2u, l % 2u), TOKEN) != 0) {
				return 0;
			}
		}
	}

	return 1;
}

int side_is_untouched(const side_t *side, const pair_prompt_t *prompt, uint32_t n)
{
	for (uint32_t t = n; t < PAIR_PROMPT * PAIR_TOKENS; t++) {
		for (uint32_t l = 0; l < 2u * PAIR_LAYERS; l++) {
			const uint8_t *at = token_at(side, prompt, t, l / 2u, l % 2u);

			if (at[0] != 0 || memcmp(at, at + 1, TOKEN - 1u) != 0) {
				return 0;
			}
		}
	}

	return 1;
}

kvx_chunk_t pair_chunk(const pair_prompt_t *prompt, const char *transfer, uint32_t computed, int last)
{
	return (kvx_chunk_t){.struct_size = sizeof(kvx_chunk_t),
			     .transfer = transfer,
			     .tokens = prompt->tokens,
			     .n_tokens = prompt->n_tokens,
			     .computed = computed,
			     .blocks = prompt->blocks,
			     .last = last};
}

kvx_prefix_t pair_prefix(const pair_prompt_t *prompt, uint32_t deadline_ms)
{
	return (kvx_prefix_t){.struct_size = sizeof(kvx_prefix_t),
			      .tokens = prompt->tokens,
			      .n_tokens = prompt->n_tokens,
			      .blocks = prompt->blocks,
			      .deadline_ms = deadline_ms};
}

/* ---- polling --------------------------------------------------------------------------------- */

static void poll_both(side_t *a, side_t *b)
{
	if (a) {
		(void)kvx_poll(a->kvx, b ? 0 : 1);
	}
	if (b) {
		(void)kvx_poll(b->kvx, 1);
	}
}

void pair_poll(side_t *a, side_t *b, uint32_t rounds)
{
	while (rounds-- > 0) {
		poll_both(a, b);
	}
}

void pair_await_send(side_t *side, side_t *other, const kvx_send_t *send, kvx_send_result_t *result)
{
	for (uint32_t i = 0; i < PAIR_MS && kvx_send_state(send, result) == KVC_PENDING; i++) {
		poll_both(other, side);
	}
	assert_int_not_equal(result->status, KVC_PENDING);
}

void pair_await_recv(side_t *side, side_t *other, const kvx_recv_t *recv, kvx_recv_result_t *result)
{
	for (uint32_t i = 0; i < PAIR_MS && kvx_recv_state(recv, result) == KVC_PENDING; i++) {
		poll_both(other, side);
	}
	assert_int_not_equal(result->status, KVC_PENDING);
}

void pair_await_blocks(side_t *side, side_t *other, const kvx_recv_t *recv, uint32_t n)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};

	for (uint32_t i = 0; i < PAIR_MS && result.blocks < n; i++) {
		poll_both(other, side);
		assert_int_equal(kvx_recv_state(recv, &result), KVC_PENDING);
	}
	assert_int_equal(result.blocks, n);
}
