/* Programs of kvd's own: see helper.h. */
#include "helper.h"

#include "kv/system.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define HIGH_FD 16 /* below it the process's own descriptors are put in place */

extern char **environ;

kv_status_t kvd_helper_open(const char *name, int *p_program_fd, char *detail, size_t cap)
{
	char path[PATH_MAX];
	ssize_t n = readlink("/proc/self/exe", path, sizeof path - strlen(name) - 1u);
	const char *folder_end;
	size_t folder_len;
	int fd, high, error;

	path[n > 0 ? n : 0] = '\0';
	folder_end = strrchr(path, '/');
	folder_len = folder_end ? (size_t)(folder_end + 1 - path) : 0;
	snprintf(path + folder_len, sizeof path - folder_len, "%s", name);
	fd = open(path, O_PATH | O_CLOEXEC);
	if (fd < 0) {
		snprintf(detail, cap, "cannot open the program %.300s: %s", path, strerror(errno));
		return KV_ERR_PATH;
	}
	high = fcntl(fd, F_DUPFD_CLOEXEC, HIGH_FD);
	error = errno;
	close(fd);
	if (high < 0) {
		(void)kv_refused_text("fcntl", error, detail, cap);
		return kv_refused_status(error);
	}
	*p_program_fd = high;

	return KV_OK;
}

static int spawn(int program_fd, int socket_fd, char *const argv[], pid_t *p_pid)
{
	posix_spawn_file_actions_t files;
	posix_spawnattr_t attr;
	sigset_t none, all;
	int result;

	sigemptyset(&none);
	sigfillset(&all);
	posix_spawn_file_actions_init(&files);
	posix_spawn_file_actions_adddup2(&files, socket_fd, KVD_HELPER_FD);
	posix_spawn_file_actions_adddup2(&files, program_fd, KVD_HELPER_FD + 1);
	posix_spawn_file_actions_addclosefrom_np(&files, KVD_HELPER_FD + 2);
	posix_spawnattr_init(&attr);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
	posix_spawnattr_setsigmask(&attr, &none);
	posix_spawnattr_setsigdefault(&attr, &all);
	result = posix_spawn(p_pid, "/proc/self/fd/4", &files, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&files);

	return result;
}

kv_status_t kvd_helper_start(int program_fd, char *const argv[], pid_t *p_pid, int *p_fd)
{
	int pair[2], theirs, result;
	kv_status_t status = KV_OK;
	pid_t pid = 0;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
		return kv_refused(&kv_env_posix, "main", "socketpair", errno);
	}
	theirs = fcntl(pair[1], F_DUPFD_CLOEXEC, HIGH_FD);
	result = theirs < 0 ? errno : spawn(program_fd, theirs, argv, &pid);
	if (result != 0) {
		status = kv_refused(&kv_env_posix, "main", theirs < 0 ? "fcntl" : "posix_spawn", result);
	}
	close(pair[1]);
	if (theirs >= 0) {
		close(theirs);
	}
	if (result != 0) {
		close(pair[0]);
		errno = result;
		return status;
	}
	*p_pid = pid;
	*p_fd = pair[0];

	return KV_OK;
}
