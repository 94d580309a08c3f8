/* The ledger: what a later process may rely on. */
#include "pool_test.h"

#include "cpu/slab/ledger.h"
#include "cpu/pool.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

/* A pool with blocks in every state, and two records. */
static void sample_pool(void)
{
	static const kvs_state_t states[] = {KVS_PUT, KVS_READY, KVS_TRANSIT, KVS_QUARANTINED, KVS_FREE};
	kvs_record_t record = {.id = 40, .instance = 2, .n = 3, .kind = 2};
	kvs_loc_t loc;

	pool_set_up(512u << 10, 100000);
	pool_open();
	assert_int_equal(kvs_class_open(pool_, "tenant", &plain, &class_), KV_OK);
	for (uint64_t i = 0; i < 20; i++) {
		kvs_meta_t meta = meta_of(i);

		assert_int_equal(kvs_alloc(pool_, class_, KVS_PUT, 40, &meta, &loc), KV_OK);
		if (states[i % 5] == KVS_FREE) {
			kvs_free(pool_, loc);
		} else if (states[i % 5] != KVS_PUT) {
			assert_int_equal(kvs_set_state(pool_, loc, states[i % 5]), KV_OK);
		}
	}
	record.deepest = loc;
	assert_int_equal(kvs_pool_add_record(pool_, &record), KV_OK);
	record = (kvs_record_t){.id = 41, .instance = 2, .n = 3, .kind = 1, .deepest = {KV_SLOT_NONE, 0}};
	assert_int_equal(kvs_pool_add_record(pool_, &record), KV_OK);
}

POOL_TEST(p2_a_reader_finds_what_the_daemon_wrote, sample_pool())
{
	kvs_pool_t *pool = kvs_pool_of(pool_);
	const kvs_shm_t *area = &pool->ledger.area;
	kvs_ledger_summary_t sum;
	char detail[256] = "";
	void *copy = mmap(NULL, area->bytes, PROT_READ, MAP_SHARED, area->fd, 0);

	assert_true(copy != MAP_FAILED);
	if (kvs_ledger_check(copy, area->bytes, &sum, detail, sizeof detail) != KV_OK) {
		fail_msg("%s", detail);
	}
	assert_int_equal(sum.incarnation, 7);
	assert_int_equal(sum.slabs, pool->slab_count);
	assert_int_equal(sum.slots, pool->usage.slots);
	assert_int_equal(sum.by_state[KVS_FREE], pool->usage.free_slots);
	assert_int_equal(sum.by_state[KVS_QUARANTINED], pool->usage.quarantined_slots);
	assert_int_equal(sum.by_state[KVS_READY], 4);
	assert_int_equal(sum.used_bytes, pool->usage.used_bytes);
	assert_int_equal(sum.records, 2);

	const kvs_ledger_slab_t *slab = kvs_ledger_slab(copy, 0);
	const kvs_ledger_slot_t *slot = &kvs_ledger_slots(slab)[1];
	kvs_meta_t meta = meta_of(1);

	assert_string_equal(slab->ns, "tenant");
	assert_memory_equal(&slab->geometry, &plain, sizeof plain);
	assert_int_equal(atomic_load(&slot->state), KVS_READY);
	assert_memory_equal(&slot->key, &meta.key, sizeof meta.key);
	assert_memory_equal(&slot->parent, &meta.parent, sizeof meta.parent);
	assert_int_equal(slot->event_hash, meta.event_hash);
	assert_int_equal(slot->epoch, meta.epoch);
	assert_int_equal(slot->depth, meta.depth);
	assert_int_equal(slot->owner, 0);
	assert_null(kvs_ledger_slab(copy, sum.slabs));
	munmap(copy, area->bytes);
}

static void refuse(void *copy, uint64_t bytes, kv_status_t want)
{
	kvs_ledger_summary_t sum;
	char detail[256] = "";

	assert_int_equal(kvs_ledger_check(copy, bytes, &sum, detail, sizeof detail), want);
	assert_true(detail[0] != '\0');
	assert_int_equal(kvs_ledger_check(copy, bytes, &sum, NULL, 0), want);
}

#define WITH(field, value, want)                                                                                       \
	do {                                                                                                           \
		memcpy(copy, area->base, area->bytes);                                                                 \
		field = value;                                                                                         \
		refuse(copy, area->bytes, want);                                                                       \
	} while (0)

POOL_TEST(p10_a_ledger_that_contradicts_itself_is_refused, sample_pool())
{
	const kvs_shm_t *area = &kvs_pool_of(pool_)->ledger.area;
	uint8_t *copy = aligned_alloc(4096, area->bytes);
	kvs_ledger_header_t *h = (kvs_ledger_header_t *)copy;
	uint64_t at = kvs_pool_of(pool_)->ledger.header->slabs_offset;
	kvs_ledger_slab_t *slab = (kvs_ledger_slab_t *)(copy + at);
	kvs_ledger_slot_t *ready = (kvs_ledger_slot_t *)(slab + 1) + 1;
	kvs_ledger_record_t *record = NULL;

	assert_non_null(copy);
	memcpy(copy, area->base, area->bytes);
	for (uint32_t i = 0; i < h->records_cap; i++) {
		kvs_ledger_record_t *c = (kvs_ledger_record_t *)(copy + h->records_offset) + i;

		record = c->id == 40 ? c : record;
	}
	WITH(h->magic, 1, KV_ERR_FOREIGN);
	WITH(h->version, 1, KV_ERR_FOREIGN);
	WITH(h->slot_record_bytes, 64, KV_ERR_FOREIGN);
	WITH(h->total_bytes, area->bytes - 1, KV_ERR_CORRUPT);
	WITH(h->incarnation, 0, KV_ERR_CORRUPT);
	WITH(h->records_cap, 0, KV_ERR_CORRUPT);
	WITH(h->records_cap, 255, KV_ERR_CORRUPT);
	WITH(h->records_cap, 1u << 31, KV_ERR_CORRUPT);
	WITH(h->records_offset, 8192, KV_ERR_CORRUPT);
	WITH(h->slabs_offset, 4096, KV_ERR_CORRUPT);
	WITH(h->slabs_offset, at + 8, KV_ERR_CORRUPT);
	WITH(h->slabs_offset, area->bytes, KV_ERR_CORRUPT);
	WITH(h->slabs_offset, UINT64_MAX - 4095, KV_ERR_CORRUPT);
	WITH(h->slab_count, KVS_POOL_MAX_SLABS + 1, KV_ERR_CORRUPT);
	WITH(h->slab_count, KVS_POOL_MAX_SLABS, KV_ERR_CORRUPT);
	WITH(h->slab_count, 0, KV_ERR_CORRUPT); /* the record's slot is gone */
	WITH(slab->number, 1, KV_ERR_CORRUPT);
	WITH(h->chunk_stride, 0, KV_ERR_CORRUPT);
	WITH(h->chunk_stride, 4097, KV_ERR_CORRUPT);
	WITH(h->chunk_stride, UINT64_MAX - 4095, KV_ERR_CORRUPT);
	WITH(slab->slots, UINT32_MAX, KV_ERR_CORRUPT);
	WITH(slab->chunk_bytes, 0, KV_ERR_CORRUPT);
	WITH(slab->chunk_bytes, UINT64_MAX, KV_ERR_CORRUPT);
	WITH(slab->stride, 4096, KV_ERR_CORRUPT);
	WITH(slab->geometry.leaves, 4, KV_ERR_CORRUPT);
	WITH(slab->data_bytes, 4096, KV_ERR_CORRUPT);
	WITH(slab->digest_bytes, 8, KV_ERR_CORRUPT);
	WITH(slab->ns[0], '\0', KV_ERR_CORRUPT);
	WITH(ready->state, 6, KV_ERR_CORRUPT);
	WITH(ready->gen, 0, KV_ERR_CORRUPT);
	WITH(ready->length, 1, KV_ERR_CORRUPT);
	WITH(ready->depth, 0, KV_ERR_CORRUPT);
	WITH(record->kind, 3, KV_ERR_CORRUPT);
	WITH(record->slot, kv_slot_make(4000, 0), KV_ERR_CORRUPT);
	memset(slab->ns, 'x', sizeof slab->ns);
	refuse(copy, area->bytes, KV_ERR_CORRUPT);
	refuse(copy, 100, KV_ERR_FOREIGN);
	refuse(copy, 0, KV_ERR_FOREIGN);
	free(copy);
}

POOL_TEST(p5_ledger_records_are_exact_and_bounded, pool_set_up(1u << 20, 64u << 10))
{
	enum { IDS = 400 };
	static uint32_t n_of[IDS + 1]; /* 0: not there */
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t count = 0, refused = 0;
	kvs_ledger_summary_t sum;

	pool_open();
	const kvs_ledger_t *ledger = &kvs_pool_of(pool_)->ledger;

	for (uint32_t i = 0; i < 20000; i++) {
		uint64_t id = kv_test_below(&rng, IDS) + 1;
		kvs_record_t record = {
			.id = id, .instance = id * 7, .n = i + 1, .kind = 1, .deepest = {KV_SLOT_NONE, 0}};

		/* Phases of growth and of shrinking. */
		if (kv_test_below(&rng, 8) < (i / 2000 % 2 ? 3u : 6u)) {
			kv_status_t status = kvs_pool_add_record(pool_, &record);

			assert_int_equal(status, n_of[id] || count < 224 ? KV_OK : KV_ERR_LIMIT);
			refused += status != KV_OK;
			if (status == KV_OK) {
				count += n_of[id] == 0;
				n_of[id] = i + 1;
			}
		} else {
			kvs_pool_remove_record(pool_, id);
			count -= n_of[id] != 0;
			n_of[id] = 0;
		}
		if (i % 50 == 0) {
			assert_int_equal(kvs_ledger_check(ledger->area.base, ledger->area.bytes, &sum, NULL, 0), KV_OK);
			assert_int_equal(sum.records, count);
		}
	}
	assert_true(refused > 0);
	for (uint32_t i = 0; i < ledger->header->records_cap; i++) {
		const kvs_ledger_record_t *c = &ledger->records[i];

		if (c->id) {
			assert_int_equal(c->n, n_of[c->id]);
			assert_int_equal(c->instance, c->id * 7);
		}
	}
	assert_int_equal(kvs_pool_add_record(pool_, &(kvs_record_t){.kind = 1}), KV_ERR_ARG);
	kvs_pool_remove_record(pool_, 0);
}

/* Changes slots for ever; every field of a slot follows from its owner. */
static void churn(kvs_ledger_slot_t *slots, uint32_t n)
{
	for (uint64_t i = 1;; i++) {
		kvs_meta_t meta = meta_of(i);

		meta.depth = 1;
		memset(&meta.parent, 0, sizeof meta.parent);
		kvs_ledger_assign_slot(&slots[i % n], KVS_TRANSIT, i, 12288, &meta);
		if (i % 3 == 0) {
			kvs_ledger_set_state(&slots[i % n], KVS_FREE, 0);
		}
	}
}

KV_TEST(p3_a_daemon_killed_in_a_change_leaves_nothing_half_written)
{
	enum { SLOTS = 4, KILLS = 150 };
	kvs_ledger_slot_t *slots =
		mmap(NULL, SLOTS * sizeof *slots, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t whole = 0;

	assert_true(slots != MAP_FAILED);
	for (uint32_t kill_number = 0; kill_number < KILLS; kill_number++) {
		pid_t pid = fork();

		assert_true(pid >= 0);
		if (pid == 0) {
			churn(slots, SLOTS);
		}
		usleep((useconds_t)kv_test_below(&rng, 2000) + 500);
		kill(pid, SIGKILL);
		assert_int_equal(waitpid(pid, NULL, 0), pid);
		for (uint32_t i = 0; i < SLOTS; i++) {
			kvs_meta_t meta = meta_of(slots[i].owner);

			if (kvs_ledger_state(&slots[i]) == KVS_TRANSIT) {
				assert_memory_equal(&slots[i].key, &meta.key, sizeof meta.key);
				assert_int_equal(slots[i].event_hash, meta.event_hash);
				assert_int_equal(slots[i].epoch, meta.epoch);
				whole++;
			}
		}
	}
	assert_true(whole > KILLS);
	munmap(slots, SLOTS * sizeof *slots);
}
