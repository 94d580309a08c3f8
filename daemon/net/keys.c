/* The keys of peers, from their files. */
#include "net/net.h"

#include <string.h>

kv_status_t kvd_net_keys_read(kvd_net_t *net, const kvd_peers_config_t *peers, char *why, size_t cap)
{
	static kvd_pair_key_t keys[KVD_PEERS_MAX][KVD_PEER_KEYS_MAX];
	static uint8_t secret[KVD_PEER_KEY_MAX];
	kv_status_t status = KV_OK;

	for (uint32_t i = 0; i < net->peer_count && status == KV_OK; i++) {
		const kvd_peer_config_t *peer = &peers->peers[i];

		for (uint32_t k = 0; k < peer->key_count && status == KV_OK; k++) {
			uint32_t len = 0;

			status = kvd_peer_key_read(peer->key_path[k], secret, &len, why, cap);
			kvd_pair_key_init(&keys[i][k], peers->name, peer->name, (kv_slice_t){secret, len});
		}
	}
	for (uint32_t i = 0; i < net->peer_count && status == KV_OK; i++) {
		memcpy(net->peers[i].keys, keys[i], sizeof keys[i]);
		net->peers[i].key_count = peers->peers[i].key_count;
		net->peers[i].dial_key = 0;
	}
	explicit_bzero(secret, sizeof secret);
	explicit_bzero(keys, sizeof keys);

	return status;
}

static const kvd_pair_key_t *key_at(void *ctx, uint32_t index)
{
	const kvd_net_t *net = ctx;

	for (uint32_t i = 0; i < net->peer_count; i++) {
		if (index < net->peers[i].key_count) {
			return &net->peers[i].keys[index];
		}
		index -= net->peers[i].key_count;
	}

	return NULL;
}

kvd_key_ring_t kvd_net_key_ring(kvd_net_t *net)
{
	return (kvd_key_ring_t){.at = key_at, .ctx = net};
}

int kvd_net_key_is_known(const kvd_net_peer_t *peer, const kvd_link_t *link)
{
	const kvd_pair_key_t *key = kvd_link_key(link);
	int is_known = 0;

	for (uint32_t k = 0; key && k < peer->key_count; k++) {
		is_known |= kvd_tls_equal(peer->keys[k].psk, key->psk, sizeof key->psk);
	}

	return is_known;
}
