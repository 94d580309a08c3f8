/* P5: of too many connections the oldest goes. */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "kv/conn.h"

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define N 6u

static kv_conns_t conns_;
static kv_conn_t conn_[N];
static int fds_[N][2];

static int set_up(void **state)
{
	(void)state;
	kv_conns_init(&conns_, 3);
	memset(conn_, 0, sizeof conn_);
	for (unsigned i = 0; i < N; i++) {
		assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds_[i]), 0);
	}

	return 0;
}

static int tear_down(void **state)
{
	(void)state;
	for (unsigned i = 0; i < N; i++) {
		close(fds_[i][0]);
		close(fds_[i][1]);
	}

	return 0;
}

static int add(unsigned i)
{
	return kv_conns_insert(&conns_, &conn_[i], fds_[i][0]);
}

static int is_shut(unsigned i)
{
	char byte;

	return recv(fds_[i][1], &byte, 1, MSG_DONTWAIT) == 0;
}

KV_TEST(p5_the_oldest_connection_makes_room, set_up, tear_down)
{
	assert_int_equal(add(0) + add(1) + add(2), 0);
	assert_int_equal(add(3), 1);
	assert_true(is_shut(0) && !is_shut(1) && !is_shut(2) && !is_shut(3));
	assert_int_equal(conns_.n, 3);
	kv_conns_remove(&conns_, &conn_[0]); /* the library has closed it: it no longer counts already */
	assert_int_equal(conns_.n, 3);
	kv_conns_remove(&conns_, &conn_[2]);
	assert_int_equal(add(4), 0);
	assert_int_equal(add(5), 1);
	assert_true(is_shut(1) && !is_shut(3));
}

KV_TEST(p10_what_is_no_address_and_a_port_in_use_are_told_apart)
{
	char detail[256], where[64];
	struct sockaddr_storage address;
	socklen_t len = sizeof address;
	int fd = -1, other = -1;

	assert_int_equal(kv_listen("a.b", "nonsense", &fd, detail, sizeof detail), KV_ERR_CONFIG);
	assert_non_null(strstr(detail, "a.b: \"nonsense\" is not an address"));
	assert_int_equal(kv_listen("a.b", "127.0.0.1:x", &fd, detail, sizeof detail), KV_ERR_CONFIG);
	assert_int_equal(kv_listen("a.b", "192.0.2.1:80", &fd, detail, sizeof detail), KV_ERR_CONFIG);
	assert_non_null(strstr(detail, "cannot listen on"));
	assert_int_equal(fd, -1);
	assert_int_equal(kv_listen("a.b", "127.0.0.1:0", &fd, detail, sizeof detail), KV_OK);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
	snprintf(where, sizeof where, "127.0.0.1:%u",
		 (unsigned)(((uint8_t *)&address)[2] << 8 | ((uint8_t *)&address)[3]));
	assert_int_equal(kv_listen("a.b", where, &other, detail, sizeof detail), KV_ERR_BUSY);
	assert_non_null(strstr(detail, "in use by another program"));
	close(fd);
}

KV_TEST(p10_a_limit_of_descriptors_is_no_wrong_address)
{
	struct rlimit before, none;
	char detail[1024];
	kv_status_t status;
	int fd = -1;

	assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
	none = (struct rlimit){3, before.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &none), 0);
	status = kv_listen("a.b", "127.0.0.1:0", &fd, detail, sizeof detail);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
	assert_int_equal(status, KV_ERR_BUSY);
	assert_non_null(strstr(detail, "a.b: cannot listen on 127.0.0.1:0: socket: "));
	assert_non_null(strstr(detail, "RLIMIT_NOFILE"));
}
