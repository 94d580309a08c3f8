/* One control connection: bytes to frames, the handshake, MACs and numbers. */
#include "net/link.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define READ_BYTES    (256u << 10)
#define READS_AT_MOST 8u /* before the other links have their turn */
#define PINGS         4u /* in the time after which silence is death */

struct kvd_link {
	kvd_link_config_t config;
	int fd;
	kvd_link_state_t state;
	int is_dialler;
	kv_status_t status;
	char why[160];
	kvd_handshake_t handshake;
	uint8_t send_key[KVD_NET_MAC], receive_key[KVD_NET_MAC];
	uint64_t sent, received; /* frames since the handshake */
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
	const int has_mac = link->state == KVD_LINK_OPEN;
	kvd_net_header_t header = {.magic = KVD_NET_MAGIC, .version = KVD_NET_VERSION, .code = (uint8_t)code};
	size_t room = sizeof header + kv_body_size(fields, message) + KVD_NET_MAC;
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
	status = kv_body_encode(fields, message, frame + sizeof header, room - sizeof header - KVD_NET_MAC,
				&header.body);
	if (status != KV_OK) {
		return status;
	}
	header.number = has_mac ? ++link->sent : 0;
	memcpy(frame, &header, sizeof header);
	link->out_len += sizeof header + header.body;
	if (has_mac) {
		kvd_auth_mac(link->send_key, frame, sizeof header + header.body, link->out + link->out_len);
		link->out_len += KVD_NET_MAC;
	}

	return KV_OK;
}

static void flush(kvd_link_t *link)
{
	while (link->state != KVD_LINK_DEAD && link->out_at < link->out_len) {
		ssize_t n = send(link->fd, link->out + link->out_at, link->out_len - link->out_at,
				 MSG_DONTWAIT | MSG_NOSIGNAL);

		if (n < 0 && errno == EINTR) {
			continue;
		}
		if (n < 0 && (errno == EAGAIN || errno == ENOBUFS)) {
			return;
		}
		if (n < 0) {
			fail_errno(link, link->state == KVD_LINK_HELLO_SENT ? KV_ERR_BUSY : KV_ERR_CLOSED,
				   "cannot send", errno);
			return;
		}
		link->out_at += (size_t)n;
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

static void derive_keys(kvd_link_t *link, kv_slice_t key)
{
	kvd_auth_derive(key, KVD_KEY_TO_DIALLED, &link->handshake,
			link->is_dialler ? link->send_key : link->receive_key);
	kvd_auth_derive(key, KVD_KEY_TO_DIALLER, &link->handshake,
			link->is_dialler ? link->receive_key : link->send_key);
}

static kv_status_t say_hello(kvd_link_t *link)
{
	const kvd_net_hello_t hello = {.from = kv_slice_str(link->handshake.from),
				       .to = kv_slice_str(link->handshake.to),
				       .nonce = {link->handshake.from_nonce, KVD_NET_NONCE}};

	link->state = KVD_LINK_HELLO_SENT;

	return queue_frame(link, KVD_NET_HELLO, &hello);
}

static int is_name(const kv_slice_t *text, const char *name)
{
	return text->len == strlen(name) && memcmp(text->data, name, text->len) == 0;
}

static kv_status_t on_hello(kvd_link_t *link, const kvd_net_hello_t *hello)
{
	uint8_t proof[KVD_NET_MAC];
	kvd_net_challenge_t challenge = {.nonce = {link->handshake.to_nonce, KVD_NET_NONCE},
					 .proof = {proof, sizeof proof}};
	kv_slice_t key;

	if (!is_name(&hello->to, link->config.name) || hello->nonce.len != KVD_NET_NONCE) {
		return KV_ERR_NOT_FOUND;
	}
	memcpy(link->handshake.from, hello->from.data, hello->from.len);
	memcpy(link->handshake.from_nonce, hello->nonce.data, KVD_NET_NONCE);
	key = link->config.ops->find_key(link->config.ctx, link->handshake.from);
	if (key.len == 0) {
		return KV_ERR_NOT_FOUND;
	}
	kv_random(&kv_env_posix, link->handshake.to_nonce, KVD_NET_NONCE);
	kvd_auth_derive(key, KVD_PROOF_DIALLED, &link->handshake, proof);
	link->state = KVD_LINK_CHALLENGED;

	return queue_frame(link, KVD_NET_CHALLENGE, &challenge);
}

static kv_status_t on_challenge(kvd_link_t *link, const kvd_net_challenge_t *challenge)
{
	kv_slice_t key = link->config.ops->find_key(link->config.ctx, link->handshake.to);
	uint8_t proof[KVD_NET_MAC];
	const kvd_net_proof_t answer = {.proof = {proof, sizeof proof}};
	kv_status_t status;

	if (challenge->nonce.len != KVD_NET_NONCE || challenge->proof.len != KVD_NET_MAC) {
		return KV_ERR_PROTO;
	}
	memcpy(link->handshake.to_nonce, challenge->nonce.data, KVD_NET_NONCE);
	kvd_auth_derive(key, KVD_PROOF_DIALLED, &link->handshake, proof);
	if (key.len == 0 || !kvd_auth_equal(proof, challenge->proof.data, sizeof proof)) {
		return KV_ERR_SECRET;
	}
	kvd_auth_derive(key, KVD_PROOF_DIALLER, &link->handshake, proof);
	status = queue_frame(link, KVD_NET_PROOF, &answer);
	derive_keys(link, key);
	link->state = KVD_LINK_OPEN;

	return status == KV_OK ? link->config.ops->opened(link->config.ctx, link) : status;
}

static kv_status_t on_proof(kvd_link_t *link, const kvd_net_proof_t *answer)
{
	kv_slice_t key = link->config.ops->find_key(link->config.ctx, link->handshake.from);
	uint8_t proof[KVD_NET_MAC];

	kvd_auth_derive(key, KVD_PROOF_DIALLER, &link->handshake, proof);
	if (key.len == 0 || answer->proof.len != KVD_NET_MAC ||
	    !kvd_auth_equal(proof, answer->proof.data, sizeof proof)) {
		return KV_ERR_SECRET;
	}
	derive_keys(link, key);
	link->state = KVD_LINK_OPEN;

	return link->config.ops->opened(link->config.ctx, link);
}

/* ---- receiving ------------------------------------------------------------------------------- */

/* No more comes. A dialler that was not even asked for its proof is told so: the other side may have had no room. */
static void fail_closed(kvd_link_t *link, const char *how)
{
	if (link->state == KVD_LINK_OPEN) {
		kvd_link_fail(link, KV_ERR_CLOSED, how);
	} else {
		kvd_link_fail(link, link->state == KVD_LINK_HELLO_SENT ? KV_ERR_BUSY : KV_ERR_CLOSED,
			      "the peer has refused the connection");
	}
}

static kv_status_t handle(kvd_link_t *link, uint32_t code)
{
	const kvd_net_message_t *message = &link->message;

	if (link->state == KVD_LINK_ACCEPTED && code == KVD_NET_HELLO) {
		return on_hello(link, &message->hello);
	}
	if (link->state == KVD_LINK_HELLO_SENT && code == KVD_NET_CHALLENGE) {
		return on_challenge(link, &message->challenge);
	}
	if (link->state == KVD_LINK_CHALLENGED && code == KVD_NET_PROOF) {
		return on_proof(link, &message->proof);
	}
	if (link->state != KVD_LINK_OPEN || code <= KVD_NET_PROOF) {
		return KV_ERR_PROTO;
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
	const int has_mac = link->state == KVD_LINK_OPEN;

	*p_status = KV_ERR_PROTO;
	if (header->magic != KVD_NET_MAGIC || header->reserved != 0 || header->unused != 0) {
		return 0;
	}
	if (header->version != KVD_NET_VERSION) {
		*p_status = KV_ERR_VERSION;
		return 0;
	}
	if (!kvd_net_body(header->code) || header->number != (has_mac ? link->received + 1 : 0)) {
		return 0;
	}
	if (header->body > (has_mac ? KVD_NET_MAX_BODY : KVD_NET_EARLY_BODY)) {
		*p_status = KV_ERR_TOO_BIG;
		return 0;
	}
	*p_status = KV_OK;

	return sizeof *header + header->body + (has_mac ? KVD_NET_MAC : 0);
}

static kv_status_t take_frame(kvd_link_t *link, const uint8_t *frame, const kvd_net_header_t *header)
{
	const size_t signed_len = sizeof *header + header->body;
	uint8_t mac[KVD_NET_MAC];
	kv_status_t status;

	if (link->state == KVD_LINK_OPEN) {
		kvd_auth_mac(link->receive_key, frame, signed_len, mac);
		if (!kvd_auth_equal(mac, frame + signed_len, sizeof mac)) {
			return KV_ERR_SECRET;
		}
		link->received++;
	}
	status = kv_body_decode(kvd_net_body(header->code), frame + sizeof *header, header->body, &link->message, NULL);

	return status == KV_OK ? handle(link, header->code) : status;
}

static const char *why_of(kv_status_t status)
{
	return status == KV_ERR_SECRET ? "the other side does not have the key, or a frame was changed"
				       : kv_status_text(status);
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
			kvd_link_fail(link, status, why_of(status));
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
		/* Before the handshake is over no more is read than it may have. */
		size_t most = link->state == KVD_LINK_OPEN ? READ_BYTES : KVD_NET_EARLY_BODY;
		ssize_t n;

		if (reserve(&link->in, &link->in_cap, link->in_len + most) != KV_OK) {
			kvd_link_fail(link, KV_ERR_NOMEM, "no memory to receive");
			return;
		}
		n = recv(link->fd, link->in + link->in_len, most, MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == EINTR)) {
			return;
		}
		if (n == 0 || (n < 0 && errno == ECONNRESET)) {
			fail_closed(link, n == 0 ? "the peer has closed the connection"
						 : "the peer has reset the connection");
		} else if (n < 0) {
			fail_errno(link, KV_ERR_CLOSED, "cannot receive", errno);
		} else {
			link->in_len += (size_t)n;
			take_frames(link);
		}
	}
}

/* ---- its life -------------------------------------------------------------------------------- */

static kvd_link_t *create(const kvd_link_config_t *config, int fd, int is_dialler)
{
	kvd_link_t *link = calloc(1, sizeof *link);
	int on = 1;

	if (!link) {
		close(fd);
		return NULL;
	}
	link->config = *config;
	link->fd = fd;
	link->is_dialler = is_dialler;
	link->born_ns = link->heard_ns = link->pinged_ns = link->now_ns = kv_now_ns(&kv_env_posix);
	(void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);

	return link;
}

kvd_link_t *kvd_link_dial(const kvd_link_config_t *config, const char *peer, const struct sockaddr *address,
			  socklen_t address_len)
{
	int fd = socket(address->sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	kvd_link_t *link = fd >= 0 ? create(config, fd, 1) : NULL;

	if (!link) {
		return NULL;
	}
	link->state = KVD_LINK_CONNECTING;
	snprintf(link->handshake.from, sizeof link->handshake.from, "%s", config->name);
	snprintf(link->handshake.to, sizeof link->handshake.to, "%s", peer);
	kv_random(&kv_env_posix, link->handshake.from_nonce, KVD_NET_NONCE);
	if (connect(fd, address, address_len) != 0 && errno != EINPROGRESS) {
		fail_errno(link, KV_ERR_UNREACHABLE, "cannot connect", errno);
	}

	return link;
}

kvd_link_t *kvd_link_accept(const kvd_link_config_t *config, int fd)
{
	kvd_link_t *link = create(config, fd, 0);

	if (link) {
		link->state = KVD_LINK_ACCEPTED;
		snprintf(link->handshake.to, sizeof link->handshake.to, "%s", config->name);
	}

	return link;
}

void kvd_link_free(kvd_link_t *link)
{
	if (!link) {
		return;
	}
	kvd_link_fail(link, KV_ERR_CLOSED, "closed");
	explicit_bzero(link->send_key, sizeof link->send_key);
	explicit_bzero(link->receive_key, sizeof link->receive_key);
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
	int waits = link->state == KVD_LINK_CONNECTING || link->out_at < link->out_len;

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
	} else if (say_hello(link) != KV_OK) {
		kvd_link_fail(link, KV_ERR_NOMEM, "no memory for a frame");
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
	link->now_ns = now_ns > link->now_ns ? now_ns : link->now_ns; /* it may be younger than its caller's clock */
	if (link->state == KVD_LINK_CONNECTING) {
		finish_connecting(link);
	}
	if (link->state != KVD_LINK_DEAD && link->state != KVD_LINK_CONNECTING) {
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

const char *kvd_link_peer(const kvd_link_t *link)
{
	return link->is_dialler ? link->handshake.to : link->handshake.from;
}

int kvd_link_is_dialler(const kvd_link_t *link)
{
	return link->is_dialler;
}

uint64_t kvd_link_heard_ns(const kvd_link_t *link)
{
	return link->heard_ns;
}
