/* Links to and from peers: dialling, accepting, and who may say what on them.
 *
 * A connection takes one of STRANGERS_MAX places until it has proved who it is. When they are all taken the least
 * likely peer goes: from no peer's address before one that is, silent before one that has named a peer, and of those
 * alike the oldest. So places are held only until somebody else comes.
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

/* ---- names and keys -------------------------------------------------------------------------- */

static kv_slice_t key_of(kvd_net_t *net, const char *name)
{
	const kvd_net_peer_t *peer = kvd_net_peer_find(net, name);

	return peer ? (kv_slice_t){peer->key, peer->key_len} : (kv_slice_t){NULL, 0};
}

static kv_status_t send_ready(kvd_net_t *net, kvd_link_t *link)
{
	const kvd_net_ready_t ready = {.ucx = net->ucx ? kvd_ucx_address(net->ucx) : (kv_slice_t){NULL, 0}};

	return kvd_link_send(link, KVD_NET_READY, &ready);
}

/* Once a link: it is connected, and says no more about it. */
static void note_no_transfers(kvd_net_peer_t *peer, const char *why)
{
	snprintf(peer->error, sizeof peer->error, "no transfers: %s", why);
	kv_log(KV_LOG_WARN, "net", "peer %s: no transfers: %s", peer->config->name, why);
}

/* Transfers work again, in either direction. */
static void forget_error(kvd_net_peer_t *peer)
{
	if (kvd_net_peer_state(peer) == KVD_PEER_UP && !(peer->inbound && peer->inbound->has_no_way)) {
		peer->error[0] = '\0';
	}
}

/* ---- the link that we have dialled ----------------------------------------------------------- */

static kv_slice_t find_key_of_dialled(void *ctx, const char *name)
{
	return key_of(((kvd_net_peer_t *)ctx)->net, name);
}

static kv_status_t opened_dialled(void *ctx, kvd_link_t *link)
{
	kvd_net_peer_t *peer = ctx;

	peer->failures = 0;
	peer->last_batch = 0;
	peer->is_ready = peer->can_send = 0;
	peer->counts.links++;
	kv_log(KV_LOG_INFO, "net", "peer %s: connected", peer->config->name);

	return send_ready(peer->net, link);
}

/* Once more, without an address: it has seen ours, and cannot send to it. */
static kv_status_t on_ready_dialled(kvd_net_peer_t *peer, const kvd_net_ready_t *ready)
{
	peer->is_ready = 1;
	peer->can_send = ready->ucx.len > 0;
	if (!peer->can_send) {
		note_no_transfers(peer, "it cannot send to this node: it has no UCX, or no transport that leads here");
	} else if (!peer->net->ucx) {
		note_no_transfers(peer, "this node has no UCX that it could send to");
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

static const kvd_link_ops_t dialled_ops = {
	.find_key = find_key_of_dialled, .opened = opened_dialled, .received = received_dialled};

static void dial(kvd_net_peer_t *peer)
{
	const kvd_link_config_t config = {.name = peer->net->config->peers.name,
					  .ops = &dialled_ops,
					  .ctx = peer,
					  .silence_ns = peer->net->config->timeout_ns};
	const struct addrinfo hints = {.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV, .ai_socktype = SOCK_STREAM};
	struct addrinfo *address;

	if (getaddrinfo(peer->config->host, peer->config->port, &hints, &address) == 0) {
		peer->link = kvd_link_dial(&config, peer->config->name, address->ai_addr, address->ai_addrlen);
		freeaddrinfo(address);
	}
	if (!peer->link) {
		peer->retry_ns = peer->net->now_ns + RETRY_MAX_NS;
	}
}

/* The breaker: while the link is down whatever needs it fails at once, and the pauses between two tries grow; but not
 * where the other side had no room for who has not said a name. */
static void step_dialled(kvd_net_peer_t *peer)
{
	uint64_t pause = RETRY_MIN_NS;

	if (!peer->link && peer->net->now_ns >= peer->retry_ns) {
		dial(peer);
	}
	if (!peer->link) {
		return;
	}
	kvd_link_progress(peer->link, peer->net->now_ns);
	if (kvd_link_state(peer->link) != KVD_LINK_DEAD) {
		return;
	}
	if (peer->failures == 0) {
		peer->counts.breaks++;
		kv_log(KV_LOG_WARN, "net", "peer %s: not connected: %s", peer->config->name, kvd_link_why(peer->link));
	}
	if (kvd_link_status(peer->link) == KV_ERR_SECRET) {
		peer->net->refused_proofs++;
	}
	snprintf(peer->error, sizeof peer->error, "%s", kvd_link_why(peer->link));
	peer->failures = kvd_link_status(peer->link) == KV_ERR_BUSY ? 1 : peer->failures + 1;
	for (uint32_t i = 1; i < peer->failures && pause < RETRY_MAX_NS; i++) {
		pause *= 2;
	}
	peer->retry_ns = peer->net->now_ns + (pause < RETRY_MAX_NS ? pause : RETRY_MAX_NS);
	kvd_link_free(peer->link);
	peer->link = NULL;
	kvd_fetches_lost(peer);
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

static kv_slice_t find_key_of_inbound(void *ctx, const char *name)
{
	return key_of(((kvd_inbound_t *)ctx)->net, name);
}

/* One link a name: who comes later is another daemon with that name and key, or the same one whose end was not seen
 * yet; then the old link falls silent, and the next try succeeds. */
static kv_status_t opened_inbound(void *ctx, kvd_link_t *link)
{
	kvd_inbound_t *inbound = ctx;
	kvd_net_peer_t *peer = kvd_net_peer_find(inbound->net, kvd_link_peer(link));

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

	return send_ready(inbound->net, link);
}

static kv_status_t on_ready(kvd_inbound_t *inbound, const kvd_net_ready_t *ready)
{
	kv_status_t status;

	if (inbound->ep) {
		return KV_ERR_PROTO;
	}
	if (!inbound->net->ucx || ready->ucx.len == 0) {
		return KV_OK; /* each side says so to the other with its own READY */
	}

	status = kvd_ucx_connect(inbound->net->ucx, ready->ucx, &inbound->ep);
	if (status == KV_ERR_PROTO) {
		kvd_link_fail(inbound->link, status,
			      "its UCX address is malformed, or of a format that is not known here");
	}
	if (status == KV_ERR_UNREACHABLE) {
		const kvd_net_ready_t no_way = {.ucx = {NULL, 0}};

		inbound->has_no_way = 1;
		note_no_transfers(inbound->peer, "UCX has no transport that leads to it");
		status = kvd_link_send(inbound->link, KVD_NET_READY, &no_way);
	}

	return status;
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
	.find_key = find_key_of_inbound, .opened = opened_inbound, .received = received_inbound};

static void count_refusal(kvd_net_t *net, kv_status_t status)
{
	switch (status) {
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
	} else {
		net->strangers--;
		count_refusal(net, status);
	}
	kvd_serves_lost(inbound);
	kvd_ucx_disconnect(inbound->ep);
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
		const int rank = 2 * (*at)->is_configured + (kvd_link_state((*at)->link) == KVD_LINK_CHALLENGED);

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

static int is_configured(const kvd_net_t *net, int fd)
{
	const kvd_address_t from = kvd_address_of_peer(fd);

	for (uint32_t i = 0; i < net->peer_count; i++) {
		const kvd_address_t peer = kvd_address_parse(net->peers[i].config->host);

		if (kvd_address_equal(&from, &peer)) {
			return 1;
		}
	}

	return 0;
}

static void accept_link(kvd_net_t *net, int fd)
{
	kvd_link_config_t config = {
		.name = net->config->peers.name, .ops = &inbound_ops, .silence_ns = net->config->timeout_ns};
	kvd_inbound_t *inbound = calloc(1, sizeof *inbound);

	if (!inbound) {
		net->refused_links++;
		close(fd);
		return;
	}
	config.ctx = inbound;
	inbound->net = net;
	inbound->is_configured = is_configured(net, fd);
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

		kvd_link_progress(inbound->link, net->now_ns);
		if (inbound->ep && kvd_ucx_is_broken(inbound->ep)) {
			kvd_link_fail(inbound->link, KV_ERR_CLOSED, "its UCX connection has broken");
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

	net->peer_count = config->count;
	for (uint32_t i = 0; i < config->count; i++) {
		kvd_net_peer_t *peer = &net->peers[i];
		kv_status_t status;

		peer->net = net;
		peer->config = &config->peers[i];
		status = kvd_peer_key_read(peer->config->key_path, peer->key, &peer->key_len, why, cap);
		if (status != KV_OK) {
			return status;
		}
	}
	try_listening(net);

	return KV_OK;
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
