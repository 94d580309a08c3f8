/* Options peers.*: names, addresses and key files. */
#include "peers.h"

#include "kv/text.h"
#include "kv/units.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static kv_status_t refuse(char *why, size_t cap, const char *format, ...) __attribute__((format(printf, 3, 4)));
static kv_status_t refuse(char *why, size_t cap, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(why, cap, format, args);
	va_end(args);

	return KV_ERR_CONFIG;
}

static int is_name(const char *name)
{
	static const char allowed[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.";
	size_t len = strlen(name);

	return len > 0 && len <= KVD_PEER_NAME_MAX && strspn(name, allowed) == len;
}

/* address:port, numeric: nothing waits for a name server; an IPv6 address in brackets. */
static int split_address(const char *text, char host[64], char port[8])
{
	const char *colon = strrchr(text, ':');
	const char *from = text;
	size_t len = colon ? (size_t)(colon - text) : 0;
	uint64_t number;
	uint8_t binary[16];

	if (len >= 2 && text[0] == '[' && text[len - 1] == ']') {
		from++;
		len -= 2;
	}
	if (len == 0 || len > 63 || kv_parse_u64(colon + 1, &number) != KV_OK || number == 0 || number > 65535) {
		return 0;
	}
	memcpy(host, from, len);
	host[len] = '\0';
	snprintf(port, 8, "%u", (unsigned)number);

	return inet_pton(AF_INET, host, binary) == 1 || inet_pton(AF_INET6, host, binary) == 1;
}

/* The value of name=value in a list, the nth of this name; 0: it has none. */
static int find_value(const char *list, const char *name, uint32_t nth, char *out, size_t cap)
{
	const size_t name_len = strlen(name);
	const char *word;
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(list, i, &word)) > 0; i++) {
		if (len > name_len + 1 && word[name_len] == '=' && memcmp(word, name, name_len) == 0 &&
		    len - name_len - 1 < cap && nth-- == 0) {
			snprintf(out, cap, "%.*s", (int)(len - name_len - 1), word + name_len + 1);
			return 1;
		}
	}

	return 0;
}

static uint32_t find_keys(const kvd_options_t *options, kvd_peer_config_t *peer)
{
	uint32_t n = 0;

	while (n < KVD_PEER_KEYS_MAX &&
	       find_value(options->peers_keys, peer->name, n, peer->key_path[n], sizeof peer->key_path[n])) {
		n++;
	}

	return n;
}

void kvd_peers_find_keys(const kvd_options_t *options, kvd_peers_config_t *peers)
{
	for (uint32_t i = 0; i < peers->count; i++) {
		const uint32_t n = find_keys(options, &peers->peers[i]);

		peers->peers[i].key_count = n > 0 ? n : peers->peers[i].key_count;
	}
}

static kv_status_t parse_peer(const kvd_options_t *options, const char *word, size_t len, kvd_peers_config_t *peers,
			      char *why, size_t cap)
{
	kvd_peer_config_t *peer = &peers->peers[peers->count];
	const char *equals = memchr(word, '=', len);
	char address[KV_OPTION_STRING_MAX];

	snprintf(peer->name, sizeof peer->name, "%.*s", equals ? (int)(equals - word) : 0, word);
	snprintf(address, sizeof address, "%.*s", equals ? (int)(len - (size_t)(equals - word) - 1) : 0,
		 equals ? equals + 1 : word);
	if (!equals || (size_t)(equals - word) > KVD_PEER_NAME_MAX || !is_name(peer->name) ||
	    !split_address(address, peer->host, peer->port)) {
		return refuse(why, cap, "peers.addresses: \"%.*s\" is not name=address:port, numeric", (int)len, word);
	}
	if (strcmp(peer->name, peers->name) == 0) {
		return refuse(why, cap, "peers.addresses: \"%s\" is this daemon's own name", peer->name);
	}
	for (uint32_t i = 0; i < peers->count; i++) {
		if (strcmp(peers->peers[i].name, peer->name) == 0) {
			return refuse(why, cap, "peers.addresses: \"%s\" is there twice", peer->name);
		}
	}
	peer->key_count = find_keys(options, peer);
	if (find_value(options->peers_keys, peer->name, KVD_PEER_KEYS_MAX, address, sizeof address)) {
		return refuse(why, cap, "peers.keys: more than %u key files for \"%s\": a new one and the one before",
			      KVD_PEER_KEYS_MAX, peer->name);
	}
	if (peer->key_count == 0) {
		return refuse(why, cap, "peers.keys: no key file for \"%s\"; nothing is said to a peer without one",
			      peer->name);
	}
	peers->count++;

	return KV_OK;
}

/* A key for a peer that there is not is a mistake in one of the two lists. */
static kv_status_t check_keys(const kvd_options_t *options, const kvd_peers_config_t *peers, char *why, size_t cap)
{
	const char *word;
	size_t len;

	for (uint32_t i = 0; (len = kvd_list_word(options->peers_keys, i, &word)) > 0; i++) {
		size_t name_len = strcspn(word, "=,");
		uint32_t p = 0;

		while (p < peers->count && (strlen(peers->peers[p].name) != name_len ||
					    memcmp(peers->peers[p].name, word, name_len) != 0)) {
			p++;
		}
		if (p == peers->count) {
			return refuse(why, cap, "peers.keys: \"%.*s\" names no peer of peers.addresses", (int)len,
				      word);
		}
	}

	return KV_OK;
}

kv_status_t kvd_peers_parse(const kvd_options_t *options, kvd_peers_config_t *peers, char *why, size_t cap)
{
	kv_status_t status = KV_OK;
	const char *word;
	size_t len;

	memset(peers, 0, sizeof *peers);
	if (options->peers_addresses[0] == '\0') {
		if (options->peers_keys[0]) {
			return check_keys(options, peers, why, cap);
		}
		return KV_OK; /* without peers, and so without keys, nothing listens */
	}
	if (!is_name(options->peers_name)) {
		return refuse(why, cap, "peers.name: \"%s\" is not a name of letters, digits, '-', '_' and '.'",
			      options->peers_name);
	}
	snprintf(peers->name, sizeof peers->name, "%.64s", options->peers_name);
	if (!split_address(options->peers_listen, peers->host, peers->port)) {
		return refuse(why, cap, "peers.listen: \"%s\" is not address:port, numeric", options->peers_listen);
	}
	for (uint32_t i = 0; status == KV_OK && (len = kvd_list_word(options->peers_addresses, i, &word)) > 0; i++) {
		if (i == KVD_PEERS_MAX) {
			return refuse(why, cap, "peers.addresses: more than %u peers", KVD_PEERS_MAX);
		}
		status = parse_peer(options, word, len, peers, why, cap);
	}

	return status == KV_OK ? check_keys(options, peers, why, cap) : status;
}

kv_status_t kvd_peer_key_read(const char *path, uint8_t key[KVD_PEER_KEY_MAX], uint32_t *p_len, char *why, size_t cap)
{
	uint8_t bytes[KVD_PEER_KEY_MAX + 2];
	struct stat stat;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
	ssize_t n = -1;

	if (fd < 0 || fstat(fd, &stat) != 0 || (n = read(fd, bytes, sizeof bytes)) < 0) {
		refuse(why, cap, "the key file %s cannot be read: %s", path, strerror(errno));
	} else if (!S_ISREG(stat.st_mode) || (stat.st_mode & 077) != 0 ||
		   (stat.st_uid != geteuid() && stat.st_uid != 0)) {
		n = refuse(why, cap, "the key file %s must be a file of the daemon's user or root with mode 0600",
			   path);
	} else {
		while (n > 0 && (bytes[n - 1] == '\n' || bytes[n - 1] == '\r')) {
			n--;
		}
		if (n < (ssize_t)KVD_PEER_KEY_MIN || n > (ssize_t)KVD_PEER_KEY_MAX) {
			n = refuse(why, cap, "the key file %s has %zd bytes; %u to %u are wanted", path, n,
				   KVD_PEER_KEY_MIN, KVD_PEER_KEY_MAX);
		}
	}
	if (fd >= 0) {
		close(fd);
	}
	if (n < 0) {
		return KV_ERR_CONFIG;
	}
	memcpy(key, bytes, (size_t)n);
	*p_len = (uint32_t)n;

	return KV_OK;
}

kv_status_t kvd_peers_check(const kvd_options_t *options, char *why, size_t cap)
{
	static kvd_peers_config_t peers;
	uint8_t key[KVD_PEER_KEY_MAX];
	char reason[400];
	uint32_t len;
	kv_status_t status = kvd_peers_parse(options, &peers, why, cap);

	for (uint32_t i = 0; status == KV_OK && i < peers.count; i++) {
		for (uint32_t k = 0; status == KV_OK && k < peers.peers[i].key_count; k++) {
			status = kvd_peer_key_read(peers.peers[i].key_path[k], key, &len, reason, sizeof reason);
			if (status != KV_OK) {
				snprintf(why, cap, "peers.keys: %s: %s", peers.peers[i].name, reason);
			}
		}
	}

	return status;
}
