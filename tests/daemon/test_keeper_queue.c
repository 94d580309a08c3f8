/* What the daemon has to say to a keeper that does not read: queued in order, up to a limit, without a wait. */
#include "daemon/host.h"

#include "kv_cmocka.h"
#include "kv_test.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static kv_metrics_t metrics_;
static kvd_keeper_queue_t queue_;
static int keeper_; /* its end */
static uint32_t polls_;

int __real_poll(struct pollfd *fds, nfds_t n, int timeout_ms);
int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms);

int __wrap_poll(struct pollfd *fds, nfds_t n, int timeout_ms)
{
	polls_ += timeout_ms != 0;

	return __real_poll(fds, n, timeout_ms);
}

static int make_pair(void)
{
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	keeper_ = pair[1];

	return pair[0];
}

KV_FIXTURE(set_up)
{
	memset(&metrics_, 0, sizeof metrics_);
	queue_ = (kvd_keeper_queue_t){.fd = make_pair(), .metrics = &metrics_};
	polls_ = 0;
}

KV_FIXTURE(tear_down)
{
	const int fd = queue_.fd;

	kvd_keeper_close(&queue_, 0);
	close(fd);
	close(keeper_);
}

static const char *name_of(uint32_t i)
{
	static char name[32];

	snprintf(name, sizeof name, "%s%u", i % 2 ? KVD_KEEPER_WRITER : "slab.", i);

	return name;
}

/* The next message that the keeper gets; 0: none. Its descriptor is closed. */
static char receive(char name[KVD_KEEPER_NAME])
{
	kvd_word_t word;
	int fd;

	if (!kvd_keeper_receive(keeper_, &word, &fd)) {
		return 0;
	}
	assert_int_equal(fd >= 0, word.verb == 'K' || word.verb == 'H');
	if (fd >= 0) {
		close(fd);
	}
	memcpy(name, word.name, KVD_KEEPER_NAME);

	return word.verb;
}

static void expect(char verb, const char *want)
{
	char name[KVD_KEEPER_NAME], got;

	kvd_keeper_flush(&queue_);
	got = receive(name);
	if (got != verb || strcmp(name, want) != 0) {
		fail_msg("%c %s, not %c %s", got, name, verb, want);
	}
}

#define MANY 2000u

KV_TEST(p5_messages_wait_in_order_and_nobody_waits_for_the_keeper, set_up, tear_down)
{
	char name[KVD_KEEPER_NAME];

	for (uint32_t i = 0; i < MANY; i++) {
		kvd_keeper_keep(&queue_, name_of(i), keeper_);
	}
	kvd_keeper_serves(&queue_);
	kvd_keeper_drop(&queue_, name_of(0));
	assert_true(kv_metric_get(&metrics_, KV_M_KEEPER_WAITING) > 0);
	for (uint32_t i = 0; i < MANY; i++) {
		expect('K', name_of(i));
	}
	expect('S', "");
	expect('D', name_of(0));
	assert_int_equal(receive(name), 0);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_KEEPER_WAITING), 0);
	assert_int_equal(polls_, 0);
}

/* One that left before the keeper had heard of it is not worth a message. Another name may be one that the keeper has
 * of an earlier daemon. */
KV_TEST(p5_what_is_dropped_while_it_waits_is_not_sent, set_up, tear_down)
{
	uint32_t first;

	for (first = 1; queue_.waiting == 0; first += 2) {
		kvd_keeper_keep(&queue_, name_of(first), keeper_);
	}
	assert_int_equal(queue_.writers, 1);
	for (uint32_t i = 0; i < 100000; i++) {
		kvd_keeper_keep(&queue_, "pidfd.passing", keeper_);
		assert_int_equal(queue_.writers, 2);
		kvd_keeper_drop(&queue_, "pidfd.passing");
	}
	kvd_keeper_keep(&queue_, "slab.1", keeper_);
	kvd_keeper_drop(&queue_, "slab.1");
	kvd_keeper_keep(&queue_, "pidfd.last", keeper_);
	assert_int_equal(queue_.writers, 2);
	assert_true(queue_.cap < 1000);
	for (uint32_t i = 1; i < first; i += 2) {
		expect('K', name_of(i));
	}
	assert_true(queue_.writers <= 1);
	expect('D', "slab.1");
	expect('K', "pidfd.last");
	assert_int_equal(queue_.writers, 0);
}

/* As many as a keeper can hold; letting go of a name is never refused. */
KV_TEST(p5_descriptors_that_wait_have_a_limit, set_up, tear_down)
{
	char name[KVD_KEEPER_NAME];
	uint32_t taken = 0;

	while (kvd_keeper_reserve(&queue_, 1) == KV_OK) {
		snprintf(name, sizeof name, "slab.%u", taken++);
		kvd_keeper_keep(&queue_, name, keeper_);
	}
	assert_int_equal(kvd_keeper_reserve(&queue_, 1), KV_ERR_BUSY);
	assert_int_equal(queue_.waiting, KVD_KEEPER_NAMES);
	assert_int_equal(kv_metric_get(&metrics_, KV_M_KEEPER_REFUSED), 2);
	kvd_keeper_keep(&queue_, "slab.late", keeper_);
	kvd_keeper_drop(&queue_, "slab.0");
	assert_int_equal(queue_.waiting, KVD_KEEPER_NAMES + 1u);
	for (uint32_t i = 0; i < taken; i++) {
		snprintf(name, sizeof name, "slab.%u", i);
		expect('K', name);
	}
	expect('D', "slab.0");
	assert_int_equal(receive(name), 0);
	assert_int_equal(kvd_keeper_reserve(&queue_, 1), KV_OK);
}

KV_TEST(p5_the_end_waits_for_a_keeper_only_so_long, set_up, NULL)
{
	const int fd = queue_.fd;

	for (uint32_t i = 0; i < MANY; i++) {
		kvd_keeper_keep(&queue_, name_of(i), keeper_);
	}
	kvd_keeper_close(&queue_, 20);
	assert_int_equal(queue_.fd, -1);
	kvd_keeper_keep(&queue_, "slab.1", keeper_); /* there is no keeper any longer */
	assert_int_equal(queue_.count, 0);
	close(fd);
	close(keeper_);
}

/* ---- where a user meets it ------------------------------------------------------------------- */

static kv_status_t ask_to_join(kvd_host_t *host, kvd_namespace_t *ns)
{
	static const uint8_t secret[16] = {1};
	const kv_msg_t asks[] = {
		{.hello = {.version = KV_WIRE_VERSION, .program = kv_slice_str("test")}},
		{.join = {.instance = kv_slice_str("i"), .secret = {secret, 16}, .role = 2, .staging_words = 64}}};
	static const uint16_t codes[] = {KV_CODE_HELLO, KV_CODE_JOIN};
	const int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);
	kv_frame_header_t header, answer = {0};
	uint8_t bytes[4096];
	int pair[2], fds[KV_WIRE_MAX_FDS];
	uint32_t count;
	size_t sent, len;

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair), 0);
	kvd_session_open(host, ns, pair[0]);
	for (uint16_t i = 0; i < 2; i++) {
		header = (kv_frame_header_t){
			.magic = KV_WIRE_MAGIC, .version = KV_WIRE_VERSION, .code = codes[i], .fds = i};
		assert_int_equal(
			kv_body_encode(&kv_request_find(codes[i])->ask, &asks[i], bytes, sizeof bytes, &header.body),
			KV_OK);
		assert_int_equal(kv_sock_send(pair[1], &header, bytes, 0, i ? &pidfd : NULL, &sent), KV_OK);
		do {
			(void)kvd_loop_iterate(host, 0);
		} while (kv_sock_recv(pair[1], bytes, sizeof bytes, &len, fds, &count) != KV_OK);
		memcpy(&answer, bytes, sizeof answer);
		for (uint32_t f = 0; f < count; f++) {
			close(fds[f]);
		}
	}
	close(pidfd);
	close(pair[1]);

	return (kv_status_t)answer.status;
}

KV_TEST(p5_a_join_without_room_for_its_pidfd_is_busy)
{
	static kvd_host_t *host; /* for the life of the process */
	char name[KVD_KEEPER_NAME];

	host = host_make(&kv_env_posix, "default");
	host->namespaces[0].trusted = 1;
	host->namespaces[0].mirror.touched = 1;
	host->to_keeper = (kvd_keeper_queue_t){.fd = make_pair(), .metrics = &host->metrics};
	assert_int_equal(ask_to_join(host, &host->namespaces[0]), KV_OK);
	while (kvd_keeper_reserve(&host->to_keeper, 1) == KV_OK) {
		kvd_keeper_keep(&host->to_keeper, "slab.1", keeper_);
	}
	assert_int_equal(ask_to_join(host, &host->namespaces[0]), KV_ERR_BUSY);
	assert_int_equal(kv_metric_get(&host->metrics, KV_M_KEEPER_REFUSED), 2);
	assert_int_equal(receive(name), 'K');
	while (receive(name)) {
	}
	assert_int_equal(ask_to_join(host, &host->namespaces[0]), KV_OK);
}
