/* More than the limits allow: BUSY or FULL at once, and everything again when there is room. */
#include "e2e/rig/rig.h"

#define LEN     60u
#define PUTS    40u
#define LEASES  16u
#define CALL_MS 5000u /* no call may come near it */

KV_TEST(p5_more_unfinished_puts_than_allowed_are_busy_not_hung)
{
	const kvc_put_options_t options = {.struct_size = sizeof options};
	kvc_put_t *put[PUTS] = {0};
	kvc_key_t keys[LEN];
	uint64_t busy = 0, granted = 0, since;
	other_t other;
	user_t user;
	rig_t rig;

	rig_init(&rig, 0);
	rig_option(&rig, "--instance.max_unfinished=2MiB"); /* 128 blocks */
	rig_start(&rig);
	other_start(&other, rig.sock);
	user_attach(&user, &rig, "flood");
	for (uint32_t i = 0; i < PUTS; i++) {
		user_keys(&user, i, LEN, keys);
		since = rig_now_ms();
		assert_int_equal(kvc_put_start(user.space, keys, 0, LEN, &options, &put[i]), KVC_OK);
		const kvc_status_t status = kvc_put_ready(put[i], 0);
		assert_true(rig_now_ms() - since < CALL_MS);
		assert_true(status == KVC_OK || status == KVC_ERR_BUSY);
		granted += status == KVC_OK ? kvc_put_n(put[i]) : 0;
		busy += status == KVC_ERR_BUSY || kvc_put_n(put[i]) < LEN;
	}
	assert_int_equal(granted, 128);
	assert_int_equal(busy, PUTS - 2);
	assert_true(rig_metric_is(&rig, "kvd_put_busy_total", PUTS - 2));
	other_goes_on(&other, 5);
	for (uint32_t i = 0; i < PUTS; i++) {
		kvc_put_free(put[i]);
	}
	user_keys(&user, 1, LEN, keys);
	assert_int_equal(user_put(&user, keys, 0, LEN, 0, NULL), KVC_OK); /* room again */
	user_leave(&user);
	other_end(&other, 0);
	rig_end(&rig);
}

KV_TEST(p5_a_pool_leased_to_the_last_slot_is_busy_until_a_release)
{
	kvc_lease_t *lease[LEASES] = {0};
	kvc_key_t keys[LEN];
	kvc_status_t status = KVC_OK;
	uint32_t leased = 0, visible;
	uint64_t since;
	user_t user;
	rig_t rig;

	rig_init(&rig, 0);
	rig_option(&rig, "--cpu.max_blocks=200");
	rig_start(&rig);
	user_attach(&user, &rig, "leased");
	for (uint32_t i = 0; status == KVC_OK && i < LEASES; i++) {
		visible = 0;
		user_keys(&user, i, LEN, keys);
		since = rig_now_ms();
		status = user_put(&user, keys, 0, LEN, 0, &visible);
		assert_true(rig_now_ms() - since < CALL_MS);
		if (status == KVC_OK && kvc_acquire(user.space, keys, visible, 0, 0, &lease[i]) == KVC_OK) {
			leased += kvc_lease_n(lease[i]);
			status = visible < LEN ? KVC_ERR_BUSY : KVC_OK;
		}
	}
	printf("# leased %u, then %s\n", leased, kvc_status_name(status));
	assert_int_equal(leased, 200);
	user_keys(&user, 99, LEN, keys);
	status = user_put(&user, keys, 0, LEN, 0, NULL);
	assert_true(status == KVC_ERR_BUSY || status == KVC_ERR_FULL);
	assert_true(rig_metric_reaches(&rig, "kvd_put_busy_total", 1));

	kvc_release(lease, 1);
	lease[0] = NULL;
	assert_int_equal(user_put(&user, keys, 0, LEN, 0, &visible), KVC_OK);
	assert_int_equal(visible, LEN);
	user_expect(&user, keys, LEN);
	kvc_release(lease, LEASES);
	user_leave(&user);
	rig_end(&rig);
}

KV_TEST(p5_more_leases_than_allowed_are_refused_and_the_others_stay)
{
	kvc_lease_t *lease[LEASES] = {0};
	kvc_key_t keys[4];
	uint32_t held = 0;
	other_t other;
	user_t user;
	rig_t rig;

	rig_init(&rig, 0);
	rig_option(&rig, "--limits.leases=8");
	rig_start(&rig);
	other_start(&other, rig.sock);
	user_attach(&user, &rig, "many");
	user_keys(&user, 1, 4, keys);
	assert_int_equal(user_put(&user, keys, 0, 4, 0, NULL), KVC_OK);
	for (uint32_t i = 0; i < LEASES; i++) {
		const kvc_status_t status = kvc_acquire(user.space, keys, 4, 0, 0, &lease[i]);

		assert_true(status == KVC_OK || status == KVC_ERR_BUSY || status == (kvc_status_t)KV_ERR_LIMIT);
		held += status == KVC_OK;
	}
	assert_int_equal(held, 8);
	assert_int_equal(kvc_lease_state(lease[0]), KVC_OK);
	kvc_release(lease, LEASES);
	assert_int_equal(kvc_acquire(user.space, keys, 4, 0, 0, &lease[0]), KVC_OK);
	kvc_release(lease, 1);
	user_leave(&user);
	other_end(&other, 0);
	rig_end(&rig);
}

KV_TEST_MAIN(NULL, NULL)
