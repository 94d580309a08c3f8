/* Random messages for any body of the request table, and the same bytes by msgpack-c. */
#ifndef WIRE_BUILD_H
#define WIRE_BUILD_H

#include "kv_test.h"

#include "kv/wire.h"

#include <msgpack.h>

#define WIRE_ROOM (1u << 17) /* bytes a random message draws its strings from */

/* Sizes that matter: empty, around the msgpack forms, and the limit itself while it is small. */
static inline uint32_t wire_len(kv_test_rng_t *rng, uint32_t limit)
{
	static const uint32_t lens[] = {0, 1, 15, 16, 31, 32, 33, 255, 256, 257, 4096};
	uint32_t len = lens[kv_test_below(rng, KV_COUNT_OF(lens))];

	return len < limit ? len : limit < 8192 ? limit : 8192;
}

static inline uint64_t wire_number(kv_test_rng_t *rng, const kv_field_t *field)
{
	uint64_t value = kv_test_rand(rng) >> kv_test_below(rng, 64);

	if (field->limit && value > field->limit) {
		value = kv_test_below(rng, 2) ? field->limit : value % field->limit;
	}

	return value;
}

/* Fill *msg with values the table allows; strings lie in `room` (WIRE_ROOM bytes of clean text). */
static inline void wire_random(kv_test_rng_t *rng, const kv_body_t *body, uint8_t *msg, const uint8_t *room)
{
	for (uint32_t i = 0; i < body->count; i++) {
		const kv_field_t *field = &body->fields[i];
		uint8_t *member = msg + kv_field_offset(body, i);
		kv_slice_t slice = {room + kv_test_below(rng, 64), 0};
		uint64_t wide = wire_number(rng, field);
		uint32_t narrow = (uint32_t)wide;

		switch (field->kind) {
		case KV_FIELD_U32:
		case KV_FIELD_I32:
			memcpy(member, &narrow, sizeof narrow);
			break;
		case KV_FIELD_U64:
			memcpy(member, &wide, sizeof wide);
			break;
		case KV_FIELD_KEY:
			kv_test_fill(rng, member, KV_KEY_BYTES);
			break;
		case KV_FIELD_KEYS:
			slice.len = KV_KEY_BYTES * (wire_len(rng, 16 * field->limit) / 16);
			memcpy(member, &slice, sizeof slice);
			break;
		default:
			slice.len = wire_len(rng, field->limit);
			memcpy(member, &slice, sizeof slice);
			break;
		}
	}
}

static inline void wire_pack_field(msgpack_packer *packer, const kv_field_t *field, const uint8_t *member)
{
	kv_slice_t slice;
	uint64_t wide;
	uint32_t narrow;
	int32_t number;

	switch (field->kind) {
	case KV_FIELD_U32:
		memcpy(&narrow, member, sizeof narrow);
		msgpack_pack_uint32(packer, narrow);
		break;
	case KV_FIELD_I32:
		memcpy(&number, member, sizeof number);
		msgpack_pack_int32(packer, number);
		break;
	case KV_FIELD_U64:
		memcpy(&wide, member, sizeof wide);
		msgpack_pack_uint64(packer, wide);
		break;
	case KV_FIELD_KEY:
		msgpack_pack_bin_with_body(packer, member, KV_KEY_BYTES);
		break;
	case KV_FIELD_STR:
	case KV_FIELD_TEXT:
		memcpy(&slice, member, sizeof slice);
		msgpack_pack_str_with_body(packer, slice.data, slice.len);
		break;
	default:
		memcpy(&slice, member, sizeof slice);
		msgpack_pack_bin_with_body(packer, slice.data, slice.len);
		break;
	}
}

/* The body as msgpack-c writes it. */
static inline void wire_pack(const kv_body_t *body, const uint8_t *msg, msgpack_sbuffer *out)
{
	msgpack_packer packer;

	msgpack_sbuffer_clear(out);
	msgpack_packer_init(&packer, out, msgpack_sbuffer_write);
	msgpack_pack_array(&packer, body->count);
	for (uint32_t i = 0; i < body->count; i++) {
		wire_pack_field(&packer, &body->fields[i], msg + kv_field_offset(body, i));
	}
}

/* 1 when both messages say the same, strings by their bytes. */
static inline int wire_equal(const kv_body_t *body, const uint8_t *a, const uint8_t *b)
{
	for (uint32_t i = 0; i < body->count; i++) {
		static const size_t plain[] = {4, 8, 4, 0, 0, 0, KV_KEY_BYTES, 0};
		size_t at = kv_field_offset(body, i), n = plain[body->fields[i].kind];
		kv_slice_t x, y;

		if (n > 0) {
			if (memcmp(a + at, b + at, n) != 0) {
				return 0;
			}
			continue;
		}
		memcpy(&x, a + at, sizeof x);
		memcpy(&y, b + at, sizeof y);
		if (x.len != y.len || (x.len > 0 && memcmp(x.data, y.data, x.len) != 0)) {
			return 0;
		}
	}

	return 1;
}

#endif
