/* A ZeroMQ SUB socket on the proxy's loop. */
#include "events/subscriber.h"

#include "kv/log.h"
#include "kv/types.h"

#include <errno.h>
#include <inttypes.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/un.h>
#include <zmq.h>

#define NS_IN_MS          UINT64_C(1000000)
#define RETRY_NS          (1000 * NS_IN_MS)
#define MALFORMED_NS      (30000 * NS_IN_MS) /* before the next try, where what came was no message of ours */
#define CONNECT_NS        (5000 * NS_IN_MS)
#define SERVE_MOST        64u /* messages at a time: others wait */
#define FRAMES            3u
#define EVENT_BYTES       6u /* of the monitor: u16 event, u32 value */
#define HANDSHAKE_REFUSED (ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | ZMQ_EVENT_HANDSHAKE_FAILED_AUTH)
#define CONNECTION_ENDED  (ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_CLOSED)

kv_status_t kvp_endpoint_check(const char *endpoint)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
	const char *colon = strrchr(endpoint, ':');
	struct addrinfo *found = NULL;
	char host[64];
	int len;

	if (strncmp(endpoint, "ipc:///", 7) == 0) {
		return strlen(endpoint + 6) < sizeof((struct sockaddr_un *)0)->sun_path ? KV_OK : KV_ERR_CONFIG;
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
	freeaddrinfo(found);

	return KV_OK;
}

/* ---- begin and end --------------------------------------------------------------------------- */

void kvp_subscriber_init(kvp_subscriber_t *subscriber)
{
	subscriber->state = KVP_SUBSCRIBER_DOWN;
	subscriber->fd = subscriber->monitor_fd = -1;
	subscriber->due_ns = 0;
}

static void close_socket(kvp_subscriber_t *subscriber, void **p_socket, int *p_fd)
{
	if (*p_fd >= 0) {
		kvp_loop_forget(subscriber->loop, *p_fd);
		*p_fd = -1;
	}
	if (*p_socket) {
		(void)zmq_close(*p_socket);
		*p_socket = NULL;
	}
}

static void disconnect(kvp_subscriber_t *subscriber, uint64_t next_ns)
{
	const int was_open = subscriber->state == KVP_SUBSCRIBER_OPEN;

	if (subscriber->socket) { /* first: libzmq's thread would wait for ever to tell a monitor that is closed */
		(void)zmq_socket_monitor(subscriber->socket, NULL, 0);
	}
	close_socket(subscriber, &subscriber->socket, &subscriber->fd);
	close_socket(subscriber, &subscriber->monitor, &subscriber->monitor_fd);
	subscriber->state = KVP_SUBSCRIBER_DOWN;
	subscriber->is_pending = 0;
	subscriber->due_ns = next_ns;
	if (was_open) {
		kv_log(KV_LOG_INFO, "events", "the connection to %s has ended", subscriber->endpoint);
		subscriber->lost(subscriber->ctx);
	}
}

void kvp_subscriber_fini(kvp_subscriber_t *subscriber)
{
	disconnect(subscriber, UINT64_MAX);
}

void kvp_subscriber_reconnect(kvp_subscriber_t *subscriber)
{
	disconnect(subscriber, 0);
}

static int watch(kvp_subscriber_t *subscriber, void *socket, int *p_fd)
{
	size_t size = sizeof *p_fd;

	return zmq_getsockopt(socket, ZMQ_FD, p_fd, &size) == 0 &&
	       kvp_loop_watch(subscriber->loop, KVP_FD_EVENTS, *p_fd, EPOLLIN) == KV_OK;
}

/* libzmq keeps at most KVP_MESSAGES_KEPT messages, then stops reading; a larger frame ends the connection. */
static int set_options(void *socket, const char *endpoint)
{
	const int64_t frame_max = (int64_t)KVP_FRAME_MAX;
	const struct {
		int name, value;
	} options[] = {{ZMQ_LINGER, 0},
		       {ZMQ_RCVHWM, KVP_MESSAGES_KEPT},
		       {ZMQ_RECONNECT_IVL, -1},
		       {ZMQ_IPV6, strchr(endpoint, '[') != NULL}};

	for (size_t i = 0; i < KV_COUNT_OF(options); i++) {
		if (zmq_setsockopt(socket, options[i].name, &options[i].value, sizeof options[i].value) != 0) {
			return 0;
		}
	}

	return zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &frame_max, sizeof frame_max) == 0 &&
	       zmq_setsockopt(socket, ZMQ_SUBSCRIBE, "", 0) == 0;
}

static int open_monitor(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	const int events = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | HANDSHAKE_REFUSED | CONNECTION_ENDED;
	const int none = 0;
	char name[64];

	/* one that no earlier socket has: libzmq frees names later, on a thread of its own */
	(void)snprintf(name, sizeof name, "inproc://%" PRIxPTR "-%" PRIu64, (uintptr_t)subscriber, now_ns);
	subscriber->monitor = zmq_socket(subscriber->context, ZMQ_PAIR);

	return subscriber->monitor && zmq_setsockopt(subscriber->monitor, ZMQ_LINGER, &none, sizeof none) == 0 &&
	       zmq_socket_monitor(subscriber->socket, name, events) == 0 && zmq_connect(subscriber->monitor, name) == 0;
}

static void start_connect(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	subscriber->socket = zmq_socket(subscriber->context, ZMQ_SUB);
	if (!subscriber->socket || !set_options(subscriber->socket, subscriber->endpoint) ||
	    !open_monitor(subscriber, now_ns) || !watch(subscriber, subscriber->monitor, &subscriber->monitor_fd) ||
	    !watch(subscriber, subscriber->socket, &subscriber->fd) ||
	    zmq_connect(subscriber->socket, subscriber->endpoint) != 0) {
		disconnect(subscriber, now_ns + RETRY_NS);
		return;
	}
	subscriber->state = KVP_SUBSCRIBER_CONNECTING;
	subscriber->due_ns = now_ns + CONNECT_NS;
	subscriber->is_pending = 1; /* the calls above may have taken what makes a descriptor readable */
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

/* ---- what comes ------------------------------------------------------------------------------ */

static void set_open(kvp_subscriber_t *subscriber)
{
	if (subscriber->state == KVP_SUBSCRIBER_CONNECTING) {
		subscriber->state = KVP_SUBSCRIBER_OPEN;
		kv_log(KV_LOG_INFO, "events", "subscribed to %s", subscriber->endpoint);
	}
}

static void refuse(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	subscriber->malformed++;
	kv_log(KV_LOG_WARN, "events", "%s sends what is no event", subscriber->endpoint);
	disconnect(subscriber, now_ns + MALFORMED_NS);
}

/* The next message of at most `most` frames. Returns how many it has; 0: none has come. */
static unsigned receive(void *socket, zmq_msg_t *frames, unsigned most)
{
	for (unsigned n = 0; n < most; n++) {
		int size;

		do {
			size = zmq_msg_recv(&frames[n], socket, ZMQ_DONTWAIT);
		} while (size < 0 && errno == EINTR);
		if (size < 0) {
			return 0; /* at the first frame: all frames of a message come at once */
		}
		if (!zmq_msg_more(&frames[n])) {
			return n + 1;
		}
	}

	return most + 1;
}

/* What the monitor tells. */
static void take_state(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	zmq_msg_t frames[2];
	uint16_t event;

	while (subscriber->monitor) {
		event = 0;
		zmq_msg_init(&frames[0]);
		zmq_msg_init(&frames[1]);
		if (receive(subscriber->monitor, frames, 2) > 0 && zmq_msg_size(&frames[0]) == EVENT_BYTES) {
			memcpy(&event, zmq_msg_data(&frames[0]), sizeof event);
		}
		zmq_msg_close(&frames[0]);
		zmq_msg_close(&frames[1]);
		if (event == 0) {
			return;
		}
		if (event == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) {
			set_open(subscriber);
		} else if (event & HANDSHAKE_REFUSED) {
			refuse(subscriber, now_ns);
		} else {
			disconnect(subscriber, now_ns + RETRY_NS);
		}
	}
}

/* The message that is next, if any has come. */
static void take_message(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	zmq_msg_t frames[FRAMES];
	const uint8_t *number;
	uint64_t seq = 0;
	unsigned n;

	for (unsigned i = 0; i < FRAMES; i++) {
		zmq_msg_init(&frames[i]);
	}
	n = receive(subscriber->socket, frames, FRAMES);
	if (n == 0) {
		subscriber->is_pending = 0;
	} else if (n != FRAMES || zmq_msg_size(&frames[1]) != sizeof seq) {
		refuse(subscriber, now_ns);
	} else {
		set_open(subscriber);
		number = zmq_msg_data(&frames[1]);
		for (unsigned i = 0; i < sizeof seq; i++) {
			seq = seq << 8 | number[i];
		}
		subscriber->message(subscriber->ctx, seq, zmq_msg_data(&frames[2]), zmq_msg_size(&frames[2]));
	}
	for (unsigned i = 0; i < FRAMES; i++) {
		zmq_msg_close(&frames[i]);
	}
}

int kvp_subscriber_ready(kvp_subscriber_t *subscriber, int fd)
{
	const int is_its = fd == subscriber->fd || fd == subscriber->monitor_fd;

	subscriber->is_pending |= is_its;

	return is_its;
}

/* A descriptor of libzmq tells of new commands, not of messages: it is silent about what is left. So each round goes
 * on until nothing has come, or the subscriber stays pending. */
void kvp_subscriber_serve(kvp_subscriber_t *subscriber, uint64_t now_ns)
{
	take_state(subscriber, now_ns);
	for (unsigned i = 0; i < SERVE_MOST && subscriber->is_pending; i++) {
		take_message(subscriber, now_ns);
	}
}
