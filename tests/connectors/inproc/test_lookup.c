/* The lookup buffer: prompts that are inserted by one engine and taken by another that asks by tokens. */
#include "connectors/inproc/pair_stage.h"

#include <string.h>
#include <unistd.h>

static kvx_insert_t insert_of(const pair_prompt_t *prompt, const char *hidden)
{
	return (kvx_insert_t){.struct_size = sizeof(kvx_insert_t),
			      .tokens = prompt->tokens,
			      .n_tokens = prompt->n_tokens,
			      .blocks = prompt->blocks,
			      .hidden = hidden,
			      .hidden_len = (uint32_t)strlen(hidden)};
}

static kvx_send_t *start_insert(const kvx_insert_t *insert)
{
	kvx_send_t *send;

	assert_int_equal(kvx_insert(producer.kvx, insert, &send), KVC_PENDING);

	return send;
}

static kvc_status_t finish_insert(kvx_send_t *send)
{
	kvx_send_result_t result = {.struct_size = sizeof result};

	pair_await_send(&producer, NULL, send, &result);
	assert_true(result.copied || result.status != KVC_OK);
	kvx_send_end(send);

	return result.status;
}

/* All of conversation c, computed. */
static kvx_insert_t prompt_to_insert(uint32_t c, uint32_t n_tokens, const char *hidden)
{
	pair_prompt_init(&from, c, n_tokens, 0);
	side_compute(&producer, &from, 0, n_tokens);

	return insert_of(&from, hidden);
}

/* In the buffer. */
static void insert_now(uint32_t c, uint32_t n_tokens, const char *hidden)
{
	const kvx_insert_t insert = prompt_to_insert(c, n_tokens, hidden);

	assert_int_equal(finish_insert(start_insert(&insert)), KVC_OK);
}

static kvx_select_t select_of(const uint32_t *tokens, uint32_t n)
{
	return (kvx_select_t){.struct_size = sizeof(kvx_select_t),
			      .tokens = tokens,
			      .n_tokens = n,
			      .blocks = to.blocks,
			      .n_blocks = PAIR_PROMPT,
			      .deadline_ms = PAIR_MS};
}

static kvx_recv_t *start_select(side_t *side, const kvx_select_t *select)
{
	kvx_recv_t *recv;

	assert_int_equal(kvx_drop_select(side->kvx, select, &recv, NULL), KVC_PENDING);

	return recv;
}

static void must_time_out(side_t *side, kvx_recv_t *recv)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};

	pair_await_recv(side, &producer, recv, &result);
	assert_int_equal(result.status, KVC_MISS);
	assert_int_equal(result.cause, KVC_ERR_TIMEOUT);
	kvx_recv_end(recv);
}

/* What it takes is conversation c with n tokens, whole and right. */
static void check_taken(kvx_recv_t *recv, uint32_t c, uint32_t n, const char *hidden)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};

	pair_await_recv(&consumer, producer.kvx ? &producer : NULL, recv, &result);
	if (result.status != KVC_OK || result.cause != KVC_OK) {
		fail_msg("conversation %u: %s, %u tokens, reason %u", c, kvc_status_text(result.cause), result.tokens,
			 result.why);
	}
	assert_int_equal(result.tokens, n);
	pair_prompt_init(&to, c, n, 30);
	assert_int_equal(result.tail_len, strlen(hidden));
	assert_memory_equal(result.tail, hidden, result.tail_len);
	assert_true(side_holds(&consumer, &to, n));
	kvx_recv_end(recv);
}

/* All of conversation c, by its tokens. */
static kvx_recv_t *select_now(uint32_t c, uint32_t n)
{
	kvx_select_t select;

	pair_prompt_init(&to, c, n, 30);
	select = select_of(to.tokens, n);

	return start_select(&consumer, &select);
}

/* Nothing in the buffer has these tokens. */
static void check_not_found(const uint32_t *tokens, uint32_t n)
{
	kvx_select_t select = select_of(tokens, n);

	select.deadline_ms = 100;
	must_time_out(&consumer, start_select(&consumer, &select));
}

/* ---- what is found --------------------------------------------------------------------------- */

KV_TEST(p1_what_was_inserted_is_handed_out_whole_and_once)
{
	insert_now(1, 75, "last hidden states");
	check_taken(select_now(1, 75), 1, 75, "last hidden states");
	check_not_found(to.tokens, 75);
}

/* The consumer asks first, and is woken. */
KV_TEST(p1_a_consumer_waits_for_what_is_inserted_later)
{
	kvx_recv_t *recv = select_now(2, 40);

	pair_poll(&consumer, NULL, 20);
	assert_int_equal(kvx_recv_state(recv, NULL), KVC_PENDING);
	insert_now(3, 40, "another one");
	insert_now(2, 40, "this one");
	check_taken(recv, 2, 40, "this one");
	check_taken(select_now(3, 40), 3, 40, "another one");
}

KV_TEST(p1_one_token_more_or_less_or_other_finds_nothing)
{
	insert_now(5, 40, "all of it");
	pair_prompt_init(&to, 5, 41, 30);
	check_not_found(to.tokens, 39);
	check_not_found(to.tokens, 41);
	check_not_found(to.tokens, 2 * PAIR_TOKENS); /* its whole blocks */
	to.tokens[39]++;
	check_not_found(to.tokens, 40);
	check_taken(select_now(5, 40), 5, 40, "all of it");
}

/* A second insert is refused and leaves the first as it was; when that is taken, there may be another one. */
KV_TEST(p4_equal_prompts_are_in_the_buffer_once)
{
	kvx_insert_t insert;

	insert_now(6, 40, "first");
	insert = insert_of(&from, "second");
	assert_int_equal(finish_insert(start_insert(&insert)), KVC_ERR_EXISTS);
	check_taken(select_now(6, 40), 6, 40, "first");
	for (uint32_t i = 0; i < PAIR_MS && rig_counter(&the_rig, "kvd_handovers") > 0; i++) {
		pair_poll(&producer, &consumer, 1);
	}
	insert_now(6, 40, "third");
	check_taken(select_now(6, 40), 6, 40, "third");
}

/* Two models may have the same tokens: neither ends the other's hand-over. */
KV_TEST(p8_another_model_finds_nothing_and_disturbs_nothing)
{
	kvx_select_t select;
	kvx_recv_t *recv;
	side_t other;

	side_open(&other, the_rig.socket, (side_options_t){.roles = KVX_CONSUMER, .model = "another model"});
	pair_prompt_init(&to, 7, 10, 30); /* no whole block */
	select = select_of(to.tokens, 10);
	select.deadline_ms = 300;
	recv = start_select(&other, &select);
	pair_poll(&other, NULL, 20);
	insert_now(7, 10, "ours");
	must_time_out(&other, recv);
	check_taken(select_now(7, 10), 7, 10, "ours");
	side_close(&other);
}

KV_TEST(p8_another_salt_finds_nothing)
{
	kvx_insert_t insert = prompt_to_insert(8, 10, ""); /* no whole block */
	kvx_select_t select;

	insert.salt = "a tenant's";
	assert_int_equal(finish_insert(start_insert(&insert)), KVC_OK);
	pair_prompt_init(&to, 8, 10, 30);
	select = select_of(to.tokens, 10);
	select.salt = "another tenant's";
	select.deadline_ms = 200;
	must_time_out(&consumer, start_select(&consumer, &select));
	select.salt = "a tenant's";
	select.deadline_ms = PAIR_MS;
	check_taken(start_select(&consumer, &select), 8, 10, "");
}

/* Of a prompt that is longer than the room for it, what there is room for. */
KV_TEST(p1_a_consumer_with_less_room_gets_the_beginning)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_select_t select;
	kvx_recv_t *recv;

	insert_now(9, 75, "x");
	pair_prompt_init(&to, 9, 75, 30);
	select = select_of(to.tokens, 75);
	select.n_blocks = 2;
	recv = start_select(&consumer, &select);
	pair_await_recv(&consumer, &producer, recv, &result);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.tokens, 2 * PAIR_TOKENS);
	assert_true(side_holds(&consumer, &to, 2 * PAIR_TOKENS));
	assert_true(side_is_untouched(&consumer, &to, 2 * PAIR_TOKENS));
	kvx_recv_end(recv);
}

/* ---- back-pressure --------------------------------------------------------------------------- */

/* A buffer of this producer's for two prompts of four blocks. */
static void open_small_buffer(void)
{
	side_close(&producer);
	side_open(
		&producer, the_rig.socket,
		(side_options_t){.roles = KVX_PRODUCER, .buffer_bytes = 2u * 4u * PAIR_LAYERS * PAIR_PAYLOAD + 2000u});
}

KV_TEST(p5_a_full_buffer_is_busy_at_once_or_waits_as_asked)
{
	kvx_insert_t insert;
	kvx_send_t *send;

	open_small_buffer();
	insert_now(10, 64, "one");
	insert_now(11, 64, "two");
	insert = prompt_to_insert(12, 64, "three");
	assert_int_equal(kvx_insert(producer.kvx, &insert, &send), KVC_ERR_BUSY);
	assert_null(send);

	insert.wait = 1;
	insert.deadline_ms = 200;
	assert_int_equal(finish_insert(start_insert(&insert)), KVC_ERR_TIMEOUT);

	insert.deadline_ms = PAIR_MS;
	send = start_insert(&insert);
	pair_poll(&producer, NULL, 50);
	assert_int_equal(kvx_send_state(send, NULL), KVC_PENDING);
	check_taken(select_now(10, 64), 10, 64, "one"); /* makes room */
	assert_int_equal(finish_insert(send), KVC_OK);
	check_taken(select_now(11, 64), 11, 64, "two");
	check_taken(select_now(12, 64), 12, 64, "three");
}

/* The daemon's own limit: its answer comes later, as the status of the send. */
KV_TEST(p5_the_daemons_limit_is_busy_too)
{
	const uint32_t n = PAIR_PROMPT * PAIR_TOKENS;
	kvc_status_t status = KVC_OK;
	uint32_t inserted = 0;
	kvx_insert_t insert;
	kvx_send_t *send;

	while (status == KVC_OK && inserted < 200) {
		insert = prompt_to_insert(100 + inserted, n, "");
		status = finish_insert(start_insert(&insert));
		inserted += status == KVC_OK;
	}
	print_message("%u prompts until the daemon kept no more\n", inserted);
	assert_int_equal(status, KVC_ERR_BUSY);
	insert.wait = 1;
	insert.deadline_ms = PAIR_MS;
	send = start_insert(&insert);
	pair_poll(&producer, NULL, 50);
	assert_int_equal(kvx_send_state(send, NULL), KVC_PENDING);
	for (uint32_t i = 0; i <= inserted; i++) {
		check_taken(select_now(100 + i, n), 100 + i, n, "");
	}
	assert_int_equal(finish_insert(send), KVC_OK);
}

/* ---- giving back, and what is refused -------------------------------------------------------- */

KV_TEST(p10_bad_inserts_and_selects_are_refused)
{
	static const uint8_t none[16];
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_insert_t bad[6];
	kvx_select_t wrong[4];
	kvx_send_t *send;
	kvx_recv_t *recv;

	pair_prompt_init(&from, 15, 16, 0);
	pair_prompt_init(&to, 15, 16, 30);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		bad[i] = insert_of(&from, "");
	}
	assert_int_equal(kvx_insert(consumer.kvx, &bad[0], &send), KVC_MISS); /* the role */
	bad[0].struct_size = 4;
	bad[1].tokens = NULL;
	bad[2].n_tokens = 0;
	bad[3].hidden_len = 3;
	bad[3].hidden = NULL;
	bad[4].hidden_len = KVC_MAX_TAIL + 1u;
	bad[4].hidden = none;
	bad[5].blocks = NULL;
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_insert(producer.kvx, &bad[i], &send), KVC_MISS);
		assert_null(send);
	}
	for (size_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		wrong[i] = select_of(to.tokens, 16);
	}
	assert_int_equal(kvx_drop_select(producer.kvx, &wrong[0], &recv, &result), KVC_MISS);
	wrong[0].struct_size = 4;
	wrong[1].n_blocks = 0;
	wrong[2].blocks = NULL;
	wrong[3].tokens = NULL;
	for (size_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		assert_int_equal(kvx_drop_select(consumer.kvx, &wrong[i], &recv, &result), KVC_MISS);
		assert_null(recv);
		assert_int_equal(result.cause, KVC_ERR_ARG);
	}
	assert_int_equal(side_stats(&consumer).recvs_refused, KV_COUNT_OF(wrong));
}

KV_TEST_MAIN_OF(the_program, begin_test, end_test)
