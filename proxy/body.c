/* Bodies of the OpenAI API. */
#include "body.h"

#include "kv/text.h"
#include "kv/types.h"

#include <json-c/json.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEPTH 128 /* tools describe their arguments by nested schemas */
#define PLAIN (JSON_C_TO_STRING_PLAIN | JSON_C_TO_STRING_NOSLASHESCAPE)

/* ---- reading --------------------------------------------------------------------------------- */

/* One object and blanks. NULL: it is something else. */
static json_object *parse_object(const char *data, size_t len)
{
	json_tokener *tokener = len > 0 && len < INT_MAX ? json_tokener_new_ex(DEPTH) : NULL;
	json_object *root = NULL;
	size_t end;

	if (!tokener) {
		return NULL;
	}
	json_tokener_set_flags(tokener,
			       JSON_TOKENER_STRICT | JSON_TOKENER_VALIDATE_UTF8 | JSON_TOKENER_ALLOW_TRAILING_CHARS);
	root = json_tokener_parse_ex(tokener, data, (int)len);
	end = json_tokener_get_parse_end(tokener);
	while (end < len && strchr(" \t\r\n", data[end]) && data[end] != '\0') {
		end++;
	}
	if (json_tokener_get_error(tokener) != json_tokener_success || end != len ||
	    !json_object_is_type(root, json_type_object)) {
		json_object_put(root);
		root = NULL;
	}
	json_tokener_free(tokener);

	return root;
}

/* NULL: absent, or null. */
static json_object *member(json_object *object, const char *name)
{
	json_object *value = NULL;

	return json_object_object_get_ex(object, name, &value) ? value : NULL;
}

static int is_above(json_object *object, const char *name, int64_t most)
{
	json_object *value = member(object, name);

	return value && (!json_object_is_type(value, json_type_int) || json_object_get_int64(value) > most);
}

static void take_text(json_object *object, const char *name, char *out, size_t cap)
{
	json_object *value = member(object, name);

	snprintf(out, cap, "%s", json_object_is_type(value, json_type_string) ? json_object_get_string(value) : "");
}

/* Token ids of a list; 0: it holds something else, or memory is short. */
static int take_tokens(json_object *list, uint32_t **p_tokens, uint32_t *p_n)
{
	size_t n = json_object_array_length(list);
	uint32_t *tokens = n < UINT32_MAX ? malloc((n + 1) * sizeof *tokens) : NULL;

	for (size_t i = 0; tokens && i < n; i++) {
		json_object *token = json_object_array_get_idx(list, i);
		int64_t id = json_object_is_type(token, json_type_int) ? json_object_get_int64(token) : -1;

		if (id < 0 || id >= UINT32_MAX) {
			free(tokens);
			return 0;
		}
		tokens[i] = (uint32_t)id;
	}
	*p_tokens = tokens;
	*p_n = tokens ? (uint32_t)n : 0;

	return tokens != NULL;
}

/* ---- what the proxy must know ---------------------------------------------------------------- */

/* A text, token ids, or a list of prompts: of one it makes no difference. */
static int take_prompt(json_object *root, kvp_body_t *body)
{
	json_object *prompt = member(root, "prompt"), *first;

	if (json_object_is_type(prompt, json_type_array) && json_object_array_length(prompt) > 0) {
		first = json_object_array_get_idx(prompt, 0);
		if (json_object_is_type(first, json_type_int)) {
			return take_tokens(prompt, &body->tokens, &body->n_tokens);
		}
		body->whole |= json_object_array_length(prompt) > 1;
		body->opaque |= 1;
		body->text_bytes = SIZE_MAX;
		return json_object_is_type(first, json_type_string) || json_object_is_type(first, json_type_array);
	}
	if (!json_object_is_type(prompt, json_type_string)) {
		return 0;
	}
	body->text_bytes = (size_t)json_object_get_string_len(prompt);

	return 1;
}

static int has_other_parts(json_object *message)
{
	json_object *content = member(message, "content");
	size_t n = json_object_is_type(content, json_type_array) ? json_object_array_length(content) : 0;

	for (size_t i = 0; i < n; i++) {
		json_object *part = json_object_array_get_idx(content, i);
		json_object *type = json_object_is_type(part, json_type_object) ? member(part, "type") : NULL;

		if (!json_object_is_type(type, json_type_string) || strcmp(json_object_get_string(type), "text") != 0) {
			return 1;
		}
	}

	return 0;
}

static int take_messages(json_object *root, kvp_body_t *body)
{
	json_object *messages = member(root, "messages");
	size_t n = json_object_is_type(messages, json_type_array) ? json_object_array_length(messages) : 0;

	for (size_t i = 0; i < n; i++) {
		json_object *message = json_object_array_get_idx(messages, i);

		if (!json_object_is_type(message, json_type_object)) {
			return 0;
		}
		body->opaque |= has_other_parts(message);
	}
	body->text_bytes = strlen(body->common);

	return n > 0;
}

/* What an engine answers from one sequence's KV alone may be handed over. */
static int needs_one_engine(json_object *root)
{
	return is_above(root, "n", 1) || is_above(root, "best_of", 1) || member(root, "prompt_logprobs") != NULL ||
	       json_object_get_boolean(member(root, "use_beam_search")) ||
	       (json_object_get_boolean(member(root, "echo")) && member(root, "logprobs"));
}

/* ---- parting --------------------------------------------------------------------------------- */

/* A document under way. */
typedef struct writer {
	char *text;
	size_t len, cap;
	int failed;
} writer_t;

static void put(writer_t *out, const char *text, size_t len)
{
	if (out->failed || len > SIZE_MAX / 4) {
		out->failed = 1;
		return;
	}
	if (out->len + len + 1 > out->cap) {
		size_t cap = 2 * (out->len + len) + 64;
		char *grown = realloc(out->text, cap);

		if (!grown) {
			out->failed = 1;
			return;
		}
		out->text = grown;
		out->cap = cap;
	}
	memcpy(out->text + out->len, text, len);
	out->len += len;
	out->text[out->len] = '\0';
}

static void put_member(writer_t *out, const char *name, json_object *value)
{
	json_object *key = json_object_new_string(name);
	size_t len = 0;
	const char *text;

	if (out->len > 0 && !strchr("{,", out->text[out->len - 1])) {
		put(out, ",", 1);
	}
	text = json_object_to_json_string_length(key, PLAIN, &len);
	out->failed |= !text;
	put(out, text ? text : "", len);
	put(out, ":", 1);
	text = json_object_to_json_string_length(value, PLAIN, &len);
	put(out, text ? text : "null", text ? len : 4);
	json_object_put(key);
}

static int is_one_of(const char *name, const char *const *names, size_t count)
{
	for (size_t i = 0; i < count; i++) {
		if (strcmp(name, names[i]) == 0) {
			return 1;
		}
	}

	return 0;
}

static int part_members(json_object *root, int tokenize, kvp_body_t *body)
{
	static const char *const own[] = {
		"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", "n", "best_of",
		"echo"};
	static const char *const asked[] = {"model",
					    "prompt",
					    "messages",
					    "add_special_tokens",
					    "add_generation_prompt",
					    "continue_final_message",
					    "chat_template",
					    "chat_template_kwargs",
					    "mm_processor_kwargs",
					    "tools"};
	struct json_object_iterator at = json_object_iter_begin(root);
	const struct json_object_iterator end = json_object_iter_end(root);
	writer_t common = {0}, rest = {0}, question = {0};

	put(&common, "{", 1);
	put(&rest, "", 0);
	put(&question, "{", 1);
	while (!json_object_iter_equal(&at, &end)) {
		const char *name = json_object_iter_peek_name(&at);
		json_object *value = json_object_iter_peek_value(&at);

		json_object_iter_next(&at);
		if (strcmp(name, "kv_transfer_params") == 0) {
			continue;
		}
		if (is_one_of(name, own, KV_COUNT_OF(own))) {
			put(&rest, ",", rest.len == 0);
			put_member(&rest, name, value);
		} else {
			put_member(&common, name, value);
		}
		if (tokenize && is_one_of(name, asked, KV_COUNT_OF(asked))) {
			put_member(&question, name, value);
		}
	}
	put(&question, "}", 1);
	body->common = common.text;
	body->own = rest.text;
	body->tokenize = question.text;

	return !common.failed && !rest.failed && !question.failed;
}

kv_status_t kvp_body_parse(kvp_api_t api, const char *data, size_t len, int tokenize, kvp_body_t *body, char why[128])
{
	json_object *root = parse_object(data, len), *stream;
	kv_status_t status = KV_ERR_PROTO;

	memset(body, 0, sizeof *body);
	snprintf(why, 128, "the body is not a JSON object");
	if (!root) {
		return status;
	}
	stream = member(root, "stream");
	body->stream = json_object_get_boolean(stream);
	body->whole = needs_one_engine(root);
	body->has_completion_limit = member(root, "max_completion_tokens") != NULL;
	take_text(root, "model", body->model, sizeof body->model);
	take_text(root, "cache_salt", body->salt, sizeof body->salt);
	if (!part_members(root, tokenize, body)) {
		status = KV_ERR_NOMEM;
	} else if (stream && !json_object_is_type(stream, json_type_boolean)) {
		snprintf(why, 128, "`stream` is neither true nor false");
	} else if (api == KVP_CHAT ? !take_messages(root, body) : !take_prompt(root, body)) {
		snprintf(why, 128, "%s",
			 api == KVP_CHAT ? "`messages` is not a list of messages"
					 : "`prompt` is neither a text nor token ids nor a list of them");
	} else {
		status = KV_OK;
	}
	if (!tokenize || body->tokens || status != KV_OK) {
		free(body->tokenize);
		body->tokenize = NULL;
	}
	json_object_put(root);

	return status;
}

void kvp_body_free(kvp_body_t *body)
{
	free(body->common);
	free(body->own);
	free(body->tokenize);
	free(body->tokens);
	memset(body, 0, sizeof *body);
}

/* ---- what is sent ---------------------------------------------------------------------------- */

char *kvp_body_for_decode(const kvp_body_t *body, const char *params)
{
	writer_t out = {0};

	put(&out, body->common, strlen(body->common));
	put(&out, body->own, strlen(body->own));
	if (params) {
		put(&out, ",\"kv_transfer_params\":", 22);
		put(&out, params, strlen(params));
	}
	put(&out, "}", 1);
	if (out.failed) {
		free(out.text);
		out.text = NULL;
	}

	return out.text;
}

char *kvp_body_for_prefill(const kvp_body_t *body, const char *transfer)
{
	char more[256];
	writer_t out = {0};

	snprintf(more, sizeof more,
		 ",\"max_tokens\":1%s,\"stream\":false,\"kv_transfer_params\":{\"do_remote_decode\":true,"
		 "\"do_remote_prefill\":false%s%s%s}}",
		 body->has_completion_limit ? ",\"max_completion_tokens\":1" : "",
		 transfer ? ",\"transfer_id\":\""
			  : ",\"remote_engine_id\":null,\"remote_block_ids\":null,"
			    "\"remote_host\":null,\"remote_port\":null",
		 transfer ? transfer : "", transfer ? "\"" : "");
	put(&out, body->common, strlen(body->common));
	put(&out, more, strlen(more));
	if (out.failed) {
		free(out.text);
		out.text = NULL;
	}

	return out.text;
}

void kvp_params_of_transfer(const char *transfer, const kvp_origin_t *from, char out[KVP_PARAMS_MAX])
{
	const char *peer = from->peer, *device = from->device;

	snprintf(out, KVP_PARAMS_MAX,
		 "{\"do_remote_prefill\":true,\"do_remote_decode\":false,\"transfer_id\":\"%s\"%s%s%s%s%s%s}", transfer,
		 peer[0] ? ",\"transfer_peer\":\"" : "", peer, peer[0] ? "\"" : "",
		 device[0] ? ",\"transfer_device\":\"" : "", device, device[0] ? "\"" : "");
}

/* ---- what engines answer --------------------------------------------------------------------- */

kv_status_t kvp_answer_params(const char *data, size_t len, char **p_params)
{
	json_object *root = parse_object(data, len), *params;
	kv_status_t status = KV_OK;

	*p_params = NULL;
	if (!root) {
		return KV_ERR_PROTO;
	}
	params = member(root, "kv_transfer_params");
	if (params && !json_object_is_type(params, json_type_object)) {
		status = KV_ERR_PROTO;
	} else if (params) {
		*p_params = strdup(json_object_to_json_string_ext(params, PLAIN));
		status = *p_params ? KV_OK : KV_ERR_NOMEM;
	}
	json_object_put(root);

	return status;
}

void kvp_answer_device(const char *data, size_t len, char device[KVP_DEVICE_MAX + 1])
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-";
	json_object *root = parse_object(data, len);
	json_object *params = root ? member(root, "kv_transfer_params") : NULL;
	json_object *name = json_object_is_type(params, json_type_object) ? member(params, "transfer_device") : NULL;
	const char *text = json_object_is_type(name, json_type_string) ? json_object_get_string(name) : "";
	const size_t n = (size_t)json_object_get_string_len(name);

	if (n > 0 && n <= KVP_DEVICE_MAX && strspn(text, letters) == n) {
		memcpy(device, text, n + 1u);
	}
	json_object_put(root);
}

kv_status_t kvp_answer_tokens(const char *data, size_t len, uint32_t **p_tokens, uint32_t *p_n)
{
	json_object *root = parse_object(data, len);
	json_object *tokens = root ? member(root, "tokens") : NULL;
	int taken = json_object_is_type(tokens, json_type_array) && take_tokens(tokens, p_tokens, p_n);

	json_object_put(root);

	return taken ? KV_OK : KV_ERR_PROTO;
}

char *kvp_error_text(const char *message, const char *type, unsigned code)
{
	char text[1024];
	kv_text_t out = kv_text(text, sizeof text);

	kv_text_addf(&out, "{\"error\":{\"message\":");
	kv_text_json(&out, message);
	kv_text_addf(&out, ",\"type\":\"%s\",\"param\":null,\"code\":%u}}", type, code);

	return kv_text_fits(&out) ? strdup(text) : NULL;
}
