/* peers.h -- two real daemons on this machine that know each other as node0 and node1. */
#ifndef TESTS_E2E_RIG_PEERS_H
#define TESTS_E2E_RIG_PEERS_H

#include "e2e/rig/rig.h"

#define PEERS_SILENT 40u

typedef struct peers {
	rig_t rig[2];
	uint16_t port[2];
	int port_fd[2];  /* keep them ours */
	char key[2][96]; /* key files */
} peers_t;

/* Directories, ports that nobody else is given, one key. Nothing runs yet. */
void peers_init(peers_t *peers);
/* Daemon i has UCX. Skips the test where kvd was built without it. */
void peers_use_ucx(peers_t *peers, uint32_t i);
void peers_start(peers_t *peers);
/* Wait until each has a link to the other. */
void peers_connected(const peers_t *peers);
void peers_fini(peers_t *peers);
/* Neither has a hand-over, and both are quiet. */
void peers_check_quiet(const peers_t *peers);
/* Pid of a daemon's net process; 0: there is none now. */
pid_t peers_net(const peers_t *peers, uint32_t i);
/* Write a key file of this text and mode. */
void peers_write_key(const char *path, const char *text, mode_t mode);
/* Ports that this process listens on. */
uint32_t peers_ports(pid_t pid, uint16_t *ports, uint32_t cap);
/* On these ports; and connections that stay, and say nothing. */
void peers_send_garbage(const uint16_t *ports, uint32_t n);
/* A socket that listens on loopback, at this port. */
int peers_listen(uint16_t *p_port);
/* A TCP connection to the port on loopback; it fails the test when there is none. */
int peers_dial(uint16_t port);

#endif
