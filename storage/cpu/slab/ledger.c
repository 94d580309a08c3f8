/* The ledger, as its one writer sees it. The order of stores is the point: see kvs/ledger.h. */
#include "ledger.h"

#include "geometry.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

/* A record for every 16 KiB of pool, within reason. */
#define RECORD_SHARE    16384u
#define MIN_RECORDS     256u
#define MAX_RECORDS     65536u
#define SMALLEST_STRIDE 4096u

static uint64_t page_up(uint64_t n)
{
	return (n + KVS_LEDGER_PAGE - 1u) / KVS_LEDGER_PAGE * KVS_LEDGER_PAGE;
}

static uint32_t records_cap(uint64_t limit_bytes)
{
	uint32_t cap = MIN_RECORDS;

	while (cap < MAX_RECORDS && (uint64_t)cap * 2u * RECORD_SHARE <= limit_bytes) {
		cap *= 2u;
	}

	return cap;
}

uint64_t kvs_ledger_fixed_bytes(uint64_t limit_bytes)
{
	return KVS_LEDGER_PAGE + page_up(records_cap(limit_bytes) * sizeof(kvs_ledger_record_t));
}

/* Most slabs are whole; each class may have a few that are not. Where chunks run out, a slab has to go before another
 * comes. */
#define SPARE_CHUNKS 256u

static uint32_t chunks_for(const kvs_ledger_size_t *size)
{
	uint64_t chunks = 2u * (size->limit_bytes / size->slab_bytes) + SPARE_CHUNKS;
	uint64_t most = size->limit_bytes / SMALLEST_STRIDE;

	chunks = chunks < most ? chunks : most;
	most = size->max_slabs ? size->max_slabs : KV_SLOT_MAX_SLAB + 1u;
	chunks = chunks < most ? chunks : most;

	return chunks ? (uint32_t)chunks : 1u;
}

/* A slot is at least one page of data. */
static uint64_t stride_for(const kvs_ledger_size_t *size)
{
	uint64_t slots = size->slab_bytes / SMALLEST_STRIDE;
	uint64_t most = size->limit_bytes / SMALLEST_STRIDE;

	slots = slots < most ? slots : most;
	slots = slots < KV_SLOT_MAX_INDEX + 1u ? slots : KV_SLOT_MAX_INDEX + 1u;

	return kvs_ledger_chunk_bytes(slots ? slots : 1u);
}

int kvs_ledger_create(kvs_ledger_t *ledger, const kvs_sys_t *sys, const kv_env_t *env, const kvs_ledger_size_t *size)
{
	uint64_t epochs_offset = kvs_ledger_fixed_bytes(size->limit_bytes), stride = stride_for(size);
	uint64_t fixed = epochs_offset + page_up(size->epochs * sizeof(kvs_ledger_epoch_t));
	uint32_t chunks = chunks_for(size);
	uint64_t bytes = fixed + chunks * stride;
	uint64_t *touched = kv_alloc(env, chunks * sizeof *touched);
	kvs_shm_t area;
	int error = touched ? kvs_shm_create(sys, "kvd-ledger", bytes, 0, SEALS, &area) : -ENOMEM;

	if (error) {
		kv_free(env, touched);
		return error;
	}

	error = kvs_shm_populate(sys, area.base, fixed);
	if (error) {
		kvs_shm_destroy(&area);
		kv_free(env, touched);
		return error;
	}

	kvs_ledger_header_t *header = (kvs_ledger_header_t *)area.base;

	header->version = KVS_LEDGER_VERSION;
	header->slot_record_bytes = sizeof(kvs_ledger_slot_t);
	header->incarnation = size->incarnation;
	header->total_bytes = bytes;
	header->limit_bytes = size->limit_bytes;
	header->records_offset = KVS_LEDGER_PAGE;
	header->slabs_offset = fixed;
	header->records_cap = records_cap(size->limit_bytes);
	header->chunk_stride = stride;
	header->epochs_offset = epochs_offset;
	header->epochs_cap = size->epochs;
	atomic_signal_fence(memory_order_seq_cst);
	header->magic = KVS_LEDGER_MAGIC;
	*ledger = (kvs_ledger_t){
		.area = area,
		.header = header,
		.records = (kvs_ledger_record_t *)(area.base + header->records_offset),
		.chunks = chunks,
		.touched = touched,
		.charged_bytes = fixed,
	};

	return 0;
}

void kvs_ledger_destroy(kvs_ledger_t *ledger, const kv_env_t *env)
{
	kvs_shm_destroy(&ledger->area);
	kv_free(env, ledger->touched);
	ledger->touched = NULL;
}

static kvs_ledger_slab_t *chunk_at(const kvs_ledger_t *ledger, uint32_t number)
{
	const kvs_ledger_header_t *header = ledger->header;

	kv_assert(number < ledger->chunks);

	return (kvs_ledger_slab_t *)(ledger->area.base + header->slabs_offset + number * header->chunk_stride);
}

kvs_shm_t kvs_ledger_records(const kvs_ledger_t *ledger, uint32_t number, uint64_t slots)
{
	return (kvs_shm_t){
		.base = (uint8_t *)chunk_at(ledger, number), .bytes = kvs_ledger_chunk_bytes(slots), .fd = -1};
}

uint64_t kvs_ledger_slab_cost(const kvs_ledger_t *ledger, uint32_t number, uint64_t slots)
{
	uint64_t chunk = kvs_ledger_chunk_bytes(slots);

	return chunk > ledger->touched[number] ? chunk - ledger->touched[number] : 0;
}

kvs_ledger_slot_t *kvs_ledger_add_slab(kvs_ledger_t *ledger, const kvs_slab_t *slab, uint32_t slot_class,
				       const char *ns)
{
	uint64_t chunk = kvs_ledger_chunk_bytes(slab->slots);
	uint32_t count = atomic_load_explicit(&ledger->header->slab_count, memory_order_relaxed);
	kvs_ledger_slab_t *head = chunk_at(ledger, slab->number);

	kv_assert(chunk <= ledger->header->chunk_stride && slab->number <= count &&
		  atomic_load_explicit(&head->slots, memory_order_relaxed) == 0);
	ledger->charged_bytes += kvs_ledger_slab_cost(ledger, slab->number, slab->slots);
	ledger->touched[slab->number] += kvs_ledger_slab_cost(ledger, slab->number, slab->slots);
	head->number = slab->number;
	head->stride = slab->stride;
	head->slot_class = slot_class;
	head->geometry = slab->geometry;
	head->huge = (uint32_t)slab->huge;
	head->data_bytes = slab->data.bytes;
	head->digest_bytes = slab->digest.bytes;
	head->chunk_bytes = chunk;
	head->id = slab->id;
	snprintf(head->ns, sizeof head->ns, "%s", ns);
	/* A reader after a crash trusts a chunk only through these two counts, so each is stored after what it admits.
	 */
	atomic_store_explicit(&head->slots, slab->slots, memory_order_release);
	if (slab->number == count) {
		atomic_store_explicit(&ledger->header->slab_count, count + 1u, memory_order_release);
	}

	return (kvs_ledger_slot_t *)(head + 1);
}

void kvs_ledger_remove_slab(kvs_ledger_t *ledger, uint32_t number)
{
	atomic_store_explicit(&chunk_at(ledger, number)->slots, 0, memory_order_release);
}

/* The first store of every change. The fence keeps the compiler from moving the fields before it; a killed process has
 * executed a prefix of its program, so nothing stronger is needed. */
static void begin_change(kvs_ledger_slot_t *slot)
{
	atomic_store_explicit(&slot->state, KVS_QUARANTINED, memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst);
}

static void end_change(kvs_ledger_slot_t *slot, kvs_state_t state)
{
	atomic_store_explicit(&slot->state, (uint32_t)state, memory_order_release);
}

uint32_t kvs_ledger_assign_slot(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t owner, uint32_t length,
				const kvs_meta_t *meta)
{
	uint32_t gen = slot->gen + 1u;

	begin_change(slot);
	slot->gen = gen ? gen : 1u; /* 0 stays "never used" */
	slot->owner = owner;
	slot->key = meta->key;
	slot->parent = meta->parent;
	memcpy(slot->root, meta->root, sizeof slot->root);
	slot->epoch = meta->epoch;
	slot->event_hash = meta->event_hash;
	slot->digest = 0;
	slot->length = length;
	slot->depth = meta->depth;
	slot->group = meta->group;
	slot->transient = meta->transient;
	end_change(slot, state);

	return slot->gen;
}

void kvs_ledger_set_state(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t digest)
{
	begin_change(slot);
	slot->digest = digest;
	if (state == KVS_READY || state == KVS_FREE) {
		slot->owner = 0;
	}
	if (state == KVS_READY) {
		slot->check = kvs_ledger_slot_check(slot);
	}
	end_change(slot, state);
}

void kvs_ledger_set_use(kvs_ledger_slot_t *slot, uint64_t use)
{
	begin_change(slot);
	slot->owner = use;
	slot->check = kvs_ledger_slot_check(slot);
	end_change(slot, KVS_READY);
}

void kvs_ledger_copy_slot(kvs_ledger_slot_t *slot, const kvs_ledger_slot_t *from, kvs_state_t state)
{
	const size_t skip = offsetof(kvs_ledger_slot_t, gen);

	begin_change(slot);
	memcpy((uint8_t *)slot + skip, (const uint8_t *)from + skip, sizeof *slot - skip);
	if (state == KVS_QUARANTINED) {
		slot->owner = KVS_OWNER_BEFORE;
	}
	end_change(slot, state);
}

void kvs_ledger_set_epoch(kvs_ledger_t *ledger, uint32_t i, const uint8_t root[32], uint64_t epoch)
{
	kvs_ledger_epoch_t *entry = (kvs_ledger_epoch_t *)(ledger->area.base + ledger->header->epochs_offset) + i;

	kv_assert(i < ledger->header->epochs_cap);
	if (atomic_load_explicit(&entry->epoch, memory_order_relaxed) == 0) {
		memcpy(entry->root, root, sizeof entry->root);
	}
	atomic_store_explicit(&entry->epoch, epoch, memory_order_release);
}

/* Where id lies, or the empty chunk where it would. The table is never full. */
static uint32_t find_record(const kvs_ledger_t *ledger, uint64_t id)
{
	uint32_t cap = ledger->header->records_cap;
	uint32_t at = kvs_ledger_home(id, cap);

	for (;;) {
		uint64_t found = atomic_load_explicit(&ledger->records[at].id, memory_order_relaxed);

		if (found == id || found == 0) {
			return at;
		}
		at = (at + 1u) & (cap - 1u);
	}
}

static void clear_record(kvs_ledger_record_t *record)
{
	atomic_store_explicit(&record->id, 0, memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst);
}

kv_status_t kvs_ledger_add_record(kvs_ledger_t *ledger, const kvs_record_t *record)
{
	uint32_t cap = ledger->header->records_cap;

	if (record->id == 0) {
		return KV_ERR_ARG;
	}

	kvs_ledger_record_t *entry = &ledger->records[find_record(ledger, record->id)];

	if (atomic_load_explicit(&entry->id, memory_order_relaxed) == 0) {
		if (ledger->record_count >= cap / 8u * 7u) {
			return KV_ERR_LIMIT;
		}
		ledger->record_count++;
	}

	clear_record(entry);
	entry->instance = record->instance;
	entry->expiry_ns = record->expiry_ns;
	entry->key = record->deepest_key;
	entry->slot = record->deepest.slot;
	entry->gen = record->deepest.gen;
	entry->space = record->space;
	entry->n = record->n;
	entry->skip = record->skip;
	entry->kind = record->kind;
	entry->group = record->group;
	atomic_store_explicit(&entry->id, record->id, memory_order_release);

	return KV_OK;
}

static void copy_record(kvs_ledger_record_t *to, const kvs_ledger_record_t *from)
{
	size_t skip = offsetof(kvs_ledger_record_t, instance);

	memcpy((uint8_t *)to + skip, (const uint8_t *)from + skip, sizeof *to - skip);
	atomic_store_explicit(&to->id, atomic_load_explicit(&from->id, memory_order_relaxed), memory_order_release);
}

void kvs_ledger_remove_record(kvs_ledger_t *ledger, uint64_t id)
{
	uint32_t mask = ledger->header->records_cap - 1u;
	uint32_t hole = find_record(ledger, id);

	if (id == 0 || atomic_load_explicit(&ledger->records[hole].id, memory_order_relaxed) == 0) {
		return;
	}

	/* Close the gap: a record whose id may lie in the hole moves there. It is copied before it is cleared, so a
	 * reader after a crash finds it once or twice, never not at all (decision 004). */
	clear_record(&ledger->records[hole]);
	for (uint32_t at = (hole + 1u) & mask;; at = (at + 1u) & mask) {
		uint64_t other = atomic_load_explicit(&ledger->records[at].id, memory_order_relaxed);

		if (other == 0) {
			break;
		}
		if (((at - kvs_ledger_home(other, mask + 1u)) & mask) >= ((at - hole) & mask)) {
			copy_record(&ledger->records[hole], &ledger->records[at]);
			clear_record(&ledger->records[at]);
			hole = at;
		}
	}
	ledger->record_count--;
}
