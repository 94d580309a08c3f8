/* Limits, exact to the byte and to the block; and what the kernel may refuse. */
#include "pool_test.h"

#include "cpu/slab/carve.h"

#include <errno.h>
#include <sys/resource.h>
#include <sys/stat.h>

static const kvs_geometry_t shapes[] = {
	{.block_bytes = 1, .heads = 1, .leaves = 1, .leaf_bytes = 1, .page_bytes = 1},
	{.block_bytes = 4096, .heads = 1, .leaves = 1, .leaf_bytes = 4096, .page_bytes = 4096},
	{.block_bytes = 4097, .heads = 1, .leaves = 1, .leaf_bytes = 4097, .page_bytes = 4097},
	{.block_bytes = 65536, .heads = 8, .leaves = 32, .leaf_bytes = 256, .page_bytes = 256},
	{.block_bytes = 12288, .heads = 2, .leaves = 3, .leaf_bytes = 2048, .page_bytes = 2048},
	{.block_bytes = 10000, .heads = 1, .leaves = 4, .leaf_bytes = 4096, .page_bytes = 5000},
	{.block_bytes = 1u << 20, .heads = 8, .leaves = 16, .leaf_bytes = 8192, .page_bytes = 8192},
};

static uint64_t fill(kvs_tier_t *pool, uint32_t class)
{
	uint64_t n = 0;
	kv_status_t status;

	while ((status = alloc_settled(pool, class, KVS_PUT)) == KV_OK) {
		n++;
	}
	assert_int_equal(status, KV_ERR_FULL);

	return n;
}

KV_TEST(p5_the_limit_holds_to_the_byte_and_wastes_no_block)
{
	static const uint64_t limits[] = {64u << 10, (256u << 10) + 1, 1000003, 4u << 20, (40u << 20) - 4096};
	static const uint64_t slabs[] = {1, 4096, 100000, 1u << 20, 64u << 20};

	for (size_t i = 0; i < KV_COUNT_OF(shapes) * KV_COUNT_OF(limits) * KV_COUNT_OF(slabs); i++) {
		const kvs_geometry_t *g = &shapes[i % KV_COUNT_OF(shapes)];
		uint64_t limit = limits[i / KV_COUNT_OF(shapes) % KV_COUNT_OF(limits)];
		uint64_t slab = slabs[i / KV_COUNT_OF(shapes) / KV_COUNT_OF(limits)];
		kvs_usage_t u;
		uint32_t class;

		pool_set_up(limit, slab);
		pool_open();
		assert_int_equal(kvs_class_open(pool_, "ns", g, &class), KV_OK);
		uint64_t n = fill(pool_, class);

		kvs_usage(pool_, &u);
		assert_int_equal(u.slots, n);
		assert_int_equal(u.used_slots, n);
		assert_true(u.charged_bytes <= limit);
		assert_true(kvs_pool_slab_count(pool_) < KVS_POOL_MAX_SLABS);
		assert_true(u.charged_bytes + kvs_pool_slab_cost(kvs_pool_of(pool_), g, 1, 4096) > limit);
		assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_BYTES), u.charged_bytes);
		pool_end();
	}
}

KV_TEST(p5_max_blocks_is_exact)
{
	static const uint64_t counts[] = {1, 2, 15, 16, 17, 333, 1000};

	for (size_t i = 0; i < KV_COUNT_OF(counts) * 2; i++) {
		uint32_t a, b;

		pool_set_up(64u << 20, i % 2 ? 200000 : 32u << 20);
		config_.max_blocks = counts[i / 2];
		config_.prefault = (int)(i % 3 == 0);
		pool_open();
		assert_int_equal(kvs_class_open(pool_, "a", &plain, &a), KV_OK);
		assert_int_equal(kvs_class_open(pool_, "b", &plain, &b), KV_OK);
		assert_int_equal(fill(pool_, a) + fill(pool_, b), counts[i / 2]);
		pool_end();
	}
}

/* What the kernel has really given, page by page, is never more than what is charged. */
POOL_TEST(p5_no_touched_page_is_left_uncharged, pool_set_up(8u << 20, 1u << 20))
{
	kvs_usage_t u;
	uint64_t given = 0;
	uint32_t class;

	pool_open();
	assert_int_equal(kvs_class_open(pool_, "ns", &shapes[3], &class), KV_OK);
	fill(pool_, class);
	kvs_pool_t *pool = kvs_pool_of(pool_);
	const kvs_shm_t *areas[64] = {&pool->ledger.area};
	uint32_t n = 1;

	for (uint64_t id = 1; kvs_pool_add_record(pool_, &(kvs_record_t){.id = id, .kind = 1}) == KV_OK; id++) {
		continue;
	}
	for (uint32_t i = 0; i < pool->slab_count; i++) {
		memset(pool->slabs[i]->slab.data.base, 1, pool->slabs[i]->slab.data.bytes);
		memset(pool->slabs[i]->slab.digest.base, 1, pool->slabs[i]->slab.digest.bytes);
		areas[n++] = &pool->slabs[i]->slab.data;
		areas[n++] = &pool->slabs[i]->slab.digest;
	}
	for (uint32_t i = 0; i < n; i++) {
		struct stat st;

		assert_int_equal(fstat(areas[i]->fd, &st), 0);
		given += (uint64_t)st.st_blocks * 512u;
	}
	kvs_usage(pool_, &u);
	assert_true(given > u.charged_bytes / 10 * 9);
	assert_true(given <= u.charged_bytes && u.charged_bytes <= config_.limit_bytes);
}

/* ---- failing system calls -------------------------------------------------------------------- */

static uint64_t sys_calls, sys_fail_at;
static int sys_error;

static int sys_fails(void)
{
	return ++sys_calls == sys_fail_at ? -sys_error : 0;
}

/* A call that fails when its turn has come. */
#define FAILING(call, parameters, ...)                                                                                 \
	static int fail_##call parameters                                                                              \
	{                                                                                                              \
		int error = sys_fails();                                                                               \
                                                                                                                       \
		return error ? error : kvs_sys_posix.call(__VA_ARGS__);                                                \
	}

FAILING(memfd, (const char *name, int huge, int *p_fd), name, huge, p_fd)
FAILING(resize, (int fd, uint64_t bytes), fd, bytes)
FAILING(map, (int fd, uint64_t bytes, void **p_base), fd, bytes, p_base)
FAILING(seal, (int fd, int seals), fd, seals)
FAILING(populate, (void *base, uint64_t bytes), base, bytes)

static const kvs_sys_t sys_failing = {
	.memfd = fail_memfd, .resize = fail_resize, .map = fail_map, .seal = fail_seal, .populate = fail_populate};

KV_TEST(p6_every_refusal_of_the_kernel_is_survived)
{
	static const int errors[] = {EMFILE, ENOMEM};
	const uint32_t fds = kv_test_count_fds(getpid(), "");
	uint64_t undisturbed = 0;

	for (uint64_t n = 0; n <= 48; n++) {
		uint64_t slots = 0;

		pool_set_up(1u << 20, 64u << 10);
		config_.huge = n % 2 ? KVS_HUGE_AUTO : KVS_HUGE_OFF;
		sys_calls = 0;
		sys_fail_at = n;
		sys_error = errors[n / 2 % 2];
		kv_status_t status = kvs_pool_open_with(&config_, &t_.env, &sys_failing, &pool_);

		assert_int_equal(status, n < 1 || n > 5 ? KV_OK : sys_error == ENOMEM ? KV_ERR_NOMEM : KV_ERR_BUSY);
		if (status == KV_OK) {
			assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class_), KV_OK);
			slots = fill(pool_, class_);
			check(pool_);
			/* The cause is gone and a second has passed: the rest is carved. */
			kv_test_advance(&t_, UINT64_C(1000000001));
			slots += fill(pool_, class_);
			undisturbed = n ? undisturbed : slots;
			assert_int_equal(slots, undisturbed);
		}
		pool_end();
		assert_int_equal(kv_test_count_fds(getpid(), ""), fds);
	}
}

/* Running out of descriptors says nothing about huge pages: they are asked for again later. */
POOL_TEST(p6_no_descriptor_is_not_taken_for_no_huge_page, pool_set_up(8u << 20, 2u << 20))
{
	config_.huge = KVS_HUGE_ON;
	sys_calls = 0;
	sys_fail_at = 6; /* five made the ledger */
	sys_error = EMFILE;
	assert_int_equal(kvs_pool_open_with(&config_, &t_.env, &sys_failing, &pool_), KV_OK);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class_), KV_OK);
	assert_int_equal(kvs_pool_slab_count(pool_), 0);
	assert_true(kvs_pool_of(pool_)->huge);
}

KV_TEST(p6_every_failed_allocation_is_survived)
{
	const uint32_t fds = kv_test_count_fds(getpid(), "");

	pool_set_up(256u << 10, 64u << 10);
	config_.prefault = 1;
	KV_TEST_EACH_FAILURE(&t_, n)
	{
		outcome_t o = {0, KV_OK};

		kv_status_t status = kvs_pool_open(&config_, &t_.env, &pool_);

		if (status == KV_OK) {
			assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class_), KV_OK);
			fill(pool_, class_);
			status = kvs_epoch_set(pool_, &(kvs_epoch_t){(const uint8_t[32]){1}, "ns", "text", 1},
					       record_outcome, &o);
			assert_int_equal(o.calls, status == KV_OK);
		}
		assert_true(status == KV_OK || (status == KV_ERR_NOMEM && kv_test_failed(&t_)));
		pool_end();
		assert_int_equal(kv_test_count_fds(getpid(), ""), fds);
	}
}

POOL_TEST(p6_descriptors_run_out_and_come_back, pool_set_up(1u << 20, 64u << 10))
{
	struct rlimit old, tight;
	kvs_usage_t u;
	uint32_t class;

	pool_open();
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	tight = old;
	tight.rlim_cur = (rlim_t)kvs_pool_of(pool_)->ledger.area.fd + 4;
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &tight), 0);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	fill(pool_, class);
	kvs_usage(pool_, &u);
	assert_true(u.slots > 0 && u.slots < 70);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_int_equal(fill(pool_, class), 0); /* the kernel is not asked again at once */
	kv_test_advance(&t_, UINT64_C(1000000001));
	assert_true(fill(pool_, class) > 0);
}

/* The keeper's descriptor whose word was lost, a mapping of the same process's connection before: what the limit no
 * longer counts has no owner. */
POOL_TEST(p5_a_slab_leaves_no_pages_with_whoever_has_it_unheard_of, pool_begun(400u << 10, 100000))
{
	kvs_slab_info_t info;
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;
	kvs_mem_t mem;
	struct stat st;
	int fd;

	assert_int_equal(kvs_alloc(pool_, class_, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(kvs_mem(pool_, loc, &mem), KV_OK);
	memset(mem.data, 7, 4096);
	assert_int_equal(kvs_pool_slab(pool_, kv_slot_slab(loc.slot), &info), KV_OK);
	fd = dup(info.data_fd);
	assert_true(fd >= 0 && fstat(fd, &st) == 0 && st.st_blocks > 0);

	pool_->ops->rebalance->begin_retire(pool_, info.slab);
	kvs_free(pool_, loc);
	assert_int_equal(pool_->ops->rebalance->retire(pool_, info.slab, class_), KV_OK);
	assert_int_equal(kvs_pool_release(pool_, info.slab, 1), KV_OK);
	assert_int_equal(fstat(fd, &st), 0);
	assert_int_equal(st.st_blocks, 0);
	close(fd);
}
