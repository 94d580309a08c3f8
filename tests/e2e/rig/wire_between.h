/* wire_between.h -- two net processes without the processes: the code of fetch.c, serve.c and prefix.c, twice, each
 * attached to a real daemon, and between them a network that the test draws from its seed.
 *
 * The control channel keeps its order, as TCP does. Bytes take a way of their own: they are read, land and are reported
 * in any order that UCX could choose. A link may be cut, which its two ends notice one after the other; bytes may be
 * changed, or stand still. The clock is the test's. It takes the place of link.c and way.c.
 */
#ifndef TESTS_E2E_RIG_WIRE_BETWEEN_H
#define TESTS_E2E_RIG_WIRE_BETWEEN_H

#include "e2e/rig/rig.h"

#include "net/prefix.h"

typedef struct wire {
	kvd_net_t net[2]; /* owner, asker; each knows the other as its one peer */
	kvd_net_config_t config[2];
	kv_test_rng_t *rng;
	uint64_t cuts, flips, delivered, pushes;
	uint32_t flip_next;  /* pushes from now on until one is changed on its way; 0: none */
	int still;           /* bytes stand still */
	uint32_t full;       /* ENDs from now on that find no room in the queue of their link */
	uint64_t order;      /* of the last wire_fetch() */
	uint32_t timeout_ms; /* of orders, on the test's clock */
} wire_t;

void wire_open(wire_t *wire, const rig_t rigs[2], kv_test_rng_t *rng);
/* One thing happens: a step of one side, a message or a part of a push arrives, time passes. */
void wire_step(wire_t *wire);
void wire_cut(wire_t *wire);
/* Nothing is under way, and nothing is kept for it. */
int wire_is_quiet(const wire_t *wire);
/* Pushes that the owner has not heard the end of. */
uint32_t wire_pushes(void);
/* What the asker's daemon would order, as wire->order. */
kv_status_t wire_fetch(wire_t *wire, const kvc_identity_t *identity, const char *transfer, int is_prefix,
		       const uint32_t *tokens, uint32_t n_tokens);
/* The asker has said ASK, and it has not arrived. */
int wire_has_asked(void);
/* The answer to an order, which the daemon would get; KV_PENDING: it has not come, or was asked for before. */
kv_status_t wire_answer(wire_t *wire, uint64_t order);

#endif
