/* kvctl help and kvctl version: printed from the tables. */
#include "kvctl.h"

#include "kv/system.h"
#include "kv/wire.h"

#include <stdio.h>
#include <string.h>

/* ---- help ------------------------------------------------------------------------------------ */

/* The options of a sub-command; NULL: those of all. */
static void print_options(const char *command)
{
	for (unsigned i = 0; i < KVCTL_OPTIONS; i++) {
		const kvctl_option_info_t *option = &kvctl_options[i];
		char shown[48];

		if (command ? !kvctl_takes(command, option) : option->command != NULL) {
			continue;
		}
		snprintf(shown, sizeof shown, "--%s%s%s", option->name, option->value ? " " : "",
			 option->value ? option->value : "");
		printf("  %-17s %s\n", shown, option->help);
	}
}

static void print_usage(const kvctl_t *ctl)
{
	printf("usage: kvctl [options] COMMAND [arguments]\n\n");
	for (size_t i = 0; i < ctl->command_count; i++) {
		printf("  %-8s %-30s %s\n", ctl->commands[i].name, ctl->commands[i].arguments, ctl->commands[i].help);
	}
	printf("\noptions (anywhere on the line)\n");
	print_options(NULL);
	printf("\nexit codes: 0 done, 1 not there, 2 not healthy, 64 usage, 65 bad data, 69 daemon not reachable, 75 "
	       "try again later,\n"
	       "77 not permitted, 78 configuration\n");
}

/* The options that a sub-command takes beyond those of all. */
static struct json_object *options_json(const char *command)
{
	struct json_object *array = json_object_new_array();

	for (unsigned i = 0; i < KVCTL_OPTIONS; i++) {
		const kvctl_option_info_t *option = &kvctl_options[i];

		if (kvctl_takes(command, option)) {
			struct json_object *one = json_object_new_object();

			json_object_object_add(one, "name", json_object_new_string(option->name));
			json_object_object_add(one, "value",
					       option->value ? json_object_new_string(option->value) : NULL);
			json_object_object_add(one, "help", json_object_new_string(option->help));
			json_object_array_add(array, one);
		}
	}

	return array;
}

/* All commands, or the one named. */
static void commands_json(const kvctl_t *ctl, const char *name)
{
	struct json_object *json = json_object_new_object(), *array = json_object_new_array();

	for (size_t i = 0; i < ctl->command_count; i++) {
		const kvctl_command_t *command = &ctl->commands[i];
		struct json_object *one;

		if (name && strcmp(command->name, name) != 0) {
			continue;
		}
		one = json_object_new_object();
		json_object_object_add(one, "name", json_object_new_string(command->name));
		json_object_object_add(one, "arguments", json_object_new_string(command->arguments));
		json_object_object_add(one, "help", json_object_new_string(command->help));
		json_object_object_add(one, "options", options_json(command->name));
		json_object_array_add(array, one);
	}
	json_object_object_add(json, "commands", array);
	kvctl_print_json(json);
	json_object_put(json);
}

static int print_command(const kvctl_t *ctl, const char *name)
{
	for (size_t i = 0; i < ctl->command_count; i++) {
		const kvctl_command_t *command = &ctl->commands[i];

		if (strcmp(command->name, name) == 0 && ctl->json) {
			commands_json(ctl, name);
			return 0;
		}
		if (strcmp(command->name, name) == 0) {
			printf("usage: kvctl %s%s%s\n\n%s\n\n", name, *command->arguments ? " " : "",
			       command->arguments, command->help);
			print_options(name);
			return 0;
		}
	}

	return kvctl_error(ctl, KV_ERR_ARG, "there is no help about %s", name);
}

static void role_names(uint32_t roles, char out[48])
{
	snprintf(out, 48, "%s%s%s%s%s", roles & KV_ROLE_ANY ? "any " : "", roles & KV_ROLE_CLIENT ? "client " : "",
		 roles & KV_ROLE_MEMBER ? "member " : "", roles & KV_ROLE_OPERATOR ? "operator " : "",
		 roles == KV_ROLE_NONE ? "notice " : "");
	out[strlen(out) - 1] = '\0';
}

static const char *kind_name(kv_field_kind_t kind)
{
	static const char *const names[] = {
		[KV_FIELD_U32] = "u32",   [KV_FIELD_U64] = "u64", [KV_FIELD_I32] = "i32", [KV_FIELD_STR] = "str",
		[KV_FIELD_TEXT] = "text", [KV_FIELD_BIN] = "bin", [KV_FIELD_KEY] = "key", [KV_FIELD_KEYS] = "keys",
	};

	return (unsigned)kind < KV_COUNT_OF(names) && names[kind] ? names[kind] : "?";
}

static void print_fields(const char *what, const kv_body_t *body)
{
	for (uint32_t i = 0; i < body->count; i++) {
		printf("    %-6s %-5s %-16s %s\n", i == 0 ? what : "", kind_name(body->fields[i].kind),
		       body->fields[i].name, body->fields[i].help);
	}
}

static struct json_object *fields_json(const kv_body_t *body)
{
	struct json_object *array = json_object_new_array();

	for (uint32_t i = 0; i < body->count; i++) {
		struct json_object *field = json_object_new_object();

		json_object_object_add(field, "name", json_object_new_string(body->fields[i].name));
		json_object_object_add(field, "kind", json_object_new_string(kind_name(body->fields[i].kind)));
		json_object_object_add(field, "limit", json_object_new_uint64(body->fields[i].limit));
		json_object_object_add(field, "help", json_object_new_string(body->fields[i].help));
		json_object_array_add(array, field);
	}

	return array;
}

static void requests_json(void)
{
	struct json_object *json = json_object_new_object(), *array = json_object_new_array();

	for (uint32_t i = 0; i < kv_request_count; i++) {
		struct json_object *request = json_object_new_object();
		char roles[48];

		role_names(kv_requests[i].roles, roles);
		json_object_object_add(request, "code", json_object_new_int(kv_requests[i].code));
		json_object_object_add(request, "name", json_object_new_string(kv_requests[i].name));
		json_object_object_add(request, "roles", json_object_new_string(roles));
		json_object_object_add(request, "help", json_object_new_string(kv_requests[i].help));
		json_object_object_add(request, "ask", fields_json(&kv_requests[i].ask));
		json_object_object_add(request, "reply", fields_json(&kv_requests[i].reply));
		json_object_array_add(array, request);
	}
	json_object_object_add(json, "requests", array);
	kvctl_print_json(json);
	json_object_put(json);
}

static int print_requests(const kvctl_t *ctl)
{
	if (ctl->json) {
		requests_json();
		return 0;
	}
	for (uint32_t i = 0; i < kv_request_count; i++) {
		const kv_request_t *request = &kv_requests[i];
		char roles[48];

		role_names(request->roles, roles);
		printf("%s%3u %-12s%s %-18s %s\n", kvctl_tone(ctl, KVCTL_BOLD), request->code, request->name,
		       kvctl_tone_end(ctl), roles, request->help);
		print_fields("ask", &request->ask);
		print_fields("reply", &request->reply);
	}

	return 0;
}

int kvctl_help(const kvctl_t *ctl)
{
	if (ctl->argc == 2 && strcmp(ctl->argv[1], "requests") == 0) {
		return print_requests(ctl);
	}
	if (ctl->argc == 2) {
		return print_command(ctl, ctl->argv[1]);
	}
	if (ctl->json) {
		commands_json(ctl, NULL);
	} else {
		print_usage(ctl);
	}

	return 0;
}

/* ---- version --------------------------------------------------------------------------------- */

/* The daemon's version, a copy in out; "" when it cannot be asked, which is no failure here. */
static void daemon_version(const kvctl_t *ctl, char *out, size_t cap)
{
	kvc_config_t config = {.struct_size = sizeof config,
			       .socket = ctl->socket,
			       .program = "kvctl",
			       .timeout_ms = ctl->timeout_ms,
			       .observe = 1};
	struct json_object *json;
	char *text = NULL;
	kvc_t *kvc;

	out[0] = '\0';
	if (kvc_attach(&config, &kvc) != KVC_OK) {
		return;
	}
	if (kvc_document(kvc, KVC_DOC_STATUS, 0, &text, NULL) == KVC_OK) {
		json = json_tokener_parse(text);
		snprintf(out, cap, "%s", kvctl_str(kvctl_member(json, "daemon"), "version"));
		json_object_put(json);
	}
	kvc_free(text);
	kvc_detach(kvc);
}

int kvctl_version(const kvctl_t *ctl)
{
	char daemon[64], others[160];

	daemon_version(ctl, daemon, sizeof daemon);
	if (ctl->json) {
		struct json_object *json = json_object_new_object();

		json_object_object_add(json, "kvctl", json_object_new_string(KVD_VERSION));
		json_object_object_add(json, "libkvc", json_object_new_string(kvc_version()));
		json_object_object_add(json, "kvd", daemon[0] ? json_object_new_string(daemon) : NULL);
		json_object_object_add(json, "revision", json_object_new_string(kv_revision));
		kvctl_print_json(json);
		json_object_put(json);
		return 0;
	}
	snprintf(others, sizeof others, " (%s)\nkvd   %s", kvc_version(), daemon[0] ? daemon : "not reachable");
	kv_version_print("kvctl", others);

	return 0;
}
