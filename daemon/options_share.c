/* The options share.*: who is given which part of what. */
#include "options.h"

#include "kv/units.h"

#include <stdio.h>
#include <string.h>

#define RESOURCES 3u

static const char *const names[RESOURCES] = {"share.cpu", "share.disk", "share.index"};

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
		return kv_parse_u64(text, &value) == KV_OK && value <= 100 ? total / 100u * value : 0;
	}

	return (is_size ? kv_parse_size(text, &value) : kv_parse_u64(text, &value)) == KV_OK ? value : 0;
}

/* The value of "name=value" if it is this namespace's, else NULL. */
static const char *value_of(const char *word, size_t len, const char *ns, size_t ns_len)
{
	return len > ns_len && word[ns_len] == '=' && memcmp(word, ns, ns_len) == 0 ? word + ns_len + 1 : NULL;
}

void kvd_shares_given(const kvd_options_t *options, const char *ns, uint64_t given[3])
{
	for (uint32_t what = 0; what < RESOURCES; what++) {
		const char *word;
		size_t len;

		given[what] = 0;
		for (uint32_t i = 0; (len = kvd_list_word(options->share[what], i, &word)) > 0; i++) {
			const char *value = value_of(word, len, ns, strlen(ns));

			if (value) {
				given[what] =
					parse(value, (size_t)(word + len - value), total_of(options, what), what < 2);
			}
		}
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

static kv_status_t check_one(const kvd_options_t *options, uint32_t what, char *why, size_t cap)
{
	uint64_t sum = 0, total = total_of(options, what), value;
	uint32_t named = 0, namespaces = 0;
	const char *word, *equals, *other;
	size_t len;

	while (kvd_list_word(options->namespaces, namespaces, &word) > 0) {
		namespaces++;
	}
	for (; (len = kvd_list_word(options->share[what], named, &word)) > 0; named++) {
		equals = memchr(word, '=', len);
		if (!equals || !is_namespace(options, word, (size_t)(equals - word))) {
			snprintf(why, cap, "%s: \"%.*s\" is not name=part of one of the namespaces", names[what],
				 (int)len, word);
			return KV_ERR_CONFIG;
		}
		value = parse(equals + 1, (size_t)(word + len - equals - 1), total, what < 2);
		if (value == 0) {
			snprintf(why, cap, "%s: \"%.*s\" gives neither 1%% to 100%% nor %s", names[what], (int)len,
				 word, what < 2 ? "a size" : "a number of blocks");
			return KV_ERR_CONFIG;
		}
		for (uint32_t i = 0; i < named; i++) {
			size_t other_len = kvd_list_word(options->share[what], i, &other);

			if (value_of(other, other_len, word, (size_t)(equals - word))) {
				snprintf(why, cap, "%s: \"%.*s\" is there twice", names[what], (int)(equals - word),
					 word);
				return KV_ERR_CONFIG;
			}
		}
		sum = sum + value < sum ? UINT64_MAX : sum + value;
	}
	if (sum > total || (named < namespaces && sum == total)) {
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
		status = check_one(options, what, why, cap);
	}

	return status;
}
