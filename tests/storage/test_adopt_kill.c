/* A daemon that is killed at any instruction: another process is stepped through what a pool does, and whenever its
 * shared memory has changed, the next daemon's pool adopts it. */
#include "adopt_stage.h"

#include <signal.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#define BLOCKS 8u
#define OLD    9u /* epochs */
#define NEW    10u

/* Shared by both. A block may be found from the begin of its put to the end of its removal, and must be found from the
 * end of its put to the begin of its removal. */
typedef struct shared {
	stage_t stage;
	_Atomic int may[2][BLOCKS], must[2][BLOCKS]; /* by epoch */
} shared_t;

static shared_t *shared;
static stage_found_t found;

static kvs_loc_t put_noted(kvs_tier_t *pool, uint32_t class, uint64_t epoch, uint32_t n)
{
	const kvs_meta_t meta = stage_meta(1, epoch, n);
	kvs_loc_t loc;

	atomic_store(&shared->may[epoch == NEW][n], 1);
	if (stage_put(pool, class, &meta, KVS_READY, &loc) != KV_OK) {
		_exit(1);
	}
	atomic_store(&shared->must[epoch == NEW][n], 1);

	return loc;
}

/* In the other process. */
static _Noreturn void live(void)
{
	kvs_tier_t *pool = stage_open(&shared->stage, 4, 7);
	uint32_t class;
	kvs_loc_t loc;

	raise(SIGSTOP); /* it is stepped from here */
	stage_set_epoch(pool, 1, OLD);
	if (kvs_class_open(pool, "ns", &plain, &class) != KV_OK) {
		_exit(1);
	}
	put_noted(pool, class, OLD, 0);
	loc = put_noted(pool, class, OLD, 1);
	atomic_store(&shared->must[0][1], 0);
	kvs_free(pool, loc);
	atomic_store(&shared->may[0][1], 0);
	put_noted(pool, class, OLD, 2); /* in the slot that came free */
	for (uint32_t n = 0; n < BLOCKS; n++) {
		atomic_store(&shared->must[0][n], 0);
	}
	stage_set_epoch(pool, 1, NEW);
	for (uint32_t n = 0; n < BLOCKS; n++) {
		atomic_store(&shared->may[0][n], 0);
	}
	put_noted(pool, class, NEW, 3);
	_exit(0);
}

/* The next daemon, if the process were killed now. */
static void adopt_now(void)
{
	stage_t s;
	kvs_tier_t *pool;
	int seen[2][BLOCKS] = {{0}};

	stage_init(&s);
	s.from = &shared->stage;
	pool = stage_open(&s, 4, 8);
	stage_recover(pool, &found);
	assert_int_equal(found.wrong, 0);
	for (uint32_t i = 0; i < found.count; i++) {
		const uint32_t n = stage_number(&found.meta[i]);
		const kvs_meta_t meta = stage_meta(1, found.meta[i].epoch, n);

		assert_true(n < BLOCKS && (meta.epoch == OLD || meta.epoch == NEW));
		assert_memory_equal(&found.meta[i], &meta, sizeof meta);
		assert_int_equal(atomic_load(&shared->may[meta.epoch == NEW][n]), 1);
		assert_int_equal(kvs_epoch_get(pool, meta.root), meta.epoch);
		seen[meta.epoch == NEW][n]++;
	}
	for (uint32_t n = 0; n < 2 * BLOCKS; n++) {
		assert_in_range(seen[n / BLOCKS][n % BLOCKS], atomic_load(&shared->must[n / BLOCKS][n % BLOCKS]), 1);
	}
	/* The keeper has the descriptors of every slab that the ledger names. */
	assert_int_equal(stage_metric(&s, KV_M_ADOPT_REFUSED), 0);
	kvs_close(pool);
	stage_fini(&s);
}

/* Does what the next daemon reads differ from what it was? The first two pages of each are what this life touches. */
static int has_changed(uint8_t seen[3][8192])
{
	static const char *const names[] = {"ledger", "digest"};
	uint8_t now[3][8192] = {{0}};
	int changed = 0, fd;

	for (uint32_t i = 0; i < 2; i++) {
		fd = stage_claim(&shared->stage, names[i]);
		if (fd >= 0) {
			assert_true(pread(fd, now[i], sizeof now[i], 0) > 0);
		}
		if (fd >= 0 && i == 0) {
			const kvs_ledger_header_t *header = (const void *)now[0];

			assert_true(pread(fd, now[2], 4096, (off_t)header->slabs_offset) > 0);
			memset(now[0] + 4096, 0, 4096);
			assert_true(pread(fd, now[0] + 4096, 4096, (off_t)header->epochs_offset) > 0);
		}
		if (fd >= 0) {
			close(fd);
		}
	}
	changed = memcmp(seen, now, sizeof now) != 0;
	memcpy(seen, now, sizeof now);

	return changed;
}

KV_TEST(p3_a_daemon_killed_at_any_instruction_leaves_whole_blocks)
{
	static uint8_t seen[3][8192];
	uint64_t steps = 0, changes = 0;
	int wstatus = 0;
	pid_t pid;

	shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_true(shared != MAP_FAILED);
	stage_init(&shared->stage);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		shared->stage.pid = getpid();
		if (ptrace(PTRACE_TRACEME, 0, NULL, NULL) != 0) {
			_exit(77);
		}
		live();
	}
	assert_int_equal(waitpid(pid, &wstatus, 0), pid);
	if (WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 77) {
		kv_test_skip("no process may be traced here");
	}
	while (WIFSTOPPED(wstatus)) {
		if (has_changed(seen)) {
			changes++;
			adopt_now();
		}
		assert_int_equal(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL), 0);
		assert_int_equal(waitpid(pid, &wstatus, 0), pid);
		steps++;
	}
	assert_true(WIFEXITED(wstatus) && WEXITSTATUS(wstatus) == 0);
	printf("# instructions %lu, states %lu\n", (unsigned long)steps, (unsigned long)changes);
	assert_true(changes > 60);
	munmap(shared, sizeof *shared);
}
