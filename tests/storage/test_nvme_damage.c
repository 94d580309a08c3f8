/* A directory that was damaged, is foreign, locked or full: typed errors or dropped blocks, never other bytes and never
 * a crash. */
#include "nvme_test.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define BLOCKS 12u

static char path_[1024];

/* A name in the directory of f_; until the next call. */
static const char *path_of(const char *name)
{
	assert_true(snprintf(path_, sizeof path_, "%s/%s", f_.dir, name) < (int)sizeof path_);

	return path_;
}

static int open_at(const char *name)
{
	int fd = open(path_of(name), O_RDWR | O_CLOEXEC);

	assert_true(fd >= 0);

	return fd;
}

static void flip(int fd, off_t at, uint8_t bits)
{
	uint8_t byte;

	assert_int_equal(pread(fd, &byte, 1, at), 1);
	byte ^= bits;
	assert_int_equal(pwrite(fd, &byte, 1, at), 1);
}

static void flip_in(const char *name, off_t at, uint8_t bits)
{
	int fd = open_at(name);

	flip(fd, at, bits);
	close(fd);
}

static void flip_supers(off_t at, uint8_t bits)
{
	flip_in("superblock.0", at, bits);
	flip_in("superblock.1", at, bits);
}

/* A directory with a chain of BLOCKS flushed blocks; the tier is closed. Slot i of file 0.0 holds depth i + 1. */
static void make(void)
{
	kvs_loc_t loc;

	fixture_fresh();
	for (uint32_t i = 0; i < BLOCKS; i++) {
		assert_int_equal(put_block(&f_, &plain, 1, i + 1, &loc), KV_OK);
		assert_int_equal(loc.slot, i);
	}
	flush_ok();
	fixture_close(&f_);
	memset(&f_.metrics, 0, sizeof f_.metrics);
}

/* The same, and open again. */
static void make_and_open(void)
{
	make();
	begin_finding(BLOCKS);
}

static uint64_t metric(kv_metric_t id)
{
	return kv_metric_get(&f_.metrics, id);
}

/* Every block that is reported is right or says that it is not; returns how many are right. */
static uint32_t read_all(void)
{
	uint32_t good = 0;

	for (uint32_t i = 0; i < found_.count; i++) {
		kv_status_t status = get_block(&f_, &plain, 1, found_.meta[i].depth, found_.loc[i]);

		assert_true(status == KV_OK || status == KV_ERR_CORRUPT || status == KV_MISS);
		good += status == KV_OK;
	}
	check_sums(&f_);

	return good;
}

DISK_TEST(p1_a_flipped_bit_in_a_slot_is_never_served, make_and_open())
{
	static const off_t places[BLOCKS] = {0, 9, 20, 30, 50, 100, 151, 300, 4095, 4096, 8191, 16383};

	for (uint32_t i = 0; i < BLOCKS; i++) {
		kvs_loc_t loc = found_.loc[found_find(&found_, 1, i + 1)];

		flip_in("slots/0.0", (off_t)i * 16384 + places[i], (uint8_t)(1u << (i % 8u)));
		for (int again = 0; again < 2; again++) { /* quarantined: not read again, and freed by the core only */
			assert_int_equal(get_block(&f_, &plain, 1, i + 1, loc), KV_ERR_CORRUPT);
			assert_int_equal(metric(KV_M_DISK_CORRUPT), i + 1);
		}
	}
	check_sums(&f_);
	flush_ok();
	reopen_finding(0); /* and gone after a restart */
}

DISK_TEST(p1_a_whole_block_in_the_wrong_place_is_never_served, make_and_open())
{
	uint8_t slot[16384];
	int fd = open_at("slots/0.0");

	assert_int_equal(pread(fd, slot, sizeof slot, 0), sizeof slot);
	assert_int_equal(pwrite(fd, slot, sizeof slot, 16384), sizeof slot);
	assert_int_equal(get_block(&f_, &plain, 1, 1, found_.loc[found_find(&found_, 1, 1)]), KV_OK);
	assert_int_equal(get_block(&f_, &plain, 1, 2, found_.loc[found_find(&found_, 1, 2)]), KV_ERR_CORRUPT);
	close(fd);
}

DISK_TEST(p6_one_damaged_superblock_is_repaired_from_the_other, make())
{
	for (int i = 0; i < 40; i++) {
		/* An image is a little longer. */
		flip_in(i % 2 ? "superblock.1" : "superblock.0", (i * 37) % 256, (uint8_t)(1u << (i % 8)));
		assert_int_equal(fixture_open(&f_), KV_OK);
		assert_int_equal(kvs_epoch_get(f_.tier, space_root), 1);
		recover(&f_, &found_);
		assert_int_equal(found_.count, BLOCKS);
		fixture_close(&f_);
	}
}

DISK_TEST(p10_two_damaged_superblocks_are_foreign_and_left_untouched, make())
{
	flip_supers(40, 1);
	assert_int_equal(fixture_open(&f_), KV_ERR_FOREIGN);
	assert_non_null(strstr(f_.detail, f_.dir));
	flip_supers(40, 1);
	begin_finding(BLOCKS);
}

DISK_TEST(p10_another_version_is_refused, make())
{
	flip_supers(16, 5); /* the version's first byte */
	assert_int_equal(fixture_open(&f_), KV_ERR_FOREIGN);
	assert_non_null(strstr(f_.detail, "version"));
}

DISK_TEST(p2_a_slot_file_that_was_cut_loses_only_what_was_cut, make())
{
	const off_t stride = 4096 + 12288;

	/* Slots are given out from the first; half a slot more. */
	assert_int_equal(truncate(path_of("slots/0.0"), stride * (BLOCKS / 2) + 5000), 0);
	for (int i = 0; i < 2; i++) { /* the first start makes it whole again */
		fixture_begin(&f_, &found_);
		assert_int_equal(read_all(), BLOCKS / 2);
		assert_int_equal(metric(KV_M_DISK_FILES_CUT), 1);
		fixture_close(&f_);
	}
}

/* rm, and then a cut, under an open tier: no acknowledgement rests on what has gone. */
DISK_TEST(p2_a_slot_file_removed_while_it_is_open_is_noticed, fixture_fresh())
{
	kvs_usage_t usage;
	kvs_loc_t loc;
	char name[32];

	for (uint32_t d = 1; d <= 3; d++) {
		assert_int_equal(put_block(&f_, &plain, 1, d, &loc), KV_OK);
	}
	flush_ok();
	assert_int_equal(put_block(&f_, &plain, 1, 4, &loc), KV_OK);
	assert_int_equal(unlink(path_of("slots/0.0")), 0);
	assert_int_equal(flush_wait(f_.tier), KV_ERR_IO);
	assert_int_equal(f_.lost, 4);
	check_sums(&f_);
	assert_int_equal(put_block(&f_, &plain, 2, 1, &loc), KV_OK);
	flush_ok();
	flush_ok();
	kvs_usage(f_.tier, &usage);
	assert_int_equal(usage.quarantined_slots, 0); /* the file that was removed is closed */
	check_sums(&f_);

	snprintf(name, sizeof name, "slots/0.%u", kv_slot_slab(loc.slot));
	assert_int_equal(put_block(&f_, &plain, 2, 2, &loc), KV_OK);
	assert_int_equal(truncate(path_of(name), 4096), 0);
	assert_int_equal(flush_wait(f_.tier), KV_ERR_IO);
	assert_int_equal(f_.lost, 6);
	assert_int_equal(put_block(&f_, &plain, 3, 1, &loc), KV_OK);
	flush_ok();
	reopen_finding(1);
	assert_int_equal(get_block(&f_, &plain, 3, 1, found_.loc[0]), KV_OK);
}

static uint32_t count_entries(const char *path)
{
	DIR *dir = opendir(path);
	uint32_t n = 0;

	assert_non_null(dir);
	while (readdir(dir)) {
		n++;
	}
	closedir(dir);

	return n;
}

DISK_TEST(p10_a_foreign_directory_is_left_alone, fixture_init(&f_, NULL))
{
	const char *path = path_of("thesis.txt");
	int fd;

	fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
	assert_int_equal(fixture_open(&f_), KV_ERR_FOREIGN);
	assert_int_equal(count_entries(f_.dir), 3);
	f_.config.path = path; /* a file */
	assert_int_equal(fixture_open(&f_), KV_ERR_PATH);
	f_.config.path = "/proc/nowhere/kvd";
	assert_int_equal(fixture_open(&f_), KV_ERR_PATH);
}

DISK_TEST(p10_a_second_daemon_on_the_directory_is_told_so, make_and_open())
{
	kvs_tier_t *second = NULL;
	char detail[256];

	assert_int_equal(kvs_nvme_open(&f_.config, &f_.test.env, &second, detail, sizeof detail), KV_ERR_LOCKED);
	assert_null(second);
	assert_int_equal(read_all(), BLOCKS);
}

static void make_longer(const char *path)
{
	struct stat st;

	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(truncate(path, st.st_size + 1), 0);
}

static void make_link(const char *path)
{
	assert_int_equal(unlink(path) + symlink("/etc/passwd", path), 0);
}

static void make_directory(const char *path)
{
	assert_int_equal(unlink(path) + mkdir(path, 0700), 0);
}

static void make_other_name(const char *path)
{
	char other[1100];

	snprintf(other, sizeof other, "%s0", path);
	assert_int_equal(rename(path, other), 0);
}

KV_TEST(p6_a_long_or_unreadable_slot_file_costs_its_own_blocks_only)
{
	static void (*const ways[])(const char *) = {make_longer, make_link, make_directory, make_other_name};

	for (uint32_t i = 0; i < KV_COUNT_OF(ways); i++) {
		kvs_loc_t loc;

		make();
		ways[i](path_of("slots/0.0"));
		begin_finding(0);
		assert_int_equal(metric(KV_M_DISK_FILES_DROPPED), 1);
		assert_int_equal(metric(KV_M_DISK_DROPPED), BLOCKS);
		assert_int_equal(put_block(&f_, &plain, 1, 1, &loc), KV_OK);
		assert_int_equal(get_block(&f_, &plain, 1, 1, loc), KV_OK);
		check_sums(&f_);
		fixture_fini(&f_);
	}
}

/* The blocks of a file that cannot be opened are missing until it can, also if some were stored again meanwhile, or the
 * metadata was lost. */
KV_TEST(p2_a_slot_file_that_comes_back_has_its_blocks)
{
	for (uint32_t i = 0; i < 6; i++) {
		const uint32_t again = i / 2;
		char path[256], aside[256];
		kvs_loc_t loc;

		make();
		snprintf(path, sizeof path, "%s/slots/0.0", f_.dir);
		snprintf(aside, sizeof aside, "%s/aside", f_.dir);
		assert_int_equal(rename(path, aside), 0);
		assert_int_equal(mkdir(path, 0700), 0);
		if (i % 2) {
			lose_metadata(&f_);
		}
		begin_finding(0);
		for (uint32_t d = 1; d <= again; d++) {
			assert_int_equal(put_block(&f_, &plain, 1, d, &loc), KV_OK);
		}
		flush_ok();
		fixture_close(&f_);
		assert_int_equal(rmdir(path), 0);
		assert_int_equal(rename(aside, path), 0);
		for (uint32_t start = 0; start < 2; start++) {
			fixture_begin(&f_, &found_);
			assert_int_equal(read_all(), BLOCKS);
			fixture_close(&f_);
		}
		fixture_fini(&f_);
	}
}

static rlim_t first_free_descriptor(void)
{
	const int fd = dup(0);

	assert_true(fd >= 0);
	close(fd);

	return (rlim_t)fd;
}

/* A start that runs out of descriptors anywhere finds all blocks, or the tier does not open and a later start does. */
KV_TEST(p2_a_start_short_of_descriptors_loses_no_block)
{
	struct rlimit before, low;
	uint32_t opened = 0;

	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	for (rlim_t more = 0; opened == 0; more += 1 + more / 4) {
		make();
		low = before;
		low.rlim_cur = first_free_descriptor() + more;
		assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
		found_.count = 0;
		opened = fixture_open(&f_) == KV_OK && kvs_recover(f_.tier, on_found, &found_) == KV_OK &&
			 found_.count == BLOCKS;
		assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
		fixture_reopen(&f_, &found_);
		assert_int_equal(read_all(), BLOCKS);
		fixture_fini(&f_);
		assert_true(more < 200);
	}
}

DISK_TEST(p1_a_file_truncated_under_the_tier_is_not_served, make_and_open())
{
	assert_int_equal(truncate(path_of("slots/0.0"), 16384 * 3 + 4096), 0);
	assert_int_equal(read_all(), 3);
}

/* Its number is given again: a name that stayed would keep every later file from being made. */
DISK_TEST(p6_a_file_cut_to_nothing_under_the_tier_makes_room_for_another, make_and_open())
{
	const char *path = path_of("slots/0.0");
	kvs_loc_t loc;

	assert_int_equal(truncate(path, 0), 0);
	for (uint32_t i = 0; i < 2000 && access(path, F_OK) == 0; i++) {
		usleep(10000);
		(void)kvs_poll(f_.tier, 64);
		flush_ok();
	}
	assert_int_equal(access(path, F_OK), -1);
	assert_int_equal(f_.lost, BLOCKS);
	for (uint32_t i = 0; i < 400; i++) { /* several files */
		assert_int_equal(put_block(&f_, &plain, 2, i + 1, &loc), KV_OK);
		assert_int_equal(get_block(&f_, &plain, 2, i + 1, loc), KV_OK);
	}
	assert_int_equal(access(path, F_OK), 0);
	check_sums(&f_);
}

KV_TEST(p2_lost_metadata_is_rebuilt_from_the_headers)
{
	for (int i = 0; i < 2; i++) {
		make();
		if (i == 0) {
			lose_metadata(&f_);
		} else {
			/* The library would make a new, empty database. */
			assert_int_equal(unlink(path_of("meta/CURRENT")), 0);
		}
		for (uint32_t start = 0; start < 2; start++) { /* the second one from rows again */
			fixture_begin(&f_, &found_);
			assert_int_equal(metric(KV_M_DISK_REBUILT), start ? 0 : BLOCKS);
			assert_int_equal(read_all(), BLOCKS);
			fixture_close(&f_);
			memset(&f_.metrics, 0, sizeof f_.metrics);
		}
		assert_int_equal(access(path_of("meta.lost"), F_OK), -1);
		fixture_fini(&f_);
	}
}

/* Without metadata, and with a bit of depth 8 flipped; read by this engine. */
static void make_rebuild(int engine, off_t at)
{
	make();
	lose_metadata(&f_);
	flip_in("slots/0.0", 16384 * 7 + at, 1);
	f_.config.engine = (kvs_io_engine_t)engine;
}

KV_TEST(p2_a_rebuild_leaves_damaged_headers_out)
{
	for (int engine = KVS_IO_URING; engine <= KVS_IO_THREADS; engine++) {
		make_rebuild(engine, 70); /* its children have no parent then */
		fixture_begin(&f_, &found_);
		assert_int_equal(metric(KV_M_DISK_CORRUPT), 1);
		assert_int_equal(metric(KV_M_DISK_DROPPED), BLOCKS - 8);
		assert_int_equal(read_all(), 7);
		fixture_fini(&f_);
	}
}

/* A header proves that a write had begun. */
KV_TEST(p2_a_torn_block_found_by_a_rebuild_is_lost_before_a_flush)
{
	for (int engine = KVS_IO_URING; engine <= KVS_IO_THREADS; engine++) {
		make_rebuild(engine, 4096 + 100);
		for (int i = 0; i < 2; i++) { /* what the first life has not read the second one does not believe */
			fixture_close(&f_);
			memset(&f_.metrics, 0, sizeof f_.metrics);
			begin_finding(BLOCKS);
			assert_int_equal(metric(KV_M_DISK_REBUILT), BLOCKS);
		}
		flush_ok();
		assert_int_equal(f_.lost, 1);
		assert_int_equal(metric(KV_M_DISK_UNVERIFIED), 0);
		fixture_close(&f_);
		memset(&f_.metrics, 0, sizeof f_.metrics);
		fixture_begin(&f_, &found_);
		assert_int_equal(metric(KV_M_DISK_REBUILT), 0);
		flush_ok();
		assert_int_equal(read_all(), 7);
		fixture_fini(&f_);
	}
}

/* A slot that is freed keeps its header. Its block may come back, once, as what it was; after a reset nothing of the
 * old epoch does. */
DISK_TEST(p1_a_rebuild_finds_blocks_of_this_epoch_once_and_no_old_ones, make_and_open())
{
	kvs_loc_t loc;

	for (uint32_t depth = 9; depth <= BLOCKS; depth++) {
		kvs_free(f_.tier, found_.loc[found_find(&found_, 1, depth)]);
	}
	assert_int_equal(put_block(&f_, &plain, 1, 9, &loc), KV_OK); /* a second copy, in another slot */
	assert_int_equal(loc.slot, BLOCKS);
	flush_ok();
	reopen_finding(9); /* the rows know */
	reopen_without_metadata_finding(BLOCKS);
	flush_ok();
	assert_int_equal(f_.lost, 0);
	assert_int_equal(read_all(), BLOCKS);
	assert_int_equal(epoch_wait(f_.tier, 2), KV_OK);
	fixture_close(&f_);

	for (int i = 0; i < 2; i++) { /* by their headers, then by rows */
		if (i == 0) {
			lose_metadata(&f_);
		}
		begin_finding(0);
		check_sums(&f_);
		fixture_close(&f_);
	}
}

DISK_TEST(p2_a_rebuild_that_was_cut_short_is_done_again, make())
{
	assert_int_equal(mkdir(path_of("meta.lost"), 0700), 0);
	fixture_begin(&f_, &found_);
	assert_int_equal(metric(KV_M_DISK_REBUILT), BLOCKS);
	assert_int_equal(read_all(), BLOCKS);
}

/* One flipped bit in each file of the metadata, at several places. */
KV_TEST(p1_p6_damaged_metadata_costs_time_but_no_right_bytes)
{
	uint32_t files = 0;
	char names[64][64];
	char path[128];
	struct dirent *entry;
	DIR *dir;

	make();
	dir = opendir(path_of("meta"));
	assert_non_null(dir);
	while ((entry = readdir(dir)) != NULL) {
		if (entry->d_name[0] != '.' && strncmp(entry->d_name, "LOG", 3) != 0 &&
		    strcmp(entry->d_name, "LOCK") != 0 && files < 64) {
			snprintf(names[files++], 64, "%.63s", entry->d_name);
		}
	}
	closedir(dir);
	fixture_fini(&f_);
	assert_true(files >= 4);

	for (uint32_t i = 0; i < files; i++) {
		struct stat st;
		int fd;

		make();
		snprintf(path, sizeof path, "meta/%.63s", names[i]);
		fd = open_at(path);
		assert_int_equal(fstat(fd, &st), 0);
		for (off_t at = 3; at < st.st_size; at += 1 + st.st_size / 5) {
			flip(fd, at, 0x10);
		}
		close(fd);
		fixture_begin(&f_, &found_);
		if (found_.count != BLOCKS) {
			print_message("# %s: %u blocks\n", names[i], found_.count);
		}
		/* a log whose last records are damaged looks like one that a crash cut short: blocks may be lost, none
		 * may be wrong */
		assert_true(found_.count == BLOCKS || strstr(names[i], ".log"));
		assert_int_equal(read_all(), found_.count);
		fixture_fini(&f_);
	}
}

KV_TEST(p5_a_full_file_system_is_full_and_the_tier_goes_on)
{
	kvs_loc_t loc[2000];
	kvs_meta_t meta;
	kv_status_t status = KV_OK;
	uint32_t n = 0;

	fixture_init(&f_, NULL);
	if (mount("tmpfs", f_.dir, "tmpfs", 0, "size=40m,mode=0700") != 0) {
		print_message("# SKIP: mounting a tmpfs needs root (%s)\n", strerror(errno));
		fixture_fini(&f_);
		skip();
	}
	f_.config.limit_bytes = 512 * MIB;
	f_.config.file_bytes = 4 * MIB;
	fixture_begin(&f_, &found_);
	while (n < 2000 && status == KV_OK) {
		status = put_block(&f_, &plain, 1, n + 1, &loc[n]);
		n += status == KV_OK;
	}
	assert_int_equal(status, KV_ERR_FULL);
	assert_true(n > 100);
	assert_true(metric(KV_M_DISK_ERRORS) > 0);
	assert_int_equal(metric(KV_M_DISK_OFF), 0);
	kvs_free(f_.tier, loc[n - 1]);
	assert_int_equal(put_block(&f_, &plain, 1, n, &loc[n - 1]), KV_OK);
	assert_int_equal(get_block(&f_, &plain, 1, n, loc[n - 1]), KV_OK);
	/* a class that has nothing to evict is told the reason */
	assert_int_equal(kvs_class_open(f_.tier, "other", &plain, &f_.slot_class), KV_OK);
	meta = meta_of(2, 1, 1);
	status = kvs_alloc(f_.tier, f_.slot_class, KVS_PUT, 1, &meta, &loc[0]);
	assert_true(status == KV_ERR_NOSPC);
	check_sums(&f_);
	fixture_close(&f_);
	assert_int_equal(umount(f_.dir), 0); /* nothing holds a file open */
	fixture_fini(&f_);
}
