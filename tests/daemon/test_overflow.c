/* A session that cannot take what it is sent is closed at once, whichever side caused it. */
#include "daemon/raw.h"

#include <linux/capability.h>
#include <sys/pidfd.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>

#define PUTS  64u
#define SPARE UINT64_C(20) /* replies less than would overflow a queue: fewer bytes than the notices of PUTS puts */

#define IN_FLIGHT 300u /* descriptors nobody has received yet */

static int watch_;

KV_FIXTURE(setup)
{
	static const char *const args[] = {"--limits.send_queue=64KiB", NULL};

	raw_daemon_start(&daemon_, args);
	watch_ = raw_open(daemon_.sock);
}

KV_FIXTURE(teardown)
{
	close(watch_);
	raw_daemon_end(&daemon_);
}

static void ask_and_do_not_read(raw_member_t *member, uint64_t count)
{
	const kv_msg_drained_t ask = {.what = 0};

	for (uint64_t id = 1; id <= count; id++) {
		raw_send(member->fd, KV_CODE_DRAINED, 1000000u + id, &ask, NULL, 0);
	}
}

/* Requests after which a member that reads nothing is closed. */
static uint64_t find_limit(const char *name)
{
	uint64_t overflows = raw_metric(watch_, "kvd_send_overflows_total"), polls = 1, before, after;
	raw_member_t member;

	raw_join(&member, daemon_.sock, name);
	before = raw_metric(watch_, "kvd_requests_total");
	ask_and_do_not_read(&member, 4000);
	while (raw_metric(watch_, "kvd_send_overflows_total") == overflows) {
		polls++;
		usleep(1000);
	}
	after = raw_metric(watch_, "kvd_requests_total");
	raw_leave(&member);

	return after - before - polls - 1;
}

/* Read what is still there: does the end come? */
static int ends(int fd)
{
	raw_frame_t frame;

	while (raw_recv(fd, 3000, &frame)) {
	}

	return raw_closed(fd, 0);
}

KV_TEST(p5_a_queue_that_overflows_as_another_member_leaves_is_closed)
{
	const kv_msg_drained_t drained = {.what = 2};
	raw_member_t first, second, last;
	kv_msg_put_start_reply_t put;
	kv_msg_drained_reply_t freed;
	kv_key_t keys[PUTS];
	uint64_t limit, overflows, requests;

	raw_keys(1, keys, PUTS);
	raw_join(&first, daemon_.sock, "crowd");
	assert_int_equal(raw_space(&first, "crowd"), KV_OK);
	for (uint32_t i = 0; i < PUTS; i++) {
		assert_int_equal(raw_put_start(&first, NULL, 0, &keys[i], 1, &put), KV_OK);
	}
	limit = find_limit("other");
	assert_true(limit > 2 * SPARE && limit < 4000);

	/* Of the same instance, and able to write into its puts: it is told of the end of each. */
	raw_join(&second, daemon_.sock, "crowd");
	overflows = raw_metric(watch_, "kvd_send_overflows_total");
	requests = raw_metric(watch_, "kvd_requests_total");
	ask_and_do_not_read(&second, limit - SPARE);
	assert_int_equal(raw_metric_reaches(watch_, "kvd_requests_total", requests + limit - SPARE), 1);
	usleep(50000);
	assert_int_equal(raw_metric(watch_, "kvd_send_overflows_total"), overflows);
	close(first.fd);
	assert_int_equal(raw_metric_reaches(watch_, "kvd_send_overflows_total", overflows + 1), 1);
	assert_int_equal(ends(second.fd), 1);

	raw_join(&last, daemon_.sock, "crowd");
	assert_int_equal(raw_call(last.fd, KV_CODE_DRAINED, &drained, &freed), KV_OK);
	raw_leave(&last);
	raw_leave(&second);
	first.fd = -1;
	raw_leave(&first);
}

/* A user may have as many descriptors on their way as a process may have open; then the kernel takes no more. */
KV_TEST(p5_a_member_whose_fds_cannot_be_sent_is_closed_may_rejoin)
{
	const struct rlimit few = {IN_FLIGHT / 2, IN_FLIGHT / 2};
	int pair[2], fds[16], fd = raw_open(daemon_.sock), pidfd = pidfd_open(getpid(), 0);
	const kv_msg_join_t ask = {.instance = kv_slice_str("late"), .secret = kv_slice_str("0123456789abcdef")};
	struct rlimit before;
	raw_member_t member;

	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	for (size_t i = 0; i < KV_COUNT_OF(fds); i++) {
		fds[i] = pair[0];
	}
	for (uint32_t sent = 0; sent < IN_FLIGHT; sent += KV_COUNT_OF(fds)) {
		assert_int_equal(raw_bytes_fds(pair[0], "x", 1, fds, KV_COUNT_OF(fds)), 1);
	}
	assert_int_equal(prlimit(daemon_.pid, RLIMIT_NOFILE, &few, &before), 0);

	raw_send(fd, KV_CODE_JOIN, 1, &ask, &pidfd, 1);
	assert_int_equal(raw_closed(fd, 5000), 1);
	assert_int_equal(raw_log_has(&daemon_, "a frame cannot be sent"), 1);

	close(pair[0]);
	close(pair[1]);
	raw_join(&member, daemon_.sock, "late");
	raw_leave(&member);
	close(pidfd);
	close(fd);
}

int main(void)
{
	/* Who has these is not counted; the daemon shall not have them. */
	(void)prctl(PR_CAPBSET_DROP, CAP_SYS_RESOURCE);
	(void)prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN);

	return kv_test_run(setup, teardown);
}
