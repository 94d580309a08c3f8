/* Refused system calls: see kv/system.h. */
#include "kv/system.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#define HELP_BYTES 512u /* the rest of KV_REFUSED_TEXT is for the call and its error */

kv_status_t kv_refused_status(int error)
{
	switch (error) {
	case ENOMEM:
		return KV_ERR_NOMEM;
	case EPERM:
	case EACCES:
	case ENOSYS:
		return KV_ERR_REFUSED;
	default:
		return KV_ERR_BUSY;
	}
}

static int makes_task(const char *call)
{
	return strcmp(call, "pthread_create") == 0 || strcmp(call, "posix_spawn") == 0 || strcmp(call, "fork") == 0;
}

/* The system calls behind a name of the C library. */
static const char *filtered_calls(const char *call)
{
	static const char *const names[][2] = {
		{"posix_spawn", "clone3, clone, vfork and execve"},
		{"pthread_create", "clone3 and clone"},
		{"fork", "clone"},
		{"eventfd", "eventfd2"},
		{"signalfd", "signalfd4"},
	};

	for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
		if (strcmp(call, names[i][0]) == 0) {
			return names[i][1];
		}
	}

	return call;
}

typedef struct full_group {
	char *out;
	size_t cap;
} full_group_t;

static void find_full_group(void *ctx, int version, const char *dir, const char *name)
{
	const full_group_t *full = ctx;
	const uint64_t most = kv_read_number(dir, "pids.max"), used = kv_read_number(dir, "pids.current");

	(void)version;
	if (full->out[0] == '\0' && most != UINT64_MAX && used != UINT64_MAX && used >= most) {
		snprintf(
			full->out, full->cap,
			"control group %s has pids.max %llu and as many threads; raise it (docker --pids-limit, TasksMax= "
			"of systemd)",
			name, (unsigned long long)most);
	}
}

static void help_with_tasks(char *out, size_t cap)
{
	struct rlimit limit;

	kv_cgroup_walk("pids", find_full_group, &(full_group_t){out, cap});
	if (out[0] != '\0') {
		return;
	}
	if (getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
		snprintf(
			out, cap,
			"RLIMIT_NPROC (ulimit -u, LimitNPROC= of systemd) is %llu for all threads of this user; raise it",
			(unsigned long long)limit.rlim_cur);
		return;
	}
	snprintf(out, cap, "raise pids.max of the control group, or kernel.threads-max");
}

static void help_with_descriptors(char *out, size_t cap)
{
	struct rlimit limit;

	if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
		snprintf(out, cap, "RLIMIT_NOFILE (ulimit -n, LimitNOFILE= of systemd) is %llu; raise it",
			 (unsigned long long)limit.rlim_cur);
	}
}

static void help(const char *call, int error, char *out, size_t cap)
{
	out[0] = '\0';
	if (kv_refused_status(error) == KV_ERR_REFUSED) {
		snprintf(
			out, cap,
			"allow %s in the seccomp filter (docker --security-opt seccomp=FILE, SystemCallFilter= of systemd)",
			filtered_calls(call));
	} else if (error == EAGAIN && makes_task(call)) {
		help_with_tasks(out, cap);
	} else if (error == EMFILE) {
		help_with_descriptors(out, cap);
	} else if (error == ENFILE) {
		snprintf(out, cap, "raise fs.file-max");
	}
}

const char *kv_refused_text(const char *call, int error, char *out, size_t cap)
{
	char advice[HELP_BYTES];

	help(call, error, advice, sizeof advice);
	snprintf(out, cap, "%s: %s%s%s", call, strerror(error), advice[0] ? "; " : "", advice);

	return out;
}

kv_status_t kv_refused(const kv_env_t *env, const char *component, const char *call, int error)
{
	char text[KV_REFUSED_TEXT];

	kv_logf(env, KV_LOG_ERROR, component, "the system refuses %s", kv_refused_text(call, error, text, sizeof text));

	return kv_refused_status(error);
}

kv_status_t kv_random_check(const kv_env_t *env)
{
	const int error = kv_random_error();

	return error ? kv_refused(env, "env", "getrandom", error) : KV_OK;
}
