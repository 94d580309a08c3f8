/* A daemon of our own for replays: exactly the CPU slots asked for, no disk tier, gone when kvctl is gone. */
#include "replay.h"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define START_MS   10000u
#define STOP_MS    5000u
#define OPTION_MAX 192u
#define OPTIONS    14u

/* The kvd installed or built beside this kvctl; else the one in PATH. */
static void find_program(char *out, size_t cap)
{
	char self[PATH_MAX];
	ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);
	char *slash;

	snprintf(out, cap, "kvd");
	if (len <= 0) {
		return;
	}
	self[len] = '\0';
	slash = strrchr(self, '/');
	if (slash && (size_t)(slash - self) + sizeof "/kvd" <= cap) {
		*slash = '\0';
		snprintf(out, cap, "%.*s/kvd", (int)(cap - sizeof "/kvd"), self);
		if (access(out, X_OK) != 0) {
			snprintf(out, cap, "kvd");
		}
	}
}

static void make_options(const private_daemon_t *daemon, uint32_t blocks, uint32_t block_bytes, const char *policy,
			 char options[OPTIONS][OPTION_MAX])
{
	/* Slot, digests and ledger record of every block, and room for whole pages of each. */
	uint64_t slot = ((uint64_t)block_bytes + 4095u) / 4096u * 4096u;
	uint64_t pool = (uint64_t)blocks * (slot + 1024u + block_bytes / 512u) + (64u << 20);
	int n = 0;

	snprintf(options[n++], OPTION_MAX, "--run_dir=%s", daemon->dir);
	snprintf(options[n++], OPTION_MAX, "--policy=%s", policy);
	snprintf(options[n++], OPTION_MAX, "--cpu.max_blocks=%u", blocks);
	snprintf(options[n++], OPTION_MAX, "--cpu.size=%llu", (unsigned long long)pool);
	snprintf(options[n++], OPTION_MAX, "--instance.max_pinned=%llu", (unsigned long long)pool);
	snprintf(options[n++], OPTION_MAX, "--instance.max_unfinished=%llu", (unsigned long long)pool);
	snprintf(options[n++], OPTION_MAX, "--nvme.path=");
	snprintf(options[n++], OPTION_MAX, "--http.listen=off");
	snprintf(options[n++], OPTION_MAX, "--events.enabled=off");
	snprintf(options[n++], OPTION_MAX, "--keeper=off");
	snprintf(options[n++], OPTION_MAX, "--cpu.prefault=off"); /* no put finds the pool not there yet */
	snprintf(options[n++], OPTION_MAX, "--log.level=warn");
	snprintf(options[n++], OPTION_MAX, "--lease.ttl=10m");
	snprintf(options[n++], OPTION_MAX, "--limits.silence=10s"); /* what is counted does not depend on other load */
}

_Noreturn static void run_program(char options[OPTIONS][OPTION_MAX])
{
	char program[PATH_MAX];
	char *argv[OPTIONS + 2];

	find_program(program, sizeof program);
	argv[0] = program;
	for (unsigned i = 0; i < OPTIONS; i++) {
		argv[i + 1] = options[i];
	}
	argv[OPTIONS + 1] = NULL;
	prctl(PR_SET_PDEATHSIG, SIGTERM);
	execvp(program, argv);
	fprintf(stderr, "kvctl: cannot run %s: %s\n", program, strerror(errno));
	_exit(127);
}

static int wait_exit(int pid, uint32_t ms)
{
	for (uint32_t waited = 0; waited < ms; waited += 5) {
		if (waitpid(pid, NULL, WNOHANG) == pid) {
			return 1;
		}
		nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
	}

	return 0;
}

/* Serving, or gone, or too slow. */
static kv_status_t wait_ready(private_daemon_t *daemon, char *detail, size_t cap)
{
	kvc_config_t config = {
		.struct_size = sizeof config, .socket = daemon->socket, .observe = 1, .program = "kvctl replay"};

	for (uint32_t waited = 0; waited < START_MS; waited += 10) {
		kvc_t *kvc;
		int code;

		if (kvc_attach(&config, &kvc) == KVC_OK) {
			kvc_detach(kvc);
			return KV_OK;
		}
		if (waitpid(daemon->pid, &code, WNOHANG) == daemon->pid) {
			daemon->pid = 0;
			snprintf(detail, cap, "the private daemon ended at once (its messages are above)");
			return KV_ERR_UNREACHABLE;
		}
		nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
	}
	snprintf(detail, cap, "the private daemon does not answer on %s", daemon->socket);

	return KV_ERR_TIMEOUT;
}

kv_status_t private_daemon_start(private_daemon_t *daemon, uint32_t blocks, uint32_t block_bytes, const char *policy,
				 char *detail, size_t cap)
{
	char options[OPTIONS][OPTION_MAX];
	kv_status_t status;

	memset(daemon, 0, sizeof *daemon);
	snprintf(daemon->dir, sizeof daemon->dir, "/tmp/kvctl-replay-XXXXXX");
	if (!mkdtemp(daemon->dir)) {
		snprintf(detail, cap, "no temporary directory: %s", strerror(errno));
		daemon->dir[0] = '\0';
		return KV_ERR_PATH;
	}
	snprintf(daemon->socket, sizeof daemon->socket, "%s/default.sock", daemon->dir);
	make_options(daemon, blocks, block_bytes, policy, options);

	daemon->pid = fork();
	if (daemon->pid == 0) {
		run_program(options);
	}
	if (daemon->pid < 0) {
		snprintf(detail, cap, "fork: %s", strerror(errno));
		daemon->pid = 0;
		private_daemon_stop(daemon);
		return KV_ERR_NOMEM;
	}
	status = wait_ready(daemon, detail, cap);
	if (status != KV_OK) {
		private_daemon_stop(daemon);
	}

	return status;
}

void private_daemon_stop(private_daemon_t *daemon)
{
	static const char *const left[] = {"default.sock", "default.events", "default.hits", "lock", "kvd.lock"};
	char path[160];

	if (daemon->pid > 0) {
		kill(daemon->pid, SIGTERM);
		if (!wait_exit(daemon->pid, STOP_MS)) {
			kill(daemon->pid, SIGKILL);
			waitpid(daemon->pid, NULL, 0);
		}
	}
	for (unsigned i = 0; daemon->dir[0] && i < sizeof left / sizeof left[0]; i++) {
		snprintf(path, sizeof path, "%s/%s", daemon->dir, left[i]);
		unlink(path);
	}
	if (daemon->dir[0]) {
		rmdir(daemon->dir);
	}
	memset(daemon, 0, sizeof *daemon);
}
