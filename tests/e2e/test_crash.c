/* kill -9 of the daemon, and of daemon and keeper, at random moments: what was acknowledged as durable is there with
 * the right bytes. */
#include "e2e/rig/rig.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define ROUNDS 15u
#define LEN    3u
#define TALKS  700u /* x LEN slots: less than the disk tier holds */

/* The side file: what the writer was told. */
typedef struct notes {
	_Atomic uint8_t acknowledged[TALKS];
	_Atomic uint32_t next, broken, attached;
	_Atomic int stop;
} notes_t;

typedef struct writer {
	notes_t *notes;
	const char *sock;
} writer_t;

/* Attached again, or, since that waits longer after every crash, anew as an engine that was restarted. */
static int ready_in_time(user_t *user, const char *sock, const kvc_identity_t *identity)
{
	const uint64_t deadline = rig_now_ms() + 50;

	while (user->kvc && kvc_poll(user->kvc, 2) != KVC_OK) {
		if (rig_now_ms() > deadline) {
			kvc_detach(user->kvc);
			user->kvc = NULL;
		}
	}
	if (!user->kvc && user_try(user, sock, identity) != KVC_OK) {
		usleep(2000);
	}

	return user->kvc != NULL;
}

static void write_all(void *arg, int ready)
{
	const writer_t *w = arg;
	const kvc_identity_t identity = user_identity("crash");
	kvc_key_t keys[LEN];
	uint64_t incarnation = 0;
	user_t user;

	if (user_try(&user, w->sock, &identity) != KVC_OK) {
		_exit(1);
	}
	child_say(ready);
	while (!atomic_load(&w->notes->stop) && atomic_load(&w->notes->next) < TALKS) {
		const uint32_t talk = atomic_load(&w->notes->next);

		if (!ready_in_time(&user, w->sock, &identity)) {
			continue;
		}
		if (kvc_incarnation(user.kvc) != incarnation) {
			incarnation = kvc_incarnation(user.kvc);
			atomic_fetch_add(&w->notes->attached, 1);
		}
		user_keys(&user, talk, LEN, keys);
		if (user_put(&user, keys, 0, LEN, 1, NULL) == KVC_OK) {
			atomic_store(&w->notes->acknowledged[talk], 1);
			atomic_store(&w->notes->next, talk + 1);
		} else {
			atomic_fetch_add(&w->notes->broken, 1);
		}
	}
	kvc_detach(user.kvc);
}

/* Every conversation noted before the crash is on disk. */
static void verify(const rig_t *rig, const uint8_t *noted, uint32_t from)
{
	kvc_key_t keys[LEN];
	user_t user;
	uint32_t n;

	user_attach(&user, rig, "crash");
	for (uint32_t t = from; t < TALKS; t++) {
		if (!noted[t]) {
			continue;
		}
		user_keys(&user, t, LEN, keys);
		if (!user_match_is(&user, keys, LEN, LEN)) {
			fail_msg("conversation %u was acknowledged and is lost", t);
		}
		if (user_get(&user, keys, LEN, &n) != KVC_OK || n != LEN) {
			fail_msg("conversation %u: %u of %u blocks: %s", t, n, LEN, kvc_last_error());
		}
	}
	user_leave(&user);
}

static void kill_both(rig_t *rig)
{
	pid_t daemon = rig_daemon(rig);
	int code;

	kill(rig->pid, SIGKILL);
	if (daemon > 0) {
		kill(daemon, SIGKILL);
	}
	rig_crash(rig);
	while ((code = rig_try(rig)) == kv_status_exit_code(KV_ERR_LOCKED)) {
		usleep(2000); /* the daemon's end has not been seen to yet */
	}
	assert_int_equal(code, -1);
}

static void kill_daemon(const rig_t *rig)
{
	pid_t daemon;

	KV_AWAIT((daemon = rig_daemon(rig)) != 0);
	kill(daemon, SIGKILL);
	KV_AWAIT(rig_daemon(rig) != daemon);
	rig_serving(rig);
}

static void wait_for_writer(const notes_t *notes)
{
	const uint32_t from = atomic_load(&notes->next);

	KV_AWAIT(atomic_load(&notes->next) != from);
}

/* `every`: after this number of rounds the keeper is killed, too (it gives up after five deaths soon after a start). */
static void crash_loop(uint32_t every)
{
	kv_test_rng_t rng = {.state = kv_test_seed() + every};
	uint8_t noted[TALKS];
	uint32_t total = 0;
	writer_t writer;
	other_t other;
	pid_t pid;
	rig_t rig;

	rig_init(&rig, 1);
	rig_option(&rig, "--keeper=on");
	rig_start(&rig);
	writer = (writer_t){
		.sock = rig.sock,
		.notes = mmap(NULL, sizeof(notes_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)};
	assert_ptr_not_equal(writer.notes, MAP_FAILED);
	other_start(&other, rig.sock);
	pid = child_start(write_all, &writer);
	for (uint32_t round = 1; round <= ROUNDS; round++) {
		wait_for_writer(writer.notes); /* so that the crash meets work */
		usleep((useconds_t)kv_test_below(&rng, 60000));
		const uint32_t from = atomic_load(&writer.notes->next);
		memcpy(noted, (const void *)writer.notes->acknowledged, sizeof noted);
		if (round % every == 0) {
			kill_both(&rig);
		} else {
			kill_daemon(&rig);
		}
		verify(&rig, noted, from > 40 ? from - 40 : 0);
	}
	atomic_store(&writer.notes->stop, 1);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	memcpy(noted, (const void *)writer.notes->acknowledged, sizeof noted);
	verify(&rig, noted, 0);
	for (uint32_t t = 0; t < TALKS; t++) {
		total += noted[t];
	}
	printf("# acknowledged %u, puts cut off %u, attached %u times\n", total, writer.notes->broken,
	       writer.notes->attached);
	assert_true(total >= ROUNDS && writer.notes->attached >= ROUNDS);
	assert_true(rig_metric(&rig, "kvd_evicted_total{tier=disk}") == 0);
	munmap(writer.notes, sizeof *writer.notes);
	other_recovers(&other);
	other_end(&other, 1);
	rig_end(&rig);
}

KV_TEST(p2_durable_blocks_survive_every_kill_9_of_the_daemon)
{
	crash_loop(5);
}

KV_TEST(p2_durable_blocks_survive_every_kill_9_of_daemon_and_keeper)
{
	crash_loop(1);
}

/* ---- a sync that fails once ------------------------------------------------------------------ */

#define SYNC_LEN   8u
#define SYNC_PUTS  24u
#define SYNC_FAILS 6u

static int strace_works(void)
{
	return system("strace -D -f -o /dev/null -e inject=fdatasync:error=EIO true >/dev/null 2>&1") == 0;
}

/* A leak checker cannot look into a process that is traced already. */
static void without_leak_check(void)
{
	setenv("ASAN_OPTIONS", "detect_leaks=0", 1);
}

/* The real fdatasync of the slot file fails once, at its `when`th call. The page cache still has the bytes and reads
 * still answer; kill -9 does not show the loss either, but what the daemon keeps of its promise does: no row of a
 * suspect block is committed. */
static void one_failed_sync(const char *engine, uint32_t when)
{
	char only[128], inject[64];
	uint32_t acknowledged[SYNC_PUTS] = {0}, good = 0;
	kvc_key_t keys[SYNC_LEN];
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	user_t user;
	rig_t rig;

	rig_init(&rig, 1);
	rig_option(&rig, "--nvme.io_engine=%s", engine);
	rig_option(&rig, "--nvme.flush_interval=1ms");
	snprintf(only, sizeof only, "-P%s/slots/0.0", rig.disk);
	snprintf(inject, sizeof inject, "-einject=fdatasync:error=EIO:when=%u", when);
	memcpy(rig.wrap, (const char *[]){"strace", "-Dqqfo/dev/null", only, "-etrace=fdatasync", inject},
	       5 * sizeof *rig.wrap);
	rig.before = without_leak_check;
	rig_start(&rig);
	user_attach(&user, &rig, "sync");
	for (uint32_t t = 0; t < SYNC_PUTS; t++) {
		uint32_t n = 0;

		user_keys(&user, t / 2, SYNC_LEN, keys); /* each twice: what is there already is promised too */
		if (user_put(&user, keys, 0, SYNC_LEN, 1, &n) == KVC_OK) {
			acknowledged[t] = n;
			good += n;
		}
	}
	assert_true(rig_metric_reaches(&rig, "kvd_disk_errors_total", 1));
	assert_true(rig_metric_is(&rig, "kvd_disk_state", 0)); /* it goes on without a call */
	for (uint32_t t = SYNC_PUTS - 2; t < SYNC_PUTS; t++) {
		user_keys(&user, t / 2, SYNC_LEN, keys);
		while (user_put(&user, keys, 0, SYNC_LEN, 1, &acknowledged[t]) != KVC_OK) {
			assert_true(rig_now_ms() < deadline); /* writes pause for a while after one that failed */
			usleep(10000);
		}
		assert_int_equal(acknowledged[t], SYNC_LEN);
	}
	user_leave(&user);
	rig_crash(&rig);

	memset(rig.wrap, 0, sizeof rig.wrap);
	rig_start(&rig);
	user_attach(&user, &rig, "sync");
	for (uint32_t t = 0; t < SYNC_PUTS; t++) {
		uint32_t n = 0;

		user_keys(&user, t / 2, SYNC_LEN, keys);
		(void)user_get(&user, keys, SYNC_LEN, &n);
		if (n < acknowledged[t]) {
			fail_msg("put %u: %u blocks were acknowledged, %u are there", t, acknowledged[t], n);
		}
	}
	printf("# %s, call %u failed: %u blocks acknowledged meanwhile\n", engine, when, good);
	user_leave(&user);
	rig_end(&rig);
}

static void one_failed_sync_each(const char *engine)
{
	if (!strace_works()) {
		printf("# SKIP: strace cannot inject here\n");
		skip();
	}
	for (uint32_t when = 1; when <= SYNC_FAILS; when++) {
		one_failed_sync(engine, when);
	}
}

KV_TEST(p2_blocks_of_a_failed_sync_are_unacknowledged_by_threads)
{
	one_failed_sync_each("threads");
}

KV_TEST(p2_blocks_of_a_failed_sync_are_unacknowledged_by_io_uring)
{
	one_failed_sync_each("auto");
}

KV_TEST(p2_a_durable_put_of_what_is_there_already_is_acknowledged)
{
	kvc_key_t keys[LEN];
	user_t user;
	uint32_t n = 0;
	rig_t rig;

	rig_init(&rig, 1);
	rig_start(&rig);
	user_attach(&user, &rig, "again");
	user_keys(&user, 1, LEN, keys);
	for (int i = 0; i < 3; i++) { /* written; then in memory and on disk already */
		assert_int_equal(user_put(&user, keys, 0, LEN, 1, &n), KVC_OK);
		assert_int_equal(n, LEN);
	}
	user_leave(&user);
	rig_crash(&rig);

	rig_start(&rig);
	user_attach(&user, &rig, "again");
	assert_int_equal(user_put(&user, keys, 0, LEN, 1, &n), KVC_OK); /* on disk only */
	assert_int_equal(n, LEN);
	user_expect(&user, keys, LEN);
	user_leave(&user);
	rig_end(&rig);
}

KV_TEST_MAIN(NULL, NULL)
