/* What hand-overs may keep, how many there may be, and what happens when many end at once. */
#include "handover_stage.h"

#include "core/ends/damage.h"

/* ---- limits ---------------------------------------------------------------------------------- */

static void stage_share(uint64_t share, uint64_t most)
{
	stage_two_in(&(u_config_t){.cpu_slots = 256, .share = {[0] = {share}, [1] = {share}}});
	u_.core->config.max_handover_bytes = most;
}

/* What begins alike is charged once: otherwise a long system prompt would end the hand-overs of a busy node. */
KV_TEST(p5_bytes_of_hand_overs_end_at_their_limit_and_count_once)
{
	u_send_t other = to_send("other", 12, U_FULL, 0);

	other.keys = fork_;

	stage_share(128 * 4096, 0); /* a quarter: 32 */
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 40), 40);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 8, 40), 32);
	assert_int_equal(send_first("t", 28, U_FULL, 0), KV_OK);
	assert_int_equal(u_send(&u_, m_, &other, &sent_), KV_OK); /* 8 of its 12 are kept already */
	universe_check(&u_);
	other.number = sent_.number;
	other.n = 13;
	assert_int_equal(u_send(&u_, m_, &other, &sent_), KV_ERR_BUSY);
	other.tail = "x";
	other.tail_len = 1;
	other.n = 12;
	assert_int_equal(u_send(&u_, m_, &other, &sent_), KV_ERR_BUSY);
	universe_check(&u_);
	assert_int_equal(metric(KV_M_HANDOVERS_REFUSED), 2);
	assert_int_equal(kv_ns_metric_get(&u_.metrics, 0, KV_NM_HANDOVERS_REFUSED), 2);
	assert_int_equal(u_.core->ns[0]->handover_bytes[KVD_HOST_MEM], 32 * 4096);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	assert_int_equal(u_.core->ns[0]->handover_bytes[KVD_HOST_MEM], 12 * 4096);
	assert_int_equal(u_send(&u_, m_, &other, &sent_), KV_OK);
	stage_end();
}

/* A prompt in two memories: one name, two hand-overs (decision 058). Neither side of one is a stranger to the other, and
 * the one in host memory does not notice what becomes of the one in memory of the GPU. */
STAGE_TEST(p7_hand_overs_in_two_memories_live_apart, stage_two_in(&(u_config_t){.cpu_slots = 64, .gpu_slots = 64}))
{
	u_send_t send = to_send("t", 8, U_FULL, 0);
	kvd_space_info_t gpu;
	kv_msg_handover_send_reply_t sent;
	kv_msg_handover_recv_reply_t got;

	u_.group_count = 1;
	gpu = u_space(&u_, 0, "model in memory of a GPU");
	u_.memory = 0;
	space_ = u_space(&u_, 0, "model in memory");
	send.space = &gpu;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 8), 8);
	assert_int_equal(u_put(&u_, m_, &gpu, keys_, 0, 8), 8);
	assert_int_equal(u_recv(&u_, d_, &gpu, "t", 0, &got), KV_OK); /* as yet without a producer */
	assert_int_equal(send_first("t", 4, U_FULL, 0), KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(u_send(&u_, m_, &send, &sent), KV_OK);
	assert_int_equal(sent.number, got.number);
	assert_int_not_equal(sent.number, sent_.number);
	universe_check(&u_);

	/* The producer gives up there, and goes on here. What is there stays until the consumer is done. */
	assert_int_equal(u_done(&u_, m_, sent.number, KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER), KV_OK);
	check_notice(d_, got.number, KV_HANDOVER_FAILED, 8, KV_ERR_ABORTED);
	assert_int_equal(send_more(8, U_FULL, 1), KV_OK);
	check_notice(d_, got_.number, KV_HANDOVER_COMPLETE, 8, KV_OK);
	assert_int_equal(u_done(&u_, d_, got.number, 0), KV_OK);
	universe_check(&u_);
	assert_int_equal(u_.core->ns[0]->handover_bytes[1], 0);
	assert_int_equal(u_.core->ns[0]->handover_bytes[KVD_HOST_MEM], 8 * 4096);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	assert_int_equal(u_.core->pins.used + u_.core->handovers.used, 0);
}

/* Engines that copy to memory of a GPU what the host has leave half of it to a producer, which needs it now. */
STAGE_TEST(p5_promotions_leave_room_for_hand_overs,
	   stage_two_in(&(u_config_t){
		   .cpu_slots = 64, .gpu_slots = 32, .share = {[0] = {[KVD_SHARE_GPU] = 32 * 4096}}}))
{
	static u_put_t put[3];
	kv_msg_put_start_reply_t started;
	u_member_t *other;

	other = u_join(&u_, 0, "other", 2, 0);
	assert_int_equal(u_put_start(&u_, d_, &space_, fork_, 0, 12, KV_PUT_YIELD, &put[0], &started), KV_OK);
	assert_int_equal(started.n, 12);
	assert_int_equal(u_put_start(&u_, other, &space_, fork_, 0, 12, KV_PUT_YIELD, &put[1], &started), KV_OK);
	assert_int_equal(started.n, 4);
	assert_int_equal(metric(KV_M_PUT_YIELDED), 1);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 16), 16);
	assert_int_equal(send_first("t", 16, U_FULL, 1), KV_OK);
	universe_check(&u_);
	/* What is promoted is evicted as any block is: a producer's next prompt finds room, too. */
	put_end(&put[0]);
	put_end(&put[1]);
	u_settle(&u_);
	assert_int_equal(u_put_start(&u_, d_, &space_, &fork_[12], 0, 1, KV_PUT_YIELD, &put[2], &started), KV_ERR_BUSY);
	assert_non_null(strstr(u_.detail, "half of the namespace's share"));
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
}

STAGE_TEST(p5_hand_overs_and_leases_end_at_the_share_together, stage_share(32 * 4096, 32 * 4096))
{
	static char tail[4 * 4096];
	kv_msg_acquire_reply_t reply;
	u_lease_t lease;

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 20), 20);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 8, 24), 16);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 24, 28), 4);
	assert_int_equal(u_acquire(&u_, m_, &space_, fork_, 28, 0, &lease, &reply), KV_OK);
	assert_int_equal(reply.n, 28);
	assert_int_equal(send_first("t", 13, U_FULL, 0), KV_ERR_BUSY); /* 28, and 5 more */
	assert_non_null(strstr(u_.detail, "handover.max_bytes"));
	assert_int_equal(send_first("t", 12, U_FULL, 0), KV_OK);
	universe_check(&u_);
	assert_int_equal(send_it(to_send_tail("tail", tail, 1)), KV_ERR_BUSY);
	assert_int_equal(u_release(&u_, m_, lease.id), KV_OK);
	assert_int_equal(send_it(to_send_tail("tail", tail, sizeof tail)), KV_OK);
	universe_check(&u_);
	assert_int_equal(u_acquire(&u_, m_, &space_, fork_, 28, 0, &lease, &reply), KV_OK);
	assert_int_equal(reply.n, 8 + 32 - 12 - 4); /* what both share, and what is left */
}

/* Pins and tail of one chunk are one demand; and so is a tail alone. */
KV_TEST(p5_pins_and_tail_of_a_chunk_are_counted_together)
{
	static char tail[6 * 4096];
	u_send_t both = to_send("t", 12, U_FULL, 0);

	both.tail = tail;
	both.tail_len = sizeof tail;
	stage_share(16 * 4096, 64 * 4096); /* the share is less than hand-overs may have */
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(u_send(&u_, m_, &both, &sent_), KV_ERR_BUSY); /* 12 + 6 of 16 */
	both.tail_len = 4 * 4096;
	assert_int_equal(u_send(&u_, m_, &both, &sent_), KV_OK);
	universe_check(&u_);
	assert_int_equal(u_.core->handovers.used, 1);
	stage_end();

	stage_share(64 * 4096, 4 * 4096);
	both.n = both.groups = 0;
	assert_int_equal(u_send(&u_, m_, &both, &sent_), KV_OK);
	universe_check(&u_);
	both.transfer = "u";
	both.tail_len = 1;
	assert_int_equal(u_send(&u_, m_, &both, &sent_), KV_ERR_BUSY);
	assert_int_equal(u_.core->handovers.used, 1);
	stage_end();
}

STAGE_TEST(p5_a_producer_is_told_when_there_is_room, stage_two(128, 0))
{
	u_send_t send = to_send("u", 8, U_FULL, 1);
	uint64_t first;
	u_member_t *waits;

	send.keys = fork_;
	send.await_room = 1;
	waits = u_join(&u_, 0, "waits", 2, 0);
	u_chain(NULL, 77, fork_, 8);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 0, 8), 8);
	u_.core->config.max_handover_bytes = 15 * 4096;
	assert_int_equal(send_first("t", 12, U_FULL, 1), KV_OK);
	first = sent_.number;
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
	send.transfer = "v";
	send.n = 0;
	send.groups = 0;
	send.tail = "xy";
	send.tail_len = 2;
	u_.core->config.max_handover_bytes = 1;
	assert_int_equal(u_send(&u_, waits, &send, &sent_), KV_ERR_BUSY);
	u_closed(&u_, waits);
	assert_int_equal(u_.core->ns[0]->room_waiters.head, KVD_NONE);
	u_.core->config.max_handover_bytes = 0;
	u_tick(&u_, 2);
}

/* ---- what nobody has claimed ----------------------------------------------------------------- */

#define PROMPT 8u

static kv_key_t prompts_[6][PROMPT];

/* Of prompt i, all of its eight blocks; of four such prompts there is room. */
static kv_status_t send_prompt(u_member_t *m, const char *transfer, uint32_t i, int await_room)
{
	u_send_t send = to_send(transfer, PROMPT, U_FULL, 1);

	send.keys = prompts_[i];
	send.await_room = await_room;

	return u_send(&u_, m, &send, &sent_);
}

static uint64_t find_prompt(uint32_t i)
{
	kv_msg_acquire_reply_t reply;
	u_lease_t lease;

	return u_acquire(&u_, d_, &space_, prompts_[i], PROMPT, 0, &lease, &reply) == KV_OK ? lease.id : 0;
}

/* Another engine's producer, while those of m_ fill the room, the first one a second before the others. */
static u_member_t *stage_flood(void)
{
	stage_share(128 * 4096, 4 * PROMPT * 4096);
	for (uint32_t i = 0; i < KV_COUNT_OF(prompts_); i++) {
		u_chain(NULL, 100 + i, prompts_[i], PROMPT);
		assert_int_equal(u_put(&u_, m_, &space_, prompts_[i], 0, PROMPT), PROMPT);
	}
	assert_int_equal(send_prompt(m_, "a", 0, 0), KV_OK);
	advance(1000000000u);
	assert_int_equal(send_prompt(m_, "b", 1, 0), KV_OK);
	assert_int_equal(send_prompt(m_, "c", 2, 0), KV_OK);

	return u_join(&u_, 0, "other", 2, 0);
}

/* It has two seconds for its consumer to come; then the oldest of the producer that has most gives way. */
KV_TEST(p5_what_nobody_has_claimed_gives_way_to_live_hand_overs)
{
	u_member_t *other = stage_flood();
	uint64_t lease;

	assert_int_equal(send_prompt(other, "o", 3, 0), KV_OK);
	assert_int_equal(send_prompt(other, "p", 4, 0), KV_ERR_BUSY); /* all are young */
	advance(U_HANDOVER_MIN_TTL_NS - 1000000000u);
	assert_int_equal(send_prompt(other, "p", 4, 0), KV_OK);
	universe_check(&u_);
	assert_int_equal(metric(KV_M_HANDOVERS_GAVE_WAY), 1);

	/* A late consumer is told at once, and finds the blocks. */
	assert_int_equal(recv(d_, "a", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_FAILED);
	assert_int_equal(got_.status, KV_ERR_EXPIRED);
	lease = find_prompt(0);
	assert_int_not_equal(lease, 0);
	assert_int_equal(u_release(&u_, d_, lease), KV_OK);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);

	/* m_ has as much as the other one, and is the first of the two. */
	for (uint32_t i = 0; i < 2; i++) {
		assert_int_equal(recv(d_, i ? "o" : "c", 0), KV_OK);
		assert_int_equal(got_.state, KV_HANDOVER_COMPLETE);
	}
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(send_prompt(other, "q", 5, 0), KV_OK);
	assert_int_equal(recv(d_, "b", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_FAILED);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	universe_check(&u_);

	/* What is claimed never gives way; given back it has its time anew. */
	assert_int_equal(recv(d_, "p", 0), KV_OK);
	assert_int_equal(recv(d_, "q", 0), KV_OK);
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(send_prompt(m_, "r", 0, 0), KV_ERR_BUSY);
	assert_int_equal(u_done(&u_, d_, got_.number, KV_HANDOVER_ABORT), KV_OK);
	assert_int_equal(send_prompt(m_, "r", 0, 0), KV_ERR_BUSY);
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(send_prompt(m_, "r", 0, 0), KV_OK);
	stage_end();
}

/* A killed consumer, and one that asks again after a restart, claim nothing. */
KV_TEST(p5_what_a_killed_consumer_had_claimed_gives_way)
{
	u_member_t *other = stage_flood();

	assert_int_equal(send_prompt(m_, "d", 3, 0), KV_OK);
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(recv(d_, (const char *[]){"a", "b", "c", "d"}[i], 0), KV_OK);
	}
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(send_prompt(other, "o", 4, 0), KV_ERR_BUSY);
	u_closed(&u_, d_);
	u_dead(&u_, d_);
	advance(U_HANDOVER_MIN_TTL_NS);
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(send_prompt(other, "o", 4, 0), KV_OK);
	stage_end();
}

/* The number of an instance's entries is a limit like that of their bytes. */
KV_TEST(p5_what_nobody_has_claimed_gives_way_at_the_limit_of_its_producer)
{
	(void)stage_flood();
	u_.core->config.max_leases = 3;
	assert_int_equal(send_prompt(m_, "d", 0, 0), KV_ERR_LIMIT);
	advance(U_HANDOVER_MIN_TTL_NS - 1000000000u);
	assert_int_equal(send_prompt(m_, "d", 0, 0), KV_OK);
	assert_int_equal(send_prompt(m_, "e", 0, 0), KV_ERR_LIMIT);
	assert_int_equal(recv(d_, "a", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_FAILED);
	stage_end();
}

/* One that waits is told as soon as another may give way, and no sooner. */
KV_TEST(p5_a_producer_that_waits_is_told_when_others_have_had_their_time)
{
	u_member_t *other = stage_flood();
	u_send_t send;

	assert_int_equal(send_prompt(m_, "d", 3, 0), KV_OK);
	assert_int_equal(send_prompt(other, "o", 4, 1), KV_ERR_BUSY);
	u_tick(&u_, 2);
	assert_int_equal(u_count_notices(&u_, KV_CODE_HANDOVER_ROOM, 0), 0);
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(u_count_notices(&u_, KV_CODE_HANDOVER_ROOM, 0), 1);
	assert_int_equal(metric(KV_M_HANDOVERS_GAVE_WAY), 1);
	assert_int_equal(send_prompt(other, "o", 4, 1), KV_OK);
	assert_int_equal(metric(KV_M_HANDOVERS_GAVE_WAY), 1);

	/* What would not fit without all of them either ends none. */
	advance(U_HANDOVER_MIN_TTL_NS);
	send = to_send_tail("p", prompts_, 4 * PROMPT * 4096 + 1);
	assert_int_equal(u_send(&u_, other, &send, &sent_), KV_ERR_BUSY);
	stage_end();
}

/* Two such pairs may each keep what the other lacks: the consumer of the one that was refused first computes the rest,
 * and the other producer goes on. */
STAGE_TEST(p5_no_consumer_waits_long_for_a_producer_without_room, stage_share(128 * 4096, 16 * 4096))
{
	u_send_t send[2] = {{.transfer = "a", .space = &space_, .keys = keys_, .groups = U_FULL},
			    {.transfer = "b", .space = &space_, .keys = fork_, .groups = U_FULL}};

	u_chain(NULL, 77, fork_, 12);
	for (uint32_t i = 0; i < 2; i++) {
		assert_int_equal(u_put(&u_, m_, &space_, send[i].keys, 0, 12), 12);
		send[i].n = 8;
		assert_int_equal(u_send(&u_, m_, &send[i], &sent_), KV_OK);
		assert_int_equal(recv(d_, send[i].transfer, 60000), KV_OK);
		send[i].number = sent_.number;
		send[i].n = 12;
	}
	for (uint32_t tries = 0; tries < 4; tries++) {
		assert_int_equal(u_send(&u_, m_, &send[0], &sent_), KV_ERR_BUSY);
		assert_null(last_notice(d_, send[0].number));
		advance(KVD_HANDOVER_LACK_NS / 4);
		universe_check(&u_);
	}
	assert_int_equal(u_send(&u_, m_, &send[1], &sent_), KV_ERR_BUSY);
	advance(KVD_HANDOVER_LACK_NS / 2);
	check_notice(d_, send[0].number, KV_HANDOVER_FAILED, 0, KV_ERR_FULL);
	check_notice(m_, send[0].number, KV_HANDOVER_FAILED, 0, KV_ERR_FULL);
	assert_int_equal(u_send(&u_, m_, &send[0], &sent_), KV_ERR_NOT_FOUND);
	assert_int_equal(u_done(&u_, d_, send[0].number, 0), KV_OK);

	/* It had less time without room. */
	assert_null(last_notice(d_, send[1].number));
	assert_int_equal(u_send(&u_, m_, &send[1], &sent_), KV_OK);
	advance(2 * KVD_HANDOVER_LACK_NS);
	check_notice(d_, send[1].number, KV_HANDOVER_SENDING, 0, KV_OK);
	advance(UINT64_C(60000000000));
	check_notice(d_, send[1].number, KV_HANDOVER_ENDED, 0, KV_ERR_TIMEOUT); /* as it has asked */
}

/* One that comes when its producer lacks room already has no more time; one without room has none to lose. */
STAGE_TEST(p5_a_consumer_that_comes_to_a_producer_without_room_is_told_soon, stage_share(128 * 4096, 4 * 4096))
{
	u_send_t send = to_send("a", 4, U_FULL, 0);

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(u_send(&u_, m_, &send, &sent_), KV_OK);
	send.number = sent_.number;
	send.n = 12;
	assert_int_equal(u_send(&u_, m_, &send, &sent_), KV_ERR_BUSY);
	advance(2 * KVD_HANDOVER_LACK_NS);
	assert_int_equal(recv(d_, "a", 60000), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_SENDING);
	advance(2 * KVD_HANDOVER_LACK_NS);
	check_notice(d_, send.number, KV_HANDOVER_FAILED, 0, KV_ERR_FULL);
}

/* Those that one tick looks at first want more than has come free. The one after them wants less, and is told. */
STAGE_TEST(p5_no_producer_that_waits_for_room_is_forgotten, stage_share(128 * 4096, PROMPT * 4096))
{
	static u_member_t waits[65];
	u_send_t send = {.space = &space_, .groups = U_FULL, .last = 1, .await_room = 1};

	for (uint32_t i = 0; i < 3; i++) {
		u_chain(NULL, 100 + i, prompts_[i], PROMPT);
		assert_int_equal(u_put(&u_, m_, &space_, prompts_[i], 0, PROMPT), PROMPT);
	}
	for (uint32_t i = 0; i < 2; i++) {
		send.transfer = i ? "b" : "a";
		send.keys = prompts_[i];
		send.n = PROMPT / 2;
		assert_int_equal(u_send(&u_, m_, &send, &sent_), KV_OK);
		assert_int_equal(recv(d_, send.transfer, 0), KV_OK);
	}
	send.transfer = "c";
	send.keys = prompts_[2];
	for (uint32_t i = 0; i < KV_COUNT_OF(waits); i++) {
		kvd_join_t join = {.ns = u_.ns[0], .role = 2, .rank = 1 + i};

		waits[i] = *m_;
		assert_int_equal(kvd_member_add(u_.core, m_->instance, &join, &waits[i].id), KV_OK);
		send.n = i + 1 < KV_COUNT_OF(waits) ? PROMPT : 1;
		assert_int_equal(u_send(&u_, &waits[i], &send, &sent_), KV_ERR_BUSY);
	}
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	u_tick(&u_, 2);
	assert_int_equal(u_count_notices(&u_, KV_CODE_HANDOVER_ROOM, 0), 1);
	for (uint32_t i = 0; i < KV_COUNT_OF(waits); i++) {
		u_left(&u_, &waits[i]);
	}
}

/* Blocks that are only on disk take no memory, but a place in the index. */
STAGE_TEST(p5_hand_overs_end_at_the_share_of_the_index,
	   stage_two_in(&(u_config_t){.cpu_slots = 64, .share = {[0] = {0, 0, 20}}}))
{
	u_send_t send = to_send("u", 13, U_FULL, 0);

	send.keys = fork_;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 8), 8);
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 8, 16), 8);
	assert_int_equal(u_put(&u_, m_, &space_, fork_, 8, 16), 8);
	assert_int_equal(send_first("t", 16, U_FULL, 1), KV_OK);
	assert_int_equal(send_it(send), KV_ERR_BUSY);
	send.n = 12;
	assert_int_equal(send_it(send), KV_OK);
}

/* A transfer id, until the next call. */
static const char *numbered(char kind, uint32_t i)
{
	static char name[16];

	snprintf(name, sizeof name, "%c%u", kind, i);

	return name;
}

STAGE_TEST(p5_entries_of_a_namespace_and_of_an_instance_are_capped, stage_two(64, 0))
{
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	u_.core->config.max_leases = 40;
	for (uint32_t i = 0; i < 40; i++) {
		assert_int_equal(send_first(numbered('p', i), 4, U_FULL, 1), KV_OK);
	}
	assert_int_equal(send_first("more", 4, U_FULL, 1), KV_ERR_LIMIT); /* of the instance */
	for (uint32_t i = 0; i < 24; i++) {
		assert_int_equal(recv(d_, numbered('c', i), 0), KV_OK);
	}
	assert_int_equal(recv(d_, "c99", 0), KV_ERR_LIMIT); /* of the namespace: 64 */
	assert_int_equal(recv(d_, "p0", 0), KV_OK);
	assert_int_equal(u_done(&u_, d_, got_.number, 0), KV_OK);
	assert_int_equal(recv(d_, "c99", 0), KV_OK);
}

/* Sixty-four are all that there may be. The newest of them is live work. */
STAGE_TEST(p5_what_nobody_has_claimed_gives_way_at_the_limit_of_entries, stage_two(64, 0))
{
	u_member_t *other;

	other = u_join(&u_, 0, "other", 2, 0);
	u_.core->config.max_leases = 64;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	assert_int_equal(send_first("taken", 4, U_FULL, 1), KV_OK);
	assert_int_equal(recv(d_, "taken", 0), KV_OK);
	for (uint32_t i = 0; i < 62; i++) {
		assert_int_equal(send_first(numbered('p', i), 4, U_FULL, 1), KV_OK);
	}
	assert_int_equal(send_first("given up", 4, U_FULL, 0), KV_OK);
	assert_int_equal(u_done(&u_, m_, sent_.number, U_GIVE_UP), KV_OK);

	/* What has failed keeps nothing but its reason: it goes at once, and the late consumer is told all the same. */
	assert_int_equal(recv(d_, "live 1", 0), KV_OK);
	assert_int_equal(recv(d_, "given up", 0), KV_ERR_EXPIRED);
	assert_int_equal(recv(d_, "live 2", 0), KV_ERR_LIMIT); /* the others are young */
	advance(U_HANDOVER_MIN_TTL_NS);
	assert_int_equal(recv(d_, "live 2", 0), KV_OK);
	m_ = other;
	assert_int_equal(send_first("live 3", 4, U_FULL, 1), KV_OK);
	universe_check(&u_);
	assert_int_equal(metric(KV_M_HANDOVERS_GAVE_WAY), 2);
	assert_int_equal(u_.core->ns[0]->handovers, 64);
	assert_int_equal(recv(d_, "p0", 0), KV_ERR_EXPIRED);
	assert_int_equal(recv(d_, "p1", 0), KV_ERR_EXPIRED);
	assert_int_equal(recv(d_, "p2", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_COMPLETE);
	assert_int_equal(send_first("p0", 4, U_FULL, 1), KV_OK); /* the name may be used again, and was told once */
	assert_int_equal(recv(d_, "p0", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_COMPLETE);
}

/* A node that gives memory back ends what is handed over last of all, and says so. */
STAGE_TEST(p5_forced_eviction_fails_the_entry_and_says_so, stage_two(64, 0))
{
	uint32_t block;

	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 12), 12);
	assert_int_equal(send_first("t", 12, U_FULL, 1), KV_OK);
	assert_int_equal(recv(d_, "t", 0), KV_OK);
	block = kvd_index_find(&u_.core->ix, u_.core->ns[0]->numbers[space_.space]->tree, &keys_[0], 0);
	assert_int_equal(kvd_block_evict_below(u_.core, block, KVD_CPU, 0), KV_MISS);
	assert_int_equal(kvd_block_evict_below(u_.core, block, KVD_CPU, 1), KV_OK);
	check_notice(d_, got_.number, KV_HANDOVER_FAILED, 0, KV_ERR_REVOKED);
}

/* Thousands end with one member: in quanta, and a request in between finds what is true. */
STAGE_TEST(p5_the_end_of_a_side_of_many_entries_is_cut_into_quanta, stage_two(64, 0))
{
	char name[16];
	uint32_t quanta = 0;

	u_.core->config.max_leases = 2000;
	u_.core->config.max_handovers = 2000;
	u_.core->handovers.limit = 2000;
	assert_int_equal(u_put(&u_, m_, &space_, keys_, 0, 4), 4);
	for (uint32_t i = 0; i < 2000; i++) {
		snprintf(name, sizeof name, "%u", i);
		assert_int_equal(send_first(name, 4, U_FULL, 0), KV_OK);
	}
	u_dead(&u_, m_);
	assert_int_equal(recv(d_, "1999", 0), KV_OK);
	assert_int_equal(got_.state, KV_HANDOVER_FAILED);
	while (u_.core->handover_sweep > 0) {
		(void)kvd_handovers_run(u_.core);
		quanta++;
	}
	assert_true(quanta >= 7);
	universe_check(&u_);
	assert_int_equal(u_.core->pins.used, 0);
	m_ = u_join(&u_, 0, "engine", 2, 0);
}
