/* P2: numbers of classes that go to other block sizes, whenever the process is killed. */
#include "nvme_test.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#define ROUNDS 8
#define SIZES  600u /* there are numbers for 256 at a time */
#define KEPT   250u

static kvs_geometry_t size_at(uint32_t i)
{
	const uint32_t bytes = 8192u + 8u * i;

	return (kvs_geometry_t){
		.block_bytes = bytes, .heads = 1, .leaves = 1, .leaf_bytes = bytes, .page_bytes = bytes};
}

/* In the directory of f_. */
static void begin(void)
{
	kv_status_t status;

	f_.config.file_bytes = 64u << 10;
	while ((status = fixture_open(&f_)) == KV_ERR_LOCKED) { /* by the metadata process of one that was killed */
	}
	assert_int_equal(status, KV_OK);
	recover(&f_, &found_);
	if (kvs_epoch_get(f_.tier, space_root) == 0) {
		assert_int_equal(epoch_wait(f_.tier, 1), KV_OK);
	}
}

/* Files without a block go. */
static void retire_empty(kvs_tier_t *tier)
{
	const kvs_rebalance_ops_t *ops = tier->ops->rebalance;
	kvs_slab_desc_t desc;

	for (uint32_t file = 0; file < ops->slab_count(tier); file++) {
		if (ops->describe_slab(tier, file, &desc) == KV_OK && !desc.retired && desc.taken == 0) {
			ops->begin_retire(tier, file);
			(void)ops->retire(tier, file, desc.slot_class);
		}
	}
}

/* A class of this size: KV_ERR_BUSY is waited for, KV_ERR_LIMIT is the answer while all are used. */
static kv_status_t open_size(uint32_t i, uint32_t *p_class)
{
	const kvs_geometry_t size = size_at(i);
	const uint64_t deadline = real_now(NULL) + UINT64_C(60000000000);
	kv_status_t status;

	while ((status = kvs_class_open(f_.tier, "default", &size, p_class)) == KV_ERR_BUSY &&
	       real_now(NULL) < deadline) {
		retire_empty(f_.tier);
		kvs_poll(f_.tier, 64);
		usleep(100);
	}

	return status;
}

static kv_status_t put_size(uint32_t i, kvs_loc_t *p_loc)
{
	const kvs_geometry_t size = size_at(i);
	const uint64_t deadline = real_now(NULL) + UINT64_C(60000000000);
	kv_status_t status;

	while ((status = put_block(&f_, &size, i + 1u, 1, p_loc)) == KV_ERR_BUSY && real_now(NULL) < deadline) {
		kvs_poll(f_.tier, 64); /* the superblock names the class first */
	}

	return status;
}

/* One block of each size, of KEPT sizes at a time; `side` has each size before its block may be missing: 2i when it was
 * acknowledged, 2i + 1 before it goes. Runs until it is killed. */
static int writer(const char *dir, const char *side, uint32_t next)
{
	static kvs_loc_t loc[SIZES];
	static uint32_t class[SIZES];
	static uint8_t is_there[SIZES];
	int fd = open(side, O_WRONLY | O_APPEND | O_CLOEXEC);

	fixture_init(&f_, dir);
	begin();
	for (uint32_t i = 0; i < found_.count; i++) {
		uint64_t chain;

		memcpy(&chain, found_.meta[i].key.b + 8, sizeof chain);
		loc[chain - 2u] = found_.loc[i];
		class[chain - 2u] = found_.slot_class[i];
		is_there[chain - 2u] = 1;
	}
	for (uint32_t i = next; i < SIZES; i++) {
		const uint32_t note = 2u * i;

		for (uint32_t old = 0; old + KEPT <= i; old++) {
			const uint32_t going = 2u * old + 1u;

			if (is_there[old]) {
				if (write(fd, &going, sizeof going) != (ssize_t)sizeof going) {
					return 4;
				}
				kvs_free(f_.tier, loc[old]);
				kvs_class_close(f_.tier, class[old]);
				is_there[old] = 0;
			}
		}
		if (open_size(i, &class[i]) != KV_OK) {
			return 5;
		}
		f_.slot_class = class[i];
		if (put_size(i, &loc[i]) != KV_OK || flush_wait(f_.tier) != KV_OK ||
		    write(fd, &note, sizeof note) != (ssize_t)sizeof note) {
			return 6;
		}
		is_there[i] = 1;
	}
	pause();

	return 0;
}

static uint32_t check_found(int fd)
{
	static uint8_t expected[SIZES];
	uint32_t note, next = 0;
	off_t at = 0;

	memset(expected, 0, sizeof expected);
	for (; pread(fd, &note, sizeof note, at) == (ssize_t)sizeof note; at += (off_t)sizeof note) {
		expected[note / 2u] = note % 2u == 0;
		next = note % 2u == 0 ? note / 2u + 1u : next;
	}
	for (uint32_t i = 0; i < found_.count; i++) {
		uint64_t chain;
		kvs_geometry_t size;
		uint32_t class;

		memcpy(&chain, found_.meta[i].key.b + 8, sizeof chain);
		size = size_at((uint32_t)chain - 2u);
		assert_int_equal(kvs_class_open(f_.tier, "default", &size, &class), KV_OK);
		assert_int_equal(class, found_.slot_class[i]);
		assert_int_equal(get_block(&f_, &size, chain - 1u, 1, found_.loc[i]), KV_OK);
		expected[chain - 2u] = 0;
	}
	for (uint32_t i = 0; i < SIZES; i++) {
		assert_int_equal(expected[i], 0);
	}
	check_sums(&f_);

	return next;
}

DISK_TEST(p2_a_number_given_to_another_size_names_nothing_of_the_first, fixture_init(&f_, NULL))
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint32_t next = 0;
	char side[256];
	int fd;

	snprintf(side, sizeof side, "%s.side", f_.dir);
	fd = open(side, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		const off_t before = lseek(fd, 0, SEEK_END);
		const off_t more = (off_t)(round == 0 ? KEPT + 8u : 1u) * (off_t)sizeof(uint32_t);
		char first[32];
		pid_t pid;

		snprintf(first, sizeof first, "%u", next);
		pid = fork();
		if (pid == 0) {
			execl("/proc/self/exe", "writer", f_.dir, side, first, (char *)NULL);
			_exit(99);
		}
		for (int i = 0; i < 6000 && lseek(fd, 0, SEEK_END) < before + more && kill(pid, 0) == 0; i++) {
			usleep(10000);
		}
		usleep((useconds_t)kv_test_below(&rng, 100000));
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		assert_true(lseek(fd, 0, SEEK_END) >= before + more);
		if (round % 3u == 2u) {
			lose_metadata(&f_);
		}
		begin();
		next = check_found(fd);
		fixture_close(&f_);
	}
	assert_true(next > 256u);
	close(fd);
	unlink(side);
}

DISK_TEST(p5_a_size_that_is_used_keeps_its_number, fixture_init(&f_, NULL))
{
	static uint32_t class[257];
	uint32_t again, n = 0;
	kvs_loc_t loc;

	begin();
	while (open_size(n, &class[n]) == KV_OK) {
		assert_true(n < 256u);
		n++;
	}
	assert_int_equal(n, 256);
	f_.slot_class = class[3];
	assert_int_equal(put_size(3, &loc), KV_OK);
	kvs_free(f_.tier, loc);
	kvs_class_close(f_.tier, class[3]);
	f_.slot_class = class[7];
	assert_int_equal(put_size(7, &loc), KV_OK);
	flush_ok();
	assert_int_equal(open_size(3, &again), KV_OK); /* it is known still */
	assert_int_equal(again, class[3]);
	assert_int_equal(open_size(256, &again), KV_ERR_LIMIT);
	kvs_class_close(f_.tier, class[3]);
	assert_int_equal(open_size(256, &again), KV_OK);
	assert_int_equal(again, class[3]);
	f_.slot_class = again;
	assert_int_equal(put_block(&f_, &(kvs_geometry_t){8192, 1, 1, 8192, 8192}, 1, 1, &loc), KV_ERR_BUSY);
	assert_int_equal(put_size(256, &loc), KV_OK);
	flush_ok();
	check_sums(&f_);
}

int main(int argc, char **argv)
{
	if (argc == 4) {
		return writer(argv[1], argv[2], (uint32_t)strtoul(argv[3], NULL, 10));
	}

	return kv_test_run(NULL, NULL);
}
