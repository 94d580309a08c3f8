/* kvctl explain: where each block of a prompt is, and why the first missing one is missing. */
#include "kvctl.h"

#include "kv/key.h"
#include "kv/miss_reason_list.h"
#include "kv/shm.h"
#include "kv/units.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIER_WRITING     0x80u
#define TIER_QUARANTINED 0x40u
#define TIER_UNREADABLE  ((unsigned)KV_TIER_UNREADABLE)

/* One prompt and what the daemon says about it. */
typedef struct prompt {
	uint32_t *tokens;
	uint32_t n_tokens;
	kvc_key_t *keys;
	uint8_t *tiers;
	uint32_t n, why;
	kvc_space_info_t info;
	kvc_group_info_t group;
} prompt_t;

/* ---- what is asked --------------------------------------------------------------------------- */

/* Numbers with commas, blanks, brackets between them: lists as people and programs write them. */
static int parse_tokens(const kvctl_t *ctl, const char *text, prompt_t *prompt)
{
	size_t cap = strlen(text) / 2 + 1;

	prompt->tokens = malloc(cap * sizeof *prompt->tokens);
	if (!prompt->tokens) {
		return kvctl_error(ctl, KV_ERR_NOMEM, "out of memory for %zu tokens", cap);
	}
	for (const char *p = text + strspn(text, " \t\r\n,[]"); *p; p += strspn(p, " \t\r\n,[]")) {
		char *end;
		unsigned long value;

		errno = 0;
		value = strtoul(p, &end, 10);
		if (*p < '0' || *p > '9' || errno || value >= UINT32_MAX || (*end && !strchr(" \t\r\n,[]", *end))) {
			return kvctl_error(ctl, KV_ERR_ARG, "\"%.12s\" at byte %zu is not a token id", p,
					   (size_t)(p - text));
		}
		prompt->tokens[prompt->n_tokens++] = (uint32_t)value;
		p = end;
	}

	return 0;
}

/* ---- the answer ------------------------------------------------------------------------------ */

static const char *why_name(uint32_t why)
{
	static const char *const names[] = {
#define REASON(NAME, label, words) [KV_WHY_##NAME] = label,
		KV_MISS_REASON_LIST(REASON)
#undef REASON
	};

	return why < KV_COUNT_OF(names) ? names[why] : "unknown";
}

static const char *why_text(uint32_t why)
{
	static const char *const texts[] = {
		"everything is there",
		"never stored, or evicted so long ago that it is forgotten",
		"evicted: more room in its tiers would have kept it",
		"the daemon's heartbeat had stopped",
		"no daemon was there",
		"the space was reset since these keys were made",
		"the mirror stayed busy",
		"its bytes did not match their digest",
		"it did not come in time",
		"on disk, and set aside: it, or a block above it, cannot be read now, and is tried again",
		"not admitted: the pool thrashes, and takes new blocks at their second use (option admission)",
	};

	return why < KV_COUNT_OF(texts) ? texts[why] : "for a reason this version does not know";
}

static int is_there(uint8_t tiers)
{
	return (tiers & (KV_TIER_CPU | KV_TIER_DISK | KV_TIER_GPU | KV_TIER_REMOTE)) != 0 &&
	       !(tiers & (TIER_QUARANTINED | TIER_UNREADABLE));
}

static uint32_t first_missing(const prompt_t *prompt, uint8_t tier)
{
	uint32_t i = 0;

	while (i < prompt->n && is_there(prompt->tiers[i]) && (prompt->tiers[i] & tier)) {
		i++;
	}

	return i;
}

static void tier_names(uint8_t tiers, char out[64])
{
	snprintf(out, 64, "%s%s%s%s%s%s%s", tiers & KV_TIER_GPU ? "gpu " : "", tiers & KV_TIER_CPU ? "cpu " : "",
		 tiers & KV_TIER_DISK ? "disk " : "", tiers & KV_TIER_REMOTE ? "remote " : "",
		 tiers & TIER_WRITING ? "being-written " : "", tiers & TIER_QUARANTINED ? "quarantined " : "",
		 tiers & TIER_UNREADABLE ? "unreadable " : "");
	if (!out[0]) {
		snprintf(out, 64, "-");
	}
}

/* Blocks of a window or state are there by themselves: what hits depends on where a request goes on. */
static void print_unchained(const prompt_t *prompt)
{
	uint32_t there = 0;

	for (uint32_t i = 0; i < prompt->n; i++) {
		there += (uint32_t)is_there(prompt->tiers[i]);
	}
	printf("%u of %u blocks of this %s group are there\n", there, prompt->n,
	       prompt->group.rule == KVC_RULE_WINDOW ? "window" : "state");
}

static void print_table(const kvctl_t *ctl, const prompt_t *prompt)
{
	uint32_t hit = first_missing(prompt, 0xff), cpu = first_missing(prompt, KV_TIER_CPU);
	uint32_t unit = prompt->group.block_tokens;

	printf("%-6s %-15s %-32s %s\n", "block", "tokens", "key", "where");
	for (uint32_t i = 0; i < prompt->n; i++) {
		char key[33], tiers[64], range[32];

		kv_key_format((const kv_key_t *)(const void *)&prompt->keys[i], key);
		tier_names(prompt->tiers[i], tiers);
		snprintf(range, sizeof range, "%u-%u", i * unit, (i + 1) * unit - 1);
		printf("%s%-6u %-15s %s %s%s\n", i == hit ? kvctl_tone(ctl, KVCTL_BAD) : "", i, range, key, tiers,
		       i == hit ? kvctl_tone_end(ctl) : "");
	}
	if (prompt->group.rule != KVC_RULE_FULL) {
		print_unchained(prompt);
		return;
	}
	printf("%u of %u blocks would hit (%u tokens of %u): %u in CPU memory, %u from disk\n", hit, prompt->n,
	       hit * unit, prompt->n_tokens, cpu, hit - cpu);
	if (hit < prompt->n) {
		printf("block %u is missing: %s\n", hit, why_text(prompt->why));
	}
	if (prompt->n_tokens % unit) {
		printf("the last %u tokens fill no block\n", prompt->n_tokens % unit);
	}
}

static void print_document(const prompt_t *prompt)
{
	struct json_object *json = json_object_new_object(), *blocks = json_object_new_array_ext((int)prompt->n);
	uint32_t hit = first_missing(prompt, 0xff);

	for (uint32_t i = 0; i < prompt->n; i++) {
		struct json_object *block = json_object_new_object();
		char key[33];

		kv_key_format((const kv_key_t *)(const void *)&prompt->keys[i], key);
		json_object_object_add(block, "key", json_object_new_string(key));
		json_object_object_add(block, "cpu", json_object_new_boolean((prompt->tiers[i] & KV_TIER_CPU) != 0));
		json_object_object_add(block, "disk", json_object_new_boolean((prompt->tiers[i] & KV_TIER_DISK) != 0));
		json_object_object_add(block, "being_written",
				       json_object_new_boolean((prompt->tiers[i] & TIER_WRITING) != 0));
		json_object_object_add(block, "quarantined",
				       json_object_new_boolean((prompt->tiers[i] & TIER_QUARANTINED) != 0));
		json_object_object_add(block, "unreadable",
				       json_object_new_boolean((prompt->tiers[i] & TIER_UNREADABLE) != 0));
		json_object_array_add(blocks, block);
	}
	json_object_object_add(json, "tokens", json_object_new_uint64(prompt->n_tokens));
	json_object_object_add(json, "hash_tokens", json_object_new_uint64(prompt->info.hash_tokens));
	json_object_object_add(json, "group", json_object_new_uint64(prompt->group.group));
	json_object_object_add(json, "block_tokens", json_object_new_uint64(prompt->group.block_tokens));
	json_object_object_add(json, "epoch", json_object_new_uint64(prompt->info.epoch));
	json_object_object_add(json, "hit_blocks", json_object_new_uint64(hit));
	json_object_object_add(json, "hit_cpu_blocks", json_object_new_uint64(first_missing(prompt, KV_TIER_CPU)));
	json_object_object_add(json, "why",
			       json_object_new_string(why_name(hit < prompt->n ? prompt->why : KV_WHY_NONE)));
	json_object_object_add(json, "blocks", blocks);
	kvctl_print_json(json);
	json_object_put(json);
}

/* The group asked for, or the first. */
static int group_of(const kvctl_t *ctl, const kvc_space_t *space, const char *number, kvc_group_info_t *group)
{
	kvc_group_info_t groups[KV_MAX_GROUPS];
	uint32_t count = kvc_space_groups(space, groups, KV_MAX_GROUPS);
	uint64_t want = groups[0].group;

	if (number && kv_parse_u64(number, &want) != KV_OK) {
		return kvctl_error(ctl, KV_ERR_ARG, "explain: --group is a number, not %s", number);
	}
	for (uint32_t i = 0; i < count; i++) {
		if (groups[i].group == want) {
			*group = groups[i];
			return 0;
		}
	}

	return kvctl_error(ctl, KV_ERR_ARG, "explain: the space has no group %s", number);
}

static int query_daemon(const kvctl_t *ctl, kvc_space_t *space, prompt_t *prompt)
{
	uint32_t cap, units;
	kvc_status_t status;
	int code = group_of(ctl, space, ctl->given[KVCTL_GROUP], &prompt->group);

	if (code != 0) {
		return code;
	}
	prompt->info.struct_size = sizeof prompt->info;
	kvc_space_get_info(space, &prompt->info);
	units = prompt->group.block_tokens / prompt->info.hash_tokens;
	cap = prompt->n_tokens / prompt->info.hash_tokens;
	prompt->keys = malloc((cap + 1u) * sizeof *prompt->keys);
	prompt->tiers = calloc(cap + 1u, 1);
	if (!prompt->keys || !prompt->tiers) {
		return kvctl_error(ctl, KV_ERR_NOMEM, "out of memory for %u keys", cap);
	}
	status = kvc_keys_of(
		space, &(kvc_prompt_t){sizeof(kvc_prompt_t), prompt->tokens, prompt->n_tokens, ctl->given[KVCTL_SALT]},
		prompt->keys, cap, &prompt->n);
	if (status == KVC_OK) {
		prompt->n /= units;
		for (uint32_t i = 0; i < prompt->n; i++) {
			prompt->keys[i] = prompt->keys[(i + 1) * units - 1];
		}
		status = kvc_explain_group(space, prompt->group.group, prompt->keys, prompt->n, prompt->tiers,
					   &prompt->why);
	}

	return status == KVC_OK ? 0 : kvctl_failed(ctl, status);
}

static int explain(const kvctl_t *ctl, const char *identity, prompt_t *prompt)
{
	kvc_space_t *space = NULL;
	kvc_t *kvc = NULL;
	int code = kvctl_attach(ctl, &kvc);

	if (code != 0) {
		return code;
	}
	code = kvctl_open_space(ctl, kvc, identity, &space);
	if (code == 0) {
		code = query_daemon(ctl, space, prompt);
	}
	if (code == 0 && ctl->json) {
		print_document(prompt);
	} else if (code == 0) {
		print_table(ctl, prompt);
	}
	kvc_detach(kvc);
	if (code == 0 && first_missing(prompt, 0xff) < prompt->n) {
		code = kv_status_exit_code(KV_MISS);
	}

	return code;
}

int kvctl_explain(const kvctl_t *ctl)
{
	struct json_object *space = NULL;
	prompt_t prompt = {0};
	char *text;
	int code = kv_status_exit_code(KV_ERR_ARG);

	if (!ctl->given[KVCTL_TOKENS]) {
		return kvctl_error(ctl, KV_ERR_ARG,
				   "explain: --tokens is needed: \"1,2,3\", @FILE or - for standard input");
	}
	text = kvctl_text_of(ctl, ctl->given[KVCTL_TOKENS]);
	if (text) {
		code = parse_tokens(ctl, text, &prompt);
	}
	if (code == 0) {
		code = kvctl_find_space(ctl, &space);
	}
	if (code == 0) {
		code = explain(ctl, kvctl_str(space, "identity"), &prompt);
	}
	json_object_put(space);
	free(text);
	free(prompt.tokens);
	free(prompt.keys);
	free(prompt.tiers);

	return code;
}
