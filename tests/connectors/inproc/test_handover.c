/* Sends and receives of libkvx between two engines on a real daemon: chunks, tails, the end of either side at every
 * stage, deadlines, damage, and a daemon that dies. */
#include "connectors/inproc/pair_stage.h"

#include "kv/env.h"
#include "kv/shm.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

static uint64_t now_ms(void)
{
	return kv_now_ns(&kv_env_posix) / 1000000u;
}

/* ---- what a test has ------------------------------------------------------------------------- */

/* The producer computes up to `computed`, and says so. */
static kvc_status_t send_to(kvx_send_t **p_send, const char *transfer, uint32_t before, uint32_t computed, int last)
{
	const kvx_chunk_t chunk = pair_chunk(&from, transfer, computed, last);

	side_compute(&producer, &from, before, computed);

	return kvx_send(producer.kvx, &chunk, p_send);
}

static kvx_send_t *send_all(const char *transfer)
{
	kvx_send_t *send = NULL;

	assert_int_equal(send_to(&send, transfer, 0, from.n_tokens, 1), KVC_PENDING);

	return send;
}

/* A caller of an older version has shorter structs: nothing is written behind them. */
KV_TEST(p10_results_are_no_longer_than_the_caller_says)
{
	struct {
		kvx_send_result_t send;
		kvx_recv_result_t recv;
		kvx_save_result_t save;
		kvx_load_result_t load;
	} old, untouched;
	kvx_send_t *send;
	kvx_recv_t *recv;
	kvx_save_t *save;
	kvx_load_t *load;

	memset(&untouched, 0x5a, sizeof untouched);
	untouched.send.struct_size = offsetof(kvx_send_result_t, sent);
	untouched.recv.struct_size = offsetof(kvx_recv_result_t, tokens);
	untouched.save.struct_size = offsetof(kvx_save_result_t, blocks);
	untouched.load.struct_size = offsetof(kvx_load_result_t, tokens);
	old = untouched;
	set_prompt(5, 4 * PAIR_TOKENS);
	send = send_all("old");
	pair_await_send(&producer, NULL, send, &old.send);
	assert_int_equal(old.send.status, KVC_OK);
	assert_int_equal(old.send.blocks, 4);
	kvx_send_end(send);
	assert_int_equal(kvx_recv(producer.kvx, "old", &to.prefix, &recv, &old.recv), KVC_MISS);
	assert_int_equal(old.recv.cause, KVC_ERR_ARG);
	assert_int_equal(kvx_recv(consumer.kvx, "old", &to.prefix, &recv, &old.recv), KVC_PENDING);
	pair_await_recv(&consumer, NULL, recv, &old.recv);
	assert_int_equal(old.recv.blocks, 4);
	kvx_recv_end(recv);
	assert_int_equal(kvx_load_prefix(producer.kvx, &to.prefix, &load, &old.load), KVC_MISS);
	assert_int_equal(old.load.cause, KVC_ERR_ARG);
	assert_int_equal(kvx_load_prefix(consumer.kvx, &to.prefix, &load, &old.load), KVC_PENDING);
	assert_int_equal(kvx_load_state(load, &old.load), KVC_PENDING);
	kvx_load_end(load);
	pair_prompt_init(&from, 6, 4 * PAIR_TOKENS, 0);
	assert_int_equal(kvx_save_prefix(producer.kvx, &from.prefix, &save), KVC_PENDING);
	assert_int_equal(kvx_save_state(save, &old.save), KVC_PENDING);
	kvx_save_end(save);

	assert_memory_equal(&old.send.sent, &untouched.send.sent, sizeof old.send - old.send.struct_size);
	assert_memory_equal(&old.recv.tokens, &untouched.recv.tokens, sizeof old.recv - old.recv.struct_size);
	assert_memory_equal(&old.save.blocks, &untouched.save.blocks, sizeof old.save - old.save.struct_size);
	assert_memory_equal(&old.load.tokens, &untouched.load.tokens, sizeof old.load - old.load.struct_size);
}

/* ---- what arrives ---------------------------------------------------------------------------- */

/* The consumer asks first; each chunk is in its cache before the next one is computed. */
KV_TEST(p1_p3_chunks_are_in_the_consumers_cache_while_the_producer_computes)
{
	const char tail[] = "a first token";
	kvx_send_t *send = NULL;
	kvx_send_result_t sent = {.struct_size = sizeof sent};
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_recv_t *recv;
	kvx_chunk_t chunk;

	set_prompt(1, 12 * PAIR_TOKENS);
	recv = start_recv("chunks", 0);
	assert_int_equal(send_to(&send, "chunks", 0, 3 * PAIR_TOKENS + 5, 0), KVC_PENDING);
	pair_await_blocks(&consumer, &producer, recv, 3);
	assert_true(side_holds(&consumer, &to, 3 * PAIR_TOKENS));
	assert_true(side_is_untouched(&consumer, &to, 3 * PAIR_TOKENS));
	assert_int_equal(send_to(&send, NULL, 3 * PAIR_TOKENS + 5, 9 * PAIR_TOKENS, 0), KVC_PENDING);
	pair_await_blocks(&consumer, &producer, recv, 9);
	do {
		pair_poll(&producer, NULL, 1);
		(void)kvx_send_state(send, &sent);
	} while (sent.sent < 9);
	assert_false(sent.copied);

	side_compute(&producer, &from, 9 * PAIR_TOKENS, 12 * PAIR_TOKENS);
	chunk = pair_chunk(&from, NULL, 12 * PAIR_TOKENS, 1);
	chunk.tail = tail;
	chunk.tail_len = sizeof tail;
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_PENDING);
	pair_await_send(&producer, NULL, send, &sent);
	assert_int_equal(sent.status, KVC_OK);
	assert_int_equal(sent.sent, 12);
	assert_true(sent.copied && sent.taken);
	kvx_send_end(send); /* the hand-over goes on without it */

	pair_await_recv(&consumer, NULL, recv, &result);
	assert_int_equal(result.status, KVC_OK);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.tokens, 12 * PAIR_TOKENS);
	assert_int_equal(result.cpu_tokens, 12 * PAIR_TOKENS);
	assert_int_equal(result.tail_len, sizeof tail);
	assert_memory_equal(result.tail, tail, sizeof tail);
	assert_true(side_holds(&consumer, &to, 12 * PAIR_TOKENS));
	kvx_recv_end(recv);
	assert_int_equal(side_stats(&consumer).recvs_done, 1);
	assert_int_equal(side_stats(&producer).sends_done, 1);
}

/* The producer has gone on, and computed other things, before the consumer asks. */
KV_TEST(p1_a_tail_of_a_megabyte_waits_for_a_consumer_that_comes_later)
{
	static uint8_t tail[KVC_MAX_TAIL];
	uint64_t seed = 7;
	kvx_send_t *send = NULL;
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_recv_t *recv;
	kvx_chunk_t chunk;

	for (size_t i = 0; i < sizeof tail; i++) {
		tail[i] = (uint8_t)next_random(&seed);
	}
	set_prompt(2, 8 * PAIR_TOKENS);
	side_compute(&producer, &from, 0, from.n_tokens);
	chunk = pair_chunk(&from, "late", from.n_tokens, 1);
	chunk.tail = tail;
	chunk.tail_len = sizeof tail;
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_PENDING);
	finish_send(send, KVC_OK);
	pair_prompt_init(&from, 3, 8 * PAIR_TOKENS, 0);
	side_compute(&producer, &from, 0, from.n_tokens);
	side_close(&producer);

	recv = start_recv("late", 0);
	pair_await_recv(&consumer, NULL, recv, &result);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.tail_len, sizeof tail);
	assert_memory_equal(result.tail, tail, sizeof tail);
	(void)finish_recv(recv);
}

/* Both sides make the id from the prompt. Another prompt, or another salt, is another id. */
KV_TEST(p8_without_an_id_the_prompt_and_its_salt_are_the_id)
{
	kvx_recv_t *salted;
	kvx_recv_t *recv;
	kvx_send_t *send;

	set_prompt(5, 6 * PAIR_TOKENS);
	to.prefix.deadline_ms = 300;
	to.prefix.salt = "another tenant's";
	assert_int_equal(kvx_recv(consumer.kvx, NULL, &to.prefix, &salted, NULL), KVC_PENDING);
	to.prefix.salt = NULL;
	recv = start_recv(NULL, 0);
	send = send_all(NULL);
	assert_int_equal(finish_recv(recv).tokens, 6 * PAIR_TOKENS);
	finish_send(send, KVC_OK);
	assert_int_equal(finish_recv(salted).cause, KVC_ERR_TIMEOUT);
}

/* What kvd has already is not copied again, and what the consumer has is not touched. */
KV_TEST(p1_stored_blocks_are_not_copied_and_skipped_ones_not_touched)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_recv_t *recv;
	uint64_t saved;

	set_prompt(6, 10 * PAIR_TOKENS);
	finish_send(send_all("first"), KVC_OK);
	assert_int_equal(finish_recv(start_recv("first", 0)).tokens, 10 * PAIR_TOKENS);
	saved = side_stats(&producer).blocks_saved;
	finish_send(send_all("again"), KVC_OK);
	assert_int_equal(side_stats(&producer).blocks_saved, saved);

	pair_prompt_init(&to, 6, 10 * PAIR_TOKENS, 41);
	to.prefix.skip = 4;
	assert_int_equal(kvx_recv(consumer.kvx, "again", &to.prefix, &recv, &result), KVC_PENDING);
	assert_int_equal(result.blocks, 4);
	pair_await_recv(&consumer, &producer, recv, &result);
	assert_int_equal(result.cause, KVC_OK);
	assert_int_equal(result.tokens, 10 * PAIR_TOKENS);
	assert_int_equal(result.cpu_tokens, 6 * PAIR_TOKENS);
	assert_false(side_holds(&consumer, &to, 1));
	side_compute(&consumer, &to, 0, 4 * PAIR_TOKENS);
	assert_true(side_holds(&consumer, &to, 10 * PAIR_TOKENS));
	kvx_recv_end(recv);
}

/* The gauge is that of a heartbeat: who waits for a minute waits for nothing. */
static void await_blocks(long n)
{
	for (uint32_t i = 0; i < 6000 && rig_counter(&the_rig, "kvd_blocks") != n; i++) {
		usleep(10000);
	}
	assert_int_equal(rig_counter(&the_rig, "kvd_blocks"), n);
}

/* Prompts of every length around a block: what was sent is there to the token, and the last, partial block is gone once
 * nobody needs it. */
KV_TEST(p1_a_receive_ends_with_exactly_the_tokens_that_were_sent)
{
	static const uint32_t lengths[] = {1, 15, 16, 17, 31, 5 * PAIR_TOKENS + 7, 12 * PAIR_TOKENS - 1};
	long whole = 0;

	await_blocks(2); /* of the self-tests */
	for (uint32_t i = 0; i < KV_COUNT_OF(lengths); i++) {
		const char *transfer = i % 2 ? next_id() : NULL;
		const uint32_t n = lengths[i], half = n / 2;
		kvx_recv_result_t result = {.struct_size = sizeof result};
		kvx_send_t *send = NULL;
		kvx_recv_t *recv;

		set_prompt(80 + i, n);
		whole += n / PAIR_TOKENS;
		recv = start_recv(transfer, 0);
		assert_int_equal(send_to(&send, transfer, 0, half, 0), KVC_PENDING);
		pair_poll(&producer, &consumer, 5);
		assert_int_equal(send_to(&send, NULL, half, n, 1), KVC_PENDING);
		pair_await_recv(&consumer, &producer, recv, &result);
		assert_int_equal(result.cause, KVC_OK);
		assert_int_equal(result.tokens, n);
		assert_int_equal(result.cpu_tokens, n);
		assert_int_equal(result.blocks, (n + PAIR_TOKENS - 1u) / PAIR_TOKENS);
		assert_true(side_holds(&consumer, &to, n));
		kvx_recv_end(recv);
		finish_send(send, KVC_OK);
	}
	await_blocks(2 + whole);
}

/* Of a prompt that goes on where the producer's ends in the middle of a block, or ends before it, the whole blocks. */
KV_TEST(p1_a_consumer_gets_no_more_than_it_asks_for_and_no_more_than_was_sent)
{
	static const struct {
		uint32_t sent, wanted, tokens;
	} rows[] = {{160, 64, 64}, {64, 160, 64}, {70, 75, 64}, {75, 70, 64},
		    {70, 80, 64},  {70, 64, 64},  {70, 90, 64}, {90, 70, 64}};

	for (uint32_t i = 0; i < KV_COUNT_OF(rows); i++) {
		const char *transfer = next_id();
		kvx_recv_result_t result = {.struct_size = sizeof result};

		set_prompt(90 + i, rows[i].sent);
		finish_send(send_all(transfer), KVC_OK);
		pair_prompt_init(&to, 90 + i, rows[i].wanted, 30);
		result = finish_recv(start_recv(transfer, 0));
		assert_int_equal(result.tokens, rows[i].tokens);
		assert_int_equal(result.status, KVC_OK);
		assert_int_equal(result.cause, rows[i].tokens == rows[i].wanted ? KVC_OK : KVC_MISS);
	}
}

/* ---- either side gives up -------------------------------------------------------------------- */

#define STAGES 5u

/* The producer up to a stage: 0 begun, 1 to 3 chunks of three blocks, 4 all of it. NULL before the first call. */
static kvx_send_t *send_to_stage(const char *transfer, uint32_t stage)
{
	kvx_send_t *send = NULL;

	for (uint32_t s = 0; s <= stage; s++) {
		const uint32_t before = s ? 3 * (s - 1u) * PAIR_TOKENS : 0, computed = 3 * s * PAIR_TOKENS;

		assert_int_equal(send_to(&send, transfer, before, computed, s == STAGES - 1u), KVC_PENDING);
		pair_poll(&producer, s < STAGES - 1u ? &consumer : NULL, 5);
	}

	return send;
}

KV_TEST(p7_a_producer_that_aborts_leaves_what_it_has_sent)
{
	for (uint32_t stage = 0; stage < STAGES - 1u; stage++) {
		kvx_recv_result_t result = {.struct_size = sizeof result};
		const char *transfer;
		kvx_recv_t *recv;
		kvx_send_t *send;

		set_prompt(20 + stage, 12 * PAIR_TOKENS);
		transfer = next_id();
		recv = start_recv(transfer, 0);
		send = send_to_stage(transfer, stage);
		if (stage > 0) {
			pair_await_blocks(&consumer, &producer, recv, 3 * stage);
		}
		kvx_send_end(send);
		result = finish_recv(recv);
		assert_int_equal(result.status, stage > 0 ? KVC_OK : KVC_MISS);
		assert_int_equal(result.cause, KVC_ERR_ABORTED);
		assert_int_equal(result.blocks, 3 * stage);
		assert_int_equal(side_stats(&producer).save_aborted, stage + 1);
	}
}

/* Its blocks are its own again, and the next consumer gets all of it. */
KV_TEST(p7_a_consumer_that_aborts_gives_the_hand_over_back)
{
	for (uint32_t stage = 0; stage < STAGES; stage++) {
		const char *transfer;
		kvx_recv_t *recv;
		kvx_send_t *send;

		set_prompt(30 + stage, 12 * PAIR_TOKENS);
		transfer = next_id();
		recv = start_recv(transfer, 0);
		send = send_to_stage(transfer, stage);
		kvx_recv_end(recv);
		pair_prompt_init(&to, 77, 12 * PAIR_TOKENS, 30);
		side_compute(&consumer, &to, 0, to.n_tokens);
		pair_poll(&consumer, &producer, 5);
		assert_true(side_holds(&consumer, &to, to.n_tokens));

		pair_prompt_init(&to, 30 + stage, 12 * PAIR_TOKENS, 30);
		recv = start_recv(transfer, 0);
		if (stage < STAGES - 1u) {
			assert_int_equal(send_to(&send, NULL, 3 * stage * PAIR_TOKENS, from.n_tokens, 1), KVC_PENDING);
		}
		assert_int_equal(finish_recv(recv).cause, KVC_OK);
		finish_send(send, KVC_OK);
	}
}

KV_TEST(p3_of_two_consumers_one_gets_it)
{
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_recv_t *first, *second;
	kvx_send_t *send;
	side_t other;

	set_prompt(40, 6 * PAIR_TOKENS);
	side_open(&other, the_rig.socket, (side_options_t){.roles = KVX_CONSUMER});
	first = start_recv("wanted", 0);
	pair_poll(&consumer, NULL, 5);
	assert_int_equal(kvx_recv(other.kvx, "wanted", &to.prefix, &second, NULL), KVC_PENDING);
	pair_await_recv(&other, NULL, second, &result);
	assert_int_equal(result.status, KVC_MISS);
	assert_int_equal(result.cause, KVC_ERR_TAKEN);
	send = send_all("wanted");
	assert_int_equal(finish_recv(first).cause, KVC_OK);
	finish_send(send, KVC_OK);
	side_close(&other);
}

/* ---- deadlines ------------------------------------------------------------------------------- */

static void check_timeout(kvx_recv_t *recv, uint64_t start, uint32_t deadline_ms, uint32_t blocks)
{
	const kvx_recv_result_t result = finish_recv(recv);

	assert_int_equal(result.cause, KVC_ERR_TIMEOUT);
	assert_int_equal(result.why, KV_WHY_TIMEOUT);
	assert_int_equal(result.blocks, blocks);
	assert_true(now_ms() - start >= deadline_ms && now_ms() - start < deadline_ms + PAIR_MS);
}

/* Nobody sends; somebody stops sending. */
KV_TEST(p5_a_consumer_has_its_answer_by_its_deadline)
{
	kvx_send_t *send = NULL;
	uint64_t start = now_ms();
	kvx_recv_t *recv;
	kvx_chunk_t chunk;

	set_prompt(50, 10 * PAIR_TOKENS);
	check_timeout(start_recv("nobody", 200), start, 200, 0);

	start = now_ms();
	recv = start_recv("stops", 1000);
	side_compute(&producer, &from, 0, 5 * PAIR_TOKENS);
	chunk = pair_chunk(&from, "stops", 5 * PAIR_TOKENS, 0);
	chunk.ttl_ms = 500; /* its end is kept so long for a consumer that asks late */
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_PENDING);
	pair_await_blocks(&consumer, &producer, recv, 5);
	check_timeout(recv, start, 1000, 5);
	assert_int_equal(kvx_send_state(send, NULL), KVC_PENDING); /* it is the producer's until it says so */
	kvx_send_end(send);
	send = NULL;
}

/* A producer's deadline is that of a chunk: it does not count while the engine computes the next one. */
KV_TEST(p5_a_producer_has_its_answer_by_its_deadline)
{
	kvx_send_t *send = NULL;
	kvx_send_result_t result = {.struct_size = sizeof result};
	kvx_recv_t *recv;
	kvx_chunk_t chunk;

	set_prompt(55, 10 * PAIR_TOKENS);
	recv = start_recv("stopped", 0);
	side_compute(&producer, &from, 0, from.n_tokens);
	chunk = pair_chunk(&from, "stopped", 4 * PAIR_TOKENS, 0);
	chunk.deadline_ms = 2000;
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_PENDING);
	pair_await_blocks(&consumer, &producer, recv, 4);
	usleep(2100000);
	pair_poll(&producer, &consumer, 3);
	assert_int_equal(kvx_send_state(send, NULL), KVC_PENDING);

	rig_signal(&the_rig, SIGSTOP);
	chunk.computed = 10 * PAIR_TOKENS;
	chunk.last = 1;
	chunk.deadline_ms = 300;
	(void)kvx_send(producer.kvx, &chunk, &send);
	pair_await_send(&producer, NULL, send, &result);
	assert_int_not_equal(result.status, KVC_OK);
	assert_true(result.copied);
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_MISS); /* it has ended */
	kvx_send_end(send);
	rig_signal(&the_rig, SIGCONT);
	assert_int_equal(finish_recv(recv).cause, KVC_ERR_ABORTED);
}

/* ---- refused --------------------------------------------------------------------------------- */

KV_TEST(p10_other_roles_and_bad_arguments_are_refused)
{
	static const uint32_t none[] = {0, 1, PAIR_BLOCKS, 3, 4, 5};
	const char long_id[] = "0123456789012345678901234567890123456789012345678901234567890123456789"
			       "01234567890123456789012345678901234567890123456789012345678";
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_chunk_t bad[9];
	kvx_send_t *send = NULL;
	kvx_recv_t *recv;

	set_prompt(60, 6 * PAIR_TOKENS);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		bad[i] = pair_chunk(&from, "bad", 6 * PAIR_TOKENS, 1);
	}
	assert_int_equal(kvx_send(consumer.kvx, &bad[0], &send), KVC_MISS);
	assert_int_equal(kvx_recv(producer.kvx, "bad", &to.prefix, &recv, &result), KVC_MISS);
	assert_int_equal(result.cause, KVC_ERR_ARG);

	bad[0].struct_size = 8;
	bad[1].transfer = "";
	bad[2].transfer = long_id;
	bad[3].n_tokens = bad[3].computed = 0;
	bad[4].tokens = NULL;
	bad[5].blocks = none;
	bad[6].computed = 7 * PAIR_TOKENS;
	bad[7].tail_len = KVC_MAX_TAIL + 1u;
	bad[7].tail = none;
	bad[8].tail_len = 1;
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvx_send(producer.kvx, &bad[i], &send), KVC_MISS);
		assert_null(send);
		assert_int_equal(side_stats(&producer).sends_refused, i + 1);
	}
	assert_int_equal(kvx_recv(consumer.kvx, "", &to.prefix, &recv, &result), KVC_MISS);
	assert_int_equal(kvx_recv(consumer.kvx, long_id, &to.prefix, &recv, &result), KVC_MISS);
	to.prefix.skip = 7;
	assert_int_equal(kvx_recv(consumer.kvx, "bad", &to.prefix, &recv, &result), KVC_MISS);
	assert_null(recv);
	assert_int_equal(side_stats(&consumer).recvs_refused, 3);
}

/* A chunk that is not sound changes nothing: the next one goes on. */
KV_TEST(p10_a_bad_chunk_changes_nothing)
{
	static const uint32_t none[] = {0, 1, 2, PAIR_BLOCKS, 4, 5};
	kvx_send_t *send = NULL;
	kvx_chunk_t chunk;

	set_prompt(61, 6 * PAIR_TOKENS);
	assert_int_equal(send_to(&send, "goes on", 0, 3 * PAIR_TOKENS, 0), KVC_PENDING);
	chunk = pair_chunk(&from, NULL, 2 * PAIR_TOKENS, 0);
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_ERR_ARG);
	chunk.computed = 7 * PAIR_TOKENS;
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_ERR_ARG);
	chunk.computed = 6 * PAIR_TOKENS;
	chunk.blocks = none;
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_ERR_ARG);
	assert_int_equal(send_to(&send, NULL, 3 * PAIR_TOKENS, 6 * PAIR_TOKENS, 1), KVC_PENDING);
	chunk = pair_chunk(&from, NULL, 6 * PAIR_TOKENS, 1);
	assert_true(kvx_send(producer.kvx, &chunk, &send) != KVC_PENDING); /* nothing follows the last one */
	finish_send(send, KVC_OK);
	assert_int_equal(finish_recv(start_recv("goes on", 0)).cause, KVC_OK);
}

KV_TEST(p7_without_a_daemon_nothing_is_handed_over)
{
	const kvx_chunk_t chunk = pair_chunk(&from, "x", PAIR_TOKENS, 1);
	kvx_recv_result_t result = {.struct_size = sizeof result};
	kvx_send_t *send = NULL;
	kvx_recv_t *recv;

	set_prompt(62, 2 * PAIR_TOKENS);
	rig_kill(&the_rig);
	while (kvx_is_ready(producer.kvx) || kvx_is_ready(consumer.kvx)) {
		pair_poll(&producer, &consumer, 1);
	}
	assert_int_equal(kvx_send(producer.kvx, &chunk, &send), KVC_MISS);
	assert_null(send);
	assert_int_equal(kvx_recv(consumer.kvx, "x", &to.prefix, &recv, &result), KVC_MISS);
	assert_int_equal(result.why, KV_WHY_NO_DAEMON);
	assert_null(recv);
}

/* An engine that detaches with hand-overs in every state leaves none, and no memory. */
KV_TEST(p4_a_connector_detached_amid_hand_overs_leaves_nothing)
{
	static const uint32_t asked[] = {1, 2, 3};
	const char *ids[] = {"begun", "announced", "half way", "nobody"};
	kvx_select_t select;
	kvx_insert_t insert;
	kvx_send_t *sends[3] = {NULL};
	kvx_recv_t *recv;
	kvx_chunk_t chunk;

	set_prompt(65, 75);
	for (uint32_t i = 0; i < KV_COUNT_OF(ids); i++) {
		recv = start_recv(ids[i], 0);
		if (i < 3) {
			chunk = pair_chunk(&from, ids[i], 37 * i, 0);
			chunk.ttl_ms = 500; /* why it failed is kept so long */
			assert_int_equal(kvx_send(producer.kvx, &chunk, &sends[i]), KVC_PENDING);
		}
		pair_poll(&producer, &consumer, i);
	}
	insert = (kvx_insert_t){.struct_size = sizeof insert,
				.tokens = from.tokens,
				.n_tokens = from.n_tokens,
				.blocks = from.blocks,
				.ttl_ms = 500};
	sends[0] = NULL;
	assert_int_equal(kvx_insert(producer.kvx, &insert, &sends[0]), KVC_PENDING);
	select = (kvx_select_t){.struct_size = sizeof select,
				.tokens = asked,
				.n_tokens = KV_COUNT_OF(asked),
				.blocks = to.blocks,
				.n_blocks = 2};
	assert_int_equal(kvx_drop_select(consumer.kvx, &select, &recv, NULL), KVC_PENDING);
	side_close(&producer);
	side_close(&consumer);
	open_pair();
}

/* ---- a daemon that dies ---------------------------------------------------------------------- */

/* At every stage both sides have their answer, and the next hand-over goes over the next daemon. */
KV_TEST(p7_a_daemon_that_dies_amid_a_hand_over_is_a_miss)
{
	for (uint32_t stage = 0; stage < STAGES - 1u; stage++) {
		kvx_recv_result_t result = {.struct_size = sizeof result};
		const char *transfer;
		kvx_recv_t *recv;
		kvx_send_t *send;

		set_prompt(70 + stage, 12 * PAIR_TOKENS);
		transfer = next_id();
		recv = start_recv(transfer, 0);
		send = send_to_stage(transfer, stage);
		rig_kill(&the_rig);
		(void)send_to(&send, NULL, 3 * stage * PAIR_TOKENS, 12 * PAIR_TOKENS, 1);
		result = finish_recv(recv);
		assert_int_equal(result.cause, KVC_ERR_REVOKED);
		assert_true(result.blocks <= 3 * stage);
		pair_await_send(&producer, NULL, send, &(kvx_send_result_t){.struct_size = sizeof(kvx_send_result_t)});
		assert_int_not_equal(kvx_send_state(send, NULL), KVC_OK);
		kvx_send_end(send);

		rig_start(&the_rig);
		for (uint32_t i = 0; i < PAIR_MS / 10u && side_stats(&consumer).attaches < stage + 2u; i++) {
			pair_poll(&producer, &consumer, 10);
		}
		side_await_ready(&producer);
		side_await_ready(&consumer);
		recv = start_recv(transfer, 0);
		send = send_all(transfer);
		assert_int_equal(finish_recv(recv).cause, KVC_OK);
		finish_send(send, KVC_OK);
	}
}

KV_TEST_MAIN_OF(the_program, begin_test, end_test)
