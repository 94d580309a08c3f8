/* Announced blocks: handed over when they become visible, by any instance, and never a block that does not
 * follow.
 */
#include "ahead_stage.h"

#include "core/ends/damage.h"

/* ---- as they become visible ------------------------------------------------------------------ */

STAGE_TEST(p4_the_private_block_completes_it, stage_one(64, 0))
{
	u_send_t send = to_announce("t", 0, 4, 1);

	send.partial = 5;
	send.private_key = private_;
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(u_send(&u_, m_, &send, &sent_), KV_OK);
	assert_int_equal(sent_.announced, 5); /* the private block counts as one */
	put(m_, 0, 4);
	check_told(KV_HANDOVER_SENDING, 4, 5);
	assert_int_equal(last_notice(d_, sent_.number)->partial, 0);
	assert_int_equal(u_put_private(&u_, m_, &one_, &private_), 1);
	u_tick(&u_, 1);
	check_told(KV_HANDOVER_COMPLETE, 4, 0);
	assert_int_equal(last_notice(d_, sent_.number)->partial, 5);
	universe_check(&u_);
	evict_all();
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	settle_and_check();

	/* A prompt of less than a block. */
	send.transfer = "short";
	send.n = send.groups = 0;
	assert_int_equal(u_send(&u_, m_, &send, &sent_), KV_OK);
	assert_int_equal(sent_.state, KV_HANDOVER_SENDING);
	assert_int_equal(sent_.announced, 1);
	assert_int_equal(u_put_private(&u_, m_, &one_, &private_), 1);
	u_tick(&u_, 1);
	check_notice(m_, sent_.number, KV_HANDOVER_COMPLETE, 0, KV_OK);
}

/* The device could not read it: it was hidden with what is below it, and comes back without a put. */
STAGE_TEST(p3_blocks_that_can_be_read_again_are_handed_over, stage_one(64, 0))
{
	uint32_t block;

	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 4), 4);
	block = kvd_index_find(&u_.core->ix, u_.core->ns[0]->numbers[one_.space]->tree, &keys_[0], 0);
	kvd_index_set_aside(&u_.core->ix, kvd_block_at(&u_.core->ix, block)->node, 1);
	assert_int_equal(announce(0, 0, 4, 1), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(entry()->n, 0);
	kvd_index_set_aside(&u_.core->ix, kvd_block_at(&u_.core->ix, block)->node, 0);
	u_tick(&u_, 1);
	check_told(KV_HANDOVER_COMPLETE, 4, 0);
}

/* ---- refused --------------------------------------------------------------------------------- */

STAGE_TEST(p6_announcements_that_cannot_be_are_refused, stage_one(64, 0))
{
	u_send_t send = to_announce("t", 0, 4, 0);

	send.space = &space_; /* of several groups */
	assert_int_equal(send_it(send), KV_ERR_ARG);
	assert_int_equal(announce(0, 1, 4, 0), KV_MISS); /* a gap */
	send.space = &one_;
	send.partial = 3; /* more follows */
	assert_int_equal(send_it(send), KV_ERR_ARG);
	assert_int_equal(u_.core->handovers.used, 0);
}

/* Keys of another prompt: each is announced, and found, but not below the one before. */
KV_TEST(p3_a_block_that_does_not_follow_fails_the_hand_over)
{
	u_send_t send = to_announce("t", 0, 12, 1);
	kv_key_t mixed[12];

	send.keys = mixed;
	stage_one(128, 0);
	memcpy(mixed, keys_, sizeof mixed);
	memcpy(&mixed[10], &fork_[10], 2 * sizeof *mixed);
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(send_it(send), KV_OK);
	put(m_, 0, 9);
	check_told(KV_HANDOVER_SENDING, 9, 12);
	assert_int_equal(u_put(&u_, m_, &one_, fork_, 8, 12), 4);
	u_tick(&u_, 1);
	assert_int_equal(entry()->n, 9); /* the next one is not there */
	put(m_, 9, 10);
	check_notice(d_, sent_.number, KV_HANDOVER_FAILED, 9, KV_ERR_ARG);
	check_notice(m_, sent_.number, KV_HANDOVER_FAILED, 9, KV_ERR_ARG);
	assert_int_equal(u_.core->announced_count, 0);
	assert_int_equal(send_visible(9, 1), KV_ERR_ARG);
	stage_end();

	/* Within the request nothing has changed. */
	stage_one(128, 0);
	assert_int_equal(u_put(&u_, m_, &one_, keys_, 0, 12), 12);
	assert_int_equal(u_put(&u_, m_, &one_, fork_, 8, 12), 4);
	memcpy(mixed, keys_, sizeof mixed);
	memcpy(&mixed[10], &fork_[10], 2 * sizeof *mixed);
	assert_int_equal(send_it(send), KV_ERR_ARG);
	assert_int_equal(u_put_private(&u_, m_, &one_, &private_), 1);
	mixed[0] = private_;
	send.n = 1;
	assert_int_equal(send_it(send), KV_ERR_ARG);
	assert_int_equal(u_.core->handovers.used, 0);
	stage_end();
}

/* ---- withdrawn ------------------------------------------------------------------------------- */

STAGE_TEST(p4_a_last_chunk_that_crosses_the_completion_is_no_error, stage_one(64, 0))
{
	u_send_t send;

	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	put(m_, 0, 8);
	check_told(KV_HANDOVER_COMPLETE, 8, 0);
	assert_int_equal(send_visible(8, 1), KV_OK);
	assert_int_equal(sent_.state, KV_HANDOVER_COMPLETE);
	assert_int_equal(send_visible(4, 1), KV_OK);
	assert_int_equal(sent_.n, 8);
	assert_int_equal(announce(sent_.number, 0, 8, 1), KV_OK);
	assert_int_equal(send_visible(0, 1), KV_OK);
	assert_int_equal(send_visible(9, 1), KV_ERR_EXISTS); /* more than there is */
	assert_int_equal(send_visible(8, 0), KV_ERR_EXISTS); /* nothing follows */
	send = to_send_visible(8, 1);
	send.partial = 5;
	send.private_key = private_;
	assert_int_equal(send_it(send), KV_ERR_EXISTS);
	send = to_send_visible(0, 1);
	send.tail = "a tail";
	send.tail_len = 7;
	assert_int_equal(send_it(send), KV_ERR_EXISTS);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	assert_int_equal(send_visible(8, 1), KV_ERR_NOT_FOUND);
	/* One that was never announced is as before. */
	sent_.number = 0;
	assert_int_equal(send_visible(8, 1), KV_OK);
	assert_int_equal(send_visible(8, 1), KV_ERR_EXISTS);
}

/* ---- ends of sides --------------------------------------------------------------------------- */

/* Its member has gone, and no sweep has come by: what becomes visible is not handed over in its name. */
STAGE_TEST(p7_a_quantum_finds_that_the_producer_has_gone, stage_one(64, 0))
{
	assert_int_equal(receive(d_), KV_OK);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	u_dead(&u_, m_);
	u_.core->handover_sweep = 0;
	assert_int_equal(u_put(&u_, d_, &one_, keys_, 0, 8), 8);
	(void)kvd_handovers_run(u_.core);
	check_notice(d_, sent_.number, KV_HANDOVER_FAILED, 0, KV_ERR_PRODUCER_LOST);
	universe_check(&u_);
	m_ = u_join(&u_, 0, "engine", 2, 0);
}

/* A daemon that ends frees what is announced. */
KV_TEST(p4_a_core_that_ends_leaves_no_keys)
{
	stage_one(64, 0);
	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	universe_fini(&u_);
}

STAGE_TEST(p4_transfers_show_what_is_announced, stage_one(64, 0))
{
	static char json[8192];

	assert_int_equal(announce(0, 0, 8, 1), KV_OK);
	(void)kvd_core_transfers_json(u_.core, 0, json, sizeof json);
	assert_non_null(strstr(json, "\"announced_units\":8"));
	assert_non_null(strstr(json, "\"waits_for\":\"announced blocks\""));
}
