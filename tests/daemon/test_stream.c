/* Messages of blocks on a TLS connection, with somebody in between who changes, cuts and holds back its bytes. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/stream.h"

#include "kv/env.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>

#define MESSAGES  12u
#define LARGEST   (300u << 10)
#define UNTOUCHED UINT64_MAX
#define SILENCE   UINT64_C(5000000000)

/* One of the messages, at both ends. */
typedef struct message {
	uint8_t *sent, *landed;
	size_t bytes;
	int is_pushed, is_landed; /* it has ended there, */
	kv_status_t status[2];    /* so */
	int is_unwanted;
} message_t;

typedef struct end {
	int fd, wire; /* wire: the man in the middle's */
	kvd_tls_t *tls;
	kvd_stream_t *stream;
} end_t;

static end_t owner_, asker_;
static message_t messages_[MESSAGES];
static uint64_t passed_; /* bytes from the owner, since the handshake */
static uint64_t flip_at_, cut_at_;
static kvd_pair_key_t keys_[2];
static struct {
	uint32_t calls;
	uint64_t bytes;
	uint32_t singles; /* that send one byte each, */
	size_t most;      /* and what the others send at most; 0: all */
	int is_busy;      /* every second one is EAGAIN */
	uint64_t reset_at;
} sends_; /* of the owner */

/* ---- the kernel ------------------------------------------------------------------------------ */

ssize_t __real_send(int fd, const void *data, size_t len, int flags);
ssize_t __wrap_send(int fd, const void *data, size_t len, int flags);

ssize_t __wrap_send(int fd, const void *data, size_t len, int flags)
{
	const uint64_t left = sends_.reset_at - sends_.bytes;
	ssize_t n;

	if (fd != owner_.fd || !owner_.stream) {
		return __real_send(fd, data, len, flags);
	}
	sends_.calls++;
	if (left == 0 || (sends_.is_busy && sends_.calls % 2 == 0)) {
		errno = left == 0 ? ECONNRESET : EAGAIN;
		return -1;
	}
	len = sends_.calls <= sends_.singles ? 1 : sends_.most > 0 && len > sends_.most ? sends_.most : len;
	n = __real_send(fd, data, len < left ? len : (size_t)left, flags);
	sends_.bytes += n > 0 ? (uint64_t)n : 0;

	return n;
}

/* ---- the two ends ---------------------------------------------------------------------------- */

static void *land(void *ctx, const kvd_envelope_t *envelope, size_t bytes, void **p_object)
{
	message_t *message = &messages_[envelope->batch - 1];

	(void)ctx;
	assert_in_range(envelope->batch, 1, MESSAGES);
	assert_int_equal(envelope->ticket[3], envelope->batch + 3);
	assert_int_equal(bytes, message->bytes);
	*p_object = message;

	return message->is_unwanted ? NULL : message->landed;
}

static void landed(void *ctx, void *object, kv_status_t status)
{
	message_t *message = object;

	(void)ctx;
	assert_false(message->is_landed);
	message->is_landed = 1;
	message->status[1] = status;
}

static void pushed(void *ctx, void *object, kv_status_t status)
{
	message_t *message = object;

	(void)ctx;
	assert_false(message->is_pushed);
	message->is_pushed = 1;
	message->status[0] = status;
	memset(message->sent, 0xee, message->bytes); /* it is not read again */
}

static const kvd_bytes_ops_t ops_ = {.land = land, .landed = landed, .pushed = pushed};

static const kvd_pair_key_t *key_at(void *ctx, uint32_t index)
{
	(void)ctx;

	return index == 0 ? &keys_[1] : NULL;
}

/* ---- in between ------------------------------------------------------------------------------ */

/* 1: something was carried. */
static int carry(const end_t *from, const end_t *to, size_t most)
{
	uint8_t bytes[65536];
	ssize_t n = recv(from->wire, bytes, most < sizeof bytes ? most : sizeof bytes, MSG_DONTWAIT);

	if (n <= 0) {
		return 0;
	}
	if (from == &owner_ && from->stream) {
		if (flip_at_ >= passed_ && flip_at_ - passed_ < (uint64_t)n) {
			bytes[flip_at_ - passed_] ^= 1;
		}
		if (cut_at_ - passed_ < (uint64_t)n) {
			n = (ssize_t)(cut_at_ - passed_);
			(void)shutdown(to->wire, SHUT_WR);
			(void)shutdown(from->wire, SHUT_RD);
		}
		passed_ += (uint64_t)n;
	}
	for (ssize_t at = 0; at < n;) {
		ssize_t sent = send(to->wire, bytes + at, (size_t)(n - at), MSG_DONTWAIT | MSG_NOSIGNAL);

		if (sent < 0 && kvd_stream_state(to->stream) == KVD_STREAM_DEAD) {
			break;
		}
		if (sent < 0) {
			(void)kvd_stream_progress(to->stream, 0); /* it makes room */
			continue;
		}
		at += sent;
	}

	return 1;
}

/* Until nothing moves. */
static void run(size_t most)
{
	for (uint32_t idle = 0; idle < 2; idle++) { /* what was carried is looked at once more */
		int moved = kvd_stream_progress(owner_.stream, 0) | carry(&owner_, &asker_, most);

		moved |= kvd_stream_progress(asker_.stream, 0) | carry(&asker_, &owner_, most);
		idle = moved ? 0 : idle;
	}
}

static void open_end(end_t *end)
{
	int pair[2];

	memset(end, 0, sizeof *end);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
	end->fd = pair[0];
	end->wire = pair[1];
}

static void shake_hands(void)
{
	kv_status_t status[2] = {KV_PENDING, KV_PENDING};

	passed_ = 0;
	flip_at_ = cut_at_ = UNTOUCHED;
	memset(&sends_, 0, sizeof sends_);
	sends_.reset_at = UNTOUCHED;
	kvd_pair_key_init(&keys_[0], "asker", "owner", kv_slice_str("a key"));
	kvd_pair_key_init(&keys_[1], "owner", "asker", kv_slice_str("a key"));
	owner_.tls = kvd_tls_accept(owner_.fd, (kvd_key_ring_t){.at = key_at});
	asker_.tls = kvd_tls_dial(asker_.fd, &keys_[0]);
	assert_true(owner_.tls && asker_.tls);
	while (status[0] == KV_PENDING || status[1] == KV_PENDING) {
		status[0] = kvd_tls_handshake(asker_.tls);
		(void)carry(&asker_, &owner_, SIZE_MAX);
		status[1] = kvd_tls_handshake(owner_.tls);
		(void)carry(&owner_, &asker_, SIZE_MAX);
	}
	assert_int_equal(status[0] | status[1], KV_OK);
	owner_.stream = kvd_stream_open(&ops_, NULL, owner_.tls, owner_.fd, 1, SILENCE);
	asker_.stream = kvd_stream_open(&ops_, NULL, asker_.tls, asker_.fd, 0, SILENCE);
	assert_true(owner_.stream && asker_.stream);
}

static void open_streams(void)
{
	open_end(&owner_);
	open_end(&asker_);
	shake_hands();
}

static void close_streams(void)
{
	kvd_stream_free(owner_.stream);
	kvd_stream_free(asker_.stream);
	close(owner_.wire);
	close(asker_.wire);
}

/* ---- messages -------------------------------------------------------------------------------- */

static void fill(uint8_t *out, uint32_t message, size_t bytes)
{
	kv_test_rng_t rng = {.state = message + 1};

	kv_test_fill(&rng, out, bytes);
}

/* Of pieces of any size, that lie anywhere. */
static void push_messages(kv_test_rng_t *rng)
{
	for (uint32_t i = 0; i < MESSAGES; i++) {
		message_t *message = &messages_[i];
		const uint32_t count = 1 + (uint32_t)kv_test_below(rng, 9);
		kvd_envelope_t envelope = {.batch = i + 1};
		struct iovec runs[9];
		size_t at = 0;

		*message = (message_t){.sent = message->sent, .landed = message->landed};
		message->bytes = count + kv_test_below(rng, LARGEST - count);
		fill(message->sent, i, message->bytes);
		memset(message->landed, 0, LARGEST);
		for (uint32_t run = 0; run < count; run++) {
			const size_t rest = message->bytes - at - (count - run - 1);

			runs[run] = (struct iovec){message->sent + at,
						   run + 1 < count ? 1 + kv_test_below(rng, rest) : rest};
			at += runs[run].iov_len;
		}
		envelope.ticket[3] = (uint8_t)(i + 4);
		assert_int_equal(kvd_stream_push(owner_.stream, &envelope, runs, count, message), KV_OK);
	}
}

/* Whatever happened on the way: what has landed is right, and nothing is under way. Returns how many landed. */
static uint32_t check_messages(void)
{
	static uint8_t right[LARGEST];
	uint32_t whole = 0;

	for (uint32_t i = 0; i < MESSAGES; i++) {
		const message_t *message = &messages_[i];

		assert_true(message->is_pushed);
		if (message->is_landed && message->status[1] == KV_OK) {
			fill(right, i, message->bytes);
			assert_memory_equal(message->landed, right, message->bytes);
			assert_int_equal(message->status[0], KV_OK);
			whole++;
		}
	}

	return whole;
}

KV_TEST(p1_messages_on_a_stream_land_byte_for_byte)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	const size_t chunks[] = {SIZE_MAX, 1000, 16384};

	for (uint32_t i = 0; i < KV_COUNT_OF(chunks); i++) {
		open_streams();
		assert_int_equal(kvd_stream_state(asker_.stream), KVD_STREAM_WAITING);
		push_messages(&rng);
		run(chunks[i]);
		assert_int_equal(kvd_stream_state(asker_.stream), KVD_STREAM_OPEN);
		assert_int_equal(check_messages(), MESSAGES);
		close_streams();
	}
}

KV_TEST_BETWEEN(p1_a_message_that_nobody_wants_leaves_the_next_one_whole, open_streams(), close_streams())
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	push_messages(&rng);
	messages_[0].is_unwanted = messages_[5].is_unwanted = 1;
	run(SIZE_MAX);
	assert_int_equal(check_messages(), MESSAGES - 2);
	assert_false(messages_[0].is_landed || messages_[5].is_landed);
}

/* Where a record ends is the sender's affair. */
KV_TEST_BETWEEN(p1_messages_that_share_a_record_are_told_apart, open_streams(), close_streams())
{
	struct {
		kvd_envelope_t envelope;
		uint64_t bytes;
		uint8_t data[8];
	} both[2] = {{.envelope.batch = 1, .bytes = 8}, {.envelope.batch = 2, .bytes = 8, .data = "landed"}};
	size_t n = 0;

	run(SIZE_MAX);
	for (uint32_t i = 0; i < 2; i++) {
		both[i].envelope.ticket[3] = (uint8_t)(i + 4);
		messages_[i] = (message_t){
			.sent = messages_[i].sent, .landed = messages_[i].landed, .bytes = 8, .is_unwanted = i == 0};
	}
	assert_int_equal(kvd_tls_write(owner_.tls, both, sizeof both, &n), KV_OK);
	assert_int_equal(n, sizeof both);
	run(SIZE_MAX);
	assert_int_equal(kvd_stream_state(asker_.stream), KVD_STREAM_OPEN);
	assert_true(messages_[1].is_landed);
	assert_string_equal((const char *)messages_[1].landed, "landed");
}

/* One bit anywhere, of a record's head, its bytes or its tag. */
KV_TEST(p1_a_changed_byte_ends_the_stream_and_lands_nowhere)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	for (uint32_t round = 0; round < 60; round++) {
		uint32_t whole;

		open_streams();
		push_messages(&rng);
		flip_at_ = round < 20 ? round * 7 : kv_test_below(&rng, LARGEST);
		run(SIZE_MAX);
		assert_true(passed_ > flip_at_);
		(void)shutdown(asker_.wire, SHUT_WR); /* a length that was changed is waited for */
		(void)kvd_stream_progress(asker_.stream, 0);
		assert_int_equal(kvd_stream_state(asker_.stream), KVD_STREAM_DEAD);
		kvd_stream_free(owner_.stream); /* its pushes end with it */
		owner_.stream = NULL;
		whole = check_messages();
		assert_true(whole < MESSAGES && (whole == MESSAGES || !messages_[MESSAGES - 1].is_landed));
		close_streams();
	}
}

KV_TEST(p1_a_stream_that_is_cut_lands_no_part)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	for (uint32_t round = 0; round < 40; round++) {
		uint32_t parts = 0;

		open_streams();
		push_messages(&rng);
		cut_at_ = kv_test_below(&rng, 2 * LARGEST);
		run(SIZE_MAX);
		assert_int_equal(kvd_stream_state(asker_.stream), KVD_STREAM_DEAD);
		assert_int_equal(kvd_stream_status(asker_.stream), KV_ERR_CLOSED);
		kvd_stream_free(owner_.stream);
		owner_.stream = NULL;
		assert_true(check_messages() < MESSAGES);
		for (uint32_t i = 0; i < MESSAGES; i++) {
			parts += messages_[i].is_landed && messages_[i].status[1] != KV_OK;
		}
		assert_in_range(parts, 0, 1);
		close_streams();
	}
}

/* Whatever of it the socket takes at a time, also of what is left when nothing more is pushed. */
KV_TEST(p1_bytes_that_are_sent_in_parts_all_come_in_order)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	const size_t most[] = {0, 700, 16384, 100000};

	for (uint32_t i = 0; i < 2 * KV_COUNT_OF(most); i++) {
		open_streams();
		kvd_tls_set_records(owner_.tls, 3);
		sends_.most = most[i / 2];
		sends_.singles = 3000;
		sends_.is_busy = i % 2 == 0;
		push_messages(&rng);
		while (kvd_stream_events(owner_.stream) & POLLOUT) {
			run(SIZE_MAX);
		}
		assert_int_equal(check_messages(), MESSAGES);
		close_streams();
	}
}

/* A message that fits into the buffer. */
static void push_one(message_t *message)
{
	static uint8_t bytes[100000];
	const struct iovec run = {bytes, sizeof bytes};

	*message = (message_t){.sent = bytes, .bytes = sizeof bytes};
	assert_int_equal(kvd_stream_push(owner_.stream, &(kvd_envelope_t){.batch = 1}, &run, 1, message), KV_OK);
	(void)kvd_stream_progress(owner_.stream, 0);
	assert_true(message->is_pushed);
}

KV_TEST(p5_records_of_a_message_are_sent_in_one_call)
{
	message_t message;

	open_streams();
	run(SIZE_MAX);
	sends_.calls = 0;
	push_one(&message);
	assert_int_equal(sends_.calls, 1);
	close_streams();
}

KV_TEST(p1_a_reset_ends_every_push_and_lands_no_part)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	message_t message;

	for (uint32_t round = 0; round < 60; round++) {
		open_streams();
		sends_.reset_at = round < 30 ? (uint64_t)round * 5 : kv_test_below(&rng, LARGEST);
		push_messages(&rng);
		run(SIZE_MAX);
		assert_int_equal(kvd_stream_status(owner_.stream), KV_ERR_CLOSED);
		assert_true(check_messages() < MESSAGES);
		close_streams();
	}
	open_streams();
	run(SIZE_MAX);
	sends_.reset_at = sends_.bytes;
	push_one(&message); /* all of it is in the buffer */
	assert_int_equal(kvd_stream_status(owner_.stream), KV_ERR_CLOSED);
	close_streams();
}

/* AES-GCM must not see too many records under one key. */
KV_TEST_BETWEEN(p10_a_stream_renews_its_key, open_streams(), close_streams())
{
	kv_test_rng_t rng = {.state = kv_test_seed()};

	kvd_tls_set_records(owner_.tls, 3);
	for (uint32_t i = 0; i < 5; i++) {
		push_messages(&rng);
		run(i % 2 ? 5000 : SIZE_MAX);
		assert_int_equal(check_messages(), MESSAGES);
	}
	assert_true(kvd_tls_renewals(owner_.tls) > 5 * MESSAGES / 3);
	assert_int_equal(kvd_tls_renewals(asker_.tls), 0);
}

/* Links and other streams wait for no more than this. */
KV_TEST(p5_a_stream_does_a_bounded_part_at_a_time)
{
	static uint8_t bytes[8u << 20];
	const struct iovec run = {bytes, sizeof bytes};
	const int room = 32 << 20;
	message_t message = {.sent = bytes, .bytes = sizeof bytes};

	uint32_t calls = 0;

	open_streams();
	if (setsockopt(owner_.fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room) != 0) {
		kv_test_skip("room for 8 MiB in a socket needs CAP_NET_ADMIN");
	}
	assert_int_equal(kvd_stream_push(owner_.stream, &(kvd_envelope_t){.batch = 1}, &run, 1, &message), KV_OK);
	for (; !message.is_pushed; calls++) {
		(void)kvd_stream_progress(owner_.stream, 0);
	}
	assert_in_range(calls, 7, 9);
	close_streams();
}

KV_TEST_BETWEEN(p10_an_owner_that_is_told_something_ends_the_stream, open_streams(), close_streams())
{
	size_t n;

	run(SIZE_MAX);
	assert_int_equal(kvd_tls_write(asker_.tls, "x", 1, &n), KV_OK);
	run(SIZE_MAX);
	assert_int_equal(kvd_stream_status(owner_.stream), KV_ERR_PROTO);
}

KV_TEST_BETWEEN(p5_a_stream_without_an_answer_is_ended, open_streams(), close_streams())
{
	(void)kvd_stream_progress(asker_.stream, 1);
	(void)kvd_stream_progress(asker_.stream, 1 + KVD_STREAM_ANSWER_NS);
	assert_int_equal(kvd_stream_state(asker_.stream), KVD_STREAM_WAITING);
	(void)kvd_stream_progress(asker_.stream, 2 + KVD_STREAM_ANSWER_NS);
	assert_int_equal(kvd_stream_status(asker_.stream), KV_ERR_TIMEOUT);
}

/* ---- a peer that does not read --------------------------------------------------------------- */

static uint64_t now_;

/* Over TCP, whose two ends hold this much, about. */
static void open_on_tcp(int bytes)
{
	const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;

	owner_ = asker_ = (end_t){.wire = -1};
	assert_true(listener >= 0);
	assert_int_equal(bind(listener, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(listener, 1), 0);
	assert_int_equal(getsockname(listener, (struct sockaddr *)&address, &len), 0);
	asker_.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(setsockopt(asker_.fd, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes), 0);
	assert_int_equal(connect(asker_.fd, (struct sockaddr *)&address, len), 0);
	owner_.fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	assert_true(owner_.fd >= 0);
	assert_int_equal(setsockopt(owner_.fd, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes), 0);
	assert_int_equal(fcntl(asker_.fd, F_SETFL, O_NONBLOCK), 0);
	close(listener);
	shake_hands();
	now_ = kv_now_ns(&kv_env_posix);
}

/* Both sides, one part each. */
static void step_both(void)
{
	const uint64_t before = sends_.bytes;

	(void)kvd_stream_progress(asker_.stream, now_);
	(void)kvd_stream_progress(owner_.stream, now_);
	if (sends_.bytes > before) {
		now_ += SILENCE - SILENCE / 10; /* as slow as it may be */
	}
}

/* The socket takes no more, records of ours wait in the buffer, and nobody spins for them. */
static int is_stuck(void)
{
	struct pollfd room = {.fd = owner_.fd, .events = POLLOUT};
	const uint64_t before = sends_.bytes;

	return !kvd_stream_progress(owner_.stream, now_) && sends_.bytes == before && kvd_tls_wants_write(owner_.tls) &&
	       (kvd_stream_events(owner_.stream) & POLLOUT) && poll(&room, 1, 0) == 0;
}

/* With pushes that wait behind the buffer, or without: the one message is in it. */
static void push_to_a_peer_that_does_not_read(int with_pushes)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	const kvd_envelope_t envelope = {.batch = 1, .ticket = {[3] = 4}};
	message_t *message = &messages_[0];

	open_on_tcp(with_pushes ? 100000 : 8192); /* less than is pushed */
	KV_AWAIT((step_both(), kvd_stream_state(asker_.stream) == KVD_STREAM_OPEN));
	if (with_pushes) {
		push_messages(&rng);
	} else {
		for (uint32_t i = 0; i < MESSAGES; i++) {
			messages_[i] = (message_t){.sent = messages_[i].sent, .landed = messages_[i].landed};
		}
		message->bytes = 110000;
		fill(message->sent, 0, message->bytes);
		assert_int_equal(kvd_stream_push(owner_.stream, &envelope,
						 &(struct iovec){message->sent, message->bytes}, 1, message),
				 KV_OK);
	}
	KV_AWAIT(is_stuck());
	assert_int_equal(kvd_stream_state(owner_.stream), KVD_STREAM_OPEN);
	assert_true(with_pushes ? !messages_[MESSAGES - 1].is_pushed : message->is_pushed);
}

static uint32_t count_landed(void)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < MESSAGES; i++) {
		n += messages_[i].is_landed && messages_[i].status[1] == KV_OK;
	}

	return n;
}

KV_TEST(p1_a_peer_that_reads_again_gets_what_has_waited)
{
	static uint8_t right[LARGEST];

	for (int with_pushes = 0; with_pushes < 2; with_pushes++) {
		memset(messages_[0].landed, 0, LARGEST);
		push_to_a_peer_that_does_not_read(with_pushes);
		KV_AWAIT((step_both(), count_landed() == (with_pushes ? MESSAGES : 1)));
		assert_int_equal(kvd_stream_state(owner_.stream), KVD_STREAM_OPEN);
		if (with_pushes) {
			assert_int_equal(check_messages(), MESSAGES);
		} else {
			fill(right, 0, messages_[0].bytes);
			assert_memory_equal(messages_[0].landed, right, messages_[0].bytes);
		}
		close_streams();
	}
}

/* Every push ends, and memory that waits is not read again. */
static void expect_end(kv_status_t status, int with_pushes)
{
	assert_int_equal(kvd_stream_status(owner_.stream), status);
	for (uint32_t i = 0; i < (with_pushes ? MESSAGES : 1); i++) {
		assert_true(messages_[i].is_pushed);
		assert_true(messages_[i].status[0] == KV_OK || messages_[i].status[0] == KV_ERR_CLOSED);
	}
	assert_int_equal(messages_[with_pushes ? MESSAGES - 1 : 0].status[0], with_pushes ? KV_ERR_CLOSED : KV_OK);
	assert_int_equal(kvd_stream_fd(owner_.stream), -1);
	close_streams();
}

KV_TEST(p5_a_peer_that_stops_reading_is_cut_off)
{
	for (int with_pushes = 0; with_pushes < 2; with_pushes++) {
		push_to_a_peer_that_does_not_read(with_pushes);
		now_ += SILENCE - 1;
		(void)kvd_stream_progress(owner_.stream, now_);
		assert_int_equal(kvd_stream_state(owner_.stream), KVD_STREAM_OPEN);
		/* The kernel may have found room since. */
		KV_AWAIT((now_ += SILENCE + 1, (void)kvd_stream_progress(owner_.stream, now_),
			  kvd_stream_state(owner_.stream) == KVD_STREAM_DEAD));
		expect_end(KV_ERR_TIMEOUT, with_pushes);
	}
}

KV_TEST(p1_a_peer_that_leaves_ends_what_has_waited)
{
	for (int with_pushes = 0; with_pushes < 2; with_pushes++) {
		push_to_a_peer_that_does_not_read(with_pushes);
		kvd_stream_free(asker_.stream);
		asker_.stream = NULL;
		KV_AWAIT(((void)kvd_stream_progress(owner_.stream, now_),
			  kvd_stream_state(owner_.stream) == KVD_STREAM_DEAD));
		expect_end(KV_ERR_CLOSED, with_pushes);
	}
}

static int setup(void **state)
{
	(void)state;
	signal(SIGPIPE, SIG_IGN);
	for (uint32_t i = 0; i < MESSAGES; i++) {
		messages_[i].sent = malloc(LARGEST);
		messages_[i].landed = malloc(LARGEST);
		assert_true(messages_[i].sent && messages_[i].landed);
	}

	return 0;
}

static int teardown(void **state)
{
	(void)state;
	for (uint32_t i = 0; i < MESSAGES; i++) {
		free(messages_[i].landed);
	}

	return 0;
}

KV_TEST_MAIN(setup, teardown)
