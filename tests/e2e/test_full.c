/* The file system under the disk tier is full. */
#include "e2e/rig/rig.h"

#include <signal.h>

#define LEN 40u

/* Conversations that come and are asked for again at once, whatever the disk does. Returns durable acknowledgements. */
static uint32_t work(user_t *user, uint64_t seed, uint32_t talks)
{
	kvc_key_t keys[LEN];
	uint32_t n, durable = 0;
	kvc_status_t status;

	for (uint32_t t = 0; t < talks; t++) {
		user_keys(user, seed + t, LEN, keys);
		if (user_put(user, keys, 0, LEN, 0, NULL) != KVC_OK || user_get(user, keys, LEN, &n) != KVC_OK) {
			fail_msg("%s", kvc_last_error());
		}
		assert_int_equal(n, LEN);
		user_keys(user, seed + t + 500, 4, keys);
		status = user_put(user, keys, 0, 4, 1, NULL); /* said honestly either way */
		assert_true(status == KVC_OK || status == (kvc_status_t)KV_ERR_NOSPC ||
			    status == (kvc_status_t)KV_ERR_NOT_ADMITTED);
		durable += status == KVC_OK;
	}

	return durable;
}

/* Full before the first slot file is made, or later. */
static void full_disk(int early)
{
	uint64_t written;
	uint32_t acknowledged;
	kvc_key_t keys[4];
	other_t other;
	user_t user;

	rig_init_mount(&rig_, "24m");
	rig_start(&rig_);
	assert_true(rig_log_has(&rig_, "nvme.size is larger than its file system"));
	user_attach(&user, &rig_, "full");
	if (!early) {
		assert_true(work(&user, 1000, 4) == 4);
	}
	rig_disk_fill(&rig_);
	other_start(&other, rig_.sock);
	acknowledged = work(&user, 2000, 10);
	printf("# durable acknowledgements on a full disk: %u of 10\n", acknowledged);
	assert_true(!early || acknowledged == 0);
	assert_true(rig_metric(&rig_, "kvd_disk_errors_total") > 0);
	other_goes_on(&other, 10);

	rig_disk_free(&rig_);
	written = rig_metric(&rig_, "kvd_disk_written_bytes_total");
	user_keys(&user, 9000, 4, keys);
	KV_AWAIT(user_put(&user, keys, 0, 4, 1, NULL) == KVC_OK);
	assert_true(work(&user, 3000, 4) >= 1);
	assert_true(rig_metric_is(&rig_, "kvd_disk_off", 0));
	assert_true(rig_metric_reaches(&rig_, "kvd_disk_written_bytes_total", written + 4 * RIG_BLOCK_BYTES));
	other_end(&other, 0);
	user_keys(&user, 9001, 4, keys); /* the first one may have been evicted by the others since */
	assert_int_equal(user_put(&user, keys, 0, 4, 1, NULL), KVC_OK);
	user_leave(&user);
	rig_check_quiet(&rig_);
	rig_crash(&rig_);

	rig_start(&rig_); /* what was acknowledged is there */
	user_attach(&user, &rig_, "full");
	assert_true(user_match_is(&user, keys, 4, 4));
	user_expect(&user, keys, 4);
	user_leave(&user);
	rig_check_quiet(&rig_);
	rig_unmount(&rig_);
	rig_fini(&rig_);
}

KV_TEST(p5_p6_a_disk_full_at_the_start_costs_the_disk_tier_only, NULL, rig_tear_down)
{
	full_disk(1);
}

KV_TEST(p5_p6_a_disk_that_fills_costs_the_disk_tier_only_and_resumes, NULL, rig_tear_down)
{
	full_disk(0);
}

static void upgrade(void)
{
	const uint64_t since = rig_now_ms();
	const uint32_t readies = rig_log_count(&rig_, " ready: ");

	kill(rig_.pid, SIGUSR2);
	while (rig_log_count(&rig_, " ready: ") == readies) {
		assert_true(rig_now_ms() < since + RIG_WAIT_MS);
		usleep(2000);
	}
	printf("# an upgrade takes %u ms\n", (unsigned)(rig_now_ms() - since));
	assert_in_range(rig_now_ms() - since, 0, 8000); /* its own patience is 10 s */
	rig_serving(&rig_);
}

/* The daemon dies on a full disk, beside a writer, and another one starts there: it serves what is on the disk, says
 * that it is full, leaves the metadata's program alone between tries, and ends in time, also for its successor. */
RIG_TEST(p2_p5_a_start_and_an_end_on_a_full_disk_take_a_moment, rig_init_mount(&rig_, "24m"))
{
	char out[16384];
	uint64_t since;
	kvc_key_t keys[4];
	other_t other;
	pid_t daemon;
	user_t user;

	rig_option(&rig_, "--keeper=on");
	rig_start(&rig_);
	user_attach(&user, &rig_, "full");
	user_keys(&user, 9000, 4, keys);
	assert_int_equal(user_put(&user, keys, 0, 4, 1, NULL), KVC_OK);
	user_leave(&user);
	rig_disk_fill(&rig_);
	other_start(&other, rig_.sock);
	other_goes_on(&other, 5);
	since = rig_now_ms();
	daemon = rig_daemon(&rig_);
	kill(rig_.pid, SIGSTOP); /* it would start another one at once */
	kill(daemon, SIGKILL);
	rig_crash(&rig_);
	do { /* what the metadata's program had taken for itself; and the kernel has to end the daemon */
		rig_disk_fill(&rig_);
		assert_int_equal(truncate(rig_.log, 0), 0);
		assert_true(rig_now_ms() < since + RIG_WAIT_MS);
	} while (rig_try(&rig_) != -1);
	since = rig_now_ms();
	do { /* old files of the metadata go when it likes, and then it is not full */
		rig_disk_fill(&rig_);
		assert_true(rig_now_ms() < since + RIG_WAIT_MS);
	} while (rig_kvctl(&rig_, "status --json", out, sizeof out) != 2);
	assert_non_null(strstr(out, "the disk tier is full: "));
	assert_non_null(strstr(out, "\"healthy\":false"));
	for (uint32_t upgrades = 0; upgrades < 2; upgrades++) {
		user_attach(&user, &rig_, "full");
		assert_true(user_match_is(&user, keys, 4, 4));
		user_expect(&user, keys, 4);
		user_leave(&user);
		assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), 0);
		other_recovers(&other);
		other_goes_on(&other, 50);
		printf("# processes started: %u\n", (unsigned)rig_metric(&rig_, "kvd_meta_starts_total"));
		assert_in_range(rig_metric(&rig_, "kvd_meta_starts_total"), 1, 12);
		if (upgrades == 0) {
			assert_false(rig_log_has(&rig_, "device reports an error"));
			rig_disk_fill(&rig_);
			upgrade();
		}
	}
	assert_false(rig_log_has(&rig_, "has not ended in time"));
	rig_disk_free(&rig_);
	user_attach(&user, &rig_, "full");
	user_keys(&user, 9001, 4, keys);
	since = rig_now_ms();
	while (user_put(&user, keys, 0, 4, 1, NULL) != KVC_OK) {
		assert_true(rig_now_ms() < since + RIG_WAIT_MS);
		usleep(20000);
	}
	user_leave(&user);
	other_end(&other, 1);
	rig_unmount(&rig_);
}
