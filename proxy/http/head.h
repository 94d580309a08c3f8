/* head.h -- the head of a request: its first line and headers, read as RFC 9112 has them and no other way, so that no
 * server before or behind reads another request (decision 080). */
#ifndef KVP_HEAD_H
#define KVP_HEAD_H

#include <stddef.h>
#include <stdint.h>

/* The fields are "name\0value\0" one behind the other, values without blanks around them, and "\0". */
typedef struct kvp_head {
	const char *method;
	const char *target; /* a path with a query, or "*"; of CONNECT what it says */
	const char *fields;
	int minor;          /* version 1.0 or 1.1 of HTTP; later ones count as 1.1 */
	int is_chunked;     /* the body is; otherwise it has `length` bytes */
	uint64_t length;    /* UINT64_MAX: as many or more */
	int is_kept;        /* the client wants to send more requests */
	int expects;        /* 100-continue: it waits before it sends the body */
	const char *refuse; /* why the request is refused; NULL: it is not */
} kvp_head_t;

/* Bytes of a head that begins the text; 0: its end has not come; -1: no head begins like that. *scanned: bytes that an
 * earlier call has seen, 0 at first. */
long kvp_head_scan(const char *text, size_t len, size_t *scanned);
/* Read a whole head, in place. Returns 0, or the status that it is refused with: what follows on the connection cannot
 * be known then. */
unsigned kvp_head_parse(char *text, size_t len, kvp_head_t *head);

/* The next field behind `field`, which has begun as head->fields; NULL: that was the last. */
const char *kvp_head_next(const char *field);
/* The value of a field. */
const char *kvp_head_value(const char *field);
/* The first value by a name; NULL: there is none. */
const char *kvp_head_find(const kvp_head_t *head, const char *name);

#endif
