/* UTF-8 checks; eight plain ASCII bytes at a time. */
#include "kv/utf8.h"

#include <string.h>

static int is_tail(uint8_t byte)
{
	return (byte & 0xc0u) == 0x80u;
}

unsigned kv_utf8_next(const uint8_t *data, size_t len, uint32_t *p_code)
{
	static const uint32_t least[5] = {0, 0, 0x80, 0x800, 0x10000};
	uint32_t code;
	unsigned n;

	if (len == 0) {
		return 0;
	}

	if (data[0] < 0x80) {
		n = 1;
		code = data[0];
	} else if (data[0] >= 0xc2 && data[0] < 0xe0) {
		n = 2;
		code = data[0] & 0x1fu;
	} else if (data[0] >= 0xe0 && data[0] < 0xf0) {
		n = 3;
		code = data[0] & 0x0fu;
	} else if (data[0] >= 0xf0 && data[0] < 0xf5) {
		n = 4;
		code = data[0] & 0x07u;
	} else {
		return 0;
	}

	if (n > len) {
		return 0;
	}
	for (unsigned i = 1; i < n; i++) {
		if (!is_tail(data[i])) {
			return 0;
		}
		code = code << 6 | (data[i] & 0x3fu);
	}

	if (code < least[n] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) {
		return 0;
	}
	if (p_code) {
		*p_code = code;
	}

	return n;
}

/* All eight bytes in 0x20..0x7e. */
static int eight_plain(const uint8_t *data)
{
	const uint64_t high = UINT64_C(0x8080808080808080), ones = UINT64_C(0x0101010101010101);
	uint64_t v;

	memcpy(&v, data, sizeof v);
	/* A byte below 0x20 borrows from its high bit in the second term, 0x7f carries into it in the third. A borrow
	 * or carry into a neighbour needs a byte that is refused already. */
	return ((v | (v - ones * 0x20) | (v + ones)) & high) == 0;
}

int kv_utf8_clean(const uint8_t *data, size_t len, int lines)
{
	size_t at = 0;

	while (at < len) {
		uint32_t code;
		unsigned n;

		if (len - at >= 8 && eight_plain(data + at)) {
			at += 8;
			continue;
		}

		n = kv_utf8_next(data + at, len - at, &code);
		if (n == 0) {
			return 0;
		}
		if (code < 0x20 && !(lines && (code == '\n' || code == '\t'))) {
			return 0;
		}
		if (code >= 0x7f && code < 0xa0) {
			return 0;
		}
		at += n;
	}

	return 1;
}
