/* kv_refuse.h -- this process and all that it starts without a system call, or without randomness: for a child, before
 * exec. Where the machine does not let it, the child ends with 77. */
#ifndef KV_REFUSE_H
#define KV_REFUSE_H

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static inline void kv_refuse_call(uint32_t call, uint32_t error)
{
	struct sock_filter filter[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	const struct sock_fprog program = {sizeof filter / sizeof *filter, filter};

	setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
		_exit(77);
	}
}

/* getrandom is refused, and in place of /dev/urandom there is this device. */
static inline void kv_refuse_randomness(const char *device)
{
	if (unshare(CLONE_NEWNS) != 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 ||
	    mount(device, "/dev/urandom", NULL, MS_BIND, NULL) != 0) {
		_exit(77);
	}
	kv_refuse_call(SYS_getrandom, 1 /* EPERM */);
}

#endif
