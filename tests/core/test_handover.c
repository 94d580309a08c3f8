/* Hand-overs: every state, every end of a side, every refusal. */
#include "handover_stage.h"

/* ---- the way of an entry --------------------------------------------------------------------- */

STAGE_TEST(p5_a_consumer_may_ask_first_and_is_told, stage_two(64, 0))
{
	assert_int_equal(recv(d_, "t", 5000), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_AWAITED);
	assert_int_equal(got_.n, 0);
	assert_int_equal(got_.ttl_ms, 5000);
	put_all(0, 8);
	kv_test_advance(&u_.env, 3000000);
	assert_int_equal(send_first("t", 8, U_ALL, 1), KV_OK);
	assert_int_equal(sent_.number, got_.number);
	assert_int_equal(sent_.taken, 1);
	check_notice(d_, got_.number, KV_HANDOVER_COMPLETE, 8, KV_OK);
	assert_int_equal(metric(KV_M_HANDOVER_WAIT), 1);
	assert_int_equal(u_.metrics.sum_ns[KV_M_HANDOVER_WAIT], 3000000);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
}

STAGE_TEST(p4_a_tail_travels_with_the_entry_and_may_be_all, stage_two(64, 0))
{
	static const char hidden[] = "first token";
	static const char other[] = "another";
	u_send_t send = to_send_tail("t", hidden, sizeof hidden);
	kv_msg_t ask = {0}, answer;

	assert_int_equal(send_it(send), KV_OK);
	assert_int_equal(sent_.bytes, sizeof hidden);
	universe_check(&u_);
	send = to_send_tail("t", other, sizeof other);
	send.number = sent_.number;
	send.last = 1;
	assert_int_equal(send_it(send), KV_OK);
	ask.handover_tail.number = sent_.number;
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_TAIL, &ask, &answer), KV_ERR_NOT_FOUND);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(got_.tail_bytes, sizeof other);
	assert_int_equal(u_request(&u_, m_, KV_CODE_HANDOVER_TAIL, &ask, &answer), KV_ERR_NOT_FOUND);
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_TAIL, &ask, &answer), KV_OK);
	assert_int_equal(answer.handover_tail_reply.tail.len, sizeof other);
	assert_memory_equal(answer.handover_tail_reply.tail.data, other, sizeof other);
	assert_int_equal(kvd_share_irreclaimable(u_.core, 0, KVD_HOST_MEM), sizeof other);
	universe_check(&u_);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	assert_int_equal(kvd_share_irreclaimable(u_.core, 0, KVD_HOST_MEM), 0);
}

/* ---- kept, until it is taken or has expired -------------------------------------------------- */

STAGE_TEST(p5_each_send_begins_the_time_to_live_again, stage_two(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("t", 4, U_FULL, 0), KV_OK);
	for (uint32_t n = 5; n < 12; n++) {
		advance(8000000000u);
		assert_int_equal(send_more(n, U_FULL, 0), KV_OK);
	}
	advance(10200000000u);
	assert_int_equal(u_.core->handovers.used, 0);
	assert_int_equal(send_more(12, U_FULL, 1), KV_ERR_NOT_FOUND); /* no one would take it: it does not begin anew */
	assert_int_equal(u_.core->handovers.used, 0);
}

STAGE_TEST(p5_a_consumers_wait_ends_at_its_deadline, stage_two(64, 0))
{
	uint64_t number;

	assert_int_equal(recv(d_, "never", 300), KV_OK);
	number = got_.number;
	advance(200000000u);
	assert_null(last_notice(d_, number));
	advance(200000000u);
	check_notice(d_, number, KV_HANDOVER_ENDED, 0, KV_ERR_TIMEOUT);
	assert_int_equal(u_.core->handovers.used, 0);

	/* One that has begun is given back, and lives on as if nobody had asked. */
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("t", 4, U_FULL, 0), KV_OK);
	assert_int_equal(recv(d_, "t", 300), KV_OK);
	advance(400000000u);
	check_notice(d_, got_.number, KV_HANDOVER_ENDED, 0, KV_ERR_TIMEOUT);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_ERR_NOT_FOUND);
	assert_int_equal(send_more(8, U_FULL, 0), KV_OK);
	assert_int_equal(sent_.taken, 0);
	/* To ask again is to have all the time again. */
	assert_int_equal(recv(d_, "t", 300), KV_OK);
	advance(200000000u);
	assert_int_equal(recv(d_, "t", 300), KV_OK);
	advance(200000000u);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
}

/* What is given back lives as long again as without a consumer: neither until the consumer's deadline, nor not at all.
 */
STAGE_TEST(p5_what_is_given_back_has_its_time_to_live_again, stage_two(64, 0))
{
	u_send_t brief = to_send("t", 4, U_FULL, 1);

	brief.ttl_ms = 2000;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_it(brief), KV_OK);
	assert_int_equal(sent_.ttl_ms, 2000);
	assert_int_equal(recv(d_, "t", 9000), KV_OK);
	advance(8000000000u); /* it is the consumer's: its own time does not run */
	u_dead(&u_, d_);
	u_tick(&u_, 1);
	advance(1800000000u);
	assert_int_equal(u_.core->handovers.used, 1);
	advance(400000000u);
	assert_int_equal(u_.core->handovers.used, 0);
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 0, KV_ERR_EXPIRED);

	d_ = u_join(&u_, 0, "decode", 2, 0);
	assert_int_equal(send_it(brief), KV_OK);
	assert_int_equal(recv(d_, "t", 9000), KV_OK);
	assert_int_equal(u_done(&u_, d_, got_.number, KV_HANDOVER_ABORT), KV_OK);
	advance(2200000000u);
	assert_int_equal(u_.core->handovers.used, 0);
}

/* A life of several rounds of the timing wheel. */
STAGE_TEST(p5_a_long_life_is_not_cut_short, stage_two(64, 0))
{
	u_.core->config.handover_ttl_ns = UINT64_C(60000000000);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("t", 12, U_FULL, 1), KV_OK);
	assert_int_equal(sent_.ttl_ms, 60000);
	for (uint32_t second = 0; second < 59; second++) {
		advance(990000000u);
	}
	assert_int_equal(u_.core->handovers.used, 1);
	advance(2000000000u);
	assert_int_equal(u_.core->handovers.used, 0);
}

/* The core ends with all that it has. */
KV_TEST(p4_a_core_that_ends_keeps_no_tail)
{
	stage_two(64, 0);
	assert_int_equal(send_it(to_send_tail("t", "x", 1)), KV_OK);
	universe_fini(&u_);
}

/* ---- refusals change nothing ----------------------------------------------------------------- */

STAGE_TEST(p3_a_block_that_is_not_visible_changes_nothing, stage_two(256, 0))
{
	uint64_t pins;

	put_all(0, 8);
	assert_int_equal(send_first("t", 12, U_ALL, 0), KV_MISS);
	assert_int_equal(u_.core->handovers.used + u_.core->pins.used, 0);
	assert_int_equal(send_first("t", 8, U_ALL, 0), KV_OK);
	pins = u_.core->pins.used;
	u_.group = 0;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 8, 12), 4); /* the first group only */
	assert_int_equal(send_more(12, U_ALL, 1), KV_MISS);
	assert_int_equal(u_.core->pins.used, pins);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_SENDING);
	assert_int_equal(got_.n, 8);
}

static kv_status_t send_raw(const uint32_t *parts, uint32_t words, uint32_t keys, const char *transfer)
{
	kv_msg_t ask = {.handover_send = {.transfer = kv_slice_str(transfer),
					  .space = space_.space,
					  .epoch = space_.epoch,
					  .parts = {(const uint8_t *)parts, words * 4},
					  .keys = {keys_[7].b, keys * KV_KEY_BYTES}}},
		 answer;

	return u_request(&u_, m_, KV_CODE_HANDOVER_SEND, &ask, &answer);
}

STAGE_TEST(p10_parts_that_contradict_themselves_are_refused, stage_two(256, 0))
{
	static char long_id[130];
	u_send_t send;
	kv_msg_t ask = {0}, answer;

	put_all(0, 16);
	memset(long_id, 'x', 129);
	assert_int_equal(send_raw((uint32_t[]){0, 8, 1}, 3, 1, ""), KV_ERR_ARG);
	assert_int_equal(send_raw((uint32_t[]){0, 8, 1}, 3, 1, long_id), KV_ERR_ARG);
	assert_int_equal(send_raw((uint32_t[]){0, 8, 1}, 2, 1, "t"), KV_ERR_ARG); /* half a part */
	assert_int_equal(send_raw((uint32_t[]){0, 8, 1}, 3, 0, "t"), KV_ERR_ARG); /* a key is missing */
	assert_int_equal(send_raw((uint32_t[]){0, 8, 1}, 3, 2, "t"), KV_ERR_ARG); /* one too many */
	assert_int_equal(send_raw((uint32_t[]){0, 8, 2}, 3, 2, "t"), KV_ERR_ARG); /* full: one */
	assert_int_equal(send_raw((uint32_t[]){0, 9, 1}, 3, 1, "t"), KV_ERR_ARG); /* it is block 8 */
	assert_int_equal(send_raw((uint32_t[]){0, 0, 0}, 3, 0, "t"), KV_ERR_ARG);
	assert_int_equal(send_raw((uint32_t[]){1, 8, UINT32_MAX}, 3, 1, "t"), KV_ERR_ARG);
	assert_int_equal(send_raw((uint32_t[]){1, UINT32_MAX, 1}, 3, 1, "t"), KV_ERR_ARG);
	assert_int_equal(send_raw((uint32_t[]){0, 8, 1, 0, 8, 1}, 6, 2, "t"), KV_ERR_ARG); /* twice */
	assert_int_equal(send_raw((uint32_t[]){1, 8, 1, 1, 8, 1}, 6, 2, "t"), KV_ERR_ARG);
	assert_int_equal(send_raw((uint32_t[]){9, 8, 1}, 3, 1, "t"), KV_ERR_UNSUPPORTED);
	assert_int_equal(u_.core->handovers.used + u_.core->pins.used, 0);

	assert_int_equal(send_first("t", 12, U_FULL, 0), KV_OK);
	assert_int_equal(send_more(11, U_FULL, 0), KV_ERR_ARG); /* only deeper */
	send = to_send("", 0, 0, 0);
	send.number = sent_.number;
	assert_int_equal(send_it(send), KV_ERR_ARG); /* each chunk names its hand-over */
	assert_int_equal(recv(d_, "", 0), KV_ERR_ARG);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 8, 20), 12);
	send = to_send("t", 16, U_FULL, 0);
	send.number = sent_.number;
	send.keys = fork_;
	assert_int_equal(send_it(send), KV_ERR_ARG); /* and below what is handed over */
	universe_check(&u_);
	ask.handover_recv = (kv_msg_handover_recv_t){.transfer = kv_slice_str("t"), .space = space_.space, .epoch = 9};
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_RECV, &ask, &answer), KV_ERR_STALE_EPOCH);
	ask.handover_recv.space = 50;
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_RECV, &ask, &answer), KV_ERR_NOT_FOUND);
	assert_int_equal(u_request(&u_, NULL, KV_CODE_HANDOVER_RECV, &ask, &answer), KV_ERR_NOT_JOINED);
	assert_int_equal(u_done(&u_, NULL, 1, 0), KV_ERR_NOT_JOINED);
}

/* Another namespace's entry is none: not by its number, not by its name. */
STAGE_TEST(p8_entries_of_another_namespace_are_none, stage_two(64, 0))
{
	u_member_t *stranger;
	kvd_space_info_t space;
	kv_msg_t ask = {0}, answer;
	char json[4096];

	stranger = u_join(&u_, 1, "engine", 2, 0);
	space = u_space(&u_, 1, "model");
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("secret-name", 12, U_FULL, 1), KV_OK);
	assert_int_equal(u_done(&u_, stranger, sent_.number, 0), KV_ERR_NOT_FOUND);
	assert_int_equal(u_done(&u_, stranger, sent_.number + (1u << KVD_ID_BITS), 0), KV_ERR_NOT_FOUND);
	assert_int_equal(u_done(&u_, stranger, UINT64_MAX, 1), KV_ERR_NOT_FOUND);
	ask.handover_tail.number = sent_.number;
	assert_int_equal(u_request(&u_, stranger, KV_CODE_HANDOVER_TAIL, &ask, &answer), KV_ERR_NOT_FOUND);
	assert_int_equal(u_recv(&u_, stranger, &space, "secret-name", 100, &got_), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_AWAITED);
	assert_true(kvd_core_transfers_json(u_.core, u_.ns[1], json, sizeof json) < sizeof json);
	assert_null(strstr(json, "complete"));
	assert_non_null(strstr(json, "\"waits_for\":\"the producer to begin\""));
	assert_true(kvd_core_transfers_json(u_.core, u_.ns[0], json, sizeof json) < sizeof json);
	assert_non_null(strstr(json, "\"transfer\":\"secret-name\""));
	assert_non_null(strstr(json, "\"producer\":\"engine\",\"consumer\":\"\",\"waits_for\":\"a consumer\""));
	assert_null(strstr(json, "awaited"));
}

/* ---- ends of sides --------------------------------------------------------------------------- */

STAGE_TEST(p4_a_producer_that_dies_fails_what_is_not_complete, stage_two(128, 0))
{
	uint64_t waited, unasked, complete;

	put_all(0, 16);
	assert_int_equal(send_first("waited", 8, U_ALL, 0), KV_OK);
	waited = sent_.number;
	assert_int_equal(recv(d_, "waited", 0), KV_OK);
	assert_int_equal(send_first("unasked", 12, U_ALL, 0), KV_OK);
	unasked = sent_.number;
	assert_int_equal(send_first("complete", 16, U_ALL, 1), KV_OK);
	complete = sent_.number;
	assert_int_equal(recv(d_, "complete", 0), KV_OK);
	u_dead(&u_, m_);
	tick_and_check(1);
	check_notice(d_, waited, KV_HANDOVER_FAILED, 8, KV_ERR_PRODUCER_LOST);
	assert_int_equal(metric(KV_M_HANDOVER_WAIT), 1); /* of the complete one nobody waited */
	assert_null(last_notice(d_, complete));
	evict_all();
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 16); /* the complete one keeps all */
	assert_int_equal(u_done(&u_, d_, complete, 0), KV_OK);
	evict_all();
	assert_int_equal(u_visible(&u_, 0, &space_, keys_, 16), 8); /* what is there stays until its consumer is done */
	assert_int_equal(u_done(&u_, d_, waited, 0), KV_OK);
	assert_int_equal(metric(KV_M_HANDOVERS_FAILED), 1);
	assert_int_equal(metric(KV_M_HANDOVERS_TAKEN), 1);
	/* Who asks later learns why at once. */
	assert_int_equal(recv(d_, "unasked", 0), KV_OK);
	assert_int_equal(got_.number, unasked);
	assert_int_equal(got_.state, KV_HANDOVER_FAILED);
	assert_int_equal(got_.status, KV_ERR_PRODUCER_LOST);
	assert_int_equal(got_.n, 0);
	assert_int_equal(u_.core->pins.used, 0);
	assert_int_equal(u_done(&u_, d_, unasked, 0), KV_OK);
	assert_int_equal(u_.core->handovers.used, 0);
	m_ = u_join(&u_, 0, "engine", 2, 0);
}

/* Of several members of an instance the one that speaks is the side. */
STAGE_TEST(p4_a_member_that_closes_leaves_nothing_with_its_instance, stage_two(64, 0))
{
	u_member_t *second;
	const kvd_member_rec_t *rec;

	second = u_join(&u_, 0, "engine", 2, 0);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("t", 12, U_FULL, 1), KV_OK);
	assert_int_equal(recv(m_, "u", 0), KV_OK);
	u_closed(&u_, m_);
	tick_and_check(1);
	rec = kvd_member_find(u_.core, second->id);
	assert_int_equal(kvd_instance_at(u_.core, rec->instance)->handovers, 0);
	assert_int_equal(u_.core->handovers.used, 1); /* it was complete */
	assert_int_equal(recv(second, "t", 0), KV_OK);
	assert_int_equal(u_done(&u_, second, got_.number, 0), KV_OK);
}

STAGE_TEST(p4_either_side_may_give_up_at_every_stage, stage_two(128, 0))
{
	put_all(0, 16);
	assert_int_equal(recv(d_, "t", 0), KV_OK); /* the consumer, before there is a producer */
	assert_int_equal(u_done(&u_, d_, got_.number, 1), KV_OK);
	assert_int_equal(u_.core->handovers.used, 0);
	assert_int_equal(metric(KV_M_HANDOVERS_ABORTED), 1);

	assert_int_equal(send_first("t", 8, U_ALL, 0), KV_OK); /* the producer, half way */
	assert_int_equal(u_done(&u_, m_, sent_.number, KV_HANDOVER_BY_PRODUCER), KV_ERR_ARG);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
	check_notice(d_, sent_.number, KV_HANDOVER_FAILED, 8, KV_ERR_ABORTED);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_ERR_NOT_FOUND);
	assert_int_equal(send_more(16, U_ALL, 1), KV_ERR_NOT_FOUND);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	assert_int_equal(metric(KV_M_HANDOVERS_ABORTED), 2);
	assert_int_equal(u_.core->handovers.used, 0);

	assert_int_equal(send_first("t", 16, U_ALL, 1), KV_OK); /* the producer, after all is sent */
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);
	assert_int_equal(u_.core->pins.used, 0);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(got_.status, KV_ERR_ABORTED);
	assert_int_equal(u_done(&u_, d_, sent_.number, 1), KV_OK); /* nobody else wants it */
	assert_int_equal(u_.core->handovers.used, 0);

	assert_int_equal(send_first("t", 8, U_ALL, 0), KV_OK); /* the consumer is content with less */
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 8, KV_OK);
	assert_int_equal(send_more(16, U_ALL, 1), KV_ERR_NOT_FOUND);
	assert_int_equal(u_.core->handovers.used, 0);
}

/* One instance may be both sides: each is told as what it is. */
STAGE_TEST(p4_an_instance_may_hand_over_to_itself, stage_two(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(recv(m_, "t", 300), KV_OK);
	assert_int_equal(send_first("t", 8, U_FULL, 0), KV_OK);
	assert_int_equal(last_notice(m_, sent_.number)->side, 0);
	advance(400000000u); /* the consumer is late; the producer goes on */
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 0, KV_ERR_TIMEOUT);
	assert_int_equal(last_notice(m_, sent_.number)->side, 0);
	assert_int_equal(send_more(12, U_FULL, 1), KV_OK);
	assert_int_equal(recv(m_, "t", 300), KV_OK);
	assert_int_equal(u_done(&u_, m_, sent_.number, 0), KV_OK);
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 0, KV_OK);
	assert_int_equal(last_notice(m_, sent_.number)->side, 1);
}

/* ---- blocks that are lost -------------------------------------------------------------------- */

STAGE_TEST(p1_a_reset_ends_all_entries_of_its_space, stage_two(64, 0))
{
	uint64_t awaited, sending;

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(recv(d_, "awaited", 0), KV_OK);
	awaited = got_.number;
	assert_int_equal(send_first("sending", 8, U_FULL, 0), KV_OK);
	sending = sent_.number;
	assert_int_equal(recv(d_, "sending", 0), KV_OK);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	tick_and_check(1);
	check_notice(d_, awaited, KV_HANDOVER_ENDED, 0, KV_ERR_STALE_EPOCH);
	check_notice(d_, sending, KV_HANDOVER_ENDED, 0, KV_ERR_STALE_EPOCH);
	check_notice(m_, sending, KV_HANDOVER_ENDED, 0, KV_ERR_STALE_EPOCH);
	assert_int_equal(u_.core->handovers.used, 0);
	assert_int_equal(recv(d_, "sending", 0), KV_ERR_STALE_EPOCH);
	space_.epoch++;
	assert_int_equal(recv(d_, "sending", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_AWAITED);
}

/* The producer ended with the reset and does not come again. */
STAGE_TEST(p7_a_consumer_after_a_reset_is_told_at_once, stage_two(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("swept", 12, U_FULL, 1), KV_OK);
	assert_int_equal(send_first("sending", 8, U_FULL, 0), KV_OK);
	assert_int_equal(u_reset(&u_, m_, &space_), KV_OK);
	space_.epoch++;
	assert_int_equal(recv(d_, "sending", 0), KV_ERR_EXPIRED); /* it ends in this very request */
	check_notice(m_, sent_.number, KV_HANDOVER_ENDED, 0, KV_ERR_STALE_EPOCH);
	tick_and_check(1);
	assert_int_equal(u_.core->handovers.used, 0);
	assert_int_equal(recv(d_, "swept", 0), KV_ERR_EXPIRED);
	assert_int_equal(recv(d_, "swept", 0), KV_OK); /* told once */
	assert_int_equal(got_.state, KV_HANDOVER_AWAITED);
}

STAGE_TEST(p7_a_consumer_after_the_time_to_live_is_told_at_once, stage_two(64, 0))
{
	u_send_t brief = to_send("t", 4, U_FULL, 1);

	brief.ttl_ms = 2000;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_it(brief), KV_OK);
	advance(2200000000u);
	assert_int_equal(u_.core->handovers.used, 0);
	assert_int_equal(recv(d_, "t", 0), KV_ERR_EXPIRED);
}

static void report_bad(uint32_t n, uint32_t index)
{
	kv_msg_acquire_reply_t reply;
	u_lease_t lease;

	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, n, 0, &lease, &reply), KV_OK);
	assert_int_equal(u_bad_block(&u_, d_, lease.id, index), KV_OK);
	u_settle(&u_);
}

STAGE_TEST(p1_an_entry_with_a_bad_block_fails, stage_two(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 20), 20);
	assert_int_equal(send_first("t", 12, U_FULL, 0), KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	report_bad(20, 15); /* below what is handed over */
	assert_null(last_notice(d_, got_.number));
	report_bad(15, 5);
	check_notice(d_, got_.number, KV_HANDOVER_FAILED, 0, KV_ERR_CORRUPT);
	check_notice(m_, got_.number, KV_HANDOVER_FAILED, 0, KV_ERR_CORRUPT);
	assert_int_equal(send_more(12, U_FULL, 1), KV_ERR_CORRUPT);
	assert_int_equal(u_.core->pins.used, 0);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	assert_int_equal(metric(KV_M_HANDOVERS_FAILED), 1);
}

/* ---- sides of two spaces --------------------------------------------------------------------- */

static kv_status_t send_in(const kvd_space_info_t *space, const char *transfer, int last)
{
	u_send_t send = to_send(transfer, 8, U_ALL, last);

	send.space = space;

	return send_it(send);
}

/* Either side may come first: both learn it at once, nothing is kept, and the blocks stay as cache. */
KV_TEST(p5_sides_of_two_spaces_are_told_at_once)
{
	kvd_space_info_t other;
	uint64_t number;

	for (int last = 0; last < 2; last++) {
		stage_two(128, 0);
		other = u_space(&u_, 0, "other");
		put_all(0, 8);
		assert_int_equal(send_in(&space_, "t", last), KV_OK);
		number = sent_.number;
		assert_int_equal(u_recv(&u_, d_, &other, "t", 0, &got_), KV_ERR_OTHER_SPACE);
		check_notice(m_, number, KV_HANDOVER_ENDED, 8, KV_ERR_OTHER_SPACE);
		assert_int_equal(u_.core->pins.used + u_.core->handovers.used, 0);
		assert_int_equal(u_visible(&u_, 0, &space_, keys_, 8), 8);
		assert_int_equal(metric(KV_M_HANDOVERS_OTHER_SPACE), 1);

		/* The consumer first. Its producer begins nothing. */
		assert_int_equal(u_recv(&u_, d_, &other, "t", 0, &got_), KV_OK);
		assert_int_equal(got_.state, KV_HANDOVER_AWAITED);
		assert_int_equal(send_in(&space_, "t", last), KV_ERR_OTHER_SPACE);
		check_notice(d_, got_.number, KV_HANDOVER_ENDED, 0, KV_ERR_OTHER_SPACE);
		assert_int_equal(u_.core->pins.used + u_.core->handovers.used, 0);
		assert_int_equal(u_.core->ns[0]->other_space, 2);
		stage_end();
	}
}

/* One id in two spaces by accident: sides that meet in one space win, and a pair is not disturbed. */
STAGE_TEST(p6_a_stranger_of_another_space_does_not_disturb_a_pair, stage_two(128, 0))
{
	kvd_space_info_t other, strange;
	kv_msg_handover_recv_reply_t got;
	u_member_t *stranger;

	other = u_space(&u_, 0, "other");
	put_all(0, 8);
	assert_int_equal(send_in(&space_, "t", 0), KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(u_recv(&u_, d_, &other, "t", 0, &got), KV_OK); /* it waits for its own producer */
	assert_int_equal(got.state, KV_HANDOVER_AWAITED);
	assert_int_equal(u_.core->handovers.used, 2);
	/* The producer goes on, and one that begins in the other space finds its own consumer. */
	assert_int_equal(send_more(8, U_ALL, 1), KV_OK);
	check_notice(d_, sent_.number, KV_HANDOVER_COMPLETE, 8, KV_OK);
	assert_int_equal(u_send(&u_, m_, &(u_send_t){.transfer = "t", .space = &other, .keys = keys_}, &sent_), KV_OK);
	assert_int_equal(sent_.taken, 1);
	assert_int_equal(u_.core->ns[0]->other_space, 0);

	/* Another namespace's id is another one (P8). */
	stranger = u_join(&u_, 1, "strange", 2, 0);
	strange = u_space(&u_, 1, "other");
	assert_int_equal(send_in(&space_, "u", 1), KV_OK);
	assert_int_equal(u_recv(&u_, stranger, &strange, "u", 0, &got), KV_OK);
	assert_int_equal(got.state, KV_HANDOVER_AWAITED);
	assert_int_equal(recv(d_, "u", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_COMPLETE);
}
