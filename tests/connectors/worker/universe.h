/* universe.h -- the model of a seeded universe of the worker half: an engine's blocks, loads and saves, and what must
 * become of them. */
#ifndef TESTS_CONNECTORS_UNIVERSE_H
#define TESTS_CONNECTORS_UNIVERSE_H

#include "connectors/worker/wr.h"

#define SPACES  3u
#define CHAIN   20u /* keys of a space's prompt, */
#define LOOSE   12u /* and of its second group */
#define KEYS    (CHAIN + LOOSE)
#define MOST    6u /* blocks of a part, or of a save */
#define LOADS   12u
#define PUTS    10u
#define HISTORY 8u /* steps whose failures are remembered */

typedef struct u_space {
	kvc_space_t *space;
	kvc_key_t keys[KEYS];
	uint32_t tag[KEYS];  /* contents of the block with that key */
	uint8_t state[KEYS]; /* of the second group: 0 not stored, 1 stored, 2 in a put */
	int damaged;         /* a stored byte was changed: nothing new begins there until it is reset */
	int told;            /* the workers know its number */
} u_space_t;

/* A block that a load writes. */
typedef struct u_block {
	uint32_t id, key, group;
	uint32_t fails, named; /* ranks on which it must fail, on which it was named */
	uint32_t wrong[WR_MAX_RANKS];
} u_block_t;

typedef struct u_load {
	uint32_t number; /* 0: free */
	uint32_t flags, step, space, n;
	u_block_t block[2 * MOST];
	kvc_lease_t *lease[2];
	kvc_status_t want;           /* how it ends; PENDING: not known */
	int excused;                 /* any of it may fail */
	int may_fail;                /* so may blocks that need not, once another has */
	int doomed;                  /* all of it fails */
	int silent;                  /* dropped before it began: its blocks are not named */
	int drop;                    /* in the next message */
	int lost;                    /* the engine has written its blocks since */
	uint32_t reported, finished; /* ranks */
	kvx_report_loaded_t loaded[WR_MAX_RANKS];
	int failed[WR_MAX_RANKS];
} u_load_t;

typedef struct u_put {
	kvc_put_t *put; /* NULL: free */
	uint64_t id;
	uint32_t space, group, step, n, keys[MOST], ids[MOST];
	int later;           /* announced by the next message, as complete */
	int excused, doomed; /* it may be given up; it must be */
	int dropped;         /* a rank has given it up */
} u_put_t;

/* A universe, and how often things happen in it: 3: in one step of three; 0: never. */
typedef struct u_profile {
	const char *name;
	uint32_t ranks;
	int groups, layers; /* a second group; loads come layer by layer */
	uint32_t prefetched, held, refused, killed, closed;
} u_profile_t;

/* What goes wrong in a step, and when: before its first call, between prefetch and begin_step(), when its loads have
 * been sent, when everything has been enqueued. */
typedef enum u_event { CALL_REFUSED = 1, ORDERS_REFUSED, DAEMON_KILLED, WORKER_CLOSED } u_event_t;
typedef enum u_moment { BEFORE, PREFETCHED, SENT, COMPUTED, MOMENTS } u_moment_t;

/* What happens in a step. */
typedef struct u_step {
	u_event_t event; /* 0: none */
	u_moment_t moment;
	int held;           /* the device does nothing until the step has ended */
	int late, drop;     /* asynchronous loads are not started: until their deadline, until they are dropped */
	int no_run, no_end; /* hooks that the engine does not call */
	int alloc;          /* an allocation fails */
	int leased;         /* a synchronous load of it has a lease */
	int prefetched;
} u_step_t;

typedef struct world {
	wr_t wr;
	const u_profile_t *profile;
	uint64_t seed;
	uint32_t spaces;
	uint32_t split; /* layers of the second group */
	u_space_t space[SPACES];
	uint32_t tag[WR_BLOCKS][2]; /* contents of an engine block: layers before `split`, the others */
	uint8_t busy[WR_BLOCKS];  /* a load that has not ended writes there, or the next message announces their save */
	uint8_t given[WR_BLOCKS]; /* in this step */
	uint32_t compute[WR_BLOCKS]; /* contents that this step computes; 0: none */
	u_load_t loads[LOADS];
	u_put_t puts[PUTS];
	uint8_t tainted[HISTORY]; /* by step: a synchronous load has failed; 2: perhaps */
	uint32_t serial, number;
	uint32_t fresh_until;    /* step; before it workers may still be opening their spaces */
	uint32_t unsound, holes; /* messages and records that are not sound; saves without a source */
	uint32_t wrong;          /* blocks that were not what they must be */
	uint32_t corrupt;        /* blocks that the daemon must have been told of */
	int ended, heard;        /* the engine has made the last calls of the step before: end_step(); the others */
	int not_run;             /* in the step before the engine did not ask for its loads */
	int second_stream;       /* the engine computes there */
	int layer_skipped;       /* loads come whole until the worker is closed */
	u_step_t now;
	struct {
		uint32_t loads, failed, layered, prefetched, abandoned, stored, dropped, damaged, revoked, late;
		uint32_t refused, killed, closed;
		uint64_t fences;
	} seen;
} world_t;

/* Each load, each put that is open. */
#define U_EACH_LOAD(w, load)                                                                                           \
	for (u_load_t *load = (w)->loads; load < (w)->loads + LOADS; load++)                                           \
		if (load->number)
#define U_EACH_PUT(w, put_)                                                                                            \
	for (u_put_t *put_ = (w)->puts; put_ < (w)->puts + PUTS; put_++)                                               \
		if (put_->put)

uint32_t u_roll(world_t *w, uint32_t n);
int u_one_in(world_t *w, uint32_t n); /* 0: never */

/* The engine writes a block, on every rank. */
void u_fill(world_t *w, uint32_t id, uint32_t tag);
/* Saves that still have to read it may be given up: is there one? */
int u_excuse_saves_of(world_t *w, uint32_t id);
/* Every block that no load may write is what it must be. */
void u_check_blocks(world_t *w);

/* New keys; none is stored. The second: if nothing is open in the space. */
void u_make_keys(world_t *w, uint32_t number);
void u_reset_space(world_t *w, uint32_t number);

/* Records of the message; some of them are not sound, or of blocks that are not there. */
void u_add_load(world_t *w);
void u_add_save(world_t *w);
void u_add_complete_saves(world_t *w); /* of what the step before has computed */

/* A synchronous load of that step? */
int u_is_sync(const u_load_t *load, uint32_t step);
/* All of it fails; why, if there is one reason only. */
void u_doom(u_load_t *load, kvc_status_t why);
void u_revoke(world_t *w, u_load_t *load);
/* The engine reads what the step's loads have brought: some layers of it. */
void u_compare_sync_loads(world_t *w, uint32_t r, uint32_t layer, uint32_t layers);

/* The engine has lost the blocks of a load: it writes them. */
void u_fill_load(world_t *w, const u_load_t *load);
/* Everything that is open may fail. */
void u_excuse_all(world_t *w);

/* Hear all ranks, as after each step, and check what they say of loads; then what has become of puts. */
void u_collect(world_t *w);
void u_check_puts(world_t *w);
void u_take_report(world_t *w, uint32_t r);

#endif
