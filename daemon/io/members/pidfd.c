/* Whose pidfd a member hands in. */
#include "io/members/pidfd.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define PIDFS_MAGIC     0x50494446 /* linux/magic.h of 6.9 and later */
#define PROCESS_OF_INFO (UINT64_C(1) << 63)

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77 /* asm-generic/socket.h of 6.5 and later */
#endif

/* A number that tells the pidfd's process from all others that live, whatever namespace they are in: in pidfs (Linux
 * 6.9) the inode is the process. 0: an older kernel. */
static uint64_t pidfd_inode(int fd)
{
	struct statfs fs;
	struct stat info;

	if (fstatfs(fd, &fs) == 0 && fs.f_type == PIDFS_MAGIC && fstat(fd, &info) == 0) {
		return PROCESS_OF_INFO | (uint64_t)info.st_ino;
	}

	return 0;
}

/* The process id in a pidfd's fdinfo, 0: it has none in our namespace; negative: it has ended, or this is no pidfd. */
static long pidfd_process_id(int fd)
{
	char path[64], line[256];
	long pid = -1;
	FILE *info;

	snprintf(path, sizeof path, "/proc/self/fdinfo/%d", fd);
	info = fopen(path, "re");
	if (!info) {
		return -1;
	}
	while (fgets(line, sizeof line, info)) {
		if (strncmp(line, "Pid:", 4) == 0) {
			pid = strtol(line + 4, NULL, 10);
		}
	}
	fclose(info);

	return pid;
}

/* Is it of the process that opened the connection? */
static int is_socket_peer(int socket, uint64_t inode)
{
	int peer = -1, same;
	socklen_t len = sizeof peer;

	if (inode == 0 || getsockopt(socket, SOL_SOCKET, SO_PEERPIDFD, &peer, &len) != 0) {
		return 0;
	}
	same = pidfd_inode(peer) == inode;
	close(peer);

	return same;
}

kvd_pidfd_t kvd_pidfd_check(const kvd_session_t *session, uint64_t *p_process)
{
	int fd = session->fds[0];
	struct pollfd look = {.fd = fd, .events = POLLIN};
	long pid = pidfd_process_id(fd);
	uint64_t inode;

	if (pid < 0 || poll(&look, 1, 0) != 0) {
		return KVD_PIDFD_BAD;
	}
	inode = pidfd_inode(fd);
	*p_process = inode ? inode : (uint64_t)pid;
	/* The kernel says who sent it, and a live process shares its id with nobody. Where we do not see that id, the
	 * connection's opener must do. */
	if (pid > 0 && session->fds_sender > 0) {
		return pid == session->fds_sender ? KVD_PIDFD_OWN : KVD_PIDFD_UNPROVED;
	}

	return is_socket_peer(session->source.fd, inode) ? KVD_PIDFD_OWN : KVD_PIDFD_UNPROVED;
}
