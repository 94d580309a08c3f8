/* The control channel between two daemons, with somebody in between who reads, keeps, changes and repeats every byte.
 */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/link.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <signal.h>
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
	kvd_pair_key_t key;
	uint32_t opened, received;
	uint64_t last;       /* id of the last message */
	kv_status_t answers; /* what `opened` answers */
	int wire;            /* the other end of its connection: the man in the middle's */
	uint8_t sent[KEEP];  /* everything that it has sent */
	size_t sent_len;
} side_t;

static side_t a_, b_; /* the dialler, the dialled */
static uint64_t now_;

static const kvd_pair_key_t *key_at(void *ctx, uint32_t index)
{
	return index == 0 ? &((const side_t *)ctx)->key : NULL;
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

/* No link of this test has said READY. */
static kv_status_t on_bytes(void *ctx, kvd_link_t *link, const uint8_t ticket[KVD_NET_TICKET])
{
	(void)ctx;
	(void)link;
	(void)ticket;

	return KV_ERR_SECRET;
}

static const kvd_link_ops_t ops_ = {.opened = on_opened, .bytes = on_bytes, .received = on_received};

static void side_init(side_t *side, const char *name, const char *peer, const char *key)
{
	memset(side, 0, sizeof *side);
	kvd_pair_key_init(&side->key, name, peer, kv_slice_str(key));
	side->config = (kvd_link_config_t){
		.ops = &ops_, .ctx = side, .silence_ns = SILENCE_NS, .ring = {.at = key_at, .ctx = side}};
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

static void dial_link(side_t *side)
{
	struct sockaddr_in address = {.sin_family = AF_INET};
	socklen_t len = sizeof address;
	int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	assert_int_equal(bind(listening, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(listening, 1), 0);
	assert_int_equal(getsockname(listening, (struct sockaddr *)&address, &len), 0);
	side->config.key = &side->key;
	side->link = kvd_link_dial(&side->config, (struct sockaddr *)&address, len);
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

static void init_both(const char *key_a, const char *key_b)
{
	now_ = kv_now_ns(&kv_env_posix);
	side_init(&a_, "a", "b", key_a);
	side_init(&b_, "b", "a", key_b);
}

static void start_both(void)
{
	dial_link(&a_);
	accept_link(&b_);
	carry(&a_, &b_);
}

static void start(const char *key_a, const char *key_b)
{
	init_both(key_a, key_b);
	start_both();
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

KV_TEST_BETWEEN(p10_two_that_have_the_key_talk_and_know_each_other, start("key", "key"), end_both())
{
	assert_int_equal(kvd_link_state(a_.link), KVD_LINK_OPEN);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
	assert_int_equal(a_.opened + b_.opened, 2);
	assert_string_equal(kvd_link_key(a_.link)->peer, "b");
	assert_string_equal(kvd_link_key(b_.link)->peer, "a");
	for (uint64_t id = 1; id <= 100; id++) {
		send_finish(&a_, id);
		carry(&a_, &b_);
		assert_int_equal(b_.last, id);
		send_finish(&b_, id);
		carry(&a_, &b_);
		assert_int_equal(a_.last, id);
	}
}

/* Neither side is open, for these reasons. */
static void check_refused(kv_status_t at_dialler, kv_status_t at_dialled)
{
	assert_int_equal(kvd_link_state(a_.link), KVD_LINK_DEAD);
	assert_int_equal(kvd_link_status(a_.link), at_dialler);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_DEAD);
	assert_int_equal(kvd_link_status(b_.link), at_dialled);
	assert_int_equal(a_.opened + b_.opened, 0);
	end_both();
}

KV_TEST(p10_a_wrong_key_opens_neither_side)
{
	start("key", "another");
	check_refused(KV_ERR_SECRET, KV_ERR_NOT_FOUND); /* its number is another, too */
	init_both("key", "key");
	a_.key.psk[31] ^= 1;
	start_both();
	check_refused(KV_ERR_SECRET, KV_ERR_SECRET);
}

/* With the right key. */
KV_TEST(p10_an_identity_is_the_configured_one_to_the_letter)
{
	const char *wrong[] = {
		"kvd b>a#%08x",  "kvd c>b#%08x",  "kvd a>c#%08x", "kvd a>b#%08x ", "kvd a>b#0%08x",
		"kvd a>b#0%07x", "kvd a>bb#%08x", "kvd a>b",      "a>b#%08x",      "KVD a>b#%08x",
	};

	for (uint32_t i = 0; i < KV_COUNT_OF(wrong); i++) {
		init_both("key", "key");
		snprintf(a_.key.to_peer, sizeof a_.key.to_peer, wrong[i], a_.key.number);
		start_both();
		check_refused(KV_ERR_SECRET, KV_ERR_NOT_FOUND);
	}
	init_both("key", "key");
	snprintf(a_.key.to_peer, sizeof a_.key.to_peer, "kvd a>b#%08x", a_.key.number + 1);
	start_both();
	check_refused(KV_ERR_SECRET, KV_ERR_NOT_FOUND);
}

/* Everything a dialler has ever said, said again by somebody without the key. */
KV_TEST_BETWEEN(p10_a_recorded_handshake_opens_nothing, start("key", "key"), end_both())
{
	side_t again;

	send_finish(&a_, 7);
	carry(&a_, &b_);
	assert_int_equal(b_.received, 1);
	side_init(&again, "b", "a", "key");
	accept_link(&again);
	deliver(&again, a_.sent, a_.sent_len);
	assert_int_equal(again.opened + again.received, 0);
	assert_int_equal(kvd_link_state(again.link), KVD_LINK_DEAD);
	assert_int_equal(kvd_link_status(again.link), KV_ERR_SECRET);
	end_side(&again);
}

/* What we say when we dial is of no use to be dialled. */
KV_TEST_BETWEEN(p10_a_hello_that_is_sent_back_is_refused, start("key", "key"), end_both())
{
	side_t mirror;

	side_init(&mirror, "a", "b", "key");
	accept_link(&mirror);
	deliver(&mirror, a_.sent, a_.sent_len);
	assert_int_equal(kvd_link_status(mirror.link), KV_ERR_NOT_FOUND);
	assert_int_equal(mirror.opened, 0);
	end_side(&mirror);
}

/* The bytes of one frame after the handshake, not delivered yet. */
static size_t hold_frame(uint8_t *out)
{
	size_t n;

	start("key", "key");
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_OPEN);
	send_finish(&a_, 42);
	n = take_sent(&a_);
	assert_in_range(n, sizeof(kvd_net_header_t) + 22, 255); /* what TLS 1.3 adds */
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

/* A hello of 100,000 bytes, in records of 16 KiB. */
KV_TEST(p5_little_is_taken_before_the_handshake)
{
	static uint8_t bytes[5 + 16384] = {22, 3, 1, 64, 0, 1, 1, 0x86, 0xa0};

	init_both("key", "key");
	accept_link(&b_);
	deliver(&b_, bytes, sizeof bytes);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_TOO_BIG);
	end_side(&b_);
}

/* One byte at a time, each soon after the one before. */
KV_TEST_BETWEEN(p5_a_slow_handshake_is_ended, init_both("key", "key"), end_both())
{
	dial_link(&a_);
	accept_link(&b_);
	step_link(&b_);
	while (take_sent(&a_) == 0) {
	}
	for (size_t i = 0; i + 1 < a_.sent_len && kvd_link_state(b_.link) != KVD_LINK_DEAD; i++) {
		now_ += KVD_LINK_HANDSHAKE_NS / 20;
		deliver(&b_, a_.sent + i, 1);
		assert_true(i < 21);
	}
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_TIMEOUT);
}

KV_TEST(p5_a_link_on_which_nothing_is_heard_is_ended)
{
	now_ = kv_now_ns(&kv_env_posix);
	side_init(&b_, "b", "a", "key");
	accept_link(&b_);
	step_link(&b_);
	assert_int_equal(kvd_link_state(b_.link), KVD_LINK_SHAKING);
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
KV_TEST_BETWEEN(p10_a_name_that_is_taken_is_refused, init_both("key", "key"), end_both())
{
	b_.answers = KV_ERR_EXISTS;
	start_both();
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_EXISTS);
}

KV_TEST(p10_the_name_of_another_daemon_is_refused)
{
	init_both("key", "key");
	side_init(&b_, "c", "a", "key"); /* not whom the dialler means */
	start_both();
	check_refused(KV_ERR_SECRET, KV_ERR_NOT_FOUND);
}

/* ---- others than kvd ------------------------------------------------------------------------- */

/* The HELLO of kvd before TLS. */
KV_TEST(p10_a_peer_without_tls_is_told_apart)
{
	const uint8_t hello[] = "KNET\1\1\0\0\x27\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x93\xa1"
				"a\xa1"
				"b\xc4\x20";

	init_both("key", "key");
	accept_link(&b_);
	deliver(&b_, hello, sizeof hello);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_VERSION);
	assert_true(kvd_link_is_old(b_.link));
	end_side(&b_);
	accept_link(&b_);
	deliver(&b_, "GET / HTTP/1.1\r\n\r\n", 18);
	assert_int_equal(kvd_link_status(b_.link), KV_ERR_PROTO);
	assert_false(kvd_link_is_old(b_.link));
	end_side(&b_);
}

/* Another program's TLS at the other end of a link's wire. */
static void shake_hands(SSL_CTX *context, side_t *side, int is_server)
{
	SSL *ssl = SSL_new(context);

	assert_non_null(ssl);
	assert_true(SSL_set_fd(ssl, side->wire));
	is_server ? SSL_set_accept_state(ssl) : SSL_set_connect_state(ssl);
	for (uint32_t i = 0; i < 1000 && kvd_link_state(side->link) != KVD_LINK_DEAD; i++) {
		(void)SSL_do_handshake(ssl);
		step_link(side);
	}
	assert_int_equal(side->opened, 0);
	SSL_free(ssl);
	SSL_CTX_free(context);
}

KV_TEST(p10_a_client_of_tls_without_our_key_is_refused)
{
	static const struct {
		int version;
		kv_status_t status;
	} cases[] = {{TLS1_2_VERSION, KV_ERR_VERSION}, {TLS1_3_VERSION, KV_ERR_NOT_FOUND}};

	for (uint32_t i = 0; i < KV_COUNT_OF(cases); i++) {
		SSL_CTX *context = SSL_CTX_new(TLS_client_method());

		assert_non_null(context);
		assert_true(SSL_CTX_set_max_proto_version(context, cases[i].version));
		init_both("key", "key");
		accept_link(&b_);
		shake_hands(context, &b_, 0);
		assert_int_equal(kvd_link_status(b_.link), cases[i].status);
		end_side(&b_);
	}
}

static SSL_CTX *server_with_certificate(void)
{
	SSL_CTX *context = SSL_CTX_new(TLS_server_method());
	EVP_PKEY *key = EVP_EC_gen("P-256");
	X509 *certificate = X509_new();

	assert_true(context && key && certificate);
	assert_true(X509_set_pubkey(certificate, key));
	assert_non_null(X509_gmtime_adj(X509_getm_notBefore(certificate), 0));
	assert_non_null(X509_gmtime_adj(X509_getm_notAfter(certificate), 3600));
	assert_true(X509_sign(certificate, key, EVP_sha256()) > 0);
	assert_true(SSL_CTX_use_certificate(context, certificate) && SSL_CTX_use_PrivateKey(context, key));
	X509_free(certificate);
	EVP_PKEY_free(key);

	return context;
}

KV_TEST(p10_a_server_with_a_certificate_is_no_peer)
{
	init_both("key", "key");
	dial_link(&a_);
	shake_hands(server_with_certificate(), &a_, 1);
	assert_int_equal(kvd_link_status(a_.link), KV_ERR_SECRET);
	end_side(&a_);
}

/* ---- a full queue ---------------------------------------------------------------------------- */

/* Nobody reads. That a transfer has ended is told when they do, or its owner would wait for the deadline. */
KV_TEST_BETWEEN(p5_what_ends_a_transfer_waits_behind_a_full_queue, start("key", "key"), end_both())
{
	static uint8_t tail[1u << 20];
	const kvd_net_finish_t finish = {.id = 1};
	kv_status_t status = KV_OK;

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
}

static int ignore_sigpipe(void **state)
{
	(void)state;
	signal(SIGPIPE, SIG_IGN); /* as main() does */

	return 0;
}

KV_TEST_MAIN(ignore_sigpipe, NULL)
