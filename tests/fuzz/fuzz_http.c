/* Any bytes as a request: a head that is accepted is written again and read as the same one; its chunks are the same
 * however they are cut. */
#include "http/chunks.h"
#include "http/head.h"
#include "kv/env.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define SPARE 100u

static char *write_head(const kvp_head_t *head)
{
	char *text = NULL;
	size_t len;
	FILE *out = open_memstream(&text, &len);

	fprintf(out, "%s %s HTTP/1.%d\r\n", head->method, head->target, head->minor);
	for (const char *at = *head->fields ? head->fields : NULL; at; at = kvp_head_next(at)) {
		const char *value = kvp_head_value(at);

		kv_assert(*at && !strpbrk(at, " \t:\r\n") && !strpbrk(value, "\r\n"));
		fprintf(out, "%s: %s\r\n", at, value);
	}
	fprintf(out, "\r\n");
	fclose(out);

	return text;
}

static void read_again(const kvp_head_t *head)
{
	char *text = write_head(head), *copy = strdup(text), *twice;
	const size_t len = strlen(text);
	kvp_head_t again;
	size_t scanned = 0;

	kv_assert(kvp_head_scan(text, len, &scanned) == (long)len);
	kv_assert(kvp_head_parse(text, len, &again) == 0);
	kv_assert(again.is_chunked == head->is_chunked && again.length == head->length);
	kv_assert(again.is_kept == head->is_kept && again.expects == head->expects);
	kv_assert(!(head->is_chunked && head->length > 0) && (head->minor > 0 || !head->is_chunked));
	twice = write_head(&again);
	kv_assert(strcmp(twice, copy) == 0);
	free(twice);
	free(copy);
	free(text);
}

/* Bytes of the body, in `out`; the text comes in steps. */
static size_t read_chunks(const char *text, size_t size, size_t step, char *out, kvp_chunks_result_t *result)
{
	kvp_chunks_t chunks = {.spare = SPARE};
	const char *at = text, *piece;
	size_t n = 0, len;

	*result = KVP_CHUNKS_MORE;
	while (*result == KVP_CHUNKS_MORE && at < text + size) {
		const char *end = (size_t)(text + size - at) < step ? text + size : at + step;

		while ((*result = kvp_chunks_read(&chunks, &at, end, &piece, &len)) == KVP_CHUNKS_DATA) {
			memcpy(out + n, piece, len);
			n += len;
		}
	}

	return n;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	char *text = malloc(size + 1), *whole = malloc(size + 1), *cut = malloc(size + 1);
	size_t scanned = 0, by_byte = 0;
	kvp_chunks_result_t result, other;
	kvp_head_t head;
	long len, same = 0;

	memcpy(text, data, size);
	len = kvp_head_scan(text, size, &scanned);
	for (size_t i = 1; i <= size && same == 0; i++) {
		same = kvp_head_scan(text, i, &by_byte);
	}
	kv_assert(len == same);
	if (len > 0) {
		if (kvp_head_parse(text, (size_t)len, &head) == 0) {
			read_again(&head);
		} else {
			kv_assert(head.refuse);
		}
	}
	len = len > 0 ? len : 0;
	scanned = read_chunks(text + len, size - (size_t)len, SIZE_MAX / 2, whole, &result);
	by_byte = read_chunks(text + len, size - (size_t)len, 1, cut, &other);
	kv_assert(result == other && scanned == by_byte && memcmp(whole, cut, scanned) == 0);
	free(text);
	free(whole);
	free(cut);

	return 0;
}
