/* fault_disk.h -- a disk that breaks: a library preloaded into the daemon and its metadata process (fault_disk.c).
 * fault_disk_rig.h is what a test does with it.
 *
 * Every write below the data directory goes through the library: those of both I/O engines, of the superblocks and of
 * RocksDB. It does three things.
 *   - Faults: the test names an operation, where, and what happens (an error, or a part is moved, or the call does not
 *   return), by a page it shares with the library. Operations are all that the programs do with files, those of
 *   RocksDB among them.
 *   - A journal: before a write the bytes it replaces are kept, and each sync that has succeeded says which writes
 *   it covers. A write that was under way
 *     when the sync began is not covered.
 *   - A loss of power: after kill -9 of all processes fault_disk_lose_power() puts a drawn part of what no sync
 *   covers back. What a failed sync has covered
 *     stays unverified until it is overwritten, as the kernel drops such pages (decision 022).
 *     Of direct writes no page is dropped: the first sync of the next process covers them.
 * A ring's write is done by pwritev, and its entry becomes a NOP with that result, so that what was complete when a
 * sync began is known exactly. The unit of loss is a write, 4 KiB of one, or 512 bytes of one, in any order; a file
 * that was extended has one of its lengths since the last sync. Of the names made, renamed and removed in a directory
 * since its last sync the first few stay, in their order, and the others are taken back: syncing a file does not keep
 * its name. LazyFS and dm-log-writes define a loss in the same way, by writes since the last sync (flush); both need
 * privileges.
 */
#ifndef TESTS_E2E_FAULT_DISK_H
#define TESTS_E2E_FAULT_DISK_H

#include <stdatomic.h>
#include <stdint.h>

enum fault_op {
	FAULT_WRITE,
	FAULT_READ,
	FAULT_SYNC,
	FAULT_SYNC_DIR,
	FAULT_OPEN,   /* what is there: open, openat, fopen, opendir */
	FAULT_CREATE, /* a file that is not: open, openat with O_CREAT */
	FAULT_SIZE,   /* fallocate, posix_fallocate, ftruncate */
	FAULT_RENAME,
	FAULT_REMOVE, /* unlink, rmdir */
	FAULT_MKDIR,
	FAULT_LIST, /* readdir */
	FAULT_STAT, /* stat, fstat, access and so on */
	FAULT_RING, /* to make a ring, to submit to it */
	FAULT_SPAWN,
	FAULT_OPS
};
enum fault_where { FAULT_SLOTS = 1, FAULT_ROWS = 2, FAULT_SUPER = 4, FAULT_ANYWHERE = 7 };

#define FAULT_DISK_ENV                                                                                                 \
	"FAULT_DISK" /* the directory with `control` and the journals; the data directory is in the control page */

typedef struct fault_control {
	char data[128];
	_Atomic uint32_t op, where;
	_Atomic int32_t error;        /* errno; 0: only a part is moved */
	_Atomic uint32_t skip, count; /* calls that go well first, then calls that fail */
	_Atomic uint32_t stalls;      /* what would fail does not return while this is set */
	_Atomic uint32_t lie;         /* where syncs say that they succeeded, and are not made */
	_Atomic uint64_t seq;         /* of the next record */
	_Atomic uint64_t links;       /* kept so far */
	_Atomic uint64_t ring_writes; /* done for a ring */
	_Atomic uint64_t injected;
	_Atomic uint32_t ahead_s; /* so far the clock of the processes is ahead */
} fault_control_t;

enum fault_record_kind {
	FAULT_WROTE = 1,
	FAULT_SIZED,
	FAULT_SYNCED,
	FAULT_POISONED,
	FAULT_MADE, /* names: the record is of their directory */
	FAULT_MADE_DIR,
	FAULT_RENAMED,
	FAULT_REMOVED,
	FAULT_REMOVED_DIR
};

/* In a journal; WROTE is followed by `had` bytes, what is of names by the name; RENAMED by the old and the new one,
 * each with its end. Of names `offset` is the number of a kept link to the file that has lost its name (0: none); of
 * directories `offset` and `len` are inode and birth. */
typedef struct fault_record {
	uint64_t seq;
	uint32_t kind;
	uint32_t had; /* bytes there were before, from `offset` on; behind them: zeros, or the end of the file */
	int32_t pid;
	uint32_t direct;         /* past the page cache */
	uint64_t inode, born_ns; /* a file is these two: names change, inodes are used again */
	uint64_t offset, len;
	uint64_t size; /* of the file before; SYNCED, POISONED: records up to this number, exclusive, that were complete
			*/
} fault_record_t;

#endif
