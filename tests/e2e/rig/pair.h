/* pair.h -- two engines, each a process of its own, that hand one conversation over. What they do is noted in memory
 * that the test shares with them, so that it is known whatever becomes of them. */
#ifndef TESTS_E2E_RIG_PAIR_H
#define TESTS_E2E_RIG_PAIR_H

#include "e2e/rig/rig.h"

#define PAIR_BLOCKS         48u
#define PAIR_CHUNKS         3u
#define PAIR_PRODUCER_MARKS 16u /* steps that a test may wait for */
#define PAIR_CONSUMER_MARKS 12u

enum pair_side { PAIR_PRODUCER = 0, PAIR_CONSUMER = 1 };

typedef struct pair_notes {
	_Atomic uint32_t mark[2];                    /* steps begun */
	_Atomic int32_t status[2];                   /* how it ended */
	_Atomic int ended[2];                        /* it has, and keeps its session */
	_Atomic uint64_t longest[2];                 /* ms, of one call */
	_Atomic uint32_t sent;                       /* units whose hand-over was acknowledged */
	_Atomic uint32_t sending;                    /* units that it may have been asked for */
	_Atomic uint64_t sent_ms;                    /* when the last chunk was acknowledged; 0: it was not */
	_Atomic uint64_t answered_ms;                /* when the consumer had its answer, counted from its question */
	_Atomic uint32_t read;                       /* blocks below */
	_Atomic int whole;                           /* the consumer was told of all of it, and has read it */
	_Atomic int go;                              /* see pair_t */
	_Atomic int over;                            /* the test has seen enough: leave */
	uint8_t bytes[PAIR_BLOCKS][RIG_BLOCK_BYTES]; /* as the consumer has read them */
} pair_notes_t;

typedef struct pair {
	const rig_t *owner, *asker; /* the daemons of the producer and of the consumer; one, or two peers */
	const char *peer;           /* the owner's name at the asker; NULL: they are one */
	uint64_t talk;              /* number of the conversation: pair_next() */
	uint32_t deadline_ms;       /* that the consumer gives the hand-over */
	uint32_t call_ms;           /* of calls without a deadline of their own */
	uint32_t hold[2];           /* a step at which a side stands still until notes->go; 0: none */
	pair_notes_t *notes;
	pid_t pid[2]; /* 0: it does not run */
} pair_t;

pair_notes_t *pair_notes_new(void);
/* The next conversation: nothing is noted of it. */
void pair_next(pair_t *pair);
void pair_start(pair_t *pair, enum pair_side side);
/* Wait until this side has begun this step. */
void pair_await_mark(const pair_t *pair, enum pair_side side, uint32_t mark);
/* Wait until it has its end, and an answer to everything it asked. */
void pair_await_end(const pair_t *pair, enum pair_side side);
void pair_kill(pair_t *pair, enum pair_side side);
/* Both leave, and must do so well. */
void pair_finish(pair_t *pair);
/* Be its consumer in this process, by one question: the status. `whole`: all blocks were read, and are right. */
kvc_status_t pair_consume_again(const pair_t *pair, uint32_t deadline_ms, int *p_whole);
/* Read all of it at a daemon that has kept it: 1: its blocks are there, and right. */
int pair_is_kept(const pair_t *pair, const rig_t *rig);
/* What the consumer has read is what the producer has computed. */
void pair_check_bytes(const pair_t *pair);

#endif
