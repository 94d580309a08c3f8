/* json.h -- writing one JSON object into a buffer that may be too small: counts on, like snprintf.
 *
 *   open('{') -> members -> close('}');   open('[') -> elements (name NULL) -> close(']')
 */
#ifndef KVD_CORE_JSON_H
#define KVD_CORE_JSON_H

#include <stddef.h>
#include <stdint.h>

typedef struct kvd_json {
	char *out;
	size_t cap;
	size_t len; /* bytes needed so far, without the NUL */
	int comma;  /* the next element needs one before it */
} kvd_json_t;

void kvd_json_open(kvd_json_t *json, const char *name, char bracket);
void kvd_json_close(kvd_json_t *json, char bracket);
/* Control characters, quotes and backslashes are escaped. */
void kvd_json_text(kvd_json_t *json, const char *name, const char *value);
void kvd_json_u64(kvd_json_t *json, const char *name, uint64_t value);
void kvd_json_bool(kvd_json_t *json, const char *name, int value);

#endif
