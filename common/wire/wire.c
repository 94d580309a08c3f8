/* Frames and bodies. One pass over the fields reads and checks all of them; only then is the message written. */
#include "kv/wire.h"

#include "kv/mp.h"
#include "kv/utf8.h"

#include <limits.h>

/* Largest header of a msgpack string or bytes, and of an integer. */
#define MP_HEAD_BYTES   5u
#define MP_INT_BYTES    9u
#define ERROR_MAX_BYTES 255u

/* Members of a body's struct lie in the order of its fields, each aligned to its own size class; tests/common compares
 * this with offsetof for every field of every message. */
static const uint8_t member_size[] = {
	4, 8, 4, sizeof(kv_slice_t), sizeof(kv_slice_t), sizeof(kv_slice_t), KV_KEY_BYTES, sizeof(kv_slice_t)};
static const uint8_t member_align[] = {4, 8, 4, 8, 8, 8, 1, 8};

_Static_assert(_Alignof(kv_slice_t) == 8 && sizeof(kv_slice_t) == 16, "a slice is a pointer and a length");

/* Offset of a member of this kind at or behind `at`. */
static size_t member_at(kv_field_kind_t kind, size_t at)
{
	return (at + member_align[kind] - 1u) & ~(size_t)(member_align[kind] - 1u);
}

size_t kv_field_offset(const kv_body_t *body, uint32_t index)
{
	size_t at = 0;

	for (uint32_t i = 0; i < index; i++) {
		at = member_at(body->fields[i].kind, at) + member_size[body->fields[i].kind];
	}

	return member_at(body->fields[index].kind, at);
}

kv_status_t kv_frame_check(const kv_frame_header_t *header, uint32_t max_body)
{
	const kv_request_t *request;

	if (header->magic != KV_WIRE_MAGIC) {
		return KV_ERR_PROTO;
	}
	if (header->version != KV_WIRE_VERSION) {
		return KV_ERR_VERSION;
	}
	if (header->kind > KV_FRAME_NOTICE || header->fds > KV_WIRE_MAX_FDS) {
		return KV_ERR_PROTO;
	}
	if (header->kind != KV_FRAME_REPLY && header->status != KV_OK) {
		return KV_ERR_PROTO;
	}
	if (header->body > max_body) {
		return KV_ERR_TOO_BIG;
	}

	request = kv_request_find(header->code);
	if (!request || (request->roles == KV_ROLE_NONE) != (header->kind == KV_FRAME_NOTICE)) {
		return KV_ERR_UNKNOWN_REQUEST;
	}

	return KV_OK;
}

/* ---- encode ---------------------------------------------------------------------------------- */

/* What both directions demand of a value of variable length. KV_ERR_TOO_BIG, or `malformed` when it is not
 * well-formed. */
static kv_status_t check_bytes(const kv_field_t *field, const uint8_t *data, uint32_t len, kv_status_t malformed)
{
	switch (field->kind) {
	case KV_FIELD_STR:
	case KV_FIELD_TEXT:
		if (len > field->limit) {
			return KV_ERR_TOO_BIG;
		}
		return kv_utf8_clean(data, len, field->kind == KV_FIELD_TEXT) ? KV_OK : malformed;
	case KV_FIELD_BIN:
		return len > field->limit ? KV_ERR_TOO_BIG : KV_OK;
	case KV_FIELD_KEYS:
		if (len / KV_KEY_BYTES > field->limit) {
			return KV_ERR_TOO_BIG;
		}
		return len % KV_KEY_BYTES == 0 ? KV_OK : malformed;
	case KV_FIELD_KEY:
		return len == KV_KEY_BYTES ? KV_OK : malformed;
	default:
		return malformed;
	}
}

static kv_status_t put_number(msgpack_packer *packer, const kv_field_t *field, const uint8_t *member)
{
	uint64_t wide = 0;
	uint32_t narrow;
	int32_t number;

	if (field->kind == KV_FIELD_I32) {
		memcpy(&number, member, sizeof number);
		msgpack_pack_int64(packer, number);
		return field->limit && number > (int64_t)field->limit ? KV_ERR_TOO_BIG : KV_OK;
	}

	if (field->kind == KV_FIELD_U64) {
		memcpy(&wide, member, sizeof wide);
	} else {
		memcpy(&narrow, member, sizeof narrow);
		wide = narrow;
	}
	msgpack_pack_uint64(packer, wide);

	return field->limit && wide > field->limit ? KV_ERR_TOO_BIG : KV_OK;
}

static kv_status_t put_slice(msgpack_packer *packer, const kv_field_t *field, const uint8_t *member)
{
	kv_status_t status;
	kv_slice_t slice;

	memcpy(&slice, member, sizeof slice);
	if (slice.len > 0 && !slice.data) {
		return KV_ERR_ARG;
	}
	status = check_bytes(field, slice.data, slice.len, KV_ERR_ARG);
	if (status != KV_OK) {
		return status;
	}
	if (field->kind == KV_FIELD_STR || field->kind == KV_FIELD_TEXT) {
		msgpack_pack_str_with_body(packer, slice.data, slice.len);
	} else {
		msgpack_pack_bin_with_body(packer, slice.data, slice.len);
	}

	return KV_OK;
}

kv_status_t kv_body_encode(const kv_body_t *body, const void *msg, uint8_t *out, size_t cap, uint32_t *p_len)
{
	kv_mp_writer_t w = {out, cap < UINT32_MAX ? cap : UINT32_MAX, 0};
	msgpack_packer packer = kv_mp_packer(&w);
	size_t at = 0;

	msgpack_pack_array(&packer, body->count);
	for (uint32_t i = 0; i < body->count; i++) {
		const kv_field_t *field = &body->fields[i];
		const uint8_t *member;
		kv_status_t status = KV_OK;

		at = member_at(field->kind, at);
		member = (const uint8_t *)msg + at;
		if (field->kind <= KV_FIELD_I32) {
			status = put_number(&packer, field, member);
		} else if (field->kind == KV_FIELD_KEY) {
			msgpack_pack_bin_with_body(&packer, member, KV_KEY_BYTES);
		} else {
			status = put_slice(&packer, field, member);
		}
		if (status != KV_OK) {
			return status;
		}
		at += member_size[field->kind];
	}

	if (w.len > w.cap) {
		return KV_ERR_TOO_BIG;
	}
	*p_len = (uint32_t)w.len;

	return KV_OK;
}

size_t kv_body_size(const kv_body_t *body, const void *msg)
{
	size_t total = MP_HEAD_BYTES, at = 0;

	for (uint32_t i = 0; i < body->count; i++) {
		kv_field_kind_t kind = body->fields[i].kind;
		kv_slice_t slice;

		at = member_at(kind, at);
		if (kind <= KV_FIELD_I32) {
			total += MP_INT_BYTES;
		} else if (kind == KV_FIELD_KEY) {
			total += MP_HEAD_BYTES + KV_KEY_BYTES;
		} else {
			memcpy(&slice, (const uint8_t *)msg + at, sizeof slice);
			total += MP_HEAD_BYTES + slice.len;
		}
		at += member_size[kind];
	}

	return total;
}

/* ---- decode ---------------------------------------------------------------------------------- */

static kv_status_t check_number(const kv_field_t *field, const kv_mp_item_t *item)
{
	/* Any width is taken, since not every library writes the shortest: the value decides. */
	uint64_t most = field->kind == KV_FIELD_U64 ? UINT64_MAX : field->kind == KV_FIELD_U32 ? UINT32_MAX : INT32_MAX;

	if (item->type == KV_MP_INT) {
		return field->kind == KV_FIELD_I32 && item->negative >= INT32_MIN ? KV_OK : KV_ERR_PROTO;
	}
	if (item->type != KV_MP_UINT || item->value > most) {
		return KV_ERR_PROTO;
	}

	return field->limit && item->value > field->limit ? KV_ERR_TOO_BIG : KV_OK;
}

static kv_status_t check_item(const kv_field_t *field, const kv_mp_item_t *item)
{
	int is_text = field->kind == KV_FIELD_STR || field->kind == KV_FIELD_TEXT;

	if (field->kind <= KV_FIELD_I32) {
		return check_number(field, item);
	}
	if (item->type != (is_text ? KV_MP_STR : KV_MP_BIN)) {
		return KV_ERR_PROTO;
	}

	return check_bytes(field, item->data, item->len, KV_ERR_PROTO);
}

static void store_item(kv_field_kind_t kind, const kv_mp_item_t *item, uint8_t *member)
{
	kv_slice_t slice = {item->data, item->len};
	uint32_t narrow = item->type == KV_MP_INT ? (uint32_t)item->negative : (uint32_t)item->value;

	switch (kind) {
	case KV_FIELD_U32:
	case KV_FIELD_I32:
		memcpy(member, &narrow, sizeof narrow);
		break;
	case KV_FIELD_U64:
		memcpy(member, &item->value, sizeof item->value);
		break;
	case KV_FIELD_KEY:
		memcpy(member, item->data, KV_KEY_BYTES);
		break;
	default:
		memcpy(member, &slice, sizeof slice);
		break;
	}
}

static void store_items(const kv_body_t *body, const kv_mp_item_t *items, uint8_t *msg)
{
	size_t at = 0;

	for (uint32_t i = 0; i < body->count; i++) {
		kv_field_kind_t kind = body->fields[i].kind;

		at = member_at(kind, at);
		store_item(kind, &items[i], msg + at);
		at += member_size[kind];
	}
}

/* A sound array of another length is what another build sends. */
static kv_status_t other_count(kv_mp_reader_t *reader, uint64_t count)
{
	kv_mp_item_t item;

	while (count > 0 && kv_mp_next(reader, &item) == KV_OK) {
		count--;
	}

	return count == 0 && reader->at == reader->end ? KV_ERR_VERSION : KV_ERR_PROTO;
}

kv_status_t kv_body_decode(const kv_body_t *body, const uint8_t *data, uint32_t len, void *msg,
			   const kv_field_t **p_bad)
{
	kv_mp_reader_t reader = {data, len > 0 ? data + len : data}; /* nothing may be NULL */
	kv_mp_item_t items[KV_WIRE_MAX_FIELDS];
	kv_mp_item_t array;

	if (p_bad) {
		*p_bad = NULL;
	}
	if (body->count > KV_WIRE_MAX_FIELDS) {
		return KV_ERR_ARG;
	}
	if (len == 0 || kv_mp_next(&reader, &array) != KV_OK || array.type != KV_MP_ARRAY) {
		return KV_ERR_PROTO;
	}
	if (array.len != body->count) {
		return other_count(&reader, array.len);
	}

	/* Everything is checked before the first field is stored, so that msg is whole or untouched. */
	for (uint32_t i = 0; i < body->count; i++) {
		kv_status_t status = kv_mp_next(&reader, &items[i]);

		if (status == KV_OK) {
			status = check_item(&body->fields[i], &items[i]);
		}
		if (status != KV_OK) {
			if (p_bad) {
				*p_bad = &body->fields[i];
			}
			return status;
		}
	}
	if (reader.at != reader.end) {
		return KV_ERR_PROTO;
	}
	store_items(body, items, msg);

	return KV_OK;
}

/* ---- error bodies ---------------------------------------------------------------------------- */

static const kv_field_t error_field = {
	.kind = KV_FIELD_STR, .name = "detail", .limit = ERROR_MAX_BYTES, .help = "what was wrong"};
static const kv_body_t error_body = {&error_field, 1};

kv_status_t kv_error_encode(const char *detail, uint8_t *out, size_t cap, uint32_t *p_len)
{
	const uint8_t *from = (const uint8_t *)detail;
	size_t len = strlen(detail), at = 0;
	uint8_t clean[ERROR_MAX_BYTES];
	kv_slice_t slice;

	/* A detail may quote what a client sent: what could not be decoded on the other side becomes '?'. */
	for (slice.len = 0; at < len;) {
		unsigned n = kv_utf8_next(from + at, len - at, NULL);

		if (slice.len + (n ? n : 1) > sizeof clean) {
			break;
		}
		if (n == 0 || !kv_utf8_clean(from + at, n, 0)) {
			clean[slice.len++] = '?';
		} else {
			memcpy(clean + slice.len, from + at, n);
			slice.len += n;
		}
		at += n ? n : 1;
	}
	slice.data = clean;

	return kv_body_encode(&error_body, &slice, out, cap, p_len);
}

kv_status_t kv_error_decode(const uint8_t *data, uint32_t len, kv_slice_t *p_detail)
{
	return kv_body_decode(&error_body, data, len, p_detail, NULL);
}
