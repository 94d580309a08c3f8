/* Hand-overs over the wire: two instances, what a client that means harm may send, and ten thousand entries. */
#include "daemon/raw.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define N 8u

static raw_member_t prefill_, decode_;
static kv_key_t keys_[N];

KV_FIXTURE(setup)
{
	static const char *const args[] = {"--namespaces=default,other", "--limits.leases=16384", "--cpu.size=64MiB",
					   NULL};

	raw_daemon_start(&daemon_, args);
	raw_join(&prefill_, daemon_.sock, "prefill");
	raw_join(&decode_, daemon_.sock, "decode");
	assert_int_equal(raw_space(&prefill_, "m"), KV_OK);
	assert_int_equal(raw_space(&decode_, "m"), KV_OK);
	raw_keys(1, keys_, N);
	assert_int_equal(raw_put(&prefill_, keys_, N, 7), N);
}

KV_FIXTURE(teardown)
{
	const kv_msg_check_t ask = {0};
	kv_msg_check_reply_t reply;
	int watch = raw_open(daemon_.sock);

	assert_int_equal(raw_call(watch, KV_CODE_CHECK, &ask, &reply), KV_OK);
	if (reply.failed != 0) {
		fail_msg("%.*s", (int)reply.json.len, (const char *)reply.json.data);
	}
	close(watch);
	raw_leave(&prefill_);
	raw_leave(&decode_);
	raw_daemon_end(&daemon_);
}

static kv_msg_handover_send_t send_of(const char *transfer, uint64_t number, const uint32_t part[3], int last)
{
	return (kv_msg_handover_send_t){.transfer = kv_slice_str(transfer),
					.number = number,
					.space = prefill_.space.space,
					.epoch = prefill_.space.epoch,
					.parts = {(const uint8_t *)part, part ? 12 : 0},
					.keys = {part ? keys_[part[1] - 1].b : NULL, part ? 16 : 0},
					.flags = last ? KV_HANDOVER_LAST : 0};
}

static kv_status_t receive(raw_member_t *member, const char *transfer, uint32_t timeout_ms,
			   kv_msg_handover_recv_reply_t *reply)
{
	const kv_msg_handover_recv_t ask = {.transfer = kv_slice_str(transfer),
					    .space = member->space.space,
					    .epoch = member->space.epoch,
					    .timeout_ms = timeout_ms};

	return raw_call(member->fd, KV_CODE_HANDOVER_RECV, &ask, reply);
}

static kv_status_t done(raw_member_t *member, uint64_t number, uint32_t flags)
{
	const kv_msg_handover_done_t ask = {.number = number, .flags = flags};
	kv_msg_handover_done_reply_t reply;

	return raw_call(member->fd, KV_CODE_HANDOVER_DONE, &ask, &reply);
}

/* The document of a namespace's transfers, NUL-terminated. */
static const char *document(int fd)
{
	static char json[KV_MAX_JSON + 1];
	const kv_msg_transfers_t ask = {0};
	kv_msg_transfers_reply_t reply;

	assert_int_equal(raw_call(fd, KV_CODE_TRANSFERS, &ask, &reply), KV_OK);
	memcpy(json, reply.json.data, reply.json.len);
	json[reply.json.len] = '\0';

	return json;
}

/* ---- hostile --------------------------------------------------------------------------------- */

KV_TEST(p10_fields_over_their_limits_end_the_session)
{
	static uint8_t big[(1u << 20) + 1u];
	static char name[130];
	const kv_request_t *request = kv_request_find(KV_CODE_HANDOVER_SEND);
	const kv_slice_t tails[] = {{big, sizeof big}, {big, 0}};

	memset(name, 'n', 129);
	for (uint32_t i = 0; i < 3; i++) {
		kv_msg_handover_send_t send = send_of(i == 1 ? name : "t", 0, NULL, 0);
		static uint8_t body[2u << 20];
		kv_frame_header_t header = {
			.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .code = KV_CODE_HANDOVER_SEND};
		raw_member_t member;
		raw_frame_t frame;

		send.tail = tails[i > 0];
		raw_join(&member, daemon_.sock, "hostile");
		/* The encoder refuses what the daemon refuses: so its limits are taken away. */
		kv_field_t fields[KV_WIRE_MAX_FIELDS];
		kv_body_t loose = {fields, request->ask.count};

		memcpy(fields, request->ask.fields, request->ask.count * sizeof *fields);
		for (uint32_t f = 0; f < loose.count; f++) {
			fields[f].limit = fields[f].kind <= KV_FIELD_I32 ? 0 : 4u << 20;
		}
		send.flags = i == 2 ? 8 : 0;
		assert_int_equal(kv_body_encode(&loose, &send, body, sizeof body, &header.body), KV_OK);
		assert_true(raw_bytes(member.fd, &header, sizeof header));
		(void)raw_bytes(member.fd, body, header.body);
		do { /* slabs are announced before */
			assert_int_equal(raw_recv(member.fd, RAW_TIMEOUT_MS, &frame), 1);
		} while (frame.header.kind != KV_FRAME_REPLY);
		assert_int_equal(frame.header.status, KV_ERR_TOO_BIG);
		assert_true(raw_closed(member.fd, RAW_TIMEOUT_MS));
		raw_leave(&member);
	}
	assert_non_null(strstr(document(prefill_.fd), "\"transfers\":[]"));
}

/* Announcements of a session that means harm, to an entry that is another's: it is told why, and stays; the daemon
 * hands that entry over. */
KV_TEST(p10_garbage_announcements_leave_the_daemon_serving)
{
	static const struct {
		uint32_t part[3], keys; /* how many keys there are */
		int own;                /* an entry of its own, not that of the producer */
		kv_status_t status;
	} cases[] = {{{0, 0, 0}, 0, 1, KV_ERR_ARG},          {{0, 4, 5}, 5, 1, KV_ERR_ARG},
		     {{0, UINT32_MAX, 4}, 4, 1, KV_ERR_ARG}, {{0, 4, UINT32_MAX}, 4, 1, KV_ERR_ARG},
		     {{0, 4, 4}, 3, 1, KV_ERR_ARG},          {{0, 8, 4}, 4, 1, KV_MISS},
		     {{7, 4, 4}, 4, 1, KV_ERR_UNSUPPORTED},  {{0, 8, 8}, 8, 0, KV_ERR_NOT_FOUND}};
	kv_msg_handover_send_t send = send_of("announced", 0, NULL, 1);
	kv_msg_handover_send_reply_t sent, unused;
	kv_msg_handover_recv_reply_t got;
	kv_msg_handover_t notice;
	kv_key_t fresh[N];
	raw_member_t hostile;

	raw_keys(2, fresh, N);
	raw_join(&hostile, daemon_.sock, "hostile");
	assert_int_equal(raw_space(&hostile, "m"), KV_OK);
	send.flags |= KV_HANDOVER_AHEAD;
	send.parts = (kv_slice_t){(const uint8_t *)(const uint32_t[]){0, N, N}, 12};
	send.keys = (kv_slice_t){fresh[0].b, sizeof fresh};
	assert_int_equal(raw_call(prefill_.fd, KV_CODE_HANDOVER_SEND, &send, &sent), KV_OK);
	assert_int_equal(receive(&decode_, "announced", 0, &got), KV_OK);
	for (uint32_t i = 0; i < KV_COUNT_OF(cases); i++) {
		kv_msg_handover_send_t bad = send;

		bad.transfer = kv_slice_str(cases[i].own ? "mine" : "announced");
		bad.number = cases[i].own ? 0 : sent.number;
		bad.parts.data = (const uint8_t *)cases[i].part;
		bad.keys.len = cases[i].keys * KV_KEY_BYTES;
		assert_int_equal(raw_call(hostile.fd, KV_CODE_HANDOVER_SEND, &bad, &unused), cases[i].status);
	}
	raw_leave(&hostile);
	assert_null(strstr(document(prefill_.fd), "mine"));
	assert_int_equal(raw_put(&prefill_, fresh, N, 9), N);
	do {
		assert_true(raw_notice(decode_.fd, KV_CODE_HANDOVER, RAW_TIMEOUT_MS, &notice));
	} while (notice.state == KV_HANDOVER_SENDING);
	assert_int_equal(notice.state, KV_HANDOVER_COMPLETE);
	assert_int_equal(notice.n, N);
	assert_int_equal(done(&decode_, sent.number, 0), KV_OK);
}

KV_TEST(p8_numbers_that_are_not_ours_all_answer_alike)
{
	char sock[160], *slash;
	raw_member_t stranger;
	kv_msg_handover_send_t send = send_of("hidden", 0, (uint32_t[]){0, 4, 1}, 0);
	kv_msg_handover_send_reply_t sent;
	const kv_msg_handover_tail_t ask = {.number = 1};
	kv_msg_handover_tail_reply_t answer;
	const uint64_t numbers[] = {0, 1, UINT64_MAX, 1u << 24, UINT64_C(1) << 63};

	snprintf(sock, sizeof sock, "%s", daemon_.sock);
	slash = strrchr(sock, '/');
	snprintf(slash, sizeof sock - (size_t)(slash - sock), "/other.sock");
	raw_join(&stranger, sock, "prefill");
	assert_int_equal(raw_space(&stranger, "m"), KV_OK);
	assert_int_equal(raw_call(prefill_.fd, KV_CODE_HANDOVER_SEND, &send, &sent), KV_OK);
	for (uint32_t i = 0; i < KV_COUNT_OF(numbers) + 1; i++) {
		uint64_t number = i < KV_COUNT_OF(numbers) ? numbers[i] : sent.number;

		assert_int_equal(done(&stranger, number, 0), KV_ERR_NOT_FOUND);
		assert_int_equal(done(&stranger, number, KV_HANDOVER_ABORT), KV_ERR_NOT_FOUND);
	}
	assert_int_equal(raw_call(stranger.fd, KV_CODE_HANDOVER_TAIL, &ask, &answer), KV_ERR_NOT_FOUND);
	assert_null(strstr(document(stranger.fd), "hidden")); /* root's own session, and yet of its namespace only */
	assert_non_null(strstr(document(prefill_.fd), "hidden"));
	assert_int_equal(done(&prefill_, sent.number, KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER), KV_OK);
	assert_int_equal(receive(&decode_, "hidden", 0, &(kv_msg_handover_recv_reply_t){0}), KV_OK);
	assert_int_equal(done(&decode_, sent.number, 0), KV_OK);
	raw_leave(&stranger);
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* A producer that passes on what others produce says what they said. */
KV_TEST(p7_the_reason_of_a_producer_reaches_its_consumer)
{
	kv_msg_handover_send_t send = send_of("reason", 0, (uint32_t[]){0, 4, 1}, 0);
	kv_msg_handover_done_t ask = {.flags = KV_HANDOVER_ABORT | KV_HANDOVER_BY_PRODUCER};
	const int32_t unfit[] = {1, -100000, INT32_MIN, INT32_MAX};
	kv_msg_handover_done_reply_t reply;
	kv_msg_handover_send_reply_t sent;
	kv_msg_handover_recv_reply_t got;
	kv_msg_handover_t notice;

	assert_int_equal(raw_call(prefill_.fd, KV_CODE_HANDOVER_SEND, &send, &sent), KV_OK);
	assert_int_equal(receive(&decode_, "reason", 0, &got), KV_OK);
	ask.number = sent.number;
	for (size_t i = 0; i < KV_COUNT_OF(unfit); i++) {
		ask.status = unfit[i];
		assert_int_equal(raw_call(prefill_.fd, KV_CODE_HANDOVER_DONE, &ask, &reply), KV_ERR_ARG);
	}
	ask.status = KV_ERR_UNREACHABLE;
	assert_int_equal(raw_call(prefill_.fd, KV_CODE_HANDOVER_DONE, &ask, &reply), KV_OK);
	assert_true(raw_notice(decode_.fd, KV_CODE_HANDOVER, RAW_TIMEOUT_MS, &notice));
	assert_int_equal(notice.number, sent.number);
	assert_int_equal(notice.state, KV_HANDOVER_FAILED);
	assert_int_equal(notice.status, KV_ERR_UNREACHABLE);
	assert_int_equal(done(&decode_, sent.number, 0), KV_OK);
}

KV_TEST(p5_ten_thousand_entries_end_with_their_member)
{
	enum { ENTRIES = 10000 };
	char name[32];
	raw_member_t many;
	int watch = raw_open(daemon_.sock);

	raw_join(&many, daemon_.sock, "many");
	assert_int_equal(raw_space(&many, "m"), KV_OK);
	for (uint32_t i = 0; i < ENTRIES; i++) {
		kv_msg_handover_send_reply_t sent;
		kv_msg_handover_recv_reply_t got;

		snprintf(name, sizeof name, "%06u-%08x", i, i * 2654435761u);
		if (i % 2) {
			assert_int_equal(receive(&many, name, 0, &got), KV_OK);
		} else {
			kv_msg_handover_send_t send = send_of(name, 0, (uint32_t[]){0, 1 + i % N, 1}, 0);

			assert_int_equal(raw_call(many.fd, KV_CODE_HANDOVER_SEND, &send, &sent), KV_OK);
		}
	}
	assert_true(raw_metric_reaches(watch, "kvd_handovers", ENTRIES));
	assert_non_null(strstr(document(watch), "\"omitted\":"));
	assert_null(strstr(document(watch), "\"omitted\":0}"));
	assert_true(raw_metric(watch, "kvd_handover_bytes") <= N * RAW_BLOCK_BYTES); /* all share their blocks */
	raw_leave(&many);
	/* Those that were awaited are gone; the others have failed, and wait for who asks why. */
	for (int i = 0;
	     raw_metric(watch, "kvd_handovers") != ENTRIES / 2 || raw_metric(watch, "kvd_handover_bytes") != 0; i++) {
		assert_true(i < 10000);
		usleep(2000);
	}
	close(watch);
}

KV_TEST_MAIN(setup, teardown)
