/* body.h -- bodies of the OpenAI API: what the proxy must know of a request, and the bodies that it sends on.
 *
 * A request is passed on with all of its members, known or not. What differs between the two sides is kept apart: the
 * decode engine gets the client's max_tokens, stream and so on, the prefill engine one token and no stream. A member
 * named kv_transfer_params is dropped: clients do not choose what is handed over. Members that the proxy knows may be
 * there once: of two, an engine could take another than the proxy.
 */
#ifndef KVP_BODY_H
#define KVP_BODY_H

#include "base/json.h"
#include "kv/status.h"

/* OTHER: what is not handed over; it goes to a decode engine as it is. */
typedef enum kvp_api { KVP_COMPLETIONS, KVP_CHAT, KVP_OTHER } kvp_api_t;

#define KVP_MODEL_MAX    255u
#define KVP_SALT_MAX     255u
#define KVP_TRANSFER_LEN 32u /* of a transfer id: hexadecimal digits */
#define KVP_PARAMS_MAX   384u
#define KVP_DEVICE_MAX   63u /* of the name of a GPU */

/* Members of a request that the proxy knows: name, and what becomes of it. */
#define KVP_MEMBER_LIST(X)                                                                                             \
	X(MODEL, model, KVP_ASKED)                                                                                     \
	X(PROMPT, prompt, KVP_ASKED)                                                                                   \
	X(MESSAGES, messages, KVP_ASKED)                                                                               \
	X(ADD_SPECIAL_TOKENS, add_special_tokens, KVP_ASKED)                                                           \
	X(ADD_GENERATION_PROMPT, add_generation_prompt, KVP_ASKED)                                                     \
	X(CONTINUE_FINAL_MESSAGE, continue_final_message, KVP_ASKED)                                                   \
	X(CHAT_TEMPLATE, chat_template, KVP_ASKED)                                                                     \
	X(CHAT_TEMPLATE_KWARGS, chat_template_kwargs, KVP_ASKED)                                                       \
	X(MM_PROCESSOR_KWARGS, mm_processor_kwargs, KVP_ASKED)                                                         \
	X(TOOLS, tools, KVP_ASKED)                                                                                     \
	X(MAX_TOKENS, max_tokens, KVP_OWN)                                                                             \
	X(MAX_COMPLETION_TOKENS, max_completion_tokens, KVP_OWN)                                                       \
	X(MIN_TOKENS, min_tokens, KVP_OWN)                                                                             \
	X(STREAM, stream, KVP_OWN)                                                                                     \
	X(STREAM_OPTIONS, stream_options, KVP_OWN)                                                                     \
	X(N, n, KVP_OWN)                                                                                               \
	X(BEST_OF, best_of, KVP_OWN)                                                                                   \
	X(ECHO, echo, KVP_OWN)                                                                                         \
	X(KV_TRANSFER_PARAMS, kv_transfer_params, KVP_DROPPED)                                                         \
	X(PROMPT_EMBEDS, prompt_embeds, KVP_READ)                                                                      \
	X(CACHE_SALT, cache_salt, KVP_READ)                                                                            \
	X(LOGPROBS, logprobs, KVP_READ)                                                                                \
	X(PROMPT_LOGPROBS, prompt_logprobs, KVP_READ)                                                                  \
	X(USE_BEAM_SEARCH, use_beam_search, KVP_READ)

typedef enum kvp_member {
#define KVP_MEMBER_ENUM(NAME, name, use) KVP_MEMBER_##NAME,
	KVP_MEMBER_LIST(KVP_MEMBER_ENUM)
#undef KVP_MEMBER_ENUM
		KVP_MEMBER_COUNT
} kvp_member_t;

typedef struct kvp_body {
	char *data; /* as it came; all spans lie in it */
	size_t len;
	kvp_span_t member[KVP_MEMBER_COUNT], value[KVP_MEMBER_COUNT]; /* member: with its name; value: NULL for null */
	kvp_span_t common[KVP_MEMBER_COUNT + 1];                      /* runs of members that both sides get */
	uint32_t commons;
	int stream, whole, opaque; /* whole: cannot be handed over. opaque: no tokens alone, it cannot be looked up */
	char model[KVP_MODEL_MAX + 1], salt[KVP_SALT_MAX + 1];
	uint32_t *tokens; /* of a prompt of token ids; else NULL */
	uint32_t n_tokens;
	size_t text_bytes; /* of the prompt, about; each token has one at least */
} kvp_body_t;

/* Read a request, but for KVP_OTHER: `data` is body->data from here on, also after errors. KV_ERR_PROTO, KV_ERR_LIMIT
 * (more token ids than most_tokens): `why` gets a sentence. KV_ERR_NOMEM. Free with kvp_body_free(). */
kv_status_t kvp_body_parse(kvp_api_t api, kvp_span_t data, uint32_t most_tokens, kvp_body_t *body, char why[128]);
/* Free the text: what was read of it stays, and nothing can be sent. */
void kvp_body_drop(kvp_body_t *body);
void kvp_body_free(kvp_body_t *body);

/* What is sent lies in body->data, but for the tail. 0: out of memory. `params`: JSON of kv_transfer_params, or NULL.
 */
int kvp_body_for_decode(const kvp_body_t *body, const char *params, kvp_pieces_t *out);
/* `transfer`: id of a hand-over that the decode engine waits for already; NULL: the prefill engine makes one. */
int kvp_body_for_prefill(const kvp_body_t *body, const char *transfer, kvp_pieces_t *out);
/* All of it. */
void kvp_body_as_it_is(const kvp_body_t *body, kvp_pieces_t *out);
/* For /tokenize. */
int kvp_body_for_tokenize(const kvp_body_t *body, kvp_pieces_t *out);
/* Where a prefill engine is; "": not known. */
typedef struct kvp_origin {
	const char *peer;   /* its node */
	const char *device; /* its GPU, if it hands over in memory of that */
} kvp_origin_t;
/* The decode side's params of a hand-over dispatched together. */
void kvp_params_of_transfer(const char *transfer, const kvp_origin_t *from, char out[KVP_PARAMS_MAX]);

/* The GPU that a prefill engine's answer names; `device` stays as it is where it names none. */
void kvp_answer_device(kvp_span_t answer, char device[KVP_DEVICE_MAX + 1]);
/* kv_transfer_params of a prefill engine's answer as JSON, to be freed; NULL: null, or none. KV_ERR_PROTO: the answer
 * is not a JSON object. */
kv_status_t kvp_answer_params(kvp_span_t answer, char **p_params);
/* Token ids of an answer of /tokenize, to be freed. KV_ERR_PROTO: it has none. KV_ERR_LIMIT: more than `most`. */
kv_status_t kvp_answer_tokens(kvp_span_t answer, uint32_t most, uint32_t **p_tokens, uint32_t *p_n);

/* An error in OpenAI's form, to be freed; NULL: out of memory. */
char *kvp_error_text(const char *message, unsigned status);

#endif
