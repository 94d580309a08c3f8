/* A daemon under test: start, stop, read its log. */
#include "daemon/raw.h"
#include "kv_child.h"

#include "kv/sock.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

static uint64_t now_ms(void)
{
	return kv_env_posix.now_ns(NULL) / 1000000u;
}

/* Fork and exec kvd with its output in a file. */
static pid_t launch(const char *const *argv, const char *out)
{
	pid_t pid = fork();

	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL); /* a test that dies leaves no daemon behind */
		int fd = open(out, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

		dup2(fd, STDOUT_FILENO);
		dup2(fd, STDERR_FILENO);
		execv(kv_test_program(RAW_KVD), (char *const *)(uintptr_t)argv);
		_exit(127);
	}
	assert_true(pid > 0);

	return pid;
}

/* Somebody listens (the connection is closed at once). */
static int answers(const char *path)
{
	int fd, error;

	if (kv_sock_connect(path, &fd, &error) != KV_OK) {
		return 0;
	}
	close(fd);

	return 1;
}

int raw_daemon_spawn(raw_daemon_t *daemon, const char *const *args, int *p_exit)
{
	char run_dir[96];
	const char *argv[RAW_MAX_ARGS + 16] = {kv_test_program(RAW_KVD),
					       run_dir,
					       "--keeper=off",
					       "--http.listen=off",
					       "--cpu.size=8MiB",
					       "--cpu.slab_size=1MiB",
					       "--cpu.prefault=off",
					       "--cpu.huge_pages=off",
					       "--index.max_blocks=4096",
					       "--spin=0us",
					       "--limits.silence=10s"};
	size_t argc = 11;
	uint64_t deadline = now_ms() + RAW_TIMEOUT_MS;
	int wstatus;

	snprintf(run_dir, sizeof run_dir, "--run_dir=%s", daemon->dir);
	snprintf(daemon->sock, sizeof daemon->sock, "%s/default.sock", daemon->dir);
	snprintf(daemon->log, sizeof daemon->log, "%s/log", daemon->dir);
	for (; args && *args; args++) {
		assert_true(argc < RAW_MAX_ARGS + 15);
		argv[argc++] = *args;
	}
	daemon->pid = launch(argv, daemon->log);
	while (now_ms() < deadline) {
		if (waitpid(daemon->pid, &wstatus, WNOHANG) == daemon->pid) {
			daemon->pid = 0;
			*p_exit = child_exit_of(wstatus);
			return 0;
		}
		if (answers(daemon->sock)) {
			return 1;
		}
		usleep(2000);
	}
	fail_msg("kvd neither started nor ended");

	return 0;
}

void raw_daemon_start(raw_daemon_t *daemon, const char *const *args)
{
	int code = 0;

	memset(daemon, 0, sizeof *daemon);
	kv_test_dir_make(daemon->dir, sizeof daemon->dir);
	if (!raw_daemon_spawn(daemon, args, &code)) {
		char text[2048];

		(void)kv_test_read(daemon->log, text, sizeof text);
		fail_msg("kvd ended with %d: %s", code, text);
	}
}

int raw_daemon_kill(raw_daemon_t *daemon, int signal)
{
	uint64_t deadline = now_ms() + RAW_TIMEOUT_MS;
	int wstatus = 0;

	assert_true(daemon->pid > 0);
	kill(daemon->pid, signal);
	while (waitpid(daemon->pid, &wstatus, WNOHANG) != daemon->pid) {
		if (now_ms() > deadline) {
			kill(daemon->pid, SIGKILL);
			fail_msg("kvd did not end after signal %d", signal);
		}
		usleep(1000);
	}
	daemon->pid = 0;

	return child_exit_of(wstatus);
}

void raw_daemon_end(raw_daemon_t *daemon)
{
	int code = daemon->pid > 0 ? raw_daemon_kill(daemon, SIGTERM) : 0;

	if (code != 0) {
		char command[160];
		snprintf(command, sizeof command, "tail -n 40 %s >&2", daemon->log);
		code = system(command) == 0 ? code : code;
	}
	kv_test_dir_remove(daemon->dir);
	assert_int_equal(code, 0);
}

int raw_log_has(const raw_daemon_t *daemon, const char *text)
{
	static char log[1 << 20];

	(void)kv_test_read(daemon->log, log, sizeof log);

	return strstr(log, text) != NULL;
}

int raw_open_when_there(const raw_daemon_t *daemon)
{
	for (int i = 0; i < RAW_TIMEOUT_MS; i++) {
		int fd, error;

		if (kv_sock_connect(daemon->sock, &fd, &error) == KV_OK) {
			if (raw_hello(fd) == KV_OK) {
				return fd;
			}
			close(fd);
		}
		usleep(1000);
	}
	fail_msg("the daemon did not come back");

	return -1;
}

int raw_listen_anywhere(uint16_t *p_port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
	assert_int_equal(listen(fd, 1), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
	*p_port = ntohs(address.sin_port);

	return fd;
}

int raw_run(const char *const *args, char *out, size_t cap)
{
	const char *argv[RAW_MAX_ARGS + 2] = {kv_test_program(RAW_KVD)};
	char path[] = "/tmp/kvd-test-out-XXXXXX";
	int fd = mkstemp(path);
	int wstatus = 0;

	assert_true(fd >= 0);
	close(fd);
	for (size_t i = 0; args[i]; i++) {
		argv[i + 1] = args[i];
	}
	pid_t pid = launch(argv, path);
	assert_int_equal(waitpid(pid, &wstatus, 0), pid);
	(void)kv_test_read(path, out, cap);
	unlink(path);

	return child_exit_of(wstatus);
}
