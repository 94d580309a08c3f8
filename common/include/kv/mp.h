/* kv/mp.h -- MessagePack, the part our formats use, without allocation: a bounded reader, and
 * memory for the packer of msgpack-c.
 *
 * The reader never believes a header: a length must fit into the bytes left, a count must not exceed them (each element
 * takes at least one byte), nesting is limited. What it returns is borrowed from the input. Why not a library:
 * docs/decisions/002-msgpack.md.
 */
#ifndef KV_MP_H
#define KV_MP_H

#include "kv/status.h"

#include <msgpack/pack.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define KV_MP_MAX_DEPTH 8u

/* ---- writer: the packer of msgpack-c --------------------------------------------------------- */

/* Memory that the packer writes to. Everything is counted, what does not fit is left out; `len > cap` at the end says
 * that it did not fit. The functions of the packer are inline: no library is linked. */

typedef struct kv_mp_writer {
	uint8_t *out;
	size_t cap;
	size_t len;
} kv_mp_writer_t;

static inline int kv_mp_write(void *writer, const char *data, size_t n)
{
	kv_mp_writer_t *w = (kv_mp_writer_t *)writer;

	if (w->len <= w->cap && n <= w->cap - w->len && n > 0) {
		memcpy(w->out + w->len, data, n);
	}
	w->len += n;

	return 0;
}

/* For msgpack_pack_*(), whose answers need no look. */
static inline msgpack_packer kv_mp_packer(kv_mp_writer_t *w)
{
	return (msgpack_packer){.data = w, .callback = kv_mp_write};
}

/* ---- reader ---------------------------------------------------------------------------------- */

typedef enum kv_mp_type {
	KV_MP_NIL,
	KV_MP_BOOL,
	KV_MP_UINT, /* an integer that is not negative, however it was written */
	KV_MP_INT,  /* a negative integer */
	KV_MP_FLOAT,
	KV_MP_STR,
	KV_MP_BIN,
	KV_MP_EXT,
	KV_MP_ARRAY,
	KV_MP_MAP,
} kv_mp_type_t;

typedef struct kv_mp_item {
	kv_mp_type_t type;
	uint32_t len;        /* STR, BIN, EXT: bytes; ARRAY: elements; MAP: pairs */
	const uint8_t *data; /* STR, BIN, EXT (behind the type byte) */
	uint64_t value;      /* UINT; BOOL: 0 or 1; FLOAT: the bits of a double */
	int64_t negative;    /* INT */
} kv_mp_item_t;

typedef struct kv_mp_reader {
	const uint8_t *at;
	const uint8_t *end;
} kv_mp_reader_t;

/* Next item; of an array or map only its header. KV_ERR_PROTO: cut short, a count over the bytes left, or the byte
 * 0xc1. The reader and *item change on success only. */
kv_status_t kv_mp_next(kv_mp_reader_t *reader, kv_mp_item_t *item);

/* Walk one whole object with everything inside. KV_ERR_PROTO also when it nests deeper than max_depth (a scalar has
 * depth 0), or than KV_MP_MAX_DEPTH. The reader stands behind the object on success and has not moved otherwise. */
kv_status_t kv_mp_skip(kv_mp_reader_t *reader, unsigned max_depth);

#endif
