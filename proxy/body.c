/* Bodies of the OpenAI API. */
#include "body.h"

#include "kv/text.h"
#include "kv/types.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BLANKS " \t\r\n"

enum { KVP_READ, KVP_ASKED, KVP_OWN, KVP_DROPPED }; /* ASKED: also for /tokenize; OWN: for the decode side alone */

static const struct {
	const char *name;
	int use;
} members[KVP_MEMBER_COUNT] = {
#define ROW(NAME, member_name, member_use) [KVP_MEMBER_##NAME] = {#member_name, member_use},
	KVP_MEMBER_LIST(ROW)
#undef ROW
};

/* ---- values ---------------------------------------------------------------------------------- */

static char first_of(kvp_span_t value)
{
	return value.data ? value.data[0] : '\0';
}

/* Anything but absent, null, false and 0. */
static int is_set(kvp_span_t value)
{
	return value.data && value.data[0] != 'f' && !(value.len == 1 && value.data[0] == '0');
}

/* Is there a value, and is it none of 0 and 1? */
static int is_several(kvp_span_t value)
{
	return value.data && !(value.len == 1 && (value.data[0] == '0' || value.data[0] == '1'));
}

/* The value of a member of an object of checked JSON; NULL: absent, or null. */
static kvp_span_t find(kvp_span_t object, const char *wanted)
{
	kvp_span_t name, value, found = {0};
	kvp_json_iter_t iter;
	char text[64];

	for (int more = kvp_json_open(&iter, object, '{'); more && kvp_json_next(&iter, &name, &value);) {
		if (kvp_json_text(name, text, sizeof text) >= 0 && strcmp(text, wanted) == 0) {
			found = first_of(value) == 'n' ? (kvp_span_t){0} : value;
		}
	}

	return found;
}

/* One token id and the comma or bracket behind it; NULL: it is something else. */
static const char *take_token(const char *at, uint32_t *token)
{
	const char *begin = at += strspn(at, BLANKS);
	uint64_t id = 0;

	for (; *at >= '0' && *at <= '9' && id < UINT32_MAX; at++) {
		id = id * 10 + (unsigned)(*at - '0');
	}
	*token = (uint32_t)id;
	if (at == begin || id >= UINT32_MAX) {
		return NULL;
	}
	at += strspn(at, BLANKS);

	return *at == ',' || *at == ']' ? at + 1 : NULL;
}

/* Token ids of a checked list. KV_ERR_PROTO: it holds something else. */
static kv_status_t take_tokens(kvp_span_t list, uint32_t most, uint32_t **p_tokens, uint32_t *p_n)
{
	const char *at = list.data, *end = list.data + list.len;
	size_t n = at[1 + strspn(at + 1, BLANKS)] != ']';
	uint32_t *tokens;

	while (n > 0 && (at = memchr(at, ',', (size_t)(end - at)))) {
		at++;
		n++;
	}
	if (n > most) {
		return KV_ERR_LIMIT;
	}
	tokens = malloc((n + 1) * sizeof *tokens);
	if (!tokens) {
		return KV_ERR_NOMEM;
	}
	at = list.data + 1;
	for (size_t i = 0; i < n && at; i++) {
		at = take_token(at, &tokens[i]);
	}
	if (!at) {
		free(tokens);
		return KV_ERR_PROTO;
	}
	*p_tokens = tokens;
	*p_n = (uint32_t)n;

	return KV_OK;
}

/* ---- what the proxy must know ---------------------------------------------------------------- */

/* A text, token ids, or a list of prompts: of one it makes no difference. */
static kv_status_t take_prompt(kvp_body_t *body, uint32_t most_tokens)
{
	const kvp_span_t prompt = body->value[KVP_MEMBER_PROMPT];
	kvp_span_t first = {0}, second;
	kvp_json_iter_t iter;

	if (body->value[KVP_MEMBER_PROMPT_EMBEDS].data) {
		body->opaque = body->whole = 1;
		return KV_OK;
	}
	if (first_of(prompt) == '"') {
		return KV_OK;
	}
	if (!kvp_json_open(&iter, prompt, '[') || !kvp_json_next(&iter, NULL, &first)) {
		return KV_ERR_PROTO;
	}
	if (first_of(first) != '"' && first_of(first) != '[') {
		return take_tokens(prompt, most_tokens, &body->tokens, &body->n_tokens);
	}
	body->opaque = 1;
	body->whole |= kvp_json_next(&iter, NULL, &second);

	return KV_OK;
}

static int has_other_parts(kvp_span_t message)
{
	kvp_json_iter_t iter;
	kvp_span_t part;

	for (int more = kvp_json_open(&iter, find(message, "content"), '[');
	     more && kvp_json_next(&iter, NULL, &part);) {
		const kvp_span_t type = find(part, "type");

		if (type.len != 6 || memcmp(type.data, "\"text\"", 6) != 0) {
			return 1;
		}
	}

	return 0;
}

static kv_status_t take_messages(kvp_body_t *body)
{
	kvp_json_iter_t iter;
	kvp_span_t message;

	if (!kvp_json_open(&iter, body->value[KVP_MEMBER_MESSAGES], '[')) {
		return KV_ERR_PROTO;
	}
	while (kvp_json_next(&iter, NULL, &message)) {
		if (first_of(message) != '{') {
			return KV_ERR_PROTO;
		}
		body->opaque |= has_other_parts(message);
	}

	return iter.n > 0 ? KV_OK : KV_ERR_PROTO;
}

/* What an engine answers from one sequence's KV alone may be handed over. */
static int needs_one_engine(const kvp_span_t *value)
{
	return is_several(value[KVP_MEMBER_N]) || is_several(value[KVP_MEMBER_BEST_OF]) ||
	       value[KVP_MEMBER_PROMPT_LOGPROBS].data || is_set(value[KVP_MEMBER_USE_BEAM_SEARCH]) ||
	       (is_set(value[KVP_MEMBER_ECHO]) && value[KVP_MEMBER_LOGPROBS].data);
}

/* A name that is too long is none that could be looked up. */
static void take_text(kvp_body_t *body, kvp_member_t member, char *out, size_t cap)
{
	const kvp_span_t value = body->value[member];

	if (value.data && (first_of(value) != '"' || kvp_json_text(value, out, cap) < 0)) {
		out[0] = '\0';
		body->opaque = 1;
	}
}

static size_t text_bytes(const kvp_body_t *body)
{
	const kvp_span_t prompt = body->value[KVP_MEMBER_PROMPT];
	size_t bytes = 0;

	if (body->tokens) {
		return 0;
	}
	if (first_of(prompt) == '"') {
		return kvp_json_length(prompt) - 2;
	}
	for (uint32_t i = 0; i < body->commons; i++) {
		bytes += kvp_json_length(body->common[i]);
	}

	return bytes;
}

/* ---- reading --------------------------------------------------------------------------------- */

static kvp_member_t find_member(kvp_span_t name)
{
	char text[64];
	kvp_member_t member = 0;

	if (kvp_json_text(name, text, sizeof text) < 0) {
		return KVP_MEMBER_COUNT;
	}
	while (member < KVP_MEMBER_COUNT && strcmp(members[member].name, text) != 0) {
		member++;
	}

	return member;
}

/* Where each member lies. */
static kv_status_t part_members(kvp_body_t *body, char why[128])
{
	kvp_json_iter_t iter;
	kvp_span_t name, value, all;
	int in_run = 0;

	snprintf(why, 128, "the body is not a JSON object");
	if (!kvp_json_open(&iter, (kvp_span_t){body->data, body->len}, '{')) {
		return KV_ERR_PROTO;
	}
	while (kvp_json_next(&iter, &name, &value)) {
		const kvp_member_t member = find_member(name);
		const int is_known = member < KVP_MEMBER_COUNT;

		all = (kvp_span_t){name.data, (size_t)(value.data + value.len - name.data)};
		if (is_known && body->member[member].data) {
			snprintf(why, 128, "`%s` is there twice", members[member].name);
			return KV_ERR_PROTO;
		}
		if (is_known) {
			body->member[member] = all;
			body->value[member] = first_of(value) == 'n' ? (kvp_span_t){0} : value;
		}
		if (is_known && members[member].use >= KVP_OWN) {
			in_run = 0;
		} else if (in_run) {
			kvp_span_t *run = &body->common[body->commons - 1];

			run->len = (size_t)(value.data + value.len - run->data);
		} else {
			body->common[body->commons++] = all;
			in_run = 1;
		}
	}

	return kvp_json_is_end(&iter) ? KV_OK : KV_ERR_PROTO;
}

kv_status_t kvp_body_parse(kvp_api_t api, kvp_span_t data, uint32_t most_tokens, kvp_body_t *body, char why[128])
{
	kvp_span_t stream;
	kv_status_t status;

	memset(body, 0, sizeof *body);
	body->data = (char *)(uintptr_t)data.data;
	body->len = data.len;
	if (api == KVP_OTHER) {
		body->opaque = body->whole = 1;
		return KV_OK;
	}
	status = part_members(body, why);
	if (status != KV_OK) {
		return status;
	}
	stream = body->value[KVP_MEMBER_STREAM];
	if (stream.data && first_of(stream) != 't' && first_of(stream) != 'f') {
		snprintf(why, 128, "`stream` is neither true nor false");
		return KV_ERR_PROTO;
	}
	body->stream = first_of(stream) == 't';
	body->whole = needs_one_engine(body->value);
	take_text(body, KVP_MEMBER_MODEL, body->model, sizeof body->model);
	take_text(body, KVP_MEMBER_CACHE_SALT, body->salt, sizeof body->salt);
	status = api == KVP_CHAT ? take_messages(body) : take_prompt(body, most_tokens);
	body->text_bytes = text_bytes(body);
	snprintf(why, 128, "%s",
		 status == KV_ERR_LIMIT ? "`prompt` has more token ids than limits.tokens"
		 : api == KVP_CHAT      ? "`messages` is not a list of messages"
					: "`prompt` is neither a text nor token ids nor a list of them");

	return status;
}

void kvp_body_drop(kvp_body_t *body)
{
	free(body->data);
	body->data = NULL;
}

void kvp_body_free(kvp_body_t *body)
{
	kvp_body_drop(body);
	free(body->tokens);
	memset(body, 0, sizeof *body);
}

/* ---- what is sent ---------------------------------------------------------------------------- */

static void add_piece(kvp_pieces_t *out, kvp_span_t piece)
{
	out->at[out->n++] = piece;
}

static void add_member(kvp_pieces_t *out, kvp_span_t member)
{
	add_piece(out, out->n == 0 ? (kvp_span_t){"{", 1} : (kvp_span_t){",", 1});
	add_piece(out, member);
}

/* `more`: members, each behind a comma; "": none. */
static int end_object(kvp_pieces_t *out, const char *more)
{
	const char *first = out->n == 0 ? "{" : "";
	const int len = asprintf(&out->tail, "%s%s}", first, out->n == 0 && *more ? more + 1 : more);

	if (len < 0) {
		out->tail = NULL;
		return 0;
	}
	add_piece(out, (kvp_span_t){out->tail, (size_t)len});

	return 1;
}

static void add_common(const kvp_body_t *body, kvp_pieces_t *out)
{
	out->n = 0;
	out->tail = NULL;
	for (uint32_t i = 0; i < body->commons; i++) {
		add_member(out, body->common[i]);
	}
}

static void add_members(const kvp_body_t *body, int use, kvp_pieces_t *out)
{
	for (int i = 0; i < KVP_MEMBER_COUNT; i++) {
		if (members[i].use == use && body->member[i].data) {
			add_member(out, body->member[i]);
		}
	}
}

int kvp_body_for_decode(const kvp_body_t *body, const char *params, kvp_pieces_t *out)
{
	char *more = NULL;
	int is_made;

	if (params && asprintf(&more, ",\"kv_transfer_params\":%s", params) < 0) {
		return 0;
	}
	add_common(body, out);
	add_members(body, KVP_OWN, out);
	is_made = end_object(out, more ? more : "");
	free(more);

	return is_made;
}

int kvp_body_for_prefill(const kvp_body_t *body, const char *transfer, kvp_pieces_t *out)
{
	char more[320];

	snprintf(more, sizeof more,
		 ",\"max_tokens\":1%s,\"stream\":false,\"kv_transfer_params\":{\"do_remote_decode\":true,"
		 "\"do_remote_prefill\":false%s%s%s}",
		 body->value[KVP_MEMBER_MAX_COMPLETION_TOKENS].data ? ",\"max_completion_tokens\":1" : "",
		 transfer ? ",\"transfer_id\":\""
			  : ",\"remote_engine_id\":null,\"remote_block_ids\":null,"
			    "\"remote_host\":null,\"remote_port\":null",
		 transfer ? transfer : "", transfer ? "\"" : "");
	add_common(body, out);

	return end_object(out, more);
}

void kvp_body_as_it_is(const kvp_body_t *body, kvp_pieces_t *out)
{
	out->n = body->len > 0;
	out->at[0] = (kvp_span_t){body->data, body->len};
	out->tail = NULL;
}

int kvp_body_for_tokenize(const kvp_body_t *body, kvp_pieces_t *out)
{
	out->n = 0;
	add_members(body, KVP_ASKED, out);

	return end_object(out, "");
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

static int is_object(kvp_span_t text)
{
	kvp_json_iter_t iter;
	kvp_span_t value;

	if (!kvp_json_open(&iter, text, '{')) {
		return 0;
	}
	while (kvp_json_next(&iter, NULL, &value)) {
	}

	return kvp_json_is_end(&iter);
}

kv_status_t kvp_answer_params(kvp_span_t answer, char **p_params)
{
	const int is_json = is_object(answer);
	const kvp_span_t params = is_json ? find(answer, "kv_transfer_params") : (kvp_span_t){0};

	*p_params = NULL;
	if (!is_json || (params.data && first_of(params) != '{')) {
		return KV_ERR_PROTO;
	}
	if (params.data) {
		*p_params = strndup(params.data, params.len);
	}

	return params.data && !*p_params ? KV_ERR_NOMEM : KV_OK;
}

void kvp_answer_device(kvp_span_t answer, char device[KVP_DEVICE_MAX + 1])
{
	static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-";
	const kvp_span_t params = is_object(answer) ? find(answer, "kv_transfer_params") : (kvp_span_t){0};
	const kvp_span_t name = find(params, "transfer_device");
	char text[KVP_DEVICE_MAX + 1];
	const int n = first_of(name) == '"' ? kvp_json_text(name, text, sizeof text) : -1;

	if (n > 0 && strspn(text, letters) == (size_t)n) {
		memcpy(device, text, (size_t)n + 1u);
	}
}

kv_status_t kvp_answer_tokens(kvp_span_t answer, uint32_t most, uint32_t **p_tokens, uint32_t *p_n)
{
	const kvp_span_t tokens = is_object(answer) ? find(answer, "tokens") : (kvp_span_t){0};

	return first_of(tokens) == '[' ? take_tokens(tokens, most, p_tokens, p_n) : KV_ERR_PROTO;
}

char *kvp_error_text(const char *message, unsigned status)
{
	const char *type = status < 500 ? "invalid_request_error" : status == 503 ? "overloaded_error" : "server_error";
	char text[1024];
	kv_text_t out = kv_text(text, sizeof text);

	kv_text_addf(&out, "{\"error\":{\"message\":");
	kv_text_json(&out, message);
	kv_text_addf(&out, ",\"type\":\"%s\",\"param\":null,\"code\":%u}}", type, status);

	return kv_text_fits(&out) ? strdup(text) : NULL;
}
