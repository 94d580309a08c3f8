/* Slot files: opened, preallocated, given up. slots/<class>.<number>, whole slots, never resized. */
#include "files.h"

#include "faults.h"
#include "fs_status.h"
#include "rebuild.h"
#include "nvme/slots/slots.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define CARVE_RETRY_NS 1000000000u
#define LOOK_NS        1000000000ull /* all files are checked this often while there is work, */
#define LOOK_IDLE_NS   5000000000ull /* and this often while there is none */

static void file_name(uint32_t slot_class, uint32_t number, char out[32])
{
	snprintf(out, 32, "%u.%u", slot_class, number);
}

int kvs_file_open(kvs_nvme_t *nvme, uint32_t slot_class, uint32_t number, int flags)
{
	char name[32];
	int fd;

	file_name(slot_class, number, name);
	flags |= O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
	fd = openat(nvme->slots_fd, name, flags | (nvme->direct ? O_DIRECT : 0), 0600);
	if (fd < 0 && errno == EINVAL && nvme->direct) {
		nvme->direct = 0;
		kv_logf(nvme->env, KV_LOG_WARN, "nvme",
			"the file system has no O_DIRECT; reads and writes go through the page cache path %s",
			nvme->path);
		/* The refusal can come after the file was created. */
		fd = openat(nvme->slots_fd, name, flags & ~O_EXCL, 0600);
	}

	return fd < 0 ? -errno : fd;
}

static int fits_limit(const kvs_nvme_t *nvme, uint64_t bytes, uint64_t slots)
{
	uint64_t meta = nvme->meta_fixed + (nvme->slots + slots) * KVS_ROW_BYTES;

	if (meta < nvme->meta_bytes) {
		meta = nvme->meta_bytes;
	}

	return nvme->file_bytes + bytes + meta <= nvme->config.limit_bytes;
}

int kvs_file_fits_cap(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, const kvs_retired_sum_t *going)
{
	uint64_t left =
		kvs_caps_left(&nvme->caps, (kvs_tier_t *)(uintptr_t)&nvme->base, cls->id, nvme->super.class_count);

	return left == UINT64_MAX || cls->slots_per_file * cls->stride <= left + going->own;
}

int kvs_file_fits_limit(const kvs_nvme_t *nvme, const kvs_dclass_t *cls, const kvs_retired_sum_t *going)
{
	uint64_t new_bytes = cls->slots_per_file * cls->stride;
	uint64_t more = new_bytes > going->bytes ? new_bytes - going->bytes : 0;
	uint64_t more_slots = cls->slots_per_file > going->slots ? cls->slots_per_file - going->slots : 0;

	return fits_limit(nvme, more, more_slots) && kvs_file_fits_cap(nvme, cls, going);
}

/* Nothing in it, nothing on its way to it, and no row speaks of it. */
static int file_is_idle(const kvs_dfile_t *file)
{
	if (!file->slot || file->gone || file->free_slots != file->slots || file->dirty) {
		return 0;
	}
	for (uint32_t i = 0; i < file->slots; i++) {
		if (file->slot[i].io || file->slot[i].flags) {
			return 0;
		}
	}

	return 1;
}

void kvs_file_unlist_free_slots(kvs_nvme_t *nvme, uint32_t number)
{
	kvs_dclass_t *cls = &nvme->classes[nvme->files[number].slot_class];
	kv_slot_t slot = cls->free_head;

	cls->free_head = cls->free_tail = KV_SLOT_NONE;
	cls->free_count = 0;
	while (slot != KV_SLOT_NONE) {
		kvs_dslot_t *s = kvs_slot_get(nvme, slot);
		kv_slot_t next = s->next;

		if (kv_slot_slab(slot) != number) {
			s->next = KV_SLOT_NONE;
			if (cls->free_tail == KV_SLOT_NONE) {
				cls->free_head = slot;
			} else {
				kvs_slot_get(nvme, cls->free_tail)->next = slot;
			}
			cls->free_tail = slot;
			cls->free_count++;
		}
		slot = next;
	}
}

/* Every I/O thread but the ring's opens nothing by number; the ring keeps the file alive until it has let go. */
static void close_unregistered(void *arg, kv_status_t status)
{
	(void)status;
	close((int)(intptr_t)arg);
}

static int unregister_file(kvs_nvme_t *nvme, uint32_t number, int fd)
{
	kvs_xfer_t *xfer;

	if (nvme->xfer_free == KVS_NONE) {
		return 0;
	}

	xfer = &nvme->xfers[nvme->xfer_free];
	nvme->xfer_free = xfer->next;
	*xfer = (kvs_xfer_t){.kind = KVS_UNREGISTER_FILE,
			     .busy = 1,
			     .done = close_unregistered,
			     .arg = (void *)(intptr_t)fd,
			     .slot = kv_slot_make(number, 0),
			     .fd = fd};
	nvme->in_flight++;
	kvs_queue_push(&nvme->io[0].in, xfer);
	nvme->io[0].unflushed++;

	return 1;
}

/* Is the open file still the one under its name? One that has gone may only have been cut to nothing. */
static int has_its_name(const kvs_nvme_t *nvme, int fd, const char *name)
{
	struct stat open_one;
	struct stat named;

	return fstat(fd, &open_one) == 0 && fstatat(nvme->slots_fd, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
	       named.st_ino == open_one.st_ino && named.st_dev == open_one.st_dev;
}

static void file_drop(kvs_nvme_t *nvme, uint32_t number)
{
	kvs_dfile_t *file = &nvme->files[number];
	kvs_dclass_t *cls = &nvme->classes[file->slot_class];
	char name[32];

	if (file->state == KVS_FILE_USED) {
		kvs_file_unlist_free_slots(nvme, number);
	}
	nvme->retired_files -= file->state == KVS_FILE_RETIRED ? 1 : 0;
	/* A later file may get this number. Its slots begin above every generation used here, so that no old location
	 * and no old header can pass for a new one (decision 005). */
	for (uint32_t i = 0; i < file->slots; i++) {
		if (file->slot[i].gen >= nvme->gen_base) {
			nvme->gen_base = file->slot[i].gen + 1u;
		}
	}
	file_name(file->slot_class, number, name);
	if (!file->gone || has_its_name(nvme, file->fd, name)) { /* else the name may be another file's */
		cls->is_named |= unlinkat(nvme->slots_fd, name, 0) != 0 && errno != ENOENT;
		nvme->slots_dirty = 1;
	} else {
		cls->is_named = 1;
	}
	nvme->file_bytes -= file->slots * cls->stride;
	nvme->slots -= file->slots;
	nvme->free_slots -= file->slots;
	cls->files--;
	kv_free(nvme->env, file->slot);
	nvme->recency.files -= file->used;
	*file = (kvs_dfile_t){.fd = -1};
}

void kvs_file_quarantine(kvs_nvme_t *nvme, uint32_t number)
{
	kvs_dfile_t *file = &nvme->files[number];

	file->gone = 1;
	file->dirty = 0;
	kvs_file_unlist_free_slots(nvme, number);
	nvme->retired_files -= file->state == KVS_FILE_RETIRED ? 1 : 0;
	file->state = KVS_FILE_USED; /* no change of class goes on with it */
	file->free_slots = 0;
	for (uint32_t i = 0; i < file->slots; i++) {
		if (file->slot[i].state == KVS_FREE) {
			kvs_slot_set_state(nvme, kv_slot_make(number, i), &file->slot[i], KVS_QUARANTINED);
		}
	}
}

/* The user has freed all slots, and the metadata has no row of them. */
static int is_let_go(const kvs_dfile_t *file)
{
	for (uint32_t i = 0; i < file->slots; i++) {
		if (file->slot[i].state != KVS_QUARANTINED || file->slot[i].io || file->slot[i].flags) {
			return 0;
		}
	}

	return 1;
}

void kvs_files_close_removed(kvs_nvme_t *nvme)
{
	for (uint32_t number = 0; number < KVS_MAX_FILES; number++) {
		kvs_dfile_t *file = &nvme->files[number];

		if (!file->slot || !file->gone || !is_let_go(file) || !unregister_file(nvme, number, file->fd)) {
			continue;
		}
		for (uint32_t i = 0; i < file->slots; i++) {
			kvs_slot_set_state(nvme, kv_slot_make(number, i), &file->slot[i], KVS_FREE);
		}
		file_drop(nvme, number);
	}
}

int kvs_file_remove(kvs_nvme_t *nvme, uint32_t number)
{
	kvs_dfile_t *file = &nvme->files[number];

	/* A commit under way may be syncing any file. */
	if (atomic_load(&nvme->commit->state) != 0 || !file_is_idle(file) || !unregister_file(nvme, number, file->fd)) {
		return 0;
	}
	file_drop(nvme, number);

	return 1;
}

/* Remove files that have been emptied for the class until another one of it fits under the limit and the cap. */
static int make_room(kvs_nvme_t *nvme, const kvs_dclass_t *cls)
{
	const kvs_retired_sum_t none = {0};

	for (uint32_t i = 0; nvme->retired_files > 0 && i < KVS_MAX_FILES && !kvs_file_fits_limit(nvme, cls, &none);
	     i++) {
		if (nvme->files[i].state == KVS_FILE_RETIRED && nvme->files[i].for_class == cls->id) {
			(void)kvs_file_remove(nvme, i);
		}
	}

	return kvs_file_fits_limit(nvme, cls, &none);
}

/* 0, or an errno. */
static int preallocate(kvs_nvme_t *nvme, int fd, uint64_t bytes)
{
	int error = kvs_preallocate(fd, bytes);

	if (error != EOPNOTSUPP) {
		return error;
	}
	if (!nvme->sparse) {
		nvme->sparse = 1;
		kv_logf(nvme->env, KV_LOG_WARN, "nvme",
			"fallocate is refused (by the file system, or a seccomp filter); slot files are not preallocated, "
			"and a full disk will show at writes path %s",
			nvme->path);
	}

	return ftruncate(fd, (off_t)bytes) == 0 ? 0 : errno;
}

static kv_status_t file_setup(kvs_nvme_t *nvme, uint32_t number, uint32_t slot_class, int fd)
{
	kvs_dclass_t *cls = &nvme->classes[slot_class];
	kvs_dfile_t *file = &nvme->files[number];
	kvs_dslot_t *slot = kv_alloc(nvme->env, cls->slots_per_file * (sizeof *slot + sizeof *file->use));

	if (!slot) {
		return KV_ERR_NOMEM;
	}

	for (uint32_t i = 0; i < cls->slots_per_file; i++) {
		slot[i].gen = nvme->gen_base;
		slot[i].rec = KVS_NONE;
		slot[i].next = KV_SLOT_NONE;
		slot[i].next_dirty = KV_SLOT_NONE;
	}
	*file = (kvs_dfile_t){.slot = slot,
			      .use = (uint64_t *)(slot + cls->slots_per_file),
			      .slot_class = slot_class,
			      .slots = cls->slots_per_file,
			      .whole = cls->slots_per_file,
			      .fd = fd};
	nvme->file_bytes += file->slots * cls->stride;
	nvme->slots += file->slots;
	nvme->free_slots += file->slots;
	cls->files++;

	return KV_OK;
}

void kvs_file_reserve_fd(kvs_nvme_t *nvme)
{
	if (nvme->reserve_fd < 0) {
		nvme->reserve_fd = fcntl(nvme->slots_fd, F_DUPFD_CLOEXEC, 0);
	}
}

/* In the place of the descriptor that is kept for this, when there is no other. */
static int open_new(kvs_nvme_t *nvme, uint32_t slot_class, uint32_t number)
{
	int fd = kvs_file_open(nvme, slot_class, number, O_CREAT | O_EXCL);

	if ((fd == -EMFILE || fd == -ENFILE) && nvme->reserve_fd >= 0) {
		close(nvme->reserve_fd);
		nvme->reserve_fd = -1;
		fd = kvs_file_open(nvme, slot_class, number, O_CREAT | O_EXCL);
	}

	return fd;
}

/* *p_error: the errno, where it is one. */
static kv_status_t file_create(kvs_nvme_t *nvme, kvs_dclass_t *cls, uint32_t number, int *p_error)
{
	char name[32];
	kv_status_t status;
	int fd = open_new(nvme, cls->id, number);

	if (fd < 0) {
		*p_error = -fd;
		return kvs_fs_status(-fd);
	}

	*p_error = preallocate(nvme, fd, cls->slots_per_file * cls->stride);
	status = *p_error ? kvs_fs_status(*p_error) : file_setup(nvme, number, cls->id, fd);
	if (status != KV_OK) {
		file_name(cls->id, number, name);
		unlinkat(nvme->slots_fd, name, 0);
		close(fd);
		return status;
	}

	nvme->slots_dirty = 1;
	kvs_file_list_free_slots(nvme, number);

	return KV_OK;
}

kv_status_t kvs_file_carve(kvs_nvme_t *nvme, kvs_dclass_t *cls)
{
	uint64_t now = kv_now_ns(nvme->env);
	uint32_t number = 0;
	kv_status_t status;
	int error = 0;

	if (!make_room(nvme, cls)) {
		return KV_ERR_FULL;
	}
	while (number < KVS_MAX_FILES && (nvme->files[number].slot || nvme->files[number].reserved)) {
		number++;
	}
	if (number == KVS_MAX_FILES) {
		return KV_ERR_FULL;
	}
	if (nvme->faults[KVS_FAULT_CARVE].active) {
		return KV_ERR_TIER_OFF;
	}
	/* Until then a crash would make it a file of the class that had the number before. */
	if (cls->record != KVS_RECORD_WRITTEN) {
		return KV_ERR_BUSY;
	}
	if (now < nvme->carve_after_ns) {
		return cls->files > 0 ? KV_ERR_FULL : KV_ERR_NOSPC;
	}

	status = file_create(nvme, cls, number, &error);
	if (status == KV_OK) {
		kvs_fault_reset(nvme, KVS_FAULT_SPACE);
		kvs_fault_reset(nvme, KVS_FAULT_CARVE);
		return KV_OK;
	}
	if (status == KV_ERR_NOMEM) {
		return status;
	}
	kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, 1);
	/* Only a full file system asks for blocks to go. Whatever else keeps a file from being made may have passed in
	 * a second, and evicted blocks would not come back (decision 067). */
	if (status != KV_ERR_NOSPC) {
		nvme->file_wanted = cls->slots_per_file * cls->stride;
		kvs_fault_raise(nvme, KVS_FAULT_CARVE, "making a slot file", strerror(error));
		return KV_ERR_TIER_OFF;
	}
	if (!nvme->faults[KVS_FAULT_SPACE].active) {
		nvme->space_wanted = cls->slots_per_file * cls->stride;
		kvs_fault_raise(nvme, KVS_FAULT_SPACE, "making a slot file", kv_status_text(status));
	}
	nvme->carve_after_ns = now + CARVE_RETRY_NS;

	return cls->files > 0 ? KV_ERR_FULL : status; /* what there is can be evicted and used again */
}

/* "<class>.<number>", nothing else. */
static int parse_name(const char *name, uint32_t *p_class, uint32_t *p_number)
{
	char again[32];
	char *end;
	unsigned long slot_class = strtoul(name, &end, 10);
	unsigned long number = *end == '.' ? strtoul(end + 1, NULL, 10) : UINT32_MAX;

	if (slot_class >= UINT32_MAX || number >= UINT32_MAX) {
		return 0;
	}
	file_name((uint32_t)slot_class, (uint32_t)number, again);
	*p_class = (uint32_t)slot_class;
	*p_number = (uint32_t)number;

	return strcmp(again, name) == 0;
}

static void skip_file(kvs_nvme_t *nvme, const char *name, const char *why)
{
	kv_metric_add(nvme->metrics, KV_M_DISK_FILES_DROPPED, 1);
	kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "slot file %s is left out with its blocks: %s", name, why);
}

/* NULL: take it. */
static const char *check_file(kvs_nvme_t *nvme, const struct stat *st, uint32_t slot_class)
{
	const kvs_dclass_t *cls = &nvme->classes[slot_class];

	if (!S_ISREG(st->st_mode)) {
		return "not a regular file";
	}
	if ((uint64_t)st->st_size > cls->slots_per_file * cls->stride) {
		return "it is longer than its class says";
	}

	return NULL;
}

/* A file that was cut has lost what lay behind, and no more: the rest is taken, and room made for new blocks. */
static kv_status_t take_file(kvs_nvme_t *nvme, uint32_t slot_class, uint32_t number, int fd, uint64_t bytes)
{
	const kvs_dclass_t *cls = &nvme->classes[slot_class];
	uint64_t whole = cls->slots_per_file * cls->stride;
	kv_status_t status;

	if (bytes < whole) {
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme",
			"slot file %u.%u was cut to %llu bytes; the blocks behind are lost", slot_class, number,
			(unsigned long long)bytes);
		kv_metric_add(nvme->metrics, KV_M_DISK_FILES_CUT, 1);
		if (preallocate(nvme, fd, whole) != 0 && ftruncate(fd, (off_t)whole) != 0) {
			kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "cannot make it whole again: %s", strerror(errno));
		}
	}
	status = file_setup(nvme, number, slot_class, fd);
	if (status == KV_OK && bytes < whole) {
		nvme->files[number].whole = (uint32_t)(bytes / cls->stride);
	}

	return status;
}

/* An open slot file with its size. KV_OK with -1: it is none, and *p_why says so. Other: it cannot be had now, and the
 * tier opens later, with all files. */
static kv_status_t scan_open(kvs_nvme_t *nvme, uint32_t slot_class, uint32_t number, struct stat *st, int *p_fd,
			     const char **p_why)
{
	int fd = kvs_file_open(nvme, slot_class, number, 0);
	int error = fd < 0 ? -fd : fstat(fd, st) != 0 ? errno : 0;

	*p_fd = fd < 0 ? -1 : fd;
	*p_why = error ? strerror(error) : check_file(nvme, st, slot_class);
	if (error == 0 || error == ELOOP || error == ENXIO || error == EISDIR || error == ENOENT ||
	    nvme->config.drop_unreadable) {
		return KV_OK;
	}
	kvs_rebuild_count_unread(nvme, 1);
	if (fd >= 0) {
		close(fd);
	}
	kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "slot file %u.%u cannot be opened: %s", slot_class, number, *p_why);

	return kvs_fs_status(error);
}

static kv_status_t scan_one(kvs_nvme_t *nvme, const char *name)
{
	uint32_t slot_class;
	uint32_t number;
	kv_status_t status;
	struct stat st = {0};
	const char *why;
	int fd;

	if (!parse_name(name, &slot_class, &number) || number >= KVS_MAX_FILES) {
		skip_file(nvme, name, "not a slot file's name");
		return KV_OK;
	}
	if (slot_class >= nvme->super.class_count) {
		/* Carved, but its class never reached the superblock: nothing in it was ever acknowledged. */
		kv_logf(nvme->env, KV_LOG_WARN, "nvme", "slot file %s belongs to no class and is removed", name);
		unlinkat(nvme->slots_fd, name, 0);
		return KV_OK;
	}
	if (nvme->files[number].slot || nvme->files[number].reserved) {
		skip_file(nvme, name, "its number is taken");
		nvme->classes[slot_class].is_named = 1;
		return KV_OK;
	}
	if (!fits_limit(nvme, nvme->classes[slot_class].slots_per_file * nvme->classes[slot_class].stride,
			nvme->classes[slot_class].slots_per_file)) {
		kv_logf(nvme->env, KV_LOG_WARN, "nvme", "slot file %s no longer fits under the limit and is removed",
			name);
		nvme->classes[slot_class].is_named |= unlinkat(nvme->slots_fd, name, 0) != 0;
		nvme->slots_dirty = 1;
		return KV_OK;
	}
	status = scan_open(nvme, slot_class, number, &st, &fd, &why);
	if (status != KV_OK) {
		return status;
	}
	if (why) {
		skip_file(nvme, name, why);
		if (fd >= 0) {
			close(fd);
			if (unlinkat(nvme->slots_fd, name, 0) == 0) {
				return KV_OK;
			}
		}
		nvme->files[number].reserved = 1;
		nvme->classes[slot_class].is_named = 1;
		nvme->reserved_files++;
		return KV_OK;
	}

	return take_file(nvme, slot_class, number, fd, (uint64_t)st.st_size);
}

kv_status_t kvs_file_scan(kvs_nvme_t *nvme)
{
	int copy = openat(nvme->slots_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	DIR *dir = copy >= 0 ? fdopendir(copy) : NULL;
	const struct dirent *entry;
	kv_status_t status = KV_OK;

	if (!dir) {
		status = kvs_fs_status(errno);
		if (copy >= 0) {
			close(copy);
		}
		return status;
	}
	errno = 0;
	while (status == KV_OK && (entry = readdir(dir)) != NULL) {
		if (entry->d_name[0] != '.') {
			status = scan_one(nvme, entry->d_name);
		}
		errno = 0;
	}
	status = status == KV_OK && errno != 0 ? kvs_fs_status(errno)
					       : status; /* the rows of files that are not seen would go */
	closedir(dir);

	return status;
}

/* ---- files that are removed or cut while open (decision 022) --------------------------------- */

/* The commit thread checks, the owner acts. Is the directory of slot files still the one under the tier's path? */
static int directory_is_there(const kvs_nvme_t *nvme)
{
	struct stat open_one;
	struct stat named;

	return fstat(nvme->slots_fd, &open_one) == 0 && open_one.st_nlink > 0 &&
	       fstatat(nvme->dir_fd, "slots", &named, AT_SYMLINK_NOFOLLOW) == 0 && named.st_ino == open_one.st_ino &&
	       named.st_dev == open_one.st_dev && fstat(nvme->dir_fd, &open_one) == 0 &&
	       stat(nvme->path, &named) == 0 && named.st_ino == open_one.st_ino && named.st_dev == open_one.st_dev;
}

void kvs_file_checks_collect(kvs_nvme_t *nvme, kvs_commit_t *c, uint64_t now)
{
	int all = now - nvme->looked_ns >= LOOK_NS;

	c->look_count = 0;
	for (uint32_t i = 0; i < KVS_MAX_FILES; i++) {
		const kvs_dfile_t *file = &nvme->files[i];

		if (file->slot && !file->gone && (all || file->dirty)) {
			c->look[c->look_count++] = (kvs_file_check_t){.number = i, .fd = file->fd};
		}
	}
	nvme->looked_ns = all ? now : nvme->looked_ns;
}

int kvs_file_checks_are_due(const kvs_nvme_t *nvme, uint64_t now)
{
	return now - nvme->looked_ns >= LOOK_IDLE_NS && nvme->slots > 0;
}

void kvs_file_checks_run(const kvs_nvme_t *nvme, kvs_commit_t *c)
{
	c->directory_gone = !directory_is_there(nvme);
	for (uint32_t i = 0; i < c->look_count; i++) {
		struct stat st;

		c->look[i].bytes = UINT64_MAX;
		if (fstat(c->look[i].fd, &st) == 0) {
			c->look[i].bytes = st.st_nlink == 0 ? 0 : (uint64_t)st.st_size;
		}
	}
}

static void lose_stored(kvs_nvme_t *nvme, uint32_t number, uint32_t from)
{
	kvs_dfile_t *file = &nvme->files[number];

	for (uint32_t i = from; i < file->slots; i++) {
		kvs_dslot_t *s = &file->slot[i];

		if ((s->flags & KVS_SLOT_STORED) && s->state != KVS_QUARANTINED && !(s->flags & KVS_SLOT_FREEING)) {
			kvs_slot_mark_lost(nvme, kv_slot_make(number, i), s);
		}
	}
}

void kvs_file_checks_apply(kvs_nvme_t *nvme, const kvs_commit_t *c)
{
	if (c->directory_gone) {
		kvs_fault_raise(nvme, KVS_FAULT_FILES, "looking for the directory of slot files",
				"another one, or none, is under its path");
	} else {
		kvs_fault_reset(nvme, KVS_FAULT_FILES);
	}
	for (uint32_t i = 0; i < c->look_count; i++) {
		const kvs_file_check_t *look = &c->look[i];
		kvs_dfile_t *file = &nvme->files[look->number];
		uint64_t stride = nvme->classes[file->slot_class].stride;

		if (look->bytes >= file->slots * stride) {
			file->cut = 0;
			continue;
		}
		if (look->bytes > 0 && file->cut) {
			continue; /* it grows again with the slots that are written */
		}
		kv_metric_add(nvme->metrics, KV_M_DISK_FILES_DROPPED, look->bytes == 0);
		kv_logf(nvme->env, KV_LOG_ERROR, "nvme",
			"slot file %u.%u was %s while the daemon ran; what was there is lost", file->slot_class,
			look->number, look->bytes == 0 ? "removed" : "cut");
		file->cut = 1;
		lose_stored(nvme, look->number, (uint32_t)(look->bytes / stride));
		if (look->bytes == 0) {
			kvs_file_quarantine(nvme, look->number);
		}
	}
}
