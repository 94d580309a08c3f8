/* kvs/nvme.h -- the disk tier: fixed slots in preallocated files, io_uring with O_DIRECT, metadata in RocksDB.
 *
 * Directory:
 *   LOCK                 held by the one daemon (flock)
 *   superblock           synced, two copies: format version, namespaces, identity texts, epochs; has the last word
 *                        on epochs
 *   slots/<class>.<n>    slot files of one class (namespace x geometry); slot = header page(s) + payload,
 *                        overwritten in place
 *   meta/                RocksDB, in the process kvd-meta: (class, slot) -> kvs_meta_t, generation, digests' root;
 *                        rebuilt from slot headers when lost
 * A slot's header (key, group, parent, root digest, epoch, generation, length, event hash, leaf digests, CRC) has the
 * last word.
 */
#ifndef KVS_NVME_H
#define KVS_NVME_H

#include "kv/env.h"
#include "kv/metric.h"
#include "kvs/tier.h"

typedef enum kvs_io_engine { KVS_IO_AUTO = 0, KVS_IO_URING = 1, KVS_IO_THREADS = 2 } kvs_io_engine_t;

typedef struct kvs_nvme_config {
	const char *path;           /* directory; created 0700 when missing */
	uint64_t limit_bytes;       /* slot files and metadata together, fixed */
	uint64_t file_bytes;        /* preallocated size of one slot file */
	uint32_t queue_depth;       /* device requests in flight */
	kvs_io_engine_t engine;     /* AUTO: io_uring, else plain preadv/pwritev in threads; says so once */
	int direct;                 /* 1: O_DIRECT where the file system has it; says so when not */
	int sync;                   /* 1: flush() means fdatasync (0 only for tests and replays) */
	uint64_t flush_interval_ns; /* metadata batch at the latest after this */
	uint64_t incarnation;
	int drop_unreadable;  /* 1: go without blocks whose headers cannot be read, when the metadata is lost */
	uint64_t *unreadable; /* out, may be NULL: how many slots that are needed could not be read */
	/* In and out, may be NULL; 0 before the process opens the tier first. 1: a sync has failed when blocks were
	 * found by their headers. They are written again then: the next sync of the same bytes would prove nothing. */
	int *unsynced;
	kv_metrics_t *metrics;
} kvs_nvme_config_t;

/* Would this version read the directory? Nothing is changed or locked, and another daemon may use it meanwhile.
 * KV_ERR_FOREIGN: no, `detail` says why. KV_OK also where nothing can be read now. */
kv_status_t kvs_nvme_check_format(const char *path, const kv_env_t *env, char *detail, size_t cap);

/* Open or create. KV_ERR_LOCKED: another daemon holds the directory (said after 0.5 s; one that was killed
 * is waited for up to 10 s, until the kernel has finished its writes). KV_ERR_FOREIGN: not a kvd directory, or another
 * version; nothing was changed. KV_ERR_IO (also: the metadata is lost and not all headers can be read: nothing is
 * dropped for that), KV_ERR_NOSPC, KV_ERR_PATH (also: the program kvd-meta is not beside this one). Metadata that
 * cannot be opened is no error: the tier starts read-only with what the slots' headers say, and tries again. `detail`
 * gets a sentence for the operator. */
kv_status_t kvs_nvme_open(const kvs_nvme_config_t *config, const kv_env_t *env, kvs_tier_t **p_tier, char *detail,
			  size_t cap);

/* Register memory that transfers will use (a slab's data; it stays mapped until kvs_nvme_unregister() or the tier's
 * close). *p_region goes into kvs_mem_t. Returns at once: the I/O thread registers piece by piece what has been
 * touched, and until then transfers go unregistered. So they do for ever when the kernel refuses (memlock), which is
 * said once. UINT32_MAX when registration would gain nothing: no io_uring, too many regions. Memory on reserved huge
 * pages gains nothing either (docs/decisions/005-nvme-slots.md): do not register it. */
void kvs_nvme_register(kvs_tier_t *tier, void *base, size_t bytes, uint32_t *p_region);
/* The memory will be unmapped, and no transfer uses it. 1: nothing of it is registered now (any region that
 * is none: at once), and the number may become other memory's: do not ask again. 0: the I/O thread has been told; ask
 * again, and leave it mapped until then: nobody else gets the number before you have had the answer. */
int kvs_nvme_unregister(kvs_tier_t *tier, uint32_t region);

#endif
