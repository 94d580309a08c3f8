/* storage/nvme/files.h -- slot files: found at the start, carved within the limit, removed. Owner's thread only. */
#ifndef KVS_NVME_FILES_H
#define KVS_NVME_FILES_H

#include "nvme.h"

/* Open a slot file O_DIRECT where that works. Negative: -errno. */
int kvs_file_open(kvs_nvme_t *nvme, uint32_t slot_class, uint32_t number, int flags);
/* Preallocate one more file for the class within the limit. KV_ERR_FULL: blocks have to go for it, or no file can be
 * had on a full file system. KV_ERR_NOSPC: the same, and the class has no block. KV_ERR_TIER_OFF: it cannot be made now
 * for another reason, and no block need go. KV_ERR_NOMEM. */
kv_status_t kvs_file_carve(kvs_nvme_t *nvme, kvs_dclass_t *cls);
/* Keep a descriptor for the next new file, where there is none. */
void kvs_file_reserve_fd(kvs_nvme_t *nvme);
/* Files that are going; `own`: bytes of those of the same namespace. */
typedef struct kvs_retired_sum {
	uint64_t bytes, slots, own;
} kvs_retired_sum_t;
/* Would another file of the class fit under its namespace's cap, and under the limit too, if these files went? */
int kvs_file_fits_cap(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, const kvs_retired_sum_t *going);
int kvs_file_fits_limit(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, const kvs_retired_sum_t *going);
/* Remove a retired file. 0: not yet, its slots may be in use by a commit or the ring. */
int kvs_file_remove(kvs_nvme_t *nvme, uint32_t number);
/* Take the file's free slots out of its class's list. */
void kvs_file_unlist_free_slots(kvs_nvme_t *nvme, uint32_t number);
/* Find the files of the directory and set up their slot tables; damaged ones are left out and said. */
kv_status_t kvs_file_scan(kvs_nvme_t *nvme);

/* Every slot of a removed file is quarantined for good. When nothing refers to its slots the file is closed. */
void kvs_file_quarantine(kvs_nvme_t *nvme, uint32_t number);
void kvs_files_close_removed(kvs_nvme_t *nvme);

/* Files that are removed or cut while the tier has them open (decision 022). Owner, as a round is built: which files
 * to check. Commit thread: check them. Owner: report what is lost. */
void kvs_file_checks_collect(kvs_nvme_t *nvme, kvs_commit_t *c, uint64_t now);
int kvs_file_checks_are_due(const kvs_nvme_t *nvme, uint64_t now);
void kvs_file_checks_run(const kvs_nvme_t *nvme, kvs_commit_t *c);
void kvs_file_checks_apply(kvs_nvme_t *nvme, const kvs_commit_t *c);

#endif
