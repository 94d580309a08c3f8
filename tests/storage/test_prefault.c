/* The first touch of fresh memory is slow (0.3 to 1 GB/s): a thread does it ahead of the callers, and it is counted
 * when the thread has not. */
#include "pool_test.h"

#include "cpu/slab/carve.h"

#include "kvs/sigbus.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

#define CHUNK     (UINT64_C(256) << 10) /* the thread's step */
#define HUGE_PAGE (UINT64_C(2) << 20)

/* Wait until the slab is ready: on a busy machine there is little time for it. Progress never goes back. */
static void wait_ready(const kvs_slab_t *slab)
{
	uint64_t last = 0;

	for (int i = 0; i < 200000; i++) {
		uint64_t ready = atomic_load_explicit(&slab->ready_bytes, memory_order_acquire);

		assert_true(ready >= last && ready <= slab->data.bytes);
		if (ready == slab->data.bytes) {
			return;
		}
		last = ready;
		usleep(1000);
	}
	fail_msg("slab %u is not ready", slab->number);
}

static uint64_t given(const kvs_shm_t *area)
{
	struct stat st;

	assert_int_equal(fstat(area->fd, &st), 0);

	return (uint64_t)st.st_blocks * 512u;
}

POOL_TEST(a_slab_is_touched_before_the_first_put, pool_set_up(24u << 20, 8u << 20))
{
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;

	config_.prefault = 1;
	pool_begin();
	kvs_pool_t *pool = kvs_pool_of(pool_);

	assert_int_equal(kvs_pool_slab_count(pool_), 1);
	wait_ready(&pool->slabs[0]->slab);
	assert_int_equal(given(&pool->slabs[0]->slab.data), pool->slabs[0]->slab.data.bytes);
	assert_int_equal(given(&pool->slabs[0]->slab.digest), pool->slabs[0]->slab.digest.bytes);

	/* Slab by slab, each waited for: no put touches fresh memory, and the next slab is begun ahead. */
	for (uint32_t s = 0; s < 2; s++) {
		uint32_t slots = pool->slabs[s]->slab.slots;

		for (uint32_t i = 0; i < slots; i++) {
			assert_int_equal(kvs_alloc(pool_, class_, KVS_PUT, 1, &meta, &loc), KV_OK);
			assert_int_equal(kv_slot_slab(loc.slot), s);
		}
		assert_int_equal(kvs_pool_slab_count(pool_), s + 2);
		wait_ready(&pool->slabs[s + 1]->slab);
	}
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_FIRST_TOUCH), 0);
}

/* As the daemon's loop does in idle moments, until there are this many slabs. */
static void idle_until(kvs_tier_t *tier, uint32_t slabs)
{
	for (int i = 0; i < 200000 && kvs_pool_slab_count(tier) < slabs; i++) {
		kvs_pool_carve_ahead(tier, 0);
		check(tier);
		usleep(1000);
	}
	assert_int_equal(kvs_pool_slab_count(tier), slabs);
}

static void alloc_slots(kvs_tier_t *tier, uint32_t class, uint32_t count)
{
	kvs_meta_t meta = meta_of(1);
	kvs_loc_t loc;

	for (uint32_t i = 0; i < count; i++) {
		assert_int_equal(kvs_alloc(tier, class, KVS_PUT, 1, &meta, &loc), KV_OK);
	}
}

static uint32_t slabs_of(kvs_tier_t *tier, uint32_t class)
{
	kvs_class_info_t look;

	assert_int_equal(kvs_pool_class(tier, class, &look), KV_OK);

	return look.slabs;
}

POOL_TEST(p5_memory_is_touched_ahead_for_the_class_in_use, pool_set_up(64u << 20, 4u << 20))
{
	uint32_t other, class, slots;

	config_.prefault = 1;
	config_.ahead_bytes = 10u << 20; /* and slabs are whole: 12 MiB */
	pool_open();
	kvs_pool_t *pool = kvs_pool_of(pool_);

	/* A size that has been registered gets it before its first put, slab after slab, each touched before the
	 * next. */
	assert_int_equal(kvs_class_open(pool_, "other", &plain, &other), KV_OK);
	idle_until(pool_, 4);
	for (int i = 0; i < 100; i++) {
		kvs_pool_carve_ahead(pool_, 0);
	}
	assert_int_equal(slabs_of(pool_, other), 4);
	wait_ready(&pool->slabs[3]->slab);

	/* The next one too, and from then on the one that takes memory; one slab more for each that is used up. */
	assert_int_equal(kvs_class_open(pool_, "ns", &opaque, &class), KV_OK);
	idle_until(pool_, 8);
	wait_ready(&pool->slabs[7]->slab);
	slots = pool->slabs[4]->slab.slots;
	for (uint32_t s = 9; s <= 11; s++) {
		alloc_slots(pool_, class, slots);
		idle_until(pool_, s);
		wait_ready(&pool->slabs[s - 1]->slab);
	}
	alloc_slots(pool_, other, 1);
	for (int i = 0; i < 100; i++) {
		kvs_pool_carve_ahead(pool_, 0);
	}
	assert_int_equal(slabs_of(pool_, other), 4);
	assert_int_equal(slabs_of(pool_, class), 7);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_FIRST_TOUCH), 0);
}

/* Half of it is enough while blocks move, and once there is that nothing is touched until they rest. */
POOL_TEST(p5_memory_is_touched_ahead_while_blocks_rest, pool_set_up(64u << 20, 4u << 20))
{
	uint32_t class;

	config_.prefault = 1;
	config_.ahead_bytes = 24u << 20;
	pool_open();
	kvs_pool_t *pool = kvs_pool_of(pool_);

	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	for (int i = 0; i < 200000 && slabs_of(pool_, class) < 5; i++) {
		kvs_pool_carve_ahead(pool_, 1);
		usleep(1000);
	}
	wait_ready(&pool->slabs[4]->slab); /* nothing pauses before all that is wanted has been touched */
	for (int i = 0; i < 100; i++) {
		kvs_pool_carve_ahead(pool_, 1);
	}
	assert_int_equal(slabs_of(pool_, class),
			 5); /* a slab is a little less than 4 MiB of blocks, and one is in use */

	/* There is enough: what has been begun waits too. */
	kvs_prefault_pause(pool->prefault, 1);
	usleep(100000);
	assert_int_equal(kvs_pool_carve(pool, class), KV_OK);
	usleep(100000);
	assert_int_equal(atomic_load(&pool->slabs[pool->classes[class].newest]->slab.ready_bytes), 0);
	for (uint32_t i = 0; i < 100; i++) {
		kvs_pool_carve_ahead(pool_, 1);
	}
	assert_int_equal(atomic_load(&pool->slabs[pool->classes[class].newest]->slab.ready_bytes), 0);
	idle_until(pool_, 8);
	wait_ready(&pool->slabs[7]->slab);
}

/* `all`: the first size registered has the whole pool, at once. */
POOL_TEST(p5_the_first_size_takes_all_of_the_pool_when_told_so, pool_set_up(160u << 20, 4u << 20))
{
	uint32_t class, other, slabs;
	kvs_usage_t u;

	config_.prefault = 1;
	config_.ahead_bytes = KVS_AHEAD_ALL;
	pool_open();
	for (int i = 0; i < 4; i++) {
		kvs_pool_carve_ahead(pool_, 0); /* of nothing */
	}
	assert_int_equal(kvs_pool_slab_count(pool_), 0);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	for (int i = 0; i < 4; i++) { /* without waiting for the pages */
		kvs_pool_carve_ahead(pool_, 0);
	}
	kvs_usage(pool_, &u);
	assert_true(u.limit_bytes - u.charged_bytes < 16384);
	slabs = kvs_pool_slab_count(pool_);
	for (uint32_t s = 0; s < slabs; s++) {
		wait_ready(&kvs_pool_of(pool_)->slabs[s]->slab);
	}
	assert_int_equal(kvs_class_open(pool_, "other", &plain, &other), KV_OK);
	assert_int_equal(slabs_of(pool_, other), 0);

	/* What is not used is there for others all the same. */
	pool_->ops->rebalance->begin_retire(pool_, slabs - 2);
	assert_int_equal(pool_->ops->rebalance->retire(pool_, slabs - 2, other), KV_OK);
	assert_int_equal(kvs_pool_release(pool_, slabs - 2, 1), KV_OK);
	kvs_pool_carve_ahead(pool_, 0);
	assert_int_equal(slabs_of(pool_, other), 1);
}

/* A slab that is retired while it is being touched: it is let go within a chunk, and one that only waits for it at
 * once. */
POOL_TEST(p5_a_slab_is_let_go_while_it_is_being_touched, pool_set_up(1200u << 20, 256u << 20))
{
	uint32_t other;

	config_.prefault = 1;
	config_.ahead_bytes = KVS_AHEAD_ALL;
	pool_begin();
	kvs_pool_carve_ahead(pool_, 0);
	assert_int_equal(kvs_class_open(pool_, "other", &plain, &other), KV_OK);
	usleep(2000);
	for (uint32_t s = 0; s < 4; s++) {
		kv_status_t status = KV_ERR_BUSY;

		pool_->ops->rebalance->begin_retire(pool_, s);
		assert_int_equal(pool_->ops->rebalance->retire(pool_, s, other), KV_OK);
		for (int i = 0; i < 20000 && status == KV_ERR_BUSY; i++) {
			status = kvs_pool_release(pool_, s, 1);
			usleep(status == KV_ERR_BUSY ? 1000 : 0);
		}
		assert_int_equal(status, KV_OK);
		check(pool_);
	}
}

KV_TEST(p5_close_does_not_wait_for_a_whole_slab)
{
	struct timespec a, b;

	pool_set_up(1u << 30, 1u << 30);
	config_.prefault = 1;
	pool_begin();
	usleep(2000);
	clock_gettime(CLOCK_MONOTONIC, &a);
	pool_end();
	clock_gettime(CLOCK_MONOTONIC, &b);
	assert_true(b.tv_sec - a.tv_sec <= 2); /* touching it all takes longer */
	assert_int_equal(kv_test_env_live(&t_), 0);
}

/* What is done on kernels without MADV_POPULATE_WRITE: no byte that a client writes meanwhile may be lost. */
typedef struct writer {
	uint8_t *base;
	size_t n;
} writer_t;

static void *write_all(void *arg)
{
	writer_t *w = arg;

	for (size_t at = 0; at < w->n; at += 4096) {
		__atomic_store_n(w->base + at, 0x77, __ATOMIC_RELAXED);
	}

	return NULL;
}

KV_TEST(p1_touching_loses_no_byte_a_client_writes)
{
	writer_t w = {NULL, 8u << 20};
	pthread_t thread;

	assert_int_equal(kvs_sigbus_install(), KV_OK);
	for (int round = 0; round < 5; round++) {
		int fd = memfd_create("test", MFD_CLOEXEC);

		assert_int_equal(ftruncate(fd, (off_t)w.n), 0);
		w.base = mmap(NULL, w.n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
		assert_true(w.base != MAP_FAILED);
		assert_int_equal(pthread_create(&thread, NULL, write_all, &w), 0);
		assert_int_equal(kvs_sigbus_touch_pages(w.base, w.n), KV_OK);
		pthread_join(thread, NULL);
		for (size_t at = 0; at < w.n; at += 4096) {
			assert_int_equal(w.base[at], 0x77);
		}
		assert_int_equal(ftruncate(fd, 4096), 0);
		assert_int_equal(kvs_sigbus_touch_pages(w.base, w.n), KV_ERR_FAULT);
		munmap(w.base, w.n);
		close(fd);
	}
}

static atomic_int populate_calls;
static int populate_error;

static int no_populate(void *base, uint64_t bytes)
{
	(void)base;
	(void)bytes;

	return atomic_fetch_add(&populate_calls, 1) < 2 ? -EAGAIN : -populate_error;
}

/* 1: pages of a pool's data are refused; 2: they take their time. */
static atomic_int refuse_data;

static int data_refused(void *base, uint64_t bytes)
{
	if (bytes != CHUNK && bytes < 1u << 20) {
		return kvs_sys_posix.populate(base, bytes); /* ledger and digests */
	}
	while (atomic_load(&refuse_data) == 2) {
		usleep(1000);
	}

	return atomic_load(&refuse_data) ? -ENOMEM : kvs_sys_posix.populate(base, bytes);
}

/* Bytes of this process that are in memory. */
static uint64_t resident(void)
{
	unsigned long size, pages = 0;
	FILE *file = fopen("/proc/self/statm", "re");

	assert_non_null(file);
	assert_int_equal(fscanf(file, "%lu %lu", &size, &pages), 2);
	fclose(file);

	return pages * UINT64_C(4096);
}

/* An old kernel: pages are made by touching. */
POOL_TEST(a_kernel_without_populate_is_served_by_touching, pool_set_up(5u << 20, 8u << 20))
{
	sys_.populate = no_populate;
	populate_error = EINVAL;
	config_.prefault = 1;
	pool_begin();
	wait_ready(&kvs_pool_of(pool_)->slabs[0]->slab);
	assert_int_equal(given(&kvs_pool_of(pool_)->slabs[0]->slab.data),
			 kvs_pool_of(pool_)->slabs[0]->slab.data.bytes);
}

/* Memory is refused: the pool is full where it is, says so once, and grows when there is memory again. */
KV_TEST(p6_a_machine_without_memory_has_a_full_pool_until_there_is_some)
{
	for (int prefault = 0; prefault <= 1; prefault++) {
		uint32_t class;

		pool_set_up(2u << 20, 8u << 20);
		sys_.populate = data_refused;
		atomic_store(&refuse_data, 0);
		sys_.collapse = NULL;
		config_.prefault = prefault;
		pool_open();
		atomic_store(&refuse_data, 1);
		assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
		for (int round = 0; round < 3; round++) {
			assert_int_equal(alloc_settled(pool_, class, KVS_PUT), KV_ERR_FULL);
			kv_test_advance(&t_, UINT64_C(1000000001));
			kvs_pool_carve_ahead(pool_, 0);
			check(pool_);
		}
		assert_int_equal(atomic_load(&t_.lines[KV_LOG_WARN]), prefault ? 1 : 3); /* no slab was made */
		assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_MEMORY_REFUSED) >= 1, prefault);
		atomic_store(&refuse_data, 0);
		for (int i = 0; i < 2000 && alloc_settled(pool_, class, KVS_PUT) != KV_OK; i++) {
			kv_test_advance(&t_, UINT64_C(1000000001));
			kvs_pool_carve_ahead(pool_, 0);
		}
		assert_int_equal(kvs_pool_of(pool_)->usage.used_slots, 1);
		pool_end();
	}
}

/* A memory group at its limit kills, and refuses nothing: it is asked before. */
static _Atomic uint64_t room_bytes;

static uint64_t room(void *ctx)
{
	(void)ctx;

	return atomic_load(&room_bytes);
}

POOL_TEST(p6_what_does_not_fit_a_limit_of_memory_is_not_touched, pool_set_up(64u << 20, 32u << 20))
{
	config_.prefault = 1;
	config_.room = room;
	atomic_store(&room_bytes, 4u << 20);
	pool_begin();
	assert_int_equal(alloc_settled(pool_, class_, KVS_PUT), KV_ERR_FULL);
	assert_int_equal(alloc_settled(pool_, class_, KVS_FILLING), KV_ERR_FULL);
	assert_int_equal(given(&kvs_pool_of(pool_)->slabs[0]->slab.data), 0);
	atomic_store(&room_bytes, 1u << 30);
	for (int i = 0; i < 2000 && alloc_settled(pool_, class_, KVS_PUT) != KV_OK; i++) {
		kv_test_advance(&t_, UINT64_C(1000000001));
		kvs_pool_carve_ahead(pool_, 0);
	}
	assert_int_equal(kvs_pool_of(pool_)->usage.used_slots, 1);
}

/* The thread stands still: what is not touched is lent to nobody, and there is nothing that need be evicted for it. */
POOL_TEST(p6_no_slot_is_lent_before_the_daemon_has_touched_it, pool_set_up(8u << 20, 4u << 20))
{
	kvs_meta_t meta = meta_of(1);
	kvs_slab_info_t info;
	kvs_loc_t loc, filled;
	kvs_mem_t mem;
	uint32_t class;
	kv_status_t status;

	sys_.populate = data_refused;
	sys_.collapse = NULL;
	config_.prefault = 1;
	atomic_store(&refuse_data, 0);
	pool_open();
	atomic_store(&refuse_data, 2);
	assert_int_equal(kvs_class_open(pool_, "ns", &plain, &class), KV_OK);
	for (int i = 0; i < 10; i++) {
		assert_int_equal(kvs_alloc(pool_, class, KVS_PUT, 1, &meta, &loc), KV_ERR_BUSY);
	}
	assert_int_equal(kvs_pool_slab_count(pool_), 1);
	/* What is read from disk has its slot, and waits for the memory. */
	assert_int_equal(kvs_alloc(pool_, class, KVS_FILLING, 1, &meta, &filled), KV_OK);
	assert_int_equal(kvs_mem(pool_, filled, &mem), KV_ERR_BUSY);
	assert_int_equal(given(&kvs_pool_of(pool_)->slabs[0]->slab.data), 0);
	kvs_free(pool_, filled);
	assert_int_equal(kvs_alloc(pool_, class, KVS_PUT, 1, &meta, &loc), KV_ERR_BUSY); /* nor one that was freed */
	assert_int_equal(kvs_alloc(pool_, class, KVS_FILLING, 1, &meta, &filled), KV_OK);
	atomic_store(&refuse_data, 0);
	for (uint32_t n = 0; (status = alloc_settled(pool_, class, KVS_PUT)) == KV_OK; n++) {
		assert_int_equal(kvs_pool_slab(pool_, kvs_pool_slab_count(pool_) - 1, &info), KV_OK);
	}
	assert_int_equal(status, KV_ERR_FULL);
	while (kvs_mem(pool_, filled, &mem) == KV_ERR_BUSY) {
		usleep(1000);
	}
	assert_int_equal(kvs_mem(pool_, filled, &mem), KV_OK);
}

/* A client takes pages away: they are there again before the next slot is given out. */
KV_TEST(p6_pages_that_a_client_has_taken_away_are_touched_again)
{
	for (int prefault = 0; prefault <= 1; prefault++) {
		const kvs_slab_t *slab;
		kvs_loc_t loc;

		pool_set_up(4u << 20, 4u << 20);
		config_.prefault = prefault;
		pool_begin();
		assert_int_equal(alloc_settled(pool_, class_, KVS_PUT), KV_OK);
		slab = &kvs_pool_of(pool_)->slabs[0]->slab;
		if (prefault) {
			wait_ready(slab);
		}
		loc = (kvs_loc_t){kv_slot_make(0, 0), 1};
		kvs_free(pool_, loc);
		assert_int_equal(
			fallocate(slab->data.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, (off_t)slab->stride),
			0);
		for (int i = 0; i < 2000 && kv_metric_get(&metrics_, KV_M_SLAB_FAULTS) == 0; i++) {
			kv_test_advance(&t_, UINT64_C(100000000));
			kvs_pool_carve_ahead(pool_, 0);
			usleep(1000);
		}
		assert_int_equal(kv_metric_get(&metrics_, KV_M_SLAB_FAULTS), 1);
		assert_int_equal(alloc_settled(pool_, class_, KVS_PUT), KV_OK);
		assert_true(given(&slab->data) >= slab->stride);
		assert_true(kvs_slab_ready(slab, 0));
		pool_end();
	}
}

/* Reserved huge pages as a control group without any has them: they can be mapped, and are refused when they are
 * touched. Here a mapping of small pages plays them. */
static void *huge_base;
static int next_is_huge;

/* The third page of a slab is in it. */
static int refuses(const void *base, uint64_t bytes)
{
	const uint8_t *first = base, *bad = huge_base ? (uint8_t *)huge_base + 2 * HUGE_PAGE : NULL;

	return bad && first <= bad && bad < first + bytes;
}

static int lent_memfd(const char *name, int huge, int *p_fd)
{
	next_is_huge = huge;

	return kvs_sys_posix.memfd(name, 0, p_fd);
}

static int lent_map(int fd, uint64_t bytes, void **p_base)
{
	int error = kvs_sys_posix.map(fd, bytes, p_base);

	if (!error && (next_is_huge || refuses(*p_base, bytes))) {
		huge_base = next_is_huge ? *p_base : NULL; /* gone, and its address is another's */
	}

	return error;
}

static int lent_populate(void *base, uint64_t bytes)
{
	return refuses(base, bytes) ? -EFAULT : kvs_sys_posix.populate(base, bytes);
}

KV_TEST(p6_huge_pages_that_a_group_may_not_use_are_replaced_by_small_ones)
{
	for (int prefault = 0; prefault <= 1; prefault++) {
		kvs_slab_info_t info;

		pool_set_up(32u << 20, 8u << 20);
		huge_base = NULL;
		sys_.memfd = lent_memfd;
		sys_.map = lent_map;
		sys_.populate = lent_populate;
		sys_.collapse = NULL;
		config_.prefault = prefault;
		config_.huge = KVS_HUGE_AUTO;
		pool_begin();
		/* Nobody hears of a slab that may yet go. */
		if (kvs_pool_slab(pool_, 0, &info) == KV_OK) {
			assert_false(info.huge);
		}
		assert_int_equal(alloc_settled(pool_, class_, KVS_PUT), KV_OK);
		for (uint32_t i = 0; i < kvs_pool_slab_count(pool_); i++) {
			assert_int_equal(kvs_pool_slab(pool_, i, &info), KV_OK);
			assert_false(info.huge);
		}
		assert_int_equal(kvs_pool_slabs_held(pool_), 1);
		assert_false(kvs_pool_of(pool_)->huge);
		while (alloc_settled(pool_, class_, KVS_PUT) == KV_OK) {
		}
		pool_end();
	}
}

/* A pool as large as no machine costs nothing before it is used. */
POOL_TEST(p5_memory_follows_use, pool_set_up(UINT64_C(1) << 40, 64u << 20))
{
	struct timespec a, b;
	uint64_t before = resident();

	config_.prefault = 1;
	clock_gettime(CLOCK_MONOTONIC, &a);
	pool_open();
	clock_gettime(CLOCK_MONOTONIC, &b);
	assert_true(b.tv_sec - a.tv_sec <= 2);
	assert_true(resident() - before < 32u << 20);
}

static atomic_uint collapse_calls;
static int collapse_answer;

static int fake_collapse(void *base)
{
	assert_int_equal((uintptr_t)base % HUGE_PAGE, 0);
	atomic_fetch_add(&collapse_calls, 1);

	return collapse_answer ? collapse_answer : kvs_sys_posix.populate(base, HUGE_PAGE);
}

/* Slabs of 8 MiB, the first one ready: how many huge pages were asked for. */
static uint32_t asked_for(kvs_huge_t huge, int answer)
{
	const kvs_slab_t *slab;

	pool_set_up(24u << 20, 8u << 20);
	sys_.collapse = fake_collapse;
	atomic_store(&collapse_calls, 0);
	collapse_answer = answer;
	config_.prefault = 1;
	config_.huge = huge;
	pool_begin();
	slab = &kvs_pool_of(pool_)->slabs[0]->slab;
	assert_true(slab->data.bytes > 3 * HUGE_PAGE);
	wait_ready(slab);
	assert_int_equal(given(&slab->data), slab->data.bytes);
	kvs_pool_carve_ahead(pool_, 0);
	if (huge == KVS_HUGE_OFF || (answer != 0 && !kvs_thp_works((char[64]){0}, 64))) {
		assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_HUGE_PAGES), 0);
	} else {
		assert_int_equal(kv_metric_get(&metrics_, KV_M_CPU_HUGE_PAGES), 1);
	}
	put(pool_, class_, &plain, 1);
	pool_end();

	return atomic_load(&collapse_calls);
}

KV_TEST(a_slab_gets_huge_pages_where_the_kernel_grants_them)
{
	assert_in_range(asked_for(KVS_HUGE_AUTO, 0), 3, 4);
	assert_in_range(asked_for(KVS_HUGE_AUTO, -ENOMEM), 3, 4); /* none now: small ones, and the next is tried */
	assert_in_range(asked_for(KVS_HUGE_AUTO, -EEXIST), 3, 4);
	assert_int_equal(asked_for(KVS_HUGE_AUTO, -EINVAL), 1); /* never here */
	assert_int_equal(asked_for(KVS_HUGE_OFF, 0), 0);
}

/* The real call: what has been written is left alone, what nobody has touched becomes one page that reads as zeroes. */
KV_TEST(a_huge_page_is_made_only_where_nothing_is)
{
	kvs_shm_t area;
	unsigned char there[HUGE_PAGE / 4096];
	int result;

	assert_int_equal(kvs_shm_create(&kvs_sys_posix, "test", 3 * HUGE_PAGE, 0, F_SEAL_SHRINK | F_SEAL_GROW, &area),
			 0);
	assert_int_equal((uintptr_t)area.base % HUGE_PAGE, 0);
	area.base[HUGE_PAGE + 5000] = 7;
	assert_int_equal(kvs_sys_posix.collapse(area.base + HUGE_PAGE), -EEXIST);
	assert_int_equal(area.base[HUGE_PAGE + 5000], 7);
	result = kvs_sys_posix.collapse(area.base);
	if (result != 0) {
		print_message("no huge pages here: %s\n", strerror(-result));
	} else {
		assert_int_equal(mincore(area.base, HUGE_PAGE, there), 0);
		for (size_t i = 0; i < sizeof there; i++) {
			assert_int_equal(there[i] & 1, 1);
		}
	}
	for (size_t i = 0; i < HUGE_PAGE; i += 4096) {
		assert_int_equal(area.base[i], 0);
	}
	kvs_shm_destroy(&area);
}
