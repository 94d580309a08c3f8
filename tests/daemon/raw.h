/* raw.h -- a daemon under test, and a client that speaks frames by hand: what libkvc would never send can be sent.
 *
 * Everything fails the running cmocka test when the machine does not play along; what the daemon answers is for the
 * test to judge.
 */
#ifndef RAW_H
#define RAW_H

#include "kv/shm.h"
#include "kv/wire.h"
#include "kv_cmocka.h"
#include "kv_test.h"

#include <sys/types.h>

#define RAW_TIMEOUT_MS 60000
#define RAW_MAX_ARGS   24

/* ---- a daemon -------------------------------------------------------------------------------- */

typedef struct raw_daemon {
	pid_t pid;
	char dir[64];  /* run_dir, removed by raw_daemon_end() */
	char sock[96]; /* of the namespace `default` */
	char log[96];  /* its standard error */
} raw_daemon_t;

/* Make a run_dir, start kvd there with small tiers, no HTTP and no keeper, and with `args` (ended by NULL; may be NULL)
 * after these, and wait for its socket. */
void raw_daemon_start(raw_daemon_t *daemon, const char *const *args);
/* The same in an existing directory (daemon->dir set). Returns 0 when it ended instead: *p_exit is its exit code. */
int raw_daemon_spawn(raw_daemon_t *daemon, const char *const *args, int *p_exit);
/* Send a signal and wait for the end: exit code, or 128 + signal. */
int raw_daemon_kill(raw_daemon_t *daemon, int signal);
/* SIGTERM when it still runs, which must end it with 0, and remove the directory. */
void raw_daemon_end(raw_daemon_t *daemon);
/* The one of the running test. */
static raw_daemon_t daemon_ __attribute__((unused));
/* A test of a daemon with these options (NULL: none): RAW_TEST(p1_what_it_defends, "--limits.sessions=8"). */
#define RAW_TEST(name, ...)                                                                                            \
	KV_TEST_BETWEEN(name, raw_daemon_start(&daemon_, ((const char *const[]){__VA_ARGS__, NULL})),                  \
			raw_daemon_end(&daemon_))
/* Does its log contain this? */
int raw_log_has(const raw_daemon_t *daemon, const char *text);
/* Connect and say hello as soon as somebody serves. */
int raw_open_when_there(const raw_daemon_t *daemon);
/* A socket that listens on a loopback port of its own. */
int raw_listen_anywhere(uint16_t *p_port);
/* Run kvd to its end; what it printed (both streams) goes to out. Returns its exit code. */
int raw_run(const char *const *args, char *out, size_t cap);

/* ---- a client -------------------------------------------------------------------------------- */

typedef struct raw_frame {
	kv_frame_header_t header;
	uint8_t *body; /* of the caller's buffer */
	int fds[KV_WIRE_MAX_FDS];
	uint32_t fd_count;
} raw_frame_t;

int raw_connect(const char *path);
/* Bytes as they are. Returns 0 when the daemon has closed the connection. */
int raw_bytes(int fd, const void *data, size_t len);
/* Bytes with descriptors at the first one. */
int raw_bytes_fds(int fd, const void *data, size_t len, const int *fds, uint32_t count);
/* A whole frame with a body made from msg (NULL: an empty body). */
void raw_send(int fd, uint16_t code, uint64_t id, const void *msg, const int *fds, uint32_t fd_count);
/* The next frame within the time, or 0: the connection has ended (*p_closed 1) or nothing has come. The body stays
 * valid until the next call. */
int raw_recv(int fd, int timeout_ms, raw_frame_t *frame);
/* Nothing more comes: the daemon has closed it. */
int raw_closed(int fd, int timeout_ms);

/* Send and wait for the reply with that id, keeping notices (raw_notice). On OK *reply (may be NULL) is filled. */
kv_status_t raw_call(int fd, uint16_t code, const void *msg, void *reply);
/* The same with a descriptor (-1: none). */
kv_status_t raw_call_with(int fd, uint16_t code, const void *msg, int sent_fd, void *reply);
/* Descriptors of the last reply raw_call() got. */
extern int raw_reply_fds[KV_WIRE_MAX_FDS];
extern uint32_t raw_reply_fd_count;
/* The next notice of this code within the time, SLAB_ADD maps its slab on the way. 0: none. */
int raw_notice(int fd, uint16_t code, int timeout_ms, void *msg);
/* The same with its descriptors. */
int raw_notice_any(int fd, uint16_t code, int timeout_ms, void *msg, int fds[KV_WIRE_MAX_FDS]);

kv_status_t raw_hello(int fd);
/* Connect and say hello. */
int raw_open(const char *path);
/* A metric by its name, read through `fd`. */
uint64_t raw_metric(int fd, const char *name);
/* Wait until it has at least this value. */
int raw_metric_reaches(int fd, const char *name, uint64_t value);

/* ---- a member -------------------------------------------------------------------------------- */

typedef struct raw_slab {
	uint8_t *data;
	uint64_t *digests;
	kv_msg_slab_add_t info;
	int data_fd;
} raw_slab_t;

typedef struct raw_member {
	int fd;
	kv_msg_join_reply_t joined;
	const kv_mirror_header_t *mirror;
	const uint8_t *leases;
	uint8_t *area; /* kv_member_area_header_t */
	uint64_t *staging;
	int area_fds[3];
	raw_slab_t slabs[16];
	uint32_t slab_count;
	kv_msg_space_open_reply_t space;
} raw_member_t;

/* Connect, hello, join instance `name` with this process's pidfd, map everything. */
void raw_join(raw_member_t *member, const char *path, const char *name);
/* What members that join say they are connections of: 1 unless a test sets it. */
extern uint64_t raw_attachment;
kv_status_t raw_join_with(int fd, const char *name, const uint8_t *secret, int pidfd, kv_msg_join_reply_t *reply);
/* Open the space of the tests: 2 heads, 2 layers, 16 tokens, f32, split: 4 leaves a block of 8192 bytes. */
kv_status_t raw_space(raw_member_t *member, const char *model);
/* The same with these groups (raw_space: one full one, `0:full:16`, over units of 16 tokens). */
kv_status_t raw_space_groups(raw_member_t *member, const char *model, const char *hash_tokens, const char *groups);
/* Start a put of `n` blocks below parent (NULL: root). */
kv_status_t raw_put_start(raw_member_t *member, const kv_key_t *parent, uint32_t depth, const kv_key_t *keys,
			  uint32_t n, kv_msg_put_start_reply_t *reply);
/* Memory of entry i of the lease or put at `offset`; NULL: the slot is none. */
uint8_t *raw_slot(raw_member_t *member, uint64_t offset, uint32_t i);
/* Fill block i of a put with a pattern and its digests into staging word i x 4. */
void raw_fill(raw_member_t *member, uint64_t offset, uint32_t i, uint8_t pattern);
/* Put n blocks from the root and wait for PUT_DONE; returns blocks visible. */
uint32_t raw_put(raw_member_t *member, const kv_key_t *keys, uint32_t n, uint8_t pattern);
kv_status_t raw_acquire(raw_member_t *member, const kv_key_t *keys, uint32_t n, kv_msg_acquire_reply_t *reply);
/* Close and unmap. */
void raw_leave(raw_member_t *member);
/* Keys that belong to nobody else in this test: a hash of (seed, i). */
void raw_keys(uint64_t seed, kv_key_t *keys, uint32_t n);

#define RAW_BLOCK_BYTES 8192u
#define RAW_LEAVES      4u

#endif
