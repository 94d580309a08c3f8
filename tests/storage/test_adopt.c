/* What a daemon that was killed leaves in memory from elsewhere, and what the next one takes of it. */
#include "adopt_stage.h"

#include "cpu/slab/ledger.h"

static stage_found_t found;

static stage_t s_;
static kvs_loc_t locs_[30];

static void stage_begin(void)
{
	stage_init(&s_);
	pool_ = stage_open(&s_, 4, 7);
}

/* 30 blocks of a space: each fifth is in another state. Then the daemon dies. */
static void live_once(void)
{
	static const kvs_state_t others[] = {KVS_PUT, KVS_TRANSIT, KVS_QUARANTINED, KVS_FREE};
	uint32_t class;

	stage_begin();
	stage_set_epoch(pool_, 1, 9);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	for (uint32_t n = 0; n < 30; n++) {
		const kvs_meta_t meta = stage_meta(1, 9, n);
		const kvs_state_t state = n % 5 == 4 ? others[n / 5 % 4] : KVS_READY;

		assert_int_equal(stage_put(pool_, class, &meta, state, &locs_[n]), KV_OK);
	}
}

static void stage_end(void)
{
	kvs_close(pool_);
	stage_fini(&s_);
}

/* A test between a `begin` and the end of its stage. */
#define STAGE_TEST(name, begin) KV_TEST_BETWEEN(name, begin, stage_end())

/* The daemon dies, and another one takes over what it finds. */
static void next_life(uint32_t slabs, uint64_t incarnation)
{
	kvs_close(pool_);
	pool_ = stage_open(&s_, slabs, incarnation);
	stage_recover(pool_, &found);
}

/* In what a ledger keeps; between the fields is anything. */
static int is_same(const kvs_meta_t *a, const kvs_meta_t *b)
{
	return memcmp(&a->key, &b->key, sizeof a->key) == 0 && memcmp(&a->parent, &b->parent, sizeof a->parent) == 0 &&
	       memcmp(a->root, b->root, sizeof a->root) == 0 && a->epoch == b->epoch &&
	       a->event_hash == b->event_hash && a->depth == b->depth && a->group == b->group;
}

STAGE_TEST(p2_whole_blocks_are_taken_over, live_once())
{
	kvs_usage_t before, usage;

	kvs_usage(pool_, &before);
	for (uint64_t life = 0; life < 3; life++) {
		next_life(4, 8 + life);
		assert_int_equal(found.count, 24);
		assert_int_equal(found.wrong, 0);
		for (uint32_t i = 0; i < found.count; i++) {
			const uint32_t n = stage_number(&found.meta[i]);
			const kvs_meta_t meta = stage_meta(1, 9, n);

			assert_true(n % 5 != 4);
			assert_true(is_same(&found.meta[i], &meta));
			assert_int_equal(found.loc[i].slot, locs_[n].slot);
			assert_int_equal(found.loc[i].gen, locs_[n].gen);
		}
		assert_int_equal(kvs_epoch_get(pool_, found.meta[0].root), 9);
		kvs_usage(pool_, &usage);
		assert_int_equal(usage.slots, before.slots);
		assert_int_equal(usage.charged_bytes, before.charged_bytes);
		assert_int_equal(usage.free_slots, before.free_slots);
		assert_int_equal(usage.used_slots, 24);
		assert_int_equal(usage.quarantined_slots, 5); /* and one was free already */
	}
	assert_int_equal(stage_metric(&s_, KV_M_ADOPTED_BLOCKS), 3 * 24);
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_DROPPED), 0);
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_REFUSED), 0);
	assert_int_equal(s_.taken, 2);
}

typedef struct used {
	uint32_t count;
	kvs_loc_t loc[30];
} used_t;

static void on_used(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	used_t *used = arg;

	(void)key;
	assert_int_equal(group, 0);
	used->loc[used->count++] = loc;
}

/* Lives of a pool: in each some blocks are used, and the next one hears of all in that order. */
STAGE_TEST(p2_the_order_of_use_is_taken_over, live_once())
{
	static const uint32_t last[] = {17, 3, 11}; /* used in this life, in this order */

	for (uint64_t life = 0; life < 3; life++) {
		used_t used = {0};

		for (uint32_t n = 0, stamp = 0; life == 0 && n < 30; n++) {
			kvs_touch(pool_, locs_[n], 30 - stamp++); /* the last block first */
		}
		kvs_touch(pool_, locs_[last[life]], 1000);
		found.refuse = life == 2 ? 21 : 0;
		next_life(4, 8 + life);
		found.refuse = 0;
		while (kvs_recover_use(pool_, 0, on_used, &used, 5) == KV_PENDING) {
		}
		assert_int_equal(used.count, life == 2 ? 23 : 24);
		for (uint64_t i = 0; i <= life; i++) { /* the last ones are those of all lives */
			assert_int_equal(used.loc[used.count - 1 - i].slot, locs_[last[life - i]].slot);
		}
		assert_int_equal(used.loc[0].slot, locs_[28].slot);
		for (uint32_t i = 1; i + life + 1 < used.count; i++) {
			assert_true(used.loc[i].slot < used.loc[i - 1].slot);
		}
		check(pool_);
	}
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_REFUSED), 0);
}

/* Nothing of what was unfinished is given out before its writers are quiet; then all of it is. */
STAGE_TEST(p4_unfinished_slots_are_free_when_their_writers_are_quiet, live_once())
{
	kvs_loc_t loc;
	const kvs_meta_t meta = stage_meta(1, 9, 100);
	kvs_usage_t usage;
	uint32_t class, n = 0;

	found.refuse = 11; /* the core does not take one of them */
	next_life(2, 8);
	found.refuse = 0;
	assert_int_equal(found.count, 23);
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_DROPPED), 1);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	for (; stage_put(pool_, class, &meta, KVS_READY, &loc) == KV_OK; n++) {
		for (uint32_t i = 4; i < 25; i += 5) {
			assert_int_not_equal(loc.slot, i == 19 ? KV_SLOT_NONE : locs_[i].slot);
		}
	}
	kvs_usage(pool_, &usage);
	assert_int_equal(n, 2 * SLOTS - 23 - 5);
	assert_int_equal(usage.quarantined_slots, 5);
	assert_int_equal(kvs_pool_free_before(pool_), 5);
	assert_int_equal(kvs_pool_free_before(pool_), 0);
	check(pool_);
	for (n = 0; stage_put(pool_, class, &meta, KVS_QUARANTINED, &loc) == KV_OK; n++) {
	}
	assert_int_equal(n, 5);
	assert_int_equal(kvs_pool_free_before(pool_), 0); /* those are of this daemon */
}

STAGE_TEST(p1_unfinished_slots_of_unknown_writers_are_never_free, live_once())
{
	kvs_pool_set_unknown_writers(pool_, 2);
	kvs_pool_set_unknown_writers(pool_, 1);
	for (uint64_t life = 0; life < 3; life++) {
		kvs_close(pool_);
		pool_ = stage_open(&s_, 4, 8 + life);
		assert_int_equal(kvs_pool_unknown_before(pool_), 1);
		assert_int_equal(kvs_pool_free_before(pool_), 0);
		kvs_pool_set_unknown_writers(pool_, 3);
		kvs_pool_set_unknown_writers(pool_, 0); /* of this daemon: the keeper has heard of them */
	}
}

STAGE_TEST(p1_old_epochs_and_private_blocks_are_not_taken_over, stage_begin())
{
	kvs_loc_t loc;
	uint32_t class;

	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	stage_set_epoch(pool_, 1, 9);
	stage_set_epoch(pool_, 2, 9);
	for (uint32_t n = 0; n < 4; n++) {
		kvs_meta_t meta = stage_meta(1, 9, n);

		assert_int_equal(stage_put(pool_, class, &meta, KVS_READY, &loc), KV_OK); /* reset */
		meta = stage_meta(2, 9, n);
		assert_int_equal(stage_put(pool_, class, &meta, KVS_READY, &loc), KV_OK); /* the only ones that stay */
		meta = stage_meta(3, 9, n);
		assert_int_equal(stage_put(pool_, class, &meta, KVS_READY, &loc), KV_OK); /* no epoch is known */
		meta = stage_meta(2, 9, 0);
		meta.key.b[14] = (uint8_t)(n + 1u);
		meta.transient = 1;
		assert_int_equal(stage_put(pool_, class, &meta, KVS_READY, &loc), KV_OK);
	}
	stage_set_epoch(pool_, 1, 10);
	next_life(4, 8);
	assert_int_equal(found.count, 4);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(found.meta[i].root[0], 2);
		assert_int_equal(found.meta[i].key.b[14], 0);
	}
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_DROPPED), 12);
	assert_int_equal(kvs_pool_free_before(pool_), 0); /* they were whole: their slots are free at once */
	next_life(4, 9);                                  /* and they do not come back */
	assert_int_equal(found.count, 4);
}

static int is_not_first(void *ctx, const uint8_t root[32])
{
	(void)ctx;

	return root[0] != 2;
}

/* Its place in the ledger is another space's, and those behind it are found all the same. */
STAGE_TEST(p5_a_full_ledger_forgets_the_epochs_of_empty_spaces, stage_begin())
{
	kvs_loc_t loc;
	uint8_t root[32] = {0};
	const kvs_epoch_t e = {.root = root, .ns = "ns", .identity = "", .epoch = 5};
	const kvs_meta_t meta = stage_meta(1, 9, 0);
	outcome_t o = {0, KV_OK};
	uint32_t class, count = 0;

	stage_set_epoch(pool_, 2, 8);
	stage_set_epoch(pool_, 3, 7);
	stage_set_epoch(pool_, 1, 9);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	assert_int_equal(stage_put(pool_, class, &meta, KVS_READY, &loc), KV_OK);
	do {
		memcpy(&root[28], &(uint32_t){++count}, sizeof count);
	} while (kvs_epoch_set(pool_, &e, record_outcome, &o) == KV_OK);
	assert_int_equal(count, KVS_POOL_KEPT_EPOCHS - 2u);
	assert_int_equal(kvs_epochs_drop(pool_, 0, is_not_first, NULL), 1);
	check(pool_);
	next_life(4, 8); /* with the place empty */
	assert_int_equal(found.count, 1);
}

/* The other space has it then. */
STAGE_TEST(p5_the_place_of_a_forgotten_epoch_is_used_again, stage_begin())
{
	uint8_t root[32] = {0};
	const kvs_epoch_t e = {.root = root, .ns = "ns", .identity = "", .epoch = 5};
	outcome_t o = {0, KV_OK};
	uint32_t count = 0;

	stage_set_epoch(pool_, 2, 8);
	do {
		memcpy(&root[28], &(uint32_t){++count}, sizeof count);
	} while (kvs_epoch_set(pool_, &e, record_outcome, &o) == KV_OK);
	assert_int_equal(kvs_epochs_drop(pool_, 0, is_not_first, NULL), 1);
	stage_set_epoch(pool_, 2, 9); /* the same space comes back */
	assert_int_equal(kvs_epoch_set(pool_, &e, record_outcome, &o), KV_ERR_LIMIT);
	assert_int_equal(kvs_epochs_drop(pool_, 0, is_not_first, NULL), 1);
	assert_int_equal(kvs_epoch_set(pool_, &e, record_outcome, &o), KV_OK);
	assert_int_equal(kvs_epoch_get(pool_, root), 5);
	root[0] = 1;
	assert_int_equal(kvs_epoch_set(pool_, &e, record_outcome, &o), KV_ERR_LIMIT);
	memset(root, 2, sizeof root);
	assert_int_equal(kvs_epoch_get(pool_, root), 0);
}

STAGE_TEST(p5_as_many_slabs_are_taken_over_as_there_is_room_for, live_once())
{
	kvs_usage_t usage;

	next_life(1, 8);
	kvs_usage(pool_, &usage);
	assert_int_equal(usage.charged_bytes, SLAB_BYTES);
	assert_int_equal(found.count, 18);
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_REFUSED), 1);
	assert_int_equal(s_.count, 3); /* the keeper holds the other slab no longer */
	kvs_close(pool_);
	s_.slab_bytes = 2 * SLAB_BYTES; /* gpu.slab_size has changed */
	pool_ = stage_open(&s_, 4, 9);
	stage_recover(pool_, &found);
	assert_int_equal(found.count, 0);
	assert_int_equal(kvs_pool_slabs_held(pool_), 0);
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_REFUSED), 2);
	assert_int_equal(s_.count, 1);
}

/* ---- damage ---------------------------------------------------------------------------------- */

/* A copy of what is held under the name is held in its place; `bytes` long if that is not 0. Returns its mapping. */
static uint8_t *replace(stage_t *s, const char *name, uint64_t bytes, int seals, uint64_t *p_bytes)
{
	stage_held_t *held = stage_find(s, name);
	struct stat st;
	uint8_t *from, *to;
	int fd;

	assert_int_equal(fstat(held->fd, &st), 0);
	from = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, held->fd, 0);
	fd = stage_memory(bytes ? bytes : (uint64_t)st.st_size);
	*p_bytes = bytes && bytes < (uint64_t)st.st_size ? bytes : (uint64_t)st.st_size;
	to = mmap(NULL, *p_bytes ? *p_bytes : 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(from != MAP_FAILED && to != MAP_FAILED);
	memcpy(to, from, *p_bytes);
	munmap(from, (size_t)st.st_size);
	if (seals) {
		assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
	}
	close(held->fd);
	held->fd = fd;

	return to;
}

/* A daemon that finds this starts with empty memory, and works. */
static void expect_cold_start(stage_t *s)
{
	const uint64_t refused = stage_metric(s, KV_M_ADOPT_REFUSED);
	kvs_tier_t *pool = stage_open(s, 4, 8);
	const kvs_meta_t meta = stage_meta(1, 9, 0);
	kvs_loc_t loc;
	uint32_t class;

	stage_recover(pool, &found);
	assert_int_equal(found.count, 0);
	assert_true(stage_metric(s, KV_M_ADOPT_REFUSED) > refused);
	assert_int_equal(kvs_pool_slabs_held(pool), 0);
	assert_int_equal(kvs_class_open(pool, "ns", &plain, &class), KV_OK);
	assert_int_equal(stage_put(pool, class, &meta, KVS_READY, &loc), KV_OK);
	check(pool);
	kvs_close(pool);
}

KV_TEST(p10_a_ledger_that_is_damaged_is_a_cold_start)
{
	enum { CUT_0, CUT_HALF, NO_SEAL, FOREIGN, VERSION, LONGER, NOISE, CASES };

	for (int c = 0; c < CASES; c++) {
		kv_test_rng_t rng = {kv_test_seed()};
		uint64_t bytes;
		uint8_t *copy;
		struct stat st;

		live_once();
		kvs_close(pool_);
		assert_int_equal(fstat(stage_find(&s_, "ledger")->fd, &st), 0);
		copy = replace(&s_, "ledger",
			       c == CUT_0      ? 100
			       : c == CUT_HALF ? (uint64_t)st.st_size / 8192 * 4096
					       : 0,
			       c != NO_SEAL, &bytes);
		if (c == FOREIGN) {
			copy[0] ^= 1;
		} else if (c == VERSION) {
			((kvs_ledger_header_t *)copy)->version = 2;
		} else if (c == LONGER) {
			((kvs_ledger_header_t *)copy)->total_bytes += 4096;
		} else if (c == NOISE) {
			kv_test_fill(&rng, copy, bytes);
		}
		expect_cold_start(&s_);
		munmap(copy, bytes);
		stage_fini(&s_);
	}
}

KV_TEST(p10_slabs_without_their_memory_are_left_out)
{
	for (int c = 0; c < 4; c++) {
		uint64_t bytes;

		live_once();
		kvs_close(pool_);
		if (c < 2) {
			stage_drop(&s_, c ? "slab" : "digest");
		} else { /* shorter than the ledger says */
			munmap(replace(&s_, c == 2 ? "slab" : "digest", c == 2 ? 4096 : 64, 1, &bytes), 4096);
		}
		pool_ = stage_open(&s_, 4, 8);
		stage_recover(pool_, &found);
		assert_int_equal(stage_metric(&s_, KV_M_ADOPT_REFUSED), 1);
		assert_int_equal(kvs_pool_slabs_held(pool_), 1);
		assert_true(found.count == 6 || found.count == 18); /* those of the other slab */
		assert_int_equal(found.wrong, 0);
		stage_end();
	}
}

/* A bit of any byte of a record is another one: the block is gone, and no other one is there. */
KV_TEST(p1_a_changed_record_names_no_block)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t cold = 0;

	live_once();
	kvs_close(pool_);
	for (uint32_t byte = 0; byte < sizeof(kvs_ledger_slot_t); byte++) {
		stage_t copy = s_;
		uint64_t bytes;
		uint8_t *ledger;
		uint64_t at;

		memset(copy.held, 0, sizeof copy.held);
		copy.count = 0;
		for (uint32_t i = 0; i < s_.count; i++) {
			stage_hold(&copy, s_.held[i].name, s_.held[i].fd);
		}
		ledger = replace(&copy, "ledger", 0, 1, &bytes);
		at = ((kvs_ledger_header_t *)ledger)->slabs_offset + sizeof(kvs_ledger_slab_t) +
		     3u * sizeof(kvs_ledger_slot_t) + byte;
		ledger[at] = (uint8_t)(ledger[at] ^ 1u << kv_test_below(&rng, 8));
		pool_ = stage_open(&copy, 4, 8);
		stage_recover(pool_, &found);
		cold += found.count == 0;
		assert_true(found.count == 0 || found.count == 23);
		assert_int_equal(found.wrong, 0);
		for (uint32_t i = 0; i < found.count; i++) {
			assert_int_not_equal(stage_number(&found.meta[i]), 3);
		}
		(void)kvs_pool_free_before(pool_);
		check(pool_);
		kvs_close(pool_);
		munmap(ledger, bytes);
		while (copy.count > 0) {
			stage_drop(&copy, copy.held[0].name);
		}
	}
	assert_true(cold < 32); /* state, generation, length and depth contradict the ledger as a whole */
	stage_fini(&s_);
}

STAGE_TEST(p1_a_changed_digest_names_no_block, live_once())
{
	uint64_t bytes;
	uint64_t *table;

	kvs_close(pool_);
	table = (uint64_t *)(void *)replace(&s_, "digest", 0, 1, &bytes);
	table[SLOTS * 6 + 3 * 2 + 1] ^= 1; /* the second root of the fourth slot */
	pool_ = stage_open(&s_, 4, 8);
	stage_recover(pool_, &found);
	assert_int_equal(found.count, 23);
	assert_int_equal(found.wrong, 0);
	assert_int_equal(stage_metric(&s_, KV_M_ADOPT_DROPPED), 1);
	munmap(table, bytes);
}

/* Each allocation fails once: less is taken over, and all sums are right. */
KV_TEST(p5_adoption_without_memory_takes_over_less)
{
	uint32_t failed = 0;

	for (uint64_t nth = 1;; nth++) {
		kv_status_t status;

		live_once();
		kvs_close(pool_);
		kv_test_fail_nth(&s_.env, nth);
		status = stage_try_open(&s_, 4, 8, &pool_);
		if (status == KV_OK) {
			stage_recover(pool_, &found);
			assert_int_equal(found.wrong, 0);
			(void)kvs_pool_free_before(pool_);
			check(pool_);
			kvs_close(pool_);
		}
		/* What is left out is counted: whole blocks, or all that a ledger or a slab has. */
		if (status == KV_OK && stage_metric(&s_, KV_M_ADOPT_REFUSED) == 0) {
			assert_int_equal(found.count + stage_metric(&s_, KV_M_ADOPT_DROPPED), 24);
		}
		assert_true(status != KV_OK || found.count == 24 || stage_metric(&s_, KV_M_ADOPT_DROPPED) > 0 ||
			    stage_metric(&s_, KV_M_ADOPT_REFUSED) > 0);
		failed += status != KV_OK || found.count < 24;
		kv_test_fail_nth(&s_.env, 0);
		stage_fini(&s_);
		if (status == KV_OK && found.count == 24) {
			break;
		}
	}
	assert_true(failed >= 6);
}
