/* daemon/options/peers.h -- the configured peers: parsed and checked from the options, for the daemon and its net
 * process. */
#ifndef KVD_PEERS_H
#define KVD_PEERS_H

#include "options.h"

#define KVD_PEERS_MAX     32u
#define KVD_PEER_KEY_MIN  16u
#define KVD_PEER_KEY_MAX  4096u
#define KVD_PEER_NAME_MAX 64u
#define KVD_PEER_KEYS_MAX 2u    /* of one peer, while its key is being changed */
#define KVD_PEERS_TLS     "tls" /* peers.transports without UCX */

typedef struct kvd_peer_config {
	char name[KVD_PEER_NAME_MAX + 1];
	char host[64], port[8]; /* numeric */
	char key_path[KVD_PEER_KEYS_MAX][KV_OPTION_STRING_MAX];
	uint32_t key_count;
} kvd_peer_config_t;

typedef struct kvd_peers_config {
	char name[KVD_PEER_NAME_MAX + 1]; /* our own */
	char host[64], port[8];           /* where we listen */
	kvd_peer_config_t peers[KVD_PEERS_MAX];
	uint32_t count; /* 0: there are no peers */
} kvd_peers_config_t;

/* KV_ERR_CONFIG: `why` is a sentence; key files are not looked at. */
kv_status_t kvd_peers_parse(const kvd_options_t *options, kvd_peers_config_t *peers, char *why, size_t cap);
/* Options have been read again: the key files of these peers as they are now. A peer without any keeps its own. */
void kvd_peers_find_keys(const kvd_options_t *options, kvd_peers_config_t *peers);
/* As kvd_peers_parse(), and every key file can be used. */
kv_status_t kvd_peers_check(const kvd_options_t *options, char *why, size_t cap);
/* Read a key: 16 to 4,096 bytes, a newline at the end not counted, of a file that only its owner may read or write.
 * KV_ERR_CONFIG. */
kv_status_t kvd_peer_key_read(const char *path, uint8_t key[KVD_PEER_KEY_MAX], uint32_t *p_len, char *why, size_t cap);

#endif
