/* A body in chunks. */
#include "chunks.h"

#include <string.h>

#define SIZE_MOST (UINT64_MAX >> 5) /* of a chunk that may have one more digit */

/* What comes next. */
enum {
	SIZE_FIRST, /* a digit of a chunk's size */
	SIZE,       /* another one, or its end */
	BLANK,      /* blanks, then an extension */
	EXTENSION,
	SIZE_LF,
	DATA,
	DATA_CR,
	DATA_LF,
	TRAILER_FIRST, /* a trailer's name, or the empty line */
	TRAILER_NAME,
	TRAILER_VALUE,
	TRAILER_LF,
	LAST_LF,
	ENDED
};

static int digit_of(char c)
{
	return c >= '0' && c <= '9'   ? c - '0'
	       : c >= 'a' && c <= 'f' ? c - 'a' + 10
	       : c >= 'A' && c <= 'F' ? c - 'A' + 10
				      : -1;
}

static int is_text(char c)
{
	return ((unsigned char)c >= ' ' && c != 0x7f) || c == '\t';
}

static int is_name(char c)
{
	return is_text(c) && c > ' ' && !strchr("\"(),/:;<=>?@[\\]{}", c);
}

/* The state after a character of a chunk's first line; -1: it is wrong there. */
static int next_of_size(kvp_chunks_t *chunks, char c)
{
	const int digit = digit_of(c);

	if (chunks->state == SIZE_LF) {
		return c != '\n' ? -1 : chunks->left > 0 ? DATA : TRAILER_FIRST;
	}
	if (chunks->state <= SIZE && digit >= 0) {
		if (chunks->left > SIZE_MOST) {
			return -1;
		}
		chunks->left = chunks->left << 4 | (unsigned)digit;
		return SIZE;
	}
	if (chunks->state == SIZE_FIRST) {
		return -1;
	}
	if (c == '\r' && chunks->state != BLANK) {
		return SIZE_LF;
	}
	if (chunks->state == EXTENSION) {
		return is_text(c) ? EXTENSION : -1;
	}

	return c == ';' ? EXTENSION : c == ' ' || c == '\t' ? BLANK : -1;
}

static int next_of_trailer(int state, char c)
{
	switch (state) {
	case TRAILER_FIRST:
		return c == '\r' ? LAST_LF : is_name(c) ? TRAILER_NAME : -1;
	case TRAILER_NAME:
		return c == ':' ? TRAILER_VALUE : is_name(c) ? TRAILER_NAME : -1;
	case TRAILER_VALUE:
		return c == '\r' ? TRAILER_LF : is_text(c) ? TRAILER_VALUE : -1;
	case TRAILER_LF:
		return c == '\n' ? TRAILER_FIRST : -1;
	default:
		return c == '\n' ? ENDED : -1;
	}
}

static int next_of(kvp_chunks_t *chunks, char c)
{
	if (chunks->state == DATA_CR) {
		return c == '\r' ? DATA_LF : -1;
	}
	if (chunks->state == DATA_LF) {
		return c == '\n' ? SIZE_FIRST : -1;
	}

	return chunks->state < DATA ? next_of_size(chunks, c) : next_of_trailer(chunks->state, c);
}

kvp_chunks_result_t kvp_chunks_read(kvp_chunks_t *chunks, const char **at, const char *end, const char **data,
				    size_t *len)
{
	while (*at < end) {
		if (chunks->state == DATA) {
			*data = *at;
			*len = (uint64_t)(end - *at) < chunks->left ? (size_t)(end - *at) : (size_t)chunks->left;
			*at += *len;
			chunks->left -= *len;
			chunks->state = chunks->left > 0 ? DATA : DATA_CR;
			return KVP_CHUNKS_DATA;
		}
		chunks->state = next_of(chunks, *(*at)++);
		if (chunks->state == ENDED) {
			return KVP_CHUNKS_END;
		}
		if (chunks->state < 0) {
			return KVP_CHUNKS_BAD;
		}
		if (chunks->state == BLANK || chunks->state == EXTENSION || chunks->state >= TRAILER_FIRST) {
			if (chunks->spare == 0) {
				return KVP_CHUNKS_BAD;
			}
			chunks->spare--;
		}
	}

	return KVP_CHUNKS_MORE;
}
