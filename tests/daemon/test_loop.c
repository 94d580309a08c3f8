/* The core loop among connections of two namespaces, on a clock that moves when it is looked at: how much is done for
 * one of them before the other. */
#include "daemon/host.h"

#include "kv_cmocka.h"
#include "kv_test.h"

#include <sys/resource.h>
#include <sys/socket.h>

#define CROWD        520u             /* connections of the other: more than one look at the sockets tells of */
#define PIPELINED    400u             /* requests on each of them */
#define A_LOOK       UINT64_C(1000)   /* ns that each look at the clock takes */
#define AN_ITERATION (20000u / 1000u) /* so no more requests are handled between two ticks of the core */

static uint64_t now_ns_ = 1000000;
static kvd_host_t *host_;

static uint64_t read_clock(void *ctx)
{
	(void)ctx;

	return now_ns_ += A_LOOK;
}

/* Refused, as the connection has not joined: the smallest of answers. */
static size_t make_request(uint8_t *out)
{
	const kv_frame_header_t header = {.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .code = KV_CODE_RELEASE};

	memcpy(out, &header, sizeof header);

	return sizeof header;
}

static void send_all(int fd, const void *data, size_t len)
{
	assert_int_equal(send(fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT), (ssize_t)len);
}

static int is_answered(int fd)
{
	uint8_t answer[4096];
	int fds[KV_WIRE_MAX_FDS];
	uint32_t count;
	size_t len;

	return kv_sock_recv(fd, answer, sizeof answer, &len, fds, &count) == KV_OK;
}

static int connect_to(uint32_t ns)
{
	const kv_msg_t hello = {.hello = {.version = KV_WIRE_VERSION, .program = kv_slice_str("test")}};
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .code = KV_CODE_HELLO};
	uint8_t bytes[512];
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
	kvd_session_open(host_, &host_->namespaces[ns], pair[0]);
	assert_int_equal(kv_body_encode(&kv_request_find(KV_CODE_HELLO)->ask, &hello, bytes + sizeof header,
					sizeof bytes - sizeof header, &header.body),
			 KV_OK);
	memcpy(bytes, &header, sizeof header);
	send_all(pair[1], bytes, sizeof header + header.body);

	return pair[1];
}

static uint64_t requests(void)
{
	return kv_metric_get(&host_->metrics, KV_M_REQUESTS);
}

KV_TEST(p8_a_request_waits_for_one_quantum_of_another_tenant_at_most)
{
	static uint8_t many[PIPELINED * sizeof(kv_frame_header_t)];
	struct rlimit files = {4096, 4096};
	kv_env_t env = kv_env_posix;
	int quiet, crowd[CROWD];
	size_t len = 0;

	env.now_ns = read_clock;
	(void)setrlimit(RLIMIT_NOFILE, &files);
	host_ = host_make(&env, "quiet,crowd");
	quiet = connect_to(0);
	for (uint32_t i = 0; i < CROWD; i++) {
		crowd[i] = connect_to(1);
	}
	while (requests() < CROWD + 1) {
		(void)kvd_loop_iterate(host_, 0);
	}
	assert_true(is_answered(quiet));
	for (uint32_t i = 0; i < PIPELINED; i++) {
		len += make_request(many + len);
	}
	for (uint32_t i = 0; i < CROWD; i++) {
		send_all(crowd[i], many, len);
	}
	for (uint32_t i = 0; i < 12; i++) { /* until epoll has told of all of them, and told again */
		(void)kvd_loop_iterate(host_, 0);
	}
	for (uint32_t i = 0; i < 200; i++) {
		uint64_t before = requests();

		send_all(quiet, many, sizeof(kv_frame_header_t));
		(void)kvd_loop_iterate(host_, 0);
		assert_true(is_answered(quiet));
		/* The other one goes on, too. */
		assert_in_range(requests() - before, 1 + 1, 1 + AN_ITERATION);
	}
	/* Connections end a few at a time. */
	for (uint32_t i = 0; i < CROWD; i++) {
		close(crowd[i]);
	}
	for (uint32_t i = 0; host_->session_count > 1; i++) {
		uint32_t before = host_->session_count;

		send_all(quiet, many, sizeof(kv_frame_header_t));
		(void)kvd_loop_iterate(host_, 0);
		assert_true(is_answered(quiet));
		assert_true(before - host_->session_count <= AN_ITERATION && i < 100000);
	}
	close(quiet);
}
