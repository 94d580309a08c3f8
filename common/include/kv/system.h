/* kv/system.h -- limits of the process and its control groups, and system calls that the kernel refuses: by a limit of
 * the machine, a control group or a user, or by the filter of a container. One answer for every place that makes a
 * thread, a process, a descriptor or a mapping. */
#ifndef KV_SYSTEM_H
#define KV_SYSTEM_H

#include "kv/env.h"
#include "kv/status.h"

#include <stdint.h>
#include <sys/resource.h>

#define KV_REFUSED_TEXT 640u

/* What the errno of such a call means.
 * KV_ERR_NOMEM: there is no memory, and only then.
 * KV_ERR_BUSY: a limit of the process, its user, its control group or the machine is reached.
 * KV_ERR_REFUSED: a filter or a privilege that is missing; it stays so until an operator changes it. */
kv_status_t kv_refused_status(int error);

/* "memfd_create: Operation not permitted; allow it ...": the call, the error, and what an operator can change. Returns
 * out. `call`: its name as the manual has it; pthread_create and posix_spawn stand for what they call. */
const char *kv_refused_text(const char *call, int error, char *out, size_t cap);

/* Both, and a line of the log: for the code that meets the error first. */
kv_status_t kv_refused(const kv_env_t *env, const char *component, const char *call, int error);

/* kv_random_error() as a status, and a line of the log. */
kv_status_t kv_random_check(const kv_env_t *env);

/* ---- control groups, in either version ------------------------------------------------------- */

#define KV_CGROUP_PATH 512u

/* `version` is 1 or 2; `dir` is the group's folder, `name` its path as /proc/self/cgroup has it. */
typedef void (*kv_cgroup_fn)(void *ctx, int version, const char *dir, const char *name);

/* Call `visit` for the group of this controller ("memory", "pids") and for each one above it, the innermost first: each
 * has limits of its own. In a container a path may not exist below the root that is mounted there. */
void kv_cgroup_walk(const char *controller, kv_cgroup_fn visit, void *ctx);

/* A small file as text, cut at cap - 1 bytes; 0: it cannot be read, or is empty. */
int kv_read_text(const char *path, char *out, uint32_t cap);

/* The number that a file in `dir` consists of; UINT64_MAX: none ("max", no such file). */
uint64_t kv_read_number(const char *dir, const char *name);

/* ---- the build ------------------------------------------------------------------------------- */

/* The commit that a program was built from, as git describe says it; "" in a build without git. */
extern const char kv_revision[];

/* For --version: "PROGRAM VERSION (REVISION)" and `more`, a line on standard output. */
void kv_version_print(const char *program, const char *more);
/* 1: that was the only argument of a program without other options, and the line is printed. */
int kv_version_asked(int argc, char **argv, const char *program);

/* ---- descriptors ----------------------------------------------------------------------------- */

/* Raise the soft limit of descriptors to the hard one. A login's usual soft limit of 1,024 is for programs that call
 * select(); the daemon has a descriptor for each slab, session and slot file. Before threads start. */
static inline void kv_rlimit_raise_files(void)
{
	struct rlimit files;

	if (getrlimit(RLIMIT_NOFILE, &files) == 0 && files.rlim_cur < files.rlim_max) {
		files.rlim_cur = files.rlim_max;
		(void)setrlimit(RLIMIT_NOFILE, &files);
	}
}

#endif
