/* What the daemon orders. */
#include "net/net.h"

#include "kv/sock.h"

#include <sys/mman.h>
#include <unistd.h>

#define ORDERS 64u /* in one iteration */

static kv_status_t begin_fetch(kvd_net_t *net, const kvd_net_fetch_t *order, int fd)
{
	const size_t len = (size_t)order->names_len + order->rest_len;
	uint8_t *names;
	kv_status_t status;

	if (fd < 0 || len == 0) {
		return KV_ERR_PROTO;
	}
	names = mmap(NULL, len, PROT_READ, MAP_PRIVATE, fd, 0);
	if (names == MAP_FAILED) {
		return KV_ERR_NOMEM;
	}
	status = kvd_fetch_begin(net, order, names);
	munmap(names, len);

	return status;
}

/* New keys; links with those before end when they have nothing to do. */
static void read_keys(kvd_net_t *net, const kvd_net_config_t *config)
{
	char why[300] = "there are other peers";

	if (config->peers.count == net->peer_count &&
	    kvd_net_keys_read(net, &config->peers, why, sizeof why) == KV_OK) {
		net->rekeyed_ns = net->now_ns;
		kv_log(KV_LOG_INFO, "net", "keys of peers were read again");
	} else {
		kv_log(KV_LOG_WARN, "net", "keys of peers are those before: %s", why);
	}
}

/* One order. 0: there is none; -1: the daemon has gone. */
static int take_order(kvd_net_t *net)
{
	static union {
		struct {
			uint32_t version, verb;
		} head;
		kvd_net_fetch_t fetch;
		kvd_net_config_t config;
	} order;
	int fds[KV_WIRE_MAX_FDS];
	uint32_t count = 0;
	size_t len = 0;
	kv_status_t status = kv_sock_recv(KVD_NET_FD, (uint8_t *)&order, sizeof order, &len, fds, &count);

	if (status != KV_OK) {
		return status == KV_PENDING ? 0 : -1;
	}

	const int fd = count == 1 ? fds[0] : -1;

	status = KV_ERR_PROTO;
	if (len == sizeof order.config && order.head.verb == KVD_NET_VERB_CONFIG) {
		read_keys(net, &order.config);
		return 1;
	}
	if (len == sizeof order.fetch && order.head.version == KVD_NET_WIRE && order.head.verb == KVD_NET_VERB_FETCH) {
		status = begin_fetch(net, &order.fetch, fd);
	}
	if (status != KV_OK) {
		kvd_net_answer(net, order.fetch.order, status);
		kv_log(KV_LOG_WARN, "net", "a transfer was not begun: error \"%s\"", kv_status_text(status));
	}
	if (fd >= 0) {
		close(fd);
	}

	return 1;
}

kv_status_t kvd_net_take_orders(kvd_net_t *net)
{
	int order = 1;

	for (uint32_t i = 0; i < ORDERS && order > 0; i++) {
		order = take_order(net);
	}

	return order < 0 ? KV_ERR_CLOSED : KV_OK;
}
