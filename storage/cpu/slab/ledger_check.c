/* Reading a ledger that anybody may have written. */
#include "kvs/ledger.h"

#include "geometry.h"

#include "kv/digest.h"

#include <stdarg.h>
#include <stdio.h>

typedef struct reader {
	const uint8_t *base;
	uint64_t bytes;
	const kvs_ledger_header_t *header;
	kvs_ledger_summary_t sum;
	char *detail;
	size_t cap;
} reader_t;

__attribute__((format(printf, 3, 4))) static kv_status_t report(const reader_t *r, kv_status_t status,
								const char *format, ...)
{
	va_list args;

	if (r->detail && r->cap > 0) {
		va_start(args, format);
		vsnprintf(r->detail, r->cap, format, args);
		va_end(args);
	}

	return status;
}

static int is_page_multiple(uint64_t n)
{
	return n % KVS_LEDGER_PAGE == 0;
}

kv_status_t kvs_ledger_check_format(const kvs_ledger_header_t *h, char *detail, size_t cap)
{
	const reader_t r = {.detail = detail, .cap = cap};

	if (h->magic != KVS_LEDGER_MAGIC) {
		return report(&r, KV_ERR_FOREIGN, "not a ledger");
	}
	if (h->version != KVS_LEDGER_VERSION || h->slot_record_bytes != sizeof(kvs_ledger_slot_t)) {
		return report(&r, KV_ERR_FOREIGN, "ledger version %u with records of %u bytes", h->version,
			      h->slot_record_bytes);
	}

	return KV_OK;
}

static kv_status_t check_header(reader_t *r)
{
	const kvs_ledger_header_t *h = r->header;
	kv_status_t status;

	if (r->bytes < KVS_LEDGER_PAGE) {
		return report(r, KV_ERR_FOREIGN, "not a ledger");
	}
	status = kvs_ledger_check_format(h, r->detail, r->cap);
	if (status != KV_OK) {
		return status;
	}
	if (h->total_bytes != r->bytes) {
		return report(r, KV_ERR_CORRUPT, "the header says %llu bytes, there are %llu",
			      (unsigned long long)h->total_bytes, (unsigned long long)r->bytes);
	}
	if (h->incarnation == 0 || h->records_cap == 0 || (h->records_cap & (h->records_cap - 1u)) != 0) {
		return report(r, KV_ERR_CORRUPT, "no incarnation, or a record table of %u entries", h->records_cap);
	}
	/* Each term is bounded by the one before it, so that none can wrap. */
	if (h->records_offset != KVS_LEDGER_PAGE || h->slabs_offset > r->bytes || !is_page_multiple(h->slabs_offset) ||
	    h->epochs_offset > h->slabs_offset || !is_page_multiple(h->epochs_offset) ||
	    h->epochs_offset < h->records_offset ||
	    (h->epochs_offset - h->records_offset) / sizeof(kvs_ledger_record_t) < h->records_cap ||
	    (h->slabs_offset - h->epochs_offset) / sizeof(kvs_ledger_epoch_t) < h->epochs_cap) {
		return report(r, KV_ERR_CORRUPT, "the tables of records and epochs do not fit before the slabs");
	}
	if (atomic_load_explicit(&h->slab_count, memory_order_acquire) > KV_SLOT_MAX_SLAB + 1u) {
		return report(r, KV_ERR_CORRUPT, "more slabs than slot numbers allow");
	}
	if (h->chunk_stride == 0 || !is_page_multiple(h->chunk_stride) ||
	    (r->bytes - h->slabs_offset) / h->chunk_stride <
		    atomic_load_explicit(&h->slab_count, memory_order_acquire)) {
		return report(r, KV_ERR_CORRUPT, "%u chunks of %llu bytes do not fit",
			      atomic_load_explicit(&h->slab_count, memory_order_acquire),
			      (unsigned long long)h->chunk_stride);
	}

	return KV_OK;
}

static kv_status_t check_slot(reader_t *r, const kvs_ledger_slab_t *slab, uint32_t index)
{
	const kvs_ledger_slot_t *slot = &kvs_ledger_slots(slab)[index];
	uint32_t state = atomic_load_explicit(&slot->state, memory_order_acquire);

	if (state > KVS_QUARANTINED) {
		return report(r, KV_ERR_CORRUPT, "slab %u slot %u is in state %u", slab->number, index, state);
	}
	r->sum.by_state[state]++;
	if (state == KVS_FREE || state == KVS_QUARANTINED) {
		return KV_OK; /* nobody may rely on the fields */
	}

	r->sum.used_bytes += slab->stride;
	if (slot->gen == 0 || slot->length != slab->geometry.block_bytes) {
		return report(r, KV_ERR_CORRUPT, "slab %u slot %u has generation %u and length %u", slab->number, index,
			      slot->gen, slot->length);
	}
	if (slot->depth == 0 || (slot->depth == 1) != kv_key_is_zero(&slot->parent)) {
		return report(r, KV_ERR_CORRUPT, "slab %u slot %u has depth %u but its parent says otherwise",
			      slab->number, index, slot->depth);
	}

	return KV_OK;
}

static kv_status_t check_slab_head(reader_t *r, const kvs_ledger_slab_t *slab, uint32_t number)
{
	uint32_t slots = atomic_load_explicit(&slab->slots, memory_order_acquire);

	if (slab->number != number || slots > KV_SLOT_MAX_INDEX + 1u) {
		return report(r, KV_ERR_CORRUPT, "slab %u calls itself %u and has %u slots", number, slab->number,
			      slots);
	}
	if (slab->chunk_bytes != kvs_ledger_chunk_bytes(slots) || slab->chunk_bytes > r->header->chunk_stride) {
		return report(r, KV_ERR_CORRUPT, "the records of slab %u leave its chunk", number);
	}
	if (kvs_geometry_check(&slab->geometry) != KV_OK || slab->stride != kvs_geometry_stride(&slab->geometry)) {
		return report(r, KV_ERR_CORRUPT, "slab %u has an impossible geometry", number);
	}
	if (slab->data_bytes / slots < slab->stride ||
	    slab->digest_bytes / slots < kvs_geometry_digest_bytes(&slab->geometry)) {
		return report(r, KV_ERR_CORRUPT, "slab %u is too small for its slots", number);
	}
	if (memchr(slab->ns, '\0', sizeof slab->ns) == NULL || slab->ns[0] == '\0') {
		return report(r, KV_ERR_CORRUPT, "slab %u has no namespace", number);
	}

	return KV_OK;
}

static kv_status_t check_slabs(reader_t *r)
{
	uint32_t count = atomic_load_explicit(&r->header->slab_count, memory_order_acquire);

	for (uint32_t number = 0; number < count; number++) {
		const kvs_ledger_slab_t *slab = kvs_ledger_slab(r->base, number);
		kv_status_t status = slab ? check_slab_head(r, slab, number) : KV_OK;
		uint32_t slots = slab && status == KV_OK ? atomic_load(&slab->slots) : 0;

		for (uint32_t i = 0; i < slots && status == KV_OK; i++) {
			status = check_slot(r, slab, i);
		}
		if (status != KV_OK) {
			return status;
		}
		r->sum.slots += slots;
		r->sum.slabs += slab ? 1 : 0;
	}

	return KV_OK;
}

static kv_status_t check_records(reader_t *r)
{
	const kvs_ledger_record_t *records = (const kvs_ledger_record_t *)(r->base + r->header->records_offset);

	for (uint32_t i = 0; i < r->header->records_cap; i++) {
		const kvs_ledger_record_t *record = &records[i];
		uint64_t id = atomic_load_explicit(&record->id, memory_order_acquire);

		if (id == 0) {
			continue;
		}
		r->sum.records++;
		if (record->kind != 1 && record->kind != 2) {
			return report(r, KV_ERR_CORRUPT, "record %llu is of kind %u", (unsigned long long)id,
				      record->kind);
		}
		if (record->slot == KV_SLOT_NONE) {
			continue;
		}

		/* A put may name a slot of a slab that has gone since: its block went before. */
		if (kv_slot_slab(record->slot) >= atomic_load(&r->header->slab_count)) {
			return report(r, KV_ERR_CORRUPT, "record %llu names slot %u, which never was",
				      (unsigned long long)id, record->slot);
		}
	}

	return KV_OK;
}

kv_status_t kvs_ledger_check(const void *base, uint64_t bytes, kvs_ledger_summary_t *p_summary, char *detail,
			     size_t cap)
{
	reader_t r = {.base = base, .bytes = bytes, .header = base, .detail = detail, .cap = cap};
	kv_status_t status = check_header(&r);

	if (status == KV_OK) {
		status = check_slabs(&r);
	}
	if (status == KV_OK) {
		status = check_records(&r);
	}
	if (status != KV_OK) {
		return status;
	}

	r.sum.incarnation = r.header->incarnation;
	*p_summary = r.sum;

	return KV_OK;
}

uint64_t kvs_ledger_slot_check(const kvs_ledger_slot_t *slot)
{
	const size_t from = offsetof(kvs_ledger_slot_t, gen);

	return kv_digest((const uint8_t *)slot + from, offsetof(kvs_ledger_slot_t, check) - from);
}

uint64_t kvs_ledger_find_epoch(const void *base, const uint8_t root[32])
{
	const kvs_ledger_header_t *header = base;
	const kvs_ledger_epoch_t *entry = (const kvs_ledger_epoch_t *)((const uint8_t *)base + header->epochs_offset);

	for (uint32_t i = 0; i < header->epochs_cap; i++) {
		uint64_t epoch = atomic_load_explicit(&entry[i].epoch, memory_order_acquire);

		/* 0 may be one that was forgotten: others follow. */
		if (epoch != 0 && memcmp(entry[i].root, root, sizeof entry->root) == 0) {
			return epoch;
		}
	}

	return 0;
}

const kvs_ledger_slab_t *kvs_ledger_slab(const void *base, uint32_t slab)
{
	const kvs_ledger_header_t *header = base;
	const kvs_ledger_slab_t *chunk;

	if (slab >= atomic_load_explicit(&header->slab_count, memory_order_acquire)) {
		return NULL;
	}
	chunk = (const kvs_ledger_slab_t *)((const uint8_t *)base + header->slabs_offset + slab * header->chunk_stride);

	return atomic_load_explicit(&chunk->slots, memory_order_acquire) > 0 ? chunk : NULL;
}
