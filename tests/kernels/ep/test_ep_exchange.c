/* What the exchange of descriptors refuses: a rank that runs it, and a test that plays another one, byte by byte. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "ep/message.h"
#include "kv/digest.h"
#include "kv/sock.h"
#include "kvk/ep_group.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#define NOBODY 65534u

static const kvk_ep_shape_t shape = {3, 12, 2, 16, 8, 3, 2};
static struct {
	char directory[96];
	kv_test_env_t env;
	kvk_ep_plan_t plan;
	kvk_ep_memory_t memory;
	int heap;
	uint32_t fds; /* before anything was opened */
	/* the rank that runs */
	pthread_t thread;
	kvk_ep_exchange_t config;
	kv_status_t status;
	int heaps[KVK_EP_MAX_RANKS];
	kvk_ep_exchange_fault_t fault;
	/* of the ranks that the test plays */
	int opened[4];
	uint32_t count;
} w;

static void *run_rank(void *ctx)
{
	(void)ctx;
	w.status = kvk_ep_exchange(&w.config, w.heaps, &w.fault);

	return NULL;
}

static void set_up(uint32_t rank)
{
	w.fds = kv_test_count_fds(getpid(), "");
	kv_test_dir_make(w.directory, sizeof w.directory);
	kv_test_env_init(&w.env);
	assert_int_equal(kvk_ep_plan(&shape, &w.plan, NULL), KV_OK);
	assert_int_equal(kvk_ep_memory_create(w.plan.heap_bytes, &w.memory, &w.heap), KV_OK);
	w.config = (kvk_ep_exchange_t){.env = &w.env.env,
				       .plan = &w.plan,
				       .directory = w.directory,
				       .rank = rank,
				       .link = KVK_EP_HOST_COPIES,
				       .heap = w.heap};
	memset(w.heaps, 0x55, sizeof w.heaps);
}

static void start(uint32_t rank)
{
	set_up(rank);
	assert_int_equal(pthread_create(&w.thread, NULL, run_rank, NULL), 0);
}

/* One that waits for what does not come is no hang of the test: its time is up. */
static void join_rank(void)
{
	struct timespec limit;

	clock_gettime(CLOCK_REALTIME, &limit);
	limit.tv_sec += 60;
	while (pthread_timedjoin_np(w.thread, NULL, &limit) != 0) {
		kv_test_advance(&w.env, UINT64_C(3600000000000));
		limit.tv_sec++;
	}
}

/* Nothing is left open, and no socket is left in the directory. */
static void end_test(void)
{
	while (w.count > 0) {
		close(w.opened[--w.count]);
	}
	kvk_ep_memory_unmap(&w.memory);
	close(w.heap);
	assert_int_equal(rmdir(w.directory), 0);
	assert_int_equal(kv_test_count_fds(getpid(), ""), w.fds);
}

static void finish(kv_status_t status, uint32_t lost, const char *why)
{
	join_rank();
	if (w.status != status || w.fault.lost != lost || !strstr(w.fault.why, why)) {
		fail_msg("%s, lost %x: %s", kv_status_name(w.status), w.fault.lost, w.fault.why);
	}
	for (uint32_t r = 0; r < shape.ranks; r++) {
		assert_int_equal(w.heaps[r], -1);
	}
	end_test();
}

/* ---- the rank that the test plays ------------------------------------------------------------ */

static int connect_to(uint32_t rank)
{
	char path[128];
	int fd, error;

	snprintf(path, sizeof path, "%s/rank-%u", w.directory, rank);
	while (kv_sock_connect(path, &fd, &error) != KV_OK) {
		sched_yield();
	}
	w.opened[w.count++] = fd;

	return fd;
}

static kvk_ep_message_t message(uint32_t kind, uint32_t rank)
{
	return (kvk_ep_message_t){.magic = KVK_EP_MESSAGE_MAGIC,
				  .kind = kind,
				  .rank = rank,
				  .plan = kv_digest(&w.plan, sizeof w.plan),
				  .shape = shape,
				  .link = KVK_EP_HOST_COPIES};
}

static void send_bytes(int fd, const void *bytes, size_t n, const int *fds, uint32_t count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(8 * sizeof(int))];
	} control = {0};
	struct iovec part = {(void *)(uintptr_t)bytes, n};
	struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};

	if (count > 0) {
		m.msg_control = &control;
		m.msg_controllen = CMSG_SPACE(count * sizeof(int));
		*CMSG_FIRSTHDR(&m) = (struct cmsghdr){
			.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(count * sizeof(int))};
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), fds, count * sizeof(int));
	}
	assert_int_equal(sendmsg(fd, &m, MSG_NOSIGNAL), n);
}

/* The next message, which is of that kind; the descriptor that comes with a HELLO is closed. */
static kvk_ep_message_t expect(int fd, uint32_t kind)
{
	int fds[KV_WIRE_MAX_FDS] = {-1};
	struct pollfd polled = {.fd = fd, .events = POLLIN};
	kvk_ep_message_t m;
	uint32_t count = 0;
	size_t n = 0;

	assert_int_equal(poll(&polled, 1, 60000), 1);
	assert_int_equal(kv_sock_recv(fd, (uint8_t *)&m, sizeof m, &n, fds, &count), KV_OK);
	assert_int_equal(n, sizeof m);
	assert_int_equal(m.kind, kind);
	assert_int_equal(count, kind == KVK_EP_HELLO);
	if (count > 0) {
		close(fds[0]);
	}

	return m;
}

static void send_message(int fd, kvk_ep_message_t m)
{
	send_bytes(fd, &m, sizeof m, &w.heap, m.kind == KVK_EP_HELLO);
}

/* This rank is at rank 0, and both have said HELLO. */
static int enter(uint32_t rank)
{
	const int raw = connect_to(0);

	send_message(raw, message(KVK_EP_HELLO, rank));
	(void)expect(raw, KVK_EP_HELLO);

	return raw;
}

/* ---- a message that is none ------------------------------------------------------------------ */

KV_TEST(p10_what_is_no_message_of_an_exchange_is_refused)
{
	static const uint32_t kinds[] = {KVK_EP_HELLO, 3, KVK_EP_READY, KVK_EP_GIVE_UP}; /* the last without a status */
	kvk_ep_message_t bad;

	for (size_t i = 0; i < KV_COUNT_OF(kinds); i++) {
		start(0);
		bad = message(kinds[i], 1);
		bad.magic += i == 0;
		send_bytes(connect_to(0), &bad, sizeof bad, NULL, 0);
		finish(KV_ERR_PROTO, 0, "no message of an exchange");
	}
	start(0);
	bad = message(KVK_EP_HELLO, 1);
	send_bytes(connect_to(0), &bad, 40, &w.heap, 1);
	close(w.opened[--w.count]);
	finish(KV_ERR_PROTO, 0, "cut off after 40 bytes");
}

KV_TEST(p4_p10_more_descriptors_than_one_are_closed_and_refused)
{
	static const uint32_t counts[] = {2, 8}; /* more than one, and more than one call takes */

	for (size_t i = 0; i < KV_COUNT_OF(counts); i++) {
		kvk_ep_message_t hello;

		start(0);
		hello = message(KVK_EP_HELLO, 1);
		send_bytes(connect_to(0), &hello, sizeof hello,
			   (const int[]){w.heap, w.heap, w.heap, w.heap, w.heap, w.heap, w.heap, w.heap}, counts[i]);
		finish(KV_ERR_PROTO, 0, "descriptors that it may not have");
	}
	for (int later = 0; later < 2; later++) { /* amid a message; with another one */
		kvk_ep_message_t m;
		int raw;

		start(0);
		raw = later ? enter(1) : connect_to(0);
		m = message(later ? KVK_EP_READY : KVK_EP_HELLO, 1);
		if (!later) {
			send_bytes(raw, &m, 8, &w.heap, 1);
		}
		send_bytes(raw, &m, sizeof m - 8, &w.heap, 1);
		finish(KV_ERR_PROTO, 0, "descriptors that it may not have");
	}
}

KV_TEST(p10_a_heap_that_is_too_short_or_may_shrink_is_refused)
{
	for (int i = 0; i < 3; i++) {
		const int bad = memfd_create("bad", MFD_ALLOW_SEALING | MFD_CLOEXEC);
		kvk_ep_message_t hello;

		assert_true(bad >= 0);
		start(0);
		assert_int_equal(ftruncate(bad, (off_t)w.plan.heap_bytes - (i == 0)), 0);
		if (i == 0) {
			assert_int_equal(fcntl(bad, F_ADD_SEALS, F_SEAL_SHRINK), 0);
		}
		assert_int_equal(kvk_ep_memory_map(bad, w.plan.heap_bytes, &(kvk_ep_memory_t){0}), KV_ERR_ARG);
		hello = message(KVK_EP_HELLO, 1);
		send_bytes(connect_to(0), &hello, sizeof hello, &bad, i < 2);
		finish(KV_ERR_PROTO, 0, "that cannot shrink");
		close(bad);
	}
}

/* ---- ranks that are not those of the plan ---------------------------------------------------- */

KV_TEST(p10_a_rank_of_another_plan_is_refused_by_both_with_a_sentence)
{
	static const char *const names[] = {"ranks: 4 there, 3 here",
					    "experts: 13",
					    "experts a token: 3",
					    "elements of a row: 17",
					    "tokens: 9",
					    "groups: 4",
					    "in flight: 3",
					    "link: 2 there, 1 here",
					    "of another version"};

	for (size_t i = 0; i < KV_COUNT_OF(names); i++) {
		kvk_ep_message_t hello, answer;
		int raw;

		start(0);
		raw = connect_to(0);
		hello = message(KVK_EP_HELLO, 1);
		if (i < 8) {
			((uint32_t *)(void *)&hello.shape)[i]++;
		} else {
			hello.plan++;
		}
		send_message(raw, hello);
		answer = expect(raw, KVK_EP_HELLO);
		assert_memory_equal(&answer.shape, &shape, sizeof shape);
		assert_int_equal(expect(raw, KVK_EP_GIVE_UP).status, KV_ERR_IDENTITY);
		finish(KV_ERR_IDENTITY, 0, names[i]);
	}
}

KV_TEST(p10_a_rank_is_there_once_and_is_who_it_says)
{
	static const uint32_t bad[] = {0, 3, 77};
	char path[128];
	int raw, listener;

	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		start(0);
		send_message(connect_to(0), message(KVK_EP_HELLO, bad[i]));
		finish(KV_ERR_PROTO, 0, "a process takes itself for rank");
	}
	start(0);
	(void)enter(1);
	(void)enter(1);
	finish(KV_ERR_EXISTS, 0, "rank 1 is there twice");
	/* Who listens where rank 0 would is another one. */
	set_up(1);
	snprintf(path, sizeof path, "%s/rank-0", w.directory);
	assert_int_equal(kv_sock_listen(path, 0600, 4, &listener, &(kv_sock_error_t){0}), KV_OK);
	assert_int_equal(pthread_create(&w.thread, NULL, run_rank, NULL), 0);
	do {
		raw = accept(listener, NULL, NULL);
	} while (raw < 0);
	w.opened[w.count++] = raw;
	w.opened[w.count++] = listener;
	send_message(raw, message(KVK_EP_HELLO, 2));
	unlink(path);
	finish(KV_ERR_PROTO, 0, "takes itself for rank 2");
}

KV_TEST(p10_a_second_process_of_a_rank_is_refused_and_disturbs_nobody)
{
	int heaps[KVK_EP_MAX_RANKS], raw[2];
	kvk_ep_exchange_fault_t fault;

	start(0);
	(void)connect_to(0); /* it looks, and goes */
	close(w.opened[--w.count]);
	assert_int_equal(kvk_ep_exchange(&w.config, heaps, &fault), KV_ERR_EXISTS);
	assert_string_equal(fault.why, "rank 0 is there twice");
	for (uint32_t r = 1; r <= 2; r++) {
		raw[r - 1] = enter(r);
		send_message(raw[r - 1], message(KVK_EP_READY, r));
	}
	join_rank();
	assert_int_equal(w.status, KV_OK);
	for (uint32_t r = 1; r <= 2; r++) {
		assert_true(w.heaps[r] >= 0 && w.heaps[r] != w.heap);
		close(w.heaps[r]);
		(void)expect(raw[r - 1], KVK_EP_READY);
	}
	end_test();
}

/* ---- ends ------------------------------------------------------------------------------------ */

KV_TEST(p6_what_one_rank_gives_up_for_all_do)
{
	kvk_ep_message_t m;
	int raw;

	start(0);
	raw = enter(1);
	m = message(KVK_EP_GIVE_UP, 1);
	m.status = KV_ERR_CLOSED;
	m.lost = 1u << 2 | 1u << 30; /* of ranks that there are not it keeps nothing */
	send_message(raw, m);
	assert_int_equal(expect(raw, KVK_EP_GIVE_UP).lost, 1u << 2);
	finish(KV_ERR_CLOSED, 1u << 2, "rank 1 gives up: the session has ended");
}

/* Both have said HELLO, and neither READY. One stands still; the other one waits, and so answers. */
KV_TEST(p6_of_ranks_that_are_not_ready_those_that_do_not_answer_are_named)
{
	kvk_ep_message_t m;
	int raw;

	start(0);
	(void)enter(1);
	raw = enter(2);
	(void)expect(raw, KVK_EP_READY);
	kv_test_advance(&w.env, UINT64_C(10000000000)); /* the default */
	m = expect(raw, KVK_EP_GIVE_UP);
	assert_true(m.status == KV_ERR_TIMEOUT && m.lost == 0);
	m = message(KVK_EP_GIVE_UP, 2);
	m.status = KV_ERR_TIMEOUT;
	send_message(raw, m);
	kv_test_advance(&w.env, UINT64_C(2500000000));
	finish(KV_ERR_TIMEOUT, 1u << 1, "not in time: rank 1");
}

KV_TEST(p6_a_rank_that_ends_amid_the_exchange_is_named_at_once)
{
	start(0);
	(void)enter(1);
	close(w.opened[--w.count]);
	finish(KV_ERR_CLOSED, 1u << 1, "rank 1 has ended");
}

/* An export of GPU memory is no regular file: it passes, and who maps it checks it. */
KV_TEST(p1_a_descriptor_of_no_host_memory_arrives_as_it_is)
{
	kvk_ep_message_t m;
	int raw, ends[2];
	char byte = 7;

	assert_int_equal(pipe(ends), 0);
	start(0);
	for (uint32_t r = 1; r <= 2; r++) {
		raw = connect_to(0);
		m = message(KVK_EP_HELLO, r);
		send_bytes(raw, &m, sizeof m, &ends[1], 1);
		(void)expect(raw, KVK_EP_HELLO);
		send_message(raw, message(KVK_EP_READY, r));
	}
	join_rank();
	assert_int_equal(w.status, KV_OK);
	for (uint32_t r = 1; r <= 2; r++) {
		assert_int_equal(fcntl(w.heaps[r], F_GETFD), FD_CLOEXEC);
		assert_int_equal(write(w.heaps[r], &byte, 1), 1);
		assert_int_equal(read(ends[0], &byte, 1), 1);
		close(w.heaps[r]);
	}
	end_test();
	close(ends[0]);
	close(ends[1]);
}

KV_TEST(p8_a_directory_that_others_may_enter_is_refused)
{
	char path[256];

	set_up(0);
	w.config.env = &kv_env_posix;
	w.config.timeout_us = 1;
	assert_int_equal(chmod(w.directory, 0711), 0);
	assert_int_equal(kvk_ep_exchange(&w.config, w.heaps, &w.fault), KV_ERR_PATH);
	assert_non_null(strstr(w.fault.why, "no directory of mode 0700"));
	assert_int_equal(chmod(w.directory, 0700), 0);
	snprintf(path, sizeof path, "%s/%0100d", w.directory, 0);
	w.config.directory = path;
	assert_int_equal(kvk_ep_exchange(&w.config, w.heaps, &w.fault), KV_ERR_PATH);
	assert_int_equal(rmdir(path), 0); /* it was made, and is too long for a socket in it */
	w.config.rank = 40;
	assert_int_equal(kvk_ep_exchange(&w.config, w.heaps, &w.fault), KV_ERR_ARG);
	assert_string_equal(w.fault.why, "the plan has no rank 40");
	end_test();
}

/* The rank belongs to another user, and this process, whom its directory does not keep out, comes to it. */
KV_TEST(p8_a_process_of_another_user_is_refused)
{
	pid_t child;
	int status;

	if (geteuid() != 0) {
		skip();
	}
	set_up(0);
	w.config.env = &kv_env_posix;
	w.config.timeout_us = UINT64_C(60000000);
	assert_int_equal(chown(w.directory, NOBODY, NOBODY), 0);
	child = fork();
	if (child == 0) {
		if (setresgid(NOBODY, NOBODY, NOBODY) != 0 || setresuid(NOBODY, NOBODY, NOBODY) != 0) {
			_exit(1);
		}
		status = kvk_ep_exchange(&w.config, w.heaps, &w.fault) == KV_ERR_NOT_PERMITTED;
		_exit(status && strstr(w.fault.why, "of user 0 is at a socket of user 65534") ? 0 : 2);
	}
	(void)connect_to(0);
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_int_equal(status, 0);
	end_test();
}

KV_TEST_MAIN(NULL, NULL)
