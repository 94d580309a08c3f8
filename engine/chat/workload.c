#include "workload.h"

#include <stdlib.h>
#include <string.h>

const workload_options_t workload_default = {
	.seed = 1,
	.users = 6,
	.branches = 3,
	.turns = 5,
	.systems = 2,
	.system_tokens = 640,
	.message_tokens = 72,
	.new_tokens = 24,
};

/* The n-th value of the stream named by (seed, a, b). */
static uint64_t value_at(uint64_t seed, uint64_t a, uint64_t b, uint64_t n)
{
	uint64_t z = seed * UINT64_C(0x9e3779b97f4a7c15) + a * UINT64_C(0xd1b54a32d192ed03) +
		     b * UINT64_C(0x8cb92ba72f3d8dd7) + n;

	for (int i = 0; i < 2; i++) {
		z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
		z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
		z ^= z >> 31;
	}

	return z;
}

static void append_stream(workload_t *w, conversation_t *c, uint64_t a, uint64_t b, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		c->tokens[c->n++] = (uint32_t)(value_at(w->options.seed, a, b, i + 1) % w->options.vocab);
	}
}

int workload_init(workload_t *w, const workload_options_t *o)
{
	const uint64_t longest = o->system_tokens + (uint64_t)o->turns * (o->message_tokens + (uint64_t)o->new_tokens);

	if (o->users == 0 || o->branches > o->users || o->turns == 0 || o->turns > WORKLOAD_MAX_TURNS ||
	    o->systems == 0 || o->message_tokens < 2 || o->new_tokens == 0 || o->vocab == 0 ||
	    longest > o->max_tokens) {
		return -1;
	}

	*w = (workload_t){.options = *o, .count = o->users + o->branches};
	w->conversations = calloc(w->count, sizeof *w->conversations);
	if (!w->conversations) {
		return -1;
	}
	for (uint32_t c = 0; c < w->count; c++) {
		w->conversations[c].tokens = calloc(longest, sizeof(uint32_t));
		if (!w->conversations[c].tokens) {
			workload_fini(w);
			return -1;
		}
		if (c < o->users) {
			append_stream(w, &w->conversations[c], 1, c % o->systems, o->system_tokens);
		}
	}

	return 0;
}

void workload_fini(workload_t *w)
{
	for (uint32_t c = 0; w->conversations && c < w->count; c++) {
		free(w->conversations[c].tokens);
	}
	free(w->conversations);
	*w = (workload_t){0};
}

int workload_has(const workload_t *w, uint32_t c, uint32_t t)
{
	return c < w->count && t < w->options.turns && (c < w->options.users || t > 0);
}

void workload_ask(workload_t *w, uint32_t c, uint32_t t)
{
	conversation_t *talk = &w->conversations[c];
	const uint32_t half = w->options.message_tokens / 2;

	if (c >= w->options.users && t == 1) {
		const conversation_t *parent = &w->conversations[c - w->options.users];

		talk->n = parent->length_at[0];
		memcpy(talk->tokens, parent->tokens, talk->n * sizeof(uint32_t));
	}
	append_stream(w, talk, 2 + c, t, half + (uint32_t)(value_at(w->options.seed, 2 + c, t, 0) % half));
}

void workload_answer(workload_t *w, uint32_t c, uint32_t t, const uint32_t *tokens, uint32_t n)
{
	conversation_t *talk = &w->conversations[c];

	memcpy(talk->tokens + talk->n, tokens, n * sizeof(uint32_t));
	talk->n += n;
	talk->length_at[t] = talk->n;
}
