/* Links to and from peers: dialling, accepting, and who may say what on them.
 *
 * A connection takes one of STRANGERS_MAX places until it has proved who it is. When they are all taken the least
 * likely peer goes: from no peer's address before one that is, silent before one that has named a peer and its key, and
 * of those alike the oldest. So places are held only until somebody else comes.
 */
#include "net/net.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STRANGERS_MAX   32u
#define BACKLOG         64
#define RETRY_MIN_NS    UINT64_C(100000000)
#define RETRY_MAX_NS    UINT64_C(10000000000)
#define LISTEN_AGAIN_NS UINT64_C(1000000000)

/* ---- what both sides have -------------------------------------------------------------------- */

/* With a word of it where a key was changed: its links end when nothing is under way on them, or soon. */
static int is_outdated(const kvd_net_peer_t *peer, const kvd_link_t *link, uint32_t transfers)
{
	const kvd_net_t *net = peer->net;

	return net->rekeyed_ns > 0 && kvd_link_state(link) == KVD_LINK_OPEN && !kvd_net_key_is_known(peer, link) &&
	       (transfers == 0 || net->now_ns - net->rekeyed_ns > net->config->timeout_ns);
}

static void count_refusal(kvd_net_t *net, kv_status_t status)
{
	switch (status) {
	case KV_OK: /* a connection for bytes */
		break;
	case KV_ERR_PROTO:
	case KV_ERR_VERSION:
	case KV_ERR_TOO_BIG:
		net->refused_frames++;
		break;
	case KV_ERR_SECRET:
	case KV_ERR_NOT_FOUND:
		net->refused_proofs++;
		break;
	default:
		net->refused_links++;
		break;
	}
}

/* What becomes of bytes that come, and of those that went. */
static void *land(void *ctx, const kvd_envelope_t *envelope, size_t bytes, void **p_object)
{
	return kvd_fetch_land(ctx, envelope, bytes, p_object);
}

static void landed(void *ctx, void *object, kv_status_t status)
{
	(void)ctx;
	kvd_fetch_landed(object, status);
}

static void pushed(void *ctx, void *object, kv_status_t status)
{
	(void)ctx;
	kvd_serve_pushed(object, status);
}

const kvd_bytes_ops_t kvd_net_bytes_ops = {.land = land, .landed = landed, .pushed = pushed};

/* Transfers work again. */
static void forget_error(kvd_net_peer_t *peer)
{
	if (kvd_net_peer_state(peer) == KVD_PEER_UP) {
		peer->error[0] = '\0';
	}
}

static void step_stream(kvd_net_t *net, kvd_stream_t *stream, kvd_link_t *link)
{
	if (stream) {
		net->moved |= kvd_stream_progress(stream, net->peer_ns);
		if (kvd_stream_state(stream) == KVD_STREAM_DEAD) {
			kvd_link_fail(link, kvd_stream_status(stream), kvd_stream_why(stream));
		}
	}
}

/* ---- the link that we have dialled ----------------------------------------------------------- */

static kv_status_t opened_dialled(void *ctx, kvd_link_t *link)
{
	kvd_net_peer_t *peer = ctx;
	kvd_ucx_t *ucx = peer->net->ucx;
	const kvd_net_ready_t ready = {.ucx = ucx ? kvd_ucx_address(ucx) : (kv_slice_t){NULL, 0}};

	peer->has_opened = 1;
	peer->is_old = 0;
	peer->failures = 0;
	peer->last_batch = 0;
	peer->counts.links++;

	return kvd_link_send(link, KVD_NET_READY, &ready);
}

static kv_status_t bytes_dialled(void *ctx, kvd_link_t *link, const uint8_t ticket[KVD_NET_TICKET])
{
	kvd_net_peer_t *peer = ctx;
	int fd;
	kvd_tls_t *tls = kvd_link_take(link, &fd);

	(void)ticket;
	peer->stream = kvd_stream_open(&kvd_net_bytes_ops, peer->net, tls, fd, 0, peer->net->config->timeout_ns);

	return peer->stream ? KV_OK : KV_ERR_NOMEM;
}

static const kvd_link_ops_t bytes_ops = {.bytes = bytes_dialled};

/* NULL: out of memory or descriptors. */
static kvd_link_t *dial(const kvd_net_peer_t *peer, const kvd_link_config_t *config)
{
	const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
	kvd_link_t *link = NULL;
	struct addrinfo *address;

	if (getaddrinfo(peer->config->host, peer->config->port, &hints, &address) == 0) {
		link = kvd_link_dial(config, address->ai_addr, address->ai_addrlen);
		freeaddrinfo(address);
	}

	return link;
}

/* How bytes come. */
static kv_status_t on_ready_dialled(kvd_net_peer_t *peer, const kvd_net_ready_t *ready)
{
	const kvd_link_config_t config = {
		.ops = &bytes_ops, .ctx = peer, .key = kvd_link_key(peer->link), .ticket = ready->ticket.data};

	if (peer->is_ready || (ready->ticket.len == 0 ? !peer->net->ucx : ready->ticket.len != KVD_NET_TICKET)) {
		return KV_ERR_PROTO;
	}
	peer->is_ready = 1;
	kv_log(KV_LOG_INFO, "net", "peer %s: connected, bytes come over %s", peer->config->name,
	       ready->ticket.len > 0 ? "TLS" : "UCX");
	if (ready->ticket.len > 0) {
		peer->bytes_link = dial(peer, &config);
		return peer->bytes_link ? KV_OK : KV_ERR_NOMEM;
	}
	forget_error(peer);

	return KV_OK;
}

static kv_status_t received_dialled(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message)
{
	kvd_net_peer_t *peer = ctx;

	(void)link;
	switch (code) {
	case KVD_NET_READY:
		return on_ready_dialled(peer, &message->ready);
	case KVD_NET_OFFER:
		return kvd_fetch_offer(peer, &message->offer);
	case KVD_NET_END:
		return kvd_fetch_end(peer, &message->end);
	default:
		return KV_ERR_PROTO;
	}
}

static const kvd_link_ops_t dialled_ops = {.opened = opened_dialled, .received = received_dialled};

static void dial_peer(kvd_net_peer_t *peer)
{
	const kvd_link_config_t config = {.ops = &dialled_ops,
					  .ctx = peer,
					  .key = &peer->keys[peer->dial_key],
					  .silence_ns = peer->net->config->timeout_ns};

	peer->is_ready = peer->has_opened = 0;
	peer->link = dial(peer, &config);
	if (!peer->link) {
		peer->retry_ns = peer->net->now_ns + RETRY_MAX_NS;
	}
}

/* It has become a stream, or it ends the link. */
static void step_bytes_link(kvd_net_peer_t *peer)
{
	kvd_link_progress(peer->bytes_link, peer->net->peer_ns);
	if (kvd_link_state(peer->bytes_link) != KVD_LINK_DEAD) {
		return;
	}
	if (!peer->stream) {
		kvd_link_fail(peer->link, kvd_link_status(peer->bytes_link), kvd_link_why(peer->bytes_link));
	}
	kvd_link_free(peer->bytes_link);
	peer->bytes_link = NULL;
}

static void step_open(kvd_net_peer_t *peer)
{
	const int was_up = kvd_net_peer_state(peer) == KVD_PEER_UP;

	kvd_link_progress(peer->link, peer->net->peer_ns);
	if (peer->bytes_link) {
		step_bytes_link(peer);
	}
	step_stream(peer->net, peer->stream, peer->link);
	if (is_outdated(peer, peer->link, peer->fetching)) {
		kvd_link_fail(peer->link, KV_ERR_CLOSED, "its key has changed");
	}
	if (!was_up) {
		forget_error(peer);
	}
}

/* While a key is being changed one side may have only the new one, or only the old one. */
static int try_other_key(kvd_net_peer_t *peer)
{
	const int is_refused = kvd_link_status(peer->link) == KV_ERR_SECRET && !peer->has_opened;

	if (is_refused && peer->dial_key + 1 < peer->key_count) {
		peer->dial_key++;
		return 1;
	}
	peer->dial_key = is_refused ? 0 : peer->dial_key;

	return 0;
}

static void end_dialled(kvd_net_peer_t *peer)
{
	kvd_link_free(peer->bytes_link);
	kvd_stream_free(peer->stream);
	kvd_link_free(peer->link);
	peer->bytes_link = peer->link = NULL;
	peer->stream = NULL;
	kvd_fetches_lost(peer);
}

/* The breaker: while the link is down whatever needs it fails at once, and the pauses between two tries grow; but not
 * where the other side had no room for who has not said a name. */
static void step_dialled(kvd_net_peer_t *peer)
{
	uint64_t pause = RETRY_MIN_NS;

	if (!peer->link && peer->net->now_ns >= peer->retry_ns) {
		dial_peer(peer);
	}
	if (!peer->link) {
		return;
	}
	step_open(peer);
	if (kvd_link_state(peer->link) != KVD_LINK_DEAD) {
		return;
	}
	if (try_other_key(peer)) {
		end_dialled(peer);
		return;
	}
	if (peer->failures == 0) {
		peer->counts.breaks++;
		kv_log(KV_LOG_WARN, "net", "peer %s: not connected: %s", peer->config->name, kvd_link_why(peer->link));
	}
	if (kvd_link_status(peer->link) == KV_ERR_SECRET) {
		peer->net->refused_proofs++;
	}
	if (!peer->is_old || kvd_link_status(peer->link) != KV_ERR_BUSY) { /* BUSY: what such a one does to us */
		snprintf(peer->error, sizeof peer->error, "%s", kvd_link_why(peer->link));
	}
	peer->failures = kvd_link_status(peer->link) == KV_ERR_BUSY ? 1 : peer->failures + 1;
	for (uint32_t i = 1; i < peer->failures && pause < RETRY_MAX_NS; i++) {
		pause *= 2;
	}
	peer->retry_ns = peer->net->now_ns + (pause < RETRY_MAX_NS ? pause : RETRY_MAX_NS);
	end_dialled(peer);
}

/* ---- who UCX hears --------------------------------------------------------------------------- */

/* The addresses that peers are configured with, and those that they come from, with a proof. */
void kvd_net_peers_admit(kvd_net_t *net)
{
	kvd_address_t from[2 * KVD_PEERS_MAX];
	uint32_t n = 0;

	for (uint32_t i = 0; i < net->peer_count; i++) {
		from[n++] = kvd_address_parse(net->peers[i].config->host);
		if (net->peers[i].inbound) {
			from[n++] = kvd_address_of_peer(kvd_link_fd(net->peers[i].inbound->link));
		}
	}
	if (net->ucx && kvd_ucx_admit(net->ucx, from, n) != KV_OK && !net->hears_all) {
		net->hears_all = 1;
		kv_log(KV_LOG_WARN, "net",
		       "the kernel has no filters of sockets: UCX hears all who reach its port (docs/THREAT_MODEL.md)");
	}
}

/* ---- links from others ----------------------------------------------------------------------- */

/* One link a name: who comes later is another daemon with that name and key, or the same one whose end was not seen
 * yet; then the old link falls silent, and the next try succeeds. */
static kv_status_t opened_inbound(void *ctx, kvd_link_t *link)
{
	kvd_inbound_t *inbound = ctx;
	kvd_net_peer_t *peer = kvd_net_peer_find(inbound->net, kvd_link_key(link)->peer);

	if (peer->inbound) {
		kv_log(KV_LOG_WARN, "net", "peer %s: a second daemon has its name and key; it is refused",
		       peer->config->name);
		return KV_ERR_EXISTS;
	}
	inbound->peer = peer;
	inbound->net->strangers--;
	peer->inbound = inbound;
	kvd_net_peers_admit(inbound->net);
	forget_error(peer);

	return KV_OK;
}

/* The peer has a link, which was told this ticket, and has no stream yet. */
static kv_status_t bytes_inbound(void *ctx, kvd_link_t *link, const uint8_t ticket[KVD_NET_TICKET])
{
	kvd_net_t *net = ((kvd_inbound_t *)ctx)->net;
	const kvd_pair_key_t *key = kvd_link_key(link);
	kvd_inbound_t *of = kvd_net_peer_find(net, key->peer)->inbound;
	kvd_tls_t *tls;
	int fd;

	if (!of || !of->is_ready || of->ep || of->stream ||
	    !kvd_tls_equal(key->psk, kvd_link_key(of->link)->psk, sizeof key->psk) ||
	    !kvd_tls_equal(of->ticket, ticket, sizeof of->ticket)) {
		return KV_ERR_SECRET;
	}
	tls = kvd_link_take(link, &fd);
	of->stream = kvd_stream_open(&kvd_net_bytes_ops, net, tls, fd, 1, net->config->timeout_ns);

	return of->stream ? KV_OK : KV_ERR_NOMEM;
}

/* Over UCX, where both have it and it leads there. */
static kv_status_t on_ready(kvd_inbound_t *inbound, const kvd_net_ready_t *ready)
{
	kvd_net_ready_t answer = {.ticket = {inbound->ticket, KVD_NET_TICKET}};
	kv_status_t status = KV_ERR_UNREACHABLE;

	if (inbound->is_ready) {
		return KV_ERR_PROTO;
	}
	if (inbound->net->ucx && ready->ucx.len > 0) {
		status = kvd_ucx_connect(inbound->net->ucx, ready->ucx, &inbound->ep);
	}
	if (status == KV_ERR_PROTO) {
		kvd_link_fail(inbound->link, status,
			      "its UCX address is malformed, or of a format that is not known here");
	}
	if (status == KV_OK) {
		answer.ticket.len = 0;
	} else if (status != KV_ERR_UNREACHABLE) {
		return status;
	}
	kv_random(&kv_env_posix, inbound->ticket, sizeof inbound->ticket);
	inbound->is_ready = 1;

	return kvd_link_send(inbound->link, KVD_NET_READY, &answer);
}

static kv_status_t received_inbound(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message)
{
	kvd_inbound_t *inbound = ctx;

	(void)link;
	switch (code) {
	case KVD_NET_READY:
		return on_ready(inbound, &message->ready);
	case KVD_NET_ASK:
		return kvd_serve_ask(inbound, &message->ask);
	case KVD_NET_GO:
		return kvd_serve_go(inbound, &message->go);
	case KVD_NET_FINISH:
		return kvd_serve_finish(inbound, &message->finish);
	default:
		return KV_ERR_PROTO;
	}
}

static const kvd_link_ops_t inbound_ops = {
	.opened = opened_inbound, .bytes = bytes_inbound, .received = received_inbound};

/* Said once: nothing comes of it until somebody does something. */
static void note_old(kvd_net_t *net, kvd_inbound_t *inbound)
{
	if (net->refused_old++ == 0) {
		kv_log(KV_LOG_WARN, "net", "a daemon%s speaks the handshake of kvd without TLS: upgrade the other side",
		       inbound->is_configured ? " at the address of a peer" : "");
	}
	for (uint32_t i = 0; i < net->peer_count; i++) {
		const kvd_address_t peer = kvd_address_parse(net->peers[i].config->host);

		if (kvd_address_equal(&inbound->from, &peer) && !net->peers[i].inbound) {
			net->peers[i].is_old = 1;
			snprintf(net->peers[i].error, sizeof net->peers[i].error,
				 "it is a kvd without TLS: upgrade the other side");
		}
	}
}

static void end_inbound(kvd_inbound_t *inbound)
{
	kvd_net_t *net = inbound->net;
	const kv_status_t status = kvd_link_status(inbound->link);

	if (inbound->peer) {
		inbound->peer->inbound = NULL;
		kvd_net_peers_admit(net);
		snprintf(inbound->peer->error, sizeof inbound->peer->error, "its link to us: %s",
			 kvd_link_why(inbound->link));
		if (status != KV_ERR_CLOSED && status != KV_ERR_TIMEOUT) {
			count_refusal(net, status);
		}
	} else if (kvd_link_is_old(inbound->link)) {
		net->strangers--;
		note_old(net, inbound);
	} else {
		net->strangers--;
		count_refusal(net, status);
	}
	kvd_serves_lost(inbound);
	kvd_ucx_disconnect(inbound->ep);
	kvd_stream_free(inbound->stream);
	kvd_link_free(inbound->link);
	free(inbound);
}

/* Take it from the list, and end it. */
static void end_at(kvd_inbound_t **at)
{
	kvd_inbound_t *inbound = *at;

	*at = inbound->next;
	end_inbound(inbound);
}

static void drop_least_likely(kvd_net_t *net)
{
	kvd_inbound_t **victim = NULL;
	int least = 0;

	for (kvd_inbound_t **at = &net->inbound; *at; at = &(*at)->next) { /* the youngest first */
		const int rank = 2 * (*at)->is_configured + (kvd_link_key((*at)->link) != NULL);

		if (!(*at)->peer && (!victim || rank <= least)) {
			victim = at;
			least = rank;
		}
	}
	if (victim) {
		kvd_link_fail((*victim)->link, KV_ERR_BUSY, "too many have connected and not said who they are");
		end_at(victim);
	}
}

static int is_configured(const kvd_net_t *net, const kvd_address_t *from)
{
	for (uint32_t i = 0; i < net->peer_count; i++) {
		const kvd_address_t peer = kvd_address_parse(net->peers[i].config->host);

		if (kvd_address_equal(from, &peer)) {
			return 1;
		}
	}

	return 0;
}

static void accept_link(kvd_net_t *net, int fd)
{
	kvd_link_config_t config = {
		.ops = &inbound_ops, .ring = kvd_net_key_ring(net), .silence_ns = net->config->timeout_ns};
	kvd_inbound_t *inbound = calloc(1, sizeof *inbound);

	if (!inbound) {
		net->refused_links++;
		close(fd);
		return;
	}
	config.ctx = inbound;
	inbound->net = net;
	inbound->from = kvd_address_of_peer(fd);
	inbound->is_configured = is_configured(net, &inbound->from);
	inbound->link = kvd_link_accept(&config, fd);
	if (!inbound->link) {
		free(inbound);
		return;
	}
	inbound->next = net->inbound;
	net->inbound = inbound;
	if (++net->strangers > STRANGERS_MAX) {
		drop_least_likely(net);
	}
}

/* Not more at a time than there are places: what those say is heard before the next ones come. */
static void accept_links(kvd_net_t *net)
{
	for (uint32_t i = 0; i < STRANGERS_MAX && net->listen_fd >= 0; i++) {
		int fd = accept4(net->listen_fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd < 0) {
			return;
		}
		accept_link(net, fd);
	}
}

static void step_inbound(kvd_net_t *net)
{
	kvd_inbound_t **at = &net->inbound;

	while (*at) {
		kvd_inbound_t *inbound = *at;

		kvd_link_progress(inbound->link, net->peer_ns);
		if (inbound->ep && kvd_ucx_is_broken(inbound->ep)) {
			kvd_link_fail(inbound->link, KV_ERR_CLOSED, "its UCX connection has broken");
		}
		step_stream(net, inbound->stream, inbound->link);
		if (inbound->peer && is_outdated(inbound->peer, inbound->link, inbound->peer->serving)) {
			kvd_link_fail(inbound->link, KV_ERR_CLOSED, "its key has changed");
		}
		if (kvd_link_state(inbound->link) == KVD_LINK_DEAD) {
			end_at(at);
		} else {
			at = &inbound->next;
		}
	}
}

/* ---- listening ------------------------------------------------------------------------------- */

/* A port that is taken now may be free later: the rest goes on. */
static void try_listening(kvd_net_t *net)
{
	const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV | AI_PASSIVE,
				       .ai_socktype = SOCK_STREAM};
	struct addrinfo *address;
	int on = 1, fd;

	net->listen_ns = net->now_ns + LISTEN_AGAIN_NS;
	if (getaddrinfo(net->config->peers.host, net->config->peers.port, &hints, &address) != 0) {
		snprintf(net->listen_error, sizeof net->listen_error, "%s is not a numeric address",
			 net->config->peers.host);
		return;
	}
	fd = socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
	    bind(fd, address->ai_addr, address->ai_addrlen) != 0 || listen(fd, BACKLOG) != 0) {
		if (net->listen_error[0] == '\0') {
			kv_log(KV_LOG_WARN, "net", "cannot listen for peers: address %s port %s error \"%s\"",
			       net->config->peers.host, net->config->peers.port, strerror(errno));
		}
		snprintf(net->listen_error, sizeof net->listen_error, "cannot listen on %s:%s: %s",
			 net->config->peers.host, net->config->peers.port, strerror(errno));
		if (fd >= 0) {
			close(fd);
		}
	} else {
		net->listen_fd = fd;
		net->listen_error[0] = '\0';
	}
	freeaddrinfo(address);
}

kv_status_t kvd_net_peers_open(kvd_net_t *net, char *why, size_t cap)
{
	const kvd_peers_config_t *config = &net->config->peers;
	kv_status_t status;

	net->peer_count = config->count;
	for (uint32_t i = 0; i < config->count; i++) {
		net->peers[i].net = net;
		net->peers[i].config = &config->peers[i];
	}
	status = kvd_net_keys_read(net, config, why, cap);
	if (status == KV_OK) {
		try_listening(net);
	}

	return status;
}

void kvd_net_peers_step(kvd_net_t *net)
{
	if (net->listen_fd < 0 && net->now_ns >= net->listen_ns) {
		try_listening(net);
	}
	accept_links(net);
	step_inbound(net);
	for (uint32_t i = 0; i < net->peer_count; i++) {
		step_dialled(&net->peers[i]);
	}
}

void kvd_net_peers_restart(kvd_net_t *net, const char *why)
{
	for (kvd_inbound_t *inbound = net->inbound; inbound; inbound = inbound->next) {
		kvd_link_fail(inbound->link, KV_ERR_CLOSED, why);
	}
	for (uint32_t i = 0; i < net->peer_count; i++) {
		kvd_net_peer_break(&net->peers[i], KV_ERR_CLOSED, why);
	}
}

static uint32_t add_link(struct pollfd *fds, uint32_t n, uint32_t cap, const kvd_link_t *link)
{
	if (link && n < cap) {
		fds[n++] = (struct pollfd){.fd = kvd_link_fd(link), .events = kvd_link_events(link)};
	}

	return n;
}

static uint32_t add_stream(struct pollfd *fds, uint32_t n, uint32_t cap, const kvd_stream_t *stream)
{
	if (stream && n < cap) {
		fds[n++] = (struct pollfd){.fd = kvd_stream_fd(stream), .events = kvd_stream_events(stream)};
	}

	return n;
}

uint32_t kvd_net_peers_fds(const kvd_net_t *net, struct pollfd *fds, uint32_t n, uint32_t cap)
{
	for (uint32_t i = 0; i < net->peer_count; i++) {
		const kvd_net_peer_t *peer = &net->peers[i];

		n = add_link(fds, n, cap, peer->link);
		n = add_link(fds, n, cap, peer->bytes_link);
		n = add_stream(fds, n, cap, peer->stream);
	}
	for (const kvd_inbound_t *inbound = net->inbound; inbound; inbound = inbound->next) {
		n = add_link(fds, n, cap, inbound->link);
		n = add_stream(fds, n, cap, inbound->stream);
	}

	return n;
}
