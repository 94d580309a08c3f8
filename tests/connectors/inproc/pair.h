/* pair.h -- two engines on one daemon, each with a paged cache of its own: a producer and a consumer. */
#ifndef TESTS_CONNECTORS_PAIR_H
#define TESTS_CONNECTORS_PAIR_H

#include "connectors/rig.h"
#include "kvx_handover.h"

#define PAIR_BLOCKS      64u /* of a cache */
#define PAIR_LAYERS      3u
#define PAIR_TOKENS      16u   /* of a block */
#define PAIR_PAYLOAD     4096u /* bytes of a layer's block */
#define PAIR_MOST_TOKENS 32u   /* of a block of any shape */
#define PAIR_PROMPT      20u   /* most blocks of a prompt */
#define PAIR_MS          20000u

/* How a cache lies. Bytes of a block in a layer, and from one block to the next: payload and stride. */
typedef struct side_shape {
	kvk_paged_kind_t kind;
	kvk_inner_t inner;
	kvk_dtype_t dtype;
	uint32_t heads, tokens, dim, page_bytes;
	uint32_t payload, stride;
} side_shape_t;

/* What a test wants of an engine. 0: both roles, model "pair", a cache as above, what kvx.h says. */
typedef struct side_options {
	uint32_t roles;
	const char *model;
	const side_shape_t *shape;
	uint64_t buffer_bytes; /* for what kvx_insert() keeps */
	uint32_t attach_ms;    /* 0: until it is attached */
	int host;              /* the cache is in host memory, wherever those of others are (worker/wr_device.h) */
} side_options_t;

/* An engine. */
typedef struct side {
	kvx_t *kvx;
	side_shape_t shape;
	kvc_identity_t identity;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvk_layout_t layout;
	kvk_paged_t paged;
	void *base[PAIR_LAYERS];
	int host, opened;
} side_t;

void side_open(side_t *side, const char *socket, side_options_t options);
void side_close(side_t *side);
void side_await_ready(side_t *side);
kvx_stats_t side_stats(const side_t *side);
/* What the daemon calls its space. */
kvc_identity_t side_identity(side_t *side);

/* The prompt of conversation c, n tokens of it, lying in the cache's blocks from `first` on. */
typedef struct pair_prompt {
	uint32_t conversation, n_tokens;
	uint32_t tokens[PAIR_PROMPT * PAIR_MOST_TOKENS];
	uint32_t blocks[PAIR_PROMPT];
	kvx_prefix_t prefix; /* all of it */
} pair_prompt_t;
void pair_prompt_init(pair_prompt_t *prompt, uint32_t conversation, uint32_t n_tokens, uint32_t first);
/* The KV of tokens [from, to) is computed. */
void side_compute(side_t *side, const pair_prompt_t *prompt, uint32_t from, uint32_t to);
/* The KV of the prompt's first n tokens is in the cache, to the last byte. */
int side_holds(const side_t *side, const pair_prompt_t *prompt, uint32_t n);
/* The same of tokens [from, to). */
int side_holds_between(const side_t *side, const pair_prompt_t *prompt, uint32_t from, uint32_t to);
/* Nothing was ever written to the blocks of the prompt from token n on. */
int side_is_untouched(const side_t *side, const pair_prompt_t *prompt, uint32_t n);

/* `computed` tokens of it are in the cache. */
kvx_chunk_t pair_chunk(const pair_prompt_t *prompt, const char *transfer, uint32_t computed, int last);

/* Poll both (NULL: none) for that number of rounds. */
void pair_poll(side_t *a, side_t *b, uint32_t rounds);
/* Poll until it is no longer PENDING; fails the test after PAIR_MS. `other` may be NULL. */
void pair_await_send(side_t *side, side_t *other, const kvx_send_t *send, kvx_send_result_t *result);
void pair_await_recv(side_t *side, side_t *other, const kvx_recv_t *recv, kvx_recv_result_t *result);
/* Poll until the receive has n blocks. */
void pair_await_blocks(side_t *side, side_t *other, const kvx_recv_t *recv, uint32_t n);

#endif
