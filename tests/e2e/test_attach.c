/* A disk tier that cannot be opened at the start is a tier switched off: the daemon serves, tries again, and attaches
 * it. */
#include "e2e/rig/fault_disk_rig.h"

#include <errno.h>
#include <signal.h>
#include <sys/mount.h>

#define LEN 4u

static uint64_t first_; /* epoch of the space on this disk; each reset counts one */

/* The kernel ends a ring, and lets go of its files, some time after the process. */
static void remount(unsigned long flags)
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;

	while (mount("tmpfs", rig_.disk, "tmpfs", MS_REMOUNT | flags, "size=48m,mode=0700") != 0) {
		assert_int_equal(errno, EBUSY);
		assert_true(rig_now_ms() < until);
		usleep(5000);
	}
}

static void start(void)
{
	rig_start(&rig_);
	user_attach(&user_, &rig_, "attach");
}

static void stop(int signal)
{
	user_leave(&user_);
	assert_int_equal(rig_kill(&rig_, signal), signal == SIGTERM ? 0 : 128 + signal);
}

static uint64_t epoch(void)
{
	kvc_space_info_t info = {.struct_size = sizeof info};

	kvc_space_get_info(user_.space, &info);

	return info.epoch;
}

/* In the epoch that the space has now. */
static uint32_t match(uint64_t talk)
{
	kvc_key_t keys[LEN];

	user_keys(&user_, talk, LEN, keys);

	return user_match(&user_, keys, LEN);
}

static kvc_status_t put(uint64_t talk, int durable)
{
	kvc_key_t keys[LEN];

	user_keys(&user_, talk, LEN, keys);

	return user_put(&user_, keys, 0, LEN, durable, NULL);
}

static int is_read(uint64_t talk)
{
	kvc_key_t keys[LEN];
	uint32_t n = 0;

	user_keys(&user_, talk, LEN, keys);

	return user_get(&user_, keys, LEN, &n) == KVC_OK && n == LEN && user_.wrong == 0;
}

/* The attached client follows to the epoch on disk without a call. */
static void await_true_epoch(void)
{
	const uint64_t until = rig_now_ms() + 2 * (uint64_t)RIG_WAIT_MS;

	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
	while (epoch() >= UINT64_C(1) << 48) {
		assert_true(rig_now_ms() < until);
		(void)match(0);
		(void)kvc_poll(user_.kvc, 5);
	}
}

static void await_epoch(uint64_t wanted)
{
	await_true_epoch();
	assert_int_equal(epoch(), wanted);
}

RIG_TEST(p6_a_disk_that_cannot_be_opened_is_a_tier_off_and_comes_back, rig_init_mount(&rig_, "48m"))
{
	char out[16384];
	uint64_t was;

	start();
	first_ = epoch();
	assert_int_equal(put(1, 1), KVC_OK);
	stop(SIGTERM);
	remount(MS_RDONLY);

	start();
	was = epoch();
	assert_true(was >= UINT64_C(1) << 48);
	assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 4);
	assert_int_equal(rig_kvctl(&rig_, "status --json", out, sizeof out), 2);
	assert_non_null(strstr(out, "the disk tier is off: "));
	assert_non_null(strstr(out, "\"state\":\"off\""));
	assert_int_equal(match(1), 0);
	assert_int_equal(put(2, 0), KVC_OK);
	assert_true(is_read(2));
	assert_int_equal(put(3, 1), (kvc_status_t)KV_ERR_NOT_ADMITTED);
	rig_check_quiet(&rig_);
	assert_int_equal(epoch(), was);

	remount(0);
	await_epoch(first_);
	assert_int_equal(match(2), 0); /* of the temporary epoch */
	assert_true(is_read(1));
	assert_int_equal(put(4, 1), KVC_OK);
	rig_check_quiet(&rig_);
	stop(SIGKILL);
	start();
	assert_int_equal(epoch(), first_);
	assert_true(is_read(1));
	assert_true(is_read(4));
	assert_int_equal(match(2), 0);
}

RIG_TEST(p1_no_block_of_before_a_reset_is_served_after_a_tier_off, rig_init_mount(&rig_, "48m"))
{
	start();
	first_ = epoch();
	assert_int_equal(put(1, 1), KVC_OK);
	assert_int_equal(kvc_space_reset(user_.space), KVC_OK);
	assert_int_equal(epoch(), first_ + 1);
	assert_int_equal(put(2, 1), KVC_OK);
	stop(SIGTERM);
	remount(MS_RDONLY);

	start();
	assert_int_equal(match(2), 0);
	assert_int_equal(put(3, 0), KVC_OK);
	assert_int_equal(kvc_space_reset(user_.space), KVC_OK); /* the weights of talks 2 and 3 have changed */
	assert_int_equal(match(3), 0);
	assert_int_equal(put(4, 0), KVC_OK);
	stop(SIGKILL); /* the reset was answered: a crash does not forget it */

	start();
	assert_true(epoch() >= UINT64_C(1) << 48);
	assert_int_equal(match(4), 0);
	remount(0);
	await_epoch(first_ + 2);
	for (uint64_t talk = 1; talk <= 4; talk++) {
		assert_int_equal(match(talk), 0);
	}
	assert_int_equal(put(5, 1), KVC_OK);
	stop(SIGKILL);
	start();
	assert_int_equal(epoch(), first_ + 2);
	for (uint64_t talk = 1; talk <= 4; talk++) {
		assert_int_equal(match(talk), 0);
	}
	assert_true(is_read(5));

	/* Off, a reset, and a tier that opens at the next start at once. */
	stop(SIGTERM);
	remount(MS_RDONLY);
	start();
	assert_int_equal(kvc_space_reset(user_.space), KVC_OK);
	stop(SIGKILL);
	remount(0);
	start();
	assert_int_equal(epoch(), first_ + 3);
	assert_int_equal(match(5), 0);
}

/* A start that has to write, here a copy of the superblock, finds no room: the daemon serves without the disk until
 * there is some. */
RIG_TEST(p6_a_start_on_a_full_disk_serves_without_the_disk_tier, rig_init_mount(&rig_, "48m"))
{
	char copy[128], out[16384];

	start();
	first_ = epoch();
	assert_int_equal(put(1, 1), KVC_OK);
	stop(SIGTERM);
	snprintf(copy, sizeof copy, "%s/superblock.1", rig_.disk);
	assert_int_equal(unlink(copy), 0);
	rig_disk_fill(&rig_);

	start();
	assert_true(epoch() >= UINT64_C(1) << 48);
	assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 4);
	assert_int_equal(rig_kvctl(&rig_, "status --json", out, sizeof out), 2);
	assert_non_null(strstr(out, "the disk tier is off: "));
	assert_int_equal(put(2, 0), KVC_OK);
	assert_true(is_read(2));
	assert_int_equal(put(3, 1), (kvc_status_t)KV_ERR_NOT_ADMITTED);
	rig_disk_free(&rig_);
	await_epoch(first_);
	assert_true(is_read(1));
	assert_int_equal(put(4, 1), KVC_OK);
	rig_check_quiet(&rig_);
	stop(SIGKILL);
	start();
	assert_true(is_read(1));
	assert_true(is_read(4));
}

/* What is open stays open: blocks are served, and nothing is acknowledged that the next start would not find. */
RIG_TEST(p2_p6_slot_files_moved_away_cost_durability_meanwhile, rig_init_mount(&rig_, "48m"))
{
	char slots[128], away[128], out[16384];
	uint64_t until;

	snprintf(slots, sizeof slots, "%s/slots", rig_.disk);
	snprintf(away, sizeof away, "%s/away", rig_.disk);
	start();
	assert_int_equal(put(1, 1), KVC_OK);
	assert_int_equal(rename(slots, away), 0);
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 3));
	assert_int_equal(rig_kvctl(&rig_, "status --json", out, sizeof out), 2);
	assert_non_null(strstr(out, "looking for the directory of slot files"));
	assert_true(is_read(1));
	assert_true(put(2, 1) != KVC_OK);
	assert_true(is_read(2)); /* in memory */
	assert_int_equal(rename(away, slots), 0);
	assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
	for (until = rig_now_ms() + RIG_WAIT_MS; put(3, 1) != KVC_OK; usleep(20000)) {
		assert_true(rig_now_ms() < until); /* writing pauses after the refusals, not for long */
	}
	rig_check_quiet(&rig_);
	stop(SIGKILL);
	start();
	assert_true(is_read(1));
	assert_true(is_read(3));
}

/* An engine at work while the tier comes. */
RIG_TEST(p7_clients_at_work_go_on_while_the_tier_is_attached, rig_init_mount(&rig_, "48m"))
{
	other_t other;

	start();
	first_ = epoch();
	assert_int_equal(put(1, 1), KVC_OK);
	stop(SIGTERM);
	for (int round = 0; round < 3; round++) {
		remount(MS_RDONLY);
		start();
		other_start(&other, rig_.sock);
		other_goes_on(&other, 3);
		remount(0);
		await_epoch(first_);
		other_goes_on(&other, 20);
		other_end(&other, 1);
		assert_true(is_read(1));
		rig_check_quiet(&rig_);
		stop(round % 2 ? SIGKILL : SIGTERM);
	}
}

/* Resets the space all the time. */
static void reset_always(void *arg, int ready)
{
	user_t resetter;

	(void)arg;
	user_attach(&resetter, &rig_, "attach");
	for (int said = 0;; said = 1) {
		(void)kvc_space_reset(resetter.space);
		(void)kvc_poll(resetter.kvc, 0);
		if (!said) {
			child_say(ready);
		}
	}
}

/* Syncs of the superblock fail from the `skip`th on. 0: the tier was attached before, since the resetter lost its CPU
 * and no reset came between the last sync that succeeded and the attachment. */
static int attach_while_resets_cannot_be_recorded(fault_disk_t *disk, uint32_t skip)
{
	const uint64_t injected = atomic_load(&disk->control->injected);
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;
	uint64_t iterations, began;
	pid_t resetter;

	remount(MS_RDONLY);
	start();
	resetter = child_start(reset_always, NULL);
	fault_disk_arm(disk, FAULT_SYNC, FAULT_SUPER, EIO, skip, UINT32_MAX);
	remount(0);
	KV_AWAIT(atomic_load(&disk->control->injected) >= injected + 2);
	child_kill(resetter);
	while (put(999, 0) != KVC_OK) { /* it follows the last reset */
		assert_true(rig_now_ms() < until);
		(void)kvc_poll(user_.kvc, 5);
	}
	if (skip > 0 && epoch() < UINT64_C(1) << 48) {
		return 0;
	}
	iterations = rig_metric(&rig_, "kvd_loop_iterations_total");
	began = rig_now_ms();
	for (uint64_t talk = 1000; talk < 1010; talk++) {
		assert_true(epoch() >= UINT64_C(1) << 48);
		assert_int_equal(match(0), 0);
		assert_int_equal(put(talk, 0), KVC_OK);
		assert_true(is_read(talk));
		usleep(50000);
	}
	iterations = rig_metric(&rig_, "kvd_loop_iterations_total") - iterations;
	printf("# skip %u: %" PRIu64 " iterations in %" PRIu64 " ms\n", skip, iterations, rig_now_ms() - began);
	assert_in_range(iterations, 1, 1000 + 2 * (rig_now_ms() - began));
	assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 4);

	return 1;
}

/* Blocks of former epochs leave the disk bit by bit; until then it may have no room. */
static void put_durably(const kvc_key_t *keys, uint32_t n)
{
	kvc_status_t status;

	KV_AWAIT((status = user_put(&user_, keys, 0, n, 1, NULL)) != (kvc_status_t)KV_ERR_NOT_ADMITTED);
	assert_int_equal(status, KVC_OK);
}

/* The superblock's syncs fail: at first before any block is taken in, then after that, since resets were made
 * meanwhile; then the daemon is killed as well. Until resets are on disk the tier is not attached. */
RIG_TEST(p1_p6_a_tier_waits_for_recorded_resets_while_service_goes_on, rig_init_mount(&rig_, "48m"))
{
	fault_disk_t disk;
	kvc_key_t keys[RIG_BLOCKS];
	uint64_t was = 1;
	uint32_t n;
	user_t still;

	fault_disk_open(&disk, &rig_);
	start();
	user_attach(&still, &rig_, "still");
	user_keys(&still, 1, LEN, keys);
	assert_int_equal(user_put(&still, keys, 0, LEN, 1, NULL), KVC_OK);
	user_leave(&still);
	for (uint32_t phase = 0, tries = 0; phase < 3; tries++) {
		int was_held;

		assert_in_range(tries, 0, 20);
		for (uint64_t talk = 1; talk <= 8; talk++) { /* enough to be taken in in several iterations */
			user_keys(&user_, talk, RIG_BLOCKS, keys);
			put_durably(keys, RIG_BLOCKS / 2);
		}
		stop(SIGTERM);
		was_held = attach_while_resets_cannot_be_recorded(&disk, phase == 0 ? 0 : 2); /* it has two copies */
		fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
		if (phase == 2 && was_held) {
			stop(SIGKILL);
			start();
		}
		phase += (uint32_t)was_held;
		await_true_epoch();
		assert_true(epoch() > was);
		was = epoch();
		for (uint64_t talk = 1; talk <= 8; talk++) {
			assert_int_equal(match(talk), 0);
		}
		user_attach(&still, &rig_, "still");
		user_keys(&still, 1, LEN, keys);
		assert_int_equal(user_get(&still, keys, LEN, &n), KVC_OK);
		assert_true(n == LEN && still.wrong == 0);
		user_leave(&still);
		rig_check_quiet(&rig_);
	}
	stop(SIGTERM);
	fault_disk_close(&disk);
}

/* The metadata is lost, and the headers cannot be read: nothing is dropped for that, for ten minutes. */
RIG_TEST(p2_unreadable_headers_are_given_up_after_ten_minutes, rig_init_mount(&rig_, "48m"))
{
	const uint64_t until = rig_now_ms() + RIG_WAIT_MS;
	fault_disk_t disk;
	char meta[96];

	fault_disk_open(&disk, &rig_);
	start();
	assert_int_equal(put(1, 1), KVC_OK);
	for (uint32_t ahead_s = 500; ahead_s <= 700; ahead_s += 200) {
		stop(SIGTERM);
		fault_disk_wait(&rig_);
		snprintf(meta, sizeof meta, "%s/meta", rig_.disk);
		kv_test_dir_remove(meta);
		atomic_store(&disk.control->ahead_s, 0);
		assert_int_equal(truncate(rig_.log, 0), 0);
		fault_disk_arm(&disk, FAULT_READ, FAULT_SLOTS, EIO, 0, UINT32_MAX);
		start();
		assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 4);
		while (!rig_log_has(&rig_, "still off")) { /* the thread has met them: its time begins */
			assert_true(rig_now_ms() < until);
			usleep(10000);
		}
		atomic_store(&disk.control->ahead_s, ahead_s);
		if (ahead_s < 600) { /* not yet: and as soon as they can be read, all is there */
			usleep(1500000);
			assert_int_equal(rig_metric(&rig_, "kvd_disk_state"), 4);
			fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
		}
		assert_true(rig_metric_is(&rig_, "kvd_disk_state", 0));
		fault_disk_arm(&disk, FAULT_OPS, 0, 0, 0, 0);
		assert_int_equal(rig_metric(&rig_, "kvd_disk_rebuilt_total"), ahead_s < 600 ? LEN : 0);
	}
	stop(SIGTERM);
	atomic_store(&disk.control->ahead_s, 0);
	start();
	assert_int_equal(match(1), 0);
	assert_int_equal(put(2, 1), KVC_OK);
	assert_true(is_read(2));
	rig_check_quiet(&rig_);
	stop(SIGTERM);
	fault_disk_close(&disk);
}
