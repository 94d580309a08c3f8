/* kvctl check: every invariant of the daemon, with the promise it stands for. */
#include "kvctl.h"

#include <stdio.h>

static void print_check(const kvctl_t *ctl, struct json_object *check)
{
	int ok = kvctl_bool(check, "ok", 0);

	printf("%s%-7s%s ", kvctl_tone(ctl, ok ? KVCTL_GOOD : KVCTL_BAD), ok ? "ok" : "FAILED", kvctl_tone_end(ctl));
	printf("%-4s ", kvctl_str(check, "promise"));
	printf("%-20s ", kvctl_str(check, "name"));
	kvctl_print_text(kvctl_str(check, "detail"));
	putchar('\n');
}

int kvctl_check(const kvctl_t *ctl)
{
	struct json_object *json = NULL, *checks;
	uint32_t failed = 0;
	int code;

	code = kvctl_document(ctl, KVC_DOC_CHECK, 0, &json, &failed);
	if (code != 0) {
		return code;
	}
	checks = kvctl_member(json, "checks");
	if (ctl->json) {
		json_object_object_add(json, "failed", json_object_new_uint64(failed));
		kvctl_print_json(json);
	} else if (json_object_is_type(checks, json_type_array)) {
		for (size_t i = 0; i < json_object_array_length(checks); i++) {
			print_check(ctl, json_object_array_get_idx(checks, i));
		}
		printf("%zu checks, %u failed\n", json_object_array_length(checks), failed);
	}
	json_object_put(json);

	return failed ? KVCTL_EXIT_UNHEALTHY : 0;
}
