/* Attaching to the daemon, fetching its documents, and saying what went wrong. */
#include "kvctl.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

int kvctl_error(const kvctl_t *ctl, kv_status_t status, const char *format, ...)
{
	char text[640];
	va_list args;

	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);

	fflush(stdout);
	fprintf(stderr, "kvctl: %s\n", text);
	if (ctl->json) {
		struct json_object *document = json_object_new_object(), *error = json_object_new_object();

		json_object_object_add(error, "status", json_object_new_string(kv_status_name(status)));
		json_object_object_add(error, "code", json_object_new_int(status));
		json_object_object_add(error, "text", json_object_new_string(text));
		json_object_object_add(document, "error", error);
		kvctl_print_json(document);
		json_object_put(document);
	}

	return kv_status_exit_code(status);
}

int kvctl_failed(const kvctl_t *ctl, kvc_status_t status)
{
	return kvctl_error(ctl, (kv_status_t)status, "%s", kvc_last_error());
}

int kvctl_attach(const kvctl_t *ctl, kvc_t **p_kvc)
{
	kvc_config_t config = {
		.struct_size = sizeof config,
		.socket = ctl->socket,
		.program = "kvctl",
		.timeout_ms = ctl->timeout_ms,
		.observe = 1,
	};
	kvc_status_t status = kvc_attach(&config, p_kvc);

	return status == KVC_OK ? 0 : kvctl_failed(ctl, status);
}

int kvctl_document(const kvctl_t *ctl, int what, uint32_t detail, struct json_object **p_json, uint32_t *p_value)
{
	kvc_t *kvc;
	char *text = NULL;
	kvc_status_t status;
	int code = kvctl_attach(ctl, &kvc);

	if (code != 0) {
		return code;
	}
	status = kvc_document(kvc, what, detail, &text, p_value);
	if (status == KVC_OK) {
		*p_json = json_tokener_parse(text);
		if (!json_object_is_type(*p_json, json_type_object)) {
			json_object_put(*p_json);
			code = kvctl_error(ctl, KV_ERR_PROTO,
					   "kvd's answer is not a JSON object: it speaks another version?");
		}
	} else {
		code = kvctl_failed(ctl, status);
	}
	kvc_free(text);
	kvc_detach(kvc);

	return code;
}
