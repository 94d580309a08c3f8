/* Who gets a link of the net process: its side alone, with peers and strangers on sockets of the test's own. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/net.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
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
static int strangers_[STRANGERS];
static uint32_t addresses_[8], readies_; /* that we were sent: bytes of each */
static kvd_net_end_t end_;

static kv_slice_t find_key(void *ctx, const char *name)
{
	(void)ctx;
	(void)name;

	return kv_slice_str(KEY);
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
		addresses_[readies_++ % KV_COUNT_OF(addresses_)] = message->ready.ucx.len;
	} else if (code == KVD_NET_END) {
		end_ = message->end;
	}

	return code == KVD_NET_READY || code == KVD_NET_END ? KV_OK : KV_ERR_PROTO;
}

static const kvd_link_ops_t ops_ = {.find_key = find_key, .opened = on_opened, .received = on_received};

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
	snprintf(config_.peers.peers[0].key_path, sizeof config_.peers.peers[0].key_path, "%s", path);
	net_.config = &config_;
	net_.listen_fd = -1;
	net_.now_ns = kv_now_ns(&kv_env_posix);
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
	static const kvd_link_config_t config = {.name = "b", .ops = &ops_, .silence_ns = UINT64_C(60000000000)};
	const struct sockaddr_in to = listening();

	dialled_ = kvd_link_dial(&config, "a", (const struct sockaddr *)&to, sizeof to);
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

KV_TEST(p6_silent_strangers_keep_no_peer_out)
{
	start_net("127.0.0.1");
	add_strangers("127.0.0.1", STRANGERS); /* its own address: another program there */
	dial_as_peer();
	assert_int_equal(serve_peer(), KVD_LINK_OPEN);
	assert_true(net_.strangers <= 32);
	kvd_link_free(dialled_);
	close_strangers(STRANGERS);
	end_net();
}

/* It is slow to say its name, and meanwhile others come. */
KV_TEST(p6_a_configured_address_is_kept_before_strangers)
{
	int slow;

	start_net("127.0.0.2");
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
	end_net();
}

/* What the other side refuses before it has heard a name says nothing about this peer: the next try is soon. */
KV_TEST(p6_a_refusal_before_the_name_does_not_slow_dialling)
{
	struct sockaddr_in address = at("127.0.0.1", 0);
	socklen_t len = sizeof address;
	int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	kvd_net_peer_t *peer = &net_.peers[0];

	start_net("127.0.0.1");
	assert_int_equal(bind(other, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(other, 8), 0);
	assert_int_equal(getsockname(other, (struct sockaddr *)&address, &len), 0);
	snprintf(config_.peers.peers[0].port, sizeof config_.peers.peers[0].port, "%u", ntohs(address.sin_port));
	for (uint32_t tries = 0; tries < 20; tries++) {
		int fd;

		peer->retry_ns = net_.now_ns;
		kvd_net_peers_step(&net_);
		fd = accept(other, NULL, NULL);
		assert_true(fd >= 0);
		close(fd);
		while (peer->link) {
			kvd_net_peers_step(&net_);
		}
		assert_true(peer->retry_ns - net_.now_ns <= UINT64_C(200000000));
	}
	close(other);
	end_net();
}

/* It dials us: with our own key and name, as the peer that it expects. */
static void accept_as_peer(void)
{
	static const kvd_link_config_t config = {.name = "b", .ops = &ops_, .silence_ns = UINT64_C(60000000000)};
	struct sockaddr_in address = at("127.0.0.1", 0);
	socklen_t len = sizeof address;
	kvd_net_peer_t *peer = &net_.peers[0];
	int other = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), fd;

	assert_int_equal(bind(other, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(other, 8), 0);
	assert_int_equal(getsockname(other, (struct sockaddr *)&address, &len), 0);
	snprintf(config_.peers.peers[0].port, sizeof config_.peers.peers[0].port, "%u", ntohs(address.sin_port));
	peer->retry_ns = net_.now_ns;
	kvd_net_peers_step(&net_);
	fd = accept4(other, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	assert_true(fd >= 0);
	close(other);
	dialled_ = kvd_link_accept(&config, fd);
	assert_non_null(dialled_);
	for (uint32_t i = 0; i < STEPS && kvd_link_state(dialled_) != KVD_LINK_OPEN; i++) {
		kvd_net_peers_step(&net_);
		kvd_link_progress(dialled_, net_.now_ns);
	}
	assert_int_equal(kvd_link_state(dialled_), KVD_LINK_OPEN);
}

static kvd_peer_state_t say_ready(kv_slice_t address)
{
	const kvd_net_ready_t ready = {.ucx = address};

	assert_int_equal(kvd_link_send(dialled_, KVD_NET_READY, &ready), KV_OK);
	kvd_net_peers_step(&net_);

	return kvd_net_peer_state(&net_.peers[0]);
}

/* UCX, as main.c opens it; it stays. */
static void open_ucx(void)
{
	static const kvd_ucx_ops_t ops;
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
KV_TEST(p10_an_old_error_is_forgotten_once_the_link_is_up)
{
	kvd_net_peer_t *peer = &net_.peers[0];

	start_net("127.0.0.1");
	open_ucx();
	snprintf(peer->error, sizeof peer->error, "cannot connect: an old story");
	accept_as_peer();
	assert_int_equal(say_ready(kv_slice_str("an address")), KVD_PEER_UP);
	assert_string_equal(peer->error, "");
	kvd_link_free(dialled_);
	end_net();
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

KV_TEST(p6_a_bad_address_of_a_peer_ends_its_link_only)
{
	start_net("127.0.0.1");
	open_ucx();
	send_address(kv_slice_str("\2no address"));
	assert_null(net_.peers[0].inbound);
	assert_int_equal(net_.refused_frames, 1);
	assert_non_null(strstr(net_.peers[0].error, "UCX address"));
	kvd_link_free(dialled_);
	end_net();
}

/* It is connected, and nothing can come from it: it has no UCX, or none that leads here, which it finds out later. */
KV_TEST(p10_a_peer_that_cannot_send_is_not_up)
{
	const kv_slice_t none = {NULL, 0};

	start_net("127.0.0.1");
	accept_as_peer();
	assert_int_equal(kvd_net_peer_state(&net_.peers[0]), KVD_PEER_DIALLING);
	assert_int_equal(say_ready(none), KVD_PEER_NO_TRANSFERS);
	assert_non_null(strstr(net_.peers[0].error, "no transfers"));
	assert_int_equal(say_ready(kv_slice_str("an address")), KVD_PEER_NO_TRANSFERS); /* we have no UCX */
	open_ucx();
	assert_int_equal(say_ready(kv_slice_str("an address")), KVD_PEER_UP);
	assert_int_equal(say_ready(none), KVD_PEER_NO_TRANSFERS);
	kvd_link_free(dialled_);
	end_net();
}

/* The other side of it: UCX here has no transport to that peer, which is told, and asks in vain. */
KV_TEST(p10_a_peer_without_a_transport_is_told_so)
{
	static const uint8_t no_devices[] = {0x20, 1, 2, 3, 4, 5, 6, 7, 8, 0xff};
	const kvd_net_ask_t ask = {.id = 7, .layout = kv_slice_str(""), .ns = kv_slice_str("default")};

	readies_ = 0;
	start_net("127.0.0.1");
	open_ucx();
	send_address((kv_slice_t){no_devices, sizeof no_devices});
	assert_int_equal(kvd_link_send(dialled_, KVD_NET_ASK, &ask), KV_OK);
	for (uint32_t i = 0; i < STEPS && end_.id != ask.id; i++) {
		kvd_net_peers_step(&net_);
		kvd_link_progress(dialled_, net_.now_ns);
	}
	assert_non_null(net_.peers[0].inbound);
	assert_non_null(strstr(net_.peers[0].error, "no transport"));
	assert_int_equal(readies_, 2);
	assert_int_not_equal(addresses_[0], 0);
	assert_int_equal(addresses_[1], 0);
	assert_int_equal(end_.status, KV_ERR_UNREACHABLE);
	kvd_link_free(dialled_);
	end_net();
}

KV_TEST_MAIN(NULL, NULL)
