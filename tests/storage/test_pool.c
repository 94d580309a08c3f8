/* The CPU pool's promises, one by one. The model test is test_pool_model.c. */
#include "pool_test.h"

#include "geometry.h"
#include "cpu/pool.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

POOL_TEST(p1_bytes_come_back_as_they_were_put, pool_set_up(4u << 20, 256u << 10))
{
	const kvs_geometry_t *geometries[] = {&plain, &opaque};

	pool_open();
	for (uint32_t i = 0; i < 2; i++) {
		static block_t got;
		kvs_loc_t loc[20];
		uint32_t class;

		assert_int_equal(kvs_class_open(pool_, "ns", geometries[i], &class), KV_OK);
		for (uint64_t s = 0; s < 20; s++) {
			loc[s] = put(pool_, class, geometries[i], s);
		}
		for (uint64_t s = 0; s < 20; s++) {
			block_blank(&got);
			assert_int_equal(load(pool_, loc[s], &got.mem), KV_OK);
			block_check(geometries[i], s, &got);
		}
	}
}

POOL_TEST(p1_a_wrong_digest_is_not_stored_and_a_flipped_bit_not_served, pool_begun(1u << 20, 256u << 10))
{
	static block_t b;
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;
	kvs_mem_t mem;

	assert_int_equal(kvs_alloc(pool_, class_, KVS_FILLING, 1, &meta, &loc), KV_OK);
	block_fill(&plain, 1, &b);
	assert_int_equal(load(pool_, loc, &b.mem), KV_ERR_ARG); /* nothing in it yet */
	b.leaves[5]++;
	assert_int_equal(store(pool_, loc, &b.mem), KV_ERR_CORRUPT);
	b.leaves[5]--;
	b.roots[1]++;
	assert_int_equal(store(pool_, loc, &b.mem), KV_ERR_CORRUPT);
	b.roots[1]--;
	assert_int_equal(store(pool_, loc, &b.mem), KV_OK);
	assert_int_equal(kvs_set_state(pool_, loc, KVS_READY), KV_OK);
	assert_int_equal(store(pool_, loc, &b.mem), KV_ERR_ARG); /* READY bytes never change */

	assert_int_equal(kvs_mem(pool_, loc, &mem), KV_OK);
	for (uint32_t bit = 0; bit < plain.block_bytes * 8u; bit += 1021) {
		uint8_t *p = (uint8_t *)mem.data + bit / 8u;

		*p = (uint8_t)(*p ^ 1u << bit % 8u);
		assert_int_equal(load(pool_, loc, &b.mem), KV_ERR_CORRUPT);
		*p = (uint8_t)(*p ^ 1u << bit % 8u);
	}
	assert_int_equal(load(pool_, loc, &b.mem), KV_OK);
	assert_int_equal(kvs_set_state(pool_, loc, KVS_QUARANTINED), KV_OK);
	assert_int_equal(load(pool_, loc, &b.mem), KV_MISS);
}

/* A put as engines do it: bytes through the mapping, digests by rank and layer, then the seal. */
POOL_TEST(p1_digests_handed_in_piecewise_make_the_same_block, pool_begun(1u << 20, 256u << 10))
{
	static block_t b, got;
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;
	kvs_mem_t mem;

	assert_int_equal(kvs_alloc(pool_, class_, KVS_PUT, 1, &meta, &loc), KV_OK);
	block_fill(&plain, 4, &b);
	assert_int_equal(kvs_mem(pool_, loc, &mem), KV_OK);
	memcpy(mem.data, b.data, plain.block_bytes);
	for (uint32_t i = 0; i < 4; i++) { /* a head's first leaf, then its other two */
		const uint32_t h = i / 2, l = i % 2;

		assert_int_equal(
			kvs_pool_set_leaves(pool_, loc, &(kvs_leaf_span_t){h, 1, l, 1 + l}, &b.leaves[h * 3 + l]),
			KV_OK);
	}
	assert_int_equal(kvs_pool_compute_roots(pool_, loc), KV_OK);
	assert_int_equal(kvs_set_state(pool_, loc, KVS_TRANSIT), KV_OK);
	block_blank(&got);
	assert_int_equal(load(pool_, loc, &got.mem), KV_OK);
	block_check(&plain, 4, &got);
	assert_int_equal(kvs_pool_compute_roots(pool_, loc), KV_ERR_ARG);
	assert_int_equal(kvs_pool_set_leaves(pool_, loc, &(kvs_leaf_span_t){0, 2, 0, 3}, b.leaves), KV_ERR_ARG);
}

POOL_TEST(p10_digest_ranges_outside_the_block_are_refused, pool_begun(1u << 20, 256u << 10))
{
	static const kvs_leaf_span_t bad[] = {KV_ROWS({2, 1, 0, 1}, {0, 3, 0, 1}, {0, 1, 3, 1}, {0, 1, 0, 4},
						      {1, UINT32_MAX, 0, 1}, {0, 1, 1, UINT32_MAX},
						      {UINT32_MAX, 1, 0, 1})};
	uint64_t values[6] = {0};
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;

	assert_int_equal(kvs_alloc(pool_, class_, KVS_PUT, 1, &meta, &loc), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvs_pool_set_leaves(pool_, loc, &bad[i], values), KV_ERR_ARG);
	}
	assert_int_equal(kvs_pool_set_leaves(pool_, loc, &(kvs_leaf_span_t){0, 2, 0, 3}, values), KV_OK);
}

POOL_TEST(p6_a_punched_slab_is_a_fault_not_a_crash, pool_begun(1u << 20, 256u << 10))
{
	static block_t b;
	kvs_slab_info_t info;
	kvs_loc_t first, second;

	first = put(pool_, class_, &plain, 1);
	second = put(pool_, class_, &plain, 2);
	block_fill(&plain, 0, &b);
	assert_int_equal(load(pool_, first, &b.mem), KV_OK);

	/* The client's own descriptor: it can take the bytes away, not the memory. */
	assert_int_equal(kvs_pool_slab(pool_, 0, &info), KV_OK);
	assert_int_equal(fallocate(info.data_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				   (off_t)kv_slot_index(first.slot) * info.slot_bytes, info.slot_bytes),
			 0);
	assert_int_equal(load(pool_, first, &b.mem), KV_ERR_CORRUPT);
	assert_int_equal(load(pool_, second, &b.mem), KV_OK);
}

/* Should memory really go (a huge page that cannot be had again, a broken module): the pool counts it and lives on. */
POOL_TEST(p6_memory_that_is_gone_is_counted_and_typed, pool_begun(1u << 20, 256u << 10))
{
	static block_t b;
	kvs_loc_t loc;
	kvs_mem_t mem;
	int fd = memfd_create("empty", MFD_CLOEXEC);

	loc = put(pool_, class_, &plain, 1);
	assert_int_equal(kvs_mem(pool_, loc, &mem), KV_OK);
	assert_true(mmap(mem.data, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == mem.data);
	block_fill(&plain, 0, &b);
	assert_int_equal(load(pool_, loc, &b.mem), KV_ERR_FAULT);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_SLAB_FAULTS), 1);
	kvs_free(pool_, loc);
	assert_int_equal(kvs_alloc(pool_, class_, KVS_PUT, 1, &(kvs_meta_t){.depth = 1}, &loc), KV_OK);
	block_fill(&plain, 0, &b);
	assert_int_equal(store(pool_, loc, &b.mem), KV_ERR_FAULT);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_SLAB_FAULTS), 2);
	close(fd);
}

POOL_TEST(p8_clients_can_neither_resize_nor_forge, pool_begun(1u << 20, 256u << 10))
{
	kvs_slab_info_t info;
	void *p;

	put(pool_, class_, &plain, 1);
	assert_int_equal(kvs_pool_slab(pool_, 0, &info), KV_OK);
	assert_string_equal(info.ns, "ns");

	int fds[] = {info.data_fd, info.digest_fd, kvs_pool_of(pool_)->ledger.area.fd};
	uint64_t bytes[] = {info.bytes, info.digest_bytes, kvs_pool_of(pool_)->ledger.area.bytes};

	for (int i = 0; i < 3; i++) {
		assert_true(fcntl(fds[i], F_GETFD) & FD_CLOEXEC);
		assert_int_equal(ftruncate(fds[i], 0), -1);
		assert_int_equal(errno, EPERM);
		assert_int_equal(ftruncate(fds[i], (off_t)bytes[i] + 4096), -1);
		assert_int_equal(fcntl(fds[i], F_ADD_SEALS, F_SEAL_WRITE), -1);
		p = mmap(NULL, bytes[i], PROT_READ, MAP_SHARED, fds[i], 0);
		assert_true(p != MAP_FAILED);
		munmap(p, bytes[i]);
	}
	for (int i = 1; i < 3; i++) {
		assert_true(mmap(NULL, bytes[i], PROT_READ | PROT_WRITE, MAP_SHARED, fds[i], 0) == MAP_FAILED);
		assert_int_equal(fallocate(fds[i], FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), -1);
		assert_int_equal(pwrite(fds[i], "x", 1, 0), -1);
		p = mmap(NULL, bytes[i], PROT_READ, MAP_SHARED, fds[i], 0);
		assert_true(p != MAP_FAILED);
		assert_int_equal(mprotect(p, bytes[i], PROT_READ | PROT_WRITE), -1);
		munmap(p, bytes[i]);
	}
	assert_int_equal(kvs_pool_slab(pool_, kvs_pool_slab_count(pool_), &info), KV_MISS);
}

POOL_TEST(p5_the_smallest_and_oddest_arguments_are_refused, pool_set_up(1u << 20, 256u << 10))
{
	static const kvs_geometry_t bad[] = {
		KV_ROWS({0, 1, 1, 1, 1}, {4096, 0, 1, 4096, 4096}, {4096, 1, 0, 4096, 4096}, {4096, 1, 1, 0, 4096},
			{4096, 1, 2, 4096, 4096}, {4096, 1, 1, 2048, 4096}, {4097, 1, 1, 4096, 4096},
			{UINT32_MAX, 1, 1, UINT32_MAX, UINT32_MAX}, {4096, 65536, 65536, 1, 1})};
	char long_name[200];
	kvs_tier_t *none = NULL;
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;
	uint32_t class, again;

	pool_open();
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvs_class_open(pool_, "ns", &bad[i], &class), KV_ERR_LAYOUT);
	}
	memset(long_name, 'a', sizeof long_name - 1);
	long_name[sizeof long_name - 1] = '\0';
	assert_int_equal(kvs_class_open(pool_, long_name, &plain, &class), KV_ERR_ARG);
	assert_int_equal(kvs_class_open(pool_, "", &plain, &class), KV_ERR_ARG);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &again), KV_OK);
	assert_int_equal(class, again);
	assert_int_equal(kvs_class_open(pool_, "other", &plain, &again), KV_OK);
	assert_int_not_equal(class, again);
	assert_int_equal(kvs_alloc(pool_, 99, KVS_PUT, 1, &meta, &loc), KV_ERR_ARG);
	assert_int_equal(kvs_alloc(pool_, class, KVS_READY, 1, &meta, &loc), KV_ERR_ARG);
	for (uint32_t i = 2; i < KVS_POOL_MAX_CLASSES; i++) {
		snprintf(long_name, sizeof long_name, "n%u", i);
		assert_int_equal(kvs_class_open(pool_, long_name, &plain, &again), KV_OK);
	}
	assert_int_equal(kvs_class_open(pool_, "one more", &plain, &again), KV_ERR_LIMIT);
	kvs_class_close(pool_, class); /* it has a slab */
	assert_int_equal(kvs_class_open(pool_, "one more", &plain, &again), KV_ERR_BUSY);
	kvs_class_close(pool_, KVS_POOL_MAX_CLASSES - 1);
	assert_int_equal(kvs_class_open(pool_, "one more", &plain, &again), KV_OK);
	assert_int_equal(again, KVS_POOL_MAX_CLASSES - 1);
	assert_string_equal(kvs_class_ns(pool_, again), "one more");
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &again), KV_OK);
	assert_int_equal(again, class);
	assert_int_equal(kvs_class_open(pool_, "n255", &plain, &again), KV_ERR_LIMIT);
	check(pool_);
	config_.limit_bytes = 4096;
	assert_int_equal(kvs_pool_open(&config_, &t_.env, &none), KV_ERR_ARG);
	config_ = pool_config(&metrics_, 1u << 20, 0);
	assert_int_equal(kvs_pool_open(&config_, &t_.env, &none), KV_ERR_ARG);
	assert_null(none);
}

POOL_TEST(epochs_are_remembered_in_memory, pool_set_up(1u << 20, 256u << 10))
{
	uint8_t root[32] = {0};
	outcome_t o = {0, KV_OK};

	pool_open();
	for (uint8_t i = 0; i < 100; i++) {
		root[31] = i;
		assert_int_equal(kvs_epoch_get(pool_, root), 0);
		assert_int_equal(kvs_epoch_set(pool_, &(kvs_epoch_t){root, "ns", "text", 1}, record_outcome, &o),
				 KV_OK);
		assert_int_equal(kvs_epoch_set(pool_, &(kvs_epoch_t){root, "ns", "text", i + 2u}, record_outcome, &o),
				 KV_OK);
	}
	for (uint8_t i = 0; i < 100; i++) {
		root[31] = i;
		assert_int_equal(kvs_epoch_get(pool_, root), i + 2u);
	}
	assert_int_equal(o.calls, 200);
	assert_int_equal(kvs_flush(pool_, record_outcome, &o), KV_OK);
	assert_int_equal(o.calls, 201);
	assert_int_equal(kvs_event_fd(pool_), -1);
	assert_int_equal(kvs_poll(pool_, 8) + kvs_in_flight(pool_), 0);
	assert_int_equal(kvs_recover(pool_, NULL, NULL), KV_OK);
}

static void expect_damage(kvs_tier_t *pool)
{
	char detail[256] = "";

	assert_int_equal(kvs_check(pool, detail, sizeof detail), KV_ERR_INTERNAL);
	assert_true(detail[0] != '\0');
}

#define DAMAGED(type, field, value)                                                                                    \
	do {                                                                                                           \
		type whole = field;                                                                                    \
		field = (type)(value);                                                                                 \
		expect_damage(pool_);                                                                                  \
		field = whole;                                                                                         \
		check(pool_);                                                                                          \
	} while (0)

POOL_TEST(p4_check_finds_every_broken_sum, pool_begun(1u << 20, 256u << 10))
{
	kvs_pool_t *pool = kvs_pool_of(pool_);
	kvs_loc_t loc[4];

	for (uint64_t i = 0; i < 4; i++) {
		loc[i] = put(pool_, class_, &plain, i);
	}
	kvs_free(pool_, loc[0]);
	kvs_free(pool_, loc[1]);
	check(pool_);
	DAMAGED(uint64_t, pool->usage.used_slots, 3);
	DAMAGED(uint64_t, pool->usage.free_slots, 0);
	DAMAGED(uint64_t, pool->usage.used_bytes, 1);
	DAMAGED(uint64_t, pool->usage.charged_bytes, 4096);
	DAMAGED(uint32_t, pool->slabs[0]->slots[2].state, KVS_FREE);
	DAMAGED(uint32_t, pool->slabs[0]->slots[3].state, KVS_QUARANTINED);
	DAMAGED(uint32_t, pool->slabs[0]->slab.number, 1);
	DAMAGED(uint64_t, pool->slabs[0]->slab.data.bytes, 4096);
	DAMAGED(uint32_t, pool->slabs[0]->slab.next[kv_slot_index(loc[0].slot)], loc[1].slot); /* a circle */
	DAMAGED(uint32_t, pool->slabs[0]->stack, KVS_NONE);
	DAMAGED(uint32_t, pool->slabs[0]->fresh, 5);
	DAMAGED(uint32_t, pool->slabs[0]->taken, 1);
	DAMAGED(uint32_t, pool->slabs[0]->open, 4);
	DAMAGED(uint32_t, pool->classes[class_].first[KVS_WARM], KVS_NONE);
	DAMAGED(uint32_t, pool->classes[class_].first[KVS_FRESH], KVS_NONE);
	DAMAGED(uint64_t, pool->classes[class_].free_slots, 1);
	DAMAGED(uint32_t, pool->held, 0);
	DAMAGED(uint64_t, pool->ledger.area.bytes, 4096);
}

static void hold(void *ctx, const char *name, int fd)
{
	char *log = ctx;

	assert_true(fcntl(fd, F_GETFD) >= 0);
	strcat(strcat(log, name), " ");
}

/* Of the first slabs of incarnation 7. */
#define ID_0 "538454127b096493"
#define ID_1 "538454127b096494"

POOL_TEST(the_keeper_is_handed_every_new_memfd, pool_set_up(1u << 20, 64u << 10))
{
	char log[256] = "";
	uint32_t class;

	config_.hold = hold;
	config_.hold_ctx = log;
	pool_open();
	assert_string_equal(log, "ledger ");
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	assert_string_equal(log, "ledger slab." ID_0 " digest." ID_0 " ");
	for (uint64_t i = 0; i < 6; i++) {
		put(pool_, class, &plain, i);
	}
	assert_string_equal(log, "ledger slab." ID_0 " digest." ID_0 " slab." ID_1 " digest." ID_1 " ");

	/* A region the host has registered is named with every slot in it. */
	kvs_slab_info_t info;
	kvs_mem_t mem;

	kvs_pool_set_region(pool_, 1, 9);
	kvs_pool_set_region(pool_, 2, 9);
	assert_int_equal(kvs_pool_slab(pool_, 1, &info), KV_OK);
	assert_int_equal(kvs_mem(pool_, (kvs_loc_t){kv_slot_make(1, 0), 1}, &mem), KV_OK);
	assert_int_equal(mem.region, 9);
	assert_ptr_equal(mem.data, info.base);
	assert_int_equal(info.ready_bytes, info.bytes); /* nobody else would touch it */
	assert_int_equal(kvs_mem(pool_, (kvs_loc_t){kv_slot_make(0, 0), 1}, &mem), KV_OK);
	assert_int_equal(mem.region, UINT32_MAX);
}

static void drop(void *ctx, const char *name)
{
	strcat(strcat(strcat(ctx, "-"), name), " ");
}

/* The number's next slab: the first slot's generation goes on. */
static void a_number_used_again(kvs_tier_t *pool, uint32_t class, kvs_loc_t old)
{
	const kvs_rebalance_ops_t *ops = pool->ops->rebalance;
	kvs_meta_t meta = meta_of(1);
	kvs_slab_info_t info;
	kvs_loc_t loc;
	kvs_mem_t mem;

	assert_int_equal(kvs_pool_slab(pool, 0, &info), KV_MISS);
	ops->begin_retire(pool, 1);
	for (uint32_t i = 0; i < 16; i++) {
		kvs_free(pool, (kvs_loc_t){kv_slot_make(1, i), 1});
	}
	assert_int_equal(ops->retire(pool, 1, class), KV_OK);
	assert_int_equal(kvs_pool_release(pool, 1, 1), KV_OK);
	assert_int_equal(kvs_pool_slab(pool, 0, &info), KV_OK);
	do {
		assert_int_equal(kvs_alloc(pool, class, KVS_PUT, 1, &meta, &loc), KV_OK);
	} while (kv_slot_slab(loc.slot) != 0);
	assert_int_equal(loc.gen, 2);
	assert_int_equal(kvs_mem(pool, old, &mem), KV_MISS);
}

/* A slab that a client keeps mapped after it was retired: its pages go, it reads zeros, and the memory is another
 * class's at once. Its number and its digests, which cannot be taken away, are not, until the client has let go; old
 * locations in it stay stale for ever. */
POOL_TEST(p5_the_pages_of_a_slab_that_somebody_keeps_are_taken_away, pool_set_up(400u << 10, 100000))
{
	const kvs_rebalance_ops_t *ops;
	kvs_slab_info_t info;
	kvs_usage_t before, after;
	kvs_meta_t meta = meta_of(1);
	char log[512] = "";
	kvs_loc_t old, loc;
	kvs_mem_t mem;
	uint8_t *mine;
	struct stat st;
	uint32_t a, b;
	int fd;

	config_.hold = hold;
	config_.drop = drop;
	config_.hold_ctx = log;
	pool_open();
	ops = pool_->ops->rebalance;
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &a), KV_OK);
	while (kvs_alloc(pool_, a, KVS_PUT, 1, &meta, &loc) == KV_OK) {
		assert_int_equal(kvs_set_state(pool_, loc, KVS_READY), KV_OK);
	}
	assert_int_equal(kvs_class_open(pool_, "ns", &opaque, &b), KV_OK);
	assert_int_equal(ops->is_short(pool_, b), 1);
	assert_int_equal(kvs_alloc(pool_, b, KVS_PUT, 1, &meta, &loc), KV_ERR_FULL);
	old = (kvs_loc_t){kv_slot_make(0, 0), 1};
	assert_int_equal(kvs_mem(pool_, old, &mem), KV_OK);
	memset(mem.data, 7, 4096);
	assert_int_equal(kvs_pool_slab(pool_, 0, &info), KV_OK);
	fd = dup(info.data_fd);
	mine = mmap(NULL, info.bytes, PROT_READ, MAP_SHARED, fd, 0);
	assert_true(mine != MAP_FAILED && mine[0] == 7);

	assert_int_equal(ops->retire(pool_, 0, b), KV_MISS); /* it has not been told to leave */
	ops->begin_retire(pool_, 0);
	assert_int_equal(ops->retire(pool_, 0, b), KV_ERR_BUSY);
	assert_int_equal(kvs_pool_release(pool_, 0, 1), KV_MISS);
	for (uint32_t i = 0; i < info.slots; i++) {
		kvs_free(pool_, (kvs_loc_t){kv_slot_make(0, i), 1});
	}
	assert_int_equal(kvs_alloc(pool_, a, KVS_PUT, 1, &meta, &loc), KV_ERR_FULL); /* not of this slab */
	assert_int_equal(ops->retire(pool_, 0, b), KV_OK);
	check(pool_);
	kvs_usage(pool_, &before);
	log[0] = '\0';
	assert_int_equal(kvs_pool_release(pool_, 0, 0), KV_OK);
	check(pool_);
	assert_non_null(strstr(log, "-slab." ID_0 " -digest." ID_0 " slab."));
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_blocks, 0);
	assert_int_equal(mine[0], 0);
	assert_int_equal(kvs_alloc(pool_, b, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_not_equal(kv_slot_slab(loc.slot), 0);
	assert_int_equal(kvs_pool_release(pool_, 0, 1), KV_OK);
	check(pool_);
	kvs_usage(pool_, &after);
	assert_true(after.charged_bytes <= after.limit_bytes && before.charged_bytes <= before.limit_bytes);
	assert_int_equal(kvs_mem(pool_, old, &mem), KV_MISS);

	a_number_used_again(pool_, b, old);
	munmap(mine, info.bytes);
	close(fd);
}
