/* One connection: the handshake, and bytes to frames. */
#include "net/link.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define READ_BYTES    (16u << 10) /* a record: nothing of it waits where poll() does not look */
#define READS_AT_MOST 64u         /* before the other links have their turn */
#define PINGS         4u          /* in the time after which silence is death */

struct kvd_link {
	kvd_link_config_t config;
	int fd;
	kvd_tls_t *tls;
	kvd_link_state_t state;
	int is_dialler, is_old;
	uint8_t ticket[KVD_NET_TICKET];
	kv_status_t status;
	char why[160];
	uint64_t born_ns, heard_ns, pinged_ns, now_ns;
	uint64_t pings;
	uint8_t *in;
	size_t in_cap, in_len;
	uint8_t *out;
	size_t out_cap, out_at, out_len; /* [out_at, out_len) waits */
	kvd_net_message_t message;       /* decoded */
};

/* ---- the end --------------------------------------------------------------------------------- */

void kvd_link_fail(kvd_link_t *link, kv_status_t status, const char *why)
{
	if (link->state == KVD_LINK_DEAD) {
		return;
	}
	link->state = KVD_LINK_DEAD;
	link->status = status;
	snprintf(link->why, sizeof link->why, "%s", why);
	close(link->fd);
	link->fd = -1;
}

kvd_tls_t *kvd_link_take(kvd_link_t *link, int *p_fd)
{
	kvd_tls_t *tls = link->tls;

	*p_fd = link->fd;
	link->tls = NULL;
	link->fd = -1;
	link->state = KVD_LINK_DEAD;

	return tls;
}

static const char *why_of(const kvd_link_t *link, kv_status_t status)
{
	if (status == KV_ERR_SECRET) {
		return link->state < KVD_LINK_OPEN ? "the other side does not have the key"
						   : "bytes were changed on their way";
	}
	if (status == KV_ERR_CLOSED) {
		return "the peer has closed the connection";
	}

	return kv_status_text(status);
}

/* A dialler that is not answered at all is told so: the other side may have had no room. */
static void fail_tls(kvd_link_t *link, kv_status_t status)
{
	if (status == KV_ERR_CLOSED && link->is_dialler && link->state == KVD_LINK_SHAKING) {
		kvd_link_fail(link, KV_ERR_BUSY, "the peer has refused the connection");
	} else {
		link->is_old = kvd_tls_is_old(link->tls);
		kvd_link_fail(link, status, why_of(link, status));
	}
}

static void fail_errno(kvd_link_t *link, kv_status_t status, const char *what, int error)
{
	char why[160];

	snprintf(why, sizeof why, "%s: %s", what, strerror(error));
	kvd_link_fail(link, status, why);
}

/* ---- sending --------------------------------------------------------------------------------- */

static kv_status_t reserve(uint8_t **p_data, size_t *p_cap, size_t need)
{
	size_t cap = *p_cap ? *p_cap : 4096;
	uint8_t *data;

	while (cap < need) {
		cap *= 2;
	}
	if (cap == *p_cap) {
		return KV_OK;
	}
	data = realloc(*p_data, cap);
	if (!data) {
		return KV_ERR_NOMEM;
	}
	*p_data = data;
	*p_cap = cap;

	return KV_OK;
}

static kv_status_t queue_frame(kvd_link_t *link, kvd_net_code_t code, const void *message)
{
	const kv_body_t *fields = kvd_net_body(code);
	kvd_net_header_t header = {.magic = KVD_NET_MAGIC, .version = KVD_NET_VERSION, .code = (uint8_t)code};
	size_t room = sizeof header + kv_body_size(fields, message);
	kv_status_t status;
	uint8_t *frame;

	/* FINISH has a few bytes, and each transfer one: without it the owner would wait for its deadline. */
	if (code != KVD_NET_FINISH && link->out_len - link->out_at + room > KVD_LINK_OUT_MAX) {
		return KV_ERR_BUSY;
	}
	if (link->out_at > 0) {
		memmove(link->out, link->out + link->out_at, link->out_len - link->out_at);
		link->out_len -= link->out_at;
		link->out_at = 0;
	}
	status = reserve(&link->out, &link->out_cap, link->out_len + room);
	if (status != KV_OK) {
		return status;
	}
	frame = link->out + link->out_len;
	status = kv_body_encode(fields, message, frame + sizeof header, room - sizeof header, &header.body);
	if (status != KV_OK) {
		return status;
	}
	memcpy(frame, &header, sizeof header);
	link->out_len += sizeof header + header.body;

	return KV_OK;
}

static void flush(kvd_link_t *link)
{
	while (link->state >= KVD_LINK_GREETED && link->state != KVD_LINK_DEAD && link->out_at < link->out_len) {
		size_t n = 0;
		kv_status_t status =
			kvd_tls_write(link->tls, link->out + link->out_at, link->out_len - link->out_at, &n);

		if (status == KV_PENDING) {
			return;
		}
		if (status != KV_OK) {
			fail_tls(link, status);
			return;
		}
		link->out_at += n;
	}
}

kv_status_t kvd_link_send(kvd_link_t *link, kvd_net_code_t code, const void *message)
{
	kv_status_t status = link->state == KVD_LINK_OPEN ? queue_frame(link, code, message) : KV_ERR_CLOSED;

	if (status == KV_OK) {
		flush(link);
	}

	return status;
}

/* ---- the handshake --------------------------------------------------------------------------- */

static kv_status_t say_hello(kvd_link_t *link)
{
	const kvd_net_hello_t hello = {.ticket = {link->ticket, link->config.ticket ? KVD_NET_TICKET : 0}};
	kv_status_t status = queue_frame(link, KVD_NET_HELLO, &hello);

	link->state = KVD_LINK_OPEN;
	if (status == KV_OK && link->config.ticket) {
		flush(link); /* a new connection takes so little */
		status = link->out_at == link->out_len ? KV_OK : KV_ERR_LIMIT;
	}
	if (status != KV_OK || link->state == KVD_LINK_DEAD) {
		return status;
	}

	return link->config.ticket ? link->config.ops->bytes(link->config.ctx, link, link->ticket)
				   : link->config.ops->opened(link->config.ctx, link);
}

static kv_status_t on_hello(kvd_link_t *link, const kvd_net_hello_t *hello)
{
	if (hello->ticket.len != 0 && hello->ticket.len != KVD_NET_TICKET) {
		return KV_ERR_PROTO;
	}
	if (hello->ticket.len != 0) {
		return link->config.ops->bytes(link->config.ctx, link, hello->ticket.data);
	}
	link->state = KVD_LINK_OPEN;

	return link->config.ops->opened(link->config.ctx, link);
}

static void shake(kvd_link_t *link)
{
	kv_status_t status = kvd_tls_handshake(link->tls);

	if (status == KV_PENDING) {
		return;
	}
	if (status != KV_OK) {
		fail_tls(link, status);
		return;
	}
	link->state = KVD_LINK_GREETED;
	status = link->is_dialler ? say_hello(link) : KV_OK;
	if (status != KV_OK) {
		kvd_link_fail(link, status, kv_status_text(status));
	}
}

/* ---- receiving ------------------------------------------------------------------------------- */

static kv_status_t handle(kvd_link_t *link, uint32_t code)
{
	const kvd_net_message_t *message = &link->message;

	if (code == KVD_NET_HELLO || link->state != KVD_LINK_OPEN) {
		return code == KVD_NET_HELLO && link->state == KVD_LINK_GREETED ? on_hello(link, &message->hello)
										: KV_ERR_PROTO;
	}
	link->heard_ns = link->now_ns;
	if (code == KVD_NET_PING) {
		const kvd_net_pong_t pong = {.number = message->ping.number};

		return queue_frame(link, KVD_NET_PONG, &pong);
	}

	return code == KVD_NET_PONG ? KV_OK : link->config.ops->received(link->config.ctx, link, code, message);
}

/* The header at the front of what has come: bytes of its whole frame, or 0 and a status. */
static size_t check_header(const kvd_link_t *link, const kvd_net_header_t *header, kv_status_t *p_status)
{
	*p_status = KV_ERR_PROTO;
	if (header->magic != KVD_NET_MAGIC || header->reserved != 0) {
		return 0;
	}
	if (header->version != KVD_NET_VERSION) {
		*p_status = KV_ERR_VERSION;
		return 0;
	}
	if (!kvd_net_body(header->code)) {
		return 0;
	}
	if (header->body > (link->state == KVD_LINK_OPEN ? KVD_NET_MAX_BODY : KVD_NET_EARLY_BODY)) {
		*p_status = KV_ERR_TOO_BIG;
		return 0;
	}
	*p_status = KV_OK;

	return sizeof *header + header->body;
}

static kv_status_t take_frame(kvd_link_t *link, const uint8_t *frame, const kvd_net_header_t *header)
{
	kv_status_t status =
		kv_body_decode(kvd_net_body(header->code), frame + sizeof *header, header->body, &link->message, NULL);

	return status == KV_OK ? handle(link, header->code) : status;
}

/* All whole frames. */
static void take_frames(kvd_link_t *link)
{
	size_t at = 0;

	while (link->state != KVD_LINK_DEAD && link->in_len - at >= sizeof(kvd_net_header_t)) {
		kvd_net_header_t header;
		kv_status_t status;
		size_t len;

		memcpy(&header, link->in + at, sizeof header);
		len = check_header(link, &header, &status);
		if (len > 0 && link->in_len - at < len) {
			if (reserve(&link->in, &link->in_cap, len) != KV_OK) {
				kvd_link_fail(link, KV_ERR_NOMEM, "no memory for a frame");
			}
			break;
		}
		if (len > 0) {
			status = take_frame(link, link->in + at, &header);
		}
		if (status != KV_OK) {
			kvd_link_fail(link, status, kv_status_text(status));
		}
		at += len;
	}
	if (at > 0) {
		memmove(link->in, link->in + at, link->in_len - at);
		link->in_len -= at;
	}
}

static void receive(kvd_link_t *link)
{
	for (uint32_t i = 0; i < READS_AT_MOST && link->state != KVD_LINK_DEAD; i++) {
		kv_status_t status;
		size_t n = 0;

		if (reserve(&link->in, &link->in_cap, link->in_len + READ_BYTES) != KV_OK) {
			kvd_link_fail(link, KV_ERR_NOMEM, "no memory to receive");
			return;
		}
		status = kvd_tls_read(link->tls, link->in + link->in_len, READ_BYTES, &n);
		if (status == KV_PENDING) {
			return;
		}
		if (status != KV_OK) {
			fail_tls(link, status);
		} else {
			link->in_len += n;
			take_frames(link);
		}
	}
}

/* ---- its life -------------------------------------------------------------------------------- */

static kvd_link_t *create(const kvd_link_config_t *config, int fd)
{
	kvd_link_t *link = calloc(1, sizeof *link);
	int on = 1;

	if (!link) {
		close(fd);
		return NULL;
	}
	link->config = *config;
	link->config.key = NULL;
	link->config.ticket = NULL;
	link->fd = fd;
	link->tls = config->key ? kvd_tls_dial(fd, config->key) : kvd_tls_accept(fd, config->ring);
	link->is_dialler = config->key != NULL;
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
	if (!link->tls) {
		kvd_link_free(link);
		return NULL;
	}
	if (config->ticket) {
		link->config.ticket = memcpy(link->ticket, config->ticket, sizeof link->ticket);
	}

	return link;
}

kvd_link_t *kvd_link_dial(const kvd_link_config_t *config, const struct sockaddr *address, socklen_t address_len)
{
	int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	kvd_link_t *link = fd >= 0 ? create(config, fd) : NULL;

	if (link && connect(fd, address, address_len) != 0 && errno != EINPROGRESS) {
		fail_errno(link, KV_ERR_UNREACHABLE, "cannot connect", errno);
	}

	return link;
}

kvd_link_t *kvd_link_accept(const kvd_link_config_t *config, int fd)
{
	kvd_link_t *link = create(config, fd);

	if (link) {
		link->state = KVD_LINK_SHAKING;
	}

	return link;
}

void kvd_link_free(kvd_link_t *link)
{
	if (!link) {
		return;
	}
	kvd_link_fail(link, KV_ERR_CLOSED, "closed");
	kvd_tls_free(link->tls);
	free(link->in);
	free(link->out);
	free(link);
}

int kvd_link_fd(const kvd_link_t *link)
{
	return link->fd;
}

short kvd_link_events(const kvd_link_t *link)
{
	int waits = link->state == KVD_LINK_CONNECTING || link->out_at < link->out_len ||
		    (link->tls && kvd_tls_wants_write(link->tls));

	return (short)((link->state == KVD_LINK_CONNECTING ? 0 : POLLIN) | (waits ? POLLOUT : 0));
}

/* Has connect() come to its end? */
static void finish_connecting(kvd_link_t *link)
{
	struct pollfd look = {.fd = link->fd, .events = POLLOUT};
	int error = 0;
	socklen_t len = sizeof error;

	if (poll(&look, 1, 0) <= 0) {
		return;
	}
	if (getsockopt(link->fd, SOL_SOCKET, SO_ERROR, &error, &len) != 0 || error != 0) {
		fail_errno(link, KV_ERR_UNREACHABLE, "cannot connect", error ? error : errno);
	} else {
		link->state = KVD_LINK_SHAKING;
	}
}

static void check_time(kvd_link_t *link)
{
	const kvd_net_ping_t ping = {.number = ++link->pings};

	if (link->state != KVD_LINK_OPEN) {
		if (link->now_ns - link->born_ns > KVD_LINK_HANDSHAKE_NS) {
			kvd_link_fail(link, KV_ERR_TIMEOUT, "the handshake was not over in time");
		}
		return;
	}
	if (link->now_ns - link->heard_ns > link->config.silence_ns) {
		kvd_link_fail(link, KV_ERR_TIMEOUT, "nothing was heard of the peer");
	} else if (link->now_ns - link->pinged_ns > link->config.silence_ns / PINGS) {
		link->pinged_ns = link->now_ns;
		(void)queue_frame(link, KVD_NET_PING, &ping);
	}
}

void kvd_link_progress(kvd_link_t *link, uint64_t now_ns)
{
	if (link->now_ns == 0) {
		link->born_ns = link->heard_ns = link->pinged_ns = now_ns;
	}
	link->now_ns = now_ns;
	if (link->state == KVD_LINK_CONNECTING) {
		finish_connecting(link);
	}
	if (link->state == KVD_LINK_SHAKING) {
		shake(link);
	}
	if (link->state == KVD_LINK_GREETED || link->state == KVD_LINK_OPEN) {
		receive(link);
	}
	if (link->state != KVD_LINK_DEAD) {
		check_time(link);
	}
	flush(link);
}

kvd_link_state_t kvd_link_state(const kvd_link_t *link)
{
	return link->state;
}

kv_status_t kvd_link_status(const kvd_link_t *link)
{
	return link->status;
}

const char *kvd_link_why(const kvd_link_t *link)
{
	return link->why;
}

const kvd_pair_key_t *kvd_link_key(const kvd_link_t *link)
{
	return link->tls ? kvd_tls_key(link->tls) : NULL;
}

int kvd_link_is_old(const kvd_link_t *link)
{
	return link->is_old;
}
