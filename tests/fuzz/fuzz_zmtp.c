/* A subscriber that says anything: the endpoint closes it or serves it, and the subscriber beside it gets every
 * message, byte for byte.
 *
 * Byte 0: bit 0 says the greeting first, bit 1 READY too. Then pieces: a length byte (0: 256), then that many bytes; a
 * message is published after each.
 */
#include "kv_test.h"

#include "io/events/zmtp.h"

#include "kv/env.h"
#include "kv/sock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define PIECES  32u
#define PAYLOAD 100u

static const uint8_t greeting_[64] = {0xff, [8] = 1, [9] = 0x7f, [10] = 3, [12] = 'N', 'U', 'L', 'L'};
static const uint8_t ready_[] = {4,   25,  5,   'R', 'E', 'A', 'D', 'Y', 11, 'S', 'o', 'c', 'k', 'e',
				 't', '-', 'T', 'y', 'p', 'e', 0,   0,   0,  3,   'S', 'U', 'B'};
static const uint8_t subscribe_[] = {0, 2, 1, 't'};
static kv_metrics_t metrics_;
static kvd_zmtp_t *zmtp_;
static int epoll_ = -1;
static char path_[64];
static uint64_t seq_;

static void serve(void)
{
	struct epoll_event events[8];
	int n;

	do {
		n = epoll_wait(epoll_, events, 8, 0);
		for (int i = 0; i < n; i++) {
			kvd_zmtp_ready(events[i].data.ptr, events[i].events);
		}
	} while (kvd_zmtp_flush(zmtp_) || n > 0);
}

static void send_bytes(int fd, const void *bytes, size_t n)
{
	(void)!send(fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT);
	serve();
}

static int connect_one(void)
{
	int fd = -1, error;

	kv_assert(kv_sock_connect(path_, &fd, &error) == KV_OK);
	serve();

	return fd;
}

static void discard(int fd)
{
	uint8_t bytes[4096];

	while (recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
	}
}

/* Publish one message; the good subscriber gets it whole, and nothing else. */
static void publish(int good)
{
	uint8_t payload[PAYLOAD], expected[256] = {1, 1, 't', 1, 8}, got[512];
	size_t n = 5;

	memset(payload, (int)(seq_ & 0xff), sizeof payload);
	for (uint32_t i = 0; i < 8; i++) {
		expected[n++] = (uint8_t)(seq_ >> (56 - 8 * i));
	}
	expected[n++] = 0;
	expected[n++] = PAYLOAD;
	memcpy(expected + n, payload, sizeof payload);
	n += sizeof payload;
	kvd_zmtp_put(zmtp_, seq_++, payload, sizeof payload);
	serve();
	kv_assert(recv(good, got, sizeof got, MSG_DONTWAIT) == (ssize_t)n && memcmp(got, expected, n) == 0);
}

static void open_endpoint(void)
{
	char why[200];

	snprintf(path_, sizeof path_, "/tmp/kvd-fuzz-zmtp-%d.sock", (int)getpid());
	epoll_ = epoll_create1(EPOLL_CLOEXEC);
	kv_assert(epoll_ >= 0);
	kv_assert(kvd_zmtp_open(&(kvd_zmtp_config_t){.path = path_,
						     .access = {0600, (gid_t)-1},
						     .topic = "t",
						     .log_bytes = 262144,
						     .max_subscribers = 4,
						     .epoll_fd = epoll_,
						     .metrics = &metrics_},
				&zmtp_, why, sizeof why) == KV_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	int good, bad;

	if (size == 0) {
		return 0;
	}
	open_endpoint();
	good = connect_one();
	bad = connect_one();
	send_bytes(good, greeting_, sizeof greeting_);
	send_bytes(good, ready_, sizeof ready_);
	send_bytes(good, subscribe_, sizeof subscribe_);
	discard(good);
	if (data[0] & 1) {
		send_bytes(bad, greeting_, sizeof greeting_);
	}
	if (data[0] & 2) {
		send_bytes(bad, ready_, sizeof ready_);
	}
	for (size_t at = 1, i = 0; at < size && i < PIECES; i++) {
		size_t n = data[at] ? data[at] : 256;

		at++;
		n = n < size - at ? n : size - at;
		send_bytes(bad, data + at, n);
		publish(good);
		at += n;
	}
	close(bad);
	publish(good);
	close(good);
	kvd_zmtp_close(zmtp_);
	close(epoll_);

	return 0;
}
