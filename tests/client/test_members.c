/* Members of one instance: what one starts the other moves, by handle; and leases and puts of a group. */
#include "client_test.h"

/* The bed is the scheduler's. */
static kvc_t *worker;
static kvc_space_t *space; /* the worker's */

static const uint8_t secret[16] = "0123456789abcde";
static const kvc_writer_t all = {.head_count = 2, .layer_count = 4};
static const kvc_put_options_t by_worker = {.struct_size = sizeof by_worker, .writers = &all, .writer_count = 1};

static void make_members(const fake_geometry_t *geometry)
{
	kvc_identity_t identity = bed_identity();
	kvc_config_t config = {
		.instance = "engine", .secret = secret, .secret_len = sizeof secret, .role = KVC_ROLE_SCHEDULER};

	bed_make(&bed, geometry, config);
	config.role = KVC_ROLE_WORKER;
	config = bed_config(&bed, config);
	assert_int_equal(kvc_attach(&config, &worker), KVC_OK);
	assert_int_equal(kvc_space_open(worker, &identity, &space), KVC_OK);
}

static int setup(void **state)
{
	(void)state;
	make_members(&fake_split);

	return 0;
}

static int teardown(void **state)
{
	kvc_detach(worker);
	worker = NULL;

	return bed_teardown(state);
}

#define PAIR_CASE(function) KV_TEST(function, setup)

static kvc_put_t *start(uint32_t from, uint32_t n, kvc_handle_t *handle)
{
	kvc_put_t *put = bed_reserve(bed.space, from, n, &by_worker);

	assert_int_equal(kvc_put_export(put, handle), KVC_OK);

	return put;
}

/* The worker's, of a put. */
static kvc_put_t *view_of(const kvc_handle_t *handle)
{
	kvc_put_t *view = NULL;

	assert_int_equal(kvc_put_import(space, handle, &all, &view), KVC_OK);

	return view;
}

/* The worker writes blocks [0, n) of it, those that were reserved from key `from` on, and says so. */
static void write_all(kvc_put_t *view, uint32_t from, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		assert_int_equal(kvc_put_write(view, i, bed.src[from + i]), KVC_OK);
	}
	assert_int_equal(kvc_put_end(view, 0, n), KVC_OK);
}

/* The worker stores the first four blocks. */
static void store_four(void)
{
	const kvc_put_options_t options = {.struct_size = sizeof options,
					   .blocks = (const void *const *)(uintptr_t)bed.src};

	assert_int_equal(kvc_put(space, bed.keys, 0, 4, &options, NULL), KVC_OK);
}

/* 4,096 words of staging, 8 a block: leave room for this many blocks. */
static uint32_t fill_staging(kvc_put_t **puts, uint32_t leave)
{
	uint32_t n = 0;

	KNOB(slots) = 1;
	for (uint32_t left = 512 - leave; left > 0; n++) {
		const uint32_t blocks = left < BED_KEYS ? left : BED_KEYS;

		puts[n] = bed_reserve(space, 0, blocks, NULL);
		left -= blocks;
	}
	KNOB(slots) = 0;

	return n;
}

PAIR_CASE(p5_a_put_goes_in_piece_by_piece_where_staging_is_short)
{
	kvc_put_t *others[16] = {0}, *put, *view;
	kvc_handle_t handle;
	uint32_t n, begin = 0, busy = 0;
	kvc_lease_t *lease = NULL;

	put = start(0, 13, &handle);
	n = fill_staging(others, 4);
	view = view_of(&handle);
	for (uint32_t i = 0; i < 13; i++) {
		kvc_status_t status = kvc_put_write(view, i, bed.src[i]);

		if (status == KVC_ERR_BUSY) {
			uint64_t until = test_now_ms() + 60000;

			busy++;
			assert_int_equal(kvc_put_digests(view, i, NULL), KVC_ERR_BUSY);
			assert_int_equal(kvc_put_end(view, begin, i + 1 - begin), KVC_ERR_ARG); /* i is not written */
			assert_int_equal(kvc_put_end(view, begin, i - begin), KVC_OK);
			begin = i;
			do {
				assert_int_equal(kvc_poll(worker, 5), KVC_OK);
				status = kvc_put_write(view, i, bed.src[i]);
			} while (status == KVC_ERR_BUSY && test_now_ms() < until);
			assert_int_equal(kvc_put_write(view, i - 1, bed.src[i]), KVC_ERR_ARG); /* handed in */
			assert_int_equal(kvc_put_digests(view, i, NULL), KVC_OK);
		}
		assert_int_equal(status, KVC_OK);
	}
	assert_in_range(busy, 3, 12);
	assert_int_equal(kvc_put_end(view, begin, 13 - begin), KVC_OK);
	BED_UNTIL(&bed, bed_result(put).status == KVC_OK);
	kvc_put_free(view);
	kvc_put_free(put);
	assert_int_equal(kvc_acquire(space, bed.keys, 13, 0, 0, &lease), KVC_OK);
	bed_read(lease, 0, 13);
	kvc_release(&lease, 1);

	/* None at all is said at once. */
	put = start(13, 15, &handle);
	assert_int_equal(kvc_put_start(space, bed.keys, 0, 4, NULL, &others[n]), KVC_OK);
	assert_int_equal(kvc_put_import(space, &handle, &all, &view), KVC_ERR_BUSY);
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
	const kvc_put_options_t options = {.struct_size = sizeof options, .writers = &whole, .writer_count = 1};
	kvc_put_t *put, *view = NULL;
	kvc_handle_t handle;

	make_members(&fine);
	put = bed_reserve(bed.space, 0, 2, &options);
	assert_int_equal(kvc_put_export(put, &handle), KVC_OK);
	assert_int_equal(kvc_put_import(space, &handle, &whole, &view), KVC_ERR_LIMIT);
	assert_non_null(strstr(kvc_last_error(), "staging_blocks"));
	assert_int_equal(kvc_put_start(space, bed.keys, 0, 2, &options, &view), KVC_ERR_LIMIT);
	kvc_put_free(put);
}

PAIR_CASE(a_scheduler_takes_no_staging_though_its_rank_is_a_ranks)
{
	kvc_put_t *puts[12];
	kvc_handle_t handle;

	KNOB(slots) = 1;
	for (uint32_t i = 0; i < 12; i++) { /* eight of them would fill it */
		puts[i] = start(0, BED_KEYS, &handle);
		assert_int_equal(kvc_put_end(puts[i], 0, 1), KVC_OK); /* nothing of it is this member's to end */
	}
	assert_int_equal(ASKED(PUT_END), 0);
	for (uint32_t i = 0; i < 12; i++) {
		kvc_put_free(puts[i]);
	}
}

PAIR_CASE(p4_a_view_freed_early_ends_the_put_a_finished_one_does_not)
{
	kvc_put_t *put, *view;
	kvc_handle_t handle;

	put = start(0, 3, &handle);
	view = view_of(&handle);
	write_all(view, 0, 1);
	kvc_put_free(view);
	BED_UNTIL(&bed, bed_result(put).status == KVC_ERR_REVOKED);
	kvc_put_free(put);
	assert_int_equal(ASKED(PUT_REVOKE), 1);

	put = start(1, 3, &handle);
	KNOB(hold_puts) = 1;
	view = view_of(&handle);
	write_all(view, 1, 2);
	kvc_put_free(view); /* the answer to its end is still on the way */
	(void)kvc_poll(worker, 20);
	assert_int_equal(bed_result(put).status, KVC_PENDING);
	assert_int_equal(ASKED(PUT_REVOKE), 1);
	fake_finish_puts(bed.fake, KV_OK);
	BED_UNTIL(&bed, bed_result(put).status == KVC_OK);
	kvc_put_free(put);

	/* Refused after it was freed: over for all. */
	KNOB(hold_puts) = 0;
	put = start(3, 4, &handle);
	view = view_of(&handle);
	KNOB(fail_status) = KV_ERR_COVERAGE;
	KNOB(fail_code) = KV_CODE_PUT_END;
	write_all(view, 3, 1);
	kvc_put_free(view);
	(void)kvc_poll(worker, 50);
	(void)kvc_poll(worker, 20);
	BED_UNTIL(&bed, bed_result(put).status == KVC_ERR_REVOKED);
	kvc_put_free(put);
}

/* The daemon reads them when it comes to that request, which may be after the space was closed. */
PAIR_CASE(p1_digests_handed_in_stay_in_staging_until_they_are_read)
{
	kvc_put_t *first, *second = NULL, *view, *late = NULL;
	kvc_identity_t identity = bed_identity();
	kvc_lease_t *asked = NULL, *lease;
	kvc_handle_t handle, handle2;
	kvc_space_t *other = NULL;

	assert_int_equal(kvc_space_open(worker, &identity, &other), KVC_OK);
	first = start(0, 1, &handle);
	assert_int_equal(kvc_put_start(bed.space, bed.keys + 8, 0, 1, &by_worker, &second), KVC_OK);
	assert_int_equal(kvc_put_ready(second, 0), KVC_OK);
	assert_int_equal(kvc_put_export(second, &handle2), KVC_OK);
	view = view_of(&handle);
	assert_int_equal(kvc_put_write(view, 0, bed.src[0]), KVC_OK);

	/* It is busy with another request. */
	KNOB(delay_code) = KV_CODE_ACQUIRE;
	assert_int_equal(kvc_acquire_start(other, bed.keys, 1, 0, 0, &asked), KVC_OK);
	BED_UNTIL(&bed, ASKED(ACQUIRE) == 1);
	assert_int_equal(kvc_put_end(view, 0, 1), KVC_OK);
	kvc_space_close(space);
	assert_int_equal(kvc_put_import(other, &handle2, &all, &late), KVC_OK);
	assert_int_equal(kvc_put_write(late, 0, bed.src[8]), KVC_OK);
	KNOB(release) = 1;

	BED_UNTIL(&bed, bed_result(first).status == KVC_OK);
	assert_int_equal(kvc_put_end(late, 0, 1), KVC_OK);
	BED_UNTIL(&bed, bed_result(second).status == KVC_OK);
	lease = bed_acquire(1, 0);
	bed_read(lease, 0, 1);
	kvc_release((kvc_lease_t *const[]){lease, asked}, 2);
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
	kvc_lease_t *lease;
	kvc_handle_t handle;
	kvc_put_t *put;

	bed_store(0, 1);
	lease = bed_acquire(1, 0);
	put = start(1, 3, &handle);
	revokes = ASKED(PUT_REVOKE);
	drains = ASKED(DRAINED);
	KNOB(mute) = KV_CODE_ACQUIRE;
	while (n < 1024 && status == KVC_OK) {
		status = kvc_acquire_start(bed.space, bed.keys, 1, 0, 0, &leases[n]);
		n += status == KVC_OK;
	}
	assert_int_equal(kvc_acquire_start(bed.space, bed.keys, 1, 0, 0, &leases[0]), KVC_ERR_BUSY);

	assert_int_equal(fake_open_leases(bed.fake), 2);
	kvc_put_free(put);
	kvc_release(&lease, 1);
	BED_UNTIL(&bed, fake_open_leases(bed.fake) == 0);
	BED_UNTIL(&bed, ASKED(DRAINED) > drains);
	assert_int_equal(ASKED(PUT_REVOKE), revokes + 1);
	assert_int_equal(kvc_poll(bed.kvc, 1), KVC_OK); /* nor has it ended the session */
	kvc_release(leases, n);
}

PAIR_CASE(p10_handles_that_do_not_agree_with_their_header_are_refused)
{
	kvc_put_t *put, *view = NULL;
	kvc_lease_t *lease, *seen = NULL;
	kvc_handle_t handle, bent;

	put = start(0, 3, &handle);
	bent = handle;
	for (bent.n = 2; bent.n <= 4; bent.n += 2) { /* of four it would write into a slot that is not the put's */
		assert_int_equal(kvc_put_import(space, &bent, &all, &view), KVC_ERR_ARG);
	}
	assert_int_equal(kvc_lease_import(space, &handle, &seen), KVC_ERR_ARG);
	kvc_put_free(put);

	store_four();
	lease = bed_acquire(4, 1);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	bent = handle;
	bent.first = 0;
	assert_int_equal(kvc_lease_import(space, &bent, &seen), KVC_ERR_ARG);
	bent = handle;
	bent.n = 3; /* fewer slots than there are */
	assert_int_equal(kvc_lease_import(space, &bent, &seen), KVC_ERR_ARG);
	kvc_release(&lease, 1);
}

PAIR_CASE(p5_a_view_learns_that_the_rest_of_a_lease_never_comes)
{
	kvc_lease_t *lease, *seen = NULL;
	kvc_handle_t handle;

	store_four();
	KNOB(lazy_ready) = 1;
	lease = bed_acquire(4, 0);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	assert_int_equal(kvc_lease_import(space, &handle, &seen), KVC_OK);
	for (int cut = 0; cut < 2; cut++) { /* two come yet */
		assert_int_equal(kvc_lease_rest_status(seen), KVC_OK);
		assert_int_equal(kvc_lease_block(seen, 2, NULL, NULL), KVC_PENDING);
		fake_cut(bed.fake, 2);
	}
	fake_ready(bed.fake, 2, KV_PENDING);
	assert_int_equal(kvc_lease_rest_status(seen), (kvc_status_t)KV_ERR_IO);
	assert_int_equal(kvc_lease_block(seen, 2, NULL, NULL), (kvc_status_t)KV_ERR_IO);
	assert_int_equal(kvc_lease_wait(seen, 4, 1000), (kvc_status_t)KV_ERR_IO);
	assert_int_equal(kvc_lease_state(seen), KVC_OK);
	bed_read(seen, 0, 2);
	kvc_release((kvc_lease_t *const[]){seen, lease}, 2);
}

/* ---- groups ---------------------------------------------------------------------------------- */

/* Of the window's, unless they ask for others. How many blocks the lease has, 0: a miss; keys that the daemon was
 * asked for. */
typedef struct group_case {
	uint32_t group, n, skip;
	uint32_t blocks, least, most;
} group_case_t;

BED_CASE(p3_blocks_of_a_window_are_leased_all_or_none)
{
	static const group_case_t rows[] = {
		{1, 8, 4, 8, 4, 4},       {1, 8, 3, 0, 5, 5},   {1, 8, 8, 0, 5, 5}, /* nothing: not even asked */
		{1, 200, 0, 0, 200, 200}, {0, 10, 0, 10, 2, 8},
	};
	kvc_identity_t identity = bed_identity();
	kvc_put_options_t options = {.struct_size = sizeof options, .group = 1, .base = 4};
	kvc_key_source_t source = {.key = bed_key_at, .ctx = bed.keys};
	kvc_want_t want = {.struct_size = sizeof want, .source = &source};
	kvc_space_t *space = NULL;
	kvc_lease_t *lease = NULL;
	kvc_match_t match = {.struct_size = sizeof match};

	identity.groups = "0:full:16,1:window:16:63";
	assert_int_equal(kvc_space_open(bed.kvc, &identity, &space), KVC_OK);
	options.blocks = (const void *const *)(bed.src + 4);
	assert_int_equal(kvc_put(space, bed.keys + 4, 4, 8, &options, NULL), KVC_OK);
	bed_store(0, 10);
	kvc_match(space, bed.keys, 10, &match);
	assert_int_equal(match.n, 8);

	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		want.group = rows[i].group;
		want.n = rows[i].n;
		want.skip = rows[i].skip;
		assert_int_equal(kvc_lease_start(space, &want, &lease), KVC_OK);
		BED_UNTIL(&bed, kvc_lease_state(lease) != KVC_PENDING);
		assert_int_equal(kvc_lease_state(lease), rows[i].blocks ? KVC_OK : KVC_MISS);
		assert_in_range(SEEN(ladder), rows[i].least, rows[i].most);
		if (rows[i].blocks) {
			assert_int_equal(kvc_lease_n(lease), rows[i].blocks);
			bed_read(lease, rows[i].skip, rows[i].blocks);
		}
		kvc_release(&lease, 1);
	}

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

KV_TEST_MAIN_EACH(NULL, teardown)
