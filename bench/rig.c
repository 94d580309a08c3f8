/* A kvd of the program's own, and the raw references. */
#include "rig.h"

#include "kvk/layout.h"

#include "bench.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define START_NS UINT64_C(60000000000)
#define WAIT_MS  30000

/* This process ends, or becomes kvd. */
_Noreturn static void become_daemon(const rig_t *rig)
{
	char self[PATH_MAX] = "", command[PATH_MAX + 1600];
	cpu_set_t set;
	char *slash;

	(void)prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (readlink("/proc/self/exe", self, sizeof self - 1) > 0 && (slash = strrchr(self, '/'))) {
		*slash = '\0';
	}
	if (rig->cpu > 0) {
		CPU_ZERO(&set);
		CPU_SET((size_t)rig->cpu - 1, &set);
		sched_setaffinity(0, sizeof set, &set);
	}
	snprintf(command, sizeof command,
		 "exec %s '%s/kvd' --run_dir='%s/run' --keeper=off --http.listen=off %s >>'%s/log' 2>&1", rig->before,
		 self, rig->dir, rig->options, rig->dir);
	execl("/bin/sh", "sh", "-c", command, (char *)NULL);
	_exit(127);
}

int rig_run(rig_t *rig)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = rig->socket, .observe = 1};
	const uint64_t deadline = bench_now_ns() + START_NS;
	char command[192];
	kvc_t *kvc;

	fflush(NULL);
	rig->pid = fork();
	if (rig->pid == 0) {
		become_daemon(rig);
	}
	while (rig->pid > 0 && bench_now_ns() < deadline && !bench_late()) {
		if (kvc_attach(&config, &kvc) == KVC_OK) {
			kvc_detach(kvc);
			return 0;
		}
		if (waitpid(rig->pid, NULL, WNOHANG) == rig->pid) {
			rig->pid = 0;
		}
		usleep(500);
	}
	printf("rig: kvd did not start: %s\n", kvc_last_error());
	fflush(stdout);
	snprintf(command, sizeof command, "cat '%s/log'", rig->dir); /* it goes with its directory */
	(void)!system(command);

	return -1;
}

int rig_start(rig_t *rig, const char *format, ...)
{
	va_list args;

	if (!rig->dir[0]) {
		snprintf(rig->dir, sizeof rig->dir, "/tmp/kvd-bench-XXXXXX");
		if (!mkdtemp(rig->dir)) {
			perror("rig: mkdtemp");
			rig->dir[0] = '\0';
			return -1;
		}
	}
	snprintf(rig->socket, sizeof rig->socket, "%s/run/default.sock", rig->dir);
	va_start(args, format);
	vsnprintf(rig->options, sizeof rig->options, format, args);
	va_end(args);

	return rig_run(rig);
}

void rig_stop(rig_t *rig, int hard)
{
	if (rig->pid > 0) {
		kill(rig->pid, hard ? SIGKILL : SIGTERM);
		waitpid(rig->pid, NULL, 0);
	}
	rig->pid = 0;
}

void rig_remove(rig_t *rig)
{
	char command[192];

	kvc_detach(rig->kvc);
	rig_stop(rig, 0);
	snprintf(command, sizeof command, "rm -rf -- '%s'", rig->dir);
	if (rig->dir[0] && system(command) != 0) {
		printf("rig: %s is left behind\n", rig->dir);
	}
	*rig = (rig_t){0};
}

int rig_attach(rig_t *rig, const char *model, uint32_t block_bytes)
{
	const kvc_config_t config = {.struct_size = sizeof config,
				     .socket = rig->socket,
				     .role = KVC_ROLE_BOTH,
				     .program = "kvd-bench",
				     .timeout_ms = WAIT_MS};
	const kvk_layout_t block = {.heads = 1,
				    .layers = 1,
				    .block_tokens = 16,
				    .dtype = KVK_DTYPE_BYTE,
				    .inner = KVK_INNER_OPAQUE,
				    .page_bytes = block_bytes};
	char layout[KVK_LAYOUT_TEXT_MAX];
	const kvc_identity_t identity = {.struct_size = sizeof identity,
					 .model = model,
					 .weights = "bench",
					 .dtype = "byte",
					 .rope = "none",
					 .hash_tokens = 16,
					 .layout = layout,
					 .page_format = "bench"};

	if (kvc_layout_text(&block, 1, layout, sizeof layout) != KVC_OK || kvc_attach(&config, &rig->kvc) != KVC_OK ||
	    kvc_space_open(rig->kvc, &identity, &rig->space) != KVC_OK) {
		printf("rig: %s\n", kvc_last_error());
		return -1;
	}

	return 0;
}

void rig_keys(const kvc_space_t *space, uint64_t seed, uint32_t n, kvc_key_t *keys)
{
	for (uint32_t i = 0; i < n; i++) {
		const uint64_t hash[2] = {seed, i};

		kvc_key_bind(space, hash, sizeof hash, &keys[i]);
	}
}

uint16_t rig_free_port(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (bind(fd, (struct sockaddr *)&address, len) != 0 ||
	    getsockname(fd, (struct sockaddr *)&address, &len) != 0) {
		address.sin_port = 0;
	}
	close(fd);

	return ntohs(address.sin_port);
}

/* Put what the daemon grants of keys[from, n): 0, or how many. */
static uint32_t put_some(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n, int durable)
{
	const kvc_put_options_t options = {.struct_size = sizeof options, .durable = durable};
	kvc_space_info_t info = {.struct_size = sizeof info};
	uint64_t *leaves;
	kvc_put_t *put = NULL;
	kvc_status_t status;
	uint32_t granted;

	kvc_space_get_info(space, &info);
	leaves = calloc((size_t)info.heads * info.leaves, sizeof *leaves);
	status = leaves ? kvc_put_start(space, keys, from, n, &options, &put) : KVC_ERR_NOMEM;
	status = status == KVC_OK ? kvc_put_ready(put, WAIT_MS) : status;
	granted = status == KVC_OK ? kvc_put_n(put) : 0;
	for (uint32_t i = 0; status == KVC_OK && i < granted; i++) {
		status = kvc_put_digests(put, i, leaves);
		status = status == KVC_ALREADY ? KVC_OK : status;
	}
	status = status == KVC_OK ? kvc_put_end(put, 0, granted) : status;
	status = status == KVC_OK ? kvc_put_wait(put, durable, WAIT_MS) : status;
	kvc_put_free(put);
	free(leaves);

	return status == KVC_OK ? granted : 0;
}

int rig_put(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n, int durable)
{
	const uint64_t end = bench_now_ns() + START_NS;

	while (from < n && bench_now_ns() < end && !bench_late()) {
		const uint32_t granted = put_some(space, keys, from, n, durable);

		from += granted;
		usleep(granted > 0 ? 0 : 1000); /* the daemon touches memory before it lends it */
	}
	if (from < n) {
		printf("rig: %u blocks were not put (%s)\n", n - from, kvc_last_error());
	}

	return from == n ? 0 : -1;
}

uint64_t rig_acquire_ns(const rig_t *rig, const kvc_key_t *keys, uint32_t n)
{
	const uint64_t start = bench_now_ns();
	kvc_lease_t *lease = NULL;
	const int whole = kvc_acquire(rig->space, keys, n, 0, 0, &lease) == KVC_OK && kvc_lease_ready(lease) == n;

	kvc_release(&lease, 1);
	kvc_poll(rig->kvc, 0);

	return whole ? bench_now_ns() - start : 0;
}

uint64_t rig_metric(const rig_t *rig, const char *name)
{
	const kvc_config_t config = {.struct_size = sizeof config, .socket = rig->socket, .observe = 1};
	uint64_t value = UINT64_MAX;
	char *json = NULL, label[96];
	const char *at;
	kvc_t *kvc;

	if (kvc_attach(&config, &kvc) != KVC_OK) {
		return value;
	}
	snprintf(label, sizeof label, "\"%s\":", name);
	if (kvc_document(kvc, KVC_DOC_STATS, 0, &json, NULL) == KVC_OK && (at = strstr(json, label))) {
		value = strtoull(at + strlen(label), NULL, 10);
	}
	kvc_free(json);
	kvc_detach(kvc);

	return value;
}

/* Receive exactly n bytes: spin first, then sleep. Returns 0 at end of file. */
static int receive(const rig_echo_t *echo, int fd, uint32_t n)
{
	const uint64_t until = echo->spin_ns > 0 ? bench_now_ns() + echo->spin_ns : 0;
	uint8_t buffer[RIG_ECHO_BYTES];
	uint32_t got = 0;

	while (got < n) {
		const ssize_t len = recv(fd, buffer, n - got, MSG_DONTWAIT);

		if (len > 0) {
			got += (uint32_t)len;
		} else if (len == 0 || (errno != EAGAIN && errno != EINTR)) {
			return 0;
		} else if (until == 0 || bench_now_ns() >= until) {
			poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
		}
	}

	return 1;
}

int rig_echo_start(rig_echo_t *echo, unsigned n)
{
	static const uint8_t buffer[RIG_ECHO_BYTES];
	int pair[2];

	echo->fd = -1;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
		return -1;
	}
	echo->fd = pair[0];
	fflush(NULL);
	echo->pid = fork();
	if (echo->pid == 0) {
		close(pair[0]);
		bench_pin(n);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (receive(echo, pair[1], echo->ask) && send(pair[1], buffer, echo->reply, MSG_NOSIGNAL) > 0) {
		}
		_exit(0);
	}
	close(pair[1]);

	return echo->pid > 0 ? 0 : -1;
}

int rig_echo_trip(const rig_echo_t *echo)
{
	static const uint8_t buffer[RIG_ECHO_BYTES];

	return send(echo->fd, buffer, echo->ask, MSG_NOSIGNAL) == (ssize_t)echo->ask &&
	       receive(echo, echo->fd, echo->reply);
}

void rig_echo_stop(rig_echo_t *echo)
{
	if (echo->fd >= 0) {
		close(echo->fd);
	}
	if (echo->pid > 0) {
		waitpid(echo->pid, NULL, 0);
	}
	*echo = (rig_echo_t){.fd = -1};
}

/* The child stops before and after fn; every system-call stop between is an entry or an exit. */
static long count_stops(pid_t pid)
{
	long stops = 0;
	int code;

	if (waitpid(pid, &code, 0) != pid || !WIFSTOPPED(code) ||
	    ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)PTRACE_O_TRACESYSGOOD) != 0) {
		return -1;
	}
	for (;;) {
		if (ptrace(PTRACE_SYSCALL, pid, NULL, NULL) != 0 || waitpid(pid, &code, 0) != pid ||
		    !WIFSTOPPED(code)) {
			return stops;
		}
		if (WSTOPSIG(code) == SIGSTOP) {
			return stops;
		}
		stops += WSTOPSIG(code) == (SIGTRAP | 0x80);
	}
}

static long trace_child(rig_step_fn prepare, rig_step_fn fn, void *arg)
{
	pid_t pid = fork();
	long stops;

	if (pid < 0) {
		return -1;
	}
	if (pid == 0) {
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) {
			_exit(1);
		}
		if (prepare) {
			prepare(arg);
		}
		raise(SIGSTOP);
		if (fn) {
			fn(arg);
		}
		raise(SIGSTOP);
		_exit(0);
	}
	stops = count_stops(pid);
	kill(pid, SIGKILL);
	waitpid(pid, NULL, 0);

	return stops;
}

long rig_count_syscalls(rig_step_fn prepare, rig_step_fn fn, void *arg)
{
	/* What raise() itself costs is measured the same way and taken off. Two stops a call. */
	long empty = trace_child(NULL, NULL, NULL);
	long with = trace_child(prepare, fn, arg);

	return empty < 0 || with < 0 ? -1 : (with - empty) / 2;
}
