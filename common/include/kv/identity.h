/* kv/identity.h -- who may share a block: the canonical identity text of a space and its root digest.
 *
 * One line a field, "name=value\n", in the order of the table, values percent-encoded (control characters, '%',
 * '=' and newlines), empty optional fields left out. The root digest is SHA-256 of
 * "kvd identity 1\nnamespace=...\n" followed by that text; the epoch is not part of it.
 */
#ifndef KV_IDENTITY_H
#define KV_IDENTITY_H

#include "kv/status.h"
#include "kv/types.h"

#define KV_IDENTITY_MAX_TEXT  4096u
#define KV_IDENTITY_MAX_VALUE 1024u

/* X(name, required, help) */
#define KV_IDENTITY_FIELDS(X)                                                                                          \
	X(model, 1, "model name as the operator knows it")                                                             \
	X(weights, 1, "fingerprint of the weights, or a revision the operator vouches for")                            \
	X(dtype, 1, "type of the cached values, e.g. bf16, fp8_e4m3")                                                  \
	X(quantization, 1, "quantisation and where the scales come from; `none`")                                      \
	X(rope, 1, "rope parameters: theta, scaling, ...; `none`")                                                     \
	X(lora, 1, "adapter: the engine's name, which events publish, and `@` with a revision; `none`")                \
	X(hash, 1, "key derivation: `kv1` for our own chain, else the engine's algorithm and seed")                    \
	X(hash_tokens, 1, "tokens a unit of the chain")                                                                \
	X(groups, 1,                                                                                                   \
	  "block groups, comma separated: `0:full:<block tokens>`, `1:window:<block tokens>:<window tokens>`, "        \
	  "`2:state:<block tokens>`")                                                                                  \
	X(layout, 1, "canonical layout text of the pool block (kvk/layout.h)")                                         \
	X(page_format, 1, "inner page format of opaque pages (instruction set, packing, rank split); `plain`")         \
	X(extra, 0, "anything else that must not be mixed, canonical text")                                            \
	X(device, 0, "UUID of the GPU whose memory holds the blocks; absent: host memory and disk")

typedef struct kv_identity {
#define KV_IDENTITY_MEMBER(name, required, help) const char *name;
	KV_IDENTITY_FIELDS(KV_IDENTITY_MEMBER)
#undef KV_IDENTITY_MEMBER
} kv_identity_t;

/* Write the canonical text and a NUL. KV_ERR_IDENTITY: a required field is missing or empty; *p_field names it
 * (may be NULL). KV_ERR_TOO_BIG: a value or the text is too long. */
kv_status_t kv_identity_text(const kv_identity_t *identity, char *out, size_t cap, const char **p_field);

/* Parse a canonical text; refuses anything kv_identity_text() would not have written (order, encoding, unknown or
 * repeated names). Values point into `storage` (at least len + number of fields bytes; less: KV_ERR_ARG); absent
 * optional fields are "". KV_ERR_IDENTITY: the text is not canonical, *p_field names the first field that is wrong
 * ("text": something after the last). KV_ERR_TOO_BIG: over KV_IDENTITY_MAX_TEXT. */
kv_status_t kv_identity_parse(const char *text, size_t len, kv_identity_t *identity, char *storage, size_t cap,
			      const char **p_field);

/* Root digest of a canonical text (one that kv_identity_parse() accepts; not checked again) inside a namespace.
 * KV_ERR_ARG: no namespace. KV_ERR_TOO_BIG: the namespace or the text is too long. */
kv_status_t kv_identity_root(const char *ns, const char *text, size_t len, uint8_t root[32]);

/* Value of `hash_tokens` and the list of groups: "<id>:full:<block tokens>", "<id>:window:<block tokens>:<window
 * tokens>", "<id>:state:<block tokens>", ids ascending. KV_ERR_TOO_BIG: more than `cap` groups. groups[] may be
 * partly written on error. KV_ERR_IDENTITY when the text is malformed. */
typedef struct kv_group {
	uint8_t id;
	kv_group_rule_t rule;
	uint32_t block_tokens; /* a multiple of hash_tokens */
	uint32_t window;       /* KV_RULE_WINDOW: tokens */
} kv_group_t;
kv_status_t kv_identity_groups(const kv_identity_t *identity, uint32_t *p_hash_tokens, kv_group_t *groups, uint32_t cap,
			       uint32_t *p_count);

#endif
