/* Faults of the disk, kills and losses of power in a loop: what was acknowledged as durable is there, with the right
 * bytes, and nothing leaks. */
#include "e2e/rig/fault_disk_rig.h"

#include <errno.h>
#include <signal.h>

#define LEN   3u
#define TALKS 6u   /* a round */
#define FRESH 100u /* rounds on one directory: the tier holds them all, so nothing is evicted */
#define DRAWN (-1) /* an error of this kind */

typedef struct fault {
	const char *name;
	enum fault_op op; /* FAULT_OPS: none */
	uint32_t where;
	int error; /* 0: only a part is moved */
	int again; /* several times in a row; 2: for the whole round */
} fault_t;

/* What names, sizes and descriptors can fail with. A full file system may cost blocks: it has its own row. */
static const int name_errors[] = {EIO, EMFILE, ENFILE, EACCES, EROFS, EDQUOT, ENOMEM};
static const int ring_errors[] = {EAGAIN, EINTR, EBUSY, ENOMEM};

static const fault_t faults[] = {
	{"none", FAULT_OPS, 0, 0, 0},
	{"kill -9 of the metadata process", FAULT_OPS, 0, 0, 0},
	{"the database is lost", FAULT_OPS, 0, 0, 0},
	{"a failed sync of data", FAULT_SYNC, FAULT_SLOTS, EIO, 0},
	{"a failed sync of rows", FAULT_SYNC, FAULT_ROWS, EIO, 0},
	{"a failed sync of a superblock", FAULT_SYNC, FAULT_SUPER, EIO, 0},
	{"a failed sync of a directory", FAULT_SYNC_DIR, FAULT_ANYWHERE, EIO, 0},
	{"syncs that fail again and again", FAULT_SYNC, FAULT_ANYWHERE, EIO, 1},
	{"a write of data that fails half-way", FAULT_WRITE, FAULT_SLOTS, EIO, 0},
	{"a write of rows that fails half-way", FAULT_WRITE, FAULT_ROWS, EIO, 0},
	{"superblocks that cannot be written", FAULT_WRITE, FAULT_SUPER, EIO, 1},
	{"writes that fail again and again", FAULT_WRITE, FAULT_ANYWHERE, EIO, 1},
	{"short writes", FAULT_WRITE, FAULT_ANYWHERE, 0, 1},
	{"a full device", FAULT_WRITE, FAULT_ANYWHERE, ENOSPC, 1},
	{"reads that fail", FAULT_READ, FAULT_ANYWHERE, EIO, 1},
	{"short reads", FAULT_READ, FAULT_ANYWHERE, 0, 1},
	{"a slot file that cannot be made", FAULT_CREATE, FAULT_SLOTS, DRAWN, 0},
	{"slot files that cannot be made", FAULT_CREATE, FAULT_SLOTS, DRAWN, 2},
	{"files of rows that cannot be made", FAULT_CREATE, FAULT_ROWS, DRAWN, 1},
	{"no file can be made", FAULT_CREATE, FAULT_ANYWHERE, DRAWN, 2},
	{"a slot file that cannot be opened", FAULT_OPEN, FAULT_SLOTS, DRAWN, 0},
	{"files of rows that cannot be opened", FAULT_OPEN, FAULT_ROWS, DRAWN, 1},
	{"superblocks that cannot be opened", FAULT_OPEN, FAULT_SUPER, DRAWN, 1},
	{"no file can be opened", FAULT_OPEN, FAULT_ANYWHERE, DRAWN, 2},
	{"a slot file that gets no room", FAULT_SIZE, FAULT_SLOTS, DRAWN, 0},
	{"sizes that cannot be set", FAULT_SIZE, FAULT_ANYWHERE, DRAWN, 2},
	{"names that cannot be changed", FAULT_RENAME, FAULT_ANYWHERE, DRAWN, 1},
	{"names that cannot be removed", FAULT_REMOVE, FAULT_ANYWHERE, DRAWN, 1},
	{"directories that cannot be made", FAULT_MKDIR, FAULT_ANYWHERE, DRAWN, 1},
	{"directories that cannot be read", FAULT_LIST, FAULT_ANYWHERE, EIO, 1},
	{"files that cannot be looked at", FAULT_STAT, FAULT_ANYWHERE, EIO, 1},
	{"a ring that refuses", FAULT_RING, FAULT_ANYWHERE, DRAWN, 1},
	{"no process can be started", FAULT_SPAWN, FAULT_ANYWHERE, DRAWN, 1},
};

enum { KILL_META = 1, LOSE_META = 2 };

typedef struct loop {
	rig_t rig;
	fault_disk_t disk;
	kv_test_rng_t rng;
	uint32_t engine;                                            /* index of the option that names it */
	uint32_t noted[FRESH * TALKS + 1], owed[FRESH * TALKS + 1]; /* acknowledged; put, and not acknowledged */
	uint32_t noted_count, owed_count, talk, lost;
	uint32_t rounds[KV_COUNT_OF(faults)], fired[KV_COUNT_OF(faults)];
	uint64_t acknowledged, refused, checked, injected, ring_writes, losses;
	fault_loss_t loss;
} loop_t;

static void arm(loop_t *l, const fault_t *fault)
{
	const uint32_t skip = fault->where == FAULT_SUPER || fault->op > FAULT_SYNC_DIR ? 2 : 12;
	const int error = fault->error != DRAWN     ? fault->error
			  : fault->op == FAULT_RING ? ring_errors[kv_test_below(&l->rng, KV_COUNT_OF(ring_errors))]
						    : name_errors[kv_test_below(&l->rng, KV_COUNT_OF(name_errors))];
	uint32_t count = fault->again ? 2 + (uint32_t)kv_test_below(&l->rng, 5) : 1;

	count = fault->again == 2 ? UINT32_MAX : count;
	count = fault->op == FAULT_OPS    ? 0
		: fault->op == FAULT_READ ? count / 2
					  : count; /* a header is read four times */
	fault_disk_arm(&l->disk, fault->op, fault->where, error, (uint32_t)kv_test_below(&l->rng, skip), count);
}

static void disarm(loop_t *l)
{
	fault_disk_arm(&l->disk, FAULT_OPS, 0, 0, 0, 0);
}

/* A new directory. */
static void loop_open(loop_t *l)
{
	rig_init(&l->rig, 1);
	fault_disk_open(&l->disk, &l->rig);
	rig_option(&l->rig, "--nvme.flush_interval=2ms");
	rig_option(&l->rig, "--nvme.file_size=1MiB");
	l->engine = l->rig.option_count;
	rig_option(&l->rig, "--nvme.io_engine=auto");
	l->noted_count = l->owed_count = l->talk = 0;
}

static void loop_close(loop_t *l)
{
	l->injected += atomic_load(&l->disk.control->injected);
	l->ring_writes += atomic_load(&l->disk.control->ring_writes);
	rig_fini(&l->rig);
	fault_disk_close(&l->disk);
}

static int has_disk(const loop_t *l)
{
	return rig_metric(&l->rig, "kvd_disk_off") == 0;
}

/* It is tried again. */
static void await_disk(const loop_t *l)
{
	KV_AWAIT(has_disk(l));
}

/* A start may fail under a fault, or go on without the disk tier, which then comes late; one without a fault must do
 * neither. */
static void loop_start(loop_t *l, int is_faulty)
{
	snprintf(l->rig.options[l->engine], sizeof l->rig.options[0], "--nvme.io_engine=%s",
		 kv_test_below(&l->rng, 2) ? "threads" : "auto");
	if (rig_try(&l->rig) == -1) {
		if (has_disk(l)) {
			return;
		}
		assert_true(is_faulty);
		if (kv_test_below(&l->rng, 2)) {
			disarm(l);
			await_disk(l);
			return;
		}
		rig_crash(&l->rig);
	}
	assert_true(is_faulty);
	disarm(l);
	rig_start(&l->rig);
	assert_true(has_disk(l));
}

/* All that was ever acknowledged on this directory, or, of what is older, one in `every`. Other bytes are never handed
 * out. */
static void loop_verify(loop_t *l, user_t *user, uint32_t every)
{
	kvc_key_t keys[LEN];

	for (uint32_t i = 0; i < l->noted_count; i++) {
		uint32_t n = 0;

		if (i + 2 * TALKS < l->noted_count && kv_test_below(&l->rng, every) != 0) {
			continue;
		}
		user_keys(user, l->noted[i], LEN, keys);
		if (atomic_load(&l->disk.control->lie)) {
			l->lost += user_get(user, keys, LEN, &n) != KVC_OK || n != LEN;
		} else if (!user_match_is(user, keys, LEN, LEN) || user_get(user, keys, LEN, &n) != KVC_OK ||
			   n != LEN) {
			fail_msg("conversation %u was acknowledged and %u of its blocks are there", l->noted[i], n);
		}
		l->checked++;
	}
	assert_int_equal(user->wrong, 0);
}

/* One that is new, or one whose blocks may be there and were never acknowledged. */
static uint32_t some_talk(loop_t *l)
{
	uint32_t i = l->owed_count ? (uint32_t)kv_test_below(&l->rng, l->owed_count) : 0, talk;

	if (l->owed_count == 0 || kv_test_below(&l->rng, 2)) {
		return l->talk++;
	}
	talk = l->owed[i];
	l->owed[i] = l->owed[--l->owed_count];

	return talk;
}

/* An engine reads what is there, and puts what is not. 0: what is there cannot be read now. */
static int is_read(user_t *user, const kvc_key_t *keys)
{
	uint32_t there = user_match(user, keys, LEN), n = 0;

	while (there > 0 && (user_get(user, keys, there, &n) != KVC_OK || n != there)) {
		const uint32_t before = there;

		there = user_match(user, keys, LEN);
		if (there == before) {
			return 0;
		}
	}

	return 1;
}

/* Epochs are in the superblocks. */
static void reset_another(user_t *user)
{
	const kvc_identity_t identity = user_identity("reset");
	kvc_space_t *space = NULL;

	if (kvc_space_open(user->kvc, &identity, &space) == KVC_OK) {
		(void)kvc_space_reset(space);
	}
	kvc_space_close(space);
}

static void loop_work(loop_t *l, user_t *user, uint32_t kind)
{
	kvc_key_t keys[LEN];
	pid_t meta;

	for (uint32_t i = 0; i < TALKS; i++) {
		const uint32_t talk = some_talk(l);
		const int durable = i + 1 < TALKS; /* the last one's write is under way when the kill comes */
		uint32_t n = 0;

		if (i == 2) {
			reset_another(user);
		}
		if (i == 1 && kind == KILL_META && (meta = rig_meta(&l->rig)) > 0) {
			kill(meta, SIGKILL);
			l->fired[kind]++;
		}
		if (l->noted_count > 0) { /* it may fail, and hands out no other bytes */
			user_keys(user, l->noted[kv_test_below(&l->rng, l->noted_count)], LEN, keys);
			(void)user_get(user, keys, LEN, &n);
		}
		user_keys(user, talk, LEN, keys);
		if (kv_test_below(&l->rng, 2) && !is_read(user, keys)) {
			l->owed[l->owed_count++] = talk;
			continue;
		}
		if (user_put(user, keys, 0, LEN, durable, &n) == KVC_OK && n == LEN && durable) {
			l->noted[l->noted_count++] = talk;
			l->acknowledged++;
		} else {
			l->owed[l->owed_count++] = talk;
			l->refused += (uint64_t)durable;
		}
	}
	assert_int_equal(user->wrong, 0);
}

static void lose_database(loop_t *l)
{
	char path[96];

	snprintf(path, sizeof path, "%s/meta", l->rig.disk);
	fault_disk_wait(&l->rig);
	kv_test_dir_remove(path);
}

/* Kill -9, and half of the time the power goes with it. If not, what is unverified stays so: a daemon that trusts what
 * it reads after the kill loses it later. */
static void loop_end(loop_t *l)
{
	rig_crash(&l->rig);
	if (kv_test_below(&l->rng, 2)) {
		fault_disk_lose_power(&l->disk, &l->rig, &l->rng, kv_test_below(&l->rng, 3) == 0, &l->loss);
		l->losses++;
	}
}

/* Sometimes the fault is there at the start already; one of reads not while everything is verified. */
static void loop_round(loop_t *l, uint32_t kind)
{
	const fault_t *fault = &faults[kind];
	const int early = (int)kv_test_below(&l->rng, 2);
	const uint64_t injected = atomic_load(&l->disk.control->injected);
	user_t user;

	if (early) {
		arm(l, fault);
	}
	loop_start(l, early && fault->op != FAULT_OPS);
	if (kv_test_below(&l->rng, 8) == 0) { /* what the start itself has written */
		loop_end(l);
		loop_start(l, early && fault->op != FAULT_OPS);
	}
	if (fault->op == FAULT_READ) {
		disarm(l);
	}
	user_attach(&user, &l->rig, "loop");
	loop_verify(l, &user, 16);
	if (!early || fault->op == FAULT_READ) {
		arm(l, fault);
	}
	loop_work(l, &user, kind);
	user_leave(&user);
	usleep((useconds_t)kv_test_below(&l->rng, kv_test_below(&l->rng, 2) ? 1000 : 10000));
	loop_end(l);
	disarm(l);
	l->rounds[kind]++;
	l->fired[kind] += atomic_load(&l->disk.control->injected) > injected;
	if (kind == LOSE_META) {
		lose_database(l);
		l->fired[kind]++;
	}
}

/* Everything, and that nothing leaks. */
static void loop_check(loop_t *l)
{
	user_t user;

	loop_start(l, 0);
	user_attach(&user, &l->rig, "loop");
	loop_verify(l, &user, 1);
	user_leave(&user);
	assert_true(rig_metric(&l->rig, "kvd_evicted_total{tier=disk}") == 0);
	rig_check_quiet(&l->rig);
}

static uint32_t rounds = 60;

/* Acknowledgements are noted here, outside the daemon. */
KV_TEST(p2_acknowledged_blocks_survive_faults_kills_and_power_loss)
{
	loop_t *l = calloc(1, sizeof *l);

	assert_non_null(l);
	l->rng.state = kv_test_seed();
	for (uint32_t round = 0; round < rounds; round++) {
		const uint32_t kind = (uint32_t)kv_test_below(&l->rng, KV_COUNT_OF(faults));

		if (round % FRESH == 0) {
			loop_open(l);
		}
		if (rounds > 200 && round % 50 == 0) {
			printf("# round %u, then: %s\n", round, faults[kind].name);
			fflush(stdout);
		}
		loop_round(l, kind);
		if (round + 1 == rounds || (round + 1) % FRESH == 0) {
			loop_check(l);
			loop_close(l);
		}
	}
	printf("# rounds %u, losses of power %" PRIu64 ", faults %" PRIu64 ", writes by rings %" PRIu64
	       "; unverified writes %" PRIu64 ", undone %" PRIu64 " (torn %" PRIu64 "), files cut %" PRIu64
	       ", names taken back %" PRIu64 "\n",
	       rounds, l->losses, l->injected, l->ring_writes, l->loss.doubtful, l->loss.undone, l->loss.torn,
	       l->loss.cut, l->loss.names);
	printf("# %" PRIu64 " acknowledged, %" PRIu64 " refused, %" PRIu64 " checked: 0 lost, 0 wrong, 0 leaked\n",
	       l->acknowledged, l->refused, l->checked);
	for (uint32_t kind = 1; kind < KV_COUNT_OF(faults); kind++) {
		printf("# %-38s %3u rounds, came %3u times\n", faults[kind].name, l->rounds[kind], l->fired[kind]);
		assert_true(l->fired[kind] > 0 || l->rounds[kind] < 20);
	}
	assert_true(l->acknowledged > rounds / 2u);
	assert_true(rounds < 20 || (l->injected > 0 && l->ring_writes > 0 && l->loss.undone > 0 && l->loss.torn > 0 &&
				    l->loss.names > 0));
	free(l);
}

/* The loop can fail: where syncs are a lie, acknowledged blocks are lost. What is left has the right bytes even
 * there. */
KV_TEST(p1_a_disk_that_lies_about_syncs_loses_blocks_and_is_caught)
{
	loop_t *l = calloc(1, sizeof *l);
	user_t user;

	assert_non_null(l);
	l->rng.state = kv_test_seed();
	loop_open(l);
	for (uint32_t round = 0; round < 8; round++) {
		loop_start(l, 0);
		atomic_store(&l->disk.control->lie, FAULT_SLOTS | FAULT_ROWS);
		user_attach(&user, &l->rig, "loop");
		loop_verify(l, &user, 1);
		l->noted_count = 0;
		loop_work(l, &user, 0);
		user_leave(&user);
		rig_crash(&l->rig);
		fault_disk_lose_power(&l->disk, &l->rig, &l->rng, round == 0, &l->loss);
	}
	printf("# lies: %" PRIu64 " acknowledged, %u lost\n", l->acknowledged, l->lost);
	assert_in_range(l->lost, 1, l->acknowledged);
	loop_start(l, 0);
	loop_close(l);
	free(l);
}

static void loop_begin(loop_t *l)
{
	assert_non_null(l);
	l->rng.state = kv_test_seed();
	loop_open(l);
	loop_start(l, 0);
}

/* New conversations, noted alone. */
static void work_and_kill(loop_t *l)
{
	user_t user;

	user_attach(&user, &l->rig, "loop");
	l->noted_count = l->owed_count = 0;
	loop_work(l, &user, 0);
	assert_int_equal(l->noted_count, TALKS - 1);
	user_leave(&user);
	rig_crash(&l->rig);
}

/* Nothing of the first life is synced, and the rebuild finds it: acknowledged from then on, it is on the device. */
static void check_rebuild(uint32_t failing_syncs)
{
	loop_t *l = calloc(1, sizeof *l);

	loop_begin(l);
	atomic_store(&l->disk.control->lie, FAULT_SLOTS);
	work_and_kill(l);
	atomic_store(&l->disk.control->lie, 0);
	lose_database(l);
	fault_disk_arm(&l->disk, FAULT_SYNC, FAULT_SLOTS, EIO, 0, failing_syncs);
	rig_start(&l->rig);
	await_disk(l);
	assert_int_equal(atomic_load(&l->disk.control->injected), failing_syncs);
	l->talk = 0; /* what has been found is acknowledged */
	work_and_kill(l);
	fault_disk_lose_power(&l->disk, &l->rig, &l->rng, 1, &l->loss);
	loop_check(l);
	loop_close(l);
	free(l);
}

/* Its directory was not synced: the next daemon puts blocks in it, and they need the name. */
KV_TEST(p2_a_slot_file_that_a_killed_daemon_has_made_keeps_its_name)
{
	loop_t *l = calloc(1, sizeof *l);

	loop_begin(l);
	atomic_store(&l->disk.control->lie, FAULT_SLOTS);
	work_and_kill(l);
	atomic_store(&l->disk.control->lie, 0);
	rig_start(&l->rig);
	work_and_kill(l);
	fault_disk_lose_power(&l->disk, &l->rig, &l->rng, 1, &l->loss);
	loop_check(l);
	loop_close(l);
	free(l);
}

KV_TEST(p2_what_a_rebuild_finds_is_synced_before_it_is_acknowledged)
{
	check_rebuild(0);
}

/* The same process opens the tier once more, and does not believe the next sync of the same bytes. */
KV_TEST(p2_what_a_rebuild_finds_is_written_again_after_a_failed_sync)
{
	check_rebuild(1);
}

/* A daemon, a user, and the keys of a conversation whose writes are about to fail. */
static void begin_torn(loop_t *l, user_t *user, kvc_key_t *keys)
{
	loop_begin(l);
	user_attach(user, &l->rig, "loop");
	user_keys(user, 0, LEN, keys);
}

/* A write fails half-way: its header is on the device. The block is put again, into another slot; then the headers are
 * all there is. */
KV_TEST(p2_of_two_copies_a_rebuild_keeps_the_one_that_is_whole)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	loop_t *l = calloc(1, sizeof *l);
	kvc_key_t keys[LEN];
	uint32_t n = 0;
	user_t user;

	begin_torn(l, &user, keys);
	fault_disk_arm(&l->disk, FAULT_WRITE, FAULT_SLOTS, EIO, 0, 1);
	while (user_put(&user, keys, 0, LEN, 1, &n) != KVC_OK || n != LEN) {
		assert_true(rig_now_ms() < deadline); /* writes pause for a while after one that failed */
		usleep(10000);
	}
	assert_int_equal(atomic_load(&l->disk.control->injected), 1);
	l->noted_count = 1;
	user_leave(&user);
	rig_crash(&l->rig);
	lose_database(l);
	loop_check(l);
	loop_close(l);
	free(l);
}

/* All writes fail half-way, and the database is lost: what there is has a header and is not whole. A put names it, and
 * nobody has read it. */
KV_TEST(p2_a_torn_block_that_a_rebuild_finds_is_not_acknowledged)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	loop_t *l = calloc(1, sizeof *l);
	kvc_key_t keys[LEN];
	uint32_t n = 0;
	user_t user;

	begin_torn(l, &user, keys);
	fault_disk_arm(&l->disk, FAULT_WRITE, FAULT_SLOTS, EIO, 0, UINT32_MAX);
	while (atomic_load(&l->disk.control->injected) == 0) { /* while the disk is not there yet, nothing is written */
		assert_int_not_equal(user_put(&user, keys, 0, LEN, 1, &n), KVC_OK);
		assert_true(rig_now_ms() < deadline);
		usleep(10000);
	}
	user_leave(&user);
	rig_crash(&l->rig);
	lose_database(l);
	disarm(l);
	loop_start(l, 0);
	assert_true(rig_metric_reaches(&l->rig, "kvd_disk_rebuilt_total", 1));
	user_attach(&user, &l->rig, "loop");
	while (user_put(&user, keys, 0, LEN, 1, &n) != KVC_OK || n != LEN) {
		assert_true(rig_now_ms() < deadline);
	}
	l->noted_count = 1;
	user_leave(&user);
	rig_crash(&l->rig);
	loop_check(l);
	loop_close(l);
	free(l);
}

int main(int argc, char **argv)
{
	if (argc == 2) {
		rounds = (uint32_t)strtoul(argv[1], NULL, 10);
	}

	return kv_test_run(NULL, NULL);
}
