/* A peer as the two sides of a transfer see it. */
#include "net/net.h"

#include <string.h>

#define ITERATION_MAX_NS UINT64_C(100000000) /* twice as long as the loop waits */

kvd_net_peer_t *kvd_net_peer_find(kvd_net_t *net, const char *name)
{
	for (uint32_t i = 0; i < net->peer_count; i++) {
		if (strcmp(net->peers[i].config->name, name) == 0) {
			return &net->peers[i];
		}
	}

	return NULL;
}

kvd_link_t *kvd_net_peer_link(kvd_net_peer_t *peer)
{
	return peer->link && kvd_link_state(peer->link) == KVD_LINK_OPEN ? peer->link : NULL;
}

/* Between two iterations the process may have been stopped, or the machine too busy to run it. A peer could do nothing
 * meanwhile that would have been seen, so it answers for no more than an iteration that was on time. Deadlines of
 * transfers are promises to engines, and go on. */
void kvd_net_set_time(kvd_net_t *net, uint64_t now_ns)
{
	const uint64_t passed = now_ns - net->now_ns;

	net->peer_ns += net->now_ns == 0 || passed < ITERATION_MAX_NS ? passed : ITERATION_MAX_NS;
	net->now_ns = now_ns;
}

uint32_t kvd_net_left_ms(const kvd_net_t *net, uint64_t deadline_ns)
{
	const uint64_t left = deadline_ns > net->now_ns ? (deadline_ns - net->now_ns + 999999u) / 1000000u : 0;

	return left < UINT32_MAX ? (uint32_t)left : UINT32_MAX;
}

kvd_peer_state_t kvd_net_peer_state(const kvd_net_peer_t *peer)
{
	if (!peer->link) {
		return KVD_PEER_DOWN;
	}
	if (kvd_link_state(peer->link) != KVD_LINK_OPEN || !peer->is_ready || peer->bytes_link ||
	    (peer->stream && kvd_stream_state(peer->stream) != KVD_STREAM_OPEN)) {
		return KVD_PEER_DIALLING;
	}

	return KVD_PEER_UP;
}

void kvd_net_peer_break(kvd_net_peer_t *peer, kv_status_t status, const char *why)
{
	if (peer->link) {
		kvd_link_fail(peer->link, status, why);
	}
}
