/* The daemon's end of the net process: see net.h. */
#include "io/sessions/net.h"

#include "base/helper.h"
#include "io/members/member_table.h"
#include "io/base/poller.h"
#include "io/base/silence.h"
#include "kv/map.h"
#include "kv/sock.h"
#include "net/wire.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define SILENCE_NS   UINT64_C(10000000000)
#define PAUSE_MIN_NS UINT64_C(100000000)
#define PAUSE_MAX_NS UINT64_C(10000000000)
#define YOUNG_NS     UINT64_C(30000000000) /* one that ends before this makes the pause longer */

#define CRASH_SHOWN_NS UINT64_C(600000000000) /* by the status */

/* A FETCH that the net process has not answered. */
typedef struct kvd_net_asked {
	uint64_t order;
	kvd_member_t member;
	uint64_t frame_id;
	uint32_t timeout_ms;
} kvd_net_asked_t;

typedef struct kvd_net_host {
	kvd_source_t source; /* our end of the pair; fd -1: no process */
	int program_fd;
	pid_t pid; /* 0: none; else not yet reaped */
	uint64_t born_ns;
	kvd_silence_t silence;
	uint64_t due_ns; /* no process: when to start the next one */
	uint32_t failures;
	uint32_t starts;
	int is_killed;   /* by us */
	int must_reload; /* it has not been sent the configuration as it is now */
	uint32_t crashes;
	int crash_signal; /* of the last one */
	uint64_t crash_ns;
	uint64_t orders; /* so far */
	kvd_net_asked_t asked[KVD_NET_ASKED_MAX];
	uint32_t asked_count;
	kvd_net_config_t config;
	kvd_net_state_t state; /* as it said last; zero: nothing yet */
} kvd_net_host_t;

/* ---- answers --------------------------------------------------------------------------------- */

static void answer_fetch(kvd_host_t *host, uint32_t i, kv_status_t status)
{
	kvd_net_host_t *net = host->net;
	const kvd_net_asked_t asked = net->asked[i];
	const kv_msg_t reply = {.fetch_reply = {.timeout_ms = asked.timeout_ms}};

	net->asked[i] = net->asked[--net->asked_count];
	kvd_request_reply_late(host, asked.member, KV_CODE_FETCH, asked.frame_id, status, &reply);
}

static void take_answers(kvd_host_t *host, const kvd_net_begun_t *begun)
{
	kvd_net_host_t *net = host->net;

	for (uint32_t a = 0; a < begun->count; a++) {
		const kv_status_t status = (kv_status_t)begun->answers[a].status;
		uint32_t i = 0;

		while (i < net->asked_count && net->asked[i].order != begun->answers[a].order) {
			i++;
		}
		if (i < net->asked_count) {
			answer_fetch(host, i, status <= KV_OK ? status : KV_ERR_NOT_FOUND);
		}
	}
}

static void take_state(kvd_host_t *host, const kvd_net_state_t *fresh)
{
	kvd_net_host_t *net = host->net;
	kvd_peer_counts_t add = {0};
	uint64_t up = 0;

	for (uint32_t i = 0; i < fresh->count; i++) {
		const kvd_peer_counts_t *now = &fresh->peers[i].counts, *then = &net->state.peers[i].counts;

		add.bytes_in += now->bytes_in - then->bytes_in;
		add.bytes_out += now->bytes_out - then->bytes_out;
		add.messages_out += now->messages_out - then->messages_out;
		add.fetched += now->fetched - then->fetched;
		add.fetch_failed += now->fetch_failed - then->fetch_failed;
		add.served += now->served - then->served;
		add.serve_failed += now->serve_failed - then->serve_failed;
		add.breaks += now->breaks - then->breaks;
		add.corrupt += now->corrupt - then->corrupt;
		up += fresh->peers[i].state == KVD_PEER_UP;
	}
	kv_metric_set(&host->metrics, KV_M_PEERS_UP, up);
	kv_metric_add(&host->metrics, KV_M_PEER_BYTES_IN, add.bytes_in);
	kv_metric_add(&host->metrics, KV_M_PEER_BYTES_OUT, add.bytes_out);
	kv_metric_add(&host->metrics, KV_M_PEER_MESSAGES, add.messages_out);
	kv_metric_add(&host->metrics, KV_M_PEER_FETCHED, add.fetched);
	kv_metric_add(&host->metrics, KV_M_PEER_FETCH_FAILED, add.fetch_failed);
	kv_metric_add(&host->metrics, KV_M_PEER_SERVED, add.served);
	kv_metric_add(&host->metrics, KV_M_PEER_SERVE_FAILED, add.serve_failed);
	kv_metric_add(&host->metrics, KV_M_PEER_BREAKS, add.breaks);
	kv_metric_add(&host->metrics, KV_M_PEER_CORRUPT, add.corrupt);
	kv_metric_add(&host->metrics, KV_M_PEER_BAD_FRAMES, fresh->refused_frames - net->state.refused_frames);
	kv_metric_add(&host->metrics, KV_M_PEER_BAD_PROOFS, fresh->refused_proofs - net->state.refused_proofs);
	kv_metric_add(&host->metrics, KV_M_PEER_BAD_LINKS, fresh->refused_links - net->state.refused_links);
	kv_metric_add(&host->metrics, KV_M_PEER_OLD, fresh->refused_old - net->state.refused_old);
	net->state = *fresh;
	kvd_silence_end(&net->silence, kv_now_ns(host->env));
}

/* One message, or none. */
static void take_message(kvd_host_t *host)
{
	static union {
		struct {
			uint32_t version, verb;
		} head;
		kvd_net_state_t state;
		kvd_net_begun_t begun;
	} fresh;
	const ssize_t n = recv(host->net->source.fd, &fresh, sizeof fresh, MSG_DONTWAIT | MSG_TRUNC);

	if (n == (ssize_t)sizeof fresh.state && fresh.head.version == KVD_NET_WIRE &&
	    fresh.head.verb == KVD_NET_VERB_STATE && fresh.state.count <= KVD_PEERS_MAX) {
		take_state(host, &fresh.state);
	} else if (n == (ssize_t)sizeof fresh.begun && fresh.head.version == KVD_NET_WIRE &&
		   fresh.head.verb == KVD_NET_VERB_BEGUN && fresh.begun.count <= KVD_NET_BEGUN_MAX) {
		take_answers(host, &fresh.begun);
	}
}

/* It has gone, or is made to go: reaped in a later step. */
static void end_process(kvd_host_t *host, const char *why, int is_killed)
{
	kvd_net_host_t *net = host->net;
	const uint64_t now = kv_now_ns(host->env);
	uint64_t pause = PAUSE_MIN_NS;

	kvd_poller_remove(host, &net->source);
	close(net->source.fd);
	net->source.fd = -1;
	kill(net->pid, SIGKILL);
	net->is_killed = is_killed;
	net->failures = now - net->born_ns < YOUNG_NS ? net->failures + 1 : 1;
	for (uint32_t i = 1; i < net->failures && pause < PAUSE_MAX_NS; i++) {
		pause *= 2;
	}
	pause = pause < PAUSE_MAX_NS ? pause : PAUSE_MAX_NS;
	net->due_ns = now + pause;
	memset(&net->state, 0, sizeof net->state);
	kv_metric_set(&host->metrics, KV_M_PEERS_UP, 0);
	while (net->asked_count > 0) {
		answer_fetch(host, 0, KV_ERR_UNREACHABLE);
	}
	kv_log(KV_LOG_ERROR, "io", "the net process %s: peers are off; pid %d started_again_in_ms %llu", why,
	       (int)net->pid, (unsigned long long)(pause / 1000000u));
}

static int net_ready(kvd_host_t *host, kvd_source_t *source, uint32_t events)
{
	(void)source;
	if (events & EPOLLIN) {
		take_message(host);
	}
	if (events & (EPOLLHUP | EPOLLERR)) {
		end_process(host, "has ended", 0);
	}

	return 0;
}

static kv_status_t start_process(kvd_host_t *host)
{
	kvd_net_host_t *net = host->net;
	char *const argv[] = {(char *)(uintptr_t) "kvd-net", NULL};
	const int room = 256 << 10;
	int fd = -1;

	if (kvd_helper_start(net->program_fd, argv, &net->pid, &fd) != KV_OK) {
		kv_log(KV_LOG_ERROR, "io", "cannot start the net process: %s", strerror(errno));
		return KV_ERR_LIMIT;
	}
	(void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
	net->source = (kvd_source_t){.ready = net_ready, .fd = fd};
	net->must_reload = 0;
	if (send(fd, &net->config, sizeof net->config, MSG_DONTWAIT | MSG_NOSIGNAL) < 0 ||
	    kvd_poller_add(host, &net->source, EPOLLIN) != KV_OK) {
		kv_log(KV_LOG_ERROR, "io", "cannot give orders to the net process: %s", strerror(errno));
		close(fd);
		net->source.fd = -1;
		kill(net->pid, SIGKILL);
		return KV_ERR_LIMIT;
	}
	net->born_ns = kv_now_ns(host->env);
	kvd_silence_end(&net->silence, net->born_ns);
	if (net->starts++ > 0) {
		kv_metric_add(&host->metrics, KV_M_NET_RESTARTS, 1);
	}

	return KV_OK;
}

/* Told apart from an end that was meant: with UCX strangers can cause it (docs/THREAT_MODEL.md). */
static void note_crash(kvd_host_t *host, int signal, uint64_t now)
{
	kvd_net_host_t *net = host->net;

	net->crashes++;
	net->crash_signal = signal;
	net->crash_ns = now;
	kv_metric_add(&host->metrics, KV_M_NET_CRASHES, 1);
	kv_log(KV_LOG_ERROR, "io", "the net process has crashed: signal %d (%s) crashes %u", signal,
	       sigdescr_np(signal), net->crashes);
}

static void send_config(kvd_net_host_t *net)
{
	net->must_reload = send(net->source.fd, &net->config, sizeof net->config, MSG_DONTWAIT | MSG_NOSIGNAL) < 0;
}

void kvd_net_reload(kvd_host_t *host)
{
	kvd_net_host_t *net = host->net;

	if (net) {
		kvd_peers_find_keys(host->options, &net->config.peers);
		net->must_reload = 1;
	}
}

void kvd_net_step(kvd_host_t *host, uint64_t now)
{
	kvd_net_host_t *net = host->net;
	int how;

	if (!net) {
		return;
	}
	if (net->source.fd >= 0) {
		if (net->must_reload) {
			send_config(net);
		}
		if (kvd_silence_look(&net->silence, now) > SILENCE_NS) {
			end_process(host, "is silent and is killed", 1);
		}
		return;
	}
	if (net->pid > 0 && waitpid(net->pid, &how, WNOHANG) == net->pid) {
		net->pid = 0;
		if (WIFSIGNALED(how) && !net->is_killed) {
			note_crash(host, WTERMSIG(how), now);
		}
	}
	if (net->pid == 0 && now >= net->due_ns && start_process(host) != KV_OK) {
		net->due_ns = now + PAUSE_MAX_NS;
	}
}

kv_status_t kvd_net_open(kvd_host_t *host, char *detail, size_t cap)
{
	const kvd_options_t *options = host->options;
	kvd_net_host_t *net;
	kv_status_t status;

	if (options->peers_addresses[0] == '\0') {
		return KV_OK;
	}
	net = calloc(1, sizeof *net);
	if (!net) {
		return KV_ERR_NOMEM;
	}
	host->net = net;
	net->source.fd = net->program_fd = -1;
	net->config = (kvd_net_config_t){.version = KVD_NET_WIRE,
					 .verb = KVD_NET_VERB_CONFIG,
					 .log_level = options->log_level,
					 .in_flight = options->peers_in_flight,
					 .timeout_ns = options->peers_timeout};
	snprintf(net->config.run_dir, sizeof net->config.run_dir, "%s", options->run_dir);
	snprintf(net->config.namespaces, sizeof net->config.namespaces, "%s", options->namespaces);
	snprintf(net->config.transports, sizeof net->config.transports, "%s", options->peers_transports);
	status = kvd_peers_parse(options, &net->config.peers, detail, cap);

	return status == KV_OK ? kvd_helper_open("kvd-net", &net->program_fd, detail, cap) : status;
}

void kvd_net_close(kvd_host_t *host)
{
	kvd_net_host_t *net = host->net;

	if (!net) {
		return;
	}
	if (net->source.fd >= 0) {
		close(net->source.fd);
	}
	if (net->pid > 0) {
		kill(net->pid, SIGKILL);
		(void)waitpid(net->pid, NULL, 0);
	}
	if (net->program_fd >= 0) {
		close(net->program_fd);
	}
	free(net);
	host->net = NULL;
}

/* ---- requests -------------------------------------------------------------------------------- */

const char *kvd_net_name(const kvd_host_t *host)
{
	return host->net ? host->net->config.peers.name : "";
}

static int is_named(kv_slice_t text, const char *name)
{
	return strlen(name) == text.len && memcmp(name, text.data, text.len) == 0;
}

static const kvd_peer_report_t *find_peer(const kvd_net_host_t *net, kv_slice_t name)
{
	for (uint32_t i = 0; i < net->config.peers.count; i++) {
		if (is_named(name, net->config.peers.peers[i].name)) {
			return &net->state.peers[i];
		}
	}

	return NULL;
}

static kv_status_t send_order(kvd_net_host_t *net, const kvd_net_fetch_t *order, int fd)
{
	if (kv_sock_send_message(net->source.fd, order, sizeof *order, fd, MSG_DONTWAIT) < 0) {
		return errno == EPIPE || errno == ECONNRESET ? KV_ERR_UNREACHABLE : KV_ERR_BUSY;
	}

	return KV_OK;
}

static kv_status_t send_with_names(kvd_net_host_t *net, const kvd_net_fetch_t *order, const kv_msg_fetch_t *ask)
{
	int fd = kv_memfd_create("kvd-fetch", 0);
	kv_status_t status = KV_ERR_NOMEM;

	if (fd >= 0 && write(fd, ask->names.data, ask->names.len) == (ssize_t)ask->names.len &&
	    write(fd, ask->rest.data, ask->rest.len) == (ssize_t)ask->rest.len) {
		status = send_order(net, order, fd);
	}
	if (fd >= 0) {
		close(fd);
	}

	return status;
}

static uint32_t grant_time(const kvd_host_t *host, uint32_t asked_ms)
{
	const uint64_t most_ms = host->options->handover_ttl / 1000000u;

	return asked_ms == 0 || asked_ms > most_ms ? (uint32_t)(most_ms < UINT32_MAX ? most_ms : UINT32_MAX) : asked_ms;
}

/* Its producer and its consumer are on this node: what the consumer asks next finds it. */
static kv_status_t fetch_from_self(const kvd_host_t *host, kvd_call_t *call)
{
	if (call->ask->fetch.flags & KV_FETCH_PREFIX) {
		call->detail = "the peer is this daemon itself: what it has of the prefix is found by a match";
		return KV_ERR_NOT_FOUND;
	}
	call->reply->fetch_reply.timeout_ms = grant_time(host, call->ask->fetch.timeout_ms);

	return KV_OK;
}

kv_status_t kvd_request_fetch(kvd_host_t *host, kvd_call_t *call)
{
	static kvd_net_fetch_t order; /* of the loop's thread */
	const kv_msg_fetch_t *ask = &call->ask->fetch;
	kvd_net_host_t *net = host->net;
	const kvd_peer_report_t *peer = net ? find_peer(net, ask->peer) : NULL;
	kv_status_t status;

	if (net && is_named(ask->peer, net->config.peers.name)) {
		return fetch_from_self(host, call);
	}
	if (!peer) {
		call->detail = "no such peer in the configuration (peers.addresses)";
		return KV_ERR_NOT_FOUND;
	}
	if (ask->transfer.len == 0 || ask->names.len + ask->rest.len == 0) {
		call->detail = "a FETCH has a transfer id and names";
		return KV_ERR_ARG;
	}
	if (net->source.fd < 0 || peer->state != KVD_PEER_UP) {
		call->detail = "the peer is not connected; kvctl peers says why";
		return KV_ERR_UNREACHABLE;
	}
	if (net->asked_count == KVD_NET_ASKED_MAX) {
		call->detail = "the net process has too much to begin";
		return KV_ERR_BUSY;
	}
	memset(&order, 0, sizeof order);
	order.version = KVD_NET_WIRE;
	order.verb = KVD_NET_VERB_FETCH;
	order.order = ++net->orders;
	snprintf(order.ns, sizeof order.ns, "%s", call->session->ns->name);
	memcpy(order.peer, ask->peer.data, ask->peer.len);
	memcpy(order.transfer, ask->transfer.data, ask->transfer.len);
	memcpy(order.identity, ask->identity.data, ask->identity.len);
	memcpy(order.salt, ask->salt.data, ask->salt.len);
	order.identity_len = ask->identity.len;
	order.salt_len = ask->salt.len;
	order.flags = ask->flags;
	order.hash_bytes = ask->hash_bytes;
	order.names_len = ask->names.len;
	order.rest_len = ask->rest.len;
	order.timeout_ms = grant_time(host, ask->timeout_ms);
	status = send_with_names(net, &order, ask);
	if (status == KV_OK) {
		net->asked[net->asked_count++] = (kvd_net_asked_t){.order = order.order,
								   .member = kvd_member_entry_id(call->session->member),
								   .frame_id = call->header->id,
								   .timeout_ms = order.timeout_ms};
	}

	return status == KV_OK ? KV_PENDING : status;
}

/* ---- what people see ------------------------------------------------------------------------- */

static void put_peer(kv_json_t *json, const kvd_peer_config_t *config, const kvd_peer_report_t *peer)
{
	static const char *const states[] = {"down", "dialling", "up"};
	const kvd_peer_counts_t *c = &peer->counts;
	char key[16];

	kv_json_open(json, NULL, '{');
	kv_json_text(json, "name", config->name);
	kv_json_text(json, "address", config->host);
	kv_json_raw(json, "port", config->port);
	kv_json_text(json, "state", states[peer->state <= KVD_PEER_UP ? peer->state : KVD_PEER_DOWN]);
	kv_json_bool(json, "asks", (int)peer->asks);
	kv_json_text(json, "bytes", peer->state != KVD_PEER_UP ? "" : peer->has_ucx ? "ucx" : "tls");
	snprintf(key, sizeof key, "%08x", peer->key);
	kv_json_text(json, "key", peer->key ? key : "");
	kv_json_numbers(json, {"retry_ms", peer->retry_ms}, {"fetching", peer->fetching}, {"serving", peer->serving},
			{"in_flight_bytes", peer->in_flight}, {"bytes_in", c->bytes_in}, {"bytes_out", c->bytes_out},
			{"fetched", c->fetched}, {"fetch_failed", c->fetch_failed}, {"served", c->served},
			{"serve_failed", c->serve_failed}, {"links", c->links}, {"breaks", c->breaks},
			{"corrupt", c->corrupt});
	kv_json_text(json, "error", peer->error);
	kv_json_close(json, '}');
}

void kvd_net_json(const kvd_host_t *host, kv_json_t *json)
{
	const kvd_net_host_t *net = host->net;

	kv_json_open(json, NULL, '{');
	if (net) {
		kv_json_open(json, "net", '{');
		kv_json_text(json, "name", net->config.peers.name);
		kv_json_bool(json, "running", net->source.fd >= 0);
		kv_json_u64(json, "pid", (uint64_t)net->pid);
		kv_json_u64(json, "restarts", net->starts > 0 ? net->starts - 1 : 0);
		kv_json_u64(json, "crashes", net->crashes);
		kv_json_text(json, "crash", net->crashes > 0 ? sigdescr_np(net->crash_signal) : "");
		kv_json_text(json, "ucx", net->state.ucx_version);
		kv_json_text(json, "ucx_error", net->state.why);
		kv_json_text(json, "listen_error", net->state.listen_error);
		kv_json_close(json, '}');
	} else {
		kv_json_raw(json, "net", "null");
	}
	kv_json_open(json, "peers", '[');
	for (uint32_t i = 0; net && i < net->config.peers.count; i++) {
		put_peer(json, &net->config.peers.peers[i], &net->state.peers[i]);
	}
	kv_json_close(json, ']');
	kv_json_close(json, '}');
}

int kvd_net_is_degraded(const kvd_host_t *host, char *out, size_t cap)
{
	const kvd_net_host_t *net = host->net;
	uint32_t up = 0;

	out[0] = '\0';
	if (!net) {
		return 0;
	}
	for (uint32_t i = 0; i < net->state.count; i++) {
		up += net->state.peers[i].state == KVD_PEER_UP;
	}
	if (net->source.fd < 0) {
		snprintf(out, cap, "the net process is not running: peers are off, and it is started again");
	} else if (net->crashes > 0 && kv_now_ns(host->env) - net->crash_ns < CRASH_SHOWN_NS) {
		snprintf(out, cap, "the net process has crashed %u times (%s): its log says why", net->crashes,
			 sigdescr_np(net->crash_signal));
	} else if (net->state.why[0]) {
		snprintf(out, cap, "blocks of other nodes come over TLS: %s", net->state.why);
	} else if (net->state.listen_error[0]) {
		snprintf(out, cap, "%s", net->state.listen_error);
	} else if (up < net->config.peers.count) {
		snprintf(out, cap, "transfers work with %u of %u peers; kvctl peers says which", up,
			 net->config.peers.count);
	}

	return out[0] != '\0';
}
