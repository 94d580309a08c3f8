/* The process around the daemon. */
#include "process.h"

#include "kv/log.h"
#include "kv/sock.h"
#include "kv/system.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

/* What is opened in the place of a closed standard stream would get our log lines, shared memory too. */
static void fill_streams(void)
{
	int fd;

	do {
		fd = open("/dev/null", O_RDWR); /* the lowest free number */
	} while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0) {
		close(fd);
	}
}

void kvd_process_prepare(void)
{
	sigset_t set;

	fill_streams();
	umask(0077);
	kv_rlimit_raise_files();
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGXFSZ, SIG_IGN); /* a file over its limit is an error of that file */
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGUSR2);
	sigprocmask(SIG_BLOCK, &set, NULL);
}

/* May nobody but us and root replace what is in run_dir? Root may own what others share. */
static int is_private(int dir_fd, const char *run_dir, char *detail, size_t cap)
{
	struct stat st;

	if (fstat(dir_fd, &st) != 0 || (st.st_uid != geteuid() && st.st_uid != 0)) {
		snprintf(detail, cap,
			 "run_dir: %s is another user's, who could take the place of its sockets; choose another with "
			 "--run_dir=PATH",
			 run_dir);
		return 0;
	}
	if ((st.st_mode & (S_IWOTH | S_ISVTX)) == S_IWOTH) {
		snprintf(detail, cap,
			 "run_dir: everybody may write to %s; take that away (chmod o-w), or choose another with "
			 "--run_dir=PATH",
			 run_dir);
		return 0;
	}

	return 1;
}

kv_status_t kvd_process_lock(const char *run_dir, int *p_fd, char *detail, size_t cap)
{
	char path[KV_OPTION_STRING_MAX + 16];
	int dir_fd, fd = -1;

	/* Clients of the daemon's group must reach the sockets inside. */
	if (mkdir(run_dir, 0700) == 0) {
		(void)chmod(run_dir, 0755);
	} else if (errno != EEXIST) {
		snprintf(detail, cap, "run_dir: cannot make %s: %s; choose another with --run_dir=PATH", run_dir,
			 strerror(errno));
		return KV_ERR_PATH;
	}
	snprintf(path, sizeof path, "%s/kvd.lock", run_dir);
	dir_fd = open(run_dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (dir_fd >= 0) {
		if (!is_private(dir_fd, run_dir, detail, cap)) {
			close(dir_fd);
			return KV_ERR_PATH;
		}
		fd = openat(dir_fd, "kvd.lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
		close(dir_fd);
	}
	if (fd < 0) {
		snprintf(detail, cap, "run_dir: cannot open %s: %s; choose another with --run_dir=PATH", path,
			 strerror(errno));
		return KV_ERR_PATH;
	}
	if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
		kv_status_t status = errno == EWOULDBLOCK                         ? KV_ERR_LOCKED
				     : kv_refused_status(errno) == KV_ERR_REFUSED ? KV_ERR_REFUSED
										  : KV_ERR_PATH;
		char why[KV_REFUSED_TEXT];

		if (status == KV_ERR_LOCKED) {
			snprintf(detail, cap,
				 "another kvd runs in %s (it holds %s); stop it, or choose another run_dir", run_dir,
				 path);
		} else {
			snprintf(detail, cap, "run_dir: cannot lock %s: %s", path,
				 kv_refused_text("flock", errno, why, sizeof why));
		}
		close(fd);
		return status;
	}
	*p_fd = fd;

	return KV_OK;
}

kv_status_t kvd_process_relock(const char *run_dir, int fd, char *detail, size_t cap)
{
	char path[KV_OPTION_STRING_MAX + 16];
	struct stat held;
	kv_status_t status;
	int again;

	snprintf(path, sizeof path, "%s/kvd.lock", run_dir);
	if (fstat(fd, &held) != 0 || kv_sock_is_at(path, (kv_sock_file_t){held.st_dev, held.st_ino})) {
		return KV_MISS;
	}
	status = kvd_process_lock(run_dir, &again, detail, cap);
	if (status == KV_OK) {
		(void)dup3(again, fd, O_CLOEXEC);
		close(again);
	}

	return status;
}

void kvd_process_notify(const char *line)
{
	const char *path = getenv("NOTIFY_SOCKET");
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	size_t len = path ? strlen(path) : 0;
	int fd;

	if (len < 2 || len >= sizeof address.sun_path || (path[0] != '/' && path[0] != '@')) {
		return;
	}
	memcpy(address.sun_path, path, len);
	if (path[0] == '@') {
		address.sun_path[0] = '\0'; /* abstract */
	}
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0) {
		return;
	}
	if (sendto(fd, line, strlen(line), MSG_NOSIGNAL | MSG_DONTWAIT, (struct sockaddr *)&address,
		   (socklen_t)(offsetof(struct sockaddr_un, sun_path) + len)) < 0) {
		kv_log(KV_LOG_WARN, "main", "cannot tell NOTIFY_SOCKET: error \"%s\"", strerror(errno));
	}
	close(fd);
}

uint32_t kvd_process_count_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	uint32_t n = 0;

	while (dir && readdir(dir)) {
		n++;
	}
	if (dir) {
		closedir(dir);
	}

	return n > 3 ? n - 3 : 0; /* "." and ".." and the directory itself */
}
