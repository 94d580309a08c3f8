/* kvctl stats and kvctl config: two flat documents, printed as lists. */
#include "kvctl.h"

#include <stdio.h>
#include <string.h>

static int is_wanted(const kvctl_t *ctl, const char *name)
{
	for (int i = 1; i < ctl->argc; i++) {
		if (strstr(name, ctl->argv[i])) {
			return 1;
		}
	}

	return ctl->argc == 1;
}

/* Keep the members that were asked for. Returns how many. */
static int keep_wanted(const kvctl_t *ctl, struct json_object *json)
{
	struct json_object_iter iter;
	const char *drop[1024];
	size_t count = 0;

	json_object_object_foreachC(json, iter)
	{
		if (!is_wanted(ctl, iter.key) && count < sizeof drop / sizeof drop[0]) {
			drop[count++] = iter.key;
		}
	}
	for (size_t i = 0; i < count; i++) {
		json_object_object_del(json, drop[i]);
	}

	return json_object_object_length(json);
}

static void print_row(const kvctl_t *ctl, const char *name, struct json_object *value)
{
	const char *source = kvctl_str(value, "source");
	struct json_object *shown = value;

	if (json_object_is_type(value, json_type_object)) {
		shown = kvctl_member(value, "text"); /* as people write it, "1GiB" */
		shown = shown ? shown : kvctl_member(value, "value");
	}

	printf("%-50s ", name);
	kvctl_print_text(shown ? json_object_get_string(shown)
			       : json_object_to_json_string_ext(value, JSON_C_TO_STRING_PLAIN));
	if (*source) {
		printf("  %s(%s)%s", kvctl_tone(ctl, KVCTL_DIM), source, kvctl_tone_end(ctl));
	}
	putchar('\n');
}

static int list(const kvctl_t *ctl, int what)
{
	struct json_object *json = NULL;
	struct json_object_iter iter;
	int code = kvctl_document(ctl, what, 0, &json, NULL);

	if (code != 0) {
		return code;
	}
	if (keep_wanted(ctl, json) == 0 && ctl->argc > 1) {
		json_object_put(json);
		return kvctl_error(ctl, KV_ERR_NOT_FOUND, "nothing is named like %s", ctl->argv[1]);
	}
	if (ctl->json) {
		kvctl_print_json(json);
	} else {
		json_object_object_foreachC(json, iter)
		{
			print_row(ctl, iter.key, iter.val);
		}
	}
	json_object_put(json);

	return 0;
}

int kvctl_stats(const kvctl_t *ctl)
{
	return list(ctl, KVC_DOC_STATS);
}

int kvctl_config(const kvctl_t *ctl)
{
	return list(ctl, KVC_DOC_CONFIG);
}
