/* nvme_test.h -- what the disk tier's tests share: a tier in a temporary directory with a real clock, and blocks whose
 * bytes follow from a number. */
#ifndef NVME_TEST_H
#define NVME_TEST_H

#include "block_test.h"

#include "kvs/nvme.h"
#include "kvs/pool.h"
#include "kvs/sigbus.h"

#include <poll.h>
#include <time.h>
#include <unistd.h>

#define MIB (UINT64_C(1) << 20)

static const uint8_t space_root[32] = {1, 2, 3};

typedef struct fixture {
	kv_test_env_t test;
	kv_metrics_t metrics;
	char dir[128];
	kvs_nvme_config_t config;
	kvs_tier_t *tier;
	uint32_t slot_class;
	uint32_t lost;  /* slots that the tier has taken back; they were freed */
	uint32_t aside; /* and that it cannot read now */
	char detail[512];
} fixture_t;

/* While a tier closes this clock stands still: what the device still does is waited for however busy the machine is. */
static _Atomic uint64_t __attribute__((unused)) stopped_ns;

static uint64_t __attribute__((unused)) real_now(void *ctx)
{
	const uint64_t stopped = atomic_load(&stopped_ns);
	struct timespec ts;

	(void)ctx;
	clock_gettime(CLOCK_MONOTONIC, &ts);

	return stopped ? stopped : (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static inline void fixture_init(fixture_t *f, const char *dir)
{
	kv_test_env_init(&f->test);
	f->test.env.now_ns = real_now;
	memset(&f->metrics, 0, sizeof f->metrics);
	if (dir) {
		snprintf(f->dir, sizeof f->dir, "%s", dir);
	} else {
		kv_test_dir_make(f->dir, sizeof f->dir);
	}
	f->config = (kvs_nvme_config_t){
		.path = f->dir,
		.limit_bytes = 64 * MIB,
		.file_bytes = 2 * MIB,
		.queue_depth = 16,
		.direct = 1,
		.sync = 1,
		.flush_interval_ns = 20000000,
		.incarnation = 7,
		.metrics = &f->metrics,
	};
	f->tier = NULL;
}

static inline kv_status_t fixture_open(fixture_t *f)
{
	f->detail[0] = '\0';

	return kvs_nvme_open(&f->config, &f->test.env, &f->tier, f->detail, sizeof f->detail);
}

static inline void fixture_close(fixture_t *f)
{
	if (f->test.env.now_ns == real_now) {
		atomic_store(&stopped_ns, real_now(NULL));
	}
	kvs_close(f->tier);
	atomic_store(&stopped_ns, 0);
	f->tier = NULL;
}

static inline void fixture_fini(fixture_t *f)
{
	fixture_close(f);
	kv_test_dir_remove(f->dir);
	assert_int_equal(kv_test_env_live(&f->test), 0);
}

static fixture_t __attribute__((unused)) f_;

/* A test between a `begin` and the end of f_: DISK_TEST(p1_what_it_defends, fixture_fresh()). */
#define DISK_TEST(name, begin) KV_TEST_BETWEEN(name, begin, fixture_fini(&f_))

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Block `depth` of chain `chain`: key, parent and bytes follow from both. */
static inline kv_key_t key_of(uint64_t chain, uint32_t depth)
{
	kv_key_t key;
	uint64_t words[2] = {(chain << 32 | depth) * UINT64_C(0x9e3779b97f4a7c15), chain + 1};

	memcpy(key.b, words, sizeof words);

	return key;
}

static inline kvs_meta_t meta_of(uint64_t chain, uint32_t depth, uint64_t epoch)
{
	kvs_meta_t meta = {.key = key_of(chain, depth), .epoch = epoch, .event_hash = chain ^ depth, .depth = depth};

	if (depth > 1) {
		meta.parent = key_of(chain, depth - 1);
	}
	memcpy(meta.root, space_root, sizeof meta.root);

	return meta;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* Poll until `o` has its answer; fails the test after 20 s. */
static inline kv_status_t await(kvs_tier_t *tier, const outcome_t *o)
{
	uint64_t deadline = real_now(NULL) + UINT64_C(20000000000);

	while (o->calls == 0) {
		struct pollfd wait = {.fd = kvs_event_fd(tier), .events = POLLIN};

		kvs_poll(tier, 64);
		if (o->calls == 0) {
			poll(&wait, 1, 100);
		}
		assert_true(real_now(NULL) < deadline);
	}
	assert_int_equal(o->calls, 1);

	return o->status;
}

static inline kv_status_t store_wait(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *mem)
{
	outcome_t o = {0};
	kv_status_t status = kvs_store(tier, loc, mem, record_outcome, &o);

	return status == KV_OK ? await(tier, &o) : status;
}

static inline kv_status_t load_wait(kvs_tier_t *tier, kvs_loc_t loc, const kvs_mem_t *mem)
{
	outcome_t o = {0};
	kv_status_t status = kvs_load(tier, loc, mem, record_outcome, &o);

	return status == KV_OK ? await(tier, &o) : status;
}

static inline kv_status_t flush_wait(kvs_tier_t *tier)
{
	outcome_t o = {0};
	kv_status_t status = kvs_flush(tier, record_outcome, &o);

	return status == KV_OK ? await(tier, &o) : status;
}

static inline kv_status_t epoch_wait(kvs_tier_t *tier, uint64_t epoch)
{
	outcome_t o = {0};
	kv_status_t status =
		kvs_epoch_set(tier, &(kvs_epoch_t){space_root, "default", "model=test\n", epoch}, record_outcome, &o);

	return status == KV_OK ? await(tier, &o) : status;
}

/* alloc and store one block. */
static inline kv_status_t put_block(fixture_t *f, const kvs_geometry_t *g, uint64_t chain, uint32_t depth,
				    kvs_loc_t *p_loc)
{
	static block_t b;
	kvs_meta_t meta = meta_of(chain, depth, 1);
	kv_status_t status = kvs_alloc(f->tier, f->slot_class, KVS_FILLING, 1, &meta, p_loc);

	if (status != KV_OK) {
		return status;
	}
	block_fill(g, kv_key_hash(&meta.key), &b);

	return store_wait(f->tier, *p_loc, &b.mem);
}

/* Load and compare every byte, leaf and root. */
static inline kv_status_t get_block(fixture_t *f, const kvs_geometry_t *g, uint64_t chain, uint32_t depth,
				    kvs_loc_t loc)
{
	static block_t got;
	kv_key_t key = key_of(chain, depth);
	kv_status_t status;

	block_blank(&got);
	status = load_wait(f->tier, loc, &got.mem);
	if (status == KV_OK) {
		block_check(g, kv_key_hash(&key), &got);
	}

	return status;
}

/* ---- recovery -------------------------------------------------------------------------------- */

#define MAX_FOUND 4096

typedef struct found {
	uint32_t count;
	uint32_t slot_class[MAX_FOUND];
	kvs_loc_t loc[MAX_FOUND];
	kvs_meta_t meta[MAX_FOUND];
} found_t;

static found_t __attribute__((unused)) found_;

static kv_status_t __attribute__((unused))
on_found(void *arg, uint32_t slot_class, kvs_loc_t loc, const kvs_meta_t *meta)
{
	found_t *found = arg;

	assert_true(found->count < MAX_FOUND);
	if (meta->depth > 1) {
		uint32_t i = 0;

		while (i < found->count && !kv_key_equal(&found->meta[i].key, &meta->parent)) {
			i++;
		}
		assert_true(i < found->count); /* the parent came first */
	}
	found->slot_class[found->count] = slot_class;
	found->loc[found->count] = loc;
	found->meta[found->count++] = *meta;

	return KV_OK;
}

/* Index of the block, or -1. */
static inline int found_find(const found_t *found, uint64_t chain, uint32_t depth)
{
	kv_key_t key = key_of(chain, depth);

	for (uint32_t i = 0; i < found->count; i++) {
		if (kv_key_equal(&found->meta[i].key, &key)) {
			return (int)i;
		}
	}

	return -1;
}

static inline void recover(fixture_t *f, found_t *found)
{
	found->count = 0;
	assert_int_equal(kvs_recover(f->tier, on_found, found), KV_OK);
}

static void __attribute__((unused)) on_lost(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group)
{
	fixture_t *f = arg;

	assert_false(kv_key_is_zero(key));
	assert_int_equal(group, 0);
	f->lost++;
	kvs_free(f->tier, loc);
}

static void __attribute__((unused))
on_readable(void *arg, kvs_loc_t loc, const kv_key_t *key, uint8_t group, int readable)
{
	fixture_t *f = arg;

	assert_false(kv_key_is_zero(key));
	assert_int_equal(group, 0);
	assert_int_equal(kvs_readable(f->tier, loc), readable ? KV_OK : KV_ERR_IO);
	f->aside += readable ? UINT32_MAX : 1u;
}

/* Open, recover, and have class and space ready. */
static inline void fixture_begin(fixture_t *f, found_t *found)
{
	kv_status_t status = fixture_open(f);

	/* A metadata process that was killed holds the database until the kernel has ended it. */
	for (uint32_t tries = 0; status == KV_ERR_LOCKED && tries < 6; tries++) {
		status = fixture_open(f);
	}
	if (status != KV_OK) {
		print_error("open: %s\n", f->detail);
	}
	assert_int_equal(status, KV_OK);
	kvs_tier_watch(f->tier, &(kvs_watch_t){.arg = f, .lost = on_lost, .readable = on_readable});
	f->lost = f->aside = 0;
	recover(f, found);
	assert_int_equal(kvs_class_open(f->tier, "default", &plain, &f->slot_class), KV_OK);
	if (kvs_epoch_get(f->tier, space_root) == 0) {
		assert_int_equal(epoch_wait(f->tier, 1), KV_OK);
	}
}

static inline void fixture_reopen(fixture_t *f, found_t *found)
{
	fixture_close(f);
	fixture_begin(f, found);
}

static inline void fixture_fresh(void)
{
	fixture_init(&f_, NULL);
	fixture_begin(&f_, &found_);
}

/* A start, and the next one, that find this number of blocks. */
static inline void begin_finding(uint32_t count)
{
	fixture_begin(&f_, &found_);
	assert_int_equal(found_.count, count);
}

static inline void reopen_finding(uint32_t count)
{
	fixture_close(&f_);
	begin_finding(count);
}

static inline void flush_ok(void)
{
	assert_int_equal(flush_wait(f_.tier), KV_OK);
}

/* The metadata is lost, as a folder that is removed. */
static inline void lose_metadata(const fixture_t *f)
{
	char path[256];

	snprintf(path, sizeof path, "%s/meta", f->dir);
	kv_test_dir_remove(path);
}

static inline void reopen_without_metadata_finding(uint32_t count)
{
	fixture_close(&f_);
	lose_metadata(&f_);
	begin_finding(count);
}

static inline void check_sums(fixture_t *f)
{
	char detail[256];
	kv_status_t status = kvs_check(f->tier, detail, sizeof detail);

	if (status != KV_OK) {
		print_error("%s\n", detail);
	}
	assert_int_equal(status, KV_OK);
}

#endif
