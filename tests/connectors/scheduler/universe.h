/* universe.h -- the model behind the universes of the scheduler half: an engine's blocks and prefix cache, what they
 * must hold, ranks that execute step messages, late and with failures, and what the engine makes of their reports. What
 * a message or the store has that the model does not allow fails the test. */
#ifndef TESTS_CONNECTORS_SCHEDULER_UNIVERSE_H
#define TESTS_CONNECTORS_SCHEDULER_UNIVERSE_H

#include "connectors/scheduler/sched_rig.h"

#define U_SLOTS   8u
#define U_BLOCKS  (150u * sr.groups) /* of the engine: few enough to be another request's soon */
#define U_MOST    200u               /* tokens of a prompt, about */
#define U_QUEUE   256u
#define U_TAINTED 16u
#define U_TRIES   30000u /* of a millisecond */

typedef struct u_profile {
	const char *name;
	const sr_options_t *options;
	uint32_t bad;                            /* of loads and saves that fail: one in that many, here and below */
	uint32_t preempted, ended, handed;       /* of steps and requests */
	uint32_t silent, killed, reset, renamed; /* of steps */
	int adapters;
	uint32_t busy; /* of steps: the daemon has no room for what is asked for in it */
} u_profile_t;

typedef enum u_state { FREE, WAITING, LOADING, RUNNING, LEAVING } u_state_t; /* LEAVING: ranks still load it */

typedef struct u_slot {
	sr_request_t r; /* its prompt is all it computes */
	char transfer[16];
	u_state_t state;
	uint32_t serial, round, prompt, adapter, weights; /* round: a preempted request begins another one */
	uint32_t have[2];                                 /* blocks in its table */
	uint32_t cached;                                  /* of them, found or cached */
	uint32_t computed;                                /* tokens, when the steps planned so far are done */
	uint32_t from, to;                                /* what the present step computes */
	uint32_t load_at, load_end;                       /* blocks that were promised, */
	uint32_t named;                                   /* how many of them LOAD records have named, and which */
	uint8_t is_named[SR_BLOCKS];
	uint32_t loads;          /* told to the ranks, and not reported */
	uint32_t good;           /* blocks from the start that are loaded, once one was not */
	uint32_t lost;           /* the same of blocks that it shares, once a load of another request has failed */
	int async, told, failed; /* told: the last record of the load */
	int sends, receives;
	int tainted; /* what it computes is of no use: it began with other weights */
	int missed;  /* a lease in memory of the GPU was, and what is leased instead may be less */
	int clean;   /* all of it must be stored in the end */
} u_slot_t;

typedef struct u_block {
	uint32_t refs;
	int fresh;  /* allocated in the present step */
	int right;  /* holds the bytes of some block of a prompt */
	int cached; /* found by its hash: the engine's prefix cache */
	uint32_t adapter, sync_step;
	uint8_t hash[32];
} u_block_t;

/* What a rank does later: the end of a save, a load, and reports of both. */
typedef struct u_later {
	enum { NOTHING, LOAD, LOADED, DROPPED, SAVED } what;
	uint32_t due; /* step */
	uint32_t slot, serial, round;
	uint64_t number;
	kvc_status_t status;
	uint32_t blocks, first_bad;
	int sync;
	void *record; /* of a load */
	kvc_put_t *put;
	uint32_t n;
} u_later_t;

typedef struct u_world {
	const u_profile_t *profile;
	uint64_t rng;
	u_slot_t slot[U_SLOTS];
	u_slot_t *planned[U_SLOTS]; /* that the step computes, in their order */
	uint32_t planned_n;
	u_block_t block[SR_BLOCKS];
	u_later_t later[U_QUEUE];
	uint32_t failed_step[U_TAINTED];
	uint8_t is_named[SR_NAMES]; /* space */
	uint32_t serial, weights, step;
	uint32_t silent; /* steps left */
	int ahead;       /* reports come a step later */
	int calm;        /* nothing fails, nothing is late */
	int shaken;      /* what is stored may have been lost since the last calm */
	size_t reserved;
	struct {
		uint32_t requests, hits, async, local, deferred, failed, saves, dropped, preempted, handed, killed,
			renamed;
	} seen;
} u_world_t;

extern u_world_t w;

uint32_t u_roll(uint32_t n);
/* 0: never. */
int u_one_in(uint32_t n);

/* The block holds nothing of use. */
void u_spoil(uint32_t id);
uint32_t u_free_blocks(void);
/* Block i of its prompt in the engine's cache; U_BLOCKS: it is not there. */
uint32_t u_find_cached(const u_slot_t *slot, uint32_t i);
/* The engine caches the whole blocks that a request loads or computes when it plans it. */
void u_cache_blocks(u_slot_t *slot, uint32_t to);
/* Its table gets what `to` tokens need; those of `local` are found in the engine's cache. */
void u_grow(u_slot_t *slot, uint32_t local, uint32_t to);
void u_preempt(u_slot_t *slot);
void u_end_request(u_slot_t *slot);

const char *u_adapter_name(uint32_t adapter);
void u_make_prompt(u_slot_t *slot, const char *id, uint32_t prompt, uint32_t n);
/* Tokens of its prompt that are stored now: in that mem, and in any. */
uint32_t u_count_in(const u_slot_t *slot, uint32_t mem);
uint32_t u_count_stored(const u_slot_t *slot);
/* Whatever is found of a prompt is what was computed of it. */
void u_check_prompt(uint32_t prompt, uint32_t adapter);

/* sr.ranks: they read what is saved of blocks that are another request's now, then load, compute, and save. */
void u_run_ranks(const void *message, size_t len);

#endif
