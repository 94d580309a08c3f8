/* P5, P6, P10: what a hostile or clumsy peer sends ends its own connection with a typed answer and a counter, and
 * touches nobody else. */
#include "daemon/raw.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

static int watch_; /* a well-behaved session: it must never notice anything */

KV_FIXTURE(setup)
{
	static const char *const args[] = {"--limits.hello_time=3s", "--limits.frame_time=2s", NULL};

	raw_daemon_start(&daemon_, args);
	watch_ = raw_open(daemon_.sock);
}

KV_FIXTURE(teardown)
{
	close(watch_);
	raw_daemon_end(&daemon_);
}

/* Connections in the three states a session can be in. */
typedef enum stage { FRESH, GREETED, JOINED, STAGES } stage_t;

static int open_at(stage_t stage)
{
	kv_msg_join_reply_t joined;
	int fd = raw_connect(daemon_.sock);

	if (stage >= GREETED) {
		assert_int_equal(raw_hello(fd), KV_OK);
	}
	if (stage >= JOINED) {
		int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);

		assert_int_equal(raw_join_with(fd, "frames", NULL, pidfd, &joined), KV_OK);
		for (uint32_t i = 0; i < raw_reply_fd_count; i++) {
			close(raw_reply_fds[i]);
		}
		close(pidfd);
	}

	return fd;
}

static kv_frame_header_t header_of(uint16_t code, uint32_t body)
{
	return (kv_frame_header_t){
		.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .code = code, .body = body, .id = 77};
}

/* Send the header in each state: the connection ends, with an answer of this status where the header can be trusted,
 * and the metric counts it. */
static void refused_everywhere(const kv_frame_header_t *header, kv_status_t status, const char *metric)
{
	for (stage_t stage = FRESH; stage < STAGES; stage++) {
		uint64_t before = raw_metric(watch_, metric);
		int fd = open_at(stage);
		raw_frame_t frame;

		raw_bytes(fd, header, sizeof *header);
		if (status != KV_OK) {
			assert_int_equal(raw_recv(fd, RAW_TIMEOUT_MS, &frame), 1);
			assert_int_equal(frame.header.kind, KV_FRAME_REPLY);
			assert_int_equal(frame.header.status, status);
			assert_int_equal(frame.header.id, header->id);
		}
		assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
		close(fd);
		assert_true(raw_metric_reaches(watch_, metric, before + 1));
	}
}

KV_TEST(p10_hello_agrees_on_version_and_namespace)
{
	const kv_msg_hello_t ask = {.version = KV_WIRE_VERSION, .features = 0xff, .program = kv_slice_str("test")};
	kv_msg_hello_reply_t reply;
	int fd = raw_connect(daemon_.sock);

	assert_int_equal(raw_call(fd, KV_CODE_HELLO, &ask, &reply), KV_OK);
	assert_int_equal(reply.version, KV_WIRE_VERSION);
	assert_int_equal(reply.features, 0);
	assert_int_equal(reply.ns.len, 7);
	assert_memory_equal(reply.ns.data, "default", 7);
	assert_int_equal(reply.max_frame, KV_WIRE_MAX_BODY);
	close(fd);
}

KV_TEST(p10_an_unknown_protocol_version_in_hello_is_refused)
{
	const kv_msg_hello_t ask = {.version = KV_WIRE_VERSION + 1, .program = kv_slice_str("test")};
	int fd = raw_connect(daemon_.sock);

	assert_int_equal(raw_call(fd, KV_CODE_HELLO, &ask, NULL), KV_ERR_VERSION);
	assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
	close(fd);
}

/* Frames that end the session in each state, with an answer or, where the header cannot be trusted, without one. */
KV_TEST(p10_another_frame_version_is_refused)
{
	static const struct {
		uint16_t magic, code;
		uint8_t version, kind, fds; /* 0: the right version */
		uint32_t body;
		kv_status_t status;
		const char *reason;
	} cases[] = {
		{KV_WIRE_MAGIC, KV_CODE_STATS, 9, 0, 0, 0, KV_ERR_VERSION, "version"},
		{0x4748, KV_CODE_STATS, 0, 0, 0, 0, KV_OK, "malformed"},
		{KV_WIRE_MAGIC, KV_CODE_STATS, 0, 0, 0, UINT32_MAX, KV_ERR_TOO_BIG, "too_big"},
		{KV_WIRE_MAGIC, 4711, 0, 0, 0, 0, KV_ERR_UNKNOWN_REQUEST, "malformed"},
		{KV_WIRE_MAGIC, KV_CODE_STATS, 0, KV_FRAME_REPLY, 0, 0, KV_ERR_PROTO, "malformed"},
		{KV_WIRE_MAGIC, KV_CODE_SLAB_ADD, 0, KV_FRAME_NOTICE, 0, 0, KV_ERR_PROTO, "malformed"},
		{KV_WIRE_MAGIC, KV_CODE_JOIN, 0, 0, 1, 0, KV_ERR_PROTO, "malformed"}, /* promised, and not sent */
	};
	char metric[64];

	for (size_t i = 0; i < KV_COUNT_OF(cases); i++) {
		kv_frame_header_t header = header_of(cases[i].code, cases[i].body);

		header.magic = cases[i].magic;
		header.version = cases[i].version ? cases[i].version : header.version;
		header.kind = cases[i].kind;
		header.fds = cases[i].fds;
		snprintf(metric, sizeof metric, "kvd_frames_refused_total{reason=%s}", cases[i].reason);
		refused_everywhere(&header, cases[i].status, metric);
	}
}

KV_TEST(p10_before_hello_a_body_of_64_kib_is_the_limit)
{
	kv_frame_header_t header = header_of(KV_CODE_HELLO, KV_WIRE_MAX_BODY_BEFORE_HELLO + 1);
	int fd = raw_connect(daemon_.sock);
	raw_frame_t frame;

	raw_bytes(fd, &header, sizeof header);
	assert_int_equal(raw_recv(fd, RAW_TIMEOUT_MS, &frame), 1);
	assert_int_equal(frame.header.status, KV_ERR_TOO_BIG);
	close(fd);
}

KV_TEST(p10_a_body_that_does_not_decode_is_refused)
{
	/* An array that claims 2^32 - 1 elements; three strings instead of numbers; fewer fields than it claims. */
	static const uint8_t bodies[][6] = {
		{0xdd, 0xff, 0xff, 0xff, 0xff, 0x00}, {0x93, 0xa1, 'x', 0xa1, 'y', 0xa0}, {0x92, 0x01, 0, 0, 0, 0}};
	static const uint32_t lengths[] = {5, 6, 2};

	for (size_t i = 0; i < KV_COUNT_OF(bodies); i++) {
		kv_frame_header_t header = header_of(KV_CODE_HELLO, lengths[i]);
		uint64_t before = raw_metric(watch_, "kvd_frames_refused_total{reason=malformed}") +
				  raw_metric(watch_, "kvd_frames_refused_total{reason=too_big}");
		int fd = raw_connect(daemon_.sock);
		raw_frame_t frame;

		raw_bytes(fd, &header, sizeof header);
		raw_bytes(fd, bodies[i], lengths[i]);
		assert_int_equal(raw_recv(fd, RAW_TIMEOUT_MS, &frame), 1);
		assert_true(frame.header.status == KV_ERR_PROTO || frame.header.status == KV_ERR_TOO_BIG);
		assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
		assert_int_equal(raw_metric(watch_, "kvd_frames_refused_total{reason=malformed}") +
					 raw_metric(watch_, "kvd_frames_refused_total{reason=too_big}"),
				 before + 1);
		close(fd);
	}
}

/* JOIN got a seventh field, EXPLAIN a sixth, and so on: a request of another build is refused for this reason,
 * whichever it is, and the text says what to do. */
KV_TEST(p10_a_request_with_another_count_of_fields_is_refused)
{
	static uint8_t body[64];
	static kv_msg_t msg;

	for (uint32_t i = 0; i < kv_request_count; i++) {
		const kv_request_t *request = &kv_requests[i];
		const stage_t stage = request->code == KV_CODE_HELLO  ? FRESH
				      : request->code == KV_CODE_JOIN ? GREETED
								      : JOINED;

		for (uint32_t more = 0; more < 2 && request->roles != KV_ROLE_NONE; more++) {
			uint64_t before = raw_metric(watch_, "kvd_frames_refused_total{reason=version}");
			int fd = open_at(stage);
			kv_body_t fields = request->ask;
			kv_frame_header_t header;
			raw_frame_t frame;
			uint32_t len;

			memset(&msg, 0, sizeof msg);
			fields.count = request->ask.count - 1 + more;
			assert_int_equal(kv_body_encode(&fields, &msg, body, sizeof body - 1, &len), KV_OK);
			if (more) {
				body[0]++;
				body[len++] = 0;
			}
			header = header_of(request->code, len);
			raw_bytes(fd, &header, sizeof header);
			raw_bytes(fd, body, len);
			assert_int_equal(raw_recv(fd, RAW_TIMEOUT_MS, &frame), 1);
			assert_int_equal(frame.header.code, request->code);
			assert_int_equal(frame.header.status, KV_ERR_VERSION);
			assert_non_null(memmem(frame.body, frame.header.body, "use the libkvc of kvd", 21));
			assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
			assert_true(raw_metric_reaches(watch_, "kvd_frames_refused_total{reason=version}", before + 1));
			close(fd);
		}
	}
}

KV_TEST(p10_anything_before_hello_and_a_second_hello_are_refused)
{
	const kv_msg_stats_t stats = {0};
	const kv_msg_hello_t hello = {.version = KV_WIRE_VERSION, .program = kv_slice_str("twice")};
	int fd = raw_connect(daemon_.sock);

	assert_int_equal(raw_call(fd, KV_CODE_STATS, &stats, NULL), KV_ERR_PROTO);
	assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
	close(fd);
	fd = raw_open(daemon_.sock);
	assert_int_equal(raw_call(fd, KV_CODE_HELLO, &hello, NULL), KV_ERR_PROTO);
	assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
	close(fd);
}

KV_TEST(p10_a_members_request_needs_a_join)
{
	const kv_msg_release_t ask = {0};
	int fd = raw_open(daemon_.sock);

	assert_int_equal(raw_call(fd, KV_CODE_RELEASE, &ask, NULL), KV_ERR_NOT_JOINED);
	assert_true(raw_metric(fd, "kvd_requests_failed_total") > 0); /* the session goes on */
	close(fd);
}

/* Random bytes, and valid frames with random flips, from a printed seed. */
KV_TEST(p6_garbage_ends_only_its_own_connection)
{
	kv_test_rng_t rng = {kv_test_seed()};
	uint8_t bytes[512];

	for (int round = 0; round < 200; round++) {
		int fd = open_at((stage_t)(round % (int)GREETED + (round % 4 == 0 ? 1 : 0)));
		kv_frame_header_t header =
			header_of((uint16_t)kv_test_below(&rng, 20), (uint32_t)kv_test_below(&rng, 300));

		kv_test_fill(&rng, bytes, sizeof bytes);
		if (round % 2) {
			memcpy(bytes, &header, sizeof header);
		}
		raw_bytes(fd, bytes, 1 + kv_test_below(&rng, sizeof bytes - 1));
		close(fd);
	}
	assert_true(raw_metric_reaches(watch_, "kvd_frames_refused_total{reason=malformed}", 100));
	for (int i = 0; raw_metric(watch_, "kvd_sessions") != 1; i++) {
		assert_true(i < RAW_TIMEOUT_MS);
		usleep(1000);
	}
}

KV_TEST(p10_a_frame_cut_off_by_the_end_is_counted)
{
	uint64_t before = raw_metric(watch_, "kvd_frames_refused_total{reason=malformed}");

	for (stage_t stage = FRESH; stage < STAGES; stage++) {
		kv_frame_header_t header = header_of(KV_CODE_STATS, 100);
		int fd = open_at(stage);

		raw_bytes(fd, &header, stage == FRESH ? 10 : sizeof header);
		close(fd);
	}
	assert_true(raw_metric_reaches(watch_, "kvd_frames_refused_total{reason=malformed}", before + 3));
}

KV_TEST(p5_a_connection_that_says_nothing_is_closed)
{
	uint64_t before = raw_metric(watch_, "kvd_idle_closed_total");
	int fd = raw_connect(daemon_.sock);

	assert_true(raw_closed(fd, RAW_TIMEOUT_MS));
	assert_int_equal(raw_metric(watch_, "kvd_idle_closed_total"), before + 1);
	close(fd);
}

KV_TEST(p5_a_frame_sent_byte_by_byte_is_closed_at_its_deadline)
{
	kv_frame_header_t header = header_of(KV_CODE_STATS, 1000);
	uint64_t before = raw_metric(watch_, "kvd_idle_closed_total");
	int fd = raw_open(daemon_.sock);
	int alive = 1;

	for (size_t i = 0; alive && i < 1000; i++) {
		alive = raw_bytes(fd, i < sizeof header ? (const uint8_t *)&header + i : (const uint8_t *)"", 1);
		usleep(20000);
	}
	assert_false(alive);
	assert_int_equal(raw_metric(watch_, "kvd_idle_closed_total"), before + 1);
	close(fd);
}

KV_TEST(p5_pipelined_requests_are_answered_in_order)
{
	const kv_msg_status_t ask = {0};
	int fd = raw_open(daemon_.sock);
	raw_frame_t frame;

	for (uint64_t id = 1; id <= 200; id++) {
		raw_send(fd, KV_CODE_STATUS, id, &ask, NULL, 0);
	}
	for (uint64_t id = 1; id <= 200; id++) {
		assert_int_equal(raw_recv(fd, RAW_TIMEOUT_MS, &frame), 1);
		assert_int_equal(frame.header.id, id);
		assert_int_equal(frame.header.status, KV_OK);
	}
	close(fd);
}

KV_TEST(p10_descriptors_where_none_belong_are_closed)
{
	const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
	const int many[] = {null, null, null, null, null};
	const kv_frame_header_t header = header_of(KV_CODE_STATS, 0);

	for (uint32_t count = 1; count <= KV_COUNT_OF(many); count += 2) {
		uint64_t before = raw_metric(watch_, "kvd_frames_refused_total{reason=malformed}");
		int fd = raw_open(daemon_.sock);

		raw_bytes_fds(fd, &header, sizeof header, many, count);
		assert_true(raw_metric_reaches(watch_, "kvd_frames_refused_total{reason=malformed}", before + 1));
		close(fd);
	}
	close(null);

	const kv_msg_check_t ask = {0};
	kv_msg_check_reply_t reply;
	assert_int_equal(raw_call(watch_, KV_CODE_CHECK, &ask, &reply), KV_OK);
	assert_int_equal(reply.failed, 0);
}

RAW_TEST(p6_without_descriptors_sessions_go_on_and_new_ones_wait, NULL)
{
	const struct rlimit few = {40, 40};
	int fds[64], first, late;
	uint32_t n = 0;

	first = raw_open(daemon_.sock);
	assert_int_equal(prlimit(daemon_.pid, RLIMIT_NOFILE, &few, NULL), 0);
	while (n < KV_COUNT_OF(fds) && raw_metric(first, "kvd_fd_exhausted_total") == 0) {
		fds[n] = raw_connect(daemon_.sock);
		assert_true(raw_bytes(fds[n], "K", 1));
		n++;
		usleep(2000);
	}
	assert_true(raw_metric(first, "kvd_fd_exhausted_total") > 0);
	assert_true(n < KV_COUNT_OF(fds));
	late = raw_connect(daemon_.sock); /* in the backlog */
	for (uint32_t i = 0; i < n; i++) {
		close(fds[i]);
	}
	assert_int_equal(raw_hello(late), KV_OK);
	close(late);
	close(first);
}

RAW_TEST(p5_sessions_over_the_limit_are_refused, "--limits.sessions=2")
{
	int fds[2 + 8], over; /* the daemon's own user has the operators' eight as well */

	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) {
		fds[i] = raw_open(daemon_.sock);
	}
	over = raw_connect(daemon_.sock);
	assert_true(raw_closed(over, RAW_TIMEOUT_MS));
	assert_true(raw_metric(fds[0], "kvd_sessions_refused_total") > 0);
	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) {
		close(fds[i]);
	}
	close(over);
}

KV_TEST_MAIN(setup, teardown)
