/* The layouts of a space's groups as one text. */
#include "kvk/layout.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int are_equal(const kvk_layout_t *a, const kvk_layout_t *b)
{
	return a->heads == b->heads && a->layers == b->layers && a->block_tokens == b->block_tokens &&
	       a->k_dim == b->k_dim && a->v_dim == b->v_dim && a->dtype == b->dtype && a->inner == b->inner &&
	       a->page_bytes == b->page_bytes;
}

static uint32_t run_of(const kvk_layout_t *layouts, uint32_t count)
{
	uint32_t run = 1;

	while (run < count && are_equal(&layouts[0], &layouts[run])) {
		run++;
	}

	return run;
}

kv_status_t kvk_layouts_format(const kvk_layout_t *layouts, uint32_t count, char *out, size_t cap)
{
	kv_status_t status = count > 0 && cap > 0 ? KV_OK : KV_ERR_LAYOUT;
	size_t at = 0;

	for (uint32_t g = 0, run; g < count && status == KV_OK; g += run) {
		run = run_of(&layouts[g], count - g);
		if (run < count) {
			int n = snprintf(out + at, cap - at, "%s%u*", g > 0 ? ";" : "", run);

			status = n >= 0 && (size_t)n < cap - at ? KV_OK : KV_ERR_TOO_BIG;
			at += status == KV_OK ? (size_t)n : 0;
		}
		status = status == KV_OK ? kvk_layout_format(&layouts[g], out + at, cap - at) : status;
		at += status == KV_OK ? strlen(out + at) : 0;
	}

	return status;
}

static kv_status_t refuse(const char **p_why, const char *why)
{
	if (p_why) {
		*p_why = why;
	}

	return KV_ERR_LAYOUT;
}

/* "2*kvk1 ...": a run of groups at *p_at, which is left behind it. Without a number: all. */
static kv_status_t take_run(const char **p_at, kvk_layout_t *layouts, uint32_t left, const char **p_why)
{
	const char *end = strchr(*p_at, ';'), *text = *p_at;
	unsigned long run = left;
	kv_status_t status;
	char *after;

	if (*text >= '1' && *text <= '9') {
		run = strtoul(text, &after, 10);
		if (*after != '*' || run > left) {
			return refuse(p_why, "the layout text has layouts of more groups than there are");
		}
		text = after + 1;
	}
	status = kvk_layout_parse(text, end ? (size_t)(end - text) : strlen(text), &layouts[0], p_why);
	for (uint32_t i = 1; i < run && status == KV_OK; i++) {
		layouts[i] = layouts[0];
	}
	*p_at = end ? end + 1 : text + strlen(text);

	return status == KV_OK ? (kv_status_t)run : status;
}

kv_status_t kvk_layouts_parse(const char *text, size_t len, kvk_layout_t *layouts, uint32_t count, const char **p_why)
{
	char copy[KVK_LAYOUTS_TEXT_MAX], canonical[KVK_LAYOUTS_TEXT_MAX];
	const char *at = copy;
	uint32_t g = 0;

	if (len >= sizeof copy || memchr(text, '\0', len)) {
		return refuse(p_why, "the layout text is too long, or has a NUL");
	}
	memcpy(copy, text, len);
	copy[len] = '\0';
	do {
		kv_status_t run = g < count
					  ? take_run(&at, &layouts[g], count - g, p_why)
					  : refuse(p_why, "the layout text has layouts of more groups than there are");

		if (run < 0) {
			return run;
		}
		g += (uint32_t)run;
	} while (*at != '\0');
	if (g < count) {
		return refuse(p_why, "the layout text has layouts of fewer groups than there are");
	}
	if (kvk_layouts_format(layouts, count, canonical, sizeof canonical) != KV_OK || strcmp(copy, canonical) != 0) {
		return refuse(p_why, "the layout text is not in its canonical form");
	}

	return KV_OK;
}
