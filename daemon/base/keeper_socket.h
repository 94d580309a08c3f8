/* daemon/base/keeper_socket.h -- what the daemon and its keeper tell each other over their pair of SOCK_SEQPACKET
 * sockets. */
#ifndef KVD_KEEPER_SOCKET_H
#define KVD_KEEPER_SOCKET_H

#define KVD_KEEPER_NAME   96u      /* bytes of a name, with its end */
#define KVD_KEEPER_CONFIG "config" /* the name of the configuration, which outlives a daemon */

/* One message: 'H' (hold), 'K' (keep) or 'D' (drop) and a name, or 'S': the daemon serves. */
typedef struct kvd_word {
	char verb;
	char name[KVD_KEEPER_NAME];
} kvd_word_t;

/* Daemon side. Hand a duplicate of fd in under a name, until this daemon ends (hold) or also for the next one (keep),
 * or let go of it. It waits for the keeper at most 100 ms; fd -1 of the keeper: nothing happens. */
void kvd_keeper_hold(int keeper_fd, const char *name, int fd);
void kvd_keeper_keep(int keeper_fd, const char *name, int fd);
void kvd_keeper_drop(int keeper_fd, const char *name);

/* Daemon side. The configuration of the next daemon (a duplicate of this memfd), and: this one serves. */
void kvd_keeper_config(int keeper_fd, int fd);
void kvd_keeper_serves(int keeper_fd);

/* Keeper side. Take one message; *p_fd is the caller's, -1: it has none. Returns 0 when there is no message. */
int kvd_keeper_receive(int daemon_fd, kvd_word_t *word, int *p_fd);

/* Keeper side. Have the daemon end as by SIGTERM; for systemd the service goes on. */
void kvd_keeper_ask_end(int daemon_fd);

#endif
