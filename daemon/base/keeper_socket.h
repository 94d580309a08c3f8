/* daemon/base/keeper_socket.h -- what the daemon and its keeper tell each other over their pair of SOCK_SEQPACKET
 * sockets.
 *
 * The daemon never waits for the keeper: what the socket does not take stays in a queue, in order, and
 * kvd_keeper_flush() sends it later. The next daemon may rely on the order: it knows nothing that was said after what
 * it does not know (decision 073).
 */
#ifndef KVD_KEEPER_SOCKET_H
#define KVD_KEEPER_SOCKET_H

#include "kv/metric.h"
#include "kv/status.h"

#define KVD_KEEPER_NAME   96u      /* bytes of a name, with its end */
#define KVD_KEEPER_NAMES  32768u   /* that a keeper holds at most, and descriptors that wait for it */
#define KVD_KEEPER_CONFIG "config" /* the name of the configuration, which outlives a daemon */
#define KVD_KEEPER_WRITER "pidfd." /* how the name of a member's pidfd begins; each is used once */

/* One message: 'H' (hold), 'K' (keep) or 'D' (drop) and a name, or 'S': the daemon serves. 'T' with a number: the next
 * program can take over that many names. */
typedef struct kvd_word {
	char verb;
	char name[KVD_KEEPER_NAME];
} kvd_word_t;

/* A message that waits. */
typedef struct kvd_keeper_entry {
	kvd_word_t word; /* verb 0: it was taken back */
	int fd;          /* -1: none */
} kvd_keeper_entry_t;

/* Daemon side: its end of the pair. Begins as {.fd = socket, .metrics = ...}; one thread. */
typedef struct kvd_keeper_queue {
	int fd; /* -1: there is no keeper, and nothing happens */
	kv_metrics_t *metrics;
	kvd_keeper_entry_t *entries; /* [first, count) wait */
	uint32_t first, count, cap;
	uint32_t waiting; /* of them, not taken back */
	uint32_t writers; /* of those, pidfds of members */
} kvd_keeper_queue_t;

/* Room for this many descriptors more, which kvd_keeper_hold() and _keep() then take. KV_ERR_BUSY: as many wait as may;
 * KV_ERR_NOMEM. Both are counted. */
kv_status_t kvd_keeper_reserve(kvd_keeper_queue_t *queue, uint32_t more);

/* Hand a duplicate of fd in under a name, until this daemon ends (hold) or also for the next one (keep), or let go of
 * it. The descriptor stays open until its name is dropped or the queue is closed. Without room the keeper does not get
 * it: counted and logged. */
void kvd_keeper_hold(kvd_keeper_queue_t *queue, const char *name, int fd);
void kvd_keeper_keep(kvd_keeper_queue_t *queue, const char *name, int fd);
void kvd_keeper_drop(kvd_keeper_queue_t *queue, const char *name);

/* The configuration of the next daemon (the memfd is the queue's from now on), and: this one serves. */
void kvd_keeper_config(kvd_keeper_queue_t *queue, int fd);
void kvd_keeper_serves(kvd_keeper_queue_t *queue);

/* Send what the socket takes now. Between two iterations. */
void kvd_keeper_flush(kvd_keeper_queue_t *queue);
/* Send the rest, which a keeper that reads gets within wait_ms; what it does not get is forgotten. */
void kvd_keeper_close(kvd_keeper_queue_t *queue, uint32_t wait_ms);

/* The next program's --check-config. 0: the keeper does not hear it. */
int kvd_keeper_answer(int keeper_fd, uint32_t names);

/* Keeper side. Take one message; *p_fd is the caller's, -1: it has none. Returns 0 when there is no message. */
int kvd_keeper_receive(int daemon_fd, kvd_word_t *word, int *p_fd);

/* Keeper side. Have the daemon end as by SIGTERM; for systemd the service goes on. */
void kvd_keeper_ask_end(int daemon_fd);

#endif
