/* kv/text.h -- text built into a caller's buffer, counted like snprintf, and strings as JSON. */
#ifndef KV_TEXT_H
#define KV_TEXT_H

#include <stddef.h>
#include <stdint.h>

/* Always NUL-terminated when cap > 0; what does not fit is counted in len and left out. */
typedef struct kv_text {
	char *out;
	size_t cap;
	size_t len; /* bytes the whole text needs, without the NUL */
} kv_text_t;

static inline kv_text_t kv_text(char *out, size_t cap)
{
	if (cap > 0) {
		out[0] = '\0';
	}

	return (kv_text_t){out, cap, 0};
}

/* 1 when everything fitted. */
static inline int kv_text_fits(const kv_text_t *text)
{
	return text->len < text->cap;
}

void kv_text_add(kv_text_t *text, const char *data, size_t len);
void kv_text_addf(kv_text_t *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A JSON string with its quotes. Bytes that are not UTF-8 become U+FFFD, so that the document is always valid. */
void kv_text_json_n(kv_text_t *text, const char *data, size_t len);
void kv_text_json(kv_text_t *text, const char *string);

#endif
