/* chunks.h -- a body in chunks (RFC 9112, 7.1), piece by piece. Extensions and trailers are read and dropped. */
#ifndef KVP_CHUNKS_H
#define KVP_CHUNKS_H

#include <stddef.h>
#include <stdint.h>

typedef enum kvp_chunks_result {
	KVP_CHUNKS_MORE, /* all of the text is read */
	KVP_CHUNKS_DATA, /* a piece of the body */
	KVP_CHUNKS_END,  /* the body has ended; what is left of the text is behind it */
	KVP_CHUNKS_BAD   /* this is none, or its extensions or trailers are longer than the limit */
} kvp_chunks_result_t;

/* All zero but for `spare` is a good start. */
typedef struct kvp_chunks {
	int state;
	uint64_t left; /* bytes of the chunk */
	size_t spare;  /* bytes of extensions and trailers that may still come */
} kvp_chunks_t;

/* Read from *at on, up to `end`; *at is then behind what was read. *data, *len: a piece of the body, in the text. */
kvp_chunks_result_t kvp_chunks_read(kvp_chunks_t *chunks, const char **at, const char *end, const char **data,
				    size_t *len);

#endif
