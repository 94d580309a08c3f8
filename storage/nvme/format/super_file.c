/* The superblock's two copies on disk. */
#include "super.h"

#include "fs_status.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

static void copy_name(uint32_t copy, const char *suffix, char out[32])
{
	snprintf(out, 32, "superblock.%u%s", copy, suffix);
}

static kv_status_t read_whole(int fd, uint8_t *out, size_t len)
{
	size_t got = 0;

	while (got < len) {
		ssize_t n = pread(fd, out + got, len - got, (off_t)got);

		if (n < 0 && errno == EINTR) {
			continue;
		}
		if (n <= 0) {
			return n == 0 ? KV_ERR_IO : kvs_fs_status(errno);
		}
		got += (size_t)n;
	}

	return KV_OK;
}

/* KV_MISS: there is no such file. *p_small: it has no room to grow. */
static kv_status_t load_copy(kvs_super_t *super, int dir_fd, uint32_t copy, int *p_small)
{
	struct stat st;
	uint8_t *image;
	char name[32];
	kv_status_t status = KV_ERR_FOREIGN;
	int fd;

	copy_name(copy, "", name);
	fd = openat(dir_fd, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0) {
		return errno == ENOENT ? KV_MISS : kvs_fs_status(errno);
	}
	if (fstat(fd, &st) != 0) {
		status = KV_ERR_IO;
		goto err_close;
	}
	if (!S_ISREG(st.st_mode) || st.st_size <= 0 || (uint64_t)st.st_size > kvs_super_room(KVS_SUPER_MAX_BYTES)) {
		goto err_close;
	}
	image = kv_alloc(super->env, (size_t)st.st_size);
	if (!image) {
		status = KV_ERR_NOMEM;
		goto err_close;
	}

	status = read_whole(fd, image, (size_t)st.st_size);
	if (status == KV_OK) {
		status = kvs_super_decode(super, image, kvs_super_image_bytes(image, (size_t)st.st_size));
		*p_small |= (uint64_t)st.st_size < kvs_super_room(super->bytes);
	}
	kv_free(super->env, image);

err_close:
	close(fd);

	return status;
}

kv_status_t kvs_super_load(kvs_super_t *super, int dir_fd, uint32_t *p_found, int *p_stale)
{
	kvs_super_t copy[2];
	kv_status_t status[2] = {KV_ERR_NOMEM, KV_ERR_NOMEM};
	uint32_t newest;
	int small = 0;

	for (uint32_t i = 0; i < 2; i++) {
		if (kvs_super_init(&copy[i], super->env) == KV_OK) {
			status[i] = load_copy(&copy[i], dir_fd, i, &small);
		}
	}

	*p_found = (status[0] != KV_MISS) + (uint32_t)(status[1] != KV_MISS);
	newest = status[0] == KV_OK && (status[1] != KV_OK || copy[0].generation >= copy[1].generation) ? 0u : 1u;
	*p_stale = small || status[0] != KV_OK || status[1] != KV_OK || copy[0].generation != copy[1].generation;
	if (status[newest] != KV_OK) {
		kvs_super_fini(&copy[0]);
		kvs_super_fini(&copy[1]);
		if (status[0] == KV_ERR_NOMEM || status[0] == KV_ERR_IO || status[0] == KV_ERR_VERSION) {
			return status[0];
		}
		return status[1] == KV_MISS || status[1] == KV_ERR_CORRUPT ? KV_ERR_FOREIGN : status[1];
	}

	kvs_super_fini(super);
	kvs_super_fini(&copy[1u - newest]);
	*super = copy[newest];

	return KV_OK;
}

static kv_status_t write_whole(int fd, const uint8_t *image, size_t len)
{
	size_t done = 0;

	while (done < len) {
		ssize_t n = pwrite(fd, image + done, len - done, (off_t)done);

		if (n < 0 && errno == EINTR) {
			continue;
		}
		if (n <= 0) {
			return n == 0 ? KV_ERR_IO : kvs_fs_status(errno);
		}
		done += (size_t)n;
	}

	return KV_OK;
}

/* Blocks for the image and its growth, written as zeros so that the file system has given them. Room that cannot be had
 * now is asked for at the next write. */
static void make_room(int fd, size_t len)
{
	static const uint8_t zeros[16384];
	size_t room = kvs_super_room(len);
	struct stat st;

	if (fstat(fd, &st) != 0) {
		return;
	}
	for (size_t at = (size_t)st.st_size; at < room;) {
		size_t some = room - at < sizeof zeros ? room - at : sizeof zeros;
		ssize_t n = pwrite(fd, zeros, some, (off_t)at);

		if (n <= 0 && !(n < 0 && errno == EINTR)) {
			return;
		}
		at += n > 0 ? (size_t)n : 0;
	}
}

/* In place: a torn write leaves the other copy. */
static kv_status_t fill_copy(int fd, const uint8_t *image, size_t len, int sync, int *p_sync_failed)
{
	kv_status_t status;

	make_room(fd, len);
	status = write_whole(fd, image, len);
	if (status == KV_OK && sync && fsync(fd) != 0) {
		*p_sync_failed = 1;
		status = kvs_fs_status(errno);
	}

	return status;
}

/* The first time under another name, so that there is never a file that holds no superblock. */
static kv_status_t make_copy(int dir_fd, uint32_t copy, const uint8_t *image, size_t len, int sync, int *p_sync_failed)
{
	char name[32];
	char fresh[32];
	kv_status_t status;
	int fd;

	copy_name(copy, "", name);
	copy_name(copy, ".new", fresh);
	fd = openat(dir_fd, fresh, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
	if (fd < 0) {
		return kvs_fs_status(errno);
	}
	status = fill_copy(fd, image, len, sync, p_sync_failed);
	close(fd);
	if (status == KV_OK && renameat(dir_fd, fresh, dir_fd, name) != 0) {
		status = kvs_fs_status(errno);
	}
	if (status == KV_OK && sync && fsync(dir_fd) != 0) {
		*p_sync_failed = 1;
		status = kvs_fs_status(errno);
	}
	if (status != KV_OK) {
		unlinkat(dir_fd, fresh, 0);
	}

	return status;
}

static kv_status_t write_copy(int dir_fd, uint32_t copy, const uint8_t *image, size_t len, int sync, int *p_sync_failed)
{
	kv_status_t status;
	char name[32];
	int fd;

	copy_name(copy, "", name);
	fd = openat(dir_fd, name, O_WRONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	if (fd < 0) {
		return errno == ENOENT ? make_copy(dir_fd, copy, image, len, sync, p_sync_failed)
				       : kvs_fs_status(errno);
	}
	status = fill_copy(fd, image, len, sync, p_sync_failed);
	close(fd);

	return status;
}

kv_status_t kvs_super_write(int dir_fd, const uint8_t *image, size_t len, int sync, int *p_sync_failed)
{
	kv_status_t status = write_copy(dir_fd, 0, image, len, sync, p_sync_failed);

	return status == KV_OK ? write_copy(dir_fd, 1, image, len, sync, p_sync_failed) : status;
}
