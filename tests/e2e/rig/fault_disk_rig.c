/* What a disk loses with the power, worked out from the journals. */
#include "e2e/rig/fault_disk_rig.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <inttypes.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SECTOR    512u
#define MAX_FILES 1024u

/* ---- faults ---------------------------------------------------------------------------------- */

static char preload[160], env_dir[80];

/* A leak checker cannot do its work in a process that is killed; and its library need not come first. */
static void before(void)
{
	setenv("ASAN_OPTIONS", "detect_leaks=0:verify_asan_link_order=0", 1);
	setenv(FAULT_DISK_ENV, env_dir, 1);
	setenv("LD_PRELOAD", preload, 1);
}

void fault_disk_open(fault_disk_t *disk, rig_t *rig)
{
	char path[96];
	int fd;

	snprintf(disk->dir, sizeof disk->dir, "%s/fault", rig->dir);
	snprintf(path, sizeof path, "%s/control", disk->dir);
	snprintf(env_dir, sizeof env_dir, "%s", disk->dir);
	snprintf(preload, sizeof preload, "%s", kv_test_program(E2E_FAULT_DISK));
	assert_int_equal(mkdir(disk->dir, 0700), 0);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0 && ftruncate(fd, sizeof *disk->control) == 0);
	disk->control = mmap(NULL, sizeof *disk->control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(disk->control, MAP_FAILED);
	close(fd);
	snprintf(disk->control->data, sizeof disk->control->data, "%s", rig->disk);
	rig->before = before;
}

void fault_disk_close(fault_disk_t *disk)
{
	munmap(disk->control, sizeof *disk->control);
}

void fault_disk_arm(fault_disk_t *disk, enum fault_op op, uint32_t where, int error, uint32_t skip, uint32_t count)
{
	fault_control_t *c = disk->control;

	atomic_store(&c->count, 0);
	atomic_store(&c->op, op);
	atomic_store(&c->where, where);
	atomic_store(&c->error, error);
	atomic_store(&c->skip, skip);
	atomic_store(&c->count, count);
}

/* ---- the journal ----------------------------------------------------------------------------- */

typedef struct entry {
	fault_record_t r;
	const uint8_t *had;
	uint32_t file;
	int covered, poisoned; /* poisoned: by this process */
} entry_t;

typedef struct file {
	uint64_t inode, born_ns;
	char path[256];          /* "": it has been removed */
	int is_data;             /* something was written there */
	uint32_t unsynced, kept; /* names in this directory that no sync covers; how many of them stay */
} file_t;

typedef struct journal {
	entry_t *entries;
	size_t count, cap;
	void *buffers[4096];
	uint32_t buffer_count;
	file_t files[MAX_FILES];
	uint32_t file_count;
} journal_t;

static journal_t *reading; /* nftw() has no argument */

static uint32_t file_of(journal_t *j, uint64_t inode, uint64_t born_ns)
{
	uint32_t i = 0;

	while (i < j->file_count && (j->files[i].inode != inode || j->files[i].born_ns != born_ns)) {
		i++;
	}
	if (i == j->file_count) {
		assert_true(j->file_count < MAX_FILES);
		j->files[j->file_count++] = (file_t){.inode = inode, .born_ns = born_ns};
	}

	return i;
}

/* Records of one process. The last one may have been cut off by the kill: then its write was not begun. */
static void read_records(journal_t *j, const uint8_t *bytes, size_t len)
{
	for (size_t at = 0; len - at >= sizeof(fault_record_t);) {
		entry_t entry = {.had = bytes + at + sizeof entry.r};

		memcpy(&entry.r, bytes + at, sizeof entry.r);
		if (len - at - sizeof entry.r < entry.r.had) {
			return;
		}
		at += sizeof entry.r + entry.r.had;
		entry.file = file_of(j, entry.r.inode, entry.r.born_ns);
		j->files[entry.file].is_data |= entry.r.kind <= FAULT_SIZED;
		if (j->count == j->cap) {
			j->cap = j->cap ? 2 * j->cap : 1024;
			j->entries = realloc(j->entries, j->cap * sizeof *j->entries);
			assert_non_null(j->entries);
		}
		j->entries[j->count++] = entry;
	}
}

static int by_seq(const void *a, const void *b)
{
	const entry_t *x = a, *y = b;

	return x->r.seq < y->r.seq ? -1 : x->r.seq > y->r.seq;
}

/* Read every process's journal, and remove it. */
static void read_journals(journal_t *j, const fault_disk_t *disk)
{
	DIR *dir = opendir(disk->dir);
	const struct dirent *entry;

	assert_non_null(dir);
	while ((entry = readdir(dir)) != NULL) {
		char path[384];
		struct stat st;
		uint8_t *bytes;
		int fd;

		if (strncmp(entry->d_name, "journal.", 8) != 0) {
			continue;
		}
		snprintf(path, sizeof path, "%s/%s", disk->dir, entry->d_name);
		fd = open(path, O_RDONLY | O_CLOEXEC);
		assert_true(fd >= 0 && fstat(fd, &st) == 0 && j->buffer_count < KV_COUNT_OF(j->buffers));
		bytes = malloc((size_t)st.st_size + 1);
		assert_true(bytes && read(fd, bytes, (size_t)st.st_size) == st.st_size);
		j->buffers[j->buffer_count++] = bytes;
		close(fd);
		unlink(path);
		read_records(j, bytes, (size_t)st.st_size);
	}
	closedir(dir);
	if (j->count > 0) {
		qsort(j->entries, j->count, sizeof *j->entries, by_seq);
	}
}

static int name_file(const char *path, const struct stat *st, int type, struct FTW *walk)
{
	struct statx stx;

	(void)st;
	(void)walk;
	if ((type == FTW_F || type == FTW_D) &&
	    statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, &stx) == 0) {
		uint64_t born_ns = (uint64_t)stx.stx_btime.tv_sec * 1000000000u + stx.stx_btime.tv_nsec;

		for (uint32_t i = 0; i < reading->file_count; i++) {
			file_t *file = &reading->files[i];

			if (file->inode == stx.stx_ino && file->born_ns == born_ns) {
				snprintf(file->path, sizeof file->path, "%s", path);
			}
		}
	}

	return 0;
}

static void name_files(journal_t *j, const rig_t *rig)
{
	for (uint32_t i = 0; i < j->file_count; i++) {
		j->files[i].path[0] = '\0';
	}
	reading = j;
	assert_int_equal(nftw(rig->disk, name_file, 16, FTW_PHYS), 0);
}

static int is_name(const entry_t *e)
{
	return e->r.kind >= FAULT_MADE;
}

/* A sync covers what was complete when it began, unless one that failed had it before. Names stay in their order: a
 * later sync covers them too. */
static void check_journal(journal_t *j)
{
	for (size_t s = 0; s < j->count; s++) {
		const entry_t *sync = &j->entries[s];

		if (sync->r.kind != FAULT_SYNCED && sync->r.kind != FAULT_POISONED) {
			continue;
		}
		for (size_t i = 0; i < s && j->entries[i].r.seq < sync->r.size; i++) {
			entry_t *e = &j->entries[i];

			if (e->file != sync->file || e->covered ||
			    (e->poisoned && !is_name(e) && !(e->r.direct && e->poisoned != sync->r.pid))) {
				continue;
			}
			e->covered = sync->r.kind == FAULT_SYNCED;
			e->poisoned = sync->r.pid;
		}
	}
}

/* ---- the loss -------------------------------------------------------------------------------- */

typedef struct draw {
	kv_test_rng_t *rng;
	uint32_t unit; /* bytes that stay or go together; 0: those of a write */
	uint32_t stay; /* of 4 */
} draw_t;

static int stays(const draw_t *draw)
{
	return kv_test_below(draw->rng, 4) < draw->stay;
}

/* What was there before, in [from, to). */
static void put_back(int fd, const entry_t *e, uint64_t from, uint64_t to)
{
	static const uint8_t zeros[SECTOR];
	uint64_t known = e->r.offset + e->r.had < to ? e->r.offset + e->r.had : to;

	if (from < known) {
		assert_int_equal(pwrite(fd, e->had + (from - e->r.offset), known - from, (off_t)from), known - from);
		from = known;
	}
	if (from < to) {
		assert_int_equal(pwrite(fd, zeros, to - from, (off_t)from), to - from);
	}
}

/* A sector in which a later write has stayed has all earlier ones. */
static void undo(int fd, const entry_t *e, const draw_t *draw, uint8_t *kept, fault_loss_t *loss)
{
	uint64_t end = e->r.offset + e->r.len, unit = 0;
	int stay = stays(draw), went = 0, stayed = 0;

	for (uint64_t at = e->r.offset; at < end;) {
		uint64_t sector = at / SECTOR, next = (sector + 1) * SECTOR < end ? (sector + 1) * SECTOR : end;

		if (draw->unit && (at == e->r.offset || at / draw->unit != unit)) {
			unit = at / draw->unit;
			stay = stays(draw);
		}
		if (stay || kept[sector]) {
			stayed = 1;
			kept[sector] = 1;
		} else {
			put_back(fd, e, at, next);
			went = 1;
		}
		at = next;
	}
	loss->undone += (uint64_t)went;
	loss->torn += (uint64_t)(went && stayed);
}

static int changes_size(const entry_t *e)
{
	return e->r.kind == FAULT_SIZED ? e->r.offset != e->r.size : e->r.offset + e->r.len > e->r.size;
}

/* One of the lengths since the last sync. */
static void cut(int fd, const journal_t *j, uint32_t file, const draw_t *draw, fault_loss_t *loss)
{
	uint64_t size = UINT64_MAX;

	for (size_t i = j->count; i-- > 0;) {
		const entry_t *e = &j->entries[i];

		if (e->file != file || e->r.kind > FAULT_SIZED) {
			continue;
		}
		if (e->covered || (changes_size(e) && stays(draw))) {
			break;
		}
		size = changes_size(e) ? e->r.size : size;
	}
	if (size != UINT64_MAX) {
		assert_int_equal(ftruncate(fd, (off_t)size), 0);
		loss->cut++;
	}
}

/* ---- names ----------------------------------------------------------------------------------- */

static void link_back(const fault_disk_t *disk, uint64_t number, const char *path)
{
	char kept[128];

	snprintf(kept, sizeof kept, "%s/keep.%" PRIu64, disk->dir, number);
	if (number > 0 && link(kept, path) != 0) {
		fail_msg("%s is not there again: %s", path, strerror(errno));
	}
}

static void join(char out[256], const char *dir, const char *name)
{
	assert_true(snprintf(out, 256, "%s/%s", dir, name) < 256);
}

/* 1: paths of directories are others now. The test itself may have removed what had the name. */
static int take_back(journal_t *j, const fault_disk_t *disk, const entry_t *e)
{
	const char *name = (const char *)e->had;
	char path[256], was[256];

	if (!j->files[e->file].path[0]) {
		return 0; /* its directory has gone, and that stays */
	}
	join(path, j->files[e->file].path, name);
	switch ((enum fault_record_kind)e->r.kind) {
	case FAULT_MADE:
		assert_true(unlink(path) == 0 || errno == ENOENT);
		return 0;
	case FAULT_MADE_DIR:
		kv_test_dir_remove(path);
		return 1;
	case FAULT_REMOVED:
		link_back(disk, e->r.offset, path);
		return 0;
	case FAULT_REMOVED_DIR:
		assert_int_equal(mkdir(path, 0700), 0);
		memcpy(j->files[file_of(j, e->r.offset, e->r.len)].path, path, sizeof path);
		return 0;
	default:
		join(was, j->files[e->file].path, name + strlen(name) + 1);
		assert_true(rename(was, path) == 0 || errno == ENOENT);
		link_back(disk, e->r.offset, was);
		return 1;
	}
}

/* The latest first. A directory that has come back is another inode: its path is set by hand, and not looked for
 * again. */
static void lose_names(journal_t *j, const fault_disk_t *disk, const rig_t *rig, const draw_t *draw, int all,
		       fault_loss_t *loss)
{
	for (size_t i = 0; i < j->count; i++) {
		j->files[j->entries[i].file].unsynced += is_name(&j->entries[i]) && !j->entries[i].covered;
	}
	for (uint32_t i = 0; i < j->file_count; i++) {
		j->files[i].kept = all ? 0 : (uint32_t)kv_test_below(draw->rng, j->files[i].unsynced + 1u);
	}
	for (size_t i = j->count; i-- > 0;) {
		const entry_t *e = &j->entries[i];
		file_t *dir = &j->files[e->file];

		if (!is_name(e) || e->covered || dir->unsynced-- <= dir->kept) {
			continue;
		}
		if (take_back(j, disk, e)) {
			name_files(j, rig);
		}
		loss->names++;
	}
	name_files(j, rig);
}

static void forget_links(const fault_disk_t *disk)
{
	DIR *dir = opendir(disk->dir);
	const struct dirent *entry;

	assert_non_null(dir);
	while ((entry = readdir(dir)) != NULL) {
		if (strncmp(entry->d_name, "keep.", 5) == 0) {
			(void)unlinkat(dirfd(dir), entry->d_name, 0);
		}
	}
	closedir(dir);
}

static void lose_file(const journal_t *j, uint32_t file, const draw_t *draw, fault_loss_t *loss)
{
	int fd = open(j->files[file].path, O_RDWR | O_CLOEXEC);
	uint64_t end = 0;
	uint8_t *kept;

	assert_true(fd >= 0);
	for (size_t i = 0; i < j->count; i++) {
		const entry_t *e = &j->entries[i];

		if (e->file == file && e->r.kind == FAULT_WROTE && e->r.offset + e->r.len > end) {
			end = e->r.offset + e->r.len;
		}
	}
	kept = calloc(end / SECTOR + 1, 1);
	assert_non_null(kept);
	for (size_t i = j->count; i-- > 0;) {
		const entry_t *e = &j->entries[i];

		if (e->file != file || e->r.kind != FAULT_WROTE) {
			continue;
		}
		loss->writes++;
		if (!e->covered) {
			loss->doubtful++;
			undo(fd, e, draw, kept, loss);
		} else if (e->r.len > 0) {
			memset(kept + e->r.offset / SECTOR, 1,
			       (e->r.offset + e->r.len - 1) / SECTOR - e->r.offset / SECTOR + 1);
		}
	}
	cut(fd, j, file, draw, loss);
	free(kept);
	close(fd);
}

/* 1: some process has the data directory among its arguments. One that has ended has none. */
static int anybody_left(const rig_t *rig)
{
	DIR *dir = opendir("/proc");
	const struct dirent *entry;
	int found = 0;

	assert_non_null(dir);
	while (!found && (entry = readdir(dir)) != NULL) {
		char path[300], text[4096];
		ssize_t n = 0;
		int fd;

		snprintf(path, sizeof path, "/proc/%s/cmdline", entry->d_name);
		fd = entry->d_name[0] >= '1' && entry->d_name[0] <= '9' ? open(path, O_RDONLY | O_CLOEXEC) : -1;
		if (fd >= 0) {
			n = read(fd, text, sizeof text);
			close(fd);
		}
		found = n > 0 && memmem(text, (size_t)n, rig->disk, strlen(rig->disk)) != NULL;
	}
	closedir(dir);

	return found;
}

/* The kernel ends a ring, and lets go of its files, some time after the process. */
static int is_locked(const rig_t *rig)
{
	char path[96];
	int fd, locked;

	snprintf(path, sizeof path, "%s/LOCK", rig->disk);
	fd = open(path, O_RDWR | O_CLOEXEC);
	locked = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) != 0;
	if (fd >= 0) {
		close(fd);
	}

	return locked;
}

void fault_disk_wait(const rig_t *rig)
{
	KV_AWAIT(!anybody_left(rig) && !is_locked(rig));
}

void fault_disk_lose_power(fault_disk_t *disk, const rig_t *rig, kv_test_rng_t *rng, int all, fault_loss_t *loss)
{
	static const uint32_t units[] = {0, 4096, SECTOR};
	const draw_t draw = {.rng = rng,
			     .unit = units[kv_test_below(rng, KV_COUNT_OF(units))],
			     .stay = all ? 0 : (uint32_t)kv_test_below(rng, 4)};
	journal_t *j = calloc(1, sizeof *j);

	assert_non_null(j);
	fault_disk_wait(rig);
	read_journals(j, disk);
	name_files(j, rig);
	check_journal(j);
	lose_names(j, disk, rig, &draw, all, loss);
	forget_links(disk);
	for (uint32_t i = 0; i < j->file_count; i++) {
		if (j->files[i].path[0] && j->files[i].is_data) {
			lose_file(j, i, &draw, loss);
		}
	}
	for (uint32_t i = 0; i < j->buffer_count; i++) {
		free(j->buffers[i]);
	}
	free(j->entries);
	free(j);
}
