/* Any bytes as a body of the OpenAI API, and as an engine's answer: refused, or read; what is sent on is read again and
 * means the same. */
#include "body.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define MOST_TOKENS 1000

static kv_status_t parse(kvp_api_t api, const char *data, size_t size, kvp_body_t *body)
{
	char *copy = malloc(size + 1), why[128];

	memcpy(copy, data, size);

	return kvp_body_parse(api, (kvp_span_t){copy, size}, MOST_TOKENS, body, why);
}

/* What is sent is JSON that means the same. */
static void read_again(kvp_api_t api, const kvp_body_t *body, kvp_pieces_t *pieces, int is_prefill)
{
	char *text = malloc(2 * body->len + 1024);
	kvp_body_t again;
	size_t len = 0;

	for (uint32_t i = 0; i < pieces->n; i++) {
		memcpy(text + len, pieces->at[i].data, pieces->at[i].len);
		len += pieces->at[i].len;
	}
	free(pieces->tail);
	kv_assert(parse(api, text, len, &again) == KV_OK);
	kv_assert(again.stream == (body->stream && !is_prefill) && again.n_tokens == body->n_tokens);
	kv_assert(is_prefill || again.whole == body->whole);
	kv_assert(strcmp(again.model, body->model) == 0 && strcmp(again.salt, body->salt) == 0);
	kvp_body_free(&again);
	free(text);
}

static void read_request(kvp_api_t api, const char *data, size_t size)
{
	kvp_pieces_t pieces;
	kvp_body_t body;

	if (parse(api, data, size, &body) == KV_OK) {
		kv_assert(kvp_body_for_decode(&body, "{\"transfer_id\":\"a\"}", &pieces));
		read_again(api, &body, &pieces, 0);
		kv_assert(kvp_body_for_prefill(&body, "a", &pieces));
		read_again(api, &body, &pieces, 1);
		kv_assert(kvp_body_for_tokenize(&body, &pieces));
		free(pieces.tail);
	}
	kvp_body_free(&body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const kvp_span_t answer = {(const char *)data, size};
	uint32_t *tokens = NULL, n = 0;
	char *params = NULL, *again = NULL, device[KVP_DEVICE_MAX + 1] = "";

	read_request(KVP_COMPLETIONS, answer.data, size);
	read_request(KVP_CHAT, answer.data, size);
	if (kvp_answer_params(answer, &params) == KV_OK && params) {
		char *text = malloc(strlen(params) + 32);

		strcpy(text, "{\"kv_transfer_params\":");
		strcat(strcat(text, params), "}");
		kv_assert(kvp_answer_params((kvp_span_t){text, strlen(text)}, &again) == KV_OK);
		kv_assert(strcmp(again, params) == 0);
		free(text);
		free(again);
	}
	free(params);
	kvp_answer_device(answer, device);
	if (kvp_answer_tokens(answer, MOST_TOKENS, &tokens, &n) == KV_OK) {
		free(tokens);
	}

	return 0;
}
