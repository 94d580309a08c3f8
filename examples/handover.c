/* One engine computes a prompt in two chunks, another one that waits gets its KV: docs/handover.md explains it.
 * usage: handover SOCKET send|recv        exit code 0: all of it came, 1: an error, 2: less came */
#include <kvx_handover.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 16, BLOCKS = 8, LAYERS = 2, HEADS = 2, DIM = 16, PROMPT = 5 * TOKENS + 7 };

/* A paged cache: in each layer, blocks of K and then V of 16 tokens. */
static float cache[LAYERS][BLOCKS][2][TOKENS][HEADS][DIM];
static const uint32_t blocks[] = {7, 2, 5, 0, 3, 6}; /* where the prompt's blocks lie */
static uint32_t tokens[PROMPT];

static kvx_t *attach(const char *socket, uint32_t role)
{
	static void *base[LAYERS] = {cache[0], cache[1]};
	const kvk_layout_t layout = {.heads = HEADS,
				     .layers = LAYERS,
				     .block_tokens = TOKENS,
				     .k_dim = DIM,
				     .v_dim = DIM,
				     .dtype = KVK_DTYPE_F32,
				     .inner = KVK_INNER_SPLIT};
	const kvk_paged_t paged = {.kind = KVK_PAGED_KV_TOKEN_HEAD,
				   .blocks = BLOCKS,
				   .layers = LAYERS,
				   .heads = HEADS,
				   .block_tokens = TOKENS,
				   .k_dim = DIM,
				   .v_dim = DIM,
				   .dtype = KVK_DTYPE_F32,
				   .block_stride = sizeof cache[0][0],
				   .base = base};
	const kvc_identity_t identity = {
		.struct_size = sizeof identity, .model = "example", .weights = "v1", .dtype = "f32", .rope = "none"};
	const kvx_config_t config = {.struct_size = sizeof config,
				     .roles = role,
				     .socket = socket,
				     .identity = &identity,
				     .layout = &layout,
				     .paged = &paged};
	kvx_t *kvx;

	if (kvx_attach(&config, &kvx) != KVC_OK) {
		fprintf(stderr, "kvx_attach: %s\n", kvx_last_error());
		exit(1);
	}
	return kvx;
}

/* What a prefill computes: here, a number for each token. */
static void compute(uint32_t from, uint32_t to)
{
	for (uint32_t t = from; t < to; t++) {
		cache[0][blocks[t / TOKENS]][0][t % TOKENS][0][0] = (float)(t + 1);
	}
}

static int send_prompt(kvx_t *kvx)
{
	kvx_send_t *send = NULL;
	kvx_send_result_t result = {.struct_size = sizeof result, .status = KVC_MISS};
	kvx_chunk_t chunk = {.struct_size = sizeof chunk,
			     .transfer = "cmpl-7",
			     .tokens = tokens,
			     .n_tokens = PROMPT,
			     .blocks = blocks};

	compute(0, 48);
	chunk.computed = 48;
	kvx_send(kvx, &chunk, &send);
	compute(48, PROMPT);
	chunk.computed = PROMPT;
	chunk.last = 1;
	chunk.tail = "first token: 42";
	chunk.tail_len = 16;
	kvx_send(kvx, &chunk, &send);
	while (send && kvx_send_state(send, &result) == KVC_PENDING) {
		kvx_poll(kvx, 10); /* an engine calls it once a step */
	}
	kvx_send_end(send);
	printf("%s: %u blocks handed over\n", kvc_status_text(result.status), result.sent);
	return result.status == KVC_OK ? 0 : 2;
}

static int recv_prompt(kvx_t *kvx)
{
	const kvx_prefix_t prefix = {.struct_size = sizeof prefix,
				     .tokens = tokens,
				     .n_tokens = PROMPT,
				     .blocks = blocks,
				     .deadline_ms = 30000};
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_recv_t *recv;

	kvx_recv(kvx, "cmpl-7", &prefix, &recv, &result);
	while (recv && kvx_recv_state(recv, &result) == KVC_PENDING) {
		kvx_poll(kvx, 10); /* others decode meanwhile */
	}
	printf("%s: compute from token %u; the last one there holds %.0f, %s\n", kvc_status_text(result.cause),
	       result.tokens, result.tokens == PROMPT ? (double)cache[0][blocks[5]][0][6][0][0] : 0,
	       result.tail ? (const char *)result.tail : "no tail");
	kvx_recv_end(recv);
	return result.cause == KVC_OK ? 0 : 2;
}

int main(int argc, char **argv)
{
	const int sends = argc == 3 && strcmp(argv[2], "send") == 0;
	kvx_t *kvx = attach(argc > 1 ? argv[1] : NULL, sends ? KVX_PRODUCER : KVX_CONSUMER);
	int status;

	for (uint32_t i = 0; i < PROMPT; i++) {
		tokens[i] = 100 + i;
	}
	status = sends ? send_prompt(kvx) : recv_prompt(kvx);
	kvx_detach(kvx);
	return status;
}
