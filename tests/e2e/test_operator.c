/* What an operator sees first: engines, hit rates, and blocks on disk before an engine attaches. */
#include "e2e/rig/rig.h"

#include <pty.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#define LEN    8u
#define NOBODY 65534u

/* Three of four prompt tokens were found; the last quarter was not stored. */
RIG_TEST(engines_and_hit_rates_are_in_the_status, rig_begin(&rig_, 0))
{
	const kvc_report_t report = {.struct_size = sizeof report,
				     .request = 1,
				     .query_tokens = 4 * LEN,
				     .hit_cpu_tokens = 3 * LEN,
				     .why = KV_WHY_ABSENT};
	user_t user;

	user_attach(&user, &rig_, "llama");
	assert_true(rig_log_has(&rig_, "a member has attached: namespace default instance "));
	KV_AWAIT(rig_log_has(&rig_, "a space is open: namespace default space 1 model \"llama\""));
	kvc_report(user.space, &report);
	assert_true(rig_kvctl_has(&rig_, "status",
				  "75.0 % of 32 prompt tokens in 1 prompts (cpu 75.0 %, disk 0.0 %)\n"
				  "  missed: not stored 25.0 %\n"));
	assert_true(rig_kvctl_has(&rig_, "status", "\nengines\n"));
	assert_true(rig_kvctl_has(&rig_, "status", "  space 1  model=llama\n"));
	assert_true(rig_kvctl_has(
		&rig_, "status --json",
		"\"hits\":{\"namespace\":{\"lookups\":1,\"query_tokens\":32,\"hit_gpu_tokens\":0,\"hit_cpu_tokens\":24,"
		"\"hit_disk_tokens\":0,\"hit_rate\":0.7500,"));
	user_leave(&user);
	KV_AWAIT(rig_log_has(&rig_, "a member has detached: namespace default instance "));
}

/* Also under a keeper, which starts it as /proc/self/exe. */
RIG_TEST(the_daemon_has_its_name_in_a_list_of_processes, rig_init(&rig_, 0))
{
	char path[64], name[32] = "";
	FILE *file;

	rig_option(&rig_, "--keeper=on");
	rig_start(&rig_);
	(void)snprintf(path, sizeof path, "/proc/%d/comm", (int)rig_daemon(&rig_));
	file = fopen(path, "r");
	assert_non_null(file);
	assert_non_null(fgets(name, sizeof name, file));
	fclose(file);
	assert_string_equal(name, "kvd\n");
}

RIG_TEST(disk_blocks_count_before_an_engine_attaches, rig_begin(&rig_, 1))
{
	kvc_key_t keys[LEN];
	user_t user;

	user_attach(&user, &rig_, "llama");
	user_keys(&user, 1, LEN, keys);
	assert_int_equal(user_put(&user, keys, 0, LEN, 1, NULL), KVC_OK);
	user_leave(&user);
	rig_stop(&rig_);
	rig_start(&rig_);
	assert_true(rig_metric_is(&rig_, "kvd_tier_blocks{tier=disk}", LEN));
	assert_true(rig_metric_is(&rig_, "kvd_tier_blocks{tier=cpu}", 0));
	assert_true(rig_metric_is(&rig_, "kvd_spaces", 0));
}

/* ---- reset ----------------------------------------------------------------------------------- */

static int reset(const rig_t *rig, const char *arguments, const char *said)
{
	char line[256], out[4096];
	int code;

	snprintf(line, sizeof line, "reset %s </dev/null", arguments);
	code = rig_kvctl(rig, line, out, sizeof out);
	if (!strstr(out, said)) {
		fail_msg("kvctl %s: %d: no \"%s\" in\n%s", line, code, said, out);
	}

	return code;
}

/* On a terminal, with this typed: the exit code. */
static int reset_on_terminal(const rig_t *rig, const char *typed)
{
	char out[4096];
	size_t len = 0;
	ssize_t got;
	int fd = -1, how = 0;
	pid_t child = forkpty(&fd, NULL, NULL, NULL);

	if (child == 0) {
		execl(kv_test_program(E2E_KVCTL), "kvctl", "--socket", rig->sock, "reset", "--space", "1", NULL);
		_exit(127);
	}
	assert_true(child > 0);
	assert_int_equal(write(fd, typed, strlen(typed)), (ssize_t)strlen(typed));
	while (len < sizeof out - 1 && (got = read(fd, out + len, sizeof out - 1 - len)) > 0) {
		len += (size_t)got; /* until the other side is closed: EIO */
	}
	out[len] = '\0';
	close(fd);
	assert_int_equal(waitpid(child, &how, 0), child);
	assert_non_null(strstr(out, "drop these blocks for all engines? [y/N]"));

	return WIFEXITED(how) ? WEXITSTATUS(how) : -1;
}

/* For all engines and for good; another space keeps its blocks. */
RIG_TEST(p2_what_an_operator_drops_is_gone_and_nothing_else, rig_begin(&rig_, 1))
{
	user_t one, two, other;
	kvc_key_t keys[LEN], others[LEN];

	user_attach(&one, &rig_, "llama");
	user_attach(&two, &rig_, "llama");
	user_attach(&other, &rig_, "qwen");
	user_keys(&one, 1, LEN, keys);
	user_keys(&other, 1, LEN, others);
	assert_int_equal(user_put(&one, keys, 0, LEN, 1, NULL), KVC_OK);
	assert_int_equal(user_put(&other, others, 0, LEN, 1, NULL), KVC_OK);

	assert_int_equal(reset(&rig_, "--yes", "--space or --identity is needed"), 64);
	assert_int_equal(reset(&rig_, "--space 3 --yes", "there is no space 3"), 1);
	assert_int_equal(reset(&rig_, "--space 1", "--yes is needed where nobody can be asked"), 64);
	assert_int_equal(reset(&rig_, "--space 1 --json", "\"status\":\"ERR_ARG\""), 64);
	assert_int_equal(reset(&rig_, "--space 1 --dry-run --yes",
			       "  8 blocks: 8 in CPU memory, 8 on disk\nnothing was dropped: --dry-run\n"),
			 0);
	assert_int_equal(reset(&rig_, "--space 1 --dry-run --json", "{\"reset\":false,\"new_epoch\":null,"), 0);
	assert_int_equal(reset_on_terminal(&rig_, "no\n"), 1);
	assert_true(user_match_is(&two, keys, LEN, LEN));

	assert_int_equal(reset(&rig_, "--space 1 --yes", "space 1\n  model=llama\n"), 0);
	assert_true(user_match_is(&one, keys, LEN, 0));
	assert_true(user_match_is(&two, keys, LEN, 0));
	assert_true(user_match_is(&other, others, LEN, LEN));
	assert_int_equal(reset(&rig_, "--space 1 --json --yes", "{\"reset\":true,\"new_epoch\":"), 0);
	assert_int_equal(reset_on_terminal(&rig_, "y\n"), 0);
	assert_true(rig_metric_is(&rig_, "kvd_space_resets_total", 3));
	user_leave(&one);
	user_leave(&two);
	user_leave(&other);
	rig_check_quiet(&rig_);
	rig_crash(&rig_);
	rig_start(&rig_);
	user_attach(&one, &rig_, "llama");
	user_attach(&other, &rig_, "qwen");
	assert_true(user_match_is(&other, others, LEN, LEN));
	assert_int_equal(user_match(&one, keys, LEN), 0);
	user_leave(&one);
	user_leave(&other);
}

/* 0: a process of another user, that may use the socket and has joined, may not. */
static int try_as_nobody(const rig_t *rig)
{
	const kvc_identity_t identity = user_identity("llama");
	kvc_status_t status = KVC_OK;
	pid_t child = fork();
	user_t user;
	int how = 0;

	if (child == 0) {
		if (setresgid(NOBODY, NOBODY, NOBODY) == 0 && setresuid(NOBODY, NOBODY, NOBODY) == 0 &&
		    user_try(&user, rig->sock, &identity) == KVC_OK) {
			status = kvc_space_reset(user.space);
		}
		_exit(status == (kvc_status_t)KV_ERR_NOT_PERMITTED ? 0 : 1);
	}
	assert_int_equal(waitpid(child, &how, 0), child);

	return how;
}

/* The last one of the file: it may skip the program. */
KV_TEST(p8_an_engine_of_another_user_drops_no_space)
{
	kvc_key_t keys[LEN];
	user_t user;
	rig_t rig;

	if (geteuid() != 0) {
		kv_test_skip("a second user needs root");
	}
	rig_init(&rig, 0);
	rig_option(&rig, "--sockets.mode=default=0666");
	rig_start(&rig);
	assert_int_equal(chmod(rig.dir, 0755), 0);
	assert_int_equal(chmod(rig.run_dir, 0755), 0);
	user_attach(&user, &rig, "llama");
	user_keys(&user, 1, LEN, keys);
	assert_int_equal(user_put(&user, keys, 0, LEN, 0, NULL), KVC_OK);
	assert_int_equal(try_as_nobody(&rig), 0);
	assert_int_equal(user_match(&user, keys, LEN), LEN);
	assert_true(rig_metric_is(&rig, "kvd_space_resets_total", 0));
	user_leave(&user);
	rig_fini(&rig);
}
