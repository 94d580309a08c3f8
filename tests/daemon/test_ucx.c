/* Addresses of UCX workers that a peer sends: right ones, and everything near them; and who may connect to one. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "net/ucx/admission.h"
#include "net/ucx/ucx.h"

#include <arpa/inet.h>
#include <linux/filter.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define PORT_BYTES 2u /* the end of a TCP address; another port is somebody else's */

static kvd_ucx_t *ours_, *theirs_;

static void *refuse_bytes(void *ctx, const kvd_envelope_t *envelope, size_t bytes, void **p_object)
{
	(void)ctx;
	(void)envelope;
	(void)bytes;
	(void)p_object;

	return NULL;
}

static kvd_ucx_t *open_ucx(void)
{
	static const kvd_bytes_ops_t ops = {.land = refuse_bytes};
	const kvd_ucx_config_t config = {.transports = "tcp", .address = "127.0.0.1", .ops = &ops};
	kvd_ucx_t *ucx = NULL;
	char why[200] = "";
	kv_status_t status = kvd_ucx_open(&config, &ucx, why, sizeof why);

	if (status == KV_ERR_UNSUPPORTED) {
		kv_test_skip("%s", why);
	}
	assert_int_equal(status, KV_OK);

	return ucx;
}

static void admit(kvd_ucx_t *ucx, const char *first, const char *second)
{
	const kvd_address_t from[2] = {kvd_address_parse(first), kvd_address_parse(second ? second : "")};

	assert_int_equal(kvd_ucx_admit(ucx, from, second ? 2 : 1), KV_OK);
}

/* Some systems let root alone do it; kvd has no UCX there. */
static int may_filter(void)
{
	struct sock_filter let_in = BPF_STMT(BPF_RET | BPF_K, UINT32_MAX);
	const struct sock_fprog program = {.len = 1, .filter = &let_in};
	const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	const int status = setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program);

	close(fd);

	return status == 0;
}

static int setup(void **state)
{
	(void)state;
	if (!may_filter()) {
		kv_test_skip("the system refuses this user a filter on a socket (SO_ATTACH_FILTER)");
	}
	ours_ = open_ucx();
	theirs_ = open_ucx();
	admit(ours_, "127.0.0.1", NULL);
	admit(theirs_, "127.0.0.1", NULL);

	return 0;
}

/* Connect to the first `len` bytes, which lie alone in their memory, and let go again. */
static kv_status_t try_address(const uint8_t *bytes, uint32_t len)
{
	uint8_t *alone = malloc(len ? len : 1);
	kvd_ucx_ep_t *ep = NULL;
	kv_status_t status;

	assert_non_null(alone);
	memcpy(alone, bytes, len);
	status = kvd_ucx_connect(ours_, (kv_slice_t){alone, len}, &ep);
	free(alone);
	assert_int_equal(status == KV_OK, ep != NULL);
	if (ep) {
		kvd_ucx_disconnect(ep);
	}
	for (uint32_t i = 0; i < 8; i++) {
		(void)kvd_ucx_progress(ours_);
		(void)kvd_ucx_progress(theirs_);
	}

	return status;
}

KV_TEST(p10_the_address_of_a_worker_is_taken)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);

	assert_int_equal(try_address(right.data, right.len), KV_OK);
}

KV_TEST(p6_an_address_that_is_cut_is_refused)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);

	for (uint32_t len = 0; len < right.len; len++) {
		assert_int_equal(try_address(right.data, len), KV_ERR_PROTO);
	}
}

KV_TEST(p6_an_address_with_more_behind_it_is_refused)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);
	uint8_t bytes[4096] = {0};

	memcpy(bytes, right.data, right.len);
	assert_int_equal(try_address(bytes, right.len + 1), KV_ERR_PROTO);
	assert_int_equal(try_address(bytes, sizeof bytes), KV_ERR_PROTO);
}

/* UCX pairs endpoints by the number of the worker. */
KV_TEST(p6_our_own_address_is_refused)
{
	const kv_slice_t own = kvd_ucx_address(ours_);

	assert_int_equal(try_address(own.data, own.len), KV_ERR_PROTO);
}

KV_TEST(p6_no_changed_byte_of_an_address_ends_the_process)
{
	const kv_slice_t right = kvd_ucx_address(theirs_);
	const uint8_t changes[] = {1, 2, 4, 8, 16, 32, 64, 128, 255};
	uint8_t bytes[4096];
	uint32_t refused = 0;

	for (uint32_t at = 0; at + PORT_BYTES < right.len; at++) {
		for (uint32_t i = 0; i < KV_COUNT_OF(changes); i++) {
			memcpy(bytes, right.data, right.len);
			bytes[at] ^= changes[i];
			refused += try_address(bytes, right.len) != KV_OK;
		}
	}
	assert_true(refused > 50);
}

KV_TEST(p6_no_address_of_garbage_ends_the_process)
{
	kv_test_rng_t rng = {.state = kv_test_seed()};
	uint8_t bytes[512];

	for (uint32_t i = 0; i < 2000; i++) {
		const uint32_t len = (uint32_t)(kv_test_rand(&rng) % sizeof bytes);

		for (uint32_t at = 0; at < len; at++) {
			bytes[at] = (uint8_t)kv_test_rand(&rng);
		}
		if (len > 0) {
			bytes[0] &= 0xf0; /* as far as its version it is one */
		}
		assert_int_not_equal(try_address(bytes, len), KV_OK);
	}
}

/* A connection to our worker from this address, begun. */
static int connect_from(const char *host)
{
	const kv_slice_t own = kvd_ucx_address(ours_);
	struct sockaddr_in from = {.sin_family = AF_INET}, to = {.sin_family = AF_INET};
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	assert_true(fd >= 0);
	assert_int_equal(inet_pton(AF_INET, host, &from.sin_addr), 1);
	assert_int_equal(inet_pton(AF_INET, "127.0.0.1", &to.sin_addr), 1);
	memcpy(&to.sin_port, own.data + own.len - PORT_BYTES, PORT_BYTES);
	assert_int_equal(bind(fd, (const struct sockaddr *)&from, sizeof from), 0);
	(void)connect(fd, (const struct sockaddr *)&to, sizeof to);

	return fd;
}

/* One that is let in is so before connect() returns, on loopback. */
static int is_let_in(int fd)
{
	struct tcp_info info;
	socklen_t len = sizeof info;

	assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &len), 0);
	assert_true(info.tcpi_state == TCP_ESTABLISHED || info.tcpi_state == TCP_SYN_SENT);

	return info.tcpi_state == TCP_ESTABLISHED;
}

/* It is waited for; those that were begun before have had their turn then. */
static int connect_peer(const char *host)
{
	int fd = connect_from(host);
	struct pollfd look = {.fd = fd, .events = POLLOUT};

	assert_int_equal(poll(&look, 1, 60000), 1);
	assert_true(is_let_in(fd));

	return fd;
}

KV_TEST(p6_strangers_do_not_reach_the_port_of_ucx)
{
	int strangers[2], peers[2];

	admit(ours_, "::1", "127.0.0.2");
	strangers[0] = connect_from("127.0.0.1");
	strangers[1] = connect_from("127.0.0.3");
	peers[0] = connect_peer("127.0.0.2");
	assert_false(is_let_in(strangers[0]));
	assert_false(is_let_in(strangers[1]));
	admit(ours_, "127.0.0.3", "127.0.0.2");
	peers[1] = connect_peer("127.0.0.3");
	for (uint32_t i = 0; i < 2; i++) {
		close(strangers[i]);
		close(peers[i]);
	}
	assert_int_equal(kvd_ucx_admit(ours_, NULL, 0), KV_OK);
	strangers[0] = connect_from("127.0.0.2");
	admit(theirs_, "127.0.0.1", "::1");
	assert_false(is_let_in(strangers[0]));
	close(strangers[0]);
}

/* The same filter, on a socket of version 6. */
KV_TEST(p6_strangers_of_ipv6_do_not_reach_it_either)
{
	struct sockaddr_in6 address = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
	socklen_t len = sizeof address;
	const int on = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	const kvd_admission_t ports = {.fds = {on}, .count = 1};
	const kvd_address_t other = kvd_address_parse("::2"), own = kvd_address_parse("::1");
	int stranger, peer;

	if (on < 0 || bind(on, (struct sockaddr *)&address, len) != 0) {
		kv_test_skip("this machine has no IPv6");
	}
	assert_int_equal(listen(on, 8), 0);
	assert_int_equal(getsockname(on, (struct sockaddr *)&address, &len), 0);
	assert_int_equal(kvd_admission_set(&ports, &other, 1), KV_OK);
	stranger = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	(void)connect(stranger, (struct sockaddr *)&address, len);
	assert_false(is_let_in(stranger));
	assert_int_equal(kvd_admission_set(&ports, (const kvd_address_t[]){other, own}, 2), KV_OK);
	peer = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_int_equal(connect(peer, (struct sockaddr *)&address, len), 0);
	close(stranger);
	close(peer);
	close(on);
}

KV_TEST_MAIN(setup, NULL)
