/* The descriptors of all ranks' heaps, over UNIX sockets.
 *
 * Rank r listens, and connects to each rank below it. Both ends of a connection send HELLO with the plan and the
 * descriptor. A rank that has every other one's sends READY to all; who has heard READY from all is done. A rank that
 * fails sends GIVE_UP first, with what it knows, so that nobody takes its end for a death. When the time is up, a rank
 * cannot tell one that waits as it does from one that stands still: it gives up, and those that do not answer with a
 * GIVE_UP of their own are lost.
 */
#include "ep/message.h"
#include "kvk/ep_group.h"

#include "kv/digest.h"
#include "kv/sock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define TIMEOUT_US  UINT64_C(10000000)
#define POLL_MS     2   /* between two attempts to connect */
#define GRACE       4u  /* of the timeout: the part in which others answer a GIVE_UP */
#define CONNECTIONS 16u /* to ranks below, by rank; then those that came */
#define NO_RANK     UINT32_MAX

/* The digest is of all bytes of a plan: none is padding. */
_Static_assert(sizeof(kvk_ep_plan_t) == sizeof(kvk_ep_shape_t) + 3 * sizeof(uint32_t) + 11 * sizeof(size_t), "padding");

typedef struct connection {
	int fd, heap;  /* -1: none */
	uint32_t rank; /* NO_RANK: it has not said HELLO */
	uint32_t heard;
	size_t have;
	uint8_t bytes[sizeof(kvk_ep_message_t)];
} connection_t;

typedef struct exchange {
	const kvk_ep_exchange_t *config;
	kvk_ep_exchange_fault_t *fault;
	kv_status_t status;
	uint32_t ranks, all; /* `all`: a bit for each other rank */
	int listener, is_ready;
	char path[128];
	uint64_t deadline_ns, grace_ns;
	kvk_ep_message_t own; /* of this rank, but its kind */
	connection_t connections[CONNECTIONS];
} exchange_t;

static kv_status_t __attribute__((format(printf, 4, 5)))
fail(exchange_t *x, kv_status_t status, uint32_t lost, const char *format, ...)
{
	va_list args;

	if (x->status == KV_OK) {
		va_start(args, format);
		(void)vsnprintf(x->fault->why, sizeof x->fault->why, format, args);
		va_end(args);
		x->status = status;
	}
	x->fault->lost |= lost & (x->all | 1u << x->config->rank);

	return x->status;
}

/* The ranks that have said this, a bit each. */
static uint32_t find_heard(const exchange_t *x, uint32_t kind)
{
	uint32_t found = 0;

	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		const connection_t *c = &x->connections[i];

		found |= c->rank != NO_RANK && c->heard & kind ? 1u << c->rank : 0;
	}

	return found;
}

static void close_fd(int *p_fd)
{
	if (*p_fd >= 0) {
		close(*p_fd);
	}
	*p_fd = -1;
}

/* ---- messages to others ---------------------------------------------------------------------- */

/* A peer that is gone is noticed by what it sends. */
static void send_message(exchange_t *x, connection_t *c, uint32_t kind)
{
	kvk_ep_message_t message = x->own;
	const int passed = kind == KVK_EP_HELLO ? x->config->heap : -1;
	ssize_t n;

	message.kind = kind;
	message.lost = x->fault->lost;
	message.status = x->status;
	n = kv_sock_send_message(c->fd, &message, sizeof message, passed, MSG_DONTWAIT);

	if (n != (ssize_t)sizeof message && kind != KVK_EP_GIVE_UP && errno != EPIPE && errno != ECONNRESET) {
		(void)fail(x, KV_ERR_IO, 0, "a message to a rank could not be sent: %s", strerror(errno));
	}
}

static void send_to_all(exchange_t *x, uint32_t kind)
{
	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		if (x->connections[i].fd >= 0) {
			send_message(x, &x->connections[i], kind);
		}
	}
}

/* ---- messages of others ---------------------------------------------------------------------- */

/* NULL: it is this rank's plan. */
static const char *find_difference(const exchange_t *x, const kvk_ep_message_t *m, uint32_t *p_theirs, uint32_t *p_ours)
{
	static const char *const names[] = {"ranks",      "experts", "experts a token",   "elements of a row",
					    "max tokens", "groups",  "results in flight", "link"};
	const size_t first = offsetof(kvk_ep_message_t, shape);

	_Static_assert(offsetof(kvk_ep_message_t, shape) + sizeof names / sizeof *names * sizeof(uint32_t) == sizeof *m,
		       "a name for each field");
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		memcpy(p_theirs, (const uint8_t *)m + first + i * sizeof *p_theirs, sizeof *p_theirs);
		memcpy(p_ours, (const uint8_t *)&x->own + first + i * sizeof *p_ours, sizeof *p_ours);
		if (*p_theirs != *p_ours) {
			return names[i];
		}
	}

	return m->plan == x->own.plan ? NULL : "a layout of another version";
}

/* Of host memory all is known here; what else there is, who maps it finds out. */
static int is_heap(const exchange_t *x, int fd)
{
	const int seals = fcntl(fd, F_GET_SEALS);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) != 0) {
		return 0;
	}

	return !S_ISREG(st.st_mode) ||
	       (seals >= 0 && seals & F_SEAL_SHRINK && (uint64_t)st.st_size >= x->config->plan->heap_bytes);
}

static kv_status_t hear_hello(exchange_t *x, connection_t *c, const kvk_ep_message_t *m)
{
	const uint32_t at = (uint32_t)(c - x->connections), own = x->config->rank;
	uint32_t theirs = 0, ours = 0;
	const char *what;

	what = find_difference(x, m, &theirs, &ours);
	if (at >= own) {
		send_message(x, c, KVK_EP_HELLO); /* before the plan is refused: there it is refused, too */
	}
	if (what) {
		return fail(x, KV_ERR_IDENTITY, 0, "rank %u has another plan: %s: %u there, %u here", m->rank, what,
			    theirs, ours);
	}
	if (m->rank >= x->ranks || m->rank == own || (at < own ? m->rank != at : m->rank < own)) {
		return fail(x, KV_ERR_PROTO, 0, "a process takes itself for rank %u", m->rank);
	}
	if (find_heard(x, KVK_EP_HELLO) >> m->rank & 1u) {
		return fail(x, KV_ERR_EXISTS, 0, "rank %u is there twice", m->rank);
	}
	if (!is_heap(x, c->heap)) {
		return fail(x, KV_ERR_PROTO, 0, "rank %u has no heap of %zu bytes that cannot shrink", m->rank,
			    x->config->plan->heap_bytes);
	}
	c->rank = m->rank;
	c->heard |= KVK_EP_HELLO;

	return KV_OK;
}

static kv_status_t hear(exchange_t *x, connection_t *c)
{
	kvk_ep_message_t m;

	memcpy(&m, c->bytes, sizeof m);
	c->have = 0;
	if (m.magic == KVK_EP_MESSAGE_MAGIC && m.kind == KVK_EP_HELLO) {
		return hear_hello(x, c, &m);
	}
	if (m.magic == KVK_EP_MESSAGE_MAGIC && m.kind == KVK_EP_READY && c->heard & KVK_EP_HELLO && c->rank == m.rank) {
		c->heard |= KVK_EP_READY;
		return KV_OK;
	}
	if (m.magic == KVK_EP_MESSAGE_MAGIC && m.kind == KVK_EP_GIVE_UP && m.status < 0 && m.rank < x->ranks) {
		c->heard |= KVK_EP_GIVE_UP;
		c->rank = c->rank == NO_RANK ? m.rank : c->rank;
		return fail(x, (kv_status_t)m.status, m.lost, "rank %u gives up: %s", m.rank,
			    kv_status_text((kv_status_t)m.status));
	}

	return fail(x, KV_ERR_PROTO, 0, "a process sends what is no message of an exchange");
}

/* The end of a connection. One that sent nothing may have been another process's look at the socket. */
static kv_status_t hear_end(exchange_t *x, connection_t *c)
{
	close_fd(&c->fd);
	if (c->have > 0) {
		return fail(x, KV_ERR_PROTO, 0, "a message is cut off after %zu bytes", c->have);
	}
	if (c->heard & KVK_EP_HELLO && !(c->heard & (KVK_EP_READY | KVK_EP_GIVE_UP))) {
		return fail(x, KV_ERR_CLOSED, 1u << c->rank, "rank %u has ended", c->rank);
	}

	return KV_OK;
}

/* One descriptor, with the first byte of a HELLO. */
static kv_status_t take_heap(exchange_t *x, connection_t *c, const int *fds, uint32_t n)
{
	if (n == 1 && c->have == 0 && !(c->heard & KVK_EP_HELLO)) {
		c->heap = fds[0];
		return KV_OK;
	}
	for (uint32_t i = 0; n != UINT32_MAX && i < n; i++) {
		close(fds[i]);
	}

	return n == 0 ? KV_OK : fail(x, KV_ERR_PROTO, 0, "a message has descriptors that it may not have");
}

/* All that has come. */
static kv_status_t receive(exchange_t *x, connection_t *c)
{
	kv_status_t status = KV_OK;

	while (status == KV_OK && c->fd >= 0) {
		int fds[KV_WIRE_MAX_FDS];
		uint32_t count = 0;
		size_t n = 0;

		status = kv_sock_recv(c->fd, c->bytes + c->have, sizeof c->bytes - c->have, &n, fds, &count);
		if (status == KV_PENDING) {
			return KV_OK;
		}
		if (status != KV_OK) {
			return hear_end(x, c);
		}
		status = take_heap(x, c, fds, count);
		c->have += n;
		if (status == KV_OK && c->have == sizeof c->bytes) {
			status = hear(x, c);
		}
	}

	return status;
}

/* ---- connections ----------------------------------------------------------------------------- */

static kv_status_t check_user(exchange_t *x, int fd)
{
	struct ucred peer = {.uid = (uid_t)-1};
	socklen_t len = sizeof peer;

	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) != 0 || peer.uid != geteuid()) {
		return fail(x, KV_ERR_NOT_PERMITTED, 0, "a process of user %u is at a socket of user %u",
			    (unsigned)peer.uid, (unsigned)geteuid());
	}

	return KV_OK;
}

static void name_socket(const exchange_t *x, uint32_t rank, char *out, size_t cap)
{
	(void)snprintf(out, cap, "%s/rank-%u", x->config->directory, rank);
}

/* To the ranks below that are not connected. */
static void connect_below(exchange_t *x)
{
	char path[sizeof x->path];

	for (uint32_t r = 0; r < x->config->rank && x->status == KV_OK; r++) {
		connection_t *c = &x->connections[r];
		int error;

		name_socket(x, r, path, sizeof path);
		if (c->fd < 0 && !c->heard && kv_sock_connect(path, &c->fd, &error) == KV_OK &&
		    check_user(x, c->fd) == KV_OK) {
			send_message(x, c, KVK_EP_HELLO);
		}
	}
}

static connection_t *find_free(exchange_t *x)
{
	for (uint32_t i = x->config->rank; i < CONNECTIONS; i++) {
		connection_t *c = &x->connections[i];

		if (c->fd < 0 && !c->heard) {
			return c;
		}
	}

	return NULL;
}

static void accept_all(exchange_t *x)
{
	connection_t *c = find_free(x);

	while (c && x->status == KV_OK) {
		c->fd = accept4(x->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
		if (c->fd < 0) {
			return;
		}
		(void)check_user(x, c->fd);
		c = find_free(x);
	}
}

static void wait_for_events(const exchange_t *x)
{
	struct pollfd polled[CONNECTIONS + 1] = {{.fd = x->listener, .events = POLLIN}};

	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		polled[i + 1] = (struct pollfd){.fd = x->connections[i].fd, .events = POLLIN};
	}
	(void)poll(polled, CONNECTIONS + 1, POLL_MS);
}

static void receive_all(exchange_t *x)
{
	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		(void)receive(x, &x->connections[i]);
	}
}

/* ---- the exchange ---------------------------------------------------------------------------- */

static kv_status_t check_directory(exchange_t *x)
{
	const char *path = x->config->directory;
	struct stat st;

	(void)mkdir(path, 0700);
	if (lstat(path, &st) != 0 || !S_ISDIR(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 077) != 0) {
		return fail(x, KV_ERR_PATH, 0, "%s is no directory of mode 0700 of this user", path);
	}

	return KV_OK;
}

static kv_status_t open_socket(exchange_t *x)
{
	kv_status_t status = check_directory(x);
	kv_sock_error_t error = {0};
	char why[200];

	if (status != KV_OK) {
		return status;
	}
	name_socket(x, x->config->rank, x->path, sizeof x->path);
	status = kv_sock_listen(x->path, 0600, (int)CONNECTIONS, &x->listener, &error);
	if (status == KV_ERR_LOCKED) {
		return fail(x, KV_ERR_EXISTS, 0, "rank %u is there twice", x->config->rank);
	}

	return status == KV_OK ? KV_OK
			       : fail(x, status, 0, "no socket at %s: %s", x->path,
				      kv_sock_error_text(status, &error, why, sizeof why));
}

static int is_complete(exchange_t *x)
{
	if (!x->is_ready && find_heard(x, KVK_EP_HELLO) == x->all) {
		x->is_ready = 1;
		send_to_all(x, KVK_EP_READY);
	}

	return x->status == KV_OK && find_heard(x, KVK_EP_READY) == x->all;
}

static void run(exchange_t *x)
{
	while (x->status == KV_OK && !is_complete(x)) {
		/* Before what has come is read: a rank that stood still in between would name those that have come. */
		const int is_over = kv_now_ns(x->config->env) >= x->deadline_ns;

		connect_below(x);
		wait_for_events(x);
		accept_all(x);
		receive_all(x);
		if (is_over && x->status == KV_OK && !is_complete(x)) {
			(void)fail(x, KV_ERR_TIMEOUT, 0, "the time is up");
		}
	}
}

static void name_lost(exchange_t *x)
{
	char *why = x->fault->why;
	int n = snprintf(why, sizeof x->fault->why, "not in time:");

	for (uint32_t r = 0; r < x->ranks; r++) {
		if (x->fault->lost >> r & 1u) {
			n += snprintf(why + n, sizeof x->fault->why - (size_t)n, " rank %u", r);
		}
	}
}

/* Those that have not come. Of a rank that waits as this one does, the answer. */
static uint32_t find_silent(const exchange_t *x, int *p_may_answer)
{
	const uint32_t silent = x->all & ~find_heard(x, KVK_EP_READY | KVK_EP_GIVE_UP);

	*p_may_answer = 0;
	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		const connection_t *c = &x->connections[i];

		*p_may_answer |= c->fd >= 0 && c->rank != NO_RANK && silent >> c->rank & 1u;
	}

	return silent;
}

/* Others learn of it before this rank is gone. */
static void give_up(exchange_t *x)
{
	const uint64_t end_ns = kv_now_ns(x->config->env) + x->grace_ns;
	uint32_t silent;
	int may_answer;

	if (x->status == KV_ERR_TIMEOUT) {
		x->fault->lost |= x->all & ~find_heard(x, KVK_EP_HELLO);
	}
	send_to_all(x, KVK_EP_GIVE_UP);
	if (x->status != KV_ERR_TIMEOUT) {
		return;
	}
	for (;;) {
		const int is_over = kv_now_ns(x->config->env) >= end_ns;

		receive_all(x);
		silent = find_silent(x, &may_answer);
		if (!may_answer || is_over) {
			break;
		}
		wait_for_events(x);
	}
	x->fault->lost |= silent;
	name_lost(x);
}

/* The socket's file first: while it is there the socket is open, and no other process takes its place. */
static void close_all(exchange_t *x, int *heaps)
{
	if (x->listener >= 0) {
		unlink(x->path);
	}
	close_fd(&x->listener);
	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		connection_t *c = &x->connections[i];

		close_fd(&c->fd);
		if (x->status == KV_OK && c->rank != NO_RANK) {
			heaps[c->rank] = c->heap;
		} else {
			close_fd(&c->heap);
		}
	}
}

kv_status_t kvk_ep_exchange(const kvk_ep_exchange_t *config, int *heaps, kvk_ep_exchange_fault_t *fault)
{
	const uint64_t timeout_ns = (config->timeout_us ? config->timeout_us : TIMEOUT_US) * 1000u;
	const uint32_t ranks = config->plan->shape.ranks;
	exchange_t x = {.config = config,
			.fault = fault,
			.ranks = ranks,
			.all = config->rank < ranks ? ((1u << ranks) - 1u) & ~(1u << config->rank) : 0,
			.listener = -1,
			.own = {.magic = KVK_EP_MESSAGE_MAGIC,
				.rank = config->rank,
				.plan = kv_digest(config->plan, sizeof *config->plan),
				.shape = config->plan->shape,
				.link = config->link},
			.deadline_ns = kv_now_ns(config->env) + timeout_ns,
			.grace_ns = timeout_ns / GRACE};

	*fault = (kvk_ep_exchange_fault_t){0};
	for (uint32_t i = 0; i < CONNECTIONS; i++) {
		x.connections[i] = (connection_t){.fd = -1, .heap = -1, .rank = NO_RANK};
	}
	for (uint32_t r = 0; r < ranks; r++) {
		heaps[r] = -1;
	}
	if (config->rank >= ranks) {
		(void)snprintf(fault->why, sizeof fault->why, "the plan has no rank %u", config->rank);
		return KV_ERR_ARG;
	}
	if (open_socket(&x) == KV_OK) {
		run(&x);
	}
	if (x.status != KV_OK) {
		give_up(&x);
	}
	close_all(&x, heaps);

	return x.status;
}
