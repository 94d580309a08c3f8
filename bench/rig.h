/* rig.h -- what the benches of the whole daemon share: a kvd of their own, keys, and the raw references they are
 * compared with. */
#ifndef RIG_H
#define RIG_H

#include "kvc.h"

#include <sys/types.h>

#define RIG_MAX_OPTIONS 24

/* A kvd in a temporary directory. */
typedef struct rig {
	pid_t pid;
	char dir[64];
	char socket[96];
	const char *options[RIG_MAX_OPTIONS]; /* extra --name=value, NULL-terminated */
	int cpu;                              /* processor the daemon is pinned to; -1: none */
} rig_t;

/* Start kvd (built beside this program) and wait until it serves. rig->options and rig->cpu are the caller's; dir is
 * made when empty. Returns 0, or -1 after a message. */
int rig_start(rig_t *rig, uint32_t timeout_ms);
/* End the daemon: SIGTERM, or SIGKILL when `hard`. The directory stays. */
void rig_stop(rig_t *rig, int hard);
/* End it and remove the directory. */
void rig_remove(rig_t *rig);

/* Attach and open a space of opaque blocks of this many bytes, 16 tokens each. Returns 0, or -1 after a message. */
int rig_attach(const rig_t *rig, const char *model, uint32_t block_bytes, kvc_t **p_kvc, kvc_space_t **p_space);

/* Keys of a made-up prompt: n keys, the first `shared` of them those of prompt `base`. Distinct for distinct (seed,
 * base). */
void rig_keys(const kvc_space_t *space, uint64_t base, uint32_t shared, uint64_t seed, uint32_t n, kvc_key_t *keys);

/* A whole number out of the daemon's STATS; UINT64_MAX when it cannot be had. */
uint64_t rig_metric(const rig_t *rig, const char *name);

/* A port of the loopback that nobody listens on. 0: there is none. */
uint16_t rig_free_port(void);
/* A counter at /metrics of that port; UINT64_MAX when it cannot be had. */
uint64_t rig_counter(uint16_t port, const char *name);
/* Of a histogram there, which the core loop does not serve: how many values are at most 1 us, 2 us, 4 us, ... Returns
 * how many words there are (at most cap), 0 when it cannot be had. */
uint32_t rig_histogram(uint16_t port, const char *name, uint64_t *below, uint32_t cap);

/* Put keys[from, n) without writing payload (digests only): for benches of the index, not of the bytes. Returns 0 on
 * success. */
int rig_put_index(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n);
/* The same, waiting until the blocks are on disk for good. */
int rig_put_durable(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n);

/* A raw UNIX-socket echo partner in a process of its own, pinned to `cpu`, that spins `spin_us` before it sleeps. */
typedef struct rig_echo {
	pid_t pid;
	int fd;
	uint32_t spin_us;
	uint32_t ask_bytes, reply_bytes; /* of each round trip */
} rig_echo_t;
/* The caller sets spin_us, ask_bytes and reply_bytes. */
int rig_echo_start(rig_echo_t *echo, int cpu);
/* One round trip: ask_bytes there, reply_bytes back. */
void rig_echo_trip(rig_echo_t *echo);
void rig_echo_stop(rig_echo_t *echo);

/* System calls that fn(arg) makes after prepare(arg), counted by the kernel's tracing in a forked child (libkvc's
 * mappings do not survive a fork, so prepare attaches there); -1: tracing is not permitted here. */
typedef void (*rig_step_fn)(void *arg);
long rig_count_syscalls(rig_step_fn prepare, rig_step_fn fn, void *arg);

#endif
