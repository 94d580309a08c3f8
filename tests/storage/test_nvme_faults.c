/* Faults of the world around the disk tier: no memory, no io_uring, little memlock, a device that fails. */
#include "nvme_test.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>

/* A directory in memory, where that is at hand: these tests open many tiers. */
static void fixture_init_fast(fixture_t *f)
{
	char dir[64] = "/dev/shm/kvd-test-XXXXXX";

	fixture_init(f, mkdtemp(dir) ? dir : NULL);
	f->config.sync = 0;
}

static kv_status_t whole_life(fixture_t *f)
{
	kvs_loc_t loc;
	kv_status_t status = fixture_open(f);

	if (status != KV_OK) {
		return status;
	}
	found_.count = 0;
	status = kvs_recover(f->tier, on_found, &found_);
	if (status == KV_OK) {
		status = kvs_class_open(f->tier, "default", &plain, &f->slot_class);
	}
	if (status == KV_OK) {
		status = epoch_wait(f->tier, 1);
	}
	if (status == KV_OK) {
		status = put_block(f, &plain, 1, 1, &loc);
	}
	if (status == KV_OK) {
		status = flush_wait(f->tier);
	}
	if (status == KV_OK) {
		status = get_block(f, &plain, 1, 1, loc);
	}

	return status;
}

DISK_TEST(p5_each_allocation_may_fail, fixture_init_fast(&f_))
{
	uint32_t failures = 0;

	KV_TEST_EACH_FAILURE(&f_.test, n)
	{
		kv_status_t status = whole_life(&f_);

		assert_true(status == KV_OK || (status == KV_ERR_NOMEM && kv_test_failed(&f_.test)));
		failures += status != KV_OK;
		fixture_close(&f_);
		assert_int_equal(kv_test_env_live(&f_.test), 0);
	}
	assert_true(failures > 10);
}

/* Writes beyond a file size limit fail, a short one first, then with errors, until the tier has had enough of them.
 * Blocks 1 to 4 are good before. */
static void switch_off(fixture_t *f, struct rlimit *before, kvs_loc_t *p_fourth)
{
	struct rlimit small;
	kvs_loc_t loc;

	signal(SIGXFSZ, SIG_IGN);
	assert_int_equal(put_block(f, &plain, 1, 1, &loc), KV_OK);
	assert_int_equal(getrlimit(RLIMIT_FSIZE, before), 0);
	small = (struct rlimit){.rlim_cur = 16384 * 4 + 1024, .rlim_max = before->rlim_max};
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
	for (uint32_t d = 2; d <= 4; d++) {
		assert_int_equal(put_block(f, &plain, 1, d, p_fourth), KV_OK);
	}
	assert_int_equal(flush_wait(f->tier), KV_OK);
	for (uint32_t failed = 0; failed < 8; failed++) {
		assert_int_equal(put_block(f, &plain, 1, 5 + failed, &loc), KV_ERR_IO);
	}
	assert_int_equal(kv_metric_get(&f->metrics, KV_M_DISK_STATE), KVS_HEALTH_READ_ONLY);
}

/* The tier tries again without help, and works. */
static void wait_works(fixture_t *f)
{
	const uint64_t deadline = real_now(NULL) + UINT64_C(20000000000);

	while (kv_metric_get(&f->metrics, KV_M_DISK_STATE) != KVS_HEALTH_OK) {
		struct pollfd wait = {.fd = kvs_event_fd(f->tier), .events = POLLIN};

		poll(&wait, 1, 5000); /* it wakes its owner for the probe */
		kvs_poll(f->tier, 64);
		assert_true(real_now(NULL) < deadline);
	}
}

static void wait_on_again(fixture_t *f, const struct rlimit *before)
{
	assert_int_equal(setrlimit(RLIMIT_FSIZE, before), 0);
	wait_works(f);
}

DISK_TEST(p6_failed_writes_are_quarantined_and_many_stop_the_tier, fixture_fresh())
{
	struct rlimit before;
	kvs_tier_state_t tier;
	kvs_usage_t usage;
	kvs_loc_t loc, fourth;

	switch_off(&f_, &before, &fourth);
	kvs_tier_state(f_.tier, &tier);
	assert_int_equal(tier.health, KVS_HEALTH_READ_ONLY);
	assert_string_equal(tier.reason, "writing a slot: File too large");
	assert_int_equal(get_block(&f_, &plain, 1, 4, fourth), KV_OK);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.quarantined_slots, 8);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS), 8);
	assert_int_equal(put_block(&f_, &plain, 1, 20, &loc), KV_ERR_TIER_OFF);
	assert_int_equal(flush_wait(f_.tier), KV_ERR_TIER_OFF);
	assert_int_equal(epoch_wait(f_.tier, 9), KV_ERR_TIER_OFF);
	check_sums(&f_);

	wait_on_again(&f_, &before);
	assert_int_equal(put_block(&f_, &plain, 1, 5, &loc), KV_OK);
	flush_ok();
	reopen_finding(5); /* what failed was never acknowledged, and is not there */
}

/* Else a model that attaches meanwhile would have no cache in memory either. */
DISK_TEST(p6_a_class_opened_while_the_tier_is_off_is_kept_later, fixture_fresh())
{
	struct rlimit before;
	kvs_loc_t loc;

	switch_off(&f_, &before, &loc);
	assert_int_equal(kvs_class_open(f_.tier, "default", &opaque, &f_.slot_class), KV_OK);
	assert_int_equal(put_block(&f_, &opaque, 2, 1, &loc), KV_ERR_TIER_OFF);

	wait_on_again(&f_, &before);
	assert_int_equal(put_block(&f_, &opaque, 2, 1, &loc), KV_OK);
	assert_int_equal(get_block(&f_, &opaque, 2, 1, loc), KV_OK);
	flush_ok();
	reopen_finding(5);
}

DISK_TEST(p6_memory_taken_away_is_a_fault_and_the_block_stays_good, fixture_fresh())
{
	kvs_loc_t loc;
	block_t b;
	kvs_mem_t mem;
	int fd = memfd_create("slab", MFD_CLOEXEC);
	uint8_t *data;

	assert_int_equal(ftruncate(fd, 16384), 0);
	data = mmap(NULL, 16384, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_true(data != MAP_FAILED);
	assert_int_equal(ftruncate(fd, 0), 0);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	block_blank(&b);
	mem = (kvs_mem_t){data, b.leaves, b.roots, UINT32_MAX};
	assert_int_equal(load_wait(f_.tier, loc, &mem), KV_ERR_FAULT);
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc), KV_OK);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS), 0);
	munmap(data, 16384);
	close(fd);
}

static _Atomic int starved;
static _Atomic uint64_t hurry_ns;

static void *alloc_unless_starved(void *ctx, size_t n)
{
	return atomic_load(&starved) ? NULL : kv_test_env_alloc(ctx, n);
}

/* Starved, each look at the clock takes a second, so that a deadline comes soon. */
static uint64_t now_in_a_hurry(void *ctx)
{
	if (atomic_load(&starved)) {
		atomic_fetch_add(&hurry_ns, UINT64_C(1000000000));
	}

	return real_now(ctx) + atomic_load(&hurry_ns);
}

/* No memory for the superblock's image: neither an epoch nor the flush behind it comes to an end, and nothing is in
 * flight. */
DISK_TEST(p5_an_unfinished_flush_ends_with_closed_when_the_tier_closes, fixture_init(&f_, NULL))
{
	outcome_t epoch = {0}, flush = {0};

	f_.test.env.alloc = alloc_unless_starved;
	f_.test.env.now_ns = now_in_a_hurry;
	fixture_begin(&f_, &found_);
	assert_int_equal(kvs_epoch_set(f_.tier, &(kvs_epoch_t){space_root, "default", "model=test\n", 2},
				       record_outcome, &epoch),
			 KV_OK);
	assert_int_equal(kvs_flush(f_.tier, record_outcome, &flush), KV_OK);
	atomic_store(&starved, 1);
	fixture_close(&f_);
	atomic_store(&starved, 0);
	assert_int_equal(epoch.calls, 1);
	assert_int_equal(epoch.status, KV_ERR_CLOSED);
	assert_int_equal(flush.calls, 1);
	assert_int_equal(flush.status, KV_ERR_CLOSED);
}

/* ---- children: a fresh program under strace, or without privileges --------------------------- */

/* Everything works, and the gauge says how. */
static void child_life(int fallback)
{
	kvs_loc_t loc;

	fixture_begin(&f_, &found_);
	for (uint32_t d = 1; d <= 20; d++) {
		assert_int_equal(put_block(&f_, &plain, 1, d, &loc), KV_OK);
		assert_int_equal(get_block(&f_, &plain, 1, d, loc), KV_OK);
	}
	flush_ok();
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_FALLBACK), fallback);
}

/* A failed fdatasync of the slot file: nothing of it is acknowledged, nothing is offered, and the blocks that may be
 * wrong are reported. */
static void child_sync(__attribute__((unused)) int arg)
{
	kvs_loc_t loc;

	fixture_begin(&f_, &found_);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	assert_int_equal(flush_wait(f_.tier), KV_ERR_IO);
	assert_int_equal(f_.lost, 1);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_LOST), 1);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_STATE), KVS_HEALTH_READ_ONLY);
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc), KV_MISS);
	check_sums(&f_);
}

/* A failed sync of the directory holds for every later block of its new files: it is asked for again until it has
 * worked. */
static void child_sync_dir(__attribute__((unused)) int arg)
{
	kvs_loc_t loc;

	fixture_begin(&f_, &found_);
	for (uint32_t chain = 1; chain <= 2; chain++) {
		assert_int_equal(put_block(&f_, &plain, chain, 1, &loc), KV_OK);
		assert_int_equal(flush_wait(f_.tier), KV_ERR_IO);
		wait_works(&f_);
	}
	assert_int_equal(put_block(&f_, &plain, 3, 1, &loc), KV_OK);
	flush_ok();
	assert_int_equal(get_block(&f_, &plain, 3, 1, loc), KV_OK);
}

static uint64_t now_with_jumps(void *ctx)
{
	return real_now(ctx) + atomic_load(&hurry_ns);
}

/* Four blocks, the first unreadable, with a clock that can be turned on. */
static void begin_unreadable(kvs_loc_t loc[4])
{
	f_.test.env.now_ns = now_with_jumps;
	f_.config.engine = KVS_IO_THREADS;
	fixture_begin(&f_, &found_);
	for (uint32_t d = 1; d <= 4; d++) {
		assert_int_equal(put_block(&f_, &plain, 1, d, &loc[d - 1]), KV_OK);
	}
	flush_ok();
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc[0]), KV_ERR_IO);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS), 1);
	assert_int_equal(f_.aside, 1);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_UNREADABLE), 1);
}

/* The tier reads it again, after pauses of up to a minute. */
static void next_try(uint64_t tries)
{
	const uint64_t deadline = real_now(NULL) + UINT64_C(20000000000);

	atomic_fetch_add(&hurry_ns, UINT64_C(60000000000));
	while (kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS) < tries) {
		kvs_poll(f_.tier, 64);
		usleep(1000);
		assert_true(real_now(NULL) < deadline);
	}
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS), tries);
}

/* A slot that fails for ten minutes, at each of eight tries or more, is given up: lost, and never used again. No other
 * slot is the worse for it. */
static void child_given_up(__attribute__((unused)) int arg)
{
	kvs_loc_t loc[4], other;
	kvs_usage_t usage;

	begin_unreadable(loc);
	for (uint64_t tries = 2; tries <= 11; tries++) {
		assert_int_equal(f_.lost, 0);
		next_try(tries);
	}
	assert_int_equal(f_.lost, 1);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_STATE), KVS_HEALTH_OK);
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc[0]), KV_MISS);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.quarantined_slots, 1);
	for (uint32_t d = 1; put_block(&f_, &plain, 2, d, &other) == KV_OK; d++) {
		assert_true(other.slot != loc[0].slot);
	}
	check_sums(&f_);
	fixture_reopen(&f_, &found_);
	assert_int_equal(found_find(&found_, 1, 1), -1);
	check_sums(&f_);
}

/* The process has no descriptor left for the slot file, and has one later. */
static void child_open_later(__attribute__((unused)) int arg)
{
	kvs_loc_t loc;

	fixture_begin(&f_, &found_);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	flush_ok();
	fixture_close(&f_);
	assert_int_equal(fixture_open(&f_), KV_ERR_IO);
	assert_non_null(strstr(f_.detail, kv_status_text(KV_ERR_BUSY))); /* it is no error of the device */
	begin_finding(1);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_FILES_DROPPED), 0);
}

/* What was set aside is there after a restart, and is read when it can be. */
static void child_restart_aside(__attribute__((unused)) int arg)
{
	kvs_loc_t loc[4];

	begin_unreadable(loc);
	reopen_finding(4);
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc[0]),
			 KV_ERR_IO); /* new threads, and the first read of each fails */
	assert_int_equal(f_.aside, 1);
	for (int i = 0; i < 20000 && f_.aside > 0; i++) {
		atomic_fetch_add(&hurry_ns, UINT64_C(10000000));
		kvs_poll(f_.tier, 64);
		usleep(1000);
	}
	assert_int_equal(f_.aside, 0);
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc[0]), KV_OK);
	check_sums(&f_);
}

/* Four blocks and no metadata; something of the third cannot be read by the first that tries. */
static void begin_rebuild(uint64_t *unreadable)
{
	kvs_loc_t loc;

	f_.config.engine = KVS_IO_THREADS;
	f_.config.unreadable = unreadable;
	fixture_begin(&f_, &found_);
	for (uint32_t d = 1; d <= 4; d++) {
		assert_int_equal(put_block(&f_, &plain, 1, d, &loc), KV_OK);
	}
	flush_ok();
	fixture_close(&f_);
	lose_metadata(&f_);
}

/* Nothing is taken in, nothing is lost: the tier does not open, and does when all can be read. */
static void child_rebuild_waits(int unsynced)
{
	uint64_t unreadable = 0;

	begin_rebuild(&unreadable);
	f_.config.unsynced = &unsynced;
	assert_int_equal(fixture_open(&f_), KV_ERR_IO);
	assert_int_equal(unreadable, 1);
	assert_non_null(strstr(f_.detail, "cannot take in what"));
	fixture_begin(&f_, &found_);
	assert_int_equal(unreadable, 0);
	assert_int_equal(found_.count, 4);
	check_sums(&f_);
}

/* Told to go without: what lies below goes too, and the slot is not used for anything else. */
static void child_rebuild_drops(int unsynced)
{
	uint64_t unreadable = 0;
	kvs_usage_t usage;
	kvs_loc_t loc;

	begin_rebuild(&unreadable);
	f_.config.unsynced = &unsynced;
	f_.config.drop_unreadable = 1;
	fixture_begin(&f_, &found_);
	assert_int_equal(unreadable, 1);
	assert_int_equal(found_.count, 2);
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.quarantined_slots, 1);
	for (uint32_t d = 1; put_block(&f_, &plain, 2, d, &loc) == KV_OK; d++) {
	}
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.quarantined_slots, 1);
	assert_int_equal(usage.free_slots, 0);
	check_sums(&f_);
}

/* A write was torn, and the block written again elsewhere; the check of that copy cannot read it. It is not taken for
 * torn, too. */
static void child_rebuild_copies(__attribute__((unused)) int arg)
{
	char path[256];
	kvs_loc_t loc, first;
	int fd;

	f_.config.engine = KVS_IO_THREADS;
	fixture_begin(&f_, &found_);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &first), KV_OK);
	kvs_free(f_.tier, first);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
	assert_true(loc.slot > first.slot);
	flush_ok();
	fixture_close(&f_);
	lose_metadata(&f_);
	snprintf(path, sizeof path, "%s/slots/0.0", f_.dir);
	fd = open(path, O_WRONLY | O_CLOEXEC);
	assert_int_equal(pwrite(fd, "torn", 4, 4096 + 100), 4);
	close(fd);
	begin_finding(1);
	assert_int_equal(found_.loc[0].slot, loc.slot);
	flush_ok();
	assert_int_equal(f_.lost, 0);
	assert_int_equal(get_block(&f_, &plain, 1, 1, found_.loc[0]), KV_OK);
	check_sums(&f_);
}

/* Reads fail for a while, more often than errors in a row are borne: no block is lost by that, and the device is left
 * alone between the tries. */
static void child_unreadable(__attribute__((unused)) int arg)
{
	const uint64_t deadline = real_now(NULL) + UINT64_C(20000000000);
	kvs_loc_t loc[4];
	uint32_t good = 0;

	begin_unreadable(loc);
	assert_int_equal(get_block(&f_, &plain, 1, 1, loc[0]), KV_ERR_IO);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS), 1); /* the device was not asked */
	while (good < 4) {
		good = 0;
		for (uint32_t d = 1; d <= 4; d++) {
			kv_status_t status = get_block(&f_, &plain, 1, d, loc[d - 1]);

			assert_true(status == KV_OK || status == KV_ERR_IO || status == KV_ERR_TIER_OFF);
			good += status == KV_OK;
		}
		kvs_poll(f_.tier, 64);
		usleep(2000);
		assert_true(real_now(NULL) < deadline);
	}
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_ERRORS), 12);
	assert_int_equal(kv_metric_get(&f_.metrics, KV_M_DISK_CORRUPT), 0);
	assert_int_equal(f_.aside, 0);
	check_sums(&f_);
}

/* A block is written while the sync that may carry it fails, and its owner hears of the failure first. */
static void child_sync_race(__attribute__((unused)) int arg)
{
	kvs_loc_t first, second;
	kvs_meta_t meta = meta_of(2, 1, 1);
	outcome_t flush = {0}, store = {0};
	block_t b;

	f_.config.flush_interval_ns = UINT64_C(60000000000);
	fixture_begin(&f_, &found_);
	assert_int_equal(put_block(&f_, &plain, 1, 1, &first), KV_OK);
	assert_int_equal(kvs_flush(f_.tier, record_outcome, &flush), KV_OK);
	kvs_poll(f_.tier, 64); /* the turn begins, and its sync lasts a while */
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_FILLING, 1, &meta, &second), KV_OK);
	block_fill(&plain, kv_key_hash(&meta.key), &b);
	assert_int_equal(kvs_store(f_.tier, second, &b.mem, record_outcome, &store), KV_OK);
	for (int i = 0; i < 10000 && flush.calls == 0; i++) {
		kvs_poll(f_.tier, 0); /* no transfer is taken in */
		usleep(1000);
	}
	assert_int_equal(flush.calls, 1);
	assert_int_equal(flush.status, KV_ERR_IO);
	assert_int_equal(store.calls, 0);
	assert_int_equal(await(f_.tier, &store), KV_ERR_IO);
	assert_int_equal(get_block(&f_, &plain, 2, 1, second), KV_ERR_CORRUPT);
	check_sums(&f_);
}

/* Directories are made at the first start; without their names nothing else is worth a sync. */
static void child_sync_made(__attribute__((unused)) int arg)
{
	char inner[160];

	snprintf(inner, sizeof inner, "%s/tier", f_.dir);
	f_.config.path = inner;
	for (int i = 0; i < 2; i++) {
		assert_int_equal(fixture_open(&f_), KV_ERR_IO);
		assert_non_null(strstr(f_.detail, "sync the directory above"));
	}
	assert_int_equal(fixture_open(&f_), KV_OK);
}

static void child_sync_slots(__attribute__((unused)) int arg)
{
	assert_int_equal(fixture_open(&f_), KV_ERR_IO);
	assert_non_null(strstr(f_.detail, "cannot sync"));
	assert_int_equal(fixture_open(&f_), KV_OK);
}

static void child_memlock(__attribute__((unused)) int arg)
{
	struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
	struct __user_cap_data_struct no_rights[2] = {0};
	struct rlimit small = {8 << 20, 8 << 20};
	const size_t bytes = 64 * MIB;
	uint8_t *slab = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	kvs_loc_t loc;
	kvs_mem_t mem;
	block_t b;
	kvs_meta_t meta = meta_of(1, 1, 1);
	uint32_t region;

	assert_true(slab != MAP_FAILED);
	memset(slab, 1, bytes);
	assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &small), 0);
	assert_int_equal(syscall(SYS_capset, &header, no_rights), 0);
	fixture_begin(&f_, &found_);
	kvs_nvme_register(f_.tier, slab, bytes, &region);
	for (int i = 0; i < 500 && atomic_load(&f_.test.lines[KV_LOG_WARN]) == 0; i++) {
		usleep(10000);
	}
	assert_int_equal(atomic_load(&f_.test.lines[KV_LOG_WARN]), 1); /* said, once */
	block_fill(&plain, kv_key_hash(&meta.key), &b);
	mem = (kvs_mem_t){slab, b.leaves, b.roots, region};
	memcpy(slab, b.data, plain.block_bytes);
	assert_int_equal(kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc), KV_OK);
	assert_int_equal(store_wait(f_.tier, loc, &mem), KV_OK);
	memset(slab, 0, plain.block_bytes);
	assert_int_equal(load_wait(f_.tier, loc, &mem), KV_OK);
	assert_memory_equal(slab, b.data, plain.block_bytes);
	assert_int_equal(atomic_load(&f_.test.lines[KV_LOG_WARN]), 1);
}

/* ---- a row a child --------------------------------------------------------------------------- */

#define SLOTS "slots/0.0"

/* `live` between fixture_init() and fixture_close(), under strace where calls that name `file` (NULL: any call) are
 * answered as `inject` says. */
typedef struct child {
	const char *test;
	void (*live)(int arg);
	int arg;
	const char *file, *inject;
} child_t;

static const child_t children[] = {
	{"p6_a_kernel_without_io_uring_is_served_by_plain_calls", child_life, 1, NULL, "io_uring_setup:error=ENOSYS"},
	{"p5_submissions_refused_for_a_while_go_through_later", child_life, 0, NULL,
	 "io_uring_enter:error=EAGAIN:when=2..12"},
	{"p2_a_failed_sync_is_never_acknowledged_nor_retried_blindly", child_sync, 0, SLOTS, "fdatasync:error=EIO"},
	/* The first one is the start's. */
	{"p2_an_unsynced_directory_is_synced_before_the_next_answer", child_sync_dir, 0, "slots",
	 "fsync:error=EIO:when=2..3"},
	/* In each of four threads. */
	{"p2_blocks_that_cannot_be_read_for_a_while_are_not_lost", child_unreadable, 0, SLOTS,
	 "preadv:error=EIO:when=1..3"},
	{"p2_a_slot_that_cannot_be_read_for_ten_minutes_is_given_up", child_given_up, 0, SLOTS, "preadv:error=EIO"},
	{"p2_a_rebuild_needs_every_header_that_it_cannot_read_now", child_rebuild_waits, 0, SLOTS,
	 "pread64:error=EIO:when=3"},
	{"p2_a_rebuild_told_to_go_on_uses_no_slot_that_it_cannot_read", child_rebuild_drops, 0, SLOTS,
	 "pread64:error=EIO:when=3"},
	/* A sync has failed before: each slot is read, header first, and written again. */
	{"p2_a_rebuild_believes_no_slot_that_it_cannot_write_again", child_rebuild_waits, 1, SLOTS,
	 "pread64:error=EIO:when=6"},
	{"p2_a_rebuild_drops_a_slot_that_it_cannot_write_again", child_rebuild_drops, 1, SLOTS,
	 "pread64:error=EIO:when=6"},
	{"p2_a_rebuild_believes_no_header_that_it_cannot_write_again", child_rebuild_waits, 1, SLOTS,
	 "pread64:error=EIO:when=5"},
	/* After 128 headers and the torn copy. */
	{"p2_a_rebuild_gives_up_no_copy_that_it_cannot_read_now", child_rebuild_copies, 0, SLOTS,
	 "pread64:error=EIO:when=130"},
	/* In the first thread. */
	{"p2_what_could_not_be_read_is_found_by_the_next_start", child_restart_aside, 0, SLOTS,
	 "preadv:error=EIO:when=1"},
	/* Calls that name the folder: it is read and a file is made, then it is read and the file is opened. */
	{"p2_a_start_without_a_descriptor_for_a_slot_file_is_tried_again", child_open_later, 0, "slots",
	 "openat:error=EMFILE:when=4"},
	{"p2_a_write_that_a_failed_sync_may_lose_is_never_acknowledged", child_sync_race, 0, SLOTS,
	 "fdatasync:error=EIO:when=1:delay_enter=300000"},
	{"p2_new_directories_are_synced_under_their_names", child_sync_made, 0, "", "fsync:error=EIO:when=1..2"},
	/* Twice for the copies of the superblock, then for the directory of slot files; each later start syncs it before
	 * it comes that far. */
	{"p2_the_directory_of_slot_files_is_synced", child_sync_slots, 0, "", "fsync:error=EIO:when=3"},
	{"p6_a_memlock_of_8_mib_costs_speed_only", child_memlock, 0, NULL, NULL},
};

/* This program again: row `number` in this directory. */
static void exec_child(const child_t *child, const char *number, const char *dir)
{
	char self[512], only[256], inject[128];
	const char *argv[16] = {"strace", "-f", "-qq", "-o", "/dev/null", "-e", inject};
	uint32_t n = child->inject ? 7 : 0;
	const ssize_t len = readlink("/proc/self/exe", self, sizeof self - 1);

	self[len > 0 ? len : 0] = '\0';
	snprintf(inject, sizeof inject, "inject=%s", child->inject ? child->inject : "");
	snprintf(only, sizeof only, "%s/%s", dir, child->file ? child->file : "");
	if (child->file) {
		argv[n++] = "-P";
		argv[n++] = only;
	}
	argv[n++] = self;
	argv[n++] = number;
	argv[n++] = dir;
	argv[n] = NULL;
	setenv("ASAN_OPTIONS", "detect_leaks=0", 1); /* the leak detector cannot run under a tracer */
	execvp(argv[0], (char *const *)(uintptr_t)argv);
	_exit(127);
}

static void in_child(void **state)
{
	const child_t *child = *state;
	char number[16];
	int status;
	pid_t pid;

	snprintf(number, sizeof number, "%d", (int)(child - children));
	fixture_init(&f_, NULL);
	pid = fork();
	if (pid == 0) {
		exec_child(child, number, f_.dir);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	fixture_fini(&f_);
	if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
		print_message("# SKIP: strace is not installed\n");
		skip();
	}
	assert_int_equal(status, 0);
}

static const char *child_dir;

static void as_child(void **state)
{
	const child_t *child = *state;

	fixture_init(&f_, child_dir);
	child->live(child->arg);
	fixture_close(&f_);
}

int main(int argc, char **argv)
{
	struct CMUnitTest test = {.name = "child", .test_func = as_child};

	if (argc == 3) {
		child_dir = argv[2];
		test.initial_state = (void *)(uintptr_t)&children[strtoul(argv[1], NULL, 10)];
		return _cmocka_run_group_tests("child", &test, 1, NULL, NULL);
	}
	for (size_t i = 0; i < KV_COUNT_OF(children); i++) {
		kv_test_add((struct CMUnitTest){.name = children[i].test,
						.test_func = in_child,
						.initial_state = (void *)(uintptr_t)&children[i]},
			    __FILE__, __LINE__);
	}

	return kv_test_run(NULL, NULL);
}
