/* Step messages and reports: writing them, and reading them without trust. */
#include "step/message.h"

#include <stdlib.h>
#include <string.h>

#define FIRST_CAP 4096u

/* ---- building -------------------------------------------------------------------------------- */

int kvx_msg_reserve(kvx_msg_buf_t *bytes, size_t more)
{
	size_t cap = bytes->cap ? bytes->cap : FIRST_CAP;
	uint8_t *data;

	if (more > KVX_MSG_BYTES_MAX || bytes->len > KVX_MSG_BYTES_MAX - more) {
		return 0;
	}
	while (cap < bytes->len + more) {
		cap *= 2;
	}
	if (cap == bytes->cap) {
		return 1;
	}

	data = realloc(bytes->data, cap);
	if (!data) {
		return 0;
	}
	bytes->data = data;
	bytes->cap = cap;

	return 1;
}

/* `len` zeroed bytes at the end, padded; NULL: no memory. */
static uint8_t *extend(kvx_msg_buf_t *bytes, size_t len)
{
	const size_t size = kvx_padded(len);
	uint8_t *at;

	if (bytes->failed || len > KVX_MSG_BYTES_MAX || !kvx_msg_reserve(bytes, size)) {
		bytes->failed = 1;
		return NULL;
	}
	at = bytes->data + bytes->len;
	memset(at, 0, size);
	bytes->len += size;

	return at;
}

void kvx_msg_reset(kvx_msg_buf_t *bytes, uint32_t magic)
{
	bytes->magic = magic;
	bytes->len = sizeof(kvx_msg_header_t);
	bytes->records = 0;
	bytes->failed = 0;
}

void *kvx_msg_add_record(kvx_msg_buf_t *bytes, uint32_t type, size_t size)
{
	const size_t record = bytes->len;
	kvx_record_header_t *header = (kvx_record_header_t *)(void *)extend(bytes, size);

	if (!header) {
		return NULL;
	}
	bytes->record = record;
	bytes->records++;
	header->type = type;
	header->bytes = (uint32_t)(bytes->len - record);

	return header;
}

void *kvx_msg_append(kvx_msg_buf_t *bytes, const void *data, size_t len)
{
	uint8_t *at = extend(bytes, len);
	kvx_record_header_t *header;

	if (!at) {
		return NULL;
	}
	if (len && data) {
		memcpy(at, data, len);
	}
	header = (kvx_record_header_t *)(void *)(bytes->data + bytes->record);
	header->bytes = (uint32_t)(bytes->len - bytes->record);

	return at;
}

void kvx_msg_finish(kvx_msg_buf_t *bytes, uint32_t step)
{
	if (bytes->failed || bytes->records == 0) {
		bytes->len = 0;
		return;
	}
	*(kvx_msg_header_t *)(void *)bytes->data = (kvx_msg_header_t){
		.magic = bytes->magic, .bytes = (uint32_t)bytes->len, .records = bytes->records, .step = step};
}

void kvx_msg_free(kvx_msg_buf_t *bytes)
{
	free(bytes->data);
	*bytes = (kvx_msg_buf_t){0};
}

/* ---- reading --------------------------------------------------------------------------------- */

int kvx_msg_open(kvx_msg_reader_t *cursor, uint32_t magic, const void *bytes, size_t len)
{
	const kvx_msg_header_t *header = bytes;

	*cursor = (kvx_msg_reader_t){.magic = magic};
	if (!bytes || (uintptr_t)bytes % 8u || len < sizeof *header || len > KVX_MSG_BYTES_MAX) {
		return 0;
	}
	if (header->magic != magic || header->bytes != len) {
		return 0;
	}
	cursor->at = (const uint8_t *)bytes + sizeof *header;
	cursor->end = (const uint8_t *)bytes + len;
	cursor->left = header->records;

	return 1;
}

/* Fixed bytes of a record of that type in that kind of message; 0: it may not be there. */
static size_t fixed_size(uint32_t magic, uint32_t type)
{
	static const size_t in_message[] = {
		[KVX_RECORD_SPACE] = sizeof(kvx_msg_space_t), [KVX_RECORD_FENCE] = sizeof(kvx_msg_fence_t),
		[KVX_RECORD_LOAD] = sizeof(kvx_msg_load_t),   [KVX_RECORD_SAVE] = sizeof(kvx_msg_save_t),
		[KVX_RECORD_DROP] = sizeof(kvx_msg_drop_t),   [KVX_RECORD_TIME] = sizeof(kvx_msg_time_t),
		[KVX_RECORD_WORK] = sizeof(kvx_msg_work_t),   [KVX_RECORD_GPU_MEM] = sizeof(kvx_msg_gpu_mem_t),
	};
	static const size_t in_report[] = {
		[KVX_RECORD_LOADED] = sizeof(kvx_report_loaded_t),
		[KVX_RECORD_DROPPED] = sizeof(kvx_report_dropped_t),
		[KVX_RECORD_STEP] = sizeof(kvx_report_step_t),
		[KVX_RECORD_REACHED] = sizeof(kvx_report_reached_t),
	};

	if (magic == KVX_MSG_MAGIC) {
		return type < KV_COUNT_OF(in_message) ? in_message[type] : 0;
	}

	return type < KV_COUNT_OF(in_report) ? in_report[type] : 0;
}

/* Bytes of n ids; SIZE_MAX if they do not fit into `room`. */
static size_t ids_size(uint32_t n, size_t room)
{
	return n <= room / sizeof(uint32_t) ? kvx_padded((size_t)n * sizeof(uint32_t)) : SIZE_MAX;
}

/* All parts of a load fill exactly `room` bytes. */
static int parts_fit(const kvx_msg_load_t *load, size_t room)
{
	const size_t id = kvx_padded(load->id_len);
	const uint8_t *at = (const uint8_t *)(load + 1) + id;

	if (load->load == 0 || load->id_len == 0 || load->id_len > KVX_MAX_ID || load->parts > KVX_MAX_GROUPS ||
	    id > room) {
		return 0;
	}
	room -= id;
	for (uint32_t i = 0; i < load->parts; i++) {
		const kvx_msg_part_t *part = (const kvx_msg_part_t *)(const void *)at;
		size_t ids;

		if (room < sizeof *part) {
			return 0;
		}
		ids = ids_size(part->n, room);
		if (part->n > UINT32_MAX - part->first || part->mem >= KVX_MEMS || ids > room - sizeof *part) {
			return 0;
		}
		room -= sizeof *part + ids;
		at += sizeof *part + ids;
	}

	return room == 0;
}

/* The arrays that a record announces fill exactly `room` bytes. */
static int tail_fits(const kvx_record_header_t *record, size_t room)
{
	const void *at = record;

	switch (record->type) {
	case KVX_RECORD_SPACE:
		return kvx_padded(((const kvx_msg_space_t *)at)->weights_len) +
			       kvx_padded(((const kvx_msg_space_t *)at)->adapter_len) ==
		       room;
	case KVX_RECORD_GPU_MEM:
		return kvx_padded(((const kvx_msg_gpu_mem_t *)at)->text_len) == room &&
		       ((const kvx_msg_gpu_mem_t *)at)->mem != KVX_HOST_MEM &&
		       ((const kvx_msg_gpu_mem_t *)at)->mem < KVX_MEMS;
	case KVX_RECORD_REACHED:
		return room == 0 && ((const kvx_report_reached_t *)at)->mem > KVX_OWN_MEM &&
		       ((const kvx_report_reached_t *)at)->mem < KVX_MEMS;
	case KVX_RECORD_FENCE:
		return ids_size(((const kvx_msg_fence_t *)at)->n, room) == room;
	case KVX_RECORD_SAVE:
		return ids_size(((const kvx_msg_save_t *)at)->n, room) == room;
	case KVX_RECORD_LOAD:
		return parts_fit(at, room);
	default:
		return room == 0;
	}
}

const kvx_record_header_t *kvx_msg_next(kvx_msg_reader_t *cursor)
{
	const kvx_record_header_t *record = (const kvx_record_header_t *)(const void *)cursor->at;
	const size_t room = (size_t)(cursor->end - cursor->at);
	size_t fixed;

	if (cursor->bad) {
		return NULL;
	}
	if (cursor->left == 0) {
		cursor->bad = room != 0;
		return NULL;
	}
	if (room < sizeof *record || record->bytes > room || record->bytes % 8u) {
		goto bad;
	}
	fixed = fixed_size(cursor->magic, record->type);
	if (fixed == 0 || record->bytes < fixed || !tail_fits(record, record->bytes - fixed)) {
		goto bad;
	}
	cursor->at += record->bytes;
	cursor->left--;

	return record;

bad:
	cursor->bad = 1;
	return NULL;
}

const char *kvx_msg_space_weights(const kvx_msg_space_t *space)
{
	return (const char *)(space + 1);
}

const char *kvx_msg_space_adapter(const kvx_msg_space_t *space)
{
	return kvx_msg_space_weights(space) + kvx_padded(space->weights_len);
}

const char *kvx_msg_gpu_mem_text(const kvx_msg_gpu_mem_t *device)
{
	return (const char *)(device + 1);
}

const uint32_t *kvx_msg_fence_ids(const kvx_msg_fence_t *fence)
{
	return (const uint32_t *)(const void *)(fence + 1);
}

const char *kvx_msg_load_id(const kvx_msg_load_t *load)
{
	return (const char *)(load + 1);
}

const kvx_msg_part_t *kvx_msg_part_first(const kvx_msg_load_t *load)
{
	return (const kvx_msg_part_t *)(const void *)((const uint8_t *)(load + 1) + kvx_padded(load->id_len));
}

const kvx_msg_part_t *kvx_msg_part_next(const kvx_msg_part_t *part)
{
	return (const kvx_msg_part_t *)(const void *)((const uint8_t *)(part + 1) +
						      kvx_padded((size_t)part->n * sizeof(uint32_t)));
}

const uint32_t *kvx_msg_part_ids(const kvx_msg_part_t *part)
{
	return (const uint32_t *)(const void *)(part + 1);
}

const uint32_t *kvx_msg_save_ids(const kvx_msg_save_t *save)
{
	return (const uint32_t *)(const void *)(save + 1);
}
