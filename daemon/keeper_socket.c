/* Messages between the daemon and its keeper. */
#include "keeper_socket.h"

#include "kv/log.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#define SEND_MS 100

static void send_to_keeper(int keeper_fd, char verb, const char *name, int fd)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	kvd_word_t word = {.verb = verb};
	struct iovec part = {&word, sizeof word};
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};

	if (keeper_fd < 0) {
		return;
	}
	snprintf(word.name, sizeof word.name, "%s", name);
	if (fd >= 0) {
		memset(&control, 0, sizeof control);
		message.msg_control = control.bytes;
		message.msg_controllen = sizeof control.bytes;
		control.align.cmsg_level = SOL_SOCKET;
		control.align.cmsg_type = SCM_RIGHTS;
		control.align.cmsg_len = CMSG_LEN(sizeof fd);
		memcpy(CMSG_DATA(&control.align), &fd, sizeof fd);
	}
	struct pollfd room = {.fd = keeper_fd, .events = POLLOUT};
	ssize_t sent = sendmsg(keeper_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);

	/* A start hands in more than fits into the socket. */
	if (sent < 0 && errno == EAGAIN && poll(&room, 1, SEND_MS) > 0) {
		sent = sendmsg(keeper_fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
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
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec part = {word, sizeof *word};
	struct msghdr message = {.msg_iov = &part,
				 .msg_iovlen = 1,
				 .msg_control = control.bytes,
				 .msg_controllen = sizeof control.bytes};

	const struct cmsghdr *head;
	ssize_t n;

	memset(word, 0, sizeof *word);
	*p_fd = -1;
	do {
		n = recvmsg(daemon_fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	} while (n < 0 && errno == EINTR);
	if (n <= 0) {
		return 0;
	}
	head = CMSG_FIRSTHDR(&message);
	if (head && head->cmsg_type == SCM_RIGHTS && head->cmsg_len == CMSG_LEN(sizeof *p_fd)) {
		memcpy(p_fd, CMSG_DATA(head), sizeof *p_fd);
	}
	word->name[KVD_KEEPER_NAME - 1] = '\0';

	return 1;
}

void kvd_keeper_ask_end(int daemon_fd)
{
	if (send(daemon_fd, "E", 1, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
		kv_log(KV_LOG_WARN, "keeper", "the daemon cannot be asked to end: error \"%s\"", strerror(errno));
	}
}
