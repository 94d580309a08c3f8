/* Messages between the daemon and its keeper. */
#include "keeper_socket.h"

#include "kv/log.h"
#include "kv/sock.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#define SEND_MS 100

static void send_to_keeper(int keeper_fd, char verb, const char *name, int fd)
{
	struct pollfd room = {.fd = keeper_fd, .events = POLLOUT};
	kvd_word_t word = {.verb = verb};
	ssize_t sent;

	if (keeper_fd < 0) {
		return;
	}
	snprintf(word.name, sizeof word.name, "%s", name);
	sent = kv_sock_send_message(keeper_fd, &word, sizeof word, fd, MSG_DONTWAIT);
	/* A start hands in more than fits into the socket. */
	if (sent < 0 && errno == EAGAIN && poll(&room, 1, SEND_MS) > 0) {
		sent = kv_sock_send_message(keeper_fd, &word, sizeof word, fd, MSG_DONTWAIT);
	}
	if (sent < 0) {
		kv_log(KV_LOG_WARN, "keeper", "a descriptor was not handed in: name %s error \"%s\"", name,
		       strerror(errno));
	}
}

void kvd_keeper_hold(int keeper_fd, const char *name, int fd)
{
	send_to_keeper(keeper_fd, 'H', name, fd);
}

void kvd_keeper_keep(int keeper_fd, const char *name, int fd)
{
	send_to_keeper(keeper_fd, 'K', name, fd);
}

void kvd_keeper_drop(int keeper_fd, const char *name)
{
	send_to_keeper(keeper_fd, 'D', name, -1);
}

void kvd_keeper_config(int keeper_fd, int fd)
{
	send_to_keeper(keeper_fd, 'H', KVD_KEEPER_CONFIG, fd);
}

void kvd_keeper_serves(int keeper_fd)
{
	send_to_keeper(keeper_fd, 'S', "", -1);
}

int kvd_keeper_receive(int daemon_fd, kvd_word_t *word, int *p_fd)
{
	int fds[KV_WIRE_MAX_FDS];
	uint32_t count = 0;
	size_t len = 0;

	memset(word, 0, sizeof *word);
	if (kv_sock_recv(daemon_fd, (uint8_t *)word, sizeof *word, &len, fds, &count) != KV_OK) {
		return 0;
	}
	*p_fd = count == 1 ? fds[0] : -1;
	word->name[KVD_KEEPER_NAME - 1] = '\0';

	return 1;
}

void kvd_keeper_ask_end(int daemon_fd)
{
	if (send(daemon_fd, "E", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
		kv_log(KV_LOG_WARN, "keeper", "the daemon cannot be asked to end: error \"%s\"", strerror(errno));
	}
}
