/* talks.h -- conversations in GPU memory (fake-0), and engines that put and get them while the daemon changes. */
#ifndef TESTS_E2E_TALKS_H
#define TESTS_E2E_TALKS_H

#include "e2e/rig/rig.h"

#define TALKS_LEN   32u /* blocks of a conversation */
#define TALKS       6u
#define TALKS_SLABS 4u /* of 2 MiB: 128 blocks each */

/* A rig with keeper and GPU memory; nothing runs yet. */
void talks_stage(rig_t *rig, int disk);
/* The same, started, with an engine that has put all talks. */
void talks_begin(rig_t *rig, user_t *user);
/* An engine of the tests' model on this device: the status of what failed first. */
kvc_status_t talks_try(user_t *user, const char *sock, const char *device);
/* The daemon has its memory a moment after it serves. */
void talks_attach_to(user_t *user, const char *sock, const char *device);
void talks_attach(const rig_t *rig, user_t *user);
/* The same engine goes on with a daemon of another incarnation. */
void talks_wait_attached(user_t *user, uint64_t incarnation);
/* The next daemon serves, under the same keeper. */
void talks_wait_next(const rig_t *rig, pid_t before);
/* Kill the daemon, and wait for the next one. */
void talks_kill_daemon(const rig_t *rig);
/* How many blocks are visible then. */
uint32_t talks_put(user_t *user, uint64_t seed);
/* How many blocks of it are there; each has its own bytes. */
uint32_t talks_get(user_t *user, uint64_t seed);
/* All of them. */
void talks_put_all(user_t *user);
void talks_expect(user_t *user, uint32_t each);
/* A whole test: a put that this change of the daemon meets keeps its slots until its engine has no copy under way. */
void talks_check_unfinished_put(rig_t *rig, void (*change)(void));

/* What engines have done. In shared memory. */
typedef struct talks_notes {
	const rig_t *rig;
	uint32_t talks;  /* that they draw from */
	uint32_t before; /* puts when they started */
	_Atomic uint32_t put, hits, attached;
	_Atomic uint64_t wrong;
	_Atomic int stop;
} talks_notes_t;

talks_notes_t *talks_notes_make(const rig_t *rig, uint32_t talks);
void talks_notes_free(talks_notes_t *notes);
/* Processes with an engine each, which live through every change of the daemon; _end waits for them. */
void talks_engines_start(talks_notes_t *notes, pid_t *pids, uint32_t n);
void talks_engines_end(talks_notes_t *notes, const pid_t *pids, uint32_t n);
/* Until they have put this number since their start. */
void talks_engines_wait(talks_notes_t *notes, uint32_t puts);

#endif
