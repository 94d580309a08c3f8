/* Every allocation fails once, over the whole life of a core: the request says so, nothing leaks, nothing breaks, and
 * the next one works. */
#include "stage.h"

static kvd_space_info_t one_; /* of one full group */

static void story(void)
{
	kv_msg_acquire_reply_t reply;
	kv_msg_put_start_reply_t started;
	kv_msg_t ask = {0}, answer;
	static u_lease_t lease;
	static u_put_t put;

	for (uint32_t i = 0; i < 3; i++) {
		const kv_key_t *keys = i == 1 ? fork_ : keys_;

		if (u_put_start(&u_, m_, &space_, keys, i == 1 ? 8 : 0, 40, 1, &put, &started) == KV_OK &&
		    started.put) {
			u_put_write(&u_, &put);
			(void)u_put_end(&u_, m_, &put, started.already, put.n - started.already);
		}
		tick_and_check(3);
		(void)u_acquire(&u_, m_, &space_, keys, 40, 4, &lease, &reply);
		settle_and_check();
		if (lease.id) {
			u_lease_verify(&u_, &lease);
			ask.bad_block = (kv_msg_bad_block_t){.lease = lease.id, .index = 30};
			(void)(i == 1 ? u_request(&u_, m_, KV_CODE_BAD_BLOCK, &ask, &answer) : KV_OK);
			(void)u_release(&u_, m_, lease.id);
			lease.id = 0;
		}
		settle_and_check();
	}
	(void)u_withdraw(&u_, m_, &space_, &keys_[20], 8);
	(void)u_withdraw(&u_, m_, &space_, &fork_[8], 1);
	settle_and_check();
	ask.space_reset = (kv_msg_space_reset_t){.space = space_.space, .epoch = space_.epoch};
	if (u_request(&u_, m_, KV_CODE_SPACE_RESET, &ask, &answer) != KV_ERR_NOMEM) {
		space_.epoch = answer.space_reset_reply.epoch;
	}
	settle_and_check();
}

/* The same of an unchained group, among full chains. */
static void story_alone(void)
{
	kv_msg_acquire_reply_t reply;
	kv_msg_put_start_reply_t started;
	kv_msg_t ask = {0}, answer;
	static u_lease_t lease;
	static u_put_t put;

	(void)u_put(&u_, m_, &space_, keys_, 0, 8);
	u_.group = 1;
	for (uint32_t i = 0; i < 3; i++) {
		if (u_put_start(&u_, m_, &space_, keys_, 4 * i, 20 + 4 * i, 1, &put, &started) == KV_OK &&
		    started.put) {
			u_put_write(&u_, &put);
			(void)u_put_end(&u_, m_, &put, 0, put.n);
		}
		tick_and_check(3);
		(void)u_acquire(&u_, m_, &space_, keys_, 18 + 4 * i, 6 + 4 * i, &lease, &reply);
		settle_and_check();
		if (lease.id) {
			u_lease_verify(&u_, &lease);
			ask.bad_block = (kv_msg_bad_block_t){.lease = lease.id, .index = 3};
			(void)(i == 1 ? u_request(&u_, m_, KV_CODE_BAD_BLOCK, &ask, &answer) : KV_OK);
			(void)u_release(&u_, m_, lease.id);
			lease.id = 0;
		}
		while (i == 0 && kvd_core_evict_one(u_.core, KV_TIER_CPU) == KV_OK) {
		}
	}
	ask.space_reset = (kv_msg_space_reset_t){.space = space_.space, .epoch = space_.epoch};
	if (u_request(&u_, m_, KV_CODE_SPACE_RESET, &ask, &answer) != KV_ERR_NOMEM) {
		space_.epoch = answer.space_reset_reply.epoch;
	}
	settle_and_check();
	u_.group = 0;
}

/* Hand-overs of every group, with a tail, taken half way and at the end. */
static void story_handover(void)
{
	u_member_t *decode = NULL;
	kv_msg_handover_send_reply_t sent = {0};
	kv_msg_handover_recv_reply_t got = {0};
	u_send_t send = {
		.transfer = "t", .space = &space_, .keys = keys_, .groups = U_ALL, .tail = "token", .tail_len = 5};

	for (uint32_t g = 0; g < U_GROUPS; g++) {
		u_.group = u_groups[g].id;
		(void)u_put(&u_, m_, &space_, keys_, 0, g == 2 ? 4 : 8);
		u_tick(&u_, 2);
	}
	u_.group = 0;
	decode = m_; /* one member is both sides: joining another may fail, and that is told elsewhere */
	for (uint32_t n = 2; n <= 8; n += 2) {
		send.n = n;
		send.last = n == 8;
		if (u_send(&u_, m_, &send, &sent) == KV_OK) {
			send.number = sent.number;
		}
		universe_check(&u_);
		if (n == 4) {
			(void)u_recv(&u_, decode, &space_, "t", 0, &got);
		}
	}
	(void)u_recv(&u_, decode, &space_, "other", 0, &got);
	universe_check(&u_);
	(void)u_done(&u_, decode, sent.number, 0);
	(void)u_done(&u_, decode, got.number, 0);
	settle_and_check();
}

/* Private blocks: a consumer asks first, gives what it got back, and asks again. */
static void story_private(void)
{
	kv_msg_handover_send_reply_t sent = {0};
	kv_msg_handover_recv_reply_t got[2] = {0};
	kv_msg_acquire_reply_t acquired;
	u_lease_t lease = {0};
	kv_key_t whole[3];
	u_send_t send = {.transfer = "t",
			 .space = &space_,
			 .keys = keys_,
			 .n = 2,
			 .groups = U_ALL,
			 .last = 1,
			 .partial = 3,
			 .await_room = 1};

	memcpy(whole, keys_, 2 * sizeof *keys_);
	u_chain(&keys_[1], 9, &whole[2], 1);
	send.private_key = whole[2];
	for (uint32_t g = 0; g < U_GROUPS; g++) {
		u_.group = u_groups[g].id;
		(void)u_put(&u_, m_, &space_, keys_, 0, g == 2 ? 1 : 2);
		(void)u_put_private(&u_, m_, &space_, &whole[2]);
		u_tick(&u_, 2);
	}
	u_.group = 0;
	(void)u_recv(&u_, m_, &space_, "t", 0, &got[0]);
	universe_check(&u_);
	(void)u_send(&u_, m_, &send, &sent);
	universe_check(&u_);
	(void)u_done(&u_, m_, sent.number, KV_HANDOVER_ABORT);
	tick_and_check(1);
	(void)u_recv(&u_, m_, &space_, "t", 0, &got[1]);
	if (u_acquire(&u_, m_, &space_, whole, 3, 0, &lease, &acquired) == KV_OK && lease.id) {
		u_lease_verify(&u_, &lease);
	}
	universe_check(&u_);
	(void)u_done(&u_, m_, sent.number, 0);
	(void)u_done(&u_, m_, got[0].number, 0);
	(void)u_done(&u_, m_, got[1].number, 0);
	settle_and_check();
}

/* Blocks announced before they are put, more of them meanwhile, and the private block. */
static void story_announce(void)
{
	kv_msg_handover_send_reply_t sent = {0};
	kv_msg_handover_recv_reply_t got = {0};
	const kvd_space_info_t *one = &one_;
	u_send_t send = {.transfer = "t",
			 .space = one,
			 .keys = keys_,
			 .ahead = 1,
			 .groups = U_FULL,
			 .tail = "token",
			 .tail_len = 5};

	(void)u_recv(&u_, m_, one, "t", 0, &got);
	for (uint32_t n = 4; n <= 12; n += 4) {
		send.n = n;
		send.last = n == 12;
		send.partial = send.last ? 3 : 0;
		u_chain(&keys_[11], 9, &send.private_key, 1);
		if (u_send(&u_, m_, &send, &sent) == KV_OK) {
			send.number = sent.number;
		}
		universe_check(&u_);
		(void)u_put(&u_, m_, one, keys_, n > 4 ? n - 6 : 0, n - 2);
		tick_and_check(1);
	}
	(void)u_put(&u_, m_, one, keys_, 10, 12);
	(void)u_put_private(&u_, m_, one, &send.private_key);
	tick_and_check(1);
	(void)u_done(&u_, m_, got.number ? got.number : sent.number, sent.number ? 0 : U_GIVE_UP);
	settle_and_check();
}

static void every_failure(void (*tell)(void))
{
	uint64_t failures = 0;

	for (uint64_t n = 1;; n++) {
		int failed;

		stage(48, 64);
		u_.group_count = 1;
		one_ = u_space(&u_, 0, "one");
		u_.group_count = U_GROUPS;
		kv_test_fail_nth(&u_.env, n);
		tell();
		failed = kv_test_failed(&u_.env);
		kv_test_fail_nth(&u_.env, 0);
		u_chain(NULL, 7, keys_, 512);
		assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 20), 20);
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 20), 20);
		stage_end();
		if (!failed) {
			break;
		}
		failures++;
	}
	assert_true(failures > 20);
}

KV_TEST(p4_any_allocation_may_fail_and_nothing_is_lost)
{
	every_failure(story);
}

KV_TEST(p4_any_allocation_for_an_unchained_group_may_fail)
{
	every_failure(story_alone);
}

KV_TEST(p4_any_allocation_for_a_hand_over_may_fail)
{
	every_failure(story_handover);
}

KV_TEST(p4_any_allocation_for_a_private_block_may_fail)
{
	every_failure(story_private);
}

KV_TEST(p4_any_allocation_for_an_announcement_may_fail)
{
	every_failure(story_announce);
}

KV_TEST(p4_a_core_without_memory_is_refused)
{
	kv_test_env_t env;
	static kv_metrics_t metrics;
	fake_tier_t cpu;
	kvd_core_config_t config;
	kvd_world_t world = {.metrics = &metrics};
	kvd_core_t *core;

	stage(8, 0);
	config = u_.config;
	stage_end();
	kv_test_env_init(&env);
	fake_tier_init(&cpu, 0, 4, 1);
	world.env = env.env;
	world.cpu = &cpu.tier;
	KV_TEST_EACH_FAILURE(&env, n)
	{
		kv_status_t status = kvd_core_create(&config, &world, &core);

		assert_int_equal(status, kv_test_failed(&env) ? KV_ERR_NOMEM : KV_OK);
		if (status == KV_OK) {
			kvd_core_destroy(core);
		}
		assert_int_equal(kv_test_env_live(&env), 0);
	}
	config.incarnation = 0;
	assert_int_equal(kvd_core_create(&config, &world, &core), KV_ERR_ARG);
	fake_tier_fini(&cpu);
}

STAGE_TEST(p4_the_documents_are_whole, stage(16, 16))
{
	char small[8], *json;
	uint32_t failed;
	size_t len;

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	len = kvd_core_status_json(u_.core, 0, 2, small, sizeof small);
	json = malloc(len + 1);
	assert_int_equal(kvd_core_status_json(u_.core, 0, 2, json, len + 1), len);
	assert_int_equal(strlen(json), len);
	assert_non_null(strstr(json, "\"instance\":\"engine\""));
	assert_null(strstr(json, "0123456789abcde")); /* no secret */
	free(json);
	len = kvd_core_check_json(u_.core, NULL, 0, &failed);
	assert_int_equal(failed, 0);
	json = malloc(len + 1);
	assert_int_equal(kvd_core_check_json(u_.core, json, len + 1, &failed), len);
	assert_non_null(strstr(json, "\"promise\":\"P4\",\"ok\":true"));
	free(json);
}
