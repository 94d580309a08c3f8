/* chat.h -- random conversations on the tiny model, whose answers do not depend on who computes which part. */
#ifndef TESTS_CONNECTORS_CHAT_H
#define TESTS_CONNECTORS_CHAT_H

#include "kve/engine.h"

#define CHAT_TURNS 3u
#define CHAT_USERS 4u
#define CHAT_MAX   800u

typedef struct chat_totals {
	uint64_t answers; /* hash of all tokens generated */
	uint64_t prompt_tokens, cpu_tokens, disk_tokens;
	uint64_t longest_ns; /* slowest request */
} chat_totals_t;

/* Called between steps; the chat goes on whatever it does. */
typedef void (*chat_hook_fn)(void *ctx, kve_engine_t *engine);

kve_engine_t *chat_engine(const char *socket);
/* All users together, CHAT_TURNS turns each: shared starts, growing histories. */
void chat_run(kve_engine_t *engine, uint64_t seed, chat_hook_fn hook, void *ctx, chat_totals_t *totals);

#endif
