/* How much of a prompt the daemon of this node has. */
#include "prefix.h"

#include "kv/system.h"
#include "kv/identity.h"
#include "kv/log.h"
#include "kv/units.h"
#include "kvc.h"

#include <json-c/json.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_SPACES     256u
#define POLL_MS        50u
#define REFRESH_ROUNDS 20u /* polls between two looks for new spaces */
#define TIMEOUT_MS     1000u
#define MAX_EXTRA      1024u
#define SELF_TEST      "self-test" /* `extra` of spaces in which connectors test themselves: no prompt is in them */

typedef struct space {
	kvc_space_t *handle;
	uint32_t hash_tokens;
	char identity[KV_IDENTITY_MAX_TEXT + 1]; /* as the daemon has it */
	char model[KV_IDENTITY_MAX_VALUE + 1];
	char lora[KV_IDENTITY_MAX_VALUE + 1]; /* "name@digest", or "none" and what makes the engine's blocks private */
} space_t;

struct kvp_prefix {
	char socket[512];
	pthread_t thread;
	atomic_int stopping;
	space_t *spaces[MAX_SPACES];
	_Atomic uint32_t space_count; /* those below it do not change until the end */
	kvc_key_t *keys;              /* of the thread that asks */
	uint32_t key_cap;
};

/* ---- the thread that attaches ---------------------------------------------------------------- */

static int is_known(const kvp_prefix_t *prefix, const char *identity)
{
	for (uint32_t i = 0; i < atomic_load(&prefix->space_count); i++) {
		if (strcmp(prefix->spaces[i]->identity, identity) == 0) {
			return 1;
		}
	}

	return 0;
}

/* Open a space that an engine has opened. Others' hashes cannot be made from tokens here. */
static void open_space(kvp_prefix_t *prefix, kvc_t *kvc, const char *text)
{
	static char storage[KV_IDENTITY_MAX_TEXT + 64];
	uint32_t n = atomic_load(&prefix->space_count);
	kvc_identity_t identity = {.struct_size = sizeof identity};
	uint64_t hash_tokens = 0;
	const char *field;
	kv_identity_t parsed;
	space_t *space;

	if (n == MAX_SPACES ||
	    kv_identity_parse(text, strlen(text), &parsed, storage, sizeof storage, &field) != KV_OK ||
	    strcmp(parsed.hash, "kv1") != 0 || strcmp(parsed.extra, SELF_TEST) == 0 ||
	    kv_parse_u64(parsed.hash_tokens, &hash_tokens) != KV_OK || hash_tokens == 0 || hash_tokens > UINT32_MAX) {
		return;
	}
	space = calloc(1, sizeof *space);
	if (!space) {
		return;
	}
	identity.model = parsed.model;
	identity.weights = parsed.weights;
	identity.dtype = parsed.dtype;
	identity.quantization = parsed.quantization;
	identity.rope = parsed.rope;
	identity.lora = parsed.lora;
	identity.hash = parsed.hash;
	identity.hash_tokens = space->hash_tokens = (uint32_t)hash_tokens;
	identity.groups = parsed.groups;
	identity.layout = parsed.layout;
	identity.page_format = parsed.page_format;
	identity.extra = parsed.extra;
	snprintf(space->identity, sizeof space->identity, "%s", text);
	snprintf(space->model, sizeof space->model, "%s", parsed.model);
	snprintf(space->lora, sizeof space->lora, "%s", parsed.lora);
	if (kvc_space_open(kvc, &identity, &space->handle) != KVC_OK) {
		free(space);
		return;
	}
	prefix->spaces[n] = space;
	atomic_store(&prefix->space_count, n + 1);
	kv_log(KV_LOG_INFO, "prefix", "prompts of model %s are looked up", space->model);
}

static void find_spaces(kvp_prefix_t *prefix, kvc_t *kvc)
{
	json_object *root = NULL, *core = NULL, *spaces = NULL, *identity;
	char *text = NULL;

	if (kvc_document(kvc, KVC_DOC_STATUS, 1, &text, NULL) == KVC_OK) {
		root = json_tokener_parse(text);
	}
	json_object_object_get_ex(root, "core", &core);
	json_object_object_get_ex(core, "spaces", &spaces);
	if (json_object_is_type(spaces, json_type_array)) {
		for (size_t i = 0; i < json_object_array_length(spaces); i++) {
			if (json_object_object_get_ex(json_object_array_get_idx(spaces, i), "identity", &identity) &&
			    !is_known(prefix, json_object_get_string(identity))) {
				open_space(prefix, kvc, json_object_get_string(identity));
			}
		}
	}
	json_object_put(root);
	kvc_free(text);
}

static void *attach(void *arg)
{
	kvp_prefix_t *prefix = arg;
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = prefix->socket,
				     .role = KVC_ROLE_MATCH,
				     .program = "kvd-pd-proxy",
				     .timeout_ms = TIMEOUT_MS,
				     .spin_us = UINT32_MAX,
				     .lazy = 2};
	unsigned failures = 0; /* in a row */
	kvc_t *kvc = NULL;
	kvc_status_t status = kvc_attach(&config, &kvc);

	if (status != KVC_OK) {
		kv_log(KV_LOG_ERROR, "prefix", "no prompt is looked up: %s", kvc_last_error());
		return NULL;
	}
	for (unsigned round = 0; !atomic_load(&prefix->stopping); round++) {
		status = kvc_poll(kvc, POLL_MS);
		failures = status == KVC_OK ? 0 : failures + 1;
		if (failures == REFRESH_ROUNDS) {
			kv_log(KV_LOG_WARN, "prefix", "no prompt is looked up while %s cannot be reached: %s",
			       prefix->socket, kvc_last_error());
		}
		if (status == KVC_OK && round % REFRESH_ROUNDS == 0) {
			find_spaces(prefix, kvc);
		}
		if (status != KVC_OK) {
			nanosleep(&(struct timespec){.tv_nsec = POLL_MS * 1000000L}, NULL);
		}
	}
	kvc_detach(kvc); /* after the last lookup: kvp_prefix_close() */

	return NULL;
}

kv_status_t kvp_prefix_open(const char *socket, kvp_prefix_t **p_prefix)
{
	kvp_prefix_t *prefix = calloc(1, sizeof *prefix);
	int error;

	if (!prefix) {
		return KV_ERR_NOMEM;
	}
	snprintf(prefix->socket, sizeof prefix->socket, "%s", socket);
	error = pthread_create(&prefix->thread, NULL, attach, prefix);
	if (error) {
		free(prefix);
		return kv_refused(&kv_env_posix, "proxy", "pthread_create", error);
	}
	*p_prefix = prefix;

	return KV_OK;
}

void kvp_prefix_close(kvp_prefix_t *prefix)
{
	if (!prefix) {
		return;
	}
	atomic_store(&prefix->stopping, 1);
	pthread_join(prefix->thread, NULL);
	for (uint32_t i = 0; i < atomic_load(&prefix->space_count); i++) {
		free(prefix->spaces[i]);
	}
	free(prefix->keys);
	free(prefix);
}

/* ---- lookups --------------------------------------------------------------------------------- */

/* The adapter's space where the model names one; else the one of that model, or the only one without adapter. */
static const space_t *find_space(const kvp_prefix_t *prefix, const char *model)
{
	const uint32_t count = atomic_load(&prefix->space_count);
	const space_t *base = NULL;
	const size_t len = strlen(model);
	uint32_t bases = 0;

	for (uint32_t i = 0; i < count; i++) {
		const space_t *space = prefix->spaces[i];

		if (len > 0 && strncmp(space->lora, model, len) == 0 && space->lora[len] == '@') {
			return space;
		}
	}
	for (uint32_t i = 0; i < count; i++) {
		const space_t *space = prefix->spaces[i];

		if (strcmp(space->lora, "none") == 0) {
			base = strcmp(space->model, model) == 0 || !base ? space : base;
			bases++;
		}
	}

	return bases == 1 || (base && strcmp(base->model, model) == 0) ? base : NULL;
}

/* The extra key of a unit as the vLLM connector makes it: a JSON list of the adapter's name, and in the first unit the
 * salt. -1: a character that would have to be escaped. */
static int extra_of(char out[MAX_EXTRA], const char *adapter, const char *salt)
{
	for (const char *text = adapter;; text = salt) {
		for (const char *p = text; *p; p++) {
			if (*p < ' ' || *p > '~' || *p == '"' || *p == '\\') {
				return -1;
			}
		}
		if (text == salt) {
			break;
		}
	}
	if (!*adapter && !*salt) {
		return 0;
	}

	return snprintf(out, MAX_EXTRA, "[%s%s%s%s%s%s%s]", *adapter ? "\"" : "", adapter, *adapter ? "\"" : "",
			*adapter && *salt ? "," : "", *salt ? "\"" : "", salt, *salt ? "\"" : "");
}

static kvc_status_t make_keys(const space_t *space, const kvp_prefix_question_t *question, uint32_t units,
			      kvc_key_t *keys)
{
	const char *adapter = strchr(space->lora, '@') ? question->model : "";
	char first[MAX_EXTRA], other[MAX_EXTRA];
	int first_len = extra_of(first, adapter, question->salt), other_len = extra_of(other, adapter, "");
	kvc_status_t status = first_len < 0 || other_len < 0 ? KVC_ERR_ARG : KVC_OK;
	uint32_t done = 0;
	kvc_chain_t chain;

	kvc_chain_begin(space->handle, &chain);
	while (status == KVC_OK && done < units && (done == 0 ? first_len : other_len) > 0) {
		status =
			kvc_chain_unit(&chain, done == 0 ? first : other, (uint32_t)(done == 0 ? first_len : other_len),
				       question->tokens + (size_t)done * space->hash_tokens, &keys[done]);
		done++;
	}
	if (status == KVC_OK && done < units) {
		status = kvc_chain_tokens(&chain, question->tokens + (size_t)done * space->hash_tokens, units - done,
					  keys + done);
	}

	return status;
}

int64_t kvp_prefix_hit(kvp_prefix_t *prefix, const kvp_prefix_question_t *question)
{
	const space_t *space = find_space(prefix, question->model);
	kvc_match_t match = {.struct_size = sizeof match};
	uint32_t units;

	if (!space) {
		return -1;
	}
	units = question->n / space->hash_tokens;
	if (units > prefix->key_cap) {
		kvc_key_t *keys = realloc(prefix->keys, units * sizeof *keys);

		if (!keys) {
			return -1;
		}
		prefix->keys = keys;
		prefix->key_cap = units;
	}
	if (units == 0 || make_keys(space, question, units, prefix->keys) != KVC_OK) {
		return units == 0 ? 0 : -1;
	}
	kvc_match(space->handle, prefix->keys, units, &match);

	return (int64_t)match.n * space->hash_tokens;
}
