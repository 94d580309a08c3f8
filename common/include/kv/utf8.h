/* kv/utf8.h -- UTF-8 as our formats allow it: shortest form, no surrogates, no control characters. */
#ifndef KV_UTF8_H
#define KV_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the character at data (1 to 4), or 0 when it is not well-formed UTF-8. *p_code (may be NULL) is its code
 * point. */
unsigned kv_utf8_next(const uint8_t *data, size_t len, uint32_t *p_code);

/* 1 when all of data is UTF-8 without control characters (C0, DEL, C1); with `lines` set, newline and tab are
 * allowed. */
int kv_utf8_clean(const uint8_t *data, size_t len, int lines);

#endif
