/* storage/fs_status.h -- what an errno of the file system means: one answer for every place that gets one (decision
 * 067). */
#ifndef KVS_FS_STATUS_H
#define KVS_FS_STATUS_H

#include "kv/status.h"

/* KV_ERR_NOSPC: the file system is full, and only then.
 * KV_ERR_BUSY: a limit of the process, the machine or the operator (descriptors, memory, a quota, the size of a file).
 *   It says nothing of the file or the device.
 * KV_ERR_PATH: the name, or who may use it: an operator's to repair.
 * KV_ERR_CORRUPT: the file ends before the bytes it should have.
 * KV_ERR_IO: everything else, the device's own errors among it. */
kv_status_t kvs_fs_status(int error);

/* Have the file system set blocks aside for the whole file. 0, or an errno. EOPNOTSUPP: this file system cannot, or a
 * filter of system calls refuses it for every file; a file that has its length only shows a full disk when it is
 * written. */
int kvs_preallocate(int fd, uint64_t bytes);

#endif
