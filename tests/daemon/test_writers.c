/* Writers of an earlier daemon: each call of the start that may fail does, and none of them is forgotten. */
#include "daemon/host.h"

#include "base/held.h"
#include "io/members/writers.h"

#include "kv_cmocka.h"
#include "kv_test.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#define WRITERS 70u /* the list grows while it is read */
#define CALLS   1000u

static uint32_t fails_at_; /* the call that fails; 0: none */
static uint32_t calls_;

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__real_realloc(void *old, size_t size);
void *__wrap_realloc(void *old, size_t size);
FILE *__real_fdopen(int fd, const char *mode);
FILE *__wrap_fdopen(int fd, const char *mode);
int __real_epoll_ctl(int fd, int op, int of, struct epoll_event *event);
int __wrap_epoll_ctl(int fd, int op, int of, struct epoll_event *event);

static int fails(void)
{
	errno = ENOMEM;

	return fails_at_ != 0 && ++calls_ == fails_at_;
}

void *__wrap_calloc(size_t n, size_t size)
{
	return fails() ? NULL : __real_calloc(n, size);
}

void *__wrap_realloc(void *old, size_t size)
{
	return fails() ? NULL : __real_realloc(old, size);
}

FILE *__wrap_fdopen(int fd, const char *mode)
{
	return fails() ? NULL : __real_fdopen(fd, mode);
}

int __wrap_epoll_ctl(int fd, int op, int of, struct epoll_event *event)
{
	return op == EPOLL_CTL_ADD && fails() ? -1 : __real_epoll_ctl(fd, op, of, event);
}

static uint32_t count_pidfds(void)
{
	return kv_test_count_fds(getpid(), "pidfd");
}

/* What the keeper's child inherits. */
static int make_list(void)
{
	const int list = memfd_create("list", MFD_CLOEXEC);

	assert_true(list >= 0);
	for (uint32_t i = 0; i < WRITERS; i++) {
		const int pidfd = (int)syscall(SYS_pidfd_open, getpid(), 0);

		assert_true(pidfd > STDERR_FILENO && dprintf(list, "%d pidfd.1.%x.2.%x\n", pidfd, i, i) > 0);
	}

	return list;
}

static uint32_t count_writers(const kvd_host_t *host)
{
	return (uint32_t)kv_metric_get(&host->metrics, KV_M_ADOPT_WRITERS);
}

KV_TEST(p1_a_start_that_cannot_watch_every_writer_fails_and_keeps_them)
{
	kv_status_t status = KV_ERR_NOMEM;
	uint32_t n = 0;
	int pair[2];

	assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
	while (status != KV_OK) {
		kvd_host_t *host = __real_calloc(1, sizeof *host);
		const int list = make_list();
		char byte;

		assert_true(host && ++n < CALLS);
		host->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
		host->pool_count = 2; /* memory was taken over */
		host->to_keeper = (kvd_keeper_queue_t){.fd = pair[0], .metrics = &host->metrics};
		calls_ = 0;
		fails_at_ = n;
		status = kvd_held_open(list, &host->to_keeper, &host->held);
		status = status == KV_OK ? kvd_writers_open(host) : status;
		fails_at_ = 0;
		assert_true(status == KV_OK || status == KV_ERR_NOMEM || status == KV_ERR_BUSY);
		if (status == KV_OK) {
			assert_int_equal(count_writers(host), WRITERS);
			assert_int_equal(count_pidfds(), WRITERS);
		}
		kvd_writers_close(host);
		kvd_held_close(host->held, 0);
		assert_int_equal(recv(pair[1], &byte, 1, MSG_DONTWAIT), -1); /* the keeper lets go of nothing */
		if (n > 1) { /* without the list they are not known; the process ends then */
			assert_int_equal(count_pidfds(), 0);
		}
		for (int fd = 3; n == 1 && fd < 3 + 2 * (int)WRITERS + 10; fd++) {
			if (fd != pair[0] && fd != pair[1]) {
				close(fd);
			}
		}
		close(host->epoll_fd);
		free(host);
	}
	assert_true(n > WRITERS);
	close(pair[0]);
	close(pair[1]);
}

/* Its number is not that of a descriptor: the writer is there, and only it can say that it is quiet. */
KV_TEST(p1_a_writer_without_a_descriptor_is_waited_for)
{
	kvd_host_t *host = __real_calloc(1, sizeof *host);
	const int list = memfd_create("list", MFD_CLOEXEC);

	assert_true(host && list >= 0 && dprintf(list, "-1 pidfd.1.2.3.4\n9999 pidfd.1.3.4.5\n") > 0);
	host->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	host->pool_count = 2;
	host->to_keeper.fd = -1;
	assert_int_equal(kvd_held_open(list, &host->to_keeper, &host->held), KV_OK);
	assert_int_equal(kvd_writers_open(host), KV_OK);
	assert_int_equal(count_writers(host), 2);
	kvd_writers_close(host);
	kvd_held_close(host->held, 1);
	close(host->epoll_fd);
	free(host);
}
