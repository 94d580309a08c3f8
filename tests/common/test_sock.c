/* Sockets: frames in pieces, descriptors, and hostile control data. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/sock.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>

static char dir[128], path[256];
static int pair[2];

/* What was received last. */
static uint8_t in_[1 << 16];
static size_t n_;
static int fds_[KV_WIRE_MAX_FDS];
static uint32_t count_;

static kv_status_t receive(int fd)
{
	return kv_sock_recv(fd, in_, sizeof in_, &n_, fds_, &count_);
}

static void close_received(void)
{
	for (uint32_t i = 0; i < count_; i++) {
		close(fds_[i]);
	}
}

static int setup(void **state)
{
	(void)state;
	kv_test_dir_make(dir, sizeof dir);
	snprintf(path, sizeof path, "%s/s.sock", dir);

	return socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair);
}

static int teardown(void **state)
{
	(void)state;
	close(pair[0]);
	close(pair[1]);
	kv_test_dir_remove(dir);

	return 0;
}

static unsigned open_fds(void)
{
	unsigned count = 0;
	DIR *list = opendir("/proc/self/fd");

	while (readdir(list)) {
		count++;
	}
	closedir(list);

	return count;
}

static kv_frame_header_t frame(uint32_t body, uint16_t fds)
{
	return (kv_frame_header_t){.magic = KV_WIRE_MAGIC,
				   .version = KV_WIRE_VERSION,
				   .kind = KV_FRAME_REQUEST,
				   .code = KV_CODE_STATS,
				   .fds = fds,
				   .body = body,
				   .id = 7};
}

KV_TEST(a_frame_arrives_with_its_descriptors, setup, teardown)
{
	uint8_t body[5] = "body";
	kv_frame_header_t header = frame(5, 3);
	int out_fds[3];
	size_t before;

	for (int i = 0; i < 3; i++) {
		out_fds[i] = open("/dev/null", O_RDONLY);
	}
	before = open_fds();
	assert_int_equal(receive(pair[1]), KV_PENDING);
	assert_int_equal(kv_sock_send(pair[0], &header, body, 0, out_fds, &n_), KV_OK);
	assert_int_equal(n_, 29);
	assert_int_equal(receive(pair[1]), KV_OK);
	assert_int_equal(n_, 29);
	assert_int_equal(count_, 3);
	assert_memory_equal(in_, &header, sizeof header);
	assert_memory_equal(in_ + 24, body, 5);
	for (int i = 0; i < 3; i++) {
		assert_int_equal(fcntl(fds_[i], F_GETFD), FD_CLOEXEC);
	}
	close_received();
	assert_int_equal(open_fds(), before);
	for (int i = 0; i < 3; i++) {
		close(out_fds[i]);
	}
}

KV_TEST(a_frame_can_be_sent_from_any_offset, setup, teardown)
{
	uint8_t body[40];
	kv_frame_header_t header = frame(sizeof body, 0);

	for (size_t i = 0; i < sizeof body; i++) {
		body[i] = (uint8_t)i;
	}
	for (size_t offset = 0; offset < sizeof header + sizeof body; offset++) {
		assert_int_equal(kv_sock_send(pair[0], &header, body, offset, NULL, &n_), KV_OK);
		assert_int_equal(n_, sizeof header + sizeof body - offset);
		assert_int_equal(receive(pair[1]), KV_OK);
		for (size_t i = 0; i < n_; i++) {
			size_t at = offset + i;

			assert_int_equal(in_[i], at < 24 ? ((uint8_t *)&header)[at] : body[at - 24]);
		}
	}
	assert_int_equal(kv_sock_send(pair[0], &header, body, 64, NULL, &n_), KV_ERR_ARG);
	assert_int_equal(kv_sock_send(pair[0], &header, NULL, 0, NULL, &n_), KV_ERR_ARG);
	header.fds = 1;
	assert_int_equal(kv_sock_send(pair[0], &header, body, 0, NULL, &n_), KV_ERR_ARG);
	header.fds = KV_WIRE_MAX_FDS + 1;
	assert_int_equal(kv_sock_send(pair[0], &header, body, 0, fds_, &n_), KV_ERR_ARG);
	assert_int_equal(kv_sock_recv(pair[1], in_, 0, &n_, fds_, &count_), KV_ERR_ARG);
}

KV_TEST(p5_a_full_socket_answers_pending_and_the_rest_follows, setup, teardown)
{
	static uint8_t body[4 << 20];
	kv_frame_header_t header = frame(sizeof body, 0);
	size_t sent = 0, got = 0;
	uint32_t full = 0;

	memset(body, 'x', sizeof body);
	while (got < sizeof header + sizeof body) {
		kv_status_t status = sent < sizeof header + sizeof body
					     ? kv_sock_send(pair[0], &header, body, sent, NULL, &n_)
					     : KV_PENDING;

		if (status == KV_OK) {
			sent += n_;
			continue;
		}
		assert_int_equal(status, KV_PENDING);
		full++;
		assert_int_equal(receive(pair[1]), KV_OK);
		got += n_;
	}
	assert_int_equal(sent, got);
	assert_true(full > 1);
}

KV_TEST(p6_a_peer_that_has_gone_is_closed_not_a_signal, setup, teardown)
{
	kv_frame_header_t header = frame(0, 0);

	close(pair[1]);
	assert_int_equal(receive(pair[0]), KV_ERR_CLOSED);
	assert_int_equal(kv_sock_send(pair[0], &header, NULL, 0, NULL, &n_), KV_ERR_CLOSED);
	pair[1] = open("/dev/null", O_RDONLY);
}

static void send_raw(int count, int messages)
{
	char bytes = 'x';
	struct iovec part = {&bytes, 1};
	union {
		struct cmsghdr align;
		char room[CMSG_SPACE(250 * sizeof(int))];
	} control;
	struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control};
	struct cmsghdr *head;
	int null = open("/dev/null", O_RDONLY);

	memset(&control, 0, sizeof control);
	message.msg_controllen = CMSG_SPACE((size_t)count * sizeof(int));
	head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN((size_t)count * sizeof(int));
	for (int i = 0; i < count; i++) {
		memcpy(CMSG_DATA(head) + (size_t)i * sizeof(int), &null, sizeof null);
	}
	while (messages-- > 0) {
		assert_int_equal(sendmsg(pair[0], &message, 0), 1);
	}
	close(null);
}

KV_TEST(p4_descriptors_nobody_wants_are_closed, setup, teardown)
{
	static const int counts[] = {4, 5, 6, 50, 250};
	unsigned before = open_fds();

	for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
		send_raw(counts[i], 1);
		assert_int_equal(receive(pair[1]), KV_OK);
		assert_true(count_ == UINT32_MAX);
		assert_int_equal(n_, 1);
		assert_int_equal(open_fds(), before);
	}

	/* Two messages with descriptors are never taken together. */
	send_raw(2, 2);
	for (int i = 0; i < 2; i++) {
		assert_int_equal(receive(pair[1]), KV_OK);
		assert_int_equal(count_, 2);
		close_received();
	}
	assert_int_equal(open_fds(), before);
}

static kv_status_t listen_at(const char *at, unsigned mode, int backlog, int *p_fd, int *p_error)
{
	kv_sock_error_t error = {0};
	kv_status_t status = kv_sock_listen(at, mode, backlog, p_fd, &error);

	*p_error = error.error;

	return status;
}

KV_TEST(a_long_path_is_refused, setup, teardown)
{
	char longer[200];
	int fd = -7, error = 0;

	memset(longer, 'a', sizeof longer);
	longer[108] = '\0';
	assert_int_equal(kv_sock_connect(longer, &fd, &error), KV_ERR_PATH);
	assert_int_equal(error, ENAMETOOLONG);
	assert_int_equal(listen_at(longer, 0660, 8, &fd, &error), KV_ERR_PATH);
	assert_int_equal(kv_sock_connect("", &fd, &error), KV_ERR_PATH);
	assert_int_equal(fd, -7);
	longer[107] = '\0';
	assert_int_equal(kv_sock_connect(longer, &fd, &error), KV_ERR_UNREACHABLE);
	assert_int_equal(error, ENOENT);
}

KV_TEST(a_listener_has_its_mode_and_takes_connections, setup, teardown)
{
	int listener, client, error = 0;
	mode_t old = umask(077);
	struct stat st;

	assert_int_equal(listen_at(path, 0660, 8, &listener, &error), KV_OK);
	umask(old);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0660);
	assert_int_equal(kv_sock_connect(path, &client, &error), KV_OK);
	assert_int_equal(fcntl(client, F_GETFD), FD_CLOEXEC);
	assert_true(fcntl(client, F_GETFL) & O_NONBLOCK);
	assert_true(fcntl(listener, F_GETFL) & O_NONBLOCK);
	close(client);
	close(listener);
}

KV_TEST(only_a_dead_socket_is_replaced, setup, teardown)
{
	int first, second, client, error = 0;
	unsigned before = open_fds();
	FILE *file;

	assert_int_equal(listen_at(path, 0600, 1, &first, &error), KV_OK);
	assert_int_equal(listen_at(path, 0600, 1, &second, &error), KV_ERR_LOCKED);
	close(first);
	assert_int_equal(kv_sock_connect(path, &client, &error), KV_ERR_UNREACHABLE);
	assert_int_equal(error, ECONNREFUSED);
	assert_int_equal(listen_at(path, 0600, 1, &second, &error), KV_OK);
	close(second);
	unlink(path);

	file = fopen(path, "w");
	fclose(file);
	assert_int_equal(listen_at(path, 0600, 1, &second, &error), KV_ERR_PATH);
	assert_int_equal(error, EEXIST);
	assert_int_equal(access(path, F_OK), 0);
	assert_int_equal(open_fds(), before);
}

/* A live listener whose backlog is full answers EAGAIN: it lives. */
KV_TEST(a_busy_socket_is_not_dead, setup, teardown)
{
	int listener, second, clients[64], error = 0, n = 0;

	assert_int_equal(listen_at(path, 0600, 0, &listener, &error), KV_OK);
	while (n < 64 && kv_sock_connect(path, &clients[n], &error) == KV_OK) {
		n++;
	}
	assert_true(n < 64);
	assert_int_equal(error, EAGAIN);
	assert_int_equal(listen_at(path, 0600, 1, &second, &error), KV_ERR_LOCKED);
	while (n > 0) {
		close(clients[--n]);
	}
	close(listener);
}

KV_TEST(a_directory_that_is_not_there_is_said, setup, teardown)
{
	int fd, error = 0;

	snprintf(path, sizeof path, "%s/none/s.sock", dir);
	assert_int_equal(listen_at(path, 0600, 1, &fd, &error), KV_ERR_PATH);
	assert_int_equal(error, ENOENT);
}

/* No descriptor left: each call says so, a frame's descriptors are refused, and all works again afterwards. */
KV_TEST(p6_running_out_of_descriptors_is_an_error_not_a_leak, setup, teardown)
{
	unsigned before = open_fds();
	struct rlimit old, none;
	int fd = -7, error = 0;

	send_raw(3, 1);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	none = (struct rlimit){3, old.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	assert_int_equal(kv_sock_connect(path, &fd, &error), KV_ERR_UNREACHABLE);
	assert_int_equal(error, EMFILE);
	assert_int_equal(listen_at(path, 0600, 1, &fd, &error), KV_ERR_BUSY);
	assert_int_equal(error, EMFILE);
	assert_int_equal(receive(pair[1]), KV_OK);
	assert_true(count_ == UINT32_MAX);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_int_equal(fd, -7);
	assert_int_equal(open_fds(), before);
	send_raw(3, 1);
	assert_int_equal(receive(pair[1]), KV_OK);
	assert_int_equal(count_, 3);
	close_received();
}

KV_TEST(a_descriptor_that_is_no_socket_is_an_error, setup, teardown)
{
	kv_frame_header_t header = frame(0, 0);
	int null = open("/dev/null", O_RDWR);

	assert_int_equal(kv_sock_send(null, &header, NULL, 0, NULL, &n_), KV_ERR_IO);
	assert_int_equal(receive(null), KV_ERR_IO);
	close(null);
}

static void pin_to(size_t cpu)
{
	cpu_set_t one;

	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	assert_int_equal(sched_setaffinity(0, sizeof one, &one), 0);
}

/* A process that has one CPU does not run beside a listener that has the same one. */
KV_TEST(p5_peers_on_one_cpu_do_not_run_beside_each_other, setup, teardown)
{
	cpu_set_t all;
	size_t cpus[2];
	int n = 0, error, listener, fd;

	assert_int_equal(sched_getaffinity(0, sizeof all, &all), 0);
	for (size_t cpu = 0; cpu < CPU_SETSIZE && n < 2; cpu++) {
		if (CPU_ISSET(cpu, &all)) {
			cpus[n++] = cpu;
		}
	}
	assert_int_equal(listen_at(path, 0600, 1, &listener, &error), KV_OK);
	assert_int_equal(kv_sock_connect(path, &fd, &error), KV_OK);
	assert_int_equal(kv_sock_peer_runs_beside(fd), n > 1);
	pin_to(cpus[0]);
	assert_int_equal(kv_sock_peer_runs_beside(fd), 0);
	if (n > 1) {
		/* This process has one CPU, and the one at the other end has another. */
		const pid_t child = fork();

		if (child == 0) {
			pin_to(cpus[1]);
			_exit(kv_sock_peer_runs_beside(fd));
		}
		assert_int_equal(waitpid(child, &error, 0), child);
		assert_int_equal(WEXITSTATUS(error), 1);
	}
	assert_int_equal(sched_setaffinity(0, sizeof all, &all), 0);
	close(fd);
	close(listener);
}
