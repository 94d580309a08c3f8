/* The space that --space and --identity name: found in the daemon's status, and opened by its identity, which is the
 * same space in every incarnation; a number is not. */
#include "kvctl.h"

#include "kv/identity.h"
#include "kv/units.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INPUT (64u << 20) /* bytes of text */

char *kvctl_text_of(const kvctl_t *ctl, const char *argument)
{
	FILE *file = stdin;
	char *text;
	size_t len;
	int failed;

	if (strcmp(argument, "-") != 0 && argument[0] != '@') {
		return strdup(argument);
	}
	if (argument[0] == '@') {
		file = fopen(argument + 1, "re");
		if (!file) {
			(void)kvctl_error(ctl, KV_ERR_ARG, "cannot read %s: %s", argument + 1, strerror(errno));
			return NULL;
		}
	}
	text = malloc(MAX_INPUT + 1u);
	len = text ? fread(text, 1, MAX_INPUT + 1u, file) : 0;
	failed = ferror(file);
	if (file != stdin) {
		fclose(file);
	}
	if (text && (failed || memchr(text, '\0', len))) {
		(void)kvctl_error(ctl, KV_ERR_ARG, "%s %s", argument, failed ? "cannot be read" : "is not text");
		free(text);
		return NULL;
	}
	if (!text || len > MAX_INPUT) {
		(void)kvctl_error(ctl, KV_ERR_ARG, "%s has more than %u bytes", argument, MAX_INPUT);
		free(text);
		return NULL;
	}
	text[len] = '\0';

	return text;
}

/* Is this the space that was asked for: by number, by identity (a last newline more or less), or the only one? */
static int is_space(const kvctl_t *ctl, struct json_object *space, uint64_t number, const char *identity)
{
	const char *known = kvctl_str(space, "identity");

	if (ctl->given[KVCTL_SPACE] && kvctl_u64(space, "space") != number) {
		return 0;
	}
	if (identity) {
		size_t len = strlen(identity), have = strlen(known);

		len -= len > 0 && identity[len - 1] == '\n';
		have -= have > 0 && known[have - 1] == '\n';
		return len == have && memcmp(known, identity, len) == 0;
	}

	return *known != '\0';
}

static int no_space(const kvctl_t *ctl, size_t count)
{
	if (count == 0) {
		return kvctl_error(ctl, KV_ERR_NOT_FOUND,
				   "kvd has no space open: no engine has attached since it was started");
	}
	if (ctl->given[KVCTL_SPACE]) {
		return kvctl_error(ctl, KV_ERR_NOT_FOUND, "there is no space %s%s; `kvctl status` lists them",
				   ctl->given[KVCTL_SPACE], ctl->given[KVCTL_IDENTITY] ? " with this identity" : "");
	}
	if (ctl->given[KVCTL_IDENTITY]) {
		return kvctl_error(ctl, KV_ERR_NOT_FOUND,
				   "no space has this identity; `kvctl status --json` shows those there are");
	}

	return kvctl_error(ctl, KV_ERR_ARG, "there are %zu spaces: name one with --space (`kvctl status` lists them)",
			   count);
}

/* Names point into the text and the storage. 0: it is no canonical identity, *p_field may say where. */
static int parse_identity(const char *text, char storage[KV_IDENTITY_MAX_TEXT + 64], kvc_identity_t *identity,
			  const char **p_field)
{
	kv_identity_t parsed;
	uint64_t hash_tokens = 0;

	if (kv_identity_parse(text, strlen(text), &parsed, storage, KV_IDENTITY_MAX_TEXT + 64, p_field) != KV_OK ||
	    kv_parse_u64(parsed.hash_tokens, &hash_tokens) != KV_OK || hash_tokens > UINT32_MAX) {
		return 0;
	}
	*identity = (kvc_identity_t){.struct_size = sizeof *identity,
				     .model = parsed.model,
				     .weights = parsed.weights,
				     .dtype = parsed.dtype,
				     .quantization = parsed.quantization,
				     .rope = parsed.rope,
				     .lora = parsed.lora,
				     .hash = parsed.hash,
				     .hash_tokens = (uint32_t)hash_tokens,
				     .groups = parsed.groups,
				     .layout = parsed.layout,
				     .page_format = parsed.page_format,
				     .extra = parsed.extra,
				     .device = parsed.device,
				     .known = 1}; /* kvctl makes none */

	return 1;
}

/* A closed space is in the status once it has been opened. */
static void open_closed(const kvctl_t *ctl, const char *text)
{
	char storage[KV_IDENTITY_MAX_TEXT + 64];
	const char *field;
	kvc_identity_t identity;
	kvc_space_t *space;
	kvc_t *kvc;

	if (parse_identity(text, storage, &identity, &field) && kvctl_attach(ctl, &kvc) == 0) {
		(void)kvc_space_open(kvc, &identity, &space);
		kvc_detach(kvc);
	}
}

/* Only among spaces that are there. */
static int find_in_status(const kvctl_t *ctl, uint64_t number, const char *identity, struct json_object **p_space)
{
	struct json_object *json = NULL, *spaces, *found = NULL;
	size_t count;
	int code = kvctl_document(ctl, KVC_DOC_STATUS, 1, &json, NULL);

	if (code != 0) {
		return code;
	}
	spaces = kvctl_member(kvctl_member(json, "core"), "spaces");
	count = json_object_is_type(spaces, json_type_array) ? json_object_array_length(spaces) : 0;
	for (size_t i = 0; i < count && !found; i++) {
		struct json_object *space = json_object_array_get_idx(spaces, i);

		found = is_space(ctl, space, number, identity) ? space : NULL;
	}
	if (!found || (count > 1 && !ctl->given[KVCTL_SPACE] && !identity)) {
		code = no_space(ctl, count);
	} else {
		*p_space = json_object_get(found);
	}
	json_object_put(json);

	return code;
}

int kvctl_find_space(const kvctl_t *ctl, struct json_object **p_space)
{
	const char *number = ctl->given[KVCTL_SPACE];
	char *identity = NULL;
	uint64_t value = 0;
	int code;

	if (number && kv_parse_u64(number, &value) != KV_OK) {
		return kvctl_error(ctl, KV_ERR_ARG, "--space %s: a number from `kvctl status`", number);
	}
	if (ctl->given[KVCTL_IDENTITY]) {
		identity = kvctl_text_of(ctl, ctl->given[KVCTL_IDENTITY]);
		if (!identity) {
			return kv_status_exit_code(KV_ERR_ARG);
		}
		open_closed(ctl, identity);
	}
	code = find_in_status(ctl, value, identity, p_space);
	free(identity);

	return code;
}

int kvctl_open_space(const kvctl_t *ctl, kvc_t *kvc, const char *text, kvc_space_t **p_space)
{
	char storage[KV_IDENTITY_MAX_TEXT + 64];
	const char *field = NULL;
	kvc_identity_t identity;
	kvc_status_t status;

	if (!parse_identity(text, storage, &identity, &field)) {
		return kvctl_error(ctl, KV_ERR_IDENTITY, "the identity is not in canonical form%s%s",
				   field ? ": see " : "", field ? field : "");
	}
	status = kvc_space_open(kvc, &identity, p_space);

	return status == KVC_OK ? 0 : kvctl_failed(ctl, status);
}
