/* The keeper process. */
#include "keeper.h"

#include "base/held.h"
#include "base/keeper_socket.h"
#include "base/memory.h"
#include "base/process.h"

#include "kv/env.h"
#include "kv/log.h"
#include "kv/map.h"
#include "kv/system.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define BACKOFF_MIN_NS UINT64_C(100000000)
#define BACKOFF_MAX_NS UINT64_C(5000000000)
#define YOUNG_NS       UINT64_C(30000000000) /* a daemon that dies before this counts against the limit */
#define CRASHES_MAX    5u
#define COLD_CRASHES   3u                    /* in a row: what memory holds may be their cause */
#define UPGRADE_NS     UINT64_C(10000000000) /* for the check, and then for the daemon's end */
#define KEPT_BYTES     80u

extern char **environ;

typedef struct held {
	char name[KVD_KEEPER_NAME];
	int fd;
	int keep; /* for the next daemon too */
} held_t;

/* Another program takes our place (decision 061). */
typedef enum upgrade {
	UPGRADE_NONE,
	UPGRADE_CHECKING, /* it reads the configuration, in a process of its own */
	UPGRADE_CHECKED,  /* it can go on when no daemon runs; one that is starting is waited for */
	UPGRADE_STOPPING  /* the daemon has been asked to end */
} upgrade_t;

typedef struct keeper {
	kvd_setup_t *setup;
	int signal_fd;
	int socket_fd; /* our end; -1: no daemon */
	int config_fd; /* the configuration found valid last, which the next daemon gets; -1: there is no file */
	int proven_fd; /* the one that has served last */
	pid_t pid;     /* the daemon; 0: none */
	int stopping;  /* a signal has asked for the end */
	int serves;    /* the daemon has said so */
	int hurry;     /* a cause may have passed: no pause */
	int served;    /* one of them has */
	int lost;      /* a writer's pidfd has: what it may write to is not for another daemon */
	uint32_t restarts;
	uint32_t failures; /* passing causes in a row */
	uint32_t crashes;  /* of young daemons in a row */
	uint64_t born_ns;
	uint64_t oom_kills; /* until then */
	upgrade_t upgrade;
	pid_t check_pid;      /* 0: none */
	int check_fd;         /* what it says; -1: none */
	uint32_t check_names; /* that it was shown */
	int next_config_fd;   /* the file as it was when the upgrade began; -1: there is none */
	uint64_t deadline_ns; /* of the check or the daemon's end; 0: none */
	held_t *held;
	uint32_t held_count, held_cap;
} keeper_t;

/* ---- what is held ---------------------------------------------------------------------------- */

static void drop_name(keeper_t *keeper, const char *name)
{
	for (uint32_t i = 0; i < keeper->held_count; i++) {
		if (strcmp(keeper->held[i].name, name) == 0) {
			close(keeper->held[i].fd);
			keeper->held[i] = keeper->held[--keeper->held_count];
			return;
		}
	}
}

/* 0: there is no room, and it is closed. */
static int hold_fd(keeper_t *keeper, const char *name, int fd, int keep)
{
	drop_name(keeper, name);
	if (keeper->held_count == keeper->held_cap && keeper->held_cap < KVD_KEEPER_NAMES) {
		uint32_t cap = keeper->held_cap ? 2 * keeper->held_cap : 64;
		held_t *held = realloc(keeper->held, cap * sizeof *held);

		if (held) {
			keeper->held = held;
			keeper->held_cap = cap;
		}
	}
	if (keeper->held_count == keeper->held_cap) {
		kv_log(KV_LOG_WARN, "keeper", "no room to hold a descriptor: name %s held %u", name,
		       keeper->held_count);
		close(fd);
		return 0;
	}
	snprintf(keeper->held[keeper->held_count].name, KVD_KEEPER_NAME, "%s", name);
	keeper->held[keeper->held_count].keep = keep;
	keeper->held[keeper->held_count++].fd = fd;

	return 1;
}

/* What was held for the daemon that has ended; `all`: what was to be kept for the next one too. Returns how many were
 * dropped. */
static uint32_t drop_held(keeper_t *keeper, int all)
{
	const uint32_t before = keeper->held_count;

	keeper->held_count = 0;
	for (uint32_t i = 0; i < before; i++) {
		if (!all && keeper->held[i].keep) {
			keeper->held[keeper->held_count++] = keeper->held[i];
		} else {
			close(keeper->held[i].fd);
		}
	}

	return before - keeper->held_count;
}

/* The names of what is kept, a line each behind its descriptor, for the next daemon or keeper; `proven_fd`: the
 * configuration that has served last, -1: not in the list. -1: it cannot be written. */
static int list_kept(const keeper_t *keeper, int proven_fd)
{
	int fd = kv_memfd_create("kvd-kept", 0);
	int ok = fd >= 0 && (proven_fd < 0 || dprintf(fd, "%d %s\n", proven_fd, KVD_KEEPER_CONFIG) > 0);

	for (uint32_t i = 0; ok && i < keeper->held_count; i++) {
		const held_t *held = &keeper->held[i];

		ok = !held->keep || dprintf(fd, "%d %s\n", held->fd, held->name) > 0;
	}
	if (!ok && fd >= 0) {
		close(fd);
		fd = -1;
	}

	return fd;
}

static void replace(int *p_fd, int fd)
{
	if (*p_fd >= 0) {
		close(*p_fd);
	}
	*p_fd = fd;
}

static int duplicate(int fd)
{
	return fd >= 0 ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
}

/* One message from the daemon. Returns 0 when there is none. */
static int take_word(keeper_t *keeper)
{
	kvd_word_t word;
	int fd;

	if (!kvd_keeper_receive(keeper->socket_fd, &word, &fd)) {
		return 0;
	}
	if (word.verb == 'H' && fd >= 0 && strcmp(word.name, KVD_KEEPER_CONFIG) == 0) {
		replace(&keeper->config_fd, fd);
	} else if (word.verb == 'H' || word.verb == 'K') {
		if (fd < 0 || !hold_fd(keeper, word.name, fd, word.verb == 'K')) {
			keeper->lost |= strncmp(word.name, KVD_KEEPER_WRITER, sizeof KVD_KEEPER_WRITER - 1) == 0;
		}
	} else if (word.verb == 'D') {
		drop_name(keeper, word.name);
	} else if (word.verb == 'S') {
		keeper->serves = keeper->served = 1;
		keeper->failures = 0;
		replace(&keeper->proven_fd, duplicate(keeper->config_fd));
	}

	return 1;
}

/* What an earlier program in this process has left. */
static void take_over(keeper_t *keeper)
{
	kvd_held_t *held;
	const char *name;

	if (kvd_held_open(keeper->setup->held_fd, NULL, &held) != KV_OK) {
		kv_log(KV_LOG_ERROR, "keeper", "no memory for what the program before has kept: it is closed");
	}
	for (uint32_t i = 0; (name = kvd_held_name(held, i)) != NULL; i++) {
		const int fd = kvd_held_claim(held, name);

		if (strcmp(name, KVD_KEEPER_CONFIG) == 0) {
			replace(&keeper->proven_fd, fd);
		} else {
			(void)hold_fd(keeper, name, fd, 1);
		}
	}
	kvd_held_close(held, 0);
	(void)fcntl(keeper->setup->lock_fd, F_SETFD, FD_CLOEXEC);
	(void)fcntl(keeper->config_fd, F_SETFD, FD_CLOEXEC);
	keeper->restarts = keeper->setup->restarts;
	keeper->served = 1;
	kv_log(KV_LOG_INFO, "keeper", "version %s goes on: kept %u", KVD_VERSION, keeper->held_count);
}

/* The next program inherits these and what the list names (`flag` 0), or does not (FD_CLOEXEC). 0: it cannot be. */
static int set_inherited(const keeper_t *keeper, int list_fd, int config_fd, int flag)
{
	const int fds[] = {keeper->setup->lock_fd, list_fd, config_fd};

	for (size_t i = 0; i < KV_COUNT_OF(fds); i++) {
		if (fds[i] >= 0 && fcntl(fds[i], F_SETFD, flag) != 0) {
			return 0;
		}
	}
	for (uint32_t i = 0; list_fd >= 0 && i < keeper->held_count; i++) {
		(void)fcntl(keeper->held[i].fd, F_SETFD, flag);
	}

	return 1;
}

/* The argument that hands descriptors on: take_kept() in options.c. */
static void format_kept(char out[KEPT_BYTES], const keeper_t *keeper, int socket_fd, int config_fd, int list_fd)
{
	snprintf(out, KEPT_BYTES, "--kept=%d,%d,%u,%d,%d", socket_fd, keeper->setup->lock_fd, keeper->restarts,
		 config_fd, list_fd);
}

/* The arguments of our start, without what an earlier program handed on, and with one or two more. */
static char **copy_arguments(const kvd_setup_t *setup, char *first, char *second)
{
	char **argv = calloc((size_t)setup->argc + 3, sizeof *argv);
	size_t n = 0;

	for (int i = 0; argv && i < setup->argc; i++) {
		if (strncmp(setup->argv[i], "--kept=", 7) != 0) {
			argv[n++] = setup->argv[i];
		}
	}
	if (argv) {
		argv[n++] = first;
		argv[n] = second;
	}

	return argv;
}

/* ---- the daemon's life ----------------------------------------------------------------------- */

/* In the child, between fork and exec: nothing but system calls. */
static _Noreturn void become_daemon(const keeper_t *keeper, const int fds[2], pid_t parent, char **argv)
{
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	(void)setsid(); /* a scheduling group apart from the engine's threads: docs/decisions/021 */
	if (getppid() != parent) {
		_exit(70);
	}
	if (fcntl(fds[0], F_SETFD, 0) == 0 && set_inherited(keeper, fds[1], keeper->config_fd, 0)) {
		execv("/proc/self/exe", argv);
	}
	_exit(kv_status_exit_code(kv_refused_status(errno) == KV_ERR_REFUSED ? KV_ERR_REFUSED : KV_ERR_INTERNAL));
}

static kv_status_t start_daemon(keeper_t *keeper)
{
	int pair[2];
	char kept[KEPT_BYTES];
	pid_t parent = getpid();
	kv_status_t status = KV_OK;
	int failed;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0) {
		return kv_refused(&kv_env_posix, "keeper", "socketpair", errno);
	}
	if (fcntl(pair[0], F_SETFD, FD_CLOEXEC) != 0) { /* the child needs it, and can say nothing */
		status = kv_refused(&kv_env_posix, "keeper", "fcntl", errno);
		goto err_pair;
	}
	char **argv = copy_arguments(keeper->setup, kept, NULL);
	if (!argv) {
		status = KV_ERR_NOMEM;
		goto err_pair;
	}
	const int fds[2] = {pair[1], list_kept(keeper, -1)};

	format_kept(kept, keeper, fds[0], keeper->config_fd, fds[1]);
	keeper->serves = keeper->lost = 0;
	keeper->born_ns = kv_now_ns(&kv_env_posix);
	keeper->oom_kills = kvd_memory_oom_kills(NULL, 0);
	keeper->pid = fork();
	if (keeper->pid == 0) {
		become_daemon(keeper, fds, parent, argv);
	}
	failed = errno;
	free(argv);
	if (fds[1] >= 0) {
		close(fds[1]);
	}
	if (keeper->pid < 0) {
		keeper->pid = 0;
		status = kv_refused(&kv_env_posix, "keeper", "fork", failed);
		goto err_pair;
	}
	close(pair[1]);
	keeper->socket_fd = pair[0];

	return KV_OK;

err_pair:
	close(pair[0]);
	close(pair[1]);
	return status;
}

/* No daemon is there to read the configuration again. */
static void reread(keeper_t *keeper)
{
	kv_option_error_t error;
	kvd_setup_t fresh;

	if (kvd_setup_reread(keeper->setup, &fresh, &error) == KV_OK) {
		replace(&keeper->config_fd, fresh.config_fd);
		keeper->hurry = 1;
		kv_log(KV_LOG_INFO, "keeper", "SIGHUP: the next start has the configuration as it is now");
	} else {
		kv_log(KV_LOG_WARN, "keeper", "%s; nothing has changed", keeper->setup->differs);
	}
}

/* ---- an upgrade ------------------------------------------------------------------------------ */

/* By the path of our start: /proc/self/exe is what was installed there then. */
static const char *find_installed_program(void)
{
	return (const char *)getauxval(AT_EXECFN); /* NOLINT(performance-no-int-to-ptr): the kernel's number is one */
}

static void end_upgrade(keeper_t *keeper)
{
	replace(&keeper->next_config_fd, -1);
	replace(&keeper->check_fd, -1);
	keeper->upgrade = UPGRADE_NONE;
	keeper->deadline_ns = 0;
}

static void refuse_upgrade(keeper_t *keeper, const char *why)
{
	kv_log(KV_LOG_ERROR, "keeper", "no upgrade, the program that runs goes on: %s: %s", find_installed_program(),
	       why);
	end_upgrade(keeper);
}

/* The check inherits it under its number. */
static void inherit(posix_spawn_file_actions_t *files, int fd)
{
	if (fd >= 0) {
		posix_spawn_file_actions_adddup2(files, fd, fd);
	}
}

/* Returns 0, or why not: an errno. */
static int spawn_check(keeper_t *keeper, char **argv, int socket_fd, int list_fd)
{
	posix_spawn_file_actions_t files;
	posix_spawnattr_t attr;
	sigset_t none;
	pid_t pid;
	int error;

	sigemptyset(&none);
	posix_spawn_file_actions_init(&files);
	inherit(&files, keeper->next_config_fd);
	inherit(&files, keeper->proven_fd);
	inherit(&files, socket_fd);
	inherit(&files, list_fd);
	for (uint32_t i = 0; i < keeper->held_count; i++) {
		inherit(&files, keeper->held[i].fd);
	}
	posix_spawnattr_init(&attr);
	posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
	posix_spawnattr_setsigmask(&attr, &none);
	error = posix_spawn(&pid, find_installed_program(), &files, &attr, argv, environ);
	posix_spawnattr_destroy(&attr);
	posix_spawn_file_actions_destroy(&files);
	keeper->check_pid = error ? 0 : pid;

	return error;
}

/* The installed program looks at the configuration and at all that it would get. Returns 0, or why not: an errno. */
static int start_check(keeper_t *keeper)
{
	static char check[] = "--check-config";
	const int list_fd = list_kept(keeper, keeper->proven_fd);
	char kept[KEPT_BYTES], **argv = copy_arguments(keeper->setup, kept, check);
	int pair[2] = {-1, -1}, failed = ENOMEM;

	if (argv && list_fd >= 0) {
		failed = socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) == 0 ? 0 : errno;
	}
	if (failed == 0) {
		format_kept(kept, keeper, pair[1], keeper->next_config_fd, list_fd);
		failed = spawn_check(keeper, argv, pair[1], list_fd);
		close(pair[1]);
		replace(&keeper->check_fd, pair[0]);
		keeper->check_names = keeper->proven_fd >= 0;
		for (uint32_t i = 0; i < keeper->held_count; i++) {
			keeper->check_names += keeper->held[i].keep != 0;
		}
	}
	free(argv);
	if (list_fd >= 0) {
		close(list_fd);
	}

	return failed;
}

/* SIGUSR2. The daemon serves while the installed program says whether it can go on. */
static void begin_upgrade(keeper_t *keeper)
{
	kv_option_error_t error;
	int failed;

	if (keeper->stopping || keeper->upgrade != UPGRADE_NONE) {
		return;
	}
	if (kvd_setup_copy_config(keeper->setup, &keeper->next_config_fd, &error) != KV_OK) {
		refuse_upgrade(keeper, error.text);
		return;
	}
	failed = start_check(keeper);
	if (failed) {
		refuse_upgrade(keeper, strerror(failed));
		return;
	}
	keeper->upgrade = UPGRADE_CHECKING;
	keeper->deadline_ns = kv_now_ns(&kv_env_posix) + UPGRADE_NS;
}

/* Has it said that it understands each name that it was shown? A program that does not look says nothing. */
static int has_proof(const keeper_t *keeper)
{
	kvd_word_t word;
	char want[16];
	int fd = -1;

	snprintf(want, sizeof want, "%u", keeper->check_names);

	return kvd_keeper_receive(keeper->check_fd, &word, &fd) && fd < 0 && word.verb == 'T' &&
	       strcmp(word.name, want) == 0;
}

static void judge_check(keeper_t *keeper, int wstatus)
{
	char why[96];

	keeper->deadline_ns = 0;
	keeper->check_pid = 0;
	if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 0) {
		if (has_proof(keeper)) {
			keeper->upgrade = UPGRADE_CHECKED;
		} else {
			refuse_upgrade(keeper, "it has not said that it can take over what is kept; restart instead");
		}
		return;
	}
	snprintf(why, sizeof why, "its --check-config ended with %s %d", WIFEXITED(wstatus) ? "exit code" : "signal",
		 WIFEXITED(wstatus) ? WEXITSTATUS(wstatus) : WTERMSIG(wstatus));
	refuse_upgrade(keeper, why);
}

/* What has been acknowledged as durable holds through a kill, so the daemon may have its end cut short. */
static void enforce_deadline(keeper_t *keeper)
{
	const int checking = keeper->upgrade == UPGRADE_CHECKING;

	if (keeper->deadline_ns == 0 || kv_now_ns(&kv_env_posix) < keeper->deadline_ns) {
		return;
	}
	keeper->deadline_ns = 0;
	kv_log(KV_LOG_WARN, "keeper", "upgrade: %s has not ended in time and is killed",
	       checking ? "the check of the configuration" : "the daemon");
	kill(checking ? keeper->check_pid : keeper->pid, SIGKILL);
}

static void advance_upgrade(keeper_t *keeper)
{
	int wstatus;

	enforce_deadline(keeper);
	if (keeper->upgrade == UPGRADE_CHECKING && waitpid(keeper->check_pid, &wstatus, WNOHANG) == keeper->check_pid) {
		judge_check(keeper, wstatus);
	}
	/* A daemon that ends before it serves is taken for a victim of what was kept. */
	if (keeper->upgrade == UPGRADE_CHECKED && keeper->pid > 0 && keeper->serves) {
		keeper->upgrade = UPGRADE_STOPPING;
		keeper->deadline_ns = kv_now_ns(&kv_env_posix) + UPGRADE_NS;
		kv_log(KV_LOG_INFO, "keeper", "upgrade: the daemon is asked to end");
		kvd_process_notify("RELOADING=1"); /* until the next daemon is ready */
		kvd_keeper_ask_end(keeper->socket_fd);
	}
}

/* May the installed program go on now? */
static int may_replace(const keeper_t *keeper)
{
	return keeper->upgrade >= UPGRADE_CHECKED && keeper->served && !keeper->stopping;
}

/* The installed program goes on in this process. Returns when it cannot. */
static void replace_program(keeper_t *keeper)
{
	const int list_fd = list_kept(keeper, keeper->proven_fd);
	char kept[KEPT_BYTES];
	char **argv = copy_arguments(keeper->setup, kept, NULL);
	int failed = ENOMEM;

	format_kept(kept, keeper, -1, keeper->next_config_fd, list_fd);
	if (argv && list_fd >= 0 && set_inherited(keeper, list_fd, keeper->next_config_fd, 0)) {
		(void)fcntl(keeper->proven_fd, F_SETFD, 0);
		execv(find_installed_program(), argv);
		failed = errno;
		(void)fcntl(keeper->proven_fd, F_SETFD, FD_CLOEXEC);
		(void)set_inherited(keeper, list_fd, keeper->next_config_fd, FD_CLOEXEC);
	}
	free(argv);
	if (list_fd >= 0) {
		close(list_fd);
	}
	refuse_upgrade(keeper, strerror(failed));
}

/* ---- the life of both ------------------------------------------------------------------------ */

static void forward(keeper_t *keeper)
{
	struct signalfd_siginfo info;

	while (read(keeper->signal_fd, &info, sizeof info) == (ssize_t)sizeof info) {
		if (info.ssi_signo == SIGCHLD) {
			continue;
		}
		if (info.ssi_signo == SIGUSR2) {
			begin_upgrade(keeper);
			continue;
		}
		if (info.ssi_signo != SIGHUP) {
			keeper->stopping = 1;
		}
		if (keeper->pid > 0) {
			kill(keeper->pid, (int)info.ssi_signo);
		} else if (info.ssi_signo == SIGHUP) {
			reread(keeper);
		}
	}
}

/* The shorter of the time and what is left until the deadline. */
static int limit_wait(const keeper_t *keeper, int timeout_ms)
{
	const uint64_t now = kv_now_ns(&kv_env_posix);
	int left_ms;

	if (keeper->deadline_ns == 0) {
		return timeout_ms;
	}
	left_ms = keeper->deadline_ns > now ? (int)((keeper->deadline_ns - now) / 1000000u) + 1 : 0;

	return timeout_ms < 0 || left_ms < timeout_ms ? left_ms : timeout_ms;
}

/* As process 1 of a container it gets the children of every process that ends, a killed daemon's own programs among
 * them. One that is waited for elsewhere may hide others until it is reaped. */
static void reap_orphans(const keeper_t *keeper)
{
	siginfo_t info = {0};

	while (waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid != 0 &&
	       info.si_pid != keeper->pid && info.si_pid != keeper->check_pid) {
		(void)waitpid(info.si_pid, NULL, WNOHANG);
		info.si_pid = 0;
	}
}

/* Wait for a word, a signal, or the time to pass. Returns 1 and the status when the daemon has ended. */
static int watch_daemon(keeper_t *keeper, int timeout_ms, int *p_wstatus)
{
	struct pollfd look[2] = {{.fd = keeper->signal_fd, .events = POLLIN},
				 {.fd = keeper->socket_fd, .events = POLLIN}};

	(void)poll(look, 2, limit_wait(keeper, timeout_ms));
	forward(keeper);
	if (keeper->socket_fd >= 0) {
		while (take_word(keeper)) {
		}
	}
	if (look[1].revents & POLLHUP && keeper->socket_fd >= 0) {
		close(keeper->socket_fd);
		keeper->socket_fd = -1;
	}
	advance_upgrade(keeper);
	reap_orphans(keeper);

	return keeper->pid > 0 && waitpid(keeper->pid, p_wstatus, WNOHANG) == keeper->pid;
}

static uint64_t pause_after(uint32_t times)
{
	uint64_t ns = BACKOFF_MIN_NS;

	for (uint32_t i = 1; i < times && ns < BACKOFF_MAX_NS; i++) {
		ns *= 2;
	}

	return ns < BACKOFF_MAX_NS ? ns : BACKOFF_MAX_NS;
}

/* A valid configuration may still not start. Returns 1 when another one is left that has served. */
static int fall_back(keeper_t *keeper)
{
	struct stat config, proven;

	if (keeper->serves || fstat(keeper->config_fd, &config) != 0 || fstat(keeper->proven_fd, &proven) != 0 ||
	    (config.st_dev == proven.st_dev && config.st_ino == proven.st_ino)) {
		return 0;
	}
	kv_log(KV_LOG_ERROR, "keeper", "going back to the configuration that has served last");
	replace(&keeper->config_fd, duplicate(keeper->proven_fd));

	return 1;
}

/* A start has failed with this exit code: the time until the next, or UINT64_MAX. What has never worked is for the
 * operator, at once. */
static uint64_t after_failure(keeper_t *keeper, int code)
{
	uint64_t ns;

	if (keeper->stopping || code == 0 || !keeper->served || !keeper->setup->options.keeper) {
		return UINT64_MAX;
	}
	if (fall_back(keeper)) {
		return BACKOFF_MIN_NS;
	}
	if (code != kv_status_exit_code(KV_ERR_BUSY)) {
		return UINT64_MAX;
	}
	ns = pause_after(++keeper->failures);
	kv_log(KV_LOG_WARN, "keeper",
	       "the daemon did not start and will be started again: exit_code %d times %u in_ms %llu", code,
	       keeper->failures, (unsigned long long)(ns / 1000000u));

	return ns;
}

/* The limits may have changed since the first start, and would end the next daemon as well. */
static void look_at_memory(const keeper_t *keeper)
{
	char why[512];

	if (kvd_memory_check(&keeper->setup->options, why, sizeof why) != KV_OK) {
		kv_log(KV_LOG_ERROR, "keeper", "%s", why);
	}
}

/* Whose signal has ended the daemon. */
static const char *killer_of(const keeper_t *keeper, int signal, char *out, size_t cap)
{
	char where[352];
	const uint64_t kills = kvd_memory_oom_kills(where, sizeof where);

	if (signal == SIGKILL && kills != UINT64_MAX && kills > keeper->oom_kills) {
		snprintf(out, cap, "the kernel, for want of memory in %s", where);
		look_at_memory(keeper);
	} else {
		snprintf(out, cap, "%s", signal == SIGKILL || signal == SIGTERM ? "somebody" : "a fault of its own");
	}

	return out;
}

/* The daemon has ended: the time to wait before the next one, or UINT64_MAX: none follows and *p_exit is our exit
 * code. */
static uint64_t buried(keeper_t *keeper, int wstatus, int *p_exit)
{
	uint64_t age = kv_now_ns(&kv_env_posix) - keeper->born_ns;
	uint32_t dropped;
	char killer[420];

	while (take_word(keeper)) { /* said between our last look and its end */
	}
	keeper->pid = 0;
	replace(&keeper->socket_fd, -1);
	if (WIFEXITED(wstatus)) {
		(void)drop_held(keeper, keeper->lost);
		*p_exit = WEXITSTATUS(wstatus);
		return after_failure(keeper, *p_exit);
	}
	keeper->crashes = age < YOUNG_NS ? keeper->crashes + 1 : 1;
	dropped = drop_held(keeper, !keeper->serves || keeper->lost || keeper->crashes >= COLD_CRASHES);
	kv_log(KV_LOG_ERROR, "keeper",
	       "the daemon has died: signal %d by \"%s\" after_ms %llu descriptors_dropped %u kept %u",
	       WTERMSIG(wstatus), killer_of(keeper, WTERMSIG(wstatus), killer, sizeof killer),
	       (unsigned long long)(age / 1000000u), dropped, keeper->held_count);
	if (keeper->stopping || !keeper->setup->options.keeper) {
		*p_exit = 128 + WTERMSIG(wstatus);
		return UINT64_MAX;
	}
	keeper->restarts++;
	(void)fall_back(keeper);
	if (keeper->crashes >= CRASHES_MAX) {
		kv_log(KV_LOG_ERROR, "keeper", "giving up: crashes %u in a row, each within 30 s of its start",
		       keeper->crashes);
		*p_exit = kv_status_exit_code(KV_ERR_INTERNAL);
		return UINT64_MAX;
	}

	return pause_after(keeper->crashes);
}

static void serve_during_pause(keeper_t *keeper, uint64_t ns)
{
	uint64_t end = kv_now_ns(&kv_env_posix) + ns;
	uint64_t now;
	int ignored;

	keeper->hurry = 0;
	while (!keeper->stopping && !keeper->hurry && !may_replace(keeper) && (now = kv_now_ns(&kv_env_posix)) < end) {
		watch_daemon(keeper, (int)((end - now) / 1000000u) + 1, &ignored);
	}
}

static int run_keeper(keeper_t *keeper)
{
	while (!keeper->stopping) {
		int wstatus = 0, code = 0;
		uint64_t pause;
		kv_status_t status;

		if (may_replace(keeper)) {
			replace_program(keeper);
		}
		status = start_daemon(keeper);
		if (status == KV_OK) {
			while (!watch_daemon(keeper, -1, &wstatus)) {
			}
			pause = buried(keeper, wstatus, &code);
		} else {
			kv_log(KV_LOG_ERROR, "keeper", "cannot start the daemon: %s", kv_status_text(status));
			code = kv_status_exit_code(status);
			pause = after_failure(keeper, code);
		}
		if (pause == UINT64_MAX && !may_replace(keeper)) {
			return code;
		}
		serve_during_pause(keeper, pause);
	}

	return 0;
}

int kvd_keeper_run(kvd_setup_t *setup)
{
	keeper_t keeper = {.setup = setup,
			   .socket_fd = -1,
			   .config_fd = setup->config_fd,
			   .proven_fd = -1,
			   .next_config_fd = -1,
			   .check_fd = -1};
	sigset_t set;
	int code;

	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	sigaddset(&set, SIGINT);
	sigaddset(&set, SIGHUP);
	sigaddset(&set, SIGUSR2);
	sigaddset(&set, SIGCHLD);
	sigprocmask(SIG_BLOCK, &set, NULL);
	keeper.signal_fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	if (keeper.signal_fd < 0) {
		return kv_status_exit_code(kv_refused(&kv_env_posix, "keeper", "signalfd", errno));
	}
	prctl(PR_SET_NAME, "kvd-keeper");
	if (setup->held_fd >= 0) {
		take_over(&keeper);
	}
	code = run_keeper(&keeper);
	if (keeper.check_pid > 0) {
		kill(keeper.check_pid, SIGKILL);
	}
	free(keeper.held);
	replace(&keeper.config_fd, -1);
	replace(&keeper.proven_fd, -1);
	replace(&keeper.next_config_fd, -1);
	replace(&keeper.check_fd, -1);
	close(keeper.signal_fd);

	return code;
}
