/* Hand-overs in libkvc against a daemon that is late, gone, or wrong. What the real one does: tests/e2e. */
#include "client_test.h"

static kvc_handover_info_t info_of(const kvc_handover_t *handover)
{
	kvc_handover_info_t info = {.struct_size = sizeof info};

	kvc_handover_get_info(handover, &info);

	return info;
}

/* That is there: n blocks of it; 0: all. */
static kvc_handover_t *receive(const char *transfer, uint32_t n)
{
	kvc_handover_t *handover = NULL;

	assert_int_equal(kvc_handover_recv(bed.space, transfer, 0, &handover), KVC_OK);
	assert_int_equal(kvc_handover_wait(handover, n, 0), KVC_OK);

	return handover;
}

BED_CASE(p1_a_tail_of_another_length_fails_the_hand_over)
{
	kvc_handover_t *handover = NULL;

	KNOB(tail_bytes) = 5;
	assert_int_equal(kvc_handover_recv(bed.space, "t", 0, &handover), KVC_OK);
	assert_int_equal(info_of(handover).state, KVC_HANDOVER_ASKED);
	assert_int_equal(kvc_handover_wait(handover, 0, 0), KVC_OK);
	assert_memory_equal(info_of(handover).tail, "token", 5);
	kvc_handover_done(handover, 0);
	KNOB(tail_bytes) = 4;
	handover = receive("t", 4); /* its blocks are there */
	assert_true(kvc_handover_wait(handover, 0, 0) < 0);
	assert_int_equal(info_of(handover).state, KVC_HANDOVER_FAILED);
	assert_null(info_of(handover).tail);
	kvc_handover_done(handover, 0);
	BED_UNTIL(&bed, ASKED(HANDOVER_DONE) == 2);
}

KV_TEST(p4_an_answer_that_comes_too_late_is_given_back)
{
	kvc_key_source_t source = {.key = bed_key_at, .ctx = bed.keys};
	kvc_handover_chunk_t chunk = {.struct_size = sizeof chunk, .transfer = "t", .n = 4, .source = &source};
	kvc_handover_t *handover = NULL;

	bed_make(&bed, &fake_split, (kvc_config_t){.timeout_ms = 500});
	for (uint32_t i = 0; i < 2; i++) {
		KNOB(release) = 0;
		KNOB(delay_code) = i ? KV_CODE_HANDOVER_SEND : KV_CODE_HANDOVER_RECV;
		assert_int_equal(i ? kvc_handover_send(bed.space, &chunk, &handover)
				   : kvc_handover_recv(bed.space, "t", 0, &handover),
				 KVC_OK);
		assert_int_equal(kvc_handover_wait(handover, 0, 20000), KVC_ERR_TIMEOUT);
		kvc_handover_done(handover, 0);
		handover = NULL;
		KNOB(release) = 1;
		BED_UNTIL(&bed, ASKED(HANDOVER_DONE) == 1 + i);
		assert_int_equal(SEEN(done_flags), i ? KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER : KV_HANDOVER_ABORT);
	}
}

BED_CASE(p7_a_lost_session_revokes_its_hand_overs)
{
	kvc_handover_t *asked = NULL, *answered = NULL;

	KNOB(tail_bytes) = 5;
	answered = receive("a", 0);
	KNOB(mute) = KV_CODE_HANDOVER_RECV;
	assert_int_equal(kvc_handover_recv(bed.space, "b", 0, &asked), KVC_OK);
	fake_drop_sessions(bed.fake);
	assert_int_equal(kvc_handover_wait(asked, 0, 0), KVC_ERR_REVOKED);
	assert_int_equal(info_of(answered).state, KVC_HANDOVER_ENDED);
	assert_int_equal(info_of(answered).status, KVC_ERR_REVOKED);
	assert_memory_equal(info_of(answered).tail, "token", 5); /* what has come is the caller's */
	kvc_handover_done(asked, 0);
	kvc_handover_done(answered, 0);
	BED_UNTIL(&bed, kvc_poll(bed.kvc, 0) == KVC_OK);
	assert_int_equal(ASKED(HANDOVER_DONE), 0); /* the new session has none of them */
}

BED_CASE(p4_a_space_that_is_closed_ends_its_hand_overs)
{
	kvc_handover_t *asked = NULL;

	(void)receive("a", 4);
	assert_int_equal(kvc_handover_recv(bed.space, "b", 0, &asked), KVC_OK);
	kvc_space_close(bed.space);
	BED_UNTIL(&bed, ASKED(HANDOVER_DONE) == 2);
	assert_int_equal(SEEN(done_flags), KV_HANDOVER_ABORT);
}

/* The state is what the daemon answers, also of a last chunk; nothing is named that leaves a gap. */
BED_CASE(p4_an_announced_chunk_is_what_the_daemon_says)
{
	kvc_key_source_t source = {.key = bed_key_at, .ctx = bed.keys};
	kvc_handover_chunk_t chunk = {
		.struct_size = sizeof chunk, .transfer = "t", .n = 8, .source = &source, .last = 1, .ahead = 1};
	kvc_handover_t *handover = NULL;

	assert_int_equal(kvc_handover_send(bed.space, &chunk, &handover), KVC_OK);
	assert_int_equal(kvc_handover_wait(handover, 0, 0), KVC_OK);
	assert_int_equal(info_of(handover).state, KVC_HANDOVER_SENDING);
	assert_int_equal(info_of(handover).number, 7);
	assert_int_equal(info_of(handover).announced, 8);
	assert_int_equal(info_of(handover).n, 4);
	chunk.ahead = 0;
	chunk.n = 2; /* what has been handed over meanwhile is not taken back */
	chunk.partial = 1;
	assert_int_equal(kvc_handover_send(bed.space, &chunk, &handover), KVC_ERR_ARG);
	chunk.partial = 0;
	assert_int_equal(kvc_handover_send(bed.space, &chunk, &handover), KVC_OK);
	assert_int_equal(kvc_handover_wait(handover, 0, 0), KVC_OK);
	assert_int_equal(info_of(handover).state, KVC_HANDOVER_COMPLETE);
	assert_int_equal(info_of(handover).announced, 0);
	kvc_handover_done(handover, 0);
}

KV_TEST_MAIN_EACH(NULL, bed_teardown)
