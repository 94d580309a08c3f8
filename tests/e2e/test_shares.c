/* Attackers: one namespace, or one model, takes all it can get, and another one comes after it. It must have its
 * share. */
#include "e2e/rig/rig.h"

#include <signal.h>

#define LEN  32u
#define MANY 80u /* conversations of LEN blocks, 50 MiB on disk: more than there is */

/* As large a block as the usual one, of another geometry: its slots are of another class. */
#define OTHER_LAYOUT "kvk1 heads=4 layers=2 tokens=16 k=32 v=32 dtype=bf16 inner=split page=0"

static char rival_sock[96];

static void stage(int disk)
{
	rig_init(&rig_, disk);
	rig_option(&rig_, "--nvme.size=32MiB");
	rig_option(&rig_, "--namespaces=default,rival");
	snprintf(rival_sock, sizeof rival_sock, "%.79s/rival.sock", rig_.run_dir);
}

static void attach(user_t *user, const char *sock, const char *layout)
{
	kvc_identity_t identity = user_identity("model");

	identity.layout = layout;
	if (user_try(user, sock, &identity) != KVC_OK) {
		fail_msg("%s", kvc_last_error());
	}
}

/* Conversations [0, count): what is refused is refused. */
static void put_many(user_t *user, uint32_t count)
{
	kvc_key_t keys[LEN];

	for (uint32_t c = 0; c < count; c++) {
		user_keys(user, c, LEN, keys);
		(void)user_put(user, keys, 0, LEN, 0, NULL);
		if (c % 8 == 7) {
			rig_written(&rig_); /* memory is small: what is evicted before it is on disk is lost */
		}
	}
}

/* Put until all of it is there, or acknowledged as durable: room comes in steps. */
static void put_whole(user_t *user, uint64_t seed, int durable)
{
	const uint64_t deadline = rig_now_ms() + RIG_WAIT_MS;
	kvc_key_t keys[LEN];
	uint32_t visible;

	user_keys(user, seed, LEN, keys);
	for (;;) {
		kvc_status_t status = user_put(user, keys, 0, LEN, durable, &visible);

		if (status == KVC_OK && visible == LEN) {
			return;
		}
		assert_true(status == KVC_OK || status == KVC_ERR_BUSY || status == (kvc_status_t)KV_ERR_NOT_ADMITTED);
		if (rig_now_ms() >= deadline) {
			fail_msg("conversation %llu never came to disk, status %d", (unsigned long long)seed,
				 (int)status);
		}
	}
}

static uint32_t matched(user_t *user, uint32_t first, uint32_t count)
{
	kvc_key_t keys[LEN];
	uint32_t blocks = 0;

	for (uint32_t c = first; c < first + count; c++) {
		user_keys(user, c, LEN, keys);
		blocks += user_match(user, keys, LEN);
	}

	return blocks;
}

static void read_all(user_t *user, uint32_t first, uint32_t count)
{
	kvc_key_t keys[LEN];

	for (uint32_t c = first; c < first + count; c++) {
		user_keys(user, c, LEN, keys);
		user_expect(user, keys, LEN);
	}
}

static void restart(int signal)
{
	(void)rig_kill(&rig_, signal);
	rig_start(&rig_);
}

/* ---- the disk -------------------------------------------------------------------------------- */

/* A disk full of a model that nobody has opened since the start is no wall for the next model, and what that one was
 * told is durable is. */
RIG_TEST(p2_a_disk_full_of_a_model_nobody_opens_takes_the_next_one, stage(1))
{
	user_t old, new;

	rig_start(&rig_);
	attach(&old, rig_.sock, RIG_LAYOUT);
	put_many(&old, MANY);
	rig_written(&rig_);
	assert_true(rig_metric(&rig_, "kvd_evicted_total{tier=disk}") > 0); /* full */
	user_leave(&old);
	restart(SIGTERM);

	attach(&new, rig_.sock, OTHER_LAYOUT);
	for (uint32_t c = 0; c < 20; c++) {
		put_whole(&new, c, 1);
	}
	assert_true(rig_metric(&rig_, "kvd_files_retired_total") > 0);
	user_leave(&new);
	restart(SIGKILL);
	attach(&new, rig_.sock, OTHER_LAYOUT);
	assert_int_equal(matched(&new, 0, 20), 20 * LEN);
	read_all(&new, 0, 20);
	attach(&old, rig_.sock, RIG_LAYOUT);
	assert_true(matched(&old, 0, MANY) > 8 * LEN); /* it gave what was asked for, not all it had */
	user_leave(&old);
	user_leave(&new);
}

/* A namespace that fills the disk and goes on writing leaves another one its share. */
RIG_TEST(p5_a_namespace_that_fills_the_disk_gives_another_its_share, stage(1))
{
	user_t rival;
	kvc_key_t keys[LEN];

	rig_start(&rig_);
	attach(&rival, rival_sock, RIG_LAYOUT);
	put_many(&rival, MANY);
	rig_written(&rig_);
	attach(&user_, rig_.sock, RIG_LAYOUT);
	for (uint32_t c = 0; c < 18; c++) { /* 576 blocks: 3 of the 6 files there is room for */
		put_whole(&user_, c, 1);
		user_keys(&rival, 1000 + c, LEN, keys);
		(void)user_put(&rival, keys, 0, LEN, 0, NULL);
	}
	put_many(&rival, MANY);
	assert_int_equal(matched(&user_, 0, 18), 18 * LEN);
	read_all(&user_, 0, 18);
	user_leave(&rival);
}

/* A maximum holds on the real tiers, for one block size after the other, while nobody else is there. What is newest is
 * kept. */
RIG_TEST(p5_a_maximum_holds_however_much_is_idle, stage(1))
{
	static const char *const layouts[] = {RIG_LAYOUT, OTHER_LAYOUT};
	user_t user;

	rig_option(&rig_, "--share.max_cpu=default=3MiB,rival=90%%");
	rig_option(&rig_, "--share.cpu=default=2MiB");
	rig_option(&rig_, "--share.max_disk=default=9MiB");
	rig_option(&rig_, "--share.max_index=default=450");
	rig_start(&rig_);
	for (uint32_t i = 0; i < 4; i++) {
		attach(&user, rig_.sock, layouts[i % 2]);
		for (uint32_t c = 0; c < MANY / 2; c++) {
			put_whole(&user, 100 * i + c, 0);
			assert_in_range(rig_share(user.kvc, "cpu", "used"), 1, 3u << 20);
			assert_in_range(rig_share(user.kvc, "disk", "used"), 0, 9u << 20);
			assert_in_range(rig_share(user.kvc, "index", "used"), 1, 450);
			if (c % 16 == 15) {
				rig_written(&rig_); /* what leaves memory before it is on disk is gone */
			}
		}
		rig_written(&rig_);
		assert_true(matched(&user, 100 * i, MANY / 2) >= 128);
		assert_int_equal(rig_share(user.kvc, "cpu", "max"), 3u << 20);
		user_leave(&user);
		if (i == 1) {
			restart(SIGKILL);
		}
	}
}

/* Files that were there before the maximum was lowered go by themselves, while the service goes on, and what was used
 * last is kept. */
RIG_TEST(p5_files_above_a_lowered_maximum_go_soon, stage(1))
{
	const uint64_t most = 9u << 20;
	uint64_t until;

	rig_start(&rig_);
	attach(&user_, rig_.sock, RIG_LAYOUT);
	put_many(&user_, MANY);
	rig_written(&rig_);
	assert_true(rig_share(user_.kvc, "disk", "used") > 2 * most);
	user_leave(&user_);
	rig_option(&rig_, "--share.max_disk=default=9MiB");
	restart(SIGTERM);
	attach(&user_, rig_.sock, RIG_LAYOUT);
	assert_int_equal(rig_number(user_.kvc, "kvd_namespace_max_bytes{tier=disk}"), most);
	for (until = rig_now_ms() + RIG_WAIT_MS; rig_share(user_.kvc, "disk", "used") > most;) {
		assert_true(rig_now_ms() < until);
		usleep(1000);
	}
	printf("# down to %" PRIu64 " bytes\n", rig_share(user_.kvc, "disk", "used"));
	assert_true(rig_share(user_.kvc, "disk", "used") > most / 2);
	assert_true(matched(&user_, 0, MANY) > 200);
	put_whole(&user_, 1000, 1);
	read_all(&user_, 1000, 1);
	user_leave(&user_);
	rig_check_quiet(&rig_);
	restart(SIGKILL);
	attach(&user_, rig_.sock, RIG_LAYOUT);
	assert_in_range(rig_share(user_.kvc, "disk", "used"), 1, most);
	read_all(&user_, 1000, 1);
}
