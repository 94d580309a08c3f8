#include "connectors/inproc/pair.h"
#include "connectors/worker/wr_device.h"
#include "engine/check.h"
#include "kv_test.h"

#include <stdlib.h>
#include <string.h>

static const side_shape_t usual = {.kind = KVK_PAGED_KV_TOKEN_HEAD,
				   .inner = KVK_INNER_SPLIT,
				   .dtype = KVK_DTYPE_F32,
				   .heads = 2,
				   .tokens = PAIR_TOKENS,
				   .dim = 16,
				   .payload = PAIR_PAYLOAD,
				   .stride = PAIR_PAYLOAD};

static uint32_t opened; /* sides */

/* ---- a side ---------------------------------------------------------------------------------- */

static void describe(side_t *side, const char *model)
{
	const side_shape_t *shape = &side->shape;

	for (uint32_t l = 0; l < PAIR_LAYERS; l++) {
		const size_t bytes = (size_t)PAIR_BLOCKS * shape->stride;

		side->base[l] = side->host ? malloc(bytes) : wr_device_alloc(bytes);
		assert_non_null(side->base[l]);
		memset(side->base[l], 0, bytes); /* memory of the fake device is host memory */
	}
	side->layout = (kvk_layout_t){.heads = shape->heads,
				      .layers = PAIR_LAYERS,
				      .block_tokens = shape->tokens,
				      .k_dim = shape->dim,
				      .v_dim = shape->dim,
				      .dtype = shape->dtype,
				      .inner = shape->inner,
				      .page_bytes = shape->page_bytes};
	side->paged = (kvk_paged_t){.kind = shape->kind,
				    .blocks = PAIR_BLOCKS,
				    .layers = PAIR_LAYERS,
				    .heads = shape->heads,
				    .block_tokens = shape->tokens,
				    .k_dim = shape->dim,
				    .v_dim = shape->dim,
				    .dtype = shape->dtype,
				    .page_bytes = shape->page_bytes,
				    .block_stride = shape->stride,
				    .base = side->base};
	side->identity = (kvc_identity_t){
		.struct_size = sizeof side->identity, .model = model, .weights = "w", .dtype = "f32", .rope = "none"};
}

static void start_device(void)
{
	if (opened++ == 0) {
		wr_device_start(1);
	}
}

static void stop_device(void)
{
	if (--opened == 0) {
		wr_device_stop();
	}
}

static void attach(side_t *side, const char *socket, const side_options_t *options)
{
	const kvx_config_t config = {.struct_size = sizeof config,
				     .roles = options->roles ? options->roles : KVX_BOTH,
				     .socket = socket,
				     .identity = &side->identity,
				     .layout = &side->layout,
				     .paged = &side->paged,
				     .load_ms = PAIR_MS,
				     .save_ms = PAIR_MS,
				     .attach_ms = options->attach_ms ? options->attach_ms : PAIR_MS,
				     .buffer_bytes = options->buffer_bytes,
				     .devices = options->host ? NULL : wr_device_front()};

	assert_int_equal(kvx_attach(&config, &side->kvx), KVC_OK);
}

void side_open(side_t *side, const char *socket, side_options_t options)
{
	start_device();
	*side = (side_t){.shape = options.shape ? *options.shape : usual, .host = options.host, .opened = 1};
	describe(side, options.model ? options.model : "pair");
	attach(side, socket, &options);
	if (!options.attach_ms) {
		side_await_ready(side);
	}
}

kvc_identity_t side_identity(side_t *side)
{
	kvc_identity_t identity = side->identity;

	assert_int_equal(kvk_layout_format(&side->layout, side->layout_text, sizeof side->layout_text), KV_OK);
	identity.hash_tokens = side->shape.tokens;
	identity.layout = side->layout_text;

	return identity;
}

void side_close(side_t *side)
{
	if (!side->opened) {
		return;
	}
	kvx_detach(side->kvx);
	for (uint32_t l = 0; l < PAIR_LAYERS; l++) {
		if (side->host) {
			free(side->base[l]);
		} else {
			wr_device_free(side->base[l]);
		}
	}
	*side = (side_t){0};
	stop_device();
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
	prompt->prefix = (kvx_prefix_t){.struct_size = sizeof prompt->prefix,
					.tokens = prompt->tokens,
					.n_tokens = n_tokens,
					.blocks = prompt->blocks};
}

/* A token has bytes in each layer, those of K and of V: parts 0, 1, ... of it. */
typedef struct token {
	uint8_t *at;
	size_t bytes;
} token_t;

static token_t token_at(const side_t *side, const pair_prompt_t *prompt, uint32_t token, uint32_t part)
{
	const side_shape_t *shape = &side->shape;
	const size_t bytes = shape->payload / 2u / shape->tokens;
	uint8_t *block =
		(uint8_t *)side->base[part / 2u] + (size_t)prompt->blocks[token / shape->tokens] * shape->stride;

	return (token_t){block + (part % 2u * shape->tokens + token % shape->tokens) * bytes, bytes};
}

/* A function of what it is of. */
static void content(const pair_prompt_t *prompt, uint32_t token, uint32_t part, uint8_t *out, size_t bytes)
{
	uint64_t seed = (uint64_t)prompt->conversation << 32 | token << 8 | part;

	for (size_t at = 0; at < bytes; at += 8) {
		const uint64_t word = next_random(&seed) | 1u;

		memcpy(out + at, &word, bytes - at < 8 ? bytes - at : 8);
	}
}

void side_compute(side_t *side, const pair_prompt_t *prompt, uint32_t from, uint32_t to)
{
	for (uint32_t i = from * 2u * PAIR_LAYERS; i < to * 2u * PAIR_LAYERS; i++) {
		const uint32_t token = i / (2u * PAIR_LAYERS), part = i % (2u * PAIR_LAYERS);
		const token_t at = token_at(side, prompt, token, part);

		content(prompt, token, part, at.at, at.bytes);
	}
}

int side_holds(const side_t *side, const pair_prompt_t *prompt, uint32_t n)
{
	return side_holds_between(side, prompt, 0, n);
}

int side_holds_between(const side_t *side, const pair_prompt_t *prompt, uint32_t from, uint32_t to)
{
	uint8_t expected[1024];

	for (uint32_t i = from * 2u * PAIR_LAYERS; i < to * 2u * PAIR_LAYERS; i++) {
		const uint32_t token = i / (2u * PAIR_LAYERS), part = i % (2u * PAIR_LAYERS);
		const token_t at = token_at(side, prompt, token, part);

		content(prompt, token, part, expected, at.bytes);
		if (memcmp(expected, at.at, at.bytes) != 0) {
			return 0;
		}
	}

	return 1;
}

int side_is_untouched(const side_t *side, const pair_prompt_t *prompt, uint32_t n)
{
	for (uint32_t i = n * 2u * PAIR_LAYERS; i < PAIR_PROMPT * side->shape.tokens * 2u * PAIR_LAYERS; i++) {
		const token_t at = token_at(side, prompt, i / (2u * PAIR_LAYERS), i % (2u * PAIR_LAYERS));

		if (at.at[0] != 0 || memcmp(at.at, at.at + 1, at.bytes - 1u) != 0) {
			return 0;
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
