/* daemon/base/process.h -- what a well-behaved daemon does to its process: limits, signals, umask, the lock of its
 * directory, word to systemd. */
#ifndef KVD_PROCESS_H
#define KVD_PROCESS_H

#include "options/options.h"

/* Before any thread is started and any file kept open: closed standard streams become /dev/null, umask 0077,
 * descriptors up to the hard limit, no new privileges, SIGPIPE ignored, the signals of the loop blocked. */
void kvd_process_prepare(void);

/* Make run_dir and lock it. KV_ERR_LOCKED: another daemon runs there; KV_ERR_PATH. `detail` gets a sentence. */
kv_status_t kvd_process_lock(const char *run_dir, int *p_fd, char *detail, size_t cap);

/* Take the lock again if its file, or all of run_dir, was removed: another daemon would find it free. The descriptor
 * keeps its number. KV_MISS: nothing was removed. */
kv_status_t kvd_process_relock(const char *run_dir, int fd, char *detail, size_t cap);

/* Tell systemd (or another supervisor that sets NOTIFY_SOCKET) one line, e.g. "READY=1". Without NOTIFY_SOCKET nothing
 * happens. */
void kvd_process_notify(const char *line);

/* Open descriptors of this process. */
uint32_t kvd_process_count_fds(void);

#endif
