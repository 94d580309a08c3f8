/* A kvd of the benches' own, and the raw references. */
#include "rig.h"

#include <arpa/inet.h>
#include <errno.h>
#include <json-c/json.h>
#include <limits.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ECHO_MAX 65536

static uint64_t clock_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void pin_self(int cpu)
{
	cpu_set_t set;

	if (cpu >= 0) {
		CPU_ZERO(&set);
		CPU_SET((size_t)cpu, &set);
		sched_setaffinity(0, sizeof set, &set);
	}
}

_Noreturn static void run_daemon(const rig_t *rig)
{
	char self[PATH_MAX];
	char program[PATH_MAX + 8];
	char run_dir[96];
	char *argv[RIG_MAX_OPTIONS + 9];
	ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
	int n = 0;
	char *slash;

	self[len > 0 ? len : 0] = '\0';
	slash = strrchr(self, '/');
	snprintf(program, sizeof program, "%.*s/kvd", slash ? (int)(slash - self) : 0, self);
	snprintf(run_dir, sizeof run_dir, "--run_dir=%s", rig->dir);
	argv[n++] = program;
	argv[n++] = run_dir;
	argv[n++] = (char *)"--http.listen=off";
	argv[n++] = (char *)"--keeper=off";
	argv[n++] = (char *)"--log.level=warn";
	argv[n++] = (char *)"--limits.silence=10s"; /* a busy machine makes figures worse, not wrong */
	for (int i = 0; i < RIG_MAX_OPTIONS && rig->options[i]; i++) {
		argv[n++] = (char *)rig->options[i];
	}
	argv[n] = NULL;
	pin_self(rig->cpu);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	execv(program, argv);
	fprintf(stderr, "kvd-bench: cannot run %s: %s\n", program, strerror(errno));
	_exit(127);
}

int rig_start(rig_t *rig, uint32_t timeout_ms)
{
	kvc_config_t config = {.struct_size = sizeof config, .observe = 1, .program = "kvd-bench"};
	uint64_t deadline = clock_ns() + timeout_ms * 1000000ull;
	kvc_t *kvc;

	if (!rig->dir[0]) {
		snprintf(rig->dir, sizeof rig->dir, "/tmp/kvd-bench-XXXXXX");
		if (!mkdtemp(rig->dir)) {
			perror("kvd-bench: mkdtemp");
			return -1;
		}
	}
	snprintf(rig->socket, sizeof rig->socket, "%s/default.sock", rig->dir);
	config.socket = rig->socket;
	rig->pid = fork();
	if (rig->pid == 0) {
		run_daemon(rig);
	}
	while (rig->pid > 0 && clock_ns() < deadline) {
		if (kvc_attach(&config, &kvc) == KVC_OK) {
			kvc_detach(kvc);
			return 0;
		}
		if (waitpid(rig->pid, NULL, WNOHANG) == rig->pid) {
			rig->pid = 0;
			break;
		}
		usleep(500);
	}
	fprintf(stderr, "kvd-bench: kvd did not start: %s\n", kvc_last_error());

	return -1;
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
	char command[128];

	rig_stop(rig, 0);
	if (rig->dir[0]) {
		snprintf(command, sizeof command, "rm -rf -- '%s'", rig->dir);
		if (system(command) != 0) {
			fprintf(stderr, "kvd-bench: %s is left behind\n", rig->dir);
		}
	}
	rig->dir[0] = '\0';
}

int rig_attach(const rig_t *rig, const char *model, uint32_t block_bytes, kvc_t **p_kvc, kvc_space_t **p_space)
{
	char layout[160];
	kvc_config_t config = {.struct_size = sizeof config,
			       .socket = rig->socket,
			       .role = KVC_ROLE_BOTH,
			       .program = "kvd-bench",
			       .timeout_ms = 30000};
	kvc_identity_t identity = {
		.struct_size = sizeof identity,
		.model = model,
		.weights = "bench",
		.dtype = "byte",
		.rope = "none",
		.hash_tokens = 16,
		.layout = layout,
		.page_format = "bench",
	};

	snprintf(layout, sizeof layout, "kvk1 heads=1 layers=1 tokens=16 k=0 v=0 dtype=byte inner=opaque page=%u",
		 block_bytes);
	if (kvc_attach(&config, p_kvc) != KVC_OK) {
		fprintf(stderr, "kvd-bench: %s\n", kvc_last_error());
		return -1;
	}
	if (kvc_space_open(*p_kvc, &identity, p_space) != KVC_OK) {
		fprintf(stderr, "kvd-bench: %s\n", kvc_last_error());
		kvc_detach(*p_kvc);
		return -1;
	}

	return 0;
}

void rig_keys(const kvc_space_t *space, uint64_t base, uint32_t shared, uint64_t seed, uint32_t n, kvc_key_t *keys)
{
	for (uint32_t i = 0; i < n; i++) {
		uint64_t hash[2] = {i < shared ? base : seed, i};

		kvc_key_bind(space, hash, sizeof hash, &keys[i]);
	}
}

static int put_index(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n, int durable)
{
	kvc_put_options_t options = {.struct_size = sizeof options, .durable = durable};
	kvc_space_info_t info = {.struct_size = sizeof info};
	uint64_t *leaves;
	kvc_put_t *put = NULL;
	kvc_status_t status;

	kvc_space_get_info(space, &info);
	leaves = calloc((size_t)info.heads * info.leaves, sizeof *leaves);
	status = leaves ? kvc_put_start(space, keys, from, n, &options, &put) : KVC_ERR_NOMEM;
	if (status == KVC_OK) {
		status = kvc_put_ready(put, 30000);
	}
	for (uint32_t i = 0; status == KVC_OK && i < n - from; i++) {
		status = kvc_put_digests(put, i, leaves);
		status = status == KVC_ALREADY ? KVC_OK : status;
	}
	if (status == KVC_OK) {
		status = kvc_put_end(put, 0, n - from);
	}
	if (status == KVC_OK) {
		status = kvc_put_wait(put, durable, 30000);
	}
	if (status != KVC_OK) {
		fprintf(stderr, "kvd-bench: put of %u blocks: %s (%s)\n", n - from, kvc_status_text(status),
			kvc_last_error());
	}
	kvc_put_free(put);
	free(leaves);

	return status == KVC_OK ? 0 : -1;
}

int rig_put_index(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n)
{
	return put_index(space, keys, from, n, 0);
}

int rig_put_durable(kvc_space_t *space, const kvc_key_t *keys, uint32_t from, uint32_t n)
{
	return put_index(space, keys, from, n, 1);
}

/* Receive exactly n bytes: spin first, then sleep. Returns 0 at end of file. */
static int receive(int fd, uint8_t *buffer, uint32_t n, uint32_t spin_us)
{
	uint64_t until = clock_ns() + spin_us * 1000ull;
	uint32_t got = 0;

	while (got < n) {
		ssize_t len = recv(fd, buffer, n - got, MSG_DONTWAIT);

		if (len > 0) {
			got += (uint32_t)len;
		} else if (len == 0 || (errno != EAGAIN && errno != EINTR)) {
			return 0;
		} else if (clock_ns() >= until) {
			poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, -1);
		}
	}

	return 1;
}

int rig_echo_start(rig_echo_t *echo, int cpu)
{
	static uint8_t buffer[ECHO_MAX];
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
		return -1;
	}
	echo->fd = pair[0];
	echo->pid = fork();
	if (echo->pid == 0) {
		close(pair[0]);
		pin_self(cpu);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		while (receive(pair[1], buffer, echo->ask_bytes, echo->spin_us) &&
		       send(pair[1], buffer, echo->reply_bytes, MSG_NOSIGNAL) > 0) {
		}
		_exit(0);
	}
	close(pair[1]);

	return echo->pid > 0 ? 0 : -1;
}

void rig_echo_trip(rig_echo_t *echo)
{
	static uint8_t buffer[ECHO_MAX];

	if (send(echo->fd, buffer, echo->ask_bytes, MSG_NOSIGNAL) == (ssize_t)echo->ask_bytes) {
		receive(echo->fd, buffer, echo->reply_bytes, echo->spin_us);
	}
}

void rig_echo_stop(rig_echo_t *echo)
{
	close(echo->fd);
	waitpid(echo->pid, NULL, 0);
}

uint64_t rig_metric(const rig_t *rig, const char *name)
{
	kvc_config_t config = {
		.struct_size = sizeof config, .socket = rig->socket, .observe = 1, .program = "kvd-bench"};
	uint64_t value = UINT64_MAX;
	json_object *root = NULL;
	json_object *number;
	char *json = NULL;
	kvc_t *kvc;

	if (kvc_attach(&config, &kvc) != KVC_OK) {
		return value;
	}
	if (kvc_document(kvc, KVC_DOC_STATS, 0, &json, NULL) == KVC_OK) {
		root = json_tokener_parse(json);
	}
	if (root && json_object_object_get_ex(root, name, &number)) {
		value = json_object_get_uint64(number);
	}
	json_object_put(root);
	kvc_free(json);
	kvc_detach(kvc);

	return value;
}

uint16_t rig_free_port(void)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int found = bind(fd, (const struct sockaddr *)&address, sizeof address) == 0 &&
		    getsockname(fd, (struct sockaddr *)&address, &len) == 0;

	close(fd);

	return found ? ntohs(address.sin_port) : 0;
}

/* All of /metrics, ended by a NUL. Returns 0 on success. */
static int read_metrics(uint16_t port, char *text, size_t cap)
{
	static const char ask[] = "GET /metrics HTTP/1.0\r\n\r\n";
	const struct sockaddr_in to = {
		.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	size_t len = 0;
	ssize_t n = -1;

	if (connect(fd, (const struct sockaddr *)&to, sizeof to) == 0 &&
	    write(fd, ask, sizeof ask - 1) == (ssize_t)sizeof ask - 1) {
		while (len + 1 < cap && (n = read(fd, text + len, cap - 1 - len)) > 0) {
			len += (size_t)n;
		}
	}
	close(fd);
	text[len] = '\0';

	return n == 0 ? 0 : -1;
}

static char metrics_text[1 << 18];

uint64_t rig_counter(uint16_t port, const char *name)
{
	char line[96];
	const char *at;
	int len = snprintf(line, sizeof line, "\n%s ", name);

	if (read_metrics(port, metrics_text, sizeof metrics_text) != 0) {
		return UINT64_MAX;
	}
	at = strstr(metrics_text, line);

	return at ? strtoull(at + len, NULL, 10) : UINT64_MAX;
}

uint32_t rig_histogram(uint16_t port, const char *name, uint64_t *below, uint32_t cap)
{
	const char *text = metrics_text;
	char bucket[96];
	uint32_t n = 0;

	snprintf(bucket, sizeof bucket, "\n%s_bucket{le=\"", name);
	if (read_metrics(port, metrics_text, sizeof metrics_text) != 0) {
		return 0;
	}
	for (const char *at = strstr(text, bucket); at && n < cap; at = strstr(at + 1, bucket)) {
		at = strchr(at, '}');
		if (!at) {
			return 0;
		}
		below[n++] = strtoull(at + 1, NULL, 10);
	}

	return n;
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
