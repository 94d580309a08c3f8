/* Slot headers: see slothdr.h. */
#include "slothdr.h"

#include "kv/digest.h"

#define SLOTHDR_MAGIC 0x31544f4c5344564bull /* "KVDSLOT1" */

/* On disk, byte for byte; kvd serves little-endian machines only. */
typedef struct raw_header {
	uint64_t magic;
	uint64_t check; /* XXH3-64 of all header bytes, this field as 0 */
	uint32_t version;
	uint32_t bytes;
	uint8_t key[16];
	uint8_t parent[16];
	uint8_t root[32];
	uint64_t epoch;
	uint64_t event_hash;
	uint64_t incarnation;
	uint64_t digest;
	uint32_t slot_class;
	uint32_t slot;
	uint32_t gen;
	uint32_t depth;
	uint32_t length;
	uint32_t heads;
	uint32_t leaves;
	uint32_t group; /* and, above its eight bits, the space's withdrawals when the slot was given out */
} raw_header_t;

_Static_assert(sizeof(raw_header_t) == 152, "the fixed part of a slot header is 152 bytes");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "on-disk structs are written as they lie in memory");

uint32_t kvs_slothdr_bytes(const kvs_geometry_t *geometry)
{
	uint64_t leaves = (uint64_t)geometry->heads * geometry->leaves;
	uint64_t bytes = kvs_page_up(sizeof(raw_header_t) + leaves * sizeof(uint64_t));

	return leaves <= KVS_SLOTHDR_MAX && bytes <= KVS_SLOTHDR_MAX ? (uint32_t)bytes : 0;
}

/* `bytes` is a multiple of 8 and `header` 8-aligned, as page buffers are. */
static uint64_t header_check(void *header, uint32_t bytes)
{
	raw_header_t *raw = header;
	uint64_t kept = raw->check;
	uint64_t check;

	raw->check = 0;
	check = kv_digest(header, bytes);
	raw->check = kept;

	return check;
}

void kvs_slothdr_encode(void *out, const kvs_geometry_t *geometry, const kvs_slothdr_t *header, const uint64_t *leaves)
{
	uint32_t bytes = kvs_slothdr_bytes(geometry);
	size_t leaf_bytes = (size_t)geometry->heads * geometry->leaves * sizeof(uint64_t);
	raw_header_t raw = {
		.magic = SLOTHDR_MAGIC,
		.version = KVS_SLOTHDR_VERSION,
		.bytes = bytes,
		.epoch = header->meta.epoch,
		.event_hash = header->meta.event_hash,
		.incarnation = header->incarnation,
		.digest = header->digest,
		.slot_class = header->slot_class,
		.slot = header->slot,
		.gen = header->gen,
		.depth = header->meta.depth,
		.length = header->length,
		.heads = geometry->heads,
		.leaves = geometry->leaves,
		.group = header->meta.group | header->meta.withdrawals << 8,
	};

	memcpy(raw.key, header->meta.key.b, sizeof raw.key);
	memcpy(raw.parent, header->meta.parent.b, sizeof raw.parent);
	memcpy(raw.root, header->meta.root, sizeof raw.root);
	memcpy(out, &raw, sizeof raw);
	memcpy((uint8_t *)out + sizeof raw, leaves, leaf_bytes);
	memset((uint8_t *)out + sizeof raw + leaf_bytes, 0, bytes - sizeof raw - leaf_bytes);
	((raw_header_t *)out)->check = header_check(out, bytes);
}

kv_status_t kvs_slothdr_decode(void *in, size_t n, const kvs_geometry_t *geometry, kvs_slothdr_t *p_header,
			       const uint64_t **p_leaves)
{
	uint32_t bytes = kvs_slothdr_bytes(geometry);
	raw_header_t raw;

	if (n < sizeof raw || bytes == 0 || n < bytes) {
		return KV_ERR_CORRUPT;
	}

	memcpy(&raw, in, sizeof raw);
	if (raw.magic == 0 && raw.check == 0 && raw.bytes == 0) {
		return KV_MISS;
	}
	if (raw.magic == SLOTHDR_MAGIC && raw.version != KVS_SLOTHDR_VERSION) {
		return KV_ERR_VERSION;
	}
	if (raw.magic != SLOTHDR_MAGIC || raw.bytes != bytes || header_check(in, bytes) != raw.check) {
		return KV_ERR_CORRUPT;
	}
	if (raw.heads != geometry->heads || raw.leaves != geometry->leaves || raw.length != geometry->block_bytes) {
		return KV_ERR_CORRUPT;
	}

	*p_header = (kvs_slothdr_t){
		.meta = {.epoch = raw.epoch,
			 .event_hash = raw.event_hash,
			 .depth = raw.depth,
			 .group = (uint8_t)raw.group,
			 .withdrawals = raw.group >> 8},
		.incarnation = raw.incarnation,
		.digest = raw.digest,
		.slot_class = raw.slot_class,
		.slot = raw.slot,
		.gen = raw.gen,
		.length = raw.length,
	};
	memcpy(p_header->meta.key.b, raw.key, sizeof raw.key);
	memcpy(p_header->meta.parent.b, raw.parent, sizeof raw.parent);
	memcpy(p_header->meta.root, raw.root, sizeof raw.root);
	if (p_leaves) {
		*p_leaves = (const uint64_t *)((const uint8_t *)in + sizeof raw);
	}

	return KV_OK;
}
