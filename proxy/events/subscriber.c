/* A ZeroMQ SUB socket on the proxy's loop. */
#include "events/subscriber.h"

#include "kv/log.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/un.h>
#include <unistd.h>

#define NS_IN_MS     UINT64_C(1000000)
#define RETRY_NS     (1000 * NS_IN_MS)
#define MALFORMED_NS (30000 * NS_IN_MS) /* before the next try, where what came was no message of ours */
#define GREETING_NS  (5000 * NS_IN_MS)
#define READ_BYTES   ((size_t)64 * 1024) /* at a time: others wait */
#define GREETING     ((size_t)64)
#define COMMAND_MAX  512u
#define FRAMES       3u

enum { FLAG_MORE = 1, FLAG_LONG = 2, FLAG_COMMAND = 4 };

static const uint8_t hello_[] = {0xff, [8] = 1, [9] = 0x7f, [10] = 3, [12] = 'N', 'U', 'L', 'L', [64] = 4,
				 25,   5,       'R',        'E',      'A',        'D', 'Y', 11,  'S',
				 'o',  'c',     'k',        'e',      't',        '-', 'T', 'y', 'p',
				 'e',  0,       0,          0,        3,          'S', 'U', 'B'};
static const uint8_t ready_[] = {5, 'R', 'E', 'A', 'D', 'Y'};
static const uint8_t subscribe_[] = {0, 1, 1}; /* to all topics. libzmq takes it after its own READY only */

/* ---- bytes ----------------------------------------------------------------------------------- */

void kvp_zmtp_reset(kvp_zmtp_t *zmtp)
{
	free(zmtp->bytes);
	*zmtp = (kvp_zmtp_t){0};
}

static kv_status_t append(kvp_zmtp_t *zmtp, const uint8_t *data, size_t n)
{
	if (zmtp->len + n > zmtp->cap) {
		size_t cap = 2 * (zmtp->len + n);
		uint8_t *grown = realloc(zmtp->bytes, cap);

		if (!grown) {
			return KV_ERR_NOMEM;
		}
		zmtp->bytes = grown;
		zmtp->cap = cap;
	}
	memcpy(zmtp->bytes + zmtp->len, data, n);
	zmtp->len += n;

	return KV_OK;
}

static uint64_t big_endian(const uint8_t *bytes)
{
	uint64_t value = 0;

	for (unsigned i = 0; i < 8; i++) {
		value = value << 8 | bytes[i];
	}

	return value;
}

typedef struct frame {
	const uint8_t *data;
	size_t len;
	uint8_t flags;
} frame_t;

/* The frame at *p_at. KV_MISS: not all of it is there yet. */
static kv_status_t next_frame(const kvp_zmtp_t *zmtp, size_t *p_at, frame_t *frame)
{
	const uint8_t *at = zmtp->bytes + *p_at;
	const size_t left = zmtp->len - *p_at;
	size_t head;
	uint64_t len;

	if (left < 2) {
		return KV_MISS;
	}
	frame->flags = at[0];
	head = frame->flags & FLAG_LONG ? 9 : 2;
	if (left < head) {
		return KV_MISS;
	}
	len = frame->flags & FLAG_LONG ? big_endian(at + 1) : at[1];
	if (frame->flags > (FLAG_MORE | FLAG_LONG | FLAG_COMMAND) ||
	    len > (frame->flags & FLAG_COMMAND ? COMMAND_MAX : KVP_MESSAGE_MAX)) {
		return KV_ERR_PROTO;
	}
	if (left - head < len) {
		return KV_MISS;
	}
	frame->data = at + head;
	frame->len = (size_t)len;
	*p_at += head + frame->len;

	return KV_OK;
}

/* The message or command at *p_at; `frames` is what it has, 0: a command. KV_MISS: not all of it is there yet. */
static kv_status_t next_message(const kvp_zmtp_t *zmtp, size_t *p_at, frame_t frames[FRAMES], unsigned *p_n)
{
	size_t at = *p_at;
	unsigned n = 0;
	kv_status_t status;

	do {
		status = n < FRAMES ? next_frame(zmtp, &at, &frames[n]) : KV_ERR_PROTO;
		if (status != KV_OK) {
			return status == KV_MISS && zmtp->len - *p_at > KVP_MESSAGE_MAX ? KV_ERR_PROTO : status;
		}
		if (frames[n].flags & FLAG_COMMAND) {
			if (n > 0 || frames[n].flags & FLAG_MORE) {
				return KV_ERR_PROTO;
			}
			break;
		}
	} while (frames[n++].flags & FLAG_MORE);
	*p_at = at;
	*p_n = n;

	return n == 0 || (n == FRAMES && frames[1].len == 8) ? KV_OK : KV_ERR_PROTO;
}

static kv_status_t read_greeting(kvp_zmtp_t *zmtp, size_t *p_at)
{
	const uint8_t *bytes = zmtp->bytes;

	if (zmtp->len < GREETING) {
		return KV_MISS;
	}
	if (bytes[0] != 0xff || !(bytes[9] & 1) || bytes[10] < 3 || memcmp(bytes + 12, "NULL", 5) != 0) {
		return KV_ERR_PROTO;
	}
	zmtp->is_greeted = 1;
	*p_at = GREETING;

	return KV_OK;
}

kv_status_t kvp_zmtp_feed(kvp_zmtp_t *zmtp, const uint8_t *data, size_t n, kvp_message_fn message, void *ctx)
{
	frame_t frames[FRAMES];
	kv_status_t status = KV_OK;
	unsigned count = 0;
	size_t at = 0;

	if (n == 0) {
		return KV_OK;
	}
	status = append(zmtp, data, n);
	if (status == KV_OK && !zmtp->is_greeted) {
		status = read_greeting(zmtp, &at);
	}
	while (status == KV_OK) {
		status = next_message(zmtp, &at, frames, &count);
		if (status == KV_OK && !zmtp->is_ready) {
			status = count == 0 && frames[0].len >= sizeof ready_ &&
						 memcmp(frames[0].data, ready_, sizeof ready_) == 0
					 ? KV_OK
					 : KV_ERR_PROTO;
			zmtp->is_ready = 1;
		} else if (status == KV_OK && count > 0) {
			message(ctx, big_endian(frames[1].data), frames[2].data, frames[2].len);
		}
	}
	if (status != KV_MISS) {
		return status;
	}
	zmtp->len -= at;
	if (zmtp->len > 0) {
		memmove(zmtp->bytes, zmtp->bytes + at, zmtp->len);
	} else {
		free(zmtp->bytes); /* an idle engine costs nothing */
		zmtp->bytes = NULL;
		zmtp->cap = 0;
	}

	return KV_OK;
}

/* ---- the socket ------------------------------------------------------------------------------ */

kv_status_t kvp_endpoint_address(const char *endpoint, struct sockaddr_storage *address, socklen_t *p_len)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
	struct sockaddr_un *path = (struct sockaddr_un *)address;
	const char *colon = strrchr(endpoint, ':');
	struct addrinfo *found = NULL;
	char host[64];
	int len;

	memset(address, 0, sizeof *address);
	if (strncmp(endpoint, "ipc:///", 7) == 0) {
		path->sun_family = AF_UNIX;
		*p_len = sizeof *path;
		return (size_t)snprintf(path->sun_path, sizeof path->sun_path, "%s", endpoint + 6) <
				       sizeof path->sun_path
			       ? KV_OK
			       : KV_ERR_CONFIG;
	}
	if (strncmp(endpoint, "tcp://", 6) != 0 || colon < endpoint + 6) {
		return KV_ERR_CONFIG;
	}
	endpoint += 6;
	len = (int)(colon - endpoint);
	if (endpoint[0] == '[' && len >= 2 && colon[-1] == ']') {
		endpoint++;
		len -= 2;
	}
	if (len == 0 || endpoint[0] == '*' ||
	    (size_t)snprintf(host, sizeof host, "%.*s", len, endpoint) >= sizeof host ||
	    getaddrinfo(host, colon + 1, &hints, &found) != 0) {
		return KV_ERR_CONFIG;
	}
	memcpy(address, found->ai_addr, found->ai_addrlen);
	*p_len = found->ai_addrlen;
	freeaddrinfo(found);

	return KV_OK;
}

void kvp_subscriber_init(kvp_subscriber_t *subscriber)
{
	subscriber->state = KVP_SUBSCRIBER_DOWN;
	subscriber->fd = -1;
	subscriber->due_ns = 0;
}

static void disconnect(kvp_subscriber_t *subscriber, uint64_t next_ns)
{
	const int was_ready = subscriber->zmtp.is_ready;

	if (subscriber->fd >= 0) {
		kvp_loop_forget(subscriber->loop, subscriber->fd);
		close(subscriber->fd);
		subscriber->fd = -1;
	}
	kvp_zmtp_reset(&subscriber->zmtp);
	subscriber->state = KVP_SUBSCRIBER_DOWN;
	subscriber->due_ns = next_ns;
	if (was_ready) {
		kv_log(KV_LOG_INFO, "events", "the connection to %s has ended", subscriber->endpoint);
		subscriber->lost(subscriber->ctx);
	}
}

void kvp_subscriber_fini(kvp_subscriber_t *subscriber)
{
	if (subscriber->loop) {
		disconnect(subscriber, UINT64_MAX);
	}
}

void kvp_subscriber_reconnect(kvp_subscriber_t *subscriber)
{
	disconnect(subscriber, 0);
}

static void start_connect(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	struct sockaddr_storage address;
	socklen_t len = 0;

	subscriber->due_ns = now_ns + RETRY_NS;
	if (kvp_endpoint_address(subscriber->endpoint, &address, &len) != KV_OK) {
		return;
	}
	subscriber->fd = socket(address.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (subscriber->fd < 0) {
		return;
	}
	if ((connect(subscriber->fd, (struct sockaddr *)&address, len) != 0 && errno != EINPROGRESS) ||
	    kvp_loop_watch(subscriber->loop, KVP_FD_EVENTS, subscriber->fd, EPOLLIN | EPOLLOUT) != KV_OK) {
		disconnect(subscriber, now_ns + RETRY_NS);
		return;
	}
	subscriber->state = KVP_SUBSCRIBER_CONNECTING;
	subscriber->due_ns = now_ns + GREETING_NS;
}

void kvp_subscriber_tick(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	if (subscriber->state == KVP_SUBSCRIBER_OPEN || now_ns < subscriber->due_ns) {
		return;
	}
	if (subscriber->state == KVP_SUBSCRIBER_DOWN) {
		start_connect(subscriber, now_ns);
	} else {
		disconnect(subscriber, now_ns + RETRY_NS);
	}
}

static int send_all(const kvp_subscriber_t *subscriber, const uint8_t *bytes, size_t n)
{
	return send(subscriber->fd, bytes, n, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)n;
}

static void say_hello(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	socklen_t len = sizeof(int);
	int error = 0;

	if (getsockopt(subscriber->fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0 || error != 0 ||
	    !send_all(subscriber, hello_, sizeof hello_) ||
	    kvp_loop_watch(subscriber->loop, KVP_FD_EVENTS, subscriber->fd, EPOLLIN) != KV_OK) {
		disconnect(subscriber, now_ns + RETRY_NS);
		return;
	}
	subscriber->state = KVP_SUBSCRIBER_GREETING;
}

static void take_bytes(kvp_subscriber_t *subscriber, const uint8_t *bytes, size_t n, uint64_t now_ns)
{
	kv_status_t status = kvp_zmtp_feed(&subscriber->zmtp, bytes, n, subscriber->message, subscriber->ctx);

	if (status != KV_OK) {
		subscriber->malformed++;
		kv_log(KV_LOG_WARN, "events", "%s sends what is no event: %s", subscriber->endpoint,
		       kv_status_text(status));
		disconnect(subscriber, now_ns + MALFORMED_NS);
	} else if (subscriber->state == KVP_SUBSCRIBER_GREETING && subscriber->zmtp.is_ready) {
		subscriber->state = KVP_SUBSCRIBER_OPEN;
		kv_log(KV_LOG_INFO, "events", "subscribed to %s", subscriber->endpoint);
		if (!send_all(subscriber, subscribe_, sizeof subscribe_)) {
			disconnect(subscriber, now_ns + RETRY_NS);
		}
	}
}

void kvp_subscriber_ready(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	static uint8_t bytes[READ_BYTES]; /* of the loop's thread */
	ssize_t n;

	if (subscriber->state == KVP_SUBSCRIBER_CONNECTING) {
		say_hello(subscriber, now_ns);
		return;
	}
	n = recv(subscriber->fd, bytes, sizeof bytes, MSG_DONTWAIT);
	if (n > 0) {
		take_bytes(subscriber, bytes, (size_t)n, now_ns);
	} else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
		disconnect(subscriber, now_ns + RETRY_NS);
	}
}
