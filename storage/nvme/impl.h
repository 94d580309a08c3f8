/* storage/nvme/impl.h -- inside the disk tier.
 *
 * Threads: the owner (whoever opened the tier) has the slot tables and all decisions; I/O threads move bytes and check
 * digests (nvme/io/uring.c: one with an io_uring; nvme/io/workers.c: a few with plain calls); the commit thread makes
 * things durable (commit.c). They share bounded queues of kvs_xfer_t and one kvs_commit_t, and nothing else that
 * changes.
 */
#ifndef KVS_NVME_IMPL_H
#define KVS_NVME_IMPL_H

#include "caps.h"
#include "kvs/nvme.h"
#include "metadb/metadb.h"
#include "nvme/io/queue.h"
#include "nvme/format/slothdr.h"
#include "nvme/format/super.h"

#include <pthread.h>
#include <sys/uio.h>

#define KVS_MAX_FILES    (KV_SLOT_MAX_SLAB + 1u)
#define KVS_MAX_WORKERS  4u
#define KVS_MAX_REGIONS  1024u
#define KVS_MAX_WAITERS  1024u
#define KVS_COMMIT_ROWS  4096u
#define KVS_MAX_DEPTH    1024u
#define KVS_MAX_ASIDE    256u
#define KVS_VERIFY_READS 8u   /* at once */
#define KVS_ROW_BYTES    256u /* what a row is taken to cost in RocksDB, old versions included */
#define KVS_NONE         UINT32_MAX

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

/* What goes into header and row of a slot; lives from alloc to commit. */
typedef struct kvs_rec {
	kvs_meta_t meta;
	uint64_t digest;
	uint32_t next_free;
} kvs_rec_t;

/* A file that leaves gives out no slot; RETIRED it is empty, and goes for another class when no row speaks of it. */
typedef enum kvs_file_state { KVS_FILE_USED, KVS_FILE_LEAVING, KVS_FILE_RETIRED } kvs_file_state_t;

typedef struct kvs_dfile {
	kvs_dslot_t *slot; /* NULL: no such file */
	kvs_file_state_t state;
	uint32_t for_class; /* RETIRED: whose room it will be */
	uint32_t slot_class;
	uint32_t slots;
	uint32_t free_slots;
	uint32_t lost; /* slots with KVS_SLOT_LOST */
	int fd;
	uint8_t dirty;   /* written since the last sync began */
	uint8_t claimed; /* number taken, but nothing usable there */
	uint8_t gone;    /* removed while it was open: quarantined for good, until it can be let go */
	uint8_t cut;     /* shorter than it should be, and that has been seen to */
	uint32_t whole;  /* slots that were there when it was opened */
} kvs_dfile_t;

/* A slot that could not be read. It keeps its block: unreadable is not corrupt. */
typedef struct kvs_aside {
	kv_slot_t slot;
	uint32_t tries; /* 0: a free entry */
	uint64_t since_ns;
	uint64_t wait_ns;
	uint64_t until_ns; /* when the tier reads it again */
} kvs_aside_t;

/* The read by which the tier tries one of them again. */
typedef struct kvs_reread {
	int busy;
	kvs_loc_t loc;
	kvs_mem_t mem; /* its own */
} kvs_reread_t;

typedef struct kvs_look {
	uint32_t number;
	int fd;
	uint64_t bytes; /* out; 0: removed; UINT64_MAX: not known */
} kvs_look_t;

typedef struct kvs_dclass {
	/* constant once the class exists; I/O threads read these */
	kvs_geometry_t geometry;
	uint32_t id;
	uint32_t header_bytes;
	uint32_t payload_bytes; /* rounded up to pages */
	uint32_t slots_per_file;
	uint64_t stride;
	/* the owner's */
	kv_slot_t free_head;
	kv_slot_t free_tail;
	uint64_t free_count;
	uint64_t files;
} kvs_dclass_t;

/* FORGET: the file is going away, the ring lets go of its registration. */
typedef enum kvs_xfer_kind { KVS_LOAD, KVS_STORE, KVS_FORGET } kvs_xfer_kind_t;

typedef struct kvs_xfer {
	kvs_done_fn done;
	void *arg;
	const kvs_dclass_t *cls;
	kvs_mem_t mem;
	kvs_meta_t meta; /* store: for the header; load: key and group expected */
	uint64_t incarnation;
	uint64_t offset;
	uint64_t digest; /* out, store: of the block */
	uint64_t start_ns;
	kv_slot_t slot;
	uint32_t gen;
	uint32_t flush_turn;   /* store: which flush waits for it */
	uint32_t failed_syncs; /* store: before it began */
	uint32_t next;         /* free list */
	int fd;
	kvs_xfer_kind_t kind;
	int busy;           /* taken, not given back */
	int error;          /* out: errno of the device, 0 */
	kv_status_t status; /* out */
} kvs_xfer_t;

/* One I/O thread. */
typedef struct kvs_io {
	struct kvs_nvme *nvme;
	pthread_t thread;
	int started;
	kvs_queue_t in;
	kvs_queue_t out;
	kvs_bell_t bell;
	_Atomic int stop;
	_Atomic int ready; /* io_uring: 1 running, negative: errno of the refusal */
	uint32_t unkicked; /* the owner's: pushed since the last bell */
	void *ring;        /* kvs_ring_t of nvme/io/uring.c */
} kvs_io_t;

/* Memory that transfers will use; constant once region_count has passed it, but for `state`:
 *   LIVE --the owner--> LEAVING --the ring thread--> GONE --the owner, with other memory--> FRESH
 *       --the ring thread--> LIVE */
typedef enum kvs_region_state {
	KVS_REGION_LIVE,
	KVS_REGION_LEAVING,
	KVS_REGION_GONE,
	KVS_REGION_FRESH
} kvs_region_state_t;
typedef struct kvs_region {
	uint8_t *base;
	size_t bytes;
	_Atomic uint32_t state;
	size_t most_bytes; /* its pieces' part of the ring's table is for so many */
} kvs_region_t;

/* The ring thread's side of it. */
typedef struct kvs_ring_region {
	uint32_t first;  /* index of its first piece in the table */
	uint32_t pieces; /* registered so far */
	uint32_t wanted;
} kvs_ring_region_t;

#define KVS_PIECE_SHIFT                                                                                                \
	25u /* regions are registered in pieces of 32 MiB, one a turn: pinning fresh memory takes time */

typedef struct kvs_waiter {
	kvs_done_fn done;
	void *arg;
	uint32_t turn; /* flush: runs when the commit of this turn has ended */
	int is_super;
} kvs_waiter_t;

/* One turn of the commit thread: sync files, write the superblock, commit rows. */
typedef struct kvs_commit {
	_Atomic int state; /* 0: the owner's, 1: asked, 2: answered */
	int probe;         /* only see whether the device works again */
	uint64_t space_wanted;
	uint8_t *image; /* superblock; NULL: unchanged */
	size_t image_len;
	int sync_dir;      /* the directory of slot files */
	int super_written; /* the owner's: the image of this turn is on disk */
	int covers;        /* the owner's: this turn makes the waiting flush true */
	uint32_t file_count;
	uint32_t files[KVS_MAX_FILES];
	int fds[KVS_MAX_FILES];
	int try_meta;        /* see that the metadata is open, rows or not */
	int mark;            /* say that it has the row of every block */
	uint32_t look_count; /* files to see whether they are there, and whole */
	kvs_look_t look[KVS_MAX_FILES];
	int directory_gone; /* out */
	uint32_t count;
	kvs_change_t *change;
	kv_status_t super_status; /* out */
	kv_status_t sync_status;  /* out */
	kv_status_t status;       /* out: rows */
	uint64_t meta_bytes;      /* out: bytes of RocksDB's files */
} kvs_commit_t;

/* What can stop the tier (faults.c). Each fault is raised by what fails, and cleared by what shows that it works
 * again:
 *   SPACE  carving, a slot write or a row had no room    the probe page is written and synced, and the room wanted
 *                                                        is there
 *   WRITE  several slot writes failed in a row           the probe
 *   SYNC   a sync failed                                 the probe
 *   META   rows could not be committed                   a commit of rows; who owns the metadata retries when
 *                                                        kvs_fault_is_due()
 *   FILES  the directory of slot files is not the one that is open        it is back
 *   READ   several slot reads failed in a row            the probe */
typedef enum kvs_fault {
	KVS_FAULT_SPACE,
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
	uint64_t wait_ns;  /* the pause before it; grows until kvs_fault_forget() */
	char reason[sizeof((kvs_tier_state_t *)0)->reason];
} kvs_fault_state_t;

typedef struct kvs_nvme {
	kvs_tier_t base;
	const kv_env_t *env;
	kv_metrics_t *metrics;
	kvs_nvme_config_t config;
	char *path;
	char *meta_path;
	int dir_fd;
	int lock_fd;
	int slots_fd;
	int direct;
	int recovered;
	kvs_super_t super;
	kvs_metadb_t *db;
	int rebuild;                   /* the metadata is lost: read the headers */
	struct kvs_recovery *recovery; /* what was read at the open, until all of it is reported */
	uint64_t unverified;           /* slots with KVS_SLOT_UNVERIFIED */
	struct kvs_verify *verify;
	int mark_owed; /* the metadata gets its mark when all of them are verified */

	kvs_dclass_t *classes; /* KVS_SUPER_MAX_CLASSES */
	kvs_dfile_t *files;    /* KVS_MAX_FILES */
	uint32_t retired_files;
	uint64_t file_bytes; /* sum of slot files */
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

	uint32_t turn;         /* stores started now belong to this flush */
	uint32_t turn_open;    /* of the current turn, in flight */
	uint32_t drain_open;   /* of the turn before, in flight */
	int draining;          /* a flush waits for the turn before */
	uint64_t drain_target; /* dirty_in when it had drained */
	int drained;
	uint64_t lost; /* slots with KVS_SLOT_LOST */
	kvs_watch_t watch;
	int super_dirty;
	uint32_t super_asked; /* number of the last change somebody waits for */
	uint32_t super_turn;  /* and of the last that is, or is being, written */
	uint32_t waiter_count;
	kvs_waiter_t *waiters; /* KVS_MAX_WAITERS, and as many for those being answered */
	kvs_waiter_t *answering;
	uint64_t commit_after_ns; /* the last one failed */
	uint32_t failed_syncs;

	kvs_io_t io[KVS_MAX_WORKERS];
	uint32_t workers;
	uint32_t next_worker;
	int uring;
	kvs_region_t *regions; /* KVS_MAX_REGIONS */
	_Atomic uint32_t region_count;
	_Atomic uint32_t region_changes; /* regions that the owner has made LEAVING or FRESH */
	kvs_bell_t owner;                /* its fd is the tier's event fd */
	kvs_commit_t *commit;
	pthread_t commit_thread;
	int commit_started;
	kvs_bell_t commit_bell;
	_Atomic int commit_stop;

	uint32_t read_errors; /* in a row */
	uint32_t write_errors;
	kvs_health_t health;
	kvs_fault_state_t faults[KVS_FAULTS];
	uint64_t space_wanted; /* bytes that SPACE lacks */
	uint64_t looked_ns;    /* all files were looked at */
	kvs_aside_t aside[KVS_MAX_ASIDE];
	uint32_t aside_count;
	kvs_reread_t reread;
	int closing;
} kvs_nvme_t;

static inline kvs_nvme_t *kvs_nvme(kvs_tier_t *tier)
{
	return (kvs_nvme_t *)(void *)tier;
}

/* ---- slots.c: tables, allocation, sums (owner) ------------------------------------------ */
kvs_dslot_t *kvs_slot_get(kvs_nvme_t *nvme, kv_slot_t slot);
/* The slot if `loc` is still its location, else NULL. */
kvs_dslot_t *kvs_slot_at(kvs_nvme_t *nvme, kvs_loc_t loc);
kvs_dclass_t *kvs_slot_class(kvs_nvme_t *nvme, kv_slot_t slot);
void kvs_slot_dirty(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
void kvs_slot_move(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s, kvs_state_t state);
void kvs_slot_release(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* Quarantine a stored slot whose bytes are in doubt; the watch is told at the end of the poll. */
void kvs_slot_lose(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
void kvs_lost_report(kvs_nvme_t *nvme);
void kvs_rec_drop(kvs_nvme_t *nvme, kvs_dslot_t *s);
void kvs_class_setup(kvs_nvme_t *nvme, uint32_t id);
/* Put all slots of a file that has just come (state FREE) into its class's free list, or only those still FREE. */
void kvs_file_admit(kvs_nvme_t *nvme, uint32_t number);
uint64_t kvs_charged(const kvs_nvme_t *nvme);
void kvs_nvme_gauges(kvs_nvme_t *nvme);
kv_status_t kvs_nvme_class_open(kvs_tier_t *tier, const char *ns, const kvs_geometry_t *geometry, uint32_t *p_class);
const char *kvs_nvme_class_ns(kvs_tier_t *tier, uint32_t slot_class);
uint64_t kvs_nvme_class_bytes(kvs_tier_t *tier, uint32_t slot_class);
kv_status_t kvs_nvme_alloc(kvs_tier_t *tier, uint32_t slot_class, kvs_state_t state, uint64_t owner,
			   const kvs_meta_t *meta, kvs_loc_t *p_loc);
kv_status_t kvs_nvme_set_state(kvs_tier_t *tier, kvs_loc_t loc, kvs_state_t state);
void kvs_nvme_free(kvs_tier_t *tier, kvs_loc_t loc);
void kvs_nvme_usage(kvs_tier_t *tier, kvs_usage_t *p_usage);
kv_status_t kvs_nvme_check(kvs_tier_t *tier, char *detail, size_t cap);

/* ---- files.c: slot files (owner, at start and when carving) ----------------------------- */
/* Open a slot file O_DIRECT where that works. Negative: -errno. */
int kvs_file_open(kvs_nvme_t *nvme, uint32_t slot_class, uint32_t number, int flags);
/* Preallocate one more file for the class within the limit. KV_ERR_FULL, KV_ERR_NOSPC, KV_ERR_IO, KV_ERR_NOMEM. */
kv_status_t kvs_file_carve(kvs_nvme_t *nvme, kvs_dclass_t *cls);
/* Files that are going; `own`: bytes of those of the same namespace. */
typedef struct kvs_going {
	uint64_t bytes, slots, own;
} kvs_going_t;
/* Would another file of the class fit under its namespace's cap, and under the limit too, if these files went? */
int kvs_file_may(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, const kvs_going_t *going);
int kvs_file_fits(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, const kvs_going_t *going);
/* Remove a retired file. 0: not yet, its slots may be in use by a commit or the ring. */
int kvs_file_remove(kvs_nvme_t *nvme, uint32_t number);
/* Take the file's free slots out of its class's list. */
void kvs_file_unlist(kvs_nvme_t *nvme, uint32_t number);
/* Find the files of the directory and set up their slot tables; damaged ones are left out and said. */
kv_status_t kvs_file_scan(kvs_nvme_t *nvme);

/* Every slot of a removed file is quarantined for good; when nothing refers to one any more the file is let go. */
void kvs_file_retire(kvs_nvme_t *nvme, uint32_t number);
void kvs_file_let_go(kvs_nvme_t *nvme);

/* ---- lookout.c: files that go, slots that cannot be read -------------------------------- */
/* Owner, as a turn is built: which files to look at. Commit thread: look. Owner: report what is lost. */
void kvs_lookout_collect(kvs_nvme_t *nvme, kvs_commit_t *c, uint64_t now);
int kvs_lookout_is_due(const kvs_nvme_t *nvme, uint64_t now);
void kvs_lookout_run(const kvs_nvme_t *nvme, kvs_commit_t *c);
void kvs_lookout_take(kvs_nvme_t *nvme, const kvs_commit_t *c);
/* A read of the slot has failed: it is tried again after a pause that grows, and given up after ten minutes. The watch
 * is told. */
void kvs_aside_add(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* It was read: the watch is told. */
void kvs_aside_read(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* It is freed, or lost. */
void kvs_aside_drop(kvs_nvme_t *nvme, kv_slot_t slot, kvs_dslot_t *s);
/* Read one again whose pause is over. */
void kvs_aside_step(kvs_nvme_t *nvme);
kv_status_t kvs_nvme_readable(kvs_tier_t *tier, kvs_loc_t loc);

/* ---- verify.c: blocks that a rebuild has found ------------------------------------------ */
/* Its header was found. / Its bytes were read and are right, or the slot is no block's any more. */
void kvs_slot_found(kvs_nvme_t *nvme, kvs_dslot_t *s);
void kvs_slot_verified(kvs_nvme_t *nvme, kvs_dslot_t *s);
/* Read some of them. A block that is not whole is lost; no flush begins while there are others. */
void kvs_verify_step(kvs_nvme_t *nvme);

/* ---- rebalance.c: files that change their class (owner) ------------------------------------ */
extern const kvs_change_ops_t kvs_nvme_change_ops;
/* Give the room of files that have been retired to whom it was taken for. */
void kvs_change_step(kvs_nvme_t *nvme);

/* ---- transfer.c: transfers (owner) ------------------------------------------------------------ */
kv_status_t kvs_nvme_store(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *src, kvs_done_fn done, void *arg);
kv_status_t kvs_nvme_load(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
/* A load of a stored slot, readable or not. KV_ERR_BUSY: no transfer is free. */
kv_status_t kvs_load_submit(kvs_nvme_t *nvme, kvs_loc_t loc, const kvs_mem_t *dst, kvs_done_fn done, void *arg);
/* Memory of the tier for a block of the class. 0: there is none. */
int kvs_mem_take(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, kvs_mem_t *mem);
void kvs_mem_give(const kvs_nvme_t *nvme, const kvs_mem_t *mem);
uint32_t kvs_nvme_poll(kvs_tier_t *tier, uint32_t max);
void kvs_nvme_kick(kvs_nvme_t *nvme);

/* ---- faults.c: what stops the tier, and when it is tried again (owner) ------------------- */
/* `fault` is there, or is still there after a try: the next try comes after a pause twice as long, 0.1 s to 60 s.
 * `doing`: "syncing slot files". */
void kvs_fault_raise(kvs_nvme_t *nvme, kvs_fault_t fault, const char *doing, const char *why);
/* It is not there any more. clear: the pause goes on growing if it comes back; forget: the pause begins anew. */
void kvs_fault_clear(kvs_nvme_t *nvme, kvs_fault_t fault);
void kvs_fault_forget(kvs_nvme_t *nvme, kvs_fault_t fault);
/* 1: it is active and its next try is due. */
int kvs_fault_is_due(const kvs_nvme_t *nvme, kvs_fault_t fault, uint64_t now);
void kvs_nvme_state(kvs_tier_t *tier, kvs_tier_state_t *p_state);

/* ---- nvme/io/xfer.c: what both kinds of I/O thread do with a transfer --------------------------- */
/* Store: write the header into `header`. */
void kvs_xfer_begin(kvs_xfer_t *xfer, void *header);
/* The bytes are in: check them. Sets xfer->status. */
void kvs_xfer_verify(kvs_xfer_t *xfer, void *header);
/* errno -> xfer->status and xfer->error. */
void kvs_xfer_fail(kvs_xfer_t *xfer, int error);
/* Hand it back to the owner, and wake it if it sleeps; one waking may do for several. */
void kvs_xfer_return(kvs_io_t *io, kvs_xfer_t *xfer);
void kvs_xfer_tell(kvs_io_t *io);
/* Drop `done` bytes from the front of iov[*p_count]. */
void kvs_iov_advance(struct iovec *iov, uint32_t *p_count, size_t done);

/* ---- nvme/io/threads.c -------------------------------------------------------------------------- */
/* The ring thread, or plain workers where there is no io_uring (said once), and the commit thread. KV_ERR_NOMEM. */
kv_status_t kvs_threads_start(kvs_nvme_t *nvme);
void kvs_threads_stop(kvs_nvme_t *nvme);

/* ---- nvme/io/region.c --------------------------------------------------------------------------- */
/* Registration touches every page; whoever pre-faults the memory does that better than the ring thread. `page` has a
 * byte for each page. */
int kvs_region_is_touched(void *base, size_t bytes, unsigned char *page);
/* The ring thread: take out what is LEAVING, with `forget` for each piece, and take in what is FRESH. Returns by how
 * many there are more (modulo 2^32) with pieces to be registered. `seen` is the caller's, 0 at first. */
uint32_t kvs_regions_changed(kvs_nvme_t *nvme, kvs_ring_region_t *regions, uint32_t *seen,
			     void (*forget)(void *ring, uint32_t index), void *ring);

/* ---- nvme/io/uring.c, nvme/io/workers.c: I/O threads -------------------------------------------------- */
void *kvs_uring_main(void *io);
void *kvs_sync_main(void *io);

/* ---- commit.c: durability --------------------------------------------------------------- */
kv_status_t kvs_nvme_flush(kvs_tier_t *tier, kvs_done_fn done, void *arg);
kv_status_t kvs_nvme_epoch_set(kvs_tier_t *tier, const kvs_epoch_t *epoch, kvs_done_fn done, void *arg);
uint64_t kvs_nvme_epoch_get(kvs_tier_t *tier, const uint8_t root[32]);
/* Something is to be committed, or tried again, within the flush interval: the tier's event fd becomes readable when it
 * is due. */
void kvs_commit_expect(kvs_nvme_t *nvme);
/* Take the answer of a commit and start the next when one is due. Returns callbacks run. */
uint32_t kvs_commit_step(kvs_nvme_t *nvme);
/* All blocks that a rebuild has found are verified, and their rows written: the metadata may say so. */
int kvs_mark_is_due(const kvs_nvme_t *nvme);
void *kvs_commit_main(void *nvme);
/* Before the commit thread has work: sync the directory of slot files and each of them. */
kv_status_t kvs_commit_sync_all(kvs_nvme_t *nvme);

/* ---- recover.c, rebuild.c ---------------------------------------------------------- */
/* At the open, by its thread: read the rows, or the headers. KV_ERR_IO: headers that are needed cannot be read. */
kv_status_t kvs_recovery_read(kvs_nvme_t *nvme);
void kvs_recovery_free(kvs_nvme_t *nvme);
kv_status_t kvs_nvme_recover(kvs_tier_t *tier, kvs_found_fn found, void *arg, uint32_t max);
/* Read all slot headers as if they were rows. */
kv_status_t kvs_rebuild_scan(kvs_nvme_t *nvme, kvs_row_fn row, void *arg);
/* Read the slot's block: is it the one with this key, and are its bytes right? */
int kvs_rebuild_is_whole(kvs_nvme_t *nvme, kv_slot_t slot, const kvs_meta_t *meta);

#endif
