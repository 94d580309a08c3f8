/* storage/nvme/nvme.h -- the state of a disk tier.
 *
 * Threads: the owner (the thread that opened the tier) has the slot tables and takes all decisions; I/O threads move
 * bytes and check digests (io/uring.c: one with an io_uring; io/workers.c: a few with plain calls); the commit thread
 * makes changes durable (commit.c). They share bounded queues of kvs_xfer_t and one kvs_commit_t, and nothing else that
 * changes.
 */
#ifndef KVS_NVME_NVME_H
#define KVS_NVME_NVME_H

#include "caps.h"
#include "kvs/nvme.h"
#include "metadb/metadb.h"
#include "nvme/io/region.h"
#include "nvme/io/xfer.h"
#include "nvme/format/super.h"

#include <pthread.h>

#define KVS_MAX_FILES    (KV_SLOT_MAX_SLAB + 1u)
#define KVS_MAX_WORKERS  4u
#define KVS_MAX_WAITERS  1024u
#define KVS_COMMIT_ROWS  4096u
#define KVS_MAX_DEPTH    1024u
#define KVS_MAX_ASIDE    256u
#define KVS_VERIFY_READS 8u   /* at once */
#define KVS_ROW_BYTES    256u /* what a row is taken to cost in RocksDB, old versions included */

/* Flags of a slot. */
#define KVS_SLOT_DIRTY      1u   /* in the list of rows to commit */
#define KVS_SLOT_ROW        2u   /* RocksDB has, or is getting, a row */
#define KVS_SLOT_STORED     4u   /* its bytes are whole on the device */
#define KVS_SLOT_FREEING    8u   /* to be freed when its I/O has ended */
#define KVS_SLOT_LOST       16u  /* quarantined, and the watch has not been told */
#define KVS_SLOT_ASIDE      32u  /* the device could not read it: there is a kvs_aside_t */
#define KVS_SLOT_RETIRED    64u  /* nor for very long: quarantined for good */
#define KVS_SLOT_UNVERIFIED 128u /* a rebuild has found its header, and nothing has read its block yet */

typedef struct kvs_dslot {
	kv_key_t key;
	uint32_t gen;
	kv_slot_t next;       /* in the class's free list */
	kv_slot_t next_dirty; /* in the list of rows to commit */
	uint32_t rec;         /* kvs_rec_t, until the row is committed; KVS_NONE */
	uint16_t io;          /* transfers in flight */
	uint8_t state;        /* kvs_state_t */
	uint8_t flags;
	uint8_t group;
} kvs_dslot_t;
_Static_assert(sizeof(kvs_dslot_t) % sizeof(uint64_t) == 0, "words of use lie behind the slots");

/* What goes into header and row of a slot; lives from alloc to commit. */
typedef struct kvs_rec {
	kvs_meta_t meta;
	uint64_t digest;
	uint32_t next_free;
} kvs_rec_t;

/* A file that leaves gives out no slot; RETIRED it is empty, and goes for another class when no row speaks of it. */
typedef enum kvs_file_state { KVS_FILE_USED, KVS_FILE_RETIRING, KVS_FILE_RETIRED } kvs_file_state_t;

typedef struct kvs_dfile {
	kvs_dslot_t *slot; /* NULL: no such file */
	uint64_t *use;     /* [slots] when each was used (recency.h); in the same allocation */
	kvs_file_state_t state;
	uint32_t for_class; /* RETIRED: whose room it will be */
	uint32_t slot_class;
	uint32_t slots;
	uint32_t free_slots;
	uint32_t lost; /* slots with KVS_SLOT_LOST */
	int fd;
	uint8_t dirty;    /* written since the last sync began */
	uint8_t reserved; /* number taken, but nothing usable there */
	uint8_t gone;     /* removed while it was open: quarantined for good, until it can be let go */
	uint8_t cut;      /* shorter than it should be, and that has been seen to */
	uint8_t used;     /* words of `use` have changed since they were collected */
	uint32_t whole;   /* slots that were there when it was opened */
} kvs_dfile_t;

/* A slot that could not be read. It keeps its block: unreadable is not corrupt. */
typedef struct kvs_aside {
	kv_slot_t slot;
	uint32_t tries; /* 0: a free entry */
	uint64_t since_ns;
	uint64_t wait_ns;
	uint64_t until_ns; /* when the tier reads it again */
} kvs_aside_t;

typedef struct kvs_file_check {
	uint32_t number;
	int fd;
	uint64_t bytes; /* out; 0: removed; UINT64_MAX: not known */
} kvs_file_check_t;

/* One round of the commit thread: sync files, write the superblock, commit rows. */
typedef struct kvs_commit {
	_Atomic int state; /* 0: the owner's, 1: asked, 2: answered */
	int probe;         /* only see whether the device works again */
	int probe_error;   /* out: errno; 0: it does */
	uint64_t space_wanted, file_wanted;
	uint8_t *image; /* superblock; NULL: unchanged */
	size_t image_len;
	int sync_dir;      /* the directory of slot files */
	int super_written; /* the owner's: the image of this round is on disk */
	int covers;        /* the owner's: this round makes the waiting flush true */
	uint32_t file_count;
	uint32_t files[KVS_MAX_FILES];
	int fds[KVS_MAX_FILES];
	int try_meta;        /* see that the metadata is open, rows or not */
	int mark;            /* say that it has the row of every block */
	void *recency;       /* words to write (recency.h); NULL: none */
	int recency_failed;  /* out */
	uint32_t look_count; /* files to see whether they are there, and whole */
	kvs_file_check_t look[KVS_MAX_FILES];
	int directory_gone; /* out */
	uint32_t count;
	kvs_row_change_t *change;
	kv_status_t super_status; /* out */
	kv_status_t sync_status;  /* out */
	kv_status_t status;       /* out: rows */
	uint64_t meta_bytes;      /* out: bytes of RocksDB's files */
} kvs_commit_t;

typedef struct kvs_waiter {
	kvs_done_fn done;
	void *arg;
	uint32_t round; /* flush: runs when the commit of this round has ended */
	int is_super;
} kvs_waiter_t;

/* What can stop the tier (faults.c). Each fault is raised by what fails, and cleared by what shows that it works
 * again:
 *   SPACE  carving, a slot write or a row had no room    the probe page is written and synced, and the room wanted
 *                                                        is there
 *   CARVE  a slot file could not be made, and the        the probe, or a slot file that could be made
 *          file system is not full
 *   WRITE  several slot writes failed in a row           the probe
 *   SYNC   a sync failed                                 the probe
 *   META   rows could not be committed                   a commit of rows; who owns the metadata retries when
 *                                                        kvs_fault_is_due()
 *   FILES  the directory of slot files is not the one that is open        it is back
 *   READ   several slot reads failed in a row            the probe */
typedef enum kvs_fault {
	KVS_FAULT_SPACE,
	KVS_FAULT_CARVE,
	KVS_FAULT_WRITE,
	KVS_FAULT_SYNC,
	KVS_FAULT_META,
	KVS_FAULT_FILES,
	KVS_FAULT_READ,
	KVS_FAULTS
} kvs_fault_t;

typedef struct kvs_fault_state {
	int active;
	uint64_t since_ns;
	uint64_t retry_ns; /* the next try */
	uint64_t wait_ns;  /* the pause before it; grows until kvs_fault_reset() */
	char reason[sizeof((kvs_tier_state_t *)0)->reason];
} kvs_fault_state_t;

typedef struct kvs_used {
	uint64_t use;
	uint32_t depth;
	kv_slot_t slot;
} kvs_used_t;

/* What recency.h keeps of the tier. */
typedef struct kvs_recency {
	kvs_used_t *order; /* of blocks found at the open, until it is reported; NULL: none, or no memory */
	uint32_t count, cap, reported;
	uint64_t base;   /* uses counted by the daemons before */
	uint32_t files;  /* with `used` set */
	uint32_t next;   /* file to be written */
	uint64_t due_ns; /* not before this */
} kvs_recency_t;

typedef struct kvs_nvme {
	kvs_tier_t base;
	const kv_env_t *env;
	kv_metrics_t *metrics;
	kvs_nvme_config_t config;
	char *path;
	char *meta_path;
	int dir_fd;
	int lock_fd;
	int sparse; /* slot files are not preallocated: it has been said */
	int slots_fd;
	int reserve_fd; /* given up for a new slot file when the process has no other; -1: there was none to keep */
	int direct;
	int recovered;
	kvs_super_t super;
	kvs_metadb_t *db;
	int rebuild;                   /* the metadata is lost: read the headers */
	struct kvs_recovery *recovery; /* what was read at the open, until all of it is reported */
	uint64_t unverified;           /* slots with KVS_SLOT_UNVERIFIED */
	int mark_owed;                 /* the metadata gets its mark when all of them are verified */

	kvs_dclass_t *classes; /* KVS_SUPER_MAX_CLASSES */
	kvs_dfile_t *files;    /* KVS_MAX_FILES */
	uint32_t retired_files;
	uint32_t reserved_files; /* that are there and cannot be used */
	uint64_t file_bytes;     /* sum of slot files */
	uint64_t slots;
	uint64_t free_slots;
	uint64_t quarantined_slots;
	uint64_t used_bytes;
	uint64_t quarantined_bytes;
	uint64_t meta_fixed; /* allowance for metadata beside rows */
	uint64_t meta_bytes; /* last counted */
	uint32_t gen_base;   /* first generation in a new file */
	kvs_caps_t caps;
	uint64_t carve_after_ns; /* the file system was full: not before this */
	int slots_dirty;         /* the directory of slot files has changed since its last sync */

	kvs_rec_t *recs;
	uint32_t rec_cap;
	uint32_t rec_free;

	kv_slot_t dirty_head;
	kv_slot_t dirty_tail;
	uint64_t dirty_in;  /* slots ever put on the list */
	uint64_t dirty_out; /* and taken from it */
	uint64_t dirty_since_ns;
	_Atomic int dirty_hint; /* the commit thread keeps time */

	kvs_xfer_t *xfers;
	uint32_t xfer_cap;
	uint32_t xfer_free;
	uint32_t in_flight;

	uint32_t round;        /* stores started now belong to this flush */
	uint32_t round_open;   /* of the current round, in flight */
	uint32_t drain_open;   /* of the round before, in flight */
	int draining;          /* a flush waits for the round before */
	uint64_t drain_target; /* dirty_in when it had drained */
	int drained;
	uint64_t lost; /* slots with KVS_SLOT_LOST */
	kvs_watch_t watch;
	int super_dirty;
	uint32_t super_asked; /* number of the last change somebody waits for */
	uint32_t super_round; /* and of the last that is, or is being, written */
	uint32_t waiter_count;
	kvs_waiter_t *waiters; /* KVS_MAX_WAITERS, and as many for those being answered */
	kvs_waiter_t *answering;
	uint64_t commit_after_ns; /* the last one failed */
	uint64_t rounds;          /* that have ended */
	uint32_t failed_syncs;

	kvs_io_t io[KVS_MAX_WORKERS];
	uint32_t workers;
	uint32_t next_worker;
	int uring;
	kvs_region_t *regions; /* KVS_MAX_REGIONS */
	_Atomic uint32_t region_count;
	_Atomic uint32_t region_changes; /* regions that the owner has made REMOVING or FRESH */
	kvs_wakeup_t owner_wakeup;       /* its fd is the tier's event fd */
	kvs_commit_t *commit;
	pthread_t commit_thread;
	int commit_started;
	_Atomic int watch_meta; /* the metadata is the commit thread's: it sees its process die */
	_Atomic int meta_died;  /* it has: a round starts another */
	kvs_wakeup_t commit_wakeup;
	_Atomic int commit_stop;

	uint32_t read_errors; /* in a row */
	uint32_t write_errors;
	kvs_health_t health;
	kvs_fault_state_t faults[KVS_FAULTS];
	uint64_t space_wanted; /* bytes that SPACE lacks */
	uint64_t file_wanted;  /* bytes of the file that CARVE is about */
	uint64_t looked_ns;    /* all files were looked at */
	kvs_recency_t recency;
	kvs_aside_t aside[KVS_MAX_ASIDE];
	uint32_t aside_count;
	struct kvs_own_reads *own_reads; /* retries of slots that are set aside, and the verification after a rebuild */
	int closing;
} kvs_nvme_t;

static inline kvs_nvme_t *kvs_nvme(kvs_tier_t *tier)
{
	return (kvs_nvme_t *)(void *)tier;
}

/* Something has to be committed, or tried again, within the flush interval: the event fd of the tier becomes readable
 * when it is due. */
static inline void kvs_commit_request(kvs_nvme_t *nvme)
{
	if (!atomic_exchange(&nvme->dirty_hint, 1)) {
		kvs_wakeup_signal(&nvme->commit_wakeup);
	}
}

#endif
