/* Subscribers that mean no good: what an endpoint costs is bounded by its options, whatever they do. Raw sockets, so
 * that nothing of a library is in the way. */
#include "daemon/raw.h"

#include "io/events/events.h"
#include "kv/sock.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#ifdef __SANITIZE_THREAD__ /* its shadow of each byte counts too */
#define SHADOW 6u
#else
#define SHADOW 1u
#endif

#define LOG_BYTES   (4u << 20)
#define BUDGET      (SHADOW * (LOG_BYTES + LOG_BYTES / 16 + RING_BYTES * 2 + (8u << 20))) /* and what a process breathes */
#define RING_BYTES  (1u << 20)
#define SUBSCRIBERS 8u
#define HASHES      256u

static kv_metrics_t metrics_;
static kvd_publisher_t *publisher_;
static char dir_[64];
static uint64_t hashes_[HASHES];

static uint64_t resident(void)
{
	char line[128];
	unsigned long long kib = 0;
	FILE *file = fopen("/proc/self/status", "re");

	assert_non_null(file);
	while (fgets(line, sizeof line, file)) {
		(void)sscanf(line, "VmRSS: %llu", &kib);
	}
	fclose(file);

	return kib * 1024;
}

static void begin(void)
{
	static kvd_options_t options;
	const kvd_publisher_config_t config = {.options = &options,
					       .buffer_bytes = RING_BYTES,
					       .log_bytes = LOG_BYTES,
					       .max_subscribers = SUBSCRIBERS,
					       .tokens = 1,
					       .metrics = &metrics_};
	char detail[256];

	memset(&metrics_, 0, sizeof metrics_);
	memset(hashes_, 0xff, sizeof hashes_); /* the longest numbers */
	kv_test_dir_make(dir_, sizeof dir_);
	snprintf(options.run_dir, sizeof options.run_dir, "%s", dir_);
	snprintf(options.namespaces, sizeof options.namespaces, "a");
	snprintf(options.events_topic, sizeof options.events_topic, "kv@{namespace}");
	assert_int_equal(kvd_publisher_open(&config, &publisher_, detail, sizeof detail), KV_OK);
}

static void finish(void)
{
	kvd_publisher_close(publisher_);
	kv_test_dir_remove(dir_);
}

static int reaches(kv_metric_t metric, uint64_t value)
{
	for (int i = 0; i < RAW_TIMEOUT_MS && kv_metric_get(&metrics_, metric) < value; i++) {
		usleep(1000);
	}

	return kv_metric_get(&metrics_, metric) >= value;
}

/* ---- a subscriber by hand -------------------------------------------------------------------- */

static int dial(void)
{
	char path[128];
	int fd, error;

	snprintf(path, sizeof path, "%s/a.events", dir_);
	while (kv_sock_connect(path, &fd, &error) != KV_OK) { /* its queue of connections may be full */
		assert_int_equal(error, EAGAIN);
		sched_yield();
	}

	return fd;
}

/* All of it, waiting while the socket is full. 0: the endpoint has closed. */
static int send_bytes(int fd, const void *bytes, size_t n)
{
	size_t done = 0;

	while (done < n) {
		ssize_t sent = send(fd, (const uint8_t *)bytes + done, n - done, MSG_NOSIGNAL);
		struct pollfd wait = {.fd = fd, .events = POLLOUT};

		if (sent < 0 && errno != EAGAIN) {
			return 0;
		}
		if (sent < 0) {
			assert_int_equal(poll(&wait, 1, RAW_TIMEOUT_MS), 1);
			continue;
		}
		done += (size_t)sent;
	}

	return 1;
}

/* n bytes; 0: the endpoint has closed. */
static int hear(int fd, void *out, size_t n)
{
	size_t done = 0;

	while (done < n) {
		struct pollfd wait = {.fd = fd, .events = POLLIN};
		ssize_t got;

		assert_int_equal(poll(&wait, 1, RAW_TIMEOUT_MS), 1);
		got = recv(fd, (uint8_t *)out + done, n - done, 0);
		if (got == 0 || (got < 0 && errno != EAGAIN)) {
			return 0;
		}
		done += got > 0 ? (size_t)got : 0;
	}

	return 1;
}

static int is_closed(int fd)
{
	uint8_t byte;

	while (hear(fd, &byte, 1)) {
	}

	return 1;
}

static int greet(void)
{
	static const uint8_t greeting[64] = {0xff, [8] = 1, [9] = 0x7f, [10] = 3, [11] = 1, [12] = 'N', 'U', 'L', 'L'};
	static const uint8_t ready[] = {4,   25,  5,   'R', 'E', 'A', 'D', 'Y', 11, 'S', 'o', 'c', 'k', 'e',
					't', '-', 'T', 'y', 'p', 'e', 0,   0,   0,  3,   'S', 'U', 'B'};
	uint8_t answer[64 + sizeof ready];
	int fd = dial();

	assert_true(send_bytes(fd, greeting, sizeof greeting) && send_bytes(fd, ready, sizeof ready));
	assert_true(hear(fd, answer, sizeof answer));
	assert_memory_equal(answer + 64 + sizeof ready - 3, "PUB", 3);

	return fd;
}

static void ping(int fd)
{
	static const uint8_t ask[] = {4, 9, 4, 'P', 'I', 'N', 'G', 0, 0, 'h', 'i'};
	uint8_t answer[9];

	assert_true(send_bytes(fd, ask, sizeof ask) && hear(fd, answer, sizeof answer));
	assert_memory_equal(answer, "\4\7\4PONGhi", sizeof answer);
}

/* Subscribed when it returns: the answer to a heartbeat comes after. */
static int subscribed(void)
{
	static const uint8_t everything[] = {0, 1, 1};
	int fd = greet();

	assert_true(send_bytes(fd, everything, sizeof everything));
	ping(fd);

	return fd;
}

/* One frame into `out`; its length. */
static size_t frame(int fd, uint8_t *out, size_t cap, int *p_more)
{
	uint8_t head[9] = {0};
	uint64_t len = 0;
	size_t n;

	assert_true(hear(fd, head, 2));
	assert_true(head[0] <= 3);
	n = head[0] & 2 ? 8 : 1;
	assert_true(hear(fd, head + 2, n - 1));
	for (size_t i = 1; i <= n; i++) {
		len = len << 8 | head[i];
	}
	assert_true(len <= cap && hear(fd, out, len));
	*p_more = head[0] & 1;

	return len;
}

/* Topic, number, payload: whole, and of at most 64 KiB. Returns the number. */
static uint64_t message(int fd, uint8_t payload[65536], size_t *p_len)
{
	uint8_t head[64];
	uint64_t seq = 0;
	int more;

	assert_int_equal(frame(fd, head, sizeof head, &more), 4);
	assert_true(more && memcmp(head, "kv@a", 4) == 0);
	assert_int_equal(frame(fd, head, sizeof head, &more), 8);
	assert_true(more);
	for (int i = 0; i < 8; i++) {
		seq = seq << 8 | head[i];
	}
	*p_len = frame(fd, payload, 65536, &more);
	assert_true(!more && *p_len + 64 <= 65536);

	return seq;
}

/* `count` messages of about 39 KiB each that the publisher has taken. */
static void publish(uint32_t count)
{
	const kvd_event_t event = {
		.type = KVD_EVENT_REMOVED, .ns = "a", .medium = KV_TIER_CPU, .count = HASHES, .hashes = hashes_};

	for (uint32_t i = 0; i < count; i++) {
		uint64_t done = kv_metric_get(&metrics_, KV_M_EVENTS);

		for (int e = 0; e < 16; e++) {
			kvd_publisher_event(publisher_, &event);
		}
		kvd_publisher_commit(publisher_);
		assert_true(reaches(KV_M_EVENTS, done + 1));
	}
}

/* ---- what they try --------------------------------------------------------------------------- */

KV_TEST_BETWEEN(p5_subscribers_that_never_read_share_one_buffer, begin(), finish())
{
	uint64_t before;
	int fds[SUBSCRIBERS];

	publish(1);
	before = resident();
	for (uint32_t i = 0; i < SUBSCRIBERS; i++) {
		fds[i] = subscribed();
	}
	publish(4096); /* 160 MiB, for each of them */
	assert_in_range(resident() - before, 0, BUDGET);
	assert_true(kv_metric_get(&metrics_, KV_M_EVENTS_MISSED) > 0);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_EVENTS_LOST), 0);
	for (uint32_t i = 0; i < SUBSCRIBERS; i++) {
		close(fds[i]);
	}
}

/* The message it was in the midst of comes whole, then the oldest that is left. */
KV_TEST_BETWEEN(p9_a_slow_subscriber_gets_whole_messages_and_sees_the_gap, begin(), finish())
{
	static uint8_t payload[65536];
	uint64_t seq, next = 0, gaps = 0;
	size_t len;
	int fd;

	fd = subscribed();
	publish(1000);
	do {
		seq = message(fd, payload, &len);
		assert_true(seq >= next);
		gaps += seq > next;
		next = seq + 1;
	} while (next < 1000);
	assert_int_equal(gaps, 1);
	ping(fd);
	publish(1);
	assert_int_equal(message(fd, payload, &len), 1000);
	close(fd);
}

KV_TEST_BETWEEN(p5_a_frame_is_refused_when_it_is_announced, begin(), finish())
{
	static const uint8_t huge[] = {2, 0, 0, 0, 0, 0x80, 0, 0, 0}, topic[65536];
	uint64_t before;
	int fd;

	before = resident();
	fd = greet();
	if (send_bytes(fd, huge, sizeof huge)) {
		for (int i = 0; i < 1024 && send_bytes(fd, topic, sizeof topic); i++) {
		}
	}
	assert_true(is_closed(fd));
	assert_in_range(resident() - before, 0, BUDGET);
	assert_true(reaches(KV_M_SUBSCRIBERS_REFUSED, 1));
	close(fd);
}

KV_TEST_BETWEEN(p5_subscriptions_cost_nothing_however_many, begin(), finish())
{
	static uint8_t one[2 + 256];
	kv_test_rng_t rng = {kv_test_seed()};
	uint64_t before;
	int fd;

	fd = greet();
	before = resident();
	one[1] = 255;
	for (uint32_t i = 0; i < 20000; i++) { /* as many topics, none like another */
		kv_test_fill(&rng, one + 3, 254);
		one[2] = 1;
		assert_true(send_bytes(fd, one, 2 + 255));
	}
	ping(fd);
	assert_in_range(resident() - before, 0, BUDGET);
	close(fd);
}

KV_TEST_BETWEEN(p5_a_thousand_connections_cost_no_more_than_the_limit, begin(), finish())
{
	static uint8_t payload[65536];
	static int fds[1000];
	uint64_t before;
	size_t len;
	int fd;

	before = resident();
	for (uint32_t i = 0; i < 1000; i++) {
		fds[i] = dial();
	}
	assert_true(reaches(KV_M_SUBSCRIBERS_REFUSED, 1000 - SUBSCRIBERS));
	assert_in_range(resident() - before, 0, BUDGET);
	for (uint32_t i = 0; i < 1000; i++) {
		close(fds[i]);
	}
	do { /* there is room as soon as they have gone */
		uint8_t byte;

		fd = dial();
		if (hear(fd, &byte, 1)) {
			break;
		}
		close(fd);
	} while (1);
	close(fd);
	fd = subscribed();
	publish(1);
	(void)message(fd, payload, &len);
	close(fd);
}

KV_TEST_BETWEEN(p10_who_speaks_another_protocol_is_closed, begin(), finish())
{
	static const char *const words[] = {"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: "
					    "somebody-who-is-lost/1.0\r\n\r\n", /* 64 bytes and more */
					    "\377\0\0\0\0\0\0\0\1\177\1\0some old version of the protocol, filled up "
					    "to 64 bytes and more",
					    "\377\0\0\0\0\0\0\0\1\177\3\0CURVE\0......................................."
					    "...................."};
	static const size_t lens[] = {71, 76, 76};

	for (size_t i = 0; i < KV_COUNT_OF(words); i++) {
		int fd = dial();

		assert_true(send_bytes(fd, words[i], lens[i]));
		assert_true(is_closed(fd));
		close(fd);
	}
	assert_int_equal(kv_metric_get(&metrics_, KV_M_SUBSCRIBERS_REFUSED), 3);
}

/* A whole conversation with bytes of it changed, left out or said twice. */
KV_TEST_BETWEEN(p6_garbage_ends_only_its_own_subscriber, begin(), finish())
{
	static const uint8_t talk[] = {255, 0,   0,        0,   0,   0,   0,   0,   1,   127, 3,   1,   'N', 'U',
				       'L', 'L', [64] = 4, 25,  5,   'R', 'E', 'A', 'D', 'Y', 11,  'S', 'o', 'c',
				       'k', 'e', 't',      '-', 'T', 'y', 'p', 'e', 0,   0,   0,   3,   'S', 'U',
				       'B', 0,   1,        1,   4,   12,  9,   'S', 'U', 'B', 'S', 'C', 'R', 'I',
				       'B', 'E', 'k',      'v', 4,   9,   4,   'P', 'I', 'N', 'G', 0,   0,   'h',
				       'i', 4,   7,        6,   'C', 'A', 'N', 'C', 'E', 'L', 0,   1,   0};
	kv_test_rng_t rng = {kv_test_seed()};
	int watch, fd;

	watch = greet();
	for (uint32_t round = 0; round < 3000; round++) {
		uint8_t said[2 * sizeof talk];
		size_t n = 0;

		for (size_t i = 0; i < sizeof talk; i++) {
			uint64_t luck = kv_test_below(&rng, 200);

			said[n] = luck == 0 ? (uint8_t)kv_test_rand(&rng) : talk[i];
			n += luck != 1;
			if (luck == 2) {
				said[n] = said[n - 1];
				n++;
			}
		}
		fd = dial();
		(void)send_bytes(fd, said, n);
		publish(round % 100 == 0);
		close(fd);
	}
	ping(watch);
	close(watch);
}

/* ---- large batches --------------------------------------------------------------------------- */

static void expect(kv_mp_reader_t *r, kv_mp_type_t type, kv_mp_item_t *item)
{
	assert_int_equal(kv_mp_next(r, item), KV_OK);
	assert_int_equal(item->type, type);
}

/* The only event of a message: it goes on where the last one ended. */
static uint32_t check_piece(const uint8_t *payload, size_t len, const kvd_event_t *whole, uint32_t at)
{
	kv_mp_reader_t r = {payload, payload + len};
	uint32_t count = 0, tokens = 0;
	kv_mp_item_t key, item;

	expect(&r, KV_MP_ARRAY, &item);
	expect(&r, KV_MP_FLOAT, &item);
	expect(&r, KV_MP_ARRAY, &item);
	assert_int_equal(item.len, 1);
	expect(&r, KV_MP_MAP, &item);
	for (uint32_t pairs = item.len; pairs > 0; pairs--) {
		expect(&r, KV_MP_STR, &key);
		if (key.len == 12 && memcmp(key.data, "block_hashes", 12) == 0) {
			expect(&r, KV_MP_ARRAY, &item);
			count = item.len;
			for (uint32_t i = 0; i < count; i++) {
				expect(&r, KV_MP_UINT, &item);
				assert_int_equal(item.value, whole->hashes[at + i]);
			}
		} else if (key.len == 9 && memcmp(key.data, "token_ids", 9) == 0) {
			expect(&r, KV_MP_ARRAY, &item);
			tokens = item.len;
			for (uint32_t i = 0; i < tokens; i++) {
				expect(&r, KV_MP_UINT, &item);
				assert_int_equal(item.value, whole->tokens[at * whole->block_tokens + i]);
			}
		} else if (key.len == 17 && memcmp(key.data, "parent_block_hash", 17) == 0) {
			assert_int_equal(kv_mp_next(&r, &item), KV_OK);
			assert_true(at == 0 ? item.type == KV_MP_NIL : item.value == whole->hashes[at - 1]);
		} else {
			assert_int_equal(kv_mp_skip(&r, 4), KV_OK);
		}
	}
	assert_int_equal(tokens, whole->block_tokens > 10000 ? 0 : count * whole->block_tokens);

	return count;
}

static void publish_whole(uint32_t block_tokens)
{
	static uint8_t payload[65536];
	kvd_event_t event = {.type = KVD_EVENT_STORED,
			     .ns = "a",
			     .medium = KV_TIER_CPU,
			     .count = HASHES,
			     .hashes = hashes_,
			     .block_tokens = block_tokens};
	uint32_t *tokens = malloc((size_t)HASHES * block_tokens * sizeof *tokens);
	kv_test_rng_t rng = {kv_test_seed()};
	int fd = subscribed();
	uint64_t seq, next = 0;
	size_t len;

	assert_non_null(tokens);
	kv_test_fill(&rng, tokens, (size_t)HASHES * block_tokens * sizeof *tokens);
	kv_test_fill(&rng, hashes_, sizeof hashes_);
	event.tokens = tokens;
	kvd_publisher_event(publisher_, &event);
	kvd_publisher_commit(publisher_);
	for (uint32_t at = 0; at < event.count;) {
		seq = message(fd, payload, &len);
		assert_true(at == 0 || seq == next);
		next = seq + 1;
		at += check_piece(payload, len, &event, at);
	}
	close(fd);
	free(tokens);
}

KV_TEST_BETWEEN(p9_a_large_event_goes_out_in_pieces_that_follow_each_other, begin(), finish())
{
	publish_whole(16);    /* in one */
	publish_whole(256);   /* 256 KiB of tokens: in several */
	publish_whole(20000); /* the tokens of one block fit no message: without them, in one */
	assert_int_equal(kv_metric_get(&metrics_, KV_M_EVENTS_LOST), 0);
}
