/* Bits that change on their own: on disk, in the memory of a slab, and memory that is taken away. */
#include "e2e/rig/rig.h"

#include "nvme/format/slothdr.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>

#define TALKS 32u
#define LEN   6u
#define SLOT  (KVS_PAGE + RIG_BLOCK_BYTES)

static const kvs_geometry_t geometry = {
	.block_bytes = RIG_BLOCK_BYTES, .heads = 2, .leaves = 4, .leaf_bytes = RIG_BLOCK_BYTES / 8};

typedef struct where {
	int fd;
	off_t at;
} where_t;

/* Look through one slot file; the slots of keys that are asked for are noted. */
static void look_into(int fd, const kvc_key_t (*keys)[LEN], where_t (*where)[LEN])
{
	_Alignas(8) uint8_t header[KVS_PAGE];
	kvs_slothdr_t h;

	for (off_t at = 0; pread(fd, header, sizeof header, at) == (ssize_t)sizeof header; at += SLOT) {
		if (kvs_slothdr_decode(header, sizeof header, &geometry, &h, NULL) != KV_OK) {
			continue;
		}
		for (uint32_t t = 0; t < TALKS * LEN; t++) {
			if (memcmp(&keys[t / LEN][t % LEN], &h.meta.key, sizeof h.meta.key) == 0) {
				where[t / LEN][t % LEN] = (where_t){fd, at};
			}
		}
	}
}

/* Every slot file stays open until the test ends. */
static void find_slots(const rig_t *rig, const kvc_key_t (*keys)[LEN], where_t (*where)[LEN])
{
	char path[160];
	struct dirent *entry;
	DIR *dir;

	snprintf(path, sizeof path, "%s/slots", rig->disk);
	dir = opendir(path);
	assert_non_null(dir);
	while ((entry = readdir(dir))) {
		if (entry->d_name[0] != '.') {
			int fd = openat(dirfd(dir), entry->d_name, O_RDWR | O_CLOEXEC);

			assert_true(fd >= 0);
			look_into(fd, keys, where);
		}
	}
	closedir(dir);
	for (uint32_t t = 0; t < TALKS * LEN; t++) {
		assert_true(where[t / LEN][t % LEN].fd > 0);
	}
}

static void flip(const where_t *where, kv_test_rng_t *rng, off_t from, off_t len)
{
	off_t at = where->at + from + (off_t)kv_test_below(rng, (uint64_t)len);
	uint8_t byte;

	assert_int_equal(pread(where->fd, &byte, 1, at), 1);
	byte ^= (uint8_t)(1u << kv_test_below(rng, 8));
	assert_int_equal(pwrite(where->fd, &byte, 1, at), 1);
}

/* One bit in one block of every conversation: what comes before it is served, it and what follows is computed again. */
static void damaged_disk(off_t from, off_t len)
{
	static kvc_key_t keys[TALKS][LEN];
	static where_t where[TALKS][LEN];
	kv_test_rng_t rng = {.state = kv_test_seed() + (uint64_t)from};
	uint32_t bad[TALKS], n;
	other_t other;
	user_t user;
	rig_t rig;

	rig_init(&rig, 1);
	rig_start(&rig);
	user_attach(&user, &rig, "bits");
	for (uint32_t t = 0; t < TALKS; t++) {
		user_keys(&user, t, LEN, keys[t]);
		assert_int_equal(user_put(&user, keys[t], 0, LEN, 1, &n), KVC_OK);
	}
	user_leave(&user);
	rig_stop(&rig);

	memset(where, 0, sizeof where);
	find_slots(&rig, (const kvc_key_t(*)[LEN])keys, where);
	for (uint32_t t = 0; t < TALKS; t++) {
		bad[t] = (uint32_t)kv_test_below(&rng, LEN);
		flip(&where[t][bad[t]], &rng, from, len);
	}

	rig_start(&rig);
	other_start(&other, rig.sock);
	user_attach(&user, &rig, "bits");
	for (uint32_t t = 0; t < TALKS; t++) {
		kvc_status_t status;

		assert_true(user_match_is(&user, keys[t], LEN, LEN));
		status = user_get(&user, keys[t], LEN, &n);
		assert_true(status < 0);
		assert_true(user_match_is(&user, keys[t], LEN, bad[t]));
		if (status == KVC_ERR_REVOKED) { /* the lease itself was taken back: ask again for what is left */
			assert_true(n <= bad[t]);
			assert_int_equal(user_get(&user, keys[t], LEN, &n), bad[t] ? KVC_OK : KVC_MISS);
		}
		assert_int_equal(n, bad[t]);
		assert_int_equal(user_put(&user, keys[t], 0, LEN, 0, NULL), KVC_OK);
		user_expect(&user, keys[t], LEN);
	}
	assert_true(rig_metric_is(&rig, "kvd_disk_corrupt_total", TALKS));
	assert_true(rig_metric_reaches(&rig, "kvd_bad_blocks_total", TALKS));
	user_leave(&user);
	other_end(&other, 0);
	rig_end(&rig);
	for (uint32_t t = 0; t < TALKS * LEN; t++) {
		close(where[t / LEN][t % LEN].fd);
	}
}

KV_TEST(p1_p6_a_bit_flipped_in_a_payload_on_disk_is_a_miss)
{
	damaged_disk(KVS_PAGE, RIG_BLOCK_BYTES);
}

KV_TEST(p1_p6_a_bit_flipped_in_a_slot_header_is_a_miss_from_there_on)
{
	damaged_disk(0, KVS_PAGE);
}

RIG_TEST(p1_p6_a_bit_flipped_in_memory_is_an_error_of_one_block, rig_begin(&rig_, 0))
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	kvc_key_t keys[8], near[8];
	user_t reader, wild;
	kvc_lease_t *lease;
	other_t other;
	uint32_t n;

	other_start(&other, rig_.sock);
	user_attach(&reader, &rig_, "shared");
	user_attach(&wild, &rig_, "shared");
	user_keys(&reader, 77, 8, near);
	for (uint32_t round = 0; round < 20; round++) {
		const uint32_t bad = (uint32_t)kv_test_below(&rng, 8);

		user_keys(&reader, round, 8, keys);
		assert_int_equal(user_put(&reader, keys, 0, 8, 0, NULL), KVC_OK);
		assert_int_equal(user_put(&reader, near, 0, 8, 0, NULL), KVC_OK);
		assert_int_equal(kvc_acquire(wild.space, keys, 8, 0, 0, &lease), KVC_OK);
		user_memory(lease, bad)[kv_test_below(&rng, RIG_BLOCK_BYTES)] ^= (uint8_t)(1u << round % 8);
		kvc_release(&lease, 1);
		assert_int_equal(user_get(&reader, keys, 8, &n), KVC_ERR_CORRUPT);
		assert_int_equal(n, bad);
		assert_true(user_match_is(&reader, keys, 8, bad));
		assert_true(rig_metric_is(&rig_, "kvd_bad_blocks_total", round + 1));
		assert_int_equal(user_get(&reader, near, 8, &n), KVC_OK); /* next to it in the slab */
		assert_int_equal(n, 8);
		assert_int_equal(user_put(&reader, keys, 0, 8, 0, NULL), KVC_OK); /* computed again */
		user_expect(&wild, keys, 8);
	}
	user_leave(&reader);
	user_leave(&wild);
	other_end(&other, 0);
}

RIG_TEST(p6_slot_files_cut_off_under_the_daemon_are_misses, rig_begin(&rig_, 1))
{
	static kvc_key_t keys[TALKS][LEN];
	char command[200];
	other_t other;
	user_t user;
	uint32_t n;

	user_attach(&user, &rig_, "cut");
	for (uint32_t t = 0; t < TALKS; t++) {
		user_keys(&user, t, LEN, keys[t]);
		assert_int_equal(user_put(&user, keys[t], 0, LEN, 1, NULL), KVC_OK);
	}
	user_leave(&user);
	rig_stop(&rig_);
	rig_start(&rig_);
	other_start(&other, rig_.sock);
	user_attach(&user, &rig_, "cut");
	for (uint32_t t = 0; t < TALKS; t++) {
		assert_true(user_match_is(&user, keys[t], LEN, LEN));
	}
	snprintf(command, sizeof command, "truncate -s 0 %s/slots/*", rig_.disk);
	assert_int_equal(system(command), 0);
	for (uint32_t t = 0; t < TALKS; t++) {
		assert_int_not_equal(user_get(&user, keys[t], LEN, &n), KVC_OK);
		assert_int_equal(n, 0);
		/* a put may still find a parent that is about to be taken out: then it is asked for again */
		for (int tries = 0; tries < 5 && n < LEN; tries++) {
			if (user_put(&user, keys[t], 0, LEN, 0, NULL) != KVC_OK ||
			    user_get(&user, keys[t], LEN, &n) != KVC_OK) {
				print_message("conversation %u: %s\n", t, kvc_last_error());
			}
		}
		assert_int_equal(n, LEN);
	}
	/* Each block was read and was not whole, or the daemon has looked at the files before. */
	assert_true(rig_metric(&rig_, "kvd_bad_blocks_total") + rig_metric(&rig_, "kvd_disk_files_dropped_total") > 0);
	user_leave(&user);
	other_end(&other, 0);
}

/* Blocks are scribbled on while write-behind takes them to disk: what comes back from there is right or does not
 * come. */
RIG_TEST(p1_a_block_overwritten_before_write_behind_is_never_served, rig_begin(&rig_, 1))
{
	static kvc_key_t keys[TALKS][LEN];
	kv_test_rng_t rng = {.state = kv_test_seed() + 5};
	uint32_t n, whole = 0;
	kvc_lease_t *lease;
	user_t user;

	user_attach(&user, &rig_, "scribble");
	for (uint32_t t = 0; t < TALKS; t++) {
		user_keys(&user, t, LEN, keys[t]);
		assert_int_equal(user_put(&user, keys[t], 0, LEN, 0, NULL), KVC_OK);
		if (t % 2 == 0 && kvc_acquire(user.space, keys[t], LEN, 0, 0, &lease) == KVC_OK) {
			uint32_t bad = (uint32_t)kv_test_below(&rng, kvc_lease_n(lease));

			user_memory(lease, bad)[kv_test_below(&rng, RIG_BLOCK_BYTES)] ^= 0x40;
			kvc_release(&lease, 1);
		}
	}
	user_leave(&user);
	rig_written(&rig_);
	rig_check_quiet(&rig_);
	rig_stop(&rig_);

	rig_start(&rig_);
	user_attach(&user, &rig_, "scribble");
	for (uint32_t t = 1; t < TALKS; t += 2) {
		assert_true(user_match_is(&user, keys[t], LEN, LEN));
	}
	for (uint32_t t = 0; t < TALKS; t++) {
		(void)user_get(&user, keys[t], LEN, &n);
		whole += n == LEN;
	}
	printf("# whole from disk: %u of %u\n", whole, TALKS);
	assert_true(whole >= TALKS / 2); /* those nobody scribbled on are all there */
	user_leave(&user);               /* no wrong byte */
}

/* Descriptors of shared memory this process still has: none may be resized. Returns how many there are. */
static uint32_t try_to_truncate_all(void)
{
	char path[64], name[128];
	uint32_t seen = 0;

	for (int fd = 3; fd < 256; fd++) {
		ssize_t n;

		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		n = readlink(path, name, sizeof name - 1);
		if (n > 0 && memmem(name, (size_t)n, "memfd:", 6)) {
			seen++;
			assert_int_equal(ftruncate(fd, 0), -1);
			assert_int_equal(ftruncate(fd, 1 << 30), -1);
		}
	}

	return seen;
}

/* The file behind a mapping, as a hostile client gets at it; -1: not allowed to. */
static int file_behind(const void *address)
{
	unsigned long start, end;
	char line[512], path[96];
	FILE *maps = fopen("/proc/self/maps", "re");
	int fd = -1;

	assert_non_null(maps);
	while (fgets(line, sizeof line, maps)) {
		if (sscanf(line, "%lx-%lx", &start, &end) == 2 && (unsigned long)(uintptr_t)address >= start &&
		    (unsigned long)(uintptr_t)address < end) {
			snprintf(path, sizeof path, "/proc/self/map_files/%lx-%lx", start, end);
			fd = open(path, O_RDWR | O_CLOEXEC);
		}
	}
	fclose(maps);

	return fd;
}

RIG_TEST(p6_a_slab_punched_by_its_client_is_a_miss_for_it_only, rig_begin(&rig_, 1))
{
	kvc_key_t keys[40];
	user_t wild;
	kvc_lease_t *lease;
	other_t other;
	uint32_t n, reached = 0;
	uint8_t *memory;
	int fd;

	other_start(&other, rig_.sock);
	user_attach(&wild, &rig_, "wild");
	for (uint32_t round = 0; round < 10; round++) {
		user_keys(&wild, round, 40, keys);
		assert_int_equal(user_put(&wild, keys, 0, 40, 0, NULL), KVC_OK); /* write-behind begins */
		assert_int_equal(kvc_acquire(wild.space, keys, 40, 0, 0, &lease), KVC_OK);
		for (uint32_t i = round % 4; i < 40; i += 4) {
			memory = user_memory(lease, i);
			assert_int_equal(madvise(memory, RIG_BLOCK_BYTES, MADV_REMOVE), 0);
		}
		fd = file_behind(user_memory(lease, 1));
		if (fd >= 0) {
			assert_int_equal(ftruncate(fd, 0), -1);
			assert_int_equal(errno, EPERM);
			assert_int_equal(ftruncate(fd, 1 << 30), -1);
			close(fd);
			reached++;
		}
		kvc_release(&lease, 1);
		assert_true(user_get(&wild, keys, 40, &n) < 0);
		assert_int_equal(n, round % 4);
		other_goes_on(&other, 2);
	}
	printf("# slab files reached through /proc: %u of 10, descriptors of shared memory left open: %u\n", reached,
	       try_to_truncate_all());
	assert_true(rig_metric_reaches(&rig_, "kvd_bad_blocks_total", 10));
	user_leave(&wild);
	other_goes_on(&other, 5);
	other_end(&other, 0);
}
