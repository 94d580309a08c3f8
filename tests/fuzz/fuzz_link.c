/* What a stranger says on the peers' port, and what a peer says in a message: nothing but a dead link comes of the
 * first, and a body that can be decoded is encoded to one that says the same.
 *
 * Byte 0: a message's code, and then its body; 0: bytes for a link that has just been accepted. */
#include "kv_test.h"

#include "net/link.h"

#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static kvd_pair_key_t key_;

static const kvd_pair_key_t *key_at(void *ctx, uint32_t index)
{
	(void)ctx;
	if (key_.number == 0) {
		kvd_pair_key_init(&key_, "b", "a", kv_slice_str("a key of sixteen"));
	}

	return index == 0 ? &key_ : NULL;
}

/* Nobody here has the key. */
static kv_status_t on_opened(void *ctx, kvd_link_t *link)
{
	(void)ctx;
	(void)link;
	abort();
}

static kv_status_t on_bytes(void *ctx, kvd_link_t *link, const uint8_t ticket[KVD_NET_TICKET])
{
	(void)ctx;
	(void)link;
	(void)ticket;
	abort();
}

static kv_status_t on_received(void *ctx, kvd_link_t *link, uint32_t code, const kvd_net_message_t *message)
{
	(void)ctx;
	(void)link;
	(void)code;
	(void)message;
	abort();
}

static void feed_link(const uint8_t *data, size_t size)
{
	static const kvd_link_ops_t ops = {.opened = on_opened, .bytes = on_bytes, .received = on_received};
	const kvd_link_config_t config = {.ops = &ops, .silence_ns = UINT64_C(1000000000), .ring = {.at = key_at}};
	const uint64_t now = kv_now_ns(&kv_env_posix);
	kvd_link_t *link;
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
		return;
	}
	link = kvd_link_accept(&config, pair[0]);
	if (link) {
		(void)!write(pair[1], data, size < 65536 ? size : 65536);
		for (uint32_t i = 0; i < 16; i++) {
			kvd_link_progress(link, now);
		}
		kvd_link_progress(link, now + 2 * KVD_LINK_HANDSHAKE_NS);
		if (kvd_link_state(link) != KVD_LINK_DEAD) {
			abort();
		}
		kvd_link_free(link);
	}
	close(pair[1]);
}

static void decode_body(const kv_body_t *fields, const uint8_t *data, size_t size)
{
	kvd_net_message_t message, again;
	uint32_t len, second_len;
	uint8_t *out, *second;
	size_t cap;

	if (size > KVD_NET_MAX_BODY || kv_body_decode(fields, data, (uint32_t)size, &message, NULL) != KV_OK) {
		return;
	}
	cap = kv_body_size(fields, &message);
	out = malloc(2 * cap + 1);
	second = out + cap;
	if (!out || kv_body_encode(fields, &message, out, cap, &len) != KV_OK ||
	    kv_body_decode(fields, out, len, &again, NULL) != KV_OK ||
	    kv_body_encode(fields, &again, second, cap, &second_len) != KV_OK || second_len != len ||
	    memcmp(out, second, len) != 0) {
		abort();
	}
	free(out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const kv_body_t *fields = size > 0 ? kvd_net_body(data[0]) : NULL;

	if (fields) {
		decode_body(fields, data + 1, size - 1);
	} else if (size > 0 && data[0] == 0) {
		feed_link(data + 1, size - 1);
	}

	return 0;
}
