/* P2: kill -9 at any moment. A writer process stores, flushes and notes in a side file what was acknowledged; it is
 * killed; the next opens the same directory, checks that every acknowledged block is there with its bytes, and goes
 * on. */
#include "metadb/metadb.h"
#include "nvme_test.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

#define ROUNDS     6
#define BATCH      8u
#define MAX_CHAINS 400u
#define STARTS     50u
#define FILES_MOST 24u /* of a metadata database at rest */

/* Chains of BATCH blocks: chain numbers that were flushed whole are appended to `side`. Runs until it is killed. */
static int writer(const char *dir, const char *side, uint64_t chain)
{
	static block_t b[BATCH];
	int fd = open(side, O_WRONLY | O_APPEND | O_CLOEXEC);

	fixture_init(&f_, dir);
	fixture_begin(&f_, &found_);
	for (uint32_t n = 0; n < MAX_CHAINS / ROUNDS; n++, chain++) {
		outcome_t o[BATCH] = {0};
		kvs_loc_t loc;

		for (uint32_t i = 0; i < BATCH; i++) {
			kvs_meta_t meta = meta_of(chain, i + 1, 1);

			block_fill(&plain, kv_key_hash(&meta.key), &b[i]);
			if (kvs_alloc(f_.tier, f_.slot_class, KVS_FILLING, 1, &meta, &loc) != KV_OK ||
			    kvs_store(f_.tier, loc, &b[i].mem, record_outcome, &o[i]) != KV_OK) {
				return 3;
			}
		}
		if (flush_wait(f_.tier) != KV_OK || write(fd, &chain, sizeof chain) != (ssize_t)sizeof chain) {
			return 4;
		}
	}
	pause();

	return 0;
}

/* A chain. All below depth 4 is freed and withdrawn, one block while it is being read. The process dies with
 * the answer. */
static int withdraw_and_die(const char *dir)
{
	static block_t b;
	kvs_loc_t loc[BATCH];
	outcome_t read = {0}, o = {0};

	fixture_init(&f_, dir);
	fixture_begin(&f_, &found_);
	for (uint32_t i = 0; i < BATCH; i++) {
		if (put_block(&f_, &plain, 1, i + 1, &loc[i]) != KV_OK) {
			return 3;
		}
	}
	block_blank(&b);
	if (flush_wait(f_.tier) != KV_OK || kvs_load(f_.tier, loc[6], &b.mem, record_outcome, &read) != KV_OK) {
		return 4;
	}
	for (uint32_t i = BATCH; i-- > 4;) {
		kvs_free(f_.tier, loc[i]);
	}
	if (kvs_withdraw(f_.tier, space_root, record_outcome, &o) != KV_OK || await(f_.tier, &o) != KV_OK) {
		return 5;
	}

	return raise(SIGKILL);
}

/* Without the metadata nothing tells the headers of withdrawn blocks from those of others: none that is older counts,
 * and all that are younger do. */
DISK_TEST(p1_withdrawn_blocks_stay_away_after_kill_9_and_without_metadata, fixture_init(&f_, NULL))
{
	kvs_loc_t loc;
	int status;
	pid_t pid;

	pid = fork();
	if (pid == 0) {
		execl("/proc/self/exe", "withdraw", f_.dir, (char *)NULL);
		_exit(99);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);

	begin_finding(4);
	assert_int_equal(get_block(&f_, &plain, 1, 4, found_.loc[found_find(&found_, 1, 4)]), KV_OK);
	reopen_without_metadata_finding(0);
	for (uint32_t depth = 1; depth <= 6; depth++) {
		assert_int_equal(put_block(&f_, &plain, 1, depth, &loc), KV_OK);
	}
	flush_ok();
	reopen_without_metadata_finding(6);
	/* A reset begins to count anew. */
	assert_int_equal(epoch_wait(f_.tier, 2), KV_OK);
	reopen_without_metadata_finding(0);
	check_sums(&f_);
}

static void check_chain(fixture_t *f, uint64_t chain)
{
	for (uint32_t d = 1; d <= BATCH; d++) {
		int i = found_find(&found_, chain, d);

		assert_true(i >= 0);
		assert_int_equal(get_block(f, &plain, chain, d, found_.loc[i]), KV_OK);
	}
}

DISK_TEST(p2_every_flushed_block_survives_kill_9, fixture_init(&f_, NULL))
{
	kv_test_rng_t rng = {kv_test_seed()};
	char side[256];
	uint32_t checked = 0;
	int fd;

	snprintf(side, sizeof side, "%s.side", f_.dir);
	fd = open(side, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	for (uint64_t round = 0; round < ROUNDS; round++) {
		char first[32];
		uint64_t chain;
		off_t at = 0;
		off_t before = lseek(fd, 0, SEEK_END);
		pid_t pid;

		snprintf(first, sizeof first, "%llu", (unsigned long long)(round * MAX_CHAINS));
		pid = fork();
		if (pid == 0) {
			/* a fresh program: RocksDB does not survive a fork */
			execl("/proc/self/exe", "writer", f_.dir, side, first, (char *)NULL);
			_exit(99);
		}
		/* somewhere after its first acknowledgement, however slow this machine is today */
		for (int i = 0; i < 1000 && lseek(fd, 0, SEEK_END) == before; i++) {
			usleep(10000);
		}
		usleep((useconds_t)kv_test_below(&rng, 200000));
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);

		fixture_begin(&f_, &found_);
		checked = 0;
		while (pread(fd, &chain, sizeof chain, at) == (ssize_t)sizeof chain) {
			check_chain(&f_, chain);
			at += (off_t)sizeof chain;
			checked++;
		}
		for (uint32_t i = 0; i < found_.count; i++) {
			/* what was not acknowledged may be there as well, with its own bytes */
			uint64_t of;

			memcpy(&of, found_.meta[i].key.b + 8, sizeof of);
			assert_int_equal(get_block(&f_, &plain, of - 1, found_.meta[i].depth, found_.loc[i]), KV_OK);
		}
		check_sums(&f_);
		fixture_close(&f_);
	}
	print_message("# chains acknowledged and found again: %u\n", checked);
	assert_true(checked >= ROUNDS);
	close(fd);
	unlink(side);
}

/* ---- the files of the metadata database ------------------------------------------------------ */

static uint32_t count_files(const char *path)
{
	DIR *dir = opendir(path);
	const struct dirent *entry;
	uint32_t count = 0;

	assert_non_null(dir);
	while ((entry = readdir(dir)) != NULL) {
		count += entry->d_name[0] != '.';
	}
	closedir(dir);

	return count;
}

static kvs_metadb_t *open_metadata(const char *dir, char path[256])
{
	static kv_metrics_t metrics;
	kvs_metadb_config_t config = {.path = path, .dir_fd = -1, .allowance = MIB, .uuid = 7, .metrics = &metrics};
	kvs_metadb_t *db = NULL;
	int marked = 0;

	snprintf(path, 256, "%s/meta", dir);
	assert_int_equal(kvs_metadb_create(&config, &kv_env_posix, &db), KV_OK);
	assert_int_equal(kvs_metadb_open(db, 0, 0, &marked), KV_OK);
	if (!marked) {
		assert_int_equal(kvs_metadb_mark(db), KV_OK);
	}

	return db;
}

/* One start: slot 0 writes nothing. */
static int use_metadata(const char *dir, const char *end, const char *slot)
{
	kvs_row_change_t change = {.is_put = 1, .row.slot = (kv_slot_t)strtoul(slot, NULL, 10)};
	char path[256];
	kvs_metadb_t *db = open_metadata(dir, path);

	if (change.row.slot && kvs_metadb_write(db, &change, 1) != KV_OK) {
		return 3;
	}
	if (strcmp(end, "kill") == 0) {
		return raise(SIGKILL); /* the metadata process dies with it */
	}
	kvs_metadb_close(db);

	return 0;
}

/* Every second one is killed. */
static void start_often(int writes)
{
	char dir[128], path[256], slot[16];
	kvs_metadb_t *db;

	kv_test_dir_make(dir, sizeof dir);
	for (uint32_t i = 0; i < STARTS; i++) {
		const int killed = i % 2;
		pid_t pid = fork();
		int status;

		snprintf(slot, sizeof slot, "%u", writes ? i + 1 : 0);
		if (pid == 0) {
			execl("/proc/self/exe", "metadata", dir, killed ? "kill" : "close", slot, "", (char *)NULL);
			_exit(99);
		}
		assert_int_equal(waitpid(pid, &status, 0), pid);
		assert_int_equal(WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), killed ? SIGKILL : 0);
	}
	db = open_metadata(dir, path);
	KV_AWAIT(count_files(path) <= FILES_MOST);
	kvs_metadb_close(db);
	kv_test_dir_remove(dir);
}

KV_TEST(p5_starts_of_the_metadata_process_leave_no_files)
{
	start_often(0);
	start_often(1);
}

int main(int argc, char **argv)
{
	if (argc == 5) {
		return use_metadata(argv[1], argv[2], argv[3]);
	}
	if (argc == 2 && strcmp(argv[0], "withdraw") == 0) {
		return withdraw_and_die(argv[1]);
	}
	if (argc == 4) {
		return writer(argv[1], argv[2], strtoull(argv[3], NULL, 10));
	}

	return kv_test_run(NULL, NULL);
}
