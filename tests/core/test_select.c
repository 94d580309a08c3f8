/* The lookup buffer: hand-overs that are found by their tokens. */
#include "handover_stage.h"

static kv_msg_handover_select_reply_t selected_;
static const uint32_t tokens_[] = {1, 2, 3, 4, 5, 6, 7, 8};
static const uint32_t others_[] = {1, 2, 9, 4};

static kv_status_t offer(const char *transfer, const char *bucket, const uint32_t *tokens, uint32_t n, int last)
{
	return u_send(&u_, m_,
		      &(u_send_t){.transfer = transfer,
				  .space = &space_,
				  .keys = keys_,
				  .n = 8,
				  .groups = U_ALL,
				  .last = last,
				  .select = tokens,
				  .select_n = n,
				  .bucket = bucket},
		      &sent_);
}

/* The number of a new entry with the first n tokens. */
static uint64_t offered(uint32_t n)
{
	assert_int_equal(offer("", NULL, tokens_, n, 1), KV_OK);

	return sent_.number;
}

static kv_status_t select_by(u_member_t *m, const uint32_t *tokens, uint32_t n, uint32_t timeout_ms)
{
	return u_select(&u_, m, &space_, "", tokens, n, timeout_ms, &selected_);
}

static void expect(uint64_t number, const uint32_t *tokens, uint32_t n)
{
	assert_int_equal(select_by(d_, tokens, n, 0), KV_OK);
	assert_int_equal(selected_.number, number);
	assert_int_equal(selected_.state, KV_HANDOVER_COMPLETE);
	assert_int_equal(selected_.n, 8);
	universe_check(&u_);
}

/* The HANDOVER that told a waiting consumer of its entry; NULL: none. */
static const kv_msg_handover_t *moved_to(uint64_t waited)
{
	const kv_msg_handover_t *notice = last_notice(d_, waited);

	return notice && notice->moved != 0 ? notice : NULL;
}

static void stage_select(uint32_t cpu)
{
	stage_two(cpu, 0);
	sent_.number = 0;
	put_all(0, 8);
}

/* ---- who gets what --------------------------------------------------------------------------- */

static void p1_the_longest_agreement_is_taken_and_then_the_oldest(void **state)
{
	uint64_t three, eight, five, again;

	(void)state;
	stage_select(128);
	three = offered(3);
	eight = offered(8);
	five = offered(5);
	again = offered(5);
	expect(eight, tokens_, 8); /* the whole of it */
	expect(five, tokens_, 6);  /* the longest that these begin with, the older of two */
	expect(again, tokens_, 4); /* one that begins with these */
	expect(three, others_, 0); /* any */
	assert_int_equal(select_by(d_, tokens_, 8, 0), KV_OK);
	assert_int_equal(selected_.state, KV_HANDOVER_AWAITED);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(u_done(&u_, d_, (uint64_t[]){three, eight, five, again}[i], 0), KV_OK);
	}
	assert_int_equal(u_.core->handovers.used, 1);
	assert_int_equal(metric(KV_M_HANDOVERS_TAKEN), 4);
	stage_end();
}

static void p1_one_token_must_agree_and_the_bucket_and_the_space(void **state)
{
	kvd_space_info_t other;
	kv_msg_handover_select_reply_t reply = {0};

	(void)state;
	stage_select(128);
	other = u_space(&u_, 0, "other");
	assert_int_equal(offer("", "salt", tokens_, 8, 1), KV_OK);
	assert_int_equal(u_select(&u_, d_, &space_, "salt", &tokens_[1], 3, 0, &reply), KV_OK);
	assert_int_equal(reply.state, KV_HANDOVER_AWAITED);
	assert_int_equal(u_select(&u_, d_, &space_, "sal", tokens_, 8, 0, &reply), KV_OK);
	assert_int_equal(reply.state, KV_HANDOVER_AWAITED);
	assert_int_equal(u_select(&u_, d_, &space_, "", NULL, 0, 0, &reply), KV_OK);
	assert_int_equal(reply.state, KV_HANDOVER_AWAITED);
	assert_int_equal(u_select(&u_, d_, &other, "salt", tokens_, 8, 0, &reply), KV_OK);
	assert_int_equal(reply.state, KV_HANDOVER_AWAITED);
	assert_int_equal(u_select(&u_, d_, &space_, "salt", others_, 4, 0, &reply), KV_OK);
	assert_int_equal(reply.state, KV_HANDOVER_AWAITED); /* equal for two tokens, and then not */
	universe_check(&u_);
	assert_int_equal(u_select(&u_, d_, &space_, "salt", others_, 1, 0, &reply), KV_OK);
	assert_int_equal(reply.number, sent_.number);
	stage_end();
}

static void p5_a_consumer_that_waits_is_told_of_its_hand_over(void **state)
{
	uint64_t any, long_one, short_one, number;

	(void)state;
	stage_select(128);
	assert_int_equal(select_by(d_, NULL, 0, 5000), KV_OK);
	any = selected_.number;
	assert_int_equal(select_by(d_, tokens_, 2, 5000), KV_OK);
	short_one = selected_.number;
	assert_int_equal(select_by(d_, tokens_, 7, 5000), KV_OK);
	long_one = selected_.number;
	universe_check(&u_);

	kv_test_advance(&u_.env, 3000000);
	assert_int_equal(offer("", NULL, tokens_, 8, 0), KV_OK); /* it is taken while it is being sent */
	assert_int_equal(sent_.taken, 1);
	assert_non_null(moved_to(long_one));
	assert_int_equal(moved_to(long_one)->moved, sent_.number);
	assert_int_equal(moved_to(long_one)->state, KV_HANDOVER_SENDING);
	assert_int_equal(moved_to(long_one)->n, 8);
	assert_int_equal(u_done(&u_, d_, long_one, 0), KV_ERR_NOT_FOUND);
	assert_int_equal(u_send(&u_, m_,
				&(u_send_t){.transfer = "", .number = sent_.number, .space = &space_, .last = 1},
				&sent_),
			 KV_OK);
	check_notice(d_, sent_.number, KV_HANDOVER_COMPLETE, 8, KV_OK);
	assert_int_equal(u_.metrics.sum_ns[KV_M_HANDOVER_WAIT], 3000000);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);

	number = offered(8);
	assert_int_equal(moved_to(short_one)->moved, number);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	assert_int_equal(offer("", NULL, others_ + 2, 2, 1), KV_OK);
	assert_int_equal(sent_.number, moved_to(any)->moved);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);
	assert_int_equal(u_.core->handovers.used + u_.core->token_nodes.used, 0);
	stage_end();
}

/* It has an id too: either way there is one consumer. */
static void p4_an_entry_with_a_name_is_found_both_ways_and_taken_once(void **state)
{
	(void)state;
	stage_select(128);
	assert_int_equal(offer("t", NULL, tokens_, 8, 1), KV_OK);
	expect(sent_.number, tokens_, 8);
	assert_int_equal(recv(u_join(&u_, 0, "third", 2, 0), "t", 0), KV_ERR_TAKEN);
	assert_int_equal(u_done(&u_, d_, sent_.number, 0), KV_OK);

	assert_int_equal(offer("t", NULL, tokens_, 8, 1), KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(got_.number, sent_.number);
	assert_int_equal(select_by(d_, tokens_, 8, 0), KV_OK);
	assert_int_equal(selected_.state, KV_HANDOVER_AWAITED);
	assert_int_equal(u_done(&u_, d_, got_.number, KV_HANDOVER_ABORT), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(moved_to(selected_.number)->moved, sent_.number);
	stage_end();
}

/* ---- given back ------------------------------------------------------------------------------ */

static void p4_what_is_given_back_keeps_its_place(void **state)
{
	uint64_t first, second, third;
	u_member_t *dies;

	(void)state;
	stage_select(128);
	dies = u_join(&u_, 0, "dies", 2, 0);
	first = offered(8);
	second = offered(8);
	third = offered(8);
	assert_int_equal(select_by(dies, tokens_, 8, 0), KV_OK);
	assert_int_equal(selected_.number, first);
	expect(second, tokens_, 8);
	assert_int_equal(u_done(&u_, d_, second, KV_HANDOVER_ABORT), KV_OK);
	expect(second, tokens_, 8); /* older than the third */
	u_dead(&u_, dies);
	u_tick(&u_, 1);
	expect(first, tokens_, 8);
	expect(third, tokens_, 8);
	stage_end();
}

/* One consumer lets its time pass: the next one, who waits, is told in its place. */
static void p4_a_consumer_that_is_too_late_leaves_it_to_the_next(void **state)
{
	u_member_t *late;
	uint64_t number, waits;

	(void)state;
	stage_select(128);
	late = u_join(&u_, 0, "late", 2, 0);
	number = offered(8);
	assert_int_equal(select_by(late, tokens_, 8, 1000), KV_OK);
	assert_int_equal(select_by(d_, tokens_, 4, 5000), KV_OK);
	waits = selected_.number;
	assert_int_equal(selected_.state, KV_HANDOVER_AWAITED);
	advance(1200000000);
	check_notice(late, number, KV_HANDOVER_ENDED, 8, KV_ERR_TIMEOUT);
	assert_non_null(moved_to(waits));
	assert_int_equal(moved_to(waits)->moved, number);
	assert_int_equal(u_done(&u_, late, number, 0), KV_ERR_NOT_FOUND);
	assert_int_equal(u_done(&u_, d_, number, 0), KV_OK);
	stage_end();
}

static void p5_a_wait_for_tokens_ends_at_its_deadline(void **state)
{
	(void)state;
	stage_select(64);
	assert_int_equal(select_by(d_, tokens_, 8, 500), KV_OK);
	assert_int_equal(selected_.ttl_ms, 500);
	advance(600000000);
	check_notice(d_, selected_.number, KV_HANDOVER_ENDED, 0, KV_ERR_TIMEOUT);
	assert_int_equal(u_.core->handovers.used + u_.core->ns[0]->wait_bytes, 0);
	assert_int_equal(offer("", NULL, tokens_, 8, 1), KV_OK);
	assert_int_equal(sent_.taken, 0);
	stage_end();
}

static void p4_sides_that_have_gone_are_passed_over(void **state)
{
	u_member_t *gone = NULL;
	uint64_t number;

	(void)state;
	stage_select(128);
	gone = u_join(&u_, 0, "gone", 2, 0);
	assert_int_equal(select_by(gone, tokens_, 8, 0), KV_OK);
	assert_int_equal(select_by(gone, tokens_, 8, 0), KV_OK);
	u_closed(&u_, gone);
	number = offered(8); /* before any sweep */
	assert_int_equal(sent_.taken, 0);
	expect(number, tokens_, 8);

	/* A producer that goes before its last chunk leaves nothing to select. */
	gone = u_join(&u_, 0, "gone", 2, 0);
	assert_int_equal(u_send(&u_, gone,
				&(u_send_t){.transfer = "",
					    .space = &space_,
					    .keys = keys_,
					    .n = 8,
					    .groups = U_ALL,
					    .select = tokens_,
					    .select_n = 8},
				&sent_),
			 KV_OK);
	u_closed(&u_, gone);
	assert_int_equal(select_by(d_, tokens_, 8, 0), KV_OK);
	assert_int_equal(selected_.state, KV_HANDOVER_AWAITED);
	universe_check(&u_);
	stage_end();
}

static void p4_a_lost_block_or_a_reset_ends_what_is_offered(void **state)
{
	kv_msg_t ask = {0}, answer;
	u_lease_t lease;
	kv_msg_acquire_reply_t reply;
	uint64_t number;

	(void)state;
	stage_select(128);
	number = offered(8);
	assert_int_equal(u_acquire(&u_, d_, &space_, keys_, 8, 0, &lease, &reply), KV_OK);
	ask.bad_block = (kv_msg_bad_block_t){.lease = lease.id, .index = 3};
	assert_int_equal(u_request(&u_, d_, KV_CODE_BAD_BLOCK, &ask, &answer), KV_OK);
	u_settle(&u_);
	check_notice(m_, number, KV_HANDOVER_ENDED, 0, KV_ERR_CORRUPT);
	assert_int_equal(u_.core->handovers.used, 0);

	put_all(0, 8);
	number = offered(8);
	assert_int_equal(select_by(d_, others_, 4, 0), KV_OK);
	ask.space_reset = (kv_msg_space_reset_t){.space = space_.space, .epoch = space_.epoch};
	assert_int_equal(u_request(&u_, m_, KV_CODE_SPACE_RESET, &ask, &answer), KV_OK);
	space_.epoch = answer.space_reset_reply.epoch;
	assert_int_equal(select_by(d_, tokens_, 8, 0), KV_OK); /* before any sweep */
	assert_int_equal(selected_.state, KV_HANDOVER_AWAITED);
	u_settle(&u_);
	assert_int_equal(u_.core->handovers.used, 1);
	stage_end();
}

/* ---- bounds ---------------------------------------------------------------------------------- */

/* The nodes that a lookup of these tokens visits at most. */
static uint32_t longest_way(void)
{
	uint32_t longest = 0;

	for (uint32_t i = 0; i < u_.core->handovers.made; i++) {
		const kvd_handover_t *entry = kvd_obj_at(&u_.core->handovers, i);
		uint32_t steps = 0;

		for (uint32_t id = entry->number ? entry->select.leaf : KVD_NONE; id != KVD_NONE;
		     id = ((const kvd_token_node_t *)kvd_obj_at(&u_.core->token_nodes, id))->parent) {
			steps++;
		}
		longest = steps > longest ? steps : longest;
	}

	return longest;
}

/* A thousand entries that differ in their last token, and as many consumers that wait for others. */
static void p5_thousands_of_entries_and_waiting_consumers_are_matched_without_a_walk(void **state)
{
	static uint32_t words[3000];
	uint32_t n = KV_COUNT_OF(words);

	(void)state;
	stage_select(128);
	u_.core->config.max_handovers = 4096;
	u_.core->config.max_leases = 4096;
	for (uint32_t i = 0; i < n; i++) {
		words[i] = i / 16;
	}
	for (uint32_t i = 0; i < 1000; i++) {
		words[n - 1] = 100000 + i;
		assert_int_equal(offer("", NULL, words, n, 1), KV_OK);
		words[n - 1] = 200000 + i;
		assert_int_equal(select_by(d_, words, n, 0), KV_OK);
		assert_int_equal(selected_.state, KV_HANDOVER_AWAITED);
	}
	universe_check(&u_);
	assert_true(longest_way() <= 32);
	for (uint32_t i = 1000; i-- > 0;) {
		uint64_t before = u_.notice_count;

		words[n - 1] = 100000 + i;
		assert_int_equal(select_by(d_, words, n, 0), KV_OK);
		assert_int_equal(selected_.state, KV_HANDOVER_COMPLETE);
		words[n - 1] = 200000 + i;
		assert_int_equal(offer("", NULL, words, n, 1), KV_OK);
		assert_int_equal(sent_.taken, 1);
		assert_int_equal(u_.notice_count, before + 1);
		u_.notice_count = i % 100 ? u_.notice_count : 0;
	}
	universe_check(&u_);
	assert_int_equal(u_.core->token_nodes.used, 0);
	u_.notice_count = 0;
	stage_end();
}

static void p5_tokens_count_within_the_bytes_and_those_that_wait_apart(void **state)
{
	static uint32_t words[5000];

	(void)state;
	stage_select(256);
	u_.core->config.max_handover_bytes = 21 * 4096 + 3 * 4096 + 5010 * 4;
	assert_int_equal(offer("", NULL, words, 5000, 1), KV_OK);
	assert_int_equal(u_.core->ns[0]->tail_bytes, (5000 + 3) * 4);
	assert_int_equal(offer("", NULL, words, 5000, 1),
			 KV_ERR_BUSY); /* the blocks are kept already, the tokens not */
	assert_int_equal(select_by(d_, tokens_, 8, 0), KV_OK);
	assert_int_equal(u_.core->ns[0]->wait_bytes, 11 * 4);
	for (uint32_t i = 0; i < 5000; i++) {
		words[i] = 50 + i;
	}
	assert_int_equal(select_by(d_, words, 5000, 0), KV_OK);
	assert_int_equal(select_by(d_, words, 5000, 0), KV_ERR_BUSY); /* a quarter */
	assert_int_equal(kvd_share_irreclaimable(u_.core, 0, KVD_HOST_MEM),
			 (8 + 4 + 1 + 8) * 4096 + 5003 * 4 + 11 * 4 + 5003 * 4);
	universe_check(&u_);
	stage_end();
}

static void p5_a_producer_is_told_when_there_is_room(void **state)
{
	u_send_t send = {.transfer = "",
			 .space = &space_,
			 .keys = fork_,
			 .n = 8,
			 .groups = U_FULL,
			 .last = 1,
			 .select = tokens_,
			 .select_n = 8,
			 .await_room = 1};
	uint64_t first;
	u_member_t *waits;

	(void)state;
	stage_select(128);
	waits = u_join(&u_, 0, "waits", 2, 0);
	memcpy(fork_, keys_, sizeof fork_);
	u_chain(NULL, 77, fork_, 8);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 0, 8), 8);
	u_.core->config.max_handover_bytes = 24 * 4096;
	first = offered(8);
	assert_int_equal(u_send(&u_, waits, &send, &sent_), KV_ERR_BUSY);
	assert_int_equal(u_send(&u_, waits, &send, &sent_), KV_ERR_BUSY);
	u_tick(&u_, 50);
	assert_int_equal(u_count_notices(&u_, KV_CODE_HANDOVER_ROOM, 0), 0); /* nothing has been given back */
	assert_int_equal(u_done(&u_, m_, first, U_GIVE_UP), KV_OK);
	u_tick(&u_, 1);
	assert_int_equal(u_count_notices(&u_, KV_CODE_HANDOVER_ROOM, 0), 1);
	assert_int_equal(u_send(&u_, waits, &send, &sent_), KV_OK);
	u_tick(&u_, 50);
	assert_int_equal(u_count_notices(&u_, KV_CODE_HANDOVER_ROOM, 0), 1);

	/* A member that goes while it waits is forgotten. */
	send.n = 0;
	send.groups = 0;
	u_.core->config.max_handover_bytes = 1;
	assert_int_equal(u_send(&u_, waits, &send, &sent_), KV_ERR_BUSY);
	u_closed(&u_, waits);
	assert_int_equal(u_.core->ns[0]->room_waiters.head, KVD_NONE);
	u_.core->config.max_handover_bytes = 0;
	u_tick(&u_, 2);
	stage_end();
}

static void p10_a_selection_that_cannot_be_is_refused(void **state)
{
	kv_msg_t ask = {.handover_select = {.space = 1, .any = 1}}, answer;

	(void)state;
	stage_select(64);
	ask.handover_select.space = space_.space;
	ask.handover_select.epoch = space_.epoch;
	ask.handover_select.tokens = (kv_slice_t){(const uint8_t *)tokens_, 8};
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_SELECT, &ask, &answer), KV_ERR_ARG); /* tokens and any */
	ask.handover_select.any = 0;
	ask.handover_select.tokens.len = 7;
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_SELECT, &ask, &answer), KV_ERR_ARG);
	ask.handover_select.tokens.len = 0;
	assert_int_equal(u_request(&u_, d_, KV_CODE_HANDOVER_SELECT, &ask, &answer), KV_ERR_ARG); /* neither */
	assert_int_equal(offer("", NULL, NULL, 0, 1), KV_ERR_ARG); /* neither name nor tokens */
	assert_int_equal(offer("", NULL, tokens_, 8, 0), KV_OK);
	assert_int_equal(u_send(&u_, m_,
				&(u_send_t){.transfer = "",
					    .number = sent_.number,
					    .space = &space_,
					    .select = tokens_,
					    .select_n = 2},
				&sent_),
			 KV_ERR_ARG); /* they are said once */
	assert_int_equal(u_send(&u_, d_, &(u_send_t){.transfer = "", .number = sent_.number, .space = &space_}, &sent_),
			 KV_ERR_NOT_FOUND);
	assert_int_equal(recv(d_, "", 0), KV_ERR_ARG);
	universe_check(&u_);
	stage_end();
}

static void p8_transfers_show_how_many_tokens_and_not_which(void **state)
{
	static char json[8192];

	(void)state;
	stage_select(64);
	assert_int_equal(offer("", NULL, (const uint32_t[]){424242, 434343}, 2, 1), KV_OK);
	assert_int_equal(select_by(d_, tokens_, 7, 0), KV_OK);
	(void)kvd_core_transfers_json(u_.core, 0, json, sizeof json);
	assert_non_null(strstr(json, "\"select_tokens\":2"));
	assert_non_null(strstr(json, "\"select_tokens\":7"));
	assert_non_null(strstr(json, "a producer with these tokens"));
	assert_null(strstr(json, "424242"));
	stage_end();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(p1_the_longest_agreement_is_taken_and_then_the_oldest),
		cmocka_unit_test(p1_one_token_must_agree_and_the_bucket_and_the_space),
		cmocka_unit_test(p5_a_consumer_that_waits_is_told_of_its_hand_over),
		cmocka_unit_test(p4_an_entry_with_a_name_is_found_both_ways_and_taken_once),
		cmocka_unit_test(p4_what_is_given_back_keeps_its_place),
		cmocka_unit_test(p4_a_consumer_that_is_too_late_leaves_it_to_the_next),
		cmocka_unit_test(p5_a_wait_for_tokens_ends_at_its_deadline),
		cmocka_unit_test(p4_sides_that_have_gone_are_passed_over),
		cmocka_unit_test(p4_a_lost_block_or_a_reset_ends_what_is_offered),
		cmocka_unit_test(p5_thousands_of_entries_and_waiting_consumers_are_matched_without_a_walk),
		cmocka_unit_test(p5_tokens_count_within_the_bytes_and_those_that_wait_apart),
		cmocka_unit_test(p5_a_producer_is_told_when_there_is_room),
		cmocka_unit_test(p10_a_selection_that_cannot_be_is_refused),
		cmocka_unit_test(p8_transfers_show_how_many_tokens_and_not_which),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
