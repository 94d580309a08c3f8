/* A namespace that takes all it can get: sessions, receive buffers, members. What it has of these is its part, and no
 * other namespace's. */
#include "daemon/raw.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOBODY 65534

static char other_[128];

/* Sockets come in the order of --namespaces: `default`, which the start waits for, is the last one. */
static void begin(const char *const *args)
{
	raw_daemon_start(&daemon_, args);
	snprintf(other_, sizeof other_, "%s/other.sock", daemon_.dir);
}

#define OTHER_TEST(name, ...)                                                                                          \
	KV_TEST_BETWEEN(name, begin((const char *const[]){__VA_ARGS__, NULL}), raw_daemon_end(&daemon_))

OTHER_TEST(p8_a_namespace_full_of_sessions_refuses_its_own_only, "--namespaces=other,default", "--limits.sessions=8",
	   "--limits.hello_time=60s")
{
	int fds[32], victim, late;
	uint32_t n = 0;

	victim = raw_open(other_);
	while (n < KV_COUNT_OF(fds)) {
		fds[n++] = raw_connect(daemon_.sock);
	}
	assert_true(
		raw_metric_reaches(victim, "kvd_sessions_refused_total", n - 4 - 8)); /* its half, and the operators' */
	late = raw_open(other_);
	close(late);
	close(victim);
	while (n > 0) {
		close(fds[--n]);
	}
}

/* The beginning of a frame with a body of 900,000 bytes, 600,000 of them there. */
static int half_frame(const char *sock)
{
	static const uint8_t body[600000];
	kv_frame_header_t header = {.magic = KV_WIRE_MAGIC,
				    .version = KV_WIRE_VERSION,
				    .kind = KV_FRAME_REQUEST,
				    .code = KV_CODE_PUT_START,
				    .body = 900000,
				    .id = 7};
	int fd = raw_open(sock);

	assert_true(raw_bytes(fd, &header, sizeof header));
	(void)raw_bytes(fd, body, sizeof body);

	return fd;
}

OTHER_TEST(p8_receive_buffers_of_one_tenant_close_no_session_of_another, "--namespaces=other,default",
	   "--limits.receive=2MiB", "--limits.frame_time=10m")
{
	static const uint8_t rest[300000];
	int victim, fds[4], watch, told = 0;
	raw_frame_t frame;

	watch = raw_open(daemon_.sock);
	victim = half_frame(other_);
	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) {
		fds[i] = half_frame(daemon_.sock);
	}
	assert_true(raw_metric_reaches(watch, "kvd_frames_refused_total{reason=no_room}", KV_COUNT_OF(fds) - 1));
	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) { /* one of them fits, the others are told why */
		told += raw_recv(fds[i], 0, &frame) && frame.header.status == KV_ERR_BUSY && frame.header.id == 7;
	}
	assert_true(told >= 3);
	assert_true(raw_bytes(victim, rest, sizeof rest)); /* whole, and then it is looked at */
	assert_true(raw_recv(victim, RAW_TIMEOUT_MS, &frame));
	assert_int_not_equal(frame.header.status, KV_ERR_BUSY);
	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) {
		close(fds[i]);
	}
	close(victim);
	close(watch);
}

OTHER_TEST(p8_one_namespace_leaves_members_and_instances_to_the_others, "--namespaces=other,default",
	   "--limits.instances=4", "--limits.members=6")
{
	raw_member_t many[3], theirs;
	kv_msg_join_reply_t reply;
	int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0), fd;

	raw_join(&many[0], daemon_.sock, "one");
	raw_join(&many[1], daemon_.sock, "two");
	fd = raw_open(daemon_.sock);
	assert_int_equal(raw_join_with(fd, "three", NULL, pidfd, &reply), KV_ERR_LIMIT);
	raw_join(&many[2], daemon_.sock, "two");
	assert_int_equal(raw_join_with(fd, "two", NULL, pidfd, &reply), KV_ERR_LIMIT);
	raw_join(&theirs, other_, "one");
	raw_leave(&theirs);
	raw_leave(&many[2]);
	raw_leave(&many[1]);
	raw_leave(&many[0]);
	close(fd);
	close(pidfd);
}

/* As another user, who may use the socket: connect until the daemon refuses, and stay. */
static pid_t attack(int *p_end)
{
	int ready[2], end[2];
	char byte = 0;
	pid_t child;

	assert_true(pipe(ready) == 0 && pipe(end) == 0);
	child = fork();
	if (child == 0) {
		close(end[1]);
		if (setresgid(NOBODY, NOBODY, NOBODY) != 0 || setresuid(NOBODY, NOBODY, NOBODY) != 0) {
			_exit(1);
		}
		for (int i = 0; i < 64; i++) {
			(void)raw_connect(daemon_.sock);
		}
		(void)!write(ready[1], &byte, 1);
		(void)!read(end[0], &byte, 1);
		_exit(0);
	}
	close(ready[1]);
	close(end[0]);
	assert_int_equal(read(ready[0], &byte, 1), 1);
	close(ready[0]);
	*p_end = end[1];

	return child;
}

/* A put past its time gives way when its namespace lacks room, and what comes late of it gets a typed error; one that
 * is kept stays. */
RAW_TEST(p5_a_put_past_its_time_gives_way_and_its_late_end_is_refused, "--put.ttl=100ms",
	 "--instance.max_unfinished=64KiB")
{
	kv_msg_put_start_reply_t old, more;
	kv_msg_keep_reply_t kept;
	kv_msg_put_end_reply_t ended;
	kv_msg_drained_reply_t drained;
	raw_member_t member;
	kv_key_t keys[16];

	raw_join(&member, daemon_.sock, "i");
	assert_int_equal(raw_space(&member, "m"), KV_OK);
	raw_keys(1, keys, 16);
	assert_int_equal(raw_put_start(&member, NULL, 0, keys, 4, &old), KV_OK);
	assert_int_equal(raw_call(member.fd, KV_CODE_KEEP, &(kv_msg_keep_t){old.put}, &kept), KV_OK);
	assert_int_equal(kept.ttl_ms, 100);
	usleep(150000);
	/* Time alone ends nothing: it is kept, and ends as any other. */
	assert_int_equal(raw_call(member.fd, KV_CODE_KEEP, &(kv_msg_keep_t){old.put}, &kept), KV_OK);
	assert_int_equal(raw_metric(member.fd, "kvd_puts_expired_total"), 0);
	usleep(150000);
	assert_int_equal(raw_put_start(&member, NULL, 0, keys + 4, 12, &more), KV_OK);
	assert_true(more.n < 12); /* short of room: the oldest is revoked for the next request */
	assert_int_equal(raw_metric(member.fd, "kvd_puts_expired_total"), 1);
	assert_int_equal(raw_metric(member.fd, "kvd_namespace_puts_expired_total"), 1);
	assert_int_equal(raw_call(member.fd, KV_CODE_PUT_END,
				  &(kv_msg_put_end_t){.put = old.put, .count = 1, .words = RAW_LEAVES}, &ended),
			 KV_ERR_REVOKED);
	assert_int_equal(raw_call(member.fd, KV_CODE_KEEP, &(kv_msg_keep_t){old.put}, &kept), KV_ERR_REVOKED);
	assert_int_equal(raw_call(member.fd, KV_CODE_DRAINED, &(kv_msg_drained_t){.what = 0, .id = old.put}, &drained),
			 KV_OK);
	assert_int_equal(drained.freed, 4);
	assert_int_equal(raw_call(member.fd, KV_CODE_KEEP, &(kv_msg_keep_t){old.put}, &kept), KV_ERR_NOT_FOUND);
	raw_leave(&member);
}

/* The last ones of the file: they may skip the program. */
KV_TEST(p8_a_tenant_does_not_lock_the_operator_out)
{
	static const char *const args[] = {"--limits.sessions=4", "--limits.hello_time=60s", NULL};
	int end, fds[9];
	pid_t child;

	if (geteuid() != 0) {
		kv_test_skip("a second user needs root");
	}
	begin(args);
	assert_int_equal(chmod(daemon_.dir, 0755), 0);
	assert_int_equal(chmod(daemon_.sock, 0666), 0);
	child = attack(&end);
	for (uint32_t i = 0; i < 8; i++) {
		fds[i] = raw_open(daemon_.sock); /* its part is full, the reserve is not */
	}
	assert_int_equal(raw_metric(fds[0], "kvd_sessions"), 4 + 8);
	fds[8] = raw_connect(daemon_.sock);
	assert_true(raw_closed(fds[8], RAW_TIMEOUT_MS));
	for (uint32_t i = 0; i < 9; i++) {
		close(fds[i]);
	}
	close(end);
	assert_int_equal(waitpid(child, NULL, 0), child);
	raw_daemon_end(&daemon_);
}

/* A tenant has used up the descriptors, and more of it wait: they are refused, and an operator gets in past them. */
KV_TEST(p8_without_descriptors_an_operator_gets_in)
{
	static const char *const args[] = {"--limits.hello_time=60s", NULL};
	struct rlimit few;
	int end, fds[4];
	pid_t child;

	if (geteuid() != 0) {
		kv_test_skip("a second user needs root");
	}
	begin(args);
	assert_int_equal(chmod(daemon_.dir, 0755), 0);
	assert_int_equal(chmod(daemon_.sock, 0666), 0);
	few.rlim_cur = few.rlim_max = kv_test_count_fds(daemon_.pid, "") + 16;
	assert_int_equal(prlimit(daemon_.pid, RLIMIT_NOFILE, &few, NULL), 0);
	child = attack(&end);
	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) {
		fds[i] = raw_open(daemon_.sock);
	}
	assert_true(raw_metric(fds[0], "kvd_fd_exhausted_total") > 0);
	assert_true(raw_metric_reaches(fds[0], "kvd_namespace_sessions_refused_total", 16));
	for (uint32_t i = 0; i < KV_COUNT_OF(fds); i++) {
		close(fds[i]);
	}
	close(end);
	assert_int_equal(waitpid(child, NULL, 0), child);
	raw_daemon_end(&daemon_);
}

/* ---- put.ttl --------------------------------------------------------------------------------- */
