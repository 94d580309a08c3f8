/* Who gets a link of the net process: its side alone, with peers and strangers on sockets of the test's own. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define KEY       "0123456789abcdef"
#define STRANGERS 200u
#define STEPS     2000u

static kvd_net_config_t config_;
static kvd_net_t net_;
static kvd_link_t *dialled_;
static kvd_pair_key_t key_; /* b's */
static int strangers_[STRANGERS];
static uint8_t ticket_[KVD_NET_TICKET]; /* of the last READY; */
static uint32_t ticket_len_, readies_;
static kvd_net_end_t end_;

static const kvd_pair_key_t *key_at(void *ctx, uint32_t index)
{
	(void)ctx;

	return index == 0 ? &key_ : NULL;
}

static kv_status_t on_opened(void *ctx, kvd_link_t *link)
{
	(void)ctx;
	(void)link;

	return KV_OK;
}

static kv_status_t on_received(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message)
{
	(void)ctx;
	(void)link;
	if (code == KVD_NET_READY) {
		readies_++;
		ticket_len_ = message->ready.ticket.len;
		memcpy(ticket_, message->ready.ticket.data, ticket_len_);
	} else if (code == KVD_NET_END) {
		end_ = message->end;
	}

	return code == KVD_NET_READY || code == KVD_NET_END ? KV_OK : KV_ERR_PROTO;
}

static kv_status_t on_bytes(void *ctx, kvd_link_t *link, const uint8_t ticket[KVD_NET_TICKET])
{
	(void)ctx;
	(void)link;
	(void)ticket;

	return KV_OK;
}

static const kvd_link_ops_t ops_ = {.opened = on_opened, .bytes = on_bytes, .received = on_received};

static kvd_link_config_t peer_config(void)
{
	return (kvd_link_config_t){
		.ops = &ops_, .silence_ns = UINT64_C(60000000000), .key = &key_, .ring = {.at = key_at}};
}

static struct sockaddr_in at(const char *host, in_port_t port)
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = port};

	assert_int_equal(inet_pton(AF_INET, host, &address.sin_addr), 1);

	return address;
}

static struct sockaddr_in listening(void)
{
	struct sockaddr_in address;
	socklen_t len = sizeof address;

	assert_int_equal(getsockname(net_.listen_fd, (struct sockaddr *)&address, &len), 0);

	return address;
}

/* The peer "b" is expected at this address. */
static void start_net(const char *peer_host)
{
	char path[] = "/tmp/kvd-links-XXXXXX", why[300];
	int fd = mkstemp(path);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, KEY, strlen(KEY)), (ssize_t)strlen(KEY));
	close(fd);
	memset(&config_, 0, sizeof config_);
	memset(&net_, 0, sizeof net_);
	config_.timeout_ns = UINT64_C(60000000000);
	config_.peers = (kvd_peers_config_t){.name = "a", .host = "127.0.0.1", .port = "0", .count = 1};
	snprintf(config_.peers.peers[0].name, sizeof config_.peers.peers[0].name, "b");
	snprintf(config_.peers.peers[0].host, sizeof config_.peers.peers[0].host, "%s", peer_host);
	snprintf(config_.peers.peers[0].port, sizeof config_.peers.peers[0].port, "1");
	snprintf(config_.peers.peers[0].key_path[0], sizeof path, "%s", path);
	config_.peers.peers[0].key_count = 1;
	kvd_pair_key_init(&key_, "b", "a", kv_slice_str(KEY));
	net_.config = &config_;
	net_.listen_fd = -1;
	kvd_net_set_time(&net_, kv_now_ns(&kv_env_posix));
	assert_int_equal(kvd_net_peers_open(&net_, why, sizeof why), KV_OK);
	assert_true(net_.listen_fd >= 0);
	net_.peers[0].retry_ns = UINT64_MAX; /* it does not dial, unless the test wants it */
	unlink(path);
}

static void end_net(void)
{
	kvd_net_peers_restart(&net_, "the test is over");
	net_.peers[0].retry_ns = UINT64_MAX;
	kvd_net_peers_step(&net_);
	assert_null(net_.inbound);
	assert_int_equal(net_.strangers, 0);
	close(net_.listen_fd);
}

/* A connection from this address, which says nothing. */
static int connect_from(const char *host)
{
	const struct sockaddr_in from = at(host, 0), to = listening();
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_true(fd >= 0);
	assert_int_equal(bind(fd, (const struct sockaddr *)&from, sizeof from), 0);
	assert_int_equal(connect(fd, (const struct sockaddr *)&to, sizeof to), 0);

	return fd;
}

/* They are accepted one by one. */
static void add_strangers(const char *host, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		strangers_[i] = connect_from(host);
		kvd_net_peers_step(&net_);
	}
}

static void close_strangers(uint32_t n)
{
	for (uint32_t i = 0; i < n; i++) {
		close(strangers_[i]);
	}
}

static void dial_as_peer(void)
{
	const kvd_link_config_t config = peer_config();
	const struct sockaddr_in to = listening();

	dialled_ = kvd_link_dial(&config, (const struct sockaddr *)&to, sizeof to);
	assert_non_null(dialled_);
}

static kvd_link_state_t serve_peer(void)
{
	for (uint32_t i = 0; i < STEPS && kvd_link_state(dialled_) != KVD_LINK_DEAD && !net_.peers[0].inbound; i++) {
		kvd_link_progress(dialled_, net_.now_ns);
		kvd_net_peers_step(&net_);
	}

	return kvd_link_state(dialled_);
}

KV_TEST_BETWEEN(p6_silent_strangers_keep_no_peer_out, start_net("127.0.0.1"), end_net())
{
	add_strangers("127.0.0.1", STRANGERS); /* its own address: another program there */
	dial_as_peer();
	assert_int_equal(serve_peer(), KVD_LINK_OPEN);
	assert_true(net_.strangers <= 32);
	kvd_link_free(dialled_);
	close_strangers(STRANGERS);
}

/* It is slow to say its name, and meanwhile others come. */
KV_TEST_BETWEEN(p6_a_configured_address_is_kept_before_strangers, start_net("127.0.0.2"), end_net())
{
	int slow;

	add_strangers("127.0.0.3", STRANGERS / 2);
	slow = connect_from("127.0.0.2");
	kvd_net_peers_step(&net_);
	close_strangers(STRANGERS / 2);
	add_strangers("127.0.0.3", STRANGERS);
	assert_int_equal(recv(slow, (char[1]){0}, 1, MSG_DONTWAIT), -1); /* not closed */
	assert_int_equal(errno, EAGAIN);
	assert_true(net_.refused_links >= STRANGERS - 32);
	close(slow);
	close_strangers(STRANGERS);
}

/* Where the peer listens: it takes connections, and closes them. */
static int listen_as_peer(void)
{
	struct sockaddr_in address = at("127.0.0.1", 0);
	socklen_t len = sizeof address;
	int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(bind(other, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(other, 8), 0);
	assert_int_equal(getsockname(other, (struct sockaddr *)&address, &len), 0);
	snprintf(config_.peers.peers[0].port, sizeof config_.peers.peers[0].port, "%u", ntohs(address.sin_port));

	return other;
}

static void refuse_dialler(int other)
{
	kvd_net_peer_t *peer = &net_.peers[0];
	int fd;

	peer->retry_ns = net_.now_ns;
	kvd_net_peers_step(&net_);
	fd = accept(other, NULL, NULL);
	assert_true(fd >= 0);
	close(fd);
	while (peer->link) {
		kvd_net_peers_step(&net_);
	}
}

/* What the other side refuses before it has heard a name says nothing about this peer: the next try is soon. */
KV_TEST_BETWEEN(p6_a_refusal_before_the_name_does_not_slow_dialling, start_net("127.0.0.1"), end_net())
{
	int other;

	other = listen_as_peer();
	for (uint32_t tries = 0; tries < 20; tries++) {
		refuse_dialler(other);
		assert_true(net_.peers[0].retry_ns - net_.now_ns <= UINT64_C(200000000));
	}
	close(other);
}

/* It dials us: with our own key and name, as the peer that it expects. */
static void accept_as_peer(void)
{
	kvd_link_config_t config = peer_config();
	kvd_net_peer_t *peer = &net_.peers[0];
	int other = listen_as_peer(), fd;

	peer->retry_ns = net_.now_ns;
	kvd_net_peers_step(&net_);
	fd = accept4(other, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	assert_true(fd >= 0);
	close(other);
	config.key = NULL;
	dialled_ = kvd_link_accept(&config, fd);
	assert_non_null(dialled_);
	for (uint32_t i = 0; i < STEPS && kvd_link_state(dialled_) != KVD_LINK_OPEN; i++) {
		kvd_net_peers_step(&net_);
		kvd_link_progress(dialled_, net_.now_ns);
	}
	assert_int_equal(kvd_link_state(dialled_), KVD_LINK_OPEN);
}

static kvd_peer_state_t say_ready(uint32_t ticket_len)
{
	const kvd_net_ready_t ready = {.ticket = {ticket_, ticket_len}};

	assert_int_equal(kvd_link_send(dialled_, KVD_NET_READY, &ready), KV_OK);
	kvd_net_peers_step(&net_);

	return kvd_net_peer_state(&net_.peers[0]);
}

/* UCX, as main.c opens it; it stays. */
static void open_ucx(void)
{
	static const kvd_bytes_ops_t ops;
	static kvd_ucx_t *ucx;
	const kvd_ucx_config_t config = {.transports = "tcp", .address = "127.0.0.1", .ops = &ops};
	char why[200];
	kv_status_t status = ucx ? KV_OK : kvd_ucx_open(&config, &ucx, why, sizeof why);

	if (status == KV_ERR_UNSUPPORTED) {
		kv_test_skip("%s", why);
	}
	assert_int_equal(status, KV_OK);
	net_.ucx = ucx;
}

/* kvctl peers shows what is wrong now. */
KV_TEST_BETWEEN(p10_an_old_error_is_forgotten_once_the_link_is_up, start_net("127.0.0.1"), end_net())
{
	kvd_net_peer_t *peer = &net_.peers[0];

	open_ucx();
	snprintf(peer->error, sizeof peer->error, "cannot connect: an old story");
	accept_as_peer();
	assert_int_equal(say_ready(0), KVD_PEER_UP);
	assert_string_equal(peer->error, "");
	kvd_link_free(dialled_);
}

/* The peer has the key, and sends this as the address of its worker. */
static void send_address(kv_slice_t address)
{
	const kvd_net_ready_t ready = {.ucx = address};

	dial_as_peer();
	assert_int_equal(serve_peer(), KVD_LINK_OPEN);
	assert_int_equal(kvd_link_send(dialled_, KVD_NET_READY, &ready), KV_OK);
	kvd_net_peers_step(&net_);
}

KV_TEST_BETWEEN(p6_a_bad_address_of_a_peer_ends_its_link_only, start_net("127.0.0.1"), end_net())
{
	open_ucx();
	send_address(kv_slice_str("\2no address"));
	assert_null(net_.peers[0].inbound);
	assert_int_equal(net_.refused_frames, 1);
	assert_non_null(strstr(net_.peers[0].error, "UCX address"));
	kvd_link_free(dialled_);
}

/* Where the other side says that bytes come over UCX, and there is none here. */
KV_TEST_BETWEEN(p10_a_peer_that_sends_over_what_we_have_not_is_not_up, start_net("127.0.0.1"), end_net())
{
	accept_as_peer();
	assert_int_equal(kvd_net_peer_state(&net_.peers[0]), KVD_PEER_DIALLING);
	assert_int_equal(say_ready(0), KVD_PEER_DOWN);
	kvd_link_free(dialled_);
}

static void step_both(void)
{
	kvd_link_progress(dialled_, net_.now_ns);
	kvd_net_peers_step(&net_);
}

/* The peer is connected, and has a ticket for its bytes. */
static void take_ticket(kv_slice_t ucx_address)
{
	readies_ = 0;
	send_address(ucx_address);
	for (uint32_t i = 0; i < STEPS && readies_ == 0; i++) {
		step_both();
	}
	assert_int_equal(readies_, 1);
}

/* UCX here has no transport to that peer: its bytes go as if it had none. */
KV_TEST_BETWEEN(p7_a_peer_without_a_transport_of_ucx_has_its_bytes_over_tls, start_net("127.0.0.1"), end_net())
{
	static const uint8_t no_devices[] = {0x20, 1, 2, 3, 4, 5, 6, 7, 8, 0xff};

	open_ucx();
	take_ticket((kv_slice_t){no_devices, sizeof no_devices});
	assert_int_equal(ticket_len_, KVD_NET_TICKET);
	assert_null(net_.peers[0].inbound->ep);
	kvd_link_free(dialled_);
}

/* A connection of the peer for bytes, with this ticket, until it is taken or refused. */
static kvd_link_t *dial_bytes(const uint8_t *ticket, uint32_t refused)
{
	const struct sockaddr_in to = listening();
	kvd_link_config_t config = peer_config();
	kvd_link_t *link;

	config.ticket = ticket;
	link = kvd_link_dial(&config, (const struct sockaddr *)&to, sizeof to);
	assert_non_null(link);
	for (uint32_t i = 0; i < STEPS && (net_.refused_proofs < refused || net_.strangers > 0 || i == 0); i++) {
		kvd_link_progress(link, net_.now_ns);
		step_both();
	}
	assert_int_equal(net_.refused_proofs, refused);

	return link;
}

KV_TEST_BETWEEN(p10_bytes_go_to_the_connection_that_has_the_ticket_and_to_one, start_net("127.0.0.1"), end_net())
{
	const kvd_net_ask_t ask = {.id = 7, .layout = kv_slice_str(""), .ns = kv_slice_str("default")};
	uint8_t wrong[KVD_NET_TICKET];
	kvd_link_t *links[3];

	take_ticket((kv_slice_t){NULL, 0});
	assert_int_equal(kvd_link_send(dialled_, KVD_NET_ASK, &ask), KV_OK);
	for (uint32_t i = 0; i < STEPS && end_.id != ask.id; i++) {
		step_both();
	}
	assert_int_equal(end_.status, KV_ERR_UNREACHABLE); /* there is none yet */
	memcpy(wrong, ticket_, sizeof wrong);
	wrong[15] ^= 1;
	links[0] = dial_bytes(wrong, 1);
	assert_null(net_.peers[0].inbound->stream);
	links[1] = dial_bytes(ticket_, 1);
	assert_non_null(net_.peers[0].inbound->stream);
	links[2] = dial_bytes(ticket_, 2);
	assert_int_equal(net_.strangers, 0);
	for (uint32_t i = 0; i < 3; i++) {
		kvd_link_free(links[i]);
	}
	kvd_link_free(dialled_);
}

/* ---- time in which the process stands still -------------------------------------------------- */

static void stand_still(void)
{
	kvd_net_set_time(&net_, net_.now_ns + 10 * config_.timeout_ns);
	kvd_net_peers_step(&net_);
}

/* How long it takes until the link has ended; the peer says all that it has to say on it. */
static uint64_t run_until_cut(int peer_runs)
{
	const uint64_t before = net_.now_ns;

	while (net_.inbound && net_.now_ns - before < 3 * config_.timeout_ns) {
		kvd_net_set_time(&net_, net_.now_ns + UINT64_C(50000000));
		if (peer_runs) {
			kvd_link_progress(dialled_, net_.peer_ns);
		}
		kvd_net_peers_step(&net_);
	}

	return net_.now_ns - before;
}

/* Stopped by a signal, or on a machine with too much to do: what a peer says, or reads, is not seen meanwhile. */
KV_TEST_BETWEEN(p6_a_peer_is_not_cut_off_for_time_that_this_side_stood_still, start_net("127.0.0.1"), end_net())
{
	dial_as_peer();
	assert_int_equal(serve_peer(), KVD_LINK_OPEN);
	stand_still();
	assert_non_null(net_.inbound);
	assert_in_range(run_until_cut(0), config_.timeout_ns / 2, 2 * config_.timeout_ns);
	assert_non_null(strstr(net_.peers[0].error, "nothing was heard"));
	kvd_link_free(dialled_);
}

KV_TEST_BETWEEN(p6_a_slow_reader_is_not_cut_off_for_time_that_this_side_stood_still, start_net("127.0.0.1"), end_net())
{
	static uint8_t bytes[32u << 20]; /* more than sockets hold */
	const struct iovec run = {bytes, sizeof bytes};
	kvd_link_t *link;

	take_ticket((kv_slice_t){NULL, 0});
	link = dial_bytes(ticket_, 0);
	assert_int_equal(kvd_stream_push(net_.peers[0].inbound->stream, &(kvd_envelope_t){.batch = 1}, &run, 1, NULL),
			 KV_OK);
	for (uint32_t i = 0; i < STEPS; i++) {
		kvd_net_peers_step(&net_); /* the sockets are full */
	}
	stand_still();
	assert_non_null(net_.inbound);
	assert_in_range(run_until_cut(1), config_.timeout_ns / 2, 2 * config_.timeout_ns);
	assert_non_null(strstr(net_.peers[0].error, "does not read"));
	kvd_link_free(link);
	kvd_link_free(dialled_);
}

/* ---- keys that change ------------------------------------------------------------------------ */

static void read_keys(uint32_t count, const char *const secrets[])
{
	char path[] = "/tmp/kvd-links-XXXXXX", why[300];

	config_.peers.peers[0].key_count = count;
	for (uint32_t k = 0; k < count; k++) {
		int fd = mkstemp(memcpy(path, "/tmp/kvd-links-XXXXXX", sizeof path));

		assert_true(fd >= 0);
		assert_int_equal(write(fd, secrets[k], strlen(secrets[k])), (ssize_t)strlen(secrets[k]));
		close(fd);
		snprintf(config_.peers.peers[0].key_path[k], sizeof path, "%s", path);
	}
	assert_int_equal(kvd_net_keys_read(&net_, &config_.peers, why, sizeof why), KV_OK);
	net_.rekeyed_ns = net_.now_ns;
	for (uint32_t k = 0; k < count; k++) {
		unlink(config_.peers.peers[0].key_path[k]);
	}
}

/* A link with the key before stays while that is there, ends when nothing is under way, or in time. */
KV_TEST_BETWEEN(p7_a_key_is_changed_under_a_link, start_net("127.0.0.1"), end_net())
{
	static const char *const both[] = {"another key of 16", KEY};
	kvd_net_peer_t *peer = &net_.peers[0];

	dial_as_peer();
	assert_int_equal(serve_peer(), KVD_LINK_OPEN);
	peer->serving = 1;
	read_keys(2, both);
	kvd_net_peers_step(&net_);
	assert_non_null(peer->inbound);
	read_keys(1, both);
	kvd_net_peers_step(&net_);
	assert_non_null(peer->inbound); /* a transfer is under way */
	net_.rekeyed_ns -= config_.timeout_ns + 1;
	kvd_net_peers_step(&net_);
	assert_null(peer->inbound);
	kvd_link_free(dialled_);
	peer->serving = 0;
	kvd_pair_key_init(&key_, "b", "a", kv_slice_str(both[0]));
	dial_as_peer();
	assert_int_equal(serve_peer(), KVD_LINK_OPEN);
	read_keys(1, both + 1);
	kvd_net_peers_step(&net_);
	assert_null(peer->inbound); /* at once: there is none */
	kvd_link_free(dialled_);
}

/* The other side does not have the first one yet. */
KV_TEST_BETWEEN(p7_the_key_before_is_dialled_with_where_the_new_one_is_refused, start_net("127.0.0.1"), end_net())
{
	static const char *const both[] = {"another key of 16", KEY};
	kvd_link_config_t config = peer_config();
	kvd_net_peer_t *peer = &net_.peers[0];
	int other;

	read_keys(2, both);
	other = listen_as_peer();
	assert_int_equal(fcntl(other, F_SETFL, O_NONBLOCK), 0);
	peer->retry_ns = net_.now_ns;
	config.key = NULL;
	dialled_ = NULL;
	for (uint32_t i = 0; i < STEPS && (!dialled_ || kvd_link_state(dialled_) != KVD_LINK_OPEN); i++) {
		int fd = accept4(other, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0) {
			kvd_link_free(dialled_);
			dialled_ = kvd_link_accept(&config, fd);
		}
		if (dialled_) {
			kvd_link_progress(dialled_, net_.now_ns);
		}
		kvd_net_peers_step(&net_);
	}
	assert_int_equal(kvd_link_state(dialled_), KVD_LINK_OPEN);
	assert_int_equal(peer->counts.breaks, 0); /* and nobody was told of it */
	close(other);
	kvd_link_free(dialled_);
}

/* Of the handshake of another version: said once. */
KV_TEST_BETWEEN(p10_a_peer_without_tls_is_counted, start_net("127.0.0.1"), end_net())
{
	int other;

	for (uint32_t i = 0; i < 2; i++) {
		int fd = connect_from("127.0.0.1");

		assert_int_equal(send(fd, "KNET\1\1\0\0", 8, MSG_NOSIGNAL), 8);
		for (uint32_t step = 0; step < STEPS && net_.refused_old <= i; step++) {
			kvd_net_peers_step(&net_);
		}
		assert_int_equal(net_.refused_old, i + 1);
		close(fd);
	}
	assert_int_equal(net_.refused_frames, 0);
	other = listen_as_peer();
	refuse_dialler(other);
	assert_non_null(strstr(net_.peers[0].error, "upgrade the other side"));
	close(other);
}

static int ignore_sigpipe(void **state)
{
	(void)state;
	signal(SIGPIPE, SIG_IGN); /* as main() does */

	return 0;
}

KV_TEST_MAIN(ignore_sigpipe, NULL)
