/* SIGUSR2 to the keeper: the program that is installed by then goes on in its process, with the blocks in GPU memory.
 */
#include "e2e/rig/talks.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN    TALKS_LEN
#define REFUSE "no upgrade, the program that runs goes on: "

static char program_[96], config_[96];

/* ---- the installed program ------------------------------------------------------------------- */

static void run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void run(const char *format, ...)
{
	char command[640];
	va_list args;

	va_start(args, format);
	vsnprintf(command, sizeof command, format, args);
	va_end(args);
	assert_int_equal(system(command), 0);
}

/* Another file gets the name, as with a package. */
static void install_built(void)
{
	run("cp %s %s.new && mv %s.new %s", kv_test_program(E2E_KVD), program_, program_, program_);
}

/* A script in its place, with this mode. */
static void install_script(const char *text, unsigned mode)
{
	char path[104];
	FILE *file;

	snprintf(path, sizeof path, "%s.new", program_);
	file = fopen(path, "we");
	assert_non_null(file);
	fprintf(file, "#!/bin/sh\n%s\n", text);
	assert_int_equal(fclose(file), 0);
	assert_int_equal(chmod(path, mode), 0);
	assert_int_equal(rename(path, program_), 0);
}

/* kvd and what it starts in a folder of their own. */
static void stage_program(int disk)
{
	char folder[256];

	talks_stage(&rig_, disk);
	snprintf(folder, sizeof folder, "%s", kv_test_program(E2E_KVD));
	*strrchr(folder, '/') = '\0';
	snprintf(program_, sizeof program_, "%.70s/bin/kvd", rig_.dir);
	run("mkdir %s/bin && for p in kvd-gpu kvd-meta kvd-net; do ln -s \"$(realpath %s)/$p\" %s/bin/$p; done",
	    rig_.dir, folder, rig_.dir);
	install_built();
	rig_.program = program_;
}

static void stage_config(const char *text)
{
	snprintf(config_, sizeof config_, "%.70s/kvd.conf", rig_.dir);
	rig_option(&rig_, "--config=%s", config_);
	kv_test_write(config_, text);
}

/* Does the process run what is installed? */
static int runs_installed(pid_t pid)
{
	struct stat process, installed;
	char path[64];

	snprintf(path, sizeof path, "/proc/%d/exe", (int)pid);
	assert_int_equal(stat(path, &process), 0);
	assert_int_equal(stat(program_, &installed), 0);

	return process.st_dev == installed.st_dev && process.st_ino == installed.st_ino;
}

/* ---- the upgrade ----------------------------------------------------------------------------- */

static void upgrade(void)
{
	const pid_t daemon = rig_daemon(&rig_);

	kill(rig_.pid, SIGUSR2);
	talks_wait_next(&rig_, daemon);
}

/* The engine that was attached all the time, and one that was restarted. */
static void expect_kept(user_t *user, uint64_t incarnation)
{
	talks_wait_attached(user, incarnation);
	talks_expect(user, LEN);
	user_leave(user);
	talks_attach(&rig_, user);
	talks_expect(user, LEN);
	assert_int_equal(rig_metric(&rig_, "kvd_adopted_blocks_total"), TALKS * LEN);
	assert_int_equal(rig_metric(&rig_, "kvd_adopt_dropped_total"), 0);
	assert_int_equal(rig_metric(&rig_, "kvd_adopt_refused_total"), 0);
	assert_true(rig_metric_is(&rig_, "kvd_adopt_writers", 0));
}

static void start(user_t *user)
{
	rig_start(&rig_);
	talks_attach(&rig_, user);
	talks_put_all(user);
}

/* Three upgrades, and then two crashes: that many are no crashes in a row yet, after which memory would be empty. */
RIG_TEST(p2_blocks_in_gpu_memory_outlive_upgrades_and_crashes_after_them, talks_begin(&rig_, &user_))
{
	for (uint32_t i = 0; i < 5; i++) {
		const uint64_t incarnation = kvc_incarnation(user_.kvc);

		if (i < 3) {
			upgrade();
		} else {
			talks_kill_daemon(&rig_);
		}
		expect_kept(&user_, incarnation);
		assert_int_equal(rig_metric(&rig_, "kvd_restarts_total"), i < 3 ? 0 : i - 2);
		assert_true(rig_kvctl_has(&rig_, "status", "192 blocks kept from the daemon before"));
	}
	assert_false(rig_log_has(&rig_, REFUSE));
	assert_int_equal(rig_metric(&rig_, "kvd_tier_blocks{tier=gpu}"), TALKS * LEN);
	for (uint64_t c = TALKS; c < 4 * TALKS; c++) { /* more than the pool holds: what was kept is evicted */
		assert_int_equal(talks_put(&user_, c), LEN);
		assert_int_equal(talks_get(&user_, c), LEN);
	}
	assert_true(rig_metric(&rig_, "kvd_evicted_total{tier=gpu}") > 0);
}

RIG_TEST(p2_an_upgrade_runs_the_program_that_was_installed_since, stage_program(1))
{
	kvc_key_t keys[LEN];
	user_t host;
	uint64_t incarnation;

	start(&user_);
	user_attach(&host, &rig_, "host");
	user_keys(&host, 1, LEN, keys);
	assert_int_equal(user_put(&host, keys, 0, LEN, 1, NULL), KVC_OK);
	install_built();
	assert_false(runs_installed(rig_.pid) || runs_installed(rig_daemon(&rig_)));
	incarnation = kvc_incarnation(user_.kvc);
	upgrade();
	assert_true(runs_installed(rig_.pid) && runs_installed(rig_daemon(&rig_)));
	talks_wait_attached(&host, incarnation);
	expect_kept(&user_, incarnation);
	assert_true(user_match_is(&host, keys, LEN, LEN)); /* of the disk tier */
	user_expect(&host, keys, LEN);
	assert_int_equal(host.wrong, 0);
	user_leave(&host);
}

/* The daemon has just died, and the next one may be starting. */
RIG_TEST(p2_an_upgrade_right_after_a_crash_keeps_the_blocks, stage_program(0))
{
	uint64_t incarnation;
	pid_t daemon;

	start(&user_);
	install_built();
	incarnation = kvc_incarnation(user_.kvc);
	daemon = rig_daemon(&rig_);
	kill(rig_.pid, SIGSTOP);
	kill(daemon, SIGKILL);
	kill(rig_.pid, SIGUSR2);
	kill(rig_.pid, SIGCONT);
	KV_AWAIT(runs_installed(rig_.pid));
	talks_wait_next(&rig_, daemon);
	expect_kept(&user_, incarnation);
	assert_int_equal(rig_metric(&rig_, "kvd_restarts_total"), 1);
}

/* ---- upgrades that cannot be done ------------------------------------------------------------ */

/* The daemon has heard nothing of it. */
static void expect_refusal(user_t *user, const char *why)
{
	const uint32_t times = rig_log_count(&rig_, REFUSE) + 1;
	const uint64_t incarnation = kvc_incarnation(user->kvc);
	const pid_t daemon = rig_daemon(&rig_);

	kill(rig_.pid, SIGUSR2);
	KV_AWAIT(rig_log_count(&rig_, REFUSE) >= times);
	assert_true(rig_log_has(&rig_, why));
	assert_int_equal(rig_daemon(&rig_), daemon);
	talks_expect(user, LEN);
	assert_int_equal(kvc_incarnation(user->kvc), incarnation);
}

RIG_TEST(p6_a_program_that_cannot_go_on_is_refused, stage_program(0))
{
	uint64_t incarnation;

	start(&user_);
	assert_int_equal(unlink(program_), 0);
	expect_refusal(&user_, "bin/kvd: No such file or directory");
	install_script("exit 0", 0644);
	expect_refusal(&user_, "bin/kvd: Permission denied");
	install_script("echo an option that it does not know >&2; exit 78", 0755);
	expect_refusal(&user_, "its --check-config ended with exit code 78");
	install_script("kill -SEGV $$", 0755);
	expect_refusal(&user_, "its --check-config ended with signal 11");
	install_script("echo the configuration is valid", 0755); /* a version that looks at nothing else */
	expect_refusal(&user_, "it has not said that it can take over what is kept");
	install_script("exec sleep 1000", 0755);
	expect_refusal(&user_, "the check of the configuration has not ended in time and is killed");
	install_built(); /* and then it can be done */
	incarnation = kvc_incarnation(user_.kvc);
	upgrade();
	assert_true(runs_installed(rig_.pid));
	expect_kept(&user_, incarnation);
}

/* It goes after its check: the old program starts a daemon again. */
RIG_TEST(p6_a_program_that_cannot_be_started_leaves_the_old_one, stage_program(0))
{
	uint64_t incarnation;

	start(&user_);
	install_script("\"$(dirname $0)/kvd.checks\" \"$@\" && rm $0", 0755);
	run("cp %s %s.checks", kv_test_program(E2E_KVD), program_);
	incarnation = kvc_incarnation(user_.kvc);
	upgrade();
	assert_int_equal(rig_log_count(&rig_, REFUSE), 1);
	expect_kept(&user_, incarnation);
	assert_int_equal(rig_metric(&rig_, "kvd_restarts_total"), 0);
	talks_kill_daemon(&rig_);
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	talks_expect(&user_, LEN);
}

RIG_TEST(p5_a_daemon_that_does_not_end_is_killed, talks_begin(&rig_, &user_))
{
	uint64_t incarnation;

	incarnation = kvc_incarnation(user_.kvc);
	kill(rig_daemon(&rig_), SIGSTOP);
	upgrade();
	assert_true(rig_log_has(&rig_, "the daemon has not ended in time and is killed"));
	expect_kept(&user_, incarnation);
}

RIG_TEST(p6_sigusr2_changes_nothing_without_a_keeper, talks_begin(&rig_, &user_))
{
	uint64_t incarnation;

	incarnation = kvc_incarnation(user_.kvc);
	kill(rig_daemon(&rig_), SIGUSR2); /* past the keeper */
	KV_AWAIT(rig_log_count(&rig_, "SIGUSR2 is for the keeper: the main process") >= 1);
	rig_stop(&rig_);
	rig_option(&rig_, "--keeper=off");
	rig_start(&rig_);
	kill(rig_.pid, SIGUSR2);
	KV_AWAIT(rig_log_count(&rig_, "SIGUSR2 is for the keeper: there is none") >= 1);
	talks_wait_attached(&user_, incarnation);
	talks_put_all(&user_);
	talks_expect(&user_, LEN);
}

/* ---- the configuration ----------------------------------------------------------------------- */

RIG_TEST(p10_an_upgrade_takes_the_file_if_it_is_valid, talks_stage(&rig_, 0))
{
	char path[96];

	stage_config("namespaces: default\n");
	start(&user_);
	kv_test_write(config_, "namespaces: default\nnamespeces: rival\n");
	expect_refusal(&user_, "its --check-config ended with exit code 78");
	assert_true(rig_log_has(&rig_, "namespeces"));
	assert_int_equal(unlink(config_), 0);
	expect_refusal(&user_, config_);
	kv_test_write(config_, "namespaces: default,rival\n");
	upgrade();
	snprintf(path, sizeof path, "%.79s/rival.sock", rig_.run_dir);
	assert_int_equal(access(path, F_OK), 0);
	user_leave(&user_);
	talks_attach(&rig_, &user_);
	talks_expect(&user_, LEN);
}

/* A valid file that cannot be started with: the one that has served last is used, and finds the blocks. */
RIG_TEST(p6_a_file_that_does_not_start_is_given_up_after_an_upgrade, talks_stage(&rig_, 0))
{
	uint64_t incarnation;
	char path[96];

	stage_config("namespaces: default\n");
	start(&user_);
	snprintf(path, sizeof path, "%.79s/rival.sock", rig_.run_dir);
	assert_int_equal(mkdir(path, 0700), 0);
	kv_test_write(config_, "namespaces: default,rival\n");
	incarnation = kvc_incarnation(user_.kvc);
	kill(rig_.pid, SIGUSR2);
	KV_AWAIT(rig_log_count(&rig_, "going back to the configuration that has served last") >= 1);
	expect_kept(&user_, incarnation);
	assert_int_equal(rig_metric(&rig_, "kvd_config_differs"), 1);
}

/* ---- systemd --------------------------------------------------------------------------------- */

static char notify_[96];

static void set_notify_socket(void)
{
	setenv("NOTIFY_SOCKET", notify_, 1);
}

static void expect_notice(int fd, const char *notice)
{
	struct pollfd look = {.fd = fd, .events = POLLIN};
	char line[64] = "";

	assert_int_equal(poll(&look, 1, (int)RIG_WAIT_MS), 1);
	assert_true(recv(fd, line, sizeof line - 1, 0) > 0);
	assert_string_equal(line, notice);
}

/* After STOPPING=1 systemd would kill what is left of the service when its time is over. */
KV_TEST(p6_systemd_sees_a_reload, NULL, rig_tear_down)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	talks_stage(&rig_, 0);
	snprintf(notify_, sizeof notify_, "%.80s/notify", rig_.dir);
	snprintf(address.sun_path, sizeof address.sun_path, "%s", notify_);
	assert_int_equal(bind(fd, (struct sockaddr *)&address, sizeof address), 0);
	rig_.before = set_notify_socket;
	rig_start(&rig_);
	expect_notice(fd, "READY=1");
	upgrade();
	expect_notice(fd, "RELOADING=1");
	expect_notice(fd, "READY=1");
	rig_end(&rig_);
	expect_notice(fd, "STOPPING=1");
	close(fd);
}

/* ---- leaks, and at any time ------------------------------------------------------------------ */

/* No more than that, when what is under way has ended. */
static void wait_for_fds(const char *whose, pid_t pid, uint32_t fds)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;

	while (kv_test_count_fds(pid, "") > fds) {
		if (rig_now_ms() > deadline) {
			fail_msg("%s: %u descriptors, and not %u", whose, kv_test_count_fds(pid, ""), fds);
		}
		usleep(2000);
	}
}

RIG_TEST(p4_ten_upgrades_leave_no_descriptor_behind, talks_stage(&rig_, 0))
{
	uint32_t keeper = 0, daemon = 0;

	stage_config("namespaces: default\n");
	start(&user_);
	for (uint32_t i = 0; i <= 10; i++) {
		const uint64_t incarnation = kvc_incarnation(user_.kvc);

		upgrade();
		talks_wait_attached(&user_, incarnation);
		talks_expect(&user_, LEN);
		assert_true(rig_metric_is(&rig_, "kvd_adopt_writers", 0));
		assert_true(rig_metric_is(&rig_, "kvd_sessions", 2)); /* the user_, and who asks */
		assert_true(rig_metric_is(&rig_, "kvd_gpu_stock_slabs", TALKS_SLABS - 2));
		if (i == 0) {
			keeper = kv_test_count_fds(rig_.pid, "");
			daemon = kv_test_count_fds(rig_daemon(&rig_), "");
		}
	}
	wait_for_fds("keeper", rig_.pid, keeper);
	wait_for_fds("daemon", rig_daemon(&rig_), daemon);
}

KV_TEST(p4_slots_of_an_unfinished_put_wait_through_an_upgrade, NULL, rig_tear_down)
{
	talks_check_unfinished_put(&rig_, upgrade);
}

/* The engines have half again as much as there is memory, so they put and evict all the time. */
RIG_TEST(p1_upgrades_at_any_time_never_give_wrong_bytes, talks_stage(&rig_, 0))
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	talks_notes_t *notes = talks_notes_make(&rig_, 4 * TALKS);
	uint64_t adopted = 0;
	pid_t pids[2];

	rig_start(&rig_);
	talks_engines_start(notes, pids, 2);
	talks_engines_wait(notes, 3);
	for (uint32_t i = 0; i < 8; i++) {
		usleep((useconds_t)kv_test_below(&rng, 100000));
		upgrade();
		adopted += rig_metric(&rig_, "kvd_adopted_blocks_total");
		assert_int_equal(rig_metric(&rig_, "kvd_adopt_refused_total"), 0);
	}
	assert_true(rig_metric_is(&rig_, "kvd_adopt_writers", 0));
	assert_int_equal(rig_metric(&rig_, "kvd_restarts_total"), 0);
	talks_engines_end(notes, pids, 2);
	printf("# adopted %lu, put %u, hits %u, attached %u times\n", (unsigned long)adopted, atomic_load(&notes->put),
	       atomic_load(&notes->hits), atomic_load(&notes->attached));
	assert_true(adopted > 0 && atomic_load(&notes->hits) > 0);
	talks_notes_free(notes);
}
