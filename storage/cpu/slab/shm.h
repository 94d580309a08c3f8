/* storage/cpu/slab/shm.h -- the few system calls that can refuse the pool memory, in a table so that tests can make the
 * n-th of them fail. */
#ifndef KVS_CPU_SHM_H
#define KVS_CPU_SHM_H

#include <stddef.h>
#include <stdint.h>

/* Each returns 0 or -errno. */
typedef struct kvs_sys {
	/* A new memfd, close-on-exec, sealable, not executable where the kernel can say so. */
	int (*memfd)(const char *name, int huge, int *p_fd);
	int (*resize)(int fd, uint64_t bytes);
	/* Shared, readable and writable; never in a core dump, never in a forked child. */
	int (*map)(int fd, uint64_t bytes, void **p_base);
	int (*seal)(int fd, int seals);
	/* Make the pages exist without changing a byte. -EINVAL: this kernel cannot (before 5.14). -EFAULT: who touched
	 * them would get SIGBUS. */
	int (*populate)(void *base, uint64_t bytes);
	/* Make 2 MiB, aligned, not touched yet, exist as one huge page, whatever the machine's setting for
	 * shared memory says (unless that is `deny`). -EEXIST: something does exist. -EINVAL: never here (before 6.1).
	 * Else: not now. NULL: not to be tried. */
	int (*collapse)(void *base);
} kvs_sys_t;

extern const kvs_sys_t kvs_sys_posix;

/* Memory whose descriptor and mapping this process holds. All zero: none. */
typedef struct kvs_shm {
	uint8_t *base;
	uint64_t bytes;
	int fd;
} kvs_shm_t;

/* Make, size, map and seal a memfd. Outputs set on success only; nothing is left behind otherwise. */
int kvs_shm_create(const kvs_sys_t *sys, const char *name, uint64_t bytes, int huge, int seals, kvs_shm_t *p_area);
/* The system call whose errno the last failure in this thread was. */
const char *kvs_shm_failed_call(void);
void kvs_shm_destroy(kvs_shm_t *area);

/* Make pages exist, on every kernel, and without changing a byte: clients may be at work there. A mapping is a promise,
 * a page is one only now. 0 or -errno. */
int kvs_shm_populate(const kvs_sys_t *sys, void *base, uint64_t bytes);

#endif
