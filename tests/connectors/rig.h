/* rig.h -- a real daemon in a directory of its own, without keeper: the test is its keeper. */
#ifndef TESTS_CONNECTORS_RIG_H
#define TESTS_CONNECTORS_RIG_H

#include "kvc.h"

#include <sys/types.h>

typedef struct rig {
	char dir[64];
	char socket[96];
	const char *program;
	const char *silence; /* limits.silence of the next start: of a stopped daemon little enough to wait for it, of
				one on a busy machine far too much */
	pid_t pid;           /* 0: not running */
	/* What a live engine does all the time, while the rig waits for the daemon: hear it, and give back what it
	 * grants too late. NULL: nothing */
	void (*run_iteration)(void *ctx);
	void *iteration_ctx;
} rig_t;

#define RIG_SILENCE "10s"

/* Those of a program whose tests have one daemon each: KV_TEST_MAIN_OF(the_program, begin_rig, end_rig). It is made
 * before a test, who starts it; if it runs at the end, it is quiet. */
extern const char *the_program;
extern rig_t the_rig;
int begin_rig(void **state);
int end_rig(void **state);

/* Make the directory; nothing runs yet. */
void rig_init(rig_t *rig, const char *program);
/* Start the daemon on the directory and wait until it answers. Fails the test when it does not. */
void rig_start(rig_t *rig);
void rig_signal(const rig_t *rig, int signal);
/* kill -9 and wait. */
void rig_kill(rig_t *rig);
/* A clean end: what has been written to disk is there for the next start. */
void rig_stop(rig_t *rig);
/* Stop what runs and remove the directory. */
void rig_fini(rig_t *rig);

/* A value of the daemon's statistics; -1: no such one. */
long rig_counter(const rig_t *rig, const char *name);
/* Flip a bit of a stored block of a prompt, as another client with a wild pointer could. The identity is whole. */
void rig_flip(const rig_t *rig, const kvc_identity_t *identity, const kvc_prompt_t *prompt, uint32_t block);
/* Wait until all blocks are on disk. */
void rig_wait_written(const rig_t *rig);
/* The daemon's own invariants hold, and soon it has neither lease nor put. Fails the test when not. */
void rig_check_quiet(const rig_t *rig);

#endif
