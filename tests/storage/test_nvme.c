/* The disk tier does what its header says: store, load, flush, free, states, order of callbacks. */
#include "nvme_test.h"

#include <fcntl.h>
#include <sys/mman.h>

DISK_TEST(p1_a_stored_block_comes_back_byte_for_byte, fixture_fresh())
{
	kvs_loc_t loc[20];

	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(put_block(&f_, &plain, 1, i + 1, &loc[i]), KV_OK);
	}
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(get_block(&f_, &plain, 1, i + 1, loc[i]), KV_OK);
	}
	check_sums(&f_);
}

DISK_TEST(p1_uneven_pieces_and_two_classes_do_not_mix, fixture_fresh())
{
	kvs_loc_t a, b;
	uint32_t first;
	uint32_t again;

	first = f_.slot_class;
	assert_int_equal(put_block(&f_, &plain, 1, 1, &a), KV_OK);
	assert_int_equal(kvs_class_open(f_.tier, "default", &opaque, &f_.slot_class), KV_OK);
	assert_int_not_equal(first, f_.slot_class);
	assert_int_equal(put_block(&f_, &opaque, 2, 1, &b), KV_OK);
	assert_int_not_equal(kv_slot_slab(a.slot), kv_slot_slab(b.slot));
	assert_int_equal(kvs_class_open(f_.tier, "other", &plain, &again), KV_OK);
	assert_int_not_equal(first, again);
	assert_int_equal(kvs_class_open(f_.tier, "default", &plain, &again), KV_OK);
	assert_int_equal(first, again);
	assert_int_equal(get_block(&f_, &plain, 1, 1, a), KV_OK);
	assert_int_equal(get_block(&f_, &opaque, 2, 1, b), KV_OK);
	flush_ok();
	reopen_finding(2);
	assert_int_equal(kvs_class_open(f_.tier, "default", &opaque, &again), KV_OK);
	assert_int_equal(found_.slot_class[found_find(&found_, 2, 1)], again);
}

DISK_TEST(p2_what_was_flushed_is_there_after_reopen_parents_first, fixture_fresh())
{
	kvs_loc_t loc;

	for (uint32_t i = 20; i > 0; i--) {
		assert_int_equal(put_block(&f_, &plain, 1, i, &loc), KV_OK);
	}
	flush_ok();
	check_sums(&f_);
	reopen_finding(20);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_RECOVERED), 20);
	for (uint32_t i = 0; i < 20; i++) {
		assert_int_equal(get_block(&f_, &plain, 1, found_.meta[i].depth, found_.loc[i]), KV_OK);
	}
	check_sums(&f_);
}

/* Superblocks as they are now; an image is less than `cap`. */
static size_t kept_len;

static void keep_supers(const fixture_t *f, uint8_t *out, size_t cap)
{
	char path[256];
	FILE *file;

	snprintf(path, sizeof path, "%s/superblock.0", f->dir);
	file = fopen(path, "r");
	assert_non_null(file);
	kept_len = fread(out, 1, cap, file);
	assert_true(kept_len > 0);
	fclose(file);
}

static void put_supers(const fixture_t *f, const uint8_t *kept)
{
	for (int i = 0; i < 2; i++) {
		char path[256];
		FILE *file;

		snprintf(path, sizeof path, "%s/superblock.%d", f->dir, i);
		file = fopen(path, "r+");
		assert_non_null(file);
		assert_int_equal(fwrite(kept, 1, kept_len, file), kept_len);
		fclose(file);
	}
}

/* An acknowledgement of what the next start drops would be a lie. */
DISK_TEST(p2_a_block_of_an_unrecorded_space_or_epoch_is_not_taken, fixture_fresh())
{
	kvs_meta_t stranger = meta_of(9, 1, 1), early = meta_of(1, 1, 2), old = meta_of(1, 1, 1);
	kvs_loc_t loc;

	stranger.root[0] = 99;
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &stranger, &loc), KV_ERR_STALE_EPOCH);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &early, &loc), KV_ERR_STALE_EPOCH);
	assert_int_equal(epoch_wait(f_.tier, 2), KV_OK);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &old, &loc), KV_ERR_STALE_EPOCH);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &early, &loc), KV_OK);
	check_sums(&f_);
}

DISK_TEST(p2_orphans_old_epochs_and_unknown_spaces_are_dropped, fixture_fresh())
{
	static block_t b;
	kvs_loc_t loc;
	kvs_meta_t stranger = meta_of(9, 1, 1);
	uint8_t kept[4096];
	outcome_t o = {0};

	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	assert_int_equal(put_block(&f_, &plain, 2, 2, &loc), KV_OK); /* its parent is nowhere */
	assert_int_equal(put_block(&f_, &plain, 2, 3, &loc), KV_OK);
	flush_ok();
	keep_supers(&f_, kept, sizeof kept);
	stranger.root[0] = 99;
	assert_int_equal(kvs_epoch_set(f_.tier, &(kvs_epoch_t){stranger.root, "default", "model=other\n", 1},
				       record_outcome, &o),
			 KV_OK);
	assert_int_equal(await(f_.tier, &o), KV_OK);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &stranger, &loc), KV_OK);
	block_fill(&plain, kv_key_hash(&stranger.key), &b);
	assert_int_equal(store_wait(f_.tier, loc, &b.mem), KV_OK);
	flush_ok();
	fixture_close(&f_);
	put_supers(&f_, kept);

	begin_finding(1);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_DROPPED), 3);
	check_sums(&f_);
	assert_int_equal(epoch_wait(f_.tier, 2), KV_OK);
	reopen_finding(0);
	assert_int_equal(kvs_epoch_get(f_.tier, space_root), 2);
	assert_int_equal(kvs_epoch_last(f_.tier), 2);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_DROPPED), 4);
	check_sums(&f_);
	fixture_reopen(&f_, &found_); /* and their rows are gone */
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_DROPPED), 4);
}

static kv_status_t refuse(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	(void)slot_class;
	(void)loc;
	(*(int *)arg)++;

	return meta->depth == 2 ? KV_ERR_LIMIT : KV_OK;
}

DISK_TEST(p3_a_block_the_core_refuses_takes_its_children_along, fixture_fresh())
{
	kvs_usage_t usage;
	kvs_loc_t loc;
	int calls = 0;

	for (uint32_t i = 1; i <= 4; i++) {
		assert_int_equal(put_block(&f_, &plain, 1, i, &loc), KV_OK);
	}
	flush_ok();
	fixture_close(&f_);
	assert_int_equal(fixture_open(&f_), KV_OK);
	assert_int_equal(kvs_recover(f_.tier, refuse, &calls), KV_OK);
	assert_int_equal(calls, 2);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.used_slots, 1);
	check_sums(&f_);
}

typedef struct put_off {
	int calls[2], again;
} put_off_t;

static kv_status_t put_off(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	put_off_t *seen = arg;

	(void)slot_class;
	(void)loc;
	seen->calls[seen->again]++;

	return meta->depth == 2 && !seen->again ? KV_PENDING : KV_OK;
}

/* What the core has no room for yet comes again with its children, after all others, and nothing of it is lost. */
DISK_TEST(p2_blocks_that_are_put_off_come_again_parents_first, fixture_fresh())
{
	put_off_t seen = {0};
	kvs_usage_t usage;
	kvs_loc_t loc;

	for (uint32_t i = 1; i <= 8; i++) {
		assert_int_equal(put_block(&f_, &plain, 1 + i / 5, 1 + (i - 1) % 4, &loc), KV_OK);
	}
	flush_ok();
	fixture_close(&f_);
	assert_int_equal(fixture_open(&f_), KV_OK);
	assert_int_equal(kvs_recover_some(f_.tier, put_off, &seen, 3), KV_PENDING);
	assert_int_equal(kvs_recover_some(f_.tier, put_off, &seen, 100), KV_MISS);
	assert_int_equal(seen.calls[0], 4); /* two of depth 1, two of depth 2 */
	seen.again = 1;
	assert_int_equal(kvs_recover_some(f_.tier, put_off, &seen, 2), KV_PENDING);
	assert_int_equal(kvs_recover_some(f_.tier, put_off, &seen, 100), KV_OK);
	assert_int_equal(seen.calls[1], 6);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.used_slots, 8);
	check_sums(&f_);
}

DISK_TEST(p1_a_stale_location_is_a_miss, fixture_fresh())
{
	kvs_loc_t loc;
	kvs_loc_t wild = {.slot = 12345678, .gen = 1};
	block_t b;

	block_blank(&b);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	kvs_free(f_.tier, loc);
	assert_int_equal(kvs_load(f_.tier, loc, &b.mem, record_outcome, NULL), KV_MISS);
	assert_int_equal(kvs_store(f_.tier, loc, &b.mem, record_outcome, NULL), KV_MISS);
	assert_int_equal(kvs_set_state(f_.tier, loc, KVS_QUARANTINED), KV_MISS);
	kvs_free(f_.tier, loc);
	kvs_free(f_.tier, wild);
	assert_int_equal(kvs_load(f_.tier, wild, &b.mem, record_outcome, NULL), KV_MISS);
	assert_int_equal(kvs_mem(f_.tier, loc, &b.mem), KV_ERR_UNSUPPORTED);
	check_sums(&f_);
}

DISK_TEST(p10_wrong_states_and_arguments_are_refused, fixture_fresh())
{
	kvs_meta_t meta = meta_of(1, 1, 1);
	kvs_geometry_t wide = {.block_bytes = 1 << 20, .heads = 1024, .leaves = 1024, .leaf_bytes = 1, .page_bytes = 1};
	kvs_geometry_t no_leaf = {.block_bytes = 12288, .heads = 2, .leaves = 3, .page_bytes = 2048};
	kvs_loc_t loc;
	block_t b;
	kvs_mem_t crooked;
	uint32_t id;

	block_fill(&plain, kv_key_hash(&meta.key), &b);
	crooked = b.mem;
	crooked.data = b.data + 512;
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_READY, 1, &meta, &loc), KV_ERR_ARG);
	assert_int_equal(kvs_alloc(f_.tier, 77, KVS_PUT, 1, &meta, &loc), KV_ERR_ARG);
	assert_int_equal(kvs_class_open(f_.tier, "default", &wide, &id), KV_ERR_LAYOUT);
	assert_int_equal(kvs_class_open(f_.tier, "default", &no_leaf, &id), KV_ERR_LAYOUT);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(kvs_load(f_.tier, loc, &b.mem, record_outcome, NULL), KV_ERR_ARG);
	assert_int_equal(kvs_set_state(f_.tier, loc, KVS_READY), KV_ERR_ARG);
	assert_int_equal(kvs_store(f_.tier, loc, &crooked, record_outcome, NULL), KV_ERR_ARG);
	assert_int_equal(store_wait(f_.tier, loc, &b.mem), KV_OK);
	assert_int_equal(store_wait(f_.tier, loc, &b.mem), KV_ERR_ARG);
	assert_int_equal(kvs_set_state(f_.tier, loc, KVS_QUARANTINED), KV_OK);
	assert_int_equal(kvs_load(f_.tier, loc, &b.mem, record_outcome, NULL), KV_ERR_CORRUPT);
	assert_int_equal(kvs_set_state(f_.tier, loc, KVS_READY), KV_ERR_ARG);
	check_sums(&f_);
}

DISK_TEST(p5_full_is_full_and_freed_slots_serve_again_within_the_limit, fixture_init(&f_, NULL))
{
	kvs_loc_t loc, spare;
	kvs_usage_t usage;
	kvs_meta_t meta;
	uint32_t n = 0;

	f_.config.limit_bytes = 8 * MIB;
	fixture_begin(&f_, &found_);
	while (meta = meta_of(1, ++n, 1), kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc) == KV_OK) {
		spare = loc;
		assert_true(n < 1000);
	}
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_ERR_FULL);
	kvs_usage(f_.tier, &usage);
	assert_true(usage.charged_bytes <= usage.limit_bytes);
	assert_int_equal(usage.free_slots, 0);
	kvs_free(f_.tier, spare);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(loc.slot, spare.slot);
	assert_int_not_equal(loc.gen, spare.gen);
	check_sums(&f_);
}

/* A file changes its class: it gives out no slot while it is emptied, may stay after all, and is the other class's
 * alone when its rows have gone. */
DISK_TEST(p5_an_emptied_file_makes_room_for_the_class_that_needs_it, fixture_init(&f_, NULL))
{
	const kvs_rebalance_ops_t *change;
	kvs_slab_desc_t look;
	kvs_loc_t loc[1000], other;
	uint32_t n = 0, first_class, files = 0;
	kvs_meta_t meta;

	f_.config.limit_bytes = 8 * MIB;
	fixture_begin(&f_, &found_);
	change = f_.tier->ops->rebalance;
	while (n < 1000 && put_block(&f_, &plain, 1, n + 1, &loc[n]) == KV_OK) {
		n++;
	}
	assert_true(n > 50 && n < 1000);
	first_class = f_.slot_class;
	assert_int_equal(kvs_class_open(f_.tier, "other", &opaque, &f_.slot_class), KV_OK);
	assert_string_equal(kvs_class_ns(f_.tier, f_.slot_class), "other");
	assert_int_equal(change->is_short(f_.tier, f_.slot_class), 1);
	assert_int_equal(kvs_class_bytes(f_.tier, f_.slot_class), 0);
	meta = meta_of(2, 1, 1);
	for (uint32_t file = 0; file < 2; file++) { /* one may be too small for the other class */
		assert_int_equal(change->describe_slab(f_.tier, file, &look), KV_OK);
		assert_int_equal(look.slot_class, first_class);
		assert_int_equal(look.taken, look.slots);
		change->begin_retire(f_.tier, file);
		assert_int_equal(change->retire(f_.tier, file, f_.slot_class), KV_ERR_BUSY);
		for (uint32_t i = 0; i < n; i++) {
			if (kv_slot_slab(loc[i].slot) == file) {
				kvs_free(f_.tier, loc[i]);
				loc[i].slot = KV_SLOT_NONE;
			}
		}
		assert_int_equal(change->free_slots(f_.tier, first_class), 0); /* what has come free has no owner */
		change->cancel_retire(f_.tier, file);
		assert_int_equal(change->free_slots(f_.tier, first_class), look.slots);
		change->begin_retire(f_.tier, file);
		assert_int_equal(change->retire(f_.tier, file, f_.slot_class), KV_OK);
		files++;
		check_sums(&f_);
		assert_int_equal(kvs_alloc(f_.tier, first_class, KVS_PUT, 1, &meta, &other), KV_ERR_FULL);
		flush_ok();
		(void)kvs_poll(f_.tier, 0);
		if (kvs_class_bytes(f_.tier, f_.slot_class) > 0) {
			break;
		}
		assert_int_equal(change->is_coming(f_.tier, f_.slot_class), 1);
	}
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_FILES_RETIRED), files);
	assert_int_equal(change->is_coming(f_.tier, f_.slot_class), 0);
	assert_int_equal(put_block(&f_, &opaque, 2, 1, &other), KV_OK);
	assert_int_equal(get_block(&f_, &opaque, 2, 1, other), KV_OK);
	for (uint32_t i = 0; i < n; i++) {
		assert_true(loc[i].slot == KV_SLOT_NONE || get_block(&f_, &plain, 1, i + 1, loc[i]) == KV_OK);
	}
	check_sums(&f_);
}

DISK_TEST(p4_a_slot_freed_under_its_write_is_free_when_that_has_ended, fixture_fresh())
{
	kvs_meta_t meta = meta_of(1, 1, 1);
	kvs_usage_t usage;
	outcome_t o = {0};
	kvs_loc_t loc;
	block_t b;

	block_fill(&plain, kv_key_hash(&meta.key), &b);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(kvs_store(f_.tier, loc, &b.mem, record_outcome, &o), KV_OK);
	assert_int_equal(kvs_in_flight(f_.tier), 1);
	kvs_free(f_.tier, loc);
	assert_int_equal(kvs_load(f_.tier, loc, &b.mem, record_outcome, NULL), KV_MISS);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.used_slots, 1);
	await(f_.tier, &o);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.used_slots, 0);
	assert_int_equal(kvs_in_flight(f_.tier), 0);
	flush_ok();
	check_sums(&f_);
	reopen_finding(0);
}

typedef struct order {
	outcome_t store[40];
	outcome_t flush;
	int stores_at_flush;
} order_t;

static order_t order;

static void on_flushed(void *arg, kv_status_t status)
{
	record_outcome(arg, status);
	for (size_t i = 0; i < KV_COUNT_OF(order.store); i++) {
		order.stores_at_flush += order.store[i].calls;
	}
}

DISK_TEST(p2_a_flush_is_answered_after_all_stores_before_it, fixture_fresh())
{
	static block_t b[40];
	kvs_loc_t loc[40];

	memset(&order, 0, sizeof order);
	for (uint32_t i = 0; i < 40; i++) {
		kvs_meta_t meta = meta_of(1, i + 1, 1);

		block_fill(&plain, kv_key_hash(&meta.key), &b[i]);
		assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc[i]), KV_OK);
		assert_int_equal(kvs_store(f_.tier, loc[i], &b[i].mem, record_outcome, &order.store[i]), KV_OK);
	}
	assert_int_equal(kvs_flush(f_.tier, on_flushed, &order.flush), KV_OK);
	assert_int_equal(order.flush.calls, 0);
	assert_int_equal(await(f_.tier, &order.flush), KV_OK);
	assert_int_equal(order.stores_at_flush, 40);
}

DISK_TEST(p5_callbacks_are_bounded_and_the_queue_says_busy, fixture_init(&f_, NULL))
{
	static block_t b;
	kvs_loc_t loc;
	static outcome_t o[2000];
	uint32_t n = 0;
	uint32_t ran = 0;

	f_.config.queue_depth = 4;
	fixture_begin(&f_, &found_);
	memset(o, 0, sizeof o);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	block_blank(&b);
	while (n < 2000 && kvs_load(f_.tier, loc, &b.mem, record_outcome, &o[n]) == KV_OK) {
		n++;
	}
	assert_true(n >= 16 && n < 2000);
	assert_int_equal(kvs_load(f_.tier, loc, &b.mem, record_outcome, &o[n]), KV_ERR_BUSY);
	while (ran < n) {
		struct pollfd wait = {.fd = kvs_event_fd(f_.tier), .events = POLLIN};
		uint32_t got = kvs_poll(f_.tier, 3);

		assert_true(got <= 3);
		ran += got;
		assert_true(got > 0 || poll(&wait, 1, 5000) == 1); /* what is left over keeps the fd readable */
	}
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(o[i].calls, 1);
		assert_int_equal(o[i].status, KV_OK);
	}
	check_sums(&f_);
}

DISK_TEST(p6_without_io_uring_plain_threads_do_the_same, fixture_init(&f_, NULL))
{
	kvs_loc_t loc[30];

	f_.config.engine = KVS_IO_THREADS;
	fixture_begin(&f_, &found_);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_FALLBACK), 1);
	for (uint32_t i = 0; i < 30; i++) {
		assert_int_equal(put_block(&f_, &plain, 1, i + 1, &loc[i]), KV_OK);
	}
	flush_ok();
	for (uint32_t i = 0; i < 30; i++) {
		assert_int_equal(get_block(&f_, &plain, 1, i + 1, loc[i]), KV_OK);
	}
	fixture_close(&f_);
	f_.config.engine = KVS_IO_AUTO;
	f_.config.direct = 0;
	begin_finding(30);
	assert_int_equal(get_block(&f_, &plain, 1, 30, found_.loc[29]), KV_OK);
}

DISK_TEST(p2_a_batch_follows_by_itself_within_the_interval, fixture_fresh())
{
	kvs_loc_t loc;
	uint64_t deadline;

	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	deadline = real_now(NULL) + UINT64_C(5000000000);
	while (kv_metric_get(&f_.metrics, KV_M_DISK_COMMITS) == 0) {
		struct pollfd wait = {.fd = kvs_event_fd(f_.tier), .events = POLLIN};

		poll(&wait, 1, 5000); /* the tier wakes its owner */
		kvs_poll(f_.tier, 64);
		assert_true(real_now(NULL) < deadline);
	}
}
