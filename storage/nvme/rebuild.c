/* Lost metadata: every slot's header is read and taken for a row. Headers are read in batches through a ring of their
 * own; where there is none, one by one. */
#include "rebuild.h"

#include "fs_status.h"
#include "nvme/slots/slots.h"

#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <unistd.h>

#define BATCH        64u
#define MAX_REFUSALS 5000u /* a millisecond each */
#define SHORT_TRIES  3u    /* of a header that was not read whole */

typedef struct reader {
	kvs_nvme_t *nvme;
	kvs_row_fn row;
	void *arg;
	uint8_t *buffer; /* BATCH headers of KVS_SLOTHDR_MAX */
	int result[BATCH];
	struct io_uring ring;
	int has_ring;
	uint64_t bad;
	uint64_t unread;
} reader_t;

static uint8_t *header_at(const reader_t *reader, uint32_t i)
{
	return reader->buffer + (size_t)i * KVS_SLOTHDR_MAX;
}

static void read_plain(reader_t *reader, int fd, uint32_t i, size_t n, uint64_t offset)
{
	ssize_t got;

	do {
		got = pread(fd, header_at(reader, i), n, (off_t)offset);
	} while (got < 0 && errno == EINTR);
	reader->result[i] = (int)got;
}

/* 1: all `count` results are in. 0: the ring has failed, and is not used again. */
static int read_ring(reader_t *reader, const kvs_dclass_t *cls, int fd, uint32_t first, uint32_t count)
{
	uint32_t seen = 0;
	uint32_t refusals = 0;

	for (uint32_t i = 0; i < count; i++) {
		struct io_uring_sqe *sqe = io_uring_get_sqe(&reader->ring);

		kv_assert(sqe != NULL);
		io_uring_prep_read(sqe, fd, header_at(reader, i), cls->header_bytes, (first + i) * cls->stride);
		io_uring_sqe_set_data64(sqe, i);
	}
	while (seen < count) {
		struct io_uring_cqe *cqe;
		int result = io_uring_submit_and_wait(&reader->ring, 1);

		if (result < 0 && result != -EINTR && (result != -EAGAIN || ++refusals > MAX_REFUSALS)) {
			/* What the kernel has taken may still arrive in the buffers: they are given up with the
			 * ring. */
			reader->has_ring = 0;
			reader->buffer = NULL;
			return 0;
		}
		if (result == -EAGAIN) {
			usleep(1000);
		}
		while (io_uring_peek_cqe(&reader->ring, &cqe) == 0) {
			reader->result[cqe->user_data] = cqe->res;
			io_uring_cqe_seen(&reader->ring, cqe);
			seen++;
		}
	}

	return 1;
}

static kv_status_t take_header(reader_t *reader, const kvs_dclass_t *cls, kv_slot_t slot, uint8_t *header)
{
	kvs_slothdr_t h;
	kvs_row_t row;
	kv_status_t status = kvs_slothdr_decode(header, cls->header_bytes, &cls->geometry, &h, NULL);

	if (status == KV_MISS) {
		return KV_OK;
	}
	if (status != KV_OK || h.slot != slot || h.slot_class != cls->id) {
		reader->bad++;
		return KV_OK;
	}

	row = (kvs_row_t){
		.meta = h.meta,
		.digest = h.digest,
		.slot_class = h.slot_class,
		.slot = slot,
		.gen = h.gen,
		.length = h.length,
	};

	return reader->row(reader->arg, &row);
}

void kvs_rebuild_count_unread(const kvs_nvme_t *nvme, uint64_t count)
{
	if (nvme->config.unreadable) {
		*nvme->config.unreadable += count;
	}
}

static void retire_slot(kvs_nvme_t *nvme, kv_slot_t slot)
{
	kvs_dslot_t *s = kvs_slot_get(nvme, slot);

	s->flags |= KVS_SLOT_RETIRED;
	kvs_slot_set_state(nvme, slot, s, KVS_QUARANTINED);
}

static kv_status_t read_batch(reader_t *reader, uint32_t number, uint32_t first, uint32_t count)
{
	const kvs_dfile_t *file = &reader->nvme->files[number];
	const kvs_dclass_t *cls = &reader->nvme->classes[file->slot_class];
	kv_status_t status = KV_OK;

	if (reader->has_ring) {
		if (!read_ring(reader, cls, file->fd, first, count)) {
			return KV_ERR_IO;
		}
	} else {
		for (uint32_t i = 0; i < count; i++) {
			read_plain(reader, file->fd, i, cls->header_bytes, (first + i) * cls->stride);
		}
	}
	for (uint32_t i = 0; i < count && status == KV_OK; i++) {
		for (uint32_t tries = 0;
		     tries < SHORT_TRIES && reader->result[i] >= 0 && reader->result[i] != (int)cls->header_bytes;
		     tries++) {
			read_plain(reader, file->fd, i, cls->header_bytes, (first + i) * cls->stride);
		}
		if (reader->result[i] < 0) { /* whatever it holds, it is not free */
			reader->unread++;
			retire_slot(reader->nvme, kv_slot_make(number, first + i));
			continue;
		}
		if (reader->result[i] != (int)cls->header_bytes) {
			reader->bad++;
			continue;
		}
		status = take_header(reader, cls, kv_slot_make(number, first + i), header_at(reader, i));
	}

	return status;
}

static kv_status_t read_file(reader_t *reader, uint32_t number)
{
	uint32_t slots = reader->nvme->files[number].slots;
	kv_status_t status = KV_OK;

	for (uint32_t first = 0; first < slots && status == KV_OK; first += BATCH) {
		status = read_batch(reader, number, first, slots - first < BATCH ? slots - first : BATCH);
	}

	return status;
}

/* 0 or an errno; ENODATA: the file ends in it. */
static int move_whole(int is_write, int fd, uint8_t *buffer, size_t bytes, uint64_t offset)
{
	size_t done = 0;
	ssize_t n;

	do {
		n = is_write ? pwrite(fd, buffer + done, bytes - done, (off_t)(offset + done))
			     : pread(fd, buffer + done, bytes - done, (off_t)(offset + done));
		done += n > 0 ? (size_t)n & ~(size_t)(KVS_PAGE - 1u) : 0;
	} while (done < bytes && (n >= KVS_PAGE || (n < 0 && errno == EINTR)));

	return done == bytes ? 0 : n < 0 ? errno : n == 0 ? ENODATA : EIO;
}

kvs_copy_t kvs_rebuild_check_copy(kvs_nvme_t *nvme, kv_slot_t slot, const kvs_meta_t *meta)
{
	kvs_dclass_t *cls = kvs_slot_class(nvme, slot);
	size_t bytes = cls->header_bytes + cls->payload_bytes;
	kvs_xfer_t xfer = {
		.kind = KVS_LOAD, .cls = cls, .slot = slot, .gen = kvs_slot_get(nvme, slot)->gen, .meta = *meta};
	void *buffer;
	int error;

	if (posix_memalign(&buffer, KVS_PAGE, bytes) != 0) {
		return KVS_COPY_UNREAD;
	}
	error = move_whole(0, nvme->files[kv_slot_slab(slot)].fd, buffer, bytes, kv_slot_index(slot) * cls->stride);
	if (error == 0) {
		xfer.mem.data = (uint8_t *)buffer + cls->header_bytes;
		kvs_xfer_verify(&xfer, buffer);
	}
	free(buffer);
	if (error != 0) {
		return error == ENODATA ? KVS_COPY_TORN : KVS_COPY_UNREAD;
	}

	return xfer.status == KV_OK ? KVS_COPY_WHOLE : KVS_COPY_TORN;
}

/* A slot without a header holds nothing. One that cannot be read may have bytes that no sync has carried: it is not
 * believed without them. */
static kv_status_t write_slot_again(kvs_nvme_t *nvme, kv_slot_t slot, uint8_t *buffer)
{
	const kvs_dclass_t *cls = kvs_slot_class(nvme, slot);
	const int fd = nvme->files[kv_slot_slab(slot)].fd;
	const uint64_t offset = kv_slot_index(slot) * cls->stride;
	const size_t bytes = cls->header_bytes + cls->payload_bytes;
	kvs_slothdr_t h;
	int error = move_whole(0, fd, buffer, cls->header_bytes, offset);

	if (error == 0 && kvs_slothdr_decode(buffer, cls->header_bytes, &cls->geometry, &h, NULL) != KV_OK) {
		return KV_OK;
	}
	error = error == 0 ? move_whole(0, fd, buffer, bytes, offset) : error;
	if (error == ENODATA) {
		return KV_OK; /* the file ends in it */
	}
	if (error != 0) {
		kvs_rebuild_count_unread(nvme, 1);
		retire_slot(nvme, slot);
		return nvme->config.drop_unreadable ? KV_OK : KV_ERR_IO;
	}
	error = move_whole(1, fd, buffer, bytes, offset);

	return error == 0 ? KV_OK : kvs_fs_status(error);
}

static kv_status_t write_file_again(kvs_nvme_t *nvme, uint32_t number)
{
	const kvs_dfile_t *file = &nvme->files[number];
	const kvs_dclass_t *cls = &nvme->classes[file->slot_class];
	kv_status_t status = KV_OK;
	void *buffer;

	if (posix_memalign(&buffer, KVS_PAGE, cls->header_bytes + cls->payload_bytes) != 0) {
		return KV_ERR_NOMEM;
	}
	for (uint32_t i = 0; i < file->slots && status == KV_OK; i++) {
		status = write_slot_again(nvme, kv_slot_make(number, i), buffer);
	}
	free(buffer);

	return status;
}

kv_status_t kvs_rebuild_write_again(kvs_nvme_t *nvme)
{
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < KVS_MAX_FILES && status == KV_OK; i++) {
		status = nvme->files[i].slot ? write_file_again(nvme, i) : KV_OK;
	}
	kv_logf(nvme->env, status == KV_OK ? KV_LOG_WARN : KV_LOG_ERROR, "nvme",
		"a sync has failed, so what has a header is written again: %s", kv_status_text(status));

	return status;
}

kv_status_t kvs_rebuild_rows(kvs_nvme_t *nvme, kvs_row_fn row, void *arg)
{
	reader_t reader = {.nvme = nvme, .row = row, .arg = arg};
	kv_status_t status = KV_OK;
	void *buffer;

	if (posix_memalign(&buffer, KVS_PAGE, (size_t)BATCH * KVS_SLOTHDR_MAX) != 0) {
		return KV_ERR_NOMEM;
	}

	reader.buffer = buffer;
	reader.has_ring = nvme->uring && io_uring_queue_init(BATCH, &reader.ring, 0) == 0;
	for (uint32_t i = 0; i < KVS_MAX_FILES && status == KV_OK; i++) {
		if (nvme->files[i].slot) {
			status = read_file(&reader, i);
		}
	}
	if (reader.has_ring) {
		io_uring_queue_exit(&reader.ring);
	}
	free(reader.buffer);
	if (reader.bad > 0) {
		kv_metric_add(nvme->metrics, KV_M_DISK_CORRUPT, reader.bad);
		kv_logf(nvme->env, KV_LOG_WARN, "nvme", "slot headers that are cut off or damaged %llu",
			(unsigned long long)reader.bad);
	}
	kvs_rebuild_count_unread(nvme, reader.unread);
	if (status != KV_OK || reader.unread == 0) {
		return status;
	}
	kv_metric_add(nvme->metrics, KV_M_DISK_ERRORS, reader.unread);
	kv_logf(nvme->env, KV_LOG_ERROR, "nvme", "slot headers that cannot be read %llu, the metadata is lost: %s",
		(unsigned long long)reader.unread,
		nvme->config.drop_unreadable ? "their slots are given up" : "they are needed");

	return nvme->config.drop_unreadable ? KV_OK : KV_ERR_IO;
}
