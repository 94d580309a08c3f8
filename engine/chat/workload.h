/* workload.h -- a chat of several users, made from a seed: shared system prompts, growing conversations, and branches
 * off earlier turns. */
#ifndef KVE_CHAT_WORKLOAD_H
#define KVE_CHAT_WORKLOAD_H

#include <stdint.h>

#define WORKLOAD_MAX_TURNS 16u

typedef struct workload_options {
	uint64_t seed;
	uint32_t vocab;
	uint32_t users;          /* conversations that start from a system prompt        */
	uint32_t branches;       /* conversations that fork off one of them after turn 1 */
	uint32_t turns;          /* of every conversation, at most WORKLOAD_MAX_TURNS    */
	uint32_t systems;        /* different system prompts                             */
	uint32_t system_tokens;  /* length of each                                       */
	uint32_t message_tokens; /* a user's message has half of this to all of it       */
	uint32_t new_tokens;     /* generated a turn                                     */
	uint32_t max_tokens;     /* a conversation never grows beyond                    */
} workload_options_t;

extern const workload_options_t workload_default;

typedef struct conversation {
	uint32_t *tokens; /* history: system prompt, messages, answers */
	uint32_t n;
	uint32_t length_at[WORKLOAD_MAX_TURNS]; /* of the history after each turn */
} conversation_t;

typedef struct workload {
	workload_options_t options;
	conversation_t *conversations; /* users, then branches */
	uint32_t count;
} workload_t;

/* 0, or -1: out of memory, or the options do not fit each other. */
int workload_init(workload_t *workload, const workload_options_t *options);
void workload_fini(workload_t *workload);
/* Has conversation c a turn t? A branch takes its first turn from its parent. */
int workload_has(const workload_t *workload, uint32_t c, uint32_t t);
/* Append the user's message of turn t: the history is then the prompt. Turns of one conversation come in order; a
 * branch after its parent's turn. */
void workload_ask(workload_t *workload, uint32_t c, uint32_t t);
/* Append the answer. */
void workload_answer(workload_t *workload, uint32_t c, uint32_t t, const uint32_t *tokens, uint32_t n);

#endif
