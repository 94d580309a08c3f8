/* The ledger, as its one writer sees it. The order of stores is the point: see kvs/ledger.h. */
#include "ledger.h"

#include "geometry.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL)

/* A claim for every 16 KiB of pool, within reason. */
#define CLAIM_SHARE     16384u
#define MIN_CLAIMS      256u
#define MAX_CLAIMS      65536u
#define SMALLEST_STRIDE 4096u

static uint64_t page_up(uint64_t n)
{
	return (n + KVS_LEDGER_PAGE - 1u) / KVS_LEDGER_PAGE * KVS_LEDGER_PAGE;
}

static uint32_t claims_cap(uint64_t limit_bytes)
{
	uint32_t cap = MIN_CLAIMS;

	while (cap < MAX_CLAIMS && (uint64_t)cap * 2u * CLAIM_SHARE <= limit_bytes) {
		cap *= 2u;
	}

	return cap;
}

uint64_t kvs_ledger_fixed_bytes(uint64_t limit_bytes)
{
	return KVS_LEDGER_PAGE + page_up(claims_cap(limit_bytes) * sizeof(kvs_ledger_claim_t));
}

/* Most slabs are whole; each class may have a few that are not. Where places run out, a slab has to go before another
 * comes. */
#define SPARE_PLACES 256u

static uint32_t places_for(const kvs_ledger_size_t *size)
{
	uint64_t places = 2u * (size->limit_bytes / size->slab_bytes) + SPARE_PLACES;
	uint64_t most = size->limit_bytes / SMALLEST_STRIDE;

	places = places < most ? places : most;
	places = places < KV_SLOT_MAX_SLAB + 1u ? places : KV_SLOT_MAX_SLAB + 1u;

	return places ? (uint32_t)places : 1u;
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
	uint64_t fixed = kvs_ledger_fixed_bytes(size->limit_bytes), stride = stride_for(size);
	uint32_t places = places_for(size);
	uint64_t bytes = fixed + places * stride;
	uint64_t *touched = kv_alloc(env, places * sizeof *touched);
	kvs_area_t area;
	int error = touched ? kvs_area_create(sys, "kvd-ledger", bytes, 0, SEALS, &area) : -ENOMEM;

	if (error) {
		kv_free(env, touched);
		return error;
	}

	kvs_ledger_header_t *header = (kvs_ledger_header_t *)area.base;

	header->version = KVS_LEDGER_VERSION;
	header->slot_record_bytes = sizeof(kvs_ledger_slot_t);
	header->incarnation = size->incarnation;
	header->total_bytes = bytes;
	header->limit_bytes = size->limit_bytes;
	header->claims_offset = KVS_LEDGER_PAGE;
	header->slabs_offset = fixed;
	header->claims_cap = claims_cap(size->limit_bytes);
	header->chunk_stride = stride;
	atomic_signal_fence(memory_order_seq_cst);
	header->magic = KVS_LEDGER_MAGIC;
	*ledger = (kvs_ledger_t){
		.area = area,
		.header = header,
		.claims = (kvs_ledger_claim_t *)(area.base + header->claims_offset),
		.places = places,
		.touched = touched,
		.charged_bytes = fixed,
	};

	return 0;
}

void kvs_ledger_destroy(kvs_ledger_t *ledger, const kv_env_t *env)
{
	kvs_area_destroy(&ledger->area);
	kv_free(env, ledger->touched);
	ledger->touched = NULL;
}

static kvs_ledger_slab_t *chunk_at(const kvs_ledger_t *ledger, uint32_t number)
{
	const kvs_ledger_header_t *header = ledger->header;

	kv_assert(number < ledger->places);

	return (kvs_ledger_slab_t *)(ledger->area.base + header->slabs_offset + number * header->chunk_stride);
}

uint64_t kvs_ledger_cost(const kvs_ledger_t *ledger, uint32_t number, uint64_t slots)
{
	uint64_t chunk = kvs_ledger_chunk_bytes(slots);

	return chunk > ledger->touched[number] ? chunk - ledger->touched[number] : 0;
}

kvs_ledger_slot_t *kvs_ledger_add(kvs_ledger_t *ledger, const kvs_slab_t *slab, uint32_t slot_class, const char *ns)
{
	uint64_t chunk = kvs_ledger_chunk_bytes(slab->slots);
	uint32_t count = atomic_load_explicit(&ledger->header->slab_count, memory_order_relaxed);
	kvs_ledger_slab_t *head = chunk_at(ledger, slab->number);

	kv_assert(chunk <= ledger->header->chunk_stride && slab->number <= count &&
		  atomic_load_explicit(&head->slots, memory_order_relaxed) == 0);
	ledger->charged_bytes += kvs_ledger_cost(ledger, slab->number, slab->slots);
	ledger->touched[slab->number] += kvs_ledger_cost(ledger, slab->number, slab->slots);
	head->number = slab->number;
	head->stride = slab->stride;
	head->slot_class = slot_class;
	head->geometry = slab->geometry;
	head->huge = (uint32_t)slab->huge;
	head->data_bytes = slab->data.bytes;
	head->digest_bytes = slab->digest.bytes;
	head->chunk_bytes = chunk;
	snprintf(head->ns, sizeof head->ns, "%s", ns);
	atomic_store_explicit(&head->slots, slab->slots, memory_order_release);
	if (slab->number == count) {
		atomic_store_explicit(&ledger->header->slab_count, count + 1u, memory_order_release);
	}

	return (kvs_ledger_slot_t *)(head + 1);
}

void kvs_ledger_remove(kvs_ledger_t *ledger, uint32_t number)
{
	atomic_store_explicit(&chunk_at(ledger, number)->slots, 0, memory_order_release);
}

/* The first store of every change. The fence keeps the compiler from moving the fields before it; a killed process has
 * executed a prefix of its program, so nothing stronger is needed. */
static void begin(kvs_ledger_slot_t *slot)
{
	atomic_store_explicit(&slot->state, KVS_QUARANTINED, memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst);
}

static void end(kvs_ledger_slot_t *slot, kvs_state_t state)
{
	atomic_store_explicit(&slot->state, (uint32_t)state, memory_order_release);
}

uint32_t kvs_ledger_take(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t owner, uint32_t length,
			 const kvs_meta_t *meta)
{
	uint32_t gen = slot->gen + 1u;

	begin(slot);
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
	end(slot, state);

	return slot->gen;
}

void kvs_ledger_move(kvs_ledger_slot_t *slot, kvs_state_t state, uint64_t digest)
{
	begin(slot);
	slot->digest = digest;
	if (state == KVS_READY || state == KVS_FREE) {
		slot->owner = 0;
	}
	end(slot, state);
}

/* Where id lies, or the empty place where it would. The table is never full. */
static uint32_t find(const kvs_ledger_t *ledger, uint64_t id)
{
	uint32_t cap = ledger->header->claims_cap;
	uint32_t at = kvs_ledger_home(id, cap);

	for (;;) {
		uint64_t found = atomic_load_explicit(&ledger->claims[at].id, memory_order_relaxed);

		if (found == id || found == 0) {
			return at;
		}
		at = (at + 1u) & (cap - 1u);
	}
}

static void clear(kvs_ledger_claim_t *claim)
{
	atomic_store_explicit(&claim->id, 0, memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst);
}

kv_status_t kvs_ledger_claim(kvs_ledger_t *ledger, const kvs_claim_t *claim)
{
	uint32_t cap = ledger->header->claims_cap;

	if (claim->id == 0) {
		return KV_ERR_ARG;
	}

	kvs_ledger_claim_t *place = &ledger->claims[find(ledger, claim->id)];

	if (atomic_load_explicit(&place->id, memory_order_relaxed) == 0) {
		if (ledger->claim_count >= cap / 8u * 7u) {
			return KV_ERR_LIMIT;
		}
		ledger->claim_count++;
	}

	clear(place);
	place->instance = claim->instance;
	place->expiry_ns = claim->expiry_ns;
	place->key = claim->deepest_key;
	place->slot = claim->deepest.slot;
	place->gen = claim->deepest.gen;
	place->space = claim->space;
	place->n = claim->n;
	place->skip = claim->skip;
	place->kind = claim->kind;
	place->group = claim->group;
	atomic_store_explicit(&place->id, claim->id, memory_order_release);

	return KV_OK;
}

static void copy_claim(kvs_ledger_claim_t *to, const kvs_ledger_claim_t *from)
{
	size_t skip = offsetof(kvs_ledger_claim_t, instance);

	memcpy((uint8_t *)to + skip, (const uint8_t *)from + skip, sizeof *to - skip);
	atomic_store_explicit(&to->id, atomic_load_explicit(&from->id, memory_order_relaxed), memory_order_release);
}

void kvs_ledger_unclaim(kvs_ledger_t *ledger, uint64_t id)
{
	uint32_t mask = ledger->header->claims_cap - 1u;
	uint32_t hole = find(ledger, id);

	if (id == 0 || atomic_load_explicit(&ledger->claims[hole].id, memory_order_relaxed) == 0) {
		return;
	}

	/* Close the gap: whoever could have lain in the hole moves there, copied before it is cleared. */
	clear(&ledger->claims[hole]);
	for (uint32_t at = (hole + 1u) & mask;; at = (at + 1u) & mask) {
		uint64_t other = atomic_load_explicit(&ledger->claims[at].id, memory_order_relaxed);

		if (other == 0) {
			break;
		}
		if (((at - kvs_ledger_home(other, mask + 1u)) & mask) >= ((at - hole) & mask)) {
			copy_claim(&ledger->claims[hole], &ledger->claims[at]);
			clear(&ledger->claims[at]);
			hole = at;
		}
	}
	ledger->claim_count--;
}
