/* kvctl transfers: the hand-overs of the namespace, the oldest first. */
#include "kvctl.h"

#include "kv/units.h"
#include "kv/utf8.h"

#include <stdio.h>
#include <string.h>

#define NAME_COLUMNS 20u

static int compare_age(const void *left, const void *right)
{
	uint64_t a = kvctl_u64(*(struct json_object *const *)left, "age_ns");
	uint64_t b = kvctl_u64(*(struct json_object *const *)right, "age_ns");

	return a > b ? -1 : a < b;
}

/* A name of somebody's choice, cut to a column's width; "-" for none. */
static void print_name(const char *name)
{
	const size_t len = strlen(name);
	size_t at = 0;
	unsigned columns = 0, bytes;
	char shown[4 * NAME_COLUMNS + 2];

	while (at < len && columns < NAME_COLUMNS &&
	       (bytes = kv_utf8_next((const uint8_t *)name + at, len - at, NULL)) > 0) {
		at += bytes;
		columns++;
	}
	memcpy(shown, name, at);
	shown[at] = '\0';
	kvctl_print_text(len > 0 ? shown : "-");
	putchar(at < len ? '~' : ' ');
	printf("%*s", (int)(NAME_COLUMNS - (len > 0 ? columns : 1)), "");
}

static void print_entry(struct json_object *entry)
{
	char bytes[32], age[32], left[32];

	print_name(kvctl_str(entry, "transfer"));
	printf(" %-9s %9s %8llu %8s %8s ", kvctl_str(entry, "state"),
	       kv_format_size(kvctl_u64(entry, "bytes"), bytes, sizeof bytes),
	       (unsigned long long)kvctl_u64(entry, "tokens"),
	       kv_format_duration(kvctl_u64(entry, "age_ns") / 1000000u * 1000000u, age, sizeof age),
	       kv_format_duration(kvctl_u64(entry, "left_ns") / 1000000u * 1000000u, left, sizeof left));
	print_name(kvctl_str(entry, "producer"));
	print_name(kvctl_str(entry, "consumer"));
	kvctl_print_text(kvctl_str(entry, "waits_for"));
	if (strcmp(kvctl_str(entry, "status"), "OK") != 0) {
		printf(" (%s)", kvctl_str(entry, "status"));
	}
	putchar('\n');
}

int kvctl_transfers(const kvctl_t *ctl)
{
	struct json_object *json = NULL, *entries;
	int code = kvctl_document(ctl, KVC_DOC_TRANSFERS, 0, &json, NULL);
	size_t count;

	if (code != 0) {
		return code;
	}
	entries = kvctl_member(json, "transfers");
	count = json_object_is_type(entries, json_type_array) ? json_object_array_length(entries) : 0;
	if (count > 0) {
		json_object_array_sort(entries, compare_age);
	}
	if (ctl->json) {
		kvctl_print_json(json);
		json_object_put(json);
		return 0;
	}
	printf("%s%-21s %-9s %9s %8s %8s %8s %-21s%-21s%s%s\n", kvctl_tone(ctl, KVCTL_BOLD), "TRANSFER", "STATE",
	       "BYTES", "TOKENS", "AGE", "LEFT", "PRODUCER", "CONSUMER", "WAITS FOR", kvctl_tone_end(ctl));
	for (size_t i = 0; i < count; i++) {
		print_entry(json_object_array_get_idx(entries, i));
	}
	if (kvctl_u64(json, "omitted") > 0) {
		printf("and %llu more\n", (unsigned long long)kvctl_u64(json, "omitted"));
	}
	if (kvctl_u64(json, "other_space") > 0) {
		printf("%llu ended because the sides have other weights or another layout, the last: ",
		       (unsigned long long)kvctl_u64(json, "other_space"));
		kvctl_print_text(kvctl_str(json, "other_space_last"));
		putchar('\n');
	}
	json_object_put(json);

	return 0;
}
