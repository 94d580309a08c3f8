/* MessagePack without allocation. */
#include "kv/mp.h"

#include <endian.h>
#include <string.h>

/* ---- reader ---------------------------------------------------------------------------------- */

/* What follows a type byte: `size` bytes of a number that is the value, or a length, or a count. */
typedef enum form { BAD, NIL, FALSE_, TRUE_, UNSIGNED, SIGNED, FLOAT, STR, BIN, EXT, FIXEXT, ARRAY, MAP } form_t;

typedef struct shape {
	uint8_t form;
	uint8_t size;
} shape_t;

/* Type bytes 0xc0 to 0xdf; the others hold their value or count themselves. */
static const shape_t shapes[32] = {
	{NIL, 0},     {BAD, 0},    {FALSE_, 0}, {TRUE_, 0},  {BIN, 1},      {BIN, 2},      {BIN, 4},      {EXT, 1},
	{EXT, 2},     {EXT, 4},    {FLOAT, 4},  {FLOAT, 8},  {UNSIGNED, 1}, {UNSIGNED, 2}, {UNSIGNED, 4}, {UNSIGNED, 8},
	{SIGNED, 1},  {SIGNED, 2}, {SIGNED, 4}, {SIGNED, 8}, {FIXEXT, 1},   {FIXEXT, 2},   {FIXEXT, 4},   {FIXEXT, 8},
	{FIXEXT, 16}, {STR, 1},    {STR, 2},    {STR, 4},    {ARRAY, 2},    {ARRAY, 4},    {MAP, 2},      {MAP, 4},
};

static uint64_t read_big(const uint8_t *at, unsigned n)
{
	uint64_t value = 0;

	for (unsigned i = 0; i < n; i++) {
		value = value << 8 | at[i];
	}

	return value;
}

static void set_signed(kv_mp_item_t *item, uint64_t raw, unsigned bytes)
{
	unsigned shift = (64u - 8u * bytes) & 63u;
	int64_t value = (int64_t)(raw << shift) >> shift;

	item->type = value < 0 ? KV_MP_INT : KV_MP_UINT;
	item->value = value < 0 ? 0 : (uint64_t)value;
	item->negative = value < 0 ? value : 0;
}

static void set_float(kv_mp_item_t *item, uint64_t raw, unsigned bytes)
{
	item->type = KV_MP_FLOAT;
	item->value = raw;
	if (bytes == 4) {
		uint32_t bits = (uint32_t)raw;
		double wide;
		float narrow;

		memcpy(&narrow, &bits, sizeof narrow);
		wide = (double)narrow;
		memcpy(&item->value, &wide, sizeof wide);
	}
}

/* `extra`: bytes that belong to the item beside its len (the type byte of an extension). */
static kv_status_t set_bytes(kv_mp_reader_t *r, kv_mp_item_t *item, kv_mp_type_t type, uint64_t len, unsigned extra)
{
	if ((uint64_t)(r->end - r->at) < len + extra) {
		return KV_ERR_PROTO;
	}
	item->type = type;
	item->len = (uint32_t)len;
	item->data = r->at + extra;
	r->at += len + extra;

	return KV_OK;
}

/* A count of things each at least one byte long (a pair: two). */
static kv_status_t set_count(const kv_mp_reader_t *r, kv_mp_item_t *item, kv_mp_type_t type, uint64_t count)
{
	/* A header of five bytes can claim 4 G elements: it is believed only as far as bytes are left (decision 002).
	 */
	uint64_t least = type == KV_MP_MAP ? 2 * count : count;

	if ((uint64_t)(r->end - r->at) < least) {
		return KV_ERR_PROTO;
	}
	item->type = type;
	item->len = (uint32_t)count;

	return KV_OK;
}

static kv_status_t read_shaped(kv_mp_reader_t *r, kv_mp_item_t *item, shape_t shape)
{
	unsigned size = shape.form == FIXEXT ? 0 : shape.size;
	uint64_t number;

	if ((size_t)(r->end - r->at) < size) {
		return KV_ERR_PROTO;
	}
	number = read_big(r->at, size);
	r->at += size;

	switch ((form_t)shape.form) {
	case NIL:
		item->type = KV_MP_NIL;
		return KV_OK;
	case FALSE_:
	case TRUE_:
		item->type = KV_MP_BOOL;
		item->value = shape.form == TRUE_;
		return KV_OK;
	case UNSIGNED:
		item->type = KV_MP_UINT;
		item->value = number;
		return KV_OK;
	case SIGNED:
		set_signed(item, number, size);
		return KV_OK;
	case FLOAT:
		set_float(item, number, size);
		return KV_OK;
	case STR:
		return set_bytes(r, item, KV_MP_STR, number, 0);
	case BIN:
		return set_bytes(r, item, KV_MP_BIN, number, 0);
	case EXT:
		return set_bytes(r, item, KV_MP_EXT, number, 1);
	case FIXEXT:
		return set_bytes(r, item, KV_MP_EXT, shape.size, 1);
	case ARRAY:
		return set_count(r, item, KV_MP_ARRAY, number);
	case MAP:
		return set_count(r, item, KV_MP_MAP, number);
	case BAD:
		break;
	}

	return KV_ERR_PROTO;
}

kv_status_t kv_mp_next(kv_mp_reader_t *reader, kv_mp_item_t *item)
{
	/* Copies: on failure neither the reader nor the item has changed. */
	kv_mp_reader_t r = *reader;
	kv_mp_item_t got = {0};
	kv_status_t status = KV_OK;
	uint8_t type;

	if (r.at == r.end) {
		return KV_ERR_PROTO;
	}
	type = *r.at++;

	if (type < 0x80) {
		got.type = KV_MP_UINT;
		got.value = type;
	} else if (type >= 0xe0) {
		set_signed(&got, type, 1);
	} else if (type >= 0xc0) {
		status = read_shaped(&r, &got, shapes[type - 0xc0]);
	} else if (type >= 0xa0) {
		status = set_bytes(&r, &got, KV_MP_STR, type & 0x1fu, 0);
	} else if (type >= 0x90) {
		status = set_count(&r, &got, KV_MP_ARRAY, type & 0x0fu);
	} else {
		status = set_count(&r, &got, KV_MP_MAP, type & 0x0fu);
	}
	if (status == KV_OK) {
		*reader = r;
		*item = got;
	}

	return status;
}

kv_status_t kv_mp_skip(kv_mp_reader_t *reader, unsigned max_depth)
{
	/* Elements left at each depth: a stack of fixed size, where recursion would let the sender choose ours. */
	uint64_t left[KV_MP_MAX_DEPTH + 1] = {1};
	kv_mp_reader_t r = *reader;
	unsigned depth = 0;

	if (max_depth > KV_MP_MAX_DEPTH) {
		max_depth = KV_MP_MAX_DEPTH;
	}
	while (depth > 0 || left[0] > 0) {
		kv_mp_item_t item;
		kv_status_t status = kv_mp_next(&r, &item);

		if (status != KV_OK) {
			return status;
		}
		left[depth]--;
		if (item.type == KV_MP_ARRAY || item.type == KV_MP_MAP) {
			if (depth == max_depth) {
				return KV_ERR_PROTO;
			}
			left[++depth] = item.type == KV_MP_MAP ? 2 * (uint64_t)item.len : item.len;
		}
		while (depth > 0 && left[depth] == 0) {
			depth--;
		}
	}
	*reader = r;

	return KV_OK;
}
