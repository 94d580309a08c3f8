/* A ZeroMQ PUB endpoint: protocol, log, connections. */
#include "io/events/zmtp.h"

#include "kv/env.h"
#include "kv/sock.h"
#include "kv/system.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BACKLOG        64
#define ACCEPTS_A_TURN 16
#define GREETING_BYTES 64u
#define FRAME_MAX      512u /* what a subscriber has to say fits: READY, topics, heartbeats */
#define IN_BYTES       (FRAME_MAX + 16u)
#define REST_MAX       ((size_t)2 * KVD_ZMTP_MESSAGE_MAX)
#define SEND_BYTES     262144u /* to one subscriber before it is the next one's turn */
#define HANDSHAKE_NS   UINT64_C(5000000000)
#define MESSAGE_MIN    64u /* the log can hold the end of one message in this many bytes */

#define FLAG_MORE    1u
#define FLAG_LONG    2u
#define FLAG_COMMAND 4u

typedef enum state { STATE_NEW, STATE_GREETED, STATE_OPEN } state_t;

typedef struct peer peer_t;

/* What epoll hands back: a connection, or the listening socket (peer NULL). */
typedef struct source {
	kvd_zmtp_t *zmtp;
	peer_t *peer;
	int fd;
} source_t;

struct peer {
	source_t source;
	peer_t *next;
	state_t state;
	uint64_t opened_ns;
	uint32_t subscriptions; /* of prefixes of the topic */
	int blocked;            /* its socket is full: epoll says when it takes more */
	uint64_t at;            /* position in the log of the next byte to send */
	uint8_t *rest;          /* goes first: handshake, answers, the end of a message that the log has given up */
	size_t rest_len, rest_done;
	uint8_t in[IN_BYTES];
	size_t in_len;
};

struct kvd_zmtp {
	source_t source;
	kv_metrics_t *metrics;
	char path[108];
	kv_sock_file_t file; /* the socket's, when it was bound */
	kvd_access_t access;
	uint8_t topic[255];
	size_t topic_len;
	int epoll_fd;
	int accept_paused;
	peer_t *peers;
	uint32_t peer_count, max_peers;

	/* the log: bytes [tail, head), and where its messages end */
	uint8_t *log;
	uint64_t size, head, tail;
	uint64_t *ends;
	uint64_t ends_cap, first_end, last_end;
	uint64_t ticked_head; /* head at the last tick */
	int touched;
};

static uint64_t now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);

	return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

/* ---- connections ----------------------------------------------------------------------------- */

static void peer_close(peer_t *peer)
{
	peer_t **link = &peer->source.zmtp->peers;

	while (*link != peer) {
		link = &(*link)->next;
	}
	*link = peer->next;
	peer->source.zmtp->peer_count--;
	close(peer->source.fd);
	free(peer->rest);
	free(peer);
}

/* Bytes to send before anything else. 0: there are too many already, or no memory. */
static int rest_add(peer_t *peer, const uint8_t *bytes, size_t n)
{
	uint8_t *rest;

	if (peer->rest_len + n > REST_MAX) {
		return 0;
	}
	rest = realloc(peer->rest, peer->rest_len + n);
	if (!rest) {
		return 0;
	}
	memcpy(rest + peer->rest_len, bytes, n);
	peer->rest = rest;
	peer->rest_len += n;

	return 1;
}

static void peer_open(kvd_zmtp_t *zmtp, int fd)
{
	static const uint8_t greeting[GREETING_BYTES] = {
		0xff, [8] = 1, [9] = 0x7f, [10] = 3, [12] = 'N', 'U', 'L', 'L'};
	peer_t *peer = calloc(1, sizeof *peer);
	struct epoll_event event = {.events = EPOLLIN};

	if (!peer || !rest_add(peer, greeting, sizeof greeting)) {
		goto err_free;
	}
	peer->source = (source_t){zmtp, peer, fd};
	peer->opened_ns = now_ns();
	peer->at = zmtp->head;
	event.data.ptr = &peer->source;
	if (epoll_ctl(zmtp->epoll_fd, EPOLL_CTL_ADD, fd, &event) != 0) {
		goto err_free;
	}
	peer->next = zmtp->peers;
	zmtp->peers = peer;
	zmtp->peer_count++;
	return;

err_free:
	if (peer) {
		free(peer->rest);
	}
	free(peer);
	close(fd);
}

static void listen_for(kvd_zmtp_t *zmtp, uint32_t events)
{
	struct epoll_event event = {.events = events, .data.ptr = &zmtp->source};

	(void)epoll_ctl(zmtp->epoll_fd, EPOLL_CTL_MOD, zmtp->source.fd, &event);
	zmtp->accept_paused = events == 0;
}

static void accept_some(kvd_zmtp_t *zmtp)
{
	for (int i = 0; i < ACCEPTS_A_TURN; i++) {
		int fd = accept4(zmtp->source.fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0 && zmtp->peer_count >= zmtp->max_peers) {
			kv_metric_add(zmtp->metrics, KV_M_SUBSCRIBERS_REFUSED, 1);
			close(fd);
		} else if (fd >= 0) {
			peer_open(zmtp, fd);
		} else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
			kv_metric_add(zmtp->metrics, KV_M_FD_EXHAUSTED, 1);
			listen_for(zmtp, 0); /* until the next tick */
			return;
		} else if (errno != EINTR && errno != ECONNABORTED) {
			return;
		}
	}
}

/* ---- the log --------------------------------------------------------------------------------- */

static uint64_t end_at(const kvd_zmtp_t *zmtp, uint64_t i)
{
	return zmtp->ends[i & (zmtp->ends_cap - 1)];
}

/* Where the message ends in whose midst `at` lies; `at` itself between two messages. */
static uint64_t boundary(const kvd_zmtp_t *zmtp, uint64_t at)
{
	uint64_t low = zmtp->first_end, high = zmtp->last_end;

	if (at == zmtp->tail) {
		return at;
	}
	while (low < high) {
		uint64_t mid = low + (high - low) / 2;

		if (end_at(zmtp, mid) < at) {
			low = mid + 1;
		} else {
			high = mid;
		}
	}

	return low < zmtp->last_end ? end_at(zmtp, low) : zmtp->head;
}

/* Bytes [from, from + n) of the log, in one piece or two. */
static int log_pieces(const kvd_zmtp_t *zmtp, uint64_t from, uint64_t n, struct iovec piece[2])
{
	uint64_t at = from & (zmtp->size - 1), first = zmtp->size - at < n ? zmtp->size - at : n;

	piece[0] = (struct iovec){zmtp->log + at, first};
	piece[1] = (struct iovec){zmtp->log, n - first};

	return n > first ? 2 : 1;
}

static void log_write(kvd_zmtp_t *zmtp, const uint8_t *bytes, size_t n)
{
	struct iovec piece[2];

	log_pieces(zmtp, zmtp->head, n, piece);
	memcpy(piece[0].iov_base, bytes, piece[0].iov_len);
	memcpy(piece[1].iov_base, bytes + piece[0].iov_len, piece[1].iov_len);
	zmtp->head += n;
}

/* The peer goes on at the next message; what it has begun to send it sends to its end. 0: there is no memory for
 * that. */
static int leave_message(peer_t *peer)
{
	const kvd_zmtp_t *zmtp = peer->source.zmtp;
	uint64_t end = peer->subscriptions > 0 ? boundary(zmtp, peer->at) : peer->at;
	struct iovec piece[2];

	if (end > peer->at) {
		int n = log_pieces(zmtp, peer->at, end - peer->at, piece);

		for (int i = 0; i < n; i++) {
			if (!rest_add(peer, piece[i].iov_base, piece[i].iov_len)) {
				return 0;
			}
		}
		peer->at = end;
	}

	return 1;
}

/* The log's oldest message goes. Who has not begun to send it misses it. */
static void drop_oldest(kvd_zmtp_t *zmtp)
{
	uint64_t end = end_at(zmtp, zmtp->first_end);
	peer_t *next;

	for (peer_t *peer = zmtp->peers; peer; peer = next) {
		next = peer->next;
		if (peer->at >= end) {
			continue;
		}
		if (peer->at > zmtp->tail) {
			if (!leave_message(peer)) {
				peer_close(peer);
			}
			continue;
		}
		peer->at = end;
		kv_metric_add(zmtp->metrics, KV_M_EVENTS_MISSED, peer->subscriptions > 0);
	}
	zmtp->tail = end;
	zmtp->first_end++;
}

static size_t frame_head(uint8_t *out, unsigned flags, uint64_t len)
{
	if (len < 256) {
		out[0] = (uint8_t)flags;
		out[1] = (uint8_t)len;
		return 2;
	}
	out[0] = (uint8_t)(flags | FLAG_LONG);
	for (uint32_t i = 0; i < 8; i++) {
		out[1 + i] = (uint8_t)(len >> (56 - 8 * i));
	}

	return 9;
}

void kvd_zmtp_put(kvd_zmtp_t *zmtp, uint64_t seq, const uint8_t *payload, size_t len)
{
	uint8_t head[KVD_ZMTP_HEAD_MAX];
	size_t n = frame_head(head, FLAG_MORE, zmtp->topic_len);

	kv_assert(len <= KVD_ZMTP_MESSAGE_MAX - KVD_ZMTP_HEAD_MAX);
	memcpy(head + n, zmtp->topic, zmtp->topic_len);
	n += zmtp->topic_len;
	n += frame_head(head + n, FLAG_MORE, 8);
	for (uint32_t i = 0; i < 8; i++) {
		head[n++] = (uint8_t)(seq >> (56 - 8 * i));
	}
	n += frame_head(head + n, 0, len);

	while (zmtp->head + n + len - zmtp->tail > zmtp->size || zmtp->last_end - zmtp->first_end == zmtp->ends_cap) {
		drop_oldest(zmtp);
	}
	log_write(zmtp, head, n);
	log_write(zmtp, payload, len);
	zmtp->ends[zmtp->last_end++ & (zmtp->ends_cap - 1)] = zmtp->head;
	zmtp->touched = 1;
}

/* ---- output ---------------------------------------------------------------------------------- */

static void wait_writable(peer_t *peer, int on)
{
	struct epoll_event event = {.events = on ? EPOLLIN | EPOLLOUT : EPOLLIN, .data.ptr = &peer->source};

	if (peer->blocked != on) {
		peer->blocked = on;
		(void)epoll_ctl(peer->source.zmtp->epoll_fd, EPOLL_CTL_MOD, peer->source.fd, &event);
	}
}

static int has_output(const peer_t *peer)
{
	return peer->rest_len > 0 || (peer->subscriptions > 0 && peer->at < peer->source.zmtp->head);
}

/* One send. 0: the connection has ended. */
static int peer_send(peer_t *peer)
{
	const kvd_zmtp_t *zmtp = peer->source.zmtp;
	struct iovec piece[3];
	struct msghdr message = {.msg_iov = piece};
	size_t rest = peer->rest_len - peer->rest_done;
	uint64_t n = peer->subscriptions > 0 ? zmtp->head - peer->at : 0;
	ssize_t sent;

	if (rest > 0) {
		piece[message.msg_iovlen++] = (struct iovec){peer->rest + peer->rest_done, rest};
	}
	n = n < SEND_BYTES ? n : SEND_BYTES;
	if (n > 0) {
		message.msg_iovlen += (size_t)log_pieces(zmtp, peer->at, n, piece + message.msg_iovlen);
	}
	sent = sendmsg(peer->source.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
	if (sent < 0) {
		if (errno == EAGAIN || errno == ENOBUFS) {
			wait_writable(peer, 1);
		}
		return errno == EAGAIN || errno == ENOBUFS || errno == EINTR;
	}
	if ((size_t)sent < rest) {
		peer->rest_done += (size_t)sent;
		return 1;
	}
	free(peer->rest);
	peer->rest = NULL;
	peer->rest_len = peer->rest_done = 0;
	peer->at += (uint64_t)sent - rest;

	return 1;
}

int kvd_zmtp_flush(kvd_zmtp_t *zmtp)
{
	peer_t *next;
	int more = 0;

	for (peer_t *peer = zmtp->peers; peer; peer = next) {
		next = peer->next;
		if (peer->blocked || !has_output(peer)) {
			continue;
		}
		if (!peer_send(peer)) {
			peer_close(peer);
			continue;
		}
		more |= !peer->blocked && has_output(peer);
	}

	return more;
}

int kvd_zmtp_waiting(const kvd_zmtp_t *zmtp)
{
	for (const peer_t *peer = zmtp->peers; peer; peer = peer->next) {
		if (has_output(peer)) {
			return 1;
		}
	}

	return 0;
}

/* ---- input ----------------------------------------------------------------------------------- */

static int starts(const uint8_t *body, size_t len, const char *text)
{
	return len >= strlen(text) && memcmp(body, text, strlen(text)) == 0;
}

/* Somebody who subscribes: SUB or XSUB. */
static int ready_ok(const uint8_t *body, size_t len)
{
	size_t at = 6;

	while (at < len) {
		size_t name = body[at], value = at + 1 + name, n;

		if (value + 4 > len) {
			return 0;
		}
		n = (size_t)body[value] << 24 | (size_t)body[value + 1] << 16 | (size_t)body[value + 2] << 8 |
		    body[value + 3];
		if (n > len - value - 4) {
			return 0;
		}
		if (name == 11 && memcmp(body + at + 1, "Socket-Type", 11) == 0) {
			const uint8_t *type = body + value + 4;

			return (n == 3 && memcmp(type, "SUB", 3) == 0) || (n == 4 && memcmp(type, "XSUB", 4) == 0);
		}
		at = value + 4 + n;
	}

	return 0;
}

static int subscribe(peer_t *peer, const uint8_t *prefix, size_t len, int on)
{
	const kvd_zmtp_t *zmtp = peer->source.zmtp;

	if (len > zmtp->topic_len || memcmp(prefix, zmtp->topic, len) != 0) {
		return 1; /* of a topic this endpoint does not have */
	}
	if (on) {
		peer->at = peer->subscriptions == 0 ? zmtp->head : peer->at;
		peer->subscriptions += peer->subscriptions < UINT32_MAX;
		return 1;
	}
	if (peer->subscriptions == 1 && !leave_message(peer)) {
		return 0;
	}
	peer->subscriptions -= peer->subscriptions > 0;

	return 1;
}

static int answer_ping(peer_t *peer, const uint8_t *body, size_t len)
{
	uint8_t pong[2 + 5 + 16] = {FLAG_COMMAND, 0, 4, 'P', 'O', 'N', 'G'};
	size_t context = len - 7;

	if (len < 7 || context > 16) {
		return 0;
	}
	pong[1] = (uint8_t)(5 + context);
	memcpy(pong + 7, body + 7, context);

	return leave_message(peer) && rest_add(peer, pong, 7 + context);
}

/* One whole frame. 0: it ends the connection. */
static int take_frame(peer_t *peer, unsigned flags, const uint8_t *body, size_t len)
{
	if (peer->state == STATE_GREETED) {
		peer->state = STATE_OPEN;
		return (flags & FLAG_COMMAND) && starts(body, len, "\5READY") && ready_ok(body, len);
	}
	if (!(flags & FLAG_COMMAND)) {
		return len == 0 || body[0] > 1 || subscribe(peer, body + 1, len - 1, body[0]);
	}
	if (starts(body, len, "\4PING")) {
		return answer_ping(peer, body, len);
	}
	if (starts(body, len, "\11SUBSCRIBE")) {
		return subscribe(peer, body + 10, len - 10, 1);
	}

	return !starts(body, len, "\6CANCEL") || subscribe(peer, body + 7, len - 7, 0);
}

static int take_greeting(peer_t *peer)
{
	static const uint8_t ready[] = {FLAG_COMMAND, 25,  5,   'R', 'E', 'A', 'D', 'Y', 11, 'S', 'o', 'c', 'k', 'e',
					't',          '-', 'T', 'y', 'p', 'e', 0,   0,   0,  3,   'P', 'U', 'B'};

	if (peer->in[0] != 0xff || !(peer->in[9] & 1) || peer->in[10] < 3 || memcmp(peer->in + 12, "NULL", 5) != 0) {
		return 0;
	}
	peer->state = STATE_GREETED;

	return rest_add(peer, ready, sizeof ready);
}

/* Bytes at the beginning of the input that have been dealt with; *p_ok 0: the connection ends. */
static size_t take_one(peer_t *peer, int *p_ok)
{
	const uint8_t *in = peer->in;
	size_t header = in[0] & FLAG_LONG ? 9 : 2;
	uint64_t len = 0;

	if (peer->state == STATE_NEW) {
		if (peer->in_len < GREETING_BYTES) {
			return 0;
		}
		*p_ok = take_greeting(peer);
		return GREETING_BYTES;
	}
	if (peer->in_len < header) {
		return 0;
	}
	for (size_t i = 1; i < header; i++) {
		len = len << 8 | in[i];
	}
	/* A frame is refused when it is announced: nothing is kept for what has not come. */
	if ((in[0] & ~(FLAG_MORE | FLAG_LONG | FLAG_COMMAND)) != 0 || len > FRAME_MAX) {
		*p_ok = 0;
		return 0;
	}
	if (peer->in_len < header + len) {
		return 0;
	}
	*p_ok = take_frame(peer, in[0], in + header, len);

	return header + len;
}

static void peer_read(peer_t *peer)
{
	ssize_t n = recv(peer->source.fd, peer->in + peer->in_len, sizeof peer->in - peer->in_len, MSG_DONTWAIT);
	int ok = 1;

	if (n <= 0) {
		if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
			peer_close(peer);
		}
		return;
	}
	peer->in_len += (size_t)n;
	while (ok && peer->in_len > 0) {
		size_t used = take_one(peer, &ok);

		if (used == 0) {
			break;
		}
		peer->in_len -= used;
		memmove(peer->in, peer->in + used, peer->in_len);
	}
	if (!ok) {
		kv_metric_add(peer->source.zmtp->metrics, KV_M_SUBSCRIBERS_REFUSED, 1);
		peer_close(peer);
	}
}

void kvd_zmtp_ready(void *arg, uint32_t events)
{
	source_t *source = arg;

	if (!source->peer) {
		accept_some(source->zmtp);
		return;
	}
	if (events & EPOLLOUT) {
		wait_writable(source->peer, 0);
	}
	if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) {
		peer_read(source->peer);
	}
}

static void close_socket(kvd_zmtp_t *zmtp)
{
	if (zmtp->source.fd < 0) {
		return;
	}
	if (kv_sock_is_at(zmtp->path, zmtp->file)) {
		unlink(zmtp->path);
	}
	close(zmtp->source.fd);
	zmtp->source.fd = -1;
}

/* Listen, for the owner alone until it is given to others. `why` says why not. */
static kv_status_t open_socket(kvd_zmtp_t *zmtp, char *why, size_t cap)
{
	struct epoll_event event = {.events = EPOLLIN, .data.ptr = &zmtp->source};
	kv_sock_error_t error = {0};
	kv_status_t status = kv_sock_listen(zmtp->path, 0600, BACKLOG, &zmtp->source.fd, &error);

	if (status != KV_OK) {
		zmtp->source.fd = -1;
		(void)kv_sock_error_text(status, &error, why, cap);
		return status;
	}
	zmtp->file = kv_sock_file(zmtp->path);
	error.error = kvd_sockets_give(zmtp->path, &zmtp->access);
	if (error.error != 0) {
		status = KV_ERR_PATH; /* as of the sockets of sessions */
	} else if (epoll_ctl(zmtp->epoll_fd, EPOLL_CTL_ADD, zmtp->source.fd, &event) != 0) {
		error = (kv_sock_error_t){errno, "epoll_ctl"};
		status = kv_refused_status(error.error);
	}
	if (status != KV_OK) {
		close_socket(zmtp);
		(void)kv_sock_error_text(status, &error, why, cap);
	}

	return status;
}

/* One that was removed is bound again. */
static void restore_socket(kvd_zmtp_t *zmtp)
{
	char why[KV_REFUSED_TEXT];

	if (zmtp->source.fd >= 0 && kv_sock_is_at(zmtp->path, zmtp->file)) {
		return;
	}
	close_socket(zmtp);
	(void)open_socket(zmtp, why, sizeof why); /* else at the next tick; the core loop says why */
}

void kvd_zmtp_tick(kvd_zmtp_t *zmtp)
{
	uint64_t now = now_ns();
	peer_t *next;

	for (peer_t *peer = zmtp->peers; peer; peer = next) {
		next = peer->next;
		if (peer->state != STATE_OPEN && now - peer->opened_ns > HANDSHAKE_NS) {
			kv_metric_add(zmtp->metrics, KV_M_SUBSCRIBERS_REFUSED, 1);
			peer_close(peer);
		}
	}
	restore_socket(zmtp);
	if (zmtp->accept_paused && zmtp->source.fd >= 0) {
		listen_for(zmtp, EPOLLIN);
	}
	if (zmtp->touched && zmtp->head == zmtp->ticked_head && !kvd_zmtp_waiting(zmtp)) {
		zmtp->tail = zmtp->head;
		zmtp->first_end = zmtp->last_end;
		(void)madvise(zmtp->log, zmtp->size, MADV_DONTNEED);
		zmtp->touched = 0;
	}
	zmtp->ticked_head = zmtp->head;
}

/* ---- open and close -------------------------------------------------------------------------- */

static kv_status_t log_open(kvd_zmtp_t *zmtp, uint64_t bytes)
{
	zmtp->size = 262144;
	while (zmtp->size <= bytes / 2) {
		zmtp->size *= 2;
	}
	zmtp->ends_cap = zmtp->size / MESSAGE_MIN;
	zmtp->ends = calloc(zmtp->ends_cap, sizeof *zmtp->ends);
	zmtp->log = mmap(NULL, zmtp->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (zmtp->log == MAP_FAILED) {
		zmtp->log = NULL;
	}

	return zmtp->log && zmtp->ends ? KV_OK : KV_ERR_NOMEM;
}

kv_status_t kvd_zmtp_open(const kvd_zmtp_config_t *config, kvd_zmtp_t **p_zmtp, char *why, size_t cap)
{
	kvd_zmtp_t *zmtp = calloc(1, sizeof *zmtp);
	kv_status_t status = KV_ERR_PATH;

	if (!zmtp) {
		return KV_ERR_NOMEM;
	}
	zmtp->source = (source_t){zmtp, NULL, -1};
	zmtp->metrics = config->metrics;
	zmtp->epoll_fd = config->epoll_fd;
	zmtp->max_peers = config->max_subscribers;
	zmtp->topic_len = strlen(config->topic);
	if (zmtp->topic_len > sizeof zmtp->topic || strlen(config->path) >= sizeof zmtp->path) {
		goto err_close;
	}
	memcpy(zmtp->topic, config->topic, zmtp->topic_len);
	status = log_open(zmtp, config->log_bytes);
	if (status != KV_OK) {
		goto err_close;
	}
	memcpy(zmtp->path, config->path, strlen(config->path));
	zmtp->access = config->access;
	status = open_socket(zmtp, why, cap);
	if (status != KV_OK) {
		goto err_close;
	}
	*p_zmtp = zmtp;

	return KV_OK;

err_close:
	kvd_zmtp_close(zmtp);
	return status;
}

void kvd_zmtp_close(kvd_zmtp_t *zmtp)
{
	if (!zmtp) {
		return;
	}
	while (zmtp->peers) {
		peer_close(zmtp->peers);
	}
	close_socket(zmtp);
	if (zmtp->log) {
		munmap(zmtp->log, zmtp->size);
	}
	free(zmtp->ends);
	free(zmtp);
}
