/* The options share.*: who is given which part of what. */
#include "options.h"

#include "kv/units.h"

#include <stdio.h>
#include <string.h>

#define RESOURCES 3u
#define DISK      1u

static const char *const names[RESOURCES] = {"share.cpu", "share.disk", "share.index"};
static const char *const max_names[RESOURCES] = {"share.max_cpu", "share.max_disk", "share.max_index"};

typedef struct list {
	const char *name, *words;
	uint32_t what;
} list_t;

static uint64_t total_of(const kvd_options_t *options, uint32_t what)
{
	const uint64_t totals[RESOURCES] = {options->cpu_size, options->nvme_size, options->index_max_blocks};

	return totals[what];
}

/* "40%", "2GiB" or, of the index, "5000". 0: none of these. */
static uint64_t parse(const char *word, size_t len, uint64_t total, int is_size)
{
	char text[40];
	uint64_t value = 0;

	if (len == 0 || len >= sizeof text) {
		return 0;
	}
	memcpy(text, word, len);
	text[len] = '\0';
	if (text[len - 1] == '%') {
		text[len - 1] = '\0';
		return kv_parse_u64(text, &value) == KV_OK && value <= 100
			       ? total / 100u * value + total % 100u * value / 100u
			       : 0;
	}

	return (is_size ? kv_parse_size(text, &value) : kv_parse_u64(text, &value)) == KV_OK ? value : 0;
}

/* The value of "name=value" if it is this namespace's, else NULL. */
static const char *value_of(const char *word, size_t len, const char *ns, size_t ns_len)
{
	return len > ns_len && word[ns_len] == '=' && memcmp(word, ns, ns_len) == 0 ? word + ns_len + 1 : NULL;
}

/* What the list gives the namespace; 0: nothing. */
static uint64_t part_of(const kvd_options_t *options, const char *list, const char *ns, uint32_t what)
{
	const char *word;
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(list, i, &word)) > 0; i++) {
		const char *value = value_of(word, len, ns, strlen(ns));

		if (value) {
			return parse(value, (size_t)(word + len - value), total_of(options, what), what < 2);
		}
	}

	return 0;
}

void kvd_shares_given(const kvd_options_t *options, const char *ns, uint64_t given[3], uint64_t most[3])
{
	for (uint32_t what = 0; what < RESOURCES; what++) {
		given[what] = part_of(options, options->share[what], ns, what);
		most[what] = part_of(options, options->share_max[what], ns, what);
	}
}

static int is_namespace(const kvd_options_t *options, const char *word, size_t len)
{
	const char *ns;
	size_t ns_len;

	for (uint32_t i = 0; (ns_len = kvd_list_word(options->namespaces, i, &ns)) > 0; i++) {
		if (ns_len == len && memcmp(ns, word, len) == 0) {
			return 1;
		}
	}

	return 0;
}

/* One list: known namespaces, each once, with a part that can be read. */
static kv_status_t check_list(const kvd_options_t *options, const list_t *list, char *why, size_t cap)
{
	const char *word, *equals, *other;
	size_t len;

	for (uint32_t named = 0; (len = kvd_list_word(list->words, named, &word)) > 0; named++) {
		equals = memchr(word, '=', len);
		if (!equals || !is_namespace(options, word, (size_t)(equals - word))) {
			snprintf(why, cap, "%s: \"%.*s\" is not name=part of one of the namespaces", list->name,
				 (int)len, word);
			return KV_ERR_CONFIG;
		}
		if (parse(equals + 1, (size_t)(word + len - equals - 1), total_of(options, list->what),
			  list->what < 2) == 0) {
			snprintf(why, cap, "%s: \"%.*s\" gives neither 1%% to 100%% nor %s", list->name, (int)len, word,
				 list->what < 2 ? "a size" : "a number of blocks");
			return KV_ERR_CONFIG;
		}
		for (uint32_t i = 0; i < named; i++) {
			size_t other_len = kvd_list_word(list->words, i, &other);

			if (value_of(other, other_len, word, (size_t)(equals - word))) {
				snprintf(why, cap, "%s: \"%.*s\" is there twice", list->name, (int)(equals - word),
					 word);
				return KV_ERR_CONFIG;
			}
		}
	}

	return KV_OK;
}

/* The shares together, and each beside its maximum. */
static kv_status_t check_parts(const kvd_options_t *options, uint32_t what, char *why, size_t cap)
{
	uint64_t sum = 0, total = total_of(options, what);
	uint32_t without = 0;
	const char *word;
	char name[65];
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(options->namespaces, i, &word)) > 0; i++) {
		snprintf(name, sizeof name, "%.*s", (int)len, word);
		uint64_t share = part_of(options, options->share[what], name, what);
		uint64_t most = part_of(options, options->share_max[what], name, what);

		if (most > 0 && most < share) {
			snprintf(why, cap, "%s: \"%s\" may have less than its share (%s)", max_names[what], name,
				 names[what]);
			return KV_ERR_CONFIG;
		}
		if (most > 0 && what == DISK && options->nvme_path[0] && most < options->nvme_file_size) {
			snprintf(why, cap, "%s: \"%s\" may have less than one slot file (nvme.file_size)",
				 max_names[what], name);
			return KV_ERR_CONFIG;
		}
		sum = sum + share < sum ? UINT64_MAX : sum + share;
		without += share == 0;
	}
	if (sum > total || (without > 0 && sum == total)) {
		snprintf(why, cap, "%s: the shares leave nothing for other namespaces, or are more than there is",
			 names[what]);
		return KV_ERR_CONFIG;
	}

	return KV_OK;
}

kv_status_t kvd_shares_check(const kvd_options_t *options, char *why, size_t cap)
{
	kv_status_t status = KV_OK;

	for (uint32_t what = 0; what < RESOURCES && status == KV_OK; what++) {
		status = check_list(options, &(list_t){names[what], options->share[what], what}, why, cap);
		if (status == KV_OK) {
			status = check_list(options, &(list_t){max_names[what], options->share_max[what], what}, why,
					    cap);
		}
		if (status == KV_OK) {
			status = check_parts(options, what, why, cap);
		}
	}

	return status;
}
