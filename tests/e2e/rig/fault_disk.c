/* The preloaded half of fault_disk.h: what stands between a process and its files. */
#include "e2e/rig/fault_disk.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <liburing.h>
#include <limits.h>
#include <stdarg.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT     __attribute__((visibility("default")))
#define REAL(name) ((__typeof__(&name))(uintptr_t)real(#name))

#define SECTOR    512u
#define MAX_FIXED 65536u
#define MAX_NOPS  1024u

typedef struct file {
	int fd;
	uint32_t where;
	int is_dir;
	uint64_t inode, born_ns, size;
} file_t;

/* An entry of a ring that became a NOP. */
typedef struct nop {
	const struct io_uring *ring;
	uint64_t data;
	int result;
} nop_t;

static fault_control_t *control;
static char folder[128];
static int journal = -1;
static pthread_mutex_t lock =
	PTHREAD_MUTEX_INITIALIZER; /* journal and write are one step; so a sync knows what was complete */
static int fixed[MAX_FIXED];
static nop_t nops[MAX_NOPS];
static unsigned nop_count;

static void *real(const char *name)
{
	return dlsym(RTLD_NEXT, name);
}

static _Noreturn void give_up(const char *why)
{
	dprintf(STDERR_FILENO, "fault_disk: %s: %s\n", why, strerror(errno));
	abort();
}

__attribute__((constructor)) static void start(void)
{
	const char *dir = getenv(FAULT_DISK_ENV);
	char path[256];
	int fd;

	if (!dir) {
		return;
	}
	snprintf(folder, sizeof folder, "%s", dir);
	snprintf(path, sizeof path, "%s/control", dir);
	fd = open(path, O_RDWR | O_CLOEXEC);
	control = fd >= 0 ? mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
	snprintf(path, sizeof path, "%s/journal.%d", dir, (int)getpid());
	journal = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
	if (control == MAP_FAILED || journal < 0) {
		give_up("no control page or journal");
	}
	close(fd);
}

/* ---- which file ------------------------------------------------------------------------------ */

/* `path` is under the data directory. */
static uint32_t where_is(const char *path)
{
	const char *below = path + strlen(control->data);

	return strncmp(below, "/slots", 6) == 0  ? FAULT_SLOTS
	       : strncmp(below, "/meta", 5) == 0 ? FAULT_ROWS
						 : FAULT_SUPER;
}

/* 1: a file or directory under the data directory. */
static int find(int fd, file_t *file)
{
	char link[32], path[256];
	struct statx stx;
	size_t len;
	ssize_t n;

	if (!control || fd < 0) {
		return 0;
	}
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, sizeof path - 1);
	len = strlen(control->data);
	if (n < 0 || (size_t)n < len || memcmp(path, control->data, len) != 0 ||
	    statx(fd, "", AT_EMPTY_PATH, STATX_BASIC_STATS | STATX_BTIME, &stx) != 0 ||
	    (!S_ISREG(stx.stx_mode) && !S_ISDIR(stx.stx_mode))) {
		return 0;
	}
	path[n] = '\0';
	*file = (file_t){.fd = fd,
			 .where = where_is(path),
			 .is_dir = S_ISDIR(stx.stx_mode),
			 .inode = stx.stx_ino,
			 .born_ns = (uint64_t)stx.stx_btime.tv_sec * 1000000000u + stx.stx_btime.tv_nsec,
			 .size = stx.stx_size};

	return 1;
}

/* Does this call fail? *p_error: its errno, 0: a part of it is done. */
static int fails(enum fault_op op, const file_t *file, int *p_error)
{
	uint32_t left = atomic_load(&control->count);

	if (left == 0 || atomic_load(&control->op) != op || !(atomic_load(&control->where) & file->where)) {
		return 0;
	}
	for (uint32_t skip = atomic_load(&control->skip); skip > 0;) {
		if (atomic_compare_exchange_weak(&control->skip, &skip, skip - 1)) {
			return 0;
		}
	}
	while (!atomic_compare_exchange_weak(&control->count, &left, left - 1)) {
		if (left == 0) {
			return 0;
		}
	}
	*p_error = atomic_load(&control->error);
	atomic_fetch_add(&control->injected, 1);
	while (atomic_load(&control->stalls)) {
		usleep(1000);
	}

	return 1;
}

/* The same of calls that are done or not. 1: it fails, with errno. */
static int refuses(enum fault_op op, const file_t *file)
{
	int error = 0;

	if (!fails(op, file, &error)) {
		return 0;
	}
	errno = error ? error : EIO;

	return 1;
}

static int refuses_anywhere(enum fault_op op)
{
	const file_t file = {.where = FAULT_ANYWHERE};

	return control && control != MAP_FAILED && refuses(op, &file);
}

/* ---- the journal ----------------------------------------------------------------------------- */

static void append_record(const file_t *file, fault_record_t *record, const void *bytes)
{
	struct iovec iov[2] = {{record, sizeof *record}, {(void *)(uintptr_t)bytes, record->had}};
	ssize_t whole = (ssize_t)(sizeof *record + record->had);

	record->seq = atomic_fetch_add(&control->seq, 1);
	record->pid = getpid();
	record->direct = (fcntl(file->fd, F_GETFL) & O_DIRECT) != 0;
	record->inode = file->inode;
	record->born_ns = file->born_ns;
	if (REAL(writev)(journal, iov, record->had ? 2 : 1) != whole) {
		give_up("the journal takes no record");
	}
}

/* What [offset, offset + len) holds, which is about to be replaced. */
static void save_old_bytes(const file_t *file, uint64_t offset, uint64_t len)
{
	fault_record_t record = {.kind = FAULT_WROTE, .offset = offset, .len = len, .size = file->size};
	uint64_t had = offset >= file->size ? 0 : file->size - offset < len ? file->size - offset : len;
	uint8_t *bytes = malloc(had + 1);
	char link[32];
	int fd;

	snprintf(link, sizeof link, "/proc/self/fd/%d", file->fd);
	fd = open(link, O_RDONLY | O_CLOEXEC); /* that one may be write-only, or want aligned memory */
	record.had = (uint32_t)had;
	if (!bytes || fd < 0 || (had > 0 && REAL(pread)(fd, bytes, had, (off_t)offset) != (ssize_t)had)) {
		give_up("what a write replaces cannot be read");
	}
	close(fd);
	append_record(file, &record, bytes);
	free(bytes);
}

/* ---- the operations -------------------------------------------------------------------------- */

static size_t length(const struct iovec *iov, int count)
{
	size_t len = 0;

	for (int i = 0; i < count; i++) {
		len += iov[i].iov_len;
	}

	return len;
}

/* The first `len` bytes of a vector, at `offset`. */
static ssize_t move(int is_write, int fd, const struct iovec *iov, int count, off_t offset, size_t len)
{
	struct iovec part[8];
	int n = 0;

	for (; n < count && n < 8 && len > 0; n++) {
		part[n] = iov[n];
		part[n].iov_len = iov[n].iov_len < len ? iov[n].iov_len : len;
		len -= part[n].iov_len;
	}

	return is_write ? REAL(pwritev)(fd, part, n, offset) : REAL(preadv)(fd, part, n, offset);
}

/* What follows is one step with its record, of the file as large as it is then: another thread may have written since
 * find(). */
static void begin_step(file_t *file)
{
	struct stat now;

	pthread_mutex_lock(&lock);
	if (REAL(fstat)(file->fd, &now) != 0) {
		give_up("a file has no size");
	}
	file->size = (uint64_t)now.st_size;
}

/* A write that fails has moved its first half. */
static ssize_t faulty_write(file_t *file, const struct iovec *iov, int count, off_t offset)
{
	size_t len = length(iov, count), some = len;
	int error = 0, failed;
	ssize_t n = 0;

	failed = fails(FAULT_WRITE, file, &error);
	begin_step(file);
	if (failed) {
		some = len < 2 * SECTOR ? 0 : len / 2 & ~(size_t)(SECTOR - 1);
		error = some == 0 && error == 0 ? EIO : error;
	}
	if (some > 0) {
		save_old_bytes(file, (uint64_t)offset, some);
		n = move(1, file->fd, iov, count, offset, some);
	}
	pthread_mutex_unlock(&lock);
	if (failed && error) {
		errno = error;
		return -1;
	}

	return n;
}

/* 1: it is one that fails, with *p_result. */
static int faulty_read(const file_t *file, const struct iovec *iov, int count, off_t offset, ssize_t *p_result)
{
	size_t some = length(iov, count) / 2 & ~(size_t)(SECTOR - 1);
	int error = 0;

	if (!fails(FAULT_READ, file, &error)) {
		return 0;
	}
	if (error || some == 0) {
		errno = error ? error : EIO;
		*p_result = -1;
	} else {
		*p_result = move(0, file->fd, iov, count, offset, some);
	}

	return 1;
}

static int faulty_sync(int fd, int (*sync)(int))
{
	fault_record_t record = {.kind = FAULT_SYNCED};
	file_t file;
	int error = 0, result;

	if (!find(fd, &file)) {
		return sync(fd);
	}
	pthread_mutex_lock(&lock);
	record.size = atomic_load(&control->seq);
	pthread_mutex_unlock(&lock);
	if (fails(file.is_dir ? FAULT_SYNC_DIR : FAULT_SYNC, &file, &error)) {
		record.kind = FAULT_POISONED;
		append_record(&file, &record, NULL);
		errno = error;
		return -1;
	}
	if (atomic_load(&control->lie) & file.where) {
		return 0;
	}
	result = sync(fd);
	if (result == 0) {
		append_record(&file, &record, NULL);
	}

	return result;
}

EXPORT int fdatasync(int fd)
{
	return faulty_sync(fd, REAL(fdatasync));
}

EXPORT int fsync(int fd)
{
	return faulty_sync(fd, REAL(fsync));
}

EXPORT ssize_t pwritev(int fd, const struct iovec *iov, int count, off_t offset)
{
	file_t file;

	return find(fd, &file) ? faulty_write(&file, iov, count, offset) : REAL(pwritev)(fd, iov, count, offset);
}

EXPORT ssize_t pwrite(int fd, const void *data, size_t len, off_t offset)
{
	const struct iovec iov = {(void *)(uintptr_t)data, len};
	file_t file;

	return find(fd, &file) ? faulty_write(&file, &iov, 1, offset) : REAL(pwrite)(fd, data, len, offset);
}

EXPORT ssize_t write(int fd, const void *data, size_t len)
{
	const struct iovec iov = {(void *)(uintptr_t)data, len};
	file_t file;
	ssize_t n;
	off_t at;

	if (fd == journal || !find(fd, &file)) {
		return REAL(write)(fd, data, len);
	}
	at = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
	n = faulty_write(&file, &iov, 1, at);
	if (n > 0) {
		lseek(fd, at + n, SEEK_SET);
	}

	return n;
}

EXPORT ssize_t preadv(int fd, const struct iovec *iov, int count, off_t offset)
{
	file_t file;
	ssize_t n;

	return find(fd, &file) && faulty_read(&file, iov, count, offset, &n) ? n : REAL(preadv)(fd, iov, count, offset);
}

EXPORT ssize_t pread(int fd, void *data, size_t len, off_t offset)
{
	const struct iovec iov = {data, len};
	file_t file;
	ssize_t n;

	return find(fd, &file) && faulty_read(&file, &iov, 1, offset, &n) ? n : REAL(pread)(fd, data, len, offset);
}

#undef fread_unlocked /* with optimization it is a macro */

/* The library of the rows reads its log and its lists so. */
EXPORT size_t fread_unlocked(void *data, size_t size, size_t count, FILE *stream)
{
	file_t file;
	int error = 0;

	if (find(fileno(stream), &file) && fails(FAULT_READ, &file, &error)) {
		errno = error ? error : EIO;
		return 0;
	}

	return REAL(fread_unlocked)(data, size, count, stream);
}

EXPORT int ftruncate(int fd, off_t size)
{
	fault_record_t record = {.kind = FAULT_SIZED, .offset = (uint64_t)size};
	file_t file;
	int result;

	if (!find(fd, &file)) {
		return REAL(ftruncate)(fd, size);
	}
	if (refuses(FAULT_SIZE, &file)) {
		return -1;
	}
	begin_step(&file);
	if ((uint64_t)size < file.size) {
		save_old_bytes(&file, (uint64_t)size, file.size - (uint64_t)size);
	}
	record.size = file.size;
	append_record(&file, &record, NULL);
	result = REAL(ftruncate)(fd, size);
	pthread_mutex_unlock(&lock);

	return result;
}

EXPORT int fallocate(int fd, int mode, off_t offset, off_t len)
{
	fault_record_t record = {.kind = FAULT_SIZED, .offset = (uint64_t)(offset + len)};
	file_t file;
	int result;

	if (!find(fd, &file)) {
		return REAL(fallocate)(fd, mode, offset, len);
	}
	if (refuses(FAULT_SIZE, &file)) {
		return -1;
	}
	begin_step(&file);
	if (mode == 0 && file.size < record.offset) {
		record.size = file.size;
		append_record(&file, &record, NULL);
	} else if (mode & FALLOC_FL_PUNCH_HOLE) {
		save_old_bytes(&file, (uint64_t)offset, (uint64_t)len);
	}
	result = REAL(fallocate)(fd, mode, offset, len);
	pthread_mutex_unlock(&lock);

	return result;
}

EXPORT int posix_fallocate(int fd, off_t offset, off_t len)
{
	return fallocate(fd, 0, offset, len) == 0 ? 0 : errno;
}

/* ---- names ----------------------------------------------------------------------------------- */

/* A name below the data directory. */
typedef struct name {
	char path[PATH_MAX];
	const char *last; /* in `path` */
	file_t dir;       /* that it is in; `where` is the name's */
} name_t;

static int birth(const char *path, uint64_t *p_inode, uint64_t *p_born_ns)
{
	struct statx stx;

	if (statx(AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_BASIC_STATS | STATX_BTIME, &stx) != 0) {
		return 0;
	}
	*p_inode = stx.stx_ino;
	*p_born_ns = (uint64_t)stx.stx_btime.tv_sec * 1000000000u + stx.stx_btime.tv_nsec;

	return 1;
}

static int find_name(int dir_fd, const char *given, name_t *name)
{
	char link[32], dir[PATH_MAX];
	size_t len;
	ssize_t n = 0;

	if (!control) {
		return 0;
	}
	if (given[0] != '/') {
		snprintf(link, sizeof link, "/proc/self/fd/%d", dir_fd);
		n = readlink(link, name->path, sizeof name->path - 2);
		if (n <= 0) {
			return 0;
		}
		name->path[n++] = '/';
	}
	snprintf(name->path + n, sizeof name->path - (size_t)n, "%s", given);
	len = strlen(control->data);
	if (strncmp(name->path, control->data, len) != 0 || name->path[len] != '/') {
		return 0;
	}
	name->last = strrchr(name->path, '/') + 1;
	name->dir = (file_t){.fd = journal, .where = where_is(name->path)};
	snprintf(dir, (size_t)(name->last - name->path), "%s", name->path);

	return birth(dir, &name->dir.inode, &name->dir.born_ns);
}

/* What has this name keeps one outside. 0: there is no such file. */
static uint64_t keep_link(const name_t *name)
{
	char path[256];
	uint64_t number = atomic_fetch_add(&control->links, 1) + 1;

	snprintf(path, sizeof path, "%s/keep.%llu", folder, (unsigned long long)number);

	return link(name->path, path) == 0 ? number : 0;
}

static void note_name(const name_t *name, fault_record_t record)
{
	record.had = (uint32_t)strlen(name->last) + 1;
	append_record(&name->dir, &record, name->last);
}

static int open_named(int dir_fd, const char *path, int flags, mode_t mode)
{
	name_t name;
	int fd, is_new;

	if (!find_name(dir_fd, path, &name)) {
		return REAL(openat)(dir_fd, path, flags, mode);
	}
	is_new = (flags & O_CREAT) && REAL(faccessat)(AT_FDCWD, name.path, F_OK, AT_SYMLINK_NOFOLLOW) != 0;
	if (refuses(is_new ? FAULT_CREATE : FAULT_OPEN, &name.dir)) {
		return -1;
	}
	if (!(flags & O_CREAT)) {
		return REAL(openat)(dir_fd, path, flags, mode);
	}
	pthread_mutex_lock(&lock);
	fd = REAL(openat)(dir_fd, path, flags, mode);
	if (fd >= 0 && is_new) {
		note_name(&name, (fault_record_t){.kind = FAULT_MADE});
	}
	pthread_mutex_unlock(&lock);

	return fd;
}

static mode_t mode_of(int flags, va_list args)
{
	return flags & (O_CREAT | O_TMPFILE) ? va_arg(args, mode_t) : 0;
}

EXPORT int open(const char *path, int flags, ...)
{
	va_list args;
	mode_t mode;

	va_start(args, flags);
	mode = mode_of(flags, args);
	va_end(args);

	return open_named(AT_FDCWD, path, flags, mode);
}

EXPORT int openat(int dir_fd, const char *path, int flags, ...)
{
	va_list args;
	mode_t mode;

	va_start(args, flags);
	mode = mode_of(flags, args);
	va_end(args);

	return open_named(dir_fd, path, flags, mode);
}

EXPORT FILE *fopen(const char *path, const char *mode)
{
	name_t name;

	return find_name(AT_FDCWD, path, &name) && refuses(FAULT_OPEN, &name.dir) ? NULL : REAL(fopen)(path, mode);
}

EXPORT DIR *opendir(const char *path)
{
	name_t name;

	return find_name(AT_FDCWD, path, &name) && refuses(FAULT_OPEN, &name.dir) ? NULL : REAL(opendir)(path);
}

EXPORT struct dirent *readdir(DIR *dir)
{
	file_t file;

	return find(dirfd(dir), &file) && refuses(FAULT_LIST, &file) ? NULL : REAL(readdir)(dir);
}

EXPORT int fstat(int fd, struct stat *out)
{
	file_t file;

	return find(fd, &file) && refuses(FAULT_STAT, &file) ? -1 : REAL(fstat)(fd, out);
}

EXPORT int fstatat(int dir_fd, const char *path, struct stat *out, int flags)
{
	name_t name;

	return find_name(dir_fd, path, &name) && refuses(FAULT_STAT, &name.dir)
		       ? -1
		       : REAL(fstatat)(dir_fd, path, out, flags);
}

EXPORT int stat(const char *path, struct stat *out)
{
	return fstatat(AT_FDCWD, path, out, 0);
}

EXPORT int access(const char *path, int mode)
{
	name_t name;

	return find_name(AT_FDCWD, path, &name) && refuses(FAULT_STAT, &name.dir) ? -1 : REAL(access)(path, mode);
}

EXPORT int mkdirat(int dir_fd, const char *path, mode_t mode)
{
	fault_record_t record = {.kind = FAULT_MADE_DIR};
	name_t name;
	int result, is_named = find_name(dir_fd, path, &name);

	if (is_named && refuses(FAULT_MKDIR, &name.dir)) {
		return -1;
	}
	pthread_mutex_lock(&lock);
	result = REAL(mkdirat)(dir_fd, path, mode);
	if (result == 0 && is_named && birth(name.path, &record.offset, &record.len)) {
		note_name(&name, record);
	}
	pthread_mutex_unlock(&lock);

	return result;
}

EXPORT int mkdir(const char *path, mode_t mode)
{
	return mkdirat(AT_FDCWD, path, mode);
}

EXPORT int unlinkat(int dir_fd, const char *path, int flags)
{
	fault_record_t record = {.kind = flags & AT_REMOVEDIR ? FAULT_REMOVED_DIR : FAULT_REMOVED};
	name_t name;
	int result, is_named = find_name(dir_fd, path, &name);

	if (is_named && refuses(FAULT_REMOVE, &name.dir)) {
		return -1;
	}
	pthread_mutex_lock(&lock);
	if (is_named && record.kind == FAULT_REMOVED) {
		record.offset = keep_link(&name);
	} else if (is_named) {
		is_named = birth(name.path, &record.offset, &record.len);
	}
	result = REAL(unlinkat)(dir_fd, path, flags);
	if (result == 0 && is_named) {
		note_name(&name, record);
	}
	pthread_mutex_unlock(&lock);

	return result;
}

EXPORT int unlink(const char *path)
{
	return unlinkat(AT_FDCWD, path, 0);
}

EXPORT int rmdir(const char *path)
{
	return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

EXPORT int renameat(int old_fd, const char *old, int new_fd, const char *new)
{
	char names[2 * NAME_MAX + 2];
	fault_record_t record = {.kind = FAULT_RENAMED};
	name_t from, to;
	int result, is_named = find_name(old_fd, old, &from) && find_name(new_fd, new, &to);

	if (is_named && refuses(FAULT_RENAME, &to.dir)) {
		return -1;
	}
	pthread_mutex_lock(&lock);
	if (is_named && (from.dir.inode != to.dir.inode || from.dir.born_ns != to.dir.born_ns)) {
		errno = EXDEV;
		give_up("a name goes to another directory");
	}
	record.offset = is_named ? keep_link(&to) : 0;
	result = REAL(renameat)(old_fd, old, new_fd, new);
	if (result == 0 && is_named) {
		record.had = (uint32_t)(strlen(from.last) + strlen(to.last) + 2);
		snprintf(names, sizeof names, "%s%c%s", from.last, 0, to.last);
		append_record(&to.dir, &record, names);
	}
	pthread_mutex_unlock(&lock);

	return result;
}

EXPORT int rename(const char *old, const char *new)
{
	return renameat(AT_FDCWD, old, AT_FDCWD, new);
}

/* ---- time ------------------------------------------------------------------------------------ */

EXPORT int clock_gettime(clockid_t clock, struct timespec *now)
{
	static _Atomic(void *) known;
	int (*next)(clockid_t, struct timespec *);
	void *found = atomic_load(&known);
	int result;

	if (!found) {
		found = real("clock_gettime");
		atomic_store(&known, found);
	}
	next = (__typeof__(next))(uintptr_t)found;
	result = next(clock, now);
	if (result == 0 && clock == CLOCK_MONOTONIC && control && control != MAP_FAILED) {
		now->tv_sec += atomic_load(&control->ahead_s);
	}

	return result;
}

/* ---- processes ------------------------------------------------------------------------------- */

EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
		       const posix_spawnattr_t *attr, char *const argv[], char *const envp[])
{
	return refuses_anywhere(FAULT_SPAWN) ? errno : REAL(posix_spawn)(pid, path, actions, attr, argv, envp);
}

/* ---- rings ----------------------------------------------------------------------------------- */

EXPORT int io_uring_register_files_update(struct io_uring *ring, unsigned first, const int *fds, unsigned count)
{
	for (unsigned i = 0; i < count && first + i < MAX_FIXED; i++) {
		fixed[first + i] = fds[i];
	}

	return REAL(io_uring_register_files_update)(ring, first, fds, count);
}

/* From now on this entry does nothing but end with `result`. */
static void become_nop(const struct io_uring *ring, struct io_uring_sqe *sqe, ssize_t result)
{
	uint64_t data = sqe->user_data;

	pthread_mutex_lock(&lock);
	if (nop_count == MAX_NOPS) {
		give_up("too many entries in flight");
	}
	nops[nop_count++] = (nop_t){ring, data, result < 0 ? -errno : (int)result};
	pthread_mutex_unlock(&lock);
	memset(sqe, 0, sizeof *sqe);
	sqe->opcode = IORING_OP_NOP;
	sqe->fd = -1;
	sqe->user_data = data;
}

static void do_entry(const struct io_uring *ring, struct io_uring_sqe *sqe)
{
	int is_write = sqe->opcode == IORING_OP_WRITEV || sqe->opcode == IORING_OP_WRITE_FIXED ||
		       sqe->opcode == IORING_OP_WRITE;
	int is_read =
		sqe->opcode == IORING_OP_READV || sqe->opcode == IORING_OP_READ_FIXED || sqe->opcode == IORING_OP_READ;
	int vectored = sqe->opcode == IORING_OP_WRITEV || sqe->opcode == IORING_OP_READV;
	struct iovec one = {(void *)(uintptr_t)sqe->addr, sqe->len};
	const struct iovec *iov = vectored ? (const struct iovec *)(uintptr_t)sqe->addr : &one;
	int count = vectored ? (int)sqe->len : 1;
	file_t file;
	ssize_t n;

	if ((!is_write && !is_read) ||
	    !find(sqe->flags & IOSQE_FIXED_FILE ? fixed[(unsigned)sqe->fd % MAX_FIXED] : sqe->fd, &file)) {
		return;
	}
	if (is_write) {
		become_nop(ring, sqe, faulty_write(&file, iov, count, (off_t)sqe->off));
		atomic_fetch_add(&control->ring_writes, 1);
	} else if (faulty_read(&file, iov, count, (off_t)sqe->off, &n)) {
		become_nop(ring, sqe, n);
	}
}

/* Entries the kernel has not been shown yet. */
static void before_submit(struct io_uring *ring)
{
	for (unsigned i = ring->sq.sqe_head; control && i != ring->sq.sqe_tail; i++) {
		do_entry(ring, &ring->sq.sqes[i & ring->sq.ring_mask]);
	}
}

/* A NOP ends when it is submitted: its completion is there, with the wrong result. */
static int after_submit(struct io_uring *ring, int result)
{
	unsigned tail = io_uring_smp_load_acquire(ring->cq.ktail);

	pthread_mutex_lock(&lock);
	for (unsigned i = *ring->cq.khead; nop_count > 0 && i != tail; i++) {
		struct io_uring_cqe *cqe = &ring->cq.cqes[i & ring->cq.ring_mask];

		for (unsigned k = 0; k < nop_count; k++) {
			if (nops[k].ring == ring && nops[k].data == cqe->user_data) {
				cqe->res = nops[k].result;
				nops[k] = nops[--nop_count];
				break;
			}
		}
	}
	pthread_mutex_unlock(&lock);

	return result;
}

EXPORT int io_uring_queue_init_params(unsigned entries, struct io_uring *ring, struct io_uring_params *params)
{
	return refuses_anywhere(FAULT_RING) ? -errno : REAL(io_uring_queue_init_params)(entries, ring, params);
}

EXPORT int io_uring_queue_init(unsigned entries, struct io_uring *ring, unsigned flags)
{
	return refuses_anywhere(FAULT_RING) ? -errno : REAL(io_uring_queue_init)(entries, ring, flags);
}

EXPORT int io_uring_submit_and_wait(struct io_uring *ring, unsigned wait)
{
	if (refuses_anywhere(FAULT_RING)) {
		return -errno;
	}
	before_submit(ring);

	return after_submit(ring, REAL(io_uring_submit_and_wait)(ring, wait));
}

EXPORT int io_uring_submit_and_get_events(struct io_uring *ring)
{
	if (refuses_anywhere(FAULT_RING)) {
		return -errno;
	}
	before_submit(ring);

	return after_submit(ring, REAL(io_uring_submit_and_get_events)(ring));
}

EXPORT int io_uring_submit_and_wait_timeout(struct io_uring *ring, struct io_uring_cqe **p_cqe, unsigned wait,
					    struct __kernel_timespec *limit, sigset_t *mask)
{
	if (refuses_anywhere(FAULT_RING)) {
		return -errno;
	}
	before_submit(ring);

	return after_submit(ring, REAL(io_uring_submit_and_wait_timeout)(ring, p_cqe, wait, limit, mask));
}
