/* Data directories that a daemon must not take over. */
#include "e2e/rig/rig.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define NOBODY 65534

static void refused(rig_t *rig, kv_status_t status, const char *sentence)
{
	const int code = rig_try(rig);

	if (code != kv_status_exit_code(status) || !rig_log_has(rig, sentence)) {
		char command[160];

		snprintf(command, sizeof command, "cat %s >&2", rig->log);
		(void)!system(command);
		fail_msg("exit code %d, or no \"%s\"", code, sentence);
	}
}

RIG_TEST(p8_a_directory_that_everybody_may_write_to_is_refused, rig_init(&rig_, 1))
{
	assert_int_equal(mkdir(rig_.disk, 0700), 0);
	for (int i = 0; i < 2; i++) {
		assert_int_equal(chmod(rig_.disk, i ? 01777 : 0777), 0);
		refused(&rig_, KV_ERR_PATH, "everybody may write to nvme.path");
	}
	assert_int_equal(rmdir(rig_.disk), 0); /* nothing was made in it */
	assert_int_equal(mkdir(rig_.disk, 0700), 0);
	rig_start(&rig_); /* nor is one that kvd has made */
	rig_stop(&rig_);
	assert_int_equal(chmod(rig_.disk, 0777), 0);
	refused(&rig_, KV_ERR_PATH, "everybody may write to nvme.path");
}

static void become_nobody(void)
{
	if (setgroups(0, NULL) != 0 || setgid(NOBODY) != 0 || setuid(NOBODY) != 0) {
		_exit(98);
	}
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* it does not survive setuid */
}

KV_TEST(p10_a_directory_that_may_not_be_read_is_refused)
{
	rig_t rig;

	if (geteuid() != 0) {
		printf("# SKIP: only root can hand the daemon a directory it may not read\n");
		skip();
	}
	rig_init(&rig, 1);
	assert_int_equal(chmod(rig.dir, 0777), 0);
	assert_int_equal(mkdir(rig.disk, 0700), 0);
	rig.before = become_nobody;
	if (rig_try(&rig) == 127) {
		printf("# SKIP: nobody may not run %s\n", E2E_KVD);
		rig_fini(&rig);
		skip();
	}
	refused(&rig, KV_ERR_PATH, "Permission denied");
	rig_fini(&rig);
}

KV_TEST(p10_a_second_daemon_on_the_data_directory_is_refused)
{
	rig_t first, second;
	other_t other;

	rig_init(&first, 1);
	rig_start(&first);
	other_start(&other, first.sock);
	rig_init(&second, 1);
	rig_option(&second, "--nvme.path=%s", first.disk);
	refused(&second, KV_ERR_LOCKED, first.disk);
	rig_option(&second, "--keeper=on"); /* does not try again and again */
	refused(&second, KV_ERR_LOCKED, first.disk);
	rig_fini(&second);
	other_goes_on(&other, 5);
	other_end(&other, 0);
	rig_end(&first);
}
