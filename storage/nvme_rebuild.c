/* Lost metadata: every slot's header is read and taken for a row. */
#include "nvme_impl.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct reader {
	kvs_nvme_t *nvme;
	kvs_row_fn row;
	void *arg;
	uint8_t *buffer;
	uint64_t bad;
} reader_t;

/* 0, or an errno; ENODATA: end of file. */
static int read_header(int fd, void *out, size_t n, uint64_t offset)
{
	size_t got = 0;

	while (got < n) {
		ssize_t r = pread(fd, (uint8_t *)out + got, n - got, (off_t)(offset + got));

		if (r < 0 && errno == EINTR) {
			continue;
		}
		if (r <= 0) {
			return r == 0 ? ENODATA : errno;
		}
		got += (size_t)r;
	}

	return 0;
}

static kv_status_t take_header(reader_t *reader, const kvs_dclass_t *cls, kv_slot_t slot)
{
	kvs_slothdr_t h;
	kvs_row_t row;
	kv_status_t status = kvs_slothdr_decode(reader->buffer, cls->header_bytes, &cls->geometry, &h, NULL);

	if (status == KV_MISS) {
		return KV_OK;
	}
	if (status != KV_OK || h.slot != slot || h.slot_class != cls->id) {
		reader->bad++;
		return KV_OK;
	}

	row = (kvs_row_t){.meta = h.meta,
			  .digest = h.digest,
			  .slot_class = h.slot_class,
			  .slot = slot,
			  .gen = h.gen,
			  .length = h.length};

	return reader->row(reader->arg, &row);
}

static kv_status_t read_file(reader_t *reader, uint32_t number)
{
	const kvs_dfile_t *file = &reader->nvme->files[number];
	const kvs_dclass_t *cls = &reader->nvme->classes[file->slot_class];

	for (uint32_t i = 0; i < file->slots; i++) {
		kv_status_t status;

		if (read_header(file->fd, reader->buffer, cls->header_bytes, i * cls->stride) != 0) {
			reader->bad++;
			continue;
		}
		status = take_header(reader, cls, kv_slot_make(number, i));
		if (status != KV_OK) {
			return status;
		}
	}

	return KV_OK;
}

kv_status_t kvs_rebuild_scan(kvs_nvme_t *nvme, kvs_row_fn row, void *arg)
{
	reader_t reader = {.nvme = nvme, .row = row, .arg = arg};
	kv_status_t status = KV_OK;
	void *buffer;

	if (posix_memalign(&buffer, KVS_PAGE, KVS_SLOTHDR_MAX) != 0) {
		return KV_ERR_NOMEM;
	}

	reader.buffer = buffer;
	for (uint32_t i = 0; i < KVS_MAX_FILES && status == KV_OK; i++) {
		if (nvme->files[i].slot) {
			status = read_file(&reader, i);
		}
	}
	free(buffer);
	if (reader.bad > 0) {
		kv_metric_add(nvme->metrics, KV_M_DISK_CORRUPT, reader.bad);
		kv_logf(nvme->env, KV_LOG_WARN, "nvme", "slot headers that could not be read or are damaged %llu",
			(unsigned long long)reader.bad);
	}

	return status;
}
