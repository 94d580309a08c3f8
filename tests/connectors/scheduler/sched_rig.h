/* sched_rig.h -- a scheduling half against a real daemon, with a hand-written stand-in for the ranks: a second member
 * that reads plans, fills puts and reads leases. What a block holds follows from the tokens before it, so that every
 * loaded byte can be checked. The half lives in an environment of the test's own: clock, memory and some calls of
 * libkvc can be changed. Built with the part's sources. */
#ifndef TESTS_CONNECTORS_SCHED_RIG_H
#define TESTS_CONNECTORS_SCHED_RIG_H

#include "connectors/rig.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kvx_scheduler.h"
#include "scheduler/base/state.h"

#include <unistd.h>

#define SR_UNIT       8u /* tokens a block of group 0 */
#define SR_BLOCKS     512u
#define SR_MAX_TOKENS 2048u
#define SR_PUTS       2048u
#define SR_REQUESTS   128u
#define SR_WAIT_US    5000000u /* on a busy machine an answer takes its time */
#define SR_LOAD_MS    10000u
#define SR_NAMES      8u /* numbers of spaces that are saved to */

typedef struct sr_options {
	int groups;      /* 0, 1: full; 2: and a window */
	int even_window; /* the window is whole blocks */
	int one_table;   /* two full groups over the same blocks of the engine */
	int own_keys;    /* kvd's, not the engine's hashes */
	int cost_model, mode, defer_shared;
	int alone;       /* no daemon, and no stand-in */
	int named_later; /* it is opened without a name of the weights, and given one at once */
	int unnamed;     /* and given none */
	uint32_t wait_us, load_ms;
	const char *silence; /* NULL: the rig's */
	int device;          /* SR_DEVICE_* */
	const char *own;     /* the engine's GPU; NULL: fake-0 */
	const char *other;   /* another one of the daemon's, whose space is another one too; NULL: there is none */
} sr_options_t;

/* Not set; set, and a second space in host memory stands in for that of the GPU; set, and the daemon has none. */
enum { SR_DEVICE_NONE = 0, SR_DEVICE_THERE = 1, SR_DEVICE_REFUSED = 2 };

/* A request: its tokens, and the hash of the prefix up to each block. */
typedef struct sr_request {
	char id[24];
	uint32_t tokens[SR_MAX_TOKENS];
	uint32_t n;
	uint8_t hash[SR_MAX_TOKENS / SR_UNIT][32];
	uint32_t ids[2][SR_MAX_TOKENS / SR_UNIT]; /* blocks, of each group */
	kvx_hashes_t hashes;
	kvx_ask_t ask;
} sr_request_t;

/* What the last plan has asked for, and what became of it. */
typedef struct sr_plan {
	uint32_t step, saves, early, save_blocks, loads, dead, fences, drops, spaces;
	uint32_t loaded_blocks, failed_blocks;
	uint32_t device_saves, urgent_saves, device_save_blocks, gpu_blocks, parts; /* gpu_blocks: loaded from there */
	int timed;
	kvx_msg_work_t work; /* all 0: none */
} sr_plan_t;

typedef struct sr {
	rig_t rig;
	sr_options_t options;
	int row; /* of the test */
	uint32_t groups;
	kvx_scheduler_t *scheduler;
	kvk_layout_t layout;
	char layout_text[KVK_LAYOUT_TEXT_MAX];
	kvc_identity_t identity;
	kvc_writer_t writer;
	kvc_t *kvc;                   /* of the stand-in */
	kvc_space_t *space[KVX_MEMS]; /* of number 0 */
	struct {                      /* of other numbers, which a message has named */
		char weights[32], adapter[32];
		kvc_space_t *space[KVX_MEMS];
	} named[SR_NAMES];
	uint64_t trace; /* digest of all messages, without steps and what the daemon numbers */
	uint32_t traced;
	uint32_t block_bytes;
	uint8_t *cache;           /* [SR_BLOCKS][block_bytes] */
	kvc_put_t *puts[SR_PUTS]; /* views still open */
	uint32_t put_count;
	kvx_msg_buf_t report;
	kvc_put_t *held; /* a save that is begun and not written */
	uint32_t held_ids[SR_BLOCKS], held_n;
	int drop_host_saves, drop_device_saves, hold_host_saves, hold_device_saves, refuse_device_puts;
	struct {
		kvc_put_t *put;
		uint32_t ids[SR_BLOCKS], n;
	} held_saves[8];
	uint32_t held_count;
	int drop_saves, hold_saves, fail_loads; /* knobs: */
	kvc_status_t fail_device;               /* what loads from GPU memory end with; OK: they work */
	uint32_t refusals;                      /* of the space there */
	int miss_device_leases;                 /* what is leased there was evicted since the match */
	uint32_t yielding_puts;                 /* that were started */
	uint32_t optional_puts;                 /* likewise */
	int thrashes;                           /* no put that is optional is admitted */
	int is_busy;                            /* the daemon has no room for any put, */
	uint32_t busy_puts;                     /* how many it has refused */
	uint32_t cut_device_leases;             /* or all from this unit on; 0: nothing was */
	int ahead;                              /* the report of a step is left to be given by hand */
	kvx_hit_t hit;                          /* of the last match */
	uint64_t load;                          /* number of the load told last */
	sr_request_t *requests[SR_REQUESTS];    /* all that were made */
	uint32_t request_count;
	sr_plan_t plan;
	void (*ranks)(const void *message, size_t len); /* of a universe, in place of the stand-in; len 0: none */
	/* what the half calls */
	uint64_t ahead_ns;              /* of its clock, before the rest of the process */
	int no_memory;                  /* every allocation fails */
	uint32_t refuse_renewals;       /* that find no room in the queue to the daemon */
	uint32_t renewals, keeps, naps; /* calls: leases renewed, puts kept, sleeps for an answer */
	uint32_t awaits;                /* sleeps for a sign of life of a daemon that was not silent for too long */
} sr_t;

/* The rig of the test that runs, and its memory: nothing is left of it when the half is closed. */
extern sr_t sr;
extern kv_test_env_t sr_env;

/* A daemon and a scheduling half, ready; and the end of both, where all requests finish and nothing may be left open
 * if the daemon lives. Each test runs between the two; it may begin anew with other options. */
void sr_start(const sr_options_t *options);
void sr_stop(void);
/* The half and the stand-in alone. Not OK: no memory, and nothing is left open. */
kvc_status_t sr_open(const sr_options_t *options);
void sr_close(void);
/* The weights may have been changed, and are named again. Waits until their space is open. */
void sr_name_weights(const char *text);
/* Wait until both are attached and their spaces open. */
void sr_wait_ready(void);
void sr_restart_daemon(void);

/* `n` tokens that follow from seed; the first `shared` of them from seed 0. */
void sr_request(sr_request_t *request, const char *id, uint32_t seed, uint32_t shared, uint32_t n);
/* Blocks ids[i] = base + i for all tokens, fresh from `fresh` on. */
void sr_place(sr_request_t *request, uint32_t base, uint32_t fresh);
/* The engine computes blocks [from, to): their bytes are written. */
void sr_compute(const sr_request_t *request, uint32_t from, uint32_t to);
/* What the block must hold, in `block_bytes` bytes. */
void sr_content(const sr_request_t *request, uint32_t group, uint32_t block, uint8_t *out);
/* Blocks [from, to) hold what they must. */
int sr_is_right(const sr_request_t *request, uint32_t from, uint32_t to);

/* A step in which it computes the tokens [from, to). */
void sr_run_tokens(const sr_request_t *request, uint32_t from, uint32_t to);
kvx_outcome_t sr_outcome(const sr_request_t *request);
/* Match: the hit's tokens, and all of it in sr.hit. sr_match(): a miss must be one of blocks, not of a daemon that does
 * not answer. */
uint32_t sr_look_up(const sr_request_t *request);
uint32_t sr_match(const sr_request_t *request);
/* Load what was matched last. */
void sr_start_load(const sr_request_t *request);
void sr_advance(const sr_request_t *request, uint32_t computed, uint32_t prefill);
void sr_finish(const sr_request_t *request);

/* Make the plan and do what it says; reports go back. Returns its length. */
size_t sr_step(void);
/* A plan that the ranks do not hear of. */
void sr_plan(void);
/* All that the request has now is computed, and a step is done: blocks that its plan saves. */
uint32_t sr_step_saves(const sr_request_t *request, uint32_t computed);
/* A report of theirs, by hand: its record, and then the report itself. */
void *sr_begin_report(uint32_t type, size_t size);
void sr_give_report(void);
void sr_report_loaded(uint64_t number, uint32_t blocks);
/* The stand-in's space of that number, which a message has named: what the message says of it. */
void sr_take_name(const kvx_msg_space_t *space);
kvc_space_t *sr_await_space(uint32_t number, uint32_t mem);
/* Write the save that `hold_saves` has kept, and hold none from now on. */
void sr_release_save(void);
/* Write those that `hold_host_saves` has kept; others go on. */
void sr_release_saves(void);
/* Step until nothing is pending and the puts are over. */
void sr_settle(void);
/* Advance the request, which is computed, until that many blocks are saved in all. */
void sr_wait_saved(const sr_request_t *request, uint64_t blocks);

/* Blocks of the prompt that the space in that mem has, of number 0. */
uint32_t sr_count_stored(uint32_t mem, const sr_request_t *request);

/* New request, all of it: match, load, compute, save. Returns what match() found. */
uint32_t sr_run(sr_request_t *request, uint32_t base);
/* The same, finished and settled. */
uint32_t sr_use(sr_request_t *request, const char *id, uint32_t seed, uint32_t shared, uint32_t n);
/* New request that is run into blocks from 0, until all of it is stored. */
void sr_store(sr_request_t *request, const char *id, uint32_t seed, uint32_t shared, uint32_t n);
/* Ten blocks are stored, by a request that has finished. Another one, "second", of n tokens finds them and has its
 * blocks, from 100 on. */
void sr_find(sr_request_t *request, uint32_t n);
kvx_scheduler_stats_t sr_stats(void);
uint64_t sr_now_ns(void); /* of the process */

/* Step until it is so. */
#define SR_UNTIL(condition)                                                                                            \
	for (uint32_t sr_i = 0; !(condition); sr_i++) {                                                                \
		assert_true(sr_i < 10000);                                                                             \
		usleep(1000);                                                                                          \
		(void)sr_step();                                                                                       \
	}

static inline void sr_end(const sr_request_t *request)
{
	sr_finish(request);
	sr_settle();
}

static inline void sr_await_outcome(const sr_request_t *request, kvc_status_t load)
{
	SR_UNTIL(sr_outcome(request).load != KVC_PENDING);
	assert_int_equal(sr_outcome(request).load, load);
}

/* A case, and the options it starts with. `row`: which of several cases of one function runs. */
typedef struct sr_test {
	void (*run)(void);
	const sr_options_t *options;
	int row;
} sr_test_t;
void sr_run_test(void **state);
#define SR_ADD(id, text, function, start, number)                                                                      \
	static sr_test_t id = {function, &(start), number};                                                            \
	KV_TEST_ADD(id, .name = (text), .test_func = sr_run_test, .initial_state = &id)
#define SR_CASE_ROW(function, start, number)                                                                           \
	static void function(void);                                                                                    \
	SR_ADD(function##_case, #function, function, start, number)                                                    \
	static void function(void)
#define SR_CASE(function, start) SR_CASE_ROW(function, start, 0)
/* The same with other options. */
#define SR_NAMED(text, function, start, number) SR_ADD(KV_TEST_ID, text, function, start, number)
#define SR_ALSO(function, start, number)        SR_NAMED(#function " (" #start ", " #number ")", function, start, number)

/* The cases are run with the daemon's path as the argument. */
extern const char *sr_program;
#define SR_MAIN KV_TEST_MAIN_OF(sr_program, NULL, NULL)

#endif
