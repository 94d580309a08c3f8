/* Starting, stopping, crashing: the process around the daemon. */
#include "daemon/raw.h"
#include "kv_child.h"

#include "kv/sock.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u
#endif
#ifndef F_SEAL_EXEC
#define F_SEAL_EXEC 0x0020
#endif

static int exists(const char *dir, const char *name)
{
	char path[160];
	struct stat st;

	snprintf(path, sizeof path, "%s/%s", dir, name);

	return lstat(path, &st) == 0;
}

RAW_TEST(p4_sigterm_ends_with_0_and_leaves_no_socket, "--namespaces=other,default")
{
	struct stat st;

	assert_int_equal(stat(daemon_.sock, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0660);
	/* An answer says that all sockets are there; that one could be connected to does not. */
	int fd = raw_open(daemon_.sock);
	assert_true(exists(daemon_.dir, "other.sock") && exists(daemon_.dir, "other.events") &&
		    exists(daemon_.dir, "default.hits"));
	assert_int_equal(raw_daemon_kill(&daemon_, SIGTERM), 0);
	assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
	close(fd);

	DIR *dir = opendir(daemon_.dir);
	assert_non_null(dir);
	for (struct dirent *entry = readdir(dir); entry; entry = readdir(dir)) {
		assert_true(entry->d_name[0] == '.' || strcmp(entry->d_name, "kvd.lock") == 0 ||
			    strcmp(entry->d_name, "log") == 0);
	}
	closedir(dir);
}

static void access_is(const raw_daemon_t *daemon, const char *ns, mode_t mode, gid_t group)
{
	static const char *const ends[] = {"sock", "events", "hits"};
	char path[160];
	struct stat st;

	for (size_t i = 0; i < KV_COUNT_OF(ends); i++) {
		snprintf(path, sizeof path, "%s/%s.%s", daemon->dir, ns, ends[i]);
		assert_int_equal(stat(path, &st), 0);
		if ((st.st_mode & 0777) != mode || st.st_gid != group) {
			fail_msg("%s: mode %o group %u", path, st.st_mode & 0777, st.st_gid);
		}
	}
}

KV_TEST(p8_sockets_keep_their_group_and_mode_over_restarts)
{
	char group[64];
	const char *const args[] = {"--namespaces=a,b,default", group, "--sockets.mode=b=0600,a=0666", NULL};
	const gid_t other = getgid() == 0 ? 12345 : getgid(); /* only root may give it away */
	raw_daemon_t daemon;
	int code;

	snprintf(group, sizeof group, "--sockets.group=a=%u", other);
	raw_daemon_start(&daemon, args);
	for (int i = 0; i < 2; i++) {
		close(raw_open(daemon.sock));
		access_is(&daemon, "default", 0660, getgid());
		access_is(&daemon, "a", 0666, other);
		access_is(&daemon, "b", 0600, getgid());
		assert_int_equal(raw_daemon_kill(&daemon, i ? SIGTERM : SIGKILL), i ? 0 : 128 + SIGKILL);
		if (i == 0) {
			assert_int_equal(raw_daemon_spawn(&daemon, args, &code), 1);
		}
	}
	raw_daemon_end(&daemon);
}

KV_TEST(p6_sighup_reads_the_log_level_again_and_survives_a_typo)
{
	char dir[64], path[96];
	const char *const args[] = {"--config", path, NULL};
	raw_daemon_t daemon;

	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/kvd.conf", dir);
	kv_test_write(path, "log.level: info\n");
	raw_daemon_start(&daemon, args);
	int fd = raw_open(daemon.sock);
	kv_test_write(path, "log.levle: debug\n");
	kill(daemon.pid, SIGHUP);
	KV_AWAIT(raw_log_has(&daemon, "nothing has changed"));
	kv_test_write(path, "log.level: debug\n");
	kill(daemon.pid, SIGHUP);
	KV_AWAIT(raw_log_has(&daemon, "log.level is debug"));
	assert_true(raw_log_has(&daemon, "nothing has changed") && raw_log_has(&daemon, "log.level is debug"));
	assert_int_equal(raw_metric(fd, "kvd_sessions"), 1);
	close(fd);
	raw_daemon_end(&daemon);
	kv_test_dir_remove(dir);
}

KV_TEST(p6_a_second_daemon_on_the_same_run_dir_is_refused)
{
	raw_daemon_t first;
	int code;

	raw_daemon_start(&first, NULL);
	char run_dir[96], out[1024];
	snprintf(run_dir, sizeof run_dir, "--run_dir=%s", first.dir);
	const char *const args[] = {run_dir, "--http.listen=off", "--keeper=off", NULL};
	code = raw_run(args, out, sizeof out);
	assert_int_equal(code, kv_status_exit_code(KV_ERR_LOCKED));
	assert_non_null(strstr(out, "another kvd runs in"));
	close(raw_open(first.sock)); /* the first one has not noticed */
	raw_daemon_end(&first);
}

static const char *const sockets_[] = {"default.sock", "default.events", "default.hits"};

/* The socket can be connected to, with the mode that it had. */
static int is_served(const raw_daemon_t *daemon, const char *name, mode_t mode)
{
	char path[160];
	struct stat st;
	int fd, error;

	snprintf(path, sizeof path, "%s/%s", daemon->dir, name);
	if (kv_sock_connect(path, &fd, &error) != KV_OK) {
		return 0;
	}
	close(fd);

	return stat(path, &st) == 0 && (st.st_mode & 07777) == mode;
}

static void remove_sockets(const raw_daemon_t *daemon)
{
	char path[160];

	for (size_t i = 0; i < KV_COUNT_OF(sockets_); i++) {
		snprintf(path, sizeof path, "%s/%s", daemon->dir, sockets_[i]);
		assert_int_equal(unlink(path), 0);
	}
}

RAW_TEST(p6_sockets_that_were_removed_come_back, "--sockets.mode=default=0620", "--events.enabled=on")
{
	raw_member_t member;

	close(raw_open(daemon_.sock));
	raw_join(&member, daemon_.sock, "i");
	for (int round = 0; round < 2; round++) {
		remove_sockets(&daemon_);
		for (size_t i = 0; i < KV_COUNT_OF(sockets_); i++) {
			KV_AWAIT(is_served(&daemon_, sockets_[i], 0620));
		}
	}
	assert_int_equal(raw_space(&member, "m"), KV_OK); /* who was there has not noticed */
	raw_leave(&member);
	raw_join(&member, daemon_.sock, "j");
	assert_int_equal(raw_space(&member, "m"), KV_OK);
	raw_leave(&member);
	assert_true(raw_log_has(&daemon_, "a socket that was removed is back"));
	assert_int_equal(raw_daemon_kill(&daemon_, SIGTERM), 0);
	assert_false(exists(daemon_.dir, "default.sock") || exists(daemon_.dir, "default.hits"));
}

RAW_TEST(p6_a_run_dir_that_was_removed_comes_back_with_its_lock, "--events.enabled=on")
{
	char moved[160], run_dir[160], out[1024];
	const char *const args[] = {run_dir, "--http.listen=off", "--keeper=off", NULL};

	close(raw_open(daemon_.sock));
	snprintf(moved, sizeof moved, "%s.moved", daemon_.dir);
	snprintf(run_dir, sizeof run_dir, "--run_dir=%s", daemon_.dir);
	assert_int_equal(rename(daemon_.dir, moved), 0);
	for (size_t i = 0; i < KV_COUNT_OF(sockets_); i++) {
		KV_AWAIT(is_served(&daemon_, sockets_[i], 0660));
	}
	assert_int_equal(raw_run(args, out, sizeof out), kv_status_exit_code(KV_ERR_LOCKED));
	assert_non_null(strstr(out, "another kvd runs in"));
	close(raw_open(daemon_.sock));
	kv_test_dir_remove(moved);
}

/* Another daemon has taken the place: its sockets are not ours to remove. */
RAW_TEST(p6_a_socket_of_another_at_the_path_stays, NULL)
{
	int fd;

	close(raw_open(daemon_.sock));
	assert_int_equal(kill(daemon_.pid, SIGSTOP), 0);
	assert_int_equal(unlink(daemon_.sock), 0);
	assert_int_equal(kv_sock_listen(daemon_.sock, 0600, 4, &fd, &(kv_sock_error_t){0}), KV_OK);
	assert_int_equal(kill(daemon_.pid, SIGCONT), 0);
	KV_AWAIT(raw_log_has(&daemon_, "engines cannot attach"));
	assert_int_equal(raw_daemon_kill(&daemon_, SIGTERM), 0);
	assert_true(exists(daemon_.dir, "default.sock"));
	close(fd);
}

/* A start in the folder is refused with a text that names it. */
static void refused_in(const char *dir, const char *text)
{
	raw_daemon_t daemon = {0};
	int code = 0;

	snprintf(daemon.dir, sizeof daemon.dir, "%s", dir);
	if (raw_daemon_spawn(&daemon, NULL, &code)) {
		(void)raw_daemon_kill(&daemon, SIGTERM);
		fail_msg("it serves, and not \"%s\"", text);
	}
	assert_int_equal(code, kv_status_exit_code(KV_ERR_PATH));
	assert_true(raw_log_has(&daemon, text) && raw_log_has(&daemon, dir));
}

KV_TEST(p8_a_run_dir_that_others_may_change_is_refused)
{
	char dir[64], path[96], target[96];
	raw_daemon_t daemon = {0};
	int code;

	kv_test_dir_make(dir, sizeof dir);
	assert_int_equal(chmod(dir, 0777), 0);
	refused_in(dir, "everybody may write to");
	assert_int_equal(chmod(dir, 0702), 0);
	refused_in(dir, "everybody may write to");
	assert_int_equal(chmod(dir, 01777), 0); /* where all may make files, and none those of others */
	snprintf(daemon.dir, sizeof daemon.dir, "%s", dir);
	assert_int_equal(raw_daemon_spawn(&daemon, NULL, &code), 1);
	assert_int_equal(raw_daemon_kill(&daemon, SIGTERM), 0);

	/* No link is followed in the place of the lock. */
	snprintf(path, sizeof path, "%s/kvd.lock", dir);
	snprintf(target, sizeof target, "%s/target", dir);
	assert_int_equal(unlink(path), 0);
	assert_int_equal(symlink(target, path), 0);
	refused_in(dir, "cannot open");
	assert_int_equal(access(target, F_OK), -1);
	kv_test_dir_remove(dir);
}

KV_TEST(p8_a_run_dir_of_another_user_is_refused)
{
	char dir[64];

	if (geteuid() != 0) {
		print_message("only root can give a folder away\n");
		skip();
	}
	kv_test_dir_make(dir, sizeof dir);
	assert_int_equal(chown(dir, 65534, 65534), 0);
	refused_in(dir, "another user's");
	kv_test_dir_remove(dir);
}

/* Memfds of a process; how many can be executed or made so goes to *p_open. */
static uint32_t count_memfds(pid_t pid, uint32_t *p_open)
{
	uint32_t n = 0;

	for (int i = 0; i < 1024; i++) {
		char path[64], target[128];
		struct stat st;
		ssize_t len;
		int fd;

		snprintf(path, sizeof path, "/proc/%d/fd/%d", (int)pid, i);
		len = readlink(path, target, sizeof target - 1);
		target[len > 0 ? len : 0] = '\0';
		if (!strstr(target, "/memfd:")) {
			continue;
		}
		fd = open(path, O_RDONLY | O_CLOEXEC);
		assert_true(fd >= 0 && fstat(fd, &st) == 0);
		*p_open += (st.st_mode & 0111) != 0 || !(fcntl(fd, F_GET_SEALS) & F_SEAL_EXEC);
		close(fd);
		n++;
	}

	return n;
}

KV_TEST(p8_shared_memory_is_not_executable)
{
	const char *const args[] = {"--keeper=on", "--gpu.size=4MiB", "--gpu.slab_size=2MiB", "--gpu.devices=fake-0",
				    NULL};
	const int probe = memfd_create("probe", MFD_NOEXEC_SEAL);
	raw_daemon_t daemon;
	raw_member_t member;
	uint32_t open = 0;
	kv_key_t keys[1];

	if (probe < 0) {
		print_message("a kernel before 6.3\n");
		skip();
	}
	close(probe);
	raw_daemon_start(&daemon, args);
	close(raw_open_when_there(&daemon));
	raw_join(&member, daemon.sock, "i");
	assert_int_equal(raw_space(&member, "m"), KV_OK);
	raw_keys(1, keys, 1);
	assert_int_equal(raw_put(&member, keys, 1, 7), 1);
	KV_AWAIT(raw_metric(member.fd, "kvd_gpu_devices") == 1);
	assert_true(count_memfds(child_first(daemon.pid), &open) >= 8);
	KV_AWAIT(count_memfds(daemon.pid, &open) >= 3); /* ledger, slab, digests */
	assert_int_equal(open, 0);
	raw_leave(&member);
	raw_daemon_end(&daemon);
}

/* ---- HTTP ------------------------------------------------------------------------------------ */

static int http_connect(uint16_t port)
{
	struct sockaddr_in address = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);

	return fd;
}

static void http_get(uint16_t port, const char *request, char *out, size_t cap)
{
	int fd = http_connect(port);
	size_t have = 0;
	ssize_t n;

	assert_int_equal(send(fd, request, strlen(request), 0), (ssize_t)strlen(request));
	while (have < cap - 1 && (n = recv(fd, out + have, cap - 1 - have, 0)) > 0) {
		have += (size_t)n;
	}
	out[have] = '\0';
	close(fd);
}

KV_TEST(p10_a_taken_http_port_is_a_clear_refusal)
{
	raw_daemon_t daemon = {0};
	char listen[64];
	uint16_t port;
	int fd = raw_listen_anywhere(&port), code = 0;
	const char *const args[] = {listen, NULL};

	snprintf(listen, sizeof listen, "--http.listen=127.0.0.1:%u", port);
	kv_test_dir_make(daemon.dir, sizeof daemon.dir);
	assert_int_equal(raw_daemon_spawn(&daemon, args, &code), 0);
	assert_int_equal(code, kv_status_exit_code(KV_ERR_BUSY));
	assert_true(raw_log_has(&daemon, "is in use by another program; choose another port, or http.listen=off"));
	assert_false(exists(daemon.dir, "default.sock"));
	close(fd);
	raw_daemon_end(&daemon);
}

static void http_start(raw_daemon_t *daemon, uint16_t *p_port)
{
	char listen[64];
	const char *const args[] = {listen, NULL};

	close(raw_listen_anywhere(p_port));
	snprintf(listen, sizeof listen, "--http.listen=127.0.0.1:%u", *p_port);
	raw_daemon_start(daemon, args);
}

KV_TEST(p5_http_serves_metrics_and_health)
{
	static char out[1 << 18];
	raw_daemon_t daemon;
	uint16_t port;
	int fd;

	http_start(&daemon, &port);
	fd = raw_open(daemon.sock);
	raw_metric(fd, "kvd_sessions"); /* the loop has turned */
	http_get(port, "GET /metrics HTTP/1.0\r\n\r\n", out, sizeof out);
	assert_non_null(strstr(out, "200 OK"));
	assert_non_null(strstr(out, "\nkvd_sessions 1\n"));
	assert_non_null(strstr(out, "# TYPE kvd_request_seconds histogram"));
	/* 503 where the machine has not let the loop turn for a second. */
	KV_AWAIT((http_get(port, "GET /healthz HTTP/1.0\r\n\r\n", out, sizeof out), strstr(out, "200 OK")));
	http_get(port, "GET /readyz HTTP/1.0\r\n\r\n", out, sizeof out);
	assert_non_null(strstr(out, "ready"));
	http_get(port, "GET /etc/passwd HTTP/1.0\r\n\r\n", out, sizeof out);
	assert_non_null(strstr(out, "404"));
	close(fd);
	raw_daemon_end(&daemon);
}

KV_TEST(p10_other_methods_are_answered_with_what_is_allowed)
{
	static const char *const asked[] = {
		"POST /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 5\r\n\r\nhello",
		"POST /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
		"PUT /healthz HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
		"DELETE /metrics HTTP/1.0\r\n\r\n",
		"BREW /coffee HTTP/1.0\r\n\r\n",
	};
	char out[4096];
	raw_daemon_t daemon;
	uint16_t port;

	http_start(&daemon, &port);
	for (size_t i = 0; i < KV_COUNT_OF(asked); i++) {
		http_get(port, asked[i], out, sizeof out);
		if (!strstr(out, " 405 ") || !strstr(out, "Allow: GET, HEAD\r\n")) {
			fail_msg("%s: %s", asked[i], out);
		}
	}
	raw_daemon_end(&daemon);
}

#define SLOW 64u

/* Half of them never finish their request, the others never read their answers; all keep sending. */
static void keep_slow(const int *fds)
{
	static const char ask[] = "GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n";

	for (uint32_t i = 0; i < SLOW; i++) {
		if (i & 1u) {
			(void)!send(fds[i], ask, sizeof ask - 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		} else {
			(void)!send(fds[i], "x", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
		}
	}
}

KV_TEST(p5_probes_are_served_beside_slow_connections)
{
	static const char *const probes[] = {"GET /healthz HTTP/1.0\r\n\r\n", "GET /readyz HTTP/1.0\r\n\r\n"};
	raw_daemon_t daemon;
	uint16_t port;
	int slow[SLOW], fd;

	http_start(&daemon, &port);
	for (uint32_t i = 0; i < SLOW; i++) {
		slow[i] = http_connect(port);
		(void)!send(slow[i], i & 1u ? "" : "GET /", i & 1u ? 0 : 5, MSG_NOSIGNAL);
	}
	for (uint32_t i = 0; i < 10; i++) {
		const char *probe = probes[i % 2];
		struct pollfd look = {.fd = http_connect(port), .events = POLLIN};
		char out[512] = "";

		assert_int_equal(send(look.fd, probe, strlen(probe), 0), (ssize_t)strlen(probe));
		for (uint32_t waited = 0; poll(&look, 1, 10) == 0; waited += 10) {
			assert_true(waited < RAW_TIMEOUT_MS);
			keep_slow(slow);
		}
		assert_true(recv(look.fd, out, sizeof out - 1, 0) > 0);
		assert_true(strstr(out, "200 OK") || (i % 2 == 0 && strstr(out, " 503 ")));
		close(look.fd);
	}
	fd = raw_open(daemon.sock);
	assert_true(raw_metric(fd, "kvd_http_ended_total") > 0);
	close(fd);
	for (uint32_t i = 0; i < SLOW; i++) {
		close(slow[i]);
	}
	raw_daemon_end(&daemon);
}

#define N 8u

/* ---- the keeper ------------------------------------------------------------------------------ */

RAW_TEST(p6_the_keeper_holds_the_daemons_memory_until_it_dies, "--keeper=on")
{
	raw_member_t member;
	kv_key_t keys[N];

	raw_join(&member, daemon_.sock, "held");
	assert_int_equal(raw_space(&member, "held"), KV_OK);
	raw_keys(2, keys, N);
	assert_int_equal(raw_put(&member, keys, N, 1), N);
	KV_AWAIT(kv_test_count_fds(daemon_.pid, "/memfd:") >= 3);
	assert_true(kv_test_count_fds(daemon_.pid, "/memfd:") >= 3); /* ledger, a slab and its digests */
	kill(child_first(daemon_.pid), SIGKILL);
	raw_leave(&member);
	close(raw_open_when_there(&daemon_));
	KV_AWAIT(kv_test_count_fds(daemon_.pid, "/memfd:") == 1);
	assert_int_equal(kv_test_count_fds(daemon_.pid, "/memfd:"), 1); /* the new ledger only */
}

RAW_TEST(p6_the_keeper_gives_up_on_a_daemon_that_keeps_dying, "--keeper=on")
{
	int wstatus = 0;

	for (int crash = 0; crash < 5; crash++) {
		close(raw_open_when_there(&daemon_));
		pid_t child = child_first(daemon_.pid);
		assert_true(child > 0);
		kill(child, SIGKILL);
		KV_AWAIT(child_first(daemon_.pid) != child);
	}
	for (int i = 0; waitpid(daemon_.pid, &wstatus, WNOHANG) == 0; i++) {
		assert_true(i < RAW_TIMEOUT_MS);
		usleep(1000);
	}
	daemon_.pid = 0;
	assert_true(WIFEXITED(wstatus));
	assert_int_equal(WEXITSTATUS(wstatus), kv_status_exit_code(KV_ERR_INTERNAL));
	assert_true(raw_log_has(&daemon_, "giving up: crashes 5"));
}

KV_TEST(p6_a_daemon_ends_when_its_keeper_is_killed)
{
	static const char *const args[] = {"--keeper=on", NULL};
	raw_daemon_t daemon;
	int code;

	raw_daemon_start(&daemon, args);
	int fd = raw_open(daemon.sock);
	assert_int_equal(raw_daemon_kill(&daemon, SIGKILL), 128 + SIGKILL);
	assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
	close(fd);
	KV_AWAIT(!exists(daemon.dir, "default.sock"));
	assert_false(exists(daemon.dir, "default.sock")); /* in good order */
	for (int i = 0; !raw_daemon_spawn(&daemon, args, &code); i++) {
		assert_int_equal(code, kv_status_exit_code(KV_ERR_LOCKED)); /* it holds the lock until its very end */
		assert_true(i < 500);
		usleep(10000);
	}
	raw_daemon_end(&daemon);
}

/* Else its ledger, or a file on disk, takes the place of standard error and gets the log lines. */
KV_TEST(p6_a_daemon_with_closed_streams_logs_into_no_own_file)
{
	raw_daemon_t daemon = {0};
	char run_dir[96], name[64], target[96];

	kv_test_dir_make(daemon.dir, sizeof daemon.dir);
	snprintf(daemon.sock, sizeof daemon.sock, "%s/default.sock", daemon.dir);
	snprintf(run_dir, sizeof run_dir, "--run_dir=%s", daemon.dir);
	daemon.pid = fork();
	if (daemon.pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (int i = 0; i <= STDERR_FILENO; i++) {
			close(i);
		}
		execl(kv_test_program(RAW_KVD), "kvd", run_dir, "--keeper=off", "--http.listen=off", "--cpu.size=8MiB",
		      "--index.max_blocks=4096", (char *)NULL);
		_exit(127);
	}
	assert_true(daemon.pid > 0);
	for (int i = 0; i < 10000 && access(daemon.sock, F_OK) != 0; i++) {
		assert_int_equal(waitpid(daemon.pid, NULL, WNOHANG), 0);
		usleep(1000);
	}
	for (int i = 0; i <= STDERR_FILENO; i++) {
		ssize_t n;

		snprintf(name, sizeof name, "/proc/%d/fd/%d", (int)daemon.pid, i);
		n = readlink(name, target, sizeof target - 1);
		assert_true(n > 0);
		target[n] = '\0';
		assert_string_equal(target, "/dev/null");
	}
	raw_daemon_end(&daemon);
}
