/* daemon/base/helper.h -- programs of kvd's own that the daemon starts for work that may die, abort or hang: kvd-net,
 * kvd-gpu. */
#ifndef KVD_HELPER_H
#define KVD_HELPER_H

#include "kv/status.h"

#include <sys/types.h>

/* Of the program: its end of a pair of SOCK_SEQPACKET sockets. The next one is the program itself, and there are none
 * beyond. */
#define KVD_HELPER_FD 3

/* The program of this name in the folder of the program that runs. It is kept open: a package that is upgraded
 * meanwhile does not bring in a program of another version. KV_ERR_PATH: `detail` says why. */
kv_status_t kvd_helper_open(const char *name, int *p_program_fd, char *detail, size_t cap);
/* Start it, with every signal at its default. *p_fd is our end of the pair, close-on-exec; the process is the caller's
 * to reap. Else errno says why (kv/system.h), and nothing is left behind. */
kv_status_t kvd_helper_start(int program_fd, char *const argv[], pid_t *p_pid, int *p_fd);

#endif
