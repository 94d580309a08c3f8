/* prefix.h -- how much of a prompt the daemon of this node has.
 *
 * A thread of its own attaches to the daemon, to match only, and opens the spaces that engines have opened. Lookups are
 * made on the caller's thread in shared memory, without a system call. Without a daemon every prompt is unknown.
 */
#ifndef KVP_PREFIX_H
#define KVP_PREFIX_H

#include "kv/status.h"

#include <stdint.h>

typedef struct kvp_prefix kvp_prefix_t;

typedef struct kvp_prefix_question {
	const char *model; /* of the request: the name of an adapter, or of a model */
	const char *salt;  /* "": none */
	const uint32_t *tokens;
	uint32_t n;
} kvp_prefix_question_t;

/* KV_ERR_NOMEM, KV_ERR_LIMIT: no thread. A daemon that is not there yet is no error. */
kv_status_t kvp_prefix_open(const char *socket, kvp_prefix_t **p_prefix);
void kvp_prefix_close(kvp_prefix_t *prefix);

/* Tokens from the first one that are there, or -1: not known. By one thread. */
int64_t kvp_prefix_hit(kvp_prefix_t *prefix, const kvp_prefix_question_t *question);

#endif
