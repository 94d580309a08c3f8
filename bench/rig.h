/* rig.h -- a kvd of the program's own, keys, and the raw references that the whole daemon is compared with. */
#ifndef RIG_H
#define RIG_H

#include "bench.h"
#include "kvc.h"

#include <sys/types.h>

/* A kvd in a temporary directory, with its log, and what rig_attach() opens. */
typedef struct rig {
	pid_t pid;
	char dir[160]; /* below /tmp when rig_start() finds it empty */
	char socket[192];
	char options[1024]; /* words of a shell */
	char before[64];    /* words of a shell in front of kvd: a program that becomes it */
	int cpu;            /* processor the daemon is pinned to, + 1; 0: none */
	kvc_t *kvc;
	kvc_space_t *space;
} rig_t;

/* Start kvd (built in this program's folder) with these options (printf format; words of a shell) and wait until it
 * serves. Returns 0, or -1 after a message and the daemon's log. rig_remove() follows in any case. */
int rig_start(rig_t *rig, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The same again, after rig_stop(). */
int rig_run(rig_t *rig);
/* End the daemon: SIGTERM, or SIGKILL when `hard`. The directory stays. */
void rig_stop(rig_t *rig, int hard);
/* Detach, end it and remove the directory. */
void rig_remove(rig_t *rig);

/* Attach and open a space of opaque blocks of this many bytes, 16 tokens each. Returns 0, or -1 after a message. */
int rig_attach(rig_t *rig, const char *model, uint32_t block_bytes);

/* n keys of a made-up prompt, distinct for distinct seeds. */
void rig_keys(const kvc_space_t *space, uint64_t seed, uint32_t n, kvc_key_t *keys);

/* A whole number out of the daemon's STATS; UINT64_MAX when it cannot be had. */
uint64_t rig_metric(const rig_t *rig, const char *name);

/* A port of the loopback that nobody listens on. 0: there is none. */
uint16_t rig_free_port(void);

/* Start two daemons, n0 and n1, with these options, which listen at these addresses and are each other's one peer, and
 * wait until each has a link to the other. */
bench_outcome_t rig_start_peers(rig_t rigs[2], char addresses[2][32], const char *options);

/* Put keys[from, n) without writing payload (digests only): for benches of the index, not of the bytes. durable: wait
 * until the blocks are on disk for good. Returns 0 on success. */
int rig_put(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n, int durable);

/* Acquire and release the whole prefix; nanoseconds, 0: it was not leased whole. */
uint64_t rig_acquire_ns(const rig_t *rig, const kvc_key_t *keys, uint32_t n);

/* So often, of the first n keys: this quantile of the times. */
typedef struct rig_pairs {
	const kvc_key_t *keys;
	uint32_t n, count;
	double quantile;
} rig_pairs_t;
bench_outcome_t rig_acquire_often(const rig_t *rig, rig_pairs_t pairs, double *ns, bench_sample_t *p_sample);

/* A raw partner in a process of its own that answers each message of `ask` bytes with `reply` bytes, at most
 * RIG_ECHO_BYTES each: what a round trip over a UNIX socket takes. Both sides look at the socket for spin_ns before
 * they sleep. */
#define RIG_ECHO_BYTES 512u
typedef struct rig_echo {
	pid_t pid;
	int fd; /* -1 after rig_echo_stop() */
	uint32_t ask, reply;
	uint64_t spin_ns;
} rig_echo_t;

/* Start it on the n-th CPU of the program (bench_pin()). Returns 0, or -1. rig_echo_stop() follows in any case. */
int rig_echo_start(rig_echo_t *echo, unsigned n);
/* One round trip; 0: the partner has gone. */
int rig_echo_trip(const rig_echo_t *echo);
void rig_echo_stop(rig_echo_t *echo);

/* System calls that fn(arg) makes after prepare(arg), counted by the kernel's tracing in a forked child (libkvc's
 * mappings do not survive a fork, so prepare attaches there); -1: tracing is not permitted here. */
typedef void (*rig_step_fn)(void *arg);
long rig_count_syscalls(rig_step_fn prepare, rig_step_fn fn, void *arg);

#endif
