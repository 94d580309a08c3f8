/* kv/rlimit.h -- the process's limit of descriptors. */
#ifndef KV_RLIMIT_H
#define KV_RLIMIT_H

#include <sys/resource.h>

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
