/* pieces.h -- a text that lies in several places. What is sent on is the client's body with some of its members cut out
 * and others behind it, so it is sent from there. */
#ifndef KVP_PIECES_H
#define KVP_PIECES_H

#include <stddef.h>
#include <stdint.h>

#define KVP_PIECES_MAX 48u

typedef struct kvp_span {
	const char *data; /* NULL: nothing */
	size_t len;
} kvp_span_t;

typedef struct kvp_pieces {
	kvp_span_t at[KVP_PIECES_MAX];
	uint32_t n;
	char *tail; /* memory of the last piece, freed by the owner of the pieces */
} kvp_pieces_t;

#endif
