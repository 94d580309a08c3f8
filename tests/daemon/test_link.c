/* The control channel between two daemons, with somebody in between who reads, keeps, changes and repeats every byte.
 */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/link.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SILENCE_NS UINT64_C(1000000000)
#define KEEP       65536u

/* One side. */
typedef struct side {
	kvd_link_config_t config;
	kvd_link_t *link;
	const char *key;
	uint32_t opened, received;
	uint64_t last;       /* id of the last message */
	kv_status_t answers; /* what `opened` answers */
	int wire;            /* the other end of its connection: the man in the middle's */
	uint8_t sent[KEEP];  /* everything that it has sent */
	size_t sent_len;
} side_t;

static side_t a_, b_; /* the dialler, the dialled */
static uint64_t now_;

static kv_slice_t find_key(void *ctx, const char *name)
{
	const side_t *side = ctx;

	return strcmp(name, "a") == 0 || strcmp(name, "b") == 0 ? kv_slice_str(side->key) : (kv_slice_t){NULL, 0};
}

static kv_status_t on_opened(void *ctx, kvd_link_t *link)
{
	side_t *side = ctx;

	(void)link;
	side->opened++;

	return side->answers;
}

static kv_status_t on_received(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message)
{
	side_t *side = ctx;

	(void)link;
	side->received++;
	side->last = code == KVD_NET_FINISH ? message->finish.id : 0;

	return KV_OK;
}

static const kvd_link_ops_t ops_ = {.find_key = find_key, .opened = on_opened, .received = on_received};

static void side_init(side_t *side, const char *name, const char *key)
{
	memset(side, 0, sizeof *side);
	side->key = key;
	side->config = (kvd_link_config_t){.name = name, .ops = &ops_, .ctx = side, .silence_ns = SILENCE_NS};
}

/* The dialled side alone. */
static void accept_link(side_t *side)
{
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
	side->link = kvd_link_accept(&side->config, pair[0]);
	assert_non_null(side->link);
	side->wire = pair[1];
}

static void dial_link(side_t *side, const char *peer)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t len = sizeof address;
	int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	assert_int_equal(bind(listening, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(listening, 1), 0);
	assert_int_equal(getsockname(listening, (struct sockaddr *)&address, &len), 0);
	side->link = kvd_link_dial(&side->config, peer, (struct sockaddr *)&address, len);
	assert_non_null(side->link);
	side->wire = accept4(listening, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	assert_true(side->wire >= 0);
	close(listening);
}

static void step_link(side_t *side)
{
	kvd_link_progress(side->link, now_);
}

/* Take what a side has sent since. */
static size_t take_sent(side_t *side)
{
	size_t before = side->sent_len;
	ssize_t n;

	step_link(side);
	while ((n = recv(side->wire, side->sent + side->sent_len, KEEP - side->sent_len, MSG_DONTWAIT)) > 0) {
		side->sent_len += (size_t)n;
	}

	return side->sent_len - before;
}

static void deliver(side_t *side, const void *bytes, size_t n)
{
	assert_int_equal(send(side->wire, bytes, n, MSG_NOSIGNAL), (ssize_t)n);
	step_link(side);
}

/* Carry bytes to and fro until nothing moves. */
static void carry(side_t *from, side_t *to)
{
	size_t n;

	for (uint32_t i = 0; i < 100; i++) {
		size_t moved = 0;

		if ((n = take_sent(from)) > 0 && kvd_link_state(to->link) != KVD_LINK_DEAD) {
			deliver(to, from->sent + from->sent_len - n, n);
			moved = n;
		}
		if ((n = take_sent(to)) > 0 && kvd_link_state(from->link) != KVD_LINK_DEAD) {
			deliver(from, to->sent + to->sent_len - n, n);
			moved += n;
		}
		if (moved == 0 && kvd_link_state(from->link) != KVD_LINK_CONNECTING) {
			return;
		}
	}
}

static void start(const char *key_a, const char *key_b)
{
	now_ = kv_now_ns(&kv_env_posix);
	side_init(&a_, "a", key_a);
	side_init(&b_, "b", key_b);
	dial_link(&a_, "b");
	accept_link(&b_);
	carry(&a_, &b_);
}

static void end_side(side_t *side)
{
	kvd_link_free(side->link);
	close(side->wire);
}

static void end_both(void)
{
	end_side(&a_);
	end_side(&b_);
}

static void send_finish(side_t *side, uint64_t id)
{
	const kvd_net_finish_t message = {.id = id};

	assert_int_equal(kvd_link_send(side->link, KVD_NET_FINISH, &message), KV_OK);
}

KV_TEST(p10_two_that_have_the_key_talk_and_know_each_other)
{
	start("key", "key");
	assert_int_equal(kvd_link_state(a_.link), KVD_LINK_OPEN);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
	assert_int_equal(a_.opened + b_.opened, 2);
	assert_string_equal(kvd_link_peer(a_.link), "b");
	assert_string_equal(kvd_link_peer(b_.link), "a");
	for (uint64_t id = 1; id <= 100; id++) {
		send_finish(&a_, id);
		carry(&a_, &b_);
		assert_int_equal(b_.last, id);
		send_finish(&b_, id);
		carry(&a_, &b_);
		assert_int_equal(a_.last, id);
	}
	end_both();
}

KV_TEST(p10_a_wrong_key_opens_neither_side)
{
	start("key", "another");
	assert_int_equal(kvd_link_state(a_.link), KVD_LINK_DEAD);
	assert_int_equal(kvd_link_status(a_.link), KV_ERR_SECRET);
	assert_int_equal(a_.opened + b_.opened, 0);
	assert_int_not_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
	end_both();
}

/* Everything a dialler has ever said, said again by somebody without the key. */
KV_TEST(p10_a_recorded_handshake_opens_nothing)
{
	side_t again;

	start("key", "key");
	send_finish(&a_, 7);
	carry(&a_, &b_);
	assert_int_equal(b_.received, 1);
	side_init(&again, "b", "key");
	accept_link(&again);
	deliver(&again, a_.sent, a_.sent_len);
	assert_int_equal(again.opened + again.received, 0);
	assert_int_equal(kvd_link_state(again.link), KVD_LINK_DEAD);
	assert_int_equal(kvd_link_status(again.link), KV_ERR_SECRET);
	end_side(&again);
	end_both();
}

/* The proof of the dialled side is of no use as the dialler's. */
KV_TEST(p10_a_proof_that_is_sent_back_is_refused)
{
	kvd_net_challenge_t challenge;
	uint8_t frame[256];
	kvd_net_header_t header;
	kvd_net_proof_t proof;
	const uint8_t *at;
	size_t len;

	now_ = kv_now_ns(&kv_env_posix);
	side_init(&a_, "a", "key");
	side_init(&b_, "b", "key");
	dial_link(&a_, "b");
	accept_link(&b_);
	while (take_sent(&a_) == 0) {
	}
	deliver(&b_, a_.sent, a_.sent_len); /* HELLO */
	assert_true(take_sent(&b_) > 0);
	at = b_.sent;
	len = b_.sent_len;
	assert_int_equal(kv_body_decode(kvd_net_body(KVD_NET_CHALLENGE), at + sizeof header,
					(uint32_t)(len - sizeof header), &challenge, NULL),
			 KV_OK);
	proof.proof = challenge.proof;
	memcpy(&header, at, sizeof header);
	header.code = KVD_NET_PROOF;
	assert_int_equal(kv_body_encode(kvd_net_body(KVD_NET_PROOF), &proof, frame + sizeof header,
					sizeof frame - sizeof header, &header.body),
			 KV_OK);
	memcpy(frame, &header, sizeof header);
	deliver(&b_, frame, sizeof header + header.body);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_DEAD);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_SECRET);
	assert_int_equal(b_.opened, 0);
	end_both();
}

/* The bytes of one frame after the handshake, not delivered yet. */
static size_t hold_frame(uint8_t *out)
{
	size_t n;

	start("key", "key");
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
	send_finish(&a_, 42);
	n = take_sent(&a_);
	assert_true(n > sizeof(kvd_net_header_t) + KVD_NET_MAC && n < 256);
	memcpy(out, a_.sent + a_.sent_len - n, n);

	return n;
}

KV_TEST(p10_a_replayed_frame_ends_the_link)
{
	uint8_t frame[256];
	size_t n = hold_frame(frame);

	deliver(&b_, frame, n);
	assert_int_equal(b_.received, 1);
	deliver(&b_, frame, n);
	assert_int_equal(b_.received, 1);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_DEAD);
	end_both();
}

KV_TEST(p10_a_frame_left_out_ends_the_link)
{
	uint8_t frame[256];
	size_t n;

	(void)hold_frame(frame);
	send_finish(&a_, 43);
	n = take_sent(&a_);
	deliver(&b_, a_.sent + a_.sent_len - n, n);
	assert_int_equal(b_.received, 0);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_DEAD);
	end_both();
}

/* Every bit of a frame. One that makes it longer is waited for, and nothing comes of it. */
KV_TEST(p10_no_bit_of_a_frame_may_change)
{
	uint8_t frame[256];
	size_t n = hold_frame(frame);

	end_both();
	for (size_t bit = 0; bit < 8 * n; bit++) {
		assert_int_equal(hold_frame(frame), n);
		frame[bit / 8] ^= (uint8_t)(1u << bit % 8);
		deliver(&b_, frame, n);
		assert_int_equal(b_.received, 0);
		now_ += 2 * SILENCE_NS;
		step_link(&b_);
		assert_int_equal(kvd_link_state(b_.link), KVD_LINK_DEAD);
		end_both();
	}
}

KV_TEST(p10_a_frame_cut_anywhere_is_not_taken)
{
	uint8_t frame[256];
	size_t n = hold_frame(frame);

	end_both();
	for (size_t cut = 0; cut < n; cut++) {
		assert_int_equal(hold_frame(frame), n);
		deliver(&b_, frame, cut);
		assert_int_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
		close(b_.wire);
		step_link(&b_);
		assert_int_equal(b_.received, 0);
		assert_int_equal(kvd_link_status(b_.link), KV_ERR_CLOSED);
		b_.wire = -1;
		end_both();
	}
}

KV_TEST(p5_little_is_taken_before_the_handshake)
{
	kvd_net_header_t header = {.magic = KVD_NET_MAGIC,
				   .version = KVD_NET_VERSION,
				   .code = KVD_NET_HELLO,
				   .body = KVD_NET_EARLY_BODY + 1};

	side_init(&b_, "b", "key");
	now_ = kv_now_ns(&kv_env_posix);
	accept_link(&b_);
	deliver(&b_, &header, sizeof header);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_TOO_BIG);
	end_side(&b_);
}

KV_TEST(p5_a_link_on_which_nothing_is_heard_is_ended)
{
	now_ = kv_now_ns(&kv_env_posix);
	side_init(&b_, "b", "key");
	accept_link(&b_);
	step_link(&b_);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_ACCEPTED);
	now_ += KVD_LINK_HANDSHAKE_NS + UINT64_C(1000000000);
	step_link(&b_);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_TIMEOUT);
	end_side(&b_);

	start("key", "key");
	for (uint32_t i = 0; i < 20; i++) { /* PING and PONG keep it */
		now_ += SILENCE_NS / 2;
		carry(&a_, &b_);
		assert_int_equal(kvd_link_state(a_.link), KVD_LINK_OPEN);
		assert_int_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
	}
	now_ += 2 * SILENCE_NS; /* nothing is carried */
	step_link(&a_);
	step_link(&b_);
	assert_int_equal(kvd_link_status(a_.link), KV_ERR_TIMEOUT);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_TIMEOUT);
	end_both();
}

/* Whatever `opened` answers ends the link: a name that is taken. */
KV_TEST(p10_a_name_that_is_taken_is_refused)
{
	now_ = kv_now_ns(&kv_env_posix);
	side_init(&a_, "a", "key");
	side_init(&b_, "b", "key");
	b_.answers = KV_ERR_EXISTS;
	dial_link(&a_, "b");
	accept_link(&b_);
	carry(&a_, &b_);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_EXISTS);
	end_both();
}

KV_TEST(p10_the_name_of_another_daemon_is_refused)
{
	now_ = kv_now_ns(&kv_env_posix);
	side_init(&a_, "a", "key");
	side_init(&b_, "c", "key"); /* not whom the dialler means */
	dial_link(&a_, "b");
	accept_link(&b_);
	carry(&a_, &b_);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_NOT_FOUND);
	assert_int_equal(a_.opened + b_.opened, 0);
	end_both();
}

/* Nobody reads. That a transfer has ended is told when they do, or its owner would wait for the deadline. */
KV_TEST(p5_what_ends_a_transfer_waits_behind_a_full_queue)
{
	static uint8_t tail[1u << 20];
	const kvd_net_finish_t finish = {.id = 1};
	kv_status_t status = KV_OK;

	start("key", "key");
	for (uint32_t len = sizeof tail; len > 0; len /= 2) {
		const kvd_net_end_t end = {.tail = {tail, len}};

		for (status = KV_OK; status == KV_OK;) {
			status = kvd_link_send(a_.link, KVD_NET_END, &end);
		}
		assert_int_equal(status, KV_ERR_BUSY);
	}
	for (uint32_t i = 0; i < 10; i++) {
		assert_int_equal(kvd_link_send(a_.link, KVD_NET_FINISH, &finish), KV_OK);
	}
	assert_int_equal(kvd_link_state(a_.link), KVD_LINK_OPEN);
	end_both();
}

KV_TEST_MAIN(NULL, NULL)
