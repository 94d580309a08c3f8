/* kv/units.h -- sizes and durations as people write them, and the nearest known name to a misspelt one. */
#ifndef KV_UNITS_H
#define KV_UNITS_H

#include "kv/status.h"

#include <stddef.h>

/* "4096", "64KiB", "1.5GiB", "2TB" (powers of 1000) -> bytes. A bare number is bytes. KV_ERR_ARG: malformed, negative
 * or over 2^63. */
kv_status_t kv_parse_size(const char *text, uint64_t *p_bytes);

/* "250us", "20ms", "1.5s", "10m", "2h" -> nanoseconds. A bare number other than 0 is refused: a duration has a unit. */
kv_status_t kv_parse_duration(const char *text, uint64_t *p_ns);

/* A plain decimal integer, whole string. */
kv_status_t kv_parse_u64(const char *text, uint64_t *p_value);

/* "1.5GiB", "64KiB", "12B"; "1.5s", "20ms", "250us". Always NUL-terminated. Returns out. */
char *kv_format_size(uint64_t bytes, char *out, size_t cap);
char *kv_format_duration(uint64_t ns, char *out, size_t cap);

/* The name with the smallest edit distance to `word`, or NULL when none is near (distance over a third of its length,
 * at least 2). */
const char *kv_nearest(const char *word, const char *const *names, size_t count);

#endif
