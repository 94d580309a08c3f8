/* Data directories a daemon must not, or only in part, take over. */
#include "e2e/rig/rig.h"

#include <fcntl.h>
#include <grp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#define LEN    8u
#define TALKS  40u
#define NOBODY 65534

static void stored_talks(rig_t *rig)
{
	kvc_key_t keys[LEN];
	user_t user;

	rig_start(rig);
	user_attach(&user, rig, "dir");
	for (uint32_t t = 0; t < TALKS; t++) {
		user_keys(&user, t, LEN, keys);
		assert_int_equal(user_put(&user, keys, 0, LEN, 1, NULL), KVC_OK);
	}
	user_leave(&user);
	rig_stop(rig);
}

/* Start, and count the blocks that come back whole; what does not come is put again. */
static uint32_t blocks_back(rig_t *rig, uint32_t expected)
{
	kvc_key_t keys[LEN];
	uint32_t n, back = 0;
	user_t user;

	rig_start(rig);
	assert_true(rig_metric_reaches(rig, "kvd_disk_recovered_total", expected));
	user_attach(&user, rig, "dir");
	for (uint64_t until = rig_now_ms() + 2000; back < expected && rig_now_ms() < until; usleep(5000)) {
		back = 0;
		for (uint32_t t = 0; t < TALKS; t++) {
			user_keys(&user, t, LEN, keys);
			(void)user_get(&user, keys, LEN, &n);
			back += n;
		}
	}
	for (uint32_t t = 0; t < TALKS; t++) {
		user_keys(&user, t, LEN, keys);
		assert_int_equal(user_put(&user, keys, 0, LEN, 0, NULL), KVC_OK);
		user_expect(&user, keys, LEN);
	}
	user_leave(&user);

	return back;
}

static void cut(const rig_t *rig, const char *name, off_t bytes)
{
	char path[160];

	snprintf(path, sizeof path, "%s/%s", rig->disk, name);
	assert_int_equal(truncate(path, bytes), 0);
}

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

KV_TEST(p10_a_truncated_slot_file_costs_its_own_blocks_only)
{
	uint32_t back;
	rig_t rig;

	rig_init(&rig, 1);
	stored_talks(&rig);
	cut(&rig, "slots/0.0", 100000);
	back = blocks_back(&rig, (TALKS * LEN - 204) / LEN * LEN); /* 204 slots to a file */
	printf("# %u of %u blocks came back\n", back, TALKS * LEN);
	assert_in_range(back, (TALKS * LEN - 204) / LEN * LEN, TALKS * LEN - 204);
	assert_true(rig_metric_is(&rig, "kvd_disk_files_cut_total", 1));
	assert_true(rig_log_has(&rig, "was cut to 100000 bytes"));
	rig_end(&rig);
}

KV_TEST(p2_metadata_that_is_gone_is_made_again_from_the_slots)
{
	char command[160];
	rig_t rig;

	rig_init(&rig, 1);
	stored_talks(&rig);
	snprintf(command, sizeof command, "rm -r %s/meta", rig.disk);
	assert_int_equal(system(command), 0);
	assert_int_equal(blocks_back(&rig, TALKS * LEN), TALKS * LEN);
	assert_true(rig_metric_is(&rig, "kvd_disk_rebuilt_total", TALKS * LEN));
	rig_end(&rig);
}

KV_TEST(p10_one_truncated_superblock_is_repaired_two_are_foreign)
{
	rig_t rig;

	rig_init(&rig, 1);
	stored_talks(&rig);
	cut(&rig, "superblock.1", 21);
	assert_int_equal(blocks_back(&rig, TALKS * LEN), TALKS * LEN);
	rig_check_quiet(&rig);
	rig_stop(&rig);
	cut(&rig, "superblock.0", 0);
	assert_int_equal(blocks_back(&rig, TALKS * LEN), TALKS * LEN); /* from the one that was written again */
	rig_stop(&rig);
	cut(&rig, "superblock.0", 30);
	cut(&rig, "superblock.1", 31);
	refused(&rig, KV_ERR_FOREIGN, rig.disk);
	rig_fini(&rig);
}

KV_TEST(p10_a_foreign_directory_is_refused_and_left_alone)
{
	char path[160], text[16] = "";
	rig_t rig;
	int fd;

	rig_init(&rig, 1);
	assert_int_equal(mkdir(rig.disk, 0700), 0);
	snprintf(path, sizeof path, "%s/thesis.tex", rig.disk);
	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
	assert_int_equal(write(fd, "ten years", 9), 9);
	refused(&rig, KV_ERR_FOREIGN, "is not empty and has no superblock of kvd; it was left as it is");
	assert_int_equal(pread(fd, text, sizeof text - 1, 0), 9);
	assert_string_equal(text, "ten years");
	assert_int_equal(unlink(path), 0);
	assert_int_equal(rmdir(rig.disk), 0); /* nothing else is in it */
	close(fd);

	fd = open(rig.disk, O_RDWR | O_CREAT | O_CLOEXEC, 0600); /* a file in its place */
	close(fd);
	refused(&rig, KV_ERR_PATH, "Not a directory");
	rig_fini(&rig);
}

KV_TEST(p8_a_directory_that_everybody_may_write_to_is_refused)
{
	rig_t rig;

	rig_init(&rig, 1);
	assert_int_equal(mkdir(rig.disk, 0700), 0);
	for (int i = 0; i < 2; i++) {
		assert_int_equal(chmod(rig.disk, i ? 01777 : 0777), 0);
		refused(&rig, KV_ERR_PATH, "everybody may write to nvme.path");
	}
	assert_int_equal(rmdir(rig.disk), 0); /* nothing was made in it */
	assert_int_equal(mkdir(rig.disk, 0700), 0);
	stored_talks(&rig);
	assert_int_equal(chmod(rig.disk, 0777), 0);
	refused(&rig, KV_ERR_PATH, "everybody may write to nvme.path");
	rig_fini(&rig);
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

KV_TEST_MAIN(NULL, NULL)
