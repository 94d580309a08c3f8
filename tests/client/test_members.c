/* Members of one instance: what one starts the other moves, by handle; and leases and puts of a group. */
#include "client_test.h"

typedef struct pair {
	bed_t bed; /* the scheduler */
	kvc_t *worker;
	kvc_space_t *space; /* the worker's */
} pair_t;

static const uint8_t secret[16] = "0123456789abcde";
static const kvc_writer_t all = {.head_count = 2, .layer_count = 4};

static void pair_make(pair_t *pair, const fake_geometry_t *geometry)
{
	kvc_identity_t identity = bed_identity();
	kvc_config_t config;

	bed_listen(&pair->bed, geometry);
	config = bed_config(&pair->bed);
	config.instance = "engine";
	config.secret = secret;
	config.secret_len = sizeof secret;
	config.role = KVC_ROLE_SCHEDULER;
	assert_int_equal(kvc_attach(&config, &pair->bed.kvc), KVC_OK);
	config.role = KVC_ROLE_WORKER;
	assert_int_equal(kvc_attach(&config, &pair->worker), KVC_OK);
	bed_open(&pair->bed);
	assert_int_equal(kvc_space_open(pair->worker, &identity, &pair->space), KVC_OK);
}

static pair_t pair; /* of the case that runs */

static int pair_setup(void **state)
{
	(void)state;
	pair_make(&pair, &fake_split);

	return 0;
}

static int pair_teardown(void **state)
{
	(void)state;
	kvc_detach(pair.worker);
	pair.worker = NULL;
	bed_free(&pair.bed);

	return bed_teardown(state);
}

#define PAIR_CASE(function) KV_TEST(function, pair_setup)

static kvc_put_t *start(pair_t *pair, uint32_t from, uint32_t n, kvc_handle_t *handle)
{
	kvc_put_options_t options = {.struct_size = sizeof options, .writers = &all, .writer_count = 1};
	kvc_put_t *put = NULL;

	assert_int_equal(kvc_put_start(pair->bed.space, pair->bed.keys, from, n, &options, &put), KVC_OK);
	BED_UNTIL(&pair->bed, kvc_put_export(put, handle) != KVC_PENDING);
	assert_int_equal(kvc_put_export(put, handle), KVC_OK);

	return put;
}

static kvc_status_t result_of(const kvc_put_t *put)
{
	kvc_put_result_t result = {.struct_size = sizeof result};

	kvc_put_get_result(put, &result);

	return result.status;
}

/* 4,096 words of staging, 8 a block: leave room for this many blocks. */
static uint32_t fill_staging(pair_t *pair, kvc_put_t **puts, uint32_t leave)
{
	uint32_t n = 0;

	atomic_store(&fake_knobs(pair->bed.fake)->slots, 1);
	for (uint32_t left = 512 - leave; left > 0; n++) {
		uint32_t blocks = left < BED_KEYS ? left : BED_KEYS;

		assert_int_equal(kvc_put_start(pair->space, pair->bed.keys, 0, blocks, NULL, &puts[n]), KVC_OK);
		assert_int_equal(kvc_put_ready(puts[n], 0), KVC_OK);
		left -= blocks;
	}
	atomic_store(&fake_knobs(pair->bed.fake)->slots, 0);

	return n;
}

PAIR_CASE(p5_a_put_goes_in_piece_by_piece_where_staging_is_short)
{
	kvc_put_t *others[16] = {0}, *put, *view = NULL;
	kvc_handle_t handle;
	uint32_t n, begin = 0, busy = 0;
	kvc_lease_t *lease = NULL;

	put = start(&pair, 0, 13, &handle);
	n = fill_staging(&pair, others, 4);
	assert_int_equal(kvc_put_import(pair.space, &handle, &all, &view), KVC_OK);
	for (uint32_t i = 0; i < 13; i++) {
		kvc_status_t status = kvc_put_write(view, i, pair.bed.src[i]);

		if (status == KVC_ERR_BUSY) {
			uint64_t until = test_now_ms() + 60000;

			busy++;
			assert_int_equal(kvc_put_digests(view, i, NULL), KVC_ERR_BUSY);
			assert_int_equal(kvc_put_end(view, begin, i + 1 - begin), KVC_ERR_ARG); /* i is not written */
			assert_int_equal(kvc_put_end(view, begin, i - begin), KVC_OK);
			begin = i;
			do {
				assert_int_equal(kvc_poll(pair.worker, 5), KVC_OK);
				status = kvc_put_write(view, i, pair.bed.src[i]);
			} while (status == KVC_ERR_BUSY && test_now_ms() < until);
			assert_int_equal(kvc_put_write(view, i - 1, pair.bed.src[i]), KVC_ERR_ARG); /* handed in */
			assert_int_equal(kvc_put_digests(view, i, NULL), KVC_OK);
		}
		assert_int_equal(status, KVC_OK);
	}
	assert_in_range(busy, 3, 12);
	assert_int_equal(kvc_put_end(view, begin, 13 - begin), KVC_OK);
	BED_UNTIL(&pair.bed, result_of(put) == KVC_OK);
	kvc_put_free(view);
	kvc_put_free(put);
	assert_int_equal(kvc_acquire(pair.space, pair.bed.keys, 13, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_read(lease, 0, 13, (void *const *)pair.bed.dst, NULL), KVC_OK);
	bed_check_read(&pair.bed, 0, 13);
	kvc_release(&lease, 1);

	/* None at all is said at once. */
	put = start(&pair, 13, 15, &handle);
	assert_int_equal(kvc_put_start(pair.space, pair.bed.keys, 0, 4, NULL, &others[n]), KVC_OK);
	assert_int_equal(kvc_put_import(pair.space, &handle, &all, &view), KVC_ERR_BUSY);
	kvc_put_free(put);
	for (uint32_t i = 0; i <= n; i++) {
		kvc_put_free(others[i]);
	}
}

KV_TEST(p10_a_block_with_more_leaves_than_staging_is_refused)
{
	const fake_geometry_t fine = {.block_bytes = 524288,
				      .slot_bytes = 524288,
				      .heads = 2,
				      .leaves = 4096,
				      .leaf_bytes = 64,
				      .page_bytes = 64};
	const kvc_writer_t whole = {.head_count = 2, .layer_count = 4096};
	kvc_put_options_t options = {.struct_size = sizeof options, .writers = &whole, .writer_count = 1};
	kvc_put_t *put = NULL, *view = NULL;
	kvc_handle_t handle;

	pair_make(&pair, &fine);
	assert_int_equal(kvc_put_start(pair.bed.space, pair.bed.keys, 0, 2, &options, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 0), KVC_OK);
	assert_int_equal(kvc_put_export(put, &handle), KVC_OK);
	assert_int_equal(kvc_put_import(pair.space, &handle, &whole, &view), KVC_ERR_LIMIT);
	assert_non_null(strstr(kvc_last_error(), "staging_blocks"));
	assert_int_equal(kvc_put_start(pair.space, pair.bed.keys, 0, 2, &options, &view), KVC_ERR_LIMIT);
	kvc_put_free(put);
}

PAIR_CASE(a_scheduler_takes_no_staging_though_its_rank_is_a_ranks)
{
	kvc_put_t *puts[12];
	kvc_handle_t handle;

	atomic_store(&fake_knobs(pair.bed.fake)->slots, 1);
	for (uint32_t i = 0; i < 12; i++) { /* eight of them would fill it */
		puts[i] = start(&pair, 0, BED_KEYS, &handle);
		assert_int_equal(kvc_put_end(puts[i], 0, 1), KVC_OK); /* nothing of it is this member's to end */
	}
	assert_int_equal(atomic_load(&fake_seen(pair.bed.fake)->put_ends), 0);
	for (uint32_t i = 0; i < 12; i++) {
		kvc_put_free(puts[i]);
	}
}

PAIR_CASE(p4_a_view_freed_early_ends_the_put_a_finished_one_does_not)
{
	kvc_put_t *put, *view = NULL;
	kvc_handle_t handle;

	put = start(&pair, 0, 3, &handle);
	assert_int_equal(kvc_put_import(pair.space, &handle, &all, &view), KVC_OK);
	assert_int_equal(kvc_put_write(view, 0, pair.bed.src[0]), KVC_OK);
	assert_int_equal(kvc_put_end(view, 0, 1), KVC_OK);
	kvc_put_free(view);
	BED_UNTIL(&pair.bed, result_of(put) == KVC_ERR_REVOKED);
	kvc_put_free(put);
	assert_int_equal(atomic_load(&fake_seen(pair.bed.fake)->revokes), 1);

	put = start(&pair, 1, 3, &handle);
	atomic_store(&fake_knobs(pair.bed.fake)->hold_puts, 1);
	assert_int_equal(kvc_put_import(pair.space, &handle, &all, &view), KVC_OK);
	for (uint32_t i = 0; i < 2; i++) {
		assert_int_equal(kvc_put_write(view, i, pair.bed.src[1 + i]), KVC_OK);
	}
	assert_int_equal(kvc_put_end(view, 0, 2), KVC_OK);
	kvc_put_free(view); /* the answer to its end is still on the way */
	(void)kvc_poll(pair.worker, 20);
	assert_int_equal(result_of(put), KVC_PENDING);
	assert_int_equal(atomic_load(&fake_seen(pair.bed.fake)->revokes), 1);
	fake_finish_puts(pair.bed.fake, KV_OK);
	BED_UNTIL(&pair.bed, result_of(put) == KVC_OK);
	kvc_put_free(put);

	/* Refused after it was freed: over for all. */
	atomic_store(&fake_knobs(pair.bed.fake)->hold_puts, 0);
	put = start(&pair, 3, 4, &handle);
	assert_int_equal(kvc_put_import(pair.space, &handle, &all, &view), KVC_OK);
	assert_int_equal(kvc_put_write(view, 0, pair.bed.src[3]), KVC_OK);
	atomic_store(&fake_knobs(pair.bed.fake)->fail_status, KV_ERR_COVERAGE);
	atomic_store(&fake_knobs(pair.bed.fake)->fail_code, KV_CODE_PUT_END);
	assert_int_equal(kvc_put_end(view, 0, 1), KVC_OK);
	kvc_put_free(view);
	(void)kvc_poll(pair.worker, 50);
	(void)kvc_poll(pair.worker, 20);
	BED_UNTIL(&pair.bed, result_of(put) == KVC_ERR_REVOKED);
	kvc_put_free(put);
}

/* The daemon reads them when it comes to that request, which may be after the space was closed. */
PAIR_CASE(p1_digests_handed_in_stay_in_staging_until_they_are_read)
{
	kvc_put_options_t options = {.struct_size = sizeof options, .writers = &all, .writer_count = 1};
	kvc_put_t *first, *second = NULL, *view = NULL, *late = NULL;
	kvc_identity_t identity = bed_identity();
	kvc_lease_t *asked = NULL, *lease = NULL;
	kvc_handle_t handle, handle2;
	kvc_space_t *other = NULL;

	assert_int_equal(kvc_space_open(pair.worker, &identity, &other), KVC_OK);
	first = start(&pair, 0, 1, &handle);
	assert_int_equal(kvc_put_start(pair.bed.space, pair.bed.keys + 8, 0, 1, &options, &second), KVC_OK);
	assert_int_equal(kvc_put_ready(second, 0), KVC_OK);
	assert_int_equal(kvc_put_export(second, &handle2), KVC_OK);
	assert_int_equal(kvc_put_import(pair.space, &handle, &all, &view), KVC_OK);
	assert_int_equal(kvc_put_write(view, 0, pair.bed.src[0]), KVC_OK);

	/* It is busy with another request. */
	atomic_store(&fake_knobs(pair.bed.fake)->delay_code, KV_CODE_ACQUIRE);
	assert_int_equal(kvc_acquire_start(other, pair.bed.keys, 1, 0, 0, &asked), KVC_OK);
	BED_UNTIL(&pair.bed, atomic_load(&fake_seen(pair.bed.fake)->acquires) == 1);
	assert_int_equal(kvc_put_end(view, 0, 1), KVC_OK);
	kvc_space_close(pair.space);
	assert_int_equal(kvc_put_import(other, &handle2, &all, &late), KVC_OK);
	assert_int_equal(kvc_put_write(late, 0, pair.bed.src[8]), KVC_OK);
	atomic_store(&fake_knobs(pair.bed.fake)->release, 1);

	BED_UNTIL(&pair.bed, result_of(first) == KVC_OK);
	assert_int_equal(kvc_put_end(late, 0, 1), KVC_OK);
	BED_UNTIL(&pair.bed, result_of(second) == KVC_OK);
	assert_int_equal(kvc_acquire(pair.bed.space, pair.bed.keys, 1, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_read(lease, 0, 1, (void *const *)pair.bed.dst, NULL), KVC_OK);
	bed_check_read(&pair.bed, 0, 1);
	kvc_release(&lease, 1);
	kvc_release(&asked, 1);
	kvc_put_free(late);
	kvc_put_free(first);
	kvc_put_free(second);
}

/* The number of awaited answers is limited; a put that is given up needs no answer and is sent all the same. */
PAIR_CASE(p4_what_is_given_up_is_said_however_much_is_in_flight)
{
	static kvc_lease_t *leases[1024];
	uint32_t revokes, drains, n = 0;
	kvc_status_t status = KVC_OK;
	kvc_lease_t *lease = NULL;
	kvc_handle_t handle;
	kvc_put_t *put;

	assert_int_equal(bed_put(&pair.bed, 0, 1), KVC_OK);
	assert_int_equal(kvc_acquire(pair.bed.space, pair.bed.keys, 1, 0, 0, &lease), KVC_OK);
	put = start(&pair, 1, 3, &handle);
	revokes = atomic_load(&fake_seen(pair.bed.fake)->revokes);
	drains = atomic_load(&fake_seen(pair.bed.fake)->drains);
	atomic_store(&fake_knobs(pair.bed.fake)->mute, KV_CODE_ACQUIRE);
	while (n < 1024 && status == KVC_OK) {
		status = kvc_acquire_start(pair.bed.space, pair.bed.keys, 1, 0, 0, &leases[n]);
		n += status == KVC_OK;
	}
	assert_int_equal(kvc_acquire_start(pair.bed.space, pair.bed.keys, 1, 0, 0, &leases[0]), KVC_ERR_BUSY);

	assert_int_equal(fake_open_leases(pair.bed.fake), 2);
	kvc_put_free(put);
	kvc_release(&lease, 1);
	BED_UNTIL(&pair.bed, fake_open_leases(pair.bed.fake) == 0);
	BED_UNTIL(&pair.bed, atomic_load(&fake_seen(pair.bed.fake)->drains) > drains);
	assert_int_equal(atomic_load(&fake_seen(pair.bed.fake)->revokes), revokes + 1);
	assert_int_equal(kvc_poll(pair.bed.kvc, 1), KVC_OK); /* nor has it ended the session */
	kvc_release(leases, n);
}

PAIR_CASE(p10_handles_that_do_not_agree_with_their_header_are_refused)
{
	kvc_put_t *put, *view = NULL;
	kvc_lease_t *lease = NULL, *seen = NULL;
	kvc_handle_t handle, bent;

	put = start(&pair, 0, 3, &handle);
	bent = handle;
	bent.n = 4; /* would write into a slot that is not the put's */
	assert_int_equal(kvc_put_import(pair.space, &bent, &all, &view), KVC_ERR_ARG);
	bent.n = 2;
	assert_int_equal(kvc_put_import(pair.space, &bent, &all, &view), KVC_ERR_ARG);
	assert_int_equal(kvc_lease_import(pair.space, &handle, &seen), KVC_ERR_ARG);
	kvc_put_free(put);

	assert_int_equal(kvc_put(pair.space, pair.bed.keys, 0, 4,
				 &(kvc_put_options_t){.struct_size = sizeof(kvc_put_options_t),
						      .blocks = (const void *const *)pair.bed.src},
				 NULL),
			 KVC_OK);
	assert_int_equal(kvc_acquire(pair.bed.space, pair.bed.keys, 4, 1, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	bent = handle;
	bent.first = 0;
	assert_int_equal(kvc_lease_import(pair.space, &bent, &seen), KVC_ERR_ARG);
	bent = handle;
	bent.n = 3; /* fewer slots than there are */
	assert_int_equal(kvc_lease_import(pair.space, &bent, &seen), KVC_ERR_ARG);
	kvc_release(&lease, 1);
}

PAIR_CASE(p5_a_view_learns_that_the_rest_of_a_lease_never_comes)
{
	kvc_lease_t *lease = NULL, *seen = NULL;
	kvc_handle_t handle;

	assert_int_equal(kvc_put(pair.space, pair.bed.keys, 0, 4,
				 &(kvc_put_options_t){.struct_size = sizeof(kvc_put_options_t),
						      .blocks = (const void *const *)pair.bed.src},
				 NULL),
			 KVC_OK);
	atomic_store(&fake_knobs(pair.bed.fake)->lazy_ready, 1);
	assert_int_equal(kvc_acquire(pair.bed.space, pair.bed.keys, 4, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	assert_int_equal(kvc_lease_import(pair.space, &handle, &seen), KVC_OK);
	assert_int_equal(kvc_lease_rest_status(seen), KVC_OK);
	assert_int_equal(kvc_lease_block(seen, 2, NULL, NULL), KVC_PENDING);
	fake_cut(pair.bed.fake, 2);
	assert_int_equal(kvc_lease_rest_status(seen), KVC_OK); /* two come yet */
	assert_int_equal(kvc_lease_block(seen, 2, NULL, NULL), KVC_PENDING);
	fake_ready(pair.bed.fake, 2, KV_PENDING);
	assert_int_equal(kvc_lease_rest_status(seen), (kvc_status_t)KV_ERR_IO);
	assert_int_equal(kvc_lease_block(seen, 2, NULL, NULL), (kvc_status_t)KV_ERR_IO);
	assert_int_equal(kvc_lease_wait(seen, 4, 1000), (kvc_status_t)KV_ERR_IO);
	assert_int_equal(kvc_lease_state(seen), KVC_OK);
	assert_int_equal(kvc_lease_read(seen, 0, 2, (void *const *)pair.bed.dst, NULL), KVC_OK);
	bed_check_read(&pair.bed, 0, 2);
	kvc_release((kvc_lease_t *const[]){seen, lease}, 2);
}

/* ---- groups ---------------------------------------------------------------------------------- */

static void key_of(void *ctx, uint32_t i, kvc_key_t *key)
{
	*key = ((bed_t *)ctx)->keys[i % BED_KEYS];
}

static kvc_lease_t *lease_of(bed_t *bed, kvc_space_t *space, const kvc_want_t *want)
{
	kvc_lease_t *lease = NULL;

	assert_int_equal(kvc_lease_start(space, want, &lease), KVC_OK);
	BED_UNTIL(bed, kvc_lease_state(lease) != KVC_PENDING);

	return lease;
}

BED_CASE(p3_blocks_of_a_window_are_leased_all_or_none)
{
	kvc_identity_t identity = bed_identity();
	kvc_put_options_t options = {.struct_size = sizeof options, .group = 1, .base = 4};
	kvc_key_source_t source;
	kvc_want_t want = {.struct_size = sizeof want, .source = &source};
	kvc_space_t *space = NULL;
	kvc_lease_t *lease;
	kvc_match_t match = {.struct_size = sizeof match};

	source = (kvc_key_source_t){.key = key_of, .ctx = &bed};
	identity.groups = "0:full:16,1:window:16:63";
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), KVC_OK);
	options.blocks = (const void *const *)(bed.src + 4);
	assert_int_equal(kvc_put(space, bed.keys + 4, 4, 8, &options, NULL), KVC_OK);
	assert_int_equal(bed_put(&bed, 0, 10), KVC_OK);
	kvc_match(space, bed.keys, 10, &match);
	assert_int_equal(match.n, 8);

	want.group = 1;
	want.n = 8;
	want.skip = 4;
	lease = lease_of(&bed, space, &want);
	assert_int_equal(kvc_lease_state(lease), KVC_OK);
	assert_int_equal(kvc_lease_n(lease), 8);
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->ladder), 4);
	assert_int_equal(kvc_lease_read(lease, 4, 4, (void *const *)(bed.dst + 4), NULL), KVC_OK);
	bed_check_read(&bed, 4, 8);
	kvc_release(&lease, 1);

	want.skip = 3;
	lease = lease_of(&bed, space, &want);
	assert_int_equal(kvc_lease_state(lease), KVC_MISS);
	kvc_release(&lease, 1);
	want.skip = 8; /* nothing: not even asked */
	assert_int_equal(kvc_lease_start(space, &want, &lease), KVC_OK);
	assert_int_equal(kvc_lease_state(lease), KVC_MISS);
	kvc_release(&lease, 1);
	want.n = 200;
	want.skip = 0;
	lease = lease_of(&bed, space, &want);
	assert_int_equal(kvc_lease_state(lease), KVC_MISS);
	assert_int_equal(atomic_load(&fake_seen(bed.fake)->ladder), 200);
	kvc_release(&lease, 1);

	want.group = 0;
	want.n = 10;
	lease = lease_of(&bed, space, &want);
	assert_int_equal(kvc_lease_n(lease), 10);
	assert_in_range(atomic_load(&fake_seen(bed.fake)->ladder), 2, 8);
	kvc_release(&lease, 1);

	want.group = 2;
	assert_int_equal(kvc_lease_start(space, &want, &lease), KVC_ERR_ARG);
	options.group = 2;
	assert_int_equal(kvc_put(space, bed.keys + 4, 4, 8, &options, NULL), KVC_ERR_ARG);
	options.group = 0; /* a full block 4 needs the key of block 3 */
	assert_int_equal(kvc_put(space, bed.keys + 4, 4, 8, &options, NULL), KVC_ERR_ARG);
	options.base = 3;
	assert_int_equal(kvc_put(space, bed.keys + 3, 4, 8, &options, NULL), KVC_OK); /* ALREADY */
	assert_int_equal(kvc_poll_us(bed.kvc, 200), KVC_OK);
}

KV_TEST_MAIN_EACH(NULL, pair_teardown)
