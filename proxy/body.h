/* body.h -- bodies of the OpenAI API: what the proxy must know of a request, and the bodies that it sends on.
 *
 * A request is passed on with all of its members, known or not. What differs between the two sides is kept apart: the
 * decode engine gets the client's max_tokens, stream and so on, the prefill engine one token and no stream. Members
 * named kv_transfer_params are dropped: clients do not choose what is handed over.
 */
#ifndef KVP_BODY_H
#define KVP_BODY_H

#include "kv/status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum kvp_api { KVP_COMPLETIONS, KVP_CHAT } kvp_api_t;

#define KVP_MODEL_MAX    255u
#define KVP_SALT_MAX     255u
#define KVP_TRANSFER_LEN 32u /* of a transfer id: hexadecimal digits */
#define KVP_PARAMS_MAX   384u
#define KVP_DEVICE_MAX   63u /* of the name of a GPU */

typedef struct kvp_body {
	char *common;              /* "{" and the members that both sides get; without "}" */
	char *own;                 /* those of the decode side alone, each behind a comma */
	char *tokenize;            /* body for /tokenize; NULL: not asked for, or the prompt is token ids */
	int stream, whole, opaque; /* whole: cannot be handed over. opaque: no tokens alone, it cannot be looked up */
	int has_completion_limit;  /* max_completion_tokens is there */
	char model[KVP_MODEL_MAX + 1], salt[KVP_SALT_MAX + 1];
	uint32_t *tokens; /* of a prompt of token ids; else NULL */
	uint32_t n_tokens;
	size_t text_bytes; /* of the prompt; each token has one at least */
} kvp_body_t;

/* Read a request. `tokenize`: make the body for /tokenize. KV_ERR_PROTO: `why` gets a sentence. KV_ERR_NOMEM. Free with
 * kvp_body_free(), after errors too. */
kv_status_t kvp_body_parse(kvp_api_t api, const char *data, size_t len, int tokenize, kvp_body_t *body, char why[128]);
void kvp_body_free(kvp_body_t *body);

/* Bodies to send, to be freed; NULL: out of memory. `params`: JSON of kv_transfer_params, or NULL. */
char *kvp_body_for_decode(const kvp_body_t *body, const char *params);
/* `transfer`: id of a hand-over that the decode engine waits for already; NULL: the prefill engine makes one. */
char *kvp_body_for_prefill(const kvp_body_t *body, const char *transfer);
/* Where a prefill engine is; "": not known. */
typedef struct kvp_origin {
	const char *peer;   /* its node */
	const char *device; /* its GPU, if it hands over in memory of that */
} kvp_origin_t;
/* The decode side's params of a hand-over dispatched together. */
void kvp_params_of_transfer(const char *transfer, const kvp_origin_t *from, char out[KVP_PARAMS_MAX]);

/* The GPU that a prefill engine's answer names; `device` stays as it is where it names none. */
void kvp_answer_device(const char *data, size_t len, char device[KVP_DEVICE_MAX + 1]);
/* kv_transfer_params of a prefill engine's answer as JSON, to be freed; NULL: null, or none. KV_ERR_PROTO: the answer
 * is not a JSON object. */
kv_status_t kvp_answer_params(const char *data, size_t len, char **p_params);
/* Token ids of an answer of /tokenize, to be freed. KV_ERR_PROTO: it has none. */
kv_status_t kvp_answer_tokens(const char *data, size_t len, uint32_t **p_tokens, uint32_t *p_n);

/* An error in OpenAI's form, to be freed; NULL: out of memory. */
char *kvp_error_text(const char *message, const char *type, unsigned code);

#endif
