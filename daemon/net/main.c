/* kvd-net: the net process. TLS and UCX run here and nowhere else; the daemon starts, asks and ends it
 * (daemon/io/sessions/net.c). docs/decisions/046, 078. */
#include "net/prefix.h"

#include "kv/system.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define FDS_MAX      512u
#define IDLE_MS      50
#define BUSY_MS      2 /* libkvc's answers and deadlines */
#define UCX_AGAIN_NS UINT64_C(2000000000)
#define UCX_STEPS    64u /* in one iteration: what has landed is taken while more comes */

static kvd_net_t net_;
static kvd_net_config_t config_;

/* ---- the daemon ------------------------------------------------------------------------------ */

static int receive_config(void)
{
	ssize_t n;

	do {
		n = recv(KVD_NET_FD, &config_, sizeof config_, 0);
	} while (n < 0 && errno == EINTR);

	return n == (ssize_t)sizeof config_ && config_.version == KVD_NET_WIRE && config_.verb == KVD_NET_VERB_CONFIG;
}

static void report_peer(kvd_net_peer_t *peer, kvd_peer_report_t *report)
{
	const kvd_pair_key_t *key = peer->link ? kvd_link_key(peer->link) : NULL;

	snprintf(report->name, sizeof report->name, "%s", peer->config->name);
	snprintf(report->error, sizeof report->error, "%s", peer->error);
	report->asks = peer->inbound != NULL;
	report->has_ucx = kvd_net_peer_state(peer) == KVD_PEER_UP && !peer->stream;
	report->state = kvd_net_peer_state(peer);
	report->key = key ? key->number : 0;
	report->retry_ms =
		!peer->link && peer->retry_ns > net_.now_ns ? (uint32_t)((peer->retry_ns - net_.now_ns) / 1000000u) : 0;
	report->fetching = peer->fetching;
	report->serving = peer->serving;
	report->in_flight = kvd_fetch_in_flight(peer);
	report->counts = peer->counts;
}

static void report(void)
{
	static kvd_net_state_t state;

	memset(&state, 0, sizeof state);
	state.version = KVD_NET_WIRE;
	state.verb = KVD_NET_VERB_STATE;
	state.count = net_.peer_count;
	state.ucx = net_.ucx != NULL;
	snprintf(state.ucx_version, sizeof state.ucx_version, "%s", net_.ucx ? kvd_ucx_version(net_.ucx) : "");
	snprintf(state.why, sizeof state.why, "%s", net_.ucx_why);
	snprintf(state.listen_error, sizeof state.listen_error, "%s", net_.listen_error);
	state.refused_frames = net_.refused_frames;
	state.refused_proofs = net_.refused_proofs;
	state.refused_links = net_.refused_links;
	state.refused_old = net_.refused_old;
	for (uint32_t i = 0; i < net_.peer_count; i++) {
		report_peer(&net_.peers[i], &state.peers[i]);
	}
	(void)send(KVD_NET_FD, &state, sizeof state, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* ---- UCX ------------------------------------------------------------------------------------- */

/* Where it was asked for, and does not start, bytes go over TLS, and `kvctl peers` says why. A device that is not up
 * yet may be later; a library that is not there is not looked for again. */
static void open_ucx(void)
{
	const kvd_ucx_config_t config = {.transports = config_.transports,
					 .address = config_.peers.host,
					 .ops = &kvd_net_bytes_ops,
					 .ctx = &net_};
	char why[sizeof net_.ucx_why];
	kv_status_t status = kvd_ucx_open(&config, &net_.ucx, why, sizeof why);

	net_.ucx_ns = status == KV_OK || status == KV_ERR_UNSUPPORTED ? UINT64_MAX : net_.now_ns + UCX_AGAIN_NS;
	if (status == KV_OK) {
		kv_log(KV_LOG_INFO, "net", "UCX %s: transports %s", kvd_ucx_version(net_.ucx), config.transports);
		net_.ucx_why[0] = '\0';
		kvd_net_peers_admit(&net_);
		kvd_net_peers_restart(&net_, "UCX has started"); /* each READY so far was without its address */
	} else if (strcmp(why, net_.ucx_why) != 0) {
		kv_log(KV_LOG_WARN, "net", "bytes go over TLS: %s", why);
		memcpy(net_.ucx_why, why, sizeof why);
	}
}

/* ---- the loop -------------------------------------------------------------------------------- */

static uint32_t add_fd(struct pollfd *fds, uint32_t n, int fd, short events)
{
	if (fd >= 0 && n < FDS_MAX) {
		fds[n++] = (struct pollfd){.fd = fd, .events = events};
	}

	return n;
}

static void wait_for_events(void)
{
	static struct pollfd fds[FDS_MAX];
	int of_tenants[64];
	const int busy = net_.fetches || net_.serves;
	uint32_t n = add_fd(fds, 0, KVD_NET_FD, net_.answer_count > 0 ? POLLIN | POLLOUT : POLLIN);
	uint32_t tenants = kvd_tenants_fds(&net_, of_tenants, KV_COUNT_OF(of_tenants));

	n = add_fd(fds, n, net_.listen_fd, POLLIN);
	n = add_fd(fds, n, kvd_copiers_fd(net_.copiers), POLLIN);
	for (uint32_t i = 0; i < tenants; i++) {
		n = add_fd(fds, n, of_tenants[i], POLLIN);
	}
	n = kvd_net_peers_fds(&net_, fds, n, FDS_MAX);
	if (!busy && kvd_tenants_prefault(&net_)) {
		return;
	}
	if (net_.ucx) {
		if (!kvd_ucx_arm(net_.ucx)) {
			return;
		}
		n = add_fd(fds, n, kvd_ucx_fd(net_.ucx), POLLIN);
	}
	(void)poll(fds, n, busy ? BUSY_MS : IDLE_MS);
}

static uint32_t count_up(void)
{
	uint32_t up = 0;

	for (uint32_t i = 0; i < net_.peer_count; i++) {
		up += kvd_net_peer_state(&net_.peers[i]) == KVD_PEER_UP;
	}

	return up;
}

/* Returns when the daemon has gone. */
static void run(void)
{
	uint64_t report_ns = 0;
	uint32_t reported_up = 0;

	while (1) {
		kvd_net_set_time(&net_, kv_now_ns(&kv_env_posix));
		net_.moved = 0;
		if (kvd_net_take_orders(&net_) != KV_OK) {
			return;
		}
		if (net_.now_ns >= net_.ucx_ns) {
			open_ucx();
		}
		kvd_tenants_poll(&net_);
		kvd_net_peers_step(&net_);
		kvd_fetches_step(&net_);
		kvd_net_send_answers(&net_);
		kvd_serves_step(&net_);
		for (uint32_t i = 0; i < UCX_STEPS && net_.ucx && kvd_ucx_progress(net_.ucx); i++) {
			net_.moved = 1;
		}
		if (net_.now_ns >= report_ns || count_up() != reported_up) {
			report_ns = net_.now_ns + KVD_NET_REPORT_NS;
			reported_up = count_up();
			report();
		}
		if (!net_.moved) {
			wait_for_events();
		}
	}
}

int main(int argc, char **argv)
{
	const struct rlimit no_core = {0, 0}; /* keys, and other people's bytes */
	kv_status_t status;
	char why[300] = "";

	if (kv_version_asked(argc, argv, "kvd-net")) {
		return 0;
	}
	prctl(PR_SET_NAME, "kvd-net");
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* also when it is stopped, which an end of file would not wake */
	(void)setrlimit(RLIMIT_CORE, &no_core);
	close(KVD_NET_FD + 1); /* the program itself */
	signal(SIGPIPE, SIG_IGN);
	if (!receive_config()) {
		fprintf(stderr, "kvd-net is started by kvd\n");
		return kv_status_exit_code(KV_ERR_ARG);
	}
	kv_log_set_level((kv_log_level_t)config_.log_level);
	net_.config = &config_;
	net_.listen_fd = -1;
	kvd_net_set_time(&net_, kv_now_ns(&kv_env_posix));
	net_.ucx_ns = strcmp(config_.transports, KVD_PEERS_TLS) == 0 ? UINT64_MAX : 0;
	status = kv_random_check(&kv_env_posix);
	if (status == KV_OK) {
		status = kvd_net_peers_open(&net_, why, sizeof why);
	}
	if (status == KV_OK) {
		status = kvd_tenants_open(&net_);
	}
	if (status == KV_OK) {
		status = kvd_copiers_open(&net_.copiers);
	}
	if (status != KV_OK) {
		kv_log(KV_LOG_ERROR, "net", "cannot start: %s", why[0] ? why : kv_status_text(status));
		return kv_status_exit_code(KV_ERR_CONFIG);
	}
	run();
	kvd_copiers_close(net_.copiers);

	return 0; /* the kernel takes everything back, and the daemons see it at once */
}
