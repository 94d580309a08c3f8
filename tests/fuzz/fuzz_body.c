/* Any bytes as a body of the OpenAI API, and as an engine's answer: refused, or read; what is sent on is read again and
 * means the same. */
#include "body.h"

#include "kv/env.h"

#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void read_again(kvp_api_t api, const kvp_body_t *body, const char *text)
{
	kvp_body_t again;
	char why[128];

	kv_assert(kvp_body_parse(api, text, strlen(text), 1, &again, why) == KV_OK);
	kv_assert(again.stream == body->stream && again.whole == body->whole && again.n_tokens == body->n_tokens);
	kv_assert(strcmp(again.common, body->common) == 0 && strcmp(again.own, body->own) == 0);
	kv_assert(strcmp(again.model, body->model) == 0 && strcmp(again.salt, body->salt) == 0);
	kvp_body_free(&again);
}

static void read_request(kvp_api_t api, const char *data, size_t size)
{
	kvp_body_t body, again;
	char why[128];
	char *text;

	if (kvp_body_parse(api, data, size, 1, &body, why) == KV_OK) {
		text = kvp_body_for_decode(&body, "{\"transfer_id\":\"a\"}");
		read_again(api, &body, text);
		free(text);
		text = kvp_body_for_prefill(&body, "a");
		kv_assert(kvp_body_parse(api, text, strlen(text), 1, &again, why) == KV_OK);
		kv_assert(!again.stream && strcmp(again.common, body.common) == 0);
		kvp_body_free(&again);
		free(text);
	}
	kvp_body_free(&body);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *text = (const char *)data;
	uint32_t *tokens = NULL, n = 0;
	char *params = NULL, *again = NULL;

	read_request(KVP_COMPLETIONS, text, size);
	read_request(KVP_CHAT, text, size);
	if (kvp_answer_params(text, size, &params) == KV_OK && params) {
		char *answer = malloc(strlen(params) + 32);

		strcpy(answer, "{\"kv_transfer_params\":");
		strcat(strcat(answer, params), "}");
		kv_assert(kvp_answer_params(answer, strlen(answer), &again) == KV_OK);
		kv_assert(strcmp(again, params) == 0);
		free(answer);
		free(again);
	}
	free(params);
	if (kvp_answer_tokens(text, size, &tokens, &n) == KV_OK) {
		free(tokens);
	}

	return 0;
}
