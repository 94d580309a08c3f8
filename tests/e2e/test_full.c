/* The file system under the disk tier is full. */
#include "e2e/rig/rig.h"

#include <signal.h>

#define LEN 40u

static rig_t rig;

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
	uint64_t written, until;
	uint32_t acknowledged;
	kvc_key_t keys[4];
	other_t other;
	user_t user;
	uint32_t n;

	rig_init_mount(&rig, "24m");
	rig_start(&rig);
	assert_true(rig_log_has(&rig, "nvme.size is larger than its file system"));
	user_attach(&user, &rig, "full");
	if (!early) {
		assert_true(work(&user, 1000, 4) == 4);
	}
	rig_disk_fill(&rig);
	other_start(&other, rig.sock);
	acknowledged = work(&user, 2000, 10);
	printf("# durable acknowledgements on a full disk: %u of 10\n", acknowledged);
	assert_true(!early || acknowledged == 0);
	assert_true(rig_metric(&rig, "kvd_disk_errors_total") > 0);
	other_goes_on(&other, 10);

	rig_disk_free(&rig);
	written = rig_metric(&rig, "kvd_disk_written_bytes_total");
	user_keys(&user, 9000, 4, keys);
	until = rig_now_ms() + RIG_WAIT_MS;
	while (user_put(&user, keys, 0, 4, 1, NULL) != KVC_OK) {
		assert_true(rig_now_ms() < until);
		usleep(20000);
	}
	assert_true(work(&user, 3000, 4) >= 1);
	assert_true(rig_metric_is(&rig, "kvd_disk_off", 0));
	assert_true(rig_metric_reaches(&rig, "kvd_disk_written_bytes_total", written + 4 * RIG_BLOCK_BYTES));
	other_end(&other, 0);
	user_keys(&user, 9001, 4, keys); /* the first one may have been evicted by the others since */
	assert_int_equal(user_put(&user, keys, 0, 4, 1, NULL), KVC_OK);
	user_leave(&user);
	rig_check_quiet(&rig);
	assert_int_equal(rig_kill(&rig, SIGKILL), 128 + SIGKILL);

	rig_start(&rig); /* what was acknowledged is there */
	user_attach(&user, &rig, "full");
	assert_true(user_match_is(&user, keys, 4, 4));
	assert_int_equal(user_get(&user, keys, 4, &n), KVC_OK);
	assert_int_equal(n, 4);
	user_leave(&user);
	rig_check_quiet(&rig);
	rig_unmount(&rig);
	rig_fini(&rig);
}

static void p5_p6_a_disk_full_at_the_start_costs_the_disk_tier_only(void **state)
{
	(void)state;
	full_disk(1);
}

static void p5_p6_a_disk_that_fills_costs_the_disk_tier_only_and_resumes(void **state)
{
	(void)state;
	full_disk(0);
}

static int unmount(void **state)
{
	(void)state;
	rig_clean_up(&rig);

	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_teardown(p5_p6_a_disk_full_at_the_start_costs_the_disk_tier_only, unmount),
		cmocka_unit_test_teardown(p5_p6_a_disk_that_fills_costs_the_disk_tier_only_and_resumes, unmount),
	};

	return cmocka_run_group_tests_name("e2e.full", tests, NULL, NULL);
}
