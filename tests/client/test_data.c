/* Putting, leasing and reading blocks, right and with everything that can go wrong on the way. */
#include "client_test.h"

#include <sys/mman.h>

/* Also where the pages of a block are opaque, and uneven. */
KV_TEST(p1_what_was_put_is_read_back)
{
	const fake_geometry_t *geometries[] = {&fake_split, &fake_opaque};
	kvc_lease_t *lease;

	for (size_t i = 0; i < KV_COUNT_OF(geometries); i++) {
		bed_make(&bed, geometries[i], (kvc_config_t){0});
		assert_int_equal(bed_match(20).n, 0);
		bed_store(0, 13);
		assert_int_equal(bed_match(20).n, 13);
		assert_int_equal(bed_match(20).n_cpu, 13);

		/* The ladder of 20 has 20, 19, 18, 16, 12: 12 of the 13 are found. */
		lease = bed_acquire(20, 0);
		assert_int_equal(kvc_lease_n(lease), 12);
		assert_int_equal(kvc_lease_ready(lease), 12);
		assert_int_equal(kvc_lease_wait(lease, 12, 100), KVC_OK);
		bed_read(lease, 0, 12);
		kvc_release(&lease, 1);

		lease = bed_acquire(13, 5);
		assert_int_equal(kvc_lease_n(lease), 13);
		assert_int_equal(kvc_lease_skip(lease), 5);
		assert_int_equal(kvc_lease_read(lease, 4, 1, (void *const *)bed.dst, NULL), KVC_ERR_ARG);
		assert_int_equal(kvc_lease_read(lease, 12, 2, (void *const *)bed.dst, NULL), KVC_ERR_ARG);
		bed_read(lease, 5, 13);
		kvc_release(&lease, 1);
		BED_UNTIL(&bed, fake_open_leases(bed.fake) == 0);
		bed_free(&bed);
	}
}

KV_TEST(p1_every_flipped_byte_is_caught)
{
	kvc_lease_t *lease;
	uint32_t bad = 99;

	bed_make(&bed, &fake_opaque, (kvc_config_t){0});
	bed_store(0, 4);
	lease = bed_acquire(4, 1);
	for (size_t byte = 0; byte < bed.info.block_bytes; byte += 3989) {
		fake_flip(bed.fake, 2, byte);
		assert_int_equal(kvc_lease_read(lease, 1, 3, (void *const *)bed.dst, &bad), KVC_ERR_CORRUPT);
		assert_int_equal(bad, 2);
		fake_flip(bed.fake, 2, byte);
	}
	bed_read(lease, 1, 4);
	BED_UNTIL(&bed, ASKED(BAD_BLOCK) > 0);
	assert_int_equal(SEEN(bad_index), 1); /* in the lease's slots: skip counted off */
	assert_int_equal(bed_stats().corrupt, 21);
	kvc_release(&lease, 1);
}

BED_CASE(p1_a_revoked_lease_reads_nothing)
{
	kvc_lease_t *lease, *brief = NULL;

	bed_store(0, 4);
	lease = bed_acquire(4, 0);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 0, 1, &brief), KVC_OK);
	assert_int_equal(kvc_lease_state(lease), KVC_OK);
	usleep(3000);
	fake_revoke_all(bed.fake);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	assert_int_equal(kvc_lease_state(brief), KVC_ERR_EXPIRED);
	assert_int_equal(bed_try_read(lease), KVC_ERR_REVOKED);
	assert_int_equal(kvc_lease_wait(lease, 4, 1000), KVC_ERR_REVOKED);
	assert_int_equal(kvc_lease_block(lease, 0, NULL, NULL), KVC_ERR_REVOKED);
	assert_non_null(strstr(kvc_last_error(), "acquire again"));

	/* Its memory is used again by another lease: the old handle must not read through it. */
	kvc_release(&brief, 1);
	brief = bed_acquire(4, 0);
	assert_int_equal(kvc_lease_state(lease), KVC_ERR_REVOKED);
	kvc_release((kvc_lease_t *const[]){lease, NULL, brief}, 3);
}

BED_CASE(p5_waiting_for_the_disk_ends)
{
	kvc_lease_t *lease;

	bed_store(0, 4);
	KNOB(lazy_ready) = 1;
	lease = bed_acquire(4, 1);
	assert_int_equal(kvc_lease_ready(lease), 1);
	assert_int_equal(kvc_lease_disk(lease), 3);
	assert_int_equal(bed_try_read(lease), KVC_PENDING);
	assert_int_equal(kvc_lease_wait(lease, 2, 20), KVC_ERR_TIMEOUT);
	assert_int_equal(kvc_lease_wait(lease, 5, 20), KVC_ERR_ARG);
	fake_ready(bed.fake, 3, KV_PENDING); /* without a message */
	assert_int_equal(kvc_lease_wait(lease, 3, 1000), KVC_OK);
	bed_read(lease, 1, 3);
	fake_ready(bed.fake, 3, KV_ERR_IO);
	assert_int_equal(kvc_lease_wait(lease, 4, 1000), (kvc_status_t)KV_ERR_IO);
	kvc_release(&lease, 1);
}

BED_CASE(p1_a_hash_bound_by_itself_or_from_a_chain_is_one_key)
{
	const uint8_t hash[60] = {7};
	kvc_chain_t header;
	kvc_key_t one, other;

	kvc_chain_begin(bed.space, &header);
	for (uint32_t len = 16; len <= 60; len += 11) {
		assert_int_equal(kvc_key_bind(bed.space, hash, len, &one), KVC_OK);
		assert_int_equal(kvc_chain_bind(&header, hash, len, &other), KVC_OK);
		assert_memory_equal(&one, &other, sizeof one);
	}
	assert_int_equal(kvc_chain_bind(&header, hash, 15, &other), KVC_ERR_ARG);
	assert_int_equal(kvc_chain_bind(&header, NULL, 16, &other), KVC_ERR_ARG);
}

BED_CASE(p1_a_miss_is_no_lease)
{
	kvc_lease_t *lease = (kvc_lease_t *)(uintptr_t)8;

	assert_int_equal(kvc_acquire(bed.space, bed.keys, 9, 0, 0, &lease), KVC_MISS);
	assert_null(lease);
	bed_store(0, 4);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 4, 4, 0, &lease), KVC_MISS);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 0, 0, 0, &lease), KVC_ERR_ARG);
	assert_int_equal(kvc_acquire(bed.space, bed.keys, 2, 3, 0, &lease), KVC_ERR_ARG);
}

BED_CASE(p10_grants_outside_the_lease_area_are_refused)
{
	bed_store(0, 4);
	KNOB(lease_outside) = 1;
	assert_int_equal(bed_try_acquire(), (kvc_status_t)KV_ERR_PROTO);
	assert_int_equal(bed_put(&bed, 4, 8), (kvc_status_t)KV_ERR_PROTO);
}

/* ---- puts ------------------------------------------------------------------------------------ */

BED_CASE(p3_a_put_in_pieces_becomes_visible_whole)
{
	kvc_put_options_t options = {.struct_size = sizeof options, .durable = 1};
	kvc_put_result_t result;
	kvc_lease_t *lease;
	void *data = NULL;
	kvc_put_t *put;

	bed_store(0, 2);
	options.tokens = bed.tokens;
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 0, 6, &options, &put), KVC_OK);
	assert_int_equal(bed_result(put).status, KVC_PENDING);
	assert_int_equal(kvc_put_ready(put, 0), KVC_OK);
	assert_int_equal(kvc_put_n(put), 6);
	assert_int_equal(kvc_put_block(put, 1, &data), KVC_ALREADY);
	assert_int_equal(kvc_put_block(put, 6, &data), KVC_ERR_ARG);
	assert_int_equal(kvc_put_block(put, 2, &data), KVC_OK);
	for (uint32_t i = 6; i-- > 0;) {
		assert_int_equal(kvc_put_write(put, i, bed.src[i]), KVC_OK);
	}
	assert_int_equal(kvc_put_end(put, 4, 2), KVC_OK);
	assert_int_equal(kvc_put_end(put, 5, 2), KVC_ERR_ARG);
	assert_int_equal(kvc_put_wait(put, 0, 30), KVC_ERR_TIMEOUT);
	assert_int_equal(kvc_put_end(put, 0, 4), KVC_OK);
	assert_int_equal(kvc_put_wait(put, 1, 0), KVC_OK);
	result = bed_result(put);
	assert_int_equal(result.visible, 6);
	assert_int_equal(result.durable_status, KVC_OK);
	assert_int_equal(result.durable, 6);
	assert_int_equal(SEEN(durable_asked), 1);
	kvc_put_free(put);

	lease = bed_acquire(6, 0);
	bed_read(lease, 0, 6);
	kvc_release(&lease, 1);
	bed_store(0, 6); /* nothing to write */
}

BED_CASE(p4_an_unfinished_put_is_revoked_when_freed)
{
	kvc_put_t *put = bed_reserve(bed.space, 0, 3, NULL);

	assert_int_equal(kvc_put_write(put, 0, bed.src[0]), KVC_OK);
	kvc_put_free(put);
	BED_UNTIL(&bed, ASKED(DRAINED) >= 1);
	assert_int_equal(ASKED(PUT_REVOKE), 1);
	assert_int_equal(fake_open_leases(bed.fake), 0);
}

/* However often it is called, KEEP goes once in half of the put's time to live; a put that ends soon costs none. */
BED_CASE(p5_a_put_is_kept_once_in_half_its_time_to_live)
{
	uint64_t start;
	kvc_put_t *put;

	KNOB(put_ttl_ms) = 60000;
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 0, 3, NULL, &put), KVC_OK);
	assert_int_equal(kvc_put_keep(put), KVC_OK); /* not granted yet */
	start = test_now_ms();
	assert_int_equal(kvc_put_ready(put, 0), KVC_OK);
	for (int i = 0; i < 100; i++) {
		assert_int_equal(kvc_put_keep(put), KVC_OK);
		(void)kvc_poll(bed.kvc, 0);
	}
	assert_true(ASKED(KEEP) == 0 || test_now_ms() - start >= 50);
	/* The daemon's time to live is not known: soon one goes, and then, for 30 s, none. */
	while (ASKED(KEEP) == 0) {
		assert_int_equal(kvc_put_keep(put), KVC_OK);
		(void)kvc_poll(bed.kvc, 1);
	}
	for (uint64_t until = test_now_ms() + 120; test_now_ms() < until;) {
		assert_int_equal(kvc_put_keep(put), KVC_OK);
		(void)kvc_poll(bed.kvc, 1);
	}
	assert_true(ASKED(KEEP) == 1 || test_now_ms() - start >= 30000);
	fake_finish_puts(bed.fake, KV_ERR_REVOKED);
	assert_int_equal(kvc_put_wait(put, 0, 0), KVC_ERR_REVOKED);
	assert_int_equal(kvc_put_keep(put), KVC_ERR_REVOKED);
	kvc_put_free(put);
}

BED_CASE(p1_a_revoked_put_is_not_written)
{
	kvc_put_t *put = bed_reserve(bed.space, 0, 3, NULL);
	void *data;

	fake_finish_puts(bed.fake, KV_ERR_REVOKED);
	assert_int_equal(kvc_put_wait(put, 0, 0), KVC_ERR_REVOKED);
	assert_int_equal(kvc_put_write(put, 0, bed.src[0]), KVC_ERR_REVOKED);
	assert_int_equal(kvc_put_block(put, 0, &data), KVC_ERR_REVOKED);
	assert_int_equal(kvc_put_end(put, 0, 3), KVC_ERR_REVOKED);
	kvc_put_free(put);
	BED_UNTIL(&bed, ASKED(DRAINED) == 1); /* we no longer touch it */
	assert_int_equal(ASKED(PUT_REVOKE), 0);
}

BED_CASE(puts_below_nothing_or_beyond_limits_say_so)
{
	kvc_put_t *put[40] = {0};
	uint32_t n = 0;

	assert_int_equal(bed_put(&bed, 5, 8), KVC_ERR_NO_PARENT);
	assert_non_null(strstr(kvc_last_error(), "the fake says no"));
	KNOB(slots) = 3;
	put[0] = bed_reserve(bed.space, 0, 8, NULL);
	assert_int_equal(kvc_put_n(put[0]), 3);
	kvc_put_free(put[0]);
	put[0] = NULL;

	/* Staging: 4,096 words in the fake, 8 a block: the ninth put of 64 blocks finds none. */
	KNOB(slots) = 1;
	while (n < 40 && kvc_put_start(bed.space, bed.keys, 0, 64, NULL, &put[n]) == KVC_OK) {
		n++;
	}
	assert_int_equal(n, 8);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 0, 64, NULL, &put[n]), KVC_ERR_BUSY);
	kvc_put_free(put[3]);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 0, 64, NULL, &put[3]), KVC_OK);
	for (uint32_t i = 0; i < 8; i++) {
		kvc_put_free(put[i]);
	}
}

KV_TEST(p1_ranks_write_their_own_heads)
{
	static const uint8_t secret[16] = "0123456789abcde";
	kvc_config_t config = {
		.instance = "engine", .secret = secret, .secret_len = sizeof secret, .role = KVC_ROLE_BOTH};
	kvc_writer_t writers[2] = {{.rank = 0, .head_count = 1, .layer_count = 4},
				   {.rank = 1, .head_first = 1, .head_count = 1, .layer_count = 4}};
	kvc_put_options_t options = {.struct_size = sizeof options, .writers = writers, .writer_count = 2};
	kvc_identity_t identity = bed_identity();
	kvc_lease_t *lease, *seen;
	kvc_put_t *put, *view;
	kvc_handle_t handle;
	kvc_space_t *space;
	kvc_t *second;

	bed_make(&bed, &fake_split, config);
	config.rank = 1;
	config = bed_config(&bed, config);
	assert_int_equal(kvc_attach(&config, &second), KVC_OK);
	assert_int_equal(kvc_space_open(second, &identity, &space), KVC_OK);

	put = bed_reserve(bed.space, 0, 4, &options);
	assert_int_equal(kvc_put_export(put, &handle), KVC_OK);
	assert_int_equal(kvc_put_import(space, &handle, &writers[1], &view), KVC_OK);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(kvc_put_write(put, i, bed.src[i]), KVC_OK);
		assert_int_equal(kvc_put_write(view, i, bed.src[i]), KVC_OK);
	}
	assert_int_equal(kvc_put_end(put, 0, 4), KVC_OK);
	assert_int_equal(kvc_put_wait(put, 0, 30), KVC_ERR_TIMEOUT); /* half of it is there */
	assert_int_equal(kvc_put_end(view, 0, 4), KVC_OK);
	assert_int_equal(kvc_put_wait(put, 0, 0), KVC_OK);
	kvc_put_free(view);
	kvc_put_free(put);

	/* One takes the lease, the other reads. */
	lease = bed_acquire(4, 1);
	assert_int_equal(kvc_lease_export(lease, &handle), KVC_OK);
	assert_int_equal(kvc_lease_import(space, &handle, &seen), KVC_OK);
	bed_read(seen, 1, 4);
	kvc_release(&seen, 1);
	assert_int_equal(kvc_lease_state(lease), KVC_OK);
	handle.offset += UINT64_C(1) << 33;
	assert_int_equal(kvc_lease_import(space, &handle, &seen), KVC_ERR_ARG);
	handle.incarnation++;
	assert_int_equal(kvc_lease_import(space, &handle, &seen), KVC_ERR_REVOKED);
	assert_int_equal(kvc_put_import(space, &handle, &writers[1], &view), KVC_ERR_ARG);
	kvc_release(&lease, 1);
	kvc_detach(second);
}

/* ---- answers that never come, or too late ---------------------------------------------------- */

BED_CASE(p4_a_lease_granted_too_late_is_given_back)
{
	kvc_lease_t *lease;
	kvc_put_t *put;

	bed_store(0, 4);
	KNOB(delay_code) = KV_CODE_ACQUIRE;
	assert_int_equal(kvc_acquire_start(bed.space, bed.keys, 4, 0, 0, &lease), KVC_OK);
	assert_int_equal(kvc_lease_state(lease), KVC_PENDING);
	kvc_release(&lease, 1); /* before the answer */
	KNOB(release) = 1;
	BED_UNTIL(&bed, SEEN(released_ids) == 1);
	assert_int_equal(fake_open_leases(bed.fake), 0);

	KNOB(release) = 0;
	KNOB(delay_code) = KV_CODE_PUT_START;
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 4, 6, NULL, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 20), KVC_ERR_TIMEOUT);
	kvc_put_free(put);
	KNOB(release) = 1;
	BED_UNTIL(&bed, ASKED(PUT_REVOKE) == 1);
	assert_int_equal(fake_open_leases(bed.fake), 0);
}

KV_TEST(p5_a_silent_daemon_costs_the_deadline_and_no_more)
{
	kvc_put_t *put;
	char *json;
	uint64_t begin;

	bed_make(&bed, &fake_split, (kvc_config_t){.timeout_ms = 1000});
	bed_store(0, 4);
	KNOB(mute) = UINT32_MAX;
	begin = test_now_ms();
	assert_int_equal(bed_try_acquire(), KVC_ERR_TIMEOUT);
	assert_int_equal(kvc_document(bed.kvc, KVC_DOC_STATUS, 0, &json, NULL), KVC_ERR_TIMEOUT);
	assert_int_equal(kvc_space_reset(bed.space), KVC_ERR_TIMEOUT);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 4, 6, NULL, &put), KVC_OK);
	assert_int_equal(kvc_put_ready(put, 0), KVC_ERR_TIMEOUT);
	kvc_put_free(put);
	assert_in_range(test_now_ms() - begin, 3900, BED_TIMEOUT_MS);
	assert_in_range(bed_stats().timeouts, 4, 5);

	/* It comes back: everything goes on. */
	KNOB(mute) = 0;
	assert_int_equal(bed_try_acquire(), KVC_OK);
}

BED_CASE(p1_a_retired_slab_stays_until_its_leases_end)
{
	kvc_lease_t *lease, *later;
	const void *data;

	bed_store(0, 4);
	lease = bed_acquire(4, 0);
	assert_int_equal(kvc_lease_block(lease, 0, &data, NULL), KVC_OK);
	fake_retire_slab(bed.fake);
	(void)kvc_poll(bed.kvc, 50);
	(void)kvc_poll(bed.kvc, 10);
	assert_memory_equal(data, bed.src[0], bed.info.block_bytes); /* still mapped */
	later = bed_acquire(4, 0);
	assert_int_equal(bed_try_read(later), (kvc_status_t)KV_ERR_FAULT);
	assert_int_equal(ASKED(DRAINED), 0);
	kvc_release(&lease, 1);
	BED_UNTIL(&bed, ASKED(DRAINED) == 1);
	assert_int_equal(SEEN(drained_what), 3);
	assert_int_equal(bed_stats().slabs_mapped, 0);
	kvc_release(&later, 1);
}

BED_CASE(reports_are_dropped_when_nobody_reads_them)
{
	kvc_report_t report = {.struct_size = sizeof report, .request = 5, .query_tokens = 100};

	for (uint32_t i = 0; i < 11; i++) {
		kvc_report(bed.space, &report);
	}
	assert_int_equal(fake_ring_records(bed.fake), 8);
	assert_int_equal(bed_stats().reports_dropped, 3);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* What on_memory() has said. */
typedef struct told {
	kvc_memory_t memory;
	uint32_t mapped, unmapped;
	uint8_t first; /* byte of the memory, when it was about to be unmapped */
} told_t;

static void note_memory(void *ctx, const kvc_memory_t *memory, int mapped)
{
	told_t *told = ctx;

	if (mapped) {
		told->memory = *memory;
		told->mapped++;
	} else {
		assert_ptr_equal(memory->base, told->memory.base);
		assert_int_equal(memory->bytes, told->memory.bytes);
		told->first = *(const uint8_t *)memory->base;
		told->unmapped++;
	}
}

/* Who makes it known to a device hears of it in time, both ways: while it is mapped, and while nothing can name it. */
KV_TEST(p4_pool_memory_is_announced_while_it_is_mapped)
{
	kvc_lease_t *lease;
	const void *data;
	told_t told = {0};

	bed_make(&bed, &fake_split, (kvc_config_t){.on_memory = note_memory, .memory_ctx = &told});
	bed_store(0, 2);
	assert_int_equal(told.mapped, 1);
	lease = bed_acquire(2, 0);
	assert_int_equal(kvc_lease_block(lease, 1, &data, NULL), KVC_OK);
	assert_in_range((uintptr_t)data, (uintptr_t)told.memory.base,
			(uintptr_t)told.memory.base + told.memory.bytes - bed.info.block_bytes);
	assert_int_equal(((uintptr_t)data - (uintptr_t)told.memory.base) % told.memory.slot_bytes, 0);
	fake_retire_slab(bed.fake);
	(void)kvc_poll(bed.kvc, 200);
	assert_int_equal(told.unmapped, 0);
	kvc_release(&lease, 1);
	BED_UNTIL(&bed, told.unmapped == 1);
	bed_free(&bed);
	assert_int_equal(told.unmapped, told.mapped);
}

/* A device whose addresses the CPU cannot use: the slab is mapped without any access. */
typedef struct device {
	void *base;
	size_t bytes;
	uint32_t mapped, unmapped;
	int refuse;
} device_t;

static kvc_status_t map_device(void *ctx, int fd, size_t bytes, void **p_base)
{
	device_t *device = ctx;

	if (device->refuse) {
		return KVC_ERR_UNSUPPORTED;
	}
	device->base = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(device->base, MAP_FAILED);
	device->bytes = bytes;
	device->mapped++;
	*p_base = device->base;

	return KVC_OK;
}

static void unmap_device(void *ctx, void *base, size_t bytes)
{
	device_t *device = ctx;

	assert_ptr_equal(base, device->base);
	assert_int_equal(bytes, device->bytes);
	assert_int_equal(munmap(base, bytes), 0);
	device->unmapped++;
}

static void never_called(void *ctx, const kvc_memory_t *memory, int mapped)
{
	(void)ctx;
	(void)memory;
	(void)mapped;
	fail_msg("memory of a device was announced as the host's");
}

/* Four blocks are granted; device NULL: no hook. */
static kvc_put_t *grant_on_device(device_t *device)
{
	kvc_put_t *put = NULL;

	bed_listen(&bed, &fake_split);
	KNOB(slab_memory) = KV_SLAB_CUDA;
	bed_attach(&bed, (kvc_config_t){.on_memory = never_called,
					.map_device = device ? map_device : NULL,
					.unmap_device = device ? unmap_device : NULL,
					.memory_ctx = device});
	bed_open(&bed);
	assert_int_equal(kvc_put_start(bed.space, bed.keys, 0, 4, NULL, &put), KVC_OK);
	BED_UNTIL(&bed, kvc_put_n(put) == 4);

	return put;
}

/* The CPU touches none of it: a read or a write would end this test. */
KV_TEST(p1_the_cpu_never_touches_memory_of_a_device)
{
	uint64_t leaves[64] = {0};
	device_t device = {0};
	kvc_put_t *put = grant_on_device(&device);
	const void *data = NULL;
	kvc_lease_t *lease;
	void *to = NULL;

	assert_int_equal(device.mapped, 1);
	assert_int_equal(kvc_put_block(put, 1, &to), KVC_OK);
	assert_in_range((uintptr_t)to, (uintptr_t)device.base, (uintptr_t)device.base + device.bytes);
	assert_int_equal(kvc_put_write(put, 0, bed.src[0]), KVC_ERR_UNSUPPORTED);
	assert_true((size_t)bed.info.heads * bed.info.leaves <= KV_COUNT_OF(leaves));
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(kvc_put_digests(put, i, leaves), KVC_OK);
	}
	assert_int_equal(kvc_put_end(put, 0, 4), KVC_OK);
	BED_UNTIL(&bed, fake_visible(bed.fake) == 4);
	kvc_put_free(put);

	lease = bed_acquire(4, 0);
	assert_int_equal(kvc_lease_block(lease, 0, &data, NULL), KVC_OK);
	assert_in_range((uintptr_t)data, (uintptr_t)device.base, (uintptr_t)device.base + device.bytes);
	assert_int_equal(bed_try_read(lease), KVC_ERR_UNSUPPORTED);
	assert_int_equal(kvc_prefault(bed.kvc, UINT64_MAX), 0);
	fake_retire_slab(bed.fake);
	(void)kvc_poll(bed.kvc, 200);
	assert_int_equal(device.unmapped, 0);
	assert_int_not_equal(SEEN(drained_what), 3);
	kvc_release(&lease, 1);
	BED_UNTIL(&bed, SEEN(drained_what) == 3);
	assert_int_equal(device.unmapped, 1);
	bed_free(&bed);
	assert_int_equal(device.unmapped, device.mapped);
}

/* Who cannot map it gives it back like any other slab. */
KV_TEST(p4_a_device_slab_without_a_hook_is_given_back)
{
	device_t device = {.refuse = 1};

	for (int hook = 0; hook < 2; hook++) {
		kvc_put_t *put = grant_on_device(hook ? &device : NULL);
		void *to = NULL;

		assert_int_equal(kvc_put_block(put, 0, &to), KVC_ERR_TIER_OFF);
		assert_int_equal(kvc_put_write(put, 0, bed.src[0]), KVC_ERR_TIER_OFF);
		kvc_put_free(put);
		BED_UNTIL(&bed, ASKED(DRAINED) >= 1); /* of the put */
		fake_retire_slab(bed.fake);
		BED_UNTIL(&bed, SEEN(drained_what) == 3);
		bed_free(&bed);
	}
	assert_int_equal(device.mapped + device.unmapped, 0);
}

/* ---- names, and taking back ------------------------------------------------------------------ */

/* A private key names its bytes: another transfer, parent, token or number of tokens has another key. */
BED_CASE(p1_a_private_key_covers_all_that_its_block_depends_on)
{
	static const uint32_t tokens[] = {1, 2, 3, UINT32_MAX};
	static const kvc_key_t parent = {.b = {1}};
	char long_id[KVC_MAX_TRANSFER + 2] = "";
	const struct {
		const kvc_key_t *parent;
		const char *transfer;
		uint32_t from, n;
		kvc_status_t status;
	} rows[] = {{&parent, "t", 0, 3, KVC_OK},   {NULL, "t", 0, 3, KVC_OK},
		    {&parent, "u", 0, 3, KVC_OK},   {&parent, "t", 0, 2, KVC_OK},
		    {&parent, "t", 1, 2, KVC_OK},   {&parent, long_id + 1, 0, 3, KVC_OK},
		    {NULL, "t", 0, 4, KVC_ERR_ARG}, {NULL, "t", 0, 0, KVC_ERR_ARG},
		    {NULL, "", 0, 3, KVC_ERR_ARG},  {NULL, long_id, 0, 3, KVC_ERR_ARG}};
	kvc_key_t keys[KV_COUNT_OF(rows)], again;

	memset(long_id, 'x', KVC_MAX_TRANSFER + 1);
	for (size_t i = 0; i < KV_COUNT_OF(rows); i++) {
		assert_int_equal(kvc_private_key(bed.space, rows[i].parent, rows[i].transfer, tokens + rows[i].from,
						 rows[i].n, &keys[i]),
				 rows[i].status);
		for (size_t j = 0; j < i && rows[i].status == KVC_OK; j++) {
			assert_memory_not_equal(&keys[i], &keys[j], sizeof keys[i]);
		}
	}
	assert_int_equal(kvc_private_key(bed.space, &parent, "t", tokens, 3, &again), KVC_OK);
	assert_memory_equal(&again, &keys[0], sizeof again);
}

static kvc_status_t withdraw(uint64_t epoch, uint32_t *p_blocks)
{
	const kvc_withdraw_t what = {.struct_size = sizeof what, .n = 4, .keys = bed.keys, .epoch = epoch};
	kvc_withdrawal_t *withdrawal = NULL;
	kvc_status_t status = kvc_withdraw_start(bed.space, &what, &withdrawal);

	while (status == KVC_OK && kvc_withdraw_state(withdrawal, NULL) == KVC_PENDING) {
		(void)kvc_poll(bed.kvc, 5);
	}
	status = status == KVC_OK ? kvc_withdraw_state(withdrawal, p_blocks) : status;
	kvc_withdraw_free(withdrawal);

	return status;
}

KV_TEST(p5_a_withdrawal_is_answered_or_says_why_not)
{
	kvc_withdraw_t what = {.n = 4};
	kvc_withdrawal_t *withdrawal = NULL;
	uint32_t blocks = 0;

	bed_make(&bed, &fake_split, (kvc_config_t){.timeout_ms = 500});
	assert_int_equal(kvc_withdraw_start(bed.space, &what, &withdrawal), KVC_ERR_ARG); /* no size, no keys */
	what = (kvc_withdraw_t){.struct_size = sizeof what, .group = 77, .n = 4, .keys = bed.keys};
	assert_int_equal(kvc_withdraw_start(bed.space, &what, &withdrawal), KVC_ERR_ARG);
	assert_null(withdrawal);
	assert_int_equal(withdraw(bed.info.epoch, &blocks), KVC_OK);
	assert_int_equal(blocks, 4);
	assert_int_equal(withdraw(bed.info.epoch + 1, NULL), KVC_ERR_STALE_EPOCH);
	what = (kvc_withdraw_t){.struct_size = sizeof what, .n = 4, .keys = bed.keys, .epoch = bed.info.epoch};
	assert_int_equal(kvc_withdraw_start(bed.space, &what, &withdrawal), KVC_OK);
	kvc_withdraw_free(withdrawal); /* its answer comes later, and is dropped */
	kvc_withdraw_free(NULL);
	assert_int_equal(withdraw(bed.info.epoch, &blocks), KVC_OK);
	KNOB(mute) = UINT32_MAX;
	assert_int_equal(withdraw(bed.info.epoch, NULL), KVC_ERR_TIMEOUT);
	KNOB(mute) = 0;
}

KV_TEST_MAIN_EACH(NULL, bed_teardown)
