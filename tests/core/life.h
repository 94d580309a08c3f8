/* life.h -- a universe with what its members have asked for, and the model of what must become of it. Of
 * test_universe.c and life_ahead.c.
 */
#ifndef TESTS_CORE_LIFE_H
#define TESTS_CORE_LIFE_H

#include "universe.h"

#include "core/handover/handover.h"

#define CHAINS       6u
#define DEPTH        48u
#define LEASES       24u
#define PUTS         12u
#define SPACES       6u
#define TRANSFERS    5u
#define NUMBERS      10u
#define SPACES_OF_NS (SPACES / 2u)
#define HANDLES      1024u

/* The model of a hand-over that was announced. */
typedef struct life_ahead {
	uint64_t number; /* 0: none is */
	uint32_t space, chain;
	uint32_t n;      /* announced */
	uint32_t handed; /* and handed over when it was looked at last */
	int last;
	uint32_t partial;
	uint64_t refused; /* the namespace's count then */
	int is_complete, is_dropped;
} life_ahead_t;

/* A handle of a space, as a client may keep it for ever. */
typedef struct life_handle {
	uint32_t number, space; /* of life_t.space */
	uint64_t epoch;
} life_handle_t;

typedef struct life {
	universe_t u;
	life_handle_t handles[HANDLES]; /* all that were given out, before a restart too */
	uint32_t handle_count;
	kvd_space_info_t space[SPACES]; /* three of each namespace, the last one of one full group */
	kv_key_t keys[CHAINS][DEPTH];   /* chains share beginnings */
	kv_key_t privates[CHAINS];      /* of the tokens after the first `whole` units */
	uint32_t whole[CHAINS];
	u_lease_t leases[LEASES];
	u_put_t puts[PUTS];
	uint32_t lease_space[LEASES];
	life_ahead_t ahead[TRANSFERS]; /* what must become of them */
	uint64_t numbers[NUMBERS]; /* of hand-overs, as their last answer said: those that are never announced last */
} life_t;

static inline uint64_t below(life_t *l, uint64_t n)
{
	return kv_test_below(&l->u.rng, n);
}

static inline u_member_t *some_member(life_t *l)
{
	for (uint32_t tries = 0; tries < 100; tries++) {
		u_member_t *m = &l->u.members[below(l, U_MEMBERS)];

		if (m->id && !m->closed) {
			return m;
		}
	}

	return NULL;
}

static inline uint32_t ns_of(uint32_t space)
{
	return space / SPACES_OF_NS;
}

static inline u_member_t *member_of(life_t *l, kvd_member_t id)
{
	for (uint32_t i = 0; i < U_MEMBERS; i++) {
		if (l->u.members[i].id == id) {
			return &l->u.members[i];
		}
	}

	return NULL;
}

/* The space, if the member can have it open, else one that it can. */
uint32_t life_open(life_t *l, const u_member_t *m, uint32_t space);

extern const char *const transfers[NUMBERS]; /* names of hand-overs */

/* ---- announced blocks: life_ahead.c ---------------------------------------------------------- */

/* Announce blocks, withdraw them with a plain chunk, or put some, by anybody. */
void life_do_announced(life_t *l);
/* A plain chunk of this number was taken: what was announced is withdrawn. */
void life_forget_announced(life_t *l, uint64_t number);
/* Nothing that is announced and visible waits for a word of its producer, and nothing else is handed over. */
void life_check_announced(life_t *l);
/* All of it has happened. */
void life_announced_all(void);

#endif
