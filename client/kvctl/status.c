/* kvctl status: the daemon on one screen. */
#include "kvctl.h"

#include "kv/miss_reason_list.h"
#include "kv/units.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BAR_CELLS 24u

static void print_daemon(const kvctl_t *ctl, struct json_object *json, int healthy)
{
	struct json_object *daemon = kvctl_member(json, "daemon");
	char uptime[32];

	printf("%skvd %s%s  %s%s%s  namespace ", kvctl_tone(ctl, KVCTL_BOLD), kvctl_str(daemon, "version"),
	       kvctl_tone_end(ctl), kvctl_tone(ctl, healthy ? KVCTL_GOOD : KVCTL_BAD),
	       healthy ? "healthy" : "NOT HEALTHY", kvctl_tone_end(ctl));
	kvctl_print_text(kvctl_str(daemon, "namespace"));
	printf("  up %s  restarts %llu  sessions %llu\n",
	       kv_format_duration(kvctl_u64(daemon, "uptime_ns"), uptime, sizeof uptime),
	       (unsigned long long)kvctl_u64(daemon, "restarts"), (unsigned long long)kvctl_u64(daemon, "sessions"));
}

static void print_tier(const kvctl_t *ctl, const char *name, struct json_object *tier)
{
	uint64_t used = kvctl_u64(tier, "used_bytes"), limit = kvctl_u64(tier, "limit_bytes");
	uint64_t quarantined = kvctl_u64(tier, "quarantined_bytes");
	char bar[BAR_CELLS * 3 + 1], a[32], b[32], c[32];

	if (!tier) {
		printf("  %-5s off\n", name);
		return;
	}
	printf("  %-5s %s %5.1f %%  %s of %s", name,
	       kvctl_bar(ctl, limit ? (double)used / (double)limit : 0, BAR_CELLS, bar, sizeof bar),
	       limit ? 100.0 * (double)used / (double)limit : 0.0, kv_format_size(used, a, sizeof a),
	       kv_format_size(limit, b, sizeof b));
	if (quarantined) {
		printf("  %squarantined %s%s", kvctl_tone(ctl, KVCTL_BAD), kv_format_size(quarantined, c, sizeof c),
		       kvctl_tone_end(ctl));
	}
	putchar('\n');
}

/* A line a device, and why it is smaller than it should be. */
static void print_gpus(const kvctl_t *ctl, struct json_object *gpus)
{
	const size_t count = json_object_is_type(gpus, json_type_array) ? json_object_array_length(gpus) : 0;

	for (size_t i = 0; i < count; i++) {
		struct json_object *gpu = json_object_array_get_idx(gpus, i);
		const char *reason = kvctl_str(gpu, "reason");

		print_tier(ctl, "gpu", strcmp(kvctl_str(gpu, "state"), "off") == 0 ? NULL : gpu);
		printf("        %s  %s  slabs %llu of %llu", kvctl_str(gpu, "device"), kvctl_str(gpu, "state"),
		       (unsigned long long)kvctl_u64(gpu, "slabs"), (unsigned long long)kvctl_u64(gpu, "wanted_slabs"));
		if (kvctl_u64(gpu, "adopted_blocks") > 0) {
			printf("  %llu blocks kept from the daemon before",
			       (unsigned long long)kvctl_u64(gpu, "adopted_blocks"));
		}
		if (reason[0]) {
			printf("  ");
			kvctl_print_text(reason);
		}
		putchar('\n');
	}
}

static int is_bytes(struct json_object *object, const char *name)
{
	const char *resource = kvctl_str(object, "resource");
	const size_t len = strlen(name);

	return (len >= 5 && strcmp(name + len - 5, "bytes") == 0) || strcmp(resource, "cpu") == 0 ||
	       strcmp(resource, "disk") == 0 || strcmp(resource, "gpu") == 0;
}

/* Numbers of an object on one line, in the order the daemon gives them. */
static void print_numbers(struct json_object *object)
{
	struct json_object_iter iter;

	if (!json_object_is_type(object, json_type_object)) {
		return;
	}
	json_object_object_foreachC(object, iter)
	{
		if (json_object_is_type(iter.val, json_type_int) && is_bytes(object, iter.key)) {
			char size[32];

			printf("  %s %s", iter.key,
			       kv_format_size(json_object_get_uint64(iter.val), size, sizeof size));
		} else if (json_object_is_type(iter.val, json_type_int) ||
			   json_object_is_type(iter.val, json_type_double) ||
			   json_object_is_type(iter.val, json_type_boolean)) {
			printf("  %s %s", iter.key, json_object_get_string(iter.val));
		}
	}
	putchar('\n');
}

/* Why tokens were missed, most useful for those that were stored. */
static void print_misses(struct json_object *missed, uint64_t asked)
{
	static const char *const reasons[][2] = {
#define REASON(NAME, label, words) {label, words},
		KV_MISS_REASON_LIST(REASON)
#undef REASON
	};
	const char *before = "  missed: ";

	for (size_t i = 0; i < sizeof reasons / sizeof reasons[0]; i++) {
		const uint64_t tokens = kvctl_u64(missed, reasons[i][0]);

		if (tokens) {
			printf("%s%s %.1f %%", before, reasons[i][1], 100.0 * (double)tokens / (double)asked);
			before = ", ";
		}
	}
	if (*before == ',') {
		putchar('\n');
	}
}

/* Returns the prompt tokens looked up; prints nothing before the first. */
static uint64_t print_rate(const char *before, struct json_object *hits)
{
	const uint64_t asked = kvctl_u64(hits, "query_tokens");
	const uint64_t gpu = kvctl_u64(hits, "hit_gpu_tokens"), cpu = kvctl_u64(hits, "hit_cpu_tokens");
	const uint64_t disk = kvctl_u64(hits, "hit_disk_tokens");

	if (asked) {
		printf("%s%.1f %% of %llu prompt tokens in %llu prompts (", before,
		       100.0 * (double)(gpu + cpu + disk) / (double)asked, (unsigned long long)asked,
		       (unsigned long long)kvctl_u64(hits, "lookups"));
		if (gpu) {
			printf("gpu %.1f %%, ", 100.0 * (double)gpu / (double)asked);
		}
		printf("cpu %.1f %%, disk %.1f %%)\n", 100.0 * (double)cpu / (double)asked,
		       100.0 * (double)disk / (double)asked);
	}

	return asked;
}

static void print_hits(struct json_object *hits)
{
	struct json_object *own = kvctl_member(hits, "namespace"), *total = kvctl_member(hits, "total");
	const uint64_t asked = print_rate("hits\n  ", own);

	if (asked) {
		print_misses(kvctl_member(own, "missed_tokens"), asked);
	}
	if (kvctl_u64(total, "query_tokens") != asked) {
		(void)print_rate(asked ? "  all namespaces: " : "hits\n  all namespaces: ", total);
	}
}

/* What people call the thing: its name, or the first line of its identity. */
static void print_name(struct json_object *row)
{
	static const char *const names[] = {"program", "instance", "resource", "identity"};

	for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
		const char *text = kvctl_str(row, names[i]);

		if (*text) {
			char line[64];

			snprintf(line, sizeof line, "%.*s", (int)strcspn(text, "\n"), text);
			printf("  ");
			kvctl_print_text(line);
			return;
		}
	}
}

/* An array of objects: a heading, then one line an object. */
static void print_rows(const char *heading, struct json_object *array)
{
	if (!json_object_is_type(array, json_type_array) || json_object_array_length(array) == 0) {
		return;
	}
	printf("%s\n", heading);
	for (size_t i = 0; i < json_object_array_length(array); i++) {
		print_name(json_object_array_get_idx(array, i));
		print_numbers(json_object_array_get_idx(array, i));
	}
}

/* The model of a space, from its identity; "" when it is not in the list. */
static void print_model(struct json_object *spaces, uint64_t number)
{
	for (size_t i = 0; json_object_is_type(spaces, json_type_array) && i < json_object_array_length(spaces); i++) {
		struct json_object *space = json_object_array_get_idx(spaces, i);

		if (kvctl_u64(space, "space") == number) {
			printf("  space %llu", (unsigned long long)number);
			print_name(space);
		}
	}
}

/* An instance a line, then a line for each of its members. */
static void print_engines(struct json_object *core)
{
	struct json_object *engines = kvctl_member(core, "instances");
	const size_t count = json_object_is_type(engines, json_type_array) ? json_object_array_length(engines) : 0;

	for (size_t i = 0; i < count; i++) {
		struct json_object *engine = json_object_array_get_idx(engines, i);
		struct json_object *members = kvctl_member(engine, "members");

		printf("%s", i == 0 ? "engines\n" : "");
		print_name(engine);
		print_numbers(engine);
		for (size_t m = 0;
		     json_object_is_type(members, json_type_array) && m < json_object_array_length(members); m++) {
			struct json_object *member = json_object_array_get_idx(members, m);

			printf("    %s rank %llu", kvctl_str(member, "role"),
			       (unsigned long long)kvctl_u64(member, "rank"));
			if (kvctl_bool(member, "open", 0)) {
				print_name(member);
				printf("  pid %llu", (unsigned long long)kvctl_u64(member, "pid"));
				print_model(kvctl_member(core, "spaces"), kvctl_u64(member, "space"));
			} else {
				printf("  disconnected");
			}
			putchar('\n');
		}
	}
}

/* Whether saves are refused, and how many were. */
static void print_admission(const kvctl_t *ctl, struct json_object *admission)
{
	const int thrashes = kvctl_bool(admission, "thrashes", 0);

	if (!admission) {
		return;
	}
	printf("  admission %s", kvctl_str(admission, "mode"));
	if (thrashes) {
		printf("  %sthe pool thrashes: new blocks are saved at their second use%s", kvctl_tone(ctl, KVCTL_BAD),
		       kvctl_tone_end(ctl));
	}
	print_numbers(admission);
}

static void print_screen(const kvctl_t *ctl, struct json_object *json, int healthy)
{
	struct json_object *tiers = kvctl_member(json, "tiers"), *core = kvctl_member(json, "core");
	struct json_object *degraded = kvctl_member(json, "degraded");

	print_daemon(ctl, json, healthy);
	printf("tiers\n");
	print_tier(ctl, "cpu", kvctl_member(tiers, "cpu"));
	print_tier(ctl, "disk", kvctl_member(tiers, "disk"));
	print_gpus(ctl, kvctl_member(tiers, "gpu"));
	print_rows("slabs", kvctl_member(json, "slabs"));
	print_hits(kvctl_member(json, "hits"));
	printf("index\n");
	print_numbers(core);
	print_admission(ctl, kvctl_member(core, "admission"));
	print_rows("shares", kvctl_member(core, "shares"));
	print_rows("spaces", kvctl_member(core, "spaces"));
	print_engines(core);
	print_rows("sessions", kvctl_member(json, "sessions"));
	for (size_t i = 0; json_object_is_type(degraded, json_type_array) && i < json_object_array_length(degraded);
	     i++) {
		printf("%snote%s: ", kvctl_tone(ctl, KVCTL_BOLD), kvctl_tone_end(ctl));
		kvctl_print_text(json_object_get_string(json_object_array_get_idx(degraded, i)));
		putchar('\n');
	}
}

int kvctl_status(const kvctl_t *ctl)
{
	struct json_object *json = NULL;
	const char *detail = ctl->given[KVCTL_DETAIL] ? ctl->given[KVCTL_DETAIL] : "1";
	int healthy, code;

	if (detail[0] < '0' || detail[0] > '2' || detail[1] != '\0') {
		return kvctl_error(ctl, KV_ERR_ARG, "--detail %s: 0, 1 or 2", detail);
	}
	code = kvctl_document(ctl, KVC_DOC_STATUS, (uint32_t)(detail[0] - '0'), &json, NULL);
	if (code != 0) {
		return code;
	}
	healthy = kvctl_bool(json, "healthy", 1);
	if (ctl->json) {
		kvctl_print_json(json);
	} else {
		print_screen(ctl, json, healthy);
	}
	json_object_put(json);

	return healthy ? 0 : KVCTL_EXIT_UNHEALTHY;
}
