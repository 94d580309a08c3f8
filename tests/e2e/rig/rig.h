/* rig.h -- a real kvd in a directory of its own, and what the tests of whole faults do with it.
 *
 * What cannot go wrong in a test (fork, a file of its own) fails the running cmocka test; what the fault may do is
 * answered as a status for the test to judge.
 */
#ifndef TESTS_E2E_RIG_H
#define TESTS_E2E_RIG_H

#include "kv/shm.h"
#include "kv/status.h"
#include "kvc.h"
#include "kv_child.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include <sys/types.h>

#define RIG_OPTIONS     32u
#define RIG_WAIT_MS     60000u
#define RIG_BLOCKS      256u /* longest prefix of the helpers below */
#define RIG_TOKENS      16u
#define RIG_BLOCK_BYTES 16384u
#define RIG_LAYOUT      "kvk1 heads=2 layers=4 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0"

typedef struct rig {
	pid_t pid; /* what was started, the daemon or its keeper; 0: nothing runs */
	char dir[64], run_dir[80], disk[80], log[80];
	char sock[96]; /* of the first namespace */
	char options[RIG_OPTIONS][160];
	uint32_t option_count;
	const char *program;  /* kvd; NULL: the one that was built */
	const char *wrap[6];  /* a command in front of kvd, ended by NULL */
	void (*before)(void); /* in the child between fork and exec; NULL: nothing */
} rig_t;

/* Make the directory and the usual small options; with `disk` a disk tier of 64 MiB. Nothing runs yet. */
void rig_init(rig_t *rig, int disk);
/* The same with a disk tier on a file system of its own, in memory, of this size ("24m"). Skips the test where that is
 * not permitted. */
void rig_init_mount(rig_t *rig, const char *size);
/* Give a rig without a disk tier such a one. */
void rig_mount(rig_t *rig, const char *size);
/* End the daemon with SIGTERM, and unmount. rig_fini() follows. */
void rig_unmount(rig_t *rig);
/* Take every byte that is left there, and give it back. */
void rig_disk_fill(const rig_t *rig);
void rig_disk_free(const rig_t *rig);
/* After a test that has failed: kill what runs, and unmount. */
void rig_clean_up(rig_t *rig);
/* Add an option (a later one overrules). */
void rig_option(rig_t *rig, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Start it: -1 when it serves, else the exit code it ended with (128 + signal). */
int rig_try(rig_t *rig);
void rig_start(rig_t *rig);
/* Wait until a daemon serves on the socket (a keeper restarts its daemon). */
void rig_serving(const rig_t *rig);
/* Pid of the daemon itself: the keeper's child, or what was started. 0: none at the moment. */
pid_t rig_daemon(const rig_t *rig);
/* Pid of the daemon's metadata process. 0: there is none at the moment. */
pid_t rig_meta(const rig_t *rig);
/* The same of any process of its: "kvd-net". */
pid_t rig_child(const rig_t *rig, const char *program);
/* Signal what was started and wait for its end: exit code or 128 + signal. */
int rig_kill(rig_t *rig, int signal);
/* SIGTERM, which must end it with 0, and remove the directory. */
void rig_fini(rig_t *rig);
/* SIGKILL, and SIGTERM, which must end it with 0: the directory stays. */
void rig_crash(rig_t *rig);
void rig_stop(rig_t *rig);
/* rig_check_quiet() and rig_fini(). */
void rig_end(rig_t *rig);
int rig_log_has(const rig_t *rig, const char *text);
/* How often. */
uint32_t rig_log_count(const rig_t *rig, const char *text);
/* Run kvctl: exit code; what it says on both streams goes to out. */
int rig_kvctl(const rig_t *rig, const char *arguments, char *out, size_t cap);

/* Wait until what kvctl says has this text. 0: it never had. */
int rig_kvctl_has(const rig_t *rig, const char *arguments, const char *text);

/* A number of the daemon's statistics; UINT64_MAX: it cannot be had. */
uint64_t rig_metric(const rig_t *rig, const char *name);
/* The same as an attachment sees it: of its namespace. */
uint64_t rig_number(kvc_t *kvc, const char *name);
/* Wait until it is at least, or exactly, this. 0: it never was. */
int rig_metric_reaches(const rig_t *rig, const char *name, uint64_t value);
int rig_metric_is(const rig_t *rig, const char *name, uint64_t value);
/* A number of a namespace's shares in the status: resource "cpu", "disk" or "index", field as status names it. */
uint64_t rig_share(kvc_t *kvc, const char *resource, const char *field);
/* Wait until write-behind has nothing to do. */
void rig_written(const rig_t *rig);
/* Wait for quiet: no lease, put, pin or quarantined slot; then `kvctl check` must fail nothing. */
void rig_check_quiet(const rig_t *rig);

uint64_t rig_now_ms(void);

/* ---- an engine ------------------------------------------------------------------------------- */

typedef struct user {
	kvc_t *kvc;
	kvc_space_t *space;
	uint64_t wrong; /* blocks that were handed out with other bytes than were put */
} user_t;

kvc_identity_t user_identity(const char *model);
/* Attach to a socket and open a space; the status of what failed first. */
kvc_status_t user_try(user_t *user, const char *sock, const kvc_identity_t *identity);
void user_attach(user_t *user, const rig_t *rig, const char *model);
void user_leave(user_t *user);
/* Tokens of the first n blocks of conversation `seed`, and their keys: functions of the seed (and space). n <=
 * RIG_BLOCKS. */
void user_tokens(uint64_t seed, uint32_t n, uint32_t *tokens);
void user_keys(const user_t *user, uint64_t seed, uint32_t n, kvc_key_t *keys);
/* For kvc_key_source_t; ctx: an array of keys. */
void user_key_at(void *ctx, uint32_t i, kvc_key_t *key);
/* What is known of a hand-over now. */
kvc_handover_info_t user_handover_info(const kvc_handover_t *handover);
/* Bytes of the block with this key. */
void user_fill(const kvc_key_t *key, uint8_t *out);
/* Put keys[from, n). *p_visible (may be NULL) counts from keys[from]; set on success only. */
kvc_status_t user_put(user_t *user, const kvc_key_t *keys, uint32_t from, uint32_t n, int durable, uint32_t *p_visible);
/* Match, acquire, wait, read and compare as much of the prefix as there is: *p_n blocks came whole. MISS: none is
 * there. */
kvc_status_t user_get(user_t *user, const kvc_key_t *keys, uint32_t n, uint32_t *p_n);
/* All n of them come whole. */
void user_expect(user_t *user, const kvc_key_t *keys, uint32_t n);
/* The same where blocks have the bytes of the keys `as`: of the daemon that they were put at. */
kvc_status_t user_get_as(user_t *user, const kvc_key_t *keys, const kvc_key_t *as, uint32_t n, uint32_t *p_n);
void user_expect_as(user_t *user, const kvc_key_t *keys, const kvc_key_t *as, uint32_t n);
uint32_t user_match(const user_t *user, const kvc_key_t *keys, uint32_t n);
/* Poll until the match is this long. 0: it never was. */
int user_match_is(user_t *user, const kvc_key_t *keys, uint32_t n, uint32_t want);
/* Memory of block i of a lease, to be scribbled on. */
uint8_t *user_memory(kvc_lease_t *lease, uint32_t i);

/* ---- a test of one daemon --------------------------------------------------------------------- */

/* Those of the running test: the daemon, and an engine. */
static rig_t rig_ __attribute__((unused));
static user_t user_ __attribute__((unused));

/* rig_init() and rig_start(); and an engine is attached. */
void rig_begin(rig_t *rig, int disk);
void rig_begin_with(rig_t *rig, int disk, user_t *user, const char *model);
/* Detach the engine, if it is attached, and end the daemon, which must be quiet, if it runs. */
void rig_finish(rig_t *rig, user_t *user);

static int __attribute__((unused)) rig_tear_down(void **state)
{
	(void)state;
	rig_clean_up(&rig_);
	user_ = (user_t){0};

	return 0;
}

/* A test behind `begin`, with rig_finish() when it has passed: RIG_TEST(p1_what_it_defends, rig_begin(&rig_, 1)). */
#define RIG_TEST(name, begin)                                                                                          \
	static void name##_body(void);                                                                                 \
	KV_TEST(name, NULL, rig_tear_down)                                                                             \
	{                                                                                                              \
		begin;                                                                                                 \
		name##_body();                                                                                         \
		rig_finish(&rig_, &user_);                                                                             \
	}                                                                                                              \
	static void name##_body(void)

/* ---- another client, working all the time --------------------------------------------------- */

typedef struct other_shared {
	_Atomic uint64_t rounds, hits, failures, wrong;
	_Atomic int stop;
	_Atomic int32_t last; /* status of the last failure */
	char text[160];
} other_shared_t;

typedef struct other {
	pid_t pid;
	other_shared_t *shared;
} other_t;

/* A process that puts, matches and reads conversations of its own space until it is told to stop. Returns when it
 * works. */
void other_start(other_t *other, const char *sock);
/* Wait until it has gone through this many rounds more. */
void other_goes_on(const other_t *other, uint64_t rounds);
/* Wait until it has a hit again: it attaches when the daemon has come back. */
void other_recovers(const other_t *other);
/* Stop it. It has never read other bytes; and unless `faults` are expected every call went well. */
void other_end(other_t *other, int faults);

#endif
