/* Compare our MessagePack reader with msgpack-c's unpacker: shared by a test and a fuzzer. */
#ifndef MP_COMPARE_H
#define MP_COMPARE_H

#include "kv/mp.h"

#include <msgpack.h>
#include <string.h>

/* Walk `object` and the reader together; 1 when both say the same. */
static int mp_same(kv_mp_reader_t *reader, const msgpack_object *object);

static int mp_same_bytes(const kv_mp_item_t *item, const char *data, uint32_t len)
{
	return item->len == len && (len == 0 || memcmp(item->data, data, len) == 0);
}

static int mp_same_inside(kv_mp_reader_t *reader, const msgpack_object *object)
{
	if (object->type == MSGPACK_OBJECT_ARRAY) {
		for (uint32_t i = 0; i < object->via.array.size; i++) {
			if (!mp_same(reader, &object->via.array.ptr[i])) {
				return 0;
			}
		}
		return 1;
	}
	for (uint32_t i = 0; i < object->via.map.size; i++) {
		if (!mp_same(reader, &object->via.map.ptr[i].key) || !mp_same(reader, &object->via.map.ptr[i].val)) {
			return 0;
		}
	}

	return 1;
}

static int mp_same(kv_mp_reader_t *reader, const msgpack_object *object)
{
	kv_mp_item_t item;

	if (kv_mp_next(reader, &item) != KV_OK) {
		return 0;
	}
	switch (object->type) {
	case MSGPACK_OBJECT_NIL:
		return item.type == KV_MP_NIL;
	case MSGPACK_OBJECT_BOOLEAN:
		return item.type == KV_MP_BOOL && item.value == object->via.boolean;
	case MSGPACK_OBJECT_POSITIVE_INTEGER:
		return item.type == KV_MP_UINT && item.value == object->via.u64;
	case MSGPACK_OBJECT_NEGATIVE_INTEGER:
		return item.type == KV_MP_INT && item.negative == object->via.i64;
	case MSGPACK_OBJECT_FLOAT32:
	case MSGPACK_OBJECT_FLOAT64:
		/* A narrow signalling NaN becomes a quiet one on some paths: any NaN equals any other. */
		return item.type == KV_MP_FLOAT && (object->via.f64 != object->via.f64 ||
						    memcmp(&item.value, &object->via.f64, sizeof item.value) == 0);
	case MSGPACK_OBJECT_STR:
		return item.type == KV_MP_STR && mp_same_bytes(&item, object->via.str.ptr, object->via.str.size);
	case MSGPACK_OBJECT_BIN:
		return item.type == KV_MP_BIN && mp_same_bytes(&item, object->via.bin.ptr, object->via.bin.size);
	case MSGPACK_OBJECT_EXT:
		return item.type == KV_MP_EXT && mp_same_bytes(&item, object->via.ext.ptr, object->via.ext.size);
	case MSGPACK_OBJECT_ARRAY:
		return item.type == KV_MP_ARRAY && item.len == object->via.array.size && mp_same_inside(reader, object);
	case MSGPACK_OBJECT_MAP:
		return item.type == KV_MP_MAP && item.len == object->via.map.size && mp_same_inside(reader, object);
	}

	return 0;
}

static unsigned mp_depth(const msgpack_object *object)
{
	unsigned deepest = 0, depth;

	if (object->type == MSGPACK_OBJECT_ARRAY) {
		for (uint32_t i = 0; i < object->via.array.size; i++) {
			depth = mp_depth(&object->via.array.ptr[i]);
			deepest = depth > deepest ? depth : deepest;
		}
		return deepest + 1;
	}
	if (object->type == MSGPACK_OBJECT_MAP) {
		for (uint32_t i = 0; i < object->via.map.size; i++) {
			depth = mp_depth(&object->via.map.ptr[i].key);
			deepest = depth > deepest ? depth : deepest;
			depth = mp_depth(&object->via.map.ptr[i].val);
			deepest = depth > deepest ? depth : deepest;
		}
		return deepest + 1;
	}

	return 0;
}

/* 1 when both accept the object at the start of data with the same contents and length, or both refuse it (we also
 * refuse what nests deeper than KV_MP_MAX_DEPTH). msgpack-c allocates what a 32-bit array or map header claims, so it
 * is asked about bytes that we refuse only when there is no such header in them. */
static int mp_compare(const uint8_t *data, size_t len)
{
	kv_mp_reader_t walk = {data, data + len}, read = walk;
	kv_status_t ours = kv_mp_skip(&walk, KV_MP_MAX_DEPTH);
	msgpack_unpack_return theirs;
	msgpack_unpacked unpacked;
	size_t offset = 0;
	int same;

	if (ours != KV_OK && (len == 0 || memchr(data, 0xdd, len) || memchr(data, 0xdf, len))) {
		return 1;
	}
	msgpack_unpacked_init(&unpacked);
	theirs = msgpack_unpack_next(&unpacked, (const char *)data, len, &offset);
	if (theirs != MSGPACK_UNPACK_SUCCESS) {
		same = ours != KV_OK;
	} else if (ours != KV_OK) {
		same = mp_depth(&unpacked.data) > KV_MP_MAX_DEPTH;
	} else {
		same = offset == (size_t)(walk.at - data) && mp_same(&read, &unpacked.data) && read.at == walk.at;
	}
	msgpack_unpacked_destroy(&unpacked);

	return same;
}

#endif
