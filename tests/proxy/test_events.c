/* What the proxy knows of engines' own caches: exactly what their events tell, and nothing after a gap or a bad byte.
 */
#include "kv_cmocka.h"
#include "kv_test.h"

#include "events/cache.h"
#include "events/subscriber.h"

#include "kv/env.h"
#include "kv/mp.h"
#include "kv/types.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
#include <zmq.h>

#define UNIT    4u /* tokens of a block */
#define DEPTH   6u
#define WAIT_NS UINT64_C(30000000000)

static uint8_t bytes_[1 << 20];
static kv_mp_writer_t writer_;
static msgpack_packer packer_;
static uint64_t seq_;

/* ---- messages -------------------------------------------------------------------------------- */

static void pack_text(const char *value)
{
	msgpack_pack_str_with_body(&packer_, value, strlen(value));
}

static void begin_batch(uint32_t events)
{
	writer_ = (kv_mp_writer_t){bytes_, sizeof bytes_, 0};
	packer_ = kv_mp_packer(&writer_);
	msgpack_pack_array(&packer_, 3);
	msgpack_pack_double(&packer_, 1.5);
	msgpack_pack_array(&packer_, events);
}

typedef struct block {
	uint64_t hash, parent; /* parent 0: none */
	uint32_t tokens[UNIT];
	const char *extra; /* NULL: none */
	const char *adapter, *medium, *kind;
	uint32_t group;
} block_t;

static void pack_stored(const block_t *block)
{
	msgpack_pack_map(&packer_, 9);
	pack_text("type");
	pack_text("BlockStored");
	pack_text("block_hashes");
	msgpack_pack_array(&packer_, 1);
	msgpack_pack_uint64(&packer_, block->hash);
	pack_text("parent_block_hash");
	block->parent ? msgpack_pack_uint64(&packer_, block->parent) : msgpack_pack_nil(&packer_);
	pack_text("token_ids");
	msgpack_pack_array(&packer_, UNIT);
	for (uint32_t i = 0; i < UNIT; i++) {
		msgpack_pack_uint32(&packer_, block->tokens[i]);
	}
	pack_text("block_size");
	msgpack_pack_uint32(&packer_, UNIT);
	pack_text("medium");
	pack_text(block->medium ? block->medium : "GPU");
	pack_text("group_idx");
	msgpack_pack_uint32(&packer_, block->group);
	pack_text("kv_cache_spec_kind");
	pack_text(block->kind ? block->kind : "full_attention");
	pack_text(block->adapter ? "lora_name" : "extra_keys");
	if (block->adapter) {
		pack_text(block->adapter);
	} else {
		msgpack_pack_array(&packer_, 1);
		if (block->extra) {
			msgpack_pack_array(&packer_, 1);
			pack_text(block->extra);
		} else {
			msgpack_pack_nil(&packer_);
		}
	}
}

static void pack_removed(uint64_t hash, uint32_t group)
{
	msgpack_pack_map(&packer_, 4);
	pack_text("type");
	pack_text("BlockRemoved");
	pack_text("block_hashes");
	msgpack_pack_array(&packer_, 1);
	msgpack_pack_uint64(&packer_, hash);
	pack_text("medium");
	pack_text("GPU");
	pack_text("group_idx");
	msgpack_pack_uint32(&packer_, group);
}

static void deliver(kvp_cache_t *cache)
{
	msgpack_pack_int(&packer_, 0);
	assert_true(writer_.len <= writer_.cap);
	kvp_cache_take(cache, seq_++, bytes_, writer_.len);
}

static void stored(kvp_cache_t *cache, const block_t *block)
{
	begin_batch(1);
	pack_stored(block);
	deliver(cache);
}

static uint32_t hit(const kvp_cache_t *cache, const char *model, const char *salt, const uint32_t *tokens, uint32_t n)
{
	return kvp_cache_hit(cache, &(kvp_prefix_question_t){model, salt, tokens, n});
}

static kvp_cache_stats_t stats(const kvp_cache_t *cache)
{
	kvp_cache_stats_t out;

	kvp_cache_stats(cache, &out);

	return out;
}

/* ---- a model --------------------------------------------------------------------------------- */

/* Prompts are paths of a binary tree: node n has the children 2n and 2n + 1, the root is 1 and no block. */
static block_t node_block(uint32_t node)
{
	block_t block = {.hash = node * UINT64_C(0x123456789abcdef), .parent = node / 2 * UINT64_C(0x123456789abcdef)};

	block.parent = node / 2 == 1 ? 0 : block.parent;
	for (uint32_t i = 0; i < UNIT; i++) {
		block.tokens[i] = 100 + node % 2;
	}

	return block;
}

static uint32_t path_of(uint32_t node, uint32_t *tokens)
{
	uint32_t depth = 31 - (uint32_t)__builtin_clz(node);

	for (uint32_t i = depth; i-- > 0; node /= 2) {
		memcpy(tokens + i * UNIT, node_block(node).tokens, sizeof node_block(node).tokens);
	}

	return depth;
}

static void check_model(const kvp_cache_t *cache, const uint8_t *present)
{
	uint32_t tokens[DEPTH * UNIT];

	for (uint32_t leaf = 1u << DEPTH; leaf < 2u << DEPTH; leaf++) {
		uint32_t depth = path_of(leaf, tokens), expected = 0;

		while (expected < depth && present[leaf >> (depth - expected - 1)]) {
			expected++;
		}
		assert_int_equal(hit(cache, "m", "", tokens, depth * UNIT), expected * UNIT);
	}
}

KV_TEST(p9_what_is_known_is_what_the_events_tell)
{
	uint8_t present[2u << DEPTH] = {0};
	kv_test_rng_t rng = {kv_test_seed()};
	kvp_cache_t *cache = kvp_cache_create(1u << DEPTH);
	uint32_t n = 0;

	for (unsigned round = 0; round < 3000; round++) {
		const uint32_t node = 2 + (uint32_t)kv_test_below(&rng, (2u << DEPTH) - 2);
		const block_t block = node_block(node);

		if (kv_test_below(&rng, 3) > 0) {
			stored(cache, &block);
			if ((node < 4 || present[node / 2]) && (n < 1u << DEPTH || present[node])) {
				n += !present[node];
				present[node] = 1;
			}
		} else {
			begin_batch(1);
			pack_removed(block.hash, 0);
			deliver(cache);
			n -= present[node];
			present[node] = 0;
		}
		if (round == 2000) {
			begin_batch(1);
			msgpack_pack_map(&packer_, 1);
			pack_text("type");
			pack_text("AllBlocksCleared");
			deliver(cache);
			memset(present, 0, sizeof present);
			n = 0;
		}
		check_model(cache, present);
		assert_int_equal(stats(cache).blocks, n);
	}
	assert_int_equal(stats(cache).malformed + stats(cache).gaps, 0);
	kvp_cache_destroy(cache);
}

KV_TEST(p5_blocks_beyond_the_limit_count_as_not_there)
{
	kvp_cache_t *cache = kvp_cache_create(5000);
	block_t block = {0};

	for (uint32_t i = 1; i <= 8000; i++) {
		block = (block_t){.hash = i, .tokens = {i, i, i, i}};
		stored(cache, &block);
	}
	assert_int_equal(stats(cache).blocks, 5000);
	assert_int_equal(stats(cache).left_out, 3000);
	assert_int_equal(hit(cache, "", "", (uint32_t[]){5000, 5000, 5000, 5000}, UNIT), UNIT);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), 0);
	kvp_cache_destroy(cache);
}

KV_TEST(p8_salts_adapters_media_and_groups_are_kept_apart)
{
	kvp_cache_t *cache = kvp_cache_create(100);
	const block_t plain = {.hash = 1, .tokens = {1, 2, 3, 4}},
		      salted = {.hash = 2, .tokens = {5, 6, 7, 8}, .extra = "s"},
		      window = {.hash = 3, .tokens = {9, 9, 9, 9}, .group = 1, .kind = "sliding_window"},
		      spilled = {.hash = 4, .tokens = {8, 8, 8, 8}, .medium = "CPU_PINNED"};

	stored(cache, &window); /* decides nothing */
	stored(cache, &plain);
	stored(cache, &salted);
	stored(cache, &window);
	stored(cache, &spilled);
	assert_int_equal(hit(cache, "m", "", plain.tokens, UNIT), UNIT);
	assert_int_equal(hit(cache, "m", "s", plain.tokens, UNIT), 0);
	assert_int_equal(hit(cache, "m", "s", salted.tokens, UNIT), UNIT);
	assert_int_equal(hit(cache, "m", "", salted.tokens, UNIT), 0);
	assert_int_equal(hit(cache, "m", "", window.tokens, UNIT), 0);
	assert_int_equal(hit(cache, "m", "", spilled.tokens, UNIT), 0);
	begin_batch(2);
	pack_removed(plain.hash, 1); /* of the other group */
	pack_stored(&(block_t){.hash = 5, .tokens = {7, 7, 7, 7}, .adapter = "tuned"});
	deliver(cache);
	assert_int_equal(hit(cache, "m", "", plain.tokens, UNIT), UNIT);
	assert_int_equal(hit(cache, "tuned", "", plain.tokens, UNIT),
			 0); /* "tuned" is an adapter: its blocks have keys */
	stored(cache, &(block_t){.hash = 6, .tokens = {7, 7, 7, 7}, .extra = "tuned"});
	assert_int_equal(hit(cache, "tuned", "", (uint32_t[]){7, 7, 7, 7}, UNIT), UNIT);
	kvp_cache_destroy(cache);
}

KV_TEST(p9_after_a_gap_nothing_is_known)
{
	kvp_cache_t *cache = kvp_cache_create(100);
	const block_t block = {.hash = 1, .tokens = {1, 2, 3, 4}};

	stored(cache, &block);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), UNIT);
	seq_++;
	begin_batch(0);
	deliver(cache);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), 0);
	assert_int_equal(stats(cache).gaps, 1);
	stored(cache, &block);
	assert_int_equal(hit(cache, "", "", block.tokens, UNIT), UNIT);
	kvp_cache_forget(cache);
	assert_int_equal(stats(cache).blocks, 0);
	seq_ += 7; /* a new connection begins where it begins */
	stored(cache, &block);
	assert_int_equal(stats(cache).gaps, 1);
	assert_int_equal(stats(cache).blocks, 1);
	kvp_cache_destroy(cache);
}

/* ---- bytes of a real vLLM -------------------------------------------------------------------- */

static size_t golden(uint8_t *out, size_t cap)
{
	static char line[1 << 16];
	FILE *file = fopen(PROXY_GOLDEN, "re");
	size_t n = 0;
	unsigned byte;
	int at = 0;

	assert_non_null(file);
	while (fgets(line, sizeof line, file) && line[0] == '#') {
	}
	fclose(file);
	(void)sscanf(line, "store_3_blocks %*u %n", &at);
	assert_true(at > 0);
	for (; n < cap && sscanf(line + at + 2 * n, "%2x", &byte) == 1; n++) {
		out[n] = (uint8_t)byte;
	}

	return n;
}

KV_TEST(p10_every_cut_of_a_real_message_is_refused)
{
	static uint8_t payload[1 << 15];
	const size_t len = golden(payload, sizeof payload);
	uint32_t tokens[96];
	kvp_cache_t *cache = kvp_cache_create(100);

	for (uint32_t i = 0; i < 96; i++) {
		tokens[i] = 100 + i;
	}
	kvp_cache_take(cache, 0, payload, len);
	assert_int_equal(hit(cache, "tiny", "", tokens, 96), 96);
	assert_int_equal(hit(cache, "tiny", "", tokens, 95), 64);
	assert_int_equal(hit(cache, "tiny", "", tokens + 32, 32), 0);
	for (size_t cut = 0; cut < len - 1; cut++) { /* without the last byte, the rank, it is whole */
		kvp_cache_take(cache, cut + 1, payload, cut);
		assert_int_equal(stats(cache).malformed, cut + 1);
		assert_int_equal(stats(cache).blocks, 0);
	}
	kvp_cache_take(cache, len, payload, len);
	assert_int_equal(hit(cache, "tiny", "", tokens, 96), 96);
	kvp_cache_destroy(cache);
}

/* ---- connections ----------------------------------------------------------------------------- */

typedef struct heard {
	kvp_loop_t loop;
	kvp_subscriber_t subscriber;
	uint64_t messages, last_seq, bytes, lost, gaps;
} heard_t;

static void message_came(void *ctx, uint64_t seq, const uint8_t *payload, size_t len)
{
	heard_t *heard = ctx;

	assert_true(len == 0 || (payload[0] == (uint8_t)seq && payload[len - 1] == (uint8_t)seq));
	heard->gaps += heard->messages > 0 && seq != heard->last_seq + 1;
	heard->messages++;
	heard->last_seq = seq;
	heard->bytes += len;
}

static void connection_lost(void *ctx)
{
	((heard_t *)ctx)->lost++;
}

static void fd_ready(void *ctx, int fd, uint32_t events)
{
	heard_t *heard = ctx;

	(void)events;
	(void)kvp_subscriber_ready(&heard->subscriber, fd);
}

static void listen_to(heard_t *heard, const char *endpoint)
{
	*heard = (heard_t){.subscriber = {.endpoint = endpoint,
					  .context = zmq_ctx_new(),
					  .loop = &heard->loop,
					  .message = message_came,
					  .lost = connection_lost,
					  .ctx = heard}};
	assert_int_equal(kvp_loop_open(&heard->loop), KV_OK);
	heard->loop.handlers[KVP_FD_EVENTS].ready = fd_ready;
	heard->loop.handlers[KVP_FD_EVENTS].ctx = heard;
	kvp_subscriber_init(&heard->subscriber);
}

static void stop(heard_t *heard)
{
	kvp_subscriber_fini(&heard->subscriber);
	assert_int_equal(zmq_ctx_term(heard->subscriber.context), 0);
	kvp_loop_close(&heard->loop);
}

static void run_once(heard_t *heard)
{
	kvp_subscriber_tick(&heard->subscriber, kv_now_ns(&kv_env_posix));
	kvp_loop_wait(&heard->loop, heard->subscriber.is_pending ? 0 : 5);
	if (heard->subscriber.is_pending) {
		kvp_subscriber_serve(&heard->subscriber, kv_now_ns(&kv_env_posix));
	}
}

static void await_lost(heard_t *heard, uint64_t lost)
{
	uint64_t end_ns = kv_now_ns(&kv_env_posix) + WAIT_NS;

	while (heard->lost < lost) {
		assert_true(kv_now_ns(&kv_env_posix) < end_ns);
		run_once(heard);
	}
}

static void publish(void *socket, uint64_t seq, size_t len)
{
	static uint8_t payload[KVP_FRAME_MAX + 1];
	uint8_t number[8];

	memset(payload, (int)(seq & 0xff), len);
	for (unsigned i = 0; i < 8; i++) {
		number[i] = (uint8_t)(seq >> (56 - 8 * i));
	}
	assert_int_equal(zmq_send(socket, "kv@a@b", 6, ZMQ_SNDMORE), 6);
	assert_int_equal(zmq_send(socket, number, 8, ZMQ_SNDMORE), 8);
	assert_int_equal(zmq_send(socket, payload, len, 0), (int)len);
}

static void await_messages(heard_t *heard, void *socket, uint64_t n)
{
	uint64_t end_ns = kv_now_ns(&kv_env_posix) + WAIT_NS;

	for (uint64_t seq = 1; heard->messages < n; seq++) {
		assert_true(kv_now_ns(&kv_env_posix) < end_ns);
		if (socket) {
			publish(socket, seq, seq % 3 * 300);
		}
		run_once(heard);
	}
}

static void *open_publisher(void *context, const char *path)
{
	const int none = 0;
	void *socket = zmq_socket(context, ZMQ_PUB);

	assert_int_equal(zmq_setsockopt(socket, ZMQ_LINGER, &none, sizeof none), 0);
	assert_int_equal(zmq_setsockopt(socket, ZMQ_SNDHWM, &none, sizeof none), 0);
	assert_int_equal(zmq_bind(socket, path), 0);

	return socket;
}

KV_TEST(p9_events_come_from_libzmq_as_they_are_sent)
{
	char path[128];
	void *context = zmq_ctx_new(), *socket;
	uint64_t before;
	heard_t heard;

	snprintf(path, sizeof path, "ipc:///tmp/kvp-test-%d.events", (int)getpid());
	listen_to(&heard, path);
	run_once(&heard); /* nobody is there yet */
	socket = open_publisher(context, path);
	await_messages(&heard, socket, 20);
	before = heard.bytes;
	publish(socket, heard.last_seq + 1, KVP_FRAME_MAX);
	while (heard.bytes < before + KVP_FRAME_MAX) {
		run_once(&heard);
	}
	assert_int_equal(heard.subscriber.malformed + heard.lost + heard.gaps, 0);
	publish(socket, 778, KVP_FRAME_MAX + 1); /* more than a frame may have */
	await_lost(&heard, 1);
	assert_null(heard.subscriber.socket);
	before = heard.messages; /* and it is tried again */
	await_messages(&heard, socket, before + 1);
	zmq_close(socket); /* the engine ends, and another one comes */
	await_lost(&heard, 2);
	zmq_ctx_destroy(context);
	context = zmq_ctx_new();
	socket = open_publisher(context, path);
	await_messages(&heard, socket, heard.messages + 1);
	stop(&heard);
	zmq_close(socket);
	zmq_ctx_destroy(context);
	unlink(path + 6);
}

/* The descriptor is silent about messages that were left: all come, although many come at a time. */
KV_TEST(p9_all_messages_come_to_a_loop_that_was_late)
{
	enum { MANY = 5000 };
	void *context = zmq_ctx_new(), *socket;
	char path[128];
	heard_t heard;
	uint64_t first, end_ns;

	snprintf(path, sizeof path, "ipc:///tmp/kvp-test-%d.late", (int)getpid());
	socket = open_publisher(context, path);
	listen_to(&heard, path);
	await_messages(&heard, socket, 1);
	first = heard.last_seq + 1000;
	for (uint64_t seq = first; seq < first + MANY; seq++) {
		publish(socket, seq, 1000);
	}
	end_ns = kv_now_ns(&kv_env_posix) + WAIT_NS;
	while (heard.last_seq != first + MANY - 1) {
		assert_true(kv_now_ns(&kv_env_posix) < end_ns);
		run_once(&heard);
	}
	assert_true(heard.gaps <= 1); /* the one before the first */
	assert_int_equal(heard.lost, 0);
	stop(&heard);
	zmq_close(socket);
	zmq_ctx_destroy(context);
	unlink(path + 6);
}

static int listen_raw(char endpoint[64])
{
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t len = sizeof address;
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(bind(fd, (struct sockaddr *)&address, len), 0);
	assert_int_equal(listen(fd, 4), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
	snprintf(endpoint, 64, "tcp://127.0.0.1:%u", ntohs(address.sin_port));

	return fd;
}

static const uint8_t greeting_[] = {0xff, [8] = 1, [9] = 0x7f, [10] = 3, [12] = 'N', 'U', 'L', 'L', [64] = 4,
				    25,   5,       'R',        'E',      'A',        'D', 'Y', 11,  'S',
				    'o',  'c',     'k',        'e',      't',        '-', 'T', 'y', 'p',
				    'e',  0,       0,          0,        3,          'P', 'U', 'B'};

/* The greeting and READY; then the subscriber's, up to its subscription. */
static void greet(int fd)
{
	uint8_t said[256];
	size_t n = 0;

	assert_int_equal(send(fd, greeting_, sizeof greeting_, MSG_NOSIGNAL), sizeof greeting_);
	while (n < 3 || memcmp(said + n - 3, "\0\1\1", 3) != 0) {
		ssize_t got = recv(fd, said + n, sizeof said - n, 0);

		assert_true(got > 0);
		n += (size_t)got;
	}
}

KV_TEST(p10_a_publisher_that_says_anything_else_is_left)
{
	static const struct {
		const char *bytes;
		size_t len;
		int greet;
	} bad[] = {{"\xff       \x01\x7f\x03 PLAIN                                               ", 64, 0},
		   {"\x00\x01x", 3, 1},                             /* one frame */
		   {"\x01\x01x\x01\x01x\x01\x01x\x00\x01x", 12, 1}, /* four */
		   {"\x01\x01x\x01\x07xxxxxxx\x00\x01x", 15, 1}};   /* a number of seven bytes */
	char endpoint[64];
	int server = listen_raw(endpoint);

	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		uint64_t end_ns = kv_now_ns(&kv_env_posix) + WAIT_NS;
		heard_t heard;
		int fd;

		listen_to(&heard, endpoint);
		run_once(&heard);
		fd = accept(server, NULL, NULL);
		if (bad[i].greet) {
			greet(fd);
		}
		assert_int_equal(send(fd, bad[i].bytes, bad[i].len, MSG_NOSIGNAL), bad[i].len);
		while (heard.subscriber.malformed == 0) {
			assert_true(kv_now_ns(&kv_env_posix) < end_ns);
			run_once(&heard);
		}
		assert_null(heard.subscriber.socket);
		assert_int_equal(heard.messages, 0);
		close(fd);
		stop(&heard);
	}
	close(server);
}

/* What is no ZMTP, or says nothing, is left after 5 s; an announced frame beyond all bounds ends its connection. */
KV_TEST(p5_a_publisher_that_says_nothing_is_left_and_tried_again)
{
	char endpoint[64];
	int server = listen_raw(endpoint), fd;
	heard_t heard;

	listen_to(&heard, endpoint);
	for (unsigned i = 0; i < 2; i++) {
		run_once(&heard);
		assert_int_equal(heard.subscriber.state, KVP_SUBSCRIBER_CONNECTING);
		fd = accept(server, NULL, NULL);
		if (i == 1) {
			assert_int_equal(send(fd, "HTTP/1.1 400 Bad Request\r\n\r\n", 28, MSG_NOSIGNAL), 28);
		}
		run_once(&heard);
		kvp_subscriber_tick(&heard.subscriber, heard.subscriber.due_ns); /* as if it were late */
		assert_null(heard.subscriber.socket);
		heard.subscriber.due_ns = 0;
		close(fd);
	}
	run_once(&heard);
	fd = accept(server, NULL, NULL);
	greet(fd);
	assert_int_equal(send(fd, "\x02\x7f\xff\xff\xff\xff\xff\xff\xff", 9, MSG_NOSIGNAL), 9);
	await_lost(&heard, 1);
	assert_int_equal(heard.messages, 0);
	close(fd);
	close(server);
	stop(&heard);
}

KV_TEST(p10_endpoints_are_addresses)
{
	static const char *const bad[] = {"",
					  "tcp://",
					  "tcp://:1",
					  "tcp://host:1",
					  "tcp://*:1",
					  "tcp://1.2.3.4",
					  "tcp://1.2.3.4:x",
					  "udp://1.2.3.4:1",
					  "ipc://relative"};

	assert_int_equal(kvp_endpoint_check("tcp://1.2.3.4:5557"), KV_OK);
	assert_int_equal(kvp_endpoint_check("tcp://[::1]:5557"), KV_OK);
	assert_int_equal(kvp_endpoint_check("ipc:///run/x"), KV_OK);
	for (size_t i = 0; i < KV_COUNT_OF(bad); i++) {
		assert_int_equal(kvp_endpoint_check(bad[i]), KV_ERR_CONFIG);
	}
}
